// mha_choose_keys: index scores of queries and keys as mha_attention multiplies them, and the keys
// with the greatest ones.
//
// The call goes through blocks of queries, a few at a time, so that their scores fit into the
// workspace. For each, units (a block with a part of its keys) write scores; then each query
// chooses.

#include <string.h>

#include <algorithm>

#include "../check/request.h"
#include "../check/rules.h"
#include "../storage.h"
#include "attention.h"
#include "frame.h"

namespace mha {
namespace {

constexpr int64_t queries_per_thread = 8;  // whose scores are in the workspace at once
constexpr int64_t scoring_units_per_thread = 4;

struct ChoiceCall {
  mha_choose_keys_args args;
  AttentionCall call;
  KeyChoice choice;
  int64_t scores;  // offset in the workspace
  int64_t workspace_bytes;
  int64_t first_block, parts;  // of the blocks under way, and how many units each is
};

// The attention's own checks and plan serve queries and keys; the choice adds its arrays, and
// memory for the scores of queries_per_thread queries for each thread.
mha_status make_call(Report report, const mha_choose_keys_args *given, ChoiceCall *made) {
  mha_choose_keys_args &args = made->args;
  AttentionCall &call = made->call;
  AttentionStage &stage = call.stage;
  Attention &attention = stage.attention;
  const AttentionRequest &request = attention.request;
  MHA_TRY(check_choice(report, given, &args, &call.args));
  MHA_TRY(check_call(report, {false, queries_per_thread}, &call));
  const int64_t n_kv = max_keys(stage.sequences);
  MHA_TRY(check_choice_arrays(report, call.args, request, n_kv, &args));
  WorkspaceLayout layout;
  attention.plan = plan_attention(request, stage.sequences, threads_of(stage.scheduler), &layout);
  const Count queries = Count(request.batch) * Count(request.n_q);
  const int64_t at_once = threads_of(stage.scheduler) * queries_per_thread;
  const Count most_rows = queries.overflows() ? at_once : std::min(queries.value(), at_once);
  made->choice = {};
  KeyChoice &choice = made->choice;
  choice.attention = &attention;
  choice.weights = static_cast<const float *>(args.weights.data);
  choice.weights_batch_stride = args.weights.strides.batch;
  choice.weights_row_stride = args.weights.strides.row;
  choice.num_chosen = args.num_chosen;
  choice.chosen = args.chosen_keys;
  choice.index_scores = args.index_scores;
  choice.score_stride = blocks_of(n_kv, tile_keys) * tile_keys;
  made->scores = layout.take_floats(most_rows * Count(choice.score_stride));
  return check_size(report, layout, stage.sequences.has_no_work(), &made->workspace_bytes);
}

bool has_no_work(const ChoiceCall &made) { return made.call.stage.sequences.has_no_work(); }

mha_status check_data(Report report, ChoiceCall &made) {
  const Rules rules = {report};
  MHA_TRY(each_array(made.call.args, false, CheckPointers{report, "attention."}));
  MHA_TRY(rules.given("weights.data", made.args.weights.data, "the weights of the index heads"));
  MHA_TRY(rules.given("chosen_keys", made.args.chosen_keys, "an array for the choice"));
  AttentionStage &stage = made.call.stage;
  return check_array_contents(report, stage.sequences, &stage.attention.request);
}

// Scores of one block of queries with one part of the keys.
void run_scores(const void *context, int64_t unit, int64_t thread) {
  const ChoiceCall &made = *static_cast<const ChoiceCall *>(context);
  const AttentionStage &stage = made.call.stage;
  const int64_t block = made.first_block + unit / made.parts,
                blocks = stage.attention.run.query_blocks;
  float *const scratch = stage.scratch + thread * stage.attention.plan.scratch.floats;
  stage.kernels->score_keys(made.choice, block / blocks, block % blocks, unit % made.parts,
                            scratch);
}

// The choice of one query, once all of its scores are in the workspace.
void run_choice(const void *context, int64_t unit, int64_t) {
  const ChoiceCall &made = *static_cast<const ChoiceCall *>(context);
  const int64_t query = made.choice.first_query + unit;
  made.call.stage.kernels->choose_greatest(made.choice, query / made.choice.longest_q,
                                           query % made.choice.longest_q);
}

// Nothing here can fail.
void run(ChoiceCall *made, unsigned char *workspace) {
  AttentionStage &stage = made->call.stage;
  const AttentionRequest &request = stage.attention.request;
  const AttentionRun &units = stage.attention.run;
  KeyChoice &choice = made->choice;
  place(made->call, workspace, &stage.attention.arrays);
  begin_passes(&stage, workspace);
  next_pass(&stage);  // the only one
  prepare_pass(stage);
  choice.longest_q = longest_queries(stage.sequences);
  choice.scores = reinterpret_cast<float *>(workspace + made->scores);
  const int64_t rows = request.array_batch * request.n_q;
  memset(choice.chosen, 0xff, static_cast<size_t>(rows * choice.num_chosen) * sizeof(int32_t));
  if (choice.index_scores)
    std::fill_n(choice.index_scores, rows * units.pair_columns, -MHA_INFINITY);

  const int64_t threads = threads_of(stage.scheduler),
                chunks = blocks_of(units.longest_kv, chunk_keys);
  const int64_t blocks = request.batch * units.query_blocks,
                at_once = threads * queries_per_thread / units.block_queries;
  const auto first_query_of = [&](int64_t block) {
    return block / units.query_blocks * choice.longest_q +
           block % units.query_blocks * units.block_queries;
  };
  for (int64_t block = 0; block < blocks && chunks > 0; block += at_once) {
    const int64_t here = std::min(at_once, blocks - block);
    made->first_block = block;
    made->parts =
        threads == 1 ? 1 : std::min(chunks, blocks_of(threads * scoring_units_per_thread, here));
    choice.part_chunks = blocks_of(chunks, made->parts);
    choice.first_query = first_query_of(block);
    run_units(stage.scheduler, stage.counter, here * made->parts, run_scores, made);
    run_units(stage.scheduler, stage.counter, first_query_of(block + here) - choice.first_query,
              run_choice, made);
  }
  next_pass(&stage);  // the cache counts its new positions
}

}  // namespace
}  // namespace mha

using namespace mha;

mha_status mha_choose_keys_workspace(const mha_choose_keys_args *args, size_t *bytes,
                                     mha_error *error) {
  return answer_size<ChoiceCall>(error, bytes, args);
}

mha_status mha_choose_keys(const mha_choose_keys_args *args, void *workspace,
                           size_t workspace_bytes, mha_error *error) {
  return run_call<ChoiceCall>(error, "mha_choose_keys_workspace", workspace, workspace_bytes, args);
}
