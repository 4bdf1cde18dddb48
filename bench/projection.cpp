// projection: rows times W_Q|W_K|W_V by the library's kernels; and rows times codes of a quantiser,
// those with scales of groups or offsets in turns with the same without; and times bf16 weights, in
// turns with the same in float32 arithmetic.

#include <algorithm>
#include <random>

#include "groups.h"
#include "layer_case.h"
#include "machine.h"
#include "measure.h"
#include "memory.h"
#include "run/project.h"

namespace bench {
namespace {

// y [rows, q | k | v columns] = x [rows, query_dim] * W_Q|W_K|W_V, as a layer computes them; no
// public function does this alone.
void run_qkv_product(const mha_layer &layer, const float *x, int64_t rows, float *y) {
  const mha::LayerShape &shape = layer.shape;
  const int64_t columns = shape.q_columns() + shape.k_columns() + shape.v_columns();
  const mha::InputRows input = {
      x, rows, rows * shape.query_dim, shape.query_dim, nullptr, mha::Storage::f32};
  mha::Product product = {};
  for (const mha::MatrixName name : {mha::matrix_q, mha::matrix_k, mha::matrix_v}) {
    mha::Projection &part = product.parts[product.num_parts++];
    describe_projection(layer, name, input, rows, &part);
    mha::Destination &destination = part.destination;
    destination.kind = mha::Destination::Kind::rows;
    destination.storage = mha::Storage::f32;
    destination.base = y;
    destination.batch_stride = rows * columns;
    destination.row_stride = columns;
    destination.head_width = part.columns;
    y += part.columns;
  }
  mha::run_products(layer, &product, 1, nullptr, nullptr, {}, nullptr);
}

// [rows, depth] x [depth, 3 * depth], the matrices of a layer of width `depth`.
class ProductCase : public Case {
 public:
  ProductCase(int64_t rows, int64_t depth, uint32_t set)
      : rows_(rows), y_(make_array<float>(rows * 3 * depth)) {
    support::LayerProblem problem = random_layer(1, rows, depth, 1, 1);
    problem.w_o.clear();
    layer_ = Create(support::LayerData(problem, support::Place::kAnywhere), set);
    x_ = CopyOf(problem.query, support::Place::kLargePages);
    bytes = working_set_bytes =
        sizeof(float) * static_cast<double>(3 * depth * depth + rows * 4 * depth);
    stages = {{6.0 * static_cast<double>(rows * depth * depth), bytes}};
    instruction_set = set;
  }

  void call() override { run_qkv_product(*layer_, x_.floats(), rows_, y_.get()); }

 private:
  const int64_t rows_;
  const Array<float> y_;
  support::Layer layer_;
  support::Memory x_;
};

// A linear layer of codes or bf16. One row takes turns through equal layers, so that they come from
// memory.
struct Codes {
  const char *name;
  uint32_t type, group;
  bool has_offsets;
  uint32_t scale_type = group ? MHA_TYPE_F16 : 0, packed_type = type;
};

class CodesCase : public Case {
 public:
  CodesCase(int64_t rows, const Codes &codes, uint32_t arithmetic, const Setting &setting) {
    constexpr int64_t in = 2048, out = 5632, count = in * out;
    const bool is_bf16 = codes.type == MHA_TYPE_BF16;
    std::vector<uint8_t> stored(is_bf16 ? 2 * count : count);
    std::minstd_rand random(1);
    const uint32_t bits = codes.packed_type == MHA_TYPE_INT5   ? 5
                          : codes.packed_type == MHA_TYPE_INT6 ? 6
                                                               : 8;
    const uint32_t least = bits < 8 && !codes.has_offsets ? 1u << (bits - 1) : 0;
    for (uint8_t &code : stored)
      code = static_cast<uint8_t>((random() >> 8 & ((1u << bits) - 1)) - least);
    for (size_t i = 1; is_bf16 && i < stored.size(); i += 2) stored[i] = 0x3F;  // 0.5 to 2
    const bool are_in_blocks = codes.scale_type == MHA_TYPE_INT8;
    const std::vector<float> scales(static_cast<size_t>(count / 16),
                                    are_in_blocks ? 1.0f : 0.0625f),
        offsets(scales.size(), are_in_blocks ? 8.0f : -0.5f), factors(scales.size(), 0.0625f);
    mha_linear_weights weights = support::Zeroed<mha_linear_weights>();
    weights.input_dim = in;
    weights.output_dim = out;
    weights.w.data = stored.data();
    if (!is_bf16) weights.w.scales = scales.data();
    if (codes.has_offsets) weights.w.offsets = offsets.data();
    if (are_in_blocks) weights.w.block_scales = factors.data();
    if (are_in_blocks && codes.has_offsets) weights.w.block_offsets = factors.data();
    weights.type = codes.type;
    weights.format.type = codes.packed_type;
    weights.format.group_size = codes.group;
    weights.format.scale_type = codes.scale_type;
    weights.layout = MHA_LAYOUT_OUT_IN;
    weights.format.arithmetic = arithmetic;
    x_ = make_array<float>(rows * in);
    std::fill_n(x_.get(), rows * in, 0.5f);
    y_ = make_array<float>(rows * out);
    args_.rows = rows;
    args_.x.data = x_.get();
    args_.output.data = y_.get();
    size_t packed_bytes = 0;
    support::Check(mha_linear_pack_size(&weights, nullptr, &packed_bytes, &error_), error_);
    const double of_weights = static_cast<double>(packed_bytes);
    bytes = of_weights + sizeof(float) * static_cast<double>(rows * (in + out));
    stages = {{2.0 * static_cast<double>(rows * count), bytes}};
    const int64_t rotated = std::min(rotated_bytes(), setting.most_rotated_bytes);
    const int64_t layers = rows > 1 ? 1 : 1 + static_cast<int64_t>(rotated / of_weights);
    working_set_bytes = bytes * static_cast<double>(layers);
    instruction_set = setting.instruction_set;
    in_integers = arithmetic != MHA_ARITHMETIC_F32;
    const mha_layer_options options = support::Options(setting.instruction_set);
    for (int64_t i = 0; i < layers; ++i) {
      mha_layer *layer = nullptr;
      support::Check(mha_linear_create(&weights, &options, &layer, &error_), error_);
      layers_.emplace_back(layer);
    }
    size_t workspace = 0;
    support::Check(mha_linear_workspace(layers_[0].get(), &args_, &workspace, &error_), error_);
    workspace_ = support::Memory(workspace, support::Place::kLargePages);
  }

