// Arrays in NumPy's .npy files.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace command {

// Rows of float, [n, width] or [batch, n, width], C order.
struct Array {
  std::string name;  // for sentences: the file, as the user wrote it
  std::vector<int64_t> shape;
  const float *data = nullptr;
  std::shared_ptr<const void> memory;  // what data points into, if it must be kept

  int64_t batch() const { return shape.size() == 3 ? shape[0] : 1; }
  int64_t rows() const { return shape[shape.size() - 2]; }
  int64_t width() const { return shape[shape.size() - 1]; }
};

// Maps a .npy file of little-endian float32, C order, rank 2 or 3. Anything else is an InputError.
Array read_npy(const std::string &path);

// The same for any rank.
Array read_npy_of_any_rank(const std::string &path);

// A boolean for each element: 0 is false.
struct ByteArray {
  std::string name;
  std::vector<int64_t> shape;
  const uint8_t *data = nullptr;
  std::shared_ptr<const void> memory;
};

// Maps a .npy file of bool or uint8, C order, any rank.
ByteArray read_npy_bytes(const std::string &path);

// The bytes in front of the data of an array of this shape, as numpy.save writes them.
std::string npy_header(const std::vector<int64_t> &shape);

}  // namespace command
