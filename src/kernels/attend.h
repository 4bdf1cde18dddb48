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
      rotate<V>(unit.call.rotate_q, unit.sequence_index, unit.array_row(row), unit.position_of(row), to);
      from = to;
    }
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

// ---- Scores

// What becomes of the products: scores, and beside them the greatest and the least of each row, which cost little while they are in a
// register. Vector i of a row belongs to the keys from first + i * V::size on.
template <class V, int R>
struct Score {
  float *scores;  // [R][score_stride], of the whole chunk
  float scale;
  int64_t first;
  V greatest[R], least[R];

  MHA_INLINE Score(float *to, float factor) : scores(to), scale(factor), first(0) {
    MHA_UNROLL for (int r = 0; r < R; ++r) {
      greatest[r] = all<V>(-infinity);
      least[r] = all<V>(infinity);
    }
  }
  MHA_INLINE void operator()(V dot, int r, int i) {
    const V score = dot * all<V>(scale);
    greatest[r] = greater_of(score, greatest[r]);
    least[r] = less_of(score, least[r]);
    store(scores + r * score_stride + first + i * static_cast<int>(V::size), score);
  }
};

// Products that become scores later, of blocks of keys: block number 0, `apart`, 2 * apart, ...
template <class V>
struct Product {
  float *products;
  int64_t apart = 1;
  MHA_INLINE void operator()(V dot, int r, int i) const {
    constexpr int of_block = key_block / V::size;
    store(products + r * score_stride + i / of_block * apart * key_block + i % of_block * static_cast<int>(V::size), dot);
  }
};

// Which keys of the chunk take part in which rows of a tile: row r has those in [begins[r], ends[r]) but for those excluded. All rows have
// those in `shared`; none has one outside of `some`.
struct Attending {
  int64_t begins[attend_tile_rows_max], ends[attend_tile_rows_max];
  Range some, shared;
};

// Makes scores of the rows' products with the blocks [block, end): -infinity where a row has no key. m[r] is the greatest yet of row r,
// and least[r] becomes -infinity if a score of one of its keys is.
template <class V>
MHA_APART void score_products(const Groups &groups, int64_t block, int64_t end, const Attending &keys, int64_t rows, float scale,
                              float *products, float *m, float *least) {
  const V none = all<V>(-infinity), no_limit = all<V>(infinity);
  for (int64_t r = 0; r < rows; ++r) {
    float *const row = products + r * score_stride;
    const int64_t row_begin = keys.begins[r], row_end = keys.ends[r];
    V greatest_yet = none, least_yet = no_limit;
    for (int64_t key = block * key_block; key < end * key_block; key += V::size) {
      V dot = load<V>(row + key);
      if (groups.has_scales) dot = dot * load<V>(groups.scales[block_of(key)] + place_in_block(key));
      const V score = dot * all<V>(scale);
      V known = score, finite = score;
      if (key + static_cast<int64_t>(V::size) > row_end) {
        known = first_lanes(score, row_end - key, none);
        finite = first_lanes(score, row_end - key, no_limit);
      }
      if (key < row_begin) {
        known = first_lanes(none, row_begin - key, known);
        finite = first_lanes(no_limit, row_begin - key, finite);
      }
      greatest_yet = greater_of(known, greatest_yet);
      least_yet = less_of(finite, least_yet);
      store(row + key, known);
    }
    m[r] = greater_of(Scalar{greatest(greatest_yet)}, Scalar{m[r]}).x;
    if (has_negative_infinity(least_yet)) least[r] = -infinity;
  }
}

