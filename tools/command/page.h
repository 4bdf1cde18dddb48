// Where mha explain writes: the terminal, or a page of HTML (html_page.h).
#pragma once

#include <string>
#include <vector>

#include "matrix.h"
#include "terminal.h"

namespace command {

struct Attention;
struct Labels;

class Page {
 public:
  virtual ~Page() = default;
  virtual void headline(const std::string &title, const std::string &sentence) = 0;
  virtual void maps(const Attention &attention, const Labels &labels) = 0;
  virtual void step(const std::string &number, const std::string &title, const std::string &shapes, const std::string &why) = 0;
  virtual void note(const std::string &sentence) = 0;  // words in the place of blocks
  virtual void blocks(const std::vector<Block> &blocks) = 0;
};

class TerminalPage : public Page {
 public:
  TerminalPage();
  void headline(const std::string &title, const std::string &sentence) override;
  void maps(const Attention &, const Labels &) override {}  // not to be drawn with letters
  void step(const std::string &number, const std::string &title, const std::string &shapes, const std::string &why) override;
  void note(const std::string &sentence) override;
  void blocks(const std::vector<Block> &blocks) override;

 private:
  const int width_;
  const Palette palette_;
  bool is_empty_ = true;
};

}  // namespace command
