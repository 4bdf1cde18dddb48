// The products of pairs of bf16 for x86-64 with AVX-512 and its BF16.
#define MHA_MULTIPLIES_PAIRS
#define MHA_VECTORS "avx512.h"
#define xsimd mha_xsimd_avx512_bf16
#include "../compiler.h"

#if defined(MHA_HAS_AVX512_BF16) || defined(MHA_HAS_ALL_x86_64)
#include "pairs.h"
#include "project.h"

namespace mha {
constexpr ProductKernels pairs_avx512_bf16 = {
    round_rows, project_pairs, nullptr, [] {
      return is_as_defined([](Vector x, Vector w, Vector sum) { return plus_product(x, w, sum); });
    }};
}  // namespace mha
#endif
