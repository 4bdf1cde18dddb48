// Where a chunk's keys and values lie, in the form that the kernels read: pointers to 16 positions each, into the packed storage, or into a
// unit's scratch memory to which they are brought.
#pragma once

#include "kernels/elements.h"
#include "kernels/rotate.h"
#include "kernels/unit.h"

namespace mha {
namespace {

constexpr int64_t chunk_groups = chunk_keys / key_block;  // groups of 16 positions


// One of the two, of a chunk. Group g holds the positions from begin + 16 g on.
struct Groups {
  const void *at[chunk_groups];
  const float *scales[chunk_groups];  // of int8
  int64_t run_end[chunk_groups];      // in keys of the chunk: so far the memory goes on without a gap
  Storage storage;                    // of what the pointers point to
  bool has_scales;
};

// A unit is streamed if it waits for the memory: most ask in their last chunk for the first one of the unit that comes next, and numbers of
// fewer bits are widened in registers, for each tile anew. Others find keys and values in a cache, where the block of queries before left
// them, or widen them once for many rows, into the scratch memory. One number at a time, or with a handful of keys, there is nothing to
// gain.
constexpr int64_t most_widened_rows = 16, least_streamed_keys = chunk_keys / 2;

MHA_INLINE bool has_floats(const Attention &call) { return call.k.storage == Storage::f32 && call.v.storage == Storage::f32; }

template <class V>
MHA_INLINE bool is_streamed(const Unit &unit) {
  const Attention &call = unit.call;
  if (V::size == 1 || !call.k.is_packed || !call.v.is_packed) return false;
  if (!has_floats(call)) return unit.num_rows <= most_widened_rows;
  return unit.sequence.n_kv >= least_streamed_keys && call.n_q <= call.block_queries;
}

// Where streams are read, up to 8 rows over a cache of floats are one tile, so that what it asks for comes in time. Its loops have
// registers for 4 or 6 rows: 8 are computed 4 by 4, over what the first 4 have brought to the first level of the cache. (Measured on Zen 3
// beside two tiles one after the other, from the memory: 5 and 6 rows 0.62 to 0.70 of the time, 7 and 8 rows 0.82 to 0.96.)
template <class V>
constexpr bool has_wide_tiles = has_long_kernels_for_streams<V>;
constexpr int wide_tile_rows = 8;
static_assert(wide_tile_rows <= attend_tile_rows_max, "scratch has room for a tile");

// So many of a tile's rows are in a loop.
template <int R>
constexpr int rows_in_loop = R == wide_tile_rows ? R / 2 : R;

// Rows of a streamed unit's tiles.
template <class V>
MHA_INLINE int64_t streamed_tile_rows(const Unit &unit) {
  if (!has_floats(unit.call)) return 4;
  if (unit.num_rows > wide_tile_rows) return 6;
  return unit.num_rows <= 4 || !has_wide_tiles<V> ? 4 : unit.num_rows <= 6 ? 6 : wide_tile_rows;
}

// Calls visit(Stored<the type of an element>{}).
template <class Type>
struct Stored {
  using Element = Type;
};

template <class Visit>
MHA_INLINE void visit_storage(Storage storage, Visit visit) {
  switch (storage) {
    case Storage::f32:
      return visit(Stored<float>{});
    case Storage::f16:
      return visit(Stored<F16>{});
    case Storage::bf16:
      return visit(Stored<Bf16>{});
    case Storage::int8:
      return visit(Stored<int8_t>{});
    case Storage::int4:
      return;  // weights alone
  }
}

// ---- Packed storage

struct Place {
  int64_t block, position;  // within the block
};

MHA_INLINE Place place_of(const KeyValues &source, int64_t sequence, int64_t position) {
  if (source.ring_positions != 0) position = position < source.ring_positions ? position : position % source.ring_positions;
  if (!source.tables) return {sequence, position};
  const int64_t index = quotient(position, source.block_positions);
  return {source.tables[sequence * source.table_stride + index], position - index * source.block_positions};
}

// The groups [first, end) of the chunk that begins at `begin`; nothing of them is read.
MHA_INLINE void locate(const KeyValues &source, const Unit &unit, int64_t begin, int64_t first, int64_t end, Groups *groups) {
  groups->storage = source.storage;
  groups->has_scales = source.storage == Storage::int8;
  const int64_t element = bytes_of(source.storage), group_bytes = key_block * source.row_stride * element;
  int64_t run = first;
  for (int64_t g = first; g < end;) {
    const Place place = place_of(source, unit.sequence.in_cache, begin + g * key_block);
    const char *at = static_cast<const char *>(source.base) +
                     (place.block * source.batch_stride + unit.kv_head * source.head_stride + place.position * source.row_stride) * element;
    const float *scales = nullptr;
    if (groups->has_scales) {
      scales = source.scales + (place.block * unit.call.num_kv_heads + unit.kv_head) * source.block_positions + place.position;
    }
    const int64_t in_block = block_of(source.block_positions - place.position), end_of_block = smaller(end, g + in_block);
    if (g > first && at != static_cast<const char *>(groups->at[g - 1]) + group_bytes) {
      for (; run < g; ++run) groups->run_end[run] = g * key_block;
    }
    for (; g < end_of_block; ++g, at += group_bytes) {
      groups->at[g] = at;
      if (!groups->has_scales) continue;
      groups->scales[g] = scales;
      scales += key_block;
    }
  }
  for (; run < end; ++run) groups->run_end[run] = end * key_block;
}

// ---- What has to be brought into the form

// The groups [first, end) lie one after the other in the unit's scratch memory.
MHA_INLINE void locate_scratch(const float *memory, int64_t width, int64_t first, int64_t end, Groups *groups) {
  groups->storage = Storage::f32;
  for (int64_t g = first; g < end; ++g) {
    groups->at[g] = memory + g * key_block * width;
    groups->run_end[g] = end * key_block;
  }
}

template <class V, class Element>
MHA_INLINE void widen(const Element *from, float *to, int64_t count) {
  int64_t i = 0;
  for (; i + static_cast<int64_t>(V::size) <= count; i += V::size) store(to + i, load<V>(from + i));
  for (; i < count; ++i) store(to + i, load<Scalar>(from + i));
}

// Packed storage of fewer bits, as floats.
template <class V>
inline void widen_groups(int64_t width, int64_t first, int64_t end, float *memory, Groups *groups) {
  visit_storage(groups->storage, [&](auto stored) {
    using Element = const typename decltype(stored)::Element *;
    for (int64_t g = first; g < end; ++g) {
      widen<V>(static_cast<Element>(groups->at[g]), memory + g * key_block * width, key_block * width);
    }
  });
  locate_scratch(memory, width, first, end, groups);
}

// Up to 4 rows of keys to their lanes of a block.
inline void pack_key_rows(const float *const (&rows)[4], int64_t count, int64_t head_dim, float *block) {
  int64_t c = 0;
  if (count == 4) {
    for (; c + 4 <= head_dim; c += 4) {
      transpose4x4(rows[0] + c, rows[1] + c, rows[2] + c, rows[3] + c, block + c * key_block, key_block);
    }
  }
  for (; c < head_dim; ++c) {
    for (int64_t i = 0; i < count; ++i) block[c * key_block + i] = quiet(rows[i][c]);
  }
}

// Plain rows lie apart, which hides them from the processor's own prefetching: a row is asked for when the one 16 before it is packed.
// (Values, which are only copied, take longer with this.)
template <class Element>
MHA_INLINE void prefetch_later_row(const Element *row, int64_t row_stride, int64_t width) {
  const Element *const later = row + 16 * row_stride;
  for (int64_t c = 0; c < width; c += 64 / static_cast<int64_t>(sizeof(Element))) __builtin_prefetch(later + c);
}

// Plain rows of keys, widened and rotated on their way.
template <class V>
inline void pack_keys(const Unit &unit, int64_t chunk_begin, Range keys, float *blocks) {
  const Attention &call = unit.call;
  const KeyValues &k = call.k;
  const int64_t head_dim = call.head_dim;
  float *const by_way = unit.scratch + call.scratch.rotated;
  const bool is_direct = k.storage == Storage::f32 && !call.rotate_k.cos;
  visit_storage(k.storage, [&](auto stored) {
    using Element = const typename decltype(stored)::Element *;
    const int64_t first_row = unit.sequence.kv_first + chunk_begin;
    const Element head = static_cast<Element>(k.base) + unit.sequence_index * k.batch_stride + unit.kv_head * k.head_stride;
    for (int64_t j = keys.begin; j < keys.end; j += 4) {
      const int64_t count = smaller(4, keys.end - j);
      const float *rows[4] = {};
      for (int64_t i = 0; i < count; ++i) {
        const int64_t row = first_row + j + i;
        prefetch_later_row(head + row * k.row_stride, k.row_stride, head_dim);
        if (is_direct) {
          rows[i] = reinterpret_cast<const float *>(head + row * k.row_stride);
          continue;
        }
        float *const copy = by_way + i * head_dim;
        widen<V>(head + row * k.row_stride, copy, head_dim);
        if (call.rotate_k.cos) rotate<V>(call.rotate_k, unit.sequence_index, row, chunk_begin + j + i, copy);
        rows[i] = copy;
      }
      pack_key_rows(rows, count, head_dim, blocks + block_of(j) * key_block * head_dim + place_in_block(j));
    }
  });
}

template <class V>
inline void pack_values(const Unit &unit, int64_t chunk_begin, Range keys, float *out) {
  const Attention &call = unit.call;
  const KeyValues &v = call.v;
  const int64_t padded = call.head_dim_v_padded;
  visit_storage(v.storage, [&](auto stored) {
    using Element = const typename decltype(stored)::Element *;
    const Element head = static_cast<Element>(v.base) + unit.sequence_index * v.batch_stride + unit.kv_head * v.head_stride;
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      float *const row = out + j * padded;
      widen<V>(head + (unit.sequence.kv_first + chunk_begin + j) * v.row_stride, row, call.head_dim_v);
      for (int64_t c = call.head_dim_v; c < padded; ++c) row[c] = 0.0f;
    }
  });
}

// ---- What the loops ask the memory for

// Who asks: a tile that has the unit's rows to itself asks at each step for as much as it reads; else the unit's tiles share in it. Later
// rows of a wide tile ask for nothing.
enum class Asks { alone, shared, nothing };

// Keys, or values, that are needed next, which loops ask for line by line while they compute.
struct Stream {
  const char *at[chunk_groups];  // its groups; any address where there is none
  bool has_any = false;          // some group is there
  int64_t even_groups;           // so many of them, from the first on, lie one after the other
  // Tiles that share in it ask for the first line of each of some groups, then for the second of each.
  uint32_t next_group = 0, offset = 0, group_bytes = 0;
  uint32_t rate = 0, credit = 0;  // of 2^32 steps so many ask; a step that does not leaves its credit to the next
};

// In how many stretches, side by side, the keys or values of a chunk are asked for: by tiles that share in it (of_many_tiles), and by one
// that asks alone (of_a_tile; 0 = one, or as many as it needs lines at a step). Measured where arithmetic and memory take about the same
// time:
//   Intel's AVX-512: lines in the order of memory take up to a quarter longer than those of all groups in turn. The few misses that a core
//     can wait for are then all of one page, and the processor's own prefetching helps little.
//   AMD's Zen 3, with AVX2: its own prefetching does most, and follows few stretches best. Those of one tile ask for a line two to four
//     times; it takes longer if they do not.
template <int lanes>
struct Stretches {
  static constexpr int of_many_tiles = chunk_groups;
  static constexpr int of_a_tile(int, int) { return 0; }
};

template <>
struct Stretches<8> {
  static constexpr int of_many_tiles = 2;
  static constexpr int of_a_tile(int rows, int element_bytes) {
    return element_bytes == 1 ? 2 : rows == 1 ? 8 : element_bytes == 2 ? 2 : 4;
  }
};

// Lines that a loop asks for: at step n those at n * step_bytes.
template <int lines>
struct Ahead {
  const char *line[lines];
  int64_t step_bytes;
  MHA_INLINE void step(int64_t n) const { MHA_UNROLL for (int i = 0; i < lines; ++i) __builtin_prefetch(line[i] + n * step_bytes, 0, 2); }
};

constexpr uint32_t lines_at_once = 2;

// What a loop asks for that is one of many.
template <class V>
struct SharedAhead {
  Stream &stream;
  MHA_INLINE void step(int64_t) const {
    constexpr uint32_t apart = chunk_groups / Stretches<V::size>::of_many_tiles;
    if (__builtin_expect(!__builtin_add_overflow(stream.credit, stream.rate, &stream.credit), 1)) return;
    MHA_UNROLL for (uint32_t i = 0; i < lines_at_once; ++i, stream.next_group += apart) {
      __builtin_prefetch(stream.at[stream.next_group % chunk_groups] + stream.offset, 0, 2);
    }
    if (stream.next_group < chunk_groups) return;
    stream.next_group -= chunk_groups;
    stream.offset += 64;
    if (stream.offset < stream.group_bytes) return;
    stream.offset = 0;
    ++stream.next_group;
  }
};

// ---- A chunk

// Keys [keys.begin, keys.end) of the chunk are needed. Rows of plain keys are packed from a border of 4 on, which fills whole lanes.
template <class V>
MHA_APART void read_keys(const Unit &unit, int64_t chunk_begin, Range keys, bool is_streamed, Groups *groups) {
  const Attention &call = unit.call;
  const int64_t first = block_of(keys.begin), end = block_of(keys.end + key_block - 1);
  float *const memory = unit.scratch + call.scratch.keys;
  if (!call.k.is_packed) {
    pack_keys<V>(unit, chunk_begin, {keys.begin & ~int64_t{3}, keys.end}, memory);
    groups->has_scales = false;
    return locate_scratch(memory, call.head_dim, first, end, groups);
  }
  locate(call.k, unit, chunk_begin, first, end, groups);
  if (call.k.storage != Storage::f32 && !is_streamed) {
    widen_groups<V>(call.head_dim, first, end, memory, groups);
  }
}

template <class V>
MHA_APART void read_values(const Unit &unit, int64_t chunk_begin, Range keys, bool is_streamed, Groups *groups) {
  const Attention &call = unit.call;
  const int64_t first = block_of(keys.begin), end = block_of(keys.end + key_block - 1);
  float *const memory = unit.scratch + call.scratch.values;
  if (!call.v.is_packed) {
    pack_values<V>(unit, chunk_begin, keys, memory);
    groups->has_scales = false;
    return locate_scratch(memory, call.head_dim_v_padded, first, end, groups);
  }
  locate(call.v, unit, chunk_begin, first, end, groups);
  if (call.v.storage != Storage::f32 && !is_streamed) {
    widen_groups<V>(call.head_dim_v_padded, first, end, memory, groups);
  }
}

// A row that is alone, of numbers for which there is little to compute, asks for what it comes to shortly. (Measured beside asking for the
// next chunk: float takes 1 to 10% less time, most with large heads; f16 and bf16 3% less with heads of 128, up to 4% more with those of 80
// and 96. With more rows, and with int8, it takes longer.)
template <int R, class Element, Asks asks>
constexpr bool computes_little = R == 1 && sizeof(Element) > 1 && asks == Asks::alone;
template <class V, int R, class Element, Asks asks>
constexpr bool asks_nearby = !reads_streams<V> && computes_little<R, Element, asks>;

// Where streams are read, such a row reads four parts of the chunk's keys side by side and asks for none. (Measured on Zen 3 beside asking
// in 8 stretches: 0.93 to 0.99 of the time from the memory, 0.8 from the caches. With int8 it takes a tenth longer.)
template <class V, int R, class Element, Asks asks>
constexpr bool reads_side_by_side = computes_little<R, Element, asks> && !asks_nearby<V, R, Element, asks>;

struct Chunk {
  int64_t begin;  // position of its first key
  Groups keys, values;
  Stream key_stream, value_stream;  // asked for by the loops over keys, and by those over values

