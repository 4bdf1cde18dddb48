// Vectors of AVX-512.
#pragma once

#if !defined(MHA_FLAGS_GIVEN) && !defined(_MSC_VER)
#if !defined(__AVX512F__) || !defined(__AVX512DQ__)
#error "compile this file with -mavx2 -mfma -mf16c -mavx512{f,cd,bw,dq,vl}"
#elif !defined(__OPTIMIZE__)
#error "compile this file with -O2"
#endif
#endif

#include <immintrin.h>

#include <xsimd/xsimd.hpp>

#include "dot_products.h"

#define MHA_MM(operation) _mm512_##operation
#define MHA_MM_SI(operation) _mm512_##operation##_si512
#define MHA_VNNI ""
#define MHA_VNNI_REGISTERS "v"
#define MHA_MM_VNNI(operation) MHA_MM(operation##_epi32)

namespace mha {
namespace {

using Vector = xsimd::batch<float, xsimd::avx512f>;
using Quad = xsimd::batch<float, xsimd::sse2>;
using Integers = __m512i;
#if defined(MHA_MULTIPLIES_PAIRS) && !defined(MHA_EMULATES_BF16)
using Pairs = __m512bh;
#endif
constexpr int vectors_of_one_row = 3, vectors_of_many_rows = 3;

// AVX-512 has 32 registers of 16 floats: 8 rows times the 3 vectors of a panel are 24 sums.
template <>
struct TileShape<16> {
  static constexpr int registers = 32;
  static constexpr int max_rows = 8, attend_rows = 6, exp_vectors = 4;
  static constexpr int panels_at_once(int64_t rows) { return rows <= 2 ? 2 : 1; }
  static constexpr int project_vectors(int) { return 3; }
  static constexpr int key_tiles(int rows) { return rows == 1 ? 8 : 4; }
  static constexpr int context_vectors(int) { return 4; }
  static constexpr bool has_few_row_forms = false;
};

}  // namespace
}  // namespace mha

namespace mha {
namespace {

MHA_INLINE __m512 floats_with_bits(Integers x) { return _mm512_castsi512_ps(x); }

}  // namespace
}  // namespace mha

#include "x86.h"

namespace mha {
namespace {

MHA_INLINE Vector zero_if_less(Vector x, Vector limit, Vector y) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), y);
}
MHA_INLINE Vector times_power(Vector p, Vector n, Vector) { return _mm512_scalef_ps(p, n); }
MHA_INLINE __m256 upper_half(__m512 v) {
  return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
}
MHA_INLINE void store_first(float *p, Vector x, int64_t count) {
  _mm512_mask_storeu_ps(
      p,
      _mm512_cmp_ps_mask(load<Vector>(lane_numbers), Vector(static_cast<float>(count)), _CMP_LT_OQ),
      x);
}
MHA_INLINE float sum16(const Vector (&t)[1]) {
  return sum8(_mm256_add_ps(_mm512_castps512_ps256(t[0]), upper_half(t[0])));
}
MHA_INLINE float greatest(Vector v) {
  return greatest8(_mm256_max_ps(_mm512_castps512_ps256(v), upper_half(v)));
}

MHA_INLINE Vector load_fours(const float *p, int64_t apart) {
  const __m256 two = load_two_fours(p, apart);
  const __m512 three =
      _mm512_insertf32x4(_mm512_castps256_ps512(two), _mm_loadu_ps(p + 2 * apart), 2);
  return _mm512_insertf32x4(three, _mm_loadu_ps(p + 3 * apart), 3);
}

template <int h>
MHA_INLINE Vector swapped(Vector x) {
  if constexpr (h == 8) return _mm512_shuffle_f32x4(x, x, 0x4e);
  if constexpr (h == 4) return _mm512_shuffle_f32x4(x, x, 0xb1);
  return _mm512_permute_ps(x, h == 2 ? 0x4e : 0xb1);
}

// ---- Stored numbers

MHA_INLINE __m256i load_16x16(const void *p) {
  return _mm256_loadu_si256(static_cast<const __m256i *>(p));
}

