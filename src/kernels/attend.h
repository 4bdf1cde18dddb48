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

// A row of a unit: one query of one query head.
struct Row {
  int64_t index;  // within the unit
  int64_t query;  // within the sequence
  int64_t head;
};

// Row r is query query_begin + r / group of query head kv_head * group + r % group, so that neighbours have almost the same keys to attend
// to.
struct Unit {
  const Attention &call;
  int64_t sequence, kv_head, query_begin;
  int64_t group;  // query heads per kv head
  int64_t num_rows;
  float *scratch;

  MHA_INLINE Row row(int64_t index) const {
    if (group == 1) return {index, query_begin + index, kv_head};
    const uint32_t query = static_cast<uint32_t>(index) / static_cast<uint32_t>(group);  // a quicker division than that of 64 bits
    return {index, query_begin + query, kv_head * group + index - query * group};
  }
  MHA_INLINE void advance(Row *row) const {
    ++row->index;
    if (++row->head < (kv_head + 1) * group) return;
    row->head -= group;
    ++row->query;
  }

  // Keys at positions below this one take part in the row.
  MHA_INLINE int64_t key_limit(const Row &row) const {
    if (!call.is_causal) return call.n_kv;
    const int64_t start = call.q_start ? call.q_start[sequence] : call.n_kv - call.n_q;
    const int64_t sees_all_from = call.n_kv - 1 - row.query;  // compared first: start may be as large as an int64_t can be
    return start >= sees_all_from ? call.n_kv : start + row.query + 1;
  }

  // The queries, row by row.
  MHA_INLINE float *q(int64_t index) const { return scratch + call.scratch.queries + index * call.head_dim; }

  MHA_INLINE float *o(int64_t slot, int64_t index) const {
    return scratch + call.scratch.states + slot * call.scratch.state_stride + index * call.head_dim_v_padded;
  }
  MHA_INLINE float *m(int64_t slot, int64_t index) const { return o(slot, num_rows) + index; }
  MHA_INLINE float *l(int64_t slot, int64_t index) const { return m(slot, num_rows) + merge_rows + index; }

  MHA_INLINE const float *input(const Row &row) const {
    return call.q.base + sequence * call.q.batch_stride + row.query * call.q.row_stride + row.head * call.q.head_stride;
  }
  MHA_INLINE float *output(const Row &row) const {
    return call.output + sequence * call.output_batch_stride + row.query * call.output_row_stride + row.head * call.output_head_stride;
  }
  // Position of the row in an output [batch, num_heads, n_q].
  MHA_INLINE int64_t position(const Row &row) const { return (sequence * call.num_heads + row.head) * call.n_q + row.query; }
};

// A chunk's keys and values as the kernels read them.
struct Chunk {
  int64_t begin;  // position of its first key
  const float *keys;
  const float *values;
};

// ---- Bringing queries, keys and values into the form that the kernels read

// Rows [begin, end) of the queries, into the unit's scratch memory.
template <class V>
inline void copy_queries(const Unit &unit, int64_t begin, int64_t end) {
  const int64_t head_dim = unit.call.head_dim;
  for (Row row = unit.row(begin); row.index < end; unit.advance(&row)) {
    const float *const from = unit.input(row);
    float *const to = unit.q(row.index);
    int64_t k = 0;
    for (; k + static_cast<int64_t>(V::size) <= head_dim; k += V::size) store(to + k, quiet(load<V>(from + k)));
    for (; k < head_dim; ++k) to[k] = quiet(from[k]);
  }
}

// Rows lie far apart, which hides them from the processor's own prefetching: they are asked for while those before them are computed.
// (Inlined by force: g++ 12 takes a function that only prefetches for one without effect, and leaves out its calls.)
MHA_INLINE void prefetch_queries(const Unit &unit, int64_t begin, int64_t end) {
  for (Row row = unit.row(begin); row.index < end; unit.advance(&row)) {
    const float *const from = unit.input(row);
    for (int64_t k = 0; k < unit.call.head_dim; k += 16) __builtin_prefetch(from + k);
  }
}

