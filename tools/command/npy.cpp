#include "npy.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <iterator>
#include <optional>
#include <string_view>

#include "error.h"
#include "files.h"
#include "safetensors.h"

namespace command {
namespace {

const std::string_view kMagic = "\x93NUMPY";

// What the header says, which is the text of a Python dict: {'descr': '<f4', 'fortran_order': False, 'shape': (3, 6), }
struct Header {
  std::optional<std::string> descr;
  std::optional<bool> fortran_order;
  std::optional<std::vector<int64_t>> shape;
};

// Reads just the part of Python's syntax that NumPy writes.
class HeaderReader {
 public:
  HeaderReader(const std::string &path, std::string_view text) : path_(path), rest_(text) {}

  Header read() {
    Header result;
    expect('{');
    while (!skip('}')) {
      const std::string key = read_string();
      expect(':');
      bool is_new = false;
      if (key == "descr") {
        is_new = !result.descr.has_value();
        if (next() != '\'' && next() != '"') fail(path_, ": holds a structured dtype; plain numbers are expected");
        result.descr = read_string();
      } else if (key == "fortran_order") {
        is_new = !result.fortran_order.has_value();
        result.fortran_order = read_bool();
      } else if (key == "shape") {
        is_new = !result.shape.has_value();
        result.shape = read_shape();
      }
      if (!is_new) broken();
      if (!skip(',')) {
        expect('}');
        break;
      }
    }
    if (next() != '\0' || !result.descr || !result.fortran_order || !result.shape) broken();
    return result;
  }

 private:
  [[noreturn]] void broken() const { fail(path_, ": has a header that is not one of a .npy file, near ", in_quotes(rest_.substr(0, 20))); }

  // The next character that is no space; 0 at the end.
  char next() {
    while (!rest_.empty() && std::isspace(static_cast<unsigned char>(rest_.front()))) rest_.remove_prefix(1);
    return rest_.empty() ? '\0' : rest_.front();
  }

  bool skip(char c) {
    if (next() != c) return false;
    rest_.remove_prefix(1);
    return true;
  }

  void expect(char c) {
    if (!skip(c)) broken();
  }

  std::string read_string() {
    const char quote = next();
    if (quote != '\'' && quote != '"') broken();
    const size_t end = rest_.find(quote, 1);
    if (end == std::string_view::npos) broken();
    const std::string result(rest_.substr(1, end - 1));
    rest_.remove_prefix(end + 1);
    return result;
  }

  bool read_bool() {
    next();
    for (const bool value : {false, true}) {
      const std::string_view word = value ? "True" : "False";
      if (rest_.substr(0, word.size()) != word) continue;
      rest_.remove_prefix(word.size());
      return value;
    }
    broken();
  }

  std::vector<int64_t> read_shape() {
    std::vector<int64_t> shape;
    expect('(');
    while (!skip(')')) {
      shape.push_back(read_number());
      if (shape.size() > 32) broken();  // NumPy's own limit
      if (!skip(',')) {
        expect(')');
        break;
      }
    }
    return shape;
  }

  int64_t read_number() {
    if (!std::isdigit(static_cast<unsigned char>(next()))) broken();
    int64_t number = 0;
    while (!rest_.empty() && std::isdigit(static_cast<unsigned char>(rest_.front()))) {
      const bool overflows = __builtin_mul_overflow(number, 10, &number) || __builtin_add_overflow(number, rest_.front() - '0', &number);
      if (overflows) fail(path_, ": has a header with a shape beyond 64 bits");
      rest_.remove_prefix(1);
    }
    if (!rest_.empty() && rest_.front() == 'L') rest_.remove_prefix(1);  // files written under Python 2
    return number;
  }

