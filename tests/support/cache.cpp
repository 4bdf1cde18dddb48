#include "support/cache.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace support {

Cache::Cache(const mha_kv_cache_config &config, Place place, int fill)
    : config_(config), buffer_(SizeOf(config), place, 64) {
  buffer_.Fill(fill);
  Check(mha_kv_cache_init(&config_, buffer_.data(), buffer_.size(), &cache_, &error_), error_);
}

Cache Cache::Copy(Place place) const {
  Cache copy;
  copy.config_ = config_;
  copy.buffer_ = Memory(buffer_.size(), place, 64);
  std::memcpy(copy.buffer_.data(), buffer_.data(), buffer_.size());
  Check(mha_kv_cache_view(copy.buffer_.data(), copy.buffer_.size(), &copy.cache_, &error_), error_);
  return copy;
}

int64_t Cache::Length(int64_t sequence) const {
  int64_t length = -1;
  Check(mha_kv_cache_length(cache_, sequence, &length, &error_), error_);
  return length;
}

void Cache::Truncate(int64_t sequence, int64_t length) {
  Check(mha_kv_cache_truncate(cache_, sequence, length, &error_), error_);
}

void Cache::SetBlocks(int64_t sequence, const std::vector<int32_t> &blocks) {
  Check(mha_kv_cache_set_blocks(cache_, sequence, blocks.data(),
                                static_cast<int64_t>(blocks.size()), &error_),
        error_);
}

void Cache::CopyPrefix(int64_t from, int64_t to, int64_t length) {
  Check(mha_kv_cache_copy_prefix(cache_, from, to, length, &error_), error_);
}

void Cache::Append(int64_t sequence, const KeysAndValues &rows) {
  const int64_t count =
      static_cast<int64_t>(rows.k.size()) / (config_.num_kv_heads * config_.head_dim);
  const float *v = config_.value_place == MHA_CACHE_VALUES_IN_KEYS ? nullptr : rows.v.data();
  Check(mha_kv_cache_append(cache_, sequence, count, rows.k.data(), v, &error_), error_);
}

KeysAndValues Cache::Read(int64_t sequence, int64_t first, int64_t count) const {
  KeysAndValues rows;
  rows.k.assign(count * config_.num_kv_heads * config_.head_dim, Unwritten());
  rows.v.assign(count * config_.num_kv_heads * head_dim_v(), Unwritten());
  Check(mha_kv_cache_read(cache_, sequence, first, count, rows.k.data(), rows.v.data(), &error_),
        error_);
  return rows;
}

size_t Cache::SizeOf(const mha_kv_cache_config &config) {
  size_t bytes = 0;
  mha_error error;
  Check(mha_kv_cache_size(&config, &bytes, &error), error);
  return bytes;
}

std::string Describe(const CacheForm &form) {
  if (form.kind == MHA_CACHE_KIND_CONTIGUOUS) return "contiguous";
  return (form.kind == MHA_CACHE_KIND_RING ? "ring of " : "paged by ") +
         std::to_string(form.positions);
}

mha_kv_cache_config CacheConfigOf(const AttentionSizes &sizes, const CacheForm &form,
                                  int64_t num_sequences, int64_t n) {
  mha_kv_cache_config config = Zeroed<mha_kv_cache_config>();
  config.num_sequences = num_sequences;
  config.num_kv_heads = sizes.num_kv_heads;
  config.head_dim = sizes.head_dim;
  config.head_dim_v = sizes.head_dim_v;
  config.k_type = static_cast<uint32_t>(sizes.k_type);
  config.value_place = sizes.values_in_keys ? MHA_CACHE_VALUES_IN_KEYS : MHA_CACHE_VALUES_OWN;
  config.v_type = sizes.values_in_keys ? 0 : static_cast<uint32_t>(sizes.v_type);
  config.kind = form.kind;
  config.capacity = n;
  if (form.kind == MHA_CACHE_KIND_RING) config.capacity = form.positions;
  if (form.kind == MHA_CACHE_KIND_PAGED) {
    const int64_t blocks = (n + form.positions - 1) / form.positions;
    config.capacity = blocks * form.positions;
    config.block_positions = form.positions;
    config.num_blocks = num_sequences * blocks + 3;
  }
  return config;
}

void SpreadBlocks(Random *random, Cache *cache) {
  const mha_kv_cache_config &config = cache->config();
  if (config.kind != MHA_CACHE_KIND_PAGED) return;
  std::vector<int32_t> pool(config.num_blocks);
  for (size_t n = 0; n < pool.size(); n++) pool[n] = static_cast<int32_t>(n);
  for (size_t n = pool.size(); n > 1; n--)
    std::swap(pool[n - 1], pool[random->Between(0, static_cast<int64_t>(n) - 1)]);
  const int64_t count = config.capacity / config.block_positions;
  for (int64_t sequence = 0; sequence < config.num_sequences; sequence++) {
    cache->SetBlocks(sequence, std::vector<int32_t>(pool.begin() + sequence * count,
                                                    pool.begin() + (sequence + 1) * count));
  }
}

}  // namespace support