  // For a loop over head_dim with B blocks of keys; the last of all blocks ends with `end`.
  template <class V, int R, int B, class Element, Asks asks>
  MHA_INLINE auto ahead_of_keys(int64_t block, int64_t end, int64_t head_dim) {
    constexpr int bytes = B * key_block * static_cast<int>(sizeof(Element)), stretches = Stretches<V::size>::of_a_tile(R, sizeof(Element));
    if constexpr (asks == Asks::shared) {
      return SharedAhead<V>{key_stream};
    } else if constexpr (stretches > 0) {
      const int64_t group = block / stretches, in_group = block % stretches * (bytes / B * head_dim / stretches);
      Ahead<stretches> ahead;
      const int64_t first = key_stream.has_any ? in_group : 0;
      ahead.step_bytes = key_stream.has_any ? bytes / stretches : 0;
      MHA_UNROLL for (int i = 0; i < stretches; ++i) ahead.line[i] = key_stream.at[i * (chunk_groups / stretches) + group] + first;
      return ahead;
    } else {
      constexpr bool is_near = asks_nearby<V, R, Element, asks>;
      constexpr int lines = is_near ? B : static_cast<int>(greater(1, bytes / 64));
      Ahead<lines> ahead;
      ahead.step_bytes = bytes / lines;
      const int64_t distance = greater(B, groups_nearby<Element>(head_dim));
      MHA_UNROLL for (int i = 0; i < lines; ++i) {
        ahead.line[i] = is_near ? later_group(keys, key_stream, block + distance + i, end)
                                : key_stream.at[smaller(chunk_groups - 1, block + i * (B / lines))];
      }
      return ahead;
    }
  }

