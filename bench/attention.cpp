// attention_prefill: the middle stage alone, mha_attention on plain rows.

#include <stdexcept>

#include "groups.h"
#include "layer_case.h"

namespace bench {
namespace {

struct AttentionShape {
  int64_t n, heads, head_dim;
  bool is_causal;

  int64_t floats() const { return n * heads * head_dim; }
};

class AttentionCase : public Case {
 public:
  AttentionCase(const AttentionShape &shape, uint32_t set)
      : q_(random_array(shape.floats(), 1.7f, 1)),
        k_(random_array(shape.floats(), 1.7f, 2)),
        v_(random_array(shape.floats(), 1.7f, 3)),
        output_(make_array<float>(shape.floats())) {
    const double flops = 4 * static_cast<double>(shape.heads * shape.head_dim) * attending_pairs(1, shape.n, shape.is_causal);
    bytes = working_set_bytes = 4.0 * sizeof(float) * static_cast<double>(shape.floats());
    stages = {{flops, bytes}};
    instruction_set = set;

    args_.struct_size = sizeof args_;
    args_.batch = 1;
    args_.n_q = args_.n_kv = shape.n;
    args_.num_heads = shape.heads;
    args_.head_dim = shape.head_dim;
    args_.q = q_.get();
    args_.k = k_.get();
    args_.v = v_.get();
    args_.output = output_.get();
    args_.flags = shape.is_causal ? MHA_CAUSAL : 0;
    args_.instruction_set = set;
    check(mha_attention_workspace(&args_, &workspace_bytes_, &error_));
    workspace_ = make_array<unsigned char>(static_cast<int64_t>(workspace_bytes_));
  }

  void call() override { check(mha_attention(&args_, workspace_.get(), workspace_bytes_, &error_)); }

 private:
  void check(mha_status status) const {
    if (status) throw std::runtime_error(error_.message);
  }

  const Array<float> q_, k_, v_;
  Array<float> output_;
  mha_attention_args args_ = {};
  mha_error error_ = {};
  size_t workspace_bytes_ = 0;
  Array<unsigned char> workspace_;
};

}  // namespace

void register_attention_benchmarks(const Setting &setting) {
  for (const int64_t head_dim : {32, 64, 80, 96, 128}) {
    for (const bool is_causal : {true, false}) {
      for (int64_t n = 128; n <= 16384; n *= 2) {
        const AttentionShape shape = {n, n <= 2048 ? 4 : 2, head_dim, is_causal};  // fewer heads keep the long ones short
        const LayerShape as_layer = {1, n, shape.heads * head_dim, shape.heads, is_causal};
        add("attention_prefill/" + as_layer.name() + "/head_dim:" + std::to_string(head_dim),
            [=] { return std::make_unique<AttentionCase>(shape, setting.instruction_set); });
      }
    }
  }
}

}  // namespace bench
