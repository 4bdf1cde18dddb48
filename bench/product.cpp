#include "product.h"

#include <initializer_list>

#include "projections.h"

namespace bench {

// As forward.cpp does it, but that everything lands as rows of one matrix.
void run_qkv_product(const mha_layer &layer, const float *x, int64_t rows, float *y) {
  const mha::LayerShape &shape = layer.shape;
  const int64_t columns = shape.q_columns() + shape.k_columns() + shape.v_columns();
  const mha::InputRows input = {x, rows, rows * shape.query_dim, shape.query_dim, nullptr};
  mha::Product product = {};
  for (const mha::MatrixName name : {mha::matrix_q, mha::matrix_k, mha::matrix_v}) {
    const mha::PackedMatrix &matrix = layer.layout.matrices[name];
    const mha::Destination destination = {mha::Destination::Kind::rows, y, rows * columns, columns, 0, matrix.columns};
    product.parts[product.num_parts++] = {input,
                                          rows,
                                          matrix.depth,
                                          matrix.columns,
                                          layer.storage,
                                          layer.weights(name),
                                          layer.scales(name),
                                          layer.bias(name),
                                          destination,
                                          {},
                                          layer.tuning};
    y += matrix.columns;
  }
  mha::run_products(layer, &product, 1, nullptr, nullptr, nullptr);
}

}  // namespace bench
