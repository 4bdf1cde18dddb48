// Norms of queries, keys, values and the context (mha_norm) are as exact as float allows and reach
// nothing beside their row. Their bits in every kind of call are those of the generated cases.
#include "support/norm.h"

#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "oracle/oracle.h"
#include "support/accuracy.h"
#include "support/attention_test.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

const float kInfinity = std::numeric_limits<float>::infinity();
const float kNaN = FromBits(0xffd23456u);

class NormTest : public AttentionTest {
 protected:
  static AttentionProblem Problem(int64_t n_q, int64_t n_kv, int64_t head_dim = 20) {
    AttentionSizes sizes;
    sizes.n_q = n_q;
    sizes.n_kv = n_kv;
    sizes.num_heads = 4;
    sizes.num_kv_heads = 2;
    sizes.head_dim = head_dim;
    sizes.head_dim_v = 11;
    sizes.is_causal = true;
    return NormalAttention(sizes, static_cast<uint64_t>(1000 * n_q + n_kv + head_dim));
  }
};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(NormTest);

// ---- Accuracy

// The error of rows x [rows, heads, width] once normalised. With n numbers together, of which u is
// the largest and s = 1 / r: a mean is off by n roundings of u at most, a difference from it by one
// more; the sum of their squares by n + 2 roundings, and twice what the differences are off by; the
// root halves that; five roundings follow.
template <typename Arrays>
std::vector<double> BoundNorm(const Arrays &norm, bool is_of_all_heads, bool is_layer,
                              const std::vector<float> &weight, const std::vector<float> &bias,
                              int64_t heads, int64_t width, const std::vector<float> &x) {
  const double eps = 0x1p-24;
  const int64_t together = is_of_all_heads ? heads : 1, count = together * width;
  std::vector<double> bound(x.size());
  for (int64_t first = 0; first < static_cast<int64_t>(x.size()); first += count) {
    double u = 0, mean = 0, variance = 0;
    for (int64_t n = 0; n < count; n++)
      u = std::max(u, std::fabs(static_cast<double>(x[first + n])));
    for (int64_t n = 0; n < count && is_layer; n++)
      mean += x[first + n] / static_cast<double>(count);
    for (int64_t n = 0; n < count; n++)
      variance += (x[first + n] - mean) * (x[first + n] - mean) / static_cast<double>(count);
    const double s = std::sqrt(variance + static_cast<double>(norm.epsilon));
    const double of_difference = is_layer ? eps * static_cast<double>(count + 3) * u : 0;
    const double of_r = eps * (static_cast<double>(count) / 2 + 4) + of_difference / s;
    for (int64_t n = 0; n < count; n++) {
      const int64_t at = (first / width + n / width) % heads * norm.head_stride + n % width;
      const double w = weight.empty() ? 1 : std::fabs(static_cast<double>(weight[at])),
                   b = bias.empty() ? 0 : std::fabs(bias[at]);
      const double distance = std::fabs(x[first + n] - mean);
      bound[first + n] = w / s * (of_difference + distance * (of_r + 6 * eps)) + eps * b;
    }
  }
  return bound;
}

TEST_P(NormTest, IsAsExactAsFloatAllows) {
  for (uint64_t seed = 0; seed < 60 && !HasFailure(); seed++) {
    Random random(seed);
    AttentionProblem problem =
        Problem(9, random.Pick<int64_t>({9, 40}), random.Pick<int64_t>({3, 16, 64, 128}));
    for (float &x : problem.k) x = x * 3 + static_cast<float>(random.Pick({0, 5}));
    problem.norm = RandomNorm(&random, problem);
    const NormArrays &norm = *problem.norm;
    const support::Norm given = *NormOf(problem);
    AttentionShape shape = ShapeOf(problem, 0);
    shape.norm = &given;
    const auto wide = [](const std::vector<float> &x) {
      return std::vector<double>(x.begin(), x.end());
    };
    const oracle::Prepared<double> rows =
        oracle::PrepareRows<double>(shape, wide(problem.q), wide(problem.k), wide(problem.v));
    const auto q_bound = BoundNorm(norm, norm.is_of_all_heads, norm.is_layer, norm.q_weight,
                                   norm.q_bias, problem.num_heads, problem.head_dim, problem.q);
    const auto k_bound = BoundNorm(norm, norm.is_of_all_heads, norm.is_layer, norm.k_weight,
                                   norm.k_bias, problem.num_kv_heads, problem.head_dim, problem.k);
    std::vector<double> v_bound(problem.v.size());
    if (norm.is_of_values)
      v_bound = BoundNorm(norm, false, false, {}, {}, problem.num_kv_heads, problem.head_dim_v,
                          problem.v);
    const auto exact = oracle::AttentionForward<double>(shape, rows.q, rows.k, rows.v);
    const auto bound =
        oracle::BoundAttention(shape, rows.q, rows.k, rows.v, q_bound, k_bound, v_bound, exact);
    const auto worst = [](const std::vector<float> &x, const std::vector<double> &of,
                          const std::vector<double> &limits) {
      double ratio = 0;
      for (size_t n = 0; n < of.size(); n++)
        ratio = std::max(ratio, BoundRatio(x[n], of[n], limits[n]));
      return ratio;
    };
    Cache cache(CacheConfigOf(problem, {MHA_CACHE_KIND_CONTIGUOUS, 0}, 1, 40));
    AttentionCall call = PlainCall();
    call.asked = kAskLse;
    call.cache.cache = cache.get();
    const Outputs actual = Attend(problem, call);
    const KeysAndValues stored = cache.Read(0, 0, problem.n_kv);
    EXPECT_LE(worst(stored.k, rows.k, k_bound), 1.0) << Describe(problem);
    EXPECT_LE(worst(stored.v, rows.v, v_bound), 1.0) << Describe(problem);
    EXPECT_LE(worst(actual.y, exact.context, bound.context), 1.0) << Describe(problem);
    EXPECT_LE(worst(actual.lse, exact.lse, bound.lse), 1.0) << Describe(problem);
  }
}

