// Stored numbers: types of their elements, and how one number, or a vector of neighbours, is
// loaded. load<V>(p) widens V::size neighbours in registers, for a pointer p to each type of
// element.
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

// Two terms of a column of weights for bf16 arithmetic, the earlier one in the low half.
struct Bf16Pair {
  uint32_t bits;
};

// Two terms of a column for attention in integers: as words in a number of 32 bits, the earlier one
// in the low half; or as the bytes that a cache stores, of 16 keys side by side, or of two values.
struct WordPair {
  uint32_t bits;
};
struct KeyCode {
  int8_t code;
};
struct ValueCode {
  int8_t code;
};
struct ValueNibble {
  uint8_t bits;  // as CachedInt4
};

// Calls visit(Stored<Element>{}) with the type of a stored element. Weights of int4, int5 and int6
// are widened before (project.h); has_int4: values of a cache are not.
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
    default:
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
template <class V>
MHA_INLINE V load(const Bf16Pair *p);  // the later terms
template <class V>
MHA_INLINE V load(const WordPair *p);

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

// Whether elements are multiplied as integers.
template <class Element>
constexpr bool are_words = is_same<Element, WordPair> || is_same<Element, KeyCode> ||
                           is_same<Element, ValueCode> || is_same<Element, ValueNibble>;

// Numbers of a row: the element that holds number n, and a vector of them. Of int4, n is a multiple
// of 16, or of the vector's lanes.
template <class Element>
constexpr int numbers_of =
    is_same<Element, CachedInt4> || is_same<Element, Bf16Pair> || is_same<Element, ValueNibble> ? 2
                                                                                                : 1;
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
MHA_INLINE Scalar first_of_pairs(Scalar x) { return {float_of(bits_of(x.x) << 16)}; }
MHA_INLINE Scalar second_of_pairs(Scalar x) { return {float_of(bits_of(x.x) & 0xffff0000u)}; }
template <>
MHA_INLINE Scalar load<Scalar>(const int8_t *p) {
  return {static_cast<float>(*p)};
}
template <>
MHA_INLINE Two<Scalar> load<Scalar>(const Int4 *p) {
  return {{static_cast<float>((p->bits & 15) - 8)}, {static_cast<float>((p->bits >> 4) - 8)}};
}
// A vector may also hold integers: pairs of words, and sums of their products.
template <>
MHA_INLINE Scalar load<Scalar>(const WordPair *p) {
  return {float_of(p->bits)};
}
MHA_INLINE void add_words(Scalar x, Scalar w, Scalar *sum) {
  const uint32_t a = bits_of(x.x), b = bits_of(w.x);
  const auto low = [](uint32_t pair) { return static_cast<int32_t>(static_cast<int16_t>(pair)); };
  const int32_t products = low(a) * low(b) + low(a >> 16) * low(b >> 16);
  sum->x = float_of(bits_of(sum->x) + static_cast<uint32_t>(products));
}
MHA_INLINE Scalar floats_of_integers(Scalar x) {
  return {static_cast<float>(static_cast<int32_t>(bits_of(x.x)))};
}
// Rounds to words, behind each other.
MHA_INLINE void store_words(void *to, Scalar x) {
  const int16_t word = static_cast<int16_t>(storage::rounded(x.x));
  MHA_MEMCPY(to, &word, sizeof word);
}
// Pairs codes at p with those `apart` behind them, of keys with the next 16 bytes; of values of
// int4, vectors `first` and so on of those at p.
template <bool are_keys, int count>
MHA_INLINE void pair_codes(const int8_t *p, int64_t apart, Scalar (&pairs)[count]) {
  MHA_EACH(i, count) {
    pairs[i].x = float_of((static_cast<uint32_t>(p[i]) & 0xffff) |
                          static_cast<uint32_t>(p[i + apart]) << 16);
  }
}
template <int count>
MHA_INLINE void pair_nibbles(const ValueNibble *p, int, int64_t apart, Scalar (&pairs)[count]) {
  const CachedInt4 *const first = reinterpret_cast<const CachedInt4 *>(p), *second = first + apart;
  MHA_EACH(i, count) {
    pairs[i].x = float_of((static_cast<uint32_t>(cached_code(first, i)) & 0xffff) |
                          static_cast<uint32_t>(cached_code(second, i)) << 16);
  }
}

template <>
MHA_INLINE Scalar load_part<Scalar>(const CachedInt4 *p, int i) {
  return {static_cast<float>(cached_code(p, i))};
}

}  // namespace
}  // namespace mha