// take(dot(q[r], key j), r, i) for the keys of blocks block, block + apart, ..., B of them, of which those behind `last` are that one once
// more. `sums` has room for the products.
template <class V, int R, int B, class Element, class Take, class Ahead = NoPrefetch>
MHA_INLINE void multiply_keys(const Groups &keys, int64_t block, int64_t last, RowPointers<R> q, int64_t head_dim, float *sums, Take &&take,
                              Ahead ahead = {}, int64_t apart = 1) {
  Blocks<Element, B, key_block> blocks;
  MHA_UNROLL for (int i = 0; i < B; ++i) blocks.block[i] = static_cast<const Element *>(keys.at[smaller(last, block + i * apart)]);
  multiply<R, B *(key_block / V::size), key_block / V::size, V>(q, head_dim, blocks, sums, score_stride, take, ahead);
}

// The products of the blocks from `block` on, B at once where there are so many; returns the block behind them.
template <class V, int R, int B>
MHA_INLINE int64_t multiply_some_keys(const Groups &keys, int64_t block, int64_t end, RowPointers<R> q, int64_t head_dim, float *products) {
  if (end - block >= B) {
    float *const to = products + block * key_block;
    multiply_keys<V, R, B, float>(keys, block, end - 1, q, head_dim, to, Product<V>{to});
    return block + B;
  }
  if constexpr (B > 1) return multiply_some_keys<V, R, (B > 4 ? 4 : B - 1)>(keys, block, end, q, head_dim, products);
  return block;
}

// m[r] and least[r] of each row, which begin as -infinity and infinity.
template <class V, int R>
MHA_INLINE void score_keys(const Unit &unit, Chunk &chunk, int64_t row, const Attending &keys, float *scores, float *m, float *least) {
  constexpr int B = TileShape<V::size>::score_blocks(R);
  const Groups &groups = chunk.keys;
  RowPointers<R> q;
  MHA_UNROLL for (int r = 0; r < R; ++r) q.row[r] = unit.q(unit.tile_row(row, r));
  const int64_t head_dim = unit.call.head_dim, first = block_of(keys.some.begin), end = block_of(keys.some.end + key_block - 1);
  // Blocks whose scores are made by the way: all rows have all their keys, and these no scales.
  const int64_t shared = groups.has_scales ? end : block_of(keys.shared.begin + key_block - 1), shared_end = block_of(keys.shared.end);
  Score<V, R> score(scores, unit.call.scale);
  for (int64_t block = first, next; block < end; block = next) {
    if (block >= shared && block + B <= shared_end) {
      next = block + B;
      score.first = block * key_block;
      multiply_keys<V, R, B, float>(groups, block, next - 1, q, head_dim, scores + block * key_block, score,
                                    chunk.template ahead_of_keys<V, R, B, float, Asks::shared>(block, end, head_dim));
      continue;
    }
    next = multiply_some_keys<V, R, B>(groups, block, block < shared && shared < end ? shared : end, q, head_dim, scores);
    score_products<V>(groups, block, next, keys, R, unit.call.scale, scores, m, least);
  }
  MHA_UNROLL for (int r = 0; r < R; ++r) {
    m[r] = greater_of(Scalar{greatest(score.greatest[r])}, Scalar{m[r]}).x;
    if (has_negative_infinity(score.least[r])) least[r] = -infinity;
  }
}

