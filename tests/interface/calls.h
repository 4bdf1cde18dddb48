// Valid calls of both entries, small and with everything that can be given, which the tests of
// errors and of sizes change.
#ifndef MHA_TESTS_INTERFACE_CALLS_H
#define MHA_TESTS_INTERFACE_CALLS_H

#include "support/interface_support.h"

namespace support {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Names the tests of a table.
template <typename Case>
std::string CaseName(const testing::TestParamInfo<Case> &info) {
  return info.param.name;
}

inline LayerProblem FullProblem() {
  LayerProblem problem = SmallLayer();
  problem.q_start = {1, 2};
  return problem;
}

// Everything that can be given is given: different key and value, first positions, a scheduler, all
// optional outputs. Tests change batch alone, so count follows it.
struct FullForward {
  FullForward() {
    data.SetScheduler(&scheduler.scheduler);
    data.sequences.count = 0;
  }

  const LayerProblem problem = FullProblem();
  const Layer layer = Create(LayerData(problem));
  SerialScheduler scheduler{3};
  ForwardData data{layer.get(), problem, {Guarded(kAskAll)}};
  mha_forward_args &args = data.args;
};

struct FullAttention {
  FullAttention() {
    data.SetScheduler(&scheduler.scheduler);
    data.sequences.count = 0;
  }

  SerialScheduler scheduler{3};
  AttentionData data{NormalAttention(FullProblem()), {Guarded(kAskAll)}};
  mha_attention_args &args = data.args;
};

}  // namespace support

#endif  // MHA_TESTS_INTERFACE_CALLS_H
