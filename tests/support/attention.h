// Attention problems, computed by the library in any way that it offers and by the specification.
#ifndef MHA_TESTS_SUPPORT_ATTENTION_H
#define MHA_TESTS_SUPPORT_ATTENTION_H

#include <gtest/gtest.h>
#include <mha.h>

#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "spec/spec.h"
#include "support/outputs.h"
#include "support/random.h"
#include "support/shapes.h"
#include "support/strided.h"

namespace support {

// The sizes that the layer and its middle stage have in common.
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
  std::vector<int64_t> q_start;  // [batch]; empty = not given
};

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
  return text.str();
}

// The shape of sequence b.
inline AttentionShape ShapeOf(const AttentionSizes &sizes, int64_t b) {
  return {sizes.n_q,          sizes.n_kv,      sizes.num_heads,
          sizes.num_kv_heads, sizes.head_dim,  sizes.head_dim_v,
          sizes.scale,        sizes.is_causal, sizes.q_start.empty() ? sizes.n_kv - sizes.n_q : sizes.q_start[b]};
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
inline void ResizeOutputs(const AttentionSizes &sizes, uint32_t asked, Outputs *outputs) {
  const int64_t pairs = sizes.batch * sizes.num_heads * sizes.n_q * sizes.n_kv;
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

// How the library is called; none of it may change a bit of the result.
struct AttentionCall {
  uint32_t instruction_set = MHA_INSTRUCTION_SET_AUTO;
  Layout q, k, v, output;
  const mha_scheduler *scheduler = nullptr;
  uint32_t asked = kAskAll & ~(kAskQ | kAskK | kAskV);
  unsigned char workspace_fill = 0xff;
  size_t workspace_misalignment = 0;
};

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
  ResizeOutputs(problem, call.asked, &outputs);
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
  args.k = k.data();
  args.v = v.data();
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
  args.is_causal = problem.is_causal ? 1 : 0;
  args.q_start = problem.q_start.empty() ? nullptr : problem.q_start.data();
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

inline Outputs Specify(const AttentionProblem &problem, const spec::Functions &functions = spec::Fastest()) {
  Outputs outputs;
  ResizeOutputs(problem, kAskAll, &outputs);
  const int64_t pairs = problem.num_heads * problem.n_q * problem.n_kv;
  for (int64_t b = 0; b < problem.batch; b++) {
    functions.attend(
        ShapeOf(problem, b), problem.q.data() + b * problem.n_q * problem.num_heads * problem.head_dim,
        problem.k.data() + b * problem.n_kv * problem.num_kv_heads * problem.head_dim,
        problem.v.data() + b * problem.n_kv * problem.num_kv_heads * problem.head_dim_v,
        {outputs.context.data() + b * problem.n_q * problem.num_heads * problem.head_dim_v,
         outputs.lse.data() + b * problem.num_heads * problem.n_q, outputs.attention_weights.data() + b * pairs,
         outputs.scores.data() + b * pairs, outputs.scaled_scores.data() + b * pairs, outputs.masked_scores.data() + b * pairs});
  }
  outputs.y = outputs.context;
  return outputs;
}

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_ATTENTION_H
