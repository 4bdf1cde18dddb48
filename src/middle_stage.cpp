// The middle stage; middle_stage.h says in which order its functions are called.

#include "middle_stage.h"

#include <string.h>

#include <algorithm>
#include <array>

#include "norm.h"
#include "score_options.h"
#include "storage.h"
#include "structs.h"

namespace mha {
namespace {

// A contiguous output; null if it was not asked for.
struct OptionalOutput {
  const char *name;
  float *output;
  Count elements;
  bool is_per_pair = false;
};

// n_kv: of the outputs per pair.
std::array<OptionalOutput, 11> optional_outputs(const MiddleStage &stage, int64_t n_kv) {
  const Attention &a = stage.attention;
  const mha_outputs &outputs = stage.outputs;
  const Count batch(a.array_batch), heads(a.num_heads), q_rows = batch * Count(a.n_q) * heads,
                                                        pairs = q_rows * Count(n_kv);
  const Count kv_rows = batch * Count(stage.sequences.n_kv) * Count(a.num_kv_heads);
  return {{{"outputs.lse", outputs.lse, q_rows},
           {"outputs.states", outputs.states, q_rows * Count(state_head + a.head_dim_v)},
           {"outputs.q", outputs.q, q_rows * Count(a.head_dim)},
           {"outputs.k", outputs.k, kv_rows * Count(a.head_dim)},
           {"outputs.v", outputs.v, kv_rows * Count(a.head_dim_v)},
           {"outputs.context", outputs.context, q_rows * Count(a.head_dim_v)},
           {"outputs.scores", outputs.scores, pairs, true},
           {"outputs.scaled_scores", outputs.scaled_scores, pairs, true},
           {"outputs.softcapped_scores", outputs.softcapped_scores, pairs, true},
           {"outputs.masked_scores", outputs.masked_scores, pairs, true},
           {"outputs.attention_weights", outputs.attention_weights, pairs, true}}};
}

// All of them can be addressed, and those per pair are of no ring.
mha_status check_optional_outputs(Report report, const MiddleStage &stage) {
  const SequenceArguments &s = stage.sequences;
  const std::array<OptionalOutput, 11> outputs = optional_outputs(stage, max_keys(s));
  for (const OptionalOutput &output : outputs) {
    if (output.output && (output.elements * Count(sizeof(float))).overflows())
      return report.fail(MHA_ERROR_TOO_LARGE,
                         "%s would exceed the address space; use smaller dimensions", output.name);
  }
  for (const OptionalOutput &output : outputs) {
    if (output.output && output.is_per_pair && stage.attention.options.chosen.lists.base)
      return report.invalid(
          "%s has a number for each key, but score_arrays.chosen_keys leaves most keys out; set it "
          "to NULL",
          output.name);
    if (!output.output || !output.is_per_pair || !s.is_ring()) continue;
    return report.invalid(
        "%s has a number for each position, but a ring has forgotten some; set it to NULL, or use "
        "another kind of cache",
        output.name);
  }
  return MHA_OK;
}

// What the rows of padding have in the optional outputs: zeros, and no key takes part in them.
void clear_padding_of_outputs(const MiddleStage &stage) {
  const Attention &a = stage.attention;
  const Extent *const queries = stage.queries, *const keys = stage.keys;
  const int64_t batch = a.array_batch, n_q = a.n_q, n_kv = a.n_kv, own_n_kv = stage.sequences.n_kv;
  const int64_t q_width = a.num_heads * a.head_dim, k_width = a.num_kv_heads * a.head_dim,
                v_width = a.num_kv_heads * a.head_dim_v;
  const int64_t width = a.num_heads * a.head_dim_v;
  clear_padding(queries, batch, n_q, q_width, stage.outputs.q, n_q * q_width, q_width);
  clear_padding(keys, batch, own_n_kv, k_width, stage.outputs.k, own_n_kv * k_width, k_width);
  clear_padding(keys, batch, own_n_kv, v_width, stage.outputs.v, own_n_kv * v_width, v_width);
  clear_padding(queries, batch, n_q, width, a.context, n_q * width, width);
  float *const pairs[] = {a.pairs.weights, a.pairs.scores, a.pairs.scaled_scores,
                          a.pairs.softcapped_scores};
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t row = 0; row < n_q; ++row) {
      if (row >= queries[b].first && row < queries[b].first + queries[b].count) continue;
      for (int64_t head = 0; head < a.num_heads; ++head) {
        const int64_t at = (b * a.num_heads + head) * n_q + row;
        if (a.lse) a.lse[at] = -MHA_INFINITY;
        if (a.states) {
          float *const state = a.states + at * (state_head + a.head_dim_v);
          memset(state, 0, static_cast<size_t>(state_head + a.head_dim_v) * sizeof(float));
          state[0] = -MHA_INFINITY;
        }
        for (float *const output : pairs) {
          if (output) memset(output + at * n_kv, 0, static_cast<size_t>(n_kv) * sizeof(float));
        }
        for (int64_t j = 0; a.pairs.masked_scores && j < n_kv; ++j)
          a.pairs.masked_scores[at * n_kv + j] = -MHA_INFINITY;
      }
    }
  }
}

}  // namespace

