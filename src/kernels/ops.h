// The operations that the arithmetic contract allows (CONTRACT.md, section 1), for one instruction
// set per translation unit.
//
// V is a vector of V::size floats: an xsimd batch, or Scalar. Kernels are templates over V and use
// only what is here; what xsimd has no word for, or whose word is not allowed, is written with the
// instruction set's own intrinsics.
#pragma once

#include <stdint.h>

#include "fma.h"

#if defined(MHA_KERNELS_AVX512) || defined(MHA_KERNELS_AVX2)
#include <immintrin.h>

#include <xsimd/xsimd.hpp>
#elif defined(MHA_KERNELS_NEON)
#include <arm_neon.h>

#include <xsimd/xsimd.hpp>
#elif !defined(MHA_KERNELS_SCALAR)
#error "define one of MHA_KERNELS_SCALAR, MHA_KERNELS_AVX2, MHA_KERNELS_AVX512, MHA_KERNELS_NEON"
#endif

// Arithmetic has names of its own (mul_add, exp_of): an unqualified exp(batch) would find xsimd's
// by argument-dependent lookup.

#if defined(MHA_KERNELS_SCALAR)  // no more than a tile's rows and columns: the rest would only be
                                 // long
#define MHA_UNROLL MHA_UNROLL_AT_MOST(4)
#else
#define MHA_UNROLL MHA_UNROLL_AT_MOST(64)
#endif
#define MHA_EACH(i, count) MHA_UNROLL for (int i = 0; i < (count); ++i)

namespace mha {
namespace {

// With -Os some kernels also serve for calls that others would compute a little faster.
#if defined(__OPTIMIZE_SIZE__)
constexpr bool is_small_code = true;
#else
constexpr bool is_small_code = false;
#endif

// ---- Single floats

MHA_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  MHA_MEMCPY(&bits, &x, sizeof bits);
  return bits;
}

MHA_INLINE float float_of(uint32_t bits) {
  float x;
  MHA_MEMCPY(&x, &bits, sizeof x);
  return x;
}

#if !defined(MHA_KERNELS_SCALAR) || defined(__FP_FAST_FMAF) || defined(__FMA__) || \
    defined(__ARM_FEATURE_FMA) || defined(__riscv_flen)
MHA_INLINE float mul_add(float a, float b, float c) { return MHA_FMAF(a, b, c); }
#else
MHA_INLINE float mul_add(float a, float b, float c) { return fma_in_binary64(a, b, c); }
#endif

// x itself, but for a NaN, which gets the one payload that exp_of expects.
MHA_INLINE float canonical_nan(float x) { return x == x ? x : MHA_NAN; }

// A vector of one float: that of the scalar kernels, and in all kernels the one for what is left
// after whole vectors.
struct Scalar {
  static constexpr int size = 1;
  float x;
};

MHA_INLINE Scalar operator+(Scalar a, Scalar b) { return {a.x + b.x}; }
MHA_INLINE Scalar operator-(Scalar a, Scalar b) { return {a.x - b.x}; }
MHA_INLINE Scalar operator*(Scalar a, Scalar b) { return {a.x * b.x}; }
MHA_INLINE Scalar mul_add(Scalar a, Scalar b, Scalar c) { return {mul_add(a.x, b.x, c.x)}; }
MHA_INLINE Scalar max_of(Scalar s, Scalar m) { return {s.x > m.x ? s.x : m.x}; }
MHA_INLINE Scalar zero_if_less(Scalar x, Scalar limit, Scalar y) {
  return {x.x < limit.x ? 0.0f : y.x};
}
MHA_INLINE Scalar quotient_of(Scalar a, Scalar b) { return {a.x / b.x}; }
MHA_INLINE Scalar value_if_less(Scalar x, Scalar limit, Scalar value, Scalar y) {
  return {x.x < limit.x ? value.x : y.x};
}
MHA_INLINE Scalar zero_if_equal(Scalar x, Scalar value, Scalar y) {
  return {x.x == value.x ? 0.0f : y.x};
}
MHA_INLINE Scalar first_lanes(Scalar x, int64_t count, Scalar other) {
  return count > 0 ? x : other;
}
MHA_INLINE Scalar value_if_nan(Scalar x, Scalar value) { return {x.x != x.x ? value.x : x.x}; }
MHA_INLINE Scalar canonical_nan(Scalar x) { return {canonical_nan(x.x)}; }
MHA_INLINE Scalar times_power(Scalar p, Scalar, Scalar t) {
  return {float_of(bits_of(p.x) + (bits_of(t.x) << 23))};
}

template <class V>
MHA_INLINE V load(const float *p);
template <class V>
MHA_INLINE V all(float x);

template <>
MHA_INLINE Scalar load<Scalar>(const float *p) {
  return {*p};
}
template <>
MHA_INLINE Scalar all<Scalar>(float x) {
  return {x};
}
MHA_INLINE void store(float *p, Scalar v) { *p = v.x; }

// g++ reads an operand of several multiply-adds from the memory once for each of them, if it is not
// made to hold it in a register; for NEON only when it optimises for size, but there it reads two
// neighbours by one instruction only if it is made to hold both.
MHA_INLINE Scalar kept_in_register(Scalar x) { return x; }
MHA_INLINE Scalar kept_in_pair(Scalar x) { return x; }
template <class V>
constexpr bool multiplies_by_lanes = false;

// Returns p, but hides from the optimizer what it is. Otherwise g++ would compute what follows from
// it before a loop, in registers that are not free, or make a copy of the loop for each value.
template <class T>
MHA_INLINE T opaque(T p) {
  MHA_HOLD(p, "r");
  return p;
}

alignas(64) constexpr float lane_numbers[16] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                8, 9, 10, 11, 12, 13, 14, 15};

