// mha_attention, and the middle stage that it shares with mha_forward.

#include "attention.h"

#include "cpu.h"

namespace mha {
namespace {

// The most query rows of one unit, counting all query heads of the kv head, unless a single query has more. Their states fit into a level-2
// cache. A caller's plain keys and values are brought into the packed form once per unit and chunk, which more rows make cheaper.
constexpr int64_t packed_unit_rows = 96, plain_unit_rows = 768;

// Fewer rows in a unit leave no thread without work; but not so few that keys and values are mostly waited for.
constexpr int64_t units_per_thread = 3, least_unit_rows = 24;

int64_t at_least_one(int64_t count) { return count > 1 ? count : 1; }

int64_t query_blocks(const Attention &attention) { return blocks_of(attention.n_q, attention.block_queries); }

struct Stage {
  const Kernels *kernels;
  const Attention *attention;
  float *scratch;
  bool is_shared;  // between threads
};

// The last query blocks come first: under a causal mask they have the most keys, and what comes at the end is small enough to share out
// evenly. One thread takes the blocks of one head after each other, whose keys and values stay in its cache; several take the largest of
// all heads.
void run_unit(const void *context, int64_t unit, int64_t thread) {
  const Stage &stage = *static_cast<const Stage *>(context);
  const Attention &attention = *stage.attention;
  const int64_t blocks = query_blocks(attention), heads = attention.batch * attention.num_kv_heads;
  const int64_t row = quotient(unit, stage.is_shared ? heads : blocks), column = unit - row * (stage.is_shared ? heads : blocks);
  const int64_t head = stage.is_shared ? column : row, block = blocks - 1 - (stage.is_shared ? row : column);
  const int64_t sequence = quotient(head, attention.num_kv_heads);
  stage.kernels->attend(attention, sequence, head - sequence * attention.num_kv_heads, block * attention.block_queries,
                        stage.scratch + thread * attention.scratch.floats);
}

}  // namespace

bool plan_attention(Attention *attention, int64_t num_threads) {
  const int64_t group = quotient(attention->num_heads, attention->num_kv_heads), n_q = attention->n_q;
  attention->head_dim_v_padded = padded_width(attention->head_dim_v);

  // The scratch memory is that of the largest units, which does not depend on the number of threads: so a workspace for more of them serves
  // fewer, too.
  const bool is_packed = attention->k.is_packed && attention->v.is_packed;
  const int64_t most = at_least_one(quotient(is_packed ? packed_unit_rows : plain_unit_rows, group)),
                largest = n_q < most ? at_least_one(n_q) : most;
  int64_t block = largest;
  if (num_threads > 1) {
    const Count units = Count(attention->batch) * Count(attention->num_kv_heads) * Count(blocks_of(n_q, block));
    const Count wanted = Count(num_threads) * Count(units_per_thread);
    if (units.value() < wanted.value()) {
      const int64_t per_head = blocks_of(wanted.value(), at_least_one(attention->batch * attention->num_kv_heads));
      const int64_t least = at_least_one(least_unit_rows / group);
      block = blocks_of(n_q, per_head);
      if (block < least) block = least;
      if (block > largest) block = largest;
    }
  }
  // Blocks as equal as can be.
  attention->block_queries = n_q > 0 ? blocks_of(n_q, blocks_of(n_q, block)) : 1;

  const int64_t chunks = blocks_of(attention->n_kv, chunk_keys);
  int64_t slots = 1;
  while (chunks >> slots != 0) ++slots;  // as many as a counter up to `chunks` has digits

  const Count rows = Count(largest) * Count(group), width(attention->head_dim_v_padded);
  const Count state = round_up(rows * width + rows + rows + Count(2 * merge_rows), 16);
  AttendScratch &scratch = attention->scratch;
  Count end(0);
  const auto take = [&end](Count floats) {
    const int64_t offset = end.value();
    end = end + round_up(floats, 16);
    return offset;
  };
  scratch.queries = take(rows * Count(attention->head_dim));
  scratch.keys = take(attention->k.is_packed ? Count(0) : Count(chunk_keys) * Count(attention->head_dim));
  scratch.values = take(attention->v.is_packed ? Count(0) : Count(chunk_keys) * width);
  scratch.scores = take(attend_tile_rows_max * score_stride);
  scratch.excluded = take(attend_tile_rows_max * chunk_keys / static_cast<int64_t>(sizeof(float)));
  scratch.states = take(Count(slots) * state);
  scratch.state_stride = state.value();
  scratch.floats = end.value();
  return !end.overflows();
}

void run_attention(const Kernels &kernels, const Attention &attention, const mha_scheduler *scheduler, UnitCounter *counter,
                   float *scratch) {
  const Stage stage = {&kernels, &attention, scratch, threads_of(scheduler) > 1};
  run_units(scheduler, counter, attention.batch * attention.num_kv_heads * query_blocks(attention), run_unit, &stage);
}

namespace {

constexpr uint32_t args_argument = 1;  // of mha_attention and its queries

// What a call of mha_attention comes to: its arguments, all defaults resolved, and its workspace.
struct Plan {
  mha_attention_args args;
  mha_taps taps;
  const Kernels *kernels;
  Attention attention;
  int64_t counter_offset, scratch_offset;
  int64_t workspace_bytes;
};

mha_status check_dimensions(Report &report, mha_attention_args *args) {
  const struct {
    const char *name;
    int64_t value;
    bool may_be_zero;
  } dims[] = {{"num_heads", args->num_heads, false},
              {"num_kv_heads", args->num_kv_heads, true},
              {"head_dim", args->head_dim, false},
              {"head_dim_v", args->head_dim_v, true}};
  for (const auto &dim : dims) {
    if (dim.value < 0 || (dim.value == 0 && !dim.may_be_zero)) {
      return report.fail(MHA_ERROR_INVALID_VALUE, args_argument, "%s is %lld; set it to at least 1", dim.name,
                         static_cast<long long>(dim.value));
    }
    if (dim.value > INT32_MAX) {
      return report.fail(MHA_ERROR_TOO_LARGE, args_argument, "%s is %lld; the largest dimension is %d", dim.name,
                         static_cast<long long>(dim.value), INT32_MAX);
    }
  }
  if (args->num_kv_heads == 0) args->num_kv_heads = args->num_heads;
  if (args->head_dim_v == 0) args->head_dim_v = args->head_dim;
  if (args->num_heads % args->num_kv_heads != 0) {
    return report.fail(MHA_ERROR_SHAPE, args_argument,
                       "num_kv_heads %lld does not divide num_heads %lld; set it to num_heads, or to a divisor for grouped queries",
                       static_cast<long long>(args->num_kv_heads), static_cast<long long>(args->num_heads));
  }
  if (args->num_heads * args->head_dim > INT32_MAX || args->num_heads * args->head_dim_v > INT32_MAX) {
    return report.fail(MHA_ERROR_TOO_LARGE, args_argument, "num_heads %lld * head_dim (or * head_dim_v) is larger than %d",
                       static_cast<long long>(args->num_heads), INT32_MAX);
  }
  return MHA_OK;
}

// 0 = contiguous, [batch, n, heads, width].
void resolve_strides(int64_t n, int64_t heads, int64_t width, int64_t *batch_stride, int64_t *row_stride, int64_t *head_stride) {
  if (*head_stride == 0) *head_stride = width;
  if (*row_stride == 0) *row_stride = heads * width;
  *batch_stride = contiguous_stride(*batch_stride, n, *row_stride);
}

// A head stride says that the layout is not [batch, n, heads, width], whose strides the zeros stand for.
mha_status check_strides_are_complete(Report &report, const mha_attention_args &args) {
  const struct {
    const char *name;
    int64_t rows, batch_stride, row_stride, head_stride;
  } arrays[] = {{"q", args.n_q, args.q_batch_stride, args.q_row_stride, args.q_head_stride},
                {"k", args.n_kv, args.k_batch_stride, args.k_row_stride, args.k_head_stride},
                {"v", args.n_kv, args.v_batch_stride, args.v_row_stride, args.v_head_stride},
                {"output", args.n_q, args.output_batch_stride, args.output_row_stride, args.output_head_stride}};
  for (const auto &array : arrays) {
    const bool lacks_row = array.row_stride == 0, lacks_batch = array.batch_stride == 0 && args.batch > 1;
    if (array.rows > 0 && array.head_stride != 0 && (lacks_row || lacks_batch)) {
      return report.fail(MHA_ERROR_INVALID_VALUE, args_argument,
                         "%s_head_stride is %lld, but %s_%s_stride is 0; set all strides of %s, or none", array.name,
                         static_cast<long long>(array.head_stride), array.name, lacks_row ? "row" : "batch", array.name);
    }
  }
  return MHA_OK;
}

mha_status check_arrays(Report &report, mha_attention_args *args) {
  if (const mha_status status = check_strides_are_complete(report, *args)) return status;
  resolve_strides(args->n_q, args->num_heads, args->head_dim, &args->q_batch_stride, &args->q_row_stride, &args->q_head_stride);
  resolve_strides(args->n_kv, args->num_kv_heads, args->head_dim, &args->k_batch_stride, &args->k_row_stride, &args->k_head_stride);
  resolve_strides(args->n_kv, args->num_kv_heads, args->head_dim_v, &args->v_batch_stride, &args->v_row_stride, &args->v_head_stride);
  resolve_strides(args->n_q, args->num_heads, args->head_dim_v, &args->output_batch_stride, &args->output_row_stride,
                  &args->output_head_stride);
  const Array inputs[] = {
      {"q", args->head_dim, {args->batch, args->n_q, args->num_heads}, {args->q_batch_stride, args->q_row_stride, args->q_head_stride}},
      {"k", args->head_dim, {args->batch, args->n_kv, args->num_kv_heads}, {args->k_batch_stride, args->k_row_stride, args->k_head_stride}},
      {"v",
       args->head_dim_v,
       {args->batch, args->n_kv, args->num_kv_heads},
       {args->v_batch_stride, args->v_row_stride, args->v_head_stride}}};
  for (const Array &input : inputs) {
    if (const mha_status status = check_input(report, args_argument, input)) return status;
  }
  return check_output(report, args_argument,
                      {"output",
                       args->head_dim_v,
                       {args->batch, args->n_q, args->num_heads},
                       {args->output_batch_stride, args->output_row_stride, args->output_head_stride}});
}

mha_status check_options(Report &report, const mha_attention_args &args) {
  const uint32_t types[] = {args.q_type, args.k_type, args.v_type, args.output_type};
  const char *const names[] = {"q_type", "k_type", "v_type", "output_type"};
  for (int i = 0; i < 4; ++i) {
    if (types[i] != MHA_TYPE_F32) {
      return report.fail(MHA_ERROR_INVALID_VALUE, args_argument, "%s is %u; this version knows MHA_TYPE_F32 (0)", names[i], types[i]);
    }
  }
  if (args.scale - args.scale != 0.0f) {
    return report.fail(MHA_ERROR_INVALID_VALUE, args_argument, "scale is not finite; set a number, or 0 for 1 / sqrt(head_dim)");
  }
  if (args.reserved != 0) return report.fail(MHA_ERROR_INVALID_VALUE, args_argument, "mha_attention_args.reserved is not 0; set it to 0");
  return check_causal(report, args_argument, args.is_causal, args.q_start, args.n_q, args.n_kv);
}

constexpr int num_optional_outputs = 6;

struct OptionalOutputs {
  OptionalOutput outputs[num_optional_outputs];
};

OptionalOutputs optional_outputs(const mha_attention_args &args, const mha_taps &taps) {
  const Count rows = Count(args.batch) * Count(args.num_heads) * Count(args.n_q), pairs = rows * Count(args.n_kv);
  return {{{"lse", args.lse, rows},
           {"attention_weights", args.attention_weights, pairs},
           {"taps.scores", taps.scores, pairs},
           {"taps.scaled_scores", taps.scaled_scores, pairs},
           {"taps.masked_scores", taps.masked_scores, pairs},
           {"taps.context", taps.context, rows * Count(args.head_dim_v)}}};
}

Attention describe(const mha_attention_args &args, const mha_taps &taps) {
  Attention attention = {};
  attention.batch = args.batch;
  attention.n_q = args.n_q;
  attention.n_kv = args.n_kv;
  attention.num_heads = args.num_heads;
  attention.num_kv_heads = args.num_kv_heads;
  attention.head_dim = args.head_dim;
  attention.head_dim_v = args.head_dim_v;
  attention.scale = args.scale != 0.0f ? args.scale : 1.0f / __builtin_sqrtf(static_cast<float>(args.head_dim));
  attention.is_causal = args.is_causal != 0;
  attention.q_start = args.q_start;
  attention.q = {static_cast<const float *>(args.q), args.q_batch_stride, args.q_row_stride, args.q_head_stride};
  attention.k = {static_cast<const float *>(args.k), args.k_batch_stride, args.k_head_stride, args.k_row_stride, false};
  attention.v = {static_cast<const float *>(args.v), args.v_batch_stride, args.v_head_stride, args.v_row_stride, false};
  attention.output = static_cast<float *>(args.output);
  attention.output_batch_stride = args.output_batch_stride;
  attention.output_row_stride = args.output_row_stride;
  attention.output_head_stride = args.output_head_stride;
  attention.lse = args.lse;
  attention.attention_weights = args.attention_weights;
  attention.scores = taps.scores;
  attention.scaled_scores = taps.scaled_scores;
  attention.masked_scores = taps.masked_scores;
  attention.context = taps.context;
  return attention;
}

mha_status make_plan(Report &report, const mha_attention_args *given, Plan *plan) {
  mha_attention_args &args = plan->args;
  if (const mha_status status = read_struct(report, args_argument, "mha_attention_args", given, &args)) return status;
  const struct {
    const char *name;
    int64_t count;
  } counts[] = {{"batch", args.batch}, {"n_q", args.n_q}, {"n_kv", args.n_kv}};
  for (const auto &count : counts) {
    if (const mha_status status = check_count(report, args_argument, count.name, count.count)) return status;
  }
  if (const mha_status status = check_dimensions(report, &args)) return status;
  if (const mha_status status = check_arrays(report, &args)) return status;
  if (const mha_status status = check_options(report, args)) return status;
  if (const mha_status status = check_scheduler(report, args_argument, args.scheduler)) return status;
  plan->taps = {};
  if (args.taps) {
    if (const mha_status status = read_struct(report, args_argument, "mha_taps", args.taps, &plan->taps)) return status;
  }
  if (plan->taps.q || plan->taps.k || plan->taps.v) {
    return report.fail(MHA_ERROR_INVALID_VALUE, args_argument,
                       "the taps q, k and v are mha_forward's; leave them NULL, the caller has them already");
  }
  if (args.lse || args.attention_weights || args.taps) {
    const OptionalOutputs optional = optional_outputs(args, plan->taps);
    if (const mha_status status = check_optional_outputs(report, args_argument, optional.outputs, num_optional_outputs)) return status;
  }
  if (const mha_status status = choose_kernels(report, args_argument, args.instruction_set, &plan->kernels)) return status;

  plan->attention = describe(args, plan->taps);
  const bool has_plan = plan_attention(&plan->attention, threads_of(args.scheduler));
  Carving carving;
  plan->counter_offset = carving.take(Count(1), sizeof(UnitCounter));
  plan->scratch_offset = carving.take_floats(Count(has_plan ? plan->attention.scratch.floats : -1) * Count(threads_of(args.scheduler)));
  plan->workspace_bytes = carving.bytes();
  if (plan->workspace_bytes < 0) return report.fail(MHA_ERROR_TOO_LARGE, args_argument, "the workspace would be larger than memory can be");
  if (args.batch == 0 || args.n_q == 0) plan->workspace_bytes = 0;  // nothing to do
  return MHA_OK;
}

mha_status check_pointers(Report &report, const mha_attention_args &args) {
  if (args.batch == 0 || args.n_q == 0) return MHA_OK;
  if (!args.q) return report.fail(MHA_ERROR_NULL_POINTER, args_argument, "q is NULL; pass the queries");
  if (!args.output) return report.fail(MHA_ERROR_NULL_POINTER, args_argument, "output is NULL; pass where to write the result");
  if (args.n_kv > 0 && !args.k) return report.fail(MHA_ERROR_NULL_POINTER, args_argument, "k is NULL; pass the keys");
  if (args.n_kv > 0 && !args.v) return report.fail(MHA_ERROR_NULL_POINTER, args_argument, "v is NULL; pass the values");
  return check_positions(report, args_argument, args.is_causal, args.q_start, args.batch);
}

}  // namespace
}  // namespace mha

