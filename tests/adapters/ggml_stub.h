// What the tests need of a ggml: the functions that the backend for llama.cpp calls, and a few that
// programs call. What it says about itself can be changed.
#ifndef MHA_TESTS_ADAPTERS_GGML_STUB_H
#define MHA_TESTS_ADAPTERS_GGML_STUB_H

#include <ggml-parts.h>

#include <cstdint>
#include <vector>

struct ggml_cgraph {
  std::vector<ggml_tensor *> nodes;
};

// A block of q8_0. The factor is 1/64 throughout.
struct Block {
  uint16_t factor = 0x2400;
  int8_t codes[32];
};

extern "C" {
void stub_set_version(const char *version);
void stub_set_tensor_overhead(size_t bytes);
void stub_rename(const char *name);  // of an operation or a type, to "another"
extern ggml_backend_buffer_type stub_host_memory, stub_other_memory;
void ggml_log_set(ggml_log_callback callback, void *user_data);
void ggml_backend_tensor_alloc(ggml_backend_buffer_t buffer, ggml_tensor *t, void *address);
void ggml_backend_tensor_set(ggml_tensor *t, const void *data, size_t offset, size_t bytes);
void ggml_backend_tensor_get(const ggml_tensor *t, void *data, size_t offset, size_t bytes);
ggml_backend_reg_t ggml_backend_load(const char *path);
ggml_backend_reg_t ggml_backend_reg_by_name(const char *name);
}

#endif  // MHA_TESTS_ADAPTERS_GGML_STUB_H
