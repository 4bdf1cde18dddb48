// Codes of rows times numbers of int8 where they are stored, keys or values, with exact sums (CONTRACT.md, sections 7 and 8).
//
// Two terms of 16 columns are brought together in registers, and multiplied with the same two terms of a row by one instruction, which also
// adds the two products up.
#pragma once

#include "kernels/dot_products.h"
#include "kernels/tile.h"

namespace mha {
namespace {

// ---- Operations: 16 columns of two terms, in vectors of V::size, times two codes of a row

template <class V>
struct CodePairs;  // Part part[parts]

#if defined(MHA_KERNELS_AVX512)

template <>
struct CodePairs<Vector> {
  static constexpr int parts = 1;
  using Part = __m512i;
  Part part[parts];
};
using RowPair = __m512i;
using CodeSum = __m512i;
MHA_INLINE void load_pairs(const int8_t *p, int64_t stride, CodePairs<Vector> *w) {
  const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
  const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p + stride));
  const __m256i low = _mm256_castsi128_si256(_mm_unpacklo_epi8(first, second));
  w->part[0] = _mm512_cvtepi8_epi16(_mm256_inserti128_si256(low, _mm_unpackhi_epi8(first, second), 1));
}
MHA_INLINE RowPair load_row_pair(const int16_t *p) {
  int32_t two;
  __builtin_memcpy(&two, p, sizeof two);
  return _mm512_set1_epi32(two);
}
MHA_INLINE CodeSum no_code_sum() { return _mm512_setzero_si512(); }
MHA_INLINE CodeSum add_pair(CodeSum sum, __m512i w, RowPair x) { return added_in_place(sum, _mm512_madd_epi16(w, x)); }
MHA_INLINE Vector floats_of_codes(CodeSum sum) { return _mm512_cvtepi32_ps(sum); }

#elif defined(MHA_KERNELS_AVX2)

template <>
struct CodePairs<Vector> {
  static constexpr int parts = 2;
  using Part = __m256i;
  Part part[parts];
};
using RowPair = __m256i;
using CodeSum = __m256i;
MHA_INLINE void load_pairs(const int8_t *p, int64_t stride, CodePairs<Vector> *w) {
  const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
  const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p + stride));
  w->part[0] = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(first, second));
  w->part[1] = _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(first, second));
}
MHA_INLINE RowPair load_row_pair(const int16_t *p) {
  int32_t two;
  __builtin_memcpy(&two, p, sizeof two);
  return _mm256_set1_epi32(two);
}
MHA_INLINE CodeSum no_code_sum() { return _mm256_setzero_si256(); }
MHA_INLINE CodeSum add_pair(CodeSum sum, __m256i w, RowPair x) { return added_in_place(sum, _mm256_madd_epi16(w, x)); }
MHA_INLINE Vector floats_of_codes(CodeSum sum) { return _mm256_cvtepi32_ps(sum); }

#elif defined(MHA_KERNELS_NEON)

template <>
struct CodePairs<Vector> {
  static constexpr int parts = 4;
  struct Part {
    int16x4_t first, second;
  };
  Part part[parts];
};
struct RowPair {
  int16x4_t first, second;
};
using CodeSum = int32x4_t;
MHA_INLINE void load_pairs(const int8_t *p, int64_t stride, CodePairs<Vector> *w) {
  const int8x16_t first = vld1q_s8(p), second = vld1q_s8(p + stride);
  const int16x8_t widened[2][2] = {{vmovl_s8(vget_low_s8(first)), vmovl_s8(vget_low_s8(second))},
                                   {vmovl_s8(vget_high_s8(first)), vmovl_s8(vget_high_s8(second))}};
  MHA_UNROLL for (int i = 0; i < 2; ++i) {
    w->part[2 * i] = {vget_low_s16(widened[i][0]), vget_low_s16(widened[i][1])};
    w->part[2 * i + 1] = {vget_high_s16(widened[i][0]), vget_high_s16(widened[i][1])};
  }
}
MHA_INLINE RowPair load_row_pair(const int16_t *p) { return {vld1_dup_s16(p), vld1_dup_s16(p + 1)}; }
MHA_INLINE CodeSum no_code_sum() { return vdupq_n_s32(0); }
MHA_INLINE CodeSum add_pair(CodeSum sum, const CodePairs<Vector>::Part &w, const RowPair &x) {
  return vmlal_s16(vmlal_s16(sum, w.first, x.first), w.second, x.second);
}
MHA_INLINE Vector floats_of_codes(CodeSum sum) { return vcvtq_f32_s32(sum); }

