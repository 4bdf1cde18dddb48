#include "decode_case.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <optional>
#include <vector>

#include "layer_case.h"
#include "machine.h"
#include "pool.h"

namespace bench {
namespace {

std::string megabytes(int64_t bytes) { return std::to_string(bytes / 1000000) + " MB"; }

double stored_bytes(uint32_t type) { return static_cast<double>(support::kTypeBits[type]) / 8; }

// Key and value of one position and kv head, with their scales.
double key_value_bytes(int64_t head_dim, const DecodeOptions &options) {
  double bytes = 0;
  for (const uint32_t type :
       {options.cache_type, options.value_type ? options.value_type : options.cache_type})
    bytes += static_cast<double>(head_dim) * stored_bytes(type) +
             (support::HasCodes(static_cast<support::Storage>(type)) ? 4 : 0);
  return bytes;
}

// A matrix, with its scales: one for each column, or of int4 for each column and 32 rows.
double weight_bytes(double rows, double columns, uint32_t type) {
  if (type == MHA_TYPE_INT4) return columns * (rows / 2 + sizeof(float) * std::ceil(rows / 32));
  return columns * (rows * stored_bytes(type) + (type == MHA_TYPE_INT8 ? sizeof(float) : 0));
}

// Layers (or none) and caches, all with the same content and each in separate memory.
class DecodeCase : public Case {
 protected:
  struct Copy {
    support::Memory packed;  // none: no layer
    std::optional<support::View> view;
    support::Cache cache;
  };

  DecodeCase(const DecodeShape &shape, const DecodeOptions &options)
      : shape_(shape),
        options_(options),
        rows_(shape.batch * shape.n),
        scheduler_(pool_scheduler(options.threads)) {
    instruction_set = options.instruction_set;
    threads = options.threads;
  }

  void check(mha_status status) const { support::Check(status, error_); }

  const mha_scheduler *scheduler() const { return options_.threads > 1 ? &scheduler_ : nullptr; }

  support::Cache make_cache() {
    mha_kv_cache_config config = support::Zeroed<mha_kv_cache_config>();
    config.num_sequences = shape_.batch;
    config.capacity = shape_.past + shape_.n;
    config.num_kv_heads = shape_.kv_heads;
    config.head_dim = shape_.head_dim;
    config.k_type = options_.cache_type;
    config.v_type = options_.value_type;
    support::Cache cache(config, support::Place::kLargePages, 0);
    constexpr int64_t most_rows = 256;
    support::Random random(11);
    const std::vector<float> k = random.Uniforms(most_rows * shape_.kv_width(), 1.7f);
    const std::vector<float> v = random.Uniforms(most_rows * shape_.kv_width(), 1.7f);
    for (int64_t sequence = 0; sequence < shape_.batch; ++sequence) {
      for (int64_t first = 0; first < shape_.past_of(sequence); first += most_rows) {
        const int64_t count = std::min(most_rows, shape_.past_of(sequence) - first);
        check(mha_kv_cache_append(cache.get(), sequence, count, k.data(), v.data(), &error_));
      }
    }
    return cache;
  }

  // first: what the others are copies of. Cases set `bytes`, of one call, before.
  void make_copies(Copy first) {
    const auto copy_bytes = static_cast<int64_t>(bytes);
    const int64_t wanted = std::max(options_.rotated_bytes, copy_bytes),
                  allowed = std::max(options_.most_rotated_bytes, copy_bytes);
    const int64_t count = std::min((wanted + copy_bytes - 1) / copy_bytes, allowed / copy_bytes);
    if (count * copy_bytes < wanted)
      label = "capped: takes turns through " + megabytes(count * copy_bytes) + ", not " +
              megabytes(wanted);
    if ((count - 1) * copy_bytes > available_memory_bytes()) throw std::bad_alloc();
    working_set_bytes = static_cast<double>(count) * bytes;

    copies_.push_back(std::move(first));
    while (static_cast<int64_t>(copies_.size()) < count) {
      Copy copy = {support::Memory(), std::nullopt,
                   copies_[0].cache.Copy(support::Place::kLargePages)};
      if (copies_[0].view) {
        copy.packed = support::Memory(copies_[0].packed.size(), support::Place::kLargePages);
        std::copy_n(copies_[0].packed.data(), copy.packed.size(), copy.packed.data());
        view_layer(&copy);
      }
      copies_.push_back(std::move(copy));
    }
  }

  void view_layer(Copy *copy) {
    const mha_layer_options options = support::Options(options_.instruction_set);
    copy->view.emplace(copy->packed, &options, support::Place::kLargePages);
    support::Check(copy->view->status, copy->view->error);
  }

  Copy &next_copy() {
    Copy &copy = copies_[next_];
    next_ = (next_ + 1) % copies_.size();
    return copy;
  }

  // In the caches before the call, of all sequences.
  double keys() const {
    double count = 0;
    for (int64_t sequence = 0; sequence < shape_.batch; ++sequence)
      count += static_cast<double>(shape_.past_of(sequence));
    return count;
  }

  const DecodeShape shape_;
  const DecodeOptions options_;
  const int64_t rows_;
  support::Memory workspace_;
  mha_error error_ = {};

