// Projections: input rows times packed panels, plus bias, and each column to where the next stage reads it.
#pragma once

#include "kernels/functions.h"
#include "kernels/tile.h"

namespace mha {
namespace {

template <class V>
MHA_INLINE void copy(const float *from, float *to, int64_t count) {
  int64_t i = 0;
  for (; i + static_cast<int64_t>(V::size) <= count; i += V::size) store(to + i, load<V>(from + i));
  for (; i < count; ++i) to[i] = from[i];
}

// The row of a sequence that a row of a projection is.
struct Cursor {
  int64_t sequence;
  int64_t row;       // of the caller's array
  int64_t position;  // among the valid rows
};

// Row number `row` of all sequences together.
MHA_INLINE Cursor cursor_at(const InputRows &x, int64_t row) {
  if (!x.extents) {
    const int64_t sequence = quotient(row, x.rows_per_sequence), position = row - sequence * x.rows_per_sequence;
    return {sequence, position, position};
  }
  int64_t sequence = 0;
  while (row >= x.extents[sequence].before + x.extents[sequence].count) ++sequence;
  const int64_t position = row - x.extents[sequence].before;
  return {sequence, x.extents[sequence].first + position, position};
}

MHA_INLINE int64_t rows_left(const InputRows &x, const Cursor &at) {
  return (x.extents ? x.extents[at.sequence].count : x.rows_per_sequence) - at.position;
}

// `step` rows on, where there are more.
MHA_INLINE void advance(const InputRows &x, Cursor *at, int64_t step, bool has_more) {
  at->row += step;
  at->position += step;
  if (!has_more || rows_left(x, *at) > 0) return;
  do ++at->sequence;
  while (x.extents && x.extents[at->sequence].count == 0);
  at->position = 0;
  at->row = x.extents ? x.extents[at->sequence].first : 0;
}

// Finished values, rows `row`, row + 1, ... of the output and columns first_column, ..., to one landing place.
template <class V>
inline void land(const Landing &to, const InputRows &x, int64_t row, int64_t num_rows, const float *values, int64_t values_stride,
                 int64_t first_column, int64_t num_columns) {
  const Cursor first = cursor_at(x, row);
  int64_t head = quotient(first_column, to.head_width), c = first_column - head * to.head_width;
  for (int64_t done = 0; done < num_columns; ++head, c = 0) {
    const int64_t count = smaller(to.head_width - c, num_columns - done);
    float *const head_base = to.base + head * to.head_stride;
    Cursor at = first;
    for (int64_t r = 0; r < num_rows;) {
      const float *const from = values + r * values_stride + done;
      float *const base = head_base + at.sequence * to.batch_stride;
      int64_t step = 1;
      if (to.kind != Landing::Kind::key_blocks) {
        copy<V>(from, base + (to.kind == Landing::Kind::rows ? at.row : at.position) * to.row_stride + c, count);
      } else {
        const int64_t lane = at.position % key_block;
        float *const block = base + (at.position - lane) * to.head_width + c * key_block + lane;
        int64_t i = 0;
        if (r + 4 <= num_rows && lane + 4 <= key_block && rows_left(x, at) >= 4) {
          step = 4;
          const float *const row1 = from + values_stride, *const row2 = row1 + values_stride, *const row3 = row2 + values_stride;
          for (; i + 4 <= count; i += 4) transpose4x4(from + i, row1 + i, row2 + i, row3 + i, block + i * key_block, key_block);
        }
        for (; i < count; ++i) {
          for (int64_t s = 0; s < step; ++s) block[i * key_block + s] = from[s * values_stride + i];
        }
      }
      r += step;
      advance(x, &at, step, r < num_rows);
    }
    done += count;
  }
}

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
  const float *w;
  const float *const *rows;
  int64_t depth;
  int64_t vectors;  // of the panel's columns, the last one maybe partly filled
  bool is_far;      // the weights are so many that they will come from beyond the level-3 cache
};

template <class V, int R, int C, class Ahead>
MHA_INLINE void multiply_panel(const PanelTask &task, int64_t begin, int64_t vector, float *sums, const Destination<V> &to, Ahead ahead) {
  const int64_t column = vector * static_cast<int64_t>(V::size);
  RowPointers<R> rows;
  MHA_UNROLL for (int r = 0; r < R; ++r) rows.row[r] = task.rows[r];
  multiply_block<R, C, C, V>(rows, begin, task.depth, Columns{task.w + column, panel_columns, 0}, sums + column, panel_columns,
                             Destination<V>{to.bias + column, to.to, to.offset + vector}, ahead);
}

// What is left of a panel that is not full.
template <class V, int R, int C>
MHA_INLINE void multiply_panel_tail(const PanelTask &task, int64_t begin, int64_t vector, float *sums, const Destination<V> &to) {
  if (task.vectors - vector == C) return multiply_panel<V, R, C>(task, begin, vector, sums, to, NoPrefetch{});
  if constexpr (C > 1) multiply_panel_tail<V, R, C - 1>(task, begin, vector, sums, to);
}

// Terms [begin, begin + 256) of the R rows of tile number `tile` with one panel, while the panel's terms behind them are on their way from
// the memory. How they come depends on how many loops over a block of terms there are. One, which may wait for them, has the lines that it
// needs 48 terms later fetched to the first level. Two share out the next block of terms between them if it comes from beyond the level-3
// cache; otherwise that would hinder the processor's own prefetching. Three and more have the time to fetch it to the second level, a third
// each.
template <class V, int R>
inline void project_tile(const PanelTask &task, int64_t begin, int64_t tile, int64_t tiles, float *sums, const Destination<V> &to) {
  constexpr int panel_vectors = panel_columns / V::size, C = TileShape<V::size>::project_vectors(R), passes = panel_vectors / C;
  static_assert(panel_vectors % C == 0, "a tile divides a panel");
  constexpr int64_t line = 16, near = 48 * panel_columns;  // floats
  const float *const here = task.w + begin * panel_columns, *const next = here + dot_block * panel_columns;
  int64_t vector = 0;
  for (; vector + C <= task.vectors; vector += C) {
    const int64_t loops = tiles * passes, loop = tile * passes + vector / C;
    if (loops > 2)
      multiply_panel<V, R, C>(task, begin, vector, sums, to, Prefetch<1, 2>{next + loop % 3 * dot_block * line});
    else if (loops == 1 || !task.is_far)
      multiply_panel<V, R, C>(task, begin, vector, sums, to, Prefetch<3, 1>{here + near});
    else if (loop == 0)
      multiply_panel<V, R, C>(task, begin, vector, sums, to, Prefetch<2, 1>{next});
    else
      multiply_panel<V, R, C>(task, begin, vector, sums, to, Prefetch<1, 1>{next + 2 * dot_block * line});
  }
  if constexpr (C > 1) multiply_panel_tail<V, R, C - 1>(task, begin, vector, sums, to);
}

template <class V, int R>
MHA_INLINE void project_tile_of(int64_t num_rows, const PanelTask &task, int64_t begin, int64_t tile, int64_t tiles, float *sums,
                                const Destination<V> &to) {
  if (num_rows == R) return project_tile<V, R>(task, begin, tile, tiles, sums, to);
  if constexpr (R > 1) project_tile_of<V, R - 1>(num_rows, task, begin, tile, tiles, sums, to);
}

// Finished values in rows of `stride` floats to where they are wanted.
template <class V>
MHA_INLINE void land_everywhere(const Projection &p, int64_t row, int64_t num_rows, const float *results, int64_t stride, int64_t panel,
                                int64_t panels) {
  const int64_t first_column = panel * panel_columns, num_columns = smaller(panels * panel_columns, p.columns - first_column);
  land<V>(p.landing, p.x, row, num_rows, results, stride, first_column, num_columns);
  if (p.tap.kind != Landing::Kind::none) land<V>(p.tap, p.x, row, num_rows, results, stride, first_column, num_columns);
}

// Up to `lines` times 16 columns of neighbouring panels: no more than there are, for the rest would have to come from the memory too.
template <class V, int R, int lines, class Take>
MHA_INLINE void multiply_lines(int64_t wanted, const RowPointers<R> &rows, int64_t depth, const Columns &columns, float *sums,
                               int64_t stride, Take take) {
  if (wanted == lines) return multiply<R, lines * 16 / V::size, panel_columns / V::size, V>(rows, depth, columns, sums, stride, take);
  if constexpr (lines > 1) multiply_lines<V, R, lines - 1>(wanted, rows, depth, columns, sums, stride, take);
}

// One or two rows: as many panels side by side as fill the registers.
template <class V, int R>
inline void project_narrow(const Projection &p, int64_t row, const float *const *rows, int64_t panel_begin, int64_t panel_end) {
  constexpr int group = TileShape<V::size>::project_panels(R);
  constexpr int64_t stride = group * panel_columns;
  alignas(64) float results[R * stride];
  RowPointers<R> pointers;
  MHA_UNROLL for (int r = 0; r < R; ++r) pointers.row[r] = rows[r];
  for (int64_t panel = panel_begin; panel < panel_end; panel += group) {
    const int64_t panels = smaller(group, panel_end - panel), first_column = panel * panel_columns;
    const int64_t columns = smaller(panels * panel_columns, p.columns - first_column);
    const float *const bias = p.bias + first_column;
    multiply_lines<V, R, group * panel_columns / 16>((columns + 15) / 16, pointers, p.depth,
                                                     Columns{p.panels + first_column * p.depth, panel_columns, p.depth * panel_columns},
                                                     results, stride, [&](V dot, int r, int i) {
                                                       const int64_t column = i * static_cast<int>(V::size);
                                                       store(results + r * stride + column, canonical(dot + load<V>(bias + column)));
                                                     });
    land_everywhere<V>(p, row, R, results, stride, panel, panels);
  }
}

// Up to project_block_rows input rows, and where their results go if that is rows too.
struct RowBlock {
  int64_t first, count;
  const float *in[project_block_rows];
  float *out[project_block_rows];

