// One or a few tokens over a KV cache, as benchmarks: the whole layer, and its attention alone.
#pragma once

#include <stdint.h>

#include <memory>
#include <string>

#include "measure.h"
#include "mha.h"

namespace bench {

// `batch` sequences get n tokens each. The first has `past` positions in the cache, each further
// one 17 less.
struct DecodeShape {
  int64_t heads, kv_heads, head_dim, past, batch = 1, n = 1;

  int64_t width() const { return heads * head_dim; }
  int64_t kv_width() const { return kv_heads * head_dim; }
  int64_t past_of(int64_t sequence) const { return past - 17 * sequence; }
  std::string layer_name() const;      // "D:2048/H:32/Hkv:8/past:4096"
  std::string attention_name() const;  // "H:32/Hkv:8/head_dim:64/past:4096"
};

struct DecodeOptions {
  uint32_t instruction_set;
  // Each call is another copy's turn, of the layer and of the cache, until as many bytes have been
  // read as no cache holds; 0 = always the same.
  int64_t rotated_bytes;
  int64_t most_rotated_bytes;  // but for one copy, which there always is
  uint32_t threads = 1;
  uint32_t cache_type = MHA_TYPE_F32;
  uint32_t value_type = 0;  // 0 = cache_type
  uint32_t weight_type = MHA_TYPE_F32;
  uint32_t arithmetic = MHA_ARITHMETIC_F32;  // of the layer's projections
  bool attends_in_integers = false;
};

// mha_forward. The layer's weights are those of query_dim = width.
std::unique_ptr<Case> make_decode_layer(const DecodeShape &shape, const DecodeOptions &options);

// mha_attention, which appends nothing.
std::unique_ptr<Case> make_decode_attention(const DecodeShape &shape, const DecodeOptions &options);

}  // namespace bench
