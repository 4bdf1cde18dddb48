// Vectors of AArch64.
#pragma once

#include <arm_neon.h>

#include <xsimd/xsimd.hpp>

#include "dot_products.h"

namespace mha {
namespace {

using Vector = xsimd::batch<float, xsimd::neon64>;
using Quad = Vector;

template <>
struct TileShape<4> : TilesOf32Registers {};

}  // namespace
}  // namespace mha

#include "batch.h"

namespace mha {
namespace {

MHA_INLINE Vector in_register(Vector x) {
  MHA_HOLD(x.data, "w");
  return x;
}
MHA_INLINE Vector kept_in_register(Vector x) { return is_small_code ? in_register(x) : x; }
MHA_INLINE Vector kept_in_pair(Vector x) { return in_register(x); }

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
MHA_INLINE void store_first(float *p, Vector x, int64_t count) {
  float lanes[4];
  store(lanes, x);
  for (int64_t i = 0; i < (count < 4 ? count : 4); ++i) p[i] = lanes[i];
}

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

MHA_INLINE Vector load_fours(const float *p, int64_t) { return vld1q_f32(p); }
MHA_INLINE Vector zip_low(Vector a, Vector b) { return vzip1q_f32(a, b); }
MHA_INLINE Vector zip_high(Vector a, Vector b) { return vzip2q_f32(a, b); }

template <int h>
MHA_INLINE Vector swapped(Vector x) {
  return h == 1 ? vrev64q_f32(x) : vextq_f32(x, x, 2);
}

// ---- Stored numbers

template <>
MHA_INLINE Vector load<Vector>(const F16 *p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits)));
}
template <>
MHA_INLINE Vector load<Vector>(const Bf16 *p) {
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&p->bits), 16));
}
MHA_INLINE Vector second_of_pairs(Vector x) { return x & Vector(float_of(0xffff0000u)); }
MHA_INLINE Vector first_of_pairs(Vector x) {
  return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(x), 16));
}
// Loads four bytes; the other half of the vector is zero.
MHA_INLINE uint8x8_t load_4x8(const void *p) { return vcreate_u8(number_at<uint32_t>(p)); }
MHA_INLINE int32x4_t integers_of(uint8x8_t four) {
  return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(four))));
}

template <>
MHA_INLINE Vector load<Vector>(const int8_t *p) {
  return vcvtq_f32_s32(integers_of(load_4x8(p)));
}
template <class Element>
MHA_INLINE Vector load_fours(const Element *p, int64_t) {
  return load<Vector>(p);
}
MHA_INLINE void store_words(void *to, Vector x) {
  const int16x4_t words = vmovn_s32(vcvtnq_s32_f32(x));
  MHA_MEMCPY(to, &words, sizeof words);
}
template <bool are_keys, int count>
MHA_INLINE void pair_codes(const int8_t *p, int64_t apart, Vector (&pairs)[count]) {
  MHA_EACH(i, count) {
    const uint8x8_t both = vzip1_u8(load_4x8(p + i * 4), load_4x8(p + i * 4 + apart));
    pairs[i] = vreinterpretq_f32_s16(vmovl_s8(vreinterpret_s8_u8(both)));
  }
}
template <int count>
MHA_INLINE void pair_nibbles(const ValueNibble *p, int first, int64_t apart,
                             Vector (&pairs)[count]) {
  MHA_EACH(i, count) {
    const int part = (first + i) % 4;
    const ValueNibble *const at = p + i / 4 * 8 + part % 2 * 4;
    const int16x8_t both =
        vmovl_s8(vreinterpret_s8_u8(vzip1_u8(load_4x8(at), load_4x8(at + apart))));
    pairs[i] =
        vreinterpretq_f32_s16(part < 2 ? vsubq_s16(vandq_s16(both, vdupq_n_s16(15)), vdupq_n_s16(8))
                                       : vshrq_n_s16(both, 4));
  }
}
// The earlier words of pairs, and the later ones.
MHA_INLINE int16x4_t first_words(Vector x) { return vmovn_s32(vreinterpretq_s32_f32(x)); }
MHA_INLINE int16x4_t second_words(Vector x) { return vshrn_n_s32(vreinterpretq_s32_f32(x), 16); }
MHA_INLINE void add_words(Vector x, Vector w, Vector *sum) {
  const int32x4_t first = vmlal_s16(vreinterpretq_s32_f32(*sum), first_words(w), first_words(x));
  *sum = vreinterpretq_f32_s32(vmlal_s16(first, second_words(w), second_words(x)));
}
MHA_INLINE Vector floats_of_integers(Vector x) { return vcvtq_f32_s32(vreinterpretq_s32_f32(x)); }
// Flipping the highest of its 4 bits turns code + 8 into the code in two's complement. The even
// code then stands at the upper end of an integer and converts as a number with 28 bits after the
// point.
template <>
MHA_INLINE Two<Vector> load<Vector>(const Int4 *p) {
  const int32x4_t both = integers_of(veor_u8(load_4x8(p), vdup_n_u8(0x88)));
  return {vcvtq_n_f32_s32(vshlq_n_s32(both, 28), 28), vcvtq_f32_s32(vshrq_n_s32(both, 4))};
}
// Below 2^24, the bits of a float count units.
template <>
MHA_INLINE Vector load_part<Vector>(const CachedInt4 *p, int i) {
  const int32x4_t bytes = integers_of(load_4x8(p + i % 2 * 4));
  if (i >= 2) return vcvtq_f32_s32(vshrq_n_s32(bytes, 4));
  return Vector(vreinterpretq_f32_u32(
             vbslq_u32(vdupq_n_u32(15), vreinterpretq_u32_s32(bytes), vdupq_n_u32(0x4b000000)))) -
         Vector(0x1p23f + 8.0f);
}

