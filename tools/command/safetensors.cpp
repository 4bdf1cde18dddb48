#include "safetensors.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string_view>

#include "error.h"

namespace command {
namespace {

// Limits of the format, or far above anything in use: they bound what a hostile header can cost.
constexpr uint64_t kLongestHeader = 100'000'000;
constexpr size_t kMostDimensions = 32;

// Receives the header from the JSON parser piece by piece, and accepts nothing but what the format allows:
//
//     {"__metadata__": {"format": "pt"}, "h.0.attn.c_attn.weight": {"dtype": "F32", "shape": [768, 2304], "data_offsets": [0, 7077888]}}
//
// So nothing of a header is kept that is no tensor, and no nesting is followed.
class HeaderReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  HeaderReader(const std::string &path, std::map<std::string, Tensor> *tensors) : path_(path), tensors_(tensors) {}

  bool start_object(size_t) override {
    if (place_ == Place::file) return go(Place::tensors);
    if (place_ == Place::tensors && name_ == "__metadata__") return go(Place::metadata);
    if (place_ != Place::tensors) refuse_value();
    current_ = {};
    fields_ = 0;
    return go(Place::tensor);
  }

  bool key(string_t &text) override {
    if (place_ == Place::tensors) {
      if (tensors_->count(text) > 0 || (text == "__metadata__" && has_metadata_)) {
        fail(path_, ": names the tensor ", in_quotes(text), " twice in its header");
      }
      has_metadata_ |= text == "__metadata__";
      name_ = text;
    } else if (place_ == Place::tensor) {
      field_ = text == "dtype" ? dtype : text == "shape" ? shape : text == "data_offsets" ? data_offsets : unknown;
      if (field_ == unknown) fail(path_, ": the header of the tensor ", in_quotes(name_), " has the unknown field ", in_quotes(text));
      if (fields_ & field_) fail(path_, ": the header of the tensor ", in_quotes(name_), " has the field ", in_quotes(text), " twice");
      fields_ |= field_;
    }
    return true;
  }

  bool string(string_t &text) override {
    if (place_ == Place::metadata) return true;
    if (place_ != Place::tensor || field_ != dtype) refuse_value();
    current_.dtype = text;
    return true;
  }

  bool start_array(size_t) override {
    if (place_ != Place::tensor || field_ == dtype) refuse_value();
    numbers_.clear();
    return go(Place::array);
  }

  bool number_unsigned(number_unsigned_t number) override {
    if (place_ != Place::array) refuse_value();
    if (number > INT64_MAX || numbers_.size() == (field_ == shape ? kMostDimensions : 2)) refuse_value();
    numbers_.push_back(static_cast<int64_t>(number));
    return true;
  }

  bool end_array() override {
    if (field_ == shape) {
      current_.shape = numbers_;
    } else {
      if (numbers_.size() != 2) refuse_value();
      current_.begin = static_cast<uint64_t>(numbers_[0]);
      current_.end = static_cast<uint64_t>(numbers_[1]);
    }
    return go(Place::tensor);
  }

  bool end_object() override {
    if (place_ == Place::tensor) {
      if (fields_ != (dtype | shape | data_offsets)) {
        fail(path_, ": the header of the tensor ", in_quotes(name_), " lacks one of dtype, shape and data_offsets");
      }
      tensors_->emplace(name_, std::move(current_));
    }
    return go(place_ == Place::tensors ? Place::file : Place::tensors);
  }

  bool null() override { refuse_value(); }
  bool boolean(bool) override { refuse_value(); }
  bool number_integer(number_integer_t) override { refuse_value(); }
  bool number_float(number_float_t, const string_t &) override { refuse_value(); }
  bool binary(binary_t &) override { refuse_value(); }

  bool parse_error(size_t position, const std::string &, const nlohmann::detail::exception &) override {
    fail(path_, ": has a header that is not JSON at its byte ", position);
  }

