// The kernels for AArch64.
#define MHA_KERNELS_NEON
#include "kernels/table.h"
#include "mha.h"

namespace mha {
constexpr Kernels kernels_neon = make_kernels<Vector>(MHA_INSTRUCTION_SET_NEON);
}  // namespace mha
