#include "decode_case.h"

#include <string.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <vector>

#include "machine.h"
#include "memory.h"
#include "pool.h"

namespace bench {
namespace {

using Bytes = Array<unsigned char>;

Bytes make_bytes(size_t count) { return make_array<unsigned char>(static_cast<int64_t>(count)); }

std::string megabytes(int64_t bytes) { return std::to_string(bytes / 1000000) + " MB"; }

int64_t stored_bytes(uint32_t type) { return type == MHA_TYPE_F32 ? 4 : type == MHA_TYPE_INT8 ? 1 : 2; }

// Keys and values of one position and kv head, with their scales.
double key_value_bytes(int64_t head_dim, uint32_t type) {
  return 2.0 * static_cast<double>(head_dim * stored_bytes(type) + (type == MHA_TYPE_INT8 ? 4 : 0));
}

// A matrix, with its scales: one for each column, or of int4 for each column and 32 rows.
double weight_bytes(double rows, double columns, uint32_t type) {
  if (type == MHA_TYPE_INT4) return columns * (rows / 2 + sizeof(float) * std::ceil(rows / 32));
  return columns * (rows * static_cast<double>(stored_bytes(type)) + (type == MHA_TYPE_INT8 ? sizeof(float) : 0));
}

// Layers (or none) and caches, all with the same content and each in memory of its own.
class DecodeCase : public Case {
 protected:
  struct Copy {
    Bytes packed, storage, buffer;
    const mha_layer *layer = nullptr;
    mha_kv_cache *cache = nullptr;
  };

  DecodeCase(const DecodeShape &shape, const DecodeOptions &options)
      : shape_(shape), options_(options), rows_(shape.batch * shape.n), scheduler_(pool_scheduler(options.threads)) {
    instruction_set = options.instruction_set;
    threads = options.threads;
  }

  void check(mha_status status) const {
    if (status) throw std::runtime_error(error_.message);
  }

  const mha_scheduler *scheduler() const { return options_.threads > 1 ? &scheduler_ : nullptr; }

  void fill_cache(Copy *copy) {
    mha_kv_cache_config config = {};
    config.struct_size = sizeof config;
    config.num_sequences = shape_.batch;
    config.capacity = shape_.past + shape_.n;
    config.num_kv_heads = shape_.kv_heads;
    config.head_dim = shape_.head_dim;
    config.k_type = config.v_type = options_.cache_type;
    check(mha_kv_cache_size(&config, &cache_bytes_, &error_));
    copy->buffer = make_bytes(cache_bytes_);
    check(mha_kv_cache_init(&config, copy->buffer.get(), cache_bytes_, &copy->cache, &error_));
    constexpr int64_t most_rows = 256;
    const Array<float> k = random_array(most_rows * shape_.kv_width(), 1.7f, 11), v = random_array(most_rows * shape_.kv_width(), 1.7f, 12);
    for (int64_t sequence = 0; sequence < shape_.batch; ++sequence) {
      for (int64_t first = 0; first < shape_.past_of(sequence); first += most_rows) {
        const int64_t count = std::min(most_rows, shape_.past_of(sequence) - first);
        check(mha_kv_cache_append(copy->cache, sequence, count, k.get(), v.get(), &error_));
      }
    }
  }

  // first: what the others are copies of. Cases set `bytes`, of one call, before.
  void make_copies(Copy first) {
    const auto copy_bytes = static_cast<int64_t>(bytes);
    const int64_t wanted = std::max(options_.rotated_bytes, copy_bytes), allowed = std::max(options_.most_rotated_bytes, copy_bytes);
    const int64_t count = std::min((wanted + copy_bytes - 1) / copy_bytes, allowed / copy_bytes);
    if (count * copy_bytes < wanted) label = "capped: takes turns through " + megabytes(count * copy_bytes) + ", not " + megabytes(wanted);
    if ((count - 1) * copy_bytes > available_memory_bytes()) throw std::bad_alloc();
    working_set_bytes = static_cast<double>(count) * bytes;

    copies_.push_back(std::move(first));
    while (static_cast<int64_t>(copies_.size()) < count) {
      Copy copy;
      copy.buffer = make_bytes(cache_bytes_);
      memcpy(copy.buffer.get(), copies_[0].buffer.get(), cache_bytes_);
      check(mha_kv_cache_view(copy.buffer.get(), cache_bytes_, &copy.cache, &error_));
      if (copies_[0].packed) {
        copy.packed = make_bytes(packed_bytes_);
        memcpy(copy.packed.get(), copies_[0].packed.get(), packed_bytes_);
        view_layer(&copy);
      }
      copies_.push_back(std::move(copy));
    }
  }

