// The kernels for WebAssembly with relaxed vectors, where the engine fuses multiply-adds.
#define MHA_RELAXED
#define MHA_VECTORS "four_lanes.h"
#include "../compiler.h"

#if defined(MHA_HAS_WASM_RELAXED) || defined(MHA_HAS_ALL_wasm32)
#include "mha.h"
#include "relaxed.h"
#include "table.h"

namespace mha {
constexpr ProductKernels codes_wasm_relaxed = {encode_rows, project_codes, nullptr, [] {
                                                 return fuses_products() && dots_are_exact<0, 15>();
                                               }};
constexpr Kernels kernels_wasm_relaxed =
    make_kernels<Vector>(MHA_INSTRUCTION_SET_WASM_RELAXED, &codes_wasm_relaxed);
#if defined(MHA_HAS_WASM_SIGNED_DOT) || defined(MHA_HAS_ALL_wasm32)
constexpr Kernels kernels_wasm_signed_dot =
    make_kernels<Vector>(MHA_INSTRUCTION_SET_WASM_SIGNED_DOT, &codes_wasm_signed_dot);
#endif
#if defined(MHA_HAS_WASM_UNSIGNED_DOT) || defined(MHA_HAS_ALL_wasm32)
constexpr Kernels kernels_wasm_unsigned_dot =
    make_kernels<Vector>(MHA_INSTRUCTION_SET_WASM_UNSIGNED_DOT, &codes_wasm_unsigned_dot);
#endif
}  // namespace mha
#endif
