// mha_attention: the attention alone, on the caller's arrays.

#include "attention.h"

#include "../check/arrays.h"
#include "../check/cache.h"
#include "../check/request.h"
#include "../check/structs.h"
#include "../cpu.h"
#include "../storage.h"

namespace mha {
namespace {

mha_status check_dimensions(Report report, mha_attention_args *args) {
  const struct {
    const char *name;
    int64_t value;
    bool may_be_zero;
  } dims[] = {{"num_heads", args->num_heads, false},
              {"num_kv_heads", args->num_kv_heads, true},
              {"head_dim", args->head_dim, false},
              {"head_dim_v", args->head_dim_v, true}};
  for (const auto &dim : dims) {
    if (dim.value < 0 || (dim.value == 0 && !dim.may_be_zero))
      return report.invalid("%s is %lld; set it to at least 1", dim.name, lld(dim.value));
    if (dim.value > INT32_MAX)
      return report.too_large("%s is %lld; the largest dimension is %d", dim.name, lld(dim.value),
                              INT32_MAX);
  }
  if (args->num_kv_heads == 0) args->num_kv_heads = args->num_heads;
  if (args->head_dim_v == 0) args->head_dim_v = args->head_dim;
  if (args->num_heads % args->num_kv_heads != 0)
    return report.shape(
        "num_kv_heads %lld does not divide num_heads %lld; set it to num_heads, or to a divisor "
        "for grouped queries",
        lld(args->num_kv_heads), lld(args->num_heads));
  if (args->num_heads * args->head_dim > INT32_MAX ||
      args->num_heads * args->head_dim_v > INT32_MAX) {
    return report.too_large("num_heads %lld * head_dim (or * head_dim_v) is larger than %d",
                            lld(args->num_heads), INT32_MAX);
  }
  return MHA_OK;
}

// Checks the arrays and resolves their types and strides.
mha_status check_arrays(Report report, mha_attention_args *args) {
  if (args->k.type == 0) args->k.type = args->q.type;
  if (args->v.type == 0) args->v.type = args->k.type;
  struct {
    const char *name;
    mha_input *input;
    int64_t rows, heads, width;
  } inputs[] = {{"q", &args->q, args->n_q, args->num_heads, args->head_dim},
                {"k", &args->k, args->n_kv, args->num_kv_heads, args->head_dim},
                {"v", &args->v, args->n_kv, args->num_kv_heads, args->head_dim_v}};
  const auto take = [](const Array &array, mha_strides *strides) {
    *strides = {array.strides[0], array.strides[1], array.strides[2]};
  };
  for (const auto &of : inputs) {
    MHA_TRY(check_input_fields(report, of.name, *of.input));
    Array array = array_of(of.name, of.input->strides, args->batch, of.rows, of.heads, of.width);
    MHA_TRY(resolve_input(report, &array));
    take(array, &of.input->strides);
  }
  MHA_TRY(check_output_fields(report, "output", args->output));
  Array output = array_of("output", args->output.strides, args->batch, args->n_q, args->num_heads,
                          args->head_dim_v);
  MHA_TRY(resolve_output(report, &output));
  take(output, &args->output.strides);
  return MHA_OK;
}

mha_status check_options(Report report, const mha_attention_args &args) {
  if (args.reserved != 0) return report.invalid("reserved is not 0; set it to 0");
  if (args.kv_first_position < 0 || args.kv_first_position > int64_t{1} << 62)
    return report.invalid(
        "kv_first_position is %lld; it must be 0 to 2^62, the number of keys before those of the "
        "call",
        lld(args.kv_first_position));
  if (args.scale - args.scale != 0.0f)
    return report.invalid(
        "scale is not finite; set it to a number, or to 0 for 1 / sqrt(head_dim)");
  if (args.scale != 0.0f && (args.flags & MHA_EQUAL_SCORES))
    return report.invalid("scale is %g beside MHA_EQUAL_SCORES, which makes it 0; leave one out",
                          static_cast<double>(args.scale));
  return MHA_OK;
}

// States are not finished, so what would be made of finished rows must not be given beside them.
mha_status check_states(Report report, const AttentionCall &call) {
  const mha_attention_args &args = call.args;
  const mha_outputs &outputs = call.stage.outputs;
  const AttentionRequest &request = call.stage.attention.request;
  if (!outputs.states) return MHA_OK;
  const struct {
    const char *name;
    bool is_given;
  } others[] = {{"output.data", args.output.data != nullptr},
                {"output.type", args.output.type != 0},
                {"outputs.lse", outputs.lse != nullptr},
                {"outputs.context", outputs.context != nullptr},
                {"an output per pair", request.pairs.has_any()},
                {"score.sinks", request.options.sinks != nullptr},
                {"score.head_scales", request.options.head_scales != nullptr}};
  for (const auto &other : others) {
    if (other.is_given)
      return report.invalid(
          "%s is given beside outputs.states; leave it out, and give it to mha_states_finish",
          other.name);
  }
  return MHA_OK;
}

StridedRows rows_of(const mha_input &input) {
  return {input.data, input.strides.batch, input.strides.row, input.strides.head,
          storage_of_type(input.type)};
}

// With a cache, keys and values of the call are rows to be stored there.
bool stores_rows(const AttentionCall &call) {
  return call.stage.sequences.cache && call.args.n_kv > 0;
}

AttentionShape shape_of(const AttentionCall &call, const AttentionUse &use) {
  const mha_attention_args &args = call.args;
  const mha_kv_cache *const cache = call.stage.sequences.cache;
  const StridedRows k = rows_of(args.k), v = rows_of(args.v);
  AttentionShape shape;
  shape.num_heads = args.num_heads;
  shape.num_kv_heads = args.num_kv_heads;
  shape.head_dim = args.head_dim;
  shape.head_dim_v = args.head_dim_v;
  shape.scale =
      args.scale != 0.0f ? args.scale : 1.0f / MHA_SQRTF(static_cast<float>(args.head_dim));
  shape.has_output_weights = false;
  shape.has_values = use.has_values;
  shape.most_queries = use.most_queries;
  shape.k = cache ? cached_keys(cache) : plain_rows(k);
  shape.v = cache ? cached_values(cache) : plain_rows(v);
  shape.q_rows = storage_of_type(args.q.type);
  shape.k_rows = stores_rows(call) ? k.storage : Storage::f32;
  shape.v_rows = stores_rows(call) ? v.storage : Storage::f32;
  return shape;
}

// With cache_read, no keys come with the call.
mha_status check_cache_read(Report report, mha_attention_args *args) {
  MHA_TRY(check_one_cache(report, args->cache, args->cache_read));
  if (!args->cache_read)
    return resolve_extent(report, "n_kv", "the rows of k and v per sequence", &args->n_kv);
  args->n_kv = 0;
  const char *const given = args->k.data ? "k" : args->v.data ? "v" : nullptr;
  return given ? report.invalid(
                     "%s.data is given, but no keys come with cache_read; set it to NULL, or give "
                     "cache to append",
                     given)
               : MHA_OK;
}

}  // namespace

mha_status check_attention(Report report, const AttentionUse &use, AttentionCall *call) {
  mha_attention_args &args = call->args;
  AttentionStage &stage = call->stage;
  SequenceArguments &s = stage.sequences;
  MHA_TRY(resolve_extent(report, "batch", "the number of sequences", &args.batch));
  MHA_TRY(resolve_extent(report, "n_q", "the rows of q per sequence", &args.n_q));
  MHA_TRY(check_cache_read(report, &args));
  MHA_TRY(check_dimensions(report, &args));
  const CallArguments common(args);
  MHA_TRY(read_call(report, common, false, &s, &stage.outputs));
  if (stage.outputs.states && !is_contiguous(args.output.strides))
    return report.invalid(
        "output.strides are set beside outputs.states, which are written in place of output; set "
        "them to 0");
  MHA_TRY(check_arrays(report, &args));
  MHA_TRY(check_options(report, args));
  MHA_TRY(check_scheduler(report, args.scheduler));
  stage.scheduler = args.scheduler;
  s.kv_first_position = args.kv_first_position;
  MHA_TRY(check_request(report, common, shape_of(*call, use), stage.outputs, &s,
                        &stage.attention.request));
  MHA_TRY(check_states(report, *call));
  const char *const of_forward = stage.outputs.q   ? "q"
                                 : stage.outputs.k ? "k"
                                 : stage.outputs.v ? "v"
                                                   : nullptr;
  if (of_forward)
    return report.invalid("outputs.%s is given, but only mha_forward computes it; set it to NULL",
                          of_forward);
  return choose_kernels(report, args.instruction_set, &stage.kernels);
}

namespace {

// Whether plain keys may be packed before queries choose blocks of them. A single query would read
// each key once, so packing would not pay. The workspace has the memory whatever n_kv is, so that
// fewer keys never need more.
bool may_pack_keys(const AttentionCall &call) {
  const ChosenKeys &chosen = call.stage.attention.request.options.chosen;
  return chosen.lists.base && chosen.block % key_block == 0 && !call.stage.sequences.cache &&
         call.args.n_q > 1;
}

// They are if each key is chosen twice or more often on average.
bool packs_keys(const AttentionCall &call) {
  const ChosenKeys &chosen = call.stage.attention.request.options.chosen;
  const Count choices = Count(call.args.n_q) * Count(chosen.count) * Count(chosen.block);
  return may_pack_keys(call) && (choices.overflows() || choices.value() / 2 >= call.args.n_kv);
}

Count key_positions(const AttentionCall &call) {
  const SequenceArguments &s = call.stage.sequences;
  const int64_t n_kv = call.args.n_kv;
  return Count(s.is_packed() ? packed_key_blocks(n_kv, s.batch) : blocks_of(n_kv, key_block)) *
         Count(key_block);
}

}  // namespace

mha_status make_call(Report report, const mha_attention_args *given, AttentionCall *call) {
  const mha_attention_args &args = call->args;
  MHA_TRY(read_struct(report, "mha_attention_args", given, &call->args));
  MHA_TRY(check_attention(report, {true, 0}, call));
  WorkspaceLayout layout;
  AttentionStage &stage = call->stage;
  Attention &attention = stage.attention;
  attention.plan =
      plan_attention(attention.request, stage.sequences, threads_of(args.scheduler), &layout);
  const Count positions = may_pack_keys(*call) ? key_positions(*call) : Count(0);
  const Count rows = Count(args.batch) * Count(args.num_kv_heads) * positions;
  call->packed_k = layout.take_floats(rows * Count(args.head_dim));
  call->packed_v = layout.take_floats(rows * Count(attention.plan.head_dim_v_padded));
  return check_size(report, layout, stage.sequences.has_no_work(), &call->workspace_bytes);
}

namespace {

mha_status check_pointers(Report report, const AttentionCall &call) {
  const mha_attention_args &args = call.args;
  const PairOutputs &pairs = call.stage.attention.request.pairs;
  if (!args.q.data) return report.null("q.data is NULL; pass the queries");
  if (!args.output.data && !call.stage.outputs.states)
    return report.null("output.data is NULL; pass an array for the result");
  if (args.output.data == args.q.data && pairs.has_any())
    return report.invalid(
        "output.data is q.data, but outputs per pair are computed from q after output is written; "
        "give output another array");
  if (args.n_kv > 0 && !args.k.data) return report.null("k.data is NULL; pass the keys");
  return check_values(report, args.cache, args.n_kv, args.v.data, "v.data");
}

}  // namespace

void place(const AttentionCall &call, unsigned char *workspace, AttentionArrays *arrays) {
  const mha_attention_args &args = call.args;
  const AttentionStage &stage = call.stage;
  arrays->q = rows_of(args.q);
  arrays->k = stage.attention.request.k;
  arrays->v = stage.attention.request.v;
  const bool packs = packs_keys(call), has_rows = packs || stores_rows(call);
  arrays->new_keys = has_rows ? rows_of(args.k) : StridedRows{};
  arrays->new_values = has_rows ? rows_of(args.v) : StridedRows{};
  if (packs) {
    const int64_t positions = key_positions(call).value();
    const auto packed = [&](int64_t offset, int64_t width) {
      const float *const base = reinterpret_cast<float *>(workspace + offset);
      return packed_floats(base, width, positions * width, positions, args.num_kv_heads,
                           stage.sequences.is_packed());
    };
    arrays->k = packed(call.packed_k, args.head_dim);
    arrays->v = packed(call.packed_v, stage.attention.plan.head_dim_v_padded);
  }
  arrays->gate = {};
  const mha_strides &strides = args.output.strides;
  arrays->output = {args.output.data, storage_of_type(args.output.type), strides.batch, strides.row,
                    strides.head};
}

namespace {

// Nothing here can fail.
void run(AttentionCall &call, unsigned char *workspace) {
  const mha_attention_args &args = call.args;
  AttentionStage &stage = call.stage;
  place(call, workspace, &stage.attention.arrays);
  begin_passes(&stage, workspace);
  const OutputRows &output = stage.attention.arrays.output;
  for (int64_t h = 0; stage.has_padding() && output.base && h < args.num_heads; ++h) {
    char *const head =
        static_cast<char *>(output.base) + h * output.head_stride * bytes_of(output.storage);
    clear_padding(stage.queries, args.batch, args.n_q, args.head_dim_v, head, output.batch_stride,
                  output.row_stride, output.storage);
  }
  while (next_pass(&stage)) attend_pass(stage);
}

}  // namespace
}  // namespace mha

using namespace mha;

mha_status mha_attention_workspace(const mha_attention_args *args, size_t *bytes,
                                   mha_error *error) {
  Report report(error);
  AttentionCall call;
  MHA_TRY(make_call(report, args, &call));
  return write_size(report.about(2), static_cast<size_t>(call.workspace_bytes), bytes);
}

mha_status mha_attention(const mha_attention_args *args, void *workspace, size_t workspace_bytes,
                         mha_error *error) {
  Report report(error);
  AttentionCall call;
  MHA_TRY(make_call(report, args, &call));
  MHA_TRY(check_workspace(report, 2, "mha_attention_workspace", workspace, workspace_bytes,
                          call.workspace_bytes));
  if (call.stage.sequences.has_no_work()) return MHA_OK;
  MHA_TRY(check_pointers(report, call));
  MHA_TRY(check_array_contents(report, call.stage.sequences, &call.stage.attention.request));
  run(call, align_workspace(workspace));
  return MHA_OK;
}
