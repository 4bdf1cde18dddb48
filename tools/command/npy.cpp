#include "npy.h"

#include <algorithm>
#include <regex>
#include <string_view>

#include "error.h"

namespace command {
namespace {

const std::string_view kNpyMagic = "\x93NUMPY";

struct Dtype {
  const char *descr;
  uint32_t type;
  int64_t bytes;
};
// NumPy has no bfloat16: ml_dtypes stores its own as two bytes without a meaning.
constexpr Dtype kDtypes[] = {{"<f4", MHA_TYPE_F32, 4},
                             {"<f2", MHA_TYPE_F16, 2},
                             {"<V2", MHA_TYPE_BF16, 2},
                             {"|V2", MHA_TYPE_BF16, 2}};

}  // namespace

Rows::Rows(const std::string &path) : file_(path) {
  const std::string_view bytes(reinterpret_cast<const char *>(file_.data()), file_.size());
  if (bytes.substr(0, 2) == "PK")
    fail(path, ": is a .npz archive; a single array, as numpy.save writes it, is expected");
  if (bytes.substr(0, kNpyMagic.size()) != kNpyMagic)
    fail(path, ": is not a .npy file (numpy.save writes one)");
  // magic, version (2 bytes), length of the header (2 bytes in version 1, 4 later), header, data
  const unsigned version = bytes.size() > 6 ? file_.data()[6] : 1;
  if (version < 1 || version > 3)
    fail(path, ": has version ", version, " of the .npy format; 1 to 3 are expected");
  const size_t front = version == 1 ? 10 : 12;
  size_t length = 0;
  for (size_t i = front; i > 8 && bytes.size() >= front; --i)
    length = length * 256 + file_.data()[i - 1];
  if (bytes.size() < front || length > bytes.size() - front) fail(path, ": ends inside its header");
  if (length > 4096)
    fail(path, ": has a header of ", length, " bytes, too long for an array of numbers");

  const std::string header(bytes.substr(front, length));
  static const std::regex form(R"(\{'descr': '([^']*)', 'fortran_order': (True|False), )"
                               R"('shape': \(((?:\d{1,18}, ?)*\d{0,18})\),? ?\} *\n?)");
  std::smatch found;
  if (!std::regex_match(header, found, form))
    fail(path, ": has a header that numpy.save does not write: ", in_quotes(header));
  if (found[2] == "True")
    fail(path,
         ": is in Fortran order; C order, for instance from numpy.ascontiguousarray, is expected");
  const auto is_it = [&](const Dtype &known) { return found[1] == known.descr; };
  const auto *const dtype = std::find_if(std::begin(kDtypes), std::end(kDtypes), is_it);
  if (dtype == std::end(kDtypes)) {
    fail(path, ": holds the dtype ", in_quotes(found[1].str()),
         "; float32 ('<f4'), float16 or bfloat16 is expected, for instance from "
         "x.astype(numpy.float32)");
  }
  type_ = dtype->type;
  element_bytes_ = dtype->bytes;
  const std::string extents = found[3];
  const std::regex number(R"(\d+)");
  size_t size = static_cast<size_t>(element_bytes_);
  bool overflows = false;
  for (std::sregex_iterator at(extents.begin(), extents.end(), number), end; at != end; ++at) {
    shape_.push_back(std::stoll(at->str()));
    overflows |= __builtin_mul_overflow(size, static_cast<size_t>(shape_.back()), &size);
  }
  if ((shape_.size() != 2 && shape_.size() != 3) ||
      std::count(shape_.begin(), shape_.end(), 0) != 0) {
    fail(path, ": has the shape ", shape_text(shape_),
         "; (n, width) or (batch, n, width) is expected, with at least one row");
  }
  const size_t available = bytes.size() - front - length;
  if (overflows || available != size) {
    fail(path, ": holds ", available, " bytes of data, which do not match the shape ",
         shape_text(shape_), overflows || available < size ? "; it looks truncated" : "");
  }
  data_ = file_.data() + front + length;
  if ((front + length) % 4 != 0)
    fail(path, ": has data that are not aligned; numpy.save aligns them");
}

std::string npy_header(const std::vector<int64_t> &shape) {
  std::string dict =
      text("{'descr': '<f4', 'fortran_order': False, 'shape': ", shape_text(shape), ", }");
  const size_t front = kNpyMagic.size() + 4;
  // The data begin at a multiple of 64.
  const size_t length = (front + dict.size() + 1 + 63) / 64 * 64 - front;
  dict.resize(length - 1, ' ');
  const char version_and_length[4] = {1, 0, static_cast<char>(length % 256),
                                      static_cast<char>(length / 256)};
  return std::string(kNpyMagic) + std::string(version_and_length, 4) + dict + "\n";
}

}  // namespace command
