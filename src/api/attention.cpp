// mha_attention: the attention alone, on the caller's arrays.
//
// make_call checks the arguments and plans the call; mha_attention_info and the size query need no
// more. `run` says where the rows lie and goes through the passes. mha_choose_keys shares the
// checks, the plan and the places of rows, but does not attend.

#include "attention.h"

#include "../base/structs.h"
#include "../check/arrays.h"
#include "../check/cache.h"
#include "../check/request.h"
#include "../cpu.h"
#include "frame.h"

namespace mha {
namespace {

// With a cache, the keys and values of the call are stored there before it attends.
bool stores_rows(const AttentionCall &call) {
  return call.stage.sequences.cache && call.args.call.n_kv > 0;
}

// Whether plain keys may be packed before queries choose blocks of them. A single query would read
// each key once, so packing would not pay. The workspace has the memory whatever n_kv is, so that
// fewer keys never need more.
bool may_pack_keys(const AttentionCall &call) {
  const AttentionRequest &request = call.stage.attention.request;
  const ChosenKeys &chosen = request.options.chosen;
  if (call.stage.sequences.cache) return false;
  return request.is_in_integers ||
         (chosen.lists.base && chosen.block % tile_keys == 0 && call.args.call.n_q > 1);
}

// They are if each key is chosen twice or more often on average.
bool packs_keys(const AttentionCall &call) {
  const AttentionRequest &request = call.stage.attention.request;
  const ChosenKeys &chosen = request.options.chosen;
  const Count choices = Count(call.args.call.n_q) * Count(chosen.count) * Count(chosen.block);
  return may_pack_keys(call) && (request.is_in_integers || choices.overflows() ||
                                 choices.value() / 2 >= call.args.call.n_kv);
}

Count key_positions(const AttentionCall &call) {
  const SequenceArguments &s = call.stage.sequences;
  const int64_t n_kv = call.args.call.n_kv;
  return Count(s.is_packed() ? packed_key_blocks(n_kv, s.batch) : blocks_of(n_kv, tile_keys)) *
         Count(tile_keys);
}

void take_packed(const Count &positions, AttentionCall *call, WorkspaceLayout *layout) {
  const mha_attention_args &args = call->args;
  const Attention &attention = call->stage.attention;
  const Count rows = Count(args.call.batch) * Count(args.num_kv_heads) * positions;
  const int64_t v_width = attention.plan.head_dim_v_padded;
  const bool are_codes = attention.request.is_in_integers;
  call->packed_k = layout->take_floats(
      rows * Count(are_codes ? floats_of_codes(args.head_dim) : key_stride_of(args.head_dim)));
  call->packed_v =
      layout->take_floats(rows * Count(are_codes ? floats_of_codes(v_width) : v_width));
}

// Plans the call anew if plain keys are packed once for all units. Units have fewer rows then, and
// need less memory: keys are shared if they fit into what is left of it, so that no workspace
// grows. A third thread has to make up for the stage in which threads wait for each other.
void share_keys(AttentionCall *call) {
  AttentionStage &stage = call->stage;
  const AttentionRequest &request = stage.attention.request;
  const int64_t num_threads = threads_of(stage.scheduler);
  if (num_threads <= 2 || stage.sequences.cache || request.is_in_integers ||
      request.options.chosen.lists.base || !packs_often(stage))
    return;
  AttentionCall shared = *call;
  Attention &attention = shared.stage.attention;
  const KeyValues packed = packed_floats(nullptr, 0, 0, tile_keys, request.num_kv_heads, false);
  attention.request = with_rows(request, packed, packed);
  WorkspaceLayout layout;
  attention.plan = plan_attention(attention.request, stage.sequences, num_threads, &layout);
  take_packed(key_positions(shared), &shared, &layout);
  shared.shares_keys = true;
  if (layout.bytes() >= 0 && layout.bytes() <= call->workspace_bytes) *call = shared;
}

}  // namespace

mha_status check_call(Report report, const AttentionUse &use, AttentionCall *call) {
  AttentionStage &stage = call->stage;
  call->shares_keys = false;
  stage.scheduler = call->args.call.scheduler;
  MHA_TRY(check_attention(report, use, &call->args, &stage.sequences, &stage.outputs,
                          &stage.attention.request));
  return choose_kernels(report, call->args.instruction_set, &stage.kernels);
}

mha_status make_call(Report report, const mha_attention_args *given, AttentionCall *call) {
  const mha_attention_args &args = call->args;
  MHA_TRY(read_struct(report, "mha_attention_args", given, &call->args));
  MHA_TRY(check_call(report, {true, 0}, call));
  WorkspaceLayout layout;
  AttentionStage &stage = call->stage;
  Attention &attention = stage.attention;
  attention.plan =
      plan_attention(attention.request, stage.sequences, threads_of(args.call.scheduler), &layout);
  take_packed(may_pack_keys(*call) ? key_positions(*call) : Count(0), call, &layout);
  return check_size(report, layout, stage.sequences.has_no_work(), &call->workspace_bytes);
}

bool has_no_work(const AttentionCall &call) { return call.stage.sequences.has_no_work(); }

mha_status check_data(Report report, AttentionCall &call) {
  mha_attention_args &args = call.args;
  const PairOutputs &pairs = call.stage.attention.request.pairs;
  MHA_TRY(each_array(args, !call.stage.outputs.partials, CheckPointers{report}));
  if (args.output.data == args.q.data && pairs.has_any())
    return report.invalid(
        "output.data is q.data, but outputs per pair are computed from q after output is written; "
        "give output another array");
  MHA_TRY(check_values(report, args.call.cache, args.call.n_kv, args.v.data, "v.data"));
  return check_array_contents(report, call.stage.sequences, &call.stage.attention.request);
}

// Where the rows lie: in the arrays of the caller and in the cache, except for keys that are packed
// first.
void place(const AttentionCall &call, unsigned char *workspace, AttentionArrays *arrays) {
  const mha_attention_args &args = call.args;
  const AttentionStage &stage = call.stage;
  arrays->q = rows_of(args.q);
  arrays->k = stage.attention.request.k;
  arrays->v = stage.attention.request.v;
  const bool packs = call.shares_keys || packs_keys(call), has_rows = packs || stores_rows(call);
  arrays->new_keys = has_rows ? rows_of(args.k) : StridedRows{};
  arrays->new_values = has_rows ? rows_of(args.v) : StridedRows{};
  if (packs) {
    const int64_t positions = key_positions(call).value();
    const auto packed = [&](int64_t offset, bool are_keys, int64_t row_stride) {
      float *const base = reinterpret_cast<float *>(workspace + offset);
      if (stage.attention.request.is_in_integers)
        return packed_codes_at(base, are_keys, row_stride, positions, args.num_kv_heads,
                               args.call.batch * args.num_kv_heads, stage.sequences.is_packed());
      return packed_floats(base, row_stride, positions * row_stride, positions, args.num_kv_heads,
                           stage.sequences.is_packed());
    };
    arrays->k = packed(
        call.packed_k, true,
        stage.attention.request.is_in_integers ? args.head_dim : key_stride_of(args.head_dim));
    arrays->v = packed(call.packed_v, false, stage.attention.plan.head_dim_v_padded);
  }
  arrays->gate = {};
  arrays->output = rows_of(args.output);
}

void run(AttentionCall *made, unsigned char *workspace) {
  AttentionCall &call = *made;
  const mha_attention_args &args = call.args;
  AttentionStage &stage = call.stage;
  share_keys(&call);
  place(call, workspace, &stage.attention.arrays);
  begin_passes(&stage, workspace);
  const OutputRows &output = stage.attention.arrays.output;
  for (int64_t h = 0; stage.has_padding() && output.base && h < args.num_heads; ++h) {
    char *const head =
        static_cast<char *>(output.base) + h * output.head_stride * bytes_of(output.storage);
    clear_padding(stage.queries, args.call.batch, args.call.n_q, args.head_dim_v, head,
                  output.batch_stride, output.row_stride, output.storage);
  }
  while (next_pass(&stage)) attend_pass(&stage);
}

}  // namespace mha

using namespace mha;

mha_status mha_attention_workspace(const mha_attention_args *args, size_t *bytes,
                                   mha_error *error) {
  return answer_size<AttentionCall>(error, bytes, args);
}

mha_status mha_attention(const mha_attention_args *args, void *workspace, size_t workspace_bytes,
                         mha_error *error) {
  return run_call<AttentionCall>(error, "mha_attention_workspace", workspace, workspace_bytes,
                                 args);
}
