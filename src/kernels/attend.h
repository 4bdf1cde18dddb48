// Attention: scores -> scale -> mask -> max, exp, sum -> context, chunk of keys by chunk of keys, and the states of the chunks merged.
//
// A unit of work is a block of queries of all the query heads that share one kv head. Its rows are cut into tiles of a few rows; for each
// chunk of keys, each tile computes the chunk's state (m, l, o), which then is merged with the states before it as CONTRACT.md section 9
// says: slot i of the states holds a subtree, like the digits of a binary counter.
#pragma once

#include "kernels/functions.h"
#include "kernels/key_values.h"

namespace mha {
namespace {

// ---- Queries

// Rows [begin, end) of the queries, rotated, into the unit's scratch memory.
template <class V>
MHA_APART void copy_queries(const Unit &unit, int64_t begin, int64_t end) {
  const int64_t head_dim = unit.call.head_dim;
  for (Row row = unit.row(begin); row.index < end; unit.advance(&row)) {
    const float *from = unit.input(row);
    float *const to = unit.q(row.index);
    if (unit.call.rotate_q.cos) {
      for (int64_t k = 0; k < head_dim; ++k) to[k] = from[k];
      rotate<V>(unit.call.rotate_q, unit.sequence_index, unit.array_row(row), unit.sequence.q_start + row.query, to);
      from = to;
    }
    int64_t k = 0;
    for (; k + static_cast<int64_t>(V::size) <= head_dim; k += V::size) store(to + k, quiet(load<V>(from + k)));
    for (; k < head_dim; ++k) to[k] = quiet(from[k]);
  }
}

// Rows lie far apart, which hides them from the processor's own prefetching: they are asked for while those before them are computed.
// (Inlined by force, like NextChunk::prefetch.)
MHA_INLINE void prefetch_queries(const Unit &unit, int64_t begin, int64_t end) {
  for (Row row = unit.row(begin); row.index < end; unit.advance(&row)) {
    const float *const from = unit.input(row);
    for (int64_t k = 0; k < unit.call.head_dim; k += 16) __builtin_prefetch(from + k);
  }
}

// ---- What a tile of few rows asks the memory for

// While a tile of a few rows is computed, the memory is waited for. So its loops ask for what they will read some time later: as many lines
// a step as the loop itself reads. (Measured: 16 to 32 KiB ahead is best; less leaves the memory idle at each softmax, and asking for the
// values while keys are read is no better.)
constexpr int64_t stream_ahead_bytes = 32 << 10;

template <int columns, class Element>
using AsMuchAhead = Prefetch<greater(1, columns *static_cast<int>(sizeof(Element)) / 64), 2>;

MHA_INLINE const float *stream_ahead(const void *here) {
  return reinterpret_cast<const float *>(reinterpret_cast<uintptr_t>(here) + stream_ahead_bytes);
}

// ---- Scores

// What becomes of the products: scores, and beside them the greatest and the least of each row, which cost little while they are in a
// register. Vector i of a row belongs to the keys from first + i * V::size on.
template <class V, int R>
struct Score {
  const Groups &keys;
  float *scores;  // [R][score_stride], of the whole chunk
  float scale;
  int64_t first;
  V greatest[R], least[R];

  MHA_INLINE Score(const Groups &of, float *to, float factor) : keys(of), scores(to), scale(factor), first(0) {
    MHA_UNROLL for (int r = 0; r < R; ++r) {
      greatest[r] = all<V>(-infinity);
      least[r] = all<V>(infinity);
    }
  }
  MHA_INLINE float *at(int r, int i) const { return scores + r * score_stride + first + i * static_cast<int>(V::size); }
  MHA_INLINE void operator()(V dot, int r, int i) {
    const V score = dot * all<V>(scale);
    greatest[r] = greater_of(score, greatest[r]);
    least[r] = less_of(score, least[r]);
    store(at(r, i), score);
  }
};

// The same where not all rows attend to all the keys: row r has those in [begins[r], ends[r]), and the others' scores are -infinity.
template <class V, int R>
struct MaskedScore {
  Score<V, R> &all_scores;
  const int64_t (&begins)[R], (&ends)[R];

