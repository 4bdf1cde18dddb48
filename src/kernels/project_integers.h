// Projections in integers: rows of codes times panels of codes, with exact sums (CONTRACT.md,
// section 4).
//
// encode_rows turns input rows into codes with a scale for each chain of at most 64 numbers.
// project_codes then passes the panels one by one, for each panel blocks of 256 terms, and for
// these the rows tile by tile. Four terms of a column lie side by side in a panel; one instruction
// multiplies them by the same four terms of a row and adds up the products (dot_products.h). The
// sum of a chain, at most 64 terms or 32 of int4, becomes a float and is added, times its scales,
// to sums in memory, [row][column of the panel].
#pragma once

#include "dot_products.h"
#include "project.h"

namespace mha {
namespace {

// ---- Tiles

// The most rows of a call whose speed reading the weights limits. Their tiles turn nibbles of int4
// into bytes in registers; with more rows, nibbles become bytes in memory once for all rows.
constexpr int max_few_rows = 2;

// Terms of a panel that stay in the cache while all rows pass them.
constexpr int64_t block_terms = dot_block;

// The panels that few rows pass in step, one chain of each in turn. Meanwhile they prefetch the
// next chains of all panels, one line of each in turn. The processor follows several streams of
// memory by itself, and reads them faster than one.
constexpr int panels_in_step = 4;

// What a loop is told: some rows, and the terms of one panel or of several panels in step.
struct CodeTile {
  const char *rows[max_tile_rows];  // chains of codes, each followed by a CodesTail
  const uint8_t *columns;           // of the first panel, [term / 4][48][4]
  int64_t terms;
  int64_t panels, panel_bytes;  // how many, and from one to the next
  int64_t chain;                // terms of a chain
  int64_t after;                // from the end of the first panel's terms to what is read next
  const void *scales;           // of the columns, for each group of 2^group_bits terms; null: none
  Storage scale_storage;
  int group_bits;
  int64_t panel_scales;   // from the scales of one panel to those of the next
  int64_t offsets_apart;  // bytes from scales to offsets, which are read later
  float *sums;            // [row][panel][48]
  int64_t ahead;          // how far ahead columns are prefetched: 0 if they lie in a cache
};

// Multiplies sums by the scales of their columns, from number i on, if there are any.
template <int R, int C>
MHA_INLINE void scale_sums(const CodeTile &tile, int64_t i, Vector (&sums)[R][C]) {
  if (!tile.scales) return;
  if constexpr (R <= max_few_rows) {
    const char *const of_columns =
        element_at(tile.scales, tile.scale_storage, i) + tile.offsets_apart;
    MHA_UNROLL for (int line = 0; line < C * static_cast<int>(sizeof(Vector)); line += 64)
        MHA_PREFETCH_L2(of_columns + line);
  }
  Vector scales[C];
  if (tile.scale_storage == Storage::f16) {
    MHA_EACH(c, C) scales[c] = load(static_cast<const F16 *>(tile.scales) + i + c * Vector::size);
  } else {
    MHA_EACH(c, C) scales[c] = load(static_cast<const float *>(tile.scales) + i + c * Vector::size);
  }
  MHA_EACH_PAIR(r, R, c, C) sums[r][c] = sums[r][c] * scales[c];
}

// The inner loop: adds the products of R rows with all chains of a tile to its sums. Few rows hold
// their own numbers in registers while the columns pass by; more rows hold the columns. is_plain:
// there are no scales.
template <class Code, bool is_plain, bool are_nibbles, int R>
MHA_NOCLONE void multiply_codes(const CodeTile &tile) {
  using Dots = DotProducts<Code>;
  constexpr int C = Dots::vectors(R), lanes = Vector::size;
  constexpr int fours = are_nibbles ? 2 : 1;  // of terms, in the bytes of one step
  const int64_t chain = is_plain ? code_group : tile.chain;
  constexpr int64_t step = terms_together * panel_columns,
                    row_step = terms_together * static_cast<int64_t>(sizeof(Code));
  const int64_t codes_bytes = chain * static_cast<int64_t>(sizeof(Code));
  constexpr bool are_few = R <= max_few_rows;
  constexpr int streams = panels_in_step * C * lanes / panel_columns;
  const int64_t chain_bytes = chain / fours * panel_columns;
  const bool is_in_step = are_few && tile.panels > 1;
  const int64_t ahead = tile.ahead, apart = is_in_step ? tile.panel_bytes : 64,
                stream_step = is_in_step ? step / panels_in_step : step;
  const int64_t panels = are_few ? tile.panels : 1, sums_stride = panels * panel_columns;
  const char *rows[R];
  MHA_EACH(r, R) rows[r] = tile.rows[r];
  const uint8_t *columns = tile.columns;
  int64_t at = 0;
  // Chain by chain; in each, panel by panel, and C vectors of columns at a time.
  for (int64_t left = tile.terms; left > 0;
       left -= chain, at += codes_bytes + static_cast<int64_t>(sizeof(CodesTail))) {
    const auto tail_of = [&](int r) MHA_INLINED -> const CodesTail & {
      return *reinterpret_cast<const CodesTail *>(rows[r] + at + codes_bytes);
    };
    const uint8_t *of_panel = columns, *later = columns + ahead + (left > chain ? 0 : tile.after);
    int64_t scale = ((tile.terms - left) >> tile.group_bits) * panel_columns;
    float *to = tile.sums;
    for (int64_t panel = 0; panel < panels; ++panel) {
      const uint8_t *first_stream = later;
      for (int64_t column = 0; column < panel_columns; column += C * lanes) {
        const uint8_t *w = of_panel + column * terms_together, *stream = first_stream;
        typename Dots::Sum acc[R][C];
        // Sums start with what makes up for the numbers that were added to the codes.
        MHA_EACH(r, R) {
          const typename Dots::Sum begin = Dots::begin(tail_of(r).begin);
          MHA_EACH(c, C) acc[r][c] = begin;
        }
        const int64_t codes_end = at + min(left, chain) * static_cast<int64_t>(sizeof(Code));
        for (int64_t codes = at; codes < codes_end; codes += fours * row_step, w += step) {
          const auto row_terms = [&](int r, int four, int pass) MHA_INLINED {
            return Dots::load_row_terms(
                reinterpret_cast<const Code *>(rows[r] + codes + four * row_step), pass);
          };
          const auto terms_of = [&](int c, int four, int pass) MHA_INLINED {
            const uint8_t *const bytes = w + c * lanes * terms_together;
            return are_nibbles ? Dots::load_nibbles(bytes, four, pass)
                               : Dots::load_terms(bytes, pass);
          };
          // Prefetches the next terms: one line of each stream, or the columns of one step.
          if constexpr (are_few) {
            MHA_EACH(i, streams) MHA_PREFETCH_L2(stream + i * apart);
            stream += stream_step;
          } else {
            MHA_UNROLL for (int line = 0; line < C * lanes * terms_together; line += 64)
                MHA_PREFETCH(w + ahead + line);
          }
          if constexpr (are_few || (R == 4 && Dots::passes == 1 && Vector::size == 16)) {
            typename Dots::RowTerms x[R][fours][Dots::passes];
            MHA_EACH(r, R) {
              MHA_EACH_PAIR(four, fours, pass, Dots::passes)
                x[r][four][pass] = row_terms(r, four, pass);
            }
            MHA_EACH(c, C) {
              MHA_EACH_PAIR(four, fours, pass, Dots::passes) {
                const typename Dots::Terms terms = terms_of(c, four, pass);
                MHA_EACH(r, R) acc[r][c] = Dots::add(acc[r][c], terms, x[r][four][pass]);
              }
            }
          } else {
            static_assert(!are_nibbles, "one four of terms in each step");
            MHA_EACH(pass, Dots::passes) {
              typename Dots::Terms terms[C];
              MHA_EACH(c, C) terms[c] = terms_of(c, 0, pass);
              MHA_EACH(r, R) {
                const typename Dots::RowTerms x = row_terms(r, 0, pass);
                MHA_EACH(c, C) acc[r][c] = Dots::add(acc[r][c], terms[c], x);
              }
            }
          }
        }
        // The chain is complete: its sums become floats and are added, times both scales.
        Vector sum[R][C];
        MHA_EACH_PAIR(r, R, c, C) sum[r][c] = Dots::sums_of(acc[r][c]);
        if (!is_plain) scale_sums(tile, scale, sum);
        MHA_EACH(r, R) {
          const Vector row_scale = all(tail_of(r).scale);
          MHA_EACH(c, C) {
            float *const at_sum = to + r * sums_stride + c * lanes;
            store(at_sum, mul_add(sum[r][c], row_scale, load(at_sum)));
          }
        }
        to += C * lanes;
        scale += C * lanes;
        first_stream += streams * apart;
      }
      of_panel += tile.panel_bytes;
      scale += tile.panel_scales - panel_columns;
      later += chain_bytes / panels_in_step;
    }
    columns += chain_bytes;
  }
}

#if defined(MHA_KERNELS_I8MM)

// The same for more than a few rows of bytes, by products of matrices: each instruction multiplies
// eight terms of two columns by the same terms of two rows.
template <int R>
MHA_NOCLONE void multiply_code_matrices(const CodeTile &tile) {
  constexpr int C = DotProducts<int8_t>::vectors(R), lanes = Vector::size;
  constexpr int64_t step = terms_together * panel_columns;
  const int64_t ahead = tile.ahead, chain = tile.chain;
  const char *rows[R];
  MHA_EACH(r, R) rows[r] = tile.rows[r];
  const uint8_t *columns = tile.columns;
  int64_t at = 0;
  for (int64_t left = tile.terms; left > 0;
       left -= chain, at += chain + static_cast<int64_t>(sizeof(CodesTail))) {
    const auto tail_of = [&](int r) MHA_INLINED -> const CodesTail & {
      return *reinterpret_cast<const CodesTail *>(rows[r] + at + chain);
    };
    const int64_t codes_end = at + min(left, chain),
                  scale = ((tile.terms - left) >> tile.group_bits) * panel_columns;
    for (int64_t column = 0; column < panel_columns; column += C * lanes) {
      const uint8_t *w = columns + column * terms_together;
      // A vector has the sums of two rows with one column, then with the next.
      int32x4_t acc[R / 2][2 * C];
      MHA_UNROLL for (int r = 0; r < R; r += 2) {
        const int32x2_t begin =
            vset_lane_s32(tail_of(r + 1).begin, vdup_n_s32(tail_of(r).begin), 1);
        MHA_EACH(c, 2 * C) acc[r / 2][c] = vcombine_s32(begin, begin);
      }
      for (int64_t codes = at; codes < codes_end; codes += 2 * terms_together, w += 2 * step) {
        // If the number of fours is odd, the last one comes twice: the codes of a row after it are
        // 0.
        const uint8_t *const second = codes_end - codes > terms_together ? w + step : w;
        MHA_UNROLL for (int line = 0; line < C * lanes * terms_together; line += 64) {
          MHA_PREFETCH(w + ahead + line);
          MHA_PREFETCH(w + step + ahead + line);
        }
        int8x16_t x[R / 2];
        MHA_UNROLL for (int r = 0; r < R; r += 2) {
          const auto row_terms = [&](int row) MHA_INLINED {
            return vld1_s8(reinterpret_cast<const int8_t *>(rows[row] + codes));
          };
          x[r / 2] = vcombine_s8(row_terms(r), row_terms(r + 1));
        }
        MHA_EACH(c, C) {
          const int64_t bytes = c * lanes * terms_together;
          const uint32x4x2_t both = vzipq_u32(vreinterpretq_u32_u8(vld1q_u8(w + bytes)),
                                              vreinterpretq_u32_u8(vld1q_u8(second + bytes)));
          MHA_EACH_PAIR(i, 2, r, R / 2) {
            acc[r][2 * c + i] =
                vusmmlaq_s32(acc[r][2 * c + i], vreinterpretq_u8_u32(both.val[i]), x[r]);
          }
        }
      }
      Vector sum[R][C];
      MHA_EACH_PAIR(r, R, c, C) {
        const int32x4_t first = acc[r / 2][2 * c], second = acc[r / 2][2 * c + 1];
        sum[r][c] =
            vcvtq_f32_s32(r % 2 == 0 ? vuzp1q_s32(first, second) : vuzp2q_s32(first, second));
      }
      scale_sums(tile, scale + column, sum);
      MHA_EACH(r, R) {
        const Vector row_scale = all(tail_of(r).scale);
        MHA_EACH(c, C) {
          float *const at_sum = tile.sums + r * panel_columns + column + c * lanes;
          store(at_sum, mul_add(sum[r][c], row_scale, load(at_sum)));
        }
      }
    }
    columns += chain * panel_columns;
  }
}

#endif

// Turns terms of int4 into bytes, which are still 8 greater than the codes.
MHA_NOINLINE inline void widen_nibbles(const unsigned char *MHA_RESTRICT from, int64_t terms,
                                       uint8_t *MHA_RESTRICT to) {
  constexpr int64_t step = terms_together * panel_columns;
  constexpr uint64_t low_halves = 0x0f0f0f0f0f0f0f0f;
  for (int64_t k = 0; k < terms; k += 2 * terms_together, from += step, to += 2 * step) {
    for (int64_t i = 0; i < step; i += 64) MHA_PREFETCH(from + i + code_prefetch_bytes);
    for (int64_t i = 0; i < step; i += 8) {
      const uint64_t word = number_at<uint64_t>(from + i), first = word & low_halves,
                     second = word >> 4 & low_halves;
      MHA_MEMCPY(to + i, &first, sizeof first);
      MHA_MEMCPY(to + step + i, &second, sizeof second);
    }
  }
}

// Turns terms of int5 (high 1) or int6 (2) into bytes, each greater than the code by added_to it.
template <int high>
MHA_NOINLINE void widen_planes(const unsigned char *MHA_RESTRICT from, int64_t terms,
                               bool prefetches, uint8_t *MHA_RESTRICT to) {
  constexpr int64_t step = terms_together * panel_columns, together = plane_terms_of(high),
                    fours = together / terms_together;
  constexpr uint64_t low_halves = 0x0f0f0f0f0f0f0f0f,
                     high_bits = low_halves / 15 * 16 * ((1 << high) - 1);
  for (int64_t k = 0; k < terms;
       k += together, from += (fours / 2 + 1) * step, to += fours * step) {
    for (int64_t i = 0; prefetches && i < (fours / 2 + 1) * step; i += 64)
      MHA_PREFETCH(from + i + code_prefetch_bytes);
    for (int64_t i = 0; i < step; i += 8) {
      const uint64_t plane = number_at<uint64_t>(from + fours / 2 * step + i);
      MHA_UNROLL for (int four = 0; four < fours; four += 2) {
        const uint64_t word = number_at<uint64_t>(from + four / 2 * step + i);
        const auto high_of = [&](int of_four) MHA_INLINED {
          const int place = of_four * high;
          return (place < 4 ? plane << (4 - place) : plane >> (place - 4)) & high_bits;
        };
        const uint64_t first = (word & low_halves) | high_of(four),
                       second = (word >> 4 & low_halves) | high_of(four + 1);
        MHA_MEMCPY(to + four * step + i, &first, sizeof first);
        MHA_MEMCPY(to + (four + 1) * step + i, &second, sizeof second);
      }
    }
  }
}

// Calls visit(Code{}) with the type that codes of rows are stored in.
template <class Visit>
MHA_INLINE void visit_code(const Projection &p, Visit visit) {
  if (p.arithmetic == Arithmetic::int16)
    visit(int16_t());
  else if (p.storage == Storage::int4)
    visit(NibbleCode());
  else
    visit(SmallCode());
}

// The bytes of the codes of a row of `terms` terms.
MHA_INLINE int64_t bytes_of_codes(const Projection &p, int64_t terms) {
  int64_t bytes = 0;
  const int64_t chain = terms_of_chain(p.storage, p.group);
  visit_code(p, [&](auto code) MHA_INLINED { bytes = coded_bytes<decltype(code)>(chain, terms); });
  return bytes;
}

using PanelLoop = void (*)(const CodeTile &);

// The loop for a tile of num_rows rows. Up to max_few_rows it reads int4 as nibbles.
MHA_NOINLINE inline PanelLoop panel_loop_of(const Projection &p, int64_t num_rows) {
  PanelLoop loop = nullptr;
  constexpr int most = Shape::max_rows;
  visit_rows<most>(num_rows, [&](auto rows) MHA_INLINED {
    visit_code(p, [&](auto code) MHA_INLINED {
      using Code = decltype(code);
      constexpr int R =
          is_small_code && decltype(rows)::count > max_few_rows ? most : decltype(rows)::count;
#if defined(MHA_KERNELS_I8MM)
      if constexpr (R > max_few_rows && sizeof(Code) == 1) {
        loop = multiply_code_matrices<R>;
        return;
      }
#endif
      constexpr bool are_few = R <= max_few_rows;
      if constexpr (!are_few || sizeof(Code) >= sizeof(SmallCode))
        loop = are_few && p.group == 0 ? multiply_codes<Code, are_few, false, R>
                                       : multiply_codes<Code, false, false, R>;
      if (are_few && p.storage == Storage::int4) loop = multiply_codes<Code, false, are_few, R>;
    });
  });
  return loop;
}

// The kernels' `project` in integers. rows: what encode_rows has made of the input rows.
MHA_NOINLINE inline void project_codes(const Projection &p, const void *rows, int64_t row_begin,
                                       int64_t row_end, int64_t panel_begin, int64_t panel_end) {
  constexpr int64_t most = Shape::max_rows;
  static_assert(project_block_rows % most == 0, "the last tile has its rows of sums");
  alignas(64) float sums[max(project_block_rows, panels_in_step * max_few_rows) * panel_columns];
  alignas(64) uint8_t widened[block_terms * panel_columns];
  alignas(64) float scales[panels_in_step * block_terms / min_group * panel_columns];
  const bool is_int4 = p.storage == Storage::int4, are_in_blocks = p.scale_storage == Storage::int8;
  const int high = high_bits_of(p.storage);
  const char *const coded = static_cast<const char *>(rows);
  const int64_t count = row_end - row_begin, codes_bytes = bytes_of_codes(p, p.depth),
                row_bytes = codes_bytes + p.sums * static_cast<int64_t>(sizeof(float)),
                term_bits = is_int4     ? 4
                            : high == 0 ? 8
                                        : 4 + high;
  PanelLoop loops[most + 1] = {};  // by the rows of the tile
  // Loops over words with vectors of many lanes are as busy with fewer rows.
  constexpr bool may_lack_row = sizeof(SmallCode) == 1 || Vector::size < 8;
  const bool are_few = count <= max_few_rows;
  const int64_t num_sums = are_few ? count : (count + most - 1) / most * most;
  const int64_t most_terms = are_few && high == 0 && !are_in_blocks ? p.depth : block_terms,
                full_panels = min(panel_end, p.columns / panel_columns);
  CodeTile tile;
  tile.chain = terms_of_chain(p.storage, p.group);
  tile.scale_storage = are_in_blocks ? Storage::f32 : p.scale_storage;
  tile.group_bits = group_bits_of(p);
  for (int64_t panel = panel_begin; panel < panel_end; panel += tile.panels) {
    const StoredPanel stored(p, panel);
    tile.panels =
        are_few && high == 0 && panel + panels_in_step <= full_panels ? panels_in_step : 1;
    tile.panel_bytes = stored.bytes;
    tile.panel_scales =
        (are_in_blocks ? block_terms >> tile.group_bits : stored.groups) * panel_columns;
    const int64_t stride = tile.panels * panel_columns,
                  terms_ahead = tile.panels > 1 ? tile.chain : block_terms;
    tile.offsets_apart = are_in_blocks ? 0 : stored.offsets_apart;
    MHA_MEMSET(sums, 0, static_cast<size_t>(num_sums * stride) * sizeof(float));
    for (int64_t k = 0; k < p.depth; k += most_terms) {
      tile.terms = min(p.depth - k, most_terms);
      // After their last terms, the panels are followed by others.
      tile.after = k + tile.terms < p.depth ? 0 : (tile.panels - 1) * stored.bytes;
      const uint8_t *const columns = stored.first + k * panel_columns * term_bits / 8;
      tile.scales = nullptr;
      if (are_in_blocks) {
        for (int64_t i = 0; i < tile.panels; ++i)
          widen_scales(stored.scales + i * stored.scales_bytes, tile.group_bits, k, tile.terms,
                       scales + i * tile.panel_scales);
        tile.scales = scales;
      } else if (p.group != 0) {
        tile.scales =
            element_at(stored.scales, p.scale_storage, (k >> tile.group_bits) * panel_columns);
      }
      if (high == 1)
        widen_planes<1>(columns, tile.terms, !are_few, widened);
      else if (high == 2)
        widen_planes<2>(columns, tile.terms, !are_few, widened);
      else if (is_int4 && !are_few)
        widen_nibbles(columns, tile.terms, widened);
      const char *const first = coded + bytes_of_codes(p, k);
      for (int64_t r = 0, size; r < count; r += size) {
        size = is_small_code ? min(count - r, most) : next_tile_rows(count - r, most, may_lack_row);
        if (!loops[size]) loops[size] = panel_loop_of(p, size);
        const bool is_widened = high != 0 || (is_int4 && size > max_few_rows);
        tile.columns = is_widened ? widened : columns;
        tile.ahead = is_widened ? 0 : terms_ahead * panel_columns * term_bits / 8;
        // The one tile of few rows prefetches what is widened next.
        if (high != 0 && are_few)
          tile.ahead = columns + block_terms * panel_columns * term_bits / 8 - widened;
        tile.sums = sums + r * panel_columns;
        // The last row stands in for rows that are missing.
        for (int64_t i = 0; i < most; ++i) tile.rows[i] = first + min(r + i, count - 1) * row_bytes;
        loops[size](tile);
      }
    }
    for (int64_t b = 0; p.offsets && b < tile.panels; ++b)
      add_offsets(p, panel + b, reinterpret_cast<const float *>(coded + codes_bytes),
                  row_bytes / static_cast<int64_t>(sizeof(float)), count, sums + b * panel_columns,
                  stride);
    finish_sums(stored, count, min(stride, p.columns - panel * panel_columns), sums, stride);
    write_results(p, row_begin, count, sums, stride, panel, tile.panels);
  }
}

// ---- Rows

// The kernels' `encode_rows`. Each chain of codes is followed by its scale and by the number that
// the sums of its products start with, and all of them by the sums of the groups of weights.
MHA_NOINLINE inline void encode_rows(const Projection &p, int64_t row_begin, int64_t row_end,
                                     void *coded) {
  const InputRows &x = p.x;
  const int32_t most_code = p.arithmetic == Arithmetic::int8 ? 127 : 32767;
  const int64_t chain = terms_of_chain(p.storage, p.group),
                chain_bytes = bytes_of_codes(p, code_group) * chain / code_group;
  char *to = static_cast<char *>(coded);
  Cursor at = cursor_at(x, row_begin);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const char *const from =
        element_at(x.base, x.storage, at.sequence * x.batch_stride + at.row * x.row_stride);
    const char *tail = to + chain_bytes - sizeof(CodesTail);
    // Several chains at a time, whose numbers are widened together: find the scale of each, and
    // store its codes.
    for (int64_t k = 0; k < p.depth; k += code_group) {
      alignas(64) float group[code_group];
      const int64_t terms = min(code_group, p.depth - k);
      widen(x.storage, element_at(from, x.storage, k), terms, group);
      MHA_MEMSET(group + terms, 0, static_cast<size_t>(code_group - terms) * sizeof(float));
      visit_code(p, [&](auto code) MHA_INLINED {
        using Code = decltype(code);
        put_in_order_of_passes<Code>(group, code_group);
        for (int64_t i = 0; i < code_group; i += chain) {
          Code *const codes = reinterpret_cast<Code *>(to);
          const CodeScale scale = code_scale_of(most_bits_of_row(group + i, chain, 0), most_code);
          const int32_t sum = encode(group + i, chain, scale, codes);
          const CodesTail of_codes = {scale.scale, begin_of<Code>(sum, added_to(p.storage)), sum,
                                      0};
          MHA_MEMCPY(codes + chain, &of_codes, sizeof of_codes);
          to += chain * static_cast<int64_t>(sizeof(Code)) + static_cast<int64_t>(sizeof of_codes);
        }
      });
    }
    // The sums of the groups of weights.
    for (int64_t k = 0; k < p.depth && p.sums != 0; to += sizeof(float)) {
      float sum = 0.0f;
      for (const int64_t end = min(p.depth, k + p.group); k < end;
           k += chain, tail += chain_bytes) {
        const CodesTail &of_chain = *reinterpret_cast<const CodesTail *>(tail);
        sum = mul_add(static_cast<float>(of_chain.sum), of_chain.scale, sum);
      }
      MHA_MEMCPY(to, &sum, sizeof sum);
    }
    advance(x, &at, 1, row + 1 < row_end);
  }
}

}  // namespace
}  // namespace mha
