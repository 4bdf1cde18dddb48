// What the kernels are asked to do: plain structs that describe it, and the table of functions that
// each instruction set provides.
//
// This is the border between the library and the kernels. The library is compiled once, for any
// processor; kernels are compiled once for each instruction set, and reached only through the
// table. This header therefore holds no function that a linker could share between them. Both also
// include compiler.h and storage.h, whose functions every file compiles for itself.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "../compiler.h"

namespace mha {

// Columns of a weight panel: a multiple of every vector width, and 3 registers of AVX-512.
constexpr int64_t panel_columns = 48;
// Keys of a key tile, which lie side by side in memory, one per lane.
constexpr int64_t tile_keys = 16;

// The contract fixes these, with its section: terms of one chain of a projection (3, 4) and of a
// score (7), keys of a chunk (8), the most terms of int4 whose products are added as integers (4),
// terms of an input row that share a scale in integer arithmetic (4), groups of weights whose
// offsets are multiplied in one chain (4), and the largest block of H (2).
constexpr int64_t dot_block = 256;
constexpr int64_t score_block = 32;
constexpr int64_t chunk_keys = 256;
constexpr int64_t int4_chain = 32;
constexpr int64_t code_group = 64;
constexpr int64_t offset_block = 64;
constexpr int64_t most_hadamard_block = 256;

// Weights that share a scale: a power of two of inputs of one output.
constexpr int64_t min_group = 16, max_group = 128;

// How numbers are stored: the MHA_TYPE_* of mha.h.
enum class Storage : uint32_t { f32, f16, bf16, int8, int4 };

// What projections compute in: the MHA_ARITHMETIC_* of mha.h.
enum class Arithmetic : uint32_t { f32, int8, int16 };

// ---- Projection

// Input rows that one block of weights serves before it is replaced in the cache.
constexpr int64_t project_block_rows = 144;

// The valid rows of one sequence in its array. Other rows are padding, or belong to other
// sequences.
struct Extent {
  int64_t first, count;
  int64_t before;  // valid rows of the sequences before it
  int64_t block;   // number of the sequence in the destination
};

// Input rows: row i of sequence b is at base + b * batch_stride + i * row_stride.
struct InputRows {
  const void *base;
  int64_t rows_per_sequence;
  int64_t batch_stride;
  int64_t row_stride;
  const Extent *extents;           // of each sequence; null: all rows are valid
  Storage storage = Storage::f32;  // or 16 bits
};

// Where results of a projection go. Column n belongs to head h = n / head_width, as its column c =
// n % head_width. For row i of sequence b, which is the j-th valid one of the sequence, it goes to
//
//   rows         base + b * batch_stride + i * row_stride + h * head_stride + c
//   value_rows   base + b * batch_stride + j * row_stride + h * head_stride + c
//   key_tiles    base + b * batch_stride + h * head_stride
//                  + (j / 16) * 16 * head_width + c * 16 + j % 16
//
// With extents, b is the `block` of the sequence.
struct Destination {
  enum class Kind : uint32_t { none, rows, value_rows, key_tiles };
  Kind kind;
  Storage storage;  // of rows; f32 or 16 bits
  void *base;
  int64_t batch_stride;
  int64_t row_stride;
  int64_t head_stride;
  int64_t head_width;
  // Rows of one sequence, in the same storage, that are added to the results; null: none.
  const void *residual;
  int64_t residual_row_stride;
};

// y = canon(dot(x, W) + bias): one product of input rows with one packed matrix. Columns after the
// last one of W are zero. The panels are
//
//   f32, f16, bf16   [ceil(columns / 48)][depth][48] numbers
//   int8             [ceil(columns / 48)][depth][48] codes
//   int4             [ceil(columns / 48)][ceil(depth / 2)][48] bytes: in the low half the code + 8
//                    of an even term, in the upper half that of the next term
//
// and 48 bytes after the last panel of int4 may be read too. Scales of columns are
// [ceil(columns / 48)][48] floats; scales and offsets of groups
// [ceil(columns / 48)][ceil(depth / group)][48] numbers. In integer arithmetic four terms lie
// side by side, and bytes after the last term may be anything, since the codes of rows are 0 there:
//
//   int8             [ceil(columns / 48)][ceil(depth / 4)][48][4] bytes, the code + 128
//   int4             [ceil(columns / 48)][ceil(depth / 8)][48][4] bytes: in the low half the
//                    code + 8, in the upper half that of the term four further on
struct Projection {
  InputRows x;
  int64_t rows;     // of all sequences together
  int64_t depth;    // width of an input row
  int64_t columns;  // of W
  Storage storage;
  Arithmetic arithmetic;
  Storage scale_storage;  // of groups: f32 or f16
  int64_t group;          // terms of a column that share a scale; 0: all of them
  int64_t sums;           // X of the contract that follow each row made ready; 0: without offsets
  const void *panels;
  const void *scales, *offsets;  // null: none
  const float *bias;             // [ceil(columns / 48) * 48], zero where there is none
  Destination destination;
  Destination tap;  // a second copy for mha_outputs, or none
};

// ---- Attention

// One sequence of a call. Positions count from the sequence's first key.
struct Sequence {
  int64_t n_q;      // queries
  int64_t n_kv;     // keys to attend to, with those in the cache
  int64_t q_start;  // position of the first query

