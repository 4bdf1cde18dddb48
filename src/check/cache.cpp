// The checks of a cache: those of its configuration, from which the header is made, those of a
// buffer that comes from outside, and those of single calls.
#include "cache.h"

#include <string.h>

#include <algorithm>

#include "../base/structs.h"
#include "../storage.h"
#include "rules.h"

namespace mha {
namespace {

// Values in the keys have no type of their own, and are at most as wide as the keys.
mha_status check_values_in_keys(Report report, const mha_kv_cache_config &config) {
  if (config.value_place == MHA_CACHE_VALUES_OWN) return MHA_OK;
  const uint32_t k_type = type_of(storage_of_type(config.k_type));
  if (config.v_type != 0 && config.v_type != k_type)
    return report.invalid(
        "v_type is %u, but value_place is MHA_CACHE_VALUES_IN_KEYS and keys have type %u; set "
        "v_type to "
        "0 or %u",
        config.v_type, k_type, k_type);
  if (config.head_dim_v <= config.head_dim) return MHA_OK;
  return report.shape(
      "head_dim_v is %lld, but value_place is MHA_CACHE_VALUES_IN_KEYS; set head_dim_v to at most "
      "head_dim, %lld",
      lld(config.head_dim_v), lld(config.head_dim));
}

// What each kind of cache demands of its capacity. Blocks hold whole groups of 16 positions.
mha_status check_kind(const Rules &rules, const mha_kv_cache_config &config) {
  const int64_t positions = config.block_positions;
  // Fields for blocks that are set for another kind hint at a mistake.
  if (!has_blocks(config.kind) && (positions != 0 || config.num_blocks != 0))
    return rules.report.invalid(
        "%s is %lld, but kind is not MHA_CACHE_KIND_PAGED or POOL; set block_positions and "
        "num_blocks to 0",
        positions != 0 ? "block_positions" : "num_blocks",
        lld(positions != 0 ? positions : config.num_blocks));
  // A position is at position % capacity, so groups stay whole where a ring begins anew.
  if (config.kind == MHA_CACHE_KIND_RING)
    return rules.multiple("capacity", config.capacity, tile_keys, "16, as a ring needs");
  if (!has_blocks(config.kind)) return MHA_OK;
  if (positions == 0 || positions % tile_keys != 0)
    return rules.report.invalid("block_positions is %lld; set it to a multiple of 16",
                                lld(positions));
  MHA_TRY(rules.range("num_blocks", config.num_blocks, 1, INT32_MAX,
                      "the number of blocks in the pool, at least 1"));
  if (config.kind == MHA_CACHE_KIND_POOL) return MHA_OK;
  return rules.multiple("capacity", config.capacity, positions, "block_positions");
}

// How long a sequence can get. Positions of a ring are counted on for ever; the bound keeps sums of
// two of them from overflowing.
int64_t most_positions(const mha_kv_cache *cache) {
  return cache->kind == MHA_CACHE_KIND_RING ? INT64_MAX / 2 : cache->capacity;
}

// Whether each block is in as many tables as its count says, of all blocks. The buffer may be
// read-only, so some blocks at a time are counted on the stack.
bool counts_hold(const mha_kv_cache *cache) {
  constexpr int64_t at_once = 1 << 13;
  const int32_t *const table = table_of(cache, 0), *const counts = users_of(cache);
  const int64_t entries = cache->num_sequences * table_entries(*cache);
  for (int64_t first = 0; first < cache->num_blocks; first += at_once) {
    const int64_t blocks = std::min(at_once, cache->num_blocks - first);
    uint32_t found[at_once] = {};
    for (int64_t i = 0; i < entries; ++i) {
      const int64_t at = table[i] - first;
      if (at >= 0 && at < blocks) ++found[at];
    }
    if (memcmp(found, counts + first, static_cast<size_t>(blocks) * sizeof *found) != 0)
      return false;
  }
  return true;
}

}  // namespace

// ---- The configuration and the buffer

// The header follows from the configuration alone, byte for byte. mha_kv_cache_view relies on that:
// it makes the header again and compares.
mha_status make_header(Report report, const mha_kv_cache_config *given, mha_kv_cache *header) {
  mha_kv_cache_config config;
  MHA_TRY(read_struct(report, "mha_kv_cache_config", given, &config));
  const Rules rules = {report};
  MHA_TRY(check_fields(rules, config));
  MHA_TRY(check_values_in_keys(report, config));
  MHA_TRY(check_kind(rules, config));
  *header = {};
  header->head = cache_format.head;
  header->kind = config.kind;
  header->k_type = type_of(storage_of_type(config.k_type));
  header->value_place = config.value_place;
  header->v_type = config.v_type != 0 ? config.v_type : header->k_type;
  header->num_sequences = config.num_sequences;
  header->capacity = config.capacity;
  header->num_kv_heads = config.num_kv_heads;
  header->head_dim = config.head_dim;
  header->head_dim_v = config.head_dim_v ? config.head_dim_v : config.head_dim;
  // A cache that is not paged has one block for each sequence.
  const Count rounded = round_up(Count(config.capacity), tile_keys);
  const bool is_in_blocks = has_blocks(config.kind);
  header->block_positions = is_in_blocks ? config.block_positions : rounded.value();
  header->num_blocks = is_in_blocks ? config.num_blocks : config.num_sequences;
  const int64_t bytes = rounded.overflows() ? -1 : layout_of(*header).bytes;
  if (bytes < 0)
    return report.too_large("the cache would exceed the address space; set smaller dimensions");
  header->bytes = static_cast<uint64_t>(bytes);
  header->checksum = checksum_of(*header);
  return MHA_OK;
}

namespace {

// The memory of one part of a pool. `end` is that of its last block.
struct PoolMemory {
  const char *name;
  const void *given;
  int64_t stride, bytes = 0;
  uintptr_t end = 0;
  uintptr_t at() const { return reinterpret_cast<uintptr_t>(given); }
};

// Whether two parts overlap. Parts of one page have the same stride, and then their places within
// the stride tell.
bool overlap(const PoolMemory &a, const PoolMemory &b) {
  if (a.bytes == 0 || b.bytes == 0 || a.end <= b.at() || b.end <= a.at()) return false;
  if (a.stride != b.stride) return true;
  const PoolMemory &low = a.at() < b.at() ? a : b, &high = a.at() < b.at() ? b : a;
  const int64_t between =
      static_cast<int64_t>((high.at() - low.at()) % static_cast<uintptr_t>(a.stride));
  return between < low.bytes || between + high.bytes > a.stride;
}

}  // namespace

mha_status check_pool(Report report, const mha_kv_pool *given, mha_kv_cache *header) {
  mha_kv_pool pool;
  MHA_TRY(read_struct(report, "mha_kv_pool", given, &pool));
  MHA_TRY(check_fields(Rules{report}, pool));
  PoolMemory parts[num_cache_parts] = {{"k", pool.k, pool.k_block_stride},
                                       {"k_scales", pool.k_scales, pool.k_scales_block_stride},
                                       {"v", pool.v, pool.v_block_stride},
                                       {"v_scales", pool.v_scales, pool.v_scales_block_stride}};
  for (int i = 0; i < num_cache_parts; ++i) {
    PoolMemory &part = parts[i];
    part.bytes = block_bytes(*header, static_cast<CachePart>(i)).value();
    if (part.bytes == 0 && (part.given || part.stride != 0))
      return report.invalid("%s%s is given, but config has no such part; leave it %s", part.name,
                            part.given ? "" : "_block_stride", part.given ? "NULL" : "0");
    if (part.bytes == 0) continue;
    if (!part.given) return report.null("%s is NULL; pass the memory of all blocks", part.name);
    if (part.at() % 64 != 0)
      return report.invalid("%s is not aligned to 64 bytes; move it to a multiple", part.name);
    if (part.stride == 0) part.stride = part.bytes;
    if (part.stride < part.bytes || part.stride % 16 != 0)
      return report.invalid(
          "%s_block_stride is %lld; set it to a multiple of 16 and at least the bytes of a block, "
          "%lld",
          part.name, lld(part.stride), lld(part.bytes));
    const Count end = Count(header->num_blocks - 1) * Count(part.stride) + Count(part.bytes);
    if (end.overflows() || part.at() + static_cast<uintptr_t>(end.value()) < part.at())
      return report.too_large("%s would exceed the address space; set smaller dimensions",
                              part.name);
    part.end = part.at() + static_cast<uintptr_t>(end.value());
    for (int j = 0; j < i; ++j) {
      if (overlap(parts[j], part))
        return report.invalid("blocks of %s and %s overlap; move one of them", parts[j].name,
                              part.name);
    }
    header->pool[i] = {part.at(), part.stride};
  }
  header->checksum = checksum_of(*header);
  return MHA_OK;
}

mha_status check_contents(Report report, const mha_kv_cache *cache) {
  for (int64_t s = 0; s < cache->num_sequences; ++s) {
    const CacheState &state = state_of(cache, s);
    bool is_sound = state.length >= 0 && state.written >= state.length &&
                    state.written <= most_positions(cache);
    const int32_t *const table = table_of(cache, s);
    // Entries for positions that the sequence has name a block; later ones may be empty.
    for (int64_t i = 0; is_sound && i < table_entries(*cache); ++i)
      is_sound = table[i] < cache->num_blocks &&
                 table[i] >= (i < blocks_in_use(*cache, state.length) ? 0 : no_block);
    if (!is_sound)
      return report.fail(MHA_ERROR_CACHE_FORMAT,
                         "the length or the blocks of sequence %lld are outside the cache, so the "
                         "buffer is damaged; fill a new one",
                         lld(s));
  }
  if (cache->kind != MHA_CACHE_KIND_PAGED || counts_hold(cache)) return MHA_OK;
  return report.fail(
      MHA_ERROR_CACHE_FORMAT,
      "the block tables and block counts disagree, so the buffer is damaged; fill a new one");
}

// ---- Calls

// A pointer that is not aligned to 64 bytes cannot be a cache. The first bytes tell a cache from
// other memory.
mha_status check_cache(Report report, const mha_kv_cache *cache, const char *name) {
  const bool is_aligned = reinterpret_cast<uintptr_t>(cache) % 64 == 0;
  if (cache && is_aligned && memcmp(&cache->head, cache_format.head.magic, 8) == 0) return MHA_OK;
  if (!cache)
    return report.null("%s is NULL; pass one from mha_kv_cache_init or mha_kv_cache_view", name);
  return report.invalid("%s %s; pass one from mha_kv_cache_init or mha_kv_cache_view", name,
                        is_aligned ? "does not point to a KV cache" : "is not aligned to 64 bytes");
}

// The number of a sequence, which counts from 0.
mha_status check_cache_sequence(Report report, const mha_kv_cache *cache, int64_t sequence) {
  if (sequence >= 0 && sequence < cache->num_sequences) return MHA_OK;
  return report.invalid("sequence %lld does not exist; the cache has the sequences 0 to %lld",
                        lld(sequence), lld(cache->num_sequences - 1));
}

mha_status check_place(Report report, const mha_kv_cache *cache, int64_t sequence) {
  MHA_TRY(check_cache(report, cache));
  if (is_pool(*cache))
    return report.invalid(
        "cache is a pool, whose lengths and block tables come with each call; change those");
  return check_cache_sequence(report.about(2), cache, sequence);
}

// Other kinds have no tables, and their sequences cannot share anything.
mha_status check_paged(Report report, const mha_kv_cache *cache) {
  if (cache->kind == MHA_CACHE_KIND_PAGED) return MHA_OK;
  return report.invalid("cache has no blocks; pass one of the kind MHA_CACHE_KIND_PAGED");
}

// 0 is a length, too: it empties a sequence or copies nothing.
mha_status check_length(Report report, const mha_kv_cache *cache, int64_t sequence,
                        int64_t length) {
  const int64_t most = state_of(cache, sequence).length;
  if (length >= 0 && length <= most) return MHA_OK;
  return report.invalid(
      "length is %lld, but that of sequence %lld is %lld; set it to at least 0 and at most that",
      lld(length), lld(sequence), lld(most));
}

// With no rows, v may be null in any case.
mha_status check_values(Report report, const mha_kv_cache *cache, int64_t rows, const void *v,
                        const char *name) {
  const bool are_in_keys = cache && !has_own_values(*cache);
  if (are_in_keys && v)
    return report.invalid("%s is given, but the cache has MHA_CACHE_VALUES_IN_KEYS; leave it NULL",
                          name);
  if (rows > 0 && !v && !are_in_keys) return report.null("%s is NULL; pass the values", name);
  return MHA_OK;
}

// A ring is never full. A paged cache needs a block for each new position, and must not write to
// one that other sequences read: that is either the last block, partly filled before it was shared,
// or a block that was put into the table for new positions.
mha_status check_append(Report report, const mha_kv_cache *cache, int64_t sequence, int64_t count) {
  const int64_t length = state_of(cache, sequence).length;
  const int64_t most = most_positions(cache);
  if (count > most - length)
    return report.fail(MHA_ERROR_CACHE_FULL,
                       "the length of sequence %lld is %lld, with room for %lld more, not for "
                       "%lld; truncate it, or use a larger cache",
                       lld(sequence), lld(length), lld(most - length), lld(count));
  if (cache->kind != MHA_CACHE_KIND_PAGED || count == 0) return MHA_OK;
  const int32_t *const table = table_of(cache, sequence), *const users = users_of(cache);
  for (int64_t i = length / cache->block_positions; i < blocks_in_use(*cache, length + count);
       ++i) {
    const int64_t first = i * cache->block_positions;
    if (table[i] == no_block)
      return report.fail(MHA_ERROR_CACHE_FULL,
                         "sequence %lld has no block for position %lld; call "
                         "mha_kv_cache_set_blocks with a count of %lld or more",
                         lld(sequence), lld(first), lld(blocks_in_use(*cache, length + count)));
    // A shared block that the sequence has filled in part can be copied by unshare. One that is all
    // new to the sequence should not be in its table.
    if (users[table[i]] <= 1) continue;
    if (first < length)
      return report.fail(MHA_ERROR_CACHE_SHARED,
                         "block %d, to which sequence %lld would append, is in the tables of %d "
                         "sequences; call mha_kv_cache_unshare(cache, %lld, <free block>) first",
                         table[i], lld(sequence), users[table[i]], lld(sequence));
    return report.fail(
        MHA_ERROR_CACHE_SHARED,
        "block %d, to which sequence %lld would append from position %lld on, is in the tables of "
        "%d sequences; put a free block in its place with mha_kv_cache_set_blocks",
        table[i], lld(sequence), lld(first), users[table[i]]);
  }
  return MHA_OK;
}

}  // namespace mha
