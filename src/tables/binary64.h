// Logarithms and powers in binary64, by + - * / alone (CONTRACT.md, section 13): the same bits
// everywhere, unlike functions of libm.
#pragma once

#include <stdint.h>
#include <string.h>

#include "../compiler.h"

namespace mha {

constexpr double two_pi = 0x1.921fb54442d18p+2;
constexpr double ln2 = 0x1.62e42fefa39efp-1;

// The greatest integer that is not above x, for |x| < 2^63.
inline double floor_of(double x) {
  const double truncated = static_cast<double>(static_cast<int64_t>(x));
  return truncated > x ? truncated - 1.0 : truncated;
}

// For a positive normal x = 2^e m, with m from sqrt(1/2) to sqrt(2): the series of atanh((m - 1) /
// (m + 1)).
inline double log2_of(double x) {
  constexpr uint64_t bits_of_root = 0x3fe6a09e667f3bcd;  // of sqrt(1/2)
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  const int64_t e = static_cast<int64_t>(bits - bits_of_root) >> 52;
  bits -= static_cast<uint64_t>(e) << 52;
  double m;
  memcpy(&m, &bits, sizeof m);
  const double s = (m - 1.0) / (m + 1.0), z = s * s;
  double y = 0.0;
  for (int k = 10; k >= 0; --k) y = y * z + 1.0 / static_cast<double>(2 * k + 1);
  return static_cast<double>(e) + s * y * 0x1.71547652b82fep+1;
}

// 2^-u for 0 <= u <= 1000
inline double exp2_of_minus(double u) {
  const double n = floor_of(u + 0.5), x = (n - u) * ln2;
  double y = 1.0;
  for (int j = 14; j > 0; --j) y = 1.0 + x * y / static_cast<double>(j);
  const uint64_t bits = static_cast<uint64_t>(1023 - static_cast<int64_t>(n)) << 52;
  double power;
  memcpy(&power, &bits, sizeof power);
  return y * power;
}

}  // namespace mha
