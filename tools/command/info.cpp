// mha info: what the library finds on this machine.
#include <cstdio>
#include <string>

#include "commands.h"
#include "error.h"
#include "mha.h"
#ifdef MHA_WITH_OPENBLAS
#include "mha_openblas.h"
#endif

namespace command {

std::string instruction_set_names() {
  std::string names;
  for (uint32_t set = MHA_INSTRUCTION_SET_SCALAR; set < 32; ++set) {
    if (mha_instruction_sets() & 1u << set)
      names += (names.empty() ? "" : ", ") + std::string(mha_instruction_set_name(set));
  }
  return names;
}

namespace {

void show_info() {
  const auto line = [](const char *name, const std::string &value) {
    std::printf("%-18s%s\n", name, value.c_str());
  };
  const uint32_t version = mha_version();
  line("version", text(version / 10000, ".", version / 100 % 100, ".", version % 100));
  line("contract", text(mha_contract()));
  line("instruction sets", instruction_set_names());
#ifdef MHA_WITH_OPENBLAS
  line("back ends", std::string("native, openblas (core ") + mha_openblas_core_name() + ")");
#else
  line("back ends", "native");
#endif
}

}  // namespace

void add_info_command(CLI::App *app, Task *task) {
  CLI::App *info_app = app->add_subcommand(
      "info", "Show the build of the library, and what it detects on this machine");
  info_app->footer("\nExample:\n  mha info");
  info_app->callback([task] { *task = show_info; });
}

}  // namespace command
