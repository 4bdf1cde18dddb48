// The tables that the library makes for score options: slopes of ALiBi by their formula, and the
// relative biases of T5, with the buckets that transformers has.
#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "support/interface_support.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

TEST(AlibiSlopes, FollowTheFormula) {
  for (const int64_t heads : {1, 2, 3, 6, 8, 12, 16, 20, 32, 40, 64, 71, 112, 128, 1000}) {
    std::vector<float> slopes(heads);
    mha_error error;
    ASSERT_EQ(mha_alibi_slopes(heads, slopes.data(), &error), MHA_OK) << error.message;
    int64_t n = 1;
    while (2 * n <= heads) n *= 2;
    for (int64_t h = 0; h < heads; h++) {
      const double exponent =
          h < n ? -8.0 * static_cast<double>(h + 1) / static_cast<double>(n)
                : -4.0 * static_cast<double>(2 * (h - n) + 1) / static_cast<double>(n);
      EXPECT_NEAR(slopes[h] / std::exp2(exponent), 1.0, 0x1p-24) << "head " << h << " of " << heads;
    }
  }
}

TEST(AlibiSlopes, NameAWrongArgument) {
  float slope = 5;
  for (const int64_t heads : {int64_t{0}, int64_t{-1}, int64_t{1} << 31}) {
    mha_error error;
    EXPECT_EQ(mha_alibi_slopes(heads, &slope, &error), MHA_ERROR_INVALID_VALUE) << heads;
    EXPECT_EQ(std::string(error.message),
              "num_heads is " + std::to_string(heads) + "; set it to 1 to 2147483647");
    EXPECT_EQ(error.argument, 1u);
  }
  EXPECT_EQ(slope, 5);
  mha_error error;
  EXPECT_EQ(mha_alibi_slopes(4, nullptr, &error), MHA_ERROR_NULL_POINTER);
  EXPECT_STREQ(error.message, "slopes is NULL; pass an array of num_heads floats");
  EXPECT_EQ(error.argument, 2u);
}

// Distance d in the table of T5 with so many buckets, one head, whose embedding is the number of
// the bucket.
std::vector<int64_t> T5BucketsOf(int64_t num_buckets, int64_t max_distance, bool is_bidirectional,
                                 int64_t reach) {
  const int64_t count = num_buckets == 0 ? 32 : num_buckets;
  std::vector<float> embedding(2 * count), bias(static_cast<size_t>(2 * (2 * reach + 1)));
  for (int64_t bucket = 0; bucket < count; bucket++) {
    embedding[2 * bucket] = static_cast<float>(bucket);
    embedding[2 * bucket + 1] = static_cast<float>(-bucket);
  }
  mha_error error;
  const mha_status status =
      mha_t5_relative_bias(embedding.data(), num_buckets, max_distance, is_bidirectional, 2, reach,
                           reach, bias.data(), &error);
  EXPECT_EQ(status, MHA_OK) << error.message;
  std::vector<int64_t> buckets;
  for (int64_t i = 0; i <= 2 * reach; i++) {
    buckets.push_back(static_cast<int64_t>(bias[i]));
    EXPECT_EQ(bias[2 * reach + 1 + i], -bias[i]) << "of the second head";
  }
  return buckets;
}

// Where transformers 5.23 (T5Attention._relative_position_bucket) begins a bucket, from the
// greatest distance to the left on.
TEST(T5RelativeBias, HasTheBucketsOfTransformers) {
  const std::vector<std::pair<int64_t, int64_t>> both = {
      {-300, 15}, {-90, 14}, {-63, 13}, {-45, 12}, {-31, 11}, {-22, 10}, {-15, 9}, {-11, 8},
      {-7, 7},    {-6, 6},   {-5, 5},   {-4, 4},   {-3, 3},   {-2, 2},   {-1, 1},  {0, 0},
      {1, 17},    {2, 18},   {3, 19},   {4, 20},   {5, 21},   {6, 22},   {7, 23},  {8, 24},
      {12, 25},   {16, 26},  {23, 27},  {32, 28},  {46, 29},  {64, 30},  {91, 31}, {301, -1}};
  const std::vector<std::pair<int64_t, int64_t>> left = {
      {-300, 31}, {-112, 30}, {-98, 29}, {-86, 28}, {-76, 27}, {-66, 26}, {-58, 25},
      {-51, 24},  {-45, 23},  {-39, 22}, {-34, 21}, {-30, 20}, {-26, 19}, {-23, 18},
      {-20, 17},  {-18, 16},  {-15, 15}, {-14, 14}, {-13, 13}, {-12, 12}, {-11, 11},
      {-10, 10},  {-9, 9},    {-8, 8},   {-7, 7},   {-6, 6},   {-5, 5},   {-4, 4},
      {-3, 3},    {-2, 2},    {-1, 1},   {0, 0},    {301, -1}};
  for (const bool is_bidirectional : {true, false}) {
    const auto &begins = is_bidirectional ? both : left;
    for (const int64_t given : {0, 1}) {
      const std::vector<int64_t> buckets =
          T5BucketsOf(32 * given, 128 * given, is_bidirectional, 300);
      size_t at = 0;
      for (int64_t distance = -300; distance <= 300; distance++) {
        if (distance == begins[at + 1].first) at++;
        EXPECT_EQ(buckets[distance + 300], begins[at].second) << "distance " << distance;
      }
    }
  }
}

