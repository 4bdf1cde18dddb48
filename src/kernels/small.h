// A whole layer at once, for calls so small that a plan of stages and units would take longer than
// their arithmetic.
//
// run_small computes one sequence after the other, two rows at a time: their q, k and v by one pass
// over the weights, then for each head scores, softmax and context, and then the output. A sequence
// has at most 16 keys, which are one tile, and no sum has more than 256 terms. So no partial is
// merged, and each step is add_term of tile.h on a few registers. Results have the bits of the
// other path.
#pragma once

#include "functions.h"
#include "tile.h"

namespace mha {
namespace {

// The vectors of 16 columns.
constexpr int small_vectors = tile_keys / Vector::size;

// The parts of the scratch memory. Vectors are read and written beyond the end of a head, into the
// next row or the next part.
struct SmallMemory {
  int64_t stride, context_stride;
  float *q, *v;    // [n][stride]
  float *k;        // [head_dim of all kv heads][tile_keys]: the keys side by side
  float *context;  // [2][context_stride], or keys on their way

  MHA_INLINE SmallMemory(const SmallLayer &layer, int64_t n, float *scratch)
      : stride(layer.stride), context_stride(layer.context_stride) {
    q = scratch;
    v = q + n * stride;
    k = v + n * stride;
    context = k + layer.k_columns * tile_keys;
  }
};

// Strips of 16 columns of panels, and their biases.
template <int M>
struct SmallColumns {
  const float *w[M], *bias[M];

