// Statuses with their sentence.
#pragma once

#include <stdarg.h>
#include <stdint.h>

#include "../compiler.h"
#include "mha.h"

namespace mha {

// Where a function reports errors: its mha_error, which may be null, and the number of the
// parameter that it checks, from 1 on.
class Reporter {
 public:
  // Sets success, which holds until fail. Of the message only the terminator is written.
  explicit Reporter(mha_error *error, uint32_t argument = 1) : error_(error), argument_(argument) {
    if (!error_) return;
    error_->status = MHA_OK;
    error_->argument = 0;
    error_->message[0] = 0;
  }

  // For the checks of another parameter; 0: of none.
  Reporter about(uint32_t argument) const {
    Reporter other = *this;
    other.argument_ = argument;
    return other;
  }

  // For those of the parameter after this one.
  Reporter next() const { return about(argument_ + 1); }

  // Each writes the error and returns its status, for `return report.invalid(...)`. The last four
  // have the status in their name: MHA_ERROR_INVALID_VALUE, _NULL_POINTER, _SHAPE, _TOO_LARGE.
  mha_status fail(mha_status status, const char *format, ...) const MHA_COLD MHA_FORMAT(3, 4);
  mha_status invalid(const char *format, ...) const MHA_COLD MHA_FORMAT(2, 3);
  mha_status null(const char *format, ...) const MHA_COLD MHA_FORMAT(2, 3);
  mha_status shape(const char *format, ...) const MHA_COLD MHA_FORMAT(2, 3);
  mha_status too_large(const char *format, ...) const MHA_COLD MHA_FORMAT(2, 3);

 private:
  mha_status write(mha_status status, const char *format, va_list values) const;

  mha_error *error_;
  uint32_t argument_;
};

// How functions take it: copies go through memory in small calls, too.
using Report = const Reporter &;

// Leaves the function with the status of a check that fails.
#define MHA_TRY(check)                                    \
  do {                                                    \
    if (const mha_status failed = (check)) return failed; \
  } while (0)

// What %lld and %llu print.
inline long long lld(int64_t x) { return x; }
inline unsigned long long llu(uint64_t x) { return x; }

}  // namespace mha
