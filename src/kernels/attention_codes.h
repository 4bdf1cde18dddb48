// Attention in integers: codes of queries times keys of int8, codes of weights times values of int8 (CONTRACT.md, sections 7 and 8).
//
// In storage, keys and values lie as products of floats read them: 16 of them, or 16 columns, side by side. For products of codes, four
// terms of each are gathered side by side, in a unit's scratch memory, as they lie in panels of weights; and the loop is that of
// projections. (Keys that lie so in storage take 1.1 to 1.2 times as long to be widened to floats.)
#pragma once

#include "kernels/codes.h"

namespace mha {
namespace {

// visit(a code as those of these rows are stored)
template <class Visit>
MHA_INLINE void visit_code(CodedRows kind, Arithmetic arithmetic, Visit visit) {
  if (kind == CodedRows::weights && arithmetic == Arithmetic::int8)
    visit(UnsignedCode());
  else
    visit_code(arithmetic, visit);
}

// ---- Rows

// Of codes of 8 bits, those of 16 without their upper bytes.
MHA_NOINLINE inline float encode_attention_row(CodedRows kind, Arithmetic arithmetic, float *x, int64_t width, float *to) {
  const bool are_queries = kind == CodedRows::queries;
  const int64_t count = code_count(width), chain = chain_of_row(width);
  __builtin_memset(x + width, 0, static_cast<size_t>(count - width) * sizeof *x);
  const CodeScale scale = code_scale_of(x, arithmetic == Arithmetic::int16 ? 32767 : are_queries ? 127 : 255, count);
  char *out = reinterpret_cast<char *>(to);
  for (int64_t k = 0; k < count; k += chain) {
    int16_t *const codes = reinterpret_cast<int16_t *>(out);
    const int32_t sum = encode(x + k, min(count - k, chain), scale, codes);
    CodesTail tail = {are_queries ? 1.0f : scale.scale, 0, {}};
    visit_code(kind, arithmetic, [&](auto code) MHA_INLINED {
      using Code = decltype(code);
      tail.begin = begin_of<Code>(sum, added_to_bytes<Code>);
      put_in_order_of_passes<Code>(codes, min(count - k, chain));
      if constexpr (sizeof(Code) == 1) {
        for (int64_t i = 0; i < chain; ++i) out[i] = static_cast<char>(codes[i]);
      }
      out += chain * static_cast<int64_t>(sizeof(Code));
    });
    __builtin_memcpy(out, &tail, sizeof tail);
    out += sizeof tail;
  }
  return scale.scale;
}

// ---- Columns

// Four rows of 16 bytes, with `added` to each by an exclusive or of the highest bit, as 16 columns of four.
#if defined(MHA_KERNELS_AVX512)
MHA_INLINE void gather_four(const int8_t *const (&rows)[terms_together], int32_t added, uint8_t *to) {
  const __m512i to_columns = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i to_fours = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  const auto row = [&](int i) MHA_INLINED { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(rows[i])); };
  __m512i all = _mm512_castsi128_si512(row(0));
  all = _mm512_inserti32x4(all, row(1), 1);
  all = _mm512_inserti32x4(all, row(2), 2);
  all = _mm512_inserti32x4(all, row(3), 3);
  all = _mm512_shuffle_epi8(_mm512_permutexvar_epi32(to_columns, all), to_fours);
  _mm512_storeu_si512(to, _mm512_xor_si512(all, _mm512_set1_epi8(static_cast<char>(added))));
}
#elif defined(MHA_KERNELS_AVX2)
MHA_INLINE void gather_four(const int8_t *const (&rows)[terms_together], int32_t added, uint8_t *to) {
  const __m128i flip = _mm_set1_epi8(static_cast<char>(added));
  const auto row = [&](int i) MHA_INLINED {
    return _mm_xor_si128(flip, _mm_loadu_si128(reinterpret_cast<const __m128i *>(rows[i])));
  };
  const __m128i r0 = row(0), r1 = row(1), r2 = row(2), r3 = row(3);
  const __m128i low01 = _mm_unpacklo_epi8(r0, r1), high01 = _mm_unpackhi_epi8(r0, r1);
  const __m128i low23 = _mm_unpacklo_epi8(r2, r3), high23 = _mm_unpackhi_epi8(r2, r3);
  __m128i *const out = reinterpret_cast<__m128i *>(to);
  _mm_storeu_si128(out, _mm_unpacklo_epi16(low01, low23));
  _mm_storeu_si128(out + 1, _mm_unpackhi_epi16(low01, low23));
  _mm_storeu_si128(out + 2, _mm_unpacklo_epi16(high01, high23));
  _mm_storeu_si128(out + 3, _mm_unpackhi_epi16(high01, high23));
}
#elif defined(MHA_KERNELS_NEON)
MHA_INLINE void gather_four(const int8_t *const (&rows)[terms_together], int32_t added, uint8_t *to) {
  const uint8x16_t flip = vdupq_n_u8(static_cast<uint8_t>(added));
  const auto row = [&](int i) MHA_INLINED { return veorq_u8(flip, vreinterpretq_u8_s8(vld1q_s8(rows[i]))); };
  vst4q_u8(to, {{row(0), row(1), row(2), row(3)}});
}
#else
MHA_INLINE void gather_four(const int8_t *const (&rows)[terms_together], int32_t added, uint8_t *to) {
  for (int64_t column = 0; column < key_block; ++column) {
    for (int64_t i = 0; i < terms_together; ++i) to[column * terms_together + i] = static_cast<uint8_t>(rows[i][column] ^ added);
  }
}
#endif

MHA_NOINLINE inline void gather_columns(CodedRows kind, Arithmetic arithmetic, const int8_t *from, int64_t stride, int64_t terms,
                                        int64_t columns, uint8_t *to, int64_t step) {
  int32_t added = 0;
  visit_code(kind, arithmetic, [&](auto code) MHA_INLINED { added = added_to_bytes<decltype(code)>; });
  for (int64_t k = 0; k < terms; k += terms_together, from += terms_together * stride, to += step) {
    const int64_t last = min(terms - k, terms_together) - 1;  // in place of those that are not there, whose codes are 0
    const int8_t *rows[terms_together];
    MHA_UNROLL for (int i = 0; i < terms_together; ++i) rows[i] = from + min(i, last) * stride;
    for (int64_t column = 0; column < columns; column += key_block) {
      gather_four(rows, added, to + column * terms_together);
      MHA_UNROLL for (int i = 0; i < terms_together; ++i) rows[i] += key_block;
    }
  }
}

// ---- Products

struct CodeRowsTile {
  const char *rows[max_tile_rows];  // chains of codes, each with its tail
  const uint8_t *columns;           // [term / 4][column][4], each four `step` bytes from the one before
  int64_t step, num_columns;        // so many columns, a multiple of those of the loop
  int64_t terms, chain;
  float *sums;
  int64_t sums_stride, ahead;
};

// acc[row][vector of columns] += the products of four terms: those of the rows from byte `at` on, those of the columns from w on.
template <class Code, int R, int C, class Sum>
MHA_INLINE void add_four_terms(const char *const (&rows)[R], int64_t at, const uint8_t *w, Sum (&acc)[R][C]) {
  using Dots = DotProducts<Code>;
  constexpr int64_t vector_bytes = terms_together * static_cast<int64_t>(Vector::size);
  MHA_UNROLL for (int pass = 0; pass < Dots::passes; ++pass) {
    typename Dots::Terms terms[C];
    if constexpr (R > 1) {
      MHA_UNROLL for (int c = 0; c < C; ++c) terms[c] = Dots::load_terms(w + c * vector_bytes, pass);
    }
    MHA_UNROLL for (int r = 0; r < R; ++r) {
      const typename Dots::RowTerms x = Dots::load_row_terms(reinterpret_cast<const Code *>(rows[r] + at), pass);
      MHA_UNROLL for (int c = 0; c < C; ++c) {
        if constexpr (R == 1) terms[c] = Dots::load_terms(w + c * vector_bytes, pass);
        acc[r][c] = Dots::add(acc[r][c], terms[c], x);
      }
    }
  }
}

template <class V, class Code, int R, int C>
MHA_NOCLONE void multiply_code_rows(const CodeRowsTile &tile) {
  using Dots = DotProducts<Code>;
  constexpr int lanes = V::size;
  constexpr int64_t row_step = terms_together * static_cast<int64_t>(sizeof(Code));
  const int64_t step = tile.step, sums_stride = tile.sums_stride, ahead = tile.ahead;
  const int64_t codes_bytes = tile.chain * static_cast<int64_t>(sizeof(Code));
  const char *rows[R];
  MHA_UNROLL for (int r = 0; r < R; ++r) rows[r] = tile.rows[r];
  for (int64_t column = 0; column < tile.num_columns; column += C * lanes) {
    const uint8_t *w = tile.columns + column * terms_together;
    int64_t at = 0;
    for (int64_t left = tile.terms; left > 0; left -= tile.chain, at += sizeof(CodesTail)) {
      const int64_t tail = at + codes_bytes, end = at + min(left, tile.chain) * static_cast<int64_t>(sizeof(Code));
      const auto tail_of = [&](int r) MHA_INLINED -> const CodesTail & { return *reinterpret_cast<const CodesTail *>(rows[r] + tail); };
      typename Dots::Sum acc[R][C];
      MHA_UNROLL for (int r = 0; r < R; ++r) {
        const typename Dots::Sum begin = Dots::begin(tail_of(r).begin);
        MHA_UNROLL for (int c = 0; c < C; ++c) acc[r][c] = begin;
      }
      for (; at < end; at += row_step, w += step) {
        if constexpr (R <= max_rows_of_fewer_bits) __builtin_prefetch(w + ahead);
        add_four_terms<Code>(rows, at, w, acc);
      }
      const bool is_first = left == tile.terms;
      const float *from = is_first ? zeros : tile.sums + column;
      float *to = tile.sums + column;
      MHA_UNROLL for (int r = 0; r < R; ++r, from += is_first ? 0 : sums_stride, to += sums_stride) {
        const V scale = all<V>(tail_of(r).scale);
        MHA_UNROLL for (int c = 0; c < C; ++c) {
          store(to + c * lanes, mul_add(Dots::sums_of(acc[r][c]), scale, load<V>(from + c * lanes)));
        }
      }
    }
  }
}

// How many vectors of columns a tile of so many rows has: 16 columns, or as many of them as there are registers for; 32 where 16 are so few
// sums that each instruction would wait for the one before.
template <class V, class Code>
constexpr int code_row_vectors(int rows) {
  if (V::size == 1) return 4;
  if (sizeof(typename DotProducts<Code>::Sum) > sizeof(V)) return rows <= 2 ? 2 : 1;  // of several registers
  return V::size == 16 && rows > 4 ? 2 : key_block / V::size;
}

struct CodeLoop {
  void (*run)(const CodeRowsTile &tile);
  int64_t rows, columns;
};

// For so many rows and columns, or a part of them.
template <class V>
MHA_INLINE CodeLoop code_loop(CodedRows kind, Arithmetic arithmetic, int64_t rows, int64_t columns) {
  CodeLoop loop = {};
  visit_code(kind, arithmetic, [&](auto code) MHA_INLINED {
    using Code = decltype(code);
    visit_rows<TileShape<V::size>::attend_rows>(rows, [&](auto tile) MHA_INLINED {
      constexpr int R = decltype(tile)::count, C = code_row_vectors<V, Code>(R), lanes = V::size;
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
  CodeRowsTile tile;
  tile.step = p.step;
  tile.terms = p.terms;
  tile.chain = chain_of_row(p.terms);
  tile.sums_stride = p.sums_stride;
  tile.ahead = p.ahead;
  for (int64_t r = 0, rows = 0; r < p.num_rows; r += rows) {
    for (int64_t column = 0; column < p.num_columns; column += tile.num_columns) {
      const int64_t columns = p.num_columns - column;
      const CodeLoop loop = code_loop<V>(p.kind, p.arithmetic, p.num_rows - r, columns);
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

// ---- The table

template <class V>
constexpr CodeKernels make_code_kernels() {
  constexpr int rows = TileShape<V::size>::max_rows, lanes = V::size;
  constexpr int nibbles = DotProducts<NibbleCode>::vectors(rows) * lanes, bytes = DotProducts<SmallCode>::vectors(rows) * lanes,
                words = DotProducts<int16_t>::vectors(rows) * lanes;
  return {{{bytes, words}, {nibbles, words}},
          encode_rows<V>,
          project_codes<V>,
          encode_attention_row,
          gather_columns,
          multiply_attention_codes<V>,
          sizeof(UnsignedCode) == 1};
}

}  // namespace
}  // namespace mha
