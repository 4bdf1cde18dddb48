// What OpenBLAS computes with, so that it is no crippled rival.
#pragma once

#include <stdint.h>

namespace bench {

// The core whose kernels OpenBLAS should compute with (a value of OPENBLAS_CORETYPE), where those of `core`, which it chose, are for a
// lesser instruction set than the best of instruction_sets, the bits of mha_instruction_sets. Else null; so for a core that is not known
// here.
const char *better_openblas_core(const char *core, uint32_t instruction_sets);

}  // namespace bench
