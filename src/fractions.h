// Arithmetic of integers that stand for fractions, and logarithms by it (CONTRACT.md, section 13): the same everywhere, unlike functions of
// libm.
#pragma once

#include <stdint.h>

namespace mha {

__extension__ typedef unsigned __int128 Wide;
__extension__ typedef __int128 SignedWide;

constexpr Wide one = Wide{1} << 127;  // 1 as a fraction: a stands for a / 2^127

constexpr Wide wide(uint64_t upper, uint64_t lower) { return Wide{upper} << 64 | lower; }
constexpr uint64_t upper_half(Wide a) { return static_cast<uint64_t>(a >> 64); }
constexpr uint64_t lower_half(Wide a) { return static_cast<uint64_t>(a); }

constexpr Wide two_over_ln2 = wide(0x02e2a8eca5705fc2, 0xeefa1ffb41a474fa);  // times 2^120

// floor(a * b / 2^127)
inline Wide times(Wide a, Wide b) {
  const Wide low = Wide{lower_half(a)} * lower_half(b);
  const Wide middle1 = Wide{upper_half(a)} * lower_half(b), middle2 = Wide{lower_half(a)} * upper_half(b);
  const Wide high = Wide{upper_half(a)} * upper_half(b);
  const Wide middle = upper_half(low) + Wide{lower_half(middle1)} + lower_half(middle2);
  const Wide upper = high + upper_half(middle1) + upper_half(middle2) + upper_half(middle);
  return upper << 1 | lower_half(middle) >> 63;
}

// floor(a * 2^127 / b) for a <= b < 2^127; digit by digit, since a division of such numbers is a function of the compiler's own library
inline Wide ratio(Wide a, Wide b) {
  Wide quotient = 0, rest = a;
  for (int i = 0; i < 128; ++i) {
    quotient <<= 1;
    if (rest >= b) {
      rest -= b;
      quotient |= 1;
    }
    rest <<= 1;
  }
  return quotient;
}

// floor(a / b)
inline Wide quotient(Wide a, uint32_t b) {
  Wide result = 0;
  uint64_t rest = 0;
  for (int shift = 96; shift >= 0; shift -= 32) {
    const uint64_t digit = rest << 32 | static_cast<uint32_t>(a >> shift);
    result |= Wide{digit / b} << shift;
    rest = digit % b;
  }
  return result;
}

// The place of the highest bit of a number that is not 0.
inline int highest_bit(Wide a) { return upper_half(a) ? 127 - __builtin_clzll(upper_half(a)) : 63 - __builtin_clzll(lower_half(a)); }

// log2(x) * 2^120 of an integer 0 < x < 2^126, rounded down in each step
inline SignedWide log2_of_integer(Wide x) {
  const int highest = highest_bit(x);
  const Wide unit = Wide{1} << highest, s = ratio(x - unit, x + unit), z = times(s, s);
  Wide y = 0;
  for (uint32_t j = 41; j-- > 0;) y = quotient(one, 2 * j + 1) + times(z, y);
  return static_cast<SignedWide>(highest) * (SignedWide{1} << 120) + static_cast<SignedWide>(times(times(s, y), two_over_ln2));
}

}  // namespace mha
