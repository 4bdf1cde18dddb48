// Exact sums of products of codes: the instructions of each set for bytes of Vector::size columns,
// [column][4], times four codes of a row.
//
// The bytes are codes with a number added that makes them positive. Code is the type of a row's
// codes: int16_t, or SmallCode or NibbleCode for codes of 8 bits. DotProducts<Code> has
//
//   vectors(rows)      vectors of columns in a tile of that many rows: as many sums as there are
//                      registers for; they divide a panel
//   passes             steps in which products of four terms are added, each for some of the four
//   swaps_codes        whether the codes of a row lie in the order 0, 2, 1, 3
//   Sum                sums of products with Vector::size columns, each over lanes_of_sum lanes
//   load_terms, load_row_terms   what a pass takes of the bytes, and of the codes of a row
//   load_nibbles       the same of bytes with two codes each: of the first four terms (0), or of
//                      the second (1)
//   begin(value)       a sum with this value in each of its lanes
//   add(sum, terms, row)
//   sums_of(sum)       the sums as floats
//
// What is multiplied exceeds the codes by the number added to the bytes and by load_adds. Therefore
// all sums start with the number that begin_of computes from the sum of the codes of the row.
#pragma once

#include "elements.h"

namespace mha {
namespace {

constexpr int64_t terms_together = 4;  // terms of a column that lie side by side

template <class Code>
struct DotProducts;

// How codes of 8 bits are stored: as bytes where the set multiplies bytes.
#if defined(MHA_KERNELS_VNNI) || defined(MHA_KERNELS_DOTPROD)
using SmallCode = int8_t;
#else
using SmallCode = int16_t;
#endif
// The same where weights are nibbles, whose products with bytes may be added in 16 bits.
#if defined(MHA_KERNELS_SCALAR) || defined(__OPTIMIZE_SIZE__)
using NibbleCode = SmallCode;
#else
using NibbleCode = int8_t;
#endif

#if defined(MHA_KERNELS_AVX512) || defined(MHA_KERNELS_AVX2)

#if defined(MHA_KERNELS_AVX512)
#define MHA_MM(operation) _mm512_##operation
#define MHA_MM_SI(operation) _mm512_##operation##_si512
using Integers = __m512i;
constexpr int vectors_of_one_row = 3, vectors_of_many_rows = 3;
#else
#define MHA_MM(operation) _mm256_##operation
#define MHA_MM_SI(operation) _mm256_##operation##_si256
using Integers = __m256i;
constexpr int vectors_of_one_row = 6, vectors_of_many_rows = 2;
#endif

// These are written in assembly, since g++ would add into another register than that of the sum,
// for which there is none, and copy the result back.
MHA_INLINE Integers added_in_place(Integers sum, Integers products) {
  MHA_ADD_IN_PLACE("vpaddd", sum, products, MHA_MM(add_epi32)(sum, products));
  return sum;
}
MHA_INLINE Integers words_added_in_place(Integers sum, Integers products) {
  MHA_ADD_IN_PLACE("vpaddw", sum, products, MHA_MM(add_epi16)(sum, products));
  return sum;
}
// Holds terms in a register, or g++ would load and unpack them once for each row.
MHA_INLINE Integers kept(Integers terms) {
  MHA_HOLD(terms, "v");
  return terms;
}

#if defined(MHA_EMULATES_VNNI)
// For tests on machines that only have AVX2.
MHA_INLINE Integers add_products_of_words(Integers sum, Integers w, Integers x) {
  return added_in_place(sum, _mm256_madd_epi16(w, x));
}
MHA_INLINE Integers add_products_of_bytes(Integers sum, Integers w, Integers x) {
  sum = add_products_of_words(sum, _mm256_srli_epi16(_mm256_slli_epi16(w, 8), 8),
                              _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
  return add_products_of_words(sum, _mm256_srli_epi16(w, 8), _mm256_srai_epi16(x, 8));
}
#elif defined(MHA_KERNELS_VNNI)
// In assembly for the same reason.
#if defined(MHA_KERNELS_AVX512)
#define MHA_VNNI ""
#define MHA_VNNI_REGISTERS "v"
#define MHA_MM_VNNI(operation) MHA_MM(operation##_epi32)
#else
// VEX cannot encode registers 16 to 31, which exist if all files are compiled for AVX-512.
#define MHA_VNNI "%{vex%} "
#define MHA_VNNI_REGISTERS "x"
#define MHA_MM_VNNI(operation) MHA_MM(operation##_avx_epi32)
#endif
MHA_INLINE Integers add_products_of_words(Integers sum, Integers w, Integers x) {
  MHA_ADD_PRODUCTS_IN_PLACE(MHA_VNNI "vpdpwssd", MHA_VNNI_REGISTERS, sum, w, x,
                            MHA_MM_VNNI(dpwssd)(sum, w, x));
  return sum;
}
MHA_INLINE Integers add_products_of_bytes(Integers sum, Integers w, Integers x) {
  MHA_ADD_PRODUCTS_IN_PLACE(MHA_VNNI "vpdpbusd", MHA_VNNI_REGISTERS, sum, w, x,
                            MHA_MM_VNNI(dpbusd)(sum, w, x));
  return sum;
}
#undef MHA_VNNI
#undef MHA_VNNI_REGISTERS
#undef MHA_MM_VNNI
#else
MHA_INLINE Integers add_products_of_words(Integers sum, Integers w, Integers x) {
  return added_in_place(sum, MHA_MM(madd_epi16)(w, x));
}
#endif

MHA_INLINE Integers load_bytes(const uint8_t *p) {
  return MHA_MM_SI(loadu)(reinterpret_cast<const Integers *>(p));
}
// Four codes of a row, for every column.
MHA_INLINE Integers load_dword(const void *p) {
  int32_t dword;
  MHA_MEMCPY(&dword, p, sizeof dword);
  return MHA_MM(set1_epi32)(dword);
}
MHA_INLINE Vector floats_of_dwords(Integers x) { return MHA_MM(cvtepi32_ps)(x); }

// Words times words: of each column first the terms 0 and 2, which are the even bytes, then 1
// and 3.
template <>
struct DotProducts<int16_t> {
  static constexpr int passes = 2, lanes_of_sum = 1;
  static constexpr bool swaps_codes = true;
  static constexpr int32_t load_adds = 0;
  static constexpr int vectors(int rows) {
    return rows == 1 ? vectors_of_one_row : rows == 2 ? 3 : vectors_of_many_rows;
  }
  using Sum = Integers;
  using Terms = Integers;
  using RowTerms = Integers;

  static MHA_INLINE Terms low_nibble(Terms words) {
    return MHA_MM_SI(and)(words, MHA_MM(set1_epi16)(15));
  }
  static MHA_INLINE Terms load_terms(const uint8_t *p, int pass) {
    const Terms bytes = load_bytes(p);
    return kept(pass == 0 ? MHA_MM_SI(and)(bytes, MHA_MM(set1_epi16)(255))
                          : MHA_MM(srli_epi16)(bytes, 8));
  }
  static MHA_INLINE Terms load_nibbles(const uint8_t *p, int four, int pass) {
    const Terms bytes = load_bytes(p);
    if (pass == 0) return kept(low_nibble(four == 0 ? bytes : MHA_MM(srli_epi16)(bytes, 4)));
    return kept(four == 0 ? low_nibble(MHA_MM(srli_epi16)(bytes, 8))
                          : MHA_MM(srli_epi16)(bytes, 12));
  }
  static MHA_INLINE RowTerms load_row_terms(const int16_t *p, int pass) {
    return load_dword(p + 2 * pass);
  }
  static MHA_INLINE Sum begin(int32_t value) { return MHA_MM(set1_epi32)(value); }
  static MHA_INLINE Sum add(Sum sum, Terms w, RowTerms x) {
    return add_products_of_words(sum, w, x);
  }
  static MHA_INLINE Vector sums_of(Sum s) { return floats_of_dwords(s); }
};

// Unsigned bytes times signed ones.
template <>
struct DotProducts<int8_t> {
  static constexpr int passes = 1;
  static constexpr bool swaps_codes = false;
  static constexpr int32_t load_adds = 0;
  using Sum = Integers;
  using Terms = Integers;
  using RowTerms = Integers;

  static MHA_INLINE Terms load_terms(const uint8_t *p, int) { return kept(load_bytes(p)); }
  static MHA_INLINE Terms load_nibbles(const uint8_t *p, int four, int) {
    const Terms bytes = load_bytes(p);
    return kept(
        MHA_MM_SI(and)(four == 0 ? bytes : MHA_MM(srli_epi16)(bytes, 4), MHA_MM(set1_epi8)(15)));
  }
  static MHA_INLINE RowTerms load_row_terms(const int8_t *p, int) { return load_dword(p); }
#if defined(MHA_KERNELS_VNNI)
  static constexpr int lanes_of_sum = 1;
  static constexpr int vectors(int rows) {
    return rows <= 2 ? vectors_of_one_row : rows <= 4 ? 3 : vectors_of_many_rows;
  }
  static MHA_INLINE Sum begin(int32_t value) { return MHA_MM(set1_epi32)(value); }
  static MHA_INLINE Sum add(Sum sum, Terms w, RowTerms x) {
    return add_products_of_bytes(sum, w, x);
  }
  static MHA_INLINE Vector sums_of(Sum s) { return floats_of_dwords(s); }
#else
  // Nibbles times bytes, with two sums in 16 bits for each column, of at most 32 terms. They never
  // overflow: a sum has x * (w + 4) of each of its 16 terms, or x * -4 as long as that is to come,
  // and x * -4 of the other sum's terms, in all at most 16 * 127 * (11 + 4) = 30480.
  static constexpr int lanes_of_sum = 2;
  static constexpr int vectors(int rows) { return DotProducts<int16_t>::vectors(rows); }
  static MHA_INLINE Sum begin(int32_t value) {
    return MHA_MM(set1_epi16)(static_cast<int16_t>(value));
  }
  static MHA_INLINE Sum add(Sum sum, Terms w, RowTerms x) {
    return words_added_in_place(sum, MHA_MM(maddubs_epi16)(w, x));
  }
  static MHA_INLINE Vector sums_of(Sum s) {
    return floats_of_dwords(MHA_MM(madd_epi16)(s, MHA_MM(set1_epi16)(1)));
  }
#endif
};

#undef MHA_MM
#undef MHA_MM_SI

#elif defined(MHA_KERNELS_NEON)

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

#if defined(MHA_KERNELS_DOTPROD)
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
    int32_t four;
    MHA_MEMCPY(&four, p, sizeof four);
    return vreinterpret_s8_s32(vset_lane_s32(four, vdup_n_s32(0), 0));
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
    int32_t four;
    MHA_MEMCPY(&four, p, sizeof four);
    return vreinterpret_s8_s32(vdup_n_s32(four));
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

#elif defined(MHA_KERNELS_SCALAR)

// One number at a time.
template <>
struct DotProducts<int16_t> {
  static constexpr int passes = 1, lanes_of_sum = 1;
  static constexpr bool swaps_codes = false;
  static constexpr int32_t load_adds = 0;
  static constexpr int vectors(int) { return 4; }
  struct Four {
    int32_t of[4];
  };
  using Sum = int32_t;
  using Terms = Four;
  using RowTerms = Four;

  static MHA_INLINE Terms load_terms(const uint8_t *p, int) { return {{p[0], p[1], p[2], p[3]}}; }
  static MHA_INLINE Terms load_nibbles(const uint8_t *p, int four, int) {
    const int shift = 4 * four;
    return {{p[0] >> shift & 15, p[1] >> shift & 15, p[2] >> shift & 15, p[3] >> shift & 15}};
  }
  static MHA_INLINE RowTerms load_row_terms(const int16_t *p, int) {
    return {{p[0], p[1], p[2], p[3]}};
  }
  static MHA_INLINE Sum begin(int32_t value) { return value; }
  static MHA_INLINE Sum add(Sum sum, const Terms &w, const RowTerms &x) {
    for (int i = 0; i < 4; ++i)
      sum = static_cast<int32_t>(static_cast<uint32_t>(sum) +
                                 static_cast<uint32_t>(w.of[i] * x.of[i]));
    return sum;
  }
  static MHA_INLINE Vector sums_of(Sum s) { return {static_cast<float>(s)}; }
};

#else
#error "write the products of codes for this instruction set"
#endif

// The number that a sum starts with in each of its lanes, so that it ends as the sum of the
// products of codes. The bytes are codes + added, a multiple of 8; the codes of the row add up to
// row_sum.
template <class Code>
MHA_INLINE int32_t begin_of(int32_t row_sum, int32_t added) {
  using Dots = DotProducts<Code>;
  return static_cast<int32_t>(
      static_cast<uint32_t>(row_sum) *
      static_cast<uint32_t>(-((added + Dots::load_adds) / Dots::lanes_of_sum)));
}

// Brings the codes of a row, or the numbers that they are made of, into the order in which
// DotProducts<Code> takes them.
template <class Code, class Number>
MHA_INLINE void put_in_order_of_passes(Number *numbers, int64_t count) {
  if (!DotProducts<Code>::swaps_codes) return;
  for (int64_t i = 0; i < count; i += terms_together) {
    const Number second = numbers[i + 1];
    numbers[i + 1] = numbers[i + 2];
    numbers[i + 2] = second;
  }
}

}  // namespace
}  // namespace mha
