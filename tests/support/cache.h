// Caches of keys and values, and histories of sequences that are fed to them in any pieces.
#ifndef MHA_TESTS_SUPPORT_CACHE_H
#define MHA_TESTS_SUPPORT_CACHE_H

#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "support/attention.h"
#include "support/layer.h"
#include "support/aligned.h"
#include "support/outputs.h"
#include "support/random.h"

namespace support {

inline constexpr Storage kStorageTypes[] = {Storage::kF32, Storage::kF16, Storage::kBf16, Storage::kInt8};

// Memory aligned as a cache needs it.
class AlignedBuffer {
 public:
  AlignedBuffer(size_t bytes, unsigned char fill) : bytes_(bytes), data_(NewAligned(bytes)) {
    std::memset(data_.get(), fill, bytes);
  }
  unsigned char *data() const { return data_.get(); }
  size_t size() const { return bytes_; }
  std::vector<unsigned char> Bytes() const { return std::vector<unsigned char>(data(), data() + bytes_); }

 private:
  size_t bytes_;
  Aligned data_;
};

struct KeysAndValues {
  std::vector<float> k;  // [count, num_kv_heads, head_dim]
  std::vector<float> v;  // [count, num_kv_heads, head_dim_v]
};

// A cache in a buffer of its own, exactly as large as asked for. What fails is reported where it happens.
class Cache {
 public:
  explicit Cache(const mha_kv_cache_config &config, unsigned char fill = 0xa5)
      : config_(config), buffer_(std::make_unique<AlignedBuffer>(SizeOf(config), fill)) {
    Check("init", mha_kv_cache_init(&config_, buffer_->data(), buffer_->size(), &cache_, &error_));
  }

  // The same cache elsewhere: its bytes copied, and viewed there.
  Cache Copy() const {
    Cache copy(config_, buffer_->size());
    std::memcpy(copy.buffer_->data(), buffer_->data(), buffer_->size());
    copy.Check("view", mha_kv_cache_view(copy.buffer_->data(), copy.buffer_->size(), &copy.cache_, &copy.error_));
    return copy;
  }

  mha_kv_cache *get() const { return cache_; }
  const mha_kv_cache_config &config() const { return config_; }
  AlignedBuffer &buffer() const { return *buffer_; }

  int64_t Length(int64_t sequence) const {
    int64_t length = -1;
    Check("length", mha_kv_cache_length(cache_, sequence, &length, &error_));
    return length;
  }
  void Truncate(int64_t sequence, int64_t length) { Check("truncate", mha_kv_cache_truncate(cache_, sequence, length, &error_)); }
  void SetBlocks(int64_t sequence, const std::vector<int32_t> &blocks) {
    Check("set_blocks", mha_kv_cache_set_blocks(cache_, sequence, blocks.data(), static_cast<int64_t>(blocks.size()), &error_));
  }
  void CopyPrefix(int64_t from, int64_t to, int64_t length) {
    Check("copy_prefix", mha_kv_cache_copy_prefix(cache_, from, to, length, &error_));
  }
  void Append(int64_t sequence, const KeysAndValues &rows) {
    const int64_t count = static_cast<int64_t>(rows.k.size()) / (config_.num_kv_heads * config_.head_dim);
    Check("append", mha_kv_cache_append(cache_, sequence, count, rows.k.data(), rows.v.data(), &error_));
  }
  KeysAndValues Read(int64_t sequence, int64_t first, int64_t count) const {
    KeysAndValues rows;
    rows.k.assign(static_cast<size_t>(count * config_.num_kv_heads * config_.head_dim), Unwritten());
    rows.v.assign(static_cast<size_t>(count * config_.num_kv_heads * head_dim_v()), Unwritten());
    Check("read", mha_kv_cache_read(cache_, sequence, first, count, rows.k.data(), rows.v.data(), &error_));
    return rows;
  }
  int64_t head_dim_v() const { return config_.head_dim_v != 0 ? config_.head_dim_v : config_.head_dim; }

 private:
  Cache(const mha_kv_cache_config &config, size_t bytes) : config_(config), buffer_(std::make_unique<AlignedBuffer>(bytes, 0)) {}

