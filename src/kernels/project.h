// Projections: input rows times packed panels, plus bias, and each column to where the next stage reads it.
//
// For each block of rows, panel by panel; for each block of 256 terms (CONTRACT.md, section 3), tile by tile. These 48 KiB of weights stay
// in the cache while the rows pass. Sums lie in memory, [row][column of the panels]; they are finished and written to their destination
// when all terms are done.
#pragma once

#include "destinations.h"
#include "panels.h"
#include "rows.h"

namespace mha {
namespace {

// How many rows the next tile has: a full one, but none that leaves so few that they have too few chains to keep the machine busy.
template <class V>
MHA_INLINE int64_t next_tile_rows(int64_t left) {
  constexpr int64_t most = TileShape<V::size>::max_rows, too_few = 2 * TileShape<V::size>::project_vectors(2) < 8 ? 2 : 1;
  return left > most && left <= most + too_few ? 4 : min(left, most);
}

constexpr int64_t min_prefetch_bytes = 256 << 10;          // fewer weights lie in a near cache,
constexpr int64_t level3_weight_bytes = int64_t{3} << 20;  // and fewer than these maybe in the third level
constexpr int64_t own_prefetch_terms = 24;                 // so far ahead two rows prefetch the block that they read

// Some terms of one panel, and what becomes of their products.
struct PanelTerms {
  const void *w;  // of the first of these terms
  Storage storage;
  int64_t begin, terms, columns;
  const float *scales;  // of an int4 group
  Sums mode;
};

// sums [count][sums_stride] of some rows with these terms of `panels` panels side by side, panel_bytes apart. The loops prefetch the next
// block of weights; those of two rows, and of weights that may lie in the level-3 cache, a later part of the same block. One row leaves it
// to the processor.
template <class V>
MHA_NOINLINE void multiply_rows(const PanelTerms &panel, int64_t panels, int64_t panel_bytes, const float *const *rows, int64_t count,
                                float *sums, int64_t sums_stride, bool prefetches, bool is_far) {
  constexpr int64_t most = TileShape<V::size>::max_rows;
  const int64_t row_bytes = panel_columns * bytes_of(panel.storage), bytes = panel.terms * row_bytes;
  const int64_t share = bytes / ((count + most - 1) / most), columns = (panel.columns + 15) / 16 * 16;
  const char *ahead = static_cast<const char *>(panel.w) + bytes;
  Tile tile;
  tile.column_stride = panel_columns;
  tile.terms = panel.terms;
  tile.chain = panel.mode == Sums::add_scaled ? int4_group : dot_block;
  tile.sums_stride = sums_stride;
  tile.mode = panel.mode;
  Loops loops = {};
  for (int64_t r = 0, size, last = 0; r < count; r += size, ahead += share, last = size) {
    size = next_tile_rows<V>(count - r);
    if (size != last) loops = loops_over_weights<V>(size, panel.storage, panels == 1, prefetches, is_far && count <= 2 * most);
    const Loop &loop = loops.wide;
    for (int64_t i = 0; i < loop.rows; ++i) tile.rows[i] = rows[r + i] + panel.begin;
    for (int64_t b = 0; b < panels; ++b) {
      tile.columns[b] = static_cast<const char *>(panel.w) + b * panel_bytes;
      tile.sums[b] = sums + r * sums_stride + b * panel_columns;
    }
    tile.scales = panel.scales;
    if (prefetches && !is_far && count == 2) {
      tile.prefetch = {static_cast<const char *>(panel.w) + own_prefetch_terms * row_bytes, 64, row_bytes, 0};
    } else if (prefetches && panels == 1 && columns >= loop.columns) {
      tile.prefetch = prefetch_stretch(ahead, share, loop, panel.terms, columns / loop.columns);
    } else {
      tile.prefetch = no_prefetch(sums);
    }
    run_over_columns(loops, panels == 1 ? columns : loop.columns, &tile, bytes_of(panel.storage));
  }
}

// sums of one row and the last columns of a matrix, as many blocks of 16 side by side as the loop over keys takes.
template <class V>
MHA_NOINLINE void multiply_last_columns(const StoredPanel &stored, const float *row, int64_t depth, int64_t columns, float *sums) {
  const Loop loop = loops_over_keys<V>(1, stored.storage, false).wide;
  const int64_t element = bytes_of(stored.storage);
  Tile tile;
  tile.rows[0] = row;
  for (int64_t b = 0; b < loop.blocks; ++b) {  // where there are fewer, the last one again
    const int64_t column = min(b * key_block, columns - 1) / key_block * key_block, panel = column / panel_columns;
    tile.columns[b] = stored.first + panel * stored.bytes + (column - panel * panel_columns) * element;
    tile.sums[b] = sums + column;
  }
  tile.column_stride = panel_columns;
  tile.terms = depth;
  tile.chain = dot_block;
  tile.mode = Sums::replace;
  tile.sums_stride = tile.next_columns = tile.next_sums = 0;
  tile.repeats = 1;
  tile.prefetch = no_prefetch(sums);
  loop.run(tile);
}

// Rows times panels of floats, or of numbers that are widened in registers, or of such that are widened to memory, once for all rows.
template <class V>
MHA_NOINLINE void project_panels(const Projection &p, const RowBlock &rows, bool is_widened, int64_t panel_begin, int64_t panel_end) {
  alignas(64) float sums[(project_block_rows + RowBlock::spare) * panel_columns], widened[dot_block * panel_columns];
  const int64_t weight_bytes = p.depth * p.columns * bytes_of(p.storage);
  const bool prefetches = !is_widened && weight_bytes > min_prefetch_bytes;
  const bool is_far = prefetches && weight_bytes > level3_weight_bytes;
  const int64_t at_once = is_widened || rows.count > 1 ? 1 : TileShape<V::size>::panels_at_once(1);
  constexpr int64_t last_columns = TileShape<V::size>::has_few_row_forms ? TileShape<V::size>::score_blocks(1) * key_block : 0;
  for (int64_t panel = panel_begin, panels; panel < panel_end; panel += panels) {
    const int64_t left = p.columns - panel * panel_columns;
    const bool ends = rows.count == 1 && left % panel_columns != 0 && left <= last_columns && panel_end * panel_columns >= p.columns;
    panels = panel + at_once <= panel_end && at_once * panel_columns <= left ? at_once : 1;
    if (ends) panels = panel_end - panel;
    const StoredPanel stored(p, panel);
    const int64_t stride = panels * panel_columns, columns = min(stride, left);
    if constexpr (last_columns > 0) {
      if (ends) multiply_last_columns<V>(stored, rows.in[0], p.depth, columns, sums);
    }
    for (int64_t k = 0, end; k < p.depth && !ends; k = end) {
      end = min(p.depth, k + dot_block);
      if (is_widened) widen<V>(p.storage, stored.at<char>(k), (end - k) * panel_columns, widened);
      const PanelTerms terms = {is_widened ? static_cast<const void *>(widened) : stored.at<char>(k),
                                is_widened ? Storage::f32 : p.storage,
                                k,
                                end - k,
                                columns,
                                nullptr,
                                k > 0 ? Sums::add : Sums::replace};
      multiply_rows<V>(terms, panels, stored.bytes, rows.in, rows.count, sums, stride, prefetches, is_far);
    }
    finish_sums<V>(stored, rows.count, columns, sums, stride);
    write_results<V>(p, rows.first, rows.count, sums, stride, panel, panels);
  }
}

// Two to four rows and weights from the memory. A loop over one panel reads one stretch of the memory; here four panels advance in step, in
// slices of a few terms, and the loops prefetch the next slices of all four. Panels from `panel` on; returns the first that is left.
template <class V>
MHA_NOINLINE int64_t project_in_step(const Projection &p, const RowBlock &rows, int64_t panel, int64_t panel_end) {
  constexpr int64_t in_step = 4, stride = in_step * panel_columns, slice = 32;
  static_assert(prefetch_places(2, 1) == in_step && prefetch_places(4, 1) == in_step, "one place in each panel");
  alignas(64) float sums[4 * stride], block_sums[4 * stride];
  const Loop loop = loops_over_weights<V>(rows.count, p.storage, true, true, false).wide;
  const int64_t element = bytes_of(p.storage), passes = panel_columns / loop.columns;
  const int64_t step = panel_columns * element / (passes * in_step), pass_bytes = slice * in_step * step;
  Tile tile;
  tile.column_stride = panel_columns;
  tile.chain = dot_block;
  tile.sums_stride = stride;
  tile.repeats = in_step;
  tile.next_sums = panel_columns;
  for (; panel + in_step <= panel_end && (panel + in_step) * panel_columns <= p.columns; panel += in_step) {
    const StoredPanel stored(p, panel);
    tile.next_columns = stored.bytes / element;
    for (int64_t k = 0, end; k < p.depth; k = end) {
      end = min(p.depth, k + slice);
      const char *const next = end < p.depth ? stored.at<char>(end) : stored.at<char>(0) + in_step * stored.bytes;
      tile.terms = end - k;
      tile.mode = k % dot_block == 0 ? Sums::replace : Sums::extend;
      for (int64_t r = 0; r < loop.rows; ++r) tile.rows[r] = rows.in[r] + k;
      for (int64_t pass = 0; pass < passes; ++pass) {
        tile.columns[0] = stored.at<char>(k) + pass * loop.columns * element;
        tile.sums[0] = block_sums + pass * loop.columns;
        tile.prefetch = {next + pass * pass_bytes, stored.bytes, step, 0};
        loop.run(tile);
      }
      if (end < p.depth && end % dot_block != 0) continue;
      for (int64_t i = 0; i < rows.count * stride; i += V::size) {
        const V sum = load<V>(block_sums + i);
        store(sums + i, end <= dot_block ? sum : load<V>(sums + i) + sum);
      }
    }
    finish_sums<V>(stored, rows.count, stride, sums, stride);
    write_results<V>(p, rows.first, rows.count, sums, stride, panel, in_step);
  }
  return panel;
}

// Int4: some groups of 32 terms at a time, which are widened once for all rows.
template <class V>
MHA_NOINLINE void project_int4(const Projection &p, const RowBlock &rows, int64_t panel_begin, int64_t panel_end) {
  constexpr int64_t terms_at_once = 4 * int4_group;
  alignas(64) float sums[(project_block_rows + RowBlock::spare) * panel_columns];
  alignas(64) Int4Number<V> codes[terms_at_once * panel_columns];
  constexpr Storage storage = sizeof *codes == sizeof(float) ? Storage::f32 : Storage::f16;
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    const StoredPanel stored(p, panel);
    const int64_t columns = min(panel_columns, p.columns - panel * panel_columns);
    for (int64_t i = 0; i < (rows.count + RowBlock::spare) * panel_columns; i += V::size) store(sums + i, all<V>(0.0f));
    for (int64_t k = 0; k < p.depth; k += terms_at_once) {
      const int64_t terms = min(terms_at_once, p.depth - k);
      widen_codes<V>(stored.at<Int4>(k), terms, codes);
      const PanelTerms groups = {codes, storage, k, terms, columns, stored.scales + k / int4_group * panel_columns, Sums::add_scaled};
      multiply_rows<V>(groups, 1, 0, rows.in, rows.count, sums, panel_columns, false, false);
    }
    finish_sums<V>(stored, rows.count, columns, sums, panel_columns);
    write_results<V>(p, rows.first, rows.count, sums, panel_columns, panel, 1);
  }
}

// Under up to so many rows, numbers of fewer bits are widened in registers, by each tile anew. For more it is better to widen them to
// memory.
constexpr int64_t max_rows_widened_in_registers = 24;

template <class V>
void project(const Projection &p, const void *ready, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
  const float *const given = static_cast<const float *>(ready);
  for (int64_t row = row_begin; row < row_end; row += project_block_rows) {
    const RowBlock rows(p, given ? given + (row - row_begin) * p.depth : nullptr, row, row_end);
    if (p.storage == Storage::int4) {
      project_int4<V>(p, rows, panel_begin, panel_end);
    } else {
      const bool is_widened = p.storage != Storage::f32 && (has_loops_of_floats_alone<V> || rows.count > max_rows_widened_in_registers);
      int64_t panel = panel_begin;
      if constexpr (TileShape<V::size>::has_few_row_forms) {
        const bool is_far = p.depth * p.columns * bytes_of(p.storage) > level3_weight_bytes;
        if (is_far && rows.count >= 2 && rows.count <= 4) {
          panel = project_in_step<V>(p, rows, panel, panel_end);
        }
      }
      project_panels<V>(p, rows, is_widened, panel, panel_end);
    }
  }
}

template <class V>
void widen_rows(const InputRows &x, int64_t row_begin, int64_t row_end, int64_t width, float *to) {
  Cursor at = cursor_at(x, row_begin);
  for (int64_t row = row_begin; row < row_end; ++row, to += width) {
    widen<V>(x.storage, element_at(x.base, x.storage, at.sequence * x.batch_stride + at.row * x.row_stride), width, to);
    advance(x, &at, 1, row + 1 < row_end);
  }
}

// The second half of project, for a product that a BLAS has made.
template <class V>
void finish_rows(const Projection &p, const float *product, int64_t product_stride, int64_t row_begin, int64_t row_end) {
  constexpr int64_t width = 256;
  alignas(64) float values[4 * width];
  for (int64_t row = row_begin; row < row_end; row += 4) {
    const int64_t rows = min(4, row_end - row);
    for (int64_t column = 0; column < p.columns; column += width) {
      const int64_t count = min(width, p.columns - column);
      for (int64_t r = 0; r < rows; ++r) {
        const float *const from = product + (row - row_begin + r) * product_stride + column;
        for (int64_t i = 0; i < count; ++i) values[r * width + i] = canonical(from[i] + p.bias[column + i]);
      }
      write_columns<V>(p.destination, p.x, row, rows, values, width, column, count);
      if (p.tap.kind != Destination::Kind::none) write_columns<V>(p.tap, p.x, row, rows, values, width, column, count);
    }
  }
}

}  // namespace
}  // namespace mha
