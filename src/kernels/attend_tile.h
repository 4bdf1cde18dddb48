// What a tile makes of a chunk of keys: its states (m, l, o). A tile is some rows of a unit; one row may take several chunks in step.
//
// In order: products of the queries with the keys, scores, softmax, context. Storage types, the number of rows and what is fetched
// meanwhile are parameters of the loops in scores.h and context.h, and nothing here depends on them.
#pragma once

#include "context.h"

namespace mha {
namespace {

// Rows [begin, begin + count) of a unit.
struct TileRows {
  int64_t begin, count;
};

// Of the keys `needed` of a chunk, those that each row attends to.
MHA_INLINE void find_attending(const Unit &unit, int64_t chunk_begin, Range needed, const TileRows &rows, Attending *keys) {
  Row at = unit.row(rows.begin);
  for (int64_t r = 0; r < rows.count; ++r, unit.advance(&at)) {
    const Range range = unit.keys_of(at);
    keys->of_row[r] = {min(needed.end, max(needed.begin, range.begin - chunk_begin)),
                       min(needed.end, max(needed.begin, range.end - chunk_begin))};
  }
  // Later rows have later keys.
  const int64_t begin = keys->of_row[0].begin;
  keys->some = {begin, max(begin, keys->of_row[rows.count - 1].end)};
}

// The state of row number `row` of the unit over a chunk, where a number of a key that takes no part may not be touched, and not even be
// multiplied by 0.
template <class V>
MHA_NOINLINE void attend_row_by_keys(const Unit &unit, const Chunk &chunk, Range keys, int64_t row, int64_t slot, float *scores) {
  const Attention &call = unit.call;
  const Range groups = groups_of(keys);
  multiply_row<V>(unit, chunk, groups, row, scores);
  const float factor = score_row<V>(unit, row, chunk, groups, keys, scores);
  bool takes_part[chunk_keys];
  for (int64_t j = keys.begin; j < keys.end; ++j) takes_part[j] = scores[j] * factor != -infinity;
  float m, l;
  softmax<V>(groups, &keys, factor, 1, scores, &m, &l);
  if (chunk.values.has_scales) scale_by_values<V>(chunk.values, groups.begin, groups.end, scores);
  add_values_taking_part<V>(chunk.values, call.head_dim_v_padded, keys, takes_part, scores, unit.o(slot, row));
}

// The states of the rows over each of `count` chunks, in slots from `slot` on. needed: keys of the first chunk and those behind it.
//
// Each row is multiplied with the values of all keys that some row attends to. p is 0 where a key takes no part in the row, which changes
// nothing but the sign of a zero, which the finished row does not show, unless the value is not finite: then rows are computed once more.
template <class V>
MHA_NOINLINE void attend_tile(const Unit &unit, const Chunk *chunks, int64_t count, Range needed, const TileRows &rows, int64_t slot,
                              const PrefetchSource &ahead_of_keys, const PrefetchSource &ahead_of_values) {
  const Attention &call = unit.call;
  const int64_t width = call.head_dim_v_padded;
  float *const scores = unit.scratch + call.scratch.scores;
  const auto scores_of = [&](int64_t c) MHA_INLINED { return scores + c * rows.count * score_stride; };

  // 1. Products. In a tile with more rows than there are, the last one stands in for those that are missing.
  Attending keys[max_interleaved_chunks];
  KeyBlocks blocks;
  for (int64_t c = 0; c < count; ++c) {
    const int64_t before = c * chunk_keys;
    find_attending(unit, chunks[c].begin, {max(0, needed.begin - before), min(chunk_keys, needed.end - before)}, rows, &keys[c]);
    blocks.add(chunks[c].keys, groups_of(keys[c].some), scores_of(c));
  }
  const bool prefetches = ahead_of_keys.groups || ahead_of_values.groups;
  multiply_keys<V>(unit, chunks[0], blocks, groups_of(keys[0].some), loops_over_keys<V>(rows.count, chunks[0].keys.storage, prefetches),
                   unit.q(rows.begin), rows.count, rows.count == 1 && call.k.is_packed, ahead_of_keys);

  // 2. Scores, their maximum, and p = exp(score - maximum), whose sum is l.
  for (int64_t c = 0; c < count; ++c) {
    const Range groups = groups_of(keys[c].some);
    float factor = 1.0f;
    for (int64_t r = 0; r < rows.count; ++r) {
      factor = score_row<V>(unit, rows.begin + r, chunks[c], groups, keys[c].of_row[r], scores_of(c) + r * score_stride);
    }
    softmax<V>(groups, keys[c].of_row, factor, rows.count, scores_of(c), unit.m(slot + c, rows.begin), unit.l(slot + c, rows.begin));
    for (int64_t r = 0; chunks[c].values.has_scales && r < rows.count; ++r) {
      scale_by_values<V>(chunks[c].values, groups.begin, groups.end, scores_of(c) + r * score_stride);
    }
  }

  // 3. Context.
  const Loops loops = loops_over_values<V>(rows.count, chunks[0].values.storage, prefetches || count > 1 || chunks[0].values.are_rows);
  for (int64_t c = 0; c < count; ++c) {
    PrefetchSource ahead = ahead_of_values;
    if (c + 1 < count) ahead = {&chunks[c + 1].values, groups_of(keys[c + 1].some), 0, group_bytes_of(call.v)};
    float *const o = unit.o(slot + c, rows.begin);
    add_values(chunks[c].values, width, keys[c].some, loops, scores_of(c), o, ahead);
    // A value that is not finite shows in the first row, too: 0 times it is NaN. (Behind head_dim_v is what a cache held before.)
    if (!has_other_than_finite<V>(o, call.head_dim_v)) continue;
    for (int64_t r = 0; r < rows.count; ++r) {
      attend_row_by_keys<V>(unit, chunks[c], keys[c].of_row[r], rows.begin + r, slot + c, scores_of(c) + r * score_stride);
    }
  }
}

}  // namespace
}  // namespace mha
