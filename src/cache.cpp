// The KV cache's own functions: its buffer, its sequences, and what goes in and out without a call
// of the attention.

#include "cache.h"

#include <stddef.h>
#include <string.h>

#include "count.h"
#include "cpu.h"
#include "storage.h"
#include "structs.h"

namespace mha {
namespace {

constexpr char cache_magic[8] = {'m', 'h', 'a', ' ', 'k', 'v', 'c', 0};
constexpr uint32_t cache_version = 1;
constexpr uint32_t cache_byte_order = 0x01020304u;
static_assert(sizeof(mha_kv_cache) == 256 && offsetof(mha_kv_cache, checksum) == 248,
              "the header is 4 cache lines");

constexpr int32_t no_block = -1;

int64_t padded(int64_t width) { return blocks_of(width, key_block) * key_block; }
bool has_own_values(const mha_kv_cache &cache) { return cache.values == MHA_CACHE_VALUES_OWN; }
int64_t key_width(const mha_kv_cache &cache) {
  return has_own_values(cache) ? cache.head_dim : padded(cache.head_dim);
}
int64_t table_entries(const mha_kv_cache &cache) {
  return cache.kind == MHA_CACHE_KIND_PAGED ? quotient(cache.capacity, cache.block_positions) : 0;
}

// Offsets of the parts, in bytes.
struct Layout {
  int64_t states, tables, users, keys, k_scales, values, v_scales, bytes;
};

Layout layout_of(const mha_kv_cache &cache) {
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
  Layout layout;
  layout.states = take(sequences, sizeof(CacheState));
  layout.tables = take(sequences * Count(table_entries(cache)), sizeof(int32_t));
  layout.users = take(is_paged ? Count(cache.num_blocks) : Count(0), sizeof(int32_t));
  layout.keys = take(positions * Count(key_width(cache)), bytes_of(storage_of_type(cache.k_type)));
  layout.k_scales = take(cache.k_type == MHA_TYPE_INT8 ? positions : Count(0), sizeof(float));
  layout.values =
      take(of_values * Count(padded(cache.head_dim_v)), bytes_of(storage_of_type(cache.v_type)));
  layout.v_scales = take(cache.v_type == MHA_TYPE_INT8 ? of_values : Count(0), sizeof(float));
  layout.bytes = end.value();
  return layout;
}

template <class T>
T *at(const mha_kv_cache *cache, int64_t offset) {
  return reinterpret_cast<T *>(reinterpret_cast<uintptr_t>(cache) + static_cast<uintptr_t>(offset));
}

int32_t *table_of(const mha_kv_cache *cache, int64_t sequence) {
  return at<int32_t>(cache, layout_of(*cache).tables) + sequence * table_entries(*cache);
}

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

// ---- The configuration

mha_status check_dimensions(Report report, const mha_kv_cache_config &config) {
  const struct {
    const char *name;
    int64_t value;
    int64_t least, most;
  } dims[] = {{"num_sequences", config.num_sequences, 1, INT32_MAX},
              {"capacity", config.capacity, 1, INT64_MAX},
              {"num_kv_heads", config.num_kv_heads, 1, INT32_MAX},
              {"head_dim", config.head_dim, 1, INT32_MAX},
              {"head_dim_v", config.head_dim_v, 0, INT32_MAX},
              {"block_positions", config.block_positions, 0, INT64_MAX},
              {"num_blocks", config.num_blocks, 0, INT32_MAX}};
  for (const auto &dim : dims) {
    if (dim.value < dim.least)
      return report.invalid("%s is %lld; set it to at least %lld", dim.name, lld(dim.value),
                            lld(dim.least));
    if (dim.value > dim.most)
      return report.fail(MHA_ERROR_TOO_LARGE, "%s is %lld; set it to at most %lld", dim.name,
                         lld(dim.value), lld(dim.most));
  }
  return MHA_OK;
}

mha_status check_types(Report report, const mha_kv_cache_config &config) {
  const struct {
    const char *name;
    uint32_t type;
    const char *default_type;
  } types[] = {{"k_type", config.k_type, "F32"}, {"v_type", config.v_type, "k_type"}};
  for (const auto &given : types) {
    if (given.type <= MHA_TYPE_INT8) continue;
    return report.invalid(
        "%s is %u; set MHA_TYPE_F32 (1), MHA_TYPE_F16 (2), MHA_TYPE_BF16 (3) or MHA_TYPE_INT8 (4); "
        "0 is %s",
        given.name, given.type, given.default_type);
  }
  if (config.values == MHA_CACHE_VALUES_OWN) return MHA_OK;
  if (config.values != MHA_CACHE_VALUES_IN_KEYS)
    return report.invalid("values is %u; use MHA_CACHE_VALUES_OWN or MHA_CACHE_VALUES_IN_KEYS",
                          config.values);
  const uint32_t k_type = type_of(storage_of_type(config.k_type));
  if (config.v_type != 0 && config.v_type != k_type) {
    return report.invalid(
        "v_type is %u, but values is MHA_CACHE_VALUES_IN_KEYS and keys have type %u; set v_type to "
        "0 or %u",
        config.v_type, k_type, k_type);
  }
  if (config.head_dim_v > config.head_dim) {
    return report.fail(MHA_ERROR_SHAPE,
                       "head_dim_v is %lld, but values is MHA_CACHE_VALUES_IN_KEYS; set head_dim_v "
                       "to at most head_dim, %lld",
                       lld(config.head_dim_v), lld(config.head_dim));
  }
  return MHA_OK;
}

mha_status check_kind(Report report, const mha_kv_cache_config &config) {
  const bool is_ring = config.kind == MHA_CACHE_KIND_RING,
             is_paged = config.kind == MHA_CACHE_KIND_PAGED;
  if (!is_ring && !is_paged && config.kind != MHA_CACHE_KIND_CONTIGUOUS)
    return report.invalid(
        "kind is %u; use MHA_CACHE_KIND_CONTIGUOUS, MHA_CACHE_KIND_RING or MHA_CACHE_KIND_PAGED",
        config.kind);
  if (const mha_status status = check_types(report, config)) return status;
  if (is_ring && config.capacity % key_block != 0)
    return report.invalid("capacity is %lld; set that of a ring to a multiple of %d",
                          lld(config.capacity), static_cast<int>(key_block));
  const int64_t positions = config.block_positions;
  if (!is_paged) {
    if (positions == 0 && config.num_blocks == 0) return MHA_OK;
    return report.invalid(
        "%s is %lld, but kind is not MHA_CACHE_KIND_PAGED; set block_positions and num_blocks to 0",
        positions != 0 ? "block_positions" : "num_blocks",
        lld(positions != 0 ? positions : config.num_blocks));
  }
  const bool fits = positions > 0 && positions % key_block == 0 &&
                    (chunk_keys % positions == 0 || positions % chunk_keys == 0);
  if (!fits)
    return report.invalid("block_positions is %lld; set it to 16, 32, 64, 128 or a multiple of 256",
                          lld(positions));
  if (config.num_blocks == 0)
    return report.invalid(
        "num_blocks is 0; set it to the number of blocks in the pool, at least 1");
  if (config.capacity % positions != 0)
    return report.invalid("capacity is %lld; set it to a multiple of block_positions, %lld",
                          lld(config.capacity), lld(positions));
  return MHA_OK;
}

// The header of a cache with this configuration, all defaults resolved.
mha_status make_header(Report report, const mha_kv_cache_config *given, mha_kv_cache *header) {
  mha_kv_cache_config config;
  if (const mha_status status = read_struct(report, "mha_kv_cache_config", given, &config))
    return status;
  if (const mha_status status = check_dimensions(report, config)) return status;
  if (const mha_status status = check_kind(report, config)) return status;
  const bool is_paged = config.kind == MHA_CACHE_KIND_PAGED;
  *header = {};
  memcpy(header->magic, cache_magic, sizeof cache_magic);
  header->byte_order = cache_byte_order;
  header->version = cache_version;
  header->contract = MHA_CONTRACT;
  header->kind = config.kind;
  header->k_type = type_of(storage_of_type(config.k_type));
  header->values = config.values;
  header->v_type = config.v_type != 0 ? config.v_type : header->k_type;
  header->num_sequences = config.num_sequences;
  header->capacity = config.capacity;
  header->num_kv_heads = config.num_kv_heads;
  header->head_dim = config.head_dim;
  header->head_dim_v = config.head_dim_v ? config.head_dim_v : config.head_dim;
  const Count rounded = round_up(Count(config.capacity), key_block);
  header->block_positions = is_paged ? config.block_positions : rounded.value();
  header->num_blocks = is_paged ? config.num_blocks : config.num_sequences;
  const Layout layout = rounded.overflows() ? Layout{0, 0, 0, 0, 0, 0, 0, -1} : layout_of(*header);
  if (layout.bytes < 0 || static_cast<uint64_t>(layout.bytes) > PTRDIFF_MAX)
    return report.fail(MHA_ERROR_TOO_LARGE,
                       "the cache would exceed the address space; set smaller dimensions");
  header->bytes = static_cast<uint64_t>(layout.bytes);
  header->checksum = checksum_of(*header);
  return MHA_OK;
}

mha_kv_cache_config config_of(const mha_kv_cache &cache) {
  const bool is_paged = cache.kind == MHA_CACHE_KIND_PAGED;
  mha_kv_cache_config config = {};
  config.struct_size = sizeof config;
  config.num_sequences = cache.num_sequences;
  config.capacity = cache.capacity;
  config.num_kv_heads = cache.num_kv_heads;
  config.head_dim = cache.head_dim;
  config.head_dim_v = cache.head_dim_v;
  config.k_type = cache.k_type;
  config.v_type = cache.v_type;
  config.kind = cache.kind;
  config.values = cache.values;
  config.block_positions = is_paged ? cache.block_positions : 0;
  config.num_blocks = is_paged ? cache.num_blocks : 0;
  return config;
}

mha_status check_buffer(Report report, const void *buffer) {
  if (!buffer)
    return report.fail(MHA_ERROR_NULL_POINTER,
                       "buffer is NULL; pass memory of mha_kv_cache_size bytes");
  if (reinterpret_cast<uintptr_t>(buffer) % 64 == 0) return MHA_OK;
  return report.invalid(
      "buffer is not aligned to 64 bytes; place the cache at an address that is a multiple of 64");
}

// Blocks that a table names for the positions below `length`.
int64_t blocks_in_use(const mha_kv_cache &cache, int64_t length) {
  return blocks_of(length, cache.block_positions);
}

// A number for each block, such that a sum of them tells which blocks were added up, and how often
// each.
uint64_t number_of_block(int64_t block) {
  const uint64_t product = static_cast<uint64_t>(block + 1) * 0x9e3779b97f4a7c15u;
  return (product ^ product >> 32) * 0xff51afd7ed558ccdu;
}

// Lengths and tables of a buffer whose header is sound: they have to lie within its bounds, and
// each block in as many tables as its count says, for a block that is counted once is written to.
mha_status check_contents(Report report, const mha_kv_cache *cache) {
  uint64_t entries = 0, users = 0;
  for (int64_t s = 0; s < cache->num_sequences; ++s) {
    const CacheState &state = state_of(cache, s);
    const bool is_ring = cache->kind == MHA_CACHE_KIND_RING;
    bool is_sound = state.length >= 0 && state.written >= state.length &&
                    (is_ring || state.written <= cache->capacity);
    const int32_t *const table = table_of(cache, s);
    for (int64_t i = 0; is_sound && i < table_entries(*cache); ++i) {
      is_sound = table[i] < cache->num_blocks &&
                 table[i] >= (i < blocks_in_use(*cache, state.length) ? 0 : no_block);
      if (table[i] != no_block) entries += number_of_block(table[i]);
    }
    if (!is_sound) {
      return report.fail(MHA_ERROR_CACHE_FORMAT,
                         "the length or the blocks of sequence %lld are outside the cache, so the "
                         "buffer is damaged; fill a new one",
                         lld(s));
    }
  }
  const int32_t *const counts = at<int32_t>(cache, layout_of(*cache).users);
  bool is_sound = true;
  for (int64_t b = 0; cache->kind == MHA_CACHE_KIND_PAGED && b < cache->num_blocks; ++b) {
    is_sound = is_sound && counts[b] >= 0;
    users += static_cast<uint64_t>(counts[b]) * number_of_block(b);
  }
  if (!is_sound || users != entries)
    return report.fail(
        MHA_ERROR_CACHE_FORMAT,
        "the block tables and block counts disagree, so the buffer is damaged; fill a new one");
  return MHA_OK;
}

KeyValues cached(const mha_kv_cache *cache, uint32_t type, int64_t width, int64_t offset,
                 int64_t scales_offset) {
  KeyValues source = {};
  source.base = at<const void>(cache, offset);
  source.storage = storage_of_type(type);
  source.is_packed = true;
  source.row_stride = width;
  source.head_stride = cache->block_positions * width;
  source.batch_stride = cache->num_kv_heads * source.head_stride;
  source.block_positions = cache->block_positions;
  source.ring_positions = cache->kind == MHA_CACHE_KIND_RING ? cache->capacity : 0;
  if (cache->kind == MHA_CACHE_KIND_PAGED) {
    source.tables = table_of(cache, 0);
    source.table_stride = table_entries(*cache);
  }
  if (type == MHA_TYPE_INT8) source.scales = at<const float>(cache, scales_offset);
  source.scale_batch_stride = cache->num_kv_heads * cache->block_positions;
  return source;
}

// Where a position lies: element 0 of its group of 16, and its number in the scales.
struct CachedRow {
  int64_t group, scale;
};

CachedRow row_in_block(const mha_kv_cache *cache, const KeyValues &source, int64_t block,
                       int64_t head, int64_t in_block) {
  return {block * source.batch_stride + head * source.head_stride +
              in_block / key_block * key_block * source.row_stride,
          (block * cache->num_kv_heads + head) * cache->block_positions + in_block};
}

CachedRow row_of(const mha_kv_cache *cache, const KeyValues &source, int64_t sequence, int64_t head,
                 int64_t position) {
  const int64_t slot = source.ring_positions ? position % source.ring_positions : position;
  const int64_t block =
      source.tables ? source.tables[sequence * source.table_stride + slot / cache->block_positions]
                    : sequence;
  return row_in_block(cache, source, block, head, slot % cache->block_positions);
}

float widened(const KeyValues &source, int64_t element, int64_t scale) {
  switch (source.storage) {
    case Storage::f32:
      return static_cast<const float *>(source.base)[element];
    case Storage::f16:
      return f32_of_f16(static_cast<const uint16_t *>(source.base)[element]);
    case Storage::bf16:
      return f32_of_bf16(static_cast<const uint16_t *>(source.base)[element]);
    case Storage::int8:
    case Storage::int4:
      break;
  }
  return static_cast<float>(static_cast<const int8_t *>(source.base)[element]) *
         source.scales[scale];
}

void read_rows(const mha_kv_cache *cache, const KeyValues &source, bool are_keys, int64_t width,
               int64_t sequence, int64_t first, int64_t count, float *out) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t lane = (first + i) % key_block;  // a ring is a multiple of 16 as well
    for (int64_t head = 0; head < cache->num_kv_heads; ++head) {
      const CachedRow row = row_of(cache, source, sequence, head, first + i);
      for (int64_t c = 0; c < width; ++c) {
        const int64_t element =
            row.group +
            (are_keys && source.is_packed ? c * key_block + lane : lane * source.row_stride + c);
        const float x = widened(source, element, row.scale);
        *out++ = x != x ? MHA_NAN : x + 0.0f;  // canonical
      }
    }
  }
}

