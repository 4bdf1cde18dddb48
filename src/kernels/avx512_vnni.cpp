// The products of codes for x86-64 with AVX-512 and its VNNI.
#define MHA_KERNELS_AVX512
#define MHA_KERNELS_VNNI
#include "kernels/attention_codes.h"

namespace mha {
constexpr CodeKernels codes_avx512_vnni = make_code_kernels<Vector>();
}  // namespace mha
