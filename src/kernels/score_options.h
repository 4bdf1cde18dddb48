// What changes the scores of a row beyond the scale, in the order of CONTRACT.md, section 7: softcap, ALiBi and biases; the mask follows
// (pairs.h).
//
// The scores of a row with the keys of a chunk lie one after the other: that of key j of the chunk is number j.
#pragma once

#include "functions.h"
#include "key_values.h"
#include "pairs.h"

namespace mha {
namespace {

// softcap * tanh(s / softcap), s times `scale` before. Two vectors side by side, since each is a long chain of operations.
template <class V>
MHA_NOINLINE void cap_scores(const ScoreOptions &options, Range blocks, float scale, float *s) {
  constexpr int lanes = V::size, at_once = static_cast<int>(min(key_block / lanes, 2));
  const V factor = all<V>(scale), softcap = all<V>(options.softcap), inverse = all<V>(options.softcap_inverse);
  for (int64_t j = blocks.begin * key_block; j < blocks.end * key_block; j += at_once * lanes) {
    V x[at_once];
    MHA_UNROLL for (int i = 0; i < at_once; ++i) x[i] = load<V>(s + j + i * lanes) * factor * inverse;
    tanh_of(x);
    MHA_UNROLL for (int i = 0; i < at_once; ++i) store(s + j + i * lanes, x[i] * softcap);
  }
}

// s - slope * distance. The distance of the keys of a block is computed from that of its first one, so that no lane can round differently.
template <class V>
MHA_NOINLINE void add_alibi(const Unit &unit, const Row &row, int64_t chunk_begin, Range keys, float *s) {
  const V slope = all<V>(-unit.call.options.alibi_slopes[row.head]);
  const int64_t position = unit.position_of(row);
  for (int64_t j = keys.begin; unit.blocks && j < keys.end; ++j) {  // any key may be the first of chosen ones
    const int64_t place = place_in_block(chunk_begin + j);
    const float distance = static_cast<float>(chunk_begin + j - place - position) + static_cast<float>(place);
    s[j] = mul_add(-unit.call.options.alibi_slopes[row.head], distance > 0.0f - distance ? distance : 0.0f - distance, s[j]);
  }
  if (unit.blocks) return;
  const Range blocks = groups_of(keys);
  for (int64_t block = blocks.begin; block < blocks.end; ++block) {
    const V first = all<V>(static_cast<float>(chunk_begin + block * key_block - position));
    for (int64_t lane = 0; lane < key_block; lane += V::size) {
      const V distance = first + load<V>(lane_numbers + lane);
      float *const at = s + block * key_block + lane;
      store(at, mul_add(slope, max_of(distance, all<V>(0.0f) - distance), load<V>(at)));
    }
  }
}

// s + bias. A bias of -infinity gives -infinity whatever s is, even NaN, as if s were 0.
template <class V>
MHA_INLINE V with_bias(V s, V bias) {
  return canonical_nan(zero_if_equal(bias, all<V>(-infinity), s) + bias);
}

template <class V, class Element>
MHA_NOINLINE void add_bias(const Element *bias, Range keys, float *s) {
  int64_t j = keys.begin;
  for (; j + static_cast<int64_t>(V::size) <= keys.end; j += V::size) store(s + j, with_bias(load<V>(s + j), load<V>(bias + j)));
  for (; j < keys.end; ++j) s[j] = with_bias(Scalar{s[j]}, load<Scalar>(bias + j)).x;
}

// s + number, for keys that all have the same bias.
template <class V>
MHA_NOINLINE void add_number(float number, Range keys, float *s) {
  int64_t j = keys.begin;
  for (; j + static_cast<int64_t>(V::size) <= keys.end; j += V::size) store(s + j, with_bias(load<V>(s + j), all<V>(number)));
  for (; j < keys.end; ++j) s[j] = with_bias(Scalar{s[j]}, Scalar{number}).x;
}

// The keys from `first` to `last` have a number of their own; those before have the first one, those behind the last one.
template <class V>
MHA_NOINLINE void add_relative_bias(const Unit &unit, const Row &row, int64_t chunk_begin, Range keys, float *s) {
  const ScoreOptions &options = unit.call.options;
  const int64_t left = options.relative_left, right = options.relative_right, position = unit.position_of(row);
  const float *const numbers = static_cast<const float *>(options.relative.base) + row_of(options.relative, unit, row);
  const int64_t first = position - left;  // no overflow: positions are at least -2^62, and `left` numbers lie in memory
  const int64_t last = position > max_positions - right ? max_positions : position + right;
  const int64_t begin = chunk_begin + keys.begin, end = chunk_begin + keys.end;
  const int64_t own_begin = max(begin, min(first, end)), own_end = last < own_begin ? own_begin : last < end ? last + 1 : end;
  if (begin < own_begin) add_number<V>(numbers[0], {keys.begin, own_begin - chunk_begin}, s);
  if (own_begin < own_end) add_bias<V>(numbers + (own_begin - first), {0, own_end - own_begin}, s + (own_begin - chunk_begin));
  if (own_end < end) add_number<V>(numbers[left + right], {own_end - chunk_begin, keys.end}, s);
}

// ALiBi, relative bias and bias of the row's own keys.
template <class V>
inline void bias_scores(const Unit &unit, const Row &row, int64_t chunk_begin, Range keys, float *s) {
  const ScoreOptions &options = unit.call.options;
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
