// Packing copies the caller's weight matrices into the one buffer that a layer consists of.
//
// A packed buffer holds these parts, each of which begins at a multiple of 64 bytes:
//   header     PackedHeader: what the layer is, and checksums
//   weights    W_Q, W_G, W_K, W_V and W_O, in panels of 48 columns or plain for a BLAS
//   scales     of codes, one for each column or for each group of terms of a column; and offsets
//   biases     one float for each column, zero where the caller passes none
// It contains no pointers, so that a file of it can be mapped and used (mha_layer_view).
//
// This file describes the header and its checksums first, then the caller's matrices (Source).
// Two ways of packing follow: tiles copy floats that stay floats, and blocks convert all other
// weights. The functions of layer.h come last.

#include <stddef.h>
#include <string.h>

#include <algorithm>

#include "../base/buffer.h"
#include "../storage.h"
#include "layer.h"
#include "tiles.h"

namespace mha {
namespace {

constexpr int64_t float_bytes = sizeof(float);
constexpr int64_t tiles_across = panel_columns / tile_columns;  // of a panel

// The first bytes of a packed buffer. The offsets of all other parts follow from the shape and the
// kind, so the header does not store them.
struct PackedHeader {
  BufferHead head;
  uint32_t kind;
  uint64_t bytes;             // of the whole buffer
  uint64_t payload_checksum;  // of everything after the header
  LayerShape shape;
  unsigned char reserved[256 - 152];
  uint64_t header_checksum;  // of the header, with 0 in this field
};
static_assert(sizeof(PackedHeader) == 256 && offsetof(PackedHeader, header_checksum) == 248,
              "the header is 4 cache lines");

// ---- Checksums

// The checksum of rows of whole cache lines, tile by tile. `offset` is the place of their first
// byte in the buffer, which the sum depends on: parts that change places change it.
uint64_t checksum(const void *buffer, int64_t offset, int64_t num_rows, int64_t lines_per_row) {
  const float *const first =
      reinterpret_cast<const float *>(static_cast<const unsigned char *>(buffer) + offset);
  const int64_t stride = lines_per_row * tile_columns;
  uint64_t sum = 0;
  for (int64_t row = 0; row < num_rows; row += tile_rows) {
    for (int64_t column = 0; column < stride; column += tile_columns) {
      const int64_t at = row * stride + column;
      sum += tile_checksum(first + at, stride, std::min(tile_rows, num_rows - row),
                           static_cast<uint64_t>(offset + at * float_bytes));
    }
  }
  return sum;
}

uint64_t header_checksum(PackedHeader header) {
  header.header_checksum = 0;
  return checksum(&header, 0, sizeof header / 64, 1);
}

PackedHeader header_of(const void *buffer) {
  PackedHeader header;
  memcpy(&header, buffer, sizeof header);
  return header;
}

bool has_sound_checksum(const void *buffer) {
  const PackedHeader header = header_of(buffer);
  return header.header_checksum == header_checksum(header);
}

constexpr BufferFormat packed_format = {{{'m', 'h', 'a', ' ', 'p', 'a', 'c', 'k'}},
                                        sizeof(PackedHeader),
                                        has_sound_checksum,
                                        MHA_ERROR_PACKED_FORMAT,
                                        "packed layer",
                                        "mha_layer_pack",
                                        "pack it again"};

// Panels of floats are summed by the tiles in which they are packed, so that pack_floats computes
// this sum while the weights pass through its registers. It is 0 for all other kinds.
uint64_t panels_checksum(const PackedForm &form, const void *buffer) {
  uint64_t sum = 0;
  if (!form.has_float_panels()) return sum;
  for (const PackedMatrix &matrix : form.layout.matrices) {
    for (int64_t panel = 0; panel < panels_of(matrix.columns); ++panel) {
      const int64_t at = panel * matrix.depth * panel_columns;
      sum += checksum(buffer, matrix.weights_offset + at * float_bytes, matrix.depth, tiles_across);
    }
  }
  return sum;
}

// The checksum of what panels_checksum leaves out: the biases after panels of floats, and
// everything after the header for all other kinds.
uint64_t rest_checksum(const PackedForm &form, const void *buffer) {
  int64_t first = sizeof(PackedHeader);
  if (form.has_float_panels()) first = form.layout.matrices[0].bias_offset;
  return checksum(buffer, first, (form.layout.bytes - first) / 64, 1);
}

// ---- The caller's matrices

// Which column of the caller's matrix a packed column comes from. The heads of a matrix follow each
// other at a stride, which exceeds the width where each head of W_Q is followed by its gate.
struct HeadMap {
  int64_t first;   // column of the first head
  int64_t stride;  // from one head to the next
  int64_t width;   // columns of a head that are packed together

  int64_t column_of(int64_t i) const { return first + i / width * stride + i % width; }
};

// One of the caller's matrices, seen as the packed matrix that it becomes. Element (k, column) is
// k * k_stride elements after start(column), whatever the caller's layout is.
struct Source {
  const char *name;  // the caller's field, for messages
  const void *matrix;
  const float *bias;     // null: none
  const float *scales;   // of the matrix's first column; null unless the weights are codes
  const float *offsets;  // of the same shape; null: none
  const float *block_scales, *block_offsets;  // their factors; null: none
  int64_t depth, columns;                     // of the packed matrix
  HeadMap heads;
  int64_t columns_before;  // columns of W_QKV before this matrix
  int64_t k_stride, column_stride;
  uint32_t type;  // MHA_TYPE_*

