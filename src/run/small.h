// Calls so small that a plan and units of work would take longer than their arithmetic: a single
// function computes all of one.
#pragma once

#include "../objects/layer.h"

namespace mha {

// What such calls need to know of a layer; max_rows is 0 if it is too large for them.
SmallLayer small_layer_of(const mha_layer &layer);

// Whether a call is one: a few rows to a sequence, with threads a few in all, self-attention, and
// nothing but the output is asked for. So of its arguments only counts, arrays and the scheduler
// have to be checked.
bool is_small(const mha_layer &layer, const mha_forward_args &args);

// Less than a plan takes for the same arguments, or for larger ones.
int64_t small_workspace_bytes(const SmallLayer &layer, int64_t n);

}  // namespace mha
