// The command line of the measuring program. tools/perf_gate.sh builds the libraries and runs it.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "counting.h"
#include "failure.h"
#include "library.h"
#include "report.h"
#include "shapes.h"
#include "timing.h"

namespace gate {
namespace {

const char usage[] =
    "mha_perf_gate [OPTION...] BASE.so NEW.so\n"
    "\n"
    "Says whether NEW is slower than BASE, both libmha.so with the mha.h that this program was compiled with for each.\n"
    "\n"
    "  --count            count instructions of the AVX2 kernels under valgrind, instead of measuring time\n"
    "  --shapes FILE      what is measured, a line each; with --count there is a list that is built in\n"
    "  --threshold P      how much slower is a regression: 5% (the default), with --count 1%\n"
    "  --rounds N         rounds of measurements, at least 7 (default: 15); shapes that these leave open get up to 4 N\n"
    "  --json FILE        writes all results, with every round's times\n"
    "  --markdown FILE    appends the table, for a job summary\n"
    "  --list             only prints the shapes that would be measured\n"
    "  --base-name NAME   what BASE is called in the reports; likewise --new-name\n"
    "  --help             this text\n"
    "\n"
    "tools/perf_gate.sh --help says what the lines of a shapes file are, and what decides about a regression.\n"
    "\n"
    "Example:\n"
    "  mha_perf_gate old/libmha.so new/libmha.so --threshold 10%\n"
    "\n"
    "Exit status: 0 no regression, 1 regression, 2 wrong usage, 3 too noisy to say, 4 cannot measure.\n";

struct Options {
  bool is_count = false, is_list = false;
  std::string shapes, json, markdown, names[2], paths[2];
  double threshold = 0;
  int rounds = 15;
};

// "5%", "5" or "2.5%": percent.
double parse_threshold(const std::string &text) {
  char *end;
  const double percent = strtod(text.c_str(), &end);
  if (*end == '%') ++end;
  if (end == text.c_str() || *end || !(percent > 0 && percent <= 1000)) {
    throw WrongUsage("--threshold '" + text + "' is no percentage above 0, such as 5%");
  }
  return percent / 100;
}

int parse_rounds(const std::string &text) {
  char *end;
  const long rounds = strtol(text.c_str(), &end, 10);
  if (text.empty() || *end || rounds < least_rounds || rounds > 10000) {
    throw WrongUsage("--rounds '" + text + "' is no whole number from " + std::to_string(least_rounds) + " to 10000");
  }
  return static_cast<int>(rounds);
}

Options parse(const std::vector<std::string> &arguments) {
  Options options;
  std::vector<std::string> files;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string &argument = arguments[i];
    const auto value = [&]() -> const std::string & {
      if (++i == arguments.size()) throw WrongUsage(argument + " needs a value; see --help");
      return arguments[i];
    };
    if (argument == "--count") {
      options.is_count = true;
    } else if (argument == "--list") {
      options.is_list = true;
    } else if (argument == "--shapes") {
      options.shapes = value();
    } else if (argument == "--threshold") {
      options.threshold = parse_threshold(value());
    } else if (argument == "--rounds") {
      options.rounds = parse_rounds(value());
    } else if (argument == "--json") {
      options.json = value();
    } else if (argument == "--markdown") {
      options.markdown = value();
    } else if (argument == "--base-name") {
      options.names[0] = value();
    } else if (argument == "--new-name") {
      options.names[1] = value();
    } else if (argument.rfind("-", 0) == 0) {
      throw WrongUsage("'" + argument + "' is not an option; see --help");
    } else {
      files.push_back(argument);
    }
  }
  if (files.size() != 2 && !options.is_list) {
    throw WrongUsage("two libraries are compared, and " + std::to_string(files.size()) + " were given; see --help");
  }
  for (size_t i = 0; i < files.size() && i < 2; ++i) {
    options.paths[i] = files[i];
    if (options.names[i].empty()) options.names[i] = files[i];
  }
  if (options.shapes.empty() && !options.is_count) throw WrongUsage("--shapes is needed, but with --count; see --help");
  if (options.threshold == 0) options.threshold = options.is_count ? 0.01 : 0.05;
  return options;
}

int compare(const Options &options) {
  const std::vector<Shape> shapes = options.shapes.empty() ? default_counting_shapes() : read_shapes(options.shapes);
  if (options.is_list) {
    for (const Shape &shape : shapes) printf("%s\n", shape.text.c_str());
    return 0;
  }
  std::vector<Library> libraries;
  for (size_t i = 0; i < 2; ++i) libraries.push_back(load_library(options.paths[i], options.names[i], i == 0 ? base_structs : new_structs));
  check_comparable(libraries[0], libraries[1]);
  Report report = {options.is_count, options.names[0], options.names[1], options.threshold, {}};
  check_memory(shapes, libraries.size());
  report.results = options.is_count ? count_instructions(shapes, libraries, options.paths, options.threshold)
                                    : measure_times(shapes, libraries, {options.threshold, options.rounds});
  print(report);
  if (!options.json.empty()) write_json(report, options.json);
  if (!options.markdown.empty()) append_markdown(report, options.markdown);
  const Verdict verdict = verdict_of(report);
  return verdict == Verdict::ok ? 0 : verdict == Verdict::regression ? 1 : 3;
}

int run(const std::vector<std::string> &arguments) {
  for (const std::string &argument : arguments) {
    if (argument != "--help" && argument != "-h") continue;
    fputs(usage, stdout);
    return 0;
  }
  // What valgrind is given to run, by counting.cpp.
  if (arguments.size() > 3 && arguments[0] == "--counted-calls") {
    make_counted_calls(arguments[1] == "base" ? base_structs : new_structs, arguments[2], {arguments.begin() + 3, arguments.end()});
    return 0;
  }
  return compare(parse(arguments));
}

}  // namespace
}  // namespace gate

int main(int argc, char **argv) {
  try {
    return gate::run({argv + 1, argv + argc});
  } catch (const gate::WrongUsage &wrong) {
    fprintf(stderr, "perf gate: %s\n", wrong.what());
    return 2;
  } catch (const gate::CannotMeasure &failure) {
    fprintf(stderr, "perf gate: cannot measure: %s\n", failure.what());
  } catch (const std::exception &failure) {
    fprintf(stderr, "perf gate: cannot measure: %s\n", failure.what());
  }
  return 4;
}
