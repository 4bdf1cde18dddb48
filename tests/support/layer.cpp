#include "support/layer.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "support/amx.h"
#include "support/call.h"

namespace support {

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
  return {pointer(problem.w_q), pointer(problem.w_k), pointer(problem.w_v),
          pointer(problem.w_o), pointer(problem.b_q), pointer(problem.b_k),
          pointer(problem.b_v), pointer(problem.b_o), problem.stored,
          pointer(problem.s_q), pointer(problem.s_k), pointer(problem.s_v),
          pointer(problem.s_o), pointer(problem.w_g), pointer(problem.b_g),
          pointer(problem.s_g), problem.arithmetic,   problem.group,
          pointer(problem.o_q), pointer(problem.o_k), pointer(problem.o_v),
          pointer(problem.o_o), pointer(problem.o_g), problem.scale_type == MHA_TYPE_INT8};
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

namespace {

template <typename Number>
std::vector<unsigned char> BytesOf(const std::vector<Number> &numbers) {
  std::vector<unsigned char> bytes(numbers.size() * sizeof(Number));
  if (!bytes.empty()) std::memcpy(bytes.data(), numbers.data(), bytes.size());
  return bytes;
}

// Rows of at(row, i), with `filler` in the gaps between them.
template <typename Number, typename At>
std::vector<unsigned char> RowsInMemory(int64_t rows, int64_t width, int64_t gap, Number filler,
                                        const At &at) {
  std::vector<Number> stored(rows * (width + gap) - gap, filler);
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t i = 0; i < width; i++)
      stored[row * (width + gap) + i] = static_cast<Number>(at(row, i));
  }
  return BytesOf(stored);
}

// Rows of several matrices side by side.
std::vector<float> Beside(int64_t rows, const std::vector<const std::vector<float> *> &parts) {
  std::vector<float> all;
  for (int64_t r = 0; r < rows; r++) {
    for (const std::vector<float> *part : parts) {
      const int64_t columns = static_cast<int64_t>(part->size()) / rows;
      all.insert(all.end(), part->begin() + r * columns, part->begin() + (r + 1) * columns);
    }
  }
  return all;
}

}  // namespace

std::vector<unsigned char> InMemory(Stored stored, const std::vector<float> &w, int64_t in,
                                    int64_t out, uint32_t layout, int64_t gap, bool has_offsets) {
  const bool in_out = layout == MHA_LAYOUT_IN_OUT;
  const int64_t rows = in_out ? in : out, width = in_out ? out : in;
  const auto at = [&](int64_t row, int64_t i) {
    return in_out ? w[row * out + i] : w[i * out + row];
  };
  const auto code = [&](int64_t row, int64_t i) {
    const int added = has_offsets ? 0 : 8;
    return i < width ? static_cast<unsigned>(static_cast<int>(at(row, i)) + added) : 15u;
  };
  switch (stored) {
    case Stored::kF32:
      return RowsInMemory(rows, width, gap, FromBits(0x7fc0dead), at);
    case Stored::kInt8:
    case Stored::kInt5:
    case Stored::kInt6:
      return RowsInMemory(rows, width, gap, int8_t{99}, at);
    case Stored::kInt4:
      return RowsInMemory(
          rows, (width + 1) / 2, gap / 2, uint8_t{0xff},
          [&](int64_t row, int64_t i) { return code(row, 2 * i) | code(row, 2 * i + 1) << 4; });
    default:
      return RowsInMemory(rows, width, gap, uint16_t{0x7e01},
                          [&](int64_t row, int64_t i) { return BitsIn16(stored, at(row, i)); });
  }
}

