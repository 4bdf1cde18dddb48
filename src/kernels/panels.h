// Packed weights as they are stored: panels of 48 columns, of floats or of numbers of fewer bits.
#pragma once

#include "functions.h"
#include "tile.h"

namespace mha {
namespace {

// A panel as it is stored.
struct StoredPanel {
  Storage storage;
  int64_t bytes_of_two_terms;
  int64_t bytes;   // of all terms: the next panel is so far away
  int64_t groups;  // that have scales of their own
  const unsigned char *first;
  const float *scales, *bias;

  MHA_INLINE StoredPanel(const Projection &p, int64_t panel) : storage(p.storage) {
    const bool is_int4 = p.storage == Storage::int4;
    bytes_of_two_terms = panel_columns * (is_int4 ? 1 : p.storage == Storage::int8 ? 2 : p.storage == Storage::f32 ? 8 : 4);
    bytes = panel_bytes(p.depth, p.storage, p.arithmetic != Arithmetic::f32);
    groups = is_int4 ? (p.depth + int4_group - 1) / int4_group : 1;
    first = static_cast<const unsigned char *>(p.panels) + panel * bytes;
    scales = p.scales ? p.scales + panel * groups * panel_columns : nullptr;
    bias = p.bias + panel * panel_columns;
  }

  // The terms from k, an even number, on.
  template <class Element>
  MHA_INLINE const Element *at(int64_t k) const {
    return reinterpret_cast<const Element *>(first + k / 2 * bytes_of_two_terms);
  }
};

constexpr int64_t code_prefetch_bytes = 4096;  // so far ahead codes of int4 are prefetched

// Terms of int4, from an even one on, [term][48]; an odd last one brings a neighbour, which is nobody's.
template <class V>
inline void widen_codes(const Int4 *from, int64_t terms, float *to) {
  for (int64_t k = 0; k < terms; k += 2, from += panel_columns, to += 2 * panel_columns) {
    MHA_PREFETCH(reinterpret_cast<const char *>(from) + code_prefetch_bytes);
    for (int64_t i = 0; i < panel_columns; i += V::size) {
      const Two<V> codes = load<V>(from + i);
      store(to + i, codes.even);
      store(to + panel_columns + i, codes.odd);
    }
  }
}

#if defined(MHA_KERNELS_AVX2)
// The codes of two rows of bytes, which are four terms.
MHA_INLINE void halves_of_terms(const Int4 *from, F16 *to) {
  constexpr int64_t columns = panel_columns, half = 16;
  halves_of_codes(from, to, to + columns, half);
  // The last 16 columns of two terms, and the first 16 of the next two.
  halves_of_codes(from + 2 * half, to + 2 * half, to + columns + 2 * half, 2 * columns - 2 * half);
  halves_of_codes(from + 4 * half, to + 2 * columns + half, to + 3 * columns + half, half);
}

// Four at a time: behind the last term that is there come numbers that are nobody's, of the next panel or of the scales.
template <class V>
inline void widen_codes(const Int4 *from, int64_t terms, F16 *to) {
  for (int64_t k = 0; k < terms; k += 4, from += 2 * panel_columns, to += 4 * panel_columns) {
    MHA_PREFETCH(reinterpret_cast<const char *>(from) + code_prefetch_bytes);
    MHA_PREFETCH(reinterpret_cast<const char *>(from) + code_prefetch_bytes + 64);
    halves_of_terms(from, to);
  }
}
#endif

// What is left to do to the finished sums of columns, from those of a panel on: int8 has a scale, and all have a bias.
template <class V>
inline void finish_sums(const StoredPanel &panel, int64_t num_rows, int64_t num_columns, float *sums, int64_t stride) {
  constexpr int64_t lanes = V::size;
  for (int64_t r = 0; r < num_rows; ++r) {
    for (int64_t i = 0; i < num_columns; i += lanes) {
      float *const at = sums + r * stride + i;
      V y = load<V>(at);
      if (panel.storage == Storage::int8) y = y * load<V>(panel.scales + i);
      store(at, canonical(y + load<V>(panel.bias + i)));
    }
  }
}

}  // namespace
}  // namespace mha
