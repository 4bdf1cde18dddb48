// From the options to a layer that can be called.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "call.h"
#include "files.h"
#include "mha.h"

namespace command {

// Which layer, and how it is computed. 0 and "" = not given.
struct LayerOptions {
  std::string weights, packed, config;
  bool without_config = false;
  std::optional<std::string> layer;
  // What config.json says otherwise
  int64_t num_heads = 0;
  bool is_causal = false, is_not_causal = false, without_rope = false;
  double rope_base = 0;
  // The computation
  std::string weight_type, arithmetic;
};

// Refuses an output that is one of the files that the layer is read from, or that is not named.
void check_output(const std::string &output, const LayerOptions &layer);

// A layer over packed bytes: those of a mapped file, or its own.
class Layer {
 public:
  // --packed, or else --weights, which are packed then.
  explicit Layer(const LayerOptions &options);
  Layer(const Layer &) = delete;
  Layer &operator=(const Layer &) = delete;

  const mha_layer *get() const { return layer_; }
  const std::string &name() const { return name_; }  // the file
  const mha_layer_config &shape() const { return shape_; }
  const Call &call() const { return call_; }
  const unsigned char *bytes() const { return bytes_; }
  size_t num_bytes() const { return num_bytes_; }
  std::string text() const;  // "12 heads of 64, causal", "8 query heads of 4, 2 key heads, ..."

 private:
  void pack(const LayerOptions &options);

  std::string name_;
  Call call_;
  std::unique_ptr<const MappedFile> file_;
  std::vector<std::max_align_t> memory_, storage_;
  const unsigned char *bytes_ = nullptr;
  size_t num_bytes_ = 0;
  const mha_layer *layer_ = nullptr;
  mha_layer_config shape_ = {};
};

// The MHA_TYPE_* from 1 on, in their order, and the MHA_ARITHMETIC_*.
inline const std::vector<std::string> type_names = {"f32", "f16", "bf16", "int8", "int4"};
inline const std::vector<std::string> arithmetic_names = {"f32", "int8", "int16"};
uint32_t type_of(const std::string &name);        // "" = 0, the default
uint32_t arithmetic_of(const std::string &name);  // "" = 0, the default

}  // namespace command
