// Projections: input rows times packed panels, plus bias, and each column to where the next stage reads it.
#pragma once

#include "kernels/half_codes.h"
#include "kernels/project_few.h"

namespace mha {
namespace {

// Where a tile's finished values go: row r's vector i to to[r] + offset[i].
template <class V>
struct Destination {
  const float *bias;
  float *const *to;
  const int64_t *offset;
  MHA_INLINE void operator()(V dot, int r, int i) const {
    store(to[r] + offset[i], canonical(dot + load<V>(bias + i * static_cast<int>(V::size))));
  }
};

// Some rows and one panel on their way through its blocks of terms.
struct PanelTask {
  const float *block;   // of terms
  const char *next;     // what will be wanted after it, to be asked for while this one is computed with
  uint32_t term_bytes;  // of that
  const float *const *rows;
  int64_t depth;
  int64_t vectors;  // of the panel's columns, the last one maybe partly filled
  bool is_far;
};

template <class V, int R, int C, class Ahead>
MHA_INLINE void multiply_panel(const PanelTask &task, int64_t begin, int64_t vector, float *sums, const Destination<V> &to, Ahead ahead) {
  const int64_t column = vector * static_cast<int64_t>(V::size);
  RowPointers<R> rows;
  MHA_UNROLL for (int r = 0; r < R; ++r) rows.row[r] = task.rows[r];
  multiply_block<R, C, C, V>(rows, begin, task.depth, Columns{task.block + column, panel_columns, 0}, sums + column, panel_columns,
                             Destination<V>{to.bias + column, to.to, to.offset + vector}, ahead);
}

// Of a panel that is not full, what C vectors at a time leave: half as many at a time, unless these would be too few chains of operations.
template <int R>
constexpr int fewer_vectors(int C) {
  return C == 3 && R < 8 ? 2 : C / 2;
}

template <class V, int R, int C>
MHA_INLINE void multiply_panel_tail(const PanelTask &task, int64_t begin, int64_t vector, float *sums, const Destination<V> &to) {
  for (; vector + C <= task.vectors; vector += C) multiply_panel<V, R, C>(task, begin, vector, sums, to, NoPrefetch{});
  if constexpr (C > 1) multiply_panel_tail<V, R, fewer_vectors<R>(C)>(task, begin, vector, sums, to);
}

// How the weights come from the memory while they are computed with. The requests under way are few, and what the loop itself reads beyond
// the first level of the cache needs places among them: so they are spread over all loops evenly.

// The lines that the loop itself comes to 48 terms later, one stretch of memory for all of them.
struct PrefetchOwn {
  const float *p;
  MHA_INLINE void step(int64_t k) const {
    MHA_UNROLL for (int64_t i = 0; i < panel_columns; i += 16) __builtin_prefetch(p + (48 + k) * panel_columns + i, 0, 3);
  }
};

// A loop's share of the next block of terms; with AVX2, whose loops over full tiles read one line at a step, also the line that it comes to
// itself 8 terms later, which lies in the second level of the cache. (Measured on Zen 3: 2 to 4% less time. AVX-512 has not been tried.)
template <bool has_own>
struct PrefetchShare {
  const char *p;
  int64_t step_bytes;
  const float *own;
  MHA_INLINE void step(int64_t k) const {
    __builtin_prefetch(p + k * step_bytes, 0, 2);
    if constexpr (has_own) __builtin_prefetch(own + (8 + k) * panel_columns, 0, 3);
  }
};

// The same in several stretches side by side: together the loops over a block have 6 of them. (Measured: from beyond the caches, blocks
// come 1.05 to 1.15 times as fast as in one stretch; from the third level more slowly.)
constexpr int far_stretches = 6;

template <int stretches>
struct PrefetchStretches {
  static constexpr int64_t bytes = dot_block * panel_columns * static_cast<int64_t>(sizeof(float)) / far_stretches;
  const char *p;
  MHA_INLINE void step(int64_t k) const {
    MHA_UNROLL for (int i = 0; i < stretches; ++i) __builtin_prefetch(p + i * bytes + k * (bytes / dot_block), 0, 2);
  }
};

// Terms [begin, begin + 256) of the R rows of tile number `tile` with one panel, while what comes after them is on its way.
template <class V, int R>
inline void project_tile(const PanelTask &task, int64_t begin, int64_t tile, int64_t tiles, float *sums, const Destination<V> &to) {
  constexpr int panel_vectors = panel_columns / V::size, C = TileShape<V::size>::project_vectors(R), passes = panel_vectors / C;
  static_assert(panel_vectors % C == 0, "a tile divides a panel");
  const uint32_t loops = static_cast<uint32_t>(tiles * passes), step_bytes = (task.term_bytes + loops - 1) / loops;
  const int64_t share_bytes = smaller(dot_block, task.depth - begin) * step_bytes;
  int64_t vector = 0;
  for (; vector + C <= task.vectors; vector += C) {
    const char *const share = task.next + (tile * passes + vector / C) * share_bytes;
    // Where streams are read, so few loops do not come here.
    const bool has_stretches = !reads_streams<V> && task.is_far && loops <= 3;
    if (V::size == 1)
      multiply_panel<V, R, C>(task, begin, vector, sums, to, NoPrefetch{});
    else if (loops == 1 && !task.is_far)
      multiply_panel<V, R, C>(task, begin, vector, sums, to, PrefetchOwn{task.block});
    else if (has_stretches && loops == 1)
      multiply_panel<V, R, C>(task, begin, vector, sums, to, PrefetchStretches<far_stretches>{share});
    else if (has_stretches && loops == 2)
      multiply_panel<V, R, C>(task, begin, vector, sums, to, PrefetchStretches<far_stretches / 2>{share});
    else if (has_stretches)
      multiply_panel<V, R, C>(task, begin, vector, sums, to, PrefetchStretches<far_stretches / 3>{share});
    else
      multiply_panel<V, R, C>(task, begin, vector, sums, to,
                              PrefetchShare<reads_streams<V>>{share, step_bytes, task.block + vector * static_cast<int>(V::size)});
  }
  if constexpr (C > 1) multiply_panel_tail<V, R, fewer_vectors<R>(C)>(task, begin, vector, sums, to);
}

// Tiles have 1, 2, 3, 4, 6 or 8 rows (one number at a time: 1, 2 or 4): where there are fewer, the last one is computed twice.
template <class V, int R>
MHA_INLINE void project_tile_of(int64_t num_rows, const PanelTask &task, int64_t begin, int64_t tile, int64_t tiles, float *sums,
                                const Destination<V> &to) {
  constexpr int fewer = R > 4 || V::size == 1 ? greater(1, R - 2) : R - 1;
  if constexpr (R > 1) {
    if (num_rows <= fewer) return project_tile_of<V, fewer>(num_rows, task, begin, tile, tiles, sums, to);
  }
  project_tile<V, R>(task, begin, tile, tiles, sums, to);
}

alignas(64) constexpr float no_bias[panel_columns] = {};

// Int4 weights whose codes have been widened, under all rows: R rows at a time.
template <class V>
inline void multiply_widened_codes(const StoredPanel &panel, const RowBlock &rows, int64_t begin, int64_t end, const float *widened,
                                   const unsigned char *next, float *sums) {
  constexpr int R = TileShape<V::size>::project_rows, C = TileShape<V::size>::project_vectors(R);
  static_assert(project_block_rows % R == 0, "there is room for the sums of a whole last tile");
  for (int64_t i = 0; begin == 0 && i < (rows.count + R - 1) / R * R * panel_columns; i += V::size) store(sums + i, all<V>(0.0f));
  for (int64_t r = 0; r < rows.count; r += R) {
    RowPointers<R> tile;
    MHA_UNROLL for (int i = 0; i < R; ++i) tile.row[i] = rows.in[r + i < rows.count ? r + i : r];
    for (int column = 0; column < panel_columns; column += C * static_cast<int>(V::size)) {
      multiply_groups<R, C, C, V>(tile, begin, end, Columns{widened + column, panel_columns, 0}, int4_group * panel_columns,
                                  {panel.scales + begin / int4_group * panel_columns + column, panel_columns, 0},
                                  sums + r * panel_columns + column, panel_columns, [&](const float *w) {
                                    return PrefetchStored<panel_columns / 2, 1>{next + (w - widened) / 2, 0};
                                  });
    }
  }
}

// One panel, 256 terms by 256 terms, all rows under them: these 48 KiB stay in the cache while the rows pass. Weights that are stored in
// fewer bits are widened to them first, once for all rows.
template <class V>
inline void project_panel(const Projection &p, const RowBlock &rows, int64_t panel) {
  constexpr int tile_rows = TileShape<V::size>::project_rows;
  constexpr int64_t lanes = V::size, even_rows = tile_rows - 2;
  const int64_t first_column = panel * panel_columns, columns = smaller(panel_columns, p.columns - first_column);
  const StoredPanel stored(p, panel);
  const bool is_widened = p.storage != Storage::f32, is_scaled = p.scales != nullptr;
  alignas(64) float sums[(project_block_rows + RowBlock::spare) * panel_columns], widened[dot_block * panel_columns];

  // Whole vectors that stay within a head go straight to their rows, all else by way of `sums`.
  const bool is_direct = p.landing.kind != Landing::Kind::key_blocks && p.tap.kind == Landing::Kind::none && columns % lanes == 0 &&
                         (p.landing.head_width % lanes == 0 || p.landing.head_width == p.columns) && !is_scaled;
  int64_t offset[panel_columns / lanes];
  float *by_way[project_block_rows + RowBlock::spare];
  for (int64_t i = 0; i * lanes < columns; ++i) {
    const int64_t column = first_column + i * lanes, head = quotient(column, p.landing.head_width);
    offset[i] = is_direct ? head * p.landing.head_stride + column - head * p.landing.head_width : i * lanes;
  }
  for (int64_t r = 0; !is_direct && r < rows.count + RowBlock::spare; ++r) by_way[r] = sums + r * panel_columns;

  const int64_t tiles = (rows.count + tile_rows - 1) / tile_rows;
  for (int64_t k = 0; k < p.depth; k += dot_block) {
    const int64_t end = smaller(p.depth, k + dot_block);
    const unsigned char *const here = stored.at<unsigned char>(k), *const next = stored.at<unsigned char>(end + end % 2);
    if (is_widened) widen<V>(stored, k, end - k, widened);
    if constexpr (!has_half_codes<V>) {
      if (p.storage == Storage::int4) {
        multiply_widened_codes<V>(stored, rows, k, end, widened, next, sums);
        if (end == p.depth) {
          finish_sums<V>(stored, rows.count, columns, sums, panel_columns);
          land_everywhere<V>(p, rows.first, rows.count, sums, panel_columns, panel, 1);
        }
        continue;
      }
    }
    for (int64_t tile = 0, r = 0; tile < tiles; ++tile) {
      // Full tiles, but no small one after them, which would leave the machine half idle.
      const int64_t left = rows.count - r;
      const int64_t size = left > tile_rows && left <= 2 * even_rows ? even_rows : smaller(left, tile_rows);
      const PanelTask task = {is_widened ? widened : reinterpret_cast<const float *>(here),
                              reinterpret_cast<const char *>(next),
                              static_cast<uint32_t>(stored.bytes_of_two_terms / 2),
                              rows.in + r,
                              p.depth,
                              (columns + lanes - 1) / lanes,
                              !is_widened && is_far(p)};
      const Destination<V> to = {is_scaled ? no_bias : stored.bias, is_direct ? rows.out + r : by_way + r, offset};
      project_tile_of<V, tile_rows>(size, task, k, tile, tiles, sums + r * panel_columns, to);
      // Tile by tile, so that the memory can take the results in while the next tile is computed.
      if (!is_direct && end == p.depth) {
        if (is_scaled) finish_sums<V>(stored, size, columns, sums + r * panel_columns, panel_columns);
        land_everywhere<V>(p, rows.first + r, size, sums + r * panel_columns, panel_columns, panel, 1);
      }
      r += size;
    }
  }
}

template <class V>
void project(const Projection &p, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
  for (int64_t row = row_begin; row < row_end; row += project_block_rows) {
    const RowBlock rows(p, row, row_end);
    if constexpr (has_half_codes<V>) {
      if (p.storage == Storage::int4) {
        for (int64_t panel = panel_begin; panel < panel_end; ++panel) project_half_codes<V>(p, rows, panel);
        continue;
      }
    }
    if constexpr (V::size > 1) {
      if (projects_in_step<V>(p, rows, panel_begin, panel_end)) return;
      if (p.storage == Storage::f32) {
        if (rows.count <= 2) return project_few<V>(p, row, rows, panel_begin, panel_end);
      } else if (rows.count <= stored_tiles<V> * TileShape<V::size>::project_rows) {
        return project_stored<V>(p, row, rows.count, rows.in, panel_begin, panel_end);
      }
    }
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) project_panel<V>(p, rows, panel);
  }
}

// The second half of project, for a product that a BLAS has made.
template <class V>
void finish_rows(const Projection &p, const float *product, int64_t product_stride, int64_t row_begin, int64_t row_end) {
  constexpr int64_t width = 256;
  alignas(64) float values[4 * width];
  for (int64_t row = row_begin; row < row_end; row += 4) {
    const int64_t rows = smaller(4, row_end - row);
    for (int64_t column = 0; column < p.columns; column += width) {
      const int64_t count = smaller(width, p.columns - column);
      for (int64_t r = 0; r < rows; ++r) {
        const float *const from = product + (row - row_begin + r) * product_stride + column;
        for (int64_t i = 0; i < count; ++i) values[r * width + i] = canonical(from[i] + p.bias[column + i]);
      }
      land<V>(p.landing, p.x, row, rows, values, width, column, count);
      if (p.tap.kind != Landing::Kind::none) land<V>(p.tap, p.x, row, rows, values, width, column, count);
    }
  }
}

}  // namespace
}  // namespace mha
