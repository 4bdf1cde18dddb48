// Scores in integers: codes of queries times keys of int8, with exact sums (CONTRACT.md, section 7).
//
// Keys lie as they do for products of floats, 16 side by side. Two terms of each are brought together in registers, and multiplied with the
// same two terms of a query by one instruction, which also adds the two products up. (Keys that lie so in memory, by fours as weights do,
// take 1.1 to 1.2 times as long to be widened to floats; here there is next to nothing to gain by it, for the sums need no more steps.)
#pragma once

#include "kernels/dot_products.h"
#include "kernels/tile.h"

namespace mha {
namespace {

// ---- Operations: two terms of 16 keys, in vectors of V::size, times two terms of a query

template <class V>
struct KeyPairs;  // Part part[parts]

#if defined(MHA_KERNELS_AVX512)

template <>
struct KeyPairs<Vector> {
  static constexpr int parts = 1;
  __m512i part[parts];
};
using KeySum = __m512i;
using QueryPair = __m512i;
MHA_INLINE void load_pairs(const int8_t *p, KeyPairs<Vector> *w) {
  const __m256i by_keys = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15));
  const __m256i rows = _mm256_permute4x64_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)), 0xd8);
  w->part[0] = _mm512_cvtepi8_epi16(_mm256_shuffle_epi8(rows, by_keys));
}
MHA_INLINE QueryPair load_query_pair(const int16_t *p) {
  int32_t two;
  __builtin_memcpy(&two, p, sizeof two);
  return _mm512_set1_epi32(two);
}
MHA_INLINE KeySum no_key_sum() { return _mm512_setzero_si512(); }
MHA_INLINE KeySum add_pair(KeySum sum, __m512i w, QueryPair x) { return added_in_place(sum, _mm512_madd_epi16(w, x)); }
MHA_INLINE Vector floats_of(KeySum sum) { return _mm512_cvtepi32_ps(sum); }

#elif defined(MHA_KERNELS_AVX2)

template <>
struct KeyPairs<Vector> {
  static constexpr int parts = 2;
  __m256i part[parts];
};
using KeySum = __m256i;
using QueryPair = __m256i;
MHA_INLINE void load_pairs(const int8_t *p, KeyPairs<Vector> *w) {
  const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
  const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p + key_block));
  w->part[0] = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(first, second));
  w->part[1] = _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(first, second));
}
MHA_INLINE QueryPair load_query_pair(const int16_t *p) {
  int32_t two;
  __builtin_memcpy(&two, p, sizeof two);
  return _mm256_set1_epi32(two);
}
MHA_INLINE KeySum no_key_sum() { return _mm256_setzero_si256(); }
MHA_INLINE KeySum add_pair(KeySum sum, __m256i w, QueryPair x) { return added_in_place(sum, _mm256_madd_epi16(w, x)); }
MHA_INLINE Vector floats_of(KeySum sum) { return _mm256_cvtepi32_ps(sum); }

#elif defined(MHA_KERNELS_NEON)

template <>
struct KeyPairs<Vector> {
  static constexpr int parts = 4;
  struct {
    int16x4_t first, second;
  } part[parts];
};
using KeySum = int32x4_t;
struct QueryPair {
  int16x4_t first, second;
};
MHA_INLINE void load_pairs(const int8_t *p, KeyPairs<Vector> *w) {
  const int8x16_t first = vld1q_s8(p), second = vld1q_s8(p + key_block);
  const int16x8_t widened[2][2] = {{vmovl_s8(vget_low_s8(first)), vmovl_s8(vget_low_s8(second))},
                                   {vmovl_s8(vget_high_s8(first)), vmovl_s8(vget_high_s8(second))}};
  MHA_UNROLL for (int i = 0; i < 2; ++i) {
    w->part[2 * i] = {vget_low_s16(widened[i][0]), vget_low_s16(widened[i][1])};
    w->part[2 * i + 1] = {vget_high_s16(widened[i][0]), vget_high_s16(widened[i][1])};
  }
}
MHA_INLINE QueryPair load_query_pair(const int16_t *p) { return {vld1_dup_s16(p), vld1_dup_s16(p + 1)}; }
MHA_INLINE KeySum no_key_sum() { return vdupq_n_s32(0); }
template <class Part>
MHA_INLINE KeySum add_pair(KeySum sum, const Part &w, const QueryPair &x) {
  return vmlal_s16(vmlal_s16(sum, w.first, x.first), w.second, x.second);
}
MHA_INLINE Vector floats_of(KeySum sum) { return vcvtq_f32_s32(sum); }

#elif defined(MHA_KERNELS_SCALAR)

struct QueryPair {
  int32_t first, second;
};
template <>
struct KeyPairs<Vector> {
  static constexpr int parts = key_block;
  QueryPair part[parts];
};
using KeySum = int32_t;
MHA_INLINE void load_pairs(const int8_t *p, KeyPairs<Vector> *w) {
  for (int i = 0; i < key_block; ++i) w->part[i] = {p[i], p[i + key_block]};
}
MHA_INLINE QueryPair load_query_pair(const int16_t *p) { return {p[0], p[1]}; }
MHA_INLINE KeySum no_key_sum() { return 0; }
MHA_INLINE KeySum add_pair(KeySum sum, const QueryPair &w, const QueryPair &x) { return sum + w.first * x.first + w.second * x.second; }
MHA_INLINE Vector floats_of(KeySum sum) { return {static_cast<float>(sum)}; }

#else
#error "write the products of codes of queries and keys for this instruction set"
#endif

// ---- Tiles

