// The operations that the arithmetic contract allows (CONTRACT.md, section 1), for one instruction
// set per translation unit.
//
// V is a vector of V::size floats: an xsimd batch, or Scalar. Kernels are templates over V and use
// only what is here; what xsimd has no word for, or whose word is not allowed, is written with the
// instruction set's own intrinsics.
#pragma once

#include <stdint.h>

#include "../storage.h"
#include "fma.h"

// Arithmetic has names of its own (mul_add, exp_of): an unqualified exp(batch) would find xsimd's
// by argument-dependent lookup.

#if defined(MHA_KERNELS_SCALAR)  // no more than a tile's rows and columns: the rest would only be
                                 // long
#define MHA_UNROLL MHA_UNROLL_AT_MOST(4)
#else
#define MHA_UNROLL MHA_UNROLL_AT_MOST(64)
#endif
#define MHA_EACH(i, count) MHA_UNROLL for (int i = 0; i < (count); ++i)
#define MHA_EACH_PAIR(i, count, j, inner_count) \
  MHA_EACH(i, count)                            \
    MHA_EACH(j, inner_count)

namespace mha {
namespace {

// With -Os some kernels also serve for calls that others would compute a little faster.
#if defined(__OPTIMIZE_SIZE__)
constexpr bool is_small_code = true;
#else
constexpr bool is_small_code = false;
#endif

// ---- Single floats

using storage::bits_of, storage::float_of;

#if defined(MHA_RELAXED)
MHA_INLINE float mul_add(float a, float b, float c);  // four_lanes.h
#elif (!defined(MHA_KERNELS_SCALAR) && !defined(__wasm__)) || defined(__FP_FAST_FMAF) || \
    defined(__FMA__) || defined(__ARM_FEATURE_FMA) || defined(__riscv_flen)
MHA_INLINE float mul_add(float a, float b, float c) { return MHA_FMAF(a, b, c); }
#else
MHA_INLINE float mul_add(float a, float b, float c) { return fma_in_binary64(a, b, c); }
#endif

// x itself, but for a NaN, which gets the one payload that exp_of expects.
MHA_INLINE float canonical_nan(float x) { return x == x ? x : MHA_NAN; }

// A vector of one float: that of the scalar kernels, and in all kernels the one for what is left
// after whole vectors.
struct Scalar {
  static constexpr int size = 1;
  float x;
};

MHA_INLINE Scalar operator+(Scalar a, Scalar b) { return {a.x + b.x}; }
MHA_INLINE Scalar operator-(Scalar a, Scalar b) { return {a.x - b.x}; }
MHA_INLINE Scalar operator*(Scalar a, Scalar b) { return {a.x * b.x}; }
MHA_INLINE Scalar mul_add(Scalar a, Scalar b, Scalar c) { return {mul_add(a.x, b.x, c.x)}; }
MHA_INLINE Scalar max_of(Scalar s, Scalar m) { return {s.x > m.x ? s.x : m.x}; }
MHA_INLINE Scalar zero_if_less(Scalar x, Scalar limit, Scalar y) {
  return {x.x < limit.x ? 0.0f : y.x};
}
MHA_INLINE Scalar quotient_of(Scalar a, Scalar b) { return {a.x / b.x}; }
MHA_INLINE Scalar value_if_less(Scalar x, Scalar limit, Scalar value, Scalar y) {
  return {x.x < limit.x ? value.x : y.x};
}
MHA_INLINE Scalar zero_if_equal(Scalar x, Scalar value, Scalar y) {
  return {x.x == value.x ? 0.0f : y.x};
}
MHA_INLINE Scalar first_lanes(Scalar x, int64_t count, Scalar other) {
  return count > 0 ? x : other;
}
MHA_INLINE Scalar value_if_nan(Scalar x, Scalar value) { return {x.x != x.x ? value.x : x.x}; }
MHA_INLINE Scalar canonical_nan(Scalar x) { return {canonical_nan(x.x)}; }
MHA_INLINE Scalar times_power(Scalar p, Scalar, Scalar t) {
  return {float_of(bits_of(p.x) + (bits_of(t.x) << 23))};
}

template <class V>
MHA_INLINE V load(const float *p);
template <class V>
MHA_INLINE V all(float x);

template <>
MHA_INLINE Scalar load<Scalar>(const float *p) {
  return {*p};
}
template <>
MHA_INLINE Scalar all<Scalar>(float x) {
  return {x};
}
MHA_INLINE void store(float *p, Scalar v) { *p = v.x; }

// g++ reads an operand of several multiply-adds from the memory once for each of them, if it is not
// made to hold it in a register; for NEON only when it optimises for size, but there it reads two
// neighbours by one instruction only if it is made to hold both.
MHA_INLINE Scalar kept_in_register(Scalar x) { return x; }
MHA_INLINE Scalar kept_in_pair(Scalar x) { return x; }
template <class V>
constexpr bool multiplies_by_lanes = false;

// Returns p, but hides from the optimizer what it is. Otherwise g++ would compute what follows from
// it before a loop, in registers that are not free, or make a copy of the loop for each value.
template <class T>
MHA_INLINE T opaque(T p) {
  MHA_HOLD(p, "r");
  return p;
}

alignas(64) constexpr float lane_numbers[16] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                8, 9, 10, 11, 12, 13, 14, 15};

// ---- Vectors, which the header of a set defines: MHA_VECTORS names it
//
// Vector         a batch of xsimd's, with the operations of batch.h, or Scalar
// TileShape      below; load, load_fours and others: stored.h; DotProducts: dot_products.h
// kept_in_register, kept_in_pair, add_product, quotient_of, mul_add, max_of, zero_if_less
// store_first    to p the first `count` lanes, or all of them if there are fewer; nothing behind
//                them is touched
// times_power    (p, n, t) is p with n added to its exponent, for an integer n that also stands in
//                the low 9 bits of t, and a normal result. It multiplies by 2^n, exactly; other
//                results and NaN need not come out alike on all machines.
// sum16          adds the 16 partial sums of a row, held in 16 / V::size vectors, in the contract's
//                tree (i, i+8), (i, i+4), (i, i+2), (i, i+1)
// greatest       of the lanes, in any order
// load_fours     in each four lanes a row's four numbers at p, the rows `apart` numbers from one to
//                the next
// zip_low, zip_high   of each four lanes a0 b0 a1 b1, and a2 b2 a3 b3
// swapped<h>     lanes h apart in each other's place, for h = 1, 2, 4, ... up to half of a vector

// How many rows and vectors the register tiles have. There are as many sums as the registers hold
// besides the operands, and at least the 8 independent chains that keep two fma units with a
// latency of 4 busy, where the problem has as many.
//
//   max_rows             of a tile; those of the attention have attend_rows
//   panels_at_once(R)    panels of weights side by side
//   project_vectors(R)   vectors of a panel at once; they divide a panel
//   key_tiles(R)         tiles of 16 keys at once
//   context_vectors(R)   vectors of values at once; columns that are left come 16 at a time
//   has_few_row_forms    whether few rows have ways of their own through weights, which take much
//                        code (project.h)
//   exp_vectors          vectors side by side through exp, whose constants take registers too
template <int lanes>
struct TileShape;

// Of four lanes, with NEON and the vectors of RISC-V: 6 rows times 4 vectors are 24 sums.
struct TilesOf32Registers {
  static constexpr int registers = 32;
  static constexpr int max_rows = 6, attend_rows = 6, exp_vectors = 2;
  static constexpr int panels_at_once(int64_t) { return 1; }
  static constexpr int project_vectors(int rows) { return rows <= 2 ? 12 : rows <= 4 ? 6 : 4; }
  static constexpr int key_tiles(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
  static constexpr int context_vectors(int) { return 4; }
  static constexpr bool has_few_row_forms = false;
};

// Calls put(V{}, i) for i = 0, V::size, ... as long as a whole vector is left of `count` elements,
// and put(Scalar{}, i) for each element after that.
template <class V, class Put>
MHA_INLINE void in_vectors(int64_t count, const Put &put) {
  int64_t i = 0;
  for (; i + static_cast<int64_t>(V::size) <= count; i += V::size) put(V{}, i);
  for (; i < count; ++i) put(Scalar{}, i);
}

}  // namespace
}  // namespace mha
