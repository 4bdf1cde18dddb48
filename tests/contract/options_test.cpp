// What options cost, which memory they need, and what is refused: packed sequences, gates, chosen
// keys, and layers of W_Q alone, which attend to a cache that others fill.
#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "support/attention_test.h"
#include "support/interface_support.h"
#include "support/packed_sequences.h"
#include "support/rope.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

mha_call_info InfoOf(const CallData &data) {
  mha_call_info info = Zeroed<mha_call_info>();
  mha_error error;
  Check(data.Info(&info, &error), error);
  return info;
}

std::string ErrorOf(const CallData &data) {
  mha_call_info info = Zeroed<mha_call_info>();
  mha_error error;
  EXPECT_NE(data.Info(&info, &error), MHA_OK);
  return error.message;
}

LayerCall AskingNothing() {
  LayerCall call;
  call.asked = kAskNothing;
  return call;
}

// ---- Packed sequences

LayerProblem PackedLayer(const std::vector<int64_t> &queries, const std::vector<int64_t> &keys,
                         bool has_key, PackedSequences *sequences) {
  *sequences = {StartsOf(queries), StartsOf(keys), {}};
  LayerProblem problem;
  problem.n_q = sequences->q.back();
  problem.n_kv = sequences->kv.back();
  problem.num_heads = 4;
  problem.num_kv_heads = 2;
  problem.head_dim = 7;
  problem.head_dim_v = 5;
  problem.query_dim = problem.key_dim = problem.value_dim = 12;
  problem.output_dim = 11;
  problem.has_key = has_key;
  return NormalLayer(problem, 3);
}

TEST(PackedSequences, NeedTheWorkspaceOfTheirRows) {
  const std::vector<int64_t> lengths(64, 33);
  PackedSequences sequences;
  const LayerProblem problem = PackedLayer(lengths, lengths, false, &sequences);
  const Layer layer = MakeLayer(problem);
  const ForwardData plain(layer.get(), problem);
  const PackedData<ForwardData> packed(sequences, layer.get(), problem);
  // For each sequence its description, and keys from the next border of 16 on, a line apart.
  const int64_t keys =
      16 * problem.num_kv_heads * (problem.head_dim + 1 + 16) * static_cast<int64_t>(sizeof(float));
  EXPECT_LE(packed.WorkspaceBytes(), plain.WorkspaceBytes() + 64 * static_cast<size_t>(256 + keys));
}

TEST(PackedSequences, CostWhatTheyCostAlone) {
  for (const bool is_causal : {false, true}) {
    PackedSequences sequences;
    LayerProblem problem = PackedLayer({5, 0, 70, 1, 33}, {5, 7, 300, 1, 33}, true, &sequences);
    problem.is_causal = is_causal;
    const Layer layer = MakeLayer(problem);
    const mha_call_info together =
        InfoOf(PackedData<ForwardData>(sequences, layer.get(), problem, AskingNothing()));
    uint64_t operations = 0, bytes = 0;
    for (int64_t b = 0; b < sequences.count(); b++) {
      LayerProblem alone = problem;
      alone.n_q = sequences.q[b + 1] - sequences.q[b];
      alone.n_kv = sequences.kv[b + 1] - sequences.kv[b];
      if (alone.n_q == 0) alone.n_q = 1, alone.q_lengths = {0};
      Random random(5);
      FillInputs(&random, &alone);
      const mha_call_info info = InfoOf(ForwardData(layer.get(), alone, AskingNothing()));
      operations += info.operations;
      bytes += info.bytes - info.packed_bytes;
    }
    EXPECT_EQ(together.operations, operations);
    EXPECT_EQ(together.bytes - together.packed_bytes, bytes);
  }
}

// Which sequence has rows is known when the call runs, not when its memory is planned. Whether a
// division by zero traps depends on the compiler.
TEST(PackedSequences, MayAllLackQueriesOrKeysWithEveryOutput) {
  AttentionProblem problem;
  problem.n_q = 2;
  problem.n_kv = 3;
  problem.q = {1, 2};
  problem.k = problem.v = {1, 2, 3};
  const Outputs outputs = Attend(problem, PackedSequences{{0, 2, 2}, {0, 0, 3}, {}});
  EXPECT_EQ(outputs.y, std::vector<float>(2, 0.0f));
  EXPECT_EQ(outputs.attention_weights, std::vector<float>(6, 0.0f));
}

