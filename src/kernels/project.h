// Projections: input rows times packed panels of weights, plus bias, with each column written where
// the next stage reads it.
//
// project cuts the input rows into blocks. For each block it passes the panels one by one, for each
// panel its terms by 256 (CONTRACT.md, section 3), for these the panel's columns strip by strip,
// and for each strip the rows tile by tile. The 48 KiB of weights of 256 terms stay in the second
// level of the cache while the rows pass. A strip of many rows has 16 columns with AVX2 and NEON,
// whose 16 KiB stay in the first level; with AVX-512 it is the whole panel. The sums lie in memory,
// [row][column of the panels]; finish_sums adds the bias and write_results moves them to their
// destination. Reading the weights limits a call of few rows, which therefore have ways of their
// own through the panels.
#pragma once

#include "elements.h"
#include "functions.h"
#include "prepare.h"
#include "tile.h"

namespace mha {
namespace {

// ---- Packed panels

// Where one panel lies, in the form that tasks/projection.h describes at Projection.
struct StoredPanel {
  Storage storage;
  int64_t bytes_of_two_terms;
  int64_t bytes;   // of all its terms, and from one panel to the next
  int64_t groups;  // of terms, each with scales of its own
  Storage scale_storage;
  const unsigned char *first;
  const char *scales;
  int64_t scales_bytes;        // of the panel's scales, and from one panel's to the next
  int64_t offsets_apart;       // bytes from the scales of a group to its offsets; 0: none
  const float *column_scales;  // null: scales are those of groups, or there are none
  const float *bias;

  MHA_INLINE StoredPanel(const Projection &p, int64_t panel)
      : storage(p.storage), scale_storage(p.scale_storage) {
    bytes_of_two_terms = panel_columns * bytes_of(p.storage, 2);
    bytes = panel_bytes(p.depth, p.storage, p.arithmetic != Arithmetic::f32);
    groups = p.group ? (p.depth + p.group - 1) / p.group : 1;
    first = static_cast<const unsigned char *>(p.panels) + panel * bytes;
    scales_bytes = mha::scales_bytes(groups, p.depth, scale_storage);
    scales = p.scales ? static_cast<const char *>(p.scales) + panel * scales_bytes : nullptr;
    offsets_apart =
        p.offsets ? static_cast<const char *>(p.offsets) - static_cast<const char *>(p.scales) : 0;
    column_scales = p.group ? nullptr : reinterpret_cast<const float *>(scales);
    bias = p.bias + panel * panel_columns;
  }

