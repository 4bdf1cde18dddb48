// The parts of reading and writing structs that do not depend on their type. structs.h calls them
// with the size that this version knows and the size of the first version.
#include "structs.h"

#include <algorithm>

namespace mha {
namespace {

// Reads struct_size and checks that some version may have it. The struct is not looked at
// otherwise.
mha_status check_size(Report report, const char *name, const void *given, size_t first_bytes,
                      size_t *bytes) {
  if (!given) return report.null("%s is NULL; pass a struct %s", name, name);
  memcpy(bytes, given, sizeof *bytes);
  if (*bytes < first_bytes)
    return report.fail(MHA_ERROR_STRUCT_SIZE,
                       "%s.struct_size is %zu, less than %zu; set it to sizeof(%s)", name, *bytes,
                       first_bytes, name);
  // This is far beyond any version. A struct_size that was never set could be any number, and
  // looking for fields that are set would lead far outside the struct.
  constexpr size_t max_bytes = 1 << 16;
  if (*bytes > max_bytes)
    return report.fail(MHA_ERROR_STRUCT_SIZE,
                       "%s.struct_size is %zu, which no version has; set it to sizeof(%s)", name,
                       *bytes, name);
  return MHA_OK;
}

}  // namespace

mha_status read_struct(Report report, const char *name, const void *given, void *copy,
                       size_t known_bytes, size_t first_bytes) {
  size_t bytes = 0;
  MHA_TRY(check_size(report, name, given, first_bytes, &bytes));
  // The caller asks for something that this version cannot do.
  const unsigned char *const fields = static_cast<const unsigned char *>(given);
  for (size_t i = known_bytes; i < bytes; ++i) {
    if (fields[i] != 0)
      return report.fail(MHA_ERROR_STRUCT_SIZE,
                         "%s.struct_size is %zu, and fields after the %zu bytes that this version "
                         "knows are set; set them to 0",
                         name, bytes, known_bytes);
  }
  // Fields that the caller's version does not have yet get their defaults.
  memset(copy, 0, known_bytes);
  memcpy(copy, given, std::min(bytes, known_bytes));
  return MHA_OK;
}

// The caller's struct may be shorter or longer than the one of this version.
mha_status write_struct(Report report, const char *name, const void *filled, void *to,
                        size_t known_bytes, size_t first_bytes) {
  size_t bytes = 0;
  MHA_TRY(check_size(report, name, to, first_bytes, &bytes));
  memset(to, 0, bytes);
  memcpy(to, filled, std::min(bytes, known_bytes));
  memcpy(to, &bytes, sizeof bytes);
  return MHA_OK;
}

mha_status write_size(Report report, size_t size, size_t *bytes) {
  if (!bytes) return report.null("bytes is NULL; pass a pointer to where the size is written");
  *bytes = size;
  return MHA_OK;
}

}  // namespace mha