  // The column of the caller's matrix, as messages name it.
  int64_t column_of(int64_t column) const { return columns_before + heads.column_of(column); }

  template <class Element = float>
  const Element *start(int64_t column) const {
    return static_cast<const Element *>(matrix) + column_of(column) * column_stride;
  }

  // The columns of a tile of floats from column `first` on: 16, or those up to the matrix's end.
  TileColumns tile(int64_t first) const {
    TileColumns tile = {};
    tile.k_stride = k_stride;
    tile.count = std::max<int64_t>(0, std::min(tile_columns, columns - first));
    tile.has_contiguous_rows = tile.count == tile_columns;
    for (int64_t i = 0; i < tile.count; ++i) {
      tile.start[i] = start(first + i);
      tile.has_contiguous_rows = tile.has_contiguous_rows && tile.start[i] == tile.start[0] + i;
    }
    return tile;
  }
};

// Finds where the caller keeps a matrix. W_Q, W_K and W_V may be one matrix, W_QKV, and so may
// their biases, independently. Without a matrix W_G, the gate of each head follows its queries in
// W_Q or W_QKV:
//   W_Q     head 0 | gate 0 | head 1 | gate 1 | ...
//   W_QKV   W_Q | W_K | W_V
Source source_of(const PackedForm &form, const mha_layer_weights &weights, int name) {
  const LayerShape &shape = form.shape;
  // Without a gate, its width is 0, and it does not matter where it would be.
  const bool is_gate_in_q = weights.gate_place == MHA_GATE_IN_W_Q;
  const int64_t q_head = shape.head_dim + (is_gate_in_q ? shape.gate_dim : 0),
                before_k = shape.num_heads * q_head, before_v = before_k + shape.k_columns();
  struct Origin {
    const char *name;
    const mha_matrix *matrix;
    int64_t columns;         // of the caller's matrix
    int64_t columns_before;  // in W_QKV
    HeadMap heads;
  } origins[] = {
      {"w_q", &weights.w_q, before_k, 0, {0, q_head, shape.head_dim}},
      {"w_g", &weights.w_g, shape.g_columns(), 0, {0, shape.gate_dim, shape.gate_dim}},
      {"w_k", &weights.w_k, shape.k_columns(), before_k, {0, shape.head_dim, shape.head_dim}},
      {"w_v", &weights.w_v, shape.v_columns(), before_v, {0, shape.head_dim_v, shape.head_dim_v}},
      {"w_o", &weights.w_o, shape.output_dim, 0, {0, 0, shape.output_dim}},
  };
  if (is_gate_in_q)
    origins[matrix_g] = {
        "w_q", &weights.w_q, before_k, 0, {shape.head_dim, q_head, shape.gate_dim}};
  if (!shape.has_heads()) origins[matrix_o].name = "w";
  const Origin &origin = origins[name];
  const bool may_be_in_qkv = origin.matrix != &weights.w_o && origin.matrix != &weights.w_g;
  const bool is_in_qkv = may_be_in_qkv && weights.w_qkv.data;
  const mha_matrix &matrix = is_in_qkv ? weights.w_qkv : *origin.matrix;

  // Rows of the caller's matrix are contiguous unless a stride is set, and either a row or a column
  // of the packed matrix, as the layout says.
  Source source = {};
  source.name = is_in_qkv ? "w_qkv" : origin.name;
  source.matrix = matrix.data;
  source.scales = matrix.scales;
  source.offsets = matrix.offsets;
  source.block_scales = matrix.block_scales;
  source.block_offsets = matrix.block_offsets;
  source.bias = may_be_in_qkv && weights.w_qkv.bias ? weights.w_qkv.bias + origin.columns_before
                                                    : origin.matrix->bias;
  source.depth = form.layout.matrices[name].depth;
  source.columns = form.layout.matrices[name].columns;
  source.heads = origin.heads;
  source.columns_before = is_in_qkv ? origin.columns_before : 0;
  source.type = weights.type;
  const bool is_in_out = weights.layout == MHA_LAYOUT_IN_OUT;
  const int64_t columns = is_in_qkv ? before_v + shape.v_columns() : origin.columns;
  const int64_t width = is_in_out ? columns : source.depth,
                row_stride = matrix.row_stride ? matrix.row_stride : width;
  source.k_stride = is_in_out ? row_stride : 1;
  source.column_stride = is_in_out ? 1 : row_stride;
  // Rows of int4 hold two codes in a byte, and int4 is never stored in the other layout.
  if (weights.type == MHA_TYPE_INT4) source.column_stride = blocks_of(row_stride, 2);
  return source;
}

// Biases follow the columns of the caller's matrix, so that gates in W_Q have theirs in the bias of
// W_Q. The kernels read a whole panel of them.
void pack_bias(const Source &source, const PackedMatrix &matrix, unsigned char *buffer) {
  float *const bias = reinterpret_cast<float *>(buffer + matrix.bias_offset);
  memset(bias, 0, static_cast<size_t>(panels_of(matrix.columns) * panel_columns) * sizeof(float));
  for (int64_t column = 0; source.bias && column < matrix.columns; ++column)
    bias[column] = source.bias[source.heads.column_of(column)];
}

// ---- Floats that stay floats

// Copies a matrix tile by tile, and returns its part of panels_checksum if it is packed in panels.
//
// A panel takes three tiles side by side. Where the caller's rows are contiguous, the tiles of
// several panels are copied in turn, because more of each row is then read while its page of memory
// is at hand.
uint64_t pack_floats(const Source &source, const PackedMatrix &matrix, PackedKind kind,
                     unsigned char *buffer) {
  constexpr int64_t max_at_once = 8 * tiles_across;
  const int64_t at_once = source.column_stride == 1 ? max_at_once : tiles_across;
  const int64_t across = panels_of(matrix.columns) * tiles_across;
  float *const weights = reinterpret_cast<float *>(buffer + matrix.weights_offset);
  uint64_t sum = 0;
  for (int64_t first = 0; first < across; first += at_once) {
    const int64_t count = std::min(at_once, across - first);
    TileColumns columns[max_at_once];
    for (int64_t i = 0; i < count; ++i) columns[i] = source.tile((first + i) * tile_columns);
    for (int64_t k = 0; k < matrix.depth; k += tile_rows) {
      const int64_t num_rows = std::min(tile_rows, matrix.depth - k);
      for (int64_t i = 0; i < count; ++i) {
        if (!kind.is_plain) {
          const int64_t panel = (first + i) / tiles_across, tile = (first + i) % tiles_across;
          const int64_t at = (panel * matrix.depth + k) * panel_columns + tile * tile_columns;
          const uint64_t offset = static_cast<uint64_t>(matrix.weights_offset + at * float_bytes);
          sum += copy_panel_tile(columns[i], k, num_rows, weights + at, panel_columns, offset);
        } else if (columns[i].count > 0) {
          copy_tile(columns[i], k, num_rows,
                    weights + k * matrix.stride + (first + i) * tile_columns, matrix.stride);
        }
      }
    }
  }
  return sum;
}

// ---- Weights that are converted

// Conversion reads blocks of a panel as floats, whatever their type is, and stores them as the
// packed type. A block is small enough to stay in the cache in between. Element (k, column) of a
// matrix is in panel column / 48, in its column c = column % 48:
//   f32, f16, bf16, int8   [k][c]
//   int4                   [k / 2][c], two terms in a byte
// and interleaved
//   int8                   [k / 4][c][k % 4]
//   int4                   [k / 8][c][k % 4], terms k and k + 4 in a byte
//   int5, int6             the same, and planes of high bits (Projection)
//   bf16                   [k / 2][c][k % 2]
constexpr int64_t block_terms = 256;
static_assert(block_terms % max_group == 0, "blocks hold whole groups");

struct FloatBlock {
  int64_t terms, columns;                              // how many the matrix has here
  alignas(64) float rows[block_terms][panel_columns];  // zero after the last column
};

// Reads numbers of one type. The loops follow the caller's memory: down the columns where they are
// contiguous, else along the rows.
template <class Element, class Widen>
void read_block(const Source &source, int64_t k, int64_t column, Widen widen, FloatBlock *block) {
  const Element *starts[panel_columns];
  for (int64_t c = 0; c < block->columns; ++c) starts[c] = source.start<Element>(column + c);
  if (source.k_stride == 1) {
    for (int64_t c = 0; c < block->columns; ++c) {
      for (int64_t i = 0; i < block->terms; ++i) block->rows[i][c] = widen(starts[c][k + i]);
    }
  } else {
    for (int64_t i = 0; i < block->terms; ++i) {
      for (int64_t c = 0; c < block->columns; ++c)
        block->rows[i][c] = widen(starts[c][(k + i) * source.k_stride]);
    }
  }
}

// Reads the block that begins at term k and at column `column`.
void read_block(const Source &source, int64_t k, int64_t column, FloatBlock *block) {
  block->terms = std::min(block_terms, source.depth - k);
  block->columns = std::min(panel_columns, source.columns - column);
  if (block->columns < panel_columns) memset(block->rows, 0, sizeof block->rows);
  if (source.type == MHA_TYPE_F16)
    read_block<uint16_t>(source, k, column, f32_of_f16, block);
  else if (source.type == MHA_TYPE_BF16)
    read_block<uint16_t>(source, k, column, f32_of_bf16, block);
  else
    read_block<float>(
        source, k, column, [](float x) { return x; }, block);
}

float magnitude_of(float x) { return x < 0.0f ? -x : x; }

// How many scales a column has: one for each group, or one for all terms of int8.
int64_t scales_per_column(const LayerShape &shape, PackedKind kind, int64_t depth) {
  const int64_t group = shape.group_of(kind.storage);
  return group != 0 ? blocks_of(depth, group) : kind.storage == Storage::int8 ? 1 : 0;
}

// A panel of a matrix and its place in the buffer. The functions below pack one panel each, and
// differ in what they make of the blocks that they read.
struct Panel {
  const Source &source;
  const PackedMatrix &matrix;
  const LayerShape &shape;
  PackedKind kind;
  int64_t first;  // its first column in the packed matrix
  unsigned char *buffer;

