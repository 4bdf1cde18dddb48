// Accuracy on extreme numbers: attention and whole layers against the float64 oracle, within the
// a-priori bound of each element (oracle.cpp has the derivation) and about as good as naive float32
// code or better. On the instruction set that is chosen by default; the others give the same bits.
// specification_test.cpp has random options.

#include "support/accuracy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "support/fixtures.h"
#include "support/same_bits.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

void Multiply(std::vector<float> *x, float factor) {
  for (float &value : *x) value *= factor;
}

AttentionProblem RandomAttention(uint64_t seed, int64_t n_q, int64_t n_kv, int64_t head_dim) {
  AttentionSizes sizes;
  sizes.n_q = n_q;
  sizes.n_kv = n_kv;
  sizes.num_heads = 4;
  sizes.num_kv_heads = 2;
  sizes.head_dim = sizes.head_dim_v = head_dim;
  return NormalAttention(sizes, seed);
}

void ExpectAccurateAttention(const std::string &name, const AttentionProblem &problem) {
  ExpectAccurate(name, problem, Attend(problem));
}

// ---- The middle stage

TEST(AttentionAccuracy, OrdinaryScores) {
  for (const int64_t head_dim : {1, 8, 64, 300}) {
    AttentionProblem problem = RandomAttention(1, 70, 130, head_dim);
    ExpectAccurateAttention("head_dim " + std::to_string(head_dim), problem);
    problem = RandomAttention(2, 130, 130, head_dim);
    problem.is_causal = true;
    ExpectAccurateAttention("head_dim " + std::to_string(head_dim) + " causal", problem);
  }
}

TEST(AttentionAccuracy, ScoresBetweenMinusAndPlusHundred) {
  for (const int64_t head_dim : {2, 16, 64}) {
    AttentionProblem problem = RandomAttention(3, 100, 200, head_dim);
    Multiply(&problem.q, 6);
    Multiply(&problem.k, 6);
    const Outputs outputs = Attend(problem);
    float largest = 0;
    for (const float score : outputs.scaled_scores) largest = std::max(largest, std::fabs(score));
    EXPECT_GT(largest, 100);  // or else the case is not what it is named
    ExpectAccurate("wide scores, head_dim " + std::to_string(head_dim), problem, outputs);
  }
}

TEST(AttentionAccuracy, AllScoresFarFromZero) {
  AttentionProblem problem = RandomAttention(4, 60, 200, 16);
  for (float &value : problem.q) value = std::fabs(value) + 8;
  for (float &value : problem.k) value = value * 0.1f + 8;
  ExpectAccurateAttention("all scores near 300", problem);
  Multiply(&problem.k, -1);
  ExpectAccurateAttention("all scores near -300", problem);
}

TEST(AttentionAccuracy, IdenticalRows) {
  AttentionProblem problem = RandomAttention(5, 40, 90, 32);
  for (size_t n = 0; n < problem.q.size(); n++) problem.q[n] = problem.q[n % 128];
  for (size_t n = 0; n < problem.k.size(); n++) problem.k[n] = problem.k[n % 64];
  for (size_t n = 0; n < problem.v.size(); n++) problem.v[n] = problem.v[n % 64];
  ExpectAccurateAttention("identical rows", problem);
}

TEST(AttentionAccuracy, EqualScoresAverageTheValues) {
  AttentionProblem problem = RandomAttention(6, 5, 333, 24);
  Multiply(&problem.q, 0);
  ExpectAccurateAttention("equal scores", problem);
}

TEST(AttentionAccuracy, OneKeyTakesAll) {
  AttentionProblem problem = RandomAttention(7, 30, 50, 16);
  Multiply(&problem.q, 40);
  Multiply(&problem.k, 40);
  ExpectAccurateAttention("one key takes all", problem);
}

