#include "safetensors.h"

#include <algorithm>
#include <cstring>

#include "json.h"

namespace command {
namespace {

using nlohmann::json;

constexpr uint64_t kLongestHeader = 100'000'000;  // of the format

// Bytes of a value; 0 = of a type that the command does not read.
uint64_t bytes_of(const std::string &dtype) {
  return dtype == "F32" ? 4 : dtype == "F16" || dtype == "BF16" ? 2 : 0;
}

bool is_array_of_sizes(const json &value, size_t least, size_t most) {
  return value.is_array() && value.size() >= least && value.size() <= most &&
         std::all_of(value.begin(), value.end(), [](const json &number) {
           return number.is_number_unsigned() && number <= INT64_MAX;
         });
}

Tensor read_tensor(const std::string &path, const std::string &name, const json &entry,
                   uint64_t data_bytes) {
  const bool is_sound = entry.is_object() && entry.size() == 3 && entry.contains("dtype") &&
                        entry["dtype"].is_string() && entry.contains("shape") &&
                        is_array_of_sizes(entry["shape"], 0, 32) &&
                        entry.contains("data_offsets") &&
                        is_array_of_sizes(entry["data_offsets"], 2, 2);
  if (!is_sound) {
    fail(path, ": the header of the tensor ", in_quotes(name),
         R"( is not like {"dtype": "F32", "shape": [768, 768], "data_offsets": [0, 2359296]})");
  }
  Tensor tensor = {entry["dtype"], entry["shape"], entry["data_offsets"][0],
                   entry["data_offsets"][1]};
  if (tensor.begin > tensor.end || tensor.end > data_bytes) {
    fail(path, ": the tensor ", in_quotes(name), " lies from byte ", tensor.begin, " to ",
         tensor.end, " of the data, but there are ", data_bytes, "; it looks truncated");
  }
  uint64_t bytes = bytes_of(tensor.dtype);
  if (bytes == 0) return tensor;
  bool overflows = false;
  for (const int64_t extent : tensor.shape)
    overflows |= __builtin_mul_overflow(bytes, static_cast<uint64_t>(extent), &bytes);
  if (overflows || bytes != tensor.end - tensor.begin) {
    fail(path, ": the tensor ", in_quotes(name), " takes ", tensor.end - tensor.begin,
         " bytes, which does not fit its shape ", shape_text(tensor.shape), " of ",
         in_quotes(tensor.dtype));
  }
  return tensor;
}

float from_bits(uint32_t bits) {
  float number;
  memcpy(&number, &bits, sizeof number);
  return number;
}

float widen_f16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t exponent = bits >> 10 & 0x1f;
  const uint32_t fraction = bits & 0x3ff;
  // Infinity or NaN.
  if (exponent == 0x1f) return from_bits(sign | 0x7f800000 | fraction << 13);
  // The bias grows from 15 to 127.
  if (exponent != 0) return from_bits(sign | (exponent + 112) << 23 | fraction << 13);
  // Subnormal or zero: exact in float.
  const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
  return sign != 0 ? -magnitude : magnitude;
}

// The file of each tensor of a model in several files. Their index, model.safetensors.index.json,
// is {"weight_map": {"name of a tensor": "file in the same folder"}}. Empty = this is no index.
std::map<std::string, std::string> read_index(const MappedFile &file) {
  std::map<std::string, std::string> paths;
  const char *const begin = reinterpret_cast<const char *>(file.data());
  if (file.size() == 0 || *begin != '{') return paths;
  const json index = parse_json(file.path(), begin, begin + file.size());
  if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object())
    return paths;
  const std::string folder = file.path().substr(0, file.path().rfind('/') + 1);
  for (const auto &[name, of] : index["weight_map"].items()) {
    const std::string other = of.is_string() ? of.get<std::string>() : "";
    if (other.empty() || other.find_first_of(std::string("/\0", 2)) != std::string::npos)
      fail(file.path(), ": the file of ", in_quotes(name),
           " in weight_map must be the name of a file in the same folder");
    paths[name] = folder + other;
  }
  if (paths.empty()) fail(file.path(), ": has no tensor in weight_map");
  return paths;
}

}  // namespace