  template <class Element>
  Element *weights() const {
    return reinterpret_cast<Element *>(buffer + matrix.weights_offset +
                                       first / panel_columns * panel_bytes(matrix.depth, kind));
  }
  int64_t num_scales() const { return scales_per_column(shape, kind, matrix.depth); }
  // Scales, or offsets, as the layer stores them, at one of these places of the matrix.
  unsigned char *of_groups(int64_t offset) const {
    return buffer + offset +
           first / panel_columns * scales_bytes(num_scales(), matrix.depth, shape.scale_storage);
  }
  float *scales() const { return reinterpret_cast<float *>(of_groups(matrix.scales_offset)); }
};

// Numbers of 16 bits that become floats, in a panel or in a plain matrix. Both are rows of floats;
// a plain matrix has others beside it.
void pack_widened(const Panel &panel, FloatBlock *block) {
  const PackedMatrix &matrix = panel.matrix;
  const bool is_plain = panel.kind.is_plain;
  float *to = is_plain
                  ? reinterpret_cast<float *>(panel.buffer + matrix.weights_offset) + panel.first
                  : panel.weights<float>();
  for (int64_t k = 0; k < matrix.depth; k += block_terms) {
    read_block(panel.source, k, panel.first, block);
    // A row of a plain matrix goes on with the next matrix, where a panel has zeros.
    const int64_t columns = is_plain ? block->columns : panel_columns;
    for (int64_t i = 0; i < block->terms; ++i, to += is_plain ? matrix.stride : panel_columns)
      memcpy(to, block->rows[i], static_cast<size_t>(columns) * sizeof(float));
  }
}

// Numbers that become elements of a panel one by one: narrow(x, c) is that of a number x in column
// c of the panel.
template <class Element, class Narrow>
void pack_elements(const Panel &panel, FloatBlock *block, Narrow narrow) {
  Element *to = panel.weights<Element>();
  for (int64_t k = 0; k < panel.matrix.depth; k += block_terms) {
    read_block(panel.source, k, panel.first, block);
    for (int64_t i = 0; i < block->terms; ++i, to += panel_columns) {
      for (int64_t c = 0; c < panel_columns; ++c) to[c] = narrow(block->rows[i][c], c);
    }
  }
}

// Numbers that become factors of bf16 arithmetic, pairs of terms side by side.
void pack_pairs(const Panel &panel, FloatBlock *block) {
  uint16_t *to = panel.weights<uint16_t>();
  for (int64_t k = 0; k < panel.matrix.depth; k += block_terms, to += block_terms * panel_columns) {
    read_block(panel.source, k, panel.first, block);
    for (int64_t i = 0; i < block->terms; ++i) {
      for (int64_t c = 0; c < panel_columns; ++c)
        to[(i / 2 * panel_columns + c) * 2 + i % 2] = bf16_factor_of(bf16_of(block->rows[i][c]));
    }
  }
}

// Reads the panel twice: the scale of a column follows from its largest magnitude, and the codes
// follow from the scale.
void pack_int8(const Panel &panel, FloatBlock *block) {
  uint32_t most_bits[panel_columns] = {};
  for (int64_t k = 0; k < panel.matrix.depth; k += block_terms) {
    read_block(panel.source, k, panel.first, block);
    for (int64_t i = 0; i < block->terms; ++i) {
      for (int64_t c = 0; c < panel_columns; ++c)
        most_bits[c] = most_bits_of(&block->rows[i][c], 1, most_bits[c]);
    }
  }
  float factor[panel_columns], *const scales = panel.scales();
  for (int64_t c = 0; c < panel_columns; ++c) {
    const CodeScale found = code_scale_of(most_bits[c], 127);
    scales[c] = found.scale;
    factor[c] = found.factor;
  }
  pack_elements<int8_t>(
      panel, block, [&](float x, int64_t c) { return static_cast<int8_t>(code_of(x, factor[c])); });
}

// Codes of a column's terms in groups, whose numbers decide the scale of each: as an int8 row or an
// int4 group. Two neighbouring terms of int4 share a byte, the earlier one in its low half.
void pack_groups(const Panel &panel, FloatBlock *block) {
  const bool is_int4 = panel.kind.storage == Storage::int4;
  const int64_t group = panel.shape.group_of(panel.kind.storage);
  float *scales = panel.scales();
  unsigned char *to = panel.weights<unsigned char>();
  for (int64_t k = 0; k < panel.matrix.depth; k += block_terms) {
    read_block(panel.source, k, panel.first, block);
    for (int64_t first = 0; first < block->terms; first += group, scales += panel_columns) {
      const int64_t end = std::min(block->terms, first + group);
      // The scales of this group first, and then its codes.
      float factor[panel_columns];
      for (int64_t c = 0; c < panel_columns; ++c) {
        float extreme = 0.0f;
        uint32_t most_bits = 0;
        for (int64_t i = first; i < end; ++i) {
          const float x = block->rows[i][c];
          if (magnitude_of(x) > magnitude_of(extreme)) extreme = x;
          most_bits = most_bits_of(&x, 1, most_bits);
        }
        const CodeScale found = is_int4 ? int4_scale_of(extreme, most_bits < 0x7f800000u)
                                        : code_scale_of(most_bits, 127);
        scales[c] = found.scale;
        factor[c] = found.factor;
      }
      for (int64_t i = first; i < end; i += is_int4 ? 2 : 1, to += panel_columns) {
        for (int64_t c = 0; c < panel_columns; ++c) {
          const float x = block->rows[i][c];
          if (!is_int4) {
            to[c] = static_cast<unsigned char>(code_of(x, factor[c]));
            continue;
          }
          const int32_t odd = i + 1 < end ? int4_of(block->rows[i + 1][c], factor[c]) : 0;
          to[c] = static_cast<unsigned char>((int4_of(x, factor[c]) + 8) | (odd + 8) << 4);
        }
      }
    }
  }
}

// Copies the scales of a quantiser's codes, or the offsets, for one column of a panel. Their type
// holds them, as check_range has found.
void pack_scales(const Panel &panel, int64_t c, const float *given, const float *factors,
                 int64_t offset) {
  if (!given) return;
  const int64_t count = panel.num_scales(), column = panel.source.column_of(panel.first + c);
  unsigned char *numbers = panel.of_groups(offset);
  given += column * count;
  if (panel.shape.scale_storage != Storage::int8) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = i * panel_columns + c;
      if (panel.shape.scale_storage == Storage::f16)
        reinterpret_cast<uint16_t *>(numbers)[at] = f16_of(given[i]);
      else
        reinterpret_cast<float *>(numbers)[at] = given[i];
    }
    return;
  }
  const int64_t groups = scale_block / panel.shape.group_of(panel.kind.storage);
  factors += column * blocks_of(panel.matrix.depth, scale_block);
  for (int64_t i = 0; i < count; numbers += scale_block_bytes(groups), ++factors) {
    reinterpret_cast<uint16_t *>(numbers)[c] = f16_of(*factors);
    for (int64_t row = 2; row < groups + 2 && i < count; ++row, ++i)
      numbers[row * panel_columns + c] = static_cast<unsigned char>(static_cast<int>(given[i]));
  }
}

