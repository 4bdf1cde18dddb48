// mha info: what the library finds on this machine.
#include <CLI/CLI.hpp>
#include <sys/utsname.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <string>

#include "commands.h"
#include "error.h"
#include "mha.h"
#include "terminal.h"
#ifdef MHA_WITH_OPENBLAS
#include "mha_openblas.h"
#endif

namespace command {
namespace {

std::string processor_name() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    const size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) return line.substr(colon + 2);
  }
  utsname system = {};
  return uname(&system) == 0 ? system.machine : "unknown";
}

std::string first_line_of(const std::string &path) {
  std::string line;
  std::ifstream file(path);
  std::getline(file, line);
  return line;
}

// The caches of the first processor: "L1d 48 KiB, L2 1 MiB, L3 32 MiB".
std::string cache_names() {
  std::string names;
  for (int index = 0;; ++index) {
    const std::string folder = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/";
    const std::string size = first_line_of(folder + "size");  // "48K"
    const std::string type = first_line_of(folder + "type");
    if (size.empty()) break;
    if (type == "Instruction") continue;
    const double kib = std::strtod(size.c_str(), nullptr);
    names += (names.empty() ? "L" : ", L") + first_line_of(folder + "level") + (type == "Data" ? "d " : " ") + bytes_text(kib * 1024);
  }
  return names.empty() ? "unknown" : names;
}

std::string instruction_set_names() {
  std::string names;
  for (uint32_t set = MHA_INSTRUCTION_SET_SCALAR; set < 32; ++set) {
    if (mha_instruction_sets() & 1u << set) names += (names.empty() ? "" : ", ") + std::string(mha_instruction_set_name(set));
  }
  return names;
}

// The one that a call gets which asks for none.
std::string instruction_set_used() {
  mha_attention_args args = {};
  args.struct_size = sizeof args;
  args.batch = args.n_q = args.n_kv = args.num_heads = args.head_dim = 1;
  mha_call_info info = {};
  info.struct_size = sizeof info;
  mha_error error;
  check(mha_attention_info(&args, &info, &error), error, "mha_attention_info");
  return mha_instruction_set_name(info.instruction_set);
}

void show_info() {
  const Palette palette(STDOUT_FILENO);
  const auto line = [&](const char *name, const std::string &value) {
    char padded[32];
    std::snprintf(padded, sizeof padded, "%-18s", name);
    std::printf("%s%s\n", palette.strong(padded).c_str(), value.c_str());
  };
  const uint32_t version = mha_version();
  line("version", text(version / 10000, ".", version / 100 % 100, ".", version % 100));
  line("contract", text(mha_contract()));
  line("processor", processor_name());
  line("processors", text(sysconf(_SC_NPROCESSORS_ONLN)));
  line("caches", cache_names());
  line("instruction sets", instruction_set_names());
  line("used", instruction_set_used());
#ifdef MHA_WITH_OPENBLAS
  line("back ends", std::string("native, openblas (core ") + mha_openblas_core_name() + ")");
#else
  line("back ends", "native");
#endif
}

}  // namespace

void add_info_command(CLI::App *app) {
  CLI::App *info_app = app->add_subcommand("info", "Show this machine and this build as the library sees them");
  info_app->footer("\nExample:\n  mha info");
  info_app->callback(show_info);
}

}  // namespace command
