#include "support/attention.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace support {

const char *NameOf(Storage type) { return kTypeNames[static_cast<int>(type)]; }

ValidRows ValidRowsOf(const AttentionSizes &sizes, int64_t b) {
  const int64_t q_first = sizes.q_first.empty() ? 0 : sizes.q_first[b],
                kv_first = sizes.kv_start.empty() ? 0 : sizes.kv_start[b];
  const int64_t n_q = sizes.q_lengths.empty() ? sizes.n_q - q_first : sizes.q_lengths[b];
  const int64_t n_kv = sizes.kv_lengths.empty() ? sizes.n_kv - kv_first : sizes.kv_lengths[b];
  return {q_first, n_q, kv_first, n_kv};
}

void PadLeft(bool keeps_lengths, AttentionSizes *sizes) {
  sizes->q_first.clear();
  sizes->kv_start.clear();
  for (const int64_t length : sizes->q_lengths) sizes->q_first.push_back(sizes->n_q - length);
  for (const int64_t length : sizes->kv_lengths) sizes->kv_start.push_back(sizes->n_kv - length);
  if (keeps_lengths) return;
  sizes->q_lengths.clear();
  sizes->kv_lengths.clear();
}

std::string Describe(const AttentionSizes &sizes) {
  std::ostringstream text;
  text << "batch " << sizes.batch << " n_q " << sizes.n_q << " n_kv " << sizes.n_kv << " heads "
       << sizes.num_heads << "/" << sizes.num_kv_heads << " head_dim " << sizes.head_dim
       << " head_dim_v " << sizes.head_dim_v << " scale " << sizes.scale;
  for (const auto &[name, numbers] :
       {std::pair{" q_start", &sizes.q_start}, std::pair{" q_lengths", &sizes.q_lengths},
        std::pair{" kv_lengths", &sizes.kv_lengths}, std::pair{" kv_start", &sizes.kv_start},
        std::pair{" q_first", &sizes.q_first}}) {
    if (!numbers->empty()) text << name;
    for (const int64_t number : *numbers) text << " " << number;
  }
  if (sizes.window_left) text << " window_left " << *sizes.window_left;
  if (sizes.window_right) text << " window_right " << *sizes.window_right;
  if (sizes.rope) text << " rope of " << sizes.rope->dims << " from " << sizes.rope->offset;
  text << " stored " << NameOf(sizes.k_type) << "/" << NameOf(sizes.v_type);
  const ScoreArrays score = sizes.score ? *sizes.score : ScoreArrays();
  const std::pair<bool, const char *> options[] = {
      {sizes.has_equal_scores, "equal scores"},
      {sizes.is_causal, "causal"},
      {sizes.kv_position != 0, "kv_position"},
      {sizes.norm.has_value(), "norm"},
      {sizes.context_norm.has_value(), "context norm"},
      {sizes.gate != GateKind::kNone, "gate"},
      {sizes.values_in_keys, "values in keys"},
      {sizes.is_in_integers, "in integers"},
      {score.softcap != 0, "softcap"},
      {!score.relative_bias.empty(), "relative bias"},
      {!score.relative_rows.values.empty(), "relative rows"},
      {!score.chosen.values.empty(), "chosen keys"},
      {!score.q_scales.empty(), "q_scales"},
      {!score.bias.values.empty(), "bias"},
      {!score.mask.values.empty(), "mask"},
      {!score.segments.of_queries.empty(), "segments"},
      {score.num_columns != 0, "num_columns"},
#define MHA_GIVEN(name, ...) {!score.name.empty(), #name},
      MHA_EACH_HEAD_ARRAY(MHA_GIVEN)};
  for (const auto &[is_given, name] : options) text << (is_given ? std::string(", ") + name : "");
  return text.str();
}

AttentionShape ShapeOf(const AttentionSizes &sizes, int64_t b) {
  const ValidRows valid = ValidRowsOf(sizes, b);
  AttentionShape shape = {valid.n_q,
                          valid.n_kv,
                          sizes.num_heads,
                          sizes.num_kv_heads,
                          sizes.head_dim,
                          sizes.head_dim_v,
                          sizes.scale,
                          sizes.is_causal,
                          sizes.q_start.empty() ? valid.n_kv - valid.n_q : sizes.q_start[b]};
  if (sizes.q_start.empty()) shape.q_start += sizes.kv_position;
  shape.kv_position = sizes.kv_position;
  shape.has_equal_scores = sizes.has_equal_scores;
  shape.has_window_left = sizes.window_left.has_value();
  shape.window_left = sizes.window_left.value_or(0);
  shape.has_window_right = sizes.window_right.has_value();
  shape.window_right = sizes.window_right.value_or(0);
  shape.k_type = sizes.k_type;
  shape.v_type = sizes.v_type;
  shape.values_in_keys = sizes.values_in_keys;
  shape.is_in_integers = sizes.is_in_integers;
  shape.gate.kind = sizes.gate;
  shape.gate.dim = sizes.gate_dim;
  return shape;
}

std::optional<Norm> NormOf(const AttentionSizes &sizes) {
  if (!sizes.norm) return std::nullopt;
  const NormArrays &from = *sizes.norm;
  const auto data = [](const std::vector<float> &x) { return x.empty() ? nullptr : x.data(); };
  return Norm{from.is_layer,     from.is_of_all_heads, from.is_after_rotation, from.is_of_values,
              from.epsilon,      data(from.q_weight),  data(from.k_weight),    data(from.q_bias),
              data(from.k_bias), from.head_stride};
}

