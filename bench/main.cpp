// mha_bench: the library's speed as a share of the machine's. Takes the flags of Google Benchmark; best run pinned to one core.

#include <benchmark/benchmark.h>

#include <cstdlib>

#include "mha.h"
#if defined(MHA_WITH_OPENBLAS)
#include "mha_openblas.h"
#endif

namespace bench {
void register_layer_benchmarks();
}

int main(int argc, char **argv) {
  // One thread for the baseline too: OpenBLAS reads this when it is first called.
  setenv("OPENBLAS_NUM_THREADS", "1", 0);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  bench::register_layer_benchmarks();
  uint32_t best = MHA_INSTRUCTION_SET_SCALAR;
  for (uint32_t set = best; set <= MHA_INSTRUCTION_SET_NEON; ++set) {
    if (mha_instruction_sets() >> set & 1) best = set;
  }
  benchmark::AddCustomContext("instruction_set", mha_instruction_set_name(best));
#if defined(MHA_WITH_OPENBLAS)
  benchmark::AddCustomContext("openblas_core", mha_openblas_core_name());
#endif
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
