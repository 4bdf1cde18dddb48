// ONNX Runtime's C interface, as the operators use it: failures as exceptions, which each callback
// turns into a status.
#pragma once

#include <mha.h>
#include <onnxruntime_c_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <new>
#include <string>

namespace mha_onnx {

// What is asked for: the version that has all that is used here, of May 2024. Every later one has
// it too.
constexpr uint32_t kApiVersion = 18;

// What is wrong, in a sentence.
struct Failure {
  std::string sentence;
};

// Throws what a status says, and releases it.
void check(const OrtApi &api, OrtStatus *status);
// Throws an error of mha.
void check(mha_status status, const mha_error &error);

// Runs `body`; what it throws becomes a status. `node` is said before the sentence, if there is
// memory for it.
template <typename Body>
OrtStatus *guarded(const OrtApi &api, const std::string &node, Body body) try {
  try {
    body();
    return nullptr;
  } catch (const Failure &failure) {
    return api.CreateStatus(ORT_INVALID_ARGUMENT, (node + failure.sentence).c_str());
  } catch (const std::bad_alloc &) {
    return api.CreateStatus(ORT_FAIL, (node + "there is no memory").c_str());
  } catch (const std::exception &exception) {  // of ONNX Runtime's own, which is written in C++ too
    return api.CreateStatus(ORT_FAIL, (node + exception.what()).c_str());
  } catch (...) {
    return api.CreateStatus(ORT_FAIL,
                            (node + "something unknown went wrong in ONNX Runtime").c_str());
  }
} catch (const std::bad_alloc &) {
  return api.CreateStatus(ORT_FAIL, "mha: there is no memory");
}

// A tensor as a call sees it. An input that is not given has no data.
struct Tensor {
  const void *data = nullptr;
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  size_t rank = 0;
  int64_t shape[8] = {};

  explicit operator bool() const { return data != nullptr; }
  const float *floats() const { return static_cast<const float *>(data); }
};

std::string shape_of(const Tensor &tensor);

// What a node says of itself when its kernel is made.
class NodeInfo {
 public:
  NodeInfo(const OrtApi &api, const OrtKernelInfo *info) : api_(api), info_(info) {}
  std::string name() const;
  int64_t integer(const char *attribute, int64_t otherwise) const;
  float number(const char *attribute, float otherwise) const;
  std::string text(const char *attribute, const char *otherwise) const;
  // Attributes that another runtime's operator has and this one has not: throw where they say more
  // than nothing.
  void expect(const char *attribute, int64_t only) const;
  void expect(const char *attribute, const char *only) const;
  // A constant input; one that is given but not constant throws.
  Tensor constant(size_t index, const char *input) const;
  bool has_input(size_t index) const;

 private:
  // Whether a status is good, which it releases. An attribute that is not there is not told from
  // one of another type.
  bool succeeds(OrtStatus *status) const;
  // Throws if an attribute that could not be read is there, with another type.
  void expect_absent(const char *attribute, const char *wanted) const;

  const OrtApi &api_;
  const OrtKernelInfo *info_;
};

// Floating point as the library needs it, whatever the session has set
// (session.set_denormal_as_zero), as long as the object lives.
class DefaultFloatingPoint {
 public:
  DefaultFloatingPoint();
  ~DefaultFloatingPoint();

 private:
  uint64_t before_;
};

// How many threads a session has, which it tells nobody: counted at work, in a few calls. A call of
// one row is short, and counts late.
class ThreadCount {
 public:
  uint32_t of(const OrtApi &api, const OrtKernelContext *context, int64_t rows);

 private:
  std::atomic<uint32_t> most_{1}, calls_{0}, counts_{0};
};

// One run of a node.
class Call {
 public:
  Call(const OrtApi &api, OrtKernelContext *context, ThreadCount &threads);
  ~Call();
  Call(const Call &) = delete;
  Call &operator=(const Call &) = delete;

  Tensor input(size_t index) const;
  size_t outputs() const { return outputs_; }
  // NULL where the node has no such output.
  float *output(size_t index, const int64_t *shape, size_t rank) const;
  // Memory of the session's allocator, until the call ends; at most seven times. NULL for 0 bytes.
  void *memory(size_t bytes);
  // The session's threads, for a call of this many rows; NULL if one thread suffices.
  const mha_scheduler *scheduler(int64_t rows);
  // Runs task(i) for 0 <= i < count on them.
  template <typename Task>
  void parallel(size_t count, Task task) const {
    run(
        count,
        [](void *data, size_t index) {
          const DefaultFloatingPoint default_floating_point;
          (*static_cast<Task *>(data))(index);
        },
        &task);
  }

 private:
  void run(size_t count, void (*task)(void *, size_t), void *data) const;

  const OrtApi &api_;
  OrtKernelContext *context_;
  ThreadCount &threads_;
  size_t inputs_ = 0, outputs_ = 0;
  OrtAllocator *allocator_ = nullptr;
  void *memory_[7] = {};
  size_t memories_ = 0;
  mha_scheduler scheduler_ = {};
};

// What all operators say of masks and scores.
struct ScoreAttributes {
  explicit ScoreAttributes(const NodeInfo &node);
  float scale, softcap;
  bool causal;
  int64_t window_left, window_right;  // -1 = none
  float mask_filter;  // what a mask of lengths adds to the scores of keys that it leaves out

