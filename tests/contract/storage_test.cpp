// Numbers in fewer bits than a float has: src/storage.h beside a search for the nearest.
#include "storage.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "support/random.h"

namespace {

using support::Bits;
using support::FromBits;

// What a 16-bit format with so many exponent bits means, by its definition.
double Meaning(uint32_t stored, int exponent_bits) {
  const int mantissa_bits = 15 - exponent_bits, bias = (1 << (exponent_bits - 1)) - 1;
  const uint32_t mantissa = stored & ((1u << mantissa_bits) - 1u),
                 exponent = stored >> mantissa_bits & ((1u << exponent_bits) - 1u);
  double value;
  if (exponent == (1u << exponent_bits) - 1u) {
    value = mantissa == 0 ? std::numeric_limits<double>::infinity()
                          : std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    value = std::ldexp(static_cast<double>(mantissa), 1 - bias - mantissa_bits);
  } else {
    value = std::ldexp(static_cast<double>(mantissa + (1u << mantissa_bits)),
                       static_cast<int>(exponent) - bias - mantissa_bits);
  }
  return stored & 0x8000u ? -value : value;
}

struct Format {
  const char *name;
  int exponent_bits;
  uint16_t (*narrow)(float);
  float (*widen)(uint16_t);
  uint16_t infinity, nan;
};

const Format kFormats[] = {{"f16", 5, mha::f16_of, mha::f32_of_f16, 0x7c00u, 0x7e00u},
                           {"bf16", 8, mha::bf16_of, mha::f32_of_bf16, 0x7f80u, 0x7fc0u}};

TEST(Storage, WideningGivesTheValueOfEach16BitNumber) {
  for (const Format &format : kFormats) {
    for (uint32_t stored = 0; stored < 0x10000u; stored++) {
      const float wide = format.widen(static_cast<uint16_t>(stored));
      const double meaning = Meaning(stored, format.exponent_bits);
      if (std::isnan(meaning)) {
        ASSERT_TRUE(std::isnan(wide)) << format.name << " " << std::hex << stored;
      } else {
        ASSERT_EQ(static_cast<double>(wide), meaning) << format.name << " " << std::hex << stored;
        ASSERT_EQ(std::signbit(wide), (stored & 0x8000u) != 0)
            << format.name << " " << std::hex << stored;
      }
    }
  }
}

TEST(Storage, NarrowingUndoesWidening) {
  for (const Format &format : kFormats) {
    for (uint32_t stored = 0; stored < 0x10000u; stored++) {
      const float wide = format.widen(static_cast<uint16_t>(stored));
      const uint32_t expected = std::isnan(wide) ? format.nan : stored;
      ASSERT_EQ(format.narrow(wide), expected) << format.name << " " << std::hex << stored;
    }
  }
}

TEST(Storage, NarrowingRoundsToTheNearestAndTiesToEven) {
  for (const Format &format : kFormats) {
    for (uint32_t stored = 0; stored < format.infinity; stored++) {
      // The largest number's upper neighbour is where the format would go on; from halfway there on
      // it is infinite.
      const double low = Meaning(stored, format.exponent_bits);
      const double high = stored + 1u < format.infinity
                              ? Meaning(stored + 1u, format.exponent_bits)
                              : 2 * low - Meaning(stored - 1u, format.exponent_bits);
      const float middle = static_cast<float>((low + high) / 2);
      ASSERT_EQ(static_cast<double>(middle), (low + high) / 2) << "a float holds each middle";
      const uint32_t even = stored % 2 == 0 ? stored : stored + 1u;
      const float below = std::nextafter(middle, 0.0f),
                  above = std::nextafter(middle, std::numeric_limits<float>::infinity());
      for (const uint32_t sign : {0u, 0x8000u}) {
        const float direction = sign ? -1.0f : 1.0f;
        ASSERT_EQ(format.narrow(direction * middle), sign | even)
            << format.name << " " << std::hex << stored;
        ASSERT_EQ(format.narrow(direction * below), sign | stored)
            << format.name << " " << std::hex << stored;
        ASSERT_EQ(format.narrow(direction * above), sign | (stored + 1u))
            << format.name << " " << std::hex << stored;
      }
    }
    EXPECT_EQ(format.narrow(std::numeric_limits<float>::max()), format.infinity) << format.name;
    EXPECT_EQ(format.narrow(FromBits(0xffc12345u)), format.nan) << format.name;
  }
}

TEST(Storage, Int8CodesAreTheRoundedQuotientsByTheScale) {
  support::Random random(1);
  for (int repeat = 0; repeat < 20000; repeat++) {
    const float a = std::ldexp(1.0f + static_cast<float>(random.Unit()), -100 + repeat % 228);
    if (std::isinf(a)) continue;
    const mha::CodeScale row = mha::code_scale_of(Bits(a), 127);
    EXPECT_EQ(row.scale, a / 127.0f);
    EXPECT_EQ(mha::code_of(a, row.factor), 127);
    EXPECT_EQ(mha::code_of(-a, row.factor), -127);
    EXPECT_EQ(mha::code_of(0.0f, row.factor), 0);
    for (int i = 0; i < 8; i++) {
      const float x = a * static_cast<float>(2 * random.Unit() - 1);
      const float product = x * row.factor;
      const float expected = std::min(127.0f, std::max(-127.0f, std::nearbyintf(product)));
      ASSERT_EQ(mha::code_of(x, row.factor), static_cast<int>(expected)) << x << " of " << a;
    }
  }
  for (int n = -127; n < 127; n++)
    EXPECT_EQ(mha::code_of(static_cast<float>(n) + 0.5f, 1.0f), n % 2 == 0 ? n : n + 1) << "a tie";
}

TEST(Storage, AnInt8RowOfZerosIsZerosAndOneThatIsNotFiniteIsNaN) {
  for (const float a : {0.0f, 0x1p-149f, std::nextafter(0x1p-100f, 0.0f)}) {
    const mha::CodeScale row = mha::code_scale_of(Bits(a), 127);
    EXPECT_EQ(Bits(row.scale), 0u) << a;
    EXPECT_EQ(mha::code_of(a, row.factor), 0) << a;
  }
  const mha::CodeScale smallest = mha::code_scale_of(Bits(0x1p-100f), 127);
  EXPECT_EQ(smallest.scale, 0x1p-100f / 127.0f);
  EXPECT_EQ(mha::code_of(0x1p-100f, smallest.factor), 127);

  for (const float x :
       {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    const float row_of_two[] = {1.0f, -x};
    const mha::CodeScale odd = mha::code_scale_of(mha::most_bits_of_row(row_of_two, 2, 0), 127);
    EXPECT_EQ(Bits(odd.scale), 0x7fc00000u) << x;
    for (const float each : row_of_two) EXPECT_EQ(mha::code_of(each, odd.factor), 0) << each;
  }
}

}  // namespace
