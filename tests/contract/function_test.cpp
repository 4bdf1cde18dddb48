// The contract's exp, log, tanh, sigmoid, softplus and rotation: as the specification has them,
// against float64, and by bits as the kernels of each instruction set have them; so, too, what
// numbers are rounded to in fewer bits.
//
// Floats are taken in steps, but for those around borders. With the environment variable
// MHA_TEST_EVERY_FLOAT every one is, of the scalar kernels every 32nd, which takes minutes.
#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "contract/kernel_functions.h"
#include "spec/spec.h"
#include "support/random.h"
#include "support/rounds.h"
#include "support/same_bits.h"
#include "support/schedulers.h"

namespace {

using support::Bits;
using support::FromBits;
using support::HexFloat;

const float kInfinity = std::numeric_limits<float>::infinity();
const float kMax = std::numeric_limits<float>::max();
const float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kCut = -0x1.5d589ep+6f;

// The distance of y from exact in units of the last place that a float of exact's size has.
double UlpError(float y, double exact) {
  if (y == exact) return 0;  // infinite too
  uint64_t bits;
  std::memcpy(&bits, &exact, sizeof bits);
  bits = (2 * 1023 + 23 - std::max<uint64_t>(bits >> 52 & 0x7ff, 1023 - 126)) << 52;
  double places;  // 2^(23 - exponent)
  std::memcpy(&places, &bits, sizeof places);
  return std::fabs(y - exact) * places;
}

struct Worst {
  double error = 0;
  float x = 0;

  void Add(const Worst &other) {  // a NaN is the worst
    if (!(other.error <= error)) *this = other;
  }
};

// From one float to another of the same sign that is no nearer to 0, in steps of their bits; 0: as
// for most.
struct Range {
  float first, last;
  uint32_t step = 0;

  int64_t Count() const { return (int64_t{Bits(last) - Bits(first)} + step - 1) / step + 1; }
  float Number(int64_t n) const {
    return FromBits(static_cast<uint32_t>(std::min(Bits(first) + n * step, int64_t{Bits(last)})));
  }
};

Range Around(float x) { return {FromBits(Bits(x) - 300), FromBits(Bits(x) + 300), 1}; }

const Range kPositive = {0.0f, kInfinity}, kNegative = {-0.0f, -kInfinity};
const Range kNaNs = {kNaN, kNaN, 1};  // as results are

double NoExact(double) {
  return std::numeric_limits<double>::quiet_NaN();
}  // where bits are all that is compared

template <typename Specified, typename Exact>
void ExpectOfEach(const char *name, const std::vector<Map * KernelFunctions::*> &kernels,
                  const std::vector<Range> &ranges, const Specified &specified, double bound,
                  const Exact &exact) {
  constexpr int64_t kBlock = 4096;
  const uint32_t step =
      std::getenv("MHA_TEST_EVERY_FLOAT")
          ? 1
          : static_cast<uint32_t>(1021 / std::min(support::RoundsFactor(), 1.0)) | 1;
  std::vector<std::pair<Range, int64_t>>
      blocks;  // each with the number of its first float in the range
  int64_t floats = 0;
  for (Range range : ranges) {
    if (range.step == 0) range.step = step;
    floats += range.Count();
    for (int64_t first = 0; first < range.Count(); first += kBlock)
      blocks.emplace_back(range, first);
  }
  constexpr uint32_t kThreads = 8;
  Worst worst, of_threads[kThreads];
  const auto compare = [&](const Range &range, int64_t first, Worst *of_block) {
    float x[kBlock], expected[kBlock], some[kBlock], y[kBlock];
    for (int64_t i = 0; i < kBlock; i++) {
      x[i] = range.Number(first + i);
      expected[i] = specified(x[i]);
      const double of_exact = exact(static_cast<double>(x[i]));
      if (of_exact == of_exact) of_block->Add({UlpError(expected[i], of_exact), x[i]});
    }
    for (const KernelFunctions *set : {MHA_TEST_KERNEL_FUNCTIONS}) {
      if (!(mha_instruction_sets() >> set->instruction_set & 1)) continue;
      // An fma of plain operations takes some 50 times as long, and has a test of its own.
      const int64_t apart =
          step == 1 && set->instruction_set == MHA_INSTRUCTION_SET_SCALAR ? kBlock / 128 : 1;
      for (int64_t i = 0; i * apart < kBlock; i++) some[i] = x[i * apart];
      for (Map *const KernelFunctions::*kernel : kernels) {
        (set->*kernel)(some, kBlock / apart, y);
        for (int64_t i = 0; i * apart < kBlock; i++) {
          const float of_specification = expected[i * apart];
          if (Bits(y[i]) == Bits(of_specification) ||
              (y[i] != y[i] && of_specification != of_specification))
            continue;
          ADD_FAILURE() << name << " of " << HexFloat(some[i]) << " is " << HexFloat(y[i]) << " by "
                        << mha_instruction_set_name(set->instruction_set) << " instead of "
                        << HexFloat(of_specification);
          return;
        }
      }
    }
  };
  std::atomic<size_t> next{0};
  support::OnThreads(kThreads, [&](uint32_t thread) {
    for (size_t i = next++; i < blocks.size() && !testing::Test::HasFailure(); i = next++)
      compare(blocks[i].first, blocks[i].second, &of_threads[thread]);
  });
  for (const Worst &of_thread : of_threads) worst.Add(of_thread);
  std::printf("%s: %.4f ulp at %a, %lld floats\n", name, worst.error, static_cast<double>(worst.x),
              static_cast<long long>(floats));
  EXPECT_LE(worst.error, bound) << name << " at " << HexFloat(worst.x);
}

// That of the specification has its error bound, and those of the kernels have its bits.

TEST(Functions, ExpKeepsTheSpecification) {
  const std::vector<Range> ranges = {kNegative, {0.0f, 0.0f, 1}, Around(kCut), kNaNs};
  ExpectOfEach("exp", {&KernelFunctions::exp, &KernelFunctions::exp_of_one}, ranges,
               spec::Fastest().exp, 0.89, [](double x) { return x < kCut ? 0 : std::exp(x); });
}

TEST(Functions, LogKeepsTheSpecification) {
  ExpectOfEach("log", {&KernelFunctions::log},
               {{0x1p-126f, kMax}, Around(1.0f), Around(0x1.6a09e6p-1f), kNaNs},
               spec::Fastest().log, 0.84, [](double x) { return std::log(x); });
}

const std::vector<Range> kAroundTheCut = {kPositive, kNegative, Around(kCut), Around(-kCut), kNaNs};

TEST(Functions, TanhKeepsTheSpecification) {
  ExpectOfEach("tanh", {&KernelFunctions::tanh},
               {kPositive, kNegative, Around(0x1.333334p-1f), Around(-0x1.333334p-1f), kNaNs},
               spec::Fastest().tanh, 1.45, [](double x) { return std::tanh(x); });
}

TEST(Functions, SigmoidKeepsTheSpecification) {
  ExpectOfEach("sigmoid", {&KernelFunctions::sigmoid}, kAroundTheCut, spec::Fastest().sigmoid, 2.41,
               [](double x) { return x < kCut ? 0 : 1 / (1 + std::exp(-x)); });
}

TEST(Functions, SoftplusKeepsTheSpecification) {
  ExpectOfEach("softplus", {&KernelFunctions::softplus}, kAroundTheCut, spec::Fastest().softplus,
               1.97, [](double x) {
                 return x < kCut ? 0 : std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x)));
               });
}

