// Projections: input rows times packed panels, plus bias, and each column to where the next stage reads it.
#pragma once

#include "kernels/functions.h"
#include "kernels/tile.h"

namespace mha {
namespace {

template <class V>
MHA_INLINE void copy(const float *from, float *to, int64_t count) {
  int64_t i = 0;
  for (; i + static_cast<int64_t>(V::size) <= count; i += V::size) store(to + i, load<V>(from + i));
  for (; i < count; ++i) to[i] = from[i];
}

// The row of a sequence that a row of a projection is.
struct Cursor {
  int64_t sequence;
  int64_t row;       // of the caller's array
  int64_t position;  // among the valid rows
};

// Row number `row` of all sequences together.
MHA_INLINE Cursor cursor_at(const InputRows &x, int64_t row) {
  if (!x.extents) {
    const int64_t sequence = quotient(row, x.rows_per_sequence), position = row - sequence * x.rows_per_sequence;
    return {sequence, position, position};
  }
  int64_t sequence = 0;
  while (row >= x.extents[sequence].before + x.extents[sequence].count) ++sequence;
  const int64_t position = row - x.extents[sequence].before;
  return {sequence, x.extents[sequence].first + position, position};
}

MHA_INLINE int64_t rows_left(const InputRows &x, const Cursor &at) {
  return (x.extents ? x.extents[at.sequence].count : x.rows_per_sequence) - at.position;
}

// `step` rows on, where there are more.
MHA_INLINE void advance(const InputRows &x, Cursor *at, int64_t step, bool has_more) {
  at->row += step;
  at->position += step;
  if (!has_more || rows_left(x, *at) > 0) return;
  do ++at->sequence;
  while (x.extents && x.extents[at->sequence].count == 0);
  at->position = 0;
  at->row = x.extents ? x.extents[at->sequence].first : 0;
}

// Finished values, rows `row`, row + 1, ... of the output and columns first_column, ..., to one landing place.
template <class V>
inline void land(const Landing &to, const InputRows &x, int64_t row, int64_t num_rows, const float *values, int64_t values_stride,
                 int64_t first_column, int64_t num_columns) {
  const Cursor first = cursor_at(x, row);
  int64_t head = quotient(first_column, to.head_width), c = first_column - head * to.head_width;
  for (int64_t done = 0; done < num_columns; ++head, c = 0) {
    const int64_t count = smaller(to.head_width - c, num_columns - done);
    float *const head_base = to.base + head * to.head_stride;
    Cursor at = first;
    for (int64_t r = 0; r < num_rows;) {
      const float *const from = values + r * values_stride + done;
      float *const base = head_base + at.sequence * to.batch_stride;
      int64_t step = 1;
      if (to.kind != Landing::Kind::key_blocks) {
        copy<V>(from, base + (to.kind == Landing::Kind::rows ? at.row : at.position) * to.row_stride + c, count);
      } else {
        const int64_t lane = place_in_block(at.position);
        float *const block = base + (at.position - lane) * to.head_width + c * key_block + lane;
        int64_t i = 0;
        if (r + 4 <= num_rows && lane + 4 <= key_block && rows_left(x, at) >= 4) {
          step = 4;
          const float *const row1 = from + values_stride, *const row2 = row1 + values_stride, *const row3 = row2 + values_stride;
          for (; i + 4 <= count; i += 4) transpose4x4(from + i, row1 + i, row2 + i, row3 + i, block + i * key_block, key_block);
        }
        for (int64_t s = 0; s < step; ++s) {
          for (int64_t rest = i; rest < count; ++rest) block[rest * key_block + s] = from[s * values_stride + rest];
        }
      }
      r += step;
      advance(x, &at, step, r < num_rows);
    }
    done += count;
  }
}

// Where a tile's finished values go: row r's vector i to to[r] + offset[i].
template <class V>
struct Destination {
  const float *bias;
  float *const *to;
  const int64_t *offset;
  MHA_INLINE void operator()(V dot, int r, int i) const {
    store(to[r] + offset[i], canonical(dot + load<V>(bias + i * static_cast<int>(V::size))));
  }
};

// Whether the weights are so many that they will come from beyond the level-3 cache.
MHA_INLINE bool is_far(const Projection &p) {
  constexpr int64_t far_floats = int64_t{2} << 20;
  return p.depth * p.columns > far_floats;
}

// Some rows and one panel on their way through its blocks of terms.
struct PanelTask {
  const float *block;   // of terms
  const char *next;     // what will be wanted after it, to be asked for while this one is computed with
  uint32_t term_bytes;  // of that
  const float *const *rows;
  int64_t depth;
  int64_t vectors;  // of the panel's columns, the last one maybe partly filled
  bool is_far;
};

template <class V, int R, int C, class Ahead>
MHA_INLINE void multiply_panel(const PanelTask &task, int64_t begin, int64_t vector, float *sums, const Destination<V> &to, Ahead ahead) {
  const int64_t column = vector * static_cast<int64_t>(V::size);
  RowPointers<R> rows;
  MHA_UNROLL for (int r = 0; r < R; ++r) rows.row[r] = task.rows[r];
  multiply_block<R, C, C, V>(rows, begin, task.depth, Columns{task.block + column, panel_columns, 0}, sums + column, panel_columns,
                             Destination<V>{to.bias + column, to.to, to.offset + vector}, ahead);
}

// Of a panel that is not full, what C vectors at a time leave: half as many at a time, unless these would be too few chains of operations.
template <int R>
constexpr int fewer_vectors(int C) {
  return C == 3 && R < 8 ? 2 : C / 2;
}

template <class V, int R, int C>
MHA_INLINE void multiply_panel_tail(const PanelTask &task, int64_t begin, int64_t vector, float *sums, const Destination<V> &to) {
  for (; vector + C <= task.vectors; vector += C) multiply_panel<V, R, C>(task, begin, vector, sums, to, NoPrefetch{});
  if constexpr (C > 1) multiply_panel_tail<V, R, fewer_vectors<R>(C)>(task, begin, vector, sums, to);
}

// How the weights come from the memory while they are computed with. The requests under way are few, and what the loop itself reads beyond
// the first level of the cache needs places among them: so they are spread over all loops evenly.

// The lines that the loop itself comes to 48 terms later, one stretch of memory for all of them.
struct PrefetchOwn {
  const float *p;
  MHA_INLINE void step(int64_t k) const {
    MHA_UNROLL for (int64_t i = 0; i < panel_columns; i += 16) __builtin_prefetch(p + (48 + k) * panel_columns + i, 0, 3);
  }
};

// A loop's share of the next block of terms.
struct PrefetchShare {
  const char *p;
  int64_t step_bytes;
  MHA_INLINE void step(int64_t k) const { __builtin_prefetch(p + k * step_bytes, 0, 2); }
};

// The same in several stretches side by side: together the loops over a block have 6 of them. (Measured: from beyond the caches, blocks
// come 1.05 to 1.15 times as fast as in one stretch; from the third level more slowly.)
constexpr int far_stretches = 6;

template <int stretches>
struct PrefetchStretches {
  static constexpr int64_t bytes = dot_block * panel_columns * static_cast<int64_t>(sizeof(float)) / far_stretches;
  const char *p;
  MHA_INLINE void step(int64_t k) const {
    MHA_UNROLL for (int i = 0; i < stretches; ++i) __builtin_prefetch(p + i * bytes + k * (bytes / dot_block), 0, 2);
  }
};

// Terms [begin, begin + 256) of the R rows of tile number `tile` with one panel, while what comes after them is on its way.
template <class V, int R>
inline void project_tile(const PanelTask &task, int64_t begin, int64_t tile, int64_t tiles, float *sums, const Destination<V> &to) {
  constexpr int panel_vectors = panel_columns / V::size, C = TileShape<V::size>::project_vectors(R), passes = panel_vectors / C;
  static_assert(panel_vectors % C == 0, "a tile divides a panel");
  const uint32_t loops = static_cast<uint32_t>(tiles * passes), step_bytes = (task.term_bytes + loops - 1) / loops;
  const int64_t share_bytes = smaller(dot_block, task.depth - begin) * step_bytes;
  int64_t vector = 0;
  for (; vector + C <= task.vectors; vector += C) {
    const char *const share = task.next + (tile * passes + vector / C) * share_bytes;
    if (V::size == 1)
      multiply_panel<V, R, C>(task, begin, vector, sums, to, NoPrefetch{});
    else if (loops == 1 && !task.is_far)
      multiply_panel<V, R, C>(task, begin, vector, sums, to, PrefetchOwn{task.block});
    else if (loops == 1)
      multiply_panel<V, R, C>(task, begin, vector, sums, to, PrefetchStretches<far_stretches>{share});
    else if (loops == 2 && task.is_far)
      multiply_panel<V, R, C>(task, begin, vector, sums, to, PrefetchStretches<far_stretches / 2>{share});
    else if (loops == 3 && task.is_far)
      multiply_panel<V, R, C>(task, begin, vector, sums, to, PrefetchStretches<far_stretches / 3>{share});
    else
      multiply_panel<V, R, C>(task, begin, vector, sums, to, PrefetchShare{share, step_bytes});
  }
  if constexpr (C > 1) multiply_panel_tail<V, R, fewer_vectors<R>(C)>(task, begin, vector, sums, to);
}

// Tiles have 1, 2, 3, 4, 6 or 8 rows (one number at a time: 1, 2 or 4): where there are fewer, the last one is computed twice.
template <class V, int R>
MHA_INLINE void project_tile_of(int64_t num_rows, const PanelTask &task, int64_t begin, int64_t tile, int64_t tiles, float *sums,
                                const Destination<V> &to) {
  constexpr int fewer = R > 4 || V::size == 1 ? greater(1, R - 2) : R - 1;
  if constexpr (R > 1) {
    if (num_rows <= fewer) return project_tile_of<V, fewer>(num_rows, task, begin, tile, tiles, sums, to);
  }
  project_tile<V, R>(task, begin, tile, tiles, sums, to);
}

// Finished values in rows of `stride` floats to where they are wanted.
template <class V>
MHA_INLINE void land_everywhere(const Projection &p, int64_t row, int64_t num_rows, const float *results, int64_t stride, int64_t panel,
                                int64_t panels) {
  const int64_t first_column = panel * panel_columns, num_columns = smaller(panels * panel_columns, p.columns - first_column);
  land<V>(p.landing, p.x, row, num_rows, results, stride, first_column, num_columns);
  if (p.tap.kind != Landing::Kind::none) land<V>(p.tap, p.x, row, num_rows, results, stride, first_column, num_columns);
}

// The lines that a loop over some pieces of panels comes to 24 terms later.
template <int pieces>
struct PrefetchPieces {
  const Blocks<float, pieces, panel_columns> &columns;
  MHA_INLINE void step(int64_t k) const {
    MHA_UNROLL for (int i = 0; i < pieces; ++i) __builtin_prefetch(columns.block[i] + (24 + k) * panel_columns, 0, 3);
  }
};

// Neighbouring panels in pieces of so many times 16 columns, then of fewer, from piece `first` on: no more than there are, for the rest
// would have to come from the memory too. take(dot, r, column).
template <class V, int R, int pieces, bool asks_ahead, class Take>
MHA_INLINE void multiply_pieces(int64_t first, int64_t end, const RowPointers<R> &rows, int64_t depth, const float *panels, float *sums,
                                int64_t stride, Take take) {
  constexpr int of_panel = panel_columns / 16, vectors = 16 / V::size, fewer = pieces > 4 ? 4 : pieces / 2;
  for (; end - first >= pieces; first += pieces) {
    Blocks<float, pieces, panel_columns> columns;
    MHA_UNROLL for (int i = 0; i < pieces; ++i) {
      columns.block[i] = panels + (first + i) / of_panel * depth * panel_columns + (first + i) % of_panel * 16;
    }
    const auto take_piece = [&](V dot, int r, int i) { take(dot, r, first * 16 + i * static_cast<int>(V::size)); };
    if constexpr (asks_ahead)
      multiply<R, pieces * vectors, vectors, V>(rows, depth, columns, sums + first * 16, stride, take_piece,
                                                PrefetchPieces<pieces>{columns});
    else
      multiply<R, pieces * vectors, vectors, V>(rows, depth, columns, sums + first * 16, stride, take_piece);
  }
  if constexpr (pieces > 1) multiply_pieces<V, R, fewer, asks_ahead>(first, end, rows, depth, panels, sums, stride, take);
}

// One or two rows: as many panels side by side as fill the registers, or as the memory likes best.
template <class V, int R, bool asks_ahead>
inline void project_narrow(const Projection &p, int64_t row, const float *const *rows, int64_t panel_begin, int64_t panel_end) {
  constexpr int group = 4, pieces = TileShape<V::size>::project_panels(R) * panel_columns / 16;
  constexpr int64_t stride = group * panel_columns;
  alignas(64) float results[R * stride];
  const float *const w = static_cast<const float *>(p.panels);
  RowPointers<R> pointers;
  MHA_UNROLL for (int r = 0; r < R; ++r) pointers.row[r] = rows[r];
  for (int64_t panel = panel_begin; panel < panel_end; panel += group) {
    const int64_t panels = smaller(group, panel_end - panel), first_column = panel * panel_columns;
    const int64_t columns = smaller(panels * panel_columns, p.columns - first_column);
    const float *const bias = p.bias + first_column;
    multiply_pieces<V, R, pieces, asks_ahead>(
        0, (columns + 15) / 16, pointers, p.depth, w + first_column * p.depth, results, stride,
        [&](V dot, int r, int64_t column) { store(results + r * stride + column, canonical(dot + load<V>(bias + column))); });
    land_everywhere<V>(p, row, R, results, stride, panel, panels);
  }
}

// ---- Weights that are stored in fewer bits

// Up to so many tiles of rows are multiplied with them as they are, widened in registers. For more it is better to widen them to memory.
constexpr int64_t stored_tiles = 2;

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
    case Storage::int4:
      return widen_codes<V>(panel.at<Int4>(k), terms, to);
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

constexpr int64_t stored_ahead = 4096;  // bytes
alignas(64) constexpr float no_bias[panel_columns] = {};

// A share of the next block, in three stretches side by side: what PrefetchStretches is to floats.
struct PrefetchStoredShare {
  const unsigned char *p;
  int64_t stretch_bytes, step_bytes;
  MHA_INLINE void step(int64_t k) const {
    MHA_UNROLL for (int i = 0; i < 3; ++i) __builtin_prefetch(p + i * stretch_bytes + k * step_bytes, 0, 2);
  }
};

// A tile of a few rows: number `tile` of `tiles` under the same weights, which are widened in registers, once for all its rows.
template <int R>
struct FewRows {
  RowPointers<R> rows;
  int64_t depth;
  int64_t tile, tiles;
};

// sums [R][P * 48] (+)= dots of terms [k, k + 256) with P panels side by side.
template <class V, class Element, int R, int P>
MHA_APART void multiply_few(const StoredPanel &panel, const FewRows<R> &few, int64_t k, float *sums) {
  constexpr int C = TileShape<V::size>::project_vectors(R), lanes = V::size, passes = panel_columns / (C * lanes);
  static_assert(P == 1 || passes == 1, "whole panels only lie side by side");
  const Element *const w = panel.at<Element>(k);
  const unsigned char *const here = panel.at<unsigned char>(k);
  const int64_t stretch_bytes = dot_block / 2 * panel.bytes_of_two_terms / 3 / (few.tiles * passes);
  for (int pass = 0; pass < passes; ++pass) {
    const int64_t column = pass * C * lanes, end = smaller(few.depth, k + dot_block);
    const ColumnsOf<Element> columns = {w + column, panel_columns, panel.panel_stride<Element>()};
    V acc[R][P * C];
    clear(acc);
    if constexpr (P > 1) {
      accumulate<R, P * C, C>(few.rows, columns, k, end, acc,
                              PrefetchStored<panel_columns * sizeof(Element), P>{here + stored_ahead, panel.bytes});
    } else {
      const unsigned char *const share = here + dot_block / 2 * panel.bytes_of_two_terms + (few.tile * passes + pass) * 3 * stretch_bytes;
      accumulate<R, C, C>(few.rows, columns, k, end, acc, PrefetchStoredShare{share, stretch_bytes, stretch_bytes / dot_block + 1});
    }
    MHA_UNROLL for (int r = 0; r < R; ++r) {
      MHA_UNROLL for (int i = 0; i < P * C; ++i) {
        float *const sum = sums + r * P * panel_columns + column + i * lanes;
        store(sum, k == 0 ? acc[r][i] : load<V>(sum) + acc[r][i]);
      }
    }
  }
}

template <class V, int R, int P>
MHA_APART void multiply_few_codes(const StoredPanel &panel, const FewRows<R> &few, int64_t k, float *sums) {
  constexpr int C = TileShape<V::size>::code_vectors(R), lanes = V::size;
  constexpr int64_t stride = P * panel_columns;
  for (int64_t i = 0; k == 0 && i < R * stride; i += lanes) store(sums + i, all<V>(0.0f));
  for (int column = 0; column < panel_columns; column += C * lanes) {
    multiply_groups<R, P * C, C, V>(
        few.rows, k, smaller(few.depth, k + dot_block),
        ColumnsOf<Int4>{panel.at<Int4>(k) + column, panel_columns, panel.panel_stride<Int4>()}, int4_group / 2 * panel_columns,
        {panel.scales + k / int4_group * panel_columns + column, panel_columns, panel.groups * panel_columns}, sums + column, stride,
        [&](const Int4 *w) {
          return PrefetchStored<panel_columns, P>{reinterpret_cast<const unsigned char *>(w) + stored_ahead, panel.bytes};
        });
  }
}

// The same for any storage. There may be fewer rows than R: then the sums of the others are nobody's.
template <class V, int R, int P>
inline void multiply_stored(const StoredPanel &panel, const float *const *in, int64_t num_rows, int64_t depth, int64_t k, int64_t tile,
                            int64_t tiles, float *sums) {
  FewRows<R> few = {{}, depth, tile, tiles};
  MHA_UNROLL for (int r = 0; r < R; ++r) few.rows.row[r] = in[r < num_rows ? r : 0];
  switch (panel.storage) {
    case Storage::f16:
      return multiply_few<V, F16, R, P>(panel, few, k, sums);
    case Storage::bf16:
      return multiply_few<V, Bf16, R, P>(panel, few, k, sums);
    case Storage::int8:
      return multiply_few<V, int8_t, R, P>(panel, few, k, sums);
    case Storage::int4:
      return multiply_few_codes<V, R, P>(panel, few, k, sums);
    case Storage::f32:
      return;
  }
}

// Two tiles of rows at most: the weights are used as they come. Not every number of rows has a shape of its own.
template <class V>
inline void project_stored(const Projection &p, int64_t row, int64_t num_rows, const float *const *rows, int64_t panel, int64_t panel_end) {
  using Shape = TileShape<V::size>;
  constexpr int most_rows = Shape::project_rows, panels_of_one = Shape::project_panels(1), panels_of_two = Shape::project_panels(2);
  alignas(64) float sums[stored_tiles * most_rows * panel_columns];
  static_assert(panels_of_one <= most_rows && 2 * panels_of_two <= most_rows, "the sums have room for each shape");
  const int64_t tiles = (num_rows + most_rows - 1) / most_rows;
  for (int64_t panels = 1; panel < panel_end; panel += panels) {
    const StoredPanel stored(p, panel);
    const bool is_one = num_rows == 1 && panel + panels_of_one <= panel_end, is_two = num_rows == 2 && panel + panels_of_two <= panel_end;
    panels = is_one ? panels_of_one : is_two ? panels_of_two : 1;
    for (int64_t k = 0; k < p.depth; k += dot_block) {
      for (int64_t tile = 0, r = 0; tile < tiles; ++tile, r += most_rows) {
        const int64_t count = smaller(most_rows, num_rows - r);
        float *const to = sums + r * panel_columns;
        if (is_one)
          multiply_stored<V, 1, panels_of_one>(stored, rows, count, p.depth, k, tile, tiles, to);
        else if (is_two)
          multiply_stored<V, 2, panels_of_two>(stored, rows, count, p.depth, k, tile, tiles, to);
        else if (count <= 4)
          multiply_stored<V, 4, 1>(stored, rows + r, count, p.depth, k, tile, tiles, to);
        else
          multiply_stored<V, most_rows, 1>(stored, rows + r, count, p.depth, k, tile, tiles, to);
      }
    }
    finish_sums<V>(stored, num_rows, panels * panel_columns, sums, panels * panel_columns);
    land_everywhere<V>(p, row, num_rows, sums, panels * panel_columns, panel, panels);
  }
}

// Up to project_block_rows input rows, and where their results go if that is rows too.
struct RowBlock {
  static constexpr int spare = 1;
  int64_t first, count;
  const float *in[project_block_rows + spare];  // a tile may have more rows than there are: the last one again
  float *out[project_block_rows + spare];

