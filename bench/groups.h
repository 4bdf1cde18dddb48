// The groups of benchmarks: each file that has some defines a Group.
#pragma once

#include <stdint.h>

#include <vector>

#include "mha.h"

namespace bench {

struct Setting {
  uint32_t instruction_set;   // what the library computes with, not AUTO
  bool all_instruction_sets;  // none was chosen: the group instruction_set has them all
  int64_t
      most_rotated_bytes;  // of the layers and caches that a benchmark of decoding cycles through
};

// Functions that add the benchmarks of a file, which main calls.
using AddBenchmarks = void (*)(const Setting &setting);
inline std::vector<AddBenchmarks> groups;

struct Group {
  explicit Group(AddBenchmarks add_benchmarks) { groups.push_back(add_benchmarks); }
};

}  // namespace bench