  // For a loop over the values of `groups` groups, from `group` on, with C vectors of columns from `column` on.
  template <class V, int R, int C, class Element, Asks asks>
  MHA_INLINE auto ahead_of_values(int64_t group, int64_t groups, int64_t column, int64_t width) {
    if constexpr (asks == Asks::nothing) {
      return NoPrefetch{};
    } else if constexpr (asks == Asks::shared) {
      return SharedAhead<V>{value_stream};
    } else {
      constexpr int bytes = C * static_cast<int>(V::size * sizeof(Element)), stretches = Stretches<V::size>::of_a_tile(R, sizeof(Element));
      constexpr int lines = stretches > 0 ? stretches : static_cast<int>(greater(1, bytes / 64));
      // Of the bytes that all loops over these values ask for, those before `column` have been; in one stretch, or in several.
      const int64_t has_any = value_stream.has_any, values = has_any * groups * key_block;
      const int64_t done = values * column * static_cast<int>(sizeof(Element));
      Ahead<lines> ahead;
      ahead.step_bytes = has_any * (bytes / lines);
      const char *const first = value_stream.at[group] + (stretches > 0 ? done / lines : done);
      const int64_t apart = stretches > 0 ? values * width * static_cast<int>(sizeof(Element)) / lines : values * ahead.step_bytes;
      MHA_UNROLL for (int i = 0; i < lines; ++i) ahead.line[i] = first + i * apart;
      return ahead;
    }
  }

