// Where the parts of a cache are.
//
// A position of a sequence is found in three steps. Its slot is the position itself, or the
// position modulo the capacity in a ring. Its block is that of the sequence, or the one in entry
// slot / block_positions of its table. The rest of that division is the place in the block, and
// counts groups of 16 positions and positions in a group. place_of does this (kernels/tasks).
//
// Nothing here checks anything: check/cache.h does that when a
// cache is made or viewed, and before anything is written to it.
#include "cache.h"

#include <stddef.h>
#include <string.h>

#include "../storage.h"

namespace mha {
namespace {

static_assert(sizeof(mha_kv_cache) == 256 && offsetof(mha_kv_cache, checksum) == 248,
              "the header is 4 cache lines");

// Rows of values end at a multiple of 16 numbers, so that kernels read whole vectors, and those of
// int4 groups of codes.
int64_t padded(int64_t width) { return blocks_of(width, tile_keys) * tile_keys; }

// The numbers of a key. Transposed groups of keys need no padding.
int64_t key_width(const mha_kv_cache &cache) {
  return has_own_values(cache) ? cache.head_dim : padded(cache.head_dim);
}

// What keys and values have in common. The strides of heads and sequences are those of blocks,
// whose numbers tables give if the cache has blocks. Scales are the part after that of the numbers.
KeyValues cached(const mha_kv_cache *cache, uint32_t type, int64_t width, CachePart part) {
  const CacheLayout layout = layout_of(*cache);
  const PoolPart &in_pool = cache->pool[part], &scales_in_pool = cache->pool[part + 1];
  KeyValues source = {};
  source.storage = storage_of_type(type);
  source.is_packed = true;
  source.row_stride = quotient(bytes_of(source.storage, width), bytes_of(source.storage));
  source.head_stride = cache->block_positions * source.row_stride;
  source.block_positions = cache->block_positions;
  source.ring_positions = cache->kind == MHA_CACHE_KIND_RING ? cache->capacity : 0;
  if (is_pool(*cache)) {
    source.base = reinterpret_cast<const void *>(static_cast<uintptr_t>(in_pool.address));
    source.batch_stride = quotient(in_pool.stride, bytes_of(source.storage));
    source.scales = reinterpret_cast<const float *>(static_cast<uintptr_t>(scales_in_pool.address));
    source.scale_batch_stride = quotient(scales_in_pool.stride, sizeof(float));
    return source;
  }
  source.base = at<const void>(cache, layout.parts[part]);
  source.batch_stride = cache->num_kv_heads * source.head_stride;
  if (cache->kind == MHA_CACHE_KIND_PAGED) {
    source.tables = table_of(cache, 0);
    source.table_stride = table_entries(*cache);
  }
  if (has_codes(source.storage)) source.scales = at<const float>(cache, layout.parts[part + 1]);
  source.scale_batch_stride = cache->num_kv_heads * cache->block_positions;
  return source;
}

}  // namespace

// Puts one part after the other, in the order of the comment in cache.h. A part that a cache does
// not have takes 0 bytes.
CacheLayout layout_of(const mha_kv_cache &cache) {
  const bool is_paged = cache.kind == MHA_CACHE_KIND_PAGED;
  Count end(static_cast<int64_t>(sizeof(mha_kv_cache)));
  const auto take = [&end](Count count, int64_t bytes) {
    const int64_t offset = end.value();
    end = round_up(end + count * Count(bytes), 64);
    return offset;
  };
  const Count sequences(is_pool(cache) ? 0 : cache.num_sequences),
      blocks(is_pool(cache) ? 0 : cache.num_blocks);
  CacheLayout layout;
  layout.states = take(sequences, sizeof(CacheState));
  layout.tables = take(sequences * Count(table_entries(cache)), sizeof(int32_t));
  layout.users = take(is_paged ? blocks : Count(0), sizeof(int32_t));
  for (int part = 0; part < num_cache_parts; ++part)
    layout.parts[part] = take(blocks * block_bytes(cache, static_cast<CachePart>(part)), 1);
  layout.bytes = end.value();
  return layout;
}

Count block_bytes(const mha_kv_cache &cache, CachePart part) {
  const bool are_keys = part == keys_part || part == k_scales_part;
  if (!are_keys && !has_own_values(cache)) return 0;
  const Storage storage = storage_of_type(are_keys ? cache.k_type : cache.v_type);
  const Count positions = Count(cache.num_kv_heads) * Count(cache.block_positions);
  if (part == k_scales_part || part == v_scales_part)
    return has_codes(storage) ? positions * Count(sizeof(float)) : Count(0);
  return positions *
         Count(bytes_of(storage, are_keys ? key_width(cache) : padded(cache.head_dim_v)));
}

// All tables are side by side, so that kernels find that of any sequence from the first.
int32_t *table_of(const mha_kv_cache *cache, int64_t sequence) {
  return at<int32_t>(cache, layout_of(*cache).tables) + sequence * table_entries(*cache);
}

int32_t *users_of(const mha_kv_cache *cache) { return at<int32_t>(cache, layout_of(*cache).users); }

// The states are first, so their place does not depend on anything.
CacheState &state_of(const mha_kv_cache *cache, int64_t sequence) {
  return at<CacheState>(cache, static_cast<int64_t>(sizeof(mha_kv_cache)))[sequence];
}

// Each word goes through a multiplication and a shift that can be undone, so that a change of one
// word always changes the sum.
uint64_t checksum_of(mha_kv_cache header) {
  header.checksum = 0;
  uint64_t words[sizeof header / 8], sum = 0x9e3779b97f4a7c15u;
  memcpy(words, &header, sizeof words);
  for (const uint64_t word : words) {
    sum = (sum ^ word) * 0xff51afd7ed558ccdu;
    sum ^= sum >> 32;
  }
  return sum;
}

bool has_sound_checksum(const void *header) {
  const mha_kv_cache &cache = *static_cast<const mha_kv_cache *>(header);
  return cache.checksum == checksum_of(cache);
}

// Truncating does not bring back what a ring has overwritten, so the greatest length counts.
int64_t oldest_position(const mha_kv_cache *cache, int64_t sequence, int64_t length) {
  const int64_t written = state_of(cache, sequence).written,
                most = written > length ? written : length;
  return cache->kind == MHA_CACHE_KIND_RING && most > cache->capacity ? most - cache->capacity : 0;
}

KeyValues cached_keys(const mha_kv_cache *cache) {
  KeyValues keys = cached(cache, cache->k_type, key_width(*cache), keys_part);
  keys.is_packed = has_own_values(*cache);
  // A value that is in the key is whole blocks of it.
  if (keys.storage == Storage::int8)
    keys.hadamard =
        hadamard_block(cache->head_dim, keys.is_packed ? cache->head_dim : cache->head_dim_v);
  return keys;
}

// Values that are in the keys have the keys' type and the width of their rows.
KeyValues cached_values(const mha_kv_cache *cache) {
  KeyValues values = cached_keys(cache);
  if (has_own_values(*cache)) {
    values = cached(cache, cache->v_type, padded(cache->head_dim_v), values_part);
    if (values.storage == Storage::int4)
      values.hadamard = hadamard_block(cache->head_dim_v, cache->head_dim_v);
  }
  values.is_packed = true;
  return values;
}

void grow(mha_kv_cache *cache, int64_t sequence, int64_t count) {
  CacheState &state = state_of(cache, sequence);
  state.length += count;
  if (state.written < state.length) state.written = state.length;
}

}  // namespace mha
