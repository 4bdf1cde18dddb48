// The functions of the KV cache.
//
// size, init, view and shape are about its buffer. length, truncate, set_blocks, unshare and
// copy_prefix are about its sequences. append and read move keys and values between a cache and
// plain arrays. Calls of the attention do not come here: they append through the kernels
// (run/attend.cpp).
//
// To share a beginning, a program gives the second sequence the blocks of the first one with
// set_blocks, and copy_prefix then copies nothing but the length. Before one of them appends to a
// block that is partly filled, unshare copies that block. Sequences of a cache that is not paged
// get copies of keys and values from copy_prefix.

#include "../check/cache.h"

#include <string.h>

#include "../base/structs.h"
#include "../cpu.h"
#include "../storage.h"

namespace mha {
namespace {

// The configuration that makes a given cache.
mha_kv_cache_config config_of(const mha_kv_cache &cache) {
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
  config.value_place = cache.value_place;
  config.block_positions = has_blocks(cache.kind) ? cache.block_positions : 0;
  config.num_blocks = has_blocks(cache.kind) ? cache.num_blocks : 0;
  return config;
}

float canonical(float x) { return x != x ? MHA_NAN : x + 0.0f; }

// Makes a row of the Hadamard transform that is stored of it.
void transform_back(int64_t block, int64_t width, float *x) {
  for (int64_t h = block / 2; h > 0; h /= 2) {
    for (int64_t i = 0; i < width; i += 1 + ((i + 1) & h)) {
      const float a = x[i], b = x[i + h];
      x[i] = a + b;
      x[i + h] = a - b;
    }
  }
  for (int64_t c = 0; c < width; ++c) x[c] *= 1.0f / static_cast<float>(block);
}

// Writes positions as float32, [count, num_kv_heads, width]. NaN and zero get the bits that the
// contract gives them.
void read_rows(const mha_kv_cache *cache, const KeyValues &source, bool are_keys, int64_t width,
               int64_t sequence, int64_t first, int64_t count, float *out) {
  const bool are_transposed = are_keys && source.is_packed;
  for (int64_t i = 0; i < count; ++i) {
    const Place place = place_of(source, sequence, first + i);
    const int64_t lane = place.position % tile_keys;
    for (int64_t head = 0; head < cache->num_kv_heads; ++head) {
      const int64_t tile = tile_of(source, place, head), scale = scale_of(source, place, head);
      const CachedInt4 *const int4 =
          static_cast<const CachedInt4 *>(source.base) + tile + lane * source.row_stride;
      for (int64_t c = 0; c < width; ++c) {
        const int64_t in_tile =
            are_transposed ? c * tile_keys + lane : lane * source.row_stride + c;
        const float x = source.storage == Storage::int4
                            ? static_cast<float>(cached_code(int4 + c / 16 * 8, c % 16))
                            : widened(source.storage, source.base, tile + in_tile);
        out[c] = source.scales ? x * source.scales[scale] : x;
      }
      if (source.hadamard > 1) transform_back(source.hadamard, width, out);
      for (int64_t c = 0; c < width; ++c) out[c] = canonical(out[c]);
      out += width;
    }
  }
}

// Copies the group of 16 positions at one place to another, for all heads: keys, values and the
// scales of both.
void copy_group(const mha_kv_cache *cache, const Place &from, const Place &to) {
  const KeyValues both[] = {cached_keys(cache), cached_values(cache)};
  for (const KeyValues &source : both) {
    if (&source == &both[1] && !has_own_values(*cache)) continue;
    char *const base = static_cast<char *>(const_cast<void *>(source.base));
    float *const scales = const_cast<float *>(source.scales);
    const int64_t bytes = bytes_of(source.storage);
    const size_t group_bytes = static_cast<size_t>(tile_keys * source.row_stride * bytes);
    for (int64_t head = 0; head < cache->num_kv_heads; ++head) {
      memcpy(base + tile_of(source, to, head) * bytes, base + tile_of(source, from, head) * bytes,
             group_bytes);
      if (scales)
        memcpy(scales + scale_of(source, to, head), scales + scale_of(source, from, head),
               tile_keys * sizeof(float));
    }
  }
}

}  // namespace
}  // namespace mha

