// Rows of the caller and of the workspace.
#pragma once

#include "../../contract.h"

namespace mha {

// The valid rows of one sequence in its array. Other rows are padding, or belong to other
// sequences.
struct Extent {
  int64_t first, count;
  int64_t before;  // valid rows of the sequences before it
  int64_t block;   // number of the sequence in the destination
};

// Input rows: row i of sequence b is at base + b * batch_stride + i * row_stride.
struct InputRows {
  const void *base;
  int64_t rows_per_sequence;
  int64_t batch_stride;
  int64_t row_stride;
  const Extent *extents;           // of each sequence; null: all rows are valid
  Storage storage = Storage::f32;  // or 16 bits
};

struct StridedRows {
  const void *base;
  int64_t batch_stride;
  int64_t row_stride;
  int64_t head_stride;
  Storage storage = Storage::f32;  // or 16 bits
};

struct OutputRows {
  void *base;
  Storage storage;  // f32 or 16 bits
  int64_t batch_stride, row_stride, head_stride;
};

}  // namespace mha
