// How far attention over keys and values stored in fewer bits is from that over the numbers themselves, in double precision: within what
// rounding them allows. Prints the figures that src/docs/storage_types.md has.
#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "oracle/oracle.h"
#include "support/accuracy.h"
#include "support/fixtures.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

// Half a step between codes of which the largest stands for `largest`. The quotient that is rounded has an error of its own, of a few units
// in the last place of a float.
double RoundingOfCodes(double largest, double most_code) { return largest / most_code * (0.5 + most_code * 0x1p-21); }

// Bounds of what storing changes a number by, from its definition: half a step. rows [.., width] are stored row by row.
std::vector<double> RoundingOf(Storage type, const std::vector<float> &rows, int64_t width) {
  std::vector<double> bounds(rows.size());
  for (size_t first = 0; first < rows.size(); first += static_cast<size_t>(width)) {
    double largest = 0;
    for (size_t i = first; i < first + static_cast<size_t>(width); i++) largest = std::max(largest, std::fabs(double{rows[i]}));
    for (size_t i = first; i < first + static_cast<size_t>(width); i++) {
      const double x = std::fabs(double{rows[i]});
      if (type == Storage::kF32) bounds[i] = 0;
      if (type == Storage::kF16) bounds[i] = std::max(x * 0x1p-11, 0x1p-25);
      if (type == Storage::kBf16) bounds[i] = x * 0x1p-8;
      if (type == Storage::kInt8) bounds[i] = RoundingOfCodes(largest, 127);
    }
  }
  return bounds;
}

// The context over a cache of this type that was given the keys and values.
std::vector<float> AttendOverACache(const AttentionProblem &problem, Storage type) {
  AttentionProblem stored = problem;
  stored.k_type = stored.v_type = type;
  Cache cache(CacheConfigOf(stored, {MHA_CACHE_CONTIGUOUS, 0}, 1, problem.n_kv));
  cache.Append(0, {problem.k, problem.v});
  AttentionCall call;
  call.asked = kAskNothing;
  call.cache.cache = cache.get();
  call.cache.read = true;
  return Attend(problem, call).y;
}

AttentionProblem Problem(int64_t head_dim, bool has_outliers, int64_t n_q = 16) {
  AttentionSizes sizes;
  sizes.n_q = n_q;
  sizes.n_kv = 1024;
  sizes.num_heads = sizes.num_kv_heads = 2;
  sizes.head_dim = sizes.head_dim_v = head_dim;
  AttentionProblem problem = NormalAttention(sizes, 31);
  // Each 32nd channel of keys and values is 20 times as large as the others.
  for (size_t i = 0; has_outliers && i < problem.k.size(); i += 32) problem.k[i] *= 20, problem.v[i] *= 20;
  return problem;
}

// The same of queries in this arithmetic.
std::vector<double> RoundingOf(Arithmetic arithmetic, const std::vector<float> &rows, int64_t width) {
  std::vector<double> bounds(rows.size());
  for (size_t first = 0; arithmetic != Arithmetic::kF32 && first < rows.size(); first += static_cast<size_t>(width)) {
    double largest = 0;
    for (size_t i = first; i < first + static_cast<size_t>(width); i++) largest = std::max(largest, std::fabs(double{rows[i]}));
    const double most_code = arithmetic == Arithmetic::kInt8 ? 127 : 32767;
    std::fill_n(bounds.begin() + static_cast<int64_t>(first), width, RoundingOfCodes(largest, most_code));
  }
  return bounds;
}

// What a query, or a row of weights, is computed in.
struct Arithmetics {
  Arithmetic scores = Arithmetic::kF32, context = Arithmetic::kF32;
  bool rounds_alike = false;  // many weights are rounded to 0, and their values have a mean: these errors are not independent
};

