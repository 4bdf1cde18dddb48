// Norms of queries, keys and values (mha_norm) have the bits of the specification in every kind of call, are as exact as float allows, and
// reach nothing beside their row. The number of random cases is multiplied by the environment variable MHA_TEST_ROUNDS.
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
#include "support/fixtures.h"
#include "support/instruction_sets.h"
#include "support/norm.h"
#include "support/replay.h"
#include "support/rope.h"
#include "support/rounds.h"
#include "support/same_bits.h"
#include "support/schedulers.h"
#include "support/specify.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

const float kInfinity = std::numeric_limits<float>::infinity();
const float kNaN = FromBits(0xffd23456u);

Outputs Collected(const Outputs &outputs) {
  Outputs collected;
  collected.y = outputs.y;
  collected.lse = outputs.lse;
  return collected;
}

class NormTest : public AttentionTest {
 protected:
  static AttentionProblem Problem(int64_t n_q, int64_t n_kv, int64_t head_dim = 20, int64_t group = 2) {
    AttentionSizes sizes;
    sizes.n_q = n_q;
    sizes.n_kv = n_kv;
    sizes.num_heads = 2 * group;
    sizes.num_kv_heads = 2;
    sizes.head_dim = head_dim;
    sizes.head_dim_v = 11;
    sizes.is_causal = true;
    return NormalAttention(sizes, static_cast<uint64_t>(1000 * n_q + n_kv + head_dim));
  }

  static LayerProblem SelfAttention(int64_t batch, int64_t n, bool is_small = false) {
    LayerProblem problem;
    problem.batch = batch;
    problem.n_q = problem.n_kv = n;
    problem.num_heads = is_small ? 2 : 6;
    problem.num_kv_heads = problem.num_heads / 2;
    problem.head_dim = is_small ? 8 : 14;
    problem.head_dim_v = is_small ? 8 : 10;
    problem.query_dim = problem.key_dim = problem.value_dim = problem.output_dim = is_small ? 16 : 60;
    problem.is_causal = true;
    return NormalLayer(problem, static_cast<uint64_t>(n));
  }

  // All that flags can say, with weights and without.
  template <typename Function>
  static void ForEachNorm(const AttentionSizes &sizes, const Function &function) {
    for (uint32_t flags = 0; flags < 16; flags++) {
      for (const bool has_weights : {true, false}) {
        Random random(flags);
        NormArrays norm;
        norm.is_layer = (flags & 1) != 0;
        norm.is_of_all_heads = (flags & 2) != 0;
        norm.is_after_rotation = (flags & 4) != 0;
        norm.is_of_values = (flags & 8) != 0;
        norm.head_stride = norm.is_of_all_heads ? sizes.head_dim : 0;
        FillNormWeights(&random, sizes, has_weights, has_weights, &norm);
        function(norm);
      }
    }
  }
};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(NormTest);

// ---- Bits

TEST_P(NormTest, OfEveryFormAndWidthGivesTheBitsOfTheSpecification) {
  for (const int64_t head_dim : {1, 2, 7, 8, 15, 16, 17, 30, 32, 50, 64, 128}) {
    AttentionProblem problem = Problem(5, 9, head_dim);
    if (head_dim > 1) problem.rope = MakeRope(head_dim % 4 == 0, head_dim / 2 * 2, 9);
    ForEachNorm(problem, [&](const NormArrays &norm) {
      problem.norm = norm;
      ExpectTheSpecification(problem);
    });
  }
}

