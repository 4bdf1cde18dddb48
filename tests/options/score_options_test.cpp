// What changes scores beyond the scale (mha_score_options): softcap, ALiBi, biases, mask, sinks and
// scales of queries are as exact as float allows, and what is masked is not read. Their bits, each
// and together, in every kind of call are those of the generated cases.
#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "support/accuracy.h"
#include "support/attention_test.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

const float kInfinity = std::numeric_limits<float>::infinity();
const float kNaN = FromBits(0xffd23456u);

template <typename T, typename Make>
Pairs<T> RandomPairs(Random *random, const AttentionSizes &sizes, const Make &make) {
  Pairs<T> pairs;
  pairs.by_sequence = random->Coin();
  pairs.by_head = random->Coin();
  pairs.by_row = random->Chance(0.8);
  const int64_t count = (pairs.by_sequence ? sizes.batch : 1) *
                        (pairs.by_head ? sizes.num_heads : 1) * (pairs.by_row ? sizes.n_q : 1);
  pairs.values.resize(static_cast<size_t>(count * sizes.n_kv));
  for (T &value : pairs.values) value = make();
  return pairs;
}

// Multiples of 1/16, which f16 holds exactly.
Pairs<float> RandomBias(Random *random, const AttentionSizes &sizes, bool is_finite) {
  const double masked = is_finite ? 0.0 : random->Pick({0.0, 0.1, 0.9});
  return RandomPairs<float>(random, sizes, [&] {
    return random->Chance(masked) ? -kInfinity : static_cast<float>(random->Between(-64, 64)) / 16;
  });
}

// In runs, so that whole tiles, chunks and rows are masked.
Pairs<uint8_t> RandomMask(Random *random, const AttentionSizes &sizes) {
  const int64_t longest = random->Pick<int64_t>({1, 3, 40, 600});
  int64_t left = 0;
  uint8_t value = 0;
  return RandomPairs<uint8_t>(random, sizes, [&] {
    if (left-- <= 0) {
      left = random->Between(0, longest);
      value = random->Coin() ? static_cast<uint8_t>(random->Between(1, 255)) : uint8_t{0};
    }
    return value;
  });
}

void SetRelativeBias(Random *random, const AttentionSizes &sizes, bool is_finite,
                     ScoreArrays *score) {
  score->relative_left = random->Pick<int64_t>({0, 1, 7, 40, 300, 2000});
  score->relative_right = random->Pick<int64_t>({0, 1, 7, 40, 300, 2000});
  const int64_t distances = score->relative_left + 1 + score->relative_right;
  const bool by_row = random->Coin();
  std::vector<float> &biases = by_row ? score->relative_rows.values : score->relative_bias;
  score->relative_rows.by_sequence = score->relative_rows.by_head = true;
  score->relative_rows.columns = distances;
  biases = random->Normals((by_row ? sizes.batch * sizes.n_q : 1) * sizes.num_heads * distances);
  if (!is_finite && random->Chance(0.3)) {
    for (float &bias : biases) {
      if (random->Chance(0.1)) bias = random->Chance(0.9) ? -kInfinity : SpecialValue(random);
    }
  }
}

ScoreArrays RandomOptions(Random *random, const AttentionSizes &sizes, bool is_finite = false) {
  ScoreArrays score;
  if (random->Coin()) score.softcap = random->Pick<float>({50.0f, 1.0f, 0.1f, 3e5f});
  if (random->Coin()) score.alibi_slopes = random->Normals(sizes.num_heads, 0.1f);
  if (random->Coin()) score.sinks = random->Normals(sizes.num_heads, 2.0f);
  if (!is_finite && !score.sinks.empty() && random->Coin())
    score.sinks[0] = random->Pick<float>({-kInfinity, 80.0f, -200.0f});
  if (random->Coin()) score.bias = RandomBias(random, sizes, is_finite);
  score.bias_is_f16 = !score.bias.values.empty() && random->Coin();
  if (random->Coin()) score.mask = RandomMask(random, sizes);
  if (random->Coin()) SetRelativeBias(random, sizes, is_finite, &score);
  if (random->Coin())
    score.q_scales = random->Normals((random->Coin() ? sizes.batch : 1) * sizes.n_q);
  return score;
}