// ---- Vectors
//
// times_power(p, n, t) is p with n added to its exponent, for an integer n that also stands in the
// low 9 bits of t, and a normal result. It multiplies by 2^n, exactly; other results and NaN need
// not come out alike on all machines. sum16 adds the 16 partial sums of a row, held in 16 / V::size
// vectors, in the contract's tree (i, i+8), (i, i+4), (i, i+2), (i, i+1).

#if defined(MHA_KERNELS_SCALAR)

using Vector = Scalar;

MHA_INLINE float sum16(const Scalar (&t)[16]) {
  float s[8];
  for (int i = 0; i < 8; ++i) s[i] = t[i].x + t[i + 8].x;
  for (int i = 0; i < 4; ++i) s[i] = s[i] + s[i + 4];
  for (int i = 0; i < 2; ++i) s[i] = s[i] + s[i + 2];
  return s[0] + s[1];
}

MHA_INLINE float greatest(Scalar v) { return v.x; }

#else

#if defined(MHA_KERNELS_AVX512)
using Arch = xsimd::avx512f;
#elif defined(MHA_KERNELS_AVX2)
using Arch = xsimd::avx2;
#elif defined(MHA_KERNELS_NEON)
using Arch = xsimd::neon64;
#else
#error "say which xsimd architecture this instruction set is"
#endif

using Vector = xsimd::batch<float, Arch>;

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

