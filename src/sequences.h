// The sequences of a call: how many of its rows are valid, where they stand, which keys they attend
// to, and what a cache has to do with it. mha_forward and mha_attention have these arguments in
// common.
#pragma once

#include "cache.h"
#include "count.h"
#include "kernels/kernels.h"
#include "mha.h"
#include "status.h"

namespace mha {

// The fields that mha_forward_args and mha_attention_args have in common, but for their arrays of
// rows.
struct CallArguments {
  uint32_t flags;
  int64_t window_left, window_right;
  int64_t batch, n_q, n_kv;
  const mha_rope *rope;
  const mha_norm *norm;
  const mha_score_options *score;
  const mha_scheduler *scheduler;
  const mha_sequences *sequences;
  const mha_score_arrays *score_arrays;
  mha_kv_cache *cache;
  const mha_kv_cache *cache_read;
  const mha_outputs *outputs;

  template <class Args>
  explicit CallArguments(const Args &args)
      : flags(args.flags),
        window_left(args.window_left),
        window_right(args.window_right),
        batch(args.batch),
        n_q(args.n_q),
        n_kv(args.n_kv),
        rope(args.rope),
        norm(args.norm),
        score(args.score),
        scheduler(args.scheduler),
        sequences(args.sequences),
        score_arrays(args.score_arrays),
        cache(args.cache),
        cache_read(args.cache_read),
        outputs(args.outputs) {}

  // Whether nothing is asked for but rows, all of them, and MHA_CAUSAL at most.
  bool are_plain() const {
    return (flags & ~MHA_CAUSAL) == 0 && (window_left | window_right) == 0 && !rope && !norm &&
           !score && !sequences && !score_arrays && !cache && !cache_read && !outputs;
  }
};

struct SequenceArguments {
  int64_t batch;        // sequences of the call
  int64_t array_batch;  // sequences that the arrays have room for: 1 where they are packed
  int64_t n_q;
  int64_t n_kv;  // rows of keys that come with the call
  bool is_self;  // they are the rows of the queries
  uint32_t flags;
  int64_t window_left, window_right;
  // The position of the first key. Positions here count from there; only those of the caller and of
  // the rotation count from 0.
  int64_t kv_first_position;
  mha_sequences given;        // zeros where the caller gives none
  const mha_kv_cache *cache;  // attended to; null: none
  mha_kv_cache *growing;      // the same where the call appends to it
  const char *distances;      // what makes scores depend on them, for errors; null: nothing does
  bool adds_keys;             // position groups leave keys to a row that flags do not
  bool has_new_columns;  // mask, bias and groups have columns for the keys alone that come with the
                         // call
  int64_t num_columns;   // keys after this many columns are masked; INT64_MAX: no limit
  const mha_rope *given_rope;
  mha_rope rope;  // as given, all defaults resolved by check_sequences

  bool has_rope() const { return given_rope != nullptr; }
  bool has_no_work() const { return batch == 0 || n_q == 0; }  // to do
  bool is_causal() const { return (flags & MHA_CAUSAL) != 0; }
  bool has_left() const { return (flags & MHA_WINDOW_LEFT) != 0; }
  bool has_window() const { return (flags & (MHA_WINDOW_LEFT | MHA_WINDOW_RIGHT)) != 0; }
  bool is_packed() const { return given.cu_seqlens_q != nullptr; }
  bool is_ring() const { return cache && cache->kind == MHA_CACHE_KIND_RING; }
  bool only_reads() const { return cache && !growing; }
  // Rows that one pass over a ring may append, so that no row loses a key that it needs.
  int64_t rows_per_pass() const { return is_ring() ? cache->capacity - window_left : INT64_MAX; }
  // Whether some rows may be no part of a pass: padding, or those of another pass.
  bool is_ragged() const {
    return given.q_lengths || given.kv_lengths || given.q_first_rows || given.kv_first_rows ||
           is_packed() || is_ring();
  }
};

// Takes what the call says of its sequences, and reads mha_sequences. Extents and inputs are
// resolved; with cache_read, n_kv is 0.
mha_status read_sequences(Report report, const CallArguments &args, bool is_self,
                          SequenceArguments *sequences);

// What can be checked without reading an array: flags, windows, the rotation's shape, and that the
// cache is one for these heads.
mha_status check_sequences(Report report, SequenceArguments *sequences, int64_t num_kv_heads,
                           int64_t head_dim, int64_t head_dim_v);

// The arrays: lengths, positions, sequences of the cache and the room there.
mha_status check_sequence_arrays(Report report, const SequenceArguments &sequences);

// That the lists of chosen keys name keys that are there. Strides are resolved.
mha_status check_chosen_entries(Report report, const SequenceArguments &sequences,
                                const Attention &attention);

// The most keys that a sequence can have, for planning.
int64_t max_keys(const SequenceArguments &sequences);

// Causality and windows as one window: the keys that a query attends to.
void set_window(const SequenceArguments &sequences, Attention *attention);

// The sequences' rows [first_row, first_row + rows): queries and, where they come with the call,
// keys. Extents may be null.
void fill_sequences(const SequenceArguments &sequences, int64_t first_row, int64_t rows,
                    Sequence *filled, Extent *queries, Extent *keys);

// The most queries and the most keys that a sequence has in this call.
int64_t longest_queries(const SequenceArguments &sequences);
int64_t longest_keys(const SequenceArguments &sequences);

// The most rows that a sequence brings along, of queries or of keys.
int64_t longest_rows(const SequenceArguments &sequences);

// Columns of the outputs with a number per pair.
int64_t pair_columns(const SequenceArguments &sequences);

// Room for the keys of packed sequences, in blocks of 16 positions, of which each sequence has its
// own.
int64_t packed_key_blocks(int64_t n_kv, int64_t batch);

Rotation rotation_of(const SequenceArguments &sequences, bool of_keys);

// After the call: the cache has grown by its rows.
void grow_cache(const SequenceArguments &sequences);

// Pairs of query and key that attend, over all sequences and one head.
uint64_t attending_pairs(const SequenceArguments &sequences);

// Rows of queries that are no padding.
uint64_t valid_queries(const SequenceArguments &sequences);
uint64_t valid_keys(const SequenceArguments &sequences);  // of those that come with the call

// Bytes of the keys and values that are attended to, each once, as they are stored: of so many
// heads of those that come with the call, and of those that a cache had before.
uint64_t key_value_bytes(const SequenceArguments &sequences, const Attention &attention,
                         int64_t k_heads, int64_t v_heads, int64_t past_heads);

}  // namespace mha
