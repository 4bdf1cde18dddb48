// Arithmetic of sizes and counts, in which no overflow goes unseen.
#pragma once

#include <stdint.h>

#include "../compiler.h"

namespace mha {

// A non-negative count that remembers an overflow on its way: then it is as large as can be, and
// stays so. What no address space holds counts as an overflow too, where pointers have 32 bits.
class Count {
 public:
  Count(int64_t value) : value_(value) {}
  bool overflows() const { return value_ >= PTRDIFF_MAX; }
  int64_t value() const { return overflows() ? -1 : value_; }

  friend Count operator*(Count a, Count b) {
    int64_t product;
    return mul_overflows(a.value_, b.value_, &product) ? INT64_MAX : product;
  }
  friend Count operator+(Count a, Count b) {
    int64_t sum;
    return add_overflows(a.value_, b.value_, &sum) ? INT64_MAX : sum;
  }
  // To a multiple of a power of two.
  friend Count round_up(Count count, int64_t multiple) {
    const Count more = count + (multiple - 1);
    return more.overflows() ? more : more.value_ & -multiple;
  }

 private:
  int64_t value_;  // INT64_MAX after an overflow of 64 bits
};

// a / b for a >= 0 and b > 0. Avoids the division, which is slow, where the result is obvious, as
// it mostly is in small calls.
inline int64_t quotient(int64_t a, int64_t b) {
  return a < b ? 0 : b == 1 ? a : a == b ? 1 : a / b;
}

// How many blocks of `size` hold `count` things; no overflow on the way.
inline int64_t blocks_of(int64_t count, int64_t size) {
  const int64_t whole = quotient(count, size);
  return whole + (whole * size != count);
}

// For sums that may wrap, as counts of operations do.
inline uint64_t product(int64_t a, int64_t b) {
  return static_cast<uint64_t>(a) * static_cast<uint64_t>(b);
}

}  // namespace mha
