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

// Those of src/docs/compare.md.
constexpr LayerShape page_layers[] = {
    // decoders
    {1, 128, 256, 4, true},
    {1, 128, 768, 12, true},
    {1, 512, 768, 12, true},
    {1, 1024, 768, 12, true},
    {1, 2048, 1024, 16, true},
    {8, 128, 768, 12, true},
    {1, 1024, 2048, 16, true},
    {1, 512, 4096, 32, true},
    // what runs at the edge: ViT-B/16, CLIP's text, Whisper base's encoder, a window of Swin-T
    {1, 197, 768, 12, false},
    {1, 77, 768, 12, false},
    {1, 1500, 512, 8, false},
    {1, 49, 96, 3, false},
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
  bool attends_in_integers = false;
};

// The library's layer.
std::unique_ptr<Case> make_layer_case(const LayerShape &shape, const LayerOptions &options);

// Pairs of a query and a key that attend, per head.
double attending_pairs(int64_t batch, int64_t n, bool is_causal);

}  // namespace bench
