// Vectors of AVX2.
#pragma once

#define MHA_KERNELS_AVX2  // widens int4 to f16 (project.h)

#if !defined(MHA_FLAGS_GIVEN) && !defined(_MSC_VER)
#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "compile this file with -mavx2 -mfma -mf16c"
#elif !defined(__OPTIMIZE__)
#error "compile this file with -O2"
#endif
#endif

#include <immintrin.h>

#include <xsimd/xsimd.hpp>

#include "dot_products.h"

#define MHA_MM(operation) _mm256_##operation
#define MHA_MM_SI(operation) _mm256_##operation##_si256
// VEX cannot encode registers 16 to 31, which exist if all files are compiled for AVX-512.
#define MHA_VNNI "%{vex%} "
#define MHA_VNNI_REGISTERS "x"
#define MHA_MM_VNNI(operation) MHA_MM(operation##_avx_epi32)

namespace mha {
namespace {

using Vector = xsimd::batch<float, xsimd::avx2>;
using Quad = xsimd::batch<float, xsimd::sse2>;
using Integers = __m256i;
constexpr int vectors_of_one_row = 6, vectors_of_many_rows = 2;

// AVX2 has 16 registers of 8 floats: 6 rows times 2 vectors are 12 sums, and two vectors of columns
// and a number of a row pass by.
template <>
struct TileShape<8> {
  static constexpr int registers = 16;
  static constexpr int max_rows = 6, attend_rows = 6, exp_vectors = 2;
  static constexpr int panels_at_once(int64_t rows) { return rows == 1 ? 2 : 1; }
  static constexpr int project_vectors(int rows) { return rows <= 2 ? 6 : rows <= 4 ? 3 : 2; }
  static constexpr int key_tiles(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
  static constexpr int context_vectors(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : 2; }
  static constexpr bool has_few_row_forms = !is_small_code;
};

}  // namespace
}  // namespace mha

namespace mha {
namespace {

MHA_INLINE __m256 floats_with_bits(Integers x) { return _mm256_castsi256_ps(x); }

}  // namespace
}  // namespace mha

#include "x86.h"

namespace mha {
namespace {

MHA_INLINE Vector zero_if_less(Vector x, Vector limit, Vector y) {
  return _mm256_andnot_ps(_mm256_cmp_ps(x, limit, _CMP_LT_OQ), y);
}
MHA_INLINE Vector times_power(Vector p, Vector, Vector t) {
  return _mm256_castsi256_ps(
      _mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(_mm256_castps_si256(t), 23)));
}
MHA_INLINE void store_first(float *p, Vector x, int64_t count) {
  _mm256_maskstore_ps(
      p, _mm256_castps_si256(load<Vector>(lane_numbers) < Vector(static_cast<float>(count))), x);
}
MHA_INLINE float sum16(const Vector (&t)[2]) { return sum8(_mm256_add_ps(t[0], t[1])); }
MHA_INLINE float greatest(Vector v) { return greatest8(v); }

MHA_INLINE Vector load_fours(const float *p, int64_t apart) { return load_two_fours(p, apart); }

template <int h>
MHA_INLINE Vector swapped(Vector x) {
  if constexpr (h == 4) return _mm256_permute2f128_ps(x, x, 1);
  return _mm256_permute_ps(x, h == 2 ? 0x4e : 0xb1);
}

// ---- Stored numbers

MHA_INLINE __m128i load_8x16(const void *p) {
  return _mm_loadu_si128(static_cast<const __m128i *>(p));
}

MHA_INLINE Vector widened(Stored<F16>, __m128i x) { return _mm256_cvtph_ps(x); }
MHA_INLINE Vector widened(Stored<Bf16>, __m128i x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
MHA_INLINE Vector widened(Stored<int8_t>, __m128i x) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x));
}

template <>
MHA_INLINE Vector load<Vector>(const F16 *p) {
  return widened(Stored<F16>{}, load_8x16(p));
}
template <>
MHA_INLINE Vector load<Vector>(const Bf16 *p) {
  return widened(Stored<Bf16>{}, load_8x16(p));
}
template <>
MHA_INLINE Vector load<Vector>(const int8_t *p) {
  return widened(Stored<int8_t>{}, _mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)));
}
template <class Element>
MHA_INLINE Vector load_fours(const Element *p, int64_t apart) {
  return widened(Stored<Element>{}, load_two_fours(p, p + apart));
}
// Below 2^24, the bits of a float count units, which takes no shift.
template <>
MHA_INLINE Vector load_part<Vector>(const CachedInt4 *p, int i) {
  const __m256i bytes = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)));
  if (i == 1) return _mm256_cvtepi32_ps(_mm256_srai_epi32(bytes, 4));
  return Vector(_mm256_castsi256_ps(_mm256_or_si256(_mm256_and_si256(bytes, _mm256_set1_epi32(15)),
                                                    _mm256_set1_epi32(0x4b000000)))) -
         Vector(0x1p23f + 8.0f);
}
MHA_INLINE void store_words(void *to, Vector x) {
  const __m256i words = _mm256_cvtps_epi32(x);
  _mm_storeu_si128(static_cast<__m128i *>(to), _mm_packs_epi32(_mm256_castsi256_si128(words),
                                                               _mm256_extracti128_si256(words, 1)));
}
template <bool are_keys, int count>
MHA_INLINE void pair_codes(const int8_t *p, int64_t apart, Vector (&pairs)[count]) {
  static_assert(count % 2 == 0, "16 columns are two vectors");
  MHA_UNROLL for (int i = 0; i < count; i += 2) {
    const __m128i first = load_8x16(p + i * 8), second = load_8x16(p + i * 8 + apart);
    pairs[i] = floats_with_bits(_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(first, second)));
    pairs[i + 1] = floats_with_bits(_mm256_cvtepi8_epi16(_mm_unpackhi_epi8(first, second)));
  }
}
template <int count>
MHA_INLINE void pair_nibbles(const ValueNibble *p, int, int64_t apart, Vector (&pairs)[count]) {
  static_assert(count % 2 == 0, "16 columns are two vectors");
  MHA_UNROLL for (int i = 0; i < count; i += 2) {
    const __m256i both = _mm256_cvtepi8_epi16(
        _mm_unpacklo_epi8(_mm_cvtsi64_si128(number_at<int64_t>(p + i * 4)),
                          _mm_cvtsi64_si128(number_at<int64_t>(p + i * 4 + apart))));
    pairs[i] = floats_with_bits(
        _mm256_sub_epi16(_mm256_and_si256(both, _mm256_set1_epi16(15)), _mm256_set1_epi16(8)));
    pairs[i + 1] = floats_with_bits(_mm256_srai_epi16(both, 4));
  }
}
template <>
constexpr bool widens_even_odd<Vector, Bf16> = true;

