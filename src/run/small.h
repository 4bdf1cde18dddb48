// Calls so small that a plan and units of work would take longer than their arithmetic. One
// function of the kernels (kernels/small.h) computes all of such a call.
#pragma once

#include "../objects/layer.h"

namespace mha {

// What the kernels need to know of a layer for small calls. max_rows is 0 if the layer is too large
// or has an option that the small path does not compute.
SmallLayer small_layer_of(const mha_layer &layer);

// Whether a call takes the small path: self-attention of a few rows per sequence (with several
// threads, a few rows in total), and no option but MHA_CAUSAL. Of its arguments only counts, arrays
// and the scheduler need checks.
bool is_small(const mha_layer &layer, const mha_forward_args &args);

// Less than a plan takes for the same arguments or larger ones.
int64_t small_workspace_bytes(const SmallLayer &layer, int64_t n);

}  // namespace mha
