// What changes scores beyond the scale (mha_score_options): softcap, ALiBi, biases, mask, sinks and scales of queries, each and together,
// have the bits of the specification in every kind of call, are as exact as float allows, and reach nothing that they should not. The
// number of random cases is multiplied by the environment variable MHA_TEST_ROUNDS.
#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "support/accuracy.h"
#include "support/attention_test.h"
#include "support/fixtures.h"
#include "support/instruction_sets.h"
#include "support/rounds.h"
#include "support/same_bits.h"
#include "support/schedulers.h"
#include "support/specify.h"

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
  const int64_t count = (pairs.by_sequence ? sizes.batch : 1) * (pairs.by_head ? sizes.num_heads : 1) * (pairs.by_row ? sizes.n_q : 1);
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

void SetRelativeBias(Random *random, const AttentionSizes &sizes, bool is_finite, ScoreArrays *score) {
  score->relative_left = random->Pick<int64_t>({0, 1, 7, 40, 300, 2000});
  score->relative_right = random->Pick<int64_t>({0, 1, 7, 40, 300, 2000});
  score->relative_bias = random->Normals(sizes.num_heads * (score->relative_left + 1 + score->relative_right));
  if (!is_finite && random->Chance(0.3)) {
    for (float &bias : score->relative_bias) {
      if (random->Chance(0.1)) bias = random->Chance(0.9) ? -kInfinity : SpecialValue(random);
    }
  }
}

ScoreArrays RandomOptions(Random *random, const AttentionSizes &sizes, bool is_finite = false) {
  ScoreArrays score;
  if (random->Coin()) score.softcap = random->Pick<float>({50.0f, 1.0f, 0.1f, 3e5f});
  if (random->Coin()) score.alibi_slopes = random->Normals(sizes.num_heads, 0.1f);
  if (random->Coin()) score.sinks = random->Normals(sizes.num_heads, 2.0f);
  if (!is_finite && !score.sinks.empty() && random->Coin()) score.sinks[0] = random->Pick<float>({-kInfinity, 80.0f, -200.0f});
  if (random->Coin()) score.bias = RandomBias(random, sizes, is_finite);
  score.bias_is_f16 = !score.bias.values.empty() && random->Coin();
  if (random->Coin()) score.mask = RandomMask(random, sizes);
  if (random->Coin()) SetRelativeBias(random, sizes, is_finite, &score);
  if (random->Coin()) score.q_scales = random->Normals((random->Coin() ? sizes.batch : 1) * sizes.n_q);
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

  // The rows of `whole` behind a cache that has all keys but the last ones, which come with the rows and alone have columns in `score`.
  std::vector<float> OfNewKeys(const AttentionProblem &whole, const CacheForm &form, const ScoreArrays &score) const {
    const int64_t n = whole.n_q, all = whole.n_kv, past = all - n, width = whole.num_kv_heads * whole.head_dim;
    const int64_t width_v = whole.num_kv_heads * whole.head_dim_v;
    Cache cache(CacheConfigOf(whole, form, 1, all));
    cache.Append(0, {SliceRows(whole.k, 0, all, width, 0, past), SliceRows(whole.v, 0, all, width_v, 0, past)});
    AttentionProblem part = whole;
    part.n_kv = n;
    part.k = SliceRows(whole.k, 0, all, width, past, n);
    part.v = SliceRows(whole.v, 0, all, width_v, past, n);
    part.score = score;
    AttentionCall call = PlainCall();
    call.asked = kAskNothing;
    call.cache.cache = cache.get();
    AttentionData data(part, call);
    data.score.columns = MHA_COLUMNS_NEW_KEYS;
    return data.Compute().y;
  }
};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(ScoreOptionsTest);

// ---- Bits

