// The KV cache: one buffer of the caller's, whose first bytes are the object.
#pragma once

#include "kernels/kernels.h"
#include "mha.h"
#include "status.h"

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

CacheState &state_of(mha_kv_cache *cache, int64_t sequence);
const CacheState &state_of(const mha_kv_cache *cache, int64_t sequence);

// The first position of a sequence that a cache still holds when its length becomes `length`.
int64_t oldest_position(const mha_kv_cache *cache, int64_t sequence, int64_t length);

KeyValues cached_keys(const mha_kv_cache *cache);
KeyValues cached_values(const mha_kv_cache *cache);

// Rows of keys or values on their way to packed storage, such as a cache's, as they are.
inline KvStore storing_of(const StridedRows &rows, const KeyValues &to, const Sequence *sequences,
                          int64_t num_kv_heads, int64_t width, bool are_keys) {
  return {rows, {}, sequences, to, num_kv_heads, width, are_keys && to.is_packed};
}

// New rows come with values, unless the cache (which may be null) has them in its keys. name: of v,
// for the message.
mha_status check_values(Report report, const mha_kv_cache *cache, int64_t rows, const void *v,
                        const char *name = "v");

// Whether `count` more positions of a sequence can be written: there is room for them, in blocks
// that no other sequence shares.
mha_status check_append(Report report, const mha_kv_cache *cache, int64_t sequence, int64_t count);
void grow(mha_kv_cache *cache, int64_t sequence, int64_t count);

// That it is a cache: what tells one from other memory, not all that mha_kv_cache_view checks.
mha_status check_cache(Report report, const mha_kv_cache *cache, const char *name = "cache");
inline mha_status check_optional_cache(Report report, const mha_kv_cache *cache,
                                       const char *name = "cache") {
  return cache ? check_cache(report, cache, name) : MHA_OK;
}
mha_status check_cache_sequence(Report report, const mha_kv_cache *cache, int64_t sequence);

// Of the caches of a call, the one to append to and the one to read, at most one is given.
inline mha_status check_one_cache(Report report, const mha_kv_cache *cache,
                                  const mha_kv_cache *cache_read) {
  return cache && cache_read
             ? report.invalid("cache and cache_read are both given; set one of them to NULL")
             : MHA_OK;
}

}  // namespace mha
