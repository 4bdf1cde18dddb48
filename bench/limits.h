// What the machine can do, measured beside every benchmark.
#pragma once

#include <stdint.h>

namespace bench {

// GFLOP/s of one thread that does nothing but fused multiply-adds on registers, with the vectors of an instruction set
// (MHA_INSTRUCTION_SET_*): the best of several numbers of chains. About 20 ms.
double fma_peak(uint32_t instruction_set);

}  // namespace bench