TEST_P(ScoreOptionsTest, RandomCasesEqualTheSpecification) {
  for (int64_t n = 0; n < Rounds(500) && !HasFailure(); n++) {
    Random random(7000 + static_cast<uint64_t>(n));
    AttentionProblem problem;
    problem.num_kv_heads = random.Between(1, 2);
    problem.num_heads = problem.num_kv_heads * random.Pick<int64_t>({1, 1, 2, 3});
    problem.batch = random.Between(1, 2);
    problem.n_q = random.Pick<int64_t>({1, 1, 2, 5, 6, 7, 17, 40});
    problem.n_kv = random.Coin() ? problem.n_q : random.Pick<int64_t>({0, 1, 15, 16, 33, 255, 257, 300, 600, 1100});
    problem.head_dim = random.Pick<int64_t>({1, 8, 19, 33});
    problem.head_dim_v = random.Pick<int64_t>({1, 8, 19, 48});
    problem.is_causal = random.Coin() && problem.n_q <= problem.n_kv;
    if (random.Chance(0.3)) problem.scale = random.Pick<float>({1.0f, -0.5f, 20.0f});
    if (random.Chance(0.3)) problem.window_left = random.Pick<int64_t>({0, 5, 256, 300});
    if (random.Chance(0.2)) problem.window_right = random.Pick<int64_t>({0, 3, 270});
    for (int64_t b = 0; b < problem.batch; b++) problem.q_start.push_back(random.Between(0, problem.n_kv + 20));
    if (random.Chance(0.4)) {
      for (int64_t b = 0; b < problem.batch; b++) {
        problem.q_lengths.push_back(random.Between(0, problem.n_q));
        problem.kv_lengths.push_back(random.Between(0, problem.n_kv));
      }
      problem.padding_left = random.Coin();
    }
    const Values kind = RandomKind(&random);
    problem.q = RandomValues(&random, kind, problem.batch * problem.n_q * problem.num_heads * problem.head_dim);
    problem.k = RandomValues(&random, kind, problem.batch * problem.n_kv * problem.num_kv_heads * problem.head_dim);
    problem.v = RandomValues(&random, kind, problem.batch * problem.n_kv * problem.num_kv_heads * problem.head_dim_v);
    problem.score = RandomOptions(&random, problem);
    if (!problem.score->bias.values.empty() && !problem.score->bias_is_f16 && random.Chance(0.2)) {
      problem.score->bias.values[0] = SpecialValue(&random);
    }
    AttentionCall call = PlainCall();
    call.asked = random.Coin() ? kAskAllOfAttention : kAskLse;
    const Scheduler scheduler(static_cast<uint32_t>(random.Between(1, 4)), RunBackwards);
    if (random.Chance(0.4)) call.scheduler = scheduler.get();
    SCOPED_TRACE("case " + std::to_string(n) + " values " + NameOf(kind));
    EXPECT_TRUE(SameBits(Attend(problem, call), Specify(problem))) << Describe(problem);
  }
}

TEST_P(ScoreOptionsTest, ArraysWhoseStridesWereNeverSetAreContiguous) {
  Random random(5);
  AttentionProblem problem = Problem(5, 4, 33);
  problem.score = RandomOptions(&random, problem);
  problem.score->mask = {};
  problem.score->mask.by_sequence = problem.score->mask.by_head = problem.score->mask.by_row = true;
  for (int64_t i = 0; i < problem.batch * problem.num_heads * 4 * 33; i++) problem.score->mask.values.push_back(random.Coin());
  problem.score->bias = {};
  problem.score->bias.by_sequence = problem.score->bias.by_head = problem.score->bias.by_row = true;
  problem.score->bias.values = RandomValues(&random, Values::kNormal, problem.batch * problem.num_heads * 4 * 33);
  problem.score->bias_is_f16 = false;
  const AttentionData data(problem, PlainCall());
  const mha_score_options &score = data.score;
  EXPECT_EQ(score.mask_batch_stride | score.mask_head_stride | score.mask_row_stride, 0);
  EXPECT_EQ(score.bias_batch_stride | score.bias_head_stride | score.bias_row_stride, 0);
  EXPECT_TRUE(SameBits(Attend(problem, PlainCall()), Specify(problem))) << Describe(problem);
}

