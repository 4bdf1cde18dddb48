// The contract's fma in plain operations (src/kernels/fma.h), by the vectors of each instruction
// set and by the specification, beside the processor's instruction; where there is none, beside the
// specification. The number of random triples is multiplied by MHA_TEST_ROUNDS.
#include "kernels/fma.h"

#include <gtest/gtest.h>
#include <mha.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

#include "contract/kernel_functions.h"
#include "spec/spec.h"
#include "support/random.h"
#include "support/rounds.h"
#include "support/same_bits.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

struct Triple {
  float a, b, c;
};

std::string Text(const Triple &t) {
  return "(" + HexFloat(t.a) + ", " + HexFloat(t.b) + ", " + HexFloat(t.c) + ")";
}

#if defined(__x86_64__)
__attribute__((target("fma"))) void ByInstruction(const std::vector<Triple> &triples,
                                                  float *results) {
  for (const Triple &t : triples) *results++ = __builtin_fmaf(t.a, t.b, t.c);
}
#endif

std::vector<float> ExpectedOf(const std::vector<Triple> &triples) {
  std::vector<float> results(triples.size());
#if defined(__x86_64__)
  if (spec::HasHardwareFma()) {
    ByInstruction(triples, results.data());
    return results;
  }
#endif
  for (size_t n = 0; n < triples.size(); n++)
    results[n] = spec::kBaseline.fma(triples[n].a, triples[n].b, triples[n].c);
  return results;
}

// Each fma beside the expected results. That of the specification, by integers, takes longer.
void Compare(std::vector<Triple> triples, const std::vector<float> &expected,
             bool with_specification) {
  const auto compare = [&](const char *whose, const auto &result_of) {
    for (size_t n = 0; n < expected.size(); n++) {
      const float result = result_of(n);
      // The payload of a NaN is not defined.
      ASSERT_TRUE(Bits(result) == Bits(expected[n]) ||
                  (result != result && expected[n] != expected[n]))
          << whose << ": fma" << Text(triples[n]) << " is " << HexFloat(result) << " instead of "
          << HexFloat(expected[n]);
    }
  };
  const auto of_each = [&](const auto &fma) {
    return [&](size_t n) { return fma(triples[n].a, triples[n].b, triples[n].c); };
  };
  compare("plain C++", of_each(mha::fma_in_binary64));
  if (with_specification) compare("the specification", of_each(spec::kBaseline.fma));
  triples.resize((triples.size() + 15) / 16 * 16);  // whole vectors of any set
  std::vector<float> y(triples.size());
  for (const KernelFunctions *set : {MHA_TEST_KERNEL_FUNCTIONS}) {
    if (!(mha_instruction_sets() >> set->instruction_set & 1)) continue;
    set->fma(&triples[0].a, static_cast<int64_t>(y.size()), y.data());
    compare(mha_instruction_set_name(set->instruction_set), [&](size_t n) { return y[n]; });
  }
}

