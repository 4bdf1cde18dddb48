// Which keys the mask array leaves to a row beyond the flags: one by one, in the scores of the row; and as a range, so that a tile computes
// with no more keys than its rows need.
//
// Keys of a chunk count from its first one.
#pragma once

#include "kernels/elements.h"
#include "kernels/unit.h"

namespace mha {
namespace {

// ---- Arrays of the caller's, by column

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

// ---- Scores

template <class V>
MHA_NOINLINE void mask_scores(const uint8_t *mask, Range keys, float *s) {
  int64_t j = keys.begin;
  for (; j + static_cast<int64_t>(V::size) <= keys.end; j += V::size) {
    const V attends = load<V>(reinterpret_cast<const int8_t *>(mask + j));  // of any sign
    store(s + j, value_if_less(all<V>(0.0f), attends * attends, load<V>(s + j), all<V>(-infinity)));
  }
  for (; j < keys.end; ++j) s[j] = mask[j] != 0 ? s[j] : -infinity;
}

// -infinity for those of the row's own keys that the mask excludes.
template <class V>
inline void mask_scores(const Unit &unit, const Row &row, int64_t chunk_begin, Range keys, float *s) {
  if (unit.call.options.mask.base) mask_scores<V>(mask_of(unit, row, chunk_begin), keys_with_column(unit, chunk_begin, keys), s);
}

// ---- Ranges

// The first byte of [begin, end) that is not 0, or end; and the place behind the last one, or begin.
MHA_INLINE int64_t first_set(const uint8_t *bytes, int64_t begin, int64_t end) {
  for (uint64_t eight; begin + 8 <= end; begin += 8) {
    __builtin_memcpy(&eight, bytes + begin, sizeof eight);
    if (eight != 0) break;
  }
  while (begin < end && bytes[begin] == 0) ++begin;
  return begin;
}

MHA_INLINE int64_t end_of_set(const uint8_t *bytes, int64_t begin, int64_t end) {
  for (uint64_t eight; begin + 8 <= end; end -= 8) {
    __builtin_memcpy(&eight, bytes + end - 8, sizeof eight);
    if (eight != 0) break;
  }
  while (begin < end && bytes[end - 1] == 0) --end;
  return end;
}

// The keys from the first to the last that the mask leaves to some of the rows [begin, end). keys: those that the flags leave.
MHA_NOINLINE inline Range keys_of_mask(const Unit &unit, int64_t begin, int64_t end, int64_t chunk_begin, Range keys) {
  const Range with_column = keys_with_column(unit, chunk_begin, keys);
  Range left = {with_column.end, with_column.begin};  // none yet
  const uint8_t *last = nullptr;
  for (Row row = unit.row(begin); row.index < end; unit.advance(&row)) {
    const uint8_t *const mask = mask_of(unit, row, chunk_begin);
    if (mask == last) continue;  // the same for all heads
    last = mask;
    left.begin = first_set(mask, with_column.begin, left.begin);
    left.end = end_of_set(mask, left.end, with_column.end);
  }
  if (keys.begin < with_column.begin) return {keys.begin, max(left.end, with_column.begin)};
  return {left.begin, max(left.begin, left.end)};
}

}  // namespace
}  // namespace mha