  static size_t SizeOf(const mha_kv_cache_config &config) {
    size_t bytes = 0;
    mha_error error = {};
    EXPECT_EQ(mha_kv_cache_size(&config, &bytes, &error), MHA_OK) << error.message;
    return bytes;
  }
  void Check(const char *what, mha_status status) const { EXPECT_EQ(status, MHA_OK) << what << ": " << error_.message; }

  mha_kv_cache_config config_;
  std::unique_ptr<AlignedBuffer> buffer_;
  mha_kv_cache *cache_ = nullptr;
  mutable mha_error error_ = {};
};

// A kind of cache, and what a block or a ring of it holds.
struct CacheForm {
  uint32_t kind;
  int64_t positions;  // of a block if paged, of the ring; not looked at otherwise
};

inline std::string Describe(const CacheForm &form) {
  if (form.kind == MHA_CACHE_CONTIGUOUS) return "contiguous";
  return (form.kind == MHA_CACHE_RING ? "ring of " : "paged by ") + std::to_string(form.positions);
}

inline constexpr CacheForm kContiguousAndPaged[] = {
    {MHA_CACHE_CONTIGUOUS, 0}, {MHA_CACHE_PAGED, 16}, {MHA_CACHE_PAGED, 64}, {MHA_CACHE_PAGED, 256}, {MHA_CACHE_PAGED, 512}};

// A cache for so many sequences of n positions of these sizes.
inline mha_kv_cache_config CacheConfigOf(const AttentionSizes &sizes, const CacheForm &form, int64_t num_sequences, int64_t n) {
  mha_kv_cache_config config = {};
  config.struct_size = sizeof config;
  config.num_sequences = num_sequences;
  config.num_kv_heads = sizes.num_kv_heads;
  config.head_dim = sizes.head_dim;
  config.head_dim_v = sizes.head_dim_v;
  config.k_type = static_cast<uint32_t>(sizes.k_type);
  config.v_type = static_cast<uint32_t>(sizes.v_type);
  config.kind = form.kind;
  config.capacity = n;
  if (form.kind == MHA_CACHE_RING) config.capacity = form.positions;
  if (form.kind == MHA_CACHE_PAGED) {
    const int64_t blocks = (n + form.positions - 1) / form.positions;
    config.capacity = blocks * form.positions;
    config.block_positions = form.positions;
    config.num_blocks = num_sequences * blocks + 3;
  }
  return config;
}

// Gives every sequence of a paged cache all the blocks that it may need, from all over the pool.
inline void SpreadBlocks(Random *random, Cache *cache) {
  const mha_kv_cache_config &config = cache->config();
  if (config.kind != MHA_CACHE_PAGED) return;
  std::vector<int32_t> pool(static_cast<size_t>(config.num_blocks));
  for (size_t n = 0; n < pool.size(); n++) pool[n] = static_cast<int32_t>(n);
  for (size_t n = pool.size(); n > 1; n--) std::swap(pool[n - 1], pool[random->Between(0, static_cast<int64_t>(n) - 1)]);
  const int64_t count = config.capacity / config.block_positions;
  for (int64_t sequence = 0; sequence < config.num_sequences; sequence++) {
    cache->SetBlocks(sequence, std::vector<int32_t>(pool.begin() + sequence * count, pool.begin() + (sequence + 1) * count));
  }
}

// The next rows of a sequence of a history.
struct Part {
  int64_t b;
  int64_t count;
};

// Rows first .. first + count of the given sequences, each in a row of a batch, padded to the longest.
inline std::vector<float> GatherRows(const std::vector<float> &x, int64_t n, int64_t width, const std::vector<Part> &parts,
                                     const std::vector<int64_t> &first, int64_t longest, bool padding_left) {
  std::vector<float> batch(parts.size() * longest * width, FromBits(0x7fc0dead));
  for (size_t p = 0; p < parts.size(); p++) {
    const int64_t at = static_cast<int64_t>(p) * longest + (padding_left ? longest - parts[p].count : 0);
    const auto from = x.begin() + (parts[p].b * n + first[parts[p].b]) * width;
    std::copy(from, from + parts[p].count * width, batch.begin() + at * width);
  }
  return batch;
}

// Feeds a history to a cache, piece by piece, and collects what the calls give. A history is a self-attention: as many keys as queries per
// sequence, without lengths or q_start. Sequence b lies in sequence sequences[b] of the cache.
class Replay {
 public:
  Replay(const AttentionSizes &history, int64_t y_width, Cache *cache, std::vector<int64_t> sequences = {})
      : history_(history), y_width_(y_width), cache_(cache), sequences_(std::move(sequences)), lengths_(history.batch, 0) {
    for (int64_t b = static_cast<int64_t>(sequences_.size()); b < history.batch; b++) sequences_.push_back(b);
    outputs_.y.assign(history.batch * history.n_q * y_width, Unwritten());
    outputs_.lse.assign(history.batch * history.num_heads * history.n_q, Unwritten());
  }