inline void pack_keys(const float *rows, int64_t row_stride, int64_t count, int64_t head_dim, float *blocks) {
  for (int64_t j = 0; j < count; j += 4) {
    float *const block = blocks + j / key_block * key_block * head_dim + j % key_block;
    const float *const row = rows + j * row_stride;
    const int64_t keys = smaller(4, count - j);
    int64_t c = 0;
    if (keys == 4) {
      const float *const row1 = row + row_stride, *const row2 = row1 + row_stride, *const row3 = row2 + row_stride;
      for (; c + 4 <= head_dim; c += 4) transpose4x4(row + c, row1 + c, row2 + c, row3 + c, block + c * key_block, key_block);
    }
    for (; c < head_dim; ++c) {
      for (int64_t i = 0; i < keys; ++i) block[c * key_block + i] = quiet(row[i * row_stride + c]);
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

// Where the rows of this unit's head begin; packed ones follow each other without gaps, whatever their order within a block.
MHA_INLINE const float *head_of(const Unit &unit, const KeyValueSource &source) {
  return source.base + unit.sequence * source.batch_stride + unit.kv_head * source.head_stride;
}

// Asks for the rows [begin, end) of a chunk that comes later. (Inlined by force, like prefetch_queries.)
MHA_INLINE void prefetch_keys(const Unit &unit, const KeyValueSource &source, int64_t width, int64_t begin, int64_t end) {
  const int64_t stride = source.is_packed ? width : source.row_stride;
  const float *row = head_of(unit, source) + begin * stride;
  for (int64_t j = begin; j < end; ++j, row += stride) {
    for (int64_t k = 0; k < width; k += 16) __builtin_prefetch(row + k, 0, 2);
  }
}

// The keys of a chunk from position `begin` on, of which the first `count` are needed.
inline const float *keys_of(const Unit &unit, int64_t begin, int64_t count) {
  const KeyValueSource &k = unit.call.k;
  const float *const head = head_of(unit, k);
  if (k.is_packed) return head + begin * unit.call.head_dim;
  float *const blocks = unit.scratch + unit.call.scratch.keys;
  pack_keys(head + begin * k.row_stride, k.row_stride, count, unit.call.head_dim, blocks);
  return blocks;
}

template <class V>
inline const float *values_of(const Unit &unit, int64_t begin, int64_t count) {
  const KeyValueSource &v = unit.call.v;
  const float *const head = head_of(unit, v);
  if (v.is_packed) return head + begin * unit.call.head_dim_v_padded;
  float *const rows = unit.scratch + unit.call.scratch.values;
  pack_values<V>(head + begin * v.row_stride, v.row_stride, count, unit.call.head_dim_v, unit.call.head_dim_v_padded, rows);
  return rows;
}

// ---- Scores

// What becomes of the products: scores, and beside them the greatest and the least of each row, which cost little while they are in a
// register.
template <class V, int R>
struct Score {
  float *scores;  // of the keys that are multiplied
  float scale;
  V greatest[R], least[R];

  MHA_INLINE Score(float *to, float factor) : scores(to), scale(factor) {
    MHA_UNROLL for (int r = 0; r < R; ++r) {
      greatest[r] = all<V>(-infinity);
      least[r] = all<V>(infinity);
    }
  }
  MHA_INLINE float *at(int r, int i) const { return scores + r * score_stride + i * static_cast<int>(V::size); }
  MHA_INLINE void operator()(V dot, int r, int i) {
    const V score = dot * all<V>(scale);
    greatest[r] = greater_of(score, greatest[r]);
    least[r] = less_of(score, least[r]);
    store(at(r, i), score);
  }
};

// The same where not all rows attend to all the keys, of which the first is at `first`: the others' scores are -infinity.
template <class V, int R>
struct MaskedScore {
  Score<V, R> &all_scores;
  const int64_t (&counts)[R];
  int64_t first;

  MHA_INLINE void operator()(V dot, int r, int i) {
    const int64_t count = counts[r] - first - i * static_cast<int64_t>(V::size);
    const V score = dot * all<V>(all_scores.scale), known = first_lanes(score, count, all<V>(-infinity));
    all_scores.greatest[r] = greater_of(known, all_scores.greatest[r]);
    all_scores.least[r] = less_of(first_lanes(score, count, all<V>(infinity)), all_scores.least[r]);
    store(all_scores.at(r, i), known);
  }
};

// take(dot(q[r], key j), r, i) for the keys of up to B blocks. `sums` has room for the products.
template <class V, int R, int B, class Take>
MHA_INLINE void multiply_keys(int64_t blocks, RowPointers<R> q, int64_t head_dim, const float *keys, float *sums, Take &&take) {
  if (blocks == B) {
    return multiply<R, B *(key_block / V::size), key_block / V::size, V>(q, head_dim, {keys, key_block, head_dim * key_block}, sums,
                                                                         score_stride, take);
  }
  if constexpr (B > 1) multiply_keys<V, R, B - 1>(blocks, q, head_dim, keys, sums, take);
}

// Turns scores[r][0, 16 * blocks) into p = exp(score - m), and gives l of each row. So many rows side by side as make use of the processor:
// an exp is a long chain of operations.
template <class V, int R>
MHA_INLINE void softmax(float *scores, int64_t blocks, const float *m, float *l) {
  constexpr int rows = R < TileShape<V::size>::softmax_rows ? R : TileShape<V::size>::softmax_rows, vectors = key_block / V::size;
  V maximum[rows], partial_sums[rows][vectors];
  MHA_UNROLL for (int r = 0; r < rows; ++r) {
    // Without a score above -infinity any finite number will do: exp gives 0 for the keys left out, and NaN for a NaN.
    maximum[r] = all<V>(m[r] == -infinity ? 0.0f : m[r]);
  }
  clear(partial_sums);
  for (float *s = scores; s < scores + blocks * key_block; s += key_block) {
    V p[rows * vectors];
    MHA_UNROLL for (int i = 0; i < rows * vectors; ++i) {
      p[i] = load<V>(s + i / vectors * score_stride + i % vectors * V::size) - maximum[i / vectors];
    }
    exp_of(p);
    MHA_UNROLL for (int i = 0; i < rows * vectors; ++i) {
      store(s + i / vectors * score_stride + i % vectors * V::size, p[i]);
      V &sum = partial_sums[i / vectors][i % vectors];
      sum = sum + p[i];
    }
  }
  MHA_UNROLL for (int r = 0; r < rows; ++r) l[r] = sum16(partial_sums[r]);
  if constexpr (R > rows) softmax<V, R - rows>(scores + rows * score_stride, blocks, m + rows, l + rows);
}

// ---- Context of a tile

// Which keys take part in which rows of a tile: row r has the keys below counts[r] but for those excluded. All rows have those below
// `shared`.
template <int R>
struct Attending {
  int64_t counts[R];
  int64_t shared, most;
  uint32_t rows_with_excluded;  // a bit for each row, whose excluded[r][j] then says
  uint8_t *excluded;            // [R][chunk_keys]

  MHA_INLINE bool has(int r, int64_t j) const { return j < counts[r] && !((rows_with_excluded >> r & 1) && excluded[r * chunk_keys + j]); }
};

// o[r] = sum of p[r][j] * values[j] over the keys that take part: those of all rows for the whole tile, the rest row by row, since no row
// is multiplied with a value that it does not attend to.
template <class V, int R, int C>
MHA_INLINE void context_columns(EvenRows<score_stride> p, const Attending<R> &keys, const float *values, int64_t width, float *o) {
  V acc[R][C];
  clear(acc);
  accumulate<R, C, C>(p, {values, width, 0}, 0, keys.shared, acc, NoPrefetch{});
  for (int64_t j = keys.shared; j < keys.most; ++j) {
    V value[C];
    MHA_UNROLL for (int i = 0; i < C; ++i) value[i] = load<V>(values + j * width + i * V::size);
    MHA_UNROLL for (int r = 0; r < R; ++r) {
      if (!keys.has(r, j)) continue;
      const V multiplier = all<V>(p.at(r, j));
      MHA_UNROLL for (int i = 0; i < C; ++i) acc[r][i] = mul_add(multiplier, value[i], acc[r][i]);
    }
  }
  MHA_UNROLL for (int r = 0; r < R; ++r) {
    MHA_UNROLL for (int i = 0; i < C; ++i) store(o + r * width + i * static_cast<int64_t>(V::size), acc[r][i]);
  }
}

template <class V, int R, int C>
MHA_INLINE void context(int64_t vectors, EvenRows<score_stride> p, const Attending<R> &keys, const float *values, int64_t width, float *o) {
  for (; vectors >= C; vectors -= C) {
    context_columns<V, R, C>(p, keys, values, width, o);
    values += C * V::size;
    o += C * V::size;
  }
  if constexpr (C > 1) context<V, R, C - 1>(vectors, p, keys, values, width, o);
}

// ---- One chunk for one tile

template <class V, int R>
inline void attend_tile(const Unit &unit, const Chunk &chunk, int64_t row, int64_t slot) {
  using Shape = TileShape<V::size>;
  constexpr int B = Shape::score_blocks(R);
  const Attention &call = unit.call;
  const int64_t head_dim = call.head_dim;
  Attending<R> keys;
  Row at = unit.row(row);
  MHA_UNROLL for (int r = 0; r < R; ++r, unit.advance(&at)) keys.counts[r] =
      smaller(chunk_keys, greater(0, unit.key_limit(at) - chunk.begin));
  keys.shared = keys.counts[0];  // later rows see more keys
  keys.most = keys.counts[R - 1];
  keys.rows_with_excluded = 0;
  keys.excluded = reinterpret_cast<uint8_t *>(unit.scratch + call.scratch.excluded);

  float *const scores = unit.scratch + call.scratch.scores;
  RowPointers<R> q;
  MHA_UNROLL for (int r = 0; r < R; ++r) q.row[r] = unit.q(row + r);
  Score<V, R> score(scores, call.scale);
  const int64_t blocks = (keys.most + key_block - 1) / key_block;
  for (int64_t block = 0; block < blocks; block += B) {
    const float *const these = chunk.keys + block * head_dim * key_block;
    score.scores = scores + block * key_block;
    if ((block + B) * key_block <= keys.shared)
      multiply_keys<V, R, B>(B, q, head_dim, these, score.scores, score);
    else
      multiply_keys<V, R, B>(smaller(B, blocks - block), q, head_dim, these, score.scores,
                             MaskedScore<V, R>{score, keys.counts, block * key_block});
  }
  for (int r = 0; r < R; ++r) {
    if (!has_negative_infinity(score.least[r])) continue;
    keys.rows_with_excluded |= 1u << r;
    keys.shared = 0;
    for (int64_t j = 0; j < keys.counts[r]; ++j) keys.excluded[r * chunk_keys + j] = scores[r * score_stride + j] == -infinity;
  }

  float m[R], l[R];
  MHA_UNROLL for (int r = 0; r < R; ++r) m[r] = greatest(score.greatest[r]);
  softmax<V, R>(scores, blocks, m, l);
  for (int r = 0; r < R; ++r) {
    *unit.m(slot, row + r) = m[r];
    *unit.l(slot, row + r) = l[r];
  }
  const int64_t width = call.head_dim_v_padded;
  context<V, R, Shape::context_vectors>(width / V::size, {scores}, keys, chunk.values, width, unit.o(slot, row));
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
inline void finish(const Unit &unit, const Row &row) {
  const Attention &call = unit.call;
  const float l = *unit.l(0, row.index);
  float *const o = unit.o(0, row.index), *const out = unit.output(row);
  const bool is_empty = l == 0.0f;
  const V inverse = all<V>(1.0f / l);
  int64_t c = 0;
  for (; c + static_cast<int64_t>(V::size) <= call.head_dim_v; c += V::size) {
    store(out + c, is_empty ? all<V>(0.0f) : canonical(load<V>(o + c) * inverse));
  }
  if (c < call.head_dim_v) {
    store(o + c, is_empty ? all<V>(0.0f) : canonical(load<V>(o + c) * inverse));
    for (; c < call.head_dim_v; ++c) out[c] = o[c];
  }
  if (call.context) {
    float *const tap = call.context + ((unit.sequence * call.n_q + row.query) * call.num_heads + row.head) * call.head_dim_v;
    for (int64_t i = 0; i < call.head_dim_v; ++i) tap[i] = out[i];
  }
  if (call.lse) call.lse[unit.position(row)] = is_empty ? -infinity : canonical(*unit.m(0, row.index) + log_of(l));
}

// ---- Looking inside: a second pass over the keys for those who asked, when m and l of the whole row are known

template <class V>
inline void inspect_row(const Unit &unit, const Row &row, int64_t begin, int64_t count, float *s) {
  const Attention &call = unit.call;
  const int64_t at = unit.position(row) * call.n_kv + begin;
  const int64_t attended = smaller(count, greater(0, unit.key_limit(row) - begin));
  const float m = *unit.m(0, row.index), inverse = 1.0f / *unit.l(0, row.index);
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
    for (Row row = unit.row(0); row.index < unit.num_rows; unit.advance(&row)) {
      const RowPointers<1> q = {{unit.q(row.index)}};
      for (int64_t j = 0; j < count; j += key_block) {
        multiply_keys<V, 1, 1>(1, q, call.head_dim, keys + j * call.head_dim, scores + j,
                               [&](V dot, int, int i) { store(scores + j + i * static_cast<int>(V::size), dot); });
      }
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
  const int64_t group = call.num_heads == call.num_kv_heads ? 1 : call.num_heads / call.num_kv_heads;
  const int64_t queries = smaller(call.block_queries, call.n_q - query_begin);
  const Unit unit = {call, sequence, kv_head, query_begin, group, queries * group, scratch};

  const int64_t limit = unit.key_limit(unit.row(unit.num_rows - 1));
  for (int64_t c = 0; c == 0 || c * chunk_keys < limit; ++c) {
    const int64_t begin = c * chunk_keys, count = smaller(chunk_keys, limit - begin);
    // Without keys there may be no arrays; any address will do then.
    Chunk chunk = {begin, unit.scratch, unit.scratch};
    if (count > 0) chunk = {begin, keys_of(unit, begin, count), values_of<V>(unit, begin, count)};
    const int64_t next = begin + chunk_keys, next_count = greater(0, smaller(chunk_keys, limit - next));
    int64_t slot = slots_before(c), first = unit.num_rows;
    for (int64_t row = 0; row < unit.num_rows; row += tile_rows) {
      const int64_t end = smaller(row + tile_rows, unit.num_rows);
      if (c > 0 && unit.key_limit(unit.row(end - 1)) <= begin) continue;  // later rows see more keys
      if (c == 0) {
        copy_queries<V>(unit, row, end);
        prefetch_queries(unit, end, smaller(end + tile_rows, unit.num_rows));
      }
      // A tile's share of the next chunk is on its way from the memory while the tile is computed.
      const int64_t share_begin = next + next_count * row / unit.num_rows, share_end = next + next_count * end / unit.num_rows;
      prefetch_keys(unit, call.k, call.head_dim, share_begin, share_end);
      prefetch_keys(unit, call.v, call.head_dim_v, share_begin, share_end);
      first = smaller(first, row);
      attend_tile_of<V, tile_rows>(end - row, unit, chunk, row, slot);
    }
    for (int64_t ones = c; ones & 1; ones >>= 1) merge<V>(unit, --slot, first, unit.num_rows);
  }

  for (int64_t row = 0; row < unit.num_rows; row += tile_rows) {
    const int64_t end = smaller(row + tile_rows, unit.num_rows);
    const int64_t chunks = greater(1, (unit.key_limit(unit.row(end - 1)) + chunk_keys - 1) / chunk_keys);
    for (int64_t left = slots_before(chunks) - 2; left >= 0; --left) merge<V>(unit, left, row, end);
    for (Row at = unit.row(row); at.index < end; unit.advance(&at)) finish<V>(unit, at);
  }
  inspect<V>(unit);
}

}  // namespace
}  // namespace mha
