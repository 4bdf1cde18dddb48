// Vectors of four floats by clang's own vectors: of WebAssembly, and of RISC-V. What the compiler
// would not make of them is written with the intrinsics of WebAssembly.
#pragma once

#if defined(__wasm__)
#include <wasm_simd128.h>
#endif

#if !defined(MHA_RELAXED)
#define MHA_WIDENS_NIBBLES  // to words
#endif
#include "dot_products.h"

namespace mha {
namespace {

typedef MHA_VECTOR(float) Floats;
typedef MHA_VECTOR_AMONG(float) FloatsInMemory;  // or clang moves bytes for RISC-V
typedef MHA_VECTOR(int32_t) Integers;
typedef MHA_VECTOR(uint32_t) Bits;
typedef MHA_VECTOR(int16_t) Words;
typedef MHA_VECTOR_OF(8, uint16_t) FourHalves;
typedef MHA_VECTOR_OF(4, int8_t) FourBytes;
typedef MHA_VECTOR_OF(4, uint8_t) FourUnsignedBytes;

// The same bits as another type.
template <class To, class From>
MHA_INLINE To as(From x) {
  To y;
  static_assert(sizeof x == sizeof y, "one vector");
  MHA_MEMCPY(&y, &x, sizeof y);
  return y;
}

struct Vector {
  static constexpr int size = 4;
  Floats data;
  Vector() = default;
  MHA_INLINE Vector(Floats x) : data(x) {}
};
MHA_INLINE Vector operator+(Vector a, Vector b) { return a.data + b.data; }
MHA_INLINE Vector operator-(Vector a, Vector b) { return a.data - b.data; }
MHA_INLINE Vector operator*(Vector a, Vector b) { return a.data * b.data; }
MHA_INLINE Vector quotient_of(Vector a, Vector b) { return a.data / b.data; }

#if defined(__wasm__)
// On x86-64 engines have 16 registers, and V8 spills with more than 9 sums. One term a pass: of
// several it spills as well.
template <>
struct TileShape<4> {
  static constexpr int registers = 16;
  static constexpr int max_rows = 3, attend_rows = 2, exp_vectors = 2;
  static constexpr int panels_at_once(int64_t) { return 1; }
  static constexpr int project_vectors(int rows) { return rows == 1 ? 6 : rows == 2 ? 4 : 3; }
  static constexpr int key_tiles(int rows) { return rows == 1 ? 2 : 1; }
  static constexpr int context_vectors(int) { return 4; }
  static constexpr bool has_few_row_forms = false;
};
#else
template <>
struct TileShape<4> : TilesOf32Registers {};
#endif

template <>
MHA_INLINE Vector load<Vector>(const float *p) {
  return Floats(*reinterpret_cast<const FloatsInMemory *>(p));
}
template <>
MHA_INLINE Vector all<Vector>(float x) {
  return Floats{x, x, x, x};
}
MHA_INLINE void store(float *p, Vector v) { *reinterpret_cast<FloatsInMemory *>(p) = v.data; }
MHA_INLINE void store_first(float *p, Vector x, int64_t count) {
  float lanes[4];
  store(lanes, x);
  for (int64_t i = 0; i < (count < 4 ? count : 4); ++i) p[i] = lanes[i];
}
MHA_INLINE Vector kept_in_register(Vector x) { return x; }
MHA_INLINE Vector kept_in_pair(Vector x) { return x; }

template <int h>
MHA_INLINE Vector swapped(Vector x) {
  return h == 1 ? MHA_SHUFFLE(x.data, x.data, 1, 0, 3, 2) : MHA_SHUFFLE(x.data, x.data, 2, 3, 0, 1);
}

// ---- Multiply-adds

#if defined(MHA_RELAXED)
// Fused, or the set is not offered (fuses_products).
MHA_INLINE Vector mul_add(Vector a, Vector b, Vector c) {
  return as<Floats>(
      wasm_f32x4_relaxed_madd(as<v128_t>(a.data), as<v128_t>(b.data), as<v128_t>(c.data)));
}
MHA_INLINE float mul_add(float a, float b, float c) {
  return mul_add(all<Vector>(a), all<Vector>(b), all<Vector>(c)).data[0];
}
#elif defined(__wasm__)
typedef MHA_VECTOR(double) Doubles;
typedef MHA_VECTOR(int64_t) Longs;

// As narrowed_sum (fma.h) but for its last step, and for sums that may lie elsewhere than in the
// middle of two floats, which stay as they are.
MHA_NOINLINE inline v128_t moved_sum(v128_t exact_product, v128_t exact_addend) {
  const Doubles product = as<Doubles>(exact_product), addend = as<Doubles>(exact_addend),
                sum = product + addend, addend_of_sum = sum - product,
                error = (product - (sum - addend_of_sum)) + (addend - addend_of_sum);
  const Longs is_middle = (as<Longs>(sum) & 0x0fffffff) == 0,
              is_below = error<0.0, is_above = error> 0.0, is_away = is_below ^ ~(sum < 0.0);
  const Longs step = (is_away & 2) - 1;  // 1 or -1
  return as<v128_t>(as<Longs>(sum) + (step & (is_below | is_above) & is_middle));
}
// As fma_in_binary64.
MHA_INLINE Vector mul_add(Vector a, Vector b, Vector c) {
  const auto low = [](Vector x)
                       MHA_INLINED { return wasm_f64x2_promote_low_f32x4(as<v128_t>(x.data)); };
  const auto high = [&](Vector x) MHA_INLINED { return low(swapped<2>(x)); };
  const v128_t product0 = wasm_f64x2_mul(low(a), low(b)), addend0 = low(c),
               product1 = wasm_f64x2_mul(high(a), high(b)), addend1 = high(c);
  v128_t sum0 = wasm_f64x2_add(product0, addend0), sum1 = wasm_f64x2_add(product1, addend1);
  const v128_t last =
      wasm_v128_and(wasm_i32x4_shuffle(sum0, sum1, 0, 2, 4, 6), wasm_i32x4_const_splat(0x0fffffff));
  if (!MHA_LIKELY(wasm_i32x4_all_true(last))) {
    sum0 = moved_sum(product0, addend0);
    sum1 = moved_sum(product1, addend1);
  }
  return as<Floats>(wasm_i64x2_shuffle(wasm_f32x4_demote_f64x2_zero(sum0),
                                       wasm_f32x4_demote_f64x2_zero(sum1), 0, 2));
}
#else
MHA_INLINE Vector mul_add(Vector a, Vector b, Vector c) {
  return MHA_FMA_OF_VECTORS(a.data, b.data, c.data);
}
#endif
MHA_INLINE void add_product(Vector a, Vector b, int, Vector *sum) { *sum = mul_add(a, b, *sum); }

// ---- Comparisons

MHA_INLINE Vector selected(Integers mask, Vector a, Vector b) {
  return as<Floats>((as<Integers>(a.data) & mask) | (as<Integers>(b.data) & ~mask));
}
MHA_INLINE Vector value_if_less(Vector x, Vector limit, Vector value, Vector y) {
  return selected(x.data < limit.data, value, y);
}
MHA_INLINE Vector zero_if_less(Vector x, Vector limit, Vector y) {
  return as<Floats>(as<Integers>(y.data) & ~(x.data < limit.data));
}
MHA_INLINE Vector zero_if_equal(Vector x, Vector value, Vector y) {
  return as<Floats>(as<Integers>(y.data) & ~(x.data == value.data));
}
MHA_INLINE Vector value_if_nan(Vector x, Vector value) {
  return selected(x.data == x.data, x, value);
}
MHA_INLINE Vector canonical_nan(Vector x) { return value_if_nan(x, all<Vector>(MHA_NAN)); }
MHA_INLINE Vector first_lanes(Vector x, int64_t count, Vector other) {
  return value_if_less(load<Vector>(lane_numbers), all<Vector>(static_cast<float>(count)), x,
                       other);
}
MHA_INLINE Vector max_of(Vector s, Vector m) {
#if defined(__wasm__)  // pmax(m, s) is m < s ? s : m
  return as<Floats>(wasm_f32x4_pmax(as<v128_t>(m.data), as<v128_t>(s.data)));
#else
  return selected(s.data > m.data, s, m);
#endif
}
MHA_INLINE Vector times_power(Vector p, Vector, Vector t) {
  return as<Floats>(as<Bits>(p.data) + (as<Bits>(t.data) << 23));
}

// ---- Lanes

MHA_INLINE Vector zip_low(Vector a, Vector b) { return MHA_SHUFFLE(a.data, b.data, 0, 4, 1, 5); }
MHA_INLINE Vector zip_high(Vector a, Vector b) { return MHA_SHUFFLE(a.data, b.data, 2, 6, 3, 7); }
MHA_INLINE float sum16(const Vector (&t)[4]) {
  const Vector s = (t[0] + t[2]) + (t[1] + t[3]), s2 = s + swapped<2>(s);
  return s2.data[0] + s2.data[1];
}
MHA_INLINE float greatest(Vector v) {
  const Vector m = max_of(v, swapped<2>(v));
  return max_of(m, swapped<1>(m)).data[0];
}
MHA_INLINE void transpose4x4(const float *row0, const float *row1, const float *row2,
                             const float *row3, float *out, int64_t out_stride) {
  const auto quiet_row = [](const float *row)
                             MHA_INLINED { return canonical_nan(load<Vector>(row)); };
  const Vector r0 = quiet_row(row0), r1 = quiet_row(row1), r2 = quiet_row(row2),
               r3 = quiet_row(row3);
  const Vector even_low = zip_low(r0, r2), even_high = zip_high(r0, r2);
  const Vector odd_low = zip_low(r1, r3), odd_high = zip_high(r1, r3);
  store(out, zip_low(even_low, odd_low));
  store(out + out_stride, zip_high(even_low, odd_low));
  store(out + 2 * out_stride, zip_low(even_high, odd_high));
  store(out + 3 * out_stride, zip_high(even_high, odd_high));
}

// ---- Stored numbers

// A product with 2^112 moves the exponent, that of subnormal numbers too; infinities and NaN get
// theirs.
template <>
MHA_INLINE Vector load<Vector>(const F16 *p) {
  const Bits bits = MHA_CONVERTED(number_at<FourHalves>(p), Bits);
  const Bits magnitude = (bits & 0x7fff) << 13, sign = (bits & 0x8000) << 16;
  const Bits infinity = as<Bits>(magnitude >= 0x7c00u << 13) & 0x7f800000u;
  return as<Floats>(as<Bits>(as<Floats>(magnitude) * 0x1p112f) | infinity | sign);
}
template <>
MHA_INLINE Vector load<Vector>(const Bf16 *p) {
  return as<Floats>(MHA_CONVERTED(number_at<FourHalves>(p), Bits) << 16);
}
MHA_INLINE Vector first_of_pairs(Vector x) { return as<Floats>(as<Bits>(x.data) << 16); }
MHA_INLINE Vector second_of_pairs(Vector x) { return as<Floats>(as<Bits>(x.data) & 0xffff0000u); }
template <>
MHA_INLINE Vector load<Vector>(const Bf16Pair *p) {
  return second_of_pairs(load<Vector>(reinterpret_cast<const float *>(p)));
}
template <>
MHA_INLINE Vector load<Vector>(const WordPair *p) {
  return load<Vector>(reinterpret_cast<const float *>(p));
}
MHA_INLINE Integers integers_of(const void *four) {
  return MHA_CONVERTED(number_at<FourBytes>(four), Integers);
}
MHA_INLINE Vector floats_of(Integers x) { return MHA_CONVERTED(x, Floats); }
template <>
MHA_INLINE Vector load<Vector>(const int8_t *p) {
  return floats_of(integers_of(p));
}
template <class Element>
MHA_INLINE Vector load_fours(const Element *p, int64_t) {
  return load<Vector>(p);
}
template <>
MHA_INLINE Two<Vector> load<Vector>(const Int4 *p) {
  const Integers both = MHA_CONVERTED(number_at<FourUnsignedBytes>(p), Integers);
  return {floats_of((both & 15) - 8), floats_of((both >> 4) - 8)};
}
MHA_INLINE Integers part_of(const void *sixteen, int i) {
  const Integers bytes = integers_of(static_cast<const char *>(sixteen) + i % 2 * 4);
  return i < 2 ? (bytes & 15) - 8 : bytes >> 4;
}
template <>
MHA_INLINE Vector load_part<Vector>(const CachedInt4 *p, int i) {
  return floats_of(part_of(p, i));
}

// ---- Pairs of words

MHA_INLINE Vector pairs_of(Integers first, Integers second) {
  return as<Floats>((first & 0xffff) | second << 16);
}
template <bool are_keys, int count>
MHA_INLINE void pair_codes(const int8_t *p, int64_t apart, Vector (&pairs)[count]) {
  MHA_EACH(i, count) pairs[i] = pairs_of(integers_of(p + i * 4), integers_of(p + i * 4 + apart));
}
template <int count>
MHA_INLINE void pair_nibbles(const ValueNibble *p, int first, int64_t apart,
                             Vector (&pairs)[count]) {
  MHA_EACH(i, count) {
    const ValueNibble *const at = p + (first + i) / 4 * 8;
    pairs[i] = pairs_of(part_of(at, (first + i) % 4), part_of(at + apart, (first + i) % 4));
  }
}
// 0x1.8p23 has no bits among the last 16, and the sum has those of the rounded number there.
MHA_INLINE void store_words(void *to, Vector x) {
  const FourHalves words = MHA_CONVERTED(as<Bits>(x.data + 0x1.8p23f), FourHalves);
  MHA_MEMCPY(to, &words, sizeof words);
}
MHA_INLINE Integers sums_of_words(Integers a, Integers b) {
#if defined(__wasm__)
  return as<Integers>(wasm_i32x4_dot_i16x8(as<v128_t>(a), as<v128_t>(b)));
#else
  return ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}
MHA_INLINE void add_words(Vector x, Vector w, Vector *sum) {
  const Integers products = sums_of_words(as<Integers>(w.data), as<Integers>(x.data));
  sum->data = as<Floats>(as<Bits>(sum->data) + as<Bits>(products));
}
MHA_INLINE Vector floats_of_integers(Vector x) { return floats_of(as<Integers>(x.data)); }

// ---- Products of codes

// Words times words: of each column first the terms 0 and 2, which are the even bytes, then 1
// and 3.
template <>
struct DotProducts<int16_t> {
  static constexpr int passes = 2, lanes_of_sum = 1;
  static constexpr bool swaps_codes = true;
  static constexpr int32_t load_adds = 0;
  static constexpr int vectors(int rows) { return rows == 1 ? 6 : rows == 2 ? 3 : 2; }
  using Sum = Bits;
  using Terms = Bits;
  using RowTerms = Bits;

