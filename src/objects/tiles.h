// Packing moves tiles: 16 rows of 16 columns, so that a cache line of either layout is read at once
// and whole lines are written.
#pragma once

#include <stdint.h>

#include "../compiler.h"

namespace mha {

constexpr int64_t tile_rows = 16;
constexpr int64_t tile_columns = 16;

// Up to 16 columns of a matrix of the caller's: element (k, c) is start[c][k * k_stride].
struct TileColumns {
  const float *start[tile_columns];
  int64_t count;
  int64_t k_stride;
  bool has_contiguous_rows;  // there are 16, side by side
};

// Both copy rows k ... k + num_rows (at most 16) to row 0 of `to` and so on, past the caches where
// the processor can: they would fetch every line before it is written, and do not hold a large
// layer anyway. After the last tile comes finish_copying.

// To any matrix; columns.count columns are written.
void copy_tile(const TileColumns &columns, int64_t k, int64_t num_rows, float *to,
               int64_t to_stride);

// To rows that are aligned to 64 bytes, of which 16 columns are written: zeros behind the last one.
// Returns the tile_checksum.
uint64_t copy_panel_tile(const TileColumns &columns, int64_t k, int64_t num_rows, float *to,
                         int64_t to_stride, uint64_t offset);

// Makes the tiles visible to other threads, however they get to know of them.
void finish_copying();

// The checksum of rows of 16 columns, which begin at `offset` in the packed buffer. Tiles can be
// summed up in any order.
uint64_t tile_checksum(const float *rows, int64_t row_stride, int64_t num_rows, uint64_t offset);

}  // namespace mha
