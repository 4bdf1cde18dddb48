// Valid calls of both entries, small and with everything that can be given, which the tests of errors and of sizes change.
#ifndef MHA_TESTS_INTERFACE_CALLS_H
#define MHA_TESTS_INTERFACE_CALLS_H

#include "interface_support.h"

namespace interface_support {

inline constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
inline constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Names the tests of a table.
template <typename Case>
std::string CaseName(const testing::TestParamInfo<Case> &info) {
  return info.param.name;
}

// Everything that can be given is given: different key and value, q_start, a scheduler, all optional outputs.
struct ForwardCall {
  ForwardCall()
      : layer_data(LayerShape{}), layer(Create(layer_data)), data(LayerShape{}, Shape(), layer.get()), args(data.args), scheduler(3) {
    args.scheduler = &scheduler.scheduler;
  }
  static CallShape Shape() {
    CallShape shape;
    shape.q_start = true;
    shape.outputs = kForwardOutputs;
    return shape;
  }
  LayerData layer_data;
  LayerPointer layer;
  ForwardData data;
  mha_forward_args args;
  SerialScheduler scheduler;
};

struct AttentionCall {
  AttentionCall() : data(HeadsShape{}, Shape()), args(data.args), scheduler(3) { args.scheduler = &scheduler.scheduler; }
  static CallShape Shape() {
    CallShape shape;
    shape.q_start = true;
    shape.outputs = kAttentionOutputs;
    return shape;
  }

  AttentionData data;
  mha_attention_args args;
  SerialScheduler scheduler;
};

// Both entries check in the same way; the parameters' numbers differ.
inline mha_status CallWorkspace(const ForwardCall &c, size_t *bytes, mha_error *e) {
  return mha_forward_workspace(c.layer.get(), &c.args, bytes, e);
}
inline mha_status CallWorkspace(const AttentionCall &c, size_t *bytes, mha_error *e) { return mha_attention_workspace(&c.args, bytes, e); }
inline mha_status CallInfo(const ForwardCall &c, mha_call_info *info, mha_error *e) { return mha_info(c.layer.get(), &c.args, info, e); }
inline mha_status CallInfo(const AttentionCall &c, mha_call_info *info, mha_error *e) { return mha_attention_info(&c.args, info, e); }
inline mha_status CallRun(const ForwardCall &c, void *workspace, size_t bytes, mha_error *e) {
  return mha_forward(c.layer.get(), &c.args, workspace, bytes, e);
}
inline mha_status CallRun(const AttentionCall &c, void *workspace, size_t bytes, mha_error *e) {
  return mha_attention(&c.args, workspace, bytes, e);
}

}  // namespace interface_support

#endif  // MHA_TESTS_INTERFACE_CALLS_H
