// The packed buffer: header, weights in panels (or plain, for a BLAS), biases, checksums.

#include <stddef.h>
#include <string.h>

#include "../storage.h"
#include "layer.h"
#include "tiles.h"

namespace mha {
namespace {

constexpr char packed_magic[8] = {'m', 'h', 'a', ' ', 'p', 'a', 'c', 'k'};
constexpr uint32_t packed_version = 1;
constexpr uint32_t packed_byte_order = 0x01020304u;

constexpr int64_t float_bytes = sizeof(float);
constexpr int64_t lines_per_row = panel_columns / tile_columns;  // of a panel

int64_t at_most(int64_t limit, int64_t count) { return count < limit ? count : limit; }

// The first bytes of a packed buffer. Everything is position-independent; offsets follow from the
// shape.
struct PackedHeader {
  char magic[8];
  uint32_t byte_order;
  uint32_t version;
  uint32_t contract;
  uint32_t kind;
  uint64_t bytes;             // of the whole buffer
  uint64_t payload_checksum;  // of everything behind the header
  LayerShape shape;
  unsigned char reserved[256 - 136];
  uint64_t header_checksum;  // of the header with 0 here
};
static_assert(sizeof(PackedHeader) == 256 && offsetof(PackedHeader, header_checksum) == 248,
              "the header is 4 cache lines");

// The checksum of rows of whole cache lines, tile by tile; `offset` is that of their first byte in
// the buffer.
uint64_t checksum(const void *buffer, int64_t offset, int64_t num_rows, int64_t lines_per_row) {
  const float *const first =
      reinterpret_cast<const float *>(static_cast<const unsigned char *>(buffer) + offset);
  const int64_t stride = lines_per_row * tile_columns;
  uint64_t sum = 0;
  for (int64_t row = 0; row < num_rows; row += tile_rows) {
    for (int64_t column = 0; column < stride; column += tile_columns) {
      const int64_t at = row * stride + column;
      sum += tile_checksum(first + at, stride, at_most(tile_rows, num_rows - row),
                           static_cast<uint64_t>(offset + at * float_bytes));
    }
  }
  return sum;
}

uint64_t header_checksum(PackedHeader header) {
  header.header_checksum = 0;
  return checksum(&header, 0, sizeof header / 64, 1);
}

// The columns of a packed matrix at the caller's. Heads lie one after the other; with a gate in
// W_Q, it lies behind each of them.
struct HeadMap {
  int64_t first;   // place of the first number of the first head
  int64_t stride;  // from one head to the next
  int64_t width;   // numbers of a packed head

  int64_t place(int64_t i) const { return first + i / width * stride + i % width; }
};

// The caller's matrix, column by column: element (k, column) is k * k_stride behind start(column).
struct Source {
  const char *name;
  const void *matrix;
  HeadMap columns;
  int64_t depth;
  int64_t k_stride, column_stride;
  uint32_t type;
  const float *scales;  // of the first column of the caller's matrix, if it has codes

  template <class Element = float>
  const Element *start(int64_t column) const {
    return static_cast<const Element *>(matrix) + columns.place(column) * column_stride;
  }

