#include "call_options.h"

#include <algorithm>

#include "error.h"

namespace command {
namespace {

// The shape of an array of pairs must be (n, keys), (heads, n, keys) or (batch, heads, n, keys); batch and heads may be 1.
void set_pairs(const std::string &name, const std::vector<int64_t> &shape, const CallInputs &inputs, int64_t num_heads,
               int64_t *batch_stride, int64_t *head_stride, int64_t *row_stride) {
  const int64_t n_q = inputs.n_q(), n_kv = inputs.n_kv();
  std::vector<int64_t> whole = shape;
  while (whole.size() < 4) whole.insert(whole.begin(), 1);
  const bool fits = shape.size() >= 2 && shape.size() <= 4 && (whole[0] == 1 || whole[0] == inputs.batch()) &&
                    (whole[1] == 1 || whole[1] == num_heads) && whole[2] == n_q && whole[3] == n_kv;
  if (!fits) {
    fail(name, ": has the shape ", shape_text(shape), "; ", shape_text({n_q, n_kv}), ", ", shape_text({num_heads, n_q, n_kv}), " or ",
         shape_text({inputs.batch(), num_heads, n_q, n_kv}),
         " is expected, rows and keys, for all heads, for each, or for each sequence too");
  }
  *row_stride = n_kv;
  *head_stride = whole[1] == 1 ? 0 : n_q * n_kv;
  *batch_stride = whole[0] == 1 ? 0 : whole[1] * n_q * n_kv;
}

}  // namespace

CallOptions::CallOptions(const LayerOptions &layer_options, const AttentionOptions &options, const LoadedLayer &layer,
                         const CallInputs &inputs) {
  if (options.window != 0 && !inputs.is_causal) fail("--window: counts back from each row; give --causal too");
  window_ = options.window;
  read_norm(options, layer.extras());
  if (layer.rotates()) {
    rotation_.emplace(layer_options, layer.shape(), std::max(inputs.n_q(), inputs.n_kv()), layer.extras().is_gpt_oss());
  }
  read_score(options, layer, inputs);
}

void CallOptions::read_norm(const AttentionOptions &options, const LayerExtras &extras) {
  const bool has_weights = !extras.q_norm.empty();
  if (options.norm.empty() && !has_weights) {
    const char *const name = options.norm_epsilon != 0     ? "--norm-epsilon"
                             : options.is_norm_after_rope ? "--norm-after-rope"
                             : options.has_norm_of_values ? "--norm-values"
                                                          : nullptr;
    if (name != nullptr) fail(name, ": is about a norm, but the layer has no weights of one, and --norm is not given");
    return;
  }
  const bool is_layer = options.norm == "layer";
  norm_.struct_size = sizeof norm_;
  norm_.epsilon = options.norm_epsilon != 0 ? options.norm_epsilon : 1e-6f;
  if (is_layer) norm_.flags |= MHA_NORM_LAYER;
  if (extras.is_norm_of_all_heads) norm_.flags |= MHA_NORM_ALL_HEADS;
  if (options.is_norm_after_rope) norm_.flags |= MHA_NORM_AFTER_ROPE;
  const bool is_of_values = options.has_norm_of_values || extras.has_norm_of_values;
  if (is_of_values) norm_.flags |= MHA_NORM_VALUES;
  if (has_weights) {
    q_norm_ = extras.q_norm;
    k_norm_ = extras.k_norm;
    for (std::vector<float> *weights : {&q_norm_, &k_norm_}) {
      for (float &weight : *weights) weight += extras.norm_adds_one ? 1.0f : 0.0f;
    }
    norm_.q_weight = q_norm_.data();
    norm_.k_weight = k_norm_.data();
  }
  norm_text_ = command::text("normalised (", is_layer ? "layer norm" : "RMS", extras.is_norm_of_all_heads ? " of all heads together" : "",
                             !has_weights           ? ", no weights"
                             : extras.norm_adds_one ? ", weights 1 + w"
                                                    : "",
                             ", epsilon ", norm_.epsilon, options.is_norm_after_rope ? ", after RoPE" : "",
                             is_of_values ? ", values too" : "", ")");
}

void CallOptions::read_score(const AttentionOptions &options, const LoadedLayer &layer, const CallInputs &inputs) {
  const int64_t num_heads = layer.shape().num_heads;
  const auto name = [this](const std::string &words) { score_text_ += (score_text_.empty() ? "" : ", ") + words; };
  if (window_ != 0) name(command::text("window of ", count_text(window_, "row")));
  if (options.softcap != 0) {
    score_.softcap = options.softcap;
    name(command::text("softcap ", options.softcap));
  }
  if (options.has_alibi) {
    slopes_.resize(static_cast<size_t>(num_heads));
    mha_error error;
    check(mha_alibi_slopes(num_heads, slopes_.data(), &error), error, "--alibi");
    score_.alibi_slopes = slopes_.data();
    name("ALiBi");
  }
  if (!options.bias.empty()) {
    bias_ = read_npy_of_any_rank(options.bias);
    set_pairs(bias_.name, bias_.shape, inputs, num_heads, &score_.bias_batch_stride, &score_.bias_head_stride, &score_.bias_row_stride);
    score_.bias = bias_.data;
    name("bias");
  }
  if (!options.mask.empty()) {
    mask_ = read_npy_bytes(options.mask);
    set_pairs(mask_.name, mask_.shape, inputs, num_heads, &score_.mask_batch_stride, &score_.mask_head_stride, &score_.mask_row_stride);
    score_.mask = mask_.data;
    name("mask");
  }
  sinks_ = layer.extras().sinks;
  if (!options.sinks.empty()) {
    const Array sinks = read_npy_of_any_rank(options.sinks);
    if (sinks.shape != std::vector<int64_t>{num_heads}) {
      fail(sinks.name, ": has the shape ", shape_text(sinks.shape), "; ", shape_text({num_heads}), " is expected, a sink for each head");
    }
    sinks_.assign(sinks.data, sinks.data + num_heads);
  }
  if (!sinks_.empty()) {
    score_.sinks = sinks_.data();
    name("sinks");
  }
  const bool has_any = score_.softcap != 0 || score_.alibi_slopes || score_.bias || score_.mask || score_.sinks;
  score_.struct_size = has_any ? sizeof score_ : 0;
}

void CallOptions::add_to(mha_forward_args *args, int64_t first, mha_score_options *score) const {
  args->norm = norm();
  args->rope = rope();
  args->score = score_.struct_size != 0 ? score : nullptr;
  *score = score_;
  if (score_.bias != nullptr) score->bias = static_cast<const float *>(score_.bias) + first * score_.bias_batch_stride;
  if (score_.mask != nullptr) score->mask += first * score_.mask_batch_stride;
  if (window_ != 0) {
    args->flags |= MHA_WINDOW_LEFT;
    args->window_left = window_ - 1;
  }
}

std::string CallOptions::text() const {
  const bool is_norm_last = (norm_.flags & MHA_NORM_AFTER_ROPE) != 0;
  std::string result;
  for (const std::string &part : {is_norm_last ? rope_text() : norm_text_, is_norm_last ? norm_text_ : rope_text(), score_text_}) {
    if (!part.empty()) result += (result.empty() ? "" : ", ") + part;
  }
  return result;
}

}  // namespace command
