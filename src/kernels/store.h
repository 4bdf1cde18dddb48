// Stores keys and values: normalised and rotated, rounded to the storage type, and put where the kernels read them. CONTRACT.md,
// sections 2 and 5.
#pragma once

#include "kernels/functions.h"
#include "kernels/key_values.h"

namespace mha {
namespace {

// A number as it is stored.
MHA_INLINE float encode(float x, const float *) { return canonical_nan(x); }
MHA_INLINE F16 encode(float x, const F16 *) { return {f16_of(x)}; }
MHA_INLINE Bf16 encode(float x, const Bf16 *) { return {bf16_of(x)}; }

template <class Element>
MHA_INLINE void store_row(const float *x, int64_t width, Element *first, int64_t stride, float *) {
  for (int64_t c = 0; c < width; ++c) first[c * stride] = encode(x[c], static_cast<const Element *>(nullptr));
}

MHA_INLINE void store_row(const float *x, int64_t width, int8_t *first, int64_t stride, float *scale) {
  const CodeScale found = code_scale_of(x, 127, width);
  *scale = found.scale;
  for (int64_t c = 0; c < width; c += int4_group) {
    alignas(64) int8_t codes[int4_group];
    float rest[int4_group];
    const int64_t count = min(int4_group, width - c);
    const float *from = x + c;
    if (count < int4_group) {
      __builtin_memset(rest, 0, sizeof rest);
      __builtin_memcpy(rest, from, static_cast<size_t>(count) * sizeof *rest);
      from = rest;
    }
    encode(from, int4_group, found, codes);
    if (stride == 1)
      __builtin_memcpy(first + c, codes, static_cast<size_t>(count));
    else
      for (int64_t i = 0; i < count; ++i) first[(c + i) * stride] = codes[i];
  }
}

inline bool is_stored(const KvStore &storing, int64_t head) {
  bool is = !storing.head_scales;
  for (int64_t i = 0; !is && i < storing.group; ++i) is = storing.head_scales[head * storing.group + i] != 0.0f;
  return is;
}

// Rows of a sequence, of one kv head after the other. Only those to be prepared go through `scratch`. Keys that are stored as floats go by
// fours, from a border of 4 positions on, through a transposition.
template <class V>
void store(const KvStore &storing, int64_t sequence_index, int64_t row_begin, int64_t row_end, float *scratch) {
  const KeyValues &to = storing.to;
  const Sequence &sequence = storing.sequences[sequence_index];
  const int64_t width = storing.width, element = bytes_of(to.storage);
  for (int64_t head = 0; head < storing.num_kv_heads; ++head) {
    if (!is_stored(storing, head)) continue;
    for (int64_t row = row_begin; row < row_end;) {
      const int64_t position = sequence.past + row;
      const bool by_fours = storing.are_keys && to.storage == Storage::f32 && position % 4 == 0 && row + 4 <= row_end;
      const int64_t count = by_fours ? 4 : 1;
      const float *rows[4];
      for (int64_t i = 0; i < count; ++i) {
        const StridedRows &from = storing.rows;
        const RowPlace place = {sequence.in_arrays, sequence.kv_first + row + i, position + i, head};
        const void *const given = element_at(
            from.base, from.storage, place.sequence * from.batch_stride + place.array_row * from.row_stride + head * from.head_stride);
        if (row + 8 < row_end) {
          prefetch_row(element_at(static_cast<const char *>(given), from.storage, 8 * from.row_stride), width * bytes_of(from.storage));
        }
        rows[i] = prepared_row<V>(storing.prepare, from.storage, given, place, width, scratch + i * width);
      }
      const Place place = place_of(to, sequence.in_cache, position);
      const int64_t group_at = place.block * to.batch_stride + head * to.head_stride + block_of(place.position) * key_block * to.row_stride;
      char *const group = const_cast<char *>(static_cast<const char *>(to.base)) + group_at * element;
      if (by_fours) {
        pack_key_rows(rows, count, width, reinterpret_cast<float *>(group) + place_in_block(position));
      } else {
        const int64_t stride = storing.are_keys ? key_block : 1;
        const int64_t first = place_in_block(position) * (storing.are_keys ? 1 : to.row_stride);
        float *const scale =
            to.storage == Storage::int8
                ? const_cast<float *>(to.scales) + place.block * to.scale_batch_stride + head * to.block_positions + place.position
                : nullptr;
        visit_storage(to.storage, [&](auto stored) {
          using Element = typename decltype(stored)::Element;
          store_row(rows[0], width, reinterpret_cast<Element *>(group) + first, stride, scale);
        });
      }
      row += count;
    }
  }
}

}  // namespace
}  // namespace mha