 private:
  enum class Place { file, tensors, metadata, tensor, array };
  enum Field : unsigned { unknown = 0, dtype = 1, shape = 2, data_offsets = 4 };

  bool go(Place next) {
    place_ = next;
    return true;
  }

  [[noreturn]] void refuse_value() const {
    if (place_ == Place::file) fail(path_, ": has a header that is not a JSON object");
    if (place_ == Place::tensors) fail(path_, ": the header of the tensor ", in_quotes(name_), " is not a JSON object");
    if (place_ == Place::metadata) fail(path_, ": has a header whose __metadata__ holds something else than strings");
    fail(path_, ": the header of the tensor ", in_quotes(name_), " has a bad value for ", field_name(),
         "; expected are like \"dtype\": \"F32\", \"shape\": [768, 768], \"data_offsets\": [0, 2359296]");
  }

  const char *field_name() const { return field_ == dtype ? "dtype" : field_ == shape ? "shape" : "data_offsets"; }

  const std::string &path_;
  std::map<std::string, Tensor> *tensors_;
  Place place_ = Place::file;
  bool has_metadata_ = false;
  std::string name_;          // of the current tensor
  unsigned field_ = unknown;  // the current one
  unsigned fields_ = 0;       // those seen
  Tensor current_;
  std::vector<int64_t> numbers_;
};

// Bytes of a value; 0 = a type that this reader does not know, and does not use.
uint64_t bytes_of(const std::string &dtype) {
  static const std::map<std::string_view, uint64_t> sizes = {
      {"F64", 8}, {"I64", 8}, {"U64", 8}, {"F32", 4}, {"I32", 4},  {"U32", 4},     {"F16", 2},     {"BF16", 2},
      {"I16", 2}, {"U16", 2}, {"I8", 1},  {"U8", 1},  {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1},
  };
  const auto found = sizes.find(dtype);
  return found == sizes.end() ? 0 : found->second;
}

// Whether the shape makes exactly this many bytes.
bool has_bytes(const Tensor &tensor, uint64_t expected) {
  uint64_t bytes = bytes_of(tensor.dtype);
  if (bytes == 0) return true;
  for (const int64_t extent : tensor.shape) {
    if (extent == 0) return expected == 0;
  }
  for (const int64_t extent : tensor.shape) {
    if (__builtin_mul_overflow(bytes, static_cast<uint64_t>(extent), &bytes)) return false;
  }
  return bytes == expected;
}

// Each tensor against the data and its own shape, then all against each other: the format wants the data covered without gap or overlap.
void check_offsets(const std::string &path, const std::map<std::string, Tensor> &tensors, uint64_t data_bytes) {
  std::vector<const std::pair<const std::string, Tensor> *> in_file_order;
  for (const auto &entry : tensors) {
    const auto &[name, tensor] = entry;
    if (tensor.begin > tensor.end) {
      fail(path, ": the tensor ", in_quotes(name), " ends before it begins (", tensor.begin, ", ", tensor.end, ")");
    }
    if (tensor.end > data_bytes) {
      fail(path, ": the tensor ", in_quotes(name), " ends at byte ", tensor.end, " of the data, but there are ", data_bytes,
           "; it looks truncated");
    }
    if (!has_bytes(tensor, tensor.end - tensor.begin)) {
      fail(path, ": the tensor ", in_quotes(name), " takes ", tensor.end - tensor.begin, " bytes, which does not fit its shape ",
           shape_text(tensor.shape), " of ", in_quotes(tensor.dtype));
    }
    in_file_order.push_back(&entry);
  }
  std::sort(in_file_order.begin(), in_file_order.end(), [](const auto *a, const auto *b) {
    return std::pair(a->second.begin, a->second.end) < std::pair(b->second.begin, b->second.end);
  });
  uint64_t covered = 0;
  const std::string *last = nullptr;
  for (const auto *entry : in_file_order) {
    const uint64_t begin = entry->second.begin;
    if (begin < covered) fail(path, ": the tensors ", in_quotes(*last), " and ", in_quotes(entry->first), " overlap");
    if (begin > covered) fail(path, ": no tensor covers the bytes ", covered, " to ", begin, " of its data");
    covered = entry->second.end;
    last = &entry->first;
  }
  if (covered != data_bytes) fail(path, ": holds ", data_bytes - covered, " bytes behind its last tensor");
}

float from_bits(uint32_t bits) {
  float number;
  memcpy(&number, &bits, sizeof number);
  return number;
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::string &path) : file_(path) {
  if (file_.size() < 8) fail(path, ": is too short for a .safetensors file");
  uint64_t header_bytes = 0;
  for (int i = 7; i >= 0; --i) header_bytes = header_bytes * 256 + file_.data()[i];
  const uint64_t rest = file_.size() - 8;
  const char *header = reinterpret_cast<const char *>(file_.data()) + 8;
  if (rest == 0 || header[0] != '{') fail(path, ": is not a .safetensors file (no header in JSON follows the first 8 bytes)");
  if (header_bytes > rest) {
    fail(path, ": says that its header has ", header_bytes, " bytes, but only ", rest, " follow; it looks truncated");
  }
  if (header_bytes > kLongestHeader) {
    fail(path, ": says that its header has ", header_bytes, " bytes, more than the ", kLongestHeader, " that the format allows");
  }
  HeaderReader reader(path, &tensors_);
  nlohmann::json::sax_parse(header, header + header_bytes, &reader);
  check_offsets(path, tensors_, rest - header_bytes);
  data_ = file_.data() + 8 + header_bytes;
}

const Tensor *SafetensorsFile::find(const std::string &name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

const Tensor &SafetensorsFile::get(const std::string &name) const {
  if (const Tensor *found = find(name)) return *found;
  fail(path(), ": has no tensor ", in_quotes(name));
}

const float *SafetensorsFile::values(const std::string &name, std::vector<std::unique_ptr<float[]>> *copies) const {
  const Tensor &tensor = get(name);
  const unsigned char *bytes = data_ + tensor.begin;
  const bool is_f32 = tensor.dtype == "F32";
  if (!is_f32 && tensor.dtype != "F16" && tensor.dtype != "BF16") {
    fail(path(), ": the tensor ", in_quotes(name), " is stored as ", in_quotes(tensor.dtype), "; F32, F16 or BF16 is expected");
  }
  if (is_f32 && reinterpret_cast<uintptr_t>(bytes) % alignof(float) == 0) return reinterpret_cast<const float *>(bytes);

  const size_t count = (tensor.end - tensor.begin) / bytes_of(tensor.dtype);
  copies->emplace_back(new float[count]);
  float *out = copies->back().get();
  if (is_f32) {
    memcpy(out, bytes, count * sizeof(float));
    return out;
  }
  const bool is_f16 = tensor.dtype == "F16";
  for (size_t i = 0; i < count; ++i) {
    const uint16_t bits = static_cast<uint16_t>(bytes[2 * i] | bytes[2 * i + 1] << 8);
    out[i] = is_f16 ? widen_f16(bits) : widen_bf16(bits);
  }
  return out;
}

float widen_bf16(uint16_t bits) { return from_bits(static_cast<uint32_t>(bits) << 16); }

float widen_f16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t exponent = bits >> 10 & 0x1f;
  const uint32_t fraction = bits & 0x3ff;
  if (exponent == 0x1f) return from_bits(sign | 0x7f800000 | fraction << 13);           // infinity or NaN
  if (exponent != 0) return from_bits(sign | (exponent + 112) << 23 | fraction << 13);  // the bias grows from 15 to 127
  const float magnitude = static_cast<float>(fraction) * 0x1p-24f;                      // subnormal or zero: exact in float
  return sign != 0 ? -magnitude : magnitude;
}

}  // namespace command
