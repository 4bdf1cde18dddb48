// What the kernels are asked to do: plain descriptions, and the table of functions that each instruction set provides.
// This is the only header that both the library and the kernels include. It holds no code.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace mha {

constexpr int64_t panel_columns = 48;  // columns of a weight panel: a multiple of every vector width, 3 registers of AVX-512
constexpr int64_t dot_block = 256;     // terms of one chain (CONTRACT.md, section 2)
constexpr int64_t chunk_keys = 256;    // keys of one chunk (CONTRACT.md, section 5)
constexpr int64_t key_block = 16;      // keys that lie side by side, one per lane, in a block of keys

// ---- Projection

constexpr int64_t project_block_rows = 144;  // input rows that pass under a block of weights

// Input rows: row i of sequence b is at base + b * batch_stride + i * row_stride.
struct InputRows {
  const float *base;
  int64_t rows_per_sequence;
  int64_t batch_stride;
  int64_t row_stride;
};

// Where column n of output row i of sequence b goes; n falls into head h = n / head_width at column c = n % head_width.
//   rows:       base + b * batch_stride + i * row_stride + h * head_stride + c
//   key_blocks: base + b * batch_stride + h * head_stride + (i / 16) * 16 * head_width + c * 16 + i % 16
struct Landing {
  enum class Kind : uint32_t { none, rows, key_blocks };
  Kind kind;
  float *base;
  int64_t batch_stride;
  int64_t row_stride;
  int64_t head_stride;
  int64_t head_width;
};

// y = canon(dot(x, W) + bias), one product of input rows with one packed matrix.
struct Projection {
  InputRows x;
  int64_t rows;         // of all sequences together
  int64_t depth;        // width of an input row
  int64_t columns;      // of W
  const float *panels;  // [ceil(columns / 48)][depth][48], zero beyond the last column
  const float *bias;    // [ceil(columns / 48) * 48], zero where there is none
  Landing landing;
  Landing tap;  // a second copy for mha_taps, or none
};

// ---- Attention

// Keys or values of all sequences and kv heads, in one of two forms.
//   packed: as the kernels read them; keys in blocks [n / 16][head_dim][16 keys], values in rows of head_dim_v_padded
//   plain:  rows of the caller's, brought into the packed form chunk by chunk
struct KeyValueSource {
  const float *base;
  int64_t batch_stride;
  int64_t head_stride;
  int64_t row_stride;  // of plain rows
  bool is_packed;
};

struct StridedRows {
  const float *base;
  int64_t batch_stride;
  int64_t row_stride;
  int64_t head_stride;
};

// The parts of a unit's scratch memory, as offsets in floats, each a multiple of 16. A unit has so many rows:
// block_queries * (query heads per kv head).
struct AttendScratch {
  int64_t queries;   // [rows][head_dim]
  int64_t keys;      // [16 blocks][head_dim][16], for plain key rows
  int64_t values;    // [256][head_dim_v_padded], for plain value rows
  int64_t scores;    // [attend_tile_rows_max][score_stride]
  int64_t excluded;  // [attend_tile_rows_max][256] bytes
  int64_t states;  // [slots] of state_stride: o [rows][head_dim_v_padded], m [rows], l [rows]; up to merge_rows floats may be read behind m
                   // and l
  int64_t state_stride;
  int64_t floats;  // all of it
};

constexpr int64_t attend_tile_rows_max = 8;
constexpr int64_t merge_rows = 16;                 // rows whose states are merged side by side
constexpr int64_t score_stride = chunk_keys + 16;  // no power of two, so that a tile's rows do not fall into the same cache sets

// One call's attention, the same for all its units of work.
struct Attention {
  int64_t batch, n_q, n_kv;
  int64_t num_heads, num_kv_heads, head_dim, head_dim_v;
  int64_t head_dim_v_padded;  // rounded up to a multiple of 16
  int64_t block_queries;      // queries of one unit
  float scale;
  bool is_causal;
  const int64_t *q_start;  // [batch], or null for n_kv - n_q
  StridedRows q;
  KeyValueSource k;
  KeyValueSource v;
  float *output;  // canonical context rows
  int64_t output_batch_stride, output_row_stride, output_head_stride;
  float *lse;  // optional outputs, contiguous as in mha.h
  float *attention_weights;
  float *scores, *scaled_scores, *masked_scores, *context;
  AttendScratch scratch;
};

// ---- The table

struct Kernels {
  uint32_t instruction_set;  // MHA_INSTRUCTION_SET_*
  int64_t project_tile_rows, project_tile_columns, attend_tile_rows;

  // Output rows [row_begin, row_end) and panels [panel_begin, panel_end) of a projection.
  void (*project)(const Projection &projection, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end);

  // One unit of attention: the queries [query_begin, query_begin + block_queries) of all query heads of one kv head of one sequence.
  // scratch: attention.scratch.floats floats, aligned to 64 bytes.
  void (*attend)(const Attention &attention, int64_t sequence, int64_t kv_head, int64_t query_begin, float *scratch);

  // The second half of project, for a product made elsewhere: adds the bias and lands output rows [row_begin, row_end), of which the first
  // is at `product`.
  void (*finish_rows)(const Projection &projection, const float *product, int64_t product_stride, int64_t row_begin, int64_t row_end);
};

extern const Kernels kernels_scalar;
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
extern const Kernels kernels_neon;

}  // namespace mha
