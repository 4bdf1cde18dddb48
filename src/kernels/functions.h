// exp, log and the canonical form: CONTRACT.md, sections 1, 8 and 9, operation by operation.
#pragma once

#include "kernels/ops.h"

namespace mha {
namespace {

constexpr float infinity = __builtin_inff();

template <class V>
MHA_INLINE V canonical(V x) {
  return value_if_nan(x + all<V>(0.0f), all<V>(__builtin_nanf("")));
}

MHA_INLINE float canonical(float x) { return x != x ? float_of(0x7fc00000u) : x + 0.0f; }

// exp(x) for x <= 0 or NaN
template <class V>
MHA_INLINE V exp(V x) {
  const V magic = all<V>(0x1.8p+23f);
  const V t = fma(x, all<V>(0x1.715476p+0f), magic);
  const V n = t - magic;
  V r = fma(n, all<V>(-0x1.62e43p-1f), x);
  r = fma(n, all<V>(0x1.05c61p-29f), r);
  V p = all<V>(0x1.6a23d0p-10f);
  p = fma(p, r, all<V>(0x1.123a20p-7f));
  p = fma(p, r, all<V>(0x1.5558f2p-5f));
  p = fma(p, r, all<V>(0x1.555492p-3f));
  p = fma(p, r, all<V>(0x1.fffffcp-2f));
  p = fma(p, r, all<V>(1.0f));
  p = fma(p, r, all<V>(1.0f));
  const V y = zero_if_less(x, all<V>(-0x1.5d589ep+6f), add_to_exponent(p, t));
  return x_if_nan(x, y);
}

MHA_INLINE float exp(float x) { return exp(Scalar{x}).x; }

// log(x) for normal x > 0 or NaN
MHA_INLINE float log(float x) {
  const uint32_t i = bits_of(x);
  const int32_t k = static_cast<int32_t>(i - 0x3f3504f3u) >> 23;
  const float f = float_of(i - (static_cast<uint32_t>(k) << 23)) - 1.0f;
  const float s = f / (2.0f + f);
  const float z = s * s;
  float r = 0x1.e2fdd2p-3f;
  r = fma(r, z, 0x1.2438a8p-2f);
  r = fma(r, z, 0x1.999a7cp-2f);
  r = fma(r, z, 0x1.555554p-1f);
  r = r * z;
  const float h = (0.5f * f) * f;
  const float q = fma(s, h + r, static_cast<float>(k) * -0x1.05c61p-29f);
  const float y = fma(static_cast<float>(k), 0x1.62e43p-1f, f - (h - q));
  return x != x ? x : y;
}

}  // namespace
}  // namespace mha
