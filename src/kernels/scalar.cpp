// The kernels for any machine: a vector has one lane. They are also the fallback where a build or a
// processor has no instruction set that the library knows.

#define MHA_VECTORS "scalar.h"
#include "../compiler.h"
#include "mha.h"
#include "table.h"

namespace mha {
constexpr Kernels kernels_scalar = make_kernels<Vector>(MHA_INSTRUCTION_SET_SCALAR, &own_codes);
}  // namespace mha
