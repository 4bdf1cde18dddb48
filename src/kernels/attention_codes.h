// Attention in integers by what newer processors have for products of codes: queries times keys of int8, and weights times values of int8
// (CONTRACT.md, sections 7 and 8), for units of several rows. Others take stored_codes.h.
//
// In storage, keys and values lie as products of floats read them: 16 of them, or 16 columns, side by side. Four terms of each 16 columns
// are brought together, once for all rows of a unit, in its scratch memory. (Keys that lie so in storage take 1.1 to 1.2 times as long to
// be widened to floats.)
#pragma once

#include "kernels/codes.h"
#include "kernels/stored_codes.h"

namespace mha {
namespace {

#if defined(MHA_KERNELS_VNNI) || defined(MHA_KERNELS_DOTPROD)

// ---- Operations: four terms of 16 columns times four codes of a row
//
// CodeOperations<Code> has them; Code is how a row's codes are stored.
//
//   steps           so many instructions multiply the four terms of a vector, each a part of them
//   added           to the bytes of columns by an exclusive or, 128 or 0; sums begin with less, so that they end as those of the codes
//   Four            four terms of 16 columns in registers: load_four takes 16 bytes of each term, `stride` from one to the next
//   store_four, load_part             to 64 bytes; and from these the part of vector number n of the columns
//   load_row_part, add                the part of a row, and the sums

template <class Code>
struct CodeOperations;

#if defined(MHA_KERNELS_AVX512) || defined(MHA_KERNELS_AVX2)
MHA_INLINE __m128i load_row_of_16(const uint8_t *p) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p)); }
MHA_INLINE int32_t load_32_bits(const void *p) {
  int32_t bits;
  __builtin_memcpy(&bits, p, sizeof bits);
  return bits;
}
#endif

#if defined(MHA_KERNELS_AVX512)

template <>
struct CodeOperations<int16_t> {
  static constexpr int steps = 2, added = 0;
  using Sum = __m512i;
  struct Four {
    __m256i of[steps];
  };
  static MHA_INLINE Four load_four(const uint8_t *p, int64_t stride) {
    const auto two = [](__m128i first, __m128i second) MHA_INLINED {
      return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_unpacklo_epi8(first, second)), _mm_unpackhi_epi8(first, second), 1);
    };
    return {{two(load_row_of_16(p), load_row_of_16(p + stride)), two(load_row_of_16(p + 2 * stride), load_row_of_16(p + 3 * stride))}};
  }
  static MHA_INLINE void store_four(uint8_t *p, const Four &four) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), four.of[0]);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p + 32), four.of[1]);
  }
  static MHA_INLINE __m512i load_part(const uint8_t *p, int step, int) { return _mm512_cvtepi8_epi16(load_16x16(p + 32 * step)); }
  static MHA_INLINE __m512i load_row_part(const int16_t *x, int step) { return _mm512_set1_epi32(load_32_bits(x + 2 * step)); }
  static MHA_INLINE Sum begin(int32_t value) { return _mm512_set1_epi32(value); }
  static MHA_INLINE Sum add(Sum sum, __m512i w, __m512i x) { return add_products_of_words(sum, w, x); }
  static MHA_INLINE Vector floats_of(Sum sum) { return _mm512_cvtepi32_ps(sum); }
};

// Unsigned bytes times signed ones: either may be those of the columns.
template <>
struct CodeOperations<int8_t> {
  static constexpr int steps = 1, added = 128;
  using Sum = __m512i;
  using Four = __m512i;
  static MHA_INLINE Four load_four_plus(const uint8_t *p, int64_t stride, int32_t plus) {
    const __m512i to_columns = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i to_fours = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    __m512i rows = _mm512_inserti32x4(_mm512_castsi128_si512(load_row_of_16(p)), load_row_of_16(p + stride), 1);
    rows = _mm512_inserti32x4(_mm512_inserti32x4(rows, load_row_of_16(p + 2 * stride), 2), load_row_of_16(p + 3 * stride), 3);
    const __m512i columns = _mm512_shuffle_epi8(_mm512_permutexvar_epi32(to_columns, rows), to_fours);
    return _mm512_xor_si512(columns, _mm512_set1_epi8(static_cast<char>(plus)));
  }
  static MHA_INLINE Four load_four(const uint8_t *p, int64_t stride) { return load_four_plus(p, stride, added); }
  static MHA_INLINE void store_four(uint8_t *p, Four four) { _mm512_storeu_si512(p, four); }
  static MHA_INLINE __m512i load_part(const uint8_t *p, int, int) { return _mm512_loadu_si512(p); }
  static MHA_INLINE __m512i load_row_part(const void *x, int) { return _mm512_set1_epi32(load_32_bits(x)); }
  static MHA_INLINE Sum begin(int32_t value) { return _mm512_set1_epi32(value); }
  static MHA_INLINE Sum add(Sum sum, __m512i w, __m512i x) { return add_products_of_bytes(sum, w, x); }
  static MHA_INLINE Vector floats_of(Sum sum) { return _mm512_cvtepi32_ps(sum); }
};

