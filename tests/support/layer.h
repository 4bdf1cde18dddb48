// Whole layers, computed by the library in any way that it offers and by the specification.
#ifndef MHA_TESTS_SUPPORT_LAYER_H
#define MHA_TESTS_SUPPORT_LAYER_H

#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "spec/spec.h"
#include "support/attention.h"
#include "support/outputs.h"
#include "support/random.h"
#include "support/shapes.h"
#include "support/strided.h"

namespace support {

// All dense, matrices [in, out]. Empty: no bias, no output projection.
struct LayerProblem : AttentionSizes {
  int64_t query_dim = 1;
  int64_t key_dim = 1;
  int64_t value_dim = 1;
  int64_t output_dim = 1;  // looked at with w_o only
  bool has_key = false;    // else the query is the key
  bool has_value = false;  // else the key is the value
  std::vector<float> w_q, w_k, w_v, w_o;
  std::vector<float> b_q, b_k, b_v, b_o;
  Stored stored = Stored::kF32;           // what the matrices are; the layer keeps them as that
  std::vector<float> s_q, s_k, s_v, s_o;  // scales, where they are codes
  std::vector<float> query;               // [batch, n_q, query_dim]
  std::vector<float> key;                 // [batch, n_kv, key_dim]
  std::vector<float> value;               // [batch, n_kv, value_dim]