mha_status describe_call(Report report, const CallArguments &args, bool is_self,
                         MiddleStage *stage) {
  if (const mha_status status = check_optional_cache(report, args.cache)) return status;
  if (const mha_status status = check_optional_cache(report, args.cache_read, "cache_read"))
    return status;
  if (const mha_status status = read_sequences(report, args, is_self, &stage->sequences))
    return status;
  mha_outputs &outputs = stage->outputs;
  outputs = {};
  if (args.outputs) {
    if (const mha_status status = read_struct(report, "mha_outputs", args.outputs, &outputs))
      return status;
  }
  stage->scheduler = args.scheduler;
  stage->score = args.score;
  stage->score_arrays = args.score_arrays;
  stage->norm = args.norm;
  stage->has_output = false;
  stage->k_rows = stage->v_rows = {};
  Attention &attention = stage->attention;
  attention.gate = {};
  attention.batch = stage->sequences.batch;
  attention.array_batch = stage->sequences.array_batch;
  attention.n_q = args.n_q;
  attention.most_queries = 0;
  attention.lse = outputs.lse;
  attention.states = outputs.states;
  attention.context = outputs.context;
  attention.pairs = {outputs.scores, outputs.scaled_scores, outputs.softcapped_scores,
                     outputs.masked_scores, outputs.attention_weights};
  return MHA_OK;
}

mha_status check_middle(Report report, MiddleStage *stage) {
  Attention &attention = stage->attention;
  SequenceArguments &s = stage->sequences;
  const GivenScore score = {stage->score, stage->score_arrays};
  if (const mha_status status = check_score_options(report, score, attention.num_heads,
                                                    attention.num_kv_heads, &s, &attention.options))
    return status;
  if (s.flags & MHA_EQUAL_SCORES) attention.scale = 0.0f;
  if (const mha_status status = check_sequences(report, &s, attention.num_kv_heads,
                                                attention.head_dim, attention.head_dim_v))
    return status;
  set_window(s, &attention);
  PositionGroups &groups = attention.options.groups;
  groups.window_left = attention.window_left;
  groups.window_right = attention.window_right;
  if (groups.add_keys) attention.window_left = attention.window_right = INT64_MAX;
  if (const mha_status status = check_norm(report, stage->norm, s, stage->has_output, &attention))
    return status;
  attention.prepare_q.rotation = rotation_of(s, false);
  attention.prepare_k.rotation = rotation_of(s, true);
  const struct {
    Preparation *how;
    Storage storage;
  } prepared[] = {{&attention.prepare_q, attention.q.storage},
                  {&attention.prepare_k, stage->k_rows.storage},
                  {&attention.prepare_v, stage->v_rows.storage}};
  for (const auto &rows : prepared)
    rows.how->is_any =
        rows.how->norm.is_given || rows.how->rotation.cos || rows.storage != Storage::f32;
  return check_optional_outputs(report, *stage);
}

mha_status check_array_contents(Report report, MiddleStage *stage) {
  Attention &attention = stage->attention;
  if (const mha_status status =
          check_head_arrays(report, "score.", attention.options, attention.num_heads))
    return status;
  if (const mha_status status = check_sequence_arrays(report, stage->sequences)) return status;
  if (const mha_status status = resolve_score_strides(report, stage->sequences, attention.num_heads,
                                                      attention.num_kv_heads, &attention.options))
    return status;
  return check_chosen_entries(report, stage->sequences, attention);
}

