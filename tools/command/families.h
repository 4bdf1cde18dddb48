// The names that attention layers have in files of weights.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "mha.h"
#include "safetensors.h"

namespace command {

// A weight matrix, its bias and how the matrix lies. "" = there is none.
struct ProjectionNames {
  std::string weight;
  std::string bias;
  uint32_t layout = MHA_LAYOUT_OUT_IN;
};

// The tensors of one layer: either qkv.weight or q, k and v. qkv.bias may stand beside either form.
struct LayerNames {
  std::string family;  // "GPT-2", or "" for names that the user gave
  ProjectionNames q, k, v, qkv, o, g;
};

// Whether models with such names rotate queries and keys (RoPE), of which the tensors show nothing.
enum class Rotates { kNever, kSome, kAll };

// A layer that a file holds.
struct FoundLayer {
  std::string prefix;    // "h.0.attn", or "" for a file of one layer
  LayerNames names;      // complete names in the file; only those that exist, and the weights that should
  std::string obstacle;  // why this version can't compute the layer; "" = it can
  std::string q_norm, k_norm;  // weights of a norm of queries and keys; "" = none
  bool norm_adds_one = false;  // these stand for 1 + w
  bool has_norm_of_values = false;
  std::string sinks;           // "" = none
  Rotates rotates = Rotates::kNever;
};

// All layers of the families that the command knows.
std::vector<FoundLayer> find_layers(const SafetensorsFile &file);

// The layer that prefix means, or the only one. prefix may be any part of a layer's prefix between dots, if it means just one.
FoundLayer choose_layer(const SafetensorsFile &file, const std::optional<std::string> &prefix);

// The layer of --names, such as "q=wq.weight,k=wk.weight,v=wv.weight,o=wo.weight".
LayerNames parse_names(const SafetensorsFile &file, const std::string &names, const std::optional<std::string> &prefix, uint32_t layout);

}  // namespace command