#if defined(MHA_KERNELS_NEON)
MHA_INLINE Vector in_register(Vector x) {
  MHA_HOLD(x.data, "w");
  return x;
}
#elif defined(MHA_KERNELS_AVX512) || defined(MHA_KERNELS_AVX2)
MHA_INLINE Vector in_register(Vector x) {
  MHA_HOLD(x.data, "v");
  return x;
}
#else
#error "say which constraint stands for a vector register of this instruction set"
#endif
#if defined(__OPTIMIZE_SIZE__)
MHA_INLINE Vector kept_in_register(Vector x) { return in_register(x); }
MHA_INLINE Vector kept_in_pair(Vector x) { return in_register(x); }
#elif defined(MHA_KERNELS_NEON)
MHA_INLINE Vector kept_in_register(Vector x) { return x; }
MHA_INLINE Vector kept_in_pair(Vector x) { return in_register(x); }
#elif defined(MHA_KERNELS_AVX512) || defined(MHA_KERNELS_AVX2)
MHA_INLINE Vector kept_in_register(Vector x) { return in_register(x); }
MHA_INLINE Vector kept_in_pair(Vector x) { return x; }
#else
#error "say what the compiler has to be made to hold in registers of this instruction set"
#endif

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
// To p the first `count` lanes, or all of them if there are fewer; nothing behind them is touched.
MHA_INLINE void store_first(float *p, Vector x, int64_t count) {
#if defined(MHA_KERNELS_NEON)
  float lanes[4];
  store(lanes, x);
  for (int64_t i = 0; i < (count < 4 ? count : 4); ++i) p[i] = lanes[i];
#elif defined(MHA_KERNELS_AVX512)
  _mm512_mask_storeu_ps(
      p,
      _mm512_cmp_ps_mask(load<Vector>(lane_numbers), Vector(static_cast<float>(count)), _CMP_LT_OQ),
      x);
#elif defined(MHA_KERNELS_AVX2)
  _mm256_maskstore_ps(
      p, _mm256_castps_si256(load<Vector>(lane_numbers) < Vector(static_cast<float>(count))), x);
#else
#error "write store_first for this instruction set"
#endif
}
// By ==, since xsimd's != is false for NaN on some instruction sets.
MHA_INLINE Vector value_if_nan(Vector x, Vector value) { return xsimd::select(x == x, x, value); }
MHA_INLINE Vector canonical_nan(Vector x) { return value_if_nan(x, all<Vector>(MHA_NAN)); }

#if defined(MHA_KERNELS_AVX512)

MHA_INLINE Vector quotient_of(Vector a, Vector b) { return _mm512_div_ps(a, b); }
MHA_INLINE Vector mul_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
// vmaxps returns its second operand if the first is not greater, NaN included: exactly s > m ? s :
// m.
MHA_INLINE Vector max_of(Vector s, Vector m) { return _mm512_max_ps(s, m); }
MHA_INLINE Vector zero_if_less(Vector x, Vector limit, Vector y) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), y);
}
MHA_INLINE Vector times_power(Vector p, Vector n, Vector) { return _mm512_scalef_ps(p, n); }
MHA_INLINE __m256 upper_half(__m512 v) {
  return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
}

#elif defined(MHA_KERNELS_AVX2)

MHA_INLINE Vector quotient_of(Vector a, Vector b) { return _mm256_div_ps(a, b); }
MHA_INLINE Vector mul_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
MHA_INLINE Vector max_of(Vector s, Vector m) { return _mm256_max_ps(s, m); }
MHA_INLINE Vector zero_if_less(Vector x, Vector limit, Vector y) {
  return _mm256_andnot_ps(_mm256_cmp_ps(x, limit, _CMP_LT_OQ), y);
}
MHA_INLINE Vector times_power(Vector p, Vector, Vector t) {
  return _mm256_castsi256_ps(
      _mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(_mm256_castps_si256(t), 23)));
}

#elif defined(MHA_KERNELS_NEON)

MHA_INLINE Vector quotient_of(Vector a, Vector b) { return vdivq_f32(a, b); }
MHA_INLINE Vector mul_add(Vector a, Vector b, Vector c) { return vfmaq_f32(c, a, b); }
template <>
constexpr bool multiplies_by_lanes<Vector> = true;
// *sum += a * one lane of b, in the register of the sum. Four numbers of a row take one load then.
MHA_INLINE void add_product(Vector a, Vector b, int lane, Vector *sum) {
  if (lane == 0) MHA_ADD_PRODUCTS_OF_LANE(sum->data, a.data, b.data, 0);
  if (lane == 1) MHA_ADD_PRODUCTS_OF_LANE(sum->data, a.data, b.data, 1);
  if (lane == 2) MHA_ADD_PRODUCTS_OF_LANE(sum->data, a.data, b.data, 2);
  if (lane == 3) MHA_ADD_PRODUCTS_OF_LANE(sum->data, a.data, b.data, 3);
}
MHA_INLINE Vector max_of(Vector s, Vector m) { return vbslq_f32(vcgtq_f32(s, m), s, m); }
MHA_INLINE Vector zero_if_less(Vector x, Vector limit, Vector y) {
  return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(y), vcltq_f32(x, limit)));
}
MHA_INLINE Vector times_power(Vector p, Vector, Vector t) {
  return vreinterpretq_f32_u32(
      vaddq_u32(vreinterpretq_u32_f32(p), vshlq_n_u32(vreinterpretq_u32_f32(t), 23)));
}

