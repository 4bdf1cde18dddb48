#include "support/attention.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace support {

Outputs::Outputs() = default;
Outputs::Outputs(const Outputs &) = default;
Outputs::Outputs(Outputs &&) noexcept = default;
Outputs &Outputs::operator=(const Outputs &) = default;
Outputs &Outputs::operator=(Outputs &&) noexcept = default;
Outputs::~Outputs() = default;

Rope::Rope() = default;
Rope::Rope(const Rope &) = default;
Rope::Rope(Rope &&) noexcept = default;
Rope &Rope::operator=(const Rope &) = default;
Rope &Rope::operator=(Rope &&) noexcept = default;
Rope::~Rope() = default;

NormArrays::NormArrays() = default;
NormArrays::NormArrays(const NormArrays &) = default;
NormArrays::NormArrays(NormArrays &&) noexcept = default;
NormArrays &NormArrays::operator=(const NormArrays &) = default;
NormArrays &NormArrays::operator=(NormArrays &&) noexcept = default;
NormArrays::~NormArrays() = default;

ScoreArrays::ScoreArrays() = default;
ScoreArrays::ScoreArrays(const ScoreArrays &) = default;
ScoreArrays::ScoreArrays(ScoreArrays &&) noexcept = default;
ScoreArrays &ScoreArrays::operator=(const ScoreArrays &) = default;
ScoreArrays &ScoreArrays::operator=(ScoreArrays &&) noexcept = default;
ScoreArrays::~ScoreArrays() = default;

AttentionSizes::AttentionSizes() = default;
AttentionSizes::AttentionSizes(const AttentionSizes &) = default;
AttentionSizes::AttentionSizes(AttentionSizes &&) noexcept = default;
AttentionSizes &AttentionSizes::operator=(const AttentionSizes &) = default;
AttentionSizes &AttentionSizes::operator=(AttentionSizes &&) noexcept = default;
AttentionSizes::~AttentionSizes() = default;

AttentionProblem::AttentionProblem() = default;
AttentionProblem::AttentionProblem(const AttentionProblem &) = default;
AttentionProblem::AttentionProblem(AttentionProblem &&) noexcept = default;
AttentionProblem &AttentionProblem::operator=(const AttentionProblem &) = default;
AttentionProblem &AttentionProblem::operator=(AttentionProblem &&) noexcept = default;
AttentionProblem::~AttentionProblem() = default;

