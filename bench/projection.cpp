// projection: rows times W_Q|W_K|W_V by the library's kernels. projection_openblas: the same product by OpenBLAS.

#include "groups.h"
#include "layer_case.h"
#include "measure.h"
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
        layer(random_layer(1, rows, depth, 1, 1)),
        x(CopyOf(layer.query, support::Place::kLargePages)),
        y(static_cast<size_t>(rows * columns) * sizeof(float), support::Place::kLargePages) {
    const double flops = 2.0 * static_cast<double>(rows) * static_cast<double>(depth * columns);
    bytes = working_set_bytes = sizeof(float) * static_cast<double>(depth * columns + rows * (depth + columns));
    stages = {{flops, bytes}};
    instruction_set = set;
    layer.w_o.clear();
  }

  const int64_t rows, depth, columns;
  support::LayerProblem layer;
  const support::Memory x, y;
};

class NativeProduct : public ProductCase {
 public:
  NativeProduct(int64_t rows, int64_t depth, uint32_t set)
      : ProductCase(rows, depth, set), layer_(Create(support::LayerData(layer, support::Place::kAnywhere), set)) {}

  void call() override { run_qkv_product(*layer_, x.floats(), rows, y.floats()); }

 private:
  const support::Layer layer_;
};

#if defined(MHA_WITH_OPENBLAS)
class OpenblasProduct : public ProductCase {
 public:
  OpenblasProduct(int64_t rows, int64_t depth, uint32_t set)
      : ProductCase(rows, depth, set), weights_(CopyOf(support::Random(2).Uniforms(depth * columns, 0.05f), support::Place::kLargePages)) {}

  void call() override {
    const int m = static_cast<int>(rows), n = static_cast<int>(columns), k = static_cast<int>(depth);
    mha_openblas_sgemm(101, 111, 111, m, n, k, 1.0f, x.floats(), k, weights_.floats(), n, 0.0f, y.floats(), n);
  }

 private:
  const support::Memory weights_;
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
