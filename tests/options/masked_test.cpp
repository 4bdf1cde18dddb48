// Masked means unread: what a row does not attend to cannot be seen in it, whatever it is. And what
// a row with nothing to attend to is.
#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "support/attention_test.h"
#include "support/rounds.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

const float kInfinity = std::numeric_limits<float>::infinity();
const float kNaN = FromBits(0xffd23456u);  // not the canonical one, which alone may come out

bool AllNaN(const std::vector<float> &x) {
  for (const float value : x) {
    if (!std::isnan(value)) return false;
  }
  return !x.empty();
}

bool AllFinite(const std::vector<float> &x) {
  for (const float value : x) {
    if (!std::isfinite(value)) return false;
  }
  return true;
}

// Rows first .. first + count of sequence b, without the scores that are handed out masked or not.
Outputs Rows(const Outputs &outputs, const AttentionSizes &sizes, int64_t y_width, int64_t b,
             int64_t first, int64_t count) {
  Outputs rows = Slice(outputs, sizes, y_width, b, first, count, sizes.n_kv);
  rows.k.clear();
  rows.v.clear();
  rows.scores.clear();
  rows.scaled_scores.clear();
  rows.softcapped_scores.clear();
  return rows;
}

Outputs Rows(const Outputs &outputs, const AttentionProblem &problem, int64_t b, int64_t first,
             int64_t count) {
  return Rows(outputs, problem, problem.num_heads * problem.head_dim_v, b, first, count);
}

// Sets rows first .. end of x [n, width].
void FillRows(std::vector<float> *x, int64_t width, int64_t first, int64_t end, float value) {
  std::fill(x->begin() + first * width, x->begin() + end * width, value);
}

class Mask : public AttentionTest {
 protected:
  AttentionProblem CausalProblem(int64_t n_q, int64_t n_kv) const {
    Random random(static_cast<uint64_t>(1000 * n_q + n_kv));
    AttentionProblem problem;
    problem.n_q = n_q;
    problem.n_kv = n_kv;
    problem.num_heads = 2;
    problem.num_kv_heads = 1;
    problem.head_dim = 6;
    problem.head_dim_v = 5;
    problem.is_causal = true;
    FillNormal(&random, &problem);
    return problem;
  }

  // With everything behind position border made useless, the rows that see no further must not
  // change a bit.
  void ExpectRowsUpToBorderUnchanged(const AttentionProblem &problem, const Outputs &clean,
                                     int64_t border) const {
    const int64_t rows = std::min(border - problem.q_start[0] + 1, problem.n_q);
    if (rows <= 0) return;
    for (const float poison : {kNaN, kInfinity}) {
      AttentionProblem poisoned = problem;
      FillRows(&poisoned.k, problem.num_kv_heads * problem.head_dim, border + 1, problem.n_kv,
               poison);
      FillRows(&poisoned.v, problem.num_kv_heads * problem.head_dim_v, border + 1, problem.n_kv,
               poison);
      for (const uint32_t asked : {AttentionCall().asked, kAskWeights | kAskLse}) {
        EXPECT_TRUE(SameBits(Rows(Run(poisoned, asked), problem, 0, 0, rows),
                             Rows(clean, problem, 0, 0, rows)))
            << Describe(problem) << ", keys behind " << border << " are " << poison;
      }
    }
  }
};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(Mask);

// ---- Keys behind the causal border

// Of small squares, around a chunk, and of a few rows anywhere.
TEST_P(Mask, KeysBehindEveryBorderAreUnread) {
  struct Borders {
    int64_t n_q, n_kv, q_start, first, end;
  };
  std::vector<Borders> all;
  for (int64_t n = 1; n <= 40; n++) all.push_back({n, n, 0, 0, n});
  for (const int64_t n : {256, 257, 264, 520}) {
    const int64_t chunk = n / 256 * 256, n_q = n == 264 ? n : 48;
    all.push_back({n_q, n, n - n_q, chunk - 18, std::min(n, chunk + 10)});
  }
  for (const int64_t n_q : {1, 3, 9}) {
    for (const int64_t first : {0, 246}) {
      for (int64_t start = first; start < first + 42; start++)
        all.push_back({n_q, first + 50, start, start, start + n_q});
    }
  }
  Sample sample;
  for (const Borders &borders : all) {
    if (!sample.Takes()) continue;
    AttentionProblem problem = CausalProblem(borders.n_q, borders.n_kv);
    problem.q_start = {borders.q_start};
    const Outputs clean = Run(problem);
    for (int64_t border = borders.first; border < borders.end && !HasFailure(); border++) {
      ExpectRowsUpToBorderUnchanged(problem, clean, border);
    }
  }
}

