// The products of codes for AArch64 with the dot products of bytes.
#define MHA_MULTIPLIES_BYTES
#define MHA_VECTORS "neon.h"
#define xsimd mha_xsimd_neon_dotprod
#include "../compiler.h"

#if defined(MHA_HAS_NEON_DOTPROD) || defined(MHA_HAS_ALL_aarch64)
#include "project_integers.h"

namespace mha {
constexpr ProductKernels codes_neon_dotprod = {encode_rows, project_codes, nullptr, nullptr};
}  // namespace mha
#endif
