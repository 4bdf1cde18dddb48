// Whether another hardware thread shares the core, which changes times by a fifth and more.
#pragma once

#include <stdint.h>

#include <algorithm>

#include "clock.h"

namespace bench {

// Steps a second of 12 multiplications on registers, alone and with 14 no-ops between them. Alone
// they need half of a core's dispatch slots, together nearly all of them: a thread of someone else
// on the same core, which takes some of the slots, slows down the second loop alone. Both are 0
// where there is no such loop.
struct SlotRates {
  double alone, with_no_ops;
};

#if defined(__x86_64__)
// Processor time, which leaves out what other processes of this system do meanwhile.
template <int no_ops>
double slot_rate() {
  constexpr int64_t steps = 4000;
  int64_t left = steps;
  const double begin = seconds_now(Clock::processor);
  asm volatile(
      ".irp r,0,1,2,3,4,5,6,7,8,9,10,11,12\n xorps %%xmm\\r,%%xmm\\r\n .endr\n"
      ".p2align 6\n1:\n"
      ".irp r,0,1,2,3,4,5,6,7,8,9,10,11\n mulps %%xmm12,%%xmm\\r\n"
      ".if %c1 > \\r\n nop\n .endif\n .if %c1 > 12 + \\r\n nop\n .endif\n .endr\n"
      "dec %0\n jnz 1b\n"
      : "+r"(left)
      : "i"(no_ops)
      : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",
        "xmm11", "xmm12", "cc");
  return static_cast<double>(steps) / (seconds_now(Clock::processor) - begin);
}
#endif

// Takes 70 to 100 us. The medians of a few pieces, in turns: what interrupts one of them says
// nothing of the core.
inline SlotRates slot_rates() {
#if defined(__x86_64__)
  constexpr int pieces = 5;
  double rates[2][pieces];
  for (int i = 0; i < pieces; ++i) {
    rates[0][i] = slot_rate<0>();
    rates[1][i] = slot_rate<14>();
  }
  for (double *each : rates) std::nth_element(each, each + pieces / 2, each + pieces);
  return {rates[0][pieces / 2], rates[1][pieces / 2]};
#else
  return {0, 0};
#endif
}

}  // namespace bench