  // In the caller's arrays: rows of the first query and of the first key that comes with the call.
  int64_t q_first, kv_first;
  int64_t past;     // position of that key
  int64_t kv_rows;  // keys that come with the call

  // The number of the sequence in the cache or, without one, of its first block among the keys and
  // values that the call packs; and its number in the caller's arrays and in the outputs.
  int64_t in_cache, in_arrays;

  // The column of the first key in outputs with a number per pair; and in mask, bias and segments,
  // where it is negative if the first key has no column. first_in_columns is the first position
  // that has one. Keys from end_of_columns on are masked: that is n_kv, or less where rows of these
  // arrays are short.
  int64_t column, option_column;
  int64_t first_in_columns, end_of_columns;
};

// Keys or values of all sequences and kv heads, in one of three forms. Strides count elements.
//
//   packed   As the loops read them, 16 positions by 16: keys in tiles,
//            [position / 16][head_dim][16]; values in rows of head_dim_v_padded, which may be parts
//            of longer rows. The positions of a sequence lie in blocks of memory, block number n at
//            base + n * batch_stride.
//   stored   Keys as rows, whose first elements are the values, in the same blocks. Units bring
//            them into the packed form chunk by chunk.
//   plain    Rows of the caller's, which units bring into the packed form as well, or read in place
//            (reads_rows, late_rows and in_place_rows of AttentionPlan).
struct KeyValues {
  const void *base;
  Storage storage;
  bool is_packed;
  int64_t batch_stride, head_stride;
  int64_t row_stride;  // of packed keys the width of a key: a tile has 16 times as many numbers; of
                       // int4 bytes