 private:
  std::vector<Copy> copies_;
  size_t next_ = 0;
  mha_scheduler scheduler_;
};

class DecodeLayer : public DecodeCase {
 public:
  DecodeLayer(const DecodeShape &shape, const DecodeOptions &options) : DecodeCase(shape, options) {
    count_work();
    support::LayerProblem problem =
        random_layer(shape.batch, shape.n, shape.width(), shape.heads, shape.kv_heads);
    problem.is_causal = true;
    problem.arithmetic = static_cast<support::Arithmetic>(options.arithmetic);
    support::LayerForm form;
    form.weight_type = static_cast<support::Stored>(options.weight_type);
    const support::LayerData layer(problem, support::Place::kAnywhere, form);
    Copy first = {layer.Pack(nullptr, 0, support::Place::kLargePages), std::nullopt, make_cache()};
    view_layer(&first);
    support::LayerCall call = {call_form(scheduler())};
    call.cache.cache = first.cache.get();
    data_.emplace(first.view->layer, problem, call);
    mha_call_info info = support::Zeroed<mha_call_info>();
    check(data_->Info(&info, &error_));
    expect_operations(info.operations);
    workspace_ = support::Memory(info.workspace_bytes, support::Place::kLargePages);
    make_copies(std::move(first));
  }

  // The caches do not grow: the next call of a copy appends the same positions.
  void call() override {
    Copy &copy = next_copy();
    data_->args.call.cache = copy.cache.get();
    check(
        mha_forward(copy.view->layer, &data_->args, workspace_.data(), workspace_.size(), &error_));
    for (int64_t sequence = 0; sequence < shape_.batch; ++sequence)
      copy.cache.Truncate(sequence, shape_.past_of(sequence));
  }

 private:
  void count_work() {
    const double rows = static_cast<double>(rows_), n = static_cast<double>(shape_.n),
                 batch = static_cast<double>(shape_.batch);
    const double width = static_cast<double>(shape_.width()),
                 kv_width = static_cast<double>(shape_.kv_width());
    const double row_bytes = sizeof(float) * rows, qkv_width = width + 2 * kv_width;
    const double pairs = n * keys() + batch * n * (n + 1) / 2;
    const double cache_bytes = (keys() + rows) * static_cast<double>(shape_.kv_heads) *
                               key_value_bytes(shape_.head_dim, options_);
    const double qkv_bytes = weight_bytes(width, qkv_width, options_.weight_type),
                 o_bytes = weight_bytes(width, width, options_.weight_type);
    stages = {{2 * rows * width * qkv_width, qkv_bytes + row_bytes * (width + qkv_width)},
              {4 * width * pairs, cache_bytes + row_bytes * 2 * width},
              {2 * rows * width * width, o_bytes + row_bytes * 2 * width}};
    bytes = qkv_bytes + o_bytes + cache_bytes + row_bytes * 2 * width;
  }

  std::optional<support::ForwardData> data_;
};

class DecodeAttention : public DecodeCase {
 public:
  DecodeAttention(const DecodeShape &shape, const DecodeOptions &options)
      : DecodeCase(shape, options) {
    const double width = static_cast<double>(shape.width());
    bytes =
        keys() * static_cast<double>(shape.kv_heads) * key_value_bytes(shape.head_dim, options) +
        2 * sizeof(float) * static_cast<double>(rows_) * width;
    stages = {{4 * width * static_cast<double>(shape.n) * keys(), bytes}};
    support::AttentionProblem problem;
    problem.is_in_integers = options.attends_in_integers;
    problem.batch = shape.batch;
    problem.n_q = shape.n;
    problem.n_kv = 0;  // nothing is appended
    problem.num_heads = shape.heads;
    problem.num_kv_heads = shape.kv_heads;
    problem.head_dim = problem.head_dim_v = shape.head_dim;
    problem.is_causal = true;
    problem.q = support::Random(3).Uniforms(rows_ * shape.width(), 1.7f);
    Copy first = {support::Memory(), std::nullopt, make_cache()};
    support::AttentionCall call = {call_form(scheduler()), options.instruction_set};
    call.cache.cache = first.cache.get();
    data_.emplace(problem, call);
    workspace_ = support::Memory(data_->WorkspaceBytes(), support::Place::kLargePages);
    make_copies(std::move(first));
  }

  void call() override {
    data_->args.call.cache = next_copy().cache.get();
    check(mha_attention(&data_->args, workspace_.data(), workspace_.size(), &error_));
  }

 private:
  std::optional<support::AttentionData> data_;
};

}  // namespace

std::string DecodeShape::layer_name() const {
  return "D:" + std::to_string(width()) + "/H:" + std::to_string(heads) +
         "/Hkv:" + std::to_string(kv_heads) + "/past:" + std::to_string(past);
}

std::string DecodeShape::attention_name() const {
  return "H:" + std::to_string(heads) + "/Hkv:" + std::to_string(kv_heads) +
         "/head_dim:" + std::to_string(head_dim) + "/past:" + std::to_string(past);
}

std::unique_ptr<Case> make_decode_layer(const DecodeShape &shape, const DecodeOptions &options) {
  return std::make_unique<DecodeLayer>(shape, options);
}

std::unique_ptr<Case> make_decode_attention(const DecodeShape &shape,
                                            const DecodeOptions &options) {
  return std::make_unique<DecodeAttention>(shape, options);
}

}  // namespace bench
