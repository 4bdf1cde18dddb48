// Exact sums of products of codes, four terms side by side: bytes of Vector::size columns, [column][4], times four codes of a row.
//
// The bytes are codes with something added so that none is negative. DotProducts<Code> has the operations; Code is how a row's codes are
// stored: int16_t, or SmallCode for those of 8 bits.
//
//   Terms, Sum             four terms of Vector::size columns, and sums of products, in several parts; RowTerms: four terms of a row
//   load_terms, load_row_terms
//   low_nibbles, high_nibbles   of a part of terms loaded from bytes that hold two codes each
//   begin(value)           a part of a sum, with this value in each of the lanes_of_sum lanes that the sum of a column is spread over
//   add(sum, terms, row)   to one part of a sum, products of that part of the terms
//   sums_of(sum)           Vector::size sums, as floats
//
// What is multiplied may be greater than a code: by what was added to its byte, and by load_adds. All sums therefore begin with what
// begin_of makes of the sum of the row's codes.
#pragma once

#include "kernels/elements.h"

namespace mha {
namespace {

constexpr int64_t terms_together = 4;  // of a column, side by side

template <class Code>
struct DotProducts;

// Added to codes of int8 in the bytes of their columns.
template <class Code>
constexpr int32_t added_to_bytes = byte_added;

#if defined(MHA_KERNELS_VNNI) || defined(MHA_KERNELS_DOTPROD)
using SmallCode = int8_t;
using UnsignedCode = uint8_t;
#else
using SmallCode = int16_t;
using UnsignedCode = int16_t;
#endif
#if defined(MHA_KERNELS_VNNI)
template <>
constexpr int32_t added_to_bytes<uint8_t> = 0;
#endif

#if defined(MHA_KERNELS_AVX512) || defined(MHA_KERNELS_AVX2)
// Written out, since g++ would add to another register than that of the sum, for which there is none, and copy it back.
template <class Integers>
MHA_INLINE Integers added_in_place(Integers sum, Integers products) {
  __asm__("vpaddd {%1, %0, %0|%0, %0, %1}" : "+v"(sum) : "v"(products));
  return sum;
}
#endif
#if defined(MHA_EMULATES_VNNI)
// For tests on machines that have AVX2 alone.
MHA_INLINE __m256i add_products_of_words(__m256i sum, __m256i w, __m256i x) { return _mm256_add_epi32(sum, _mm256_madd_epi16(w, x)); }
MHA_INLINE __m256i add_products_of_bytes(__m256i sum, __m256i w, __m256i x) {
  sum = add_products_of_words(sum, _mm256_srli_epi16(_mm256_slli_epi16(w, 8), 8), _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
  return add_products_of_words(sum, _mm256_srli_epi16(w, 8), _mm256_srai_epi16(x, 8));
}
#elif defined(MHA_KERNELS_VNNI)
// Written out likewise.
#if defined(MHA_KERNELS_AVX512)
#define MHA_VNNI ""
#else
#define MHA_VNNI "%{vex%} "
#endif
template <class Integers>
MHA_INLINE Integers add_products_of_words(Integers sum, Integers w, Integers x) {
  __asm__(MHA_VNNI "vpdpwssd {%2, %1, %0|%0, %1, %2}" : "+v"(sum) : "v"(w), "v"(x));
  return sum;
}
template <class Integers>
MHA_INLINE Integers add_products_of_bytes(Integers sum, Integers w, Integers x) {
  __asm__(MHA_VNNI "vpdpbusd {%2, %1, %0|%0, %1, %2}" : "+v"(sum) : "v"(w), "v"(x));
  return sum;
}
#undef MHA_VNNI
#endif

#if defined(MHA_KERNELS_AVX512)

template <>
struct DotProducts<int16_t> {
  static constexpr int parts = 2, lanes_of_sum = 2;
  static constexpr int32_t load_adds = 0;
  using Part = __m512i;
  using RowTerms = __m512i;
  struct Terms {
    Part part[parts];
  };
  using Sum = Terms;

  static MHA_INLINE Terms load_terms(const uint8_t *p) {
    return {{_mm512_cvtepu8_epi16(load_16x16(p)), _mm512_cvtepu8_epi16(load_16x16(p + 32))}};
  }
  static MHA_INLINE Part low_nibbles(Part bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi16(15)); }
  static MHA_INLINE Part high_nibbles(Part bytes) { return _mm512_srli_epi16(bytes, 4); }
  static MHA_INLINE RowTerms load_row_terms(const int16_t *p) {
    int64_t four;
    __builtin_memcpy(&four, p, sizeof four);
    return _mm512_set1_epi64(four);
  }
  static MHA_INLINE Part begin(int32_t value) { return _mm512_set1_epi32(value); }
#if defined(MHA_KERNELS_VNNI)
  static MHA_INLINE Part add(Part sum, Part w, RowTerms x) { return add_products_of_words(sum, w, x); }
#else
  static MHA_INLINE Part add(Part sum, Part w, RowTerms x) { return added_in_place(sum, _mm512_madd_epi16(w, x)); }
#endif
  static MHA_INLINE Vector sums_of(const Sum &s) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    return _mm512_cvtepi32_ps(
        _mm512_add_epi32(_mm512_permutex2var_epi32(s.part[0], even, s.part[1]), _mm512_permutex2var_epi32(s.part[0], odd, s.part[1])));
  }
};

#if defined(MHA_KERNELS_VNNI)
// Unsigned bytes times signed ones.
template <>
struct DotProducts<int8_t> {
  static constexpr int parts = 1, lanes_of_sum = 1;
  static constexpr int32_t load_adds = 0;
  using Part = __m512i;
  using RowTerms = __m512i;
  struct Terms {
    Part part[parts];
  };
  using Sum = Terms;