// Checks each element, and returns the root of the mean square of the error, in units of that of the exact result.
double ErrorOf(const AttentionProblem &problem, const oracle::Attention<double> &exact, const std::vector<double> &of_floats,
               Storage type, const Arithmetics &arithmetics = {}) {
  const Arithmetic arithmetic = arithmetics.scores;
  AttentionProblem asked = problem;
  if (arithmetic != Arithmetic::kF32) asked.score.emplace().arithmetic = arithmetic;
  if (arithmetics.context != Arithmetic::kF32) {
    if (!asked.score) asked.score.emplace();
    asked.score->context_arithmetic = arithmetics.context;
  }
  const std::vector<float> context = AttendOverACache(asked, type);
  const std::vector<double> q_rounding = RoundingOf(arithmetic, problem.q, problem.head_dim);
  const int64_t heads = problem.num_heads, width = problem.head_dim;
  const std::vector<double> k_rounding = RoundingOf(type, problem.k, width), v_rounding = RoundingOf(type, problem.v, width);
  const double scale = problem.scale != 0 ? problem.scale : 1 / std::sqrt(static_cast<double>(width));
  // Half a step between the codes of weights, in units of the greatest weight times scale of a chunk.
  const double most_weight = arithmetics.context == Arithmetic::kInt8 ? 255 : 32767;
  const double weight_rounding = arithmetics.context == Arithmetic::kF32 ? 0 : RoundingOfCodes(1, most_weight);
  double error = 0, size = 0, variance = 0;
  for (int64_t i = 0; i < problem.n_q; i++) {
    for (int64_t h = 0; h < heads; h++) {
      // What the scores are off by, at most and in the mean square, where roundings are independent with a mean of 0: such ones within a
      // bound have at most its square as their variance, and their sum has the sum of these.
      double most = 0;
      std::vector<double> score_variance(problem.n_kv);
      for (int64_t j = 0; j < problem.n_kv; j++) {
        double off = 0;
        for (int64_t d = 0; d < width; d++) {
          const int64_t at_q = (i * heads + h) * width + d, at_k = (j * heads + h) * width + d;
          const double e = scale * std::fabs(problem.q[at_q]) * k_rounding[at_k];
          const double of_query = scale * q_rounding[at_q] * (std::fabs(problem.k[at_k]) + k_rounding[at_k]);
          off += e + of_query;
          score_variance[j] += e * e;
        }
        most = std::max(most, off);
      }
      // Weights times the scales of the values, of which all have the step of the greatest of their chunk.
      const double *weights = &exact.weights[(h * problem.n_q + i) * problem.n_kv];
      std::vector<double> v_scales(problem.n_kv), greatest(problem.n_kv);
      for (int64_t j = 0; j < problem.n_kv && weight_rounding != 0; j++) {
        const float *v = &problem.v[(j * heads + h) * width];
        for (int64_t d = 0; d < width; d++) v_scales[j] = std::max(v_scales[j], std::fabs(double{v[d]}) / 127);
        greatest[j / 256] = std::max(greatest[j / 256], weights[j] * v_scales[j]);
      }
      for (int64_t d = 0; d < width; d++) {
        const int64_t at = (i * heads + h) * width + d;
        double values = 0, value_rounding = 0, of_weights = 0;
        std::vector<double> of_queries(width);  // what the context moves by with each number of the query, which all keys share
        for (int64_t j = 0; j < problem.n_kv; j++) {
          const double p = weights[j];
          const double v = problem.v[(j * heads + h) * width + d], e = v_rounding[(j * heads + h) * width + d];
          values += p * (std::fabs(v) + e);
          value_rounding += p * e;
          variance += p * p * (e * e + (v - exact.context[at]) * (v - exact.context[at]) * score_variance[j]);
          const float *k = &problem.k[(j * heads + h) * width];
          for (int64_t c = 0; arithmetic != Arithmetic::kF32 && c < width; c++) of_queries[c] += p * (v - exact.context[at]) * k[c];
          if (weight_rounding == 0) continue;
          const double of_weight = weight_rounding * greatest[j / 256] * (std::fabs(v) + e) / v_scales[j];
          of_weights += of_weight;
          if (!arithmetics.rounds_alike) variance += of_weight * of_weight;
        }
        if (arithmetics.rounds_alike) variance += of_weights * of_weights;
        for (int64_t c = 0; c < width; c++) {
          const double e = scale * q_rounding[(i * heads + h) * width + c] * of_queries[c];
          variance += e * e;
        }
        // Scores that are off by `most` change a weight by a factor of e^(2 most) at most.
        const double growth = std::exp(2 * most), off = std::fabs(context[at] - exact.context[at]);
        EXPECT_LE(off, growth * (of_floats[at] + of_weights) + (growth - 1) * values + value_rounding)
            << "row " << i << " head " << h << " element " << d;
        error += off * off;
        size += exact.context[at] * exact.context[at];
      }
    }
  }
  const double relative = std::sqrt(error / size);
  EXPECT_LE(relative, std::sqrt(variance / size) + 1e-5);
  return relative;
}

TEST(Accuracy, OfEachTypeOfKeysAndValuesIsWhatItsRoundingAllows) {
  for (const int64_t head_dim : {64, 128}) {
    for (const bool has_outliers : {false, true}) {
      const AttentionProblem problem = Problem(head_dim, has_outliers);
      const AttentionShape shape = ShapeOf(problem, 0);
      const std::vector<double> q = Widen(problem.q), k = Widen(problem.k), v = Widen(problem.v);
      const oracle::Attention<double> exact = oracle::AttentionForward<double>(shape, q, k, v);
      const std::vector<double> of_floats = oracle::BoundAttention(shape, q, k, v, {}, {}, {}, exact).context;
      std::printf("keys and values, head_dim %3d, %-8s", static_cast<int>(head_dim), has_outliers ? "outliers" : "normal");
      double last = 0;
      for (const Storage type : {Storage::kF32, Storage::kF16, Storage::kBf16, Storage::kInt8}) {
        SCOPED_TRACE(std::string(NameOf(type)) + " head_dim " + std::to_string(head_dim) + (has_outliers ? " outliers" : ""));
        const double error = ErrorOf(problem, exact, of_floats, type);
        std::printf("  %s %.1e", NameOf(type), error);
        EXPECT_GT(error, last) << "fewer bits, and no more error";
        last = error;
      }
      std::printf("\n");
    }
  }
}