// The formula in long double, whose rounding may show only at the borders that are whole numbers:
// there a bucket begins.
TEST(T5RelativeBias, FollowsTheFormulaForAnyBuckets) {
  for (const auto &[num_buckets, max_distance] : {std::pair<int64_t, int64_t>{4, 3},
                                                  {8, 20},
                                                  {16, 128},
                                                  {32, 64},
                                                  {33, 128},
                                                  {64, 256},
                                                  {64, 512},
                                                  {320, 800},
                                                  {500, 251},
                                                  {6, 24},
                                                  {6, 81},
                                                  {8, 196}}) {
    for (const bool is_bidirectional : {true, false}) {
      const int64_t count = is_bidirectional ? num_buckets / 2 : num_buckets, exact = count / 2;
      if (max_distance <= exact) continue;
      const std::vector<int64_t> buckets =
          T5BucketsOf(num_buckets, max_distance, is_bidirectional, 1200);
      for (int64_t d = 0; d <= 1200; d++) {
        int64_t bucket = d;
        if (d >= exact) {
          const auto log = [](int64_t x) { return std::log(static_cast<long double>(x)); };
          const long double k = (log(d) - log(exact)) / (log(max_distance) - log(exact)) *
                                static_cast<long double>(count - exact);
          bucket = std::min(count - 1, exact + static_cast<int64_t>(k + 1e-12l));
        }
        ASSERT_EQ(buckets[1200 - d], bucket)
            << num_buckets << " buckets to " << max_distance << ", distance " << d;
        const int64_t right = is_bidirectional ? (d == 0 ? 0 : count + bucket) : 0;
        ASSERT_EQ(buckets[1200 + d], right)
            << num_buckets << " buckets to " << max_distance << ", distance " << -d;
      }
    }
  }
}

TEST(T5RelativeBias, WritesNothingOutsideTheTable) {
  const std::vector<float> embedding(32 * 3, 2.0f);
  const Memory table(3 * 10 * sizeof(float), Place::kBeforeGuard);
  mha_error error;
  ASSERT_EQ(mha_t5_relative_bias(embedding.data(), 0, 0, 1, 3, 7, 2, table.floats(), &error),
            MHA_OK)
      << error.message;
  EXPECT_EQ(std::vector<float>(table.floats(), table.floats() + 30), std::vector<float>(30, 2.0f));
  ASSERT_EQ(mha_t5_relative_bias(embedding.data(), 0, 0, 0, 3, 0, 0, table.floats(), nullptr),
            MHA_OK);
}

TEST(T5RelativeBias, NamesAWrongArgumentAndWritesNothing) {
  const std::vector<float> embedding(128, 1.0f);
  std::vector<float> table(100, 5.0f);
  const struct {
    int64_t num_buckets, max_distance;
    uint32_t is_bidirectional;
    int64_t num_heads, left, right;
    uint32_t argument;
    const char *words;
    mha_status status = MHA_ERROR_INVALID_VALUE;
  } cases[] = {
      {3, 0, 1, 4, 2, 2, 2, "num_buckets is 3; set it to 4 to 2^30, or to 0 (32)"},
      {1, 0, 0, 4, 2, 2, 2, "num_buckets is 1; set it to 2 to 2^30, or to 0 (32)"},
      {-1, 0, 0, 4, 2, 2, 2, "num_buckets is -1; set it to 2 to 2^30, or to 0 (32)"},
      {kMax, 0, 0, 4, 2, 2, 2, "num_buckets is 9223372036854775807; set it to 2 to 2^30"},
      {32, 8, 1, 4, 2, 2, 3, "max_distance is 8; with these buckets it must be more than 8"},
      {0, -5, 0, 4, 2, 2, 3, "max_distance is -5; with these buckets it must be more than 16"},
      {0, int64_t{1} << 31, 0, 4, 2, 2, 3, "max_distance is 2147483648; with these buckets"},
      {1 << 30, 1 << 30, 1, int64_t{1} << 40, 0, 0, 5, "address space", MHA_ERROR_TOO_LARGE},
      {0, 0, 1, 0, 2, 2, 5, "num_heads is 0; set it to at least 1"},
      {0, 0, 1, 4, -1, 2, 6, "left is -1; set it to at least 0"},
      {0, 0, 1, 4, 2, -1, 7, "right is -1; set it to at least 0"},
      {0, 0, 1, 4, kMax, kMax, 5, "address space", MHA_ERROR_TOO_LARGE},
      {0, 0, 1, 4, 2, 2, 1, "pass an array of num_buckets * num_heads", MHA_ERROR_NULL_POINTER},
      {0, 0, 1, 4, 2, 2, 8, "num_heads * (left + 1 + right) floats", MHA_ERROR_NULL_POINTER},
  };
  for (const auto &c : cases) {
    const bool is_null = c.status == MHA_ERROR_NULL_POINTER;
    ExpectFails({c.status, {c.argument}, {c.words}}, mha_t5_relative_bias,
                is_null && c.argument == 1 ? nullptr : embedding.data(), c.num_buckets,
                c.max_distance, c.is_bidirectional, c.num_heads, c.left, c.right,
                is_null && c.argument == 8 ? nullptr : table.data());
  }
  EXPECT_EQ(table, std::vector<float>(100, 5.0f));
}

}  // namespace
