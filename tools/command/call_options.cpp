#include "call_options.h"

#include <algorithm>

#include "error.h"

namespace command {
namespace {

// The strides of an array whose extents are the last ones of `whole`, `least` of them or more. Those before may be 1: the same for all.
std::vector<int64_t> strides_of(const Array &array, const std::vector<int64_t> &whole, size_t least, const char *what) {
  const std::vector<int64_t> &shape = array.shape;
  const size_t rank = whole.size();
  bool fits = shape.size() >= least && shape.size() <= rank;
  std::vector<int64_t> strides(rank);
  int64_t stride = 1;
  for (size_t i = 0; fits && i < shape.size(); ++i) {
    const int64_t extent = shape[shape.size() - 1 - i], expected = whole[rank - 1 - i];
    fits = extent == expected || (i >= least && extent == 1);
    strides[rank - 1 - i] = i >= least && extent == 1 ? 0 : stride;
    stride *= extent;
  }
  if (!fits) {
    std::string shapes;
    for (size_t count = least; count <= rank; ++count) {
      const std::string expected = shape_text({whole.end() - static_cast<int64_t>(count), whole.end()});
      shapes += (count == least ? "" : count == rank ? " or " : ", ") + expected;
    }
    fail(array.name, ": has the shape ", shape_text(shape), "; ", shapes, " is expected, ", what);
  }
  return strides;
}

std::vector<int64_t> read_numbers(const std::string &path, int64_t count, const char *what) {
  const Array array = read_npy(path, Elements::kNumbers);
  if (count >= 0) strides_of(array, {count}, 1, what);
  return numbers_of(array);
}

// The starts of packed sequences.
std::vector<int64_t> read_starts(const std::string &path) {
  const Array array = read_npy(path, Elements::kNumbers);
  if (array.shape.size() != 1 || array.shape[0] == 0) {
    fail(path, ": has the shape ", shape_text(array.shape), "; (count + 1,) is expected, where each sequence begins and the last one ends");
  }
  return numbers_of(array);
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
  read_rows(options, inputs);
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
  const size_t before = score_text_.size();
  if (!options.arithmetic.empty()) {
    score_.arithmetic = options.arithmetic == "int8" ? MHA_ARITHMETIC_INT8 : MHA_ARITHMETIC_INT16;
    name("scores in " + options.arithmetic);
  }
  if (!options.context_arithmetic.empty()) {
    score_.context_arithmetic = options.context_arithmetic == "int8" ? MHA_ARITHMETIC_INT8 : MHA_ARITHMETIC_INT16;
    name("context in " + options.context_arithmetic);
  }
  if (options.softcap != 0) {
    score_.softcap = options.softcap;
    name(command::text("softcap ", options.softcap));
  }
  if (options.has_alibi) {
    std::vector<float> slopes(static_cast<size_t>(layer.extras().num_heads_of(num_heads)));
    mha_error error;
    check(mha_alibi_slopes(static_cast<int64_t>(slopes.size()), slopes.data(), &error), error, "--alibi");
    slopes_ = layer.extras().of_kept_heads(slopes);
    score_.alibi_slopes = slopes_.data();
    name("ALiBi");
  }
  const int64_t batch = inputs.batch(), n_q = inputs.n_q(), n_kv = inputs.n_kv();
  const std::vector<int64_t> pairs = {batch, num_heads, n_q, n_kv};
  const char *const of_pairs = "rows and keys, for all heads, for each, or for each sequence too";
  if (!options.bias.empty()) {
    bias_ = read_npy(options.bias, Elements::kHalves);
    const std::vector<int64_t> strides = strides_of(bias_, pairs, 2, of_pairs);
    score_.bias = bias_.data;
    score_.bias_type = bias_.type;
    score_.bias_batch_stride = strides[0];
    score_.bias_head_stride = strides[1];
    score_.bias_row_stride = strides[2];
    name("bias");
  }
  if (!options.relative_bias.empty() && !options.t5_bias.empty()) fail("--t5-bias: can't be combined with --relative-bias");
  if (!options.relative_bias.empty()) {
    const Array table = read_npy(options.relative_bias, Elements::kFloats);
    const int64_t distances = table.shape.empty() ? 0 : table.shape.back();
    strides_of(table, {num_heads, std::max<int64_t>(distances, 1)}, 2, "a number for each head and distance");
    if (options.relative_left == 0 && distances % 2 == 0) {
      fail(table.name, ": has an even number of distances, ", distances, "; say by --relative-left how many of them are to the left of 0");
    }
    score_.relative_left = options.relative_left != 0 ? options.relative_left : distances / 2;
    score_.relative_right = distances - 1 - score_.relative_left;
    if (score_.relative_right < 0) fail("--relative-left: ", table.name, " has only ", count_text(distances, "distance"));
    relative_bias_.assign(table.floats(), table.floats() + table.count());
  } else if (options.relative_left != 0) {
    fail("--relative-left: is about --relative-bias, which is not given");
  }
  if (!options.t5_bias.empty()) {
    const Array embedding = read_npy(options.t5_bias, Elements::kFloats);
    const int64_t buckets = embedding.shape.empty() ? 0 : embedding.shape.front();
    strides_of(embedding, {std::max<int64_t>(buckets, 1), num_heads}, 2, "a row for each bucket and a column for each head");
    score_.relative_left = 128;  // from which on all distances share a bucket
    score_.relative_right = inputs.is_causal ? 0 : 128;
    relative_bias_.resize(static_cast<size_t>(num_heads * (score_.relative_left + 1 + score_.relative_right)));
    mha_error error;
    check(mha_t5_relative_bias(embedding.floats(), buckets, 0, inputs.is_causal ? 0 : 1, num_heads, score_.relative_left,
                               score_.relative_right, relative_bias_.data(), &error),
          error, embedding.name);
  }
  if (!relative_bias_.empty()) {
    score_.relative_bias = relative_bias_.data();
    name(options.t5_bias.empty() ? "relative bias" : "relative bias (T5)");
  }
  if (!options.mask.empty()) {
    mask_ = read_npy(options.mask, Elements::kBooleans);
    const std::vector<int64_t> strides = strides_of(mask_, pairs, 2, of_pairs);
    score_.mask = static_cast<const uint8_t *>(mask_.data);
    score_.mask_batch_stride = strides[0];
    score_.mask_head_stride = strides[1];
    score_.mask_row_stride = strides[2];
    name("mask");
  }
  if (!options.groups.empty()) {
    read_groups(options.groups, {batch, n_q}, &q_groups_, &score_.q_groups_stride);
    const bool has_own_keys = inputs.key || inputs.value;
    if (options.key_groups.empty() && has_own_keys) fail("--key-groups: is needed, for the keys are not the rows of ", inputs.query.name);
    if (has_own_keys) {
      read_groups(options.key_groups, {batch, n_kv}, &kv_groups_, &score_.kv_groups_stride);
    } else {
      kv_groups_ = q_groups_;
      score_.kv_groups_stride = score_.q_groups_stride;
    }
    score_.q_groups = q_groups_.data();
    score_.kv_groups = kv_groups_.data();
    score_.groups = options.adds_groups ? MHA_GROUPS_ALSO : MHA_GROUPS_WITHIN;
    name(options.adds_groups ? "also within groups" : "within groups");
  }
  if (!options.key_groups.empty() && (options.groups.empty() || (!inputs.key && !inputs.value))) {
    fail("--key-groups: goes with --key and --groups");
  }
  if (options.adds_groups && options.groups.empty()) fail("--groups-also: goes with --groups");
  if (!options.q_scales.empty()) {
    q_scales_ = read_npy(options.q_scales, Elements::kFloats);
    score_.q_scales_stride = strides_of(q_scales_, {batch, n_q}, 1, "a factor for each row, or for each row of each sequence")[0];
    score_.q_scales = q_scales_.floats();
    name("query scales");
  }
  if (!options.head_scales.empty()) {
    head_scales_ = read_npy(options.head_scales, Elements::kFloats);
    strides_of(head_scales_, {num_heads}, 1, "a factor for each head");
    score_.head_scales = head_scales_.floats();
    const int64_t left_out = std::count(head_scales_.floats(), head_scales_.floats() + num_heads, 0.0f);
    name(left_out == 0 ? "head scales" : command::text("head scales (", count_text(left_out, "head"), " left out)"));
  }
  sinks_ = layer.extras().sinks;
  if (!options.sinks.empty()) {
    const Array sinks = read_npy(options.sinks, Elements::kFloats);
    strides_of(sinks, {num_heads}, 1, "a sink for each head");
    sinks_.assign(sinks.floats(), sinks.floats() + num_heads);
  }
  if (!sinks_.empty()) {
    score_.sinks = sinks_.data();
    name("sinks");
  }
  score_.struct_size = score_text_.size() != before ? sizeof score_ : 0;
}

void CallOptions::read_groups(const std::string &path, const std::vector<int64_t> &whole, std::vector<int32_t> *groups, int64_t *stride) {
  const Array array = read_npy(path, Elements::kNumbers);
  *stride = strides_of(array, whole, 1, "a number for each row, or for each row of each sequence")[0];
  for (const int64_t number : numbers_of(array)) {
    if (number != static_cast<int32_t>(number)) fail(path, ": holds the group ", number, ", which has more than 32 bits");
    groups->push_back(static_cast<int32_t>(number));
  }
}

void CallOptions::read_rows(const AttentionOptions &options, const CallInputs &inputs) {
  const bool has_own_keys = inputs.key || inputs.value;
  const auto name = [this](const std::string &words) { score_text_ += (score_text_.empty() ? "" : ", ") + words; };
  const char *const of_keys = !options.key_lengths.empty()      ? "--key-lengths"
                              : !options.key_cu_seqlens.empty() ? "--key-cu-seqlens"
                                                                : nullptr;
  if (of_keys != nullptr && !has_own_keys) fail(of_keys, ": the keys are the rows of ", inputs.query.name, "; leave it out, or give --key");
  const char *const of_each = "a number for each sequence";
  if (!options.lengths.empty()) lengths_ = read_numbers(options.lengths, inputs.batch(), of_each);
  if (!options.key_lengths.empty()) key_lengths_ = read_numbers(options.key_lengths, inputs.batch(), of_each);
  if (!options.starts.empty()) starts_ = read_numbers(options.starts, inputs.batch(), of_each);
  if (!(options.lengths + options.key_lengths + options.starts).empty()) name("padding");
  if (!options.key_cu_seqlens.empty() && options.cu_seqlens.empty()) fail("--key-cu-seqlens: goes with --cu-seqlens");
  if (options.cu_seqlens.empty()) return;
  if (inputs.batch() != 1) {
    fail("--cu-seqlens: ", inputs.query.name, " has the shape ", shape_text(inputs.query.shape),
         "; sequences that are packed are one array, (n, width)");
  }
  q_ends_ = read_starts(options.cu_seqlens);
  if (!options.key_cu_seqlens.empty()) kv_ends_ = read_starts(options.key_cu_seqlens);
  if (!kv_ends_.empty() && kv_ends_.size() != q_ends_.size()) {
    fail(options.key_cu_seqlens, ": has ", kv_ends_.size(), " numbers, but ", options.cu_seqlens, " has ", q_ends_.size());
  }
  name(count_text(num_packed(), "packed sequence"));
}

void CallOptions::add_to(mha_forward_args *args, int64_t first, mha_score_options *score) const {
  args->norm = norm();
  args->rope = rope();
  args->score = score_.struct_size != 0 ? score : nullptr;
  *score = score_;
  const auto move = [first](auto **array, int64_t stride) {
    if (*array != nullptr) *array += first * stride;
  };
  score->bias = bias_from(first * score_.bias_batch_stride);
  move(&score->mask, score_.mask_batch_stride);
  move(&score->q_groups, score_.q_groups_stride);
  move(&score->kv_groups, score_.kv_groups_stride);
  move(&score->q_scales, score_.q_scales_stride);
  if (!lengths_.empty()) args->q_lengths = lengths_.data() + first;
  if (!key_lengths_.empty()) args->kv_lengths = key_lengths_.data() + first;
  if (!starts_.empty()) args->kv_start = starts_.data() + first;
  add_flags(args);
}

void CallOptions::move_to_row(int64_t row, mha_score_options *score) const {
  // They have all rows, and mask and bias in each the columns of all positions.
  score->bias = bias_from(row * score_.bias_row_stride);
  if (score->mask != nullptr) score->mask += row * score_.mask_row_stride;
  if (score->q_groups != nullptr) score->q_groups += row;
  if (score->q_scales != nullptr) score->q_scales += row;
}

void CallOptions::move_to_head(int64_t head, mha_score_options *score) const {
  const auto move = [head](auto **array, int64_t stride) {
    if (*array != nullptr) *array += head * stride;
  };
  score->bias = bias_from(head * score_.bias_head_stride);
  move(&score->mask, score_.mask_head_stride);
  move(&score->alibi_slopes, 1);
  move(&score->sinks, 1);
  move(&score->head_scales, 1);
  move(&score->relative_bias, score_.relative_left + 1 + score_.relative_right);
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