// 16 positions of a head, keys or values with their scales.
void copy_group(const KeyValues &source, const CachedRow &from, const CachedRow &to) {
  unsigned char *const base = static_cast<unsigned char *>(const_cast<void *>(source.base));
  const int64_t bytes = bytes_of(source.storage),
                group_bytes = key_block * source.row_stride * bytes;
  memcpy(base + to.group * bytes, base + from.group * bytes, static_cast<size_t>(group_bytes));
  if (source.scales)
    memcpy(const_cast<float *>(source.scales) + to.scale, source.scales + from.scale,
           key_block * sizeof(float));
}

// Copies the groups of 16 with the positions [first, end) from one sequence to another, except
// those in a block that both have.
void copy_groups(const mha_kv_cache *cache, const KeyValues &source, int64_t from, int64_t to,
                 int64_t first, int64_t end) {
  for (int64_t position = first / key_block * key_block; position < end; position += key_block) {
    for (int64_t head = 0; head < cache->num_kv_heads; ++head) {
      const CachedRow a = row_of(cache, source, from, head, position),
                      b = row_of(cache, source, to, head, position);
      if (a.group != b.group) copy_group(source, a, b);
    }
  }
}

// Copies the groups of 16 with the first `positions` positions of one block to another block.
void copy_block(const mha_kv_cache *cache, const KeyValues &source, int64_t from, int64_t to,
                int64_t positions) {
  for (int64_t first = 0; first < positions; first += key_block) {
    for (int64_t head = 0; head < cache->num_kv_heads; ++head) {
      copy_group(source, row_in_block(cache, source, from, head, first),
                 row_in_block(cache, source, to, head, first));
    }
  }
}

