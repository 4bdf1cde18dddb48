// Threads for the benchmarks: a small pool, one thread on each core, as the library's
// mha_scheduler.
#pragma once

#include <stdint.h>

#include "mha.h"

namespace bench {

// Keeps the calling thread on the last of the cores that this process may use: the first often has
// the system's own work. The pool's threads take the others. To be called once, before all else;
// throws std::runtime_error.
void pin_main_thread();

// The cores that this process was allowed to use when it started.
uint32_t num_cores();

// The pool as the library takes it: the calling thread and threads - 1 others, on a core each.
// threads <= num_cores().
mha_scheduler pool_scheduler(uint32_t threads);

}  // namespace bench
