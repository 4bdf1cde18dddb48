// Int4 weights whose codes are f16 on their way to floats, under any number of rows.
//
// (Measured on Zen 3 beside codes widened one vector at a time by integer operations: 0.75 of the time for 1 row, 0.78 for 2, 0.82 for 4,
// 0.88 for 8. A vector takes 3.1 vector operations instead of 4.5.)
#pragma once

#include "kernels/land.h"
#include "kernels/panels.h"

namespace mha {
namespace {

// ---- A few terms

// Terms from k, a multiple of 4, on, of which nothing is read beyond the panel's last.
template <class V>
MHA_INLINE void halves_of_terms(const StoredPanel &panel, int64_t k, int64_t depth, HalfCodes *to) {
  const Int4 *const codes = panel.at<Int4>(k);
  if (depth - k > 2) return halves_of<V>(codes, to);
  Int4 two_rows[2 * panel_columns] = {};
  __builtin_memcpy(two_rows, codes, panel_columns);
  halves_of<V>(two_rows, to);
}

// For those that come some time after the terms from k on.
MHA_INLINE void ask_for_codes(const StoredPanel &panel, int64_t k) {
  constexpr int64_t bytes_ahead = 4096;
  const unsigned char *const later = panel.at<unsigned char>(k) + bytes_ahead;
  __builtin_prefetch(later);
  __builtin_prefetch(later + 64);
}

// acc[r][i] += rows[r] * codes, for the vectors from `first` on, over terms [k, k + 4), no further than `end`.
template <class V, int R, int first, int C>
MHA_INLINE void multiply_halves(const RowPointers<R> &rows, int64_t k, int64_t end, const HalfCodes &codes, V (&acc)[R][C]) {
  MHA_UNROLL for (int term = 0; term < half_code_terms; ++term) {
    if (k + term >= end) break;
    const auto column = [&](int i) { return load<V>(codes.numbers + place_of_code(term, first + i)); };
    if constexpr (R * C + C < TileShape<V::size>::registers) {
      V columns[C];
      MHA_UNROLL for (int i = 0; i < C; ++i) columns[i] = held(column(i));
      MHA_UNROLL for (int r = 0; r < R; ++r) {
        const V multiplier = all<V>(rows.at(r, k + term));
        MHA_UNROLL for (int i = 0; i < C; ++i) acc[r][i] = mul_add(multiplier, columns[i], acc[r][i]);
      }
    } else {
      V multiplier[R];
      MHA_UNROLL for (int r = 0; r < R; ++r) multiplier[r] = all<V>(rows.at(r, k + term));
      MHA_UNROLL for (int i = 0; i < C; ++i) {
        const V passing = held(column(i));
        MHA_UNROLL for (int r = 0; r < R; ++r) acc[r][i] = mul_add(multiplier[r], passing, acc[r][i]);
      }
    }
  }
}

// sums += a group's results times their scales.
template <class V, int R, int C>
MHA_INLINE void add_scaled(const V (&acc)[R][C], const float *scales, float *sums) {
  MHA_UNROLL for (int i = 0; i < C; ++i) {
    const V scale = load<V>(scales + i * static_cast<int>(V::size));
    MHA_UNROLL for (int r = 0; r < R; ++r) {
      float *const sum = sums + r * panel_columns + i * static_cast<int>(V::size);
      store(sum, mul_add(acc[r][i], scale, load<V>(sum)));
    }
  }
}

// ---- One or two rows: what is widened is always a little ahead of what is multiplied with, so that neither waits for the other

template <class V, int R>
MHA_APART void multiply_codes_in_step(const StoredPanel &panel, const float *const *in, int64_t depth, float *sums) {
  constexpr int64_t ahead = 2 * half_code_terms, ring_size = 4;
  constexpr int C = panel_columns / V::size;
  RowPointers<R> rows;
  MHA_UNROLL for (int r = 0; r < R; ++r) rows.row[r] = in[r];
  HalfCodes ring[ring_size];
  const auto in_ring = [&](int64_t k) { return ring + static_cast<uint64_t>(k / half_code_terms) % ring_size; };
  for (int64_t k = 0; k < smaller(ahead, depth); k += half_code_terms) halves_of_terms<V>(panel, k, depth, in_ring(k));
  const float *scales = panel.scales;
  for (int64_t begin = 0; begin < depth; begin += int4_group, scales += panel_columns) {
    const int64_t end = smaller(depth, begin + int4_group);
    V acc[R][C];
    clear(acc);
    for (int64_t k = begin; k < end; k += half_code_terms) {
      ask_for_codes(panel, k);
      if (k + ahead < depth) halves_of_terms<V>(panel, k + ahead, depth, in_ring(k + ahead));
      multiply_halves<V, R, 0>(rows, k, end, *in_ring(k), acc);
    }
    add_scaled(acc, scales, forgotten(sums));
  }
}

// ---- Several rows: the terms of a group are widened once for all rows

constexpr int64_t group_blocks = int4_group / half_code_terms;

// A group's terms [begin, end) and R rows, for the vectors of columns from `first` on, some at a time.
template <class V, int R, int first>
MHA_INLINE void multiply_columns_of_codes(const RowPointers<R> &rows, int64_t begin, int64_t end, const HalfCodes *codes,
                                          const float *scales, float *sums) {
  constexpr int C = TileShape<V::size>::project_vectors(R), column = first * static_cast<int>(V::size);
  V acc[R][C];
  clear(acc);
  const HalfCodes *here = codes;
  for (int64_t k = begin; k < end; k += half_code_terms, ++here) multiply_halves<V, R, first>(rows, k, end, *here, acc);
  add_scaled(acc, scales + column, forgotten(sums) + column);
  if constexpr (column + C * static_cast<int>(V::size) < panel_columns)
    multiply_columns_of_codes<V, R, first + C>(rows, begin, end, codes, scales, sums);
}

// Tiles have 2, 4 or 6 rows: where there are fewer, the last one is computed twice, and its sums land in nobody's room.
template <class V, int R>
MHA_APART void multiply_tile_of_codes(const float *const *in, int64_t count, int64_t begin, int64_t end, const HalfCodes *codes,
                                      const float *scales, float *sums) {
  RowPointers<R> rows;
  MHA_UNROLL for (int r = 0; r < R; ++r) rows.row[r] = in[smaller(count - 1, r)];
  multiply_columns_of_codes<V, R, 0>(rows, begin, end, codes, scales, sums);
}

// sums [num_rows, and one more if they are odd][48] = the products with all terms.
template <class V>
MHA_APART void multiply_half_codes(const StoredPanel &panel, const float *const *in, int64_t num_rows, int64_t depth, float *sums) {
  constexpr int most = TileShape<V::size>::project_rows, even_rows = most - 2;
  for (int64_t i = 0; i < (num_rows + 1) / 2 * 2 * panel_columns; i += V::size) store(sums + i, all<V>(0.0f));
  if (num_rows == 1) return multiply_codes_in_step<V, 1>(panel, in, depth, sums);
  if (num_rows == 2) return multiply_codes_in_step<V, 2>(panel, in, depth, sums);
  const float *scales = panel.scales;
  HalfCodes codes[group_blocks];
  for (int64_t begin = 0; begin < depth; begin += int4_group, scales += panel_columns) {
    const int64_t end = smaller(depth, begin + int4_group);
    for (int64_t k = begin, n = 0; k < end; k += half_code_terms, ++n) {
      ask_for_codes(panel, k);
      halves_of_terms<V>(panel, k, depth, codes + n);
    }
    for (int64_t r = 0, size; r < num_rows; r += size) {
      const int64_t left = num_rows - r;
      size = left > most && left <= 2 * even_rows ? even_rows : smaller(left, most);
      float *const to = sums + r * panel_columns;
      if (size > even_rows)
        multiply_tile_of_codes<V, most>(in + r, size, begin, end, codes, scales, to);
      else if (size > 2)
        multiply_tile_of_codes<V, even_rows>(in + r, size, begin, end, codes, scales, to);
      else
        multiply_tile_of_codes<V, 2>(in + r, size, begin, end, codes, scales, to);
    }
  }
}

template <class V>
inline void project_half_codes(const Projection &p, const RowBlock &rows, int64_t panel) {
  alignas(64) float sums[(project_block_rows + RowBlock::spare) * panel_columns];
  const StoredPanel stored(p, panel);
  multiply_half_codes<V>(stored, rows.in, rows.count, p.depth, sums);
  finish_sums<V>(stored, rows.count, panel_columns, sums, panel_columns);
  land_everywhere<V>(p, rows.first, rows.count, sums, panel_columns, panel, 1);
}

}  // namespace
}  // namespace mha
