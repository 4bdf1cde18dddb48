// Clocks. Work of one thread is timed by the processor time that it got; work of several by the
// clock on the wall.
#pragma once

#include <time.h>

namespace bench {

enum class Clock { processor, wall };

inline double seconds_now(Clock clock) {
  timespec now;
  clock_gettime(clock == Clock::processor ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace bench
