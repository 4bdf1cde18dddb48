#include "layer.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstring>

#include "config.h"
#include "error.h"
#include "safetensors.h"

namespace command {
namespace {

// How a family names the tensors of a layer: queries, keys and values, or one matrix of all three.
// Biases lie beside the weights.
struct Family {
  const char *q, *k, *v;              // k = NULL: q is of all three
  std::vector<const char *> outputs;  // the first one that is there; "" = no W_O
  bool is_in_out = false;             // how the matrices lie
  bool may_rotate = false;            // some models of these names rotate, others do not
  bool is_alone = false;              // there are no tensors beside those of q and outputs
};
const std::vector<const char *> kLlamasOutputs = {"o_proj.weight", "out_proj.weight",
                                                  "dense.weight"};
const std::vector<Family> kFamilies = {
    {"W_query.weight", "W_key.weight", "W_value.weight", {"out_proj.weight", "out_proj", ""}},
    {"W_query", "W_key", "W_value", {"out_proj.weight", "out_proj", ""}, true},
    // nn.MultiheadAttention
    {"in_proj_weight", nullptr, nullptr, {"out_proj.weight"}},
    // timm's vision transformers: what others have beside these changes the layer
    {"qkv.weight", nullptr, nullptr, {"proj.weight"}, false, true, true},
    // Phi-3
    {"qkv_proj.weight", nullptr, nullptr, {"o_proj.weight"}, false, true},
    // Llama
    {"q_proj.weight", "k_proj.weight", "v_proj.weight", kLlamasOutputs, false, true},
    // BERT
    {"self.query.weight", "self.key.weight", "self.value.weight", {"output.dense.weight"}},
    // GPT-2
    {"c_attn.weight", nullptr, nullptr, {"c_proj.weight"}, true},
};

// Tensors beside a layer that change what it computes, in a way that the command has no word for.
constexpr const char *kAdditions[] = {"q_norm.bias",
                                      "query_layernorm.weight",
                                      "bias_k",
                                      "q_layernorm.weight",
                                      "query_norm.weight",
                                      "q_attn.weight",
                                      "g_proj.weight",
                                      "self.distance_embedding.weight"};

struct FoundLayer {
  std::string prefix;  // "h.0.attn.", or "" for a file of one layer
  const Family *family;
};

FoundLayer choose_layer(const SafetensorsFile &file, const std::optional<std::string> &wanted) {
  std::vector<FoundLayer> found, chosen;
  for (const auto &[name, tensor] : file.tensors()) {
    for (const Family &family : kFamilies) {
      const size_t length = strlen(family.q), at = name.size() - std::min(name.size(), length);
      if (name.compare(at, length, family.q) == 0 && (at == 0 || name[at - 1] == '.'))
        found.push_back({name.substr(0, at), &family});
    }
  }
  for (const FoundLayer &layer : found) {
    if (!wanted || ("." + layer.prefix).find("." + *wanted + ".") != std::string::npos)
      chosen.push_back(layer);
    if (wanted && *wanted + "." == layer.prefix) return layer;
  }
  if (chosen.size() == 1) return chosen[0];
  if (found.empty())
    fail(file.path(), ": has no attention layer with known names; mha run --help lists them");
  std::string names;
  const std::vector<FoundLayer> &shown = chosen.empty() ? found : chosen;
  for (size_t i = 0; i < std::min<size_t>(shown.size(), 4); ++i) {
    names +=
        (i == 0 ? "" : ", ") + in_quotes(shown[i].prefix.substr(0, shown[i].prefix.size() - 1));
  }
  if (chosen.empty())
    fail(file.path(), ": has no layer ", in_quotes(*wanted), "; others are ", names);
  fail(file.path(), ": has ", chosen.size(), " layers; choose one with --layer, such as ", names);
}

// The number in "model.layers.3.self_attn."; -1 = none.
int64_t number_in(const std::string &prefix) {
  for (size_t at = 0; at < prefix.size(); at = prefix.find('.', at) + 1) {
    const std::string word = prefix.substr(at, prefix.find('.', at) - at);
    if (!word.empty() && word.size() < 10 &&
        word.find_first_not_of("0123456789") == std::string::npos)
      return std::stoll(word);
  }
  return -1;
}

// Every option that says what another source says: config.json, or a packed layer, which has its
// weights and its types too.
void refuse_options(const LayerOptions &options, const std::string &source, bool is_packed) {
  const std::pair<const char *, bool> given[] = {
      {"--weights", is_packed && !options.weights.empty()},
      {"--config", is_packed && !options.config.empty()},
      {"--no-config", is_packed && options.without_config},
      {"--layer", is_packed && options.layer.has_value()},
      {"--weight-type", is_packed && !options.weight_type.empty()},
      {"--arithmetic", is_packed && !options.arithmetic.empty()},
      {"--heads", options.num_heads != 0},
      {"--causal", options.is_causal},
      {"--no-causal", options.is_not_causal},
      {"--rope-base", options.rope_base != 0},
      {"--no-rope", options.without_rope},
  };
  for (const auto &[name, is_given] : given) {
    const char *const other =
        is_packed ? "" : ", or give --no-config and set everything with options";
    if (is_given) fail(name, ": ", source, " already sets it; leave the option out", other);
  }
}

// The config.json beside the weights; "" = there is none, or the options exclude it.
std::string beside(const LayerOptions &options) {
  const std::string path =
      options.weights.substr(0, options.weights.rfind('/') + 1) + "config.json";
  if (options.weights.empty() || options.without_config || !is_same_file(path, path)) return "";
  return path;
}

// What the options say in place of a config.json.
Model model_of(const LayerOptions &options, bool may_rotate) {
  const std::string next_to = "there is no config.json next to " + options.weights;
  const std::string why =
      ", because " +
      (options.without_config ? options.weights + " is read without a config.json" : next_to);
  const bool rotates = options.rope_base != 0;
  if (options.num_heads == 0) fail("--heads is needed", why);
  if (options.is_causal == options.is_not_causal) {
    fail("--causal or --no-causal is needed", why,
         ", and the weights do not show whether rows attend to later rows");
  }
  if (may_rotate && !rotates && !options.without_rope) {
    fail("--rope-base or --no-rope is needed", why,
         ", and only some models with its names rotate queries and keys (RoPE)");
  }
  if (rotates && options.without_rope) fail("--no-rope: can't be combined with --rope-base");
  Model model;
  model.num_heads = options.num_heads;
  model.call.is_causal = options.is_causal;
  if (rotates) model.call.rotation.emplace().base = options.rope_base;
  model.call.source = "--rope-base";
  return model;
}

// Reads the tensors of a layer, and finds its shape from theirs.
class Reader {
 public:
  Reader(const SafetensorsFile &file, const FoundLayer &found, const Model &model)
      : file_(file), family_(*found.family), prefix_(found.prefix), model_(model) {}

