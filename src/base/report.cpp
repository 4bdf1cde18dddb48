// Messages are written into the caller's mha_error, which is all that an error leaves behind: the
// library prints nothing and allocates nothing. A message that is too long ends early.
#include "report.h"

#include <stdio.h>

namespace mha {

mha_status Reporter::write(mha_status status, const char *format, va_list values) const {
  if (error_) {
    error_->status = status;
    error_->argument = argument_;
    vsnprintf(error_->message, sizeof error_->message, format, values);
  }
  return status;
}

mha_status Reporter::fail(mha_status status, const char *format, ...) const {
  va_list values;
  va_start(values, format);
  write(status, format, values);
  va_end(values);
  return status;
}

// Functions with the attribute `format` cannot be templates.
#define MHA_REPORT(name, status)                             \
  mha_status Reporter::name(const char *format, ...) const { \
    va_list values;                                          \
    va_start(values, format);                                \
    write(status, format, values);                           \
    va_end(values);                                          \
    return status;                                           \
  }
MHA_REPORT(invalid, MHA_ERROR_INVALID_VALUE)
MHA_REPORT(null, MHA_ERROR_NULL_POINTER)
MHA_REPORT(shape, MHA_ERROR_SHAPE)
MHA_REPORT(too_large, MHA_ERROR_TOO_LARGE)
#undef MHA_REPORT

}  // namespace mha

const char *mha_status_string(mha_status status) {
  static constexpr const char *names[] = {
      "MHA_OK",
      "MHA_ERROR_NULL_POINTER",
      "MHA_ERROR_STRUCT_SIZE",
      "MHA_ERROR_INVALID_VALUE",
      "MHA_ERROR_SHAPE",
      "MHA_ERROR_TOO_LARGE",
      "MHA_ERROR_BUFFER_TOO_SMALL",
      "MHA_ERROR_OUT_OF_MEMORY",
      "MHA_ERROR_INSTRUCTION_SET",
      "MHA_ERROR_PACKED_FORMAT",
      "MHA_ERROR_PACKED_CHECKSUM",
      "MHA_ERROR_OUT_OF_RANGE",
      "MHA_ERROR_CACHE_FULL",
      "MHA_ERROR_CACHE_SHARED",
      "MHA_ERROR_CACHE_FORMAT",
  };
  static_assert(sizeof names / sizeof names[0] == MHA_ERROR_CACHE_FORMAT + 1,
                "a name for each, by its number");
  return status <= MHA_ERROR_CACHE_FORMAT ? names[status] : "unknown mha_status";
}
