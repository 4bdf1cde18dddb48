// mha_rope_tables: the arithmetic of CONTRACT.md, section "Tables of sines and cosines". It is
// binary64, with the functions of binary64.h: no libm, so that every machine computes the same
// bits.
#include <stdint.h>

#include "binary64.h"
#include "count.h"
#include "structs.h"

namespace mha {
namespace {

constexpr int64_t end_of_positions = int64_t{1} << 31;
constexpr double largest_factor = 0x1p31;

// ---- Angles

// What the columns have in common.
struct Angles {
  const mha_rope_config &config;  // defaults resolved
  double dims;
  double log2_base;
  double first, last;  // YaRN: low and high of docs/rope.md
};

// YaRN's d(beta), brought into a range whose floor and ceil are integers of 64 bits.
double correction(const Angles &angles, double beta) {
  const double turns =
      log2_of(static_cast<double>(angles.config.original_positions) / (beta * two_pi));
  const double d = angles.dims * turns / (2.0 * angles.log2_base);
  return d < -1.0 ? -1.0 : d > angles.dims ? angles.dims : d;
}

Angles angles_of(const mha_rope_config &config) {
  Angles angles = {config, static_cast<double>(config.dims), log2_of(config.base), 0.0, 0.0};
  if (config.ntk_factor != 0 && config.ntk_positions > config.original_positions) {
    const double more = static_cast<double>(config.ntk_positions - config.original_positions);
    const double stretch =
        1.0 + config.ntk_factor * more / static_cast<double>(config.original_positions);
    angles.log2_base += log2_of(stretch) * angles.dims / (angles.dims - 2.0);
  }
  if (config.yarn_factor != 0) {
    angles.first = correction(angles, config.yarn_beta_fast);
    angles.last = correction(angles, config.yarn_beta_slow);
    if (!config.yarn_unrounded) {
      angles.first = floor_of(angles.first);
      angles.last = -floor_of(-angles.last);
    }
    if (angles.first < 0.0) angles.first = 0.0;
    if (angles.last > angles.dims - 1.0) angles.last = angles.dims - 1.0;
  }
  return angles;
}

// How much of its stretching a pair gets, 0 to 1.
double ramp_of(const Angles &angles, int64_t i, double theta) {
  const mha_rope_config &config = angles.config;
  double ramp;
  if (config.yarn_factor != 0) {
    const double above = static_cast<double>(i) - angles.first, length = angles.last - angles.first;
    ramp = length != 0.0 ? above / length : above > 0.0 ? 1.0 : 0.0;
  } else {
    const double turns = static_cast<double>(config.original_positions) * theta / two_pi;
    ramp = (config.llama3_high_freq_factor - turns) /
           (config.llama3_high_freq_factor - config.llama3_low_freq_factor);
  }
  return ramp < 0.0 ? 0.0 : ramp > 1.0 ? 1.0 : ramp;
}

// By how much pair i turns from one position to the next, in turns * 2^64: a product of these
// integers wraps as often as the pair turns.
uint64_t step_of(const Angles &angles, int64_t i) {
  const mha_rope_config &config = angles.config;
  double theta = exp2_of_minus(static_cast<double>(2 * i) * angles.log2_base / angles.dims);
  const double factor = config.yarn_factor != 0 ? config.yarn_factor : config.llama3_factor;
  if (factor != 0) {
    const double ramp = ramp_of(angles, i, theta);
    theta = theta * (1.0 - ramp + ramp / factor);
  }
  theta = theta / config.linear_factor;
  if (config.pair_factors) theta = theta / config.pair_factors[i];
  return static_cast<uint64_t>(theta / two_pi * 0x1p64);
}

// ---- Values

// Of each row, the position that pair i goes by; null: first_position and those behind it.
const int64_t *positions_of(const mha_rope_config &config, int64_t i) {
  const int64_t *const section = config.mrope_section;
  if (!section) return nullptr;
  const int64_t in_order = i < section[0]                ? 0
                           : i < section[0] + section[1] ? 1
                                                         : 2,
                in_turn = i < 3 * section[i % 3] ? i % 3 : 0;
  return config.mrope_positions +
         (config.mrope_interleaved ? in_turn : in_order) * config.num_positions;
}

struct Values {
  float cos, sin;
};

Values values_at(int64_t position, uint64_t step, double factor) {
  const uint64_t angle = static_cast<uint64_t>(position) * step;
  const uint64_t quarters = (angle + (uint64_t{1} << 61)) >> 62;
  // At most pi / 4.
  const double x =
      static_cast<double>(static_cast<int64_t>(angle - (quarters << 62))) * (two_pi * 0x1p-64);

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
                        : config.yarn_factor != 0 ? 0.1 * (ln2 * log2_of(config.yarn_factor)) + 1.0
                                                  : 1.0;
  const int64_t columns = config.dims / 2;
  constexpr int64_t block = 128;  // columns at once, row by row
  uint64_t steps[block];
  const int64_t *positions[block];
  for (int64_t first = 0; first < columns; first += block) {
    const int64_t count = columns - first < block ? columns - first : block;
    for (int64_t i = 0; i < count; ++i)
      steps[i] = step_of(angles, first + i), positions[i] = positions_of(config, first + i);
    for (int64_t row = 0; row < config.num_positions; ++row) {
      for (int64_t i = 0; i < count; ++i) {
        const Values values = values_at(
            positions[i] ? positions[i][row] : config.first_position + row, steps[i], factor);
        cos[row * columns + first + i] = values.cos;
        sin[row * columns + first + i] = values.sin;
      }
    }
  }
}

// ---- Arguments

// A number of config from smallest to largest, the names of which are for the sentence. NaN is
// outside of every range.
mha_status check_number(Report report, const char *name, double value, double smallest,
                        double largest, const char *range) {
  if (value >= smallest && value <= largest) return MHA_OK;
  return report.invalid("%s is %g; set it to a number from %s", name, value, range);
}

// What has to be left out where there is nothing that it belongs to.
mha_status check_unset(Report report, const char *name, bool is_set, const char *needed) {
  if (!is_set) return MHA_OK;
  return report.invalid("%s is set without %s; set %s, too, or leave %s unset", name, needed,
                        needed, name);
}

mha_status check_original_positions(Report report, const mha_rope_config &config,
                                    const char *factor) {
  if (config.original_positions >= 1 && config.original_positions <= end_of_positions)
    return MHA_OK;
  return report.invalid(
      "original_positions is %lld; with %s, set it to the context length in training, 1 to 2^31",
      lld(config.original_positions), factor);
}

constexpr const char *factors = "2^-31 to 2^31, or 0 for the default";

mha_status check_yarn(Report report, mha_rope_config &config) {
  if (config.yarn_factor == 0) {
    mha_status status =
        check_unset(report, "yarn_beta_fast", config.yarn_beta_fast != 0, "yarn_factor");
    if (!status)
      status = check_unset(report, "yarn_beta_slow", config.yarn_beta_slow != 0, "yarn_factor");
    return status
               ? status
               : check_unset(report, "yarn_unrounded", config.yarn_unrounded != 0, "yarn_factor");
  }
  mha_status status = check_number(report, "yarn_factor", config.yarn_factor, 1.0, largest_factor,
                                   "1 to 2^31, or 0 for no YaRN");
  if (!status) status = check_original_positions(report, config, "yarn_factor");
  if (status) return status;
  if (!(config.base > 1.0))
    return report.invalid("base is %g; with yarn_factor, set it to more than 1", config.base);
  if (config.yarn_beta_fast == 0) config.yarn_beta_fast = 32.0;
  if (config.yarn_beta_slow == 0) config.yarn_beta_slow = 1.0;
  status = check_number(report, "yarn_beta_fast", config.yarn_beta_fast, 0x1p-31, largest_factor,
                        factors);
  if (!status)
    status = check_number(report, "yarn_beta_slow", config.yarn_beta_slow, 0x1p-31, largest_factor,
                          factors);
  if (status) return status;
  if (config.yarn_beta_slow > config.yarn_beta_fast) {
    return report.invalid(
        "yarn_beta_slow is %g, greater than yarn_beta_fast, %g; set it to at most that",
        config.yarn_beta_slow, config.yarn_beta_fast);
  }
  if (config.yarn_unrounded > 1)
    return report.invalid("yarn_unrounded is %u; set it to 0 or 1", config.yarn_unrounded);
  return MHA_OK;
}

mha_status check_llama3(Report report, mha_rope_config &config) {
  double &low = config.llama3_low_freq_factor, &high = config.llama3_high_freq_factor;
  if (config.llama3_factor == 0) {
    const mha_status status =
        check_unset(report, "llama3_low_freq_factor", low != 0, "llama3_factor");
    return status ? status
                  : check_unset(report, "llama3_high_freq_factor", high != 0, "llama3_factor");
  }
  if (low == 0) low = 1.0;
  if (high == 0) high = 4.0;
  mha_status status = check_number(report, "llama3_factor", config.llama3_factor, 1.0,
                                   largest_factor, "1 to 2^31, or 0 for none");
  if (!status) status = check_original_positions(report, config, "llama3_factor");
  if (!status)
    status = check_number(report, "llama3_low_freq_factor", low, 0x1p-31, largest_factor, factors);
  if (!status)
    status =
        check_number(report, "llama3_high_freq_factor", high, 0x1p-31, largest_factor, factors);
  if (status || high > low) return status;
  return report.invalid(
      "llama3_high_freq_factor is %g, not greater than llama3_low_freq_factor, %g; set it to more",
      high, low);
}

mha_status check_ntk(Report report, const mha_rope_config &config) {
  if (config.ntk_factor == 0)
    return check_unset(report, "ntk_positions", config.ntk_positions != 0, "ntk_factor");
  mha_status status = check_number(report, "ntk_factor", config.ntk_factor, 1.0, largest_factor,
                                   "1 to 2^31, or 0 for none");
  if (!status) status = check_original_positions(report, config, "ntk_factor");
  if (status) return status;
  if (config.ntk_positions < 1 || config.ntk_positions > end_of_positions) {
    return report.invalid(
        "ntk_positions is %lld; with ntk_factor, set it to the current context length, 1 to 2^31",
        lld(config.ntk_positions));
  }
  if (config.dims == 2)
    return report.invalid("dims is 2; with ntk_factor, set it to an even number, 4 or more");
  return MHA_OK;
}

// Of the kinds of scaling at most one is asked for, and it is complete.
mha_status check_scaling(Report report, mha_rope_config &config) {
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
    if (chosen)
      return report.invalid("%s and %s are both set; set only one of them", chosen, kind.name);
    chosen = kind.name;
  }
  if (!chosen || config.pair_factors) {
    const mha_status status =
        check_unset(report, "original_positions", config.original_positions != 0,
                    "yarn_factor, llama3_factor or ntk_factor");
    if (status) return status;
  }
  mha_status status = check_yarn(report, config);
  if (!status) status = check_llama3(report, config);
  if (!status) status = check_ntk(report, config);
  if (!status && config.attention_factor != 0)
    status = check_number(report, "attention_factor", config.attention_factor, 0x1p-31,
                          largest_factor, factors);
  for (int64_t i = 0; !status && config.pair_factors && i < config.dims / 2; ++i) {
    const double factor = config.pair_factors[i];
    if (factor >= 0.5 && factor <= largest_factor) continue;
    status = report.invalid("pair_factors[%lld] is %g; set it to a number from 1/2 to 2^31", lld(i),
                            factor);
  }
  return status;
}

mha_status check_mrope(Report report, const mha_rope_config &config) {
  const int64_t *const section = config.mrope_section, pairs = config.dims / 2;
  if (!section) {
    const mha_status status =
        check_unset(report, "mrope_positions", config.mrope_positions != nullptr, "mrope_section");
    return status ? status
                  : check_unset(report, "mrope_interleaved", config.mrope_interleaved != 0,
                                "mrope_section");
  }
  if (!config.mrope_positions)
    return report.fail(
        MHA_ERROR_NULL_POINTER,
        "mrope_positions is NULL; with mrope_section, pass 3 * num_positions positions");
  if (config.first_position != 0)
    return report.invalid(
        "first_position is %lld, but mrope_positions gives the positions; set it to 0",
        lld(config.first_position));
  if (config.mrope_interleaved > 1)
    return report.invalid("mrope_interleaved is %u; set it to 0 or 1", config.mrope_interleaved);
  bool is_sound = true;
  int64_t rest = pairs;
  for (int k = 0; k < 3 && is_sound; ++k) {
    is_sound = section[k] >= 0 && section[k] <= rest &&
               !(config.mrope_interleaved && k > 0 && section[k] > (pairs + 2 - k) / 3);
    if (is_sound) rest -= section[k];
  }
  if (!is_sound || rest != 0) {
    return report.invalid(
        "mrope_section is %lld, %lld, %lld; set numbers of pairs whose sum is dims / 2, %lld%s",
        lld(section[0]), lld(section[1]), lld(section[2]), lld(pairs),
        config.mrope_interleaved ? ", the second and the third at most a third of it" : "");
  }
  for (int64_t i = 0; i < 3 * config.num_positions; ++i) {
    const int64_t position = config.mrope_positions[i];
    if (position >= 0 && position < end_of_positions) continue;
    return report.invalid(
        "mrope_positions[%lld][%lld] is %lld; set it to a position from 0 to 2^31 - 1",
        lld(i / config.num_positions), lld(i % config.num_positions), lld(position));
  }
  return MHA_OK;
}

// Checks every field and resolves the defaults.
mha_status check_config(Report report, mha_rope_config &config) {
  if (config.dims > INT32_MAX)
    return report.fail(MHA_ERROR_TOO_LARGE, "dims is %lld; set it to at most 2^31 - 2",
                       lld(config.dims));
  if (config.dims < 2 || config.dims % 2 != 0)
    return report.invalid("dims is %lld; set it to an even number, 2 or more", lld(config.dims));
  if (config.first_position < 0)
    return report.invalid("first_position is %lld; set it to at least 0",
                          lld(config.first_position));
  if (config.num_positions < 1)
    return report.invalid("num_positions is %lld; set it to the rows of cos and sin, at least 1",
                          lld(config.num_positions));
  // With dims as above, the tables then have less than 2^63 bytes.
  if (config.first_position > end_of_positions ||
      config.num_positions > end_of_positions - config.first_position) {
    return report.fail(MHA_ERROR_TOO_LARGE,
                       "first_position is %lld and num_positions is %lld; set them so that their "
                       "sum is at most 2^31",
                       lld(config.first_position), lld(config.num_positions));
  }
  if (config.base == 0) config.base = 10000.0;
  if (config.linear_factor == 0) config.linear_factor = 1.0;
  mha_status status =
      check_number(report, "base", config.base, 1.0, 0x1p64, "1 to 2^64, or 0 for 10000");
  if (!status)
    status = check_number(report, "linear_factor", config.linear_factor, 1.0, largest_factor,
                          "1 to 2^31, or 0 for 1");
  if (!status) status = check_scaling(report, config);
  return status ? status : check_mrope(report, config);
}

}  // namespace
}  // namespace mha

mha_status mha_rope_tables(const mha_rope_config *config, float *cos, float *sin,
                           mha_error *error) {
  using namespace mha;
  Report report(error);
  mha_rope_config known;
  if (const mha_status status = read_struct(report, "mha_rope_config", config, &known))
    return status;
  if (const mha_status status = check_config(report, known)) return status;
  if (!cos)
    return report.about(2).fail(MHA_ERROR_NULL_POINTER,
                                "cos is NULL; pass memory for num_positions * dims / 2 floats");
  if (!sin)
    return report.about(3).fail(MHA_ERROR_NULL_POINTER,
                                "sin is NULL; pass memory for num_positions * dims / 2 floats");
  fill(known, cos, sin);
  return MHA_OK;
}