  const Outputs &outputs() const { return outputs_; }
  int64_t length(int64_t b) const { return lengths_[b]; }
  bool Finished() const {
    return std::all_of(lengths_.begin(), lengths_.end(), [&](int64_t length) { return length == history_.n_q; });
  }

  void Truncate(int64_t b, int64_t length) {
    cache_->Truncate(sequences_[b], length);
    lengths_[b] = length;
  }
  void SetLength(int64_t b, int64_t length) { lengths_[b] = length; }  // after a change of the cache
  void MoveTo(Cache *cache) { cache_ = cache; }

  // One call for the next rows of some sequences, by mha_attention.
  void Step(const AttentionProblem &history, const std::vector<Part> &parts, AttentionCall call, bool padding_left = false) {
    AttentionProblem step;
    const int64_t longest = Prepare(parts, padding_left, &step, &call.cache);
    step.q = GatherRows(history.q, history.n_q, history.num_heads * history.head_dim, parts, lengths_, longest, padding_left);
    step.k = GatherRows(history.k, history.n_q, history.num_kv_heads * history.head_dim, parts, lengths_, longest, padding_left);
    step.v = GatherRows(history.v, history.n_q, history.num_kv_heads * history.head_dim_v, parts, lengths_, longest, padding_left);
    call.asked = kAskLse;
    Collect(parts, longest, padding_left, Attend(step, call));
  }

  // The same by mha_forward.
  void Step(const LayerProblem &history, const std::vector<Part> &parts, const mha_layer *layer, LayerCall call,
            bool padding_left = false) {
    LayerProblem step = history;
    const int64_t longest = Prepare(parts, padding_left, &step, &call.cache);
    step.query = GatherRows(history.query, history.n_q, history.query_dim, parts, lengths_, longest, padding_left);
    call.asked = kAskLse;
    Collect(parts, longest, padding_left, Forward(layer, step, call));
  }

  // Some sequences that are not at their end, and how many rows each. At most `most` rows.
  std::vector<Part> RandomParts(Random *random, int64_t most) const {
    std::vector<Part> parts;
    const int64_t limit = random->Pick<int64_t>({1, 1, 3, 17, 64, most});
    while (parts.empty()) {
      for (int64_t b = 0; b < history_.batch; b++) {
        const int64_t left = history_.n_q - lengths_[b];
        if (left > 0 && random->Chance(0.7)) parts.push_back({b, random->Between(1, std::min({left, limit, most}))});
      }
    }
    for (size_t n = parts.size(); n > 1; n--) std::swap(parts[n - 1], parts[random->Between(0, static_cast<int64_t>(n) - 1)]);
    return parts;
  }

  // All sequences as far as they are not at their end.
  std::vector<Part> EachBy(int64_t count) const {
    std::vector<Part> parts;
    for (int64_t b = 0; b < history_.batch; b++) {
      if (lengths_[b] < history_.n_q) parts.push_back({b, std::min(count, history_.n_q - lengths_[b])});
    }
    return parts;
  }

