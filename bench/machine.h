// What the benchmarks have to know of the machine's memory.
#pragma once

#include <stdint.h>

namespace bench {

// The largest cache of a core, its share of one included; 32 MiB where the system does not tell.
int64_t last_level_cache_bytes();

// What a benchmark has to read before it may read the same bytes again, if none of them is to come
// from a cache.
inline int64_t rotated_bytes() { return 4 * last_level_cache_bytes(); }

// What the system could give to this process now without swapping.
int64_t available_memory_bytes();

}  // namespace bench