  // Strip m begins at this column of a matrix. Columns after its last panel are others of it.
  MHA_INLINE void put(int m, const SmallMatrix &matrix, int64_t column) {
    const int64_t panel = min(quotient(column, panel_columns), matrix.last_panel),
                  in_panel = column % panel_columns;
    w[m] = matrix.panels + panel * matrix.panel_floats + in_panel;
    bias[m] = matrix.bias + panel * panel_columns + in_panel;
  }
};

// y[r] = dot(rows[r], these columns) + bias, for R rows.
template <int R, int M>
MHA_INLINE void project_small(const float *const (&rows)[R], int64_t depth,
                              const SmallColumns<M> &columns, Vector (&y)[R][M * small_vectors]) {
  constexpr int C = small_vectors;
  clear(y);
  for (int64_t k = 0; k < depth; ++k) add_term<C, true>(rows, k, columns.w, k * panel_columns, y);
  MHA_EACH(i, M * C) {
    const Vector b = load(columns.bias[i / C] + i % C * Vector::size);
    MHA_EACH(r, R) y[r][i] = canonical(y[r][i] + b);
  }
}

// Projects R rows from `row` on to q, k and v. A last row without a partner is computed twice, here
// and below. Keys go from the context's memory to lanes of their tile.
template <int R>
MHA_INLINE void project_small_rows(const SmallLayer &layer, const SmallMemory &memory,
                                   const SmallCall &call, const float *x, int64_t row) {
  constexpr int C = small_vectors;
  const float *rows[R];
  int64_t number[R];
  MHA_EACH(r, R) {
    number[r] = min(row + r, call.n - 1);
    rows[r] = x + number[r] * call.x.row_stride;
  }
  // The three matrices are read side by side: 16 columns of each, for all R rows.
  for (int64_t column = 0; column < layer.max_columns; column += tile_keys) {
    SmallColumns<3> columns;
    MHA_EACH(m, 3) columns.put(m, layer.qkv[m], column);
    Vector y[R][3 * C];
    project_small(rows, layer.depth, columns, y);
    MHA_EACH_PAIR(r, R, i, C) {
      const int64_t at = column + i * Vector::size;
      store(memory.q + number[r] * memory.stride + at, y[r][i]);
      store(memory.context + r * memory.context_stride + at, y[r][C + i]);
      store(memory.v + number[r] * memory.stride + at, y[r][2 * C + i]);
    }
  }
  // Keys go to their lanes, one number at a time.
  for (int64_t column = 0; column < layer.k_columns; ++column) {
    float *const keys = memory.k + column * tile_keys;
    // The first key fills all lanes. Lanes without a key take part in the arithmetic, which is slow
    // if they happen to be subnormal.
    for (int i = 0; row == 0 && i < C; ++i)
      store(keys + i * Vector::size, all(memory.context[column]));
    MHA_EACH(r, R) keys[number[r]] = memory.context[r * memory.context_stride + column];
  }
}

// The products of terms [begin, end) of R queries with a tile of keys, which are one chain.
template <int R>
MHA_INLINE void multiply_small_keys(const float *const (&q)[R], int64_t begin, int64_t end,
                                    const float *k, Vector (&s)[R][small_vectors]) {
  const float *const keys_of_head[1] = {k};
  clear(s);
  for (int64_t d = begin; d < end; ++d)
    add_term<small_vectors>(q, d, keys_of_head, d * tile_keys, s);
}

// Adds the products of all chains but the first. Few heads are so wide that they have more than
// one.
template <int R>
MHA_NOINLINE void add_small_chains(const SmallLayer &layer, const float *const (&q)[R],
                                   const float *k, float (&scores)[R][tile_keys]) {
  constexpr int C = small_vectors, lanes = Vector::size;
  for (int64_t d = score_block; d < layer.head_dim; d += score_block) {
    Vector s[R][C];
    multiply_small_keys(q, d, min(layer.head_dim, d + score_block), k, s);
    MHA_EACH_PAIR(r, R, i, C) store(scores[r] + i * lanes, load(scores[r] + i * lanes) + s[r][i]);
  }
}

// Computes one head of R rows: scores, softmax and context over the first keys[r] keys.
template <int R>
MHA_INLINE void attend_small(const SmallLayer &layer, const SmallMemory &memory,
                             const float *const (&q)[R], const float *k, const float *v,
                             const int64_t (&keys)[R], float *context) {
  constexpr int C = small_vectors, lanes = Vector::size;
  alignas(64) float scores[R][tile_keys], weights[R][tile_keys];
  float l[R];
  Vector s[R][C], p[R * C];
  multiply_small_keys(q, 0, min(layer.head_dim, score_block), k, s);
  if (layer.head_dim > score_block) {
    MHA_EACH_PAIR(r, R, i, C) store(scores[r] + i * lanes, s[r][i]);
    const float *rows[R];
    MHA_EACH(r, R) rows[r] = q[r];
    add_small_chains<R>(layer, rows, k, scores);
    MHA_EACH_PAIR(r, R, i, C) s[r][i] = load(scores[r] + i * lanes);
  }
  // Scores, with -infinity for the keys that the row does not see, and the greatest of them.
  MHA_EACH(r, R) {
    Vector most = all(-infinity);
    MHA_EACH(i, C) {
      s[r][i] = first_lanes(s[r][i] * all(layer.scale), keys[r] - i * lanes, all(-infinity));
      most = max_of(s[r][i], most);
      store(scores[r] + i * lanes, s[r][i]);
    }
    // If no score is above -infinity, any finite maximum will do.
    const float m = greatest(most);
    MHA_EACH(i, C) p[r * C + i] = s[r][i] - all(m == -infinity ? 0.0f : m);
  }
  // All rows go through exp together.
  exp_of(p);
  MHA_EACH(r, R) {
    Vector parts[C];
    MHA_EACH(i, C) {
      parts[i] = p[r * C + i];
      store(weights[r] + i * lanes, parts[i]);
    }
    l[r] = sum16(parts);
  }
  // The context, one vector of columns at a time. A key with a score of -infinity takes no part.
  for (int64_t c = 0; c < layer.head_dim_v; c += lanes) {
    Vector o[R];
    MHA_EACH(r, R) o[r] = all(0.0f);
    for (int64_t j = 0; j < keys[R - 1]; ++j) {
      const Vector value = load(v + j * memory.stride + c);
      MHA_EACH(r, R) {
        if (scores[r][j] != -infinity) o[r] = mul_add(all(weights[r][j]), value, o[r]);
      }
    }
    MHA_EACH(r, R) {
      store(context + r * memory.context_stride + c,
            l[r] == 0.0f ? o[r] : canonical(o[r] * all(1.0f / l[r])));
    }
  }
}

// Multiplies R rows of the context by M strips of W_O, and writes the results.
template <int R, int M>
MHA_INLINE void project_small_strips(const SmallLayer &layer, const float *const (&rows)[R],
                                     int64_t column, float *const (&to)[R]) {
  constexpr int C = small_vectors;
  SmallColumns<M> columns;
  MHA_EACH(m, M) columns.put(m, layer.o, column + m * tile_keys);
  Vector y[R][M * C];
  project_small(rows, layer.context_columns, columns, y);
  MHA_EACH_PAIR(r, R, i, M * C) {
    const int64_t at = column + i * Vector::size;
    store_first(to[r] + at, y[r][i], layer.output_dim - at);
  }
}

// Multiplies R rows of the context by W_O. One strip has too few sums to keep the multiply-adds
// busy where its vectors are few.
template <int R>
MHA_INLINE void project_small_output(const SmallLayer &layer, const SmallMemory &memory,
                                     float *const (&to)[R]) {
  constexpr int M = small_vectors < 4 ? 2 : 1;
  const float *rows[R];
  MHA_EACH(r, R) rows[r] = memory.context + r * memory.context_stride;
  int64_t column = 0;
  for (; column + (M - 1) * tile_keys < layer.output_dim; column += M * tile_keys)
    project_small_strips<R, M>(layer, rows, column, to);
  if (M > 1 && column < layer.output_dim) project_small_strips<R, 1>(layer, rows, column, to);
}

// Computes R rows of the context and of the output. What a vector writes beyond the end of a head,
// the next head overwrites.
template <int R>
MHA_INLINE void finish_small_rows(const SmallLayer &layer, const SmallMemory &memory,
                                  const SmallCall &call, float *output, int64_t row) {
  const float *k = memory.k, *v = memory.v;
  const float *q[R];
  int64_t keys[R];
  float *context = memory.context, *to[R];
  MHA_EACH(r, R) {
    const int64_t number = min(row + r, call.n - 1);
    q[r] = memory.q + number * memory.stride;
    keys[r] = call.is_causal ? number + 1 : call.n;
    to[r] = output + number * call.output_row_stride;
  }
  for (int64_t kv_head = 0; kv_head < layer.num_kv_heads;
       ++kv_head, k += layer.head_dim * tile_keys, v += layer.head_dim_v) {
    for (int64_t i = 0; i < layer.heads_per_kv; ++i, context += layer.head_dim_v) {
      attend_small<R>(layer, memory, q, k, v, keys, context);
      MHA_EACH(r, R) q[r] += layer.head_dim;
    }
  }
  if (!layer.has_output) {
    for (int64_t i = 0; i < layer.output_dim; ++i) {
      MHA_EACH(r, R) to[r][i] = memory.context[r * memory.context_stride + i];
    }
  } else {
    project_small_output<R>(layer, memory, to);
  }
}

// The kernels' `run_small`.
inline void run_small(const SmallLayer &layer, const SmallCall &call, float *scratch) {
  const SmallMemory memory(layer, call.n, scratch);
  for (int64_t b = 0; b < call.batch; ++b) {
    const float *const x = static_cast<const float *>(call.x.base) + b * call.x.batch_stride;
    float *const output = call.output + b * call.output_batch_stride;
    if (!is_small_code && call.n == 1) {
      project_small_rows<1>(layer, memory, call, x, 0);
      finish_small_rows<1>(layer, memory, call, output, 0);
      continue;
    }
    for (int64_t row = 0; row < call.n; row += 2)
      project_small_rows<2>(layer, memory, call, x, row);
    for (int64_t row = 0; row < call.n; row += 2)
      finish_small_rows<2>(layer, memory, call, output, row);
  }
}

}  // namespace
}  // namespace mha
