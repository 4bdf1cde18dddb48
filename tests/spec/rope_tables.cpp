// To be read beside src/kernels/CONTRACT.md, section "Tables of sines and cosines". Its integers are computed here as one does by hand, in
// digits of 32 bits, so that nothing depends on what a compiler offers for large ones.
#include "spec/rope_tables.h"

#include <cmath>
#include <initializer_list>

#ifdef __FAST_MATH__
#error "the specification needs IEEE arithmetic: compile without -ffast-math"
#endif

namespace spec {
namespace {

// ---- Natural numbers below 2^288

struct Natural {
  static constexpr int kDigits = 9;
  uint32_t digits[kDigits];  // the lowest first

  Natural(uint64_t value = 0) : digits{static_cast<uint32_t>(value), static_cast<uint32_t>(value >> 32)} {}
};

Natural operator+(const Natural &a, const Natural &b) {
  Natural sum;
  uint64_t carry = 0;
  for (int i = 0; i < Natural::kDigits; i++) {
    carry += uint64_t{a.digits[i]} + b.digits[i];
    sum.digits[i] = static_cast<uint32_t>(carry);
    carry >>= 32;
  }
  return sum;
}

// a >= b
Natural operator-(const Natural &a, const Natural &b) {
  Natural difference;
  int64_t borrow = 0;
  for (int i = 0; i < Natural::kDigits; i++) {
    const int64_t digit = int64_t{a.digits[i]} - int64_t{b.digits[i]} - borrow;
    borrow = digit < 0;
    difference.digits[i] = static_cast<uint32_t>(digit + (borrow << 32));
  }
  return difference;
}

Natural operator*(const Natural &a, const Natural &b) {
  Natural product;
  for (int i = 0; i < Natural::kDigits; i++) {
    uint64_t carry = 0;
    for (int j = 0; i + j < Natural::kDigits; j++) {
      carry += uint64_t{a.digits[i]} * b.digits[j] + product.digits[i + j];
      product.digits[i + j] = static_cast<uint32_t>(carry);
      carry >>= 32;
    }
  }
  return product;
}

bool operator<(const Natural &a, const Natural &b) {
  for (int i = Natural::kDigits - 1; i >= 0; i--) {
    if (a.digits[i] != b.digits[i]) return a.digits[i] < b.digits[i];
  }
  return false;
}

bool Bit(const Natural &a, int place) { return (a.digits[place / 32] >> (place % 32) & 1) != 0; }

int High(const Natural &a) {
  int place = 32 * Natural::kDigits - 1;
  while (place >= 0 && !Bit(a, place)) place--;
  return place;  // -1 for 0
}

Natural PowerOfTwo(int exponent) {
  Natural power;
  power.digits[exponent / 32] = uint32_t{1} << (exponent % 32);
  return power;
}

// floor(a / b)
Natural operator/(const Natural &a, const Natural &b) {
  Natural quotient, rest;
  for (int place = High(a); place >= 0; place--) {
    rest = rest + rest + Natural(Bit(a, place) ? 1 : 0);
    if (!(rest < b)) {
      rest = rest - b;
      quotient = quotient + PowerOfTwo(place);
    }
  }
  return quotient;
}

// floor(a / 2^exponent)
Natural DividedByPower(const Natural &a, int exponent) {
  Natural quotient;
  for (int i = 0; i + exponent / 32 < Natural::kDigits; i++) {
    const int from = i + exponent / 32;
    const uint64_t next = from + 1 < Natural::kDigits ? a.digits[from + 1] : 0;
    quotient.digits[i] = static_cast<uint32_t>((next << 32 | a.digits[from]) >> (exponent % 32));
  }
  return quotient;
}

uint64_t Low64(const Natural &a) { return uint64_t{a.digits[1]} << 32 | a.digits[0]; }

Natural FromHex(uint64_t upper, uint64_t lower) { return Natural(upper) * PowerOfTwo(64) + Natural(lower); }

// ---- The definitions of the page

const Natural &One() {
  static const Natural one = PowerOfTwo(127);
  return one;
}

Natural Mul(const Natural &a, const Natural &b) { return DividedByPower(a * b, 127); }
Natural Div(const Natural &a, const Natural &b) { return a * PowerOfTwo(127) / b; }

int E(double x) { return std::ilogb(x); }
Natural M(double x) { return static_cast<uint64_t>(std::ldexp(x, 52 - E(x))); }

// An integer of either sign.
struct Signed {
  bool is_negative;
  Natural magnitude;
};

Signed operator-(const Signed &a, const Signed &b) {
  if (a.is_negative != b.is_negative) return {a.is_negative, a.magnitude + b.magnitude};
  if (a.magnitude < b.magnitude) return {!a.is_negative, b.magnitude - a.magnitude};
  return {a.is_negative, a.magnitude - b.magnitude};
}

bool IsPositive(const Signed &a) { return !a.is_negative && High(a.magnitude) >= 0; }
Signed Opposite(const Signed &a) { return {!a.is_negative, a.magnitude}; }

Signed Log2Of(const Natural &x) {
  const int h = High(x);
  const Natural s = Div(x - PowerOfTwo(h), x + PowerOfTwo(h));
  const Natural z = Mul(s, s);
  Natural y;
  for (int j = 40; j >= 0; j--) y = One() / Natural(static_cast<uint64_t>(2 * j + 1)) + Mul(z, y);
  return {false, Natural(static_cast<uint64_t>(h)) * PowerOfTwo(120) + Mul(Mul(s, y), FromHex(0x02e2a8eca5705fc2, 0xeefa1ffb41a474fa))};
}

Signed Log2Of(double x) {
  const int places = E(x) - 52;
  const Signed less = {places > 0, Natural(static_cast<uint64_t>(places < 0 ? -places : places)) * PowerOfTwo(120)};
  return Log2Of(M(x)) - less;
}

double Float64(const Signed &log2) {
  // floor: of a negative number, that of the magnitude's ceiling
  const Natural more = log2.is_negative ? PowerOfTwo(68) - Natural(1) : Natural();
  const double magnitude = static_cast<double>(static_cast<int64_t>(Low64(DividedByPower(log2.magnitude + more, 68))));
  return (log2.is_negative ? -magnitude : magnitude) * 0x1p-52;
}

Natural ExponentOf(const RopeConfig &config, int64_t i) {
  const Natural pair(static_cast<uint64_t>(2 * i)), dims(static_cast<uint64_t>(config.dims));
  const Natural u = Mul(Div(pair, dims), Log2Of(config.base).magnitude);
  if (config.ntk_factor == 0 || config.ntk_positions <= config.original_positions) return u;
  const Natural more(static_cast<uint64_t>(config.ntk_positions - config.original_positions));
  const Natural b = Natural(static_cast<uint64_t>(config.original_positions)) * PowerOfTwo(52 - E(config.ntk_factor));
  return u + Mul(Div(pair, dims - Natural(2)), (Log2Of(b + M(config.ntk_factor) * more) - Log2Of(b)).magnitude);
}

// ---- Weights

Natural Least(double factor) { return Div(PowerOfTwo(52 - E(factor)), M(factor)); }
Natural Between(const Natural &ramp, double factor) { return One() - ramp + Mul(ramp, Least(factor)); }

Natural RoundedYarn(const RopeConfig &config, int64_t i) {
  const double dims = static_cast<double>(config.dims);
  const auto d = [&](double beta) {
    const double turns = static_cast<double>(config.original_positions) / (beta * 0x1.921fb54442d18p+2);
    return dims * Float64(Log2Of(turns)) / (2 * Float64(Log2Of(config.base)));
  };
  const double low = std::floor(d(config.yarn_beta_fast)), high = std::ceil(d(config.yarn_beta_slow));
  // Differences of numbers below 2^53 in magnitude, or far beyond all columns.
  double a = static_cast<double>(i) - (low < 0 ? 0 : low);
  double b = (high > dims - 1 ? dims - 1 : high) - (low < 0 ? 0 : low);
  if (b < 0) {
    a = -a;
    b = -b;
  }
  const Natural factor = M(config.yarn_factor), one = PowerOfTwo(52 - E(config.yarn_factor));
  if (a <= 0) return One();
  if (a > b) return Div(one, factor);
  const Natural above(static_cast<uint64_t>(a)), length(static_cast<uint64_t>(b));
  return Div((length - above) * factor + above * one, length * factor);
}

Natural UnroundedYarn(const RopeConfig &config, const Natural &u) {
  const Signed circle = {false, FromHex(0x02a6c873498ddf75, 0xb0db2e4f080a88e2)};
  const Natural original(static_cast<uint64_t>(config.original_positions)), dims(static_cast<uint64_t>(config.dims));
  Signed low = Log2Of(original) - Log2Of(config.yarn_beta_fast) - circle, high = Log2Of(original) - Log2Of(config.yarn_beta_slow) - circle;
  if (low.is_negative) low = {false, Natural()};
  const Natural last = Natural(2) * Mul(Div(dims - Natural(1), dims), Log2Of(config.base).magnitude);
  if (!high.is_negative && last < high.magnitude) high = {false, last};
  Signed a = Signed{false, u} - low, b = high - low;
  if (IsPositive(Opposite(b))) {
    a = Opposite(a);
    b = Opposite(b);
  }
  if (!IsPositive(a)) return One();
  if (b.magnitude < a.magnitude) return Least(config.yarn_factor);
  return Between(Div(a.magnitude, b.magnitude), config.yarn_factor);
}

Natural Llama3(const RopeConfig &config, const Natural &n, const Natural &quarter) {
  const double original = static_cast<double>(config.original_positions);
  const double fast = config.llama3_high_freq_factor, slow = config.llama3_low_freq_factor;
  const int k = E(fast) + 5 + static_cast<int>(Low64(n)) - E(original);
  if (k <= 0) return One();
  const Natural t = DividedByPower(Mul(quarter, M(original) * PowerOfTwo(74)), k);
  const Natural high = M(fast) * PowerOfTwo(71), low = M(slow) * PowerOfTwo(71 - E(fast) + E(slow));
  if (!(t < high)) return One();
  if (!(low < t)) return Least(config.llama3_factor);
  return Between(Div(high - t, high - low), config.llama3_factor);
}

// T and f
struct Angle {
  Natural step;
  int places;
};

Angle AngleOf(const RopeConfig &config, int64_t i) {
  const Natural u = ExponentOf(config, i), n = DividedByPower(u, 120);
  const Natural x = Mul((u - n * PowerOfTwo(120)) * PowerOfTwo(7), FromHex(0x58b90bfbe8e7bcd5, 0xe4f1d9cc01f97b57));
  Natural y = One();
  for (uint64_t j = 34; j >= 1; j--) y = One() - Mul(x, y) / Natural(j);
  const Natural quarter = Mul(y, FromHex(0x517cc1b727220a94, 0xfe13abe8fa9a6ee0));
  Natural w = One();
  if (config.yarn_factor != 0) w = config.yarn_unrounded ? UnroundedYarn(config, u) : RoundedYarn(config, i);
  if (config.llama3_factor != 0) w = Llama3(config, n, quarter);
  const double c = config.pair_factors ? config.pair_factors[i] : 1;
  const auto inverse = [](double x) { return Div(PowerOfTwo(52), M(x)); };
  const Natural t = Mul(Mul(Mul(quarter, w), inverse(config.linear_factor)), inverse(c));
  return {DividedByPower(t * PowerOfTwo(95), High(t)), 224 + static_cast<int>(Low64(n)) + E(config.linear_factor) + E(c) - High(t)};
}

float Canon(float x) { return x != x ? __builtin_nanf("") : x + 0.0f; }

void Values(const Angle &angle, int64_t position, double factor, float *cos, float *sin) {
  const int f = angle.places;
  const Natural turned = Natural(static_cast<uint64_t>(position)) * angle.step;
  const Natural q = DividedByPower(turned + PowerOfTwo(f - 3), f - 2);
  const Natural whole = q * PowerOfTwo(f - 2);
  const bool negative = turned < whole;
  const Natural r = negative ? whole - turned : turned - whole;
  double x = 0;
  if (High(r) >= 0) {
    const Natural m = DividedByPower(r * PowerOfTwo(52), High(r));
    x = std::ldexp(static_cast<double>(Low64(m)) * 0x1.921fb54442d18p+2, High(r) - 52 - f);
    if (negative) x = -x;
  }
  const double z = x * x;
  double c = -0x1.93974a8c07c9dp-37;
  for (const double v :
       {0x1.1eed8eff8d898p-29, -0x1.27e4fb7789f5cp-22, 0x1.a01a01a01a01ap-16, -0x1.6c16c16c16c17p-10, 0x1.5555555555555p-5, -0x1p-1, 1.0}) {
    c = c * z + v;
  }
  double s = 0x1.6124613a86d09p-33;
  for (const double v :
       {-0x1.ae64567f544e4p-26, 0x1.71de3a556c734p-19, -0x1.a01a01a01a01ap-13, 0x1.1111111111111p-7, -0x1.5555555555555p-3}) {
    s = s * z + v;
  }
  s = x + x * (z * s);
  const double turns[4][2] = {{c, s}, {-s, c}, {-c, -s}, {s, -c}};
  const double(&pair)[2] = turns[Low64(q) % 4];
  *cos = Canon(static_cast<float>(pair[0] * factor));
  *sin = Canon(static_cast<float>(pair[1] * factor));
}

}  // namespace

void RopeTables(const RopeConfig &config, float *cos, float *sin) {
  double factor = config.attention_factor;
  if (factor == 0) {
    factor = 1;
    if (config.yarn_factor != 0) factor = 0x1.999999999999ap-4 * (0x1.62e42fefa39efp-1 * Float64(Log2Of(config.yarn_factor))) + 1;
  }
  const int64_t columns = config.dims / 2;
  for (int64_t i = 0; i < columns; i++) {
    const Angle angle = AngleOf(config, i);
    for (int64_t row = 0; row < config.num_positions; row++) {
      Values(angle, config.first_position + row, factor, cos + row * columns + i, sin + row * columns + i);
    }
  }
}

}  // namespace spec
