// Rotations of queries and keys, for tests that take the tables as given.
#ifndef MHA_TESTS_SUPPORT_ROPE_H
#define MHA_TESTS_SUPPORT_ROPE_H

#include <cmath>
#include <cstdint>

#include "support/fixtures.h"

namespace support {

// Tables of the usual angles, with so many floats, all NaN, between their rows.
inline Rope MakeRope(bool is_interleaved, int64_t dims, int64_t num_positions, int64_t gap = 0) {
  Rope rope;
  rope.is_interleaved = is_interleaved;
  rope.dims = dims;
  rope.num_positions = num_positions;
  rope.table_stride = dims / 2 + gap;
  rope.cos.assign(num_positions * rope.table_stride, FromBits(0x7fc0dead));
  rope.sin = rope.cos;
  for (int64_t r = 0; r < num_positions; r++) {
    for (int64_t i = 0; i < dims / 2; i++) {
      const double angle =
          static_cast<double>(r) *
          std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(dims));
      rope.cos[r * rope.table_stride + i] = static_cast<float>(std::cos(angle));
      rope.sin[r * rope.table_stride + i] = static_cast<float>(std::sin(angle));
    }
  }
  return rope;
}

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_ROPE_H
