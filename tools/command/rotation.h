// The rotation of queries and keys (RoPE), as the --rope options say.
#pragma once

#include <memory>
#include <string>

#include "mha.h"
#include "options.h"

namespace command {

// Tables for a layer, and what a call is given of them.
class Rotation {
 public:
  // For positions below num_positions. Without an option that says otherwise, gpt-oss is rotated as its models are.
  Rotation(const LayerOptions &options, const mha_layer_config &shape, int64_t num_positions, bool is_gpt_oss);

  const mha_rope *get() const { return &rope_; }
  const std::string &text() const { return text_; }  // "rotated (half, base 10000)"

 private:
  std::string text_;
  std::unique_ptr<float[]> cos_, sin_;
  mha_rope rope_ = {};
};

}  // namespace command