// The numbers at even places are shifted to the upper half of each 32 bits, where those at odd
// places stand already; the other half is cleared.
alignas(32) constexpr uint32_t upper_halves[8] = {0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000,
                                                  0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000};
MHA_INLINE Vector first_of_pairs(Vector x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x), 16));
}
// Loops of few rows have no register for the constant.
MHA_INLINE Vector second_of_pairs(Vector x) {
  const __m256i *const mask = reinterpret_cast<const __m256i *>(upper_halves);
  const __m256i both = _mm256_castps_si256(x);
  __m256i second;
  MHA_AND_OF_MEMORY(second, both, mask, _mm256_and_si256(both, _mm256_load_si256(mask)));
  return _mm256_castsi256_ps(second);
}
template <class V, bool has_register>
MHA_INLINE Two<V> load_even_odd(const Bf16 *p) {
  const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
  const __m256i *const mask = reinterpret_cast<const __m256i *>(upper_halves);
  __m256i odd;
  if constexpr (has_register) {
    odd = _mm256_and_si256(both, _mm256_load_si256(mask));
  } else {  // g++ would hold the constant rather than a sum
    MHA_AND_OF_MEMORY(odd, both, mask, _mm256_and_si256(both, _mm256_load_si256(mask)));
  }
  return {_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)), _mm256_castsi256_ps(odd)};
}
template <>
MHA_INLINE void join_even_odd<Vector>(Vector *even, Vector *odd) {
  const __m256 low = _mm256_unpacklo_ps(*even, *odd), high = _mm256_unpackhi_ps(*even, *odd);
  *even = _mm256_permute2f128_ps(low, high, 0x20);
  *odd = _mm256_permute2f128_ps(low, high, 0x31);
}
template <>
MHA_INLINE void split_even_odd<Vector>(Vector *first, Vector *last) {
  const __m256 even = _mm256_shuffle_ps(*first, *last, 0x88),
               odd = _mm256_shuffle_ps(*first, *last, 0xdd);
  *first = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(even), 0xd8));
  *last = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(odd), 0xd8));
}

template <>
struct Int4Widened<Vector> {
  using Number = F16;
};

MHA_INLINE void store_code(F16 *to, Vector code) {
  _mm_storeu_si128(reinterpret_cast<__m128i *>(to), _mm256_cvtps_ph(code, 0));
}

// Widens 32 bytes of codes to f16: the codes in the low halves to `even`, the others to `odd`. The
// first 16 of each go there and the last 16 `apart` numbers further on. Only the upper byte of a
// code's f16 can be other than 0, and it is byte number code + 8 of the table.
MHA_INLINE void halves_of_codes(const Int4 *p, F16 *even, F16 *odd, int64_t apart) {
  const __m256i table = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(-0x38, -0x39, -0x3a, -0x3b, -0x3c, -0x3e, -0x40, -0x44,  // -8 .. -1
                    0x00, 0x3c, 0x40, 0x42, 0x44, 0x45, 0x46, 0x47));
  const __m256i low_half = _mm256_set1_epi8(15), zero = _mm256_setzero_si256();
  const __m256i both =
      _mm256_permute4x64_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)), 0xd8);
  const __m256i codes[2] = {_mm256_and_si256(both, low_half),
                            _mm256_and_si256(_mm256_srli_epi16(both, 4), low_half)};
  F16 *const to[2] = {even, odd};
  MHA_EACH(i, 2) {
    const __m256i high_bytes = _mm256_shuffle_epi8(table, codes[i]);
    _mm256_store_si256(reinterpret_cast<__m256i *>(to[i]), _mm256_unpacklo_epi8(zero, high_bytes));
    _mm256_store_si256(reinterpret_cast<__m256i *>(to[i] + apart),
                       _mm256_unpackhi_epi8(zero, high_bytes));
  }
}

}  // namespace
}  // namespace mha

#undef MHA_MM
#undef MHA_MM_SI
