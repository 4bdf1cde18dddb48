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

// Whether p of one of the keys, times the scale of its value, leaves open whether the key takes part: 0, NaN or infinite.
MHA_NOINLINE inline bool has_unclear(Range keys, const float *p) {
  const auto is_unclear = [&](int64_t j) MHA_INLINED { return (bits_of(p[j]) & 0x7fffffffu) - 1u >= 0x7f7fffffu; };
  int64_t j = keys.begin;
  for (; j + key_block <= keys.end; j += key_block) {
    uint32_t some = 0;
    for (int64_t i = 0; i < key_block; ++i) some |= is_unclear(j + i);
    if (some != 0) return true;
  }
  while (j < keys.end && !is_unclear(j)) ++j;
  return j < keys.end;
}

// Computes o over a chunk again, without the values of keys that take no part, for those rows of a tile in which such a value may have left
// a NaN. A row whose sum l is NaN has NaN throughout o in any case. p has replaced the scores, so they are computed again.
template <class V>
MHA_NOINLINE void leave_out_values(const Unit &unit, const Chunk &chunk, const Attending &keys, const TileRows &rows, int64_t slot,
                                   float *scores) {
  const Attention &call = unit.call;
  const Range groups = groups_of(keys.some);
  alignas(64) float p[max_attend_rows * score_stride];
  bool is_unclear[max_attend_rows], is_any_unclear = false;
  for (int64_t r = 0; r < rows.count; ++r) {
    const float l = *unit.l(slot, rows.begin + r);
    is_unclear[r] = l == l && has_unclear(keys.some, scores + r * score_stride) &&
                    has_other_than_finite<V>(unit.o(slot, rows.begin + r), call.head_dim_v);
    is_any_unclear |= is_unclear[r];
  }
  if (!is_any_unclear) return;
  MHA_MEMCPY(p, scores, static_cast<size_t>(rows.count * score_stride) * sizeof(float));
  KeyBlocks blocks;
  blocks.add(chunk.keys, groups, scores);
  multiply_keys<V>(unit, chunk, blocks, groups, loops_over_keys<V>(rows.count, chunk.keys.storage, false), unit.q(rows.begin), rows.count,
                   false, no_prefetch_source);
  for (int64_t r = 0; r < rows.count; ++r) {
    if (!is_unclear[r]) continue;
    float *const row = scores + r * score_stride;
    const Range own = keys.of_row[r];
    const float factor = score_row<V>(unit, rows.begin + r, chunk, groups, own, row);
    int32_t taking_part[chunk_keys];
    int64_t count = 0;
    for (int64_t j = own.begin; j < own.end; ++j) {
      taking_part[count] = static_cast<int32_t>(j);
      count += row[j] * factor != -infinity;
    }
    if (count == keys.some.end - keys.some.begin) continue;
    add_values_of_keys<V>(chunk.values, call.head_dim_v_padded, taking_part, count, p + r * score_stride, unit.o(slot, rows.begin + r));
  }
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
    leave_out_values<V>(unit, chunks[c], keys[c], rows, slot + c, scores_of(c));
  }
}

}  // namespace
}  // namespace mha
