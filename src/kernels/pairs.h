// Products of pairs of bf16 as the contract defines them (CONTRACT.md, section 4), and whether an
// instruction computes the same.
#pragma once

#include "elements.h"

namespace mha {
namespace {

// sum + the products of the second numbers, and then of the first.
template <class V>
MHA_INLINE V plus_product_as_defined(V x, V w, V sum) {
  sum = mul_add(second_of_pairs(x), second_of_pairs(w), sum);
  return mul_add(first_of_pairs(x), first_of_pairs(w), sum);
}

// Tries out some hundred sums of pairs, of numbers from a generator: in even chains of magnitudes
// near 1, whose sums are rounded, in odd ones of any magnitude, with zeros, infinities and NaN. The
// payload of a NaN may differ.
template <class Plus>
MHA_NOINLINE bool is_as_defined(Plus plus) {
  constexpr int lanes = Vector::size, chains = 512 / lanes, terms = 8;
  uint64_t state = 1;
  for (int chain = 0; chain < chains; ++chain) {
    Vector sum = all<Vector>(0.0f), defined = sum;
    for (int term = 0; term < terms; ++term) {
      alignas(64) float pairs[2][lanes];
      for (auto &factors : pairs) {
        for (float &pair : factors) {
          uint32_t bits = 0;
          for (int i = 0; i < 2; ++i) {
            state = state * 6364136223846793005u + 1442695040888963407u;  // Knuth's MMIX
            const uint32_t any = static_cast<uint32_t>(state >> 40) & 0xffffu,
                           near = (any & 0x81ffu) | 0x3e00u;  // 2^-3 .. 2
            bits = bits << 16 |
                   bf16_factor_of(f32_of_bf16(static_cast<uint16_t>(chain % 2 == 0 ? near : any)));
          }
          pair = float_of(bits);
        }
      }
      const Vector x = load<Vector>(pairs[0]), w = load<Vector>(pairs[1]);
      sum = plus(x, w, sum);
      defined = plus_product_as_defined(x, w, defined);
    }
    alignas(64) float sums[2][lanes];
    store(sums[0], canonical_nan(sum));
    store(sums[1], canonical_nan(defined));
    for (int i = 0; i < lanes; ++i) {
      if (bits_of(sums[0][i]) != bits_of(sums[1][i])) return false;
    }
  }
  return true;
}

}  // namespace
}  // namespace mha
