// Where the keys and values of a chunk lie, in the form that the loops read: a pointer to each tile
// of 16 positions, into packed storage or into the scratch memory of the unit.
//
// read_chunk decides between four ways for keys and for values. Packed storage is located: only
// addresses are computed. Packed storage of fewer bits that many rows read is widened to scratch
// memory first. Rows of the caller's are packed into scratch memory or, values for few rows, read
// in place. Chosen keys that are no neighbours are gathered one by one. At the end of the file
// NextChunk says what to prefetch meanwhile.
#pragma once

#include "elements.h"
#include "prepare.h"
#include "unit.h"

namespace mha {
namespace {

constexpr int64_t chunk_tiles = chunk_keys / tile_keys;

// The key tiles that hold some of these keys.
MHA_INLINE Range tiles_of(Range keys) {
  return {key_tile_of(keys.begin), key_tile_of(keys.end + tile_keys - 1)};
}

// The keys or the values of a chunk by tiles of 16: tile g holds those from begin + 16 g on.
struct KeyTiles {
  const void *at[chunk_tiles];
  const float *scales[chunk_tiles];  // of codes
  int64_t run_end[chunk_tiles];  // the key of the chunk up to which memory goes on without a gap
  Storage storage;               // of what the pointers point to
  bool has_scales;
  bool are_late;       // keys that multiply_keys packs before it reads them
  int64_t row_stride;  // from one value to the next
};

// A unit is streamed if it waits for memory. Its loops then prefetch what comes next, and each tile
// of rows widens numbers of fewer bits in registers. Other units find keys and values in a cache,
// where the block of queries before left them, or widen them to scratch memory once for many rows.
// A handful of keys gains nothing by streaming.
constexpr int64_t max_widened_rows = 16, min_streamed_keys = chunk_keys / 2;

// Whether keys and values are stored as floats.
MHA_INLINE bool stores_floats(const Attention &call) {
  return call.arrays.k.storage == Storage::f32 && call.arrays.v.storage == Storage::f32;
}

// Whether the unit is streamed. Floats are if no other block of queries reads the same cache. There
// are no loops over an odd number of codes.
template <class V>
MHA_INLINE bool is_streamed(const Unit &unit) {
  const Attention &call = unit.call;
  if (has_loops_of_floats_alone<V> || !call.arrays.v.is_packed || unit.blocks) return false;
  if (call.run.codes && call.request.head_dim % 2 != 0) return false;
  if (!stores_floats(call)) return unit.num_rows <= max_widened_rows;
  return unit.sequence.n_kv >= min_streamed_keys && call.run.query_blocks == 1;
}

// Whether the caller's values are read where they are. Only units that read rows widen them there.
template <class V>
MHA_INLINE bool reads_in_place(const Unit &unit) {
  const AttentionPlan &plan = unit.call.plan;
  if (unit.call.arrays.v.storage != Storage::f32 &&
      (unit.rows_per_kv == 0 || has_loops_of_floats_alone<V>))
    return false;
  return plan.in_place_rows != 0 && (unit.rows_per_kv != 0 || unit.num_rows <= plan.in_place_rows);
}

// ---- Packed storage, and rows that are stored alike

// The address of a place for the kv head of the unit.
MHA_INLINE const char *stored_at(const KeyValues &source, const Unit &unit, const Place &place) {
  const int64_t at = place.block * source.batch_stride + unit.kv_head * source.head_stride +
                     place.position * source.row_stride;
  return static_cast<const char *>(source.base) + at * bytes_of(source.storage);
}

// Finds the tiles [first, end) of the chunk that starts at `begin` in packed storage, without
// reading anything of them. Block by block of the cache, it fills in the addresses, the scales and
// how far memory goes on without a gap.
MHA_NOINLINE inline void locate(const KeyValues &source, const Unit &unit, int64_t begin,
                                int64_t first, int64_t end, KeyTiles *tiles) {
  tiles->storage = source.storage;
  tiles->has_scales = has_codes(source.storage);
  tiles->are_late = false;
  tiles->row_stride = source.row_stride;
  const int64_t tile_bytes = tile_keys * source.row_stride * bytes_of(source.storage);
  int64_t run = first;
  for (int64_t g = first; g < end;) {
    const int64_t key = begin + g * tile_keys;
    const Place place = place_of(source, unit.sequence.in_cache, unit.position_of_key(key));
    const char *at = stored_at(source, unit, place);
    const int64_t in_block =
        key_tile_of(min(source.block_positions - place.position, unit.run_of_keys(key)));
    const int64_t end_of_block = min(end, g + in_block);
    if (g > first && at != static_cast<const char *>(tiles->at[g - 1]) + tile_bytes) {
      for (; run < g; ++run) tiles->run_end[run] = g * tile_keys;
    }
    if (tiles->has_scales) {
      const int64_t scales_at = place.block * source.scale_batch_stride +
                                unit.kv_head * source.block_positions + place.position;
      const float *scales = source.scales + scales_at;
      for (int64_t i = g; i < end_of_block; ++i, scales += tile_keys) tiles->scales[i] = scales;
    }
    for (; g < end_of_block; ++g, at += tile_bytes) tiles->at[g] = at;
  }
  for (; run < end; ++run) tiles->run_end[run] = end * tile_keys;
}

// ---- Bringing keys and values into that form

// The tiles [first, end) lie one after the other in scratch memory. Widened codes keep their
// scales.
MHA_INLINE void locate_scratch(const float *memory, int64_t width, int64_t first, int64_t end,
                               KeyTiles *tiles) {
  tiles->storage = Storage::f32;
  tiles->are_late = false;
  tiles->row_stride = width;
  for (int64_t g = first; g < end; ++g) {
    tiles->at[g] = memory + g * tile_keys * width;
    tiles->run_end[g] = end * tile_keys;
  }
}

// Widens tiles of packed storage to floats in scratch memory.
inline void widen_tiles(int64_t width, int64_t stride, int64_t first, int64_t end, float *memory,
                        KeyTiles *tiles) {
  // Rows of values may be parts of longer rows.
  const int64_t rows = tiles->row_stride == width ? 1 : tile_keys,
                numbers = tile_keys * width / rows;
  const int64_t row_bytes = tiles->row_stride * bytes_of(tiles->storage);
  for (int64_t g = first; g < end; ++g) {
    const char *from = static_cast<const char *>(tiles->at[g]);
    float *to = memory + g * tile_keys * stride;
    for (int64_t row = 0; row < rows; ++row, from += row_bytes, to += numbers)
      widen(tiles->storage, from, numbers, to);
  }
  locate_scratch(memory, stride, first, end, tiles);
}

// ---- Codes as pairs of words (CONTRACT.md, sections 7 and 8)

constexpr int32_t most_word = 32767;
MHA_INLINE int64_t pairs_of(int64_t codes) { return (codes + 1) / 2; }

// The scale of some numbers as words. Loops of a fixed length become vectors.
MHA_NOINLINE inline CodeScale word_scale_of(const float *x, int64_t count) {
  uint32_t most_bits = 0;
  int64_t i = 0;
  for (; i + min_group <= count; i += min_group)
    most_bits = most_bits_of(x + i, min_group, most_bits);
  return code_scale_of(most_bits_of(x + i, count - i, most_bits), most_word);
}

// Writes the codes of some numbers as pairs of words, which may take the place of the numbers.
template <class V>
MHA_INLINE void encode_words(const float *x, int64_t count, float factor, float *pairs) {
  char *const words = reinterpret_cast<char *>(pairs);
  // A factor of 0 makes all codes 0, even those of numbers that are not finite.
  if (factor == 0.0f)
    return static_cast<void>(
        MHA_MEMSET(words, 0, static_cast<size_t>(pairs_of(count)) * sizeof(WordPair)));
  in_vectors<V>(count, [&](auto vector, int64_t i) MHA_INLINED {
    using T = decltype(vector);
    store_words(words + 2 * i, load<T>(x + i) * all<T>(factor));
  });
  if (count % 2 != 0) MHA_MEMSET(words + 2 * count, 0, sizeof(int16_t));
}

// Pairs two rows of a multiple of 16 codes.
MHA_NOINLINE inline void pair_rows(const int8_t *first, const int8_t *second, int64_t count,
                                   float *to) {
  constexpr int vectors = static_cast<int>(tile_keys / Vector::size);
  for (int64_t i = 0; i < count; i += tile_keys) {
    Vector pairs[vectors];
    pair_codes<false>(first + i, second - first, pairs);
    MHA_EACH(n, vectors) store(to + i + n * Vector::size, pairs[n]);
  }
}

// Pairs the numbers of 16 keys, of which each row of codes has one number.
MHA_NOINLINE inline void pair_keys(const int8_t *codes, int64_t head_dim, float *block) {
  for (int64_t c = 0; c < head_dim; c += 2, codes += 2 * tile_keys, block += tile_keys) {
    // The query's code behind the last one is 0.
    pair_rows(codes, c + 1 < head_dim ? codes + tile_keys : codes, tile_keys, block);
  }
}

// The same for rows of keys. words: [16][pairs] floats of scratch memory.
MHA_NOINLINE inline void pair_key_rows(const int8_t *const (&rows)[tile_keys], int64_t head_dim,
                                       float *words, float *block) {
  constexpr int64_t at_once = 16;
  const int64_t pairs = pairs_of(head_dim);
  for (int64_t r = 0; r < tile_keys; ++r) {
    for (int64_t c = 0; c < head_dim; c += at_once) {
      int16_t some[at_once] = {};
      const int64_t count = min(at_once, head_dim - c);
      if (count == at_once) {
        MHA_EACH(i, at_once) some[i] = rows[r][c + i];
      } else {
        for (int64_t i = 0; i < count; ++i) some[i] = rows[r][c + i];
      }
      MHA_MEMCPY(words + r * pairs + c / 2, some,
                 static_cast<size_t>(pairs_of(count)) * sizeof(WordPair));
    }
  }
  transpose_rows(words, pairs, pairs, block);
}

// Pairs neighbours of 16 values, whose codes have 4 or 8 bits.
MHA_NOINLINE inline void pair_values(Storage storage, const void *const (&rows)[tile_keys],
                                     int64_t width, float *to) {
  for (int64_t r = 0; r < tile_keys; r += 2, to += width) {
    if (storage == Storage::int8) {
      pair_rows(static_cast<const int8_t *>(rows[r]), static_cast<const int8_t *>(rows[r + 1]),
                width, to);
      continue;
    }
    constexpr int vectors = static_cast<int>(tile_keys / Vector::size);
    const ValueNibble *const first = static_cast<const ValueNibble *>(rows[r]),
                             *const second = static_cast<const ValueNibble *>(rows[r + 1]);
    for (int64_t c = 0; c < width; c += tile_keys) {
      Vector pairs[vectors];
      pair_nibbles(first + c / 2, 0, second - first, pairs);
      MHA_EACH(n, vectors) store(to + c + n * Vector::size, pairs[n]);
    }
  }
}

// Copies up to 4 rows of keys to their lanes of a tile.
inline void pack_key_rows(const float *const (&rows)[4], int64_t count, int64_t head_dim,
                          float *block) {
  int64_t c = 0;
  if (count == 4) {
    for (; c + 4 <= head_dim; c += 4) {
      transpose4x4(rows[0] + c, rows[1] + c, rows[2] + c, rows[3] + c, block + c * tile_keys,
                   tile_keys);
    }
  }
  for (; c < head_dim; ++c) {
    for (int64_t i = 0; i < count; ++i) block[c * tile_keys + i] = canonical_nan(rows[i][c]);
  }
}

// The address of a row of the caller's keys or values for the kv head of the unit.
MHA_INLINE const char *plain_row(const KeyValues &source, const Unit &unit, int64_t array_row) {
  return element_at(source.base, source.storage,
                    unit.sequence_index * source.batch_stride + unit.kv_head * source.head_stride +
                        array_row * source.row_stride);
}

// The tiles [first, end) of the chunk lie where the caller has them.
MHA_INLINE void locate_rows(const KeyValues &source, const Unit &unit, int64_t begin, int64_t first,
                            int64_t end, KeyTiles *tiles) {
  tiles->storage = source.storage;
  tiles->has_scales = tiles->are_late = false;
  tiles->row_stride = source.row_stride;
  for (int64_t g = first; g < end; ++g) {
    tiles->at[g] = plain_row(source, unit, unit.sequence.kv_first + begin + g * tile_keys);
    tiles->run_end[g] = end * tile_keys;
  }
}

// Gives all NaNs of whole vectors the payload that exp_of expects.
template <class V>
MHA_INLINE void make_canonical(float *p, int64_t count) {
  for (int64_t i = 0; i < count; i += V::size) store(p + i, canonical_nan(load<V>(p + i)));
}

// 16 rows of keys, or a slice of each: where they lie, or copies that are floats.
struct KeyRows {
  const void *at;
  Storage storage;
  int64_t stride;
};

// The first of the rows of a tile, from number c on.
MHA_INLINE const char *first_key_row(const Unit &unit, int64_t chunk_begin, int64_t tile,
                                     int64_t c) {
  const KeyValues &k = unit.call.arrays.k;
  const int64_t position = unit.position_of_key(chunk_begin + tile * tile_keys);
  return (is_plain(k) ? plain_row(k, unit, unit.sequence.kv_first + position)
                      : stored_at(k, unit, place_of(k, unit.sequence.in_cache, position))) +
         c * bytes_of(k.storage);
}

// Finds the rows of a tile, `width` numbers of each from number c on. Only `keys` of the chunk are
// needed, and others need not exist. Rows of a tile that is not whole are copied to the scratch
// memory, and so are those that are to be prepared or, with as_floats, widened. NaNs are not made
// canonical: whoever calls does it here or to the products.
template <class V>
MHA_NOINLINE KeyRows rows_of_keys(const Unit &unit, int64_t chunk_begin, int64_t tile, Range keys,
                                  int64_t c, int64_t width, bool as_floats) {
  const Attention &call = unit.call;
  const KeyValues &k = call.arrays.k;
  const int64_t first = tile * tile_keys, begin = max(keys.begin - first, 0),
                end = min(keys.end - first, tile_keys);
  const int64_t row_bytes = k.row_stride * bytes_of(k.storage);
  const int64_t position = unit.position_of_key(chunk_begin + first),
                array_row = unit.sequence.kv_first + position;
  const bool needs_preparation = is_plain(k) && call.request.prepare_k.is_any;
  const char *const rows = first_key_row(unit, chunk_begin, tile, c);
  // 16 lines that lie a multiple of 4 KB apart fall into one set of the first level of the cache,
  // which holds 8.
  const bool share_a_set = V::size == tile_keys && !as_floats && row_bytes % 4096 == 0;
  if (!needs_preparation && end - begin == tile_keys && !share_a_set &&
      (k.storage == Storage::f32 || !as_floats))
    return {rows, k.storage, k.row_stride};
  float *const copies = unit.scratch + call.plan.scratch.prepared;
  for (int64_t i = begin; i < end; ++i) {
    float *const copy = copies + i * width;
    widen(k.storage, rows + i * row_bytes, width, copy);
    if (needs_preparation)
      prepare(
          call.request.prepare_k,
          {unit.sequence_index, array_row + i, position + i, unit.kv_head, call.run.k_statistics},
          width, copy);
  }
  return {copies, Storage::f32, width};
}

// How many numbers of each key are packed at a time where keys are packed late. The slices of all
// late tiles stay in the first level of the cache. Norms and rotation need whole rows.
constexpr int64_t late_numbers = 64;
static_assert(late_numbers % score_block == 0, "slices are whole blocks of a dot product");
MHA_INLINE int64_t late_width(const Attention &call) {
  return is_plain(call.arrays.k) && call.request.prepare_k.is_any
             ? call.request.head_dim
             : min(late_numbers, call.request.head_dim);
}

// Packs some of the numbers of 16 rows of keys into a tile of that width, as rows_of_keys finds
// them. ahead: how many tiles later the rows that it prefetches are; 0: none.
template <class V>
MHA_NOINLINE void pack_keys(const Unit &unit, int64_t chunk_begin, int64_t tile, Range keys,
                            Range numbers, int64_t ahead, float *block) {
  const KeyValues &k = unit.call.arrays.k;
  const int64_t width = numbers.end - numbers.begin, row_bytes = k.row_stride * bytes_of(k.storage);
  const char *const later =
      first_key_row(unit, chunk_begin, tile, numbers.begin) + ahead * tile_keys * row_bytes;
  for (int64_t i = 0; ahead > 0 && i < tile_keys; ++i)
    prefetch_row(later + i * row_bytes, width * bytes_of(k.storage));
  const KeyRows rows = rows_of_keys<V>(unit, chunk_begin, tile, keys, numbers.begin, width, false);
  visit_storage(rows.storage, [&](auto stored) MHA_INLINED {
    using Element = typename decltype(stored)::Element;
    transpose_rows(static_cast<const Element *>(rows.at), rows.stride, width, block);
  });
}

// Copies rows of values as floats, prepared, and fills them up with zeros to the padded width.
template <class V>
inline void pack_values(const Unit &unit, int64_t chunk_begin, Range keys, float *out) {
  const Attention &call = unit.call;
  const int64_t width = call.request.head_dim_v, padded = call.plan.head_dim_v_padded,
                first_row = unit.sequence.kv_first + chunk_begin;
  const int64_t stride_bytes = call.arrays.v.row_stride * bytes_of(call.arrays.v.storage);
  const char *row = plain_row(call.arrays.v, unit, first_row + keys.begin);
  for (int64_t j = keys.begin; j < keys.end; ++j, row += stride_bytes) {
    float *const to = out + j * padded;
    widen(call.arrays.v.storage, row, width, to);
    if (call.request.prepare_v.is_any)
      prepare(call.request.prepare_v, {unit.sequence_index, first_row + j, 0, unit.kv_head}, width,
              to);
    if (width < padded)
      MHA_MEMSET(to + width, 0, static_cast<size_t>(padded - width) * sizeof(float));
  }
}

// ---- Chosen keys, one by one

// Finds a chosen key or value, and its scale.
MHA_NOINLINE inline Place find_chosen(const KeyValues &source, const Unit &unit, int64_t position,
                                      float *scale) {
  const Place place = place_of(source, unit.sequence.in_cache, position);
  if (source.scales) *scale = source.scales[scale_of(source, place, unit.kv_head)];
  return place;
}

// Copies keys of packed storage, lanes of any tiles, to the lanes of a tile. It reads four at a
// time, because memory that is read in several places at once arrives faster.
template <class Number>
MHA_NOINLINE void gather_lanes(const void *const (&keys)[tile_keys], int64_t head_dim, void *tile) {
  constexpr int at_once = 4;
  for (int64_t first = 0; first < tile_keys; first += at_once) {
    const Number *from[at_once];
    MHA_EACH(i, at_once) from[i] = static_cast<const Number *>(keys[first + i]);
    Number *to = static_cast<Number *>(tile) + first;
    for (int64_t k = 0; k < head_dim * tile_keys; k += tile_keys) {
      Number lanes[at_once];
      MHA_EACH(i, at_once) lanes[i] = from[i][k];
      MHA_EACH(i, at_once) to[k + i] = lanes[i];
    }
  }
}

// Finds 16 chosen keys or values in memory, and their scales. Packed keys are lanes of any tiles.
MHA_NOINLINE inline void find_tile(const Unit &unit, bool are_keys, int64_t chunk_begin, Range keys,
                                   int64_t key_tile, const void *(&at)[tile_keys], float *scales) {
  const KeyValues &k = unit.call.arrays.k, &v = unit.call.arrays.v, &source = are_keys ? k : v;
  for (int64_t i = 0; i < tile_keys; ++i) {
    // Lanes without a key hold one of the others.
    const int64_t key = min(max(key_tile * tile_keys + i, keys.begin), keys.end - 1);
    Place place = find_chosen(source, unit, unit.position_of_key(chunk_begin + key), scales + i);
    // Its value is prefetched, since the processor does not expect it.
    if (are_keys)
      prefetch_row(stored_at(v, unit, place), bytes_of(v.storage, unit.call.request.head_dim_v));
    const int64_t lane = are_keys && k.is_packed ? lane_of(place.position) : 0;
    place.position -= lane;
    at[i] = stored_at(source, unit, place) + lane * bytes_of(source.storage);
  }
}

// Gathers 16 chosen keys of packed storage as a tile of floats, and their scales.
MHA_NOINLINE inline void gather_tile(const Unit &unit, int64_t chunk_begin, Range keys,
                                     int64_t key_tile, float *block, float *scales) {
  const KeyValues &k = unit.call.arrays.k;
  const int64_t head_dim = unit.call.request.head_dim, element = bytes_of(k.storage);
  const void *from[tile_keys];
  find_tile(unit, true, chunk_begin, keys, key_tile, from, scales);
  float *const codes = unit.scratch + unit.call.plan.scratch.prepared;
  if (element == 4) return gather_lanes<float>(from, head_dim, block);
  (element == 2 ? gather_lanes<uint16_t> : gather_lanes<uint8_t>)(from, head_dim, codes);
  widen(k.storage, codes, tile_keys * head_dim, block);
}

// Copies one key or value as floats from wherever it lies, prepared if it was not, and its scale.
MHA_NOINLINE inline void gather_row(const Unit &unit, bool are_keys, int64_t position,
                                    int64_t width, float *to, float *scale) {
  const Attention &call = unit.call;
  const KeyValues &source = are_keys ? call.arrays.k : call.arrays.v;
  if (is_plain(source)) {
    const int64_t array_row = unit.sequence.kv_first + position;
    widen(source.storage, plain_row(source, unit, array_row), width, to);
    const Preparation &how = are_keys ? call.request.prepare_k : call.request.prepare_v;
    if (how.is_any)
      prepare(how, {unit.sequence_index, array_row, position, unit.kv_head, call.run.k_statistics},
              width, to);
    return;
  }
  const Place place = find_chosen(source, unit, position, scale);
  widen(source.storage, stored_at(source, unit, place), width, to);
}

// Gathers the keys of a chunk, or their values, into scratch memory: values as rows, keys as key
// tiles. Where the values are parts of the keys, the rows of the keys stay there and serve as
// values.
MHA_NOINLINE inline void gather(const Unit &unit, bool are_keys, int64_t chunk_begin, Range keys,
                                int64_t width, float *memory, KeyTiles *tiles) {
  const Attention &call = unit.call;
  const KeyValues &source = are_keys ? call.arrays.k : call.arrays.v;
  const bool has_own_values = !is_stored(call.arrays.k);
  const Range range = tiles_of(keys);
  float *const scales = unit.scratch + call.plan.scratch.chosen_scales +
                        (are_keys || !has_own_values ? 0 : chunk_keys);
  const int64_t numbers = are_keys ? width : call.request.head_dim_v;
  const int64_t stride = has_own_values ? width : call.arrays.k.row_stride,
                key_stride = key_stride_of(width);
  float *const rows = unit.scratch + (are_keys && has_own_values ? call.plan.scratch.prepared
                                                                 : call.plan.scratch.values);
  locate_scratch(are_keys ? memory : rows, are_keys ? key_stride : stride, range.begin, range.end,
                 tiles);
  tiles->has_scales = has_codes(source.storage);
  for (int64_t g = range.begin; g < range.end; ++g) tiles->scales[g] = scales + g * tile_keys;
  if (!are_keys && !has_own_values) return;
  for (int64_t g = range.begin; g < range.end; ++g) {
    if (are_keys && source.is_packed) {
      gather_tile(unit, chunk_begin, keys, g, memory + g * tile_keys * key_stride,
                  scales + g * tile_keys);
      continue;
    }
    float *const of_tile = rows + (are_keys && has_own_values ? 0 : g * tile_keys * stride);
    for (int64_t j = max(keys.begin, g * tile_keys); j < min(keys.end, (g + 1) * tile_keys); ++j) {
      float *const to = of_tile + lane_of(j) * stride;
      if (are_keys && !is_plain(source)) {  // rows of a cache
        const int64_t later = unit.position_of_key(chunk_begin + min(j + 4, keys.end - 1));
        prefetch_row(stored_at(source, unit, place_of(source, unit.sequence.in_cache, later)),
                     numbers * bytes_of(source.storage));
      }
      gather_row(unit, are_keys, unit.position_of_key(chunk_begin + j), numbers, to, scales + j);
      if (!are_keys && numbers < width)
        MHA_MEMSET(to + numbers, 0, static_cast<size_t>(width - numbers) * sizeof(float));
    }
    if (!are_keys) continue;
    float *const block = memory + g * tile_keys * key_stride;
    transpose_rows(of_tile, stride, width, block);
    make_canonical<Vector>(block, tile_keys * width);
  }
}

// ---- Codes of a chunk

// Brings the keys of a chunk, or their values, into scratch memory as pairs of words.
MHA_NOINLINE inline void read_codes(const Unit &unit, bool are_keys, int64_t chunk_begin,
                                    Range keys, int64_t width, float *memory, KeyTiles *tiles) {
  const Attention &call = unit.call;
  const KeyValues &source = are_keys ? call.arrays.k : call.arrays.v;
  const Range range = tiles_of(keys);
  const bool gathers = unit.gathers_keys(), are_lanes = are_keys && source.is_packed;
  const int64_t row_bytes = source.row_stride * bytes_of(source.storage),
                stride = are_keys ? key_stride_of(pairs_of(width)) : width / 2;
  float *const words = unit.scratch + call.plan.scratch.prepared,
               *const scales =
                   unit.scratch + call.plan.scratch.chosen_scales + (are_keys ? 0 : chunk_keys);
  if (!gathers) locate(source, unit, chunk_begin, range.begin, range.end, tiles);
  for (int64_t g = range.begin; g < range.end; ++g) {
    float *const to = memory + g * tile_keys * stride;
    const int8_t *const codes = static_cast<const int8_t *>(tiles->at[g]);
    const void *rows[tile_keys];
    if (gathers) {
      find_tile(unit, are_keys, chunk_begin, keys, g, rows, scales + g * tile_keys);
      tiles->scales[g] = scales + g * tile_keys;
    }
    if (are_lanes) {
      if (gathers) gather_lanes<uint8_t>(rows, width, words);
      pair_keys(gathers ? reinterpret_cast<const int8_t *>(words) : codes, width, to);
      continue;
    }
    for (int64_t i = 0; !gathers && i < tile_keys; ++i) rows[i] = codes + i * row_bytes;
    if (!are_keys) {
      pair_values(source.storage, rows, width, to);
      continue;
    }
    const int8_t *of_keys[tile_keys];
    MHA_EACH(i, tile_keys) of_keys[i] = static_cast<const int8_t *>(rows[i]);
    pair_key_rows(of_keys, width, words, to);
  }
  locate_scratch(memory, stride, range.begin, range.end, tiles);
  tiles->has_scales = true;
}

// ---- A chunk

// Brings the needed keys of a chunk, or their values, into the form that the loops read. See the
// start of the file for the ways to do it.
template <class V>
MHA_NOINLINE void read_tiles(const Unit &unit, bool are_keys, int64_t chunk_begin, Range keys,
                             bool is_streamed, KeyTiles *tiles) {
  const Attention &call = unit.call;
  const KeyValues &source = are_keys ? call.arrays.k : call.arrays.v;
  const int64_t width = are_keys ? call.request.head_dim : call.plan.head_dim_v_padded,
                stride = are_keys ? key_stride_of(width) : width;
  const Range range = tiles_of(keys);
  float *const memory =
      unit.scratch + (are_keys ? call.plan.scratch.keys : call.plan.scratch.values);
  // Of codes, packed ones alone may stay where they are.
  const bool may_stay = source.is_packed && is_streamed && !unit.gathers_keys();
  if (call.run.codes && !may_stay)
    return read_codes(unit, are_keys, chunk_begin, keys, width, memory, tiles);
  // Chosen keys that are no neighbours, and any chosen rows of the caller's, come one by one.
  if (unit.gathers_keys() || (unit.blocks && is_plain(source)))
    return gather(unit, are_keys, chunk_begin, keys, width, memory, tiles);
  // Rows: those of the caller's, or those of a cache whose keys contain the values.
  if (!source.is_packed) {
    if (!are_keys && reads_in_place<V>(unit))
      return locate_rows(source, unit, chunk_begin, range.begin, range.end, tiles);
    tiles->has_scales = false;
    if (!is_plain(source))
      locate(source, unit, chunk_begin, range.begin, range.end, tiles);  // for the scales
    locate_scratch(memory, stride, range.begin, range.end, tiles);
    if (!are_keys) return pack_values<V>(unit, chunk_begin, keys, memory);
    tiles->are_late = unit.rows_per_kv != 0 || unit.num_rows <= call.plan.late_rows;
    for (int64_t g = range.begin; g < range.end; ++g) {
      if (tiles->are_late) {
        tiles->at[g] = memory + g % late_tiles * tile_keys * key_stride_of(late_width(call));
        tiles->run_end[g] = (g + 1) * tile_keys;
      } else {
        float *const block = memory + g * tile_keys * stride;
        pack_keys<V>(unit, chunk_begin, g, keys, {0, width}, 0, block);
        make_canonical<V>(block, tile_keys * width);
      }
    }
    return;
  }
  locate(source, unit, chunk_begin, range.begin, range.end, tiles);
  // Packed storage stays where it is, or is widened once for all rows of the unit.
  const bool stays = source.storage == Storage::f32 || is_streamed;
  if (!stays) widen_tiles(width, stride, range.begin, range.end, memory, tiles);
}

// A chunk of 256 keys. Its keys count from its first one.
struct Chunk {
  int64_t begin;  // the position of its first key, or with chosen keys its rank
  Range needed;   // the keys that are read
  KeyTiles keys, values;
};

template <class V>
MHA_INLINE void read_chunk(const Unit &unit, int64_t begin, Range needed, bool is_streamed,
                           Chunk *chunk) {
  chunk->begin = begin;
  chunk->needed = needed;
  read_tiles<V>(unit, true, begin, needed, is_streamed, &chunk->keys);
  read_tiles<V>(unit, false, begin, needed, is_streamed, &chunk->values);
}

// ---- Prefetching

// Keys or values that are needed next. While a loop reads the tile of 16 keys number g, it
// prefetches tile g of these, or a share of it if several tiles of rows read the same keys.
struct PrefetchSource {
  const KeyTiles *tiles;
  Range range;           // the tiles that exist
  int64_t share, bytes;  // number of the share, and its bytes of each tile

