// Attention: scores -> scale -> mask -> max, exp, sum -> context, chunk of keys by chunk of keys, and the states of the chunks merged.
//
// A unit of work is a block of queries of all the query heads that share one kv head. Its rows are cut into tiles of a few rows; for each
// chunk of keys, each tile computes the chunk's state (m, l, o), which then is merged with the states before it as CONTRACT.md section 6
// says: slot i of the states holds a subtree, like the digits of a binary counter.
#pragma once

#include "kernels/functions.h"
#include "kernels/tile.h"

namespace mha {
namespace {

struct Scale {
  float scale;
  template <class V>
  MHA_INLINE V operator()(V dot, int, int) const {
    return dot * all<V>(scale);
  }
};

struct Unchanged {
  template <class V>
  MHA_INLINE V operator()(V dot, int, int) const {
    return dot;
  }
};

// The rows of one unit. Row r is query query_begin + r / group of query head kv_head * group + r % group, so that neighbours have almost
// the same keys to attend to.
struct Unit {
  const Attention &call;
  int64_t sequence, kv_head, query_begin;
  int64_t group;  // query heads per kv head
  int64_t num_rows;
  float *scratch;

  MHA_INLINE int64_t query(int64_t row) const { return query_begin + row / group; }
  MHA_INLINE int64_t head(int64_t row) const { return kv_head * group + row % group; }

  // Keys at positions below this one take part in the row.
  MHA_INLINE int64_t key_limit(int64_t row) const { return key_limit_of_query(query(row)); }
  MHA_INLINE int64_t key_limit_of_query(int64_t query) const {
    if (!call.is_causal) return call.n_kv;
    const int64_t start = call.q_start ? call.q_start[sequence] : call.n_kv - call.n_q;
    const int64_t sees_all_from = call.n_kv - 1 - query;  // compared first: start may be as large as an int64_t can be
    return start >= sees_all_from ? call.n_kv : start + query + 1;
  }

  // The queries, tile by tile, interleaved: [head_dim][rows of the tile].
  MHA_INLINE float *q(int64_t row) const { return scratch + call.scratch.queries + row * call.head_dim; }

  MHA_INLINE float *o(int64_t slot, int64_t row) const {
    return scratch + call.scratch.states + slot * call.scratch.state_stride + row * call.head_dim_v_padded;
  }
  MHA_INLINE float *m(int64_t slot, int64_t row) const { return o(slot, num_rows) + row; }
  MHA_INLINE float *l(int64_t slot, int64_t row) const { return m(slot, num_rows) + merge_rows + row; }

