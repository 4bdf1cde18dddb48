// latent: queries over a cache of multi-head latent attention, 576 numbers a position whose first
// 512 are its value, in turns with the same over a cache that stores these twice. latent_chosen:
// over 2048 chosen positions of many, in turns with a cache of 2048. chosen_positions: the same
// with separate keys and values of 128, which with 8192 positions come from the processor's caches.
// latent_prompt: with the products that absorb, in turns with a call that makes keys and values of
// all heads from the latents. chosen_blocks: prompts whose queries choose 5% of the blocks, in
// turns with all keys. Caches take turns, so that they come from memory.

#include <algorithm>
#include <cstring>

#include "groups.h"
#include "layer_case.h"
#include "machine.h"
#include "support/cache.h"

namespace bench {
namespace {

constexpr int64_t nope = 128, rotated = 64, value = 128, latent = 512, head = nope + rotated,
                  key = latent + rotated;

class LatentCase : public Case {
 public:
  struct Shape {
    int64_t heads, past, n = 1, num_chosen = 0;
    uint32_t type = MHA_TYPE_F32;
    bool stored_twice = false;
    int64_t width = key, value_width = latent;
  };

  LatentCase(const Shape &shape, const Setting &setting) {
    const int64_t keys = shape.num_chosen ? shape.num_chosen : shape.past;
    bytes = static_cast<double>(keys * support::kTypeBits[shape.type] / 8 *
                                (shape.width + (shape.stored_twice ? shape.value_width : 0)));
    stages = {{2 * static_cast<double>(shape.n * shape.heads * keys) *
                   static_cast<double>(shape.width + shape.value_width),
               bytes}};
    mha_kv_cache_config config = support::Zeroed<mha_kv_cache_config>();
    config.num_sequences = 1;
    if (!shape.num_chosen)
      config.num_sequences += static_cast<int64_t>(
          static_cast<double>(std::min(rotated_bytes(), setting.most_rotated_bytes)) / bytes);
    config.capacity = shape.past;
    config.num_kv_heads = 1;
    config.head_dim = shape.width;
    config.head_dim_v = shape.value_width;
    config.k_type = shape.type;
    config.value_place = shape.stored_twice ? MHA_CACHE_VALUES_OWN : MHA_CACHE_VALUES_IN_KEYS;
    working_set_bytes =
        bytes * static_cast<double>(shape.num_chosen ? shape.past / keys : config.num_sequences);
    cache_ = std::make_unique<support::Cache>(config, support::Place::kLargePages, 0);
    support::Random random(1);
    const std::vector<float> rows = random.Uniforms(256 * shape.width, 1.7f);
    for (int64_t sequence = 0; sequence < config.num_sequences; ++sequence)
      for (int64_t first = 0; first < shape.past; first += 256)
        check(mha_kv_cache_append(cache_->get(), sequence, 256, rows.data(),
                                  shape.stored_twice ? rows.data() : nullptr, &error_));
    q_ = random.Uniforms(shape.n * shape.heads * shape.width, 1.7f);
    output_.resize(static_cast<size_t>(shape.n * shape.heads * shape.value_width));
    args_.call.batch = 1;
    args_.call.n_q = shape.n;
    args_.num_heads = shape.heads;
    args_.num_kv_heads = 1;
    args_.head_dim = shape.width;
    args_.head_dim_v = shape.value_width;
    args_.q.data = q_.data();
    args_.output.data = output_.data();
    args_.call.cache_read = cache_->get();
    sequences_.cache_sequences = &sequence_;
    args_.call.sequences = &sequences_;
    args_.call.flags = MHA_CAUSAL;
    args_.instruction_set = instruction_set = setting.instruction_set;
    if (shape.num_chosen) {
      for (int64_t i = 0; i < 256 * shape.num_chosen; ++i)
        lists_.push_back(static_cast<int32_t>(random.Below(shape.past)));
      score_.num_chosen = shape.num_chosen;
      score_.chosen_keys = lists_.data();
      args_.call.score_arrays = &score_;
    }
    size_t workspace_bytes = 0;
    check(mha_attention_workspace(&args_, &workspace_bytes, &error_));
    workspace_ = support::Memory(workspace_bytes, support::Place::kLargePages);
  }

  void call() override {
    check(mha_attention(&args_, workspace_.data(), workspace_.size(), &error_));
    sequence_ = (sequence_ + 1) % cache_->config().num_sequences;
    if (args_.call.score_arrays && (score_.chosen_keys += score_.num_chosen) == &*lists_.end())
      score_.chosen_keys = lists_.data();
  }

 protected:
  void check(mha_status status) const { support::Check(status, error_); }

