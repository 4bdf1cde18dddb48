// Checks of the arrays of a call: their extents, their strides, their types, and the workspace.
//
// The caller may leave strides 0, which stands for contiguous, and set those of inputs to
// MHA_BROADCAST. Resolving an array replaces both, so that everything after it multiplies an index
// with a stride and needs no exception.
//
// A call of a small layer takes a few microseconds, and its checks must not take as long. So the
// checks that each call makes are inline and consist of a few comparisons. What exactly is wrong is
// found out by the functions that they call in case of an error.
#pragma once

#include <type_traits>

#include "../base/count.h"
#include "../base/report.h"
#include "../base/workspace.h"
#include "../storage.h"
#include "mha.h"

namespace mha {

// The extent of a dimension that an array does not have.
constexpr int64_t no_extent = -1;

// One of the caller's arrays. Extents and strides have the order of mha_strides: batch, rows,
// heads. The innermost dimension has `width` elements and a stride of 1.
struct Array {
  const char *name;
  int64_t width;
  int64_t extents[3];
  int64_t strides[3];  // after resolving, 0 means that all indices share one element
  bool is_head_major;  // [batch, heads, rows, width] and not [batch, rows, heads, width]
  // Follows the name in messages: ".strides" for mha_input, "_strides" for a typed pointer.
  const char *strides_name;
};

inline Array array_of(const char *name, const mha_strides &strides, int64_t batch, int64_t rows,
                      int64_t heads, int64_t width) {
  return {name,  width,     {batch, rows, heads}, {strides.batch, strides.row, strides.head},
          false, ".strides"};
}

// An array with a number for each pair of a row and a key, [batch, heads, rows, width].
inline Array pair_array_of(const char *name, const char *strides_name, const mha_strides &strides,
                           int64_t batch, int64_t heads, int64_t rows, int64_t width) {
  return {name, width,       {batch, rows, heads}, {strides.batch, strides.row, strides.head},
          true, strides_name};
}

inline bool is_contiguous(const mha_strides &strides) {
  return (strides.batch | strides.row | strides.head) == 0;
}

// The number of elements from the first to the last one of an array that is resolved, or an
// overflow.
inline Count span_of(const Array &array) {
  Count span(array.width);
  for (int i = 0; i < 3; ++i) {
    if (array.extents[i] == 0) return Count(0);
    span = span + Count(array.extents[i] - 1) * Count(array.strides[i]);
  }
  return span;
}

// Check the strides of an array and resolve them: 0 becomes the contiguous stride, and the
// MHA_BROADCAST of an input becomes 0. An array that is accepted fits into memory, and no element
// of an output is written twice.
mha_status resolve_input(Report report, Array *array);
mha_status resolve_output(Report report, Array *array);

// The fields of mha_input and mha_output that are checked alike for all arrays: the type and the
// reserved fields.
mha_status fail_row_array(Report report, const char *name, uint32_t type, uint32_t reserved);

template <class Rows>  // mha_input or mha_output
inline mha_status check_row_fields(Report report, const char *name, const Rows &rows) {
  bool is_sound = rows.type <= MHA_TYPE_BF16 && rows.reserved == 0;
  if constexpr (std::is_same_v<Rows, mha_input>) is_sound = is_sound && !rows.reserved_pointer;
  return is_sound ? MHA_OK : fail_row_array(report, name, rows.type, rows.reserved);
}

// The extents of one array, and the resolving of its strides in place.
struct Extents {
  int64_t batch, rows, heads, width;  // no_extent: the array does not have this dimension
};
mha_status resolve_set_strides(Report report, const char *name, Extents extents, bool is_output,
                               mha_strides *strides);

// An array that is contiguous, and so small that its size cannot overflow, needs no checks.
inline mha_status resolve_strides(Report report, const char *name, const Extents &e, bool is_output,
                                  mha_strides *strides) {
  const int64_t heads = e.heads == no_extent ? 1 : e.heads;
  if (!is_contiguous(*strides) || ((e.batch | e.rows | heads | e.width) >> 15) != 0)
    return resolve_set_strides(report, name, e, is_output, strides);
  *strides = {e.rows * heads * e.width, heads * e.width, e.width};
  return MHA_OK;
}

// Checks the fields of one array with these extents, and resolves its strides in place.
template <class Rows>
inline mha_status resolve_array(Report report, const char *name, const Extents &extents,
                                Rows *rows) {
  MHA_TRY(check_row_fields(report, name, *rows));
  return resolve_strides(report, name, extents, std::is_same_v<Rows, mha_output>, &rows->strides);
}

// An input without data has no other fields set.
mha_status fail_absent(Report report, const char *name, const mha_input &input);

inline mha_status check_absent(Report report, const char *name, const mha_input &input) {
  const bool is_absent = is_contiguous(input.strides) && input.type == 0 && input.reserved == 0 &&
                         !input.reserved_pointer;
  return is_absent ? MHA_OK : fail_absent(report, name, input);
}

// An array has the type of another one.
mha_status fail_type(Report report, const char *name, uint32_t type, const char *of_name,
                     uint32_t of_type);

inline mha_status check_type(Report report, const char *name, const mha_input &input,
                             const char *of_name, uint32_t type) {
  const bool is_sound = !input.data || storage_of_type(input.type) == storage_of_type(type);
  return is_sound ? MHA_OK : fail_type(report, name, input.type, of_name, type);
}

mha_status check_scheduler(Report report, const mha_scheduler *scheduler);

// A call names each of its arrays of rows once, in a function each_array(args, visit) that calls
// visit(RowArray, input or output) for all of them. The structs below visit them.
struct RowArray {
  const char *name, *what;  // of the field, and what to pass; null: data may be NULL
  Extents extents;
  uint32_t like = MHA_TYPE_F32;  // the type that 0 means
  bool is_optional = false;      // an input that is 0 altogether where it is not given
  bool is_of_keys = false;       // its rows are those of the keys
};

// Checks types, reserved fields, strides and sizes, and resolves defaults.
struct ResolveArrays {
  Report report;
  mha_status operator()(const RowArray &array, mha_input &input) const {
    if (!input.data && array.is_optional) return check_absent(report, array.name, input);
    if (input.type == 0) input.type = array.like;
    return resolve_array(report, array.name, array.extents, &input);
  }
  mha_status operator()(const RowArray &array, mha_output &output) const {
    return resolve_array(report, array.name, array.extents, &output);
  }
};

// What a size query does not need: the data of arrays that have rows.
struct CheckPointers {
  Report report;
  const char *prefix = "";  // of the names
  template <class Rows>
  mha_status operator()(const RowArray &array, const Rows &rows) const {
    if (rows.data || !array.what || array.extents.rows == 0) return MHA_OK;
    return report.null("%s%s.data is NULL; pass %s", prefix, array.name, array.what);
  }
};

// Adds up the bytes of one row of each array that is given or will be: bytes[1] of keys, bytes[0]
// of others. Heads that share numbers count once.
struct CountRowBytes {
  uint64_t *bytes;
  template <class Rows>
  mha_status operator()(const RowArray &array, const Rows &rows) const {
    const int64_t heads =
        array.extents.heads == no_extent || rows.strides.head == 0 ? 1 : array.extents.heads;
    if (rows.data || array.what)
      bytes[array.is_of_keys] +=
          product(heads * array.extents.width, bytes_of(storage_of_type(rows.type)));
    return MHA_OK;
  }
};

// Reports the size of the workspace, which is 0 for a call that has nothing to do.
mha_status check_size(Report report, const WorkspaceLayout &layout, bool has_no_work,
                      int64_t *workspace_bytes);

// An extent is at least 1, or MHA_EMPTY, which becomes 0. A plain 0 was never set. `what` says what
// to set it to.
mha_status resolve_empty(Report report, const char *name, const char *what, int64_t *extent);

inline mha_status resolve_extent(Report report, const char *name, const char *what,
                                 int64_t *extent) {
  return *extent > 0 ? MHA_OK : resolve_empty(report, name, what, extent);
}

// 0 stands for a batch of 1.
inline mha_status resolve_batch(Report report, int64_t *batch) {
  if (*batch == 0) *batch = 1;
  return resolve_extent(report, "batch", "the number of sequences", batch);
}

// The workspace has the size that the function `query` returns. `argument` is its parameter.
mha_status fail_workspace(Report report, uint32_t argument, const char *query,
                          size_t workspace_bytes, int64_t needed);

inline mha_status check_workspace(Report report, uint32_t argument, const char *query,
                                  const void *workspace, size_t workspace_bytes, int64_t needed) {
  const bool is_sound =
      workspace_bytes >= static_cast<uint64_t>(needed) && (workspace || needed == 0);
  return is_sound ? MHA_OK : fail_workspace(report, argument, query, workspace_bytes, needed);
}

}  // namespace mha
