// The worked examples that this library was made from, with their printed numbers: two walks through attention with weight splits (one
// in tables, one in a notebook) and an article on the shapes of the projections.
#include <gtest/gtest.h>
#include <mha.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "support/accuracy.h"
#include "support/fixtures.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

constexpr float kMasked = -std::numeric_limits<float>::infinity();

// Half a unit of the last of four printed digits: so far is a printed number from the one that was computed.
constexpr double kHalfDigit = 0.5e-4;

void ExpectPrinted(const char *name, const std::vector<float> &actual, const std::vector<float> &printed,
                   const std::vector<double> &tolerance) {
  ASSERT_EQ(actual.size(), printed.size()) << name;
  double largest = 0;
  for (size_t n = 0; n < printed.size(); n++) {
    if (std::isinf(printed[n])) {
      EXPECT_EQ(actual[n], printed[n]) << name << "[" << n << "]";
      continue;
    }
    EXPECT_LE(std::fabs(static_cast<double>(actual[n]) - static_cast<double>(printed[n])), tolerance[n]) << name << "[" << n << "]";
    largest = std::max(largest, std::fabs(static_cast<double>(actual[n]) - static_cast<double>(printed[n])));
  }
  std::printf("%-14s largest difference to the printed numbers: %.2e\n", name, largest);
}

void ExpectPrinted(const char *name, const std::vector<float> &actual, const std::vector<float> &printed, double tolerance) {
  ExpectPrinted(name, actual, printed, std::vector<double>(printed.size(), tolerance));
}

// Exchanges rows and heads: [heads, n, width] to [n, heads, width], or back with the counts exchanged.
std::vector<float> ExchangeRowsAndHeads(const std::vector<float> &x, size_t heads, size_t n, size_t width) {
  std::vector<float> result;
  for (size_t i = 0; i < n; i++) {
    for (size_t h = 0; h < heads; h++) result.insert(result.end(), &x[(h * n + i) * width], &x[(h * n + i) * width] + width);
  }
  return result;
}

// Three tokens, two heads of three features, causal: both walks have this shape.
template <typename Problem>
Problem TwoHeadsOfThree() {
  Problem problem;
  problem.n_q = problem.n_kv = 3;
  problem.num_heads = problem.num_kv_heads = 2;
  problem.head_dim = problem.head_dim_v = 3;
  problem.is_causal = true;
  return problem;
}

// ---- The walk in tables