  void view_layer(Copy *copy) {
    mha_layer_options options = {};
    options.struct_size = sizeof options;
    options.instruction_set = options_.instruction_set;
    copy->storage = make_bytes(mha_layer_view_size());
    check(mha_layer_view(copy->packed.get(), packed_bytes_, &options, copy->storage.get(), mha_layer_view_size(), &copy->layer, &error_));
  }

  const Copy &next_copy() {
    const Copy &copy = copies_[next_];
    next_ = (next_ + 1) % copies_.size();
    return copy;
  }

  // In the caches before the call, of all sequences.
  double keys() const {
    double count = 0;
    for (int64_t sequence = 0; sequence < shape_.batch; ++sequence) count += static_cast<double>(shape_.past_of(sequence));
    return count;
  }

  const DecodeShape shape_;
  const DecodeOptions options_;
  const int64_t rows_;
  size_t packed_bytes_ = 0, cache_bytes_ = 0, workspace_bytes_ = 0;
  Bytes workspace_;
  mha_error error_ = {};

 private:
  std::vector<Copy> copies_;
  size_t next_ = 0;
  mha_scheduler scheduler_;
};

class DecodeLayer : public DecodeCase {
 public:
  DecodeLayer(const DecodeShape &shape, const DecodeOptions &options)
      : DecodeCase(shape, options), x_(random_array(rows_ * shape.width(), 1.0f, 3)), y_(make_array<float>(rows_ * shape.width())) {
    count_work();
    Copy first;
    pack(&first);
    fill_cache(&first);
    args_.struct_size = sizeof args_;
    args_.batch = shape.batch;
    args_.n_q = shape.n;
    args_.query = x_.get();
    args_.output = y_.get();
    args_.flags = MHA_CAUSAL;
    args_.scheduler = scheduler();
    args_.cache = first.cache;
    mha_call_info info = {};
    info.struct_size = sizeof info;
    check(mha_info(first.layer, &args_, &info, &error_));
    expect_operations(info.operations);
    workspace_bytes_ = info.workspace_bytes;
    workspace_ = make_bytes(workspace_bytes_);
    make_copies(std::move(first));
  }

  // The caches do not grow: the next call of a copy appends the same positions.
  void call() override {
    const Copy &copy = next_copy();
    args_.cache = copy.cache;
    check(mha_forward(copy.layer, &args_, workspace_.get(), workspace_bytes_, &error_));
    for (int64_t sequence = 0; sequence < shape_.batch; ++sequence)
      check(mha_kv_cache_truncate(copy.cache, sequence, shape_.past_of(sequence), &error_));
  }

 private:
  void count_work() {
    const double rows = static_cast<double>(rows_), n = static_cast<double>(shape_.n), batch = static_cast<double>(shape_.batch);
    const double width = static_cast<double>(shape_.width()), kv_width = static_cast<double>(shape_.kv_width());
    const double row_bytes = sizeof(float) * rows, qkv_width = width + 2 * kv_width;
    const double pairs = n * keys() + batch * n * (n + 1) / 2;
    const double cache_bytes =
        (keys() + rows) * static_cast<double>(shape_.kv_heads) * key_value_bytes(shape_.head_dim, options_.cache_type);
    const double qkv_bytes = weight_bytes(width, qkv_width, options_.weight_type),
                 o_bytes = weight_bytes(width, width, options_.weight_type);
    stages = {{2 * rows * width * qkv_width, qkv_bytes + row_bytes * (width + qkv_width)},
              {4 * width * pairs, cache_bytes + row_bytes * 2 * width},
              {2 * rows * width * width, o_bytes + row_bytes * 2 * width}};
    bytes = qkv_bytes + o_bytes + cache_bytes + row_bytes * 2 * width;
  }

