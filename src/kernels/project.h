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

// One register tile: R rows, and `panels` panels side by side (1, or as many as R rows can fill the registers with).
template <class V, int R>
inline void project_tile(const Projection &p, int64_t row, int64_t panel, int64_t panels) {
  using Shape = TileShape<V::size>;
  constexpr int panel_vectors = panel_columns / V::size, vectors = Shape::project_vectors(R), group = Shape::project_panels(R);
  static_assert(panel_vectors % vectors == 0, "a tile divides a panel");

  RowPointers<R> rows;
  int64_t sequence = row / p.x.rows_per_sequence, position = row - sequence * p.x.rows_per_sequence;
  for (int r = 0; r < R; ++r) {
    rows.row[r] = p.x.base + sequence * p.x.batch_stride + position * p.x.row_stride;
    if (++position == p.x.rows_per_sequence) ++sequence, position = 0;
  }

  alignas(64) float values[R * group * panel_columns];
  const int64_t stride = panels * panel_columns;
  const float *const w = p.panels + panel * p.depth * panel_columns;
  const float *const bias = p.bias + panel * panel_columns;
  if (group > 1 && panels == group) {
    multiply<R, group, panel_vectors, V>(rows, p.depth, {w, panel_columns, p.depth * panel_columns}, values, stride, AddBias{bias});
  } else {
    for (int i = 0; i < panel_vectors; i += vectors) {
      const int column = i * static_cast<int>(V::size);
      multiply<R, 1, vectors, V>(rows, p.depth, {w + column, panel_columns, 0}, values + column, stride, AddBias{bias + column});
    }
  }

  const int64_t first_column = panel * panel_columns, num_columns = smaller(stride, p.columns - first_column);
  land<V>(p.landing, p.x.rows_per_sequence, row, R, values, stride, first_column, num_columns);
  if (p.tap.kind != Landing::Kind::none) land<V>(p.tap, p.x.rows_per_sequence, row, R, values, stride, first_column, num_columns);
}

template <class V, int R>
MHA_INLINE void project_tile_of(int64_t rows, const Projection &p, int64_t row, int64_t panel, int64_t panels) {
  if (rows == R) return project_tile<V, R>(p, row, panel, panels);
  if constexpr (R > 1) project_tile_of<V, R - 1>(rows, p, row, panel, panels);
}

// Panel by panel, all rows under it: the panel stays in the cache.
template <class V>
void project(const Projection &p, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
  using Shape = TileShape<V::size>;
  constexpr int tile_rows = Shape::project_rows;
  const int64_t num_rows = row_end - row_begin;
  const int64_t group = num_rows <= 2 ? Shape::project_panels(static_cast<int>(num_rows)) : 1;
  for (int64_t panel = panel_begin; panel < panel_end;) {
    const int64_t panels = panel + group <= panel_end ? group : 1;
    for (int64_t row = row_begin; row < row_end; row += tile_rows) {
      project_tile_of<V, tile_rows>(smaller(tile_rows, row_end - row), p, row, panel, panels);
    }
    panel += panels;
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