  mha_layer_config config = {};
  mha_layer_weights weights = {};
  Call call;

  void run() {
    config.struct_size = sizeof config;
    config.num_heads = model_.num_heads;
    config.scale = model_.scale;
    weights.struct_size = sizeof weights;
    weights.layout = family_.is_in_out ? MHA_LAYOUT_IN_OUT : MHA_LAYOUT_OUT_IN;
    const Matrix q = read(family_.q, family_.is_in_out);
    const int64_t heads = config.num_heads;
    config.query_dim = config.key_dim = config.value_dim = q.in;
    if (family_.k == nullptr) {
      config.num_kv_heads = model_.num_kv_heads != 0 ? model_.num_kv_heads : heads;
      config.head_dim = q.out / (heads + 2 * config.num_kv_heads);
      expect(q,
             q.out == config.head_dim * (heads + 2 * config.num_kv_heads) && config.head_dim > 0);
      config.head_dim_v = config.head_dim;
      weights.w_qkv.data = q.data, weights.w_qkv.bias = bias(q);
    } else {
      const Matrix k = read(family_.k, family_.is_in_out), v = read(family_.v, family_.is_in_out);
      config.head_dim = q.out / heads;
      expect(q, q.out == heads * config.head_dim && config.head_dim > 0);
      config.num_kv_heads = k.out / config.head_dim;
      expect(k, k.in == q.in && config.num_kv_heads > 0 &&
                    k.out == config.num_kv_heads * config.head_dim);
      config.head_dim_v = v.out / config.num_kv_heads;
      expect(v, v.in == q.in && v.out == config.num_kv_heads * config.head_dim_v);
      expect(k, model_.num_kv_heads == 0 || config.num_kv_heads == model_.num_kv_heads);
      weights.w_q.data = q.data, weights.w_k.data = k.data, weights.w_v.data = v.data;
      weights.w_q.bias = bias(q), weights.w_k.bias = bias(k), weights.w_v.bias = bias(v);
    }
    expect(q, heads % config.num_kv_heads == 0 &&
                  (model_.head_dim == 0 || config.head_dim == model_.head_dim));
    expect(q, model_.query_dim == 0 || q.in == model_.query_dim);
    read_output();
    read_call();
  }