  mha_attention_args args_ = support::Zeroed<mha_attention_args>();
  mha_sequences sequences_ = support::Zeroed<mha_sequences>();
  mha_score_arrays score_ = support::Zeroed<mha_score_arrays>();
  int64_t sequence_ = 0;
  std::vector<float> q_, output_;
  std::vector<int32_t> lists_;
  std::unique_ptr<support::Cache> cache_;
  support::Memory workspace_;
  mha_error error_ = {};
};

using Linear = std::unique_ptr<mha_layer, decltype(&mha_layer_destroy)>;

Linear random_linear(int64_t in, int64_t out) {
  const std::vector<float> w = support::Random(2).Uniforms(in * out, 0.1f);
  mha_linear_weights weights = support::Zeroed<mha_linear_weights>();
  weights.input_dim = in;
  weights.output_dim = out;
  weights.w.data = w.data();
  mha_layer *layer = nullptr;
  mha_error error;
  support::Check(mha_linear_create(&weights, nullptr, &layer, &error), error);
  return Linear(layer, mha_layer_destroy);
}

void multiply(const Linear &linear, int64_t rows, const float *x, int64_t x_stride, float *y,
              int64_t y_stride) {
  mha_linear_args args = support::Zeroed<mha_linear_args>();
  args.rows = rows;
  args.x.data = x;
  args.x.strides.row = x_stride;
  args.output.data = y;
  args.output.strides.row = y_stride;
  mha_error error;
  support::Check(mha_linear(linear.get(), &args, nullptr, 0, &error), error);
}

// As attend_absorbed of tests/examples/latent.c, but for the rotation.
class AbsorbedCase : public LatentCase {
 public:
  AbsorbedCase(const Shape &shape, const Setting &setting)
      : LatentCase(shape, setting),
        heads_(shape.heads),
        n_(shape.n),
        rows_(static_cast<size_t>(n_ * heads_ * head), 0.5f) {
    stages.push_back({4 * static_cast<double>(n_ * heads_ * latent * value), 0});
  }

  void call() override {
    for (int64_t h = 0; h < heads_; ++h)
      multiply(to_latent_, n_, rows_.data() + h * head, heads_ * head, q_.data() + h * key,
               heads_ * key);
    LatentCase::call();
    for (int64_t h = 0; h < heads_; ++h)
      multiply(from_latent_, n_, output_.data() + h * latent, heads_ * latent,
               rows_.data() + h * value, heads_ * value);
  }

 private:
  const int64_t heads_, n_;
  std::vector<float> rows_;
  const Linear to_latent_ = random_linear(nope, latent),
               from_latent_ = random_linear(latent, value);
};

// As attend_expanded.
class ExpandedCase : public LatentCase {
 public:
  ExpandedCase(const Shape &shape, const Setting &setting)
      : LatentCase(shape, setting),
        heads_(shape.heads),
        past_(shape.past),
        kv_b_(random_linear(latent, heads_ * (nope + value))) {
    latents_.resize(static_cast<size_t>(past_ * key));
    keys_.resize(static_cast<size_t>(past_ * heads_ * head));
    keys_values_.resize(static_cast<size_t>(past_ * heads_ * (nope + value)));
    args_.call.n_kv = past_;
    args_.num_kv_heads = heads_;
    args_.head_dim = head;
    args_.head_dim_v = value;
    args_.k.data = keys_.data();
    args_.v.data = keys_values_.data() + nope;
    args_.v.strides.row = heads_ * (nope + value);
    args_.v.strides.head = nope + value;
    args_.call.cache_read = nullptr;
    args_.call.sequences = nullptr;
    size_t workspace_bytes = 0;
    check(mha_attention_workspace(&args_, &workspace_bytes, &error_));
    workspace_ = support::Memory(workspace_bytes, support::Place::kLargePages);
  }

  void call() override {
    check(mha_kv_cache_read(cache_->get(), sequence_, 0, past_, latents_.data(), nullptr, &error_));
    multiply(kv_b_, past_, latents_.data(), key, keys_values_.data(), 0);
    for (int64_t i = 0; i < past_ * heads_; ++i) {
      std::memcpy(keys_.data() + i * head, keys_values_.data() + i * (nope + value),
                  nope * sizeof(float));
      std::memcpy(keys_.data() + i * head + nope, latents_.data() + i / heads_ * key + latent,
                  rotated * sizeof(float));
    }
    LatentCase::call();
  }