// The same for a streamed unit. Blocks behind the last one may run into the next row's room, not as far as its first one is.
template <class V, int R, class Element, Asks asks>
MHA_INLINE void score_streamed_keys(const Unit &unit, Chunk &chunk, int64_t row, const Attending &keys, float *scores, float *m,
                                    float *least) {
  static_assert(R < attend_tile_rows_max, "there is room behind the last row");
  constexpr int B = asks_nearby<V, R, Element, asks> ? 2 : TileShape<V::size>::score_blocks(R);
  RowPointers<R> q;
  MHA_UNROLL for (int r = 0; r < R; ++r) q.row[r] = unit.q(unit.tile_row(row, r));
  const int64_t head_dim = unit.call.head_dim, first = block_of(keys.some.begin), end = block_of(keys.some.end + key_block - 1);
  if constexpr (reads_side_by_side<V, R, Element, asks>) {
    // Sums lie behind the row: in its place they would run over products that are done. Products behind the last block may run into
    // them, when they are no longer needed.
    const int64_t apart = (end - first + B - 1) / B;
    for (int64_t block = first; block < first + apart; ++block) {
      multiply_keys<V, R, B, Element>(chunk.keys, block, end - 1, q, head_dim, scores + R * score_stride,
                                      Product<V>{scores + block * key_block, apart}, NoPrefetch{}, apart);
    }
  } else {
    for (int64_t block = first; block < end; block += B) {
      float *const to = scores + block * key_block;
      multiply_keys<V, R, B, Element>(chunk.keys, block, end - 1, q, head_dim, to, Product<V>{to},
                                      chunk.template ahead_of_keys<V, R, B, Element, asks>(block, end, head_dim));
    }
  }
  score_products<V>(chunk.keys, first, end, keys, R, unit.call.scale, scores, m, least);
}

// p = exp(score - m) of blocks side by side, and their sums; a block's worth of vectors for each of `rows` rows and `blocks` blocks, as
// many of these vectors at a time as the registers have room for.
template <class V, int rows, int blocks>
MHA_INLINE void exp_of_blocks(float *s, const V (&maximum)[rows], V (&partial_sums)[rows][key_block / V::size]) {
  constexpr int vectors = key_block / V::size, of_row = vectors * blocks, count = rows * of_row;
  constexpr int at_once = static_cast<int>(smaller(count, TileShape<V::size>::exp_vectors));
  static_assert(count % at_once == 0, "no vector is left over");
  MHA_UNROLL for (int first = 0; first < count; first += at_once) {
    const auto at = [&](int i) { return s + i / of_row * score_stride + i % of_row * static_cast<int>(V::size); };
    V p[at_once];
    MHA_UNROLL for (int i = 0; i < at_once; ++i) p[i] = load<V>(at(first + i)) - maximum[(first + i) / of_row];
    exp_of(p);
    MHA_UNROLL for (int i = 0; i < at_once; ++i) {
      store(at(first + i), p[i]);
      V &sum = partial_sums[(first + i) / of_row][(first + i) % vectors];
      sum = sum + p[i];
    }
  }
}

// The exps of some rows and a block of keys take about as long as so many steps of the loops that ask the memory for what comes next.
constexpr int softmax_steps = 2;

// Turns scores[r][0, 16 * blocks) of `rows` rows into p = exp(score - m), and gives l of each, and asks for a share of `stream`. So many
// rows, or blocks, side by side as make use of the processor: an exp is a long chain of operations.
template <class V, int rows>
MHA_APART void softmax_rows(float *scores, int64_t blocks, const float *m, float *l, Stream &stream) {
  constexpr int at_once = TileShape<V::size>::softmax_rows;
  constexpr int blocks_at_once = rows == 1 && V::size > 1 ? greater(1, at_once * static_cast<int>(V::size) / key_block + 1) : 1;
  const bool asks = stream.rate != 0;
  V maximum[rows], partial_sums[rows][key_block / V::size];
  MHA_UNROLL for (int r = 0; r < rows; ++r) {
    // Without a score above -infinity any finite number will do: exp gives 0 for the keys left out, and NaN for a NaN.
    maximum[r] = all<V>(m[r] == -infinity ? 0.0f : m[r]);
  }
  clear(partial_sums);
  float *s = scores, *const end = scores + blocks * key_block;
  for (; s + blocks_at_once * key_block <= end; s += blocks_at_once * key_block) {
    for (int i = 0; asks && i < softmax_steps; ++i) SharedAhead<V>{stream}.step(i);
    exp_of_blocks<V, rows, blocks_at_once>(s, maximum, partial_sums);
  }
  if constexpr (blocks_at_once > 1) {
    for (; s < end; s += key_block) exp_of_blocks<V, rows, 1>(s, maximum, partial_sums);
  }
  MHA_UNROLL for (int r = 0; r < rows; ++r) l[r] = sum16(partial_sums[r]);
}

