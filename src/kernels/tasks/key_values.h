// Keys and values: the sequences that they belong to, how they lie in memory, and what is done to
// rows on their way there.
#pragma once

#include "rows.h"

namespace mha {

// One sequence of a call. Positions count from the sequence's first key.
struct Sequence {
  int64_t n_q;      // queries
  int64_t n_kv;     // keys to attend to, with those in the cache
  int64_t q_start;  // position of the first query

  // In the caller's arrays: rows of the first query and of the first key that comes with the call.
  int64_t q_first, kv_first;
  int64_t past;     // position of that key
  int64_t kv_rows;  // keys that come with the call

  // The number of the sequence in the cache or, without one, of its first block among the keys and
  // values that the call packs; and its number in the caller's arrays and in the outputs.
  int64_t in_cache, in_arrays;

  // The column of the first key in outputs with a number per pair; and in mask, bias and segments,
  // where it is negative if the first key has no column. first_in_columns is the first position
  // that has one. Keys from end_of_columns on are masked: that is n_kv, or less where rows of these
  // arrays are short.
  int64_t column, option_column;
  int64_t first_in_columns, end_of_columns;
};

// The row_stride of keys that a call packs: tiles lie a cache line apart. A loop reads several
// tiles side by side, whose lines would otherwise fall into one set of the first level of the cache
// where a tile takes a multiple of 4 KB.
static MHA_INLINE int64_t key_stride_of(int64_t head_dim) { return head_dim + 1; }

// Keys or values of all sequences and kv heads, in one of three forms. Strides count elements.
//
//   packed   As the loops read them, 16 positions by 16: keys in tiles,
//            [position / 16][head_dim][16]; values in rows of head_dim_v_padded, which may be parts
//            of longer rows. The positions of a sequence lie in blocks of memory, block number n at
//            base + n * batch_stride.
//   stored   Keys as rows, whose first elements are the values, in the same blocks. Units bring
//            them into the packed form chunk by chunk.
//   plain    Rows of the caller's, which units bring into the packed form as well, or read in place
//            (reads_rows, late_rows and in_place_rows of AttentionPlan).
struct KeyValues {
  const void *base;
  Storage storage;
  bool is_packed;
  int64_t batch_stride, head_stride;
  int64_t row_stride;  // of packed keys the distance of two tiles / 16; of int4 bytes

  // For packed and stored ones.
  const int32_t *tables;  // [sequence][table_stride] numbers of blocks; null: the sequence's number
  int64_t table_stride;
  int64_t block_positions;     // positions of a block, a multiple of 16
  int64_t ring_positions;      // position p lies where p % ring_positions would; 0: no ring
  const float *scales;         // of codes: [block][kv head][block_positions]
  int64_t scale_batch_stride;  // of blocks
  int64_t hadamard;            // the block of the transform that is stored; up to 1: none
};

// Static: each instruction set has its own, or the linker would keep one of them for all.
static inline bool is_plain(const KeyValues &source) {
  return !source.is_packed && source.block_positions == 0;
}
static inline bool is_stored(const KeyValues &source) {
  return !source.is_packed && source.block_positions != 0;
}

// A position in the cache: the number of the block of memory, and the position in that block.
struct Place {
  int64_t block, position;
};

// Finds a position of a sequence, by way of the ring and of the block table if there are any.
static MHA_INLINE Place place_of(const KeyValues &source, int64_t sequence, int64_t position) {
  if (source.ring_positions != 0 && position >= source.ring_positions)
    position = position % source.ring_positions;
  if (!source.tables) return {sequence, position};
  const int64_t block_positions = source.block_positions,
                index = position < block_positions ? 0 : position / block_positions;
  return {source.tables[sequence * source.table_stride + index],
          position - index * block_positions};
}

// Element 0 of the tile of 16 positions that a place is in, and the number of its scale.
static MHA_INLINE int64_t tile_of(const KeyValues &source, const Place &place, int64_t head) {
  return place.block * source.batch_stride + head * source.head_stride +
         (place.position & -tile_keys) * source.row_stride;
}
static MHA_INLINE int64_t scale_of(const KeyValues &source, const Place &place, int64_t head) {
  return place.block * source.scale_batch_stride + head * source.block_positions + place.position;
}

// Rotation of queries and keys (CONTRACT.md, section 5); see mha_rope.
struct Rotation {
  const float *cos, *sin;  // null: none
  int64_t stride, pairs;
  int64_t offset;  // of the first element that is rotated
  bool is_interleaved;
  const int64_t *positions;  // [batch][rows_per_sequence] by row of the caller's array; null: the
                             // row's position in its sequence
  int64_t rows_per_sequence;
  int64_t origin;  // where positions without `positions` count from: kv_first_position of the call
};

// Norm of queries, keys, values or the context (CONTRACT.md, sections 5 and 10); see mha_norm.
struct Norm {
  bool is_given, is_layer, is_after_rotation;
  bool is_of_all_heads;  // together
  float epsilon;
  float count;                 // of the numbers that are normalised together
  const float *weight, *bias;  // null: 1, none
  int64_t head_stride;         // of both
  int64_t rows_per_sequence;   // of the caller's array; is_of_all_heads: statistics go by its rows
};

// What is done to rows of queries, keys or values on their way.
struct Preparation {
  Norm norm;
  Rotation rotation;
  bool is_any;  // or the rows have 16 bits and go through the scratch memory too
};

// Rows of keys or values, [batch][row][kv head][width], prepared and converted to their place in
// packed storage.
struct KvStore {
  StridedRows rows;
  Preparation prepare;
  const float *statistics;  // of the rows, if the norm is of all heads
  // Rows kv_first .. kv_first + kv_rows of each go to the positions from `past` on.
  const Sequence *sequences;
  KeyValues to;
  int64_t first_kv_head, end_kv_head, width;
  bool are_keys;
};

// Rows of queries or keys whose heads are normalised together, and where their statistics go.
struct RowMeasure {
  KeyValues rows;  // plain
  Preparation prepare;
  float *statistics;
  const Sequence *sequences;
  int64_t num_heads, width;
  bool are_keys;
};

}  // namespace mha
