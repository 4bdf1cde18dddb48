// The middle stage; middle_stage.h says in which order its functions are called.

#include "middle_stage.h"

#include <string.h>

#include <algorithm>

#include "norm.h"
#include "score_options.h"
#include "storage.h"
#include "structs.h"

namespace mha {
namespace {

// An optional contiguous output; null if it was not asked for.
struct OptionalOutput {
  const char *name;
  float *output;
  Count elements;
};

constexpr int num_optional_outputs = 10;

struct OptionalOutputs {
  OptionalOutput outputs[num_optional_outputs];
};

// n_kv: of the outputs per pair.
OptionalOutputs optional_outputs(const MiddleStage &stage, int64_t n_kv) {
  const Attention &a = stage.attention;
  const mha_taps &taps = stage.taps;
  const Count batch(a.array_batch), heads(a.num_heads), q_rows = batch * Count(a.n_q) * heads, pairs = q_rows * Count(n_kv);
  const Count kv_rows = batch * Count(stage.sequences.n_kv) * Count(a.num_kv_heads);
  return {{{"lse", a.lse, q_rows},
           {"attention_weights", a.pairs.weights, pairs},
           {"taps.q", taps.q, q_rows * Count(a.head_dim)},
           {"taps.k", taps.k, kv_rows * Count(a.head_dim)},
           {"taps.v", taps.v, kv_rows * Count(a.head_dim_v)},
           {"taps.scores", taps.scores, pairs},
           {"taps.scaled_scores", taps.scaled_scores, pairs},
           {"taps.softcapped_scores", taps.softcapped_scores, pairs},
           {"taps.masked_scores", taps.masked_scores, pairs},
           {"taps.context", taps.context, q_rows * Count(a.head_dim_v)}}};
}

// All of them can be addressed, and those per pair are of no ring.
mha_status check_optional_outputs(Report &report, MiddleStage *stage) {
  const SequenceArguments &s = stage->sequences;
  mha_taps &taps = stage->taps;
  taps = {};
  if (stage->given_taps) {
    if (const mha_status status = read_struct(report, s.argument, "mha_taps", stage->given_taps, &taps)) return status;
  }
  Attention &attention = stage->attention;
  PairOutputs &pairs = attention.pairs;
  pairs.scores = taps.scores;
  pairs.scaled_scores = taps.scaled_scores;
  pairs.softcapped_scores = taps.softcapped_scores;
  pairs.masked_scores = taps.masked_scores;
  attention.context = taps.context;
  if (!attention.lse && !pairs.weights && !stage->given_taps) return MHA_OK;
  for (const OptionalOutput &output : optional_outputs(*stage, max_keys(s)).outputs) {
    if (output.output && (output.elements * Count(sizeof(float))).overflows()) {
      return report.fail(MHA_ERROR_TOO_LARGE, s.argument, "%s would be larger than memory can be", output.name);
    }
  }
  const char *const per_pair = pairs.weights             ? "attention_weights"
                               : pairs.scores            ? "taps.scores"
                               : pairs.scaled_scores     ? "taps.scaled_scores"
                               : pairs.softcapped_scores ? "taps.softcapped_scores"
                               : pairs.masked_scores     ? "taps.masked_scores"
                                                         : nullptr;
  if (!per_pair || !s.is_ring()) return MHA_OK;
  return report.fail(MHA_ERROR_INVALID_VALUE, s.argument,
                     "%s has a column for each position, of which a ring has no end; leave it NULL, or use a cache of another kind",
                     per_pair);
}

// What the rows of padding have in the optional outputs: zeros, and no key takes part in them.
void clear_padding_of_outputs(const MiddleStage &stage) {
  const Attention &a = stage.attention;
  const Extent *const queries = valid_queries(stage), *const keys = valid_keys(stage);
  const int64_t batch = a.array_batch, n_q = a.n_q, n_kv = a.n_kv, own_n_kv = stage.sequences.n_kv;
  const int64_t q_width = a.num_heads * a.head_dim, k_width = a.num_kv_heads * a.head_dim, v_width = a.num_kv_heads * a.head_dim_v;
  const int64_t width = a.num_heads * a.head_dim_v;
  clear_padding(queries, batch, n_q, q_width, stage.taps.q, n_q * q_width, q_width);
  clear_padding(keys, batch, own_n_kv, k_width, stage.taps.k, own_n_kv * k_width, k_width);
  clear_padding(keys, batch, own_n_kv, v_width, stage.taps.v, own_n_kv * v_width, v_width);
  clear_padding(queries, batch, n_q, width, a.context, n_q * width, width);
  float *const pairs[] = {a.pairs.weights, a.pairs.scores, a.pairs.scaled_scores, a.pairs.softcapped_scores};
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t row = 0; row < n_q; ++row) {
      if (row >= queries[b].first && row < queries[b].first + queries[b].count) continue;
      for (int64_t head = 0; head < a.num_heads; ++head) {
        const int64_t at = (b * a.num_heads + head) * n_q + row;
        if (a.lse) a.lse[at] = -__builtin_inff();
        for (float *const output : pairs) {
          if (output) memset(output + at * n_kv, 0, static_cast<size_t>(n_kv) * sizeof(float));
        }
        for (int64_t j = 0; a.pairs.masked_scores && j < n_kv; ++j) a.pairs.masked_scores[at * n_kv + j] = -__builtin_inff();
      }
    }
  }
}

}  // namespace

