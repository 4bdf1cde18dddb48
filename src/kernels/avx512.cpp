// The kernels for x86-64 with AVX-512 F, BW, VL and DQ.
#define MHA_KERNELS_AVX512
#include "kernels/table.h"

namespace mha {
constexpr Kernels kernels_avx512 = make_kernels<Vector>(3);  // MHA_INSTRUCTION_SET_AVX512
}  // namespace mha
