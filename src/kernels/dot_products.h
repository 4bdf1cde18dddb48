// Exact sums of products of codes: the instructions of each set for bytes of Vector::size columns,
// [column][4], times four codes of a row.
//
// The bytes are codes with a number added that makes them positive. Code is the type of a row's
// codes: int16_t, or SmallCode or NibbleCode for codes of 8 bits. DotProducts<Code> has
//
//   vectors(rows)      vectors of columns in a tile of that many rows: as many sums as there are
//                      registers for; they divide a panel
//   passes             steps in which products of four terms are added, each for some of the four
//   swaps_codes        whether the codes of a row lie in the order 0, 2, 1, 3
//   Sum                sums of products with Vector::size columns, each over lanes_of_sum lanes
//   load_terms, load_row_terms   what a pass takes of the bytes, and of the codes of a row
//   load_nibbles       the same of bytes with two codes each: of the first four terms (0), or of
//                      the second (1)
//   begin(value)       a sum with this value in each of its lanes
//   add(sum, terms, row)
//   sums_of(sum)       the sums as floats
//
// What is multiplied exceeds the codes by the number added to the bytes and by load_adds. Therefore
// all sums start with the number that begin_of computes from the sum of the codes of the row.
#pragma once

#include "stored.h"

namespace mha {
namespace {

constexpr int64_t terms_together = 4;  // terms of a column that lie side by side

template <class Code>
struct DotProducts;

// How codes of 8 bits are stored: as bytes where the set multiplies bytes.
#if defined(MHA_MULTIPLIES_BYTES)
using SmallCode = int8_t;
#else
using SmallCode = int16_t;
#endif
// The same where weights are nibbles, whose products with bytes may be added in 16 bits.
#if defined(MHA_KERNELS_SCALAR) || defined(MHA_WIDENS_NIBBLES) || defined(__OPTIMIZE_SIZE__)
using NibbleCode = SmallCode;
#else
using NibbleCode = int8_t;
#endif

// The number that a sum starts with in each of its lanes, so that it ends as the sum of the
// products of codes. The bytes are codes + added, a multiple of 8; the codes of the row add up to
// row_sum.
template <class Code>
MHA_INLINE int32_t begin_of(int32_t row_sum, int32_t added) {
  using Dots = DotProducts<Code>;
  return static_cast<int32_t>(
      static_cast<uint32_t>(row_sum) *
      static_cast<uint32_t>(-((added + Dots::load_adds) / Dots::lanes_of_sum)));
}

// Brings the codes of a row, or the numbers that they are made of, into the order in which
// DotProducts<Code> takes them.
template <class Code, class Number>
MHA_INLINE void put_in_order_of_passes(Number *numbers, int64_t count) {
  if (!DotProducts<Code>::swaps_codes) return;
  for (int64_t i = 0; i < count; i += terms_together) {
    const Number second = numbers[i + 1];
    numbers[i + 1] = numbers[i + 2];
    numbers[i + 2] = second;
  }
}

}  // namespace
}  // namespace mha
