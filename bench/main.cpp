// mha_bench: the library's speed as a share of the machine's limit. See --help.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>

#include "groups.h"
#include "machine.h"
#include "measure.h"
#include "mha.h"
#include "pool.h"
#include "probes.h"

namespace {

enum Exit { exit_fine = 0, exit_usage = 2, exit_void = 3, exit_not_measured = 4 };

void print_help() {
  std::cout << R"(mha_bench [--instruction_set=NAME] [--max_of_limit=X] [--max_drift=X]
          [--max_rotated_mb=X] [flags of Google Benchmark]

Measures the speed of mha as a share of what this machine can do. Every benchmark reports

  of_limit              the sum over its stages of max(operations / peak, bytes / bandwidth),
                        divided by the time it took
  drift                 by what share the limit changed during the run; above 0.1, measure again on
                        a quieter machine
  GFLOP/s               multiplications and additions; causal work counts only pairs that attend
  GB/s                  weights, inputs and outputs, each once
  peak, bandwidth       the limit, in GFLOP/s and GB/s: multiply-adds on registers; reads of a
                        buffer as large as the working set
  compute_us,memory_us  the time that the operations, and that the bytes, would take at the limit

The limit is measured right before and right after each run, with the same instruction set and
number of threads, and the better measurement counts. One thread is timed by processor time, on the
last of the cores that mha_bench may use; the group threads by the clock, with one thread on each
core.

--benchmark_list_tests lists the benchmarks, whose names begin with their group. Names end in
arguments: B batch, n rows, D width, H heads, Hkv kv heads, past positions in the cache before, T
threads; M rows, K and N of a product; d width of a head, C channels.

Decoding, except for decode_hot, cycles through equal layers and caches of 4 times the size of the
largest cache, so that everything is read from memory. A benchmark that was not given the memory for
it says so in its label. Some benchmarks alternate with another one: times_f32, times_ungrouped and
so on are the time of the other one divided by their own.

  --instruction_set=NAME  what the library computes with: auto (the best), scalar, or another of
                          src/kernels/sets.def
  --max_of_limit=X        a run above this is void, since its limit is wrong (1.03)
  --max_drift=X           a run with more drift is not measured (1)
  --max_rotated_mb=X      the memory that a benchmark of decoding may cycle through (a quarter of
                          the memory that is available)
  --help                  show this text, and the flags of Google Benchmark

Exit status: 0 everything was measured; 2 wrong flags, or a filter that matches no benchmark; 3 runs
were void; 4 something could not be measured. A benchmark that is void or not measured has an error
in place of figures, and a sentence at the end.

Examples:
  mha_bench --benchmark_list_tests
  mha_bench --benchmark_filter='^layer_prefill/' --benchmark_repetitions=5
  mha_bench --instruction_set=avx2 --benchmark_filter='^attention_prefill/.*head_dim:64' \
            --benchmark_out=build/avx2.json

Google Benchmark's:

)" << std::flush;
  benchmark::PrintDefaultHelp();
}

// A sentence to the user about the command line.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The value of --name=value, or null.
const char *value_of(const char *argument, const char *name) {
  const size_t length = strlen(name);
  return strncmp(argument, name, length) == 0 && argument[length] == '=' ? argument + length + 1
                                                                         : nullptr;
}

double positive_number(const char *argument, const char *value) {
  char *end = nullptr;
  const double number = strtod(value, &end);
  if (end == value || *end || !(number > 0))
    throw UsageError(std::string("'") + argument + "' needs a number above 0");
  return number;
}

uint32_t instruction_set_of(const std::string &name) {
  std::string available = "auto";
  for (uint32_t set = MHA_INSTRUCTION_SET_SCALAR; set < 32; ++set) {
    if (!(mha_instruction_sets() >> set & 1)) continue;
    if (name == mha_instruction_set_name(set)) return set;
    available += std::string(", ") + mha_instruction_set_name(set);
  }
  if (name == "auto") return bench::best_instruction_set();
  throw UsageError("--instruction_set=" + name + " is nothing that this machine has; use one of " +
                   available);
}

struct Options {
  bench::Setting setting = {bench::best_instruction_set(), true,
                            bench::available_memory_bytes() / 4};
  bench::Tolerance tolerance;
};

