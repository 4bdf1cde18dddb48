// Sequences of different lengths in one call: each has the bits that it has alone, whatever the padding around it holds.
#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "support/interface_support.h"
#include "support/attention_test.h"
#include "support/fixtures.h"
#include "support/instruction_sets.h"
#include "support/rope.h"
#include "support/rounds.h"
#include "support/same_bits.h"
#include "support/schedulers.h"
#include "support/specify.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

const float kInfinity = std::numeric_limits<float>::infinity();
const float kNaN = FromBits(0xffd23456u);

// Valid rows of query and key; the last query is at the last key wherever q_start is not given.
struct Lengths {
  int64_t n_q, n_kv;
};

const std::vector<Lengths> kMixed = {{5, 5}, {0, 7}, {1, 300}, {0, 0}, {23, 257}, {40, 41}, {16, 16}, {3, 512}};

AttentionProblem Mixed(const std::vector<Lengths> &lengths, bool padding_left, bool is_causal) {
  Random random(lengths.size());
  AttentionProblem problem;
  problem.batch = static_cast<int64_t>(lengths.size());
  for (const Lengths &sequence : lengths) {
    problem.n_q = std::max(problem.n_q, sequence.n_q);
    problem.n_kv = std::max(problem.n_kv, sequence.n_kv);
    problem.q_lengths.push_back(sequence.n_q);
    problem.kv_lengths.push_back(sequence.n_kv);
  }
  problem.n_q += 2;  // so that the longest has padding too
  problem.n_kv += 3;
  problem.num_heads = 4;
  problem.num_kv_heads = 2;
  problem.head_dim = 7;
  problem.head_dim_v = 5;
  problem.padding_left = padding_left;
  problem.is_causal = is_causal;
  FillNormal(&random, &problem);
  FillPadding(kNaN, &problem);
  return problem;
}

// Rows of width numbers of x [batch, n, width] that are valid rows of sequence b.
std::vector<float> ValidQueryRows(const std::vector<float> &x, const AttentionSizes &sizes, int64_t b, int64_t width) {
  const ValidRows valid = ValidRowsOf(sizes, b);
  return SliceRows(x, b, sizes.n_q, width, valid.q_first, valid.n_q);
}

class Padding : public AttentionTest {};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(Padding);

TEST_P(Padding, RightOfASequenceLeavesItsBitsAsTheyAreAlone) {
  for (const bool is_causal : {false, true}) ExpectTheSpecification(Mixed(kMixed, false, is_causal));
}

TEST_P(Padding, LeftOfASequenceLeavesItsBitsAsTheyAreAlone) {
  for (const bool is_causal : {false, true}) ExpectTheSpecification(Mixed(kMixed, true, is_causal));
}

// The same without the specification in between.
TEST_P(Padding, GivesTheBitsOfACallForEachSequence) {
  for (const bool padding_left : {false, true}) {
    const AttentionProblem problem = Mixed(kMixed, padding_left, true);
    const Outputs outputs = Attend(problem, PlainCall());
    for (int64_t b = 0; b < problem.batch; b++) {
      const AttentionProblem alone = Alone(problem, b);
      const Outputs expected = Attend(alone, PlainCall());
      const int64_t width = problem.num_heads * problem.head_dim_v;
      EXPECT_TRUE(SameBits("y", ValidQueryRows(outputs.y, problem, b, width), expected.y)) << "sequence " << b << Describe(problem);
    }
  }
}

TEST_P(Padding, RowsAreZeroAndTheirLseMinusInfinity) {
  for (const bool padding_left : {false, true}) {
    const AttentionProblem problem = Mixed(kMixed, padding_left, false);
    const Outputs outputs = Attend(problem, PlainCall());
    const int64_t width = problem.num_heads * problem.head_dim_v;
    ForEachPaddingRow(problem, true, [&](int64_t row) {
      if (HasFailure()) return;
      const std::vector<float> y(outputs.y.begin() + row * width, outputs.y.begin() + (row + 1) * width);
      EXPECT_TRUE(SameBits("y", y, std::vector<float>(static_cast<size_t>(width), 0.0f))) << "row " << row;
      for (int64_t h = 0; h < problem.num_heads; h++) {
        const int64_t at = (row / problem.n_q * problem.num_heads + h) * problem.n_q + row % problem.n_q;
        EXPECT_EQ(outputs.lse[at], -kInfinity) << "row " << row << " head " << h;
        for (int64_t j = 0; j < problem.n_kv; j++) EXPECT_EQ(outputs.attention_weights[at * problem.n_kv + j], 0) << "row " << row;
      }
    });
  }
}

