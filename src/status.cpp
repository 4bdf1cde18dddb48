#include "status.h"

#include <stdio.h>
#include <string.h>

namespace mha {

mha_status Report::fail(mha_status status, uint32_t argument, const char *format, ...) {
  if (error_) {
    error_->status = status;
    error_->argument = argument;
    va_list values;
    va_start(values, format);
    vsnprintf(error_->message, sizeof error_->message, format, values);
    va_end(values);
  }
  return status;
}

mha_status read_struct(Report &report, uint32_t argument, const char *name, const void *given, void *copy, size_t known_size,
                       size_t smallest_size) {
  if (!given) return report.fail(MHA_ERROR_NULL_POINTER, argument, "%s is NULL; pass a struct %s", name, name);
  size_t size;
  memcpy(&size, given, sizeof size);
  if (size < smallest_size) {
    return report.fail(MHA_ERROR_STRUCT_SIZE, argument, "%s.struct_size is %zu, less than %zu; set it to sizeof(%s)", name, size,
                       smallest_size, name);
  }
  constexpr size_t largest_size = 1 << 16;  // far beyond any version: a struct_size that was never set would send the loop below astray
  if (size > largest_size) {
    return report.fail(MHA_ERROR_STRUCT_SIZE, argument, "%s.struct_size is %zu, which no version has; set it to sizeof(%s)", name, size,
                       name);
  }
  const unsigned char *bytes = static_cast<const unsigned char *>(given);
  for (size_t i = known_size; i < size; ++i) {
    if (bytes[i] != 0) {
      return report.fail(MHA_ERROR_STRUCT_SIZE, argument,
                         "%s.struct_size is %zu with fields set that this version (%zu bytes) does not know; set them to 0", name, size,
                         known_size);
    }
  }
  memset(copy, 0, known_size);
  memcpy(copy, given, size < known_size ? size : known_size);
  return MHA_OK;
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