// Copies the codes of int5 and int6, which are given as int8, to nibbles and planes of high bits.
// Those that are missing in the last ones are 0, as multiplied.
void pack_planes(const Panel &panel) {
  const Source &source = panel.source;
  const int high = high_bits_of(panel.kind.storage);
  const int64_t terms = plane_terms_of(high), line = 4 * panel_columns, nibbles = terms / 8 * line,
                columns = std::min(panel_columns, source.columns - panel.first);
  const int32_t centre = centre_of(panel.kind.storage), added = source.offsets ? 0 : centre;
  unsigned char *to = panel.weights<unsigned char>();
  for (int64_t first = 0; first < source.depth; first += terms, to += nibbles + line) {
    for (int64_t c = 0; c < panel_columns; ++c) {
      const int8_t *const codes = c < columns ? source.start<int8_t>(panel.first + c) : nullptr;
      for (int64_t i = 0; i < terms; ++i) {
        int32_t code = centre;
        if (codes && first + i < source.depth) code = codes[(first + i) * source.k_stride] + added;
        const int64_t four = i / 4, at = c * 4 + i % 4;
        to[four / 2 * line + at] |= static_cast<unsigned char>((code & 15) << four % 2 * 4);
        to[nibbles + at] |= static_cast<unsigned char>(code >> 4 << four * high);
      }
    }
  }
}