TEST_P(NormTest, RandomCasesEqualTheSpecification) {
  for (int64_t n = 0; n < Rounds(400) && !HasFailure(); n++) {
    Random random(5000 + static_cast<uint64_t>(n));
    AttentionProblem problem;
    problem.num_kv_heads = random.Between(1, 3);
    problem.num_heads = problem.num_kv_heads * random.Pick<int64_t>({1, 1, 2, 3});
    problem.batch = random.Between(1, 3);
    problem.n_q = random.Pick<int64_t>({1, 1, 2, 5, 17, 70, 130});
    problem.n_kv = random.Coin() ? problem.n_q : random.Pick<int64_t>({0, 1, 15, 33, 257, 600, 1100});
    problem.head_dim = random.Pick<int64_t>({1, 8, 16, 19, 33, 48});
    problem.head_dim_v = random.Pick<int64_t>({1, 8, 19, 48, 200});
    problem.is_causal = random.Coin() && problem.n_q <= problem.n_kv;
    if (random.Chance(0.3)) problem.window_left = random.Pick<int64_t>({0, 5, 300});
    if (random.Chance(0.4)) {
      for (int64_t b = 0; b < problem.batch; b++) {
        problem.q_lengths.push_back(random.Between(0, problem.n_q));
        problem.kv_lengths.push_back(random.Between(0, problem.n_kv));
      }
      problem.padding_left = random.Coin();
    }
    for (int64_t b = 0; b < problem.batch; b++) problem.q_start.push_back(random.Between(0, problem.n_kv));
    if (problem.head_dim > 1 && random.Coin()) {
      problem.rope = MakeRope(random.Coin(), 2 * random.Between(1, problem.head_dim / 2), problem.n_q + problem.n_kv);
    }
    const Values kind = RandomKind(&random);
    problem.q = RandomValues(&random, kind, problem.batch * problem.n_q * problem.num_heads * problem.head_dim);
    problem.k = RandomValues(&random, kind, problem.batch * problem.n_kv * problem.num_kv_heads * problem.head_dim);
    problem.v = RandomValues(&random, kind, problem.batch * problem.n_kv * problem.num_kv_heads * problem.head_dim_v);
    problem.norm = RandomNorm(&random, problem);
    if (!problem.norm->q_weight.empty() && random.Chance(0.1)) problem.norm->q_weight[0] = SpecialValue(&random);
    AttentionCall call = PlainCall();
    call.asked = random.Coin() ? kAskAllOfAttention : kAskLse;
    const Scheduler scheduler(static_cast<uint32_t>(random.Between(1, 4)), RunBackwards);
    if (random.Chance(0.4)) call.scheduler = scheduler.get();
    SCOPED_TRACE("case " + std::to_string(n) + " values " + NameOf(kind));
    EXPECT_TRUE(SameBits(Attend(problem, call), Specify(problem))) << Describe(problem);
  }
}

TEST_P(NormTest, OverACacheOfAnyKindAndTypeGivesTheBitsOfTheWholePrompt) {
  for (const Storage type : kStorageTypes) {
    for (const CacheForm form : {CacheForm{MHA_CACHE_CONTIGUOUS, 0}, {MHA_CACHE_PAGED, 16}, {MHA_CACHE_RING, 96}}) {
      Random random(static_cast<uint64_t>(form.positions) + 7 * static_cast<uint64_t>(type));
      for (int64_t n = 0; n < Rounds(6) && !HasFailure(); n++) {
        AttentionProblem history = Problem(280, 280);
        history.batch = 2;
        history.k_type = type;
        history.v_type = random.Pick({type, Storage::kF32});
        if (form.kind == MHA_CACHE_RING) history.window_left = 40;
        FillNormal(&random, &history);
        if (random.Coin()) history.rope = MakeRope(random.Coin(), 14, 280);
        history.norm = RandomNorm(&random, history);
        Cache cache(CacheConfigOf(history, form, 3, 280));
        SpreadBlocks(&random, &cache);
        Replay replay(history, history.num_heads * history.head_dim_v, &cache, {2, 0});
        while (!replay.Finished()) {
          const Scheduler scheduler(static_cast<uint32_t>(random.Between(1, 3)), RunBackwards);
          AttentionCall call = PlainCall();
          if (random.Coin()) call.scheduler = scheduler.get();
          replay.Step(history, replay.RandomParts(&random, 280), call, random.Coin());
        }
        EXPECT_TRUE(SameBits(replay.outputs(), Collected(Specify(history)))) << Describe(form) << " " << Describe(history);
      }
    }
  }
}

TEST_P(NormTest, OfALayerOverACacheGivesTheBitsOfTheWholePrompt) {
  for (const CacheForm form : {CacheForm{MHA_CACHE_CONTIGUOUS, 0}, {MHA_CACHE_PAGED, 64}, {MHA_CACHE_RING, 80}}) {
    Random random(static_cast<uint64_t>(form.positions));
    for (int64_t n = 0; n < Rounds(6) && !HasFailure(); n++) {
      LayerProblem history = SelfAttention(2, 150, random.Chance(0.3));
      if (form.kind == MHA_CACHE_RING) history.window_left = 30;
      history.k_type = history.v_type = random.Pick({Storage::kF32, Storage::kF16, Storage::kInt8});
      history.rope = MakeRope(false, history.head_dim, 150);
      history.norm = RandomNorm(&random, history);
      const Layer layer = Make(history);
      Cache cache(CacheConfigOf(history, form, 2, 150));
      SpreadBlocks(&random, &cache);
      Replay replay(history, history.y_width(), &cache);
      while (!replay.Finished()) replay.Step(history, replay.RandomParts(&random, 150), layer.get(), LayerCall(), random.Coin());
      EXPECT_TRUE(SameBits(replay.outputs(), Collected(Specify(history)))) << Describe(form) << " " << Describe(history);
    }
  }
}

