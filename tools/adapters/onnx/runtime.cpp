#include "runtime.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <regex>
#include <thread>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace mha_onnx {

void check(const OrtApi &api, OrtStatus *status) {
  if (status) {
    const std::unique_ptr<OrtStatus, void (*)(OrtStatus *)> held(status, api.ReleaseStatus);
    throw Failure{api.GetErrorMessage(status)};
  }
}

void check(mha_status status, const mha_error &error) {
  if (status != MHA_OK) {
    // The fields of mha_weight_format are attributes of their own.
    const std::regex type("format\\.type"), format("format\\.");
    throw Failure{
        std::regex_replace(std::regex_replace(error.message, type, "weight_type"), format, "")};
  }
}

std::string shape_of(const Tensor &tensor) {
  std::string text = "[";
  for (size_t i = 0; i < tensor.rank; i++) {
    text += (i ? ", " : "") + std::to_string(tensor.shape[i]);
  }
  return text + "]";
}

namespace {

Tensor tensor_of(const OrtApi &api, const OrtValue *value) {
  Tensor tensor;
  OrtTensorTypeAndShapeInfo *info;
  check(api, api.GetTensorTypeAndShape(value, &info));
  size_t rank = 0;
  OrtStatus *status = api.GetTensorElementType(info, &tensor.type);
  if (!status) {
    status = api.GetDimensionsCount(info, &rank);
  }
  const bool fits = rank <= std::size(tensor.shape);
  if (!status && fits) {
    status = api.GetDimensions(info, tensor.shape, rank);
  }
  api.ReleaseTensorTypeAndShapeInfo(info);
  check(api, status);
  if (!fits) {
    throw Failure{"a tensor has " + std::to_string(rank) +
                  " dimensions; no input here has more than 4"};
  }
  tensor.rank = rank;
  // ONNX Runtime has it so, too: this function does not write.
  void *data;
  check(api, api.GetTensorMutableData(const_cast<OrtValue *>(value), &data));
  static const char nothing = 0;
  tensor.data = data ? data : &nothing;  // an input of no elements is given all the same
  return tensor;
}

}  // namespace

std::string NodeInfo::name() const {
  size_t size = 0;
  check(api_, api_.KernelInfo_GetNodeName(info_, nullptr, &size));
  std::string text(size, '\0');
  check(api_, api_.KernelInfo_GetNodeName(info_, text.data(), &size));
  text.resize(size ? size - 1 : 0);
  return text;
}

bool NodeInfo::succeeds(OrtStatus *status) const {
  if (status) {
    api_.ReleaseStatus(status);
  }
  return !status;
}

void NodeInfo::expect_absent(const char *attribute, const char *wanted) const {
  int64_t integer;
  float number;
  size_t size = 0;
  const char *const is =
      succeeds(api_.KernelInfoGetAttribute_int64(info_, attribute, &integer))  ? "an integer"
      : succeeds(api_.KernelInfoGetAttribute_float(info_, attribute, &number)) ? "a float"
      : succeeds(api_.KernelInfoGetAttribute_string(info_, attribute, nullptr, &size)) ? "a string"
      : succeeds(api_.KernelInfoGetAttributeArray_int64(info_, attribute, nullptr, &size)) ||
              succeeds(api_.KernelInfoGetAttributeArray_float(info_, attribute, nullptr, &size))
          ? "an array"
          : nullptr;
  if (is) {
    throw Failure{std::string("the attribute ") + attribute + " is " + is + "; it has to be " +
                  wanted};
  }
}

int64_t NodeInfo::integer(const char *attribute, int64_t otherwise) const {
  int64_t value;
  if (succeeds(api_.KernelInfoGetAttribute_int64(info_, attribute, &value))) {
    return value;
  }
  expect_absent(attribute, "an integer");
  return otherwise;
}

float NodeInfo::number(const char *attribute, float otherwise) const {
  float value;
  if (succeeds(api_.KernelInfoGetAttribute_float(info_, attribute, &value))) {
    return value;
  }
  expect_absent(attribute, "a float");
  return otherwise;
}

std::string NodeInfo::text(const char *attribute, const char *otherwise) const {
  size_t size = 0;
  if (!succeeds(api_.KernelInfoGetAttribute_string(info_, attribute, nullptr, &size))) {
    expect_absent(attribute, "a string");
    return otherwise;
  }
  std::string value(size, '\0');
  check(api_, api_.KernelInfoGetAttribute_string(info_, attribute, value.data(), &size));
  value.resize(size ? size - 1 : 0);
  return value;
}

