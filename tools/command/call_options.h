// What the options, and the tensors of a layer beside its projections, add to a call: norm, rotation, and what changes scores.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "inputs.h"
#include "layer.h"
#include "mha.h"
#include "npy.h"
#include "options.h"
#include "rotation.h"

namespace command {

class CallOptions {
 public:
  CallOptions(const LayerOptions &layer_options, const AttentionOptions &options, const LoadedLayer &layer, const CallInputs &inputs);
  CallOptions(const CallOptions &) = delete;
  CallOptions &operator=(const CallOptions &) = delete;

  // Each NULL where there is none, for the whole batch. The structs point into this object.
  const mha_norm *norm() const { return norm_.struct_size != 0 ? &norm_ : nullptr; }
  const mha_rope *rope() const { return rotation_ ? rotation_->get() : nullptr; }
  const mha_score_options *score() const { return score_.struct_size != 0 ? &score_ : nullptr; }
  int64_t window() const { return window_; }  // rows that a row attends to, its own among them; 0 = all

  // To a call for the sequences from the one numbered first. *score is for the arguments to point to.
  void add_to(mha_forward_args *args, int64_t first, mha_score_options *score) const;

  // "normalised (RMS, epsilon 1e-06), rotated (half, base 10000), softcap 50"; "" = nothing of all that.
  std::string text() const;
  std::string rope_text() const { return rotation_ ? rotation_->text() : ""; }

 private:
  void read_norm(const AttentionOptions &options, const LayerExtras &extras);
  void read_score(const AttentionOptions &options, const LoadedLayer &layer, const CallInputs &inputs);

  std::string norm_text_, score_text_;
  std::vector<float> q_norm_, k_norm_, slopes_, sinks_;
  Array bias_;
  ByteArray mask_;
  std::optional<Rotation> rotation_;
  mha_norm norm_ = {};
  mha_score_options score_ = {};
  int64_t window_ = 0;
};

}  // namespace command