class ScoreOptionsTest : public AttentionTest {
 protected:
  static AttentionProblem Problem(uint64_t seed, int64_t n_q, int64_t n_kv, int64_t group = 2) {
    Random random(seed);
    AttentionProblem problem;
    problem.n_q = n_q;
    problem.n_kv = n_kv;
    problem.num_heads = 2 * group;
    problem.num_kv_heads = 2;
    problem.head_dim = 6;
    problem.head_dim_v = 5;
    problem.is_causal = true;
    FillNormal(&random, &problem);
    return problem;
  }
};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(ScoreOptionsTest);

// The distance of a block's first key is rounded, and those behind it are counted from there.
TEST_P(ScoreOptionsTest, AlibiOfDistancesThatAreNoFloatsHasTheBitsOfTheSpecification) {
  AttentionProblem problem = Problem(6, 3, 600);
  problem.q_start = {(int64_t{1} << 25) + 5};
  problem.score.emplace();
  problem.score->alibi_slopes = {0x1p-24f, 0x1p-20f, 0x1p-22f, -0x1p-24f};
  ExpectTheSpecification(problem);
}

TEST_P(ScoreOptionsTest, ArraysWhoseStridesWereNeverSetAreContiguous) {
  Random random(5);
  AttentionProblem problem = Problem(5, 4, 33);
  problem.score = RandomOptions(&random, problem);
  problem.score->mask = {};
  problem.score->mask.by_sequence = problem.score->mask.by_head = problem.score->mask.by_row = true;
  for (int64_t i = 0; i < problem.batch * problem.num_heads * 4 * 33; i++)
    problem.score->mask.values.push_back(random.Coin());
  problem.score->bias = {};
  problem.score->bias.by_sequence = problem.score->bias.by_head = problem.score->bias.by_row = true;
  problem.score->bias.values =
      RandomValues(&random, Values::kNormal, problem.batch * problem.num_heads * 4 * 33);
  problem.score->bias_is_f16 = false;
  const AttentionData data(problem, PlainCall());
  const mha_strides &of_mask = data.score_arrays.mask_strides,
                    &of_bias = data.score_arrays.bias.strides;
  EXPECT_EQ(of_mask.batch | of_mask.head | of_mask.row, 0);
  EXPECT_EQ(of_bias.batch | of_bias.head | of_bias.row, 0);
  EXPECT_TRUE(SameBits(Attend(problem, PlainCall()), Specify(problem))) << Describe(problem);
}

TEST_P(ScoreOptionsTest, EqualScoresWeighVisibleKeysAlikeAndTakeNoScaleBesideThem) {
  AttentionProblem problem = Problem(8, 5, 300);
  problem.has_equal_scores = true;
  ExpectTheSpecification(problem);
  problem.scale = 0.5f;
  const AttentionData data(problem, PlainCall());
  size_t bytes = 0;
  mha_error error;
  EXPECT_EQ(data.Workspace(&bytes, &error), MHA_ERROR_INVALID_VALUE);
  EXPECT_STREQ(error.message,
               "scale is 0.5 beside MHA_EQUAL_SCORES, which makes it 0; leave one out");
}