TEST(PackedSequences, AreNotReadByTheSizeQuery) {
  PackedSequences sequences;
  const LayerProblem problem = PackedLayer({5, 70}, {5, 300}, true, &sequences);
  const Layer layer = MakeLayer(problem);
  PackedData<ForwardData> data(sequences, layer.get(), problem);
  const size_t bytes = data.WorkspaceBytes();
  const Memory guarded(0, Place::kBeforeGuard);
  data.sequences.cu_seqlens_q = data.sequences.cu_seqlens_kv =
      reinterpret_cast<const int64_t *>(guarded.data());
  EXPECT_EQ(data.WorkspaceBytes(), bytes);
}

TEST(PackedSequences, AreRefusedWhereTheyContradict) {
  PackedSequences sequences;
  LayerProblem problem = PackedLayer({5, 70}, {5, 70}, false, &sequences);
  problem.rope = MakeRope(false, 6, 100);
  const Layer layer = MakeLayer(problem);
  PackedData<ForwardData> data(sequences, layer.get(), problem, AskingNothing());
  data.sequences.cu_seqlens_kv = data.q;
  EXPECT_EQ(ErrorOf(data),
            "sequences.cu_seqlens_kv is given, but the keys are the rows of query; leave it NULL");
  data.sequences.cu_seqlens_kv = nullptr;
  const int64_t starts[] = {-1, 0};
  data.sequences.q_first_positions = starts;
  EXPECT_NE(ErrorOf(data).find("the queries of sequence 0 begin at position -1, which the tables "
                               "of rope do not have; set MHA_CAUSAL"),
            std::string::npos);
  data.sequences.q_first_positions = nullptr;
  for (const auto &[at, row, sentence] :
       {std::tuple{0, 1, "sequences.cu_seqlens_q[0] is 1; it must be 0"},
        {1, 76, "sequences.cu_seqlens_q[2] is 75, less than 76 before it; the numbers must ascend"},
        {2, 74,
         "sequences.cu_seqlens_q[2] is 74, the end of the last sequence; it must be n_q, 75. Check "
         "count, too"},
        {2, 76,
         "sequences.cu_seqlens_q[2] is 76, the end of the last sequence; it must be n_q, 75. Check "
         "count, too"}}) {
    const int64_t right = std::exchange(data.q[at], row);
    EXPECT_EQ(ErrorOf(data), sentence);
    data.q[at] = right;
  }
  Cache cache(CacheConfigOf(problem, {MHA_CACHE_KIND_CONTIGUOUS, 0}, 2, 100));
  data.args.call.cache_read = cache.get();
  data.args.call.flags = MHA_CAUSAL;
  data.sequences.cu_seqlens_kv = data.q;
  EXPECT_EQ(ErrorOf(data),
            "sequences.cu_seqlens_kv is given, but no keys come with cache_read; leave it NULL");
}

// ---- Gates

TEST(Gate, CostsWhatAnotherMatrixCosts) {
  LayerProblem plain = OfItself(SquareSizes(64, 4, 4, 16), 10), gated = plain;
  gated.gate = GateKind::kSigmoid;
  gated.gate_dim = 16;
  plain = NormalLayer(plain), gated = NormalLayer(gated);
  const Layer layer = MakeLayer(plain), gated_layer = MakeLayer(gated);
  const mha_call_info before = InfoOf(ForwardData(layer.get(), plain, AskingNothing())),
                      after = InfoOf(ForwardData(gated_layer.get(), gated, AskingNothing()));
  EXPECT_EQ(after.operations - before.operations,
            2u * static_cast<uint64_t>(plain.batch) * 10 * 64 * 64);
  EXPECT_EQ(after.bytes - before.bytes, after.packed_bytes - before.packed_bytes);
  EXPECT_GE(after.packed_bytes - before.packed_bytes, 4u * 64 * 64);
}

// ---- Layers of W_Q alone

constexpr int64_t kHeld = 290;

LayerProblem ProblemOfQueries() {
  LayerProblem problem = OfItself(SquareSizes(70, 6, 3, 20), 40);
  problem.head_dim_v = 17;
  return NormalLayer(problem);
}

