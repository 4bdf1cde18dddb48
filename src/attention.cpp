// mha_attention: the middle stage alone, on the caller's arrays. make_call checks their shape and
// describes them as a MiddleStage, which does the rest.

#include "attention.h"

#include "arguments.h"
#include "cpu.h"
#include "storage.h"
#include "structs.h"

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
      return report.fail(MHA_ERROR_TOO_LARGE, "%s is %lld; the largest dimension is %d", dim.name,
                         lld(dim.value), INT32_MAX);
  }
  if (args->num_kv_heads == 0) args->num_kv_heads = args->num_heads;
  if (args->head_dim_v == 0) args->head_dim_v = args->head_dim;
  if (args->num_heads % args->num_kv_heads != 0) {
    return report.fail(MHA_ERROR_SHAPE,
                       "num_kv_heads %lld does not divide num_heads %lld; set it to num_heads, or "
                       "to a divisor for grouped queries",
                       lld(args->num_kv_heads), lld(args->num_heads));
  }
  if (args->num_heads * args->head_dim > INT32_MAX ||
      args->num_heads * args->head_dim_v > INT32_MAX) {
    return report.fail(MHA_ERROR_TOO_LARGE,
                       "num_heads %lld * head_dim (or * head_dim_v) is larger than %d",
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
    if (const mha_status status = check_input_fields(report, of.name, *of.input)) return status;
    Array array = array_of(of.name, of.input->strides, args->batch, of.rows, of.heads, of.width);
    if (const mha_status status = resolve_input(report, &array)) return status;
    take(array, &of.input->strides);
  }
  if (const mha_status status = check_output_fields(report, "output", args->output)) return status;
  Array output = array_of("output", args->output.strides, args->batch, args->n_q, args->num_heads,
                          args->head_dim_v);
  if (const mha_status status = resolve_output(report, &output)) return status;
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

// States are not finished: what would be made of finished rows must not be given beside them.
mha_status check_states(Report report, const AttentionCall &call) {
  const mha_attention_args &args = call.args;
  const ScoreOptions &options = call.stage.attention.options;
  if (!call.stage.outputs.states) return MHA_OK;
  const mha_outputs &outputs = call.stage.outputs;
  const bool has_pairs = call.stage.attention.pairs.has_any();
  const struct {
    const char *name;
    bool is_given;
  } others[] = {{"output.data", args.output.data != nullptr},
                {"output.type", args.output.type != 0},
                {"outputs.lse", outputs.lse != nullptr},
                {"outputs.context", outputs.context != nullptr},
                {"an output per pair", has_pairs},
                {"score.sinks", options.sinks != nullptr},
                {"score.head_scales", options.head_scales != nullptr}};
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

// The arguments as a stage. With a cache, the caller's keys and values are rows to be stored;
// without rows, they are not looked at.
void describe(const mha_attention_args &args, MiddleStage *stage) {
  const mha_kv_cache *const cache = stage->sequences.cache;
  stage->sequences.kv_first_position = args.kv_first_position;
  Attention &attention = stage->attention;
  attention.num_heads = args.num_heads;
  attention.num_kv_heads = args.num_kv_heads;
  attention.head_dim = args.head_dim;
  attention.head_dim_v = args.head_dim_v;
  attention.scale =
      args.scale != 0.0f ? args.scale : 1.0f / MHA_SQRTF(static_cast<float>(args.head_dim));
  attention.q = rows_of(args.q);
  const StridedRows k = rows_of(args.k), v = rows_of(args.v);
  attention.k = cache ? cached_keys(cache) : plain_rows(k);
  attention.v = cache ? cached_values(cache) : plain_rows(v);
  if (cache && args.n_kv > 0) {
    stage->k_rows = k;
    stage->v_rows = v;
  }
  attention.output = args.output.data;
  attention.output_storage = storage_of_type(args.output.type);
  attention.output_batch_stride = args.output.strides.batch;
  attention.output_row_stride = args.output.strides.row;
  attention.output_head_stride = args.output.strides.head;
}

// With cache_read, no keys come with the call.
mha_status check_cache_read(Report report, mha_attention_args *args) {
  if (const mha_status status = check_one_cache(report, args->cache, args->cache_read))
    return status;
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

mha_status check_attention(Report report, AttentionCall *call) {
  mha_attention_args &args = call->args;
  MiddleStage &stage = call->stage;
  if (const mha_status status =
          resolve_extent(report, "batch", "the number of sequences", &args.batch))
    return status;
  if (const mha_status status =
          resolve_extent(report, "n_q", "the rows of q per sequence", &args.n_q))
    return status;
  if (const mha_status status = check_cache_read(report, &args)) return status;
  if (const mha_status status = check_dimensions(report, &args)) return status;
  if (const mha_status status = describe_call(report, CallArguments(args), false, &stage))
    return status;
  if (stage.outputs.states && !is_contiguous(args.output.strides))
    return report.invalid(
        "output.strides are set beside outputs.states, which are written in place of output; set "
        "them to 0");
  if (const mha_status status = check_arrays(report, &args)) return status;
  if (const mha_status status = check_options(report, args)) return status;
  if (const mha_status status = check_scheduler(report, args.scheduler)) return status;
  describe(args, &stage);
  if (const mha_status status = check_middle(report, &stage)) return status;
  if (const mha_status status = check_states(report, *call)) return status;
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

// A call of mha_attention. Plain keys and values of which many queries choose blocks may be packed
// before: then these lie there.
struct PlannedCall : AttentionCall {
  int64_t packed_k, packed_v;

  // Not for one query; and there is memory for it whatever n_kv is, so that fewer keys never need
  // more.
  bool may_pack_keys() const {
    const ChosenKeys &chosen = stage.attention.options.chosen;
    return chosen.lists.base && chosen.block % key_block == 0 && !stage.sequences.cache &&
           args.n_q > 1;
  }
  // Each key is chosen twice or more often, if no query chooses one in vain.
  bool packs_keys() const {
    const ChosenKeys &chosen = stage.attention.options.chosen;
    const Count choices = Count(args.n_q) * Count(chosen.count) * Count(chosen.block);
    return may_pack_keys() && (choices.overflows() || choices.value() / 2 >= args.n_kv);
  }
  Count key_positions() const {
    const bool is_packed = stage.sequences.is_packed();
    return Count(is_packed ? packed_key_blocks(args.n_kv, stage.sequences.batch)
                           : blocks_of(args.n_kv, key_block)) *
           Count(key_block);
  }
};

mha_status make_call(Report report, const mha_attention_args *given, PlannedCall *call) {
  const mha_attention_args &args = call->args;
  if (const mha_status status = read_struct(report, "mha_attention_args", given, &call->args))
    return status;
  if (const mha_status status = check_attention(report, call)) return status;
  WorkspaceLayout layout;
  plan_middle(&call->stage, &layout);
  const Count positions = Count(args.batch) * Count(args.num_kv_heads) *
                          (call->may_pack_keys() ? call->key_positions() : Count(0));
  call->packed_k = layout.take_floats(positions * Count(args.head_dim));
  call->packed_v = layout.take_floats(positions * Count(call->stage.attention.head_dim_v_padded));
  return check_size(report, layout, call->stage.sequences.has_no_work(), &call->workspace_bytes);
}

mha_status check_pointers(Report report, const PlannedCall &call) {
  const mha_attention_args &args = call.args;
  const PairOutputs &pairs = call.stage.attention.pairs;
  if (!args.q.data) return report.fail(MHA_ERROR_NULL_POINTER, "q.data is NULL; pass the queries");
  if (!args.output.data && !call.stage.outputs.states)
    return report.fail(MHA_ERROR_NULL_POINTER, "output.data is NULL; pass an array for the result");
  if (args.output.data == args.q.data && pairs.has_any()) {
    return report.invalid(
        "output.data is q.data, but outputs per pair are computed from q after output is written; "
        "give output another array");
  }
  if (args.n_kv > 0 && !args.k.data)
    return report.fail(MHA_ERROR_NULL_POINTER, "k.data is NULL; pass the keys");
  return check_values(report, args.cache, args.n_kv, args.v.data, "v.data");
}

// From here on keys and values are rows to be stored.
void pack_keys(unsigned char *workspace, PlannedCall *call) {
  const mha_attention_args &args = call->args;
  const int64_t positions = call->key_positions().value();
  const auto packed = [&](int64_t offset, int64_t width) {
    const float *const base = reinterpret_cast<float *>(workspace + offset);
    return packed_floats(base, width, positions * width, positions, args.num_kv_heads,
                         call->stage.sequences.is_packed());
  };
  Attention &attention = call->stage.attention;
  attention.k = packed(call->packed_k, args.head_dim);
  attention.v = packed(call->packed_v, attention.head_dim_v_padded);
  call->stage.k_rows = rows_of(args.k);
  call->stage.v_rows = rows_of(args.v);
}

// Nothing here can fail.
void run(PlannedCall &call, unsigned char *workspace) {
  const mha_attention_args &args = call.args;
  MiddleStage &stage = call.stage;
  if (call.packs_keys()) pack_keys(workspace, &call);
  begin_passes(&stage, workspace);
  const Storage storage = stage.attention.output_storage;
  for (int64_t h = 0; stage.has_padding() && args.output.data && h < args.num_heads; ++h) {
    const mha_strides &strides = args.output.strides;
    clear_padding(stage.queries, args.batch, args.n_q, args.head_dim_v,
                  static_cast<char *>(args.output.data) + h * strides.head * bytes_of(storage),
                  strides.batch, strides.row, storage);
  }
  while (next_pass(&stage)) attend_pass(&stage);
}

}  // namespace
}  // namespace mha

using namespace mha;

mha_status mha_attention_workspace(const mha_attention_args *args, size_t *bytes,
                                   mha_error *error) {
  Report report(error);
  PlannedCall call;
  if (const mha_status status = make_call(report, args, &call)) return status;
  return write_size(report.about(2), static_cast<size_t>(call.workspace_bytes), bytes);
}

mha_status mha_attention(const mha_attention_args *args, void *workspace, size_t workspace_bytes,
                         mha_error *error) {
  Report report(error);
  PlannedCall call;
  if (const mha_status status = make_call(report, args, &call)) return status;
  if (const mha_status status = check_workspace(report, 2, "mha_attention_workspace", workspace,
                                                workspace_bytes, call.workspace_bytes))
    return status;
  if (call.stage.sequences.has_no_work()) return MHA_OK;
  if (const mha_status status = check_pointers(report, call)) return status;
  if (const mha_status status = check_array_contents(report, &call.stage)) return status;
  run(call, align_workspace(workspace));
  return MHA_OK;
}

mha_status mha_attention_info(const mha_attention_args *args, mha_call_info *info,
                              mha_error *error) {
  Report report(error);
  PlannedCall call;
  if (const mha_status status = make_call(report, args, &call)) return status;
  mha_call_info filled = {};
  filled.back_end = MHA_BACK_END_NATIVE;
  filled.contract = contract_of_thread();
  filled.workspace_bytes = static_cast<size_t>(call.workspace_bytes);
  describe_middle(call.stage, &filled);
  if (!call.stage.sequences.has_no_work()) {
    if (const mha_status status = check_array_contents(report, &call.stage)) return status;
    const mha_attention_args &read = call.args;
    const ReadHeads heads = read_heads(call.stage.attention);
    const int64_t output_width =
        call.stage.outputs.states ? 0
                                  : read.head_dim_v * bytes_of(storage_of_type(read.output.type));
    const uint64_t row_bytes =
        product(heads.queries, read.head_dim * bytes_of(storage_of_type(read.q.type))) +
        product(read.num_heads, output_width);
    filled.bytes = row_bytes * valid_queries(call.stage.sequences);
    add_cost_of_middle(call.stage, &filled);
  }
  return write_struct(report.about(2), "mha_call_info", filled, info);
}
