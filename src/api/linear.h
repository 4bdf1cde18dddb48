// mha_linear as mha_linear_info uses it.
#pragma once

#include "../base/report.h"
#include "../run/project.h"

namespace mha {

// A call of mha_linear: its arguments, with all defaults resolved, and its workspace.
struct LinearCall {
  mha_linear_args args;
  const mha_layer *layer;
  int64_t counter;  // offset in the workspace, as those of the product
  ProductPlan product;
  int64_t workspace_bytes;
};

// Reads, checks and plans a call.
mha_status make_call(Report report, const mha_layer *layer, const mha_linear_args *given,
                     LinearCall *call);

}  // namespace mha