  // The terms from k on, which is even.
  template <class Element>
  MHA_INLINE const Element *at(int64_t k) const {
    return reinterpret_cast<const Element *>(first + k / 2 * bytes_of_two_terms);
  }
};

constexpr int64_t code_prefetch_bytes = 4096;  // how far ahead codes of int4 are prefetched

// Widens terms of int8 to [term][48].
inline void widen_codes(const int8_t *from, int64_t terms, Int4Number<Vector> *to) {
  for (int64_t i = 0; i < terms * panel_columns; i += Vector::size) {
    if (i % 64 == 0) MHA_PREFETCH(reinterpret_cast<const char *>(from) + i + code_prefetch_bytes);
    store_code(to + i, load(from + i));
  }
}

#if defined(MHA_KERNELS_AVX2)
// Widens two rows of bytes, which are four terms.
MHA_INLINE void halves_of_terms(const Int4 *from, F16 *to) {
  constexpr int64_t columns = panel_columns, half = 16;
  halves_of_codes(from, to, to + columns, half);
  // The last 16 columns of two terms, then the first 16 of the next two.
  halves_of_codes(from + 2 * half, to + 2 * half, to + columns + 2 * half, 2 * columns - 2 * half);
  halves_of_codes(from + 4 * half, to + 2 * columns + half, to + 3 * columns + half, half);
}

// Widens four terms at a time. Terms after the last one are read from the next panel or from the
// scales, and not used.
inline void widen_codes(const Int4 *from, int64_t terms, F16 *to) {
  for (int64_t k = 0; k < terms; k += 4, from += 2 * panel_columns, to += 4 * panel_columns) {
    MHA_PREFETCH(reinterpret_cast<const char *>(from) + code_prefetch_bytes);
    MHA_PREFETCH(reinterpret_cast<const char *>(from) + code_prefetch_bytes + 64);
    halves_of_terms(from, to);
  }
}
#else
// Widens terms of int4, the first of them even, to [term][48]. If the number of terms is odd, the
// last one brings a term along that is not used.
inline void widen_codes(const Int4 *from, int64_t terms, float *to) {
  for (int64_t k = 0; k < terms; k += 2, from += panel_columns, to += 2 * panel_columns) {
    MHA_PREFETCH(reinterpret_cast<const char *>(from) + code_prefetch_bytes);
    for (int64_t i = 0; i < panel_columns; i += Vector::size) {
      const Two<Vector> codes = load(from + i);
      store(to + i, codes.even);
      store(to + panel_columns + i, codes.odd);
    }
  }
}
#endif

// Bf16 arithmetic multiplies the first numbers of the pairs of a step, which are one chain, and
// then the second ones. Where an instruction multiplies two numbers of a chain, these are the terms
// of the loops over floats, which then add both products.
constexpr int64_t numbers_of_term = multiplies_pairs ? 2 : 1;

// Writes steps of pairs of bf16 as the loops multiply them, [step][2 chains][term][48].
inline void widen_pairs(const float *from, int64_t steps, float *to) {
  constexpr int64_t second = bf16_step / 2 / numbers_of_term * panel_columns;
  for (; steps > 0; --steps, to += second) {
    for (int64_t i = 0; i < second; i += Vector::size, to += Vector::size) {
#if defined(MHA_MULTIPLIES_PAIRS)
      const int64_t at = i / panel_columns * panel_columns + i;
      const Vector pair = load(from + at), next = load(from + at + panel_columns);
      store(to, firsts_of(pair, next));
      store(to + second, seconds_of(pair, next));
#else
      store(to, first_of_pairs(load(from + i)));
      store(to + second, second_of_pairs(load(from + i)));
#endif
    }
    from += bf16_step / 2 * panel_columns;
  }
}

// Copies the last pairs of a panel, with zeros up to a whole step. Loops over pairs read the number
// before the first one, too.
inline const void *copy_pairs(const Bf16Pair *from, int64_t pairs, void *memory) {
  char *const to = static_cast<char *>(memory) + 64;
  const size_t bytes = static_cast<size_t>(pairs * panel_columns) * sizeof *from;
  MHA_MEMCPY(to, from, bytes);
  MHA_MEMSET(to + bytes, 0, bf16_step / 2 * panel_columns * sizeof *from - bytes);
  return to;
}

// The logarithm of the terms of a group, 0 without groups.
MHA_INLINE int group_bits_of(const Projection &p) {
  int bits = 0;
  while (p.group >> bits > 1) ++bits;
  return bits;
}

// Makes floats of a panel's scales, or offsets, in blocks: those of the groups of 2^group_bits
// terms that begin among `terms` terms from k on, which begins a block.
MHA_NOINLINE inline void widen_scales(const char *of_panel, int group_bits, int64_t k,
                                      int64_t terms, float *to) {
  const char *block = of_panel + k / scale_block * scale_block_bytes(scale_block >> group_bits);
  for (int64_t left = terms; left > 0; left -= scale_block) {
    const F16 *const factors = reinterpret_cast<const F16 *>(block);
    const int8_t *const codes = reinterpret_cast<const int8_t *>(factors + panel_columns);
    const int64_t numbers = (((min(left, scale_block) - 1) >> group_bits) + 1) * panel_columns;
    for (int64_t c = 0; c < panel_columns; c += Vector::size) {
      const Vector factor = load(factors + c);
      for (int64_t i = c; i < numbers; i += panel_columns) store(to + i, load(codes + i) * factor);
    }
    block = reinterpret_cast<const char *>(codes + numbers);
    to += numbers;
  }
}

// Makes results of sums: int8 may have a scale for each column, and all storage types have a bias.
// The columns may be those of several panels, from this one on.
inline void finish_sums(const StoredPanel &panel, int64_t num_rows, int64_t num_columns,
                        float *sums, int64_t stride) {
  constexpr int64_t lanes = Vector::size;
  for (int64_t r = 0; r < num_rows; ++r) {
    for (int64_t i = 0; i < num_columns; i += lanes) {
      float *const at = sums + r * stride + i;
      Vector y = load(at);
      if (panel.column_scales) y = y * load(panel.column_scales + i);
      store(at, canonical(y + load(panel.bias + i)));
    }
  }
}

// ---- Destinations of results

MHA_INLINE void copy(const float *from, float *to, int64_t count) {
  in_vectors<Vector>(count, [&](auto vector, int64_t i)
                                MHA_INLINED { store(to + i, load<decltype(vector)>(from + i)); });
}

// A row of a projection as a row of one sequence.
struct Cursor {
  int64_t sequence;
  int64_t to_sequence;  // the number of the sequence in the destination
  int64_t row;          // in the caller's array
  int64_t position;     // among the valid rows of the sequence
};

// The cursor at row number `row` of all sequences together.
MHA_INLINE Cursor cursor_at(const InputRows &x, int64_t row) {
  if (!x.extents) {
    const int64_t sequence = quotient(row, x.rows_per_sequence),
                  position = row - sequence * x.rows_per_sequence;
    return {sequence, sequence, position, position};
  }
  int64_t sequence = 0;
  while (row >= x.extents[sequence].before + x.extents[sequence].count) ++sequence;
  const int64_t position = row - x.extents[sequence].before;
  return {sequence, x.extents[sequence].block, x.extents[sequence].first + position, position};
}

MHA_INLINE int64_t rows_left(const InputRows &x, const Cursor &at) {
  return (x.extents ? x.extents[at.sequence].count : x.rows_per_sequence) - at.position;
}

// Moves on by `step` rows of one sequence, and to the next sequence that has rows if there are
// more.
MHA_INLINE void advance(const InputRows &x, Cursor *at, int64_t step, bool has_more) {
  at->row += step;
  at->position += step;
  if (!has_more || rows_left(x, *at) > 0) return;
  do ++at->sequence;
  while (x.extents && x.extents[at->sequence].count == 0);
  at->position = 0;
  at->row = x.extents ? x.extents[at->sequence].first : 0;
  at->to_sequence = x.extents ? x.extents[at->sequence].block : at->sequence;
}

// Writes a part of an output row that has a residual or 16 bits, from number `at` of the
// destination on. The residual may be the array that is written.
MHA_NOINLINE inline void write_converted(const Destination &to, int64_t row, int64_t column,
                                         int64_t at, const float *values, int64_t count) {
  constexpr int64_t at_once = 64;
  alignas(64) float sums[at_once];
  for (int64_t done = 0; done < count; done += at_once) {
    const int64_t number = min(at_once, count - done);
    const float *from = values + done;
    if (to.residual) {
      widen(to.storage,
            element_at(to.residual, to.storage, row * to.residual_row_stride + column + done),
            number, sums);
      in_vectors<Vector>(number, [&](auto vector, int64_t i) MHA_INLINED {
        using T = decltype(vector);
        store(sums + i, canonical(load<T>(from + i) + load<T>(sums + i)));
      });
      from = sums;
    }
    void *const written = element_at(to.base, to.storage, at + done);
    if (to.storage == Storage::f32)
      copy(from, static_cast<float *>(written), number);
    else
      narrow(to.storage, from, number, written);
  }
}

// Writes finished values, which are rows from `row` on and columns from first_column on, to one
// destination. Columns go head by head. A row of keys becomes one lane of a tile of 16 keys: four
// rows that are neighbours in a tile are transposed together.
inline void write_columns(const Destination &to, const InputRows &x, int64_t row, int64_t num_rows,
                          const float *values, int64_t values_stride, int64_t first_column,
                          int64_t num_columns) {
  const Cursor first = cursor_at(x, row);
  const bool is_converted = to.residual || to.storage != Storage::f32;
  int64_t head = quotient(first_column, to.head_width), c = first_column - head * to.head_width;
  for (int64_t done = 0; done < num_columns; ++head, c = 0) {
    // The columns of one head, for all rows.
    const int64_t count = min(to.head_width - c, num_columns - done);
    Cursor at = first;
    for (int64_t r = 0; r < num_rows;) {
      const float *const from = values + r * values_stride + done;
      const int64_t start = head * to.head_stride + at.to_sequence * to.batch_stride;
      int64_t step = 1;
      if (is_converted) {
        write_converted(to, at.row, c, start + at.row * to.row_stride + c, from, count);
      } else if (to.kind != Destination::Kind::key_tiles) {
        const int64_t in_destination = to.kind == Destination::Kind::rows ? at.row : at.position;
        copy(from, static_cast<float *>(to.base) + start + in_destination * to.row_stride + c,
             count);
      } else {
        const int64_t lane = lane_of(at.position);
        float *const block = static_cast<float *>(to.base) + start +
                             (at.position - lane) * to.row_stride + c * tile_keys + lane;
        int64_t i = 0;
        if (r + 4 <= num_rows && lane + 4 <= tile_keys && rows_left(x, at) >= 4) {
          step = 4;
          const float *const row1 = from + values_stride, *const row2 = row1 + values_stride,
                             *const row3 = row2 + values_stride;
          for (; i + 4 <= count; i += 4)
            transpose4x4(from + i, row1 + i, row2 + i, row3 + i, block + i * tile_keys, tile_keys);
        }
        for (int64_t s = 0; s < step; ++s) {
          for (int64_t rest = i; rest < count; ++rest)
            block[rest * tile_keys + s] = from[s * values_stride + rest];
        }
      }
      r += step;
      advance(x, &at, step, r < num_rows);
    }
    done += count;
  }
}

// Writes the finished values of some panels to the destination, and to the caller's copy if there
// is one.
MHA_INLINE void write_results(const Projection &p, int64_t row, int64_t num_rows,
                              const float *results, int64_t stride, int64_t panel, int64_t panels) {
  const int64_t first_column = panel * panel_columns,
                num_columns = min(panels * panel_columns, p.columns - first_column);
  write_columns(p.destination, p.x, row, num_rows, results, stride, first_column, num_columns);
  if (p.tap.kind != Destination::Kind::none)
    write_columns(p.tap, p.x, row, num_rows, results, stride, first_column, num_columns);
}

// From one row made ready to the next.
MHA_INLINE int64_t floats_of_row(const Projection &p) {
  return p.arithmetic == Arithmetic::bf16
             ? (p.depth + bf16_step - 1) / bf16_step * bf16_step / numbers_of_term
             : p.depth + p.sums;
}

// The addresses of up to project_block_rows input rows. A tile may take more rows than are left:
// the last row then stands in for those that are missing.
struct RowBlock {
  static constexpr int spare = 1;
  int64_t first, count;
  const float *in[project_block_rows + spare];