// Token by token over a cache, and as one prompt: the columns of mask and bias are positions.
TEST_P(ScoreOptionsTest, OverACacheAreThoseOfTheWholePrompt) {
  Sample sample;
  for (const int64_t n : {40, 300, 1100}) {
    for (const Storage type : kStorageTypes) {
      if (!sample.Takes()) continue;
      Random random(static_cast<uint64_t>(n));
      AttentionProblem whole = Problem(static_cast<uint64_t>(n), n, n);
      whole.k_type = whole.v_type = type;
      whole.score = RandomOptions(&random, whole);
      whole.score->softcap = 5;
      do {
        whole.score->mask = RandomMask(&random, whole);
      } while (!whole.score->mask.by_row);
      do {
        whole.score->bias = RandomBias(&random, whole, false);
      } while (!whole.score->bias.by_row);
      const Outputs expected = Specify(whole);
      Cache cache(CacheConfigOf(whole, {MHA_CACHE_PAGED, 64}, 1, n));
      SpreadBlocks(&random, &cache);
      AttentionCall without_outputs = PlainCall();
      without_outputs.asked = kAskNothing;
      const AttentionData arrays(whole, without_outputs);
      for (int64_t done = 0; done < n && !HasFailure();) {
        const int64_t count = std::min(n - done, done == 0 ? n - 9 : random.Between(1, 3));
        AttentionProblem part = Slice(whole, 0, done, count, 0);
        part.n_kv = count;
        part.k = SliceRows(whole.k, 0, n, whole.num_kv_heads * whole.head_dim, done, count);
        part.v = SliceRows(whole.v, 0, n, whole.num_kv_heads * whole.head_dim_v, done, count);
        part.score.reset();
        AttentionCall call = PlainCall();
        call.asked = kAskNothing;
        call.cache.cache = cache.get();
        AttentionData data(part, call);
        // The arrays of the whole prompt, from this row on.
        mha_score_options score = arrays.score;
        score.mask_row_stride = score.bias_row_stride = n;
        if (whole.score->mask.by_head) score.mask_head_stride = n * n;
        if (whole.score->bias.by_head) score.bias_head_stride = n * n;
        score.mask += done * n;
        score.bias = static_cast<const char *>(score.bias) + done * n * (whole.score->bias_is_f16 ? 2 : 4);
        if (score.q_scales != nullptr) score.q_scales += done;
        data.args.score = &score;
        const std::vector<float> y = data.Compute().y;
        const int64_t width = whole.num_heads * whole.head_dim_v;
        EXPECT_TRUE(SameBits(y, SliceRows(expected.y, 0, n, width, done, count))) << NameOf(type) << " " << n << " rows from " << done;
        done += count;
      }
    }
  }
}

// A tree of drafted tokens: a mask over the new rows alone is one over all keys with ones in front.
TEST_P(ScoreOptionsTest, WithColumnsOfNewKeysAreThoseWithOnesAndZerosBeforeThem) {
  for (const uint32_t kind : {MHA_CACHE_CONTIGUOUS, MHA_CACHE_RING}) {
    for (const int64_t past : {0, 5, 250, 700}) {
      const int64_t n = 7, all = past + n;
      Random random(static_cast<uint64_t>(past));
      AttentionProblem whole = Problem(static_cast<uint64_t>(past), n, all);
      whole.window_left = 800;
      ScoreArrays score;
      score.mask.values.assign(static_cast<size_t>(n * all), 1);
      score.bias.values.assign(static_cast<size_t>(n * all), 0.0f);
      Pairs<uint8_t> mask;
      Pairs<float> bias;
      for (int64_t i = 0; i < n; i++) {
        for (int64_t j = 0; j < n; j++) {
          mask.values.push_back(j == i || random.Coin() ? 1 : 0);
          bias.values.push_back(random.Uniform());
          score.mask.values[static_cast<size_t>(i * all + past + j)] = mask.values.back();
          score.bias.values[static_cast<size_t>(i * all + past + j)] = bias.values.back();
        }
      }
      whole.score = score;
      const Outputs expected = Specify(whole);

      score.mask = mask;
      score.bias = bias;
      EXPECT_TRUE(SameBits(OfNewKeys(whole, {kind, 832}, score), expected.y)) << "past " << past << " kind " << kind;
    }
  }
}

// More rows than a ring takes at once: its passes know which keys the call brought.
TEST_P(ScoreOptionsTest, WithColumnsOfNewKeysReachOverThePassesOfARing) {
  const int64_t past = 20, n = 90, all = past + n;
  Random random(3);
  AttentionProblem whole = Problem(3, n, all);
  whole.window_left = 40;
  ScoreArrays score;
  score.mask.values.assign(static_cast<size_t>(n * all), 1);
  Pairs<uint8_t> mask;
  for (int64_t i = 0; i < n; i++) {
    for (int64_t j = 0; j < n; j++) {
      mask.values.push_back(random.Coin() ? 1 : 0);
      score.mask.values[static_cast<size_t>(i * all + past + j)] = mask.values.back();
    }
  }
  whole.score = score;
  const Outputs expected = Specify(whole);
  score.mask = mask;
  EXPECT_TRUE(SameBits(OfNewKeys(whole, {MHA_CACHE_RING, 64}, score), expected.y));
}

