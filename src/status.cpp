#include "status.h"

#include <stdio.h>

namespace mha {

mha_status Report::write(mha_status status, const char *format, va_list values) const {
  if (error_) {
    error_->status = status;
    error_->argument = argument_;
    vsnprintf(error_->message, sizeof error_->message, format, values);
  }
  return status;
}

mha_status Report::fail(mha_status status, const char *format, ...) const {
  va_list values;
  va_start(values, format);
  write(status, format, values);
  va_end(values);
  return status;
}

mha_status Report::invalid(const char *format, ...) const {
  va_list values;
  va_start(values, format);
  write(MHA_ERROR_INVALID_VALUE, format, values);
  va_end(values);
  return MHA_ERROR_INVALID_VALUE;
}

}  // namespace mha

const char *mha_status_string(mha_status status) {
  switch (status) {
    case MHA_OK:
      return "MHA_OK";
    case MHA_ERROR_NULL_POINTER:
      return "MHA_ERROR_NULL_POINTER";
    case MHA_ERROR_STRUCT_SIZE:
      return "MHA_ERROR_STRUCT_SIZE";
    case MHA_ERROR_INVALID_VALUE:
      return "MHA_ERROR_INVALID_VALUE";
    case MHA_ERROR_SHAPE:
      return "MHA_ERROR_SHAPE";
    case MHA_ERROR_TOO_LARGE:
      return "MHA_ERROR_TOO_LARGE";
    case MHA_ERROR_BUFFER_TOO_SMALL:
      return "MHA_ERROR_BUFFER_TOO_SMALL";
    case MHA_ERROR_OUT_OF_MEMORY:
      return "MHA_ERROR_OUT_OF_MEMORY";
    case MHA_ERROR_INSTRUCTION_SET:
      return "MHA_ERROR_INSTRUCTION_SET";
    case MHA_ERROR_PACKED_FORMAT:
      return "MHA_ERROR_PACKED_FORMAT";
    case MHA_ERROR_PACKED_CHECKSUM:
      return "MHA_ERROR_PACKED_CHECKSUM";
    case MHA_ERROR_OUT_OF_RANGE:
      return "MHA_ERROR_OUT_OF_RANGE";
    case MHA_ERROR_CACHE_FULL:
      return "MHA_ERROR_CACHE_FULL";
    case MHA_ERROR_CACHE_FORMAT:
      return "MHA_ERROR_CACHE_FORMAT";
    default:
      return "unknown mha_status";
  }
}