namespace {

// Integer scores need keys of int8, and an integer context such values: a cache's, or those that the call stores itself.
mha_status choose_storage(Report &report, MiddleStage *stage) {
  Attention &attention = stage->attention;
  const SequenceArguments &s = stage->sequences;
  const struct {
    const char *field, *rows, *type;
    Arithmetic arithmetic;
    Storage storage;
  } products[] = {{"arithmetic", "keys", "k_type", attention.options.arithmetic, attention.k.storage},
                  {"context_arithmetic", "values", "v_type", attention.options.context_arithmetic, attention.v.storage}};
  bool has_integers = false;
  for (const auto &product : products) {
    if (product.arithmetic == Arithmetic::f32) continue;
    has_integers = true;
    if (!s.cache || product.storage == Storage::int8) continue;
    return report.fail(MHA_ERROR_INVALID_VALUE, s.argument,
                       "score.%s is in integers, but the %s of the cache are not of MHA_TYPE_INT8; make it with a %s of that, or set "
                       "MHA_ARITHMETIC_F32",
                       product.field, product.rows, product.type);
  }
  if (!has_integers || s.cache) return MHA_OK;
  const auto rows_of = [](const KeyValues &x) { return StridedRows{x.base, x.batch_stride, x.row_stride, x.head_stride, x.storage}; };
  stage->stores_codes = true;
  stage->has_own_rows = !attention.k.is_packed;
  if (stage->has_own_rows && s.n_kv > 0) {
    stage->k_rows = rows_of(attention.k);
    stage->v_rows = rows_of(attention.v);
  }
  attention.k = attention.v = {};
  attention.k.is_packed = attention.v.is_packed = true;
  attention.k.storage = attention.v.storage = Storage::int8;
  return MHA_OK;
}

// Blocks of 16 positions of the keys that a call stores: of each sequence, or of packed ones together.
int64_t stored_blocks(const SequenceArguments &s) {
  return s.is_packed() ? packed_key_blocks(s.n_kv, s.batch) : blocks_of(s.n_kv, key_block);
}

// The memory of keys or values, as codes of so many numbers for each position.
void place_codes(const MiddleStage &stage, int64_t width, void *codes, void *scales, KeyValues *to) {
  const int64_t positions = stored_blocks(stage.sequences) * key_block, heads = stage.attention.num_kv_heads;
  const bool is_packed = stage.sequences.is_packed();
  to->base = codes;
  to->scales = static_cast<const float *>(scales);
  to->row_stride = width;
  to->head_stride = positions * width;
  to->batch_stride = is_packed ? key_block * width : heads * to->head_stride;  // packed sequences: numbers count blocks
  to->block_positions = positions;
  to->scale_batch_stride = is_packed ? key_block : heads * positions;
}

}  // namespace

