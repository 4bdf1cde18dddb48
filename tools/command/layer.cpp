#include "layer.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>

#include "error.h"
#include "npy.h"
#ifdef MHA_WITH_OPENBLAS
#include "mha_openblas.h"
#endif

namespace command {
namespace {

// A weight matrix as x W needs it, whatever its layout: in values give out values.
struct Projection {
  const ProjectionNames *names = nullptr;
  const float *weight = nullptr;  // NULL = there is none
  const float *bias = nullptr;
  int64_t in = 0;
  int64_t out = 0;
};

// Reads the tensors of a layer, and finds its shape from theirs.
class ShapeFinder {
 public:
  ShapeFinder(const LayerOptions &options, LayerWeights *layer) : options_(options), layer_(*layer), file_(*layer->file) {}

  // has_unit_scale: scores of the family are not scaled.
  void run(bool has_unit_scale) {
    mha_layer_config &config = layer_.config;
    config = {};
    config.struct_size = sizeof config;
    config.num_heads = options_.num_heads;
    config.scale = options_.scale != 0 || !has_unit_scale ? options_.scale : 1;
    config.weight_type = type_of(options_.weight_type);
    config.arithmetic = options_.arithmetic == "int8"    ? MHA_ARITHMETIC_INT8
                        : options_.arithmetic == "int16" ? MHA_ARITHMETIC_INT16
                                                         : MHA_ARITHMETIC_F32;

    const LayerNames &names = layer_.names;
    const bool is_fused = !names.qkv.weight.empty();
    if (is_fused) {
      const Projection qkv = read(names.qkv);
      find_fused_heads(qkv);
      check_bias(names.qkv, qkv_width());
      layer_.weights.w_qkv = qkv.weight;
      layer_.weights.b_qkv = qkv.bias;
    } else {
      const Projection q = read(names.q);
      const Projection k = read(names.k);
      const Projection v = read(names.v);
      find_heads(q, k, v);
      check_bias(names.q, q.out);
      check_bias(names.k, k.out);
      check_bias(names.v, v.out);
      check_bias(names.qkv, qkv_width());
      layer_.weights.w_q = q.weight;
      layer_.weights.w_k = k.weight;
      layer_.weights.w_v = v.weight;
      layer_.weights.b_q = q.bias;
      layer_.weights.b_k = k.bias;
      layer_.weights.b_v = v.bias;
      layer_.weights.b_qkv = bias_of(names.qkv);
    }
    layer_.weights.struct_size = sizeof layer_.weights;
    layer_.weights.layout = is_fused ? names.qkv.layout : names.q.layout;
    if (!options_.gate.empty()) find_gate(names.g);
    if (!names.o.weight.empty()) find_output(names.o);
  }

  void find_kept_heads() {
    if (options_.kept_heads.empty()) return;
    const Array kept = read_npy(options_.kept_heads, Elements::kBooleans);
    if (kept.shape != std::vector<int64_t>{layer_.config.num_heads}) {
      fail(kept.name, ": has the shape ", shape_text(kept.shape), "; ", shape_text({layer_.config.num_heads}),
           " is expected, whether each head stays");
    }
    const uint8_t *const values = static_cast<const uint8_t *>(kept.data);
    layer_.extras.kept_heads.assign(values, values + layer_.config.num_heads);
    layer_.weights.kept_heads = layer_.extras.kept_heads.data();
  }

  // The tensors of a norm and of sinks.
  void find_extras(const FoundLayer &found) {
    const mha_layer_config &config = layer_.config;
    LayerExtras &extras = layer_.extras;
    if (!found.q_norm.empty()) {
      const int64_t all = config.num_heads * config.head_dim;
      extras.is_norm_of_all_heads = config.num_heads > 1 && file_.get(found.q_norm).shape == std::vector<int64_t>{all};
      // Of models whose q_proj holds a gate too, Qwen3-Next and those after it, weights stand for 1 + w.
      extras.norm_adds_one = found.norm_adds_one || is_gate_in_q();
      extras.has_norm_of_values = found.has_norm_of_values;
      extras.q_norm = row_of(found.q_norm, config.num_heads);
      extras.k_norm = row_of(found.k_norm, config.num_kv_heads);
      if (extras.is_norm_of_all_heads && !extras.kept_heads.empty()) {
        fail("--kept-heads: the norm ", in_quotes(found.q_norm), " goes over the columns of all heads, of which none can be left out");
      }
    }
    if (!found.sinks.empty()) {
      check_row(found.sinks, {config.num_heads}, "a sink for each head");
      extras.sinks = extras.of_kept_heads(copy_of(found.sinks));
    }
  }

