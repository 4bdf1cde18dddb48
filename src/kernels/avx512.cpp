// The kernels for x86-64 with AVX-512 F, CD, BW, VL and DQ.
#define MHA_KERNELS_AVX512
#include "kernels/table.h"
#include "mha.h"

namespace mha {
constexpr Kernels kernels_avx512 = make_kernels<Vector>(MHA_INSTRUCTION_SET_AVX512);
}  // namespace mha
