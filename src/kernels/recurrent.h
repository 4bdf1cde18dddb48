// Recurrent attention: the rows of one sequence, one after the other, for some columns of one
// state. CONTRACT.md, section 18.
//
// Columns do not depend on each other. So a unit takes the state in blocks of columns, each of
// which lies side by side in the scratch memory and stays in the first-level cache while some rows
// go through it. The sums of a row are over the state that the row before has made: one pass over a
// block adds the change of that row and sums up for the next, which is one load and one store for
// each number. Before the first row comes one that changes nothing.
#pragma once

#include "elements.h"
#include "functions.h"

namespace mha {
namespace {

// ---- Preparing rows

// e(x) of the contract, for a canonical x: exp(x), for positive numbers as 1 / exp(-x).
MHA_NOINLINE inline Vector exp_of_any(Vector x) {
  const Vector zero = all(0.0f), e = exp_of(zero - max_of(x, zero - x));
  return value_if_less(zero, x, quotient_of(all(1.0f), e), e);
}

// The sum of products of two rows whose widths are multiples of 16, as section 5 orders it.
MHA_NOINLINE inline float sum_of_products(const float *x, const float *y, int64_t width) {
  constexpr int lanes = Vector::size, vectors = 16 / lanes;
  Vector sums[vectors];
  MHA_EACH(i, vectors) sums[i] = all(0.0f);
  for (int64_t d = 0; d < width; d += 16) {
    MHA_EACH(i, vectors)
      sums[i] = mul_add(load(x + d + i * lanes), load(y + d + i * lanes), sums[i]);
  }
  return sum16(sums);
}

// What changes a state: a prepared row's key and decay, and u of the block's columns.
struct StateChange {
  const float *key, *decay;
  int64_t decay_step;  // 0: one number for all rows
  const float *u;
};

// The rows of a call, as one unit sees them.
struct RecurrentUnit {
  const Recurrence &call;
  const SequenceRows &rows;
  int64_t head;
  int64_t column_begin, column_end;
  float *scratch;