  int64_t q_width() const { return num_heads * head_dim; }
  int64_t k_width() const { return num_kv_heads * head_dim; }
  int64_t v_width() const { return num_kv_heads * head_dim_v; }
  int64_t merged_width() const { return num_heads * head_dim_v; }
  int64_t y_width() const { return w_o.empty() ? merged_width() : output_dim; }
  const std::vector<float> &key_input() const { return has_key ? key : query; }
  const std::vector<float> &value_input() const { return has_value ? value : key_input(); }
};

inline std::string Describe(const LayerProblem &problem) {
  std::ostringstream text;
  text << Describe(static_cast<const AttentionSizes &>(problem)) << " query_dim " << problem.query_dim << " key_dim " << problem.key_dim
       << " value_dim " << problem.value_dim << " output_dim " << (problem.w_o.empty() ? 0 : problem.output_dim)
       << (problem.has_key ? " key" : "") << (problem.has_value ? " value" : "") << " biases";
  for (const std::vector<float> *bias : {&problem.b_q, &problem.b_k, &problem.b_v, &problem.b_o}) text << (bias->empty() ? "-" : "+");
  return text.str();
}

inline LayerShape LayerShapeOf(const LayerProblem &problem, int64_t b) {
  return {problem.query_dim, problem.key_dim, problem.value_dim, problem.output_dim, ShapeOf(problem, b)};
}

inline LayerWeights WeightsOf(const LayerProblem &problem) {
  const auto pointer = [](const std::vector<float> &x) { return x.empty() ? nullptr : x.data(); };
  return {pointer(problem.w_q), pointer(problem.w_k), pointer(problem.w_v), pointer(problem.w_o), pointer(problem.b_q),
          pointer(problem.b_k), pointer(problem.b_v), pointer(problem.b_o), problem.stored,       pointer(problem.s_q),
          pointer(problem.s_k), pointer(problem.s_v), pointer(problem.s_o)};
}

// The problem with its matrices as a layer keeps them that converts them to `stored`.
inline LayerProblem Converted(const LayerProblem &problem, Stored stored, const spec::Functions &functions = spec::Fastest()) {
  LayerProblem converted = problem;
  converted.stored = stored;
  const auto store = [&](const std::vector<float> &w, int64_t in, int64_t out, std::vector<float> *numbers, std::vector<float> *scales) {
    if (w.empty()) return;
    if (stored == Stored::kInt8) scales->resize(out);
    if (stored == Stored::kInt4) scales->resize((in + 31) / 32 * out);
    functions.store_weights(stored, w.data(), in, out, numbers->data(), scales->data());
  };
  store(problem.w_q, problem.query_dim, problem.q_width(), &converted.w_q, &converted.s_q);
  store(problem.w_k, problem.key_dim, problem.k_width(), &converted.w_k, &converted.s_k);
  store(problem.w_v, problem.value_dim, problem.v_width(), &converted.w_v, &converted.s_v);
  store(problem.w_o, problem.merged_width(), problem.output_dim, &converted.w_o, &converted.s_o);
  return converted;
}

// Which biases a layer has.
inline constexpr uint32_t kBiasQ = 1, kBiasK = 2, kBiasV = 4, kBiasO = 8, kNoBiases = 0, kAllBiases = 15;

// Weights and inputs such that q, k, v and y are about as large as the inputs.
inline void FillNormal(Random *random, uint32_t biases, bool has_w_o, LayerProblem *problem) {
  const auto weights = [&](int64_t in, int64_t out) { return random->Normals(in * out, 1 / std::sqrt(static_cast<float>(in))); };
  problem->w_q = weights(problem->query_dim, problem->q_width());
  problem->w_k = weights(problem->key_dim, problem->k_width());
  problem->w_v = weights(problem->value_dim, problem->v_width());
  if (biases & kBiasQ) problem->b_q = random->Normals(problem->q_width());
  if (biases & kBiasK) problem->b_k = random->Normals(problem->k_width());
  if (biases & kBiasV) problem->b_v = random->Normals(problem->v_width());
  if (has_w_o) problem->w_o = weights(problem->merged_width(), problem->output_dim);
  if (has_w_o && (biases & kBiasO)) problem->b_o = random->Normals(problem->output_dim);
  problem->query = random->Normals(problem->batch * problem->n_q * problem->query_dim);
  if (problem->has_key) problem->key = random->Normals(problem->batch * problem->n_kv * problem->key_dim);
  if (problem->has_value) problem->value = random->Normals(problem->batch * problem->n_kv * problem->value_dim);
}

// Sequence b's query rows first .. first + n_q with its first n_kv key and value rows, as inputs of their own.
inline LayerProblem Slice(const LayerProblem &problem, int64_t b, int64_t first, int64_t n_q, int64_t n_kv) {
  LayerProblem slice = problem;
  slice.batch = 1;
  slice.n_q = n_q;
  slice.n_kv = n_kv;
  slice.q_start.clear();
  slice.has_key = true;
  slice.query = SliceRows(problem.query, b, problem.n_q, problem.query_dim, first, n_q);
  slice.key = SliceRows(problem.key_input(), b, problem.n_kv, problem.key_dim, 0, n_kv);
  if (problem.has_value) slice.value = SliceRows(problem.value, b, problem.n_kv, problem.value_dim, 0, n_kv);
  return slice;
}

inline void FillPadding(float value, LayerProblem *problem) {
  FillPadding(*problem, true, problem->query_dim, value, &problem->query);
  if (problem->has_key) FillPadding(*problem, false, problem->key_dim, value, &problem->key);
  if (problem->has_value) FillPadding(*problem, false, problem->value_dim, value, &problem->value);
}

// ---- Making a layer

enum class WeightForm { kThreeMatrices, kFused, kPerHead };

struct LayerForm {
  uint32_t instruction_set = MHA_INSTRUCTION_SET_AUTO;
  WeightForm form = WeightForm::kThreeMatrices;
  uint32_t layout = MHA_LAYOUT_IN_OUT;
  int64_t row_gap = 0;        // between the rows of each matrix
  bool fused_biases = false;  // b_qkv; needs all or none of b_q, b_k, b_v
  bool use_defaults = false;  // leave what has the default value 0
  Stored weight_type = Stored::kF32;
};

inline std::string Describe(const LayerForm &form) {
  std::ostringstream text;
  text << (form.form == WeightForm::kThreeMatrices ? "three matrices"
           : form.form == WeightForm::kFused       ? "fused"
                                                   : "per head")
       << (form.layout == MHA_LAYOUT_IN_OUT ? " in-out" : " out-in") << " gap " << form.row_gap
       << (form.fused_biases ? " fused biases" : "") << (form.use_defaults ? " defaults" : "") << " weight type "
       << static_cast<uint32_t>(form.weight_type);
  return text.str();
}

struct DestroyLayer {
  void operator()(mha_layer *layer) const { mha_layer_destroy(layer); }
};
using Layer = std::unique_ptr<mha_layer, DestroyLayer>;

// Columns first .. first + width of w [rows, columns], as they lie in memory in some form.
inline std::vector<float> StoreMatrix(const LayerForm &form, const std::vector<float> &w, int64_t rows, int64_t columns, int64_t first,
                                      int64_t width) {
  const bool in_out = form.layout == MHA_LAYOUT_IN_OUT;
  const int64_t stride = (in_out ? width : rows) + form.row_gap;
  std::vector<float> stored((in_out ? rows : width) * stride, FromBits(0x7fc0dead));
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t c = 0; c < width; c++) stored[in_out ? r * stride + c : c * stride + r] = w[r * columns + first + c];
  }
  stored.resize(stored.size() - form.row_gap);
  return stored;
}