 private:
  struct Matrix {
    std::string name;
    const float *data;
    int64_t in, out;
  };

  Matrix read(const std::string &name, bool is_in_out) {
    const std::vector<int64_t> &shape = file_.get(prefix_ + name).shape;
    if (shape.size() != 2 || shape[0] == 0 || shape[1] == 0) {
      fail(file_.path(), ": the tensor ", in_quotes(prefix_ + name), " has the shape ",
           shape_text(shape), "; a matrix is expected");
    }
    return {prefix_ + name, file_.values(prefix_ + name, &copies_), shape[is_in_out ? 0 : 1],
            shape[is_in_out ? 1 : 0]};
  }

  void expect(const Matrix &matrix, bool fits) const {
    if (fits) return;
    const std::string kv_heads =
        config.num_kv_heads != 0
            ? text(" and ", count_text(config.num_kv_heads, "key and value head"))
            : "";
    fail(file_.path(), ": the tensor ", in_quotes(matrix.name), " takes rows of ", matrix.in,
         " to rows of ", matrix.out, ", which does not fit ", count_text(config.num_heads, "head"),
         kv_heads, "; check ", model_.name.empty() ? "--heads" : model_.name);
  }

  const float *bias(const Matrix &matrix) {
    const size_t length = strlen("weight"),
                 at = matrix.name.size() - std::min(matrix.name.size(), length);
    const std::string name = matrix.name.substr(0, at) + "bias";
    if (matrix.name.compare(at, length, "weight") != 0 || !file_.has(name)) return nullptr;
    check_row(name, matrix.out);
    return file_.values(name, &copies_);
  }

  void check_row(const std::string &name, int64_t width) const {
    const std::vector<int64_t> &shape = file_.get(name).shape;
    if (shape == std::vector<int64_t>{width}) return;
    fail(file_.path(), ": the tensor ", in_quotes(name), " has the shape ", shape_text(shape), "; ",
         shape_text({width}), " is expected");
  }

