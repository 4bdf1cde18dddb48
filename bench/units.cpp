// mha_bench_units: how evenly the library cuts calls into units of work for many threads. Its
// run_units takes the place of the library's: the linker needs nothing of schedule.cpp then.

#define run_units run_units_on_threads
#include "base/schedule.cpp"
#undef run_units

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "clock.h"
#include "decode_case.h"
#include "layer_case.h"
#include "machine.h"
#include "pool.h"
#include "probes.h"
#include "support/cache.h"

namespace bench {
namespace {

constexpr char help[] = R"(mha_bench_units [--check] [TEXT...]

Prints, as CSV, how evenly calls are cut into units of work for 16 and 64 threads. The library cuts
each call for that many threads; one thread runs the units and takes the median of several times for
each. In the model, the thread that is free first takes the next unit. What threads cost each other
is left out: bandwidth and caches.

Efficiency is the time of one thread, which cuts nothing, divided by threads * the time until the
last thread is done. What lies between the stages is the work of one thread.

  work      all work for 64 threads, over that of one thread
  16, 64    efficiency
  woken     the same if each stage also waits for an empty one on two threads of this machine
  units     of each stage for 64 threads (of a layer: input projections; storing new rows, unless
            units of the attention do it; attention; output projection), and the share of the
            largest in the stage

  --check  print the speed-up that the model predicts for two threads, that of two real ones, and
           that of two calls at once, one on each, which is what the cores can give
  TEXT     only calls whose names contain one of these texts
  --help   show this text

Exit status: 0 everything was measured; 1 something could not be; 2 wrong usage.

Examples:
  mha_bench_units layer/B:1/n:128/ decode
  mha_bench_units --check D:768
)";

constexpr int rounds = 9;

double now() { return seconds_now(Clock::processor); }
double wall() { return seconds_now(Clock::wall); }

double median(std::vector<double> &samples) {
  std::nth_element(samples.begin(), samples.begin() + samples.size() / 2, samples.end());
  return samples[samples.size() / 2];
}

// The thread that is free first.
size_t first_free(const std::vector<double> &busy) {
  return static_cast<size_t>(std::min_element(busy.begin(), busy.end()) - busy.begin());
}

// What is known of a call that is cut for a number of threads.
struct Recording {
  uint32_t threads;
  std::unique_ptr<Case> test;
  std::vector<std::vector<std::vector<double>>> samples;  // of each unit of each stage, in seconds
  std::vector<double> between_samples;                    // what lies between the stages
  size_t next_stage = 0;                                  // of the call that runs
  double in_stages = 0;                                   // seconds of the call that runs
  std::vector<std::vector<double>> stages;                // their medians
  double between = 0;

  void run(int64_t units, void (*run)(const void *, int64_t, int64_t), const void *context) {
    if (next_stage == samples.size()) samples.emplace_back(units);
    std::vector<std::vector<double>> &stage = samples[next_stage++];
    // Units use what their thread has prepared, so each runs as one of its thread in the model.
    const double start = now();
    std::vector<double> busy(threads);
    for (int64_t unit = 0; unit < units; ++unit) {
      const size_t thread = first_free(busy);
      const double begin = now();
      run(context, unit, static_cast<int64_t>(thread));
      stage[unit].push_back(now() - begin);
      busy[thread] += stage[unit].back();
    }
    in_stages += now() - start;
  }

  void call() {
    next_stage = 0;
    in_stages = 0;
    const double begin = now();
    test->call();
    between_samples.push_back(now() - begin - in_stages);
  }

  void finish() {
    test.reset();
    between = median(between_samples);
    for (std::vector<std::vector<double>> &units : samples) {
      stages.emplace_back();
      for (std::vector<double> &unit : units) stages.back().push_back(median(unit));
    }
  }

  // All work, in seconds.
  double total() const {
    double sum = between;
    for (const std::vector<double> &units : stages)
      sum = std::accumulate(units.begin(), units.end(), sum);
    return sum;
  }

  // Until the last thread is done. `waking`: seconds for each stage that is shared.
  double span(double waking = 0) const {
    double sum = between;
    for (const std::vector<double> &units : stages) {
      std::vector<double> busy(threads);
      for (const double unit : units) busy[first_free(busy)] += unit;
      sum += *std::max_element(busy.begin(), busy.end()) + (units.size() > 1 ? waking : 0);
    }
    return sum;
  }
};
Recording *recording;  // null: none

// Attention alone, over arrays of the caller's or a cache.
struct AttentionShape {
  int64_t heads, kv_heads, width, value_width, n, keys;
  bool is_causal, is_cached;

