// Head scales, of which 0 leaves a head out of a call: the bits of the specification, and that nothing of a head that is left out is read.
#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "support/interface_support.h"
#include "oracle/oracle.h"
#include "support/accuracy.h"
#include "support/attention_test.h"
#include "support/fixtures.h"
#include "support/instruction_sets.h"
#include "support/rounds.h"
#include "support/same_bits.h"
#include "support/schedulers.h"
#include "support/specify.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

const float kNaN = FromBits(0xffd23456u);

// Some are 0, also all of a kv head and all that there are.
std::vector<float> RandomScales(Random *random, int64_t heads) {
  std::vector<float> scales = random->Normals(heads);
  const double zeros = random->Pick({0.0, 0.3, 0.7, 1.0});
  for (float &scale : scales) {
    if (random->Chance(zeros)) scale = random->Coin() ? 0.0f : -0.0f;
  }
  return scales;
}

class HeadScalesTest : public AttentionTest {};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(HeadScalesTest);

TEST_P(HeadScalesTest, RandomCasesEqualTheSpecification) {
  for (int64_t n = 0; n < Rounds(300) && !HasFailure(); n++) {
    Random random(11000 + static_cast<uint64_t>(n));
    AttentionProblem problem;
    problem.num_kv_heads = random.Between(1, 3);
    problem.num_heads = problem.num_kv_heads * random.Pick<int64_t>({1, 2, 3, 5});
    problem.batch = random.Between(1, 3);
    problem.n_q = random.Pick<int64_t>({1, 1, 2, 7, 17, 90});
    problem.n_kv = random.Coin() ? problem.n_q : random.Pick<int64_t>({0, 1, 16, 33, 257, 1100, 2500});
    problem.head_dim = random.Pick<int64_t>({1, 8, 19});
    problem.head_dim_v = random.Pick<int64_t>({1, 8, 19});
    problem.is_causal = random.Coin() && problem.n_q <= problem.n_kv;
    if (random.Chance(0.3)) problem.window_left = random.Pick<int64_t>({0, 5, 300});
    if (random.Chance(0.3)) {
      for (int64_t b = 0; b < problem.batch; b++) {
        problem.q_lengths.push_back(random.Between(0, problem.n_q));
        problem.kv_lengths.push_back(random.Between(0, problem.n_kv));
        problem.q_start.push_back(random.Between(0, problem.n_kv));
      }
      problem.padding_left = random.Coin();
    } else {
      problem.q_start.assign(static_cast<size_t>(problem.batch), std::max<int64_t>(0, problem.n_kv - problem.n_q));
    }
    problem.score = ScoreArrays();
    problem.score->head_scales = RandomScales(&random, problem.num_heads);
    if (random.Coin()) problem.score->alibi_slopes = random.Normals(problem.num_heads, 0.1f);
    if (random.Coin()) problem.score->sinks = random.Normals(problem.num_heads);
    if (random.Chance(0.3)) {
      problem.score->mask.by_head = true;
      problem.score->mask.values.resize(static_cast<size_t>(problem.num_heads * problem.n_q * problem.n_kv));
      for (uint8_t &attends : problem.score->mask.values) attends = random.Coin();
    }
    FillNormal(&random, &problem);
    if (random.Chance(0.2)) problem.v = RandomValues(&random, Values::kSpecial, static_cast<int64_t>(problem.v.size()));
    AttentionCall call = PlainCall();
    call.asked = random.Coin() ? kAskAllOfAttention : kAskNothing;
    const Scheduler scheduler(static_cast<uint32_t>(random.Between(1, 4)), RunBackwards);
    if (random.Chance(0.5)) call.scheduler = scheduler.get();
    SCOPED_TRACE("case " + std::to_string(n));
    EXPECT_TRUE(SameBits(Attend(problem, call), Specify(problem))) << Describe(problem);
  }
}

// A cache takes the keys of all heads, whatever the scales of the call that appends them.
TEST_P(HeadScalesTest, OverACacheAreThoseOfTheWholePrompt) {
  const int64_t n = 300;
  for (const Storage type : {Storage::kF32, Storage::kF16, Storage::kInt8}) {
    Random random(3);
    AttentionSizes sizes;
    sizes.n_q = sizes.n_kv = n;
    sizes.num_heads = 6;
    sizes.num_kv_heads = 3;
    sizes.head_dim = 8;
    sizes.head_dim_v = 12;
    sizes.is_causal = true;
    sizes.k_type = sizes.v_type = type;
    AttentionProblem whole = NormalAttention(sizes);
    whole.score = ScoreArrays();
    whole.score->head_scales = {0.0f, 0.0f, 1.5f, 0.0f, -1.0f, 1.0f};
    const Outputs some = Specify(whole);
    AttentionProblem unscaled = whole;
    unscaled.score.reset();
    const Outputs all = Specify(unscaled);
    Cache cache(CacheConfigOf(whole, {MHA_CACHE_CONTIGUOUS, n}, 1, n));
    for (int64_t done = 0; done < n && !HasFailure();) {
      const int64_t count = std::min<int64_t>(n - done, done == 0 ? 280 : 3);
      AttentionProblem part = Slice(done % 2 == 0 ? whole : unscaled, 0, done, count, 0);
      part.n_kv = count;
      part.k = SliceRows(whole.k, 0, n, whole.num_kv_heads * whole.head_dim, done, count);
      part.v = SliceRows(whole.v, 0, n, whole.num_kv_heads * whole.head_dim_v, done, count);
      AttentionCall call = PlainCall();
      call.asked = kAskNothing;
      call.cache.cache = cache.get();
      EXPECT_TRUE(SameBits(Attend(part, call).y, SliceRows(done % 2 == 0 ? some.y : all.y, 0, n, 6 * 12, done, count))) << done;
      done += count;
    }
  }
}

