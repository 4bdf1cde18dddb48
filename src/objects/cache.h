// The KV cache: one buffer of the caller's, whose first bytes are the object.
#pragma once

#include "../kernels/kernels.h"
#include "../plan/count.h"
#include "mha.h"

// Position-independent, the same on every machine of one byte order. Behind it lie, each on a
// border of 64 bytes, in this order:
//   states    [num_sequences] CacheState
//   tables    [num_sequences][capacity / block_positions] int32_t, -1 where there is no block
//             (paged)
//   users     [num_blocks] int32_t, in how many tables a block stands
//             (paged)
//   keys      [block][kv head][positions / 16][head_dim][16]
//   k scales  [block][kv head][positions] float
//             (int8)
//   values    [block][kv head][positions][head_dim_v rounded up to 16]
//   v scales  likewise
// Where values are in the keys, there are no values and v scales, and keys are [block][kv
// head][positions][head_dim rounded up to 16]. Where not paged, a sequence is one block, of
// capacity positions rounded up to 16.
struct mha_kv_cache {
  char magic[8];
  uint32_t byte_order;
  uint32_t version;
  uint32_t contract;
  uint32_t kind;            // MHA_CACHE_KIND_*
  uint32_t k_type, v_type;  // MHA_TYPE_*, never 0
  uint64_t bytes;
  int64_t num_sequences, capacity;
  int64_t num_kv_heads, head_dim, head_dim_v;
  int64_t block_positions, num_blocks;  // resolved: also where not paged
  uint32_t values;                      // MHA_CACHE_VALUES_*
  unsigned char reserved[256 - 108];
  uint64_t checksum;  // of all this, with 0 here
};

namespace mha {

struct CacheState {
  int64_t length;   // positions that the sequence has
  int64_t written;  // the most it has had since it was last empty: a ring holds those from written
                    // - capacity on
};

constexpr char cache_magic[8] = {'m', 'h', 'a', ' ', 'k', 'v', 'c', 0};
constexpr uint32_t cache_version = 1;
constexpr uint32_t cache_byte_order = 0x01020304u;
constexpr int32_t no_block = -1;  // in a table

// Offsets of the parts, in bytes; -1 for `bytes` if they overflow.
struct CacheLayout {
  int64_t states, tables, users, keys, k_scales, values, v_scales, bytes;
};
CacheLayout layout_of(const mha_kv_cache &cache);
uint64_t checksum_of(mha_kv_cache header);

template <class T>
T *at(const mha_kv_cache *cache, int64_t offset) {
  return reinterpret_cast<T *>(reinterpret_cast<uintptr_t>(cache) + static_cast<uintptr_t>(offset));
}

inline bool has_own_values(const mha_kv_cache &cache) {
  return cache.values == MHA_CACHE_VALUES_OWN;
}

// Entries of a table, and how many of them name blocks for the positions below `length`.
inline int64_t table_entries(const mha_kv_cache &cache) {
  return cache.kind == MHA_CACHE_KIND_PAGED ? quotient(cache.capacity, cache.block_positions) : 0;
}
inline int64_t blocks_in_use(const mha_kv_cache &cache, int64_t length) {
  return blocks_of(length, cache.block_positions);
}
int32_t *table_of(const mha_kv_cache *cache, int64_t sequence);

CacheState &state_of(mha_kv_cache *cache, int64_t sequence);
const CacheState &state_of(const mha_kv_cache *cache, int64_t sequence);

// The first position of a sequence that a cache still holds when its length becomes `length`.
int64_t oldest_position(const mha_kv_cache *cache, int64_t sequence, int64_t length);

KeyValues cached_keys(const mha_kv_cache *cache);
KeyValues cached_values(const mha_kv_cache *cache);

// After the call: the sequence has `count` more positions.
void grow(mha_kv_cache *cache, int64_t sequence, int64_t count);

}  // namespace mha
