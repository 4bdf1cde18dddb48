// Norms of queries, keys, values and the context.
#ifndef MHA_TESTS_SUPPORT_NORM_H
#define MHA_TESTS_SUPPORT_NORM_H

#include <cstdint>
#include <vector>

#include "support/fixtures.h"

namespace support {

// Weights near 1, or biases near 0, for so many heads, or for all of them where head_stride is 0.
// What lies between heads is NaN.
inline std::vector<float> NormWeights(Random *random, float around, int64_t heads, int64_t head_dim,
                                      int64_t head_stride) {
  if (head_stride == 0) heads = 1;
  std::vector<float> weights((heads - 1) * head_stride + head_dim, FromBits(0x7fc0dead));
  for (int64_t h = 0; h < heads; h++) {
    for (int64_t d = 0; d < head_dim; d++)
      weights[h * head_stride + d] = around + 0.3f * random->Normal();
  }
  return weights;
}

inline void FillNormWeights(Random *random, const AttentionSizes &sizes, bool of_queries,
                            bool of_keys, NormArrays *norm) {
  const auto fill = [&](float around, int64_t heads) {
    return NormWeights(random, around, heads, sizes.head_dim, norm->head_stride);
  };
  if (of_queries) norm->q_weight = fill(1, sizes.num_heads);
  if (of_keys) norm->k_weight = fill(1, sizes.num_kv_heads);
  if (of_queries && norm->is_layer) norm->q_bias = fill(0, sizes.num_heads);
  if (of_keys && norm->is_layer) norm->k_bias = fill(0, sizes.num_kv_heads);
}

inline NormArrays RandomNorm(Random *random, const AttentionSizes &sizes) {
  NormArrays norm;
  norm.is_layer = random->Coin();
  norm.is_of_all_heads = random->Chance(0.4);
  norm.is_after_rotation = random->Chance(0.4);
  norm.is_of_values = random->Coin();
  norm.use_defaults = norm.is_of_all_heads && random->Coin();
  norm.epsilon = random->Pick<float>({1e-6f, 1e-5f, 0.25f, 0x1p-149f});
  norm.head_stride = norm.is_of_all_heads
                         ? sizes.head_dim
                         : random->Pick<int64_t>({0, 0, sizes.head_dim, sizes.head_dim + 3});
  FillNormWeights(random, sizes, random->Chance(0.7), random->Chance(0.7), &norm);
  if (random->Chance(0.2)) norm.q_bias.clear();
  if (random->Chance(0.2)) norm.k_weight.clear();
  return norm;
}

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_NORM_H