TEST_P(ScoreOptionsTest, OfALayerGiveTheBitsOfTheSpecification) {
  for (const int64_t n : {1, 3, 70, 300}) {
    for (const bool is_small : {true, false}) {  // a small layer is computed whole, but not with these
      Random random(static_cast<uint64_t>(n));
      LayerProblem problem;
      problem.n_q = problem.n_kv = n;
      problem.query_dim = problem.key_dim = problem.value_dim = problem.output_dim = is_small ? 16 : 72;
      problem.num_heads = is_small ? 2 : 6;
      problem.num_kv_heads = problem.num_heads / 2;
      problem.head_dim = problem.head_dim_v = is_small ? 8 : 12;
      problem.is_causal = true;
      FillNormal(&random, kAllBiases, true, &problem);
      problem.score = RandomOptions(&random, problem);
      problem.score->softcap = 3;
      problem.score->sinks = random.Normals(problem.num_heads);
      ExpectTheSpecification(problem);
    }
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

TEST(Tanh, IsWithinItsErrorBound) {
  double worst = 0;
  for (uint32_t bits = 0x30000000u; bits < 0x41800000u; bits += 101) {
    const float x = FromBits(bits), y = spec::Fastest().tanh(x);
    const double exact = std::tanh(static_cast<double>(x));
    worst = std::max(worst, std::fabs(y - exact) / std::ldexp(1.0, std::ilogb(exact) - 23));
    ASSERT_EQ(spec::Fastest().tanh(-x), -y);
  }
  EXPECT_LE(worst, 1.45);
  for (const float sign : {1.0f, -1.0f}) {
    EXPECT_EQ(spec::Fastest().tanh(sign * 20), sign);
    EXPECT_EQ(spec::Fastest().tanh(sign * kInfinity), sign);
    EXPECT_EQ(spec::Fastest().tanh(sign * 0x1p-140f), sign * 0x1p-140f);
  }
  EXPECT_TRUE(std::isnan(spec::Fastest().tanh(kNaN)));
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
      EXPECT_TRUE(SameBits(Run(poisoned, kAskLse | kAskWeights | kAskMaskedScores), clean)) << n << " keys, " << poison;
    }
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
    EXPECT_TRUE(SameBits(outputs.attention_weights, std::vector<float>(outputs.attention_weights.size(), 0.0f)));
    EXPECT_TRUE(SameBits(outputs.lse, std::vector<float>(outputs.lse.size(), -kInfinity)));
  }
}

// Nothing beside the arrays is read: each ends at an inaccessible page.
TEST_P(ScoreOptionsTest, ArraysAreReadWithinTheirBounds) {
  for (const int64_t n : {1, 5, 16, 17, 250, 300}) {
    for (const Place place : {Place::kBeforeGuard, Place::kAfterGuard}) {
      Random random(static_cast<uint64_t>(n));
      AttentionProblem problem = Problem(static_cast<uint64_t>(n), n, n, 1);
      problem.score = ScoreArrays();
      problem.score->alibi_slopes = random.Normals(2);
      problem.score->sinks = random.Normals(2);
      problem.score->bias = RandomBias(&random, problem, true);
      problem.score->bias_is_f16 = random.Coin();
      problem.score->mask = RandomMask(&random, problem);
      AttentionCall call = PlainCall();
      call.place = place;
      AttentionData data(problem, call);
      data.FreezeInputs();
      EXPECT_TRUE(SameBits(data.Compute(), Specify(problem))) << Describe(problem);
    }
  }
}

// ---- Special cases that are known otherwise