mha_status check_middle(Report &report, MiddleStage *stage) {
  Attention &attention = stage->attention;
  SequenceArguments &s = stage->sequences;
  if (const mha_status status = check_score_options(report, stage->score, attention.num_heads, &s, &attention.options)) return status;
  if (const mha_status status = check_sequences(report, &s, attention.num_kv_heads, attention.head_dim, attention.head_dim_v))
    return status;
  if (const mha_status status = choose_storage(report, stage)) return status;
  set_window(s, &attention);
  PositionGroups &groups = attention.options.groups;
  groups.window_left = attention.window_left;
  groups.window_right = attention.window_right;
  if (groups.add_keys) attention.window_left = attention.window_right = INT64_MAX;
  if (const mha_status status = check_norm(report, stage->norm, s, &attention)) return status;
  attention.prepare_q.rotation = rotation_of(s, false);
  attention.prepare_k.rotation = rotation_of(s, true);
  const struct {
    Preparation *how;
    Storage storage;
  } prepared[] = {{&attention.prepare_q, attention.q.storage},
                  {&attention.prepare_k, stage->k_rows.storage},
                  {&attention.prepare_v, stage->v_rows.storage}};
  for (const auto &rows : prepared) rows.how->is_any = rows.how->norm.is_given || rows.how->rotation.cos || rows.storage != Storage::f32;
  return check_optional_outputs(report, stage);
}

mha_status check_arrays(Report &report, const MiddleStage &stage) {
  const Attention &attention = stage.attention;
  const uint32_t argument = stage.sequences.argument;
  if (const mha_status status = check_score_arrays(report, argument, attention.options, attention.num_heads)) return status;
  return check_sequence_arrays(report, stage.sequences);
}

void plan_middle(MiddleStage *stage, WorkspaceLayout *layout) {
  stage->counter_offset = layout->take(Count(1), sizeof(UnitCounter));
  const Count statistics = stage->attention.prepare_q.norm.is_of_all_heads ? Count(2) * Count(stage->attention.array_batch) : Count(0);
  stage->q_statistics = layout->take_floats(statistics * Count(stage->attention.n_q));
  stage->k_statistics = layout->take_floats(statistics * Count(stage->sequences.n_kv));
  stage->memory = plan_attention(&stage->attention, max_keys(stage->sequences), threads_of(stage->scheduler),
                                 stage->sequences.is_ragged(), layout);
  if (!stage->stores_codes) return;
  const Count positions = Count(stage->sequences.array_batch()) * Count(stage->attention.num_kv_heads) *
                          Count(stored_blocks(stage->sequences)) * Count(key_block);
  stage->key_codes = layout->take(positions * Count(stage->attention.head_dim), 1);
  stage->key_scales = layout->take_floats(positions);
  stage->value_codes = layout->take(positions * Count(stage->attention.head_dim_v_padded), 1);
  stage->value_scales = layout->take_floats(positions);
}

