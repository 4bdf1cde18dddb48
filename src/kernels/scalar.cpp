// The kernels for any machine.
#define MHA_KERNELS_SCALAR
#include "../compiler.h"
#include "mha.h"
#include "table.h"

namespace mha {
constexpr Kernels kernels_scalar = make_kernels<Vector>(MHA_INSTRUCTION_SET_SCALAR, &own_codes);
}  // namespace mha