TEST(AttentionAccuracy, OneKeyGivesItsValueExactly) {
  AttentionProblem problem = RandomAttention(8, 17, 1, 48);
  const Outputs outputs = Attend(problem);
  std::vector<float> expected;
  for (int64_t i = 0; i < problem.n_q; i++) {
    for (int64_t h = 0; h < problem.num_heads; h++) {
      const auto value = problem.v.begin() + h / 2 * problem.head_dim_v;
      expected.insert(expected.end(), value, value + problem.head_dim_v);
    }
  }
  EXPECT_TRUE(SameBits("y", outputs.y, expected));
  EXPECT_TRUE(
      SameBits("attention_weights", outputs.attention_weights, std::vector<float>(17 * 4, 1.0f)));
  ExpectAccurate("one key", problem, outputs);
}

// Row i's score for key i alone is so much greater that the other weights vanish: 600 keys in three
// chunks, whose states are merged.
TEST(AttentionAccuracy, AScoreFarAboveTheOthersGivesItsValueExactly) {
  AttentionProblem problem = RandomAttention(13, 600, 600, 16);
  for (const float scale : {90.0f, 1000.0f, 0x1p100f}) {
    problem.scale = scale;
    for (std::vector<float> *x :
         {&problem.q, &problem.k}) {  // row numbers in binary, of -1 and 1: two rows' product is 16
                                      // or at most 14
      const int64_t heads = static_cast<int64_t>(x->size()) / (600 * 16);
      for (size_t n = 0; n < x->size(); n++)
        (*x)[n] = static_cast<int64_t>(n) / (heads * 16) >> n % 16 & 1 ? 1.0f : -1.0f;
    }
    const Outputs outputs = Attend(problem);
    std::vector<float> expected;
    for (int64_t row = 0; row < 600 * 4; row++) {
      const auto value = problem.v.begin() + (row / 4 * 2 + row % 4 / 2) * 16;
      expected.insert(expected.end(), value, value + 16);
    }
    EXPECT_TRUE(SameBits("y", outputs.y, expected)) << scale;
  }
}

TEST(AttentionAccuracy, ManyKeys) {
  AttentionProblem problem = RandomAttention(9, 8, 4097, 64);
  ExpectAccurateAttention("4097 keys", problem);
  Multiply(&problem.k, 5);
  ExpectAccurateAttention("4097 keys, wide scores", problem);
  problem = RandomAttention(14, 1, 131072, 8);
  ExpectAccurateAttention("131072 keys", problem);
  Multiply(&problem.q, 0);
  ExpectAccurateAttention("131072 keys, equal scores", problem);
}

// Subnormal queries have scores like others where the keys are large. With both subnormal, all
// products are 0.
TEST(AttentionAccuracy, SubnormalNumbers) {
  AttentionProblem problem = RandomAttention(10, 20, 60, 16);
  Multiply(&problem.v, 0x1p-130f);
  ExpectAccurateAttention("subnormal values", problem);
  problem = RandomAttention(15, 20, 300, 16);
  Multiply(&problem.q, 0x1p-128f);
  Multiply(&problem.k, 0x1p120f);
  problem.scale = 64;
  ExpectAccurateAttention("subnormal queries", problem);
  problem = RandomAttention(16, 20, 300, 16);
  Multiply(&problem.q, 0x1p-130f);
  Multiply(&problem.k, 0x1p-130f);
  ExpectAccurateAttention("subnormal queries and keys", problem);
}

// A softcap makes most scores one of two numbers, and a sink is as large as the greatest.
TEST(AttentionAccuracy, ScoresThatASoftcapSaturates) {
  AttentionProblem problem = RandomAttention(17, 30, 300, 16);
  Multiply(&problem.q, 300);
  problem.score.emplace().softcap = 20;
  problem.score->sinks = {20, -20, 0, 1000};
  ExpectAccurateAttention("saturated scores", problem);
}

TEST(AttentionAccuracy, ScaleOfTheCallers) {
  AttentionProblem problem = RandomAttention(11, 40, 80, 16);
  problem.scale = -0.7f;
  ExpectAccurateAttention("scale -0.7", problem);
}

