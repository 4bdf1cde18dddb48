// Where a chunk's keys and values lie, in the form that the kernels read: pointers to 16 positions each, into the packed storage, or into a
// unit's scratch memory to which they are brought.
#pragma once

#include "kernels/elements.h"
#include "kernels/rotate.h"
#include "kernels/unit.h"

namespace mha {
namespace {

constexpr int64_t chunk_groups = chunk_keys / key_block;  // groups of 16 positions

MHA_INLINE int64_t bytes_of(Storage storage) { return storage == Storage::f32 ? 4 : storage == Storage::int8 ? 1 : 2; }

// One of the two, of a chunk. Group g holds the positions from begin + 16 g on.
struct Groups {
  const void *at[chunk_groups];
  const float *scales[chunk_groups];  // of int8
  int64_t run_end[chunk_groups];      // in keys of the chunk: so far the memory goes on without a gap
  Storage storage;                    // of what the pointers point to
  bool has_scales;
};

// A unit is streamed if it waits for the memory: each tile's loops ask for a share of what will be needed later, and numbers of fewer bits
// are widened in registers, for each tile anew. Others find keys and values in a cache, where the block of queries before left them, or
// widen them once for many rows, into the scratch memory; they ask for the next chunk before each tile. One number at a time, or with a
// handful of keys, there is nothing to gain.
constexpr int64_t most_widened_rows = 16, least_streamed_keys = chunk_keys / 2;

MHA_INLINE bool has_floats(const Attention &call) { return call.k.storage == Storage::f32 && call.v.storage == Storage::f32; }

template <class V>
MHA_INLINE bool is_streamed(const Unit &unit) {
  const Attention &call = unit.call;
  if (V::size == 1 || !call.k.is_packed || !call.v.is_packed) return false;
  if (!has_floats(call)) return unit.num_rows <= most_widened_rows;
  return unit.sequence.n_kv >= least_streamed_keys && call.n_q <= call.block_queries;
}

// Rows of a streamed unit's tiles.
MHA_INLINE int64_t streamed_tile_rows(const Unit &unit) { return has_floats(unit.call) && unit.num_rows > 8 ? 6 : 4; }

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

// ---- What a streamed unit asks the memory for

// Lines that a loop asks for: at step n those at n * step_bytes.
template <int lines>
struct Ahead {
  const char *line[lines];
  int64_t step_bytes;
  MHA_INLINE void step(int64_t n) const { MHA_UNROLL for (int i = 0; i < lines; ++i) __builtin_prefetch(line[i] + n * step_bytes, 0, 2); }
};

// The keys, or the values, of the chunk that comes next. Each tile asks for a share of them, as large as its share of the unit's rows, line
// by line as it goes: so the memory is busy all the time.
struct Stream {
  const char *at[chunk_groups];  // its groups; any address where there is none
  int64_t even_groups;           // so many of them, from the first on, lie one after the other
  int64_t num_rows;              // of the unit
  int64_t row_bytes;             // a row's share of a group

  // For a tile's loop over head_dim with the keys of B blocks.
  template <int R, int B, class Element>
  MHA_INLINE auto of_keys(int64_t row, int64_t block) const {
    constexpr int key_bytes = key_block * static_cast<int>(sizeof(Element)), lines = lines_for<R>(B * key_bytes);
    const uint32_t rows = static_cast<uint32_t>(num_rows), share = rows < R ? rows : R;
    Ahead<lines> ahead;
    ahead.step_bytes = smaller(64, (B * key_bytes / lines * share + rows - 1) / rows);
    uint32_t part = static_cast<uint32_t>(row * chunk_groups) + static_cast<uint32_t>(block) * share;  // of which a group has `rows`
    int64_t group = part / rows;
    part -= static_cast<uint32_t>(group) * rows;
    MHA_UNROLL for (int i = 0; i < lines; ++i) {
      ahead.line[i] = at[smaller(chunk_groups - 1, group)] + part * row_bytes;
      for (part += B / lines * share; part >= rows; part -= rows) ++group;
    }
    return ahead;
  }

  // The share of a tile in each group of values, of which it reads so many columns at a time.
  struct OfGroup {
    int64_t first, line_bytes, step_bytes;
  };

  template <int R, int columns, class Element>
  MHA_INLINE OfGroup of_values(int64_t row, int64_t column) const {
    constexpr int bytes = columns * static_cast<int>(sizeof(Element)), lines = lines_for<R>(bytes);
    const uint32_t rows = static_cast<uint32_t>(num_rows), share = rows < R ? rows : R;
    const int64_t step_bytes = (bytes / lines * share + rows - 1) / rows;
    return {row * row_bytes + column / columns * lines * key_block * step_bytes, key_block * step_bytes, smaller(64, step_bytes)};
  }

  // How far a loop over the values of groups from `group` on may go, since what it asks for lies one after the other.
  MHA_INLINE int64_t run_end(int64_t group) const { return group < even_groups ? even_groups : group + 1; }

  // For that loop, over so many groups.
  template <int R, int columns, class Element>
  MHA_INLINE auto of_run(const OfGroup &share, int64_t group, int64_t groups) const {
    Ahead<lines_for<R>(columns * static_cast<int>(sizeof(Element)))> ahead;
    ahead.step_bytes = share.step_bytes;
    const char *line = at[group] + groups * share.first;
    for (const char *&each : ahead.line) {
      each = line;
      line += groups * share.line_bytes;
    }
    return ahead;
  }

