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
  CallOptions() = default;  // a call of nothing but causal or not
  CallOptions(const LayerOptions &layer_options, const AttentionOptions &options, const LoadedLayer &layer, const CallInputs &inputs);
  CallOptions(const CallOptions &) = delete;
  CallOptions &operator=(const CallOptions &) = delete;

  // Each NULL where there is none, for the whole batch. The structs point into this object.
  const mha_norm *norm() const { return norm_.struct_size != 0 ? &norm_ : nullptr; }
  const mha_rope *rope() const { return rotation_ ? rotation_->get() : nullptr; }
  const mha_score_options *score() const { return score_.struct_size != 0 ? &score_ : nullptr; }
  int64_t window() const { return window_; }  // rows that a row attends to, its own among them; 0 = all

  int64_t num_packed() const { return q_ends_.empty() ? 0 : static_cast<int64_t>(q_ends_.size()) - 1; }  // sequences, 0 = not packed
  const std::vector<int64_t> &packed_queries() const { return q_ends_; }
  const std::vector<int64_t> &packed_keys() const { return kv_ends_.empty() ? q_ends_ : kv_ends_; }

  // To a call for the sequences from the one numbered first. *score is for the arguments to point to.
  void add_to(mha_forward_args *args, int64_t first, mha_score_options *score) const;
  // Of that, what other arguments have as well: the window, and where packed sequences begin.
  template <typename Args>
  void add_flags(Args *args) const {
    if (window_ != 0) {
      args->flags |= MHA_WINDOW_LEFT;
      args->window_left = window_ - 1;
    }
    if (q_ends_.empty()) return;
    args->batch = num_packed();
    args->cu_seqlens_q = q_ends_.data();
    args->cu_seqlens_kv = kv_ends_.empty() ? nullptr : kv_ends_.data();
  }

  // For a call of the rows from this one on over a cache that has those before, of the first sequences.
  void move_to_row(int64_t row, mha_score_options *score) const;
  // For a call of this head alone, of the first sequence.
  void move_to_head(int64_t head, mha_score_options *score) const;

  // "normalised (RMS, epsilon 1e-06), rotated (half, base 10000), softcap 50"; "" = nothing of all that.
  std::string text() const;
  std::string rope_text() const { return rotation_ ? rotation_->text() : ""; }

 private:
  void read_norm(const AttentionOptions &options, const LayerExtras &extras);
  void read_score(const AttentionOptions &options, const LoadedLayer &layer, const CallInputs &inputs);
  void read_groups(const std::string &path, const std::vector<int64_t> &whole, std::vector<int32_t> *groups, int64_t *stride);
  void read_rows(const AttentionOptions &options, const CallInputs &inputs);
  const void *bias_from(int64_t element) const { return score_.bias != nullptr ? bias_.from(element) : nullptr; }

  std::string norm_text_, score_text_;
  std::vector<float> q_norm_, k_norm_, slopes_, sinks_, relative_bias_;
  Array bias_, mask_, q_scales_, head_scales_;
  std::vector<int32_t> q_groups_, kv_groups_;
  std::vector<int64_t> lengths_, key_lengths_, starts_, q_ends_, kv_ends_;
  std::optional<Rotation> rotation_;
  mha_norm norm_ = {};
  mha_score_options score_ = {};
  int64_t window_ = 0;
};

}  // namespace command
