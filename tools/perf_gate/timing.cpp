#include "timing.h"

#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <random>

#include "failure.h"

namespace gate {
namespace {

constexpr double sample_seconds = 5e-3;
constexpr int samples_per_round = 4;  // of each library
constexpr int most_blocks = 4;

// One thread is timed by its processor time, which runs only while the thread does. Several threads wait for each other, which is a part of
// what they take.
double now(bool is_one_thread) {
  timespec time;
  clock_gettime(is_one_thread ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// One shape while it is measured.
struct Measurement {
  std::unique_ptr<Workload> workload;
  Result result;
  int64_t calls;  // of one sample

  double sample(size_t library) const {
    const bool is_one_thread = workload->shape().threads == 1;
    workload->use(library);
    const double begin = now(is_one_thread);
    for (int64_t i = 0; i < calls; ++i) workload->call();
    return (now(is_one_thread) - begin) / static_cast<double>(calls);
  }

  // As many calls as fill a sample, by the faster library.
  void calibrate() {
    for (calls = 1;; calls *= 2) {
      const double seconds = std::min(sample(0), sample(1)) * static_cast<double>(calls);
      if (seconds < sample_seconds / 2) continue;
      calls = std::max<int64_t>(1, std::llround(static_cast<double>(calls) * sample_seconds / seconds));
      return;
    }
  }

  // The libraries take turns, each as often first as second: base new new base, or the other way round. What disturbs a machine only ever
  // adds time, so that the fastest sample of a library stands for the round.
  void run_round(bool new_begins) {
    double fastest[2] = {INFINITY, INFINITY};
    for (int i = 0; i < 2 * samples_per_round; ++i) {
      const size_t library = ((i + 1) / 2 % 2 == 1) != new_begins;
      fastest[library] = std::min(fastest[library], sample(library));
    }
    result.base_seconds.push_back(fastest[0]);
    result.new_seconds.push_back(fastest[1]);
  }
};

// The faster half of the rounds: what disturbs a machine only ever adds time.
Interval range_of(const std::vector<double> &seconds) { return {*std::min_element(seconds.begin(), seconds.end()), median(seconds)}; }

void judge(Result *result, double threshold) {
  std::vector<double> ratios;
  for (size_t i = 0; i < result->base_seconds.size(); ++i) ratios.push_back(result->new_seconds[i] / result->base_seconds[i]);
  result->ratio = median(ratios);
  result->ratio_interval = median_interval(ratios);
  result->base_range = range_of(result->base_seconds);
  result->new_range = range_of(result->new_seconds);
  const bool is_slower = result->ratio >= 1 + threshold;
  if (is_slower && result->new_range.low > result->base_range.high) {
    result->verdict = Verdict::regression;
  } else if (!is_slower &&
             (result->ratio_interval.high < 1 + threshold || result->ratio_interval.high - result->ratio_interval.low < threshold)) {
    result->verdict = Verdict::ok;
  } else {
    result->verdict = Verdict::too_noisy;
  }
}

}  // namespace

std::vector<Result> measure_times(const std::vector<Shape> &shapes, const std::vector<Library> &libraries, const TimingSettings &settings) {
  std::vector<Measurement> measurements(shapes.size());
  for (size_t i = 0; i < shapes.size(); ++i) {
    if (shapes[i].threads > std::max(1l, static_cast<long>(std::thread::hardware_concurrency()))) {
      throw CannotMeasure("the shape '" + shapes[i].text + "' wants more threads than this machine has processors (" +
                          std::to_string(std::thread::hardware_concurrency()) + ")");
    }
    measurements[i].workload = std::make_unique<Workload>(shapes[i], libraries);
    measurements[i].result.shape = shapes[i];
    measurements[i].result.difference = measurements[i].workload->compare();
    measurements[i].calibrate();
  }

  std::mt19937 random{std::random_device{}()};
  std::vector<Measurement *> undecided;
  for (Measurement &measurement : measurements) undecided.push_back(&measurement);
  for (int block = 1; block <= most_blocks && !undecided.empty(); block *= 2) {
    const int rounds = block == 1 ? settings.rounds : block / 2 * settings.rounds;
    fprintf(stderr, "perf gate: %d rounds of %zu shape%s%s\n", rounds, undecided.size(), undecided.size() == 1 ? "" : "s",
            block == 1 ? "" : ", which the rounds so far leave open");
    for (int round = 0; round < rounds; ++round) {
      std::shuffle(undecided.begin(), undecided.end(), random);
      for (Measurement *measurement : undecided) measurement->run_round(random() & 1);
    }
    for (Measurement *measurement : undecided) judge(&measurement->result, settings.threshold);
    undecided.erase(std::remove_if(undecided.begin(), undecided.end(),
                                   [](const Measurement *measurement) { return measurement->result.verdict != Verdict::too_noisy; }),
                    undecided.end());
  }

  std::vector<Result> results;
  for (Measurement &measurement : measurements) results.push_back(std::move(measurement.result));
  return results;
}

}  // namespace gate