void NodeInfo::expect(const char *attribute, int64_t only) const {
  if (const int64_t value = integer(attribute, only); value != only) {
    throw Failure{std::string("the attribute ") + attribute + " is " + std::to_string(value) +
                  "; this operator takes only " + std::to_string(only)};
  }
}

void NodeInfo::expect(const char *attribute, const char *only) const {
  if (const std::string value = text(attribute, only); value != only) {
    throw Failure{std::string("the attribute ") + attribute + " is '" + value +
                  "'; this operator takes only '" + only + "'"};
  }
}

bool NodeInfo::has_input(size_t index) const {
  size_t count = 0;
  check(api_, api_.KernelInfo_GetInputCount(info_, &count));
  if (index >= count) {
    return false;
  }
  size_t size = 0;
  check(api_, api_.KernelInfo_GetInputName(info_, index, nullptr, &size));
  return size > 1;  // an input that is left out has the name ""
}

Tensor NodeInfo::constant(size_t index, const char *input) const {
  if (!has_input(index)) {
    return {};
  }
  int is_constant = 0;
  const OrtValue *value = nullptr;
  check(api_, api_.KernelInfoGetConstantInput_tensor(info_, index, &is_constant, &value));
  if (!is_constant || !value) {
    throw Failure{std::string(input) +
                  " is computed or given by the caller, but weights are packed when the session is "
                  "made, and have to be "
                  "constant: initialisers that are not inputs of the graph"};
  }
  return tensor_of(api_, value);
}

uint32_t ThreadCount::of(const OrtApi &api, const OrtKernelContext *context, int64_t rows) {
  // In four calls of the 1st, 2nd, 4th, 8th ..., or of one row from the 16th on: where other
  // programs are at work, a thread may come too late. One that is missing costs speed alone.
  const uint32_t cores = std::min(std::thread::hardware_concurrency(), 256u),
                 calls = calls_.fetch_add(1, std::memory_order_relaxed) + 1;
  const bool is_due = (calls & (calls - 1)) == 0 && (rows > 1 || calls >= 16);
  if (most_.load(std::memory_order_relaxed) < cores && is_due &&
      counts_.fetch_add(1, std::memory_order_relaxed) < 4) {
    // Tasks that wait for each other, for a millisecond: as many as come together are run by as
    // many threads.
    struct Meeting {
      uint32_t wanted;
      std::chrono::steady_clock::time_point end;
      std::atomic<uint32_t> present{0};
      std::atomic<bool> over{false};
    } meeting;
    meeting.wanted = cores;
    meeting.end = std::chrono::steady_clock::now() + std::chrono::milliseconds(1);
    const auto attend = [](void *data, size_t) {
      Meeting &m = *static_cast<Meeting *>(data);
      if (m.over) {
        return;
      }
      m.present++;
      while (!m.over && m.present < m.wanted && std::chrono::steady_clock::now() < m.end) {
      }
      m.over = true;
    };
    if (OrtStatus *status = api.KernelContext_ParallelFor(context, attend, cores, 0, &meeting)) {
      api.ReleaseStatus(status);  // no threads, then
    }
    const uint32_t present = meeting.present;
    for (uint32_t most = most_; most < present && !most_.compare_exchange_weak(most, present);) {
    }
  }
  return most_.load(std::memory_order_relaxed);
}

Call::Call(const OrtApi &api, OrtKernelContext *context, ThreadCount &threads)
    : api_(api), context_(context), threads_(threads) {
  check(api, api.KernelContext_GetInputCount(context, &inputs_));
  check(api, api.KernelContext_GetOutputCount(context, &outputs_));
  scheduler_.context = this;
  scheduler_.parallel_for = [](void *self, uint32_t count, void (*task)(void *, uint32_t),
                               void *task_context) {
    struct Tasks {
      void (*task)(void *, uint32_t);
      void *context;
    } tasks{task, task_context};
    static_cast<const Call *>(self)->run(
        count,
        [](void *data, size_t index) {
          const DefaultFloatingPoint default_floating_point;
          static_cast<Tasks *>(data)->task(static_cast<Tasks *>(data)->context,
                                           static_cast<uint32_t>(index));
        },
        &tasks);
  };
}

Call::~Call() {
  for (size_t i = 0; i < memories_; i++) {
    allocator_->Free(allocator_, memory_[i]);
  }
  if (allocator_) {
    api_.ReleaseAllocator(allocator_);
  }
}

const mha_scheduler *Call::scheduler(int64_t rows) {
  scheduler_.num_threads = threads_.of(api_, context_, rows);
  return scheduler_.num_threads > 1 ? &scheduler_ : nullptr;
}

