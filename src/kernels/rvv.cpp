// The kernels for 64-bit RISC-V with vectors of 128 bits or more.
#define MHA_VECTORS "four_lanes.h"
#include "../compiler.h"

#if defined(MHA_HAS_RVV) || defined(MHA_HAS_ALL_riscv64)
#include "mha.h"
#include "table.h"

namespace mha {
constexpr Kernels kernels_rvv = make_kernels<Vector>(MHA_INSTRUCTION_SET_RVV, &own_codes);
}  // namespace mha
#endif