// Whatever it is: the same bits with NaN, infinities and ordinary numbers there.
TEST_P(Padding, IsNotRead) {
  for (const bool padding_left : {false, true}) {
    AttentionProblem problem = Mixed(kMixed, padding_left, true);
    const Outputs expected = Attend(problem, PlainCall());
    for (const float value : {0.0f, 1.0f, kInfinity, -std::numeric_limits<float>::max()}) {
      FillPadding(value, &problem);
      EXPECT_TRUE(SameBits(Attend(problem, PlainCall()), expected)) << value;
    }
  }
}

TEST_P(Padding, FullLengthsAreTheDefault) {
  for (const bool padding_left : {false, true}) {
    AttentionProblem problem = Mixed({{17, 30}, {17, 30}, {17, 30}}, false, true);
    problem.n_q = 17;
    problem.n_kv = 30;
    Random random(1);
    FillNormal(&random, &problem);
    const Outputs given = Attend(problem, PlainCall());
    problem.q_lengths.clear();
    problem.padding_left = padding_left;
    EXPECT_TRUE(SameBits(Attend(problem, PlainCall()), given));
    problem.kv_lengths.clear();
    EXPECT_TRUE(SameBits(Attend(problem, PlainCall()), given));
    problem.padding_left = false;
    EXPECT_TRUE(SameBits(Attend(problem, PlainCall()), given));
  }
}

TEST_P(Padding, OfQueriesAloneOrKeysAloneIsWhatIsGiven) {
  for (const bool padding_left : {false, true}) {
    AttentionProblem problem = Mixed({{3, 300}, {1, 2}, {9, 257}}, padding_left, false);
    Random random(2);
    FillNormal(&random, &problem);
    AttentionProblem queries = problem, keys = problem;
    queries.kv_lengths.clear();
    FillPadding(kNaN, &queries);
    ExpectTheSpecification(queries);
    keys.q_lengths.clear();
    FillPadding(kNaN, &keys);
    ExpectTheSpecification(keys);
  }
}

TEST_P(Padding, LengthZeroGivesEmptyRows) {
  for (const bool padding_left : {false, true}) {
    for (const bool is_causal : {false, true}) {
      AttentionProblem problem = Mixed({{0, 0}, {4, 0}, {0, 4}, {4, 4}}, padding_left, is_causal);
      problem.q_start = {0, 0, 0, 0};
      ExpectTheSpecification(problem);
      problem.q_start = {3, 1000, 7, 2};
      ExpectTheSpecification(problem);
      ExpectTheSpecification(Mixed({{0, 0}, {0, 0}}, padding_left, is_causal));
    }
  }
}

TEST_P(Padding, EveryLengthAroundTheTilesGivesTheBitsOfTheSpecification) {
  for (const bool padding_left : {false, true}) {
    std::vector<Lengths> lengths;
    for (int64_t n = 0; n <= 50; n++) lengths.push_back({n, n + n % 3});
    ExpectTheSpecification(Mixed(lengths, padding_left, true));
    lengths.clear();
    for (int64_t n = 0; n <= 34; n++) lengths.push_back({7, 240 + n});
    ExpectTheSpecification(Mixed(lengths, padding_left, false));
  }
}

TEST_P(Padding, AnySchedulerGivesTheSameBits) {
  for (const bool padding_left : {false, true}) {
    const AttentionProblem problem = Mixed(kMixed, padding_left, true);
    const Outputs expected = Specify(problem);
    for (uint32_t num_threads = 1; num_threads <= 5; num_threads++) {
      for (const auto parallel_for : {RunOnThreads, RunBackwards}) {
        const Scheduler scheduler(num_threads, parallel_for);
        AttentionCall call = PlainCall();
        call.scheduler = scheduler.get();
        EXPECT_TRUE(SameBits(Attend(problem, call), expected)) << num_threads << " threads";
      }
    }
  }
}

