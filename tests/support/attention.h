// Attention problems, computed by the library in any way that it offers and by the specification.
#ifndef MHA_TESTS_SUPPORT_ATTENTION_H
#define MHA_TESTS_SUPPORT_ATTENTION_H

#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "spec/spec.h"
#include "support/outputs.h"
#include "support/random.h"
#include "support/shapes.h"
#include "support/strided.h"

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
  bool padding_left = false;
  std::optional<int64_t> window_left, window_right;
  std::optional<Rope> rope;
  Storage k_type = Storage::kF32;  // of the cache that the keys and values are taken from
  Storage v_type = Storage::kF32;
};

// Where the valid rows of sequence b are.
struct ValidRows {
  int64_t q_first, n_q, kv_first, n_kv;
};

inline ValidRows ValidRowsOf(const AttentionSizes &sizes, int64_t b) {
  const int64_t n_q = sizes.q_lengths.empty() ? sizes.n_q : sizes.q_lengths[b];
  const int64_t n_kv = sizes.kv_lengths.empty() ? sizes.n_kv : sizes.kv_lengths[b];
  if (sizes.padding_left) return {sizes.n_q - n_q, n_q, sizes.n_kv - n_kv, n_kv};
  return {0, n_q, 0, n_kv};
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
  for (const auto &[name, lengths] : {std::pair{" q_lengths", &sizes.q_lengths}, std::pair{" kv_lengths", &sizes.kv_lengths}}) {
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

inline void FillNormal(Random *random, AttentionProblem *problem) {
  problem->q = random->Normals(problem->batch * problem->n_q * problem->num_heads * problem->head_dim);
  problem->k = random->Normals(problem->batch * problem->n_kv * problem->num_kv_heads * problem->head_dim);
  problem->v = random->Normals(problem->batch * problem->n_kv * problem->num_kv_heads * problem->head_dim_v);
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
  slice.masked_scores = SliceScores(whole.masked_scores, sizes, sizes.n_kv, b, first, n_q, n_kv);
  slice.attention_weights = SliceScores(whole.attention_weights, sizes, sizes.n_kv, b, first, n_q, n_kv);
  slice.lse = SliceScores(whole.lse, sizes, 1, b, first, n_q, 1);
  slice.context = rows(whole.context, sizes.n_q, sizes.num_heads * sizes.head_dim_v, first, n_q);
  slice.y = rows(whole.y, sizes.n_q, y_width, first, n_q);
  return slice;
}

// Sizes the optional outputs of the middle stage that are asked for.
inline void ResizeOutputs(const AttentionSizes &sizes, int64_t columns, uint32_t asked, Outputs *outputs) {
  const int64_t pairs = sizes.batch * sizes.num_heads * sizes.n_q * columns;
  if (asked & kAskScores) outputs->scores.assign(pairs, Unwritten());
  if (asked & kAskScaledScores) outputs->scaled_scores.assign(pairs, Unwritten());
  if (asked & kAskMaskedScores) outputs->masked_scores.assign(pairs, Unwritten());
  if (asked & kAskContext) outputs->context.assign(sizes.batch * sizes.n_q * sizes.num_heads * sizes.head_dim_v, Unwritten());
  if (asked & kAskWeights) outputs->attention_weights.assign(pairs, Unwritten());
  if (asked & kAskLse) outputs->lse.assign(sizes.batch * sizes.num_heads * sizes.n_q, Unwritten());
}

inline float *PointerOrNull(std::vector<float> &x) { return x.empty() ? nullptr : x.data(); }

inline mha_taps TapsInto(Outputs *outputs) {
  mha_taps taps = {};
  taps.struct_size = sizeof taps;
  taps.q = PointerOrNull(outputs->q);
  taps.k = PointerOrNull(outputs->k);
  taps.v = PointerOrNull(outputs->v);
  taps.scores = PointerOrNull(outputs->scores);
  taps.scaled_scores = PointerOrNull(outputs->scaled_scores);
  taps.masked_scores = PointerOrNull(outputs->masked_scores);
  taps.context = PointerOrNull(outputs->context);
  return taps;
}

// Exactly as many bytes as asked for, anywhere and with any content.
class Workspace {
 public:
  Workspace(size_t bytes, unsigned char fill, size_t misalignment) : memory_(bytes + misalignment, fill), misalignment_(misalignment) {}
  void *data() { return memory_.data() + misalignment_; }

 private:
  std::vector<unsigned char> memory_;
  size_t misalignment_;
};

// A cache to append to and attend to. The extent of keys of the outputs that have one number per pair is then columns.
struct CacheUse {
  mha_kv_cache *cache = nullptr;
  std::vector<int64_t> sequences;  // [batch]; empty = not given
  int64_t columns = 0;
  bool read = false;  // MHA_CACHE_READ
};

template <typename Args>
void SetCache(const CacheUse &use, Args *args) {
  args->cache = use.cache;
  args->cache_sequences = use.sequences.empty() ? nullptr : use.sequences.data();
  if (use.read) args->flags |= MHA_CACHE_READ;
}

// How the library is called; none of it may change a bit of the result.
struct AttentionCall {
  uint32_t instruction_set = MHA_INSTRUCTION_SET_AUTO;
  Layout q, k, v, output;
  const mha_scheduler *scheduler = nullptr;
  uint32_t asked = kAskAll & ~(kAskQ | kAskK | kAskV);
  unsigned char workspace_fill = 0xff;
  size_t workspace_misalignment = 0;
  CacheUse cache;
};

// Sequence b as a problem of its own, without its padding.
inline AttentionProblem Alone(const AttentionProblem &problem, int64_t b) {
  const ValidRows valid = ValidRowsOf(problem, b);
  AttentionProblem alone = problem;
  alone.batch = 1;
  alone.n_q = valid.n_q;
  alone.n_kv = valid.n_kv;
  alone.q_lengths.clear();
  alone.kv_lengths.clear();
  alone.padding_left = false;
  alone.q = SliceRows(problem.q, b, problem.n_q, problem.num_heads * problem.head_dim, valid.q_first, valid.n_q);
  alone.k = SliceRows(problem.k, b, problem.n_kv, problem.num_kv_heads * problem.head_dim, valid.kv_first, valid.n_kv);
  alone.v = SliceRows(problem.v, b, problem.n_kv, problem.num_kv_heads * problem.head_dim_v, valid.kv_first, valid.n_kv);
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

// What mha_rope says of a rotation; it points into rope.
inline mha_rope RopeArgument(const Rope &rope) {
  mha_rope argument = {};
  argument.struct_size = sizeof argument;
  argument.style = rope.is_interleaved ? MHA_ROPE_INTERLEAVED : MHA_ROPE_HALF;
  argument.dims = rope.use_defaults ? 0 : rope.dims;
  argument.num_positions = rope.num_positions;
  argument.cos = rope.cos.data();
  argument.sin = rope.sin.data();
  argument.table_stride = rope.use_defaults ? 0 : rope.table_stride;
  argument.q_positions = rope.q_positions.empty() ? nullptr : rope.q_positions.data();
  argument.k_positions = rope.k_positions.empty() ? nullptr : rope.k_positions.data();
  return argument;
}

// The fields about who attends to whom that mha_attention_args and mha_forward_args have in common. They point into sizes and *rope.
template <typename Args>
void SetRules(const AttentionSizes &sizes, mha_rope *rope, Args *args) {
  const auto pointer = [](const std::vector<int64_t> &x) { return x.empty() ? nullptr : x.data(); };
  args->q_start = pointer(sizes.q_start);
  args->q_lengths = pointer(sizes.q_lengths);
  args->kv_lengths = pointer(sizes.kv_lengths);
  args->flags = (sizes.is_causal ? MHA_CAUSAL : 0u) | (sizes.window_left ? MHA_WINDOW_LEFT : 0u) |
                (sizes.window_right ? MHA_WINDOW_RIGHT : 0u) | (sizes.padding_left ? MHA_PADDING_LEFT : 0u);
  args->window_left = sizes.window_left.value_or(0);
  args->window_right = sizes.window_right.value_or(0);
  if (sizes.rope) {
    *rope = RopeArgument(*sizes.rope);
    args->rope = rope;
  }
}

inline void FillPadding(float value, AttentionProblem *problem) {
  FillPadding(*problem, true, problem->num_heads * problem->head_dim, value, &problem->q);
  FillPadding(*problem, false, problem->num_kv_heads * problem->head_dim, value, &problem->k);
  FillPadding(*problem, false, problem->num_kv_heads * problem->head_dim_v, value, &problem->v);
}

inline Outputs Attend(const AttentionProblem &problem, const AttentionCall &call) {
  const float gap = FromBits(0x7fc0dead);  // in inputs, a NaN that would be seen if it were used
  Strided q(call.q, problem.batch, problem.n_q, problem.num_heads, problem.head_dim, gap);
  Strided k(call.k, problem.batch, problem.n_kv, problem.num_kv_heads, problem.head_dim, gap);
  Strided v(call.v, problem.batch, problem.n_kv, problem.num_kv_heads, problem.head_dim_v, gap);
  Strided output(call.output, problem.batch, problem.n_q, problem.num_heads, problem.head_dim_v, Unwritten());
  q.Set(problem.q);
  k.Set(problem.k);
  v.Set(problem.v);
  Outputs outputs;
  ResizeOutputs(problem, call.cache.cache ? call.cache.columns : problem.n_kv, call.asked, &outputs);
  const mha_taps taps = TapsInto(&outputs);

  mha_attention_args args = {};
  args.struct_size = sizeof args;
  args.batch = problem.batch;
  args.n_q = problem.n_q;
  args.n_kv = problem.n_kv;
  args.num_heads = problem.num_heads;
  args.num_kv_heads = problem.num_kv_heads;
  args.head_dim = problem.head_dim;
  args.head_dim_v = problem.head_dim_v;
  args.q = q.data();
  args.k = call.cache.read ? nullptr : k.data();
  args.v = call.cache.read ? nullptr : v.data();
  args.output = output.data();
  args.q_batch_stride = q.batch_stride();
  args.q_row_stride = q.row_stride();
  args.q_head_stride = q.head_stride();
  args.k_batch_stride = k.batch_stride();
  args.k_row_stride = k.row_stride();
  args.k_head_stride = k.head_stride();
  args.v_batch_stride = v.batch_stride();
  args.v_row_stride = v.row_stride();
  args.v_head_stride = v.head_stride();
  args.output_batch_stride = output.batch_stride();
  args.output_row_stride = output.row_stride();
  args.output_head_stride = output.head_stride();
  args.scale = problem.scale;
  mha_rope rope;
  SetRules(problem, &rope, &args);
  SetCache(call.cache, &args);
  args.scheduler = call.scheduler;
  args.attention_weights = PointerOrNull(outputs.attention_weights);
  args.lse = PointerOrNull(outputs.lse);
  args.taps = call.asked & ~(kAskWeights | kAskLse) ? &taps : nullptr;
  args.instruction_set = call.instruction_set;

  mha_error error = {};
  size_t bytes = 0;
  EXPECT_EQ(mha_attention_workspace(&args, &bytes, &error), MHA_OK) << error.message;
  Workspace workspace(bytes, call.workspace_fill, call.workspace_misalignment);
  EXPECT_EQ(mha_attention(&args, workspace.data(), bytes, &error), MHA_OK) << error.message;
  EXPECT_TRUE(output.GapsAreUntouched()) << "the call wrote between the rows of its output";
  outputs.y = output.Get();
  return outputs;
}

// The outputs of the middle stage as they are before any sequence has put its valid rows and columns there: what padding gives.
inline void ResizeToPadding(const AttentionSizes &sizes, Outputs *outputs) {
  const int64_t pairs = sizes.batch * sizes.num_heads * sizes.n_q * sizes.n_kv;
  outputs->scores.assign(pairs, 0.0f);
  outputs->scaled_scores.assign(pairs, 0.0f);
  outputs->masked_scores.assign(pairs, -std::numeric_limits<float>::infinity());
  outputs->context.assign(sizes.batch * sizes.n_q * sizes.num_heads * sizes.head_dim_v, 0.0f);
  outputs->attention_weights.assign(pairs, 0.0f);
  outputs->lse.assign(sizes.batch * sizes.num_heads * sizes.n_q, -std::numeric_limits<float>::infinity());
}

// The outputs of the middle stage for the valid rows of one sequence, and where in those of the whole batch they belong.
class SequenceOutputs {
 public:
  SequenceOutputs(const AttentionSizes &sizes, int64_t b) : sizes_(sizes), b_(b), valid_(ValidRowsOf(sizes, b)) {
    AttentionSizes alone = sizes;
    alone.batch = 1;
    alone.n_q = valid_.n_q;
    alone.n_kv = valid_.n_kv;
    ResizeToPadding(alone, &outputs_);
  }

  spec::AttentionOutputs Pointers() {
    return {outputs_.context.data(), outputs_.lse.data(),           outputs_.attention_weights.data(),
            outputs_.scores.data(),  outputs_.scaled_scores.data(), outputs_.masked_scores.data()};
  }

  void CopyTo(Outputs *batch) const {
    const int64_t width = sizes_.num_heads * sizes_.head_dim_v;
    std::copy(outputs_.context.begin(), outputs_.context.end(), batch->context.begin() + (b_ * sizes_.n_q + valid_.q_first) * width);
    for (int64_t h = 0; h < sizes_.num_heads; h++) {
      for (int64_t i = 0; i < valid_.n_q; i++) {
        const int64_t from = h * valid_.n_q + i, to = (b_ * sizes_.num_heads + h) * sizes_.n_q + valid_.q_first + i;
        batch->lse[to] = outputs_.lse[from];
        for (const auto field : {&Outputs::scores, &Outputs::scaled_scores, &Outputs::masked_scores, &Outputs::attention_weights}) {
          const auto row = (outputs_.*field).begin() + from * valid_.n_kv;
          std::copy(row, row + valid_.n_kv, (batch->*field).begin() + to * sizes_.n_kv + valid_.kv_first);
        }
      }
    }
  }

 private:
  const AttentionSizes &sizes_;
  int64_t b_;
  ValidRows valid_;
  Outputs outputs_;
};

inline Outputs Specify(const AttentionProblem &problem, const spec::Functions &functions = spec::Fastest()) {
  Outputs outputs;
  ResizeToPadding(problem, &outputs);
  for (int64_t b = 0; b < problem.batch; b++) {
    const ValidRows valid = ValidRowsOf(problem, b);
    const int64_t q_row = b * problem.n_q + valid.q_first, kv_row = b * problem.n_kv + valid.kv_first;
    SequenceOutputs sequence(problem, b);
    WithRotation(problem, b, [&](const Rotation *rotation) {
      AttentionShape shape = ShapeOf(problem, b);
      shape.rotation = rotation;
      functions.attend(shape, problem.q.data() + q_row * problem.num_heads * problem.head_dim,
                       problem.k.data() + kv_row * problem.num_kv_heads * problem.head_dim,
                       problem.v.data() + kv_row * problem.num_kv_heads * problem.head_dim_v, sequence.Pointers());
    });
    sequence.CopyTo(&outputs);
  }
  outputs.y = outputs.context;
  return outputs;
}

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_ATTENTION_H
