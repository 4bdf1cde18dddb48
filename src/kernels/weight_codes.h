// Context in integers: codes of weights, the exps of scores times the scales of their values, times values of int8, with exact sums
// (CONTRACT.md, section 8).
//
// Values are read where they are stored. The numbers of two of them are brought together in registers, and multiplied with the codes of
// their two weights by one instruction, which also adds the two products up.
#pragma once

#include "kernels/scores.h"

namespace mha {
namespace {

// ---- Operations: 16 columns of two values, in vectors of V::size, times two weights

template <class V>
struct ValuePairs;  // Part part[parts]

#if defined(MHA_KERNELS_AVX512)

template <>
struct ValuePairs<Vector> {
  static constexpr int parts = 1;
  using Part = __m512i;
  Part part[parts];
};
using WeightPair = __m512i;
using ColumnSum = __m512i;
MHA_INLINE void load_value_pairs(const int8_t *p, int64_t stride, ValuePairs<Vector> *w) {
  const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
  const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p + stride));
  const __m256i low = _mm256_castsi128_si256(_mm_unpacklo_epi8(first, second));
  w->part[0] = _mm512_cvtepi8_epi16(_mm256_inserti128_si256(low, _mm_unpackhi_epi8(first, second), 1));
}
MHA_INLINE WeightPair load_weight_pair(const int16_t *p) {
  int32_t two;
  __builtin_memcpy(&two, p, sizeof two);
  return _mm512_set1_epi32(two);
}
MHA_INLINE ColumnSum no_column_sum() { return _mm512_setzero_si512(); }
MHA_INLINE ColumnSum add_value_pair(ColumnSum sum, __m512i w, WeightPair x) { return added_in_place(sum, _mm512_madd_epi16(w, x)); }
MHA_INLINE Vector floats_of_sum(ColumnSum sum) { return _mm512_cvtepi32_ps(sum); }

#elif defined(MHA_KERNELS_AVX2)

template <>
struct ValuePairs<Vector> {
  static constexpr int parts = 2;
  using Part = __m256i;
  Part part[parts];
};
using WeightPair = __m256i;
using ColumnSum = __m256i;
MHA_INLINE void load_value_pairs(const int8_t *p, int64_t stride, ValuePairs<Vector> *w) {
  const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
  const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p + stride));
  w->part[0] = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(first, second));
  w->part[1] = _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(first, second));
}
MHA_INLINE WeightPair load_weight_pair(const int16_t *p) {
  int32_t two;
  __builtin_memcpy(&two, p, sizeof two);
  return _mm256_set1_epi32(two);
}
MHA_INLINE ColumnSum no_column_sum() { return _mm256_setzero_si256(); }
MHA_INLINE ColumnSum add_value_pair(ColumnSum sum, __m256i w, WeightPair x) { return added_in_place(sum, _mm256_madd_epi16(w, x)); }
MHA_INLINE Vector floats_of_sum(ColumnSum sum) { return _mm256_cvtepi32_ps(sum); }

#elif defined(MHA_KERNELS_NEON)

template <>
struct ValuePairs<Vector> {
  static constexpr int parts = 4;
  struct Part {
    int16x4_t first, second;
  };
  Part part[parts];
};
struct WeightPair {
  int16x4_t first, second;
};
using ColumnSum = int32x4_t;
MHA_INLINE void load_value_pairs(const int8_t *p, int64_t stride, ValuePairs<Vector> *w) {
  const int8x16_t first = vld1q_s8(p), second = vld1q_s8(p + stride);
  const int16x8_t widened[2][2] = {{vmovl_s8(vget_low_s8(first)), vmovl_s8(vget_low_s8(second))},
                                   {vmovl_s8(vget_high_s8(first)), vmovl_s8(vget_high_s8(second))}};
  MHA_UNROLL for (int i = 0; i < 2; ++i) {
    w->part[2 * i] = {vget_low_s16(widened[i][0]), vget_low_s16(widened[i][1])};
    w->part[2 * i + 1] = {vget_high_s16(widened[i][0]), vget_high_s16(widened[i][1])};
  }
}
MHA_INLINE WeightPair load_weight_pair(const int16_t *p) { return {vld1_dup_s16(p), vld1_dup_s16(p + 1)}; }
MHA_INLINE ColumnSum no_column_sum() { return vdupq_n_s32(0); }
MHA_INLINE ColumnSum add_value_pair(ColumnSum sum, const ValuePairs<Vector>::Part &w, const WeightPair &x) {
  return vmlal_s16(vmlal_s16(sum, w.first, x.first), w.second, x.second);
}
MHA_INLINE Vector floats_of_sum(ColumnSum sum) { return vcvtq_f32_s32(sum); }