#elif defined(MHA_KERNELS_SCALAR)

struct RowPair {
  int32_t first, second;
};
template <>
struct CodePairs<Vector> {
  static constexpr int parts = key_block;
  using Part = RowPair;
  Part part[parts];
};
using CodeSum = int32_t;
MHA_INLINE void load_pairs(const int8_t *p, int64_t stride, CodePairs<Vector> *w) {
  for (int i = 0; i < key_block; ++i) w->part[i] = {p[i], p[i + stride]};
}
MHA_INLINE RowPair load_row_pair(const int16_t *p) { return {p[0], p[1]}; }
MHA_INLINE CodeSum no_code_sum() { return 0; }
MHA_INLINE CodeSum add_pair(CodeSum sum, const RowPair &w, const RowPair &x) {
  return sum + w.first * x.first + w.second * x.second;
}
MHA_INLINE Vector floats_of_codes(CodeSum sum) { return {static_cast<float>(sum)}; }

#else
#error "write the products of codes of 16 bits for this instruction set"
#endif

// ---- Tiles

// As multiply of tile.h: the rows are codes of 16 bits, the columns numbers of int8, in blocks of 16. Terms come by twos: of an odd number
// the code behind the last one is 0, and its columns may be anything: behind a block of keys 16 bytes more are read, which the scales
// follow. Within a chain sums are exact; Sums::integers is for one chain only.
template <class V, int R, int B>
MHA_NOCLONE void multiply_stored_codes(const Tile &tile) {
  constexpr int parts = CodePairs<V>::parts, lanes = V::size;
  const int16_t *rows[R];
  const int8_t *columns[B];
  float *sums[B];
  MHA_UNROLL for (int r = 0; r < R; ++r) rows[r] = reinterpret_cast<const int16_t *>(tile.rows[r]);
  MHA_UNROLL for (int b = 0; b < B; ++b) {
    columns[b] = static_cast<const int8_t *>(tile.columns[b]);
    sums[b] = tile.sums[b];
  }
  const char *place = tile.prefetch.place, *later_place = place + 2 * tile.prefetch.apart;
  const int64_t step = tile.prefetch.step, apart = tile.prefetch.apart, terms = tile.terms, stride = tile.column_stride;
  const int64_t sums_stride = tile.sums_stride;
  for (int64_t repeat = 0; repeat < tile.repeats; ++repeat) {
    int64_t k = 0, at = 0;
    do {
      const int64_t begin = k, end = min(terms, k + tile.chain);
      CodeSum acc[R][B][parts];
      const auto for_each_sum = [&](auto visit) MHA_INLINED {
        MHA_UNROLL for (int r = 0; r < R; ++r) {
          MHA_UNROLL for (int b = 0; b < B; ++b) {
            MHA_UNROLL for (int i = 0; i < parts; ++i) visit(sums[b] + r * sums_stride + i * lanes, &acc[r][b][i]);
          }
        }
      };
      for_each_sum([](float *, CodeSum *sum) MHA_INLINED { *sum = no_code_sum(); });
      if (tile.mode == Sums::extend_integers) {
        for_each_sum([](float *from, CodeSum *sum) MHA_INLINED { __builtin_memcpy(sum, from, sizeof *sum); });
      }
      for (; k < end; k += 2, at += 2 * stride) {
        if constexpr (R <= max_rows_of_fewer_bits) {
          static_assert(prefetch_places(R, 1) == 4, "as many as here");
          __builtin_prefetch(place, 0, 2);
          __builtin_prefetch(place + apart, 0, 2);
          __builtin_prefetch(later_place, 0, 2);
          __builtin_prefetch(later_place + apart, 0, 2);
          place += step;
          later_place += step;
        }
        MHA_UNROLL for (int b = 0; b < B; ++b) {
          CodePairs<V> pairs;
          load_pairs(columns[b] + at, stride, &pairs);
          MHA_UNROLL for (int r = 0; r < R; ++r) {
            const RowPair x = load_row_pair(rows[r] + k);
            MHA_UNROLL for (int i = 0; i < parts; ++i) acc[r][b][i] = add_pair(acc[r][b][i], pairs.part[i], x);
          }
        }
      }
      if (tile.mode != Sums::replace) {
        for_each_sum([](float *to, CodeSum *sum) MHA_INLINED { __builtin_memcpy(to, sum, sizeof *sum); });
      } else if (begin == 0) {
        // All blocks before the first is stored: two may be the same one, and what is stored is not read again.
        for_each_sum([](float *to, CodeSum *sum) MHA_INLINED { store(to, floats_of_codes(*sum)); });
      } else {
        V before[R][B][parts];
        MHA_UNROLL for (int r = 0; r < R; ++r) {
          MHA_UNROLL for (int b = 0; b < B; ++b) {
            MHA_UNROLL for (int i = 0; i < parts; ++i) {
              before[r][b][i] = load<V>(sums[b] + r * sums_stride + i * lanes) + floats_of_codes(acc[r][b][i]);
            }
          }
        }
        MHA_UNROLL for (int r = 0; r < R; ++r) {
          MHA_UNROLL for (int b = 0; b < B; ++b) {
            MHA_UNROLL for (int i = 0; i < parts; ++i) store(sums[b] + r * sums_stride + i * lanes, before[r][b][i]);
          }
        }
      }
    } while (k < terms);
    MHA_UNROLL for (int b = 0; b < B; ++b) {
      columns[b] += tile.next_columns;
      sums[b] += tile.next_sums;
    }
    place += tile.prefetch.skip;
    later_place += tile.prefetch.skip;
  }
}

