// mha: multi-head attention on the command line.
#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <new>

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
  add_explain_command(&app);
  add_run_command(&app);
  add_pack_command(&app);
  add_verify_command(&app);
  add_info_command(&app);

  const std::string advice = "explain, run, pack, verify or info is expected; mha --help says more";
  const std::string first = argc < 2 ? "" : argv[1];
  if (first.empty()) return complain(kBadInput, advice);
  if (first[0] != '-' && app.get_subcommands([&](const CLI::App *known) { return known->get_name() == first; }).empty()) {
    return complain(kBadInput, text("there is no sub-command ", in_quotes(first), "; ", advice));
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success &request) {  // --help and --version
    return app.exit(request);
  } catch (const CLI::ParseError &error) {
    return complain(kBadInput, error.what());
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
