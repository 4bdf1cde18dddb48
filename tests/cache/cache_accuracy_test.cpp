// How far attention over keys and values stored in fewer bits is from that over the numbers
// themselves, in double precision: within what rounding them allows. Prints the figures that
// src/docs/storage_types.md has.
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

// Of the Hadamard transform: the largest power of two that divides the width.
int64_t BlockOf(int64_t width) { return std::min<int64_t>(width & -width, 256); }

// The largest number of a row, or of its Hadamard transform.
double LargestOf(std::vector<double> row, bool is_transformed) {
  const auto width = static_cast<int64_t>(row.size());
  for (int64_t h = is_transformed ? BlockOf(width) / 2 : 0; h > 0; h /= 2) {
    for (int64_t i = 0; i < width; i++) {
      const double a = row[i], b = i / h % 2 == 0 ? row[i + h] : 0;
      if (i / h % 2 == 0) row[i] = a + b, row[i + h] = a - b;
    }
  }
  double largest = 0;
  for (const double x : row) largest = std::max(largest, std::fabs(x));
  return largest;
}

// Bounds of what storing changes a number by, from its definition: half a step; of int4, and of
// keys of int8, the mean of those of a block, where a number of int4 beyond the largest code is a
// step away. rows [.., width] are stored row by row.
std::vector<double> RoundingOf(Storage type, bool are_keys, const std::vector<float> &rows,
                               int64_t width) {
  std::vector<double> bounds(rows.size());
  for (size_t first = 0; first < rows.size(); first += static_cast<size_t>(width)) {
    const double largest =
        LargestOf({&rows[first], &rows[first] + width},
                  type == Storage::kInt4 || (are_keys && type == Storage::kInt8));
    for (size_t i = first; i < first + static_cast<size_t>(width); i++) {
      const double x = std::fabs(double{rows[i]});
      if (type == Storage::kF32) bounds[i] = 0;
      if (type == Storage::kF16) bounds[i] = std::max(x * 0x1p-11, 0x1p-25);
      if (type == Storage::kBf16) bounds[i] = x * 0x1p-8;
      // The quotient that is rounded has an error of its own, of a few units in the last place of a
      // float.
      if (type == Storage::kInt8) bounds[i] = largest / 127 * (0.5 + 127 * 0x1p-21);
      if (type == Storage::kInt4) bounds[i] = largest / 8 * (1 + 0x1p-16);
    }
  }
  return bounds;
}

// The context over a cache of these types that was given the keys and values.
std::vector<float> AttendOverACache(AttentionProblem problem, Storage k_type, Storage v_type,
                                    bool in_integers = false) {
  AttentionProblem stored = problem;
  stored.k_type = k_type, stored.v_type = v_type;
  Cache cache(CacheConfigOf(stored, {MHA_CACHE_KIND_CONTIGUOUS, 0}, 1, problem.n_kv));
  cache.Append(0, {problem.k, problem.v});
  AttentionCall call;
  call.asked = kAskNothing;
  call.cache.cache = cache.get();
  call.cache.read = true;
  problem.is_in_integers = in_integers;
  return Attend(problem, call).y;
}

AttentionProblem Problem(int64_t head_dim, bool has_outliers) {
  AttentionSizes sizes;
  sizes.n_q = 16;
  sizes.n_kv = 1024;
  sizes.num_heads = sizes.num_kv_heads = 2;
  sizes.head_dim = sizes.head_dim_v = head_dim;
  AttentionProblem problem = NormalAttention(sizes, 31);
  // Each 32nd channel of keys and values is 20 times as large as the others.
  for (size_t i = 0; has_outliers && i < problem.k.size(); i += 32)
    problem.k[i] *= 20, problem.v[i] *= 20;
  return problem;
}

