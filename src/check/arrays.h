// Checks that mha_forward and mha_attention have in common.
#pragma once

#include "../plan/count.h"
#include "../plan/workspace.h"
#include "mha.h"
#include "report.h"

namespace mha {

// One of the caller's arrays: its name, its extents and its strides as mha_strides has them. The
// innermost extent, `width`, has a stride of 1.
struct Array {
  const char *name;
  int64_t width;
  int64_t extents[3];  // batch, rows, heads; no_extent for a dimension that the array does not have
  int64_t strides[3];  // in the same order; resolved: without zeros that stand for something else,
                       // and 0 for MHA_BROADCAST
  bool
      has_rows_inside_heads;  // [batch, heads, rows, width] rather than [batch, rows, heads, width]
  const char *strides_name;  // follows the name in messages: ".strides" of mha_input, "_strides" of
                             // a typed pointer
};

constexpr int64_t no_extent = -1;

inline Array array_of(const char *name, const mha_strides &strides, int64_t batch, int64_t rows,
                      int64_t heads, int64_t width) {
  return {name,  width,     {batch, rows, heads}, {strides.batch, strides.row, strides.head},
          false, ".strides"};
}

// An array with a number for each pair of row and key or the like, [batch, heads, rows, width].
inline Array pair_array_of(const char *name, const char *strides_name, const mha_strides &strides,
                           int64_t batch, int64_t heads, int64_t rows, int64_t width) {
  return {name, width,       {batch, rows, heads}, {strides.batch, strides.row, strides.head},
          true, strides_name};
}

inline bool is_contiguous(const mha_strides &strides) {
  return (strides.batch | strides.row | strides.head) == 0;
}

// Elements from the first to the last, or an overflow. Strides are resolved.
inline Count span_of(const Array &array) {
  Count span(array.width);
  for (int i = 0; i < 3; ++i) {
    if (array.extents[i] == 0) return Count(0);
    span = span + Count(array.extents[i] - 1) * Count(array.strides[i]);
  }
  return span;
}

// Whether an array is contiguous and so small that its size cannot overflow: then there is nothing
// to resolve.
inline bool is_plain(const mha_strides &strides, int64_t batch, int64_t rows, int64_t width) {
  return is_contiguous(strides) && static_cast<uint64_t>(batch | rows | width) < uint64_t{1} << 19;
}

// Checks the strides of an array and resolves them: 0 becomes the contiguous stride, MHA_BROADCAST
// (of inputs only) 0. Then no element of an output is written twice, and the array fits into
// memory.
mha_status resolve_input(Report report, Array *array);
mha_status resolve_output(Report report, Array *array);

// The fields of mha_input and mha_output that are the same for all arrays: type and reserved
// fields.
mha_status fail_row_array(Report report, const char *name, uint32_t type, uint32_t reserved);

inline mha_status check_input_fields(Report report, const char *name, const mha_input &input) {
  const bool is_sound =
      input.type <= MHA_TYPE_BF16 && input.reserved == 0 && !input.reserved_pointer;
  return is_sound ? MHA_OK : fail_row_array(report, name, input.type, input.reserved);
}
inline mha_status check_output_fields(Report report, const char *name, const mha_output &output) {
  const bool is_sound = output.type <= MHA_TYPE_BF16 && output.reserved == 0;
  return is_sound ? MHA_OK : fail_row_array(report, name, output.type, output.reserved);
}

// Check the fields of an array of these extents, and resolve its strides in place.
struct Extents {
  int64_t batch, rows, heads, width;  // no_extent: the array does not have this dimension
};
mha_status resolve_array(Report report, const char *name, const Extents &extents, mha_input *input);
mha_status resolve_array(Report report, const char *name, const Extents &extents,
                         mha_output *output);

// An input that is not there has no other fields.
mha_status fail_absent(Report report, const char *name);

inline mha_status check_absent(Report report, const char *name, const mha_input &input) {
  const bool is_absent = is_contiguous(input.strides) && input.type == 0 && input.reserved == 0 &&
                         !input.reserved_pointer;
  return is_absent ? MHA_OK : fail_absent(report, name);
}

// The size of the workspace, which is 0 where there is nothing to do.
mha_status check_size(Report report, const WorkspaceLayout &layout, bool has_no_work,
                      int64_t *workspace_bytes);

// The checks of a small layer must not take longer than its arithmetic. So each of those below is a
// few comparisons where it is called, and what exactly is wrong is found out elsewhere.
mha_status resolve_empty(Report report, const char *name, const char *what, int64_t *extent);
mha_status fail_workspace(Report report, uint32_t argument, const char *query,
                          size_t workspace_bytes, int64_t needed);

// An extent is at least 1, or MHA_EMPTY, which becomes 0. A plain 0 is one that was never set.
// what: what to set it to.
inline mha_status resolve_extent(Report report, const char *name, const char *what,
                                 int64_t *extent) {
  return *extent > 0 ? MHA_OK : resolve_empty(report, name, what, extent);
}

inline mha_status check_workspace(Report report, uint32_t argument, const char *query,
                                  const void *workspace, size_t workspace_bytes, int64_t needed) {
  const bool is_sound =
      workspace_bytes >= static_cast<uint64_t>(needed) && (workspace || needed == 0);
  return is_sound ? MHA_OK : fail_workspace(report, argument, query, workspace_bytes, needed);
}

}  // namespace mha