// The position of a query may be any, and the ends of the table are the numbers of all keys beyond them.
TEST_P(ScoreOptionsTest, ARelativeBiasReachesAnyPosition) {
  const int64_t most = std::numeric_limits<int64_t>::max();
  for (const int64_t start : std::initializer_list<int64_t>{-most / 2 - 1, -1000, -4, 0, 10, 299, 300, most - 3, most}) {
    for (const auto &[left, right] : {std::pair<int64_t, int64_t>{0, 0}, {3, 0}, {0, 3}, {290, 5}, {5, 290}, {2000, 2000}}) {
      Random random(5);
      AttentionProblem problem = Problem(5, 6, 300);
      problem.is_causal = false;
      problem.q_start = {start};
      problem.score = ScoreArrays();
      problem.score->relative_left = left;
      problem.score->relative_right = right;
      problem.score->relative_bias = random.Normals(4 * (left + 1 + right));
      AttentionCall call = PlainCall();
      call.place = Place::kBeforeGuard;
      AttentionData data(problem, call);
      data.FreezeInputs();
      EXPECT_TRUE(SameBits(data.Compute(), Specify(problem))) << "q_start " << start << " table " << left << " + 1 + " << right;
    }
  }
}

TEST_P(ScoreOptionsTest, ARelativeBiasIsTheBiasOfItsDistances) {
  Random random(6);
  AttentionProblem problem = Problem(6, 300, 300), relative = problem;
  relative.score = ScoreArrays();
  relative.score->relative_left = 40;
  relative.score->relative_right = 7;
  relative.score->relative_bias = random.Normals(4 * 48);
  problem.score = ScoreArrays();
  problem.score->bias.by_head = true;
  for (int64_t h = 0; h < 4; h++) {
    for (int64_t i = 0; i < 300; i++) {
      for (int64_t j = 0; j < 300; j++) {
        const int64_t column = std::clamp<int64_t>(j - i, -40, 7) + 40;
        problem.score->bias.values.push_back(relative.score->relative_bias[static_cast<size_t>(h * 48 + column)]);
      }
    }
  }
  EXPECT_TRUE(SameBits(Run(relative), Run(problem)));
}

TEST_P(ScoreOptionsTest, ScalesOfQueriesAreThoseOfScaledQueries) {
  AttentionProblem problem = Problem(7, 40, 300), scaled = problem;
  Random random(7);
  problem.score = ScoreArrays();
  problem.score->q_scales = random.Normals(40);
  for (size_t n = 0; n < scaled.q.size(); n++) scaled.q[n] = scaled.q[n] * problem.score->q_scales[n / 24];
  EXPECT_TRUE(SameBits(Run(problem), Run(scaled)));
}

// Once they are rotated: no angle changes, but the order of roundings is the specification's.
TEST_P(ScoreOptionsTest, ScalesOfQueriesComeBehindTheRotation) {
  AttentionProblem problem = Problem(8, 20, 40);
  Random random(8);
  Rope rope;
  rope.dims = 6;
  rope.num_positions = 40;
  rope.table_stride = 3;
  rope.cos = random.Normals(120);
  rope.sin = random.Normals(120);
  problem.rope = rope;
  problem.score = ScoreArrays();
  problem.score->q_scales = random.Normals(20);
  EXPECT_TRUE(SameBits(Run(problem), Specify(problem)));
}

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

TEST_P(ScoreOptionsTest, AMaskOfATriangleIsCausal) {
  AttentionProblem problem = Problem(6, 300, 300);
  const Outputs causal = Run(problem);
  problem.is_causal = false;
  problem.score = ScoreArrays();
  for (int64_t i = 0; i < 300; i++) {
    for (int64_t j = 0; j < 300; j++) problem.score->mask.values.push_back(j <= i);
  }
  EXPECT_TRUE(SameBits(Run(problem), causal));
}

TEST(AlibiSlopes, AreTheFormulas) {
  for (const int64_t heads : {1, 2, 3, 6, 8, 12, 16, 20, 32, 40, 64, 71, 112, 128, 1000}) {
    std::vector<float> slopes(static_cast<size_t>(heads));
    mha_error error;
    ASSERT_EQ(mha_alibi_slopes(heads, slopes.data(), &error), MHA_OK) << error.message;
    int64_t n = 1;
    while (2 * n <= heads) n *= 2;
    for (int64_t h = 0; h < heads; h++) {
      const double exponent = h < n ? -8.0 * static_cast<double>(h + 1) / static_cast<double>(n)
                                    : -4.0 * static_cast<double>(2 * (h - n) + 1) / static_cast<double>(n);
      EXPECT_NEAR(slopes[static_cast<size_t>(h)] / std::exp2(exponent), 1.0, 0x1p-24) << "head " << h << " of " << heads;
    }
  }
}

// ---- T5

