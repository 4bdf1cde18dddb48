// The kernels for x86-64 with AVX-512 F, CD, BW, VL and DQ.
#define MHA_VECTORS "avx512.h"
#define xsimd mha_xsimd_avx512
#include "../compiler.h"

#if defined(MHA_HAS_AVX512) || defined(MHA_HAS_ALL_x86_64)
#include "mha.h"
#include "table.h"

namespace mha {
constexpr Kernels kernels_avx512 = make_kernels<Vector>(MHA_INSTRUCTION_SET_AVX512, &own_codes);
#if defined(MHA_HAS_AVX512_VNNI) || defined(MHA_HAS_ALL_x86_64)
constexpr Kernels kernels_avx512_vnni =
    make_kernels<Vector>(MHA_INSTRUCTION_SET_AVX512_VNNI, &codes_avx512_vnni);
constexpr const ProductKernels *best_codes = &codes_avx512_vnni;
#else
constexpr const ProductKernels *best_codes = &own_codes;
#endif
#if defined(MHA_HAS_AVX512_BF16) || defined(MHA_HAS_ALL_x86_64)
constexpr Kernels kernels_avx512_bf16 =
    make_kernels<Vector>(MHA_INSTRUCTION_SET_AVX512_BF16, best_codes, &pairs_avx512_bf16);
#endif
#if defined(MHA_HAS_AVX512_AMX) || defined(MHA_HAS_ALL_x86_64)
constexpr Kernels kernels_avx512_amx =
    make_kernels<Vector>(MHA_INSTRUCTION_SET_AVX512_AMX, best_codes, &pairs_avx512_amx);
#endif
}  // namespace mha
#endif
