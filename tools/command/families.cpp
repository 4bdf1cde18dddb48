#include "families.h"

#include <algorithm>

#include "error.h"

namespace command {
namespace {

struct Family {
  const char *title;
  ProjectionNames q, k, v, qkv;          // names behind the layer's prefix
  std::vector<ProjectionNames> outputs;  // the first that exists is taken
  bool needs_output = true;              // else a layer without one gives its merged heads
  bool has_llama_names = false;          // which models with and without RoPE share, but for the name of the output projection
};

// How names of matrices and their biases go together.
ProjectionNames linear(const std::string &name) { return {name + ".weight", name + ".bias", MHA_LAYOUT_OUT_IN}; }  // nn.Linear
ProjectionNames conv1d(const std::string &name) { return {name + ".weight", name + ".bias", MHA_LAYOUT_IN_OUT}; }  // GPT-2's Conv1D
ProjectionNames matrix(const std::string &name) { return {name, "", MHA_LAYOUT_IN_OUT}; }                          // of x @ W
ProjectionNames parameter(const std::string &name, const std::string &bias = "") { return {name, bias, MHA_LAYOUT_OUT_IN}; }
const ProjectionNames kNone;

// To teach the command a further family, add it here.
const std::vector<Family> kFamilies = {
    {"W_query, W_key, W_value as nn.Linear",
     linear("W_query"),
     linear("W_key"),
     linear("W_value"),
     kNone,
     {linear("out_proj"), matrix("out_proj")},
     /*needs_output=*/false},
    {"W_query, W_key, W_value as matrices",
     matrix("W_query"),
     matrix("W_key"),
     matrix("W_value"),
     kNone,
     {linear("out_proj"), matrix("out_proj")},
     /*needs_output=*/false},
    {"nn.MultiheadAttention", kNone, kNone, kNone, parameter("in_proj_weight", "in_proj_bias"), {linear("out_proj")}},
    {"nn.MultiheadAttention with kdim or vdim",
     parameter("q_proj_weight"),
     parameter("k_proj_weight"),
     parameter("v_proj_weight"),
     parameter("", "in_proj_bias"),
     {linear("out_proj")}},
    {"Llama and kin",
     linear("q_proj"),
     linear("k_proj"),
     linear("v_proj"),
     kNone,
     {linear("o_proj"), linear("out_proj"), linear("dense")},
     /*needs_output=*/true,
     /*has_llama_names=*/true},
    {"BERT", linear("self.query"), linear("self.key"), linear("self.value"), kNone, {linear("output.dense")}},
    {"GPT-2", kNone, kNone, kNone, conv1d("c_attn"), {conv1d("c_proj")}},
};

// Tensors beside a layer that change what it computes, in a way that this version has no word for.
struct Addition {
  const char *name;
  const char *effect;
};
const Addition kAdditions[] = {
    {"q_norm.bias", "normalises its queries and keys with a bias"},
    {"query_layernorm.weight", "normalises its queries and keys"},
    {"bias_k", "adds a learnt key and value to each sequence (add_bias_kv)"},
    {"q_norm.weight", "normalises its queries and keys"},
    {"q_layernorm.weight", "normalises its queries and keys"},
    {"query_norm.weight", "normalises its queries and keys"},
    {"sinks", "has attention sinks"},
    {"q_attn.weight", "is a cross-attention, whose queries have a matrix of their own"},
    {"self.distance_embedding.weight", "has embeddings of relative positions"},
};

bool ends_with(const std::string &text, const std::string &end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

ProjectionNames behind_prefix(const SafetensorsFile &file, const std::string &prefix, ProjectionNames names) {
  if (!names.weight.empty()) names.weight = prefix + names.weight;
  if (!names.bias.empty()) names.bias = prefix + names.bias;
  if (file.find(names.bias) == nullptr) names.bias.clear();  // biases are optional everywhere
  return names;
}

// What models with Llama's names have beside their projections: Qwen3, Gemma and OLMo 2 norms, gpt-oss sinks, Step and Laguna a gate.
void find_extras(const SafetensorsFile &file, const std::string &prefix, FoundLayer *layer) {
  if (file.find(prefix + "q_norm.weight") != nullptr) {
    layer->q_norm = prefix + "q_norm.weight";
    layer->k_norm = prefix + "k_norm.weight";
    // Of those with a norm of queries, Gemma alone has this one, a level above: "model.layers.0." of "model.layers.0.self_attn.".
    const size_t end = prefix.size() < 2 ? std::string::npos : prefix.rfind('.', prefix.size() - 2);
    const std::string above = end == std::string::npos ? "" : prefix.substr(0, end + 1);
    const bool is_gemma = file.find(above + "pre_feedforward_layernorm.weight") != nullptr;
    // Gemma 4 and 3n, which have one of these, take the weights as they are, and normalise values.
    const bool is_late = file.find(above + "layer_scalar") != nullptr || file.find(above + "laurel.linear_left.weight") != nullptr;
    layer->norm_adds_one = is_gemma && !is_late;
    layer->has_norm_of_values = is_gemma && is_late;
  }
  layer->names.g = behind_prefix(file, prefix, linear("g_proj"));
  if (file.find(layer->names.g.weight) == nullptr) layer->names.g = kNone;
  if (file.find(prefix + "sinks") != nullptr) layer->sinks = prefix + "sinks";
}

FoundLayer layer_of(const SafetensorsFile &file, const Family &family, const std::string &prefix) {
  FoundLayer layer;
  layer.prefix = prefix.empty() ? "" : prefix.substr(0, prefix.size() - 1);
  layer.names.family = family.title;
  layer.names.q = behind_prefix(file, prefix, family.q);
  layer.names.k = behind_prefix(file, prefix, family.k);
  layer.names.v = behind_prefix(file, prefix, family.v);
  layer.names.qkv = behind_prefix(file, prefix, family.qkv);
  const auto output = std::find_if(family.outputs.begin(), family.outputs.end(),
                                   [&](const ProjectionNames &names) { return file.find(prefix + names.weight) != nullptr; });
  if (output != family.outputs.end()) {
    layer.names.o = behind_prefix(file, prefix, *output);
  } else if (family.needs_output) {  // as in one part of a model in several files: reading it will say what is missing
    layer.names.o = behind_prefix(file, prefix, family.outputs[0]);
  }
  if (family.has_llama_names) {
    // o_proj is how Llama, Mistral, Qwen and Gemma name it; with other names (OPT, Phi, GPT-J), each model has its own way.
    layer.rotates = layer.names.o.weight == prefix + "o_proj.weight" ? Rotates::kAll : Rotates::kSome;
  }
  if (family.has_llama_names) find_extras(file, prefix, &layer);
  for (const Addition &addition : kAdditions) {
    const std::string name = prefix + addition.name;
    if (file.find(name) == nullptr || name == layer.q_norm || name == layer.sinks) continue;
    layer.obstacle = text(addition.effect, ", as the tensor ", in_quotes(name), " shows");
  }
  return layer;
}

// Whether the words of part, which are separated by dots, follow each other in whole.
bool contains_words(const std::string &whole, const std::string &part) {
  return !part.empty() && ("." + whole + ".").find("." + part + ".") != std::string::npos;
}

std::string list_of(const std::vector<FoundLayer> &layers) {
  std::string list;
  for (const FoundLayer &layer : layers) {
    list += "  " + one_line(layer.prefix.empty() ? "\"\"" : layer.prefix) + "   (" + layer.names.family + ")\n";
  }
  return list;
}

}  // namespace

std::vector<FoundLayer> find_layers(const SafetensorsFile &file) {
  std::vector<FoundLayer> layers;
  for (const auto &[name, tensor] : file.tensors()) {
    for (const Family &family : kFamilies) {
      const std::string &first = family.q.weight.empty() ? family.qkv.weight : family.q.weight;
      if (!ends_with(name, first)) continue;
      const std::string prefix = name.substr(0, name.size() - first.size());
      if (prefix.empty() || prefix.back() == '.') layers.push_back(layer_of(file, family, prefix));
    }
  }
  // h.2 before h.10: prefixes of the same length count upwards.
  std::sort(layers.begin(), layers.end(), [](const FoundLayer &a, const FoundLayer &b) {
    return std::pair(a.prefix.size(), a.prefix) < std::pair(b.prefix.size(), b.prefix);
  });
  return layers;
}

FoundLayer choose_layer(const SafetensorsFile &file, const std::optional<std::string> &prefix) {
  const std::vector<FoundLayer> layers = find_layers(file);
  if (layers.empty()) {
    fail(file.path(), ": holds no attention layer whose names are known",
         file.tensors().empty() ? "" : ", but for instance the tensor " + in_quotes(file.tensors().begin()->first),
         "; give the names by --names q=...,k=...,v=...,o=... and --layout");
  }
  std::vector<FoundLayer> chosen;
  for (const FoundLayer &layer : layers) {
    if (!prefix.has_value() || contains_words(layer.prefix, *prefix)) chosen.push_back(layer);
  }
  for (const FoundLayer &layer : layers) {
    if (prefix.has_value() && layer.prefix == *prefix) chosen = {layer};
  }
  if (chosen.empty()) throw InputError(text(file.path(), ": has no layer ", in_quotes(*prefix), ", but these:"), list_of(layers));
  if (chosen.size() > 1) {
    const std::string like = prefix ? " like " + in_quotes(*prefix) : "";
    throw InputError(text(file.path(), ": holds ", chosen.size(), " layers", like, "; choose one by --layer:"), list_of(chosen));
  }
  const FoundLayer &layer = chosen[0];
  if (!layer.obstacle.empty()) {
    fail(file.path(), ": the layer ", in_quotes(layer.prefix), " ", layer.obstacle, ", which this version can't compute");
  }
  return layer;
}

LayerNames parse_names(const SafetensorsFile &file, const std::string &names, const std::optional<std::string> &prefix, uint32_t layout) {
  LayerNames result;
  const struct {
    const char *key;
    std::string *name;
  } keys[] = {
      {"q", &result.q.weight}, {"k", &result.k.weight}, {"v", &result.v.weight}, {"qkv", &result.qkv.weight}, {"o", &result.o.weight},
      {"bq", &result.q.bias},  {"bk", &result.k.bias},  {"bv", &result.v.bias},  {"bqkv", &result.qkv.bias},  {"bo", &result.o.bias},
      {"g", &result.g.weight}, {"bg", &result.g.bias},
  };
  const std::string form = "; expected is like q=wq.weight,k=wk.weight,v=wv.weight,o=wo.weight (qkv=... for a fused matrix)";

  for (size_t begin = 0; begin <= names.size();) {
    const size_t end = std::min(names.find(',', begin), names.size());
    const std::string item = names.substr(begin, end - begin);
    begin = end + 1;
    const size_t equals = item.find('=');
    const auto *key = std::find_if(std::begin(keys), std::end(keys), [&](const auto &k) { return item.substr(0, equals) == k.key; });
    if (equals == std::string::npos || equals + 1 == item.size() || key == std::end(keys)) {
      fail("--names: can't read ", in_quotes(item), form);
    }
    if (!key->name->empty()) fail("--names: gives ", key->key, " twice");
    const std::string name = item.substr(equals + 1);
    *key->name = prefix.has_value() && !prefix->empty() ? *prefix + "." + name : name;
    file.get(*key->name);
  }
  const bool has_all = !result.q.weight.empty() && !result.k.weight.empty() && !result.v.weight.empty();
  const bool has_any = !result.q.weight.empty() || !result.k.weight.empty() || !result.v.weight.empty();
  if (result.qkv.weight.empty() ? !has_all : has_any) fail("--names: needs either q, k and v, or qkv", form);

  for (ProjectionNames *projection : {&result.q, &result.k, &result.v, &result.qkv, &result.o, &result.g}) {
    projection->layout = layout;
    // The bias of nn.Linear and its kin lies beside the weight.
    const std::string &weight = projection->weight;
    if (!projection->bias.empty() || !ends_with(weight, ".weight")) continue;
    const std::string bias = weight.substr(0, weight.size() - 6) + "bias";
    if (file.find(bias) != nullptr) projection->bias = bias;
  }
  return result;
}

}  // namespace command