  MHA_INLINE RowBlock(const Projection &p, int64_t begin, int64_t end) : first(begin), count(smaller(project_block_rows, end - begin)) {
    Cursor at = cursor_at(p.x, begin);
    const bool by_row = p.landing.kind == Landing::Kind::rows;
    for (int64_t r = 0; r < count; ++r) {
      in[r] = p.x.base + at.sequence * p.x.batch_stride + at.row * p.x.row_stride;
      out[r] = p.landing.base + at.sequence * p.landing.batch_stride + (by_row ? at.row : at.position) * p.landing.row_stride;
      advance(p.x, &at, 1, r + 1 < count);
    }
    for (int64_t r = count; r < count + spare; ++r) {
      in[r] = in[count - 1];
      out[r] = out[count - 1];
    }
  }
};

// Int4 weights whose codes have been widened, under all rows: R rows at a time.
template <class V>
inline void multiply_widened_codes(const StoredPanel &panel, const RowBlock &rows, int64_t begin, int64_t end, const float *widened,
                                   const unsigned char *next, float *sums) {
  constexpr int R = TileShape<V::size>::project_rows, C = TileShape<V::size>::project_vectors(R);
  static_assert(project_block_rows % R == 0, "there is room for the sums of a whole last tile");
  for (int64_t i = 0; begin == 0 && i < (rows.count + R - 1) / R * R * panel_columns; i += V::size) store(sums + i, all<V>(0.0f));
  for (int64_t r = 0; r < rows.count; r += R) {
    RowPointers<R> tile;
    MHA_UNROLL for (int i = 0; i < R; ++i) tile.row[i] = rows.in[r + i < rows.count ? r + i : r];
    for (int column = 0; column < panel_columns; column += C * static_cast<int>(V::size)) {
      multiply_groups<R, C, C, V>(tile, begin, end, Columns{widened + column, panel_columns, 0}, int4_group * panel_columns,
                                  {panel.scales + begin / int4_group * panel_columns + column, panel_columns, 0},
                                  sums + r * panel_columns + column, panel_columns, [&](const float *w) {
                                    return PrefetchStored<panel_columns / 2, 1>{next + (w - widened) / 2, 0};
                                  });
    }
  }
}

// One panel, 256 terms by 256 terms, all rows under them: these 48 KiB stay in the cache while the rows pass. Weights that are stored in
// fewer bits are widened to them first, once for all rows.
template <class V>
inline void project_panel(const Projection &p, const RowBlock &rows, int64_t panel) {
  constexpr int tile_rows = TileShape<V::size>::project_rows;
  constexpr int64_t lanes = V::size, even_rows = tile_rows - 2;
  const int64_t first_column = panel * panel_columns, columns = smaller(panel_columns, p.columns - first_column);
  const StoredPanel stored(p, panel);
  const bool is_widened = p.storage != Storage::f32, is_scaled = p.scales != nullptr;
  alignas(64) float sums[(project_block_rows + RowBlock::spare) * panel_columns], widened[dot_block * panel_columns];

  // Whole vectors that stay within a head go straight to their rows, all else by way of `sums`.
  const bool is_direct = p.landing.kind != Landing::Kind::key_blocks && p.tap.kind == Landing::Kind::none && columns % lanes == 0 &&
                         (p.landing.head_width % lanes == 0 || p.landing.head_width == p.columns) && !is_scaled;
  int64_t offset[panel_columns / lanes];
  float *by_way[project_block_rows + RowBlock::spare];
  for (int64_t i = 0; i * lanes < columns; ++i) {
    const int64_t column = first_column + i * lanes, head = quotient(column, p.landing.head_width);
    offset[i] = is_direct ? head * p.landing.head_stride + column - head * p.landing.head_width : i * lanes;
  }
  for (int64_t r = 0; !is_direct && r < rows.count + RowBlock::spare; ++r) by_way[r] = sums + r * panel_columns;

  const int64_t tiles = (rows.count + tile_rows - 1) / tile_rows;
  for (int64_t k = 0; k < p.depth; k += dot_block) {
    const int64_t end = smaller(p.depth, k + dot_block);
    const unsigned char *const here = stored.at<unsigned char>(k), *const next = stored.at<unsigned char>(end + end % 2);
    if (is_widened) widen<V>(stored, k, end - k, widened);
    if (p.storage == Storage::int4) {
      multiply_widened_codes<V>(stored, rows, k, end, widened, next, sums);
      if (end == p.depth) {
        finish_sums<V>(stored, rows.count, columns, sums, panel_columns);
        land_everywhere<V>(p, rows.first, rows.count, sums, panel_columns, panel, 1);
      }
      continue;
    }
    for (int64_t tile = 0, r = 0; tile < tiles; ++tile) {
      // Full tiles, but no small one after them, which would leave the machine half idle.
      const int64_t left = rows.count - r;
      const int64_t size = left > tile_rows && left <= 2 * even_rows ? even_rows : smaller(left, tile_rows);
      const PanelTask task = {is_widened ? widened : reinterpret_cast<const float *>(here),
                              reinterpret_cast<const char *>(next),
                              static_cast<uint32_t>(stored.bytes_of_two_terms / 2),
                              rows.in + r,
                              p.depth,
                              (columns + lanes - 1) / lanes,
                              !is_widened && is_far(p)};
      const Destination<V> to = {is_scaled ? no_bias : stored.bias, is_direct ? rows.out + r : by_way + r, offset};
      project_tile_of<V, tile_rows>(size, task, k, tile, tiles, sums + r * panel_columns, to);
      // Tile by tile, so that the memory can take the results in while the next tile is computed.
      if (!is_direct && end == p.depth) {
        if (is_scaled) finish_sums<V>(stored, size, columns, sums + r * panel_columns, panel_columns);
        land_everywhere<V>(p, rows.first + r, size, sums + r * panel_columns, panel_columns, panel, 1);
      }
      r += size;
    }
  }
}

// One or two rows. (Measured: asking ahead takes 3 to 7% more time where a layer's weights stay in a level-2 cache, and 3 to 7% less where
// 1.8 million of them come from the memory.)
template <class V>
MHA_INLINE void project_few(const Projection &p, int64_t row, const RowBlock &rows, int64_t panel_begin, int64_t panel_end) {
  constexpr int64_t near_floats = int64_t{1} << 18;
  if (p.depth * p.columns > near_floats) {
    if (rows.count == 1) return project_narrow<V, 1, true>(p, row, rows.in, panel_begin, panel_end);
    return project_narrow<V, 2, true>(p, row, rows.in, panel_begin, panel_end);
  }
  if (rows.count == 1) return project_narrow<V, 1, false>(p, row, rows.in, panel_begin, panel_end);
  return project_narrow<V, 2, false>(p, row, rows.in, panel_begin, panel_end);
}

template <class V>
void project(const Projection &p, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
  for (int64_t row = row_begin; row < row_end; row += project_block_rows) {
    const RowBlock rows(p, row, row_end);
    if constexpr (V::size > 1) {
      if (p.storage == Storage::f32) {
        if (rows.count <= 2) return project_few<V>(p, row, rows, panel_begin, panel_end);
      } else if (rows.count <= stored_tiles * TileShape<V::size>::project_rows) {
        return project_stored<V>(p, row, rows.count, rows.in, panel_begin, panel_end);
      }
    }
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) project_panel<V>(p, rows, panel);
  }
}

// The second half of project, for a product that a BLAS has made.
template <class V>
void finish_rows(const Projection &p, const float *product, int64_t product_stride, int64_t row_begin, int64_t row_end) {
  constexpr int64_t width = 256;
  alignas(64) float values[4 * width];
  for (int64_t row = row_begin; row < row_end; row += 4) {
    const int64_t rows = smaller(4, row_end - row);
    for (int64_t column = 0; column < p.columns; column += width) {
      const int64_t count = smaller(width, p.columns - column);
      for (int64_t r = 0; r < rows; ++r) {
        const float *const from = product + (row - row_begin + r) * product_stride + column;
        for (int64_t i = 0; i < count; ++i) values[r * width + i] = canonical(from[i] + p.bias[column + i]);
      }
      land<V>(p.landing, p.x, row, rows, values, width, column, count);
      if (p.tap.kind != Landing::Kind::none) land<V>(p.tap, p.x, row, rows, values, width, column, count);
    }
  }
}

}  // namespace
}  // namespace mha
