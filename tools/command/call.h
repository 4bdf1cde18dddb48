// How a layer is called, which its weights do not say: rotation, norms, masks. A packed file keeps
// it after the packed layer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "mha.h"

namespace command {

struct QueryKeyNorm {
  float epsilon = 0;
  bool is_of_all_heads = false;
  std::vector<float> q_weight, k_weight;
};

struct Call {
  bool is_causal = false;
  int64_t window = 0;  // rows that a row attends to, its own among them; 0 = all
  double softcap = 0;  // 0 = none
  std::optional<mha_rope_config> rotation;  // without positions; of pairs in halves
  std::optional<QueryKeyNorm> norm;
  std::vector<float> sinks;  // empty = none
  std::string source;        // what says this: a file, or options

  std::string text() const;  // "causal, rotated (base 10000), softcap 50"
};

// What follows the packed layer in a file, in which mha_layer_view looks at the layer alone:
// the call as JSON, a checksum of that, its length, and "mha call".
std::string packed_call(const Call &call);
Call read_packed_call(const std::string &name, const unsigned char *file, size_t bytes,
                      const mha_layer_config &shape);

// A call as the arguments of mha.h point to it; as long as it and the call live.
class PreparedCall {
 public:
  PreparedCall(const Call &call, const mha_layer_config &shape, int64_t num_positions);
  PreparedCall(const PreparedCall &) = delete;
  PreparedCall &operator=(const PreparedCall &) = delete;

  void add_to(mha_forward_args *args) const;

 private:
  const Call &call_;
  std::vector<float> cos_, sin_;
  mha_rope rope_ = {};
  mha_norm norm_ = {};
  mha_score_options score_ = {};
};

}  // namespace command
