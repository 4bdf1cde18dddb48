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

// Something that the user gave is wrong. what() names the file, tensor or option, and says what was expected. The exit status is then 2.
class InputError : public std::runtime_error {
 public:
  using runtime_error::runtime_error;
};

// All parts, one after the other: text("row ", 3).
template <typename... Parts>
std::string text(const Parts &...parts) {
  std::ostringstream out;
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
  if (status != MHA_OK) fail(subject, ": ", error.message[0] != '\0' ? error.message : mha_status_string(status));
}

// 'text', shortened if it is long.
inline std::string in_quotes(std::string_view text) {
  const size_t longest = 120;
  return "'" + std::string(text.substr(0, longest)) + (text.size() > longest ? "...'" : "'");
}

// A shape as Python writes it: (3, 6).
inline std::string shape_text(const std::vector<int64_t> &shape) {
  std::string out;
  for (const int64_t extent : shape) out += (out.empty() ? "(" : ", ") + std::to_string(extent);
  return out.empty() ? "()" : out + (shape.size() == 1 ? ",)" : ")");
}

// "1 head", "2 heads".
inline std::string count_text(int64_t count, const char *singular) { return text(count, " ", singular, count == 1 ? "" : "s"); }

// Control characters replaced: names come from files, and must not be able to add lines or steer a terminal.
inline bool is_control(char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }
inline std::string one_line(std::string text) {
  for (char &c : text) {
    if (is_control(c)) c = '?';
  }
  return text;
}

}  // namespace command
