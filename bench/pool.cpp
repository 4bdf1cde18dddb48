#include "pool.h"

#include <sched.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace bench {
namespace {

using Task = void (*)(void *task_context, uint32_t index);

std::vector<int> allowed_cores;

void pin_to(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  if (sched_setaffinity(0, sizeof set, &set))
    throw std::runtime_error("cannot keep a thread on core " + std::to_string(core) + ": " + strerror(errno));
}

// Whoever is there takes the next task, so that nobody waits for a thread that wakes up late. A thread waits for work in a loop for a
// short time, which catches the next stage of a call under way, and then sleeps.
class Pool {
 public:
  Pool() {
    for (size_t i = 0; i + 1 < allowed_cores.size(); ++i) threads_.emplace_back([this, i] { work(allowed_cores[i]); });
  }
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_ending_ = true;
    }
    wake_.notify_all();
    for (std::thread &thread : threads_) thread.join();
  }

  void run(uint32_t count, Task task, void *task_context) {
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
    while (unfinished_ > 0) pause_briefly();
  }

 private:
  static constexpr int spins = 20000;  // some 100 us

  // task_ and task_context_ are those of the task that was taken: they change only when all have finished.
  bool take_task() {
    uint32_t left = waiting_;
    do {
      if (left == 0) return false;
    } while (!waiting_.compare_exchange_weak(left, left - 1));
    task_(task_context_, left - 1);
    --unfinished_;
    return true;
  }

  void work(int core) {
    pin_to(core);
    for (;;) {
      for (int spin = 0; spin < spins; ++spin) {
        if (take_task()) spin = 0;
        pause_briefly();
      }
      std::unique_lock<std::mutex> lock(mutex_);
      ++sleepers_;
      wake_.wait(lock, [this] { return waiting_ > 0 || is_ending_; });
      --sleepers_;
      if (is_ending_) return;
    }
  }

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

void parallel_for(void *, uint32_t count, Task task, void *task_context) {
  static Pool pool;
  pool.run(count, task, task_context);
}

}  // namespace

void pin_main_thread() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set)) throw std::runtime_error(std::string("cannot tell the cores to run on: ") + strerror(errno));
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &set)) continue;
    allowed_cores.push_back(core);
    pin_to(core);  // the last one stays; to see that it works for the pool's
  }
}

uint32_t num_cores() { return static_cast<uint32_t>(allowed_cores.size()); }

mha_scheduler pool_scheduler(uint32_t threads) { return {nullptr, threads, 0, parallel_for}; }

}  // namespace bench
