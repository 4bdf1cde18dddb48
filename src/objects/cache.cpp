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
// whose numbers the tables give if the cache is paged.
KeyValues cached(const mha_kv_cache *cache, uint32_t type, int64_t width, int64_t offset,
                 int64_t scales_offset) {
  KeyValues source = {};
  source.base = at<const void>(cache, offset);
  source.storage = storage_of_type(type);
  source.is_packed = true;
  source.row_stride = quotient(bytes_of(source.storage, width), bytes_of(source.storage));
  source.head_stride = cache->block_positions * source.row_stride;
  source.batch_stride = cache->num_kv_heads * source.head_stride;
  source.block_positions = cache->block_positions;
  source.ring_positions = cache->kind == MHA_CACHE_KIND_RING ? cache->capacity : 0;
  if (cache->kind == MHA_CACHE_KIND_PAGED) {
    source.tables = table_of(cache, 0);
    source.table_stride = table_entries(*cache);
  }
  if (has_codes(source.storage)) source.scales = at<const float>(cache, scales_offset);
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
  const Count sequences(cache.num_sequences),
      positions =
          Count(cache.num_blocks) * Count(cache.num_kv_heads) * Count(cache.block_positions);
  const Count of_values = has_own_values(cache) ? positions : Count(0);
  CacheLayout layout;
  layout.states = take(sequences, sizeof(CacheState));
  layout.tables = take(sequences * Count(table_entries(cache)), sizeof(int32_t));
  layout.users = take(is_paged ? Count(cache.num_blocks) : Count(0), sizeof(int32_t));
  layout.keys = take(positions * Count(key_width(cache)), bytes_of(storage_of_type(cache.k_type)));
  layout.k_scales = take(cache.k_type == MHA_TYPE_INT8 ? positions : Count(0), sizeof(float));
  const Storage v = storage_of_type(cache.v_type);
  layout.values = take(of_values * Count(bytes_of(v, padded(cache.head_dim_v))), 1);
  layout.v_scales = take(has_codes(v) ? of_values : Count(0), sizeof(float));
  layout.bytes = end.value();
  return layout;
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
  const CacheLayout layout = layout_of(*cache);
  KeyValues keys = cached(cache, cache->k_type, key_width(*cache), layout.keys, layout.k_scales);
  keys.is_packed = has_own_values(*cache);
  return keys;
}

// Values that are in the keys have the keys' type and the width of their rows.
KeyValues cached_values(const mha_kv_cache *cache) {
  const CacheLayout layout = layout_of(*cache);
  if (!has_own_values(*cache))
    return cached(cache, cache->k_type, key_width(*cache), layout.keys, layout.k_scales);
  return cached(cache, cache->v_type, padded(cache->head_dim_v), layout.values, layout.v_scales);
}

void grow(mha_kv_cache *cache, int64_t sequence, int64_t count) {
  CacheState &state = state_of(cache, sequence);
  state.length += count;
  if (state.written < state.length) state.written = state.length;
}

}  // namespace mha