TEST(AttentionAccuracy, NaNExactlyWhereTheExactResultHasIt) {
  AttentionProblem problem = RandomAttention(12, 50, 50, 8);
  problem.is_causal = true;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  problem.q[11 * 4 * 8 + 3] = nan;
  problem.k[40 * 2 * 8 + 1] = nan;
  problem.v[30 * 2 * 8 + 13] = nan;
  const Outputs outputs = Attend(problem);
  int64_t count = 0;
  for (const float value : outputs.y) count += std::isnan(value) ? 1 : 0;
  // Row 11 of head 0; from row 40 on heads 0 and 1 for the key; from row 30 on one element of heads
  // 2 and 3 for the value.
  EXPECT_EQ(count, 8 + 10 * 2 * 8 + 20 * 2);
  ExpectAccurate("NaN in places", problem, outputs);
}

// The rms error of PyTorch's float32 attention as a share of the naive code's, on the very data of
// the test below: printed by bench/rivals/accuracy.py, with PyTorch 2.15.0 on one thread of a Zen 3
// (AVX2).
struct ErrorOfPyTorch {
  int64_t head_dim, n_kv;
  float scale;         // 0: the default
  double of_naive[2];  // in calls of one query, and of 64
};

constexpr ErrorOfPyTorch kErrorsOfPyTorch[] = {
    {16, 512, 0, {0.75, 0.54}},   {16, 512, 1, {0.51, 0.52}},   {16, 2048, 0, {0.75, 0.29}},
    {16, 2048, 1, {0.27, 0.20}},  {32, 512, 0, {0.76, 0.56}},   {32, 512, 1, {0.47, 0.71}},
    {32, 2048, 0, {0.77, 0.32}},  {32, 2048, 1, {0.25, 0.31}},  {64, 512, 0, {0.73, 0.61}},
    {64, 512, 1, {0.47, 0.91}},   {64, 2048, 0, {0.73, 0.36}},  {64, 2048, 1, {0.39, 0.77}},
    {80, 512, 0, {0.73, 0.67}},   {80, 512, 1, {0.45, 0.89}},   {80, 2048, 0, {0.76, 0.38}},
    {80, 2048, 1, {0.41, 0.89}},  {96, 512, 0, {0.72, 0.69}},   {96, 512, 1, {0.36, 0.98}},
    {96, 2048, 0, {0.76, 0.40}},  {96, 2048, 1, {0.37, 1.01}},  {128, 512, 0, {0.68, 0.68}},
    {128, 512, 1, {0.43, 0.96}},  {128, 2048, 0, {0.75, 0.42}}, {128, 2048, 1, {0.37, 0.99}},
    {192, 512, 0, {0.66, 0.77}},  {192, 512, 1, {0.35, 1.01}},  {192, 2048, 0, {0.73, 0.48}},
    {192, 2048, 1, {0.32, 0.97}}, {256, 512, 0, {0.61, 0.54}},  {256, 512, 1, {0.37, 0.63}},
    {256, 2048, 0, {0.70, 0.34}}, {256, 2048, 1, {0.39, 0.57}}, {512, 512, 0, {0.54, 0.46}},
    {512, 512, 1, {0.37, 0.48}},  {512, 2048, 0, {0.67, 0.34}}, {512, 2048, 1, {0.31, 0.33}},
};

double RmsError(const std::vector<float> &actual, const std::vector<double> &exact) {
  EXPECT_EQ(actual.size(), exact.size());
  double sum = 0;
  for (size_t n = 0; n < exact.size(); n++) sum += (actual[n] - exact[n]) * (actual[n] - exact[n]);
  return std::sqrt(sum / static_cast<double>(exact.size()));
}