  MHA_INLINE void operator()(V dot, int r, int i) {
    const int64_t key = all_scores.first + i * static_cast<int64_t>(V::size);
    if (all_scores.keys.has_scales) dot = dot * load<V>(all_scores.keys.scales[key / key_block] + key % key_block);
    const V score = dot * all<V>(all_scores.scale), none = all<V>(-infinity);
    V known = first_lanes(score, ends[r] - key, none), finite = first_lanes(score, ends[r] - key, all<V>(infinity));
    if (begins[r] > key) {
      known = first_lanes(none, begins[r] - key, known);
      finite = first_lanes(all<V>(infinity), begins[r] - key, finite);
    }
    all_scores.greatest[r] = greater_of(known, all_scores.greatest[r]);
    all_scores.least[r] = less_of(finite, all_scores.least[r]);
    store(all_scores.at(r, i), known);
  }
};

// Keys in blocks of 16, each of which lies where it wants.
template <class Element, int B>
struct KeyBlocks {
  const Element *block[B];

  MHA_INLINE void skip(int64_t terms) { MHA_UNROLL for (int i = 0; i < B; ++i) block[i] += terms * key_block; }
};

template <int R, int N, int C, class V, class Rows, class Element, class Ahead>
MHA_INLINE void accumulate(Rows rows, const KeyBlocks<Element, N / C> &keys, int64_t begin, int64_t end, V (&acc)[R][N], Ahead ahead) {
  for (int64_t k = begin; k < end; ++k) {
    V column[N];
    MHA_UNROLL for (int i = 0; i < N; ++i) column[i] =
        load<V>(keys.block[i / C] + (k - begin) * key_block + i % C * static_cast<int>(V::size));
    ahead.step(k);
    MHA_UNROLL for (int r = 0; r < R; ++r) {
      const V multiplier = all<V>(rows.at(r, k));
      MHA_UNROLL for (int i = 0; i < N; ++i) acc[r][i] = mul_add(multiplier, column[i], acc[r][i]);
    }
  }
}

// take(dot(q[r], key j), r, i) for the keys of B blocks, from `block` on. `sums` has room for the products.
template <class V, int R, int B, class Element, class Take, class Ahead = NoPrefetch>
MHA_INLINE void multiply_keys(const Groups &keys, int64_t block, RowPointers<R> q, int64_t head_dim, float *sums, Take &&take,
                              Ahead ahead = {}) {
  KeyBlocks<Element, B> blocks;
  MHA_UNROLL for (int i = 0; i < B; ++i) blocks.block[i] = static_cast<const Element *>(keys.at[block + i]);
  multiply<R, B *(key_block / V::size), key_block / V::size, V>(q, head_dim, blocks, sums + block * key_block, score_stride, take, ahead);
}

// Of up to B blocks.
template <class V, int R, int B, class Element, class Take>
MHA_INLINE void multiply_keys_of(int64_t blocks, const Groups &keys, int64_t block, RowPointers<R> q, int64_t head_dim, float *sums,
                                 Take &&take) {
  if (blocks == B) return multiply_keys<V, R, B, Element>(keys, block, q, head_dim, sums, take);
  if constexpr (B > 1) multiply_keys_of<V, R, B - 1, Element>(blocks, keys, block, q, head_dim, sums, take);
}

// p = exp(score - m) of blocks side by side, and their sums; a block's worth of vectors for each of `rows` rows and `blocks` blocks.
template <class V, int rows, int blocks>
MHA_INLINE void exp_of_blocks(float *s, const V (&maximum)[rows], V (&partial_sums)[rows][key_block / V::size]) {
  constexpr int vectors = key_block / V::size, of_row = vectors * blocks;
  V p[rows * of_row];
  MHA_UNROLL for (int i = 0; i < rows * of_row; ++i) {
    p[i] = load<V>(s + i / of_row * score_stride + i % of_row * V::size) - maximum[i / of_row];
  }
  exp_of(p);
  MHA_UNROLL for (int i = 0; i < rows * of_row; ++i) {
    store(s + i / of_row * score_stride + i % of_row * V::size, p[i]);
    V &sum = partial_sums[i / of_row][i % vectors];
    sum = sum + p[i];
  }
}

// Turns scores[r][0, 16 * blocks) into p = exp(score - m), and gives l of each row. So many rows, or blocks, side by side as make use of
// the processor: an exp is a long chain of operations.
template <class V, int R>
MHA_INLINE void softmax(float *scores, int64_t blocks, const float *m, float *l) {
  constexpr int most_rows = TileShape<V::size>::softmax_rows, rows = R < most_rows ? R : most_rows;
  constexpr int blocks_at_once = rows == 1 && V::size > 1 ? greater(1, most_rows * static_cast<int>(V::size) / key_block + 1) : 1;
  V maximum[rows], partial_sums[rows][key_block / V::size];
  MHA_UNROLL for (int r = 0; r < rows; ++r) {
    // Without a score above -infinity any finite number will do: exp gives 0 for the keys left out, and NaN for a NaN.
    maximum[r] = all<V>(m[r] == -infinity ? 0.0f : m[r]);
  }
  clear(partial_sums);
  float *s = scores, *const end = scores + blocks * key_block;
  for (; s + blocks_at_once * key_block <= end; s += blocks_at_once * key_block) {
    exp_of_blocks<V, rows, blocks_at_once>(s, maximum, partial_sums);
  }
  if constexpr (blocks_at_once > 1) {
    for (; s < end; s += key_block) exp_of_blocks<V, rows, 1>(s, maximum, partial_sums);
  }
  MHA_UNROLL for (int r = 0; r < rows; ++r) l[r] = sum16(partial_sums[r]);
  if constexpr (R > rows) softmax<V, R - rows>(scores + rows * score_stride, blocks, m + rows, l + rows);
}

// ---- Context of a tile

// Which keys of the chunk take part in which rows of a tile: row r has those in [begins[r], ends[r]) but for those excluded. All rows have
// those in `shared`; none has one outside of `some`.
template <int R>
struct Attending {
  int64_t begins[R], ends[R];
  Range some, shared;
  uint32_t rows_with_excluded;  // a bit for each row, whose excluded[r][j] then says
  uint8_t *excluded;            // [R][chunk_keys]