// For triples that `draw` makes of random numbers.
template <typename Draw>
void CompareRandom(uint64_t seed, int64_t count, Draw draw) {
  Random random(seed);
  std::vector<Triple> triples(10'000);
  int64_t done = 0;
  for (int64_t batch = 0; done < count && !testing::Test::HasFailure(); batch++) {
    for (Triple &triple : triples) triple = draw(&random);
    Compare(triples, ExpectedOf(triples), batch % 10 == 0);
    done += static_cast<int64_t>(triples.size());
  }
  std::printf("%lld triples\n", static_cast<long long>(done));
}

// 23 bits: any, few ones or few zeros, of which come products and sums with few bits.
uint32_t Significand(Random *random) {
  const uint64_t bits = random->Next();
  const uint32_t any = static_cast<uint32_t>(bits) & 0x007fffffu;
  const uint32_t few =
      ((1u << (bits >> 32 & 31)) | (1u << (bits >> 37 & 31)) | (1u << (bits >> 42 & 31))) &
      0x007fffffu;
  switch (bits >> 62) {
    case 0:
      return few;
    case 1:
      return few ^ 0x007fffffu;
    default:
      return any;
  }
}

// Of the given exponent, which may lie beyond those of floats: then it is the nearest there is.
float WithExponent(Random *random, int64_t exponent) {
  const uint32_t field = static_cast<uint32_t>(exponent < -127  ? 0
                                               : exponent > 127 ? 254
                                                                : exponent + 127);
  return FromBits((random->Coin() ? 0x80000000u : 0u) | field << 23 | Significand(random));
}

TEST(Fma, OfEachSetEqualsTheInstructionForAnyBits) {
  CompareRandom(1, support::Rounds(20'000'000), [](Random *random) -> Triple {
    const uint64_t first = random->Next();
    return {FromBits(static_cast<uint32_t>(first)), FromBits(static_cast<uint32_t>(first >> 32)),
            FromBits(static_cast<uint32_t>(random->Next()))};
  });
}

// Products and addends that share bits of the result, of every size: from below the subnormal
// numbers to beyond the largest.
TEST(Fma, OfEachSetEqualsTheInstructionWhereTheTermsOverlap) {
  CompareRandom(2, support::Rounds(10'000'000), [](Random *random) -> Triple {
    const int64_t product = random->Between(-180, 130);
    const int64_t a =
        random->Between(product < 0 ? -127 : product - 127, product < 0 ? product + 127 : 127);
    return {WithExponent(random, a), WithExponent(random, product - a),
            WithExponent(random, product + random->Between(-55, 55))};
  });
}

// What is left of a difference of almost equal terms has few bits, or is zero.
TEST(Fma, OfEachSetEqualsTheInstructionWhereTheTermsCancel) {
  CompareRandom(3, support::Rounds(10'000'000), [](Random *random) -> Triple {
    const int64_t a = random->Between(-127, 127);
    const Triple t = {WithExponent(random, a),
                      WithExponent(random, random->Between(-150 - a, 127 - a)), 0};
    const float product = t.a * t.b;
    if (product != product || std::isinf(product)) return {t.a, t.b, -product};
    return {t.a, t.b,
            FromBits(Bits(-product) +
                     static_cast<uint32_t>(random->Between(Bits(product) << 1 ? -3 : 0, 3)))};
  });
}

// Sums as near to the middle of two neighbouring floats as a product can bring them: half of the
// addend's last place, times 1 - d^2, 1 - d, 1 or 1 + d for some small d. Rounding twice is wrong
// here, among subnormal numbers and at the overflow border too.
TEST(Fma, OfEachSetEqualsTheInstructionNearTheMiddleOfTwoFloats) {
  CompareRandom(4, support::Rounds(10'000'000), [](Random *random) -> Triple {
    // All exponents; the lowest and the highest more often.
    int64_t exponent = random->Between(-127, 127);
    if (random->Chance(0.2)) exponent = -127;
    if (random->Chance(0.05)) exponent = 127;
    float c = WithExponent(random, exponent);
    if (exponent == 127 && random->Coin()) c = std::copysign(std::numeric_limits<float>::max(), c);
    const int64_t half_place = (exponent < -126 ? -126 : exponent) - 24;
    const int64_t first = half_place / 2 + random->Between(-20, 20);
    const float d =
        static_cast<float>(random->Below(int64_t{1} << random->Between(0, 12))) * 0x1p-23f;
    float a = 1 + d, b = random->Chance(0.7) ? 1 - d : random->Coin() ? 1 : 1 - 0x1p-24f;
    // Also a few places beside the middle.
    const int64_t further = random->Chance(0.8) ? 0 : random->Between(-2, 2);
    a = std::ldexp(random->Coin() ? a : -a, static_cast<int>(first));
    b = std::ldexp(b, static_cast<int>(half_place - first + further));
    return random->Coin() ? Triple{a, b, c} : Triple{b, a, c};
  });
}

// Every kind of number crossed with every other: zeros, subnormal numbers, ones, powers, the ends
// of the range, with neighbours and signs.
TEST(Fma, OfEachSetEqualsTheInstructionForAllEdgesCrossed) {
  std::vector<float> edges;
  const uint32_t kMagnitudes[] = {
      0x00000000u, 0x00000001u, 0x00000002u, 0x00000003u, 0x00000100u,
      0x00400000u, 0x007fffffu,  // zero, subnormal numbers
      0x00800000u, 0x00800001u, 0x00ffffffu, 0x01000000u,
      0x0c000000u,                                         // from the least normal number on
      0x1a000000u, 0x1fffffffu, 0x20000000u, 0x20000001u,  // about 2^-63
      0x33800000u, 0x33ffffffu, 0x34000000u,               // last places of 1
      0x3effffffu, 0x3f000000u, 0x3f7fffffu, 0x3f800000u, 0x3f800001u,
      0x3f800002u, 0x3fc00000u, 0x3fffffffu, 0x40000000u, 0x40400000u,
      0x4b000000u, 0x4b000001u, 0x4b7fffffu, 0x4b800000u, 0x4b800001u,  // about 2^24
      0x5effffffu, 0x5f000000u, 0x5f000001u, 0x5f7fffffu,               // about 2^63
      0x72ffffffu, 0x73000000u, 0x73000001u, 0x73800000u,  // half a last place of the largest
      0x7e800000u, 0x7effffffu, 0x7f000000u, 0x7f000001u, 0x7f7ffffeu,
      0x7f7fffffu,                                          // up to the largest
      0x7f800000u, 0x7f800001u, 0x7fc00000u, 0x7fffffffu};  // infinity, NaN
  for (const uint32_t bits : kMagnitudes) {
    edges.push_back(FromBits(bits));
    edges.push_back(FromBits(bits | 0x80000000u));
  }
  std::vector<Triple> triples;
  for (const float a : edges) {
    for (const float b : edges) {
      for (const float c : edges) triples.push_back({a, b, c});
    }
  }
  Compare(triples, ExpectedOf(triples), true);
  std::printf("%zu triples\n", triples.size());
}

// A few whose results are known, so that these do not rest on a processor.
TEST(Fma, OfEachSetRoundsOnce) {
  const struct {
    Triple t;
    float result;
  } kCases[] = {
      {{1 + 0x1p-23f, 1 - 0x1p-23f, 0x1.000002p24f},
       0x1.000002p24f},  // below the middle by 2^-46, which a double does not hold
      {{1 + 0x1p-12f, 1 + 0x1p-12f, -(1 + 0x1p-11f)},
       0x1p-24f},  // what rounding takes from the product
      {{0x1.000002p-75f, 0x1.fffffcp-76f, 0x1.000004p-127f},
       0x1.000004p-127f},  // below the middle of two subnormal numbers
      {{0x1.000002p52f, 0x1.fffffcp50f, 0x1.fffffep127f},
       0x1.fffffep127f},  // below the border of infinity
      {{0x1p52f, 0x1p51f, 0x1.fffffep127f}, std::numeric_limits<float>::infinity()},
      {{0x1p127f, 0x1p127f, -std::numeric_limits<float>::infinity()},
       -std::numeric_limits<float>::infinity()},
      {{0x1p127f, 2, -0x1.fffffep127f}, 0x1p104f},  // the product alone would overflow
      {{1, 1, -1}, 0.0f},
      {{-0.0f, 1, -0.0f}, -0.0f},
      {{-0.0f, 1, 0.0f}, 0.0f},
      {{-0x1p-100f, 0x1p-100f, 0.0f}, -0.0f},
      {{-0x1p-100f, 0x1p-100f, 0x1p-149f}, 0x1p-149f},
  };
  for (const auto &known : kCases) Compare({known.t}, {known.result}, true);
}

}  // namespace
