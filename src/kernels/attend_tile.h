// What a tile of rows makes of a chunk of keys: the partials (m, l, o) of its rows.
//
// A tile is some rows of a unit. attend_tile at the end of the file takes four steps, and the
// sections before it have their functions in this order: products of the queries with the keys,
// scores (scale and options), softmax, and context (products with the values). Keys and values have
// any storage type, for which each step picks a loop of tile.h. One row may take several chunks
// side by side, each with a partial of its own, because it waits for memory and more streams arrive
// faster. attend_rows, behind attend_tile, takes the same steps for all rows of a unit that reads
// the caller's keys and values row by row.
//
// Scores lie in rows of score_stride floats, one row for each query and chunk: the score of key j
// of the chunk is number j.
#pragma once

#include "key_values.h"
#include "score_options.h"

namespace mha {
namespace {

// ---- Products

// The loops over keys or values: of floats those of the set, and of codes those of its products.
MHA_INLINE Loops loops_over_codes(const ProductKernels &codes, int64_t rows, Storage storage,
                                  bool are_values) {
  return codes.loops_over_codes ? codes.loops_over_codes(rows, storage, are_values)
                                : loops_over_codes(rows, storage, are_values);
}
template <class V>
MHA_INLINE Loops key_loops(const Unit &unit, int64_t rows, Storage storage, bool prefetches) {
  const ProductKernels *const codes = unit.call.run.codes;
  return codes ? loops_over_codes(*codes, rows, storage, false)
               : loops_over_keys<V>(rows, storage, prefetches);
}
template <class V>
MHA_INLINE Loops value_loops(const Unit &unit, int64_t rows, Storage storage, bool prefetches) {
  const ProductKernels *const codes = unit.call.run.codes;
  return codes ? loops_over_codes(*codes, rows, storage, true)
               : loops_over_values<V>(rows, storage, prefetches);
}

// The key tiles to multiply with, and where their products go: those of one chunk, followed by
// those of other chunks if a row takes several side by side.
struct KeyTileList {
  static constexpr int64_t most = max_interleaved_chunks * chunk_tiles;
  const void *at[most];
  float *to[most];  // where their products go, of the first row
  int64_t count = 0;

