// The contract's exp, log, sigmoid, softplus and rotation as the specification has them, against float64. That the kernels
// compute the same bits shows in the weights and lse of contract_test, and in gate_test, rope_test and cache_test.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <vector>

#include "spec/spec.h"
#include "support/random.h"
#include "support/same_bits.h"

namespace {

using support::FromBits;
using support::HexFloat;

const float kInfinity = std::numeric_limits<float>::infinity();
const float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kCut = -0x1.5d589ep+6f;

uint32_t Bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

// The distance of y from exact in units of the last place that a float of exact's size has.
double UlpError(float y, double exact) {
  const int exponent = std::max(std::ilogb(exact), -126);
  return std::fabs(y - exact) / std::ldexp(1.0, exponent - 23);
}

struct Worst {
  double error = 0;
  float x = 0;

  void Add(float at, float y, double exact) {
    const double this_error = UlpError(y, exact);
    if (!(this_error <= error)) {  // a NaN is the worst
      error = this_error;
      x = at;
    }
  }
};

TEST(Exp, IsWithinItsErrorBound) {
  Worst worst;
  int64_t count = 0;
  // Negative floats grow in magnitude with their bits: from -2^-30 to the cut.
  for (uint32_t bits = Bits(-0x1p-30f); bits <= Bits(kCut); bits += 61, count++) {
    const float x = FromBits(bits);
    worst.Add(x, spec::Fastest().exp(x), std::exp(static_cast<double>(x)));
  }
  // The polynomial is at its worst at the ends of its range, around n + 1/2 times ln 2; every float there.
  for (int n = 0; n < 126; n++) {
    const uint32_t middle = Bits(static_cast<float>(-(n + 0.5) * 0.69314718055994531));
    for (uint32_t bits = middle - 2000; bits < middle + 2000; bits++, count++) {
      const float x = FromBits(bits);
      if (x >= kCut) worst.Add(x, spec::Fastest().exp(x), std::exp(static_cast<double>(x)));
    }
  }
  std::printf("exp: %.4f ulp at %a, %lld points\n", worst.error, static_cast<double>(worst.x), static_cast<long long>(count));
  EXPECT_LE(worst.error, 0.89) << "at " << HexFloat(worst.x);
}

TEST(Exp, IsOneAtZero) {
  EXPECT_EQ(Bits(spec::Fastest().exp(0.0f)), Bits(1.0f));
  EXPECT_EQ(Bits(spec::Fastest().exp(-0.0f)), Bits(1.0f));
  EXPECT_EQ(Bits(spec::Fastest().exp(-0x1p-149f)), Bits(1.0f));
}

TEST(Exp, IsNormalDownToTheCutAndZeroBelow) {
  const float at_cut = spec::Fastest().exp(kCut);
  EXPECT_GE(at_cut, std::numeric_limits<float>::min());
  const float below = std::nextafter(kCut, -kInfinity);
  EXPECT_LT(std::exp(static_cast<double>(below)), std::numeric_limits<float>::min() * 1.00001);
  for (const float x : {below, -88.0f, -104.0f, -1e4f, -1e9f, -0x1p31f, -0x1p32f, -std::numeric_limits<float>::max(), -kInfinity}) {
    EXPECT_EQ(Bits(spec::Fastest().exp(x)), 0u) << "at " << x;
  }
}

TEST(Exp, KeepsNaN) {
  EXPECT_TRUE(std::isnan(spec::Fastest().exp(kNaN)));
  EXPECT_TRUE(std::isnan(spec::Fastest().exp(-kNaN)));
  EXPECT_TRUE(std::isnan(spec::Fastest().exp(kInfinity - kInfinity)));
}

TEST(Log, IsWithinItsErrorBound) {
  Worst worst;
  int64_t count = 0;
  const auto add = [&](uint32_t bits) {
    const float x = FromBits(bits);
    worst.Add(x, spec::Fastest().log(x), std::log(static_cast<double>(x)));
    count++;
  };
  // All positive normal numbers, most of them skipped; each one from sqrt(1/2) to sqrt(2), where no multiple of ln 2 is added and the
  // result may be as small as it likes; and the sums that rows of up to some million keys have.
  for (uint32_t bits = Bits(0x1p-126f); bits <= Bits(std::numeric_limits<float>::max()); bits += 1009) add(bits);
  for (uint32_t bits = Bits(0x1.6a09e6p-1f); bits <= Bits(0x1.6a09e8p+0f); bits++) {
    if (bits != Bits(1.0f)) add(bits);  // the error is relative to the result, and that is 0
  }
  for (uint32_t bits = Bits(0x1.6a09e8p+0f); bits <= Bits(0x1p22f); bits += 101) add(bits);
  std::printf("log: %.4f ulp at %a, %lld points\n", worst.error, static_cast<double>(worst.x), static_cast<long long>(count));
  EXPECT_LE(worst.error, 0.84) << "at " << HexFloat(worst.x);
}

TEST(Log, IsPositiveZeroAtOne) { EXPECT_EQ(Bits(spec::Fastest().log(1.0f)), 0u); }

TEST(Log, KeepsNaN) {
  EXPECT_TRUE(std::isnan(spec::Fastest().log(kNaN)));
  EXPECT_TRUE(std::isnan(spec::Fastest().log(-kNaN)));
}

// Every 61st float from 2^-30 on, of both signs, up to where exp(-|x|) becomes 0.
template <typename Exact>
Worst WorstOf(float (*function)(float), const Exact &exact) {
  Worst worst;
  for (uint32_t bits = Bits(0x1p-30f); bits <= Bits(-kCut); bits += 61) {
    for (const float x : {FromBits(bits), -FromBits(bits)}) worst.Add(x, function(x), exact(static_cast<double>(x)));
  }
  return worst;
}

TEST(Sigmoid, IsWithinItsErrorBound) {
  const auto exact = [](double x) { return x < 0 ? std::exp(x) / (1 + std::exp(x)) : 1 / (1 + std::exp(-x)); };
  const Worst worst = WorstOf(spec::Fastest().sigmoid, exact);
  std::printf("sigmoid: %.4f ulp at %a\n", worst.error, static_cast<double>(worst.x));
  EXPECT_LE(worst.error, 2.41) << "at " << HexFloat(worst.x);
}

TEST(Softplus, IsWithinItsErrorBound) {
  const Worst worst = WorstOf(spec::Fastest().softplus, [](double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x))); });
  std::printf("softplus: %.4f ulp at %a\n", worst.error, static_cast<double>(worst.x));
  EXPECT_LE(worst.error, 1.97) << "at " << HexFloat(worst.x);
}