 private:
  // Tiles of more than 4 rows are not alone: they do not have to ask for as much as they read.
  template <int R>
  static constexpr int lines_for(int bytes) {
    return static_cast<int>(greater(1, R > 4 ? smaller(2, bytes / 64) : bytes / 64));
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
template <int R, class Element>
constexpr bool asks_nearby = R == 1 && sizeof(Element) > 1;

struct Chunk {
  int64_t begin;  // position of its first key
  Groups keys, values;
  Stream key_stream, value_stream;  // of a streamed unit

  // For a loop over head_dim with B blocks of keys of a streamed unit; the last of all blocks ends with `end`.
  template <int R, int B, class Element>
  MHA_INLINE auto ahead_of_keys(int64_t row, int64_t block, int64_t end, int64_t head_dim) const {
    if constexpr (asks_nearby<R, Element>) {
      const int64_t distance = greater(B, groups_nearby<Element>(head_dim));
      Ahead<B> ahead;
      ahead.step_bytes = key_block * static_cast<int64_t>(sizeof(Element));
      MHA_UNROLL for (int i = 0; i < B; ++i) ahead.line[i] = later_group(keys, key_stream, block + distance + i, end);
      return ahead;
    } else {
      return key_stream.template of_keys<R, B, Element>(row, block);
    }
  }

  // For a loop over values of one group, from number j on, that have so many columns.
  template <class Element, int columns>
  MHA_INLINE auto ahead_of_values(int64_t j, int64_t end) const {
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
    return group < end ? static_cast<const char *>(groups.at[group]) : next.at[smaller(chunk_groups - 1, group - end)];
  }
};

// The chunk that comes next, which is to be on its way from the memory while another is computed.
struct NextChunk {
  const Unit &unit;
  Range keys;         // positions
  Range group_range;  // groups of the chunk
  Groups key_groups, value_groups;

  MHA_INLINE NextChunk(const Unit &of, Range range) : unit(of), keys(range), group_range{0, 0} {
    if (keys.begin >= keys.end) return;
    const int64_t begin = keys.begin / chunk_keys * chunk_keys;
    group_range = {block_of(keys.begin - begin), block_of(keys.end - begin + key_block - 1)};
    if (unit.call.k.is_packed) locate(unit.call.k, unit, begin, group_range.begin, group_range.end, &key_groups);
    if (unit.call.v.is_packed) locate(unit.call.v, unit, begin, group_range.begin, group_range.end, &value_groups);
  }

  // Asks for the share of rows [row, end) of `rows`. (Inlined by force: g++ 12 takes a function that only prefetches for one without
  // effect, and leaves out its calls.)
  MHA_INLINE void prefetch(int64_t row, int64_t end, int64_t rows) const {
    const int64_t count = keys.end - keys.begin;
    if (count <= 0) return;
    const int64_t from = keys.begin + count * row / rows, to = keys.begin + count * end / rows;
    prefetch_rows(unit.call.k, key_groups, unit.call.head_dim, from, to);
    prefetch_rows(unit.call.v, value_groups, unit.call.head_dim_v_padded, from, to);
  }

  // What the tiles of `reader` ask for while they compute with `chunk`.
  MHA_INLINE void stream(const Unit &reader, Chunk *chunk) const {
    fill(reader, key_groups, reader.call.head_dim, &chunk->key_stream);
    fill(reader, value_groups, reader.call.head_dim_v_padded, &chunk->value_stream);
  }

 private:
  MHA_INLINE void prefetch_rows(const KeyValues &source, const Groups &groups, int64_t width, int64_t from, int64_t to) const {
    const int64_t element = bytes_of(source.storage);
    const char *const plain =
        static_cast<const char *>(source.base) +
        (unit.sequence_index * source.batch_stride + unit.kv_head * source.head_stride + unit.sequence.kv_first * source.row_stride) *
            element;
    for (int64_t j = from; j < to; ++j) {
      const int64_t in_chunk = j % chunk_keys;
      const char *const row = source.is_packed
                                  ? static_cast<const char *>(groups.at[block_of(in_chunk)]) + place_in_block(in_chunk) * width * element
                                  : plain + j * source.row_stride * element;
      for (int64_t k = 0; k < width * element; k += 64) __builtin_prefetch(row + k, 0, 2);
    }
  }

  MHA_INLINE void fill(const Unit &reader, const Groups &groups, int64_t width, Stream *stream) const {
    const bool is_empty = keys.begin >= keys.end;
    for (int64_t g = 0; g < chunk_groups; ++g) {
      const bool is_there = g >= group_range.begin && g < group_range.end;
      stream->at[g] = is_there ? static_cast<const char *>(groups.at[g]) : reinterpret_cast<const char *>(stream);
    }
    const bool are_even = !is_empty && group_range.begin == 0 && groups.run_end[0] >= group_range.end * key_block;
    stream->even_groups = is_empty ? chunk_groups : are_even ? group_range.end : 0;
    stream->num_rows = reader.num_rows;
    stream->row_bytes = is_empty ? 0 : key_block * width * bytes_of(groups.storage) / reader.num_rows;
  }
};

}  // namespace
}  // namespace mha