std::set<std::string> files_of(const std::string &path) {
  std::set<std::string> files = {path};
  for (const auto &[name, file] : read_index(MappedFile(path))) files.insert(file);
  return files;
}

SafetensorsFile::SafetensorsFile(const std::string &path) : path_(path) {
  const std::map<std::string, std::string> index = read_index(MappedFile(path));
  for (const std::string &file : files_of(path)) {
    if (!index.empty() && file == path) continue;
    for (auto &[name, tensor] : add_file(file)) {
      const auto found = index.find(name);
      if (index.empty() || (found != index.end() && found->second == file))
        tensors_.emplace(name, std::move(tensor));
    }
  }
  for (const auto &[name, file] : index) {
    if (!has(name))
      fail(path, ": says that ", file, " has ", in_quotes(name), ", which it has not");
  }
}

std::map<std::string, Tensor> SafetensorsFile::add_file(const std::string &path) {
  const MappedFile &file = *files_.emplace_back(std::make_unique<const MappedFile>(path));
  uint64_t length = 0;
  for (int i = 7; i >= 0 && file.size() > 8; --i) length = length * 256 + file.data()[i];
  const char *header = reinterpret_cast<const char *>(file.data()) + 8;
  if (file.size() <= 8 || header[0] != '{')
    fail(path, ": is not a .safetensors file (no header in JSON follows the first 8 bytes)");
  const uint64_t rest = file.size() - 8;
  if (length > rest)
    fail(path, ": says that its header has ", length, " bytes, but only ", rest,
         " follow; it looks truncated");
  if (length > kLongestHeader)
    fail(path, ": says that its header has ", length, " bytes, more than the format allows");
  const json parsed = parse_json(path, header, header + length);
  if (!parsed.is_object()) fail(path, ": has a header that is not a JSON object");
  std::map<std::string, Tensor> tensors;
  for (const auto &[name, entry] : parsed.items()) {
    if (name == "__metadata__") continue;
    Tensor &tensor = tensors[name] = read_tensor(path, name, entry, rest - length);
    tensor.data = file.data() + 8 + length + tensor.begin;
  }
  return tensors;
}

const Tensor &SafetensorsFile::get(const std::string &name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) fail(path(), ": has no tensor ", in_quotes(name));
  return found->second;
}

const float *SafetensorsFile::values(const std::string &name,
                                     std::vector<std::unique_ptr<float[]>> *copies) const {
  const Tensor &tensor = get(name);
  const unsigned char *bytes = tensor.data;
  const bool is_f32 = tensor.dtype == "F32", is_f16 = tensor.dtype == "F16";
  if (bytes_of(tensor.dtype) == 0) {
    fail(path(), ": the tensor ", in_quotes(name), " is stored as ", in_quotes(tensor.dtype),
         "; F32, F16 or BF16 is expected");
  }
  if (is_f32 && reinterpret_cast<uintptr_t>(bytes) % alignof(float) == 0)
    return reinterpret_cast<const float *>(bytes);
  const size_t count = (tensor.end - tensor.begin) / bytes_of(tensor.dtype);
  copies->emplace_back(new float[count]);
  float *out = copies->back().get();
  if (is_f32) memcpy(out, bytes, count * sizeof(float));
  for (size_t i = 0; i < count && !is_f32; ++i) {
    const uint16_t bits = static_cast<uint16_t>(bytes[2 * i] | bytes[2 * i + 1] << 8);
    out[i] = is_f16 ? widen_f16(bits) : from_bits(static_cast<uint32_t>(bits) << 16);
  }
  return out;
}

}  // namespace command
