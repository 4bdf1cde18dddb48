// How numbers are stored in fewer bits than a float has (CONTRACT.md, section 2): plain operations
// that give the same bits everywhere.
//
// Whoever includes it has a copy of its own, so that the kernels can, each compiled for its
// instruction set.
#pragma once

#include <stdint.h>

#include "kernels/kernels.h"

namespace mha {
namespace {

// The storage of a MHA_TYPE_* of mha.h, where 0 and MHA_TYPE_F32 are f32. layer.cpp compares the
// numbers with mha.h, which kernels do not include.
constexpr Storage storage_of_type(uint32_t type) {
  return static_cast<Storage>(type == 0 ? 0 : type - 1);
}

// The MHA_TYPE_* of a storage, for what the library fills.
constexpr uint32_t type_of(Storage storage) { return static_cast<uint32_t>(storage) + 1; }

// Of an element; not of int4, two of which share a byte.
inline int64_t bytes_of(Storage storage) {
  return storage == Storage::f32 ? 4 : storage == Storage::int8 ? 1 : 2;
}

// Of a panel of weights. has_fours: four terms of a column lie side by side, of int4 those of two
// fours.
inline int64_t panel_bytes(int64_t depth, Storage storage, bool has_fours) {
  const bool is_int4 = storage == Storage::int4;
  const int64_t together = (has_fours ? 4 : 1) << is_int4;
  return ((depth + together - 1) & -together) * panel_columns *
         (is_int4 ? 1 : 2 * bytes_of(storage)) / 2;
}

namespace storage {

inline uint32_t bits_of(float x) {
  uint32_t bits;
  MHA_MEMCPY(&bits, &x, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  MHA_MEMCPY(&x, &bits, sizeof x);
  return x;
}

// Adding and subtracting it rounds |x| < 2^22 to an integer, ties to even, which then also stands
// in the low bits of the sum.
constexpr float rounder = 0x1.8p+23f;

inline int32_t rounded(float x) {
  return static_cast<int32_t>(bits_of(x + rounder) - bits_of(rounder));
}

}  // namespace storage

// ---- f16 and bf16: to the nearest, ties to even; infinite from halfway beyond the largest on; NaN
// has one payload

inline uint16_t f16_of(float x) {
  constexpr uint32_t smallest_normal = 0x38800000u, infinite = 0x477ff000u;  // 2^-14, 65520
  const uint32_t bits = storage::bits_of(x), sign = bits >> 16 & 0x8000u,
                 magnitude = bits & 0x7fffffffu;
  // All cases, and then a choice, so that a loop over many numbers has no branch.
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  const uint32_t subnormal = storage::bits_of(storage::float_of(magnitude) + 0.5f) -
                             storage::bits_of(0.5f);  // units of 0.5's last place
  const uint32_t finite = magnitude < smallest_normal ? subnormal : normal;
  const uint32_t half = sign | (magnitude < infinite ? finite : 0x7c00u);
  return static_cast<uint16_t>(magnitude > 0x7f800000u ? 0x7e00u : half);
}

// Exact. A NaN becomes quiet.
inline float f32_of_f16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16, magnitude = half & 0x7fffu;
  uint32_t bits;
  if (magnitude >= 0x7c00u) {
    bits = 0x7f800000u | magnitude << 13 | (magnitude > 0x7c00u ? 0x400000u : 0u);
  } else if (magnitude < 0x400u) {
    bits = storage::bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  } else {
    bits = (magnitude << 13) + 0x38000000u;
  }
  return storage::float_of(sign | bits);
}

inline uint16_t bf16_of(float x) {
  const uint32_t bits = storage::bits_of(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0u;
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// Exact.
inline float f32_of_bf16(uint16_t upper) {
  return storage::float_of(static_cast<uint32_t>(upper) << 16);
}

// ---- Codes: numbers are integers times one scale

struct CodeScale {
  float scale;  // a number is code * scale
  float
      factor;  // and its code the rounded number * factor; 0: all codes are 0, whatever the numbers
};

inline int32_t code_of(float x, float factor) {
  const int32_t code = storage::rounded(x * factor);
  return factor == 0.0f ? 0 : code;
}

// The bits of the largest magnitude of `count` numbers and a given one: they are in its order.
inline uint32_t most_bits_of(const float *x, int64_t count, uint32_t most_bits) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t magnitude = storage::bits_of(x[i]) & 0x7fffffffu;
    most_bits = magnitude > most_bits ? magnitude : most_bits;
  }
  return most_bits;
}

// Codes of -most_code .. most_code, those of int8 and of integer arithmetic, for numbers whose
// largest magnitude has these bits. Zeros, or next to that, are zeros; where one is not finite, all
// are NaN. No code is greater: the largest product is little more than most_code.
inline CodeScale code_scale_of(uint32_t most_bits, int32_t most_code) {
  const float most = storage::float_of(most_bits), limit = static_cast<float>(most_code);
  if (most_bits >= 0x7f800000u) return {storage::float_of(0x7fc00000u), 0.0f};
  if (most < 0x1p-100f) return {0.0f, 0.0f};
  return {most / limit, limit / most};
}

// Of a row of them.
MHA_NOINLINE inline CodeScale code_scale_of(const float *x, int32_t most_code, int64_t count) {
  uint32_t most_bits = 0;
  int64_t i = 0;
  for (; i + code_group <= count; i += code_group)
    most_bits = most_bits_of(x + i, code_group, most_bits);
  for (; i + int4_group <= count; i += int4_group)
    most_bits = most_bits_of(x + i, int4_group, most_bits);  // fixed sizes, as below
  return code_scale_of(most_bits_of(x + i, count - i, most_bits), most_code);
}

// int4: codes of -8 .. 7, of a group in which `extreme` is the number of the largest magnitude, the
// first of several. It gets code -8, and so its sign the scale: there is one code more on this
// side.
inline CodeScale int4_scale_of(float extreme, bool is_finite) {
  if (!is_finite) return {storage::float_of(0x7fc00000u), 0.0f};
  if (extreme < 0x1p-100f && extreme > -0x1p-100f) return {0.0f, 0.0f};
  return {extreme * -0x1p-3f, -8.0f / extreme};
}

inline int32_t int4_of(float x, float factor) {
  const int32_t code = code_of(x, factor);
  return code > 7 ? 7 : code;
}

// ---- Integer arithmetic: a row of numbers is codes, and a scale for each group of them
// (CONTRACT.md, section 4)

constexpr int32_t byte_added = 128,
                  nibble_added = 8;  // to codes of int8 and int4 in panels for integer arithmetic

// Terms whose products add up in integers, of a panel of int8 or int4; they divide a group of the
// row.
inline int64_t terms_of_chain(Storage storage) {
  return storage == Storage::int4 ? int4_group : code_group;
}

// Behind the codes of each chain. Those behind the width of a row are 0.
struct CodesTail {
  float scale;
  int32_t begin;  // what sums of products with these codes begin with
  int32_t unused[2];
};

// A row of so many numbers. Code: int16_t, or int8_t where kernels take codes of 8 bits so.
template <class Code>
inline int64_t coded_bytes(Storage storage, int64_t width) {
  constexpr int64_t tail = sizeof(CodesTail), code = sizeof(Code);
  return (width + code_group - 1) / code_group *
         (code_group * code + code_group / terms_of_chain(storage) * tail);
}

// Returns the sum of the codes.
template <class Code>
inline int32_t encode(const float *x, int64_t count, const CodeScale &scale, Code *codes) {
  int32_t sum = 0;
  for (int64_t i = 0; i < count;
       i += int4_group) {  // of a fixed size, of which a compiler makes vectors
    for (int64_t j = i; j < i + int4_group; ++j) {
      const int32_t code = code_of(x[j], scale.factor);
      codes[j] = static_cast<Code>(code);
      sum += code;
    }
  }
  return sum;
}

}  // namespace
}  // namespace mha
