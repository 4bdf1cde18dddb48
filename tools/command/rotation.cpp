#include "rotation.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <vector>

#include "error.h"

namespace command {
namespace {

using nlohmann::json;

// "rope_theta" and "rope_scaling" of gpt-oss-20b and gpt-oss-120b.
constexpr const char *kGptOss =
    R"({"rope_type":"yarn","rope_theta":150000,"factor":32,"original_max_position_embeddings":4096,"truncate":false})";

// A kind of --rope-scaling: where its numbers go, and which it needs.
struct Number {
  const char *name;
  double mha_rope_config::*number;
};
struct Scaling {
  const char *kind, *title;
  std::vector<Number> numbers;  // the first one is needed
  std::vector<const char *> others;
};
const std::vector<Scaling> &scalings() {
  using Config = mha_rope_config;
  constexpr const char *kLength = "original_max_position_embeddings";
  static const std::vector<Scaling> all = {
      {"default", "", {}, {}},
      {"linear", "linear", {{"factor", &Config::linear_factor}}, {}},
      {"yarn",
       "YaRN",
       {{"factor", &Config::yarn_factor},
        {"beta_fast", &Config::yarn_beta_fast},
        {"beta_slow", &Config::yarn_beta_slow},
        {"attention_factor", &Config::attention_factor}},
       {kLength, "mscale", "mscale_all_dim", "truncate"}},
      {"llama3",
       "Llama 3",
       {{"factor", &Config::llama3_factor},
        {"low_freq_factor", &Config::llama3_low_freq_factor},
        {"high_freq_factor", &Config::llama3_high_freq_factor}},
       {kLength}},
      {"longrope", "LongRoPE", {{"attention_factor", &Config::attention_factor}}, {kLength, "short_factor", "long_factor", "factor"}},
      {"dynamic", "dynamic NTK", {{"factor", &Config::ntk_factor}}, {kLength}},
  };
  return all;
}

template <typename... Parts>
[[noreturn]] void refuse(const Parts &...parts) {
  fail("--rope-scaling: ", parts...);
}

double number_of(const json &scaling, const std::string &name) {
  const auto found = scaling.find(name);
  if (found == scaling.end()) refuse("the key ", in_quotes(name), " is needed for this rope_type");
  if (!found->is_number()) refuse(in_quotes(name), " is not a number");
  return found->get<double>();
}

// What --rope-scaling says, in words; pair_factors is for LongRoPE's.
std::string read_scaling(const std::string &text, int64_t num_positions, const mha_layer_config &shape, mha_rope_config *config,
                         std::vector<double> *pair_factors) {
  const json scaling = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!scaling.is_object()) refuse("a JSON object like {\"rope_type\": \"llama3\", \"factor\": 8, ...} is expected, not ", in_quotes(text));
  const json &type = scaling.contains("rope_type") ? scaling["rope_type"] : scaling.contains("type") ? scaling["type"] : json("default");
  const std::string kind = type.is_string() ? type.get<std::string>() : "";
  const auto found = std::find_if(scalings().begin(), scalings().end(), [&](const Scaling &known) { return kind == known.kind; });
  if (found == scalings().end()) {
    refuse("linear, yarn, llama3, longrope, dynamic or default is expected as rope_type, not ", in_quotes(type.dump()));
  }
  const auto has = [&](const char *name) { return scaling.contains(name) && !scaling[name].is_null(); };