#elif defined(MHA_KERNELS_SCALAR)

struct WeightPair {
  int32_t first, second;
};
template <>
struct ValuePairs<Vector> {
  static constexpr int parts = key_block;
  using Part = WeightPair;
  Part part[parts];
};
using ColumnSum = int32_t;
MHA_INLINE void load_value_pairs(const int8_t *p, int64_t stride, ValuePairs<Vector> *w) {
  for (int i = 0; i < key_block; ++i) w->part[i] = {p[i], p[i + stride]};
}
MHA_INLINE WeightPair load_weight_pair(const int16_t *p) { return {p[0], p[1]}; }
MHA_INLINE ColumnSum no_column_sum() { return 0; }
MHA_INLINE ColumnSum add_value_pair(ColumnSum sum, const WeightPair &w, const WeightPair &x) {
  return sum + w.first * x.first + w.second * x.second;
}
MHA_INLINE Vector floats_of_sum(ColumnSum sum) { return {static_cast<float>(sum)}; }

#else
#error "write the products of codes of weights and values for this instruction set"
#endif

// ---- Tiles

// As multiply of tile.h: the rows are codes of 16 bits, the columns numbers of values of int8, an even number of which are terms. Sums are
// integers, which further calls extend.
template <class V, int R, int B>
MHA_NOCLONE void multiply_value_codes(const Tile &tile) {
  constexpr int parts = ValuePairs<V>::parts, lanes = V::size;
  const int16_t *rows[R];
  MHA_UNROLL for (int r = 0; r < R; ++r) rows[r] = reinterpret_cast<const int16_t *>(tile.rows[r]);
  const int8_t *columns = static_cast<const int8_t *>(tile.columns[0]);
  float *sums = tile.sums[0];
  const char *place = tile.prefetch.place;
  const int64_t step = tile.prefetch.step, apart = tile.prefetch.apart, terms = tile.terms, stride = tile.column_stride;
  for (int64_t repeat = 0; repeat < tile.repeats; ++repeat) {
    ColumnSum acc[R][B][parts];
    const auto for_each_sum = [&](auto visit) MHA_INLINED {
      MHA_UNROLL for (int r = 0; r < R; ++r) {
        MHA_UNROLL for (int b = 0; b < B; ++b) {
          MHA_UNROLL for (int i = 0; i < parts; ++i) visit(sums + r * tile.sums_stride + b * key_block + i * lanes, &acc[r][b][i]);
        }
      }
    };
    for_each_sum([](float *, ColumnSum *sum) MHA_INLINED { *sum = no_column_sum(); });
    if (tile.mode == Sums::extend) {
      for_each_sum([](float *from, ColumnSum *sum) MHA_INLINED { __builtin_memcpy(sum, from, sizeof *sum); });
    }
    const int8_t *at = columns;
    for (int64_t k = 0; k < terms; k += 2, at += 2 * stride) {
      if constexpr (R <= max_rows_of_fewer_bits) {
        static_assert(prefetch_places(R, 1) == 4, "as many as here");
        for (int i = 0; i < 4; ++i) __builtin_prefetch(place + i * apart, 0, 2);
        place += step;
      }
      MHA_UNROLL for (int b = 0; b < B; ++b) {
        ValuePairs<V> values;
        load_value_pairs(at + b * key_block, stride, &values);
        MHA_UNROLL for (int r = 0; r < R; ++r) {
          const WeightPair x = load_weight_pair(rows[r] + k);
          MHA_UNROLL for (int i = 0; i < parts; ++i) acc[r][b][i] = add_value_pair(acc[r][b][i], values.part[i], x);
        }
      }
    }
    for_each_sum([](float *to, ColumnSum *sum) MHA_INLINED { __builtin_memcpy(to, sum, sizeof *sum); });
    columns += B * key_block;
    sums += B * key_block;
    place += tile.prefetch.skip;
  }
}