  static MHA_INLINE Terms load_terms(const uint8_t *p, int pass) {
    return (number_at<Bits>(p) >> 8 * pass) & 0x00ff00ffu;
  }
  static MHA_INLINE Terms load_nibbles(const uint8_t *p, int four, int pass) {
    return (number_at<Bits>(p) >> (8 * pass + 4 * four)) & 0x000f000fu;
  }
  static MHA_INLINE RowTerms load_row_terms(const int16_t *p, int pass) {
    const uint32_t two = number_at<uint32_t>(p + 2 * pass);
    return Bits{two, two, two, two};
  }
  static MHA_INLINE Sum begin(int32_t value) { return as<Bits>(Integers{} + value); }
  static MHA_INLINE Sum add(Sum sum, Terms w, RowTerms x) {
    return sum + as<Bits>(sums_of_words(as<Integers>(w), as<Integers>(x)));
  }
  static MHA_INLINE Vector sums_of(Sum s) { return floats_of(as<Integers>(s)); }
};

#if defined(MHA_RELAXED)
// Signed bytes times bytes: of nibbles every engine computes the same. Whole bytes are unsigned, or
// with 128 subtracted signed, as the engine has them (dots_are_as_defined).
template <>
struct DotProducts<int8_t> {
  static constexpr int passes = 1, lanes_of_sum = 1;
  static constexpr bool swaps_codes = false;
#if defined(MHA_SIGNED_BYTES)
  static constexpr int32_t load_adds = -128;
#else
  static constexpr int32_t load_adds = 0;
#endif
  static constexpr int vectors(int rows) { return rows == 1 ? 6 : rows == 2 ? 3 : 2; }
  using Sum = v128_t;
  using Terms = v128_t;
  using RowTerms = v128_t;

  static MHA_INLINE Terms with_load_adds(Terms bytes) {
    return load_adds == 0 ? bytes : wasm_v128_xor(bytes, wasm_u8x16_const_splat(128));
  }
  static MHA_INLINE Terms load_terms(const uint8_t *p, int) {
    return with_load_adds(wasm_v128_load(p));
  }
  static MHA_INLINE Terms load_nibbles(const uint8_t *p, int four, int) {
    const Terms bytes = wasm_v128_load(p);
    return with_load_adds(four == 0 ? wasm_v128_and(bytes, wasm_i8x16_const_splat(15))
                                    : wasm_u8x16_shr(bytes, 4));
  }
  static MHA_INLINE RowTerms load_row_terms(const int8_t *p, int) {
    return wasm_v128_load32_splat(p);
  }
  static MHA_INLINE Sum begin(int32_t value) { return wasm_i32x4_splat(value); }
  static MHA_INLINE Sum add(Sum sum, Terms w, RowTerms x) {
    return wasm_i32x4_relaxed_dot_i8x16_i7x16_add(x, w, sum);
  }
  static MHA_INLINE Vector sums_of(Sum s) { return floats_of(as<Integers>(s)); }
};
#endif

}  // namespace
}  // namespace mha
