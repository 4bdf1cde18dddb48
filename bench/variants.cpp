// variants: options of a call, each beside the same call without it, in turns. of_plain is the of_limit of the one divided by that of the
// other: 1 is an option that costs nothing beyond the pairs that attend.

#include <cmath>

#include "attention_case.h"
#include "groups.h"
#include "layer_case.h"
#include "support/packed_sequences.h"
#include "support/rope.h"

namespace bench {
namespace {

using support::LayerProblem;

support::ScoreArrays &score_of(LayerProblem *problem) {
  if (!problem->score) problem->score.emplace();
  return *problem->score;
}

void add_bias(LayerProblem *problem) {
  support::Random random(2);
  std::vector<float> &bias = score_of(problem).bias.values;
  bias.resize(static_cast<size_t>(problem->n_q * problem->n_kv));
  for (float &x : bias) x = static_cast<float>(random.Between(-32, 32)) / 16;  // which f16 holds
}

// Of 16 keys 15 are left, so that there is no tile without any.
void add_mask(LayerProblem *problem) {
  support::Random random(3);
  std::vector<uint8_t> &mask = score_of(problem).mask.values;
  mask.resize(static_cast<size_t>(problem->n_q * problem->n_kv));
  for (uint8_t &x : mask) x = random.Between(0, 15) != 0;
}

// A gate of each element, by a matrix.
void add_gate(LayerProblem *problem) {
  support::Random random(4);
  problem->gate = support::GateKind::kSigmoid;
  problem->gate_dim = problem->head_dim_v;
  const float range = 1.7f / std::sqrt(static_cast<float>(problem->query_dim));
  problem->w_g = random.Uniforms(problem->query_dim * problem->gate_width(), range);
}

// Of so many tokens.
constexpr int64_t document = 1024;

void add_documents(LayerProblem *problem) {
  std::vector<int64_t> &groups = score_of(problem).groups.of_queries;
  for (int64_t i = 0; i < problem->n_q; ++i) groups.push_back(i / document);
}

// The share of the pairs of a causal call of n rows in which both are of one document.
constexpr double of_documents(int64_t n) { return static_cast<double>(document + 1) / static_cast<double>(n + 1); }

// A row for each option: its name, rows of query and key, what it adds to a plain causal call, and what share of the pairs that mha_info
// counts attend.
constexpr struct {
  const char *name;
  int64_t n;
  Change change;
  double attending = 1;
} variants[] = {
    {"window_256", 8192, [](LayerProblem *problem) { problem->window_left = 255; }},
    {"window_512", 1024, [](LayerProblem *problem) { problem->window_left = 511; }},
    {"not_causal", 1024, [](LayerProblem *problem) { problem->is_causal = false; }},
    {"lengths", 1024, [](LayerProblem *problem) { problem->q_lengths = problem->kv_lengths = {problem->n_q - 100}; }},
    {"softcap", 1024, [](LayerProblem *problem) { score_of(problem).softcap = 50; }},
    {"bias", 1024, add_bias},
    {"bias_f16", 1024,
     [](LayerProblem *problem) {
       add_bias(problem);
       problem->score->bias_is_f16 = true;
     }},
    {"mask", 1024, add_mask},
    {"alibi", 1024, [](LayerProblem *problem) { score_of(problem).alibi_slopes.assign(static_cast<size_t>(problem->num_heads), 0.1f); }},
    {"sinks", 1024, [](LayerProblem *problem) { score_of(problem).sinks.assign(static_cast<size_t>(problem->num_heads), 1.0f); }},
    {"rope", 1024, [](LayerProblem *problem) { problem->rope = support::MakeRope(false, problem->head_dim, problem->n_kv); }},
    {"relative_bias", 1024,
     [](LayerProblem *problem) {
       support::ScoreArrays &score = score_of(problem);
       score.relative_left = 128;
       score.relative_bias.assign(static_cast<size_t>(problem->num_heads * 129), 0.5f);
     }},
    {"q_scales", 1024, [](LayerProblem *problem) { score_of(problem).q_scales.assign(static_cast<size_t>(problem->n_q), 1.5f); }},
    {"qk_norm", 1024,
     [](LayerProblem *problem) {
       problem->norm.emplace();
       problem->norm->q_weight = problem->norm->k_weight = std::vector<float>(static_cast<size_t>(problem->head_dim), 1.25f);
     }},
    {"gate", 1024, add_gate},
    {"groups", 4096, add_documents, of_documents(4096)},
};

// Documents packed one after the other into one call, or in a call each.
class DocumentsCase : public Case {
 public:
  DocumentsCase(int64_t documents, bool is_packed, uint32_t set) {
    const support::AttentionCall call = {call_form(), set};
    const support::PackedSequences packed = {support::StartsOf(std::vector<int64_t>(static_cast<size_t>(documents), document)),
                                             support::StartsOf(std::vector<int64_t>(static_cast<size_t>(documents), document)),
                                             {}};
    instruction_set = set;
    stages = {{0, 0}};
    for (int64_t rows = 0; rows < documents * document; rows += is_packed ? documents * document : document) {
      support::AttentionSizes sizes;
      sizes.n_q = sizes.n_kv = is_packed ? documents * document : document;
      sizes.num_heads = sizes.num_kv_heads = 4;
      sizes.head_dim = sizes.head_dim_v = 64;
      sizes.is_causal = true;
      const support::AttentionProblem problem = support::NormalAttention(sizes);
      if (is_packed) {
        calls_.push_back(std::make_unique<support::PackedData<support::AttentionData>>(packed, problem, call));
      } else {
        calls_.push_back(std::make_unique<support::AttentionData>(problem, call));
      }
      mha_call_info info = support::Zeroed<mha_call_info>();
      support::Check(calls_.back()->Info(&info, &error_), error_);
      stages[0].flops += static_cast<double>(info.operations);
      stages[0].bytes += static_cast<double>(info.bytes);
      if (info.workspace_bytes > workspace_.size()) workspace_ = support::Memory(info.workspace_bytes, support::Place::kLargePages);
    }
    bytes = working_set_bytes = stages[0].bytes;
  }

