// What is measured: calls of the interface, one per line of a shapes file.
#pragma once

#include <stdint.h>

#include <string>
#include <vector>

namespace gate {

struct Shape {
  std::string text;  // the line, which is also the name in every report
  bool is_layer;     // mha_forward, else mha_attention
  int64_t batch = 1, n = 0, n_kv = 0, width = 0, heads = 0, kv_heads = 0, head_dim = 0;
  int64_t past = 0;      // positions in a KV cache; 0 = without a cache
  uint32_t kv_type = 0;  // MHA_TYPE_* of the cache
  bool is_causal = false;
  uint32_t instruction_set = 0;  // MHA_INSTRUCTION_SET_*
  int64_t threads = 1;
};

// The shape that a line describes, as tools/perf_gate.sh --help says; throws CannotMeasure with a sentence that says what is wrong with it.
Shape parse_shape(const std::string &line);

// All shapes of a file, at least one.
std::vector<Shape> read_shapes(const std::string &path);

std::vector<Shape> default_counting_shapes();

}  // namespace gate
