#include "ggml_stub.h"

#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

std::string version = "0.25.3", renamed;
size_t tensor_overhead = 32 + sizeof(ggml_tensor);
ggml_backend_reg_t loaded;

void Print(ggml_log_level, const char *text, void *) { std::fputs(text, stderr); }
ggml_log_callback log_callback = Print;
void *log_data;

void BlocksToFloats(const void *blocks, float *floats, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    floats[i] = static_cast<float>(static_cast<const Block *>(blocks)[i / 32].codes[i % 32]) / 64;
  }
}

template <int kBytes, int kWeights = 32>  // not the numbers, but something of a block's bytes
void BytesToFloats(const void *blocks, float *floats, int64_t count) {
  for (int64_t i = 0; i < count; i++)
    floats[i] = static_cast<const uint8_t *>(blocks)[i / kWeights * kBytes + i % kBytes];
}

void HalvesToFloats(const void *halves, float *floats, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    const uint16_t half = static_cast<const uint16_t *>(halves)[i];
    const int exponent = half >> 10 & 31, digits = (half & 1023) | (exponent ? 1024 : 0);
    floats[i] = std::ldexp(half >> 15 ? -1.0f : 1.0f, std::max(exponent, 1) - 25) * digits;
    if (exponent == 31) floats[i] *= INFINITY;
  }
}

const ggml_type_traits kF32 = {"f32", 1, 0, 4, false, nullptr, nullptr},
                       kF16 = {"f16", 1, 0, 2, false, HalvesToFloats, nullptr},
                       kBf16 = {"bf16", 1, 0, 2, false, nullptr, nullptr},
                       kI32 = {"i32", 1, 0, 4, false, nullptr, nullptr},
                       kQ8 = {"q8_0", 32, 0, sizeof(Block), true, BlocksToFloats, nullptr},
                       kQ4 = {"q4_0", 32, 0, 18, true, BytesToFloats<18>, nullptr},
                       kQ41 = {"q4_1", 32, 0, 20, true, BytesToFloats<20>, nullptr},
                       kQ50 = {"q5_0", 32, 0, 22, true, BytesToFloats<22>, nullptr},
                       kQ51 = {"q5_1", 32, 0, 24, true, BytesToFloats<24>, nullptr},
                       kQ4K = {"q4_K", 256, 0, 144, true, BytesToFloats<144, 256>, nullptr},
                       kQ5K = {"q5_K", 256, 0, 176, true, BytesToFloats<176, 256>, nullptr},
                       kQ6K = {"q6_K", 256, 0, 210, true, BytesToFloats<210, 256>, nullptr};

const char *NameOf(const char *name) { return name == renamed ? "another" : name; }

}  // namespace

