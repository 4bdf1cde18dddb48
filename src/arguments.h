// Checks that mha_forward and mha_attention have in common.
#pragma once

#include "mha.h"
#include "status.h"

namespace mha {

// An array with a name, [batch, rows, heads, width]: its outer extents with their strides. The innermost stride is 1.
struct Array {
  const char *name;
  int64_t width;
  int64_t extents[3];
  int64_t strides[3];
};

// What a stride of 0 means: count times the next inner stride. INT64_MAX if that overflows, so that the check of the whole array fails.
int64_t contiguous_stride(int64_t stride, int64_t count, int64_t inner_stride);

// Elements from the first to the last, or an overflow.
Count span_of(const Array &array);

// Strides are not negative, a row does not overlap the next one, and the whole fits into memory. Outputs: no element is written twice.
mha_status check_input(Report &report, uint32_t argument, const Array &array);
mha_status check_output(Report &report, uint32_t argument, const Array &array);

// An optional contiguous output; null if it was not asked for.
struct OptionalOutput {
  const char *name;
  const float *output;
  Count elements;
};

// All of them can be addressed.
mha_status check_optional_outputs(Report &report, uint32_t argument, const OptionalOutput *outputs, int count);
uint64_t bytes_of_optional_outputs(const OptionalOutput *outputs, int count);

// is_causal and q_start without reading q_start; then its positions.
mha_status check_causal(Report &report, uint32_t argument, uint32_t is_causal, const int64_t *q_start, int64_t n_q, int64_t n_kv);
mha_status check_positions(Report &report, uint32_t argument, uint32_t is_causal, const int64_t *q_start, int64_t batch);

mha_status check_count(Report &report, uint32_t argument, const char *name, int64_t count);

mha_status check_workspace(Report &report, uint32_t argument, const char *query, const void *workspace, size_t workspace_bytes,
                           int64_t needed);

// Pairs of query and key that attend, over all sequences and one head.
uint64_t attending_pairs(int64_t batch, int64_t n_q, int64_t n_kv, bool is_causal, const int64_t *q_start);

}  // namespace mha