  // For packed and stored ones.
  const int32_t *tables;  // [sequence][table_stride] numbers of blocks; null: the sequence's number
  int64_t table_stride;
  int64_t block_positions;     // positions of a block, a multiple of 16
  int64_t ring_positions;      // position p lies where p % ring_positions would; 0: no ring
  const float *scales;         // of codes: [block][kv head][block_positions]
  int64_t scale_batch_stride;  // of blocks
};

// Static: each instruction set has its own, or the linker would keep one of them for all.
static inline bool is_plain(const KeyValues &source) {
  return !source.is_packed && source.block_positions == 0;
}
static inline bool is_stored(const KeyValues &source) {
  return !source.is_packed && source.block_positions != 0;
}

struct StridedRows {
  const void *base;
  int64_t batch_stride;
  int64_t row_stride;
  int64_t head_stride;
  Storage storage = Storage::f32;  // or 16 bits
};

// Rotation of queries and keys (CONTRACT.md, section 5); see mha_rope.
struct Rotation {
  const float *cos, *sin;  // null: none
  int64_t stride, pairs;
  int64_t offset;  // of the first element that is rotated
  bool is_interleaved;
  const int64_t *positions;  // [batch][rows_per_sequence] by row of the caller's array; null: the
                             // row's position in its sequence
  int64_t rows_per_sequence;
  int64_t origin;  // where positions without `positions` count from: kv_first_position of the call
};

// Norm of queries, keys, values or the context (CONTRACT.md, sections 5 and 10); see mha_norm.
struct Norm {
  bool is_given, is_layer, is_after_rotation;
  bool is_of_all_heads;  // together
  float epsilon;
  float count;                 // of the numbers that are normalised together
  const float *weight, *bias;  // null: 1, none
  int64_t head_stride;         // of both
  int64_t rows_per_sequence;   // of the caller's array; is_of_all_heads: statistics go by its rows
};

// What is done to rows of queries, keys or values on their way.
struct Preparation {
  Norm norm;
  Rotation rotation;
  bool is_any;  // or the rows have 16 bits and go through the scratch memory too
};

// A number for each pair of row and key, at base + sequence * batch_stride + head * head_stride +
// row * row_stride + column.
struct PairArray {
  const void *base;  // null: none
  Storage storage;
  int64_t batch_stride, head_stride, row_stride;
};

// Segment numbers of rows and of the columns of keys (CONTRACT.md, section 6).
struct PositionSegments {
  const int32_t *of_rows, *of_columns;  // at sequence * stride + row or column; null: none
  int64_t row_stride, column_stride;
  bool add_keys;  // MHA_SEGMENTS_ALSO: then the request's window leaves all keys, and this is the
                  // window of the flags
  int64_t window_left, window_right;
};

// Lists of chosen keys (CONTRACT.md, section 6), of int32_t; the heads are kv heads, and a column
// is an entry.
struct ChosenKeys {
  PairArray lists;  // base null: all keys
  int64_t count;    // entries of a list
  int64_t block;    // keys of an entry
};

// What changes scores (CONTRACT.md, section 7); see mha_score_options and mha_score_arrays.
struct ScoreOptions {
  bool change_scores;                 // softcap, ALiBi, relative biases or biases do
  bool limits_pairs;                  // mask, segments or biases may leave keys out
  float softcap, softcap_inverse;     // 0: none
  const float *alibi_slopes, *sinks;  // [num_heads]; null: none
  PairArray relative;  // by distance, -relative_left .. relative_right, in place of the column;
                       // base null: none
  int64_t relative_left, relative_right;
  const float *q_scales;  // row i of sequence b: at b * q_scales_stride + i; null: none
  int64_t q_scales_stride;
  const float *head_scales;  // [num_heads] factors of the context, 0 of heads that are not
                             // computed; null: all 1
  PairArray bias, mask;      // mask: bytes
  PositionSegments segments;
  ChosenKeys chosen;
};

// Outputs with a number per pair of query and key. A second pass over the keys computes them
// (kernels/inspect.h). Null: not asked for.
struct PairOutputs {
  // Each is [batch, num_heads, n_q, pair_columns].
  float *scores, *scaled_scores, *softcapped_scores, *masked_scores, *weights;

