// mha explain as a page of HTML, complete in itself: nothing is loaded from elsewhere.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "attention_map.h"
#include "page.h"
#include "taps.h"

namespace command {

// The tokens that stand beside a map; none = they are numbered.
struct Labels {
  std::vector<std::string> rows;     // n_q
  std::vector<std::string> columns;  // n_kv
};

class HtmlPage : public Page {
 public:
  explicit HtmlPage(Progress *progress) : progress_(progress) {}
  void headline(const std::string &title, const std::string &sentence) override;
  void maps(const Attention &attention, const Labels &labels) override;
  void step(const std::string &number, const std::string &title, const std::string &shapes, const std::string &why) override;
  void note(const std::string &sentence) override;
  void blocks(const std::vector<Block> &blocks) override;

  std::string html() const;                                 // all of it
  const std::string &about_maps() const { return about_; }  // what was drawn first, for the terminal

 private:
  void end_step();

  Progress *progress_;
  std::string title_, body_, about_;
  bool is_in_step_ = false;
};

}  // namespace command
