// Norms of queries, keys and values (mha_norm) are as exact as float allows and reach nothing beside their row. Their bits in every kind of
// call are those of the generated cases.
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
#include "support/norm.h"

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

// The error of rows x [rows, heads, width] once normalised. With n numbers together, of which u is the largest and s = 1 / r: a mean is
// off by n roundings of u at most, a difference from it by one more; the sum of their squares by n + 2 roundings, and twice what the
// differences are off by; the root halves that; five roundings follow.
std::vector<double> BoundNorm(const NormArrays &norm, bool is_of_all_heads, bool is_layer, const std::vector<float> &weight,
                              const std::vector<float> &bias, int64_t heads, int64_t width, const std::vector<float> &x) {
  const double eps = 0x1p-24;
  const int64_t together = is_of_all_heads ? heads : 1, count = together * width;
  std::vector<double> bound(x.size());
  for (int64_t first = 0; first < static_cast<int64_t>(x.size()); first += count) {
    double u = 0, mean = 0, variance = 0;
    for (int64_t n = 0; n < count; n++) u = std::max(u, std::fabs(static_cast<double>(x[first + n])));
    for (int64_t n = 0; n < count && is_layer; n++) mean += x[first + n] / static_cast<double>(count);
    for (int64_t n = 0; n < count; n++) variance += (x[first + n] - mean) * (x[first + n] - mean) / static_cast<double>(count);
    const double s = std::sqrt(variance + static_cast<double>(norm.epsilon));
    const double of_difference = is_layer ? eps * static_cast<double>(count + 3) * u : 0;
    const double of_r = eps * (static_cast<double>(count) / 2 + 4) + of_difference / s;
    for (int64_t n = 0; n < count; n++) {
      const int64_t at = (first / width + n / width) % heads * norm.head_stride + n % width;
      const double w = weight.empty() ? 1 : std::fabs(static_cast<double>(weight[at])), b = bias.empty() ? 0 : std::fabs(bias[at]);
      const double distance = std::fabs(x[first + n] - mean);
      bound[first + n] = w / s * (of_difference + distance * (of_r + 6 * eps)) + eps * b;
    }
  }
  return bound;
}

TEST_P(NormTest, IsAsExactAsFloatAllows) {
  for (uint64_t seed = 0; seed < 60 && !HasFailure(); seed++) {
    Random random(seed);
    AttentionProblem problem = Problem(9, random.Pick<int64_t>({9, 40}), random.Pick<int64_t>({3, 16, 64, 128}));
    for (float &x : problem.k) x = x * 3 + static_cast<float>(random.Pick({0, 5}));
    problem.norm = RandomNorm(&random, problem);
    const NormArrays &norm = *problem.norm;
    const support::Norm given = *NormOf(problem);
    AttentionShape shape = ShapeOf(problem, 0);
    shape.norm = &given;
    const auto wide = [](const std::vector<float> &x) { return std::vector<double>(x.begin(), x.end()); };
    const oracle::Prepared<double> rows = oracle::PrepareRows<double>(shape, wide(problem.q), wide(problem.k), wide(problem.v));
    const auto q_bound =
        BoundNorm(norm, norm.is_of_all_heads, norm.is_layer, norm.q_weight, norm.q_bias, problem.num_heads, problem.head_dim, problem.q);
    const auto k_bound =
        BoundNorm(norm, norm.is_of_all_heads, norm.is_layer, norm.k_weight, norm.k_bias, problem.num_kv_heads, problem.head_dim, problem.k);
    std::vector<double> v_bound(problem.v.size());
    if (norm.is_of_values) v_bound = BoundNorm(norm, false, false, {}, {}, problem.num_kv_heads, problem.head_dim_v, problem.v);
    const auto exact = oracle::AttentionForward<double>(shape, rows.q, rows.k, rows.v);
    const auto bound = oracle::BoundAttention(shape, rows.q, rows.k, rows.v, q_bound, k_bound, v_bound, exact);
    const auto worst = [](const std::vector<float> &x, const std::vector<double> &of, const std::vector<double> &limits) {
      double ratio = 0;
      for (size_t n = 0; n < of.size(); n++) ratio = std::max(ratio, BoundRatio(x[n], of[n], limits[n]));
      return ratio;
    };
    Cache cache(CacheConfigOf(problem, {MHA_CACHE_CONTIGUOUS, 0}, 1, 40));
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
            // An infinity of an RMS norm leaves the other heads zeros, which change the result but are finite.
            const bool is_own = h < 2 || is_of_all_heads, is_nan = h < 2 || (is_of_all_heads && (is_layer || std::isnan(value)));
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

// A row of normal numbers comes out with a mean square of 1, whatever its size: scores are products of directions.
TEST_P(NormTest, TheSizeOfQueriesAndKeysDoesNotMatter) {
  AttentionProblem problem = Problem(9, 40);
  problem.norm = NormArrays();
  problem.norm->epsilon = 0x1p-100f;
  const Outputs expected = Run(problem);
  for (float &x : problem.q) x *= 0x1p20f;
  for (float &x : problem.k) x *= 0x1p-20f;
  EXPECT_TRUE(SameBits(Run(problem), expected));
}

}  // namespace