// The parameters 1 and 2 of the functions for one sequence.
mha_status check_place(Report report, const mha_kv_cache *cache, int64_t sequence) {
  if (const mha_status status = check_cache(report, cache)) return status;
  return check_cache_sequence(report.about(2), cache, sequence);
}

mha_status check_paged(Report report, const mha_kv_cache *cache) {
  if (cache->kind == MHA_CACHE_KIND_PAGED) return MHA_OK;
  return report.invalid("cache has no blocks; pass one of the kind MHA_CACHE_KIND_PAGED");
}

// A length that a function is given is at most the sequence's.
mha_status check_length(Report report, const mha_kv_cache *cache, int64_t sequence,
                        int64_t length) {
  const int64_t most = state_of(cache, sequence).length;
  if (length >= 0 && length <= most) return MHA_OK;
  return report.invalid("length is %lld; set it to 0 to %lld, the length of sequence %lld",
                        lld(length), lld(most), lld(sequence));
}

}  // namespace

const CacheState &state_of(const mha_kv_cache *cache, int64_t sequence) {
  return at<const CacheState>(cache, static_cast<int64_t>(sizeof(mha_kv_cache)))[sequence];
}
CacheState &state_of(mha_kv_cache *cache, int64_t sequence) {
  return at<CacheState>(cache, static_cast<int64_t>(sizeof(mha_kv_cache)))[sequence];
}

