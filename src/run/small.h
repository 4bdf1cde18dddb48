// Calls so small that a plan and units of work would take longer than their arithmetic. One
// function of the kernels (kernels/small.h) computes all of such a call.
#pragma once

#include "../objects/layer.h"

namespace mha {

// What the kernels need to know of a layer for small calls. max_rows is 0 if the layer is too large
// or has an option that the small path does not compute.
SmallLayer small_layer_of(const mha_layer &layer);

// Less than a plan takes for the same arguments or larger ones.
int64_t small_workspace_bytes(const SmallLayer &layer, int64_t n);

}  // namespace mha
