// What one or two rows make of two or four neighbouring chunks, to all of whose keys they attend: the states of each.
//
// Values add up in the order of the keys, so that those of one chunk are one stream. Where streams are read, rows go through the chunks in
// step, a few keys of each, and ask the memory for nothing. (Measured on Zen 3. Two in step beside one at a time, which asks for the next:
// one row, 0.84 to 0.96 of the time from the memory, 0.67 to 0.99 from the caches; two rows, 0.77 to 0.97, in one shape of seven 1.04, and
// 0.62 to 0.99. Four beside two, from the memory: one row, float 0.96 to 0.98, 16-bit numbers 0.85 to 0.98; two rows, 0.92 to 1.02. With
// int8, which waits less for the memory, two in step take up to a sixth longer than one at a time.)
#pragma once

#include "kernels/attend_tile.h"
#include "kernels/states.h"

namespace mha {
namespace {

template <class V>
constexpr bool reads_in_step = has_long_kernels_for_streams<V>;

// Whether this is for the unit, of which some chunks may still come alone. (Measured: with several chunks, these too take up to a twentieth
// less time if they ask for nothing.)
template <class V>
MHA_INLINE bool is_in_step(const Unit &unit, Range chunks) {
  const bool has_int8 = unit.call.k.storage == Storage::int8 || unit.call.v.storage == Storage::int8;
  return reads_in_step<V> && is_streamed<V>(unit) && unit.num_rows <= 2 && !has_int8 && chunks.end - chunks.begin > 1;
}

// The chunks [begin, end) that come in step, in twos and fours that begin at a multiple of 2 and of 4: all rows attend to all their keys.
MHA_INLINE Range chunks_in_step(const Unit &unit, Range chunks) {
  const Range keys = {unit.keys_of(unit.row(unit.num_rows - 1)).begin, unit.keys_of(unit.row(0)).end};
  const int64_t begin = greater(chunks.begin, (keys.begin + chunk_keys - 1) / chunk_keys), end = smaller(chunks.end, keys.end / chunk_keys);
  return {(begin + 1) / 2 * 2, end / 2 * 2};
}
MHA_INLINE int64_t count_in_step(Range in_step, int64_t c) {
  return c % most_chunks_in_step == 0 && in_step.end - c >= most_chunks_in_step ? most_chunks_in_step : 2;
}

// Calls visit(Stored<the type of an element>{}), but not of int8.
template <class Visit>
MHA_INLINE void visit_storage_in_step(Storage storage, Visit visit) {
  visit_storage(storage, [&](auto stored) MHA_INLINED {
    if constexpr (sizeof(typename decltype(stored)::Element) > 1) visit(stored);
  });
}

// products[i][r][key] of chunk i and row r: as many chunks and parts of them side by side as there are registers for.
template <class V, int R, int N, class Element>
MHA_INLINE void multiply_keys_in_step(const Unit &unit, const Chunk *chunks, float *products, float *sums) {
  constexpr int of_block = key_block / V::size, at_once = R == 1 ? N : 2, parts = R == 1 ? 4 / N : 1;
  constexpr int64_t blocks_of_part = chunk_groups / parts;
  RowPointers<R> q;
  MHA_UNROLL for (int r = 0; r < R; ++r) q.row[r] = unit.q(r);
  for (int first = 0; first < N; first += at_once) {
    for (int64_t block = 0; block < blocks_of_part; ++block) {
      Blocks<Element, at_once * parts, key_block> blocks;
      MHA_UNROLL for (int i = 0; i < at_once * parts; ++i) {
        const Groups &keys = chunks[first + i / parts].keys;
        blocks.block[i] = static_cast<const Element *>(keys.at[block + i % parts * blocks_of_part]);
      }
      const auto take = [&](V dot, int r, int i) MHA_INLINED {
        const int part = i / of_block;
        float *const to = products + ((first + part / parts) * R + r) * score_stride + (block + part % parts * blocks_of_part) * key_block;
        store(to + i % of_block * static_cast<int>(V::size), dot);
      };
      multiply<R, at_once * parts * of_block, of_block, V, score_block>(q, unit.call.head_dim, blocks, sums, score_stride, take);
    }
  }
}

constexpr int keys_in_step = 2;

// o[r] += p[r][j] * values[j] over these keys, for the columns from `column` on: C vectors at a time, then fewer.
template <class V, int R, int C, class Element>
MHA_INLINE void add_values(const Element *values, int64_t width, const float *p, int64_t column, float *o) {
  constexpr int64_t columns = C * static_cast<int>(V::size);
  for (; column + columns <= width; column += columns) {
    add_in_memory<V, R, C>(EvenRows<score_stride>{p}, ColumnsOf<Element>{values + column, width, 0}, 0, keys_in_step, o + column, width,
                           NoPrefetch{});
  }
  if constexpr (C > least_vectors<V>) add_values<V, R, C / 2>(values, width, p, column, o);
}

// o[i][r] = sum of p[i][r][j] * values[j] of chunk i.
template <class V, int R, int N, class Element>
MHA_INLINE void context_in_step(const Chunk (&chunks)[N], int64_t width, const float *p, float *const (&o)[N]) {
  for (int i = 0; i < N; ++i) {
    for (int64_t c = 0; c < R * width; c += V::size) store(o[i] + c, all<V>(0.0f));
  }
  for (int64_t key = 0; key < chunk_keys; key += keys_in_step) {
    MHA_UNROLL for (int i = 0; i < N; ++i) {
      const Element *const values = static_cast<const Element *>(chunks[i].values.at[block_of(key)]) + place_in_block(key) * width;
      add_values<V, R, TileShape<V::size>::context_vectors(R)>(values, width, p + i * R * score_stride + key, 0, o[i]);
    }
  }
  for (int i = 0; i < N; ++i) put_in_order<V, Element, 2>(o[i], R * width);
}

// N chunks from c on, in slots from `slot` on, of a unit of R rows.
template <class V, int R, int N>
MHA_APART void attend_chunks_in_step(const Unit &unit, int64_t c, int64_t slot) {
  static_assert(N <= most_chunks_in_step && N * R <= attend_tile_rows_max && R <= spare_score_rows, "scratch has room for them");
  const Attention &call = unit.call;
  const int64_t width = call.head_dim_v_padded;
  constexpr Range all_keys = {0, chunk_keys};
  Attending keys;
  Chunk chunks[N];
  for (int i = 0; i < N; ++i) {
    read_keys<V>(unit, (c + i) * chunk_keys, all_keys, true, &chunks[i].keys);
    read_values<V>(unit, (c + i) * chunk_keys, all_keys, true, &chunks[i].values);
  }
  for (int r = 0; r < R; ++r) {
    keys.begins[r] = all_keys.begin;
    keys.ends[r] = all_keys.end;
  }

  float *const scores = unit.scratch + call.scratch.scores;
  visit_storage_in_step(call.k.storage, [&](auto stored) MHA_INLINED {
    multiply_keys_in_step<V, R, N, typename decltype(stored)::Element>(unit, chunks, scores, scores + N * R * score_stride);
  });
  uint8_t *const excluded = reinterpret_cast<uint8_t *>(unit.scratch + call.scratch.excluded);
  bool excludes[N * R], excludes_any = false;
  float *o[N];
  for (int i = 0; i < N; ++i) {
    float m[R], least[R];
    for (int r = 0; r < R; ++r) {
      m[r] = -infinity;
      least[r] = infinity;
    }
    score_products<V>(chunks[i].keys, 0, chunk_groups, keys, R, call.scale, scores + i * R * score_stride, m, least);
    for (int r = 0; r < R; ++r) {
      const int n = i * R + r;
      excludes[n] = least[r] == -infinity;
      excludes_any |= excludes[n];
      if (excludes[n]) find_excluded(all_keys, scores + n * score_stride, excluded + n * chunk_keys);
      Stream asks_for_nothing;
      softmax_rows<V, 1>(scores + n * score_stride, chunk_groups, m + r, unit.l(slot + i, r), asks_for_nothing);
      *unit.m(slot + i, r) = m[r];
    }
    o[i] = unit.o(slot + i, 0);
  }

  for (int n = 0; excludes_any && n < N * R; ++n) {
    row_context<V>(chunks[n / R].values, width, scores + n * score_stride, all_keys, excludes[n] ? excluded + n * chunk_keys : nullptr,
                   o[n / R] + n % R * width);
  }
  if (excludes_any) return;
  visit_storage_in_step(call.v.storage, [&](auto stored) MHA_INLINED {
    context_in_step<V, R, N, typename decltype(stored)::Element>(chunks, width, scores, o);
  });
}

template <class V, int N>
MHA_INLINE void attend_rows_in_step(const Unit &unit, int64_t c, int64_t slot) {
  if (unit.num_rows == 1) {
    attend_chunks_in_step<V, 1, N>(unit, c, slot);
  } else {
    attend_chunks_in_step<V, 2, N>(unit, c, slot);
  }
}

// `count` chunks from c on become one subtree, when chunk `first` was the first.
template <class V>
MHA_INLINE void attend_in_step(const Unit &unit, int64_t c, int64_t count, int64_t first) {
  const int64_t slot = slots_before(c, first);
  if (count == most_chunks_in_step) {
    attend_rows_in_step<V, most_chunks_in_step>(unit, c, slot);
  } else {
    attend_rows_in_step<V, 2>(unit, c, slot);
  }
  merge_chunks<V>(unit, c, count, first);
}

}  // namespace
}  // namespace mha
