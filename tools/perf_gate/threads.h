// Threads for the shapes that ask for more than one.
#pragma once

#include <stdint.h>

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "mha.h"

namespace gate {

// num_threads - 1 threads that wait for work, and the calling one.
class Threads {
 public:
  explicit Threads(uint32_t num_threads);
  ~Threads();
  Threads(const Threads &) = delete;
  const mha_scheduler *scheduler() const { return &scheduler_; }

 private:
  static void parallel_for(void *threads, uint32_t count, void (*task)(void *, uint32_t), void *task_context);
  void work(uint32_t index);

  mha_scheduler scheduler_;
  std::mutex mutex_;
  std::condition_variable begin_, end_;
  uint64_t generation_ = 0;
  bool is_over_ = false;
  uint32_t count_ = 0, running_ = 0;
  void (*task_)(void *, uint32_t) = nullptr;
  void *task_context_ = nullptr;
  std::vector<std::thread> threads_;
};

}  // namespace gate