  void call() override {
    support::Check(mha_linear(layers_[next_++ % layers_.size()].get(), &args_, workspace_.data(),
                              workspace_.size(), &error_),
                   error_);
  }

 private:
  Array<float> x_, y_;
  mha_linear_args args_ = support::Zeroed<mha_linear_args>();
  std::vector<support::Layer> layers_;
  support::Memory workspace_;
  size_t next_ = 0;
  mha_error error_ = {};
};

constexpr Codes bf16 = {"bf16", MHA_TYPE_BF16, 0, false}, int8 = {"int8", MHA_TYPE_INT8, 0, false},
                int8_by_32 = {"int8_by_32", MHA_TYPE_INT8, 32, false},
                int4_by_32 = {"int4_by_32", MHA_TYPE_INT4, 32, false},
                with_offsets = {"int4_by_32_with_offsets", MHA_TYPE_INT4, 32, true},
                q4_k = {"q4_k", MHA_TYPE_INT4, 32, true, MHA_TYPE_INT8},
                q4_k_floats = {"q4_k_floats", MHA_TYPE_INT4, 32, true, MHA_TYPE_F32},
                q5_k = {"q5_k", MHA_TYPE_INT8, 32, true, MHA_TYPE_INT8, MHA_TYPE_INT5},
                q5_k_floats = {"q5_k_floats", MHA_TYPE_INT8, 32, true, MHA_TYPE_F32},
                q6_k = {"q6_k", MHA_TYPE_INT8, 16, false, MHA_TYPE_INT8, MHA_TYPE_INT6},
                q6_k_floats = {"q6_k_floats", MHA_TYPE_INT8, 16, false, MHA_TYPE_F32};

void add_bf16(const Setting &setting, int64_t rows) {
  add("projection/bf16/BF16/M:" + std::to_string(rows) + "/K:2048/N:5632", [=] {
    auto test = std::make_unique<CodesCase>(rows, bf16, MHA_ARITHMETIC_BF16, setting);
    test->rival = std::make_unique<CodesCase>(rows, bf16, MHA_ARITHMETIC_F32, setting);
    test->rival_counter = "times_f32";
    return test;
  });
}

void add_codes(const Setting &setting, int64_t rows, const Codes &codes, const Codes &rival,
               const char *counter) {
  for (const auto &[name, arithmetic] :
       {std::pair("F32", MHA_ARITHMETIC_F32), std::pair("INT8", MHA_ARITHMETIC_INT8)}) {
    if (codes.scale_type == MHA_TYPE_INT8 && arithmetic == MHA_ARITHMETIC_F32) continue;
    add(std::string("projection/") + codes.name + "/" + name + "/M:" + std::to_string(rows) +
            "/K:2048/N:5632",
        [=] {
          auto test = std::make_unique<CodesCase>(rows, codes, arithmetic, setting);
          test->rival = std::make_unique<CodesCase>(rows, rival, arithmetic, setting);
          test->rival_counter = counter;
          return test;
        });
  }
}

}  // namespace

const Group projection_benchmarks([](const Setting &setting) {
  for (const int64_t rows : {1, 8, 32, 512}) add_bf16(setting, rows);
  for (const int64_t rows : {1, 512}) {
    add_codes(setting, rows, int8_by_32, int8, "times_by_column");
    add_codes(setting, rows, with_offsets, int4_by_32, "times_without_offsets");
    add_codes(setting, rows, q4_k, q4_k_floats, "times_f32_scales");
    add_codes(setting, rows, q5_k, q5_k_floats, "times_f32_scales");
    add_codes(setting, rows, q6_k, q6_k_floats, "times_f32_scales");
  }
  for (const int64_t depth : {256, 768, 2048, 4096}) {
    for (const int64_t rows :
         {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 24, 32, 48, 64, 128, 256, 1024}) {
      const std::string shape = "/M:" + std::to_string(rows) + "/K:" + std::to_string(depth) +
                                "/N:" + std::to_string(3 * depth);
      add("projection" + shape,
          [=] { return std::make_unique<ProductCase>(rows, depth, setting.instruction_set); });
    }
  }
});

}  // namespace bench
