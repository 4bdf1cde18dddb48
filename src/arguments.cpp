#include "arguments.h"

namespace mha {
namespace {

constexpr const char *dimension_names[3] = {"batch", "row", "head"};

}  // namespace

mha_status fail_input(Report report, const Array &array) {
  for (int i = 0; i < 3; ++i) {
    if (array.strides[i] < 0) {
      return report.invalid("%s_%s_stride is %lld; set it to 0 for contiguous, or to the elements from one to the next", array.name,
                            dimension_names[i], lld(array.strides[i]));
    }
    const bool steps_over_rows = i == 1 || (i == 2 && array.extents[i] > 1);
    if (steps_over_rows && array.strides[i] < array.width) {
      return report.invalid("%s_%s_stride is %lld, less than the width of a row, %lld; set at least that, or 0 for contiguous", array.name,
                            dimension_names[i], lld(array.strides[i]), lld(array.width));
    }
  }
  return report.fail(MHA_ERROR_TOO_LARGE, "%s would be larger than memory can be", array.name);
}

mha_status check_broadcast(Report report, const Array &array) {
  Array one = array;
  for (int i = 0; i < 3; ++i) {
    if (array.strides[i] != MHA_BROADCAST) continue;
    one.extents[i] = array.extents[i] > 0 ? 1 : 0;
    one.strides[i] = array.width;
  }
  return check_input(report, one);
}

mha_status check_permuted_output(Report report, const Array &array) {
  for (const int64_t extent : array.extents) {
    if (extent == 0) return MHA_OK;
  }
  // Sorted by stride, each dimension has to step over all of the smaller ones.
  int order[3] = {2, 1, 0};  // of two that are equal, the outer one is blamed
  for (int i = 0; i < 3; ++i) {
    for (int j = i + 1; j < 3; ++j) {
      if (array.strides[order[j]] < array.strides[order[i]]) {
        const int swapped = order[i];
        order[i] = order[j];
        order[j] = swapped;
      }
    }
  }
  Count covered(array.width);
  for (const int i : order) {
    if (array.extents[i] <= 1) continue;
    if (array.strides[i] < covered.value()) {
      return report.invalid("%s_%s_stride is %lld, so that its elements overlap; set at least %lld, or 0 for contiguous", array.name,
                            dimension_names[i], lld(array.strides[i]), lld(covered.value()));
    }
    covered = covered + Count(array.extents[i] - 1) * Count(array.strides[i]);
  }
  return MHA_OK;
}

mha_status check_size(Report report, const WorkspaceLayout &layout, bool has_no_work, int64_t *workspace_bytes) {
  *workspace_bytes = has_no_work ? 0 : layout.bytes();
  if (layout.bytes() >= 0) return MHA_OK;
  return report.fail(MHA_ERROR_TOO_LARGE, "the workspace would be larger than memory can be");
}

mha_status fail_row_type(Report report, const char *name, uint32_t type) {
  return report.invalid("%s is %u; it can be MHA_TYPE_F32 (0), MHA_TYPE_F16 (1) or MHA_TYPE_BF16 (2)", name, type);
}

mha_status resolve_empty(Report report, const char *name, const char *what, int64_t *extent) {
  if (*extent == MHA_EMPTY) {
    *extent = 0;
    return MHA_OK;
  }
  return report.invalid("%s is %lld; set it to %s, or to MHA_EMPTY for none", name, lld(*extent), what);
}

mha_status fail_workspace(Report report, uint32_t argument, const char *query, size_t workspace_bytes, int64_t needed) {
  if (workspace_bytes < static_cast<uint64_t>(needed)) {
    return report.about(argument + 1).fail(MHA_ERROR_BUFFER_TOO_SMALL, "workspace_bytes is %zu, this call needs %lld; ask %s",
                                           workspace_bytes, lld(needed), query);
  }
  return report.about(argument).fail(MHA_ERROR_NULL_POINTER, "workspace is NULL; pass memory of the size that %s says", query);
}

}  // namespace mha
