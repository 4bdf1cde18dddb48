// What the library computed at each point of a call, seen as matrices.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "call_options.h"
#include "example.h"
#include "inputs.h"
#include "layer.h"
#include "matrix.h"

namespace command {

// One matrix per head, of the queries, keys or values of one sequence.
struct Heads {
  const float *data = nullptr;
  int64_t count = 0;
  int64_t rows = 0;
  int64_t width = 0;
  int64_t row_stride = 0;
  int64_t head_stride = 0;

  Matrix head(int64_t index) const { return {data + index * head_stride, rows, width, row_stride}; }
  Matrix token(int64_t index) const { return {data + index * row_stride, count, width, head_stride}; }  // a row per head
  Matrix merged() const { return {data, rows, count * width, row_stride}; }                             // where head_stride = width
};

// The middle of one call, from the heads of q, k and v to those of the context. The matrices point into the vectors.
struct Attention {
  Heads q, k, v, context;
  float scale = 0;
  bool is_causal = false;
  bool is_self = false;                                 // queries and keys are of the same tokens
  const CallOptions *call = nullptr;                    // not NULL
  uint32_t instruction_set = MHA_INSTRUCTION_SET_AUTO;  // that the library used
  std::vector<float> context_values;                    // [n_q, num_heads, head_dim_v]
};

// The matrices of one head in between, [rows, columns] = [n_q, n_kv].
struct HeadScores {
  int64_t rows = 0, columns = 0;
  std::vector<float> scores, scaled_scores, softcapped_scores, masked_scores, weights;

  Matrix matrix(const std::vector<float> &values) const { return {values.data(), rows, columns, columns}; }
};

// Queries and keys after a norm or a rotation, and values where the norm is of them too.
struct Prepared {
  Heads q, k, v;
  std::vector<float> q_values, k_values, v_values;
};

// And what comes before and after it in a whole layer.
struct Forward {
  Heads q, k, v;                            // as projected
  std::unique_ptr<const Prepared> norm, rotation;  // NULL = none
  Attention middle;                         // with queries and keys normalised and rotated
  std::vector<float> q_values, k_values, v_values;
  std::vector<float> output;  // [n_q, output_dim]
  std::vector<float> gated;   // [n_q, num_heads * head_dim_v], the context behind the gate; empty where there is none, or not known
};

// Runs the first sequence of a call. without_output is the layer without its W_O, where it has a gate; NULL = there is none. The result
// points into options.
std::unique_ptr<const Forward> look_into(const LoadedLayer &layer, const LoadedLayer *without_output, const CallInputs &inputs,
                                         const CallOptions &options);

// Runs the middle stage once more for one head, which gives the same bits: those of all heads together take too much memory.
HeadScores scores_of_head(const Attention &attention, int64_t head);

// Runs the middle stage alone, causal.
std::unique_ptr<const Attention> look_into(const GroupedExample &example, uint32_t instruction_set);

}  // namespace command
