// mha_recurrent_attention: states that each row of a sequence changes.
//
// A unit of work is one state and all rows of its sequence, or some of its columns where there are
// fewer states than keep the threads busy.

#include "../check/recurrent.h"

#include <algorithm>

#include "../check/sequences.h"
#include "../run/rows.h"
#include "frame.h"

namespace mha {
namespace {

constexpr int64_t units_per_thread = 4;  // at least, as far as columns can be shared out

struct RecurrentCall {
  mha_recurrent_args args;
  SequenceArguments sequences;
  const Kernels *kernels;
  Recurrence recurrence;
  int64_t counter, scratch;  // offsets in the workspace
  int64_t workspace_bytes;
  float *scratch_floats;  // of the first thread
  int64_t part_columns;   // of a unit
  int64_t parts;          // of a state
};

// Takes `count` floats after those of a part before, in steps of 16.
int64_t take(Count count, Count *end) {
  const int64_t offset = end->value();
  *end = round_up(*end + count, 16);
  return offset;
}

// The memory of one unit. All of it serves the widest unit, that of a whole state.
void plan_scratch(Recurrence *call, Count *floats) {
  RecurrentScratch &at = call->scratch;
  const int64_t queries = call->state_queries;
  const Count width = round_up(Count(call->head_dim), 16),
              columns = round_up(Count(call->head_dim_v), recurrent_columns);
  at.width = width.value();
  Count row = width;
  at.decayed_key = call->decay_dim > 1 ? take(width, &row) : 0;
  at.queries = take(Count(queries) * width, &row);
  at.decay = take(call->decay_dim > 1 ? width : Count(1), &row);
  at.value = take(columns, &row);
  at.factors = take(Count(2) + Count(queries), &row);
  at.row_stride = row.value();
  *floats = Count(0);
  at.rows = take(Count(recurrent_tokens + 2) * row, floats);
  at.gates = take(Count(recurrent_tokens * call->decay_dim), floats);
  at.betas = take(Count(recurrent_tokens), floats);
  at.changes = take(columns, floats);
  at.state = take(columns * Count(call->head_dim), floats);
  at.sums = take(Count(3 * recurrent_columns), floats);
  at.outputs = take(Count(recurrent_columns), floats);
  at.floats = floats->value();
}

// Without rows, states are still handed on.
bool has_no_work(const RecurrentCall &call) {
  return call.sequences.batch == 0 ||
         (call.sequences.n_q == 0 && !call.args.state_out && !call.args.snapshots);
}

mha_status make_call(Report report, const mha_recurrent_args *given, RecurrentCall *call) {
  mha_recurrent_args &args = call->args;
  MHA_TRY(check_recurrent(report, given, &args, &call->sequences));
  MHA_TRY(choose_kernels(report, args.instruction_set, &call->kernels));
  Recurrence &r = call->recurrence;
  r = {};
  r.num_q_heads = args.num_q_heads;
  r.num_k_heads = args.num_k_heads;
  r.num_v_heads = args.num_v_heads;
  r.head_dim = args.head_dim;
  r.head_dim_v = args.head_dim_v;
  r.decay_dim = args.decay_dim;
  r.state_queries = std::max<int64_t>(1, args.num_q_heads / args.num_v_heads);
  r.scale = args.scale != 0.0f ? args.scale : 1.0f / MHA_SQRTF(static_cast<float>(args.head_dim));
  r.norm_epsilon = args.norm_epsilon;
  r.a_log = args.a_log;
  r.dt_bias = args.dt_bias;
  r.has_raw_beta = args.beta_function == MHA_FUNCTION_SIGMOID;
  r.q = rows_of(args.q);
  r.k = rows_of(args.k);
  r.v = rows_of(args.v);
  r.decay = rows_of(args.decay);
  r.beta = rows_of(args.beta);
  r.output = rows_of(args.output);
  r.state = args.state;
  r.state_out = args.state_out;
  r.snapshots = args.snapshots;
  r.num_snapshots = args.num_snapshots;
  Count floats(0);
  plan_scratch(&r, &floats);
  const int64_t threads = threads_of(args.scheduler);
  WorkspaceLayout layout;
  call->counter = layout.take(Count(threads > 1 ? 1 : 0), sizeof(UnitCounter));
  call->scratch = layout.take_floats(Count(threads) * floats);
  return check_size(report, layout, has_no_work(*call), &call->workspace_bytes);
}

void run_unit(const void *context, int64_t unit, int64_t thread) {
  const RecurrentCall &call = *static_cast<const RecurrentCall *>(context);
  const Recurrence &r = call.recurrence;
  const int64_t begin = unit % call.parts * call.part_columns, state = unit / call.parts;
  call.kernels->advance_state(r, rows_of(call.sequences, state / r.num_v_heads),
                              state % r.num_v_heads, begin,
                              std::min(begin + call.part_columns, r.head_dim_v),
                              call.scratch_floats + thread * r.scratch.floats);
}

// Nothing here can fail.
void run(RecurrentCall *call, unsigned char *workspace) {
  const Recurrence &r = call->recurrence;
  const mha_scheduler *const scheduler = call->args.scheduler;
  clear_padding(call->sequences, r.output, r.state_queries * r.num_v_heads, r.head_dim_v);
  call->scratch_floats = reinterpret_cast<float *>(workspace + call->scratch);
  const int64_t states = call->sequences.batch * r.num_v_heads,
                blocks = blocks_of(r.head_dim_v, recurrent_columns),
                threads = threads_of(scheduler);
  const int64_t wanted = threads == 1 ? 1 : blocks_of(threads * units_per_thread, states);
  call->part_columns = blocks_of(blocks, std::min(blocks, wanted)) * recurrent_columns;
  call->parts = blocks_of(r.head_dim_v, call->part_columns);
  call->recurrence.heads_ahead = blocks_of(threads, call->parts);
  run_units(scheduler, reinterpret_cast<UnitCounter *>(workspace + call->counter),
            states * call->parts, run_unit, call);
}

mha_status check_data(Report report, RecurrentCall &call) {
  MHA_TRY(each_array(call.args, CheckPointers{report}));
  return check_query_rows(report, call.sequences, "rows");
}

// For each number of a state: its product with the decay; k u and its sum; and of r, where there is
// beta, and of each query, a product and a sum.
mha_status fill_info(Report report, RecurrentCall &call, mha_call_info *info) {
  describe_run(*call.kernels, call.args.scheduler, false, info);
  if (has_no_work(call)) return MHA_OK;
  MHA_TRY(check_query_rows(report, call.sequences, "rows"));
  const Recurrence &r = call.recurrence;
  const uint64_t rows = valid_queries(call.sequences);
  const int64_t heads = r.num_v_heads, numbers = heads * r.head_dim * r.head_dim_v;
  const int64_t each = 2 * r.state_queries + 2 + (r.decay.base ? 1 : 0) + (r.beta.base ? 2 : 0);
  uint64_t row_bytes[2] = {};
  MHA_TRY(each_array(call.args, CountRowBytes{row_bytes}));
  const int64_t states = (r.state ? 1 : 0) + (r.state_out ? 1 : 0) + r.num_snapshots;
  const int64_t gate_floats = (r.a_log ? heads : 0) + (r.dt_bias ? heads * r.decay_dim : 0);
  info->operations = rows * product(numbers, each);
  info->bytes = rows * row_bytes[0] + product(gate_floats, sizeof(float)) +
                product(call.sequences.batch, states) * product(numbers, sizeof(float));
  return MHA_OK;
}

}  // namespace
}  // namespace mha

using namespace mha;

mha_status mha_recurrent_attention_workspace(const mha_recurrent_args *args, size_t *bytes,
                                             mha_error *error) {
  return answer_size<RecurrentCall>(error, bytes, args);
}

mha_status mha_recurrent_attention(const mha_recurrent_args *args, void *workspace,
                                   size_t workspace_bytes, mha_error *error) {
  return run_call<RecurrentCall>(error, "mha_recurrent_attention_workspace", workspace,
                                 workspace_bytes, args);
}

mha_status mha_recurrent_attention_info(const mha_recurrent_args *args, mha_call_info *info,
                                        mha_error *error) {
  return answer_info<RecurrentCall>(error, info, args);
}
