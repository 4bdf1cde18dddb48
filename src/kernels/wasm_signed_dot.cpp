// The products of codes for WebAssembly with relaxed vectors, where the engine multiplies bytes as
// signed ones.
#define MHA_RELAXED
#define MHA_MULTIPLIES_BYTES
#define MHA_SIGNED_BYTES
#define MHA_VECTORS "four_lanes.h"
#include "../compiler.h"

#if defined(MHA_HAS_WASM_SIGNED_DOT) || defined(MHA_HAS_ALL_wasm32)
#include "project_integers.h"
#include "relaxed.h"

namespace mha {
constexpr ProductKernels codes_wasm_signed_dot = {encode_rows, project_codes, nullptr,
                                                  dots_are_exact<-128, 127>};
}  // namespace mha
#endif
