// Packed sequences: each has the bits that it has alone, no other one and no padding is read, and nothing is computed for either.
#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "support/interface_support.h"
#include "support/attention_test.h"
#include "support/fixtures.h"
#include "support/instruction_sets.h"
#include "support/packed_sequences.h"
#include "support/rope.h"
#include "support/rounds.h"
#include "support/same_bits.h"
#include "support/schedulers.h"
#include "support/specify.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

const float kNaN = FromBits(0xffd23456u);

const std::vector<int64_t> kQueries = {5, 0, 1, 0, 23, 40, 16, 3}, kKeys = {5, 7, 300, 0, 257, 41, 16, 512};

struct Packed {
  AttentionProblem problem;  // of batch 1
  PackedSequences sequences;
};

Packed Mixed(const std::vector<int64_t> &queries, const std::vector<int64_t> &keys) {
  Packed packed;
  packed.sequences = {StartsOf(queries, 2), StartsOf(keys, 3), {}};
  AttentionProblem &problem = packed.problem;
  problem.n_q = packed.sequences.q.back() + 1;
  problem.n_kv = packed.sequences.kv.back() + 4;
  problem.num_heads = 4;
  problem.num_kv_heads = 2;
  problem.head_dim = 7;
  problem.head_dim_v = 5;
  Random random(queries.size());
  FillNormal(&random, &problem);
  FillOutside(kNaN, packed.sequences, &problem);
  return packed;
}

class PackedSequencesTest : public AttentionTest {
 protected:
  using AttentionTest::ExpectTheSpecification;

  void ExpectTheSpecification(const AttentionProblem &problem, const PackedSequences &sequences) const {
    AttentionCall call = PlainCall();
    const Outputs expected = Specify(problem, sequences);
    for (const Place place : {Place::kBeforeGuard, Place::kAfterGuard}) {
      call.place = place;
      EXPECT_TRUE(SameBits(Attend(problem, sequences, call), expected)) << Describe(problem);
    }
  }
  void ExpectTheSpecification(const LayerProblem &problem, const PackedSequences &sequences) const {
    const Layer layer = Make(problem);
    LayerCall call;
    const Outputs expected = Specify(problem, sequences);
    for (const Place place : {Place::kBeforeGuard, Place::kAfterGuard}) {
      call.place = place;
      EXPECT_TRUE(SameBits(Forward(layer.get(), problem, sequences, call), expected)) << Describe(problem);
    }
    call.asked = kAskNothing;
    const Scheduler scheduler(3, RunBackwards);
    call.scheduler = scheduler.get();
    EXPECT_TRUE(SameBits(Forward(layer.get(), problem, sequences, call), expected)) << Describe(problem) << " with 3 threads";
  }
};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(PackedSequencesTest);

TEST_P(PackedSequencesTest, HaveTheBitsOfTheSpecification) {
  Packed packed = Mixed(kQueries, kKeys);
  ExpectTheSpecification(packed.problem, packed.sequences);
  packed.problem.is_causal = true;
  ExpectTheSpecification(packed.problem, packed.sequences);
  packed.problem.window_left = 17;
  ExpectTheSpecification(packed.problem, packed.sequences);
}

TEST_P(PackedSequencesTest, HaveTheBitsThatEachHasInACallOfItsOwn) {
  for (const bool is_causal : {false, true}) {
    Packed packed = Mixed(kQueries, kKeys);
    packed.problem.is_causal = is_causal;
    const Outputs outputs = Attend(packed.problem, packed.sequences, PlainCall());
    const int64_t width = packed.problem.num_heads * packed.problem.head_dim_v;
    for (int64_t b = 0; b < packed.sequences.count(); b++) {
      const AttentionProblem one = OneOf(packed.problem, packed.sequences, b);
      const Outputs alone = Attend(Alone(one, 0), PlainCall());
      EXPECT_TRUE(SameBits("y", SliceRows(outputs.y, 0, one.n_q, width, one.q_first[0], one.q_lengths[0]), alone.y)) << "sequence " << b;
    }
  }
}