  void read_output() {
    const auto is_there = [&](const char *name) {
      return *name == '\0' || file_.has(prefix_ + name);
    };
    const auto found = std::find_if(family_.outputs.begin(), family_.outputs.end(), is_there);
    const std::string name = found != family_.outputs.end()
                                 ? *found
                                 : family_.outputs[0];  // reading it says that it is missing
    if (name.empty()) return;
    // Of layers with W_query, this may be a matrix or an nn.Linear, whatever the others are. The
    // library takes one layout for all.
    const bool is_in_out = name == "out_proj" || (family_.is_in_out && name != "out_proj.weight");
    const Matrix o = read(name, is_in_out);
    expect(o, o.in == config.num_heads * config.head_dim_v);
    config.output_dim = o.out;
    weights.w_o.data = o.data, weights.w_o.bias = bias(o);
    if (is_in_out == family_.is_in_out) return;
    const int64_t rows = is_in_out ? o.in : o.out, columns = is_in_out ? o.out : o.in;
    float *const transposed =
        copies_.emplace_back(new float[static_cast<size_t>(rows * columns)]).get();
    for (int64_t i = 0; i < rows * columns; ++i)
      transposed[i % columns * rows + i / columns] = o.data[i];
    weights.w_o.data = transposed;
  }

  // The weights of norms and the sinks go to the call.
  void read_call() {
    call = model_.call;
    const std::string q_norm = prefix_ + "q_norm.weight", k_norm = prefix_ + "k_norm.weight",
                      sinks = prefix_ + "sinks";
    for (const auto &[name, is_known] : {std::pair{q_norm, model_.has_norm},
                                         {k_norm, model_.has_norm},
                                         {sinks, model_.has_sinks}}) {
      if (is_known || !file_.has(name)) continue;
      const std::string source =
          model_.name.empty() ? "without a config.json" : "for the model_type in " + model_.name;
      fail(file_.path(), ": has the tensor ", in_quotes(name), ", which is not known ", source);
    }
    if (model_.has_sinks) call.sinks = row(sinks, config.num_heads, 0);
    if (!model_.has_norm) return;
    QueryKeyNorm &norm = call.norm.emplace();
    norm.epsilon = model_.norm_epsilon;
    norm.is_of_all_heads =
        config.num_heads > 1 &&
        file_.get(q_norm).shape == std::vector<int64_t>{config.num_heads * config.head_dim};
    const float one = model_.norm_adds_one ? 1.0f : 0.0f;
    norm.q_weight =
        row(q_norm, (norm.is_of_all_heads ? config.num_heads : 1) * config.head_dim, one);
    norm.k_weight =
        row(k_norm, (norm.is_of_all_heads ? config.num_kv_heads : 1) * config.head_dim, one);
  }

  std::vector<float> row(const std::string &name, int64_t width, float added) {
    check_row(name, width);
    const float *values = file_.values(name, &copies_);
    std::vector<float> result(values, values + width);
    for (float &value : result) {
      if (!std::isfinite(value))
        fail(file_.path(), ": the tensor ", in_quotes(name), " holds a number that is not finite");
      value += added;
    }
    return result;
  }

