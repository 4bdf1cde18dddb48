// What reading costs on this machine: the limit of a layer that runs on one row at a time.
#pragma once

#include <cstdint>
#include <vector>

#include "bench/memory.h"
#include "bench/probes.h"
#include "mha.h"

namespace command {

// Reads a buffer as large as a working set again and again, by all threads together, in the ways that the benchmarks know.
class ReadProbe {
 public:
  // instruction_set: one that this machine has, not AUTO.
  ReadProbe(uint32_t instruction_set, const mha_scheduler &scheduler, double working_set_bytes);

  // The best of some tries, in bytes per second. The first time finds out which way is the fastest.
  double measure();

 private:
  struct Way {
    bench::ReadProbe probe;
    int64_t stream_bytes;
    double best;
  };

  void attempt(Way *way) const;

  mha_scheduler scheduler_;
  bench::Array<char> buffer_;
  std::vector<Way> ways_;
};

}  // namespace command