using namespace mha;

mha_status mha_attention_workspace(const mha_attention_args *args, size_t *bytes, mha_error *error) {
  Report report(error);
  Plan plan;
  if (const mha_status status = make_plan(report, args, &plan)) return status;
  if (!bytes) return report.fail(MHA_ERROR_NULL_POINTER, 2, "bytes is NULL; pass where to write the size");
  *bytes = static_cast<size_t>(plan.workspace_bytes);
  return MHA_OK;
}

mha_status mha_attention(const mha_attention_args *args, void *workspace, size_t workspace_bytes, mha_error *error) {
  Report report(error);
  Plan plan;
  if (const mha_status status = make_plan(report, args, &plan)) return status;
  if (const mha_status status = check_pointers(report, plan.args)) return status;
  if (const mha_status status = check_workspace(report, 2, "mha_attention_workspace", workspace, workspace_bytes, plan.workspace_bytes))
    return status;

  if (plan.args.batch == 0 || plan.args.n_q == 0) return MHA_OK;
  unsigned char *const memory = align_workspace(workspace);
  run_attention(*plan.kernels, plan.attention, plan.args.scheduler, reinterpret_cast<UnitCounter *>(memory + plan.counter_offset),
                reinterpret_cast<float *>(memory + plan.scratch_offset));
  return MHA_OK;
}

