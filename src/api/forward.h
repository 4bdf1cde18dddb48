// mha_forward as mha_info uses it.
#pragma once

#include "../objects/layer.h"
#include "../run/attend.h"
#include "../run/project.h"

namespace mha {

constexpr uint32_t layer_argument = 1, args_argument = 2;  // of mha_forward and its queries

// A call of mha_forward: its arguments, with all defaults resolved, and its workspace.
struct ForwardCall {
  mha_forward_args args;
  InputRows query, own_key, own_value;
  const InputRows *key, *value;  // own_key and own_value, or the rows of query or key; null: none
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