  float *row(int64_t t) const {
    return scratch + call.scratch.rows + t % (recurrent_tokens + 1) * call.scratch.row_stride;
  }
  // After these, the row that changes nothing.
  float *nothing() const {
    return scratch + call.scratch.rows + (recurrent_tokens + 1) * call.scratch.row_stride;
  }
  StateChange change_of(const float *of_row, const float *u) const {
    return {of_row, of_row + call.scratch.decay, call.decay_dim > 1, u};
  }
  StateChange change(int64_t t, const float *u) const { return change_of(row(t), u); }
  StateChange nothing_changes() const {
    return change_of(nothing(), nothing() + call.scratch.value);
  }
  template <class Array>
  auto element(const Array &array, int64_t t, int64_t of_head, int64_t i) const {
    return element_at(array.base, array.storage,
                      rows.in_arrays * array.batch_stride + (rows.first + t) * array.row_stride +
                          of_head * array.head_stride + i);
  }
  int64_t key_head() const { return head / (call.num_v_heads / call.num_k_heads); }
  int64_t query_head(int64_t j) const {
    return (head * call.state_queries + j) /
           (call.state_queries * call.num_v_heads / call.num_q_heads);
  }
  // The state of this head in an array with `each` states for each sequence.
  int64_t state_offset(int64_t each, int64_t index) const {
    return ((rows.sequence * each + index) * call.num_v_heads + head) * call.head_dim *
           call.head_dim_v;
  }
};

// Widens a row, and fills it up with zeros. Most are short: calls of memcpy take longer than this.
MHA_INLINE void widen_padded(Storage storage, const char *from, int64_t count, int64_t padded,
                             float *to) {
  if (storage == Storage::f32)
    in_vectors<Vector>(count, [&](auto vector, int64_t i) MHA_INLINED {
      store(to + i, load<decltype(vector)>(reinterpret_cast<const float *>(from) + i));
    });
  else
    widen(storage, from, count, to);
  for (int64_t i = count; i < padded; ++i) to[i] = 0.0f;
}

// A query or a key, normalised.
MHA_NOINLINE inline void prepare_head(const RecurrentUnit &unit, const StridedRows &array,
                                      int64_t t, int64_t head, float *to) {
  const Recurrence &call = unit.call;
  const int64_t width = call.scratch.width;
  widen_padded(array.storage, unit.element(array, t, head, 0), call.head_dim, width, to);
  if (call.norm_epsilon == 0.0f) return;
  const float r = 1.0f / MHA_SQRTF(sum_of_products(to, to, width) + call.norm_epsilon);
  for (int64_t i = 0; i < width; i += Vector::size) store(to + i, load(to + i) * all(r));
}

// The gates of the rows [begin, end): decay as a factor, and beta. Those of several rows go through
// the functions together.
MHA_NOINLINE inline void prepare_gates(const RecurrentUnit &unit, int64_t begin, int64_t end) {
  const Recurrence &call = unit.call;
  const int64_t dim = call.decay_dim, head = unit.head;
  float *const gates = unit.scratch + call.scratch.gates, *const betas =
                                                              unit.scratch + call.scratch.betas;
  const float *const bias = call.dt_bias ? call.dt_bias + head * dim : nullptr;
  const auto read = [&](const StridedRows &array, int64_t t, int64_t count, float *to) MHA_INLINED {
    if (!array.base) return;
    const char *const from = unit.element(array, t, head, 0);
    if (count == 1 && array.storage == Storage::f32)
      *to = *reinterpret_cast<const float *>(from);
    else
      widen(array.storage, from, count, to);
  };
  for (int64_t t = begin; t < end; ++t) {
    float *const of_row = gates + (t - begin) * dim;
    read(call.decay, t, dim, of_row);
    for (int64_t i = 0; bias && i < dim; ++i) of_row[i] = of_row[i] + bias[i];
    read(call.beta, t, 1, betas + t - begin);
  }
  const float a_log = call.a_log ? canonical_nan(call.a_log[head]) : 0.0f;
  const Vector factor = all(0.0f) - exp_of_any(all(a_log));
  const int64_t count = call.decay.base ? (end - begin) * dim : 0,
                raw_betas = call.has_raw_beta ? end - begin : 0;
  for (int64_t i = 0; i < count; i += Vector::size) {  // there is room for whole vectors
    Vector x = canonical_nan(load(gates + i));
    if (call.a_log) x = canonical_nan(factor * softplus_of(x));
    store(gates + i, exp_of_any(x));
  }
  for (int64_t i = 0; i < raw_betas; i += Vector::size)
    store(betas + i, sigmoid_of(canonical_nan(load(betas + i))));
}

// Prepares the rows [begin, end): the prepared row before them stays.
MHA_NOINLINE inline void prepare_rows(const RecurrentUnit &unit, int64_t begin, int64_t end) {
  const Recurrence &call = unit.call;
  const RecurrentScratch &at = call.scratch;
  const int64_t head = unit.head, dim = call.decay_dim, queries = call.state_queries;
  const int64_t column = unit.column_begin, columns = unit.column_end - column;
  prepare_gates(unit, begin, end);
  for (int64_t t = begin; t < end; ++t) {
    float *const row = unit.row(t), *const factors = row + at.factors;
    const float *const gates = unit.scratch + at.gates + (t - begin) * dim;
    prepare_head(unit, call.k, t, unit.key_head(), row);
    widen_padded(call.v.storage, unit.element(call.v, t, head, column), columns,
                 (columns + recurrent_columns - 1) / recurrent_columns * recurrent_columns,
                 row + at.value + column);
    for (int64_t j = 0; j < queries; ++j) {
      float *const query = row + at.queries + j * at.width;
      prepare_head(unit, call.q, t, unit.query_head(j), query);
      factors[2 + j] = sum_of_products(query, row, at.width);
    }
    factors[0] = call.decay.base && dim == 1 ? gates[0] : 1.0f;
    factors[1] = unit.scratch[at.betas + t - begin];
    row[at.decay] = factors[0];
    if (dim == 1) continue;
    for (int64_t i = 0; i < at.width; i += Vector::size) {  // what lies behind `dim` is not used
      const Vector a = load(gates + i);
      store(row + at.decay + i, a);
      store(row + at.decayed_key + i, load(row + i) * a);
      for (int64_t j = 0; j < queries; ++j) {
        float *const query = row + at.queries + j * at.width + i;
        store(query, load(query) * a);
      }
    }
  }
}

// Prepares the row that changes nothing, as a row and as u of the contract.
MHA_INLINE void prepare_nothing(const RecurrentUnit &unit) {
  float *const row = unit.nothing();
  MHA_MEMSET(row, 0, static_cast<size_t>(unit.call.scratch.row_stride) * sizeof(float));
  for (int64_t i = 0; i < unit.call.decay_dim; ++i) row[unit.call.scratch.decay + i] = 1.0f;
}

// ---- Passes over a block of a state

// Rows of a block, or of its columns in an array of states.
struct StateRows {
  const float *base;
  int64_t stride;
};

// Sums up a block with Q rows of factors. With `changes`, it changes it before, and the result goes
// from `from` to `block`. Otherwise it prefetches the first half of `next`, a line for each row.
template <bool changes, int Q>
MHA_INLINE void pass(int64_t rows, const StateRows &from, float *block, const StateChange &change,
                     const float *next, const float *const (&factors)[Q], float *sums) {
  constexpr int lanes = Vector::size, columns = Q < 3 || lanes == 16 ? recurrent_columns : 16,
                N = columns / lanes;  // as many as stay in registers
  for (int64_t c = 0; c < recurrent_columns; c += columns) {
    Vector s[Q][N], u[N];
    MHA_EACH_PAIR(j, Q, n, N) s[j][n] = all(0.0f);
    if constexpr (changes) {
      MHA_EACH(n, N) u[n] = load(change.u + c + n * lanes);
    }
    const float *old = from.base + c, *decay = change.decay;
    float *to = block + c;
    for (int64_t i = 0; i < rows; ++i) {
      Vector x[N];
      if constexpr (changes) {
        const Vector a = all(*decay), key = all(change.key[i]);
        MHA_EACH(n, N) x[n] = mul_add(key, u[n], a * load(old + n * lanes));
        MHA_EACH(n, N) store(to + n * lanes, x[n]);
        to += recurrent_columns;
        decay += change.decay_step;
      } else {
        MHA_EACH(n, N) x[n] = load(old + n * lanes);
        MHA_PREFETCH_L2(next + i * 16);
      }
      MHA_EACH(j, Q) {
        const Vector factor = all(factors[j][i]);
        MHA_EACH(n, N) s[j][n] = mul_add(factor, x[n], s[j][n]);
      }
      old += from.stride;
    }
    MHA_EACH_PAIR(j, Q, n, N) store(sums + j * recurrent_columns + c + n * lanes, s[j][n]);
  }
}

// Writes the first `count` columns of a block, changed and canonical, to a state of the caller's.
// Prefetches the second half of `next`.
MHA_NOINLINE inline void write_state(const Recurrence &call, StateRows block,
                                     const StateChange &change, const float *next, int64_t count,
                                     float *to) {
  constexpr int lanes = Vector::size, N = recurrent_columns / lanes;
  alignas(64) float some[recurrent_columns];
  Vector u[N];
  MHA_EACH(n, N) u[n] = load(change.u + n * lanes);
  for (int64_t i = 0; i < call.head_dim; ++i) {
    float *const x = count == recurrent_columns ? to : some;
    const Vector key = all(change.key[i]), decay = all(change.decay[i * change.decay_step]);
    MHA_EACH(n, N)
      store(x + n * lanes, canonical(mul_add(key, u[n], decay * load(block.base + n * lanes))));
    if (count < recurrent_columns) MHA_MEMCPY(to, some, static_cast<size_t>(count) * sizeof(float));
    MHA_PREFETCH_L2(next + (call.head_dim + i) * 16);
    block.base += block.stride;
    to += call.head_dim_v;
  }
}

// Copies columns of the state before the call, or zeros, to a block.
MHA_NOINLINE inline void load_block(const Recurrence &call, const float *given, int64_t count,
                                    float *block) {
  MHA_MEMSET(block, 0, static_cast<size_t>(call.head_dim * recurrent_columns) * sizeof(float));
  for (int64_t i = 0; given && i < call.head_dim; ++i)
    widen(Storage::f32, given + i * call.head_dim_v, count, block + i * recurrent_columns);
}

// A block of columns of the unit, which has some rows under way.
struct RecurrentBlock {
  int64_t column, count;  // count: of its columns, those that the state has
  StateRows state;        // the block, or the caller's state as long as nothing has changed it
  float *block, *u;
  const float *next;  // a block's share of the state that the thread probably reads next
};

// Writes the snapshots that are the state before row t. Where a sequence has fewer rows, the others
// are the state before its first row.
MHA_NOINLINE inline void write_snapshots(const RecurrentUnit &unit, const RecurrentBlock &block,
                                         int64_t t) {
  const Recurrence &call = unit.call;
  const int64_t first = unit.rows.count > t ? unit.rows.count - 1 - t : 0,
                last = t > 0 ? first : call.num_snapshots - 1;
  for (int64_t i = first; i <= last && i < call.num_snapshots; ++i)
    write_state(call, block.state, unit.nothing_changes(), block.next, block.count,
                call.snapshots + unit.state_offset(call.num_snapshots, i) + block.column);
}

// Prefetches row t of the arrays, as far as the unit needs it: neighbouring rows of a head lie far
// apart. Inline, because g++ drops calls of a function that only prefetches.
MHA_INLINE void prefetch_rows_at(const RecurrentUnit &unit, int64_t t) {
  const Recurrence &call = unit.call;
  const int64_t queries = call.state_queries, column = unit.column_begin,
                columns = unit.column_end - column;
  const auto prefetch = [&](const auto &array, int64_t head, int64_t begin, int64_t count)
                            MHA_INLINED {
                              prefetch_row(unit.element(array, t, head, begin),
                                           array.storage == Storage::f32 ? 4 * count : 2 * count);
                            };
  prefetch(call.k, unit.key_head(), 0, call.head_dim);
  prefetch(call.v, unit.head, column, columns);
  for (int64_t j = 0; j < queries; ++j) {
    prefetch(call.q, unit.query_head(j), 0, call.head_dim);
    prefetch(call.output, unit.head * queries + j, column, columns);
  }
  if (call.decay_dim > 1) prefetch(call.decay, unit.head, 0, call.decay_dim);
}

// What follows a pass of row t: u, if it summed up with the key first, and the outputs of `queries`
// queries from `query` on.
MHA_NOINLINE inline void finish_pass(const RecurrentUnit &unit, const RecurrentBlock &block,
                                     int64_t t, int64_t query, int64_t queries, const float *sums) {
  constexpr int lanes = Vector::size, N = recurrent_columns / lanes;
  const Recurrence &call = unit.call;
  const float *const row = unit.row(t), *const factors = row + call.scratch.factors,
                     *const v = row + call.scratch.value + block.column;
  const Vector b = all(factors[0]), beta = all(factors[1]), scale = all(call.scale),
               minus_b = all(0.0f) - b;
  if (query == 0) {
    MHA_EACH(n, N) {
      const Vector x = load(v + n * lanes);
      store(block.u + n * lanes,
            call.beta.base ? beta * mul_add(minus_b, load(sums + n * lanes), x) : x);
    }
    sums += recurrent_columns;
    if (block.column == unit.column_begin && t + recurrent_tokens < unit.rows.count)
      prefetch_rows_at(unit, t + recurrent_tokens);
  }
  const bool is_direct = call.output.storage == Storage::f32 && block.count == recurrent_columns;
  for (int64_t j = query; j < query + queries; ++j) {
    auto *const to = unit.element(call.output, t, unit.head * call.state_queries + j, block.column);
    float *const x =
        is_direct ? reinterpret_cast<float *>(to) : unit.scratch + call.scratch.outputs;
    const Vector of_change = all(factors[2 + j]);
    MHA_EACH(n, N)
      store(x + n * lanes, canonical(scale * mul_add(of_change, load(block.u + n * lanes),
                                                     b * load(sums + n * lanes))));
    if (!is_direct) write_row(call.output.storage, x, block.count, to);
    sums += recurrent_columns;
  }
}

// The rows [begin, end), which are prepared, for one block. The pass that changes it sums up with
// one or two queries, and others follow in pairs.
MHA_NOINLINE inline void run_rows(const RecurrentUnit &unit, RecurrentBlock *block, int64_t begin,
                                  int64_t end) {
  const Recurrence &call = unit.call;
  const RecurrentScratch &at = call.scratch;
  const int64_t rows = call.head_dim, queries = call.state_queries;
  float *const sums = unit.scratch + at.sums;
  for (int64_t t = begin; t < end; ++t) {
    const float *const row = unit.row(t), *const key = row + at.decayed_key,
                       *const query = row + at.queries;
    const int64_t first = t > 0 && queries > 1 ? 2 : 1;
    if (t == 0)
      pass<false, 2>(rows, block->state, nullptr, {}, block->next, {key, query}, sums);
    else if (first == 1)
      pass<true, 2>(rows, block->state, block->block, unit.change(t - 1, block->u), {},
                    {key, query}, sums);
    else
      pass<true, 3>(rows, block->state, block->block, unit.change(t - 1, block->u), {},
                    {key, query, query + at.width}, sums);
    if (t > 0) block->state = {block->block, recurrent_columns};
    if (call.snapshots) write_snapshots(unit, *block, t);
    finish_pass(unit, *block, t, 0, first, sums);
    for (int64_t j = first; j < queries; j += 2) {
      const int64_t count = queries - j > 1 ? 2 : 1;
      pass<false, 2>(rows, block->state, nullptr, {}, block->block,
                     {query + j * at.width, query + (j + count - 1) * at.width}, sums);
      finish_pass(unit, *block, t, j, count, sums);
    }
  }
}

// The kernels' `advance_state`.
inline void advance_state(const Recurrence &call, const SequenceRows &rows, int64_t head,
                          int64_t column_begin, int64_t column_end, float *scratch) {
  const RecurrentUnit unit = {call, rows, head, column_begin, column_end, scratch};
  const RecurrentScratch &at = call.scratch;
  const int64_t state = unit.state_offset(1, 0);
  const float *const given = call.state ? call.state + state : nullptr;
  const float *const next = given && head + call.heads_ahead < call.num_v_heads
                                ? given + call.heads_ahead * call.head_dim * call.head_dim_v
                                : scratch + at.state;
  if (rows.count == 0 || call.snapshots) prepare_nothing(unit);
  int64_t begin = 0;
  do {
    const int64_t left = rows.count - begin,
                  end = begin + (left < recurrent_tokens ? left : recurrent_tokens);
    prepare_rows(unit, begin, end);
    for (int64_t column = column_begin; column < column_end; column += recurrent_columns) {
      const int64_t rest = column_end - column;
      float *const memory = scratch + at.state + column * call.head_dim;
      RecurrentBlock block = {column,
                              rest < recurrent_columns ? rest : recurrent_columns,
                              {memory, recurrent_columns},
                              memory,
                              scratch + at.changes + column,
                              next + column * call.head_dim};
      if (begin == 0) {
        if (given && rest >= recurrent_columns && rows.count > 0)
          block.state = {given + column, call.head_dim_v};
        else
          load_block(call, given ? given + column : nullptr, block.count, memory);
      }
      if (rows.count == 0 && call.snapshots) write_snapshots(unit, block, 0);
      run_rows(unit, &block, begin, end);
      if (end == rows.count && call.state_out)
        write_state(call, block.state,
                    end == 0 ? unit.nothing_changes() : unit.change(end - 1, block.u), block.next,
                    block.count, call.state_out + state + column);
    }
    begin = end;
  } while (begin < rows.count);
}

}  // namespace
}  // namespace mha
