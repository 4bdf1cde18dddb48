#include "threads.h"

#include <atomic>
#include <exception>
#include <thread>
#include <vector>

namespace command {
namespace {

void parallel_for(void *, uint32_t count, void (*task)(void *task_context, uint32_t index), void *task_context) {
  std::atomic<uint32_t> next{0};
  const auto work = [&] {
    for (uint32_t index = next++; index < count; index = next++) task(task_context, index);
  };
  std::vector<std::thread> helpers;
  try {
    helpers.reserve(count);
    for (uint32_t i = 1; i < count; ++i) helpers.emplace_back(work);
  } catch (const std::exception &) {
    // No thread more is to be had: those that there are do all tasks.
  }
  work();
  for (std::thread &helper : helpers) helper.join();
}

}  // namespace

mha_scheduler fork_join_scheduler(uint32_t num_threads) {
  mha_scheduler scheduler = {};
  scheduler.num_threads = num_threads;
  scheduler.parallel_for = parallel_for;
  return scheduler;
}

}  // namespace command
