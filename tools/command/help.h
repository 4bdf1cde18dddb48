// How --help looks.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace command {

// CLI11's help with one empty line between groups, and without repeating behind each option what its description says.
class HelpFormatter : public CLI::Formatter {
 public:
  HelpFormatter() { column_width(22); }

  std::string make_help(const CLI::App *app, std::string name, CLI::AppFormatMode mode) const override;
  std::string make_option_opts(const CLI::Option *option) const override;
};

}  // namespace command