// Copies codes that a quantiser has made. Only their order changes.
void pack_codes(const Panel &panel) {
  const Source &source = panel.source;
  const bool is_int4 = source.type == MHA_TYPE_INT4;
  const int64_t rows = blocks_of(source.depth, is_int4 ? 2 : 1);  // of bytes
  unsigned char *const to = panel.weights<unsigned char>();
  // Columns after the last one have codes of 0, which int4 stores as 8.
  memset(to, is_int4 ? 0x88 : 0, static_cast<size_t>(rows * panel_columns));
  const int64_t columns = std::min(panel_columns, source.columns - panel.first);
  for (int64_t c = 0; c < columns; ++c) {
    const unsigned char *const from = source.start<unsigned char>(panel.first + c);
    for (int64_t row = 0; row < rows; ++row)
      to[row * panel_columns + c] = from[row * source.k_stride];
    // An odd depth leaves half of the last byte unused, and the caller may have anything there.
    unsigned char &last = to[(rows - 1) * panel_columns + c];
    if (is_int4 && source.depth % 2 != 0) last = static_cast<unsigned char>((last & 15u) | 0x80u);
  }
}

// Reorders a panel in place for integer arithmetic, whose instructions multiply four terms of a
// column at once: four rows of 48 codes become [48][4], and codes of int8 become unsigned.
// Four rows of int4 hold eight terms; terms i and i + 4 share a byte afterwards.
void put_fours_together(const Panel &panel) {
  constexpr int64_t fours = 4, columns = panel_columns;
  unsigned char *at = panel.weights<unsigned char>();
  const unsigned char *const end = at + panel_bytes(panel.matrix.depth, panel.kind);
  for (; at < end; at += fours * columns) {
    unsigned char rows[fours * columns];
    memcpy(rows, at, sizeof rows);
    for (int64_t c = 0; c < columns; ++c) {
      for (int64_t i = 0; i < fours; ++i) {
        unsigned char &code = at[c * fours + i];
        if (panel.kind.storage == Storage::int8) {
          code = static_cast<unsigned char>(rows[i * columns + c] + added_to(Storage::int8));
        } else {
          const unsigned char low = rows[i / 2 * columns + c],
                              high = rows[(2 + i / 2) * columns + c];
          const int shift = static_cast<int>(i % 2 * 4);
          code = static_cast<unsigned char>((low >> shift & 15) | (high >> shift & 15) << 4);
        }
      }
    }
  }
}