  MHA_INLINE RowBlock(const Projection &p, int64_t begin, int64_t end) : first(begin), count(smaller(project_block_rows, end - begin)) {
    Cursor at = cursor_at(p.x, begin);
    const bool by_row = p.landing.kind == Landing::Kind::rows;
    for (int64_t r = 0; r < count; ++r) {
      in[r] = p.x.base + at.sequence * p.x.batch_stride + at.row * p.x.row_stride;
      out[r] = p.landing.base + at.sequence * p.landing.batch_stride + (by_row ? at.row : at.position) * p.landing.row_stride;
      advance(p.x, &at, 1, r + 1 < count);
    }
  }
};

// One panel, 256 terms by 256 terms, all rows under them: these 48 KiB stay in the cache while the rows pass.
template <class V>
inline void project_panel(const Projection &p, const RowBlock &rows, int64_t panel) {
  constexpr int tile_rows = TileShape<V::size>::project_rows;
  constexpr int64_t lanes = V::size, far_floats = int64_t{2} << 20;
  const int64_t first_column = panel * panel_columns, columns = smaller(panel_columns, p.columns - first_column);
  const float *const w = p.panels + panel * p.depth * panel_columns;
  alignas(64) float sums[project_block_rows * panel_columns];

  // Whole vectors that stay within a head go straight to their rows, all else by way of `sums`.
  const bool is_direct = p.landing.kind != Landing::Kind::key_blocks && p.tap.kind == Landing::Kind::none && columns % lanes == 0 &&
                         (p.landing.head_width % lanes == 0 || p.landing.head_width == p.columns);
  int64_t offset[panel_columns / lanes];
  float *by_way[project_block_rows];
  for (int64_t i = 0; i * lanes < columns; ++i) {
    const int64_t column = first_column + i * lanes, head = quotient(column, p.landing.head_width);
    offset[i] = is_direct ? head * p.landing.head_stride + column - head * p.landing.head_width : i * lanes;
  }
  for (int64_t r = 0; !is_direct && r < rows.count; ++r) by_way[r] = sums + r * panel_columns;

  const int64_t tiles = (rows.count + tile_rows - 1) / tile_rows;
  for (int64_t k = 0; k < p.depth; k += dot_block) {
    for (int64_t tile = 0, r = 0; tile < tiles; ++tile) {
      // Full tiles, but none of one or two rows after them: these would leave the machine half idle.
      const int64_t left = rows.count - r;
      const int64_t size = left > tile_rows && left < tile_rows + 3 ? (left + 1) / 2 : smaller(left, tile_rows);
      const PanelTask task = {w, rows.in + r, p.depth, (columns + lanes - 1) / lanes, p.depth * p.columns > far_floats};
      const Destination<V> to = {p.bias + first_column, is_direct ? rows.out + r : by_way + r, offset};
      project_tile_of<V, tile_rows>(size, task, k, tile, tiles, sums + r * panel_columns, to);
      // Tile by tile, so that the memory can take the results in while the next tile is computed.
      if (!is_direct && k + dot_block >= p.depth) {
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
    if constexpr (V::size > 1) {
      if (rows.count == 1) return project_narrow<V, 1>(p, row, rows.in, panel_begin, panel_end);
      if (rows.count == 2) return project_narrow<V, 2>(p, row, rows.in, panel_begin, panel_end);
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
