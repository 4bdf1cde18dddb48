// Context of a tile: p, the exps of scores, times the values of a chunk.
#pragma once

#include "scores.h"

namespace mha {
namespace {

// o[r] = p[r][j] * value j over `keys`.
MHA_NOINLINE inline void add_values(const Groups &values, int64_t width, Range keys, const Loops &loops, const float *p, float *o,
                                    const PrefetchSource &ahead) {
  const int64_t columns = loops.wide.columns;
  const int64_t element = bytes_of(values.storage);
  Tile tile;
  tile.column_stride = values.row_stride;
  tile.sums_stride = width;
  tile.chain = chunk_keys;
  for (int64_t j = keys.begin, end; j < keys.end; j = end) {
    const int64_t group = block_of(j);
    end = min(values.run_end[group], keys.end);
    const bool is_ahead = ahead.has(group) && width >= columns;
    if (is_ahead) end = min(end, ahead.groups->run_end[group]);
    // In a tile with more rows than there are, the last ones are nobody's.
    for (int64_t r = 0; r < loops.wide.rows; ++r) tile.rows[r] = p + r * score_stride + j;
    tile.columns[0] = static_cast<const char *>(values.at[group]) + place_in_block(j) * values.row_stride * element;
    tile.sums[0] = o;
    tile.terms = end - j;
    tile.mode = j > keys.begin ? Sums::extend : Sums::replace;
    const int64_t ahead_bytes = ahead.bytes * (block_of(end + key_block - 1) - group);
    tile.prefetch = no_prefetch(p);
    if (is_ahead) {
      const char *const first = ahead.at(group) + ahead.share * ahead_bytes;
      tile.prefetch = prefetch_stretch(first, ahead_bytes, loops.wide, tile.terms, width / columns);
    } else if (values.are_rows) {
      const int64_t row_bytes = values.row_stride * element;
      const char *const later = static_cast<const char *>(tile.columns[0]) + key_block * row_bytes;
      tile.prefetch = prefetch_columns(later, row_bytes, columns * element, loops.wide, tile.terms);
    }
    run_over_columns(loops, width, &tile, element);
  }
}

// The same for one row and some of its columns, with `count` keys alone.
template <class V, int columns, class Element>
MHA_INLINE void add_columns_of_keys(const Groups &values, int64_t first, const int32_t *keys, int64_t count, const float *p, float *o) {
  constexpr int vectors = columns / static_cast<int>(V::size);
  V sums[vectors];
  MHA_UNROLL for (int i = 0; i < vectors; ++i) sums[i] = all<V>(0.0f);
  for (int64_t n = 0; n < count; ++n) {
    const int64_t j = keys[n];
    const Element *const value = static_cast<const Element *>(values.at[block_of(j)]) + place_in_block(j) * values.row_stride + first;
    const V multiplier = all<V>(p[j]);
    MHA_UNROLL for (int i = 0; i < vectors; ++i) {
      sums[i] = mul_add(multiplier, load<V>(value + i * static_cast<int>(V::size)), sums[i]);
    }
  }
  MHA_UNROLL for (int i = 0; i < vectors; ++i) store(o + first + i * static_cast<int>(V::size), sums[i]);
}

// Floats have columns enough at once for the additions to hide how long each takes. Other types do without, for they would take long code.
template <class V>
MHA_NOINLINE void add_values_of_keys(const Groups &values, int64_t width, const int32_t *keys, int64_t count, const float *p, float *o) {
  visit_storage(values.storage, [&](auto stored) MHA_INLINED {
    using Element = typename decltype(stored)::Element;
    int64_t c = 0;
    if constexpr (sizeof(Element) == sizeof(float) && V::size >= 8) {
      constexpr int wide = 64;
      for (; c + wide <= width; c += wide) add_columns_of_keys<V, wide, Element>(values, c, keys, count, p, o);
    }
    for (; c < width; c += key_block) add_columns_of_keys<V, key_block, Element>(values, c, keys, count, p, o);
  });
}

// Whether a number of o, of so many, is NaN or infinite.
template <class V>
MHA_NOINLINE bool has_other_than_finite(const float *o, int64_t count) {
  constexpr int64_t at_once = V::size;
  const V zero = all<V>(0.0f);
  V zeros_or_nan = zero;
  int64_t i = 0;
  for (; i + at_once <= count; i += at_once) zeros_or_nan = zeros_or_nan + load<V>(o + i) * zero;
  if (i < count) zeros_or_nan = zeros_or_nan + first_lanes(load<V>(o + i), count - i, zero) * zero;
  alignas(64) float lanes[V::size];
  store(lanes, zeros_or_nan);
  float sum = 0.0f;
  for (const float lane : lanes) sum += lane;
  return sum != 0.0f;  // NaN is not 0
}

// Values of int8 have their scales multiplied to p.
template <class V>
MHA_NOINLINE void scale_by_values(const Groups &values, int64_t block, int64_t end, float *p) {
  for (int64_t key = block * key_block; key < end * key_block; key += V::size) {
    store(p + key, load<V>(p + key) * load<V>(values.scales[block_of(key)] + place_in_block(key)));
  }
}

}  // namespace
}  // namespace mha