// ---- What is not finite, and what is not read

TEST_P(NormTest, ARowThatIsNotFiniteReachesTheRowsThatAttendToItAlone) {
  for (const float value : {kNaN, kInfinity, -kInfinity}) {
    for (const bool is_of_all_heads : {false, true}) {
      for (const bool is_layer : {false, true}) {
        AttentionProblem problem = Problem(30, 30);
        problem.norm = NormArrays();
        problem.norm->is_layer = is_layer;
        problem.norm->is_of_all_heads = is_of_all_heads;
        problem.norm->head_stride = is_of_all_heads ? 20 : 0;
        const std::vector<float> clean = Run(problem).y;
        AttentionProblem of_key = problem, of_query = problem;
        of_key.k[17 * 2 * 20 + 3] = value;    // row 17, kv head 0
        of_query.q[17 * 4 * 20 + 3] = value;  // row 17, head 0
        const std::vector<float> by_key = Run(of_key).y, by_query = Run(of_query).y;
        for (int64_t i = 0; i < 30; i++) {
          for (int64_t h = 0; h < 4; h++) {
            const size_t at = static_cast<size_t>((i * 4 + h) * 11);
            // An infinity of an RMS norm leaves the other heads zeros, which change the result but
            // are finite.
            const bool is_own = h < 2 || is_of_all_heads,
                       is_nan = h < 2 || (is_of_all_heads && (is_layer || std::isnan(value)));
            SCOPED_TRACE("row " + std::to_string(i) + " head " + std::to_string(h));
            if (i < 17 || !is_own) {
              EXPECT_EQ(by_key[at], clean[at]);
            } else if (is_nan) {
              EXPECT_TRUE(std::isnan(by_key[at]));
            }
            if (i != 17 || (h != 0 && !is_of_all_heads)) {
              EXPECT_EQ(by_query[at], clean[at]);
            } else if (h == 0) {
              EXPECT_TRUE(std::isnan(by_query[at]));
            }
          }
        }
      }
    }
  }
}

// ---- Special cases that are known otherwise

// A row of normal numbers comes out with a mean square of 1, whatever its size: scores are products
// of directions.
TEST_P(NormTest, TheSizeOfQueriesAndKeysDoesNotMatter) {
  AttentionProblem problem = Problem(9, 40);
  problem.norm = NormArrays();
  problem.norm->epsilon = 0x1p-100f;
  const Outputs expected = Run(problem);
  for (float &x : problem.q) x *= 0x1p20f;
  for (float &x : problem.k) x *= 0x1p-20f;
  EXPECT_TRUE(SameBits(Run(problem), expected));
}

// ---- The context

// A layer whose W_O is the unit matrix, so that y is what W_O takes. Its gate, if there is one, is
// 1/2 for each element.
LayerProblem LayerWithUnitOutput(bool has_gate) {
  LayerProblem problem;
  problem.query_dim = 40;
  problem.n_q = problem.n_kv = 30;
  problem.num_heads = 4;
  problem.num_kv_heads = 2;
  problem.head_dim = 20;
  problem.head_dim_v = 11;
  problem.key_dim = problem.value_dim = 40;
  problem.output_dim = 44;
  problem.is_causal = true;
  if (has_gate) problem.gate = GateKind::kSigmoid, problem.gate_dim = 11;
  problem = NormalLayer(problem, 3, kNoBiases);
  problem.w_o.assign(44 * 44, 0.0f);
  for (size_t n = 0; n < 44; n++) problem.w_o[n * 44 + n] = 1;
  problem.w_g.assign(problem.w_g.size(), 0.0f);
  return problem;
}

