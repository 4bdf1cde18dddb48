// The partials (m, l, o) of rows: m is the greatest score, l the sum of exp(score - m), and o the
// sum of exp(score - m) * value.
//
// In this order: merging partials of chunks by the tree that CONTRACT.md, section 9, fixes;
// finishing rows, o / l with sinks, head scales and gates (section 10); partials that are handed
// out to the caller, merged and finished by calls of their own; and the norm of the context before
// W_O. The tree makes results independent of how chunks are shared out between threads.
#pragma once

#include "functions.h"
#include "prepare.h"
#include "unit.h"

namespace mha {
namespace {

// Merges the partials `right` into `left`, for rows [begin, end). A partial without a key that
// takes part (l is 0) leaves the other one as it is. The factors of 16 rows are computed side by
// side.
template <class V>
MHA_NOINLINE void merge(const Unit &unit, float *left, const float *right, int64_t begin,
                        int64_t end) {
  constexpr int64_t rows_at_once = merge_rows, vectors = rows_at_once / V::size;
  const int64_t width = unit.call.plan.head_dim_v_padded;
  const int64_t to_m = unit.m(0, 0) - unit.o(0, 0), to_l = unit.l(0, 0) - unit.o(0, 0);
  float *const left_m = left + to_m, *const left_l = left + to_l;
  const float *const right_m = right + to_m, *const right_l = right + to_l;
  for (int64_t row = begin; row < end; row += rows_at_once) {
    alignas(64) float m[rows_at_once], l[rows_at_once], a[rows_at_once], b[rows_at_once];
    // m and l of 16 rows, and the factors of their o. Rows past the last read memory that is not
    // used.
    MHA_EACH(i, vectors) {
      const int64_t at = i * V::size;
      const V m1 = load<V>(left_m + row + at), m2 = load<V>(right_m + row + at);
      const V most = max_of(m2, m1);
      V factors[2] = {m1 - most, m2 - most};
      exp_of(factors);
      store(m + at, most);
      store(l + at, mul_add(load<V>(left_l + row + at), factors[0],
                            load<V>(right_l + row + at) * factors[1]));
      store(a + at, factors[0]);
      store(b + at, factors[1]);
    }
    // Then o, row by row.
    for (int64_t i = 0; i < min(rows_at_once, end - row); ++i) {
      float *const o1 = left + (row + i) * width;
      const float *const o2 = right + (row + i) * width;
      const float l1 = left_l[row + i], l2 = right_l[row + i];
      if (l2 == 0.0f) continue;
      const bool is_copy = l1 == 0.0f;
      left_m[row + i] = is_copy ? right_m[row + i] : m[i];
      left_l[row + i] = is_copy ? l2 : l[i];
      const V va = all<V>(a[i]), vb = all<V>(b[i]);
      for (int64_t c = 0; c < width; c += V::size) {
        store(o1 + c,
              is_copy ? load<V>(o2 + c) : mul_add(load<V>(o1 + c), va, load<V>(o2 + c) * vb));
      }
    }
  }
}

// How many slots are in use before chunk c, if `first` was the first chunk. The slots count chunks
// in binary: each holds a subtree of 1, 2, 4, ... chunks, one for each digit 1 of c, without the
// leading digits that c has in common with `first`.
MHA_INLINE int64_t slots_before(int64_t c, int64_t first) {
  if (c == first) return 0;
  const int digit = highest_bit(static_cast<uint64_t>(c ^ first));
  return count_bits(static_cast<uint64_t>(c) & ((uint64_t{2} << digit) - 1));
}

// Merges after chunks [c, c + count), which are one, two or four in slots of their own. First these
// become one subtree, and then two subtrees become one as long as they are the halves of a larger
// one, like the carry when a binary counter counts on. Rows before first_row are done.
template <class V>
MHA_NOINLINE void merge_chunks(const Unit &unit, int64_t c, int64_t count, int64_t first,
                               int64_t first_row) {
  int64_t slot = slots_before(c, first), level = 0;
  for (; 1 << level < count; ++level) {
    const int64_t apart = 1 << level;
    for (int64_t left = slot; left < slot + count; left += 2 * apart)
      merge<V>(unit, unit.o(left, 0), unit.o(left + apart, 0), first_row, unit.num_rows);
  }
  for (; (c >> level & 1) && c >> level << level > first; ++level, --slot)
    merge<V>(unit, unit.o(slot - 1, 0), unit.o(slot, 0), first_row, unit.num_rows);
}

// Merges the subtrees that are left after the last chunk, c, from the right to the left.
template <class V>
MHA_NOINLINE void merge_rest(const Unit &unit, int64_t c, int64_t first, int64_t begin,
                             int64_t end) {
  for (int64_t left = slots_before(c + 1, first) - 2; left >= 0; --left)
    merge<V>(unit, unit.o(left, 0), unit.o(left + 1, 0), begin, end);
}

// The partials of rows without a key.
inline void clear_partials(const Unit &unit, int64_t slot, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    *unit.m(slot, row) = -infinity;
    *unit.l(slot, row) = 0.0f;
  }
}

// Adds a sink, which is a score without a value, to m and l of a partial that is not empty. Returns
// the factor for o.
MHA_INLINE float join_sink(float sink, float *m, float *l) {
  const float most = sink > *m ? sink : *m, a = exp_of(*m - most);
  *l = mul_add(*l, a, exp_of(sink - most));
  *m = most;
  return a;
}

// Adds the sink of a row's head to the merged partial of the row, unless that is empty.
template <class V>
inline void add_sink(const Unit &unit, const Row &row) {
  float *const m = unit.m(0, row.index), *const l = unit.l(0, row.index),
               *const o = unit.o(0, row.index);
  if (*l == 0.0f) return;
  const float a = join_sink(unit.call.request.options.sinks[row.head], m, l);
  for (int64_t c = 0; c < unit.call.plan.head_dim_v_padded; c += V::size)
    store(o + c, mul_add(load<V>(o + c), all<V>(a), all<V>(0.0f)));
}

// x = canon(x * factor)
template <class V>
MHA_NOINLINE void scale_context(float factor, int64_t count, float *x) {
  in_vectors<V>(count, [&](auto vector, int64_t c) MHA_INLINED {
    using T = decltype(vector);
    store(x + c, canonical(load<T>(x + c) * all<T>(factor)));
  });
}

// The function of a gate: what its numbers multiply the context by.
template <class V>
MHA_NOINLINE V factor_of(const Gate &gate, V g) {
  g = canonical_nan(g);
  return gate.is_sigmoid ? sigmoid_of(g) : softplus_of(g);
}

// Multiplies a head's row of the context by its gate.
template <class V>
MHA_NOINLINE void apply_gate(const Gate &gate, int64_t sequence, int64_t array_row, int64_t head,
                             int64_t width, float *x) {
  const float *const g = static_cast<const float *>(gate.values.base) +
                         sequence * gate.values.batch_stride + array_row * gate.values.row_stride +
                         head * gate.values.head_stride;
  if (gate.is_single) return scale_context<V>(factor_of(gate, Scalar{g[0]}).x, width, x);
  in_vectors<V>(width, [&](auto vector, int64_t c) MHA_INLINED {
    using T = decltype(vector);
    store(x + c, canonical(load<T>(x + c) * factor_of(gate, load<T>(g + c))));
  });
}

// Applies the options to a finished row that most calls do without: head scale, the output
// `context`, gate, and 16 bits. x is the output, or scratch memory if the output has 16 bits.
template <class V>
MHA_NOINLINE void rework_context(const Unit &unit, const Row &row, bool is_empty, float *x) {
  const Attention &call = unit.call;
  if (call.request.options.head_scales)
    scale_context<V>(call.request.options.head_scales[row.head], call.request.head_dim_v, x);
  if (float *const tap = unit.context_tap(row)) {
    for (int64_t i = 0; i < call.request.head_dim_v; ++i) tap[i] = x[i];
  }
  if (call.arrays.gate.values.base && !call.request.gates_late && !is_empty)
    apply_gate<V>(call.arrays.gate, unit.sequence_index, unit.array_row(row), row.head,
                  call.request.head_dim_v, x);
  if (call.arrays.output.storage != Storage::f32)
    narrow(call.arrays.output.storage, x, call.request.head_dim_v, unit.output(row));
}

// Finishes the rows of a unit: o / l, or 0 without a key, to the output, and lse and other sums
// where they are asked for. Addresses are stepped from row to row beside the row: a vector that is
// stored might change anything, so that they would be computed anew for each row.
template <class V>
inline void finish(const Unit &unit) {
  const Attention &call = unit.call;
  const int64_t width = call.request.head_dim_v, padded = call.plan.head_dim_v_padded,
                whole = width - width % V::size;
  const bool is_narrowed = call.arrays.output.storage != Storage::f32,
             has_sinks = call.request.options.sinks, reworks = call.run.reworks_context;
  const bool keeps_partials = call.run.row_maxima || call.request.lse;
  float *o = unit.o(0, 0);
  const float *m = unit.m(0, 0), *sums = unit.l(0, 0);
  for (Row row = unit.row(0); row.index < unit.num_rows;
       unit.advance(&row), o += padded, ++m, ++sums) {
    if (has_sinks) add_sink<V>(unit, row);
    const float l = *sums;
    float *const out = is_narrowed ? o : static_cast<float *>(unit.output(row));
    const bool is_empty = l == 0.0f;
    const V inverse = all<V>(1.0f / l);
    const auto finished = [&](int64_t c) MHA_INLINED {
      return is_empty ? all<V>(0.0f) : canonical(load<V>(o + c) * inverse);
    };
    for (int64_t c = 0; c < whole; c += V::size) store(out + c, finished(c));
    if (whole < width) {
      store(o + whole, finished(whole));
      for (int64_t c = whole; c < width; ++c) out[c] = o[c];
    }
    if (reworks) rework_context<V>(unit, row, is_empty, out);
    if (!keeps_partials) continue;
    if (call.run.row_maxima) {
      call.run.row_maxima[unit.output_row(row)] = *m;
      call.run.row_sums[unit.output_row(row)] = l;
    }
    if (call.request.lse)
      call.request.lse[unit.output_row(row)] = is_empty ? -infinity : canonical(*m + log_of(l));
  }
}

// ---- Partials that are handed out

// Writes a partial in canonical form. o may be the one of `partial`.
template <class V>
MHA_NOINLINE void hand_out_partial(float m, float l, const float *o, int64_t width,
                                   float *partial) {
  partial[0] = l == 0.0f ? -infinity : canonical(m);
  partial[1] = canonical(l);
  in_vectors<V>(width, [&](auto vector, int64_t c) MHA_INLINED {
    using T = decltype(vector);
    store(partial + partial_head + c, l == 0.0f ? all<T>(0.0f) : canonical(load<T>(o + c)));
  });
}

// Writes the partials of the unit's rows, which are not finished.
template <class V>
MHA_NOINLINE void hand_out_partials(const Unit &unit) {
  const int64_t width = unit.call.request.head_dim_v;
  for (Row row = unit.row(0); row.index < unit.num_rows; unit.advance(&row)) {
    hand_out_partial<V>(*unit.m(0, row.index), *unit.l(0, row.index), unit.o(0, row.index), width,
                        unit.call.request.partials + unit.output_row(row) * (partial_head + width));
  }
}

// The kernels' `merge_partials`: merges rows of the caller's partials. Their NaNs may have any
// payload, but not in exp_of.
template <class V>
void merge_partials(const float *left, const float *right, int64_t rows, int64_t width,
                    float *result) {
  const int64_t stride = partial_head + width;
  for (int64_t row = 0; row < rows; ++row, left += stride, right += stride, result += stride) {
    const float m1 = left[0], l1 = left[1], m2 = right[0], l2 = right[1];
    if (l1 == 0.0f || l2 == 0.0f) {
      const bool is_right = l1 == 0.0f;
      hand_out_partial<V>(is_right ? m2 : m1, is_right ? l2 : l1,
                          (is_right ? right : left) + partial_head, width, result);
      continue;
    }
    const float most = m2 > m1 ? m2 : m1, a = exp_of(canonical_nan(m1 - most)),
                b = exp_of(canonical_nan(m2 - most));
    result[0] = canonical(most);
    result[1] = canonical(mul_add(l1, a, l2 * b));
    in_vectors<V>(width, [&](auto vector, int64_t c) MHA_INLINED {
      using T = decltype(vector);
      const int64_t at = partial_head + c;
      store(result + at,
            canonical(mul_add(load<T>(left + at), all<T>(a), load<T>(right + at) * all<T>(b))));
    });
  }
}

// Finishes one row of the caller's partials, as `finish` does for rows of a unit. A factor of 1
// changes nothing.
template <class V>
MHA_NOINLINE void finish_partial(const Partials &given, int64_t row, int64_t head, int64_t at) {
  constexpr int64_t block = 64;
  const float *const partial = given.partials + row * (partial_head + given.head_dim_v);
  const float head_scale = given.head_scales ? given.head_scales[head] : 1.0f;
  float m = canonical(partial[0]), l = partial[1];
  const bool is_empty = l == 0.0f || head_scale == 0.0f;
  const float factor = given.sinks && !is_empty ? join_sink(given.sinks[head], &m, &l) : 1.0f,
              inverse = 1.0f / l;
  if (given.lse) given.lse[row] = is_empty ? -infinity : canonical(m + log_of(l));
  for (int64_t done = 0; given.output && done < given.head_dim_v; done += block) {
    alignas(64) float numbers[block];
    void *const output = element_at(given.output, given.output_storage, at + done);
    const bool is_narrowed = given.output_storage != Storage::f32;
    float *const x = is_narrowed ? numbers : static_cast<float *>(output);
    const int64_t count = min(block, given.head_dim_v - done);
    in_vectors<V>(count, [&](auto vector, int64_t c) MHA_INLINED {
      using T = decltype(vector);
      const T context = canonical(
          mul_add(load<T>(partial + partial_head + done + c), all<T>(factor), all<T>(0.0f)) *
          all<T>(inverse));
      store(x + c, is_empty ? all<T>(0.0f) : canonical(context * all<T>(head_scale)));
    });
    if (is_narrowed) narrow(given.output_storage, numbers, count, output);
  }
}

// The kernels' `finish_partials`.
template <class V>
void finish_partials(const Partials &given) {
  const int64_t heads = given.num_heads, n_q = given.n_q;
  for (int64_t row = 0; row < given.batch * heads * n_q; ++row) {
    const int64_t head = row / n_q % heads, query = row % n_q, sequence = row / n_q / heads;
    finish_partial<V>(given, row, head,
                      sequence * given.output_batch_stride + query * given.output_row_stride +
                          head * given.output_head_stride);
  }
}

// ---- The norm of the context before W_O, and the gate after it (CONTRACT.md, section 10)

// The kernels' `normalize_context`: rows of the context of one sequence, whose heads are all there.
template <class V>
void normalize_context(const Attention &call, int64_t sequence_index, int64_t row_begin,
                       int64_t row_end) {
  const Sequence &sequence = call.run.sequences[sequence_index];
  const Norm &norm = call.request.context_norm;
  const int64_t width = call.request.head_dim_v, stride = call.arrays.output.head_stride,
                together = norm.is_of_all_heads ? call.request.num_heads : 1;
  for (int64_t row = sequence.q_first + row_begin; row < sequence.q_first + row_end; ++row) {
    float *x = static_cast<float *>(call.arrays.output.base) +
               sequence.in_arrays * call.arrays.output.batch_stride +
               row * call.arrays.output.row_stride;
    Statistics found = {};
    for (int64_t head = 0; head < call.request.num_heads; ++head, x += stride) {
      const auto row_of = [x, stride](int64_t other) MHA_INLINED { return x + other * stride; };
      if (head % together == 0) found = statistics_of<V>(norm, together, width, row_of);
      scale_normal<V>(norm, found, head, width, x);
      if (call.request.gates_late && call.arrays.gate.values.base)
        apply_gate<V>(call.arrays.gate, sequence.in_arrays, row, head, width, x);
    }
  }
}

}  // namespace
}  // namespace mha