  // How far such a loop may go, since what it asks for lies one after the other.
  template <Asks asks>
  MHA_INLINE int64_t asks_until(int64_t group) const {
    if (asks != Asks::alone) return chunk_groups;
    return group < value_stream.even_groups ? value_stream.even_groups : group + 1;
  }

  // For a loop over whole values of one group, from number j on.
  template <class Element, int columns>
  MHA_INLINE auto values_nearby(int64_t j, int64_t end) const {
    constexpr int value_bytes = columns * static_cast<int>(sizeof(Element)), lines = static_cast<int>(greater(1, value_bytes / 64));
    const int64_t distance = greater(1, groups_nearby<Element>(columns));
    const char *const value = later_group(values, value_stream, block_of(j) + distance, end) + place_in_block(j) * value_bytes;
    Ahead<lines> ahead;
    ahead.step_bytes = value_bytes;
    MHA_UNROLL for (int i = 0; i < lines; ++i) ahead.line[i] = value + i * 64;
    return ahead;
  }

 private:
  // So many groups are 8 KiB.
  template <class Element>
  MHA_INLINE static int64_t groups_nearby(int64_t width) {
    return 8192 / static_cast<int>(key_block * sizeof(Element)) / static_cast<uint32_t>(width);
  }
  // Group number `group`; behind the last one, those of the chunk that comes next.
  MHA_INLINE static const char *later_group(const Groups &groups, const Stream &next, int64_t group, int64_t end) {
    if (group >= end) return next.at[smaller(chunk_groups - 1, group - end)];
    return static_cast<const char *>(groups.at[static_cast<uint64_t>(group) % chunk_groups]);  // there are no more
  }
};

// The chunk that comes next: where it is packed, it is to be on its way from the memory while another is computed.
struct NextChunk {
  const Unit &unit;
  Range keys;         // positions
  Range group_range;  // groups of the chunk
  Groups key_groups, value_groups;

