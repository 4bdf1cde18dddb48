// Attention: scores -> scale -> mask -> max, exp, sum -> context, chunk of keys by chunk of keys, and the states of the chunks merged.
//
// A unit of work is a block of queries of all the query heads that share one kv head. Its rows are cut into tiles of a few rows; for each
// chunk of keys, each tile computes the chunk's state (m, l, o), which then is merged with the states before it as CONTRACT.md section 9
// says: slot i of the states holds a subtree, like the digits of a binary counter. Some units of one or two rows take two or four chunks at
// a time.
#pragma once

#include "kernels/attend_in_step.h"
#include "kernels/attend_tile.h"
#include "kernels/inspect.h"
#include "kernels/states.h"

namespace mha {
namespace {

// ---- Queries

// Rows [begin, end) of the queries, rotated, into the unit's scratch memory.
template <class V>
MHA_APART void copy_queries(const Unit &unit, int64_t begin, int64_t end) {
  const int64_t head_dim = unit.call.head_dim;
  for (Row row = unit.row(begin); row.index < end; unit.advance(&row)) {
    const float *from = unit.input(row);
    float *const to = unit.q(row.index);
    if (unit.call.rotate_q.cos) {
      for (int64_t k = 0; k < head_dim; ++k) to[k] = from[k];
      rotate<V>(unit.call.rotate_q, unit.sequence_index, unit.array_row(row), unit.position_of(row), to);
      from = to;
    }
    int64_t k = 0;
    for (; k + static_cast<int64_t>(V::size) <= head_dim; k += V::size) store(to + k, quiet(load<V>(from + k)));
    for (; k < head_dim; ++k) to[k] = quiet(from[k]);
  }
}

// Rows lie far apart, which hides them from the processor's own prefetching: they are asked for while those before them are computed.
// (Inlined by force: g++ 12 takes a function that only prefetches for one without effect, and leaves out its calls.)
MHA_INLINE void prefetch_queries(const Unit &unit, int64_t begin, int64_t end) {
  for (Row row = unit.row(begin); row.index < end; unit.advance(&row)) {
    const float *const from = unit.input(row);
    for (int64_t k = 0; k < unit.call.head_dim; k += 16) __builtin_prefetch(from + k);
  }
}

// ---- One unit

MHA_INLINE Range chunks_of(Range keys) {
  return {keys.begin / chunk_keys, keys.end > keys.begin ? (keys.end + chunk_keys - 1) / chunk_keys : keys.begin / chunk_keys};
}

MHA_INLINE Range intersection(Range a, Range b) {
  const int64_t begin = greater(a.begin, b.begin);
  return {begin, greater(begin, smaller(a.end, b.end))};
}

// The keys that some of the rows [begin, end) attend to.
MHA_INLINE Range keys_of_rows(const Unit &unit, int64_t begin, int64_t end) {
  return {unit.keys_of(unit.row(begin)).begin, unit.keys_of(unit.row(end - 1)).end};
}

// The unit of the next kv head, or of the next sequence: it may have no rows.
MHA_INLINE Unit unit_after(const Unit &unit) {
  const Attention &call = unit.call;
  if (unit.kv_head + 1 < call.num_kv_heads) {
    return {call, unit.sequence, unit.sequence_index, unit.kv_head + 1, unit.query_begin, unit.group, unit.num_rows, unit.scratch};
  }
  const int64_t next = smaller(unit.sequence_index + 1, call.batch - 1), queries = call.sequences[next].n_q - unit.query_begin;
  const int64_t rows = next == unit.sequence_index ? 0 : greater(0, smaller(queries, call.block_queries)) * unit.group;
  return {call, call.sequences[next], next, 0, unit.query_begin, unit.group, rows, unit.scratch};
}

// The keys of its first chunk.
MHA_INLINE Range first_keys(const Unit &unit) {
  if (unit.num_rows == 0 || unit.call.parts.count > 1) return {0, 0};
  const Range keys = keys_of_rows(unit, 0, unit.num_rows);
  return intersection(keys, {keys.begin, keys.begin / chunk_keys * chunk_keys + chunk_keys});
}

template <class V>
MHA_INLINE int64_t rows_of_tile(const Unit &unit) {
  return is_streamed<V>(unit) ? streamed_tile_rows<V>(unit) : TileShape<V::size>::attend_rows;
}

// Where the tile ends that begins at `row`.
template <class V>
MHA_INLINE int64_t tile_end(const Unit &unit, int64_t row) {
  return smaller(unit.num_rows, row + rows_of_tile<V>(unit));
}

// Whether a unit of one tile asks for the values of a chunk while it reads the chunk's keys, and for the next chunk's keys while it reads
// the values: each comes shortly before it is needed. Rows of both have to be equally long, for a loop asks for as much as it reads.
// (Measured on Zen 3 with 4 rows beside asking for keys with keys and values with values: from the memory, float 0.82 to 0.96 of the time,
// least with large heads, and 16-bit numbers 0.93 to 1. With int8, with 2 rows, and where several tiles read a chunk one after the other,
// it takes longer.)
template <class V>
MHA_INLINE bool asks_crosswise(const Unit &unit) {
  const KeyValues &k = unit.call.k, &v = unit.call.v;
  const bool is_one_tile = unit.num_rows > 2 && unit.num_rows <= streamed_tile_rows<V>(unit);
  return reads_streams<V> && is_streamed<V>(unit) && is_one_tile && k.storage == v.storage && k.storage != Storage::int8 &&
         k.row_stride == v.row_stride;
}

// What the unit's tiles ask for while they compute with the chunk, of which they need so many keys. Tiles of 4 and of 6 rows take as many
// keys and columns at a time, and the softmax twice for some of their rows.
template <class V>
MHA_INLINE void share_asking(const Unit &unit, const NextChunk &next, Range needed, Chunk *chunk) {
  using Shape = TileShape<V::size>;
  constexpr int64_t keys_at_once = Shape::score_blocks(Shape::attend_rows) * key_block;
  constexpr int64_t columns_at_once = Shape::context_vectors(Shape::attend_rows) * static_cast<int>(V::size);
  const int64_t keys = needed.end - needed.begin, tile_rows = rows_of_tile<V>(unit), tiles = (unit.num_rows + tile_rows - 1) / tile_rows;
  const int64_t key_steps = (keys + keys_at_once - 1) / keys_at_once * unit.call.head_dim;
  const int64_t value_steps = (unit.call.head_dim_v_padded + columns_at_once - 1) / columns_at_once * keys;
  const int64_t later_steps = value_steps + softmax_steps * 2 * keys / key_block;
  if (asks_crosswise<V>(unit)) {
    next.stream_crosswise({block_of(needed.begin), block_of(needed.end + key_block - 1)}, tiles, key_steps, later_steps, chunk);
  } else {
    next.stream(tiles, key_steps, later_steps, chunk);
  }
}

// The states of all rows over the keys of `chunks`, in slot 0. all_keys: those of all chunks.
template <class V>
inline void attend_chunks(const Unit &unit, Range all_keys, Range chunks) {
  constexpr int tile_rows = TileShape<V::size>::attend_rows;
  static_assert(tile_rows <= attend_tile_rows_max, "scratch has room for a tile");
  const auto keys_of_tile = [&](int64_t row, int64_t end) { return end - row == unit.num_rows ? all_keys : keys_of_rows(unit, row, end); };
  const int64_t first = chunks.begin;
  const bool streams = is_streamed<V>(unit);
  const Unit next_unit = streams ? unit_after(unit) : unit;
  const Range none = {0, 0}, keys_of_next = streams ? first_keys(next_unit) : none;
  const bool is_some_in_step = is_in_step<V>(unit, chunks);
  const Range in_step = is_some_in_step ? chunks_in_step(unit, chunks) : none;
  for (int64_t c = chunks.begin, count; c < chunks.end; c += count) {
    count = 1;
    const int64_t begin = c * chunk_keys, next = begin + chunk_keys;
    if constexpr (reads_in_step<V>) {
      if (c >= in_step.begin && c < in_step.end) {
        if (c == first) copy_queries<V>(unit, 0, unit.num_rows);
        count = count_in_step(in_step, c);
        attend_in_step<V>(unit, c, count, first);
        continue;
      }
    }
    const Range here = intersection(all_keys, {begin, next}), needed = {here.begin - begin, here.end - begin};
    Chunk chunk;
    chunk.begin = begin;
    read_keys<V>(unit, begin, needed, streams, &chunk.keys);
    read_values<V>(unit, begin, needed, streams, &chunk.values);
    const bool is_last = c + 1 == chunks.end;
    const Range keys_ahead = is_some_in_step ? none : is_last ? keys_of_next : intersection(all_keys, {next, next + chunk_keys});
    const NextChunk ahead(is_last ? next_unit : unit, keys_ahead);
    if (streams || !ahead.is_empty()) share_asking<V>(unit, ahead, needed, &chunk);
    const int64_t slot = slots_before(c, first);
    int64_t first_row = unit.num_rows;
    for (int64_t row = 0, end; row < unit.num_rows; row = end) {
      end = tile_end<V>(unit, row);
      if (c == first) {
        copy_queries<V>(unit, row, end);
        prefetch_queries(unit, end, smaller(end + tile_rows, unit.num_rows));
      }
      const Range keys = keys_of_tile(row, end);
      if (keys.end <= begin && c > first) continue;  // these rows are done: later ones have later keys
      first_row = smaller(first_row, row);
      if (keys.begin >= smaller(next, keys.end) || keys.end <= begin) {
        clear_states(unit, slot, row, end);
        continue;
      }
      if (streams) {
        attend_streamed_tile<V>(end - row, unit, chunk, row, slot);
      } else {
        attend_tile_of<V, tile_rows>(end - row, unit, chunk, row, slot);
      }
    }
    merge_chunk<V>(unit, c, first, first_row, unit.num_rows);
  }

  for (int64_t row = 0, end; row < unit.num_rows; row = end) {
    end = tile_end<V>(unit, row);
    const Range own = intersection(chunks_of(keys_of_tile(row, end)), chunks);
    if (chunks.begin < chunks.end) {
      merge_rest<V>(unit, greater(own.end, first + 1) - 1, first, row, end);
    } else {
      copy_queries<V>(unit, row, end);
      clear_states(unit, 0, row, end);
    }
  }
}

// The parts of a unit's keys come together in the last one that is done: the same tree, over parts instead of chunks.
template <class V>
inline bool join_parts(const Unit &unit, int64_t index, int64_t part) {
  const KeyParts &parts = unit.call.parts;
  const int64_t floats = unit.l(0, unit.num_rows) - unit.o(0, 0);
  float *const states = parts.states + index * parts.count * parts.state_stride;
  __builtin_memcpy(states + part * parts.state_stride, unit.o(0, 0), static_cast<size_t>(floats) * sizeof(float));
  if (__atomic_sub_fetch(&parts.unfinished[index], 1, __ATOMIC_ACQ_REL) != 0) return false;
  for (int64_t p = 0; p < parts.count; ++p) {
    __builtin_memcpy(unit.o(slots_before(p, 0), 0), states + p * parts.state_stride, static_cast<size_t>(floats) * sizeof(float));
    merge_chunk<V>(unit, p, 0, 0, unit.num_rows);
  }
  merge_rest<V>(unit, parts.count - 1, 0, 0, unit.num_rows);
  return true;
}

template <class V>
void attend(const Attention &call, int64_t sequence_index, int64_t kv_head, int64_t block, int64_t part, float *scratch) {
  const Sequence &sequence = call.sequences[sequence_index];
  const int64_t query_begin = block * call.block_queries, queries = smaller(call.block_queries, sequence.n_q - query_begin);
  if (queries <= 0) return;
  const int64_t group = call.num_heads == call.num_kv_heads ? 1 : call.num_heads / call.num_kv_heads;
  const Unit unit = {call, sequence, sequence_index, kv_head, query_begin, group, queries * group, scratch};
  const Range keys = keys_of_rows(unit, 0, unit.num_rows), chunks = chunks_of(keys);
  if (call.parts.count == 1) {
    attend_chunks<V>(unit, keys, chunks);
  } else {
    attend_chunks<V>(unit, keys, intersection(chunks, {part * call.parts.chunks, (part + 1) * call.parts.chunks}));
    const int64_t blocks = quotient(call.n_q + call.block_queries - 1, call.block_queries);
    if (!join_parts<V>(unit, (sequence_index * call.num_kv_heads + kv_head) * blocks + block, part)) return;
  }
  for (Row row = unit.row(0); row.index < unit.num_rows; unit.advance(&row)) finish<V>(unit, row);
  inspect<V>(unit);
}

}  // namespace
}  // namespace mha