MHA_INLINE Vector widened(Stored<F16>, __m256i x) { return _mm512_cvtph_ps(x); }
MHA_INLINE Vector widened(Stored<Bf16>, __m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
MHA_INLINE Vector second_of_pairs(Vector x) { return x & Vector(float_of(0xffff0000u)); }
MHA_INLINE Vector first_of_pairs(Vector x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(x), 16));
}
#if defined(MHA_MULTIPLIES_PAIRS)
// The first, or the second, numbers of two pairs: that of the earlier pair in the upper half.
MHA_INLINE Vector firsts_of(Vector pair, Vector next) {
  return first_of_pairs(pair) | (next & Vector(float_of(0xffffu)));
}
MHA_INLINE Vector seconds_of(Vector pair, Vector next) {
  return second_of_pairs(pair) |
         Vector(_mm512_castsi512_ps(_mm512_srli_epi32(_mm512_castps_si512(next), 16)));
}
#endif
MHA_INLINE Vector widened(Stored<int8_t>, __m128i x) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x));
}

template <>
MHA_INLINE Vector load<Vector>(const F16 *p) {
  return widened(Stored<F16>{}, load_16x16(p));
}
template <>
MHA_INLINE Vector load<Vector>(const Bf16 *p) {
  return widened(Stored<Bf16>{}, load_16x16(p));
}
template <>
MHA_INLINE Vector load<Vector>(const int8_t *p) {
  return widened(Stored<int8_t>{}, _mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
}
template <class Element>
MHA_INLINE Vector load_fours(const Element *p, int64_t apart) {
  const __m128i low = load_two_fours(p, p + apart),
                high = load_two_fours(p + 2 * apart, p + 3 * apart);
  if constexpr (sizeof(Element) == 2)
    return widened(Stored<Element>{}, _mm256_set_m128i(high, low));
  else
    return widened(Stored<Element>{}, _mm_unpacklo_epi64(low, high));
}
MHA_INLINE void store_words(void *to, Vector x) {
  _mm256_storeu_si256(static_cast<__m256i *>(to), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(x)));
}
// Of 32 columns of values, the first vector holds the first eight of each 16, and the other vector
// the rest.
alignas(64) constexpr uint16_t word_places[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                  21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                  11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
MHA_INLINE __m512 paired(__m256i bytes) { return floats_with_bits(_mm512_cvtepi8_epi16(bytes)); }
MHA_INLINE __m128i load_8x16(const void *p) {
  return _mm_loadu_si128(static_cast<const __m128i *>(p));
}
template <bool are_keys, int count>
MHA_INLINE void pair_codes(const int8_t *p, int64_t apart, Vector (&pairs)[count]) {
  if constexpr (are_keys) {
    MHA_EACH(i, count) {
      pairs[i] = floats_with_bits(_mm512_permutexvar_epi16(
          _mm512_load_si512(word_places), _mm512_cvtepi8_epi16(load_16x16(p + i * 32))));
    }
  } else if constexpr (count % 2 == 0) {
    MHA_UNROLL for (int i = 0; i < count; i += 2) {
      const __m256i a = load_16x16(p + i * 16), b = load_16x16(p + i * 16 + apart);
      pairs[i] = paired(_mm256_unpacklo_epi8(a, b));
      pairs[i + 1] = paired(_mm256_unpackhi_epi8(a, b));
    }
  } else {
    static_assert(count == 1, "one vector or pairs of them");
    const __m128i a = load_8x16(p), b = load_8x16(p + apart);
    pairs[0] = paired(_mm256_set_m128i(_mm_unpackhi_epi8(a, b), _mm_unpacklo_epi8(a, b)));
  }
}
template <int count>
MHA_INLINE void pair_nibbles(const ValueNibble *p, int, int64_t apart, Vector (&pairs)[count]) {
  const auto low = [](__m512i x) MHA_INLINED {
    return _mm512_sub_epi16(_mm512_and_si512(x, _mm512_set1_epi16(15)), _mm512_set1_epi16(8));
  };
  if constexpr (count % 2 == 0) {
    MHA_UNROLL for (int i = 0; i < count; i += 2) {
      const __m128i a = load_8x16(p + i * 8), b = load_8x16(p + i * 8 + apart);
      const __m512i both =
          _mm512_cvtepi8_epi16(_mm256_set_m128i(_mm_unpackhi_epi8(a, b), _mm_unpacklo_epi8(a, b)));
      pairs[i] = floats_with_bits(low(both));
      pairs[i + 1] = floats_with_bits(_mm512_srai_epi16(both, 4));
    }
  } else {
    const __m128i bytes = _mm_unpacklo_epi8(_mm_set1_epi64x(number_at<int64_t>(p)),
                                            _mm_set1_epi64x(number_at<int64_t>(p + apart)));
    const __m512i both = _mm512_cvtepi8_epi16(_mm256_set_m128i(bytes, bytes));
    pairs[0] =
        floats_with_bits(_mm512_mask_blend_epi32(0xff00, low(both), _mm512_srai_epi16(both, 4)));
  }
}
template <>
constexpr bool widens_even_odd<Vector, ValueCode> = true;
template <>
constexpr bool widens_even_odd<Vector, ValueNibble> = true;
template <>
MHA_INLINE void join_even_odd<Vector>(Vector *even, Vector *odd) {
  const __m512 first = _mm512_shuffle_f32x4(*even, *odd, 0x44);
  *odd = _mm512_shuffle_f32x4(*even, *odd, 0xee);
  *even = first;
}
template <>
MHA_INLINE void split_even_odd<Vector>(Vector *first, Vector *last) {
  join_even_odd(first, last);
}

// The float of each code, for a permutation, which looks at the low 4 bits of each index only.
alignas(64) constexpr float int4_codes[16] = {-8, -7, -6, -5, -4, -3, -2, -1,
                                              0,  1,  2,  3,  4,  5,  6,  7};
template <>
MHA_INLINE Two<Vector> load<Vector>(const Int4 *p) {
  const __m512 codes = _mm512_load_ps(int4_codes);
  const __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
  return {_mm512_permutexvar_ps(both, codes),
          _mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), codes)};
}
// Lower halves of bytes in the first 8 lanes, upper ones in the others: below 2^24, the bits of a
// float count units from bit 0 on, and below 2^20 from bit 4 on. 0x80 makes code + 8 of a code.
alignas(64) constexpr uint32_t half_masks[16] = {15,   15,   15,   15,   15,   15,   15,   15,
                                                 0xf0, 0xf0, 0xf0, 0xf0, 0xf0, 0xf0, 0xf0, 0xf0};
