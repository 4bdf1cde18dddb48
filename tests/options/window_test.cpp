// Sliding windows: their limits, and that what no row sees is unread. Who attends to whom is in the
// generated cases.
#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "support/attention_test.h"
#include "support/rounds.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

const float kInfinity = std::numeric_limits<float>::infinity();
const float kNaN = FromBits(0xffd23456u);
constexpr int64_t kLargest = std::numeric_limits<int64_t>::max(), kFirst = -(int64_t{1} << 62);

class Window : public AttentionTest {
 protected:
  AttentionProblem Problem(int64_t n_q, int64_t n_kv, int64_t group = 2) const {
    Random random(static_cast<uint64_t>(1000 * n_q + n_kv));
    AttentionProblem problem;
    problem.n_q = n_q;
    problem.n_kv = n_kv;
    problem.num_heads = group;
    problem.num_kv_heads = 1;
    problem.head_dim = 6;
    problem.head_dim_v = 5;
    FillNormal(&random, &problem);
    return problem;
  }
};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(Window);

TEST_P(Window, OfAnyWidthOverSeveralChunksOfRowsAndKeysGivesTheBitsOfTheSpecification) {
  Sample sample;
  for (const int64_t left : {0, 1, 16, 100, 256, 400}) {
    if (!sample.Takes()) continue;
    AttentionProblem problem = Problem(1100, 1100);
    problem.is_causal = left % 2 == 0;
    problem.window_left = left;
    if (left == 400) problem.window_right = 3;
    EXPECT_TRUE(SameBits(Run(problem, kAskLse), Specify(problem))) << Describe(problem);
  }
}

TEST_P(Window, ThatIsWideEnoughIsNone) {
  for (const bool is_causal : {false, true}) {
    AttentionProblem problem = Problem(300, 530);
    problem.is_causal = is_causal;
    const Outputs expected = Run(problem);
    for (const int64_t width : {int64_t{530}, int64_t{100000}, kLargest}) {
      problem.window_left = problem.window_right = width;
      EXPECT_TRUE(SameBits(Run(problem), expected)) << Describe(problem);
    }
  }
}

TEST_P(Window, IsNoneWhereverTheQueriesStart) {
  for (const auto &[n_q, n_kv] : {std::pair<int64_t, int64_t>{5, 20}, {1, 600}, {30, 7}}) {
    AttentionProblem problem = Problem(n_q, n_kv);
    const Outputs expected = Run(problem);
    for (const int64_t start : {-kLargest - 1, -kLargest, int64_t{-3}, int64_t{0}, kLargest}) {
      problem.q_start = {start};
      EXPECT_TRUE(SameBits(Run(problem), expected)) << Describe(problem);
    }
  }
}

TEST_P(Window, OfZeroOnBothSidesSeesTheRowsOwnKey) {
  AttentionProblem problem = Problem(280, 280, 1);
  problem.window_left = problem.window_right = 0;
  const Outputs outputs = Run(problem);
  EXPECT_TRUE(SameBits("y", outputs.y, Specify(problem).y));
  for (size_t n = 0; n < outputs.y.size(); n++)
    ASSERT_EQ(outputs.y[n], problem.v[n]) << n;  // its weight is exactly 1
}

// Positions may be anywhere in the range of their type, and are compared as if it had no ends.
TEST_P(Window, BordersDoNotOverflow) {
  AttentionProblem problem = Problem(9, 300);
  for (const int64_t start :
       {kFirst, kFirst + 1, int64_t{-300}, int64_t{-9}, int64_t{-5}, int64_t{-1}, int64_t{0},
        int64_t{150}, int64_t{299}, int64_t{400}, kLargest - 300, kLargest - 8, kLargest}) {
    for (const int64_t left : {int64_t{0}, int64_t{200}, kLargest - 1, kLargest}) {
      for (const int64_t right :
           {int64_t{0}, int64_t{10}, kLargest / 2, kLargest / 2 + 150, kLargest}) {
        problem.q_start = {start};
        problem.window_left = left;
        problem.window_right = right;
        problem.is_causal = right == 10;
        ExpectTheSpecification(problem);
        if (HasFailure()) return;
      }
    }
  }
}

// Rows q_start .. q_start + n_q see the keys from q_start - left to the last row's position +
// right. All others are spoiled.
TEST_P(Window, KeysOutsideEveryRowsWindowAreUnread) {
  Sample sample;
  for (const int64_t start : {0, 5, 250, 256, 500, 777, 1000}) {
    for (const int64_t left : {0, 1, 15, 16, 17, 255, 256, 257}) {
      for (const bool is_causal : {false, true}) {
        if (!sample.Takes()) continue;
        AttentionProblem problem = Problem(7, 1100);
        problem.q_start = {start};
        problem.is_causal = is_causal;
        problem.window_left = left;
        problem.window_right = left / 2;
        const int64_t begin = std::max<int64_t>(0, start - left);
        const int64_t end =
            std::min<int64_t>(problem.n_kv, start + problem.n_q + (is_causal ? 0 : left / 2));
        const auto spoil = [&](int64_t j, float value) {
          std::fill_n(problem.k.begin() + j * problem.head_dim, problem.head_dim, value);
          std::fill_n(problem.v.begin() + j * problem.head_dim_v, problem.head_dim_v, value);
        };
        const uint32_t asked = kAskLse | kAskWeights | kAskMaskedScores;
        const Outputs clean = Run(problem, asked);
        for (int64_t j = 0; j < problem.n_kv; j++) {
          if (j < begin || j >= end) spoil(j, j % 2 ? kNaN : kInfinity);
        }
        EXPECT_TRUE(SameBits(Run(problem, asked), clean)) << Describe(problem);
        EXPECT_TRUE(SameBits(Run(problem, kAskNothing), clean)) << Describe(problem);
        if (HasFailure()) return;
      }
    }
  }
}

}  // namespace
