#include "read_probe.h"

#include <algorithm>
#include <chrono>

namespace command {
namespace {

constexpr int64_t kSmallest = int64_t{16} << 10;  // bytes for each thread; less than any cache
constexpr int64_t kLargest = int64_t{256} << 20;  // what is larger is read no faster and no more slowly
constexpr double kSeconds = 1e-3;                 // of a try at least, so that the clock and the waking of threads are lost in it
constexpr int kRounds = 3, kTries = 10;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// What each thread does.
struct Reading {
  const bench::ReadProbe &probe;
  const char *base;
  int64_t stream_bytes;
  int64_t repetitions;
};

void read(void *context, uint32_t thread) {
  const Reading &reading = *static_cast<const Reading *>(context);
  const char *const own = reading.base + thread * reading.probe.streams * reading.stream_bytes;
  for (int64_t i = 0; i < reading.repetitions; ++i) reading.probe.run(own, reading.stream_bytes);
}

}  // namespace

ReadProbe::ReadProbe(uint32_t instruction_set, const mha_scheduler &scheduler, double working_set_bytes) : scheduler_(scheduler) {
  const int64_t smallest = kSmallest * scheduler.num_threads, wanted = static_cast<int64_t>(std::min<double>(kLargest, working_set_bytes));
  const int64_t bytes = std::max(smallest, wanted);
  buffer_ = bench::make_array<char>(bytes);
  for (const bench::ReadProbe &probe : bench::probes_of(instruction_set).read) {
    int64_t steps = bytes / scheduler.num_threads / probe.streams / bench::read_step;
    if (steps % 2 == 0) --steps;  // streams at a distance of a power of two get into each other's way
    ways_.push_back({probe, steps * bench::read_step, 0.0});
  }
}

double ReadProbe::measure() {
  if (ways_.size() > 1) {
    for (int round = 0; round < kRounds; ++round) {  // in turns: a slow moment hits all
      for (Way &way : ways_) attempt(&way);
    }
    ways_ = {*std::max_element(ways_.begin(), ways_.end(), [](const Way &a, const Way &b) { return a.best < b.best; })};
  }
  for (int i = 0; i < kTries; ++i) attempt(&ways_[0]);
  return ways_[0].best;
}

void ReadProbe::attempt(Way *way) const {
  Reading reading = {way->probe, buffer_.get(), way->stream_bytes, 1};
  const double bytes = static_cast<double>(way->stream_bytes) * way->probe.streams * scheduler_.num_threads;
  for (;; reading.repetitions *= 2) {
    const auto start = std::chrono::steady_clock::now();
    if (scheduler_.num_threads == 1)
      read(&reading, 0);
    else
      scheduler_.parallel_for(scheduler_.context, scheduler_.num_threads, read, &reading);
    const double seconds = seconds_since(start);
    if (seconds < kSeconds) continue;
    way->best = std::max(way->best, bytes * static_cast<double>(reading.repetitions) / seconds);
    return;
  }
}

}  // namespace command