  uint32_t flags() const;
};

// An extent as the library takes it.
inline int64_t extent_of(int64_t count) { return count == 0 ? MHA_EMPTY : count; }

// A mask of int32 with one dimension has the lengths of sequences, as com.microsoft's operators
// take them: [batch], or [2 * batch] with each sequence's first key behind them, or [3 * batch +
// 2], of which the rest says nothing more. This makes [batch, 1, 1, n_kv] of it, in memory of the
// call: 0 or, where a key is left out, `filter`. Other masks are returned as they are.
Tensor mask_of(Call &call, const Tensor &mask, int64_t batch, int64_t n_kv, float filter);

// Puts attn_mask, [batch, heads, n_q, n_kv] or what broadcasts to it, into `arrays`. No row attends
// beyond the first `used` keys.
void set_mask(const Tensor &mask, int64_t batch, int64_t heads, int64_t n_q, int64_t n_kv,
              int64_t used, mha_score_arrays &arrays);

// What a mask array says, if that is no more than this: the query at row i attends to the keys
// before lengths[b] and, if is_causal, up to starts[b] + i; and each to some. Then no key is
// computed for nothing. Masks that are added have 0 there, elsewhere -1e30 or less, which takes
// part in no softmax beside others.
struct MaskStructure {
  bool is_causal = false;
  int64_t *starts, *lengths;  // [batch]
};
bool find_structure(const Tensor &mask, int64_t batch, int64_t n_q, int64_t n_kv,
                    MaskStructure &found);

// The operators. Each is a table of callbacks that lives as long as the process.
const OrtCustomOp *attention_operator();
const OrtCustomOp *grouped_query_operator();
const OrtCustomOp *layer_operator();
const OrtCustomOp *linear_attention_operator();
const OrtCustomOp *causal_conv_operator();

// The callbacks of an operator whose kernel is Kernel: made of (api, info), run by compute(Call &).
// Kernel has kName, kInputs, kOutputs, type_of(input) and is_optional(input); all outputs but the
// first are optional.
template <typename Kernel>
const OrtCustomOp *operator_of() {
  struct State {
    const OrtApi &api;
    Kernel kernel;
    std::string node;
    ThreadCount threads;
  };
  static const OrtCustomOp table = [] {
    OrtCustomOp op = {};
    op.version = kApiVersion;
    op.GetName = [](const OrtCustomOp *) { return Kernel::kName; };
    op.GetExecutionProviderType = [](const OrtCustomOp *) -> const char * { return nullptr; };
    op.GetInputTypeCount = [](const OrtCustomOp *) -> size_t { return Kernel::kInputs; };
    op.GetInputType = [](const OrtCustomOp *, size_t index) { return Kernel::type_of(index); };
    op.GetInputCharacteristic = [](const OrtCustomOp *, size_t index) {
      return Kernel::is_optional(index) ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
    };
    op.GetInputMemoryType = [](const OrtCustomOp *, size_t) { return OrtMemTypeDefault; };
    op.GetOutputTypeCount = [](const OrtCustomOp *) -> size_t { return Kernel::kOutputs; };
    op.GetOutputType = [](const OrtCustomOp *, size_t) {
      return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    };
    op.GetOutputCharacteristic = [](const OrtCustomOp *, size_t index) {
      return index ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
    };
    op.GetVariadicInputMinArity = [](const OrtCustomOp *) { return 0; };
    op.GetVariadicInputHomogeneity = [](const OrtCustomOp *) { return 0; };
    op.GetVariadicOutputMinArity = [](const OrtCustomOp *) { return 0; };
    op.GetVariadicOutputHomogeneity = [](const OrtCustomOp *) { return 0; };
    op.GetStartVersion = [](const OrtCustomOp *) { return 1; };
    op.GetEndVersion = [](const OrtCustomOp *) { return 1; };
    op.GetMayInplace = [](int **, int **) -> size_t { return 0; };
    op.ReleaseMayInplace = [](int *, int *) {};
    op.GetAliasMap = [](int **, int **) -> size_t { return 0; };
    op.ReleaseAliasMap = [](int *, int *) {};
    op.CreateKernelV2 = [](const OrtCustomOp *, const OrtApi *api, const OrtKernelInfo *info,
                           void **made) {
      const NodeInfo node(*api, info);
      std::string name;
      return guarded(*api, name, [&] {
        name = std::string("mha.") + Kernel::kName + ": ";
        if (const std::string given = node.name(); !given.empty()) {
          name = std::string("mha.") + Kernel::kName + " '" + given + "': ";
        }
        *made = new State{*api, Kernel(node), name, {}};
      });
    };
    op.KernelComputeV2 = [](void *made, OrtKernelContext *context) {
      State &state = *static_cast<State *>(made);
      return guarded(state.api, state.node, [&] {
        const DefaultFloatingPoint default_floating_point;
        Call call(state.api, context, state.threads);
        state.kernel.compute(call);
      });
    };
    op.KernelDestroy = [](void *made) { delete static_cast<State *>(made); };
    return op;
  }();
  return &table;
}

}  // namespace mha_onnx