using namespace mha;

// ---- The buffer

mha_status mha_kv_cache_size(const mha_kv_cache_config *config, size_t *bytes, mha_error *error) {
  Reporter report(error);
  mha_kv_cache header;
  MHA_TRY(make_header(report, config, &header));
  return write_size(report.about(2), static_cast<size_t>(header.bytes), bytes);
}

// Nothing is written before all parameters are checked, here and in all functions below.
mha_status mha_kv_cache_init(const mha_kv_cache_config *config, void *buffer, size_t buffer_bytes,
                             mha_kv_cache **cache, mha_error *error) {
  Reporter report(error);
  mha_kv_cache header;
  MHA_TRY(make_header(report, config, &header));
  if (is_pool(header)) return report.invalid("kind is MHA_CACHE_KIND_POOL; call mha_kv_pool_init");
  MHA_TRY(check_new_buffer(report.about(2), buffer, buffer_bytes,
                           static_cast<int64_t>(header.bytes), "mha_kv_cache_size"));
  if (!cache)
    return report.about(4).null("cache is NULL; pass the address of a pointer to a cache");
  // Lengths are 0, tables name no block (-1, all bits set) and blocks have no users. Keys and
  // values stay as they are, for nothing reads them before they are written.
  const CacheLayout layout = layout_of(header);
  mha_kv_cache *const made = static_cast<mha_kv_cache *>(buffer);
  memcpy(static_cast<void *>(made), &header, sizeof header);
  memset(at<void>(made, layout.states), 0, static_cast<size_t>(layout.tables - layout.states));
  memset(at<void>(made, layout.tables), 0xff, static_cast<size_t>(layout.users - layout.tables));
  memset(at<void>(made, layout.users), 0, static_cast<size_t>(layout.parts[0] - layout.users));
  *cache = made;
  return MHA_OK;
}

mha_status mha_kv_pool_init(const mha_kv_cache_config *config, const mha_kv_pool *pool,
                            void *buffer, size_t buffer_bytes, mha_kv_cache **cache,
                            mha_error *error) {
  Reporter report(error);
  mha_kv_cache header;
  MHA_TRY(make_header(report, config, &header));
  if (!is_pool(header))
    return report.invalid("kind is %u; set it to MHA_CACHE_KIND_POOL, or call mha_kv_cache_init",
                          header.kind);
  MHA_TRY(check_pool(report.about(2), pool, &header));
  MHA_TRY(check_new_buffer(report.about(3), buffer, buffer_bytes,
                           static_cast<int64_t>(header.bytes), "mha_kv_cache_size"));
  if (!cache)
    return report.about(5).null("cache is NULL; pass the address of a pointer to a cache");
  memcpy(buffer, &header, sizeof header);
  *cache = static_cast<mha_kv_cache *>(buffer);
  return MHA_OK;
}

// The buffer may come from a file or from another process, so that everything is checked on which
// the bounds of later reads and writes depend. The keys and values are just numbers.
mha_status mha_kv_cache_view(void *buffer, size_t buffer_bytes, mha_kv_cache **cache,
                             mha_error *error) {
  Reporter report(error);
  MHA_TRY(check_head(report, cache_format, buffer, buffer_bytes));
  mha_kv_cache *const viewed = static_cast<mha_kv_cache *>(buffer);
  if (is_pool(*viewed))
    return report.fail(MHA_ERROR_CACHE_FORMAT,
                       "buffer has a pool, which holds no keys; make one with mha_kv_pool_init");
  // A header that was made up may have the right checksum, which is no secret. But only sound ones
  // are equal to the header that their own configuration makes.
  const mha_kv_cache_config config = config_of(*viewed);
  Reporter ignored_report(nullptr);
  mha_kv_cache again;
  const bool is_sound = make_header(ignored_report, &config, &again) == MHA_OK &&
                        memcmp(&again, viewed, sizeof again) == 0;
  MHA_TRY(check_whole(report, cache_format, is_sound, buffer_bytes, viewed->bytes));
  MHA_TRY(check_contents(report, viewed));
  if (!cache)
    return report.about(3).null("cache is NULL; pass the address of a pointer to a cache");
  *cache = viewed;
  return MHA_OK;
}