  void call() override {
    for (const auto &data : calls_) support::Check(data->Run(workspace_.data(), workspace_.size(), &error_), error_);
  }

 private:
  std::vector<std::unique_ptr<support::AttentionData>> calls_;
  support::Memory workspace_;
  mha_error error_ = {};
};

// attending: the share of the operations of the attention that there are.
std::unique_ptr<Case> beside(std::unique_ptr<Case> test, std::unique_ptr<Case> plain, double attending = 1) {
  test->stages[test->stages.size() / 2].flops *= attending;
  test->rival = std::move(plain);
  test->rival_counter = "of_plain";
  test->rival_by_limit = true;
  return test;
}

}  // namespace

void register_variant_benchmarks(const Setting &setting) {
  const uint32_t set = setting.instruction_set;
  for (const auto &variant : variants) {
    const AttentionShape shape = {variant.n, variant.n <= 2048 ? 4 : 2, 64, true};
    const std::string name = std::string(variant.name) + "/n:" + std::to_string(variant.n);
    add("variants/attention/" + name,
        [=] { return beside(make_attention_case(shape, set, variant.change), make_attention_case(shape, set), variant.attending); });
    if (variant.n > 2048) continue;  // seconds
    const LayerShape of_layer = {1, variant.n, 768, 12, true};
    LayerOptions plain = {set}, changed = {set};
    changed.change = variant.change;
    add("variants/layer/" + name,
        [=] { return beside(make_layer_case(of_layer, changed), make_layer_case(of_layer, plain), variant.attending); });
  }
  add("variants/attention/packed/n:4096",
      [=] { return beside(std::make_unique<DocumentsCase>(4, true, set), std::make_unique<DocumentsCase>(4, false, set)); });
}

}  // namespace bench
