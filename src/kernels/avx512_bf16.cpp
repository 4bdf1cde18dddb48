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
    round_rows, project, nullptr, [] {
      return is_as_defined([](const float *x, const float *w, float *sums) {
        Vector even = all(0.0f), odd = even;
        for (int i = 0; i < bf16_step / 2; i += 2) {
          const Vector x0 = all(x[i]), x1 = all(x[i + 1]), w0 = load(w + i * Vector::size),
                       w1 = load(w + (i + 1) * Vector::size);
          even = plus_product(firsts_of(x0, x1), firsts_of(w0, w1), even);
          odd = plus_product(seconds_of(x0, x1), seconds_of(w0, w1), odd);
        }
        store(sums, load(sums) + (even + odd));
      });
    }};
}  // namespace mha
#endif
