// Threads share units of work (src/base/schedule.cpp): each unit runs exactly once.
#include "base/schedule.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <memory>

#include "support/schedulers.h"

namespace {

struct Runs {
  explicit Runs(int64_t units)
      : count(std::make_unique<std::atomic<uint8_t>[]>(static_cast<size_t>(units))) {}

  std::unique_ptr<std::atomic<uint8_t>[]> count;
  std::atomic<int64_t> largest_thread{0};

  static void Unit(const void *runs, int64_t unit, int64_t thread) {
    Runs &self = *static_cast<Runs *>(const_cast<void *>(runs));
    self.count[unit].fetch_add(1, std::memory_order_relaxed);
    if (thread > self.largest_thread.load(std::memory_order_relaxed)) self.largest_thread = thread;
  }
};

// Units that take no time make threads contend for nearly every one. If taking one were not atomic,
// some would be lost within milliseconds.
TEST(Schedule, RunsEachUnitExactlyOnceHoweverThreadsContend) {
  constexpr int64_t kUnits = 100000;
  for (const uint32_t num_threads : {2u, 3u, 8u}) {
    const support::Scheduler scheduler(num_threads, support::RunTogether);
    for (int round = 0; round < 10; round++) {
      Runs runs(kUnits);
      mha::UnitCounter counter = {-1};  // whatever was in the workspace
      mha::run_units(scheduler.get(), &counter, kUnits, Runs::Unit, &runs);
      int64_t wrong = 0;
      for (int64_t unit = 0; unit < kUnits; unit++) wrong += runs.count[unit] != 1;
      ASSERT_EQ(wrong, 0) << num_threads << " threads, round " << round;
      EXPECT_LT(runs.largest_thread, num_threads);
    }
  }
}

TEST(Schedule, RunsEachUnitExactlyOnceForAnyNumberOfUnitsAndThreads) {
  for (const uint32_t num_threads : {1u, 2u, 3u, 5u}) {
    const support::Scheduler scheduler(num_threads, support::RunTogether);
    for (const mha_scheduler *given :
         {static_cast<const mha_scheduler *>(nullptr), scheduler.get()}) {
      for (int64_t units = 0; units < 12; units++) {
        Runs runs(units + 1);
        mha::UnitCounter counter = {3};
        mha::run_units(given, &counter, units, Runs::Unit, &runs);
        for (int64_t unit = 0; unit <= units; unit++)
          EXPECT_EQ(runs.count[unit], unit < units) << unit << " of " << units;
      }
    }
  }
}

}  // namespace
