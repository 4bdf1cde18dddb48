// How the command fails: with one sentence.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "mha.h"

namespace command {

// Something that the user gave is wrong. what() names the file, tensor or option, and says what was
// expected. The exit status is then 2.
class InputError : public std::runtime_error {
 public:
  using runtime_error::runtime_error;
};

// All parts, one after the other: text("row ", 3).
template <typename... Parts>
std::string text(const Parts &...parts) {
  std::ostringstream out;
  out.exceptions(std::ios::badbit);  // else it leaves out what there is no memory for
  (out << ... << parts);
  return out.str();
}

// Throws an InputError made of parts.
template <typename... Parts>
[[noreturn]] void fail(const Parts &...parts) {
  throw InputError(text(parts...));
}

// Passes on a failure of the library; subject is what the user gave, such as the name of a file.
inline void check(mha_status status, const mha_error &error, const std::string &subject) {
  if (status != MHA_OK)
    fail(subject, ": ", error.message[0] != '\0' ? error.message : mha_status_string(status));
}

// 'text', shortened if it is long, but not inside a character of UTF-8.
inline std::string in_quotes(std::string_view text) {
  size_t length = 120;
  while (text.size() > length && length > 110 && (text[length] & 0xc0) == 0x80) --length;
  return "'" + std::string(text.substr(0, length)) + (text.size() > length ? "...'" : "'");
}

// A shape as Python writes it: (3, 6).
inline std::string shape_text(const std::vector<int64_t> &shape) {
  std::string out;
  for (const int64_t extent : shape) out += (out.empty() ? "(" : ", ") + std::to_string(extent);
  return out.empty() ? "()" : out + (shape.size() == 1 ? ",)" : ")");
}

// "1 head", "2 heads".
inline std::string count_text(int64_t count, const char *singular) {
  return text(count, " ", singular, count == 1 ? "" : "s");
}

// text[i], or '?' for a control character: names come from files, and must not be able to add lines
// or steer a terminal. In UTF-8 those from 0x80 to 0x9f have a byte 0xc2 in front; where text is
// not UTF-8, they stand alone.
inline char shown(std::string_view text, size_t i) {
  const auto byte = [&](size_t at) {
    return at < text.size() ? static_cast<unsigned char>(text[at]) : 0;
  };
  const auto is_high = [&](size_t at) { return byte(at) >= 0x80 && byte(at) < 0xa0; };
  const bool is_low = byte(i) < 0x20 || byte(i) == 0x7f, begins = byte(i) == 0xc2 && is_high(i + 1);
  return is_low || begins || (is_high(i) && (byte(i - 1) < 0x80 || byte(i - 1) == 0xc2)) ? '?'
                                                                                         : text[i];
}
inline std::string one_line(std::string_view text) {
  std::string line;
  for (size_t i = 0; i < text.size(); ++i) line += shown(text, i);
  return line;
}

}  // namespace command
