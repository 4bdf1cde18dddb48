// variants: options of a call, each beside the same call without it, in turns. of_plain is the of_limit of the one divided by that of the
// other: 1 is an option that costs nothing beyond the pairs that attend.

#include "attention_case.h"
#include "groups.h"
#include "layer_case.h"
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

// A row for each option: its name, rows of query and key, and what it adds to a plain causal call. Its targets are in
// tools/bench_targets.py.
constexpr struct {
  const char *name;
  int64_t n;
  Change change;
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
};

std::unique_ptr<Case> beside(std::unique_ptr<Case> test, std::unique_ptr<Case> plain) {
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
        [=] { return beside(make_attention_case(shape, set, variant.change), make_attention_case(shape, set)); });
    if (variant.n > 2048) continue;  // seconds
    const LayerShape of_layer = {1, variant.n, 768, 12, true};
    LayerOptions plain = {set}, changed = {set};
    changed.change = variant.change;
    add("variants/layer/" + name, [=] { return beside(make_layer_case(of_layer, changed), make_layer_case(of_layer, plain)); });
  }
}

}  // namespace bench