TEST_P(Mask, LaterInputRowsOfALayerAreUnread) {
  Random random(1);
  LayerProblem problem;
  problem.n_q = problem.n_kv = 40;
  problem.query_dim = problem.key_dim = problem.value_dim = problem.output_dim = 13;
  problem.num_heads = 2;
  problem.num_kv_heads = 1;
  problem.head_dim = problem.head_dim_v = 5;
  problem.is_causal = true;
  FillNormal(&random, kAllBiases, true, &problem);
  const Layer layer = Make(problem);
  const Outputs clean = Forward(layer.get(), problem);
  for (int64_t border = 0; border + 1 < problem.n_q && !HasFailure(); border++) {
    LayerProblem poisoned = problem;
    FillRows(&poisoned.query, problem.query_dim, border + 1, problem.n_q, kNaN);
    const Outputs outputs = Forward(layer.get(), poisoned);
    EXPECT_TRUE(SameBits(Rows(outputs, problem, problem.y_width(), 0, 0, border + 1),
                         Rows(clean, problem, problem.y_width(), 0, 0, border + 1)))
        << "rows behind " << border << " are NaN";
    EXPECT_TRUE(AllNaN(
        Rows(outputs, problem, problem.y_width(), 0, border + 1, problem.n_q - border - 1).y));
  }
}

// ---- Where a NaN goes

// Two sequences, two kv heads with two query heads each.
AttentionProblem TwoSequences(int64_t n = 21) {
  Random random(2);
  AttentionProblem problem;
  problem.batch = 2;
  problem.n_q = problem.n_kv = n;
  problem.num_heads = 4;
  problem.num_kv_heads = 2;
  problem.head_dim = 7;
  problem.head_dim_v = 9;
  problem.is_causal = true;
  FillNormal(&random, &problem);
  return problem;
}

// Of the outputs of a problem whose input was spoiled, expects NaN in the elements (b, i, h, d) of
// y for which reached says so, and the bits of the clean outputs in all others; likewise in the lse
// (d = 0) if reaches_lse.
template <typename Reached>
void ExpectNaNOnlyWhere(const AttentionProblem &problem, const Outputs &actual,
                        const Outputs &clean, bool reaches_lse, Reached reached) {
  std::vector<float> y = clean.y, lse = clean.lse;
  const float canonical_nan = FromBits(0x7fc00000u);
  for (int64_t b = 0; b < problem.batch; b++) {
    for (int64_t i = 0; i < problem.n_q; i++) {
      for (int64_t h = 0; h < problem.num_heads; h++) {
        for (int64_t d = 0; d < problem.head_dim_v; d++) {
          if (reached(b, i, h, d))
            y[((b * problem.n_q + i) * problem.num_heads + h) * problem.head_dim_v + d] =
                canonical_nan;
        }
        if (reaches_lse && reached(b, i, h, 0))
          lse[(b * problem.num_heads + h) * problem.n_q + i] = canonical_nan;
      }
    }
  }
  EXPECT_TRUE(SameBits("y", actual.y, y));
  EXPECT_TRUE(SameBits("lse", actual.lse, lse));
}

TEST_P(Mask, NaNInAQueryReachesItsRowOnly) {
  const AttentionProblem problem = TwoSequences();
  const Outputs clean = Run(problem);
  for (int64_t row = 0; row < problem.n_q && !HasFailure(); row++) {
    AttentionProblem spoiled = problem;
    spoiled.q[((1 * problem.n_q + row) * problem.num_heads + 2) * problem.head_dim + 3] = kNaN;
    ExpectNaNOnlyWhere(
        problem, Run(spoiled), clean, true,
        [&](int64_t b, int64_t i, int64_t h, int64_t) { return b == 1 && i == row && h == 2; });
  }
}

TEST_P(Mask, NaNInAKeyReachesTheRowsThatAttendToItOnly) {
  for (const int64_t n : {21, 3}) {  // few rows read keys in a way of their own
    const AttentionProblem problem = TwoSequences(n);
    const Outputs clean = Run(problem);
    for (int64_t key = 0; key < n && !HasFailure(); key++) {
      AttentionProblem spoiled = problem;
      spoiled.k[((0 * n + key) * problem.num_kv_heads + 1) * problem.head_dim + 6] = kNaN;
      ExpectNaNOnlyWhere(problem, Run(spoiled), clean, true,
                         [&](int64_t b, int64_t i, int64_t h, int64_t) {
                           return b == 0 && i >= key && h / 2 == 1;
                         });
    }
  }
}