// Packs a matrix panel by panel, whatever is read and whatever is stored.
void pack_converted(const Source &source, const PackedMatrix &matrix, const PackedForm &form,
                    unsigned char *buffer) {
  FloatBlock block;
  const PackedKind kind = form.kind;
  const Storage storage = kind.storage;
  for (int64_t first = 0; first < matrix.columns; first += panel_columns) {
    const Panel panel = {source, matrix, form.shape, kind, first, buffer};
    for (int64_t c = 0; c < std::min(panel_columns, matrix.columns - first); ++c) {
      pack_scales(panel, c, source.scales, source.block_scales, matrix.scales_offset);
      pack_scales(panel, c, source.offsets, source.block_offsets, matrix.offsets_offset);
    }
    if (high_bits_of(storage) != 0)
      pack_planes(panel);
    else if (source.scales)
      pack_codes(panel);
    else if (form.shape.group_of(storage) != 0)
      pack_groups(panel, &block);
    else if (storage == Storage::int8)
      pack_int8(panel, &block);
    else if (storage == Storage::f16)
      pack_elements<uint16_t>(panel, &block, [](float x, int64_t) { return f16_of(x); });
    else if (storage == Storage::bf16 && kind.is_interleaved)
      pack_pairs(panel, &block);
    else if (storage == Storage::bf16)
      pack_elements<uint16_t>(panel, &block, [](float x, int64_t) { return bf16_of(x); });
    else
      pack_widened(panel, &block);
    if (kind.is_interleaved && has_codes(storage) && high_bits_of(storage) == 0)
      put_fours_together(panel);
  }
}

// Whether a float becomes infinite as an f16, and is not infinite or NaN itself. The largest f16 is
// 65504, and numbers below 65520 are rounded to it.
bool exceeds_f16(float x) { return (magnitude_of(x) >= 65520.0f) & (x - x == 0.0f); }

// The same of what a layer has of groups. Offsets are of matrices that there are.
bool has_sound_groups(const LayerShape &s, Storage storage) {
  if (s.group != 0 && !(has_codes(storage) && is_group_size(s.group))) return false;
  const bool has_groups = s.group_of(storage) != 0,
             has_integers = has_codes(storage) && s.arithmetic != Arithmetic::f32;
  if (high_bits_of(storage) != 0 && !(has_groups && has_integers)) return false;
  if (s.scale_storage != Storage::f32 &&
      !(has_groups &&
        (s.scale_storage == Storage::f16 || (has_integers && s.scale_storage == Storage::int8))))
    return false;
  uint32_t matrices = s.has_output << matrix_o;
  if (s.has_heads()) matrices |= 1 << matrix_q;
  if (s.gate_dim != 0) matrices |= 1 << matrix_g;
  if (s.has_heads() && !s.only_asks()) matrices |= 1 << matrix_k | 1 << matrix_v;
  return (s.offsets & ~(has_groups ? matrices : 0)) == 0;
}

// Whether a layer can have this shape. The header's checksum finds damage, but it is no secret, so
// a header that was made up may have the right one. What the header says must then not lead out of
// the buffer, and it must be as a packer would have written it. Dimensions are bounded before they
// are multiplied.
bool is_sound(const LayerShape &s, PackedKind kind) {
  const auto is_dim = [](int64_t dim) { return dim > 0 && dim <= INT32_MAX; };
  if (!is_dim(s.query_dim) || !is_dim(s.output_dim) || s.has_output > 1) return false;
  if (s.gate > MHA_FUNCTION_SOFTPLUS || s.arithmetic > Arithmetic::bf16) return false;
  if (kind.is_interleaved != (s.arithmetic != Arithmetic::f32)) return false;
  if (kind.is_interleaved && has_codes(kind.storage) == (s.arithmetic == Arithmetic::bf16))
    return false;
  if (!has_sound_groups(s, kind.storage)) return false;
  if (!s.has_heads()) {
    // A linear layer consists of its W_O. Nothing else is set.
    const int64_t unused = s.key_dim | s.value_dim | s.num_kv_heads | s.head_dim | s.head_dim_v;
    return unused == 0 && s.has_output && s.scale == 0.0f && s.gate == MHA_FUNCTION_NONE &&
           s.gate_dim == 0;
  }
  if (!is_dim(s.num_heads) || !is_dim(s.num_kv_heads) || s.num_heads % s.num_kv_heads != 0)
    return false;
  if (!is_dim(s.head_dim) || !is_dim(s.head_dim_v)) return false;
  if (s.q_columns() > INT32_MAX || s.context_columns() > INT32_MAX) return false;
  if (s.only_asks() ? s.value_dim != 0 : !is_dim(s.key_dim) || !is_dim(s.value_dim)) return false;
  if (s.gate == MHA_FUNCTION_NONE ? s.gate_dim != 0 : s.gate_dim != 1 && s.gate_dim != s.head_dim_v)
    return false;
  const bool is_finite = s.scale - s.scale == 0.0f;
  return is_finite && (s.has_output || s.output_dim == s.context_columns()) &&
         (!kind.is_plain || s.fits_sgemm());
}

bool is_f16(float x) { return f32_of_f16(f16_of(x)) == x || x != x; }  // all NaN are one
bool is_int8(float x) { return x >= -128.0f && x <= 127.0f && x == static_cast<float>(int(x)); }

