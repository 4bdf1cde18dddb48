// Structs of mha.h to be filled, and what its functions return.
#ifndef MHA_TESTS_SUPPORT_STRUCTS_H
#define MHA_TESTS_SUPPORT_STRUCTS_H

#include <mha.h>

#include <stdexcept>

namespace support {

// All zero, which means "by default", but for its size.
template <typename Struct>
Struct Zeroed() {
  Struct zeroed = {};
  zeroed.struct_size = sizeof zeroed;
  return zeroed;
}

// Throws the library's sentence, which GoogleTest reports as a failure.
inline void Check(mha_status status, const mha_error &error) {
  if (status != MHA_OK) throw std::runtime_error(error.message);
}

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_STRUCTS_H