// So few heads that threads share out the keys of one. Of the short sequence only the first part has keys: one thread is busy with it for
// as long as with a part of the long one, and the states of the others lie where another thread has left one of the long sequence.
TEST_P(Padding, KeysThatThreadsShareOutReachNoOtherSequence) {
  for (const auto &[num_threads, part] : {std::pair<uint32_t, int64_t>{2, 4096}, {3, 2048}}) {
    AttentionProblem problem;
    problem.batch = 2;
    problem.num_heads = 2;
    problem.n_kv = 16384;
    problem.head_dim = problem.head_dim_v = 128;
    problem.kv_lengths = {16384, part};
    Random random(4);
    FillNormal(&random, &problem);
    AttentionCall call = PlainCall();
    call.asked = kAskLse;
    const Outputs expected = Attend(problem, call);
    std::fill_n(problem.v.begin(), problem.n_kv * 128, kNaN);
    const Scheduler scheduler(num_threads, RunTogether);
    call.scheduler = scheduler.get();
    for (int64_t round = 0; round < Rounds(10); round++) {
      const Outputs outputs = Attend(problem, call);
      ASSERT_TRUE(SameBits("y", ValidQueryRows(outputs.y, problem, 1, 256), ValidQueryRows(expected.y, problem, 1, 256)));
      ASSERT_TRUE(SameBits("lse", outputs.lse, expected.lse));
    }
  }
}

// ---- The layer

LayerProblem MixedLayer(const std::vector<Lengths> &lengths, bool padding_left, bool is_causal, bool has_w_o, bool has_key) {
  const AttentionProblem sizes = Mixed(lengths, padding_left, is_causal);
  LayerProblem problem;
  static_cast<AttentionSizes &>(problem) = sizes;
  problem.query_dim = problem.key_dim = problem.value_dim = 12;
  if (has_key) {
    problem.has_key = true;
  } else {
    problem.n_kv = problem.n_q;
    problem.kv_lengths = problem.q_lengths;
  }
  problem.output_dim = 11;
  Random random(3);
  FillNormal(&random, kAllBiases, has_w_o, &problem);
  FillPadding(kNaN, &problem);
  return problem;
}

TEST_P(Padding, OfALayersInputLeavesTheBitsOfEachSequence) {
  for (const bool padding_left : {false, true}) {
    for (const bool is_causal : {false, true}) {
      for (const bool has_w_o : {false, true}) {
        for (const bool has_key : {false, true}) {
          const LayerProblem problem = MixedLayer({{5, 5}, {0, 7}, {70, 300}, {0, 0}, {33, 33}}, padding_left, is_causal, has_w_o, has_key);
          const Layer layer = Make(problem);
          const Outputs expected = Specify(problem);
          EXPECT_TRUE(SameBits(Forward(layer.get(), problem), expected)) << Describe(problem);
          LayerCall call;
          call.asked = kAskNothing;
          const Scheduler scheduler(3, RunBackwards);
          call.scheduler = scheduler.get();
          EXPECT_TRUE(SameBits(Forward(layer.get(), problem, call), expected)) << Describe(problem) << " with 3 threads";
        }
      }
    }
  }
}

TEST_P(Padding, OfALayersOutputIsZeroAlsoWithABias) {
  const LayerProblem problem = MixedLayer({{5, 5}, {0, 0}, {33, 33}}, false, true, true, false);
  const Layer layer = Make(problem);
  const Outputs outputs = Forward(layer.get(), problem);
  ForEachPaddingRow(problem, true, [&](int64_t row) {
    const std::vector<float> y(outputs.y.begin() + row * problem.output_dim, outputs.y.begin() + (row + 1) * problem.output_dim);
    EXPECT_TRUE(SameBits("y", y, std::vector<float>(y.size(), 0.0f))) << "row " << row;
  });
}

// ---- Rows that begin where each sequence says

TEST_P(Padding, OfKeysBeforeTheirStartLeavesTheBitsOfEachSequence) {
  for (const bool is_causal : {false, true}) {
    for (const bool has_lengths : {false, true}) {
      AttentionProblem problem = Mixed(kMixed, false, is_causal);
      problem.kv_start.clear();
      problem.q_lengths.clear();
      for (int64_t b = 0; b < problem.batch; b++) problem.kv_start.push_back(b % 3 == 2 ? 0 : problem.n_kv - problem.kv_lengths[b] - b % 3);
      if (!has_lengths) problem.kv_lengths.clear();
      Random random(6);
      FillNormal(&random, &problem);
      FillPadding(kNaN, &problem);
      ExpectTheSpecification(problem);
      problem.window_left = 20;
      problem.window_right = 4;
      ExpectTheSpecification(problem);
      if (is_causal) problem.rope = MakeRope(true, 6, 600);
      ExpectTheSpecification(problem);
    }
  }
}

