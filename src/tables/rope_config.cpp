// A configuration has the numbers of plain RoPE, at most one kind of scaling for contexts that are
// longer than those in training (YaRN, Llama 3, factors for each pair, NTK), and sections for
// positions of several dimensions (M-RoPE). check_rope_config begins with the plain numbers,
// because the other checks use them.
//
// Each pair of columns turns by an angle theta from one position to the next. Linear scaling
// divides all of them, factors for pairs divide each by its own, and YaRN and Llama 3 divide those
// of slow pairs. NTK changes the base from which all of them follow.
//
// All bounds are powers of two so large that no model needs more, and so small that no intermediate
// result of tables.cpp overflows.
#include "rope_config.h"

#include <initializer_list>

#include "../base/count.h"

namespace mha {
namespace {

constexpr int64_t end_of_positions = int64_t{1} << 31;
constexpr double largest_factor = 0x1p31;

// `range` says in words what smallest and largest are. NaN is outside of every range.
mha_status check_number(Report report, const char *name, double value, double smallest,
                        double largest, const char *range) {
  if (value >= smallest && value <= largest) return MHA_OK;
  return report.invalid("%s is %g; set it to a number from %s", name, value, range);
}

// Most factors have these bounds and a default.
mha_status check_factor(Report report, const char *name, double value) {
  return check_number(report, name, value, 0x1p-31, largest_factor,
                      "2^-31 to 2^31, or 0 for the default");
}

// A field of the configuration, and whether the caller set it.
struct Field {
  const char *name;
  bool is_set;
};

// Fields that have no meaning without another one, `needed`, which is not set.
mha_status check_unset(Report report, const char *needed, std::initializer_list<Field> fields) {
  for (const Field &field : fields) {
    if (field.is_set)
      return report.invalid("%s is set without %s; set %s, too, or leave %s unset", field.name,
                            needed, needed, field.name);
  }
  return MHA_OK;
}

// Three kinds of scaling stretch the context that a model was trained with by a factor, whose field
// is `name`.
mha_status check_stretch(Report report, const mha_rope_config &config, const char *name,
                         double factor, const char *range = "1 to 2^31, or 0 for none") {
  MHA_TRY(check_number(report, name, factor, 1.0, largest_factor, range));
  if (config.original_positions >= 1 && config.original_positions <= end_of_positions)
    return MHA_OK;
  return report.invalid(
      "original_positions is %lld; with %s, set it to the context length in training, 1 to 2^31",
      lld(config.original_positions), name);
}

// YaRN stretches pairs that turn slowly and leaves fast ones alone. The betas are the numbers of
// turns, within the original context, between which it goes from one to the other.
mha_status check_yarn(Report report, mha_rope_config &config) {
  if (config.yarn_factor == 0)
    return check_unset(report, "yarn_factor",
                       {{"yarn_beta_fast", config.yarn_beta_fast != 0},
                        {"yarn_beta_slow", config.yarn_beta_slow != 0},
                        {"yarn_unrounded", config.yarn_unrounded != 0}});
  MHA_TRY(check_stretch(report, config, "yarn_factor", config.yarn_factor,
                        "1 to 2^31, or 0 for no YaRN"));
  if (!(config.base > 1.0))
    return report.invalid("base is %g; with yarn_factor, set it to more than 1", config.base);
  if (config.yarn_beta_fast == 0) config.yarn_beta_fast = 32.0;
  if (config.yarn_beta_slow == 0) config.yarn_beta_slow = 1.0;
  MHA_TRY(check_factor(report, "yarn_beta_fast", config.yarn_beta_fast));
  MHA_TRY(check_factor(report, "yarn_beta_slow", config.yarn_beta_slow));
  if (config.yarn_beta_slow > config.yarn_beta_fast)
    return report.invalid(
        "yarn_beta_slow is %g, greater than yarn_beta_fast, %g; set it to at most that",
        config.yarn_beta_slow, config.yarn_beta_fast);
  if (config.yarn_unrounded > 1)
    return report.invalid("yarn_unrounded is %u; set it to 0 or 1", config.yarn_unrounded);
  return MHA_OK;
}

// Llama 3 does the same as YaRN by another formula, which divides by the difference of both
// frequency factors.
mha_status check_llama3(Report report, mha_rope_config &config) {
  double &low = config.llama3_low_freq_factor, &high = config.llama3_high_freq_factor;
  if (config.llama3_factor == 0)
    return check_unset(
        report, "llama3_factor",
        {{"llama3_low_freq_factor", low != 0}, {"llama3_high_freq_factor", high != 0}});
  if (low == 0) low = 1.0;
  if (high == 0) high = 4.0;
  MHA_TRY(check_stretch(report, config, "llama3_factor", config.llama3_factor));
  MHA_TRY(check_factor(report, "llama3_low_freq_factor", low));
  MHA_TRY(check_factor(report, "llama3_high_freq_factor", high));
  if (high > low) return MHA_OK;
  return report.invalid(
      "llama3_high_freq_factor is %g, not greater than llama3_low_freq_factor, %g; set it to more",
      high, low);
}

// NTK raises the base with the length of the context, to a power of dims / (dims - 2).
mha_status check_ntk(Report report, const mha_rope_config &config) {
  if (config.ntk_factor == 0)
    return check_unset(report, "ntk_factor", {{"ntk_positions", config.ntk_positions != 0}});
  MHA_TRY(check_stretch(report, config, "ntk_factor", config.ntk_factor));
  if (config.ntk_positions < 1 || config.ntk_positions > end_of_positions)
    return report.invalid(
        "ntk_positions is %lld; with ntk_factor, set it to the current context length, 1 to 2^31",
        lld(config.ntk_positions));
  // The exponent dims / (dims - 2) would be infinite.
  if (config.dims == 2)
    return report.invalid("dims is 2; with ntk_factor, set it to an even number, 4 or more");
  return MHA_OK;
}

// At most one kind of scaling is asked for, and all its fields are set.
mha_status check_scaling(Report report, mha_rope_config &config) {
  const Field kinds[] = {{"yarn_factor", config.yarn_factor != 0},
                         {"llama3_factor", config.llama3_factor != 0},
                         {"pair_factors", config.pair_factors != nullptr},
                         {"ntk_factor", config.ntk_factor != 0}};
  const char *chosen = nullptr;
  for (const Field &kind : kinds) {
    if (!kind.is_set) continue;
    if (chosen)
      return report.invalid("%s and %s are both set; set only one of them", chosen, kind.name);
    chosen = kind.name;
  }
  if (!chosen || config.pair_factors)
    MHA_TRY(check_unset(report, "yarn_factor, llama3_factor or ntk_factor",
                        {{"original_positions", config.original_positions != 0}}));
  MHA_TRY(check_yarn(report, config));
  MHA_TRY(check_llama3(report, config));
  MHA_TRY(check_ntk(report, config));
  if (config.attention_factor != 0)
    MHA_TRY(check_factor(report, "attention_factor", config.attention_factor));
  // Models give these factors as a table, one for each pair, so each is checked by itself.
  for (int64_t i = 0; config.pair_factors && i < config.dims / 2; ++i) {
    const double factor = config.pair_factors[i];
    if (factor >= 0.5 && factor <= largest_factor) continue;
    return report.invalid("pair_factors[%lld] is %g; set it to a number from 1/2 to 2^31", lld(i),
                          factor);
  }
  return MHA_OK;
}

// M-RoPE gives a row three positions (time, height, width), and each pair goes by one of them. The
// sections say how many pairs go by each. They follow each other or take turns; in turns, section k
// takes every third pair from pair k on, and the first section also has all pairs that are left.
mha_status check_mrope(Report report, const mha_rope_config &config) {
  const int64_t *const section = config.mrope_section, pairs = config.dims / 2;
  if (!section)
    return check_unset(report, "mrope_section",
                       {{"mrope_positions", config.mrope_positions != nullptr},
                        {"mrope_interleaved", config.mrope_interleaved != 0}});
  if (!config.mrope_positions)
    return report.null(
        "mrope_positions is NULL; with mrope_section, pass 3 * num_positions positions");
  if (config.first_position != 0)
    return report.invalid(
        "first_position is %lld, but mrope_positions gives the positions; set it to 0",
        lld(config.first_position));
  if (config.mrope_interleaved > 1)
    return report.invalid("mrope_interleaved is %u; set it to 0 or 1", config.mrope_interleaved);
  // The sections have to add up to all pairs. In turns, the second and the third take at most every
  // third pair.
  bool is_sound = true;
  int64_t rest = pairs;
  for (int k = 0; k < 3 && is_sound; ++k) {
    is_sound = section[k] >= 0 && section[k] <= rest &&
               !(config.mrope_interleaved && k > 0 && section[k] > (pairs + 2 - k) / 3);
    if (is_sound) rest -= section[k];
  }
  if (!is_sound || rest != 0)
    return report.invalid(
        "mrope_section is %lld, %lld, %lld; set numbers of pairs whose sum is dims / 2, %lld%s",
        lld(section[0]), lld(section[1]), lld(section[2]), lld(pairs),
        config.mrope_interleaved ? ", the second and the third at most a third of it" : "");
  // Positions are [3, num_positions]. Plain ones were bounded by first_position and num_positions.
  for (int64_t i = 0; i < 3 * config.num_positions; ++i) {
    const int64_t position = config.mrope_positions[i];
    if (position >= 0 && position < end_of_positions) continue;
    return report.invalid(
        "mrope_positions[%lld][%lld] is %lld; set it to a position from 0 to 2^31 - 1",
        lld(i / config.num_positions), lld(i % config.num_positions), lld(position));
  }
  return MHA_OK;
}

}  // namespace

mha_status check_rope_config(Report report, mha_rope_config &config) {
  if (config.dims > INT32_MAX)
    return report.too_large("dims is %lld; set it to at most 2^31 - 2", lld(config.dims));
  if (config.dims < 2 || config.dims % 2 != 0)
    return report.invalid("dims is %lld; set it to an even number, 2 or more", lld(config.dims));
  if (config.first_position < 0)
    return report.invalid("first_position is %lld; set it to at least 0",
                          lld(config.first_position));
  if (config.num_positions < 1)
    return report.invalid("num_positions is %lld; set it to the rows of cos and sin, at least 1",
                          lld(config.num_positions));
  // Together with the bound on dims, this keeps the tables below 2^63 bytes.
  if (config.num_positions > end_of_positions - config.first_position)
    return report.too_large(
        "first_position is %lld and num_positions is %lld; set them so that their sum is at most "
        "2^31",
        lld(config.first_position), lld(config.num_positions));
  // 0 stands for the default of each of these.
  if (config.base == 0) config.base = 10000.0;
  if (config.linear_factor == 0) config.linear_factor = 1.0;
  MHA_TRY(check_number(report, "base", config.base, 1.0, 0x1p64, "1 to 2^64, or 0 for 10000"));
  MHA_TRY(check_number(report, "linear_factor", config.linear_factor, 1.0, largest_factor,
                       "1 to 2^31, or 0 for 1"));
  MHA_TRY(check_scaling(report, config));
  return check_mrope(report, config);
}

}  // namespace mha
