// The contract's fma for machines without the instruction: a * b + c in binary32 with one rounding,
// by operations of binary64. Nothing is taken from libm, where fmaf is slow at best and on some
// systems rounds twice.
//
// Why the result is right for all inputs:
// - The product of two floats has at most 48 bits and an exponent far from the ends of binary64, so
//   it is exact there. The sum is rounded once, to the double s; narrowing s rounds a second time.
// - The second rounding can differ from that of the exact sum only if s lies exactly in the middle
//   of two neighbouring floats and the exact sum beside it: each middle is a double, and rounding
//   moves no number past a double.
// - A middle has at most 25 significant bits, also among the subnormal numbers and at the border of
//   infinity. So if any of the last 28 bits of s is set, narrowing is right. Otherwise, if s is not
//   exact, it is first moved by one unit in the last place towards the exact sum, to the side of
//   the middle on which that lies.
// Zeros and numbers that cancel have the sign that fma gives them; infinities and NaN come out of
// the plain operations.
#pragma once

#include <stdint.h>

#include "../compiler.h"

namespace mha {
namespace {

inline uint64_t bits_of_double(double x) {
  uint64_t bits;
  MHA_MEMCPY(&bits, &x, sizeof bits);
  return bits;
}

// Returns product + addend rounded once, also if the sum lies in the middle of two floats. Few sums
// do, so this is a function apart from the loops.
MHA_NOINLINE float narrowed_sum(double product, double addend) {
  double sum = product + addend;
  // The error of that rounding, exactly (Knuth's TwoSum), or NaN if something is not finite.
  const double addend_of_sum = sum - product;
  const double error = (product - (sum - addend_of_sum)) + (addend - addend_of_sum);
  if (error < 0.0 || error > 0.0) {
    // As an integer, a double without its sign grows with its magnitude.
    const bool is_away_from_zero = (error < 0.0) == (sum < 0.0);
    const uint64_t moved = is_away_from_zero ? bits_of_double(sum) + 1u : bits_of_double(sum) - 1u;
    MHA_MEMCPY(&sum, &moved, sizeof sum);
  }
  return static_cast<float>(sum);
}

MHA_INLINE float fma_in_binary64(float a, float b, float c) {
  const double product = static_cast<double>(a) * static_cast<double>(b),
               addend = static_cast<double>(c);
  const double sum = product + addend;
  if (MHA_LIKELY((bits_of_double(sum) & 0x0fffffffu) != 0)) return static_cast<float>(sum);
  return narrowed_sum(product, addend);
}

}  // namespace
}  // namespace mha