  std::string name() const {
    return std::string("attention/") + (is_cached ? "cache" : "arrays") +
           "/n:" + std::to_string(n) + "/keys:" + std::to_string(keys) +
           "/H:" + std::to_string(heads) + "/Hkv:" + std::to_string(kv_heads) +
           "/width:" + std::to_string(width) + (is_causal ? "" : " uncausal");
  }
};

class AttentionCase : public Case {
 public:
  AttentionCase(const AttentionShape &shape, uint32_t threads)
      : scheduler_(pool_scheduler(threads)) {
    support::AttentionSizes sizes;
    sizes.num_heads = shape.heads;
    sizes.num_kv_heads = shape.kv_heads;
    sizes.head_dim = shape.width;
    sizes.head_dim_v = shape.value_width;
    sizes.n_q = shape.n;
    sizes.n_kv = shape.keys;
    sizes.is_causal = shape.is_causal;
    support::AttentionProblem problem = support::NormalAttention(sizes);
    support::AttentionCall call = {call_form(threads > 1 ? &scheduler_ : nullptr)};
    if (shape.is_cached) {
      cache_.emplace(support::CacheConfigOf(sizes, {MHA_CACHE_KIND_CONTIGUOUS, 0}, 1, shape.keys),
                     support::Place::kLargePages);
      cache_->Append(0, {problem.k, problem.v});
      call.cache.cache = cache_->get();
      call.cache.read = true;
      problem.n_kv = 0;
    }
    data_ = std::make_unique<support::AttentionData>(problem, call);
    workspace_ = support::Memory(data_->WorkspaceBytes(), support::Place::kLargePages);
  }

  void call() override {
    support::Check(data_->Run(workspace_.data(), workspace_.size(), &error_), error_);
  }

