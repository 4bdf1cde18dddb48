// What the machine can do, measured beside every benchmark.
#pragma once

#include <stdint.h>

#include "clock.h"

namespace bench {

struct Limits {
  double flops;  // per second: fused multiply-adds on registers, each two operations
  double bytes;  // per second: reads of a buffer as large as the working set, again and again
};

struct LimitsOf {
  uint32_t instruction_set;  // one of MHA_INSTRUCTION_SET_* that this machine has, not AUTO
  uint32_t threads;          // that start together and share the buffer between them
  Clock clock;               // processor time is that of one thread
  double working_set_bytes;
  int64_t bytes_at_once = 0;  // that a loop reads before it is done; 0: any number
};

// The best of a few tries, about 20 ms. The first time for its kind it also finds out which loop is
// the fastest (numbers of chains; 1, 2, 4 and 8 streams, with prefetching and without), which takes
// up to half a second.
Limits measure_limits(const LimitsOf &of);

// Reads bytes_at_once once, the next of the buffer. The working set is at least twice as large.
void read_once(const LimitsOf &of);

// Has the next measurement look for the fastest loop again.
void forget_fastest_loops(const LimitsOf &of);

}  // namespace bench
