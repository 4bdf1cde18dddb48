// The products of codes for x86-64 with AVX2 and AVX-VNNI.
#define MHA_KERNELS_AVX2
#define MHA_KERNELS_VNNI
#include "kernels/codes.h"

namespace mha {
constexpr CodeKernels codes_avx2_vnni = {encode_rows<Vector>, project_codes<Vector>};
}  // namespace mha