#else
#error "write quotient_of, mul_add, max_of, zero_if_less and times_power for this instruction set"
#endif
#if defined(MHA_KERNELS_AVX512) || defined(MHA_KERNELS_AVX2)
// *sum += a * b, in the register of the sum. All lanes of b are the same number. The optimizer
// would move sums from one register to another in loops of many terms.
MHA_INLINE void add_product(Vector a, Vector b, int, Vector *sum) {
  MHA_ADD_PRODUCTS_IN_PLACE("vfmadd231ps", "v", sum->data, a.data, b.data,
                            mul_add(a, b, *sum).data);
}
#endif

// From 8 lanes (x86) or 4 lanes (NEON) down to one, by the contract's tree; and the greatest lane,
// for which any order will do.
#if defined(MHA_KERNELS_NEON)

MHA_INLINE float sum16(const Vector (&t)[4]) {
  const float32x4_t s = vaddq_f32(vaddq_f32(t[0], t[2]), vaddq_f32(t[1], t[3]));
  const float32x2_t s2 = vadd_f32(vget_low_f32(s), vget_high_f32(s));
  return vget_lane_f32(s2, 0) + vget_lane_f32(s2, 1);
}

MHA_INLINE float greatest(Vector v) {
  const float32x4_t swapped = vextq_f32(v, v, 2);
  const float32x4_t m = max_of(v, Vector(swapped));
  const float32x4_t pair = vrev64q_f32(m);
  return vgetq_lane_f32(max_of(Vector(m), Vector(pair)), 0);
}

#elif defined(MHA_KERNELS_AVX512) || defined(MHA_KERNELS_AVX2)

MHA_INLINE float sum8(__m256 s) {
  const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
}

MHA_INLINE float greatest8(__m256 v) {
  const __m128 m4 = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 m2 = _mm_max_ps(m4, _mm_movehl_ps(m4, m4));
  return _mm_cvtss_f32(_mm_max_ss(m2, _mm_movehdup_ps(m2)));
}

#if defined(MHA_KERNELS_AVX512)
MHA_INLINE float sum16(const Vector (&t)[1]) {
  return sum8(_mm256_add_ps(_mm512_castps512_ps256(t[0]), upper_half(t[0])));
}
MHA_INLINE float greatest(Vector v) {
  return greatest8(_mm256_max_ps(_mm512_castps512_ps256(v), upper_half(v)));
}
#else
MHA_INLINE float sum16(const Vector (&t)[2]) { return sum8(_mm256_add_ps(t[0], t[1])); }
MHA_INLINE float greatest(Vector v) { return greatest8(v); }
#endif

#else
#error "write sum16 and greatest for this instruction set"
#endif
#endif

// ---- Moving a 4 x 4 block: out[c * out_stride + r] = canonical_nan(row_r[c])

#if defined(MHA_KERNELS_SCALAR)
MHA_INLINE void transpose4x4(const float *row0, const float *row1, const float *row2,
                             const float *row3, float *out, int64_t out_stride) {
  const float *const rows[] = {row0, row1, row2, row3};
  for (int r = 0; r < 4; ++r)
    for (int c = 0; c < 4; ++c) out[c * out_stride + r] = canonical_nan(rows[r][c]);
}
#else
MHA_INLINE void transpose4x4(const float *row0, const float *row1, const float *row2,
                             const float *row3, float *out, int64_t out_stride) {
#if defined(MHA_KERNELS_NEON)
  using Quad = xsimd::batch<float, xsimd::neon64>;
#elif defined(MHA_KERNELS_AVX512) || defined(MHA_KERNELS_AVX2)
  using Quad = xsimd::batch<float, xsimd::sse2>;
#else
#error "say which xsimd architecture has the vectors of 4 floats beside this instruction set"
#endif
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
#endif

// ---- Moving 16 rows side by side: out[c * 16 + r] = rows[r * stride + c]

#if !defined(MHA_KERNELS_SCALAR)
// In each four lanes a row's four numbers at p, the rows `apart` numbers from one to the next.
MHA_INLINE Vector load_fours(const float *p, [[maybe_unused]] int64_t apart) {
#if defined(MHA_KERNELS_NEON)
  return vld1q_f32(p);
#elif defined(MHA_KERNELS_AVX512) || defined(MHA_KERNELS_AVX2)
  const __m256 two =
      _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)), _mm_loadu_ps(p + apart), 1);