// All fields as the caller might have set them, with defaults resolved.
mha_status mha_kv_cache_shape(const mha_kv_cache *cache, mha_kv_cache_config *config,
                              mha_error *error) {
  Reporter report(error);
  MHA_TRY(check_cache(report, cache));
  return write_struct(report.about(2), "mha_kv_cache_config", config_of(*cache), config);
}

// ---- Sequences

mha_status mha_kv_cache_length(const mha_kv_cache *cache, int64_t sequence, int64_t *length,
                               mha_error *error) {
  Reporter report(error);
  MHA_TRY(check_place(report, cache, sequence));
  if (!length) return report.about(3).null("length is NULL; pass the address of an int64_t");
  *length = state_of(cache, sequence).length;
  return MHA_OK;
}

// The positions after the new length stay stored until others are written over them, and blocks
// stay in the table. An empty sequence of a ring starts anew.
mha_status mha_kv_cache_truncate(mha_kv_cache *cache, int64_t sequence, int64_t length,
                                 mha_error *error) {
  Reporter report(error);
  MHA_TRY(check_place(report, cache, sequence));
  MHA_TRY(check_length(report.about(3), cache, sequence, length));
  CacheState &state = state_of(cache, sequence);
  state.length = length;
  if (length == 0) state.written = 0;
  return MHA_OK;
}

// Replaces the table of a sequence. Blocks that hold its positions have to stay in their places.
mha_status mha_kv_cache_set_blocks(mha_kv_cache *cache, int64_t sequence, const int32_t *blocks,
                                   int64_t count, mha_error *error) {
  Reporter report(error);
  MHA_TRY(check_place(report, cache, sequence));
  MHA_TRY(check_paged(report, cache));
  // All of the new table is checked before anything changes.
  const int64_t entries = table_entries(*cache),
                in_use = blocks_in_use(*cache, state_of(cache, sequence).length);
  if (count < 0 || count > entries)
    return report.about(4).invalid("count is %lld; set it to 0 to capacity / block_positions, %lld",
                                   lld(count), lld(entries));
  if (count > 0 && !blocks) return report.about(3).null("blocks is NULL; pass the block numbers");
  int32_t *const table = table_of(cache, sequence);
  for (int64_t i = 0; i < count; ++i) {
    if (blocks[i] < 0 || blocks[i] >= cache->num_blocks)
      return report.about(3).invalid("blocks[%lld] is %d; set it to a block of the pool, 0 to %lld",
                                     lld(i), blocks[i], lld(cache->num_blocks - 1));
  }
  // A block may be listed once. The count of a block that was seen is negative meanwhile, which
  // needs no other memory.
  int32_t *const users = users_of(cache);
  int64_t seen = 0;
  for (; seen < count && users[blocks[seen]] >= 0; ++seen)
    users[blocks[seen]] = ~users[blocks[seen]];
  for (int64_t i = 0; i < seen; ++i) users[blocks[i]] = ~users[blocks[i]];
  // The block that stopped the loop was seen before. The message names both places.
  if (seen < count) {
    int64_t before = 0;
    while (blocks[before] != blocks[seen]) ++before;
    return report.about(3).invalid(
        "blocks[%lld] and blocks[%lld] are both %d; list each block only once", lld(before),
        lld(seen), blocks[seen]);
  }
  for (int64_t i = 0; i < in_use; ++i) {
    if (i >= count || blocks[i] != table[i])
      return report.about(3).invalid(
          "block %d holds positions of sequence %lld; keep it as blocks[%lld], or truncate the "
          "sequence first",
          table[i], lld(sequence), lld(i));
  }
  // Now nothing can fail. The table and the counts of users change together.
  for (int64_t i = 0; i < entries; ++i) {
    const int32_t block = i < count ? blocks[i] : no_block;
    if (table[i] == block) continue;
    if (table[i] != no_block) --users[table[i]];
    if (block != no_block) ++users[block];
    table[i] = block;
  }
  return MHA_OK;
}