void plan_middle(MiddleStage *stage, WorkspaceLayout *layout) {
  stage->counter_offset = layout->take(Count(1), sizeof(UnitCounter));
  const Count statistics = stage->attention.prepare_q.norm.is_of_all_heads
                               ? Count(2) * Count(stage->attention.array_batch)
                               : Count(0);
  stage->q_statistics = layout->take_floats(statistics * Count(stage->attention.n_q));
  stage->k_statistics = layout->take_floats(statistics * Count(stage->sequences.n_kv));
  stage->memory =
      plan_attention(&stage->attention, max_keys(stage->sequences), threads_of(stage->scheduler),
                     stage->sequences.is_ragged(), layout);
}

void begin_passes(MiddleStage *stage, unsigned char *workspace) {
  const AttentionMemory &memory = stage->memory;
  const SequenceArguments &s = stage->sequences;
  Attention &attention = stage->attention;
  bind_attention(memory, workspace, &attention);
  attention.reworks_context = attention.options.head_scales || attention.context ||
                              attention.gate.values.base ||
                              attention.output_storage != Storage::f32;
  stage->attention.n_kv = pair_columns(s);
  const ChosenKeys &chosen = attention.options.chosen;
  attention.longest_kv = longest_keys(s);
  if (chosen.lists.base && chosen.count < attention.longest_kv / chosen.block)
    attention.longest_kv = chosen.count * chosen.block;
  stage->counter = reinterpret_cast<UnitCounter *>(workspace + stage->counter_offset);
  stage->scratch = reinterpret_cast<float *>(workspace + memory.scratch);
  stage->attention.prepare_q.norm.statistics =
      reinterpret_cast<float *>(workspace + stage->q_statistics);
  stage->attention.prepare_k.norm.statistics =
      reinterpret_cast<float *>(workspace + stage->k_statistics);
  stage->in_pass = reinterpret_cast<Sequence *>(workspace + memory.sequences);
  stage->queries =
      s.is_ragged() ? reinterpret_cast<Extent *>(workspace + memory.query_extents) : nullptr;
  stage->keys =
      s.is_ragged() ? reinterpret_cast<Extent *>(workspace + memory.key_extents) : nullptr;
  stage->next_row = 0;
  if (!s.is_ragged()) return;
  if (s.is_packed())
    cut_queries(longest_queries(s), threads_of(stage->scheduler), &stage->attention);
  fill_sequences(s, 0, INT64_MAX, stage->in_pass, stage->queries, stage->keys);
  if (stage->has_padding()) clear_padding_of_outputs(*stage);
}

bool next_pass(MiddleStage *stage) {
  const SequenceArguments &s = stage->sequences;
  const int64_t rows = s.rows_per_pass(), row = stage->next_row;
  const int64_t longest = longest_rows(s);
  if (row >= longest) {
    grow_cache(s);
    return false;
  }
  fill_sequences(s, row, rows, stage->in_pass, stage->queries, stage->keys);
  stage->next_row = longest - row > rows ? row + rows : longest;
  return true;
}

KeyValues packed_floats(const float *base, int64_t width, int64_t head_floats, int64_t positions,
                        int64_t num_kv_heads, bool counts_blocks) {
  KeyValues packed = {};
  packed.base = base;
  packed.is_packed = true;
  packed.row_stride = width;
  packed.head_stride = head_floats;
  packed.batch_stride = counts_blocks
                            ? key_block * width
                            : num_kv_heads * head_floats;  // packed sequences: numbers count blocks
  packed.block_positions = positions;
  return packed;
}

KeyValues plain_rows(const StridedRows &rows) {
  KeyValues plain = {};
  plain.base = rows.base;
  plain.storage = rows.storage;
  plain.batch_stride = rows.batch_stride;
  plain.row_stride = rows.row_stride;
  plain.head_stride = rows.head_stride;
  return plain;
}

