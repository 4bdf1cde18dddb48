// FLASH_ATTN_EXT of ggml, computed by mha_attention.
#pragma once

#include <memory>

#include "ggml-parts.h"
#include "mask.h"
#include "mha.h"

namespace mha_ggml {

// Memory that only grows.
class Memory {
 public:
  // Returns at least this many bytes, aligned to 64. Growing loses the contents. Throws
  // std::bad_alloc.
  unsigned char *get(size_t bytes);

 private:
  std::unique_ptr<unsigned char[]> data_;
  size_t bytes_ = 0;
};

// Computes such operations, with memory that it keeps for the next ones. One at a time.
class Attention {
 public:
  // Whether compute() takes this operation: its arguments, of which mha_attention decides.
  static bool supports(const ggml_tensor *op);
  // Returns NULL, or what failed. Throws std::bad_alloc.
  const char *compute(const ggml_tensor *op, const mha_scheduler *scheduler);

 private:
  MaskedCalls calls_;
  Memory workspace_, widened_;
  mha_error error_;
};

}  // namespace mha_ggml
