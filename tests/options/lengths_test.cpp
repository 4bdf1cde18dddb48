// Sequences of different lengths in one call: each has the bits that it has alone, whatever the
// padding around it holds.
#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "support/attention_test.h"
#include "support/rope.h"
#include "support/rounds.h"
#include "support/schedulers.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

const float kInfinity = std::numeric_limits<float>::infinity();
const float kNaN = FromBits(0xffd23456u);

// Valid rows of query and key; the last query is at the last key wherever q_start is not given.
struct Lengths {
  int64_t n_q, n_kv;
};

const std::vector<Lengths> kMixed = {{5, 5},    {0, 7},   {1, 300}, {0, 0},
                                     {23, 257}, {40, 41}, {16, 16}, {3, 512}};

// Where the valid rows are: first; last, behind padding whose end the lengths say or not; or with
// padding on both sides.
enum class Side { kRight, kLeft, kLeftWithoutLengths, kBoth };
constexpr Side kSides[] = {Side::kRight, Side::kLeft, Side::kLeftWithoutLengths, Side::kBoth};

AttentionProblem Mixed(const std::vector<Lengths> &lengths, Side side, bool is_causal) {
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
  if (side != Side::kRight) PadLeft(side != Side::kLeftWithoutLengths, &problem);
  if (side == Side::kBoth) {
    for (int64_t &first : problem.q_first) first -= 1;
    for (int64_t &first : problem.kv_start) first = first / 2 + 1;
  }
  problem.is_causal = is_causal;
  FillNormal(&random, &problem);
  FillPadding(kNaN, &problem);
  return problem;
}

// Rows of width numbers of x [batch, n, width] that are valid rows of sequence b.
std::vector<float> ValidQueryRows(const std::vector<float> &x, const AttentionSizes &sizes,
                                  int64_t b, int64_t width) {
  const ValidRows valid = ValidRowsOf(sizes, b);
  return SliceRows(x, b, sizes.n_q, width, valid.q_first, valid.n_q);
}

class Padding : public AttentionTest {};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(Padding);

TEST_P(Padding, GivesTheBitsOfACallForEachSequence) {
  for (const Side side : kSides) {
    const AttentionProblem problem = Mixed(kMixed, side, true);
    const Outputs outputs = Attend(problem, PlainCall());
    for (int64_t b = 0; b < problem.batch; b++) {
      const AttentionProblem alone = Alone(problem, b);
      const Outputs expected = Attend(alone, PlainCall());
      const int64_t width = problem.num_heads * problem.head_dim_v;
      EXPECT_TRUE(SameBits("y", ValidQueryRows(outputs.y, problem, b, width), expected.y))
          << "sequence " << b << Describe(problem);
    }
  }
}

TEST_P(Padding, RowsAreZeroAndTheirLseMinusInfinity) {
  for (const Side side : kSides) {
    const AttentionProblem problem = Mixed(kMixed, side, false);
    const Outputs outputs = Attend(problem, PlainCall());
    const int64_t width = problem.num_heads * problem.head_dim_v;
    ForEachPaddingRow(problem, true, [&](int64_t row) {
      if (HasFailure()) return;
      const std::vector<float> y(outputs.y.begin() + row * width,
                                 outputs.y.begin() + (row + 1) * width);
      EXPECT_TRUE(SameBits("y", y, std::vector<float>(static_cast<size_t>(width), 0.0f)))
          << "row " << row;
      for (int64_t h = 0; h < problem.num_heads; h++) {
        const int64_t at =
            (row / problem.n_q * problem.num_heads + h) * problem.n_q + row % problem.n_q;
        EXPECT_EQ(outputs.lse[at], -kInfinity) << "row " << row << " head " << h;
        for (int64_t j = 0; j < problem.n_kv; j++)
          EXPECT_EQ(outputs.attention_weights[at * problem.n_kv + j], 0) << "row " << row;
      }
    });
  }
}

TEST_P(Padding, IsNotRead) {
  for (const Side side : kSides) {
    AttentionProblem problem = Mixed(kMixed, side, true);
    const Outputs expected = Attend(problem, PlainCall());
    for (const float value : {0.0f, 1.0f, kInfinity, -std::numeric_limits<float>::max()}) {
      FillPadding(value, &problem);
      EXPECT_TRUE(SameBits(Attend(problem, PlainCall()), expected)) << value;
    }
  }
}

