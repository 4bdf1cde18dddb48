// Threads for a call: the scheduler that mha.h asks of its caller, at its simplest.
#pragma once

#include <cstdint>

#include "mha.h"

namespace command {

// Starts up to num_threads - 1 threads for each parallel loop, and joins them at its end.
mha_scheduler fork_join_scheduler(uint32_t num_threads);

}  // namespace command
