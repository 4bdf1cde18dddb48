// Calls of mha_attention and mha_forward: their arrays, and the arguments that point at them.
#ifndef MHA_TESTS_SUPPORT_CALL_H
#define MHA_TESTS_SUPPORT_CALL_H

#include <mha.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "support/attention.h"
#include "support/layer.h"
#include "support/memory.h"
#include "support/outputs.h"
#include "support/strided.h"
#include "support/structs.h"

namespace support {

// A cache to append to and attend to. The extent of keys of the outputs that have one number per
// pair is then columns.
struct CacheUse {
  mha_kv_cache *cache = nullptr;
  std::vector<int64_t> sequences = {};  // [batch]; empty = not given
  int64_t columns = 0;
  bool read = false;  // as cache_read
};

// How the library is called; none of it may change a bit of the result.
struct CallForm {
  uint32_t asked = kAskAll;        // optional outputs, as far as the entry has them
  Place place = Place::kAnywhere;  // of every array
  const mha_scheduler *scheduler = nullptr;
  int workspace_fill = 0xff;
  size_t workspace_misalignment = 0;
  CacheUse cache;
  Storage output_array = Storage::kF32;  // the type of the output
};

// The types of inputs, which hold the numbers of the problem exactly.
struct AttentionCall : CallForm {
  uint32_t instruction_set = MHA_INSTRUCTION_SET_AUTO;
  Layout q = {}, k = {}, v = {}, output = {};
  Storage q_array = Storage::kF32, k_array = Storage::kF32, v_array = Storage::kF32;
};

struct LayerCall : CallForm {
  Layout query = {}, key = {}, value = {}, output = {};
  Storage input_array = Storage::kF32;
};

// An extent of a call as the library takes it.
inline int64_t ExtentOf(int64_t count) { return count == 0 ? MHA_EMPTY : count; }

// The bits of a number that f16 or bf16 holds exactly, or of NaN.
uint16_t BitsIn16(Storage type, float x);

// The number with these bits; all of them for all of a float's, which are of no number.
float FloatOf(Storage type, uint16_t bits);

// What calls of both entries have in common. `args` of the classes below may be changed before the
// call is made.
class CallData {
 public:
  virtual ~CallData();
  CallData(const CallData &) = delete;

  virtual mha_status Workspace(size_t *bytes, mha_error *error) const = 0;
  virtual mha_status Run(void *workspace, size_t bytes, mha_error *error) const = 0;
  virtual mha_status Info(mha_call_info *info, mha_error *error) const = 0;
  virtual void SetScheduler(const mha_scheduler *scheduler) = 0;

  size_t WorkspaceBytes() const;

  // Runs in a workspace of exactly the bytes that are needed.
  Outputs Compute(int workspace_fill = 0xff, Place place = Place::kBeforeGuard,
                  size_t misalignment = 0);

  // Of the last call.
  Outputs Results() const;
  virtual void PoisonOutputs();
  virtual bool OutputsAreUntouched() const;

  // Makes what a call may only read read-only, where it lies next to guards.
  void FreezeInputs();

  Strided output;
  // What args points at: sequences and outputs always, the others where the problem has something
  // of them. A call gets NULL for sequences and outputs that say nothing, as in a program without
  // them, unless gives_empty_structs.
  mha_sequences sequences = Zeroed<mha_sequences>();
  mha_outputs outputs = Zeroed<mha_outputs>();
  mha_rope rope = Zeroed<mha_rope>();
  mha_norm norm = Zeroed<mha_norm>();
  mha_score_options score = Zeroed<mha_score_options>();
  mha_score_arrays score_arrays = Zeroed<mha_score_arrays>();
  int64_t *q_start = nullptr;
  bool gives_empty_structs = false;

  // The arguments as a call gets them.
  template <typename Args>
  Args Given(Args args) const {
    const auto is_empty = [](const auto &given) {
      const auto zeroed = Zeroed<std::decay_t<decltype(given)>>();
      return std::memcmp(&given, &zeroed, sizeof given) == 0;
    };
    mha_sequences counted = sequences;
    if (counted.count == args.call.batch) counted.count = 0;
    if (!gives_empty_structs && args.call.sequences == &sequences && is_empty(counted))
      args.call.sequences = nullptr;
    if (!gives_empty_structs && args.call.outputs == &outputs && is_empty(outputs))
      args.call.outputs = nullptr;
    return args;
  }

 protected:
  explicit CallData(Place place) : place_(place) {}

  // All but the inputs and the output.
  template <typename Args>
  void SetArgs(const AttentionSizes &sizes, const CallForm &call, Args *args);

  template <typename T>
  mha_strides StridesOf(const AttentionSizes &sizes, const Pairs<T> &pairs,
                        int64_t natural_columns) const;

  // Null if there are none.
  template <typename T>
  T *Keep(const std::vector<T> &values) {
    if (values.empty()) return nullptr;
    inputs_.push_back(CopyOf(values, place_));
    return reinterpret_cast<T *>(inputs_.back().data());
  }

  const int32_t *KeepInt32(const std::vector<int64_t> &values);

  // x is [batch, rows, heads, width]; without heads, of which there is one, the array has no stride
  // of them. It becomes an array of the type, gaps included.
  void SetInput(const Layout &layout, Storage type, Storage type_by_default, int64_t batch,
                int64_t rows, int64_t heads, int64_t width, const std::vector<float> &x,
                mha_input *input, bool has_heads = true);

  void SetOutput(const Layout &layout, Storage type, int64_t batch, int64_t rows, int64_t heads,
                 int64_t width, mha_output *args_output, bool has_heads = true);

  // The number of the type, or 0 if it is the default and defaults are not written.
  uint32_t TypeField(Storage type, Storage by_default) const;

  const Place place_;
  bool writes_defaults_ = false;  // strides and types that 0 would stand for
  Storage output_type_ = Storage::kF32;
  Memory narrow_output_;  // where the output goes if it has no floats
  std::vector<Memory> inputs_;
  std::vector<std::pair<std::vector<float> Outputs::*, Memory>> optional_;
};

class AttentionData : public CallData {
 public:
  explicit AttentionData(const AttentionProblem &problem, AttentionCall call = {});
  ~AttentionData() override;

  mha_status Workspace(size_t *bytes, mha_error *error) const override;
  mha_status Run(void *workspace, size_t bytes, mha_error *error) const override;
  mha_status Info(mha_call_info *info, mha_error *error) const override;
  void SetScheduler(const mha_scheduler *scheduler) override { args.call.scheduler = scheduler; }

  mha_attention_args args;
};

class ForwardData : public CallData {
 public:
  ForwardData(const mha_layer *the_layer, const LayerProblem &problem, const LayerCall &call = {});
  ~ForwardData() override;

  mha_status Workspace(size_t *bytes, mha_error *error) const override;
  mha_status Run(void *workspace, size_t bytes, mha_error *error) const override;
  mha_status Info(mha_call_info *info, mha_error *error) const override;
  void SetScheduler(const mha_scheduler *scheduler) override { args.call.scheduler = scheduler; }

  const mha_layer *layer;
  mha_forward_args args;
};

Outputs Attend(const AttentionProblem &problem, const AttentionCall &call = {});

Outputs Forward(const mha_layer *layer, const LayerProblem &problem, const LayerCall &call = {});

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_CALL_H