// Distance d in the table of T5 with so many buckets, one head, whose embedding is the number of the bucket.
std::vector<int64_t> T5BucketsOf(int64_t num_buckets, int64_t max_distance, bool is_bidirectional, int64_t reach) {
  const int64_t count = num_buckets == 0 ? 32 : num_buckets;
  std::vector<float> embedding(static_cast<size_t>(2 * count)), bias(static_cast<size_t>(2 * (2 * reach + 1)));
  for (int64_t bucket = 0; bucket < count; bucket++) {
    embedding[static_cast<size_t>(2 * bucket)] = static_cast<float>(bucket);
    embedding[static_cast<size_t>(2 * bucket + 1)] = static_cast<float>(-bucket);
  }
  mha_error error;
  const mha_status status =
      mha_t5_relative_bias(embedding.data(), num_buckets, max_distance, is_bidirectional, 2, reach, reach, bias.data(), &error);
  EXPECT_EQ(status, MHA_OK) << error.message;
  std::vector<int64_t> buckets;
  for (int64_t i = 0; i <= 2 * reach; i++) {
    buckets.push_back(static_cast<int64_t>(bias[static_cast<size_t>(i)]));
    EXPECT_EQ(bias[static_cast<size_t>(2 * reach + 1 + i)], -bias[static_cast<size_t>(i)]) << "of the second head";
  }
  return buckets;
}

// Where transformers 5.23 (T5Attention._relative_position_bucket) begins a bucket, from the greatest distance to the left on.
TEST(T5RelativeBias, HasTheBucketsOfTransformers) {
  const std::vector<std::pair<int64_t, int64_t>> both = {
      {-300, 15}, {-90, 14}, {-63, 13}, {-45, 12}, {-31, 11}, {-22, 10}, {-15, 9}, {-11, 8}, {-7, 7},  {-6, 6},  {-5, 5},
      {-4, 4},    {-3, 3},   {-2, 2},   {-1, 1},   {0, 0},    {1, 17},   {2, 18},  {3, 19},  {4, 20},  {5, 21},  {6, 22},
      {7, 23},    {8, 24},   {12, 25},  {16, 26},  {23, 27},  {32, 28},  {46, 29}, {64, 30}, {91, 31}, {301, -1}};
  const std::vector<std::pair<int64_t, int64_t>> left = {
      {-300, 31}, {-112, 30}, {-98, 29}, {-86, 28}, {-76, 27}, {-66, 26}, {-58, 25}, {-51, 24}, {-45, 23}, {-39, 22}, {-34, 21},
      {-30, 20},  {-26, 19},  {-23, 18}, {-20, 17}, {-18, 16}, {-15, 15}, {-14, 14}, {-13, 13}, {-12, 12}, {-11, 11}, {-10, 10},
      {-9, 9},    {-8, 8},    {-7, 7},   {-6, 6},   {-5, 5},   {-4, 4},   {-3, 3},   {-2, 2},   {-1, 1},   {0, 0},    {301, -1}};
  for (const bool is_bidirectional : {true, false}) {
    const auto &begins = is_bidirectional ? both : left;
    for (const int64_t given : {0, 1}) {
      const std::vector<int64_t> buckets = T5BucketsOf(32 * given, 128 * given, is_bidirectional, 300);
      size_t at = 0;
      for (int64_t distance = -300; distance <= 300; distance++) {
        if (distance == begins[at + 1].first) at++;
        EXPECT_EQ(buckets[static_cast<size_t>(distance + 300)], begins[at].second) << "distance " << distance;
      }
    }
  }
}

// The formula in long double, whose rounding may show only at the borders that are whole numbers: there a bucket begins.
TEST(T5RelativeBias, FollowsTheFormulaForAnyBuckets) {
  for (const auto &[num_buckets, max_distance] :
       {std::pair<int64_t, int64_t>{4, 3}, {8, 20}, {16, 128}, {32, 64}, {33, 128}, {64, 256}, {64, 512}, {320, 800}, {500, 251}}) {
    for (const bool is_bidirectional : {true, false}) {
      const int64_t count = is_bidirectional ? num_buckets / 2 : num_buckets, exact = count / 2;
      if (max_distance <= exact) continue;
      const std::vector<int64_t> buckets = T5BucketsOf(num_buckets, max_distance, is_bidirectional, 1200);
      for (int64_t d = 0; d <= 1200; d++) {
        int64_t bucket = d;
        if (d >= exact) {
          const auto log = [](int64_t x) { return std::log(static_cast<long double>(x)); };
          const long double k = (log(d) - log(exact)) / (log(max_distance) - log(exact)) * static_cast<long double>(count - exact);
          bucket = std::min(count - 1, exact + static_cast<int64_t>(k + 1e-12l));
        }
        ASSERT_EQ(buckets[static_cast<size_t>(1200 - d)], bucket) << num_buckets << " buckets to " << max_distance << ", distance " << d;
        const int64_t right = is_bidirectional ? (d == 0 ? 0 : count + bucket) : 0;
        ASSERT_EQ(buckets[static_cast<size_t>(1200 + d)], right) << num_buckets << " buckets to " << max_distance << ", distance " << -d;
      }
    }
  }
}