template <class V, int R>
MHA_INLINE void softmax(float *scores, int64_t blocks, const float *m, float *l, Stream &stream) {
  constexpr int most = TileShape<V::size>::softmax_rows, rows = R % most == 0 ? most : R < most ? R : R % 2 == 0 ? smaller(2, most) : 1;
  for (int r = 0; r < R; r += rows) softmax_rows<V, rows>(scores + r * score_stride, blocks, m + r, l + r, stream);
}

// ---- Context of a tile

// o[r] = sum of p[r][j] * values[j] over the keys that all rows have and those behind them, for C vectors of columns; or adds it to what
// is there.
template <class V, int R, int C, class Element, Asks asks>
MHA_INLINE void context_columns(const Unit &unit, Chunk &chunk, const float *p, const Attending &keys, int64_t column, float *o) {
  const int64_t width = unit.call.head_dim_v_padded;
  V acc[R][C];
  clear(acc);
  if (keys.shared.begin != keys.some.begin) {
    MHA_UNROLL for (int r = 0; r < R; ++r) {
      MHA_UNROLL for (int i = 0; i < C; ++i) acc[r][i] = load<V>(o + r * width + column + i * static_cast<int64_t>(V::size));
    }
  }
  constexpr int columns = C * static_cast<int>(V::size);
  for (int64_t j = keys.shared.begin, end; j < keys.shared.end; j = end) {
    const int64_t group = block_of(j);
    const ColumnsOf<Element> values = {static_cast<const Element *>(chunk.values.at[group]) + place_in_block(j) * width + column, width, 0};
    end = smaller(chunk.values.run_end[group], keys.shared.end);
    if constexpr (asks_nearby<V, R, Element, asks>) {
      if (columns == width) {  // whole values, one after the other
        end = smaller(end, (group + 1) * key_block);
        const auto ahead = chunk.template values_nearby<Element, columns>(j, block_of(keys.some.end + key_block - 1));
        accumulate<R, C, C>(EvenRows<score_stride>{p}, values, j, end, acc, ahead);
        continue;
      }
    }
    end = smaller(end, chunk.template asks_until<asks>(group) * key_block);
    const int64_t groups = block_of(end + key_block - 1) - group;
    const auto ahead = chunk.template ahead_of_values<V, R, C, Element, asks>(group, groups, column, width);
    accumulate<R, C, C>(EvenRows<score_stride>{p}, values, j, end, acc, ahead);
  }
  // No row is multiplied with a value that it does not attend to.
  for (int64_t j = keys.shared.end; j < keys.some.end; ++j) {
    const Element *const value = static_cast<const Element *>(chunk.values.at[block_of(j)]) + place_in_block(j) * width + column;
    V of_row[C];
    MHA_UNROLL for (int i = 0; i < C; ++i) of_row[i] = load<V>(value + i * static_cast<int>(V::size));
    MHA_UNROLL for (int r = 1; r < R; ++r) {
      if (j >= keys.ends[r]) continue;
      const V multiplier = all<V>(p[r * score_stride + j]);
      MHA_UNROLL for (int i = 0; i < C; ++i) acc[r][i] = mul_add(multiplier, of_row[i], acc[r][i]);
    }
  }
  MHA_UNROLL for (int r = 0; r < R; ++r) {
    MHA_UNROLL for (int i = 0; i < C; ++i) store(o + r * width + column + i * static_cast<int64_t>(V::size), acc[r][i]);
  }
}

