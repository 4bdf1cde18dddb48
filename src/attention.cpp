// mha_attention, and the middle stage that it shares with mha_forward.

#include "attention.h"

#include <string.h>

#include "cpu.h"
#include "sequences.h"
#include "structs.h"

namespace mha {
namespace {

// The most query rows of one unit, counting all query heads of the kv head, unless a single query has more. Their states fit into a level-2
// cache. A caller's plain keys and values are brought into the packed form once per unit and chunk, which more rows make cheaper.
constexpr int64_t packed_unit_rows = 96, plain_unit_rows = 768;

// Fewer rows in a unit leave no thread without work; but not so few that keys and values are mostly waited for.
constexpr int64_t units_per_thread = 3, least_unit_rows = 24;

int64_t at_least_one(int64_t count) { return count > 1 ? count : 1; }

// So many units a thread has at most when the keys of a unit are shared out, and so many keys a part has at least.
constexpr int64_t part_units_per_thread = 4 * units_per_thread, least_part_chunks = 2;

int64_t query_blocks(const Attention &attention) { return blocks_of(attention.n_q, attention.block_queries); }

int64_t least_block(const Attention &attention) {
  return at_least_one(least_unit_rows / quotient(attention.num_heads, attention.num_kv_heads));
}

Count state_floats(Count rows, const Attention &attention) {
  return round_up((rows + Count(spare_rows)) * Count(attention.head_dim_v_padded) + rows + rows + Count(2 * merge_rows), 16);
}

// Fewer units than threads can share: their keys are cut too, in powers of two of chunks.
void share_keys(int64_t num_threads, Attention *attention) {
  KeyParts &parts = attention->parts;
  parts.count = 1;
  const int64_t units = attention->batch * attention->num_kv_heads * query_blocks(*attention), wanted = num_threads * units_per_thread;
  const int64_t chunks = blocks_of(attention->n_kv, chunk_keys);
  const bool has_small_units = attention->block_queries <= least_block(*attention);  // whose states have a place
  if (!parts.may_be || units == 0 || units >= wanted || chunks < 2 * least_part_chunks || !has_small_units) return;
  const int64_t parts_wanted = blocks_of(wanted, units);
  parts.chunks = least_part_chunks;
  while (blocks_of(chunks, 2 * parts.chunks) >= parts_wanted) parts.chunks *= 2;
  parts.count = blocks_of(chunks, parts.chunks);
  for (int64_t unit = 0; unit < units; ++unit) parts.unfinished[unit] = parts.count;
}

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
  const int64_t whole = quotient(unit, attention.parts.count), part = unit - whole * attention.parts.count;
  const int64_t blocks = query_blocks(attention), heads = attention.batch * attention.num_kv_heads;
  const int64_t row = quotient(whole, stage.is_shared ? heads : blocks), column = whole - row * (stage.is_shared ? heads : blocks);
  const int64_t head = stage.is_shared ? column : row, block = blocks - 1 - (stage.is_shared ? row : column);
  const int64_t sequence = quotient(head, attention.num_kv_heads);
  stage.kernels->attend(attention, sequence, head - sequence * attention.num_kv_heads, block, part,
                        stage.scratch + thread * attention.scratch.floats);
}

// See kernels/attend_in_step.h.
bool may_come_in_step(const KeyValues &array) { return array.is_packed && array.storage != Storage::int8; }

}  // namespace

