#include "support/layer.h"

#include <cmath>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

namespace support {

LayerProblem::LayerProblem() = default;
LayerProblem::LayerProblem(const LayerProblem &) = default;
LayerProblem::LayerProblem(LayerProblem &&) noexcept = default;
LayerProblem &LayerProblem::operator=(const LayerProblem &) = default;
LayerProblem &LayerProblem::operator=(LayerProblem &&) noexcept = default;
LayerProblem::~LayerProblem() = default;

std::string Describe(const LayerProblem &problem) {
  std::ostringstream text;
  text << Describe(static_cast<const AttentionSizes &>(problem)) << " query_dim "
       << problem.query_dim << " key_dim " << problem.key_dim << " value_dim " << problem.value_dim
       << " output_dim " << (problem.w_o.empty() ? 0 : problem.output_dim)
       << (problem.has_key ? " key" : "") << (problem.has_value ? " value" : "") << " biases";
  for (const std::vector<float> *bias :
       {&problem.b_q, &problem.b_k, &problem.b_v, &problem.b_o, &problem.b_g}) {
    text << (bias->empty() ? "-" : "+");
  }
  return text.str();
}

LayerShape LayerShapeOf(const LayerProblem &problem, int64_t b) {
  return {problem.query_dim, problem.key_dim, problem.value_dim, problem.output_dim,
          ShapeOf(problem, b)};
}

LayerWeights WeightsOf(const LayerProblem &problem) {
  const auto pointer = [](const std::vector<float> &x) { return x.empty() ? nullptr : x.data(); };
  return {pointer(problem.w_q), pointer(problem.w_k), pointer(problem.w_v), pointer(problem.w_o),
          pointer(problem.b_q), pointer(problem.b_k), pointer(problem.b_v), pointer(problem.b_o),
          problem.stored,       pointer(problem.s_q), pointer(problem.s_k), pointer(problem.s_v),
          pointer(problem.s_o), pointer(problem.w_g), pointer(problem.b_g), pointer(problem.s_g),
          problem.arithmetic};
}

void FillInputs(Random *random, LayerProblem *problem) {
  problem->query = random->Normals(problem->batch * problem->n_q * problem->query_dim);
  if (problem->has_key)
    problem->key = random->Normals(problem->batch * problem->n_kv * problem->key_dim);
  if (problem->has_value)
    problem->value = random->Normals(problem->batch * problem->n_kv * problem->value_dim);
}

void FillNormal(Random *random, uint32_t biases, bool has_w_o, LayerProblem *problem) {
  const auto weights = [&](int64_t in, int64_t out) {
    return random->Normals(in * out, 1 / std::sqrt(static_cast<float>(in)));
  };
  problem->w_q = weights(problem->query_dim, problem->q_width());
  problem->w_k = weights(problem->key_dim, problem->k_width());
  problem->w_v = weights(problem->value_dim, problem->v_width());
  if (biases & kBiasQ) problem->b_q = random->Normals(problem->q_width());
  if (biases & kBiasK) problem->b_k = random->Normals(problem->k_width());
  if (biases & kBiasV) problem->b_v = random->Normals(problem->v_width());
  if (has_w_o) problem->w_o = weights(problem->merged_width(), problem->output_dim);
  if (has_w_o && (biases & kBiasO)) problem->b_o = random->Normals(problem->output_dim);
  if (problem->gate != GateKind::kNone)
    problem->w_g = weights(problem->query_dim, problem->gate_width());
  if (problem->gate != GateKind::kNone && (biases & kBiasQ))
    problem->b_g = random->Normals(problem->gate_width());
  FillInputs(random, problem);
}

LayerProblem NormalLayer(LayerProblem problem, uint64_t seed, uint32_t biases, bool has_w_o) {
  Random random(seed);
  FillNormal(&random, biases, has_w_o, &problem);
  return problem;
}

LayerProblem Slice(const LayerProblem &problem, int64_t b, int64_t first, int64_t n_q,
                   int64_t n_kv) {
  LayerProblem slice = problem;
  slice.batch = 1;
  slice.n_q = n_q;
  slice.n_kv = n_kv;
  slice.q_start.clear();
  slice.has_key = true;
  slice.query = SliceRows(problem.query, b, problem.n_q, problem.query_dim, first, n_q);
  slice.key = SliceRows(problem.key_input(), b, problem.n_kv, problem.key_dim, 0, n_kv);
  if (problem.has_value)
    slice.value = SliceRows(problem.value, b, problem.n_kv, problem.value_dim, 0, n_kv);
  return slice;
}

void FillPadding(float value, LayerProblem *problem) {
  FillPadding(*problem, true, problem->query_dim, value, &problem->query);
  if (problem->has_key) FillPadding(*problem, false, problem->key_dim, value, &problem->key);
  if (problem->has_value) FillPadding(*problem, false, problem->value_dim, value, &problem->value);
  if (!problem->gate_values.empty())
    FillPadding(*problem, true, problem->gate_width(), value, &problem->gate_values);
}

std::string Describe(const LayerForm &form) {
  std::ostringstream text;
  text << (form.form == WeightForm::kThreeMatrices ? "three matrices" : "fused")
       << (form.layout == MHA_LAYOUT_IN_OUT ? " in-out" : " out-in") << " gap " << form.row_gap
       << (form.fused_biases ? " fused biases" : "") << (form.use_defaults ? " defaults" : "")
       << (form.gate_in_q ? " gate in W_Q" : "") << " weight type "
       << static_cast<uint32_t>(form.weight_type);
  return text.str();
}

std::vector<float> StoreMatrix(const LayerForm &form, const std::vector<float> &w, int64_t rows,
                               int64_t columns, int64_t first, int64_t width) {
  const bool in_out = form.layout == MHA_LAYOUT_IN_OUT;
  const int64_t stride = (in_out ? width : rows) + form.row_gap;
  std::vector<float> stored((in_out ? rows : width) * stride, FromBits(0x7fc0dead));
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t c = 0; c < width; c++)
      stored[in_out ? r * stride + c : c * stride + r] = w[r * columns + first + c];
  }
  stored.resize(stored.size() - form.row_gap);
  return stored;
}

