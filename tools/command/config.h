// What config.json beside the weights says of the attention of a model.
#pragma once

#include <cstdint>
#include <string>

#include "call.h"

namespace command {

struct Model {
  std::string name;  // the file; "" = said by options
  int64_t query_dim = 0, num_heads = 0;
  int64_t num_kv_heads = 0, head_dim = 0;  // 0 = as the shapes say
  float scale = 0;                         // 0 = 1 / sqrt(head_dim)
  bool has_norm = false,
       norm_adds_one =
           false;  // of queries and keys, whose weights are in the file of weights, or these - 1
  float norm_epsilon = 0;
  bool has_sinks = false;  // in the file of weights
  Call call;               // without those weights and sinks
};

// Of the layer with this number; -1 = not known. Everything that the file says and that is not
// known is an InputError.
Model read_model(const std::string &path, int64_t layer);

}  // namespace command