// From `column` on to the end, C vectors at a time, then fewer.
template <class V, int R, int C, class Element, Asks asks>
MHA_INLINE void context(const Unit &unit, Chunk &chunk, const float *p, const Attending &keys, int64_t column, float *o) {
  for (; column + C * static_cast<int64_t>(V::size) <= unit.call.head_dim_v_padded; column += C * static_cast<int64_t>(V::size)) {
    context_columns<V, R, C, Element, asks>(unit, chunk, p, keys, column, o);
  }
  constexpr int fewer = C <= 4 && (asks == Asks::alone || sizeof(Element) < 4) ? 1 : C / 2;
  if constexpr (C > 1) context<V, R, fewer, Element, asks>(unit, chunk, p, keys, column, o);
}

// The same for one row and any keys but those excluded.
template <class V, int C, class Element>
MHA_INLINE void row_context_columns(const Groups &values, int64_t width, const float *p, Range keys, const uint8_t *excluded,
                                    int64_t column, float *o) {
  for (; column + C * static_cast<int64_t>(V::size) <= width; column += C * static_cast<int64_t>(V::size)) {
    V acc[C];
    MHA_UNROLL for (int i = 0; i < C; ++i) acc[i] = all<V>(0.0f);
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      if (excluded && excluded[j]) continue;
      const Element *const value = static_cast<const Element *>(values.at[block_of(j)]) + place_in_block(j) * width + column;
      MHA_UNROLL for (int i = 0; i < C; ++i) { acc[i] = mul_add(all<V>(p[j]), load<V>(value + i * static_cast<int64_t>(V::size)), acc[i]); }
    }
    MHA_UNROLL for (int i = 0; i < C; ++i) store(o + column + i * static_cast<int64_t>(V::size), acc[i]);
  }
  if constexpr (C > 1) row_context_columns<V, 1, Element>(values, width, p, keys, excluded, column, o);
}

template <class V>
MHA_APART void row_context(const Groups &values, int64_t width, const float *p, Range keys, const uint8_t *excluded, float *o) {
  visit_storage(values.storage, [&](auto stored) {
    row_context_columns<V, 4, typename decltype(stored)::Element>(values, width, p, keys, excluded, 0, o);
  });
}

// Values of int8 have their scales multiplied to p.
template <class V>
MHA_APART void scale_by_values(const Groups &values, int64_t block, int64_t end, float *p) {
  for (int64_t key = block * key_block; key < end * key_block; key += V::size) {
    store(p + key, load<V>(p + key) * load<V>(values.scales[block_of(key)] + place_in_block(key)));
  }
}

// ---- One chunk for one tile

// visit_storage, but of some tiles there are those for floats only: more would be more code than use.
template <int R, Asks asks, class Visit>
MHA_INLINE void visit_storage_of_tile(Storage storage, Visit visit) {
  constexpr bool has_all = R == 4 ? asks == Asks::shared || !is_small_code : R == 1 && asks == Asks::alone;
  if constexpr (has_all)
    visit_storage(storage, visit);
  else
    visit(Stored<float>{});
}

template <int R>
MHA_INLINE void find_attending(const Unit &unit, int64_t chunk_begin, int64_t row, Attending *keys) {
  Row at = unit.row(row);
  MHA_UNROLL for (int r = 0; r < R; ++r) {
    const Range range = unit.keys_of(at);
    keys->begins[r] = smaller(chunk_keys, greater(0, range.begin - chunk_begin));
    keys->ends[r] = smaller(chunk_keys, greater(0, range.end - chunk_begin));
    if (at.index + 1 < unit.num_rows) unit.advance(&at);
  }
  // Later rows have later keys.
  keys->some = {keys->begins[0], keys->ends[R - 1]};
  keys->shared = {keys->begins[R - 1], keys->ends[0]};
  if (keys->shared.begin >= keys->shared.end) keys->shared = {keys->some.end, keys->some.end};
}

// The keys of a row whose scores are -infinity take no part.
MHA_APART inline void find_excluded(Range keys, const float *scores, uint8_t *excluded) {
  for (int64_t j = keys.begin; j < keys.end; ++j) excluded[j] = scores[j] == -infinity;
}

