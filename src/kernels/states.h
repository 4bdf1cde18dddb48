// The states (m, l, o) of chunks: merged as CONTRACT.md section 9 says, and finished rows made of them.
#pragma once

#include "kernels/functions.h"
#include "kernels/unit.h"

namespace mha {
namespace {

// Slot `left` becomes merge(left, right), for rows [begin, end). The factors of 16 rows are computed side by side.
template <class V>
MHA_NOINLINE void merge(const Unit &unit, int64_t left, int64_t right, int64_t begin, int64_t end) {
  constexpr int64_t rows_at_once = merge_rows, vectors = rows_at_once / V::size;
  const int64_t width = unit.call.head_dim_v_padded;
  for (int64_t row = begin; row < end; row += rows_at_once) {
    alignas(64) float m[rows_at_once], l[rows_at_once], a[rows_at_once], b[rows_at_once];
    MHA_UNROLL for (int i = 0; i < vectors; ++i) {
      const int64_t at = i * V::size;
      const V m1 = load<V>(unit.m(left, row) + at), m2 = load<V>(unit.m(right, row) + at);
      const V most = max_of(m2, m1);
      V factors[2] = {m1 - most, m2 - most};
      exp_of(factors);
      store(m + at, most);
      store(l + at, mul_add(load<V>(unit.l(left, row) + at), factors[0], load<V>(unit.l(right, row) + at) * factors[1]));
      store(a + at, factors[0]);
      store(b + at, factors[1]);
    }
    for (int64_t i = 0; i < min(rows_at_once, end - row); ++i) {
      float *const o1 = unit.o(left, row + i);
      const float *const o2 = unit.o(right, row + i);
      const float l1 = *unit.l(left, row + i), l2 = *unit.l(right, row + i);
      if (l2 == 0.0f) continue;
      const bool is_copy = l1 == 0.0f;
      *unit.m(left, row + i) = is_copy ? *unit.m(right, row + i) : m[i];
      *unit.l(left, row + i) = is_copy ? l2 : l[i];
      const V va = all<V>(a[i]), vb = all<V>(b[i]);
      for (int64_t c = 0; c < width; c += V::size) {
        store(o1 + c, is_copy ? load<V>(o2 + c) : mul_add(load<V>(o1 + c), va, load<V>(o2 + c) * vb));
      }
    }
  }
}

// The states before chunk c, when chunk `first` was the first, as a binary counter: those subtrees that hold a chunk, one for each 1 among
// the digits of c but for the leading ones that c has in common with `first`.
MHA_INLINE int64_t slots_before(int64_t c, int64_t first) {
  if (c == first) return 0;
  const int digit = 63 - __builtin_clzll(static_cast<unsigned long long>(c ^ first));
  return __builtin_popcountll(static_cast<unsigned long long>(c) & ((2ull << digit) - 1));
}

// After chunks [c, c + count), which are a subtree of one, two or four, each in a slot of its own from slots_before(c, first) on: merges
// them, and the subtree with the one before it as long as both are halves of a larger one. For the rows from first_row on.
template <class V>
MHA_NOINLINE void merge_chunks(const Unit &unit, int64_t c, int64_t count, int64_t first, int64_t first_row) {
  int64_t slot = slots_before(c, first), level = 0;
  for (; 1 << level < count; ++level) {
    const int64_t apart = 1 << level;
    for (int64_t left = slot; left < slot + count; left += 2 * apart) merge<V>(unit, left, left + apart, first_row, unit.num_rows);
  }
  for (; (c >> level & 1) && c >> level << level > first; ++level, --slot) merge<V>(unit, slot - 1, slot, first_row, unit.num_rows);
}

// After the last chunk, c: what is left, starting at the right.
template <class V>
MHA_NOINLINE void merge_rest(const Unit &unit, int64_t c, int64_t first, int64_t begin, int64_t end) {
  for (int64_t left = slots_before(c + 1, first) - 2; left >= 0; --left) merge<V>(unit, left, left + 1, begin, end);
}

inline void clear_states(const Unit &unit, int64_t slot, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    *unit.m(slot, row) = -infinity;
    *unit.l(slot, row) = 0.0f;
  }
}

// The sink of a row's head, a score without a value, joins the finished state of the row, unless that is empty.
template <class V>
inline void add_sink(const Unit &unit, const Row &row) {
  float *const m = unit.m(0, row.index), *const l = unit.l(0, row.index), *const o = unit.o(0, row.index);
  if (*l == 0.0f) return;
  const float sink = unit.call.options.sinks[row.head], most = sink > *m ? sink : *m;
  const float a = exp_of(*m - most);
  *l = mul_add(*l, a, exp_of(sink - most));
  *m = most;
  for (int64_t c = 0; c < unit.call.head_dim_v_padded; c += V::size) store(o + c, mul_add(load<V>(o + c), all<V>(a), all<V>(0.0f)));
}

// x = canon(x * factor)
template <class V>
MHA_NOINLINE void scale_context(float factor, int64_t count, float *x) {
  int64_t c = 0;
  for (; c + static_cast<int64_t>(V::size) <= count; c += V::size) store(x + c, canonical(load<V>(x + c) * all<V>(factor)));
  for (; c < count; ++c) x[c] = canonical(x[c] * factor);
}

template <class V>
MHA_NOINLINE V factor_of(const Gate &gate, V g) {
  g = canonical_nan(g);
  return gate.is_sigmoid ? sigmoid_of(g) : softplus_of(g);
}

// A row of the context times the function of its gate.
template <class V>
MHA_NOINLINE void apply_gate(const Unit &unit, const Row &row, float *x) {
  const Gate &gate = unit.call.gate;
  const float *const g = static_cast<const float *>(gate.values.base) + unit.sequence_index * gate.values.batch_stride +
                         unit.array_row(row) * gate.values.row_stride + row.head * gate.values.head_stride;
  const int64_t width = unit.call.head_dim_v;
  if (gate.is_single) return scale_context<V>(factor_of(gate, Scalar{g[0]}).x, width, x);
  int64_t c = 0;
  for (; c + static_cast<int64_t>(V::size) <= width; c += V::size) {
    store(x + c, canonical(load<V>(x + c) * factor_of(gate, load<V>(g + c))));
  }
  for (; c < width; ++c) x[c] = canonical(x[c] * factor_of(gate, Scalar{g[c]}).x);
}

// What becomes of a row of the context in options that most calls do without. x: the output, unless that is to be narrowed.
template <class V>
MHA_NOINLINE void rework_context(const Unit &unit, const Row &row, bool is_empty, float *x) {
  const Attention &call = unit.call;
  if (call.options.head_scales) scale_context<V>(call.options.head_scales[row.head], call.head_dim_v, x);
  if (float *const tap = unit.context_tap(row)) {
    for (int64_t i = 0; i < call.head_dim_v; ++i) tap[i] = x[i];
  }
  if (call.gate.values.base && !is_empty) apply_gate<V>(unit, row, x);
  if (call.output_storage != Storage::f32) narrow(call.output_storage, x, call.head_dim_v, unit.output(row));
}

// The finished rows of the unit. (Addresses are kept beside the row: a vector that is stored may be anything's, so that they would be made
// anew for each row.)
template <class V>
inline void finish(const Unit &unit) {
  const Attention &call = unit.call;
  const int64_t width = call.head_dim_v, padded = call.head_dim_v_padded, whole = width - width % static_cast<int64_t>(V::size);
  const bool is_narrowed = call.output_storage != Storage::f32, has_sinks = call.options.sinks, reworks = call.reworks_context;
  const bool keeps_states = call.row_maxima || call.lse;
  float *o = unit.o(0, 0);
  const float *m = unit.m(0, 0), *sums = unit.l(0, 0);
  for (Row row = unit.row(0); row.index < unit.num_rows; unit.advance(&row), o += padded, ++m, ++sums) {
    if (has_sinks) add_sink<V>(unit, row);
    const float l = *sums;
    float *const out = is_narrowed ? o : static_cast<float *>(unit.output(row));
    const bool is_empty = l == 0.0f;
    const V inverse = all<V>(1.0f / l);
    const auto finished = [&](int64_t c) MHA_INLINED { return is_empty ? all<V>(0.0f) : canonical(load<V>(o + c) * inverse); };
    for (int64_t c = 0; c < whole; c += V::size) store(out + c, finished(c));
    if (whole < width) {
      store(o + whole, finished(whole));
      for (int64_t c = whole; c < width; ++c) out[c] = o[c];
    }
    if (reworks) rework_context<V>(unit, row, is_empty, out);
    if (!keeps_states) continue;
    if (call.row_maxima) {
      call.row_maxima[unit.output_row(row)] = *m;
      call.row_sums[unit.output_row(row)] = l;
    }
    if (call.lse) call.lse[unit.output_row(row)] = is_empty ? -infinity : canonical(*m + log_of(l));
  }
}

}  // namespace
}  // namespace mha
