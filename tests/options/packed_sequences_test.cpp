// Packed sequences: each has the bits that it has alone, no other one is read, and nothing is
// computed for the others.
#include "support/packed_sequences.h"

#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "support/attention_test.h"
#include "support/rope.h"
#include "support/schedulers.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

const std::vector<int64_t> kQueries = {5, 0, 1, 0, 23, 40, 16, 3},
                           kKeys = {5, 7, 300, 0, 257, 41, 16, 512};

struct Packed {
  AttentionProblem problem;  // of batch 1
  PackedSequences sequences;
};

Packed Mixed(const std::vector<int64_t> &queries, const std::vector<int64_t> &keys) {
  Packed packed;
  packed.sequences = {StartsOf(queries), StartsOf(keys), {}};
  AttentionProblem &problem = packed.problem;
  problem.n_q = packed.sequences.q.back();
  problem.n_kv = packed.sequences.kv.back();
  problem.num_heads = 4;
  problem.num_kv_heads = 2;
  problem.head_dim = 7;
  problem.head_dim_v = 5;
  Random random(queries.size());
  FillNormal(&random, &problem);
  return packed;
}

class PackedSequencesTest : public AttentionTest {};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(PackedSequencesTest);

TEST_P(PackedSequencesTest, HaveTheBitsThatEachHasInACallOfItsOwn) {
  for (const bool is_causal : {false, true}) {
    Packed packed = Mixed(kQueries, kKeys);
    packed.problem.is_causal = is_causal;
    const Outputs outputs = Attend(packed.problem, packed.sequences, PlainCall());
    const int64_t width = packed.problem.num_heads * packed.problem.head_dim_v;
    for (int64_t b = 0; b < packed.sequences.count(); b++) {
      const AttentionProblem one = OneOf(packed.problem, packed.sequences, b);
      const Outputs alone = Attend(Alone(one, 0), PlainCall());
      EXPECT_TRUE(SameBits(
          "y", SliceRows(outputs.y, 0, one.n_q, width, one.q_first[0], one.q_lengths[0]), alone.y))
          << "sequence " << b;
    }
  }
}

// So few heads that threads share out the keys of one.
TEST_P(PackedSequencesTest, WhoseKeysThreadsShareOutHaveTheSameBits) {
  AttentionSizes sizes;
  sizes.n_q = 3;
  sizes.n_kv = 6000;
  sizes.head_dim = sizes.head_dim_v = 8;
  const AttentionProblem problem = NormalAttention(sizes);
  const PackedSequences sequences = {{0, 1, 3}, {0, 1500, 6000}, {}};
  AttentionCall call = PlainCall();
  call.asked = kAskLse;
  const Outputs expected = Attend(problem, sequences, call);
  for (uint32_t num_threads = 2; num_threads <= 4; num_threads++) {
    const Scheduler scheduler(num_threads, RunTogether);
    call.scheduler = scheduler.get();
    EXPECT_TRUE(SameBits(Attend(problem, sequences, call), expected)) << num_threads << " threads";
  }
}

LayerProblem MixedLayer(const std::vector<int64_t> &queries, const std::vector<int64_t> &keys,
                        bool has_key, bool has_w_o, PackedSequences *sequences) {
  const Packed packed = Mixed(queries, keys);
  *sequences = packed.sequences;
  LayerProblem problem;
  static_cast<AttentionSizes &>(problem) = packed.problem;
  problem.query_dim = problem.key_dim = problem.value_dim = 12;
  problem.output_dim = 11;
  problem.has_key = has_key;
  if (!has_key) {
    problem.n_kv = problem.n_q;
    sequences->kv = sequences->q;
  }
  Random random(3);
  FillNormal(&random, kAllBiases, has_w_o, &problem);
  return problem;
}

TEST_P(PackedSequencesTest, InALayerHaveTheBitsOfTheSpecification) {
  for (const bool has_key : {false, true}) {
    for (const bool has_w_o : {false, true}) {
      PackedSequences sequences;
      const LayerProblem problem =
          MixedLayer({5, 0, 1, 23, 40}, {5, 7, 30, 0, 41}, has_key, has_w_o, &sequences);
      const Layer layer = Make(problem);
      EXPECT_TRUE(
          SameBits("y", Forward(layer.get(), problem, sequences).y, Specify(problem, sequences).y))
          << "key " << has_key << " w_o " << has_w_o;
    }
  }
}

TEST_P(PackedSequencesTest, InALayerNeedTheWorkspaceOfTheirRows) {
  std::vector<int64_t> lengths(64, 33);
  PackedSequences sequences;
  const LayerProblem problem = MixedLayer(lengths, lengths, false, true, &sequences);
  const Layer layer = Make(problem);
  const ForwardData plain(layer.get(), problem);
  const PackedData<ForwardData> packed(sequences, layer.get(), problem);
  // For each sequence its description, and keys from the next border of 16 on.
  const int64_t keys =
      16 * problem.num_kv_heads * (problem.head_dim + 16) * static_cast<int64_t>(sizeof(float));
  EXPECT_LE(packed.WorkspaceBytes(), plain.WorkspaceBytes() + 64 * static_cast<size_t>(256 + keys));
}

