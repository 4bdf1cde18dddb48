// Looking inside: a second pass over the keys for those who asked, when m and l of the whole row are known.
#pragma once

#include "kernels/scores.h"

namespace mha {
namespace {

template <class V>
inline void inspect_row(const Unit &unit, const Row &row, int64_t begin, int64_t count, float *s) {
  const Attention &call = unit.call;
  const int64_t at = unit.output_row(row) * call.n_kv + unit.sequence.column + begin;
  const Range range = unit.keys_of(row);
  const float m = *unit.m(0, row.index), inverse = 1.0f / *unit.l(0, row.index);
  if (call.scores) {
    for (int64_t j = 0; j < count; ++j) call.scores[at + j] = canonical(s[j]);
  }
  for (int64_t j = 0; j < count; j += V::size) store(s + j, canonical(load<V>(s + j) * all<V>(call.scale)));
  if (call.scaled_scores) {
    for (int64_t j = 0; j < count; ++j) call.scaled_scores[at + j] = s[j];
  }
  if (call.options.softcap != 0.0f) cap_scores<V>(call.options, groups_of({0, count}), s);
  for (int64_t j = 0; call.softcapped_scores && j < count; ++j) call.softcapped_scores[at + j] = canonical(s[j]);
  const Range keys = {min(count, max(0, range.begin - begin)), min(count, max(0, range.end - begin))};
  bias_scores<V>(unit, row, begin, keys, s);
  mask_scores<V>(unit, row, begin, keys, s);
  for (int64_t j = 0; j < count; ++j) s[j] = j < keys.begin || j >= keys.end ? -infinity : canonical(s[j]);
  if (call.masked_scores) {
    for (int64_t j = 0; j < count; ++j) call.masked_scores[at + j] = s[j];
  }
  if (call.attention_weights) {
    for (int64_t j = 0; j < count; j += V::size) {
      const V x = load<V>(s + j);
      store(s + j, zero_if_equal(x, all<V>(-infinity), canonical(exp_of(x - all<V>(m)) * all<V>(inverse))));
    }
    for (int64_t j = 0; j < count; ++j) call.attention_weights[at + j] = s[j];
  }
}

// The columns [begin, end), which are no keys of the sequence.
inline void clear_inspected(const Unit &unit, const Row &row, int64_t begin, int64_t end) {
  const Attention &call = unit.call;
  const int64_t at = unit.output_row(row) * call.n_kv;
  for (int64_t j = begin; j < end; ++j) {
    if (call.scores) call.scores[at + j] = 0.0f;
    if (call.scaled_scores) call.scaled_scores[at + j] = 0.0f;
    if (call.softcapped_scores) call.softcapped_scores[at + j] = 0.0f;
    if (call.masked_scores) call.masked_scores[at + j] = -infinity;
    if (call.attention_weights) call.attention_weights[at + j] = 0.0f;
  }
}

template <class V>
inline void inspect(const Unit &unit) {
  const Attention &call = unit.call;
  if (!call.scores && !call.scaled_scores && !call.softcapped_scores && !call.masked_scores && !call.attention_weights) return;
  float *const scores = unit.scratch + call.scratch.scores;
  for (int64_t begin = 0; begin < unit.sequence.n_kv; begin += chunk_keys) {
    const int64_t count = min(chunk_keys, unit.sequence.n_kv - begin);
    Groups keys;
    read_keys<V>(unit, begin, {0, count}, false, &keys);
    for (Row row = unit.row(0); row.index < unit.num_rows; unit.advance(&row)) {
      const Range groups = groups_of({0, count});
      KeyBlocks blocks;
      blocks.add(keys, groups, scores);
      multiply_keys(blocks, keys, groups, loops_over_keys<V>(1, keys.storage, false), unit.q(row.index), 1, call.head_dim, false,
                    no_prefetch_source);
      for (int64_t j = 0; keys.has_scales && j < groups.end * key_block; j += V::size) {
        store(scores + j, load<V>(scores + j) * load<V>(keys.scales[block_of(j)] + place_in_block(j)));
      }
      inspect_row<V>(unit, row, begin, count, scores);
    }
  }
  const int64_t column = unit.sequence.column;
  for (Row row = unit.row(0); row.index < unit.num_rows; unit.advance(&row)) {
    clear_inspected(unit, row, 0, column);
    clear_inspected(unit, row, column + unit.sequence.n_kv, call.n_kv);
  }
}

}  // namespace
}  // namespace mha
