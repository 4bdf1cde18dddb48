// Rotary position embedding: queries and keys are rotated as the contract says, in every way of calling.

#include <gtest/gtest.h>
#include <mha.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "support/attention_test.h"
#include "support/fixtures.h"
#include "support/instruction_sets.h"
#include "support/rope.h"
#include "support/same_bits.h"
#include "support/schedulers.h"

namespace {

using support::AttentionProblem;
using support::Forward;
using support::Layer;
using support::LayerCall;
using support::LayerProblem;
using support::MakeRope;
using support::Outputs;
using support::Random;
using support::SameBits;
using support::Scheduler;

class Rope : public support::AttentionTest {
 protected:
  AttentionProblem Problem(int64_t n_q, int64_t n_kv, int64_t head_dim) const {
    Random random(static_cast<uint64_t>(1000 * n_q + n_kv + head_dim));
    AttentionProblem problem;
    problem.n_q = n_q;
    problem.n_kv = n_kv;
    problem.num_heads = 4;
    problem.num_kv_heads = 2;
    problem.head_dim = head_dim;
    problem.head_dim_v = 5;
    problem.is_causal = true;
    FillNormal(&random, &problem);
    return problem;
  }

  LayerProblem SelfAttention(int64_t batch, int64_t n, int64_t head_dim, int64_t head_dim_v) const {
    LayerProblem problem;
    problem.batch = batch;
    problem.n_q = problem.n_kv = n;
    problem.num_heads = 4;
    problem.num_kv_heads = 2;
    problem.head_dim = head_dim;
    problem.head_dim_v = head_dim_v;
    problem.query_dim = problem.key_dim = problem.value_dim = 10;
    problem.output_dim = 9;
    problem.is_causal = true;
    Random random(static_cast<uint64_t>(n + head_dim));
    FillNormal(&random, support::kAllBiases, true, &problem);
    return problem;
  }
};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(Rope);

TEST_P(Rope, OfEitherStyleGivesTheBitsOfTheSpecification) {
  for (const bool is_interleaved : {false, true}) {
    for (const int64_t head_dim : {2, 4, 6, 8, 10, 14, 16, 18, 30, 32, 34, 48, 62, 64, 66, 128}) {
      AttentionProblem problem = Problem(19, 33, head_dim);
      problem.rope = MakeRope(is_interleaved, head_dim, 33);
      ExpectTheSpecification(problem);
    }
  }
}

TEST_P(Rope, OfPartOfAHeadLeavesTheRestAsItIs) {
  for (const bool is_interleaved : {false, true}) {
    for (const int64_t head_dim : {3, 7, 16, 33, 64}) {
      for (int64_t dims = 2; dims <= head_dim; dims += 2) {
        AttentionProblem problem = Problem(5, 9, head_dim);
        problem.rope = MakeRope(is_interleaved, dims, 9);
        ExpectTheSpecification(problem);
      }
    }
  }
}

TEST_P(Rope, TakesTablesThatAreNotFinite) {
  const float special[] = {support::FromBits(0x7fc00001u), support::FromBits(0xff800123u), std::numeric_limits<float>::infinity(),
                           0x1p-140f, -0.0f};
  for (const bool is_interleaved : {false, true}) {
    for (const int64_t row : {0, 9, 32}) {
      AttentionProblem problem = Problem(19, 33, 34);
      problem.rope = MakeRope(is_interleaved, 34, 33);
      for (int64_t i = 0; i < 5; i++) problem.rope->sin[static_cast<size_t>(row * problem.rope->table_stride + 3 * i)] = special[i];
      ExpectTheSpecification(problem);
      problem.rope->cos = problem.rope->sin;
      ExpectTheSpecification(problem);
    }
  }
}

TEST_P(Rope, TakesTheWholeHeadAndContiguousTablesByDefault) {
  for (const bool is_interleaved : {false, true}) {
    AttentionProblem problem = Problem(5, 9, 8);
    problem.rope = MakeRope(is_interleaved, 8, 9);
    const Outputs given = Run(problem);
    problem.rope->use_defaults = true;
    EXPECT_TRUE(SameBits(Run(problem), given));
    ExpectTheSpecification(problem);
  }
}

TEST_P(Rope, TablesMayHaveGaps) {
  for (const int64_t gap : {1, 5, 16}) {
    AttentionProblem problem = Problem(20, 20, 12);
    problem.rope = MakeRope(false, 10, 20, gap);
    ExpectTheSpecification(problem);
  }
}

TEST_P(Rope, PositionsStartAtTheSequencesFirstKeyByDefault) {
  AttentionProblem problem = Problem(20, 300, 8);
  problem.rope = MakeRope(true, 8, 300);
  const Outputs by_default = Run(problem);
  for (int64_t i = 0; i < problem.n_q; i++) problem.rope->q_positions.push_back(problem.n_kv - problem.n_q + i);
  for (int64_t j = 0; j < problem.n_kv; j++) problem.rope->k_positions.push_back(j);
  EXPECT_TRUE(SameBits(Run(problem), by_default));
  ExpectTheSpecification(problem);
}

TEST_P(Rope, PositionsOfQueriesFollowTheirStart) {
  for (const bool is_causal : {false, true}) {
    AttentionProblem problem = Problem(20, 40, 8);
    problem.is_causal = is_causal;
    problem.q_start = {7};
    problem.rope = MakeRope(false, 8, 60);
    ExpectTheSpecification(problem);
  }
}

TEST_P(Rope, ExplicitPositionsMoveTheRotationAndNotTheMask) {
  for (const bool is_interleaved : {false, true}) {
    Random random(8);
    AttentionProblem problem = Problem(30, 280, 8);
    problem.batch = 3;
    FillNormal(&random, &problem);
    problem.window_left = 100;
    problem.rope = MakeRope(is_interleaved, 6, 50);
    for (int64_t n = 0; n < problem.batch * problem.n_q; n++) problem.rope->q_positions.push_back(random.Between(0, 49));
    for (int64_t n = 0; n < problem.batch * problem.n_kv; n++) problem.rope->k_positions.push_back(random.Between(0, 49));
    ExpectTheSpecification(problem);
  }
}

// Under the sanitizers this also shows that nothing is added to that start.
TEST_P(Rope, ExplicitPositionsGoWithTheLargestStart) {
  AttentionProblem problem = Problem(9, 40, 8);
  problem.q_start = {std::numeric_limits<int64_t>::max()};
  problem.rope = MakeRope(false, 8, 50);
  for (int64_t n = 0; n < problem.n_q; n++) problem.rope->q_positions.push_back(49 - n);
  for (int64_t n = 0; n < problem.n_kv; n++) problem.rope->k_positions.push_back(n);
  ExpectTheSpecification(problem);
}

TEST_P(Rope, PositionsOfPaddingAreNotLookedAt) {
  for (const bool padding_left : {false, true}) {
    Random random(9);
    AttentionProblem problem = Problem(12, 40, 8);
    problem.batch = 3;
    problem.padding_left = padding_left;
    problem.q_lengths = {5, 0, 12};
    problem.kv_lengths = {5, 40, 13};
    FillNormal(&random, &problem);
    FillPadding(support::FromBits(0x7fc0dead), &problem);
    problem.rope = MakeRope(false, 8, 40);
    ExpectTheSpecification(problem);  // by default they count from the first valid key
    problem.rope->q_positions.assign(static_cast<size_t>(problem.batch * problem.n_q), 3);
    problem.rope->k_positions.assign(static_cast<size_t>(problem.batch * problem.n_kv), 11);
    ForEachPaddingRow(problem, true, [&](int64_t row) { problem.rope->q_positions[row] = -1 - row; });
    ForEachPaddingRow(problem, false, [&](int64_t row) { problem.rope->k_positions[row] = 40 + row; });
    ExpectTheSpecification(problem);
  }
}

TEST_P(Rope, OfALayerGivesTheBitsOfTheSpecification) {
  for (const bool is_interleaved : {false, true}) {
    for (const int64_t head_dim : {2, 6, 16, 20, 48}) {
      for (const int64_t n : {1, 5, 40}) {
        LayerProblem problem = SelfAttention(2, n, head_dim, 7);
        problem.rope = MakeRope(is_interleaved, head_dim, n);
        ExpectTheSpecification(problem);  // the taps q and k, before the rotation, included
        problem.rope = MakeRope(is_interleaved, head_dim >= 4 ? head_dim / 4 * 2 : 2, n, 3);
        ExpectTheSpecification(problem);
      }
    }
  }
}

TEST_P(Rope, OfALayerTakesExplicitPositions) {
  for (const bool padding_left : {false, true}) {
    LayerProblem problem = SelfAttention(3, 21, 8, 8);
    Random random(10);
    problem.padding_left = padding_left;
    problem.q_lengths = problem.kv_lengths = {21, 4, 9};
    FillPadding(support::FromBits(0x7fc0dead), &problem);
    problem.rope = MakeRope(false, 8, 100);
    ExpectTheSpecification(problem);
    for (int64_t n = 0; n < 3 * 21; n++) problem.rope->q_positions.push_back(random.Between(0, 99));
    ExpectTheSpecification(problem);
    problem.rope->k_positions = problem.rope->q_positions;
    ExpectTheSpecification(problem);
    problem.rope->q_positions.clear();
    ExpectTheSpecification(problem);
  }
}

TEST_P(Rope, OfALayerWithItsOwnKeysGivesTheBitsOfTheSpecification) {
  LayerProblem problem = SelfAttention(2, 9, 8, 8);
  problem.has_key = problem.has_value = true;
  problem.n_kv = 280;
  problem.key_dim = 6;
  problem.value_dim = 5;
  Random random(11);
  FillNormal(&random, support::kAllBiases, true, &problem);
  problem.rope = MakeRope(true, 8, 280);
  ExpectTheSpecification(problem);
}

TEST_P(Rope, AnySchedulerGivesTheSameBits) {
  LayerProblem problem = SelfAttention(2, 300, 8, 8);
  problem.rope = MakeRope(true, 8, 300);
  const Layer layer = Make(problem);
  const Outputs expected = Forward(layer.get(), problem);
  for (uint32_t num_threads = 1; num_threads <= 4; num_threads++) {
    for (const auto parallel_for : {support::RunOnThreads, support::RunBackwards}) {
      const Scheduler scheduler(num_threads, parallel_for);
      LayerCall call;
      call.scheduler = scheduler.get();
      EXPECT_TRUE(SameBits(Forward(layer.get(), problem, call), expected)) << num_threads << " threads";
    }
  }
}

TEST_P(Rope, ByTheAngleZeroChangesNothing) {
  AttentionProblem problem = Problem(30, 30, 8);
  const Outputs expected = Run(problem);
  problem.rope = MakeRope(false, 8, 30);
  for (float &cos : problem.rope->cos) cos = 1;
  for (float &sin : problem.rope->sin) sin = 0;
  EXPECT_TRUE(SameBits(Run(problem), expected));
}

// What it is for: a score depends on how far apart query and key are. Beside the angles' cosines and sines in float64.
TEST_P(Rope, ScoresDependOnTheDistanceAlone) {
  constexpr int64_t kDims = 16, kPositions = 2000;
  for (const bool is_interleaved : {false, true}) {
    for (const int64_t distance : {0, 1, 7, 100, 900}) {
      AttentionProblem problem = Problem(1, 1, kDims);
      problem.num_heads = problem.num_kv_heads = 1;
      problem.is_causal = false;
      problem.q.resize(kDims);
      problem.k.resize(kDims);
      problem.v.resize(static_cast<size_t>(problem.head_dim_v));
      double exact = 0, magnitude = 0;
      for (int64_t i = 0; i < kDims / 2; i++) {
        const int64_t first = is_interleaved ? 2 * i : i, second = is_interleaved ? 2 * i + 1 : i + kDims / 2;
        const double angle = support::RopeAngle(distance, i, kDims);
        const double qa = problem.q[first], qb = problem.q[second], ka = problem.k[first], kb = problem.k[second];
        exact += (qa * ka + qb * kb) * std::cos(angle) + (qa * kb - qb * ka) * std::sin(angle);
        magnitude += (std::fabs(qa) + std::fabs(qb)) * (std::fabs(ka) + std::fabs(kb));
      }
      problem.rope = MakeRope(is_interleaved, kDims, kPositions);
      for (const int64_t position : {0, 1, 50, 1000}) {
        problem.rope->q_positions = {position + distance};
        problem.rope->k_positions = {position};
        const Outputs outputs = Run(problem);
        EXPECT_NEAR(outputs.scores[0], exact, magnitude * 1e-6) << "from " << position << " over " << distance;
      }
    }
  }
}

}  // namespace