int64_t oldest_position(const mha_kv_cache *cache, int64_t sequence, int64_t length) {
  const int64_t written = state_of(cache, sequence).written,
                most = written > length ? written : length;
  return cache->kind == MHA_CACHE_KIND_RING && most > cache->capacity ? most - cache->capacity : 0;
}

KeyValues cached_keys(const mha_kv_cache *cache) {
  const Layout layout = layout_of(*cache);
  KeyValues keys = cached(cache, cache->k_type, key_width(*cache), layout.keys, layout.k_scales);
  keys.is_packed = has_own_values(*cache);
  return keys;
}
KeyValues cached_values(const mha_kv_cache *cache) {
  const Layout layout = layout_of(*cache);
  if (!has_own_values(*cache))
    return cached(cache, cache->k_type, key_width(*cache), layout.keys, layout.k_scales);
  return cached(cache, cache->v_type, padded(cache->head_dim_v), layout.values, layout.v_scales);
}

mha_status check_cache(Report report, const mha_kv_cache *cache, const char *name) {
  const bool is_aligned = reinterpret_cast<uintptr_t>(cache) % 64 == 0;
  if (cache && is_aligned && memcmp(cache->magic, cache_magic, sizeof cache_magic) == 0)
    return MHA_OK;
  if (!cache)
    return report.fail(MHA_ERROR_NULL_POINTER,
                       "%s is NULL; pass one from mha_kv_cache_init or mha_kv_cache_view", name);
  return report.invalid("%s %s; pass one from mha_kv_cache_init or mha_kv_cache_view", name,
                        is_aligned ? "does not point to a KV cache" : "is not aligned to 64 bytes");
}