void Call::run(size_t count, void (*task)(void *, size_t), void *data) const {
  // It fails before it has run anything, if ever: then all runs here, since a scheduler cannot
  // fail.
  if (OrtStatus *status = api_.KernelContext_ParallelFor(context_, task, count, 0, data)) {
    api_.ReleaseStatus(status);
    for (size_t i = 0; i < count; i++) {
      task(data, i);
    }
  }
}

Tensor Call::input(size_t index) const {
  const OrtValue *value = nullptr;
  if (index < inputs_) {
    check(api_, api_.KernelContext_GetInput(context_, index, &value));
  }
  return value ? tensor_of(api_, value) : Tensor{};
}

float *Call::output(size_t index, const int64_t *shape, size_t rank) const {
  OrtValue *value = nullptr;
  if (index < outputs_) {
    check(api_, api_.KernelContext_GetOutput(context_, index, shape, rank, &value));
  }
  if (!value) {
    return nullptr;
  }
  void *data;
  check(api_, api_.GetTensorMutableData(value, &data));
  return static_cast<float *>(data);
}

void *Call::memory(size_t bytes) {
  if (bytes == 0) {
    return nullptr;
  }
  if (!allocator_) {
    OrtMemoryInfo *info;
    check(api_, api_.CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &info));
    OrtStatus *status = api_.KernelContext_GetAllocator(context_, info, &allocator_);
    api_.ReleaseMemoryInfo(info);
    check(api_, status);
  }
  void *memory = nullptr;
  try {
    memory = memories_ < std::size(memory_) ? allocator_->Alloc(allocator_, bytes) : nullptr;
  } catch (...) {  // ONNX Runtime's arena throws
  }
  if (!memory) {
    throw Failure{"the session's allocator has no " + std::to_string(bytes) +
                  " bytes for the call"};
  }
  return memory_[memories_++] = memory;
}

#if defined(__SSE2__)
DefaultFloatingPoint::DefaultFloatingPoint() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
DefaultFloatingPoint::~DefaultFloatingPoint() { _mm_setcsr(static_cast<unsigned>(before_)); }
#elif defined(__aarch64__)
DefaultFloatingPoint::DefaultFloatingPoint() {
  asm volatile("mrs %0, fpcr\n\tmsr fpcr, xzr" : "=&r"(before_));
}
DefaultFloatingPoint::~DefaultFloatingPoint() { asm volatile("msr fpcr, %0" : : "r"(before_)); }
#else
DefaultFloatingPoint::DefaultFloatingPoint() : before_(0) {}
DefaultFloatingPoint::~DefaultFloatingPoint() {}
#endif

ScoreAttributes::ScoreAttributes(const NodeInfo &node)
    : scale(node.number("scale", 0)),
      softcap(node.number("softcap", 0)),
      causal(node.integer("is_causal", 0) != 0),
      window_left(node.integer("left_window_size", -1)),
      window_right(node.integer("right_window_size", -1)),
      mask_filter(node.number("mask_filter_value", -10000.0f)) {}

uint32_t ScoreAttributes::flags() const {
  return (causal ? MHA_CAUSAL : 0) | (window_left >= 0 ? MHA_WINDOW_LEFT : 0) |
         (window_right >= 0 ? MHA_WINDOW_RIGHT : 0);
}

namespace {

bool is_open(float number) { return number == 0.0f; }
bool is_closed(float number) { return number <= -1e30f; }
bool is_open(bool attends) { return attends; }
bool is_closed(bool attends) { return !attends; }

template <typename Number>
bool find_structure(const Number *mask, int64_t sequences, int64_t rows, int64_t batch,
                    int64_t n_kv, MaskStructure &found) {
  for (int64_t b = 0; b < sequences; b++) {
    // Of the keys that a row attends to, which begin at the first; 0 = it is not so.
    const auto end_of = [&](int64_t row) {
      const Number *const keys = mask + (b * rows + row) * n_kv, *const end = keys + n_kv;
      const Number *const last =
          std::find_if_not(keys, end, [](Number key) { return is_open(key); });
      return std::all_of(last, end, [](Number key) { return is_closed(key); }) ? last - keys : 0;
    };
    const int64_t first = end_of(0), length = rows == 1 ? first : end_of(rows - 1);
    if (first == 0 || length == 0 || first > length) {
      return false;
    }
    for (int64_t row = 1; row + 1 < rows; row++) {
      if (end_of(row) != std::min(length, first + row)) {
        return false;
      }
    }
    const bool is_causal = first < length;
    if (is_causal && length > first + rows - 1) {
      return false;
    }
    found.lengths[b] = length;
    found.starts[b] = is_causal ? first - 1 : n_kv;
    found.is_causal = found.is_causal || is_causal;
  }
  std::fill(found.lengths + sequences, found.lengths + batch, found.lengths[0]);
  std::fill(found.starts + sequences, found.starts + batch, found.starts[0]);
  return true;
}

}  // namespace

