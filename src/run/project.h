// Projections of a call: which input rows times which packed matrices, and where the columns go.
#pragma once

#include "../base/schedule.h"
#include "../base/workspace.h"
#include "../objects/layer.h"

namespace mha {

constexpr int64_t max_products = 4;  // of a stage: W_Q, W_G, W_K and W_V

// One or more matrices multiplied by the same input rows: for self-attention W_Q|W_G|W_K|W_V, in
// one pass over the rows.
struct Product {
  Projection parts[max_products];
  int64_t num_parts;
  int64_t plain_stride;        // BLAS: of the parts' common matrix
  const float *plain_weights;  // BLAS: the first part's matrix; the others lie beside it
};

// What a product needs in the workspace: offsets in bytes from its start.
struct ProductPlan {
  int64_t results;  // of sgemm
  int64_t widened;  // of sgemm: input rows as contiguous floats, unless the caller's rows serve
  // Input rows as the kernels take them, unless they take the caller's.
  int64_t ready, ready_per_thread;
};

// Whether the kernels read rows of such numbers where they are.
bool takes_rows_as_given(const mha_layer &layer, Storage input);

// Plans a product of at most `rows` rows of `input_width` numbers with matrices of `columns`
// columns together. `input`: how the rows are stored. has_padding: there may be padding between
// them.
ProductPlan plan_products(const mha_layer &layer, Storage input, bool has_padding, Count rows,
                          int64_t input_width, int64_t columns, int64_t num_threads,
                          WorkspaceLayout *layout);

// The product of some rows with one of the layer's matrices. Its destination and its tap are yet to
// be set.
void describe_projection(const mha_layer &layer, MatrixName name, const InputRows &x, int64_t rows,
                         Projection *projection);

// Runs all products: on the layer's kernels, or through its sgemm.
void run_products(const mha_layer &layer, const Product *products, int64_t num_products,
                  const mha_scheduler *scheduler, UnitCounter *counter, const ProductPlan &memory,
                  unsigned char *workspace);

}  // namespace mha
