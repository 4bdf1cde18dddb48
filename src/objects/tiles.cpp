#include "tiles.h"

#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace mha {
namespace {

// Copies four floats past the caches.
void stream(float *to, const float *from) {
#if defined(__SSE2__)
  _mm_stream_ps(to, _mm_loadu_ps(from));
#else
  memcpy(to, from, 4 * sizeof(float));
#endif
}

// The checksum of a tile: 8 lanes, each of which takes 8 bytes of every row by an addition and a
// rotation. That costs less than copying them, which multiplications would not. Every step can be
// undone, so whatever changes within one lane's bytes of one row changes the sum. The rotation
// tells the rows apart; it would come round after 64.
class TileSum {
 public:
  void add(const float *row) {
    uint64_t words[8];
    memcpy(words, row, sizeof words);
    for (int i = 0; i < 8; ++i) {
      const uint64_t sum = lanes_[i] + words[i];
      lanes_[i] = sum << 25 | sum >> 39;
    }
  }

  // The offset tells tiles apart, so that their sums can be added in any order.
  uint64_t value(uint64_t offset) const {
    uint64_t sum = mix(offset);
    for (const uint64_t lane : lanes_) sum = mix(sum ^ lane);
    return mix(sum);
  }

 private:
  static uint64_t mix(uint64_t sum) {
    sum *= 0x9e3779b97f4a7c15u;
    return sum ^ sum >> 32;
  }

  uint64_t lanes_[8] = {};
};

using Rows = float[tile_rows][tile_columns];

// Four columns of four rows each, to rows[.][c] and the three after it.
void transpose4x4(const float *const (&columns)[4], int64_t row, int64_t c, Rows *rows) {
#if defined(MHA_SHUFFLE)
  MHA_VECTOR(float) column[4], even_low, even_high, odd_low, odd_high;
  for (int i = 0; i < 4; ++i) memcpy(&column[i], columns[i] + row, sizeof column[i]);
  even_low = MHA_SHUFFLE(column[0], column[2], 0, 4, 1, 5);
  even_high = MHA_SHUFFLE(column[0], column[2], 2, 6, 3, 7);
  odd_low = MHA_SHUFFLE(column[1], column[3], 0, 4, 1, 5);
  odd_high = MHA_SHUFFLE(column[1], column[3], 2, 6, 3, 7);
  column[0] = MHA_SHUFFLE(even_low, odd_low, 0, 4, 1, 5);
  column[1] = MHA_SHUFFLE(even_low, odd_low, 2, 6, 3, 7);
  column[2] = MHA_SHUFFLE(even_high, odd_high, 0, 4, 1, 5);
  column[3] = MHA_SHUFFLE(even_high, odd_high, 2, 6, 3, 7);
  for (int i = 0; i < 4; ++i) memcpy(&(*rows)[row + i][c], &column[i], sizeof column[i]);
#else
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 4; ++j) (*rows)[row + i][c + j] = columns[j][row + i];
  }
#endif
}

// 16 columns that are contiguous in memory. They lie far apart and often in the same set of the
// first-level cache, so a line is asked for early, into the second level, and used up at once.
void transpose(const float *const *columns, int64_t k, Rows *rows) {
  constexpr int64_t ahead = 12 * tile_rows;
  for (int64_t c = 0; c < tile_columns; c += 4) {
    const float *const four[4] = {columns[c] + k, columns[c + 1] + k, columns[c + 2] + k,
                                  columns[c + 3] + k};
    for (const float *column : four) MHA_PREFETCH_L2(column + ahead);
    MHA_UNROLL_AT_MOST(4)
    for (int64_t row = 0; row < tile_rows; row += 4) transpose4x4(four, row, c, rows);
  }
}

// Any columns: at the edges, and where a tile has columns of two heads' matrices.
void gather(const TileColumns &columns, int64_t k, int64_t num_rows, Rows *rows) {
  memset(rows, 0, sizeof *rows);
  for (int64_t c = 0; c < columns.count; ++c) {
    for (int64_t row = 0; row < num_rows; ++row)
      (*rows)[row][c] = columns.start[c][(k + row) * columns.k_stride];
  }
}

// Where the rows of a tile can be read: at the caller's, or in `rows`, which is filled.
struct Lines {
  const float *first;
  int64_t stride;
};

Lines lines_of(const TileColumns &columns, int64_t k, int64_t num_rows, Rows *rows) {
  if (columns.has_contiguous_rows) {
    const Lines lines = {columns.start[0] + k * columns.k_stride, columns.k_stride};
    // Rows may be a multiple of 4 KiB apart, in the same set of the first-level cache: the next
    // tile goes into the second level. These may lie behind the matrix, where a pointer must not
    // point: addresses are numbers here.
    const uintptr_t first = reinterpret_cast<uintptr_t>(lines.first),
                    row_bytes = static_cast<uintptr_t>(lines.stride) * sizeof(float);
    for (uintptr_t row = tile_rows; row < 2 * tile_rows; ++row)
      MHA_PREFETCH_L2(reinterpret_cast<const void *>(first + row * row_bytes));
    return lines;
  }
  if (columns.k_stride == 1 && columns.count == tile_columns && num_rows == tile_rows) {
    transpose(columns.start, k, rows);
  } else {
    gather(columns, k, num_rows, rows);
  }
  return {(*rows)[0], tile_columns};
}

}  // namespace

void copy_tile(const TileColumns &columns, int64_t k, int64_t num_rows, float *to,
               int64_t to_stride) {
  Rows rows;
  const Lines lines = lines_of(columns, k, num_rows, &rows);
  const float *from = lines.first;
  const bool can_stream =
      reinterpret_cast<uintptr_t>(to) % (4 * sizeof(float)) == 0 && to_stride % 4 == 0;
  for (int64_t row = 0; row < num_rows; ++row, from += lines.stride, to += to_stride) {
    int64_t c = 0;
    for (; can_stream && c + 4 <= columns.count; c += 4) stream(to + c, from + c);
    for (; c < columns.count; ++c) to[c] = from[c];
  }
}

uint64_t copy_panel_tile(const TileColumns &columns, int64_t k, int64_t num_rows, float *to,
                         int64_t to_stride, uint64_t offset) {
  Rows rows;
  const Lines lines = lines_of(columns, k, num_rows, &rows);
  const float *from = lines.first;
  TileSum sum;
  MHA_UNROLL_AT_MOST(4)
  for (int64_t row = 0; row < num_rows; ++row, from += lines.stride, to += to_stride) {
    sum.add(from);
    for (int i = 0; i < tile_columns; i += 4) stream(to + i, from + i);
  }
  return sum.value(offset);
}

void finish_copying() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

uint64_t tile_checksum(const float *rows, int64_t row_stride, int64_t num_rows, uint64_t offset) {
  TileSum sum;
  for (int64_t row = 0; row < num_rows; ++row) sum.add(rows + row * row_stride);
  return sum.value(offset);
}

}  // namespace mha
