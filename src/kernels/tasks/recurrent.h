// Recurrent attention, and the causal convolution before it.
#pragma once

#include "rows.h"

namespace mha {

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

}  // namespace mha
