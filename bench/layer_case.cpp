#include "layer_case.h"

#include <cmath>
#include <stdexcept>

#include "pool.h"

namespace bench {
namespace {

float weight_range(int64_t width) { return 1.7f / std::sqrt(static_cast<float>(width)); }  // keeps the variance of the rows

class MhaCase : public LayerCase {
 public:
  MhaCase(const LayerShape &shape, const LayerOptions &chosen) : LayerCase(shape) {
    instruction_set = chosen.instruction_set;
    threads = chosen.threads;
    mha_layer_config config = {};
    config.struct_size = sizeof config;
    config.query_dim = shape.width;
    config.num_heads = shape.heads;
    mha_layer_weights weights = {};
    weights.struct_size = sizeof weights;
    weights.w_qkv = w_qkv.get();
    weights.w_o = w_o.get();
    mha_layer_options options = {};
    options.struct_size = sizeof options;
    options.instruction_set = chosen.instruction_set;
    options.sgemm = chosen.sgemm;
    mha_layer *layer = nullptr;
    check(mha_layer_create(&config, &weights, &options, &layer, &error_));
    layer_.reset(layer);

    scheduler_ = pool_scheduler(threads);
    args_.struct_size = sizeof args_;
    args_.batch = shape.batch;
    args_.n_q = shape.n;
    args_.query = x.get();
    args_.output = y.get();
    args_.flags = shape.is_causal ? MHA_CAUSAL : 0;
    args_.scheduler = threads > 1 ? &scheduler_ : nullptr;
    mha_call_info info = {};
    info.struct_size = sizeof info;
    check(mha_info(layer, &args_, &info, &error_));
    expect_operations(info.operations);
    workspace_bytes_ = info.workspace_bytes;
    workspace_ = make_array<unsigned char>(static_cast<int64_t>(workspace_bytes_));
  }

  void call() override { check(mha_forward(layer_.get(), &args_, workspace_.get(), workspace_bytes_, &error_)); }

 private:
  struct Destroy {
    void operator()(mha_layer *layer) const { mha_layer_destroy(layer); }
  };
  void check(mha_status status) const {
    if (status) throw std::runtime_error(error_.message);
  }

  std::unique_ptr<mha_layer, Destroy> layer_;
  mha_scheduler scheduler_ = {};
  mha_forward_args args_ = {};
  mha_error error_ = {};
  size_t workspace_bytes_ = 0;
  Array<unsigned char> workspace_;
};

}  // namespace

double attending_pairs(int64_t batch, int64_t n, bool is_causal) {
  const double rows = static_cast<double>(n);
  return static_cast<double>(batch) * (is_causal ? rows * (rows + 1) / 2 : rows * rows);
}

std::string LayerShape::name() const {
  return "B:" + std::to_string(batch) + "/n:" + std::to_string(n) + "/D:" + std::to_string(width) + "/H:" + std::to_string(heads) +
         "/causal:" + std::to_string(is_causal);
}

LayerCase::LayerCase(const LayerShape &given)
    : shape(given),
      w_qkv(random_array(shape.width * 3 * shape.width, weight_range(shape.width), 1)),
      w_o(random_array(shape.width * shape.width, weight_range(shape.width), 2)),
      x(random_array(shape.rows() * shape.width, 1.0f, 3)),
      y(make_array<float>(shape.rows() * shape.width)) {
  // In matrices of [width, width] and of [rows, width].
  const double rows = static_cast<double>(shape.rows()), width = static_cast<double>(shape.width);
  const double weight_bytes = sizeof(float) * width * width, row_bytes = sizeof(float) * rows * width;
  const double product_flops = 2 * rows * width * width;
  stages = {{3 * product_flops, 3 * weight_bytes + 4 * row_bytes},
            {4 * width * attending_pairs(shape.batch, shape.n, shape.is_causal), 4 * row_bytes},
            {product_flops, weight_bytes + 2 * row_bytes}};
  bytes = 4 * weight_bytes + 2 * row_bytes;
  working_set_bytes = 4 * weight_bytes + 6 * row_bytes;  // x, q, k, v, context, y
}

std::unique_ptr<LayerCase> make_layer_case(const LayerShape &shape, const LayerOptions &options) {
  return std::make_unique<MhaCase>(shape, options);
}

}  // namespace bench
