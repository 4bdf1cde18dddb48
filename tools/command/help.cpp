#include "help.h"

#include <utility>

namespace command {

std::string HelpFormatter::make_help(const CLI::App *app, std::string name, CLI::AppFormatMode mode) const {
  std::string help = CLI::Formatter::make_help(app, std::move(name), mode);
  const std::string two_empty_lines = "\n\n\n";
  for (size_t at = help.find(two_empty_lines); at != std::string::npos; at = help.find(two_empty_lines, at)) help.erase(at, 1);
  if (help.back() != '\n') help += '\n';
  return help;
}

std::string HelpFormatter::make_option_opts(const CLI::Option *option) const {
  return option->get_type_size() == 0 ? "" : " " + option->get_type_name();
}

}  // namespace command
