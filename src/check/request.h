// Checks of a call of the attention, whichever entry it comes through, and the AttentionRequest
// that they make of its arguments.
#pragma once

#include <array>

#include "../base/report.h"
#include "../plan/sequences.h"

namespace mha {

// The fields that mha_forward_args and mha_attention_args have in common, apart from their arrays
// of rows.
struct CallArguments {
  uint32_t flags;
  int64_t window_left, window_right;
  int64_t batch, n_q, n_kv;
  int64_t kv_first_position;  // of mha_attention
  const mha_rope *rope;
  const mha_norm *norm;
  const mha_score_options *score;
  const mha_sequences *sequences;
  const mha_score_arrays *score_arrays;
  mha_kv_cache *cache;
  const mha_kv_cache *cache_read;
  const mha_outputs *outputs;

  template <class Args>
  explicit CallArguments(const Args &args, int64_t kv_first_position_ = 0)
      : flags(args.flags),
        window_left(args.window_left),
        window_right(args.window_right),
        batch(args.batch),
        n_q(args.n_q),
        n_kv(args.n_kv),
        kv_first_position(kv_first_position_),
        rope(args.rope),
        norm(args.norm),
        score(args.score),
        sequences(args.sequences),
        score_arrays(args.score_arrays),
        cache(args.cache),
        cache_read(args.cache_read),
        outputs(args.outputs) {}

  // Whether the call asks for nothing but all of its rows, with MHA_CAUSAL at most.
  bool are_plain() const {
    return (flags & ~MHA_CAUSAL) == 0 && (window_left | window_right) == 0 && !rope && !norm &&
           !score && !sequences && !score_arrays && !cache && !cache_read && !outputs;
  }
};

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
// queries. Entries whose shape depends on the cache call it first.
mha_status read_call(Report report, const CallArguments &args, bool is_self,
                     SequenceArguments *sequences, mha_outputs *outputs);

// Checks all that can be checked without reading an array.
mha_status check_request(Report report, const CallArguments &args, const AttentionShape &shape,
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
