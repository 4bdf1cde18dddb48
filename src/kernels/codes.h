// Projections in integers: rows of codes of 16 bits times panels of codes of 8 bits, with exact sums (CONTRACT.md, section 4).
//
// For each panel, block of 256 terms and tile of rows: four terms of each column lie side by side in the panel, and are multiplied with the
// same four terms of a row by one instruction, which also adds products up by twos. Sums of 64 terms (32 of int4) become floats and are
// added, times their scales, to sums that lie in memory, [row][column of the panel].
#pragma once

#include "kernels/destinations.h"
#include "kernels/panels.h"
#include "kernels/rows.h"

namespace mha {
namespace {

// ---- Operations on V::size columns: four terms of each, widened to 16 bits, times four terms of a row. Sums are in several parts until
// sums_of adds these up.

template <class V>
struct Terms;  // part[parts]: of the weights
template <class V>
struct Sum;  // part[parts]

#if defined(MHA_KERNELS_AVX512) || defined(MHA_KERNELS_AVX2)
// Written out, since g++ would add to another register than that of the sum, for which there is none, and copy it back.
template <class Integers>
MHA_INLINE Integers added_in_place(Integers sum, Integers products) {
  __asm__("vpaddd {%1, %0, %0|%0, %0, %1}" : "+v"(sum) : "v"(products));
  return sum;
}
#endif

#if defined(MHA_KERNELS_AVX512)

template <>
struct Terms<Vector> {
  static constexpr int parts = 2;
  __m512i part[parts];
};
template <>
struct Sum<Vector> {
  __m512i part[2];
};
using RowTerms = __m512i;
MHA_INLINE void load_terms(const int8_t *p, Terms<Vector> *w) {
  MHA_UNROLL for (int i = 0; i < 2; ++i) w->part[i] = _mm512_cvtepi8_epi16(load_16x16(p + 32 * i));
}
MHA_INLINE RowTerms load_row_terms(const int16_t *p) {
  int64_t four;
  __builtin_memcpy(&four, p, sizeof four);
  return _mm512_set1_epi64(four);
}
MHA_INLINE __m512i add_products(__m512i sum, __m512i w, RowTerms x) { return added_in_place(sum, _mm512_madd_epi16(w, x)); }
MHA_INLINE __m512i no_sum() { return _mm512_setzero_si512(); }
MHA_INLINE Vector sums_of(const Sum<Vector> &s) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  return _mm512_cvtepi32_ps(
      _mm512_add_epi32(_mm512_permutex2var_epi32(s.part[0], even, s.part[1]), _mm512_permutex2var_epi32(s.part[0], odd, s.part[1])));
}

#elif defined(MHA_KERNELS_AVX2)

template <>
struct Terms<Vector> {
  static constexpr int parts = 2;
  __m256i part[parts];
};
template <>
struct Sum<Vector> {
  __m256i part[2];
};
using RowTerms = __m256i;
MHA_INLINE void load_terms(const int8_t *p, Terms<Vector> *w) {
  MHA_UNROLL for (int i = 0; i < 2; ++i) {
    w->part[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p + 16 * i)));
    __asm__("" : "+x"(w->part[i]));  // g++ would read and widen it once for each row
  }
}
MHA_INLINE RowTerms load_row_terms(const int16_t *p) {
  int64_t four;
  __builtin_memcpy(&four, p, sizeof four);
  return _mm256_set1_epi64x(four);
}
MHA_INLINE __m256i add_products(__m256i sum, __m256i w, RowTerms x) { return added_in_place(sum, _mm256_madd_epi16(w, x)); }
MHA_INLINE __m256i no_sum() { return _mm256_setzero_si256(); }
MHA_INLINE Vector sums_of(const Sum<Vector> &s) {
  return _mm256_cvtepi32_ps(_mm256_permute4x64_epi64(_mm256_hadd_epi32(s.part[0], s.part[1]), 0xd8));
}

#elif defined(MHA_KERNELS_NEON)

template <>
struct Terms<Vector> {
  static constexpr int parts = 4;
  int16x4_t part[parts];
};
template <>
struct Sum<Vector> {
  int32x4_t part[4];
};
using RowTerms = int16x4_t;
MHA_INLINE void load_terms(const int8_t *p, Terms<Vector> *w) {
  const int8x16_t codes = vld1q_s8(p);
  const int16x8_t low = vmovl_s8(vget_low_s8(codes)), high = vmovl_s8(vget_high_s8(codes));
  w->part[0] = vget_low_s16(low);
  w->part[1] = vget_high_s16(low);
  w->part[2] = vget_low_s16(high);
  w->part[3] = vget_high_s16(high);
}
MHA_INLINE RowTerms load_row_terms(const int16_t *p) { return vld1_s16(p); }
MHA_INLINE int32x4_t add_products(int32x4_t sum, int16x4_t w, RowTerms x) { return vmlal_s16(sum, w, x); }
MHA_INLINE int32x4_t no_sum() { return vdupq_n_s32(0); }
MHA_INLINE Vector sums_of(const Sum<Vector> &s) {
  return vcvtq_f32_s32(vpaddq_s32(vpaddq_s32(s.part[0], s.part[1]), vpaddq_s32(s.part[2], s.part[3])));
}

