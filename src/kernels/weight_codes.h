// Context in integers: codes of p, the exps of scores times the scales of their values, times values of int8 (CONTRACT.md, section 8).
#pragma once

#include "kernels/scores.h"

namespace mha {
namespace {

// As softmax, of some groups of 16 keys; p times the scales of the values becomes codes, behind which there is their scale.
template <class V>
MHA_NOINLINE float softmax_to_codes(const Unit &unit, const Groups &values, Range groups, float m, float *scores, float *to) {
  const int64_t begin = groups.begin * key_block, end = groups.end * key_block;
  alignas(64) float factors[chunk_keys];
  // Nothing of a key that takes no part may be touched, and not even be multiplied by 0.
  for (int64_t key = begin; key < end; key += V::size) {
    const V scale = load<V>(values.scales[block_of(key)] + place_in_block(key));
    store(factors + key, zero_if_equal(load<V>(scores + key), all<V>(-infinity), scale));
  }
  const float l = softmax<V>(scores + begin, groups.end - groups.begin, m);
  for (int64_t key = begin; key < end; key += V::size) store(scores + key, load<V>(scores + key) * load<V>(factors + key));
  for (int64_t i = 0; i < key_block; i += V::size) store(scores + end + i, all<V>(0.0f));
  const int32_t most_code = unit.call.options.context_arithmetic == Arithmetic::int8 ? 255 : 32767;
  const CodeScale scale = code_scale_of(scores + begin, most_code, end - begin);
  encode(scores + begin, end - begin, scale, reinterpret_cast<int16_t *>(to) + begin);
  to[weight_codes / 2] = scale.scale;
  return l;
}

// o[r] = weights[r] times the values of some groups.
template <class V>
MHA_NOINLINE void add_value_codes(const Groups &values, int64_t width, Range groups, const float *weights, int64_t rows, float *o) {
  for (int64_t r = 0; r < rows; ++r, weights += weight_floats, o += width) {
    for (int64_t c = 0; c < width; ++c) {
      int32_t sum = 0;
      for (int64_t key = groups.begin * key_block; key < groups.end * key_block; ++key) {
        const int8_t *const value = static_cast<const int8_t *>(values.at[block_of(key)]) + place_in_block(key) * values.row_stride;
        sum += reinterpret_cast<const int16_t *>(weights)[key] * value[c];
      }
      o[c] = static_cast<float>(sum) * weights[weight_codes / 2];
    }
  }
}

}  // namespace
}  // namespace mha
