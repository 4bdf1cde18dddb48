// What an inner loop over rows and columns is told (tile.h has the loops), and what it is.
#pragma once

#include "rows.h"

namespace mha {

// What a loop prefetches while it computes. With every term it asks for one line in each of some
// streams, which start `apart` bytes from each other, because memory that is read in several places
// at once arrives faster. After each term all streams advance by `step` bytes, and by `skip` bytes
// more when the loop goes on to the next columns. A loop with nothing to prefetch has step 0: it
// asks for the same line again, which costs next to nothing.
struct Prefetch {
  const char *address;
  int64_t apart, step, skip;
};

// What becomes of the sums of a tile:
//   replace      the first chain overwrites the sums in memory, later chains are added to it
//   add          all chains are added to the sums in memory
//   add_scaled   the same, each multiplied by a scale for its column, by a fused multiply-add
//   extend       each chain starts with the sum in memory in place of +0
//   add_halves   of each two chains the sum is added to that in memory
enum class Sums { replace, add, add_scaled, extend, add_halves };

constexpr int max_tile_rows = 8, max_tile_strips = 8;

// R rows times B strips of columns, `repeats` times with other rows or columns. A strip is C
// vectors of adjacent columns; the loop fixes R, B and C. The element of term k in column c of
// strip b is columns[b][k * column_stride + c], and its sum for row r is sums[b][r * sums_stride +
// c]. Terms are cut into chains of `chain` terms, whose sums are added (CONTRACT.md, section 3).
//
// Of pairs of bf16, two chains pass the same pairs: one takes the first numbers, one the second.
//
// Of codes, a term is a pair of words, and so is the number of a row; the sums are integers. With
// add_scaled those of a chain become floats, and the scale is the number of the row that follows
// its terms; the first chain replaces the sums in memory.
struct Tile {
  const float *const *rows;  // term k of row r is rows[r][k]
  const void *columns[max_tile_strips];
  int64_t column_stride;
  int64_t terms, chain;
  float *sums[max_tile_strips];
  int64_t sums_stride;
  Sums mode;
  // add_scaled: for each chain, the scales of the columns of strip 0 in a row of 48, how far apart
  // those of the strips are, and how many bytes behind them the offsets are, which are read later.
  const char *scales;
  int64_t scales_apart, offsets_apart;
  Storage scale_storage;                                // f32 or f16
  int64_t repeats, next_rows, next_columns, next_sums;  // how far each advances, in numbers
  Prefetch prefetch;
};

// A loop of some shape, for any type of the columns.
struct Loop {
  void (*run)(const Tile &tile);
  int64_t rows, strips, columns;  // columns of a strip
  uint32_t streams;               // that it prefetches
};

// The two loops for a number of rows.
struct Loops {
  Loop wide;    // as many columns at once as the registers have room for
  Loop narrow;  // 16 columns, for what is left
};

}  // namespace mha