inline mha_layer_config ConfigOf(const LayerProblem &problem, bool use_defaults) {
  mha_layer_config config = {};
  config.struct_size = sizeof config;
  config.query_dim = problem.query_dim;
  config.num_heads = problem.num_heads;
  config.scale = problem.scale;
  const auto set = [&](int64_t *field, int64_t value, int64_t value_by_default) {
    *field = use_defaults && value == value_by_default ? 0 : value;
  };
  set(&config.key_dim, problem.key_dim, problem.query_dim);
  set(&config.value_dim, problem.value_dim, problem.key_dim);
  if (!problem.w_o.empty()) set(&config.output_dim, problem.output_dim, problem.query_dim);
  set(&config.num_kv_heads, problem.num_kv_heads, problem.num_heads);
  if (!use_defaults) {
    config.head_dim = problem.head_dim;
  } else if (problem.q_width() != problem.query_dim) {
    config.d_out = problem.q_width();
  }
  set(&config.head_dim_v, problem.head_dim_v, problem.head_dim);
  return config;
}

// The arrays are overwritten as soon as the layer is made: it must have its own copy.
inline Layer MakeLayer(const LayerProblem &problem, const LayerForm &form) {
  mha_layer_config config = ConfigOf(problem, form.use_defaults);
  config.weight_type = static_cast<uint32_t>(form.weight_type);
  std::vector<std::vector<float>> stored;
  stored.reserve(3 * problem.num_heads + 8);
  const auto store = [&](std::vector<float> values) {
    stored.push_back(std::move(values));
    return stored.back().data();
  };
  const auto store_bias = [&](const std::vector<float> &bias) -> const float * { return bias.empty() ? nullptr : store(bias); };
  const auto stride_of = [&](int64_t rows, int64_t columns) {
    return form.row_gap == 0 ? 0 : (form.layout == MHA_LAYOUT_IN_OUT ? columns : rows) + form.row_gap;
  };
  std::vector<const float *> w_q_heads, w_k_heads, w_v_heads;

  mha_layer_weights weights = {};
  weights.struct_size = sizeof weights;
  weights.layout = form.layout;
  if (form.form == WeightForm::kThreeMatrices) {
    weights.w_q = store(StoreMatrix(form, problem.w_q, problem.query_dim, problem.q_width(), 0, problem.q_width()));
    weights.w_k = store(StoreMatrix(form, problem.w_k, problem.key_dim, problem.k_width(), 0, problem.k_width()));
    weights.w_v = store(StoreMatrix(form, problem.w_v, problem.value_dim, problem.v_width(), 0, problem.v_width()));
    weights.w_q_stride = stride_of(problem.query_dim, problem.q_width());
    weights.w_k_stride = stride_of(problem.key_dim, problem.k_width());
    weights.w_v_stride = stride_of(problem.value_dim, problem.v_width());
  } else if (form.form == WeightForm::kFused) {
    const int64_t width = problem.q_width() + problem.k_width() + problem.v_width();
    std::vector<float> fused;
    for (int64_t r = 0; r < problem.query_dim; r++) {
      const auto append_row = [&](const std::vector<float> &w, int64_t columns) {
        fused.insert(fused.end(), w.begin() + r * columns, w.begin() + (r + 1) * columns);
      };
      append_row(problem.w_q, problem.q_width());
      append_row(problem.w_k, problem.k_width());
      append_row(problem.w_v, problem.v_width());
    }
    weights.w_qkv = store(StoreMatrix(form, fused, problem.query_dim, width, 0, width));
    weights.w_qkv_stride = stride_of(problem.query_dim, width);
  } else {
    for (int64_t h = 0; h < problem.num_heads; h++) {
      w_q_heads.push_back(
          store(StoreMatrix(form, problem.w_q, problem.query_dim, problem.q_width(), h * problem.head_dim, problem.head_dim)));
    }
    for (int64_t h = 0; h < problem.num_kv_heads; h++) {
      w_k_heads.push_back(
          store(StoreMatrix(form, problem.w_k, problem.key_dim, problem.k_width(), h * problem.head_dim, problem.head_dim)));
      w_v_heads.push_back(
          store(StoreMatrix(form, problem.w_v, problem.value_dim, problem.v_width(), h * problem.head_dim_v, problem.head_dim_v)));
    }
    weights.w_q_heads = w_q_heads.data();
    weights.w_k_heads = w_k_heads.data();
    weights.w_v_heads = w_v_heads.data();
    weights.w_q_stride = stride_of(problem.query_dim, problem.head_dim);
    weights.w_k_stride = stride_of(problem.key_dim, problem.head_dim);
    weights.w_v_stride = stride_of(problem.value_dim, problem.head_dim_v);
  }
  if (form.fused_biases && !problem.b_q.empty()) {
    std::vector<float> fused = problem.b_q;
    fused.insert(fused.end(), problem.b_k.begin(), problem.b_k.end());
    fused.insert(fused.end(), problem.b_v.begin(), problem.b_v.end());
    weights.b_qkv = store(fused);
  } else {
    weights.b_q = store_bias(problem.b_q);
    weights.b_k = store_bias(problem.b_k);
    weights.b_v = store_bias(problem.b_v);
  }
  if (!problem.w_o.empty()) {
    weights.w_o = store(StoreMatrix(form, problem.w_o, problem.merged_width(), problem.output_dim, 0, problem.output_dim));
    weights.w_o_stride = stride_of(problem.merged_width(), problem.output_dim);
    weights.b_o = store_bias(problem.b_o);
  }

  mha_layer_options options = {};
  options.struct_size = sizeof options;
  options.instruction_set = form.instruction_set;
  mha_layer *layer = nullptr;
  mha_error error = {};
  EXPECT_EQ(mha_layer_create(&config, &weights, &options, &layer, &error), MHA_OK) << error.message;
  for (std::vector<float> &values : stored) std::fill(values.begin(), values.end(), Unwritten());
  return Layer(layer);
}