TEST(T5RelativeBias, FillsTheTableAlone) {
  const std::vector<float> embedding(32 * 3, 2.0f);
  const Memory table(3 * 10 * sizeof(float), Place::kBeforeGuard);
  mha_error error;
  ASSERT_EQ(mha_t5_relative_bias(embedding.data(), 0, 0, 1, 3, 7, 2, table.floats(), &error), MHA_OK) << error.message;
  EXPECT_EQ(std::vector<float>(table.floats(), table.floats() + 30), std::vector<float>(30, 2.0f));
  ASSERT_EQ(mha_t5_relative_bias(embedding.data(), 0, 0, 0, 3, 0, 0, table.floats(), nullptr), MHA_OK);
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
      {3, 0, 1, 4, 2, 2, from, table.data(), MHA_ERROR_INVALID_VALUE, 2, "num_buckets is 3; it must be 4 to 2^30, or 0 for 32"},
      {1, 0, 0, 4, 2, 2, from, table.data(), MHA_ERROR_INVALID_VALUE, 2, "num_buckets is 1; it must be 2 to 2^30, or 0 for 32"},
      {-1, 0, 0, 4, 2, 2, from, table.data(), MHA_ERROR_INVALID_VALUE, 2,
       "num_buckets is -1; it must be 2 to 2^30, or 0 for 32"},
      {most, 0, 0, 4, 2, 2, from, table.data(), MHA_ERROR_INVALID_VALUE, 2,
       "num_buckets is 9223372036854775807; it must be 2 to 2^30, or 0 for 32"},
      {32, 8, 1, 4, 2, 2, from, table.data(), MHA_ERROR_INVALID_VALUE, 3,
       "max_distance is 8; with these buckets it must be more than 8, to 2^30, or 0 for 128"},
      {0, -5, 0, 4, 2, 2, from, table.data(), MHA_ERROR_INVALID_VALUE, 3,
       "max_distance is -5; with these buckets it must be more than 16, to 2^30, or 0 for 128"},
      {0, 0, 1, 0, 2, 2, from, table.data(), MHA_ERROR_INVALID_VALUE, 5, "num_heads is 0; it must be at least 1"},
      {0, 0, 1, 4, -1, 2, from, table.data(), MHA_ERROR_INVALID_VALUE, 6, "left is -1; it must be at least 0"},
      {0, 0, 1, 4, 2, -1, from, table.data(), MHA_ERROR_INVALID_VALUE, 7, "right is -1; it must be at least 0"},
      {0, 0, 1, 4, most, most, from, table.data(), MHA_ERROR_TOO_LARGE, 5, "the arrays would be larger than memory can be"},
      {0, 0, 1, 4, 2, 2, nullptr, table.data(), MHA_ERROR_NULL_POINTER, 1,
       "embedding is NULL; pass an array of num_buckets * num_heads floats"},
      {0, 0, 1, 4, 2, 2, from, nullptr, MHA_ERROR_NULL_POINTER, 8,
       "relative_bias is NULL; pass an array of num_heads * (left + 1 + right) floats"},
  };
  for (const auto &c : cases) {
    mha_error error;
    const mha_status status = mha_t5_relative_bias(c.embedding, c.num_buckets, c.max_distance, c.is_bidirectional, c.num_heads, c.left,
                                                   c.right, c.to, &error);
    EXPECT_EQ(status, c.status) << c.sentence;
    EXPECT_STREQ(error.message, c.sentence);
    EXPECT_EQ(error.argument, c.argument);
  }
  EXPECT_EQ(table, std::vector<float>(100, 5.0f));
}

}  // namespace
