// The pool of threads of the command, the benchmarks, the performance gate and the comparison
// (bench/workers.h).
#include "bench/workers.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

namespace {

// How often each task ran. Plain numbers: tasks of one index must not run at the same time, and
// what they wrote is to be seen afterwards.
struct Counts {
  std::vector<int> runs;

  static void Task(void *counts, uint32_t index) { ++static_cast<Counts *>(counts)->runs[index]; }
};

void RunOnce(const bench::Workers &workers, uint32_t count, Counts *counts) {
  const mha_scheduler &scheduler = workers.scheduler();
  scheduler.parallel_for(scheduler.context, count, Counts::Task, counts);
}

TEST(Workers, RunEveryTaskOnceAndWaitForAll) {
  for (const uint32_t num_threads : {1u, 2u, 3u, 17u}) {
    SCOPED_TRACE(num_threads);
    const bench::Workers workers(num_threads);
    ASSERT_EQ(workers.scheduler().num_threads, num_threads);
    for (uint32_t loop = 0; loop < 2000; ++loop) {
      const uint32_t count = 1 + loop % num_threads;
      Counts counts{std::vector<int>(count)};
      RunOnce(workers, count, &counts);
      ASSERT_EQ(counts.runs, std::vector<int>(count, 1)) << "loop " << loop;
    }
  }
}

TEST(Workers, WakeUpAfterAPause) {
  const bench::Workers workers(3);
  for (int loop = 0; loop < 5; ++loop) {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    Counts counts{std::vector<int>(3)};
    RunOnce(workers, 3, &counts);
    ASSERT_EQ(counts.runs, std::vector<int>(3, 1));
  }
}

// Tasks that wait for each other, which the library's never do: they end if each has a thread of
// its own.
TEST(Workers, AreSeveralThreadsAtOnce) {
  const bench::Workers workers(3);
  std::atomic<int> missing{3};
  const mha_scheduler &scheduler = workers.scheduler();
  scheduler.parallel_for(
      scheduler.context, 3,
      [](void *missing_tasks, uint32_t) {
        std::atomic<int> &missing = *static_cast<std::atomic<int> *>(missing_tasks);
        for (--missing; missing > 0;) std::this_thread::yield();
      },
      &missing);
  EXPECT_EQ(missing, 0);
}

TEST(Workers, EachBeginWithWhatKeepsThemOnACore) {
  std::atomic<uint32_t> begun{0};
  {
    const bench::Workers workers(4, [&begun](uint32_t index) { begun |= 1u << index; });
  }
  EXPECT_EQ(begun, 7u);
}

TEST(Workers, EndWithoutHavingWorked) {
  for (int round = 0; round < 100; ++round) bench::Workers workers(4);
}

}  // namespace
