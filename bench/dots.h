// The loops that a processor's products of codes are measured with, for each instruction set: what integer
// arithmetic can reach at most with weights of int8. (Those of int4 may have sums of 16 bits, and do more.)
#pragma once

#include <stdint.h>

#include <vector>

namespace bench {

// Independent chains of exact sums of products on registers. A product and its addition are two operations.
struct DotProbe {
  double operations_per_step;
  void (*run)(int64_t steps);
};

// With a row's codes of 8 or of 16 bits, times weights of int8. instruction_set: as for probes_of.
std::vector<DotProbe> dot_probes_of(uint32_t instruction_set, int code_bits);

}  // namespace bench
