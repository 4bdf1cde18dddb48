// Whether an instruction adds products of pairs of bf16 as the contract defines them (CONTRACT.md,
// section 4).
#pragma once

#include "elements.h"

namespace mha {
namespace {

// Tries out steps of numbers from a generator: in even trials of magnitudes near 1, whose sums are
// rounded, in odd ones of any magnitude, with zeros, infinities and NaN. The payload of a NaN may
// differ. add_step(x, w, sums) adds the products of the 16 pairs x[i] and w[i][lane] to sums[lane].
template <class AddStep>
MHA_NOINLINE bool is_as_defined(AddStep add_step) {
  constexpr int lanes = Vector::size, pairs = bf16_step / 2, trials = 128 / lanes;
  uint64_t state = 1;
  for (int trial = 0; trial < trials; ++trial) {
    alignas(64) float sums[2][lanes] = {};
    for (int step = 0; step < 2; ++step) {
      alignas(64) float numbers[pairs * (lanes + 1)];
      for (float &pair : numbers) {
        uint32_t bits = 0;
        for (int i = 0; i < 2; ++i) {
          state = state * 6364136223846793005u + 1442695040888963407u;  // Knuth's MMIX
          const uint32_t any = static_cast<uint32_t>(state >> 40) & 0xffffu,
                         near = (any & 0x83ffu) | 0x3c00u;  // 2^-7 .. 2
          bits = bits << 16 | bf16_factor_of(static_cast<uint16_t>(trial % 2 == 0 ? near : any));
        }
        pair = float_of(bits);
      }
      const float *const w = numbers, *const x = numbers + pairs * lanes;
      add_step(x, w, sums[0]);
      Vector even = all<Vector>(0.0f), odd = even;
      for (int i = 0; i < pairs; ++i) {
        const Vector x_pair = all<Vector>(x[i]), w_pair = load<Vector>(w + i * lanes);
        even = mul_add(first_of_pairs(x_pair), first_of_pairs(w_pair), even);
        odd = mul_add(second_of_pairs(x_pair), second_of_pairs(w_pair), odd);
      }
      store(sums[1], load<Vector>(sums[1]) + (even + odd));
    }
    for (auto &each : sums) store(each, canonical_nan(load<Vector>(each)));
    for (int i = 0; i < lanes; ++i) {
      if (bits_of(sums[0][i]) != bits_of(sums[1][i])) return false;
    }
  }
  return true;
}

}  // namespace
}  // namespace mha
