// What a row makes of two neighbouring chunks, to all of whose keys it attends: the states of both.
//
// Values add up in the order of the keys, so that those of one chunk are one stream. Where streams are read, a row goes through two chunks
// in step, a few keys of one and a few of the other, and asks the memory for nothing. (Measured on Zen 3 beside one chunk after the other,
// each of which asks for the next: 0.84 to 0.96 of the time from the memory, 0.67 to 0.99 from the caches. With int8, which waits less for
// the memory, it takes up to a sixth longer.)
#pragma once

#include "kernels/attend_tile.h"

namespace mha {
namespace {

template <class V>
constexpr bool has_pairs = reads_streams<V> && !is_small_code;

// Calls visit(Stored<the type of an element>{}), but not of int8.
template <class Visit>
MHA_INLINE void visit_storage_of_pair(Storage storage, Visit visit) {
  visit_storage(storage, [&](auto stored) MHA_INLINED {
    if constexpr (sizeof(typename decltype(stored)::Element) > 1) visit(stored);
  });
}

template <class V>
MHA_INLINE bool takes_pairs(const Unit &unit) {
  return is_streamed<V>(unit) && unit.num_rows == 1 && unit.call.k.storage != Storage::int8 && unit.call.v.storage != Storage::int8;
}

// products[i][key] of chunk i: two parts of each chunk side by side.
template <class V, class Element>
MHA_INLINE void multiply_keys_of_pair(const Unit &unit, const Chunk (&chunks)[2], float *products) {
  constexpr int of_block = key_block / V::size, parts = 2;
  constexpr int64_t blocks_of_part = chunk_groups / parts;
  const RowPointers<1> q = {{unit.q(0)}};
  for (int64_t block = 0; block < blocks_of_part; ++block) {
    Blocks<Element, 2 * parts, key_block> blocks;
    MHA_UNROLL for (int i = 0; i < 2 * parts; ++i) {
      blocks.block[i] = static_cast<const Element *>(chunks[i / parts].keys.at[block + i % parts * blocks_of_part]);
    }
    const auto take = [&](V dot, int, int i) MHA_INLINED {
      const int part = i / of_block;
      float *const to = products + part / parts * score_stride + (block + part % parts * blocks_of_part) * key_block;
      store(to + i % of_block * static_cast<int>(V::size), dot);
    };
    multiply<1, 2 * parts * of_block, of_block, V>(q, unit.call.head_dim, blocks, products + 2 * score_stride, score_stride, take);
  }
}

constexpr int keys_in_step = 2;

// o += p[j] * values[j] over these keys, for the columns from `column` on: C vectors at a time, then fewer.
template <class V, int C, class Element>
MHA_INLINE void add_values(const Element *values, int64_t width, const float *p, int64_t column, float *o) {
  constexpr int64_t lanes = V::size;
  for (; column + C * lanes <= width; column += C * lanes) {
    V acc[1][C];
    MHA_UNROLL for (int i = 0; i < C; ++i) acc[0][i] = load<V>(o + column + i * lanes);
    accumulate<1, C, C>(EvenRows<score_stride>{p}, ColumnsOf<Element>{values + column, width, 0}, 0, keys_in_step, acc, NoPrefetch{});
    MHA_UNROLL for (int i = 0; i < C; ++i) store(o + column + i * lanes, acc[0][i]);
  }
  if constexpr (C > least_vectors<V>) add_values<V, C / 2>(values, width, p, column, o);
}

// o[i] = sum of p[i][j] * values[j] of chunk i.
template <class V, class Element>
MHA_INLINE void context_of_pair(const Chunk (&chunks)[2], int64_t width, const float *p, float *const (&o)[2]) {
  for (int i = 0; i < 2; ++i) {
    for (int64_t c = 0; c < width; c += V::size) store(o[i] + c, all<V>(0.0f));
  }
  for (int64_t key = 0; key < chunk_keys; key += keys_in_step) {
    MHA_UNROLL for (int i = 0; i < 2; ++i) {
      const Element *const values = static_cast<const Element *>(chunks[i].values.at[block_of(key)]) + place_in_block(key) * width;
      add_values<V, TileShape<V::size>::context_vectors(1)>(values, width, p + i * score_stride + key, 0, o[i]);
    }
  }
}

// Chunks c and c + 1, in slots `slot` and `slot` + 1.
template <class V>
MHA_APART void attend_pair(const Unit &unit, int64_t c, int64_t slot) {
  const Attention &call = unit.call;
  constexpr Range all_keys = {0, chunk_keys};
  Attending keys;
  keys.begins[0] = all_keys.begin;
  keys.ends[0] = all_keys.end;
  Chunk chunks[2];
  for (int i = 0; i < 2; ++i) {
    read_keys<V>(unit, (c + i) * chunk_keys, all_keys, true, &chunks[i].keys);
    read_values<V>(unit, (c + i) * chunk_keys, all_keys, true, &chunks[i].values);
  }

  float *const scores = unit.scratch + call.scratch.scores;
  visit_storage_of_pair(
      call.k.storage, [&](auto stored) MHA_INLINED { multiply_keys_of_pair<V, typename decltype(stored)::Element>(unit, chunks, scores); });
  uint8_t *const excluded = reinterpret_cast<uint8_t *>(unit.scratch + call.scratch.excluded);
  bool excludes[2];
  float *o[2];
  for (int i = 0; i < 2; ++i) {
    float *const row = scores + i * score_stride;
    float m = -infinity, least = infinity;
    score_products<V>(chunks[i].keys, 0, chunk_groups, keys, 1, call.scale, row, &m, &least);
    excludes[i] = least == -infinity;
    if (excludes[i]) find_excluded(all_keys, row, excluded + i * chunk_keys);
    Stream asks_for_nothing;
    softmax_rows<V, 1>(row, chunk_groups, &m, unit.l(slot + i, 0), asks_for_nothing);
    *unit.m(slot + i, 0) = m;
    o[i] = unit.o(slot + i, 0);
  }

  if (excludes[0] || excludes[1]) {
    for (int i = 0; i < 2; ++i) {
      row_context<V>(chunks[i].values, call.head_dim_v_padded, scores + i * score_stride, all_keys,
                     excludes[i] ? excluded + i * chunk_keys : nullptr, o[i]);
    }
    return;
  }
  visit_storage_of_pair(call.v.storage, [&](auto stored) MHA_INLINED {
    context_of_pair<V, typename decltype(stored)::Element>(chunks, call.head_dim_v_padded, scores, o);
  });
}

}  // namespace
}  // namespace mha
