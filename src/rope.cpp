// mha_rope_tables: the arithmetic of CONTRACT.md, section "Tables of sines and cosines". Angles are counted in turns as integers, so that
// taking away whole turns is exact at any position.
#include <stdint.h>
#include <string.h>

#include "count.h"
#include "fractions.h"
#include "structs.h"

#ifdef __FAST_MATH__
#error "the arithmetic contract needs IEEE arithmetic: compile without -ffast-math and its parts"
#endif

namespace mha {
namespace {

constexpr int64_t end_of_positions = int64_t{1} << 31;
constexpr double largest_factor = 0x1p31;

constexpr Wide ln2 = wide(0x58b90bfbe8e7bcd5, 0xe4f1d9cc01f97b57);           // fractions, here and below
constexpr Wide two_over_pi = wide(0x517cc1b727220a94, 0xfe13abe8fa9a6ee0);

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
  return log2_of_integer(Wide{parts.mantissa}) + static_cast<SignedWide>(parts.exponent - 52) * (SignedWide{1} << 120);
}

double binary64_of_log2(SignedWide log2) { return static_cast<double>(static_cast<int64_t>(log2 >> 68)) * 0x1p-52; }

// ---- The angles of a table

// What the columns have in common.
struct Angles {
  const mha_rope_config &config;  // defaults resolved
  double dims;
  SignedWide log2_base;     // times 2^120, as all logarithms
  SignedWide log2_stretch;  // dynamic NTK: of what the base is multiplied by, to the power of (dims - 2) / dims
  Wide slowest;             // 1 / factor of YaRN or Llama 3
  SignedWide ramp_first, ramp_last;  // of YaRN: low and high of mha_rope_config, as pairs or, unrounded, as logarithms of 1 / theta
};

// log2(original_positions / (2 pi beta))
SignedWide log2_of_turns(const Angles &angles, double beta) {
  constexpr Wide log2_of_circle = wide(0x02a6c873498ddf75, 0xb0db2e4f080a88e2);
  return log2_of(static_cast<double>(angles.config.original_positions)) - log2_of(beta) - static_cast<SignedWide>(log2_of_circle);
}

// d(beta), brought into -1 .. dims, which an int64_t holds.
double correction(const Angles &angles, double beta) {
  const double turns = binary64_of_log2(log2_of(static_cast<double>(angles.config.original_positions) / (beta * 0x1.921fb54442d18p+2)));
  const double d = angles.dims * turns / (2.0 * binary64_of_log2(angles.log2_base));
  return d < -1.0 ? -1.0 : d > angles.dims ? angles.dims : d;
}

int64_t floor_of(double x) {
  const int64_t truncated = static_cast<int64_t>(x);
  return truncated - (static_cast<double>(truncated) > x);
}

int64_t ceil_of(double x) { return -floor_of(-x); }

// n / dims as a fraction, for n <= dims
Wide part_of(int64_t n, int64_t dims) { return ratio(static_cast<Wide>(n), static_cast<Wide>(dims)); }

// base^(-2 i / dims) = 2^-(what this is / 2^120)
Wide exponent_of(const Angles &angles, int64_t i) {
  const int64_t dims = angles.config.dims;
  Wide u = times(part_of(2 * i, dims), static_cast<Wide>(angles.log2_base));
  if (angles.log2_stretch != 0) u += times(part_of(2 * i, dims - 2), static_cast<Wide>(angles.log2_stretch));
  return u;
}

Wide inverse_of(Parts x) { return ratio(Wide{1} << 52, x.mantissa); }  // of the mantissa

Angles angles_of(const mha_rope_config &config) {
  Angles angles = {config, static_cast<double>(config.dims), log2_of(config.base), 0, one, 0, 0};
  if (config.ntk_factor != 0 && config.ntk_positions > config.original_positions) {
    // 1 + factor * more / original = (2^(52 - exponent) original + mantissa more) / (2^(52 - exponent) original)
    const Parts factor = parts_of(config.ntk_factor);
    const Wide original = static_cast<Wide>(config.original_positions) << (52 - factor.exponent);
    const Wide more = static_cast<Wide>(config.ntk_positions - config.original_positions);
    angles.log2_stretch = log2_of_integer(original + factor.mantissa * more) - log2_of_integer(original);
  }
  const double factor = config.yarn_factor != 0 ? config.yarn_factor : config.llama3_factor;
  if (factor != 0) angles.slowest = ratio(Wide{1} << (52 - parts_of(factor).exponent), parts_of(factor).mantissa);
  if (config.yarn_factor != 0) {
    SignedWide last = config.dims - 1;
    if (config.yarn_unrounded) {
      last = static_cast<SignedWide>(times(part_of(config.dims - 1, config.dims), static_cast<Wide>(angles.log2_base)) << 1);
      angles.ramp_first = log2_of_turns(angles, config.yarn_beta_fast);
      angles.ramp_last = log2_of_turns(angles, config.yarn_beta_slow);
    } else {
      angles.ramp_first = floor_of(correction(angles, config.yarn_beta_fast));
      angles.ramp_last = ceil_of(correction(angles, config.yarn_beta_slow));
    }
    if (angles.ramp_first < 0) angles.ramp_first = 0;
    if (angles.ramp_last > last) angles.ramp_last = last;
  }
  return angles;
}

// 1 - ramp + ramp / factor
Wide between(const Angles &angles, Wide ramp) { return one - ramp + times(ramp, angles.slowest); }

// By what YaRN multiplies the angle of pair i, whose theta is 2^-(u / 2^120), as a fraction.
Wide yarn_weight(const Angles &angles, int64_t i, Wide u) {
  const bool is_rounded = angles.config.yarn_unrounded == 0;
  SignedWide above = (is_rounded ? SignedWide{i} : static_cast<SignedWide>(u)) - angles.ramp_first;
  SignedWide length = angles.ramp_last - angles.ramp_first;  // ramp = above / length
  if (length < 0) {
    above = -above;
    length = -length;
  }
  if (above <= 0) return one;
  if (above > length) return angles.slowest;
  if (!is_rounded) return between(angles, ratio(static_cast<Wide>(above), static_cast<Wide>(length)));
  // 1 - ramp + ramp / factor = ((length - above) * factor + above) / (length * factor), times 2^(52 - exponent) on either side
  const Parts factor = parts_of(angles.config.yarn_factor);
  const Wide stretched = static_cast<Wide>(above) << (52 - factor.exponent);
  return ratio(static_cast<Wide>(length - above) * factor.mantissa + stretched, static_cast<Wide>(length) * factor.mantissa);
}

// The same of Llama 3, for a pair whose angle is 2^-whole of what is a quarter of a turn times `quarter`.
Wide llama3_weight(const Angles &angles, int whole, Wide quarter) {
  const mha_rope_config &config = angles.config;
  const Parts positions = parts_of(static_cast<double>(config.original_positions));
  const Parts high = parts_of(config.llama3_high_freq_factor), low = parts_of(config.llama3_low_freq_factor);
  // Turns as fractions of 2^(high.exponent + 4). They are at least 1/8 before they are shifted: without, they are more than `last`.
  const int shift = high.exponent + 5 + whole - positions.exponent;
  if (shift <= 0) return one;
  const Wide turns = shift < 127 ? times(quarter, Wide{positions.mantissa} << 74) >> shift : 0;
  const Wide last = Wide{high.mantissa} << 71, first = Wide{low.mantissa} << (71 - high.exponent + low.exponent);
  if (turns >= last) return one;
  if (turns <= first) return angles.slowest;
  return between(angles, ratio(last - turns, last - first));
}

// The part of a turn by which pair i turns from one position to the next, step / 2^shift with 2^95 <= step < 2^96.
struct Turn {
  Wide step;
  int shift;
};

Turn turn_of(const Angles &angles, int64_t i) {
  const mha_rope_config &config = angles.config;
  // theta = 2^-whole * y
  const Wide u = exponent_of(angles, i);
  const int whole = static_cast<int>(u >> 120);
  const Wide x = times((u << 7) & (one - 1), ln2);
  Wide y = one;
  for (uint32_t j = 34; j > 0; --j) y = one - quotient(times(x, y), j);

  const Wide quarter = times(y, two_over_pi);
  const Wide weight = config.yarn_factor != 0     ? yarn_weight(angles, i, u)
                      : config.llama3_factor != 0 ? llama3_weight(angles, whole, quarter)
                                                  : one;
  const Parts linear = parts_of(config.linear_factor), own = parts_of(config.pair_factors ? config.pair_factors[i] : 1.0);
  const Wide t = times(times(times(quarter, weight), inverse_of(linear)), inverse_of(own));
  const int highest = highest_bit(t);
  const Wide step = highest >= 95 ? t >> (highest - 95) : t << (95 - highest);
  return {step, 224 + whole + linear.exponent + own.exponent - highest};
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
  const double factor = config.attention_factor != 0 ? config.attention_factor
                        : config.yarn_factor != 0
                            ? 0x1.999999999999ap-4 * (0x1.62e42fefa39efp-1 * binary64_of_log2(log2_of(config.yarn_factor))) + 1.0
                            : 1.0;
  const int64_t columns = config.dims / 2;
  constexpr int64_t block = 128;  // columns at once, row by row
  Turn turns[block];
  for (int64_t first = 0; first < columns; first += block) {
    const int64_t count = columns - first < block ? columns - first : block;
    for (int64_t i = 0; i < count; ++i) turns[i] = turn_of(angles, first + i);
    for (int64_t row = 0; row < config.num_positions; ++row) {
      float *cos_row = cos + row * columns + first, *sin_row = sin + row * columns + first;
      for (int64_t i = 0; i < count; ++i) {
        const Values values = values_at(config.first_position + row, turns[i], factor);
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

// What has to be left out where there is nothing that it belongs to.
mha_status check_unset(Report &report, const char *name, bool is_set, const char *needed) {
  if (!is_set) return MHA_OK;
  return report.fail(MHA_ERROR_INVALID_VALUE, 1, "%s is set without %s; set that too, or set %s to 0", name, needed, name);
}

mha_status check_original_positions(Report &report, const mha_rope_config &config, const char *factor) {
  if (config.original_positions >= 1 && config.original_positions <= end_of_positions) return MHA_OK;
  return report.fail(MHA_ERROR_INVALID_VALUE, 1,
                     "original_positions is %lld; with %s, set it to the context before the stretching, 1 to 2^31",
                     static_cast<long long>(config.original_positions), factor);
}

constexpr const char *factors = "2^-31 to 2^31, or 0 for the default";

mha_status check_yarn(Report &report, mha_rope_config &config) {
  if (config.yarn_factor == 0) {
    mha_status status = check_unset(report, "yarn_beta_fast", config.yarn_beta_fast != 0, "yarn_factor");
    if (!status) status = check_unset(report, "yarn_beta_slow", config.yarn_beta_slow != 0, "yarn_factor");
    return status ? status : check_unset(report, "yarn_unrounded", config.yarn_unrounded != 0, "yarn_factor");
  }
  mha_status status = check_number(report, "yarn_factor", config.yarn_factor, 1.0, largest_factor, "1 to 2^31, or 0 for no YaRN");
  if (!status) status = check_original_positions(report, config, "yarn_factor");
  if (status) return status;
  if (!(config.base > 1.0)) {
    return report.fail(MHA_ERROR_INVALID_VALUE, 1, "base is %g; with yarn_factor, set a base greater than 1", config.base);
  }
  if (config.yarn_beta_fast == 0) config.yarn_beta_fast = 32.0;
  if (config.yarn_beta_slow == 0) config.yarn_beta_slow = 1.0;
  status = check_number(report, "yarn_beta_fast", config.yarn_beta_fast, 0x1p-31, largest_factor, factors);
  if (!status) status = check_number(report, "yarn_beta_slow", config.yarn_beta_slow, 0x1p-31, largest_factor, factors);
  if (status) return status;
  if (config.yarn_beta_slow > config.yarn_beta_fast) {
    return report.fail(MHA_ERROR_INVALID_VALUE, 1, "yarn_beta_slow %g is greater than yarn_beta_fast %g; set it to at most that",
                       config.yarn_beta_slow, config.yarn_beta_fast);
  }
  if (config.yarn_unrounded > 1) {
    return report.fail(MHA_ERROR_INVALID_VALUE, 1, "yarn_unrounded is %u; set it to 0 or 1", config.yarn_unrounded);
  }
  return MHA_OK;
}

mha_status check_llama3(Report &report, mha_rope_config &config) {
  double &low = config.llama3_low_freq_factor, &high = config.llama3_high_freq_factor;
  if (config.llama3_factor == 0) {
    const mha_status status = check_unset(report, "llama3_low_freq_factor", low != 0, "llama3_factor");
    return status ? status : check_unset(report, "llama3_high_freq_factor", high != 0, "llama3_factor");
  }
  if (low == 0) low = 1.0;
  if (high == 0) high = 4.0;
  mha_status status = check_number(report, "llama3_factor", config.llama3_factor, 1.0, largest_factor, "1 to 2^31, or 0 for none");
  if (!status) status = check_original_positions(report, config, "llama3_factor");
  if (!status) status = check_number(report, "llama3_low_freq_factor", low, 0x1p-31, largest_factor, factors);
  if (!status) status = check_number(report, "llama3_high_freq_factor", high, 0x1p-31, largest_factor, factors);
  if (status || high > low) return status;
  return report.fail(MHA_ERROR_INVALID_VALUE, 1, "llama3_high_freq_factor %g is not greater than llama3_low_freq_factor %g; set it to more",
                     high, low);
}

mha_status check_ntk(Report &report, const mha_rope_config &config) {
  if (config.ntk_factor == 0) return check_unset(report, "ntk_positions", config.ntk_positions != 0, "ntk_factor");
  mha_status status = check_number(report, "ntk_factor", config.ntk_factor, 1.0, largest_factor, "1 to 2^31, or 0 for none");
  if (!status) status = check_original_positions(report, config, "ntk_factor");
  if (status) return status;
  if (config.ntk_positions < 1 || config.ntk_positions > end_of_positions) {
    return report.fail(MHA_ERROR_INVALID_VALUE, 1, "ntk_positions is %lld; with ntk_factor, set it to the length of the context, 1 to 2^31",
                       static_cast<long long>(config.ntk_positions));
  }
  if (config.dims == 2) return report.fail(MHA_ERROR_INVALID_VALUE, 1, "dims is 2; with ntk_factor, set an even number, 4 or more");
  return MHA_OK;
}

// Of the kinds of scaling at most one is asked for, and it is complete.
mha_status check_scaling(Report &report, mha_rope_config &config) {
  const struct {
    const char *name;
    bool is_set;
  } kinds[] = {{"yarn_factor", config.yarn_factor != 0},
               {"llama3_factor", config.llama3_factor != 0},
               {"pair_factors", config.pair_factors != nullptr},
               {"ntk_factor", config.ntk_factor != 0}};
  const char *chosen = nullptr;
  for (const auto &kind : kinds) {
    if (!kind.is_set) continue;
    if (chosen) return report.fail(MHA_ERROR_INVALID_VALUE, 1, "%s and %s are both set; set one of them", chosen, kind.name);
    chosen = kind.name;
  }
  if (!chosen || config.pair_factors) {
    const mha_status status =
        check_unset(report, "original_positions", config.original_positions != 0, "yarn_factor, llama3_factor or ntk_factor");
    if (status) return status;
  }
  mha_status status = check_yarn(report, config);
  if (!status) status = check_llama3(report, config);
  if (!status) status = check_ntk(report, config);
  if (!status && config.attention_factor != 0) {
    status = check_number(report, "attention_factor", config.attention_factor, 0x1p-31, largest_factor, factors);
  }
  for (int64_t i = 0; !status && config.pair_factors && i < config.dims / 2; ++i) {
    const double factor = config.pair_factors[i];
    if (factor >= 0.5 && factor <= largest_factor) continue;
    status = report.fail(MHA_ERROR_INVALID_VALUE, 1, "pair_factors[%lld] is %g; set a number from 1/2 to 2^31", static_cast<long long>(i),
                         factor);
  }
  return status;
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
  if (!status && config.reserved != 0) {
    status = report.fail(MHA_ERROR_INVALID_VALUE, 1, "mha_rope_config.reserved is %u; set it to 0", config.reserved);
  }
  return status ? status : check_scaling(report, config);
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
