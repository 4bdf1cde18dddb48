// The worked example that mha explain shows: 3 tokens, 2 heads.
#pragma once

#include <cstdint>

#include "inputs.h"
#include "layer.h"

namespace command {

// A whole layer and its input. Its scores are so large that softmax gives nearly all weight to one token.
LayerWeights example_weights();
CallInputs example_inputs();

// Queries, keys and values of the size that trained layers have, grouped by heads: [num_heads, n, head_dim].
struct GroupedExample {
  const float *q;
  const float *k;
  const float *v;
  int64_t num_heads;
  int64_t n;
  int64_t head_dim;
};
GroupedExample grouped_example();

}  // namespace command