LayerData WithoutKeys(LayerData data) {
  data.weights.w_k = data.weights.w_v = {};
  data.config.key_dim = data.config.value_dim = 0;
  return data;
}

TEST(LayerOfQueries, IsPackedWithoutRoomForWhatItLacks) {
  const LayerProblem problem = ProblemOfQueries();
  for (const mha_sgemm sgemm : {mha_sgemm{nullptr}, mha_sgemm{PlainSgemm}}) {
    const mha_layer_options options = Options(MHA_INSTRUCTION_SET_AUTO, sgemm);
    const LayerData whole(problem), asking = WithoutKeys(LayerData(problem));
    const Memory packed = asking.Pack(&options, 0x00);
    EXPECT_EQ(asking.Pack(&options, 0xff).Bytes(), packed.Bytes());
    const auto panels = [](int64_t columns) { return (columns + 47) / 48 * 48; };
    const int64_t biases = panels(problem.k_width()) + panels(problem.v_width()),
                  columns = sgemm ? problem.k_width() + problem.v_width() : biases;
    const size_t least = static_cast<size_t>(4 * (columns * problem.key_dim + biases) -
                                             (sgemm ? 64 : 0));  // but for rounding
    EXPECT_LE(packed.size() + least, whole.PackSize(&options));
    if (!sgemm) {
      EXPECT_LE(whole.PackSize(&options), packed.size() + least + 2 * 64);
    }
  }
}

TEST(LayerOfQueries, NeedsNoWorkspaceAndNoWorkForKeysAndValues) {
  const LayerProblem problem = ProblemOfQueries();
  const Cache cache(CacheConfigOf(problem, {MHA_CACHE_KIND_CONTIGUOUS, 0}, problem.batch, kHeld));
  for (const mha_sgemm sgemm : {mha_sgemm{nullptr}, mha_sgemm{PlainSgemm}}) {
    const mha_layer_options options = Options(MHA_INSTRUCTION_SET_AUTO, sgemm);
    const LayerData whole(problem), asking = WithoutKeys(LayerData(problem));
    const auto info_of = [&](const LayerData &data) {
      const Layer layer = Create(data, &options);
      LayerCall call = AskingNothing();
      call.cache = {cache.get(), {}, kHeld, true};
      return InfoOf(ForwardData(layer.get(), problem, call));
    };
    const mha_call_info of_whole = info_of(whole), of_asking = info_of(asking);
    EXPECT_EQ(of_asking.operations, of_whole.operations);
    EXPECT_EQ(of_whole.bytes - of_asking.bytes, of_whole.packed_bytes - of_asking.packed_bytes);
    EXPECT_EQ(of_asking.packed_bytes, asking.PackSize(&options));
    const size_t of_sgemm = static_cast<size_t>(4 * problem.batch * problem.n_q *
                                                (problem.k_width() + problem.v_width()));
    EXPECT_EQ(of_whole.workspace_bytes - of_asking.workspace_bytes, sgemm ? of_sgemm : 0);
  }
}

TEST(LayerOfQueries, IsRefusedWithoutACacheToRead) {
  const LayerProblem problem = ProblemOfQueries();
  const Layer layer = Create(WithoutKeys(LayerData(problem)));
  const Cache cache(CacheConfigOf(problem, {MHA_CACHE_KIND_CONTIGUOUS, 0}, problem.batch, kHeld));
  std::vector<unsigned char> workspace(1 << 20);
  for (const bool has_cache : {false, true}) {
    ForwardData data(layer.get(), problem, AskingNothing());
    data.args.call.cache = has_cache ? cache.get() : nullptr;
    data.PoisonOutputs();
    size_t bytes = 0;
    const Expected expected = {MHA_ERROR_INVALID_VALUE,
                               {2},
                               {"cache_read is NULL, but the layer has no W_K and W_V, so it can "
                                "only attend to a cache; give cache_read"}};
    ExpectFails([&](mha_error *e) { return data.Run(workspace.data(), workspace.size(), e); },
                expected);
    ExpectFails([&](mha_error *e) { return data.Workspace(&bytes, e); }, expected);
    EXPECT_TRUE(data.OutputsAreUntouched());
  }
}

}  // namespace