#elif defined(MHA_KERNELS_AVX2)

struct FourOf16 {
  __m128i of[4];
};
MHA_INLINE void store_four_of_16(uint8_t *p, const FourOf16 &four) {
  MHA_UNROLL for (int i = 0; i < 4; ++i) _mm_storeu_si128(reinterpret_cast<__m128i *>(p) + i, four.of[i]);
}

template <>
struct CodeOperations<int16_t> {
  static constexpr int steps = 2, added = 0;
  using Sum = __m256i;
  using Four = FourOf16;
  static MHA_INLINE Four load_four(const uint8_t *p, int64_t stride) {
    const __m128i row0 = load_row_of_16(p), row1 = load_row_of_16(p + stride);
    const __m128i row2 = load_row_of_16(p + 2 * stride), row3 = load_row_of_16(p + 3 * stride);
    return {{_mm_unpacklo_epi8(row0, row1), _mm_unpackhi_epi8(row0, row1), _mm_unpacklo_epi8(row2, row3), _mm_unpackhi_epi8(row2, row3)}};
  }
  static MHA_INLINE void store_four(uint8_t *p, const Four &four) { store_four_of_16(p, four); }
  static MHA_INLINE __m256i load_part(const uint8_t *p, int step, int n) {
    return _mm256_cvtepi8_epi16(load_row_of_16(p + 32 * step + 16 * n));
  }
  static MHA_INLINE __m256i load_row_part(const int16_t *x, int step) { return _mm256_set1_epi32(load_32_bits(x + 2 * step)); }
  static MHA_INLINE Sum begin(int32_t value) { return _mm256_set1_epi32(value); }
  static MHA_INLINE Sum add(Sum sum, __m256i w, __m256i x) { return add_products_of_words(sum, w, x); }
  static MHA_INLINE Vector floats_of(Sum sum) { return _mm256_cvtepi32_ps(sum); }
};

// Unsigned bytes times signed ones: either may be those of the columns.
template <>
struct CodeOperations<int8_t> {
  static constexpr int steps = 1, added = 128;
  using Sum = __m256i;
  using Four = FourOf16;
  static MHA_INLINE Four load_four_plus(const uint8_t *p, int64_t stride, int32_t plus) {
    const __m128i flip = _mm_set1_epi8(static_cast<char>(plus));
    const __m128i row0 = _mm_xor_si128(flip, load_row_of_16(p)), row1 = _mm_xor_si128(flip, load_row_of_16(p + stride));
    const __m128i row2 = _mm_xor_si128(flip, load_row_of_16(p + 2 * stride)), row3 = _mm_xor_si128(flip, load_row_of_16(p + 3 * stride));
    const __m128i low01 = _mm_unpacklo_epi8(row0, row1), high01 = _mm_unpackhi_epi8(row0, row1);
    const __m128i low23 = _mm_unpacklo_epi8(row2, row3), high23 = _mm_unpackhi_epi8(row2, row3);
    return {{_mm_unpacklo_epi16(low01, low23), _mm_unpackhi_epi16(low01, low23), _mm_unpacklo_epi16(high01, high23),
             _mm_unpackhi_epi16(high01, high23)}};
  }
  static MHA_INLINE Four load_four(const uint8_t *p, int64_t stride) { return load_four_plus(p, stride, added); }
  static MHA_INLINE void store_four(uint8_t *p, const Four &four) { store_four_of_16(p, four); }
  static MHA_INLINE __m256i load_part(const uint8_t *p, int, int n) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p) + n);
  }
  static MHA_INLINE __m256i load_row_part(const void *x, int) { return _mm256_set1_epi32(load_32_bits(x)); }
  static MHA_INLINE Sum begin(int32_t value) { return _mm256_set1_epi32(value); }
  static MHA_INLINE Sum add(Sum sum, __m256i w, __m256i x) { return add_products_of_bytes(sum, w, x); }
  static MHA_INLINE Vector floats_of(Sum sum) { return _mm256_cvtepi32_ps(sum); }
};