// Left padding, said by one array: the queries that are padding, too, stand before the first key, and see nothing.
TEST_P(Padding, BeforeTheKeysIsThatOfTheQueriesOfACausalCall) {
  AttentionProblem problem = Mixed({{5, 5}, {0, 0}, {70, 70}, {33, 33}}, true, true);
  problem.n_kv = problem.n_q;
  Random random(7);
  FillNormal(&random, &problem);
  problem.rope = MakeRope(false, 6, 100);
  const Outputs expected = Attend(problem, PlainCall());
  for (const int64_t length : problem.q_lengths) problem.kv_start.push_back(problem.n_q - length);
  problem.padding_left = false;
  problem.q_lengths.clear();
  problem.kv_lengths.clear();
  const Outputs outputs = Attend(problem, PlainCall());
  for (const auto field : {&Outputs::y, &Outputs::lse, &Outputs::attention_weights, &Outputs::masked_scores}) {
    EXPECT_TRUE(SameBits("output", outputs.*field, expected.*field));
  }
}

TEST_P(Padding, BeforeTheStartOfALayersInputLeavesTheBitsOfEachSequence) {
  for (const bool is_causal : {false, true}) {
    for (const bool has_lengths : {false, true}) {
      for (const bool has_rope : {false, true}) {
        LayerProblem problem = MixedLayer({{5, 5}, {0, 0}, {70, 70}, {33, 33}}, false, is_causal, true, false);
        problem.kv_start = problem.q_first = {3, 0, 1, problem.n_q - 33};
        if (!has_lengths) problem.q_lengths.clear(), problem.kv_lengths.clear();
        if (has_rope) problem.rope = MakeRope(true, 4, 100);
        Random random(8);
        FillInputs(&random, &problem);
        FillPadding(kNaN, &problem);
        ExpectTheSpecification(problem);
      }
    }
  }
}

TEST_P(Padding, BeforeTheStartGoesToNoCache) {
  for (const CacheForm &form : {CacheForm{MHA_CACHE_CONTIGUOUS, 0}, CacheForm{MHA_CACHE_PAGED, 16}, CacheForm{MHA_CACHE_RING, 64}}) {
    LayerProblem problem = MixedLayer({{5, 5}, {70, 70}, {33, 33}}, false, true, true, false);
    if (form.kind == MHA_CACHE_RING) problem.window_left = 30;
    problem.q_lengths.clear(), problem.kv_lengths.clear();
    problem.kv_start = problem.q_first = {problem.n_q - 5, 2, problem.n_q};
    Random random(9);
    FillInputs(&random, &problem);
    FillPadding(kNaN, &problem);
    const Layer layer = Make(problem);
    Cache cache(CacheConfigOf(problem, form, 3, 100));
    SpreadBlocks(&random, &cache);
    LayerCall call;
    call.asked = kAskLse;
    call.cache.cache = cache.get();
    const Outputs outputs = Forward(layer.get(), problem, call), expected = Specify(problem);
    EXPECT_TRUE(SameBits("y", outputs.y, expected.y)) << Describe(form);
    EXPECT_TRUE(SameBits("lse", outputs.lse, expected.lse)) << Describe(form);
    for (int64_t b = 0; b < 3; b++) EXPECT_EQ(cache.Length(b), problem.n_q - problem.kv_start[b]);
  }
}

// ---- Everything at once

