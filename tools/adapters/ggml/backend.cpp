// The module that ggml loads (GGML_BACKEND_PATH): one registry with two devices, accelerators that
// share the CPU's memory, so that the scheduler of ggml moves operations to them without copies.
//
//     MHA            What it supports is moved from the CPU to it.
//     MHA_WEIGHTS    llama.cpp puts weights into its buffers. Products with them follow to MHA.
//                    Their results lie in the CPU's buffers.
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <set>
#include <string>
#include <vector>

#include "attention.h"
#include "ggml-parts.h"
#include "products.h"
#include "recurrent.h"
#include "src/cpu.h"
#include "threads.h"

namespace mha_ggml {
namespace {

// Takes a format and values, as printf does. Warnings are notices, because programs of llama.cpp do
// not show what ggml calls information. MHA_GGML_QUIET, set to anything but 0, silences them.
__attribute__((format(printf, 2, 3))) void log(ggml_log_level level, const char *format, ...) {
  const char *const quiet = std::getenv("MHA_GGML_QUIET");
  if (level == GGML_LOG_LEVEL_WARN && quiet && *quiet && std::strcmp(quiet, "0") != 0) return;
  char text[1024];
  va_list values;
  va_start(values, format);
  std::vsnprintf(text, sizeof text, format, values);
  va_end(values);
  ggml_log_callback callback;
  void *user_data;
  ggml_log_get(&callback, &user_data);
  callback(level, text, user_data);
}

// Says what was taken of the model that was read last, in one line at the end of its first graph.
// llama.cpp asks about each matrix before it reads the model, and about all of them twice if it
// first measures how much memory they take.
class ModelReport {
 public:
  void ask(const ggml_tensor *matrix, bool is_taken) noexcept try {
    const std::lock_guard<std::mutex> guard(lock_);
    if (!is_due_) types_.clear(), computed_.clear();
    is_due_ = true;
    types_[matrix->name] = is_taken ? "" : ggml_type_name(matrix->type);
  } catch (const std::bad_alloc &) {
  }

  // By its name, which has the number of its layer.
  void count(const ggml_tensor *op) noexcept try {
    const std::lock_guard<std::mutex> guard(lock_);
    if (is_due_) computed_[op->op].insert(op->name);
  } catch (const std::bad_alloc &) {
  }

  void finish() noexcept try {
    const std::lock_guard<std::mutex> guard(lock_);
    if (!is_due_ || computed_.empty()) return;
    is_due_ = false;
    std::map<std::string, std::vector<std::string>> left;  // by types
    for (const auto &[name, type] : types_) left[type].push_back(name);
    const size_t taken = left[""].size(), recurrent = computed_[GGML_OP_GATED_DELTA_NET].size();
    left.erase("");
    std::string sentence =
        "attention of " + std::to_string(computed_[GGML_OP_FLASH_ATTN_EXT].size()) + " layers, ";
    if (recurrent > 0) sentence += "recurrent attention of " + std::to_string(recurrent) + ", ";
    sentence += std::to_string(taken) + " of " + std::to_string(types_.size()) + " matrices";
    const char *between = "; left to the CPU: ";
    for (const auto &[type, names] : left) {
      sentence += between + (names.size() == 1 ? names[0] : std::to_string(names.size())) + " (" +
                  type + ")";
      between = ", ";
    }
    log(GGML_LOG_LEVEL_WARN, "mha: %s\n", sentence.c_str());
  } catch (const std::bad_alloc &) {
  }

