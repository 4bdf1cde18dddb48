#include "options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iterator>

#include "error.h"
#include "mha.h"

namespace command {
namespace {

std::string instruction_set_names() {
  std::string names;
  for (uint32_t set = MHA_INSTRUCTION_SET_AUTO; set <= MHA_INSTRUCTION_SET_NEON_I8MM; ++set) {
    names += (set == 0 ? "" : ", ") + std::string(mha_instruction_set_name(set));
  }
  return names;
}

// By their MHA_TYPE_*.
constexpr const char *type_names[] = {"f32", "f16", "bf16", "int8", "int4"};

struct FileOption {
  const char *name;
  std::string AttentionOptions::*path;
  const char *description;
};

constexpr FileOption attention_files[] = {
    {"--sinks", &AttentionOptions::sinks, "A logit per head that takes part in the softmax: (heads,) (.npy, float32)"},
    {"--bias", &AttentionOptions::bias,
     "Added to the scores: (n, keys), (heads, n, keys) or (batch, heads, n, keys) (.npy, float32 or float16)"},
    {"--mask", &AttentionOptions::mask, "Which keys a row attends to, likewise (.npy, bool or uint8; 0 = not)"},
    {"--relative-bias", &AttentionOptions::relative_bias,
     "Added by the distance from the row to the key: (heads, distances), the middle one 0 (.npy, float32)"},
    {"--t5-bias", &AttentionOptions::t5_bias,
     "Likewise, by T5's buckets: relative_attention_bias.weight, (buckets, heads) (.npy, float32)"},
    {"--query-scales", &AttentionOptions::q_scales, "A factor for each query: (n,) or (batch, n) (Llama 4; .npy, float32)"},
    {"--head-scales", &AttentionOptions::head_scales, "A factor for each head; one of 0 is not computed: (heads,) (.npy, float32)"},
    {"--groups", &AttentionOptions::groups,
     "A number for each row, which attends within its group alone: (n,) or (batch, n) (.npy, int32 or int64)"},
    {"--key-groups", &AttentionOptions::key_groups, "The same for the rows of --key"},
    {"--cu-seqlens", &AttentionOptions::cu_seqlens,
     "The input is several sequences in a row: where each begins, and the last one ends: (count + 1,)"},
    {"--key-cu-seqlens", &AttentionOptions::key_cu_seqlens, "The same for the rows of --key"},
};
constexpr FileOption padding_files[] = {
    {"--lengths", &AttentionOptions::lengths, "Valid rows of each sequence, all others being padding: (batch,) (.npy, int32 or int64)"},
    {"--key-lengths", &AttentionOptions::key_lengths, "The same for the rows of --key"},
    {"--starts", &AttentionOptions::starts, "The first valid row of each sequence of keys, for padding on the left: (batch,)"},
};

template <size_t count>
void add_files(CLI::App *app, AttentionOptions *options, const FileOption (&files)[count]) {
  for (const FileOption &file : files) {
    app->add_option(file.name, options->*file.path, file.description)->type_name("FILE")->group(kAttention);
  }
}

bool is_finite_number(const std::string &text) {
  char *end = nullptr;
  const float number = std::strtof(text.c_str(), &end);
  return !text.empty() && *end == '\0' && std::isfinite(number);
}

}  // namespace

void check_needed(const LayerOptions &options, bool may_be_packed, const std::vector<std::pair<const char *, std::string>> &others) {
  const bool has_weights = !options.weights.empty();
  const bool has_packed = may_be_packed && !options.packed.empty();
  const bool needs_heads = !has_packed && options.num_heads == 0 && (has_weights || !may_be_packed);
  std::vector<std::string> missing;
  if (!has_weights && !has_packed) missing.push_back(may_be_packed ? "--weights (or --packed)" : "--weights");
  if (needs_heads) missing.push_back("--heads");
  for (const auto &[name, value] : others) {
    if (value.empty()) missing.push_back(name);
  }
  if (missing.empty()) return;
  std::string names;
  for (size_t i = 0; i < missing.size(); ++i) names += (i == 0 ? "" : i + 1 < missing.size() ? ", " : " and ") + missing[i];
  const char *why = needs_heads ? "; no file of weights tells the number of heads" : "";
  fail(names, missing.size() == 1 ? " is needed" : " are needed", why);
}

CLI::Validator finite_number() {
  return CLI::Validator(
      [](std::string &text) -> std::string { return is_finite_number(text) ? "" : "a finite number is expected, not " + in_quotes(text); },
      "");
}

CLI::Validator positive_number() {
  return CLI::Validator(
      [](std::string &text) -> std::string {
        const bool is_positive = is_finite_number(text) && std::strtof(text.c_str(), nullptr) > 0;
        return is_positive ? "" : "a positive number is expected, not " + in_quotes(text);
      },
      "");
}

CLI::Validator whole_number(int64_t most) {
  return CLI::Validator(
      [most](std::string &text) -> std::string {
        const bool is_number = !text.empty() && text.size() <= 19 && text.find_first_not_of("0123456789") == std::string::npos;
        const uint64_t number = is_number ? std::stoull(text) : 0;
        if (number >= 1 && number <= static_cast<uint64_t>(most)) return "";
        const std::string range = most == INT64_MAX ? "of at least 1" : "from 1 to " + std::to_string(most);
        return "a whole number " + range + " is expected, not " + in_quotes(text);
      },
      "");
}

CLI::Validator one_of(const std::string &first, const std::string &second) {
  return CLI::Validator(
      [first, second](std::string &text) -> std::string {
        return text == first || text == second ? "" : first + " or " + second + " is expected, not " + in_quotes(text);
      },
      "");
}

void add_weight_options(CLI::App *app, LayerOptions *options) {
  const auto add = [app](const char *name, auto *value, const char *type, const char *description) {
    return app->add_option(name, *value, description)->type_name(type)->group(kWeights);
  };
  add("--weights", &options->weights, "FILE", "The weights of a layer or a whole model (.safetensors; F32, F16, BF16)");
  add("--heads", &options->num_heads, "N", "Number of query heads; needed with --weights")->check(whole_number());
  add("--kv-heads", &options->num_kv_heads, "N", "Number of key and value heads; default as the shapes say")->check(whole_number());
  add("--head-dim", &options->head_dim, "N", "Width of a head; default as the shapes say")->check(whole_number());
  add("--layer", &options->layer, "PREFIX", "Which layer of a model: its prefix, or words that only it has (h.0)");
  add("--names", &options->names, "LIST", "Tensors of other names: q=..,k=..,v=..,o=.. or qkv=..,o=.., and g=..");
  add("--layout", &options->layout, "LAYOUT", "in-out (y = x W) or out-in (nn.Linear); needed with --names")
      ->check(one_of("in-out", "out-in"));
  add("--gate", &options->gate, "KIND", "The context is gated before W_O: sigmoid (Qwen3-Next, Step) or softplus (Laguna)")
      ->check(one_of("sigmoid", "softplus"));
  app->add_flag("--no-rope", options->without_rope, "Layers named q_proj, k_proj, v_proj are plain: nothing is rotated")->group(kWeights);
  add("--scale", &options->scale, "S", "Factor of the scores; default 0, which stands for 1 / sqrt(head_dim)")->check(finite_number());
}

void add_rope_options(CLI::App *app, LayerOptions *options) {
  const auto add = [app](const char *name, auto *value, const char *type, const char *description) {
    return app->add_option(name, *value, description)->type_name(type)->group(kWeights);
  };
  options->can_run = true;
  add("--rope-base", &options->rope_base, "B", "Rotate queries and keys (RoPE) with this base, rope_theta in config.json; default 10000")
      ->check(finite_number());
  add("--rope-style", &options->rope_style, "STYLE", "Pairs of RoPE: half (default; Hugging Face's files) or interleaved (GPT-J)")
      ->check(one_of("half", "interleaved"));
  add("--rope-scaling", &options->rope_scaling, "JSON",
      "How angles are scaled: rope_scaling or rope_parameters of config.json (YaRN, Llama 3, LongRoPE, ...)");
  add("--rope-dims", &options->rope_dims, "N", "Elements of a head that RoPE rotates, the first ones; default all")->check(whole_number());
}

bool wants_rope(const LayerOptions &options) {
  return options.rope_base != 0 || !options.rope_style.empty() || options.rope_dims != 0 || !options.rope_scaling.empty();
}

void add_packed_option(CLI::App *app, LayerOptions *options) {
  app->add_option("--packed", options->packed, "A layer that mha pack wrote, instead of all these; mapped, not copied")
      ->type_name("FILE")
      ->group(kWeights);
}

CLI::Validator type_name(uint32_t last) {
  return CLI::Validator(
      [last](std::string &text) -> std::string {
        std::string names;
        for (uint32_t type = 0; type <= last; ++type) {
          if (text == type_names[type]) return "";
          names += (type == 0 ? "" : type == last ? " or " : ", ") + std::string(type_names[type]);
        }
        return names + " is expected, not " + in_quotes(text);
      },
      "");
}

void add_output_type_option(CLI::App *app, std::string *type) {
  app->add_option("--output-type", *type, "The type of the result: f32 (default), f16 or bf16 (two bytes each, as ml_dtypes stores them)")
      ->type_name("NAME")
      ->check(type_name(MHA_TYPE_BF16))
      ->group(kInput);
}

void add_weight_type_option(CLI::App *app, LayerOptions *options) {
  CLI::Option *option =
      app->add_option("--weight-type", options->weight_type, "How the layer keeps its weights: f32 (default), f16, bf16, int8 or int4");
  option->type_name("NAME")->check(type_name(MHA_TYPE_INT4))->group(kComputation);
  CLI::Option *arithmetic =
      app->add_option("--arithmetic", options->arithmetic, "Projections in integers, with weights of int8 or int4: int8 or int16");
  arithmetic->type_name("NAME")->check(one_of("int8", "int16"))->group(kComputation);
  // A packed layer has them as it was packed.
  if (CLI::Option *packed = app->get_option_no_throw("--packed")) {
    option->excludes(packed);
    arithmetic->excludes(packed);
  }
}

uint32_t type_of(const std::string &name) {
  const auto found = std::find(std::begin(type_names), std::end(type_names), name);
  return found == std::end(type_names) ? MHA_TYPE_F32 : static_cast<uint32_t>(found - std::begin(type_names));
}

void add_back_end_option(CLI::App *app, LayerOptions *options) {
  app->add_option("--back-end", options->back_end, "What multiplies by the weights: native (default) or openblas")
      ->type_name("NAME")
      ->check(one_of("native", "openblas"))
      ->group(kComputation);
}

void add_instruction_set_option(CLI::App *app, LayerOptions *options) {
  app->add_option("--isa", options->instruction_set, "Instructions: " + instruction_set_names() + "; default auto")
      ->type_name("NAME")
      ->group(kComputation);
}

void add_attention_options(CLI::App *app, AttentionOptions *options) {
  const auto add = [app](const char *name, auto *value, const char *type, const char *description) {
    return app->add_option(name, *value, description)->type_name(type)->group(kAttention);
  };
  add("--window", &options->window, "N", "Each row attends to the last N rows, its own among them (sliding_window); needs --causal")
      ->check(whole_number());
  add("--softcap", &options->softcap, "S", "Scores become S * tanh(score / S) (Gemma 2: 50)")->check(positive_number());
  add("--score-arithmetic", &options->arithmetic, "NAME", "Scores in integers, keys and values rounded to int8: int8 or int16")
      ->check(one_of("int8", "int16"));
  add("--context-arithmetic", &options->context_arithmetic, "NAME", "Weights times values likewise")->check(one_of("int8", "int16"));
  app->add_flag("--alibi", options->has_alibi, "Scores lose a slope times the distance (ALiBi; the standard slopes)")->group(kAttention);
  add_files(app, options, attention_files);
  add("--relative-left", &options->relative_left, "N", "Distances of --relative-bias to the left of 0; default half of them")
      ->check(whole_number());
  app->add_flag("--groups-also", options->adds_groups, "Rows of a group see each other besides those before them (images; negative = none)")
      ->group(kAttention);
  add("--norm", &options->norm, "KIND", "Normalise queries and keys: rms or layer; default as the weights say")
      ->check(one_of("rms", "layer"));
  add("--norm-epsilon", &options->norm_epsilon, "E", "Epsilon of the norm, rms_norm_eps in config.json; default 1e-6")
      ->check(positive_number());
  app->add_flag("--norm-after-rope", options->is_norm_after_rope, "The norm comes behind the rotation, not before it")->group(kAttention);
  app->add_flag("--norm-values", options->has_norm_of_values, "Values are normalised too, without weights (Gemma 4)")->group(kAttention);
}

void add_padding_options(CLI::App *app, AttentionOptions *options) { add_files(app, options, padding_files); }

void add_kept_heads_option(CLI::App *app, LayerOptions *options) {
  app->add_option("--kept-heads", options->kept_heads, "Heads that stay; all others are left out for good: (heads,) (.npy, bool or uint8)")
      ->type_name("FILE")
      ->group(kWeights);
}

std::vector<std::pair<const char *, std::string>> files_of(const LayerOptions &layer, const InputOptions &inputs,
                                                           const AttentionOptions &attention) {
  std::vector<std::pair<const char *, std::string>> files = {{"--weights", layer.weights}, {"--packed", layer.packed},
                                                             {"--kept-heads", layer.kept_heads}, {"--input", inputs.query},
                                                             {"--key", inputs.key}, {"--value", inputs.value}};
  for (const FileOption &file : attention_files) files.emplace_back(file.name, attention.*file.path);
  for (const FileOption &file : padding_files) files.emplace_back(file.name, attention.*file.path);
  return files;
}

void add_input_options(CLI::App *app, InputOptions *options) {
  const auto add = [app](const char *name, auto *value, const char *description) {
    return app->add_option(name, *value, description)->type_name("FILE")->group(kInput);
  };
  add("--input", &options->query, "The rows: (n, width) or (batch, n, width) (.npy, float32, float16 or ml_dtypes' bfloat16, C order)");
  add("--key", &options->key, "Rows for the keys, in cross-attention; default the input");
  add("--value", &options->value, "Rows for the values; default those for the keys");
  app->add_flag("--causal", options->is_causal, "No row attends to rows after its own (the last row sees all keys)")->group(kInput);
}

}  // namespace command