TEST_P(Padding, FullLengthsAreTheDefault) {
  for (const bool has_first_rows : {false, true}) {
    AttentionProblem problem = Mixed({{17, 30}, {17, 30}, {17, 30}}, Side::kRight, true);
    problem.n_q = 17;
    problem.n_kv = 30;
    Random random(1);
    FillNormal(&random, &problem);
    const Outputs given = Attend(problem, PlainCall());
    problem.q_lengths.clear();
    if (has_first_rows) problem.q_first = problem.kv_start = {0, 0, 0};
    EXPECT_TRUE(SameBits(Attend(problem, PlainCall()), given));
    problem.kv_lengths.clear();
    EXPECT_TRUE(SameBits(Attend(problem, PlainCall()), given));
    problem.q_first.clear();
    EXPECT_TRUE(SameBits(Attend(problem, PlainCall()), given));
    problem.kv_start.clear();
    EXPECT_TRUE(SameBits(Attend(problem, PlainCall()), given));
  }
}

// So few heads that threads share out the keys of one. Of the short sequence only the first part
// has keys: one thread is busy with it for as long as with a part of the long one, and the states
// of the others lie where another thread has left one of the long sequence.
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
      ASSERT_TRUE(SameBits("y", ValidQueryRows(outputs.y, problem, 1, 256),
                           ValidQueryRows(expected.y, problem, 1, 256)));
      ASSERT_TRUE(SameBits("lse", outputs.lse, expected.lse));
    }
  }
}

TEST_P(Padding, OfALayersOutputIsZeroAlsoWithABias) {
  LayerProblem problem;
  for (const Side side : kSides) {
    static_cast<AttentionSizes &>(problem) = Mixed({{5, 5}, {0, 0}, {33, 33}}, side, true);
    problem.query_dim = problem.key_dim = problem.value_dim = 12;
    problem.output_dim = 11;
    problem.n_kv = problem.n_q;
    problem.kv_start = problem.q_first;
    problem = NormalLayer(problem);
    const Layer layer = Make(problem);
    const Outputs outputs = Forward(layer.get(), problem);
    ForEachPaddingRow(problem, true, [&](int64_t row) {
      const std::vector<float> y(outputs.y.begin() + row * problem.output_dim,
                                 outputs.y.begin() + (row + 1) * problem.output_dim);
      EXPECT_TRUE(SameBits("y", y, std::vector<float>(y.size(), 0.0f))) << "row " << row;
    });
    EXPECT_TRUE(SameBits(outputs, Specify(problem))) << Describe(problem);
  }
}

TEST_P(Padding, KeysThatAreTheArrayOfQueriesHaveLengthsOfTheirOwn) {
  LayerProblem problem;
  static_cast<AttentionSizes &>(problem) = Mixed({{5, 40}, {33, 2}}, Side::kRight, false);
  problem.query_dim = problem.key_dim = problem.value_dim = problem.output_dim = 12;
  problem.n_q = problem.n_kv;
  problem.has_key = true;
  problem = NormalLayer(problem);
  problem.key = problem.query;
  const Layer layer = Make(problem);
  LayerCall call;
  call.asked = kAskNothing;
  ForwardData data(layer.get(), problem, call);
  data.args.key.data = data.args.query.data;
  EXPECT_TRUE(SameBits("y", data.Compute().y, Specify(problem).y));
}

// Left padding, said by one array: the queries that are padding, too, stand before the first key,
// and see nothing.
TEST_P(Padding, BeforeTheKeysIsThatOfTheQueriesOfACausalCall) {
  AttentionProblem problem = Mixed({{5, 5}, {0, 0}, {70, 70}, {33, 33}}, Side::kLeft, true);
  problem.n_kv = problem.n_q;
  problem.kv_start = problem.q_first;
  Random random(7);
  FillNormal(&random, &problem);
  problem.rope = MakeRope(false, 6, 100);
  const Outputs expected = Attend(problem, PlainCall());
  problem.q_first.clear();
  problem.q_lengths.clear();
  problem.kv_lengths.clear();
  const Outputs outputs = Attend(problem, PlainCall());
  for (const auto field :
       {&Outputs::y, &Outputs::lse, &Outputs::attention_weights, &Outputs::masked_scores}) {
    EXPECT_TRUE(SameBits("output", outputs.*field, expected.*field));
  }
}

}  // namespace
