// One number at a time, in plain C++.
#pragma once

#define MHA_KERNELS_SCALAR

#include "dot_products.h"

namespace mha {
namespace {

using Vector = Scalar;

// The scalar kernels take 4 rows times 4 columns, which compilers may make vectors of.
template <>
struct TileShape<1> {
  static constexpr int registers = 32;
  static constexpr int max_rows = 4, attend_rows = 2, exp_vectors = 16;
  static constexpr int panels_at_once(int64_t) { return 1; }
  static constexpr int project_vectors(int) { return 4; }
  static constexpr int key_tiles(int) { return 1; }
  static constexpr int context_vectors(int) { return 4; }
  static constexpr bool has_few_row_forms = false;
};

MHA_INLINE float sum16(const Scalar (&t)[16]) {
  float s[8];
  for (int i = 0; i < 8; ++i) s[i] = t[i].x + t[i + 8].x;
  for (int i = 0; i < 4; ++i) s[i] = s[i] + s[i + 4];
  for (int i = 0; i < 2; ++i) s[i] = s[i] + s[i + 2];
  return s[0] + s[1];
}

MHA_INLINE void store_first(float *p, Scalar x, int64_t count) {
  if (count > 0) *p = x.x;
}
MHA_INLINE float greatest(Scalar v) { return v.x; }

MHA_INLINE void transpose4x4(const float *row0, const float *row1, const float *row2,
                             const float *row3, float *out, int64_t out_stride) {
  const float *const rows[] = {row0, row1, row2, row3};
  for (int r = 0; r < 4; ++r)
    for (int c = 0; c < 4; ++c) out[c * out_stride + r] = canonical_nan(rows[r][c]);
}

template <int h>
MHA_INLINE Scalar swapped(Scalar x) {
  return x;
}

// ---- Products of codes

// One number at a time.
template <>
struct DotProducts<int16_t> {
  static constexpr int passes = 1, lanes_of_sum = 1;
  static constexpr bool swaps_codes = false;
  static constexpr int32_t load_adds = 0;
  static constexpr int vectors(int) { return 4; }
  struct Four {
    int32_t of[4];
  };
  using Sum = int32_t;
  using Terms = Four;
  using RowTerms = Four;

  static MHA_INLINE Terms load_terms(const uint8_t *p, int) { return {{p[0], p[1], p[2], p[3]}}; }
  static MHA_INLINE Terms load_nibbles(const uint8_t *p, int four, int) {
    const int shift = 4 * four;
    return {{p[0] >> shift & 15, p[1] >> shift & 15, p[2] >> shift & 15, p[3] >> shift & 15}};
  }
  static MHA_INLINE RowTerms load_row_terms(const int16_t *p, int) {
    return {{p[0], p[1], p[2], p[3]}};
  }
  static MHA_INLINE Sum begin(int32_t value) { return value; }
  static MHA_INLINE Sum add(Sum sum, const Terms &w, const RowTerms &x) {
    for (int i = 0; i < 4; ++i)
      sum = static_cast<int32_t>(static_cast<uint32_t>(sum) +
                                 static_cast<uint32_t>(w.of[i] * x.of[i]));
    return sum;
  }
  static MHA_INLINE Vector sums_of(Sum s) { return {static_cast<float>(s)}; }
};

}  // namespace
}  // namespace mha
