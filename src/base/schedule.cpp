// All work of a call that several threads share goes through run_units. The library starts no
// thread: the caller's scheduler runs take_units on as many threads as it has, and these take the
// numbers of units from a counter.

#include "schedule.h"

#include "../compiler.h"

namespace mha {
namespace {

// What the threads of one run_units share.
struct Share {
  UnitCounter *counter;
  int64_t units;
  void (*run)(const void *context, int64_t unit, int64_t thread);
  const void *context;
};

// One thread's task: takes units until none are left, so that late or slow threads do not hold up
// the others.
void take_units(void *task_context, uint32_t index) {
  const Share &share = *static_cast<const Share *>(task_context);
  for (;;) {
    const int64_t unit = atomic_fetch_add(&share.counter->next, 1);
    if (unit >= share.units) return;
    share.run(share.context, unit, index);
  }
}

}  // namespace

void run_units(const mha_scheduler *scheduler, UnitCounter *counter, int64_t units,
               void (*run)(const void *context, int64_t unit, int64_t thread),
               const void *context) {
  const int64_t threads = threads_of(scheduler);
  if (threads == 1 || units <= 1) {
    for (int64_t unit = 0; unit < units; ++unit) run(context, unit, 0);
    return;
  }
  // The counter lies in the workspace, on a cache line that nothing else uses.
  counter->next = 0;
  Share share = {counter, units, run, context};
  scheduler->parallel_for(scheduler->context,
                          static_cast<uint32_t>(units < threads ? units : threads), take_units,
                          &share);
}

}  // namespace mha