AttentionMemory plan_attention(Attention *attention, int64_t num_threads, bool is_ragged, Carving *carving) {
  const int64_t group = quotient(attention->num_heads, attention->num_kv_heads), n_q = attention->n_q;
  attention->head_dim_v_padded = padded_width(attention->head_dim_v);

  // The scratch memory is that of the largest units, which does not depend on the number of threads: so a workspace for more of them serves
  // fewer, too.
  const bool has_floats_k = attention->k.is_packed && attention->k.storage == Storage::f32;
  const bool has_floats_v = attention->v.is_packed && attention->v.storage == Storage::f32;
  const int64_t most = at_least_one(quotient(has_floats_k && has_floats_v ? packed_unit_rows : plain_unit_rows, group)),
                largest = n_q < most ? at_least_one(n_q) : most, least = least_block(*attention);
  int64_t block = largest;
  if (num_threads > 1) {
    const Count heads = Count(attention->batch) * Count(attention->num_kv_heads), units = heads * Count(blocks_of(n_q, block));
    const Count wanted = Count(num_threads) * Count(units_per_thread);
    if (units.value() < wanted.value()) {
      const int64_t per_head = blocks_of(wanted.value(), at_least_one(heads.value()));
      block = blocks_of(n_q, per_head);
      if (block < least) block = least;
      if (block > largest) block = largest;
    }
  }
  // Blocks as equal as can be.
  attention->block_queries = n_q > 0 ? blocks_of(n_q, blocks_of(n_q, block)) : 1;

  const int64_t chunks = blocks_of(attention->n_kv, chunk_keys);
  int64_t slots = attention->window_left < attention->n_kv ? 2 : 1;  // a window may begin within a subtree
  for (int64_t left = chunks / 2; left != 0; left /= 2) ++slots;     // as many as a counter up to `chunks` has digits
  // Chunks in step each have a slot before they are merged: one more than the counter has digits.
  if (chunks >= most_chunks_in_step && may_come_in_step(attention->k) && may_come_in_step(attention->v)) ++slots;

  const Count rows = Count(largest) * Count(group), width(attention->head_dim_v_padded), state = state_floats(rows, *attention);
  AttendScratch &scratch = attention->scratch;
  Count end(0);
  const auto take = [&end](Count floats) {
    const int64_t offset = end.value();
    end = end + round_up(floats, 16);
    return offset;
  };
  scratch.queries = take(rows * Count(attention->head_dim));
  scratch.keys = take(has_floats_k ? Count(0) : Count(chunk_keys) * Count(attention->head_dim));
  scratch.values = take(has_floats_v ? Count(0) : Count(chunk_keys) * width);
  scratch.rotated = take(attention->rotate_k.cos || !has_floats_k ? Count(4) * Count(attention->head_dim) : Count(0));
  scratch.scores = take((attend_tile_rows_max + spare_score_rows) * score_stride);
  scratch.excluded = take(attend_tile_rows_max * chunk_keys / static_cast<int64_t>(sizeof(float)));
  scratch.states = take(Count(slots) * state);
  scratch.state_stride = state.value();
  scratch.floats = end.value();

  attention->parts.may_be = num_threads > 1 && chunks >= 2 * least_part_chunks && attention->k.ring_positions == 0;
  // Where keys are shared out, units are as small as they come.
  const Count part_rows = Count(least < largest ? least : largest) * Count(group), threads(attention->parts.may_be ? num_threads : 0);
  const Count part_state = attention->parts.may_be ? state_floats(part_rows, *attention) : Count(0);
  attention->parts.state_stride = part_state.value();
  const Count batch(attention->batch), extents = is_ragged ? batch : Count(0);
  AttentionMemory memory;
  memory.sequences = carving->take(batch, sizeof(Sequence));
  memory.query_extents = carving->take(extents, sizeof(Extent));
  memory.key_extents = carving->take(extents, sizeof(Extent));
  memory.unfinished = carving->take(threads * Count(units_per_thread), sizeof(int64_t));
  memory.part_states = carving->take_floats(threads * Count(part_units_per_thread) * part_state);
  memory.scratch = carving->take_floats(end * Count(num_threads));
  return memory;
}

void bind_attention(const AttentionMemory &memory, unsigned char *workspace, Attention *attention) {
  attention->sequences = reinterpret_cast<const Sequence *>(workspace + memory.sequences);
  attention->parts.unfinished = reinterpret_cast<int64_t *>(workspace + memory.unfinished);
  attention->parts.states = reinterpret_cast<float *>(workspace + memory.part_states);
}

void run_attention(const Kernels &kernels, Attention *attention, const mha_scheduler *scheduler, UnitCounter *counter, float *scratch) {
  share_keys(threads_of(scheduler), attention);
  const Stage stage = {&kernels, attention, scratch, threads_of(scheduler) > 1};
  const int64_t units = attention->batch * attention->num_kv_heads * query_blocks(*attention) * attention->parts.count;
  run_units(scheduler, counter, units, run_unit, &stage);
}