TEST_P(PackedSequencesTest, OfAnyLengthAroundTheTilesHaveTheBitsOfTheSpecification) {
  std::vector<int64_t> queries, keys;
  for (const int64_t n : {0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49}) {
    queries.push_back(n);
    keys.push_back(n + n % 3);
  }
  Packed packed = Mixed(queries, keys);
  packed.problem.is_causal = true;
  ExpectTheSpecification(packed.problem, packed.sequences);
}

TEST_P(PackedSequencesTest, OfWhichOneIsAllThereIsAreAPlainCall) {
  AttentionSizes sizes;
  sizes.n_q = sizes.n_kv = 70;
  sizes.num_heads = sizes.num_kv_heads = 2;
  sizes.head_dim = sizes.head_dim_v = 16;
  sizes.is_causal = true;
  const AttentionProblem problem = NormalAttention(sizes);
  EXPECT_TRUE(SameBits(Attend(problem, {{0, 70}, {0, 70}, {}}, PlainCall()), Attend(problem, PlainCall())));
}

TEST_P(PackedSequencesTest, GiveTheSameBitsWithAnyScheduler) {
  Packed packed = Mixed(kQueries, kKeys);
  packed.problem.is_causal = true;
  const Outputs expected = Specify(packed.problem, packed.sequences);
  for (uint32_t num_threads = 1; num_threads <= 5; num_threads++) {
    for (const auto parallel_for : {RunOnThreads, RunBackwards}) {
      const Scheduler scheduler(num_threads, parallel_for);
      AttentionCall call = PlainCall();
      call.scheduler = scheduler.get();
      EXPECT_TRUE(SameBits(Attend(packed.problem, packed.sequences, call), expected)) << num_threads << " threads";
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

TEST_P(PackedSequencesTest, CountPositionsFromTheirOwnFirstKey) {
  Packed packed = Mixed({5, 30, 1, 12}, {5, 30, 300, 12});
  AttentionProblem &problem = packed.problem;
  problem.is_causal = true;
  problem.rope = MakeRope(false, 6, 400);
  ExpectTheSpecification(problem, packed.sequences);
  packed.sequences.q_start = {0, 3, 299, 388};
  ExpectTheSpecification(problem, packed.sequences);
  Random random(1);
  const auto positions = [&](int64_t count) {
    std::vector<int64_t> drawn(static_cast<size_t>(count));
    for (int64_t &position : drawn) position = random.Between(0, 399);
    return drawn;
  };
  problem.rope->q_positions = positions(problem.n_q);
  problem.rope->k_positions = positions(problem.n_kv);
  ExpectTheSpecification(problem, packed.sequences);
}

TEST_P(PackedSequencesTest, HaveRowsAndColumnsOfScoreOptionsInThePackedArray) {
  Packed packed = Mixed(kQueries, kKeys);
  AttentionProblem &problem = packed.problem;
  problem.is_causal = true;
  Random random(2);
  ScoreArrays score;
  score.softcap = 3;
  score.alibi_slopes = {0.5f, 0.25f, 0.125f, 0.1f};
  score.sinks = {0.5f, -1, 2, 0};
  score.bias.values = random.Normals(problem.n_q * problem.n_kv);
  score.mask.by_head = true;
  for (int64_t n = 0; n < problem.num_heads * problem.n_q * problem.n_kv; n++) score.mask.values.push_back(random.Chance(0.7));
  problem.score = score;
  ExpectTheSpecification(problem, packed.sequences);
}

LayerProblem MixedLayer(const std::vector<int64_t> &queries, const std::vector<int64_t> &keys, bool has_key, bool has_w_o,
                        PackedSequences *sequences) {
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
  FillOutside(kNaN, *sequences, &problem);
  return problem;
}

TEST_P(PackedSequencesTest, InALayerHaveTheBitsOfTheSpecification) {
  for (const bool is_causal : {false, true}) {
    for (const bool has_w_o : {false, true}) {
      for (const bool has_key : {false, true}) {
        for (const bool has_rope : {false, true}) {
          PackedSequences sequences;
          LayerProblem problem = MixedLayer({5, 0, 70, 1, 33}, {5, 7, 300, 1, 33}, has_key, has_w_o, &sequences);
          problem.is_causal = is_causal;
          if (has_rope) problem.rope = MakeRope(true, 6, 300);
          ExpectTheSpecification(problem, sequences);
        }
      }
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
  const int64_t keys = 16 * problem.num_kv_heads * (problem.head_dim + 16) * static_cast<int64_t>(sizeof(float));
  EXPECT_LE(packed.WorkspaceBytes(), plain.WorkspaceBytes() + 64 * static_cast<size_t>(256 + keys));
}

// ---- Caches

// Calls that append rows of each sequence of a history to its cache, against one sequence at a time in another one.
void ExpectTheBitsOfSingleCalls(const AttentionCall &plain, const mha_kv_cache_config &config, const AttentionProblem &sizes,
                                const std::vector<std::vector<int64_t>> &calls) {
  Random random(4);
  Cache together(config), alone(config);
  SpreadBlocks(&random, &together);
  SpreadBlocks(&random, &alone);
  for (const std::vector<int64_t> &rows : calls) {
    Packed packed = Mixed(rows, rows);
    AttentionProblem problem = packed.problem;
    static_cast<AttentionSizes &>(problem) = sizes;
    problem.n_q = packed.problem.n_q;
    problem.n_kv = packed.problem.n_kv;
    FillNormal(&random, &problem);
    FillOutside(kNaN, packed.sequences, &problem);
    AttentionCall call = plain;
    call.asked = kAskLse;
    call.cache.cache = together.get();
    const Outputs outputs = Attend(problem, packed.sequences, call);
    for (int64_t b = 0; b < packed.sequences.count(); b++) {
      const AttentionProblem one = OneOf(problem, packed.sequences, b);
      if (one.q_lengths[0] == 0) continue;
      call.cache.cache = alone.get();
      call.cache.sequences = {b};
      const Outputs expected = Attend(Alone(one, 0), call);
      const int64_t width = one.num_heads * one.head_dim_v;
      EXPECT_TRUE(SameBits("y", SliceRows(outputs.y, 0, one.n_q, width, one.q_first[0], one.q_lengths[0]), expected.y)) << "sequence " << b;
      EXPECT_TRUE(SameBits("lse", SliceScores(outputs.lse, one, 1, 0, one.q_first[0], one.q_lengths[0], 1), expected.lse));
      EXPECT_EQ(together.Length(b), alone.Length(b));
    }
  }
}

TEST_P(PackedSequencesTest, AppendTheirRowsToACacheOfAnyKind) {
  for (const Storage type : kStorageTypes) {
    for (const CacheForm &form : {CacheForm{MHA_CACHE_CONTIGUOUS, 0}, CacheForm{MHA_CACHE_PAGED, 16}, CacheForm{MHA_CACHE_RING, 64}}) {
      AttentionProblem sizes;
      sizes.num_heads = 4;
      sizes.num_kv_heads = 2;
      sizes.head_dim = 8;
      sizes.head_dim_v = 5;
      sizes.k_type = sizes.v_type = type;
      sizes.is_causal = true;
      if (form.kind == MHA_CACHE_RING) sizes.window_left = 20;
      sizes.rope = MakeRope(false, 8, 300);
      ExpectTheBitsOfSingleCalls(PlainCall(), CacheConfigOf(sizes, form, 4, 300), sizes,
                                 {{100, 7, 0, 45}, {1, 1, 1, 1}, {3, 0, 50, 0}, {1, 1, 1, 1}});
    }
  }
}

TEST_P(PackedSequencesTest, ReadACacheToWhichNothingIsAppended) {
  AttentionSizes sizes;
  sizes.num_heads = sizes.num_kv_heads = 2;
  sizes.head_dim = sizes.head_dim_v = 8;
  sizes.n_kv = 40;
  sizes.batch = 2;
  const AttentionProblem history = NormalAttention(sizes);
  Cache cache(CacheConfigOf(sizes, {MHA_CACHE_CONTIGUOUS, 0}, 2, 40));
  const std::vector<int64_t> lengths = {40, 13};
  for (int64_t b = 0; b < 2; b++) {
    cache.Append(b, {SliceRows(history.k, b, 40, 16, 0, lengths[b]), SliceRows(history.v, b, 40, 16, 0, lengths[b])});
  }
  sizes.batch = 1;
  sizes.n_q = 9;
  sizes.n_kv = 0;
  const AttentionProblem problem = NormalAttention(sizes);
  AttentionCall call = PlainCall();
  call.asked = kAskLse;
  call.cache = {cache.get(), {}, 40, true};
  const PackedSequences sequences = {{0, 4, 9}, {0, 0, 0}, {}};
  const Outputs outputs = Attend(problem, sequences, call);
  for (int64_t b = 0; b < 2; b++) {
    AttentionProblem alone = problem;
    alone.n_q = sequences.q[b + 1] - sequences.q[b];
    alone.n_kv = lengths[b];
    alone.q = SliceRows(problem.q, 0, 9, 16, sequences.q[b], alone.n_q);
    alone.k = SliceRows(history.k, b, 40, 16, 0, lengths[b]);
    alone.v = SliceRows(history.v, b, 40, 16, 0, lengths[b]);
    EXPECT_TRUE(SameBits("y", SliceRows(outputs.y, 0, 9, 16, sequences.q[b], alone.n_q), Specify(alone).y)) << "sequence " << b;
  }
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
    LayerProblem problem = MixedLayer({5, 0, 70, 1, 33}, {5, 7, 300, 1, 33}, true, true, &sequences);
    problem.is_causal = is_causal;
    const Layer layer = MakeLayer(problem);
    LayerCall call;
    call.asked = kAskNothing;
    const mha_call_info together = InfoOf(PackedData<ForwardData>(sequences, layer.get(), problem, call));
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
TEST(PackedSequences, MayAllBeEmptyWithEveryOutput) {
  const float q[2] = {1, 2}, k[3] = {1, 2, 3};
  const int64_t queries[] = {0, 0, 0}, keys[] = {0, 1, 3};
  float output[2] = {9, 9}, weights[6];
  std::fill(weights, weights + 6, 9.0f);
  mha_attention_args args = Zeroed<mha_attention_args>();
  args.batch = 2;
  args.n_q = 2;
  args.n_kv = 3;
  args.num_heads = args.head_dim = 1;
  args.q = q;
  args.k = args.v = k;
  args.output = output;
  args.cu_seqlens_q = queries;
  args.cu_seqlens_kv = keys;
  args.attention_weights = weights;
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
  data.args.cu_seqlens_q = data.args.cu_seqlens_kv = reinterpret_cast<const int64_t *>(guarded.data());
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
  data.args.cu_seqlens_kv = data.q;
  EXPECT_EQ(ErrorOf(data), "cu_seqlens_kv is given, but the keys are the rows of query; give cu_seqlens_q alone, or key");
  data.args.cu_seqlens_kv = nullptr;
  const int64_t starts[] = {-1, 0};
  data.args.q_start = starts;
  EXPECT_NE(ErrorOf(data).find("the queries of sequence 0 begin at position -1, for which rope has no tables; set MHA_CAUSAL"),
            std::string::npos);

  Cache cache(CacheConfigOf(problem, {MHA_CACHE_CONTIGUOUS, 0}, 2, 100));
  data.args.q_start = nullptr;
  data.args.cache = cache.get();
  data.args.flags = MHA_CAUSAL | MHA_CACHE_READ;
  data.args.cu_seqlens_kv = data.q;
  EXPECT_EQ(ErrorOf(data), "MHA_CACHE_READ appends nothing, but cu_seqlens_kv is given; leave it NULL, or leave the flag out");
  data.args.flags = MHA_CAUSAL;
  data.args.cu_seqlens_kv = nullptr;
}

// ---- Products by a caller's sgemm

TEST(PackedSequences, GoThroughASgemmAsEachAlone) {
  for (const bool has_key : {false, true}) {
    PackedSequences sequences;
    LayerProblem problem = MixedLayer({5, 0, 70, 1, 33}, {5, 7, 300, 1, 33}, has_key, true, &sequences);
    const mha_layer_options options = Options(MHA_INSTRUCTION_SET_AUTO, PlainSgemm);
    const Layer layer = Create(LayerData(problem), &options);
    LayerCall call;
    call.asked = kAskNothing;
    const Outputs outputs = Forward(layer.get(), problem, sequences, call);
    const int64_t width = problem.y_width();
    for (int64_t b = 0; b < sequences.count(); b++) {
      LayerProblem alone = problem;
      alone.n_q = sequences.q[b + 1] - sequences.q[b];
      alone.n_kv = sequences.kv[b + 1] - sequences.kv[b];
      if (alone.n_q == 0) continue;
      alone.query = SliceRows(problem.query, 0, problem.n_q, 12, sequences.q[b], alone.n_q);
      if (has_key) alone.key = SliceRows(problem.key, 0, problem.n_kv, 12, sequences.kv[b], alone.n_kv);
      const Outputs expected = Forward(layer.get(), alone, call);
      EXPECT_TRUE(SameBits("y", SliceRows(outputs.y, 0, problem.n_q, width, sequences.q[b], alone.n_q), expected.y))
          << "sequence " << b << (has_key ? " with key" : "");
    }
  }
}

// ---- Everything at once

TEST_P(PackedSequencesTest, OfRandomCasesHaveTheBitsOfTheSpecification) {
  for (int64_t n = 0; n < Rounds(60) && !HasFailure(); n++) {
    Random random(9000 + static_cast<uint64_t>(n));
    std::vector<int64_t> queries, keys;
    Packed packed;
    for (int64_t b = random.Between(1, 9); b > 0; b--) {
      queries.push_back(random.Pick<int64_t>({0, 1, 2, 5, 13, 16, 17, 33, 70, 110}));
      keys.push_back(random.Pick<int64_t>({0, 1, 7, 16, 31, 64, 255, 256, 300, 513}));
      packed.sequences.q_start.push_back(random.Between(-20, 300));
    }
    packed.sequences.q = StartsOf(queries, random.Between(0, 3));
    packed.sequences.kv = StartsOf(keys, random.Between(0, 3));
    AttentionProblem &problem = packed.problem;
    problem.n_q = std::max<int64_t>(1, packed.sequences.q.back() + random.Between(0, 2));
    problem.n_kv = packed.sequences.kv.back() + random.Between(0, 2);
    if (problem.n_kv == 0) continue;
    problem.num_kv_heads = random.Pick<int64_t>({1, 2});
    problem.num_heads = problem.num_kv_heads * random.Pick<int64_t>({1, 3});
    problem.head_dim = random.Pick<int64_t>({1, 4, 7, 16});
    problem.head_dim_v = random.Pick<int64_t>({1, 8, 17});
    problem.is_causal = random.Chance(0.5);
    if (random.Chance(0.3)) problem.window_left = random.Pick<int64_t>({0, 1, 16, 100, 256});
    FillNormal(&random, &problem);
    FillOutside(kNaN, packed.sequences, &problem);
    AttentionCall call = PlainCall();
    const Scheduler scheduler(static_cast<uint32_t>(random.Between(1, 4)), RunBackwards);
    if (random.Chance(0.4)) call.scheduler = scheduler.get();
    EXPECT_TRUE(SameBits(Attend(problem, packed.sequences, call), Specify(problem, packed.sequences))) << "case " << n << Describe(problem);
  }
}

}  // namespace
