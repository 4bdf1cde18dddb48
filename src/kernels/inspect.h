// Outputs with a number for each pair of query and key: a second pass over the keys for callers
// that ask for scores or weights, when m and l of all rows are known.
//
// A unit is a block of queries of one kv head, with all of its keys. Its scores are computed once
// more, chunk by chunk and row by row, and pass through the steps of CONTRACT.md, section 7, with
// an output after each step.
#pragma once

#include "attend.h"

namespace mha {
namespace {

// Writes s to an output from number `at` on, if the output is asked for.
MHA_NOINLINE inline void write_pairs(float *output, int64_t at, const float *s, int64_t count) {
  for (int64_t j = 0; output && j < count; ++j) output[at + j] = canonical(s[j]);
}

// Takes the products of one row with `count` keys from `begin` on through all steps.
template <class V>
inline void inspect_row(const Unit &unit, const Row &row, int64_t begin, int64_t count, float *s) {
  const Attention &call = unit.call;
  const PairOutputs &pairs = call.request.pairs;
  const int64_t column = unit.sequence.column + begin,
                at = unit.output_row(row) * call.run.pair_columns + column;
  const Range range = unit.keys_of(row);
  write_pairs(pairs.scores, at, s, count);
  for (int64_t j = 0; j < count; j += V::size)
    store(s + j, canonical(load<V>(s + j) * all<V>(call.request.scale)));
  write_pairs(pairs.scaled_scores, at, s, count);
  if (call.request.options.softcap != 0.0f)
    cap_scores<V>(call.request.options, tiles_of({0, count}), 1.0f, s);
  write_pairs(pairs.softcapped_scores, at, s, count);
  const Range keys = {min(count, max(0, range.begin - begin)),
                      min(count, max(0, range.end - begin))};
  bias_scores<V>(unit, row, begin, keys, s);
  mask_scores<V>(unit, row, begin, keys, s);
  for (int64_t j = 0; j < count; ++j)
    s[j] = j < keys.begin || j >= keys.end ? -infinity : canonical(s[j]);
  write_pairs(pairs.masked_scores, at, s, count);
  // The weights: exp(score - m) / l, with m and l of the finished row.
  const float m = call.run.row_maxima[unit.output_row(row)],
              inverse = 1.0f / call.run.row_sums[unit.output_row(row)];
  for (int64_t j = 0; j < count; j += V::size) {
    const V x = load<V>(s + j);
    store(s + j,
          zero_if_equal(x, all<V>(-infinity), canonical(exp_of(x - all<V>(m)) * all<V>(inverse))));
  }
  write_pairs(pairs.weights, at, s, count);
}

// Clears the columns [begin, end), which are no keys of the sequence.
MHA_NOINLINE inline void clear_inspected(const Unit &unit, const Row &row, int64_t begin,
                                         int64_t end) {
  const PairOutputs &pairs = unit.call.request.pairs;
  const int64_t at = unit.output_row(row) * unit.call.run.pair_columns;
  float *const zero[] = {pairs.scores, pairs.scaled_scores, pairs.softcapped_scores, pairs.weights};
  for (int64_t j = begin; j < end; ++j) {
    for (float *const output : zero) {
      if (output) output[at + j] = 0.0f;
    }
    if (pairs.masked_scores) pairs.masked_scores[at + j] = -infinity;
  }
}

// The kernels' `inspect`.
template <class V>
void inspect(const Attention &call, int64_t sequence_index, int64_t kv_head, int64_t block,
             float *scratch) {
  const Unit unit = unit_of(call, sequence_index, kv_head, block, scratch);
  if (unit.computed_heads != unit.heads_per_kv)
    unit.for_each_left_out(
        [&](const Row &row) { clear_inspected(unit, row, 0, call.run.pair_columns); });
  if (unit.num_rows == 0) return;
  float *const scores = unit.scratch + call.plan.scratch.scores;
  copy_queries<V>(unit, 0, unit.num_rows);
  // All keys of the sequence, also those that no row of the unit attends to.
  for (int64_t begin = 0; begin < unit.sequence.n_kv; begin += chunk_keys) {
    const int64_t count = min(chunk_keys, unit.sequence.n_kv - begin);
    Chunk chunk;
    chunk.begin = begin;
    chunk.needed = {0, count};
    read_tiles<V>(unit, true, begin, chunk.needed, false, &chunk.keys);
    const KeyTiles &keys = chunk.keys;
    for (Row row = unit.row(0); row.index < unit.num_rows; unit.advance(&row)) {
      const Range tiles = tiles_of({0, count});
      multiply_row<V>(unit, chunk, tiles, row.index, scores);
      for (int64_t j = 0; keys.has_scales && j < tiles.end * tile_keys; j += V::size) {
        store(scores + j, load<V>(scores + j) * load<V>(keys.scales[key_tile_of(j)] + lane_of(j)));
      }
      inspect_row<V>(unit, row, begin, count, scores);
    }
  }
  // Columns before and after the keys of the sequence.
  const int64_t column = unit.sequence.column;
  for (Row row = unit.row(0); row.index < unit.num_rows; unit.advance(&row)) {
    clear_inspected(unit, row, 0, column);
    clear_inspected(unit, row, column + unit.sequence.n_kv, call.run.pair_columns);
  }
}

}  // namespace
}  // namespace mha