namespace {

struct StoringStage {
  const Kernels *kernels;
  const Storing *storings;
  const Attention *attention;
  float *scratch;
  int64_t batch, blocks;
};

constexpr int64_t stored_rows = 64;  // of a unit

void run_storing_unit(const void *context, int64_t unit, int64_t thread) {
  const StoringStage &stage = *static_cast<const StoringStage *>(context);
  const int64_t block = unit % stage.blocks, sequence = unit / stage.blocks % stage.batch;
  const Storing &storing = stage.storings[unit / stage.blocks / stage.batch];
  if (!storing.rows.base) return;
  const int64_t begin = block * stored_rows, rows = storing.sequences[sequence].kv_rows;
  if (begin >= rows) return;
  stage.kernels->store(storing, sequence, begin, begin + stored_rows < rows ? begin + stored_rows : rows,
                       stage.scratch + thread * stage.attention->scratch.floats + stage.attention->scratch.rotated);
}

}  // namespace

void run_storing(const Kernels &kernels, const Attention &attention, const Storing (&storings)[2], const mha_scheduler *scheduler,
                 UnitCounter *counter, float *scratch) {
  int64_t longest = 0;
  for (int64_t b = 0; b < attention.batch; ++b) {
    if (attention.sequences[b].kv_rows > longest) longest = attention.sequences[b].kv_rows;
  }
  const StoringStage stage = {&kernels, storings, &attention, scratch, attention.batch, blocks_of(longest, stored_rows)};
  run_units(scheduler, counter, 2 * stage.batch * stage.blocks, run_storing_unit, &stage);
}

void clear_padding(const Extent *extents, int64_t batch, int64_t rows, int64_t width, float *base, int64_t batch_stride,
                   int64_t row_stride) {
  for (int64_t b = 0; base && b < batch; ++b) {
    for (int64_t row = 0; row < rows; ++row) {
      if (row >= extents[b].first && row < extents[b].first + extents[b].count) continue;
      memset(base + b * batch_stride + row * row_stride, 0, static_cast<size_t>(width) * sizeof(float));
    }
  }
}

void clear_padding_of(const Attention &attention, const Extent *extents) {
  const int64_t n_q = attention.n_q, n_kv = attention.n_kv, width = attention.num_heads * attention.head_dim_v;
  clear_padding(extents, attention.batch, n_q, width, attention.context, n_q * width, width);
  float *const pairs[] = {attention.attention_weights, attention.scores, attention.scaled_scores};
  for (int64_t b = 0; b < attention.batch; ++b) {
    for (int64_t row = 0; row < n_q; ++row) {
      if (row >= extents[b].first && row < extents[b].first + extents[b].count) continue;
      for (int64_t head = 0; head < attention.num_heads; ++head) {
        const int64_t at = (b * attention.num_heads + head) * n_q + row;
        if (attention.lse) attention.lse[at] = -__builtin_inff();
        for (float *const output : pairs) {
          if (output) memset(output + at * n_kv, 0, static_cast<size_t>(n_kv) * sizeof(float));
        }
        for (int64_t j = 0; attention.masked_scores && j < n_kv; ++j) attention.masked_scores[at * n_kv + j] = -__builtin_inff();
      }
    }
  }
}