// Transformer-XL's scores (Dai et al., arXiv:1901.02860): (q + u) k^T + (q + v) r^T, where row n of
// r is of the distance n - left. The queries of the call are q + u; the second product, scaled, is
// made before it.
TEST_P(ScoreOptionsTest, RelativeRowsAreAProductWithTheQueriesByDistance) {
  Random random(9);
  AttentionProblem problem = Problem(9, 20, 20);
  problem.is_causal = false;
  const int64_t left = 19, distances = 39, heads = problem.num_heads, dim = problem.head_dim;
  const std::vector<float> r = random.Normals(heads * distances * dim),
                           v = random.Normals(heads * dim);
  const float scale = 1 / std::sqrt(static_cast<float>(dim));
  AttentionProblem by_pair = problem;
  problem.score = by_pair.score = ScoreArrays();
  ScoreArrays &score = *problem.score;
  score.relative_left = score.relative_right = left;
  score.relative_rows.by_head = by_pair.score->bias.by_head = true;
  score.relative_rows.columns = distances;
  for (int64_t h = 0; h < heads; h++) {
    for (int64_t i = 0; i < problem.n_q; i++) {
      for (int64_t n = 0; n < distances; n++) {
        float product = 0;
        for (int64_t d = 0; d < dim; d++) {
          product += (problem.q[static_cast<size_t>((i * heads + h) * dim + d)] +
                      v[static_cast<size_t>(h * dim + d)]) *
                     r[static_cast<size_t>((h * distances + n) * dim + d)];
        }
        score.relative_rows.values.push_back(product * scale);
        if (n >= left - i && n < left - i + problem.n_kv)
          by_pair.score->bias.values.push_back(product * scale);
      }
    }
  }
  EXPECT_TRUE(SameBits(Run(problem), Run(by_pair)));
}

TEST_P(ScoreOptionsTest, RelativeRowsThatAreTheSameForAllAreATable) {
  for (const int64_t n_q : {1, 9, 40}) {
    Random random(static_cast<uint64_t>(n_q));
    AttentionProblem table = Problem(1, n_q, 300);
    table.score = ScoreArrays();
    table.score->relative_left = 30;
    table.score->relative_right = 7;
    table.score->relative_bias = random.Normals(table.num_heads * 38);
    AttentionProblem rows = table;
    rows.score->relative_rows = {false, true, false, std::move(rows.score->relative_bias), 38};
    rows.score->relative_bias.clear();
    EXPECT_TRUE(SameBits(Run(rows), Run(table))) << n_q;
  }
}

// ---- Accuracy

TEST_P(ScoreOptionsTest, AreAsExactAsFloatAllows) {
  for (uint64_t seed = 0; seed < 40 && !HasFailure(); seed++) {
    Random random(seed);
    AttentionProblem problem = Problem(seed, 9, random.Pick<int64_t>({9, 40, 300}));
    problem.score = RandomOptions(&random, problem, true);
    ExpectTheErrorBound(problem, Run(problem));
  }
}

// ---- What is masked

// Keys, values and biases under a mask may be anything; so may biases that the flags exclude.
TEST_P(ScoreOptionsTest, WhatTheMaskExcludesIsUnread) {
  for (const int64_t n : {7, 40, 300, 600}) {
    Random random(static_cast<uint64_t>(n));
    AttentionProblem problem = Problem(static_cast<uint64_t>(n), n, n);
    problem.score = ScoreArrays();
    problem.score->bias.values = random.Normals(n * n);
    problem.score->mask.by_row = false;  // the same keys for all rows
    problem.score->mask.values.resize(static_cast<size_t>(n));
    for (uint8_t &attends : problem.score->mask.values) attends = random.Coin();
    const Outputs clean = Run(problem);
    for (const float poison : {kNaN, kInfinity}) {
      AttentionProblem poisoned = problem;
      for (int64_t j = 0; j < n; j++) {
        for (int64_t i = 0; i < n; i++) {
          const bool is_masked = j > i || !problem.score->mask.values[static_cast<size_t>(j)];
          if (is_masked) poisoned.score->bias.values[static_cast<size_t>(i * n + j)] = poison;
        }
        if (problem.score->mask.values[static_cast<size_t>(j)]) continue;
        std::fill_n(poisoned.k.begin() + j * 12, 12, poison);
        std::fill_n(poisoned.v.begin() + j * 10, 10, poison);
      }
      EXPECT_TRUE(SameBits(Run(poisoned, kAskLse | kAskWeights | kAskMaskedScores), clean))
          << n << " keys, " << poison;
    }
  }
}

