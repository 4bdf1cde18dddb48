// mha: multi-head attention on the command line.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "commands.h"
#include "error.h"
#include "help.h"
#include "mha.h"

namespace command {
namespace {

constexpr int kFailure = 1;  // neither the user's fault nor his to mend
constexpr int kBadInput = 2;

int complain(int status, const std::string &sentence) {
  std::fprintf(stderr, "mha: %s\n", one_line(sentence).c_str());
  return status;
}

std::string version_text() {
  const uint32_t version = mha_version();
  return text("mha ", version / 10000, ".", version / 100 % 100, ".", version % 100, " (contract ", mha_contract(), ")");
}

// What is wrong with the options, in our words: CLI11's tell neither what to do nor always what was meant.
std::string sentence_about(const CLI::ParseError &error, const CLI::App &app) {
  const std::vector<const CLI::App *> parsed = app.get_subcommands([](const CLI::App *sub) { return sub->count() > 0; });
  const CLI::App &asked = parsed.empty() ? app : *parsed[0];
  const std::string help = parsed.empty() ? "mha --help" : "mha " + asked.get_name() + " --help";
  if (dynamic_cast<const CLI::ExtrasError *>(&error) != nullptr) {
    const std::vector<std::string> extras = app.remaining(true);
    // The value of an unknown option is left over too, and is not what is wrong.
    const auto is_option = [](const std::string &extra) { return extra.size() > 1 && extra[0] == '-'; };
    const auto option = std::find_if(extras.begin(), extras.end(), is_option);
    if (option != extras.end()) return text("there is no option ", in_quotes(*option), "; ", help, " says more");
    if (!extras.empty()) return text(in_quotes(extras[0]), " is not expected here; ", help, " says more");
  }
  if (dynamic_cast<const CLI::ArgumentMismatch *>(&error) != nullptr) {
    const std::string what = error.what();
    const std::string name = what.substr(0, what.find(':'));
    const CLI::Option *option = asked.get_option_no_throw(name);
    if (option != nullptr) return name + (option->count() > 1 ? ": is given twice" : ": a value is expected after it");
  }
  if (dynamic_cast<const CLI::ConversionError *>(&error) != nullptr) {  // values have been checked: a flag was given one
    for (const CLI::Option *option : asked.get_options()) {
      if (option->get_items_expected_max() == 0 && std::string(error.what()).find(option->get_name()) != std::string::npos) {
        return option->get_name() + ": takes no value";
      }
    }
  }
  return error.what();
}

// The option whose value was forgotten although another option follows, or "": CLI11 takes the other option for the value.
std::string option_without_value(const CLI::App &asked, const std::vector<const char *> &arguments) {
  for (size_t i = 0; i + 1 < arguments.size(); ++i) {
    const std::string name = arguments[i];
    const std::string next = arguments[i + 1];
    if (name.rfind("--", 0) != 0 || next.rfind("--", 0) != 0) continue;
    const CLI::Option *option = asked.get_option_no_throw(name);
    const bool takes_value = option != nullptr && option->get_items_expected_max() > 0;
    if (takes_value && asked.get_option_no_throw(next.substr(0, next.find('='))) != nullptr) return name;
  }
  return "";
}

int parse_and_run(int argc, char **argv) {
  CLI::App app("Multi-head attention on CPUs: look inside a layer, run it on files, pack it.", "mha");
  app.formatter(std::make_shared<HelpFormatter>());
  app.set_version_flag("--version", version_text, "Print the version and exit");
  app.footer(R"(
Examples:
  mha explain
  mha run --weights layer.safetensors --heads 12 --causal --input x.npy --output y.npy
  mha run --help

Exit status: 0 on success, 2 for wrong input or usage (one sentence says what), 1 for anything else.)");
  app.require_subcommand(0, 1);  // or "mha verify run" would be two sub-commands
  add_explain_command(&app);
  add_run_command(&app);
  add_pack_command(&app);
  add_verify_command(&app);
  add_info_command(&app);

  const std::string advice = "explain, run, pack, verify or info is expected; mha --help says more";
  std::vector<const char *> arguments(argv, argv + argc);
  if (argc >= 2 && std::string_view(argv[1]) == "help") {  // help run -> run --help
    arguments.erase(arguments.begin() + 1);
    arguments.push_back("--help");
  }
  const std::string first = arguments.size() < 2 ? "" : arguments[1];
  if (first.empty()) return complain(kBadInput, advice);
  if (first[0] != '-' && app.get_subcommands([&](const CLI::App *known) { return known->get_name() == first; }).empty()) {
    return complain(kBadInput, text("there is no sub-command ", in_quotes(first), "; ", advice));
  }
  if (first[0] != '-') {
    const std::string option = option_without_value(*app.get_subcommand(first), arguments);
    if (!option.empty()) return complain(kBadInput, option + ": a value is expected after it");
  }
  try {
    app.parse(static_cast<int>(arguments.size()), arguments.data());
  } catch (const CLI::Success &request) {  // --help and --version
    return app.exit(request);
  } catch (const CLI::ParseError &error) {
    return complain(kBadInput, sentence_about(error, app));
  }
  return 0;
}

}  // namespace
}  // namespace command

int main(int argc, char **argv) {
  using namespace command;
  int status = kFailure;
  try {
    status = parse_and_run(argc, argv);
  } catch (const InputError &error) {
    status = complain(kBadInput, error.what());
    std::fputs(error.choices().c_str(), stderr);
  } catch (const std::bad_alloc &) {
    status = complain(kFailure, "there is not enough memory for this");
  } catch (const std::exception &error) {
    status = complain(kFailure, error.what());
  }
  if (std::fflush(stdout) != 0 && status == 0) {
    status = complain(kBadInput, text("standard output: cannot be written: ", std::strerror(errno)));
  }
  return status;
}