  MHA_INLINE NextChunk(const Unit &of, Range range) : unit(of), keys(range), group_range{0, 0} {
    if (is_empty()) return;
    const int64_t begin = keys.begin / chunk_keys * chunk_keys;
    group_range = {block_of(keys.begin - begin), block_of(keys.end - begin + key_block - 1)};
    if (unit.call.k.is_packed) locate(unit.call.k, unit, begin, group_range.begin, group_range.end, &key_groups);
    if (unit.call.v.is_packed) locate(unit.call.v, unit, begin, group_range.begin, group_range.end, &value_groups);
  }

  MHA_INLINE bool is_empty() const { return keys.begin >= keys.end; }

  // What so many tiles ask for, packed keys and values, while they compute with `chunk` in so many steps each: keys while they read keys,
  // values while they read values.
  MHA_INLINE void stream(int64_t tiles, int64_t key_steps, int64_t value_steps, Chunk *chunk) const {
    const Attention &call = unit.call;
    fill(call.k, key_groups, group_range, call.head_dim, tiles, key_steps, &chunk->key_stream);
    fill(call.v, value_groups, group_range, call.head_dim_v_padded, tiles, value_steps, &chunk->value_stream);
  }

  // The same, but each when it is needed next: the values of the chunk itself, `groups_here`, while its keys are read, then the keys that
  // come next.
  MHA_INLINE void stream_crosswise(Range groups_here, int64_t tiles, int64_t key_steps, int64_t value_steps, Chunk *chunk) const {
    const Attention &call = unit.call;
    fill(call.v, chunk->values, groups_here, call.head_dim_v_padded, tiles, key_steps, &chunk->key_stream);
    fill(call.k, key_groups, group_range, call.head_dim, tiles, value_steps, &chunk->value_stream);
  }

