// What the command shows to people: colours, progress, numbers with units. None of it where nobody looks.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace command {

bool is_terminal(int file);    // and one that knows control sequences
int terminal_width(int file);  // 120 if it is none

// Colours for text that goes to a file descriptor: none unless it is a terminal, and none if NO_COLOR is set (no-color.org).
class Palette {
 public:
  explicit Palette(int file);
  std::string title(const std::string &text) const { return wrap("1;36", text); }
  std::string strong(const std::string &text) const { return wrap("1", text); }
  std::string shape(const std::string &text) const { return wrap("33", text); }
  std::string faint(const std::string &text) const { return wrap("2", text); }

 private:
  std::string wrap(const char *code, const std::string &text) const;
  bool has_colours_;
};

// One line on stderr that says what a long run is doing; it is gone at the end, and never appears off a terminal.
class Progress {
 public:
  explicit Progress(bool is_wanted);
  ~Progress() { clear(); }
  Progress(const Progress &) = delete;
  Progress &operator=(const Progress &) = delete;

  void stage(const std::string &what);                              // at once
  void step(const std::string &what, int64_t done, int64_t total);  // now and then
  void clear();

 private:
  void show(const std::string &line);

  bool is_shown_;
  bool has_line_ = false;
  std::chrono::steady_clock::time_point last_;
};

// A text in lines of at most this width, where its words allow.
std::vector<std::string> wrapped(const std::string &text, int width);

std::string duration_text(double seconds);  // "12.3 ms"
std::string bytes_text(double bytes);       // "1.5 MiB"
std::string decimal_text(double number, int decimals);

}  // namespace command
