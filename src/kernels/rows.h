// Rows of numbers that may have fewer bits: as floats, and back.
#pragma once

#include "elements.h"
#include "functions.h"

namespace mha {
namespace {

// Of any type but int4; codes of int8 without their scales.
template <class V>
MHA_NOINLINE void widen(Storage storage, const void *from, int64_t count, float *to) {
  if (storage == Storage::f32) {
    MHA_MEMCPY(to, from, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  visit_storage(storage, [&](auto stored) MHA_INLINED {
    const auto *const numbers = static_cast<const typename decltype(stored)::Element *>(from);
    int64_t i = 0;
    for (; i + static_cast<int64_t>(V::size) <= count; i += V::size) store(to + i, load<V>(numbers + i));
    for (; i < count; ++i) store(to + i, load<Scalar>(numbers + i));
  });
}

// Blocks of a fixed size, of which a compiler makes vectors.
template <class Narrow>
MHA_INLINE void narrow_blocks(const float *from, int64_t count, uint16_t *to, Narrow narrow) {
  constexpr int64_t block = 16;
  int64_t i = 0;
  for (; i + block <= count; i += block) {
    for (int64_t j = 0; j < block; ++j) to[i + j] = narrow(from[i + j]);
  }
  for (; i < count; ++i) to[i] = narrow(from[i]);
}

// To f16 or bf16.
MHA_NOINLINE inline void narrow(Storage storage, const float *from, int64_t count, void *to) {
  uint16_t *const bits = static_cast<uint16_t *>(to);
  if (storage == Storage::f16) return narrow_blocks(from, count, bits, [](float x) MHA_INLINED { return f16_of(x); });
  narrow_blocks(from, count, bits, [](float x) MHA_INLINED { return bf16_of(x); });
}

// Rows that lie apart: the processor's own prefetching needs help.
MHA_INLINE void prefetch_row(const char *row, int64_t bytes) {
  for (int64_t b = 0; b < bytes; b += 64) MHA_PREFETCH_L2(row + b);
}

// The number at `index` of an array of the caller's, f32 or of 16 bits.
MHA_INLINE char *element_at(void *base, Storage storage, int64_t index) {
  return static_cast<char *>(base) + (storage == Storage::f32 ? 2 * index : index) * 2;
}
MHA_INLINE const char *element_at(const void *base, Storage storage, int64_t index) {
  return element_at(const_cast<void *>(base), storage, index);
}

}  // namespace
}  // namespace mha