// Steps 6 to 10. Each step of the page computes with the printed numbers of the one before, so that a little more than half a digit
// may be missing; 1e-4 is two of its roundings.
TEST(WalkInTables, GroupedHeadsGiveThePrintedScoresWeightsAndContext) {
  const std::vector<float> queries = {
      0.0299f, 0.7057f, 0.1425f, 0.5029f, 0.6294f, 0.3265f, 0.8386f, 0.7803f, 0.8877f,  // head 1
      0.0808f, 0.7281f, 0.7343f, 0.5948f, 0.8757f, 0.6526f, 0.8280f, 0.1269f, 0.9827f,  // head 2
  };
  const std::vector<float> keys = {
      0.2260f, 0.7611f, 0.6772f, 0.7446f, 0.4209f, 0.6467f, 0.4521f, 0.1769f, 0.1615f,  //
      0.6787f, 0.7103f, 0.8188f, 0.5338f, 0.8099f, 0.9866f, 0.0227f, 0.4601f, 0.4753f,
  };
  const std::vector<float> values = {
      0.8375f, 0.7430f, 0.8563f, 0.1214f, 0.1560f, 0.0729f, 0.1887f, 0.9912f, 0.1640f,  //
      0.7458f, 0.6515f, 0.1220f, 0.6801f, 0.4366f, 0.6720f, 0.8135f, 0.6831f, 0.7280f,
  };
  const std::vector<float> scores = {
      0.6404f, 0.4114f, 0.1614f, 0.8138f, 0.8505f, 0.3914f, 1.3846f, 1.5269f, 0.6605f,  //
      1.1733f, 1.3573f, 0.6858f, 1.5600f, 1.6706f, 0.7266f, 1.4567f, 1.5143f, 0.5443f,
  };
  const std::vector<float> masked_scores = {
      0.3697f, kMasked, kMasked, 0.4698f, 0.4910f, kMasked, 0.7994f, 0.8816f, 0.3813f,  //
      0.6774f, kMasked, kMasked, 0.9007f, 0.9645f, kMasked, 0.8410f, 0.8743f, 0.3143f,
  };
  const std::vector<float> weights = {
      1.0000f, 0.0000f, 0.0000f, 0.4947f, 0.5053f, 0.0000f, 0.3644f, 0.3956f, 0.2399f,  //
      1.0000f, 0.0000f, 0.0000f, 0.4840f, 0.5160f, 0.0000f, 0.3811f, 0.3939f, 0.2250f,
  };
  // By token, then head, as in step 10: flattened it is the merged result. (Step 11 of the page prints the heads one after the other
  // instead of side by side.)
  const std::vector<float> merged = {
      0.8375f, 0.7430f, 0.8563f, 0.7458f, 0.6515f, 0.1220f,  // token 1
      0.4757f, 0.4464f, 0.4605f, 0.7119f, 0.5406f, 0.4058f,  // token 2
      0.3985f, 0.5703f, 0.3803f, 0.7352f, 0.5740f, 0.4750f,  // token 3
  };

  AttentionProblem problem = TwoHeadsOfThree<AttentionProblem>();
  problem.q = ExchangeRowsAndHeads(queries, 2, 3, 3);
  problem.k = ExchangeRowsAndHeads(keys, 2, 3, 3);
  problem.v = ExchangeRowsAndHeads(values, 2, 3, 3);
  AttentionCall call;
  call.q.heads_outside = call.k.heads_outside = call.v.heads_outside = true;  // as the page prints them
  const Outputs outputs = Attend(problem, call);
  ExpectPrinted("scores", outputs.scores, scores, 1e-4);
  ExpectPrinted("masked scores", outputs.masked_scores, masked_scores, 1e-4);
  ExpectPrinted("weights", outputs.attention_weights, weights, 1e-4);
  ExpectPrinted("merged", outputs.y, merged, 1e-4);
}

// Steps 1 to 3. The page goes on with other numbers, so that the oracle has to say what is right.
TEST(WalkInTables, InputAndWeightsAgreeWithTheOracle) {
  LayerProblem problem = TwoHeadsOfThree<LayerProblem>();
  problem.query_dim = problem.key_dim = problem.value_dim = 6;
  problem.query = {1, 2, 3, 4, 5, 6, 6, 5, 4, 3, 2, 1, 1, 1, 1, 1, 1, 1};
  problem.w_q = {0.4993f, 0.2528f, 0.9087f, 0.4387f, 0.0761f, 0.6710f,  //
                 0.4096f, 0.0766f, 0.3847f, 0.5818f, 0.5646f, 0.5658f,  //
                 0.2798f, 0.7151f, 0.1058f, 0.6133f, 0.2456f, 0.3947f,  //
                 0.5394f, 0.9090f, 0.6069f, 0.5502f, 0.2611f, 0.0625f,  //
                 0.9705f, 0.0770f, 0.5557f, 0.5505f, 0.4124f, 0.5342f,  //
                 0.1674f, 0.8521f, 0.7174f, 0.2237f, 0.0440f, 0.4619f};
  problem.w_k = {0.2858f, 0.4111f, 0.6800f, 0.7871f, 0.7942f, 0.9427f,  //
                 0.2936f, 0.8079f, 0.2960f, 0.4484f, 0.4080f, 0.0224f,  //
                 0.6710f, 0.9872f, 0.1064f, 0.0914f, 0.7141f, 0.2901f,  //
                 0.4991f, 0.7919f, 0.2702f, 0.5881f, 0.2960f, 0.7207f,  //
                 0.2867f, 0.9855f, 0.7803f, 0.1783f, 0.6278f, 0.9921f,  //
                 0.7149f, 0.9552f, 0.8109f, 0.9274f, 0.8857f, 0.5978f};
  problem.w_v = {0.0403f, 0.9850f, 0.9636f, 0.2161f, 0.2303f, 0.7819f,  //
                 0.6405f, 0.3427f, 0.0892f, 0.8515f, 0.8595f, 0.4642f,  //
                 0.8738f, 0.0162f, 0.1105f, 0.0801f, 0.5262f, 0.2379f,  //
                 0.0604f, 0.5162f, 0.9510f, 0.8857f, 0.4536f, 0.1404f,  //
                 0.3554f, 0.6543f, 0.0071f, 0.3822f, 0.7250f, 0.8788f,  //
                 0.4789f, 0.0458f, 0.6999f, 0.9771f, 0.9141f, 0.1221f};
  LayerForm form;
  form.use_defaults = true;  // query_dim 6, 2 heads: head_dim 3 follows
  const Layer layer = MakeLayer(problem, form);
  ExpectAccurate("walk in tables", problem, Forward(layer.get(), problem));
}

