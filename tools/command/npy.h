// Arrays in NumPy's .npy files.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "mha.h"

namespace command {

// An array in C order, such as rows: [n, width] or [batch, n, width].
struct Array {
  std::string name;  // for sentences: the file, as the user wrote it
  std::vector<int64_t> shape;
  const void *data = nullptr;
  uint32_t type = MHA_TYPE_F32;        // of floats; of whole numbers and booleans MHA_TYPE_F32 all the same
  size_t element_bytes = sizeof(float);
  std::shared_ptr<const void> memory;  // what data points into, if it must be kept

  const float *floats() const { return static_cast<const float *>(data); }  // of MHA_TYPE_F32
  const void *from(int64_t element) const { return static_cast<const char *>(data) + element * static_cast<int64_t>(element_bytes); }
  int64_t count() const;

  int64_t batch() const { return shape.size() == 3 ? shape[0] : 1; }
  int64_t rows() const { return shape[shape.size() - 2]; }
  int64_t width() const { return shape[shape.size() - 1]; }
};

// What a file may hold.
enum class Elements {
  kFloats,    // float32
  kHalves,    // or float16
  kRows,      // or float16 or bfloat16; rank 2 or 3
  kBooleans,  // bool or uint8
  kNumbers,   // int32 or int64
};

// Maps a .npy file of such little-endian elements in C order. Anything else is an InputError.
Array read_npy(const std::string &path, Elements elements);

// The whole numbers of an array of kNumbers.
std::vector<int64_t> numbers_of(const Array &array);

// The same array with its floats as float32, exactly.
Array widened(const Array &array);

// The bytes in front of the data of an array of this shape and MHA_TYPE_F32, F16 or BF16, as numpy.save writes them.
std::string npy_header(const std::vector<int64_t> &shape, uint32_t type);

}  // namespace command