#elif defined(MHA_KERNELS_NEON)

struct FourOf16 {
  uint8x16_t of[4];
};
MHA_INLINE FourOf16 load_terms_of_16(const uint8_t *p, int64_t stride) {
  return {{vld1q_u8(p), vld1q_u8(p + stride), vld1q_u8(p + 2 * stride), vld1q_u8(p + 3 * stride)}};
}
MHA_INLINE void store_four_of_16(uint8_t *p, const FourOf16 &four) {
  MHA_UNROLL for (int i = 0; i < 4; ++i) vst1q_u8(p + 16 * i, four.of[i]);
}

MHA_INLINE FourOf16 fours_of(const FourOf16 &rows) {
  FourOf16 four;
  const uint8x16x2_t first = vzipq_u8(rows.of[0], rows.of[1]), last = vzipq_u8(rows.of[2], rows.of[3]);
  MHA_UNROLL for (int i = 0; i < 2; ++i) {
    const uint16x8x2_t both = vzipq_u16(vreinterpretq_u16_u8(first.val[i]), vreinterpretq_u16_u8(last.val[i]));
    four.of[2 * i] = vreinterpretq_u8_u16(both.val[0]);
    four.of[2 * i + 1] = vreinterpretq_u8_u16(both.val[1]);
  }
  return four;
}
template <>
struct CodeOperations<int8_t> {
  static constexpr int steps = 1, added = 0;
  using Sum = int32x4_t;
  using Four = FourOf16;
  static MHA_INLINE Four load_four(const uint8_t *p, int64_t stride) { return fours_of(load_terms_of_16(p, stride)); }
  static MHA_INLINE void store_four(uint8_t *p, const Four &four) { store_four_of_16(p, four); }
  static MHA_INLINE int8x16_t load_part(const uint8_t *p, int, int n) { return vreinterpretq_s8_u8(vld1q_u8(p + 16 * n)); }
  static MHA_INLINE int8x8_t load_row_part(const int8_t *x, int) { return DotProducts<int8_t>::load_row_terms(x, 0); }
  static MHA_INLINE Sum begin(int32_t value) { return vdupq_n_s32(value); }
  static MHA_INLINE Sum add(Sum sum, int8x16_t w, int8x8_t x) { return vdotq_lane_s32(sum, w, x, 0); }
  static MHA_INLINE Vector floats_of(Sum sum) { return vcvtq_f32_s32(sum); }
};
// Unsigned bytes times unsigned ones.
template <>
struct CodeOperations<uint8_t> {
  static constexpr int steps = 1, added = 128;
  using Sum = uint32x4_t;
  using Four = FourOf16;
  static MHA_INLINE Four load_four(const uint8_t *p, int64_t stride) {
    FourOf16 four = fours_of(load_terms_of_16(p, stride));
    MHA_UNROLL for (int i = 0; i < 4; ++i) four.of[i] = veorq_u8(four.of[i], vdupq_n_u8(added));
    return four;
  }
  static MHA_INLINE void store_four(uint8_t *p, const Four &four) { store_four_of_16(p, four); }
  static MHA_INLINE uint8x16_t load_part(const uint8_t *p, int, int n) { return vld1q_u8(p + 16 * n); }
  static MHA_INLINE uint8x8_t load_row_part(const uint8_t *x, int) {
    return vreinterpret_u8_s8(DotProducts<int8_t>::load_row_terms(reinterpret_cast<const int8_t *>(x), 0));
  }
  static MHA_INLINE Sum begin(int32_t value) { return vdupq_n_u32(static_cast<uint32_t>(value)); }
  static MHA_INLINE Sum add(Sum sum, uint8x16_t w, uint8x8_t x) { return vdotq_lane_u32(sum, w, x, 0); }
  static MHA_INLINE Vector floats_of(Sum sum) { return vcvtq_f32_s32(vreinterpretq_s32_u32(sum)); }
};
#else
#error "write the products of codes of the attention for this instruction set"
#endif

#if defined(MHA_KERNELS_VNNI)
template <>
struct CodeOperations<uint8_t> : CodeOperations<int8_t> {
  static constexpr int added = 0;
  static MHA_INLINE Four load_four(const uint8_t *p, int64_t stride) { return load_four_plus(p, stride, added); }
  static MHA_INLINE Sum add(Sum sum, Sum w, Sum x) { return add_products_of_bytes(sum, x, w); }
};
#endif

