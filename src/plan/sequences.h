// The sequences of a call: how many of its rows are valid, at which positions they stand, which
// keys they attend to, and what a cache adds. Positions count from the sequence's first key, unless
// a comment says otherwise.
#pragma once

#include "../base/count.h"
#include "../kernels/kernels.h"
#include "../objects/cache.h"
#include "mha.h"

namespace mha {

// What score options say of keys and columns.
struct ScoredKeys {
  const char *distances;  // what makes scores depend on them, for errors; null: nothing does
  bool adds_keys;         // segments leave keys to a row that flags do not
  bool has_new_columns;   // mask, bias and segments have columns only for the call's own keys
  int64_t num_columns;    // keys after this many columns are masked; INT64_MAX: no limit

  int64_t columns_or(int64_t others) const {
    return num_columns != INT64_MAX ? num_columns : others;
  }
};

// What a call asks of its sequences, as read_sequences (check/sequences.h) fills it in.
struct SequenceArguments {
  int64_t batch;        // sequences of the call
  int64_t array_batch;  // sequences that the arrays have room for: 1 where they are packed
  int64_t n_q;
  int64_t n_kv;  // rows of keys that come with the call
  bool is_self;  // they are the rows of the queries
  uint32_t flags;
  int64_t window_left, window_right;
  // The position of the first key, from 0. The caller's positions and those of the rotation count
  // from 0 too.
  int64_t kv_first_position;
  mha_sequences given;        // zeros where the caller gives none
  const mha_kv_cache *cache;  // attended to; null: none
  mha_kv_cache *growing;      // the same where the call appends to it
  const mha_rope *given_rope;
  // What follows from it, once checked: from score options, whether keys before the window of a
  // query are read, and the rotation with its defaults.
  ScoredKeys scored;
  bool reads_all_keys;
  mha_rope rope;

  bool has_rope() const { return given_rope != nullptr; }
  bool has_no_work() const { return batch == 0 || n_q == 0; }
  bool is_causal() const { return (flags & MHA_CAUSAL) != 0; }
  bool has_left() const { return (flags & MHA_WINDOW_LEFT) != 0; }
  bool has_window() const { return (flags & (MHA_WINDOW_LEFT | MHA_WINDOW_RIGHT)) != 0; }
  bool is_packed() const { return given.cu_seqlens_q != nullptr; }
  bool is_ring() const { return cache && cache->kind == MHA_CACHE_KIND_RING; }
  bool has_pool() const { return cache && is_pool(*cache); }
  bool only_reads() const { return cache && !growing; }
  // Rows that one pass over a ring may append, so that no row loses a key that it needs.
  int64_t rows_per_pass() const { return is_ring() ? cache->capacity - window_left : INT64_MAX; }
  // Whether a pass may leave out some rows: padding, or rows of another pass.
  bool is_ragged() const {
    return given.q_lengths || given.kv_lengths || given.q_first_rows || given.kv_first_rows ||
           is_packed() || is_ring();
  }
};

// a + b for b >= 0, at most INT64_MAX.
inline int64_t capped_sum(int64_t a, int64_t b) { return a > INT64_MAX - b ? INT64_MAX : a + b; }

// ---- One sequence, b

// The first valid row of queries and of keys in the arrays, and the number of valid rows.
int64_t first_query(const SequenceArguments &sequences, int64_t b);
int64_t first_key(const SequenceArguments &sequences, int64_t b);
int64_t queries_of(const SequenceArguments &sequences, int64_t b);
int64_t keys_of(const SequenceArguments &sequences, int64_t b);

// Its number in the cache, or in a pool the first entry of its table; how many entries the table of
// a pool has; and the positions that the sequence has before the call.
int64_t table_entries(const SequenceArguments &sequences, int64_t b);
int64_t in_cache(const SequenceArguments &sequences, int64_t b);
int64_t past_of(const SequenceArguments &sequences, int64_t b);

// How many of its first n_kv keys have a column in mask, bias and segments; the others are masked.
int64_t keys_with_columns(const SequenceArguments &sequences, int64_t b, int64_t n_kv);

// Whether results depend on the positions of queries.
bool has_positions(const SequenceArguments &sequences);

// The position of its first query; 0 if results do not depend on it.
int64_t start_of(const SequenceArguments &sequences, int64_t b);

// ---- All sequences

// The keys and values of the cache as the kernels address them, by the block tables of the call if
// it is a pool.
KeyValues cached_keys(const SequenceArguments &sequences);
KeyValues cached_values(const SequenceArguments &sequences);

// The most keys that a sequence can have, for planning.
int64_t max_keys(const SequenceArguments &sequences);

// The most queries, the most keys, and the most rows of either that a sequence has in this call.
int64_t longest_queries(const SequenceArguments &sequences);
int64_t longest_keys(const SequenceArguments &sequences);
int64_t longest_rows(const SequenceArguments &sequences);

// Columns of the outputs with a number per pair.
int64_t pair_columns(const SequenceArguments &sequences);

// Blocks of 16 positions that the keys of packed sequences need: no block serves two sequences.
int64_t packed_key_blocks(int64_t n_kv, int64_t batch);

// Causality and windows as one window around the position of a query.
struct Window {
  int64_t left, right;
};
Window window_of(const SequenceArguments &sequences);

Rotation rotation_of(const SequenceArguments &sequences, bool of_keys);

// Valid rows of queries, and of the keys that come with the call.
uint64_t valid_queries(const SequenceArguments &sequences);
uint64_t valid_keys(const SequenceArguments &sequences);

// Describes the rows [first_row, first_row + rows) of each sequence: queries and the keys that come
// with the call. Extents may be null.
void fill_sequences(const SequenceArguments &sequences, int64_t first_row, int64_t rows,
                    Sequence *filled, Extent *queries, Extent *keys);

// After the call: the cache counts the new rows.
void grow_cache(const SequenceArguments &sequences);

}  // namespace mha