void begin_passes(MiddleStage *stage, unsigned char *workspace) {
  const AttentionMemory &memory = stage->memory;
  const SequenceArguments &s = stage->sequences;
  Attention &attention = stage->attention;
  bind_attention(memory, workspace, &attention);
  if (stage->stores_codes) {
    place_codes(*stage, attention.head_dim, workspace + stage->key_codes, workspace + stage->key_scales, &attention.k);
    place_codes(*stage, attention.head_dim_v_padded, workspace + stage->value_codes, workspace + stage->value_scales, &attention.v);
  }
  attention.reworks_context = attention.options.head_scales || attention.context || attention.gate.values.base ||
                              attention.output_storage != Storage::f32;
  stage->attention.n_kv = pair_columns(s);
  stage->attention.longest_kv = longest_keys(s);
  stage->counter = reinterpret_cast<UnitCounter *>(workspace + stage->counter_offset);
  stage->scratch = reinterpret_cast<float *>(workspace + memory.scratch);
  stage->attention.prepare_q.norm.statistics = reinterpret_cast<float *>(workspace + stage->q_statistics);
  stage->attention.prepare_k.norm.statistics = reinterpret_cast<float *>(workspace + stage->k_statistics);
  stage->in_pass = reinterpret_cast<Sequence *>(workspace + memory.sequences);
  stage->queries = s.is_ragged() ? reinterpret_cast<Extent *>(workspace + memory.query_extents) : nullptr;
  stage->keys = s.is_ragged() ? reinterpret_cast<Extent *>(workspace + memory.key_extents) : nullptr;
  stage->next_row = 0;
  if (!s.is_ragged()) return;
  if (s.is_packed()) {
    stage->packed[0] = packed_queries(s);
    stage->packed[1] = packed_keys(s);
    cut_queries(longest_queries(s), threads_of(stage->scheduler), &stage->attention);
  }
  fill_sequences(s, 0, INT64_MAX, stage->in_pass, stage->queries, stage->keys);
  clear_padding_of_outputs(*stage);
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

namespace {

KeyValues plain_rows(const StridedRows &rows) {
  KeyValues plain = {};
  plain.base = rows.base;
  plain.storage = rows.storage;
  plain.batch_stride = rows.batch_stride;
  plain.row_stride = rows.row_stride;
  plain.head_stride = rows.head_stride;
  return plain;
}

}  // namespace

void attend_pass(MiddleStage *stage) {
  Attention &attention = stage->attention;
  const bool is_measured = attention.prepare_q.norm.is_of_all_heads;
  if (stage->k_rows.base || is_measured) {
    const Sequence *const sequences = attention.sequences;
    const int64_t kv_heads = attention.num_kv_heads, head_dim = attention.head_dim;
    KvStore kv_stores[2] = {storing_of(stage->k_rows, attention.k, sequences, kv_heads, head_dim, true),
                            storing_of(stage->v_rows, attention.v, sequences, kv_heads, attention.head_dim_v, false)};
    kv_stores[0].prepare = attention.prepare_k;
    kv_stores[1].prepare = attention.prepare_v;
    for (KvStore &storing : kv_stores) {
      if (!stage->stores_codes) continue;  // a cache takes all heads
      storing.head_scales = attention.options.head_scales;
      storing.group = attention.num_heads / kv_heads;
    }
    RowMeasure measures[2] = {};
    if (is_measured) {
      const KeyValues k = attention.k.is_packed ? plain_rows(stage->k_rows) : attention.k;
      measures[0] = {k, attention.prepare_k, sequences, kv_heads, head_dim, true};
      measures[1] = {plain_rows(attention.q), attention.prepare_q, sequences, attention.num_heads, head_dim, false};
    }
    run_preparation(*stage->kernels, attention, kv_stores, measures, stage->scheduler, stage->counter, stage->scratch);
  }
  run_attention(*stage->kernels, &attention, stage->scheduler, stage->counter, stage->scratch);
}

void clear_padding(const Extent *extents, int64_t batch, int64_t rows, int64_t width, void *base, int64_t batch_stride,
                   int64_t row_stride, Storage storage) {
  const int64_t element = bytes_of(storage);
  for (int64_t b = 0; base && b < batch; ++b) {
    for (int64_t row = 0; row < rows; ++row) {
      if (row >= extents[b].first && row < extents[b].first + extents[b].count) continue;
      memset(static_cast<char *>(base) + (b * batch_stride + row * row_stride) * element, 0, static_cast<size_t>(width * element));
    }
  }
}

void describe_middle(const MiddleStage &stage, mha_call_info *info) {
  info->instruction_set = stage.kernels->instruction_set;
  info->num_threads = static_cast<uint32_t>(threads_of(stage.scheduler));
}

ReadHeads read_heads(const Attention &attention) {
  const float *const scales = attention.options.head_scales;
  const int64_t heads = attention.num_heads, kv_heads = attention.num_kv_heads, group = heads / kv_heads;
  if (!scales) return {heads, heads, kv_heads, kv_heads};
  ReadHeads read = {};
  for (int64_t kv_head = 0; kv_head < kv_heads; ++kv_head) {
    const int64_t before = read.computed;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) read.computed += scales[head] != 0.0f;
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
  info->operations += 2 * attending_pairs(s) * product(heads.computed, attention.head_dim + attention.head_dim_v);
  info->bytes += bytes_of_score_options(attention.options, s.array_batch(), heads.computed, attention.n_q,
                                        std::min(s.num_columns, s.has_new_columns ? s.n_kv : pair_columns(s)));
  const int64_t stored = attention.num_kv_heads;  // a cache takes all
  if (s.cache || !attention.k.is_packed) {
    info->bytes += key_value_bytes(s, attention, s.cache ? stored : heads.new_keys, s.cache ? stored : heads.attended, heads.attended);
  } else if (stage.has_own_rows) {
    Attention rows = {};
    rows.head_dim = attention.head_dim;
    rows.head_dim_v = attention.head_dim_v;
    rows.k.storage = stage.k_rows.storage;
    rows.v.storage = stage.v_rows.storage;
    info->bytes += key_value_bytes(s, rows, heads.new_keys, heads.attended, heads.attended);
  }
  for (const OptionalOutput &output : optional_outputs(stage, pair_columns(s)).outputs) {
    if (output.output) info->bytes += static_cast<uint64_t>(output.elements.value()) * sizeof(float);
  }
}

}  // namespace mha
