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
template <class V>
MHA_NOINLINE V exp_of_any(V x) {
  const V zero = all<V>(0.0f), e = exp_of(zero - max_of(x, zero - x));
  return value_if_less(zero, x, quotient_of(all<V>(1.0f), e), e);
}

// The sum of products of two rows whose widths are multiples of 16, as section 5 orders it.
template <class V>
MHA_NOINLINE float sum_of_products(const float *x, const float *y, int64_t width) {
  constexpr int lanes = V::size, vectors = 16 / lanes;
  V sums[vectors];
  MHA_EACH(i, vectors) sums[i] = all<V>(0.0f);
  for (int64_t d = 0; d < width; d += 16) {
    MHA_EACH(i, vectors)
      sums[i] = mul_add(load<V>(x + d + i * lanes), load<V>(y + d + i * lanes), sums[i]);
  }
  return sum16(sums);
}

// to[i] = x[i] * y[i]
template <class V>
MHA_NOINLINE void multiply_row(const float *x, const float *y, int64_t width, float *to) {
  for (int64_t i = 0; i < width; i += V::size) store(to + i, load<V>(x + i) * load<V>(y + i));
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
  const char *element(const StridedRows &array, int64_t t, int64_t of_head, int64_t i) const {
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

// Widens a row, and fills it up with zeros.
template <class V>
MHA_INLINE void widen_padded(Storage storage, const char *from, int64_t count, int64_t padded,
                             float *to) {
  widen<V>(storage, from, count, to);
  MHA_MEMSET(to + count, 0, static_cast<size_t>(padded - count) * sizeof(float));
}

// A query or a key, normalised.
template <class V>
MHA_NOINLINE void prepare_head(const RecurrentUnit &unit, const StridedRows &array, int64_t t,
                               int64_t head, float *to) {
  const Recurrence &call = unit.call;
  const int64_t width = call.scratch.width;
  widen_padded<V>(array.storage, unit.element(array, t, head, 0), call.head_dim, width, to);
  if (call.norm_epsilon == 0.0f) return;
  const float r = 1.0f / MHA_SQRTF(sum_of_products<V>(to, to, width) + call.norm_epsilon);
  for (int64_t i = 0; i < width; i += V::size) store(to + i, load<V>(to + i) * all<V>(r));
}

// The gates of the rows [begin, end): decay as a factor, and beta. Those of several rows go through
// the functions together.
template <class V>
MHA_NOINLINE void prepare_gates(const RecurrentUnit &unit, int64_t begin, int64_t end) {
  const Recurrence &call = unit.call;
  const int64_t dim = call.decay_dim, head = unit.head;
  float *const gates = unit.scratch + call.scratch.gates, *const betas =
                                                              unit.scratch + call.scratch.betas;
  const float *const bias = call.dt_bias ? call.dt_bias + head * dim : nullptr;
  for (int64_t t = begin; t < end; ++t) {
    float *const of_row = gates + (t - begin) * dim;
    if (call.decay.base)
      widen<V>(call.decay.storage, unit.element(call.decay, t, head, 0), dim, of_row);
    for (int64_t i = 0; bias && i < dim; ++i) of_row[i] = of_row[i] + bias[i];
    if (call.beta.base)
      widen<V>(call.beta.storage, unit.element(call.beta, t, head, 0), 1, betas + t - begin);
  }
  const float a_log = call.a_log ? canonical_nan(call.a_log[head]) : 0.0f;
  const V factor = all<V>(0.0f) - exp_of_any(all<V>(a_log));
  const int64_t count = call.decay.base ? (end - begin) * dim : 0,
                raw_betas = call.has_raw_beta ? end - begin : 0;
  for (int64_t i = 0; i < count; i += V::size) {  // there is room for whole vectors
    V x = canonical_nan(load<V>(gates + i));
    if (call.a_log) x = canonical_nan(factor * softplus_of(x));
    store(gates + i, exp_of_any(x));
  }
  for (int64_t i = 0; i < raw_betas; i += V::size)
    store(betas + i, sigmoid_of(canonical_nan(load<V>(betas + i))));
}

// Prepares the rows [begin, end): the prepared row before them stays.
template <class V>
MHA_NOINLINE void prepare_rows(const RecurrentUnit &unit, int64_t begin, int64_t end) {
  const Recurrence &call = unit.call;
  const RecurrentScratch &at = call.scratch;
  const int64_t head = unit.head, dim = call.decay_dim, queries = call.state_queries;
  const int64_t column = unit.column_begin, columns = unit.column_end - column;
  prepare_gates<V>(unit, begin, end);
  for (int64_t t = begin; t < end; ++t) {
    float *const row = unit.row(t), *const factors = row + at.factors;
    const float *const gates = unit.scratch + at.gates + (t - begin) * dim;
    prepare_head<V>(unit, call.k, t, unit.key_head(), row);
    widen_padded<V>(call.v.storage, unit.element(call.v, t, head, column), columns,
                    (columns + recurrent_columns - 1) / recurrent_columns * recurrent_columns,
                    row + at.value + column);
    for (int64_t j = 0; j < queries; ++j) {
      float *const query = row + at.queries + j * at.width;
      prepare_head<V>(unit, call.q, t, unit.query_head(j), query);
      factors[2 + j] = sum_of_products<V>(query, row, at.width);
    }
    factors[0] = call.decay.base && dim == 1 ? gates[0] : 1.0f;
    factors[1] = unit.scratch[at.betas + t - begin];
    row[at.decay] = factors[0];
    if (dim == 1) continue;
    for (int64_t i = 0; i < dim; ++i) row[at.decay + i] = gates[i];
    for (int64_t i = dim; i < at.width; ++i) row[at.decay + i] = 0.0f;
    multiply_row<V>(row, row + at.decay, at.width, row + at.decayed_key);
    for (int64_t j = 0; j < queries; ++j) {
      float *const query = row + at.queries + j * at.width;
      multiply_row<V>(query, row + at.decay, at.width, query);
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

// The columns of a block of which the sums of a pass stay in registers, with this many queries.
template <class V>
constexpr int columns_with(int64_t queries) {
  return queries == 1 || V::size == 16 ? 32 : 16;
}

// Rows of a block, or of its columns in an array of states.
struct StateRows {
  const float *base;
  int64_t stride;
};

// Sums up a block: r with the decayed key, and p with Q queries. With `changes`, it changes it
// before, and the result goes from `from` to `block`. Otherwise `next` has columns that are wanted
// soon, whose first line of each row is prefetched.
template <bool changes, class V, int columns, int Q>
MHA_INLINE void pass(int64_t rows, StateRows from, float *block, const StateChange &change,
                     const StateRows &next, const float *key, const float *queries,
                     int64_t query_stride, float *sums) {
  constexpr int lanes = V::size, N = columns / lanes;
  V r[N], p[Q][N], u[N];
  MHA_EACH(n, N) r[n] = all<V>(0.0f);
  MHA_EACH(j, Q)
    MHA_EACH(n, N) p[j][n] = all<V>(0.0f);
  MHA_EACH(n, N) u[n] = load<V>(change.u + n * lanes);
  const float *decay = change.decay, *wanted = next.base;
  for (int64_t i = 0; i < rows; ++i) {
    V x[N];
    if constexpr (changes) {
      const V a = all<V>(*decay), changing = all<V>(change.key[i]);
      MHA_EACH(n, N) x[n] = mul_add(changing, u[n], a * load<V>(from.base + n * lanes));
      MHA_EACH(n, N) store(block + n * lanes, x[n]);
      block += columns;
      decay += change.decay_step;
    } else {
      MHA_EACH(n, N) x[n] = load<V>(from.base + n * lanes);
      MHA_PREFETCH_L2(wanted);
      wanted += next.stride;
    }
    const V k = all<V>(key[i]);
    MHA_EACH(n, N) r[n] = mul_add(k, x[n], r[n]);
    MHA_EACH(j, Q) {
      const V q = all<V>(queries[j * query_stride + i]);
      MHA_EACH(n, N) p[j][n] = mul_add(q, x[n], p[j][n]);
    }
    from.base += from.stride;
  }
  MHA_EACH(n, N) store(sums + n * lanes, r[n]);
  MHA_EACH(j, Q)
    MHA_EACH(n, N) store(sums + (1 + j) * columns + n * lanes, p[j][n]);
}

// Writes the first `count` columns of a block, changed and canonical, to a state of the caller's.
// Prefetches the last line of each row of `next`.
template <class V>
MHA_NOINLINE void write_state(const Recurrence &call, const StateRows &block,
                              const StateChange &change, const StateRows &next, int64_t count,
                              float *to) {
  for (int64_t i = 0; i < call.head_dim; ++i) {
    const float key = change.key[i], decay = change.decay[i * change.decay_step];
    const float *const from = block.base + i * block.stride;
    in_vectors<V>(count, [&](auto vector, int64_t c) MHA_INLINED {
      using T = decltype(vector);
      store(to + c, canonical(mul_add(all<T>(key), load<T>(change.u + c),
                                      all<T>(decay) * load<T>(from + c))));
    });
    to += call.head_dim_v;
    MHA_PREFETCH_L2(next.base + i * next.stride + count - 1);
  }
}

// Copies columns of the state before the call, or zeros, to a block.
template <class V>
MHA_NOINLINE void load_block(const Recurrence &call, const float *given, int64_t count,
                             int64_t columns, float *block) {
  MHA_MEMSET(block, 0, static_cast<size_t>(call.head_dim * columns) * sizeof(float));
  for (int64_t i = 0; given && i < call.head_dim; ++i) {
    in_vectors<V>(count, [&](auto vector, int64_t c) MHA_INLINED {
      store(block + i * columns + c, load<decltype(vector)>(given + i * call.head_dim_v + c));
    });
  }
}

// A block of columns of the unit, which has some rows under way.
struct RecurrentBlock {
  int64_t column, columns;
  int64_t count;    // of these columns, those that the state has
  StateRows state;  // the block, or the caller's state as long as nothing has changed it
  float *block, *u;
  StateChange nothing;  // of the row that changes nothing
  StateRows next;       // what the unit, or probably the thread, reads after it
};

// Writes the snapshots that are the state before row t. Where a sequence has fewer rows, the others
// are the state before its first row.
template <class V>
MHA_NOINLINE void write_snapshots(const RecurrentUnit &unit, const RecurrentBlock &block,
                                  int64_t t) {
  const Recurrence &call = unit.call;
  const int64_t first = unit.rows.count > t ? unit.rows.count - 1 - t : 0,
                last = t > 0 ? first : call.num_snapshots - 1;
  for (int64_t i = first; i <= last && i < call.num_snapshots; ++i)
    write_state<V>(call, block.state, block.nothing, block.next, block.count,
                   call.snapshots + unit.state_offset(call.num_snapshots, i) + block.column);
}

// u of row t, and its outputs of `queries` queries from `first` on, from the sums of a pass.
template <class V>
MHA_NOINLINE void finish_row(const RecurrentUnit &unit, const RecurrentBlock &block, int64_t t,
                             int64_t first, int64_t queries, const float *sums) {
  const Recurrence &call = unit.call;
  const OutputRows &output = call.output;
  const float *const row = unit.row(t), *const factors = row + call.scratch.factors,
                     *const v = row + call.scratch.value + block.column;
  const V b = all<V>(factors[0]), beta = all<V>(factors[1]), scale = all<V>(call.scale),
          minus_b = all<V>(0.0f) - b;
  if (first == 0) {
    for (int64_t c = 0; c < block.columns; c += V::size) {
      const V x = load<V>(v + c);
      store(block.u + c, call.beta.base ? beta * mul_add(minus_b, load<V>(sums + c), x) : x);
    }
  }
  for (int64_t j = first; j < first + queries; ++j) {
    sums += block.columns;
    const int64_t at = unit.rows.in_arrays * output.batch_stride +
                       (unit.rows.first + t) * output.row_stride +
                       (unit.head * call.state_queries + j) * output.head_stride + block.column;
    void *const to = element_at(output.base, output.storage, at);
    const bool is_direct = output.storage == Storage::f32 && block.count == block.columns;
    float *const x = is_direct ? static_cast<float *>(to) : unit.scratch + call.scratch.outputs;
    const V of_change = all<V>(factors[2 + j]);
    for (int64_t c = 0; c < block.columns; c += V::size)
      store(x + c,
            canonical(scale * mul_add(of_change, load<V>(block.u + c), b * load<V>(sums + c))));
    if (!is_direct) write_row(output.storage, x, block.count, to);
  }
}

// Prefetches row t of q, k and v, as far as the unit reads it: neighbouring rows of a head lie far
// apart. Inline, because g++ drops calls of a function that only prefetches.
MHA_INLINE void prefetch_inputs(const RecurrentUnit &unit, int64_t t) {
  const Recurrence &call = unit.call;
  const int64_t queries = call.state_queries, column = unit.column_begin;
  const auto prefetch = [&](const StridedRows &array, int64_t head, int64_t begin, int64_t count)
                            MHA_INLINED {
                              prefetch_row(unit.element(array, t, head, begin),
                                           array.storage == Storage::f32 ? 4 * count : 2 * count);
                            };
  prefetch(call.k, unit.key_head(), 0, call.head_dim);
  prefetch(call.v, unit.head, column, unit.column_end - column);
  for (int64_t j = 0; j < queries; ++j) prefetch(call.q, unit.query_head(j), 0, call.head_dim);
}

// The rows [begin, end), which are prepared, for one block. Q: the queries that are summed up
// together; others take passes of their own.
template <class V, int columns, int Q>
MHA_NOINLINE void run_rows(const RecurrentUnit &unit, RecurrentBlock *block, int64_t begin,
                           int64_t end) {
  const Recurrence &call = unit.call;
  const RecurrentScratch &at = call.scratch;
  const int64_t queries = call.state_queries;
  float *const sums = unit.scratch + at.sums;
  for (int64_t t = begin; t < end; ++t) {
    const float *const row = unit.row(t);
    if (block->column == unit.column_begin && t + recurrent_tokens < unit.rows.count)
      prefetch_inputs(unit, t + recurrent_tokens);
    for (int64_t first = 0; first < queries; first += Q) {
      const float *const query = row + at.queries + first * at.width, *const key =
                                                                          row + at.decayed_key;
      if (first == 0 && t > 0) {
        pass<true, V, columns, Q>(call.head_dim, block->state, block->block,
                                  unit.change(t - 1, block->u), {}, key, query, at.width, sums);
        block->state = {block->block, columns};
      } else {
        pass<false, V, columns, Q>(call.head_dim, block->state, nullptr, block->nothing,
                                   block->next, key, query, at.width, sums);
      }
      if (first == 0 && call.snapshots) write_snapshots<V>(unit, *block, t);
      finish_row<V>(unit, *block, t, first, queries - first < Q ? queries - first : Q, sums);
    }
  }
}

// The kernels' `advance_state`.
template <class V>
void advance_state(const Recurrence &call, const SequenceRows &rows, int64_t head,
                   int64_t column_begin, int64_t column_end, float *scratch) {
  const RecurrentUnit unit = {call, rows, head, column_begin, column_end, scratch};
  const RecurrentScratch &at = call.scratch;
  const int64_t queries = call.state_queries, columns = columns_with<V>(call.state_queries);
  prepare_nothing(unit);
  int64_t begin = 0;
  do {
    const int64_t left = rows.count - begin,
                  end = begin + (left < recurrent_tokens ? left : recurrent_tokens);
    prepare_rows<V>(unit, begin, end);
    for (int64_t column = column_begin; column < column_end; column += columns) {
      const int64_t rest = column_end - column, count = rest < columns ? rest : columns,
                    of_state = unit.state_offset(1, 0) + column;
      float *const memory = scratch + at.state + column * call.head_dim;
      const float *const given = call.state ? call.state + of_state : nullptr;
      RecurrentBlock block = {column,
                              columns,
                              count,
                              {memory, columns},
                              memory,
                              scratch + at.changes + column,
                              unit.nothing_changes(),
                              {given, call.head_dim_v}};
      if (rest > columns)
        block.next.base += columns;
      else if (head + 1 < call.num_v_heads)
        block.next.base += call.head_dim * call.head_dim_v + column_begin - column;
      if (!given) block.next = block.state;
      if (begin == 0) {
        if (given && count == columns && rows.count > 0)
          block.state = {given, call.head_dim_v};
        else
          load_block<V>(call, given, count, columns, memory);
      }
      if (rows.count == 0 && call.snapshots) write_snapshots<V>(unit, block, 0);
      if (queries == 1)
        run_rows<V, columns_with<V>(1), 1>(unit, &block, begin, end);
      else if (queries == 2)
        run_rows<V, columns_with<V>(2), 2>(unit, &block, begin, end);
      else
        run_rows<V, columns_with<V>(4), 4>(unit, &block, begin, end);
      if (end == rows.count && call.state_out)
        write_state<V>(call, block.state, end == 0 ? block.nothing : unit.change(end - 1, block.u),
                       block.next, count, call.state_out + of_state);
    }
    begin = end;
  } while (begin < rows.count);
}

}  // namespace
}  // namespace mha