AttentionProblem RandomProblem(Random *random) {
  AttentionProblem problem;
  problem.batch = random->Between(1, 4);
  problem.n_q = random->Pick<int64_t>({1, 2, 5, 8, 13, 16, 17, 33, 48, 70});
  problem.n_kv = random->Pick<int64_t>({1, 7, 16, 17, 31, 64, 100, 255, 256, 257, 300, 513, 600, 800, 1100});
  problem.num_kv_heads = random->Pick<int64_t>({1, 1, 2, 3});
  problem.num_heads = problem.num_kv_heads * random->Pick<int64_t>({1, 1, 2, 3, 4});
  problem.head_dim = random->Pick<int64_t>({1, 2, 4, 7, 8, 16, 20});
  problem.head_dim_v = random->Pick<int64_t>({1, 3, 8, 16, 17});
  problem.is_causal = random->Chance(0.5);
  problem.padding_left = random->Chance(0.5);
  const bool q_lengths = random->Chance(0.7), kv_lengths = random->Chance(0.7);
  bool needs_q_start = random->Chance(0.5);
  for (int64_t b = 0; b < problem.batch; b++) {
    if (q_lengths) problem.q_lengths.push_back(random->Chance(0.1) ? 0 : random->Between(0, problem.n_q));
    if (kv_lengths) problem.kv_lengths.push_back(random->Chance(0.1) ? 0 : random->Between(0, problem.n_kv));
    const ValidRows valid = ValidRowsOf(problem, b);
    if (valid.n_q > valid.n_kv) needs_q_start = true;  // else it would be negative
  }
  for (int64_t b = 0; needs_q_start && b < problem.batch; b++) problem.q_start.push_back(random->Between(0, problem.n_kv));
  const auto window = [&] { return random->Pick<int64_t>({0, 1, 2, 15, 16, 17, 100, 255, 256, 257, 2000}); };
  if (random->Chance(0.5)) problem.window_left = window();
  if (random->Chance(0.3)) problem.window_right = window();
  if (problem.head_dim >= 2 && random->Chance(0.5)) {
    problem.rope = MakeRope(random->Chance(0.5), random->Between(1, problem.head_dim / 2) * 2,
                                     std::max<int64_t>(problem.n_kv, 1) + problem.n_kv + problem.n_q, random->Pick<int64_t>({0, 3}));
    const auto positions = [&](int64_t count) {
      std::vector<int64_t> positions(static_cast<size_t>(count));
      for (int64_t &position : positions) position = random->Between(0, problem.rope->num_positions - 1);
      return positions;
    };
    if (random->Chance(0.3)) problem.rope->q_positions = positions(problem.batch * problem.n_q);
    if (random->Chance(0.3)) problem.rope->k_positions = positions(problem.batch * problem.n_kv);
  }
  return problem;
}

TEST_P(Padding, RandomCasesWithLengthsWindowsAndRotationsEqualTheSpecification) {
  for (int64_t n = 0; n < Rounds(150) && !HasFailure(); n++) {
    Random random(7000 + static_cast<uint64_t>(n));
    AttentionProblem problem = RandomProblem(&random);
    const Values kind = RandomKind(&random);
    problem.q = RandomValues(&random, kind, problem.batch * problem.n_q * problem.num_heads * problem.head_dim);
    problem.k = RandomValues(&random, kind, problem.batch * problem.n_kv * problem.num_kv_heads * problem.head_dim);
    problem.v = RandomValues(&random, kind, problem.batch * problem.n_kv * problem.num_kv_heads * problem.head_dim_v);
    FillPadding(kNaN, &problem);
    AttentionCall call = PlainCall();
    call.q = RandomLayout(&random, true);
    call.k = RandomLayout(&random, true);
    call.v = RandomLayout(&random, true);
    call.output = RandomLayout(&random, true);
    if (random.Chance(0.4)) call.asked = static_cast<uint32_t>(random.Next()) & call.asked;
    const Scheduler scheduler(static_cast<uint32_t>(random.Between(1, 4)), RunBackwards);
    if (random.Chance(0.4)) call.scheduler = scheduler.get();
    EXPECT_TRUE(SameBits(Attend(problem, call), Specify(problem)))
        << "case " << n << " values " << NameOf(kind) << ": " << Describe(problem) << "; threads "
        << (call.scheduler ? call.scheduler->num_threads : 0) << " asked " << call.asked;
  }
}

// A BLAS takes rows at one distance: it gets the valid ones alone.
TEST(PaddingWithABlas, IsNotReadIntoAnyProjection) {
  for (const bool has_key : {false, true}) {
    for (const bool has_w_o : {false, true}) {
      LayerProblem problem;
      problem.batch = 3;
      problem.n_q = problem.n_kv = 7;
      problem.has_key = has_key;
      problem.num_heads = problem.num_kv_heads = 2;
      problem.head_dim = problem.head_dim_v = 4;
      problem.query_dim = problem.key_dim = problem.value_dim = problem.output_dim = 9;
      problem.q_lengths = {7, 4, 1};
      problem.kv_lengths = has_key ? std::vector<int64_t>{2, 7, 5} : problem.q_lengths;
      problem = NormalLayer(problem, 5, kAllBiases, has_w_o);
      FillPadding(kNaN, &problem);
      const mha_layer_options options = Options(MHA_INSTRUCTION_SET_AUTO, PlainSgemm);
      const Layer layer = Create(LayerData(problem), &options);
      const std::vector<float> y = Forward(layer.get(), problem).y, expected = Specify(problem).y;
      ASSERT_EQ(y.size(), expected.size());
      for (size_t n = 0; n < y.size(); n++) ASSERT_NEAR(y[n], expected[n], 1e-5f) << n << " " << Describe(problem);
    }
  }
}

}  // namespace