// A mask of the rows of the problem, given as bytes, becomes biases of 0 and -infinity.
Pairs<float> AsBias(const Pairs<uint8_t> &mask) {
  Pairs<float> bias = {mask.by_sequence, mask.by_head, mask.by_row, {}, mask.columns};
  for (const uint8_t attends : mask.values) bias.values.push_back(attends ? 0.0f : -kInfinity);
  return bias;
}

// Keys and values under it may be anything, in one row over chunks in step and in tiles of several
// rows.
TEST_P(ScoreOptionsTest, ABiasOfMinusInfinityIsAMask) {
  for (uint64_t seed = 0; seed < 60 && !HasFailure(); seed++) {
    Random random(seed);
    const int64_t n_kv = random.Pick<int64_t>({7, 300, 600, 1100}),
                  n_q = random.Pick<int64_t>({1, 1, 2, 9, 40});
    AttentionProblem problem = Problem(seed, n_q, n_kv, random.Pick<int64_t>({1, 2}));
    problem.is_causal = n_q <= n_kv && random.Coin();
    ScoreArrays score;
    if (random.Coin()) score.softcap = 2;
    score.mask = RandomMask(&random, problem);
    std::vector<uint8_t> &mask = score.mask.values;
    if (random.Coin()) {  // nearly all of some chunks
      for (uint8_t &attends : mask) attends = random.Chance(0.002) ? 0 : 1;
    }
    for (int64_t j = 0; j < n_kv; j++) {
      bool is_masked = true;
      for (size_t at = static_cast<size_t>(j); at < mask.size(); at += static_cast<size_t>(n_kv))
        is_masked &= !mask[at];
      const float poison = is_masked ? random.Pick({kNaN, kInfinity, -kInfinity}) : 0.0f;
      if (is_masked) std::fill_n(problem.k.begin() + j * 12, 12, poison);
      if (is_masked) std::fill_n(problem.v.begin() + j * 10, 10, poison);
    }
    AttentionProblem by_bias = problem;
    problem.score = score;
    score.bias = AsBias(score.mask);
    score.bias_is_f16 = random.Coin();
    score.mask = {};
    by_bias.score = score;
    const unsigned asked = kAskLse | kAskWeights | kAskMaskedScores;
    EXPECT_TRUE(SameBits(Run(by_bias, asked), Run(problem, asked)))
        << "seed " << seed << ", " << n_q << " rows, " << n_kv << " keys";
  }
}

TEST_P(ScoreOptionsTest, ARelativeBiasOfMinusInfinityIsAWindow) {
  for (const int64_t n_q : {1, 9, 300}) {
    AttentionProblem window = Problem(1, n_q, 300);
    for (size_t i = 0; i < window.k.size(); i += 12)
      window.k[i] = i / 12 % 3 == 0 && i / 12 < 299 - 21 ? kNaN : window.k[i];
    AttentionProblem by_bias = window;
    window.window_left = 20;
    by_bias.score = ScoreArrays();
    by_bias.score->relative_left = 21;
    by_bias.score->relative_bias.assign(static_cast<size_t>(window.num_heads * 22), 0.0f);
    for (size_t n = 0; n < by_bias.score->relative_bias.size(); n += 22)
      by_bias.score->relative_bias[n] = -kInfinity;
    EXPECT_TRUE(SameBits(Run(by_bias, kAskLse | kAskWeights), Run(window, kAskLse | kAskWeights)))
        << n_q;
  }
}

