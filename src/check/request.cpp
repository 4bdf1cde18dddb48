// Everything that calls of the attention have in common is checked here, in the order in which its
// parts depend on each other: scores decide whether positions matter, sequences need to know that,
// and norms and outputs need the shape.

#include "request.h"

#include "../base/structs.h"
#include "../storage.h"
#include "cache.h"
#include "norm.h"
#include "rules.h"
#include "scores.h"
#include "sequences.h"

namespace mha {

// Names and sizes of all optional outputs, for checks and costs.
std::array<OptionalOutput, 11> optional_outputs(const AttentionRequest &r,
                                                const mha_outputs &outputs,
                                                const SequenceArguments &s, int64_t columns) {
  const Count batch(r.array_batch), heads(r.num_heads), q_rows = batch * Count(r.n_q) * heads,
                                                        pairs = q_rows * Count(columns);
  const Count kv_rows = batch * Count(s.n_kv) * Count(r.num_kv_heads);
  return {{{"outputs.lse", outputs.lse, q_rows},
           {"outputs.partials", outputs.partials, q_rows * Count(partial_head + r.head_dim_v)},
           {"outputs.q", outputs.q, q_rows * Count(r.head_dim)},
           {"outputs.k", outputs.k, kv_rows * Count(r.head_dim)},
           {"outputs.v", outputs.v, kv_rows * Count(r.head_dim_v)},
           {"outputs.context", outputs.context, q_rows * Count(r.head_dim_v)},
           {"outputs.scores", outputs.scores, pairs, true},
           {"outputs.scaled_scores", outputs.scaled_scores, pairs, true},
           {"outputs.softcapped_scores", outputs.softcapped_scores, pairs, true},
           {"outputs.masked_scores", outputs.masked_scores, pairs, true},
           {"outputs.attention_weights", outputs.attention_weights, pairs, true}}};
}

namespace {

// Optional outputs fit into the address space. Outputs per pair have a number for every key, which
// lists of chosen keys and rings do not keep.
mha_status check_optional_outputs(Report report, const AttentionRequest &request,
                                  const mha_outputs &given, const SequenceArguments &s) {
  const std::array<OptionalOutput, 11> outputs = optional_outputs(request, given, s, max_keys(s));
  for (const OptionalOutput &output : outputs) {
    if (output.output)
      MHA_TRY(Rules{report}.fits(output.name, output.elements * Count(sizeof(float))));
  }
  for (const OptionalOutput &output : outputs) {
    if (output.output && output.is_per_pair && request.options.chosen.lists.base)
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

// Integers are multiplied by integers: keys and values have to be stored as such.
mha_status check_arithmetic(Report report, const AttentionRequest &request, bool has_values) {
  if (!request.is_in_integers) return MHA_OK;
  const Storage k = request.k.storage, v = request.v.storage;
  if (k != Storage::int8 || (has_values && v != Storage::int8 && v != Storage::int4))
    return report.invalid(
        "attention_arithmetic is MHA_ARITHMETIC_INT16, but the cache stores keys as MHA_TYPE %u "
        "and values as %u; use a cache with k_type MHA_TYPE_INT8 (4) and v_type MHA_TYPE_INT8 (4) "
        "or MHA_TYPE_INT4 (5)",
        type_of(k), type_of(v));
  return MHA_OK;
}

// How rows are prepared on their way.
Preparation preparation_of(const Norm &norm, const Rotation &rotation, Storage rows) {
  return {norm, rotation, norm.is_given || rotation.cos || rows != Storage::f32};
}

}  // namespace

mha_status read_call(Report report, const mha_call &call, bool is_self, int64_t first_position,
                     SequenceArguments *sequences, mha_outputs *outputs) {
  MHA_TRY(check_fields(Rules{report}, call));
  MHA_TRY(check_optional_cache(report, call.cache));
  MHA_TRY(check_optional_cache(report, call.cache_read, "cache_read"));
  MHA_TRY(read_sequences(report, call, is_self, first_position, sequences));
  *outputs = {};
  return call.outputs ? read_struct(report, "mha_outputs", call.outputs, outputs) : MHA_OK;
}

mha_status check_request(Report report, const mha_call &call, const RequestRows &rows,
                         const mha_outputs &outputs, SequenceArguments *sequences,
                         AttentionRequest *request) {
  SequenceArguments &s = *sequences;
  AttentionRequest &r = *request;
  MHA_TRY(check_score_options(report, {call.score, call.score_arrays}, r.num_heads, r.num_kv_heads,
                              s, &s.scored, &r.options));
  MHA_TRY(check_arithmetic(report, r, rows.has_values));
  MHA_TRY(check_sequences(report, s, r.num_kv_heads, r.head_dim, r.head_dim_v, &s.rope));
  Norms norms;
  MHA_TRY(check_norm(report, call.norm, s, r, rows.has_output_weights, &norms));
  // From here on everything is sound that needs no array, and the request is written.
  r.batch = s.batch;
  r.array_batch = s.array_batch;
  r.n_q = s.n_q;
  r.heads_per_kv = quotient(r.num_heads, r.num_kv_heads);
  if (!rows.has_values) r.head_dim_v = 0;
  if (s.flags & MHA_EQUAL_SCORES) r.scale = 0.0f;
  const Window window = window_of(s);
  r.window_left = r.options.segments.add_keys ? INT64_MAX : window.left;
  r.window_right = r.options.segments.add_keys ? INT64_MAX : window.right;
  r.prepare_q = preparation_of(norms.q, rotation_of(s, false), rows.q);
  r.prepare_k = preparation_of(norms.k, rotation_of(s, true), rows.k);
  r.prepare_v = preparation_of(norms.v, {}, rows.v);
  r.context_norm = norms.context;
  r.gates_late = norms.gates_late;
  r.lse = outputs.lse;
  r.context = outputs.context;
  r.partials = outputs.partials;
  r.pairs = {outputs.scores, outputs.scaled_scores, outputs.softcapped_scores,
             outputs.masked_scores, outputs.attention_weights};
  s.reads_all_keys =
      r.options.segments.add_keys || r.options.chosen.lists.base || r.pairs.has_any();
  return call.outputs ? check_optional_outputs(report, r, outputs, s) : MHA_OK;
}

mha_status check_array_contents(Report report, const SequenceArguments &s,
                                AttentionRequest *request) {
  ScoreOptions &options = request->options;
  const int64_t heads = request->num_heads;
  MHA_TRY(check_arrays<mha_score_options>(Rules{report, "score."}, options, heads));
  MHA_TRY(check_sequence_arrays(report, s));
  MHA_TRY(resolve_score_strides(report, s, heads, &options));
  return check_chosen_entries(report, s, options.chosen, request->num_kv_heads);
}

AttentionRequest with_rows(const AttentionRequest &request, const KeyValues &k,
                           const KeyValues &v) {
  AttentionRequest r = request;
  r.k = k;
  r.v = v;
  return r;
}

}  // namespace mha