// Over blocks of 16 keys, those that are left with as many at once, or over the columns of values.
template <class V>
MHA_NOINLINE Loops loops_over_stored_codes(int64_t rows, bool are_keys) {
  Loops loops = {};
  visit_rows<TileShape<V::size>::attend_rows>(rows, [&](auto tile) MHA_INLINED {
    constexpr int R = decltype(tile)::count, B = R == 1 && V::size > 1 && !is_small_code ? 4 : 1;
    loops.narrow = {multiply_stored_codes<V, R, 1>, R, 1, key_block, 2};
    loops.wide = {multiply_stored_codes<V, R, B>, R, 1, B * key_block, 2};
    if (are_keys) loops.wide = loops.narrow = {multiply_stored_codes<V, R, B>, R, B, key_block, 2};
  });
  return loops;
}

// ---- Rows

// A row as codes, coded_row_floats(width) at most: chains of so many, each with its tail. x: is filled with zeros up to a multiple of 32.
// code_bytes: 2, or 1, those without their upper bytes. added: to the bytes of the columns. Returns the scale.
MHA_NOINLINE inline float encode_code_row(CodedRows kind, Arithmetic arithmetic, float *x, int64_t width, int64_t chain,
                                          int64_t code_bytes, int32_t added, float *to) {
  const bool are_queries = kind == CodedRows::queries;
  const int64_t count = code_count(width);
  __builtin_memset(x + width, 0, static_cast<size_t>(count - width) * sizeof *x);
  const CodeScale scale = code_scale_of(x, arithmetic == Arithmetic::int16 ? 32767 : are_queries ? 127 : 255, count);
  char *out = reinterpret_cast<char *>(to);
  for (int64_t k = 0; k < count; k += chain) {
    int16_t *const codes = reinterpret_cast<int16_t *>(out);
    const int32_t sum = encode(x + k, min(count - k, chain), scale, codes);
    const CodesTail tail = {are_queries ? 1.0f : scale.scale, sum * -added, {}};
    for (int64_t i = 0; code_bytes == 1 && i < min(count - k, chain); ++i) out[i] = static_cast<char>(codes[i]);
    out += chain * code_bytes;
    __builtin_memcpy(out, &tail, sizeof tail);
    out += sizeof tail;
  }
  return scale.scale;
}

}  // namespace
}  // namespace mha
