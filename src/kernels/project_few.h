// Projections of a few rows: the time is that which the weights take to come.
#pragma once

#include "kernels/land.h"
#include "kernels/panels.h"

namespace mha {
namespace {

// Whether the weights are so many that they will come from beyond the level-3 cache.
MHA_INLINE bool is_far(const Projection &p) { return p.depth * p.columns > int64_t{2} << 20; }

// The lines that a loop over some pieces of panels comes to 24 terms later.
template <int pieces>
struct PrefetchPieces {
  const Blocks<float, pieces, panel_columns> &columns;
  MHA_INLINE void step(int64_t k) const {
    MHA_UNROLL for (int i = 0; i < pieces; ++i) __builtin_prefetch(columns.block[i] + (24 + k) * panel_columns, 0, 3);
  }
};

// Neighbouring panels in pieces of so many times 16 columns, then of fewer, from piece `first` on: no more than there are, for the rest
// would have to come from the memory too. take(dot, r, column).
template <class V, int R, int pieces, bool asks_ahead, class Take>
MHA_INLINE void multiply_pieces(int64_t first, int64_t end, const RowPointers<R> &rows, int64_t depth, const float *panels, float *sums,
                                int64_t stride, Take take) {
  constexpr int of_panel = panel_columns / 16, vectors = 16 / V::size, fewer = pieces > 4 ? 4 : pieces / 2;
  for (; end - first >= pieces; first += pieces) {
    Blocks<float, pieces, panel_columns> columns;
    MHA_UNROLL for (int i = 0; i < pieces; ++i) {
      columns.block[i] = panels + (first + i) / of_panel * depth * panel_columns + (first + i) % of_panel * 16;
    }
    const auto take_piece = [&](V dot, int r, int i) { take(dot, r, first * 16 + i * static_cast<int>(V::size)); };
    if constexpr (asks_ahead)
      multiply<R, pieces * vectors, vectors, V>(rows, depth, columns, sums + first * 16, stride, take_piece,
                                                PrefetchPieces<pieces>{columns});
    else
      multiply<R, pieces * vectors, vectors, V>(rows, depth, columns, sums + first * 16, stride, take_piece);
  }
  if constexpr (pieces > 1) multiply_pieces<V, R, fewer, asks_ahead>(first, end, rows, depth, panels, sums, stride, take);
}

// One or two rows: as many panels side by side as fill the registers, or as the memory likes best.
template <class V, int R, bool asks_ahead>
inline void project_narrow(const Projection &p, int64_t row, const float *const *rows, int64_t panel_begin, int64_t panel_end) {
  constexpr int group = 4, pieces = TileShape<V::size>::project_panels(R) * panel_columns / 16;
  constexpr int64_t stride = group * panel_columns;
  alignas(64) float results[R * stride];
  const float *const w = static_cast<const float *>(p.panels);
  RowPointers<R> pointers;
  MHA_UNROLL for (int r = 0; r < R; ++r) pointers.row[r] = rows[r];
  for (int64_t panel = panel_begin; panel < panel_end; panel += group) {
    const int64_t panels = smaller(group, panel_end - panel), first_column = panel * panel_columns;
    const int64_t columns = smaller(panels * panel_columns, p.columns - first_column);
    const float *const bias = p.bias + first_column;
    multiply_pieces<V, R, pieces, asks_ahead>(
        0, (columns + 15) / 16, pointers, p.depth, w + first_column * p.depth, results, stride,
        [&](V dot, int r, int64_t column) { store(results + r * stride + column, canonical(dot + load<V>(bias + column))); });
    land_everywhere<V>(p, row, R, results, stride, panel, panels);
  }
}

// ---- Weights that are stored in fewer bits

// Up to so many tiles of rows are multiplied with them as they are, widened in registers. For more it is better to widen them to memory.
// (Measured on Zen 3 beside that: 3 and 4 tiles take 0.80 to 0.94 of the time.)
template <class V>
constexpr int64_t stored_tiles = V::size == 8 ? 4 : 2;

constexpr int64_t stored_ahead = 4096;  // bytes

// A share of the next block, in three stretches side by side: what PrefetchStretches is to floats.
struct PrefetchStoredShare {
  const unsigned char *p;
  int64_t stretch_bytes, step_bytes;
  MHA_INLINE void step(int64_t k) const {
    MHA_UNROLL for (int i = 0; i < 3; ++i) __builtin_prefetch(p + i * stretch_bytes + k * step_bytes, 0, 2);
  }
};

// A tile of a few rows: number `tile` of `tiles` under the same weights, which are widened in registers, once for all its rows.
template <int R>
struct FewRows {
  RowPointers<R> rows;
  int64_t depth;
  int64_t tile, tiles;
};

// sums [R][P * 48] (+)= dots of terms [k, k + 256) with P panels side by side. (Measured on Zen 3: two panels of 16-bit numbers take 5 to
// 15% less time if they are not asked for, those of int8 a tenth more.)
template <class V, class Element, int R, int P>
MHA_APART void multiply_few(const StoredPanel &panel, const FewRows<R> &few, int64_t k, float *sums) {
  constexpr int C = TileShape<V::size>::project_vectors(R), lanes = V::size, passes = panel_columns / (C * lanes);
  static_assert(P == 1 || passes == 1, "whole panels only lie side by side");
  const Element *const w = panel.at<Element>(k);
  const unsigned char *const here = panel.at<unsigned char>(k);
  const int64_t stretch_bytes = dot_block / 2 * panel.bytes_of_two_terms / 3 / (few.tiles * passes);
  for (int pass = 0; pass < passes; ++pass) {
    const int64_t column = pass * C * lanes, end = smaller(few.depth, k + dot_block);
    const ColumnsOf<Element> columns = {w + column, panel_columns, panel.panel_stride<Element>()};
    V acc[R][P * C];
    clear(acc);
    if constexpr (P > 1 && reads_streams<V> && sizeof(Element) == 2) {
      accumulate<R, P * C, C>(few.rows, columns, k, end, acc, NoPrefetch{});
    } else if constexpr (P > 1) {
      accumulate<R, P * C, C>(few.rows, columns, k, end, acc,
                              PrefetchStored<panel_columns * sizeof(Element), P>{here + stored_ahead, panel.bytes});
    } else {
      const unsigned char *const share = here + dot_block / 2 * panel.bytes_of_two_terms + (few.tile * passes + pass) * 3 * stretch_bytes;
      accumulate<R, C, C>(few.rows, columns, k, end, acc, PrefetchStoredShare{share, stretch_bytes, stretch_bytes / dot_block + 1});
    }
    put_in_order<Element, C>(acc);
    MHA_UNROLL for (int r = 0; r < R; ++r) {
      MHA_UNROLL for (int i = 0; i < P * C; ++i) {
        float *const sum = sums + r * P * panel_columns + column + i * lanes;
        store(sum, k == 0 ? acc[r][i] : load<V>(sum) + acc[r][i]);
      }
    }
  }
}

template <class V, int R, int P>
MHA_APART void multiply_few_codes(const StoredPanel &panel, const FewRows<R> &few, int64_t k, float *sums) {
  constexpr int C = TileShape<V::size>::code_vectors(R), lanes = V::size;
  constexpr int64_t stride = P * panel_columns;
  for (int64_t i = 0; k == 0 && i < R * stride; i += lanes) store(sums + i, all<V>(0.0f));
  for (int column = 0; column < panel_columns; column += C * lanes) {
    multiply_groups<R, P * C, C, V>(
        few.rows, k, smaller(few.depth, k + dot_block),
        ColumnsOf<Int4>{panel.at<Int4>(k) + column, panel_columns, panel.panel_stride<Int4>()}, int4_group / 2 * panel_columns,
        {panel.scales + k / int4_group * panel_columns + column, panel_columns, panel.groups * panel_columns}, sums + column, stride,
        [&](const Int4 *w) {
          return PrefetchStored<panel_columns, P>{reinterpret_cast<const unsigned char *>(w) + stored_ahead, panel.bytes};
        });
  }
}

// Some terms of a stored panel under R rows, for any storage. There may be fewer rows than R: then the sums of the others are nobody's.
template <class V, int R, int P>
inline void multiply_stored(const StoredPanel &panel, const float *const *in, int64_t num_rows, int64_t depth, int64_t k, int64_t tile,
                            int64_t tiles, float *sums) {
  FewRows<R> few = {{}, depth, tile, tiles};
  MHA_UNROLL for (int r = 0; r < R; ++r) few.rows.row[r] = in[r < num_rows ? r : 0];
  switch (panel.storage) {
    case Storage::f16:
      return multiply_few<V, F16, R, P>(panel, few, k, sums);
    case Storage::bf16:
      return multiply_few<V, Bf16, R, P>(panel, few, k, sums);
    case Storage::int8:
      return multiply_few<V, int8_t, R, P>(panel, few, k, sums);
    case Storage::int4:  // half codes do not come here
      if constexpr (!has_half_codes<V>) multiply_few_codes<V, R, P>(panel, few, k, sums);
      return;
    case Storage::f32:
      return;
  }
}

// Up to stored_tiles tiles of rows: the weights are used as they come. Not every number of rows has a shape of its own.
template <class V>
inline void project_stored(const Projection &p, int64_t row, int64_t num_rows, const float *const *rows, int64_t panel, int64_t panel_end) {
  using Shape = TileShape<V::size>;
  constexpr int most_rows = Shape::project_rows, panels_of_one = Shape::project_panels(1), panels_of_two = Shape::project_panels(2);
  alignas(64) float sums[stored_tiles<V> * most_rows * panel_columns];
  static_assert(panels_of_one <= most_rows && 2 * panels_of_two <= most_rows, "the sums have room for each shape");
  constexpr int small_rows = 4;
  const int64_t tiles = (num_rows + most_rows - 1) / most_rows;
  for (int64_t panels = 1; panel < panel_end; panel += panels) {
    const StoredPanel stored(p, panel);
    const bool is_one = num_rows == 1 && panel + panels_of_one <= panel_end, is_two = num_rows == 2 && panel + panels_of_two <= panel_end;
    panels = is_one ? panels_of_one : is_two ? panels_of_two : 1;
    for (int64_t k = 0; k < p.depth; k += dot_block) {
      for (int64_t tile = 0, r = 0, count; r < num_rows; ++tile, r += count) {
        const int64_t left = num_rows - r;
        count = left > most_rows && left <= 2 * small_rows ? small_rows : smaller(left, most_rows);
        float *const to = sums + r * panel_columns;
        if (is_one)
          multiply_stored<V, 1, panels_of_one>(stored, rows, count, p.depth, k, tile, tiles, to);
        else if (is_two)
          multiply_stored<V, 2, panels_of_two>(stored, rows, count, p.depth, k, tile, tiles, to);
        else if (count <= small_rows)
          multiply_stored<V, small_rows, 1>(stored, rows + r, count, p.depth, k, tile, tiles, to);
        else
          multiply_stored<V, most_rows, 1>(stored, rows + r, count, p.depth, k, tile, tiles, to);
      }
    }
    finish_sums<V>(stored, num_rows, panels * panel_columns, sums, panels * panel_columns);
    land_everywhere<V>(p, row, num_rows, sums, panels * panel_columns, panel, panels);
  }
}

// ---- Panels in step
//
// A loop over one panel reads one stretch of the memory. Where streams are read, some panels advance together, slice by slice of a few
// terms, and each loop asks for lines of all of their next slices; what it computes with lies in the first level of the cache, as do the
// sums. (Measured on Zen 3 with 4096 x 4096 weights from the memory: 0.75 of the time for 2 rows, 0.78 for 3 and 4, 0.91 for 6, 0.88 for 8.
// A line is asked for several times; asked for once, it took longer.)

constexpr int64_t slice_terms = 32, most_rows_in_step = 8;

// A share, number `loop` of `loops`, of the next slices of some panels. Where these are fewer than most_panels, as the last ones and those
// of a unit of several threads may be, the last one is asked for again.
template <int most_panels>
struct SliceAhead {
  const char *line[most_panels];
  int64_t step_bytes;

