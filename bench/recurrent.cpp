// recurrent: prompts of the gated delta rule with as many states as a layer of today's hybrid
// models has, one token for 24 layers of them, and states that decay into subnormal numbers.
// causal_conv: the convolution before it.

#include <algorithm>
#include <vector>

#include "groups.h"
#include "layer_case.h"
#include "memory.h"
#include "pool.h"
#include "support/random.h"

namespace bench {
namespace {

struct RecurrentShape {
  int64_t n, states, width;
  int64_t queries = 1;         // of a state
  bool decays_by_row = false;  // decay for each key dimension
  uint32_t threads = 1;
  bool has_raw_gates = true;  // and norms, as Qwen3-Next has them

  double numbers() const { return static_cast<double>(states * width * width); }
  std::string name() const {
    return "n:" + std::to_string(n) + "/H:" + std::to_string(states) +
           "/d:" + std::to_string(width) +
           (queries > 1 ? "/queries:" + std::to_string(queries) : "") +
           (decays_by_row ? "/decay:rows" : "") + (has_raw_gates ? "" : "/plain") +
           (threads > 1 ? "/T:" + std::to_string(threads) : "");
  }
};

// One layer's arrays and call.
class RecurrentLayer {
 public:
  RecurrentLayer(const RecurrentShape &shape, uint32_t set, float inputs)
      : scheduler_(pool_scheduler(shape.threads)),
        q_(filled(shape.n * shape.states * shape.queries * shape.width, inputs)),
        k_(filled(shape.n * shape.states * shape.width, inputs)),
        v_(filled(shape.n * shape.states * shape.width, inputs)),
        decay_(filled(shape.n * shape.states * (shape.decays_by_row ? shape.width : 1), 0.01f)),
        beta_(filled(shape.n * shape.states, 1)),
        a_log_(filled(shape.states, 1)),
        output_(make_array<float>(shape.n * shape.states * shape.queries * shape.width)),
        state_(filled(shape.states * shape.width * shape.width, 1)) {
    args.num_q_heads = shape.states * shape.queries;
    args.num_v_heads = args.num_k_heads = shape.states;
    args.head_dim = shape.width;
    args.decay_dim = shape.decays_by_row ? shape.width : 1;
    args.instruction_set = set;
    args.scheduler = shape.threads > 1 ? &scheduler_ : nullptr;
    args.batch = 1;
    args.rows = shape.n;
    args.q.data = q_.get();
    args.k.data = k_.get();
    args.v.data = v_.get();
    args.decay.data = decay_.get();
    args.beta.data = beta_.get();
    args.output.data = output_.get();
    args.state = args.state_out = state_.get();
    if (shape.has_raw_gates) {
      args.a_log = a_log_.get();
      args.beta_function = MHA_FUNCTION_SIGMOID;
      args.norm_epsilon = 1e-6f;
    } else {
      set_decay(-0.01f);
      for (int64_t i = 0; i < shape.n * shape.states * shape.width; ++i) k_[i] *= 0.1f;
    }
    size_t bytes = 0;
    support::Check(mha_recurrent_attention_workspace(&args, &bytes, &error_), error_);
    workspace_ = support::Memory(bytes, support::Place::kLargePages);
  }

  // As given.
  void set_decay(float decay) {
    args.a_log = nullptr;
    std::fill_n(decay_.get(), args.rows * args.num_v_heads * args.decay_dim, decay);
  }

  void call() {
    support::Check(mha_recurrent_attention(&args, workspace_.data(), workspace_.size(), &error_),
                   error_);
  }

  double bytes() {
    mha_call_info info = support::Zeroed<mha_call_info>();
    support::Check(mha_recurrent_attention_info(&args, &info, &error_), error_);
    return static_cast<double>(info.bytes);
  }

  float *state() { return state_.get(); }

  mha_recurrent_args args = support::Zeroed<mha_recurrent_args>();

 private:
  static Array<float> filled(int64_t count, float factor) {
    Array<float> array = make_array<float>(count);
    support::Random random(1);
    for (int64_t i = 0; i < count; ++i) array[i] = factor * random.Uniform();
    return array;
  }

  mha_scheduler scheduler_;
  Array<float> q_, k_, v_, decay_, beta_, a_log_, output_, state_;
  support::Memory workspace_;
  mha_error error_ = {};
};

// Some layers, one after the other.
class RecurrentCase : public Case {
 public:
  RecurrentCase(const RecurrentShape &shape, uint32_t set, int64_t layers = 1, float inputs = 1) {
    for (int64_t i = 0; i < layers; ++i)
      layers_.push_back(std::make_unique<RecurrentLayer>(shape, set, inputs));
    const double count = static_cast<double>(layers);
    bytes = working_set_bytes = count * layers_[0]->bytes();
    // For each number of a state: a product, and a multiply-add for its change, for k S and for
    // each query, as many operations as a processor starts.
    stages = {
        {2 * count * static_cast<double>(shape.n * (3 + shape.queries)) * shape.numbers(), bytes}};
    instruction_set = set;
    threads = shape.threads;
  }

