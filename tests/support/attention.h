// Attention problems: the sizes of a call, who attends to whom, and the inputs.
#ifndef MHA_TESTS_SUPPORT_ATTENTION_H
#define MHA_TESTS_SUPPORT_ATTENTION_H

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "support/outputs.h"
#include "support/random.h"
#include "support/shapes.h"

namespace support {

const char *NameOf(Storage type);
inline bool HasCodes(Storage type) { return type >= Storage::kInt8; }

// A rotation of queries and keys.
struct Rope {
  bool is_interleaved = false;
  bool use_defaults = false;  // give 0 for dims = head_dim - offset and table_stride = dims / 2
  int64_t dims = 0;
  int64_t offset = 0;
  int64_t num_positions = 0;
  int64_t table_stride = 0;  // from one position to the next; the floats between are NaN
  std::vector<float> cos, sin;
  std::vector<int64_t> q_positions;  // [batch, n_q]; empty = not given
  std::vector<int64_t> k_positions;  // [batch, n_kv]; empty = not given
};

// A norm of queries, keys and values; the struct of mha.h. Weights and biases are [head_dim] where
// head_stride is 0, else [heads, head_stride], of which head_dim are looked at.
struct NormArrays {
  bool is_layer = false, is_of_all_heads = false, is_after_rotation = false, is_of_values = false;
  bool use_defaults = false;  // give 0 for the stride of all heads
  float epsilon = 1e-6f;
  int64_t head_stride = 0;
  std::vector<float> q_weight, k_weight, q_bias, k_bias;  // empty = not given
};

// A norm of the context.
struct ContextNormArrays {
  bool is_layer = false, is_of_all_heads = false, is_after_gate = false;
  bool use_defaults = false;
  float epsilon = 1e-6f;
  int64_t head_stride = 0;
  std::vector<float> weight, bias;
};

// A number for each pair of row and key, [batch, num_heads, n_q, n_kv], of which the first three
// extents may be 1 instead.
template <typename T>
struct Pairs {
  bool by_sequence = false, by_head = false, by_row = true;
  std::vector<T> values;  // empty = not given
  // 0 = n_kv. More where a call is given them: the rest of a row is not looked at.
  int64_t columns = 0;
  int64_t heads = 0;  // 0 = num_heads
  int64_t heads_of(int64_t num_heads) const { return heads != 0 ? heads : num_heads; }
};

// Position segments.
struct Segments {
  bool add_keys = false;            // MHA_SEGMENTS_ALSO
  std::vector<int64_t> of_queries;  // [batch, n_q]; empty = none
  std::vector<int64_t>
      of_keys;  // [batch, n_kv]; empty = of_queries. For the specification alone also kNoSegment
};

// What changes scores; the struct of mha.h.
struct ScoreArrays {
  float softcap = 0;
#define MHA_HEAD_VECTOR(name, ...) std::vector<float> name;  // [num_heads]; empty = not given
  MHA_EACH_HEAD_ARRAY(MHA_HEAD_VECTOR)
  Pairs<float> bias;
  bool bias_is_f16 = false;  // it is given so; the numbers are exact in f16
  Pairs<uint8_t> mask;
  Segments segments;
  int64_t num_columns = 0;  // of bias, mask and segments; 0 = not given
  std::vector<float>
      relative_bias;  // [num_heads, relative_left + 1 + relative_right]; empty = not given
  int64_t relative_left = 0;
  int64_t relative_right = 0;
  Pairs<float> relative_rows;  // in place of relative_bias, with its distances for keys
  Pairs<int32_t> chosen;       // lists of chosen keys, with their entries for keys; of kv heads
  int64_t chosen_block = 1;
  std::vector<float> q_scales;  // [batch, n_q]; empty = not given
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
  bool has_equal_scores = false;
  bool is_causal = false;
  std::vector<int64_t> q_start;     // [batch]; empty = not given
  std::vector<int64_t> q_lengths;   // [batch]; empty = not given
  std::vector<int64_t> kv_lengths;  // [batch]; empty = not given
  std::vector<int64_t> kv_start;    // [batch]: row of the first valid key; empty = not given
  std::vector<int64_t> q_first;     // [batch]: row of the first valid query, in self-attention the
                                    // same; empty = not given
  std::optional<int64_t> window_left, window_right;
  std::optional<Rope> rope;
  std::optional<NormArrays> norm;
  std::optional<ContextNormArrays> context_norm;  // of mha_forward
  std::optional<ScoreArrays> score;
  GateKind gate = GateKind::kNone;
  int64_t kv_position = 0;  // of the first key; of mha_attention
  int64_t gate_dim = 0;
  std::vector<float> gate_values;  // [batch, n_q, num_heads, gate_dim]; of mha_attention
  Storage k_type = Storage::kF32;  // of the cache that the keys and values are taken from
  Storage v_type = Storage::kF32;
  bool values_in_keys = false;  // of the cache; then v is looked at by nobody
  bool is_in_integers = false;  // over k_type and v_type, which the call rounds to without a cache
};

// Where the valid rows of sequence b are.
struct ValidRows {
  int64_t q_first, n_q, kv_first, n_kv;
};

ValidRows ValidRowsOf(const AttentionSizes &sizes, int64_t b);

// Moves the valid rows of each sequence to the end, where padding is on the left; lengths need not
// be given then.
void PadLeft(bool keeps_lengths, AttentionSizes *sizes);

struct AttentionProblem : AttentionSizes {
  std::vector<float> q;  // [batch, n_q, num_heads, head_dim]
  std::vector<float> k;  // [batch, n_kv, num_kv_heads, head_dim]
  std::vector<float> v;  // [batch, n_kv, num_kv_heads, head_dim_v]
};

std::string Describe(const AttentionSizes &sizes);

// The shape of sequence b, its valid rows alone; a rotation is set by WithRotation's caller.
AttentionShape ShapeOf(const AttentionSizes &sizes, int64_t b);

// Calls function(rotation) with the rotation of sequence b's valid rows, or with null.
template <typename Function>
void WithRotation(const AttentionSizes &sizes, int64_t b, const Function &function) {
  if (!sizes.rope) return function(static_cast<const Rotation *>(nullptr));
  const Rope &rope = *sizes.rope;
  const ValidRows valid = ValidRowsOf(sizes, b);
  const Rotation rotation = {
      rope.is_interleaved,
      rope.dims,
      rope.offset,
      rope.cos.data(),
      rope.sin.data(),
      rope.table_stride,
      rope.q_positions.empty() ? nullptr : rope.q_positions.data() + b * sizes.n_q + valid.q_first,
      rope.k_positions.empty() ? nullptr
                               : rope.k_positions.data() + b * sizes.n_kv + valid.kv_first};
  function(&rotation);
}

// The norm of all sequences, if there is one.
std::optional<Norm> NormOf(const AttentionSizes &sizes);
std::optional<ContextNorm> ContextNormOf(const AttentionSizes &sizes);

// Of the pairs, those of the valid rows of sequence b and of `count` columns from `first` on, of
// all of them: [num_heads, n_q, count].
template <typename T>
std::vector<T> DensePairs(const AttentionSizes &sizes, const Pairs<T> &pairs, int64_t b,
                          int64_t all, int64_t first, int64_t count) {
  std::vector<T> dense;
  if (pairs.values.empty()) return dense;
  const ValidRows valid = ValidRowsOf(sizes, b);
  const int64_t num_heads = pairs.heads_of(sizes.num_heads), rows = pairs.by_row ? sizes.n_q : 1,
                heads = pairs.by_head ? num_heads : 1;
  for (int64_t h = 0; h < num_heads; h++) {
    for (int64_t i = 0; i < valid.n_q; i++) {
      const int64_t sequence = pairs.by_sequence ? b : 0, head = pairs.by_head ? h : 0,
                    row = pairs.by_row ? valid.q_first + i : 0;
      const auto from =
          pairs.values.begin() + ((sequence * heads + head) * rows + row) * all + first;
      dense.insert(dense.end(), from, from + count);
    }
  }
  return dense;
}

// Those of the valid keys.
template <typename T>
std::vector<T> DensePairs(const AttentionSizes &sizes, const Pairs<T> &pairs, int64_t b) {
  const ValidRows valid = ValidRowsOf(sizes, b);
  return DensePairs(sizes, pairs, b, sizes.n_kv, valid.kv_first, valid.n_kv);
}

// Calls function(options) with the score options of sequence b's valid rows, or with null.
template <typename Function>
void WithScoreOptions(const AttentionSizes &sizes, int64_t b, const Function &function) {
  if (!sizes.score) return function(static_cast<const ScoreOptions *>(nullptr));
  const ScoreArrays &score = *sizes.score;
  const std::vector<float> bias = DensePairs(sizes, score.bias, b);
  const std::vector<uint8_t> mask = DensePairs(sizes, score.mask, b);
  const int64_t distances = score.relative_left + 1 + score.relative_right;
  const std::vector<float> relative_rows =
      DensePairs(sizes, score.relative_rows, b, distances, 0, distances);
  const std::vector<int32_t> chosen =
      DensePairs(sizes, score.chosen, b, score.chosen.columns, 0, score.chosen.columns);
  const auto data = [](const auto &x) { return x.empty() ? nullptr : x.data(); };
  ScoreOptions options = {score.softcap, data(bias), data(mask)};
#define MHA_DATA(name, ...) options.name = data(score.name);
  MHA_EACH_HEAD_ARRAY(MHA_DATA)
  const Segments &segments = score.segments;
  const ValidRows valid = ValidRowsOf(sizes, b);
  if (!segments.of_queries.empty()) {
    options.q_segments = segments.of_queries.data() + b * sizes.n_q + valid.q_first;
    options.kv_segments =
        (segments.of_keys.empty() ? segments.of_queries : segments.of_keys).data() +
        b * sizes.n_kv + valid.kv_first;
    options.segments_add_keys = segments.add_keys;
  }
  if (score.num_columns != 0)
    options.num_keys = std::max<int64_t>(0, score.num_columns - valid.kv_first);
  options.relative_bias = data(score.relative_bias);
  options.relative_rows = data(relative_rows);
  options.chosen = data(chosen);
  options.num_chosen = score.chosen.columns;
  options.chosen_block = score.chosen_block;
  options.relative_left = score.relative_left;
  options.relative_right = score.relative_right;
  if (!score.q_scales.empty())
    options.q_scales = score.q_scales.data() + b * sizes.n_q + valid.q_first;
  function(&options);
}

void FillNormal(Random *random, AttentionProblem *problem);

// A problem of these sizes.
AttentionProblem NormalAttention(const AttentionSizes &sizes, uint64_t seed = 1);

// Rows first .. first + count of x [batch, n, width], of sequence b.
std::vector<float> SliceRows(const std::vector<float> &x, int64_t b, int64_t n, int64_t width,
                             int64_t first, int64_t count);

// Sequence b's query rows first .. first + n_q with its first n_kv keys. q_start, where needed, is
// the caller's to set.
AttentionProblem Slice(const AttentionProblem &problem, int64_t b, int64_t first, int64_t n_q,
                       int64_t n_kv);

// What a call of Slice(...) has to give, out of what the whole gave. y_width is the width of a row
// of y.
Outputs Slice(const Outputs &whole, const AttentionSizes &sizes, int64_t y_width, int64_t b,
              int64_t first, int64_t n_q, int64_t n_kv);

// Calls function(row) with each row of x [batch, n, width] that is padding.
template <typename Function>
void ForEachPaddingRow(const AttentionSizes &sizes, bool of_queries, const Function &function) {
  for (int64_t b = 0; b < sizes.batch; b++) {
    const ValidRows valid = ValidRowsOf(sizes, b);
    const int64_t n = of_queries ? sizes.n_q : sizes.n_kv,
                  first = of_queries ? valid.q_first : valid.kv_first;
    for (int64_t row = 0; row < n; row++) {
      if (row < first || row >= first + (of_queries ? valid.n_q : valid.n_kv))
        function(b * n + row);
    }
  }
}

void FillPadding(const AttentionSizes &sizes, bool of_queries, int64_t width, float value,
                 std::vector<float> *x);

void FillPadding(float value, AttentionProblem *problem);

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_ATTENTION_H