// The taps q, k and v, as projected, are compared too. A small layer would be computed whole, but not with a norm.
TEST_P(NormTest, OfALayerGivesTheBitsOfTheSpecification) {
  for (const int64_t n : {1, 3, 70}) {
    for (const bool is_small : {true, false}) {
      LayerProblem problem = SelfAttention(2, n, is_small);
      if (!is_small) problem.rope = MakeRope(true, problem.head_dim, n);
      const Layer layer = Make(problem);
      ForEachNorm(problem, [&](const NormArrays &norm) {
        problem.norm = norm;
        ExpectTheSpecification(layer.get(), problem);
      });
    }
  }
}

TEST_P(NormTest, OfALayerWithItsOwnKeysAndPaddingGivesTheBitsOfTheSpecification) {
  for (uint64_t seed = 0; seed < 20; seed++) {
    Random random(seed);
    LayerProblem problem = SelfAttention(3, 9);
    problem.has_key = true;
    problem.has_value = random.Coin();
    problem.n_kv = random.Pick<int64_t>({9, 300});
    problem.key_dim = 24;
    problem.value_dim = problem.has_value ? 5 : 24;
    problem.is_causal = false;
    if (random.Coin()) problem.q_lengths = {9, 0, 4};
    if (random.Coin()) problem.kv_lengths = {2, 0, problem.n_kv};
    problem.padding_left = random.Coin();
    FillNormal(&random, kAllBiases, random.Coin(), &problem);
    FillPadding(kNaN, &problem);
    problem.norm = RandomNorm(&random, problem);
    ExpectTheSpecification(problem);
  }
}

TEST_P(NormTest, OfALayerKeptInFewerBitsGivesTheBitsOfTheSpecification) {
  for (const Stored stored : {Stored::kF16, Stored::kBf16, Stored::kInt8, Stored::kInt4}) {
    Random random(static_cast<uint64_t>(stored));
    LayerProblem problem = SelfAttention(1, 20);
    problem.norm = RandomNorm(&random, problem);
    LayerForm form = PlainForm();
    form.weight_type = stored;
    const Layer layer = MakeLayer(problem, form);
    EXPECT_TRUE(SameBits(Forward(layer.get(), problem), Specify(Converted(problem, stored)))) << Describe(problem);
  }
}

void PlainSgemm(int, int, int, int m, int n, int k, float, const float *a, int lda, const float *b, int ldb, float, float *c, int ldc) {
  for (int i = 0; i < m; i++) {
    for (int j = 0; j < n; j++) {
      float sum = 0;
      for (int l = 0; l < k; l++) sum += a[int64_t{i} * lda + l] * b[int64_t{l} * ldb + j];
      c[int64_t{i} * ldc + j] = sum;
    }
  }
}

TEST_P(NormTest, OfALayerWithASgemmIsThatOfItsMiddleStage) {
  for (uint64_t seed = 0; seed < 10; seed++) {
    Random random(seed);
    LayerProblem problem = SelfAttention(2, 40);
    problem.w_o.clear();
    problem.b_o.clear();
    problem.norm = RandomNorm(&random, problem);
    const mha_layer_options options = Options(instruction_set(), PlainSgemm);
    const Layer layer = Create(LayerData(problem), &options);
    const Outputs outputs = Forward(layer.get(), problem);
    AttentionProblem middle;
    static_cast<AttentionSizes &>(middle) = problem;
    middle.q = outputs.q;
    middle.k = outputs.k;
    middle.v = outputs.v;
    EXPECT_TRUE(SameBits(outputs.y, Run(middle).y)) << Describe(problem);
  }
}

TEST_P(NormTest, AnySchedulerGivesTheSameBits) {
  for (const int64_t n_q : {1, 150}) {
    AttentionProblem problem = Problem(n_q, n_q == 1 ? 1300 : n_q);
    problem.rope = MakeRope(false, 20, 1300);
    ForEachNorm(problem, [&](const NormArrays &norm) {
      if (norm.q_weight.empty()) return;
      problem.norm = norm;
      const Outputs expected = Run(problem, kAskLse);
      for (const uint32_t num_threads : {2, 4}) {
        const Scheduler scheduler(num_threads, RunOnThreads);
        AttentionCall call = PlainCall();
        call.asked = kAskLse;
        call.scheduler = scheduler.get();
        EXPECT_TRUE(SameBits(Attend(problem, call), expected)) << num_threads << " threads " << Describe(problem);
      }
    });
  }
}