// Copies the last block of a sequence to a free one if it is partly filled and shared, so that the
// sequence can be appended to.
mha_status mha_kv_cache_unshare(mha_kv_cache *cache, int64_t sequence, int32_t block,
                                uint32_t *used, mha_error *error) {
  Reporter report(error);
  MHA_TRY(check_place(report, cache, sequence));
  MHA_TRY(check_paged(report, cache));
  if (block < no_block || block >= cache->num_blocks)
    return report.about(3).invalid(
        "block is %d; set it to a free block of the pool, 0 to %lld, or to -1 for none", block,
        lld(cache->num_blocks - 1));
  if (!used) return report.about(4).null("used is NULL; pass the address of a uint32_t");
  const int64_t length = state_of(cache, sequence).length, last = length / cache->block_positions,
                filled = length % cache->block_positions;
  int32_t *const table = table_of(cache, sequence), *const users = users_of(cache);
  // Only a last block that is partly filled would be appended to.
  if (filled == 0 || users[table[last]] <= 1) {
    *used = 0;
    return MHA_OK;
  }
  if (block == no_block)
    return report.about(3).fail(
        MHA_ERROR_CACHE_FULL,
        "block is -1, but block %d of sequence %lld is shared; pass a free block to copy it to",
        table[last], lld(sequence));
  if (users[block] != 0)
    return report.about(3).invalid(
        "block is %d, which is in the block table of a sequence; set it to a free block", block);
  for (int64_t first = 0; first < filled; first += tile_keys)
    copy_group(cache, {table[last], first}, {block, first});
  --users[table[last]];
  ++users[block];
  table[last] = block;
  *used = 1;
  return MHA_OK;
}

// Makes one sequence begin like another. Blocks that both tables name need no copy. Of a ring, only
// positions that are still stored are copied.
mha_status mha_kv_cache_copy_prefix(mha_kv_cache *cache, int64_t from, int64_t to, int64_t length,
                                    mha_error *error) {
  Reporter report(error);
  MHA_TRY(check_place(report, cache, from));
  MHA_TRY(check_cache_sequence(report.about(3), cache, to));
  MHA_TRY(check_length(report.about(4), cache, from, length));
  if (from == to)
    return report.about(3).invalid(
        "from and to are both sequence %lld; call mha_kv_cache_truncate instead", lld(from));
  // The other sequence needs a block for each position, which no third one reads.
  const CacheState source = state_of(cache, from);
  const bool is_paged = cache->kind == MHA_CACHE_KIND_PAGED;
  const int32_t *const table_from = table_of(cache, from), *const table_to = table_of(cache, to);
  const int32_t *const users = users_of(cache);
  for (int64_t i = 0; is_paged && i < blocks_in_use(*cache, length); ++i) {
    if (table_to[i] == no_block)
      return report.about(3).fail(MHA_ERROR_CACHE_FULL,
                                  "sequence %lld has no block for position %lld; call "
                                  "mha_kv_cache_set_blocks with a count of %lld or more",
                                  lld(to), lld(i * cache->block_positions),
                                  lld(blocks_in_use(*cache, length)));
    if (table_to[i] != table_from[i] && users[table_to[i]] > 1)
      return report.about(3).fail(MHA_ERROR_CACHE_SHARED,
                                  "block %d of sequence %lld, to which positions would be copied, "
                                  "is shared by %d sequences; truncate sequence %lld to 0 and give "
                                  "it free blocks with mha_kv_cache_set_blocks",
                                  table_to[i], lld(to), users[table_to[i]], lld(to));
  }
  const KeyValues keys = cached_keys(cache);
  const int64_t first = oldest_position(cache, from, source.length);
  for (int64_t position = first / tile_keys * tile_keys; position < length; position += tile_keys) {
    const Place a = place_of(keys, from, position), b = place_of(keys, to, position);
    if (a.block != b.block) copy_group(cache, a, b);
  }
  // A ring that is copied has lost the same positions as the original.
  state_of(cache, to) = {length, length == 0 ? 0 : source.written};
  return MHA_OK;
}

