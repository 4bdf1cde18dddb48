// Calls at the edges of what the header allows. Most of them were bugs once.

#include <gtest/gtest.h>
#include <mha.h>

#include <string>
#include <utility>
#include <vector>

#include "interface/calls.h"
#include "support/same_bits.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

// A call of a narrow layer without an output projection. With few rows it is a small call, which
// has its own checks.
struct NarrowCall {
  NarrowCall(int64_t batch, int64_t n, const mha_layer_options *options = nullptr)
      : problem(Problem(batch, n)), layer(Create(LayerData(problem), options)) {}
  static LayerProblem Problem(int64_t batch, int64_t n) {
    LayerProblem sizes = OfItself(SquareSizes(16, 2, 2, 8), n);
    sizes.batch = batch;
    return NormalLayer(sizes, 1, kNoBiases, false);
  }
  mha_status Run(mha_error *error) const {
    const Memory workspace(1 << 20);
    return data.Run(workspace.data(), workspace.size(), error);
  }
  const LayerProblem problem;
  const Layer layer;
  ForwardData data{layer.get(), problem, {Guarded()}};
  mha_forward_args &args = data.args;
};

TEST(Edges, NumberOfKeysIsNotLookedAtInSelfAttention) {
  NarrowCall call(1, 2);
  const Outputs expected = call.data.Compute();
  call.args.call.n_kv = -5;
  EXPECT_TRUE(SameBits(call.data.Compute(), expected));
}

TEST(Edges, NothingToDoNeedsNoWorkspace) {
  for (const bool without_batch : {true, false}) {
    NarrowCall call(3, 3);
    (without_batch ? call.args.call.batch : call.args.call.n_q) = MHA_EMPTY;
    EXPECT_EQ(call.data.WorkspaceBytes(), 0u);
    call.data.PoisonOutputs();
    ExpectSucceeds([&](auto *error) { return call.data.Run(nullptr, 0, error); });
    EXPECT_TRUE(call.data.OutputsAreUntouched());
  }
}

// Waking threads would take longer than the call. With many sequences it does not. (The scalar
// kernels have no function for small calls.)
TEST(Edges, FewRowsOfANarrowLayerStayOnTheCallingThread) {
  if (mha_instruction_sets() == 1u << MHA_INSTRUCTION_SET_SCALAR)
    GTEST_SKIP() << "this build or machine has scalar kernels only";
  const auto calls_for = [](int64_t batch, int64_t n) {
    SerialScheduler serial(4);
    NarrowCall call(batch, n);
    call.args.call.scheduler = &serial.scheduler;
    call.data.Compute();
    return serial.calls;
  };
  for (const auto &[batch, n] : {std::pair{1, 1}, {1, 16}, {16, 1}, {4, 4}, {5, 3}})
    EXPECT_EQ(calls_for(batch, n), 0u) << batch << " sequences of " << n;
  for (const auto &[batch, n] : {std::pair{17, 1}, {6, 3}, {16, 4}})
    EXPECT_GT(calls_for(batch, n), 0u) << batch << " sequences of " << n;

  SerialScheduler unused(0);
  NarrowCall call(1, 1);
  call.args.call.scheduler = &unused.scheduler;
  ExpectFails([&](auto *error) { return call.Run(error); }, {kInvalid, {2}, {"num_threads"}});
}

TEST(Edges, LayerCanBePackedForAnInstructionSetOfAnotherMachine) {
  const LayerData data(SmallLayer());
  for (const uint32_t set : {MHA_INSTRUCTION_SET_AVX512, MHA_INSTRUCTION_SET_NEON}) {
    const mha_layer_options options = Options(set);
    EXPECT_EQ(data.PackSize(&options), data.PackSize());
  }
}

TEST(Edges, RowStridesOfMatricesThatAreNotGivenAreErrors) {
  const struct {
    std::string name;
    mha_matrix mha_layer_weights::*matrix;
  } matrices[] = {{"w_q", &mha_layer_weights::w_q},
                  {"w_k", &mha_layer_weights::w_k},
                  {"w_v", &mha_layer_weights::w_v},
                  {"w_o", &mha_layer_weights::w_o}};
  LayerForm form;
  form.form = WeightForm::kFused;
  size_t bytes = 0;
  for (const auto &[name, matrix] : matrices) {
    for (const int64_t stride : {-1, 3, 16, 48}) {
      LayerData data(NarrowCall::Problem(1, 1), Place::kAnywhere, form);
      (data.weights.*matrix).row_stride = stride;
      ExpectFails({kInvalid, {2}, {name + ".row_stride is " + std::to_string(stride)}},
                  mha_layer_pack_size, &data.config, &data.weights, nullptr, &bytes);
    }
  }
}