#elif defined(MHA_KERNELS_SCALAR)

struct FourTerms {
  int32_t of[4];
};
template <>
struct Terms<Vector> {
  static constexpr int parts = 1;
  FourTerms part[parts];
};
template <>
struct Sum<Vector> {
  int32_t part[1];
};
using RowTerms = FourTerms;
MHA_INLINE void load_terms(const int8_t *p, Terms<Vector> *w) { w->part[0] = {{p[0], p[1], p[2], p[3]}}; }
MHA_INLINE RowTerms load_row_terms(const int16_t *p) { return {{p[0], p[1], p[2], p[3]}}; }
MHA_INLINE int32_t add_products(int32_t sum, const FourTerms &w, const RowTerms &x) {
  for (int i = 0; i < 4; ++i) sum += w.of[i] * x.of[i];
  return sum;
}
MHA_INLINE int32_t no_sum() { return 0; }
MHA_INLINE Vector sums_of(const Sum<Vector> &s) { return {static_cast<float>(s.part[0])}; }

#else
#error "write the products of codes for this instruction set"
#endif

// ---- Tiles

// How many vectors of columns a tile of so many rows has; divides a panel. Products do not wait for each other: these are as many sums as
// there are registers for.
template <class V>
constexpr int code_vectors(int rows) {
  if (V::size == 16) return rows <= 2 ? 3 : 1;
  if (V::size > 1) return rows == 1 ? 6 : rows == 2 ? 3 : 1;
  return 4;
}

constexpr int64_t terms_together = 4;  // of a column, side by side
constexpr int64_t block_terms = dot_block;  // of a panel that stay in the cache while all rows pass them

struct CodeTile {
  const int16_t *rows[max_tile_rows];
  const float *row_scales[max_tile_rows];  // of each group of 64 terms
  const int8_t *columns;                   // [term / 4][48][4]
  int64_t terms, chain;                    // chain: terms that are added up before they are scaled
  const float *scales;                     // of the columns, for each chain; null: none
  float *sums;                             // [row][48]
  bool is_first;                           // whether the sums begin here, with +0
  int64_t ahead;                           // so many bytes ahead columns are prefetched: 0 where they lie in a cache
};

// sums[row][column] += the products of some terms.
template <class V, int R, int C>
MHA_NOCLONE void multiply_codes(const CodeTile &tile) {
  constexpr int parts = Terms<V>::parts, lanes = V::size;
  const int64_t ahead = tile.ahead;
  for (int64_t column = 0; column < panel_columns; column += C * lanes) {
    const int8_t *w = tile.columns + column * terms_together;
    const float *scales = tile.scales ? tile.scales + column : nullptr;
    const int16_t *rows[R];
    MHA_UNROLL for (int r = 0; r < R; ++r) rows[r] = tile.rows[r];
    for (int64_t k = 0; k < tile.terms; k += tile.chain) {
      const int64_t end = min(tile.terms, k + tile.chain);
      Sum<V> acc[R][C];
      MHA_UNROLL for (int r = 0; r < R; ++r) {
        MHA_UNROLL for (int c = 0; c < C; ++c) {
          MHA_UNROLL for (int i = 0; i < parts; ++i) acc[r][c].part[i] = no_sum();
        }
      }
      for (int64_t term = k; term < end; term += terms_together, w += terms_together * panel_columns) {
        __builtin_prefetch(w + ahead);
        if constexpr (R <= 2) {
          RowTerms x[R];
          MHA_UNROLL for (int r = 0; r < R; ++r) x[r] = load_row_terms(rows[r] + term);
          MHA_UNROLL for (int c = 0; c < C; ++c) {
            Terms<V> terms;
            load_terms(w + c * lanes * terms_together, &terms);
            MHA_UNROLL for (int i = 0; i < parts; ++i) {
              MHA_UNROLL for (int r = 0; r < R; ++r) acc[r][c].part[i] = add_products(acc[r][c].part[i], terms.part[i], x[r]);
            }
          }
        } else {
          Terms<V> terms[C];
          MHA_UNROLL for (int c = 0; c < C; ++c) load_terms(w + c * lanes * terms_together, &terms[c]);
          MHA_UNROLL for (int r = 0; r < R; ++r) {
            const RowTerms x = load_row_terms(rows[r] + term);
            MHA_UNROLL for (int c = 0; c < C; ++c) {
              MHA_UNROLL for (int i = 0; i < parts; ++i) acc[r][c].part[i] = add_products(acc[r][c].part[i], terms[c].part[i], x);
            }
          }
        }
      }
      const bool begins = k == 0 && tile.is_first;
      MHA_UNROLL for (int r = 0; r < R; ++r) {
        const V row_scale = all<V>(tile.row_scales[r][k / code_group]);
        MHA_UNROLL for (int c = 0; c < C; ++c) {
          float *const to = tile.sums + r * panel_columns + column + c * lanes;
          V sum = sums_of(acc[r][c]);
          if (scales) sum = sum * load<V>(scales + c * lanes);
          store(to, mul_add(sum, row_scale, load<V>(begins ? zeros : to)));
        }
      }
      if (scales) scales += panel_columns;
    }
  }
}