  static MHA_INLINE Terms load_terms(const uint8_t *p) { return {{_mm512_loadu_si512(p)}}; }
  static MHA_INLINE RowTerms load_row_terms(const int8_t *p) {
    int32_t four;
    __builtin_memcpy(&four, p, sizeof four);
    return _mm512_set1_epi32(four);
  }
  static MHA_INLINE Part begin(int32_t value) { return _mm512_set1_epi32(value); }
  static MHA_INLINE Part add(Part sum, Part w, RowTerms x) { return add_products_of_bytes(sum, w, x); }
  static MHA_INLINE Part low_nibbles(Part bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(15)); }
  static MHA_INLINE Part high_nibbles(Part bytes) { return low_nibbles(_mm512_srli_epi16(bytes, 4)); }
  static MHA_INLINE Vector sums_of(const Sum &s) { return _mm512_cvtepi32_ps(s.part[0]); }
};

// Signed bytes times unsigned ones, the codes of a row.
template <>
struct DotProducts<uint8_t> : DotProducts<int8_t> {
  static MHA_INLINE RowTerms load_row_terms(const uint8_t *p) {
    return DotProducts<int8_t>::load_row_terms(reinterpret_cast<const int8_t *>(p));
  }
  static MHA_INLINE Part add(Part sum, Part w, RowTerms x) { return add_products_of_bytes(sum, x, w); }
};
#endif

#elif defined(MHA_KERNELS_AVX2)

template <>
struct DotProducts<int16_t> {
  static constexpr int parts = 2, lanes_of_sum = 2;
  static constexpr int32_t load_adds = 0;
  using Part = __m256i;
  using RowTerms = __m256i;
  struct Terms {
    Part part[parts];
  };
  using Sum = Terms;

  static MHA_INLINE __m128i load_16(const void *p) { return _mm_loadu_si128(static_cast<const __m128i *>(p)); }
  static MHA_INLINE Terms kept_in_registers(Part low, Part high) {
    __asm__("" : "+x"(low));  // g++ would read and widen them once for each row
    __asm__("" : "+x"(high));
    return {{low, high}};
  }
  static MHA_INLINE Terms load_terms(const uint8_t *p) {
    return kept_in_registers(_mm256_cvtepu8_epi16(load_16(p)), _mm256_cvtepu8_epi16(load_16(p + 16)));
  }
  static MHA_INLINE Part low_nibbles(Part bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi16(15)); }
  static MHA_INLINE Part high_nibbles(Part bytes) { return _mm256_srli_epi16(bytes, 4); }
  static MHA_INLINE RowTerms load_row_terms(const int16_t *p) {
    int64_t four;
    __builtin_memcpy(&four, p, sizeof four);
    return _mm256_set1_epi64x(four);
  }
  static MHA_INLINE Part begin(int32_t value) { return _mm256_set1_epi32(value); }
#if defined(MHA_KERNELS_VNNI)
  static MHA_INLINE Part add(Part sum, Part w, RowTerms x) { return add_products_of_words(sum, w, x); }
#else
  static MHA_INLINE Part add(Part sum, Part w, RowTerms x) { return added_in_place(sum, _mm256_madd_epi16(w, x)); }