 private:
  std::string subject(const ProjectionNames &names) const { return file_.path() + ": the tensor " + in_quotes(names.weight); }

  const char *layout_name(uint32_t layout) const { return layout == MHA_LAYOUT_IN_OUT ? "(in, out)" : "(out, in)"; }

  void check_row(const std::string &name, const std::vector<int64_t> &expected, const std::string &what) const {
    const std::vector<int64_t> &shape = file_.get(name).shape;
    if (shape != expected) {
      fail(file_.path(), ": the tensor ", in_quotes(name), " has the shape ", shape_text(shape), "; ", shape_text(expected),
           " is expected, ", what);
    }
  }

  std::vector<float> copy_of(const std::string &name) {
    const float *values = file_.values(name, &layer_.copies);
    return std::vector<float>(values, values + file_.get(name).shape[0]);
  }

  // The weights of a norm: of one head, or of all where those of the queries are.
  std::vector<float> row_of(const std::string &name, int64_t heads) {
    const bool is_of_all = layer_.extras.is_norm_of_all_heads;
    check_row(name, {(is_of_all ? heads : 1) * layer_.config.head_dim}, is_of_all ? "the columns of all heads" : "the width of a head");
    return copy_of(name);
  }

  Projection read(const ProjectionNames &names) {
    const Tensor &tensor = file_.get(names.weight);
    if (tensor.shape.size() != 2 || tensor.shape[0] == 0 || tensor.shape[1] == 0) {
      fail(subject(names), " has the shape ", shape_text(tensor.shape), "; a matrix ", layout_name(names.layout), " is expected");
    }
    Projection result;
    result.names = &names;
    result.weight = file_.values(names.weight, &layer_.copies);
    result.in = tensor.shape[names.layout == MHA_LAYOUT_IN_OUT ? 0 : 1];
    result.out = tensor.shape[names.layout == MHA_LAYOUT_IN_OUT ? 1 : 0];
    result.bias = bias_of(names);
    return result;
  }

  const float *bias_of(const ProjectionNames &names) { return names.bias.empty() ? nullptr : file_.values(names.bias, &layer_.copies); }

  // Throws an InputError made of parts; or the doubt about the layout, which then explains why something does not fit.
  template <typename... Parts>
  [[noreturn]] void refuse(const Parts &...parts) const {
    if (!layer_.layout_doubt.empty()) fail(layer_.layout_doubt);
    fail(parts...);
  }

  void check_bias(const ProjectionNames &names, int64_t width) const {
    if (names.bias.empty()) return;
    const Tensor &bias = file_.get(names.bias);
    if (bias.shape != std::vector<int64_t>{width}) {
      refuse(file_.path(), ": the tensor ", in_quotes(names.bias), " has the shape ", shape_text(bias.shape), "; ", shape_text({width}),
             " is expected");
    }
  }

  bool is_gate_in_q() const { return !options_.gate.empty() && layer_.names.g.weight.empty(); }

  // The gate's own matrix or, without one, its columns in that of the queries, behind those of each head.
  void find_gate(const ProjectionNames &names) {
    mha_layer_config &config = layer_.config;
    config.gate = options_.gate == "sigmoid" ? MHA_GATE_SIGMOID : MHA_GATE_SOFTPLUS;
    if (!is_gate_in_q()) {
      const Projection g = read(names);
      if (g.in != config.query_dim) {
        fail(subject(names), " takes rows of ", g.in, ", but the queries are made of rows of ", config.query_dim);
      }
      config.gate_dim = divide(g, config.num_heads, count_text(config.num_heads, "head"));
      check_bias(names, g.out);
      layer_.weights.w_g = g.weight;
      layer_.weights.b_g = g.bias;
    }
    if (config.gate_dim != 1 && config.gate_dim != config.head_dim_v) {
      fail(subject(is_gate_in_q() ? layer_.names.q : names), " gives each head ", count_text(config.gate_dim, "number"),
           " for a gate; 1 or ", config.head_dim_v, " are expected, one for all values of a head or one for each");
    }
  }

