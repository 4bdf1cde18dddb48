// Tensors in .safetensors files: 8 bytes with the length of the header, the header in JSON, the
// data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "files.h"

namespace command {

struct Tensor {
  std::string dtype;  // "F32", "F16", "BF16", ...
  std::vector<int64_t> shape;
  uint64_t begin = 0, end = 0;  // its bytes, counted from the end of the header
  const unsigned char *data = nullptr;
};

// A mapped file, or all files that an index names. Their headers have been checked: each tensor
// lies inside its file, as long as its shape says.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string &path);  // throws InputError

  const std::string &path() const { return path_; }
  const std::map<std::string, Tensor> &tensors() const { return tensors_; }
  bool has(const std::string &name) const { return tensors_.count(name) > 0; }
  const Tensor &get(const std::string &name) const;  // throws InputError

  // The values of a tensor of F32, F16 or BF16. F32 is not copied where its alignment allows; else
  // the copy is added to copies.
  const float *values(const std::string &name, std::vector<std::unique_ptr<float[]>> *copies) const;

 private:
  std::map<std::string, Tensor> add_file(const std::string &path);

  std::string path_;
  std::vector<std::unique_ptr<const MappedFile>> files_;
  std::map<std::string, Tensor> tensors_;
};

// The file itself, and those that it names if it is an index.
std::set<std::string> files_of(const std::string &path);

}  // namespace command
