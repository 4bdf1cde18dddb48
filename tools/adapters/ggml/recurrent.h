// GATED_DELTA_NET of ggml, computed by mha_recurrent_attention.
#pragma once

#include "attention.h"

namespace mha_ggml {

class Recurrent {
 public:
  // Whether compute() takes this operation. Few rows are left to ggml: its states are transposed,
  // and to turn them there and back takes as long as ggml needs for four rows.
  static constexpr int64_t kFewestRows = 8;  // for each state of the result
  static bool supports(const ggml_tensor *op);
  // Returns NULL, or what failed. Throws std::bad_alloc.
  const char *compute(const ggml_tensor *op, const mha_scheduler *scheduler);

 private:
  Memory workspace_;
  mha_error error_;
};

}  // namespace mha_ggml
