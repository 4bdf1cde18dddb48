// Numbers in f16 and bf16: what they mean, random ones, and arrays of them.
#ifndef MHA_TESTS_SUPPORT_NUMBERS_H
#define MHA_TESTS_SUPPORT_NUMBERS_H

#include <mha.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "spec/spec.h"
#include "support/memory.h"
#include "support/random.h"
#include "support/shapes.h"

namespace support {

// What a number of 16 bits means: 5 bits of exponent (f16) or 8 (bf16).
inline float Widen(uint32_t type, uint16_t bits) {
  const int exponent_bits = type == MHA_TYPE_F16 ? 5 : 8, mantissa_bits = 15 - exponent_bits,
            bias = (1 << (exponent_bits - 1)) - 1;
  const int mantissa = bits & ((1 << mantissa_bits) - 1),
            exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1);
  const float sign = bits & 0x8000u ? -1.0f : 1.0f;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa ? std::numeric_limits<float>::quiet_NaN()
                    : sign * std::numeric_limits<float>::infinity();
  }
  if (exponent == 0)
    return sign * std::ldexp(static_cast<float>(mantissa), 1 - bias - mantissa_bits);
  return sign * std::ldexp(static_cast<float>(mantissa + (1 << mantissa_bits)),
                           exponent - bias - mantissa_bits);
}

// count numbers, some of which are subnormal, and some not finite if they are to be.
inline std::vector<uint16_t> RandomBits(Random *random, uint32_t type, int64_t count, bool any) {
  std::vector<uint16_t> bits(static_cast<size_t>(count));
  for (uint16_t &x : bits) {
    x = static_cast<uint16_t>(random->Next());
    if (any && random->Chance(0.02)) continue;
    // The exponents of about 2^-4 to 2^1, or that of subnormal numbers.
    const int mantissa_bits = type == MHA_TYPE_F16 ? 10 : 7, bias = type == MHA_TYPE_F16 ? 15 : 127;
    const int exponent = random->Chance(0.05) ? 0 : bias + static_cast<int>(random->Between(-4, 1));
    x = static_cast<uint16_t>((x & 0x8000u) | (x & ((1u << mantissa_bits) - 1u)) |
                              static_cast<unsigned>(exponent) << mantissa_bits);
  }
  return bits;
}

inline std::vector<float> Widened(uint32_t type, const std::vector<uint16_t> &bits) {
  std::vector<float> wide;
  for (const uint16_t x : bits) wide.push_back(Widen(type, x));
  return wide;
}

// The bits of a number that f16 or bf16 holds; all ones where all are in the float, as in what was
// not written.
inline uint16_t Narrow(uint32_t type, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (type == MHA_TYPE_BF16 || bits == 0xffffffffu) return static_cast<uint16_t>(bits >> 16);
  const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7e00u;
  if (std::fabs(x) < 0x1p-14f)
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::fabs(x) * 0x1p24f));
  return static_cast<uint16_t>(
      sign | (magnitude == 0x7f800000u ? 0x7c00u : (magnitude >> 13) - (112u << 10)));
}

// What is in memory for `type` when its numbers are x, each of which it holds.
inline Memory InType(uint32_t type, const float *x, size_t count) {
  Memory memory(count * (type == MHA_TYPE_F32 ? sizeof(float) : sizeof(uint16_t)),
                Place::kBeforeGuard);
  if (type == MHA_TYPE_F32 && count != 0) std::memcpy(memory.data(), x, count * sizeof(float));
  for (size_t n = 0; n < count && type != MHA_TYPE_F32; n++) {
    const uint16_t bits = Narrow(type, x[n]);
    std::memcpy(memory.data() + n * sizeof bits, &bits, sizeof bits);
  }
  return memory;
}

// What results become as outputs of a type.
inline std::vector<float> Rounded(uint32_t type, const std::vector<float> &results) {
  std::vector<float> rounded = results;
  if (type == MHA_TYPE_F32 || results.empty()) return rounded;
  // Weights are rounded in the same way, and keep the sign of a zero.
  const Stored stored = type == MHA_TYPE_F16 ? Stored::kF16 : Stored::kBf16;
  spec::Fastest().store_weights(stored, results.data(), static_cast<int64_t>(results.size()), 1,
                                rounded.data(), nullptr);
  return rounded;
}

inline uint32_t RandomType(Random *random) {
  return random->Pick<uint32_t>({MHA_TYPE_F32, MHA_TYPE_F16, MHA_TYPE_BF16});
}

// Numbers of a type: most are as large as normal ones.
inline std::vector<float> RandomNumbers(Random *random, uint32_t type, size_t count, bool any) {
  if (type == MHA_TYPE_F32) return random->Normals(static_cast<int64_t>(count));
  return Widened(type, RandomBits(random, type, static_cast<int64_t>(count), any));
}

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_NUMBERS_H
