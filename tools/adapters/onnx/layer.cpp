// mha.Layer: a whole layer, its weights packed when the session is made.
#include <algorithm>
#include <initializer_list>
#include <memory>

#include "runtime.h"

namespace mha_onnx {
namespace {

enum Input : size_t {
  kQuery,
  kKey,
  kValue,
  kWq,
  kWk,
  kWv,
  kWo,
  kBq,
  kBk,
  kBv,
  kBo,
  kMask,
  kInputCount
};
constexpr const char *kNames[] = {"query", "key", "value", "w_q", "w_k", "w_v",
                                  "w_o",   "b_q", "b_k",   "b_v", "b_o", "attn_mask"};

class Layer {
 public:
  static constexpr const char *kName = "Layer";
  static constexpr size_t kInputs = kInputCount, kOutputs = 1;
  static ONNXTensorElementDataType type_of(size_t input) {
    return input == kMask ? ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED
                          : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  }
  static bool is_optional(size_t input) { return input != kQuery && input != kWq; }

  explicit Layer(const NodeInfo &node) : scores_(node) {
    Tensor weights[kInputCount];
    for (size_t input = kWq; input <= kBo; input++) {
      weights[input] = node.constant(input, kNames[input]);
      const size_t rank = input < kBq ? 2 : 1;
      if (weights[input] && weights[input].rank != rank) {
        throw Failure{std::string(kNames[input]) + " is " + shape_of(weights[input]) +
                      "; it has to have " + (rank == 2 ? "two dimensions" : "one")};
      }
      if (weights[input] &&
          (weights[input].shape[0] == 0 || (rank == 2 && weights[input].shape[1] == 0))) {
        throw Failure{std::string(kNames[input]) + " is " + shape_of(weights[input]) +
                      ", which is empty"};
      }
    }
    const bool fused = !weights[kWk] && !weights[kWv];
    if (!weights[kWq] || (!fused && (!weights[kWk] || !weights[kWv]))) {
      throw Failure{"w_q, w_k and w_v are needed, or w_q alone with the columns of all three"};
    }
    mha_layer_config config = {};
    config.struct_size = sizeof config;
    config.query_dim = weights[kWq].shape[0];
    config.num_heads = positive(node, "num_heads", 0);
    config.num_kv_heads = positive(node, "kv_num_heads", config.num_heads);
    config.scale = scores_.scale;
    constexpr uint32_t arithmetics[] = {MHA_ARITHMETIC_F32, MHA_ARITHMETIC_INT8,
                                        MHA_ARITHMETIC_INT16, MHA_ARITHMETIC_BF16};
    // In the order of MHA_TYPE_*.
    config.format.type =
        MHA_TYPE_F32 + choice(node, "weight_type", {"f32", "f16", "bf16", "int8", "int4"});
    config.format.arithmetic =
        arithmetics[choice(node, "arithmetic", {"f32", "int8", "int16", "bf16"})];
    if (fused) {
      config.head_dim = width(weights[kWq], config.num_heads + 2 * config.num_kv_heads, "w_q");
      config.head_dim_v = config.head_dim;
    } else {
      config.head_dim = width(weights[kWq], config.num_heads, "w_q");
      config.head_dim_v = width(weights[kWv], config.num_kv_heads, "w_v");
      config.key_dim = weights[kWk].shape[0], config.value_dim = weights[kWv].shape[0];
      expect(weights[kWk], config.key_dim, config.num_kv_heads * config.head_dim, "w_k");
    }
    if (weights[kWo]) {
      config.output_dim = weights[kWo].shape[1];
      expect(weights[kWo], config.num_heads * config.head_dim_v, config.output_dim, "w_o");
    }
    if ((fused && (weights[kBk] || weights[kBv])) || (weights[kBo] && !weights[kWo])) {
      throw Failure{"b_k and b_v go with w_k and w_v, and b_o with w_o"};
    }
    const int64_t columns[] = {config.num_heads * config.head_dim,
                               config.num_kv_heads * config.head_dim,
                               config.num_kv_heads * config.head_dim_v, config.output_dim};
    for (size_t input = kBq; input <= kBo; input++) {
      const int64_t wanted = input == kBq && fused ? weights[kWq].shape[1] : columns[input - kBq];
      if (weights[input] && weights[input].shape[0] != wanted) {
        throw Failure{std::string(kNames[input]) + " is " + shape_of(weights[input]) +
                      "; it has to be [" + std::to_string(wanted) + "]"};
      }
    }

    mha_layer_weights given = {};
    given.struct_size = sizeof given;
    mha_matrix *const matrices[] = {fused ? &given.w_qkv : &given.w_q, &given.w_k, &given.w_v,
                                    &given.w_o};
    for (size_t i = 0; i < 4; i++) {
      matrices[i]->data = weights[kWq + i].data, matrices[i]->bias = weights[kBq + i].floats();
    }
    mha_error error;
    mha_layer *layer;
    check(mha_layer_create(&config, &given, nullptr, &layer, &error), error);
    layer_.reset(layer);
    shape_.struct_size = sizeof shape_;
    check(mha_layer_shape(layer, &shape_, &error), error);
  }

