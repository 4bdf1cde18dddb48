// How numbers are stored in fewer bits than a float has (CONTRACT.md, section 2), by plain
// operations that give the same bits everywhere.
//
// Everything is in an anonymous namespace. Each file that includes it has a copy, because the
// kernels compile theirs for one instruction set each, and the linker must not choose one for all.
#pragma once

#include <stdint.h>

#include "contract.h"

namespace mha {
namespace {

// The storage of an MHA_TYPE_* of mha.h, where 0 and MHA_TYPE_F32 are f32. contract.h numbers the
// storages without mha.h; check/fields.cpp compares the numbers.
constexpr Storage storage_of_type(uint32_t type) {
  return static_cast<Storage>(type == 0 ? 0 : type - 1);
}

// The MHA_TYPE_* of a storage, for structs that the library fills.
constexpr uint32_t type_of(Storage storage) { return static_cast<uint32_t>(storage) + 1; }

// The size of an element, which of int4 is two numbers, and that of a row of numbers.
inline int64_t bytes_of(Storage storage) {
  return storage == Storage::f32 ? 4 : storage >= Storage::int8 ? 1 : 2;
}
inline int64_t bytes_of(Storage storage, int64_t numbers) {
  return storage == Storage::int4 ? (numbers + 1) / 2 : numbers * bytes_of(storage);
}
inline bool has_codes(Storage storage) { return storage >= Storage::int8; }

// Codes of int5 and int6 are nibbles and one or two high bits.
constexpr int high_bits_of(Storage storage) {
  return storage == Storage::int5 ? 1 : storage == Storage::int6 ? 2 : 0;
}
// Terms whose high bits share a byte.
constexpr int64_t plane_terms_of(int high_bits) { return 32 / high_bits; }

// What exceeds codes of a matrix with offsets, which are not negative, over those that are
// multiplied.
constexpr int32_t centre_of(Storage storage) {
  return storage < Storage::int4 ? 0 : 8 << high_bits_of(storage);
}

// The size of a panel of weights. With is_interleaved, four terms of a column are side by side, of
// bf16 two, and the depth is rounded up to that; of int4, two such groups of four share their
// bytes, and of int5 and int6 the high bits of eight or four.
inline int64_t panel_bytes(int64_t depth, Storage storage, bool is_interleaved) {
  if (const int high = high_bits_of(storage)) {
    const int64_t terms = plane_terms_of(high);
    return (depth + terms - 1) / terms * terms * panel_columns * (4 + high) / 8;
  }
  const bool is_int4 = storage == Storage::int4;
  const int64_t side_by_side = !is_interleaved            ? 1
                               : storage == Storage::bf16 ? 2
                                                          : 4,
                together = side_by_side << is_int4;
  return ((depth + together - 1) & -together) * panel_columns *
         (is_int4 ? 1 : 2 * bytes_of(storage)) / 2;
}

// Scales of a panel's groups in blocks: factors [48] in f16, then the block's scales [groups][48].
inline int64_t scale_block_bytes(int64_t groups) { return panel_columns * (2 + groups); }

// The size of a panel's scales, or offsets, of which a column has `count`; those of int8 are in
// blocks.
inline int64_t scales_bytes(int64_t count, int64_t depth, Storage storage) {
  const int64_t blocks = storage == Storage::int8 ? (depth + scale_block - 1) / scale_block : 0;
  return panel_columns * (count * bytes_of(storage) + blocks * 2);
}

// The number at any address, whatever type it has there.
template <class T>
MHA_INLINE T number_at(const void *p) {
  T x;
  MHA_MEMCPY(&x, p, sizeof x);
  return x;
}

namespace storage {

MHA_INLINE uint32_t bits_of(float x) { return number_at<uint32_t>(&x); }
MHA_INLINE float float_of(uint32_t bits) { return number_at<float>(&bits); }

// Adding this number rounds |x| < 2^22 to an integer, with ties to even, because the sum has no
// bits for fractions. The low bits of the sum are then that integer.
constexpr float rounder = 0x1.8p+23f;

inline int32_t rounded(float x) {
  return static_cast<int32_t>(bits_of(x + rounder) - bits_of(rounder));
}

}  // namespace storage

// ---- f16 and bf16
//
// Numbers are rounded to the nearest, with ties to even. They become infinite from halfway between
// the largest number and the next one that there would be. All NaN become the same one.

inline uint16_t f16_of(float x) {
  constexpr uint32_t smallest_normal = 0x38800000u, infinite = 0x477ff000u;  // 2^-14, 65520
  const uint32_t bits = storage::bits_of(x), sign = bits >> 16 & 0x8000u,
                 magnitude = bits & 0x7fffffffu;
  // All cases are computed before one is chosen, so that a loop over many numbers has no branch.
  // Adding 0.5 to a small number rounds it to a multiple of 2^-24, the unit of subnormal f16.
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  const uint32_t subnormal =
      storage::bits_of(storage::float_of(magnitude) + 0.5f) - storage::bits_of(0.5f);
  const uint32_t finite = magnitude < smallest_normal ? subnormal : normal;
  const uint32_t half = sign | (magnitude < infinite ? finite : 0x7c00u);
  return static_cast<uint16_t>(magnitude > 0x7f800000u ? 0x7e00u : half);
}

// Widening is exact. A NaN becomes quiet.
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

// As a factor of bf16 arithmetic (CONTRACT.md, section 4), where numbers below 2^-50 are 0: no sum
// of products is then subnormal, which is all that x86-64's instructions would take for 0.
inline uint16_t bf16_factor_of(uint16_t bits) {
  constexpr uint16_t least = 0x2680u;  // 2^-50
  return (bits & 0x7fffu) < least ? uint16_t{0} : bits;
}

// A bf16 is the upper half of a float.
inline float f32_of_bf16(uint16_t upper) {
  return storage::float_of(static_cast<uint32_t>(upper) << 16);
}

// Number i of those that are stored at p; of int8 a code.
inline float widened(Storage storage, const void *p, int64_t i) {
  switch (storage) {
    case Storage::f32:
      return static_cast<const float *>(p)[i];
    case Storage::f16:
      return f32_of_f16(static_cast<const uint16_t *>(p)[i]);
    case Storage::bf16:
      return f32_of_bf16(static_cast<const uint16_t *>(p)[i]);
    default:
      return static_cast<float>(static_cast<const int8_t *>(p)[i]);
  }
}

// ---- Codes: numbers are integers times a scale that several of them share

// A number is code * scale, and a code is number * factor, rounded. A factor of 0 makes all codes
// 0, even of numbers that are not finite.
struct CodeScale {
  float scale;
  float factor;
};

inline int32_t code_of(float x, float factor) {
  const int32_t code = storage::rounded(x * factor);
  return factor == 0.0f ? 0 : code;
}

// The bits of the largest magnitude of `count` numbers and of a given one. Bits of magnitudes have
// the same order as the magnitudes, and NaN comes after all of them.
inline uint32_t most_bits_of(const float *x, int64_t count, uint32_t most_bits) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t magnitude = storage::bits_of(x[i]) & 0x7fffffffu;
    most_bits = magnitude > most_bits ? magnitude : most_bits;
  }
  return most_bits;
}

