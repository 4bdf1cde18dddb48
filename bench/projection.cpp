// projection: rows times W_Q|W_K|W_V by the library's kernels.

#include "groups.h"
#include "layer_case.h"
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

}  // namespace

void register_projection_benchmarks(const Setting &setting) {
  for (const int64_t depth : {256, 768, 2048, 4096}) {
    for (const int64_t rows :
         {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 24, 32, 48, 64, 128, 256, 1024}) {
      const std::string shape = "/M:" + std::to_string(rows) + "/K:" + std::to_string(depth) +
                                "/N:" + std::to_string(3 * depth);
      add("projection" + shape,
          [=] { return std::make_unique<ProductCase>(rows, depth, setting.instruction_set); });
    }
  }
}

}  // namespace bench
