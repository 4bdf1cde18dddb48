// mha_attention as other entries use it: mha_attention_info and mha_choose_keys.
#pragma once

#include "../check/entries.h"
#include "../run/attend.h"

namespace mha {

// A call of mha_attention: its arguments, with all defaults resolved, and its workspace.
struct AttentionCall {
  mha_attention_args args;
  AttentionStage stage;
  // Offsets in the workspace. Plain keys and values of which many queries choose blocks are packed
  // there first, and those that many units read.
  int64_t packed_k, packed_v;
  bool shares_keys;  // the latter
  int64_t workspace_bytes;
};

// Everything up to the plan, for arguments that were read.
mha_status check_call(Report report, const AttentionUse &use, AttentionCall *call);

// Reads, checks and plans a call.
mha_status make_call(Report report, const mha_attention_args *given, AttentionCall *call);

// Where its rows lie.
void place(const AttentionCall &call, unsigned char *workspace, AttentionArrays *arrays);

}  // namespace mha