TEST(Gates, DoNotOverflowAndKeepNaN) {
  const spec::Functions &f = spec::Fastest();
  for (const float x : {0x1p-149f, 1e-30f, 90.0f, 104.0f, 1e9f, 0x1p31f, 0x1p32f, std::numeric_limits<float>::max(), kInfinity}) {
    const bool is_large = x > 1;
    EXPECT_EQ(f.sigmoid(x), is_large ? 1.0f : 0.5f) << x;
    EXPECT_EQ(f.sigmoid(-x), is_large ? 0.0f : 0.5f) << x;
    EXPECT_EQ(f.softplus(x), is_large ? x : f.softplus(0.0f)) << x;
    EXPECT_EQ(f.softplus(-x), is_large ? 0.0f : f.softplus(0.0f)) << x;
  }
  EXPECT_FLOAT_EQ(f.softplus(0.0f), 0.693147181f);
  for (const float x : {kNaN, -kNaN}) {
    EXPECT_TRUE(std::isnan(f.sigmoid(x)));
    EXPECT_TRUE(std::isnan(f.softplus(x)));
  }
}

TEST(Rotation, TurnsEachPairByItsAngle) {
  support::Random random(2);
  constexpr int64_t kHeads = 3, kWidth = 10, kDims = 6, kPositions = 5;
  std::vector<float> cos, sin;
  for (int64_t n = 0; n < kPositions * kDims / 2; n++) {
    cos.push_back(static_cast<float>(std::cos(0.7 * static_cast<double>(n))));
    sin.push_back(static_cast<float>(std::sin(0.7 * static_cast<double>(n))));
  }
  for (const bool is_interleaved : {false, true}) {
    const support::Rotation rotation = {is_interleaved, kDims, 0, cos.data(), sin.data(), kDims / 2, nullptr, nullptr};
    const std::vector<float> x = random.Normals(kHeads * kWidth);
    std::vector<float> y = x;
    spec::Fastest().rotate(rotation, 4, kHeads, kWidth, y.data());
    for (int64_t h = 0; h < kHeads; h++) {
      for (int64_t i = 0; i < kDims / 2; i++) {
        const int64_t first = h * kWidth + (is_interleaved ? 2 * i : i), second = first + (is_interleaved ? 1 : kDims / 2);
        const double angle = 0.7 * static_cast<double>(4 * kDims / 2 + i);
        EXPECT_NEAR(y[first], x[first] * std::cos(angle) - x[second] * std::sin(angle), 1e-6);
        EXPECT_NEAR(y[second], x[second] * std::cos(angle) + x[first] * std::sin(angle), 1e-6);
      }
      for (int64_t d = kDims; d < kWidth; d++) EXPECT_EQ(Bits(y[h * kWidth + d]), Bits(x[h * kWidth + d]));
    }
  }
}

}  // namespace
