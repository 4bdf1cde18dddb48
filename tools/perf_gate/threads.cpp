#include "threads.h"

namespace gate {

Threads::Threads(uint32_t num_threads) : scheduler_{this, num_threads, 0, parallel_for} {
  for (uint32_t index = 1; index < num_threads; ++index) threads_.emplace_back([this, index] { work(index); });
}

Threads::~Threads() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_over_ = true;
  }
  begin_.notify_all();
  for (std::thread &thread : threads_) thread.join();
}

void Threads::work(uint32_t index) {
  std::unique_lock<std::mutex> lock(mutex_);
  for (uint64_t seen = 0;;) {
    begin_.wait(lock, [&] { return is_over_ || generation_ != seen; });
    if (is_over_) return;
    seen = generation_;
    if (index >= count_) continue;
    lock.unlock();
    task_(task_context_, index);
    lock.lock();
    if (--running_ == 0) end_.notify_one();
  }
}

// Task i runs on thread i.
void Threads::parallel_for(void *context, uint32_t count, void (*task)(void *, uint32_t), void *task_context) {
  Threads &threads = *static_cast<Threads *>(context);
  if (count == 0) return;
  if (count > 1) {
    std::lock_guard<std::mutex> lock(threads.mutex_);
    threads.task_ = task;
    threads.task_context_ = task_context;
    threads.count_ = count;
    threads.running_ = count - 1;
    ++threads.generation_;
  }
  if (count > 1) threads.begin_.notify_all();
  task(task_context, 0);
  if (count == 1) return;
  std::unique_lock<std::mutex> lock(threads.mutex_);
  threads.end_.wait(lock, [&] { return threads.running_ == 0; });
}

}  // namespace gate
