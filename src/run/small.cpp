#include "small.h"

#include <stddef.h>

#include <algorithm>
#include <type_traits>

#include "schedule.h"

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

// The same for the arguments of a call: the bits that must be 0 in each of its words. (A struct
// with the fields cleared would wait for the writes when it is read.)
struct OtherFields {
  using Args = mha_forward_args;
  static_assert(std::has_unique_object_representations_v<Args>, "it has no padding");

  uint32_t bits[sizeof(Args) / sizeof(uint32_t)] = {};

  constexpr OtherFields() {
    for (uint32_t &word : bits) word = ~0u;
    clear(offsetof(Args, struct_size), sizeof(Args::struct_size));
    clear(offsetof(Args, scheduler), sizeof(Args::scheduler));
    clear(offsetof(Args, batch), sizeof(Args::batch));
    clear(offsetof(Args, n_q), sizeof(Args::n_q));
    clear(offsetof(Args, n_kv), sizeof(Args::n_kv));
    clear(offsetof(Args, query.data), sizeof(Args::query.data));
    clear(offsetof(Args, query.strides), sizeof(Args::query.strides));
    clear(offsetof(Args, output.data), sizeof(Args::output.data));
    clear(offsetof(Args, output.strides), sizeof(Args::output.strides));
    bits[offsetof(Args, flags) / sizeof(uint32_t)] = ~MHA_CAUSAL;
    bits[offsetof(Args, query.type) / sizeof(uint32_t)] = ~MHA_TYPE_F32;
    bits[offsetof(Args, output.type) / sizeof(uint32_t)] = ~MHA_TYPE_F32;
  }
  constexpr void clear(size_t offset, size_t bytes) {
    for (size_t i = 0; i < bytes; i += sizeof(uint32_t)) bits[(offset + i) / sizeof(uint32_t)] = 0;
  }

  bool are_zero_in(const Args &args) const {
    const char *const bytes = reinterpret_cast<const char *>(&args);
    uint32_t some = 0;
    for (size_t i = 0; i < sizeof args / sizeof(uint32_t); ++i) {
      uint32_t word;
      memcpy(&word, bytes + i * sizeof word, sizeof word);
      some |= word & bits[i];
    }
    return some == 0;
  }
};
constexpr OtherFields other_fields;

}  // namespace

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

bool is_small(const mha_layer &layer, const mha_forward_args &args) {
  const bool has_few_rows = args.n_q > 0 && args.n_q <= layer.small.max_rows && args.batch > 0;
  // Waking threads takes longer than computing max_rows rows.
  const bool is_shared_out = has_few_rows && threads_of(args.scheduler) > 1 &&
                             args.batch > layer.small.max_rows / args.n_q;
  return has_few_rows && !is_shared_out && other_fields.are_zero_in(args);
}

int64_t small_workspace_bytes(const SmallLayer &layer, int64_t n) {
  const int64_t rows = 2 * n * layer.stride, keys = layer.k_columns * tile_keys,
                contexts = 2 * layer.context_stride;
  return (rows + keys + contexts) * static_cast<int64_t>(sizeof(float)) + 63;
}

}  // namespace mha