  int64_t qkv_width() const {
    const mha_layer_config &config = layer_.config;
    return config.num_heads * config.head_dim + config.num_kv_heads * (config.head_dim + config.head_dim_v);
  }

  // What each width is divided by. All of it is checked here, so that the sentence can name the tensor.
  int64_t divide(const Projection &projection, int64_t parts, const std::string &what) const {
    if (parts <= 0 || projection.out % parts != 0) {
      refuse(subject(*projection.names), " makes ", count_text(projection.out, "column"), ", which can't be divided by ", what);
    }
    return projection.out / parts;
  }

  void find_heads(const Projection &q, const Projection &k, const Projection &v) {
    mha_layer_config &config = layer_.config;
    find_layout_doubt(q, k, v);
    config.query_dim = q.in;
    config.key_dim = k.in;
    config.value_dim = v.in;
    config.head_dim = options_.head_dim;
    if (is_gate_in_q()) {
      const int64_t of_head = divide(q, config.num_heads, count_text(config.num_heads, "head"));
      if (config.head_dim == 0) config.head_dim = of_head / 2;
      config.gate_dim = of_head - config.head_dim;
      if (config.gate_dim <= 0 || (options_.head_dim == 0 && of_head % 2 != 0)) {
        fail(subject(*q.names), " makes ", count_text(of_head, "column"), " for each head; --gate without a tensor of the gate's own ",
             "expects those of a query and of its gate, twice the head dim");
      }
    } else if (config.head_dim == 0) {
      config.head_dim = divide(q, config.num_heads, count_text(config.num_heads, "head"));
    } else if (divide(q, config.head_dim, text("the head dim ", config.head_dim)) != config.num_heads) {
      refuse(subject(*q.names), " makes ", count_text(q.out, "column"), "; ", count_text(config.num_heads, "head"), " of ", config.head_dim,
             " are expected");
    }
    const std::string by_head_dim = text("the head dim ", config.head_dim);
    config.num_kv_heads = divide(k, config.head_dim, by_head_dim);
    if (options_.num_kv_heads != 0 && config.num_kv_heads != options_.num_kv_heads) {
      refuse(subject(*k.names), " makes ", count_text(k.out, "column"), ", that is ", count_text(config.num_kv_heads, "head"), " of ",
             config.head_dim, ", but --kv-heads says ", options_.num_kv_heads);
    }
    check_grouping(k);
    config.head_dim_v = divide(v, config.num_kv_heads, count_text(config.num_kv_heads, "key and value head"));
  }

  // Matrices that take rows of different widths, but would take the same if they lay the other way. Only for cross-attention can that be
  // meant, so it is no error yet.
  void find_layout_doubt(const Projection &q, const Projection &k, const Projection &v) {
    const bool would_agree = q.out == k.out && k.out == v.out;
    const bool agrees = q.in == k.in && k.in == v.in;
    if (options_.layout.empty() || agrees || !would_agree) return;
    const Projection &other = k.in != q.in ? k : v;
    layer_.layout_doubt = text(file_.path(), ": ", in_quotes(other.names->weight), " is ", shape_text(file_.get(other.names->weight).shape),
                               "; read as ", options_.layout, " it takes rows of ", other.in, ", but ", in_quotes(q.names->weight),
                               " takes ", q.in, "; is it --layout ", options_.layout == "in-out" ? "out-in" : "in-out", "?");
  }

