#include "config.h"

#include <cfloat>
#include <cmath>
#include <map>
#include <optional>
#include <sstream>

#include "files.h"
#include "json.h"

namespace command {
namespace {

// Which layers have a window, without 'layer_types'.
enum class Windows { kNone, kAll, kAlternate, kListed };
// The attention of a model_type, as far as its configuration does not say it.
struct Type {
  bool is_causal, rotates, has_norm, norm_adds_one, has_sinks;
  Windows windows;
};
const std::map<std::string, Type> kTypes = {
    {"bert", {false, false, false, false, false, Windows::kNone}},
    {"gemma", {true, true, false, false, false, Windows::kNone}},
    {"gemma2", {true, true, false, false, false, Windows::kAlternate}},
    {"gemma3_text", {true, true, true, true, false, Windows::kListed}},
    {"gpt2", {true, false, false, false, false, Windows::kNone}},
    {"gpt_oss", {true, true, false, false, true, Windows::kListed}},
    {"llama", {true, true, false, false, false, Windows::kNone}},
    {"mistral", {true, true, false, false, false, Windows::kAll}},
    {"olmo2", {true, true, true, false, false, Windows::kNone}},
    {"phi3", {true, true, false, false, false, Windows::kAll}},
    {"qwen2", {true, true, false, false, false, Windows::kListed}},
    {"qwen3", {true, true, true, false, false, Windows::kListed}},
    {"roberta", {false, false, false, false, false, Windows::kNone}},
};

// What changes nothing in the attention, or what the tensors show.
constexpr char kHarmless[] =
    "_name_or_path activation_function architectures attention_bias attention_dropout "
    "attention_probs_dropout_prob attn_pdrop auto_map bos_token_id cache_implementation "
    "classifier_dropout cls_token_id dtype embd_pdrop eos_token_id experts_per_token "
    "final_logit_softcapping gradient_checkpointing hidden_act hidden_activation "
    "hidden_dropout_prob id2label initial_context_length initializer_range intermediate_size "
    "label2id layer_norm_eps layer_norm_epsilon mask_token_id max_position_embeddings "
    "max_window_layers mlp_bias n_ctx n_inner n_layer n_positions num_experts_per_tok "
    "num_hidden_layers num_local_experts output_past output_router_logits pad_token_id "
    "pretraining_tp problem_type reorder_and_upcast_attn resid_pdrop rms_norm_eps "
    "router_aux_loss_coef sep_token_id summary_activation summary_first_dropout "
    "summary_proj_to_labels summary_type summary_use_proj swiglu_limit task_specific_params "
    "tie_word_embeddings torch_dtype transformers_version type_vocab_size unk_token_id "
    "use_cache vocab_size";
// What these models have where it is not said: each has its own number then.
constexpr std::pair<const char *, const char *> kNotAbsent[] = {
    {"gemma2", "attn_logit_softcapping"}, {"gemma2", "sliding_window"},
    {"gemma3_text", "sliding_window"},    {"gpt_oss", "rope_scaling"},
    {"gpt_oss", "sliding_window"},        {"mistral", "sliding_window"},
};
const std::string kAdvice =
    "; if it does not affect attention, remove it from a copy and pass the copy with --config";

// A flag that has one value wherever this version computes the layer.
void expect_flag(JsonObject *config, const char *key, bool expected) {
  if (config->flag(key).value_or(expected) == expected) return;
  fail(config->name(), ": ", in_quotes(key), " is ", expected ? "false" : "true",
       ", which this version does not support");
}

// Whether a layer has a window.
bool is_sliding(JsonObject *config, Windows windows, int64_t layer, bool has_window) {
  const std::vector<std::string> kinds = config->strings("layer_types");
  if (!has_window || !config->flag("use_sliding_window").value_or(true)) {
    if (!has_window) expect_flag(config, "use_sliding_window", false);
    if (kinds != std::vector<std::string>(kinds.size(), "full_attention"))
      fail(config->name(), ": 'layer_types' is not all full_attention, and no window is set");
    return false;
  }
  if (kinds.empty() && windows == Windows::kAll) return true;
  if (kinds.empty() && windows == Windows::kListed)
    fail(config->name(), ": has no 'layer_types', which is needed");
  if (layer < 0 || (!kinds.empty() && layer >= static_cast<int64_t>(kinds.size()))) {
    fail(config->name(),
         ": has several kinds of layers, and the name of this one does not tell its kind; one like "
         "layers.0 is expected");
  }
  if (kinds.empty()) return layer % 2 == 0;
  const std::string &kind = kinds[static_cast<size_t>(layer)];
  if (kind != "full_attention" && kind != "sliding_attention")
    fail(config->name(), ": has the unknown kind of layer ", in_quotes(kind));
  return kind == "sliding_attention";
}

void read_scaling(JsonObject *scaling, mha_rope_config *angles) {
  const std::optional<std::string> name = scaling->string("rope_type"),
                                   old_name = scaling->string("type");
  const std::string type = name.value_or(old_name.value_or("default"));
  if (old_name.value_or(type) != type)
    fail(scaling->name(), ": has the rope_type ", in_quotes(type), " and the type ",
         in_quotes(*old_name), "; one of them is expected");
  const auto needed = [&](const char *key) { return scaling->needed(scaling->number(key), key); };
  if (type == "linear") {
    angles->linear_factor = needed("factor");
  } else if (type == "yarn") {
    angles->yarn_factor = needed("factor");
    angles->yarn_beta_fast = scaling->number("beta_fast").value_or(0);
    angles->yarn_beta_slow = scaling->number("beta_slow").value_or(0);
    angles->attention_factor = scaling->number("attention_factor").value_or(0);
    angles->yarn_unrounded = scaling->flag("truncate").value_or(true) ? 0 : 1;
  } else if (type == "llama3") {
    angles->llama3_factor = needed("factor");
    angles->llama3_low_freq_factor = needed("low_freq_factor");
    angles->llama3_high_freq_factor = needed("high_freq_factor");
  } else if (type != "default") {
    fail(scaling->name(), ": has the rope_type ", in_quotes(type),
         "; linear, yarn, llama3 or default is expected");
  }
  if (type != "yarn" && type != "llama3") return;
  const char *const key = "original_max_position_embeddings";
  angles->original_positions = scaling->needed(scaling->whole_number(key), key);
}

// has_local_base: Gemma 3 rotates its layers with a window otherwise than the others.
mha_rope_config read_rotation(JsonObject *config, bool has_local_base, bool slides,
                              int64_t head_dim) {
  mha_rope_config angles = {};
  std::optional<JsonObject> scaling = config->object("rope_scaling"),
                            parameters = config->object("rope_parameters");
  std::optional<double> base = config->number("rope_theta"),
                        part = config->share("partial_rotary_factor");
  if (has_local_base) {
    const std::optional<double> local_base = config->number("rope_local_base_freq");
    if (parameters) {
      std::optional<JsonObject> full = parameters->object("full_attention"),
                                sliding = parameters->object("sliding_attention");
      parameters->finish(kAdvice);
      parameters = parameters->needed(slides ? sliding : full,
                                      slides ? "sliding_attention" : "full_attention");
    } else if (slides) {
      base = config->needed(local_base, "rope_local_base_freq");
      scaling.reset();
    }
  }
  if (parameters && scaling)
    fail(config->name(),
         ": has both 'rope_parameters' and 'rope_scaling'; one of them is expected");
  if (parameters) scaling = parameters;
  if (scaling) {
    read_scaling(&*scaling, &angles);
    const auto take = [&](const char *key, std::optional<double> own,
                          std::optional<double> *value) {
      if (own && value->value_or(*own) != *own && !has_local_base)
        fail(scaling->name(), ": ", in_quotes(key), " is ", *own, ", and ", **value, " in ",
             config->name(), "; one of them is expected");
      if (own) *value = own;
    };
    take("rope_theta", scaling->number("rope_theta"), &base);
    take("partial_rotary_factor", scaling->share("partial_rotary_factor"), &part);
    scaling->finish(kAdvice);
  }
  angles.base = config->needed(base, "rope_theta");
  if (part.value_or(1) == 1) return angles;
  angles.dims = static_cast<int64_t>(static_cast<double>(head_dim) * *part);
  if (angles.dims == 0)
    fail(config->name(), ": 'partial_rotary_factor' is ", *part,
         ", which leaves nothing of a head of ", head_dim, " to rotate");
  return angles;
}

}  // namespace

Model read_model(const std::string &path, int64_t layer) {
  const MappedFile file(path);
  const char *const json = reinterpret_cast<const char *>(file.data());
  JsonObject config(path, parse_json(path, json, json + file.size()));
  const std::string type_name = config.needed(config.string("model_type"), "model_type");
  const auto found = kTypes.find(type_name);
  if (found == kTypes.end()) {
    std::string names;
    for (const auto &[name, type] : kTypes) names += (names.empty() ? "" : ", ") + name;
    fail(path, ": has the model_type ", in_quotes(type_name), "; one of ", names,
         " is expected, or options after --no-config");
  }
  const Type &type = found->second;
  const bool is_gpt2 = type_name == "gpt2";
  const char *const heads = is_gpt2 ? "n_head" : "num_attention_heads";
  const char *const width = is_gpt2 ? "n_embd" : "hidden_size";
  std::istringstream harmless(kHarmless);
  for (std::string key; harmless >> key;) config.ignore(key);
  if (type_name == "phi3") config.ignore("original_max_position_embeddings");  // of longrope
  Model model;
  model.name = model.call.source = path;
  model.has_norm = type.has_norm;
  model.norm_adds_one = type.norm_adds_one;
  model.has_sinks = type.has_sinks;
  model.call.is_causal = type.is_causal;
  model.num_heads = config.needed(config.whole_number(heads), heads);
  model.query_dim = config.needed(config.whole_number(width), width);
  model.num_kv_heads = model.num_heads;
  model.head_dim = model.query_dim / model.num_heads;
  if (type.has_norm)
    model.norm_epsilon =
        static_cast<float>(config.needed(config.number("rms_norm_eps"), "rms_norm_eps"));
  if (type.rotates) {
    model.num_kv_heads = config.whole_number("num_key_value_heads").value_or(0);
    model.head_dim = config.whole_number("head_dim").value_or(model.head_dim);
    const std::optional<int64_t> window = config.whole_number("sliding_window");
    if (window && type.windows == Windows::kNone)
      fail(path, ": has 'sliding_window', which models of this type do not have");
    const bool slides = is_sliding(&config, type.windows, layer, window.has_value());
    if (slides) model.call.window = *window;
    model.call.rotation =
        read_rotation(&config, type_name == "gemma3_text", slides, model.head_dim);
  } else {
    expect_flag(&config, "add_cross_attention", false);
    expect_flag(&config, "is_decoder", false);
    expect_flag(&config, "scale_attn_by_inverse_layer_idx", false);
    expect_flag(&config, "scale_attn_weights", true);
    const std::string positions = config.string("position_embedding_type").value_or("absolute");
    if (positions != "absolute")
      fail(path, ": 'position_embedding_type' is ", in_quotes(positions),
           "; only 'absolute' is supported");
  }
  if (type_name == "gemma2" || type_name == "gemma3_text") {
    const char *const key = "query_pre_attn_scalar";
    const double scalar = config.needed(config.number(key), key);
    if (!(scalar > FLT_MIN))
      fail(path, ": ", in_quotes(key), " is ", scalar, "; a number above 0 is expected");
    model.scale = static_cast<float>(1 / std::sqrt(scalar));
    model.call.softcap = config.number("attn_logit_softcapping").value_or(0);
    expect_flag(&config, "use_bidirectional_attention", false);
  }
  if (model.call.window != 0 && type_name.rfind("qwen", 0) == 0)  // off where it is not said
    config.needed(config.flag("use_sliding_window"), "use_sliding_window");
  for (const auto &[name, key] : kNotAbsent) {
    const bool is_other = std::string(key) == "rope_scaling" && config.has("rope_parameters");
    if (type_name == name && !is_other) config.expect_said(key);
  }
  config.finish(kAdvice);
  return model;
}

}  // namespace command
