// Strides are checked in three steps: each by itself (check_each), then together with the zeros
// that stand for contiguous dimensions (check_completeness, fill_strides), and those of outputs
// also for overlap (check_overlap).
//
// For example, q with 2 sequences of 10 rows and 4 heads of width 64 has the strides 2560, 256 and
// 64 if all are 0. If each row is followed by those of k and v, the caller sets row to 768; head
// stays 64, and batch becomes 7680.
//
// Most mistakes are strides that count something else, such as bytes, or that forget a dimension.
// They would not crash at once but read or write the wrong elements. So a stride has to step over
// whatever the dimensions inside it reach.
#include "arrays.h"

#include <utility>

namespace mha {
namespace {

// The dimensions in the order of mha_strides, and what a stride leads from and to, for messages.
constexpr const char *dimension_names[3] = {"batch", "row", "head"},
                     *neighbour_names[3] = {"sequence", "row", "head"};

// The dimensions of both kinds of arrays from the innermost to the outermost.
constexpr int row_major[3] = {2, 1, 0}, head_major[3] = {1, 2, 0};

// Each stride by itself: it is not negative, the array has the dimension, and it steps over a row.
// A dimension that the array does not have gets the extent 1.
mha_status check_each(Report report, Array *array, bool may_broadcast) {
  for (int i = 0; i < 3; ++i) {
    int64_t &extent = array->extents[i], &stride = array->strides[i];
    // A stride of a dimension that does not exist would never be used.
    if (extent == no_extent) {
      if (stride != 0)
        return report.invalid("%s%s.%s is %lld, but the array has no %s dimension; set it to 0",
                              array->name, array->strides_name, dimension_names[i], lld(stride),
                              dimension_names[i]);
      extent = 1;
    }
    if (stride == MHA_BROADCAST && may_broadcast) continue;
    if (stride == MHA_BROADCAST)
      return report.invalid(
          "%s%s.%s is MHA_BROADCAST, which only inputs can have; set it to 0 for contiguous",
          array->name, array->strides_name, dimension_names[i]);
    if (stride < 0)
      return report.invalid(
          "%s%s.%s is %lld; set it to 0 for contiguous, to the elements from one %s to the next%s",
          array->name, array->strides_name, dimension_names[i], lld(stride), neighbour_names[i],
          may_broadcast ? ", or to MHA_BROADCAST" : "");
    // Rows always step over each other. Heads do if there are several, and sequences are left to
    // fill_strides.
    const bool is_checked = i == 1 || (i == 2 && extent > 1);
    if (is_checked && stride != 0 && stride < array->width)
      return report.invalid(
          "%s%s.%s is %lld, less than the width of a %s, %lld; set it to at least that, or to 0 "
          "for contiguous",
          array->name, array->strides_name, dimension_names[i], lld(stride),
          !array->is_head_major && array->extents[2] > 1 ? "head" : "row", lld(array->width));
  }
  return MHA_OK;
}

// A head stride of [batch, rows, heads, width] usually means that the caller's array has another
// order of dimensions. A zero beside it would mean the default order, so it is more likely to have
// been forgotten.
mha_status check_completeness(Report report, const Array &array) {
  const bool has_head_stride = array.strides[2] != 0 && array.strides[2] != MHA_BROADCAST;
  if (array.is_head_major || !has_head_stride || array.extents[2] <= 1 || array.extents[1] == 0)
    return MHA_OK;
  for (int i = 1; i >= 0; --i) {
    if (array.strides[i] != 0 || array.extents[i] <= 1) continue;
    return report.invalid(
        "%s%s.head is %lld, but %s is 0; beside a head stride, set row, and batch for several "
        "sequences",
        array.name, array.strides_name, lld(array.strides[2]), dimension_names[i]);
  }
  return MHA_OK;
}

// Replaces zeros, from the innermost dimension to the outermost.
//
// A zero becomes the size of the dimension inside it. That must step over everything inside, which
// it does not if strides inside it were set so that dimensions interleave. A stride that was set
// may interleave with other ones that were set, as the two of a transposed array do, but must step
// over the dimensions inside it that are contiguous.
mha_status fill_strides(Report report, Array *array, bool may_broadcast) {
  const int(&order)[3] = array->is_head_major ? head_major : row_major;
  Count contiguous(array->width);  // the stride that a zero stands for
  // Elements that the dimensions inside the current one span: those whose stride was 0, and all.
  Count of_zeros(array->width), of_all(array->width);
  for (const int i : order) {
    int64_t &stride = array->strides[i];
    const int64_t extent = array->extents[i];
    if (stride == MHA_BROADCAST) continue;
    const bool is_given = stride != 0;
    if (!is_given) stride = contiguous.overflows() ? INT64_MAX : contiguous.value();
    // Overflows are left to check_size, and a stride of 0 at this point to arrays without elements.
    const Count &inside = is_given ? of_zeros : of_all;
    const bool is_too_small = extent > 1 && stride > 0 && stride < inside.value();
    if (is_too_small && is_given)
      return report.invalid(
          "%s%s.%s is %lld, less than the %lld elements that the strides of 0 (contiguous) inside "
          "it span; set it to at least that, or set those, too%s",
          array->name, array->strides_name, dimension_names[i], lld(stride), lld(of_zeros.value()),
          may_broadcast ? " (MHA_BROADCAST: one copy serves all)" : "");
    if (is_too_small)
      return report.invalid(
          "%s%s.%s is 0, but the strides inside it interleave and span %lld elements; set every "
          "stride",
          array->name, array->strides_name, dimension_names[i], lld(of_all.value()));
    contiguous = Count(extent) * Count(stride);
    if (extent == 0) continue;
    const Count span = Count(extent - 1) * Count(stride);
    if (!is_given) of_zeros = of_zeros + span;
    of_all = of_all + span;
  }
  return MHA_OK;
}

// Elements of 16 bits are counted as floats, so that a type does not decide what fits.
mha_status check_size(Report report, const Array &array) {
  if (!(span_of(array) * Count(sizeof(float))).overflows()) return MHA_OK;
  return report.too_large("%s would exceed the address space; use smaller dimensions", array.name);
}

// No element is written twice if each dimension, in the order of their strides, steps over
// everything that the smaller ones reach.
mha_status check_overlap(Report report, const Array &array) {
  // Exchanging neighbours keeps the order of equal strides, so that the outer one is blamed.
  int order[3] = {2, 1, 0};
  for (const int i : {0, 1, 0}) {
    if (array.strides[order[i + 1]] < array.strides[order[i]]) std::swap(order[i], order[i + 1]);
  }
  Count covered(array.width);
  for (const int i : order) {
    if (array.extents[i] <= 1) continue;
    if (array.strides[i] < covered.value())
      return report.invalid(
          "%s%s.%s is %lld, so that elements overlap; set it to at least %lld, or to 0 for "
          "contiguous",
          array.name, array.strides_name, dimension_names[i], lld(array.strides[i]),
          lld(covered.value()));
    covered = covered + Count(array.extents[i] - 1) * Count(array.strides[i]);
  }
  return MHA_OK;
}

mha_status resolve(Report report, Array *array, bool may_broadcast) {
  MHA_TRY(check_each(report, array, may_broadcast));
  MHA_TRY(check_completeness(report, *array));
  MHA_TRY(fill_strides(report, array, may_broadcast));
  for (int64_t &stride : array->strides) {
    if (stride == MHA_BROADCAST) stride = 0;
  }
  return check_size(report, *array);
}

}  // namespace

mha_status resolve_input(Report report, Array *array) { return resolve(report, array, true); }

mha_status resolve_output(Report report, Array *array) {
  MHA_TRY(resolve(report, array, false));
  // Nothing overlaps in an array without elements.
  for (const int64_t extent : array->extents) {
    if (extent == 0) return MHA_OK;
  }
  return check_overlap(report, *array);
}

mha_status resolve_set_strides(Report report, const char *name, Extents e, bool is_output,
                               mha_strides *strides) {
  Array array = array_of(name, *strides, e.batch, e.rows, e.heads, e.width);
  MHA_TRY(is_output ? resolve_output(report, &array) : resolve_input(report, &array));
  *strides = {array.strides[0], array.strides[1], array.strides[2]};
  return MHA_OK;
}

// The type is named first, because a struct that is not initialised has any number there.
mha_status fail_row_array(Report report, const char *name, uint32_t type, uint32_t reserved) {
  if (type > MHA_TYPE_BF16)
    return report.invalid(
        "%s.type is %u; it must be 0, MHA_TYPE_F32 (1), MHA_TYPE_F16 (2) or MHA_TYPE_BF16 (3)",
        name, type);
  return report.invalid("%s.%s is set; initialise the struct with {0}, and leave it 0", name,
                        reserved != 0 ? "reserved" : "reserved_pointer");
}

mha_status fail_absent(Report report, const char *name, const mha_input &input) {
  MHA_TRY(check_row_fields(report, name, input));
  return report.invalid("%s.data is NULL, but other fields of %s are set; set them to 0", name,
                        name);
}

mha_status fail_type(Report report, const char *name, uint32_t type, const char *of_name,
                     uint32_t of_type) {
  return report.invalid("%s.type is %u, but %s.type is %u; set it to 0 or to the type of %s", name,
                        type, of_name, of_type, of_name);
}

mha_status check_scheduler(Report report, const mha_scheduler *scheduler) {
  if (!scheduler) return MHA_OK;
  if (!scheduler->parallel_for)
    return report.null("scheduler.parallel_for is NULL; set it, or set scheduler to NULL");
  if (scheduler->num_threads == 0)
    return report.invalid("scheduler.num_threads is 0; set it to at least 1");
  if (scheduler->reserved != 0) return report.invalid("scheduler.reserved is not 0; set it to 0");
  return MHA_OK;
}

mha_status check_size(Report report, const WorkspaceLayout &layout, bool has_no_work,
                      int64_t *workspace_bytes) {
  *workspace_bytes = has_no_work ? 0 : layout.bytes();
  if (layout.bytes() >= 0) return MHA_OK;
  return report.too_large("the workspace would exceed the address space; use smaller dimensions");
}

mha_status resolve_empty(Report report, const char *name, const char *what, int64_t *extent) {
  if (*extent == MHA_EMPTY) {
    *extent = 0;
    return MHA_OK;
  }
  return report.invalid("%s is %lld; set it to %s, or to MHA_EMPTY for none", name, lld(*extent),
                        what);
}

// The size comes before the pointer: a caller who passes neither has not asked for the size.
mha_status fail_workspace(Report report, uint32_t argument, const char *query,
                          size_t workspace_bytes, int64_t needed) {
  if (workspace_bytes < static_cast<uint64_t>(needed))
    return report.about(argument + 1)
        .fail(MHA_ERROR_BUFFER_TOO_SMALL,
              "workspace_bytes is %zu, but this call needs %lld; call %s first", workspace_bytes,
              lld(needed), query);
  return report.about(argument).null("workspace is NULL; pass memory of the size that %s returns",
                                     query);
}

}  // namespace mha
