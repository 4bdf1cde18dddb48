// Attention, unit by unit: attend computes the rows of one unit over one part of its keys.
//
// attend_chunks passes the keys chunk by chunk, 256 at a time, and for each chunk the rows of the
// unit tile by tile. attend_tile (attend_tile.h) computes the partial (m, l, o) of the rows over
// the chunk, and merge_chunks (partials.h) merges it with the partials before it as CONTRACT.md,
// section 9, says: slot i of the partials holds a subtree of chunks, like a digit of a binary
// counter. After the last chunk, finish (partials.h) makes rows of the context out of the merged
// partials.
//
// Queries are copied to scratch memory when the first chunk needs them, prepared and scaled. Keys
// and values are found, or brought into the form of the loops, by read_chunk (key_values.h). A unit
// of one row may take two or four chunks at a time, each with a slot of its own, so that its keys
// are read in several streams side by side.
#pragma once

#include "attend_tile.h"
#include "partials.h"
#include "unit.h"

namespace mha {
namespace {

// ---- Queries

// Copies a query that is not taken as it is to `to`, widened and prepared.
template <class V>
MHA_NOINLINE const float *prepared_query(const Unit &unit, const Row &row, float *to) {
  const RowId id = {unit.sequence_index, unit.array_row(row), unit.position_of(row), row.head,
                    unit.call.run.q_statistics};
  return prepared_row<V>(unit.call.request.prepare_q, unit.call.arrays.q.storage, unit.input(row),
                         id, unit.call.request.head_dim, to);
}

// Turns a row into codes of 16 bits in place, with their scale behind the last pair (CONTRACT.md,
// section 7).
template <class V>
MHA_NOINLINE void encode_query(int64_t head_dim, float *row) {
  const CodeScale scale = word_scale_of(row, head_dim);
  encode_words<V>(row, head_dim, scale.factor, row);
  row[pairs_of(head_dim)] = scale.scale;
}

// Copies the queries of rows [begin, end) to scratch memory, prepared and scaled, and transformed
// as the keys are.
template <class V>
MHA_NOINLINE void copy_queries(const Unit &unit, int64_t begin, int64_t end) {
  const Attention &call = unit.call;
  const int64_t head_dim = call.request.head_dim, whole = head_dim - head_dim % V::size,
                block = call.arrays.k.hadamard;
  const bool needs_preparation =
      call.request.prepare_q.is_any || call.arrays.q.storage != Storage::f32;
  const float *const scales = call.request.options.q_scales;
  for (Row row = unit.row(begin); row.index < end; unit.advance(&row)) {
    float *const to = unit.q(row.index);
    const float *const from = needs_preparation ? prepared_query<V>(unit, row, to)
                                                : static_cast<const float *>(unit.input(row));
    const float scale = scales ? scales[unit.sequence_index * call.request.options.q_scales_stride +
                                        unit.array_row(row)]
                               : 1.0f;
    const V factor = all<V>(scale);
    for (int64_t k = 0; k < whole; k += V::size)
      store(to + k, canonical_nan(load<V>(from + k) * factor));
    for (int64_t k = whole; k < head_dim; ++k) to[k] = canonical_nan(from[k] * scale);
    if (block > 1) hadamard<V>(block, head_dim, 1.0f / static_cast<float>(block), to, to);
    if (call.run.codes) encode_query<V>(head_dim, to);
  }
}

// ---- One unit

// The chunks that hold some of these keys.
MHA_INLINE Range chunks_of(Range keys) {
  return {keys.begin / chunk_keys, keys.end > keys.begin ? (keys.end + chunk_keys - 1) / chunk_keys
                                                         : keys.begin / chunk_keys};
}

MHA_INLINE Range intersection(Range a, Range b) {
  const int64_t begin = max(a.begin, b.begin);
  return {begin, max(begin, min(a.end, b.end))};
}

// The keys that positions leave to some of the rows [begin, end).
MHA_INLINE Range keys_of_rows(const Unit &unit, int64_t begin, int64_t end) {
  return {unit.keys_of(unit.row(begin)).begin, unit.keys_of(unit.row(end - 1)).end};
}

// The unit that probably comes next: that of the next kv head, or of the next sequence. It only
// serves to prefetch, and may have no rows.
MHA_NOINLINE inline Unit unit_after(const Unit &unit) {
  const Attention &call = unit.call;
  const Sequence *sequence = &unit.sequence;
  int64_t kv_head = unit.kv_head + 1, queries = unit.queries;
  if (kv_head == call.request.num_kv_heads) {
    const bool is_last = sequence + 1 == call.run.sequences + call.request.batch;
    if (!is_last) ++sequence;
    kv_head = 0;
    queries = is_last ? 0 : max(0, min(sequence->n_q - unit.query_begin, call.run.block_queries));
  }
  return unit_of(call, *sequence, kv_head, unit.query_begin, queries, unit.heads_per_kv,
                 unit.scratch);
}

// Writes the outputs of heads whose scale is 0: the same numbers as rows of padding get.
MHA_NOINLINE inline void clear_heads(const Unit &unit) {
  unit.for_each_left_out([&](const Row &row) {
    const size_t width = static_cast<size_t>(unit.call.request.head_dim_v);
    MHA_MEMSET(unit.output(row), 0,
               width * static_cast<size_t>(bytes_of(unit.call.arrays.output.storage)));
    if (float *const tap = unit.context_tap(row)) MHA_MEMSET(tap, 0, width * sizeof(float));
    if (unit.call.request.lse) unit.call.request.lse[unit.output_row(row)] = -infinity;
  });
}

// The keys of the first chunk of a unit.
MHA_INLINE Range first_keys(const Unit &unit) {
  if (unit.num_rows == 0 || unit.call.run.parts.count > 1) return {0, 0};
  const Range keys = keys_of_rows(unit, 0, unit.num_rows);
  return intersection(keys, {keys.begin, keys.begin / chunk_keys * chunk_keys + chunk_keys});
}

// The rows of every tile but the last. Units that are streamed have tiles of at most 4 for numbers
// of fewer bits, whose loops are made for that, and for 7 or 8 rows, which are two equal tiles, but
// not with AVX2.
template <class V>
MHA_INLINE int64_t rows_of_tiles(const Unit &unit, bool is_streamed) {
  constexpr int64_t most = TileShape<V::size>::attend_rows;
  const bool are_two = V::size != 8 && unit.num_rows > most && unit.num_rows <= 8;
  return is_streamed && (!stores_floats(unit.call) || are_two) ? min(4, most) : most;
}

// Whether masks and biases leave the first and the last key of each of `count` chunks to the only
// row of a unit. Then the chunks can be computed in step, since none of them is shorter.
MHA_NOINLINE inline bool keep_ends(const Unit &unit, Range keys, int64_t c, int64_t count) {
  for (int64_t begin = c * chunk_keys; begin < (c + count) * chunk_keys; begin += chunk_keys) {
    const Range range = intersection(keys, {begin, begin + chunk_keys}),
                needed = {range.begin - begin, range.end - begin};
    const Range left = keys_left(unit, 0, 1, begin, needed);
    if (left.begin != needed.begin || left.end != needed.end) return false;
  }
  return true;
}

// How many of the chunks from c on are computed in step: one, or two or four that are a subtree.
// keys: those of all chunks.
MHA_INLINE int64_t chunks_at_once(const Unit &unit, bool is_streamed, Range keys, int64_t c,
                                  int64_t end) {
  if (!is_streamed || unit.num_rows > 1 || !unit.call.arrays.k.is_packed) return 1;
  int64_t count = max_interleaved_chunks;
  while (count > 1 && (c % count != 0 || end - c < count)) count /= 2;
  return count > 1 && unit.call.request.options.limits_pairs && !keep_ends(unit, keys, c, count)
             ? 1
             : count;
}

// Computes the partials of all rows over the keys of `chunks`, merged, in slot 0. all_keys: those
// of all chunks. A tile of rows leaves out chunks in which it has no keys.
template <class V>
inline void attend_chunks(const Unit &unit, Range all_keys, Range chunks) {
  const ScoreOptions &options = unit.call.request.options;
  // Windows never give later rows earlier keys, but segments may: with them no row is done before
  // the last chunk.
  const auto keys_of_tile = [&](int64_t row, int64_t end) {
    return end - row == unit.num_rows || options.segments.of_rows ? all_keys
                                                                  : keys_of_rows(unit, row, end);
  };
  // What the whole unit has in common: whether it waits for memory, how its rows are cut into
  // tiles, and which unit to prefetch at the end.
  const int64_t first = chunks.begin;
  const bool streams = is_streamed<V>(unit),
             prefetches = streams && (unit.num_rows > 1 || !stores_floats(unit.call));
  const int64_t tile_rows = unit.rows_per_kv != 0 ? unit.num_rows : rows_of_tiles<V>(unit, streams),
                tiles = (unit.num_rows + tile_rows - 1) / tile_rows;
  const Unit next_unit = prefetches ? unit_after(unit) : unit;
  const Range keys_of_next = prefetches ? first_keys(next_unit) : Range{0, 0};
  for (int64_t c = chunks.begin, count; c < chunks.end; c += count) {
    // One chunk, or several in step, and what is read after it.
    count = chunks_at_once(unit, streams, all_keys, c, chunks.end);
    Chunk here[max_interleaved_chunks];
    bool is_read = false;
    const int64_t begin = c * chunk_keys, next = begin + count * chunk_keys,
                  slot = slots_before(c, first);
    NextChunk upcoming;
    if (prefetches) {
      const bool is_last = c + count == chunks.end;
      upcoming.find(is_last ? next_unit : unit,
                    is_last ? keys_of_next : intersection(all_keys, {next, next + chunk_keys}));
    }
    // Each tile of rows computes its partials. The first tile that has keys here reads the chunk.
    int64_t first_row = unit.num_rows;
    for (int64_t row = 0, end, tile = 0; row < unit.num_rows; row = end, ++tile) {
      end = min(unit.num_rows, row + tile_rows);
      if (c == first) copy_queries<V>(unit, row, end);
      const Range keys = keys_of_tile(row, end);
      // These rows have no more keys; later rows may.
      if (keys.end <= begin && c > first) continue;
      first_row = min(first_row, row);
      Range needed = {max(0, keys.begin - begin), min(next, keys.end) - begin};
      const bool may_be_less = options.limits_pairs && !unit.blocks && count == 1;
      if (may_be_less && needed.begin < needed.end)
        needed = keys_left(unit, row, end, begin, needed);
      if (needed.begin >= needed.end) {  // never so for chunks in step
        clear_partials(unit, slot, row, end);
        continue;
      }
      // Few rows over the caller's arrays take all kv heads of the unit position by position, chunk
      // after chunk.
      if (unit.rows_per_kv != 0) {
        attend_rows<V>(unit, begin, needed, slot);
        continue;
      }
      for (int64_t i = 0; i < count && !is_read; ++i) {
        const int64_t chunk_begin = begin + i * chunk_keys;
        const Range range = intersection(all_keys, {chunk_begin, chunk_begin + chunk_keys});
        read_chunk<V>(unit, chunk_begin, {range.begin - chunk_begin, range.end - chunk_begin},
                      streams, &here[i]);
      }
      is_read = true;
      PrefetchSource of_keys = no_prefetch_source, of_values = no_prefetch_source;
      if (prefetches) upcoming.share(here[0], tile, tiles, &of_keys, &of_values);
      attend_tile<V>(unit, here, count, needed, {row, end - row}, slot, of_keys, of_values);
    }
    merge_chunks<V>(unit, c, count, first, first_row);
  }

  // Rows whose keys ended earlier have fewer subtrees to merge.
  for (int64_t row = 0, end; row < unit.num_rows; row = end) {
    end = min(unit.num_rows, row + tile_rows);
    const Range own = intersection(chunks_of(keys_of_tile(row, end)), chunks);
    if (chunks.begin < chunks.end) {
      merge_rest<V>(unit, max(own.end, first + 1) - 1, first, row, end);
    } else {
      copy_queries<V>(unit, row, end);
      clear_partials(unit, 0, row, end);
    }
  }
}

// Merges the parts of a unit whose keys are split between threads, by the same tree, over parts in
// place of chunks. `having` are the parts that have keys. Of two subtrees that become one, the
// first to be finished leaves its partials in memory, and the thread of the second merges them and
// goes on. Returns whether that was the whole tree; its partials are in slot 0 then.
template <class V>
inline bool merge_parts(const Unit &unit, int64_t index, Range having, int64_t part) {
  const KeyParts &parts = unit.call.run.parts;
  const int64_t stride = unit.call.plan.split_partial_stride;
  const size_t bytes = static_cast<size_t>(unit.l(0, unit.num_rows) - unit.o(0, 0)) * sizeof(float);
  int64_t *const waiting = parts.waiting + index * parts.count;
  float *const partials = parts.partials + index * parts.count * stride, *own = unit.o(0, 0);
  for (int64_t size = 1, first = part; first > having.begin || first + size < having.end;
       size *= 2, first = part / size * size) {
    const bool is_left = part / size % 2 == 0;
    const int64_t other = is_left ? first + size : first - size;
    if (other >= having.end || other + size <= having.begin) continue;  // no keys
    // How many of the two are finished is counted at the first part of the right one.
    int64_t *const waits = &waiting[max(first, other)];
    float *const place = partials + first * stride;
    if (atomic_fetch_add(waits, 0) == 0) {
      if (own != place) MHA_MEMCPY(place, own, bytes);
      own = place;
      if (atomic_fetch_add(waits, 1) == 0) return false;
    }
    float *const neighbour = partials + other * stride;
    float *const left = is_left ? own : neighbour;
    merge<V>(unit, left, is_left ? neighbour : own, 0, unit.num_rows);
    own = left;
  }
  if (own != unit.o(0, 0)) MHA_MEMCPY(unit.o(0, 0), own, bytes);
  return true;
}

// The kernels' `attend`: one unit over one part of its keys, and the finished rows if that was the
// last part.
template <class V>
void attend(const Attention &call, int64_t sequence_index, int64_t group, int64_t block,
            int64_t part, float *scratch) {
  Unit unit = unit_of(call, sequence_index, group * call.run.unit_kv_heads, block, scratch);
  if (unit.computed_heads != unit.heads_per_kv && part == 0) clear_heads(unit);
  if (unit.num_rows == 0) return;
  if (call.plan.reads_rows && unit.num_rows <= max_few_rows) take_rows(&unit);
  if (call.request.options.chosen.lists.base) rank_keys(&unit);
  Range keys = keys_of_rows(unit, 0, unit.num_rows);
  if (call.request.options.segments.of_rows)
    keys = keys_of_segments(unit, 0, unit.num_rows, 0, keys);
  const Range chunks = chunks_of(keys);
  // If the keys are not split, the unit is done after its chunks. Otherwise the part that finishes
  // last continues.
  if (call.run.parts.count == 1) {
    attend_chunks<V>(unit, keys, chunks);
  } else {
    const int64_t size = call.run.parts.chunks, kv_heads = call.run.unit_kv_heads,
                  groups = (call.request.num_kv_heads + kv_heads - 1) / kv_heads;
    const bool has_keys = chunks.begin < chunks.end;
    const Range having = {has_keys ? chunks.begin / size : 0,
                          has_keys ? (chunks.end + size - 1) / size : 1};
    if (part < having.begin || part >= having.end) return;
    attend_chunks<V>(unit, keys, intersection(chunks, {part * size, (part + 1) * size}));
    if (!merge_parts<V>(unit, (sequence_index * groups + group) * call.run.query_blocks + block,
                        having, part))
      return;
  }
  if (call.request.partials) return hand_out_partials<V>(unit);
  finish<V>(unit);
}

}  // namespace
}  // namespace mha
