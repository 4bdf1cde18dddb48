// choose_keys: the index heads of DeepSeek V3.2, 64 of 128 numbers, that choose 2048 keys of a
// cache for one token or for some.

#include "groups.h"
#include "layer_case.h"
#include "support/cache.h"
#include "support/choice.h"

namespace bench {
namespace {

class ChoiceCase : public Case {
 public:
  ChoiceCase(int64_t n_q, int64_t n_kv, support::Storage type, uint32_t set) {
    support::ChoiceProblem problem;
    problem.n_q = n_q;
    problem.n_kv = n_kv;
    problem.num_heads = 64;
    problem.head_dim = 128;
    problem.num_chosen = 2048;
    problem.k_type = type;
    problem.values_in_keys = true;
    support::Random random(1);
    problem.q = random.Uniforms(n_q * problem.num_heads * problem.head_dim, 1.7f);
    problem.weights = random.Uniforms(n_q * problem.num_heads);
    const mha_kv_cache_config config =
        support::CacheConfigOf(problem, {MHA_CACHE_KIND_CONTIGUOUS, 0}, 1, n_kv);
    cache_ = std::make_unique<support::Cache>(config, support::Place::kLargePages);
    cache_->Append(0, {random.Uniforms(n_kv * problem.head_dim, 1.7f),
                       std::vector<float>(static_cast<size_t>(n_kv))});
    support::AttentionCall call = {call_form(), set};
    call.cache.cache = cache_->get();
    call.cache.read = true;
    problem.n_kv = 0;
    data_ = std::make_unique<support::ChoiceData>(problem, call);
    workspace_ = support::Memory(data_->WorkspaceBytes(), support::Place::kLargePages);
    const int64_t key_bytes = type == support::Storage::kF32    ? 4
                              : type == support::Storage::kInt8 ? 1
                                                                : 2;
    bytes = working_set_bytes = static_cast<double>(n_kv * problem.head_dim * key_bytes);
    stages = {{2 * static_cast<double>(n_q * n_kv) *
                   static_cast<double>(problem.num_heads * problem.head_dim),
               bytes}};
    instruction_set = set;
  }

  void call() override {
    support::Check(data_->Run(workspace_.data(), workspace_.size(), &error_), error_);
  }

 private:
  std::unique_ptr<support::Cache> cache_;
  std::unique_ptr<support::ChoiceData> data_;
  support::Memory workspace_;
  mha_error error_ = {};
};

}  // namespace

void register_choice_benchmarks(const Setting &setting) {
  for (const int64_t n_kv : {8192, 131072}) {
    for (const int64_t n_q : {1, 64}) {
      for (const support::Storage type :
           {support::Storage::kF32, support::Storage::kBf16, support::Storage::kInt8}) {
        add("choose_keys/n:" + std::to_string(n_q) + "/keys:" + std::to_string(n_kv) + "/" +
                support::NameOf(type),
            [=] { return std::make_unique<ChoiceCase>(n_q, n_kv, type, setting.instruction_set); });
      }
    }
  }
}

}  // namespace bench
