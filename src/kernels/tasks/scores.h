// What changes scores, and which pairs of query and key have one.
#pragma once

#include "../../contract.h"
#include "mha.h"

namespace mha {

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

// What changes scores (CONTRACT.md, section 7): what the caller gives for the model, and what
// follows from mha_score_arrays.
struct ScoreOptions : mha_score_options {
  bool change_scores;     // something other than sinks, head scales and what limits pairs is given
  bool limits_pairs;      // mask, segments or biases may leave keys out
  float softcap_inverse;  // 0: none
  PairArray relative;     // by distance, -relative_left .. relative_right, in place of the column;
                          // base null: none
  const float *q_scales;  // row i of sequence b: at b * q_scales_stride + i; null: none
  int64_t q_scales_stride;
  PairArray bias, mask;  // mask: bytes
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

}  // namespace mha