  bool has_any() const {
    return scores || scaled_scores || softcapped_scores || masked_scores || weights;
  }
};

// What rows of the context are multiplied by (CONTRACT.md, section 10); see mha_layer_config.
struct Gate {
  StridedRows values;  // base null: no gate
  bool is_sigmoid;     // else softplus
  bool is_single;      // one number for a head, else head_dim_v
};

// The parts of a unit's scratch memory, as offsets in floats, each a multiple of 16. A unit has
// block_queries * heads_per_kv rows.
struct AttendScratch {
  int64_t queries;  // [rows][head_dim]
  int64_t keys;     // [16 or late_tiles][head_dim][16], for keys to be brought into this form
  int64_t values;   // [256][head_dim_v_padded], for the same
  // Rows that are being prepared or widened: [4][head_dim], of plain keys [16][head_dim], and at
  // least [head_dim_v].
  int64_t prepared;
  int64_t scores;  // [max_attend_rows, or rows of few][score_stride]
  // With chosen keys: the entries of a list in order; a bit for each entry that there can be; and
  // scales of gathered keys and values, [2][256].
  int64_t chosen_blocks, chosen_bits, chosen_scales;
  // [slots] of partial_stride: o [rows + spare_rows][head_dim_v_padded], m [rows] and l [rows]. Up
  // to merge_rows floats after m and l may be read and written.
  int64_t partials;
  int64_t partial_stride;
  int64_t floats;  // all of it
};

constexpr int64_t max_attend_rows = 8;         // rows of a tile
constexpr int64_t max_few_rows = 8;            // of a kv head in a unit that reads plain rows
constexpr int64_t max_group_rows = 64;         // of all kv heads in such a unit
constexpr int64_t late_tiles = 8;              // plain keys that are packed late: tiles at a time
constexpr int64_t max_interleaved_chunks = 4;  // computed in step, each with a partial of its own
constexpr int64_t spare_rows = 1;   // rows after the last one that a tile may compute and discard
constexpr int64_t merge_rows = 16;  // rows whose partials are merged side by side
// The rows that such a unit computes for each kv head. Loops take 1, 2, 4 or 6.
constexpr int64_t padded_rows(int64_t rows) { return rows <= 2 ? rows : (rows + 1) / 2 * 2; }
// Not a power of two, so that the rows of a tile do not fall into the same sets of a cache.
constexpr int64_t score_stride = chunk_keys + 16;

// The attention of a call is described by four structs. One stage of the call writes each of them,
// and later stages only read it. (Strides of ScoreOptions follow once lengths in a cache are
// checked, and each pass describes the sequences anew.)
//
//   AttentionRequest   what is asked, with all defaults resolved    check/request.cpp
//   AttentionPlan      sizes, and offsets in the workspace          plan/attention_plan.cpp
//   AttentionArrays    where its rows lie                           the entry, in api/
//   AttentionRun       units of work, and what lies in the workspace    run/attend.cpp
struct AttentionRequest {
  int64_t batch;        // sequences
  int64_t array_batch;  // sequences that the arrays have room for: 1 where they are packed
  int64_t n_q;          // rows of queries in the arrays, per sequence there
  int64_t num_heads, num_kv_heads, head_dim, head_dim_v;
  int64_t heads_per_kv;  // query heads that share a kv head
  int64_t most_queries;  // of one unit of work; 0: as many as its partials leave room for
  float scale;
  // The query at position p attends to the keys at positions p - window_left .. p + window_right.
  int64_t window_left, window_right;
  ScoreOptions options;
  // Units prepare keys and values only where they read the caller's rows. Others are prepared when
  // they are stored.
  Preparation prepare_q, prepare_k, prepare_v;
  Norm context_norm;     // of the rows that W_O takes, once all their heads are computed
  bool gates_late;       // the gate follows that norm
  KeyValues k, v;        // how they are stored; base is null where the call itself writes them
  float *lse, *context;  // outputs, contiguous as in mha.h; null: not asked for
  float *partials;  // [batch, num_heads, n_q, partial_head + head_dim_v] in place of all others
  PairOutputs pairs;
};

// Follows from the sizes in the arguments alone, so that a size query computes it too.
struct AttentionPlan {
  int64_t head_dim_v_padded;  // rounded up to a multiple of 16
  int64_t late_rows;          // most rows of a unit that packs plain keys just before it reads them
  int64_t in_place_rows;      // most rows of a unit that reads plain values in the caller's array
  bool reads_rows;            // units of few rows read plain keys and values 16 positions at a time
  AttendScratch scratch;
  // The keys of a unit can be split if there is memory for the partials of the parts. A ring buffer
  // holds a window of a few chunks, which are not worth it.
  bool may_split_keys;
  int64_t split_partial_stride;
  // Offsets in the workspace, in bytes. Only some calls need the memory from query_extents on.
  int64_t unit_counter, unit_scratch, sequences;
  int64_t query_extents, key_extents;        // a pass may leave out rows
  int64_t q_statistics, k_statistics;        // a norm covers all heads of a row
  int64_t unfinished_parts, split_partials;  // the keys of a unit are split
  int64_t row_partials;                      // outputs per pair: m and l of all rows
};

struct OutputRows {
  void *base;
  Storage storage;  // f32 or 16 bits
  int64_t batch_stride, row_stride, head_stride;
};

struct AttentionArrays {
  StridedRows q;
  KeyValues k, v;
  // Rows that come with the call and go to k and v before it attends; base null: none.
  StridedRows new_keys, new_values;
  Gate gate;
  OutputRows output;  // canonical rows of the context, gated
};

// The keys of a unit, split between threads: each part is 2^n chunks, a subtree of the contract's
// tree. The thread that finishes a unit's last part merges the partials of all of them.
struct KeyParts {
  int64_t count;        // of a unit; 1: the keys are not split
  int64_t chunks;       // of a part, a power of two
  int64_t *unfinished;  // [units] parts that are not finished yet
  float *partials;      // [units][count] of split_partial_stride
};

// Needs the contents of arrays with lengths and positions, which are checked by then.
struct AttentionRun {
  int64_t longest_kv;     // the most keys of a sequence
  int64_t pair_columns;   // columns of outputs with a number per pair
  int64_t block_queries;  // queries of one unit of work
  int64_t query_blocks;   // units of the longest sequence, for each kv head
  int64_t unit_kv_heads;  // kv heads of a unit
  KeyParts parts;
  const Sequence *sequences;  // [batch], described anew for each pass
  bool reworks_context;       // head scales, the output `context`, a gate or the output's type do
  float *q_statistics, *k_statistics;  // [array_batch][rows][2] mean and r, of norms of all heads
  // [batch, num_heads, n_q] m and l of finished rows, for outputs per pair; null: not needed.
  float *row_maxima, *row_sums;
};

struct Attention {
  AttentionRequest request;
  AttentionPlan plan;
  AttentionArrays arrays;
  AttentionRun run;
};

// ---- Partials that are handed out

constexpr int64_t partial_head = 2;  // m and l, in front of o

// Rows of partials [batch, num_heads, n_q, partial_head + head_dim_v], to be finished (CONTRACT.md,
// section 10); see mha_partials_args.
struct Partials {
  const float *partials;
  int64_t batch, num_heads, n_q, head_dim_v;
  const float *sinks, *head_scales;  // [num_heads]; null: none
  void *output;                      // null: not asked for
  Storage output_storage;
  int64_t output_batch_stride, output_row_stride, output_head_stride;
  float *lse;  // [batch, num_heads, n_q]; null: not asked for
};

// ---- Choosing keys

// One call's choice of keys (CONTRACT.md, section 17). Queries are numbered across sequences, those
// of sequence number b from b * longest_q on.
struct KeyChoice {
  const Attention *attention;  // for queries and keys; its heads are the index heads
  const float *weights;        // of row i of sequence b's array at b * weights_batch_stride + i *
                               // weights_row_stride + head
  int64_t weights_batch_stride, weights_row_stride;
  int64_t num_chosen;
  int32_t *chosen;      // [array_batch, n_q, num_chosen], all -1 at first
  float *index_scores;  // [array_batch, n_q, n_kv], all -infinity at first; null: not asked for
  int64_t longest_q;
  int64_t first_query;  // the first of the queries whose scores are in memory
  float *scores;        // a row of score_stride floats (a multiple of 16) for each of these queries
  int64_t score_stride;
  int64_t part_chunks;  // of the keys of one unit
};

// ---- Storing keys or values

// Rows of keys or values, [batch][row][kv head][width], prepared and converted to their place in
// packed storage.
struct KvStore {
  StridedRows rows;
  Preparation prepare;
  const float *statistics;  // of the rows, if the norm is of all heads
  // Rows kv_first .. kv_first + kv_rows of each go to the positions from `past` on.
  const Sequence *sequences;
  KeyValues to;
  int64_t num_kv_heads, width;
  bool are_keys;
};

// Rows of queries or keys whose heads are normalised together, and where their statistics go.
struct RowMeasure {
  KeyValues rows;  // plain
  Preparation prepare;
  float *statistics;
  const Sequence *sequences;
  int64_t num_heads, width;
  bool are_keys;
};

// ---- Small layers

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

// ---- Recurrent attention and causal convolution

// The valid rows of one sequence of such a call.
struct SequenceRows {
  int64_t sequence;   // by which states are found
  int64_t in_arrays;  // by which rows are found
  int64_t first, count;
};

constexpr int64_t recurrent_columns = 32;  // of a block of a state: a unit has a multiple of this
constexpr int64_t recurrent_tokens = 16;   // rows that are prepared together

// The parts of a unit's scratch memory, as offsets in floats, each a multiple of 16.
struct RecurrentScratch {
  // Prepared rows: [recurrent_tokens + 2] of row_stride, the last one changes nothing. Offsets from
  // `queries` on are within a row, which begins with its key.
  int64_t rows, row_stride;
  int64_t decayed_key;  // the key times the decay; the key itself with one decay for a head
  int64_t queries;      // [queries of a state][width]
  int64_t decay;        // decay_dim numbers
  int64_t value;        // [head_dim_v, rounded up to recurrent_columns]
  int64_t factors;      // b and beta of CONTRACT.md, then c of each query
  int64_t width;        // of keys and queries: head_dim, rounded up to a multiple of 16
  int64_t gates;        // decay of the rows under way: [recurrent_tokens][decay_dim]
  int64_t betas;        // the same: [recurrent_tokens]
  int64_t changes;      // u of CONTRACT.md, of the last row: one number for each column
  int64_t state;        // block by block of columns: [head_dim][columns of the block]
  int64_t sums;         // of a pass: [3][recurrent_columns]
  int64_t outputs;      // [recurrent_columns] on their way to the caller
  int64_t floats;       // all of it
};

// Recurrent attention of a call (CONTRACT.md, section 18); see mha_recurrent_args.
struct Recurrence {
  int64_t num_q_heads, num_k_heads, num_v_heads, head_dim, head_dim_v, decay_dim;
  int64_t state_queries;  // output heads of a state
  int64_t heads_ahead;    // from one head of a thread to its next, probably
  float scale, norm_epsilon;
  const float *a_log, *dt_bias;  // null: none
  bool has_raw_beta;             // the sigmoid makes beta of it
  StridedRows q, k, v, decay, beta;
  OutputRows output;
  const float *state;            // null: 0
  float *state_out, *snapshots;  // null: not asked for
  int64_t num_snapshots;
  RecurrentScratch scratch;
};

constexpr int64_t conv_channels = 128;  // of a unit
constexpr int64_t max_conv_kernel = 8;

// A causal convolution (CONTRACT.md, section 19); see mha_causal_conv_args. Its arrays have no
// heads.
struct Convolution {
  int64_t channels, kernel_size;
  const float *weights, *bias;  // bias null: none
  bool has_silu;
  StridedRows x;
  OutputRows output;
  const float *state;  // null: 0
  float *state_out;    // null: not asked for
};

// ---- The table

// Products of codes: what differs between instruction sets with and without products of bytes.
struct CodeKernels {
  // Input rows [row_begin, row_end) of a projection as codes, each followed by its sums:
  // coded_bytes<int16_t> and 4 bytes for each sum at most.
  void (*encode_rows)(const Projection &projection, int64_t row_begin, int64_t row_end, void *to);

