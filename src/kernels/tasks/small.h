// Small layers and calls (kernels/small.h).
#pragma once

#include "rows.h"

namespace mha {

// The most columns of a matrix, so that each sum is one chain of at most dot_block terms; and the
// most rows of a sequence, so that its keys are one tile.
constexpr int64_t small_columns = 128;
constexpr int64_t small_rows = tile_keys;

// A matrix of a small layer, packed as Projection says.
struct SmallMatrix {
  const float *panels, *bias;
  int64_t panel_floats, last_panel;
};

// What the kernels need to know of a small layer.
struct SmallLayer {
  int64_t max_rows;  // of a sequence; 0: the layer is not small
  SmallMatrix qkv[3], o;
  int64_t depth;           // width of an input row
  int64_t max_columns;     // of W_Q, W_K and W_V
  int64_t stride;          // of rows of q and v in the scratch memory
  int64_t context_stride;  // of rows of context, with room for 16 more
  int64_t num_kv_heads, heads_per_kv;
  int64_t head_dim, head_dim_v, k_columns, context_columns, output_dim;
  bool has_output;
  float scale;
};

// A small call: self-attention of whole sequences of n rows each.
struct SmallCall {
  int64_t batch, n;
  bool is_causal;
  StridedRows x;
  float *output;
  int64_t output_batch_stride, output_row_stride;
};

}  // namespace mha