  // q, k and v in one matrix: their widths must follow from the numbers of heads.
  void find_fused_heads(const Projection &qkv) {
    mha_layer_config &config = layer_.config;
    if (is_gate_in_q()) {
      fail("--gate: ", in_quotes(qkv.names->weight), " holds queries, keys and values; the gate needs a tensor of its own, ",
           "g=.. in --names");
    }
    if (qkv.in == 3 * qkv.out && options_.num_kv_heads == 0) {
      fail(subject(*qkv.names), " has the shape ", shape_text(file_.get(qkv.names->weight).shape), ", but as ",
           layout_name(qkv.names->layout), " the transpose is expected; --layout ",
           qkv.names->layout == MHA_LAYOUT_IN_OUT ? "out-in" : "in-out", " says that it lies the other way");
    }
    config.query_dim = config.key_dim = config.value_dim = qkv.in;
    config.num_kv_heads = options_.num_kv_heads != 0 ? options_.num_kv_heads : config.num_heads;
    if (config.num_heads > qkv.out || config.num_kv_heads > qkv.out) fail(subject(*qkv.names), " makes fewer columns than there are heads");
    if (options_.num_kv_heads == 0 && options_.head_dim != 0) {
      const int64_t all_heads = divide(qkv, options_.head_dim, text("the head dim ", options_.head_dim));
      config.num_kv_heads = (all_heads - config.num_heads) / 2;
      if (all_heads <= config.num_heads || (all_heads - config.num_heads) % 2 != 0) {
        fail(subject(*qkv.names), " makes ", count_text(all_heads, "head"), " of ", options_.head_dim, ", which are not ", config.num_heads,
             " of queries and as many of keys as of values");
      }
    }
    check_grouping(qkv);
    const int64_t all_heads = config.num_heads + 2 * config.num_kv_heads;
    config.head_dim = divide(qkv, all_heads, text(config.num_heads, " + ", config.num_kv_heads, " + ", config.num_kv_heads, " heads"));
    config.head_dim_v = config.head_dim;
    if (options_.head_dim != 0 && config.head_dim != options_.head_dim) {
      fail(subject(*qkv.names), " makes heads of ", config.head_dim, ", but --head-dim says ", options_.head_dim);
    }
  }

  void check_grouping(const Projection &k) const {
    const mha_layer_config &config = layer_.config;
    if (config.num_heads % config.num_kv_heads != 0) {
      refuse(subject(*k.names), " gives ", count_text(config.num_kv_heads, "key and value head"), ", which do not divide the ",
             count_text(config.num_heads, "query head"));
    }
  }

  // What the width of a head follows from, and with it that of the merged heads: a wrong number of heads may be noticed only there.
  std::string heads_given() const {
    const std::string heads = text("--heads ", options_.num_heads);
    const std::string width = text(layer_.config.head_dim);
    if (options_.num_kv_heads == 0) return heads + " makes heads of " + width + ", check it";
    return heads + text(" --kv-heads ", options_.num_kv_heads) + " make heads of " + width + ", check them";
  }

  void find_output(const ProjectionNames &names) {
    mha_layer_config &config = layer_.config;
    const Projection o = read(names);
    const int64_t merged = config.num_heads * config.head_dim_v;
    if (o.in != merged) {
      refuse(subject(names), " takes ", count_text(o.in, "column"), ", but the merged heads have ", config.num_heads, " x ",
             config.head_dim_v, " = ", merged, "; ",
             is_gate_in_q() ? "half of the columns of " + in_quotes(layer_.names.q.weight) + " are taken for the gate" : heads_given());
    }
    check_bias(names, o.out);
    config.output_dim = o.out;
    layer_.weights.w_o = o.weight;
    layer_.weights.b_o = o.bias;
    if (names.layout != layer_.weights.layout) {  // the library takes one layout for all
      const int64_t rows = names.layout == MHA_LAYOUT_IN_OUT ? o.in : o.out;
      layer_.weights.w_o = transposed(o.weight, rows, o.in * o.out / rows);
    }
  }

  const float *transposed(const float *matrix, int64_t rows, int64_t columns) {
    layer_.copies.emplace_back(new float[static_cast<size_t>(rows * columns)]);
    float *out = layer_.copies.back().get();
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < columns; ++column) out[column * rows + row] = matrix[row * columns + column];
    }
    return out;
  }

  const LayerOptions &options_;
  LayerWeights &layer_;
  const SafetensorsFile &file_;
};

std::optional<uint32_t> layout_of(const std::string &name) {
  if (name.empty()) return std::nullopt;
  return name == "in-out" ? MHA_LAYOUT_IN_OUT : MHA_LAYOUT_OUT_IN;
}

uint32_t instruction_set_of(const std::string &name) {
  if (name.empty()) return MHA_INSTRUCTION_SET_AUTO;
  for (uint32_t set = MHA_INSTRUCTION_SET_AUTO; std::string(mha_instruction_set_name(set)) != "unknown"; ++set) {
    if (name != mha_instruction_set_name(set)) continue;
    if (set == MHA_INSTRUCTION_SET_AUTO || (mha_instruction_sets() & 1u << set) != 0) return set;
    fail("--isa: this machine or this build has no ", name, "; mha info lists what there is");
  }
  fail("--isa: there is no instruction set ", in_quotes(name), "; mha info lists those of this machine");
}

