// Choosing keys (CONTRACT.md, section 17), in two passes: score_keys computes index scores for the
// queries of a unit, chunk of keys by chunk of keys, and choose_greatest then finds the greatest
// scores of one query.
//
// Index heads share one key head, so that a unit is one of the attention: products come from
// multiply_keys, and add_heads adds up those of all heads of a query.
#pragma once

#include "inspect.h"

namespace mha {
namespace {

// ---- Index scores

// The memory for the scores of a query.
MHA_INLINE float *scores_of(const KeyChoice &choice, const Unit &unit, const Row &row) {
  const int64_t number = (&unit.sequence - unit.call.run.sequences) * choice.longest_q + row.query;
  return choice.scores + (number - choice.first_query) * choice.score_stride;
}

// Adds w * relu(score) to the scores of the queries, for products of some rows with some tiles of
// keys. Head 0 of a query comes first and starts the sum.
MHA_NOINLINE inline void add_heads(const KeyChoice &choice, const Unit &unit, const Chunk &chunk,
                                   Range tiles, const TileRows &rows, const float *products) {
  const Vector scale = all(unit.call.request.scale), zero = all(0.0f);
  const bool has_scales = chunk.keys.has_scales;
  Row row = unit.row(rows.begin);
  for (int64_t r = 0; r < rows.count; ++r, unit.advance(&row), products += score_stride) {
    const int64_t weights = unit.sequence_index * choice.weights_batch_stride +
                            unit.array_row(row) * choice.weights_row_stride;
    const Vector weight = all(choice.weights[weights + row.head]);
    float *const sums = scores_of(choice, unit, row) + chunk.begin;
    for (int64_t key = tiles.begin * tile_keys; key < tiles.end * tile_keys; key += Vector::size) {
      Vector s = load(products + key);
      if (has_scales) s = s * load(chunk.keys.scales[key_tile_of(key)] + lane_of(key));
      s = s * scale;
      store(sums + key, mul_add(weight, value_if_less(s, zero, zero, s),
                                row.head == 0 ? zero : load(sums + key)));
    }
  }
}

// The kernels' `score_keys`.
inline void score_keys(const KeyChoice &choice, int64_t sequence_index, int64_t block, int64_t part,
                       float *scratch) {
  const Attention &call = *choice.attention;
  const Unit unit = unit_of(call, sequence_index, 0, block, scratch);
  if (unit.num_rows == 0) return;
  const Range keys = keys_of_rows(unit, 0, unit.num_rows);
  const Range chunks =
      intersection(chunks_of(keys), {part * choice.part_chunks, (part + 1) * choice.part_chunks});
  float *const products = scratch + call.plan.scratch.scores;
  if (chunks.begin < chunks.end) copy_queries<Vector>(unit, 0, unit.num_rows);
  for (int64_t c = chunks.begin; c < chunks.end; ++c) {
    const int64_t begin = c * chunk_keys;
    const Range here = intersection(keys, {begin, begin + chunk_keys}),
                needed = {here.begin - begin, here.end - begin};
    const Range tiles = tiles_of(needed);
    Chunk chunk;
    chunk.begin = begin;
    chunk.needed = needed;
    read_tiles<Vector>(unit, true, begin, needed, false, &chunk.keys);
    KeyTileList list;
    list.add(chunk.keys, tiles, products);
    for (int64_t row = 0; row < unit.num_rows; row += Shape::attend_rows) {
      const TileRows rows = {row, min(unit.num_rows - row, Shape::attend_rows)};
      multiply_keys<Vector>(unit, chunk, list, tiles,
                            key_loops<Vector>(unit, rows.count, chunk.keys.storage, false),
                            unit.q(row), rows.count, false, no_prefetch_source);
      add_heads(choice, unit, chunk, tiles, rows, products);
    }
  }
}

// ---- The choice

// Numbers as integers of the same order. (-0 comes before +0, and is found to be as great where
// they are compared.)
MHA_INLINE uint32_t order_of(float x) {
  const uint32_t bits = bits_of(x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
MHA_INLINE float number_of(uint32_t order) {
  return float_of(order >> 31 ? order & 0x7fffffffu : ~order);
}

// How many of the scores, which are no NaN, are `least` or more. begin and end are multiples of 16.
MHA_NOINLINE inline int64_t count_from(const float *scores, int64_t begin, int64_t end,
                                       float least) {
  constexpr int vectors = tile_keys / Vector::size;
  constexpr int64_t at_once = int64_t{1} << 20;  // what a float counts exactly
  const Vector limit = all(least), zero = all(0.0f), one = all(1.0f);
  int64_t count = 0;
  for (int64_t first = begin; first < end; first += at_once) {
    Vector counts[vectors];
    MHA_EACH(i, vectors) counts[i] = zero;
    for (int64_t j = first; j < min(end, first + at_once); j += tile_keys) {
      MHA_EACH(i, vectors) {
        counts[i] =
            counts[i] + value_if_less(load(scores + j + i * Vector::size), limit, zero, one);
      }
    }
    count += static_cast<int64_t>(sum16(counts));
  }
  return count;
}

// The kernels' `choose_greatest`. It finds the least score that is chosen by halving the range of
// floats that it can be in, in at most 32 steps, each of which counts the scores from the middle
// on. Floats are compared as integers that have the same order.
inline void choose_greatest(const KeyChoice &choice, int64_t sequence_index, int64_t query) {
  const Attention &call = *choice.attention;
  const Unit unit = unit_of(call, call.run.sequences[sequence_index], 0, query, 1,
                            call.request.num_heads, nullptr);
  const Row row = unit.row(0);
  const Range keys = keys_of_rows(unit, 0, 1);
  if (query >= unit.sequence.n_q || keys.begin >= keys.end) return;
  // The scores as an output, before they are changed.
  float *const scores = scores_of(choice, unit, row);
  const int64_t at = unit.sequence_index * call.request.n_q + unit.array_row(row);
  write_pairs(choice.index_scores, at * call.run.pair_columns + unit.sequence.column + keys.begin,
              scores + keys.begin, keys.end - keys.begin);

  // NaN and what lies before or after the keys count as -infinity.
  const Range tiles = tiles_of(keys);
  const Vector none = all(-infinity);
  for (int64_t j = tiles.begin * tile_keys; j < tiles.end * tile_keys; j += Vector::size) {
    const Vector x = first_lanes(value_if_nan(load(scores + j), none), keys.end - j, none);
    store(scores + j, first_lanes(none, keys.begin - j, x));
  }
  // At least as many scores as are wanted are not less than `low`; fewer, `above`, are not less
  // than `high`.
  uint32_t low = order_of(-infinity), high = order_of(infinity) + 1;
  int64_t above = 0;
  while (choice.num_chosen < keys.end - keys.begin && high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    const int64_t count =
        count_from(scores, tiles.begin * tile_keys, tiles.end * tile_keys, number_of(middle));
    if (count >= choice.num_chosen) {
      low = middle;
    } else {
      high = middle;
      above = count;
    }
    if (count == choice.num_chosen) break;  // also all that are equal to the least
  }
  // All scores above the least one are chosen, and of those equal to it the first ones.
  const float least = number_of(low);
  int64_t ties = choice.num_chosen - above;  // how many of the least score are chosen
  int32_t *to = choice.chosen + at * choice.num_chosen;
  for (int64_t j = keys.begin; j < keys.end; ++j) {
    if (scores[j] > least || (scores[j] == least && ties-- > 0)) *to++ = static_cast<int32_t>(j);
  }
}

}  // namespace
}  // namespace mha
