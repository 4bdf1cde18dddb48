// Context in integers: codes of weights, the exps of scores times the scales of their values, times values of int8, with exact sums
// (CONTRACT.md, section 8).
#pragma once

#include "kernels/scores.h"

namespace mha {
namespace {

// o[r] = weights[r] times the values of some groups. A row of weights is the codes of a chunk and their scale or, where values are
// gathered, what encode_row makes. Behind the last key, bytes that nobody has written may be read, for which the codes are 0.
template <class V>
MHA_NOINLINE void add_value_codes(const Unit &unit, const Groups &values, Range groups, const float *weights, int64_t num_rows, float *o,
                                  const PrefetchSource &ahead) {
  const Attention &call = unit.call;
  const int64_t width = call.head_dim_v_padded;
  if (unit.gathers_values()) {
    if (groups.begin == groups.end) return;
    const uint8_t *const columns = static_cast<const uint8_t *>(values.at[groups.begin]);
    return call.codes->multiply({CodedRows::weights, call.options.context_arithmetic, weights, weight_floats, num_rows, columns,
                                 gathered_values_step(width), width, (groups.end - groups.begin) * key_block, o, width});
  }
  const Loops loops = loops_over_stored_codes<V>(num_rows, false);
  Tile tile;
  tile.column_stride = values.row_stride;
  tile.sums_stride = width;
  for (int64_t g = groups.begin, end; g < groups.end; g = end) {
    end = min(block_of(values.run_end[g]), groups.end);
    const bool is_ahead = ahead.has(g) && width >= loops.wide.columns;
    if (is_ahead) end = min(end, block_of(ahead.groups->run_end[g]));
    // In a tile with more rows than there are, the last ones are nobody's.
    for (int64_t r = 0; r < loops.wide.rows; ++r) tile.rows[r] = weights + r * weight_floats + g * key_block / 2;
    for (int64_t b = 0; b < block_of(loops.wide.columns); ++b) {
      tile.columns[b] = static_cast<const int8_t *>(values.at[g]) + b * key_block;
      tile.sums[b] = o + b * key_block;
    }
    tile.chain = chunk_keys;
    tile.terms = (end - g) * key_block;
    tile.mode = g > groups.begin ? Sums::extend_integers : Sums::integers;
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
      CodeSum sum;
      __builtin_memcpy(&sum, o + c, sizeof sum);
      store(o + c, floats_of_codes(sum) * scale);
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
MHA_NOINLINE void softmax_to_codes(const Unit &unit, const Groups &values, Range groups, Range keys, float scale_left, float *scores,
                                   float *m, float *l, float *to) {
  constexpr int lanes = V::size, vectors = key_block / lanes;
  const V none = all<V>(-infinity), zero = all<V>(0.0f), factor = all<V>(scale_left);
  alignas(64) float factors[chunk_keys];
  leave_out_edges<V>(groups, keys, scores);
  // Nothing of a key that takes no part may be touched, and not even be multiplied by 0.
  for (int64_t g = groups.begin; g < groups.end; ++g) {
    MHA_UNROLL for (int i = 0; i < vectors; ++i) {
      const int64_t key = g * key_block + i * lanes;
      store(factors + key, zero_if_equal(load<V>(scores + key) * factor, none, load<V>(values.scales[g] + i * lanes)));
    }
  }
  softmax<V>(groups, &keys, &scale_left, 1, scores, m, l);
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
    return;
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
}

}  // namespace
}  // namespace mha
