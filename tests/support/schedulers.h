// The kinds of callers' threads that mha_scheduler allows.
#ifndef MHA_TESTS_SUPPORT_SCHEDULERS_H
#define MHA_TESTS_SUPPORT_SCHEDULERS_H

#include <gtest/gtest.h>
#include <mha.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace support {

using Task = void (*)(void *task_context, uint32_t index);

#if defined(__wasm__)  // which has no threads here
inline void RunOnThreads(void *context, uint32_t count, Task task, void *task_context) {
  EXPECT_LE(count, static_cast<mha_scheduler *>(context)->num_threads);
  for (uint32_t index = 0; index < count; index++) task(task_context, index);
}
constexpr auto RunTogether = RunOnThreads;
#else
// Each task on a thread of its own.
inline void RunOnThreads(void *context, uint32_t count, Task task, void *task_context) {
  EXPECT_LE(count, static_cast<mha_scheduler *>(context)->num_threads);
  std::vector<std::thread> threads;
  for (uint32_t index = 0; index < count; index++) threads.emplace_back(task, task_context, index);
  for (std::thread &thread : threads) thread.join();
}

// The same, but all begin at the same moment, so that the first one does not do all the work.
inline void RunTogether(void *context, uint32_t count, Task task, void *task_context) {
  EXPECT_LE(count, static_cast<mha_scheduler *>(context)->num_threads);
  std::atomic<uint32_t> missing{count};
  std::vector<std::thread> threads;
  for (uint32_t index = 0; index < count; index++) {
    threads.emplace_back([&missing, task, task_context, index] {
      for (--missing; missing > 0;) std::this_thread::yield();
      task(task_context, index);
    });
  }
  for (std::thread &thread : threads) thread.join();
}
#endif

// One after the other on the calling thread, the last index first.
inline void RunBackwards(void *context, uint32_t count, Task task, void *task_context) {
  EXPECT_LE(count, static_cast<mha_scheduler *>(context)->num_threads);
  for (uint32_t index = count; index-- > 0;) task(task_context, index);
}

class Scheduler {
 public:
  Scheduler(uint32_t num_threads, void (*parallel_for)(void *, uint32_t, Task, void *))
      : scheduler_{&scheduler_, num_threads, 0, parallel_for} {}
  Scheduler(const Scheduler &) = delete;
  Scheduler &operator=(const Scheduler &) = delete;
  const mha_scheduler *get() const { return &scheduler_; }

 private:
  mha_scheduler scheduler_;
};

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_SCHEDULERS_H
