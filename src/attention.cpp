// mha_attention: the middle stage alone, on the caller's arrays. make_call checks their shape and describes them as a MiddleStage, which
// does the rest.

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
      return report.fail(MHA_ERROR_TOO_LARGE, "%s is %lld; the largest dimension is %d", dim.name, lld(dim.value), INT32_MAX);
  }
  if (args->num_kv_heads == 0) args->num_kv_heads = args->num_heads;
  if (args->head_dim_v == 0) args->head_dim_v = args->head_dim;
  if (args->num_heads % args->num_kv_heads != 0) {
    return report.fail(MHA_ERROR_SHAPE,
                       "num_kv_heads %lld does not divide num_heads %lld; set it to num_heads, or to a divisor for grouped queries",
                       lld(args->num_kv_heads), lld(args->num_heads));
  }
  if (args->num_heads * args->head_dim > INT32_MAX || args->num_heads * args->head_dim_v > INT32_MAX) {
    return report.fail(MHA_ERROR_TOO_LARGE, "num_heads %lld * head_dim (or * head_dim_v) is larger than %d", lld(args->num_heads),
                       INT32_MAX);
  }
  return MHA_OK;
}

// An array of the caller's, [batch, rows, heads, width] where its strides are 0.
struct CallerArray {
  const char *name;
  int64_t rows, heads, width;
  int64_t *batch_stride, *row_stride, *head_stride;
};

// A head stride says that the layout is not [batch, rows, heads, width], whose strides the zeros stand for.
mha_status check_strides_are_complete(Report report, const CallerArray &array, int64_t batch) {
  const bool lacks_row = *array.row_stride == 0, lacks_batch = *array.batch_stride == 0 && batch > 1;
  if (array.rows == 0 || *array.head_stride == 0 || (!lacks_row && !lacks_batch)) return MHA_OK;
  return report.invalid("%s_head_stride is %lld, but %s_%s_stride is 0; set all strides of %s, or none", array.name,
                        lld(*array.head_stride), array.name, lacks_row ? "row" : "batch", array.name);
}

// Checks the arrays and resolves their strides.
mha_status check_strides(Report report, mha_attention_args *args) {
  const int64_t batch = array_batch(*args), heads = args->num_heads, kv_heads = args->num_kv_heads;
  const CallerArray arrays[] = {
      {"q", args->n_q, heads, args->head_dim, &args->q_batch_stride, &args->q_row_stride, &args->q_head_stride},
      {"k", args->n_kv, kv_heads, args->head_dim, &args->k_batch_stride, &args->k_row_stride, &args->k_head_stride},
      {"v", args->n_kv, kv_heads, args->head_dim_v, &args->v_batch_stride, &args->v_row_stride, &args->v_head_stride},
      {"output", args->n_q, heads, args->head_dim_v, &args->output_batch_stride, &args->output_row_stride, &args->output_head_stride}};
  for (const CallerArray &array : arrays) {
    if (const mha_status status = check_strides_are_complete(report, array, batch)) return status;
  }
  for (const CallerArray &array : arrays) {
    int64_t &batch_stride = *array.batch_stride, &row_stride = *array.row_stride, &head_stride = *array.head_stride;
    if (head_stride == 0) head_stride = array.width;
    if (row_stride == 0) row_stride = array.heads * array.width;
    batch_stride = contiguous_stride(batch_stride, array.rows, row_stride, array.heads * array.width);
    const Array whole = {array.name, array.width, {batch, array.rows, array.heads}, {batch_stride, row_stride, head_stride}};
    const bool is_output = &array == &arrays[3];
    if (const mha_status status = is_output ? check_output(report, whole) : check_broadcast_input(report, whole)) return status;
    batch_stride = resolved_stride(batch_stride);
    row_stride = resolved_stride(row_stride);
    head_stride = resolved_stride(head_stride);
  }
  return MHA_OK;
}

mha_status check_options(Report report, const mha_attention_args &args) {
  const struct {
    const char *name;
    uint32_t type;
  } types[] = {{"q_type", args.q_type}, {"k_type", args.k_type}, {"v_type", args.v_type}, {"output_type", args.output_type}};
  for (const auto &type : types) {
    if (const mha_status status = check_row_type(report, type.name, type.type)) return status;
  }
  if (args.reserved != 0) return report.invalid("mha_attention_args.reserved is not 0; set it to 0");
  if (args.kv_position < 0 || args.kv_position > int64_t{1} << 62)
    return report.invalid("kv_position is %lld; set it to 0 .. 2^62, the keys that are before those of the call", lld(args.kv_position));
  if (args.scale - args.scale != 0.0f) return report.invalid("scale is not finite; set a number, or 0 for 1 / sqrt(head_dim)");
  return MHA_OK;
}

