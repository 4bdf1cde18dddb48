// Which keys the mask array and position groups leave to a row: one by one, in the scores of the row; and as a range, in which a bias of
// -infinity counts as masked too, so that a tile computes with no more keys than its rows need.
//
// Keys of a chunk count from its first one.
#pragma once

#include "elements.h"
#include "unit.h"

namespace mha {
namespace {

// ---- Arrays of the caller's, by column

// Of the keys of a chunk, those that have a column in mask, bias and groups.
MHA_INLINE Range keys_with_column(const Unit &unit, int64_t chunk_begin, Range keys) {
  return {max(keys.begin, min(keys.end, unit.sequence.first_in_columns - chunk_begin)), keys.end};
}

// Number of the first element of an array for the row.
MHA_INLINE int64_t row_of(const PairArray &array, const Unit &unit, const Row &row) {
  return unit.sequence_index * array.batch_stride + row.head * array.head_stride + unit.array_row(row) * array.row_stride;
}

// Number of the element of an array for the row and the first key of the chunk, which need not have one.
MHA_INLINE int64_t element_of(const PairArray &array, const Unit &unit, const Row &row, int64_t chunk_begin) {
  return row_of(array, unit, row) + unit.sequence.option_column + chunk_begin;
}

MHA_INLINE const uint8_t *mask_of(const Unit &unit, const Row &row, int64_t chunk_begin) {
  const PairArray &mask = unit.call.options.mask;
  return static_cast<const uint8_t *>(mask.base) + element_of(mask, unit, row, chunk_begin);
}

MHA_INLINE int32_t group_of(const Unit &unit, const Row &row) {
  const PositionGroups &groups = unit.call.options.groups;
  return groups.of_rows[unit.sequence_index * groups.row_stride + unit.array_row(row)];
}

MHA_INLINE const int32_t *groups_of_keys(const Unit &unit, int64_t chunk_begin) {
  const PositionGroups &groups = unit.call.options.groups;
  return groups.of_columns + unit.sequence_index * groups.column_stride + unit.sequence.option_column + chunk_begin;
}

// Of some keys of a chunk, those that the flags leave to the rows from `first` to `last`.
MHA_INLINE Range keys_of_flags(const Unit &unit, const Row &first, const Row &last, int64_t chunk_begin, Range keys) {
  const PositionGroups &groups = unit.call.options.groups;
  const int64_t begin = unit.keys_in_window(first, groups.window_left, groups.window_right).begin - chunk_begin;
  const int64_t end = unit.keys_in_window(last, groups.window_left, groups.window_right).end - chunk_begin;
  return {min(keys.end, max(keys.begin, begin)), min(keys.end, max(keys.begin, end))};
}

// ---- Scores

// -infinity for the keys that have another number than `own`.
MHA_NOINLINE inline void leave_group(const int32_t *groups, int32_t own, Range keys, float *s) {
  int64_t j = keys.begin;
  for (; j + key_block <= keys.end; j += key_block) {
    for (int64_t i = 0; i < key_block; ++i) s[j + i] = groups[j + i] == own ? s[j + i] : -infinity;
  }
  for (; j < keys.end; ++j) s[j] = groups[j] == own ? s[j] : -infinity;
}

// -infinity for those of the row's own keys that its group does not leave.
MHA_NOINLINE inline void mask_by_groups(const Unit &unit, const Row &row, int64_t chunk_begin, Range keys, float *s) {
  const int32_t own = group_of(unit, row), *const groups = groups_of_keys(unit, chunk_begin);
  const Range with_column = keys_with_column(unit, chunk_begin, keys);
  if (!unit.call.options.groups.add_keys) return leave_group(groups, own, with_column, s);
  const Range flags = keys_of_flags(unit, row, row, chunk_begin, keys), beside[] = {{keys.begin, flags.begin}, {flags.end, keys.end}};
  const int64_t first = own < 0 ? keys.end : with_column.begin;  // that can be of the group
  for (const Range &range : beside) {
    for (int64_t j = range.begin; j < min(first, range.end); ++j) s[j] = -infinity;
    leave_group(groups, own, {max(first, range.begin), range.end}, s);
  }
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

// -infinity for those of the row's own keys that groups or the mask exclude.
template <class V>
inline void mask_scores(const Unit &unit, const Row &row, int64_t chunk_begin, Range keys, float *s) {
  if (unit.call.options.groups.of_rows) mask_by_groups(unit, row, chunk_begin, keys, s);
  if (unit.call.options.mask.base) mask_scores<V>(mask_of(unit, row, chunk_begin), keys_with_column(unit, chunk_begin, keys), s);
}

// ---- Ranges

// Whether 32 bytes are other than `excluded` throughout.
MHA_INLINE bool has_other(const void *bytes, uint64_t excluded) {
  uint64_t eights[4];
  MHA_MEMCPY(eights, bytes, sizeof eights);
  return ((eights[0] ^ excluded) | (eights[1] ^ excluded) | (eights[2] ^ excluded) | (eights[3] ^ excluded)) != 0;
}

// A row of the mask array or of biases, whose numbers have 1, 2 or 4 bytes, and the number that excludes a key, side by side.
struct Exclusions {
  const char *row;
  int64_t bytes;
  uint64_t number;

  MHA_INLINE bool leave(int64_t key) const {
    if (bytes == 1) return row[key] != 0;
    if (bytes == 2) return load_as<uint16_t>(row + key * 2) != static_cast<uint16_t>(number);
    return load_as<uint32_t>(row + key * 4) != static_cast<uint32_t>(number);
  }
  template <class T>
  static MHA_INLINE T load_as(const char *at) {
    T value;
    MHA_MEMCPY(&value, at, sizeof value);
    return value;
  }
  MHA_INLINE bool leave_some(int64_t key) const { return has_other(row + key * bytes, number); }  // of 32 bytes
};

// Makes `left` reach from the first to the last of the keys that a row leaves, as far as it does not yet. keys: where to look.
MHA_NOINLINE inline void extend_to_left(const Exclusions &excluded, Range keys, Range *left) {
  const int64_t at_once = excluded.bytes == 1 ? 32 : excluded.bytes == 2 ? 16 : 8;
  int64_t begin = keys.begin, end = keys.end;
  if (begin < end && excluded.leave(begin) && excluded.leave(end - 1)) {
    *left = {min(begin, left->begin), max(end, left->end)};
    return;
  }
  while (begin + at_once <= min(end, left->begin) && !excluded.leave_some(begin)) begin += at_once;
  while (begin < min(end, left->begin) && !excluded.leave(begin)) ++begin;
  if (begin >= end) return;
  const int64_t least = max(begin, left->end);
  while (end - at_once >= least && !excluded.leave_some(end - at_once)) end -= at_once;
  while (end > least && !excluded.leave(end - 1)) --end;
  *left = {min(begin, left->begin), max(end, left->end)};
}

// Group numbers from one to another.
struct Numbers {
  int32_t least, greatest;
  MHA_INLINE bool have(int32_t number) const {
    return static_cast<uint32_t>(number) - static_cast<uint32_t>(least) <= static_cast<uint32_t>(greatest) - static_cast<uint32_t>(least);
  }
  // Whether they have one of 16.
  MHA_INLINE bool have_some(const int32_t *numbers) const {
    uint32_t some = 0;
    for (int64_t i = 0; i < key_block; ++i) some |= have(numbers[i]);
    return some != 0;
  }
};

// The keys from the first to the last that groups and flags leave to some of the rows [begin, end), or a few more, where groups between the
// least and the greatest number of the rows lie around them. keys: where to look.
MHA_NOINLINE inline Range keys_of_groups(const Unit &unit, int64_t begin, int64_t end, int64_t chunk_begin, Range keys) {
  const bool add_keys = unit.call.options.groups.add_keys;
  Numbers own = {INT32_MAX, INT32_MIN};
  for (Row row = unit.row(begin); row.index < end; unit.advance(&row)) {
    const int32_t number = group_of(unit, row);
    if (add_keys && number < 0) continue;
    own = {number < own.least ? number : own.least, number > own.greatest ? number : own.greatest};
  }
  const Range of_flags = keys_of_flags(unit, unit.row(begin), unit.row(end - 1), chunk_begin, keys);
  const Range with_column = keys_with_column(unit, chunk_begin, add_keys ? keys : of_flags);
  const int32_t *const groups = groups_of_keys(unit, chunk_begin);
  Range left = with_column;
  if (own.least > own.greatest) left.end = left.begin;
  while (left.begin + key_block <= left.end && !own.have_some(groups + left.begin)) left.begin += key_block;
  while (left.begin < left.end && !own.have(groups[left.begin])) ++left.begin;
  while (left.begin + key_block <= left.end && !own.have_some(groups + left.end - key_block)) left.end -= key_block;
  while (left.begin < left.end && !own.have(groups[left.end - 1])) --left.end;
  // Left whatever the number is:
  const Range always = {of_flags.begin, add_keys ? of_flags.end : with_column.begin};
  if (always.begin >= always.end) return left;
  return left.begin >= left.end ? always : Range{min(left.begin, always.begin), max(left.end, always.end)};
}

// The keys from the first to the last that the mask array, or biases that are not -infinity, leave to some of the rows [begin, end). keys:
// those that are left to them otherwise.
MHA_NOINLINE inline Range keys_of_array(const Unit &unit, const PairArray &array, int64_t begin, int64_t end, int64_t chunk_begin,
                                        Range keys) {
  const bool is_mask = array.storage == Storage::int8, is_f16 = array.storage == Storage::f16;
  Exclusions excluded = {nullptr, bytes_of(array.storage), is_mask ? 0u : is_f16 ? 0xfc00fc00fc00fc00u : 0xff800000ff800000u};
  const Range with_column = keys_with_column(unit, chunk_begin, keys);
  Range left = {with_column.end, with_column.begin};  // none yet
  Range last_own = {0, 0};
  for (Row row = unit.row(begin); row.index < end; unit.advance(&row)) {
    const char *const numbers = static_cast<const char *>(array.base) + element_of(array, unit, row, chunk_begin) * excluded.bytes;
    const Range own = unit.keys_of(row);
    if (numbers == excluded.row && own.begin == last_own.begin && own.end == last_own.end) continue;  // the same for all heads
    excluded.row = numbers;
    last_own = own;
    const Range range = {max(with_column.begin, own.begin - chunk_begin), min(with_column.end, own.end - chunk_begin)};
    extend_to_left(excluded, range, &left);
    if (left.begin == with_column.begin && left.end == with_column.end) return keys;
  }
  if (keys.begin < with_column.begin) return {keys.begin, max(left.end, with_column.begin)};
  return {left.begin, max(left.begin, left.end)};
}

// All of them.
MHA_NOINLINE inline Range keys_left(const Unit &unit, int64_t begin, int64_t end, int64_t chunk_begin, Range keys) {
  const ScoreOptions &options = unit.call.options;
  if (options.groups.of_rows) keys = keys_of_groups(unit, begin, end, chunk_begin, keys);
  if (options.mask.base) keys = keys_of_array(unit, options.mask, begin, end, chunk_begin, keys);
  return options.bias.base ? keys_of_array(unit, options.bias, begin, end, chunk_begin, keys) : keys;
}

}  // namespace
}  // namespace mha