#endif
  static MHA_INLINE Vector sums_of(const Sum &s) {
    return _mm256_cvtepi32_ps(_mm256_permute4x64_epi64(_mm256_hadd_epi32(s.part[0], s.part[1]), 0xd8));
  }
};

#if defined(MHA_KERNELS_VNNI)
template <>
struct DotProducts<int8_t> {
  static constexpr int parts = 1, lanes_of_sum = 1;
  static constexpr int32_t load_adds = 0;
  using Part = __m256i;
  using RowTerms = __m256i;
  struct Terms {
    Part part[parts];
  };
  using Sum = Terms;

  static MHA_INLINE Part load_32(const void *p) { return _mm256_loadu_si256(static_cast<const __m256i *>(p)); }
  static MHA_INLINE Terms load_terms(const uint8_t *p) { return {{load_32(p)}}; }
  static MHA_INLINE RowTerms load_row_terms(const int8_t *p) {
    int32_t four;
    __builtin_memcpy(&four, p, sizeof four);
    return _mm256_set1_epi32(four);
  }
  static MHA_INLINE Part begin(int32_t value) { return _mm256_set1_epi32(value); }
  static MHA_INLINE Part add(Part sum, Part w, RowTerms x) { return add_products_of_bytes(sum, w, x); }
  static MHA_INLINE Part low_nibbles(Part bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(15)); }
  static MHA_INLINE Part high_nibbles(Part bytes) { return low_nibbles(_mm256_srli_epi16(bytes, 4)); }
  static MHA_INLINE Vector sums_of(const Sum &s) { return _mm256_cvtepi32_ps(s.part[0]); }
};

// Signed bytes times unsigned ones, the codes of a row.
template <>
struct DotProducts<uint8_t> : DotProducts<int8_t> {
  static MHA_INLINE RowTerms load_row_terms(const uint8_t *p) {
    return DotProducts<int8_t>::load_row_terms(reinterpret_cast<const int8_t *>(p));
  }
  static MHA_INLINE Part add(Part sum, Part w, RowTerms x) { return add_products_of_bytes(sum, x, w); }
};
#endif

#elif defined(MHA_KERNELS_NEON)

template <>
struct DotProducts<int16_t> {
  static constexpr int parts = 4, lanes_of_sum = 4;
  static constexpr int32_t load_adds = 0;
  using Part = int32x4_t;
  using RowTerms = int16x4_t;
  struct Terms {
    int16x4_t part[parts];
  };
  struct Sum {
    Part part[parts];
  };

  static MHA_INLINE Terms quarters(int16x8_t low, int16x8_t high) {
    return {{vget_low_s16(low), vget_high_s16(low), vget_low_s16(high), vget_high_s16(high)}};
  }
  static MHA_INLINE Terms load_terms(const uint8_t *p) {
    const uint8x16_t bytes = vld1q_u8(p);
    return quarters(vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(bytes))), vreinterpretq_s16_u16(vmovl_u8(vget_high_u8(bytes))));
  }
  static MHA_INLINE int16x4_t low_nibbles(int16x4_t bytes) { return vand_s16(bytes, vdup_n_s16(15)); }
  static MHA_INLINE int16x4_t high_nibbles(int16x4_t bytes) { return vshr_n_s16(bytes, 4); }
  static MHA_INLINE RowTerms load_row_terms(const int16_t *p) { return vld1_s16(p); }
  static MHA_INLINE Part begin(int32_t value) { return vdupq_n_s32(value); }
  static MHA_INLINE Part add(Part sum, int16x4_t w, RowTerms x) { return vmlal_s16(sum, w, x); }
  static MHA_INLINE Vector sums_of(const Sum &s) {
    return vcvtq_f32_s32(vpaddq_s32(vpaddq_s32(s.part[0], s.part[1]), vpaddq_s32(s.part[2], s.part[3])));
  }
};

#if defined(MHA_KERNELS_DOTPROD)
// Signed bytes times signed ones.
template <>
struct DotProducts<int8_t> {
  static constexpr int parts = 1, lanes_of_sum = 1;
  static constexpr int32_t load_adds = -128;
  using Part = int32x4_t;
  using RowTerms = int8x8_t;
  struct Terms {
    int8x16_t part[parts];
  };
  struct Sum {
    Part part[parts];
  };