// ---- Keys and values

// Appends without a call of the attention, for example keys that another library has computed. Both
// arrays are [count, num_kv_heads, head_dim or head_dim_v]; values that are in the keys come with
// them.
mha_status mha_kv_cache_append(mha_kv_cache *cache, int64_t sequence, int64_t count, const float *k,
                               const float *v, mha_error *error) {
  Reporter report(error);
  MHA_TRY(check_place(report, cache, sequence));
  if (count < 0) return report.about(3).invalid("count is %lld; set it to at least 0", lld(count));
  MHA_TRY(check_append(report.about(3), cache, sequence, count));
  if (count > 0 && !k) return report.about(4).null("k is NULL; pass the keys");
  MHA_TRY(check_values(report.about(5), cache, count, v));
  const Kernels *kernels;
  MHA_TRY(choose_kernels(report, MHA_INSTRUCTION_SET_AUTO, &kernels));
  // The kernels store new positions as a call of the attention does, so the bits are the same.
  Sequence stored = {};
  stored.past = state_of(cache, sequence).length;
  stored.kv_rows = count;
  stored.in_cache = sequence;
  const auto store = [&](const float *rows, const KeyValues &to, int64_t width, bool are_keys) {
    const StridedRows from = {rows, 0, cache->num_kv_heads * width, width};
    const KvStore job = {
        from, {}, nullptr, &stored, to, 0, cache->num_kv_heads, width, are_keys && to.is_packed};
    kernels->store(job, 0, 0, count, nullptr);
  };
  if (k) store(k, cached_keys(cache), cache->head_dim, true);
  if (v) store(v, cached_values(cache), cache->head_dim_v, false);
  grow(cache, sequence, count);
  return MHA_OK;
}

// The inverse of append, for tests, for moving a cache to another configuration, and for looking
// into it. Either array may be null.
mha_status mha_kv_cache_read(const mha_kv_cache *cache, int64_t sequence, int64_t first,
                             int64_t count, float *k, float *v, mha_error *error) {
  Reporter report(error);
  MHA_TRY(check_place(report, cache, sequence));
  const int64_t length = state_of(cache, sequence).length,
                held = oldest_position(cache, sequence, length);
  // A ring may be truncated to positions that it has overwritten. Then it holds none.
  const int64_t oldest = held < length ? held : length;
  if (first < oldest || count < 0 || count > length - first) {
    const Reporter of_range = report.about(first < oldest ? 3 : 4);
    if (oldest == length)
      return of_range.invalid(
          "first is %lld and count is %lld, but sequence %lld holds no positions; append some "
          "first",
          lld(first), lld(count), lld(sequence));
    return of_range.invalid(
        "first is %lld and count is %lld, but sequence %lld holds positions %lld to %lld; read "
        "within them",
        lld(first), lld(count), lld(sequence), lld(oldest), lld(length - 1));
  }
  if (k) read_rows(cache, cached_keys(cache), true, cache->head_dim, sequence, first, count, k);
  if (v)
    read_rows(cache, cached_values(cache), false, cache->head_dim_v, sequence, first, count, v);
  return MHA_OK;
}