bool find_structure(const Tensor &mask, int64_t batch, int64_t n_q, int64_t n_kv,
                    MaskStructure &found) {
  int64_t shape[4] = {1, 1, 1, 1};
  if (!mask || mask.rank > 4 || batch == 0 || n_q == 0 || n_kv == 0) {
    return false;
  }
  std::copy(mask.shape, mask.shape + mask.rank, shape + 4 - mask.rank);
  if ((shape[0] != 1 && shape[0] != batch) || shape[1] != 1 || (shape[2] != 1 && shape[2] != n_q) ||
      shape[3] != n_kv) {
    return false;
  }
  if (mask.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) {
    return find_structure(mask.floats(), shape[0], shape[2], batch, n_kv, found);
  }
  return mask.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL &&
         find_structure(static_cast<const bool *>(mask.data), shape[0], shape[2], batch, n_kv,
                        found);
}

Tensor mask_of(Call &call, const Tensor &mask, int64_t batch, int64_t n_kv, float filter) {
  if (mask.type != ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32 || mask.rank != 1) {
    return mask;
  }
  const int64_t count = mask.shape[0];
  if (count != batch && count != 2 * batch && count != 3 * batch + 2) {
    throw Failure{"attn_mask is " + shape_of(mask) + "; as lengths it has to be [" +
                  std::to_string(batch) + "], [" + std::to_string(2 * batch) + "] or [" +
                  std::to_string(3 * batch + 2) + "]"};
  }
  const int32_t *const ends = static_cast<const int32_t *>(mask.data);
  float *added =
      static_cast<float *>(call.memory(static_cast<size_t>(batch * n_kv) * sizeof(float)));
  for (int64_t b = 0; b < batch; b++) {
    const int64_t first = count == 2 * batch ? ends[batch + b] : 0;
    for (int64_t key = 0; key < n_kv; key++) {
      added[b * n_kv + key] = key >= first && key < ends[b] ? 0.0f : filter;
    }
  }
  return {added, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, 4, {batch, 1, 1, n_kv}};
}

void set_mask(const Tensor &mask, int64_t batch, int64_t heads, int64_t n_q, int64_t n_kv,
              int64_t used, mha_score_arrays &arrays) {
  if (!mask) {
    return;
  }
  const int64_t full[4] = {batch, heads, n_q, n_kv};
  int64_t shape[4] = {1, 1, 1, 1}, strides[4] = {};
  bool fits = mask.rank >= 1 && mask.rank <= 4;
  for (size_t i = 0; fits && i < mask.rank; i++) {
    shape[4 - mask.rank + i] = mask.shape[i];
  }
  int64_t stride = 1;
  for (int i = 3; i >= 0; i--) {
    fits = fits && (i == 3 ? shape[i] <= n_kv && (shape[i] > 1 || shape[i] >= used)
                           : shape[i] == full[i] || shape[i] == 1);
    strides[i] = shape[i] == 1 ? MHA_BROADCAST : stride;
    stride *= shape[i];
  }
  if (!fits) {
    Tensor wanted;
    wanted.rank = 4;
    std::copy(full, full + 4, wanted.shape);
    throw Failure{
        "attn_mask is " + shape_of(mask) + ", but has to be " + shape_of(wanted) +
        " or to broadcast to it in all dimensions but the last, which may be shorter, not 1"};
  }
  arrays.num_columns = shape[3] < n_kv ? shape[3] : 0;
  const mha_strides by_array = {strides[0], strides[2], strides[1]};  // batch, row, head
  switch (mask.type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL:
      arrays.mask = static_cast<const uint8_t *>(mask.data), arrays.mask_strides = by_array;
      return;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT:
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16:
      arrays.bias.data = mask.data, arrays.bias.strides = by_array;
      arrays.bias.type =
          mask.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT ? MHA_TYPE_F32 : MHA_TYPE_F16;
      return;
    default:
      throw Failure{"attn_mask is of type " + std::to_string(mask.type) +
                    "; it has to be of bool (true attends), float or float16"};
  }
}

}  // namespace mha_onnx
