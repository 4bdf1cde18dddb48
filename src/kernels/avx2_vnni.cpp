// The products of codes for x86-64 with AVX2 and AVX-VNNI.
#define MHA_KERNELS_AVX2
#define MHA_KERNELS_VNNI
#include "kernels/attention_codes.h"

namespace mha {
constexpr CodeKernels codes_avx2_vnni = make_code_kernels<Vector>();
}  // namespace mha