  // given: the rows, one after the other; null: they lie where the projection says.
  MHA_INLINE RowBlock(const Projection &p, const float *given, int64_t begin, int64_t end)
      : first(begin), count(min(project_block_rows, end - begin)) {
    const float *const base = static_cast<const float *>(p.x.base);
    Cursor at = cursor_at(p.x, begin);
    for (int64_t r = 0; r < count; ++r) {
      in[r] = given ? given + r * floats_of_row(p)
                    : base + at.sequence * p.x.batch_stride + at.row * p.x.row_stride;
      advance(p.x, &at, 1, r + 1 < count);
    }
    for (int64_t r = count; r < count + spare; ++r) in[r] = in[count - 1];
  }
};

// ---- Products

// How many of the rows that are left the next tile takes: as many as the largest loop that they
// fill, or, if may_lack_row, that they would fill with one more.
MHA_INLINE int64_t next_tile_rows(int64_t left, int64_t most, bool may_lack_row) {
  if (left >= most || (may_lack_row && (left == 3 || left == most - 1))) return min(left, most);
  return left >= 4 ? 4 : min(left, 2);
}

// The most bytes of weights that lie in a near cache, and in the third level.
constexpr int64_t min_prefetch_bytes = 256 << 10, level3_weight_bytes = 3 << 20;
constexpr int64_t own_prefetch_terms = 24;  // how far ahead two rows prefetch their own weights

// Some terms of a panel, and what becomes of their products.
struct PanelTerms {
  const void *w;  // the first of these terms
  Storage storage;
  bool are_pairs;  // Bf16Pair; the storage is bf16
  int64_t begin, terms, columns;
  Sums mode;
  int64_t chain;
  const void *scales;  // add_scaled: of the first group
  Storage scale_storage;
  int64_t scales_apart;  // of one panel and the next
  int64_t offsets_apart;
};

// Multiplies `count` rows by these terms of `panels` panels that lie panel_bytes apart, into sums
// [count][sums_stride]. All tiles of one size pass a strip of columns before any passes the next
// strip, so that only the first of them waits for the weights.
//
// The tiles prefetch the terms of the panel that come next, each its share of them. Two rows of
// weights that may lie in the level-3 cache (is_far is false) prefetch a later part of the terms
// that they read themselves. One row leaves it to the processor, as do two rows of two panels, or
// to the tile before it. A small tile has no time for that if the weights are floats from afar:
// then the row after it is computed as two.
MHA_NOINLINE inline void multiply_rows(const PanelTerms &panel, int64_t panels, int64_t panel_bytes,
                                       const float *const *rows, int64_t count, float *sums,
                                       int64_t sums_stride, bool prefetches, bool is_far) {
  constexpr int64_t most = Shape::max_rows;
  const int64_t element = bytes_of(panel.storage), row_bytes = panel_columns * element,
                column_bytes = panel.are_pairs ? 2 * element : element,
                columns = (panel.columns + 15) / 16 * 16;
  const bool are_far_floats = is_far && panel.storage == Storage::f32;
  int64_t bytes = panel.terms * row_bytes;  // that are still to be prefetched
  const char *const first = static_cast<const char *>(panel.w), *ahead = first + bytes;
  const float *from[project_block_rows + RowBlock::spare];
  for (int64_t r = 0; r < count + RowBlock::spare; ++r) from[r] = rows[r] + panel.begin;
  Tile tile;
  tile.column_stride = panel_columns;
  tile.terms = panel.terms;
  tile.chain = panel.chain;
  tile.sums_stride = sums_stride;
  tile.mode = panel.mode;
  tile.scale_storage = panel.scale_storage;
  tile.scales_apart = panel.scales_apart;
  tile.offsets_apart = panel.offsets_apart;
  tile.next_columns = 0;
  for (int64_t r = 0; r < count; r += tile.repeats * tile.next_rows) {
    const int64_t left = count - r, size = next_tile_rows(left, most, true);
    tile.rows = from + r;
    tile.next_rows = size;
    tile.next_sums = size * sums_stride;
    tile.repeats = 1;
    while (next_tile_rows(left - tile.repeats * size, most, true) == size) ++tile.repeats;
    const int64_t after = left - tile.repeats * size;
    const int64_t share =
        after == 1 && (size == most || !are_far_floats) ? bytes : bytes * (left - after) / left;
    bytes -= share;
    const Loops loops =
        loops_over_weights(size < count && share > 0 ? max(size, 2) : size, panel.storage,
                           panel.are_pairs, panels == 1, prefetches,
                           are_far_floats && share > tile.repeats * panel.terms * cache_line_bytes);
    const int64_t strips = max(1, quotient(columns, loops.wide.columns));
    for (int64_t column = 0; column < columns;) {
      const bool is_wide = panels > 1 || columns - column >= loops.wide.columns;
      const Loop &loop = is_wide ? loops.wide : loops.narrow;
      for (int64_t b = 0; b < panels; ++b) {
        tile.columns[b] = first + b * panel_bytes + column * column_bytes;
        tile.sums[b] = sums + r * sums_stride + b * panel_columns + column;
      }
      tile.scales = panel.scales ? element_at(panel.scales, panel.scale_storage, column) : nullptr;
      tile.prefetch = no_prefetch(sums);
      if (prefetches && !is_far && count == 2 && panels == 1) {
        tile.prefetch = {first + own_prefetch_terms * row_bytes, 64, row_bytes, 0};
      } else if (prefetches && panels == 1 && is_wide) {
        const int64_t part = share / strips;
        tile.prefetch = prefetch_stretch(ahead, part, loop, panel.terms, tile.repeats);
        ahead += part;
      }
      loop.run(tile);
      column += panels > 1 ? columns : loop.columns;
    }
  }
}

// Sets sums [count][stride] to +0.
MHA_INLINE void clear_sums(int64_t count, int64_t stride, float *sums) {
  for (int64_t i = 0; i < count * stride; i += Vector::size) store(sums + i, all(0.0f));
}

// Multiplies one row by the last columns of a matrix, as many strips of 16 side by side as the loop
// over keys takes. Where fewer are left, the last strip is computed again.
MHA_NOINLINE inline void multiply_last_columns(const StoredPanel &stored, const float *row,
                                               int64_t depth, int64_t columns, float *sums) {
  const Loop loop = loops_over_keys<Vector>(1, stored.storage, false).wide;
  const int64_t element = bytes_of(stored.storage);
  Tile tile;
  tile.rows = &row;
  tile.next_rows = 0;
  for (int64_t s = 0; s < loop.strips; ++s) {
    const int64_t column = min(s * tile_keys, columns - 1) / tile_keys * tile_keys,
                  panel = column / panel_columns;
    tile.columns[s] =
        stored.first + panel * stored.bytes + (column - panel * panel_columns) * element;
    tile.sums[s] = sums + column;
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

// Multiplies rows by panels of floats, f16, bf16 or int8. Numbers of fewer bits are widened to
// memory once for all rows (is_widened), or else in registers by every tile.
MHA_NOINLINE inline void project_panels(const Projection &p, const RowBlock &rows, bool is_widened,
                                        int64_t panel_begin, int64_t panel_end) {
  alignas(64) float sums[(project_block_rows + RowBlock::spare) * panel_columns],
      widened[dot_block * panel_columns], rest[(bf16_step / 2 + 1) * panel_columns];
  const bool are_pairs = p.arithmetic == Arithmetic::bf16;
  // How far away the weights are decides what is worth prefetching.
  const int64_t weight_bytes = p.depth * p.columns * bytes_of(p.storage);
  const bool prefetches = !is_widened && weight_bytes > min_prefetch_bytes;
  const bool is_far = prefetches && weight_bytes > level3_weight_bytes;
  const bool has_rest = are_pairs && p.depth % bf16_step != 0;
  const int64_t at_once = is_widened || has_rest ? 1 : Shape::panels_at_once(rows.count);
  constexpr int64_t last_columns = Shape::has_few_row_forms ? Shape::key_tiles(1) * tile_keys : 0;
  for (int64_t panel = panel_begin, panels; panel < panel_end; panel += panels) {
    const int64_t left = p.columns - panel * panel_columns;
    const bool ends = rows.count == 1 && !are_pairs && left % panel_columns != 0 &&
                      left <= last_columns && panel_end * panel_columns >= p.columns;
    panels = panel + at_once <= panel_end && at_once * panel_columns <= left ? at_once : 1;
    if (ends) panels = panel_end - panel;
    const StoredPanel stored(p, panel);
    const int64_t stride = panels * panel_columns, columns = min(stride, left);
    if constexpr (last_columns > 0) {
      if (ends) multiply_last_columns(stored, rows.in[0], p.depth, columns, sums);
    }
    if (are_pairs) clear_sums(rows.count + RowBlock::spare, stride, sums);
    // All terms of the panel, 256 at a time; from the second time on they are added.
    for (int64_t k = 0, end; k < p.depth && !ends; k = end) {
      end = min(p.depth, k + dot_block);
      // What is left after whole steps is copied, with zeros.
      if (are_pairs && end - k > bf16_step) end -= end % bf16_step;
      const bool is_rest = are_pairs && end - k < bf16_step;
      const int64_t numbers = are_pairs ? numbers_of_term : 1,
                    count = is_rest ? bf16_step : end - k;
      const void *w = stored.at<void>(k);
      if (is_rest) w = copy_pairs(stored.at<Bf16Pair>(k), (end - k + 1) / 2, rest);
      if (is_widened && are_pairs)
        widen_pairs(static_cast<const float *>(w), count / bf16_step, widened);
      else if (is_widened)
        widen(p.storage, w, count * panel_columns, widened);
      const PanelTerms terms = {is_widened ? widened : w,
                                is_widened ? Storage::f32 : p.storage,
                                are_pairs && !is_widened,
                                k / numbers,
                                count / numbers,
                                columns,
                                are_pairs ? Sums::add_halves
                                : k > 0   ? Sums::add
                                          : Sums::replace,
                                are_pairs ? bf16_step / 2 / numbers : dot_block,
                                nullptr,
                                Storage::f32,
                                0,
                                0};
      multiply_rows(terms, panels, stored.bytes, rows.in, rows.count, sums, stride,
                    prefetches && !is_rest, is_far && !is_rest);
    }
    finish_sums(stored, rows.count, columns, sums, stride);
    write_results(p, rows.first, rows.count, sums, stride, panel, panels);
  }
}

// Multiplies two to four rows by weights that come from memory. A loop over one panel reads one
// stretch of memory; here four panels advance in step, a slice of 32 terms of each, while the loops
// prefetch the next slices of all four. Starts at `panel` and returns the first panel that is left.
MHA_NOINLINE inline int64_t project_in_step(const Projection &p, const RowBlock &rows,
                                            int64_t panel, int64_t panel_end) {
  constexpr int64_t in_step = 4, stride = in_step * panel_columns, slice = 32;
  static_assert(prefetch_streams(2, 1) == in_step && prefetch_streams(4, 1) == in_step,
                "one place in each panel");
  alignas(64) float sums[4 * stride], block_sums[4 * stride];
  // A pass computes as many columns of each of the four panels as the loop takes, and prefetches
  // its share of the next slices.
  const Loop loop = loops_over_weights(rows.count, p.storage, false, true, true, false).wide;
  const int64_t element = bytes_of(p.storage), passes = panel_columns / loop.columns;
  const int64_t step = panel_columns * element / (passes * in_step),
                pass_bytes = slice * in_step * step;
  Tile tile;
  const float *from[4];
  tile.rows = from;
  tile.column_stride = panel_columns;
  tile.chain = dot_block;
  tile.sums_stride = stride;
  tile.repeats = in_step;
  tile.next_rows = 0;
  tile.next_sums = panel_columns;
  for (; panel + in_step <= panel_end && (panel + in_step) * panel_columns <= p.columns;
       panel += in_step) {
    const StoredPanel stored(p, panel);
    tile.next_columns = stored.bytes / element;
    for (int64_t k = 0, end; k < p.depth; k = end) {
      end = min(p.depth, k + slice);
      const char *const next =
          end < p.depth ? stored.at<char>(end) : stored.at<char>(0) + in_step * stored.bytes;
      tile.terms = end - k;
      tile.mode = k % dot_block == 0 ? Sums::replace : Sums::extend;
      for (int64_t r = 0; r < loop.rows; ++r) from[r] = rows.in[r] + k;
      for (int64_t pass = 0; pass < passes; ++pass) {
        tile.columns[0] = stored.at<char>(k) + pass * loop.columns * element;
        tile.sums[0] = block_sums + pass * loop.columns;
        tile.prefetch = {next + pass * pass_bytes, stored.bytes, step, 0};
        loop.run(tile);
      }
      // After 256 terms the chains end and are added to the sums of the chains before.
      if (end < p.depth && end % dot_block != 0) continue;
      for (int64_t i = 0; i < rows.count * stride; i += Vector::size) {
        const Vector sum = load(block_sums + i);
        store(sums + i, end <= dot_block ? sum : load(sums + i) + sum);
      }
    }
    finish_sums(stored, rows.count, stride, sums, stride);
    write_results(p, rows.first, rows.count, sums, stride, panel, in_step);
  }
  return panel;
}

// Adds the products of two rows of sums of groups with some groups of offsets of a panel, as one
// chain. If one row is left, it stands in for the other.
MHA_INLINE void add_products_of_sums(const float *const (&x)[2], int64_t rows, int64_t groups,
                                     const float *offsets, float *sums, int64_t stride) {
  constexpr int C = Shape::project_vectors(2), lanes = Vector::size;
  for (int64_t column = 0; column < panel_columns; column += C * lanes) {
    const float *const columns[1] = {offsets + column};
    Vector acc[2][C];
    clear(acc);
    for (int64_t g = 0; g < groups; ++g) add_term<C>(x, g, columns, g * panel_columns, acc);
    MHA_EACH(r, 2) {
      float *const to = sums + r * stride + column;
      if (r < rows) {
        MHA_EACH(c, C) store(to + c * lanes, load(to + c * lanes) + acc[r][c]);
      }
    }
  }
}

// Adds the offsets of a panel for one row, each as it is read.
template <class Number>
MHA_NOINLINE void add_offsets_of_one(const Projection &p, int64_t panel, const float *x,
                                     float *sums) {
  constexpr int C = Shape::project_vectors(4), lanes = Vector::size;
  const int64_t first = panel * p.sums * panel_columns;
  const float centre = static_cast<float>(centre_of(p.storage));
  for (int64_t column = 0; column < panel_columns; column += C * lanes) {
    const Number *offsets = static_cast<const Number *>(p.offsets) + first + column,
                 *scales = static_cast<const Number *>(p.scales) + first + column;
    for (int64_t g = 0; g < p.sums;) {
      Vector acc[1][C];
      clear(acc);
      for (const int64_t end = min(p.sums, g + offset_block); g < end;
           ++g, offsets += panel_columns, scales += panel_columns) {
        MHA_EACH(c, C) {
          Vector offset = load(offsets + c * lanes);
          if (centre != 0.0f) offset = mul_add(all(centre), load(scales + c * lanes), offset);
          acc[0][c] = mul_add(all(x[g]), offset, acc[0][c]);
        }
      }
      float *const to = sums + column;
      MHA_EACH(c, C) store(to + c * lanes, load(to + c * lanes) + acc[0][c]);
    }
  }
}

// Adds the offsets of a panel to the sums of its columns: x has the sums of groups of `count` rows.
MHA_NOINLINE inline void add_offsets(const Projection &p, int64_t panel, const float *x,
                                     int64_t x_stride, int64_t count, float *sums, int64_t stride) {
  const bool are_in_blocks = p.scale_storage == Storage::int8;
  if (count == 1 && !are_in_blocks)
    return p.scale_storage == Storage::f16 ? add_offsets_of_one<F16>(p, panel, x, sums)
                                           : add_offsets_of_one<float>(p, panel, x, sums);
  alignas(64) float offsets[offset_block * panel_columns],
      scales[scale_block / min_group * panel_columns];
  const StoredPanel stored(p, panel);
  const int64_t first = panel * p.sums * panel_columns;
  const Vector centre = all(static_cast<float>(centre_of(p.storage)));
  const bool has_centre = centre_of(p.storage) != 0;
  const int group_bits = group_bits_of(p);
  const auto load_number = [&](const void *numbers, int64_t i) MHA_INLINED {
    return p.scale_storage == Storage::f16 ? load(static_cast<const F16 *>(numbers) + i)
                                           : load(static_cast<const float *>(numbers) + i);
  };
  for (int64_t g = 0; g < p.sums; g += offset_block, x += offset_block) {
    const int64_t groups = min(offset_block, p.sums - g),
                  end = min(p.depth, (g + groups) * p.group);
    for (int64_t k = g * p.group; are_in_blocks && k < end; k += scale_block) {
      float *const to = offsets + ((k >> group_bits) - g) * panel_columns;
      const int64_t terms = min(scale_block, end - k);
      widen_scales(stored.scales + stored.offsets_apart, group_bits, k, terms, to);
      widen_scales(stored.scales, group_bits, k, terms, scales);
      for (int64_t i = 0; has_centre && i < (((terms - 1) >> group_bits) + 1) * panel_columns;
           i += Vector::size)
        store(to + i, mul_add(centre, load(scales + i), load(to + i)));
    }
    for (int64_t i = 0; !are_in_blocks && i < groups * panel_columns; i += Vector::size) {
      const int64_t at = first + g * panel_columns + i;
      const Vector offset = load_number(p.offsets, at), scale = load_number(p.scales, at);
      // Codes with offsets are less by the centre here.
      store(offsets + i, has_centre ? mul_add(centre, scale, offset) : offset);
    }
    for (int64_t r = 0; r < count; r += 2) {
      const float *const rows[2] = {x + r * x_stride, x + min(r + 1, count - 1) * x_stride};
      add_products_of_sums(rows, count - r, groups, offsets, sums + r * stride, stride);
    }
  }
}

// The most rows that widen numbers of fewer bits in registers, again in each tile. More rows are
// faster if the numbers are widened to memory once.
constexpr int64_t max_rows_widened_in_registers = 24;

// Multiplies one row by some panels of int4 side by side, and widens the codes in registers.
template <int panels>
MHA_NOINLINE void multiply_nibbles(const Projection &p, const StoredPanel &stored, const float *x,
                                   float *sums) {
  constexpr int C = panel_columns / Vector::size, N = panels * C, lanes = Vector::size;
  const Int4 *columns = stored.at<Int4>(0);
  const char *scales = stored.scales;
  const Storage scale_storage = p.scale_storage;
  for (int64_t k = 0; k < p.depth;) {
    Vector acc[1][N];
    clear(acc);
    for (const int64_t end = min(p.depth, k + p.group); k < end; k += 2, columns += panel_columns) {
      // A last term alone has a code after it that is not used.
      const Vector even = all(x[k]), odd = all(k + 1 < end ? x[k + 1] : 0.0f);
      MHA_EACH(i, N) {
        const Two<Vector> codes = load(columns + i / C * stored.bytes + i % C * lanes);
        add_product(codes.even, even, 0, &acc[0][i]);
        add_product(codes.odd, odd, 0, &acc[0][i]);
      }
    }
    MHA_EACH(i, N) {
      const char *const of_vector =
          element_at(scales, scale_storage, i / C * stored.groups * panel_columns + i % C * lanes);
      MHA_PREFETCH_L2(of_vector + stored.offsets_apart);
      const Vector scale = scale_storage == Storage::f16
                               ? load(reinterpret_cast<const F16 *>(of_vector))
                               : load(reinterpret_cast<const float *>(of_vector));
      store(sums + i * lanes, mul_add(acc[0][i], scale, load(sums + i * lanes)));
    }
    scales = element_at(scales, scale_storage, panel_columns);
  }
}

// Multiplies rows by panels of codes in groups. The sums of each group are added times its scales.
// Codes are widened once for all rows, 128 terms at a time, but those of int8 for a few rows in
// registers, and so are those of int4 for one row where a register becomes floats at once.
MHA_NOINLINE inline void project_groups(const Projection &p, const RowBlock &rows,
                                        int64_t panel_begin, int64_t panel_end) {
  alignas(64) float sums[(project_block_rows + RowBlock::spare) * panel_columns];
  alignas(64) Int4Number<Vector> codes[max_group * panel_columns];
  constexpr Storage storage = sizeof *codes == sizeof(float) ? Storage::f32 : Storage::f16;
  constexpr bool multiplies_nibbles = storage == Storage::f32 && !has_loops_of_floats_alone<Vector>;
  constexpr int panels_of_one = Shape::panels_at_once(1);
  const bool is_int4 = p.storage == Storage::int4,
             is_widened = is_int4 || has_loops_of_floats_alone<Vector> ||
                          rows.count > max_rows_widened_in_registers,
             are_nibbles = multiplies_nibbles && is_int4 && rows.count == 1,
             prefetches = !is_widened && p.depth * p.columns > min_prefetch_bytes;
  const int64_t terms_at_once = is_widened ? max_group : p.depth,
                at_once = is_widened && !are_nibbles ? 1 : Shape::panels_at_once(rows.count);
  for (int64_t panel = panel_begin, panels; panel < panel_end; panel += panels) {
    const StoredPanel stored(p, panel);
    const int64_t left = p.columns - panel * panel_columns;
    panels = panel + at_once <= panel_end && at_once * panel_columns <= left ? at_once : 1;
    const int64_t stride = panels * panel_columns, columns = min(stride, left);
    // Each group of terms is added with its scale.
    clear_sums(rows.count + RowBlock::spare, stride, sums);
    const bool is_multiplied = are_nibbles && panels == panels_of_one;
    if constexpr (multiplies_nibbles) {
      if (is_multiplied) multiply_nibbles<panels_of_one>(p, stored, rows.in[0], sums);
    }
    for (int64_t k = 0, group = 0; k < p.depth && !is_multiplied;
         k += terms_at_once, group += terms_at_once / p.group) {
      const int64_t terms = min(terms_at_once, p.depth - k);
      if (is_int4)
        widen_codes(stored.at<Int4>(k), terms, codes);
      else if (is_widened)
        widen_codes(stored.at<int8_t>(k), terms, codes);
      const PanelTerms groups = {is_widened ? static_cast<const void *>(codes) : stored.at<char>(k),
                                 is_widened ? storage : Storage::int8,
                                 false,
                                 k,
                                 terms,
                                 columns,
                                 Sums::add_scaled,
                                 p.group,
                                 element_at(stored.scales, p.scale_storage, group * panel_columns),
                                 p.scale_storage,
                                 stored.groups * panel_columns,
                                 stored.offsets_apart};
      multiply_rows(groups, panels, stored.bytes, rows.in, rows.count, sums, stride, prefetches,
                    prefetches);
    }
    for (int64_t b = 0; p.offsets && b < panels; ++b)
      add_offsets(p, panel + b, rows.in[0] + p.depth, p.depth + p.sums, rows.count,
                  sums + b * panel_columns, stride);
    finish_sums(stored, rows.count, columns, sums, stride);
    write_results(p, rows.first, rows.count, sums, stride, panel, panels);
  }
}

// Multiplies a block of rows by panels without groups. Some of them may be left to project_in_step.
MHA_NOINLINE inline void project_block(const Projection &p, const RowBlock &rows, int64_t panel,
                                       int64_t panel_end) {
  const bool are_pairs = p.arithmetic == Arithmetic::bf16;
  const bool is_widened =
      are_pairs ? !has_loops_of_pairs
                : p.storage != Storage::f32 && (has_loops_of_floats_alone<Vector> ||
                                                rows.count > max_rows_widened_in_registers);
  if constexpr (Shape::has_few_row_forms) {
    const bool is_far = p.depth * p.columns * bytes_of(p.storage) > level3_weight_bytes;
    if (is_far && !are_pairs && rows.count >= 2 && rows.count <= 4)
      panel = project_in_step(p, rows, panel, panel_end);
  }
  project_panels(p, rows, is_widened, panel, panel_end);
}

// The kernels' `project`: passes blocks of rows through the panels.
inline void project(const Projection &p, const void *ready, int64_t row_begin, int64_t row_end,
                    int64_t panel_begin, int64_t panel_end) {
  const float *const given = static_cast<const float *>(ready);
  for (int64_t row = row_begin; row < row_end; row += project_block_rows) {
    const RowBlock rows(p, given ? given + (row - row_begin) * floats_of_row(p) : nullptr, row,
                        row_end);
    if (!multiplies_pairs && p.group != 0)
      project_groups(p, rows, panel_begin, panel_end);
    else
      project_block(p, rows, panel_begin, panel_end);
  }
}

// The kernels' `widen_rows`: copies input rows as floats, so that those of 16 bits are widened once
// and not again for each panel.
inline void widen_rows(const InputRows &x, int64_t row_begin, int64_t row_end, int64_t width,
                       int64_t group, float *to) {
  Cursor at = cursor_at(x, row_begin);
  for (int64_t row = row_begin; row < row_end; ++row) {
    float *const first = to;
    widen(x.storage,
          element_at(x.base, x.storage, at.sequence * x.batch_stride + at.row * x.row_stride),
          width, to);
    to += width;
    for (int64_t k = 0; group != 0 && k < width; k += group)
      *to++ = sum_of_head(first + k, min(group, width - k), 0.0f, false);
    advance(x, &at, 1, row + 1 < row_end);
  }
}

// ---- Bf16 arithmetic
//
// Rows become factors first, of each step the even ones and then the odd ones, as widen_pairs
// writes those of weights.

// Calls write(row, k, factors) with the factors of 32 terms from k on, for each step of each row. 0
// follows after the last term.
template <class Write>
MHA_INLINE void round_steps(const Projection &p, int64_t row_begin, int64_t row_end, Write write) {
  Cursor at = cursor_at(p.x, row_begin);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const char *const from =
        element_at(p.x.base, p.x.storage, at.sequence * p.x.batch_stride + at.row * p.x.row_stride);
    for (int64_t k = 0; k < p.depth; k += bf16_step) {
      alignas(64) float numbers[bf16_step] = {};
      alignas(64) uint16_t factors[bf16_step];
      widen(p.x.storage, element_at(from, p.x.storage, k), min(bf16_step, p.depth - k), numbers);
      narrow(Storage::bf16, numbers, bf16_step, factors);
      for (uint16_t &factor : factors) factor = bf16_factor_of(factor);
      write(row - row_begin, k, factors);
    }
    advance(p.x, &at, 1, row + 1 < row_end);
  }
}

// The pairs' `encode_rows`: rows as the loops multiply them, [step][2 chains][term].
MHA_NOINLINE inline void round_rows(const Projection &p, int64_t row_begin, int64_t row_end,
                                    void *ready) {
  float *to = static_cast<float *>(ready);
  round_steps(p, row_begin, row_end, [&](int64_t, int64_t, const uint16_t *factors) {
    for (int64_t first = 0; first < 2; ++first) {
      // Of two numbers of a chain, the instruction multiplies the one in the upper half first.
      for (int64_t i = first; i < bf16_step; i += 2 * numbers_of_term)
        *to++ = float_of(uint32_t{factors[i]} << 16 | (multiplies_pairs ? factors[i + 2] : 0u));
    }
  });
}

// The kernels' `finish_rows`: the second half of project, for a product that a BLAS has made.
inline void finish_rows(const Projection &p, const float *product, int64_t product_stride,
                        int64_t row_begin, int64_t row_end) {
  constexpr int64_t width = 256;
  alignas(64) float values[4 * width];
  for (int64_t row = row_begin; row < row_end; row += 4) {
    const int64_t rows = min(4, row_end - row);
    for (int64_t column = 0; column < p.columns; column += width) {
      const int64_t count = min(width, p.columns - column);
      for (int64_t r = 0; r < rows; ++r) {
        const float *const from = product + (row - row_begin + r) * product_stride + column;
        for (int64_t i = 0; i < count; ++i)
          values[r * width + i] = canonical(from[i] + p.bias[column + i]);
      }
      write_columns(p.destination, p.x, row, rows, values, width, column, count);
      if (p.tap.kind != Destination::Kind::none)
        write_columns(p.tap, p.x, row, rows, values, width, column, count);
    }
  }
}

}  // namespace
}  // namespace mha
