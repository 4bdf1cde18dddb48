// mha verify: whether a packed layer is still what was packed; with --results, whether this
// machine's results are the published ones.
#include <cstdio>
#include <fstream>
#include <memory>
#include <stdexcept>

#include "commands.h"
#include "error.h"
#include "tests/contract/results.h"

namespace command {
namespace {

void verify(const std::string &path) {
  LayerOptions options;
  options.packed = path;
  const Layer layer(options);
  mha_error error;
  check(mha_layer_verify(layer.bytes(), layer.num_bytes(), &error), error, path);
  std::printf("%s: a packed layer whose weights are intact; %s\n", one_line(path).c_str(),
              layer.text().c_str());
}

std::string processor() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);) {
    const size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos)
      return one_line(line.substr(colon + 2));
  }
  return "unknown";
}

// A line for each result that says whether it is the published one, and what it is where it is not.
void verify_results() {
  const results::Checksums &table = results::Published();
  std::printf("processor         %s\ninstruction sets  %s\n", processor().c_str(),
              instruction_set_names().c_str());
  std::printf("contract          %u, published for %d\n\n", mha_contract(),
              results::PublishedContract());
  std::vector<std::pair<std::string, results::Checksums>> computed;
  for (uint32_t set = MHA_INSTRUCTION_SET_SCALAR; set < 32; ++set) {
    if (mha_instruction_sets() & 1u << set)
      computed.emplace_back(mha_instruction_set_name(set), results::Compute(set, nullptr));
  }
  size_t equal = 0;
  for (const auto &[name, published] : table) {
    std::string others;  // sets with another result, and that
    for (const auto &[set, checksums] : computed) {
      const auto found = checksums.find(name);
      char digits[17] = "no result";
      if (found != checksums.end())
        std::snprintf(digits, sizeof digits, "%016llx",
                      static_cast<unsigned long long>(found->second));
      if (found == checksums.end() || found->second != published)
        others += text(others.empty() ? "" : ", ", set, " ", digits);
    }
    if (others.empty()) ++equal;
    if (!others.empty()) others = ": BUT " + others;
    std::printf("%016llx  %s%s\n", static_cast<unsigned long long>(published), name.c_str(),
                others.c_str());
  }
  const std::string sum = text(equal, " of ", table.size(), " as published");
  std::printf("\n%s, on each of %zu instruction sets\n", sum.c_str(), computed.size());
  if (equal != table.size())
    throw std::runtime_error(sum + "; the lines with BUT show what differs");
}

}  // namespace

void add_verify_command(CLI::App *app, Task *task) {
  struct Options {
    std::string path;
    bool are_results = false;
  };
  const auto options = std::make_shared<Options>();
  CLI::App *verify_app = app->add_subcommand(
      "verify", "Check a packed layer with all its weights, or this machine's results");
  verify_app->add_option("file", options->path, "A layer written by mha pack (.mha)")
      ->type_name("FILE");
  verify_app->add_flag("--results", options->are_results,
                       "Compute the published results on every instruction set of this machine");
  verify_app->footer(R"(
The published results cover calls of every kind, number types and options. Each has a line with its
64-bit FNV-1a checksum. They are the same on every machine. The exit status is 1 if one differs.

Examples:
  mha verify layer.mha
  mha verify --results)");
  verify_app->callback([=] {
    if (options->are_results && !options->path.empty())
      fail("--results and a file are two checks; run mha verify for each");
    if (!options->are_results && options->path.empty())
      fail("a packed file or --results is needed: mha verify FILE or mha verify --results");
    *task = options->are_results ? Task(verify_results) : [options] { verify(options->path); };
  });
}

}  // namespace command
