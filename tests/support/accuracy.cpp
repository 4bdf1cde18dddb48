#include "support/accuracy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <string>
#include <utility>
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

void ExpectTheErrorBound(const AttentionProblem &problem, const Outputs &actual) {
  WithScoreOptions(problem, 0, [&](const ScoreOptions *options) {
    AttentionShape shape = ShapeOf(problem, 0);
    shape.score = options;
    const auto wide = [](const std::vector<float> &x) {
      return std::vector<double>(x.begin(), x.end());
    };
    const auto exact =
        oracle::AttentionForward<double>(shape, wide(problem.q), wide(problem.k), wide(problem.v));
    const auto bound = oracle::BoundAttention(shape, wide(problem.q), wide(problem.k),
                                              wide(problem.v), {}, {}, {}, exact);
    const auto worst = [&](const std::vector<float> &x, const std::vector<double> &of,
                           const std::vector<double> &limits) {
      double ratio = 0;
      for (size_t n = 0; n < of.size(); n++)
        ratio = std::max(ratio, BoundRatio(x[n], of[n], limits[n]));
      return ratio;
    };
    EXPECT_LE(worst(actual.context, exact.context, bound.context), 1.0) << Describe(problem);
    EXPECT_LE(worst(actual.lse, exact.lse, bound.lse), 1.0) << Describe(problem);
    EXPECT_LE(worst(actual.attention_weights, exact.weights, bound.weights), 1.0)
        << Describe(problem);
  });
}

double UlpOf(double x) {
  return std::ldexp(
      1.0, std::max(std::ilogb(std::max(x, static_cast<double>(std::numeric_limits<float>::min()))),
                    -126) -
               23);
}

Accuracy::Accuracy(std::string name, const std::vector<float> &actual,
                   const std::vector<float> &naive, const std::vector<double> &exact,
                   const std::vector<double> &bound, int64_t width)
    : name_(std::move(name)) {
  EXPECT_EQ(actual.size(), exact.size());
  double largest = 0;
  for (const double value : exact) {
    if (std::isfinite(value)) largest = std::max(largest, std::fabs(value));
  }
  const double ulp = UlpOf(largest);
  for (size_t first = 0; first < exact.size(); first += static_cast<size_t>(width)) {
    double row_error = 0, naive_row_error = 0;
    for (size_t n = first; n < first + static_cast<size_t>(width); n++) {
      const double ratio = BoundRatio(actual[n], exact[n], bound[n]);
      if (ratio > max_ratio_) {
        max_ratio_ = ratio;
        char text[200];
        std::snprintf(text, sizeof text, "[%zu] is %.9g, exactly %.9g, bound of the error %.3g", n,
                      static_cast<double>(actual[n]), exact[n], bound[n]);
        worst_ = text;
      }
      if (!std::isfinite(exact[n])) continue;
      row_error = std::max(row_error, std::fabs(actual[n] - exact[n]) / ulp);
      naive_row_error = std::max(naive_row_error, std::fabs(naive[n] - exact[n]) / ulp);
    }
    max_ = std::max(max_, row_error);
    naive_max_ = std::max(naive_max_, naive_row_error);
    rms_ += row_error * row_error;
    naive_rms_ += naive_row_error * naive_row_error;
  }
  const double rows = std::max(1.0, static_cast<double>(exact.size()) / static_cast<double>(width));
  rms_ = std::sqrt(rms_ / rows);
  naive_rms_ = std::sqrt(naive_rms_ / rows);
}

void Accuracy::Print(const std::string &case_name) const {
  std::printf(
      "%-32s %-8s max ratio %8.2g; error of a row in ulp: rms %8.3g (naive %8.3g), max %8.3g "
      "(naive %8.3g)\n",
      case_name.c_str(), name_.c_str(), max_ratio_, rms_, naive_rms_, max_, naive_max_);
}

void Accuracy::ExpectWithinBound() const { EXPECT_LE(max_ratio_, 1) << name_ << worst_; }

void Accuracy::ExpectAboutAsGoodAsNaive() const {
  EXPECT_LE(max_, 2 * naive_max_ + 2) << name_;
  EXPECT_LE(rms_, 1.5 * naive_rms_ + 0.5) << name_;
}

void PrintAndExpectAccurate(const std::string &case_name, const std::vector<Accuracy> &outputs) {
  for (const Accuracy &output : outputs) {
    output.Print(case_name);
    output.ExpectWithinBound();
    output.ExpectAboutAsGoodAsNaive();
  }
}

std::vector<double> Widen(const std::vector<float> &x) {
  return std::vector<double>(x.begin(), x.end());
}

void ExpectAccurate(const std::string &case_name, const AttentionProblem &problem,
                    const Outputs &actual) {
  SCOPED_TRACE(case_name);
  const std::vector<double> q = Widen(problem.q), k = Widen(problem.k), v = Widen(problem.v);
  WithScoreOptions(problem, 0, [&](const ScoreOptions *score) {
    AttentionShape shape = ShapeOf(problem, 0);
    shape.score = score;
    const oracle::Attention<double> exact = oracle::AttentionForward<double>(shape, q, k, v);
    const oracle::Attention<float> naive =
        oracle::AttentionForward<float>(shape, problem.q, problem.k, problem.v);
    const oracle::AttentionBound bound = oracle::BoundAttention(shape, q, k, v, {}, {}, {}, exact);
    PrintAndExpectAccurate(
        case_name, {Accuracy("weights", actual.attention_weights, naive.weights, exact.weights,
                             bound.weights, std::max<int64_t>(problem.n_kv, 1)),
                    Accuracy("lse", actual.lse, naive.lse, exact.lse, bound.lse, 1),
                    Accuracy("context", actual.y, naive.context, exact.context, bound.context,
                             problem.head_dim_v)});
  });
}

void ExpectAccurate(const std::string &case_name, const LayerProblem &problem,
                    const Outputs &actual) {
  SCOPED_TRACE(case_name);
  const LayerShape shape = LayerShapeOf(problem, 0);
  const LayerWeights weights = WeightsOf(problem);
  const float *query = problem.query.data(), *key = problem.key_input().data(),
              *value = problem.value_input().data();
  const oracle::Layer<double> exact =
      oracle::LayerForward<double>(shape, weights, query, key, value);
  const oracle::Layer<float> naive = oracle::LayerForward<float>(shape, weights, query, key, value);
  const oracle::LayerBound bound = oracle::BoundLayer(shape, weights, query, key, value, exact);
  PrintAndExpectAccurate(
      case_name,
      {Accuracy("q", actual.q, naive.q, exact.q, bound.q, problem.q_width()),
       Accuracy("k", actual.k, naive.k, exact.k, bound.k, problem.k_width()),
       Accuracy("v", actual.v, naive.v, exact.v, bound.v, problem.v_width()),
       Accuracy("context", actual.context, naive.attention.context, exact.attention.context,
                bound.attention.context, problem.merged_width()),
       Accuracy("y", actual.y, naive.y, exact.y, bound.y, problem.y_width())});
}

}  // namespace support
