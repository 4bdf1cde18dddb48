// What a tile makes of a chunk of keys: its states (m, l, o). A tile is some rows of a unit; one row may take several chunks in step.
//
// In order: products of the queries with the keys, scores, softmax, context. Storage types, the number of rows and what is fetched
// meanwhile are parameters of the loops in scores.h and context.h, and nothing here depends on them.
#pragma once

#include "kernels/context.h"

namespace mha {
namespace {

// Rows [begin, begin + count) of a unit.
struct TileRows {
  int64_t begin, count;
};

MHA_INLINE void find_attending(const Unit &unit, int64_t chunk_begin, const TileRows &rows, Attending *keys) {
  Row at = unit.row(rows.begin);
  for (int64_t r = 0; r < rows.count; ++r, unit.advance(&at)) {
    const Range range = unit.keys_of(at);
    keys->begins[r] = min(chunk_keys, max(0, range.begin - chunk_begin));
    keys->ends[r] = min(chunk_keys, max(0, range.end - chunk_begin));
  }
  // Later rows have later keys.
  const int64_t last = rows.count - 1;
  keys->some = {keys->begins[0], max(keys->begins[0], keys->ends[last])};
  keys->shared = {keys->begins[last], keys->ends[0]};
  if (keys->shared.begin >= keys->shared.end) keys->shared = {keys->some.end, keys->some.end};
}

// The states of the rows over each of `count` chunks, in slots from `slot` on.
template <class V>
MHA_NOINLINE void attend_tile(const Unit &unit, const Chunk *chunks, int64_t count, const TileRows &rows, int64_t slot,
                           const PrefetchSource &ahead_of_keys, const PrefetchSource &ahead_of_values) {
  const Attention &call = unit.call;
  const int64_t width = call.head_dim_v_padded;
  float *const scores = unit.scratch + call.scratch.scores;
  uint8_t *const excluded = reinterpret_cast<uint8_t *>(unit.scratch + call.scratch.excluded);

  // 1. Products. In a tile with more rows than there are, the last one stands in for those that are missing.
  Attending keys[max_interleaved_chunks];
  KeyBlocks blocks;
  for (int64_t c = 0; c < count; ++c) {
    find_attending(unit, chunks[c].begin, rows, &keys[c]);
    blocks.add(chunks[c].keys, groups_of(keys[c].some), scores + c * rows.count * score_stride);
  }
  const bool prefetches = ahead_of_keys.groups || ahead_of_values.groups;
  multiply_keys(blocks, chunks[0].keys, groups_of(keys[0].some), loops_over_keys<V>(rows.count, chunks[0].keys.storage, prefetches),
                unit.q(rows.begin), rows.count, call.head_dim, rows.count == 1 && call.tuning->interleaves_keys, ahead_of_keys);

  // 2. Scores, their maximum, and p = exp(score - maximum), whose sum is l.
  const uint8_t *excluded_of[max_attend_rows];
  bool excludes_some = false;
  for (int64_t c = 0; c < count; ++c) {
    const Range groups = groups_of(keys[c].some);
    for (int64_t r = 0; r < rows.count; ++r) {
      const int64_t n = c * rows.count + r;
      const Range own = {keys[c].begins[r], keys[c].ends[r]};
      float *const row = scores + n * score_stride, *const m = unit.m(slot + c, rows.begin + r);
      excluded_of[n] = nullptr;
      if (score_row<V>(call, chunks[c].keys, groups, own, row, m)) {
        find_excluded(own, row, excluded + n * chunk_keys);
        excluded_of[n] = excluded + n * chunk_keys;
        excludes_some = true;
      }
      *unit.l(slot + c, rows.begin + r) = softmax<V>(row + groups.begin * key_block, groups.end - groups.begin, *m);
      if (chunks[c].values.has_scales) scale_by_values<V>(chunks[c].values, groups.begin, groups.end, row);
    }
  }

  // 3. Context: the keys before those that all rows attend to, these, and those behind them.
  if (excludes_some) {
    for (int64_t c = 0; c < count; ++c) keys[c].shared = {keys[c].some.end, keys[c].some.end};
  }
  const auto p_of = [&](int64_t c) MHA_INLINED { return scores + c * rows.count * score_stride; };
  for (int64_t c = 0; c < count; ++c) {
    const Attending &own = keys[c];
    if (own.some.begin == own.shared.begin && own.shared.begin < own.shared.end) continue;
    float *const o = unit.o(slot + c, rows.begin);
    for (int64_t i = 0; i < rows.count * width; i += V::size) store(o + i, all<V>(0.0f));
    add_masked_values<V>(chunks[c].values, width, {own.some.begin, own.shared.begin}, p_of(c), rows.count, own,
                         excluded_of + c * rows.count, o);
  }
  const Loops loops = loops_over_values<V>(rows.count, chunks[0].values.storage, prefetches || count > 1);
  for (int64_t c = 0; c < count; ++c) {
    const Range shared = keys[c].shared;
    PrefetchSource ahead = ahead_of_values;
    if (c + 1 < count) ahead = {&chunks[c + 1].values, groups_of(keys[c + 1].some), 0, group_bytes_of(call.v)};
    add_values(chunks[c].values, width, shared, loops, p_of(c), unit.o(slot + c, rows.begin), shared.begin > keys[c].some.begin, ahead);
  }
  for (int64_t c = 0; c < count; ++c) {
    const Attending &own = keys[c];
    if (own.shared.end >= own.some.end) continue;
    add_masked_values<V>(chunks[c].values, width, {own.shared.end, own.some.end}, p_of(c), rows.count, own, excluded_of + c * rows.count,
                         unit.o(slot + c, rows.begin));
  }
}

}  // namespace
}  // namespace mha