  MHA_INLINE SliceAhead(const unsigned char *next, int64_t panels, int64_t slice_bytes, int64_t panel_bytes, int64_t loop, int64_t loops) {
    step_bytes = (slice_bytes / slice_terms + loops - 1) / loops;
    MHA_UNROLL for (int i = 0; i < most_panels; ++i) {
      line[i] = reinterpret_cast<const char *>(next) + smaller(i, panels - 1) * panel_bytes + loop * slice_terms * step_bytes;
    }
  }
  MHA_INLINE void step(int64_t k) const {
    MHA_UNROLL for (int i = 0; i < most_panels; ++i) __builtin_prefetch(line[i] + k * step_bytes, 0, 3);
  }
};

// sums[r][i] += dots of terms [begin, end) of R rows with C vectors of columns.
template <class V, int R, int C, class Element, class Ahead>
MHA_INLINE void add_slice(const float *const *in, const Element *w, int64_t begin, int64_t end, float *sums, int64_t stride,
                          const Ahead &ahead) {
  RowPointers<R> rows;
  MHA_UNROLL for (int r = 0; r < R; ++r) rows.row[r] = in[r];
  add_in_memory<V, R, C>(rows, ColumnsOf<Element>{w, panel_columns, 0}, begin, end, sums, stride, ahead);
}

// Rows in tiles of R, of which the last one may have some twice.
template <class V, class Element, int R, int most_panels>
MHA_APART void project_in_step(const Projection &p, const RowBlock &rows, int64_t panel_begin, int64_t panel_end) {
  constexpr int C = TileShape<V::size>::project_vectors(R), pass_columns = C * static_cast<int>(V::size),
                passes = panel_columns / pass_columns;
  const float *in[most_rows_in_step];
  for (int64_t r = 0; r < most_rows_in_step; ++r) in[r] = rows.in[smaller(r, rows.count - 1)];
  const int64_t tiles = (rows.count + R - 1) / R;
  // Of a block of 256 terms, and of the blocks before it.
  alignas(64) float block_sums[most_rows_in_step * most_panels * panel_columns], sums[most_rows_in_step * most_panels * panel_columns];
  for (int64_t panel = panel_begin, panels; panel < panel_end; panel += panels) {
    panels = smaller(most_panels, panel_end - panel);
    const StoredPanel stored(p, panel);
    const int64_t stride = panels * panel_columns, count = tiles * R * stride, loops = panels * tiles * passes;
    for (int64_t begin = 0; begin < p.depth; begin += dot_block) {
      const int64_t block_end = smaller(p.depth, begin + dot_block);
      for (int64_t i = 0; i < count; i += V::size) store(block_sums + i, all<V>(0.0f));
      for (int64_t k = begin; k < block_end; k += slice_terms) {
        const int64_t end = smaller(block_end, k + slice_terms), slice_bytes = slice_terms * stored.bytes_of_two_terms / 2;
        const unsigned char *const next =
            stored.first + (end == p.depth ? panels * stored.bytes : k / 2 * stored.bytes_of_two_terms + slice_bytes);
        int64_t loop = 0;
        for (int64_t i = 0; i < panels; ++i) {
          for (int64_t tile = 0; tile < tiles; ++tile) {
            for (int64_t column = 0; column < panel_columns; column += pass_columns, ++loop) {
              add_slice<V, R, C>(in + tile * R, stored.at<Element>(k) + i * stored.panel_stride<Element>() + column, k, end,
                                 block_sums + tile * R * stride + i * panel_columns + column, stride,
                                 SliceAhead<most_panels>(next, panels, slice_bytes, stored.bytes, loop, loops));
            }
          }
        }
      }
      put_in_order<V, Element, C>(block_sums, count);
      for (int64_t i = 0; i < count; i += V::size) {
        const V sum = load<V>(block_sums + i);
        store(sums + i, begin == 0 ? sum : load<V>(sums + i) + sum);
      }
    }
    finish_sums<V>(stored, rows.count, stride, sums, stride);
    land_everywhere<V>(p, rows.first, rows.count, sums, stride, panel, panels);
  }
}

// Whether this way is the faster one, and taken.
template <class V>
MHA_INLINE bool projects_in_step(const Projection &p, const RowBlock &rows, int64_t panel_begin, int64_t panel_end) {
  if constexpr (reads_streams<V>) {
    const int64_t count = rows.count;
    // Tiles of 4 rows gain by it with weights from the third level of the cache, too.
    constexpr int64_t level2_floats = int64_t{1} << 17;
    const bool has_tiles_of_4 = count == 4 || count == 7 || count == 8;
    if (count == 1 || count > most_rows_in_step) return false;
    if (has_tiles_of_4 ? p.depth * p.columns <= level2_floats : !is_far(p)) return false;
    if (p.storage == Storage::f32) {
      if (count == 2)
        project_in_step<V, float, 2, 6>(p, rows, panel_begin, panel_end);
      else if (count == 5 || count == 6)
        project_in_step<V, float, 6, 2>(p, rows, panel_begin, panel_end);
      else if (count <= 4 && is_far(p))
        project_in_step<V, float, 4, 6>(p, rows, panel_begin, panel_end);
      else
        project_in_step<V, float, 4, 3>(p, rows, panel_begin, panel_end);
      return true;
    }
    if (count == 2 && p.storage == Storage::f16) {
      project_in_step<V, F16, 2, 6>(p, rows, panel_begin, panel_end);
      return true;
    }
    if (count == 2 && p.storage == Storage::bf16) {
      project_in_step<V, Bf16, 2, 6>(p, rows, panel_begin, panel_end);
      return true;
    }
  }
  return false;
}

// One or two rows. (Measured: asking ahead takes 3 to 7% more time where a layer's weights stay in a level-2 cache, and 3 to 7% less where
// 1.8 million of them come from the memory. On Zen 3, one row that asks for weights from the memory takes a fifth more.)
template <class V>
MHA_INLINE void project_few(const Projection &p, int64_t row, const RowBlock &rows, int64_t panel_begin, int64_t panel_end) {
  constexpr int64_t near_floats = int64_t{1} << 18;
  if (p.depth * p.columns > near_floats && !(reads_streams<V> && rows.count == 1)) {
    if (rows.count == 1) return project_narrow<V, 1, true>(p, row, rows.in, panel_begin, panel_end);
    return project_narrow<V, 2, true>(p, row, rows.in, panel_begin, panel_end);
  }
  if (rows.count == 1) return project_narrow<V, 1, false>(p, row, rows.in, panel_begin, panel_end);
  return project_narrow<V, 2, false>(p, row, rows.in, panel_begin, panel_end);
}

}  // namespace
}  // namespace mha