  void compute(Call &call) {
    const Tensor query = call.input(kQuery), key = call.input(kKey), value = call.input(kValue);
    const int64_t widths[] = {shape_.query_dim, shape_.key_dim, shape_.value_dim};
    const Tensor *rows[] = {&query, &key, &value};
    for (size_t i = 0; i < 3; i++) {
      if (*rows[i] && (rows[i]->rank != 3 || rows[i]->shape[2] != widths[i] ||
                       rows[i]->shape[0] != query.shape[0])) {
        throw Failure{std::string(kNames[i]) + " is " + shape_of(*rows[i]) +
                      "; it has to be [batch, rows, " + std::to_string(widths[i]) +
                      "], with the batch of query"};
      }
    }
    const Tensor &kept = key ? key : value ? value : query;
    if (key && value && key.shape[1] != value.shape[1]) {
      throw Failure{"key has " + std::to_string(key.shape[1]) + " rows and value " +
                    std::to_string(value.shape[1]) + "; they have to have as many"};
    }
    if (!key && value && value.shape[1] != query.shape[1]) {
      throw Failure{"value has " + std::to_string(value.shape[1]) +
                    " rows and query, which the keys are made of, " +
                    std::to_string(query.shape[1]) +
                    "; they have to have as many, or key has to be given"};
    }
    mha_forward_args args = {};
    args.struct_size = sizeof args;
    args.call.batch = query.shape[0], args.call.n_q = query.shape[1],
    args.call.n_kv = kept.shape[1];
    args.query.data = query.data, args.key.data = key.data, args.value.data = value.data;
    const int64_t shape[] = {args.call.batch, args.call.n_q, shape_.output_dim};
    args.output.data = call.output(0, shape, 3);
    args.call.flags = scores_.flags();
    args.call.window_left = scores_.window_left < 0 ? 0 : scores_.window_left;
    args.call.window_right = scores_.window_right < 0 ? 0 : scores_.window_right;
    mha_score_options score = {};
    score.struct_size = sizeof score;
    score.softcap = scores_.softcap;
    mha_score_arrays arrays = {};
    arrays.struct_size = sizeof arrays;
    mha_sequences sequences = {};
    sequences.struct_size = sizeof sequences;
    const Tensor mask =
        mask_of(call, call.input(kMask), args.call.batch, args.call.n_kv, scores_.mask_filter);
    int64_t *starts = static_cast<int64_t *>(
        call.memory(2 * static_cast<size_t>(args.call.batch) * sizeof(int64_t)));
    MaskStructure structure = {false, starts, starts + args.call.batch};
    if (args.call.flags == 0 &&
        find_structure(mask, args.call.batch, args.call.n_q, args.call.n_kv, structure)) {
      args.call.flags = structure.is_causal ? MHA_CAUSAL : 0;
      sequences.q_first_positions = structure.is_causal ? starts : nullptr;
      if (std::any_of(structure.lengths, structure.lengths + args.call.batch,
                      [&](int64_t length) { return length < args.call.n_kv; })) {
        sequences.kv_lengths = structure.lengths;
        // In self-attention all queries would need lengths too, although they have a result.
        args.key.data = key ? key.data : query.data;
      }
    } else {
      set_mask(mask, args.call.batch, shape_.num_heads, args.call.n_q, args.call.n_kv,
               args.call.n_kv, arrays);
      // Query i is at position i, as ONNX has it without a past; mha puts the last query at the
      // last key.
      if (args.call.flags && args.call.n_q != args.call.n_kv) {
        std::fill(starts, starts + args.call.batch, 0);
        sequences.q_first_positions = starts;
      }
    }
    args.call.sequences = &sequences;
    args.call.score = score.softcap != 0 ? &score : nullptr;
    args.call.score_arrays = arrays.bias.data || arrays.mask ? &arrays : nullptr;
    args.call.scheduler = call.scheduler(args.call.batch * args.call.n_q);
    args.call.batch = extent_of(args.call.batch), args.call.n_q = extent_of(args.call.n_q),
    args.call.n_kv = extent_of(args.call.n_kv);
    mha_error error;
    size_t bytes;
    check(mha_forward_workspace(layer_.get(), &args, &bytes, &error), error);
    void *workspace = call.memory(bytes);
    check(mha_forward(layer_.get(), &args, workspace, bytes, &error), error);
  }

 private:
  static int64_t positive(const NodeInfo &node, const char *attribute, int64_t otherwise) {
    const int64_t value = node.integer(attribute, otherwise);
    if (value < 1 || value > INT32_MAX) {
      throw Failure{std::string("the attribute ") + attribute + " is " + std::to_string(value) +
                    "; it has to be at least 1"};
    }
    return value;
  }
  static int64_t width(const Tensor &weights, int64_t heads, const char *name) {
    if (weights.shape[1] % heads != 0) {
      throw Failure{std::string(name) + " is " + shape_of(weights) + ", whose columns " +
                    std::to_string(heads) + " heads do not share evenly"};
    }
    return weights.shape[1] / heads;
  }
  static void expect(const Tensor &weights, int64_t rows, int64_t columns, const char *name) {
    if (weights.shape[0] != rows || weights.shape[1] != columns) {
      throw Failure{std::string(name) + " is " + shape_of(weights) + "; it has to be [" +
                    std::to_string(rows) + ", " + std::to_string(columns) + "]"};
    }
  }
  // The number of one of these names; without the attribute 0.
  static uint32_t choice(const NodeInfo &node, const char *attribute,
                         std::initializer_list<const char *> names) {
    const std::string given = node.text(attribute, *names.begin());
    std::string all;
    for (auto name = names.begin(); name != names.end(); ++name) {
      if (given == *name) {
        return static_cast<uint32_t>(name - names.begin());
      }
      all += (name == names.begin()     ? ""
              : name + 1 == names.end() ? " or "
                                        : ", ") +
             std::string(*name);
    }
    throw Failure{std::string("the attribute ") + attribute + " is '" + given + "'; it has to be " +
                  all};
  }

  struct Destroy {
    void operator()(mha_layer *layer) const { mha_layer_destroy(layer); }
  };
  ScoreAttributes scores_;
  std::unique_ptr<mha_layer, Destroy> layer_;
  mha_layer_config shape_ = {};
};

}  // namespace

const OrtCustomOp *layer_operator() { return operator_of<Layer>(); }

}  // namespace mha_onnx