TEST_P(HeadScalesTest, AreAsExactAsFloatAllows) {
  for (uint64_t seed = 0; seed < 20 && !HasFailure(); seed++) {
    Random random(seed);
    AttentionSizes sizes;
    sizes.n_q = 9;
    sizes.n_kv = random.Pick<int64_t>({9, 300});
    sizes.num_heads = 6;
    sizes.num_kv_heads = 2;
    sizes.head_dim = sizes.head_dim_v = 11;
    AttentionProblem problem = NormalAttention(sizes, seed);
    problem.score = ScoreArrays();
    problem.score->head_scales = RandomScales(&random, 6);
    const Outputs actual = Run(problem);
    WithScoreOptions(problem, 0, [&](const ScoreOptions *options) {
      AttentionShape shape = ShapeOf(problem, 0);
      shape.score = options;
      const auto exact = oracle::AttentionForward<double>(shape, Widen(problem.q), Widen(problem.k), Widen(problem.v));
      const auto bound = oracle::BoundAttention(shape, Widen(problem.q), Widen(problem.k), Widen(problem.v), {}, {}, {}, exact);
      const auto worst = [](const std::vector<float> &x, const std::vector<double> &of, const std::vector<double> &limits) {
        double ratio = 0;
        for (size_t n = 0; n < of.size(); n++) ratio = std::max(ratio, BoundRatio(x[n], of[n], limits[n]));
        return ratio;
      };
      EXPECT_LE(worst(actual.y, exact.context, bound.context), 1.0);
      EXPECT_LE(worst(actual.lse, exact.lse, bound.lse), 1.0);
      EXPECT_LE(worst(actual.attention_weights, exact.weights, bound.weights), 1.0);
    });
  }
}

// The arrays end where the rows of the last heads would begin, next to memory that nobody may touch.
TEST_P(HeadScalesTest, OfZeroLeaveQueriesKeysAndValuesUnread) {
  AttentionSizes sizes;
  sizes.n_q = 5;
  sizes.n_kv = 270;
  sizes.num_heads = 4;
  sizes.num_kv_heads = 2;
  sizes.head_dim = sizes.head_dim_v = 8;
  const AttentionProblem problem = NormalAttention(sizes);
  AttentionCall call = PlainCall();
  call.asked = kAskAllOfAttention;
  call.q = call.k = call.v = kHeadsOutside;
  AttentionData data(problem, call);
  const float scales[] = {0.5f, 2.0f, 0.0f, 0.0f};
  data.score.head_scales = scales;
  data.args.score = &data.score;
  const Outputs expected = data.Compute();
  const auto first_half = [](const void *x, int64_t rows, int64_t heads) {
    Memory half(static_cast<size_t>(rows * heads * 8) * sizeof(float), Place::kBeforeGuard);
    std::memcpy(half.data(), x, half.size());
    return half;
  };
  const Memory q = first_half(data.args.q, 5, 2), k = first_half(data.args.k, 270, 1), v = first_half(data.args.v, 270, 1);
  data.args.q = q.floats();
  data.args.k = k.floats();
  data.args.v = v.floats();
  EXPECT_TRUE(SameBits(data.Compute(), expected));
}

TEST(HeadScales, OfZeroCostNothing) {
  AttentionSizes sizes;
  sizes.n_q = sizes.n_kv = 20;
  sizes.num_heads = sizes.num_kv_heads = 4;
  sizes.head_dim = sizes.head_dim_v = 8;
  AttentionData data(NormalAttention(sizes));
  const auto operations = [&] {
    mha_call_info info = Zeroed<mha_call_info>();
    mha_error error;
    Check(data.Info(&info, &error), error);
    return info.operations;
  };
  const uint64_t all = operations();
  const float scales[] = {1.0f, 0.0f, 0.0f, 2.0f};
  data.score.head_scales = scales;
  data.args.score = &data.score;
  EXPECT_EQ(operations(), all / 2);
}

}  // namespace
