#include "contract/kernel_functions.h"

#include <mha.h>

#include "kernels/elements.h"
#include "kernels/functions.h"
#include "kernels/pairs.h"

namespace mha {
namespace {

Vector tanh_of_one(Vector x) {
  Vector one[1] = {x};
  tanh_of(one);
  return one[0];
}

Vector positive_of(Vector x) { return max_of(x, all<Vector>(0.0f)); }

template <Storage storage>
void there_and_back(const float *x, int64_t count, float *y) {
  for (int64_t i = 0; i < count; i += 16) {
    uint16_t numbers[16];
    narrow(storage, x + i, 16, numbers);
    widen(storage, numbers, 16, y + i);
  }
}

CodeScale scale_of(float x, int32_t most) { return code_scale_of(bits_of(x) & 0x7fffffffu, most); }

bool takes_pairs(int how) {
  return is_as_defined([how](const float *x, const float *w, float *sums) {
    Vector even = all<Vector>(0.0f), odd = even;
    for (int i = 0; i < bf16_step / 2; ++i, w += Vector::size) {
      const Vector x_pair = all<Vector>(x[i]), w_pair = load<Vector>(w);
      even = mul_add(first_of_pairs(x_pair), first_of_pairs(w_pair), even);
      Vector &chain = how == 1 ? even : odd;
      chain = mul_add(second_of_pairs(x_pair), second_of_pairs(w_pair), chain);
    }
    const Vector sum = load<Vector>(sums);
    store(sums, how == 2 ? (sum + even) + odd : sum + (even + odd));
  });
}

void fma_of_triples(const float *x, int64_t count, float *y) {
  constexpr int64_t lanes = Vector::size;
  for (int64_t i = 0; i < count; i += lanes) {
    float terms[3][lanes];
    for (int64_t k = 0; k < 3 * lanes; ++k) terms[k % 3][k / 3] = x[3 * i + k];
    const Vector a = load<Vector>(terms[0]), b = load<Vector>(terms[1]), c = load<Vector>(terms[2]);
    store(y + i, mul_add(a, b, c));
  }
}

int32_t greatest_codes4(float x) {
  const float factor = int4_scale_of(x, x - x == 0.0f).factor;
  return 16 * int4_of(x, factor) + int4_of(-x, factor);
}

}  // namespace
}  // namespace mha

using namespace mha;  // NOLINT: this file is about nothing else

#define MHA_OF_VECTORS(function)                                                                   \
  [](const float *x, int64_t count, float *y) {                                                    \
    for (int64_t i = 0; i < count; i += Vector::size) store(y + i, function(load<Vector>(x + i))); \
  }
#define MHA_OF_FLOATS(result)                                              \
  [](const float *x, int64_t count, float *y) {                            \
    for (int64_t i = 0; i < count; ++i) y[i] = static_cast<float>(result); \
  }

extern const KernelFunctions MHA_TESTED_FUNCTIONS;
constexpr KernelFunctions MHA_TESTED_FUNCTIONS = {
    MHA_TESTED_SET,
    MHA_OF_VECTORS(exp_of),
    MHA_OF_FLOATS(exp_of(x[i])),
    MHA_OF_VECTORS(tanh_of_one),
    MHA_OF_VECTORS(sigmoid_of),
    MHA_OF_VECTORS(softplus_of),
    MHA_OF_FLOATS(log_of(x[i])),
    MHA_OF_FLOATS(1.0f / __builtin_sqrtf(x[i])),
    MHA_OF_VECTORS(positive_of),
    there_and_back<Storage::f16>,
    there_and_back<Storage::bf16>,
    MHA_OF_FLOATS(code_of(x[i], 1.0f)),
    MHA_OF_FLOATS(scale_of(x[i], 127).scale),
    MHA_OF_FLOATS(scale_of(x[i], 127).factor),
    MHA_OF_FLOATS(code_of(x[i], scale_of(x[i], 127).factor)),
    MHA_OF_FLOATS(code_of(x[i], scale_of(x[i], 32767).factor)),
    MHA_OF_FLOATS(greatest_codes4(x[i])),
    takes_pairs,
    fma_of_triples};