// ---- Running it

// How the library is called; none of it may change a bit of the result.
struct LayerCall {
  Layout query, key, value, output;
  const mha_scheduler *scheduler = nullptr;
  uint32_t asked = kAskAll;
  unsigned char workspace_fill = 0xff;
  size_t workspace_misalignment = 0;
  CacheUse cache;
};

inline Outputs Forward(const mha_layer *layer, const LayerProblem &problem, const LayerCall &call) {
  Outputs outputs;
  if (layer == nullptr) return outputs;  // MakeLayer has reported it
  const float gap = FromBits(0x7fc0dead);
  Strided query(call.query, problem.batch, problem.n_q, 1, problem.query_dim, gap);
  Strided key(call.key, problem.batch, problem.n_kv, 1, problem.key_dim, gap);
  Strided value(call.value, problem.batch, problem.n_kv, 1, problem.value_dim, gap);
  Strided output(call.output, problem.batch, problem.n_q, 1, problem.y_width(), Unwritten());
  query.Set(problem.query);
  if (problem.has_key) key.Set(problem.key);
  if (problem.has_value) value.Set(problem.value);
  ResizeOutputs(problem, call.cache.cache ? call.cache.columns : problem.n_kv, call.asked, &outputs);
  if (call.asked & kAskQ) outputs.q.assign(problem.batch * problem.n_q * problem.q_width(), Unwritten());
  if (call.asked & kAskK) outputs.k.assign(problem.batch * problem.n_kv * problem.k_width(), Unwritten());
  if (call.asked & kAskV) outputs.v.assign(problem.batch * problem.n_kv * problem.v_width(), Unwritten());
  const mha_taps taps = TapsInto(&outputs);

  mha_forward_args args = {};
  args.struct_size = sizeof args;
  args.batch = problem.batch;
  args.n_q = problem.n_q;
  args.query = query.data();
  args.query_batch_stride = query.batch_stride();
  args.query_row_stride = query.row_stride();
  if (problem.has_key || problem.has_value) args.n_kv = problem.n_kv;
  if (problem.has_key) {
    args.key = key.data();
    args.key_batch_stride = key.batch_stride();
    args.key_row_stride = key.row_stride();
  }
  if (problem.has_value) {
    args.value = value.data();
    args.value_batch_stride = value.batch_stride();
    args.value_row_stride = value.row_stride();
  }
  args.output = output.data();
  args.output_batch_stride = output.batch_stride();
  args.output_row_stride = output.row_stride();
  mha_rope rope;
  SetRules(problem, &rope, &args);
  SetCache(call.cache, &args);
  if (!problem.has_key && !problem.has_value) args.kv_lengths = nullptr;  // they are those of query
  args.scheduler = call.scheduler;
  args.attention_weights = PointerOrNull(outputs.attention_weights);
  args.lse = PointerOrNull(outputs.lse);
  args.taps = call.asked & ~(kAskWeights | kAskLse) ? &taps : nullptr;

  mha_error error = {};
  size_t bytes = 0;
  EXPECT_EQ(mha_forward_workspace(layer, &args, &bytes, &error), MHA_OK) << error.message;
  Workspace workspace(bytes, call.workspace_fill, call.workspace_misalignment);
  EXPECT_EQ(mha_forward(layer, &args, workspace.data(), bytes, &error), MHA_OK) << error.message;
  EXPECT_TRUE(output.GapsAreUntouched()) << "the call wrote between the rows of its output";
  outputs.y = output.Get();
  return outputs;
}