// Of norms.
TEST(Functions, OneOverTheRootKeepsTheSpecification) {
  ExpectOfEach(
      "1 / sqrt", {&KernelFunctions::inverse_root}, {{0x1p-149f, kMax}, kNaNs},
      [](float x) { return 1 / std::sqrt(x); }, 1.5, [](double x) { return 1 / std::sqrt(x); });
}

// The second of the two unless the first is greater: of NaN, and of zeros of either sign.
TEST(Functions, TheGreaterOfTwoIsTheFirstOnlyIfItIsGreater) {
  ExpectOfEach(
      "max", {&KernelFunctions::positive}, {kPositive, kNegative, kNaNs},
      [](float x) { return x > 0.0f ? x : 0.0f; }, 0, NoExact);
}

// ---- Numbers of fewer bits

// What is read of a stored number; the sign of zero too, which the specification says of the
// magnitude alone.
template <support::Storage type>
float Stored(float x) {
  const float magnitude = std::fabs(x);
  support::AttentionShape shape = {};
  shape.v_type = type;
  shape.head_dim_v = 1;
  float read;
  spec::Fastest().store(shape, false, &magnitude, 1, &read);
  return std::copysign(read, x);
}

TEST(Functions, RoundingTo16BitsKeepsTheSpecification) {
  const std::vector<Range> ranges = {
      kPositive,           kNegative,
      Around(65520),       Around(-65520),
      Around(0x1p-14f),    Around(0x1p-25f),
      Around(0x1.ffp127f), {FromBits(0x7f800001u), FromBits(0x7fffffffu)}};
  ExpectOfEach("f16", {&KernelFunctions::f16}, ranges, Stored<support::Storage::kF16>, 0, NoExact);
  ExpectOfEach("bf16", {&KernelFunctions::bf16}, ranges, Stored<support::Storage::kBf16>, 0,
               NoExact);
}