// Finds the first scale or offset of groups, or factor of them, that its type does not hold.
mha_status check_scales(Report report, const PackedForm &form, const mha_layer_weights &weights) {
  const bool are_in_blocks = form.shape.scale_storage == Storage::int8;
  for (int name = 0; name < num_matrices; ++name) {
    const Source source = source_of(form, weights, name);
    const int64_t groups = scales_per_column(form.shape, form.kind, source.depth),
                  blocks = blocks_of(source.depth, scale_block);
    const struct {
      const char *name;
      const float *numbers;
      int64_t count;
      bool are_codes;
    } given[] = {{"scales", source.scales, groups, are_in_blocks},
                 {"offsets", source.offsets, groups, are_in_blocks},
                 {"block_scales", source.block_scales, blocks, false},
                 {"block_offsets", source.block_offsets, blocks, false}};
    for (const auto &[field, numbers, count, are_codes] : given) {
      for (int64_t i = 0; numbers && i < source.columns * count; ++i) {
        const int64_t out = source.column_of(i / count), at = i % count;
        const float x = numbers[out * count + at];
        if (are_codes ? is_int8(x) : is_f16(x)) continue;
        return report.fail(MHA_ERROR_OUT_OF_RANGE,
                           "%s.%s[%lld][%lld] is %.9g, which is no %s; set format.scale_type to "
                           "MHA_TYPE_F32 (1)",
                           source.name, field, lld(out), lld(at), static_cast<double>(x),
                           are_codes ? "integer from -128 to 127" : "f16");
      }
    }
  }
  return MHA_OK;
}

// Finds the first code that int5 or int6 does not hold.
mha_status check_codes(Report report, const PackedForm &form, const mha_layer_weights &weights) {
  const int32_t centre = centre_of(form.kind.storage);
  for (int name = 0; name < num_matrices; ++name) {
    const Source source = source_of(form, weights, name);
    const int32_t least = source.offsets ? 0 : -centre;
    for (int64_t c = 0, k = 0; c < source.columns; ++c, k = 0) {
      const int8_t *const codes = source.start<int8_t>(c);
      const auto is_held = [&](int32_t code) { return code >= least && code < least + 2 * centre; };
      while (k < source.depth && is_held(codes[k * source.k_stride])) ++k;
      if (k == source.depth) continue;
      const int32_t code = codes[k * source.k_stride];
      const int64_t out = source.column_of(c);
      const bool is_in_out = weights.layout == MHA_LAYOUT_IN_OUT;
      return report.fail(
          MHA_ERROR_OUT_OF_RANGE,
          "%s[%lld][%lld] is %d, but format.type is %u, whose codes are %d to %d; set "
          "it to MHA_TYPE_INT8 (4)",
          source.name, lld(is_in_out ? k : out), lld(is_in_out ? out : k), code,
          type_of(form.kind.storage), least, least + 2 * centre - 1);
    }
  }
  return MHA_OK;
}

}  // namespace

// ---- The functions of layer.h

// Codes have scales, and bf16 has the range of float, so that only f16 is too small for some
// weights. Numbers that are infinite or NaN are accepted, for they are stored as they are.
mha_status check_range(Report report, const PackedForm &form, const mha_layer_weights &weights) {
  if (form.shape.scale_storage != Storage::f32) MHA_TRY(check_scales(report, form, weights));
  if (high_bits_of(form.kind.storage) != 0) return check_codes(report, form, weights);
  if (form.kind.storage != Storage::f16 || weights.type == MHA_TYPE_F16) return MHA_OK;
  FloatBlock block;
  for (int name = 0; name < num_matrices; ++name) {
    const Source source = source_of(form, weights, name);
    for (int64_t column = 0; column < source.columns; column += panel_columns) {
      for (int64_t k = 0; k < source.depth; k += block_terms) {
        read_block(source, k, column, &block);
        for (int64_t i = 0; i < block.terms; ++i) {
          // The row is tested without a branch first, which takes vectors.
          bool is_too_large = false;
          for (const float x : block.rows[i]) is_too_large |= exceeds_f16(x);
          if (!is_too_large) continue;
          int64_t c = 0;
          while (!exceeds_f16(block.rows[i][c])) ++c;
          const bool is_in_out = weights.layout == MHA_LAYOUT_IN_OUT;
          const int64_t out = source.column_of(column + c), in = k + i;
          return report.fail(MHA_ERROR_OUT_OF_RANGE,
                             "%s[%lld][%lld] is %g, but the largest f16 is 65504; scale the "
                             "weights down, or set weight_type to MHA_TYPE_BF16 (3)",
                             source.name, lld(is_in_out ? in : out), lld(is_in_out ? out : in),
                             static_cast<double>(block.rows[i][c]));
        }
      }
    }
  }
  return MHA_OK;
}

