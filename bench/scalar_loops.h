// What one writes without a library, the rival of small layers: plain loops, which the compiler may vectorise as far as -O3 does.
#pragma once

#include <stdint.h>

namespace bench {

struct ScalarLayer {
  int64_t n, width, heads;
  bool is_causal;
  const float *w_qkv;  // [width, 3 * width]
  const float *w_o;    // [width, width]
  float *qkv;          // [n, 3 * width]
  float *context;      // [n, width]
  float *scores;       // [n]
};

// y [n, width] from x [n, width].
void run_scalar_loops(const ScalarLayer &layer, const float *x, float *y);

}  // namespace bench