  MHA_INLINE bool has(int64_t tile) const { return tile >= range.begin && tile < range.end; }
  MHA_INLINE const char *at(int64_t tile) const {
    return static_cast<const char *>(tiles->at[tile]);
  }
};

MHA_INLINE int64_t tile_bytes_of(const KeyValues &source) {
  return tile_keys * source.row_stride * bytes_of(source.storage);
}

constexpr PrefetchSource no_prefetch_source = {nullptr, {0, 0}, 0, 0};

// The chunk that the unit, or the unit after it, reads next, as far as it is packed.
struct NextChunk {
  KeyTiles keys, values;
  Range key_tiles = {0, 0}, value_tiles = {0, 0};
  int64_t key_bytes, value_bytes;  // of a tile
  bool has_own_values;             // else they come with the keys

  MHA_INLINE void find(const Unit &unit, Range range) {
    const Attention &call = unit.call;
    key_bytes = tile_bytes_of(call.arrays.k);
    value_bytes = tile_bytes_of(call.arrays.v);
    has_own_values = !is_stored(call.arrays.k);
    if (range.begin >= range.end) return;
    const int64_t begin = range.begin / chunk_keys * chunk_keys;
    key_tiles = tiles_of({range.begin - begin, range.end - begin});
    locate(call.arrays.k, unit, begin, key_tiles.begin, key_tiles.end, &keys);
    if (!has_own_values) return;
    value_tiles = key_tiles;
    locate(call.arrays.v, unit, begin, value_tiles.begin, value_tiles.end, &values);
  }

  // What tile of rows number `tile` prefetches while it reads the keys of a chunk, and while it
  // reads the values. A tile that is alone prefetches what it comes to next: the values of the
  // chunk, then the keys of the next chunk. Of several tiles, the first brings the chunk into the
  // cache, and all share in prefetching the next one.
  MHA_INLINE void share(const Chunk &here, int64_t tile, int64_t tiles, PrefetchSource *of_keys,
                        PrefetchSource *of_values) const {
    if (tiles == 1) {
      if (has_own_values) *of_keys = {&here.values, tiles_of(here.needed), 0, value_bytes};
      *of_values = {&keys, key_tiles, 0, key_bytes};
    } else {
      *of_keys = {&keys, key_tiles, tile, key_bytes / tiles};
      *of_values = {&values, value_tiles, tile, value_bytes / tiles};
    }
  }
};

}  // namespace
}  // namespace mha
