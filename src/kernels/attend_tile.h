// What a tile of queries makes of a chunk of keys: its state (m, l, o).
#pragma once

#include "kernels/context.h"

namespace mha {
namespace {

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

// Those of a streamed unit likewise, but of fewer bits 1 or 4; of floats also wide ones.
template <class V>
MHA_INLINE void attend_streamed_tile(int64_t rows, const Unit &unit, Chunk &chunk, int64_t row, int64_t slot) {
  if constexpr (V::size > 1) {
    const bool are_floats = has_floats(unit.call);
    if constexpr (has_wide_tiles<V>) {
      if (rows == unit.num_rows && rows > 6) return attend_tile<V, wide_tile_rows, Asks::alone>(unit, chunk, row, slot);
      if (rows == unit.num_rows && rows > 4) return attend_tile<V, 6, Asks::alone>(unit, chunk, row, slot);
    }
    if (rows < unit.num_rows && are_floats) return attend_tile_of<V, TileShape<V::size>::attend_rows>(rows, unit, chunk, row, slot);
    if (rows == 1) return attend_tile<V, 1, Asks::alone>(unit, chunk, row, slot);
    if (rows < unit.num_rows || (is_small_code && !are_floats)) return attend_tile<V, 4, Asks::shared>(unit, chunk, row, slot);
    if (rows == 2 && are_floats) return attend_tile<V, 2, Asks::alone>(unit, chunk, row, slot);
    attend_tile<V, 4, Asks::alone>(unit, chunk, row, slot);
  }
}

}  // namespace
}  // namespace mha