TEST_P(Mask, NaNInAValueReachesItsColumnInTheRowsThatAttendToItOnly) {
  const AttentionProblem problem = TwoSequences();
  const Outputs clean = Run(problem);
  for (int64_t key = 0; key < problem.n_kv && !HasFailure(); key++) {
    AttentionProblem spoiled = problem;
    spoiled.v[((1 * problem.n_kv + key) * problem.num_kv_heads + 0) * problem.head_dim_v + 8] =
        kNaN;
    const Outputs outputs = Run(spoiled);
    ExpectNaNOnlyWhere(problem, outputs, clean, false,
                       [&](int64_t b, int64_t i, int64_t h, int64_t d) {
                         return b == 1 && i >= key && h / 2 == 0 && d == 8;
                       });
    EXPECT_TRUE(SameBits("attention_weights", outputs.attention_weights, clean.attention_weights));
  }
}

// A weight that has vanished still belongs to a key that takes part.
TEST_P(Mask, VanishedWeightDoesNotHideANaN) {
  AttentionProblem problem = CausalProblem(4, 4);
  for (float &value : problem.q) value = 10;
  for (float &value : problem.k) value = 10;
  FillRows(&problem.k, problem.num_kv_heads * problem.head_dim, 1, 2, -10);
  FillRows(&problem.v, problem.num_kv_heads * problem.head_dim_v, 1, 2, kNaN);
  const Outputs outputs = Run(problem);
  EXPECT_EQ(outputs.attention_weights[3 * 4 + 1], 0);
  EXPECT_TRUE(AllFinite(Rows(outputs, problem, 0, 0, 1).y));
  EXPECT_TRUE(AllNaN(Rows(outputs, problem, 0, 1, 3).y));
}

// ---- Scores of infinity

// A problem whose queries are positive, so that a key of -infinity has a score of -infinity.
AttentionProblem PositiveQueries(int64_t n_kv) {
  Random random(3);
  AttentionProblem problem;
  problem.n_q = 11;
  problem.n_kv = n_kv;
  problem.num_heads = 2;
  problem.num_kv_heads = 1;
  problem.head_dim = 4;
  problem.head_dim_v = 6;
  FillNormal(&random, &problem);
  for (float &value : problem.q) value = std::fabs(value) + 2;
  return problem;
}

void SetKeys(AttentionProblem *problem, int64_t first, int64_t end, float key, float value) {
  FillRows(&problem->k, problem->num_kv_heads * problem->head_dim, first, end, key);
  FillRows(&problem->v, problem->num_kv_heads * problem->head_dim_v, first, end, value);
}

TEST_P(Mask, KeyWithScoreMinusInfinityIsUnread) {
  for (const int64_t n_kv : {23, 300, 600}) {
    const AttentionProblem problem = PositiveQueries(n_kv);
    for (const int64_t at : {0, 1, 7, 15, 16, 22, 255, 256, 299, 512, 599}) {
      if (at >= n_kv) continue;
      for (const float key :
           {-kInfinity, -std::numeric_limits<float>::max()}) {  // the latter overflows to it
        AttentionProblem finite = problem, spoiled = problem;
        SetKeys(&finite, at, at + 1, key, 1);
        SetKeys(&spoiled, at, at + 1, key, kNaN);
        const Outputs outputs = Run(spoiled);
        EXPECT_TRUE(SameBits(outputs, Run(finite))) << "key " << at << " of " << n_kv;
        EXPECT_TRUE(AllFinite(outputs.y)) << "key " << at << " of " << n_kv;
        EXPECT_EQ(outputs.masked_scores[static_cast<size_t>(at)], -kInfinity);
        EXPECT_EQ(outputs.attention_weights[static_cast<size_t>(at)], 0);
      }
    }
  }
}

// Behind the others, they might as well not be there.
TEST_P(Mask, LastKeysWithScoreMinusInfinityAreAsGoodAsNone) {
  for (const int64_t n_kv : {23, 256, 300}) {
    for (const int64_t more : {1, 5, 300}) {
      AttentionProblem problem = PositiveQueries(n_kv + more);
      SetKeys(&problem, n_kv, n_kv + more, -kInfinity, kNaN);
      const Outputs actual = Run(problem, kAskLse),
                    expected = Run(Slice(problem, 0, 0, problem.n_q, n_kv), kAskLse);
      EXPECT_TRUE(SameBits(actual, expected)) << n_kv << " + " << more;
    }
  }
}

