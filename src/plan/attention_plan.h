// The sizes that the attention of a call needs, and where its memory lies in the workspace.
#pragma once

#include "../base/workspace.h"
#include "sequences.h"

namespace mha {

// Takes the memory of the attention from the workspace. Sizes are upper bounds: lengths and
// positions are not read, and more keys, queries or threads never need less.
AttentionPlan plan_attention(const AttentionRequest &request, const SequenceArguments &sequences,
                             int64_t num_threads, WorkspaceLayout *layout);

// How the work is cut into units: run/attend.cpp cuts it, in these limits.

// Units that a thread should have, so that none is left without work at the end.
constexpr int64_t units_per_thread = 3;
// Limits when a unit's keys are split: units per thread at most, chunks per part at least.
constexpr int64_t part_units_per_thread = 2 * units_per_thread, min_part_chunks = 1;

// The most queries of one unit, for sequences of up to longest_q queries; the fewest while keys can
// be split instead; and the fewest in any case.
int64_t largest_block(int64_t longest_q, const AttentionRequest &request);
int64_t preferred_block(const AttentionRequest &request);
int64_t smallest_block(const AttentionRequest &request);

// The most kv heads of a unit that reads plain keys and values row by row, if it has `rows` rows of
// each.
int64_t most_kv_heads(const AttentionRequest &request, int64_t rows);

}  // namespace mha
