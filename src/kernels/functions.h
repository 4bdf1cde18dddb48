// exp, tanh, log, sigmoid, softplus, the canonical form and the Hadamard transform.
//
// Each function is the sequence of operations in CONTRACT.md (sections 1, 2, 11, 12, 14 and 16),
// one line here for one line there, because the contract fixes its bits. Functions of several
// vectors take one step for all of them before the next: the steps of one vector depend on each
// other, those of different vectors run side by side.
#pragma once

#include "elements.h"

namespace mha {
namespace {

constexpr float infinity = MHA_INFINITY;

// A NaN becomes the one NaN of the contract, and -0 becomes +0. All results have this form.
template <class V>
MHA_INLINE V canonical(V x) {
  return value_if_nan(x + all<V>(0.0f), all<V>(MHA_NAN));
}

MHA_INLINE float canonical(float x) { return x != x ? float_of(0x7fc00000u) : x + 0.0f; }

// x[i] = exp(x[i]), for x[i] <= 0 or NaN.
//
// exp(x) is 2^n exp(r) with n = x / ln 2 rounded to an integer and r = x - n ln 2, which is small
// enough for a polynomial. Adding 1.5 * 2^23 rounds to an integer, which then stands in the low
// bits of the sum; ln 2 has two parts, so that r is exact enough. Several vectors go through the
// steps side by side, because each step waits for the one before.
//
// A NaN comes out as a NaN if the low 9 bits of its payload are 0, since times_power may add them
// to the exponent. That holds for canonical NaNs, for those that an operation makes of numbers, and
// for what any operation makes of these.
template <class V, int N>
MHA_INLINE void exp_of(V (&x)[N]) {
  V t[N], n[N], r[N], p[N];
  MHA_EACH(i, N) t[i] = mul_add(x[i], all<V>(0x1.715476p+0f), all<V>(0x1.8p+23f));
  MHA_EACH(i, N) n[i] = t[i] - all<V>(0x1.8p+23f);
  MHA_EACH(i, N) r[i] = mul_add(n[i], all<V>(-0x1.62e43p-1f), x[i]);
  MHA_EACH(i, N) r[i] = mul_add(n[i], all<V>(0x1.05c61p-29f), r[i]);
  MHA_EACH(i, N) p[i] = mul_add(all<V>(0x1.6a23d0p-10f), r[i], all<V>(0x1.123a20p-7f));
  MHA_EACH(i, N) p[i] = mul_add(p[i], r[i], all<V>(0x1.5558f2p-5f));
  MHA_EACH(i, N) p[i] = mul_add(p[i], r[i], all<V>(0x1.555492p-3f));
  MHA_EACH(i, N) p[i] = mul_add(p[i], r[i], all<V>(0x1.fffffcp-2f));
  MHA_EACH(i, N) p[i] = mul_add(p[i], r[i], all<V>(1.0f));
  MHA_EACH(i, N) p[i] = mul_add(p[i], r[i], all<V>(1.0f));
  MHA_EACH(i, N) x[i] = zero_if_less(x[i], all<V>(-0x1.5d589ep+6f), times_power(p[i], n[i], t[i]));
}

template <class V>
MHA_INLINE V exp_of(V x) {
  V one[1] = {x};
  exp_of(one);
  return one[0];
}

MHA_INLINE float exp_of(float x) { return exp_of(Scalar{x}).x; }

// x[i] = tanh(x[i]), by a polynomial near 0 and by exp elsewhere. Both are computed for every
// number, and the right one is taken: vectors cannot branch.
template <class V, int N>
MHA_INLINE void tanh_of(V (&x)[N]) {
  const V zero = all<V>(0.0f), one = all<V>(1.0f);
  V p[N], e[N];
  MHA_EACH(i, N) e[i] = all<V>(-2.0f) * max_of(x[i], zero - x[i]);
  exp_of(e);
  MHA_EACH(i, N) e[i] = one - quotient_of(e[i] + e[i], one + e[i]);
  MHA_EACH(i, N) e[i] = value_if_less(x[i], zero, zero - e[i], e[i]);
  MHA_EACH(i, N) p[i] = mul_add(all<V>(-0x1.82585ap-8f), x[i] * x[i], all<V>(0x1.54b8a2p-6f));
  MHA_EACH(i, N) p[i] = mul_add(p[i], x[i] * x[i], all<V>(-0x1.b898dep-5f));
  MHA_EACH(i, N) p[i] = mul_add(p[i], x[i] * x[i], all<V>(0x1.1109aep-3f));
  MHA_EACH(i, N) p[i] = mul_add(p[i], x[i] * x[i], all<V>(-0x1.55553ep-2f));
  MHA_EACH(i, N) p[i] = mul_add(x[i] * (x[i] * x[i]), p[i], x[i]);
  MHA_EACH(i, N)
    x[i] = value_if_less(max_of(x[i], zero - x[i]), all<V>(0x1.333334p-1f), p[i], e[i]);
}

// 1 / (1 + exp(-x)), for a canonical x.
template <class V>
MHA_INLINE V sigmoid_of(V x) {
  const V zero = all<V>(0.0f), one = all<V>(1.0f), e = exp_of(zero - max_of(x, zero - x));
  return quotient_of(value_if_less(x, zero, e, one), one + e);
}

// log(1 + exp(x)), for a canonical x.
template <class V>
MHA_INLINE V softplus_of(V x) {
  const V zero = all<V>(0.0f), e = exp_of(zero - max_of(x, zero - x));
  const V s = quotient_of(e, all<V>(2.0f) + e), z = s * s;
  V r = mul_add(all<V>(0x1.1ed7bep-2f), z, all<V>(0x1.1ebd0ep-2f));
  r = mul_add(r, z, all<V>(0x1.99d208p-2f));
  r = mul_add(r, z, all<V>(0x1.555502p-1f));
  r = r * z;
  const V h = (all<V>(0.5f) * e) * e;
  return max_of(x, zero) + (e - (h - s * (h + r)));
}

// log(x), for a normal x > 0 or NaN.
MHA_INLINE float log_of(float x) {
  const uint32_t i = bits_of(x);
  const int32_t k = static_cast<int32_t>(i - 0x3f3504f3u) >> 23;
  const float f = float_of(i - (static_cast<uint32_t>(k) << 23)) - 1.0f;
  const float s = f / (2.0f + f);
  const float z = s * s;
  float r = 0x1.e2fdd2p-3f;
  r = mul_add(r, z, 0x1.2438a8p-2f);
  r = mul_add(r, z, 0x1.999a7cp-2f);
  r = mul_add(r, z, 0x1.555554p-1f);
  r = r * z;
  const float h = (0.5f * f) * f;
  const float q = mul_add(s, h + r, static_cast<float>(k) * -0x1.05c61p-29f);
  const float y = mul_add(static_cast<float>(k), 0x1.62e43p-1f, f - (h - q));
  return x != x ? x : y;
}

// -1 in lanes whose number has the bit h.
template <int h>
struct Signs {
  alignas(64) float of[16] = {};
  constexpr Signs() {
    for (int i = 0; i < 16; ++i) of[i] = (i & h) != 0 ? -1.0f : 1.0f;
  }
};
template <int h>
constexpr Signs<h> signs;

// The sums of lanes h apart and, in those whose number has the bit h, the differences. The product
// is exact.
template <int h, class V>
MHA_INLINE V butterfly(V x) {
  if constexpr (h < V::size) x = mul_add(x, load<V>(signs<h>.of), swapped<h>(x));
  return x;
}

// The last steps of H of `count` vectors, from h on: half of them apart, or less than one vector.
template <class V, int count>
MHA_INLINE void hadamard_within(int64_t h, float factor, const float *from, float *x) {
  V y[count];
  MHA_EACH(i, count) y[i] = load<V>(from + i * V::size);
  MHA_UNROLL for (int apart = count / 2; apart > 0; apart /= 2) {
    MHA_EACH(i, count) {
      if ((i & apart) != 0) continue;
      const V a = y[i], b = y[i + apart];
      y[i] = a + b;
      y[i + apart] = a - b;
    }
  }
  if (count > 1 || h >= 8)
    MHA_EACH(i, count) y[i] = butterfly<8>(y[i]);
  if (count > 1 || h >= 4)
    MHA_EACH(i, count) y[i] = butterfly<4>(y[i]);
  if (count > 1 || h >= 2)
    MHA_EACH(i, count) y[i] = butterfly<2>(y[i]);
  if (count > 1 || h >= 1)
    MHA_EACH(i, count) y[i] = butterfly<1>(y[i]);
  MHA_EACH(i, count) store(x + i * V::size, canonical_nan(y[i] * all<V>(factor)));
}

// x = H(from) * factor, for a row that is whole blocks; both may be the same.
template <class V>
MHA_NOINLINE void hadamard(int64_t block, int64_t width, float factor, const float *from,
                           float *x) {
  constexpr int64_t lanes = V::size;
  constexpr int together = 4;  // vectors that stay in registers
  const bool are_many = block >= together * lanes;
  int64_t h = block / 2;
  for (; h >= (are_many ? together : 1) * lanes; h /= 2, from = x) {
    // The first number of each pair has no bit h in its place.
    for (int64_t i = 0; i < width; i += lanes + ((i + lanes) & h)) {
      const V a = load<V>(from + i), b = load<V>(from + i + h);
      store(x + i, a + b);
      store(x + i + h, a - b);
    }
  }
  int64_t i = 0;
  for (; are_many && i < width; i += together * lanes)
    hadamard_within<V, together>(h, factor, from + i, x + i);
  for (; i + lanes <= width; i += lanes) hadamard_within<V, 1>(h, factor, from + i, x + i);
  if (i == width) return;
  alignas(64) float last[lanes] = {};
  const size_t bytes = static_cast<size_t>(width - i) * sizeof(float);
  MHA_MEMCPY(last, from + i, bytes);
  hadamard_within<V, 1>(h, factor, last, last);
  MHA_MEMCPY(x + i, last, bytes);
}

}  // namespace
}  // namespace mha
