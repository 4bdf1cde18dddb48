// mha_forward as mha_forward_info uses it: the call with its plan, which says how the call will run
// without running it.
#pragma once

#include "../base/report.h"
#include "../objects/layer.h"
#include "../run/attend.h"
#include "../run/project.h"

namespace mha {

// A call of mha_forward: its arguments, with all defaults resolved, and its workspace.
struct ForwardCall {
  const mha_layer *layer;
  mha_forward_args args;
  AttentionStage stage;
  // Offsets in the workspace. k_rows and v_rows hold keys and values as projected, if they have to
  // be prepared or go to a cache.
  int64_t q, gate, k, v, k_rows, v_rows, context;
  ProductPlan inputs, output;  // of the products before and after the attention
  int64_t workspace_bytes;

  bool is_packed() const { return stage.sequences.is_packed(); }
};

// Reads, checks and plans a call.
mha_status make_call(Report report, const mha_layer *layer, const mha_forward_args *given,
                     ForwardCall *call);

}  // namespace mha