mha_status check_cache_sequence(Report report, const mha_kv_cache *cache, int64_t sequence) {
  if (sequence >= 0 && sequence < cache->num_sequences) return MHA_OK;
  return report.invalid("sequence %lld does not exist; the cache has the sequences 0 to %lld",
                        lld(sequence), lld(cache->num_sequences - 1));
}

mha_status check_values(Report report, const mha_kv_cache *cache, int64_t rows, const void *v,
                        const char *name) {
  const bool are_in_keys = cache && !has_own_values(*cache);
  if (are_in_keys && v)
    return report.invalid("%s is given, but the cache has MHA_CACHE_VALUES_IN_KEYS; leave it NULL",
                          name);
  if (rows > 0 && !v && !are_in_keys)
    return report.fail(MHA_ERROR_NULL_POINTER, "%s is NULL; pass the values", name);
  return MHA_OK;
}

mha_status check_append(Report report, const mha_kv_cache *cache, int64_t sequence, int64_t count) {
  const int64_t length = state_of(cache, sequence).length;
  const int64_t most = cache->kind == MHA_CACHE_KIND_RING ? INT64_MAX / 2 : cache->capacity;
  if (count > most - length) {
    return report.fail(MHA_ERROR_CACHE_FULL,
                       "the length of sequence %lld is %lld, with room for %lld more, not for "
                       "%lld; truncate it, or use a larger cache",
                       lld(sequence), lld(length), lld(most - length), lld(count));
  }
  if (cache->kind != MHA_CACHE_KIND_PAGED || count == 0) return MHA_OK;
  const int32_t *const table = table_of(cache, sequence), *const users = at<int32_t>(
                                                              cache, layout_of(*cache).users);
  for (int64_t i = length / cache->block_positions; i < blocks_in_use(*cache, length + count);
       ++i) {
    const int64_t first = i * cache->block_positions;
    if (table[i] == no_block) {
      return report.fail(MHA_ERROR_CACHE_FULL,
                         "sequence %lld has no block for position %lld; call "
                         "mha_kv_cache_set_blocks with a count of %lld or more",
                         lld(sequence), lld(first), lld(blocks_in_use(*cache, length + count)));
    }
    if (users[table[i]] <= 1) continue;
    if (first < length) {
      return report.fail(MHA_ERROR_CACHE_SHARED,
                         "block %d, to which sequence %lld would append, is in the tables of %d "
                         "sequences; call mha_kv_cache_unshare(cache, %lld,"
                         " <free block>) first",
                         table[i], lld(sequence), users[table[i]], lld(sequence));
    }
    return report.fail(MHA_ERROR_CACHE_SHARED,
                       "block %d, to which sequence %lld would append from position %lld on, is in "
                       "the tables of %d sequences; put a free"
                       " block in its place with mha_kv_cache_set_blocks",
                       table[i], lld(sequence), lld(first), users[table[i]]);
  }
  return MHA_OK;
}

void grow(mha_kv_cache *cache, int64_t sequence, int64_t count) {
  CacheState &state = state_of(cache, sequence);
  state.length += count;
  if (state.written < state.length) state.written = state.length;
}

}  // namespace mha

using namespace mha;

mha_status mha_kv_cache_size(const mha_kv_cache_config *config, size_t *bytes, mha_error *error) {
  Report report(error);
  mha_kv_cache header;
  if (const mha_status status = make_header(report, config, &header)) return status;
  return write_size(report.about(2), static_cast<size_t>(header.bytes), bytes);
}