alignas(64) constexpr uint32_t half_units[16] = {
    0x4b000000, 0x4b000000, 0x4b000000, 0x4b000000, 0x4b000000, 0x4b000000, 0x4b000000, 0x4b000000,
    0x49000080, 0x49000080, 0x49000080, 0x49000080, 0x49000080, 0x49000080, 0x49000080, 0x49000080};
alignas(64) constexpr float half_zeros[16] = {
    0x1.00001p23f, 0x1.00001p23f, 0x1.00001p23f, 0x1.00001p23f, 0x1.00001p23f, 0x1.00001p23f,
    0x1.00001p23f, 0x1.00001p23f, 0x1.0001p19f,  0x1.0001p19f,  0x1.0001p19f,  0x1.0001p19f,
    0x1.0001p19f,  0x1.0001p19f,  0x1.0001p19f,  0x1.0001p19f};
template <>
MHA_INLINE Vector load_part<Vector>(const CachedInt4 *p, int) {
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_set1_epi64x(number_at<int64_t>(p))),  // twice
      floats = _mm512_ternarylogic_epi32(bytes, _mm512_load_si512(half_masks),
                                         _mm512_load_si512(half_units), 0x6a);  // (b & m) ^ u
  return Vector(_mm512_castsi512_ps(floats)) - load<Vector>(half_zeros);
}

}  // namespace
}  // namespace mha

#undef MHA_MM
#undef MHA_MM_SI
