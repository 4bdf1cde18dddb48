// A call over the caller's queries, keys and values, as far as mha_attention and mha_choose_keys
// have it in common.
#pragma once

#include "middle_stage.h"

namespace mha {

// What a call comes to: its arguments, all defaults resolved, and its workspace.
struct AttentionCall {
  mha_attention_args args;
  MiddleStage stage;
  int64_t workspace_bytes;
};

// Checks arguments that have been read, except for pointers and arrays, and makes the stage of
// them, except for its plan.
mha_status check_attention(Report report, AttentionCall *call);

}  // namespace mha
