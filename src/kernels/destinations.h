// Where the rows of a projection come from, and where its finished values go.
#pragma once

#include "rows.h"
#include "tile.h"

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
  int64_t block;     // its number in the destination
  int64_t row;       // of the caller's array
  int64_t position;  // among the valid rows
};

// Row number `row` of all sequences together.
MHA_INLINE Cursor cursor_at(const InputRows &x, int64_t row) {
  if (!x.extents) {
    const int64_t sequence = quotient(row, x.rows_per_sequence), position = row - sequence * x.rows_per_sequence;
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

// `step` rows on, where there are more.
MHA_INLINE void advance(const InputRows &x, Cursor *at, int64_t step, bool has_more) {
  at->row += step;
  at->position += step;
  if (!has_more || rows_left(x, *at) > 0) return;
  do ++at->sequence;
  while (x.extents && x.extents[at->sequence].count == 0);
  at->position = 0;
  at->row = x.extents ? x.extents[at->sequence].first : 0;
  at->block = x.extents ? x.extents[at->sequence].block : at->sequence;
}

// Part of an output row: to `at` elements from the start, with a residual added or in 16 bits. The residual may lie where the output does.
template <class V>
MHA_NOINLINE void write_converted(const Destination &to, int64_t row, int64_t column, int64_t at, const float *values, int64_t count) {
  constexpr int64_t at_once = 64;
  alignas(64) float sums[at_once];
  for (int64_t done = 0; done < count; done += at_once) {
    const int64_t number = min(at_once, count - done);
    const float *from = values + done;
    if (to.residual) {
      widen<V>(to.storage, element_at(to.residual, to.storage, row * to.residual_row_stride + column + done), number, sums);
      int64_t i = 0;
      for (; i + static_cast<int64_t>(V::size) <= number; i += V::size) store(sums + i, canonical(load<V>(from + i) + load<V>(sums + i)));
      for (; i < number; ++i) sums[i] = canonical(from[i] + sums[i]);
      from = sums;
    }
    void *const written = element_at(to.base, to.storage, at + done);
    if (to.storage == Storage::f32)
      copy<V>(from, static_cast<float *>(written), number);
    else
      narrow(to.storage, from, number, written);
  }
}

// Finished values, rows `row`, row + 1, ... of the output and columns first_column, ..., to one destination.
template <class V>
inline void write_columns(const Destination &to, const InputRows &x, int64_t row, int64_t num_rows, const float *values,
                          int64_t values_stride, int64_t first_column, int64_t num_columns) {
  const Cursor first = cursor_at(x, row);
  const bool is_converted = to.residual || to.storage != Storage::f32;
  int64_t head = quotient(first_column, to.head_width), c = first_column - head * to.head_width;
  for (int64_t done = 0; done < num_columns; ++head, c = 0) {
    const int64_t count = min(to.head_width - c, num_columns - done);
    Cursor at = first;
    for (int64_t r = 0; r < num_rows;) {
      const float *const from = values + r * values_stride + done;
      const int64_t start = head * to.head_stride + at.block * to.batch_stride;
      float *const base = static_cast<float *>(to.base) + start;
      int64_t step = 1;
      if (is_converted) {
        write_converted<V>(to, at.row, c, start + at.row * to.row_stride + c, from, count);
      } else if (to.kind != Destination::Kind::key_blocks) {
        copy<V>(from, base + (to.kind == Destination::Kind::rows ? at.row : at.position) * to.row_stride + c, count);
      } else {
        const int64_t lane = place_in_block(at.position);
        float *const block = base + (at.position - lane) * to.head_width + c * key_block + lane;
        int64_t i = 0;
        if (r + 4 <= num_rows && lane + 4 <= key_block && rows_left(x, at) >= 4) {
          step = 4;
          const float *const row1 = from + values_stride, *const row2 = row1 + values_stride, *const row3 = row2 + values_stride;
          for (; i + 4 <= count; i += 4) transpose4x4(from + i, row1 + i, row2 + i, row3 + i, block + i * key_block, key_block);
        }
        for (int64_t s = 0; s < step; ++s) {
          for (int64_t rest = i; rest < count; ++rest) block[rest * key_block + s] = from[s * values_stride + rest];
        }
      }
      r += step;
      advance(x, &at, step, r < num_rows);
    }
    done += count;
  }
}

// Finished values in rows of `stride` floats to where they are wanted.
template <class V>
MHA_INLINE void write_results(const Projection &p, int64_t row, int64_t num_rows, const float *results, int64_t stride, int64_t panel,
                              int64_t panels) {
  const int64_t first_column = panel * panel_columns, num_columns = min(panels * panel_columns, p.columns - first_column);
  write_columns<V>(p.destination, p.x, row, num_rows, results, stride, first_column, num_columns);
  if (p.tap.kind != Destination::Kind::none) write_columns<V>(p.tap, p.x, row, num_rows, results, stride, first_column, num_columns);
}

// Up to project_block_rows input rows.
struct RowBlock {
  static constexpr int spare = 3;
  int64_t first, count;
  const float *in[project_block_rows + spare];  // a tile may have more rows than there are: the last one again

  // given: all of them, one after the other; null: they lie where the projection says.
  MHA_INLINE RowBlock(const Projection &p, const float *given, int64_t begin, int64_t end)
      : first(begin), count(min(project_block_rows, end - begin)) {
    const float *const base = static_cast<const float *>(p.x.base);
    Cursor at = cursor_at(p.x, begin);
    for (int64_t r = 0; r < count; ++r) {
      in[r] = given ? given + r * p.depth : base + at.sequence * p.x.batch_stride + at.row * p.x.row_stride;
      advance(p.x, &at, 1, r + 1 < count);
    }
    for (int64_t r = count; r < count + spare; ++r) in[r] = in[count - 1];
  }
};

}  // namespace
}  // namespace mha
