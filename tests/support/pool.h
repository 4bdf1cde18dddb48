// Pools of blocks whose lengths and tables come with each call.
#ifndef MHA_TESTS_SUPPORT_POOL_H
#define MHA_TESTS_SUPPORT_POOL_H

#include <mha.h>

#include <array>
#include <cstdint>
#include <vector>

#include "support/cache.h"
#include "support/memory.h"
#include "support/random.h"

namespace support {

// The bytes of a block of keys, their scales, values and their scales, as mha_kv_pool says.
inline std::array<int64_t, 4> BlockBytes(const mha_kv_cache_config &config) {
  const int64_t positions = config.num_kv_heads * config.block_positions,
                head_dim_v = config.head_dim_v != 0 ? config.head_dim_v : config.head_dim;
  const uint32_t v_type = config.v_type != 0 ? config.v_type : config.k_type;
  const auto padded = [](int64_t width) { return (width + 15) / 16 * 16; };
  const auto bytes_of = [](uint32_t type, int64_t width) {
    return type == MHA_TYPE_INT4   ? width / 2
           : type == MHA_TYPE_INT8 ? width
           : type <= MHA_TYPE_F32  ? 4 * width
                                   : 2 * width;
  };
  const bool in_keys = config.value_place == MHA_CACHE_VALUES_IN_KEYS;
  return {positions * bytes_of(config.k_type, in_keys ? padded(config.head_dim) : config.head_dim),
          config.k_type == MHA_TYPE_INT8 ? 4 * positions : 0,
          in_keys ? 0 : positions * bytes_of(v_type, padded(head_dim_v)),
          !in_keys && v_type >= MHA_TYPE_INT8 ? 4 * positions : 0};
}

// A pool with the blocks that a paged cache holds, each part in memory of its own before a guard or
// all parts of a block in one page.
class Pool {
 public:
  Pool(const Cache &paged, Random *random);

  mha_kv_cache *get() const { return cache_; }
  const mha_kv_cache_config &config() const { return config_; }
  const mha_kv_pool &memory() const { return pool_; }

  // Makes lengths and tables of these sequences of the paged cache, of all in order if there are
  // none, for a call after which they have the lengths of `after`. Entries behind those, and those
  // of the first `unused` blocks, name no block.
  void SetSequences(const std::vector<int64_t> &sequences, int64_t count, const Cache &after,
                    int64_t unused, mha_sequences *to);

  // Whether every block has the bytes that it has in the paged cache.
  bool HoldsTheBytesOf(const Cache &paged) const;

 private:
  mha_kv_cache_config config_;
  mha_kv_pool pool_;
  std::vector<int64_t> lengths_, given_lengths_, starts_;
  std::vector<int32_t> tables_, given_tables_;
  std::array<Memory, 4> memory_;
  Memory buffer_;
  mha_kv_cache *cache_ = nullptr;
  bool has_starts_;
};

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_POOL_H
