// What rotary position embedding is for. Its bits in every way of calling are those of the
// generated cases.
#include "support/rope.h"

#include <gtest/gtest.h>
#include <mha.h>

#include <cmath>
#include <cstdint>

#include "support/attention_test.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

class Rope : public AttentionTest {
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
};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(Rope);

TEST_P(Rope, ByTheAngleZeroChangesNothing) {
  AttentionProblem problem = Problem(30, 30, 8);
  const Outputs expected = Run(problem);
  problem.rope = MakeRope(false, 8, 30);
  for (float &cos : problem.rope->cos) cos = 1;
  for (float &sin : problem.rope->sin) sin = 0;
  EXPECT_TRUE(SameBits(Run(problem), expected));
}

// The rest of a head as it would be alone, where the other elements add nothing to the scores; and
// they are not rotated.
TEST_P(Rope, FromAnOffsetLeavesTheOtherElements) {
  const struct {
    int64_t head_dim, offset, dims;
  } parts[] = {{24, 8, 16}, {21, 5, 6}, {192, 128, 64}, {576, 512, 64}};
  for (const auto &part : parts) {
    for (const bool is_interleaved : {false, true}) {
      AttentionProblem whole = Problem(20, 20, part.head_dim), alone = Problem(20, 20, part.dims),
                       rest = whole;
      whole.scale = alone.scale = 0.125f;
      for (const auto x : {&AttentionProblem::q, &AttentionProblem::k}) {
        for (int64_t i = 0; i < static_cast<int64_t>((whole.*x).size()); i++) {
          const int64_t d = i % part.head_dim - part.offset, row = i / part.head_dim;
          const bool is_inside = d >= 0 && d < part.dims;
          (whole.*x)[i] = is_inside ? (alone.*x)[row * part.dims + d] : 0;
          if (is_inside) (rest.*x)[i] = 0;
        }
      }
      alone.v = whole.v;
      const Outputs unrotated = Run(rest);
      alone.rope = whole.rope = MakeRope(is_interleaved, part.dims, 20);
      whole.rope->offset = part.offset;
      rest.rope = whole.rope;
      EXPECT_TRUE(SameBits(Run(whole), Run(alone))) << part.offset;
      EXPECT_TRUE(SameBits(Run(rest), unrotated)) << part.offset;
    }
  }
}

// What it is for: a score depends on how far apart query and key are. Beside the angles' cosines
// and sines in float64.
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
        const int64_t first = is_interleaved ? 2 * i : i,
                      second = is_interleaved ? 2 * i + 1 : i + kDims / 2;
        const double angle = RopeAngle(distance, i, kDims);
        const double qa = problem.q[first], qb = problem.q[second], ka = problem.k[first],
                     kb = problem.k[second];
        exact += (qa * ka + qb * kb) * std::cos(angle) + (qa * kb - qb * ka) * std::sin(angle);
        magnitude += (std::fabs(qa) + std::fabs(qb)) * (std::fabs(ka) + std::fabs(kb));
      }
      problem.rope = MakeRope(is_interleaved, kDims, kPositions);
      for (const int64_t position : {0, 1, 50, 1000}) {
        problem.rope->q_positions = {position + distance};
        problem.rope->k_positions = {position};
        const Outputs outputs = Run(problem);
        EXPECT_NEAR(outputs.scores[0], exact, magnitude * 1e-6)
            << "from " << position << " over " << distance;
      }
    }
  }
}

}  // namespace
