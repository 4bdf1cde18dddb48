// attention_prefill: the middle stage alone, mha_attention on plain rows; int16: in integers, in
// turns with f32.

#include "groups.h"
#include "layer_case.h"

namespace bench {
namespace {

struct AttentionShape {
  int64_t n, heads, head_dim;
  bool is_causal, is_in_integers = false;

  int64_t floats() const { return n * heads * head_dim; }
};

support::AttentionProblem random_problem(const AttentionShape &shape) {
  support::AttentionProblem problem;
  problem.n_q = problem.n_kv = shape.n;
  problem.num_heads = problem.num_kv_heads = shape.heads;
  problem.head_dim = problem.head_dim_v = shape.head_dim;
  problem.is_causal = shape.is_causal;
  problem.is_in_integers = shape.is_in_integers;
  support::Random random(1);
  for (std::vector<float> *x : {&problem.q, &problem.k, &problem.v})
    *x = random.Uniforms(shape.floats(), 1.7f);
  return problem;
}

class AttentionCase : public Case {
 public:
  AttentionCase(const AttentionShape &shape, uint32_t set)
      : data_(random_problem(shape), {call_form(), set}),
        workspace_(data_.WorkspaceBytes(), support::Place::kLargePages) {
    mha_call_info info = support::Zeroed<mha_call_info>();
    support::Check(data_.Info(&info, &error_), error_);
    bytes = working_set_bytes = 4.0 * sizeof(float) * static_cast<double>(shape.floats());
    stages = {{4 * static_cast<double>(shape.heads * shape.head_dim) *
                   attending_pairs(1, shape.n, shape.is_causal),
               bytes}};
    instruction_set = set;
    in_integers = shape.is_in_integers;
    expect_operations(info.operations);
  }

  void call() override {
    support::Check(mha_attention(&data_.args, workspace_.data(), workspace_.size(), &error_),
                   error_);
  }

 private:
  support::AttentionData data_;
  const support::Memory workspace_;
  mha_error error_ = {};
};

}  // namespace

const Group attention_benchmarks([](const Setting &setting) {
  for (const int64_t head_dim : {32, 64, 80, 96, 128}) {
    for (const bool is_causal : {true, false}) {
      for (int64_t n = 128; n <= 16384; n *= 2) {
        const AttentionShape shape = {n, n <= 2048 ? 4 : 2, head_dim,
                                      is_causal};  // fewer heads keep the long ones short
        const LayerShape as_layer = {1, n, shape.heads * head_dim, shape.heads, is_causal};
        const std::string name = as_layer.name() + "/head_dim:" + std::to_string(head_dim);
        const auto make = [=] {
          return std::make_unique<AttentionCase>(shape, setting.instruction_set);
        };
        add("attention_prefill/" + name, make);
        if (head_dim % 64 != 0 || (n != 1024 && n != 4096)) continue;
        AttentionShape words = shape;
        words.is_in_integers = true;
        add("attention_prefill/int16/" + name, [=] {
          auto test = std::make_unique<AttentionCase>(words, setting.instruction_set);
          test->rival = make();
          test->rival_counter = "times_f32";
          return test;
        });
      }
    }
  }
});

}  // namespace bench