TEST_P(ScoreOptionsTest, AFullyMaskedRowIsZeroUnderEveryOption) {
  for (const bool by_bias : {false, true}) {
    AttentionProblem problem = Problem(1, 9, 300);
    problem.score = ScoreArrays();
    problem.score->softcap = 2;
    problem.score->alibi_slopes = {1, 2, 3, 4};
    problem.score->sinks = {0, 1, 100, -100};
    if (by_bias) {
      problem.score->bias.by_row = false;
      problem.score->bias.values.assign(300, -kInfinity);
    } else {
      problem.score->mask.by_row = false;
      problem.score->mask.values.assign(300, 0);
    }
    const Outputs outputs = Run(problem);
    EXPECT_TRUE(SameBits(outputs.y, std::vector<float>(outputs.y.size(), 0.0f)));
    EXPECT_TRUE(SameBits(outputs.attention_weights,
                         std::vector<float>(outputs.attention_weights.size(), 0.0f)));
    EXPECT_TRUE(SameBits(outputs.lse, std::vector<float>(outputs.lse.size(), -kInfinity)));
  }
}

// ---- Special cases that are known otherwise

TEST_P(ScoreOptionsTest, AZeroBiasAMaskOfOnesAndASinkOfMinusInfinityChangeNoBit) {
  AttentionProblem problem = Problem(5, 30, 300);
  const Outputs plain = Run(problem);
  problem.score = ScoreArrays();
  problem.score->sinks.assign(4, -kInfinity);
  problem.score->bias.by_row = false;
  problem.score->bias.values.assign(300, 0.0f);
  problem.score->mask.by_row = false;
  problem.score->mask.values.assign(300, 255);
  EXPECT_TRUE(SameBits(Run(problem), plain));
}

TEST(AlibiSlopes, AreTheFormulas) {
  for (const int64_t heads : {1, 2, 3, 6, 8, 12, 16, 20, 32, 40, 64, 71, 112, 128, 1000}) {
    std::vector<float> slopes(static_cast<size_t>(heads));
    mha_error error;
    ASSERT_EQ(mha_alibi_slopes(heads, slopes.data(), &error), MHA_OK) << error.message;
    int64_t n = 1;
    while (2 * n <= heads) n *= 2;
    for (int64_t h = 0; h < heads; h++) {
      const double exponent =
          h < n ? -8.0 * static_cast<double>(h + 1) / static_cast<double>(n)
                : -4.0 * static_cast<double>(2 * (h - n) + 1) / static_cast<double>(n);
      EXPECT_NEAR(slopes[static_cast<size_t>(h)] / std::exp2(exponent), 1.0, 0x1p-24)
          << "head " << h << " of " << heads;
    }
  }
}

// ---- T5

// Distance d in the table of T5 with so many buckets, one head, whose embedding is the number of
// the bucket.
std::vector<int64_t> T5BucketsOf(int64_t num_buckets, int64_t max_distance, bool is_bidirectional,
                                 int64_t reach) {
  const int64_t count = num_buckets == 0 ? 32 : num_buckets;
  std::vector<float> embedding(static_cast<size_t>(2 * count)),
      bias(static_cast<size_t>(2 * (2 * reach + 1)));
  for (int64_t bucket = 0; bucket < count; bucket++) {
    embedding[static_cast<size_t>(2 * bucket)] = static_cast<float>(bucket);
    embedding[static_cast<size_t>(2 * bucket + 1)] = static_cast<float>(-bucket);
  }
  mha_error error;
  const mha_status status =
      mha_t5_relative_bias(embedding.data(), num_buckets, max_distance, is_bidirectional, 2, reach,
                           reach, bias.data(), &error);
  EXPECT_EQ(status, MHA_OK) << error.message;
  std::vector<int64_t> buckets;
  for (int64_t i = 0; i <= 2 * reach; i++) {
    buckets.push_back(static_cast<int64_t>(bias[static_cast<size_t>(i)]));
    EXPECT_EQ(bias[static_cast<size_t>(2 * reach + 1 + i)], -bias[static_cast<size_t>(i)])
        << "of the second head";
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
        EXPECT_EQ(buckets[static_cast<size_t>(distance + 300)], begins[at].second)
            << "distance " << distance;
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
        ASSERT_EQ(buckets[static_cast<size_t>(1200 - d)], bucket)
            << num_buckets << " buckets to " << max_distance << ", distance " << d;
        const int64_t right = is_bidirectional ? (d == 0 ? 0 : count + bucket) : 0;
        ASSERT_EQ(buckets[static_cast<size_t>(1200 + d)], right)
            << num_buckets << " buckets to " << max_distance << ", distance " << -d;
      }
    }
  }
}

