// Rows in NumPy's .npy files, in the one form that numpy.save writes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "files.h"
#include "mha.h"

namespace command {

// Mapped: [n, width] or [batch, n, width], in C order, at least one of each. Anything else is an
// InputError.
class Rows {
 public:
  explicit Rows(const std::string &path);

  const std::string &name() const { return file_.path(); }
  const std::vector<int64_t> &shape() const { return shape_; }
  uint32_t type() const { return type_; }  // MHA_TYPE_F32, F16 or BF16
  int64_t batch() const { return shape_.size() == 3 ? shape_[0] : 1; }
  int64_t count() const { return shape_[shape_.size() - 2]; }
  int64_t width() const { return shape_.back(); }
  const void *from(int64_t row) const { return data_ + row * width() * element_bytes_; }

 private:
  MappedFile file_;
  std::vector<int64_t> shape_;
  uint32_t type_ = MHA_TYPE_F32;
  int64_t element_bytes_ = 4;
  const unsigned char *data_ = nullptr;
};

// The bytes in front of the data of an array of floats, as numpy.save writes them.
std::string npy_header(const std::vector<int64_t> &shape);

}  // namespace command
