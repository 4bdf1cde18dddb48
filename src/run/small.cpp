#include "small.h"

#include <algorithm>

#include "../base/schedule.h"

namespace mha {
namespace {

// The small path computes what the fields cleared here say. All others must be 0, so that a layer
// with another option, also a new one, is not small.
bool has_small_options(LayerShape shape) {
  shape.query_dim = shape.key_dim = shape.value_dim = shape.output_dim = 0;
  shape.num_heads = shape.num_kv_heads = shape.head_dim = shape.head_dim_v = 0;
  shape.scale = 0.0f;
  shape.has_output = 0;
  const LayerShape none = {};
  return memcmp(&shape, &none, sizeof shape) == 0;
}

}  // namespace

// Every sum of a small layer is one chain of at most dot_block terms, and the keys of a sequence
// are one tile: then one function without blocks and units computes the same bits.
SmallLayer small_layer_of(const mha_layer &layer) {
  const LayerShape &shape = layer.shape;
  const int64_t max_columns =
      std::max(shape.q_columns(), std::max(shape.k_columns(), shape.v_columns()));
  const bool is_small = shape.has_heads() && has_small_options(shape) && layer.kernels->run_small &&
                        !layer.sgemm && layer.storage == Storage::f32 &&
                        shape.has_one_input_width() && shape.query_dim <= small_columns &&
                        shape.output_dim <= small_columns && max_columns <= small_columns &&
                        shape.context_columns() <= small_columns;
  SmallLayer small = {};
  if (!is_small) return small;
  small.stride = blocks_of(max_columns, tile_keys) * tile_keys;
  small.context_stride =
      blocks_of(std::max(max_columns, shape.context_columns()), tile_keys) * tile_keys + tile_keys;
  // For more rows the larger tiles of the stages are faster.
  small.max_rows = small.stride <= 64 ? small_rows : small.stride <= 96 ? 4 : 2;
  const auto describe = [&](MatrixName name) {
    const PackedMatrix &matrix = layer.layout.matrices[name];
    return SmallMatrix{static_cast<const float *>(layer.weights(name)), layer.bias(name),
                       matrix.depth * panel_columns, panels_of(matrix.columns) - 1};
  };
  small.qkv[0] = describe(matrix_q);
  small.qkv[1] = describe(matrix_k);
  small.qkv[2] = describe(matrix_v);
  small.o = describe(matrix_o);
  small.depth = shape.query_dim;
  small.max_columns = max_columns;
  small.num_kv_heads = shape.num_kv_heads;
  small.heads_per_kv = shape.num_heads / shape.num_kv_heads;
  small.head_dim = shape.head_dim;
  small.head_dim_v = shape.head_dim_v;
  small.k_columns = shape.k_columns();
  small.context_columns = shape.context_columns();
  small.output_dim = shape.output_dim;
  small.has_output = shape.has_output;
  small.scale = shape.scale;
  return small;
}

int64_t small_workspace_bytes(const SmallLayer &layer, int64_t n) {
  const int64_t rows = 2 * n * layer.stride, keys = layer.k_columns * tile_keys,
                contexts = 2 * layer.context_stride;
  return (rows + keys + contexts) * static_cast<int64_t>(sizeof(float)) + 63;
}

}  // namespace mha
