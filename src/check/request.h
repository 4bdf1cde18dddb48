// Checks of a call of the attention, whichever entry it comes through, and the AttentionRequest
// that they make of its arguments.
#pragma once

#include <array>

#include "../base/report.h"
#include "../plan/sequences.h"

namespace mha {

// What the entry knows of heads and storage.
struct AttentionShape {
  int64_t num_heads, num_kv_heads, head_dim, head_dim_v;
  float scale;
  bool has_output_weights;         // W_O takes the context
  bool has_values;                 // false: keys are only scored
  int64_t most_queries;            // as in AttentionRequest
  KeyValues k, v;                  // as in AttentionRequest
  Storage q_rows, k_rows, v_rows;  // of rows that are prepared
};

// Reads what the arguments say of sequences and outputs. is_self: the keys are the rows of the
// queries; first_position: that of the first key. Entries whose shape depends on the cache call it
// first.
mha_status read_call(Report report, const mha_call &call, bool is_self, int64_t first_position,
                     SequenceArguments *sequences, mha_outputs *outputs);

// Checks all that can be checked without reading an array.
mha_status check_request(Report report, const mha_call &call, const AttentionShape &shape,
                         const mha_outputs &outputs, SequenceArguments *sequences,
                         AttentionRequest *request);

// Checks lengths, positions, sequences of a cache, slopes, sinks, head scales and chosen keys, and
// then resolves the strides of the score arrays in `request`.
mha_status check_array_contents(Report report, const SequenceArguments &sequences,
                                AttentionRequest *request);

// A contiguous output; null if it is not asked for.
struct OptionalOutput {
  const char *name;
  float *output;
  Count elements;
  bool is_per_pair = false;
};

// columns: of the outputs per pair.
std::array<OptionalOutput, 11> optional_outputs(const AttentionRequest &request,
                                                const mha_outputs &outputs,
                                                const SequenceArguments &sequences,
                                                int64_t columns);

}  // namespace mha
