// How the command fails: with one sentence.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "mha.h"

namespace command {

// Something that the user gave is wrong. what() is the sentence that main prints: it names the file (and tensor) and says what was
// expected. The exit status is then 2.
class InputError : public std::runtime_error {
 public:
  explicit InputError(const std::string &sentence, std::string choices = "") : runtime_error(sentence), choices_(std::move(choices)) {}

  const std::string &choices() const { return choices_; }  // lines to print below the sentence, where it offers a choice

 private:
  std::string choices_;
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

// Passes on a failure of the library as an InputError; subject is what the user gave, such as the name of a file.
void check(mha_status status, const mha_error &error, const std::string &subject);

// 'text' for a sentence, shortened if it is long.
std::string in_quotes(std::string_view text);

// A shape as Python writes it: (3, 6).
std::string shape_text(const std::vector<int64_t> &shape);

// "1 head", "2 heads".
std::string count_text(int64_t count, const char *singular);

// The text with control characters replaced: names come from files, and must not be able to add lines or steer a terminal.
std::string one_line(std::string_view text);

}  // namespace command