extern "C" {
ggml_backend_buffer_type stub_host_memory, stub_other_memory;
void stub_set_version(const char *given) { version = given; }
void stub_set_tensor_overhead(size_t bytes) { tensor_overhead = bytes; }
void stub_rename(const char *name) { renamed = name; }

const char *ggml_version() { return version.c_str(); }
size_t ggml_tensor_overhead() { return tensor_overhead; }
const char *ggml_op_name(ggml_op op) {
  switch (op) {
    case GGML_OP_NONE:
      return NameOf("NONE");
    case GGML_OP_RESHAPE:
      return NameOf("RESHAPE");
    case GGML_OP_VIEW:
      return NameOf("VIEW");
    case GGML_OP_PERMUTE:
      return NameOf("PERMUTE");
    case GGML_OP_TRANSPOSE:
      return NameOf("TRANSPOSE");
    case GGML_OP_FLASH_ATTN_EXT:
      return NameOf("FLASH_ATTN_EXT");
    case GGML_OP_MUL_MAT:
      return NameOf("MUL_MAT");
    case GGML_OP_MUL_MAT_ID:
      return NameOf("MUL_MAT_ID");
    case GGML_OP_GET_ROWS:
      return NameOf("GET_ROWS");
    case GGML_OP_GATED_DELTA_NET:
      return NameOf("GATED_DELTA_NET");
    default:
      return NameOf("OTHER");
  }
}
const ggml_type_traits *ggml_get_type_traits(ggml_type type) {
  return type == GGML_TYPE_F32    ? &kF32
         : type == GGML_TYPE_F16  ? &kF16
         : type == GGML_TYPE_BF16 ? &kBf16
         : type == GGML_TYPE_Q8_0 ? &kQ8
         : type == GGML_TYPE_Q4_0 ? &kQ4
         : type == GGML_TYPE_Q4_1 ? &kQ41
         : type == GGML_TYPE_Q5_0 ? &kQ50
         : type == GGML_TYPE_Q5_1 ? &kQ51
         : type == GGML_TYPE_Q4_K ? &kQ4K
         : type == GGML_TYPE_Q5_K ? &kQ5K
         : type == GGML_TYPE_Q6_K ? &kQ6K
                                  : &kI32;
}
const char *ggml_type_name(ggml_type type) { return NameOf(ggml_get_type_traits(type)->type_name); }
bool ggml_is_contiguous(const ggml_tensor *t) {
  const ggml_type_traits &traits = *ggml_get_type_traits(t->type);
  size_t bytes = traits.type_size;
  for (int i = 0; i < GGML_MAX_DIMS; i++) {
    if (t->ne[i] != 1 && t->nb[i] != bytes) return false;
    bytes *= static_cast<size_t>(i == 0 ? t->ne[0] / traits.blck_size : t->ne[i]);
  }
  return true;
}
size_t ggml_nbytes(const ggml_tensor *t) {
  size_t bytes =
      t->nb[0] * static_cast<size_t>(t->ne[0] / ggml_get_type_traits(t->type)->blck_size);
  for (int i = 1; i < GGML_MAX_DIMS; i++) bytes += t->nb[i] * static_cast<size_t>(t->ne[i] - 1);
  return bytes;
}
ggml_tensor *ggml_graph_node(ggml_cgraph *graph, int i) { return graph->nodes[i]; }
int ggml_graph_n_nodes(ggml_cgraph *graph) { return static_cast<int>(graph->nodes.size()); }
void ggml_log_get(ggml_log_callback *callback, void **user_data) {
  *callback = log_callback, *user_data = log_data;
}
void ggml_log_set(ggml_log_callback callback, void *user_data) {
  log_callback = callback ? callback : Print, log_data = user_data;
}
bool ggml_backend_buft_is_host(ggml_backend_buffer_type_t type) {
  return type == &stub_host_memory;
}
ggml_backend_buffer_t ggml_backend_buffer_init(ggml_backend_buffer_type_t type,
                                               ggml_backend_buffer_i table, void *context,
                                               size_t size) {
  return new ggml_backend_buffer{table, type, context, size, GGML_BACKEND_BUFFER_USAGE_ANY};
}
void ggml_backend_buffer_free(ggml_backend_buffer_t buffer) {
  buffer->iface.free_buffer(buffer);
  delete buffer;
}
ggml_backend_buffer_t ggml_backend_buft_alloc_buffer(ggml_backend_buffer_type_t type, size_t size) {
  if (type != &stub_host_memory) return type->iface.alloc_buffer(type, size);
  ggml_backend_buffer_i table = {};
  table.get_base = [](ggml_backend_buffer_t buffer) { return buffer->context; };
  table.free_buffer = [](ggml_backend_buffer_t buffer) { std::free(buffer->context); };
  table.clear = [](ggml_backend_buffer_t buffer, uint8_t value) {
    std::memset(buffer->context, value, buffer->size);
  };
  table.set_tensor = [](ggml_backend_buffer_t, ggml_tensor *t, const void *data, size_t offset,
                        size_t bytes) {
    std::memcpy(static_cast<char *>(t->data) + offset, data, bytes);
  };
  table.get_tensor = [](ggml_backend_buffer_t, const ggml_tensor *t, void *data, size_t offset,
                        size_t bytes) {
    std::memcpy(data, static_cast<char *>(t->data) + offset, bytes);
  };
  void *const memory = std::aligned_alloc(64, (size + 63) / 64 * 64);
  return ggml_backend_buffer_init(type, table, memory, size);
}
void ggml_backend_tensor_alloc(ggml_backend_buffer_t buffer, ggml_tensor *t, void *address) {
  t->buffer = buffer, t->data = address;
  if (buffer->iface.init_tensor) buffer->iface.init_tensor(buffer, t);
}
void ggml_backend_tensor_set(ggml_tensor *t, const void *data, size_t offset, size_t bytes) {
  const ggml_backend_buffer_t buffer = t->view_src ? t->view_src->buffer : t->buffer;
  buffer->iface.set_tensor(buffer, t, data, offset, bytes);
}
void ggml_backend_tensor_get(const ggml_tensor *t, void *data, size_t offset, size_t bytes) {
  const ggml_backend_buffer_t buffer = t->view_src ? t->view_src->buffer : t->buffer;
  buffer->iface.get_tensor(buffer, t, data, offset, bytes);
}
ggml_backend_buffer_type_t ggml_backend_cpu_buffer_type() { return &stub_host_memory; }
ggml_backend_reg_t ggml_backend_load(const char *path) {
  void *const module = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!module) {
    log_callback(GGML_LOG_LEVEL_ERROR, dlerror(), log_data);
    return nullptr;
  }
  const auto init = reinterpret_cast<ggml_backend_reg_t (*)()>(dlsym(module, "ggml_backend_init"));
  return loaded = init();
}
ggml_backend_reg_t ggml_backend_reg_by_name(const char *) { return loaded; }
}