TEST_P(NormTest, OfTheContextIsAsExactAsFloatAllows) {
  for (int which = 0; which < 16; which++) {
    LayerProblem problem = LayerWithUnitOutput(false);
    Random random(static_cast<uint64_t>(which));
    ContextNormArrays norm;
    norm.is_layer = which & 1;
    norm.is_of_all_heads = which & 2;
    norm.epsilon = random.Pick<float>({1e-6f, 0.25f, 0x1p-149f});
    norm.head_stride = norm.is_of_all_heads ? 11 : which & 4 ? 14 : 0;
    if (which & 8) norm.weight = NormWeights(&random, 1, 4, 11, norm.head_stride);
    if (norm.is_layer && (which & 4)) norm.bias = NormWeights(&random, 0, 4, 11, norm.head_stride);
    problem.context_norm = norm;
    const Outputs outputs = Forward(Make(problem).get(), problem);
    const std::vector<double> bound = BoundNorm(norm, norm.is_of_all_heads, norm.is_layer,
                                                norm.weight, norm.bias, 4, 11, outputs.context);
    const int64_t together = norm.is_of_all_heads ? 44 : 11;
    for (int64_t n = 0; n < 30 * 44; n++) {
      const int64_t first = n / together * together, at = n / 11 % 4 * norm.head_stride + n % 11;
      double mean = 0, variance = 0;
      for (int64_t i = first; i < first + together && norm.is_layer; i++)
        mean += outputs.context[i] / static_cast<double>(together);
      for (int64_t i = first; i < first + together; i++) {
        variance += (outputs.context[i] - mean) * (outputs.context[i] - mean) /
                    static_cast<double>(together);
      }
      const double exact = (outputs.context[n] - mean) /
                               std::sqrt(variance + static_cast<double>(norm.epsilon)) *
                               (norm.weight.empty() ? 1 : norm.weight[at]) +
                           (norm.bias.empty() ? 0 : norm.bias[at]);
      ASSERT_LE(BoundRatio(outputs.y[n], exact, bound[n] + 0x1p-126), 1.0)
          << Describe(problem) << " element " << n;
    }
  }
}

// Halves of elements are halved behind the norm, and before it have the same directions.
TEST_P(NormTest, OfTheContextComesBeforeTheGateOrBehindIt) {
  LayerProblem problem = LayerWithUnitOutput(false);
  problem.context_norm = ContextNormArrays();
  problem.context_norm->epsilon = 0x1p-100f;
  const std::vector<float> ungated = Forward(Make(problem).get(), problem).y;
  for (const bool is_after_gate : {false, true}) {
    LayerProblem gated = LayerWithUnitOutput(true);
    gated.context_norm = problem.context_norm;
    gated.context_norm->is_after_gate = is_after_gate;
    gated.w_q = problem.w_q, gated.w_k = problem.w_k, gated.w_v = problem.w_v,
    gated.query = problem.query;
    std::vector<float> expected = ungated;
    for (float &x : expected) x *= is_after_gate ? 1.0f : 0.5f;
    EXPECT_TRUE(SameBits(Forward(Make(gated).get(), gated).y, expected)) << is_after_gate;
  }
}

// BitNet's: weights in W_O instead, which is what a norm without weights is for where W_O is float.
TEST_P(NormTest, WeightsOfTheContextAreFactorsOfTheRowsOfWO) {
  LayerProblem problem = LayerWithUnitOutput(false), folded = problem;
  problem.context_norm = folded.context_norm = ContextNormArrays();
  problem.context_norm->is_of_all_heads = folded.context_norm->is_of_all_heads = true;
  problem.context_norm->head_stride = folded.context_norm->head_stride = 11;
  Random random(4);
  problem.context_norm->weight = random.Normals(44);
  for (size_t n = 0; n < 44; n++) folded.w_o[n * 44 + n] = problem.context_norm->weight[n];
  EXPECT_TRUE(
      SameBits(Forward(Make(folded).get(), folded).y, Forward(Make(problem).get(), problem).y));
}

TEST_P(NormTest, OfTheContextTakesARowWithoutKeysAsZeros) {
  LayerProblem problem = LayerWithUnitOutput(false);
  problem.score = ScoreArrays();
  problem.score->mask.by_row = false;
  problem.score->mask.values.assign(30, 0);
  problem.context_norm = ContextNormArrays();
  const Layer layer = Make(problem);
  EXPECT_TRUE(SameBits(Forward(layer.get(), problem).y, std::vector<float>(30 * 44, 0.0f)));
  problem.context_norm->is_layer = true;
  problem.context_norm->bias.assign(11, 0.75f);
  EXPECT_TRUE(SameBits(Forward(layer.get(), problem).y, std::vector<float>(30 * 44, 0.75f)));
}

TEST_P(NormTest, OfTheContextKeepsNaNInItsRow) {
  for (const bool is_of_all_heads : {false, true}) {
    LayerProblem problem = LayerWithUnitOutput(false);
    problem.context_norm = ContextNormArrays();
    problem.context_norm->is_of_all_heads = is_of_all_heads;
    problem.context_norm->head_stride = is_of_all_heads ? 11 : 0;
    problem.has_key = problem.has_value = true;
    problem.key = problem.value = problem.query;
    const Layer layer = Make(problem);
    const std::vector<float> clean = Forward(layer.get(), problem).y;
    problem.query[5 * 40] = kNaN;
    const std::vector<float> y = Forward(layer.get(), problem).y;
    for (size_t n = 0; n < y.size(); n++) {
      EXPECT_EQ(std::isnan(y[n]), n / 44 == 5) << n;
      if (n / 44 != 5) {
        EXPECT_EQ(y[n], clean[n]) << n;
      }
    }
  }
}

}  // namespace
