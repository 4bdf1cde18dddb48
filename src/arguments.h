// Checks that mha_forward and mha_attention have in common.
#pragma once

#include "count.h"
#include "mha.h"
#include "status.h"
#include "workspace.h"

namespace mha {

// An array with a name, [batch, rows, heads, width]: its outer extents with their strides. The innermost stride is 1.
struct Array {
  const char *name;
  int64_t width;
  int64_t extents[3];
  int64_t strides[3];
};

// What a stride of 0 means: count times the next inner stride, or inner_width where that is MHA_BROADCAST. INT64_MAX if that overflows, so
// that the check of the whole array fails.
inline int64_t contiguous_stride(int64_t stride, int64_t count, int64_t inner_stride, int64_t inner_width) {
  if (stride != 0) return stride;
  if (inner_stride < 0) return inner_stride == MHA_BROADCAST ? inner_width : stride;
  const Count whole = Count(count) * Count(inner_stride);
  return whole.overflows() ? INT64_MAX : whole.value();
}

// Elements from the first to the last, or an overflow.
inline Count span_of(const Array &array) {
  Count span(array.width);
  for (int i = 0; i < 3; ++i) {
    if (array.extents[i] == 0) return Count(0);
    span = span + Count(array.extents[i] - 1) * Count(array.strides[i]);
  }
  return span;
}

// Whether the extents and strides, which are not negative then, are so small that no span of them can overflow.
inline bool cannot_overflow(const Array &array) {
  const int64_t(&n)[3] = array.extents, (&s)[3] = array.strides;
  return static_cast<uint64_t>(n[0] | n[1] | n[2] | s[0] | s[1] | s[2] | array.width) < uint64_t{1} << 28;
}

// The size of the workspace, which is 0 where there is nothing to do.
mha_status check_size(Report report, const WorkspaceLayout &layout, bool has_no_work, int64_t *workspace_bytes);

// The checks of a small layer must not take longer than its arithmetic. So each of those below is a few comparisons where it is called,
// and what exactly is wrong is found out elsewhere.
mha_status fail_input(Report report, const Array &array);
mha_status check_permuted_output(Report report, const Array &array);
mha_status resolve_empty(Report report, const char *name, const char *what, int64_t *extent);
mha_status fail_workspace(Report report, uint32_t argument, const char *query, size_t workspace_bytes, int64_t needed);

// Strides are not negative, a row does not overlap the next one, and the whole fits into memory.
inline mha_status check_input(Report report, const Array &array) {
  const int64_t(&strides)[3] = array.strides;
  const bool has_rows = strides[1] >= array.width && strides[2] >= (array.extents[2] > 1 ? array.width : 0);
  const bool is_sound = has_rows && (cannot_overflow(array) || (strides[0] >= 0 && !(span_of(array) * Count(sizeof(float))).overflows()));
  return is_sound ? MHA_OK : fail_input(report, array);
}

// The same for an input whose sequences, rows or heads may all be one: MHA_BROADCAST is no step then.
mha_status check_broadcast(Report report, const Array &array);

inline mha_status check_broadcast_input(Report report, const Array &array) {
  const bool repeats = (array.strides[0] | array.strides[1] | array.strides[2]) < 0;
  return repeats ? check_broadcast(report, array) : check_input(report, array);
}

inline int64_t resolved_stride(int64_t stride) { return stride == MHA_BROADCAST ? 0 : stride; }

// And no element is written twice: sorted by stride, each dimension steps over all of the smaller ones.
inline mha_status check_output(Report report, const Array &array) {
  if (const mha_status status = check_input(report, array)) return status;
  Count covered(array.width);
  for (int i = 2; i >= 0; --i) {
    if (array.extents[i] <= 1) continue;
    if (array.strides[i] < covered.value()) return check_permuted_output(report, array);
    covered = covered + Count(array.extents[i] - 1) * Count(array.strides[i]);
  }
  return MHA_OK;
}

// Rows of the caller's are of f32, f16 or bf16.
mha_status fail_row_type(Report report, const char *name, uint32_t type);

inline mha_status check_row_type(Report report, const char *name, uint32_t type) {
  return type <= MHA_TYPE_BF16 ? MHA_OK : fail_row_type(report, name, type);
}

// An extent is at least 1, or MHA_EMPTY, which becomes 0. A plain 0 is one that was never set. what: what to set it to.
inline mha_status resolve_extent(Report report, const char *name, const char *what, int64_t *extent) {
  return *extent > 0 ? MHA_OK : resolve_empty(report, name, what, extent);
}

inline mha_status check_workspace(Report report, uint32_t argument, const char *query, const void *workspace, size_t workspace_bytes,
                                  int64_t needed) {
  const bool is_sound = workspace_bytes >= static_cast<uint64_t>(needed) && (workspace || needed == 0);
  return is_sound ? MHA_OK : fail_workspace(report, argument, query, workspace_bytes, needed);
}

}  // namespace mha
