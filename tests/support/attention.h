// Attention problems: the sizes of a call, who attends to whom, and the inputs.
#ifndef MHA_TESTS_SUPPORT_ATTENTION_H
#define MHA_TESTS_SUPPORT_ATTENTION_H

#include <algorithm>
#include <cstdint>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "support/outputs.h"
#include "support/random.h"
#include "support/shapes.h"

namespace support {

inline const char *NameOf(Storage type) {
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

// A rotation of queries and keys.
struct Rope {
  bool is_interleaved = false;
  bool use_defaults = false;  // give 0 for dims = head_dim and table_stride = dims / 2
  int64_t dims = 0;
  int64_t num_positions = 0;
  int64_t table_stride = 0;  // from one position to the next; the floats between are NaN
  std::vector<float> cos, sin;
  std::vector<int64_t> q_positions;  // [batch, n_q]; empty = not given
  std::vector<int64_t> k_positions;  // [batch, n_kv]; empty = not given
};

// A norm of queries, keys and values; the struct of mha.h. Weights and biases are [head_dim] where head_stride is 0, else [heads,
// head_stride], of which head_dim are looked at.
struct NormArrays {
  bool is_layer = false, is_of_all_heads = false, is_after_rotation = false, is_of_values = false;
  bool use_defaults = false;  // give 0 for the stride of all heads
  float epsilon = 1e-6f;
  int64_t head_stride = 0;
  std::vector<float> q_weight, k_weight, q_bias, k_bias;  // empty = not given
};

// A number for each pair of row and key, [batch, num_heads, n_q, n_kv], of which the first three extents may be 1 instead.
template <typename T>
struct Pairs {
  bool by_sequence = false, by_head = false, by_row = true;
  std::vector<T> values;  // empty = not given
  int64_t columns = 0;    // 0 = n_kv. More where a call is given them: the rest of a row is not looked at
};

// Position groups.
struct Groups {
  bool add_keys = false;             // MHA_GROUPS_ALSO
  bool by_sequence = false;          // else the same for all
  std::vector<int64_t> of_queries;   // [batch, n_q]; empty = none
  std::vector<int64_t> of_keys;      // [batch, n_kv]; empty = of_queries. For the specification alone also kNoGroup
  int64_t columns = 0;               // of a row of of_keys; 0 = n_kv
};

// What changes scores; the struct of mha.h.
struct ScoreArrays {
  float softcap = 0;
  std::vector<float> alibi_slopes, sinks;  // [num_heads]; empty = not given
  std::vector<float> head_scales;          // likewise
  Pairs<float> bias;
  bool bias_is_f16 = false;  // it is given so; the numbers are exact in f16
  Pairs<uint8_t> mask;
  Groups groups;
  int64_t num_columns = 0;  // of bias, mask and groups; 0 = not given
  std::vector<float> relative_bias;  // [num_heads, relative_left + 1 + relative_right]; empty = not given
  int64_t relative_left = 0;
  int64_t relative_right = 0;
  std::vector<float> q_scales;  // [batch, n_q] or [n_q]; empty = not given
};

// The sizes that the layer and its middle stage have in common, and who attends to whom.
struct AttentionSizes {
  int64_t batch = 1;
  int64_t n_q = 1;
  int64_t n_kv = 1;
  int64_t num_heads = 1;
  int64_t num_kv_heads = 1;
  int64_t head_dim = 1;
  int64_t head_dim_v = 1;
  float scale = 0;
  bool is_causal = false;
  std::vector<int64_t> q_start;     // [batch]; empty = not given
  std::vector<int64_t> q_lengths;   // [batch]; empty = not given
  std::vector<int64_t> kv_lengths;  // [batch]; empty = not given
  std::vector<int64_t> kv_start;    // [batch]; empty = not given
  std::vector<int64_t> q_first;     // [batch]: row of the first valid query, which no call is told; empty = 0
  bool padding_left = false;
  bool keys_by_position = false;  // the first keys are valid whatever padding_left says, as in a cache
  std::optional<int64_t> window_left, window_right;
  std::optional<Rope> rope;
  std::optional<NormArrays> norm;
  std::optional<ScoreArrays> score;
  GateKind gate = GateKind::kNone;
  int64_t gate_dim = 0;
  std::vector<float> gate_values;  // [batch, n_q, num_heads, gate_dim]; of mha_attention
  Storage k_type = Storage::kF32;  // of the cache that the keys and values are taken from
  Storage v_type = Storage::kF32;
};

// Where the valid rows of sequence b are.
struct ValidRows {
  int64_t q_first, n_q, kv_first, n_kv;
};

inline ValidRows ValidRowsOf(const AttentionSizes &sizes, int64_t b) {
  const int64_t q_first = sizes.q_first.empty() ? 0 : sizes.q_first[b], kv_first = sizes.kv_start.empty() ? 0 : sizes.kv_start[b];
  const int64_t n_q = sizes.q_lengths.empty() ? sizes.n_q - q_first : sizes.q_lengths[b];
  const int64_t n_kv = sizes.kv_lengths.empty() ? sizes.n_kv - kv_first : sizes.kv_lengths[b];
  if (sizes.padding_left) return {sizes.n_q - n_q, n_q, sizes.keys_by_position ? 0 : sizes.n_kv - n_kv, n_kv};
  return {q_first, n_q, kv_first, n_kv};
}

struct AttentionProblem : AttentionSizes {
  std::vector<float> q;  // [batch, n_q, num_heads, head_dim]
  std::vector<float> k;  // [batch, n_kv, num_kv_heads, head_dim]
  std::vector<float> v;  // [batch, n_kv, num_kv_heads, head_dim_v]
};

inline std::string Describe(const AttentionSizes &sizes) {
  std::ostringstream text;
  text << "batch " << sizes.batch << " n_q " << sizes.n_q << " n_kv " << sizes.n_kv << " heads " << sizes.num_heads << "/"
       << sizes.num_kv_heads << " head_dim " << sizes.head_dim << " head_dim_v " << sizes.head_dim_v << " scale " << sizes.scale
       << (sizes.is_causal ? " causal" : "");
  if (!sizes.q_start.empty()) {
    text << " q_start";
    for (const int64_t start : sizes.q_start) text << " " << start;
  }
  for (const auto &[name, lengths] : {std::pair{" q_lengths", &sizes.q_lengths}, std::pair{" kv_lengths", &sizes.kv_lengths},
                                      std::pair{" kv_start", &sizes.kv_start}, std::pair{" q_first", &sizes.q_first}}) {
    if (!lengths->empty()) text << name;
    for (const int64_t length : *lengths) text << " " << length;
  }
  if (sizes.padding_left) text << " padding left";
  if (sizes.window_left) text << " window_left " << *sizes.window_left;
  if (sizes.window_right) text << " window_right " << *sizes.window_right;
  if (sizes.rope) {
    text << " rope " << (sizes.rope->is_interleaved ? "interleaved" : "half") << " dims " << sizes.rope->dims
         << (sizes.rope->q_positions.empty() ? "" : " q_positions") << (sizes.rope->k_positions.empty() ? "" : " k_positions");
  }
  if (sizes.norm) {
    const NormArrays &norm = *sizes.norm;
    text << (norm.is_layer ? " layer norm" : " rms norm") << (norm.is_of_all_heads ? " of all heads" : "")
         << (norm.is_after_rotation ? " after rope" : "") << (norm.is_of_values ? " values" : "") << " head_stride " << norm.head_stride
         << " weights";
    for (const std::vector<float> *given : {&norm.q_weight, &norm.k_weight, &norm.q_bias, &norm.k_bias}) {
      text << (given->empty() ? "-" : "+");
    }
  }
  if (sizes.score) {
    const ScoreArrays &score = *sizes.score;
    const auto extents = [](const auto &pairs) {
      return std::string(pairs.by_sequence ? " b" : " 1") + (pairs.by_head ? "h" : "1") + (pairs.by_row ? "q" : "1");
    };
    if (score.softcap != 0) text << " softcap " << score.softcap;
    if (!score.alibi_slopes.empty()) text << " alibi";
    if (!score.sinks.empty()) text << " sinks";
    if (!score.relative_bias.empty()) text << " relative " << score.relative_left << "+1+" << score.relative_right;
    if (!score.q_scales.empty()) text << " q_scales";
    if (!score.head_scales.empty()) text << " head scales";
    if (!score.bias.values.empty()) text << " bias" << extents(score.bias) << (score.bias_is_f16 ? " f16" : "");
    if (!score.mask.values.empty()) text << " mask" << extents(score.mask);
    if (!score.groups.of_queries.empty()) {
      text << " groups" << (score.groups.add_keys ? " also" : " within") << (score.groups.by_sequence ? " b" : " 1")
           << (score.groups.of_keys.empty() ? "" : " of keys");
    }
    if (score.num_columns != 0) text << " num_columns " << score.num_columns;
  }
  if (sizes.gate != GateKind::kNone) text << (sizes.gate == GateKind::kSigmoid ? " sigmoid of " : " softplus of ") << sizes.gate_dim;
  if (sizes.k_type != Storage::kF32 || sizes.v_type != Storage::kF32) {
    text << " stored " << NameOf(sizes.k_type) << "/" << NameOf(sizes.v_type);
  }
  return text.str();
}

// The shape of sequence b, its valid rows alone. The rotation, if there is one, is SpecifySequence's to set.
inline AttentionShape ShapeOf(const AttentionSizes &sizes, int64_t b) {
  const ValidRows valid = ValidRowsOf(sizes, b);
  AttentionShape shape = {valid.n_q,          valid.n_kv,      sizes.num_heads,
                          sizes.num_kv_heads, sizes.head_dim,  sizes.head_dim_v,
                          sizes.scale,        sizes.is_causal, sizes.q_start.empty() ? valid.n_kv - valid.n_q : sizes.q_start[b]};
  shape.has_window_left = sizes.window_left.has_value();
  shape.window_left = sizes.window_left.value_or(0);
  shape.has_window_right = sizes.window_right.has_value();
  shape.window_right = sizes.window_right.value_or(0);
  shape.k_type = sizes.k_type;
  shape.v_type = sizes.v_type;
  shape.gate.kind = sizes.gate;
  shape.gate.dim = sizes.gate_dim;
  return shape;
}

// Calls function(rotation) with the rotation of sequence b's valid rows, or with null.
template <typename Function>
void WithRotation(const AttentionSizes &sizes, int64_t b, const Function &function) {
  if (!sizes.rope) return function(static_cast<const Rotation *>(nullptr));
  const Rope &rope = *sizes.rope;
  const ValidRows valid = ValidRowsOf(sizes, b);
  const Rotation rotation = {rope.is_interleaved,
                             rope.dims,
                             rope.cos.data(),
                             rope.sin.data(),
                             rope.table_stride,
                             rope.q_positions.empty() ? nullptr : rope.q_positions.data() + b * sizes.n_q + valid.q_first,
                             rope.k_positions.empty() ? nullptr : rope.k_positions.data() + b * sizes.n_kv + valid.kv_first};
  function(&rotation);
}

// The norm of all sequences, if there is one.
inline std::optional<Norm> NormOf(const AttentionSizes &sizes) {
  if (!sizes.norm) return std::nullopt;
  const NormArrays &from = *sizes.norm;
  const auto data = [](const std::vector<float> &x) { return x.empty() ? nullptr : x.data(); };
  return Norm{from.is_layer,       from.is_of_all_heads, from.is_after_rotation, from.is_of_values, from.epsilon,
              data(from.q_weight), data(from.k_weight),  data(from.q_bias),      data(from.k_bias), from.head_stride};
}

// Of the pairs, those of the valid rows and keys of sequence b, [num_heads, n_q, n_kv].
template <typename T>
std::vector<T> DensePairs(const AttentionSizes &sizes, const Pairs<T> &pairs, int64_t b) {
  std::vector<T> dense;
  if (pairs.values.empty()) return dense;
  const ValidRows valid = ValidRowsOf(sizes, b);
  const int64_t rows = pairs.by_row ? sizes.n_q : 1, heads = pairs.by_head ? sizes.num_heads : 1;
  for (int64_t h = 0; h < sizes.num_heads; h++) {
    for (int64_t i = 0; i < valid.n_q; i++) {
      const int64_t sequence = pairs.by_sequence ? b : 0, head = pairs.by_head ? h : 0, row = pairs.by_row ? valid.q_first + i : 0;
      const auto from = pairs.values.begin() + ((sequence * heads + head) * rows + row) * sizes.n_kv + valid.kv_first;
      dense.insert(dense.end(), from, from + valid.n_kv);
    }
  }
  return dense;
}

// Calls function(options) with the score options of sequence b's valid rows, or with null.
template <typename Function>
void WithScoreOptions(const AttentionSizes &sizes, int64_t b, const Function &function) {
  if (!sizes.score) return function(static_cast<const ScoreOptions *>(nullptr));
  const ScoreArrays &score = *sizes.score;
  const std::vector<float> bias = DensePairs(sizes, score.bias, b);
  const std::vector<uint8_t> mask = DensePairs(sizes, score.mask, b);
  const auto data = [](const auto &x) { return x.empty() ? nullptr : x.data(); };
  ScoreOptions options = {score.softcap, data(score.alibi_slopes), data(score.sinks), data(bias), data(mask)};
  const Groups &groups = score.groups;
  const ValidRows valid = ValidRowsOf(sizes, b);
  if (!groups.of_queries.empty()) {
    const int64_t sequence = groups.by_sequence ? b : 0;
    options.q_groups = groups.of_queries.data() + sequence * sizes.n_q + valid.q_first;
    options.kv_groups = (groups.of_keys.empty() ? groups.of_queries : groups.of_keys).data() + sequence * sizes.n_kv + valid.kv_first;
    options.groups_add_keys = groups.add_keys;
  }
  if (score.num_columns != 0) options.num_keys = std::max<int64_t>(0, score.num_columns - valid.kv_first);
  options.relative_bias = data(score.relative_bias);
  options.relative_left = score.relative_left;
  options.relative_right = score.relative_right;
  const bool has_own_scales = static_cast<int64_t>(score.q_scales.size()) > sizes.n_q;
  const int64_t first_scale = (has_own_scales ? b * sizes.n_q : 0) + valid.q_first;
  if (!score.q_scales.empty()) options.q_scales = score.q_scales.data() + first_scale;
  options.head_scales = data(score.head_scales);
  function(&options);
}

inline void FillNormal(Random *random, AttentionProblem *problem) {
  problem->q = random->Normals(problem->batch * problem->n_q * problem->num_heads * problem->head_dim);
  problem->k = random->Normals(problem->batch * problem->n_kv * problem->num_kv_heads * problem->head_dim);
  problem->v = random->Normals(problem->batch * problem->n_kv * problem->num_kv_heads * problem->head_dim_v);
  problem->gate_values = random->Normals(problem->batch * problem->n_q * problem->num_heads * problem->gate_dim, 2.0f);
}

// A problem of these sizes.
inline AttentionProblem NormalAttention(const AttentionSizes &sizes, uint64_t seed = 1) {
  Random random(seed);
  AttentionProblem problem;
  static_cast<AttentionSizes &>(problem) = sizes;
  FillNormal(&random, &problem);
  return problem;
}

// Rows first .. first + count of x [batch, n, width], of sequence b.
inline std::vector<float> SliceRows(const std::vector<float> &x, int64_t b, int64_t n, int64_t width, int64_t first, int64_t count) {
  const auto begin = x.begin() + (b * n + first) * width;
  return std::vector<float>(begin, begin + count * width);
}

// Sequence b's query rows first .. first + n_q with its first n_kv keys. q_start, where needed, is the caller's to set.
inline AttentionProblem Slice(const AttentionProblem &problem, int64_t b, int64_t first, int64_t n_q, int64_t n_kv) {
  AttentionProblem slice = problem;
  slice.batch = 1;
  slice.n_q = n_q;
  slice.n_kv = n_kv;
  slice.q_start.clear();
  slice.q = SliceRows(problem.q, b, problem.n_q, problem.num_heads * problem.head_dim, first, n_q);
  slice.k = SliceRows(problem.k, b, problem.n_kv, problem.num_kv_heads * problem.head_dim, 0, n_kv);
  slice.v = SliceRows(problem.v, b, problem.n_kv, problem.num_kv_heads * problem.head_dim_v, 0, n_kv);
  slice.gate_values = SliceRows(problem.gate_values, b, problem.n_q, problem.num_heads * problem.gate_dim, first, n_q);
  return slice;
}

// Rows first .. first + count and keys 0 .. n_kv of x [batch, num_heads, n_q, all_kv], of sequence b; all_kv = 1 for lse.
inline std::vector<float> SliceScores(const std::vector<float> &x, const AttentionSizes &sizes, int64_t all_kv, int64_t b, int64_t first,
                                      int64_t count, int64_t n_kv) {
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

// What a call of Slice(...) has to give, out of what the whole gave. y_width is the width of a row of y.
inline Outputs Slice(const Outputs &whole, const AttentionSizes &sizes, int64_t y_width, int64_t b, int64_t first, int64_t n_q,
                     int64_t n_kv) {
  const auto rows = [&](const std::vector<float> &x, int64_t n, int64_t width, int64_t from, int64_t count) {
    return x.empty() ? x : SliceRows(x, b, n, width, from, count);
  };
  Outputs slice;
  slice.q = rows(whole.q, sizes.n_q, sizes.num_heads * sizes.head_dim, first, n_q);
  slice.k = rows(whole.k, sizes.n_kv, sizes.num_kv_heads * sizes.head_dim, 0, n_kv);
  slice.v = rows(whole.v, sizes.n_kv, sizes.num_kv_heads * sizes.head_dim_v, 0, n_kv);
  slice.scores = SliceScores(whole.scores, sizes, sizes.n_kv, b, first, n_q, n_kv);
  slice.scaled_scores = SliceScores(whole.scaled_scores, sizes, sizes.n_kv, b, first, n_q, n_kv);
  slice.softcapped_scores = SliceScores(whole.softcapped_scores, sizes, sizes.n_kv, b, first, n_q, n_kv);
  slice.masked_scores = SliceScores(whole.masked_scores, sizes, sizes.n_kv, b, first, n_q, n_kv);
  slice.attention_weights = SliceScores(whole.attention_weights, sizes, sizes.n_kv, b, first, n_q, n_kv);
  slice.lse = SliceScores(whole.lse, sizes, 1, b, first, n_q, 1);
  slice.context = rows(whole.context, sizes.n_q, sizes.num_heads * sizes.head_dim_v, first, n_q);
  slice.y = rows(whole.y, sizes.n_q, y_width, first, n_q);
  return slice;
}

// Sequence b as a problem of its own, without its padding.
inline AttentionProblem Alone(const AttentionProblem &problem, int64_t b) {
  const ValidRows valid = ValidRowsOf(problem, b);
  AttentionProblem alone = problem;
  alone.batch = 1;
  alone.n_q = valid.n_q;
  alone.n_kv = valid.n_kv;
  alone.q_lengths.clear();
  alone.kv_lengths.clear();
  alone.kv_start.clear();
  alone.q_first.clear();
  alone.padding_left = false;
  alone.q = SliceRows(problem.q, b, problem.n_q, problem.num_heads * problem.head_dim, valid.q_first, valid.n_q);
  alone.k = SliceRows(problem.k, b, problem.n_kv, problem.num_kv_heads * problem.head_dim, valid.kv_first, valid.n_kv);
  alone.v = SliceRows(problem.v, b, problem.n_kv, problem.num_kv_heads * problem.head_dim_v, valid.kv_first, valid.n_kv);
  alone.gate_values = SliceRows(problem.gate_values, b, problem.n_q, problem.num_heads * problem.gate_dim, valid.q_first, valid.n_q);
  if (!problem.q_start.empty()) alone.q_start = {problem.q_start[b]};
  if (problem.rope) {
    const auto slice = [&](const std::vector<int64_t> &x, int64_t n, int64_t first, int64_t count) {
      return x.empty() ? x : std::vector<int64_t>(x.begin() + b * n + first, x.begin() + b * n + first + count);
    };
    alone.rope->q_positions = slice(problem.rope->q_positions, problem.n_q, valid.q_first, valid.n_q);
    alone.rope->k_positions = slice(problem.rope->k_positions, problem.n_kv, valid.kv_first, valid.n_kv);
  }
  return alone;
}

// Calls function(row) with each row of x [batch, n, width] that is padding.
template <typename Function>
void ForEachPaddingRow(const AttentionSizes &sizes, bool of_queries, const Function &function) {
  for (int64_t b = 0; b < sizes.batch; b++) {
    const ValidRows valid = ValidRowsOf(sizes, b);
    const int64_t n = of_queries ? sizes.n_q : sizes.n_kv, first = of_queries ? valid.q_first : valid.kv_first;
    for (int64_t row = 0; row < n; row++) {
      if (row < first || row >= first + (of_queries ? valid.n_q : valid.n_kv)) function(b * n + row);
    }
  }
}

inline void FillPadding(const AttentionSizes &sizes, bool of_queries, int64_t width, float value, std::vector<float> *x) {
  ForEachPaddingRow(sizes, of_queries, [&](int64_t row) { std::fill_n(x->begin() + row * width, width, value); });
}

inline void FillPadding(float value, AttentionProblem *problem) {
  FillPadding(*problem, true, problem->num_heads * problem->head_dim, value, &problem->q);
  FillPadding(*problem, false, problem->num_kv_heads * problem->head_dim, value, &problem->k);
  FillPadding(*problem, false, problem->num_kv_heads * problem->head_dim_v, value, &problem->v);
  FillPadding(*problem, true, problem->num_heads * problem->gate_dim, value, &problem->gate_values);
}

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_ATTENTION_H
