// A layer: its shape, and where in the packed buffer its matrices are.
//
// A packed buffer (pack.cpp) holds the weights of a layer in the order in which the kernels read
// them. An mha_layer refers to a packed buffer and adds what belongs to one process: the kernels,
// the caller's BLAS and allocator. mha_layer_create puts both into one block of memory.
// mha_layer_view makes the object alone, for a buffer that the caller keeps.
#pragma once

#include <string.h>

#include "../base/count.h"
#include "../base/report.h"
#include "../kernels/kernels.h"
#include "../storage.h"
#include "mha.h"

namespace mha {

// The dimensions of a layer after all defaults are resolved. The header of a packed buffer contains
// this struct, so its fields and their order are part of the format.
//
// A linear layer has a W_O and nothing else: num_heads is 0, query_dim is the width of its input.
struct LayerShape {
  int64_t query_dim;
  int64_t key_dim, value_dim;  // 0 without W_K and W_V, for a layer that reads another one's cache
  int64_t output_dim;          // width of y; num_heads * head_dim_v without W_O
  int64_t num_heads, num_kv_heads, head_dim, head_dim_v;
  float scale;
  uint32_t has_output;  // 1 with a W_O
  uint32_t gate;        // MHA_FUNCTION_*
  Arithmetic arithmetic;
  int64_t gate_dim;  // 0 without a gate
  int64_t group;     // inputs that share a scale; 0: all of them, or int4_chain where it is int4
  Storage scale_storage;
  uint32_t offsets;  // a bit, 1 << MatrixName, for each matrix that has them

  int64_t group_of(Storage storage) const {
    return group == 0 && storage == Storage::int4 ? int4_chain : group;
  }

  bool has_heads() const { return num_heads != 0; }
  bool only_asks() const { return has_heads() && key_dim == 0; }
  bool has_one_input_width() const { return key_dim == query_dim && value_dim == query_dim; }

  // Columns of the packed matrices, and of W_Q, W_G, W_K and W_V side by side.
  int64_t q_columns() const { return num_heads * head_dim; }
  int64_t g_columns() const { return num_heads * gate_dim; }
  int64_t k_columns() const { return num_kv_heads * head_dim; }
  int64_t v_columns() const { return num_kv_heads * head_dim_v; }
  int64_t input_columns() const {
    return q_columns() + g_columns() + (only_asks() ? 0 : k_columns() + v_columns());
  }
  // A BLAS has sizes of type int.
  bool fits_sgemm() const { return input_columns() <= INT32_MAX; }

  // The width of a row of the context, and the depth of W_O, which multiplies it.
  int64_t context_columns() const { return num_heads * head_dim_v; }
  int64_t output_depth() const { return has_heads() ? context_columns() : query_dim; }
};

// How the weights of a packed buffer are laid out.
//
// In a panel, 48 columns of a matrix are side by side and the terms of the products follow each
// other, [columns / 48][depth][48]; Projection (kernels/tasks/projection.h) describes the layouts
// of fewer bits. Interleaved panels are for integer and bf16 arithmetic, which read four or two
// terms of a column at once. A plain matrix, for a BLAS, is [depth, columns], and W_Q|W_G|W_K|W_V
// are one matrix if the inputs have one width.
struct PackedKind {
  Storage storage;
  bool is_interleaved, is_plain;

