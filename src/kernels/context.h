// Values times the exps of scores: the context of a tile, and of a row.
#pragma once

#include "kernels/scores.h"

namespace mha {
namespace {

// o[r] = sum of p[r][j] * values[j] over the keys that all rows have and those behind them, for C vectors of columns; or adds it to what
// is there. Of R rows of a tile, `first_row` being the first.
template <class V, int R, int C, class Element, Asks asks, int first_row = 0>
MHA_INLINE void context_columns(const Unit &unit, Chunk &chunk, const float *p, const Attending &keys, int64_t column, float *o) {
  const int64_t width = unit.call.head_dim_v_padded;
  p += first_row * score_stride;
  o += first_row * width;
  V acc[R][C];
  clear(acc);
  if (keys.shared.begin != keys.some.begin) {
    MHA_UNROLL for (int r = 0; r < R; ++r) {
      MHA_UNROLL for (int i = 0; i < C; ++i) acc[r][i] = load<V>(o + r * width + column + i * static_cast<int64_t>(V::size));
    }
    put_out_of_order<Element, C>(acc);
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
  put_in_order<Element, C>(acc);
  // No row is multiplied with a value that it does not attend to.
  for (int64_t j = keys.shared.end; j < keys.some.end; ++j) {
    const Element *const value = static_cast<const Element *>(chunk.values.at[block_of(j)]) + place_in_block(j) * width + column;
    V of_row[C];
    MHA_UNROLL for (int i = 0; i < C; ++i) of_row[i] = load<V>(value + i * static_cast<int>(V::size));
    MHA_UNROLL for (int r = first_row == 0 ? 1 : 0; r < R; ++r) {
      if (j >= keys.ends[first_row + r]) continue;
      const V multiplier = all<V>(p[r * score_stride + j]);
      MHA_UNROLL for (int i = 0; i < C; ++i) acc[r][i] = mul_add(multiplier, of_row[i], acc[r][i]);
    }
  }
  MHA_UNROLL for (int r = 0; r < R; ++r) {
    MHA_UNROLL for (int i = 0; i < C; ++i) store(o + r * width + column + i * static_cast<int64_t>(V::size), acc[r][i]);
  }
}

// Rows of packed values are a multiple of 16 columns: no fewer vectors are left over.
template <class V>
constexpr int least_vectors = static_cast<int>(greater(1, key_block / V::size));

// From `column` on to the end, C vectors at a time, then fewer.
template <class V, int R, int C, class Element, Asks asks>
MHA_INLINE void context(const Unit &unit, Chunk &chunk, const float *p, const Attending &keys, int64_t column, float *o) {
  for (; column + C * static_cast<int64_t>(V::size) <= unit.call.head_dim_v_padded; column += C * static_cast<int64_t>(V::size)) {
    constexpr int at_once = rows_in_loop<R>;
    context_columns<V, at_once, C, Element, asks>(unit, chunk, p, keys, column, o);
    if constexpr (R > at_once) context_columns<V, at_once, C, Element, Asks::nothing, at_once>(unit, chunk, p, keys, column, o);
  }
  constexpr int fewer = C <= 4 && (asks == Asks::alone || sizeof(Element) < 4) ? least_vectors<V> : C / 2;
  if constexpr (C > least_vectors<V>) context<V, R, fewer, Element, asks>(unit, chunk, p, keys, column, o);
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
  if constexpr (C > least_vectors<V>) row_context_columns<V, least_vectors<V>, Element>(values, width, p, keys, excluded, column, o);
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

}  // namespace
}  // namespace mha