  void pack(Copy *copy) {
    const int64_t width = shape_.width(), qkv_width = width + 2 * shape_.kv_width();
    const float range = 1.7f / std::sqrt(static_cast<float>(width));
    const Array<float> w_qkv = random_array(width * qkv_width, range, 1), w_o = random_array(width * width, range, 2);
    mha_layer_config config = {};
    config.struct_size = sizeof config;
    config.query_dim = width;
    config.num_heads = shape_.heads;
    config.num_kv_heads = shape_.kv_heads;
    config.weight_type = options_.weight_type;
    mha_layer_weights weights = {};
    weights.struct_size = sizeof weights;
    weights.w_qkv = w_qkv.get();
    weights.w_o = w_o.get();
    check(mha_layer_pack_size(&config, &weights, nullptr, &packed_bytes_, &error_));
    copy->packed = make_bytes(packed_bytes_);
    check(mha_layer_pack(&config, &weights, nullptr, copy->packed.get(), packed_bytes_, &error_));
    view_layer(copy);
  }

  const Array<float> x_;
  Array<float> y_;
  mha_forward_args args_ = {};
};

class DecodeAttention : public DecodeCase {
 public:
  DecodeAttention(const DecodeShape &shape, const DecodeOptions &options)
      : DecodeCase(shape, options), q_(random_array(rows_ * shape.width(), 1.7f, 3)), output_(make_array<float>(rows_ * shape.width())) {
    const double width = static_cast<double>(shape.width());
    bytes = keys() * static_cast<double>(shape.kv_heads) * key_value_bytes(shape.head_dim, options.cache_type) +
            2 * sizeof(float) * static_cast<double>(rows_) * width;
    stages = {{4 * width * keys(), bytes}};
    Copy first;
    fill_cache(&first);
    args_.struct_size = sizeof args_;
    args_.batch = shape.batch;
    args_.n_q = shape.n;
    args_.num_heads = shape.heads;
    args_.num_kv_heads = shape.kv_heads;
    args_.head_dim = shape.head_dim;
    args_.q = q_.get();
    args_.output = output_.get();
    args_.flags = MHA_CAUSAL;
    args_.scheduler = scheduler();
    args_.instruction_set = options.instruction_set;
    args_.cache = first.cache;
    check(mha_attention_workspace(&args_, &workspace_bytes_, &error_));
    workspace_ = make_bytes(workspace_bytes_);
    make_copies(std::move(first));
  }

  void call() override {
    args_.cache = next_copy().cache;
    check(mha_attention(&args_, workspace_.get(), workspace_bytes_, &error_));
  }

 private:
  const Array<float> q_;
  Array<float> output_;
  mha_attention_args args_ = {};
};

}  // namespace

std::string DecodeShape::layer_name() const {
  return "D:" + std::to_string(width()) + "/H:" + std::to_string(heads) + "/Hkv:" + std::to_string(kv_heads) +
         "/past:" + std::to_string(past);
}

std::string DecodeShape::attention_name() const {
  return "H:" + std::to_string(heads) + "/Hkv:" + std::to_string(kv_heads) + "/head_dim:" + std::to_string(head_dim) +
         "/past:" + std::to_string(past);
}

std::unique_ptr<Case> make_decode_layer(const DecodeShape &shape, const DecodeOptions &options) {
  return std::make_unique<DecodeLayer>(shape, options);
}

std::unique_ptr<Case> make_decode_attention(const DecodeShape &shape, const DecodeOptions &options) {
  return std::make_unique<DecodeAttention>(shape, options);
}

}  // namespace bench
