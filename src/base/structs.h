// Reads structs from the caller and writes structs to them.
//
// Structs of the interface grow at their end, and the program and the library may each be of a
// later version than the other. So each struct begins with its size, which the program sets as its
// header defines it. A library that knows more fields than the program takes the others as zero,
// which means their default. One that knows fewer accepts only programs that leave the others zero.
#pragma once

#include <stddef.h>
#include <string.h>

#include "mha.h"
#include "report.h"

namespace mha {

// The size of each struct in its first version, which no caller's struct is smaller than. One that
// has grown since has a specialization here, the offset of the first field that was added.
template <class Struct>
inline constexpr size_t first_version_bytes = sizeof(Struct);

mha_status read_struct(Report report, const char *name, const void *given, void *copy,
                       size_t known_bytes, size_t first_bytes);
mha_status write_struct(Report report, const char *name, const void *filled, void *to,
                        size_t known_bytes, size_t first_bytes);

// Copies the fields that the caller's struct has and leaves the others zero. Fields of theirs that
// this version does not know must be zero. Most programs have the version of the library, for which
// a copy is enough.
template <class Struct>
inline mha_status read_struct(Report report, const char *name, const Struct *given, Struct *copy) {
  if (given && given->struct_size == sizeof(Struct)) {
    memcpy(copy, given, sizeof(Struct));
    return MHA_OK;
  }
  return read_struct(report, name, given, copy, sizeof(Struct), first_version_bytes<Struct>);
}

// Fills the caller's struct as far as it goes. Fields that this version does not know become zero,
// and struct_size stays as the caller set it.
template <class Struct>
inline mha_status write_struct(Report report, const char *name, const Struct &filled, Struct *to) {
  return write_struct(report, name, &filled, to, sizeof(Struct), first_version_bytes<Struct>);
}

// Answers a size query.
mha_status write_size(Report report, size_t size, size_t *bytes);

}  // namespace mha