std::vector<unsigned char> ScalesInMemory(const std::vector<float> &scales, int64_t out) {
  const int64_t groups = static_cast<int64_t>(scales.size()) / out;
  return InMemory(Stored::kF32, scales, groups, out, MHA_LAYOUT_OUT_IN, 0);
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
  config.format.arithmetic = static_cast<uint32_t>(problem.arithmetic);
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
  linear.format.type = config.format.type;
  linear.format.group_size = config.format.group_size;
  linear.format.scale_type = config.format.scale_type;
  linear.format.arithmetic = config.format.arithmetic;
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
  const Stored stored = problem.stored;
  const bool is_stored = stored != Stored::kF32, are_fused = form.form == WeightForm::kFused;
  config.format.type = static_cast<uint32_t>(is_stored ? stored : form.weight_type);
  if (HasCodes(is_stored ? stored : form.weight_type))
    config.format.group_size = static_cast<uint32_t>(problem.group);
  config.format.scale_type = problem.scale_type;
  weights.type = is_stored ? static_cast<uint32_t>(std::min(stored, Stored::kInt4)) : 0;
  if (stored > Stored::kInt4) weights.type = MHA_TYPE_INT8;
  weights.layout = form.layout;
  const auto keep = [&](const auto &values) {
    arrays.push_back(CopyOf(values, place));
    return arrays.back().floats();
  };
  const auto give = [&](mha_matrix *matrix, const std::vector<float> &w,
                        const std::vector<float> &scales, const std::vector<float> &offsets,
                        const std::vector<float> &bias, int64_t rows) {
    if (!bias.empty()) matrix->bias = keep(bias);
    if (w.empty()) return;
    const int64_t columns = static_cast<int64_t>(w.size()) / rows,
                  width = form.layout == MHA_LAYOUT_IN_OUT ? columns : rows;
    matrix->data =
        keep(InMemory(stored, w, rows, columns, form.layout, form.row_gap, !offsets.empty()));
    const auto give_scales = [&](const std::vector<float> &all, const float **numbers,
                                 const float **factors) {
      auto end = all.end();
      if (problem.scale_type == MHA_TYPE_INT8) end -= (rows + 255) / 256 * columns;
      if (!all.empty()) *numbers = keep(ScalesInMemory({all.begin(), end}, columns));
      if (end != all.end()) *factors = keep(ScalesInMemory({end, all.end()}, columns));
    };
    if (!scales.empty()) give_scales(scales, &matrix->scales, &matrix->block_scales);
    if (!offsets.empty()) give_scales(offsets, &matrix->offsets, &matrix->block_offsets);
    if (form.row_gap != 0)
      matrix->row_stride = (stored == Stored::kInt4 ? (width + 1) / 2 * 2 : width) + form.row_gap;
  };
  std::vector<float> w_q = problem.w_q, s_q = problem.s_q, o_q = problem.o_q, b_q = problem.b_q,
                     b_k = problem.b_k, b_v = problem.b_v, fused, fused_scales, fused_offsets,
                     fused_bias;
  const int64_t dim = problem.query_dim,
                s_rows = static_cast<int64_t>(s_q.size()) / problem.q_width();
  if (problem.gate != GateKind::kNone && form.gate_in_q) {
    weights.gate_place = MHA_GATE_IN_W_Q;
    w_q = WithGates(problem, w_q, problem.w_g, dim);
    s_q = WithGates(problem, s_q, problem.s_g, s_rows);
    if (!o_q.empty()) o_q = WithGates(problem, o_q, problem.o_g, s_rows);
    if (!b_q.empty()) b_q = WithGates(problem, b_q, problem.b_g, 1);
  } else if (problem.gate != GateKind::kNone) {
    give(&weights.w_g, problem.w_g, problem.s_g, problem.o_g, problem.b_g, dim);
  }
  if (form.fused_biases && !b_q.empty()) {
    fused_bias = Beside(1, {&b_q, &b_k, &b_v});
    b_q.clear(), b_k.clear(), b_v.clear();
  }
  if (are_fused) {
    fused = Beside(dim, {&w_q, &problem.w_k, &problem.w_v});
    fused_scales = Beside(s_rows, {&s_q, &problem.s_k, &problem.s_v});
    if (!o_q.empty()) fused_offsets = Beside(s_rows, {&o_q, &problem.o_k, &problem.o_v});
  }
  const std::vector<float> none;
  give(&weights.w_qkv, fused, fused_scales, fused_offsets, fused_bias, dim);
  give(&weights.w_q, are_fused ? none : w_q, s_q, o_q, b_q, dim);
  give(&weights.w_k, are_fused ? none : problem.w_k, problem.s_k, problem.o_k, b_k,
       problem.key_dim);
  give(&weights.w_v, are_fused ? none : problem.w_v, problem.s_v, problem.o_v, b_v,
       problem.value_dim);
  if (!problem.w_o.empty())
    give(&weights.w_o, problem.w_o, problem.s_o, problem.o_o, problem.b_o, problem.merged_width());
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
