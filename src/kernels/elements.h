// Stored numbers as vectors of floats. load<V>(p) widens V::size neighbours in registers, for a
// pointer p to each type of element; widen and narrow convert whole rows in memory.
//
// f16 and bf16 widen exactly, but a NaN may become quiet. A code of int8 or int4 widens to the
// integer that it is, and whoever loads it applies the scale.
#pragma once

#include "../storage.h"
#include "kernels.h"
#include "ops.h"

namespace mha {
namespace {

struct F16 {
  uint16_t bits;
};
struct Bf16 {
  uint16_t bits;
};
// Two codes, each with 8 added: that of an even term in the low half, and that of the next term.
struct Int4 {
  uint8_t bits;
};

// Calls visit(Stored<Element>{}) with the type of a stored element. Weights of int4 are widened
// before (project.h); has_int4: values of a cache are not.
template <class Type>
struct Stored {
  using Element = Type;
};

template <bool has_int4 = false, class Visit>
MHA_INLINE void visit_storage(Storage storage, Visit visit) {
  switch (storage) {
    case Storage::f32:
      return visit(Stored<float>{});
    case Storage::f16:
      return visit(Stored<F16>{});
    case Storage::bf16:
      return visit(Stored<Bf16>{});
    case Storage::int8:
      return visit(Stored<int8_t>{});
    case Storage::int4:
      if constexpr (has_int4) visit(Stored<CachedInt4>{});
  }
}

// Loads as floats. Every instruction set defines these below for its vector; the compiler names
// what a new one lacks.
template <class V>
MHA_INLINE V load(const F16 *p);
template <class V>
MHA_INLINE V load(const Bf16 *p);
template <class V>
MHA_INLINE V load(const int8_t *p);

// Two vectors: the codes of two terms, or the numbers at even and at odd places.
template <class V>
struct Two {
  V even, odd;
};
template <class V>
MHA_INLINE Two<V> load(const Int4 *p);
// Vector number i of the 16 numbers at p.
template <class V>
MHA_INLINE V load_part(const CachedInt4 *p, int i);

// Whether a loop over these elements keeps the numbers at even places in one vector and those at
// odd places in the next. With AVX2 each of the two takes one instruction for bf16, where a vector
// of neighbours takes two; the loop puts its sums in order when it is done (SPECIAL_FORMS.md).
template <class V, class Element>
constexpr bool widens_even_odd = false;

// has_register: whether a register is free for the mask.
template <class V, bool has_register>
MHA_INLINE Two<V> load_even_odd(const Bf16 *p);
// join makes two vectors of neighbours out of the numbers at even and at odd places; split does the
// reverse.
template <class V>
MHA_INLINE void join_even_odd(V *even, V *odd);
template <class V>
MHA_INLINE void split_even_odd(V *first, V *last);

// What codes of int4 are widened to, once for all rows that are multiplied by them. With AVX2 that
// is f16: one look into a table of bytes widens 32 codes, and one instruction loads f16 as floats.
// AVX-512 has an instruction that makes floats of 16 codes at once.
template <class V>
struct Int4Widened {
  using Number = float;
};
template <class V>
using Int4Number = typename Int4Widened<V>::Number;

template <class V>
MHA_INLINE void store_code(float *to, V code) {
  store(to, code);
}

// std::is_same without a header of the C++ library, whose functions kernels must not share.
template <class A, class B>
constexpr bool is_same = false;
template <class A>
constexpr bool is_same<A, A> = true;

// Numbers of a row: the element that holds number n, and a vector of them. Of int4, n is a multiple
// of 16, or of the vector's lanes.
template <class Element>
constexpr int numbers_of = is_same<Element, CachedInt4> ? 2 : 1;
template <class V, class Element>
MHA_INLINE V load_from(const Element *p, int n) {
  if constexpr (is_same<Element, CachedInt4>)
    return load_part<V>(p + n / 16 * 8, n % 16 / static_cast<int>(V::size));
  else
    return load<V>(p + n);
}

// ---- One number at a time

template <>
MHA_INLINE Scalar load<Scalar>(const F16 *p) {
  return {f32_of_f16(p->bits)};
}
template <>
MHA_INLINE Scalar load<Scalar>(const Bf16 *p) {
  return {f32_of_bf16(p->bits)};
}
template <>
MHA_INLINE Scalar load<Scalar>(const int8_t *p) {
  return {static_cast<float>(*p)};
}
template <>
MHA_INLINE Two<Scalar> load<Scalar>(const Int4 *p) {
  return {{static_cast<float>((p->bits & 15) - 8)}, {static_cast<float>((p->bits >> 4) - 8)}};
}
template <>
MHA_INLINE Scalar load_part<Scalar>(const CachedInt4 *p, int i) {
  return {static_cast<float>(cached_code(p, i))};
}

// ---- Vectors of each instruction set

#if defined(MHA_KERNELS_AVX512) || defined(MHA_KERNELS_AVX2)
// Four numbers of 16 or 8 bits at a, followed by four at b.
template <class Element>
MHA_INLINE __m128i load_two_fours(const Element *a, const Element *b) {
  if constexpr (sizeof(Element) == 2)
    return _mm_unpacklo_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(a)),
                              _mm_loadl_epi64(reinterpret_cast<const __m128i *>(b)));
  int32_t four[2];
  MHA_MEMCPY(&four[0], a, sizeof four[0]);
  MHA_MEMCPY(&four[1], b, sizeof four[1]);
  return _mm_insert_epi32(_mm_cvtsi32_si128(four[0]), four[1], 1);
}
#endif

