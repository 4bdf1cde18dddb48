// The products of codes for x86-64 with AVX-512 and its VNNI.
#define MHA_MULTIPLIES_BYTES
#define MHA_VECTORS "avx512.h"
#define xsimd mha_xsimd_avx512_vnni
#include "../compiler.h"

#if defined(MHA_HAS_AVX512_VNNI) || defined(MHA_HAS_ALL_x86_64)
#include "project_integers.h"

namespace mha {
constexpr ProductKernels codes_avx512_vnni = {encode_rows, project_codes, loops_over_codes,
                                              nullptr};
}  // namespace mha
#endif