  static MHA_INLINE Terms load_terms(const uint8_t *p) { return {{vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p), vdupq_n_u8(128)))}}; }
  static MHA_INLINE RowTerms load_row_terms(const int8_t *p) {
    int32_t four;
    __builtin_memcpy(&four, p, sizeof four);
    return vreinterpret_s8_s32(vset_lane_s32(four, vdup_n_s32(0), 0));
  }
  static MHA_INLINE Part begin(int32_t value) { return vdupq_n_s32(value); }
  static MHA_INLINE Part add(Part sum, int8x16_t w, RowTerms x) { return vdotq_lane_s32(sum, w, x, 0); }
  // Less by 128, as bytes that load_terms loads are.
  static MHA_INLINE int8x16_t low_nibbles(int8x16_t bytes) { return vorrq_s8(vandq_s8(bytes, vdupq_n_s8(15)), vdupq_n_s8(-128)); }
  static MHA_INLINE int8x16_t high_nibbles(int8x16_t bytes) {
    const uint8x16_t given = veorq_u8(vreinterpretq_u8_s8(bytes), vdupq_n_u8(128));
    return vorrq_s8(vreinterpretq_s8_u8(vshrq_n_u8(given, 4)), vdupq_n_s8(-128));
  }
  static MHA_INLINE Vector sums_of(const Sum &s) { return vcvtq_f32_s32(s.part[0]); }
};

// Unsigned bytes times unsigned ones.
template <>
struct DotProducts<uint8_t> {
  static constexpr int parts = 1, lanes_of_sum = 1;
  static constexpr int32_t load_adds = 0;
  using Part = uint32x4_t;
  using RowTerms = uint8x8_t;
  struct Terms {
    uint8x16_t part[parts];
  };
  struct Sum {
    Part part[parts];
  };

  static MHA_INLINE Terms load_terms(const uint8_t *p) { return {{vld1q_u8(p)}}; }
  static MHA_INLINE RowTerms load_row_terms(const uint8_t *p) {
    return vreinterpret_u8_s8(DotProducts<int8_t>::load_row_terms(reinterpret_cast<const int8_t *>(p)));
  }
  static MHA_INLINE Part begin(int32_t value) { return vdupq_n_u32(static_cast<uint32_t>(value)); }
  static MHA_INLINE Part add(Part sum, uint8x16_t w, RowTerms x) { return vdotq_lane_u32(sum, w, x, 0); }
  static MHA_INLINE Vector sums_of(const Sum &s) { return vcvtq_f32_s32(vreinterpretq_s32_u32(s.part[0])); }
};
#endif

#elif defined(MHA_KERNELS_SCALAR)

template <>
struct DotProducts<int16_t> {
  static constexpr int parts = 1, lanes_of_sum = 1;
  static constexpr int32_t load_adds = 0;
  struct Four {
    int32_t of[4];
  };
  using Part = int32_t;
  using RowTerms = Four;
  struct Terms {
    Four part[parts];
  };
  struct Sum {
    Part part[parts];
  };

  static MHA_INLINE Terms load_terms(const uint8_t *p) {
    return {{{{p[0], p[1], p[2], p[3]}}}};
  }
  static MHA_INLINE Four low_nibbles(const Four &b) { return {{b.of[0] & 15, b.of[1] & 15, b.of[2] & 15, b.of[3] & 15}}; }
  static MHA_INLINE Four high_nibbles(const Four &b) { return {{b.of[0] >> 4, b.of[1] >> 4, b.of[2] >> 4, b.of[3] >> 4}}; }
  static MHA_INLINE RowTerms load_row_terms(const int16_t *p) { return {{p[0], p[1], p[2], p[3]}}; }
  static MHA_INLINE Part begin(int32_t value) { return value; }
  static MHA_INLINE Part add(Part sum, const Four &w, const RowTerms &x) {
    for (int i = 0; i < 4; ++i) sum = static_cast<int32_t>(static_cast<uint32_t>(sum) + static_cast<uint32_t>(w.of[i] * x.of[i]));
    return sum;
  }
  static MHA_INLINE Vector sums_of(const Sum &s) { return {static_cast<float>(s.part[0])}; }
};

#else
#error "write the products of codes for this instruction set"
#endif

// What a sum begins with, in each of its lanes, so that it ends as that of the products of codes: where bytes are codes + added, a multiple
// of 8, and a row's codes add up to row_sum. On the way it may overflow and come back.
template <class Code>
MHA_INLINE int32_t begin_of(int32_t row_sum, int32_t added) {
  using Dots = DotProducts<Code>;
  return static_cast<int32_t>(static_cast<uint32_t>(row_sum) * static_cast<uint32_t>(-((added + Dots::load_adds) / Dots::lanes_of_sum)));
}

}  // namespace
}  // namespace mha
