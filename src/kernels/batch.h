// Operations that are the same for every vector of xsimd's: the header of a set includes this when
// it has named its Vector, and Quad, the vector of 4 floats beside it.
#pragma once

#include "stored.h"

namespace mha {
namespace {

MHA_INLINE Vector first_of_pairs(Vector x);
MHA_INLINE Vector second_of_pairs(Vector x);

// xsimd has these operations for every instruction set, and rounds them as the contract says.
template <>
MHA_INLINE Vector load<Vector>(const float *p) {
  return Vector::load_unaligned(p);
}
template <>
MHA_INLINE Vector all<Vector>(float x) {
  return Vector(x);
}
MHA_INLINE void store(float *p, Vector v) { v.store_unaligned(p); }

MHA_INLINE Vector value_if_less(Vector x, Vector limit, Vector value, Vector y) {
  return xsimd::select(x < limit, value, y);
}
MHA_INLINE Vector zero_if_equal(Vector x, Vector value, Vector y) {
  return xsimd::select(x == value, Vector(0.0f), y);
}
// x in the first `count` lanes, other in the rest.
MHA_INLINE Vector first_lanes(Vector x, int64_t count, Vector other) {
  return xsimd::select(load<Vector>(lane_numbers) < Vector(static_cast<float>(count)), x, other);
}
// By ==, since xsimd's != is false for NaN on some instruction sets.
MHA_INLINE Vector value_if_nan(Vector x, Vector value) { return xsimd::select(x == x, x, value); }
MHA_INLINE Vector canonical_nan(Vector x) { return value_if_nan(x, all<Vector>(MHA_NAN)); }

template <>
MHA_INLINE Vector load<Vector>(const WordPair *p) {
  return load<Vector>(reinterpret_cast<const float *>(p));
}

// Pairs of bf16 as floats of one kind, which each set has its way to make.
template <>
MHA_INLINE Vector load<Vector>(const Bf16Pair *p) {
  return second_of_pairs(load<Vector>(reinterpret_cast<const float *>(p)));
}

// Moves a 4 x 4 block: out[c * out_stride + r] = canonical_nan(row_r[c])
MHA_INLINE void transpose4x4(const float *row0, const float *row1, const float *row2,
                             const float *row3, float *out, int64_t out_stride) {
  const auto quiet_row = [](const float *row) {
    const Quad x = Quad::load_unaligned(row);
    return xsimd::select(x == x, x, Quad(MHA_NAN));
  };
  const Quad r0 = quiet_row(row0), r1 = quiet_row(row1), r2 = quiet_row(row2), r3 = quiet_row(row3);
  const Quad even_low = xsimd::zip_lo(r0, r2), even_high = xsimd::zip_hi(r0, r2);
  const Quad odd_low = xsimd::zip_lo(r1, r3), odd_high = xsimd::zip_hi(r1, r3);
  xsimd::zip_lo(even_low, odd_low).store_unaligned(out);
  xsimd::zip_hi(even_low, odd_low).store_unaligned(out + out_stride);
  xsimd::zip_lo(even_high, odd_high).store_unaligned(out + 2 * out_stride);
  xsimd::zip_hi(even_high, odd_high).store_unaligned(out + 3 * out_stride);
}

}  // namespace
}  // namespace mha