// Puts the parts of the buffer one after the other, in the order of the comment at the top.
PackedLayout packed_layout(const LayerShape &shape, PackedKind kind) {
  const bool has_keys = !shape.only_asks();
  PackedLayout layout = {};
  layout.matrices[matrix_q] = {shape.query_dim, shape.q_columns()};
  layout.matrices[matrix_g] = {shape.query_dim, shape.g_columns()};
  layout.matrices[matrix_k] = {shape.key_dim, has_keys ? shape.k_columns() : 0};
  layout.matrices[matrix_v] = {shape.value_dim, has_keys ? shape.v_columns() : 0};
  layout.matrices[matrix_o] = {shape.output_depth(), shape.has_output ? shape.output_dim : 0};

  Count end(static_cast<int64_t>(sizeof(PackedHeader)));
  const auto take = [&end](Count bytes) {
    const int64_t offset = end.value();
    end = end + round_up(bytes, 64);
    return offset;
  };
  for (PackedMatrix &matrix : layout.matrices) {
    const bool is_input = &matrix != &layout.matrices[matrix_o],
               is_first = &matrix == layout.matrices;
    if (!kind.is_plain) {
      matrix.weights_offset =
          take(Count(panels_of(matrix.columns)) * Count(panel_bytes(matrix.depth, kind)));
      continue;
    }
    // Inputs of one width share one product with W_Q|W_G|W_K|W_V side by side: rows of all their
    // columns, which matrix_q takes the memory for.
    const bool is_joined = is_input && shape.has_one_input_width();
    matrix.stride = is_joined ? shape.input_columns() : matrix.columns;
    const PackedMatrix &before = is_first ? matrix : *(&matrix - 1);
    matrix.weights_offset =
        is_joined && !is_first
            ? before.weights_offset + before.columns * float_bytes
            : take(Count(matrix.stride) * Count(matrix.depth) * Count(float_bytes));
  }
  for (PackedMatrix &matrix : layout.matrices) {
    const int64_t count = scales_per_column(shape, kind, matrix.depth);
    if (count == 0) continue;
    const Count bytes = Count(panels_of(matrix.columns)) *
                        Count(scales_bytes(count, matrix.depth, shape.scale_storage));
    matrix.scales_offset = take(bytes);
    if (shape.offsets >> (&matrix - layout.matrices) & 1) matrix.offsets_offset = take(bytes);
  }
  for (PackedMatrix &matrix : layout.matrices)
    matrix.bias_offset =
        take(Count(panels_of(matrix.columns)) * Count(panel_columns * float_bytes));
  layout.bytes = end.value();
  return layout;
}

// Each matrix goes to its panels, then scales and biases follow, and the header comes last, with
// the checksums of what it describes.
void pack_layer(const PackedForm &form, const mha_layer_weights &weights, void *buffer) {
  const PackedKind kind = form.kind;
  const PackedLayout &layout = form.layout;
  unsigned char *const bytes = static_cast<unsigned char *>(buffer);
  // Every byte of the buffer is defined, because the checksum reads it. Plain matrices may end
  // within a cache line: the last line of each is cleared before anything is copied. But there is
  // no gap between the parts of W_Q|W_G|W_K|W_V.
  for (int i = 1; kind.is_plain && i <= num_matrices; ++i) {
    const int64_t end =
        i < num_matrices ? layout.matrices[i].weights_offset : layout.matrices[0].bias_offset;
    const bool is_line_border = end % 64 == 0;
    if (is_line_border) memset(bytes + end - 64, 0, 64);
  }
  // Panels of fewer bits may have gaps after them, and scales exist for columns that the caller
  // does not have.
  if (kind.storage != Storage::f32) memset(bytes, 0, static_cast<size_t>(layout.bytes));

  const bool stays_float =
      kind.storage == Storage::f32 && storage_of_type(weights.type) == Storage::f32;
  uint64_t sum = 0;
  for (int i = 0; i < num_matrices; ++i) {
    const PackedMatrix &matrix = layout.matrices[i];
    const Source source = source_of(form, weights, i);
    if (stays_float)
      sum += pack_floats(source, matrix, kind, bytes);
    else
      pack_converted(source, matrix, form, bytes);
    pack_bias(source, matrix, bytes);
  }
  finish_copying();
  if (!stays_float) sum = panels_checksum(form, bytes);

  // The header comes last, because it has the checksum of everything else.
  PackedHeader header = {};
  header.head = packed_format.head;
  header.kind = 1;
  while (!(packed_kinds[header.kind - 1] == kind)) ++header.kind;
  header.bytes = static_cast<uint64_t>(layout.bytes);
  header.payload_checksum = sum + rest_checksum(form, bytes);
  header.shape = form.shape;
  header.header_checksum = header_checksum(header);
  memcpy(bytes, &header, sizeof header);
}

// The weights are not read; packed_checksum_holds does that.
mha_status read_packed(Report report, const void *buffer, size_t buffer_bytes, PackedForm *form) {
  MHA_TRY(check_head(report, packed_format, buffer, buffer_bytes));
  const PackedHeader header = header_of(buffer);
  if (header.kind < 1 || header.kind > num_packed_kinds)
    return report.fail(
        MHA_ERROR_PACKED_FORMAT,
        "the packed layer is of kind %u, which this version does not know; pack it again",
        header.kind);
  const PackedKind kind = packed_kinds[header.kind - 1];
  bool is_valid = is_sound(header.shape, kind);
  for (const unsigned char byte : header.reserved) is_valid = is_valid && byte == 0;
  if (is_valid) *form = {header.shape, kind, packed_layout(header.shape, kind)};
  is_valid = is_valid && form->layout.bytes >= 0 &&
             static_cast<uint64_t>(form->layout.bytes) == header.bytes;
  return check_whole(report, packed_format, is_valid, buffer_bytes, header.bytes);
}

bool packed_checksum_holds(const PackedForm &form, const void *buffer) {
  return panels_checksum(form, buffer) + rest_checksum(form, buffer) ==
         header_of(buffer).payload_checksum;
}

}  // namespace mha