 private:
  MHA_INLINE static void fill(const KeyValues &source, const Groups &groups, Range range, int64_t width, int64_t tiles, int64_t steps,
                              Stream *stream) {
    const bool has_keys = range.begin < range.end && source.is_packed;
    for (int64_t g = 0; g < chunk_groups; ++g) {
      const bool is_there = has_keys && g >= range.begin && g < range.end;
      stream->at[g] = is_there ? static_cast<const char *>(groups.at[g]) : reinterpret_cast<const char *>(stream);
    }
    stream->even_groups = chunk_groups;
    stream->has_any = has_keys;
    if (!has_keys) return;
    const bool are_even = range.begin == 0 && groups.run_end[0] >= range.end * key_block;
    stream->even_groups = are_even ? range.end : 0;
    if (tiles == 1 && !is_small_code) return;
    stream->group_bytes = static_cast<uint32_t>(key_block * width * bytes_of(source.storage));
    const int64_t lines = chunk_groups * int64_t{stream->group_bytes} / 64;
    const int64_t rate = (lines << 20) / greater(1, lines_at_once * tiles * steps);  // of 2^20 steps: a product that cannot overflow
    stream->rate = static_cast<uint32_t>(smaller(rate, (1 << 20) - 1) << 12);
  }
};

}  // namespace
}  // namespace mha