// ---- Products of codes

// Words times words. A vector of a sum has the four terms of one column in its lanes, which sums_of
// adds up.
template <>
struct DotProducts<int16_t> {
  static constexpr int passes = 1, lanes_of_sum = 4;
  static constexpr bool swaps_codes = false;
  static constexpr int32_t load_adds = 0;
  static constexpr int vectors(int rows) { return rows == 1 ? 6 : rows == 2 ? 3 : 1; }
  struct Sum {
    int32x4_t of[4];  // a vector for each column
  };
  struct Terms {
    int16x4_t of[4];
  };
  using RowTerms = int16x4_t;

  static MHA_INLINE Terms widened(uint8x16_t bytes) {
    const int16x8_t low = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(bytes))),
                    high = vreinterpretq_s16_u16(vmovl_u8(vget_high_u8(bytes)));
    return {{vget_low_s16(low), vget_high_s16(low), vget_low_s16(high), vget_high_s16(high)}};
  }
  static MHA_INLINE Terms load_terms(const uint8_t *p, int) { return widened(vld1q_u8(p)); }
  static MHA_INLINE Terms load_nibbles(const uint8_t *p, int four, int) {
    const uint8x16_t bytes = vld1q_u8(p);
    return widened(four == 0 ? vandq_u8(bytes, vdupq_n_u8(15)) : vshrq_n_u8(bytes, 4));
  }
  static MHA_INLINE RowTerms load_row_terms(const int16_t *p, int) { return vld1_s16(p); }
  static MHA_INLINE Sum begin(int32_t value) {
    const int32x4_t same = vdupq_n_s32(value);
    return {{same, same, same, same}};
  }
  static MHA_INLINE Sum add(Sum sum, const Terms &w, RowTerms x) {
    MHA_EACH(i, 4) sum.of[i] = vmlal_s16(sum.of[i], w.of[i], x);
    return sum;
  }
  static MHA_INLINE Vector sums_of(const Sum &s) {
    return vcvtq_f32_s32(vpaddq_s32(vpaddq_s32(s.of[0], s.of[1]), vpaddq_s32(s.of[2], s.of[3])));
  }
};

#if defined(MHA_MULTIPLIES_BYTES)
// Signed bytes times signed bytes, or with FEAT_I8MM unsigned bytes times signed bytes.
template <>
struct DotProducts<int8_t> {
  static constexpr int passes = 1, lanes_of_sum = 1;
  static constexpr bool swaps_codes = false;
  static constexpr int vectors(int rows) { return rows <= 4 ? 6 : 4; }
  using Sum = int32x4_t;
  using RowTerms = int8x8_t;
#if defined(MHA_KERNELS_I8MM)
  static constexpr int32_t load_adds = 0;
  using Terms = uint8x16_t;