mha_status mha_kv_cache_init(const mha_kv_cache_config *config, void *buffer, size_t buffer_bytes,
                             mha_kv_cache **cache, mha_error *error) {
  Report report(error);
  mha_kv_cache header;
  if (const mha_status status = make_header(report, config, &header)) return status;
  if (const mha_status status = check_buffer(report.about(2), buffer)) return status;
  if (buffer_bytes < header.bytes) {
    return report.about(3).fail(
        MHA_ERROR_BUFFER_TOO_SMALL,
        "buffer_bytes is %zu, but the cache needs %llu; call mha_kv_cache_size for the size",
        buffer_bytes, llu(header.bytes));
  }
  if (!cache)
    return report.about(4).fail(MHA_ERROR_NULL_POINTER,
                                "cache is NULL; pass the address of a pointer to a cache");
  const Layout layout = layout_of(header);
  mha_kv_cache *const made = static_cast<mha_kv_cache *>(buffer);
  memcpy(static_cast<void *>(made), &header, sizeof header);
  memset(at<void>(made, layout.states), 0, static_cast<size_t>(layout.tables - layout.states));
  memset(at<void>(made, layout.tables), 0xff,
         static_cast<size_t>(layout.users - layout.tables));  // no_block
  memset(at<void>(made, layout.users), 0, static_cast<size_t>(layout.keys - layout.users));
  *cache = made;
  return MHA_OK;
}

mha_status mha_kv_cache_view(void *buffer, size_t buffer_bytes, mha_kv_cache **cache,
                             mha_error *error) {
  Report report(error);
  if (const mha_status status = check_buffer(report, buffer)) return status;
  if (buffer_bytes < sizeof(mha_kv_cache)) {
    return report.about(2).fail(
        MHA_ERROR_CACHE_FORMAT,
        "buffer_bytes is %zu, less than the %zu of a cache's header; pass the whole cache",
        buffer_bytes, sizeof(mha_kv_cache));
  }
  mha_kv_cache *const viewed = static_cast<mha_kv_cache *>(buffer);
  if (memcmp(viewed->magic, cache_magic, sizeof cache_magic) != 0)
    return report.fail(MHA_ERROR_CACHE_FORMAT,
                       "buffer does not hold a KV cache; pass one that mha_kv_cache_init filled");
  if (viewed->byte_order != cache_byte_order)
    return report.fail(MHA_ERROR_CACHE_FORMAT,
                       "the cache was filled on a machine of the other byte order; fill a new one");
  if (viewed->version != cache_version) {
    return report.fail(
        MHA_ERROR_CACHE_FORMAT,
        "the cache has version %u of the format, but this library reads version %u; fill a new one",
        viewed->version, cache_version);
  }
  if (viewed->checksum != checksum_of(*viewed))
    return report.fail(
        MHA_ERROR_CACHE_FORMAT,
        "the header of the cache is damaged (its checksum is wrong); fill a new one");
  if (viewed->contract != MHA_CONTRACT) {
    return report.fail(MHA_ERROR_CACHE_FORMAT,
                       "the cache was filled under arithmetic contract %u, but this library has "
                       "%d; fill a new one",
                       viewed->contract, MHA_CONTRACT);
  }
  // Guards the bounds against a header that was made up: its checksum is no secret.
  const mha_kv_cache_config config = config_of(*viewed);
  Report ignored_report(nullptr);
  mha_kv_cache again;
  if (make_header(ignored_report, &config, &again) != MHA_OK ||
      memcmp(&again, viewed, sizeof again) != 0)
    return report.fail(MHA_ERROR_CACHE_FORMAT,
                       "the cache's sizes contradict each other; fill a new one");
  if (buffer_bytes < viewed->bytes) {
    return report.about(2).fail(
        MHA_ERROR_CACHE_FORMAT,
        "buffer_bytes is %zu, but the cache has %llu bytes; pass the whole cache", buffer_bytes,
        llu(viewed->bytes));
  }
  if (const mha_status status = check_contents(report, viewed)) return status;
  if (!cache)
    return report.about(3).fail(MHA_ERROR_NULL_POINTER,
                                "cache is NULL; pass the address of a pointer to a cache");
  *cache = viewed;
  return MHA_OK;
}

mha_status mha_kv_cache_shape(const mha_kv_cache *cache, mha_kv_cache_config *config,
                              mha_error *error) {
  Report report(error);
  if (const mha_status status = check_cache(report, cache)) return status;
  return write_struct(report.about(2), "mha_kv_cache_config", config_of(*cache), config);
}

mha_status mha_kv_cache_length(const mha_kv_cache *cache, int64_t sequence, int64_t *length,
                               mha_error *error) {
  Report report(error);
  if (const mha_status status = check_place(report, cache, sequence)) return status;
  if (!length)
    return report.about(3).fail(MHA_ERROR_NULL_POINTER,
                                "length is NULL; pass the address of an int64_t");
  *length = state_of(cache, sequence).length;
  return MHA_OK;
}

