// Packing moves tiles of 16 rows and 16 columns of floats. A side of a tile is a cache line, so
// that whole lines are read and written whichever of rows or columns is contiguous in the caller's
// matrix.
#pragma once

#include <stdint.h>

#include "../compiler.h"

namespace mha {

constexpr int64_t tile_rows = 16;
constexpr int64_t tile_columns = 16;

// Up to 16 columns of the caller's matrix. Element (k, c) is start[c][k * k_stride].
struct TileColumns {
  const float *start[tile_columns];
  int64_t count;
  int64_t k_stride;
  bool has_contiguous_rows;  // there are 16 columns, side by side
};

// Both functions copy the rows from k to k + num_rows, at most 16, to the rows of `to` from row 0
// on. Where the processor can, they write past the caches, which would otherwise fetch every line
// before it is written and could not hold a large layer anyway. Such writes may become visible
// late, so that finish_copying has to follow the last tile.

// Copies to any matrix, and writes columns.count columns.
void copy_tile(const TileColumns &columns, int64_t k, int64_t num_rows, float *to,
               int64_t to_stride);

// Copies to rows that are aligned to 64 bytes. It always writes 16 columns, with zeros after the
// last one, and returns their tile_checksum.
uint64_t copy_panel_tile(const TileColumns &columns, int64_t k, int64_t num_rows, float *to,
                         int64_t to_stride, uint64_t offset);

// Makes all tiles visible to other threads before anything that this thread writes later.
void finish_copying();

// The checksum of rows of 16 columns that begin at `offset` in the packed buffer. The sums of tiles
// are added, in any order.
uint64_t tile_checksum(const float *rows, int64_t row_stride, int64_t num_rows, uint64_t offset);

}  // namespace mha