int sgemm_calls = 0;

void CountingSgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,
                   const float *a, int lda, const float *b, int ldb, float beta, float *c,
                   int ldc) {
  ++sgemm_calls;
  PlainSgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

TEST(Edges, SequencesOfOneRowGoThroughSgemmTogetherAtAnyBatchStride) {
  const mha_layer_options options = Options(MHA_INSTRUCTION_SET_AUTO, CountingSgemm);
  const NarrowCall call(20, 1, &options);
  const Outputs expected = Forward(call.layer.get(), call.problem);
  LayerCall apart = {Guarded()};
  apart.query.batch_gap = 2 * 16;
  sgemm_calls = 0;
  const Outputs outputs = ForwardData(call.layer.get(), call.problem, apart).Compute();
  EXPECT_TRUE(SameBits("y", outputs.y, expected.y));
  EXPECT_EQ(sgemm_calls, 1);
}

// x [extents..., width], where the first elements of the repeated dimensions replace all others.
std::vector<float> Repeated(const std::vector<float> &x, const std::vector<int64_t> &extents,
                            const std::vector<bool> &is_repeated) {
  std::vector<float> repeated;
  const int64_t element_width =
      static_cast<int64_t>(x.size()) / (extents[0] * extents[1] * extents[2]);
  for (int64_t b = 0; b < extents[0]; b++) {
    for (int64_t n = 0; n < extents[1]; n++) {
      for (int64_t h = 0; h < extents[2]; h++) {
        const int64_t from[3] = {is_repeated[0] ? 0 : b, is_repeated[1] ? 0 : n,
                                 is_repeated[2] ? 0 : h};
        const auto first =
            x.begin() + ((from[0] * extents[1] + from[1]) * extents[2] + from[2]) * element_width;
        repeated.insert(repeated.end(), first, first + element_width);
      }
    }
  }
  return repeated;
}

TEST(Broadcast, AttentionInputsGiveTheBitsOfCopies) {
  AttentionSizes sizes;
  sizes.batch = 3, sizes.n_q = 5, sizes.n_kv = 40, sizes.num_heads = 4, sizes.num_kv_heads = 2,
  sizes.head_dim = sizes.head_dim_v = 8;
  const AttentionProblem problem = NormalAttention(sizes);
  for (int which = 1; which < 8; which++) {
    const std::vector<bool> is_repeated = {(which & 1) != 0, (which & 2) != 0, (which & 4) != 0};
    for (int input = 0; input < 3; input++) {
      AttentionProblem copied = problem;
      if (input == 0) copied.q = Repeated(problem.q, {3, 5, 4}, is_repeated);
      if (input == 1) copied.k = Repeated(problem.k, {3, 40, 2}, is_repeated);
      if (input == 2) copied.v = Repeated(problem.v, {3, 40, 2}, is_repeated);
      AttentionData data(problem);
      auto &args = data.args;
      int64_t *const strides[3][3] = {
          {&args.q.strides.batch, &args.q.strides.row, &args.q.strides.head},
          {&args.k.strides.batch, &args.k.strides.row, &args.k.strides.head},
          {&args.v.strides.batch, &args.v.strides.row, &args.v.strides.head}};
      const bool has_queries = input == 0;
      const int64_t heads = has_queries ? 4 : 2,
                    all[3] = {(has_queries ? 5 : 40) * heads * 8, heads * 8, 8};
      for (int dimension = 0; dimension < 3; dimension++) {
        *strides[input][dimension] = is_repeated[dimension] ? MHA_BROADCAST : all[dimension];
      }
      EXPECT_TRUE(SameBits(data.Compute(), Attend(copied)))
          << "input " << input << " dimensions " << which;
    }
  }
}

TEST(Broadcast, ForwardInputsGiveTheBitsOfCopies) {
  LayerProblem problem = SmallLayer();
  const Layer layer = Create(LayerData(problem));
  for (int which = 1; which < 4; which++) {
    const std::vector<bool> is_repeated = {(which & 1) != 0, (which & 2) != 0, false};
    LayerProblem copied = problem;
    copied.query = Repeated(problem.query, {problem.batch, problem.n_q, 1}, is_repeated);
    copied.key = Repeated(problem.key, {problem.batch, problem.n_kv, 1}, is_repeated);
    copied.value = Repeated(problem.value, {problem.batch, problem.n_kv, 1}, is_repeated);
    ForwardData data(layer.get(), problem);
    for (int64_t *const stride : {&data.args.query.strides.batch, &data.args.key.strides.batch,
                                  &data.args.value.strides.batch}) {
      if (is_repeated[0]) *stride = MHA_BROADCAST;
    }
    for (int64_t *const stride :
         {&data.args.query.strides.row, &data.args.key.strides.row, &data.args.value.strides.row}) {
      if (is_repeated[1]) *stride = MHA_BROADCAST;
    }
    if (which == 2) {  // the next sequence is one row further
      data.args.query.strides.batch = problem.n_q * problem.query_dim;
      data.args.key.strides.batch = problem.n_kv * problem.key_dim;
      data.args.value.strides.batch = problem.n_kv * problem.value_dim;
    }
    EXPECT_TRUE(SameBits(data.Compute(), Forward(layer.get(), copied))) << "dimensions " << which;
  }
}

// A row that all rows of a sequence share is in memory once: the next sequence's row follows it.
TEST(Broadcast, SharedRowsLeaveSequencesContiguous) {
  LayerProblem problem = OfItself(SquareLayer(10, 4, 2, 3), 3);
  problem.batch = 2;
  problem.query.assign(static_cast<size_t>(2 * 3 * problem.query_dim), 0);
  for (int64_t i = 0; i < 2 * 3 * problem.query_dim; i++) {
    problem.query[i] = static_cast<float>(i % problem.query_dim) -
                       4 * static_cast<float>(i / (3 * problem.query_dim));
  }
  const Layer layer = Create(LayerData(problem));
  std::vector<float> rows(problem.query.begin(), problem.query.begin() + problem.query_dim);
  rows.insert(rows.end(), problem.query.begin() + 3 * problem.query_dim,
              problem.query.begin() + 4 * problem.query_dim);
  ForwardData data(layer.get(), problem);
  data.args.query.data = rows.data();
  data.args.query.strides.row = MHA_BROADCAST;
  EXPECT_TRUE(SameBits(data.Compute(), Forward(layer.get(), problem)));
}

TEST(AttentionEdges, LargeCountsDoNotOverflow) {
  mha_attention_args args = Zeroed<mha_attention_args>();
  args.call.batch = args.call.n_kv = int64_t{1} << 40;
  args.call.n_q = args.num_heads = args.head_dim = 1;
  args.k.strides.batch = args.v.strides.batch = args.k.strides.row = args.v.strides.row = 1;
  mha_call_info info = Zeroed<mha_call_info>();
  mha_error error;
  EXPECT_EQ(mha_attention_info(&args, &info, &error), MHA_OK) << error.message;
  EXPECT_GT(info.workspace_bytes, 0u);
}

// Prefetching rows that would follow was undefined behaviour once.
TEST(LayerEdges, MatrixOfOneRowMayHaveAnyStride) {
  const std::vector<float> row(48, 0.5f);
  const float x = 3.0f;
  std::vector<float> y(row.size());
  mha_linear_weights weights = Zeroed<mha_linear_weights>();
  weights.input_dim = 1;
  weights.output_dim = static_cast<int64_t>(row.size());
  weights.w.data = row.data();
  weights.w.row_stride = int64_t{1} << 60;
  mha_layer *layer = nullptr;
  mha_error error;
  ASSERT_EQ(mha_linear_create(&weights, nullptr, &layer, &error), MHA_OK) << error.message;
  mha_linear_args args = Zeroed<mha_linear_args>();
  args.rows = 1;
  args.x.data = &x;
  args.output.data = y.data();
  EXPECT_EQ(mha_linear(layer, &args, nullptr, 0, &error), MHA_OK) << error.message;
  EXPECT_EQ(y, std::vector<float>(row.size(), 1.5f));
  mha_layer_destroy(layer);
}

}  // namespace