 private:
  mha_scheduler scheduler_;
  std::optional<support::Cache> cache_;
  std::unique_ptr<support::AttentionData> data_;
  support::Memory workspace_;
  mha_error error_ = {};
};

struct Call {
  std::string name;
  std::function<std::unique_ptr<Case>(uint32_t threads)> make;
};

std::vector<Call> calls() {
  std::vector<Call> all;
  const uint32_t set = best_instruction_set();
  const int64_t bytes = rotated_bytes();
  const auto add_layer = [&](const LayerShape &shape) {
    all.push_back({"layer/" + shape.name(), [=](uint32_t threads) {
                     return make_layer_case(shape, {set, threads});
                   }});
  };
  const auto add_decode = [&](const DecodeShape &shape) {
    all.push_back({"decode/B:" + std::to_string(shape.batch) + "/" + shape.layer_name(),
                   [=](uint32_t threads) {
                     return make_decode_layer(shape, {set, bytes, bytes, threads});
                   }});
  };
  for (const LayerShape &shape : page_layers) add_layer(shape);
  add_layer({1, 8192, 256, 2, true});
  add_decode({12, 12, 64, 1024});
  add_decode({32, 8, 64, 4096});
  add_decode({32, 8, 128, 8192});
  for (const int64_t batch : {1, 8})
    for (const int64_t past : {1024, 4096, 32768}) add_decode({32, 8, 128, past, batch});
  for (const AttentionShape &shape : {AttentionShape{128, 1, 576, 512, 1, 8192, true, true},
                                      {128, 1, 576, 512, 1, 32768, true, true},
                                      {32, 1, 128, 128, 1, 32768, true, true},
                                      {32, 8, 128, 128, 1, 32768, true, true},
                                      {8, 8, 128, 128, 128, 32768, true, true},
                                      {12, 12, 64, 64, 197, 197, false, false},
                                      {12, 12, 64, 64, 1024, 1024, false, false},
                                      {12, 12, 64, 64, 1024, 1024, true, false},
                                      {8, 8, 128, 128, 4096, 4096, true, false}})
    all.push_back({shape.name(), [=](uint32_t threads) {
                     return std::make_unique<AttentionCase>(shape, threads);
                   }});
  return all;
}

// Records the call for these numbers of threads, in turns.
std::vector<Recording> record(const Call &call, const std::vector<uint32_t> &threads) {
  std::vector<Recording> recordings(threads.size());
  for (size_t i = 0; i < threads.size(); ++i) {
    recordings[i].threads = threads[i];
    recordings[i].test = call.make(threads[i]);
    recordings[i].test->call();  // which waits for pages of memory
  }
  for (int round = 0; round < rounds; ++round) {
    for (Recording &each : recordings) {
      recording = &each;
      each.call();
    }
  }
  recording = nullptr;
  for (Recording &each : recordings) each.finish();
  return recordings;
}

// Seconds that an empty stage takes on two threads.
double waking_seconds() {
  static const double seconds = [] {
    const mha_scheduler pool = pool_scheduler(2);
    double least = HUGE_VAL;
    for (const double end = wall() + 0.1; wall() < end;) {
      const double begin = wall();
      pool.parallel_for(
          pool.context, 2, [](void *, uint32_t) {}, nullptr);
      least = std::min(least, wall() - begin);
    }
    return least;
  }();
  return seconds;
}

void print_cuts(const Call &call) {
  const std::vector<Recording> of_threads = record(call, {1, 16, 64});
  const double alone = of_threads[0].total();
  std::printf("%s,%.0f,%.2f", call.name.c_str(), 1e6 * alone, of_threads[2].total() / alone);
  for (const double waking : {0.0, waking_seconds()})
    for (const Recording *of : {&of_threads[1], &of_threads[2]})
      std::printf(",%.2f", alone / (of->threads * of->span(waking)));
  const char *separator = ",";
  for (const std::vector<double> &units : of_threads[2].stages) {
    const double sum = std::accumulate(units.begin(), units.end(), 0.0);
    std::printf("%s%zu (%.1f%%)", separator, units.size(),
                100 * *std::max_element(units.begin(), units.end()) / sum);
    separator = " ";
  }
  std::printf("\n");
}

void call_one(void *both, uint32_t index) {
  (*static_cast<std::unique_ptr<Case> *>(both)[index]).call();
}

void print_check(const Call &call) {
  const std::vector<Recording> of_threads = record(call, {1, 2});
  std::unique_ptr<Case> one[] = {call.make(1), call.make(1)};
  const std::unique_ptr<Case> shared = call.make(2);
  const mha_scheduler pool = pool_scheduler(2);
  double alone = HUGE_VAL, together = HUGE_VAL, both = HUGE_VAL;
  const double end = wall() + 0.1;  // by then a sleeping thread has come
  for (int i = 0; i < 2 * rounds || wall() < end; ++i) {
    const double begin = wall();
    one[0]->call();
    const double second = wall();
    shared->call();
    const double third = wall();
    pool.parallel_for(pool.context, 2, call_one, one);
    alone = std::min(alone, second - begin);
    together = std::min(together, third - second);
    both = std::min(both, wall() - third);
  }
  std::printf("%s,%.2f,%.2f,%.2f\n", call.name.c_str(),
              of_threads[0].total() / of_threads[1].span(), alone / together, 2 * alone / both);
}

int run(const std::vector<std::string> &words) {
  void (*print)(const Call &) = print_cuts;
  std::vector<std::string> texts;
  for (const std::string &word : words) {
    if (word == "--help" || word == "-h") return std::fputs(help, stdout) < 0;
    if (word == "--check") {
      print = print_check;
    } else if (word[0] != '-') {
      texts.push_back(word);
    } else {
      std::fprintf(stderr, "mha_bench_units: '%s' is no option; see --help\n", word.c_str());
      return 2;
    }
  }
  pin_main_thread();
  std::printf(print == print_check ? "Call,predicted,measured,two calls\n"
                                   : "Call,us of one thread,work,16,64,16 woken,64 woken,units\n");
  bool is_any = false;
  for (const Call &call : calls()) {
    const auto is_in_name = [&call](const std::string &text) {
      return call.name.find(text) != std::string::npos;
    };
    if (!texts.empty() && std::none_of(texts.begin(), texts.end(), is_in_name)) continue;
    is_any = true;
    print(call);
    std::fflush(stdout);
  }
  if (is_any) return 0;
  std::fprintf(stderr, "mha_bench_units: no call has such a name; without TEXT it prints all\n");
  return 2;
}

}  // namespace
}  // namespace bench

namespace mha {

void run_units(const mha_scheduler *scheduler, UnitCounter *counter, int64_t units,
               void (*run)(const void *context, int64_t unit, int64_t thread),
               const void *context) {
  if (bench::recording)
    bench::recording->run(units, run, context);
  else
    run_units_on_threads(scheduler, counter, units, run, context);
}

}  // namespace mha

int main(int argc, char **argv) {
  try {
    return bench::run({argv + 1, argv + argc});
  } catch (const std::exception &error) {
    std::fprintf(stderr, "mha_bench_units: %s\n", error.what());
    return 1;
  }
}
