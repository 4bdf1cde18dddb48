// The library's product of rows with packed weights on its own, which no public function is for.
#pragma once

#include <stdint.h>

#include "mha.h"

namespace bench {

// y [rows, q | k | v columns] = x [rows, query_dim] * W_Q|W_K|W_V of a layer that has them of one
// input width.
void run_qkv_product(const mha_layer &layer, const float *x, int64_t rows, float *y);

}  // namespace bench
