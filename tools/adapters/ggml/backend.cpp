// The module that ggml loads (GGML_BACKEND_PATH): one registry with one device. The device is an
// accelerator in the CPU's memory, so that the scheduler of ggml moves operations which it supports
// from the CPU to it.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <string>

#include "attention.h"
#include "ggml-parts.h"
#include "threads.h"

namespace mha_ggml {
namespace {

template <class... Arguments>
void log(ggml_log_level level, const char *format, Arguments... arguments) {
  char text[512];
  std::snprintf(text, sizeof text, format, arguments...);
  ggml_log_callback callback;
  void *user_data;
  ggml_log_get(&callback, &user_data);
  callback(level, text, user_data);
}

// ---- The backend: what a context of llama.cpp has of its own

struct Backend {
  ggml_backend base;  // ggml's part; context is this
  Threads threads;
  Attention attention;
};

Backend *backend_of(ggml_backend_t backend) { return static_cast<Backend *>(backend->context); }

const char *name_of_backend(ggml_backend_t) { return "MHA"; }

// `-fa auto` of llama.cpp turns flash attention off if the operation is not computed by the device
// of its layer, the CPU. It asks while it makes a context: it makes the backends, a scheduler,
// which asks for buffer types that they support, and splits a graph; afterwards it synchronizes the
// scheduler for the first time. So from the first question to the synchronization, all on one
// thread, the operation is left to the CPU.
enum class Stage { kReady, kMade, kAsked };
thread_local Stage stage = Stage::kReady;

void synchronize(ggml_backend_t) { stage = Stage::kReady; }

void free_backend(ggml_backend_t backend) {
  stage = Stage::kReady;
  delete backend_of(backend);
}

// Of each split of a graph, before it is computed.
template <class Body>
bool for_each_operation(ggml_cgraph *graph, const Body &body) {
  for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
    const ggml_tensor *const node = ggml_graph_node(graph, i);
    if (node->op == GGML_OP_FLASH_ATTN_EXT && !body(node)) return false;
  }
  return true;
}

// Older versions of ggml have no third parameter.
void prepare_graph(ggml_backend_t backend, ggml_cgraph *graph,
                   ggml_backend_graph_optimize_params *) {
  Backend &self = *backend_of(backend);
  for_each_operation(graph, [&](const ggml_tensor *op) {
    self.attention.reserve(op, self.threads.scheduler());
    return true;
  });
}

ggml_status compute_graph(ggml_backend_t backend, ggml_cgraph *graph) {
  stage = Stage::kReady;
  Backend &self = *backend_of(backend);
  const bool is_done = for_each_operation(graph, [&](const ggml_tensor *op) {
    if ((op->flags & GGML_TENSOR_FLAG_COMPUTE) == 0) return true;
    const char *reason;
    try {
      reason = self.attention.compute(op, self.threads.scheduler());
    } catch (const std::bad_alloc &) {
      reason = "there is no memory to read the mask";
    }
    if (reason) log(GGML_LOG_LEVEL_ERROR, "mha: attention \"%s\" failed: %s\n", op->name, reason);
    return !reason;
  });
  return is_done ? GGML_STATUS_SUCCESS : GGML_STATUS_FAILED;
}

void set_n_threads(ggml_backend_t backend, int n_threads) {
  try {
    backend_of(backend)->threads.set_count(n_threads);
  } catch (const std::bad_alloc &) {  // one thread is left
  }
}

// ---- The device

const char *name_of_device(ggml_backend_dev_t) { return "MHA"; }
const char *describe_device(ggml_backend_dev_t) { return "multi-head attention of mha"; }
ggml_backend_dev_type type_of_device(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_ACCEL; }

void memory_of_device(ggml_backend_dev_t, size_t *free, size_t *total) {
  *free = *total = 0;  // no memory of its own
}

void properties_of_device(ggml_backend_dev_t device, ggml_backend_dev_props *properties) {
  properties->name = name_of_device(device);
  properties->description = describe_device(device);
  properties->memory_free = properties->memory_total = 0;
  properties->type = type_of_device(device);
  properties->device_id = nullptr;
  properties->caps = {false, false, true, false, true};
}

ggml_backend_t make_backend(ggml_backend_dev_t device, const char *) {
  static ggml_guid guid = {0x6d, 0x68, 0x61, 0x2d, 0x67, 0x67, 0x6d, 0x6c,
                           0x2d, 0x62, 0x61, 0x63, 0x6b, 0x65, 0x6e, 0x64};
  ggml_backend_i table = {};
  table.get_name = name_of_backend, table.free = free_backend, table.synchronize = synchronize;
  table.graph_compute = compute_graph, table.graph_optimize = prepare_graph;
  Backend *backend = nullptr;
  try {
    backend = new Backend{{&guid, table, device, nullptr}, {}, {}};
  } catch (const std::bad_alloc &) {
    log(GGML_LOG_LEVEL_ERROR, "mha: there is no memory for a backend\n");
    return nullptr;
  }
  backend->base.context = backend;
  stage = Stage::kMade;
  return &backend->base;
}

ggml_backend_buffer_type_t buffer_type(ggml_backend_dev_t) {
  return ggml_backend_cpu_buffer_type();
}

ggml_backend_buffer_t buffer_from_host_ptr(ggml_backend_dev_t, void *data, size_t bytes, size_t) {
  return ggml_backend_cpu_buffer_from_ptr(data, bytes);
}

bool supports_op(ggml_backend_dev_t, const ggml_tensor *op) {
  switch (op->op) {
    case GGML_OP_NONE:
    case GGML_OP_RESHAPE:
    case GGML_OP_VIEW:
    case GGML_OP_PERMUTE:
    case GGML_OP_TRANSPOSE:
      return true;  // nothing to compute
    default:
      return stage != Stage::kAsked && Attention::supports(op);
  }
}

bool supports_buffer_type(ggml_backend_dev_t, ggml_backend_buffer_type_t type) {
  if (stage == Stage::kMade) stage = Stage::kAsked;
  return ggml_backend_buft_is_host(type);
}

// ---- The registry

const char *name_of_registry(ggml_backend_reg_t) { return "MHA"; }
size_t count_devices(ggml_backend_reg_t) { return 1; }

ggml_backend_dev_t device_of(ggml_backend_reg_t registry, size_t) {
  static ggml_backend_device device = [registry] {
    ggml_backend_device_i table = {};
    table.get_name = name_of_device, table.get_description = describe_device;
    table.get_memory = memory_of_device, table.get_type = type_of_device;
    table.get_props = properties_of_device, table.init_backend = make_backend;
    table.get_buffer_type = buffer_type, table.buffer_from_host_ptr = buffer_from_host_ptr;
    table.supports_op = supports_op, table.supports_buft = supports_buffer_type;
    return ggml_backend_device{table, registry, nullptr};
  }();
  return &device;
}

void *function_of(ggml_backend_reg_t, const char *name) {
  return std::strcmp(name, "ggml_backend_set_n_threads") == 0
             ? reinterpret_cast<void *>(set_n_threads)
             : nullptr;
}

// ---- Compatibility. The version of ggml's interface for backends covers neither the numbers of
// operations and types nor the layout of tensors, so they are compared with those of the header.

std::string difference() {
  int major = -1, minor = -1;
  std::sscanf(ggml_version(), "%d.%d", &major, &minor);
  if (major != 0 || minor < GGML_PARTS_FIRST_MINOR || minor > GGML_PARTS_LAST_MINOR) {
    return std::string("ggml's version is ") + ggml_version() + ", and this module is for 0." +
           std::to_string(GGML_PARTS_FIRST_MINOR) + " to 0." +
           std::to_string(GGML_PARTS_LAST_MINOR);
  }
  constexpr size_t kOverhead = 32 + sizeof(ggml_tensor);  // of ggml_object and ggml_tensor
  if (ggml_tensor_overhead() != kOverhead) {
    return "ggml_tensor_overhead() is " + std::to_string(ggml_tensor_overhead()) + ", and not " +
           std::to_string(kOverhead);
  }
  const struct {
    const char *found, *expected;
  } names[] = {{ggml_op_name(GGML_OP_NONE), "NONE"},
               {ggml_op_name(GGML_OP_RESHAPE), "RESHAPE"},
               {ggml_op_name(GGML_OP_VIEW), "VIEW"},
               {ggml_op_name(GGML_OP_PERMUTE), "PERMUTE"},
               {ggml_op_name(GGML_OP_TRANSPOSE), "TRANSPOSE"},
               {ggml_op_name(GGML_OP_FLASH_ATTN_EXT), "FLASH_ATTN_EXT"},
               {ggml_type_name(GGML_TYPE_F32), "f32"},
               {ggml_type_name(GGML_TYPE_F16), "f16"},
               {ggml_type_name(GGML_TYPE_BF16), "bf16"},
               {ggml_type_name(GGML_TYPE_Q8_0), "q8_0"}};
  for (const auto &name : names) {
    if (std::strcmp(name.found, name.expected) != 0)
      return std::string("ggml has ") + name.found + " where this module expects " + name.expected;
  }
  return "";
}

}  // namespace
}  // namespace mha_ggml

extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init() {
  using namespace mha_ggml;
  const std::string why = difference();
  if (!why.empty()) {
    log(GGML_LOG_LEVEL_ERROR,
        "mha: this ggml is not used: %s; take the module for it, or build one from source\n",
        why.c_str());
    return nullptr;
  }
  static ggml_backend_reg registry = {
      GGML_BACKEND_API_VERSION, {name_of_registry, count_devices, device_of, function_of}, nullptr};
  return &registry;
}