 private:
  // The sizes of the step, but for its rows. Returns the longest part.
  int64_t Prepare(const std::vector<Part> &parts, bool padding_left, AttentionSizes *step, CacheUse *use) const {
    int64_t longest = 0;
    bool same = true;
    for (const Part &part : parts) longest = std::max(longest, part.count);
    *step = history_;
    step->batch = static_cast<int64_t>(parts.size());
    step->n_q = step->n_kv = longest;
    step->padding_left = padding_left;
    use->cache = cache_->get();
    use->sequences.clear();
    bool in_order = true;
    for (size_t p = 0; p < parts.size(); p++) {
      same = same && parts[p].count == longest;
      step->q_lengths.push_back(parts[p].count);
      use->sequences.push_back(sequences_[parts[p].b]);
      in_order = in_order && use->sequences.back() == static_cast<int64_t>(p);
    }
    if (same) step->q_lengths.clear();
    step->kv_lengths = step->q_lengths;
    if (in_order) use->sequences.clear();
    if (step->rope) {
      for (std::vector<int64_t> *positions : {&step->rope->q_positions, &step->rope->k_positions}) {
        if (positions->empty()) continue;
        std::vector<int64_t> gathered(parts.size() * longest, -1);
        for (size_t p = 0; p < parts.size(); p++) {
          const int64_t at = static_cast<int64_t>(p) * longest + (padding_left ? longest - parts[p].count : 0);
          const auto from = positions->begin() + parts[p].b * history_.n_q + lengths_[parts[p].b];
          std::copy(from, from + parts[p].count, gathered.begin() + at);
        }
        *positions = gathered;
      }
    }
    return longest;
  }

  void Collect(const std::vector<Part> &parts, int64_t longest, bool padding_left, const Outputs &step) {
    for (size_t p = 0; p < parts.size(); p++) {
      const Part &part = parts[p];
      const int64_t from = padding_left ? longest - part.count : 0, to = lengths_[part.b], batch_at = static_cast<int64_t>(p);
      std::copy_n(step.y.begin() + (batch_at * longest + from) * y_width_, part.count * y_width_,
                  outputs_.y.begin() + (part.b * history_.n_q + to) * y_width_);
      for (int64_t h = 0; h < history_.num_heads; h++) {
        std::copy_n(step.lse.begin() + (batch_at * history_.num_heads + h) * longest + from, part.count,
                    outputs_.lse.begin() + (part.b * history_.num_heads + h) * history_.n_q + to);
      }
      lengths_[part.b] += part.count;
    }
  }

  AttentionSizes history_;
  int64_t y_width_;
  Cache *cache_;
  std::vector<int64_t> sequences_;
  std::vector<int64_t> lengths_;
  Outputs outputs_;
};

// Sequence b's rows first .. first + count as a cache stores them and hands them out again.
inline KeysAndValues SpecifyStored(const AttentionProblem &history, int64_t b, int64_t first, int64_t count) {
  const spec::Functions &functions = spec::Fastest();
  KeysAndValues rows;
  rows.k = SliceRows(history.k, b, history.n_kv, history.num_kv_heads * history.head_dim, first, count);
  rows.v = SliceRows(history.v, b, history.n_kv, history.num_kv_heads * history.head_dim_v, first, count);
  WithRotation(history, b, [&](const Rotation *rotation) {
    for (int64_t j = 0; rotation && j < count; j++) {
      functions.rotate(*rotation, rotation->k_positions ? rotation->k_positions[first + j] : first + j, history.num_kv_heads,
                       history.head_dim, rows.k.data() + j * history.num_kv_heads * history.head_dim);
    }
  });
  KeysAndValues stored = rows;
  functions.store(history.k_type, rows.k.data(), count * history.num_kv_heads, history.head_dim, stored.k.data());
  functions.store(history.v_type, rows.v.data(), count * history.num_kv_heads, history.head_dim_v, stored.v.data());
  return stored;
}

inline testing::AssertionResult SameBits(const KeysAndValues &actual, const KeysAndValues &expected) {
  const testing::AssertionResult k = SameBits("k", actual.k, expected.k);
  return k ? SameBits("v", actual.v, expected.v) : k;
}

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_CACHE_H
