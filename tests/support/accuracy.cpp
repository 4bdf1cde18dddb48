#include "support/accuracy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

namespace support {

double BoundRatio(double actual, double exact, double bound) {
  if (std::isnan(actual) || std::isnan(exact)) {
    return std::isnan(actual) && std::isnan(exact) ? 0 : std::numeric_limits<double>::infinity();
  }
  if (actual == exact) return 0;
  const double ratio = std::fabs(actual - exact) / bound;
  return std::isnan(ratio) ? std::numeric_limits<double>::infinity() : ratio;
}

namespace {

// Errors of rows, in ulp.
struct Errors {
  double max = 0, squares = 0;
  void Add(double error) {
    max = std::max(max, error);
    squares += error * error;
  }
  double Rms(size_t rows) const { return std::sqrt(squares / static_cast<double>(rows)); }
};

}  // namespace

void ExpectAccurate(const std::string &case_name, const char *name,
                    const std::vector<float> &actual, const std::vector<float> &naive,
                    const std::vector<double> &exact, const std::vector<double> &bound,
                    int64_t width) {
  ASSERT_EQ(actual.size(), exact.size());
  double largest = std::numeric_limits<float>::min(), max_ratio = 0;
  for (const double value : exact) {
    if (std::isfinite(value)) largest = std::max(largest, std::fabs(value));
  }
  const double ulp = std::ldexp(1.0, std::ilogb(largest) - 23);
  Errors errors, of_naive;
  for (size_t first = 0; first < exact.size(); first += static_cast<size_t>(width)) {
    double error = 0, naive_error = 0;
    for (size_t n = first; n < first + static_cast<size_t>(width); n++) {
      const double ratio = BoundRatio(actual[n], exact[n], bound[n]);
      EXPECT_LE(ratio, 1) << case_name << ", " << name << "[" << n << "] is " << actual[n]
                          << ", exactly " << exact[n] << ", bound of the error " << bound[n];
      max_ratio = std::max(max_ratio, ratio);
      if (!std::isfinite(exact[n])) continue;
      error = std::max(error, std::fabs(actual[n] - exact[n]) / ulp);
      naive_error = std::max(naive_error, std::fabs(naive[n] - exact[n]) / ulp);
    }
    errors.Add(error);
    of_naive.Add(naive_error);
  }
  const size_t rows = std::max<size_t>(1, exact.size() / static_cast<size_t>(width));
  const double rms = errors.Rms(rows), naive_rms = of_naive.Rms(rows);
  std::printf(
      "%-32s %-8s max ratio %8.2g; error of a row in ulp: rms %8.3g (naive %8.3g), max %8.3g "
      "(naive %8.3g)\n",
      case_name.c_str(), name, max_ratio, rms, naive_rms, errors.max, of_naive.max);
  EXPECT_LE(errors.max, 2 * of_naive.max + 2) << case_name << ", " << name;
  EXPECT_LE(rms, 1.5 * naive_rms + 0.5) << case_name << ", " << name;
}

std::vector<double> Widen(const std::vector<float> &x) {
  return std::vector<double>(x.begin(), x.end());
}

void ExpectAccurate(const std::string &case_name, const AttentionProblem &problem,
                    const Outputs &actual) {
  const std::vector<double> q = Widen(problem.q), k = Widen(problem.k), v = Widen(problem.v);
  WithScoreOptions(problem, 0, [&](const ScoreOptions *score) {
    AttentionShape shape = ShapeOf(problem, 0);
    shape.score = score;
    const auto exact = oracle::AttentionForward<double>(shape, q, k, v);
    const auto naive = oracle::AttentionForward<float>(shape, problem.q, problem.k, problem.v);
    const auto bound = oracle::BoundAttention(shape, q, k, v, {}, {}, {}, exact);
    ExpectAccurate(case_name, "weights", actual.attention_weights, naive.weights, exact.weights,
                   bound.weights, std::max<int64_t>(problem.n_kv, 1));
    ExpectAccurate(case_name, "lse", actual.lse, naive.lse, exact.lse, bound.lse, 1);
    ExpectAccurate(case_name, "context", actual.y, naive.context, exact.context, bound.context,
                   problem.head_dim_v);
  });
}

void ExpectAccurate(const std::string &case_name, const LayerProblem &problem,
                    const Outputs &actual) {
  const LayerShape shape = LayerShapeOf(problem, 0);
  const LayerWeights weights = WeightsOf(problem);
  const float *query = problem.query.data(), *key = problem.key_input().data(),
              *value = problem.value_input().data();
  const auto exact = oracle::LayerForward<double>(shape, weights, query, key, value);
  const auto naive = oracle::LayerForward<float>(shape, weights, query, key, value);
  const auto bound = oracle::BoundLayer(shape, weights, query, key, value, exact);
  ExpectAccurate(case_name, "q", actual.q, naive.q, exact.q, bound.q, problem.q_width());
  ExpectAccurate(case_name, "k", actual.k, naive.k, exact.k, bound.k, problem.k_width());
  ExpectAccurate(case_name, "v", actual.v, naive.v, exact.v, bound.v, problem.v_width());
  ExpectAccurate(case_name, "context", actual.context, naive.attention.context,
                 exact.attention.context, bound.attention.context, problem.merged_width());
  ExpectAccurate(case_name, "y", actual.y, naive.y, exact.y, bound.y, problem.y_width());
}

}  // namespace support
