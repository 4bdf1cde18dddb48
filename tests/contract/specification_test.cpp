// Properties of the specification, tested on it once: how close it is to exact results, where a
// NaN goes, what is not read. The kernels have them because they equal it bit for bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "oracle/oracle.h"
#include "spec/spec.h"
#include "support/accuracy.h"
#include "support/choice.h"
#include "support/generated_options.h"
#include "support/norm.h"
#include "support/rounds.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

const float kInfinity = std::numeric_limits<float>::infinity();
const float kNaN = FromBits(0xffd23456u);

AttentionProblem Problem(int64_t n_q, int64_t n_kv, int64_t head_dim = 20) {
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

// ---- Accuracy

void ExpectWithinBound(const char *name, const std::vector<float> &actual,
                       const std::vector<double> &exact, const std::vector<double> &bound) {
  ASSERT_EQ(actual.size(), exact.size()) << name;
  for (size_t n = 0; n < exact.size(); n++)
    ASSERT_LE(BoundRatio(actual[n], exact[n], bound[n]), 1.0) << name << "[" << n << "]";
}

// The options of generated calls, except those whose errors the oracle does not bound and those
// that only change how a call is made.
const Space &BoundedOptions() {
  static const Space space = [] {
    std::vector<std::string> refusals = Refusals();
    for (const char *refusal : {"values=!normal",
                                "scale=given",
                                "bias_values=!finite",
                                "q_start=far|far_before",
                                "rope=!none",
                                "context_norm=!none",
                                "norm=!none entry=!attention",
                                "cache=!none",
                                "attention_arithmetic=!f32",
                                "weight_type=!f32",
                                "packed=yes",
                                "batch=!1",
                                "q_lengths=!no",
                                "q_first=!no",
                                "kv_lengths=ragged|empty",
                                "kv_start=yes",
                                "calls=!one",
                                "unread=!ordinary",
                                "head_scales=far",
                                "alibi_slopes=far"}) {
      refusals.push_back(refusal);
    }
    return SpaceWith(refusals);
  }();
  return space;
}

TEST(Accuracy, OfRandomOptionsIsWithinTheErrorBound) {
  for (int64_t n = 0; n < Rounds(1000) && !HasFailure(); n++) {
    const Choice choice = RandomChoice(BoundedOptions(), static_cast<uint64_t>(n));
    SCOPED_TRACE("case " + std::to_string(n) + " " + BoundedOptions().Describe(choice));
    const Case c = MakeCase(choice, static_cast<uint64_t>(n));
    const LayerProblem &whole = c.whole;
    const Outputs actual = Specify(c);
    const auto expect = [&](const oracle::Attention<double> &exact,
                            const oracle::AttentionBound &bound) {
      ExpectWithinBound("context", actual.context, exact.context, bound.context);
      ExpectWithinBound("lse", actual.lse, exact.lse, bound.lse);
      if (c.Is("chosen", "no"))  // there are no outputs per pair beside lists
        ExpectWithinBound("weights", actual.attention_weights, exact.weights, bound.weights);
    };
    WithScoreOptions(whole, 0, [&](const ScoreOptions *score) {
      LayerShape shape = LayerShapeOf(whole, 0);
      AttentionShape &attention = shape.attention;
      attention.score = score;
      if (c.is_layer()) {
        const float *const query = whole.query.data(), *const key = whole.key.data(),
                           *const value = whole.value.data();
        const LayerWeights weights = WeightsOf(whole);
        const auto exact = oracle::LayerForward<double>(shape, weights, query, key, value);
        const auto bound = oracle::BoundLayer(shape, weights, query, key, value, exact);
        expect(exact.attention, bound.attention);
        ExpectWithinBound("y", actual.y, exact.y, bound.y);
        return;
      }
      const std::optional<Norm> norm = NormOf(whole);
      attention.norm = norm ? &*norm : nullptr;
      const std::vector<double> q = Widen(whole.query), k = Widen(whole.key),
                                v = Widen(whole.value);
      const oracle::Prepared rows = oracle::PrepareRows(attention, q, k, v);
      std::vector<double> q_error, k_error, v_error;
      if (norm) {
        q_error =
            oracle::BoundNorm(oracle::NormOfQueries(*norm), whole.num_heads, whole.head_dim, q);
        k_error =
            oracle::BoundNorm(oracle::NormOfKeys(*norm), whole.num_kv_heads, whole.head_dim, k);
      }
      if (norm && norm->is_of_values)
        v_error =
            oracle::BoundNorm(oracle::NormOfValues(*norm), whole.num_kv_heads, whole.head_dim_v, v);
      const auto exact = oracle::AttentionForward<double>(attention, rows.q, rows.k, rows.v);
      expect(exact, oracle::BoundAttention(attention, rows.q, rows.k, rows.v, q_error, k_error,
                                           v_error, exact));
    });
  }
}

// A layer whose W_O is the unit matrix, so that y is what W_O takes. Its gate, if there is one, is
// 1/2 for each element.
LayerProblem LayerWithUnitOutput(bool has_gate) {
  LayerProblem problem;
  static_cast<AttentionSizes &>(problem) = Problem(30, 30);
  problem.query_dim = problem.key_dim = problem.value_dim = 40;
  problem.output_dim = 44;
  if (has_gate) problem.gate = GateKind::kSigmoid, problem.gate_dim = 11;
  problem = NormalLayer(problem, 3, kNoBiases);
  problem.w_o.assign(44 * 44, 0.0f);
  for (size_t n = 0; n < 44; n++) problem.w_o[n * 44 + n] = 1;
  problem.w_g.assign(problem.w_g.size(), 0.0f);
  return problem;
}

TEST(Accuracy, OfANormOfTheContextIsWithinTheErrorBound) {
  for (int which = 0; which < 16; which++) {
    LayerProblem problem = LayerWithUnitOutput(false);
    Random random(static_cast<uint64_t>(which));
    ContextNormArrays &norm = problem.context_norm.emplace();
    norm.is_layer = which & 1;
    norm.is_of_all_heads = which & 2;
    norm.epsilon = random.Pick<float>({1e-6f, 0.25f, 0x1p-149f});
    norm.head_stride = norm.is_of_all_heads ? 11 : which & 4 ? 14 : 0;
    if (which & 8) norm.weight = NormWeights(&random, 1, 4, 11, norm.head_stride);
    if (norm.is_layer && (which & 4)) norm.bias = NormWeights(&random, 0, 4, 11, norm.head_stride);
    const Outputs outputs = Specify(problem);
    const std::vector<double> context = Widen(outputs.context);
    const ContextNorm given = *ContextNormOf(problem);
    SCOPED_TRACE(Describe(problem));
    ExpectWithinBound("y", outputs.y, oracle::Normalized(given, 4, 11, context),
                      oracle::BoundNorm(given, 4, 11, context));
  }
}

// Halves of elements are halved after the norm, and before it have the same directions.
TEST(ContextNorm, ComesBeforeTheGateOrAfterIt) {
  LayerProblem problem = LayerWithUnitOutput(false), gated = LayerWithUnitOutput(true);
  problem.context_norm.emplace().epsilon = 0x1p-100f;
  gated.w_q = problem.w_q, gated.w_k = problem.w_k, gated.w_v = problem.w_v;
  gated.query = problem.query;
  gated.context_norm = problem.context_norm;
  std::vector<float> expected = Specify(problem).y;
  gated.context_norm->is_after_gate = true;
  EXPECT_TRUE(SameBits(Specify(gated).y, expected)) << "after";
  for (float &x : expected) x *= 0.5f;
  gated.context_norm->is_after_gate = false;
  EXPECT_TRUE(SameBits(Specify(gated).y, expected)) << "before";
}

// ---- Where a NaN goes, and what is not read

// AttentionAccuracy.NaNExactlyWhereTheExactResultHasIt has this without a norm.
TEST(NotANumber, InANormalisedRowReachesTheRowsThatAttendToItAlone) {
  for (const float value : {kNaN, kInfinity, -kInfinity}) {
    for (int which = 0; which < 4; which++) {
      AttentionProblem problem = Problem(30, 30);
      NormArrays &norm = problem.norm.emplace();
      norm.is_layer = which & 1;
      norm.is_of_all_heads = which & 2;
      norm.head_stride = norm.is_of_all_heads ? 20 : 0;
      const std::vector<float> clean = Specify(problem).y;
      AttentionProblem of_key = problem, of_query = problem;
      of_key.k[17 * 2 * 20 + 3] = value;    // row 17, kv head 0
      of_query.q[17 * 4 * 20 + 3] = value;  // row 17, head 0
      const std::vector<float> by_key = Specify(of_key).y, by_query = Specify(of_query).y;
      for (int64_t i = 0; i < 30; i++) {
        for (int64_t h = 0; h < 4; h++) {
          SCOPED_TRACE("row " + std::to_string(i) + " head " + std::to_string(h));
          const size_t at = static_cast<size_t>((i * 4 + h) * 11);
          // An infinity in an RMS norm makes the other heads zeros, which change the result.
          const bool is_reached = h < 2 || norm.is_of_all_heads,
                     is_nan =
                         h < 2 || (norm.is_of_all_heads && (norm.is_layer || std::isnan(value)));
          if (i < 17 || !is_reached) {
            EXPECT_EQ(by_key[at], clean[at]);
          } else if (is_nan) {
            EXPECT_TRUE(std::isnan(by_key[at]));
          }
          if (i != 17 || (h != 0 && !norm.is_of_all_heads)) {
            EXPECT_EQ(by_query[at], clean[at]);
          } else if (h == 0) {
            EXPECT_TRUE(std::isnan(by_query[at]));
          }
        }
      }
    }
  }
}

// Queries that are positive, so that a key of -infinity has a score of -infinity.
AttentionProblem PositiveQueries(int64_t n_kv) {
  AttentionProblem problem = Problem(9, n_kv, 6);
  problem.is_causal = false;
  for (float &value : problem.q) value = std::fabs(value) + 2;
  return problem;
}

void SetKeys(AttentionProblem *problem, int64_t first, int64_t end, float key, float value) {
  std::fill(problem->k.begin() + first * 12, problem->k.begin() + end * 12, key);
  std::fill(problem->v.begin() + first * 22, problem->v.begin() + end * 22, value);
}

TEST(Unread, IsAKeyWhoseScoreIsMinusInfinity) {
  for (const int64_t first : {0, 1, 255, 256, 599}) {
    for (const int64_t end : {first + 1, int64_t{600}}) {
      AttentionProblem finite = PositiveQueries(600), spoiled = finite;
      SetKeys(&finite, first, end, -kInfinity, 1);
      SetKeys(&spoiled, first, end, -kInfinity, kNaN);
      const Outputs outputs = Specify(spoiled);
      EXPECT_TRUE(SameBits(outputs, Specify(finite))) << first << " to " << end;
      EXPECT_EQ(std::isnan(outputs.y[0]), false) << first << " to " << end;
      EXPECT_EQ(outputs.attention_weights[first], 0);
      if (first == 0 && end == 600) {
        EXPECT_EQ(outputs.lse[0], -kInfinity) << "a row without keys";
      }
    }
  }
}

TEST(Unread, IsAKeyWhoseBiasIsMinusInfinityAsOneThatAMaskExcludes) {
  for (uint64_t seed = 0; seed < 20; seed++) {
    Random random(seed);
    AttentionProblem masked = Problem(9, 300, 6);
    ScoreArrays &score = masked.score.emplace();
    score.mask.by_row = false;
    for (int64_t j = 0; j < 300; j++) score.mask.values.push_back(random.Coin());
    for (int64_t j = 0; j < 300; j++) {
      const float poison = random.Pick({kNaN, kInfinity, -kInfinity});
      if (score.mask.values[j] == 0) SetKeys(&masked, j, j + 1, poison, poison);
    }
    AttentionProblem biased = masked;
    for (const uint8_t attends : score.mask.values)
      biased.score->bias.values.push_back(attends ? 0.0f : -kInfinity);
    biased.score->bias.by_row = false;
    biased.score->mask = {};
    Outputs outputs = Specify(biased);
    outputs.scores.clear(), outputs.scaled_scores.clear(), outputs.softcapped_scores.clear();
    EXPECT_TRUE(SameBits(outputs, Specify(masked))) << seed;
    EXPECT_EQ(std::isnan(outputs.y[0]), false) << seed;
  }
}

// A weight that has vanished still belongs to a key that takes part.
TEST(NotANumber, IsNotHiddenByAWeightThatHasVanished) {
  AttentionProblem problem = Problem(4, 4, 6);
  std::fill(problem.q.begin(), problem.q.end(), 10.0f);
  SetKeys(&problem, 0, 4, 10, 1);
  SetKeys(&problem, 1, 2, -10, kNaN);
  const Outputs outputs = Specify(problem);
  EXPECT_EQ(outputs.attention_weights[3 * 4 + 1], 0);
  for (size_t n = 0; n < outputs.y.size(); n++) EXPECT_EQ(std::isnan(outputs.y[n]), n >= 44) << n;
}

// ---- Values that are the first elements of their keys

TEST(ValuesInKeys, GiveTheBitsOfValuesThatAreStoredBesideThem) {
  for (const Storage type : {Storage::kF32, Storage::kF16, Storage::kBf16}) {
    AttentionProblem beside = Problem(9, 300);
    beside.k_type = beside.v_type = type;
    for (int64_t row = 0; row < 2 * 300; row++)
      std::copy_n(beside.k.begin() + row * 20, 11, beside.v.begin() + row * 11);
    AttentionProblem within = beside;
    within.values_in_keys = true;
    EXPECT_TRUE(SameBits(Specify(within), Specify(beside))) << NameOf(type);
  }
}

// ---- Chosen keys

TEST(ChosenKeys, GiveTheBitsOfACallOverTheGatheredKeys) {
  for (const int64_t count : {1, 17, 300, 700}) {
    AttentionProblem problem = Problem(1, 1100), gathered = problem;
    Random random(static_cast<uint64_t>(count));
    std::vector<int32_t> &list = problem.score.emplace().chosen.values;
    problem.score->chosen.columns = count;
    for (int32_t j = 0; j < 1100; j++) list.push_back(j);
    for (size_t j = list.size(); j > 1; j--)
      std::swap(list[j - 1], list[random.Below(static_cast<int64_t>(j))]);
    list.resize(count);
    std::vector<int32_t> ascending = list;
    std::sort(ascending.begin(), ascending.end());
    gathered.n_kv = count;
    gathered.k.clear(), gathered.v.clear();
    for (const int32_t j : ascending) {
      gathered.k.insert(gathered.k.end(), &problem.k[j * 40], &problem.k[j * 40] + 40);
      gathered.v.insert(gathered.v.end(), &problem.v[j * 22], &problem.v[j * 22] + 22);
    }
    EXPECT_TRUE(SameBits(Specify(problem).y, Specify(gathered).y)) << count;
  }
}

ChoiceProblem ProblemOfChoice(int64_t n_q, int64_t n_kv, int64_t num_heads, int64_t head_dim,
                              int64_t num_chosen) {
  ChoiceProblem problem;
  problem.n_q = n_q;
  problem.n_kv = n_kv;
  problem.num_heads = num_heads;
  problem.head_dim = head_dim;
  problem.num_chosen = num_chosen;
  Random random(1);
  FillNormal(&random, &problem);
  problem.weights = random.Normals(n_q * num_heads);
  return problem;
}

// By double precision, with the error that a sum of these products can have.
TEST(ChoiceOfKeys, TakesTheGreatestScores) {
  ChoiceProblem problem = ProblemOfChoice(3, 700, 64, 128, 60);
  problem.is_causal = true;
  const Outputs outputs = Specify(problem);
  const std::vector<int32_t> chosen = ChosenOf(outputs);
  for (int64_t i = 0; i < problem.n_q; i++) {
    const int64_t n = problem.n_kv - problem.n_q + i + 1;  // keys that it may choose
    std::vector<double> exact(n), bound(exact.size());
    for (int64_t j = 0; j < n; j++) {
      for (int64_t h = 0; h < problem.num_heads; h++) {
        const int64_t head = i * problem.num_heads + h;
        double product = 0, magnitude = 0;
        for (int64_t d = 0; d < problem.head_dim; d++) {
          const double term =
              double{problem.q[head * problem.head_dim + d]} * problem.k[j * problem.head_dim + d];
          product += term;
          magnitude += std::fabs(term);
        }
        const double scale = 1 / std::sqrt(static_cast<double>(problem.head_dim));
        exact[j] += problem.weights[head] * std::max(0.0, product * scale);
        bound[j] += std::fabs(problem.weights[head]) * magnitude * scale;
      }
      bound[j] *= 0x1p-24 * static_cast<double>(problem.head_dim + problem.num_heads + 4);
      EXPECT_NEAR(outputs.scores[i * problem.n_kv + j], exact[j], bound[j]) << i << " " << j;
    }
    const int32_t *const row = chosen.data() + i * problem.num_chosen;
    EXPECT_TRUE(std::is_sorted(row, row + problem.num_chosen));
    std::vector<bool> is_chosen(n);
    double least = std::numeric_limits<double>::infinity();
    for (int64_t c = 0; c < problem.num_chosen; c++) {
      ASSERT_TRUE(row[c] >= 0 && row[c] < n) << row[c];
      is_chosen[row[c]] = true;
      least = std::min(least, exact[row[c]] + bound[row[c]]);
    }
    for (int64_t j = 0; j < n; j++)
      EXPECT_TRUE(is_chosen[j] || exact[j] - bound[j] <= least) << i << " " << j;
  }
}

// Of keys with scores that are given: one head of one number, and the scale 1.
std::vector<int32_t> Chosen(const std::vector<float> &scores, int64_t num_chosen,
                            float weight = 1) {
  ChoiceProblem problem = ProblemOfChoice(1, static_cast<int64_t>(scores.size()), 1, 1, num_chosen);
  problem.scale = 1;
  problem.q = {1.0f};
  problem.k = scores;
  problem.weights = {weight};
  return ChosenOf(Specify(problem));
}

TEST(ChoiceOfKeys, AscendsAndEndsWithMinusOne) {
  EXPECT_EQ(Chosen({5, 1, 9, 3, 7}, 3), (std::vector<int32_t>{0, 2, 4}));
  EXPECT_EQ(Chosen({5, 1, 9}, 5), (std::vector<int32_t>{0, 1, 2, -1, -1}));
}

TEST(ChoiceOfKeys, TakesTheFirstOfEqualScores) {
  EXPECT_EQ(Chosen({1, 2, 2, 2, 3}, 3), (std::vector<int32_t>{1, 2, 4}));
  EXPECT_EQ(Chosen({0, -1, -0.0f, -5, 0}, 3), (std::vector<int32_t>{0, 1, 2}));  // all are 0
  std::vector<float> scores(1000, 0.75f);
  scores[5] = scores[999] = std::nextafter(0.75f, 1.0f);
  scores[6] = std::nextafter(0.75f, 0.0f);
  std::vector<int32_t> expected(77);
  std::iota(expected.begin(), expected.end(), 0);
  expected.erase(expected.begin() + 6);
  expected.push_back(999);
  EXPECT_EQ(Chosen(scores, 77), expected);
}

TEST(ChoiceOfKeys, TellsNeighboursApartAtEveryMagnitude) {
  for (const float x : {0x1p-149f, 0x1p-126f, 1.0f, 0x1.fffffep+127f}) {
    const float below = std::nextafter(x, 0.0f);
    EXPECT_EQ(Chosen({below, x, below, x}, 2), (std::vector<int32_t>{1, 3})) << x;
    EXPECT_EQ(Chosen({below, x, below, x}, 3), (std::vector<int32_t>{0, 1, 3})) << x;
  }
}

TEST(ChoiceOfKeys, RanksNaNAsNegativeInfinity) {
  EXPECT_EQ(Chosen({kNaN, 1, kInfinity, 0, kNaN}, 2), (std::vector<int32_t>{1, 2}));
  EXPECT_EQ(Chosen({kNaN, 1, kInfinity, 0, kNaN}, 4), (std::vector<int32_t>{0, 1, 2, 3}));
  EXPECT_EQ(Chosen({kInfinity, 1, kNaN, kInfinity}, 3, -1), (std::vector<int32_t>{0, 1, 2}));
}

}  // namespace
