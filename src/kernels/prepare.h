// Norms and rotation: what is done to rows of queries, keys and values before they are used or
// stored. CONTRACT.md, section 5.
//
// prepared_row is what other files call. A row that needs nothing is used where it lies; any other
// is copied, as floats, and changed in place. `measure` computes norms over all heads of a row
// before, in a pass of its own, since a unit sees the heads of one kv head only.
#pragma once

#include "elements.h"
#include "tile.h"

namespace mha {
namespace {

// Which row is prepared.
struct RowId {
  int64_t sequence;
  int64_t array_row;  // of the sequence in the caller's array
  int64_t position;   // where it stands, unless the rotation says otherwise
  int64_t head;
  const float *statistics = nullptr;  // of all rows of the array, if the norm is of all heads
};

// ---- Rotation

// Rotates 2 * pairs elements of x from the offset on, by the line of the tables for the position of
// the row. A position before the first key has no line: such a row attends to nothing.
MHA_NOINLINE inline void rotate(const Rotation &rotation, const RowId &id, float *x) {
  const int64_t position =
      rotation.positions
          ? rotation.positions[id.sequence * rotation.rows_per_sequence + id.array_row]
          : rotation.origin + id.position;
  if (position < 0) return;
  const float *const cos = rotation.cos + position * rotation.stride, *const sin =
                                                                          rotation.sin +
                                                                          position *
                                                                              rotation.stride;
  x += rotation.offset;
  const int64_t pairs = rotation.pairs, first = rotation.is_interleaved ? 2 : 1,
                second = rotation.is_interleaved ? 1 : pairs;
  int64_t i = 0;
  for (; !rotation.is_interleaved && i + static_cast<int64_t>(Vector::size) <= pairs;
       i += Vector::size) {
    const Vector a = load(x + i), b = load(x + pairs + i), c = load(cos + i), s = load(sin + i);
    store(x + i, mul_add(a, c, all(-0.0f) - b * s));
    store(x + pairs + i, mul_add(b, c, a * s));
  }
  for (; i < pairs; ++i) {
    const float a = x[i * first], b = x[i * first + second];
    x[i * first] = mul_add(a, cos[i], -(b * sin[i]));
    x[i * first + second] = mul_add(b, cos[i], a * sin[i]);
  }
}

// ---- Norm

// The mean to subtract, and the factor r to multiply by after that.
struct Statistics {
  float mean, r;
};

// The sum of a head's numbers, or of the squares of their distances from `mean`. One fused
// multiply-add serves both, since a number times 1 is added as if it were alone.
MHA_NOINLINE inline float sum_of_head(const float *x, int64_t width, float mean, bool of_squares) {
  constexpr int lanes = Vector::size, vectors = 16 / lanes;
  const auto add = [&](auto sum, auto number) MHA_INLINED {
    using T = decltype(sum);
    const T distance = number - all<T>(mean);
    return mul_add(distance, of_squares ? distance : all<T>(1.0f), sum);
  };
  Vector sums[vectors];
  for (int i = 0; i < vectors; ++i) sums[i] = all(0.0f);
  int64_t d = 0;
  for (; d + 16 <= width; d += 16) {
    for (int i = 0; i < vectors; ++i) sums[i] = add(sums[i], load(x + d + i * lanes));
  }
  alignas(64) float rest[16];
  for (int i = 0; i < vectors; ++i) store(rest + i * lanes, sums[i]);
  for (int i = 0; d < width; ++d, ++i) rest[i] = add(Scalar{rest[i]}, Scalar{x[d]}).x;
  for (int i = 0; i < vectors; ++i) sums[i] = load(rest + i * lanes);
  return sum16(sums);
}

// The statistics of the heads of one row together. row_of(head) returns a row of floats.
template <class V, class RowOf>
MHA_INLINE Statistics statistics_of(const Norm &norm, int64_t num_heads, int64_t width,
                                    const RowOf &row_of) {
  float mean = 0.0f, sum = 0.0f;
  for (int64_t head = 0; norm.is_layer && head < num_heads; ++head)
    sum = sum + sum_of_head(row_of(head), width, 0.0f, false);
  if (norm.is_layer) mean = sum / norm.count;
  sum = 0.0f;  // to which the first is added as it is: no sum of a head is -0
  for (int64_t head = 0; head < num_heads; ++head)
    sum = sum + sum_of_head(row_of(head), width, mean, true);
  return {mean, 1.0f / MHA_SQRTF(sum / norm.count + norm.epsilon)};
}

alignas(64) constexpr float ones[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
// To add -0 changes nothing, not even the sign of a zero.
alignas(64) constexpr float minus_zeros[16] = {-0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f,
                                               -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f,
                                               -0.0f, -0.0f, -0.0f, -0.0f};

// Normalises a head's row by statistics that are known, which may be those of all heads.
template <class V>
MHA_NOINLINE void scale_normal(const Norm &norm, const Statistics &found, int64_t head,
                               int64_t width, float *x) {
  // Without weight or bias, the loop reads the same numbers again and again.
  const float *const weight = norm.weight ? norm.weight + head * norm.head_stride : ones;
  const float *const bias = norm.bias ? norm.bias + head * norm.head_stride : minus_zeros;
  const int64_t weight_step = norm.weight ? 1 : 0, bias_step = norm.bias ? 1 : 0;
  in_vectors<V>(width, [&](auto vector, int64_t d) MHA_INLINED {
    using T = decltype(vector);
    const T centred = (load<T>(x + d) - all<T>(found.mean)) * all<T>(found.r);
    store(x + d,
          mul_add(centred, load<T>(weight + d * weight_step), load<T>(bias + d * bias_step)));
  });
}

// Normalises a head's row by its own statistics, or by those that `measure` has computed.
MHA_NOINLINE inline void normalize(const Norm &norm, const RowId &id, int64_t width, float *x) {
  Statistics found;
  if (norm.is_of_all_heads) {
    const float *const of_row =
        id.statistics + 2 * (id.sequence * norm.rows_per_sequence + id.array_row);
    found = {of_row[0], of_row[1]};
  } else {
    found = statistics_of<Vector>(norm, 1, width, [x](int64_t) MHA_INLINED { return x; });
  }
  scale_normal<Vector>(norm, found, id.head, width, x);
}

// ---- Both

// Applies norm and rotation in the order that the layer asks for.
MHA_NOINLINE inline void prepare(const Preparation &how, const RowId &id, int64_t width, float *x) {
  if (how.norm.is_given && !how.norm.is_after_rotation) normalize(how.norm, id, width, x);
  if (how.rotation.cos) rotate(how.rotation, id, x);
  if (how.norm.is_given && how.norm.is_after_rotation) normalize(how.norm, id, width, x);
}

// Returns a row as prepared floats: where it lies if it is used as it is, otherwise in `copy`.
template <class V>
MHA_INLINE const float *prepared_row(const Preparation &how, Storage storage, const void *row,
                                     const RowId &id, int64_t width, float *copy) {
  if (storage == Storage::f32 && !how.is_any) return static_cast<const float *>(row);
  widen(storage, row, width, copy);
  prepare(how, id, width, copy);
  return copy;
}

// The kernels' `measure`: statistics of rows of one sequence whose heads are normalised together.
inline void measure(const RowMeasure &measuring, int64_t sequence_index, int64_t row_begin,
                    int64_t row_end, float *scratch) {
  const Sequence &sequence = measuring.sequences[sequence_index];
  const KeyValues &rows = measuring.rows;
  const Preparation &how = measuring.prepare;
  const int64_t first = measuring.are_keys ? sequence.kv_first : sequence.q_first;
  const int64_t start = measuring.are_keys ? sequence.past : sequence.q_start;
  for (int64_t row = row_begin; row < row_end; ++row) {
    // This wraps around only if the start is too large to matter.
    const int64_t position =
        static_cast<int64_t>(static_cast<uint64_t>(start) + static_cast<uint64_t>(row));
    const auto row_of = [&](int64_t head) {
      const int64_t at = sequence.in_arrays * rows.batch_stride + (first + row) * rows.row_stride +
                         head * rows.head_stride;
      widen(rows.storage, element_at(rows.base, rows.storage, at), measuring.width, scratch);
      const RowId id = {sequence.in_arrays, first + row, position, head};
      if (how.rotation.cos && how.norm.is_after_rotation) rotate(how.rotation, id, scratch);
      return static_cast<const float *>(scratch);
    };
    const Statistics found =
        statistics_of<Vector>(how.norm, measuring.num_heads, measuring.width, row_of);
    float *const to =
        measuring.statistics + 2 * (sequence.in_arrays * how.norm.rows_per_sequence + first + row);
    to[0] = found.mean;
    to[1] = found.r;
  }
}

}  // namespace
}  // namespace mha
