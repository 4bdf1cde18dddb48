// projection: rows times W_Q|W_K|W_V by the library's kernels. projection_openblas: the same product by OpenBLAS.

#include <stdexcept>

#include "groups.h"
#include "measure.h"
#include "memory.h"
#include "product.h"
#if defined(MHA_WITH_OPENBLAS)
#include "mha_openblas.h"
#endif

namespace bench {
namespace {

// [rows, depth] x [depth, 3 * depth], the matrices of a layer of width `depth`.
struct ProductCase : Case {
  ProductCase(int64_t rows_given, int64_t depth_given, uint32_t set)
      : rows(rows_given),
        depth(depth_given),
        columns(3 * depth_given),
        x(random_array(rows * depth, 1.0f, 1)),
        y(make_array<float>(rows * columns)) {
    const double flops = 2.0 * static_cast<double>(rows) * static_cast<double>(depth * columns);
    bytes = working_set_bytes = sizeof(float) * static_cast<double>(depth * columns + rows * (depth + columns));
    stages = {{flops, bytes}};
    instruction_set = set;
  }

  Array<float> make_weights() const { return random_array(depth * columns, 0.05f, 2); }

  const int64_t rows, depth, columns;
  const Array<float> x;
  Array<float> y;
};

class NativeProduct : public ProductCase {
 public:
  NativeProduct(int64_t rows, int64_t depth, uint32_t set) : ProductCase(rows, depth, set) {
    const Array<float> w_qkv = make_weights();
    mha_layer_config config = {};
    config.struct_size = sizeof config;
    config.query_dim = depth;
    config.num_heads = 1;
    mha_layer_weights weights = {};
    weights.struct_size = sizeof weights;
    weights.w_qkv = w_qkv.get();
    mha_layer_options options = {};
    options.struct_size = sizeof options;
    options.instruction_set = set;
    mha_layer *layer = nullptr;
    mha_error error;
    if (mha_layer_create(&config, &weights, &options, &layer, &error)) throw std::runtime_error(error.message);
    layer_.reset(layer);
  }

  void call() override { run_qkv_product(*layer_, x.get(), rows, y.get()); }

 private:
  struct Destroy {
    void operator()(mha_layer *layer) const { mha_layer_destroy(layer); }
  };
  std::unique_ptr<mha_layer, Destroy> layer_;
};

#if defined(MHA_WITH_OPENBLAS)
class OpenblasProduct : public ProductCase {
 public:
  OpenblasProduct(int64_t rows, int64_t depth, uint32_t set) : ProductCase(rows, depth, set), weights_(make_weights()) {}

  void call() override {
    const int m = static_cast<int>(rows), n = static_cast<int>(columns), k = static_cast<int>(depth);
    mha_openblas_sgemm(101, 111, 111, m, n, k, 1.0f, x.get(), k, weights_.get(), n, 0.0f, y.get(), n);
  }

 private:
  const Array<float> weights_;
};
#endif

}  // namespace

void register_projection_benchmarks(const Setting &setting) {
  for (const int64_t depth : {256, 768, 2048, 4096}) {
    for (const int64_t rows : {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 1024}) {
      const std::string shape = "/M:" + std::to_string(rows) + "/K:" + std::to_string(depth) + "/N:" + std::to_string(3 * depth);
      add("projection" + shape, [=] { return std::make_unique<NativeProduct>(rows, depth, setting.instruction_set); });
#if defined(MHA_WITH_OPENBLAS)
      add("projection_openblas" + shape, [=] { return std::make_unique<OpenblasProduct>(rows, depth, setting.best); });
#endif
    }
  }
}

}  // namespace bench