// ---- What is stored

// A cache holds keys and values as they are attended to: appended to another one, they are attended to without a norm of keys.
TEST_P(NormTest, KeysAndValuesAreStoredNormalised) {
  for (uint64_t seed = 0; seed < 8; seed++) {
    Random random(seed);
    AttentionProblem problem = Problem(30, 30);
    problem.norm = RandomNorm(&random, problem);
    problem.rope = MakeRope(false, 20, 30);
    Cache cache(CacheConfigOf(problem, {MHA_CACHE_CONTIGUOUS, 0}, 1, 30)), copy(cache.config());
    AttentionCall call = PlainCall();
    call.asked = kAskNothing;
    call.cache.cache = cache.get();
    const std::vector<float> expected = Attend(problem, call).y;
    const KeysAndValues stored = cache.Read(0, 0, 30);
    copy.Append(0, stored);
    call.cache.cache = copy.get();
    call.cache.read = true;
    EXPECT_TRUE(SameBits(Attend(problem, call).y, expected)) << Describe(problem);
  }
}

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

TEST_P(NormTest, PaddingAndKeysUnderTheMaskAreUnread) {
  for (uint64_t seed = 0; seed < 20; seed++) {
    Random random(seed);
    AttentionProblem problem = Problem(20, 40);
    problem.batch = 2;
    FillNormal(&random, &problem);
    problem.q_start = {5, 5};
    problem.q_lengths = {20, 7};
    problem.kv_lengths = {40, 30};
    problem.norm = RandomNorm(&random, problem);
    const Outputs expected = Run(problem, kAskLse);
    FillPadding(kNaN, &problem);
    for (int64_t n = 25 * 2 * 20; n < 40 * 2 * 20; n++) problem.k[static_cast<size_t>(n)] = kNaN;  // behind the last query of sequence 0
    for (int64_t n = 25 * 2 * 11; n < 40 * 2 * 11; n++) problem.v[static_cast<size_t>(n)] = kInfinity;
    EXPECT_TRUE(SameBits(Run(problem, kAskLse), expected)) << Describe(problem);
  }
}

// Each array ends at an inaccessible page.
TEST_P(NormTest, ArraysAreReadWithinTheirBounds) {
  for (uint64_t seed = 0; seed < 40; seed++) {
    for (const Place place : {Place::kBeforeGuard, Place::kAfterGuard}) {
      Random random(seed);
      AttentionProblem problem = Problem(random.Between(1, 20), random.Pick<int64_t>({20, 65}), random.Pick<int64_t>({1, 5, 16, 19, 32}));
      problem.norm = RandomNorm(&random, problem);
      AttentionCall call = PlainCall();
      call.place = place;
      if (random.Coin()) call.q = call.k = call.v = kHeadsOutside;
      AttentionData data(problem, call);
      data.FreezeInputs();
      EXPECT_TRUE(SameBits(data.Compute(), Specify(problem))) << Describe(problem);
    }
  }
}

// ---- Special cases that are known otherwise

TEST_P(NormTest, OnesZerosAndTheSameWeightsForEachHeadChangeNoBit) {
  AttentionProblem problem = Problem(9, 40);
  for (const bool is_layer : {false, true}) {
    problem.norm = NormArrays();
    problem.norm->is_layer = is_layer;
    const Outputs plain = Run(problem);
    problem.norm->q_weight.assign(20, 1.0f);
    problem.norm->k_weight.assign(20, 1.0f);
    if (is_layer) problem.norm->q_bias.assign(20, 0.0f);
    EXPECT_TRUE(SameBits(Run(problem), plain));

    Random random(1);
    FillNormWeights(&random, problem, true, true, &*problem.norm);
    const Outputs common = Run(problem);
    problem.norm->head_stride = 20;
    for (std::vector<float> *weights : {&problem.norm->q_weight, &problem.norm->k_weight, &problem.norm->q_bias, &problem.norm->k_bias}) {
      const std::vector<float> of_head = *weights;
      for (int64_t h = 1; h < 4 && !of_head.empty(); h++) weights->insert(weights->end(), of_head.begin(), of_head.end());
    }
    EXPECT_TRUE(SameBits(Run(problem), common));
  }
}

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
