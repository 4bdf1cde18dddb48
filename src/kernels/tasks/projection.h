// A product of rows with a packed matrix.
#pragma once

#include "rows.h"

namespace mha {

// Input rows that one block of weights serves before it is replaced in the cache.
constexpr int64_t project_block_rows = 144;

// Where results of a projection go. Column n belongs to head h = n / head_width, as its column c =
// n % head_width. For row i of sequence b, which is the j-th valid one of the sequence, it goes to
//
//   rows         base + b * batch_stride + i * row_stride + h * head_stride + c
//   value_rows   base + b * batch_stride + j * row_stride + h * head_stride + c
//   key_tiles    base + b * batch_stride + h * head_stride
//                  + (j / 16) * 16 * row_stride + c * 16 + j % 16
//
// With extents, b is the `block` of the sequence.
struct Destination {
  enum class Kind : uint32_t { none, rows, value_rows, key_tiles };
  Kind kind;
  Storage storage;  // of rows; f32 or 16 bits
  void *base;
  int64_t batch_stride;
  int64_t row_stride;
  int64_t head_stride;
  int64_t head_width;
  // Rows of one sequence, in the same storage, that are added to the results; null: none.
  const void *residual;
  int64_t residual_row_stride;
};

// y = canon(dot(x, W) + bias): one product of input rows with one packed matrix. Columns after the
// last one of W are zero. The panels are
//
//   floats           [ceil(columns / 48)][depth][48] numbers
//   int8             [ceil(columns / 48)][depth][48] codes
//   int4             [ceil(columns / 48)][ceil(depth / 2)][48] bytes: in the low half the code + 8
//                    of an even term, in the upper half that of the next term
//
// and 48 bytes after the last panel of int4 may be read too. Scales of columns are
// [ceil(columns / 48)][48] floats; scales and offsets of groups
// [ceil(columns / 48)][ceil(depth / group)][48] numbers. In integer arithmetic four terms lie
// side by side, and bytes after the last term may be anything, since the codes of rows are 0 there:
//
//   int8             [ceil(columns / 48)][ceil(depth / 4)][48][4] bytes, the code + 128
//   int4             [ceil(columns / 48)][ceil(depth / 8)][48][4] bytes: in the low half the
//                    code + 8, in the upper half that of the term four further on
//   int5, int6       the same, after every 32 (int5) or 16 terms a plane of their high bits,
//                    [48][4] bytes: of bits from the lowest on, the first 1 or 2 of the first four
//                    terms, then of the next four. Codes are stored + 16 and + 32.
//
// There, scales and offsets of groups may be bytes in blocks of 256 terms, [ceil(columns / 48)]
// [ceil(depth / 256)]: [48] factors in f16, then [256 / group][48] bytes, in the last block fewer.
//
// In bf16 arithmetic it is two terms, with 0 after a last term alone:
//
//   bf16             [ceil(columns / 48)][ceil(depth / 2)][48][2] numbers
struct Projection {
  InputRows x;
  int64_t rows;     // of all sequences together
  int64_t depth;    // width of an input row
  int64_t columns;  // of W
  Storage storage;
  Arithmetic arithmetic;
  Storage scale_storage;  // of groups: f32, f16 or, in integer arithmetic, int8
  int64_t group;          // terms of a column that share a scale; 0: all of them
  int64_t sums;           // X of the contract that follow each row made ready; 0: without offsets
  const void *panels;
  const void *scales, *offsets;  // null: none
  const float *bias;             // [ceil(columns / 48) * 48], zero where there is none
  Destination destination;
  Destination tap;  // a second copy for mha_outputs, or none
};

}  // namespace mha
