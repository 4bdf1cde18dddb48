// Stores keys and values in a cache or in the workspace, in the form that the attention reads.
//
// A row is normalised and rotated (prepare.h), rounded to the storage type, and put in its place:
// values as rows, keys as one lane of a tile of 16 keys. CONTRACT.md, sections 2 and 5.
#pragma once

#include "functions.h"
#include "key_values.h"

namespace mha {
namespace {

MHA_INLINE void store_floats(const float *x, int64_t width, float *to) {
  in_vectors<Vector>(width, [&](auto vector, int64_t c) MHA_INLINED {
    store(to + c, canonical_nan(load<decltype(vector)>(x + c)));
  });
}

// Stores a row as f16 or bf16, its numbers `stride` apart.
MHA_INLINE void store_halves(Storage storage, const float *x, int64_t width, uint16_t *first,
                             int64_t stride) {
  constexpr int64_t at_once = 64;
  for (int64_t c = 0; c < width; c += at_once) {
    uint16_t numbers[at_once];
    const int64_t count = min(at_once, width - c);
    narrow(storage, x + c, count, numbers);
    for (int64_t i = 0; i < count; ++i) first[(c + i) * stride] = numbers[i];
  }
}

// Computes the Hadamard transform of a part of a row, whole blocks from number c on, and fills it
// up with zeros to a multiple of 16. Returns how many numbers it has of the row.
MHA_INLINE int64_t transform_part(const float *x, int64_t block, int64_t width, int64_t c,
                                  float *part) {
  const int64_t count = min(most_hadamard_block, width - c);
  for (int64_t i = count; i % 16 != 0; ++i) part[i] = 0.0f;
  hadamard<Vector>(block, count, 1.0f, x + c, part);
  return count;
}

// Writes the codes of one row, or of four rows at neighbouring positions whose codes are the bytes
// of an Element.
template <class Element>
MHA_NOINLINE void write_codes(const float *const *rows, const float *row_factors, int64_t width,
                              Element *first, int64_t stride) {
  constexpr int count = sizeof(Element);
  constexpr bool is_lowest_first = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__;
  const float *x[count];
  float factors[count];
  MHA_EACH(r, count) {
    x[r] = rows[r];
    factors[r] = row_factors[r];
  }
  const auto codes_of = [&](int64_t c) MHA_INLINED {
    uint32_t codes = 0;
    MHA_EACH(r, count) {
      codes |= (static_cast<uint32_t>(code_of(x[r][c], factors[r])) & 255)
               << 8 * (is_lowest_first ? r : count - 1 - r);
    }
    return static_cast<Element>(codes);
  };
  // Loops of a fixed length, which a compiler turns into vectors unless it optimises for size.
  constexpr int at_once = 16;
  int64_t c = 0;
  for (; !is_small_code && c + at_once <= width; c += at_once) {
    Element codes[at_once];
    for (int i = 0; i < at_once; ++i) codes[i] = codes_of(c + i);
    if (stride == 1) {
      MHA_MEMCPY(first + c, codes, sizeof codes);
    } else {
      MHA_EACH(i, at_once) first[(c + i) * stride] = codes[i];
    }
  }
  for (; c < width; ++c) first[c * stride] = codes_of(c);
}

// Stores rows as int8, or their Hadamard transforms. Several parts of these are computed twice: for
// the scale, and for the codes.
template <class Element>
MHA_NOINLINE void store_codes(const float *const *rows, int64_t block, int64_t width,
                              Element *first, int64_t stride, float *scales) {
  constexpr int count = sizeof(Element);
  alignas(64) float parts[count][most_hadamard_block];
  const int64_t part = block > 1 ? min(most_hadamard_block, width) : width;
  const float *x[count];
  float factors[count];
  const auto find_part = [&](int r, int64_t c) MHA_INLINED {
    x[r] = rows[r];
    if (block <= 1) return;
    transform_part(rows[r], block, width, c, parts[r]);
    x[r] = parts[r];
  };
  for (int r = 0; r < count; ++r) {
    uint32_t most_bits = 0;
    for (int64_t c = 0; c < width; c += part) {
      find_part(r, c);
      most_bits = most_bits_of_row(x[r], min(part, width - c), most_bits);
    }
    const CodeScale found = code_scale_of(most_bits, 127);
    scales[r] = found.scale;
    factors[r] = found.factor;
  }
  for (int64_t c = 0; c < width; c += part) {
    for (int r = 0; part < width && r < count; ++r) find_part(r, c);
    write_codes(x, factors, min(part, width - c), first + c * stride, stride);
  }
}

// Stores the Hadamard transform of a row as int4. Several parts are computed twice: for the scale,
// and for the codes.
MHA_NOINLINE inline void store_int4(const float *x, int64_t block, int64_t width, CachedInt4 *to,
                                    float *scale) {
  alignas(64) float part[most_hadamard_block];
  uint32_t most_bits = 0;
  float extreme = 0.0f;
  for (int64_t c = 0; c < width; c += most_hadamard_block) {
    const int64_t count = transform_part(x, block, width, c, part);
    const uint32_t bits = most_bits_of(part, count, most_bits);
    if (bits == most_bits) continue;
    most_bits = bits;
    int64_t i = 0;
    while ((bits_of(part[i]) & 0x7fffffffu) != bits) ++i;
    extreme = part[i];
  }
  const CodeScale found = int4_scale_of(extreme, most_bits < 0x7f800000u);
  *scale = found.scale;
  for (int64_t c = 0; c < width; c += most_hadamard_block) {
    const int64_t count =
        width > most_hadamard_block ? transform_part(x, block, width, c, part) : width;
    for (int64_t i = 0; i < count; i += 16, to += 8) {
      for (int64_t b = 0; b < 8; ++b) {
        to[b].bits = static_cast<uint8_t>((int4_of(part[i + b], found.factor) + 8) |
                                          int4_of(part[i + b + 8], found.factor) * 16);
      }
    }
  }
}

// The kernels' `store`: rows of a sequence, of one kv head after the other. Rows that need
// preparation go through `scratch`. Keys that are stored as floats or codes go four at a time, from
// a position on that 4 divides.
inline void store(const KvStore &storing, int64_t sequence_index, int64_t row_begin,
                  int64_t row_end, float *scratch) {
  const KeyValues &to = storing.to;
  const Sequence &sequence = storing.sequences[sequence_index];
  const int64_t width = storing.width, element = bytes_of(to.storage);
  for (int64_t head = storing.first_kv_head; head < storing.end_kv_head; ++head) {
    for (int64_t row = row_begin; row < row_end;) {
      const int64_t position = sequence.past + row;
      const bool has_fours = to.storage == Storage::f32 || to.storage == Storage::int8;
      const bool by_fours =
          storing.are_keys && has_fours && position % 4 == 0 && row + 4 <= row_end;
      const int64_t count = by_fours ? 4 : 1;
      const float *rows[4];
      for (int64_t i = 0; i < count; ++i) {
        const StridedRows &from = storing.rows;
        const RowId id = {sequence.in_arrays, sequence.kv_first + row + i, position + i, head,
                          storing.statistics};
        const void *const given =
            element_at(from.base, from.storage,
                       id.sequence * from.batch_stride + id.array_row * from.row_stride +
                           head * from.head_stride);
        if (row + 8 < row_end) {
          prefetch_row(
              element_at(static_cast<const char *>(given), from.storage, 8 * from.row_stride),
              width * bytes_of(from.storage));
        }
        rows[i] = prepared_row<Vector>(storing.prepare, from.storage, given, id, width,
                                       scratch ? scratch + i * width : nullptr);
      }
      // Where the row goes: a tile of 16 positions, and the lane or the row in it.
      const Place place = place_of(to, sequence.in_cache, position);
      char *const tile = const_cast<char *>(static_cast<const char *>(to.base)) +
                         tile_of(to, place, head) * element;
      const int64_t stride = storing.are_keys ? tile_keys : 1;
      const int64_t first = lane_of(position) * (storing.are_keys ? 1 : to.row_stride);
      float *scales = const_cast<float *>(to.scales);
      if (scales) scales += scale_of(to, place, head);
      if (to.storage == Storage::int8) {
        int8_t *const codes = reinterpret_cast<int8_t *>(tile) + first;
        if (by_fours)
          store_codes(rows, to.hadamard, width, reinterpret_cast<uint32_t *>(codes), tile_keys / 4,
                      scales);
        else
          store_codes(rows, to.hadamard, width, codes, stride, scales);
      } else if (to.storage == Storage::int4) {
        store_int4(rows[0], to.hadamard, width, reinterpret_cast<CachedInt4 *>(tile) + first,
                   scales);
      } else if (to.storage != Storage::f32) {
        store_halves(to.storage, rows[0], width, reinterpret_cast<uint16_t *>(tile) + first,
                     stride);
      } else if (storing.are_keys) {
        pack_key_rows(rows, count, width, reinterpret_cast<float *>(tile) + first);
      } else {
        store_floats(rows[0], width, reinterpret_cast<float *>(tile) + first);
      }
      row += count;
    }
  }
}

}  // namespace
}  // namespace mha
