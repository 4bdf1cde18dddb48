#include "page.h"

#include <unistd.h>

#include <cstdio>

namespace command {

TerminalPage::TerminalPage() : width_(terminal_width(STDOUT_FILENO)), palette_(STDOUT_FILENO) {}

void TerminalPage::headline(const std::string &title, const std::string &sentence) {
  std::printf("%s%s\n", is_empty_ ? "" : "\n\n", palette_.strong(title).c_str());
  for (const std::string &words : wrapped(sentence, width_)) std::printf("%s\n", words.c_str());
  is_empty_ = false;
}

void TerminalPage::step(const std::string &number, const std::string &title, const std::string &shapes, const std::string &why) {
  char line[80];
  std::snprintf(line, sizeof line, "Step %-4s%-23s", number.c_str(), title.c_str());
  std::printf("\n%s%s\n", palette_.title(line).c_str(), palette_.shape(shapes).c_str());
  for (const std::string &words : wrapped(why, width_ - 2)) std::printf("  %s\n", palette_.faint(words).c_str());
}

void TerminalPage::note(const std::string &sentence) {
  std::printf("\n");
  for (const std::string &words : wrapped(sentence, width_ - 2)) std::printf("  %s\n", words.c_str());
}

void TerminalPage::blocks(const std::vector<Block> &blocks) {
  if (!blocks.empty()) std::printf("\n");
  print_blocks(blocks, palette_, width_);
}

}  // namespace command
