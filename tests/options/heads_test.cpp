// Head scales, of which 0 leaves a head out of a call: they are exact, and nothing of a head that
// is left out is read.
#include <gtest/gtest.h>
#include <mha.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "support/accuracy.h"
#include "support/attention_test.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

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
    ExpectTheErrorBound(problem, Run(problem));
  }
}

// The arrays end where the rows of the last heads would begin, next to memory that nobody may
// touch.
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
  const Memory q = first_half(data.args.q.data, 5, 2), k = first_half(data.args.k.data, 270, 1),
               v = first_half(data.args.v.data, 270, 1);
  data.args.q.data = q.floats();
  data.args.k.data = k.floats();
  data.args.v.data = v.floats();
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
