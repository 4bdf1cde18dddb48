// The geometry of a call's sequences: which rows are valid, where they stand, and which keys they
// attend to. check/sequences.cpp has made sure that all of this is sound. Sequences are batches of
// the arrays, or lie one after the other in one batch (packed, by cu_seqlens).

#include "sequences.h"

#include <algorithm>

namespace mha {

namespace {

// Where the sequences are packed: null if no keys come with the call.
const int64_t *packed_keys_of(const SequenceArguments &s) {
  if (s.n_kv == 0) return nullptr;
  return s.is_self || !s.given.cu_seqlens_kv ? s.given.cu_seqlens_q : s.given.cu_seqlens_kv;
}

// The largest of a number of each sequence.
template <class Number>
int64_t most_of(const SequenceArguments &s, const Number &number) {
  int64_t most = 0;
  for (int64_t b = 0; b < s.batch; ++b) most = std::max(most, number(b));
  return most;
}

}  // namespace

int64_t first_query(const SequenceArguments &s, int64_t b) {
  if (s.is_packed()) return s.given.cu_seqlens_q[b];
  return s.given.q_first_rows ? s.given.q_first_rows[b] : 0;
}
int64_t first_key(const SequenceArguments &s, int64_t b) {
  if (s.is_self) return first_query(s, b);
  if (s.is_packed()) return packed_keys_of(s) ? packed_keys_of(s)[b] : 0;
  return s.given.kv_first_rows ? s.given.kv_first_rows[b] : 0;
}
int64_t queries_of(const SequenceArguments &s, int64_t b) {
  if (s.is_packed()) return s.given.cu_seqlens_q[b + 1] - s.given.cu_seqlens_q[b];
  return s.given.q_lengths ? s.given.q_lengths[b] : s.n_q - first_query(s, b);
}
int64_t keys_of(const SequenceArguments &s, int64_t b) {
  if (s.is_self) return queries_of(s, b);
  if (s.is_packed()) return packed_keys_of(s) ? packed_keys_of(s)[b + 1] - packed_keys_of(s)[b] : 0;
  return s.given.kv_lengths ? s.given.kv_lengths[b] : s.n_kv - first_key(s, b);
}

int64_t table_entries(const SequenceArguments &s, int64_t b) {
  const int64_t *const starts = s.given.block_table_starts;
  return starts ? starts[b + 1] - starts[b] : s.given.block_table_entries;
}
int64_t in_cache(const SequenceArguments &s, int64_t b) {
  if (s.has_pool()) {
    const int64_t *const starts = s.given.block_table_starts;
    return starts ? starts[b] : b * s.given.block_table_stride;
  }
  return s.given.cache_sequences ? s.given.cache_sequences[b] : b;
}
int64_t past_of(const SequenceArguments &s, int64_t b) {
  if (s.has_pool()) return s.given.cache_lengths[b];
  return s.cache ? state_of(s.cache, in_cache(s, b)).length : 0;
}

// Columns count from the first key of the arrays, or from the first new key.
int64_t keys_with_columns(const SequenceArguments &s, int64_t b, int64_t n_kv) {
  const int64_t row = first_key(s, b), past = past_of(s, b);
  int64_t end = s.scored.num_columns;
  if (s.scored.has_new_columns) {
    end = capped_sum(past, end > row ? end - row : 0);  // no column is needed before
  } else if (!s.cache) {
    end = end > row ? end - row : 0;
  }
  return std::min(n_kv, end);
}

bool has_positions(const SequenceArguments &s) {
  return s.is_causal() || s.has_window() || s.scored.distances ||
         (s.has_rope() && !s.given.rope_q_positions);
}

// q_first_positions is not read where positions do not matter.
int64_t start_of(const SequenceArguments &s, int64_t b) {
  if (!has_positions(s)) return 0;
  const int64_t *const first = s.given.q_first_positions;
  if (first)
    return first[b] < INT64_MIN + s.kv_first_position ? INT64_MIN : first[b] - s.kv_first_position;
  return past_of(s, b) + keys_of(s, b) - queries_of(s, b);
}

// A sequence of a pool is known by the first entry of its table, among all tables as one.
static KeyValues with_tables(const SequenceArguments &s, KeyValues source) {
  if (s.has_pool()) {
    source.tables = s.given.block_tables;
    source.table_stride = 1;
  }
  return source;
}
KeyValues cached_keys(const SequenceArguments &s) { return with_tables(s, cached_keys(s.cache)); }
KeyValues cached_values(const SequenceArguments &s) {
  return with_tables(s, cached_values(s.cache));
}

int64_t max_keys(const SequenceArguments &s) {
  if (!s.cache) return s.n_kv;
  return s.is_ring() ? capped_sum(s.cache->capacity, 2 * chunk_keys) : s.cache->capacity;
}

int64_t longest_keys(const SequenceArguments &s) {
  if (!s.cache && !s.is_packed()) return s.n_kv;
  return most_of(s, [&](int64_t b) { return past_of(s, b) + keys_of(s, b); });
}

int64_t pair_columns(const SequenceArguments &s) { return s.cache ? longest_keys(s) : s.n_kv; }

int64_t longest_queries(const SequenceArguments &s) {
  if (!s.is_packed()) return s.n_q;
  return most_of(s, [&](int64_t b) { return queries_of(s, b); });
}

int64_t longest_rows(const SequenceArguments &s) {
  if (!s.is_packed()) return std::max(s.n_q, s.n_kv);
  return most_of(s, [&](int64_t b) { return std::max(queries_of(s, b), keys_of(s, b)); });
}

// Sequence b, with `before` rows of keys before it, begins with block before / 16 + b: the one
// after the last block of the previous sequence.
int64_t packed_key_blocks(int64_t n_kv, int64_t batch) {
  return capped_sum(n_kv / tile_keys, batch);
}

Window window_of(const SequenceArguments &s) {
  const int64_t right = s.flags & MHA_WINDOW_RIGHT ? s.window_right : INT64_MAX;
  return {s.has_left() ? s.window_left : INT64_MAX, s.is_causal() ? 0 : right};
}

// A pass over a ring takes some rows of each sequence; other calls take all of them at once.
void fill_sequences(const SequenceArguments &s, int64_t first_row, int64_t rows, Sequence *filled,
                    Extent *queries, Extent *keys) {
  int64_t q_before = 0, kv_before = 0;
  for (int64_t b = 0; b < s.batch; ++b) {
    const int64_t n_q = queries_of(s, b), n_kv = keys_of(s, b), past = past_of(s, b);
    const int64_t q_begin = std::min(first_row, n_q),
                  q_end = std::min(n_q, capped_sum(first_row, rows));
    const int64_t kv_begin = std::min(first_row, n_kv),
                  kv_end = std::min(n_kv, capped_sum(first_row, rows));
    Sequence &sequence = filled[b];
    sequence.n_q = q_end - q_begin;
    sequence.n_kv = past + kv_end;
    sequence.q_start = capped_sum(start_of(s, b), q_begin);
    sequence.q_first = first_query(s, b) + q_begin;
    sequence.kv_first = first_key(s, b) + kv_begin;
    sequence.past = past + kv_begin;
    sequence.kv_rows = kv_end - kv_begin;
    sequence.in_cache = s.is_packed() && !s.cache ? kv_before / tile_keys + b : in_cache(s, b);
    sequence.in_arrays = s.is_packed() ? 0 : b;
    sequence.column = s.cache ? 0 : sequence.kv_first;
    sequence.option_column =
        s.scored.has_new_columns ? sequence.kv_first - sequence.past : sequence.column;
    sequence.first_in_columns = s.scored.has_new_columns ? past : 0;
    sequence.end_of_columns = keys_with_columns(s, b, sequence.n_kv);
    if (queries) queries[b] = {sequence.q_first, sequence.n_q, q_before, b};
    if (keys)
      keys[b] = {sequence.kv_first, sequence.kv_rows, kv_before, s.cache ? b : sequence.in_cache};
    q_before += sequence.n_q;
    kv_before += sequence.kv_rows;
  }
}

Rotation rotation_of(const SequenceArguments &s, bool of_keys) {
  if (!s.has_rope()) return {};
  return {s.rope.cos,
          s.rope.sin,
          s.rope.table_stride,
          s.rope.dims / 2,
          s.rope.offset,
          s.rope.style == MHA_ROPE_INTERLEAVED,
          of_keys ? s.given.rope_k_positions : s.given.rope_q_positions,
          of_keys && !s.is_self ? s.n_kv : s.n_q,
          s.kv_first_position};
}

void grow_cache(const SequenceArguments &s) {
  for (int64_t b = 0; s.growing && !s.has_pool() && b < s.batch; ++b) {
    if (keys_of(s, b) > 0) grow(s.growing, in_cache(s, b), keys_of(s, b));
  }
}

uint64_t valid_queries(const SequenceArguments &s) {
  if (!s.is_ragged()) return product(s.batch, s.n_q);
  uint64_t rows = 0;
  for (int64_t b = 0; b < s.batch; ++b) rows += static_cast<uint64_t>(queries_of(s, b));
  return rows;
}

uint64_t valid_keys(const SequenceArguments &s) {
  if (!s.is_ragged()) return product(s.batch, s.is_self ? s.n_q : s.n_kv);
  uint64_t rows = 0;
  for (int64_t b = 0; b < s.batch; ++b) rows += static_cast<uint64_t>(keys_of(s, b));
  return rows;
}

}  // namespace mha
