// Packed weights as they are stored: panels of 48 columns, of floats or of numbers of fewer bits; how int4 is multiplied by.
#pragma once

#include "kernels/functions.h"
#include "kernels/tile.h"

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
    bytes = (is_int4 ? p.depth + p.depth % 2 : p.depth) * bytes_of_two_terms / 2;
    groups = is_int4 ? (p.depth + int4_group - 1) / int4_group : 1;
    first = static_cast<const unsigned char *>(p.panels) + panel * bytes;
    scales = p.scales ? p.scales + panel * groups * panel_columns : nullptr;
    bias = p.bias + panel * panel_columns;
  }

  // In elements.
  template <class Element>
  MHA_INLINE int64_t panel_stride() const {
    return bytes / static_cast<int64_t>(sizeof(Element));
  }

  // The terms from k, an even number, on.
  template <class Element>
  MHA_INLINE const Element *at(int64_t k) const {
    return reinterpret_cast<const Element *>(first + k / 2 * bytes_of_two_terms);
  }
};

// Asks for the bytes that a loop over P panels will come to later, `p` being those of its first step.
template <int bytes_per_step, int P>
struct PrefetchStored {
  const unsigned char *p;
  int64_t panel_bytes;
  MHA_INLINE void step(int64_t k) const {
    MHA_UNROLL for (int i = 0; i < P; ++i) {
      MHA_UNROLL for (int at = 0; at < bytes_per_step; at += 64) {
        __builtin_prefetch(p + i * panel_bytes + k * bytes_per_step + at, 0, 3);
      }
    }
  }
};

// Stored numbers as floats; codes without their scales.
template <class V, class Element>
MHA_INLINE void widen_numbers(const Element *from, int64_t count, float *to) {
  constexpr int64_t lanes = V::size;
  for (int64_t i = 0; i < count; i += lanes) store(to + i, load<V>(from + i));
}

template <class V>
inline void widen_codes(const Int4 *from, int64_t terms, float *to) {
  constexpr int64_t lanes = V::size;
  for (int64_t k = 0; k < terms; k += 2, from += panel_columns, to += 2 * panel_columns) {
    for (int64_t i = 0; i < panel_columns; i += lanes) {
      const Two<V> codes = load<V>(from + i);
      store(to + i, codes.even);
      store(to + panel_columns + i, codes.odd);
    }
  }
}

// Up to 256 terms of a panel, from k on. `to` has room for an even number of them.
template <class V>
inline void widen(const StoredPanel &panel, int64_t k, int64_t terms, float *to) {
  const int64_t count = terms * panel_columns;
  switch (panel.storage) {
    case Storage::f16:
      return widen_numbers<V>(panel.at<F16>(k), count, to);
    case Storage::bf16:
      return widen_numbers<V>(panel.at<Bf16>(k), count, to);
    case Storage::int8:
      return widen_numbers<V>(panel.at<int8_t>(k), count, to);
    case Storage::int4:  // half codes do not come here
      if constexpr (!has_half_codes<V>) widen_codes<V>(panel.at<Int4>(k), terms, to);
      return;
    case Storage::f32:
      return;
  }
}

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

// acc[r][i] += rows[r] * codes over an int4 group, as they are stored or widened.
template <int R, int N, int C, class V, class Ahead>
MHA_INLINE void accumulate_group(const RowPointers<R> &rows, ColumnsOf<Int4> columns, int64_t begin, int64_t end, V (&acc)[R][N],
                                 Ahead ahead) {
  const Int4 *w = columns.w;
  const auto two = [&](int i) { return load<V>(w + i / C * columns.block_stride + i % C * V::size); };
  int64_t k = begin;
  for (; k + 2 <= end; k += 2, w += columns.k_stride) {
    ahead.step((k - begin) / 2);
    if constexpr (R == 1) {  // the accumulators fill the registers
      const V even = all<V>(rows.at(0, k)), odd = all<V>(rows.at(0, k + 1));
      MHA_UNROLL for (int i = 0; i < N; ++i) {
        const Two<V> codes = two(i);
        acc[0][i] = mul_add(odd, codes.odd, mul_add(even, codes.even, acc[0][i]));
      }
    } else {
      Two<V> codes[N];
      MHA_UNROLL for (int i = 0; i < N; ++i) codes[i] = two(i);
      MHA_UNROLL for (int r = 0; r < R; ++r) {
        const V even = all<V>(rows.at(r, k));
        MHA_UNROLL for (int i = 0; i < N; ++i) acc[r][i] = mul_add(even, codes[i].even, acc[r][i]);
      }
      MHA_UNROLL for (int r = 0; r < R; ++r) {
        const V odd = all<V>(rows.at(r, k + 1));
        MHA_UNROLL for (int i = 0; i < N; ++i) acc[r][i] = mul_add(odd, codes[i].odd, acc[r][i]);
      }
    }
  }
  if (k < end) {
    MHA_UNROLL for (int i = 0; i < N; ++i) {
      const V even = two(i).even;
      MHA_UNROLL for (int r = 0; r < R; ++r) acc[r][i] = mul_add(all<V>(rows.at(r, k)), even, acc[r][i]);
    }
  }
}

template <int R, int N, int C, class V, class Ahead>
MHA_INLINE void accumulate_group(const RowPointers<R> &rows, Columns columns, int64_t begin, int64_t end, V (&acc)[R][N], Ahead ahead) {
  accumulate<R, N, C>(rows, columns, begin, end, acc, ahead);
}

// Terms [begin, end) of int4 weights, group by group, for N vectors in blocks of C: the groups' results times their scales add up in
// `sums`.
template <int R, int N, int C, class V, class Element, class MakeAhead>
MHA_INLINE void multiply_groups(const RowPointers<R> &rows, int64_t begin, int64_t end, ColumnsOf<Element> columns, int64_t group_stride,
                                ColumnsOf<float> scales, float *sums, int64_t sums_stride, MakeAhead make_ahead) {
  for (int64_t k = begin; k < end; k += int4_group, columns.w += group_stride, scales.w += scales.k_stride) {
    V acc[R][N];
    clear(acc);
    accumulate_group<R, N, C>(rows, columns, k, smaller(end, k + int4_group), acc, make_ahead(columns.w));
    sums = forgotten(sums);
    MHA_UNROLL for (int i = 0; i < N; ++i) {
      const V scale = load<V>(scales.w + i / C * scales.block_stride + i % C * V::size);
      MHA_UNROLL for (int r = 0; r < R; ++r) {
        float *const sum = sums + r * sums_stride + i * static_cast<int>(V::size);
        store(sum, mul_add(acc[r][i], scale, load<V>(sum)));
      }
    }
  }
}

}  // namespace
}  // namespace mha