void prepare_pass(MiddleStage *stage) {
  Attention &attention = stage->attention;
  const bool is_measured = attention.prepare_q.norm.is_of_all_heads;
  if (stage->k_rows.base || is_measured) {
    const Sequence *const sequences = attention.sequences;
    const int64_t kv_heads = attention.num_kv_heads, head_dim = attention.head_dim;
    KvStore kv_stores[2] = {
        storing_of(stage->k_rows, attention.k, sequences, kv_heads, head_dim, true),
        storing_of(stage->v_rows, attention.v, sequences, kv_heads, attention.head_dim_v, false)};
    kv_stores[0].prepare = attention.prepare_k;
    kv_stores[1].prepare = attention.prepare_v;
    RowMeasure measures[2] = {};
    if (is_measured) {
      const KeyValues k = is_plain(attention.k) ? attention.k : plain_rows(stage->k_rows);
      measures[0] = {k, attention.prepare_k, sequences, kv_heads, head_dim, true};
      measures[1] = {plain_rows(attention.q),
                     attention.prepare_q,
                     sequences,
                     attention.num_heads,
                     head_dim,
                     false};
    }
    run_preparation(*stage->kernels, attention, kv_stores, measures, stage->scheduler,
                    stage->counter, stage->scratch);
  }
}

void attend_pass(MiddleStage *stage) {
  prepare_pass(stage);
  run_attention(*stage->kernels, &stage->attention, stage->scheduler, stage->counter,
                stage->scratch);
  if (stage->attention.context_norm.is_given)
    run_context_norm(*stage->kernels, stage->attention, stage->scheduler, stage->counter);
}

void clear_padding(const Extent *extents, int64_t batch, int64_t rows, int64_t width, void *base,
                   int64_t batch_stride, int64_t row_stride, Storage storage) {
  const int64_t element = bytes_of(storage);
  for (int64_t b = 0; base && b < batch; ++b) {
    for (int64_t row = 0; row < rows; ++row) {
      if (row >= extents[b].first && row < extents[b].first + extents[b].count) continue;
      memset(static_cast<char *>(base) + (b * batch_stride + row * row_stride) * element, 0,
             static_cast<size_t>(width * element));
    }
  }
}

void describe_middle(const MiddleStage &stage, mha_call_info *info) {
  info->instruction_set = stage.kernels->instruction_set;
  info->num_threads = static_cast<uint32_t>(threads_of(stage.scheduler));
}

ReadHeads read_heads(const Attention &attention) {
  const float *const scales = attention.options.head_scales;
  const int64_t heads = attention.num_heads, kv_heads = attention.num_kv_heads,
                group = heads / kv_heads;
  if (!scales) return {heads, heads, kv_heads, kv_heads};
  ReadHeads read = {};
  for (int64_t kv_head = 0; kv_head < kv_heads; ++kv_head) {
    const int64_t before = read.computed;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head)
      read.computed += scales[head] != 0.0f;
    read.attended += read.computed != before;
  }
  const bool reads_all = attention.prepare_q.norm.is_of_all_heads;
  read.queries = reads_all ? heads : read.computed;
  read.new_keys = reads_all ? kv_heads : read.attended;
  return read;
}

void add_cost_of_middle(const MiddleStage &stage, mha_call_info *info) {
  const Attention &attention = stage.attention;
  const SequenceArguments &s = stage.sequences;
  const ReadHeads heads = read_heads(attention);
  info->operations +=
      2 * attending_pairs(s) * product(heads.computed, attention.head_dim + attention.head_dim_v);
  info->bytes +=
      bytes_of_score_options(attention.options, s.array_batch, heads.computed, attention.n_q,
                             std::min(s.num_columns, s.has_new_columns ? s.n_kv : pair_columns(s)));
  const int64_t stored = attention.num_kv_heads;  // a cache takes all
  if (s.cache || !attention.k.is_packed)
    info->bytes += key_value_bytes(s, attention, s.cache ? stored : heads.new_keys,
                                   s.cache ? stored : heads.attended, heads.attended);
  for (const OptionalOutput &output : optional_outputs(stage, pair_columns(s))) {
    if (output.output)
      info->bytes += static_cast<uint64_t>(output.elements.value()) * sizeof(float);
  }
}

}  // namespace mha
