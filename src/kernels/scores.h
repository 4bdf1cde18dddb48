// Scores of a tile of queries with the keys of a chunk, and their softmax: products -> scale -> mask -> max -> exp -> sum.
//
// Scores lie in rows of score_stride floats, one for each query of the tile and chunk: that of key j of the chunk is number j.
#pragma once

#include "key_values.h"
#include "score_options.h"

namespace mha {
namespace {

// ---- Products

// Blocks of 16 keys to multiply with: those of a chunk, and behind them those of the next ones, if a row takes several chunks side by side.
struct KeyBlocks {
  static constexpr int64_t most = max_interleaved_chunks * chunk_groups;
  const void *at[most];
  float *to[most];  // where their products go, of the first row
  int64_t count = 0;

  MHA_INLINE void add(const Groups &keys, Range groups, float *products) {
    for (int64_t g = groups.begin; g < groups.end; ++g, ++count) {
      at[count] = keys.at[g];
      to[count] = products + g * key_block;
    }
  }
};

// Products of `num_rows` queries with all blocks, as many at a time as the loop takes. Where fewer are left they come one by one, or, where
// the loop for one block takes several too, the last one is computed again. `groups` are those of the first chunk. interleaves: blocks that
// are taken together come from as many places, which advance side by side.
template <class V>
MHA_NOINLINE void multiply_keys(const Unit &unit, const Chunk &chunk, const KeyBlocks &blocks, Range groups, const Loops &loops,
                                const float *queries, int64_t num_rows, bool interleaves, const PrefetchSource &ahead) {
  const Groups &keys = chunk.keys;
  const int64_t head_dim = unit.call.head_dim;
  const uint32_t most = static_cast<uint32_t>(loops.wide.blocks);
  const int64_t apart = interleaves ? (static_cast<uint32_t>(blocks.count) + most - 1) / most : 1;
  // Blocks side by side prefetch all groups of the next chunk in turn.
  const int64_t groups_ahead = interleaves ? static_cast<uint32_t>(groups.end - groups.begin) / static_cast<uint32_t>(apart) : 1;
  Tile tile;
  for (int64_t r = 0; r < loops.wide.rows; ++r) tile.rows[r] = queries + min(r, num_rows - 1) * head_dim;
  tile.column_stride = key_block;
  tile.terms = head_dim;
  tile.chain = score_block;
  tile.sums_stride = score_stride;
  tile.mode = Sums::replace;
  tile.next_columns = key_block * head_dim;
  tile.next_sums = key_block;
  for (int64_t i = 0, step, end = interleaves ? apart : blocks.count; i < end; i += step) {
    const Loop &loop = !interleaves && end - i < loops.wide.blocks ? loops.narrow : loops.wide;
    for (int64_t b = 0; b < loop.blocks; ++b) {
      const int64_t block = min(i + b * apart, blocks.count - 1);
      tile.columns[b] = blocks.at[block];
      tile.sums[b] = blocks.to[block];
    }
    const int64_t group = groups.begin + i * groups_ahead;
    const bool is_ahead = ahead.has(group);
    tile.repeats = 1;
    if (loop.blocks == 1 && !interleaves) {
      tile.repeats = min(end - i, block_of(keys.run_end[group]) - group);
      if (is_ahead) tile.repeats = min(tile.repeats, block_of(ahead.groups->run_end[group]) - group);
    }
    step = interleaves ? 1 : loop.blocks * tile.repeats;
    const int64_t ahead_bytes = step * groups_ahead * ahead.bytes;
    const char *const first_ahead = is_ahead ? ahead.at(group) + ahead.share * ahead_bytes : nullptr;
    tile.prefetch = is_ahead ? prefetch_stretch(first_ahead, ahead_bytes, loop, head_dim, tile.repeats) : no_prefetch(queries);
    for (int64_t b = i; keys.are_late && b < min(end, i + step); ++b) {
      pack_keys<V>(unit, chunk.begin, groups.begin + b, chunk.needed, static_cast<float *>(const_cast<void *>(blocks.at[b])));
    }
    loop.run(tile);
  }
  if (!keys.are_late) return;
  for (int64_t r = 0; r < num_rows; ++r) make_canonical<V>(blocks.to[0] + r * score_stride, blocks.count * key_block);
}

// Products of one row.
template <class V>
MHA_NOINLINE void multiply_row(const Unit &unit, const Chunk &chunk, Range groups, int64_t row, float *products) {
  KeyBlocks blocks;
  blocks.add(chunk.keys, groups, products);
  multiply_keys<V>(unit, chunk, blocks, groups, loops_over_keys<V>(1, chunk.keys.storage, false), unit.q(row), 1, false,
                   no_prefetch_source);
}

// ---- Scores

// The keys of the chunk that the mask leaves to each row of a tile; none has one outside of `some`.
struct Attending {
  Range of_row[max_attend_rows], some;
};

template <class V>
MHA_NOINLINE void scale_products(const Groups &groups, Range blocks, float scale, float *products) {
  for (int64_t key = blocks.begin * key_block; key < blocks.end * key_block; key += V::size) {
    V score = load<V>(products + key);
    if (groups.has_scales) score = score * load<V>(groups.scales[block_of(key)] + place_in_block(key));
    store(products + key, score * all<V>(scale));
  }
}

// -infinity for the keys of some blocks outside of `keys`.
template <class V>
MHA_INLINE void leave_out_edges(Range blocks, Range keys, float *products) {
  constexpr int64_t lanes = V::size;
  const V none = all<V>(-infinity);
  for (int64_t key = blocks.begin * key_block; key < keys.begin; key += lanes) {
    store(products + key, first_lanes(none, keys.begin - key, load<V>(products + key)));
  }
  const int64_t end = blocks.end * key_block;
  for (int64_t key = max(blocks.begin * key_block, keys.end / lanes * lanes); key < end; key += lanes) {
    store(products + key, first_lanes(load<V>(products + key), keys.end - key, none));
  }
}

// Makes scores of the products of row number `row` of the unit with the keys of some blocks of a chunk, but for a factor that is left, the
// same for all rows: the softmax multiplies by it, so that nothing need be stored before.
template <class V>
MHA_NOINLINE float change_scores(const Unit &unit, int64_t row, const Chunk &chunk, Range blocks, Range keys, float *products) {
  const ScoreOptions &options = unit.call.options;
  float scale = unit.call.scale;
  // Under a positive scale -infinity stays what it is: then what is masked can be scaled along with the rest.
  if (options.change_scores || chunk.keys.has_scales || !(scale > 0.0f)) {
    const bool has_cap = options.softcap != 0.0f, is_separate = !has_cap || chunk.keys.has_scales;
    if (is_separate) scale_products<V>(chunk.keys, blocks, scale, products);
    if (has_cap) cap_scores<V>(options, blocks, is_separate ? 1.0f : scale, products);
    scale = 1.0f;
  }
  if (options.change_scores || options.limits_pairs) {
    const Row at = unit.row(row);
    for (Range run = keys; run.begin < keys.end; run.begin = run.end) {  // keys of neighbouring positions
      const int64_t first = chunk.begin + run.begin;
      const int64_t position = unit.position_of_key(first) - run.begin;  // of key 0, if it were one of them
      run.end = min(keys.end - run.begin, unit.run_of_keys(first)) + run.begin;
      bias_scores<V>(unit, at, position, run, products);
      mask_scores<V>(unit, at, position, run, products);
    }
  }
  return scale;
}

template <class V>
MHA_INLINE float score_row(const Unit &unit, int64_t row, const Chunk &chunk, Range blocks, Range keys, float *products) {
  const ScoreOptions &options = unit.call.options;
  const float scale = unit.call.scale;
  if (scale > 0.0f && !options.change_scores && !options.limits_pairs && !chunk.keys.has_scales) return scale;
  return change_scores<V>(unit, row, chunk, blocks, keys, products);
}

// ---- Softmax

// p = exp(score - m) of some blocks, and their sums: as many vectors side by side as the registers have room for, since an exp is a long
// chain of operations.
template <class V, int blocks>
MHA_INLINE void exp_of_blocks(float *s, V factor, V maximum, V (&partial_sums)[key_block / V::size]) {
  constexpr int vectors = key_block / V::size, count = vectors * blocks;
  constexpr int at_once = static_cast<int>(min(count, TileShape<V::size>::exp_vectors));
  static_assert(count % at_once == 0, "no vector is left over");
  MHA_UNROLL for (int first = 0; first < count; first += at_once) {
    V p[at_once];
    MHA_UNROLL for (int i = 0; i < at_once; ++i) p[i] = load<V>(s + (first + i) * static_cast<int>(V::size)) * factor - maximum;
    exp_of(p);
    MHA_UNROLL for (int i = 0; i < at_once; ++i) {
      store(s + (first + i) * static_cast<int>(V::size), p[i]);
      partial_sums[(first + i) % vectors] = partial_sums[(first + i) % vectors] + p[i];
    }
  }
}

// Turns the scores of some rows with some blocks of keys, times a factor, into p = exp(score - m); m and the sums l of p.
// keys: those of each row; others have p = 0. All maxima come first, so that no exp waits for one.
template <class V>
MHA_NOINLINE void softmax(Range blocks, const Range *keys, float factor, int64_t rows, float *scores, float *m, float *l) {
  constexpr int lanes = V::size, vectors = key_block / lanes;
  constexpr int at_once = static_cast<int>(max(1, TileShape<V::size>::exp_vectors / vectors));
  for (int64_t r = 0; r < rows; ++r) {
    float *const row = scores + r * score_stride;
    if (keys[r].begin > blocks.begin * key_block || keys[r].end < blocks.end * key_block) leave_out_edges<V>(blocks, keys[r], row);
    V greatest_yet[vectors];
    MHA_UNROLL for (int i = 0; i < vectors; ++i) greatest_yet[i] = all<V>(-infinity);
    for (int64_t block = blocks.begin; block < blocks.end; ++block) {
      MHA_UNROLL for (int i = 0; i < vectors; ++i) {
        greatest_yet[i] = max_of(load<V>(row + block * key_block + i * lanes), greatest_yet[i]);
      }
    }
    MHA_UNROLL for (int i = 1; i < vectors; ++i) greatest_yet[0] = max_of(greatest_yet[i], greatest_yet[0]);
    // Rounding keeps the order: the greatest score is that of the greatest product.
    m[r] = greatest(greatest_yet[0]) * factor;
  }
  const V every_factor = all<V>(factor);
  for (int64_t r = 0; r < rows; ++r, scores += score_stride) {
    // Without a score above -infinity any finite number will do: exp gives 0 for the keys left out, and NaN for a NaN.
    const V maximum = all<V>(m[r] == -infinity ? 0.0f : m[r]);
    V partial_sums[vectors];
    MHA_UNROLL for (int i = 0; i < vectors; ++i) partial_sums[i] = all<V>(0.0f);
    int64_t block = blocks.begin;
    for (; block + at_once <= blocks.end; block += at_once) {
      exp_of_blocks<V, at_once>(scores + block * key_block, every_factor, maximum, partial_sums);
    }
    if constexpr (at_once > 1) {
      for (; block < blocks.end; ++block) exp_of_blocks<V, 1>(scores + block * key_block, every_factor, maximum, partial_sums);
    }
    l[r] = sum16(partial_sums);
  }
}

}  // namespace
}  // namespace mha
