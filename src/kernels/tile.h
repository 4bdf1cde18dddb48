// The one inner loop of the library: R rows times a block of columns, all in registers.
//
// Projections, scores and context vectors are the same computation: R rows of multipliers, read one number at a time, times a matrix that
// lies with its columns side by side. Vectors run across columns, never along k, so that lane count and tile shape cannot change a bit.
#pragma once

#include "kernels/elements.h"
#include "kernels/kernels.h"

namespace mha {
namespace {

MHA_INLINE constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
MHA_INLINE constexpr int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }
// a / b, but no division, which is slow, where small layers have none to do.
MHA_INLINE int64_t quotient(int64_t a, int64_t b) { return a < b ? 0 : a / b; }

// Which block of 16 keys a key is in, and where; without the care that a division takes of negative numbers.
MHA_INLINE int64_t block_of(int64_t key) { return static_cast<int64_t>(static_cast<uint64_t>(key) / key_block); }
MHA_INLINE int64_t place_in_block(int64_t key) { return static_cast<int64_t>(static_cast<uint64_t>(key) % key_block); }

// The left-hand rows, in one of two forms: at(r, k) is the multiplier of row r at k.
template <int R>
struct RowPointers {
  const float *row[R];
  MHA_INLINE float at(int r, int64_t k) const { return row[r][k]; }
};

template <int stride>
struct EvenRows {
  const float *base;
  MHA_INLINE float at(int r, int64_t k) const { return base[r * stride + k]; }
};

// The right-hand matrix, of floats or of numbers that are widened on the way: element (k, column) is at w + k * k_stride + column, where
// columns come in blocks block_stride apart.
template <class Element>
struct ColumnsOf {
  using Number = Element;
  const Element *w;
  int64_t k_stride;
  int64_t block_stride;

  // Where vector i of the columns at k lies, in blocks of C vectors.
  template <class V, int C>
  MHA_INLINE const Element *at(int64_t k, int i) const {
    return w + k * k_stride + i / C * block_stride + i % C * static_cast<int>(V::size);
  }
};
using Columns = ColumnsOf<float>;

// The same in blocks of which each lies where it wants: element (k, column) is at block[i] + k * k_stride + column.
template <class Element, int count, int k_stride>
struct Blocks {
  using Number = Element;
  const Element *block[count];

