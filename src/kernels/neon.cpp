// The kernels for AArch64.
#define MHA_KERNELS_NEON
#include "kernels/table.h"

namespace mha {
constexpr Kernels kernels_neon = make_kernels<Vector>(4);  // MHA_INSTRUCTION_SET_NEON
}  // namespace mha