  const std::string &path_;
  std::string_view rest_;
};

// The dtypes that the command reads. NumPy has none for bfloat16: ml_dtypes stores its own as two bytes without a meaning.
struct Dtype {
  const char *descr, *name;
  size_t bytes;
  uint32_t type;
};
constexpr Dtype kDtypes[] = {
    {"<f4", "float32", 4, MHA_TYPE_F32},   {"<f2", "float16", 2, MHA_TYPE_F16}, {"<V2", "bfloat16", 2, MHA_TYPE_BF16},
    {"|V2", "bfloat16", 2, MHA_TYPE_BF16}, {"|b1", "bytes", 1, MHA_TYPE_F32},   {"|u1", "bytes", 1, MHA_TYPE_F32},
    {"<i4", "int32", 4, MHA_TYPE_F32},     {"<i8", "int64", 8, MHA_TYPE_F32},
};

struct Accepted {
  std::string_view descrs;
  const char *advice;
};
Accepted accepted_of(Elements elements) {
  switch (elements) {
    case Elements::kFloats: return {"<f4", "float32 ('<f4') is expected, for instance from x.astype(numpy.float32)"};
    case Elements::kHalves: return {"<f4 <f2", "float32 ('<f4') or float16 is expected, for instance from x.astype(numpy.float32)"};
    case Elements::kRows:
      return {"<f4 <f2 <V2 |V2", "float32 ('<f4'), float16 or bfloat16 is expected, for instance from x.astype(numpy.float32)"};
    case Elements::kBooleans: return {"|b1 |u1", "bool or uint8 is expected, for instance from mask.astype(bool)"};
    case Elements::kNumbers: break;
  }
  return {"<i4 <i8", "int32 or int64 is expected, for instance from x.astype(numpy.int64)"};
}

const Dtype &dtype_of(const std::string &path, const std::string &descr, Elements elements) {
  const Accepted accepted = accepted_of(elements);
  for (const Dtype &dtype : kDtypes) {
    if (descr == dtype.descr && accepted.descrs.find(descr) != std::string_view::npos) return dtype;
  }
  const std::string held = descr == "<f8"                         ? "float64"
                           : descr == "<f2"                       ? "float16"
                           : !descr.empty() && descr[0] == '>' ? "big-endian numbers (" + in_quotes(descr) + ")"
                                                                  : "the dtype " + in_quotes(descr);
  fail(path, ": holds ", held, "; ", accepted.advice);
}

// The header's text, and where the data begins.
std::string_view header_text(const MappedFile &file, size_t *data_offset) {
  const std::string &path = file.path();
  const std::string_view bytes(reinterpret_cast<const char *>(file.data()), file.size());
  if (bytes.substr(0, 2) == "PK") fail(path, ": is a .npz archive; a single array, as numpy.save writes it, is expected");
  if (bytes.substr(0, kMagic.size()) != kMagic) fail(path, ": is not a .npy file (numpy.save writes one)");

  // magic, version (2 bytes), length of the text (2 bytes in version 1, 4 later), text
  const unsigned version = bytes.size() > 6 ? file.data()[6] : 1;
  if (version < 1 || version > 3) fail(path, ": has version ", version, " of the .npy format; 1 to 3 are expected");
  const size_t text_offset = version == 1 ? 10 : 12;
  if (bytes.size() < text_offset) fail(path, ": ends inside its header");
  size_t length = 0;
  for (size_t i = text_offset; i > 8; --i) length = length * 256 + file.data()[i - 1];
  if (length > bytes.size() - text_offset) fail(path, ": ends inside its header");
  *data_offset = text_offset + length;
  return bytes.substr(text_offset, length);
}

}  // namespace

int64_t Array::count() const {
  if (std::count(shape.begin(), shape.end(), 0) > 0) return 0;
  int64_t count = 1;
  for (const int64_t extent : shape) count *= extent;
  return count;
}

Array read_npy(const std::string &path, Elements elements) {
  const auto file = std::make_shared<const MappedFile>(path);
  size_t data_offset = 0;
  const Header header = HeaderReader(path, header_text(*file, &data_offset)).read();
  const Dtype &dtype = dtype_of(path, *header.descr, elements);
  const std::vector<int64_t> &shape = *header.shape;
  if (*header.fortran_order) fail(path, ": is in Fortran order; C order, for instance from numpy.ascontiguousarray, is expected");

  size_t bytes = dtype.bytes;
  bool overflows = false;
  bool is_empty = false;
  for (const int64_t extent : shape) {
    is_empty |= extent == 0;
    overflows |= __builtin_mul_overflow(bytes, static_cast<size_t>(extent), &bytes);
  }
  if (is_empty) bytes = 0;
  const size_t available = file->size() - data_offset;
  if (overflows && !is_empty) fail(path, ": says that its shape is ", shape_text(shape), ", which no file can hold");
  if (available != bytes) {
    fail(path, ": holds ", available, " bytes of data, but ", dtype.name, " of the shape ", shape_text(shape), " are ", bytes,
         available < bytes ? "; it looks truncated" : "");
  }
  if (elements == Elements::kRows && shape.size() != 2 && shape.size() != 3) {
    fail(path, ": has the shape ", shape_text(shape), "; (n, width) or (batch, n, width) is expected");
  }

  Array result;
  result.name = path;
  result.shape = shape;
  result.type = dtype.type;
  result.element_bytes = dtype.bytes;
  result.data = file->data() + data_offset;
  result.memory = file;
  if (reinterpret_cast<uintptr_t>(result.data) % dtype.bytes != 0) {  // old NumPy and other writers align less
    const std::shared_ptr<int64_t[]> copy(new int64_t[bytes / sizeof(int64_t) + 1]);
    memcpy(copy.get(), result.data, bytes);
    result.data = copy.get();
    result.memory = copy;
  }
  return result;
}

std::vector<int64_t> numbers_of(const Array &array) {
  std::vector<int64_t> numbers(static_cast<size_t>(array.count()));
  for (size_t i = 0; i < numbers.size(); ++i) {
    const void *const number = array.from(static_cast<int64_t>(i));
    numbers[i] = array.element_bytes == 4 ? *static_cast<const int32_t *>(number) : *static_cast<const int64_t *>(number);
  }
  return numbers;
}

Array widened(const Array &array) {
  if (array.type == MHA_TYPE_F32) return array;
  const size_t count = static_cast<size_t>(array.count());
  const std::shared_ptr<float[]> floats(new float[count]);
  const uint16_t *const bits = static_cast<const uint16_t *>(array.data);
  for (size_t i = 0; i < count; ++i) floats[i] = array.type == MHA_TYPE_F16 ? widen_f16(bits[i]) : widen_bf16(bits[i]);
  Array result = array;
  result.type = MHA_TYPE_F32;
  result.element_bytes = sizeof(float);
  result.data = floats.get();
  result.memory = floats;
  return result;
}

std::string npy_header(const std::vector<int64_t> &shape, uint32_t type) {
  const auto dtype = std::find_if(std::begin(kDtypes), std::end(kDtypes), [type](const Dtype &known) { return known.type == type; });
  std::string dict = text("{'descr': '", dtype->descr, "', 'fortran_order': False, 'shape': ", shape_text(shape), ", }");
  const size_t front = kMagic.size() + 4;
  const size_t length = (front + dict.size() + 1 + 63) / 64 * 64 - front;  // the data begin at a multiple of 64
  dict.resize(length - 1, ' ');
  dict += '\n';
  const char version_and_length[4] = {1, 0, static_cast<char>(length % 256), static_cast<char>(length / 256)};
  return std::string(kMagic) + std::string(version_and_length, 4) + dict;
}

}  // namespace command
