// Sliding windows: who attends to whom, that what no row sees is unread, and that chunks stay where they are.
#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "support/attention_test.h"
#include "support/fixtures.h"
#include "support/instruction_sets.h"
#include "support/rounds.h"
#include "support/same_bits.h"
#include "support/schedulers.h"
#include "support/specify.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

const float kInfinity = std::numeric_limits<float>::infinity();
const float kNaN = FromBits(0xffd23456u);
constexpr int64_t kLargest = std::numeric_limits<int64_t>::max(), kFirst = -(int64_t{1} << 62);

const int64_t kWidths[] = {0, 1, 15, 16, 17, 255, 256, 257, 5000};

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

TEST_P(Window, OfAnyWidthOnEitherSideGivesTheBitsOfTheSpecification) {
  Sample sample;
  for (const auto &[n_q, n_kv] : {std::pair<int64_t, int64_t>{70, 70}, {33, 600}, {1, 1100}, {7, 1100}}) {
    for (const int64_t left : kWidths) {
      for (const bool is_causal : {false, true}) {
        if (!sample.Takes()) continue;
        AttentionProblem problem = Problem(n_q, n_kv);
        problem.is_causal = is_causal;
        problem.window_left = left;
        ExpectTheSpecification(problem);
        problem.window_right = 300 - std::min<int64_t>(left, 300);
        ExpectTheSpecification(problem);
        problem.window_left.reset();
        problem.window_right = left;
        ExpectTheSpecification(problem);
        if (HasFailure()) return;
      }
    }
  }
}

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

TEST_P(Window, OfZeroOnTheRightIsCausal) {
  AttentionProblem problem = Problem(50, 300);
  problem.window_right = 0;
  const Outputs window = Run(problem);
  problem.window_right.reset();
  problem.is_causal = true;
  EXPECT_TRUE(SameBits(window, Run(problem)));
}

TEST_P(Window, OfZeroOnBothSidesSeesTheRowsOwnKey) {
  AttentionProblem problem = Problem(280, 280, 1);
  problem.window_left = problem.window_right = 0;
  const Outputs outputs = Run(problem);
  EXPECT_TRUE(SameBits("y", outputs.y, Specify(problem).y));
  for (size_t n = 0; n < outputs.y.size(); n++) ASSERT_EQ(outputs.y[n], problem.v[n]) << n;  // its weight is exactly 1
}

