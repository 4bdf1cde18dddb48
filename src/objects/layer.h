// A layer: its shape, and where in the packed buffer its matrices lie.
#pragma once

#include <string.h>

#include "../check/report.h"
#include "../kernels/kernels.h"
#include "../plan/count.h"
#include "../storage.h"
#include "mha.h"

namespace mha {

// All dimensions resolved: nothing is 0 or derived any more. It stands so in the header of a packed
// buffer.
struct LayerShape {
  int64_t query_dim;
  int64_t key_dim, value_dim;  // 0 without W_K and W_V: such a layer only asks a cache
  int64_t output_dim;          // width of y; num_heads * head_dim_v without W_O
  int64_t num_heads, num_kv_heads, head_dim, head_dim_v;
  float scale;
  uint32_t has_output;  // there is a W_O
  uint32_t gate;        // MHA_GATE_*
  Arithmetic arithmetic;
  int64_t gate_dim;  // 0 without a gate

  int64_t q_columns() const { return num_heads * head_dim; }
  int64_t k_columns() const { return num_kv_heads * head_dim; }
  int64_t v_columns() const { return num_kv_heads * head_dim_v; }
  int64_t context_columns() const { return num_heads * head_dim_v; }
  // A linear layer has no heads, and a W_O alone.
  bool has_heads() const { return num_heads != 0; }
  int64_t output_depth() const { return has_heads() ? context_columns() : query_dim; }
  int64_t g_columns() const { return num_heads * gate_dim; }
  bool only_asks() const { return has_heads() && key_dim == 0; }
  int64_t input_columns() const {
    return q_columns() + g_columns() + (only_asks() ? 0 : k_columns() + v_columns());
  }
  // W_Q|W_G|W_K|W_V side by side can be asked of a BLAS, whose sizes are int.
  bool fits_sgemm() const { return input_columns() <= INT32_MAX; }
  bool has_one_input_width() const { return key_dim == query_dim && value_dim == query_dim; }
};

// How the weights of a packed buffer are laid out.
enum class PackedKind : uint32_t {
  panels_f32 = 1,  // for the library's kernels: [columns / 48][depth][48]
  plain_f32 = 2,   // for a BLAS: [depth, columns]; W_Q|W_G|W_K|W_V is one matrix where the inputs
                   // have one width
  panels_f16 = 3,  // as Projection says, likewise below
  panels_bf16 = 4,
  panels_int8 = 5,
  panels_int4 = 6,
  fours_int4 = 7,  // for integer arithmetic
  fours_int8 = 8,
};

inline PackedKind kind_of(Storage storage, Arithmetic arithmetic) {
  if (arithmetic != Arithmetic::f32)
    return storage == Storage::int8 ? PackedKind::fours_int8 : PackedKind::fours_int4;
  constexpr PackedKind kinds[] = {PackedKind::panels_f32, PackedKind::panels_f16,
                                  PackedKind::panels_bf16, PackedKind::panels_int8,
                                  PackedKind::panels_int4};
  return kinds[static_cast<int>(storage)];
}

inline Storage storage_of(PackedKind kind) {
  constexpr Storage storages[] = {Storage::f32,  Storage::f32,  Storage::f16,  Storage::bf16,
                                  Storage::int8, Storage::int4, Storage::int4, Storage::int8};
  return storages[static_cast<int>(kind) - 1];
}

inline bool has_fours(PackedKind kind) {
  return kind == PackedKind::fours_int8 || kind == PackedKind::fours_int4;
}

// Of a panel of a matrix. No sum can overflow: depths are below 2^31.
inline int64_t panel_bytes(int64_t depth, PackedKind kind) {
  return panel_bytes(depth, storage_of(kind), has_fours(kind));
}

// Those of the query input are neighbours.
enum MatrixName { matrix_q, matrix_g, matrix_k, matrix_v, matrix_o, num_matrices };

// One weight matrix of the layer in the packed buffer; offsets in bytes from the buffer's start.
struct PackedMatrix {
  int64_t depth, columns;
  int64_t stride;  // of a plain matrix, in floats
  int64_t weights_offset, bias_offset;
  int64_t scales_offset;  // 0 where there are none
};

struct PackedLayout {
  PackedMatrix matrices[num_matrices];  // those that the layer lacks without columns
  int64_t bytes;                        // -1 if it overflows
};

PackedLayout packed_layout(const LayerShape &shape, PackedKind kind);

// No finite weight is beyond what `kind` can hold. Reads the arrays.
mha_status check_range(Report report, const LayerShape &shape, PackedKind kind,
                       const mha_layer_weights &weights);

// Writes header, weights and biases. The buffer has layout.bytes.
void pack_layer(const LayerShape &shape, PackedKind kind, const PackedLayout &layout,
                const mha_layer_weights &weights, void *buffer);

// Checks the header of a packed buffer in constant time.
mha_status read_packed(Report report, const void *buffer, size_t buffer_bytes, LayerShape *shape,
                       PackedKind *kind, PackedLayout *layout);

// Of a buffer that read_packed has accepted.
bool packed_checksum_holds(PackedKind kind, const PackedLayout &layout, const void *buffer);

inline int64_t panels_of(int64_t columns) { return blocks_of(columns, panel_columns); }

// What tells a layer from other memory, and from one that was destroyed or moved.
inline uint64_t magic_at(const mha_layer *layer) {
  return 0x6d68612d6c617972u ^ reinterpret_cast<uintptr_t>(layer);
}
inline bool is_layer(const mha_layer *layer) {
  uint64_t magic;
  memcpy(&magic, layer, sizeof magic);  // which may not even be aligned
  return magic == magic_at(layer);
}

}  // namespace mha

struct mha_layer {
  uint64_t magic;  // mha::magic_at its address, until it is destroyed
  mha::LayerShape shape;
  mha::PackedLayout layout;
  const unsigned char *packed;
  mha::Storage storage;
  const mha::Kernels *kernels;
  mha_sgemm sgemm;  // null: native
  mha_allocator allocator;
  mha::SmallLayer small;
  void *block;  // what the allocator gave; null for a view

  const void *weights(mha::MatrixName name) const {
    return packed + layout.matrices[name].weights_offset;
  }
  const float *scales(mha::MatrixName name) const {
    const int64_t offset = layout.matrices[name].scales_offset;
    return offset ? reinterpret_cast<const float *>(packed + offset) : nullptr;
  }
  const float *bias(mha::MatrixName name) const {
    return reinterpret_cast<const float *>(packed + layout.matrices[name].bias_offset);
  }
};