mha_status mha_kv_cache_truncate(mha_kv_cache *cache, int64_t sequence, int64_t length,
                                 mha_error *error) {
  Report report(error);
  if (const mha_status status = check_place(report, cache, sequence)) return status;
  if (const mha_status status = check_length(report.about(3), cache, sequence, length))
    return status;
  CacheState &state = state_of(cache, sequence);
  state.length = length;
  if (length == 0) state.written = 0;
  return MHA_OK;
}

mha_status mha_kv_cache_set_blocks(mha_kv_cache *cache, int64_t sequence, const int32_t *blocks,
                                   int64_t count, mha_error *error) {
  Report report(error);
  if (const mha_status status = check_place(report, cache, sequence)) return status;
  if (const mha_status status = check_paged(report, cache)) return status;
  const int64_t entries = table_entries(*cache),
                in_use = blocks_in_use(*cache, state_of(cache, sequence).length);
  if (count < 0 || count > entries)
    return report.about(4).invalid("count is %lld; set it to 0 to capacity / block_positions, %lld",
                                   lld(count), lld(entries));
  if (count > 0 && !blocks)
    return report.about(3).fail(MHA_ERROR_NULL_POINTER, "blocks is NULL; pass the block numbers");
  int32_t *const table = table_of(cache, sequence);
  for (int64_t i = 0; i < count; ++i) {
    if (blocks[i] < 0 || blocks[i] >= cache->num_blocks) {
      return report.about(3).invalid("blocks[%lld] is %d; set it to a block of the pool, 0 to %lld",
                                     lld(i), blocks[i], lld(cache->num_blocks - 1));
    }
  }
  // Each block once: the count of one that was seen is negative meanwhile.
  int32_t *const users = at<int32_t>(cache, layout_of(*cache).users);
  int64_t seen = 0;
  for (; seen < count && users[blocks[seen]] >= 0; ++seen)
    users[blocks[seen]] = ~users[blocks[seen]];
  for (int64_t i = 0; i < seen; ++i) users[blocks[i]] = ~users[blocks[i]];
  if (seen < count) {
    int64_t before = 0;
    while (blocks[before] != blocks[seen]) ++before;
    return report.about(3).invalid(
        "blocks[%lld] and blocks[%lld] are both %d; list each block only once", lld(before),
        lld(seen), blocks[seen]);
  }
  for (int64_t i = 0; i < in_use; ++i) {
    if (i >= count || blocks[i] != table[i]) {
      return report.about(3).invalid(
          "block %d holds positions of sequence %lld; keep it as blocks[%lld], or truncate the "
          "sequence first",
          table[i], lld(sequence), lld(i));
    }
  }
  for (int64_t i = 0; i < entries; ++i) {
    const int32_t block = i < count ? blocks[i] : no_block;
    if (table[i] == block) continue;
    if (table[i] != no_block) --users[table[i]];
    if (block != no_block) ++users[block];
    table[i] = block;
  }
  return MHA_OK;
}

mha_status mha_kv_cache_unshare(mha_kv_cache *cache, int64_t sequence, int32_t block,
                                uint32_t *used, mha_error *error) {
  Report report(error);
  if (const mha_status status = check_place(report, cache, sequence)) return status;
  if (const mha_status status = check_paged(report, cache)) return status;
  if (block < no_block || block >= cache->num_blocks)
    return report.about(3).invalid(
        "block is %d; set it to a free block of the pool, 0 to %lld, or to -1 for none", block,
        lld(cache->num_blocks - 1));
  if (!used)
    return report.about(4).fail(MHA_ERROR_NULL_POINTER,
                                "used is NULL; pass the address of a uint32_t");
  const int64_t length = state_of(cache, sequence).length, last = length / cache->block_positions,
                filled = length % cache->block_positions;
  int32_t *const table = table_of(cache, sequence), *const users =
                                                        at<int32_t>(cache, layout_of(*cache).users);
  if (filled == 0 || users[table[last]] <= 1) {
    *used = 0;
    return MHA_OK;
  }
  if (block == no_block) {
    return report.about(3).fail(
        MHA_ERROR_CACHE_FULL,
        "block is -1, but block %d of sequence %lld is shared; pass a free block to copy it to",
        table[last], lld(sequence));
  }
  if (users[block] != 0)
    return report.about(3).invalid(
        "block is %d, which is in the block table of a sequence; set it to a free block", block);
  copy_block(cache, cached_keys(cache), table[last], block, filled);
  if (has_own_values(*cache)) copy_block(cache, cached_values(cache), table[last], block, filled);
  --users[table[last]];
  ++users[block];
  table[last] = block;
  *used = 1;
  return MHA_OK;
}