 private:
  std::mutex lock_;
  bool is_due_ = false;
  std::map<std::string, std::string> types_;  // of all matrices; "" of those that are taken
  std::map<ggml_op, std::set<std::string>> computed_;
} report;

ggml_backend_device devices[2];  // filled by ggml_backend_init

bool is_for_weights(ggml_backend_dev_t device) { return device == devices + 1; }

// ---- The backend: one for each context of llama.cpp

struct Backend {
  ggml_backend base;  // ggml's part; context is this
  Threads threads;
  Attention attention;
  Recurrent recurrent;
  Products products;
  ggml_backend_dev_t made_for;
};

Backend *backend_of(ggml_backend_t backend) { return static_cast<Backend *>(backend->context); }

const char *name_of_device(ggml_backend_dev_t device) {
  return is_for_weights(device) ? "MHA_WEIGHTS" : "MHA";
}

const char *name_of_backend(ggml_backend_t) { return "MHA"; }

// `-fa auto` of llama.cpp turns flash attention off if the operation is not computed by the device
// of its layer, the CPU. It asks while it makes a context: it makes the backends, a scheduler,
// which asks for buffer types that they support, and splits a graph; afterwards it synchronizes the
// scheduler for the first time. So from the first question to the synchronization, all on one
// thread, the operation is left to the CPU.
enum class Stage { kReady, kMade, kAsked };
thread_local Stage stage = Stage::kReady;

// The scheduler synchronizes a backend after each part of a graph that it computed, and all of them
// after the whole: that of MHA_WEIGHTS, too, which computes nothing as MHA comes first.
void synchronize(ggml_backend_t backend) {
  stage = Stage::kReady;
  if (is_for_weights(backend_of(backend)->made_for)) report.finish();
}

void free_backend(ggml_backend_t backend) {
  stage = Stage::kReady;
  delete backend_of(backend);
}

// Returns NULL, or what failed.
const char *compute(Backend &self, const ggml_tensor *op) {
  try {
    switch (op->op) {
      case GGML_OP_FLASH_ATTN_EXT:
        return self.attention.compute(op, self.threads.scheduler());
      case GGML_OP_GATED_DELTA_NET:
        return self.recurrent.compute(op, self.threads.scheduler());
      case GGML_OP_MUL_MAT:
        return self.products.compute(op, self.threads.scheduler());
      case GGML_OP_GET_ROWS:
        return self.products.get_rows(op);
      default:
        return nullptr;
    }
  } catch (const std::bad_alloc &) {
    return "there is not enough memory";
  }
}

ggml_status compute_graph(ggml_backend_t backend, ggml_cgraph *graph) {
  stage = Stage::kReady;
  for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
    const ggml_tensor *const op = ggml_graph_node(graph, i);
    if ((op->flags & GGML_TENSOR_FLAG_COMPUTE) == 0) continue;
    report.count(op);
    if (const char *const reason = compute(*backend_of(backend), op)) {
      log(GGML_LOG_LEVEL_ERROR, "mha: %s \"%s\" failed: %s\n", ggml_op_name(op->op), op->name,
          reason);
      return GGML_STATUS_FAILED;
    }
  }
  return GGML_STATUS_SUCCESS;
}

void set_n_threads(ggml_backend_t backend, int n_threads) {
  try {
    backend_of(backend)->threads.set_count(n_threads);
  } catch (const std::bad_alloc &) {  // one thread is left
  }
}

// ---- The devices

const char *describe_device(ggml_backend_dev_t device) {
  return is_for_weights(device) ? "mha: packed weights" : "mha: attention and products";
}

ggml_backend_dev_type type_of_device(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_ACCEL; }

void memory_of_device(ggml_backend_dev_t, size_t *free, size_t *total) {
  *free = *total = 0;  // no memory of its own
}

void properties_of_device(ggml_backend_dev_t device, ggml_backend_dev_props *properties) {
  *properties = {};
  properties->name = name_of_device(device);
  properties->description = describe_device(device);
  properties->type = type_of_device(device);
  properties->caps.mmap_support = true;  // of other tensors
}

ggml_backend_t make_backend(ggml_backend_dev_t device, const char *) {
  static ggml_guid guid = {0x6d, 0x68, 0x61, 0x2d, 0x67, 0x67, 0x6d, 0x6c,
                           0x2d, 0x62, 0x61, 0x63, 0x6b, 0x65, 0x6e, 0x64};
  ggml_backend_i table = {};
  table.get_name = name_of_backend, table.free = free_backend, table.synchronize = synchronize;
  table.graph_compute = compute_graph;
  Backend *const backend =
      new (std::nothrow) Backend{{&guid, table, devices, nullptr}, {}, {}, {}, {}, device};
  if (!backend) return nullptr;
  backend->base.context = backend;
  stage = Stage::kMade;
  return &backend->base;
}

ggml_backend_buffer_type_t packed_type() { return type_of_weights(devices + 1); }

ggml_backend_buffer_type_t buffer_type(ggml_backend_dev_t device) {
  return is_for_weights(device) ? packed_type() : ggml_backend_cpu_buffer_type();
}

bool supports(const ggml_tensor *op) {
  switch (op->op) {
    case GGML_OP_NONE:
    case GGML_OP_RESHAPE:
    case GGML_OP_VIEW:
    case GGML_OP_PERMUTE:
    case GGML_OP_TRANSPOSE:
      return true;  // nothing to compute
    case GGML_OP_FLASH_ATTN_EXT:
      return stage != Stage::kAsked && Attention::supports(op);
    case GGML_OP_GATED_DELTA_NET:  // which llama.cpp of ggml 0.15 asks about in the same way
      return stage != Stage::kAsked && Recurrent::supports(op);
    case GGML_OP_MUL_MAT:
    case GGML_OP_GET_ROWS:
      return Products::supports(op, packed_type());
    default:
      return false;
  }
}

bool supports_op(ggml_backend_dev_t device, const ggml_tensor *op) {
  const bool is_supported = supports(op);
  if (is_for_weights(device) && (op->op == GGML_OP_MUL_MAT || op->op == GGML_OP_MUL_MAT_ID)) {
    report.ask(op->src[0], is_supported);
  }
  return is_supported;
}

bool supports_buffer_type(ggml_backend_dev_t, ggml_backend_buffer_type_t type) {
  if (stage == Stage::kMade) stage = Stage::kAsked;
  return ggml_backend_buft_is_host(type) || type == packed_type();
}

// ---- The registry

const char *name_of_registry(ggml_backend_reg_t) { return "MHA"; }
size_t count_devices(ggml_backend_reg_t) { return 2; }

ggml_backend_dev_t get_device(ggml_backend_reg_t, size_t index) { return devices + index; }

void *function_of(ggml_backend_reg_t, const char *name) {
  return std::strcmp(name, "ggml_backend_set_n_threads") == 0
             ? reinterpret_cast<void *>(set_n_threads)
             : nullptr;
}

ggml_backend_reg registry = {
    GGML_BACKEND_API_VERSION, {name_of_registry, count_devices, get_device, function_of}, nullptr};

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
  const auto differ = [](const auto &numbers, const char *const *names, auto name_of) {
    for (const auto number : numbers) {
      const std::string found = name_of(number), expected = *names++;
      if (found != expected) return "ggml has " + found + " where this module expects " + expected;
    }
    return std::string();
  };
  const ggml_op ops[] = {GGML_OP_NONE,           GGML_OP_RESHAPE,    GGML_OP_VIEW,
                         GGML_OP_PERMUTE,        GGML_OP_TRANSPOSE,  GGML_OP_FLASH_ATTN_EXT,
                         GGML_OP_MUL_MAT,        GGML_OP_MUL_MAT_ID, GGML_OP_GET_ROWS,
                         GGML_OP_GATED_DELTA_NET};
  const char *const names_of_ops[] = {"NONE",      "RESHAPE",        "VIEW",    "PERMUTE",
                                      "TRANSPOSE", "FLASH_ATTN_EXT", "MUL_MAT", "MUL_MAT_ID",
                                      "GET_ROWS",  "GATED_DELTA_NET"};
  const ggml_type types[] = {GGML_TYPE_F32,  GGML_TYPE_F16,  GGML_TYPE_BF16, GGML_TYPE_Q8_0,
                             GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1,
                             GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K};
  const char *const names_of_types[] = {"f32",  "f16",  "bf16", "q8_0", "q4_0", "q4_1",
                                        "q5_0", "q5_1", "q4_K", "q5_K", "q6_K"};
  const std::string other = differ(ops, names_of_ops, ggml_op_name);
  return other.empty() ? differ(types, names_of_types, ggml_type_name) : other;
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
#if defined(__linux__) && defined(__x86_64__)
  syscall(SYS_arch_prctl, 0x1023, 18);  // for AMX, as mha_extra.h says
#endif
  ggml_backend_device_i table = {};
  table.get_name = name_of_device, table.get_description = describe_device;
  table.get_memory = memory_of_device, table.get_type = type_of_device;
  table.get_props = properties_of_device, table.init_backend = make_backend;
  table.get_buffer_type = buffer_type;
  table.supports_op = supports_op, table.supports_buft = supports_buffer_type;
  for (ggml_backend_device &device : devices) device = {table, &registry, nullptr};
  const mha::Kernels *kernels = nullptr;
  mha::choose_kernels(mha::Reporter(nullptr), MHA_INSTRUCTION_SET_AUTO, &kernels);
  log(GGML_LOG_LEVEL_WARN, "mha: loaded MHA backend, version %u.%u.%u with %s\n", MHA_VERSION_MAJOR,
      MHA_VERSION_MINOR, MHA_VERSION_PATCH, mha_instruction_set_name(kernels->instruction_set));
  return &registry;
}
