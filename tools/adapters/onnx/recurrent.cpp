// mha.LinearAttention and mha.CausalConvWithState: those of ONNX (opset 27) and com.microsoft.
#include <algorithm>
#include <cstring>
#include <initializer_list>

#include "runtime.h"

namespace mha_onnx {
namespace {

// Throws if a tensor has another shape. An extent of -1 may be anything.
void expect(const Tensor &tensor, const char *name, std::initializer_list<int64_t> shape) {
  bool fits = tensor.rank == shape.size();
  std::string wanted;
  for (size_t i = 0; i < shape.size(); i++) {
    const int64_t extent = shape.begin()[i];
    fits = fits && (extent == -1 || tensor.shape[i] == extent);
    wanted += (i ? ", " : "") + (extent == -1 ? "any" : std::to_string(extent));
  }
  if (!fits) {
    throw Failure{std::string(name) + " is " + shape_of(tensor) + "; it has to be [" + wanted +
                  "]"};
  }
}

int64_t share(const Tensor &tensor, const char *name, int64_t heads) {
  if (heads < 1 || tensor.shape[2] % heads != 0 || tensor.shape[2] == 0) {
    throw Failure{std::string(name) + " is " + shape_of(tensor) + ", whose columns " +
                  std::to_string(heads) + " heads do not share evenly"};
  }
  return tensor.shape[2] / heads;
}

class LinearAttention {
 public:
  static constexpr const char *kName = "LinearAttention";
  static constexpr size_t kInputs = 6, kOutputs = 2;
  static ONNXTensorElementDataType type_of(size_t) { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
  static bool is_optional(size_t input) { return input >= 3; }

  explicit LinearAttention(const NodeInfo &node)
      : rule_(node.text("update_rule", "gated_delta")),
        scale_(node.number("scale", 0)),
        q_heads_(node.integer("q_num_heads", 0)),
        heads_(node.integer("kv_num_heads", 0)) {
    has_decay_ = rule_ == "gated" || rule_ == "gated_delta";
    has_beta_ = rule_ == "delta" || rule_ == "gated_delta";
    if (!has_decay_ && !has_beta_ && rule_ != "linear") {
      throw Failure{"the attribute update_rule is '" + rule_ +
                    "'; it has to be linear, gated, delta or gated_delta"};
    }
    if (node.has_input(4) != has_decay_ || node.has_input(5) != has_beta_) {
      throw Failure{"update_rule is " + rule_ + ", which takes " + (has_decay_ ? "" : "no ") +
                    "decay and " + (has_beta_ ? "" : "no ") + "beta"};
    }
  }

  void compute(Call &call) const {
    const Tensor q = call.input(0), k = call.input(1), v = call.input(2), past = call.input(3);
    const Tensor decay = call.input(4), beta = call.input(5);
    expect(q, "query", {-1, -1, -1});
    const int64_t batch = q.shape[0], rows = q.shape[1], width = share(q, "query", q_heads_);
    // com.microsoft's may have fewer heads of keys than of values.
    const int64_t keys = k.rank == 3 && k.shape[2] % width == 0 ? k.shape[2] / width : 0;
    const int64_t k_heads = keys > 0 && heads_ % keys == 0 ? keys : heads_;
    expect(k, "key", {batch, rows, k_heads * width});
    expect(v, "value", {batch, rows, -1});
    const int64_t width_v = share(v, "value", heads_);
    mha_recurrent_args args = {};
    args.struct_size = sizeof args;
    args.num_q_heads = q_heads_, args.num_k_heads = k_heads, args.num_v_heads = heads_;
    args.head_dim = width, args.head_dim_v = width_v, args.scale = scale_;
    args.batch = extent_of(batch), args.rows = extent_of(rows);
    args.q.data = q.data, args.k.data = k.data, args.v.data = v.data;
    if (has_decay_) {
      const bool is_wide = decay.rank == 3 && decay.shape[2] != heads_;
      args.decay_dim = is_wide ? width : 1, args.decay.data = decay.data;
      expect(decay, "decay", {batch, rows, heads_ * args.decay_dim});
    }
    if (has_beta_) {
      const bool is_shared = beta.rank == 3 && beta.shape[2] == 1;
      expect(beta, "beta", {batch, rows, is_shared ? 1 : heads_});
      args.beta.data = beta.data;
      if (is_shared && heads_ > 1)
        args.beta.strides = {std::max<int64_t>(rows, 1), 1, MHA_BROADCAST};
    }
    if (past) expect(past, "past_state", {batch, heads_, width, width_v});
    const int64_t shape[] = {batch, rows, std::max(q_heads_, heads_) * width_v};
    const int64_t of_state[] = {batch, heads_, width, width_v};
    args.output.data = call.output(0, shape, 3);
    args.state = past.floats();
    if (call.outputs() > 1) args.state_out = call.output(1, of_state, 4);
    if (rows == 0 && args.state_out) {  // a call without rows writes nothing
      const size_t bytes = sizeof(float) * static_cast<size_t>(batch * heads_ * width * width_v);
      if (past) {
        memcpy(args.state_out, args.state, bytes);
      } else {
        memset(args.state_out, 0, bytes);
      }
    }
    args.scheduler = call.scheduler(batch * rows);
    mha_error error;
    size_t bytes;
    check(mha_recurrent_attention_workspace(&args, &bytes, &error), error);
    void *workspace = call.memory(bytes);
    check(mha_recurrent_attention(&args, workspace, bytes, &error), error);
  }

 private:
  std::string rule_;
  float scale_;
  int64_t q_heads_, heads_;
  bool has_decay_, has_beta_;
};

class CausalConv {
 public:
  static constexpr const char *kName = "CausalConvWithState";
  static constexpr size_t kInputs = 4, kOutputs = 2;
  static ONNXTensorElementDataType type_of(size_t) { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
  static bool is_optional(size_t input) { return input >= 2; }

  explicit CausalConv(const NodeInfo &node) {
    const std::string name = node.text("activation", "none");
    if (name != "none" && name != "silu" && name != "swish") {
      throw Failure{"the attribute activation is '" + name + "'; it has to be none, silu or swish"};
    }
    activation_ = name == "none" ? MHA_FUNCTION_NONE : MHA_FUNCTION_SILU;
  }

  void compute(Call &call) const {
    const Tensor x = call.input(0), weights = call.input(1), bias = call.input(2),
                 past = call.input(3);
    expect(x, "input", {-1, -1, -1});
    const int64_t batch = x.shape[0], channels = x.shape[1], rows = x.shape[2];
    expect(weights, "weight", {channels, 1, -1});
    const int64_t before = weights.shape[2] - 1;
    if (bias) expect(bias, "bias", {channels});
    if (past) expect(past, "past_state", {batch, channels, before});
    const int64_t shape[] = {batch, channels, rows}, of_state[] = {batch, channels, before};
    float *output = call.output(0, shape, 3);
    float *present = call.outputs() > 1 ? call.output(1, of_state, 3) : nullptr;
    const size_t row_count = static_cast<size_t>(batch * channels * rows);
    const size_t state_count = static_cast<size_t>(batch * channels * std::max<int64_t>(before, 0));
    // ONNX has rows of positions, and mha rows of channels.
    float *turned =
        static_cast<float *>(call.memory((2 * row_count + state_count) * sizeof(float)));
    float *result = turned + row_count, *state = result + row_count;
    mha_causal_conv_args args = {};
    args.struct_size = sizeof args;
    args.channels = channels, args.kernel_size = before + 1, args.activation = activation_;
    args.weights = weights.floats(), args.bias = bias.floats();
    args.batch = extent_of(batch), args.rows = extent_of(rows);
    args.x.data = turned, args.output.data = result, args.state = args.state_out = state;
    turn(x.floats(), batch, channels, rows, turned);
    if (past) {
      turn(past.floats(), batch, channels, before, state);
    } else {
      std::fill_n(state, state_count, 0.f);
    }
    args.scheduler = call.scheduler(batch * rows);
    mha_error error;
    size_t bytes;
    check(mha_causal_conv_workspace(&args, &bytes, &error), error);
    void *workspace = call.memory(bytes);
    check(mha_causal_conv(&args, workspace, bytes, &error), error);
    turn(result, batch, rows, channels, output);
    if (present) turn(state, batch, before, channels, present);
  }

 private:
  // [batch, columns, rows] of [batch, rows, columns]
  static void turn(const float *from, int64_t batch, int64_t rows, int64_t columns, float *to) {
    for (int64_t b = 0; b < batch; b++, from += rows * columns, to += rows * columns) {
      for (int64_t i = 0; i < rows; i++) {
        for (int64_t j = 0; j < columns; j++) to[j * rows + i] = from[i * columns + j];
      }
    }
  }

  uint32_t activation_;
};

}  // namespace

const OrtCustomOp *linear_attention_operator() { return operator_of<LinearAttention>(); }
const OrtCustomOp *causal_conv_operator() { return operator_of<CausalConv>(); }

}  // namespace mha_onnx
