// Reads a tile, transposes it if the caller's columns are contiguous, and writes it.
//
// Packing is limited by memory, so the code here serves the memory: it asks for lines ahead of
// time, writes whole lines past the caches, and computes the checksum while the numbers are in
// registers. MHA_VECTOR and MHA_SHUFFLE (compiler.h) are vectors of 16 bytes, which every processor
// has.
#include "tiles.h"

#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace mha {
namespace {

// Four floats, and the same 16 bytes as two integers.
using Quad = MHA_VECTOR(float);
using Pair = MHA_VECTOR(uint64_t);

Quad load(const float *from) {
  Quad quad;
  memcpy(&quad, from, sizeof quad);
  return quad;
}

Pair pair_of(Quad quad) {
  Pair pair;
  memcpy(&pair, &quad, sizeof pair);
  return pair;
}

void store(float *to, Quad quad) { memcpy(to, &quad, sizeof quad); }

// Writes past the caches, to an address that is aligned to 16 bytes.
void stream(float *to, Quad quad) {
#if defined(__SSE2__) && defined(MHA_EXTENSIONS)
  _mm_stream_ps(to, quad);
#else
  memcpy(to, from, 4 * sizeof(float));
#endif
}

// The checksum of a tile. It has 8 lanes, each of which takes 8 bytes of every row by an addition
// and a rotation; that costs less than copying them, which multiplications would not. Every step
// can be undone, so any change within one lane's bytes of one row changes the sum. The rotation
// tells the rows apart. It repeats after 64 rows, and a tile has 16.
class TileSum {
 public:
  void add(const float *row) {
    MHA_UNROLL_AT_MOST(8)
    for (int i = 0; i < words; ++i) {
      Word word;
      memcpy(&word, row + i * (tile_columns / words), sizeof word);
      word += lanes_[i];
      lanes_[i] = word << 25 | word >> 39;
    }
  }

  // The offset makes sums of equal tiles differ, so that the total, in which they can be added in
  // any order, tells where each tile is.
  uint64_t value(uint64_t offset) const {
    uint64_t sum = mix(offset), lanes[8];
    memcpy(lanes, lanes_, sizeof lanes);
    for (const uint64_t lane : lanes) sum = mix(sum ^ lane);
    return mix(sum);
  }

 private:
#if defined(MHA_VECTOR)
  using Word = MHA_VECTOR(uint64_t);
#else
  using Word = uint64_t;
#endif
  static constexpr int words = 8 * sizeof(uint64_t) / sizeof(Word);

  static uint64_t mix(uint64_t sum) {
    sum *= 0x9e3779b97f4a7c15u;
    return sum ^ sum >> 32;
  }

  Word lanes_[words] = {};
};

// A tile on the stack, for columns that have to be brought together.
using Rows = float[tile_rows][tile_columns];

// Transposes 16 columns that are each contiguous in memory, 4 by 4 numbers at a time. The columns
// are far apart and often in the same set of the first-level cache. So each line is asked for 12
// tiles early, into the second level, and used up at once when its turn comes.
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

// Brings any columns together: those at the edges of a matrix, and those of two heads that are not
// side by side in the caller's matrix.
void gather(const TileColumns &columns, int64_t k, int64_t num_rows, Rows *rows) {
  memset(rows, 0, sizeof *rows);
  for (int64_t c = 0; c < columns.count; ++c) {
    for (int64_t row = 0; row < num_rows; ++row)
      (*rows)[row][c] = columns.start[c][(k + row) * columns.k_stride];
  }
}

// Rows of a tile that can be read one after the other.
struct Lines {
  const float *first;
  int64_t stride;
};

// Finds the rows in the caller's matrix if they are contiguous there, and otherwise fills `rows`.
Lines lines_of(const TileColumns &columns, int64_t k, int64_t num_rows, Rows *rows) {
  if (columns.has_contiguous_rows) {
    const Lines lines = {columns.start[0] + k * columns.k_stride, columns.k_stride};
    // Rows may be a multiple of 4 KiB apart and so in the same set of the first-level cache. The
    // next tile is therefore asked for into the second level. It may be past the end of the matrix,
    // where C++ allows no pointer, so addresses are numbers here.
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

// Columns after the last one belong to the next matrix, so exactly columns.count are written.
void copy_tile(const TileColumns &columns, int64_t k, int64_t num_rows, float *to,
               int64_t to_stride) {
  Rows rows;
  const Lines lines = lines_of(columns, k, num_rows, &rows);
  const float *from = lines.first;
  // Rows of a plain matrix may begin anywhere, and streaming needs whole vectors at aligned places.
  const bool can_stream = reinterpret_cast<uintptr_t>(to) % sizeof(Quad) == 0 && to_stride % 4 == 0;
  for (int64_t row = 0; row < num_rows; ++row, from += lines.stride, to += to_stride) {
    int64_t c = 0;
    for (; can_stream && c + 4 <= columns.count; c += 4) stream(to + c, from + c);
    for (; c < columns.count; ++c) to[c] = from[c];
  }
}

// The sum is that of tile_checksum over the rows just written, without reading them again.
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
