// A whole layer as a benchmark: its shape, its arrays, its work.
#pragma once

#include <stdint.h>

#include <memory>
#include <string>

#include "measure.h"
#include "mha.h"
#include "support/fixtures.h"

namespace bench {

struct LayerShape {
  int64_t batch, n, width, heads;
  bool is_causal;

  int64_t rows() const { return batch * n; }
  std::string name() const;  // "B:1/n:128/..."
};

// Self-attention of random rows, with random weights that keep the variance of the rows, and no
// biases.
support::LayerProblem random_layer(int64_t batch, int64_t n, int64_t width, int64_t heads,
                                   int64_t kv_heads);

// How the benchmarks call: large arrays in large pages.
support::CallForm call_form(const mha_scheduler *scheduler = nullptr);

struct LayerOptions {
  uint32_t instruction_set;
  uint32_t threads = 1;
  support::Arithmetic arithmetic = support::Arithmetic::kF32;
  support::Stored weight_type = support::Stored::kF32;
};

// The library's layer.
std::unique_ptr<Case> make_layer_case(const LayerShape &shape, const LayerOptions &options);

// Pairs of a query and a key that attend, per head.
double attending_pairs(int64_t batch, int64_t n, bool is_causal);

}  // namespace bench
