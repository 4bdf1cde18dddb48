// Caches of keys and values.
#ifndef MHA_TESTS_SUPPORT_CACHE_H
#define MHA_TESTS_SUPPORT_CACHE_H

#include <mha.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "support/attention.h"
#include "support/memory.h"
#include "support/outputs.h"
#include "support/random.h"
#include "support/structs.h"

namespace support {

inline constexpr Storage kStorageTypes[] = {Storage::kF32, Storage::kF16, Storage::kBf16, Storage::kInt8};

struct KeysAndValues {
  std::vector<float> k;  // [count, num_kv_heads, head_dim]
  std::vector<float> v;  // [count, num_kv_heads, head_dim_v]
};

// A cache in a buffer of its own, exactly as large as asked for.
class Cache {
 public:
  explicit Cache(const mha_kv_cache_config &config, Place place = Place::kAnywhere, int fill = 0xa5)
      : config_(config), buffer_(SizeOf(config), place, 64) {
    buffer_.Fill(fill);
    Check(mha_kv_cache_init(&config_, buffer_.data(), buffer_.size(), &cache_, &error_), error_);
  }

  // The same cache elsewhere: its bytes copied, and viewed there.
  Cache Copy(Place place = Place::kAnywhere) const {
    Cache copy;
    copy.config_ = config_;
    copy.buffer_ = Memory(buffer_.size(), place, 64);
    std::memcpy(copy.buffer_.data(), buffer_.data(), buffer_.size());
    Check(mha_kv_cache_view(copy.buffer_.data(), copy.buffer_.size(), &copy.cache_, &error_), error_);
    return copy;
  }

  mha_kv_cache *get() const { return cache_; }
  const mha_kv_cache_config &config() const { return config_; }
  Memory &buffer() { return buffer_; }
  const Memory &buffer() const { return buffer_; }

  int64_t Length(int64_t sequence) const {
    int64_t length = -1;
    Check(mha_kv_cache_length(cache_, sequence, &length, &error_), error_);
    return length;
  }
  void Truncate(int64_t sequence, int64_t length) { Check(mha_kv_cache_truncate(cache_, sequence, length, &error_), error_); }
  void SetBlocks(int64_t sequence, const std::vector<int32_t> &blocks) {
    Check(mha_kv_cache_set_blocks(cache_, sequence, blocks.data(), static_cast<int64_t>(blocks.size()), &error_), error_);
  }
  void CopyPrefix(int64_t from, int64_t to, int64_t length) {
    Check(mha_kv_cache_copy_prefix(cache_, from, to, length, &error_), error_);
  }
  void Append(int64_t sequence, const KeysAndValues &rows) {
    const int64_t count = static_cast<int64_t>(rows.k.size()) / (config_.num_kv_heads * config_.head_dim);
    Check(mha_kv_cache_append(cache_, sequence, count, rows.k.data(), rows.v.data(), &error_), error_);
  }
  KeysAndValues Read(int64_t sequence, int64_t first, int64_t count) const {
    KeysAndValues rows;
    rows.k.assign(static_cast<size_t>(count * config_.num_kv_heads * config_.head_dim), Unwritten());
    rows.v.assign(static_cast<size_t>(count * config_.num_kv_heads * head_dim_v()), Unwritten());
    Check(mha_kv_cache_read(cache_, sequence, first, count, rows.k.data(), rows.v.data(), &error_), error_);
    return rows;
  }
  int64_t head_dim_v() const { return config_.head_dim_v != 0 ? config_.head_dim_v : config_.head_dim; }

 private:
  Cache() = default;

  static size_t SizeOf(const mha_kv_cache_config &config) {
    size_t bytes = 0;
    mha_error error;
    Check(mha_kv_cache_size(&config, &bytes, &error), error);
    return bytes;
  }

  mha_kv_cache_config config_;
  Memory buffer_;
  mha_kv_cache *cache_ = nullptr;
  mutable mha_error error_;
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
  mha_kv_cache_config config = Zeroed<mha_kv_cache_config>();
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

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_CACHE_H