// Takes our own flags out of the command line, and checks those of Google Benchmark that it would
// misunderstand in silence.
Options read_flags(int *argc, char **argv) {
  Options options;
  int kept = 1;
  for (int i = 1; i < *argc; ++i) {
    const char *const argument = argv[i];
    if (!strcmp(argument, "--help") || !strcmp(argument, "-h")) {
      print_help();
      exit(exit_fine);
    }
    if (const char *const name = value_of(argument, "--instruction_set")) {
      options.setting.instruction_set = instruction_set_of(name);
      options.setting.all_instruction_sets = !strcmp(name, "auto");
      continue;
    }
    if (const char *const value = value_of(argument, "--max_of_limit")) {
      options.tolerance.of_limit = positive_number(argument, value);
      continue;
    }
    if (const char *const value = value_of(argument, "--max_drift")) {
      options.tolerance.drift = positive_number(argument, value);
      continue;
    }
    if (const char *const value = value_of(argument, "--max_rotated_mb")) {
      options.setting.most_rotated_bytes =
          static_cast<int64_t>(std::min(1e12, positive_number(argument, value)) * 1e6);
      continue;
    }
    for (const char *const flag : {"--benchmark_format", "--benchmark_out_format"}) {
      const char *const value = value_of(argument, flag);
      if (value && strcmp(value, "console") && strcmp(value, "json") && strcmp(value, "csv"))
        throw UsageError(std::string("'") + argument + "' is no format; use console, json or csv");
    }
    const char *const unit = value_of(argument, "--benchmark_time_unit");
    if (unit && strcmp(unit, "ns") && strcmp(unit, "us") && strcmp(unit, "ms") && strcmp(unit, "s"))
      throw UsageError(std::string("'") + argument + "' is no unit; use ns, us, ms or s");
    for (const char *const flag : {"--benchmark_repetitions", "--benchmark_min_time"}) {
      if (const char *const value = value_of(argument, flag)) positive_number(argument, value);
    }
    const char *const file = value_of(argument, "--benchmark_out");
    if (file && !std::ofstream(file, std::ios::app))
      throw UsageError(std::string("cannot write to '") + file + "'; name another file");
    argv[kept++] = argv[i];
  }
  *argc = kept;
  argv[kept] = nullptr;
  return options;
}

std::string processor() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, 10, "model name") == 0) return line.substr(line.find(": ") + 2);
  }
  return "unknown";
}

void add_context(const Options &options) {
  benchmark::AddCustomContext("processor", processor());
  benchmark::AddCustomContext("instruction_set",
                              mha_instruction_set_name(options.setting.instruction_set));
#if defined(__clang__)
  benchmark::AddCustomContext("compiler", __VERSION__);
#else
  benchmark::AddCustomContext("compiler", "GCC " __VERSION__);
#endif
  benchmark::AddCustomContext("back_end", "native");
}

int run(int argc, char **argv) {
  const Options options = read_flags(&argc, argv);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv))
    throw UsageError("a flag is unknown or its value wrong; see above, and mha_bench --help");
  bench::pin_main_thread();
  bench::set_tolerance(options.tolerance);
  for (const bench::AddBenchmarks add_benchmarks : bench::groups) add_benchmarks(options.setting);
  add_context(options);
  const size_t matched = benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  if (matched == 0)
    throw UsageError("no benchmark has such a name; mha_bench --benchmark_list_tests shows all");

  int status = exit_fine;
  for (const bench::Failure &failure : bench::failed_benchmarks()) {
    std::cerr << "mha_bench: " << failure.name << ": " << failure.sentence << "\n";
    status = std::max(status, static_cast<int>(failure.kind == bench::Failure::Kind::is_void
                                                   ? exit_void
                                                   : exit_not_measured));
  }
  std::cout.flush();
  if (!std::cout) throw std::runtime_error("the results could not be written");
  return status;
}

}  // namespace

int main(int argc, char **argv) {
  try {
    return run(argc, argv);
  } catch (const UsageError &error) {
    std::cerr << "mha_bench: " << error.what() << "\n";
    return exit_usage;
  } catch (const std::exception &error) {
    std::cerr << "mha_bench: " << error.what() << "\n";
    return exit_not_measured;
  }
}