  // Index of the row in an output [batch, num_heads, n_q].
  MHA_INLINE int64_t index(int64_t row) const { return (sequence * call.num_heads + head(row)) * call.n_q + query(row); }
};

// A chunk's keys and values as the kernels read them.
struct Chunk {
  int64_t begin;  // position of its first key
  const float *keys;
  const float *values;
};

// ---- Bringing queries, keys and values into the form that the kernels read

inline const float *query_row(const Unit &unit, int64_t row) {
  const StridedRows &q = unit.call.q;
  return q.base + unit.sequence * q.batch_stride + unit.query(row) * q.row_stride + unit.head(row) * q.head_stride;
}

inline void interleave_queries(const Unit &unit, int64_t tile_rows) {
  const int64_t head_dim = unit.call.head_dim;
  // Rows lie far apart, which hides them from the processor's own prefetching: ask for all of them at once.
  for (int64_t row = 0; row < unit.num_rows; ++row) {
    const float *const from = query_row(unit, row);
    for (int64_t k = 0; k < head_dim; k += 16) __builtin_prefetch(from + k);
  }
  for (int64_t row = 0; row < unit.num_rows; row += tile_rows) {
    const int64_t rows = smaller(tile_rows, unit.num_rows - row);
    float *const tile = unit.q(row);
    for (int64_t r = 0; r < rows; ++r) {
      const float *const from = query_row(unit, row + r);
      for (int64_t k = 0; k < head_dim; ++k) tile[k * rows + r] = from[k];
    }
  }
}

inline void pack_keys(const float *rows, int64_t row_stride, int64_t count, int64_t head_dim, float *blocks) {
  for (int64_t j = 0; j < count; j += 4) {
    float *const block = blocks + j / key_block * key_block * head_dim + j % key_block;
    const float *const row = rows + j * row_stride;
    const int64_t keys = smaller(4, count - j);
    int64_t c = 0;
    if (keys == 4) {
      for (; c + 4 <= head_dim; c += 4) transpose4x4(row + c, row_stride, block + c * key_block, key_block);
    }
    for (; c < head_dim; ++c) {
      for (int64_t i = 0; i < keys; ++i) block[c * key_block + i] = row[i * row_stride + c];
    }
  }
}

template <class V>
inline void pack_values(const float *rows, int64_t row_stride, int64_t count, int64_t head_dim_v, int64_t padded, float *out) {
  for (int64_t j = 0; j < count; ++j) {
    int64_t c = 0;
    for (; c + static_cast<int64_t>(V::size) <= head_dim_v; c += V::size) store(out + j * padded + c, load<V>(rows + j * row_stride + c));
    for (; c < head_dim_v; ++c) out[j * padded + c] = rows[j * row_stride + c];
    for (; c < padded; ++c) out[j * padded + c] = 0.0f;
  }
}

// The keys of a chunk from position `begin` on, of which the first `count` are needed.
inline const float *keys_of(const Unit &unit, int64_t begin, int64_t count) {
  const KeyValueSource &k = unit.call.k;
  const float *const head = k.base + unit.sequence * k.batch_stride + unit.kv_head * k.head_stride;
  if (k.is_packed) return head + begin * unit.call.head_dim;
  float *const blocks = unit.scratch + unit.call.scratch.keys;
  pack_keys(head + begin * k.row_stride, k.row_stride, count, unit.call.head_dim, blocks);
  return blocks;
}

template <class V>
inline const float *values_of(const Unit &unit, int64_t begin, int64_t count) {
  const KeyValueSource &v = unit.call.v;
  const float *const head = v.base + unit.sequence * v.batch_stride + unit.kv_head * v.head_stride;
  if (v.is_packed) return head + begin * unit.call.head_dim_v_padded;
  float *const rows = unit.scratch + unit.call.scratch.values;
  pack_values<V>(head + begin * v.row_stride, v.row_stride, count, unit.call.head_dim_v, unit.call.head_dim_v_padded, rows);
  return rows;
}

// ---- Scores

template <class V, int R, int B, class Rows, class Finish>
MHA_INLINE void score_tail(int64_t blocks, Rows q, int64_t head_dim, const float *keys, float *scores, const Finish &finish) {
  if (blocks == B) {
    return multiply<R, B, key_block / V::size, V>(q, head_dim, {keys, key_block, head_dim * key_block}, scores, score_stride, finish);
  }
  if constexpr (B > 1) score_tail<V, R, B - 1>(blocks, q, head_dim, keys, scores, finish);
}

// scores[r][j] for the first `count` keys of a chunk, rounded up to whole blocks of 16.
template <class V, int R, class Rows, class Finish>
MHA_INLINE void score(Rows q, int64_t head_dim, const float *keys, int64_t count, float *scores, Finish finish) {
  constexpr int B = TileShape<V::size>::score_blocks(R);
  int64_t blocks = (count + key_block - 1) / key_block;
  for (; blocks >= B; blocks -= B) {
    multiply<R, B, key_block / V::size, V>(q, head_dim, {keys, key_block, head_dim * key_block}, scores, score_stride, finish);
    keys += B * head_dim * key_block;
    scores += B * key_block;
  }
  if constexpr (B > 1) score_tail<V, R, B - 1>(blocks, q, head_dim, keys, scores, finish);
}

// ---- Softmax of a tile's rows in one chunk

// Turns scores[r][0, counts[r]) into p = exp(score - m), with zeros up to the end of the tile's last block, and gives m and l of each row.
// Returns a bit for each row that has keys with a score of -infinity, which take no part: they are marked in excluded[r][0, counts[r]).
template <class V, int R>
MHA_INLINE uint32_t softmax(float *scores, const int64_t (&counts)[R], int64_t blocks, float (&m)[R], float (&l)[R], uint8_t *excluded) {
  constexpr int vectors = key_block / V::size;
  const int64_t tile_end = blocks * key_block;
  V most[R], least[R];
  MHA_UNROLL for (int r = 0; r < R; ++r) {
    float *const s = scores + r * score_stride;
    most[r] = all<V>(-infinity);
    least[r] = all<V>(infinity);
    int64_t j = 0;
    for (; j + static_cast<int64_t>(V::size) <= counts[r]; j += V::size) {
      const V score = load<V>(s + j);
      most[r] = greater_of(score, most[r]);
      least[r] = less_of(score, least[r]);
    }
    for (; j < tile_end; j += V::size) {
      const V score = load<V>(s + j), known = first_lanes(score, counts[r] - j, all<V>(-infinity));
      most[r] = greater_of(known, most[r]);
      least[r] = less_of(first_lanes(score, counts[r] - j, all<V>(infinity)), least[r]);
      store(s + j, known);
    }
  }

  uint32_t rows_with_excluded = 0;
  V maximum[R];
  MHA_UNROLL for (int r = 0; r < R; ++r) {
    m[r] = greatest(most[r]);
    // Without a score above -infinity any finite number will do: exp gives 0 for the keys left out, and NaN for a NaN.
    maximum[r] = all<V>(m[r] == -infinity ? 0.0f : m[r]);
    if (has_negative_infinity(least[r])) {
      rows_with_excluded |= 1u << r;
      for (int64_t j = 0; j < counts[r]; ++j) excluded[r * chunk_keys + j] = scores[r * score_stride + j] == -infinity;
    }
  }

  // All rows side by side: one row's exp is a long chain of operations, R of them keep the machine busy.
  V partial_sums[R][vectors];
  MHA_UNROLL for (int r = 0; r < R; ++r) { MHA_UNROLL for (int i = 0; i < vectors; ++i) partial_sums[r][i] = all<V>(0.0f); }
  for (int64_t j = 0; j < tile_end; j += key_block) {
    MHA_UNROLL for (int i = 0; i < vectors; ++i) {
      V p[R];
      MHA_UNROLL for (int r = 0; r < R; ++r) p[r] = load<V>(scores + r * score_stride + j + i * V::size) - maximum[r];
      exp_of(p);
      MHA_UNROLL for (int r = 0; r < R; ++r) {
        store(scores + r * score_stride + j + i * V::size, p[r]);
        partial_sums[r][i] = partial_sums[r][i] + p[r];
      }
    }
  }
  MHA_UNROLL for (int r = 0; r < R; ++r) l[r] = sum16(partial_sums[r]);
  return rows_with_excluded;
}

// ---- Context of a tile

// o = o + p[j] * values[j] for j in [begin, end), in order, leaving out the excluded keys.
template <class V>
inline void continue_context(const float *p, const uint8_t *excluded, int64_t begin, int64_t end, const float *values, int64_t width,
                             float *o) {
  for (int64_t c = 0; c < width; c += key_block) {
    constexpr int vectors = key_block / V::size;
    V acc[vectors];
    MHA_UNROLL for (int i = 0; i < vectors; ++i) acc[i] = load<V>(o + c + i * V::size);
    for (int64_t j = begin; j < end; ++j) {
      if (excluded && excluded[j]) continue;
      const V multiplier = all<V>(p[j]);
      MHA_UNROLL for (int i = 0; i < vectors; ++i) acc[i] = mul_add(multiplier, load<V>(values + j * width + c + i * V::size), acc[i]);
    }
    MHA_UNROLL for (int i = 0; i < vectors; ++i) store(o + c + i * V::size, acc[i]);
  }
}

template <class V, int R, int C>
MHA_INLINE void context_tail(int64_t vectors, EvenRows<score_stride> p, int64_t keys, const float *values, int64_t width, float *o) {
  if (vectors == C) return multiply<R, 1, C, V>(p, keys, {values, width, 0}, o, width, Unchanged{});
  if constexpr (C > 1) context_tail<V, R, C - 1>(vectors, p, keys, values, width, o);
}

// o[r] = sum of p[r][j] * values[j] over the first `keys` keys.
template <class V, int R>
MHA_INLINE void context(EvenRows<score_stride> p, int64_t keys, const float *values, int64_t width, float *o) {
  constexpr int C = TileShape<V::size>::context_vectors;
  int64_t vectors = width / V::size;
  for (; vectors >= C; vectors -= C) {
    multiply<R, 1, C, V>(p, keys, {values, width, 0}, o, width, Unchanged{});
    values += C * V::size;
    o += C * V::size;
  }
  if constexpr (C > 1) context_tail<V, R, C - 1>(vectors, p, keys, values, width, o);
}

// ---- One chunk for one tile

template <class V, int R>
inline void attend_tile(const Unit &unit, const Chunk &chunk, int64_t row, int64_t slot) {
  const Attention &call = unit.call;
  int64_t counts[R];
  int64_t most = 0, fewest = chunk_keys, query = unit.query(row), head_in_group = row % unit.group;
  for (int r = 0; r < R; ++r) {
    counts[r] = smaller(chunk_keys, greater(0, unit.key_limit_of_query(query) - chunk.begin));
    most = greater(most, counts[r]);
    fewest = smaller(fewest, counts[r]);
    if (++head_in_group == unit.group) ++query, head_in_group = 0;
  }

  float *const scores = unit.scratch + call.scratch.scores;
  score<V, R>(InterleavedRows<R>{unit.q(row)}, call.head_dim, chunk.keys, most, scores, Scale{call.scale});

  uint8_t *const excluded = reinterpret_cast<uint8_t *>(unit.scratch + call.scratch.excluded);
  float m[R], l[R];
  const uint32_t rows_with_excluded = softmax<V, R>(scores, counts, (most + key_block - 1) / key_block, m, l, excluded);
  for (int r = 0; r < R; ++r) {
    *unit.m(slot, row + r) = m[r];
    *unit.l(slot, row + r) = l[r];
  }

  // Keys that all rows attend to, for the whole tile; the rest row by row. No row is multiplied with a value that it does not attend to.
  const int64_t width = call.head_dim_v_padded;
  const int64_t shared = rows_with_excluded ? 0 : fewest;
  context<V, R>({scores}, shared, chunk.values, width, unit.o(slot, row));
  for (int r = 0; r < R; ++r) {
    const uint8_t *const left_out = rows_with_excluded >> r & 1 ? excluded + r * chunk_keys : nullptr;
    if (shared < counts[r]) {
      continue_context<V>(scores + r * score_stride, left_out, shared, counts[r], chunk.values, width, unit.o(slot, row + r));
    }
  }
}

template <class V, int R>
MHA_INLINE void attend_tile_of(int64_t rows, const Unit &unit, const Chunk &chunk, int64_t row, int64_t slot) {
  if (rows == R) return attend_tile<V, R>(unit, chunk, row, slot);
  if constexpr (R > 1) attend_tile_of<V, R - 1>(rows, unit, chunk, row, slot);
}

// ---- Merging states, and finishing rows

// Slot `left` becomes merge(left, left + 1), for rows [begin, end). The factors of 16 rows are computed side by side.
template <class V>
inline void merge(const Unit &unit, int64_t left, int64_t begin, int64_t end) {
  constexpr int64_t rows_at_once = merge_rows, vectors = rows_at_once / V::size;
  const int64_t width = unit.call.head_dim_v_padded;
  for (int64_t row = begin; row < end; row += rows_at_once) {
    alignas(64) float m[rows_at_once], l[rows_at_once], a[rows_at_once], b[rows_at_once];
    MHA_UNROLL for (int i = 0; i < vectors; ++i) {
      const int64_t at = i * V::size;
      const V m1 = load<V>(unit.m(left, row) + at), m2 = load<V>(unit.m(left + 1, row) + at);
      const V most = greater_of(m2, m1);
      V factors[2] = {m1 - most, m2 - most};
      exp_of(factors);
      store(m + at, most);
      store(l + at, mul_add(load<V>(unit.l(left, row) + at), factors[0], load<V>(unit.l(left + 1, row) + at) * factors[1]));
      store(a + at, factors[0]);
      store(b + at, factors[1]);
    }
    for (int64_t i = 0; i < smaller(rows_at_once, end - row); ++i) {
      float *const o1 = unit.o(left, row + i);
      const float *const o2 = unit.o(left + 1, row + i);
      const float l1 = *unit.l(left, row + i), l2 = *unit.l(left + 1, row + i);
      if (l2 == 0.0f) continue;
      const bool is_copy = l1 == 0.0f;
      *unit.m(left, row + i) = is_copy ? *unit.m(left + 1, row + i) : m[i];
      *unit.l(left, row + i) = is_copy ? l2 : l[i];
      const V va = all<V>(a[i]), vb = all<V>(b[i]);
      for (int64_t c = 0; c < width; c += V::size) {
        store(o1 + c, is_copy ? load<V>(o2 + c) : mul_add(load<V>(o1 + c), va, load<V>(o2 + c) * vb));
      }
    }
  }
}

template <class V>
inline void finish(const Unit &unit, int64_t row) {
  const Attention &call = unit.call;
  const float l = *unit.l(0, row);
  float *const o = unit.o(0, row);
  if (l == 0.0f) {
    for (int64_t c = 0; c < call.head_dim_v_padded; ++c) o[c] = 0.0f;
  } else {
    const V inverse = all<V>(1.0f / l);
    for (int64_t c = 0; c < call.head_dim_v_padded; c += V::size) store(o + c, canonical(load<V>(o + c) * inverse));
  }
  float *const out = call.output + unit.sequence * call.output_batch_stride + unit.query(row) * call.output_row_stride +
                     unit.head(row) * call.output_head_stride;
  for (int64_t c = 0; c < call.head_dim_v; ++c) out[c] = o[c];
  if (call.context) {
    float *const tap = call.context + ((unit.sequence * call.n_q + unit.query(row)) * call.num_heads + unit.head(row)) * call.head_dim_v;
    for (int64_t c = 0; c < call.head_dim_v; ++c) tap[c] = o[c];
  }
  if (call.lse) call.lse[unit.index(row)] = l == 0.0f ? -infinity : canonical(*unit.m(0, row) + log_of(l));
}

// ---- Looking inside: a second pass over the keys for those who asked, when m and l of the whole row are known

template <class V>
inline void inspect_row(const Unit &unit, int64_t row, int64_t begin, int64_t count, float *s) {
  const Attention &call = unit.call;
  const int64_t at = unit.index(row) * call.n_kv + begin;
  const int64_t attended = smaller(count, greater(0, unit.key_limit(row) - begin));
  const float m = *unit.m(0, row), inverse = 1.0f / *unit.l(0, row);
  if (call.scores) {
    for (int64_t j = 0; j < count; ++j) call.scores[at + j] = canonical(s[j]);
  }
  for (int64_t j = 0; j < count; j += V::size) store(s + j, canonical(load<V>(s + j) * all<V>(call.scale)));
  if (call.scaled_scores) {
    for (int64_t j = 0; j < count; ++j) call.scaled_scores[at + j] = s[j];
  }
  for (int64_t j = attended; j < count; ++j) s[j] = -infinity;
  if (call.masked_scores) {
    for (int64_t j = 0; j < count; ++j) call.masked_scores[at + j] = s[j];
  }
  if (call.attention_weights) {
    for (int64_t j = 0; j < count; j += V::size) {
      const V x = load<V>(s + j);
      store(s + j, zero_if_equal(x, all<V>(-infinity), canonical(exp_of(x - all<V>(m)) * all<V>(inverse))));
    }
    for (int64_t j = 0; j < count; ++j) call.attention_weights[at + j] = s[j];
  }
}

template <class V>
inline void inspect(const Unit &unit) {
  const Attention &call = unit.call;
  if (!call.scores && !call.scaled_scores && !call.masked_scores && !call.attention_weights) return;
  float *const scores = unit.scratch + call.scratch.scores;
  for (int64_t begin = 0; begin < call.n_kv; begin += chunk_keys) {
    const int64_t count = smaller(chunk_keys, call.n_kv - begin);
    const float *const keys = keys_of(unit, begin, count);
    for (int64_t row = 0; row < unit.num_rows; ++row) {
      const EvenRows<0> q = {query_row(unit, row)};
      score<V, 1>(q, call.head_dim, keys, count, scores, Unchanged{});
      inspect_row<V>(unit, row, begin, count, scores);
    }
  }
}

// ---- One unit

// As many slots hold a state before chunk c as c has binary digits 1.
MHA_INLINE int64_t slots_before(int64_t c) { return __builtin_popcountll(static_cast<unsigned long long>(c)); }

template <class V>
void attend(const Attention &call, int64_t sequence, int64_t kv_head, int64_t query_begin, float *scratch) {
  constexpr int tile_rows = TileShape<V::size>::attend_rows;
  static_assert(tile_rows <= attend_tile_rows_max, "scratch has room for a tile");
  const int64_t group = call.num_heads / call.num_kv_heads;
  const int64_t queries = smaller(call.block_queries, call.n_q - query_begin);
  const Unit unit = {call, sequence, kv_head, query_begin, group, queries * group, scratch};

  interleave_queries(unit, tile_rows);

  const int64_t limit = unit.key_limit(unit.num_rows - 1);
  for (int64_t c = 0; c == 0 || c * chunk_keys < limit; ++c) {
    const int64_t begin = c * chunk_keys, count = smaller(chunk_keys, limit - begin);
    // Without keys there may be no arrays; any address will do then.
    Chunk chunk = {begin, unit.scratch, unit.scratch};
    if (count > 0) chunk = {begin, keys_of(unit, begin, count), values_of<V>(unit, begin, count)};
    int64_t slot = slots_before(c), first = unit.num_rows;
    for (int64_t row = 0; row < unit.num_rows; row += tile_rows) {
      const int64_t rows = smaller(tile_rows, unit.num_rows - row);
      if (c > 0 && unit.key_limit(row + rows - 1) <= chunk.begin) continue;  // later rows see more keys
      first = smaller(first, row);
      attend_tile_of<V, tile_rows>(rows, unit, chunk, row, slot);
    }
    for (int64_t ones = c; ones & 1; ones >>= 1) merge<V>(unit, --slot, first, unit.num_rows);
  }

  for (int64_t row = 0; row < unit.num_rows; row += tile_rows) {
    const int64_t end = smaller(row + tile_rows, unit.num_rows);
    const int64_t chunks = greater(1, (unit.key_limit(end - 1) + chunk_keys - 1) / chunk_keys);
    for (int64_t left = slots_before(chunks) - 2; left >= 0; --left) merge<V>(unit, left, row, end);
    for (int64_t r = row; r < end; ++r) finish<V>(unit, r);
  }
  inspect<V>(unit);
}

}  // namespace
}  // namespace mha