mha_layer_config ConfigOf(const LayerProblem &problem, bool use_defaults) {
  mha_layer_config config = Zeroed<mha_layer_config>();
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
  if (!use_defaults || problem.q_width() != problem.query_dim) config.head_dim = problem.head_dim;
  set(&config.head_dim_v, problem.head_dim_v, problem.head_dim);
  config.gate = static_cast<uint32_t>(problem.gate);
  config.arithmetic = static_cast<uint32_t>(problem.arithmetic);
  if (problem.gate != GateKind::kNone) set(&config.gate_dim, problem.gate_dim, problem.head_dim_v);
  return config;
}

mha_layer_options Options(uint32_t instruction_set, mha_sgemm sgemm,
                          const mha_allocator *allocator) {
  mha_layer_options options = Zeroed<mha_layer_options>();
  options.instruction_set = instruction_set;
  options.sgemm = sgemm;
  options.allocator = allocator;
  return options;
}

std::vector<float> WithGates(const LayerProblem &problem, const std::vector<float> &q,
                             const std::vector<float> &gate, int64_t rows) {
  std::vector<float> both;
  for (int64_t i = 0; i < rows * problem.num_heads; i++) {
    both.insert(both.end(), q.begin() + i * problem.head_dim,
                q.begin() + (i + 1) * problem.head_dim);
    both.insert(both.end(), gate.begin() + i * problem.gate_dim,
                gate.begin() + (i + 1) * problem.gate_dim);
  }
  return both;
}

mha_linear_weights LinearOf(const mha_layer_config &config, const mha_layer_weights &weights) {
  mha_linear_weights linear = Zeroed<mha_linear_weights>();
  linear.input_dim = config.query_dim;
  linear.output_dim = config.output_dim;
  linear.layout = weights.layout;
  linear.type = weights.type;
  linear.w = weights.w_o;
  linear.weight_type = config.weight_type;
  linear.arithmetic = config.arithmetic;
  return linear;
}

Layer Create(const LayerData &data, const mha_layer_options *options) {
  mha_layer *layer = nullptr;
  mha_error error;
  const mha_linear_weights linear = LinearOf(data.config, data.weights);
  Check(data.config.num_heads == 0
            ? mha_linear_create(&linear, options, &layer, &error)
            : mha_layer_create(&data.config, &data.weights, options, &layer, &error),
        error);
  return Layer(layer);
}

Layer Create(const LayerData &data, uint32_t instruction_set) {
  const mha_layer_options options = Options(instruction_set);
  return Create(data, &options);
}

Layer MakeLayer(LayerData data, uint32_t instruction_set) {
  Layer layer = Create(data, instruction_set);
  for (Memory &array : data.arrays) array.Fill(0xff);
  return layer;
}

Layer MakeLayer(const LayerProblem &problem, const LayerForm &form) {
  return MakeLayer(LayerData(problem, Place::kAnywhere, form), form.instruction_set);
}

