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

// Keys cannot be int4, and are int8 beside such values.
inline Storage KeysBeside(Storage values) {
  return values == Storage::kInt4 ? Storage::kInt8 : values;
}

struct KeysAndValues {
  std::vector<float> k;  // [count, num_kv_heads, head_dim]
  std::vector<float> v;  // [count, num_kv_heads, head_dim_v]
};

// A cache in a buffer of its own, exactly as large as asked for.
class Cache {
 public:
  explicit Cache(const mha_kv_cache_config &config, Place place = Place::kAnywhere,
                 int fill = 0xa5);

  // The same cache elsewhere: its bytes copied, and viewed there.
  Cache Copy(Place place = Place::kAnywhere) const;

  mha_kv_cache *get() const { return cache_; }
  const mha_kv_cache_config &config() const { return config_; }
  Memory &buffer() { return buffer_; }
  const Memory &buffer() const { return buffer_; }

  int64_t Length(int64_t sequence) const;
  void Truncate(int64_t sequence, int64_t length);
  void SetBlocks(int64_t sequence, const std::vector<int32_t> &blocks);
  void CopyPrefix(int64_t from, int64_t to, int64_t length);
  void Append(int64_t sequence, const KeysAndValues &rows);
  KeysAndValues Read(int64_t sequence, int64_t first, int64_t count) const;
  int64_t head_dim_v() const {
    return config_.head_dim_v != 0 ? config_.head_dim_v : config_.head_dim;
  }

 private:
  Cache() = default;

  static size_t SizeOf(const mha_kv_cache_config &config);

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

std::string Describe(const CacheForm &form);

inline constexpr CacheForm kContiguousAndPaged[] = {{MHA_CACHE_KIND_CONTIGUOUS, 0},
                                                    {MHA_CACHE_KIND_PAGED, 16},
                                                    {MHA_CACHE_KIND_PAGED, 64},
                                                    {MHA_CACHE_KIND_PAGED, 256},
                                                    {MHA_CACHE_KIND_PAGED, 512}};

// A cache for so many sequences of n positions of these sizes.
mha_kv_cache_config CacheConfigOf(const AttentionSizes &sizes, const CacheForm &form,
                                  int64_t num_sequences, int64_t n);

// Gives every sequence of a paged cache all the blocks that it may need, from all over the pool.
void SpreadBlocks(Random *random, Cache *cache);

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_CACHE_H
