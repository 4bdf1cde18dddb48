// A configuration has the numbers of plain RoPE, at most one kind of scaling for contexts that are
// longer than those in training (YaRN, Llama 3, factors for each pair, NTK), and sections for
// positions of several dimensions (M-RoPE).
//
// Each pair of columns turns by an angle theta from one position to the next. Linear scaling
// divides all of them, factors for pairs divide each by its own, and YaRN and Llama 3 divide those
// of slow pairs. NTK changes the base from which all of them follow.
//
// All bounds are powers of two so large that no model needs more, and so small that no intermediate
// result of tables.cpp overflows.
#include "rope_config.h"

#include "../check/rules.h"

namespace mha {
namespace {

constexpr int64_t end_of_positions = int64_t{1} << 31;

// At most one kind of scaling is asked for, with all of its fields and none of the others.
mha_status check_scaling(const Rules &rules, const mha_rope_config &c) {
  const Given yarn = {"yarn_factor", c.yarn_factor}, llama3 = {"llama3_factor", c.llama3_factor},
              ntk = {"ntk_factor", c.ntk_factor},
              context = {"original_positions", c.original_positions};
  MHA_TRY(rules.at_most_one({yarn, llama3, {"pair_factors", c.pair_factors}, ntk}));
  if (!yarn.is_set && !llama3.is_set)
    MHA_TRY(rules.needs({"yarn_factor, llama3_factor or ntk_factor", c.ntk_factor}, {context}));
  for (const Given &stretch : {yarn, llama3, ntk}) MHA_TRY(rules.needs(context, {stretch}));
  MHA_TRY(rules.needs(yarn, {{"yarn_beta_fast", c.yarn_beta_fast},
                             {"yarn_beta_slow", c.yarn_beta_slow},
                             {"yarn_unrounded", c.yarn_unrounded}}));
  MHA_TRY(rules.needs(llama3, {{"llama3_low_freq_factor", c.llama3_low_freq_factor},
                               {"llama3_high_freq_factor", c.llama3_high_freq_factor}}));
  MHA_TRY(rules.needs(ntk, {{"ntk_positions", c.ntk_positions}}));
  return rules.needs({"ntk_positions", c.ntk_positions}, {ntk});
}

// What a kind of scaling divides by, or takes the logarithm of.
mha_status check_formulas(Report report, const mha_rope_config &c) {
  if (c.yarn_factor != 0 && !(c.base > 1.0))
    return report.invalid("base is %g; with yarn_factor, set it to more than 1", c.base);
  if (c.yarn_beta_slow > c.yarn_beta_fast)
    return report.invalid(
        "yarn_beta_slow is %g, greater than yarn_beta_fast, %g; set it to at most that",
        c.yarn_beta_slow, c.yarn_beta_fast);
  if (!(c.llama3_high_freq_factor > c.llama3_low_freq_factor))
    return report.invalid(
        "llama3_high_freq_factor is %g, not greater than llama3_low_freq_factor, %g; set it to "
        "more",
        c.llama3_high_freq_factor, c.llama3_low_freq_factor);
  // The exponent of NTK, dims / (dims - 2), would be infinite.
  if (c.ntk_factor != 0 && c.dims == 2)
    return report.invalid("dims is 2; with ntk_factor, set it to an even number, 4 or more");
  // Models give these factors as a table, one for each pair.
  for (int64_t i = 0; c.pair_factors && i < c.dims / 2; ++i) {
    const double x = c.pair_factors[i];
    if (!(x >= 0.5 && x <= 0x1p31))
      return report.invalid("pair_factors[%lld] is %g; set it to a number from 1/2 to 2^31", lld(i),
                            x);
  }
  return MHA_OK;
}

// M-RoPE gives a row three positions (time, height, width), and each pair goes by one of them. The
// sections say how many pairs go by each. They follow each other or take turns; in turns, section k
// takes every third pair from pair k on, and the first section also has all pairs that are left.
mha_status check_mrope(const Rules &rules, const mha_rope_config &config) {
  Report report = rules.report;
  const int64_t *const section = config.mrope_section, pairs = config.dims / 2;
  MHA_TRY(
      rules.needs({"mrope_section", section}, {{"mrope_positions", config.mrope_positions},
                                               {"mrope_interleaved", config.mrope_interleaved}}));
  if (!section) return MHA_OK;
  MHA_TRY(rules.given("mrope_positions", config.mrope_positions,
                      "3 * num_positions positions with mrope_section"));
  if (config.first_position != 0)
    return report.invalid(
        "first_position is %lld, but mrope_positions gives the positions; set it to 0",
        lld(config.first_position));
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
  const Rules rules = {report};
  MHA_TRY(check_scaling(rules, config));
  MHA_TRY(check_fields(rules, config));
  // Together with the bound on dims, this keeps the tables below 2^63 bytes.
  if (config.num_positions > end_of_positions - config.first_position)
    return report.too_large(
        "first_position is %lld and num_positions is %lld; set them so that their sum is at most "
        "2^31",
        lld(config.first_position), lld(config.num_positions));
  if (config.base == 0) config.base = 10000.0;
  if (config.linear_factor == 0) config.linear_factor = 1.0;
  if (config.yarn_beta_fast == 0) config.yarn_beta_fast = 32.0;
  if (config.yarn_beta_slow == 0) config.yarn_beta_slow = 1.0;
  if (config.llama3_low_freq_factor == 0) config.llama3_low_freq_factor = 1.0;
  if (config.llama3_high_freq_factor == 0) config.llama3_high_freq_factor = 4.0;
  MHA_TRY(check_formulas(report, config));
  return check_mrope(rules, config);
}

}  // namespace mha