  template <class V, int C>
  MHA_INLINE const Element *at(int64_t k, int i) const {
    return block[i / C] + k * k_stride + i % C * static_cast<int>(V::size);
  }
};

// What a loop asks the memory for while it computes: nothing.
struct NoPrefetch {
  MHA_INLINE void step(int64_t) const {}
};

template <int lanes>
struct TileShape;  // see below

// With AVX2, what comes from the memory is read as a few long streams side by side. (Measured on AMD's Zen 3, which follows several streams
// by itself, at 1.3 times the speed of one. Other processors that have AVX2 and not AVX-512 have not been measured.)
template <class V>
constexpr bool reads_streams = V::size == 8;

// Some kernels that only make this faster are left out of a small library.
template <class V>
constexpr bool has_long_kernels_for_streams = reads_streams<V> && !is_small_code;

// Whether each two vectors of sums, of such numbers in blocks of C vectors, are those of even and of odd columns until put_in_order.
template <class V, class Element, int C>
constexpr bool is_even_odd = C % 2 == 0 && widens_even_odd<V, Element>;

// `count` vectors of the columns at `place`, from number `first` on.
template <class V, int C, bool has_register, int count, class Matrix>
MHA_INLINE void read_columns(const Matrix &columns, int64_t place, int first, V (&column)[count]) {
  if constexpr (is_even_odd<V, typename Matrix::Number, C>) {
    MHA_UNROLL for (int i = 0; i < count; i += 2) {
      const Two<V> two = load_even_odd<V, has_register>(columns.template at<V, C>(place, first + i));
      column[i] = two.even;
      column[i + 1] = two.odd;
    }
  } else {
    MHA_UNROLL for (int i = 0; i < count; ++i) column[i] = load<V>(columns.template at<V, C>(place, first + i));
  }
}

template <class Element, int C, int R, int N, class V>
MHA_INLINE void put_in_order(V (&acc)[R][N]) {
  if constexpr (is_even_odd<V, Element, C>) {
    MHA_UNROLL for (int r = 0; r < R; ++r) { MHA_UNROLL for (int i = 0; i < N; i += 2) join_even_odd(&acc[r][i], &acc[r][i + 1]); }
  }
}

template <class Element, int C, int R, int N, class V>
MHA_INLINE void put_out_of_order(V (&acc)[R][N]) {
  if constexpr (is_even_odd<V, Element, C>) {
    MHA_UNROLL for (int r = 0; r < R; ++r) { MHA_UNROLL for (int i = 0; i < N; i += 2) split_even_odd(&acc[r][i], &acc[r][i + 1]); }
  }
}

// acc[r][i] += rows[r] at k * columns at `place`, a step of a loop. Beside the sums, the columns are held in registers, and the rows'
// numbers pass by; for one row, or where there are not registers enough, the rows' numbers are held, and the columns pass by in pairs.
template <int R, int N, int C, class V, class Rows, class Matrix, class Ahead>
MHA_INLINE void accumulate_step(const Rows &rows, int64_t k, const Matrix &columns, int64_t place, V (&acc)[R][N], Ahead ahead,
                                int64_t step) {
  if constexpr (R > 1 && R * N + N < TileShape<V::size>::registers) {
    V column[N];
    read_columns<V, C, R * N + N + 2 <= TileShape<V::size>::registers>(columns, place, 0, column);
    MHA_UNROLL for (int i = 0; i < N; ++i) column[i] = held(column[i]);
    ahead.step(step);
    MHA_UNROLL for (int r = 0; r < R; ++r) {
      const V multiplier = all<V>(rows.at(r, k));
      MHA_UNROLL for (int i = 0; i < N; ++i) acc[r][i] = mul_add(multiplier, column[i], acc[r][i]);
    }
  } else {
    constexpr int at_once = N % 2 == 0 ? 2 : 1;
    V multiplier[R];
    MHA_UNROLL for (int r = 0; r < R; ++r) multiplier[r] = all<V>(rows.at(r, k));
    ahead.step(step);
    MHA_UNROLL for (int first = 0; first < N; first += at_once) {
      V column[at_once];
      read_columns<V, C, R * N + R + at_once + 1 <= TileShape<V::size>::registers>(columns, place, first, column);
      MHA_UNROLL for (int i = 0; i < at_once; ++i) column[i] = held_in_pair(column[i]);
      MHA_UNROLL for (int i = 0; i < at_once; ++i) {
        MHA_UNROLL for (int r = 0; r < R; ++r) acc[r][first + i] = mul_add(multiplier[r], column[i], acc[r][first + i]);
      }
    }
  }
}

// acc[r][i] += rows[r] * columns over k in [begin, end), in order, columns.w being those of `begin`: nearly all fused multiply-adds of
// the library. Blocks hold the columns from term 0 on. Where is_even_odd, the caller has to put the sums in order.
template <int R, int N, int C, class V, class Rows, class Ahead, class Element = float>
MHA_INLINE void accumulate(Rows rows, ColumnsOf<Element> columns, int64_t begin, int64_t end, V (&acc)[R][N], Ahead ahead) {
  for (int64_t k = begin; k < end; ++k, columns.w += columns.k_stride) accumulate_step<R, N, C>(rows, k, columns, 0, acc, ahead, k - begin);
}

template <int R, int N, int C, class V, class Rows, class Element, int k_stride, class Ahead>
MHA_INLINE void accumulate(Rows rows, const Blocks<Element, N / C, k_stride> &columns, int64_t begin, int64_t end, V (&acc)[R][N],
                           Ahead ahead) {
  for (int64_t k = begin; k < end; ++k) accumulate_step<R, N, C>(rows, k, columns, k, acc, ahead, k);
}

// The same with sums in memory: sums[r][i] += rows[r] * columns, for C vectors of columns. The caller puts them in order, as above.
template <class V, int R, int C, class Rows, class Element, class Ahead>
MHA_INLINE void add_in_memory(const Rows &rows, ColumnsOf<Element> columns, int64_t begin, int64_t end, float *sums, int64_t stride,
                              Ahead ahead) {
  const auto sum = [&](int r, int i) { return sums + r * stride + i * static_cast<int>(V::size); };
  V acc[R][C];
  MHA_UNROLL for (int r = 0; r < R; ++r) { MHA_UNROLL for (int i = 0; i < C; ++i) acc[r][i] = load<V>(sum(r, i)); }
  accumulate<R, C, C>(rows, columns, begin, end, acc, ahead);
  MHA_UNROLL for (int r = 0; r < R; ++r) { MHA_UNROLL for (int i = 0; i < C; ++i) store(sum(r, i), acc[r][i]); }
}

template <class V, class Element, int C>
MHA_INLINE void put_in_order(float *sums, int64_t count) {
  if constexpr (is_even_odd<V, Element, C>) {
    for (float *at = sums; at < sums + count; at += 2 * V::size) {
      V even = load<V>(at), odd = load<V>(at + V::size);
      join_even_odd(&even, &odd);
      store(at, even);
      store(at + V::size, odd);
    }
  }
}

template <int R, int N, class V>
MHA_INLINE void clear(V (&acc)[R][N]) {
  MHA_UNROLL for (int r = 0; r < R; ++r) { MHA_UNROLL for (int i = 0; i < N; ++i) acc[r][i] = all<V>(0.0f); }
}

// One block of terms, from `begin` on, of dot(rows[r], columns) as in CONTRACT.md section 3, for N vectors in blocks of C; `columns` is
// what accumulate takes. The blocks' results add up in `sums`; with the last one, take(dot, r, i) gets row r's columns from i * V::size on.
template <int R, int N, int C, class V, int64_t block = dot_block, class Rows, class Matrix, class Take, class Ahead>
MHA_INLINE void multiply_block(Rows rows, int64_t begin, int64_t depth, const Matrix &columns, float *sums, int64_t sums_stride,
                               Take &&take, Ahead ahead) {
  const int64_t end = smaller(depth, begin + block);
  V acc[R][N];
  clear(acc);
  accumulate<R, N, C>(rows, columns, begin, end, acc, ahead);
  put_in_order<typename Matrix::Number, C>(acc);
  const auto sum = [&](int r, int i) { return sums + r * sums_stride + i * static_cast<int>(V::size); };
  if (begin != 0) {
    MHA_UNROLL for (int r = 0; r < R; ++r) { MHA_UNROLL for (int i = 0; i < N; ++i) acc[r][i] = load<V>(sum(r, i)) + acc[r][i]; }
  }
  if (end == depth) {
    MHA_UNROLL for (int r = 0; r < R; ++r) { MHA_UNROLL for (int i = 0; i < N; ++i) take(acc[r][i], r, i); }
  } else {
    MHA_UNROLL for (int r = 0; r < R; ++r) { MHA_UNROLL for (int i = 0; i < N; ++i) store(sum(r, i), acc[r][i]); }
  }
}

// All blocks.
template <int R, int N, int C, class V, int64_t block = dot_block, class Rows, class Matrix, class Take, class Ahead = NoPrefetch>
MHA_INLINE void multiply(Rows rows, int64_t depth, const Matrix &columns, float *sums, int64_t sums_stride, Take &&take,
                         Ahead ahead = {}) {
  int64_t begin = 0;
  do {
    multiply_block<R, N, C, V, block>(rows, begin, depth, columns, sums, sums_stride, take, ahead);
    begin += block;
  } while (begin < depth);
}

// How many rows and vectors a tile has: as many accumulators as the registers hold besides the operands, and never fewer than the 8
// independent chains that two fma units with a latency of 4 need, where the problem has them. The full tiles (8 x 3 and 6 x 4 vectors on
// AVX-512), alone on operands in the level-2 cache, run at 0.90 to 0.98 of the fma peak.
//
// code_vectors: of int4 weights, of which the columns of two terms are held. exp_vectors: so many run side by side through exp, whose
// constants take registers too.
template <>
struct TileShape<16> {  // AVX-512
  static constexpr int registers = 32;
  static constexpr int project_rows = 8, attend_rows = 6, softmax_rows = 3, exp_vectors = 4;
  static constexpr int project_panels(int rows) { return rows <= 2 ? 2 : 1; }
  static constexpr int project_vectors(int) { return 3; }
  static constexpr int code_vectors(int) { return 3; }
  static constexpr int score_blocks(int rows) { return rows <= 2 ? 8 : 4; }
  static constexpr int context_vectors(int rows) { return rows <= 2 ? 8 : 4; }
};

template <>
struct TileShape<8> {  // AVX2
  static constexpr int registers = 16;
  static constexpr int project_rows = 6, attend_rows = 6, softmax_rows = 1, exp_vectors = 2;
  static constexpr int project_panels(int rows) { return rows == 1 ? 2 : 1; }
  static constexpr int project_vectors(int rows) { return rows <= 2 ? 6 : rows <= 4 ? 3 : 2; }
  static constexpr int score_blocks(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
  static constexpr int context_vectors(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : 2; }
};

template <>
struct TileShape<4> {  // NEON
  static constexpr int registers = 32;
  static constexpr int project_rows = 6, attend_rows = 6, softmax_rows = 1, exp_vectors = 2;
  static constexpr int project_panels(int) { return 1; }
  static constexpr int project_vectors(int rows) { return rows <= 2 ? 12 : rows <= 4 ? 6 : 4; }
  static constexpr int code_vectors(int rows) { return rows == 1 ? 12 : rows == 2 ? 6 : rows <= 4 ? 4 : 3; }
  static constexpr int score_blocks(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
  static constexpr int context_vectors(int rows) { return rows == 1 ? 8 : 4; }
};

template <>
struct TileShape<1> {  // scalar
  static constexpr int registers = 32;
  static constexpr int project_rows = 4, attend_rows = 2, softmax_rows = 1, exp_vectors = 16;
  static constexpr int project_panels(int) { return 1; }
  static constexpr int project_vectors(int) { return 4; }
  static constexpr int score_blocks(int) { return 1; }
  static constexpr int context_vectors(int) { return 4; }
};

}  // namespace
}  // namespace mha
