// The attention of a call, the partials that it hands out, and the choice of keys.
#pragma once

#include "key_values.h"
#include "scores.h"

namespace mha {

struct ProductKernels;  // kernels.h

// What rows of the context are multiplied by (CONTRACT.md, section 10); see mha_layer_config.
struct Gate {
  StridedRows values;  // base null: no gate
  bool is_sigmoid;     // else softplus
  bool is_single;      // one number for a head, else head_dim_v
};

// The parts of a unit's scratch memory, as offsets in floats, each a multiple of 16. A unit has
// block_queries * heads_per_kv rows.
struct AttendScratch {
  int64_t queries;  // [rows][query_stride]
  int64_t keys;     // [16 or late_tiles][head_dim + 1][16], for keys to be brought into this form
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
  bool is_in_integers;  // scores and context, of codes of 16 bits
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
  int64_t query_stride;       // head_dim; with codes of queries and their scale 1 more
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
  int64_t query_extents, key_extents;     // a pass may leave out rows
  int64_t q_statistics, k_statistics;     // a norm covers all heads of a row
  int64_t waiting_parts, split_partials;  // the keys of a unit are split
  int64_t row_partials;                   // outputs per pair: m and l of all rows
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
// tree. Of two subtrees that become one, the thread that finishes the second merges both.
struct KeyParts {
  int64_t count;     // of a unit; 1: the keys are not split
  int64_t chunks;    // of a part, a power of two
  int64_t *waiting;  // [units][count] finished ones of two subtrees that meet here
  float *partials;   // [units][count] of split_partial_stride
};

// Needs the contents of arrays with lengths and positions, which are checked by then.
struct AttentionRun {
  const ProductKernels *codes;  // with is_in_integers, otherwise null
  int64_t longest_kv;           // the most keys of a sequence
  int64_t pair_columns;         // columns of outputs with a number per pair
  int64_t block_queries;        // queries of one unit of work
  int64_t query_blocks;         // units of the longest sequence, for each kv head
  int64_t unit_kv_heads;        // kv heads of a unit
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

}  // namespace mha
