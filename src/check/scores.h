// The score options and score arrays of a call (mha_score_options, mha_score_arrays): read, checked
// and handed to the kernels.
#pragma once

#include "../base/report.h"
#include "../plan/sequences.h"

namespace mha {

// What the caller gives; both may be null.
struct GivenScore {
  const mha_score_options *options;
  const mha_score_arrays *arrays;
};

// What can be checked without reading an array. `scored` is that of `sequences`.
mha_status check_score_options(Report report, const GivenScore &given, int64_t num_heads,
                               int64_t num_kv_heads, const SequenceArguments &sequences,
                               ScoredKeys *scored, ScoreOptions *options);

// Strides as the kernels take them, 0 for what is the same for all, of arrays that were checked:
// what is contiguous in a cache's columns goes by the longest sequence. Fails where a stride that
// was given does not step over these.
mha_status resolve_score_strides(Report report, const SequenceArguments &sequences,
                                 int64_t num_heads, ScoreOptions *options);

}  // namespace mha