// Blocks of 16 keys that a tile of so many rows takes at once. A sum does not wait long for the one before: few are enough.
template <class V>
constexpr int code_blocks(int rows) {
  return V::size == 16 ? (rows == 1 ? 4 : 2) : TileShape<V::size>::score_blocks(rows);
}

// As multiply of tile.h: the rows are codes of 16 bits, the columns keys of int8. Terms come by twos; that behind the last one has the code
// 0 in the rows, and any in the keys: behind a block whose width is odd 16 bytes more are read, which the scales follow. Sums are floats.
template <class V, int R, int B>
MHA_NOCLONE void multiply_key_codes(const Tile &tile) {
  constexpr int parts = KeyPairs<V>::parts, lanes = V::size;
  const int16_t *rows[R];
  const int8_t *columns[B];
  float *sums[B];
  MHA_UNROLL for (int r = 0; r < R; ++r) rows[r] = reinterpret_cast<const int16_t *>(tile.rows[r]);
  MHA_UNROLL for (int b = 0; b < B; ++b) {
    columns[b] = static_cast<const int8_t *>(tile.columns[b]);
    sums[b] = tile.sums[b];
  }
  const char *place = tile.prefetch.place;
  const int64_t step = tile.prefetch.step, apart = tile.prefetch.apart, terms = tile.terms;
  const auto prefetch = [&]() MHA_INLINED {
    __builtin_prefetch(place, 0, 2);
    if constexpr (prefetch_places(R, B) > 1) __builtin_prefetch(place + apart, 0, 2);
    if constexpr (prefetch_places(R, B) == 4) {
      __builtin_prefetch(place + 2 * apart, 0, 2);
      __builtin_prefetch(place + 3 * apart, 0, 2);
    }
    place += step;
  };
  for (int64_t repeat = 0; repeat < tile.repeats; ++repeat) {
    int64_t k = 0, at = 0;
    do {
      const int64_t begin = k, end = min(terms, k + tile.chain);
      KeySum acc[R][B][parts];
      MHA_UNROLL for (int r = 0; r < R; ++r) {
        MHA_UNROLL for (int b = 0; b < B; ++b) {
          MHA_UNROLL for (int i = 0; i < parts; ++i) acc[r][b][i] = no_key_sum();
        }
      }
      for (; k < end; k += 2, at += 2 * key_block) {
        if constexpr (R <= max_rows_of_fewer_bits) prefetch();
        if constexpr (R == 1) prefetch();
        if constexpr (R <= 2) {
          QueryPair x[R];
          MHA_UNROLL for (int r = 0; r < R; ++r) x[r] = load_query_pair(rows[r] + k);
          MHA_UNROLL for (int b = 0; b < B; ++b) {
            KeyPairs<V> keys;
            load_pairs(columns[b] + at, &keys);
            MHA_UNROLL for (int i = 0; i < parts; ++i) {
              MHA_UNROLL for (int r = 0; r < R; ++r) acc[r][b][i] = add_pair(acc[r][b][i], keys.part[i], x[r]);
            }
          }
        } else {
          KeyPairs<V> keys[B];
          MHA_UNROLL for (int b = 0; b < B; ++b) load_pairs(columns[b] + at, &keys[b]);
          MHA_UNROLL for (int r = 0; r < R; ++r) {
            const QueryPair x = load_query_pair(rows[r] + k);
            MHA_UNROLL for (int b = 0; b < B; ++b) {
              MHA_UNROLL for (int i = 0; i < parts; ++i) acc[r][b][i] = add_pair(acc[r][b][i], keys[b].part[i], x);
            }
          }
        }
      }
      MHA_UNROLL for (int r = 0; r < R; ++r) {
        V sum[B][parts];  // of all blocks before the first is stored: two may be the same one
        MHA_UNROLL for (int b = 0; b < B; ++b) {
          MHA_UNROLL for (int i = 0; i < parts; ++i) {
            sum[b][i] = floats_of(acc[r][b][i]);
            if (begin != 0) sum[b][i] = load<V>(sums[b] + r * tile.sums_stride + i * lanes) + sum[b][i];
          }
        }
        MHA_UNROLL for (int b = 0; b < B; ++b) {
          MHA_UNROLL for (int i = 0; i < parts; ++i) store(sums[b] + r * tile.sums_stride + i * lanes, sum[b][i]);
        }
      }
    } while (k < terms);
    MHA_UNROLL for (int b = 0; b < B; ++b) {
      columns[b] += tile.next_columns;
      sums[b] += tile.next_sums;
    }
    place += tile.prefetch.skip;
  }
}

// Over blocks of 16 keys of int8. Those that are left are computed with as many at once.
template <class V>
MHA_NOINLINE Loops loops_over_key_codes(int64_t rows) {
  Loops loops = {};
  visit_rows<TileShape<V::size>::attend_rows>(rows, [&](auto tile) MHA_INLINED {
    constexpr int R = decltype(tile)::count, B = code_blocks<V>(R);
    loops.wide = loops.narrow = {multiply_key_codes<V, R, B>, R, B, key_block, R == 1 ? 1u : 2u};
  });
  return loops;
}

// ---- Rows

// Codes of a row, behind which there is room for query_codes(width) numbers in all, and behind them its scale (CONTRACT.md, section 2).
MHA_NOINLINE inline void encode_query(float *x, int64_t width, Arithmetic arithmetic, float *to) {
  const int64_t count = query_codes(width);
  __builtin_memset(x + width, 0, static_cast<size_t>(count - width) * sizeof *x);
  const CodeScale scale = code_scale_of(x, arithmetic == Arithmetic::int8 ? 127 : 32767, count);
  encode(x, count, scale, reinterpret_cast<int16_t *>(to));
  to[count / 2] = scale.scale;
}

}  // namespace
}  // namespace mha