// Checks each element, and returns the root of the mean square of the error, in units of that of
// the exact result.
double ErrorOf(const AttentionProblem &problem, const oracle::Attention<double> &exact,
               const std::vector<double> &of_floats, Storage k_type, Storage v_type) {
  const std::vector<float> context = AttendOverACache(problem, k_type, v_type);
  const int64_t heads = problem.num_heads, width = problem.head_dim;
  const std::vector<double> k_rounding = RoundingOf(k_type, true, problem.k, width),
                            v_rounding = RoundingOf(v_type, false, problem.v, width);
  // A number that was transformed has the mean of errors of a block, most of half a step.
  const double mean = 1 / std::sqrt(static_cast<double>(BlockOf(width))),
               k_share = k_type == Storage::kInt8 ? mean : 1,
               share = v_type == Storage::kInt4 ? 0.5 * mean : 1;
  const double scale =
      problem.scale != 0 ? problem.scale : 1 / std::sqrt(static_cast<double>(width));
  double error = 0, size = 0, variance = 0;
  for (int64_t i = 0; i < problem.n_q; i++) {
    for (int64_t h = 0; h < heads; h++) {
      // What the scores are off by, at most and in the mean square, where roundings are independent
      // with a mean of 0: such ones within a bound have at most its square as their variance, and
      // their sum has the sum of these.
      double most = 0;
      std::vector<double> score_variance(problem.n_kv);
      for (int64_t j = 0; j < problem.n_kv; j++) {
        double off = 0;
        for (int64_t d = 0; d < width; d++) {
          const double e = scale * std::fabs(problem.q[(i * heads + h) * width + d]) *
                           k_rounding[(j * heads + h) * width + d];
          off += e;
          score_variance[j] += k_share * k_share * e * e;
        }
        most = std::max(most, off);
      }
      const double *weights = &exact.weights[(h * problem.n_q + i) * problem.n_kv];
      for (int64_t d = 0; d < width; d++) {
        const int64_t at = (i * heads + h) * width + d;
        double values = 0, value_rounding = 0;
        for (int64_t j = 0; j < problem.n_kv; j++) {
          const double p = weights[j];
          const double v = problem.v[(j * heads + h) * width + d],
                       e = v_rounding[(j * heads + h) * width + d];
          values += p * (std::fabs(v) + e);
          value_rounding += p * e;
          variance += p * p *
                      (share * share * e * e +
                       (v - exact.context[at]) * (v - exact.context[at]) * score_variance[j]);
        }
        // Scores that are off by `most` change a weight by a factor of e^(2 most) at most.
        const double growth = std::exp(2 * most), off = std::fabs(context[at] - exact.context[at]);
        EXPECT_LE(off, growth * of_floats[at] + (growth - 1) * values + value_rounding)
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
      const std::vector<double> of_floats =
          oracle::BoundAttention(shape, q, k, v, {}, {}, {}, exact).context;
      std::printf("keys and values, head_dim %3d, %-8s", static_cast<int>(head_dim),
                  has_outliers ? "outliers" : "normal");
      double last = 0;
      for (const Storage type : kValueTypes) {
        SCOPED_TRACE(std::string(NameOf(type)) + " head_dim " + std::to_string(head_dim) +
                     (has_outliers ? " outliers" : ""));
        const double error = ErrorOf(problem, exact, of_floats,
                                     type == Storage::kInt4 ? Storage::kInt8 : type, type);
        std::printf("  %s %.1e", NameOf(type), error);
        EXPECT_GT(error, last) << "fewer bits, and no more error";
        last = error;
      }
      std::printf("\n");
    }
  }
}

// Each weight is rounded by half a 32767th of the greatest at most, by 1 / sqrt(12) of a step in
// the mean square; so is each number of a query. Of 256 keys that is 16 / (32767 * sqrt(12))
// = 1.4e-4 of the greatest weight, and the context is no less than this times a value, in the mean
// square.
TEST(Accuracy, OfIntegersIsThatOfTheCache) {
  for (const int64_t head_dim : {64, 128}) {
    for (const bool has_outliers : {false, true}) {
      const AttentionProblem problem = Problem(head_dim, has_outliers);
      for (const Storage v_type : {Storage::kInt8, Storage::kInt4}) {
        const std::vector<float> expected = AttendOverACache(problem, Storage::kInt8, v_type),
                                 context = AttendOverACache(problem, Storage::kInt8, v_type, true);
        double error = 0, size = 0;
        for (size_t i = 0; i < context.size(); i++) {
          error += std::pow(double{context[i]} - expected[i], 2);
          size += std::pow(double{expected[i]}, 2);
        }
        EXPECT_GT(error, 0);
        EXPECT_LE(std::sqrt(error / size), 2.5e-4)
            << NameOf(v_type) << " head_dim " << head_dim << (has_outliers ? " outliers" : "");
      }
    }
  }
}

}  // namespace
