// The worked examples that this library was made from, with their printed numbers: two walks
// through attention with weight splits, one in tables, one in a notebook.
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

// Half a unit of the last of four printed digits: so far is a printed number from the one that was
// computed.
constexpr double kHalfDigit = 0.5e-4;

void ExpectPrinted(const char *name, const std::vector<float> &actual,
                   const std::vector<float> &printed, const std::vector<double> &tolerance) {
  ASSERT_EQ(actual.size(), printed.size()) << name;
  double largest = 0;
  for (size_t n = 0; n < printed.size(); n++) {
    if (std::isinf(printed[n])) {
      EXPECT_EQ(actual[n], printed[n]) << name << "[" << n << "]";
      continue;
    }
    EXPECT_LE(std::fabs(static_cast<double>(actual[n]) - static_cast<double>(printed[n])),
              tolerance[n])
        << name << "[" << n << "]";
    largest = std::max(largest,
                       std::fabs(static_cast<double>(actual[n]) - static_cast<double>(printed[n])));
  }
  std::printf("%-14s largest difference to the printed numbers: %.2e\n", name, largest);
}

void ExpectPrinted(const char *name, const std::vector<float> &actual,
                   const std::vector<float> &printed, double tolerance) {
  ExpectPrinted(name, actual, printed, std::vector<double>(printed.size(), tolerance));
}

// Exchanges rows and heads: [heads, n, width] to [n, heads, width], or back with the counts
// exchanged.
std::vector<float> ExchangeRowsAndHeads(const std::vector<float> &x, size_t heads, size_t n,
                                        size_t width) {
  std::vector<float> result;
  for (size_t i = 0; i < n; i++) {
    for (size_t h = 0; h < heads; h++)
      result.insert(result.end(), &x[(h * n + i) * width], &x[(h * n + i) * width] + width);
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

// Steps 6 to 10. Each step of the page computes with the printed numbers of the one before, so that
// a little more than half a digit may be missing; 1e-4 is two of its roundings.
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
  // By token, then head, as in step 10: flattened it is the merged result. (Step 11 of the page
  // prints the heads one after the other instead of side by side.)
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
  // As the page prints them.
  call.q.heads_outside = call.k.heads_outside = call.v.heads_outside = true;
  const Outputs outputs = Attend(problem, call);
  ExpectPrinted("scores", outputs.scores, scores, 1e-4);
  ExpectPrinted("masked scores", outputs.masked_scores, masked_scores, 1e-4);
  ExpectPrinted("weights", outputs.attention_weights, weights, 1e-4);
  ExpectPrinted("merged", outputs.y, merged, 1e-4);
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
      -0.0802f, 0.0199f,  0.7182f,  -0.2299f, -0.3512f,
      -0.2293f, -0.1020f, -0.2557f, 0.0095f,  // head 1
      0.3275f,  0.1947f,  -0.6730f, -0.1775f, -0.9021f,
      0.2122f,  -0.1211f, 0.9741f,  0.5378f,  // head 2
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

  // The notebook computed with more digits of q and k than it prints. Half a digit of each of them
  // makes so much of a score:
  std::vector<double> score_tolerance, scaled_tolerance;
  for (size_t h = 0; h < 2; h++) {
    for (size_t i = 0; i < 3; i++) {
      for (size_t j = 0; j < 3; j++) {
        double magnitudes = 0;
        for (size_t d = 0; d < 3; d++)
          magnitudes +=
              std::fabs(problem.q[i * 6 + h * 3 + d]) + std::fabs(problem.k[j * 6 + h * 3 + d]);
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
    for (size_t j = 0; j < 3; j++)
      sum += static_cast<double>(outputs.attention_weights[row * 3 + j]);
    EXPECT_NEAR(sum, 1, 3 * 0x1p-23);
  }
}

}  // namespace
