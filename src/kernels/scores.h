// Of a tile of queries and a chunk of keys: products -> scale -> mask -> scores, and their max, exp and sum.
#pragma once

#include "kernels/functions.h"
#include "kernels/key_values.h"

namespace mha {
namespace {

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
  multiply<R, B *(key_block / V::size), key_block / V::size, V, score_block>(q, head_dim, blocks, sums, score_stride, take, ahead);
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
  constexpr int at_once = rows_in_loop<R>, B = asks_nearby<V, R, Element, asks> ? 2 : TileShape<V::size>::score_blocks(at_once);
  static_assert(R < attend_tile_rows_max || B == 1, "there is room behind the last row");
  RowPointers<at_once> q, later_q;  // of a wide tile's first and last rows; of another the same ones
  MHA_UNROLL for (int r = 0; r < at_once; ++r) {
    q.row[r] = unit.q(unit.tile_row(row, r));
    later_q.row[r] = unit.q(unit.tile_row(row, R - at_once + r));
  }
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
      multiply_keys<V, at_once, B, Element>(chunk.keys, block, end - 1, q, head_dim, to, Product<V>{to},
                                            chunk.template ahead_of_keys<V, at_once, B, Element, asks>(block, end, head_dim));
      if constexpr (R > at_once) {
        float *const later = to + at_once * score_stride;
        multiply_keys<V, at_once, B, Element>(chunk.keys, block, end - 1, later_q, head_dim, later, Product<V>{later});
      }
    }
  }
  score_products<V>(chunk.keys, first, end, keys, R, unit.call.scale, scores, m, least);
}

// ---- Softmax

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

}  // namespace
}  // namespace mha
