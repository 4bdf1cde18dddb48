// Rotation of queries and keys: CONTRACT.md, section 5.
#pragma once

#include "kernels/tile.h"

namespace mha {
namespace {

// Rotates the first 2 * pairs elements of x, a row that stands at `position` unless the caller says otherwise, and is row `array_row` of
// the sequence in the caller's array.
template <class V>
MHA_NOINLINE void rotate(const Rotation &rotation, int64_t sequence, int64_t array_row, int64_t position, float *x) {
  if (rotation.positions) position = rotation.positions[sequence * rotation.rows_per_sequence + array_row];
  const float *const cos = rotation.cos + position * rotation.stride, *const sin = rotation.sin + position * rotation.stride;
  const int64_t pairs = rotation.pairs, first = rotation.is_interleaved ? 2 : 1, second = rotation.is_interleaved ? 1 : pairs;
  int64_t i = 0;
  for (; !rotation.is_interleaved && i + static_cast<int64_t>(V::size) <= pairs; i += V::size) {
    const V a = load<V>(x + i), b = load<V>(x + pairs + i), c = load<V>(cos + i), s = load<V>(sin + i);
    store(x + i, mul_add(a, c, all<V>(-0.0f) - b * s));
    store(x + pairs + i, mul_add(b, c, a * s));
  }
  for (; i < pairs; ++i) {
    const float a = x[i * first], b = x[i * first + second];
    x[i * first] = mul_add(a, cos[i], -(b * sin[i]));
    x[i * first + second] = mul_add(b, cos[i], a * sin[i]);
  }
}

}  // namespace
}  // namespace mha
