// Products of bf16 by AMX, whose instruction takes 16 rows, 16 columns and a step of 32 terms at
// once, as the contract sums them (CONTRACT.md, section 4).
//
// A panel is 3 tiles wide. All rows of a block pass 256 terms of it, 16 rows at a time, while these
// weights stay in the first level of the cache. Then the sums wait in memory for the next terms.
#pragma once

#include <immintrin.h>

#include "pairs.h"
#include "project.h"

namespace mha {
namespace {

constexpr int64_t tile_rows = 16, tile_bytes = 1024, step_pairs = bf16_step / 2;
constexpr int64_t sums_bytes = panel_columns * 4;  // of a row of sums, or of pairs
static_assert(project_block_rows % tile_rows == 0, "the last tile has its rows of sums");

// Tiles 0 to 2 are sums, 3 has factors of rows, 4 to 6 have weights: 64 bytes times 16 rows, or as
// many as there are input rows.
MHA_INLINE void shape_tiles(int64_t rows) {
  alignas(64) uint8_t palette_1[64] = {1};
  for (int tile = 0; tile < 7; ++tile) {
    palette_1[16 + 2 * tile] = 64;
    palette_1[48 + tile] = static_cast<uint8_t>(tile <= 3 ? rows : step_pairs);
  }
  __asm__ volatile("ldtilecfg %0" ::"m"(palette_1));  // g++ 12's intrinsic reads 8 bytes only
}

// The shape that the thread's tiles had before, which they get back: ggml sets theirs once.
class KeptShape {
 public:
  KeptShape() { __asm__ volatile("sttilecfg %0" : "=m"(before_)); }
  ~KeptShape() { __asm__ volatile("ldtilecfg %0" ::"m"(before_)); }

 private:
  alignas(64) uint8_t before_[64];
};

// Adds some steps of up to 16 rows and a panel to sums [16][48], or replaces these by them.
// x: factors, [step][16][32]; w: pairs, [step][16][48].
MHA_INLINE void add_steps(const char *x, const char *w, int64_t steps, bool replaces, float *sums) {
  MHA_FINISH_STORES();
  if (replaces) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
  } else {
    _tile_loadd(0, sums, sums_bytes);
    _tile_loadd(1, sums + 16, sums_bytes);
    _tile_loadd(2, sums + 32, sums_bytes);
  }
  for (; steps > 0; --steps, x += tile_bytes, w += step_pairs * sums_bytes) {
    _tile_loadd(3, x, 64);
    _tile_loadd(4, w, sums_bytes);
    _tile_dpbf16ps(0, 3, 4);
    _tile_loadd(5, w + 64, sums_bytes);
    _tile_dpbf16ps(1, 3, 5);
    _tile_loadd(6, w + 128, sums_bytes);
    _tile_dpbf16ps(2, 3, 6);
  }
  _tile_stored(0, sums, sums_bytes);
  _tile_stored(1, sums + 16, sums_bytes);
  _tile_stored(2, sums + 32, sums_bytes);
}

// The factors of a tile of rows from term k on, [tile][step][16][32].
MHA_INLINE char *factors_at(const void *ready, const Projection &p, int64_t row, int64_t k) {
  const int64_t steps = (p.depth + bf16_step - 1) / bf16_step;
  return static_cast<char *>(const_cast<void *>(ready)) +
         (row / tile_rows * steps + k / bf16_step) * tile_bytes;
}

// The pairs' `encode_rows`.
MHA_NOINLINE inline void round_tiles(const Projection &p, int64_t row_begin, int64_t row_end,
                                     void *ready) {
  round_steps(p, row_begin, row_end, [&](int64_t row, int64_t k, const uint16_t *factors) {
    constexpr int64_t bytes = bf16_step * 2;
    MHA_MEMCPY(factors_at(ready, p, row, k) + row % tile_rows * bytes, factors, bytes);
  });
}

// The pairs' `project`. ready: what round_tiles has made of the input rows. The last of several
// tiles takes 16 rows, too; sums of rows that are not there are not used.
MHA_NOINLINE inline void project_tiles(const Projection &p, const void *ready, int64_t row_begin,
                                       int64_t row_end, int64_t panel_begin, int64_t panel_end) {
  alignas(64) float sums[project_block_rows * panel_columns];
  const KeptShape kept;
  const int64_t rows = row_end - row_begin;
  shape_tiles(min(rows, tile_rows));
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    const StoredPanel stored(p, panel);
    for (int64_t k = 0, terms; k < p.depth; k += terms) {
      alignas(64) char rest[64 + step_pairs * sums_bytes];
      const void *w = stored.at<void>(k);
      terms = min(dot_block, (p.depth - k) / bf16_step * bf16_step);
      if (terms == 0) {
        terms = bf16_step;
        w = copy_pairs(stored.at<Bf16Pair>(k), (p.depth - k + 1) / 2, rest);
      }
      for (int64_t r = 0; r < rows; r += tile_rows) {
        add_steps(factors_at(ready, p, r, k), static_cast<const char *>(w), terms / bf16_step,
                  k == 0, sums + r * panel_columns);
      }
    }
    finish_sums(stored, rows, min(panel_columns, p.columns - panel * panel_columns), sums,
                panel_columns);
    write_results(p, row_begin, rows, sums, panel_columns, panel, 1);
  }
}

// Whether the instruction adds the products of a step as the contract defines.
inline bool tiles_are_as_defined() {
  const KeptShape kept;
  shape_tiles(1);
  return is_as_defined([](const float *x, const float *w, float *sums) {
    MHA_FINISH_STORES();
    _tile_loadd(0, sums, 64);
    _tile_loadd(3, x, 64);
    _tile_loadd(4, w, 64);
    _tile_dpbf16ps(0, 3, 4);
    _tile_stored(0, sums, 64);
  });
}

}  // namespace
}  // namespace mha
