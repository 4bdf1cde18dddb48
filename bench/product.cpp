#include "product.h"

#include <initializer_list>

#include "run/project.h"

namespace bench {

// As forward.cpp does it, but that everything lands as rows of one matrix.
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

}  // namespace bench
