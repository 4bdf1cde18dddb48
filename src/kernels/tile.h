// The one inner loop of the library: some rows times a block of columns, all in registers.
//
// Projections, scores and context vectors are the same computation: R rows of multipliers, read one
// number at a time, times a matrix that lies with its columns side by side. For weights the columns
// are outputs, for scores they are keys, for the context they are the columns of the values.
// Vectors run across columns, never along the terms, so that the number of lanes and the shape of a
// tile cannot change a bit.
#pragma once

#include "elements.h"
#include "kernels.h"

namespace mha {
namespace {

MHA_INLINE constexpr int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
MHA_INLINE constexpr int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
// a / b, without the slow division where the result is 0.
MHA_INLINE int64_t quotient(int64_t a, int64_t b) { return a < b ? 0 : a / b; }

// Which block of 16 keys a key is in, and where; without the care that a division takes of negative
// numbers.
MHA_INLINE int64_t block_of(int64_t key) {
  return static_cast<int64_t>(static_cast<uint64_t>(key) / key_block);
}
MHA_INLINE int64_t place_in_block(int64_t key) {
  return static_cast<int64_t>(static_cast<uint64_t>(key) % key_block);
}

template <int lanes>
struct TileShape;  // see below

// What a loop prefetches for later while it computes: with every step through the terms a line at
// each of some places, `apart` bytes from one to the next, which move by `step` bytes, and by
// `skip` bytes more when the loop goes on to the next columns. Memory that is read in several
// places comes faster. Without anything to prefetch the step is 0: the same line is asked for
// again, which costs next to nothing.
struct Prefetch {
  const char *place;
  int64_t apart, step, skip;
};

// Many rows compute for long enough, so that one place does. One row reads several blocks in as
// many places: one more is enough.
MHA_INLINE constexpr int prefetch_places(int64_t rows, int64_t blocks) {
  return rows > 4 || (rows == 1 && blocks > 1) ? 1 : 4;
}

// So many terms ahead a loop of many rows prefetches what it will read itself, from the second
// level of the cache into the first.
constexpr int64_t own_line_terms = 8;

// Which loops of a shape prefetch: those for numbers of fewer bits, which come from the memory,
// always; those for floats by choice.
enum class Prefetching {
  never,
  fewer_bits,
  all,
  weights,  // all, but what int4 is widened to, which lies in a cache, by choice, too
};

MHA_INLINE Prefetch no_prefetch(const void *anywhere) {
  return {static_cast<const char *>(anywhere), 0, 0, 0};
}

// What becomes of the results of a tile. They
//   replace      the sums in memory (from the second chain of a tile on they are added)
//   add          are added to the sums
//   add_scaled   are added to them times a scale for each column, by a fused multiply-add
//   extend       continue them: the chain of fused multiply-adds starts with the sum instead of +0
enum class Sums { replace, add, add_scaled, extend };

constexpr int max_tile_rows = 8, max_tile_blocks = 8;

// Some rows times B blocks of C vectors of columns, `repeats` times over with columns further on.
// Element (k, column) of block b is number k * column_stride + column from columns[b] on; its sum
// for row r is at sums[b] + r * sums_stride + column. Terms are cut into chains of `chain` terms,
// whose results are added (CONTRACT.md, section 3). The loop says how many rows and blocks it
// takes.
struct Tile {
  const float *rows[max_tile_rows];  // term k of row r is rows[r][k]
  const void *columns[max_tile_blocks];
  int64_t column_stride;
  int64_t terms, chain;
  float *sums[max_tile_blocks];
  int64_t sums_stride;
  Sums mode;
  const float *scales;  // of the columns of block 0, for each int4 group; add_scaled only
  int64_t repeats, next_columns, next_sums;  // how far on, in elements
  Prefetch prefetch;
};

// Whether each two vectors of sums hold even and odd columns, in place of neighbouring ones, until
// put_in_order interleaves them.
template <class V, class Element, int C>
constexpr bool is_even_odd = C % 2 == 0 && widens_even_odd<V, Element>;

// `count` vectors of a block's columns at p.
template <class V, int C, bool has_register, int count, class Element>
MHA_INLINE void read_columns(const Element *p, V (&column)[count]) {
  if constexpr (is_even_odd<V, Element, C>) {
    MHA_UNROLL for (int i = 0; i < count; i += 2) {
      const Two<V> two = load_even_odd<V, has_register>(p + i * V::size);
      column[i] = two.even;
      column[i + 1] = two.odd;
    }
  } else {
    MHA_EACH(i, count) column[i] = load<V>(p + i * V::size);
  }
}

template <class Element, int C, int R, int N, class V>
MHA_INLINE void put_in_order(V (&acc)[R][N]) {
  if constexpr (is_even_odd<V, Element, C>) {
    MHA_EACH(r, R) {
      MHA_UNROLL for (int i = 0; i < N; i += 2) join_even_odd(&acc[r][i], &acc[r][i + 1]);
    }
  }
}

template <class Element, int C, int R, int N, class V>
MHA_INLINE void put_out_of_order(V (&acc)[R][N]) {
  if constexpr (is_even_odd<V, Element, C>) {
    MHA_EACH(r, R) {
      MHA_UNROLL for (int i = 0; i < N; i += 2) split_even_odd(&acc[r][i], &acc[r][i + 1]);
    }
  }
}

template <int R, int N, class V>
MHA_INLINE void clear(V (&acc)[R][N]) {
  MHA_EACH(r, R) {
    MHA_EACH(i, N) acc[r][i] = all<V>(0.0f);
  }
}

// acc[r][i] += rows[r][k] * columns at `place` of each block, in blocks of C vectors. Beside the
// sums, the columns are held in registers, and the rows' numbers pass by; for one row, or where
// there are not registers enough, the rows' numbers are held, and the columns pass by in pairs.
template <int C, int R, int B, int N, class Element, class V>
MHA_INLINE void add_term(const float *const (&rows)[R], int64_t k,
                         const Element *const (&columns)[B], int64_t place, V (&acc)[R][N]) {
  static_assert(N == B * C, "all vectors are in a block");
  constexpr int registers = TileShape<V::size>::registers;
  if constexpr (R > 1 && R * N + N < registers) {
    V column[B][C];
    MHA_EACH(b, B) read_columns<V, C, R * N + N + 2 <= registers>(columns[b] + place, column[b]);
    MHA_EACH(i, N) column[i / C][i % C] = kept_in_register(column[i / C][i % C]);
    MHA_EACH(r, R) {
      const V multiplier = all<V>(rows[r][k]);
      MHA_EACH(i, N) acc[r][i] = mul_add(multiplier, column[i / C][i % C], acc[r][i]);
    }
  } else {
    constexpr int at_once = C % 2 == 0 ? 2 : 1;
    V multiplier[R];
    MHA_EACH(r, R) multiplier[r] = all<V>(rows[r][k]);
    MHA_UNROLL for (int first = 0; first < N; first += at_once) {
      V column[at_once];
      read_columns<V, C, R * N + R + at_once + 1 <= registers>(
          columns[first / C] + place + first % C * V::size, column);
      MHA_EACH(i, at_once) column[i] = kept_in_pair(column[i]);
      MHA_EACH(i, at_once) {
        MHA_EACH(r, R) acc[r][first + i] = mul_add(multiplier[r], column[i], acc[r][first + i]);
      }
    }
  }
}

alignas(64) constexpr float zeros[panel_columns + 16] = {};

// prefetch_in: so many places; 0: the loop prefetches nothing.
template <class V, int R, int B, int C, class Element, int prefetch_in>
MHA_NOCLONE void multiply(const Tile &tile) {
  static_assert(R <= max_tile_rows && B <= max_tile_blocks, "a tile has room for them");
  using Shape = TileShape<V::size>;
  constexpr int N = B * C, lanes = V::size;
  const float *rows[R];
  const Element *columns[B];
  float *sums[B];
  MHA_EACH(r, R) rows[r] = tile.rows[r];
  MHA_EACH(b, B) {
    columns[b] = static_cast<const Element *>(tile.columns[b]);
    sums[b] = tile.sums[b];
  }
  const char *place = tile.prefetch.place, *later_place = place + 2 * tile.prefetch.apart;
  const int64_t step = tile.prefetch.step, apart = tile.prefetch.apart;
  const int64_t terms = tile.terms, column_stride = tile.column_stride,
                sums_stride = tile.sums_stride;
  // Chains that start with +0 load it, so that all kinds of sums have one loop.
  static_assert(C * lanes <= panel_columns + 16, "there are zeros enough");
  const bool extends = tile.mode == Sums::extend;
  // visit(r, sums of row r in each block); the addresses are made when they are needed, for there
  // are no registers for them in the loop.
  const auto for_each_row = [](float *const(&first)[B], int64_t stride, auto visit) MHA_INLINED {
    float *row[B];
    MHA_EACH(b, B) row[b] = opaque(first[b]);
    MHA_EACH(r, R) {
      visit(r, row);
      MHA_EACH(b, B) row[b] = opaque(row[b] + stride);
    }
  };
  for (int64_t repeat = 0; repeat < tile.repeats; ++repeat) {
    int64_t k = 0, at = 0;
    do {
      const int64_t end = min(terms, k + tile.chain);
      V acc[R][N];
      float *start[B];
      MHA_EACH(b, B) start[b] = extends ? sums[b] : const_cast<float *>(zeros);
      for_each_row(start, extends ? sums_stride : 0,
                   [&](int r, float *const(&from)[B]) MHA_INLINED {
                     MHA_EACH(i, N) acc[r][i] = load<V>(from[i / C] + i % C * lanes);
                   });
      put_out_of_order<Element, C>(acc);
      const int64_t begin = k;
      for (; k < end; ++k, at += column_stride) {
        if constexpr (prefetch_in > 0) {
          MHA_PREFETCH_L2(place);
          if constexpr (prefetch_in == 4) {
            MHA_PREFETCH_L2(place + apart);
            MHA_PREFETCH_L2(later_place);
            MHA_PREFETCH_L2(later_place + apart);
            later_place += step;
          }
          if constexpr (R > 4 && Shape::prefetches_own_line) {
            MHA_PREFETCH(columns[0] + at + own_line_terms * column_stride);
          }
          place += step;
        }
        add_term<C>(rows, k, columns, at, acc);
      }
      put_in_order<Element, C>(acc);
      const Sums mode = opaque(tile.mode);
      if (is_same<Element, Int4Number<V>> && B == 1 && mode == Sums::add_scaled) {
        const float *const scales =
            tile.scales + begin / int4_group * panel_columns + (sums[0] - tile.sums[0]);
        for_each_row(sums, sums_stride, [&](int r, float *const(&to)[B]) MHA_INLINED {
          MHA_EACH(i, N)
            acc[r][i] = mul_add(acc[r][i], load<V>(scales + i * lanes), load<V>(to[0] + i * lanes));
        });
      } else if (mode == Sums::add || (mode == Sums::replace && opaque(begin) != 0)) {
        for_each_row(sums, sums_stride, [&](int r, float *const(&to)[B]) MHA_INLINED {
          MHA_EACH(i, N) acc[r][i] = load<V>(to[i / C] + i % C * lanes) + acc[r][i];
        });
      }
      for_each_row(sums, sums_stride, [&](int r, float *const(&to)[B]) MHA_INLINED {
        MHA_EACH(i, N) store(to[i / C] + i % C * lanes, acc[r][i]);
      });
    } while (k < terms);
    MHA_EACH(b, B) {
      columns[b] += tile.next_columns;
      sums[b] += tile.next_sums;
    }
    place += tile.prefetch.skip;
    later_place += tile.prefetch.skip;
  }
}

// A loop for some shape, whatever the columns are stored as.
struct Loop {
  void (*run)(const Tile &tile);
  int64_t rows, blocks, columns;  // columns of a block
  uint32_t places;                // where it prefetches
};

// So many bytes of a stretch of memory, of which a loop with so many terms and repeats prefetches a
// part at each place. Rounded up, for many tiles share a stretch: each must ask for some of it.
MHA_INLINE Prefetch prefetch_stretch(const char *begin, int64_t bytes, const Loop &loop,
                                     int64_t terms, int64_t repeats) {
  // Quicker divisions than those of 64 bits.
  const uint32_t part = (static_cast<uint32_t>(bytes) + loop.places - 1) / loop.places;
  const uint32_t per_repeat =
      (part + static_cast<uint32_t>(repeats) - 1) / static_cast<uint32_t>(repeats);
  const int64_t step =
      (per_repeat + static_cast<uint32_t>(terms) - 1) / static_cast<uint32_t>(terms);
  return {begin, part, step, per_repeat - step * terms};
}

// The columns of the loop, so many bytes of each row, with each term those of a row.
MHA_INLINE Prefetch prefetch_columns(const char *begin, int64_t row_bytes, int64_t bytes,
                                     const Loop &loop, int64_t terms) {
  return {begin, bytes / loop.places, row_bytes, bytes - terms * row_bytes};
}

// One number at a time, all are widened to memory, and nothing waits for it: there are loops for
// floats alone, which prefetch nothing.
template <class V>
constexpr bool has_loops_of_floats_alone = V::size == 1;

// `prefetches` is the choice.
template <class V, int R, int B, int C, Prefetching prefetching, bool only_floats = false>
MHA_INLINE Loop loop_of(Storage storage, bool prefetches) {
  constexpr bool has_one_type = only_floats || has_loops_of_floats_alone<V>;
  constexpr int places = prefetch_places(R, B);
  Loop loop = {nullptr, R, B, C * V::size, places};
  visit_storage(has_one_type ? Storage::f32 : storage, [&](auto stored) MHA_INLINED {
    using Element = typename decltype(stored)::Element;
    constexpr bool is_float = is_same<Element, float>, is_of_int4 = is_same<Element, Int4Number<V>>;
    if constexpr (is_float || !has_one_type) {
      constexpr bool may_choose = is_float || (is_of_int4 && prefetching == Prefetching::weights);
      constexpr bool has_choice =
          prefetching == Prefetching::all || prefetching == Prefetching::weights;
      constexpr int places_always = prefetching != Prefetching::never && !may_choose ? places : 0;
      loop.run = multiply<V, R, B, C, Element, places_always>;
      if constexpr (may_choose && has_choice && !has_loops_of_floats_alone<V>) {
        if (prefetches) loop.run = multiply<V, R, B, C, Element, places>;
      }
    }
  });
  return loop;
}

// 16 columns, the fewest that a loop is made for, are so many vectors.
template <class V>
constexpr int min_vectors = V::size == 1 ? 4 : key_block / V::size;

// How many rows and vectors a tile has: as many accumulators as the registers hold besides the
// operands, and never fewer than the 8 independent chains that two fma units with a latency of 4
// need, where the problem has them.
//
//   max_rows             of a tile; the attention's have attend_rows
//   panels_at_once(R)    of weights, side by side
//   project_vectors(R)   columns of a panel at once; divides a panel
//   score_blocks(R)      blocks of 16 keys at once
//   context_vectors(R)   columns of values at once; those that are left are computed 16 at a time
//   prefetches_own_line  whether loops of many rows that prefetch do so for their own columns too,
//                        which are one line of the cache
//   has_few_row_forms    whether few rows have ways of their own through weights, which take long
//                        code (project.h)
//   exp_vectors          so many run side by side through exp, whose constants take registers too
template <>
struct TileShape<16> {  // AVX-512
  static constexpr int registers = 32;
  static constexpr int max_rows = 8, attend_rows = 6, exp_vectors = 4;
  static constexpr int panels_at_once(int rows) { return rows == 1 ? 2 : 1; }
  static constexpr int project_vectors(int) { return 3; }
  static constexpr int score_blocks(int rows) { return rows == 1 ? 8 : 4; }
  static constexpr int context_vectors(int) { return 4; }
  static constexpr bool prefetches_own_line = false;
  static constexpr bool has_few_row_forms = false;
};

template <>
struct TileShape<8> {  // AVX2
  static constexpr int registers = 16;
  static constexpr int max_rows = 6, attend_rows = 6, exp_vectors = 2;
  static constexpr int panels_at_once(int rows) { return rows == 1 ? 2 : 1; }
  static constexpr int project_vectors(int rows) { return rows <= 2 ? 6 : rows <= 4 ? 3 : 2; }
  static constexpr int score_blocks(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
  static constexpr int context_vectors(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : 2; }
  static constexpr bool prefetches_own_line = true;
  static constexpr bool has_few_row_forms = !is_small_code;
};

template <>
struct TileShape<4> {  // NEON
  static constexpr int registers = 32;
  static constexpr int max_rows = 6, attend_rows = 6, exp_vectors = 2;
  static constexpr int panels_at_once(int) { return 1; }
  static constexpr int project_vectors(int rows) { return rows <= 2 ? 12 : rows <= 4 ? 6 : 4; }
  static constexpr int score_blocks(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
  static constexpr int context_vectors(int) { return 4; }
  static constexpr bool prefetches_own_line = false;
  static constexpr bool has_few_row_forms = false;
};

template <>
struct TileShape<1> {  // scalar
  static constexpr int registers = 32;
  static constexpr int max_rows = 4, attend_rows = 2, exp_vectors = 16;
  static constexpr int panels_at_once(int) { return 1; }
  static constexpr int project_vectors(int) { return 4; }
  static constexpr int score_blocks(int) { return 1; }
  static constexpr int context_vectors(int) { return 4; }
  static constexpr bool prefetches_own_line = false;
  static constexpr bool has_few_row_forms = false;
};

// ---- The loops for so many rows, or a few more

template <int R>
struct Rows {
  static constexpr int count = R;
};

// Calls visit(Rows<R>{}) with the smallest R that loops are made for and that has room for so many
// rows.
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

// Tiles of the attention with more rows have floats: numbers of fewer bits are widened to memory
// for them.
constexpr int max_rows_of_fewer_bits = 4;

struct Loops {
  Loop wide;    // as many columns at once as the registers have room for
  Loop narrow;  // 16 columns, for what is left
};

// Over blocks of 16 keys. Of one or two rows, those that are left are computed with as many at
// once.
template <class V>
MHA_NOINLINE Loops loops_over_keys(int64_t rows, Storage storage, bool prefetches) {
  Loops loops = {};
  visit_rows<TileShape<V::size>::attend_rows>(rows, [&](auto tile) MHA_INLINED {
    constexpr int R = decltype(tile)::count, B = TileShape<V::size>::score_blocks(R),
                  C = key_block / V::size;
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

// Over the columns of values.
template <class V>
MHA_NOINLINE Loops loops_over_values(int64_t rows, Storage storage, bool prefetches) {
  Loops loops = {};
  visit_rows<TileShape<V::size>::attend_rows>(rows, [&](auto tile) MHA_INLINED {
    constexpr int R = decltype(tile)::count, C = TileShape<V::size>::context_vectors(R),
                  least = min_vectors<V>;
    constexpr bool only_floats = R > max_rows_of_fewer_bits;
    loops.wide = loop_of<V, R, 1, C, Prefetching::all, only_floats>(storage, prefetches);
    if constexpr (C == least)
      loops.narrow = loops.wide;
    else
      loops.narrow = loop_of<V, R, 1, least, Prefetching::never, only_floats>(storage, false);
  });
  return loops;
}

// Over the columns of a panel, or of several side by side. A tile or two have more to prefetch for
// each term than one line: where weights come from the memory, the loop over whole rows of a panel
// (AVX-512) does so in four places.
template <class V>
MHA_NOINLINE Loops loops_over_weights(int64_t rows, Storage storage, bool is_one_panel,
                                      bool prefetches, bool prefetches_more) {
  Loops loops = {};
  visit_rows<TileShape<V::size>::max_rows>(rows, [&](auto tile) MHA_INLINED {
    using Shape = TileShape<V::size>;
    constexpr int R = decltype(tile)::count, C = Shape::project_vectors(R),
                  panels = Shape::panels_at_once(R), least = min_vectors<V>;
    constexpr Prefetching prefetching = R == 1 ? Prefetching::never : Prefetching::weights;
    loops.wide = is_one_panel ? loop_of<V, R, 1, C, prefetching>(storage, prefetches)
                              : loop_of<V, R, panels, C, prefetching>(storage, prefetches);
    if constexpr (R > 4 && C * V::size == panel_columns) {
      if (prefetches_more && storage == Storage::f32) {
        loops.wide.run = multiply<V, R, 1, C, float, 4>;
        loops.wide.places = 4;
      }
    }
    if constexpr (C == least)
      loops.narrow = loops.wide;
    else
      loops.narrow = loop_of<V, R, 1, least, Prefetching::never>(storage, false);
  });
  return loops;
}

// Over all columns, which come in 16s, of one block.
MHA_INLINE void run_over_columns(const Loops &loops, int64_t columns, Tile *tile,
                                 int64_t element_bytes) {
  const Loop &loop = loops.wide, &rest = loops.narrow;
  tile->repeats = static_cast<uint32_t>(columns) / static_cast<uint32_t>(loop.columns);
  tile->next_columns = tile->next_sums = loop.columns;
  if (tile->repeats > 0) loop.run(*tile);
  const int64_t done = tile->repeats * loop.columns;
  if (done >= columns) return;
  tile->columns[0] = static_cast<const char *>(tile->columns[0]) + done * element_bytes;
  tile->sums[0] += done;
  if (tile->mode == Sums::add_scaled) tile->scales += done;
  tile->repeats = static_cast<uint32_t>(columns - done + rest.columns - 1) /
                  static_cast<uint32_t>(rest.columns);
  tile->next_columns = tile->next_sums = rest.columns;
  tile->prefetch = no_prefetch(tile->rows[0]);
  rest.run(*tile);
}

}  // namespace
}  // namespace mha
