// The structs that a library takes, filled for a shape.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

struct mha_kv_cache;
struct mha_scheduler;

namespace gate {

// A call: mha_attention, mha_forward or mha_recurrent_attention. perf_gate.py has read and checked
// it.
struct Shape {
  std::string text;  // as the user wrote it
  int64_t is_layer, is_recurrent, batch, n, n_kv, width, heads, kv_heads, head_dim;
  int64_t past;  // positions in a KV cache; 0: without a cache
  int64_t is_causal, threads;
  uint32_t kv_type;          // of the cache: MHA_TYPE_* - MHA_TYPE_F32
  uint32_t weight_type;      // of the layer, likewise
  uint32_t arithmetic;       // of the layer: F32, INT8, INT16, BF16
  uint32_t instruction_set;  // MHA_INSTRUCTION_SET_*
};

// A struct of mha.h, in memory for the largest one.
struct Struct {
  alignas(std::max_align_t) unsigned char bytes[1024];

  template <class T>
  const T *as() const {
    return reinterpret_cast<const T *>(bytes);
  }
};

// Fields move, and change, from version to version of mha.h. So each library has its own of these:
// structs.cpp is compiled once for each, with the header that the library came with.
// fill_layer and fill_recurrent return whether this version has what the shape asks for.
struct Structs {
  bool (*fill_layer)(const Shape &shape, const float *w_qkv, const float *w_o, Struct *config,
                     Struct *weights, Struct *options);
  void (*fill_cache)(const Shape &shape, Struct *config);
  void (*fill_forward)(const Shape &shape, const float *query, float *output,
                       const mha_scheduler *scheduler, Struct *args);
  void (*fill_attention)(const Shape &shape, const float *q, const float *k, const float *v,
                         float *output, const mha_scheduler *scheduler, Struct *args);
  bool (*fill_recurrent)(const Shape &shape, const float *q, const float *k, const float *v,
                         float *output, const mha_scheduler *scheduler, Struct *args);
  void (*set_cache)(const Shape &shape, mha_kv_cache *cache, Struct *args);
};

template <size_t library>
Structs structs();

}  // namespace gate
