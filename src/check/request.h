// Checks of a call of the attention, whichever entry it comes through, and the AttentionRequest
// that they make of its arguments.
#pragma once

#include <array>

#include "../base/report.h"
#include "../plan/sequences.h"

namespace mha {

// What the entry knows besides heads and storage, which it writes to the request.
struct RequestRows {
  Storage q, k, v;          // of rows that are prepared
  bool has_output_weights;  // W_O takes the context
  bool has_values;          // false: keys are only scored
};

// Reads what the arguments say of sequences and outputs. is_self: the keys are the rows of the
// queries; first_position: that of the first key. Entries whose shape depends on the cache call it
// first.
mha_status read_call(Report report, const mha_call &call, bool is_self, int64_t first_position,
                     SequenceArguments *sequences, mha_outputs *outputs);

// Checks all that can be checked without reading an array. The request has the heads, their widths
// and scale, most_queries, k and v.
mha_status check_request(Report report, const mha_call &call, const RequestRows &rows,
                         const mha_outputs &outputs, SequenceArguments *sequences,
                         AttentionRequest *request);

// Checks lengths, positions, sequences of a cache, slopes, sinks, head scales and chosen keys, and
// then resolves the strides of the score arrays in `request`.
mha_status check_array_contents(Report report, const SequenceArguments &sequences,
                                AttentionRequest *request);

// The same request over keys and values that are packed before.
AttentionRequest with_rows(const AttentionRequest &request, const KeyValues &k, const KeyValues &v);

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
