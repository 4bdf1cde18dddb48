// The caller's arrays of rows as units read and write them in place.
#pragma once

#include "../kernels/kernels.h"
#include "../storage.h"
#include "mha.h"

namespace mha {

inline StridedRows rows_of(const mha_input &input) {
  return {input.data, input.strides.batch, input.strides.row, input.strides.head,
          storage_of_type(input.type)};
}
inline OutputRows rows_of(const mha_output &output) {
  return {output.data, storage_of_type(output.type), output.strides.batch, output.strides.row,
          output.strides.head};
}

// Keys or values that the call rounds to codes in the workspace.
inline KeyValues packed_codes() {
  KeyValues packed = {};
  packed.storage = Storage::int8;
  packed.is_packed = true;
  return packed;
}

// Rows of keys or values.
inline KeyValues plain_rows(const StridedRows &rows) {
  KeyValues plain = {};
  plain.base = rows.base;
  plain.storage = rows.storage;
  plain.batch_stride = rows.batch_stride;
  plain.row_stride = rows.row_stride;
  plain.head_stride = rows.head_stride;
  return plain;
}

}  // namespace mha
