// The loops that the machine's limits are measured with, for each instruction set.
#pragma once

#include <stdint.h>

#include <vector>

namespace bench {

// Independent chains of fused multiply-adds on registers.
struct FmaProbe {
  double flops_per_step;
  void (*run)(int64_t steps);
};

// So many streams of loads, side by side: stream s reads `bytes` bytes (a multiple of read_step)
// from base + s * bytes on.
struct ReadProbe {
  int streams;
  void (*run)(const char *base, int64_t bytes);
};
constexpr int64_t read_step = 256;  // bytes that a stream reads before it is the next one's turn

struct Probes {
  std::vector<FmaProbe> fma;
  std::vector<ReadProbe> read;
};

// Of the architecture's sets that this machine has, the one with the highest number.
uint32_t best_instruction_set();

// instruction_set: one of MHA_INSTRUCTION_SET_* that this machine has, not AUTO.
Probes probes_of(uint32_t instruction_set);

}  // namespace bench
