// The inner loop of projections in float32, of scores and of the context: some rows times some
// columns of a matrix, with all sums in registers. (Integers and small layers have loops of their
// own.)
//
// Projections, scores and context vectors are the same computation: R rows of multipliers, read one
// number at a time, times a matrix whose columns lie side by side in memory. For weights the
// columns are outputs, for scores they are keys, and for the context they are the columns of the
// values. Vectors run across columns and never along the terms of a sum. Therefore neither the
// number of lanes nor the shape of a tile can change a bit of a result.
//
// From top to bottom: what a loop is told (Tile, Prefetch), one term or some terms of it (add_term,
// add_terms), the loop (multiply), and the choice of a loop for keys, values and weights
// (loops_over_...), whose register tiles each instruction set defines (ops.h).
#pragma once

#include "elements.h"
#include "kernels.h"

namespace mha {
namespace {

using Shape = TileShape<Vector::size>;

// Small functions of integers that kernels need and would otherwise take from the C++ library.
MHA_INLINE constexpr int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
MHA_INLINE constexpr int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
// a / b, without the slow division where the result is 0.
MHA_INLINE int64_t quotient(int64_t a, int64_t b) { return a < b ? 0 : a / b; }

// The tile of 16 keys that a key is in, and its lane there. Neither is negative, which spares the
// corrections of a signed division.
MHA_INLINE int64_t key_tile_of(int64_t key) {
  return static_cast<int64_t>(static_cast<uint64_t>(key) / tile_keys);
}
MHA_INLINE int64_t lane_of(int64_t key) {
  return static_cast<int64_t>(static_cast<uint64_t>(key) % tile_keys);
}

MHA_INLINE Prefetch no_prefetch(const void *anywhere) {
  return {static_cast<const char *>(anywhere), 0, 0, 0};
}

// How many streams a loop prefetches. Many rows compute long enough for one stream; one row that
// reads several strips already has as many streams and needs one more.
MHA_INLINE constexpr int prefetch_streams(int64_t rows, int64_t strips) {
  return rows > 4 || (rows == 1 && strips > 1) ? 1 : 4;
}

constexpr int64_t cache_line_bytes = 64;

// Which loops of a shape prefetch. Numbers of fewer bits come from memory, so that their loops
// always do if any does; loops over floats do if the caller asks for it.
enum class Prefetching {
  never,
  fewer_bits,
  all,
  weights,  // as `all`; but int4, which is widened into a cache before, counts as floats
};

// Whether vectors come in pairs that hold even and odd columns in place of adjacent ones. It is so
// where one instruction less makes them of the stored numbers (elements.h); reorder puts the sums
// in order again.
template <class Element, int C>
constexpr bool is_even_odd = C % 2 == 0 && widens_even_odd<Vector, Element>;

// Reads `count` vectors of a strip at p, from vector `first` on. apart: of codes, from the first
// term of a pair to the second.
template <int C, bool has_register, int count, class Element>
MHA_INLINE void read_columns(const Element *p, int first, int64_t apart, Vector (&column)[count]) {
  constexpr int lanes = Vector::size;
  if constexpr (is_same<Element, ValueNibble>) {
    constexpr int of_16 = 16 / lanes;
    pair_nibbles(p + first / of_16 * 8, first % of_16, apart, column);
  } else if constexpr (are_words<Element> && sizeof(Element) == 1) {
    pair_codes<is_same<Element, KeyCode>>(reinterpret_cast<const int8_t *>(p) + first * lanes,
                                          apart, column);
  } else if constexpr (is_even_odd<Element, C>) {
    MHA_UNROLL for (int i = 0; i < count; i += 2) {
      const Two<Vector> two = load_even_odd<Vector, has_register>(p + (first + i) * lanes);
      column[i] = two.even;
      column[i + 1] = two.odd;
    }
  } else {
    MHA_EACH(i, count) column[i] = load_from<Vector>(p, (first + i) * lanes);
  }
}

// Brings the sums from the order of memory into that of the loop, or back.
template <class Element, int C, bool for_loop, int R, int N, class V>
MHA_INLINE void reorder(V (&acc)[R][N]) {
  if constexpr (is_even_odd<Element, C>) {
    MHA_EACH(r, R) {
      MHA_UNROLL for (int i = 0; i < N; i += 2) {
        if constexpr (for_loop)
          split_even_odd(&acc[r][i], &acc[r][i + 1]);
        else
          join_even_odd(&acc[r][i], &acc[r][i + 1]);
      }
    }
  }
}

// Sets all sums to +0.
template <int R, int N, class V>
MHA_INLINE void clear(V (&acc)[R][N]) {
  MHA_EACH_PAIR(r, R, i, N) acc[r][i] = all<V>(0.0f);
}

// sum + a * b, rounded once. The loops of avx512_bf16.cpp take a pair of bf16 for a number, and add
// both products: of pairs they need what others need of floats.
#if defined(MHA_MULTIPLIES_PAIRS)
constexpr bool multiplies_pairs = true;
#else
constexpr bool multiplies_pairs = false;
template <class V>
MHA_INLINE V plus_product(V a, V b, V sum) {
  return mul_add(a, b, sum);
}
#endif

// *sum += multiplier * column. The two terms of a pair follow each other, in which g++ would move
// sums from one register to another.
template <class Element, class V>
MHA_INLINE void add_to(V *sum, V multiplier, V column) {
  if constexpr (are_words<Element>)
    add_words(multiplier, column, sum);
  else if constexpr (is_same<Element, Bf16Pair>)
    add_product(column, multiplier, 0, sum);
  else
    *sum = plus_product(multiplier, column, *sum);
}

// Adds one term to all sums: acc[r][i] += rows[r][k] * the columns of each strip from `offset` on.
// Where the registers allow it, the columns stay in registers besides the sums, and the numbers of
// the rows pass by. For one row, or with fewer registers, the numbers of the rows stay, and the
// columns pass by in pairs; are_near says that they come from a near cache, so that loading them
// once for each row would take longer than the arithmetic.
template <int C, bool are_near = false, int R, int B, int N, class Element, class V>
MHA_INLINE void add_term(const float *const (&rows)[R], int64_t k,
                         const Element *const (&columns)[B], int64_t offset, V (&acc)[R][N],
                         int64_t apart = 0) {
  static_assert(N == B * C, "all vectors belong to a strip");
  constexpr int registers = TileShape<V::size>::registers;
  if constexpr (R > 1 && R * N + N < registers) {
    V column[B][C];
    MHA_EACH(b, B)
      read_columns<C, R * N + N + 2 <= registers>(columns[b] + offset, 0, apart, column[b]);
    MHA_EACH(i, N) column[i / C][i % C] = kept_in_register(column[i / C][i % C]);
    MHA_EACH(r, R) {
      const V multiplier = all<V>(rows[r][k]);
      MHA_EACH(i, N) add_to<Element>(&acc[r][i], multiplier, column[i / C][i % C]);
    }
  } else {
    constexpr int at_once = C % 2 == 0 ? 2 : 1;
    V multiplier[R];
    MHA_EACH(r, R) multiplier[r] = all<V>(rows[r][k]);
    MHA_UNROLL for (int first = 0; first < N; first += at_once) {
      V column[at_once];
      read_columns<C, R * N + R + at_once + 1 <= registers>(columns[first / C] + offset, first % C,
                                                            apart, column);
      MHA_EACH(i, at_once) column[i] = kept_in_pair(column[i]);
      MHA_EACH(i, at_once) {
        if (R > 1 && are_near) column[i] = kept_in_register(column[i]);
        MHA_EACH(r, R) add_to<Element>(&acc[r][first + i], multiplier[r], column[i]);
      }
    }
  }
}

// Loops over floats of four rows and more add these terms in one pass. Fewer instructions around
// the multiply-adds leave more of the core to a second thread on it (SPECIAL_FORMS.md). Loops with
// four streams wait for the memory, which wants their prefetches one by one.
constexpr int terms_in_pass = 4;
template <class V, int R, class Element, int streams>
constexpr bool adds_in_passes = V::size > 1 && R >= 4 && is_same<Element, float> &&streams < 4;

// Adds the terms of a pass, from k on: for each term the columns stay in registers, and the numbers
// of the rows pass by, or, where a lane can be multiplied by, the other way round.
template <int C, int R, int B, int N, class V>
MHA_INLINE void add_terms(const float *const (&rows)[R], int64_t k,
                          const float *const (&columns)[B], int64_t offset, int64_t stride,
                          V (&acc)[R][N]) {
  V multiplier[R], column[N];
  if constexpr (multiplies_by_lanes<V>) {
    MHA_EACH(r, R) multiplier[r] = load<V>(rows[r] + k);
  }
  MHA_EACH(u, terms_in_pass) {
    const auto read = [&](int i) MHA_INLINED {
      column[i] = load<V>(columns[i / C] + offset + u * stride + i % C * V::size);
    };
    if constexpr (multiplies_by_lanes<V>) {
      MHA_EACH(i, N) {
        read(i);
        MHA_EACH(r, R) add_product(column[i], multiplier[r], u, &acc[r][i]);
      }
    } else {
      MHA_EACH(i, N) read(i);
      MHA_EACH(r, R) {
        multiplier[r] = all<V>(rows[r][k + u]);
        MHA_EACH(i, N) add_product(column[i], multiplier[r], u, &acc[r][i]);
      }
    }
  }
}

// The scalar kernels widen all numbers to memory, and nothing waits for it: they have loops over
// floats alone, which prefetch nothing.
template <class V>
constexpr bool has_loops_of_floats_alone = V::size == 1;

// Whether there are loops that widen pairs of bf16 in registers. Otherwise loops over floats add
// halves.
constexpr bool has_loops_of_pairs =
    !has_loops_of_floats_alone<Vector> && !multiplies_pairs && !is_small_code;

// What chains that start with +0 load: as many zeros as the widest strip has columns.
alignas(64) constexpr float zeros[panel_columns + 16] = {};

// The inner loop: all chains of a tile. streams: how many it prefetches; 0: none. A chain is as
// many passes as there are terms for, and then single terms, or single terms alone.
//
// Chains that start with +0 load it from memory, and the mode is hidden from the optimizer, so that
// all modes share one loop. Addresses of sums are computed where they are needed, since the loop
// has no registers left for them.
template <int R, int B, int C, class Element, int streams>
MHA_NOCLONE void multiply(const Tile &tile) {
  static_assert(R <= max_tile_rows && B <= max_tile_strips, "a tile has room for them");
  static_assert(C * Vector::size <= panel_columns + 16, "there are zeros enough");
  constexpr int N = B * C, lanes = Vector::size;
  constexpr bool may_be_scaled =
      (B == 1 ? panel_columns % (C * lanes) == 0 : C * lanes == panel_columns) &&
      (is_same<Element, int8_t> ||
       (B == 1 && is_same<Element, Int4Number<Vector>> && streams == 0));
  constexpr bool may_be_halved =
      is_same<Element, Bf16Pair> || (is_same<Element, float> && !has_loops_of_pairs && B == 1);
  alignas(64) float halves[may_be_halved ? R * N * lanes : 1];
  // The shape of a tile may tell what it multiplies by: only a panel has strips of 3 vectors or a
  // multiple, and only keys are tiles side by side for several rows. Then the stride is a constant.
  constexpr int64_t together = is_same<Element, KeyCode> ? 2 : 1,
                    stride = C % 3 == 0       ? panel_columns
                             : R > 1 && B > 1 ? together * tile_keys
                                              : 0;
  const int64_t column_stride = stride > 0 ? stride : tile.column_stride;
  const Element *columns[B];
  float *sums[B];
  MHA_EACH(b, B) {
    columns[b] = static_cast<const Element *>(tile.columns[b]);
    sums[b] = tile.sums[b];
  }
  const char *ahead = tile.prefetch.address, *ahead2 = ahead + 2 * tile.prefetch.apart;
  const int64_t step = tile.prefetch.step, apart = tile.prefetch.apart;
  const auto prefetch = [&](int64_t terms) MHA_INLINED {
    MHA_PREFETCH_L2(ahead);
    if constexpr (streams == 4) {
      MHA_PREFETCH_L2(ahead + apart);
      MHA_PREFETCH_L2(ahead2);
      MHA_PREFETCH_L2(ahead2 + apart);
      ahead2 += terms * step;
    }
    ahead += terms * step;
  };
  const int64_t terms = tile.terms, sums_stride = tile.sums_stride;
  const bool extends = tile.mode == Sums::extend;
  // Calls visit(r, sums of row r in each strip).
  const auto for_each_row = [](float *const(&first)[B], int64_t distance, auto visit) MHA_INLINED {
    float *row[B];
    MHA_EACH(b, B) row[b] = opaque(first[b]);
    MHA_EACH(r, R) {
      visit(r, row);
      MHA_EACH(b, B) row[b] = opaque(row[b] + distance);
    }
  };
  const float *const *list = tile.rows;
  for (int64_t repeat = 0; repeat < tile.repeats; ++repeat, list += tile.next_rows) {
    const float *rows[R];
    MHA_EACH(r, R) rows[r] = list[r];
    int64_t k = 0, at = 0;
    bool is_second = false;  // of two halves
    const char *scales = tile.scales;
    do {
      // One chain: load what the sums start with, add its terms, and store the sums.
      const int64_t end = min(terms, k + tile.chain);
      Vector acc[R][N];
      float *start[B];
      MHA_EACH(b, B) start[b] = extends ? sums[b] : const_cast<float *>(zeros);
      for_each_row(start, extends ? sums_stride : 0,
                   [&](int r, float *const(&from)[B]) MHA_INLINED {
                     MHA_EACH(i, N) acc[r][i] = load(from[i / C] + i % C * lanes);
                   });
      reorder<Element, C, true>(acc);
      const int64_t begin = k;
      const Element *numbers[B];
      MHA_EACH(b, B) numbers[b] = columns[b];
      if constexpr (is_same<Element, Bf16Pair>) {
        // What is read from one bf16 before a pair on has its earlier term in the upper half.
        if (is_second)
          at -= tile.chain * column_stride;
        else
          MHA_EACH(b, B)
            numbers[b] = reinterpret_cast<const Element *>(
                reinterpret_cast<const uint16_t *>(columns[b]) - 1);
      }
      if constexpr (adds_in_passes<Vector, R, Element, streams>) {
        // One line to prefetch in a pass; where that is not enough, a line with each term.
        if (terms_in_pass * step <= cache_line_bytes) {
          for (; k + terms_in_pass <= end;
               k += terms_in_pass, at += terms_in_pass * column_stride) {
            if constexpr (streams > 0) prefetch(terms_in_pass);
            add_terms<C>(rows, k, columns, at, column_stride, acc);
          }
        }
      }
      for (; k < end; ++k, at += column_stride) {
        if constexpr (streams > 0) prefetch(1);
        add_term<C>(rows, k, numbers, at, acc, column_stride / 2);
      }
      reorder<Element, C, false>(acc);
      if constexpr (are_words<Element>) {
        if (tile.mode == Sums::add_scaled) {
          float *before[B];
          MHA_EACH(b, B) before[b] = begin == 0 ? const_cast<float *>(zeros) : sums[b];
          for_each_row(before, begin == 0 ? 0 : sums_stride,
                       [&](int r, float *const(&from)[B]) MHA_INLINED {
                         MHA_EACH(i, N) {
                           acc[r][i] = mul_add(floats_of_integers(acc[r][i]), all(rows[r][terms]),
                                               load(from[i / C] + i % C * lanes));
                         }
                       });
        }
      }
      // What the mode says happens to the finished chain. Codes in groups alone have scales; what
      // was widened before has one strip and is not prefetched.
      const Sums mode = opaque(tile.mode);
      if (may_be_halved && mode == Sums::add_halves) {
        MHA_EACH_PAIR(r, R, i, N) {
          float *const half = halves + (r * N + i) * lanes;
          if (is_second)
            acc[r][i] = load(half) + acc[r][i];
          else
            store(half, acc[r][i]);
        }
        is_second = !is_second;
        if (is_second) continue;
      }
      if (may_be_scaled && mode == Sums::add_scaled) {
        alignas(64) float widened[N * lanes];
        const float *of_columns[B];
        const bool are_halves = tile.scale_storage == Storage::f16;
        MHA_EACH(b, B) {
          const char *const of_strip =
              element_at(scales, tile.scale_storage, b * tile.scales_apart);
          of_columns[b] = reinterpret_cast<const float *>(of_strip);
          if constexpr (R <= 2) {
            MHA_UNROLL for (int i = 0; i < C * lanes; i += 16)
                MHA_PREFETCH_L2(element_at(of_strip, tile.scale_storage, i) + tile.offsets_apart);
          }
          if (are_halves) {
            float *const to = widened + b * C * lanes;
            MHA_EACH(i, C)
              store(to + i * lanes, load(reinterpret_cast<const F16 *>(of_strip) + i * lanes));
            of_columns[b] = to;
          }
        }
        for_each_row(sums, sums_stride, [&](int r, float *const(&to)[B]) MHA_INLINED {
          MHA_EACH(i, N) {
            const int column = i % C * lanes;
            acc[r][i] =
                mul_add(acc[r][i], load(of_columns[i / C] + column), load(to[i / C] + column));
          }
        });
        scales += panel_columns * (are_halves ? 2 : 4);
      } else if (!are_words<Element> && (mode == Sums::add || mode == Sums::add_halves ||
                                         (mode == Sums::replace && opaque(begin) != 0))) {
        for_each_row(sums, sums_stride, [&](int r, float *const(&to)[B]) MHA_INLINED {
          MHA_EACH(i, N) acc[r][i] = load(to[i / C] + i % C * lanes) + acc[r][i];
        });
      }
      for_each_row(sums, sums_stride, [&](int r, float *const(&to)[B]) MHA_INLINED {
        MHA_EACH(i, N) store(to[i / C] + i % C * lanes, acc[r][i]);
      });
    } while (k < terms);
    MHA_EACH(b, B) {
      columns[b] += tile.next_columns / numbers_of<Element>;
      sums[b] += tile.next_sums;
    }
    ahead += tile.prefetch.skip;
    ahead2 += tile.prefetch.skip;
  }
}

// Prefetches a stretch of memory evenly during a loop of these terms and repeats, an equal part of
// it in each stream. Counts are rounded up, because many tiles share a stretch and each must ask
// for some of it; they have 32 bits, which divide faster.
MHA_INLINE Prefetch prefetch_stretch(const char *begin, int64_t bytes, const Loop &loop,
                                     int64_t terms, int64_t repeats) {
  const uint32_t part = (static_cast<uint32_t>(bytes) + loop.streams - 1) / loop.streams;
  const uint32_t per_repeat =
      (part + static_cast<uint32_t>(repeats) - 1) / static_cast<uint32_t>(repeats);
  const int64_t step =
      (per_repeat + static_cast<uint32_t>(terms) - 1) / static_cast<uint32_t>(terms);
  return {begin, part, step, per_repeat - step * terms};
}

// The loop for R rows and B strips of C vectors. prefetches: whether a loop that may choose does.
// Values alone have loops over int4.
template <class V, int R, int B, int C, Prefetching prefetching, bool only_floats = false,
          bool are_values = false>
MHA_INLINE Loop loop_of(Storage storage, bool prefetches) {
  // With the scalar kernels, and for the large tiles of the attention, all columns are floats, and
  // of pairs there is nothing else.
  constexpr bool has_one_type = only_floats || has_loops_of_floats_alone<V> || multiplies_pairs;
  constexpr int streams = prefetch_streams(R, B);
  Loop loop = {nullptr, R, B, C * V::size, streams};
  visit_storage<are_values>(has_one_type ? Storage::f32 : storage, [&](auto stored) MHA_INLINED {
    using Element = typename decltype(stored)::Element;
    constexpr bool is_float = is_same<Element, float>, is_of_int4 = is_same<Element, Int4Number<V>>;
    if constexpr (is_float || !has_one_type) {
      constexpr bool may_choose = is_float || (is_of_int4 && prefetching == Prefetching::weights);
      constexpr bool has_choice =
          prefetching == Prefetching::all || prefetching == Prefetching::weights;
      constexpr int always = prefetching != Prefetching::never && !may_choose ? streams : 0;
      loop.run = multiply<R, B, C, Element, always>;
      if constexpr (may_choose && has_choice && !has_loops_of_floats_alone<V>) {
        if (prefetches) loop.run = multiply<R, B, C, Element, streams>;
      }
    }
  });
  return loop;
}

// The vectors of 16 columns, or of 4 for one number at a time: the fewest that a loop is made for.
template <class V>
constexpr int min_vectors = V::size == 1 ? 4 : tile_keys / V::size;

// ---- The choice of a loop

template <int R>
struct Rows {
  static constexpr int count = R;
};

// Calls visit(Rows<R>{}) with the smallest R that has room for the rows: 1, 2, 4 or `most`.
template <int most, class Visit>
MHA_INLINE void visit_rows(int64_t rows, Visit visit) {
  if (rows <= 1) return visit(Rows<1>{});
  if constexpr (most > 2) {
    if (rows <= 2) return visit(Rows<2>{});
  }
  if constexpr (most > 4) {
    if (rows <= 4) return visit(Rows<4>{});
  }
  visit(Rows<most>{});
}

// Tiles of the attention with more rows read floats, since for them numbers of fewer bits are
// widened to memory.
constexpr int max_rows_of_fewer_bits = 4;

// Loops over key tiles. One or two rows compute the last tiles with the wide loop as well.
template <class V>
MHA_NOINLINE Loops loops_over_keys(int64_t rows, Storage storage, bool prefetches) {
  Loops loops = {};
  visit_rows<TileShape<V::size>::attend_rows>(rows, [&](auto tile) MHA_INLINED {
    constexpr int R = decltype(tile)::count, B = TileShape<V::size>::key_tiles(R),
                  C = tile_keys / V::size;
    constexpr bool only_floats = R > max_rows_of_fewer_bits;
    constexpr Prefetching prefetching = R == 1 ? Prefetching::fewer_bits : Prefetching::all;
    loops.wide = loop_of<V, R, B, C, prefetching, only_floats>(storage, prefetches);
    if constexpr (R <= 2 || B == 1)
      loops.narrow = loops.wide;
    else
      loops.narrow = loop_of<V, R, 1, C, Prefetching::never, only_floats>(storage, false);
  });
  return loops;
}

// Loops over the columns of values.
template <class V>
MHA_NOINLINE Loops loops_over_values(int64_t rows, Storage storage, bool prefetches) {
  Loops loops = {};
  visit_rows<TileShape<V::size>::attend_rows>(rows, [&](auto tile) MHA_INLINED {
    constexpr int R = decltype(tile)::count, C = TileShape<V::size>::context_vectors(R),
                  least = min_vectors<V>;
    constexpr bool only_floats = R > max_rows_of_fewer_bits;
    loops.wide = loop_of<V, R, 1, C, Prefetching::all, only_floats, true>(storage, prefetches);
    if constexpr (C == least)
      loops.narrow = loops.wide;
    else
      loops.narrow = loop_of<V, R, 1, least, Prefetching::never, only_floats, true>(storage, false);
  });
  return loops;
}

// The kernels' `loops_over_codes`. Tiles of more rows read pairs of words in memory.
MHA_NOINLINE inline Loops loops_over_codes(int64_t rows, Storage storage, bool are_values) {
  Loops loops = {};
  const auto set = [&](auto of_rows, auto of_strips, auto of_vectors, auto code) MHA_INLINED {
    constexpr int R = decltype(of_rows)::count, B = decltype(of_strips)::count,
                  C = decltype(of_vectors)::count, streams = prefetch_streams(R, B);
    Loop loop = {multiply<R, B, C, WordPair, 0>, R, B, C * Vector::size, 1};
    if constexpr (R <= max_rows_of_fewer_bits && !has_loops_of_floats_alone<Vector>) {
      if (storage != Storage::f32) {
        loop.run = multiply<R, B, C, decltype(code), streams>;
        loop.streams = streams;
      }
      if constexpr (is_same<decltype(code), ValueCode>) {
        if (storage == Storage::int4) loop.run = multiply<R, B, C, ValueNibble, streams>;
      }
    }
    return loop;
  };
  visit_rows<Shape::attend_rows>(rows, [&](auto of_rows) MHA_INLINED {
    constexpr int R = decltype(of_rows)::count, B = Shape::key_tiles(R),
                  C = Shape::context_vectors(R), of_tile = tile_keys / Vector::size,
                  least = min_vectors<Vector>;
    if (are_values)
      loops = {set(of_rows, Rows<1>{}, Rows<C>{}, ValueCode{}),
               set(of_rows, Rows<1>{}, Rows<least>{}, ValueCode{})};
    else
      loops = {set(of_rows, Rows<B>{}, Rows<of_tile>{}, KeyCode{}),
               set(of_rows, Rows < R <= 2 ? B : 1 > {}, Rows<of_tile>{}, KeyCode{})};
  });
  return loops;
}

// Loops over the columns of a panel, or of several panels side by side. prefetches_more: the panel
// is of floats, and the tile has more than one line to prefetch for each term; the loop over whole
// rows of a panel (AVX-512) then prefetches four streams. are_pairs: of bf16. Where an instruction
// multiplies pairs, whole panels are fast enough for the last columns of a matrix.
MHA_NOINLINE inline Loops loops_over_weights(int64_t rows, Storage storage, bool are_pairs,
                                             bool is_one_panel, bool prefetches,
                                             bool prefetches_more) {
  Loops loops = {};
  visit_rows<Shape::max_rows>(rows, [&](auto tile) MHA_INLINED {
    constexpr int R = decltype(tile)::count, C = Shape::project_vectors(R),
                  panels = Shape::panels_at_once(R), least = min_vectors<Vector>;
    constexpr Prefetching of_one = R == 1 ? Prefetching::never : Prefetching::weights,
                          of_more = panels > 1 ? Prefetching::never : of_one;
    loops.wide = is_one_panel ? loop_of<Vector, R, 1, C, of_one>(storage, prefetches)
                              : loop_of<Vector, R, panels, C, of_more>(storage, prefetches);
    if constexpr (R > 4 && C * Vector::size == panel_columns) {
      if (prefetches_more) {
        loops.wide.run = multiply<R, 1, C, float, 4>;
        loops.wide.streams = 4;
      }
    }
    if constexpr (C == least || (multiplies_pairs && C * Vector::size == panel_columns))
      loops.narrow = loops.wide;
    else
      loops.narrow = loop_of<Vector, R, 1, least, Prefetching::never>(storage, false);
    if constexpr (has_loops_of_pairs) {
      if (are_pairs) {
        constexpr int of_panel = R == 1 ? 0 : prefetch_streams(R, 1),
                      of_panels = panels == 1 ? of_panel : 0;
        loops.wide.run = is_one_panel ? multiply<R, 1, C, Bf16Pair, of_panel>
                                      : multiply<R, panels, C, Bf16Pair, of_panels>;
        loops.narrow.run = multiply<R, 1, least, Bf16Pair, 0>;
      }
    }
  });
  return loops;
}

// Runs the loops over all columns of one strip after the other: the wide loop as often as it fits,
// then the narrow one. Columns come in multiples of 16.
MHA_INLINE void run_over_columns(const Loops &loops, int64_t columns, Tile *tile,
                                 int64_t bytes_of_16) {
  const Loop &loop = loops.wide, &rest = loops.narrow;
  tile->repeats = static_cast<uint32_t>(columns) / static_cast<uint32_t>(loop.columns);
  tile->next_columns = tile->next_sums = loop.columns;
  if (tile->repeats > 0) loop.run(*tile);
  const int64_t done = tile->repeats * loop.columns;
  if (done >= columns) return;
  tile->columns[0] = static_cast<const char *>(tile->columns[0]) + done / 16 * bytes_of_16;
  tile->sums[0] += done;
  tile->repeats = static_cast<uint32_t>(columns - done + rest.columns - 1) /
                  static_cast<uint32_t>(rest.columns);
  tile->next_columns = tile->next_sums = rest.columns;
  tile->prefetch = no_prefetch(tile->sums[0]);
  rest.run(*tile);
}

}  // namespace
}  // namespace mha
