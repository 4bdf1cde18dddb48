#include "measure.h"

#include <benchmark/benchmark.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <new>
#include <stdexcept>

#include "limits.h"

namespace bench {
namespace {

Tolerance tolerance;
std::vector<Failure> failures;

// The arrays of the benchmark that runs now: its function is called again for each repetition.
std::string current_name;
std::unique_ptr<Case> current;

Case &case_of(const std::string &name, const std::function<std::unique_ptr<Case>()> &make) {
  if (current_name != name) {
    if (isatty(STDERR_FILENO) && !isatty(STDOUT_FILENO))
      std::cerr << name << std::endl;  // how far it is; else the results tell
    current.reset();
    current_name.clear();
    current = make();
    current->call();  // the first call also waits for pages of memory
    if (current->rival) current->rival->call();
    current_name = name;
  }
  return *current;
}

double limit_seconds(const Case &test, const Limits &limits) {
  double seconds = 0;
  for (const Stage &stage : test.stages)
    seconds += std::max(stage.flops / limits.flops, stage.bytes / limits.bytes);
  return seconds;
}

Limits best_of(const Limits &a, const Limits &b) {
  return {std::max(a.flops, b.flops), std::max(a.bytes, b.bytes)};
}

std::string percent(double share) { return std::to_string(std::lround(100 * share)) + "%"; }

// What the calls of a run took.
struct Times {
  double seconds;          // of one call
  double rival_share = 0;  // time of the rival / that of the call just before it, the median
};

Times time_alone(benchmark::State &state, Case &test, Clock clock) {
  const double begin = seconds_now(clock);
  for (auto _ : state) {
    test.call();
    benchmark::ClobberMemory();
  }
  return {(seconds_now(clock) - begin) / static_cast<double>(state.iterations())};
}

// The rival's calls are not in the benchmark's own times.
Times time_in_turns(benchmark::State &state, Case &test, Clock clock) {
  double seconds = 0;
  std::vector<double> shares;
  for (auto _ : state) {
    const double begin = seconds_now(clock);
    test.call();
    benchmark::ClobberMemory();
    const double middle = seconds_now(clock);
    state.PauseTiming();
    const double rival_begin = seconds_now(clock);
    test.rival->call();
    benchmark::ClobberMemory();
    shares.push_back((seconds_now(clock) - rival_begin) / (middle - begin));
    seconds += middle - begin;
    state.ResumeTiming();
  }
  const auto median = shares.begin() + static_cast<std::ptrdiff_t>(shares.size() / 2);
  std::nth_element(shares.begin(), median, shares.end());
  return {seconds / static_cast<double>(state.iterations()), *median};
}

void report_counters(benchmark::State &state, const Case &test, const Limits &limits,
                     double seconds, double drift) {
  double flops = 0, stage_bytes = 0;
  for (const Stage &stage : test.stages) flops += stage.flops, stage_bytes += stage.bytes;
  state.counters["of_limit"] = limit_seconds(test, limits) / seconds;
  state.counters["drift"] = std::round(100 * drift) / 100;
  state.counters["GFLOP/s"] = 1e-9 * flops / seconds;
  state.counters["GB/s"] = 1e-9 * test.bytes / seconds;
  state.counters["peak"] = 1e-9 * limits.flops;
  state.counters["bandwidth"] = 1e-9 * limits.bytes;
  state.counters["compute_us"] = 1e6 * flops / limits.flops;
  state.counters["memory_us"] = 1e6 * stage_bytes / limits.bytes;
}

void run(benchmark::State &state, const std::string &name,
         const std::function<std::unique_ptr<Case>()> &make, Clock clock) {
  const auto fail = [&](Failure::Kind kind, const std::string &sentence) {
    failures.push_back({kind, name, sentence});
    state.SkipWithError(sentence.c_str());
  };
  // What failed once is not tried again, so that no figure of it remains. Google Benchmark 1.7.1
  // would also crash over a first repetition that failed followed by others that did not.
  for (const Failure &failure : failures) {
    if (failure.name != name) continue;
    for (auto _ : state) {
    }  // it also aborts over repetitions that have not the same number of iterations
    return state.SkipWithError(failure.sentence.c_str());
  }
  try {
    Case &test = case_of(name, make);
    const LimitsOf of = {test.instruction_set, test.threads, clock, test.working_set_bytes};
    const Limits before = measure_limits(of);

    const Times times =
        test.rival ? time_in_turns(state, test, clock) : time_alone(state, test, clock);
    const double seconds = times.seconds;

    Limits after = measure_limits(of);
    const auto of_limit = [&] { return limit_seconds(test, best_of(before, after)) / seconds; };
    // Perhaps another loop is the fastest by now.
    if (of_limit() > tolerance.of_limit && !test.in_integers) {
      forget_fastest_loops(of);
      after = best_of(after, measure_limits(of));
    }
    const double limit_before = limit_seconds(test, before),
                 limit_after = limit_seconds(test, after);
    const double drift =
        std::max(limit_before, limit_after) / std::min(limit_before, limit_after) - 1;
    if (of_limit() > tolerance.of_limit && !test.in_integers) {
      return fail(
          Failure::Kind::is_void,
          "void: it was at " + percent(of_limit()) +
              " of the limit that was measured right before and after, so the limit is wrong");
    }
    if (drift > tolerance.drift) {
      const std::string sentence = "not measured: the machine's limit changed by " +
                                   percent(drift) + " during the run; it is too noisy";
      return fail(Failure::Kind::not_measured, sentence);
    }
    report_counters(state, test, best_of(before, after), seconds, drift);
    if (test.rival) state.counters[test.rival_counter] = times.rival_share;
    if (!test.label.empty()) state.SetLabel(test.label);
  } catch (const std::bad_alloc &) {
    fail(Failure::Kind::not_measured, "not measured: there is not enough memory for it");
  } catch (const std::exception &error) {
    fail(Failure::Kind::not_measured, std::string("not measured: ") + error.what());
  }
}

}  // namespace

void Case::expect_operations(uint64_t counted) const {
  double flops = 0;
  for (const Stage &stage : stages) flops += stage.flops;
  if (static_cast<double>(counted) != flops)
    throw std::runtime_error("mha_forward_info counts " + std::to_string(counted) +
                             " operations where the benchmark counts " +
                             std::to_string(static_cast<uint64_t>(flops)));
}

void add(const std::string &name, std::function<std::unique_ptr<Case>()> make, Clock clock) {
  const auto function = [name, make, clock](benchmark::State &state) {
    run(state, name, make, clock);
  };
  benchmark::internal::Benchmark *const registered =
      benchmark::RegisterBenchmark(name.c_str(), function);
  registered->Unit(benchmark::kMicrosecond);
  if (clock == Clock::wall) registered->UseRealTime();
}

void set_tolerance(const Tolerance &given) { tolerance = given; }

const std::vector<Failure> &failed_benchmarks() { return failures; }

}  // namespace bench
