// The products of codes for AArch64 with the dot products of bytes.
#define MHA_KERNELS_NEON
#define MHA_KERNELS_DOTPROD
#include "kernels/attention_codes.h"

namespace mha {
constexpr CodeKernels codes_neon_dotprod = make_code_kernels<Vector>();
}  // namespace mha
