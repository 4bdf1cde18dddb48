#include "scalar_loops.h"

#include <cmath>

namespace bench {
namespace {

// y [rows, columns] = x [rows, depth] * w [depth, columns], along the rows of w: the order that is the fastest of the plain ones.
void multiply(const float *x, const float *w, float *y, int64_t rows, int64_t depth, int64_t columns) {
  for (int64_t row = 0; row < rows; ++row) {
    float *const y_row = y + row * columns;
    for (int64_t column = 0; column < columns; ++column) y_row[column] = 0.0f;
    for (int64_t i = 0; i < depth; ++i) {
      for (int64_t column = 0; column < columns; ++column) y_row[column] += x[row * depth + i] * w[i * columns + column];
    }
  }
}

}  // namespace

void run_scalar_loops(const ScalarLayer &layer, const float *x, float *y) {
  const int64_t n = layer.n, width = layer.width, head_dim = width / layer.heads;
  const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  float *const scores = layer.scores;
  multiply(x, layer.w_qkv, layer.qkv, n, width, 3 * width);
  for (int64_t head = 0; head < layer.heads; ++head) {
    for (int64_t row = 0; row < n; ++row) {
      const float *const q = layer.qkv + row * 3 * width + head * head_dim;
      const int64_t keys = layer.is_causal ? row + 1 : n;
      float max = -INFINITY;
      for (int64_t j = 0; j < keys; ++j) {
        const float *const k = layer.qkv + j * 3 * width + width + head * head_dim;
        float dot = 0.0f;
        for (int64_t i = 0; i < head_dim; ++i) dot += q[i] * k[i];
        scores[j] = dot * scale;
        if (scores[j] > max) max = scores[j];
      }
      float sum = 0.0f;
      for (int64_t j = 0; j < keys; ++j) {
        scores[j] = expf(scores[j] - max);
        sum += scores[j];
      }
      float *const context = layer.context + row * width + head * head_dim;
      for (int64_t i = 0; i < head_dim; ++i) context[i] = 0.0f;
      for (int64_t j = 0; j < keys; ++j) {
        const float *const v = layer.qkv + j * 3 * width + 2 * width + head * head_dim;
        const float weight = scores[j] / sum;
        for (int64_t i = 0; i < head_dim; ++i) context[i] += weight * v[i];
      }
    }
  }
  multiply(layer.context, layer.w_o, y, n, width, width);
}

}  // namespace bench