// ---- The walk in a notebook

TEST(WalkInANotebook, PrintedProjectionsGiveThePrintedScoresAndContext) {
  AttentionProblem problem = TwoHeadsOfThree<AttentionProblem>();
  problem.q = {0.2434f,  0.4607f,  -0.5537f, -0.5116f, -0.0451f, 0.1184f,   // token 1
               -0.5975f, -0.5909f, -0.6584f, -0.2954f, -0.6365f, -0.7123f,  // token 2
               0.4812f,  -0.1247f, 0.3195f,  1.0179f,  0.8944f,  0.8886f};  // token 3
  problem.k = {-0.3222f, 0.3691f, 0.3103f,  -0.5221f, -0.0345f, 0.4966f,    //
               -0.5679f, 0.7716f, 0.3563f,  -0.4399f, 1.3386f,  0.2529f,    //
               0.5660f,  0.5104f, -0.6236f, 1.3696f,  -0.8633f, -0.0945f};
  problem.v = {-0.8460f, 0.2317f,  0.0061f,  -0.1790f, 0.0405f, 0.0707f,   //
               1.4305f,  -0.4608f, 1.1821f,  1.2324f,  0.0492f, -0.3842f,  //
               -0.3349f, 1.5204f,  -1.7049f, -0.3751f, 0.8196f, 0.6283f};
  const std::vector<float> scores = {
      -0.0802f, 0.0199f, 0.7182f,  -0.2299f, -0.3512f, -0.2293f, -0.1020f, -0.2557f, 0.0095f,  // head 1
      0.3275f,  0.1947f, -0.6730f, -0.1775f, -0.9021f, 0.2122f,  -0.1211f, 0.9741f,  0.5378f,  // head 2
  };
  const std::vector<float> scaled_scores = {
      -0.0463f, 0.0115f, 0.4146f,  -0.1327f, -0.2028f, -0.1324f, -0.0589f, -0.1476f, 0.0055f,  //
      0.1891f,  0.1124f, -0.3885f, -0.1025f, -0.5208f, 0.1225f,  -0.0699f, 0.5624f,  0.3105f,
  };
  const std::vector<float> masked_scores = {
      -0.0463f, kMasked, kMasked, -0.1327f, -0.2028f, kMasked, -0.0589f, -0.1476f, 0.0055f,  //
      0.1891f,  kMasked, kMasked, -0.1025f, -0.5208f, kMasked, -0.0699f, 0.5624f,  0.3105f,
  };
  const std::vector<float> merged = {
      -0.8460f, 0.2317f,  0.0061f,  -0.1790f, 0.0405f, 0.0707f,   // token 1
      0.2524f,  -0.1025f, 0.5735f,  0.3812f,  0.0439f, -0.1098f,  // token 2
      0.0355f,  0.4801f,  -0.2450f, 0.3663f,  0.3066f, 0.0614f,   // token 3
  };

  // The notebook computed with more digits of q and k than it prints. Half a digit of each of them makes so much of a score:
  std::vector<double> score_tolerance, scaled_tolerance;
  for (size_t h = 0; h < 2; h++) {
    for (size_t i = 0; i < 3; i++) {
      for (size_t j = 0; j < 3; j++) {
        double magnitudes = 0;
        for (size_t d = 0; d < 3; d++) magnitudes += std::fabs(problem.q[i * 6 + h * 3 + d]) + std::fabs(problem.k[j * 6 + h * 3 + d]);
        score_tolerance.push_back(kHalfDigit * magnitudes + 1.01 * kHalfDigit);
        scaled_tolerance.push_back(kHalfDigit * magnitudes / std::sqrt(3.0) + 1.01 * kHalfDigit);
      }
    }
  }
  const Outputs outputs = Attend(problem);
  ExpectPrinted("scores", outputs.scores, scores, score_tolerance);
  ExpectPrinted("scaled scores", outputs.scaled_scores, scaled_scores, scaled_tolerance);
  ExpectPrinted("masked scores", outputs.masked_scores, masked_scores, scaled_tolerance);
  // The digits missing in the values average out; one digit is what the context needs.
  ExpectPrinted("merged", outputs.y, merged, 2 * kHalfDigit);
  // The notebook checks this of its weights.
  for (size_t row = 0; row < 6; row++) {
    double sum = 0;
    for (size_t j = 0; j < 3; j++) sum += static_cast<double>(outputs.attention_weights[row * 3 + j]);
    EXPECT_NEAR(sum, 1, 3 * 0x1p-23);
  }
}

