// The products of codes for AArch64 with the products of matrices of bytes, and the dot products.
#define MHA_MULTIPLIES_BYTES
#define MHA_KERNELS_I8MM
#define MHA_VECTORS "neon.h"
#define xsimd mha_xsimd_neon_i8mm
#include "../compiler.h"

#if defined(MHA_HAS_NEON_I8MM) || defined(MHA_HAS_ALL_aarch64)
#include "project_integers.h"

namespace mha {
constexpr ProductKernels codes_neon_i8mm = {encode_rows, project_codes, nullptr, nullptr};
}  // namespace mha
#endif
