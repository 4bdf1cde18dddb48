// The products of codes for AArch64 with the products of matrices of bytes, and the dot products.
#define MHA_KERNELS_NEON
#define MHA_KERNELS_DOTPROD
#define MHA_KERNELS_I8MM
#include "kernels/codes.h"

namespace mha {
constexpr CodeKernels codes_neon_i8mm = {encode_rows<Vector>, project_codes<Vector>};
}  // namespace mha
