// To be read beside src/kernels/CONTRACT.md, section "Tables of sines and cosines".
#include "spec/rope_tables.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>

#ifdef __FAST_MATH__
#error "the specification needs IEEE arithmetic: compile without -ffast-math"
#endif

namespace spec {
namespace {

constexpr double kTwoPi = 0x1.921fb54442d18p+2, kLn2 = 0x1.62e42fefa39efp-1;

double Log2(double x) {
  int e;
  double m = 2 * std::frexp(x, &e);
  e = e - 1;
  if (m >= 0x1.6a09e667f3bcdp+0) {
    m = m / 2;
    e = e + 1;
  }
  const double s = (m - 1) / (m + 1), z = s * s;
  double y = 0;
  for (int k = 10; k >= 0; k--) y = y * z + 1.0 / (2 * k + 1);
  return e + s * y * 0x1.71547652b82fep+1;
}

double Exp2OfMinus(double u) {
  const double n = std::floor(u + 0.5), x = (n - u) * kLn2;
  double y = 1;
  for (int j = 14; j >= 1; j--) y = 1 + x * y / j;
  return std::ldexp(y, -static_cast<int>(n));
}

double Clamped(double x, double least, double most) { return std::min(std::max(x, least), most); }

double Yarn(const RopeConfig &config, double i) {
  const double dims = static_cast<double>(config.dims),
               original = static_cast<double>(config.original_positions);
  const auto d = [&](double beta) {
    return Clamped(dims * Log2(original / (beta * kTwoPi)) / (2 * Log2(config.base)), -1, dims);
  };
  double low = d(config.yarn_beta_fast), high = d(config.yarn_beta_slow);
  if (!config.yarn_unrounded) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dims - 1);
  return low == high ? (i > low ? 1 : 0) : Clamped((i - low) / (high - low), 0, 1);
}

uint64_t Step(const RopeConfig &config, int64_t pair) {
  const double dims = static_cast<double>(config.dims),
               original = static_cast<double>(config.original_positions);
  const double i = static_cast<double>(pair);
  double b = Log2(config.base);
  if (config.ntk_factor != 0 && config.ntk_positions > config.original_positions) {
    const double more = static_cast<double>(config.ntk_positions - config.original_positions);
    b = b + Log2(1 + config.ntk_factor * more / original) * dims / (dims - 2);
  }
  double theta = Exp2OfMinus(2 * i * b / dims);
  if (config.yarn_factor != 0) {
    const double ramp = Yarn(config, i);
    theta = theta * (1 - ramp + ramp / config.yarn_factor);
  }
  if (config.llama3_factor != 0) {
    const double slow = config.llama3_low_freq_factor, fast = config.llama3_high_freq_factor;
    const double ramp = Clamped((fast - original * theta / kTwoPi) / (fast - slow), 0, 1);
    theta = theta * (1 - ramp + ramp / config.llama3_factor);
  }
  theta = theta / config.linear_factor;
  if (config.pair_factors) theta = theta / config.pair_factors[pair];
  return static_cast<uint64_t>(std::floor(theta / kTwoPi * 0x1p64));
}

int64_t Position(const RopeConfig &config, int64_t r, int64_t i) {
  const int64_t *s = config.mrope_section;
  if (!s) return config.first_position + r;
  int64_t k = i < s[0] ? 0 : i < s[0] + s[1] ? 1 : 2;
  if (config.mrope_interleaved) k = i < 3 * s[i % 3] ? i % 3 : 0;
  return config.mrope_positions[k * config.num_positions + r];
}

float Canon(float x) { return x != x ? __builtin_nanf("") : x + 0.0f; }

void Values(uint64_t step, int64_t position, double factor, float *cos, float *sin) {
  const uint64_t angle = static_cast<uint64_t>(position) * step;
  const uint64_t q = (angle + (uint64_t{1} << 61)) >> 62;
  const int64_t r = static_cast<int64_t>(angle - (q << 62));
  const double x = static_cast<double>(r) * 0x1.921fb54442d18p-62, z = x * x;
  double c = -0x1.93974a8c07c9dp-37;
  for (const double v : {0x1.1eed8eff8d898p-29, -0x1.27e4fb7789f5cp-22, 0x1.a01a01a01a01ap-16,
                         -0x1.6c16c16c16c17p-10, 0x1.5555555555555p-5, -0x1p-1, 1.0}) {
    c = c * z + v;
  }
  double s = 0x1.6124613a86d09p-33;
  for (const double v : {-0x1.ae64567f544e4p-26, 0x1.71de3a556c734p-19, -0x1.a01a01a01a01ap-13,
                         0x1.1111111111111p-7, -0x1.5555555555555p-3}) {
    s = s * z + v;
  }
  s = x + x * (z * s);
  const double turns[4][2] = {{c, s}, {-s, c}, {-c, -s}, {s, -c}};
  *cos = Canon(static_cast<float>(turns[q][0] * factor));
  *sin = Canon(static_cast<float>(turns[q][1] * factor));
}

}  // namespace

void RopeTables(const RopeConfig &config, float *cos, float *sin) {
  double factor = config.attention_factor;
  if (factor == 0)
    factor = config.yarn_factor != 0 ? 0.1 * (kLn2 * Log2(config.yarn_factor)) + 1 : 1;
  const int64_t columns = config.dims / 2;
  for (int64_t i = 0; i < columns; i++) {
    const uint64_t step = Step(config, i);
    for (int64_t row = 0; row < config.num_positions; row++) {
      Values(step, Position(config, row, i), factor, cos + row * columns + i,
             sin + row * columns + i);
    }
  }
}

}  // namespace spec