// States are not finished: what would be made of finished rows must not be given beside them.
mha_status check_states(Report report, const AttentionCall &call) {
  const mha_attention_args &args = call.args;
  const ScoreOptions &options = call.stage.attention.options;
  if (!args.states) return MHA_OK;
  const struct {
    const char *name;
    bool is_given;
  } others[] = {{"output", args.output != nullptr},
                {"output_type", args.output_type != 0},
                {"lse", args.lse != nullptr},
                {"attention_weights", args.attention_weights != nullptr},
                {"taps", args.taps != nullptr},
                {"score.sinks", options.sinks != nullptr},
                {"score.head_scales", options.head_scales != nullptr}};
  for (const auto &other : others) {
    if (other.is_given) return report.invalid("%s is given beside states; leave it out, and give it to mha_states_finish", other.name);
  }
  return MHA_OK;
}

StridedRows rows_of_k(const mha_attention_args &args) {
  return {args.k, args.k_batch_stride, args.k_row_stride, args.k_head_stride, static_cast<Storage>(args.k_type)};
}
StridedRows rows_of_v(const mha_attention_args &args) {
  return {args.v, args.v_batch_stride, args.v_row_stride, args.v_head_stride, static_cast<Storage>(args.v_type)};
}

// The arguments as a stage. With a cache, the caller's keys and values are rows to be stored; without rows, they are not looked at.
void describe(const mha_attention_args &args, MiddleStage *stage) {
  describe_call(args, stage);
  stage->sequences.kv_position = args.kv_position;
  Attention &attention = stage->attention;
  attention.states = args.states;
  attention.num_heads = args.num_heads;
  attention.num_kv_heads = args.num_kv_heads;
  attention.head_dim = args.head_dim;
  attention.head_dim_v = args.head_dim_v;
  attention.scale = args.scale != 0.0f ? args.scale : 1.0f / MHA_SQRTF(static_cast<float>(args.head_dim));
  attention.q = {args.q, args.q_batch_stride, args.q_row_stride, args.q_head_stride, static_cast<Storage>(args.q_type)};
  const StridedRows k = rows_of_k(args), v = rows_of_v(args);
  attention.k = args.cache ? cached_keys(args.cache) : plain_rows(k);
  attention.v = args.cache ? cached_values(args.cache) : plain_rows(v);
  if (args.cache && args.n_kv > 0) {
    stage->k_rows = k;
    stage->v_rows = v;
  }
  attention.output = args.output;
  attention.output_storage = static_cast<Storage>(args.output_type);
  attention.output_batch_stride = args.output_batch_stride;
  attention.output_row_stride = args.output_row_stride;
  attention.output_head_stride = args.output_head_stride;
}

}  // namespace

mha_status check_attention(Report report, AttentionCall *call) {
  mha_attention_args &args = call->args;
  MiddleStage &stage = call->stage;
  if (const mha_status status = check_optional_cache(report, args.cache)) return status;
  if (args.flags & MHA_CACHE_READ) {
    args.n_kv = 0;
    if (const mha_status status = check_cache_read(report, args, args.k ? "k" : args.v ? "v" : nullptr)) return status;
  }
  if (const mha_status status = resolve_extent(report, "batch", "the number of sequences", &args.batch)) return status;
  if (const mha_status status = resolve_extent(report, "n_q", "the rows of q per sequence", &args.n_q)) return status;
  if (!(args.flags & MHA_CACHE_READ)) {
    if (const mha_status status = resolve_extent(report, "n_kv", "the rows of k and v per sequence", &args.n_kv)) return status;
  }
  if (const mha_status status = check_dimensions(report, &args)) return status;
  if (args.states && (args.output_batch_stride != 0 || args.output_row_stride != 0 || args.output_head_stride != 0))
    return report.invalid("strides of output are given beside states, which are written in its place; leave them 0");
  if (const mha_status status = check_strides(report, &args)) return status;
  if (const mha_status status = check_options(report, args)) return status;
  if (const mha_status status = check_scheduler(report, args.scheduler)) return status;
  describe(args, &stage);
  if (const mha_status status = check_middle(report, &stage)) return status;
  if (const mha_status status = check_states(report, *call)) return status;
  if (stage.taps.q || stage.taps.k || stage.taps.v)
    return report.invalid("the taps q, k and v are mha_forward's; leave them NULL, the caller has them already");
  return choose_kernels(report, args.instruction_set, &stage.kernels);
}

namespace {

// A call of mha_attention. Plain keys and values of which many queries choose blocks may be packed before: then these lie there.
struct PlannedCall : AttentionCall {
  int64_t packed_k, packed_v;