  // Those of a tile of floats; none behind the last of num_columns.
  TileColumns tile(int64_t first, int64_t num_columns) const {
    TileColumns tile = {};
    tile.k_stride = k_stride;
    tile.has_contiguous_rows = true;
    for (; tile.count < tile_columns && first + tile.count < num_columns; ++tile.count) {
      tile.start[tile.count] = start(first + tile.count);
      tile.has_contiguous_rows =
          tile.has_contiguous_rows && tile.start[tile.count] == tile.start[0] + tile.count;
    }
    tile.has_contiguous_rows = tile.has_contiguous_rows && tile.count == tile_columns;
    return tile;
  }
};

// Without a matrix of its own, a head's gate lies behind its queries.
bool has_gate_in_q(const LayerShape &shape, const mha_layer_weights &weights) {
  return shape.gate != MHA_GATE_NONE && !weights.w_g.data;
}

// The columns of a matrix as if W_Q, W_K and W_V were matrices of their own, which is how the
// biases lie, too.
HeadMap columns_of(const LayerShape &shape, const mha_layer_weights &weights, MatrixName name) {
  const bool is_in_q = has_gate_in_q(shape, weights);
  const int64_t q_stride = shape.head_dim + (is_in_q ? shape.gate_dim : 0);
  switch (name) {
    case matrix_q:
      return {0, q_stride, shape.head_dim};
    case matrix_g:
      return {is_in_q ? shape.head_dim : 0, is_in_q ? q_stride : shape.gate_dim, shape.gate_dim};
    case matrix_k:
      return {0, shape.head_dim, shape.head_dim};
    case matrix_v:
      return {0, shape.head_dim_v, shape.head_dim_v};
    default:
      return {0, 0, shape.output_dim};
  }
}

// Columns before those of a matrix where W_Q, W_K and W_V, or their biases, are one.
int64_t columns_before(const LayerShape &shape, const mha_layer_weights &weights, MatrixName name) {
  const int64_t of_q = shape.num_heads * columns_of(shape, weights, matrix_q).stride;
  return name == matrix_k ? of_q : name == matrix_v ? of_q + shape.k_columns() : 0;
}

Source source_of(const LayerShape &shape, const mha_layer_weights &weights, MatrixName name) {
  const struct {
    const char *name;
    const mha_matrix &matrix;
    int64_t heads, depth;
  } own[] = {{"w_q", weights.w_q, shape.num_heads, shape.query_dim},
             {"w_g", weights.w_g, shape.num_heads, shape.query_dim},
             {"w_k", weights.w_k, shape.num_kv_heads, shape.key_dim},
             {"w_v", weights.w_v, shape.num_kv_heads, shape.value_dim},
             {shape.has_heads() ? "w_o" : "w", weights.w_o, 1, shape.output_depth()}};
  const bool is_in_q = name == matrix_g && has_gate_in_q(shape, weights);
  const auto &from = own[is_in_q ? matrix_q : name];
  const bool is_fused = weights.w_qkv.data && name != matrix_o && (name != matrix_g || is_in_q);
  const mha_matrix &matrix = is_fused ? weights.w_qkv : from.matrix;
  Source source = {is_fused ? "w_qkv" : from.name,
                   matrix.data,
                   columns_of(shape, weights, name),
                   from.depth,
                   0,
                   0,
                   weights.type,
                   matrix.scales};
  int64_t width = name == matrix_o ? shape.output_dim : from.heads * source.columns.stride;
  if (is_fused) {
    source.columns.first += columns_before(shape, weights, name);
    width = columns_before(shape, weights, matrix_v) + shape.v_columns();
  }
  if (weights.layout == MHA_LAYOUT_IN_OUT) {
    source.k_stride = matrix.row_stride ? matrix.row_stride : width;
    source.column_stride = 1;
  } else {
    source.k_stride = 1;
    source.column_stride = matrix.row_stride ? matrix.row_stride : from.depth;
  }
  if (weights.type == MHA_TYPE_INT4)
    source.column_stride = blocks_of(source.column_stride, 2);  // bytes
  return source;
}

// The biases of a matrix, zeros where there are none.
void pack_bias(const LayerShape &shape, const mha_layer_weights &weights, MatrixName name,
               const PackedMatrix &matrix, unsigned char *buffer) {
  const bool is_in_q = name == matrix_g && has_gate_in_q(shape, weights);
  const bool is_fused = weights.w_qkv.bias && name != matrix_o && (name != matrix_g || is_in_q);
  const float *const single[] = {weights.w_q.bias, is_in_q ? weights.w_q.bias : weights.w_g.bias,
                                 weights.w_k.bias, weights.w_v.bias, weights.w_o.bias};
  const float *const from =
      is_fused ? weights.w_qkv.bias + columns_before(shape, weights, name) : single[name];
  const HeadMap columns = columns_of(shape, weights, name);
  float *const bias = reinterpret_cast<float *>(buffer + matrix.bias_offset);
  memset(bias, 0, static_cast<size_t>(panels_of(matrix.columns) * panel_columns) * sizeof(float));
  for (int64_t column = 0; from && column < matrix.columns; ++column)
    bias[column] = from[columns.place(column)];
}

// Floats that stay floats. Returns the part of the checksum if the matrix is packed in panels.
uint64_t pack_floats(const Source &source, const PackedMatrix &matrix, PackedKind kind,
                     unsigned char *buffer) {
  // Tiles side by side: a panel's; but several panels' where rows are contiguous, so that more of
  // each is read while its page is at hand.
  constexpr int64_t max_at_once = 8 * lines_per_row;
  const int64_t at_once = source.column_stride == 1 ? max_at_once : lines_per_row;
  const int64_t across = panels_of(matrix.columns) * lines_per_row;
  float *const weights = reinterpret_cast<float *>(buffer + matrix.weights_offset);
  uint64_t sum = 0;
  for (int64_t first = 0; first < across; first += at_once) {
    const int64_t count = at_most(at_once, across - first);
    TileColumns columns[max_at_once];
    for (int64_t i = 0; i < count; ++i)
      columns[i] = source.tile((first + i) * tile_columns, matrix.columns);
    for (int64_t k = 0; k < matrix.depth; k += tile_rows) {
      const int64_t num_rows = at_most(tile_rows, matrix.depth - k);
      for (int64_t i = 0; i < count; ++i) {
        if (kind == PackedKind::panels_f32) {
          const int64_t panel = (first + i) / lines_per_row, line = (first + i) % lines_per_row;
          const int64_t at = (panel * matrix.depth + k) * panel_columns + line * tile_columns;
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

constexpr int64_t block_terms = 256;
static_assert(block_terms % int4_group == 0, "blocks hold whole groups");

// Columns of the caller's matrix side by side, as floats: a part of a panel, zero behind the last
// column.
struct FloatBlock {
  int64_t terms, columns;
  alignas(64) float rows[block_terms][panel_columns];
};

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

// The block from term k and column `column` on.
void read_block(const Source &source, const PackedMatrix &matrix, int64_t k, int64_t column,
                FloatBlock *block) {
  block->terms = at_most(block_terms, matrix.depth - k);
  block->columns = at_most(panel_columns, matrix.columns - column);
  if (block->columns < panel_columns) memset(block->rows, 0, sizeof block->rows);
  if (source.type == MHA_TYPE_F16)
    read_block<uint16_t>(source, k, column, f32_of_f16, block);
  else if (source.type == MHA_TYPE_BF16)
    read_block<uint16_t>(source, k, column, f32_of_bf16, block);
  else
    read_block<float>(
        source, k, column, [](float x) { return x; }, block);
}

template <class Element, class Narrow>
void store_block(const FloatBlock &block, Narrow narrow, Element *to) {
  for (int64_t i = 0; i < block.terms; ++i) {
    for (int64_t c = 0; c < panel_columns; ++c)
      to[i * panel_columns + c] = narrow(block.rows[i][c], c);
  }
}

// Where panel number `panel` of a matrix begins.
template <class Element>
Element *panel_at(const PackedMatrix &matrix, PackedKind kind, int64_t panel,
                  unsigned char *buffer) {
  return reinterpret_cast<Element *>(buffer + matrix.weights_offset +
                                     panel * panel_bytes(matrix.depth, kind));
}

float *scales_at(const PackedMatrix &matrix, int64_t panel, int64_t per_column,
                 unsigned char *buffer) {
  return reinterpret_cast<float *>(buffer + matrix.scales_offset) +
         panel * per_column * panel_columns;
}

float magnitude_of(float x) { return x < 0.0f ? -x : x; }

void pack_panel_int8(const Source &source, const PackedMatrix &matrix, PackedKind kind,
                     int64_t panel, FloatBlock *block, unsigned char *buffer) {
  float factor[panel_columns], *const scales = scales_at(matrix, panel, 1, buffer);
  uint32_t most_bits[panel_columns] = {};
  for (int64_t k = 0; k < matrix.depth; k += block_terms) {
    read_block(source, matrix, k, panel * panel_columns, block);
    for (int64_t i = 0; i < block->terms; ++i) {
      for (int64_t c = 0; c < panel_columns; ++c)
        most_bits[c] = most_bits_of(&block->rows[i][c], 1, most_bits[c]);
    }
  }
  for (int64_t c = 0; c < panel_columns; ++c) {
    const CodeScale found = code_scale_of(most_bits[c], 127);
    scales[c] = found.scale;
    factor[c] = found.factor;
  }
  int8_t *const to = panel_at<int8_t>(matrix, kind, panel, buffer);
  for (int64_t k = 0; k < matrix.depth; k += block_terms) {
    read_block(source, matrix, k, panel * panel_columns, block);
    store_block(
        *block, [&](float x, int64_t c) { return static_cast<int8_t>(code_of(x, factor[c])); },
        to + k * panel_columns);
  }
}

void pack_panel_int4(const Source &source, const PackedMatrix &matrix, PackedKind kind,
                     int64_t panel, FloatBlock *block, unsigned char *buffer) {
  const int64_t groups = blocks_of(matrix.depth, int4_group);
  float *scales = scales_at(matrix, panel, groups, buffer);
  unsigned char *to = panel_at<unsigned char>(matrix, kind, panel, buffer);
  for (int64_t k = 0; k < matrix.depth; k += block_terms) {
    read_block(source, matrix, k, panel * panel_columns, block);
    for (int64_t first = 0; first < block->terms; first += int4_group, scales += panel_columns) {
      const int64_t end = at_most(block->terms, first + int4_group);
      float factor[panel_columns];
      for (int64_t c = 0; c < panel_columns; ++c) {
        float extreme = 0.0f;
        bool is_finite = true;
        for (int64_t i = first; i < end; ++i) {
          const float x = block->rows[i][c];
          if (magnitude_of(x) > magnitude_of(extreme)) extreme = x;
          is_finite = is_finite && x - x == 0.0f;
        }
        const CodeScale found = int4_scale_of(extreme, is_finite);
        scales[c] = found.scale;
        factor[c] = found.factor;
      }
      for (int64_t i = first; i < end; i += 2, to += panel_columns) {
        for (int64_t c = 0; c < panel_columns; ++c) {
          const int32_t even = int4_of(block->rows[i][c], factor[c]),
                        odd = i + 1 < end ? int4_of(block->rows[i + 1][c], factor[c]) : 0;
          to[c] = static_cast<unsigned char>((even + 8) | (odd + 8) << 4);
        }
      }
    }
  }
}

// Codes that a quantiser has made, as they are.
void pack_panel_of_codes(const Source &source, const PackedMatrix &matrix, PackedKind kind,
                         int64_t panel, unsigned char *buffer) {
  const bool is_int4 = source.type == MHA_TYPE_INT4;
  const int64_t terms = is_int4 ? 2 : 1;  // of a byte
  const int64_t rows = blocks_of(matrix.depth, terms);
  const int64_t scales_per_column = is_int4 ? blocks_of(matrix.depth, int4_group) : 1;
  unsigned char *const to = panel_at<unsigned char>(matrix, kind, panel, buffer);
  float *const scales = scales_at(matrix, panel, scales_per_column, buffer);
  memset(to, is_int4 ? 0x88 : 0, static_cast<size_t>(rows * panel_columns));
  for (int64_t c = 0; c < panel_columns && panel * panel_columns + c < matrix.columns; ++c) {
    const int64_t column = panel * panel_columns + c;
    const unsigned char *const from = source.start<unsigned char>(column);
    for (int64_t row = 0; row < rows; ++row)
      to[row * panel_columns + c] = from[row * source.k_stride];
    // The half of a byte behind the last term is nobody's.
    unsigned char &last = to[(rows - 1) * panel_columns + c];
    if (is_int4 && matrix.depth % 2 != 0) last = static_cast<unsigned char>((last & 15u) | 0x80u);
    const float *const of_column = source.scales + source.columns.place(column) * scales_per_column;
    for (int64_t i = 0; i < scales_per_column; ++i) scales[i * panel_columns + c] = of_column[i];
  }
}

// Puts four terms of a column side by side, in place: rows of 48 codes, of int4 of two codes each,
// become [48][4]; those of int8 with byte_added.
void put_fours_together(const PackedMatrix &matrix, PackedKind kind, int64_t panel,
                        unsigned char *buffer) {
  constexpr int64_t fours = 4, columns = panel_columns;
  unsigned char *const first = panel_at<unsigned char>(matrix, kind, panel, buffer),
                       *const end = first + panel_bytes(matrix.depth, kind);
  for (unsigned char *at = first; at < end; at += fours * columns) {
    unsigned char rows[fours * columns];
    memcpy(rows, at, sizeof rows);
    for (int64_t c = 0; c < columns; ++c) {
      for (int64_t i = 0; i < fours; ++i) {
        if (kind == PackedKind::fours_int8) {
          at[c * fours + i] = static_cast<unsigned char>(rows[i * columns + c] + byte_added);
        } else {  // terms i and i + 4, of which two neighbours were in a byte
          const unsigned char low = rows[i / 2 * columns + c],
                              high = rows[(2 + i / 2) * columns + c];
          const int shift = i % 2 * 4;
          at[c * fours + i] =
              static_cast<unsigned char>((low >> shift & 15) | (high >> shift & 15) << 4);
        }
      }
    }
  }
}

void pack_converted(const Source &source, const PackedMatrix &matrix, PackedKind kind,
                    unsigned char *buffer) {
  FloatBlock block;
  const Storage storage = storage_of(kind);
  for (int64_t panel = 0; panel < panels_of(matrix.columns); ++panel) {
    if (source.scales) {
      pack_panel_of_codes(source, matrix, kind, panel, buffer);
    } else if (storage == Storage::int8) {
      pack_panel_int8(source, matrix, kind, panel, &block, buffer);
    } else if (storage == Storage::int4) {
      pack_panel_int4(source, matrix, kind, panel, &block, buffer);
    } else {
      for (int64_t k = 0; k < matrix.depth; k += block_terms) {
        read_block(source, matrix, k, panel * panel_columns, &block);
        const int64_t at = k * panel_columns;
        if (kind == PackedKind::plain_f32) {
          float *const to = reinterpret_cast<float *>(buffer + matrix.weights_offset) +
                            k * matrix.stride + panel * panel_columns;
          for (int64_t i = 0; i < block.terms; ++i)
            memcpy(to + i * matrix.stride, block.rows[i],
                   static_cast<size_t>(block.columns) * sizeof(float));
        } else if (storage == Storage::f32) {
          store_block(
              block, [](float x, int64_t) { return x; },
              panel_at<float>(matrix, kind, panel, buffer) + at);
        } else if (storage == Storage::f16) {
          store_block(
              block, [](float x, int64_t) { return f16_of(x); },
              panel_at<uint16_t>(matrix, kind, panel, buffer) + at);
        } else {
          store_block(
              block, [](float x, int64_t) { return bf16_of(x); },
              panel_at<uint16_t>(matrix, kind, panel, buffer) + at);
        }
      }
    }
    if (has_fours(kind)) put_fours_together(matrix, kind, panel, buffer);
  }
}

uint64_t panels_checksum(const PackedLayout &layout, const void *buffer) {
  uint64_t sum = 0;
  for (const PackedMatrix &matrix : layout.matrices) {
    for (int64_t panel = 0; panel < panels_of(matrix.columns); ++panel) {
      const int64_t at = panel * matrix.depth * panel_columns;
      sum +=
          checksum(buffer, matrix.weights_offset + at * float_bytes, matrix.depth, lines_per_row);
    }
  }
  return sum;
}

// Of all that lies behind the panels of floats: biases; else of all that lies behind the header.
uint64_t rest_checksum(const PackedLayout &layout, PackedKind kind, const void *buffer) {
  const int64_t first = kind == PackedKind::panels_f32 ? layout.matrices[0].bias_offset
                                                       : static_cast<int64_t>(sizeof(PackedHeader));
  return checksum(buffer, first, (layout.bytes - first) / 64, 1);
}

// Element (k, column) of the matrix, in the words of the caller: in rows as they are stored.
mha_status fail_range(Report report, const Source &source, bool is_in_out, int64_t k,
                      int64_t column, float x) {
  const int64_t place = source.columns.place(column);
  return report.fail(MHA_ERROR_OUT_OF_RANGE,
                     "%s[%lld][%lld] is %g, but the largest f16 is 65504; scale the weights down, "
                     "or set weight_type to MHA_TYPE_BF16 (3)",
                     source.name, lld(is_in_out ? k : place), lld(is_in_out ? place : k),
                     static_cast<double>(x));
}

Count aligned_floats(Count floats) { return round_up(floats, 16) * Count(sizeof(float)); }

}  // namespace

mha_status check_range(Report report, const LayerShape &shape, PackedKind kind,
                       const mha_layer_weights &weights) {
  if (kind != PackedKind::panels_f16 || weights.type == MHA_TYPE_F16) return MHA_OK;
  const PackedLayout layout = packed_layout(shape, kind);
  FloatBlock block;
  for (int name = 0; name < num_matrices; ++name) {
    const PackedMatrix &matrix = layout.matrices[name];
    const Source source =
        matrix.columns > 0 ? source_of(shape, weights, static_cast<MatrixName>(name)) : Source{};
    for (int64_t column = 0; column < matrix.columns; column += panel_columns) {
      for (int64_t k = 0; k < matrix.depth; k += block_terms) {
        read_block(source, matrix, k, column, &block);
        for (int64_t i = 0; i < block.terms; ++i) {
          bool is_too_large = false;  // one of the row, which is found without a branch
          for (const float x : block.rows[i])
            is_too_large |= (magnitude_of(x) >= 65520.0f) & (x - x == 0.0f);
          for (int64_t c = 0; is_too_large; ++c) {
            const float x = block.rows[i][c];
            if (magnitude_of(x) < 65520.0f || x - x != 0.0f) continue;
            return fail_range(report, source, weights.layout == MHA_LAYOUT_IN_OUT, k + i,
                              column + c, x);
          }
        }
      }
    }
  }
  return MHA_OK;
}

PackedLayout packed_layout(const LayerShape &shape, PackedKind kind) {
  PackedLayout layout = {};
  layout.matrices[matrix_q] = {shape.query_dim, shape.q_columns(), 0, 0, 0, 0};
  layout.matrices[matrix_g] = {shape.query_dim, shape.g_columns(), 0, 0, 0, 0};
  layout.matrices[matrix_k] = {
      shape.key_dim, shape.only_asks() ? 0 : shape.k_columns(), 0, 0, 0, 0};
  layout.matrices[matrix_v] = {
      shape.value_dim, shape.only_asks() ? 0 : shape.v_columns(), 0, 0, 0, 0};
  layout.matrices[matrix_o] = {
      shape.output_depth(), shape.has_output ? shape.output_dim : 0, 0, 0, 0, 0};

  Count at(static_cast<int64_t>(sizeof(PackedHeader)));
  for (PackedMatrix &matrix : layout.matrices) {
    matrix.weights_offset = at.value();
    if (kind != PackedKind::plain_f32) {
      at = at +
           round_up(Count(panels_of(matrix.columns)) * Count(panel_bytes(matrix.depth, kind)), 64);
    } else if (shape.has_one_input_width() && &matrix <= &layout.matrices[matrix_v]) {
      // W_Q|W_G|W_K|W_V side by side, one product.
      int64_t column = 0;
      const int64_t columns = shape.input_columns();
      for (const PackedMatrix *before = layout.matrices; before < &matrix; ++before)
        column += before->columns;
      const int64_t start = layout.matrices[matrix_q].weights_offset;
      matrix.weights_offset = start + column * static_cast<int64_t>(sizeof(float));
      matrix.stride = columns;
      at = Count(start) + aligned_floats(Count(columns) * Count(matrix.depth));
    } else {
      matrix.stride = matrix.columns;
      at = at + aligned_floats(Count(matrix.columns) * Count(matrix.depth));
    }
    if (at.overflows()) break;
  }
  for (PackedMatrix &matrix : layout.matrices) {
    const Storage storage = storage_of(kind);
    if (storage != Storage::int8 && storage != Storage::int4) break;
    const int64_t per_column = storage == Storage::int4 ? blocks_of(matrix.depth, int4_group) : 1;
    matrix.scales_offset = at.value();
    at = at + Count(panels_of(matrix.columns)) * Count(per_column) *
                  Count(panel_columns * sizeof(float));
  }
  for (PackedMatrix &matrix : layout.matrices) {
    matrix.bias_offset = at.value();
    at = at + Count(panels_of(matrix.columns)) * Count(panel_columns * sizeof(float));
  }
  layout.bytes = at.value();
  return layout;
}

void pack_layer(const LayerShape &shape, PackedKind kind, const PackedLayout &layout,
                const mha_layer_weights &weights, void *buffer) {
  unsigned char *const bytes = static_cast<unsigned char *>(buffer);
  // Plain matrices are rounded up to whole cache lines. Clear what might be the last line of each
  // before anything is copied.
  for (int i = 1; kind == PackedKind::plain_f32 && i <= num_matrices; ++i) {
    const int64_t end =
        i < num_matrices ? layout.matrices[i].weights_offset : layout.matrices[0].bias_offset;
    const bool is_line_border = end % 64 == 0;  // not between the parts of W_Q|W_G|W_K|W_V
    if (is_line_border) memset(bytes + end - 64, 0, 64);
  }
  const bool stays_float =
      storage_of(kind) == Storage::f32 && storage_of_type(weights.type) == Storage::f32;
  // Behind the panels of fewer bits there may be gaps, and behind the scales columns that the
  // caller does not have.
  if (storage_of(kind) != Storage::f32) memset(bytes, 0, static_cast<size_t>(layout.bytes));
  uint64_t sum = 0;
  for (int i = 0; i < num_matrices; ++i) {
    const MatrixName name = static_cast<MatrixName>(i);
    const PackedMatrix &matrix = layout.matrices[i];
    if (matrix.columns > 0 && stays_float)
      sum += pack_floats(source_of(shape, weights, name), matrix, kind, bytes);
    else if (matrix.columns > 0)
      pack_converted(source_of(shape, weights, name), matrix, kind, bytes);
    pack_bias(shape, weights, name, matrix, bytes);
  }
  finish_copying();

  PackedHeader header = {};
  memcpy(header.magic, packed_magic, sizeof header.magic);
  header.byte_order = packed_byte_order;
  header.version = packed_version;
  header.contract = MHA_CONTRACT;
  header.kind = static_cast<uint32_t>(kind);
  header.bytes = static_cast<uint64_t>(layout.bytes);
  if (!stays_float && kind == PackedKind::panels_f32) sum = panels_checksum(layout, bytes);
  header.payload_checksum = sum + rest_checksum(layout, kind, bytes);
  header.shape = shape;
  header.header_checksum = header_checksum(header);
  memcpy(bytes, &header, sizeof header);
}

mha_status read_packed(Report report, const void *buffer, size_t buffer_bytes, LayerShape *shape,
                       PackedKind *kind, PackedLayout *layout) {
  if (!buffer) return report.null("buffer is NULL; pass the buffer that mha_layer_pack filled");
  if (reinterpret_cast<uintptr_t>(buffer) % 64 != 0)
    return report.invalid(
        "buffer is not aligned to 64 bytes; place the packed layer at an address that is a "
        "multiple of 64");
  if (buffer_bytes < sizeof(PackedHeader))
    return report.about(2).fail(
        MHA_ERROR_PACKED_FORMAT,
        "buffer_bytes is %zu, less than the %zu of a packed layer's header; pass the whole layer",
        buffer_bytes, sizeof(PackedHeader));
  PackedHeader header;
  memcpy(&header, buffer, sizeof header);
  if (memcmp(header.magic, packed_magic, sizeof header.magic) != 0)
    return report.fail(MHA_ERROR_PACKED_FORMAT,
                       "buffer does not hold a packed layer; pass one that mha_layer_pack filled");
  if (header.byte_order != packed_byte_order)
    return report.fail(
        MHA_ERROR_PACKED_FORMAT,
        "the layer was packed on a machine of the other byte order; pack it again on this machine");
  if (header.version != packed_version)
    return report.fail(MHA_ERROR_PACKED_FORMAT,
                       "the layer was packed in version %u of the format, but this library reads "
                       "version %u; pack it again",
                       header.version, packed_version);
  if (header.header_checksum != header_checksum(header))
    return report.fail(
        MHA_ERROR_PACKED_FORMAT,
        "the header of the packed layer is damaged (its checksum is wrong); pack it again");
  if (header.contract != MHA_CONTRACT)
    return report.fail(
        MHA_ERROR_PACKED_FORMAT,
        "the layer was packed for arithmetic contract %u, but this library has %d; pack it again",
        header.contract, MHA_CONTRACT);
  *kind = static_cast<PackedKind>(header.kind);
  if (*kind < PackedKind::panels_f32 || *kind > PackedKind::fours_int8)
    return report.fail(
        MHA_ERROR_PACKED_FORMAT,
        "the packed layer is of kind %u, which this version does not know; pack it again",
        header.kind);
  *shape = header.shape;
  // Guards the bounds against a header that was made up: its checksum is no secret.
  const LayerShape &s = *shape;
  const int64_t dims[] = {s.query_dim, s.key_dim,      s.value_dim, s.output_dim,
                          s.num_heads, s.num_kv_heads, s.head_dim,  s.head_dim_v};
  bool is_sound = s.has_heads() ? s.num_kv_heads > 0 && s.num_heads % s.num_kv_heads == 0
                                : s.has_output && s.scale == 0.0f;
  for (const int64_t &dim : dims) {
    const bool is_of_keys = &dim == &dims[1] || &dim == &dims[2];
    // All but query_dim and output_dim.
    const bool is_of_heads = &dim != &dims[0] && &dim != &dims[3];
    const bool is_zero = s.has_heads() ? is_of_keys && s.only_asks() : is_of_heads;
    is_sound = is_sound && (is_zero ? dim == 0 : dim > 0 && dim <= INT32_MAX);
  }
  is_sound = is_sound && s.q_columns() <= INT32_MAX && s.context_columns() <= INT32_MAX;
  is_sound = is_sound && s.scale - s.scale == 0.0f && s.has_output <= 1 &&
             (s.has_output || s.output_dim == s.context_columns());
  for (const unsigned char byte : header.reserved) is_sound = is_sound && byte == 0;
  is_sound =
      is_sound && s.gate <= MHA_GATE_SOFTPLUS &&
      (s.gate == MHA_GATE_NONE ? s.gate_dim == 0
                               : s.has_heads() && (s.gate_dim == 1 || s.gate_dim == s.head_dim_v));
  is_sound = is_sound && s.arithmetic <= Arithmetic::int16 &&
             has_fours(*kind) == (s.arithmetic != Arithmetic::f32);
  is_sound = is_sound && (*kind != PackedKind::plain_f32 || s.fits_sgemm());
  if (is_sound) *layout = packed_layout(*shape, *kind);
  if (!is_sound || layout->bytes < 0 || static_cast<uint64_t>(layout->bytes) != header.bytes)
    return report.fail(MHA_ERROR_PACKED_FORMAT,
                       "the packed layer's sizes contradict each other; pack it again");
  if (buffer_bytes < header.bytes)
    return report.about(2).fail(
        MHA_ERROR_PACKED_FORMAT,
        "buffer_bytes is %zu, but the packed layer has %llu bytes; pass the whole layer",
        buffer_bytes, llu(header.bytes));
  return MHA_OK;
}

bool packed_checksum_holds(PackedKind kind, const PackedLayout &layout, const void *buffer) {
  PackedHeader header;
  memcpy(&header, buffer, sizeof header);
  const uint64_t of_panels = kind == PackedKind::panels_f32 ? panels_checksum(layout, buffer) : 0;
  return of_panels + rest_checksum(layout, kind, buffer) == header.payload_checksum;
}

}  // namespace mha