LayerData::LayerData(const LayerProblem &problem, Place place, const LayerForm &form)
    : config(ConfigOf(problem, form.use_defaults)), weights(Zeroed<mha_layer_weights>()) {
  config.weight_type = static_cast<uint32_t>(form.weight_type);
  const auto keep = [&](const std::vector<float> &values) {
    arrays.push_back(CopyOf(values, place));
    return arrays.back().floats();
  };
  const auto keep_bias = [&](const std::vector<float> &bias) -> const float * {
    return bias.empty() ? nullptr : keep(bias);
  };
  const auto stride_of = [&](int64_t rows, int64_t columns) {
    return form.row_gap == 0 ? 0
                             : (form.layout == MHA_LAYOUT_IN_OUT ? columns : rows) + form.row_gap;
  };
  weights.layout = form.layout;
  const bool has_gate = problem.gate != GateKind::kNone, gate_in_q = has_gate && form.gate_in_q;
  const std::vector<float> w_q =
      gate_in_q ? WithGates(problem, problem.w_q, problem.w_g, problem.query_dim) : problem.w_q;
  const std::vector<float> b_q = gate_in_q && !problem.b_q.empty()
                                     ? WithGates(problem, problem.b_q, problem.b_g, 1)
                                     : problem.b_q;
  const int64_t q_head = problem.head_dim + (gate_in_q ? problem.gate_dim : 0),
                q_width = problem.num_heads * q_head;
  if (has_gate && !gate_in_q) {
    weights.w_g.data = keep(StoreMatrix(form, problem.w_g, problem.query_dim, problem.gate_width(),
                                        0, problem.gate_width()));
    weights.w_g.row_stride = stride_of(problem.query_dim, problem.gate_width());
    weights.w_g.bias = keep_bias(problem.b_g);
  }
  if (form.form == WeightForm::kThreeMatrices) {
    weights.w_q.data = keep(StoreMatrix(form, w_q, problem.query_dim, q_width, 0, q_width));
    weights.w_k.data = keep(
        StoreMatrix(form, problem.w_k, problem.key_dim, problem.k_width(), 0, problem.k_width()));
    weights.w_v.data = keep(
        StoreMatrix(form, problem.w_v, problem.value_dim, problem.v_width(), 0, problem.v_width()));
    weights.w_q.row_stride = stride_of(problem.query_dim, q_width);
    weights.w_k.row_stride = stride_of(problem.key_dim, problem.k_width());
    weights.w_v.row_stride = stride_of(problem.value_dim, problem.v_width());
  } else {
    const int64_t width = q_width + problem.k_width() + problem.v_width();
    std::vector<float> fused;
    for (int64_t r = 0; r < problem.query_dim; r++) {
      const auto append_row = [&](const std::vector<float> &w, int64_t columns) {
        fused.insert(fused.end(), w.begin() + r * columns, w.begin() + (r + 1) * columns);
      };
      append_row(w_q, q_width);
      append_row(problem.w_k, problem.k_width());
      append_row(problem.w_v, problem.v_width());
    }
    weights.w_qkv.data = keep(StoreMatrix(form, fused, problem.query_dim, width, 0, width));
    weights.w_qkv.row_stride = stride_of(problem.query_dim, width);
  }
  if (form.fused_biases && !problem.b_q.empty()) {
    std::vector<float> fused = b_q;
    fused.insert(fused.end(), problem.b_k.begin(), problem.b_k.end());
    fused.insert(fused.end(), problem.b_v.begin(), problem.b_v.end());
    weights.w_qkv.bias = keep(fused);
  } else {
    weights.w_q.bias = keep_bias(b_q);
    weights.w_k.bias = keep_bias(problem.b_k);
    weights.w_v.bias = keep_bias(problem.b_v);
  }
  if (!problem.w_o.empty()) {
    weights.w_o.data = keep(StoreMatrix(form, problem.w_o, problem.merged_width(),
                                        problem.output_dim, 0, problem.output_dim));
    weights.w_o.row_stride = stride_of(problem.merged_width(), problem.output_dim);
    weights.w_o.bias = keep_bias(problem.b_o);
  }
}

LayerData::LayerData(LayerData &&) noexcept = default;
LayerData &LayerData::operator=(LayerData &&) noexcept = default;
LayerData::~LayerData() = default;

size_t LayerData::PackSize(const mha_layer_options *options) const {
  size_t bytes = 0;
  mha_error error;
  const mha_linear_weights linear = LinearOf(config, weights);
  Check(config.num_heads == 0 ? mha_linear_pack_size(&linear, options, &bytes, &error)
                              : mha_layer_pack_size(&config, &weights, options, &bytes, &error),
        error);
  return bytes;
}

Memory LayerData::Pack(const mha_layer_options *options, int fill, Place place) const {
  Memory buffer(PackSize(options), place, 64);
  buffer.Fill(fill);
  mha_error error;
  const mha_linear_weights linear = LinearOf(config, weights);
  Check(config.num_heads == 0
            ? mha_linear_pack(&linear, options, buffer.data(), buffer.size(), &error)
            : mha_layer_pack(&config, &weights, options, buffer.data(), buffer.size(), &error),
        error);
  return buffer;
}

void LayerData::Freeze() {
  for (Memory &array : arrays) array.Freeze();
}

}  // namespace support
