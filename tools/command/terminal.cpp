#include "terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "error.h"

namespace command {

bool is_terminal(int file) {
  const char *kind = std::getenv("TERM");
  return isatty(file) != 0 && kind != nullptr && std::strcmp(kind, "dumb") != 0;
}

int terminal_width(int file) {
  winsize size = {};
  const bool is_known = isatty(file) != 0 && ioctl(file, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return is_known ? size.ws_col : 120;
}

Palette::Palette(int file) {
  const char *no_colour = std::getenv("NO_COLOR");
  has_colours_ = is_terminal(file) && (no_colour == nullptr || no_colour[0] == '\0');
}

std::string Palette::wrap(const char *code, const std::string &text) const {
  return has_colours_ ? std::string("\x1b[") + code + "m" + text + "\x1b[0m" : text;
}

Progress::Progress(bool is_wanted) : is_shown_(is_wanted && is_terminal(STDERR_FILENO)) {}

void Progress::stage(const std::string &what) {
  if (is_shown_) show(what + " ...");
}

void Progress::step(const std::string &what, int64_t done, int64_t total) {
  const auto now = std::chrono::steady_clock::now();
  if (!is_shown_ || now - last_ < std::chrono::milliseconds(100)) return;
  last_ = now;
  const int64_t width = 30;
  const int64_t filled = static_cast<int64_t>(width * (static_cast<double>(done) / static_cast<double>(total)));
  const std::string bar = std::string(static_cast<size_t>(filled), '#') + std::string(static_cast<size_t>(width - filled), '.');
  show(text(what, " ", done, " of ", total, "  ", bar));
}

void Progress::clear() {
  if (has_line_) std::fputs("\r\x1b[K", stderr);
  has_line_ = false;
}

void Progress::show(const std::string &line) {
  const size_t width = static_cast<size_t>(std::max(1, terminal_width(STDERR_FILENO) - 1));  // a longer line would wrap, and stay
  std::fprintf(stderr, "\r\x1b[K%s", one_line(line).substr(0, width).c_str());
  std::fflush(stderr);
  has_line_ = true;
}

std::vector<std::string> wrapped(const std::string &text, int width) {
  std::vector<std::string> lines;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    const bool fits = !lines.empty() && lines.back().size() + 1 + word.size() <= static_cast<size_t>(std::max(width, 1));
    if (fits) {
      lines.back() += " " + word;
    } else {
      lines.push_back(word);
    }
  }
  return lines;
}

std::string decimal_text(double number, int decimals) {
  char buffer[64];
  std::snprintf(buffer, sizeof buffer, "%.*f", decimals, number);
  return buffer;
}

std::string duration_text(double seconds) {
  if (seconds >= 1) return decimal_text(seconds, 2) + " s";
  if (seconds >= 1e-3) return decimal_text(seconds * 1e3, 2) + " ms";
  return decimal_text(seconds * 1e6, 1) + " us";
}

std::string bytes_text(double bytes) {
  const char *const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  for (; bytes >= 1024 && unit + 1 < std::size(units); ++unit) bytes /= 1024;
  const bool is_whole = bytes == static_cast<double>(static_cast<int64_t>(bytes));
  return decimal_text(bytes, is_whole ? 0 : 1) + " " + units[unit];
}

}  // namespace command
