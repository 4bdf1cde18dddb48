// The kernels for WebAssembly with vectors, whose multiply-adds are computed in binary64.
#define MHA_VECTORS "four_lanes.h"
#include "../compiler.h"

#if defined(MHA_HAS_WASM_SIMD128) || defined(MHA_HAS_ALL_wasm32)
#include "mha.h"
#include "table.h"

namespace mha {
constexpr Kernels kernels_wasm_simd128 =
    make_kernels<Vector>(MHA_INSTRUCTION_SET_WASM_SIMD128, &own_codes);
}  // namespace mha
#endif