// The scale for codes from -most_code to most_code, which int8 and integer arithmetic use, if the
// largest magnitude of the numbers has these bits. Numbers that are all zero or tiny become zeros.
// If one is not finite, all become NaN. No code exceeds most_code: the largest product is so little
// above it that it is rounded to it.
inline CodeScale code_scale_of(uint32_t most_bits, int32_t most_code) {
  const float most = storage::float_of(most_bits), limit = static_cast<float>(most_code);
  if (most_bits >= 0x7f800000u) return {storage::float_of(0x7fc00000u), 0.0f};
  if (most < 0x1p-100f) return {0.0f, 0.0f};
  return {most / limit, limit / most};
}

// The same as most_bits_of for a long row. Loops of a fixed length become vectors, so the row is
// cut into groups.
MHA_NOINLINE inline uint32_t most_bits_of_row(const float *x, int64_t count, uint32_t most_bits) {
  int64_t i = 0;
  for (; i + code_group <= count; i += code_group)
    most_bits = most_bits_of(x + i, code_group, most_bits);
  for (; i + int4_chain <= count; i += int4_chain)
    most_bits = most_bits_of(x + i, int4_chain, most_bits);
  for (; i + min_group <= count; i += min_group)
    most_bits = most_bits_of(x + i, min_group, most_bits);
  return most_bits_of(x + i, count - i, most_bits);
}