  static MHA_INLINE Terms load_terms(const uint8_t *p, int) { return vld1q_u8(p); }
  static MHA_INLINE Terms load_nibbles(const uint8_t *p, int four, int) {
    const Terms bytes = vld1q_u8(p);
    return four == 0 ? vandq_u8(bytes, vdupq_n_u8(15)) : vshrq_n_u8(bytes, 4);
  }
  static MHA_INLINE Sum add(Sum sum, Terms w, RowTerms x) { return vusdotq_lane_s32(sum, w, x, 0); }
#else
  static constexpr int32_t load_adds = -128;
  using Terms = int8x16_t;

  static MHA_INLINE Terms load_terms(const uint8_t *p, int) {
    return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p), vdupq_n_u8(128)));
  }
  // Less by 128, as what load_terms loads.
  static MHA_INLINE Terms load_nibbles(const uint8_t *p, int four, int) {
    const uint8x16_t bytes = vld1q_u8(p);
    return vreinterpretq_s8_u8(vorrq_u8(
        four == 0 ? vandq_u8(bytes, vdupq_n_u8(15)) : vshrq_n_u8(bytes, 4), vdupq_n_u8(128)));
  }
  static MHA_INLINE Sum add(Sum sum, Terms w, RowTerms x) { return vdotq_lane_s32(sum, w, x, 0); }
#endif
  static MHA_INLINE RowTerms load_row_terms(const int8_t *p, int) {
    return vreinterpret_s8_s32(vset_lane_s32(number_at<int32_t>(p), vdup_n_s32(0), 0));
  }
  static MHA_INLINE Sum begin(int32_t value) { return vdupq_n_s32(value); }
  static MHA_INLINE Vector sums_of(Sum s) { return vcvtq_f32_s32(s); }
};

#else
// Nibbles times bytes, with four sums in 16 bits for each column, of at most 32 terms. They never
// overflow: a sum has x * (w + 6) of each of its 8 terms, or x * -2 as long as that is to come, and
// x * -2 of the other sums' terms, in all at most 127 * (8 * 13 + 24 * 2) = 19304.
template <>
struct DotProducts<int8_t> {
  static constexpr int passes = 1, lanes_of_sum = 4;
  static constexpr bool swaps_codes = false;
  static constexpr int32_t load_adds = 0;
  static constexpr int vectors(int rows) { return rows == 1 ? 6 : rows == 2 ? 3 : 2; }
  struct Sum {
    int16x8_t of[2];  // a vector for each two columns
  };
  using Terms = int8x16_t;
  using RowTerms = int8x8_t;

  static MHA_INLINE Terms load_terms(const uint8_t *p, int) {
    return vreinterpretq_s8_u8(vld1q_u8(p));
  }
  static MHA_INLINE Terms load_nibbles(const uint8_t *p, int four, int) {
    const uint8x16_t bytes = vld1q_u8(p);
    return vreinterpretq_s8_u8(four == 0 ? vandq_u8(bytes, vdupq_n_u8(15)) : vshrq_n_u8(bytes, 4));
  }
  static MHA_INLINE RowTerms load_row_terms(const int8_t *p, int) {
    return vreinterpret_s8_s32(vdup_n_s32(number_at<int32_t>(p)));
  }
  static MHA_INLINE Sum begin(int32_t value) {
    const int16x8_t same = vdupq_n_s16(static_cast<int16_t>(value));
    return {{same, same}};
  }
  static MHA_INLINE Sum add(const Sum &sum, Terms w, RowTerms x) {
    return {{vmlal_s8(sum.of[0], vget_low_s8(w), x), vmlal_s8(sum.of[1], vget_high_s8(w), x)}};
  }
  static MHA_INLINE Vector sums_of(const Sum &s) {
    return vcvtq_f32_s32(vpaddq_s32(vpaddlq_s16(s.of[0]), vpaddlq_s16(s.of[1])));
  }
};
#endif

}  // namespace
}  // namespace mha
