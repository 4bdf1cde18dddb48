// The score options of a call (mha_score_options): read, checked and handed to the kernels.
#pragma once

#include "sequences.h"

namespace mha {

// What can be checked without reading an array. given may be null.
mha_status check_score_options(Report report, const mha_score_options *given, int64_t num_heads, int64_t num_kv_heads,
                               SequenceArguments *sequences, ScoreOptions *options);

// The arrays: slopes, sinks and head scales. Mask and bias may hold anything.
mha_status check_score_arrays(Report report, const char *prefix, const ScoreOptions &options, int64_t num_heads);

// Strides as the kernels take them, 0 for what is the same for all, of arrays that were checked: what is contiguous in a cache's columns
// goes by the longest sequence.
void resolve_score_strides(const SequenceArguments &sequences, int64_t num_heads, int64_t num_kv_heads, ScoreOptions *options);

// Of mask, bias, relative biases and groups, each element once.
uint64_t bytes_of_score_options(const ScoreOptions &options, int64_t batch, int64_t num_heads, int64_t n_q, int64_t columns);

}  // namespace mha
