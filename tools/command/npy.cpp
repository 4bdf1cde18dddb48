#include "npy.h"

#include <cctype>
#include <cstring>
#include <optional>
#include <string_view>

#include "error.h"
#include "files.h"

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
        if (next() != '\'' && next() != '"') fail(path_, ": holds a structured dtype; float32 ('<f4') is expected");
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

void check_is_float(const std::string &path, const std::string &descr) {
  if (descr == "<f4") return;
  const char *advice = "; float32 ('<f4') is expected";
  if (descr == "<f8") fail(path, ": holds float64", advice, ", for instance from x.astype(numpy.float32)");
  if (descr == "<f2") fail(path, ": holds float16", advice, ", for instance from x.astype(numpy.float32)");
  if (!descr.empty() && descr[0] == '>') fail(path, ": holds big-endian numbers (", in_quotes(descr), ")", advice);
  fail(path, ": holds the dtype ", in_quotes(descr), advice);
}

void check_is_bool(const std::string &path, const std::string &descr) {
  if (descr == "|b1" || descr == "|u1") return;
  fail(path, ": holds the dtype ", in_quotes(descr), "; bool or uint8 is expected, for instance from mask.astype(bool)");
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

// What a file holds, of any type.
struct Contents {
  std::shared_ptr<const MappedFile> file;
  std::vector<int64_t> shape;
  const unsigned char *data;
  size_t bytes;
};

Contents read_contents(const std::string &path, void (*check_dtype)(const std::string &, const std::string &), size_t element_bytes,
                       const char *type_name) {
  const auto file = std::make_shared<const MappedFile>(path);
  size_t data_offset = 0;
  const Header header = HeaderReader(path, header_text(*file, &data_offset)).read();
  check_dtype(path, *header.descr);
  const std::vector<int64_t> &shape = *header.shape;
  if (*header.fortran_order) fail(path, ": is in Fortran order; C order, for instance from numpy.ascontiguousarray, is expected");

  size_t bytes = element_bytes;
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
    fail(path, ": holds ", available, " bytes of data, but ", type_name, " of the shape ", shape_text(shape), " are ", bytes,
         available < bytes ? "; it looks truncated" : "");
  }
  return {file, shape, file->data() + data_offset, bytes};
}

}  // namespace

Array read_npy_of_any_rank(const std::string &path) {
  const Contents contents = read_contents(path, check_is_float, sizeof(float), "float32");
  Array result;
  result.name = path;
  result.shape = contents.shape;
  if (reinterpret_cast<uintptr_t>(contents.data) % alignof(float) == 0) {
    result.data = reinterpret_cast<const float *>(contents.data);
    result.memory = contents.file;
  } else {  // old NumPy and other writers align less
    const std::shared_ptr<float[]> copy(new float[contents.bytes / sizeof(float)]);
    memcpy(copy.get(), contents.data, contents.bytes);
    result.data = copy.get();
    result.memory = copy;
  }
  return result;
}

Array read_npy(const std::string &path) {
  const Array result = read_npy_of_any_rank(path);
  if (result.shape.size() != 2 && result.shape.size() != 3) {
    fail(path, ": has the shape ", shape_text(result.shape), "; (n, width) or (batch, n, width) is expected");
  }
  return result;
}

ByteArray read_npy_bytes(const std::string &path) {
  const Contents contents = read_contents(path, check_is_bool, 1, "bytes");
  return {path, contents.shape, contents.data, contents.file};
}

std::string npy_header(const std::vector<int64_t> &shape) {
  std::string dict = "{'descr': '<f4', 'fortran_order': False, 'shape': " + shape_text(shape) + ", }";
  const size_t front = kMagic.size() + 4;
  const size_t length = (front + dict.size() + 1 + 63) / 64 * 64 - front;  // the data begin at a multiple of 64
  dict.resize(length - 1, ' ');
  dict += '\n';
  const char version_and_length[4] = {1, 0, static_cast<char>(length % 256), static_cast<char>(length / 256)};
  return std::string(kMagic) + std::string(version_and_length, 4) + dict;
}

}  // namespace command