  // As Kernels::project. rows: what encode_rows has made of these input rows.
  void (*project)(const Projection &projection, const void *rows, int64_t row_begin,
                  int64_t row_end, int64_t panel_begin, int64_t panel_end);
};

// All that the library calls of one instruction set. Units of work call these functions, which take
// long enough that a call through a pointer costs nothing beside them. Each takes plain
// descriptions and writes to memory that is described there.
struct Kernels {
  uint32_t instruction_set;  // MHA_INSTRUCTION_SET_*
  const CodeKernels *codes;

  // Output rows [row_begin, row_end) and panels [panel_begin, panel_end) of a projection. rows:
  // what widen_rows has made of these input rows; null: they are floats, and taken as such.
  void (*project)(const Projection &projection, const void *rows, int64_t row_begin,
                  int64_t row_end, int64_t panel_begin, int64_t panel_end);

  // Input rows [row_begin, row_end), `width` numbers each, as floats, one after the other. Unless
  // group is 0, the sums of the groups of each row follow it.
  void (*widen_rows)(const InputRows &x, int64_t row_begin, int64_t row_end, int64_t width,
                     int64_t group, float *to);

  // One unit of attention: the queries from block * block_queries on of all query heads of
  // unit_kv_heads kv heads, group number `group` of one sequence, with the keys of one part.
  // scratch: attention.plan.scratch.floats floats, aligned to 64 bytes.
  void (*attend)(const Attention &attention, int64_t sequence, int64_t group, int64_t block,
                 int64_t part, float *scratch);