// visit(a code as those of these rows are stored)
template <class Visit>
MHA_INLINE void visit_code(CodedRows kind, Arithmetic arithmetic, Visit visit) {
#if defined(MHA_KERNELS_VNNI)
  if (arithmetic == Arithmetic::int16) return visit(int16_t());
#else
  (void)arithmetic;
#endif
  if (kind == CodedRows::queries)
    visit(int8_t());
  else
    visit(uint8_t());
}

// ---- Rows

MHA_NOINLINE inline float encode_attention_row(CodedRows kind, Arithmetic arithmetic, float *x, int64_t width, float *to) {
  float scale = 0.0f;
  visit_code(kind, arithmetic, [&](auto code) MHA_INLINED {
    using Code = decltype(code);
    scale = encode_code_row(kind, arithmetic, x, width, chain_of_row(width), sizeof(Code), CodeOperations<Code>::added, to);
  });
  return scale;
}

// ---- Columns

MHA_NOINLINE inline void gather_columns(CodedRows kind, Arithmetic arithmetic, const int8_t *from, int64_t stride, int64_t terms,
                                        int64_t columns, uint8_t *to, int64_t step) {
  visit_code(kind, arithmetic, [&](auto code) MHA_INLINED {
    using Operations = CodeOperations<decltype(code)>;
    for (int64_t k = 0; k < terms; k += terms_together, from += terms_together * stride, to += step) {
      const uint8_t *rows = reinterpret_cast<const uint8_t *>(from);
      const int64_t there = min(terms - k, terms_together);
      for (int64_t column = 0; column < columns; column += key_block, rows += key_block) {
        if (there == terms_together) {
          Operations::store_four(to + column * terms_together, Operations::load_four(rows, stride));
          continue;
        }
        uint8_t copies[terms_together * key_block] = {};  // in place of rows that are not there, whose codes are 0
        for (int64_t i = 0; i < there; ++i) __builtin_memcpy(copies + i * key_block, rows + i * stride, key_block);
        Operations::store_four(to + column * terms_together, Operations::load_four(copies, key_block));
      }
    }
  });
}

// ---- Products

struct CodeRowsTile {
  const char *rows[max_tile_rows];  // chains of codes, each with its tail
  const uint8_t *columns;           // [term / 4][column][4], each four `step` bytes from the one before
  int64_t step, num_columns;        // so many columns, a multiple of those of the loop
  int64_t terms, chain;
  float *sums;
  int64_t sums_stride;
};

// acc[row][vector of columns] += the products of four terms, those of the rows from byte `at` on.
template <class Code, int R, int C, class Sum>
MHA_INLINE void add_four_terms(const char *const (&rows)[R], int64_t at, const uint8_t *w, Sum (&acc)[R][C]) {
  using Operations = CodeOperations<Code>;
  constexpr int vectors = key_block / static_cast<int>(Vector::size);
  const auto part = [&](int step, int c) MHA_INLINED {
    return Operations::load_part(w + c / vectors * (terms_together * key_block), step, c % vectors);
  };
  MHA_UNROLL for (int step = 0; step < Operations::steps; ++step) {
    decltype(part(0, 0)) columns[C];
    MHA_UNROLL for (int c = 0; c < C; ++c) columns[c] = part(step, c);
    MHA_UNROLL for (int r = 0; r < R; ++r) {
      const auto x = Operations::load_row_part(reinterpret_cast<const Code *>(rows[r] + at), step);
      MHA_UNROLL for (int c = 0; c < C; ++c) acc[r][c] = Operations::add(acc[r][c], columns[c], x);
    }
  }
}