const char *NameOf(Storage type) {
  switch (type) {
    case Storage::kF32:
      return "f32";
    case Storage::kF16:
      return "f16";
    case Storage::kBf16:
      return "bf16";
    case Storage::kInt8:
      return "int8";
  }
  return "?";
}

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
       << " head_dim_v " << sizes.head_dim_v << " scale " << sizes.scale
       << (sizes.has_equal_scores ? " equal scores" : "") << (sizes.is_causal ? " causal" : "");
  if (!sizes.q_start.empty()) {
    text << " q_start";
    for (const int64_t start : sizes.q_start) text << " " << start;
  }
  for (const auto &[name, lengths] :
       {std::pair{" q_lengths", &sizes.q_lengths}, std::pair{" kv_lengths", &sizes.kv_lengths},
        std::pair{" kv_start", &sizes.kv_start}, std::pair{" q_first", &sizes.q_first}}) {
    if (!lengths->empty()) text << name;
    for (const int64_t length : *lengths) text << " " << length;
  }
  if (sizes.kv_position != 0) text << " kv_position " << sizes.kv_position;
  if (sizes.window_left) text << " window_left " << *sizes.window_left;
  if (sizes.window_right) text << " window_right " << *sizes.window_right;
  if (sizes.rope) {
    text << " rope " << (sizes.rope->is_interleaved ? "interleaved" : "half") << " dims "
         << sizes.rope->dims;
    if (sizes.rope->offset != 0) text << " from " << sizes.rope->offset;
    text << (sizes.rope->q_positions.empty() ? "" : " q_positions")
         << (sizes.rope->k_positions.empty() ? "" : " k_positions");
  }
  if (sizes.norm) {
    const NormArrays &norm = *sizes.norm;
    text << (norm.is_layer ? " layer norm" : " rms norm")
         << (norm.is_of_all_heads ? " of all heads" : "")
         << (norm.is_after_rotation ? " after rope" : "") << (norm.is_of_values ? " values" : "")
         << " head_stride " << norm.head_stride << " weights";
    for (const std::vector<float> *given :
         {&norm.q_weight, &norm.k_weight, &norm.q_bias, &norm.k_bias}) {
      text << (given->empty() ? "-" : "+");
    }
  }
  if (sizes.context_norm) {
    const ContextNormArrays &norm = *sizes.context_norm;
    text << " context" << (norm.is_layer ? " layer norm" : " rms norm")
         << (norm.is_of_all_heads ? " of all heads" : "")
         << (norm.is_after_gate ? " after gate" : "") << " head_stride " << norm.head_stride
         << " weights" << (norm.weight.empty() ? "-" : "+") << (norm.bias.empty() ? "-" : "+");
  }
  if (sizes.score) {
    const ScoreArrays &score = *sizes.score;
    const auto extents = [](const auto &pairs) {
      return std::string(pairs.by_sequence ? " b" : " 1") + (pairs.by_head ? "h" : "1") +
             (pairs.by_row ? "q" : "1");
    };
    if (score.softcap != 0) text << " softcap " << score.softcap;
    if (!score.alibi_slopes.empty()) text << " alibi";
    if (!score.sinks.empty()) text << " sinks";
    if (!score.relative_bias.empty())
      text << " relative " << score.relative_left << "+1+" << score.relative_right;
    if (!score.relative_rows.values.empty()) {
      text << " relative rows" << extents(score.relative_rows) << " " << score.relative_left
           << "+1+" << score.relative_right;
    }
    if (!score.chosen.values.empty()) {
      text << " chosen" << extents(score.chosen) << " " << score.chosen.columns << " by "
           << score.chosen_block;
    }
    if (!score.q_scales.empty()) text << " q_scales";
    if (!score.head_scales.empty()) text << " head scales";
    if (!score.bias.values.empty())
      text << " bias" << extents(score.bias) << (score.bias_is_f16 ? " f16" : "");
    if (!score.mask.values.empty()) text << " mask" << extents(score.mask);
    if (!score.groups.of_queries.empty()) {
      text << " groups" << (score.groups.add_keys ? " also" : " within")
           << (score.groups.of_keys.empty() ? "" : " of keys");
    }
    if (score.num_columns != 0) text << " num_columns " << score.num_columns;
  }
  if (sizes.gate != GateKind::kNone)
    text << (sizes.gate == GateKind::kSigmoid ? " sigmoid of " : " softplus of ") << sizes.gate_dim;
  if (sizes.k_type != Storage::kF32 || sizes.v_type != Storage::kF32) {
    text << " stored " << NameOf(sizes.k_type) << "/" << NameOf(sizes.v_type);
  }
  if (sizes.values_in_keys) text << " values in keys";
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

std::vector<float> SliceScores(const std::vector<float> &x, const AttentionSizes &sizes,
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

AttentionProblem Alone(const AttentionProblem &problem, int64_t b) {
  const ValidRows valid = ValidRowsOf(problem, b);
  AttentionProblem alone = problem;
  alone.batch = 1;
  alone.n_q = valid.n_q;
  alone.n_kv = valid.n_kv;
  alone.q_lengths.clear();
  alone.kv_lengths.clear();
  alone.kv_start.clear();
  alone.q_first.clear();
  alone.q = SliceRows(problem.q, b, problem.n_q, problem.num_heads * problem.head_dim,
                      valid.q_first, valid.n_q);
  alone.k = SliceRows(problem.k, b, problem.n_kv, problem.num_kv_heads * problem.head_dim,
                      valid.kv_first, valid.n_kv);
  alone.v = SliceRows(problem.v, b, problem.n_kv, problem.num_kv_heads * problem.head_dim_v,
                      valid.kv_first, valid.n_kv);
  alone.gate_values = SliceRows(problem.gate_values, b, problem.n_q,
                                problem.num_heads * problem.gate_dim, valid.q_first, valid.n_q);
  if (!problem.q_start.empty()) alone.q_start = {problem.q_start[b]};
  if (problem.rope) {
    const auto slice = [&](const std::vector<int64_t> &x, int64_t n, int64_t first, int64_t count) {
      return x.empty() ? x
                       : std::vector<int64_t>(x.begin() + b * n + first,
                                              x.begin() + b * n + first + count);
    };
    alone.rope->q_positions =
        slice(problem.rope->q_positions, problem.n_q, valid.q_first, valid.n_q);
    alone.rope->k_positions =
        slice(problem.rope->k_positions, problem.n_kv, valid.kv_first, valid.n_kv);
  }
  return alone;
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