  bool operator==(PackedKind o) const {
    return storage == o.storage && is_interleaved == o.is_interleaved && is_plain == o.is_plain;
  }
};

// The kinds by their number in the header, from 1 on.
constexpr PackedKind packed_kinds[] = {
    {Storage::f32, false, false},  {Storage::f32, false, true},   {Storage::f16, false, false},
    {Storage::bf16, false, false}, {Storage::int8, false, false}, {Storage::int4, false, false},
    {Storage::int4, true, false},  {Storage::int8, true, false},  {Storage::bf16, true, false},
    {Storage::int5, true, false},  {Storage::int6, true, false}};
constexpr uint32_t num_packed_kinds = sizeof packed_kinds / sizeof *packed_kinds;

// Whether this many inputs can share a scale.
inline bool is_group_size(int64_t group) {
  return group >= min_group && group <= max_group && (group & (group - 1)) == 0;
}

// The size of one panel of a matrix. It cannot overflow, because depths are below 2^31.
inline int64_t panel_bytes(int64_t depth, PackedKind kind) {
  return panel_bytes(depth, kind.storage, kind.is_interleaved);
}

inline int64_t panels_of(int64_t columns) { return blocks_of(columns, panel_columns); }

// The matrices in the order of the packed buffer. W_Q and W_G are neighbours because they multiply
// the same input, and W_K and W_V follow for layers whose inputs are all the same.
enum MatrixName { matrix_q, matrix_g, matrix_k, matrix_v, matrix_o, num_matrices };

// The place of one weight matrix. Offsets count bytes from the start of the buffer.
struct PackedMatrix {
  int64_t depth, columns;
  int64_t stride = 0;  // of a plain matrix, in floats
  int64_t weights_offset = 0, bias_offset = 0;
  int64_t scales_offset = 0, offsets_offset = 0;  // 0 without them
};

struct PackedLayout {
  PackedMatrix matrices[num_matrices];  // a matrix that the layer lacks has 0 columns
  int64_t bytes;                        // -1 if the size overflows
};

// Computes the layout, which the shape and the kind determine.
PackedLayout packed_layout(const LayerShape &shape, PackedKind kind);

// What a packed buffer holds, and where.
struct PackedForm {
  LayerShape shape;
  PackedKind kind;
  PackedLayout layout;

  bool has_float_panels() const { return kind.storage == Storage::f32 && !kind.is_plain; }
};

// Reads what is stored in few bits, and reports the first weight that is finite and too large for
// f16, and the first code, scale or offset that its type does not hold exactly.
mha_status check_range(Report report, const PackedForm &form, const mha_layer_weights &weights);

// Writes all layout.bytes of the buffer.
void pack_layer(const PackedForm &form, const mha_layer_weights &weights, void *buffer);

// Checks the header of a packed buffer, in constant time, and reads what it says. After that, all
// parts of the layout are within buffer_bytes, whoever wrote the header.
mha_status read_packed(Report report, const void *buffer, size_t buffer_bytes, PackedForm *form);

// Whether everything after the header is as it was packed. read_packed has to come first.
bool packed_checksum_holds(const PackedForm &form, const void *buffer);

// A layer starts with a number that depends on its address. It tells a layer from other memory, and
// from a layer that was destroyed or moved. The pointer may be any, so it may not even be aligned.
inline uint64_t magic_at(const mha_layer *layer) {
  return 0x6d68612d6c617972u ^ reinterpret_cast<uintptr_t>(layer);
}
inline bool is_layer(const mha_layer *layer) {
  uint64_t magic;
  memcpy(&magic, layer, sizeof magic);
  return magic == magic_at(layer);
}

}  // namespace mha

// What a pointer to a layer points to. The packed buffer may be the caller's, or be allocated with
// the layer.
struct mha_layer {
  uint64_t magic;  // mha::magic_at its address, until it is destroyed
  mha::LayerShape shape;
  mha::PackedLayout layout;
  const unsigned char *packed;
  mha::Storage storage;
  const mha::Kernels *kernels;
  mha_sgemm sgemm;  // null for a layer in panels
  mha_allocator allocator;
  mha::SmallLayer small;
  void *block;  // the memory from the allocator; null for a view

  const void *weights(mha::MatrixName name) const {
    return packed + layout.matrices[name].weights_offset;
  }
  const void *scales(mha::MatrixName name) const {
    const int64_t offset = layout.matrices[name].scales_offset;
    return offset ? packed + offset : nullptr;
  }
  const void *offsets(mha::MatrixName name) const {
    const int64_t offset = layout.matrices[name].offsets_offset;
    return offset ? packed + offset : nullptr;
  }
  const float *bias(mha::MatrixName name) const {
    return reinterpret_cast<const float *>(packed + layout.matrices[name].bias_offset);
  }
};
