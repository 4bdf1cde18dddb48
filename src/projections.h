// Projections of a call: which input rows times which packed matrices, and where the columns go.
#pragma once

#include "layer.h"
#include "schedule.h"

namespace mha {

// One or more matrices multiplied by the same input rows: for self-attention W_Q|W_K|W_V, in one pass over the rows.
struct Product {
  Projection parts[3];
  int64_t num_parts;
  int64_t plain_stride;        // BLAS: of the parts' common matrix
  const float *plain_weights;  // BLAS: the first part's matrix; the others lie beside it
};

constexpr int64_t sgemm_rows = 512;  // rows that go through sgemm at once, which bounds the memory for its result

// Runs all products: on the layer's kernels, or through its sgemm with `scratch` for sgemm_rows rows of results.
void run_products(const mha_layer &layer, const Product *products, int64_t num_products, const mha_scheduler *scheduler,
                  UnitCounter *counter, float *scratch);

}  // namespace mha