  // Not for one query; and there is memory for it whatever n_kv is, so that fewer keys never need more.
  bool may_pack_keys() const {
    const ChosenKeys &chosen = stage.attention.options.chosen;
    return chosen.lists.base && chosen.block % key_block == 0 && !args.cache && args.n_q > 1;
  }
  // Each key is chosen twice or more often, if no query chooses one in vain.
  bool packs_keys() const {
    const ChosenKeys &chosen = stage.attention.options.chosen;
    const Count choices = Count(args.n_q) * Count(chosen.count) * Count(chosen.block);
    return may_pack_keys() && (choices.overflows() || choices.value() / 2 >= args.n_kv);
  }
  int64_t key_positions() const {
    return (args.cu_seqlens_q ? packed_key_blocks(args.n_kv, args.batch) : blocks_of(args.n_kv, key_block)) * key_block;
  }
};

mha_status make_call(Report report, const mha_attention_args *given, PlannedCall *call) {
  const mha_attention_args &args = call->args;
  if (const mha_status status = read_struct(report, "mha_attention_args", given, &call->args)) return status;
  if (const mha_status status = check_attention(report, call)) return status;
  WorkspaceLayout layout;
  plan_middle(&call->stage, &layout);
  const Count positions = Count(array_batch(args)) * Count(args.num_kv_heads) * Count(call->may_pack_keys() ? call->key_positions() : 0);
  call->packed_k = layout.take_floats(positions * Count(args.head_dim));
  call->packed_v = layout.take_floats(positions * Count(call->stage.attention.head_dim_v_padded));
  return check_size(report, layout, call->stage.sequences.has_no_work(), &call->workspace_bytes);
}

mha_status check_pointers(Report report, const PlannedCall &call) {
  const mha_attention_args &args = call.args;
  const PairOutputs &pairs = call.stage.attention.pairs;
  if (!args.q) return report.fail(MHA_ERROR_NULL_POINTER, "q is NULL; pass the queries");
  if (!args.output && !args.states) return report.fail(MHA_ERROR_NULL_POINTER, "output is NULL; pass where to write the result");
  if (args.output == args.q && pairs.has_any()) {
    return report.invalid(
        "output is q, which outputs with a number per pair are computed from afterwards; give output an array of its own");
  }
  if (args.n_kv > 0 && !args.k) return report.fail(MHA_ERROR_NULL_POINTER, "k is NULL; pass the keys");
  return check_values(report, args.cache, args.n_kv, args.v);
}

// From here on keys and values are rows to be stored.
void pack_keys(unsigned char *workspace, PlannedCall *call) {
  const mha_attention_args &args = call->args;
  const int64_t positions = call->key_positions();
  const auto packed = [&](int64_t offset, int64_t width) {
    const float *const base = reinterpret_cast<float *>(workspace + offset);
    return packed_floats(base, width, positions * width, positions, args.num_kv_heads, args.cu_seqlens_q != nullptr);
  };
  Attention &attention = call->stage.attention;
  attention.k = packed(call->packed_k, args.head_dim);
  attention.v = packed(call->packed_v, attention.head_dim_v_padded);
  call->stage.k_rows = rows_of_k(args);
  call->stage.v_rows = rows_of_v(args);
}

// Nothing here can fail.
void run(PlannedCall &call, unsigned char *workspace) {
  const mha_attention_args &args = call.args;
  MiddleStage &stage = call.stage;
  if (call.packs_keys()) pack_keys(workspace, &call);
  begin_passes(&stage, workspace);
  const Storage storage = stage.attention.output_storage;
  for (int64_t h = 0; stage.queries && args.output && h < args.num_heads; ++h) {
    clear_padding(valid_queries(stage), array_batch(args), args.n_q, args.head_dim_v,
                  static_cast<char *>(args.output) + h * args.output_head_stride * bytes_of(storage), args.output_batch_stride,
                  args.output_row_stride, storage);
  }
  while (next_pass(&stage)) attend_pass(&stage);
}

}  // namespace
}  // namespace mha

using namespace mha;

mha_status mha_attention_workspace(const mha_attention_args *args, size_t *bytes, mha_error *error) {
  Report report(error);
  PlannedCall call;
  if (const mha_status status = make_call(report, args, &call)) return status;
  return write_size(report.about(2), static_cast<size_t>(call.workspace_bytes), bytes);
}

mha_status mha_attention(const mha_attention_args *args, void *workspace, size_t workspace_bytes, mha_error *error) {
  Report report(error);
  PlannedCall call;
  if (const mha_status status = make_call(report, args, &call)) return status;
  if (const mha_status status = check_workspace(report, 2, "mha_attention_workspace", workspace, workspace_bytes, call.workspace_bytes))
    return status;
  if (call.stage.sequences.has_no_work()) return MHA_OK;
  if (const mha_status status = check_pointers(report, call)) return status;
  if (const mha_status status = check_array_contents(report, &call.stage)) return status;
  run(call, align_workspace(workspace));
  return MHA_OK;
}

mha_status mha_attention_info(const mha_attention_args *args, mha_call_info *info, mha_error *error) {
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
    const int64_t output_width = read.states ? 0 : read.head_dim_v * bytes_of(static_cast<Storage>(read.output_type));
    const uint64_t row_bytes = product(heads.queries, read.head_dim * bytes_of(static_cast<Storage>(read.q_type))) +
                               product(read.num_heads, output_width);
    filled.bytes = row_bytes * valid_queries(call.stage.sequences);
    add_cost_of_middle(call.stage, &filled);
  }
  return write_struct(report.about(2), "mha_call_info", filled, info);
}
