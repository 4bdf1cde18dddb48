// Rows of stored numbers (stored.h) in memory: as floats, back, and transposed.
#pragma once

#include MHA_VECTORS  // first: it says what ops.h takes for one number

#include "stored.h"

namespace mha {
namespace {

// Kernels are compiled for one set each: a vector is its Vector where they name no other type.
template <class V = Vector>
MHA_INLINE V all(float x);
template <class V = Vector>
MHA_INLINE V load(const float *p);
template <class V = Vector>
MHA_INLINE V load(const F16 *p);
template <class V = Vector>
MHA_INLINE V load(const int8_t *p);
template <class V = Vector>
MHA_INLINE Two<V> load(const Int4 *p);

// ---- Rows of such numbers as floats, and back

// Widens a row of any type. Codes come without their scales; those of int4 are values of a cache,
// up to a multiple of 16 of them.
MHA_NOINLINE inline void widen(Storage storage, const void *from, int64_t count, float *to) {
  if (storage == Storage::f32) {
    MHA_MEMCPY(to, from, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  visit_storage<true>(storage, [&](auto stored) MHA_INLINED {
    using Element = typename decltype(stored)::Element;
    const auto *const numbers = static_cast<const Element *>(from);
    if constexpr (is_same<Element, CachedInt4>) {
      constexpr int parts = static_cast<int>(16 / Vector::size);
      for (int64_t i = 0; i < count; i += 16) {
        MHA_EACH(part, parts)
          store(to + i + part * Vector::size, load_part<Vector>(numbers + i / 2, part));
      }
    } else {
      in_vectors<Vector>(count, [&](auto vector, int64_t i) MHA_INLINED {
        store(to + i, load<decltype(vector)>(numbers + i));
      });
    }
  });
}

// Four columns of as many rows as a vector has lanes: column[i] has number i of each row.
#if defined(MHA_KERNELS_SCALAR)
template <class Element>
MHA_INLINE void transpose_four(const Element *row, int64_t, Scalar (&column)[4]) {
  MHA_EACH(i, 4) column[i] = load<Scalar>(row + i);
}
#else
template <class Element>
MHA_INLINE void transpose_four(const Element *rows, int64_t stride, Vector (&column)[4]) {
  Vector row[4];
  MHA_EACH(i, 4) row[i] = load_fours(rows + i * stride, 4 * stride);
  const Vector even_low = zip_low(row[0], row[2]), even_high = zip_high(row[0], row[2]);
  const Vector odd_low = zip_low(row[1], row[3]), odd_high = zip_high(row[1], row[3]);
  column[0] = zip_low(even_low, odd_low);
  column[1] = zip_high(even_low, odd_low);
  column[2] = zip_low(even_high, odd_high);
  column[3] = zip_high(even_high, odd_high);
}
#endif

// Transposes 16 rows of `width` columns, widened, four columns at a time. The rest moves one number
// at a time.
template <class Element>
MHA_NOINLINE void transpose_rows(const Element *rows, int64_t stride, int64_t width, float *out) {
  int64_t c = 0;
  for (int first = 0; first < 16; first += static_cast<int>(Vector::size)) {
    const Element *from = rows + first * stride;
    float *to = out + first;
    for (c = 0; c + 4 <= width; c += 4, from += 4, to += 64) {
      Vector column[4];
      transpose_four(from, stride, column);
      MHA_EACH(i, 4) store(to + i * 16, column[i]);
    }
  }
  for (int r = 0; r < 16; ++r, rows += stride) {
    for (int64_t i = c; i < width; ++i) out[i * 16 + r] = load<Scalar>(rows + i).x;
  }
}

// Calls narrow in loops of a fixed length, which a compiler turns into vectors.
template <class Narrow>
MHA_INLINE void narrow_each(const float *from, int64_t count, uint16_t *to, Narrow narrow) {
  constexpr int64_t at_once = 16;
  int64_t i = 0;
  for (; i + at_once <= count; i += at_once) {
    for (int64_t j = 0; j < at_once; ++j) to[i + j] = narrow(from[i + j]);
  }
  for (; i < count; ++i) to[i] = narrow(from[i]);
}

// Rounds a row to f16 or bf16.
MHA_NOINLINE inline void narrow(Storage storage, const float *from, int64_t count, void *to) {
  uint16_t *const bits = static_cast<uint16_t *>(to);
  if (storage == Storage::f16)
    return narrow_each(from, count, bits, [](float x) MHA_INLINED { return f16_of(x); });
  narrow_each(from, count, bits, [](float x) MHA_INLINED { return bf16_of(x); });
}

// Writes a row of floats to an array of the caller's, of 32 or 16 bits.
MHA_INLINE void write_row(Storage storage, const float *from, int64_t count, void *to) {
  if (storage != Storage::f32) return narrow(storage, from, count, to);
  for (int64_t i = 0; i < count; ++i) static_cast<float *>(to)[i] = from[i];
}

// Prefetches a row of an array whose rows lie apart, which the processor does not do by itself.
MHA_INLINE void prefetch_row(const char *row, int64_t bytes) {
  for (int64_t b = 0; b < bytes; b += 64) MHA_PREFETCH_L2(row + b);
}

// The address of number `index` in an array of the caller's, of 32 or 16 bits.
MHA_INLINE char *element_at(void *base, Storage storage, int64_t index) {
  return static_cast<char *>(base) + (storage == Storage::f32 ? 2 * index : index) * 2;
}
MHA_INLINE const char *element_at(const void *base, Storage storage, int64_t index) {
  return element_at(const_cast<void *>(base), storage, index);
}

}  // namespace
}  // namespace mha