// int4: so many terms as codes of 8 bits.
MHA_NOINLINE inline void widen_nibbles(const unsigned char *from, int64_t terms, int8_t *to) {
  typedef unsigned char Bytes __attribute__((vector_size(16)));
  constexpr int64_t block = terms_together * panel_columns;
  for (int64_t k = 0; k < terms; k += 2 * terms_together, from += block, to += 2 * block) {
    for (int64_t i = 0; i < block; i += static_cast<int64_t>(sizeof(Bytes))) {
      __builtin_prefetch(from + i + code_prefetch_bytes);
      Bytes both;
      __builtin_memcpy(&both, from + i, sizeof both);
      const Bytes first = (both & 15) - 8, second = (both >> 4) - 8;
      __builtin_memcpy(to + i, &first, sizeof first);
      __builtin_memcpy(to + block + i, &second, sizeof second);
    }
  }
}

// `coded`: what encode_rows has made of the rows from row_begin on.
template <class V>
MHA_NOINLINE void project_codes(const Projection &p, const float *coded, int64_t row_begin, int64_t row_end, int64_t panel_begin,
                                int64_t panel_end) {
  constexpr int most = TileShape<V::size>::max_rows, spare = RowBlock::spare;
  alignas(64) float sums[(project_block_rows + spare) * panel_columns];
  alignas(64) int8_t widened[block_terms * panel_columns];
  const bool is_int4 = p.storage == Storage::int4;
  const int64_t count = row_end - row_begin, stride = coded_row_floats(p.depth), codes = coded_row_codes(p.depth);
  CodeTile tile;
  tile.chain = is_int4 ? int4_group : code_group;
  tile.ahead = is_int4 ? 0 : block_terms * panel_columns;  // the next block of the panel
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    const StoredPanel stored(p, panel);
    for (int64_t k = 0; k < p.depth; k += block_terms) {
      tile.terms = min(p.depth - k, block_terms);
      tile.is_first = k == 0;
      const unsigned char *const first = stored.first + k * panel_columns / (is_int4 ? 2 : 1);
      tile.columns = reinterpret_cast<const int8_t *>(first);
      tile.scales = nullptr;
      if (is_int4) {
        widen_nibbles(first, tile.terms, widened);
        tile.columns = widened;
        tile.scales = stored.scales + k / int4_group * panel_columns;
      }
      for (int64_t r = 0; r < count; r += most) {
        visit_rows<most>(count - r, [&](auto rows) MHA_INLINED {
          constexpr int R = decltype(rows)::count;
          for (int64_t i = 0; i < R; ++i) {  // where there are fewer, the last one again
            const float *const row = coded + min(r + i, count - 1) * stride;
            tile.rows[i] = reinterpret_cast<const int16_t *>(row) + k;
            tile.row_scales[i] = row + codes / 2 + k / code_group;
          }
          tile.sums = sums + r * panel_columns;
          multiply_codes<V, R, code_vectors<V>(R)>(tile);
        });
      }
    }
    finish_sums<V>(stored, count, min(panel_columns, p.columns - panel * panel_columns), sums, panel_columns);
    write_results<V>(p, row_begin, count, sums, panel_columns, panel, 1);
  }
}

// ---- Rows

// Input rows [row_begin, row_end) of a projection, one after the other: of each the codes, and then a scale for each 64 of them.
template <class V>
void encode_rows(const Projection &p, int64_t row_begin, int64_t row_end, float *to) {
  const InputRows &x = p.x;
  const int32_t most_code = p.arithmetic == Arithmetic::int8 ? 127 : 32767;
  const int64_t codes = coded_row_codes(p.depth);
  Cursor at = cursor_at(x, row_begin);
  for (int64_t row = row_begin; row < row_end; ++row, to += coded_row_floats(p.depth)) {
    const char *const from = element_at(x.base, x.storage, at.sequence * x.batch_stride + at.row * x.row_stride);
    for (int64_t k = 0; k < p.depth; k += code_group) {
      alignas(64) float group[code_group];
      const int64_t terms = min(code_group, p.depth - k);
      widen<V>(x.storage, element_at(from, x.storage, k), terms, group);
      __builtin_memset(group + terms, 0, static_cast<size_t>(code_group - terms) * sizeof(float));
      to[codes / 2 + k / code_group] = encode_group(group, most_code, reinterpret_cast<int16_t *>(to) + k);
    }
    advance(x, &at, 1, row + 1 < row_end);
  }
}

}  // namespace
}  // namespace mha
