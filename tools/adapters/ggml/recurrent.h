// GATED_DELTA_NET of ggml, computed by mha_recurrent_attention.
#ifndef MHA_GGML_RECURRENT_H
#define MHA_GGML_RECURRENT_H

#include "attention.h"

namespace mha_ggml {

class Recurrent {
 public:
  // Whether compute() takes this operation. Short ones are left to ggml: its states are transposed
  // matrices, and turning them round takes as long as ggml needs for six rows.
  static constexpr int64_t kFewestRows = 8;
  static bool supports(const ggml_tensor *op);
  // Returns NULL, or what failed.
  const char *compute(const ggml_tensor *op, const mha_scheduler *scheduler);

 private:
  Memory workspace_;
  mha_error error_;
};

}  // namespace mha_ggml

#endif  // MHA_GGML_RECURRENT_H