#if defined(MHA_KERNELS_AVX512)
  const __m512 three =
      _mm512_insertf32x4(_mm512_castps256_ps512(two), _mm_loadu_ps(p + 2 * apart), 2);
  return _mm512_insertf32x4(three, _mm_loadu_ps(p + 3 * apart), 3);
#else
  return two;
#endif
#else
#error "write load_fours for this instruction set"
#endif
}
// Of each four lanes a0 b0 a1 b1, and a2 b2 a3 b3.
#if defined(MHA_KERNELS_NEON)
MHA_INLINE Vector zip_low(Vector a, Vector b) { return vzip1q_f32(a, b); }
MHA_INLINE Vector zip_high(Vector a, Vector b) { return vzip2q_f32(a, b); }
#elif defined(MHA_KERNELS_AVX512)
MHA_INLINE Vector zip_low(Vector a, Vector b) { return _mm512_unpacklo_ps(a, b); }
MHA_INLINE Vector zip_high(Vector a, Vector b) { return _mm512_unpackhi_ps(a, b); }
#elif defined(MHA_KERNELS_AVX2)
MHA_INLINE Vector zip_low(Vector a, Vector b) { return _mm256_unpacklo_ps(a, b); }
MHA_INLINE Vector zip_high(Vector a, Vector b) { return _mm256_unpackhi_ps(a, b); }
#else
#error "write zip_low and zip_high for this instruction set"
#endif
#endif

// ---- Butterflies: of each two lanes that lie h apart the sum and the difference, for h = 1, 2, 4,
// ... up to half of a vector

#if defined(MHA_KERNELS_SCALAR)
MHA_INLINE Scalar butterfly(Scalar x, int64_t) { return x; }
#else
MHA_INLINE Vector butterfly(Vector x, int64_t h) {
#if defined(MHA_KERNELS_AVX512)
  const __m512i lanes = _mm512_cvtps_epi32(load<Vector>(lane_numbers)),
                bit = _mm512_set1_epi32(static_cast<int>(h));
  const __m512 other = _mm512_permutexvar_ps(_mm512_xor_si512(lanes, bit), x);
  return _mm512_mask_sub_ps(_mm512_add_ps(x, other), _mm512_test_epi32_mask(lanes, bit), other, x);
#elif defined(MHA_KERNELS_AVX2)
  const __m256i lanes = _mm256_cvtps_epi32(load<Vector>(lane_numbers)),
                bit = _mm256_set1_epi32(static_cast<int>(h)),
                has_bit = _mm256_cmpeq_epi32(_mm256_and_si256(lanes, bit), bit);
  const Vector other = _mm256_permutevar8x32_ps(x, _mm256_xor_si256(lanes, bit));
  return _mm256_blendv_ps(x + other, other - x, _mm256_castsi256_ps(has_bit));
#elif defined(MHA_KERNELS_NEON)
  const uint32x4_t lanes = vcvtq_u32_f32(load<Vector>(lane_numbers)),
                   bit = vdupq_n_u32(static_cast<uint32_t>(h));
  const Vector other = h == 1 ? vrev64q_f32(x) : vextq_f32(x, x, 2);
  return vbslq_f32(vtstq_u32(lanes, bit), other - x, x + other);
#else
#error "write butterfly for this instruction set"
#endif
}
#endif

// Calls put(V{}, i) for i = 0, V::size, ... as long as a whole vector is left of `count` elements,
// and put(Scalar{}, i) for each element after that.
template <class V, class Put>
MHA_INLINE void in_vectors(int64_t count, const Put &put) {
  int64_t i = 0;
  for (; i + static_cast<int64_t>(V::size) <= count; i += V::size) put(V{}, i);
  for (; i < count; ++i) put(Scalar{}, i);
}

}  // namespace
}  // namespace mha