  // Norm, and a gate behind it, of rows [row_begin, row_end) of a sequence's context, which are
  // floats.
  void (*normalize_context)(const Attention &attention, int64_t sequence, int64_t row_begin,
                            int64_t row_end);

  // The outputs per pair of such a unit, when all its parts are done.
  void (*inspect)(const Attention &attention, int64_t sequence, int64_t kv_head, int64_t block,
                  float *scratch);

  // The scores of a unit of `attend` with one part of its keys; then the choice of one query.
  void (*score_keys)(const KeyChoice &choice, int64_t sequence, int64_t block, int64_t part,
                     float *scratch);
  void (*choose_greatest)(const KeyChoice &choice, int64_t sequence, int64_t query);

  // Rows [row_begin, row_end) of those that one sequence stores. scratch: of keys 4 * width, of
  // values width floats, if they are to be prepared.
  void (*store)(const KvStore &storing, int64_t sequence, int64_t row_begin, int64_t row_end,
                float *scratch);

  // The same rows of queries or keys. scratch: width floats.
  void (*measure)(const RowMeasure &measure, int64_t sequence, int64_t row_begin, int64_t row_end,
                  float *scratch);

  // The second half of project, for a product made elsewhere: adds the bias and writes output rows
  // [row_begin, row_end), of which the first is at `product`.
  void (*finish_rows)(const Projection &projection, const float *product, int64_t product_stride,
                      int64_t row_begin, int64_t row_end);

  // Rows of partials, head_dim_v numbers each behind m and l: merge(left, right). The result may be
  // one of them.
  void (*merge_partials)(const float *left, const float *right, int64_t rows, int64_t head_dim_v,
                         float *result);
  void (*finish_partials)(const Partials &partials);

  // All rows of one sequence, for the columns [column_begin, column_end) of one state. scratch:
  // recurrence.scratch.floats floats, aligned to 64 bytes.
  void (*advance_state)(const Recurrence &recurrence, const SequenceRows &rows, int64_t head,
                        int64_t column_begin, int64_t column_end, float *scratch);

  // All rows of one sequence, for conv_channels channels from `channel` on.
  void (*convolve)(const Convolution &convolution, const SequenceRows &rows, int64_t channel);

  // All of a small call; null where there is no such function. scratch: small_workspace_bytes.
  void (*run_small)(const SmallLayer &layer, const SmallCall &call, float *scratch);
};

// The kernels of each set, and the products of codes of one that only adds these.
#define MHA_SET(name, ...)             \
  extern const Kernels kernels_##name; \
  extern const CodeKernels codes_##name;
#include "sets.def"

}  // namespace mha