inline Outputs Specify(const LayerProblem &problem, const spec::Functions &functions = spec::Fastest()) {
  Outputs outputs;
  ResizeToPadding(problem, &outputs);
  outputs.q.resize(problem.batch * problem.n_q * problem.q_width());
  outputs.k.resize(problem.batch * problem.n_kv * problem.k_width());
  outputs.v.resize(problem.batch * problem.n_kv * problem.v_width());
  outputs.y.resize(problem.batch * problem.n_q * problem.y_width());
  for (int64_t b = 0; b < problem.batch; b++) {
    const ValidRows valid = ValidRowsOf(problem, b);
    const int64_t q_row = b * problem.n_q + valid.q_first, kv_row = b * problem.n_kv + valid.kv_first;
    SequenceOutputs sequence(problem, b);
    WithRotation(problem, b, [&](const Rotation *rotation) {
      LayerShape shape = LayerShapeOf(problem, b);
      shape.attention.rotation = rotation;
      functions.forward(shape, WeightsOf(problem), problem.query.data() + q_row * problem.query_dim,
                        problem.key_input().data() + kv_row * problem.key_dim, problem.value_input().data() + kv_row * problem.value_dim,
                        {outputs.q.data() + q_row * problem.q_width(), outputs.k.data() + kv_row * problem.k_width(),
                         outputs.v.data() + kv_row * problem.v_width(), sequence.Pointers(), outputs.y.data() + q_row * problem.y_width()});
    });
    sequence.CopyTo(&outputs);
  }
  return outputs;
}

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_LAYER_H