  MHA_INLINE void add(const KeyTiles &keys, Range tiles, float *products) {
    for (int64_t g = tiles.begin; g < tiles.end; ++g, ++count) {
      at[count] = keys.at[g];
      to[count] = products + g * tile_keys;
    }
  }
};

// Multiplies `num_rows` queries by all key tiles of a list, as many tiles at a time as the loop
// takes. What is left at the end comes tile by tile, or, with a loop for one or two rows, with the
// last tile computed again. `tiles` are those of the first chunk.
//
// interleaves: tiles that are computed together do not follow each other in the list, but come from
// equal parts of it, which advance side by side: memory is read in as many streams. Keys that are
// packed late are packed here, right before the loop reads them.
template <class V>
MHA_NOINLINE void multiply_keys(const Unit &unit, const Chunk &chunk, const KeyTileList &list,
                                Range tiles, const Loops &loops, const float *queries,
                                int64_t num_rows, bool interleaves, const PrefetchSource &ahead) {
  const KeyTiles &keys = chunk.keys;
  const bool are_codes = unit.call.run.codes;
  const int64_t head_dim = unit.call.request.head_dim, slice = late_width(unit.call),
                stride = unit.call.plan.query_stride,
                terms = are_codes ? pairs_of(head_dim) : head_dim;
  const uint32_t most = static_cast<uint32_t>(loops.wide.strips);
  const int64_t apart = interleaves ? (static_cast<uint32_t>(list.count) + most - 1) / most : 1;
  // Tiles side by side prefetch all tiles of the next chunk in turn.
  const int64_t tiles_ahead =
      interleaves ? static_cast<uint32_t>(tiles.end - tiles.begin) / static_cast<uint32_t>(apart)
                  : 1;
  const float *rows[max_tile_rows];
  for (int64_t r = 0; r < loops.wide.rows; ++r) rows[r] = queries + min(r, num_rows - 1) * stride;
  Tile tile;
  tile.rows = rows;
  tile.next_rows = 0;
  tile.column_stride = are_codes && keys.storage == Storage::int8 ? 2 * tile_keys : tile_keys;
  tile.terms = terms;
  tile.chain = are_codes ? score_pairs : score_block;
  tile.sums_stride = score_stride;
  tile.mode = are_codes ? Sums::add_scaled : Sums::replace;
  for (int64_t i = 0, step, end = interleaves ? apart : list.count; i < end; i += step) {
    const Loop &loop = !interleaves && end - i < loops.wide.strips ? loops.narrow : loops.wide;
    for (int64_t b = 0; b < loop.strips; ++b) {
      const int64_t key_tile = min(i + b * apart, list.count - 1);
      tile.columns[b] = list.at[key_tile];
      tile.sums[b] = list.to[key_tile];
    }
    const int64_t key_tile = tiles.begin + i * tiles_ahead;
    const bool is_ahead = ahead.has(key_tile);
    tile.repeats = 1;
    if (!interleaves) {
      int64_t run = min(end - i, key_tile_of(keys.run_end[key_tile]) - key_tile);
      if (is_ahead) run = min(run, key_tile_of(ahead.tiles->run_end[key_tile]) - key_tile);
      tile.repeats = max(1, static_cast<uint32_t>(run) / static_cast<uint32_t>(loop.strips));
    }
    tile.next_sums = loop.strips * tile_keys;
    tile.next_columns = tile.next_sums * keys.row_stride;
    step = interleaves ? 1 : loop.strips * tile.repeats;
    const int64_t ahead_bytes = step * tiles_ahead * ahead.bytes;
    const char *const first_ahead =
        is_ahead ? ahead.at(key_tile) + ahead.share * ahead_bytes : nullptr;
    tile.prefetch = is_ahead ? prefetch_stretch(first_ahead, ahead_bytes, loop, terms, tile.repeats)
                             : no_prefetch(queries);
    if (!keys.are_late) {
      loop.run(tile);
      continue;
    }
    // Slices are whole blocks of a dot product, whose results are added in order.
    for (int64_t c = 0, slice_end; c < head_dim; c = slice_end) {
      slice_end = min(head_dim, c + slice);
      for (int64_t b = i; b < min(end, i + step); ++b) {
        pack_keys<V>(unit, chunk.begin, tiles.begin + b, chunk.needed, {c, slice_end}, step,
                     static_cast<float *>(const_cast<void *>(list.at[b])));
      }
      for (int64_t r = 0; r < loop.rows; ++r)
        rows[r] = queries + min(r, num_rows - 1) * head_dim + c;
      tile.terms = slice_end - c;
      tile.mode = c > 0 ? Sums::add : Sums::replace;
      loop.run(tile);
    }
  }
  if (!keys.are_late) return;
  for (int64_t r = 0; r < num_rows; ++r)
    make_canonical<V>(list.to[0] + r * score_stride, list.count * tile_keys);
}

// Multiplies one row by some tiles of a chunk.
template <class V>
MHA_NOINLINE void multiply_row(const Unit &unit, const Chunk &chunk, Range tiles, int64_t row,
                               float *products) {
  KeyTileList list;
  list.add(chunk.keys, tiles, products);
  multiply_keys<V>(unit, chunk, list, tiles, key_loops<V>(unit, 1, chunk.keys.storage, false),
                   unit.q(row), 1, false, no_prefetch_source);
}

// ---- Scores

// The keys of a chunk that positions leave to each row of a tile, and the range that contains them.
struct Attending {
  Range of_row[max_attend_rows], some;
};

// Multiplies products by the scale, and before that by the scales of keys of int8.
template <class V>
MHA_NOINLINE void scale_products(const KeyTiles &keys, Range tiles, float scale, float *products) {
  for (int64_t key = tiles.begin * tile_keys; key < tiles.end * tile_keys; key += V::size) {
    V score = load<V>(products + key);
    if (keys.has_scales) score = score * load<V>(keys.scales[key_tile_of(key)] + lane_of(key));
    store(products + key, score * all<V>(scale));
  }
}

// Sets the scores, or others, of those keys of some tiles that lie outside of `keys` to `value`.
template <class V>
MHA_INLINE void leave_out_edges(Range tiles, Range keys, float value, float *products) {
  constexpr int64_t lanes = V::size;
  const V none = all<V>(value);
  for (int64_t key = tiles.begin * tile_keys; key < keys.begin; key += lanes) {
    store(products + key, first_lanes(none, keys.begin - key, load<V>(products + key)));
  }
  const int64_t end = tiles.end * tile_keys;
  for (int64_t key = max(tiles.begin * tile_keys, keys.end / lanes * lanes); key < end;
       key += lanes) {
    store(products + key, first_lanes(load<V>(products + key), keys.end - key, none));
  }
}

// Makes scores of the products of one row with some tiles of a chunk, in the order of CONTRACT.md,
// section 7. Returns a factor that is still to be applied, the same for all rows: if nothing but
// the scale changes scores, the softmax multiplies by it, which saves a pass over the scores.
template <class V>
MHA_NOINLINE float change_scores(const Unit &unit, int64_t row, const Chunk &chunk, Range tiles,
                                 Range keys, float *products) {
  const ScoreOptions &options = unit.call.request.options;
  float scale = unit.call.request.scale;
  // A positive scale leaves -infinity as it is, so masked scores can be scaled with the rest later.
  if (options.change_scores || chunk.keys.has_scales || !(scale > 0.0f)) {
    const bool has_cap = options.softcap != 0.0f, is_separate = !has_cap || chunk.keys.has_scales;
    if (is_separate) scale_products<V>(chunk.keys, tiles, scale, products);
    if (has_cap) cap_scores<V>(options, tiles, is_separate ? 1.0f : scale, products);
    scale = 1.0f;
  }
  if (options.change_scores || options.limits_pairs) {
    const Row at = unit.row(row);
    for (Range run = keys; run.begin < keys.end;
         run.begin = run.end) {  // keys whose positions follow each other
      const int64_t first = chunk.begin + run.begin;
      // The position that key 0 would have in this run.
      const int64_t position = unit.position_of_key(first) - run.begin;
      run.end = min(keys.end - run.begin, unit.run_of_keys(first)) + run.begin;
      bias_scores<V>(unit, at, position, run, products);
      mask_scores<V>(unit, at, position, run, products);
    }
  }
  return scale;
}

// The same, without a call where the products need no change.
template <class V>
MHA_INLINE float score_row(const Unit &unit, int64_t row, const Chunk &chunk, Range tiles,
                           Range keys, float *products) {
  const ScoreOptions &options = unit.call.request.options;
  const float scale = unit.call.request.scale;
  if (scale > 0.0f && !options.change_scores && !options.limits_pairs && !chunk.keys.has_scales)
    return scale;
  return change_scores<V>(unit, row, chunk, tiles, keys, products);
}

// ---- Softmax

// Computes p = exp(score - m) of some tiles, adds up p, and stores finish(p, vector). As many
// vectors run side by side as the registers have room for, because exp is a long chain of
// operations.
template <class V, int tiles, class Finish>
MHA_INLINE void exp_of_tiles(float *s, V factor, V maximum, V (&partial_sums)[tile_keys / V::size],
                             const Finish &finish) {
  constexpr int vectors = tile_keys / V::size, count = vectors * tiles;
  constexpr int at_once = static_cast<int>(min(count, TileShape<V::size>::exp_vectors));
  static_assert(count % at_once == 0, "no vector is left over");
  MHA_UNROLL for (int first = 0; first < count; first += at_once) {
    V p[at_once];
    MHA_EACH(i, at_once) p[i] = load<V>(s + (first + i) * V::size) * factor - maximum;
    exp_of(p);
    MHA_EACH(i, at_once) {
      store(s + (first + i) * V::size, finish(p[i], first + i));
      partial_sums[(first + i) % vectors] = partial_sums[(first + i) % vectors] + p[i];
    }
  }
}

// Computes the same of all tiles of a row, and returns the sum. is_weighted: p is multiplied by the
// scales of the values, and *most becomes the greatest of the magnitudes, or infinity if one of
// them is not finite.
template <class V, bool is_weighted>
MHA_INLINE float exp_of_row(Range tiles, float factor, float maximum, const KeyTiles *of_values,
                            float *scores, float *most) {
  constexpr int vectors = tile_keys / V::size;
  constexpr int at_once = static_cast<int>(max(1, TileShape<V::size>::exp_vectors / vectors));
  const V every_factor = all<V>(factor), every_maximum = all<V>(maximum), zero = all<V>(0.0f);
  V partial_sums[vectors], magnitude = zero, zero_or_nan = zero;
  MHA_EACH(i, vectors) partial_sums[i] = zero;
  int64_t key_tile = tiles.begin;
  const auto finish = [&](V p, int i) MHA_INLINED {
    if constexpr (is_weighted) {
      p = p * load<V>(of_values->scales[key_tile + i / vectors] + i % vectors * V::size);
      magnitude = max_of(max_of(p, zero - p), magnitude);
      zero_or_nan = mul_add(p, zero, zero_or_nan);
    }
    return p;
  };
  for (; key_tile + at_once <= tiles.end; key_tile += at_once) {
    exp_of_tiles<V, at_once>(scores + key_tile * tile_keys, every_factor, every_maximum,
                             partial_sums, finish);
  }
  if constexpr (at_once > 1) {
    for (; key_tile < tiles.end; ++key_tile)
      exp_of_tiles<V, 1>(scores + key_tile * tile_keys, every_factor, every_maximum, partial_sums,
                         finish);
  }
  if constexpr (is_weighted)
    *most = greatest(max_of(value_if_nan(zero_or_nan, all<V>(infinity)), magnitude));
  return sum16(partial_sums);
}

// The softmax calls it: one loop has all the registers then, and the other keeps its constants.
template <class V>
MHA_NOINLINE float weighted_exp_of_row(Range tiles, float factor, float maximum,
                                       const KeyTiles *of_values, float *scores, float *most) {
  return exp_of_row<V, true>(tiles, factor, maximum, of_values, scores, most);
}

// The greatest score of a row with some tiles. has_scales: scores are multiplied by the scales of
// the keys before, and then by `scale`.
template <class V, bool has_scales>
MHA_INLINE float greatest_score(Range tiles, const KeyTiles *of_keys, float scale, float *row) {
  constexpr int lanes = V::size, vectors = tile_keys / lanes;
  V greatest_yet[vectors];
  MHA_EACH(i, vectors) greatest_yet[i] = all<V>(-infinity);
  for (int64_t key_tile = tiles.begin; key_tile < tiles.end; ++key_tile) {
    MHA_EACH(i, vectors) {
      float *const at = row + key_tile * tile_keys + i * lanes;
      V s = load<V>(at);
      if constexpr (has_scales) {
        s = (s * load<V>(of_keys->scales[key_tile] + i * lanes)) * all<V>(scale);
        store(at, s);
      }
      greatest_yet[i] = max_of(s, greatest_yet[i]);
    }
  }
  MHA_UNROLL for (int i = 1; i < vectors; ++i) greatest_yet[0] =
      max_of(greatest_yet[i], greatest_yet[0]);
  return greatest(greatest_yet[0]);
}

// Turns the scores of some rows with some tiles, times a factor, into p = exp(score - m), and
// computes m and the sum l of p. keys: those of each row; other keys get p = 0. The maxima of all
// rows come first, so that no exp waits for one.
//
// of_keys: where they are given, scores are to be multiplied by their scales before the factor.
// of_values: where they are given, p is multiplied by their scales, and most[r] becomes the
// greatest magnitude, as of exp_of_row.
template <class V>
MHA_NOINLINE void softmax(Range tiles, const Range *keys, const KeyTiles *of_keys, float factor,
                          const KeyTiles *of_values, int64_t rows, float *scores, float *m,
                          float *l, float *most) {
  for (int64_t r = 0; r < rows; ++r) {
    float *const row = scores + r * score_stride;
    const KeyTiles *of_row = of_keys;
    if (keys[r].begin > tiles.begin * tile_keys || keys[r].end < tiles.end * tile_keys) {
      if (of_row) scale_products<V>(*of_row, tiles, factor, row);
      of_row = nullptr;
      leave_out_edges<V>(tiles, keys[r], -infinity, row);
    }
    // Rounding keeps the order: the greatest score is that of the greatest product.
    m[r] = of_row ? greatest_score<V, true>(tiles, of_row, factor, row)
                  : greatest_score<V, false>(tiles, nullptr, factor, row);
    if (!of_keys) m[r] = m[r] * factor;
  }
  const float left = of_keys ? 1.0f : factor;
  // If no score is above -infinity, any finite maximum will do: exp gives 0 for the keys that are
  // left out, and NaN for a NaN.
  const auto maximum_of = [m](int64_t r) MHA_INLINED { return m[r] == -infinity ? 0.0f : m[r]; };
  for (int64_t r = 0; of_values && r < rows; ++r) {
    l[r] = weighted_exp_of_row<V>(tiles, left, maximum_of(r), of_values, scores + r * score_stride,
                                  most + r);
  }
  for (int64_t r = 0; !of_values && r < rows; ++r) {
    l[r] = exp_of_row<V, false>(tiles, left, maximum_of(r), nullptr, scores + r * score_stride,
                                nullptr);
  }
}

// ---- Context

// o[r] = the sum of p[r][j] * value j over `keys`, all columns of the values. Values that follow
// each other in memory without a gap are one call of the loop, which continues the sums of the call
// before.
//
// are_codes: p are pairs of words, and o are sums of integers.
MHA_NOINLINE inline void add_values(const KeyTiles &values, int64_t width, Range keys,
                                    bool are_codes, const Loops &loops, const float *p, float *o,
                                    const PrefetchSource &ahead) {
  const int pairs = are_codes ? 1 : 0;  // a shift: two values are a term of codes
  const int64_t columns = loops.wide.columns;
  const int64_t element = bytes_of(values.storage);
  const float *rows[max_tile_rows];
  Tile tile;
  tile.rows = rows;
  tile.next_rows = 0;
  tile.column_stride = values.row_stride << pairs;
  tile.sums_stride = width;
  tile.chain = chunk_keys;
  for (int64_t j = keys.begin >> pairs << pairs, end; j < keys.end; j = end) {
    const int64_t key_tile = key_tile_of(j);
    end = min(values.run_end[key_tile], keys.end);
    const bool is_ahead = ahead.has(key_tile) && width >= columns;
    if (is_ahead) end = min(end, ahead.tiles->run_end[key_tile]);
    // Rows past the last are computed and discarded.
    for (int64_t r = 0; r < loops.wide.rows; ++r) rows[r] = p + r * score_stride + (j >> pairs);
    tile.columns[0] =
        static_cast<const char *>(values.at[key_tile]) + lane_of(j) * values.row_stride * element;
    tile.sums[0] = o;
    tile.terms = (end - j + pairs) >> pairs;
    tile.mode = j > keys.begin ? Sums::extend : Sums::replace;
    const int64_t ahead_bytes = ahead.bytes * (key_tile_of(end + tile_keys - 1) - key_tile);
    tile.prefetch = no_prefetch(p);
    if (is_ahead) {
      const char *const first = ahead.at(key_tile) + ahead.share * ahead_bytes;
      tile.prefetch = prefetch_stretch(first, ahead_bytes, loops.wide, tile.terms, width / columns);
    }
    run_over_columns(loops, width, &tile, bytes_of(values.storage, 16));
  }
}

// The same for one row, with only those keys that a list names. The case is rare.
template <class V>
MHA_NOINLINE void add_values_of_keys(const KeyTiles &values, int64_t width, const int32_t *keys,
                                     int64_t count, const float *p, float *o) {
  constexpr int lanes = V::size, vectors = tile_keys / lanes;
  visit_storage<true>(values.storage, [&](auto stored) MHA_INLINED {
    using Element = typename decltype(stored)::Element;
    for (int64_t first = 0; first < width; first += tile_keys) {
      V sums[1][vectors];
      clear(sums);
      for (int64_t n = 0; n < count; ++n) {
        const int64_t j = keys[n];
        const Element *const value = static_cast<const Element *>(values.at[key_tile_of(j)]) +
                                     lane_of(j) * values.row_stride + first / numbers_of<Element>;
        MHA_EACH(i, vectors) {
          sums[0][i] = mul_add(all<V>(p[j]), load_from<V>(value, i * lanes), sums[0][i]);
        }
      }
      MHA_EACH(i, vectors) store(o + first + i * lanes, sums[0][i]);
    }
  });
}

// Whether one of `count` numbers of o is NaN or infinite: then 0 times it is not 0.
template <class V>
MHA_NOINLINE bool has_other_than_finite(const float *o, int64_t count) {
  constexpr int64_t at_once = V::size;
  const V zero = all<V>(0.0f);
  V zeros_or_nan = zero;
  int64_t i = 0;
  for (; i + at_once <= count; i += at_once) zeros_or_nan = zeros_or_nan + load<V>(o + i) * zero;
  if (i < count) zeros_or_nan = zeros_or_nan + first_lanes(load<V>(o + i), count - i, zero) * zero;
  alignas(64) float lanes[V::size];
  store(lanes, zeros_or_nan);
  float sum = 0.0f;
  for (const float lane : lanes) sum += lane;
  return sum != 0.0f;  // NaN is not 0
}

// ---- The tile

// Rows [begin, begin + count) of a unit.
struct TileRows {
  int64_t begin, count;
};

// Finds the keys of each row among those that are needed of a chunk.
MHA_INLINE void find_attending(const Unit &unit, int64_t chunk_begin, Range needed,
                               const TileRows &rows, Attending *keys) {
  Row at = unit.row(rows.begin);
  for (int64_t r = 0; r < rows.count; ++r, unit.advance(&at)) {
    const Range range = unit.keys_of(at);
    keys->of_row[r] = {min(needed.end, max(needed.begin, range.begin - chunk_begin)),
                       min(needed.end, max(needed.begin, range.end - chunk_begin))};
  }
  // Later rows never have earlier keys.
  const int64_t begin = keys->of_row[0].begin;
  keys->some = {begin, max(begin, keys->of_row[rows.count - 1].end)};
}

// Whether p of one of the keys is 0, NaN or infinite. Such a p does not tell whether the key takes
// part in the row.
MHA_NOINLINE inline bool has_unclear(Range keys, const float *p) {
  const auto is_unclear = [&](int64_t j) MHA_INLINED {
    return (bits_of(p[j]) & 0x7fffffffu) - 1u >= 0x7f7fffffu;
  };
  int64_t j = keys.begin;
  for (; j + tile_keys <= keys.end; j += tile_keys) {
    uint32_t some = 0;
    for (int64_t i = 0; i < tile_keys; ++i) some |= is_unclear(j + i);
    if (some != 0) return true;
  }
  while (j < keys.end && !is_unclear(j)) ++j;
  return j < keys.end;
}

// Computes o of a chunk again without the values of keys that take no part, for rows in which such
// a value may have left a NaN: 0 times infinity is NaN, but a key that is masked must not count. p
// has replaced the scores, which are therefore computed again. A row whose sum l is NaN is NaN
// anyway.
template <class V>
MHA_NOINLINE void leave_out_values(const Unit &unit, const Chunk &chunk, const Attending &keys,
                                   const TileRows &rows, int64_t slot, float *scores) {
  const Attention &call = unit.call;
  const Range tiles = tiles_of(keys.some);
  alignas(64) float p[max_attend_rows * score_stride];
  bool is_unclear[max_attend_rows], is_any_unclear = false;
  for (int64_t r = 0; r < rows.count; ++r) {
    const float l = *unit.l(slot, rows.begin + r);
    is_unclear[r] = l == l && has_unclear(keys.some, scores + r * score_stride) &&
                    has_other_than_finite<V>(unit.o(slot, rows.begin + r), call.request.head_dim_v);
    is_any_unclear |= is_unclear[r];
  }
  if (!is_any_unclear) return;
  MHA_MEMCPY(p, scores, static_cast<size_t>(rows.count * score_stride) * sizeof(float));
  KeyTileList list;
  list.add(chunk.keys, tiles, scores);
  multiply_keys<V>(unit, chunk, list, tiles,
                   key_loops<V>(unit, rows.count, chunk.keys.storage, false), unit.q(rows.begin),
                   rows.count, false, no_prefetch_source);
  for (int64_t r = 0; r < rows.count; ++r) {
    if (!is_unclear[r]) continue;
    float *const row = scores + r * score_stride;
    const Range own = keys.of_row[r];
    const float factor = score_row<V>(unit, rows.begin + r, chunk, tiles, own, row);
    int32_t taking_part[chunk_keys];
    int64_t count = 0;
    for (int64_t j = own.begin; j < own.end; ++j) {
      taking_part[count] = static_cast<int32_t>(j);
      count += row[j] * factor != -infinity;
    }
    if (count == keys.some.end - keys.some.begin) continue;
    add_values_of_keys<V>(chunk.values, call.plan.head_dim_v_padded, taking_part, count,
                          p + r * score_stride, unit.o(slot, rows.begin + r));
  }
}

// ---- Weights in integers (CONTRACT.md, section 8)

// Sets the weights of keys that take no part in a row to 0, which they are not where the scale of
// the value is not finite. p has replaced the scores, which are therefore computed again.
template <class V>
MHA_NOINLINE void leave_out_weights(const Unit &unit, const Chunk &chunk, Range tiles, Range own,
                                    int64_t row, float *w) {
  alignas(64) float scores[score_stride];
  multiply_row<V>(unit, chunk, tiles, row, scores);
  const float factor = score_row<V>(unit, row, chunk, tiles, own, scores);
  for (int64_t j = own.begin; j < own.end; ++j) {
    if (scores[j] * factor == -infinity) w[j] = 0.0f;
  }
}

// Turns the weights w = p * scale of the value of some rows into pairs of words. most: the greatest
// magnitude of each row, in place of which comes the scale.
template <class V>
MHA_NOINLINE void encode_weights(const Unit &unit, const Chunk &chunk, const Attending &keys,
                                 const TileRows &rows, float *weights, float *most) {
  const Range tiles = tiles_of(keys.some);
  const int64_t first = tiles.begin * tile_keys, count = tiles.end * tile_keys - first;
  for (int64_t r = 0; r < rows.count; ++r) {
    float *const w = weights + r * score_stride;
    CodeScale scale = code_scale_of(bits_of(most[r]), most_word);
    if (scale.scale != scale.scale) {
      leave_out_edges<V>(tiles, keys.of_row[r], 0.0f, w);
      leave_out_weights<V>(unit, chunk, tiles, keys.of_row[r], rows.begin + r, w);
      scale = word_scale_of(w + first, count);
    }
    encode_words<V>(w + first, count, scale.factor, w + first / 2);
    most[r] = scale.scale;
  }
}

// Makes o of the sums of rows.
template <class V>
MHA_NOINLINE void scale_sums_of_codes(int64_t rows, int64_t width, const float *scales, float *o) {
  for (int64_t r = 0; r < rows; ++r, o += width) {
    for (int64_t i = 0; i < width; i += V::size)
      store(o + i, floats_of_integers(load<V>(o + i)) * all<V>(scales[r]));
  }
}

// Turns the products of some rows into p, times the scales of the values if these have any, and
// computes their m and l. most: as of softmax.
template <class V>
MHA_NOINLINE void weigh(const Unit &unit, const Chunk &chunk, const Attending &keys,
                        const TileRows &rows, int64_t slot, float *scores, float *most) {
  const ScoreOptions &options = unit.call.request.options;
  const Range tiles = tiles_of(keys.some);
  // Scales of keys that nothing comes between and the softmax are left to it.
  const bool are_late = chunk.keys.has_scales && !options.change_scores && !options.limits_pairs;
  float factor = unit.call.request.scale;
  for (int64_t r = 0; r < rows.count && !are_late; ++r) {
    factor =
        score_row<V>(unit, rows.begin + r, chunk, tiles, keys.of_row[r], scores + r * score_stride);
  }
  softmax<V>(tiles, keys.of_row, are_late ? &chunk.keys : nullptr, factor,
             chunk.values.has_scales ? &chunk.values : nullptr, rows.count, scores,
             unit.m(slot, rows.begin), unit.l(slot, rows.begin), most);
}

// Makes sums of values out of sums of values of which the Hadamard transform is stored.
template <class V>
MHA_NOINLINE void transform_back(const Unit &unit, const TileRows &rows, int64_t slot) {
  const int64_t width = unit.call.request.head_dim_v, block = unit.call.arrays.v.hadamard;
  for (int64_t r = rows.begin; r < rows.begin + rows.count; ++r)
    hadamard<V>(block, width, 1.0f / static_cast<float>(block), unit.o(slot, r), unit.o(slot, r));
}

// Computes the partials of some rows over each of `count` chunks, in slots from `slot` on. needed:
// keys of the first chunk and of those after it.
//
// Each row is multiplied by the values of all keys that any row of the tile attends to. For other
// keys p is 0, which changes at most the sign of a zero in o, and the finished row does not show
// it. Only a value that is not finite makes a difference; then leave_out_values computes the row
// again.
template <class V>
MHA_NOINLINE void attend_tile(const Unit &unit, const Chunk *chunks, int64_t count, Range needed,
                              const TileRows &rows, int64_t slot,
                              const PrefetchSource &ahead_of_keys,
                              const PrefetchSource &ahead_of_values) {
  const Attention &call = unit.call;
  const int64_t width = call.plan.head_dim_v_padded;
  float *const scores = unit.scratch + call.plan.scratch.scores;
  const auto scores_of = [&](int64_t c)
                             MHA_INLINED { return scores + c * rows.count * score_stride; };

  // 1. Products. The last row stands in for rows that are missing.
  Attending keys[max_interleaved_chunks];
  KeyTileList list;
  for (int64_t c = 0; c < count; ++c) {
    const int64_t before = c * chunk_keys;
    find_attending(unit, chunks[c].begin,
                   {max(0, needed.begin - before), min(chunk_keys, needed.end - before)}, rows,
                   &keys[c]);
    list.add(chunks[c].keys, tiles_of(keys[c].some), scores_of(c));
  }
  const bool prefetches = ahead_of_keys.tiles || ahead_of_values.tiles;
  multiply_keys<V>(unit, chunks[0], list, tiles_of(keys[0].some),
                   key_loops<V>(unit, rows.count, chunks[0].keys.storage, prefetches),
                   unit.q(rows.begin), rows.count, rows.count == 1 && call.arrays.k.is_packed,
                   ahead_of_keys);

  // 2. and 3. Scores; then their maximum m, p = exp(score - m), and its sum l.
  float most[max_interleaved_chunks][max_attend_rows];
  for (int64_t c = 0; c < count; ++c) {
    weigh<V>(unit, chunks[c], keys[c], rows, slot + c, scores_of(c), most[c]);
  }

  // 4. Context: o is the sum of p times the values.
  const Loops loops =
      value_loops<V>(unit, rows.count, chunks[0].values.storage, prefetches || count > 1);
  for (int64_t c = 0; c < count; ++c) {
    PrefetchSource ahead = ahead_of_values;
    if (c + 1 < count)
      ahead = {&chunks[c + 1].values, tiles_of(keys[c + 1].some), 0, tile_bytes_of(call.arrays.v)};
    float *const o = unit.o(slot + c, rows.begin);
    if (call.run.codes) {
      encode_weights<V>(unit, chunks[c], keys[c], rows, scores_of(c), most[c]);
      add_values(chunks[c].values, width, keys[c].some, true, loops, scores_of(c), o, ahead);
      scale_sums_of_codes<V>(rows.count, width, most[c], o);
      if (call.arrays.v.hadamard > 1) transform_back<V>(unit, rows, slot + c);
      continue;
    }
    add_values(chunks[c].values, width, keys[c].some, false, loops, scores_of(c), o, ahead);
    // A value that is not finite shows in the first row, too, since 0 times it is NaN. (Columns
    // after head_dim_v may hold anything.)
    if (has_other_than_finite<V>(o, call.request.head_dim_v))
      leave_out_values<V>(unit, chunks[c], keys[c], rows, slot + c, scores_of(c));
    if (call.arrays.v.hadamard > 1) transform_back<V>(unit, rows, slot + c);
  }
}

// ---- Few rows over the caller's keys and values

// Multiplies R queries by 16 rows of keys, which are transposed in registers, four numbers of each
// at a time. The lanes of a vector are keys, as in a tile, so that a product has the same bits as
// one of packed keys: its terms are added in order, in chains of score_block. Few rows spend more
// time on the transposition than on the multiply-adds, but less than on a tile written and read.
//
// ahead: where the loop prefetches, `step` bytes for each four numbers of all 16 keys.
template <class V, int R, class Element>
MHA_NOCLONE void multiply_key_rows(const KeyRows &keys, int64_t head_dim, const float *queries,
                                   float *products, const char *ahead, int64_t step) {
  constexpr int lanes = V::size, all_strips = static_cast<int>(tile_keys) / lanes,
                strips = static_cast<int>(min(all_strips, max(1, 4 / R)));
  step = step * strips / all_strips;
  for (int64_t first = 0; first < tile_keys; first += strips * lanes) {
    const Element *const from = static_cast<const Element *>(keys.at) + first * keys.stride;
    for (int64_t begin = 0, k = 0; begin < head_dim; begin = k) {
      const int64_t end = min(head_dim, begin + score_block);
      V acc[R][strips];
      clear(acc);
      const auto add = [&](const V &column, int64_t term, int s) MHA_INLINED {
        MHA_EACH(r, R) acc[r][s] = mul_add(all<V>(queries[r * head_dim + term]), column, acc[r][s]);
      };
      for (; k < end; k += 4) {
        for (const char *const part = ahead + step; ahead < part; ahead += 64)
          MHA_PREFETCH_L2(ahead);
        MHA_EACH(s, strips) {
          V column[4];
          transpose_four(from + s * lanes * keys.stride + k, keys.stride, column);
          MHA_EACH(i, 4) add(column[i], k + i, s);
        }
      }
      MHA_EACH(r, R) {
        MHA_EACH(s, strips) {
          float *const to = products + r * score_stride + first + s * lanes;
          store(to, begin == 0 ? acc[r][s] : load<V>(to) + acc[r][s]);
        }
      }
    }
  }
}

// The loop for 1, 2, 4 or 6 queries and keys of f32 or, up to 4 queries, f16.
template <class V>
MHA_NOINLINE auto key_loop(int64_t rows, Storage storage) {
  auto loop = &multiply_key_rows<V, 1, float>;
  visit_rows<6>(rows, [&](auto tile) MHA_INLINED {
    constexpr int R = decltype(tile)::count;
    loop = &multiply_key_rows<V, R, float>;
    if constexpr (R <= max_rows_of_fewer_bits) {
      if (storage == Storage::f16) loop = &multiply_key_rows<V, R, F16>;
    }
  });
  return loop;
}

// The caller's keys or values for a unit, from the first position of a chunk on.
struct ChunkRows {
  const char *base;  // of the unit's first kv head
  int64_t row_bytes, tile_bytes, head_bytes;
  int64_t share;  // what each row of the unit prefetches of a tile; 0: there are gaps
};

MHA_NOINLINE inline ChunkRows rows_of_chunk(const Unit &unit, const KeyValues &source,
                                            int64_t begin, int64_t width) {
  const int64_t element = bytes_of(source.storage), tile_bytes = tile_bytes_of(source);
  const bool has_gaps = source.row_stride * unit.rows_per_kv != unit.num_rows * width;
  return {plain_row(source, unit, unit.sequence.kv_first + begin), source.row_stride * element,
          tile_bytes, source.head_stride * element, has_gaps ? 0 : tile_bytes / unit.num_rows};
}

// Finds the keys of some rows, which are multiplied by all that the unit needs.
MHA_NOINLINE inline Attending attending_of(const Unit &unit, int64_t begin, Range needed,
                                           const TileRows &rows) {
  Attending keys;
  find_attending(unit, begin, needed, rows, &keys);
  keys.some = needed;
  return keys;
}

// Memory is prefetched at least so far ahead.
constexpr int64_t bytes_ahead = 8192;

// Computes the partials of all rows of a unit that reads plain rows over a chunk. The steps are
// those of attend_tile, and so are the bits: products are complete before anything else is done to
// them, and values are added in the order of their positions.
//
// All kv heads of the unit take 16 positions before any takes the next 16, so that memory is read
// in the order in which it lies. Where the rows have no gaps, each tile of rows prefetches its
// share of a later tile of positions, of whatever head: the last keys prefetch the first values,
// and the last values the next keys.
template <class V>
MHA_NOINLINE void attend_rows(const Unit &unit, int64_t begin, Range needed, int64_t slot) {
  const Attention &call = unit.call;
  const KeyValues &k = call.arrays.k, &v = call.arrays.v;
  const int64_t head_dim = call.request.head_dim, width = call.plan.head_dim_v_padded;
  const Range tiles = tiles_of(needed);
  const ChunkRows of_keys = rows_of_chunk(unit, k, begin, head_dim),
                  of_values = rows_of_chunk(unit, v, begin, call.request.head_dim_v);
  const int64_t apart = bytes_ahead / max(of_keys.tile_bytes, 1) + 1;
  float *const scores = unit.scratch + call.plan.scratch.scores;
  const bool is_in_place = reads_in_place<V>(unit);
  const Storage storage = is_in_place ? v.storage : Storage::f32;
  // Tiles of six rows read floats.
  constexpr int64_t tile_rows = TileShape<V::size>::attend_rows;
  const int64_t most =
      min(tile_rows, storage == Storage::f32 && unit.rows_per_kv == 6 ? 6 : max_rows_of_fewer_bits);
  // Calls visit(rows) for each tile of rows, with its kv head in of_head.
  Unit of_head = unit;
  const auto for_each_tile = [&](auto visit) MHA_INLINED {
    of_head.kv_head = unit.kv_head;
    for (int64_t row = 0; row < unit.num_rows; ++of_head.kv_head) {
      for (const int64_t end = row + unit.rows_per_kv; row < end; row += min(most, end - row))
        visit(TileRows{row, min(most, end - row)});
    }
  };

  // 1. Products. What is prefetched meanwhile lies `apart` tiles of positions later, or, for the
  // last keys, at the same place among the values.
  for (int64_t g = tiles.begin; g < tiles.end; ++g) {
    const bool is_last = g + apart >= tiles.end;
    const ChunkRows &later = is_last ? of_values : of_keys;
    const char *const ahead =
        later.base + (g + apart - (is_last ? tiles.end - tiles.begin : 0)) * later.tile_bytes;
    // For each four numbers of 16 keys.
    const int64_t step = static_cast<uint32_t>(later.share) * 4 / static_cast<uint32_t>(head_dim);
    KeyRows keys = {};
    int64_t kv_head = -1;
    for_each_tile([&](const TileRows &rows) MHA_INLINED {
      if (of_head.kv_head != kv_head) {
        kv_head = of_head.kv_head;
        keys = rows_of_keys<V>(of_head, begin, g, needed, 0, head_dim,
                               k.storage == Storage::bf16 || rows.count > 4);
      }
      key_loop<V>(rows.count, keys.storage)(keys, head_dim, unit.q(rows.begin),
                                            scores + rows.begin * score_stride + g * tile_keys,
                                            ahead + rows.begin * later.share, rows.count * step);
    });
  }

  // 2. and 3. Scores, and p.
  Chunk chunk;
  chunk.begin = begin;
  chunk.needed = needed;
  chunk.keys.has_scales = chunk.values.has_scales = false;
  for_each_tile([&](const TileRows &rows) MHA_INLINED {
    float *const of_rows = scores + rows.begin * score_stride;
    for (int64_t r = 0; r < rows.count; ++r)
      make_canonical<V>(of_rows + r * score_stride + tiles.begin * tile_keys,
                        (tiles.end - tiles.begin) * tile_keys);
    weigh<V>(of_head, chunk, attending_of(of_head, begin, needed, rows), rows, slot, of_rows,
             nullptr);
  });

  // 4. Context. The last tile of a kv head may have fewer rows than the others, and a loop of its
  // own. Values go on from the sums of the positions before, 16 at a time.
  const Loops loops[] = {loops_over_values<V>(unit.rows_per_kv % most, storage, true),
                         loops_over_values<V>(min(most, unit.rows_per_kv), storage, true)};
  float *const memory = unit.scratch + call.plan.scratch.values;
  const float *of_rows[max_tile_rows];
  Tile tile;
  tile.rows = of_rows;
  tile.next_rows = 0;
  tile.column_stride = is_in_place ? v.row_stride : width;
  tile.sums_stride = width;
  tile.chain = chunk_keys;
  for (int64_t g = tiles.begin; g < tiles.end; ++g) {
    const int64_t first = max(needed.begin, g * tile_keys);
    const ChunkRows &later = g + apart < tiles.end ? of_values : of_keys;
    const char *const ahead = later.base + (g + apart) * later.tile_bytes;
    tile.terms = min(needed.end, (g + 1) * tile_keys) - first;
    tile.mode = g > tiles.begin ? Sums::extend : Sums::replace;
    for_each_tile([&](const TileRows &rows) MHA_INLINED {
      const Loops &loop = loops[rows.count == min(most, unit.rows_per_kv)];
      tile.columns[0] = of_values.base + first * of_values.row_bytes +
                        (of_head.kv_head - unit.kv_head) * of_values.head_bytes;
      if (!is_in_place) {
        pack_values<V>(of_head, begin, {first, first + tile.terms}, memory);
        tile.columns[0] = memory + first * width;
      }
      for (int64_t r = 0; r < rows.count; ++r)
        of_rows[r] = scores + (rows.begin + r) * score_stride + first;
      tile.sums[0] = unit.o(slot, rows.begin);
      const int64_t columns = loop.wide.columns;
      tile.prefetch = no_prefetch(scores);
      if (width >= columns)
        tile.prefetch = prefetch_stretch(
            ahead + rows.begin * later.share, rows.count * later.share, loop.wide, tile.terms,
            static_cast<uint32_t>(width) / static_cast<uint32_t>(columns));
      run_over_columns(loop, width, &tile, 16 * bytes_of(storage));
    });
  }
  for_each_tile([&](const TileRows &rows) MHA_INLINED {
    if (!has_other_than_finite<V>(unit.o(slot, rows.begin), call.request.head_dim_v)) return;
    read_chunk<V>(of_head, begin, needed, false, &chunk);
    leave_out_values<V>(of_head, chunk, attending_of(of_head, begin, needed, rows), rows, slot,
                        scores + rows.begin * score_stride);
  });
}

}  // namespace
}  // namespace mha