mha_status mha_kv_cache_copy_prefix(mha_kv_cache *cache, int64_t from, int64_t to, int64_t length,
                                    mha_error *error) {
  Report report(error);
  if (const mha_status status = check_place(report, cache, from)) return status;
  if (const mha_status status = check_cache_sequence(report.about(3), cache, to)) return status;
  if (const mha_status status = check_length(report.about(4), cache, from, length)) return status;
  if (from == to)
    return report.about(3).invalid(
        "from and to are both sequence %lld; call mha_kv_cache_truncate instead", lld(from));
  const CacheState source = state_of(cache, from);
  const bool is_paged = cache->kind == MHA_CACHE_KIND_PAGED;
  const int32_t *const table_from = table_of(cache, from), *const table_to = table_of(cache, to);
  const int32_t *const users = at<int32_t>(cache, layout_of(*cache).users);
  for (int64_t i = 0; is_paged && i < blocks_in_use(*cache, length); ++i) {
    if (table_to[i] == no_block) {
      return report.about(3).fail(MHA_ERROR_CACHE_FULL,
                                  "sequence %lld has no block for position %lld; call "
                                  "mha_kv_cache_set_blocks with a count of %lld or more",
                                  lld(to), lld(i * cache->block_positions),
                                  lld(blocks_in_use(*cache, length)));
    }
    if (table_to[i] != table_from[i] && users[table_to[i]] > 1) {
      return report.about(3).fail(
          MHA_ERROR_CACHE_SHARED,
          "block %d of sequence %lld, to which positions would be copied, is shared by %d "
          "sequences; truncate"
          " sequence %lld to 0 and give it free blocks with mha_kv_cache_set_blocks",
          table_to[i], lld(to), users[table_to[i]], lld(to));
    }
  }
  const int64_t first = oldest_position(cache, from, source.length);
  copy_groups(cache, cached_keys(cache), from, to, first, length);
  if (has_own_values(*cache)) copy_groups(cache, cached_values(cache), from, to, first, length);
  state_of(cache, to) = {length, length == 0 ? 0 : source.written};
  return MHA_OK;
}

mha_status mha_kv_cache_append(mha_kv_cache *cache, int64_t sequence, int64_t count, const float *k,
                               const float *v, mha_error *error) {
  Report report(error);
  if (const mha_status status = check_place(report, cache, sequence)) return status;
  if (count < 0) return report.about(3).invalid("count is %lld; set it to at least 0", lld(count));
  if (const mha_status status = check_append(report.about(3), cache, sequence, count))
    return status;
  if (count > 0 && !k)
    return report.about(4).fail(MHA_ERROR_NULL_POINTER, "k is NULL; pass the keys");
  if (const mha_status status = check_values(report.about(5), cache, count, v)) return status;
  const Kernels *kernels;
  if (const mha_status status = choose_kernels(report, MHA_INSTRUCTION_SET_AUTO, &kernels))
    return status;
  Sequence stored = {};
  stored.past = state_of(cache, sequence).length;
  stored.kv_rows = count;
  stored.in_cache = sequence;
  const struct {
    const float *rows;
    KeyValues to;
    int64_t width;
    bool are_keys;
  } both[] = {{k, cached_keys(cache), cache->head_dim, true},
              {v, cached_values(cache), cache->head_dim_v, false}};
  for (const auto &one : both) {
    if (!one.rows) continue;
    const StridedRows rows = {one.rows, 0, cache->num_kv_heads * one.width, one.width};
    kernels->store(storing_of(rows, one.to, &stored, cache->num_kv_heads, one.width, one.are_keys),
                   0, 0, count, nullptr);
  }
  grow(cache, sequence, count);
  return MHA_OK;
}

mha_status mha_kv_cache_read(const mha_kv_cache *cache, int64_t sequence, int64_t first,
                             int64_t count, float *k, float *v, mha_error *error) {
  Report report(error);
  if (const mha_status status = check_place(report, cache, sequence)) return status;
  const int64_t length = state_of(cache, sequence).length,
                held = oldest_position(cache, sequence, length);
  const int64_t oldest =
      held < length ? held
                    : length;  // a ring may be truncated to positions that it has overwritten
  if (first < oldest || count < 0 || count > length - first) {
    return report.about(first < oldest ? 3 : 4)
        .invalid(
            "first is %lld and count is %lld, but sequence %lld holds only positions >= %lld and < "
            "%lld; read within them",
            lld(first), lld(count), lld(sequence), lld(oldest), lld(length));
  }
  if (k) read_rows(cache, cached_keys(cache), true, cache->head_dim, sequence, first, count, k);
  if (v)
    read_rows(cache, cached_values(cache), false, cache->head_dim_v, sequence, first, count, v);
  return MHA_OK;
}