template <class V, int R, Asks asks>
inline void attend_tile(const Unit &unit, Chunk &chunk, int64_t row, int64_t slot) {
  const Attention &call = unit.call;
  Attending keys;
  find_attending<R>(unit, chunk.begin, row, &keys);

  float *const scores = unit.scratch + call.scratch.scores;
  float m[R], l[R], least[R];
  MHA_UNROLL for (int r = 0; r < R; ++r) {
    m[r] = -infinity;
    least[r] = infinity;
  }
  visit_storage_of_tile<R, asks>(chunk.keys.storage, [&](auto stored) MHA_INLINED {
    using Element = typename decltype(stored)::Element;
    if constexpr (asks == Asks::shared && sizeof(Element) == sizeof(float)) {
      score_keys<V, R>(unit, chunk, row, keys, scores, m, least);
    } else {
      score_streamed_keys<V, R, Element, asks>(unit, chunk, row, keys, scores, m, least);
    }
  });
  uint8_t *const excluded = reinterpret_cast<uint8_t *>(unit.scratch + call.scratch.excluded);
  bool excludes[R];
  for (int r = 0; r < R; ++r) {
    excludes[r] = least[r] == -infinity;
    if (!excludes[r]) continue;
    find_excluded({keys.begins[r], keys.ends[r]}, scores + r * score_stride, excluded + r * chunk_keys);
    keys.shared = {keys.some.end, keys.some.end};
  }

  const int64_t first_block = block_of(keys.some.begin), end_block = block_of(keys.some.end + key_block - 1);
  softmax<V, R>(scores + first_block * key_block, end_block - first_block, m, l, chunk.value_stream);
  for (int r = 0; r < R; ++r) {
    *unit.m(slot, row + r) = m[r];
    *unit.l(slot, row + r) = l[r];
    if (chunk.values.has_scales) scale_by_values<V>(chunk.values, first_block, end_block, scores + r * score_stride);
  }

  // First the keys before those that all rows have, row by row.
  float *const o = unit.o(slot, row);
  for (int r = 0; r < R && keys.shared.begin != keys.some.begin; ++r) {
    row_context<V>(chunk.values, call.head_dim_v_padded, scores + r * score_stride,
                   {keys.begins[r], smaller(keys.ends[r], keys.shared.begin)}, excludes[r] ? excluded + r * chunk_keys : nullptr,
                   o + r * call.head_dim_v_padded);
  }
  if (keys.shared.begin == keys.shared.end) return;
  constexpr int C = TileShape<V::size>::context_vectors(R);
  visit_storage_of_tile<R, asks>(chunk.values.storage, [&](auto stored) MHA_INLINED {
    context<V, R, C, typename decltype(stored)::Element, asks>(unit, chunk, scores, keys, 0, o);
  });
}

// Tiles have 1, 2, 4 or 6 rows.
template <class V, int R>
MHA_INLINE void attend_tile_of(int64_t rows, const Unit &unit, Chunk &chunk, int64_t row, int64_t slot) {
  constexpr int fewer = R > 2 ? R - 2 : 1;
  if constexpr (R > 1) {
    if (rows <= fewer) return attend_tile_of<V, fewer>(rows, unit, chunk, row, slot);
  }
  attend_tile<V, R, Asks::shared>(unit, chunk, row, slot);
}

// Those of a streamed unit likewise, but of fewer bits 1 or 4.
template <class V>
MHA_INLINE void attend_streamed_tile(int64_t rows, const Unit &unit, Chunk &chunk, int64_t row, int64_t slot) {
  if constexpr (V::size > 1) {
    const bool are_floats = has_floats(unit.call);
    if (rows < unit.num_rows && are_floats) return attend_tile_of<V, TileShape<V::size>::attend_rows>(rows, unit, chunk, row, slot);
    if (rows == 1) return attend_tile<V, 1, Asks::alone>(unit, chunk, row, slot);
    if (rows < unit.num_rows || (is_small_code && !are_floats)) return attend_tile<V, 4, Asks::shared>(unit, chunk, row, slot);
    if (rows == 2 && are_floats) return attend_tile<V, 2, Asks::alone>(unit, chunk, row, slot);
    attend_tile<V, 4, Asks::alone>(unit, chunk, row, slot);
  }
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
  if (call.lse) call.lse[unit.output_row(row)] = is_empty ? -infinity : canonical(*unit.m(0, row.index) + log_of(l));
}