template <class V, class Code, int R, int C>
MHA_NOCLONE void multiply_code_rows(const CodeRowsTile &tile) {
  using Operations = CodeOperations<Code>;
  constexpr int lanes = V::size;
  constexpr int64_t row_step = terms_together * static_cast<int64_t>(sizeof(Code));
  const int64_t step = tile.step, sums_stride = tile.sums_stride;
  const int64_t codes_bytes = tile.chain * static_cast<int64_t>(sizeof(Code));
  const char *rows[R];
  MHA_UNROLL for (int r = 0; r < R; ++r) rows[r] = tile.rows[r];
  for (int64_t column = 0; column < tile.num_columns; column += C * lanes) {
    const uint8_t *w = tile.columns + column * terms_together;
    int64_t at = 0;
    for (int64_t left = tile.terms; left > 0; left -= tile.chain, at += sizeof(CodesTail)) {
      const int64_t tail = at + codes_bytes, end = at + min(left, tile.chain) * static_cast<int64_t>(sizeof(Code));
      const auto tail_of = [&](int r) MHA_INLINED -> const CodesTail & { return *reinterpret_cast<const CodesTail *>(rows[r] + tail); };
      typename Operations::Sum acc[R][C];
      MHA_UNROLL for (int r = 0; r < R; ++r) {
        const auto begin = Operations::begin(Operations::added == 0 ? 0 : tail_of(r).begin);
        MHA_UNROLL for (int c = 0; c < C; ++c) acc[r][c] = begin;
      }
      for (; at < end; at += row_step, w += step) add_four_terms<Code>(rows, at, w, acc);
      const bool is_first = left == tile.terms;
      const float *from = is_first ? zeros : tile.sums + column;
      float *to = tile.sums + column;
      MHA_UNROLL for (int r = 0; r < R; ++r, from += is_first ? 0 : sums_stride, to += sums_stride) {
        const V scale = all<V>(tail_of(r).scale);
        MHA_UNROLL for (int c = 0; c < C; ++c) {
          store(to + c * lanes, mul_add(Operations::floats_of(acc[r][c]), scale, load<V>(from + c * lanes)));
        }
      }
    }
  }
}

// How many vectors of columns a tile of so many rows has: 16 columns, or 32 where these would be so few sums that each instruction would
// wait for the one before.
template <class V>
constexpr int code_row_vectors(int rows) {
  return V::size == 16 && rows > 4 ? 2 : key_block / V::size;
}

struct CodeLoop {
  void (*run)(const CodeRowsTile &tile);
  int64_t rows, columns;
};

// For so many rows and columns, or a part of them.
template <class V>
MHA_INLINE CodeLoop code_loop(const CodeProducts &p, int64_t rows, int64_t columns) {
  CodeLoop loop = {};
  visit_code(p.kind, p.arithmetic, [&](auto code) MHA_INLINED {
    using Code = decltype(code);
    visit_rows<TileShape<V::size>::attend_rows>(rows, [&](auto tile) MHA_INLINED {
      constexpr int R = decltype(tile)::count, C = code_row_vectors<V>(R), lanes = V::size;
      loop = {multiply_code_rows<V, Code, R, C>, R, C * lanes};
      if constexpr (C * lanes > key_block) {
        if (columns < C * lanes) loop = {multiply_code_rows<V, Code, R, key_block / lanes>, R, key_block};
      }
    });
  });
  return loop;
}

template <class V>
MHA_NOINLINE void multiply_attention_codes(const CodeProducts &p) {
  if (p.num_columns == 0) return;  // of a row that attends to no key of the chunk
  CodeRowsTile tile;
  tile.step = p.step;
  tile.terms = p.terms;
  tile.chain = chain_of_row(p.terms);
  tile.sums_stride = p.sums_stride;
  for (int64_t r = 0, rows = 0; r < p.num_rows; r += rows) {
    for (int64_t column = 0; column < p.num_columns; column += tile.num_columns) {
      const int64_t columns = p.num_columns - column;
      const CodeLoop loop = code_loop<V>(p, p.num_rows - r, columns);
      rows = loop.rows;
      // Where there are fewer, the last one again.
      for (int64_t i = 0; i < rows; ++i) tile.rows[i] = reinterpret_cast<const char *>(p.rows + min(r + i, p.num_rows - 1) * p.row_floats);
      tile.columns = p.columns + column * terms_together;
      tile.num_columns = columns / loop.columns * loop.columns;
      tile.sums = p.sums + r * p.sums_stride + column;
      loop.run(tile);
    }
  }
}

#endif

// ---- The table

template <class V>
constexpr CodeKernels make_code_kernels() {
  CodeKernels kernels = {};
  kernels.encode_rows = encode_rows<V>;
  kernels.project = project_codes<V>;
#if defined(MHA_KERNELS_VNNI) || defined(MHA_KERNELS_DOTPROD)
  kernels.encode_row = encode_attention_row;
  kernels.gather_columns = gather_columns;
  kernels.multiply = multiply_attention_codes<V>;
  kernels.multiplies_bytes = true;
#endif
#if defined(MHA_KERNELS_VNNI)
  kernels.multiplies_words = true;
#endif
  return kernels;
}

}  // namespace
}  // namespace mha
