// The products of codes for AArch64 with the dot products of bytes.
#define MHA_KERNELS_NEON
#define MHA_KERNELS_DOTPROD
#include "kernels/codes.h"

namespace mha {
constexpr CodeKernels codes_neon_dotprod = {encode_rows<Vector>, project_codes<Vector>};
}  // namespace mha