namespace {

constexpr uint32_t args_argument = 1;  // of mha_attention and its queries

// What a call of mha_attention comes to: its arguments, all defaults resolved, and its workspace.
struct Plan {
  mha_attention_args args;
  mha_taps taps;
  SequenceArguments sequences;
  const Kernels *kernels;
  Attention attention;
  AttentionMemory memory;
  int64_t counter;  // offset in the workspace
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
  const struct {
    const char *name;
    uint32_t type;
  } types[] = {{"k_type", args.k_type}, {"v_type", args.v_type}};
  for (const auto &type : types) {
    if (type.type > (args.cache ? MHA_TYPE_F32 : MHA_TYPE_BF16)) {
      return report.fail(MHA_ERROR_INVALID_VALUE, args_argument, "%s is %u; it can be MHA_TYPE_F32 (0)%s", type.name, type.type,
                         args.cache ? " with a cache" : ", MHA_TYPE_F16 (1) or MHA_TYPE_BF16 (2)");
    }
  }
  if (args.reserved != 0) return report.fail(MHA_ERROR_INVALID_VALUE, args_argument, "mha_attention_args.reserved is not 0; set it to 0");
  if (args.scale - args.scale != 0.0f) {
    return report.fail(MHA_ERROR_INVALID_VALUE, args_argument, "scale is not finite; set a number, or 0 for 1 / sqrt(head_dim)");
  }
  return MHA_OK;
}

constexpr int num_optional_outputs = 6;

struct OptionalOutputs {
  OptionalOutput outputs[num_optional_outputs];
};

KeyValues plain_rows(const void *base, uint32_t type, int64_t batch_stride, int64_t row_stride, int64_t head_stride) {
  KeyValues rows = {};
  rows.base = base;
  rows.storage = static_cast<Storage>(type);
  rows.batch_stride = batch_stride;
  rows.row_stride = row_stride;
  rows.head_stride = head_stride;
  return rows;
}

// n_kv: of the outputs per pair
OptionalOutputs optional_outputs(const mha_attention_args &args, const mha_taps &taps, int64_t n_kv) {
  const Count rows = Count(args.batch) * Count(args.num_heads) * Count(args.n_q), pairs = rows * Count(n_kv);
  return {{{"lse", args.lse, rows},
           {"attention_weights", args.attention_weights, pairs},
           {"taps.scores", taps.scores, pairs},
           {"taps.scaled_scores", taps.scaled_scores, pairs},
           {"taps.masked_scores", taps.masked_scores, pairs},
           {"taps.context", taps.context, rows * Count(args.head_dim_v)}}};
}

Attention describe(const mha_attention_args &args, const mha_taps &taps, const SequenceArguments &sequences) {
  Attention attention = {};
  attention.batch = args.batch;
  attention.n_q = args.n_q;
  attention.n_kv = most_keys(sequences);
  attention.num_heads = args.num_heads;
  attention.num_kv_heads = args.num_kv_heads;
  attention.head_dim = args.head_dim;
  attention.head_dim_v = args.head_dim_v;
  attention.scale = args.scale != 0.0f ? args.scale : 1.0f / __builtin_sqrtf(static_cast<float>(args.head_dim));
  set_window(sequences, &attention);
  attention.q = {static_cast<const float *>(args.q), args.q_batch_stride, args.q_row_stride, args.q_head_stride};
  attention.rotate_q = rotation_of(sequences, false);
  if (args.cache) {
    attention.k = cached_keys(args.cache);
    attention.v = cached_values(args.cache);
  } else {
    attention.k = plain_rows(args.k, args.k_type, args.k_batch_stride, args.k_row_stride, args.k_head_stride);
    attention.v = plain_rows(args.v, args.v_type, args.v_batch_stride, args.v_row_stride, args.v_head_stride);
  }
  attention.rotate_k = rotation_of(sequences, true);
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
  if (args.flags & MHA_CACHE_READ) {
    args.n_kv = 0;
    if (const mha_status status = check_cache_read(report, args_argument, args.cache, args.k ? "k" : args.v ? "v" : nullptr)) return status;
  }
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
  plan->sequences = sequences_of(args, args_argument);
  if (const mha_status status = check_sequences(report, &plan->sequences, args.score, args.rope, args.num_kv_heads, args.head_dim,
                                                args.head_dim_v)) {
    return status;
  }
  if (args.lse || args.attention_weights || args.taps) {
    const OptionalOutputs optional = optional_outputs(args, plan->taps, most_keys(plan->sequences));
    if (const mha_status status = check_optional_outputs(report, args_argument, optional.outputs, num_optional_outputs)) return status;
    if (const mha_status status = check_pair_outputs(report, plan->sequences, args.attention_weights, plan->taps)) return status;
  }
  if (const mha_status status = choose_kernels(report, args_argument, args.instruction_set, &plan->kernels)) return status;

  plan->attention = describe(args, plan->taps, plan->sequences);
  Carving carving;
  plan->counter = carving.take(Count(1), sizeof(UnitCounter));
  plan->memory = plan_attention(&plan->attention, threads_of(args.scheduler), plan->sequences.is_ragged(), &carving);
  plan->workspace_bytes = carving.bytes();
  if (plan->workspace_bytes < 0) return report.fail(MHA_ERROR_TOO_LARGE, args_argument, "the workspace would be larger than memory can be");
  if (plan->sequences.is_nothing()) plan->workspace_bytes = 0;
  return MHA_OK;
}

mha_status check_pointers(Report &report, const Plan &plan) {
  const mha_attention_args &args = plan.args;
  if (!args.q) return report.fail(MHA_ERROR_NULL_POINTER, args_argument, "q is NULL; pass the queries");
  if (!args.output) return report.fail(MHA_ERROR_NULL_POINTER, args_argument, "output is NULL; pass where to write the result");
  if (args.n_kv > 0 && !args.k) return report.fail(MHA_ERROR_NULL_POINTER, args_argument, "k is NULL; pass the keys");
  if (args.n_kv > 0 && !args.v) return report.fail(MHA_ERROR_NULL_POINTER, args_argument, "v is NULL; pass the values");
  return check_sequence_arrays(report, plan.sequences);
}

// Rows of the call to the cache.
void store_rows(const Plan &plan, UnitCounter *counter, float *scratch) {
  const mha_attention_args &args = plan.args;
  const Attention &attention = plan.attention;
  Storing storings[2] = {};
  for (int i = 0; i < 2; ++i) {
    Storing &storing = storings[i];
    storing.are_keys = i == 0;
    storing.rows = storing.are_keys
                       ? StridedRows{static_cast<const float *>(args.k), args.k_batch_stride, args.k_row_stride, args.k_head_stride}
                       : StridedRows{static_cast<const float *>(args.v), args.v_batch_stride, args.v_row_stride, args.v_head_stride};
    if (storing.are_keys) storing.rotation = attention.rotate_k;
    storing.sequences = attention.sequences;
    storing.to = storing.are_keys ? attention.k : attention.v;
    storing.num_kv_heads = args.num_kv_heads;
    storing.width = storing.are_keys ? args.head_dim : args.head_dim_v;
  }
  run_storing(*plan.kernels, attention, storings, args.scheduler, counter, scratch);
}

// Nothing here can fail.
void run(Plan &plan, unsigned char *memory) {
  const mha_attention_args &args = plan.args;
  Attention &attention = plan.attention;
  bind_attention(plan.memory, memory, &attention);
  attention.n_kv = longest_keys(plan.sequences);
  UnitCounter *const counter = reinterpret_cast<UnitCounter *>(memory + plan.counter);
  float *const scratch = reinterpret_cast<float *>(memory + plan.memory.scratch);
  Sequence *const sequences = reinterpret_cast<Sequence *>(memory + plan.memory.sequences);
  const SequenceArguments &given = plan.sequences;
  if (given.is_ragged()) {
    Extent *const extents = reinterpret_cast<Extent *>(memory + plan.memory.query_extents);
    fill_sequences(given, 0, INT64_MAX, sequences, extents, nullptr);
    for (int64_t h = 0; h < args.num_heads; ++h) {
      clear_padding(extents, args.batch, args.n_q, args.head_dim_v, attention.output + h * args.output_head_stride,
                    args.output_batch_stride, args.output_row_stride);
    }
    clear_padding_of(attention, extents);
  }
  const int64_t rows = given.rows_per_pass();
  for (int64_t row = 0, left = given.longest(); left > 0; row += rows, left -= rows) {
    fill_sequences(given, row, rows, sequences, nullptr, nullptr);
    if (args.cache && args.n_kv > 0) store_rows(plan, counter, scratch);
    run_attention(*plan.kernels, &attention, args.scheduler, counter, scratch);
  }
  grow_cache(given);
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
  if (const mha_status status = check_workspace(report, 2, "mha_attention_workspace", workspace, workspace_bytes, plan.workspace_bytes))
    return status;
  if (plan.sequences.is_nothing()) return MHA_OK;
  if (const mha_status status = check_pointers(report, plan)) return status;
  run(plan, align_workspace(workspace));
  return MHA_OK;
}

mha_status mha_attention_info(const mha_attention_args *args, mha_call_info *info, mha_error *error) {
  Report report(error);
  Plan plan;
  if (const mha_status status = make_plan(report, args, &plan)) return status;
  mha_call_info filled = {};
  const mha_attention_args &read = plan.args;
  const Attention &attention = plan.attention;
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
  if (plan.sequences.is_nothing()) return write_struct(report, 2, "mha_call_info", filled, info);
  if (const mha_status status = check_sequence_arrays(report, plan.sequences)) return status;
  filled.operations = 2 * attending_pairs(plan.sequences) * widths * static_cast<uint64_t>(read.num_heads);
  filled.bytes = sizeof(float) * widths * valid_queries(plan.sequences) * static_cast<uint64_t>(read.num_heads) +
                 key_value_bytes(plan.sequences, attention) +
                 bytes_of_optional_outputs(optional_outputs(read, plan.taps, longest_keys(plan.sequences)).outputs, num_optional_outputs);
  return write_struct(report, 2, "mha_call_info", filled, info);
}