// Positions may be anywhere in the range of their type, and are compared as if it had no ends.
TEST_P(Window, BordersDoNotOverflow) {
  AttentionProblem problem = Problem(9, 300);
  for (const int64_t start : {kFirst, kFirst + 1, int64_t{-300}, int64_t{-9}, int64_t{-5}, int64_t{-1}, int64_t{0}, int64_t{150},
                              int64_t{299}, int64_t{400}, kLargest - 300, kLargest - 8, kLargest}) {
    for (const int64_t left : {int64_t{0}, int64_t{200}, kLargest - 1, kLargest}) {
      for (const int64_t right : {int64_t{0}, int64_t{10}, kLargest / 2, kLargest / 2 + 150, kLargest}) {
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

// As the alignment of the first query with the first key, or of the last one with the last key, may have it.
TEST_P(Window, OfQueriesBeforeTheFirstKeyHoldsNoKey) {
  for (const auto &[n_q, n_kv] : {std::pair<int64_t, int64_t>{40, 7}, {300, 260}, {1, 20}, {110, 520}}) {
    for (const int64_t start : {-n_q, -n_q + 1, n_kv - n_q, int64_t{-20}, int64_t{-1}}) {
      AttentionProblem problem = Problem(n_q, n_kv);
      problem.is_causal = true;
      problem.q_start = {start};
      const int64_t width = problem.num_heads * problem.head_dim_v, before = std::min(n_q, std::max<int64_t>(0, -start));
      const Outputs outputs = Run(problem);
      EXPECT_TRUE(SameBits(outputs, Specify(problem))) << Describe(problem);
      EXPECT_TRUE(SameBits("y", SliceRows(outputs.y, 0, n_q, width, 0, before), std::vector<float>(before * width, 0.0f)));
      for (int64_t i = 0; i < n_q && start >= -n_q; i++) EXPECT_EQ(outputs.lse[i] == -kInfinity, i < before) << i;
      problem.window_left = 5;
      ExpectTheSpecification(problem);
      problem.is_causal = false;
      problem.window_right = 3;
      ExpectTheSpecification(problem);
      problem.score = ScoreArrays();
      problem.score->alibi_slopes = {0.5f, 0.25f};
      ExpectTheSpecification(problem);
      if (HasFailure()) return;
    }
  }
}

TEST_P(Window, BeyondTheKeysLeavesRowsEmpty) {
  AttentionProblem problem = Problem(20, 300);
  problem.q_start = {310};  // rows see the keys from 300 on, of which there are none
  problem.window_left = 10;
  const Outputs outputs = Run(problem);
  EXPECT_TRUE(SameBits("y", outputs.y, std::vector<float>(outputs.y.size(), 0.0f)));
  EXPECT_TRUE(SameBits("lse", outputs.lse, std::vector<float>(outputs.lse.size(), -kInfinity)));
  problem.q_start = {295};  // the last rows are empty, the first are not
  ExpectTheSpecification(problem);
}

// Rows q_start .. q_start + n_q see the keys from q_start - left to the last row's position + right. All others are spoiled.
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
        const int64_t end = std::min<int64_t>(problem.n_kv, start + problem.n_q + (is_causal ? 0 : left / 2));
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

// One spoiled key reaches the rows whose windows hold it, and no other.
TEST_P(Window, ASpoiledKeyReachesTheRowsThatSeeItAlone) {
  for (const int64_t left : {0, 3, 16, 40, 256, 300}) {
    for (const int64_t right : {0, 5, 64}) {
      AttentionProblem problem = Problem(530, 530, 1);
      problem.window_left = left;
      problem.window_right = right;
      const Outputs clean = Run(problem, kAskNothing);
      for (const int64_t j : {0, 17, 255, 256, 400, 529}) {
        AttentionProblem spoiled = problem;
        std::fill_n(spoiled.v.begin() + j * problem.head_dim_v, problem.head_dim_v, kNaN);
        const Outputs outputs = Run(spoiled, kAskNothing);
        for (int64_t i = 0; i < problem.n_q; i++) {
          const bool sees = j >= i - left && j <= i + right;
          const std::vector<float> row = SliceRows(outputs.y, 0, problem.n_q, problem.head_dim_v, i, 1);
          if (sees) {
            ASSERT_TRUE(std::isnan(row[0])) << "row " << i << " key " << j << " " << Describe(problem);
          } else {
            ASSERT_TRUE(SameBits("y", row, SliceRows(clean.y, 0, problem.n_q, problem.head_dim_v, i, 1)))
                << "row " << i << " key " << j << " " << Describe(problem);
          }
        }
      }
    }
  }
}

// A row's bits depend on the keys that it sees and their positions, not on what else there is.
TEST_P(Window, WholeSequenceEqualsRowByRow) {
  AttentionProblem problem = Problem(530, 530);
  problem.window_left = 270;
  problem.window_right = 20;
  const Outputs whole = Run(problem);
  for (int64_t i = 0; i < problem.n_q && !HasFailure(); i += 13) {
    const int64_t keys = std::min<int64_t>(problem.n_kv, i + 21);
    AttentionProblem row = Slice(problem, 0, i, 1, keys);
    row.q_start = {i};
    EXPECT_TRUE(SameBits(Run(row), Slice(whole, problem, problem.num_heads * problem.head_dim_v, 0, i, 1, keys))) << "row " << i;
  }
}

TEST_P(Window, IsTheSameForEveryHeadOfAGroup) {
  for (const int64_t group : {1, 2, 3, 4, 5, 8}) {
    AttentionProblem problem = Problem(13, 400, group);
    problem.window_left = 100;
    ExpectTheSpecification(problem);
    problem.n_q = 1;
    problem.q_start = {300};
    problem.q.resize(static_cast<size_t>(group * problem.head_dim));
    ExpectTheSpecification(problem);
  }
}

TEST_P(Window, AnySchedulerGivesTheSameBits) {
  for (const int64_t left : {20, 300}) {
    AttentionProblem problem = Problem(530, 530);
    problem.batch = 2;
    Random random(5);
    FillNormal(&random, &problem);
    problem.window_left = left;
    problem.is_causal = true;
    const Outputs expected = Run(problem, kAskLse);
    for (uint32_t num_threads = 1; num_threads <= 4; num_threads++) {
      for (const auto parallel_for : {RunOnThreads, RunBackwards}) {
        const Scheduler scheduler(num_threads, parallel_for);
        AttentionCall call = PlainCall();
        call.scheduler = scheduler.get();
        call.asked = kAskLse;
        EXPECT_TRUE(SameBits(Attend(problem, call), expected)) << num_threads << " threads";
      }
    }
  }
}

TEST_P(Window, OfALayerGivesTheBitsOfTheSpecification) {
  for (const bool is_causal : {false, true}) {
    LayerProblem problem;
    problem.n_q = problem.n_kv = 300;
    problem.num_heads = 2;
    problem.num_kv_heads = 1;
    problem.head_dim = problem.head_dim_v = 4;
    problem.query_dim = problem.key_dim = problem.value_dim = problem.output_dim = 8;
    problem.window_left = 30;
    problem.window_right = 10;
    problem.is_causal = is_causal;
    Random random(6);
    FillNormal(&random, kAllBiases, true, &problem);
    ExpectTheSpecification(problem);
  }
}

}  // namespace
