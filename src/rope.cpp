// mha_rope_tables: the arithmetic of CONTRACT.md, section "Tables of sines and cosines". Angles are counted in turns as integers, so that
// taking away whole turns is exact at any position.
#include <stdint.h>
#include <string.h>

#include "count.h"
#include "structs.h"

#ifdef __FAST_MATH__
#error "the arithmetic contract needs IEEE arithmetic: compile without -ffast-math and its parts"
#endif

namespace mha {
namespace {

__extension__ typedef unsigned __int128 Wide;
__extension__ typedef __int128 SignedWide;

constexpr int64_t end_of_positions = int64_t{1} << 31;
constexpr double largest_factor = 0x1p31;
constexpr Wide one = Wide{1} << 127;  // 1 as a fraction

constexpr Wide wide(uint64_t upper, uint64_t lower) { return Wide{upper} << 64 | lower; }
constexpr uint64_t upper_half(Wide a) { return static_cast<uint64_t>(a >> 64); }
constexpr uint64_t lower_half(Wide a) { return static_cast<uint64_t>(a); }

constexpr Wide two_over_ln2 = wide(0x02e2a8eca5705fc2, 0xeefa1ffb41a474fa);  // times 2^120
constexpr Wide ln2 = wide(0x58b90bfbe8e7bcd5, 0xe4f1d9cc01f97b57);           // fractions, here and below
constexpr Wide two_over_pi = wide(0x517cc1b727220a94, 0xfe13abe8fa9a6ee0);

// ---- Fractions: integers that stand for a / 2^127

// floor(a * b / 2^127)
Wide times(Wide a, Wide b) {
  const Wide low = Wide{lower_half(a)} * lower_half(b);
  const Wide middle1 = Wide{upper_half(a)} * lower_half(b), middle2 = Wide{lower_half(a)} * upper_half(b);
  const Wide high = Wide{upper_half(a)} * upper_half(b);
  const Wide middle = upper_half(low) + Wide{lower_half(middle1)} + lower_half(middle2);
  const Wide upper = high + upper_half(middle1) + upper_half(middle2) + upper_half(middle);
  return upper << 1 | lower_half(middle) >> 63;
}

// floor(a * 2^127 / b) for a <= b < 2^127; digit by digit, since a division of such numbers is a function of the compiler's own library
Wide ratio(Wide a, Wide b) {
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
Wide quotient(Wide a, uint32_t b) {
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
int highest_bit(Wide a) { return upper_half(a) ? 127 - __builtin_clzll(upper_half(a)) : 63 - __builtin_clzll(lower_half(a)); }

// ---- Numbers in binary64

// x = mantissa * 2^(exponent - 52) with 2^52 <= mantissa < 2^53; for positive normal x
struct Parts {
  uint64_t mantissa;
  int exponent;
};

Parts parts_of(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  return {(bits & ((uint64_t{1} << 52) - 1)) | uint64_t{1} << 52, static_cast<int>(bits >> 52) - 1023};
}

double power_of_two(int exponent) {
  const uint64_t bits = static_cast<uint64_t>(exponent + 1023) << 52;
  double x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// log2(x) * 2^120, rounded down in each step
SignedWide log2_of(double x) {
  const Parts parts = parts_of(x);
  const Wide unit = uint64_t{1} << 52;
  const Wide s = ratio(parts.mantissa - unit, parts.mantissa + unit);
  const Wide z = times(s, s);
  Wide y = 0;
  for (uint32_t j = 41; j-- > 0;) y = quotient(one, 2 * j + 1) + times(z, y);
  return static_cast<SignedWide>(parts.exponent) * (SignedWide{1} << 120) + static_cast<SignedWide>(times(times(s, y), two_over_ln2));
}

double binary64_of_log2(SignedWide log2) { return static_cast<double>(static_cast<int64_t>(log2 >> 68)) * 0x1p-52; }

// ---- The angles of a table

// What the columns have in common.
struct Angles {
  int64_t dims;
  Wide log2_base;  // times 2^120
  Parts linear_factor;
  Parts yarn_factor;
  int64_t ramp_first, ramp_last;  // low and high of mha_rope_config; both dims without YaRN: every column comes before
  double attention_factor;
};

// d(beta) as an integer by floor or ceil, which an int64_t holds since it is first brought into -1 .. dims.
double correction(const Angles &angles, double original_positions, double beta) {
  const double turns = binary64_of_log2(log2_of(original_positions / (beta * 0x1.921fb54442d18p+2)));
  const double base = binary64_of_log2(static_cast<SignedWide>(angles.log2_base));
  const double dims = static_cast<double>(angles.dims);
  const double d = dims * turns / (2.0 * base);
  return d < -1.0 ? -1.0 : d > dims ? dims : d;
}

int64_t floor_of(double x) {
  const int64_t truncated = static_cast<int64_t>(x);
  return truncated - (static_cast<double>(truncated) > x);
}

int64_t ceil_of(double x) { return -floor_of(-x); }

Angles angles_of(const mha_rope_config &config) {
  Angles angles;
  angles.dims = config.dims;
  angles.log2_base = static_cast<Wide>(log2_of(config.base));
  angles.linear_factor = parts_of(config.linear_factor);
  angles.yarn_factor = parts_of(1.0);
  angles.ramp_first = angles.ramp_last = config.dims;
  angles.attention_factor = 1.0;
  if (config.yarn_factor == 0) return angles;
  const double original_positions = static_cast<double>(config.original_positions);
  const int64_t first = floor_of(correction(angles, original_positions, config.yarn_beta_fast));
  const int64_t last = ceil_of(correction(angles, original_positions, config.yarn_beta_slow));
  angles.yarn_factor = parts_of(config.yarn_factor);
  angles.ramp_first = first > 0 ? first : 0;
  angles.ramp_last = last < config.dims - 1 ? last : config.dims - 1;
  angles.attention_factor = config.attention_factor != 0
                                ? config.attention_factor
                                : 0x1.999999999999ap-4 * (0x1.62e42fefa39efp-1 * binary64_of_log2(log2_of(config.yarn_factor))) + 1.0;
  return angles;
}

// By what YaRN multiplies the angle of pair i, as a fraction.
Wide yarn_weight(const Angles &angles, int64_t i) {
  int64_t above = i - angles.ramp_first, length = angles.ramp_last - angles.ramp_first;  // ramp = above / length
  if (length < 0) {
    above = -above;
    length = -length;
  }
  if (above <= 0) return one;
  if (above > length) above = length = 1;
  // 1 - ramp + ramp / factor = ((length - above) * factor + above) / (length * factor), times 2^(52 - exponent) on either side
  const Wide mantissa = angles.yarn_factor.mantissa;
  const Wide stretched = static_cast<Wide>(above) << (52 - angles.yarn_factor.exponent);
  return ratio(static_cast<Wide>(length - above) * mantissa + stretched, static_cast<Wide>(length) * mantissa);
}

// The part of a turn by which pair i turns from one position to the next, step / 2^shift with 2^95 <= step < 2^96.
struct Turn {
  Wide step;
  int shift;
};

Turn turn_of(const Angles &angles, int64_t i) {
  // base^(-2 i / dims) = 2^-whole * y
  const Wide u = times(ratio(static_cast<Wide>(2 * i), static_cast<Wide>(angles.dims)), angles.log2_base);
  const int whole = static_cast<int>(u >> 120);
  const Wide x = times((u << 7) & (one - 1), ln2);
  Wide y = one;
  for (uint32_t j = 34; j > 0; --j) y = one - quotient(times(x, y), j);

  const Wide unit = uint64_t{1} << 52;
  const Wide t = times(times(times(y, two_over_pi), yarn_weight(angles, i)), ratio(unit, angles.linear_factor.mantissa));
  const int highest = highest_bit(t);
  const Wide step = highest >= 95 ? t >> (highest - 95) : t << (95 - highest);
  return {step, 224 + whole + angles.linear_factor.exponent - highest};
}

// ---- Values

struct Values {
  float cos, sin;
};

Values values_at(int64_t position, Turn turn, double factor) {
  // Quarters of a turn, and what remains: at most an eighth, on either side.
  const Wide turned = static_cast<Wide>(position) * turn.step;
  uint32_t quarters = 0;
  Wide rest = turned;
  bool is_before = false;
  if (turn.shift < 130) {  // else less than an eighth
    const Wide nearest = (turned + (Wide{1} << (turn.shift - 3))) >> (turn.shift - 2);
    quarters = static_cast<uint32_t>(nearest) & 3;
    rest = turned - (nearest << (turn.shift - 2));
    is_before = rest >> 127;
    if (is_before) rest = 0 - rest;
  }
  double x = 0.0;
  if (rest != 0) {
    const int highest = highest_bit(rest);
    const Wide leading = highest >= 52 ? rest >> (highest - 52) : rest << (52 - highest);
    x = static_cast<double>(static_cast<int64_t>(leading)) * 0x1.921fb54442d18p+2 * power_of_two(highest - 52 - turn.shift);
    if (is_before) x = -x;
  }

  const double z = x * x;
  double c = -0x1.93974a8c07c9dp-37;
  c = c * z + 0x1.1eed8eff8d898p-29;
  c = c * z + -0x1.27e4fb7789f5cp-22;
  c = c * z + 0x1.a01a01a01a01ap-16;
  c = c * z + -0x1.6c16c16c16c17p-10;
  c = c * z + 0x1.5555555555555p-5;
  c = c * z + -0x1.0p-1;
  c = c * z + 1.0;
  double s = 0x1.6124613a86d09p-33;
  s = s * z + -0x1.ae64567f544e4p-26;
  s = s * z + 0x1.71de3a556c734p-19;
  s = s * z + -0x1.a01a01a01a01ap-13;
  s = s * z + 0x1.1111111111111p-7;
  s = s * z + -0x1.5555555555555p-3;
  s = x + x * (z * s);

  const double cos = quarters == 0 ? c : quarters == 1 ? -s : quarters == 2 ? -c : s;
  const double sin = quarters == 0 ? s : quarters == 1 ? c : quarters == 2 ? -s : -c;
  return {static_cast<float>(cos * factor) + 0.0f, static_cast<float>(sin * factor) + 0.0f};
}

void fill(const mha_rope_config &config, float *cos, float *sin) {
  const Angles angles = angles_of(config);
  const int64_t columns = config.dims / 2;
  constexpr int64_t block = 128;  // columns at once, row by row
  Turn turns[block];
  for (int64_t first = 0; first < columns; first += block) {
    const int64_t count = columns - first < block ? columns - first : block;
    for (int64_t i = 0; i < count; ++i) turns[i] = turn_of(angles, first + i);
    for (int64_t row = 0; row < config.num_positions; ++row) {
      float *cos_row = cos + row * columns + first, *sin_row = sin + row * columns + first;
      for (int64_t i = 0; i < count; ++i) {
        const Values values = values_at(config.first_position + row, turns[i], angles.attention_factor);
        cos_row[i] = values.cos;
        sin_row[i] = values.sin;
      }
    }
  }
}

// ---- Arguments

// A number of config from smallest to largest, the names of which are for the sentence. NaN is outside of every range.
mha_status check_number(Report &report, const char *name, double value, double smallest, double largest, const char *range) {
  if (value >= smallest && value <= largest) return MHA_OK;
  return report.fail(MHA_ERROR_INVALID_VALUE, 1, "%s is %g; set a number from %s", name, value, range);
}

mha_status check_yarn(Report &report, mha_rope_config &config) {
  if (config.yarn_factor == 0) {
    const char *set = config.original_positions != 0 ? "original_positions"
                      : config.yarn_beta_fast != 0        ? "yarn_beta_fast"
                      : config.yarn_beta_slow != 0        ? "yarn_beta_slow"
                      : config.attention_factor != 0 ? "attention_factor"
                                                          : nullptr;
    if (!set) return MHA_OK;
    return report.fail(MHA_ERROR_INVALID_VALUE, 1, "%s is set without yarn_factor; set yarn_factor too, or set %s to 0", set, set);
  }
  mha_status status = check_number(report, "yarn_factor", config.yarn_factor, 1.0, largest_factor, "1 to 2^31, or 0 for no YaRN");
  if (status) return status;
  if (config.original_positions < 1 || config.original_positions > end_of_positions) {
    return report.fail(MHA_ERROR_INVALID_VALUE, 1,
                       "original_positions is %lld; with yarn_factor, set it to the context before the stretching, 1 to 2^31",
                       static_cast<long long>(config.original_positions));
  }
  if (!(config.base > 1.0)) {
    return report.fail(MHA_ERROR_INVALID_VALUE, 1, "base is %g; with yarn_factor, set a base greater than 1", config.base);
  }
  constexpr const char *factors = "2^-31 to 2^31, or 0 for the default";
  if (config.yarn_beta_fast == 0) config.yarn_beta_fast = 32.0;
  if (config.yarn_beta_slow == 0) config.yarn_beta_slow = 1.0;
  status = check_number(report, "yarn_beta_fast", config.yarn_beta_fast, 0x1p-31, largest_factor, factors);
  if (!status) status = check_number(report, "yarn_beta_slow", config.yarn_beta_slow, 0x1p-31, largest_factor, factors);
  if (!status && config.attention_factor != 0) {
    status = check_number(report, "attention_factor", config.attention_factor, 0x1p-31, largest_factor, factors);
  }
  if (status) return status;
  if (config.yarn_beta_slow > config.yarn_beta_fast) {
    return report.fail(MHA_ERROR_INVALID_VALUE, 1, "yarn_beta_slow %g is greater than yarn_beta_fast %g; set it to at most that",
                       config.yarn_beta_slow, config.yarn_beta_fast);
  }
  return MHA_OK;
}

// Checks every field and resolves the defaults.
mha_status check_config(Report &report, mha_rope_config &config) {
  if (config.dims > INT32_MAX) {
    return report.fail(MHA_ERROR_TOO_LARGE, 1, "dims is %lld; it can be 2^31 - 2 at most", static_cast<long long>(config.dims));
  }
  if (config.dims < 2 || config.dims % 2 != 0) {
    return report.fail(MHA_ERROR_INVALID_VALUE, 1, "dims is %lld; set an even number, 2 or more", static_cast<long long>(config.dims));
  }
  if (config.first_position < 0) {
    return report.fail(MHA_ERROR_INVALID_VALUE, 1, "first_position is %lld; a position can't be negative",
                       static_cast<long long>(config.first_position));
  }
  if (config.num_positions < 0) {
    return report.fail(MHA_ERROR_INVALID_VALUE, 1, "num_positions is %lld; it can't be negative",
                       static_cast<long long>(config.num_positions));
  }
  // With dims as above, the tables then have less than 2^63 bytes.
  if (config.first_position > end_of_positions || config.num_positions > end_of_positions - config.first_position) {
    return report.fail(MHA_ERROR_TOO_LARGE, 1, "first_position %lld and num_positions %lld go beyond position 2^31 - 1",
                       static_cast<long long>(config.first_position), static_cast<long long>(config.num_positions));
  }
  if (config.base == 0) config.base = 10000.0;
  if (config.linear_factor == 0) config.linear_factor = 1.0;
  mha_status status = check_number(report, "base", config.base, 1.0, 0x1p64, "1 to 2^64, or 0 for 10000");
  if (!status) status = check_number(report, "linear_factor", config.linear_factor, 1.0, largest_factor, "1 to 2^31, or 0 for 1");
  return status ? status : check_yarn(report, config);
}

}  // namespace
}  // namespace mha

mha_status mha_rope_tables(const mha_rope_config *config, float *cos, float *sin, mha_error *error) {
  using namespace mha;
  Report report(error);
  mha_rope_config known;
  if (const mha_status status = read_struct(report, 1, "mha_rope_config", config, &known)) return status;
  if (const mha_status status = check_config(report, known)) return status;
  if (known.num_positions == 0) return MHA_OK;
  if (!cos) return report.fail(MHA_ERROR_NULL_POINTER, 2, "cos is NULL; pass memory for num_positions * dims / 2 floats");
  if (!sin) return report.fail(MHA_ERROR_NULL_POINTER, 3, "sin is NULL; pass memory for num_positions * dims / 2 floats");
  fill(known, cos, sin);
  return MHA_OK;
}
