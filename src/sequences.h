// The sequences of a call: how many of its rows are valid, where they stand, which keys they attend to, and what a cache has to do with it.
// mha_forward and mha_attention have these arguments in common.
#pragma once

#include "cache.h"
#include "count.h"
#include "kernels/kernels.h"
#include "mha.h"
#include "status.h"

namespace mha {

struct SequenceArguments {
  int64_t batch, n_q;
  int64_t n_kv;  // rows of keys that come with the call
  bool is_self;  // they are the rows of the queries
  uint32_t flags;
  const int64_t *q_start, *q_lengths, *kv_lengths, *kv_start, *cache_sequences;
  const int64_t *cu_seqlens_q, *cu_seqlens_kv;
  int64_t window_left, window_right;
  int64_t kv_position;  // of the first key; all positions here count from there but those of the caller's q_start and rotation
  mha_kv_cache *cache;
  const char *distances;  // what makes scores depend on them, for errors; null: nothing does
  bool adds_keys;         // position groups leave keys to a row that flags do not
  bool has_new_columns;   // mask, bias and groups have columns for the keys alone that come with the call
  int64_t columns;        // that a row of mask, bias and groups has room for; no limit where there is none
  int64_t num_columns;    // keys beyond so many columns are masked; no limit where there is none
  const mha_rope *given_rope;
  mha_rope rope;  // as given, all defaults resolved by check_sequences

  bool has_rope() const { return given_rope != nullptr; }
  bool has_no_work() const { return batch == 0 || n_q == 0; }  // to do
  bool is_causal() const { return (flags & MHA_CAUSAL) != 0; }
  bool has_left() const { return (flags & MHA_WINDOW_LEFT) != 0; }
  bool has_window() const { return (flags & (MHA_WINDOW_LEFT | MHA_WINDOW_RIGHT)) != 0; }
  bool has_cu_seqlens() const { return cu_seqlens_q != nullptr; }
  int64_t array_batch() const { return has_cu_seqlens() && batch > 1 ? 1 : batch; }  // the sequences that the arrays have room for
  bool is_ring() const { return cache && cache->kind == MHA_CACHE_RING; }
  // Rows that one pass over a ring may append, so that no row loses a key that it needs.
  int64_t rows_per_pass() const { return is_ring() ? cache->capacity - window_left : INT64_MAX; }
  // Whether some rows may be no part of a pass: padding, or those of another pass.
  bool is_ragged() const { return q_lengths || kv_lengths || kv_start || has_cu_seqlens() || is_ring(); }
};

// Takes the fields that both argument structs have; is_self is the entry's to set.
template <class Args>
void describe_sequences(const Args &args, SequenceArguments *sequences) {
  sequences->batch = args.batch;
  sequences->n_q = args.n_q;
  sequences->n_kv = args.n_kv;
  sequences->is_self = false;
  sequences->flags = args.flags;
  sequences->q_start = args.q_start;
  sequences->q_lengths = args.q_lengths;
  sequences->kv_lengths = args.kv_lengths;
  sequences->kv_start = args.kv_start;
  sequences->cu_seqlens_q = args.cu_seqlens_q;
  sequences->cu_seqlens_kv = args.cu_seqlens_kv;
  sequences->window_left = args.window_left;
  sequences->window_right = args.window_right;
  sequences->kv_position = 0;
  sequences->cache = args.cache;
  sequences->cache_sequences = args.cache_sequences;
  sequences->distances = nullptr;
  sequences->adds_keys = sequences->has_new_columns = false;
  sequences->columns = sequences->num_columns = INT64_MAX;
  sequences->given_rope = args.rope;
}

// What MHA_CACHE_READ goes with. rows: the name of an array of keys or values; null if there is none.
template <class Args>
mha_status check_cache_read(Report report, const Args &args, const char *rows) {
  const char *const places = args.kv_lengths ? "kv_lengths" : args.kv_start ? "kv_start" : args.cu_seqlens_kv ? "cu_seqlens_kv" : nullptr;
  const char *const given = rows ? rows : places;
  if (!args.cache) return report.invalid("MHA_CACHE_READ is set without cache; give the cache too");
  if (!given) return MHA_OK;
  return report.invalid("MHA_CACHE_READ appends nothing, but %s is given; leave it NULL, or leave the flag out", given);
}

// What can be checked without reading an array: flags, windows, the rotation's shape, and that the cache is one for these heads.
mha_status check_sequences(Report report, SequenceArguments *sequences, int64_t num_kv_heads, int64_t head_dim, int64_t head_dim_v);

// The arrays: lengths, positions, sequences of the cache and the room there.
mha_status check_sequence_arrays(Report report, const SequenceArguments &sequences);

// That the lists of chosen keys name keys that are there. Strides are resolved.
mha_status check_chosen_entries(Report report, const SequenceArguments &sequences, const Attention &attention);

// The most keys that a sequence can have, for planning; and as a mask, the keys that a query attends to.
int64_t max_keys(const SequenceArguments &sequences);
void set_window(const SequenceArguments &sequences, Attention *attention);

// The sequences' rows [first_row, first_row + rows): queries and, where they come with the call, keys. Extents may be null.
void fill_sequences(const SequenceArguments &sequences, int64_t first_row, int64_t rows, Sequence *filled, Extent *queries, Extent *keys);

// The most queries and the most keys that a sequence has in this call.
int64_t longest_queries(const SequenceArguments &sequences);
int64_t longest_keys(const SequenceArguments &sequences);

// The most rows that a sequence brings along, of queries or of keys.
int64_t longest_rows(const SequenceArguments &sequences);

// Columns of the outputs with a number per pair.
int64_t pair_columns(const SequenceArguments &sequences);

// The rows of packed sequences, one after the other in their array.
Extent packed_queries(const SequenceArguments &sequences);
Extent packed_keys(const SequenceArguments &sequences);

// Room for the keys of packed sequences, in blocks of 16 positions, of which each sequence has its own.
int64_t packed_key_blocks(int64_t n_kv, int64_t batch);

Rotation rotation_of(const SequenceArguments &sequences, bool of_keys);

// After the call: the cache has grown by its rows.
void grow_cache(const SequenceArguments &sequences);

// Pairs of query and key that attend, over all sequences and one head.
uint64_t attending_pairs(const SequenceArguments &sequences);

// Rows of queries that are no padding.
uint64_t valid_queries(const SequenceArguments &sequences);
uint64_t valid_keys(const SequenceArguments &sequences);  // of those that come with the call

// Bytes of the keys and values that are attended to, each once, as they are stored: of so many heads of those that come with the call, and
// of those that a cache had before.
uint64_t key_value_bytes(const SequenceArguments &sequences, const Attention &attention, int64_t k_heads, int64_t v_heads,
                         int64_t past_heads);

}  // namespace mha
