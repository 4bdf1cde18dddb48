// The KV cache: one buffer of the caller's, whose first bytes are the object.
//
// A cache holds keys and values of several sequences. A sequence is a row of positions, which are
// stored in blocks: contiguous and ring caches have one block for each sequence, and paged caches
// have a pool of blocks with a table for each sequence. Sequences can share blocks of the pool;
// a block that several tables name is not written to.
//
// Within a block, 16 positions of a head form a group. Groups of keys are transposed,
// [head_dim][16], so that a kernel multiplies a query with 16 keys at once.
#pragma once

#include "../base/buffer.h"
#include "../base/count.h"
#include "../kernels/kernels.h"
#include "mha.h"

// The header of a cache, the same on every machine of one byte order. These parts follow it, each
// at a multiple of 64 bytes:
//   states    [num_sequences] CacheState
//   tables    [num_sequences][capacity / block_positions] int32_t, -1 for no block (only paged)
//   users     [num_blocks] int32_t, the number of tables that name the block (only paged)
//   keys      [block][kv head][positions / 16][head_dim][16], of int8 the Hadamard transform
//   k scales  [block][kv head][positions] float (only int8)
//   values    [block][kv head][positions][head_dim_v rounded up to 16], int4: 8 bytes for 16
//             numbers (CachedInt4 of storage.h) of the Hadamard transform
//   v scales  [block][kv head][positions] float (only int8 and int4)
// With MHA_CACHE_VALUES_IN_KEYS, as for latent attention, the first columns of a key are its value:
// keys are not transposed but [block][kv head][positions][head_dim rounded up to 16], and there are
// no values and v scales. The block of a sequence that is not paged has capacity positions, rounded
// up to 16.
//
// A pool has none of these parts: its header holds the addresses of the last four.
namespace mha {
struct PoolPart {
  uint64_t address;  // of block 0
  int64_t stride;    // bytes from block to block
};
enum CachePart { keys_part, k_scales_part, values_part, v_scales_part, num_cache_parts };
}  // namespace mha

struct mha_kv_cache {
  mha::BufferHead head;
  uint32_t kind;            // MHA_CACHE_KIND_*
  uint32_t k_type, v_type;  // MHA_TYPE_*, never 0
  uint64_t bytes;
  int64_t num_sequences, capacity;
  int64_t num_kv_heads, head_dim, head_dim_v;
  int64_t block_positions, num_blocks;  // of a cache that is not paged, too
  uint32_t value_place;                 // MHA_CACHE_VALUES_*
  uint32_t reserved_word;
  mha::PoolPart pool[mha::num_cache_parts];  // 0 unless the cache is a pool
  unsigned char reserved[256 - 176];
  uint64_t checksum;  // of the header, with 0 in this field
};

namespace mha {

// How far a sequence has got. Truncating it lowers its length alone; `written` is the greatest
// length since the sequence was last empty, because a ring has overwritten the positions before
// written - capacity for good.
struct CacheState {
  int64_t length;
  int64_t written;
};

uint64_t checksum_of(mha_kv_cache header);
bool has_sound_checksum(const void *header);

constexpr BufferFormat cache_format = {{{'m', 'h', 'a', ' ', 'k', 'v', 'c', 0}},
                                       sizeof(mha_kv_cache),
                                       has_sound_checksum,
                                       MHA_ERROR_CACHE_FORMAT,
                                       "KV cache",
                                       "mha_kv_cache_init",
                                       "fill a new one"};
constexpr int32_t no_block = -1;  // in a table

// Offsets of the parts in bytes, and the size of the whole cache, which is -1 if it overflows.
struct CacheLayout {
  int64_t states, tables, users, parts[num_cache_parts], bytes;
};
CacheLayout layout_of(const mha_kv_cache &cache);

// The bytes that one block has of a part; 0 if the cache does not have the part.
Count block_bytes(const mha_kv_cache &cache, CachePart part);

// The memory at an offset. The same functions serve those who read and those who write: the caller
// passes a cache that is not const to every function that writes.
template <class T>
T *at(const mha_kv_cache *cache, int64_t offset) {
  return reinterpret_cast<T *>(reinterpret_cast<uintptr_t>(cache) + static_cast<uintptr_t>(offset));
}

inline bool has_own_values(const mha_kv_cache &cache) {
  return cache.value_place == MHA_CACHE_VALUES_OWN;
}

// Whether sequences consist of blocks, which the program numbers, and whether their tables come
// with the call.
inline bool has_blocks(uint32_t kind) {
  return kind == MHA_CACHE_KIND_PAGED || kind == MHA_CACHE_KIND_POOL;
}
inline bool is_pool(const mha_kv_cache &cache) { return cache.kind == MHA_CACHE_KIND_POOL; }

// The entries of a sequence's table, and how many of them name blocks for the positions below
// `length`. A cache that is not paged has no tables of its own.
inline int64_t table_entries(const mha_kv_cache &cache) {
  return cache.kind == MHA_CACHE_KIND_PAGED ? quotient(cache.capacity, cache.block_positions) : 0;
}
inline int64_t blocks_in_use(const mha_kv_cache &cache, int64_t length) {
  return blocks_of(length, cache.block_positions);
}
int32_t *table_of(const mha_kv_cache *cache, int64_t sequence);
int32_t *users_of(const mha_kv_cache *cache);
CacheState &state_of(const mha_kv_cache *cache, int64_t sequence);

// The first position of a sequence that is still stored when its length becomes `length`. It is 0
// unless a ring has overwritten positions.
int64_t oldest_position(const mha_kv_cache *cache, int64_t sequence, int64_t length);

// The keys and values as the kernels address them; of a pool without its tables.
KeyValues cached_keys(const mha_kv_cache *cache);
KeyValues cached_values(const mha_kv_cache *cache);

// Counts `count` new positions of a sequence, after they are written.
void grow(mha_kv_cache *cache, int64_t sequence, int64_t count);

}  // namespace mha