template <class V>
MHA_NOINLINE Loops loops_over_value_codes(int64_t rows) {
  Loops loops = {};
  visit_rows<is_small_code ? 1 : TileShape<V::size>::attend_rows>(rows, [&](auto tile) MHA_INLINED {
    constexpr int R = decltype(tile)::count, B = R == 1 && V::size > 1 && !is_small_code ? 4 : 1;
    loops.narrow = {multiply_value_codes<V, R, 1>, R, 1, key_block, 2};
    loops.wide = {multiply_value_codes<V, R, B>, R, 1, B * key_block, 2};
  });
  return loops;
}

// o[r] = weights[r] times the values of some groups. A row of weights is the codes of a chunk and their scale.
template <class V>
MHA_NOINLINE void add_value_codes(const Unit &unit, const Groups &values, Range groups, const float *weights, int64_t num_rows, float *o,
                                  const PrefetchSource &ahead) {
  const Attention &call = unit.call;
  const int64_t width = call.head_dim_v_padded;
  if (unit.gathers_values()) {
    if (groups.begin == groups.end) return;
    const uint8_t *const columns = static_cast<const uint8_t *>(values.at[groups.begin]);
    return call.codes->multiply({CodedRows::weights, call.options.context_arithmetic, weights, weight_floats, num_rows, columns,
                                 gathered_values_step(width), width, (groups.end - groups.begin) * key_block, o, width, 0});
  }
  for (int64_t r = 0; is_small_code && num_rows > 1 && r < num_rows; ++r) {
    add_value_codes<V>(unit, values, groups, weights + r * weight_floats, 1, o + r * width, no_prefetch_source);
  }
  if (is_small_code && num_rows > 1) return;
  const Loops loops = loops_over_value_codes<V>(num_rows);
  Tile tile;
  tile.column_stride = values.row_stride;
  tile.sums_stride = width;
  for (int64_t g = groups.begin, end; g < groups.end; g = end) {
    end = min(block_of(values.run_end[g]), groups.end);
    const bool is_ahead = ahead.has(g) && width >= loops.wide.columns;
    if (is_ahead) end = min(end, block_of(ahead.groups->run_end[g]));
    // In a tile with more rows than there are, the last ones are nobody's.
    for (int64_t r = 0; r < loops.wide.rows; ++r) tile.rows[r] = weights + r * weight_floats + g * key_block / 2;
    tile.columns[0] = values.at[g];
    tile.sums[0] = o;
    tile.terms = (end - g) * key_block;
    tile.mode = g > groups.begin ? Sums::extend : Sums::replace;
    tile.prefetch = no_prefetch(weights);
    if (is_ahead) {
      const int64_t bytes = ahead.bytes * (end - g);
      tile.prefetch = prefetch_stretch(ahead.at(g) + ahead.share * bytes, bytes, loops.wide, tile.terms, width / loops.wide.columns);
    }
    run_over_columns(loops, width, &tile, 1);
  }
  for (int64_t r = 0; r < num_rows; ++r, o += width) {
    const V scale = all<V>(weights[r * weight_floats + weight_codes / 2]);
    for (int64_t c = 0; c < width; c += V::size) {
      ColumnSum sum;
      __builtin_memcpy(&sum, o + c, sizeof sum);
      store(o + c, floats_of_sum(sum) * scale);
    }
  }
}

