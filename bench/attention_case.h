// The middle stage alone as a benchmark, mha_attention on plain rows.
#pragma once

#include <stdint.h>

#include <memory>

#include "layer_case.h"
#include "measure.h"

namespace bench {

struct AttentionShape {
  int64_t n, heads, head_dim;
  bool is_causal;

  int64_t floats() const { return n * heads * head_dim; }
};

// change: what the call has beside that shape, of which the sizes are looked at.
std::unique_ptr<Case> make_attention_case(const AttentionShape &shape, uint32_t instruction_set, Change change = nullptr);

}  // namespace bench