// ---- The article on shapes

// Query and key rows of 16 features, value rows of 8; 8 heads of 2 and of 1; W_O 8 x 16; each head's matrices given alone.
TEST(ArticleOnShapes, EightHeadsWithNarrowerValues) {
  Random random(42);
  LayerProblem problem;
  problem.n_q = problem.n_kv = 3;
  problem.query_dim = problem.key_dim = problem.output_dim = 16;
  problem.value_dim = 8;
  problem.num_heads = problem.num_kv_heads = 8;
  problem.head_dim = 2;
  problem.head_dim_v = 1;
  problem.has_key = problem.has_value = true;
  FillNormal(&random, kNoBiases, true, &problem);
  LayerForm form;
  form.use_defaults = true;
  const Layer layer = MakeLayer(problem, form);
  const Outputs outputs = Forward(layer.get(), problem);
  EXPECT_EQ(outputs.y.size(), 3u * 16u);
  ExpectAccurate("article on shapes", problem, outputs);
}

// 16 features do not make 6 heads.
TEST(ArticleOnShapes, SixHeadsOfSixteenFeaturesAreAnErrorWithoutAHeadDim) {
  const std::vector<float> w(16 * 16);
  mha_layer_config config = Zeroed<mha_layer_config>();
  config.query_dim = 16;
  config.num_heads = 6;
  mha_layer_weights weights = Zeroed<mha_layer_weights>();
  weights.w_q = weights.w_k = weights.w_v = w.data();
  mha_layer *layer = nullptr;
  mha_error error = {};
  EXPECT_EQ(mha_layer_create(&config, &weights, nullptr, &layer, &error), MHA_ERROR_SHAPE);
  EXPECT_EQ(layer, nullptr);
  EXPECT_EQ(error.status, MHA_ERROR_SHAPE);
  EXPECT_EQ(error.argument, 1u);
  EXPECT_STRNE(error.message, "");
  size_t bytes = 0;
  EXPECT_EQ(mha_layer_pack_size(&config, &weights, nullptr, &bytes, &error), MHA_ERROR_SHAPE);
}

TEST(ArticleOnShapes, SixHeadsOfSixteenFeaturesWorkWithAHeadDim) {
  for (const int64_t head_dim : {2, 3}) {
    Random random(43);
    LayerProblem problem;
    problem.n_q = problem.n_kv = 3;
    problem.query_dim = problem.key_dim = problem.value_dim = problem.output_dim = 16;
    problem.num_heads = problem.num_kv_heads = 6;
    problem.head_dim = problem.head_dim_v = head_dim;
    FillNormal(&random, kNoBiases, true, &problem);
    const Layer layer = MakeLayer(problem);
    ExpectAccurate("6 heads of " + std::to_string(head_dim), problem, Forward(layer.get(), problem));
  }
}

}  // namespace