// mha is called once: the bits of a row are the same for any number of queries.
TEST(AttentionAccuracy, RmsErrorIsNearPyTorchs) {
  for (const ErrorOfPyTorch &pytorch : kErrorsOfPyTorch) {
    Random random(static_cast<uint64_t>(pytorch.head_dim * 10000 + pytorch.n_kv));
    AttentionProblem problem;
    problem.n_q = 64;
    problem.n_kv = pytorch.n_kv;
    problem.num_heads = problem.num_kv_heads = 1;
    problem.head_dim = problem.head_dim_v = pytorch.head_dim;
    problem.scale = pytorch.scale;
    FillNormal(&random, &problem);
    const AttentionShape shape = ShapeOf(problem, 0);
    const std::vector<double> exact =
        oracle::AttentionForward<double>(shape, Widen(problem.q), Widen(problem.k),
                                         Widen(problem.v))
            .context;
    const double naive = RmsError(
        oracle::AttentionForward<float>(shape, problem.q, problem.k, problem.v).context, exact);
    const double mha = RmsError(Attend(problem).y, exact), limit = pytorch.scale == 0 ? 1.3 : 2;
    for (const double of_naive : pytorch.of_naive) {
      EXPECT_LE(mha / (of_naive * naive), limit)
          << "head_dim " << pytorch.head_dim << ", " << pytorch.n_kv << " keys, "
          << (pytorch.scale == 0 ? "default scale, " : "scale 1, ")
          << (of_naive == pytorch.of_naive[0] ? "one query" : "64 queries");
    }
  }
}

// ---- The layer

LayerProblem RandomLayer(uint64_t seed, int64_t n, int64_t query_dim, int64_t num_heads,
                         int64_t num_kv_heads, int64_t head_dim) {
  LayerProblem sizes;
  sizes.n_q = sizes.n_kv = n;
  sizes.query_dim = sizes.key_dim = sizes.value_dim = sizes.output_dim = query_dim;
  sizes.num_heads = num_heads;
  sizes.num_kv_heads = num_kv_heads;
  sizes.head_dim = sizes.head_dim_v = head_dim;
  sizes.is_causal = true;
  return NormalLayer(sizes, seed);
}

void ExpectAccurateLayer(const std::string &name, const LayerProblem &problem) {
  const Layer layer = MakeLayer(problem);
  ExpectAccurate(name, problem, Forward(layer.get(), problem));
}

TEST(LayerAccuracy, OrdinaryLayers) {
  ExpectAccurateLayer("layer 16, 1 head", RandomLayer(20, 20, 16, 1, 1, 16));
  ExpectAccurateLayer("layer 96, 4 heads", RandomLayer(21, 70, 96, 4, 4, 24));
  ExpectAccurateLayer("layer 300, 6 heads on 2", RandomLayer(22, 50, 300, 6, 2, 50));
  ExpectAccurateLayer("layer 1025, 2 heads", RandomLayer(23, 9, 1025, 2, 1, 32));
}

TEST(LayerAccuracy, ManyRows) {
  ExpectAccurateLayer("layer 24, 600 rows", RandomLayer(24, 600, 24, 2, 1, 12));
}

// With inputs and weights of one sign, sums grow to the end.
TEST(LayerAccuracy, ManyInputs) {
  LayerProblem problem = RandomLayer(29, 3, 16384, 1, 1, 8);
  ExpectAccurateLayer("layer 16384", problem);
  for (std::vector<float> *x : {&problem.query, &problem.w_q, &problem.w_k, &problem.w_v}) {
    for (float &value : *x) value = std::fabs(value);
  }
  ExpectAccurateLayer("layer 16384, one sign", problem);
}

TEST(LayerAccuracy, BiasesMuchLargerThanTheProducts) {
  LayerProblem problem = RandomLayer(26, 40, 128, 4, 4, 32);
  Multiply(&problem.b_v, 1000);
  Multiply(&problem.b_o, 1000);
  ExpectAccurateLayer("layer 128, large biases", problem);
}

TEST(LayerAccuracy, WideScores) {
  LayerProblem problem = RandomLayer(27, 60, 64, 4, 2, 16);
  Multiply(&problem.w_q, 6);
  Multiply(&problem.w_k, 6);
  ExpectAccurateLayer("layer 64, wide scores", problem);
}

}  // namespace
