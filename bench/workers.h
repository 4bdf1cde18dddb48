// A pool of threads as an mha_scheduler: that of the benchmarks, of the command, of
// the performance gate, and of the comparison with other libraries.
#pragma once

#include <stdint.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "mha.h"

namespace bench {

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The calling thread and others that live as long as this. Whoever is there takes the next task, so
// that nobody waits for a thread that wakes up late. A thread waits for work in a loop for a short
// time, which catches the next stage of a call under way, and then sleeps.
class Workers {
 public:
  using Task = void (*)(void *task_context, uint32_t index);

  // num_threads with the calling one, or as many as the system can start. Where pin is given,
  // thread i of the others begins with pin(i), which pins it to a core.
  explicit Workers(uint32_t num_threads, const std::function<void(uint32_t)> &pin = {})
      : scheduler_{this, num_threads, 0, parallel_for},
        spins_(pin || num_threads <= std::thread::hardware_concurrency() ? kSpins : 0) {
    try {
      for (uint32_t i = 0; i + 1 < num_threads; ++i) {
        threads_.emplace_back([this, pin, i] {
          if (pin) pin(i);
          work();
        });
      }
    } catch (const std::system_error &) {
      // The system starts no more threads: the existing ones do all tasks.
    }
  }
  ~Workers() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_ending_ = true;
    }
    wake_.notify_all();
    for (std::thread &thread : threads_) thread.join();
  }
  Workers(const Workers &) = delete;
  Workers &operator=(const Workers &) = delete;

  // Points to this. To be used by one thread at a time, which takes tasks itself.
  const mha_scheduler &scheduler() const { return scheduler_; }

 private:
  static constexpr int kSpins = 20000;  // some 100 us
  // So often a thread gives way, in case there are more threads than cores free.
  static constexpr int kYield = 1024;

  static void parallel_for(void *workers, uint32_t count, Task task, void *task_context) {
    static_cast<Workers *>(workers)->run(count, task, task_context);
  }

  void run(uint32_t count, Task task, void *task_context) {
    if (count == 1) return task(task_context, 0);
    task_ = task;
    task_context_ = task_context;
    unfinished_ = count;
    waiting_ = count;
    if (sleepers_ > 0) {
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
    while (take_task()) {
    }
    for (int spin = 1; unfinished_ > 0; ++spin) pause(spin);
  }

  // task_ and task_context_ are those of the task that was taken: they change only when all have
  // finished.
  bool take_task() {
    uint32_t left = waiting_;
    do {
      if (left == 0) return false;
    } while (!waiting_.compare_exchange_weak(left, left - 1));
    task_(task_context_, left - 1);
    --unfinished_;
    return true;
  }

  void work() {
    for (;;) {
      for (int spin = 1; spin <= spins_; ++spin) {
        if (take_task()) spin = 1;
        pause(spin);
      }
      std::unique_lock<std::mutex> lock(mutex_);
      ++sleepers_;
      wake_.wait(lock, [this] { return waiting_ > 0 || is_ending_; });
      --sleepers_;
      if (is_ending_) return;
      lock.unlock();
      while (take_task()) {
      }
    }
  }

  static void pause(int spin) {
    if (spin % kYield == 0) std::this_thread::yield();
    pause_briefly();
  }

  const mha_scheduler scheduler_;
  const int spins_;  // none where threads would only take the cores from each other
  Task task_ = nullptr;
  void *task_context_ = nullptr;
  alignas(64) std::atomic<uint32_t> waiting_{0};     // tasks that nobody has taken
  alignas(64) std::atomic<uint32_t> unfinished_{0};  // tasks that have not returned
  std::atomic<uint32_t> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  bool is_ending_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace bench
