// Layers: problems that consist of a layer and the inputs of a call, and how the library is given
// the weights.
#ifndef MHA_TESTS_SUPPORT_LAYER_H
#define MHA_TESTS_SUPPORT_LAYER_H

#include <mha.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "support/attention.h"
#include "support/memory.h"
#include "support/random.h"
#include "support/shapes.h"
#include "support/structs.h"

namespace support {

// All dense, matrices [in, out]. Empty: no bias, no output projection.
struct LayerProblem : AttentionSizes {
  int64_t query_dim = 1;
  int64_t key_dim = 1;
  int64_t value_dim = 1;
  int64_t output_dim = 1;  // looked at with w_o only
  bool has_key = false;    // else the query is the key
  bool has_value = false;  // else the key is the value
  std::vector<float> w_q, w_k, w_v, w_o, w_g;
  std::vector<float> b_q, b_k, b_v, b_o, b_g;
  Stored stored = Stored::kF32;  // what the matrices are; the layer keeps them as that
  std::vector<float> s_q, s_k, s_v, s_o, s_g;  // scales, where they are codes
  std::vector<float> o_q, o_k, o_v, o_o, o_g;  // offsets of groups; empty: none
  int64_t group = 0;                           // inputs that share a scale; 0: the default
  uint32_t scale_type = 0;                     // of scales and offsets; INT8: as Format has them
  Arithmetic arithmetic = Arithmetic::kF32;
  std::vector<float> query;  // [batch, n_q, query_dim]
  std::vector<float> key;    // [batch, n_kv, key_dim]
  std::vector<float> value;  // [batch, n_kv, value_dim]

  int64_t q_width() const { return num_heads * head_dim; }
  int64_t k_width() const { return num_kv_heads * head_dim; }
  int64_t v_width() const { return num_kv_heads * head_dim_v; }
  int64_t merged_width() const { return num_heads * head_dim_v; }
  int64_t gate_width() const { return num_heads * gate_dim; }
  int64_t y_width() const { return w_o.empty() ? merged_width() : output_dim; }
  const std::vector<float> &key_input() const { return has_key ? key : query; }
  const std::vector<float> &value_input() const { return has_value ? value : key_input(); }
};

std::string Describe(const LayerProblem &problem);

LayerShape LayerShapeOf(const LayerProblem &problem, int64_t b);

LayerWeights WeightsOf(const LayerProblem &problem);

// Which biases a layer has; that of the gate goes with that of the queries.
inline constexpr uint32_t kBiasQ = 1, kBiasK = 2, kBiasV = 4, kBiasO = 8, kNoBiases = 0,
                          kAllBiases = 15;

void FillInputs(Random *random, LayerProblem *problem);

// Weights and inputs such that q, k, v and y are about as large as the inputs.
void FillNormal(Random *random, uint32_t biases, bool has_w_o, LayerProblem *problem);

// A problem of these sizes.
LayerProblem NormalLayer(LayerProblem problem, uint64_t seed = 1, uint32_t biases = kAllBiases,
                         bool has_w_o = true);

// Sequence b's query rows first .. first + n_q with its first n_kv key and value rows, as inputs of
// their own.
LayerProblem Slice(const LayerProblem &problem, int64_t b, int64_t first, int64_t n_q,
                   int64_t n_kv);

void FillPadding(float value, LayerProblem *problem);

// ---- Making a layer

enum class WeightForm { kThreeMatrices, kFused };

struct LayerForm {
  uint32_t instruction_set = MHA_INSTRUCTION_SET_AUTO;
  WeightForm form = WeightForm::kThreeMatrices;
  uint32_t layout = MHA_LAYOUT_IN_OUT;
  int64_t row_gap = 0;        // between the rows of each matrix
  bool fused_biases = false;  // w_qkv.bias; needs all or none of b_q, b_k, b_v
  bool use_defaults = false;  // leave what has the default value 0
  Stored weight_type = Stored::kF32;
  bool gate_in_q = false;  // the columns of each head's gate behind its own in W_Q
};

std::string Describe(const LayerForm &form);

// w [in, out] of numbers or codes, in memory as the type and layout say, with `gap` elements, of
// int4 an even number, between rows. Codes of int4 with offsets are stored as they are.
std::vector<unsigned char> InMemory(Stored stored, const std::vector<float> &w, int64_t in,
                                    int64_t out, uint32_t layout, int64_t gap,
                                    bool has_offsets = false);

// Scales, or offsets, as they are given: those of a column side by side.
std::vector<unsigned char> ScalesInMemory(const std::vector<float> &scales, int64_t out);

mha_layer_config ConfigOf(const LayerProblem &problem, bool use_defaults = false);

mha_layer_options Options(uint32_t instruction_set = MHA_INSTRUCTION_SET_AUTO,
                          mha_sgemm sgemm = nullptr, const mha_allocator *allocator = nullptr);

// Each head's columns of the gate behind its columns of queries, of `rows` rows.
std::vector<float> WithGates(const LayerProblem &problem, const std::vector<float> &q,
                             const std::vector<float> &gate, int64_t rows);

// The structs that give a problem's layer to the library, as floats or, if it is stored as another
// type, in that, and the arrays that they point at, each in memory of its own.
struct LayerData {
  explicit LayerData(const LayerProblem &problem, Place place = Place::kBeforeGuard,
                     const LayerForm &form = {});
  LayerData(LayerData &&) noexcept;
  LayerData &operator=(LayerData &&) noexcept;
  ~LayerData();

  size_t PackSize(const mha_layer_options *options = nullptr) const;

  // Packed into memory of exactly the size that it needs, over bytes of a given value.
  Memory Pack(const mha_layer_options *options = nullptr, int fill = 0xcc,
              Place place = Place::kBeforeGuard) const;

  void Freeze();

  mha_layer_config config;
  mha_layer_weights weights;
  std::vector<Memory> arrays;
};

struct DestroyLayer {
  void operator()(mha_layer *layer) const { mha_layer_destroy(layer); }
};
using Layer = std::unique_ptr<mha_layer, DestroyLayer>;

// The linear layer of a config without heads, and of w_o and b_o.
mha_linear_weights LinearOf(const mha_layer_config &config, const mha_layer_weights &weights);

// A linear one, where the config has no heads; likewise PackSize and Pack.
Layer Create(const LayerData &data, const mha_layer_options *options = nullptr);

Layer Create(const LayerData &data, uint32_t instruction_set);

// The arrays are overwritten as soon as the layer is made: it must have its own copy.
Layer MakeLayer(LayerData data, uint32_t instruction_set);

Layer MakeLayer(const LayerProblem &problem, const LayerForm &form = {});

// A layer viewed in a packed buffer, its storage exactly as large as asked for.
struct View {
  explicit View(const Memory &buffer, const mha_layer_options *options = nullptr,
                Place place = Place::kBeforeGuard)
      : storage(mha_layer_view_size(), place, 16) {
    status = mha_layer_view(buffer.data(), buffer.size(), options, storage.data(), storage.size(),
                            &layer, &error);
  }
  Memory storage;
  const mha_layer *layer = nullptr;
  mha_error error;
  mha_status status;
};

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_LAYER_H
