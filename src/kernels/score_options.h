// What happens to the scores of a row between the products and the softmax, beyond the scale.
//
// Options change scores in the order of CONTRACT.md, section 7: softcap, ALiBi, relative bias,
// bias, then segments and mask. bias_scores and mask_scores do that to one row. Before a chunk is
// computed, keys_left finds the range of keys that masks and biases leave to any row of a tile, so
// that chunks which are masked as a whole cost next to nothing.
//
// Keys of a chunk count from its first one; the score of key j is number j of the row. Arrays of
// the caller's have a column for each key, but the keys of a cache may come before the first
// column.
#pragma once

#include "elements.h"
#include "functions.h"
#include "key_values.h"
#include "unit.h"

namespace mha {
namespace {

// ---- The caller's arrays

// Those keys of a chunk that have a column in mask, bias and segments.
MHA_INLINE Range keys_with_column(const Unit &unit, int64_t chunk_begin, Range keys) {
  return {max(keys.begin, min(keys.end, unit.sequence.first_in_columns - chunk_begin)), keys.end};
}

// The number of the first element of an array for a row.
MHA_INLINE int64_t row_of(const PairArray &array, const Unit &unit, const Row &row) {
  return unit.sequence_index * array.batch_stride + row.head * array.head_stride +
         unit.array_row(row) * array.row_stride;
}

// The number of the element for a row and the first key of the chunk, which need not have a column.
MHA_INLINE int64_t element_of(const PairArray &array, const Unit &unit, const Row &row,
                              int64_t chunk_begin) {
  return row_of(array, unit, row) + unit.sequence.option_column + chunk_begin;
}

MHA_INLINE const uint8_t *mask_of(const Unit &unit, const Row &row, int64_t chunk_begin) {
  const PairArray &mask = unit.call.request.options.mask;
  return static_cast<const uint8_t *>(mask.base) + element_of(mask, unit, row, chunk_begin);
}

// The segment of a row, and the segments of the keys of a chunk.
MHA_INLINE int32_t segment_of(const Unit &unit, const Row &row) {
  const PositionSegments &segments = unit.call.request.options.segments;
  return segments.of_rows[unit.sequence_index * segments.row_stride + unit.array_row(row)];
}

MHA_INLINE const int32_t *segments_of_keys(const Unit &unit, int64_t chunk_begin) {
  const PositionSegments &segments = unit.call.request.options.segments;
  return segments.of_columns + unit.sequence_index * segments.column_stride +
         unit.sequence.option_column + chunk_begin;
}

// Those of some keys of a chunk that the flags leave to the rows from `first` to `last`.
MHA_INLINE Range keys_of_flags(const Unit &unit, const Row &first, const Row &last,
                               int64_t chunk_begin, Range keys) {
  const PositionSegments &segments = unit.call.request.options.segments;
  const int64_t begin =
      unit.keys_in_window(first, segments.window_left, segments.window_right).begin - chunk_begin;
  const int64_t end =
      unit.keys_in_window(last, segments.window_left, segments.window_right).end - chunk_begin;
  return {min(keys.end, max(keys.begin, begin)), min(keys.end, max(keys.begin, end))};
}

// ---- Masks, key by key

// Sets the scores of keys that are in another segment than `own` to -infinity.
MHA_NOINLINE inline void leave_segment(const int32_t *segments, int32_t own, Range keys, float *s) {
  int64_t j = keys.begin;
  for (; j + tile_keys <= keys.end; j += tile_keys) {
    for (int64_t i = 0; i < tile_keys; ++i)
      s[j + i] = segments[j + i] == own ? s[j + i] : -infinity;
  }
  for (; j < keys.end; ++j) s[j] = segments[j] == own ? s[j] : -infinity;
}

// Sets the scores of those of the row's own keys that its segment does not leave to -infinity.
MHA_NOINLINE inline void mask_by_segments(const Unit &unit, const Row &row, int64_t chunk_begin,
                                          Range keys, float *s) {
  const int32_t own = segment_of(unit, row), *const segments = segments_of_keys(unit, chunk_begin);
  const Range with_column = keys_with_column(unit, chunk_begin, keys);
  if (!unit.call.request.options.segments.add_keys)
    return leave_segment(segments, own, with_column, s);
  const Range flags = keys_of_flags(unit, row, row, chunk_begin, keys),
              beside[] = {{keys.begin, flags.begin}, {flags.end, keys.end}};
  const int64_t first = own < 0 ? keys.end : with_column.begin;  // that can be of the segment
  for (const Range &range : beside) {
    for (int64_t j = range.begin; j < min(first, range.end); ++j) s[j] = -infinity;
    leave_segment(segments, own, {max(first, range.begin), range.end}, s);
  }
}

// Sets the scores of keys whose byte in the mask is 0 to -infinity.
template <class V>
MHA_NOINLINE void mask_scores(const uint8_t *mask, Range keys, float *s) {
  int64_t j = keys.begin;
  for (; j + static_cast<int64_t>(V::size) <= keys.end; j += V::size) {
    const V attends = load<V>(reinterpret_cast<const int8_t *>(mask + j));  // of any sign
    store(s + j, value_if_less(all<V>(0.0f), attends * attends, load<V>(s + j), all<V>(-infinity)));
  }
  for (; j < keys.end; ++j) s[j] = mask[j] != 0 ? s[j] : -infinity;
}

// Sets the scores of those of the row's own keys that segments or the mask exclude to -infinity.
template <class V>
inline void mask_scores(const Unit &unit, const Row &row, int64_t chunk_begin, Range keys,
                        float *s) {
  if (unit.call.request.options.segments.of_rows) mask_by_segments(unit, row, chunk_begin, keys, s);
  if (unit.call.request.options.mask.base)
    mask_scores<V>(mask_of(unit, row, chunk_begin), keys_with_column(unit, chunk_begin, keys), s);
}

// ---- Which keys masks leave to a tile of rows

// Whether 32 bytes are other than `excluded` throughout.
MHA_INLINE bool has_other(const void *bytes, uint64_t excluded) {
  uint64_t eights[4];
  MHA_MEMCPY(eights, bytes, sizeof eights);
  return ((eights[0] ^ excluded) | (eights[1] ^ excluded) | (eights[2] ^ excluded) |
          (eights[3] ^ excluded)) != 0;
}

// A row of the mask or of biases, whose elements have 1, 2 or 4 bytes, and the element that
// excludes a key, repeated through 8 bytes.
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
  MHA_INLINE bool leave_some(int64_t key) const {
    return has_other(row + key * bytes, number);
  }  // of 32 bytes
};

// Extends `left` to the first and the last key that a row leaves. keys: where to look. It looks
// from both ends inwards, 32 bytes at a time, and no further than to keys that `left` has already.
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

// The segments from one number to another.
struct Numbers {
  int32_t least, greatest;
  MHA_INLINE bool have(int32_t number) const {
    return static_cast<uint32_t>(number) - static_cast<uint32_t>(least) <=
           static_cast<uint32_t>(greatest) - static_cast<uint32_t>(least);
  }
  // Whether they have one of 16.
  MHA_INLINE bool have_some(const int32_t *numbers) const {
    uint32_t some = 0;
    for (int64_t i = 0; i < tile_keys; ++i) some |= have(numbers[i]);
    return some != 0;
  }
};

// The keys from the first to the last that segments and flags leave to some of the rows [begin,
// end). keys: where to look. The result may have a few more keys at its ends, of segments between
// the least and the greatest of the rows.
MHA_NOINLINE inline Range keys_of_segments(const Unit &unit, int64_t begin, int64_t end,
                                           int64_t chunk_begin, Range keys) {
  const bool add_keys = unit.call.request.options.segments.add_keys;
  Numbers own = {INT32_MAX, INT32_MIN};
  for (Row row = unit.row(begin); row.index < end; unit.advance(&row)) {
    const int32_t number = segment_of(unit, row);
    if (add_keys && number < 0) continue;
    own = {number < own.least ? number : own.least, number > own.greatest ? number : own.greatest};
  }
  const Range of_flags = keys_of_flags(unit, unit.row(begin), unit.row(end - 1), chunk_begin, keys);
  const Range with_column = keys_with_column(unit, chunk_begin, add_keys ? keys : of_flags);
  const int32_t *const segments = segments_of_keys(unit, chunk_begin);
  Range left = with_column;
  if (own.least > own.greatest) left.end = left.begin;
  // From both ends inwards, 16 keys at a time and then one by one.
  while (left.begin + tile_keys <= left.end && !own.have_some(segments + left.begin))
    left.begin += tile_keys;
  while (left.begin < left.end && !own.have(segments[left.begin])) ++left.begin;
  while (left.begin + tile_keys <= left.end && !own.have_some(segments + left.end - tile_keys))
    left.end -= tile_keys;
  while (left.begin < left.end && !own.have(segments[left.end - 1])) --left.end;
  // The keys that are left whatever their segment is.
  const Range always = {of_flags.begin, add_keys ? of_flags.end : with_column.begin};
  if (always.begin >= always.end) return left;
  return left.begin >= left.end ? always
                                : Range{min(left.begin, always.begin), max(left.end, always.end)};
}

// The keys from the first to the last that the mask, or biases other than -infinity, leave to some
// of the rows [begin, end). keys: those that are left to them otherwise.
MHA_NOINLINE inline Range keys_of_array(const Unit &unit, const PairArray &array, int64_t begin,
                                        int64_t end, int64_t chunk_begin, Range keys) {
  const bool is_mask = array.storage == Storage::int8, is_f16 = array.storage == Storage::f16;
  Exclusions excluded = {nullptr, bytes_of(array.storage),
                         is_mask  ? 0u
                         : is_f16 ? 0xfc00fc00fc00fc00u
                                  : 0xff800000ff800000u};
  // Keys without a column are left to all rows.
  const Range with_column = keys_with_column(unit, chunk_begin, keys);
  Range left = {with_column.end, with_column.begin};  // none yet
  Range last_own = {0, 0};
  for (Row row = unit.row(begin); row.index < end; unit.advance(&row)) {
    const char *const numbers = static_cast<const char *>(array.base) +
                                element_of(array, unit, row, chunk_begin) * excluded.bytes;
    const Range own = unit.keys_of(row);
    // Heads that share a row of the array give the same keys.
    if (numbers == excluded.row && own.begin == last_own.begin && own.end == last_own.end) continue;
    excluded.row = numbers;
    last_own = own;
    const Range range = {max(with_column.begin, own.begin - chunk_begin),
                         min(with_column.end, own.end - chunk_begin)};
    extend_to_left(excluded, range, &left);
    if (left.begin == with_column.begin && left.end == with_column.end) return keys;
  }
  if (keys.begin < with_column.begin) return {keys.begin, max(left.end, with_column.begin)};
  return {left.begin, max(left.begin, left.end)};
}

// The keys from the first to the last that segments, mask and bias together leave to some of the
// rows.
MHA_NOINLINE inline Range keys_left(const Unit &unit, int64_t begin, int64_t end,
                                    int64_t chunk_begin, Range keys) {
  const ScoreOptions &options = unit.call.request.options;
  if (options.segments.of_rows) keys = keys_of_segments(unit, begin, end, chunk_begin, keys);
  if (options.mask.base) keys = keys_of_array(unit, options.mask, begin, end, chunk_begin, keys);
  return options.bias.base ? keys_of_array(unit, options.bias, begin, end, chunk_begin, keys)
                           : keys;
}

// ---- Softcap, ALiBi and biases

// softcap * tanh(s / softcap), where s is the product times `scale`. Two vectors run side by side,
// since each is a long chain of operations.
template <class V>
MHA_NOINLINE void cap_scores(const ScoreOptions &options, Range tiles, float scale, float *s) {
  constexpr int lanes = V::size, at_once = static_cast<int>(min(tile_keys / lanes, 2));
  const V factor = all<V>(scale), softcap = all<V>(options.softcap),
          inverse = all<V>(options.softcap_inverse);
  for (int64_t j = tiles.begin * tile_keys; j < tiles.end * tile_keys; j += at_once * lanes) {
    V x[at_once];
    MHA_EACH(i, at_once) x[i] = load<V>(s + j + i * lanes) * factor * inverse;
    tanh_of(x);
    MHA_EACH(i, at_once) store(s + j + i * lanes, x[i] * softcap);
  }
}

// s - slope * distance. The distance of a key is computed from that of the first key of its tile,
// so that no lane can round differently.
template <class V>
MHA_NOINLINE void add_alibi(const Unit &unit, const Row &row, int64_t chunk_begin, Range keys,
                            float *s) {
  const V slope = all<V>(-unit.call.request.options.alibi_slopes[row.head]);
  const int64_t position = unit.position_of(row);
  for (int64_t j = keys.begin; unit.blocks && j < keys.end;
       ++j) {  // any key may be the first of chosen ones
    const int64_t place = lane_of(chunk_begin + j);
    const float distance =
        static_cast<float>(chunk_begin + j - place - position) + static_cast<float>(place);
    s[j] = mul_add(-unit.call.request.options.alibi_slopes[row.head],
                   distance > 0.0f - distance ? distance : 0.0f - distance, s[j]);
  }
  if (unit.blocks) return;
  const Range tiles = tiles_of(keys);
  for (int64_t tile = tiles.begin; tile < tiles.end; ++tile) {
    const V first = all<V>(static_cast<float>(chunk_begin + tile * tile_keys - position));
    for (int64_t lane = 0; lane < tile_keys; lane += V::size) {
      const V distance = first + load<V>(lane_numbers + lane);
      float *const at = s + tile * tile_keys + lane;
      store(at, mul_add(slope, max_of(distance, all<V>(0.0f) - distance), load<V>(at)));
    }
  }
}

// s + bias. A bias of -infinity gives -infinity whatever s is, even for NaN.
template <class V>
MHA_INLINE V with_bias(V s, V bias) {
  return canonical_nan(zero_if_equal(bias, all<V>(-infinity), s) + bias);
}

// Adds a bias to each score.
template <class V, class Element>
MHA_NOINLINE void add_bias(const Element *bias, Range keys, float *s) {
  in_vectors<V>(keys.end - keys.begin, [&](auto vector, int64_t i) MHA_INLINED {
    using T = decltype(vector);
    const int64_t j = keys.begin + i;
    store(s + j, with_bias(load<T>(s + j), load<T>(bias + j)));
  });
}

// Adds the same bias to each score.
template <class V>
MHA_NOINLINE void add_number(float number, Range keys, float *s) {
  in_vectors<V>(keys.end - keys.begin, [&](auto vector, int64_t i) MHA_INLINED {
    using T = decltype(vector);
    const int64_t j = keys.begin + i;
    store(s + j, with_bias(load<T>(s + j), all<T>(number)));
  });
}

// Adds the bias of each distance. Distances from -left to right have numbers of their own; keys
// before have the first one, and keys after the last one.
template <class V>
MHA_NOINLINE void add_relative_bias(const Unit &unit, const Row &row, int64_t chunk_begin,
                                    Range keys, float *s) {
  const ScoreOptions &options = unit.call.request.options;
  const int64_t left = options.relative_left, right = options.relative_right,
                position = unit.position_of(row);
  const float *const numbers =
      static_cast<const float *>(options.relative.base) + row_of(options.relative, unit, row);
  // No overflow: positions are at least -2^62, and `left` numbers lie in memory.
  const int64_t first = position - left;
  const int64_t last = position > max_positions - right ? max_positions : position + right;
  const int64_t begin = chunk_begin + keys.begin, end = chunk_begin + keys.end;
  const int64_t own_begin = max(begin, min(first, end)), own_end = last < own_begin ? own_begin
                                                                   : last < end     ? last + 1
                                                                                    : end;
  if (begin < own_begin) add_number<V>(numbers[0], {keys.begin, own_begin - chunk_begin}, s);
  if (own_begin < own_end)
    add_bias<V>(numbers + (own_begin - first), {0, own_end - own_begin},
                s + (own_begin - chunk_begin));
  if (own_end < end) add_number<V>(numbers[left + right], {own_end - chunk_begin, keys.end}, s);
}

// Adds ALiBi, relative bias and bias to the scores of the row's own keys.
template <class V>
inline void bias_scores(const Unit &unit, const Row &row, int64_t chunk_begin, Range keys,
                        float *s) {
  const ScoreOptions &options = unit.call.request.options;
  if (options.alibi_slopes) add_alibi<V>(unit, row, chunk_begin, keys, s);
  if (options.relative.base) add_relative_bias<V>(unit, row, chunk_begin, keys, s);
  if (!options.bias.base) return;
  const int64_t element = element_of(options.bias, unit, row, chunk_begin);
  const Range with_column = keys_with_column(unit, chunk_begin, keys);
  if (options.bias.storage == Storage::f16)
    add_bias<V>(static_cast<const F16 *>(options.bias.base) + element, with_column, s);
  else
    add_bias<V>(static_cast<const float *>(options.bias.base) + element, with_column, s);
}

}  // namespace
}  // namespace mha