// Options that tell a packed layer of the other back end. They are for asking, not for running.
mha_layer_options for_other_back_end(mha_layer_options options) {
  const mha_sgemm never_called = [](int, int, int, int, int, int, float, const float *, int, const float *, int, float, float *, int) {};
  options.sgemm = options.sgemm != nullptr ? nullptr : never_called;
  return options;
}

// What is rotated by default must be beyond doubt, and what the sub-command can't run must be plain.
void check_found(const std::string &name, const FoundLayer &layer, const LayerOptions &options) {
  if (!options.can_run && !(layer.q_norm + layer.sinks).empty()) {
    fail(name, ": the layer ", in_quotes(layer.prefix), " has the tensor ", in_quotes(layer.q_norm.empty() ? layer.sinks : layer.q_norm),
         ", for which a packed layer has no place; run it by --weights");
  }
  if (!layer.names.g.weight.empty() && options.gate.empty()) {
    fail(name, ": the layer ", in_quotes(layer.prefix), " has the tensor ", in_quotes(layer.names.g.weight),
         ", a gate of its context; say of which kind by --gate sigmoid (Step) or --gate softplus (Laguna)");
  }
  if (layer.rotates == Rotates::kNever || options.without_rope || wants_rope(options)) return;
  const std::string start =
      text(name, ": the layer ", in_quotes(layer.prefix), " has the names of Llama and kin (", in_quotes(layer.names.q.weight), "), ");
  if (!options.can_run) {
    fail(start, "which rotate queries and keys (RoPE), and this command doesn't; --no-rope takes the weights as they are");
  }
  if (layer.rotates == Rotates::kSome) {
    fail(start, "some of which rotate queries and keys (RoPE); say how by --rope-base, --rope-style and --rope-dims, or --no-rope");
  }
}

// A packed layer has its shape and its weights in it.
void refuse_weight_options(const LayerOptions &options) {
  const std::pair<const char *, bool> given[] = {
      {"--weights", !options.weights.empty()}, {"--heads", options.num_heads != 0},    {"--kv-heads", options.num_kv_heads != 0},
      {"--head-dim", options.head_dim != 0},   {"--layer", options.layer.has_value()}, {"--names", !options.names.empty()},
      {"--layout", !options.layout.empty()},   {"--no-rope", options.without_rope},    {"--scale", options.scale != 0},
      {"--gate", !options.gate.empty()},       {"--kept-heads", !options.kept_heads.empty()},
  };
  for (const auto &[name, is_given] : given) {
    if (is_given) fail("--packed: can't be combined with ", name, ", for the packed layer says it all");
  }
}

}  // namespace

std::vector<float> LayerExtras::of_kept_heads(const std::vector<float> &of_heads) const {
  std::vector<float> result;
  for (size_t head = 0; head < of_heads.size(); ++head) {
    if (kept_heads.empty() || kept_heads[head] != 0) result.push_back(of_heads[head]);
  }
  return result;
}

LayerWeights read_layer_weights(const LayerOptions &options) {
  const std::optional<uint32_t> layout = layout_of(options.layout);
  if (!options.names.empty() && !layout) fail("--layout: is needed with --names, since the names do not tell how the matrices lie");

  if (options.without_rope && wants_rope(options)) fail("--no-rope: can't be combined with --rope-base and the other --rope options");

  LayerWeights layer = {};
  layer.name = options.weights;
  layer.file = std::make_unique<const SafetensorsFile>(options.weights);
  FoundLayer found;
  if (options.names.empty()) {
    found = choose_layer(*layer.file, options.layer);
    check_found(layer.name, found, options);
    layer.names = found.names;
    layer.rotates = found.rotates == Rotates::kAll && !options.without_rope;
  } else {
    layer.names = parse_names(*layer.file, options.names, options.layer, *layout);
  }
  layer.rotates |= wants_rope(options);
  if (layout) {
    for (ProjectionNames *names : {&layer.names.q, &layer.names.k, &layer.names.v, &layer.names.qkv, &layer.names.o, &layer.names.g}) {
      names->layout = *layout;
    }
  }
  ShapeFinder finder(options, &layer);
  finder.run(found.has_norm_of_values);  // as Gemma 4
  finder.find_kept_heads();
  finder.find_extras(found);
  return layer;
}

