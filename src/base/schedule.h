// Work cut into units, on the calling thread or on the caller's threads.
#pragma once

#include <stdint.h>

#include "../compiler.h"
#include "mha.h"

namespace mha {

inline int64_t threads_of(const mha_scheduler *scheduler) {
  return scheduler ? scheduler->num_threads : 1;
}

// The next unit to take, on a cache line of its own; lies in the workspace.
struct alignas(64) UnitCounter {
  int64_t next;
};

// Runs run(context, unit, thread) once for each unit in [0, units). thread < threads_of(scheduler)
// is the slice of the workspace to use.
void run_units(const mha_scheduler *scheduler, UnitCounter *counter, int64_t units,
               void (*run)(const void *context, int64_t unit, int64_t thread), const void *context);

}  // namespace mha