  void call() override {
    for (const auto &layer : layers_) layer->call();
  }

  std::vector<std::unique_ptr<RecurrentLayer>> layers_;
};

// Scales the states of another case in place, the least that a token could do.
class ScalingCase : public Case {
 public:
  explicit ScalingCase(RecurrentCase *of) : of_(of) {}

  void call() override {
    for (const auto &layer : of_->layers_) {
      const mha_recurrent_args &args = layer->args;
      const int64_t count = args.num_v_heads * args.head_dim * args.head_dim;
      float *const state = layer->state();
      for (int64_t i = 0; i < count; ++i) state[i] *= 0.9999f;
    }
  }

 private:
  RecurrentCase *of_;
};

std::unique_ptr<Case> make_token_case(const RecurrentShape &shape, uint32_t set) {
  constexpr int64_t layers = 24;
  auto test = std::make_unique<RecurrentCase>(shape, set, layers);
  test->rival = std::make_unique<ScalingCase>(test.get());
  test->rival_counter = "times_scaling";
  return test;
}

// Nothing is added to states that decay, from the second quarter of the rows on as subnormal
// numbers; beside it, the same with other numbers.
std::unique_ptr<Case> make_zeros_case(const RecurrentShape &shape, uint32_t set) {
  auto test = std::make_unique<RecurrentCase>(shape, set, 1, 0.0f);
  RecurrentLayer &layer = *test->layers_[0];
  layer.set_decay(-0.01f);
  for (int64_t i = 0; i < static_cast<int64_t>(shape.numbers()); ++i) layer.state()[i] *= 0x1p-119f;
  layer.args.state_out = nullptr;  // each call begins with the same state
  test->rival = std::make_unique<RecurrentCase>(shape, set);
  test->rival_counter = "times_numbers";
  return test;
}

class ConvCase : public Case {
 public:
  ConvCase(int64_t n, int64_t channels, uint32_t set)
      : x_(make_array<float>(n * channels)),
        output_(make_array<float>(n * channels)),
        weights_(make_array<float>(channels * kernel_size)),
        state_(make_array<float>(channels * (kernel_size - 1))) {
    support::Random random(1);
    for (int64_t i = 0; i < n * channels; ++i) x_[i] = random.Uniform();
    for (int64_t i = 0; i < channels * kernel_size; ++i) weights_[i] = random.Uniform();
    args_.channels = channels;
    args_.kernel_size = kernel_size;
    args_.weights = weights_.get();
    args_.activation = MHA_FUNCTION_SILU;
    args_.instruction_set = set;
    args_.batch = 1;
    args_.rows = n;
    args_.x.data = x_.get();
    args_.output.data = output_.get();
    args_.state = args_.state_out = state_.get();
    const double numbers = static_cast<double>(channels);
    bytes = working_set_bytes =
        sizeof(float) * numbers * static_cast<double>(2 * n + 3 * kernel_size - 2);
    stages = {{2.0 * numbers * static_cast<double>(n * kernel_size), bytes}};
    instruction_set = set;
  }

  void call() override { support::Check(mha_causal_conv(&args_, nullptr, 0, &error_), error_); }

 private:
  static constexpr int64_t kernel_size = 4;
  Array<float> x_, output_, weights_, state_;
  mha_causal_conv_args args_ = support::Zeroed<mha_causal_conv_args>();
  mha_error error_ = {};
};

}  // namespace

const Group recurrent_benchmarks([](const Setting &setting) {
  const uint32_t set = setting.instruction_set;
  const auto add_prompt = [set](const RecurrentShape &shape) {
    add(
        "recurrent/" + shape.name(), [=] { return std::make_unique<RecurrentCase>(shape, set); },
        shape.threads > 1 ? Clock::wall : Clock::processor);
  };
  for (const int64_t n : {1024, 4096}) {
    for (const bool by_row : {false, true}) {
      add_prompt({n, 16, 128, 1, by_row});
      add_prompt({n, 32, 64, 1, by_row});
    }
  }
  add_prompt({1024, 16, 128, 1, false, 1, false});
  for (const int64_t queries : {2, 4, 8}) add_prompt({1024, 16, 128, queries});
  if (num_cores() > 1) {
    add_prompt({1024, 16, 128, 1, false, 2});
    add_prompt({1024, 32, 64, 1, false, 2});
  }
  const RecurrentShape token = {1, 32, 128}, zeros = {2000, 16, 128};
  add("recurrent/token/" + token.name(), [=] { return make_token_case(token, set); });
  add("recurrent/zeros/" + zeros.name(), [=] { return make_zeros_case(zeros, set); });
  for (const int64_t n : {1, 1024})
    add("causal_conv/n:" + std::to_string(n) + "/C:8192",
        [=] { return std::make_unique<ConvCase>(n, 8192, set); });
});

}  // namespace bench