// The scale for codes from -8 to 7, which int4 uses. `extreme` is the first number of the group
// that has the largest magnitude. It gets the code -8, because there is one more code on that side,
// and the scale gets the opposite of its sign.
inline CodeScale int4_scale_of(float extreme, bool is_finite) {
  if (!is_finite) return {storage::float_of(0x7fc00000u), 0.0f};
  if (extreme < 0x1p-100f && extreme > -0x1p-100f) return {0.0f, 0.0f};
  return {extreme * -0x1p-3f, -8.0f / extreme};
}

inline int32_t int4_of(float x, float factor) {
  const int32_t code = code_of(x, factor);
  return code > 7 ? 7 : code;
}

// ---- Keys and values in a cache (CONTRACT.md, section 2)

// The block of the Hadamard transform: the largest power of two that divides both widths.
inline int64_t hadamard_block(int64_t width, int64_t other) {
  const int64_t block = (width | other) & -(width | other);
  return block < most_hadamard_block ? block : most_hadamard_block;
}

// Two of 16 codes in 8 bytes: code j < 8, with 8 added, in the low half of byte j, and code j + 8
// in the other, in two's complement. Each takes two instructions to become a float then.
struct CachedInt4 {
  uint8_t bits;
};
inline int32_t cached_code(const CachedInt4 *sixteen, int64_t j) {
  return j < 8 ? (sixteen[j].bits & 15) - 8 : (sixteen[j - 8].bits >> 4 ^ 8) - 8;
}

// ---- Integer arithmetic: a row of numbers becomes codes with a scale for each chain of them
// (CONTRACT.md, section 4)

// Added to codes in panels for integer arithmetic, whose instructions multiply unsigned with signed
// numbers.
constexpr int32_t added_to(Storage storage) {
  return storage == Storage::int8 ? 128 : centre_of(storage);
}

// A chain is as many terms as are added up in integers before a scale is applied: the contract's
// piece. A group of the weights (0: all of them) has whole chains, or is one.
inline int64_t terms_of_chain(Storage storage, int64_t group) {
  const int64_t most = storage == Storage::int4 ? int4_chain : code_group;
  return group != 0 && group < most ? group : most;
}

// What follows the codes of each chain in memory. Sums of products with these codes begin with
// `begin`, which undoes what is added to the weights' codes.
struct CodesTail {
  float scale;
  int32_t begin;
  int32_t sum;  // of the codes
  int32_t unused;
};

// The size of a row of `width` numbers as codes, whose last group is filled up with 0. Code is
// int16_t, or int8_t for kernels that take codes of 8 bits in that form.
template <class Code>
inline int64_t coded_bytes(int64_t chain, int64_t width) {
  constexpr int64_t tail = sizeof(CodesTail), code = sizeof(Code);
  return (width + code_group - 1) / code_group * (code_group * code + code_group / chain * tail);
}

// Writes codes and returns their sum. The inner loop has a fixed length, so that it becomes
// vectors.
template <class Code>
inline int32_t encode(const float *x, int64_t count, const CodeScale &scale, Code *codes) {
  int32_t sum = 0;
  for (int64_t i = 0; i < count; i += min_group) {
    for (int64_t j = i; j < i + min_group; ++j) {
      const int32_t code = code_of(x[j], scale.factor);
      codes[j] = static_cast<Code>(code);
      sum += code;
    }
  }
  return sum;
}

}  // namespace
}  // namespace mha