  MHA_INLINE bool has(int r, int64_t j) const {
    return j >= begins[r] && j < ends[r] && !((rows_with_excluded >> r & 1) && excluded[r * chunk_keys + j]);
  }
};

// Values of the keys [begin, end), which lie one after the other.
template <class Element>
struct ValueRows {
  const Element *row;
  int64_t width;
};

template <int R, int N, int C, class V, class Rows, class Element, class Ahead>
MHA_INLINE void accumulate(Rows rows, const ValueRows<Element> &values, int64_t begin, int64_t end, V (&acc)[R][N], Ahead ahead) {
  const Element *value = values.row;
  for (int64_t j = begin; j < end; ++j, value += values.width) {
    V column[N];
    MHA_UNROLL for (int i = 0; i < N; ++i) column[i] = load<V>(value + i * static_cast<int>(V::size));
    ahead.step(j);
    MHA_UNROLL for (int r = 0; r < R; ++r) {
      const V multiplier = all<V>(rows.at(r, j));
      MHA_UNROLL for (int i = 0; i < N; ++i) acc[r][i] = mul_add(multiplier, column[i], acc[r][i]);
    }
  }
}

// o[r] = sum of p[r][j] * values[j] over the keys that take part, for C vectors of columns: those that all rows have for the whole tile,
// the others row by row, since no row is multiplied with a value that it does not attend to.
template <class V, int R, int C, class Element, class Ahead>
MHA_INLINE void context_columns(EvenRows<score_stride> p, const Attending<R> &keys, const Groups &values, int64_t width, int64_t column,
                                float *o, Ahead ahead) {
  V acc[R][C];
  clear(acc);
  for (int64_t j = keys.some.begin; j < keys.some.end;) {
    const Element *const row = static_cast<const Element *>(values.at[j / key_block]) + j % key_block * width + column;
    if (j >= keys.shared.begin && j < keys.shared.end) {
      const int64_t end = smaller(values.run_end[j / key_block], keys.shared.end);
      accumulate<R, C, C>(p, ValueRows<Element>{row, width}, j, end, acc, ahead);
      j = end;
      continue;
    }
    V value[C];
    MHA_UNROLL for (int i = 0; i < C; ++i) value[i] = load<V>(row + i * static_cast<int>(V::size));
    MHA_UNROLL for (int r = 0; r < R; ++r) {
      if (!keys.has(r, j)) continue;
      const V multiplier = all<V>(p.at(r, j));
      MHA_UNROLL for (int i = 0; i < C; ++i) acc[r][i] = mul_add(multiplier, value[i], acc[r][i]);
    }
    ++j;
  }
  MHA_UNROLL for (int r = 0; r < R; ++r) {
    MHA_UNROLL for (int i = 0; i < C; ++i) store(o + r * width + column + i * static_cast<int64_t>(V::size), acc[r][i]);
  }
}

// From `column` on to the end, C vectors at a time, then fewer.
template <class V, int R, int C, class Element>
MHA_INLINE void context(const Chunk &chunk, EvenRows<score_stride> p, const Attending<R> &keys, int64_t width, int64_t column, float *o) {
  constexpr int64_t columns = C * static_cast<int64_t>(V::size);
  constexpr bool is_full = C == TileShape<V::size>::context_vectors(R), may_be_streamed = is_full || C == 4 || !is_float<Element>;
  for (; column + columns <= width; column += columns) {
    if constexpr (may_be_streamed) {
      const Element *const first = static_cast<const Element *>(chunk.values.at[keys.some.begin / key_block]) + column * chunk_keys;
      const AsMuchAhead<columns, Element> ahead = {stream_ahead(first)};
      if (chunk.is_streamed || !is_float<Element>) {
        context_columns<V, R, C, Element>(p, keys, chunk.values, width, column, o, ahead);
        continue;
      }
    }
    if constexpr (is_float<Element>) context_columns<V, R, C, Element>(p, keys, chunk.values, width, column, o, NoPrefetch{});
  }
  constexpr int fewer = C > 4 ? C / 2 : is_float<Element> ? C - 1 : 1;
  if constexpr (C > 1) context<V, R, fewer, Element>(chunk, p, keys, width, column, o);
}

// ---- One chunk for one tile

template <int R>
MHA_INLINE void find_attending(const Unit &unit, int64_t chunk_begin, int64_t row, Attending<R> *keys) {
  Row at = unit.row(row);
  MHA_UNROLL for (int r = 0; r < R; ++r, unit.advance(&at)) {
    const Range range = unit.keys_of(at);
    keys->begins[r] = smaller(chunk_keys, greater(0, range.begin - chunk_begin));
    keys->ends[r] = smaller(chunk_keys, greater(0, range.end - chunk_begin));
  }
  // Later rows have later keys.
  keys->some = {keys->begins[0], keys->ends[R - 1]};
  keys->shared = {keys->begins[R - 1], keys->ends[0]};
  if (keys->shared.begin >= keys->shared.end) keys->shared = {keys->some.end, keys->some.end};
  keys->rows_with_excluded = 0;
  keys->excluded = reinterpret_cast<uint8_t *>(unit.scratch + unit.call.scratch.excluded);
}

// Whole groups of B blocks from `block` on, of which those that no row needs are one that a row does need, with the products masked.
template <class V, int R, int B, class Element, class Ahead>
MHA_INLINE void score_filled_up(int64_t block, RowPointers<R> q, int64_t head_dim, const Attending<R> &keys, Score<V, R> *score,
                                Ahead ahead) {
  const int64_t first = keys.some.begin / key_block, last = (keys.some.end - 1) / key_block;
  KeyBlocks<Element, B> blocks;
  MHA_UNROLL for (int i = 0; i < B; ++i) {
    blocks.block[i] = static_cast<const Element *>(score->keys.at[smaller(last, greater(first, block + i))]);
  }
  multiply<R, B *(key_block / V::size), key_block / V::size, V>(q, head_dim, blocks, score->scores + block * key_block, score_stride,
                                                                MaskedScore<V, R>{*score, keys.begins, keys.ends}, ahead);
}

template <class V, int R, class Element>
MHA_INLINE void score_keys(const Unit &unit, const Chunk &chunk, int64_t row, const Attending<R> &keys, Score<V, R> *score) {
  constexpr int B = TileShape<V::size>::score_blocks(R);
  RowPointers<R> q;
  MHA_UNROLL for (int r = 0; r < R; ++r) q.row[r] = unit.q(row + r);
  const int64_t head_dim = unit.call.head_dim, end = (keys.some.end + key_block - 1) / key_block;
  const bool are_masked = score->keys.has_scales || !is_float<Element>;
  for (int64_t block = keys.some.begin / key_block / B * B; block < end; block += B) {
    score->first = block * key_block;
    const AsMuchAhead<B * key_block, Element> ahead = {stream_ahead(score->keys.at[greater(block, keys.some.begin / key_block)])};
    const bool are_shared = score->first >= keys.shared.begin && score->first + B * key_block <= keys.shared.end;
    if constexpr (is_float<Element>) {
      if (are_shared && !are_masked) {
        if (chunk.is_streamed)
          multiply_keys<V, R, B, Element>(score->keys, block, q, head_dim, score->scores, *score, ahead);
        else
          multiply_keys<V, R, B, Element>(score->keys, block, q, head_dim, score->scores, *score);
        continue;
      }
    }
    // With many rows, no more blocks than there are.
    if constexpr (is_float<Element> && R > 2) {
      const int64_t first = greater(block, keys.some.begin / key_block);
      score->first = first * key_block;
      multiply_keys_of<V, R, B, Element>(smaller(block + B, end) - first, score->keys, first, q, head_dim, score->scores,
                                         MaskedScore<V, R>{*score, keys.begins, keys.ends});
    } else if (is_float<Element> && end - block == 1) {  // a small call does not wait for the memory
      score_filled_up<V, R, 1, Element>(block, q, head_dim, keys, score, NoPrefetch{});
    } else {
      score_filled_up<V, R, B, Element>(block, q, head_dim, keys, score, ahead);
    }
  }
}

// Values of int8 have their scales multiplied to p.
template <class V, int R>
MHA_INLINE void scale_by_values(const Groups &values, int64_t first_block, int64_t end_block, float *p) {
  for (int64_t block = first_block; block < end_block; ++block) {
    MHA_UNROLL for (int i = 0; i < key_block; i += V::size) {
      const V scale = load<V>(values.scales[block] + i);
      MHA_UNROLL for (int r = 0; r < R; ++r) {
        float *const at = p + r * score_stride + block * key_block + i;
        store(at, load<V>(at) * scale);
      }
    }
  }
}

// Tiles of keys and values that are widened in registers have 1, 2 or 4 rows: more shapes would be more code than use.
constexpr bool may_widen(int rows) { return rows == 1 || rows == 2 || rows == 4; }

// visit_read, but for tiles that find floats alone.
template <class V, int R, class Visit>
MHA_INLINE void visit_tile(Storage storage, Visit visit) {
  if constexpr (may_widen(R))
    visit_read<V>(storage, visit);
  else
    visit(Stored<float>{});
}

template <class V, int R>
inline void attend_tile(const Unit &unit, const Chunk &chunk, int64_t row, int64_t slot) {
  const Attention &call = unit.call;
  Attending<R> keys;
  find_attending<R>(unit, chunk.begin, row, &keys);

  float *const scores = unit.scratch + call.scratch.scores;
  Score<V, R> score(chunk.keys, scores, call.scale);
  visit_read<V>(chunk.keys.storage,
                [&](auto stored) { score_keys<V, R, typename decltype(stored)::Element>(unit, chunk, row, keys, &score); });
  for (int r = 0; r < R; ++r) {
    if (!has_negative_infinity(score.least[r])) continue;
    keys.rows_with_excluded |= 1u << r;
    keys.shared = {keys.some.end, keys.some.end};
    for (int64_t j = keys.begins[r]; j < keys.ends[r]; ++j) {
      keys.excluded[r * chunk_keys + j] = scores[r * score_stride + j] == -infinity;
    }
  }

  float m[R], l[R];
  MHA_UNROLL for (int r = 0; r < R; ++r) m[r] = greatest(score.greatest[r]);
  const int64_t first_block = keys.some.begin / key_block, end_block = (keys.some.end + key_block - 1) / key_block;
  softmax<V, R>(scores + first_block * key_block, end_block - first_block, m, l);
  for (int r = 0; r < R; ++r) {
    *unit.m(slot, row + r) = m[r];
    *unit.l(slot, row + r) = l[r];
  }
  if (chunk.values.has_scales) scale_by_values<V, R>(chunk.values, first_block, end_block, scores);
  visit_tile<V, R>(chunk.values.storage, [&](auto stored) {
    using Element = typename decltype(stored)::Element;
    constexpr int C = TileShape<V::size>::context_vectors(R);
    context<V, R, C, Element>(chunk, {scores}, keys, call.head_dim_v_padded, 0, unit.o(slot, row));
  });
}

template <class V, int R>
MHA_INLINE void attend_tile_of(int64_t rows, const Unit &unit, const Chunk &chunk, int64_t row, int64_t slot) {
  if (rows == R) return attend_tile<V, R>(unit, chunk, row, slot);
  if constexpr (R > 1) attend_tile_of<V, R - 1>(rows, unit, chunk, row, slot);
}

// ---- Merging states, and finishing rows

// Slot `left` becomes merge(left, left + 1), for rows [begin, end). The factors of 16 rows are computed side by side.
template <class V>
MHA_APART void merge(const Unit &unit, int64_t left, int64_t begin, int64_t end) {
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
    float *const tap =
        call.context + ((unit.sequence_index * call.n_q + unit.array_row(row)) * call.num_heads + row.head) * call.head_dim_v;
    for (int64_t i = 0; i < call.head_dim_v; ++i) tap[i] = out[i];
  }
  if (call.lse) call.lse[unit.position(row)] = is_empty ? -infinity : canonical(*unit.m(0, row.index) + log_of(l));
}

// ---- Looking inside: a second pass over the keys for those who asked, when m and l of the whole row are known

template <class V>
inline void inspect_row(const Unit &unit, const Row &row, int64_t begin, int64_t count, float *s) {
  const Attention &call = unit.call;
  const int64_t at = unit.position(row) * call.n_kv + unit.sequence.column + begin;
  const Range range = unit.keys_of(row);
  const float m = *unit.m(0, row.index), inverse = 1.0f / *unit.l(0, row.index);
  if (call.scores) {
    for (int64_t j = 0; j < count; ++j) call.scores[at + j] = canonical(s[j]);
  }
  for (int64_t j = 0; j < count; j += V::size) store(s + j, canonical(load<V>(s + j) * all<V>(call.scale)));
  if (call.scaled_scores) {
    for (int64_t j = 0; j < count; ++j) call.scaled_scores[at + j] = s[j];
  }
  for (int64_t j = 0; j < count; ++j) {
    if (begin + j < range.begin || begin + j >= range.end) s[j] = -infinity;
  }
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

// The columns [begin, end), which are no keys of the sequence.
inline void clear_inspected(const Unit &unit, const Row &row, int64_t begin, int64_t end) {
  const Attention &call = unit.call;
  const int64_t at = unit.position(row) * call.n_kv;
  for (int64_t j = begin; j < end; ++j) {
    if (call.scores) call.scores[at + j] = 0.0f;
    if (call.scaled_scores) call.scaled_scores[at + j] = 0.0f;
    if (call.masked_scores) call.masked_scores[at + j] = -infinity;
    if (call.attention_weights) call.attention_weights[at + j] = 0.0f;
  }
}

template <class V>
inline void inspect(const Unit &unit) {
  const Attention &call = unit.call;
  if (!call.scores && !call.scaled_scores && !call.masked_scores && !call.attention_weights) return;
  float *const scores = unit.scratch + call.scratch.scores;
  for (int64_t begin = 0; begin < unit.sequence.n_kv; begin += chunk_keys) {
    const int64_t count = smaller(chunk_keys, unit.sequence.n_kv - begin);
    Groups keys;
    read_keys<V>(unit, begin, {0, count}, &keys, false);
    for (Row row = unit.row(0); row.index < unit.num_rows; unit.advance(&row)) {
      const RowPointers<1> q = {{unit.q(row.index)}};
      for (int64_t j = 0; j < count; j += key_block) {
        multiply_keys<V, 1, 1, float>(keys, j / key_block, q, call.head_dim, scores, [&](V dot, int, int i) {
          const int64_t lane = i * static_cast<int>(V::size);
          if (keys.has_scales) dot = dot * load<V>(keys.scales[j / key_block] + lane);
          store(scores + j + lane, dot);
        });
      }
      inspect_row<V>(unit, row, begin, count, scores);
    }
  }
  const int64_t column = unit.sequence.column;
  for (Row row = unit.row(0); row.index < unit.num_rows; unit.advance(&row)) {
    clear_inspected(unit, row, 0, column);
    clear_inspected(unit, row, column + unit.sequence.n_kv, call.n_kv);
  }
}

// ---- One unit

// The states before chunk c, when chunk `first` was the first, as a binary counter: those subtrees that hold a chunk, one for each 1 among
// the digits of c but for the leading ones that c has in common with `first`.
MHA_INLINE int64_t slots_before(int64_t c, int64_t first) {
  if (c == first) return 0;
  const int digit = 63 - __builtin_clzll(static_cast<unsigned long long>(c ^ first));
  return __builtin_popcountll(static_cast<unsigned long long>(c) & ((2ull << digit) - 1));
}

// After chunk c: merges it with the subtree before it as long as both are halves of a larger one, for rows [begin, end).
template <class V>
MHA_INLINE void merge_subtrees(const Unit &unit, int64_t c, int64_t first, int64_t begin, int64_t end) {
  int64_t slot = slots_before(c, first);
  for (int64_t level = 0; (c >> level & 1) && c >> level << level > first; ++level) merge<V>(unit, --slot, begin, end);
}

// After the last chunk, c: what is left, starting at the right.
template <class V>
MHA_INLINE void merge_rest(const Unit &unit, int64_t c, int64_t first, int64_t begin, int64_t end) {
  for (int64_t left = slots_before(c + 1, first) - 2; left >= 0; --left) merge<V>(unit, left, begin, end);
}

inline void clear_states(const Unit &unit, int64_t slot, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    *unit.m(slot, row) = -infinity;
    *unit.l(slot, row) = 0.0f;
  }
}

MHA_INLINE Range chunks_of(Range keys) {
  return {keys.begin / chunk_keys, keys.end > keys.begin ? (keys.end + chunk_keys - 1) / chunk_keys : keys.begin / chunk_keys};
}

MHA_INLINE Range intersection(Range a, Range b) {
  const int64_t begin = greater(a.begin, b.begin);
  return {begin, greater(begin, smaller(a.end, b.end))};
}

// The keys that some of the rows [begin, end) attend to.
MHA_INLINE Range keys_of_rows(const Unit &unit, int64_t begin, int64_t end) {
  return {unit.keys_of(unit.row(begin)).begin, unit.keys_of(unit.row(end - 1)).end};
}

// Where the tile ends that begins at `row`.
template <class V>
MHA_INLINE int64_t tile_end(const Unit &unit, int64_t row) {
  const int64_t left = unit.num_rows - row;
  if (widens_in_registers<V>(unit, unit.call.k) || widens_in_registers<V>(unit, unit.call.v)) {
    return row + (left >= 4 ? 4 : left >= 2 ? 2 : 1);
  }
  return row + smaller(left, TileShape<V::size>::attend_rows);
}

// The states of all rows over the keys of `chunks`, in slot 0.
template <class V>
inline void attend_chunks(const Unit &unit, Range chunks) {
  constexpr int tile_rows = TileShape<V::size>::attend_rows;
  static_assert(tile_rows <= attend_tile_rows_max, "scratch has room for a tile");
  const Range all_keys = keys_of_rows(unit, 0, unit.num_rows);
  const int64_t first = chunks.begin;
  for (int64_t c = chunks.begin; c < chunks.end; ++c) {
    const int64_t begin = c * chunk_keys, next = begin + chunk_keys;
    const Range here = intersection(all_keys, {begin, next}), needed = {here.begin - begin, here.end - begin};
    Chunk chunk;
    chunk.begin = begin;
    read_keys<V>(unit, begin, needed, &chunk.keys);
    read_values<V>(unit, begin, needed, &chunk.values);
    const NextChunk ahead(unit, c + 1 < chunks.end ? intersection(all_keys, {next, next + chunk_keys}) : Range{next, next});
    const bool is_streamed = unit.num_rows <= streamed_rows && unit.call.k.is_packed && unit.call.v.is_packed;
    const int64_t slot = slots_before(c, first);
    int64_t first_row = unit.num_rows;
    for (int64_t row = 0, end; row < unit.num_rows; row = end) {
      end = tile_end<V>(unit, row);
      if (c == first) {
        copy_queries<V>(unit, row, end);
        prefetch_queries(unit, end, smaller(end + tile_rows, unit.num_rows));
      }
      const Range keys = keys_of_rows(unit, row, end);
      if (keys.end <= begin && c > first) continue;  // these rows are done: later ones have later keys
      first_row = smaller(first_row, row);
      if (keys.begin >= smaller(next, keys.end) || keys.end <= begin) {
        clear_states(unit, slot, row, end);
        continue;
      }
      chunk.is_streamed = is_streamed && row == first_row;
      if (!is_streamed) ahead.prefetch(unit, row, end);
      attend_tile_of<V, tile_rows>(end - row, unit, chunk, row, slot);
    }
    merge_subtrees<V>(unit, c, first, first_row, unit.num_rows);
  }

  for (int64_t row = 0, end; row < unit.num_rows; row = end) {
    end = tile_end<V>(unit, row);
    const Range own = intersection(chunks_of(keys_of_rows(unit, row, end)), chunks);
    if (chunks.begin < chunks.end) {
      merge_rest<V>(unit, greater(own.end, first + 1) - 1, first, row, end);
    } else {
      copy_queries<V>(unit, row, end);
      clear_states(unit, 0, row, end);
    }
  }
}

// The parts of a unit's keys come together in the last one that is done: the same tree, over parts instead of chunks.
template <class V>
inline bool join_parts(const Unit &unit, int64_t index, int64_t part) {
  const KeyParts &parts = unit.call.parts;
  const int64_t floats = unit.l(0, unit.num_rows) - unit.o(0, 0);
  float *const states = parts.states + index * parts.count * parts.state_stride;
  __builtin_memcpy(states + part * parts.state_stride, unit.o(0, 0), static_cast<size_t>(floats) * sizeof(float));
  if (__atomic_sub_fetch(&parts.unfinished[index], 1, __ATOMIC_ACQ_REL) != 0) return false;
  for (int64_t p = 0; p < parts.count; ++p) {
    __builtin_memcpy(unit.o(slots_before(p, 0), 0), states + p * parts.state_stride, static_cast<size_t>(floats) * sizeof(float));
    merge_subtrees<V>(unit, p, 0, 0, unit.num_rows);
  }
  merge_rest<V>(unit, parts.count - 1, 0, 0, unit.num_rows);
  return true;
}

template <class V>
void attend(const Attention &call, int64_t sequence_index, int64_t kv_head, int64_t block, int64_t part, float *scratch) {
  const Sequence &sequence = call.sequences[sequence_index];
  const int64_t query_begin = block * call.block_queries, queries = smaller(call.block_queries, sequence.n_q - query_begin);
  if (queries <= 0) return;
  const int64_t group = call.num_heads == call.num_kv_heads ? 1 : call.num_heads / call.num_kv_heads;
  const Unit unit = {call, sequence, sequence_index, kv_head, query_begin, group, queries * group, scratch};
  const Range chunks = chunks_of(keys_of_rows(unit, 0, unit.num_rows));
  if (call.parts.count == 1) {
    attend_chunks<V>(unit, chunks);
  } else {
    attend_chunks<V>(unit, intersection(chunks, {part * call.parts.chunks, (part + 1) * call.parts.chunks}));
    const int64_t blocks = quotient(call.n_q + call.block_queries - 1, call.block_queries);
    if (!join_parts<V>(unit, (sequence_index * call.num_kv_heads + kv_head) * blocks + block, part)) return;
  }
  for (Row row = unit.row(0); row.index < unit.num_rows; unit.advance(&row)) finish<V>(unit, row);
  inspect<V>(unit);
}

}  // namespace
}  // namespace mha