  for (const auto &[name, value] : scaling.items()) {
    const auto is_it = [&key = name](const char *known) { return key == known; };
    if (value.is_null() || name == "rope_type" || name == "type") continue;
    const auto number = std::find_if(found->numbers.begin(), found->numbers.end(), [&](const Number &known) { return is_it(known.name); });
    if (number != found->numbers.end()) {
      config->*number->number = number_of(scaling, name);
    } else if (name == "rope_theta") {
      if (config->base == 0) config->base = number_of(scaling, name);
    } else if (name == "partial_rotary_factor") {
      if (config->dims == 0) config->dims = static_cast<int64_t>(static_cast<double>(shape.head_dim) * number_of(scaling, name));
    } else if (std::none_of(found->others.begin(), found->others.end(), is_it)) {
      refuse("there is no key ", in_quotes(name), " for the rope_type ", in_quotes(kind));
    }
  }
  const bool is_longrope = kind == "longrope";
  if (!found->numbers.empty() && !is_longrope && !has(found->numbers[0].name)) number_of(scaling, found->numbers[0].name);
  if (!found->others.empty()) {
    const double length = number_of(scaling, found->others[0]);
    if (!(length >= 1 && length < 0x1p31)) refuse(in_quotes(found->others[0]), " is from 1 to 2^31 - 1");
    config->original_positions = static_cast<int64_t>(length);
  }
  const auto in_log = [](double factor) { return factor > 1 ? 0.1 * std::log(factor) : 0; };
  if (kind == "yarn" && has("mscale") && has("mscale_all_dim") && !has("attention_factor")) {
    const double f = in_log(config->yarn_factor);
    config->attention_factor = (f * number_of(scaling, "mscale") + 1) / (f * number_of(scaling, "mscale_all_dim") + 1);
  }
  if (kind == "yarn" && has("truncate")) {
    if (!scaling["truncate"].is_boolean()) refuse("'truncate' is true or false");
    config->yarn_unrounded = scaling["truncate"].get<bool>() ? 0 : 1;
  }
  if (kind == "dynamic") config->ntk_positions = num_positions;
  if (is_longrope) {
    const char *const name = num_positions > config->original_positions ? "long_factor" : "short_factor";
    if (!has(name) || !scaling[name].is_array()) refuse("the list ", in_quotes(name), " is needed for so many rows");
    for (const json &factor : scaling[name]) {
      if (!factor.is_number()) refuse(in_quotes(name), " holds something that is not a number");
      pair_factors->push_back(factor.get<double>());
    }
    if (!has("attention_factor")) {
      const double factor = has("factor") ? number_of(scaling, "factor") : 0;
      if (factor == 0) refuse("\"longrope\" needs \"factor\", max_position_embeddings / original_max_position_embeddings");
      const double length = static_cast<double>(config->original_positions);
      config->attention_factor = factor > 1 ? std::sqrt(1 + std::log(factor) / std::log(length)) : 1;
    }
    config->original_positions = 0;  // which is in the factors
    return command::text(found->title, ", ", name);
  }
  return found->numbers.empty() ? "" : command::text(found->title, " by ", number_of(scaling, found->numbers[0].name));
}

}  // namespace

Rotation::Rotation(const LayerOptions &options, const mha_layer_config &shape, int64_t num_positions, bool is_gpt_oss) {
  mha_rope_config config = {};
  config.struct_size = sizeof config;
  config.dims = options.rope_dims;
  config.base = options.rope_base;
  std::vector<double> pair_factors;
  const std::string scaling = is_gpt_oss && !wants_rope(options) ? kGptOss : options.rope_scaling;
  const std::string scaled = scaling.empty() ? "" : read_scaling(scaling, num_positions, shape, &config, &pair_factors);
  if (config.base == 0) config.base = 10000;
  const bool is_part = config.dims != 0;
  if (!is_part) config.dims = shape.head_dim;

  const int64_t dims = config.dims;
  const std::string source = options.rope_dims != 0 ? "--rope-dims" : is_part ? "--rope-scaling" : "the width of a head";
  if (dims % 2 != 0) fail(source, ": ", dims, " elements can't be rotated in pairs; --rope-dims takes an even number");
  if (dims > shape.head_dim) fail(source, ": ", dims, " elements can't be rotated, for a head has ", shape.head_dim);
  config.num_positions = num_positions;
  if (!pair_factors.empty()) {
    config.pair_factors = pair_factors.data();
    if (static_cast<int64_t>(pair_factors.size()) != dims / 2) {
      fail("--rope-scaling: has a list of ", pair_factors.size(), " factors; one for each of the ", count_text(dims / 2, "pair"),
           " is expected");
    }
  }
  size_t count = 0;
  if (__builtin_mul_overflow(static_cast<size_t>(num_positions), static_cast<size_t>(dims / 2), &count)) {
    fail("--input: has too many rows to be rotated");
  }
  cos_ = std::make_unique<float[]>(count);
  sin_ = std::make_unique<float[]>(count);
  mha_error error;
  check(mha_rope_tables(&config, cos_.get(), sin_.get(), &error), error, scaled.empty() ? "--rope-base" : "--rope-scaling");

  const bool is_interleaved = options.rope_style == "interleaved";
  rope_.struct_size = sizeof rope_;
  rope_.style = is_interleaved ? MHA_ROPE_INTERLEAVED : MHA_ROPE_HALF;
  rope_.dims = dims;
  rope_.num_positions = num_positions;
  rope_.cos = cos_.get();
  rope_.sin = sin_.get();

  char base[32];
  std::snprintf(base, sizeof base, "%.15g", config.base);
  text_ = command::text("rotated (", is_interleaved ? "interleaved" : "half", ", base ", base, scaled.empty() ? "" : ", " + scaled,
                        dims != shape.head_dim ? command::text(", ", dims, " elements") : "", ")");
}

}  // namespace command