// A number with the scale 1; and a row's scale and factor by its greatest number, which has the
// greatest code, no more and no less.
TEST(Functions, CodesKeepTheSpecification) {
  ExpectOfEach(
      "codes", {&KernelFunctions::code},
      {{0, 32767}, {-0.0f, -32767}, Around(0.5f), Around(126.5f), Around(-126.5f)},
      [](float x) { return std::nearbyint(x) + 0.0f; }, 0, NoExact);
  const auto expect = [](const char *name, Map *KernelFunctions::*kernel, float of_odd,
                         const auto &of_greatest) {
    const auto specified = [&](float x) {
      return x - x != 0 ? of_odd : std::fabs(x) < 0x1p-100f ? 0 : of_greatest(x);
    };
    ExpectOfEach(name, {kernel}, {kPositive, kNegative, Around(0x1p-100f), kNaNs}, specified, 0,
                 NoExact);
  };
  expect("scales", &KernelFunctions::scale, kNaN, [](float x) { return std::fabs(x) / 127; });
  expect("factors", &KernelFunctions::factor, 0, [](float x) { return 127 / std::fabs(x); });
  expect("the greatest of int8", &KernelFunctions::greatest8, 0,
         [](float x) { return std::copysign(127.0f, x); });
  expect("the greatest of INT16", &KernelFunctions::greatest16, 0,
         [](float x) { return std::copysign(32767.0f, x); });
  expect("the greatest of int4", &KernelFunctions::greatest4, 0,
         [](float) { return -8.0f * 16 + 7; });
}

// ---- At certain places

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
  for (const float x : {below, -88.0f, -104.0f, -1e4f, -1e9f, -0x1p31f, -0x1p32f,
                        -std::numeric_limits<float>::max(), -kInfinity}) {
    EXPECT_EQ(Bits(spec::Fastest().exp(x)), 0u) << "at " << x;
  }
}

TEST(Log, IsPositiveZeroAtOne) { EXPECT_EQ(Bits(spec::Fastest().log(1.0f)), 0u); }

TEST(Tanh, IsOddAndOneFarFromZero) {
  for (const float sign : {1.0f, -1.0f}) {
    EXPECT_EQ(spec::Fastest().tanh(sign * 20), sign);
    EXPECT_EQ(spec::Fastest().tanh(sign * kInfinity), sign);
    EXPECT_EQ(spec::Fastest().tanh(sign * 0x1p-140f), sign * 0x1p-140f);
    EXPECT_EQ(spec::Fastest().tanh(sign * 0.7f), sign * spec::Fastest().tanh(0.7f));
  }
}

TEST(Gates, DoNotOverflow) {
  const spec::Functions &f = spec::Fastest();
  for (const float x : {0x1p-149f, 1e-30f, 90.0f, 104.0f, 1e9f, 0x1p31f, 0x1p32f,
                        std::numeric_limits<float>::max(), kInfinity}) {
    const bool is_large = x > 1;
    EXPECT_EQ(f.sigmoid(x), is_large ? 1.0f : 0.5f) << x;
    EXPECT_EQ(f.sigmoid(-x), is_large ? 0.0f : 0.5f) << x;
    EXPECT_EQ(f.softplus(x), is_large ? x : f.softplus(0.0f)) << x;
    EXPECT_EQ(f.softplus(-x), is_large ? 0.0f : f.softplus(0.0f)) << x;
  }
  EXPECT_FLOAT_EQ(f.softplus(0.0f), 0.693147181f);
}

TEST(Functions, OfNaNAreNaN) {
  const spec::Functions &f = spec::Fastest();
  for (const auto function : {f.exp, f.log, f.tanh, f.sigmoid, f.softplus}) {
    for (const float x : {kNaN, -kNaN}) EXPECT_TRUE(std::isnan(function(x)));
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
    const support::Rotation rotation = {is_interleaved, kDims,     0,       cos.data(),
                                        sin.data(),     kDims / 2, nullptr, nullptr};
    const std::vector<float> x = random.Normals(kHeads * kWidth);
    std::vector<float> y = x;
    spec::Fastest().rotate(rotation, 4, kHeads, kWidth, y.data());
    for (int64_t h = 0; h < kHeads; h++) {
      for (int64_t i = 0; i < kDims / 2; i++) {
        const int64_t first = h * kWidth + (is_interleaved ? 2 * i : i),
                      second = first + (is_interleaved ? 1 : kDims / 2);
        const double angle = 0.7 * static_cast<double>(4 * kDims / 2 + i);
        EXPECT_NEAR(y[first], x[first] * std::cos(angle) - x[second] * std::sin(angle), 1e-6);
        EXPECT_NEAR(y[second], x[second] * std::cos(angle) + x[first] * std::sin(angle), 1e-6);
      }
      for (int64_t d = kDims; d < kWidth; d++)
        EXPECT_EQ(Bits(y[h * kWidth + d]), Bits(x[h * kWidth + d]));
    }
  }
}

// An instruction for pairs of bf16 that computed in another way is not used.
TEST(Functions, OfPairsAreTakenAsDefinedAlone) {
  for (const KernelFunctions *set : {MHA_TEST_KERNEL_FUNCTIONS}) {
    if (!(mha_instruction_sets() >> set->instruction_set & 1)) continue;
    for (const int how : {0, 1, 2})
      EXPECT_EQ(set->takes_pairs(how), how == 0)
          << mha_instruction_set_name(set->instruction_set) << " " << how;
  }
}

}  // namespace