TEST_P(Mask, WholeChunksWithScoreMinusInfinityAreUnread) {
  for (const int64_t first : {0, 256, 512}) {
    AttentionProblem finite = PositiveQueries(900), spoiled = finite;
    SetKeys(&finite, first, first + 256, -kInfinity, 1);
    SetKeys(&spoiled, first, first + 256, -kInfinity, kNaN);
    const Outputs outputs = Run(spoiled);
    EXPECT_TRUE(SameBits(outputs, Run(finite))) << "chunk at " << first;
    EXPECT_TRUE(AllFinite(outputs.y)) << "chunk at " << first;
  }
}

TEST_P(Mask, ScoreOfPlusInfinityGivesARowOfNaN) {
  for (const int64_t n_kv : {23, 600}) {
    for (const int64_t at : {0, 22, 255, 256, 599}) {
      if (at >= n_kv) continue;
      AttentionProblem problem = PositiveQueries(n_kv);
      SetKeys(&problem, at, at + 1, kInfinity, 1);
      const Outputs outputs = Run(problem);
      EXPECT_TRUE(AllNaN(outputs.y)) << "key " << at << " of " << n_kv;
      EXPECT_TRUE(AllNaN(outputs.lse)) << "key " << at << " of " << n_kv;
    }
  }
}

// ---- Nothing to attend to

void ExpectEmptyRows(const AttentionProblem &problem, const Outputs &outputs) {
  EXPECT_TRUE(SameBits("y", outputs.y, std::vector<float>(outputs.y.size(), 0.0f)))
      << Describe(problem);
  EXPECT_TRUE(
      SameBits("context", outputs.context, std::vector<float>(outputs.context.size(), 0.0f)))
      << Describe(problem);
  EXPECT_TRUE(SameBits("lse", outputs.lse, std::vector<float>(outputs.lse.size(), -kInfinity)))
      << Describe(problem);
  EXPECT_TRUE(SameBits("attention_weights", outputs.attention_weights,
                       std::vector<float>(outputs.attention_weights.size(), 0.0f)))
      << Describe(problem);
}

TEST_P(Mask, FullyMaskedRowIsExactlyZero) {
  for (const int64_t n_kv : {1, 17, 256, 257, 600}) {
    AttentionProblem problem = PositiveQueries(n_kv);
    SetKeys(&problem, 0, n_kv, -kInfinity, kNaN);
    ExpectEmptyRows(problem, Run(problem));
  }
}

// Row i sees keys 0 .. i, of which the first five have no score: so rows 0 to 4 are empty among
// others that are not.
TEST_P(Mask, FullyMaskedRowsAmongOthersAreExactlyZero) {
  AttentionProblem problem = PositiveQueries(30);
  problem.is_causal = true;
  problem.q_start = {0};
  SetKeys(&problem, 0, 5, -kInfinity, kNaN);
  const Outputs outputs = Run(problem);
  ExpectEmptyRows(problem, Rows(outputs, problem, 0, 0, 5));
  EXPECT_TRUE(AllFinite(Rows(outputs, problem, 0, 5, problem.n_q - 5).y));
  EXPECT_TRUE(AllFinite(Rows(outputs, problem, 0, 5, problem.n_q - 5).lse));
}

TEST_P(Mask, NoKeysGiveZeros) {
  for (const int64_t n_q : {1, 5, 70}) {
    AttentionProblem problem = PositiveQueries(0);
    problem.n_q = n_q;
    problem.batch = 2;
    Random random(4);
    FillNormal(&random, &problem);
    for (float &value : problem.q) value = kNaN;
    ExpectEmptyRows(problem, Run(problem));
    problem.is_causal = true;
    problem.q_start = {0, 7};
    ExpectEmptyRows(problem, Run(problem));
  }
}

TEST_P(Mask, NoKeysGiveTheBiasOfTheOutputProjection) {
  Random random(5);
  LayerProblem problem;
  problem.n_q = 9;
  problem.n_kv = 0;
  problem.query_dim = problem.key_dim = problem.value_dim = 6;
  problem.output_dim = 19;
  problem.num_heads = problem.num_kv_heads = 2;
  problem.head_dim = problem.head_dim_v = 3;
  problem.has_key = true;
  FillNormal(&random, kAllBiases, true, &problem);
  const Layer layer = Make(problem);
  const Outputs outputs = Forward(layer.get(), problem);
  std::vector<float> expected;
  for (int64_t i = 0; i < problem.n_q; i++)
    expected.insert(expected.end(), problem.b_o.begin(), problem.b_o.end());
  EXPECT_TRUE(SameBits("y", outputs.y, expected));
  EXPECT_TRUE(SameBits("context", outputs.context, std::vector<float>(9 * 6, 0.0f)));
  EXPECT_TRUE(SameBits("lse", outputs.lse, std::vector<float>(2 * 9, -kInfinity)));
}

}  // namespace
