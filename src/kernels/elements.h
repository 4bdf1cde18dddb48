// Stored numbers as vectors of floats, widened in registers: load<V>(p) for a pointer to each type of element.
#pragma once

#include "kernels/ops.h"
#include "storage.h"

namespace mha {
namespace {

struct F16 {
  uint16_t bits;
};

struct Bf16 {
  uint16_t bits;
};

// V::size neighbours. f16 and bf16 widen exactly (a NaN may become quiet), int8 to the number that it is.
template <class V>
MHA_INLINE V load(const F16 *p);
template <class V>
MHA_INLINE V load(const Bf16 *p);
template <class V>
MHA_INLINE V load(const int8_t *p);

template <>
MHA_INLINE Scalar load<Scalar>(const F16 *p) {
  return {f32_of_f16(p->bits)};
}
template <>
MHA_INLINE Scalar load<Scalar>(const Bf16 *p) {
  return {f32_of_bf16(p->bits)};
}
template <>
MHA_INLINE Scalar load<Scalar>(const int8_t *p) {
  return {static_cast<float>(*p)};
}

#if defined(MHA_KERNELS_AVX512)

MHA_INLINE __m256i load_16x16(const void *p) { return _mm256_loadu_si256(static_cast<const __m256i *>(p)); }

template <>
MHA_INLINE Vector load<Vector>(const F16 *p) {
  return _mm512_cvtph_ps(load_16x16(p));
}
template <>
MHA_INLINE Vector load<Vector>(const Bf16 *p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_16x16(p)), 16));
}
template <>
MHA_INLINE Vector load<Vector>(const int8_t *p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
}

#elif defined(MHA_KERNELS_AVX2)

MHA_INLINE __m128i load_8x16(const void *p) { return _mm_loadu_si128(static_cast<const __m128i *>(p)); }

template <>
MHA_INLINE Vector load<Vector>(const F16 *p) {
  return _mm256_cvtph_ps(load_8x16(p));
}
template <>
MHA_INLINE Vector load<Vector>(const Bf16 *p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_8x16(p)), 16));
}
template <>
MHA_INLINE Vector load<Vector>(const int8_t *p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
}

#elif defined(MHA_KERNELS_NEON)

template <>
MHA_INLINE Vector load<Vector>(const F16 *p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits)));
}
template <>
MHA_INLINE Vector load<Vector>(const Bf16 *p) {
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&p->bits), 16));
}
template <>
MHA_INLINE Vector load<Vector>(const int8_t *p) {
  uint32_t four;
  __builtin_memcpy(&four, p, sizeof four);
  const int16x8_t wide = vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(four)));
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
}

#endif

}  // namespace
}  // namespace mha
