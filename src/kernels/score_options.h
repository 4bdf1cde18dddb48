// What changes the scores of a row beyond the scale: softcap, ALiBi, bias and mask, in the order of CONTRACT.md, section 7.
//
// The scores of a row with the keys of a chunk lie one after the other: that of key j of the chunk is number j.
#pragma once

#include "kernels/functions.h"
#include "kernels/key_values.h"

namespace mha {
namespace {

// softcap * tanh(s / softcap), of 16 scores at a time.
template <class V>
MHA_NOINLINE void cap_scores(const ScoreOptions &options, Range blocks, float *s) {
  const V softcap = all<V>(options.softcap), inverse = all<V>(options.softcap_inverse);
  for (int64_t j = blocks.begin * key_block; j < blocks.end * key_block; j += V::size) {
    store(s + j, tanh_of(load<V>(s + j) * inverse) * softcap);
  }
}

// s - slope * distance. The distance of the keys of a block is computed from that of its first one, so that no lane can round differently.
template <class V>
MHA_NOINLINE void add_alibi(const Unit &unit, const Row &row, int64_t chunk_begin, Range blocks, float *s) {
  const V slope = all<V>(-unit.call.options.alibi_slopes[row.head]);
  const int64_t position = unit.position_of(row);
  for (int64_t block = blocks.begin; block < blocks.end; ++block) {
    const V first = all<V>(static_cast<float>(chunk_begin + block * key_block - position));
    for (int64_t lane = 0; lane < key_block; lane += V::size) {
      const V distance = first + load<V>(lane_numbers + lane);
      float *const at = s + block * key_block + lane;
      store(at, mul_add(slope, max_of(distance, all<V>(0.0f) - distance), load<V>(at)));
    }
  }
}

template <class V, class Element>
MHA_NOINLINE void add_bias(const Element *bias, Range keys, float *s) {
  int64_t j = keys.begin;
  for (; j + static_cast<int64_t>(V::size) <= keys.end; j += V::size) store(s + j, canonical_nan(load<V>(s + j) + load<V>(bias + j)));
  for (; j < keys.end; ++j) s[j] = canonical_nan(s[j] + load<Scalar>(bias + j).x);
}

template <class V>
MHA_NOINLINE void mask_scores(const uint8_t *mask, Range keys, float *s) {
  int64_t j = keys.begin;
  for (; j + static_cast<int64_t>(V::size) <= keys.end; j += V::size) {
    const V attends = load<V>(reinterpret_cast<const int8_t *>(mask + j));  // of any sign
    store(s + j, value_if_less(all<V>(0.0f), attends * attends, load<V>(s + j), all<V>(-infinity)));
  }
  for (; j < keys.end; ++j) s[j] = mask[j] != 0 ? s[j] : -infinity;
}

// Of the keys of a chunk, those that have a column in mask and bias.
MHA_INLINE Range keys_with_column(const Unit &unit, int64_t chunk_begin, Range keys) {
  return {max(keys.begin, min(keys.end, unit.sequence.first_in_columns - chunk_begin)), keys.end};
}

// Number of the element of an array for the row and the first key of the chunk, which need not have one.
MHA_INLINE int64_t element_of(const PairArray &array, const Unit &unit, const Row &row, int64_t chunk_begin) {
  return unit.sequence_index * array.batch_stride + row.head * array.head_stride + unit.array_row(row) * array.row_stride +
         unit.sequence.option_column + chunk_begin;
}

MHA_INLINE const uint8_t *mask_of(const Unit &unit, const Row &row, int64_t chunk_begin) {
  const PairArray &mask = unit.call.options.mask;
  return static_cast<const uint8_t *>(mask.base) + element_of(mask, unit, row, chunk_begin);
}

// ALiBi and bias of the row's own keys.
template <class V>
inline void bias_scores(const Unit &unit, const Row &row, int64_t chunk_begin, Range keys, float *s) {
  const ScoreOptions &options = unit.call.options;
  if (options.alibi_slopes) add_alibi<V>(unit, row, chunk_begin, groups_of(keys), s);
  if (!options.bias.base) return;
  const int64_t element = element_of(options.bias, unit, row, chunk_begin);
  const Range with_column = keys_with_column(unit, chunk_begin, keys);
  if (options.bias.storage == Storage::f16)
    add_bias<V>(static_cast<const F16 *>(options.bias.base) + element, with_column, s);
  else
    add_bias<V>(static_cast<const float *>(options.bias.base) + element, with_column, s);
}

// -infinity for those of the row's own keys that the mask excludes.
template <class V>
inline void mask_scores(const Unit &unit, const Row &row, int64_t chunk_begin, Range keys, float *s) {
  if (unit.call.options.mask.base) mask_scores<V>(mask_of(unit, row, chunk_begin), keys_with_column(unit, chunk_begin, keys), s);
}

// Whether the mask leaves a key of the chunk to some of the rows [begin, end). keys: those that the flags leave.
MHA_NOINLINE inline bool mask_leaves_some(const Unit &unit, int64_t begin, int64_t end, int64_t chunk_begin, Range keys) {
  const Range with_column = keys_with_column(unit, chunk_begin, keys);
  if (keys.begin < with_column.begin) return true;
  const uint8_t *last = nullptr;
  for (Row row = unit.row(begin); row.index < end; unit.advance(&row)) {
    const uint8_t *const mask = mask_of(unit, row, chunk_begin);
    if (mask == last) continue;  // the same for all heads
    last = mask;
    int64_t j = with_column.begin;
    for (uint64_t eight; j + 8 <= with_column.end; j += 8) {
      __builtin_memcpy(&eight, mask + j, sizeof eight);
      if (eight != 0) return true;
    }
    for (; j < with_column.end; ++j) {
      if (mask[j] != 0) return true;
    }
  }
  return false;
}

}  // namespace
}  // namespace mha
