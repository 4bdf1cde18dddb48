#include "error.h"

namespace command {

void check(mha_status status, const mha_error &error, const std::string &subject) {
  if (status == MHA_OK) return;
  const std::string message = error.message[0] != '\0' ? error.message : mha_status_string(status);
  throw InputError(subject + ": " + message);
}

std::string in_quotes(std::string_view text) {
  const size_t longest = 120;
  if (text.size() <= longest) return "'" + std::string(text) + "'";
  return "'" + std::string(text.substr(0, longest)) + "...'";
}

std::string shape_text(const std::vector<int64_t> &shape) {
  std::string out = "(";
  for (size_t i = 0; i < shape.size(); ++i) out += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  if (shape.size() == 1) out += ",";
  return out + ")";
}

std::string count_text(int64_t count, const char *singular) { return std::to_string(count) + " " + singular + (count == 1 ? "" : "s"); }

std::string one_line(std::string_view text) {
  std::string out(text);
  for (char &c : out) {
    const unsigned char byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) c = '?';
  }
  return out;
}

}  // namespace command
