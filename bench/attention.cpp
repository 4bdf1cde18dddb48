// attention_prefill: the middle stage alone, mha_attention on plain rows.

#include "attention_case.h"
#include "groups.h"

namespace bench {
namespace {

support::AttentionProblem random_problem(const AttentionShape &shape, Change change) {
  support::LayerProblem sizes;
  sizes.n_q = sizes.n_kv = shape.n;
  sizes.num_heads = sizes.num_kv_heads = shape.heads;
  sizes.head_dim = sizes.head_dim_v = shape.head_dim;
  sizes.is_causal = shape.is_causal;
  if (change) change(&sizes);
  support::AttentionProblem problem;
  static_cast<support::AttentionSizes &>(problem) = sizes;
  support::Random random(1);
  for (std::vector<float> *x : {&problem.q, &problem.k, &problem.v}) *x = random.Uniforms(shape.floats(), 1.7f);
  return problem;
}

class AttentionCase : public Case {
 public:
  AttentionCase(const AttentionShape &shape, uint32_t set, Change change)
      : data_(random_problem(shape, change), {call_form(), set}), workspace_(data_.WorkspaceBytes(), support::Place::kLargePages) {
    mha_call_info info = support::Zeroed<mha_call_info>();
    support::Check(data_.Info(&info, &error_), error_);
    bytes = working_set_bytes = static_cast<double>(info.bytes);
    stages = {{static_cast<double>(info.operations), bytes}};
    instruction_set = set;
    if (change) return;
    stages = {{4 * static_cast<double>(shape.heads * shape.head_dim) * attending_pairs(1, shape.n, shape.is_causal),
               4.0 * sizeof(float) * static_cast<double>(shape.floats())}};
    expect_operations(info.operations);
  }

  void call() override { support::Check(mha_attention(&data_.args, workspace_.data(), workspace_.size(), &error_), error_); }

 private:
  support::AttentionData data_;
  const support::Memory workspace_;
  mha_error error_ = {};
};

}  // namespace

std::unique_ptr<Case> make_attention_case(const AttentionShape &shape, uint32_t instruction_set, Change change) {
  return std::make_unique<AttentionCase>(shape, instruction_set, change);
}

void register_attention_benchmarks(const Setting &setting) {
  for (const int64_t head_dim : {32, 64, 80, 96, 128}) {
    for (const bool is_causal : {true, false}) {
      for (int64_t n = 128; n <= 16384; n *= 2) {
        const AttentionShape shape = {n, n <= 2048 ? 4 : 2, head_dim, is_causal};  // fewer heads keep the long ones short
        const LayerShape as_layer = {1, n, shape.heads * head_dim, shape.heads, is_causal};
        add("attention_prefill/" + as_layer.name() + "/head_dim:" + std::to_string(head_dim),
            [=] { return make_attention_case(shape, setting.instruction_set); });
      }
    }
  }
}

}  // namespace bench