 private:
  const int64_t heads_, past_;
  const Linear kv_b_;
  std::vector<float> latents_, keys_, keys_values_;
};

// Queries of one kv head that choose blocks of 64 of their keys; no blocks: all keys.
class BlocksCase : public Case {
 public:
  BlocksCase(int64_t heads, int64_t n, int64_t blocks, const Setting &setting) {
    support::Random random(1);
    q_ = random.Uniforms(n * heads * 128, 1.7f);
    kv_ = random.Uniforms(n * 128, 1.7f);
    output_.resize(q_.size());
    for (int64_t i = 0; i < n * blocks; ++i)  // spread over the keys
      lists_.push_back(
          static_cast<int32_t>((i % blocks * (n / 64) + random.Below(n / 64)) / blocks));
    args_.call.batch = args_.num_kv_heads = 1;
    args_.call.n_q = args_.call.n_kv = n;
    args_.num_heads = heads;
    args_.head_dim = 128;
    args_.q.data = q_.data();
    args_.k.data = args_.v.data = kv_.data();
    args_.output.data = output_.data();
    args_.instruction_set = instruction_set = setting.instruction_set;
    score_.chosen_keys = lists_.data();
    score_.num_chosen = blocks;
    score_.chosen_block = 64;
    if (blocks) args_.call.score_arrays = &score_;
    bytes = working_set_bytes = 4 * static_cast<double>(2 * (q_.size() + kv_.size()));
    stages = {{512 * static_cast<double>(n * heads) * static_cast<double>(blocks ? 64 * blocks : n),
               bytes}};
    size_t workspace_bytes = 0;
    support::Check(mha_attention_workspace(&args_, &workspace_bytes, &error_), error_);
    workspace_ = support::Memory(workspace_bytes, support::Place::kLargePages);
  }

  void call() override {
    support::Check(mha_attention(&args_, workspace_.data(), workspace_.size(), &error_), error_);
  }

 private:
  mha_attention_args args_ = support::Zeroed<mha_attention_args>();
  mha_score_arrays score_ = support::Zeroed<mha_score_arrays>();
  std::vector<float> q_, kv_, output_;
  std::vector<int32_t> lists_;
  support::Memory workspace_;
  mha_error error_ = {};
};

template <typename Test, typename Rival>
void add_in_turns(const std::string &name, const LatentCase::Shape &shape,
                  const LatentCase::Shape &other, const char *counter, const Setting &setting) {
  add(name, [=] {
    std::unique_ptr<Case> test = std::make_unique<Test>(shape, setting);
    test->rival = std::make_unique<Rival>(other, setting);
    test->rival_counter = counter;
    return test;
  });
}

}  // namespace

const Group latent_benchmarks([](const Setting &setting) {
  for (const int64_t heads : {1, 16, 32, 128}) {
    const std::string end = "/H:" + std::to_string(heads) + "/past:";
    for (const support::Storage of_keys : support::kKeyTypes) {
      const auto type = static_cast<uint32_t>(of_keys);
      const LatentCase::Shape shape = {heads, 8192, 1, 0, type},
                              twice = {heads, 8192, 1, 0, type, true};
      const std::string name = "latent" + end + "8192/" + support::NameOf(of_keys);
      add_in_turns<LatentCase, LatentCase>(name, shape, twice, "times_stored_twice", setting);
    }
    const LatentCase::Shape chosen = {heads, 131072, 1, 2048}, few = {heads, 2048};
    add_in_turns<LatentCase, LatentCase>("latent_chosen" + end + "131072/chosen:2048", chosen, few,
                                         "times_few", setting);
  }
  Setting in_caches = setting;
  in_caches.most_rotated_bytes = 0;
  for (const int64_t heads : {1, 4, 16}) {
    for (const int64_t past : {8192, 131072}) {
      for (const uint32_t type : {MHA_TYPE_F32, MHA_TYPE_F16, MHA_TYPE_INT8}) {
        const LatentCase::Shape chosen = {heads, past, 1, 2048, type, true, 128, 128},
                                few = {heads, 2048, 1, 0, type, true, 128, 128};
        add_in_turns<LatentCase, LatentCase>(
            "chosen_positions/H:" + std::to_string(heads) + "/past:" + std::to_string(past) +
                "/chosen:2048/" + support::kTypeNames[type],
            chosen, few, "times_few", past == 8192 ? in_caches : setting);
      }
    }
  }
  for (const int64_t n : {1, 64, 128, 256, 512}) {
    const LatentCase::Shape shape = {16, 8192, n};
    const std::string name = "latent_prompt/n:" + std::to_string(n) + "/H:16/past:8192";
    add_in_turns<AbsorbedCase, ExpandedCase>(name, shape, shape, "times_expanded", setting);
  }
  for (const int64_t heads : {1, 4, 16}) {
    add("chosen_blocks/n:16384/H:" + std::to_string(heads) + "/Hkv:1", [=] {
      std::unique_ptr<Case> test =
          std::make_unique<BlocksCase>(heads, 16384, 13, setting);  // of 256
      test->rival = std::make_unique<BlocksCase>(heads, 16384, 0, setting);
      test->rival_counter = "times_dense";
      return test;
    });
  }
});

}  // namespace bench
