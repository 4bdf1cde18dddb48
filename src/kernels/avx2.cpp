// The kernels for x86-64 with AVX2, FMA and F16C.
#define MHA_VECTORS "avx2.h"
#define xsimd mha_xsimd_avx2
#include "../compiler.h"

#if defined(MHA_HAS_AVX2) || defined(MHA_HAS_ALL_x86_64)
#include "mha.h"
#include "table.h"

namespace mha {
constexpr Kernels kernels_avx2 = make_kernels<Vector>(MHA_INSTRUCTION_SET_AVX2, &own_codes);
#if defined(MHA_HAS_AVX2_VNNI) || defined(MHA_HAS_ALL_x86_64)
constexpr Kernels kernels_avx2_vnni =
    make_kernels<Vector>(MHA_INSTRUCTION_SET_AVX2_VNNI, &codes_avx2_vnni);
#endif
}  // namespace mha
#endif
