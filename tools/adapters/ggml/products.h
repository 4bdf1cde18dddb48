// MUL_MAT of ggml with weights of type Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K or Q6_K, computed
// by mha_linear in INT8, or BF16, in BF16. The weights lie in buffers of their own type, packed:
// the same codes, scales and offsets in another order. Other tensors in these buffers, such as a
// LoRA's, are the CPU's. GET_ROWS of such weights has llama.cpp keep an embedding that is also the
// output's matrix once.
#pragma once

#include "attention.h"
#include "ggml-parts.h"
#include "mha.h"

namespace mha_ggml {

// The type of such buffers, which belongs to this device.
ggml_backend_buffer_type_t type_of_weights(ggml_backend_dev_t device);

class Products {
 public:
  // Whether compute() or get_rows() takes this operation. A model's weights are asked about before
  // they are read; what is then packed has to be multiplied, whatever by: ggml copies it for other
  // operations.
  static bool supports(const ggml_tensor *op, ggml_backend_buffer_type_t type);
  // Returns NULL, or what failed. Throws std::bad_alloc.
  const char *compute(const ggml_tensor *op, const mha_scheduler *scheduler);
  const char *get_rows(const ggml_tensor *op);

 private:
  Memory workspace_;
  mha_error error_;
};

}  // namespace mha_ggml