#if defined(MHA_KERNELS_AVX512)

MHA_INLINE __m256i load_16x16(const void *p) {
  return _mm256_loadu_si256(static_cast<const __m256i *>(p));
}

MHA_INLINE Vector widened(Stored<F16>, __m256i x) { return _mm512_cvtph_ps(x); }
MHA_INLINE Vector widened(Stored<Bf16>, __m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
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
  int64_t eight;
  MHA_MEMCPY(&eight, p, sizeof eight);
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_set1_epi64x(eight)),  // twice
      floats = _mm512_ternarylogic_epi32(bytes, _mm512_load_si512(half_masks),
                                         _mm512_load_si512(half_units), 0x6a);  // (b & m) ^ u
  return Vector(_mm512_castsi512_ps(floats)) - load<Vector>(half_zeros);
}

#elif defined(MHA_KERNELS_AVX2)

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
template <>
constexpr bool widens_even_odd<Vector, Bf16> = true;

// The numbers at even places are shifted to the upper half of each 32 bits, where those at odd
// places stand already; the other half is cleared.
alignas(32) constexpr uint32_t upper_halves[8] = {0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000,
                                                  0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000};
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

#elif defined(MHA_KERNELS_NEON)

template <>
MHA_INLINE Vector load<Vector>(const F16 *p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits)));
}
template <>
MHA_INLINE Vector load<Vector>(const Bf16 *p) {
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&p->bits), 16));
}
// Loads four bytes; the other half of the vector is zero.
MHA_INLINE uint8x8_t load_4x8(const void *p) {
  uint32_t four;
  MHA_MEMCPY(&four, p, sizeof four);
  return vcreate_u8(four);
}
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

#endif

// ---- Rows of such numbers as floats, and back

// Widens a row of any type. Codes come without their scales; those of int4 are values of a cache,
// up to a multiple of 16 of them.
template <class V>
MHA_NOINLINE void widen(Storage storage, const void *from, int64_t count, float *to) {
  if (storage == Storage::f32) {
    MHA_MEMCPY(to, from, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  visit_storage<true>(storage, [&](auto stored) MHA_INLINED {
    using Element = typename decltype(stored)::Element;
    const auto *const numbers = static_cast<const Element *>(from);
    if constexpr (is_same<Element, CachedInt4>) {
      constexpr int parts = static_cast<int>(16 / V::size);
      for (int64_t i = 0; i < count; i += 16) {
        MHA_EACH(part, parts) store(to + i + part * V::size, load_part<V>(numbers + i / 2, part));
      }
    } else {
      in_vectors<V>(count, [&](auto vector, int64_t i)
                               MHA_INLINED { store(to + i, load<decltype(vector)>(numbers + i)); });
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
