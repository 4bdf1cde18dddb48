// The products of bf16 for x86-64 with AVX-512 and AMX.
#define MHA_VECTORS "avx512.h"
#define xsimd mha_xsimd_avx512_amx
#include "../compiler.h"

#if defined(MHA_HAS_AVX512_AMX) || defined(MHA_HAS_ALL_x86_64)
#include "tiles.h"

namespace mha {
constexpr ProductKernels pairs_avx512_amx = {round_tiles, project_tiles, nullptr,
                                             tiles_are_as_defined};
}  // namespace mha
#endif
