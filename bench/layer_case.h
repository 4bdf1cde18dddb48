// A whole layer as a benchmark: its shape, its arrays, its work.
#pragma once

#include <stdint.h>

#include <memory>
#include <string>

#include "measure.h"
#include "memory.h"
#include "mha.h"

namespace bench {

struct LayerShape {
  int64_t batch, n, width, heads;
  bool is_causal;

  int64_t rows() const { return batch * n; }
  std::string name() const;  // "B:1/n:128/..."
};

// Stages and bytes of a layer, whoever computes it, and random weights and rows.
struct LayerCase : Case {
  explicit LayerCase(const LayerShape &shape);

  const LayerShape shape;
  const Array<float> w_qkv, w_o;  // [width, 3 * width], [width, width]
  const Array<float> x;           // [batch, n, width]
  Array<float> y;
};

struct LayerOptions {
  uint32_t instruction_set;
  mha_sgemm sgemm = nullptr;
  uint32_t threads = 1;
};

// The library's layer.
std::unique_ptr<LayerCase> make_layer_case(const LayerShape &shape, const LayerOptions &options);

// Pairs of a query and a key that attend, per head.
double attending_pairs(int64_t batch, int64_t n, bool is_causal);

}  // namespace bench
