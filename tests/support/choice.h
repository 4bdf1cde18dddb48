// Calls of mha_choose_keys.
#ifndef MHA_TESTS_SUPPORT_CHOICE_H
#define MHA_TESTS_SUPPORT_CHOICE_H

#include <mha.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "support/call.h"
#include "support/packed_sequences.h"
#include "support/specify.h"

namespace support {

// The index heads of a problem with one kv head, and what they choose by.
struct ChoiceProblem : AttentionProblem {
  std::vector<float> weights;  // [batch, n_q, num_heads]
  int64_t num_chosen = 1;
};

// What comes out: the choice as `lse`, [batch, n_q, num_chosen], and the index scores as `scores`,
// [batch, n_q, n_kv].
inline std::vector<int32_t> ChosenOf(const Outputs &outputs) {
  std::vector<int32_t> chosen(outputs.lse.size());
  if (!chosen.empty())
    std::memcpy(chosen.data(), outputs.lse.data(), chosen.size() * sizeof(int32_t));
  return chosen;
}

// A call: the arguments of the attention within are `args`. asked: kAskScores or nothing.
class ChoiceData : public AttentionData {
 public:
  explicit ChoiceData(const ChoiceProblem &problem, AttentionCall call = {},
                      int64_t weights_gap = 0)
      : AttentionData(problem, WithoutOutputs(call)), choice(Zeroed<mha_choose_keys_args>()) {
    args.num_kv_heads = args.head_dim_v = 0;
    args.v = {};
    args.output = {};
    args.call.outputs = nullptr;
    output = {};
    const int64_t rows = problem.batch * problem.n_q, heads = problem.num_heads,
                  stride = heads + weights_gap;
    std::vector<float> weights(rows > 0 ? (rows - 1) * stride + heads : 0, FromBits(0x7fc0dead));
    for (int64_t row = 0; row < rows; row++) {
      std::copy(problem.weights.begin() + row * heads, problem.weights.begin() + (row + 1) * heads,
                weights.begin() + row * stride);
    }
    choice.attention = &args;
    choice.weights.data = Keep(weights);
    choice.weights.type = TypeField(Storage::kF32, Storage::kF32);
    if (weights_gap != 0) choice.weights.strides = {problem.n_q * stride, stride, 0};
    choice.num_chosen = problem.num_chosen;
    const int64_t columns = call.cache.cache ? call.cache.columns : problem.n_kv;
    optional_.emplace_back(
        &Outputs::lse,
        Memory(static_cast<size_t>(rows * problem.num_chosen) * sizeof(int32_t), place_));
    choice.chosen_keys = reinterpret_cast<int32_t *>(optional_.back().second.data());
    if ((call.asked & kAskScores) == 0) return;
    optional_.emplace_back(&Outputs::scores,
                           Memory(static_cast<size_t>(rows * columns) * sizeof(float), place_));
    choice.index_scores = optional_.back().second.floats();
  }

  mha_status Workspace(size_t *bytes, mha_error *error) const override {
    return mha_choose_keys_workspace(&choice, bytes, error);
  }
  mha_status Run(void *workspace, size_t bytes, mha_error *error) const override {
    return mha_choose_keys(&choice, workspace, bytes, error);
  }

  mha_choose_keys_args choice;

 private:
  static AttentionCall WithoutOutputs(AttentionCall call) {
    call.asked = kAskNothing;
    return call;
  }
};

inline Outputs Choose(const ChoiceProblem &problem, const AttentionCall &call = {}) {
  return ChoiceData(problem, call, problem.n_q % 3).Compute();
}

inline Outputs Specify(const ChoiceProblem &problem) {
  const int64_t heads = problem.num_heads, count = problem.num_chosen,
                rows = problem.batch * problem.n_q;
  std::vector<int32_t> all_chosen(rows * count, -1);
  Outputs outputs;
  outputs.scores.assign(rows * problem.n_kv, -std::numeric_limits<float>::infinity());
  const std::optional<Norm> norm = NormOf(problem);
  for (int64_t b = 0; b < problem.batch; b++) {
    const ValidRows valid = ValidRowsOf(problem, b);
    const int64_t q_row = b * problem.n_q + valid.q_first,
                  kv_row = b * problem.n_kv + valid.kv_first;
    std::vector<float> scores(valid.n_q * valid.n_kv);
    WithRotation(problem, b, [&](const Rotation *rotation) {
      AttentionShape shape = ShapeOf(problem, b);
      shape.norm = norm ? &*norm : nullptr;
      shape.rotation = rotation;
      spec::Fastest().choose_keys(shape, problem.q.data() + q_row * heads * problem.head_dim,
                                  problem.k.data() + kv_row * problem.head_dim,
                                  problem.weights.data() + q_row * heads, count, scores.data(),
                                  all_chosen.data() + q_row * count);
    });
    for (int64_t i = 0; i < valid.n_q; i++) {
      std::copy_n(scores.begin() + i * valid.n_kv, valid.n_kv,
                  outputs.scores.begin() + (q_row + i) * problem.n_kv + valid.kv_first);
    }
  }
  outputs.lse.resize(all_chosen.size());
  if (!all_chosen.empty())
    std::memcpy(outputs.lse.data(), all_chosen.data(), all_chosen.size() * sizeof(int32_t));
  return outputs;
}

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_CHOICE_H