// ---- Looking inside: a second pass over the keys for those who asked, when m and l of the whole row are known

template <class V>
inline void inspect_row(const Unit &unit, const Row &row, int64_t begin, int64_t count, float *s) {
  const Attention &call = unit.call;
  const int64_t at = unit.output_row(row) * call.n_kv + unit.sequence.column + begin;
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
  const int64_t at = unit.output_row(row) * call.n_kv;
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
    read_keys<V>(unit, begin, {0, count}, false, &keys);
    for (Row row = unit.row(0); row.index < unit.num_rows; unit.advance(&row)) {
      const RowPointers<1> q = {{unit.q(row.index)}};
      for (int64_t j = 0; j < count; j += key_block) {
        multiply_keys<V, 1, 1, float>(keys, block_of(j), block_of(j), q, call.head_dim, scores + j, [&](V dot, int, int i) {
          const int64_t lane = i * static_cast<int>(V::size);
          if (keys.has_scales) dot = dot * load<V>(keys.scales[block_of(j)] + lane);
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

// The unit of the next kv head, or of the next sequence: it may have no rows.
MHA_INLINE Unit unit_after(const Unit &unit) {
  const Attention &call = unit.call;
  if (unit.kv_head + 1 < call.num_kv_heads) {
    return {call, unit.sequence, unit.sequence_index, unit.kv_head + 1, unit.query_begin, unit.group, unit.num_rows, unit.scratch};
  }
  const int64_t next = smaller(unit.sequence_index + 1, call.batch - 1), queries = call.sequences[next].n_q - unit.query_begin;
  const int64_t rows = next == unit.sequence_index ? 0 : greater(0, smaller(queries, call.block_queries)) * unit.group;
  return {call, call.sequences[next], next, 0, unit.query_begin, unit.group, rows, unit.scratch};
}

// The keys of its first chunk.
MHA_INLINE Range first_keys(const Unit &unit) {
  if (unit.num_rows == 0 || unit.call.parts.count > 1) return {0, 0};
  const Range keys = keys_of_rows(unit, 0, unit.num_rows);
  return intersection(keys, {keys.begin, keys.begin / chunk_keys * chunk_keys + chunk_keys});
}

template <class V>
MHA_INLINE int64_t rows_of_tile(const Unit &unit) {
  return is_streamed<V>(unit) ? streamed_tile_rows(unit) : TileShape<V::size>::attend_rows;
}

// Where the tile ends that begins at `row`.
template <class V>
MHA_INLINE int64_t tile_end(const Unit &unit, int64_t row) {
  return smaller(unit.num_rows, row + rows_of_tile<V>(unit));
}

// What the unit's tiles ask for while they compute with the chunk, of which they need so many keys. Tiles of 4 and of 6 rows take as many
// keys and columns at a time, and the softmax twice for some of their rows.
template <class V>
MHA_INLINE void share_asking(const Unit &unit, const NextChunk &next, int64_t keys, Chunk *chunk) {
  using Shape = TileShape<V::size>;
  constexpr int64_t keys_at_once = Shape::score_blocks(Shape::attend_rows) * key_block;
  constexpr int64_t columns_at_once = Shape::context_vectors(Shape::attend_rows) * static_cast<int>(V::size);
  const int64_t tile_rows = rows_of_tile<V>(unit), tiles = (unit.num_rows + tile_rows - 1) / tile_rows;
  const int64_t key_steps = (keys + keys_at_once - 1) / keys_at_once * unit.call.head_dim;
  const int64_t value_steps = (unit.call.head_dim_v_padded + columns_at_once - 1) / columns_at_once * keys;
  next.stream(tiles, key_steps, value_steps + softmax_steps * 2 * keys / key_block, chunk);
}

// The states of all rows over the keys of `chunks`, in slot 0. all_keys: those of all chunks.
template <class V>
inline void attend_chunks(const Unit &unit, Range all_keys, Range chunks) {
  constexpr int tile_rows = TileShape<V::size>::attend_rows;
  static_assert(tile_rows <= attend_tile_rows_max, "scratch has room for a tile");
  const auto keys_of_tile = [&](int64_t row, int64_t end) { return end - row == unit.num_rows ? all_keys : keys_of_rows(unit, row, end); };
  const int64_t first = chunks.begin;
  const bool streams = is_streamed<V>(unit);
  const Unit next_unit = streams ? unit_after(unit) : unit;
  const Range keys_of_next = streams ? first_keys(next_unit) : Range{0, 0};
  for (int64_t c = chunks.begin; c < chunks.end; ++c) {
    const int64_t begin = c * chunk_keys, next = begin + chunk_keys;
    const Range here = intersection(all_keys, {begin, next}), needed = {here.begin - begin, here.end - begin};
    Chunk chunk;
    chunk.begin = begin;
    read_keys<V>(unit, begin, needed, streams, &chunk.keys);
    read_values<V>(unit, begin, needed, streams, &chunk.values);
    const bool is_last = c + 1 == chunks.end;
    const NextChunk ahead(is_last ? next_unit : unit, is_last ? keys_of_next : intersection(all_keys, {next, next + chunk_keys}));
    if (streams || !ahead.is_empty()) share_asking<V>(unit, ahead, needed.end - needed.begin, &chunk);
    const int64_t slot = slots_before(c, first);
    int64_t first_row = unit.num_rows;
    for (int64_t row = 0, end; row < unit.num_rows; row = end) {
      end = tile_end<V>(unit, row);
      if (c == first) {
        copy_queries<V>(unit, row, end);
        prefetch_queries(unit, end, smaller(end + tile_rows, unit.num_rows));
      }
      const Range keys = keys_of_tile(row, end);
      if (keys.end <= begin && c > first) continue;  // these rows are done: later ones have later keys
      first_row = smaller(first_row, row);
      if (keys.begin >= smaller(next, keys.end) || keys.end <= begin) {
        clear_states(unit, slot, row, end);
        continue;
      }
      if (streams) {
        attend_streamed_tile<V>(end - row, unit, chunk, row, slot);
      } else {
        attend_tile_of<V, tile_rows>(end - row, unit, chunk, row, slot);
      }
    }
    merge_subtrees<V>(unit, c, first, first_row, unit.num_rows);
  }

  for (int64_t row = 0, end; row < unit.num_rows; row = end) {
    end = tile_end<V>(unit, row);
    const Range own = intersection(chunks_of(keys_of_tile(row, end)), chunks);
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
  const Range keys = keys_of_rows(unit, 0, unit.num_rows), chunks = chunks_of(keys);
  if (call.parts.count == 1) {
    attend_chunks<V>(unit, keys, chunks);
  } else {
    attend_chunks<V>(unit, keys, intersection(chunks, {part * call.parts.chunks, (part + 1) * call.parts.chunks}));
    const int64_t blocks = quotient(call.n_q + call.block_queries - 1, call.block_queries);
    if (!join_parts<V>(unit, (sequence_index * call.num_kv_heads + kv_head) * blocks + block, part)) return;
  }
  for (Row row = unit.row(0); row.index < unit.num_rows; unit.advance(&row)) finish<V>(unit, row);
  inspect<V>(unit);
}

}  // namespace
}  // namespace mha