TEST(T5RelativeBias, FillsTheTableAlone) {
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

TEST(T5RelativeBias, RefusesWhatDoesNotFit) {
  const int64_t most = std::numeric_limits<int64_t>::max();
  const std::vector<float> embedding(128, 1.0f);
  const float *const from = embedding.data();
  std::vector<float> table(100, 5.0f);
  const struct {
    int64_t num_buckets, max_distance;
    uint32_t is_bidirectional;
    int64_t num_heads, left, right;
    const float *embedding;
    float *to;
    mha_status status;
    uint32_t argument;
    const char *sentence;
  } cases[] = {
      {3, 0, 1, 4, 2, 2, from, table.data(), MHA_ERROR_INVALID_VALUE, 2,
       "num_buckets is 3; it must be 4 to 2^30, or 0 for 32"},
      {1, 0, 0, 4, 2, 2, from, table.data(), MHA_ERROR_INVALID_VALUE, 2,
       "num_buckets is 1; it must be 2 to 2^30, or 0 for 32"},
      {-1, 0, 0, 4, 2, 2, from, table.data(), MHA_ERROR_INVALID_VALUE, 2,
       "num_buckets is -1; it must be 2 to 2^30, or 0 for 32"},
      {most, 0, 0, 4, 2, 2, from, table.data(), MHA_ERROR_INVALID_VALUE, 2,
       "num_buckets is 9223372036854775807; it must be 2 to 2^30, or 0 for 32"},
      {32, 8, 1, 4, 2, 2, from, table.data(), MHA_ERROR_INVALID_VALUE, 3,
       "max_distance is 8; with these buckets it must be more than 8, to 2^30, or 0 for 128"},
      {0, -5, 0, 4, 2, 2, from, table.data(), MHA_ERROR_INVALID_VALUE, 3,
       "max_distance is -5; with these buckets it must be more than 16, to 2^30, or 0 for 128"},
      {0, 0, 1, 0, 2, 2, from, table.data(), MHA_ERROR_INVALID_VALUE, 5,
       "num_heads is 0; it must be at least 1"},
      {0, 0, 1, 4, -1, 2, from, table.data(), MHA_ERROR_INVALID_VALUE, 6,
       "left is -1; it must be at least 0"},
      {0, 0, 1, 4, 2, -1, from, table.data(), MHA_ERROR_INVALID_VALUE, 7,
       "right is -1; it must be at least 0"},
      {0, 0, 1, 4, most, most, from, table.data(), MHA_ERROR_TOO_LARGE, 5,
       "the arrays would exceed the address space; use smaller dimensions"},
      {0, 0, 1, 4, 2, 2, nullptr, table.data(), MHA_ERROR_NULL_POINTER, 1,
       "embedding is NULL; pass an array of num_buckets * num_heads floats"},
      {0, 0, 1, 4, 2, 2, from, nullptr, MHA_ERROR_NULL_POINTER, 8,
       "relative_bias is NULL; pass an array of num_heads * (left + 1 + right) floats"},
  };
  for (const auto &c : cases) {
    mha_error error;
    const mha_status status =
        mha_t5_relative_bias(c.embedding, c.num_buckets, c.max_distance, c.is_bidirectional,
                             c.num_heads, c.left, c.right, c.to, &error);
    EXPECT_EQ(status, c.status) << c.sentence;
    EXPECT_STREQ(error.message, c.sentence);
    EXPECT_EQ(error.argument, c.argument);
  }
  EXPECT_EQ(table, std::vector<float>(100, 5.0f));
}

}  // namespace