std::optional<ContextNorm> ContextNormOf(const AttentionSizes &sizes) {
  if (!sizes.context_norm) return std::nullopt;
  const ContextNormArrays &from = *sizes.context_norm;
  const auto data = [](const std::vector<float> &x) { return x.empty() ? nullptr : x.data(); };
  return ContextNorm{from.is_layer,     from.is_of_all_heads, from.is_after_gate, from.epsilon,
                     data(from.weight), data(from.bias),      from.head_stride};
}

void FillNormal(Random *random, AttentionProblem *problem) {
  problem->q =
      random->Normals(problem->batch * problem->n_q * problem->num_heads * problem->head_dim);
  problem->k =
      random->Normals(problem->batch * problem->n_kv * problem->num_kv_heads * problem->head_dim);
  problem->v =
      random->Normals(problem->batch * problem->n_kv * problem->num_kv_heads * problem->head_dim_v);
  problem->gate_values =
      random->Normals(problem->batch * problem->n_q * problem->num_heads * problem->gate_dim, 2.0f);
}

AttentionProblem NormalAttention(const AttentionSizes &sizes, uint64_t seed) {
  Random random(seed);
  AttentionProblem problem;
  static_cast<AttentionSizes &>(problem) = sizes;
  FillNormal(&random, &problem);
  return problem;
}

std::vector<float> SliceRows(const std::vector<float> &x, int64_t b, int64_t n, int64_t width,
                             int64_t first, int64_t count) {
  const auto begin = x.begin() + (b * n + first) * width;
  return std::vector<float>(begin, begin + count * width);
}

AttentionProblem Slice(const AttentionProblem &problem, int64_t b, int64_t first, int64_t n_q,
                       int64_t n_kv) {
  AttentionProblem slice = problem;
  slice.batch = 1;
  slice.n_q = n_q;
  slice.n_kv = n_kv;
  slice.q_start.clear();
  slice.q = SliceRows(problem.q, b, problem.n_q, problem.num_heads * problem.head_dim, first, n_q);
  slice.k = SliceRows(problem.k, b, problem.n_kv, problem.num_kv_heads * problem.head_dim, 0, n_kv);
  slice.v =
      SliceRows(problem.v, b, problem.n_kv, problem.num_kv_heads * problem.head_dim_v, 0, n_kv);
  slice.gate_values = SliceRows(problem.gate_values, b, problem.n_q,
                                problem.num_heads * problem.gate_dim, first, n_q);
  return slice;
}

// Rows first .. first + count and keys 0 .. n_kv of x [batch, num_heads, n_q, all_kv], of sequence
// b; all_kv = 1 for lse.
static std::vector<float> SliceScores(const std::vector<float> &x, const AttentionSizes &sizes,
                                      int64_t all_kv, int64_t b, int64_t first, int64_t count,
                                      int64_t n_kv) {
  std::vector<float> slice;
  if (x.empty()) return slice;
  for (int64_t h = 0; h < sizes.num_heads; h++) {
    for (int64_t i = first; i < first + count; i++) {
      const auto begin = x.begin() + ((b * sizes.num_heads + h) * sizes.n_q + i) * all_kv;
      slice.insert(slice.end(), begin, begin + n_kv);
    }
  }
  return slice;
}

Outputs Slice(const Outputs &whole, const AttentionSizes &sizes, int64_t y_width, int64_t b,
              int64_t first, int64_t n_q, int64_t n_kv) {
  const auto rows = [&](const std::vector<float> &x, int64_t n, int64_t width, int64_t from,
                        int64_t count) {
    return x.empty() ? x : SliceRows(x, b, n, width, from, count);
  };
  Outputs slice;
  slice.q = rows(whole.q, sizes.n_q, sizes.num_heads * sizes.head_dim, first, n_q);
  slice.k = rows(whole.k, sizes.n_kv, sizes.num_kv_heads * sizes.head_dim, 0, n_kv);
  slice.v = rows(whole.v, sizes.n_kv, sizes.num_kv_heads * sizes.head_dim_v, 0, n_kv);
  slice.scores = SliceScores(whole.scores, sizes, sizes.n_kv, b, first, n_q, n_kv);
  slice.scaled_scores = SliceScores(whole.scaled_scores, sizes, sizes.n_kv, b, first, n_q, n_kv);
  slice.softcapped_scores =
      SliceScores(whole.softcapped_scores, sizes, sizes.n_kv, b, first, n_q, n_kv);
  slice.masked_scores = SliceScores(whole.masked_scores, sizes, sizes.n_kv, b, first, n_q, n_kv);
  slice.attention_weights =
      SliceScores(whole.attention_weights, sizes, sizes.n_kv, b, first, n_q, n_kv);
  slice.lse = SliceScores(whole.lse, sizes, 1, b, first, n_q, 1);
  slice.context = rows(whole.context, sizes.n_q, sizes.num_heads * sizes.head_dim_v, first, n_q);
  slice.y = rows(whole.y, sizes.n_q, y_width, first, n_q);
  return slice;
}

void FillPadding(const AttentionSizes &sizes, bool of_queries, int64_t width, float value,
                 std::vector<float> *x) {
  ForEachPaddingRow(sizes, of_queries,
                    [&](int64_t row) { std::fill_n(x->begin() + row * width, width, value); });
}

void FillPadding(float value, AttentionProblem *problem) {
  FillPadding(*problem, true, problem->num_heads * problem->head_dim, value, &problem->q);
  FillPadding(*problem, false, problem->num_kv_heads * problem->head_dim, value, &problem->k);
  FillPadding(*problem, false, problem->num_kv_heads * problem->head_dim_v, value, &problem->v);
  FillPadding(*problem, true, problem->num_heads * problem->gate_dim, value, &problem->gate_values);
}

}  // namespace support
