#include "pool.h"

#include <sched.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "workers.h"

namespace bench {
namespace {

std::vector<int> allowed_cores;

void pin_to(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  if (sched_setaffinity(0, sizeof set, &set))
    throw std::runtime_error("cannot keep a thread on core " + std::to_string(core) + ": " +
                             strerror(errno));
}

// One thread for each core but the main thread's, whatever number a benchmark asks for: it gets as
// many tasks.
void parallel_for(void *, uint32_t count, Workers::Task task, void *task_context) {
  static Workers workers(num_cores(), [](uint32_t index) { pin_to(allowed_cores[index]); });
  const mha_scheduler &scheduler = workers.scheduler();
  scheduler.parallel_for(scheduler.context, count, task, task_context);
}

}  // namespace

void pin_main_thread() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set))
    throw std::runtime_error(std::string("cannot tell the cores to run on: ") + strerror(errno));
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &set)) continue;
    allowed_cores.push_back(core);
    pin_to(core);  // the last one stays; to see that it works for the pool's
  }
}

uint32_t num_cores() { return static_cast<uint32_t>(allowed_cores.size()); }

mha_scheduler pool_scheduler(uint32_t threads) { return {nullptr, threads, 0, parallel_for}; }

}  // namespace bench