// ---- Rows

// 16 numbers from 0 on, times the factor, rounded.
#if defined(MHA_KERNELS_AVX512)
MHA_INLINE void store_weight_codes(const float *x, float factor, int16_t *codes) {
  const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), _mm512_set1_ps(factor)));
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(codes), _mm512_cvtepi32_epi16(rounded));
}
#elif defined(MHA_KERNELS_AVX2)
MHA_INLINE void store_weight_codes(const float *x, float factor, int16_t *codes) {
  const __m256i first = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), _mm256_set1_ps(factor)));
  const __m256i second = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8), _mm256_set1_ps(factor)));
  const __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32(first, second), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(codes), both);
}
#elif defined(MHA_KERNELS_NEON)
MHA_INLINE void store_weight_codes(const float *x, float factor, int16_t *codes) {
  MHA_UNROLL for (int i = 0; i < 16; i += 4) vst1_s16(codes + i, vmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + i), factor))));
}
#else
MHA_INLINE void store_weight_codes(const float *x, float factor, int16_t *codes) {
  for (int i = 0; i < 16; ++i) codes[i] = static_cast<int16_t>(storage::rounded(x[i] * factor));
}
#endif

// As softmax, of some groups of 16 keys; p times the scales of the values becomes codes, and their scale. A row that is not finite has a
// scale of NaN, and any codes.
template <class V>
MHA_NOINLINE float softmax_to_codes(const Unit &unit, const Groups &values, Range groups, float m, float *scores, float *to) {
  constexpr int lanes = V::size, vectors = key_block / lanes;
  const V none = all<V>(-infinity), zero = all<V>(0.0f);
  alignas(64) float factors[chunk_keys];
  // Nothing of a key that takes no part may be touched, and not even be multiplied by 0.
  for (int64_t g = groups.begin; g < groups.end; ++g) {
    MHA_UNROLL for (int i = 0; i < vectors; ++i) {
      const int64_t key = g * key_block + i * lanes;
      store(factors + key, zero_if_equal(load<V>(scores + key), none, load<V>(values.scales[g] + i * lanes)));
    }
  }
  const float l = softmax<V>(scores + groups.begin * key_block, groups.end - groups.begin, m);
  V most[vectors], zeros_or_nan[vectors];
  MHA_UNROLL for (int i = 0; i < vectors; ++i) most[i] = zeros_or_nan[i] = zero;
  for (int64_t g = groups.begin; g < groups.end; ++g) {
    MHA_UNROLL for (int i = 0; i < vectors; ++i) {
      const int64_t key = g * key_block + i * lanes;
      const V weight = load<V>(scores + key) * load<V>(factors + key);
      most[i] = max_of(weight, most[i]);
      zeros_or_nan[i] = zeros_or_nan[i] + weight * zero;
      store(scores + key, weight);
    }
  }
  if (unit.gathers_values()) {
    const int64_t first = groups.begin * key_block, count = (groups.end - groups.begin) * key_block;
    unit.call.codes->encode_row(CodedRows::weights, unit.call.options.context_arithmetic, scores + first, count, to);
    return l;
  }
  MHA_UNROLL for (int i = 1; i < vectors; ++i) most[0] = max_of(most[i], most[0]);
  const float greatest_weight = sum16(zeros_or_nan) == 0.0f ? max_of(Scalar{greatest(most[0])}, Scalar{0.0f}).x : __builtin_nanf("");
  const int32_t most_code = unit.call.options.context_arithmetic == Arithmetic::int8 ? 255 : 32767;
  const CodeScale scale = code_scale_of(bits_of(greatest_weight), most_code);
  int16_t *const codes = reinterpret_cast<int16_t *>(to);
  for (int64_t key = groups.begin * key_block; key < groups.end * key_block; key += key_block) {
    store_weight_codes(scores + key, scale.factor, codes + key);
  }
  to[weight_codes / 2] = scale.scale;
  return l;
}

}  // namespace
}  // namespace mha
