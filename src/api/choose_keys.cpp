// mha_choose_keys: index scores of queries and keys as mha_attention multiplies them, and the keys
// with the greatest ones.
//
// Some blocks of queries at a time: units, each a block with a part of its keys, write scores to
// the workspace; then each query chooses.

#include <string.h>

#include <algorithm>
#include <array>

#include "../check/arrays.h"
#include "../check/cache.h"
#include "../check/request.h"
#include "../check/structs.h"
#include "../storage.h"
#include "attention.h"

namespace mha {
namespace {

constexpr int64_t queries_per_thread = 8;  // whose scores are in the workspace at once
constexpr int64_t units_per_thread = 4;

struct ChoiceCall {
  mha_choose_keys_args args;
  AttentionCall call;
  KeyChoice choice;
  int64_t scores;              // offset in the workspace
  int64_t first_block, parts;  // of the blocks under way, and how many units each is
};

std::array<const mha_kv_cache *, 2> caches_of(const mha_attention_args &args) {
  return {args.cache, args.cache_read};
}

// What of mha_attention has no meaning here.
mha_status check_left_out(Report report, const mha_attention_args &args) {
  const struct {
    const char *name;
    const void *given;
  } arrays[] = {{"v.data", args.v.data},
                {"output.data", args.output.data},
                {"score", args.score},
                {"score_arrays", args.score_arrays},
                {"outputs", args.outputs}};
  for (const auto &array : arrays) {
    if (array.given)
      return report.invalid(
          "attention.%s is given, but mha_choose_keys does not use it; set it to NULL", array.name);
  }
  if (args.kv_first_position != 0)
    return report.invalid(
        "attention.kv_first_position is %lld, but all keys to choose from are the call's; set it "
        "to 0",
        lld(args.kv_first_position));
  if (args.num_kv_heads < 0 || args.num_kv_heads > 1)
    return report.shape(
        "attention.num_kv_heads is %lld, but index heads share one key head; set it to 1",
        lld(args.num_kv_heads));
  for (const mha_kv_cache *cache : caches_of(args)) {
    MHA_TRY(check_optional_cache(report, cache));
    if (cache && cache->kind == MHA_CACHE_KIND_RING)
      return report.invalid(
          "attention.cache is a ring, which forgets keys that could be chosen; use a contiguous or "
          "paged cache");
  }
  return MHA_OK;
}

mha_status make_call(Report report, const mha_choose_keys_args *given, ChoiceCall *made) {
  mha_choose_keys_args &args = made->args;
  AttentionCall &call = made->call;
  AttentionStage &stage = call.stage;
  MHA_TRY(read_struct(report, "mha_choose_keys_args", given, &args));
  MHA_TRY(read_struct(report, "mha_attention_args", args.attention, &call.args));
  MHA_TRY(check_left_out(report, call.args));
  call.args.num_kv_heads = 1;
  call.args.head_dim_v = 0;
  for (const mha_kv_cache *cache : caches_of(call.args)) {
    if (cache) call.args.head_dim_v = cache->head_dim_v;
  }
  MHA_TRY(check_attention(report, {false, queries_per_thread}, &call));
  Attention &attention = stage.attention;
  const AttentionRequest &request = attention.request;
  const int64_t heads = request.num_heads, batch = call.args.batch, n_q = request.n_q,
                n_kv = max_keys(stage.sequences);
  if (call.args.cache && call.args.n_kv > 0 && call.args.cache->values == MHA_CACHE_VALUES_OWN)
    return report.invalid(
        "attention.cache stores values, but only keys are appended; use a cache with "
        "MHA_CACHE_VALUES_IN_KEYS, or give cache_read");
  if (request.prepare_v.norm.is_given)
    return report.invalid(
        "attention.norm has MHA_NORM_VALUES, but mha_choose_keys uses no values; leave the flag "
        "out");
  if (args.num_chosen < 1)
    return report.invalid("num_chosen is %lld; set it to at least 1", lld(args.num_chosen));
  if (n_kv > INT32_MAX)
    return report.too_large(
        "there may be %lld keys, but an entry of chosen_keys can name only the first 2^31 - 1",
        lld(n_kv));
  MHA_TRY(check_input_fields(report, "weights", args.weights));
  if (storage_of_type(args.weights.type) != Storage::f32)
    return report.invalid("weights.type is %u; it must be 0 or MHA_TYPE_F32 (1)",
                          args.weights.type);
  Array weights = array_of("weights", args.weights.strides, batch, n_q, no_extent, heads);
  MHA_TRY(resolve_input(report, &weights));
  const Count rows = Count(batch) * Count(n_q);
  if ((rows * Count(args.num_chosen) * Count(sizeof(int32_t))).overflows())
    return report.too_large("chosen_keys would exceed the address space; use smaller dimensions");
  if (args.index_scores && (rows * Count(n_kv) * Count(sizeof(float))).overflows())
    return report.too_large("index_scores would exceed the address space; use smaller dimensions");

  WorkspaceLayout layout;
  attention.plan = plan_attention(request, stage.sequences, threads_of(stage.scheduler), &layout);
  const Count queries = Count(request.batch) * Count(n_q);
  const int64_t at_once = threads_of(stage.scheduler) * queries_per_thread;
  const Count most_rows = queries.overflows() ? at_once : std::min(queries.value(), at_once);
  made->choice = {};
  KeyChoice &choice = made->choice;
  choice.attention = &attention;
  choice.weights = static_cast<const float *>(args.weights.data);
  choice.weights_batch_stride = weights.strides[0];
  choice.weights_row_stride = weights.strides[1];
  choice.num_chosen = args.num_chosen;
  choice.chosen = args.chosen_keys;
  choice.index_scores = args.index_scores;
  choice.score_stride = blocks_of(n_kv, key_block) * key_block;
  made->scores = layout.take_floats(most_rows * Count(choice.score_stride));
  return check_size(report, layout, stage.sequences.has_no_work(), &call.workspace_bytes);
}

mha_status check_pointers(Report report, const ChoiceCall &made) {
  const mha_attention_args &args = made.call.args;
  const struct {
    const char *name, *what;
    const void *given;
  } arrays[] = {{"attention.q.data", "the queries", args.q.data},
                {"attention.k.data", "the keys", args.n_kv > 0 ? args.k.data : args.q.data},
                {"weights.data", "the weights of the index heads", made.args.weights.data},
                {"chosen_keys", "an array for the choice", made.args.chosen_keys}};
  for (const auto &array : arrays) {
    if (!array.given) return report.null("%s is NULL; pass %s", array.name, array.what);
  }
  return MHA_OK;
}

void run_scores(const void *context, int64_t unit, int64_t thread) {
  const ChoiceCall &made = *static_cast<const ChoiceCall *>(context);
  const AttentionStage &stage = made.call.stage;
  const int64_t block = made.first_block + unit / made.parts,
                blocks = stage.attention.run.query_blocks;
  float *const scratch = stage.scratch + thread * stage.attention.plan.scratch.floats;
  stage.kernels->score_keys(made.choice, block / blocks, block % blocks, unit % made.parts,
                            scratch);
}

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
    made->parts = threads == 1 ? 1 : std::min(chunks, blocks_of(threads * units_per_thread, here));
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
  Report report(error);
  ChoiceCall made;
  MHA_TRY(make_call(report, args, &made));
  return write_size(report.about(2), static_cast<size_t>(made.call.workspace_bytes), bytes);
}

mha_status mha_choose_keys(const mha_choose_keys_args *args, void *workspace,
                           size_t workspace_bytes, mha_error *error) {
  Report report(error);
  ChoiceCall made;
  MHA_TRY(make_call(report, args, &made));
  AttentionCall &call = made.call;
  MHA_TRY(check_workspace(report, 2, "mha_choose_keys_workspace", workspace, workspace_bytes,
                          call.workspace_bytes));
  if (call.stage.sequences.has_no_work()) return MHA_OK;
  MHA_TRY(check_pointers(report, made));
  MHA_TRY(check_array_contents(report, call.stage.sequences, &call.stage.attention.request));
  run(&made, align_workspace(workspace));
  return MHA_OK;
}
