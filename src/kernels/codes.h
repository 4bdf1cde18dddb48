// Projections in integers: rows of codes times panels of codes, with exact sums (CONTRACT.md, section 4).
//
// For each panel, block of 256 terms and tile of rows: four terms of each column lie side by side in the panel, and are multiplied with the
// same four terms of a row by one instruction, which also adds up products. Sums of 64 terms (32 of int4) become floats and are added,
// times their scales, to sums that lie in memory, [row][column of the panel].
#pragma once

#include "kernels/destinations.h"
#include "kernels/dot_products.h"
#include "kernels/panels.h"
#include "kernels/rows.h"

namespace mha {
namespace {

// ---- Tiles

// Up to so many rows, codes of int4 become bytes in registers, by each tile anew; for more rows, in memory, once for all.
constexpr int max_rows_of_nibbles = 2;

// How many vectors of columns a tile of so many rows has; divides a panel. These are as many sums as there are registers for; where a sum
// has one part, each instruction adds four products to it.
template <class V, class Code>
constexpr int code_vectors(int rows) {
  if (V::size == 1) return 4;
  if (DotProducts<Code>::parts > 1) return rows > 2 ? 1 : V::size == 16 || rows == 2 ? 3 : 6;
  if (V::size == 8) return rows <= 2 ? 6 : rows <= 4 ? 3 : 2;
  return V::size == 4 && rows <= 4 ? 6 : V::size == 4 ? 4 : 3;
}

constexpr int64_t block_terms = dot_block;  // of a panel that stay in the cache while all rows pass them

struct CodeTile {
  const char *rows[max_tile_rows];  // as storage.h says, by chains
  const uint8_t *columns;           // [term / 4][48][4]
  int64_t terms, chain;             // chain: terms that are added up before they are scaled
  const float *scales;              // of the columns, for each chain; null: none
  float *sums;    // [row][48]
  bool is_first;  // whether the sums begin here, with +0
  int64_t ahead;  // so many bytes ahead columns are prefetched: 0 where they lie in a cache
};

// sums[row][column] += the products of some terms.
template <class V, class Code, bool are_nibbles, int R, int C>
MHA_NOCLONE void multiply_codes(const CodeTile &tile) {
  using Dots = DotProducts<Code>;
  constexpr int parts = Dots::parts, lanes = V::size, fours = are_nibbles ? 2 : 1;  // fours: of terms, in the bytes of one step
  constexpr int64_t step = terms_together * panel_columns, row_step = terms_together * static_cast<int64_t>(sizeof(Code));
  const int64_t ahead = tile.ahead, codes_bytes = tile.chain * static_cast<int64_t>(sizeof(Code));
  const char *rows[R];
  MHA_UNROLL for (int r = 0; r < R; ++r) rows[r] = tile.rows[r];
  for (int64_t column = 0; column < panel_columns; column += C * lanes) {
    const uint8_t *w = tile.columns + column * terms_together;
    const float *scales = tile.scales ? tile.scales + column : nullptr, *from = tile.is_first ? zeros : tile.sums + column;
    float *const to = tile.sums + column;
    int64_t from_stride = tile.is_first ? 0 : panel_columns, tail = codes_bytes;
    for (int64_t left = tile.terms; left > 0; left -= tile.chain, tail += codes_bytes + static_cast<int64_t>(sizeof(CodesTail))) {
      const auto tail_of = [&](int r) MHA_INLINED -> const CodesTail & { return *reinterpret_cast<const CodesTail *>(rows[r] + tail); };
      typename Dots::Sum acc[R][C];
      MHA_UNROLL for (int r = 0; r < R; ++r) {
        const auto begin = Dots::begin(tail_of(r).begin);
        MHA_UNROLL for (int c = 0; c < C; ++c) {
          MHA_UNROLL for (int i = 0; i < parts; ++i) acc[r][c].part[i] = begin;
        }
      }
      int64_t at = tail - codes_bytes;
      const int64_t end = at + min(left, tile.chain) * static_cast<int64_t>(sizeof(Code));
      for (; at < end; at += fours * row_step, w += step) {
        const auto row_terms = [&](int r, int four) MHA_INLINED {
          return Dots::load_row_terms(reinterpret_cast<const Code *>(rows[r] + at + four * row_step));
        };
        const auto terms_of = [&](typename Dots::Terms terms, int four) MHA_INLINED {
          if constexpr (are_nibbles) {
            MHA_UNROLL for (int i = 0; i < parts; ++i) {
              terms.part[i] = four == 0 ? Dots::low_nibbles(terms.part[i]) : Dots::high_nibbles(terms.part[i]);
            }
          }
          return terms;
        };
        MHA_UNROLL for (int line = 0; line < C * lanes * terms_together; line += 64) __builtin_prefetch(w + ahead + line);
        if constexpr (R <= 2 || (R == 4 && parts == 1 && V::size == 16)) {
          typename Dots::RowTerms x[R][fours];
          MHA_UNROLL for (int r = 0; r < R; ++r) {
            MHA_UNROLL for (int four = 0; four < fours; ++four) x[r][four] = row_terms(r, four);
          }
          MHA_UNROLL for (int c = 0; c < C; ++c) {
            const typename Dots::Terms bytes = Dots::load_terms(w + c * lanes * terms_together);
            MHA_UNROLL for (int four = 0; four < fours; ++four) {
              const typename Dots::Terms terms = terms_of(bytes, four);
              MHA_UNROLL for (int i = 0; i < parts; ++i) {
                MHA_UNROLL for (int r = 0; r < R; ++r) acc[r][c].part[i] = Dots::add(acc[r][c].part[i], terms.part[i], x[r][four]);
              }
            }
          }
        } else {
          static_assert(!are_nibbles, "one four of terms in each step");
          typename Dots::Terms terms[C];
          MHA_UNROLL for (int c = 0; c < C; ++c) terms[c] = Dots::load_terms(w + c * lanes * terms_together);
          MHA_UNROLL for (int r = 0; r < R; ++r) {
            const typename Dots::RowTerms x = row_terms(r, 0);
            MHA_UNROLL for (int c = 0; c < C; ++c) {
              MHA_UNROLL for (int i = 0; i < parts; ++i) acc[r][c].part[i] = Dots::add(acc[r][c].part[i], terms[c].part[i], x);
            }
          }
        }
      }
      const auto finish = [&](bool is_scaled) MHA_INLINED {
        MHA_UNROLL for (int r = 0; r < R; ++r) {
          const V row_scale = all<V>(tail_of(r).scale);
          MHA_UNROLL for (int c = 0; c < C; ++c) {
            V sum = Dots::sums_of(acc[r][c]);
            if (is_scaled) sum = sum * load<V>(scales + c * lanes);
            store(to + r * panel_columns + c * lanes, mul_add(sum, row_scale, load<V>(from + r * from_stride + c * lanes)));
          }
        }
      };
      if (tile.scales) {
        finish(true);
        scales += panel_columns;
      } else {
        finish(false);
      }
      from = to;
      from_stride = panel_columns;
    }
  }
}

// int4: so many terms as bytes, still 8 greater than the codes.
MHA_NOINLINE inline void widen_nibbles(const unsigned char *from, int64_t terms, uint8_t *to) {
  typedef unsigned char Bytes __attribute__((vector_size(16)));
  constexpr int64_t block = terms_together * panel_columns;
  for (int64_t k = 0; k < terms; k += 2 * terms_together, from += block, to += 2 * block) {
    for (int64_t i = 0; i < block; i += static_cast<int64_t>(sizeof(Bytes))) {
      __builtin_prefetch(from + i + code_prefetch_bytes);
      Bytes both;
      __builtin_memcpy(&both, from + i, sizeof both);
      const Bytes first = both & 15, second = both >> 4;
      __builtin_memcpy(to + i, &first, sizeof first);
      __builtin_memcpy(to + block + i, &second, sizeof second);
    }
  }
}

template <class V, class Code>
MHA_NOINLINE void project_codes_of(const Projection &p, const char *coded, int64_t row_begin, int64_t row_end, int64_t panel_begin,
                                   int64_t panel_end) {
  constexpr int most = TileShape<V::size>::max_rows, spare = RowBlock::spare;
  alignas(64) float sums[(project_block_rows + spare) * panel_columns];
  alignas(64) uint8_t widened[block_terms * panel_columns];
  const bool is_int4 = p.storage == Storage::int4;
  const int64_t count = row_end - row_begin, row_bytes = coded_bytes<Code>(p.storage, p.depth), codes_in_byte = is_int4 ? 2 : 1;
  const bool is_widened = is_int4 && count > max_rows_of_nibbles;
  CodeTile tile;
  tile.chain = terms_of_chain(p.storage);
  tile.scales = nullptr;
  tile.ahead = is_widened ? 0 : block_terms * panel_columns / codes_in_byte;  // the next block of the panel
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    const StoredPanel stored(p, panel);
    for (int64_t k = 0; k < p.depth; k += block_terms) {
      tile.terms = min(p.depth - k, block_terms);
      tile.is_first = k == 0;
      tile.columns = stored.first + k * panel_columns / codes_in_byte;
      if (is_int4) tile.scales = stored.scales + k / int4_group * panel_columns;
      if (is_widened) {
        widen_nibbles(tile.columns, tile.terms, widened);
        tile.columns = widened;
      }
      for (int64_t r = 0; r < count; r += most) {
        visit_rows<most>(count - r, [&](auto rows) MHA_INLINED {
          constexpr int R = decltype(rows)::count;
          const char *const first = coded + coded_bytes<Code>(p.storage, k);
          // Where there are fewer, the last one again.
          for (int64_t i = 0; i < R; ++i) tile.rows[i] = first + min(r + i, count - 1) * row_bytes;
          tile.sums = sums + r * panel_columns;
          constexpr int C = code_vectors<V, Code>(R);
          if constexpr (R <= max_rows_of_nibbles) {
            if (is_int4 && !is_widened) return multiply_codes<V, Code, true, R, C>(tile);
          }
          multiply_codes<V, Code, false, R, C>(tile);
        });
      }
    }
    finish_sums<V>(stored, count, min(panel_columns, p.columns - panel * panel_columns), sums, panel_columns);
    write_results<V>(p, row_begin, count, sums, panel_columns, panel, 1);
  }
}

// ---- Rows

template <class V, class Code>
MHA_NOINLINE void encode_rows_as(const Projection &p, int64_t row_begin, int64_t row_end, char *to) {
  const InputRows &x = p.x;
  const int32_t most_code = p.arithmetic == Arithmetic::int8 ? 127 : 32767, added = p.storage == Storage::int8 ? byte_added : nibble_added;
  const int64_t chain = terms_of_chain(p.storage);
  Cursor at = cursor_at(x, row_begin);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const char *const from = element_at(x.base, x.storage, at.sequence * x.batch_stride + at.row * x.row_stride);
    for (int64_t k = 0; k < p.depth; k += code_group) {
      alignas(64) float group[code_group];
      const int64_t terms = min(code_group, p.depth - k);
      widen<V>(x.storage, element_at(from, x.storage, k), terms, group);
      __builtin_memset(group + terms, 0, static_cast<size_t>(code_group - terms) * sizeof(float));
      const CodeScale scale = code_scale_of(group, most_code);
      for (int64_t i = 0; i < code_group; i += chain) {
        Code *const codes = reinterpret_cast<Code *>(to);
        const CodesTail tail = {scale.scale, begin_of<Code>(encode(group + i, chain, scale, codes), added), {}};
        __builtin_memcpy(codes + chain, &tail, sizeof tail);
        to += chain * static_cast<int64_t>(sizeof(Code)) + static_cast<int64_t>(sizeof tail);
      }
    }
    advance(x, &at, 1, row + 1 < row_end);
  }
}

// ---- Either arithmetic

// visit(a code as those of this arithmetic are stored)
template <class Visit>
MHA_INLINE void visit_code(Arithmetic arithmetic, Visit visit) {
  if (arithmetic == Arithmetic::int8)
    visit(SmallCode());
  else
    visit(int16_t());
}

template <class V>
void project_codes(const Projection &p, const float *coded, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
  visit_code(p.arithmetic, [&](auto code) MHA_INLINED {
    project_codes_of<V, decltype(code)>(p, reinterpret_cast<const char *>(coded), row_begin, row_end, panel_begin, panel_end);
  });
}

template <class V>
void encode_rows(const Projection &p, int64_t row_begin, int64_t row_end, float *to) {
  visit_code(p.arithmetic,
             [&](auto code) MHA_INLINED { encode_rows_as<V, decltype(code)>(p, row_begin, row_end, reinterpret_cast<char *>(to)); });
}

}  // namespace
}  // namespace mha
