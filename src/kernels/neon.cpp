// The kernels for AArch64.
#define MHA_VECTORS "neon.h"
#define xsimd mha_xsimd_neon
#include "../compiler.h"

#if defined(MHA_HAS_NEON) || defined(MHA_HAS_ALL_aarch64)
#include "mha.h"
#include "table.h"

namespace mha {
constexpr Kernels kernels_neon = make_kernels<Vector>(MHA_INSTRUCTION_SET_NEON, &own_codes);
#if defined(MHA_HAS_NEON_DOTPROD) || defined(MHA_HAS_ALL_aarch64)
constexpr Kernels kernels_neon_dotprod =
    make_kernels<Vector>(MHA_INSTRUCTION_SET_NEON_DOTPROD, &codes_neon_dotprod);
#endif
#if defined(MHA_HAS_NEON_I8MM) || defined(MHA_HAS_ALL_aarch64)
constexpr Kernels kernels_neon_i8mm =
    make_kernels<Vector>(MHA_INSTRUCTION_SET_NEON_I8MM, &codes_neon_i8mm);
#endif
}  // namespace mha
#endif