  const SafetensorsFile &file_;
  const Family &family_;
  const std::string prefix_;
  const Model &model_;
  std::vector<std::unique_ptr<float[]>> copies_;
};

}  // namespace

Layer::Layer(const LayerOptions &options)
    : name_(options.packed.empty() ? options.weights : options.packed) {
  if (options.packed.empty()) {
    pack(options);
  } else {
    refuse_options(options, options.packed, true);
    file_ = std::make_unique<const MappedFile>(name_);
    bytes_ = file_->data();
    num_bytes_ = file_->size();
    // The library checks everything else.
    const bool is_packed = num_bytes_ >= 8 && !memcmp(bytes_, "mha pack", 8);
    if (!is_packed) fail(name_, ": is not a packed layer; mha pack writes one");
  }
  storage_.resize(mha_layer_view_size() / sizeof storage_[0] + 1);
  mha_error error;
  check(mha_layer_view(bytes_, num_bytes_, nullptr, storage_.data(),
                       storage_.size() * sizeof storage_[0], &layer_, &error),
        error, name_);
  shape_.struct_size = sizeof shape_;
  check(mha_layer_shape(layer_, &shape_, &error), error, name_);
  if (file_) call_ = read_packed_call(name_, bytes_, num_bytes_, shape_);
  // All that can be wrong with the call is found here, also before it is packed: the size for a row
  // checks it, and reads no row.
  const PreparedCall prepared(call_, shape_, 1);
  mha_forward_args args = {};
  args.struct_size = sizeof args;
  args.batch = args.n_q = 1;
  args.query.data = &args, args.output.data = &args;
  prepared.add_to(&args);
  size_t bytes = 0;
  check(mha_forward_workspace(layer_, &args, &bytes, &error), error, call_.source);
}

void check_output(const std::string &output, const LayerOptions &layer) {
  if (output.empty()) fail("--output is needed");
  const std::pair<const char *, std::string> inputs[] = {{"--weights", layer.weights},
                                                         {"--packed", layer.packed},
                                                         {"--config", layer.config},
                                                         {"config.json", beside(layer)}};
  for (const auto &[name, path] : inputs) {
    if (is_same_file(output, path))
      fail("--output: ", output, " is also the ", name, "; name another file");
  }
  if (layer.weights.empty() || !layer.packed.empty()) return;
  for (const std::string &file : files_of(layer.weights)) {
    if (is_same_file(output, file))
      fail("--output: ", output, " is also a file of the --weights; name another file");
  }
}

void Layer::pack(const LayerOptions &options) {
  const SafetensorsFile file(options.weights);
  const FoundLayer found = choose_layer(file, options.layer);
  for (const auto &[name, tensor] : file.tensors()) {
    if (name.compare(0, found.prefix.size(), found.prefix) != 0) continue;
    const std::string rest = name.substr(found.prefix.size());
    if (std::count(std::begin(kAdditions), std::end(kAdditions), rest) != 0 ||
        (found.family->is_alone && rest.rfind("qkv.", 0) != 0 && rest.rfind("proj.", 0) != 0)) {
      fail(file.path(), ": the tensor ", in_quotes(name),
           " changes the layer in a way that is not supported");
    }
  }
  const std::string config = options.config.empty() ? beside(options) : options.config;
  if (options.without_config && !config.empty())
    fail("--config: can't be combined with --no-config");
  if (!config.empty()) refuse_options(options, config, false);
  const Model model = config.empty() ? model_of(options, found.family->may_rotate)
                                     : read_model(config, number_in(found.prefix));
  Reader reader(file, found, model);
  reader.run();
  reader.config.weight_type = type_of(options.weight_type);
  reader.config.arithmetic = arithmetic_of(options.arithmetic);
  call_ = reader.call;
  mha_error error;
  check(mha_layer_pack_size(&reader.config, &reader.weights, nullptr, &num_bytes_, &error), error,
        name_);
  memory_.resize((num_bytes_ + 64) / sizeof memory_[0] + 1);
  unsigned char *const memory = reinterpret_cast<unsigned char *>(memory_.data());
  unsigned char *const aligned = memory + (64 - reinterpret_cast<uintptr_t>(memory) % 64) % 64;
  check(mha_layer_pack(&reader.config, &reader.weights, nullptr, aligned, num_bytes_, &error),
        error, name_);
  bytes_ = aligned;
}

std::string Layer::text() const {
  const bool is_plain = shape_.num_kv_heads == shape_.num_heads;
  const std::string heads = command::text(
      count_text(shape_.num_heads, is_plain ? "head" : "query head"), " of ", shape_.head_dim);
  return heads + (is_plain ? "" : ", " + count_text(shape_.num_kv_heads, "key head")) + ", " +
         call_.text();
}

uint32_t type_of(const std::string &name) {
  const auto found = std::find(type_names.begin(), type_names.end(), name);
  return name.empty() ? 0 : MHA_TYPE_F32 + static_cast<uint32_t>(found - type_names.begin());
}

uint32_t arithmetic_of(const std::string &name) {
  return name == "int8"    ? MHA_ARITHMETIC_INT8
         : name == "int16" ? MHA_ARITHMETIC_INT16
                           : MHA_ARITHMETIC_F32;
}

}  // namespace command