mha_status mha_attention_info(const mha_attention_args *args, mha_call_info *info, mha_error *error) {
  Report report(error);
  Plan plan;
  if (const mha_status status = make_plan(report, args, &plan)) return status;
  mha_call_info filled;
  if (const mha_status status = read_struct(report, 2, "mha_call_info", info, &filled)) return status;
  if (const mha_status status = check_positions(report, args_argument, plan.args.is_causal, plan.args.q_start, plan.args.batch)) {
    return status;
  }
  const mha_attention_args &read = plan.args;
  const Attention &attention = plan.attention;
  const uint64_t pairs = attending_pairs(read.batch, read.n_q, read.n_kv, attention.is_causal, read.q_start);
  const uint64_t q_rows = product(read.batch, read.n_q), kv_rows = product(read.batch, read.n_kv);
  const uint64_t widths = static_cast<uint64_t>(read.head_dim + read.head_dim_v);
  filled.instruction_set = plan.kernels->instruction_set;
  filled.back_end = MHA_BACK_END_NATIVE;
  filled.contract = MHA_CONTRACT;
  filled.num_threads = static_cast<uint32_t>(threads_of(read.scheduler));
  filled.project_tile_rows = 0;
  filled.project_tile_columns = 0;
  filled.attend_tile_rows = plan.kernels->attend_tile_rows;
  filled.attend_block_rows = attention.block_queries * (read.num_heads / read.num_kv_heads);
  filled.attend_chunk_keys = chunk_keys;
  filled.workspace_bytes = static_cast<size_t>(plan.workspace_bytes);
  filled.packed_bytes = 0;
  filled.operations = 2 * pairs * widths * static_cast<uint64_t>(read.num_heads);
  filled.bytes =
      sizeof(float) * widths * (q_rows * static_cast<uint64_t>(read.num_heads) + kv_rows * static_cast<uint64_t>(read.num_kv_heads)) +
      bytes_of_optional_outputs(optional_outputs(read, plan.taps).outputs, num_optional_outputs);
  *info = filled;
  return MHA_OK;
}
