// What an engine computes by the relaxed instructions of WebAssembly, which leave it a choice. Its
// answer holds for all of the instance.
#pragma once

#include "elements.h"

namespace mha {
namespace {

// 2^-46 is lost where the product is rounded.
MHA_NOINLINE inline bool fuses_products() {
  const volatile float above = 1.0f + 0x1p-23f, below = 1.0f - 0x1p-23f;
  return mul_add(above, below, -1.0f) == -0x1p-46f;
}

// Whether sums of products of codes of 8 bits with bytes from least to most are exact. Engines
// differ in what the highest bit of a byte counts, and in what two products overflow.
template <int least, int most>
MHA_NOINLINE bool dots_are_exact() {
  for (int i = 0; i < 4; ++i) {
    const volatile int code = i < 2 ? 127 : -127, byte = i % 2 == 0 ? least : most;
    const v128_t x = wasm_i8x16_splat(static_cast<int8_t>(code)),
                 w = wasm_i8x16_splat(static_cast<int8_t>(byte)),
                 sums = wasm_i32x4_relaxed_dot_i8x16_i7x16_add(x, w, wasm_i32x4_const_splat(7));
    if (wasm_i32x4_extract_lane(sums, 0) != 4 * code * byte + 7) return false;
  }
  return true;
}

}  // namespace
}  // namespace mha
