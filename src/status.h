// Statuses with their sentence, and the size arithmetic that cannot overflow unseen.
#pragma once

#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include "mha.h"

namespace mha {

// Where a function reports: its mha_error (may be null), and the parameter that is being checked.
class Report {
 public:
  // Writes success, which stands until fail: what tells it, not the whole message.
  explicit Report(mha_error *error) : error_(error) {
    if (!error_) return;
    error_->status = MHA_OK;
    error_->argument = 0;
    error_->message[0] = 0;
  }

  // Writes the error and returns status: `return report.fail(...)`.
  mha_status fail(mha_status status, uint32_t argument, const char *format, ...) __attribute__((cold, format(printf, 4, 5)));

 private:
  mha_error *error_;
};

// A non-negative count that remembers an overflow on its way: then it is as large as can be, and stays it.
class Count {
 public:
  Count(int64_t value) : value_(value) {}
  bool overflows() const { return value_ == INT64_MAX; }
  int64_t value() const { return overflows() ? -1 : value_; }

  friend Count operator*(Count a, Count b) {
    int64_t product;
    return __builtin_mul_overflow(a.value_, b.value_, &product) ? INT64_MAX : product;
  }
  friend Count operator+(Count a, Count b) {
    int64_t sum;
    return __builtin_add_overflow(a.value_, b.value_, &sum) ? INT64_MAX : sum;
  }
  // To a multiple of a power of two.
  friend Count round_up(Count count, int64_t multiple) {
    const Count more = count + (multiple - 1);
    return more.overflows() ? more : more.value_ & -multiple;
  }

 private:
  int64_t value_;  // INT64_MAX after an overflow
};

// a / b for a >= 0 and b > 0, without the division, which is slow, where small calls have none to do.
inline int64_t quotient(int64_t a, int64_t b) { return a < b ? 0 : b == 1 ? a : a == b ? 1 : a / b; }

// How many blocks of `size` hold `count` things; no overflow on the way.
inline int64_t blocks_of(int64_t count, int64_t size) {
  const int64_t whole = quotient(count, size);
  return whole + (whole * size != count);
}

// For sums that may wrap, as counts of operations do.
inline uint64_t product(int64_t a, int64_t b) { return static_cast<uint64_t>(a) * static_cast<uint64_t>(b); }

// Input structs grow at their end. Copies the fields that the caller's struct has and leaves the others zero; a caller's field that this
// version does not know must be zero.
mha_status read_struct(Report &report, uint32_t argument, const char *name, const void *given, void *copy, size_t known_size,
                       size_t smallest_size);

template <class Struct>
inline mha_status read_struct(Report &report, uint32_t argument, const char *name, const Struct *given, Struct *copy) {
  if (given && given->struct_size == sizeof(Struct)) {  // as most are
    memcpy(copy, given, sizeof(Struct));
    return MHA_OK;
  }
  // Every struct still has the size of its first version.
  return read_struct(report, argument, name, static_cast<const void *>(given), copy, sizeof(Struct), sizeof(Struct));
}

}  // namespace mha