// Over keys and values of int8. Outliers of the keys are in the channels of those of the queries.
TEST(Accuracy, OfScoresInIntegersIsWhatTheirRoundingAllows) {
  for (const int64_t head_dim : {64, 128}) {
    for (const bool has_outliers : {false, true}) {
      AttentionProblem problem = Problem(head_dim, has_outliers, 4);
      for (size_t i = 0; has_outliers && i < problem.q.size(); i += 32) problem.q[i] *= 20;
      problem.scale = has_outliers ? 1.0f / (20 * 20) : 0.0f;
      const AttentionShape shape = ShapeOf(problem, 0);
      const std::vector<double> q = Widen(problem.q), k = Widen(problem.k), v = Widen(problem.v);
      const oracle::Attention<double> exact = oracle::AttentionForward<double>(shape, q, k, v);
      const std::vector<double> of_floats = oracle::BoundAttention(shape, q, k, v, {}, {}, {}, exact).context;
      std::printf("scores over int8, head_dim %3d, %-8s", static_cast<int>(head_dim), has_outliers ? "outliers" : "normal");
      const double in_floats = ErrorOf(problem, exact, of_floats, Storage::kInt8);
      const double in_int16 = ErrorOf(problem, exact, of_floats, Storage::kInt8, {Arithmetic::kInt16});
      const double in_int8 = ErrorOf(problem, exact, of_floats, Storage::kInt8, {Arithmetic::kInt8});
      std::printf("  f32 %.2e  int16 %.2e  int8 %.2e\n", in_floats, in_int16, in_int8);
      EXPECT_LE(std::fabs(in_int16 - in_floats), 0.01 * in_floats) << "16 bits of queries add next to nothing";
      EXPECT_LE(in_int8, 1.5 * in_floats);
    }
  }
}

// Over keys and values of int8. Weights that are much alike; one key with about the weight of all others together, which the queries are
// like; the same with values that are alike but for a tenth.
TEST(Accuracy, OfContextsInIntegersIsWhatTheirRoundingAllows) {
  const char *const kinds[] = {"normal", "outliers", "one key dominates", "one key dominates, values have a mean"};
  for (const int64_t head_dim : {64, 128}) {
    for (int kind = 0; kind < 4; kind++) {
      AttentionProblem problem = Problem(head_dim, false, 4);
      const int64_t row = problem.num_heads * head_dim;
      for (size_t i = 0; kind == 1 && i < problem.v.size(); i += 32) problem.v[i] *= 20;
      for (int64_t n = 0; kind >= 2 && n < row; n++) {
        for (int64_t i = 0; i < problem.n_q; i++) problem.q[i * row + n] = 0.1f * problem.q[i * row + n] + problem.k[300 * row + n];
        problem.scale = static_cast<float>(std::log(1024.0) / static_cast<double>(head_dim));
      }
      for (float &x : problem.v) x += kind == 3 ? 1.0f : 0.0f;
      const AttentionShape shape = ShapeOf(problem, 0);
      const std::vector<double> q = Widen(problem.q), k = Widen(problem.k), v = Widen(problem.v);
      const oracle::Attention<double> exact = oracle::AttentionForward<double>(shape, q, k, v);
      const std::vector<double> of_floats = oracle::BoundAttention(shape, q, k, v, {}, {}, {}, exact).context;
      std::printf("context over int8, head_dim %3d, %-38s", static_cast<int>(head_dim), kinds[kind]);
      const double in_floats = ErrorOf(problem, exact, of_floats, Storage::kInt8);
      const double in_int16 = ErrorOf(problem, exact, of_floats, Storage::kInt8, {Arithmetic::kF32, Arithmetic::kInt16});
      const double in_int8 = ErrorOf(problem, exact, of_floats, Storage::kInt8, {Arithmetic::kF32, Arithmetic::kInt8, kind == 3});
      std::printf("  f32 %.2e  int16 %.2e  int8 %.2e  weight of the key %.2f\n", in_floats, in_int16, in_int8, exact.weights[300]);
      EXPECT_LE(std::fabs(in_int16 - in_floats), 0.01 * in_floats) << "16 bits of weights add next to nothing";
      EXPECT_GT(in_int8, in_floats) << "8 bits cost something";
    }
  }
}

}  // namespace
