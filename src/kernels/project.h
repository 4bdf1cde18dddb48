// Projections: input rows times packed panels, plus bias, and each column to where the next stage reads it.
#pragma once

#include "kernels/functions.h"
#include "kernels/tile.h"

namespace mha {
namespace {

struct AddBias {
  const float *bias;
  template <class V>
  MHA_INLINE V operator()(V dot, int, int i) const {
    return canonical(dot + load<V>(bias + i * static_cast<int>(V::size)));
  }
};

template <class V>
MHA_INLINE void copy(const float *from, float *to, int64_t count) {
  int64_t i = 0;
  for (; i + static_cast<int64_t>(V::size) <= count; i += V::size) store(to + i, load<V>(from + i));
  for (; i < count; ++i) to[i] = from[i];
}

// Finished values, rows `row`, row + 1, ... of the output and columns first_column, ..., to one landing place.
template <class V>
inline void land(const Landing &to, int64_t rows_per_sequence, int64_t row, int64_t num_rows, const float *values, int64_t values_stride,
                 int64_t first_column, int64_t num_columns) {
  const int64_t first_sequence = row / rows_per_sequence, first_position = row - first_sequence * rows_per_sequence;
  int64_t head = first_column / to.head_width, c = first_column - head * to.head_width;
  for (int64_t done = 0; done < num_columns; ++head, c = 0) {
    const int64_t count = smaller(to.head_width - c, num_columns - done);
    float *const head_base = to.base + head * to.head_stride;
    int64_t sequence = first_sequence, position = first_position;
    for (int64_t r = 0; r < num_rows;) {
      const float *const from = values + r * values_stride + done;
      float *const base = head_base + sequence * to.batch_stride;
      int64_t step = 1;
      if (to.kind == Landing::Kind::rows) {
        copy<V>(from, base + position * to.row_stride + c, count);
      } else {
        const int64_t lane = position % key_block;
        float *const block = base + (position - lane) * to.head_width + c * key_block + lane;
        int64_t i = 0;
        if (r + 4 <= num_rows && lane + 4 <= key_block && position + 4 <= rows_per_sequence) {
          step = 4;
          const float *const row1 = from + values_stride, *const row2 = row1 + values_stride, *const row3 = row2 + values_stride;
          for (; i + 4 <= count; i += 4) transpose4x4(from + i, row1 + i, row2 + i, row3 + i, block + i * key_block, key_block);
        }
        for (; i < count; ++i) {
          for (int64_t s = 0; s < step; ++s) block[i * key_block + s] = from[s * values_stride + i];
        }
      }
      r += step;
      position += step;
      if (position == rows_per_sequence) ++sequence, position = 0;
    }
    done += count;
  }
}

// Terms [begin, begin + 256) of the R rows of tile number `tile` with one panel, while the panel's terms behind them are on their way from
// the memory. How they come depends on how many loops over a block of terms there are. One, which may wait for them, has the lines that it
// needs 48 terms later fetched to the first level. Two share out the next block of terms between them if it comes from beyond the level-3
// cache; otherwise that would hinder the processor's own prefetching. Three and more have the time to fetch it to the second level, a third
// each.
template <class V, int R>
inline void project_tile(const Projection &p, const float *const *rows, int64_t panel, int64_t begin, int64_t tile, int64_t tiles,
                         float *results) {
  constexpr int panel_vectors = panel_columns / V::size, vectors = TileShape<V::size>::project_vectors(R), passes = panel_vectors / vectors;
  static_assert(panel_vectors % vectors == 0, "a tile divides a panel");
  constexpr int64_t line = 16, near = 48 * panel_columns, far_weights = int64_t{4} << 20;  // floats
  RowPointers<R> pointers;
  MHA_UNROLL for (int r = 0; r < R; ++r) pointers.row[r] = rows[r];
  const float *const w = p.panels + (panel * p.depth) * panel_columns, *const bias = p.bias + panel * panel_columns;
  const float *const here = w + begin * panel_columns, *const next = here + dot_block * panel_columns;
  for (int pass = 0; pass < passes; ++pass) {
    const int column = pass * vectors * static_cast<int>(V::size);
    const auto run = [&](auto ahead) {
      multiply_block<R, 1, vectors, V>(pointers, begin, p.depth, {w + column, panel_columns, 0}, results + column, panel_columns,
                                       AddBias{bias + column}, ahead);
    };
    const int64_t loops = tiles * passes, loop = tile * passes + pass;
    if (loops > 2)
      run(Prefetch<1, 2>{next + loop % 3 * dot_block * line});
    else if (loops == 1 || p.depth * p.columns < far_weights)
      run(Prefetch<3, 1>{here + near});
    else if (loop == 0)
      run(Prefetch<2, 1>{next});
    else
      run(Prefetch<1, 1>{next + 2 * dot_block * line});
  }
}

template <class V, int R>
MHA_INLINE void project_tile_of(int64_t num_rows, const Projection &p, const float *const *rows, int64_t panel, int64_t begin, int64_t tile,
                                int64_t tiles, float *results) {
  if (num_rows == R) return project_tile<V, R>(p, rows, panel, begin, tile, tiles, results);
  if constexpr (R > 1) project_tile_of<V, R - 1>(num_rows, p, rows, panel, begin, tile, tiles, results);
}

// Where the results of up to project_block_rows rows go.
template <class V>
MHA_INLINE void land_everywhere(const Projection &p, int64_t row, int64_t num_rows, const float *results, int64_t stride, int64_t panel,
                                int64_t panels) {
  const int64_t first_column = panel * panel_columns, num_columns = smaller(panels * panel_columns, p.columns - first_column);
  land<V>(p.landing, p.x.rows_per_sequence, row, num_rows, results, stride, first_column, num_columns);
  if (p.tap.kind != Landing::Kind::none) land<V>(p.tap, p.x.rows_per_sequence, row, num_rows, results, stride, first_column, num_columns);
}

// One or two rows: so many panels side by side as fill the registers.
template <class V, int R>
inline void project_narrow(const Projection &p, int64_t row, const float *const *rows, int64_t panel_begin, int64_t panel_end) {
  constexpr int group = TileShape<V::size>::project_panels(R), panel_vectors = panel_columns / V::size;
  alignas(64) float results[R * group * panel_columns];
  RowPointers<R> pointers;
  MHA_UNROLL for (int r = 0; r < R; ++r) pointers.row[r] = rows[r];
  int64_t panel = panel_begin;
  for (; panel + group <= panel_end; panel += group) {
    multiply<R, group, panel_vectors, V>(pointers, p.depth,
                                         {p.panels + panel * p.depth * panel_columns, panel_columns, p.depth * panel_columns}, results,
                                         group * panel_columns, AddBias{p.bias + panel * panel_columns});
    land_everywhere<V>(p, row, R, results, group * panel_columns, panel, group);
  }
  for (; panel < panel_end; ++panel) {
    for (int64_t k = 0; k < p.depth; k += dot_block) project_tile<V, R>(p, rows, panel, k, 0, 1, results);
    land_everywhere<V>(p, row, R, results, panel_columns, panel, 1);
  }
}

// Panel by panel, 256 terms by 256 terms, all rows under them: these 48 KiB stay in the cache while the rows pass.
template <class V>
void project(const Projection &p, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
  constexpr int tile_rows = TileShape<V::size>::project_rows;
  const float *rows[project_block_rows];
  for (int64_t row = row_begin; row < row_end; row += project_block_rows) {
    const int64_t num_rows = smaller(project_block_rows, row_end - row);
    int64_t sequence = row / p.x.rows_per_sequence, position = row - sequence * p.x.rows_per_sequence;
    for (int64_t r = 0; r < num_rows; ++r) {
      rows[r] = p.x.base + sequence * p.x.batch_stride + position * p.x.row_stride;
      if (++position == p.x.rows_per_sequence) ++sequence, position = 0;
    }
    if (num_rows == 1) {
      project_narrow<V, 1>(p, row, rows, panel_begin, panel_end);
      continue;
    }
    if (num_rows == 2) {
      project_narrow<V, 2>(p, row, rows, panel_begin, panel_end);
      continue;
    }
    const int64_t tiles = (num_rows + tile_rows - 1) / tile_rows;
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
      alignas(64) float results[project_block_rows * panel_columns];
      for (int64_t k = 0; k < p.depth; k += dot_block) {
        for (int64_t tile = 0, first = 0; tile < tiles; ++tile) {
          // Full tiles, but none of one or two rows after them: these would leave the machine half idle.
          const int64_t left = num_rows - first;
          const int64_t tile_size = left > tile_rows && left < tile_rows + 3 ? (left + 1) / 2 : smaller(left, tile_rows);
          project_tile_of<V, tile_rows>(tile_size, p, rows + first, panel, k, tile, tiles, results + first * panel_columns);
          first += tile_size;
        }
      }
      land_everywhere<V>(p, row, num_rows, results, panel_columns, panel, 1);
    }
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
      land<V>(p.landing, p.x.rows_per_sequence, row, rows, values, width, column, count);
      if (p.tap.kind != Landing::Kind::none) land<V>(p.tap, p.x.rows_per_sequence, row, rows, values, width, column, count);
    }
  }
}

}  // namespace
}  // namespace mha
