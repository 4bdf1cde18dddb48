// From the options to a layer that can be called.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "families.h"
#include "files.h"
#include "mha.h"
#include "options.h"
#include "safetensors.h"

namespace command {

// What a layer has beside what is packed. Empty = there is none.
struct LayerExtras {
  std::vector<float> q_norm, k_norm;  // weights, of a head or of all
  bool is_norm_of_all_heads = false;
  bool norm_adds_one = false;  // the weights stand for 1 + w
  bool has_norm_of_values = false;
  std::vector<float> sinks;
  // Where heads are left out: for each head that there was, whether it stays.
  std::vector<uint8_t> kept_heads;

  // Of a layer that has `left` heads now.
  int64_t num_heads_of(int64_t left) const { return kept_heads.empty() ? left : static_cast<int64_t>(kept_heads.size()); }
  std::vector<float> of_kept_heads(const std::vector<float> &of_heads) const;

  bool is_gpt_oss() const { return !sinks.empty(); }  // of the families known, it alone has them
};

// What one layer of a file needs to be packed. The pointers in weights point into the file, or into copies.
struct LayerWeights {
  std::string name;  // for sentences: the file, as the user wrote it
  std::unique_ptr<const SafetensorsFile> file;
  std::vector<std::unique_ptr<float[]>> copies;
  LayerNames names;
  mha_layer_config config;  // complete: no default is left to the library
  mha_layer_weights weights;
  std::string layout_doubt;  // "" = none; else why --layout seems wrong, unless keys and values have rows of their own
  LayerExtras extras;
  bool rotates;              // whether queries and keys are to be rotated
};

// Reads --weights as the other options say. Everything that does not fit is an InputError.
LayerWeights read_layer_weights(const LayerOptions &options);

// The --isa and --back-end options.
mha_layer_options computation_options(const LayerOptions &options);

// A layer of its own, or over a packed file.
class LoadedLayer {
 public:
  LoadedLayer(const LayerWeights &weights, const LayerOptions &options);     // packs
  LoadedLayer(const std::string &packed_file, const LayerOptions &options);  // maps
  ~LoadedLayer();
  LoadedLayer(const LoadedLayer &) = delete;
  LoadedLayer &operator=(const LoadedLayer &) = delete;

  const mha_layer *get() const { return layer_; }
  const std::string &name() const { return name_; }  // the file, for sentences
  const mha_layer_config &shape() const { return shape_; }
  const std::string &layout_doubt() const { return layout_doubt_; }  // that of LayerWeights
  bool rotates() const { return rotates_; }
  const LayerExtras &extras() const { return extras_; }

 private:
  std::string name_;
  std::string layout_doubt_;
  bool rotates_ = false;
  LayerExtras extras_;
  mha_layer *own_ = nullptr;
  std::unique_ptr<const MappedFile> packed_;
  std::vector<std::max_align_t> storage_;
  const mha_layer *layer_ = nullptr;
  mha_layer_config shape_ = {};
};

// Bytes of a packed layer, aligned as mha_layer_pack wants them.
struct PackedLayer {
  std::vector<unsigned char> memory;
  unsigned char *data = nullptr;
  size_t bytes = 0;
};
PackedLayer pack_layer(const LayerWeights &weights, const LayerOptions &options);

// Throws InputError if the file is something else than a packed layer, such as the weights that one is made of.
void check_is_packed(const MappedFile &file);

// "12 heads of 64", or "8 query heads of 4, 2 key heads, gated (sigmoid)".
std::string heads_text(const mha_layer_config &shape);

// "query_dim 768, 12 heads of 64" and whatever else is special.
std::string describe(const mha_layer_config &shape);

}  // namespace command
