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

// Calls body(0) to body(count - 1), each on a thread of its own. WebAssembly has no threads here.
template <typename Body>
void OnThreads(uint32_t count, const Body &body) {
#if defined(__wasm__)
  for (uint32_t index = 0; index < count; index++) body(index);
#else
  std::vector<std::thread> threads;
  for (uint32_t index = 0; index < count; index++)
    threads.emplace_back([&body, index] { body(index); });
  for (std::thread &thread : threads) thread.join();
#endif
}

// The same, but all begin at the same moment, so that the first one does not do all the work.
template <typename Body>
void OnThreadsTogether(uint32_t count, const Body &body) {
  std::atomic<uint32_t> missing{count};
  OnThreads(count, [&](uint32_t index) {
    --missing;
#if !defined(__wasm__)
    while (missing > 0) std::this_thread::yield();
#endif
    body(index);
  });
}

inline void RunOnThreads(void *context, uint32_t count, Task task, void *task_context) {
  EXPECT_LE(count, static_cast<mha_scheduler *>(context)->num_threads);
  OnThreads(count, [&](uint32_t index) { task(task_context, index); });
}
inline void RunTogether(void *context, uint32_t count, Task task, void *task_context) {
  EXPECT_LE(count, static_cast<mha_scheduler *>(context)->num_threads);
  OnThreadsTogether(count, [&](uint32_t index) { task(task_context, index); });
}

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
