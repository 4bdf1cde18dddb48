// What the kernels for AVX2 and for AVX-512 have in common. Their headers include this when they
// have named their vectors, the intrinsics for those (MHA_MM), and how VNNI is written.
#pragma once

#include "batch.h"

namespace mha {
namespace {

MHA_INLINE Vector in_register(Vector x) {
  MHA_HOLD(x.data, "v");
  return x;
}
MHA_INLINE Vector kept_in_register(Vector x) { return in_register(x); }
MHA_INLINE Vector kept_in_pair(Vector x) { return is_small_code ? in_register(x) : x; }

MHA_INLINE Vector quotient_of(Vector a, Vector b) { return MHA_MM(div_ps)(a, b); }
MHA_INLINE Vector mul_add(Vector a, Vector b, Vector c) { return MHA_MM(fmadd_ps)(a, b, c); }
// vmaxps returns its second operand if the first is not greater, NaN included: exactly s > m ? s :
// m.
MHA_INLINE Vector max_of(Vector s, Vector m) { return MHA_MM(max_ps)(s, m); }
#if defined(MHA_EMULATES_BF16)
MHA_INLINE Vector plus_product(Vector x, Vector w, Vector sum) {
  sum = mul_add(second_of_pairs(x), second_of_pairs(w), sum);
  return mul_add(first_of_pairs(x), first_of_pairs(w), sum);
}
#elif defined(MHA_MULTIPLIES_PAIRS)
MHA_INLINE Vector plus_product(Vector x, Vector w, Vector sum) {
  return MHA_MM(dpbf16_ps)(sum, number_at<Pairs>(&x.data), number_at<Pairs>(&w.data));
}
#endif
// *sum += a * b, in the register of the sum. All lanes of b are the same number. The optimizer
// would move sums from one register to another in loops of many terms.
MHA_INLINE void add_product(Vector a, Vector b, int, Vector *sum) {
#if defined(MHA_EMULATES_BF16)
  *sum = plus_product(a, b, *sum);
#elif defined(MHA_MULTIPLIES_PAIRS)
  MHA_ADD_PRODUCTS_IN_PLACE("vdpbf16ps", "v", sum->data, a.data, b.data,
                            plus_product(a, b, *sum).data);
#else
  MHA_ADD_PRODUCTS_IN_PLACE("vfmadd231ps", "v", sum->data, a.data, b.data,
                            mul_add(a, b, *sum).data);
#endif
}

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

MHA_INLINE Vector zip_low(Vector a, Vector b) { return MHA_MM(unpacklo_ps)(a, b); }
MHA_INLINE Vector zip_high(Vector a, Vector b) { return MHA_MM(unpackhi_ps)(a, b); }
MHA_INLINE __m256 load_two_fours(const float *p, int64_t apart) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)), _mm_loadu_ps(p + apart), 1);
}
// Four numbers of 16 or 8 bits at a, followed by four at b.
template <class Element>
MHA_INLINE __m128i load_two_fours(const Element *a, const Element *b) {
  if constexpr (sizeof(Element) == 2)
    return _mm_unpacklo_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(a)),
                              _mm_loadl_epi64(reinterpret_cast<const __m128i *>(b)));
  return _mm_insert_epi32(_mm_cvtsi32_si128(number_at<int32_t>(a)), number_at<int32_t>(b), 1);
}

// ---- Products of codes

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
#elif defined(MHA_MULTIPLIES_BYTES)
// In assembly for the same reason.
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
#else
MHA_INLINE Integers add_products_of_words(Integers sum, Integers w, Integers x) {
  return added_in_place(sum, MHA_MM(madd_epi16)(w, x));
}
#endif

// The same for vectors that hold pairs of words, and sums of their products.
MHA_INLINE void add_words(Vector x, Vector w, Vector *sum) {
  sum->data = floats_with_bits(add_products_of_words(
      MHA_MM_SI(castps)(sum->data), MHA_MM_SI(castps)(w.data), MHA_MM_SI(castps)(x.data)));
}
MHA_INLINE Vector floats_of_integers(Vector x) {
  return MHA_MM(cvtepi32_ps)(MHA_MM_SI(castps)(x.data));
}

MHA_INLINE Integers load_bytes(const uint8_t *p) {
  return MHA_MM_SI(loadu)(reinterpret_cast<const Integers *>(p));
}
// Four codes of a row, for every column.
MHA_INLINE Integers load_dword(const void *p) { return MHA_MM(set1_epi32)(number_at<int32_t>(p)); }
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
#if defined(MHA_MULTIPLIES_BYTES)
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

}  // namespace
}  // namespace mha