// ---- What is not done

mha_call_info InfoOf(const CallData &data) {
  mha_call_info info = Zeroed<mha_call_info>();
  mha_error error;
  Check(data.Info(&info, &error), error);
  return info;
}

TEST(PackedSequences, CostWhatTheyCostAlone) {
  for (const bool is_causal : {false, true}) {
    PackedSequences sequences;
    LayerProblem problem =
        MixedLayer({5, 0, 70, 1, 33}, {5, 7, 300, 1, 33}, true, true, &sequences);
    problem.is_causal = is_causal;
    const Layer layer = MakeLayer(problem);
    LayerCall call;
    call.asked = kAskNothing;
    const mha_call_info together =
        InfoOf(PackedData<ForwardData>(sequences, layer.get(), problem, call));
    uint64_t operations = 0, bytes = 0;
    for (int64_t b = 0; b < sequences.count(); b++) {
      LayerProblem alone = problem;
      alone.n_q = sequences.q[b + 1] - sequences.q[b];
      alone.n_kv = sequences.kv[b + 1] - sequences.kv[b];
      if (alone.n_q == 0) alone.n_q = 1, alone.q_lengths = {0};
      Random random(5);
      FillInputs(&random, &alone);
      const mha_call_info info = InfoOf(ForwardData(layer.get(), alone, call));
      operations += info.operations;
      bytes += info.bytes - info.packed_bytes;
    }
    EXPECT_EQ(together.operations, operations);
    EXPECT_EQ(together.bytes - together.packed_bytes, bytes);
  }
}

// Which one has rows is known when the call runs, not when its memory is planned.
TEST(PackedSequences, MayAllLackQueriesOrKeysWithEveryOutput) {
  const float q[2] = {1, 2}, k[3] = {1, 2, 3};
  const int64_t queries[] = {0, 2, 2}, keys[] = {0, 0, 3};
  float output[2] = {9, 9}, weights[6];
  std::fill(weights, weights + 6, 9.0f);
  mha_sequences sequences = Zeroed<mha_sequences>();
  sequences.count = 2;
  sequences.cu_seqlens_q = queries;
  sequences.cu_seqlens_kv = keys;
  mha_outputs outputs = Zeroed<mha_outputs>();
  outputs.attention_weights = weights;
  mha_attention_args args = Zeroed<mha_attention_args>();
  args.batch = 1;
  args.n_q = 2;
  args.n_kv = 3;
  args.num_heads = args.head_dim = 1;
  args.q.data = q;
  args.k.data = args.v.data = k;
  args.output.data = output;
  args.sequences = &sequences;
  args.outputs = &outputs;
  size_t bytes;
  mha_error error;
  ASSERT_EQ(mha_attention_workspace(&args, &bytes, &error), MHA_OK) << error.message;
  std::vector<char> workspace(bytes);
  ASSERT_EQ(mha_attention(&args, workspace.data(), bytes, &error), MHA_OK) << error.message;
  for (const float value : output) EXPECT_EQ(value, 0);
  for (const float value : weights) EXPECT_EQ(value, 0);
}

TEST(PackedSequences, AreNotReadByTheSizeQuery) {
  PackedSequences sequences;
  const LayerProblem problem = MixedLayer({5, 70}, {5, 300}, true, true, &sequences);
  const Layer layer = MakeLayer(problem);
  PackedData<ForwardData> data(sequences, layer.get(), problem);
  const size_t bytes = data.WorkspaceBytes();
  const Memory guarded(0, Place::kBeforeGuard);
  data.sequences.cu_seqlens_q = data.sequences.cu_seqlens_kv =
      reinterpret_cast<const int64_t *>(guarded.data());
  EXPECT_EQ(data.WorkspaceBytes(), bytes);
}

std::string ErrorOf(const CallData &data) {
  mha_call_info info = Zeroed<mha_call_info>();
  mha_error error;
  EXPECT_NE(data.Info(&info, &error), MHA_OK);
  return error.message;
}

TEST(PackedSequences, AreRefusedWhereTheyContradict) {
  PackedSequences sequences;
  LayerProblem problem = MixedLayer({5, 70}, {5, 70}, false, true, &sequences);
  problem.rope = MakeRope(false, 6, 100);
  const Layer layer = MakeLayer(problem);
  LayerCall call;
  call.asked = kAskNothing;
  PackedData<ForwardData> data(sequences, layer.get(), problem, call);
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
  data.args.cache_read = cache.get();
  data.args.flags = MHA_CAUSAL;
  data.sequences.cu_seqlens_kv = data.q;
  EXPECT_EQ(ErrorOf(data),
            "sequences.cu_seqlens_kv is given, but no keys come with cache_read; leave it NULL");
  data.sequences.cu_seqlens_kv = nullptr;
}

}  // namespace