mha_layer_options computation_options(const LayerOptions &options) {
  mha_layer_options result = {};
  result.struct_size = sizeof result;
  result.instruction_set = instruction_set_of(options.instruction_set);
  if (options.back_end == "openblas") {
#ifdef MHA_WITH_OPENBLAS
    result.sgemm = mha_openblas_sgemm;
#else
    fail("--back-end: this build of mha has no OpenBLAS");
#endif
  }
  return result;
}

LoadedLayer::LoadedLayer(const LayerWeights &weights, const LayerOptions &options)
    : name_(weights.name), layout_doubt_(weights.layout_doubt), rotates_(weights.rotates), extras_(weights.extras) {
  const mha_layer_options computation = computation_options(options);
  mha_error error;
  check(mha_layer_create(&weights.config, &weights.weights, &computation, &own_, &error), error, name_);
  layer_ = own_;
  shape_.struct_size = sizeof shape_;
  check(mha_layer_shape(layer_, &shape_, &error), error, name_);
}

LoadedLayer::LoadedLayer(const std::string &packed_file, const LayerOptions &options) : name_(packed_file), rotates_(wants_rope(options)) {
  refuse_weight_options(options);
  const mha_layer_options computation = computation_options(options);
  packed_ = std::make_unique<const MappedFile>(packed_file);
  check_is_packed(*packed_);
  storage_.resize(mha_layer_view_size() / sizeof(std::max_align_t) + 1);
  const auto view = [&](const mha_layer_options &chosen, mha_error *error) {
    return mha_layer_view(packed_->data(), packed_->size(), &chosen, storage_.data(), storage_.size() * sizeof storage_[0], &layer_, error);
  };
  mha_error error;
  const mha_status status = view(computation, &error);
  if (status != MHA_OK && view(for_other_back_end(computation), nullptr) == MHA_OK) {
    fail(name_, ": was packed for the other back end; --back-end ", computation.sgemm != nullptr ? "native" : "openblas", " runs it");
  }
  check(status, error, name_);
  shape_.struct_size = sizeof shape_;
  check(mha_layer_shape(layer_, &shape_, &error), error, name_);
}

LoadedLayer::~LoadedLayer() { mha_layer_destroy(own_); }

PackedLayer pack_layer(const LayerWeights &weights, const LayerOptions &options) {
  const mha_layer_options computation = computation_options(options);
  const std::string &name = weights.name;
  PackedLayer packed;
  mha_error error;
  check(mha_layer_pack_size(&weights.config, &weights.weights, &computation, &packed.bytes, &error), error, name);
  const size_t alignment = 64;
  packed.memory.resize(packed.bytes + alignment);
  const size_t offset = reinterpret_cast<uintptr_t>(packed.memory.data()) % alignment;
  packed.data = packed.memory.data() + (offset == 0 ? 0 : alignment - offset);
  check(mha_layer_pack(&weights.config, &weights.weights, &computation, packed.data, packed.bytes, &error), error, name);
  return packed;
}

void check_is_packed(const MappedFile &file) {
  const std::string_view magic = "mha pack";  // what every packed layer begins with; all else is the library's to check
  const size_t present = std::min(file.size(), magic.size());
  if (present == 0 || std::memcmp(file.data(), magic.data(), present) != 0) fail(file.path(), ": is no packed layer; mha pack writes one");
}

std::string heads_text(const mha_layer_config &shape) {
  const bool is_plain = shape.num_kv_heads == shape.num_heads;
  std::string out = text(count_text(shape.num_heads, is_plain ? "head" : "query head"), " of ", shape.head_dim);
  if (!is_plain) out += text(", ", count_text(shape.num_kv_heads, "key head"));
  if (shape.gate == MHA_GATE_NONE) return out;
  const bool is_of_head = shape.gate_dim == 1 && shape.head_dim_v != 1;
  return out + text(", gated (", shape.gate == MHA_GATE_SIGMOID ? "sigmoid" : "softplus", is_of_head ? " of each head)" : ")");
}

std::string describe(const mha_layer_config &shape) {
  std::string out = text("query_dim ", shape.query_dim, ", ", heads_text(shape));
  if (shape.key_dim != shape.query_dim) out += text(", key_dim ", shape.key_dim);
  if (shape.value_dim != shape.key_dim) out += text(", value_dim ", shape.value_dim);
  if (shape.head_dim_v != shape.head_dim) out += text(", value heads of ", shape.head_dim_v);
  return out + text(", output_dim ", shape.output_dim);
}

}  // namespace command
