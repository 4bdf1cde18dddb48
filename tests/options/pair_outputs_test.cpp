// Outputs made of attention weights: those of chosen heads and rows, their mean over the heads and their sums over the queries. Each has
// the bits that its definition (CONTRACT.md, section 10) gives to the weights of the specification, in every kind of call; asking for it
// changes nothing else. The number of random cases is multiplied by the environment variable MHA_TEST_ROUNDS.
#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "support/attention_test.h"
#include "support/fixtures.h"
#include "support/instruction_sets.h"
#include "support/rounds.h"
#include "support/same_bits.h"
#include "support/schedulers.h"
#include "support/specify.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

// Empty lists: all heads, all rows.
struct Chosen {
  std::vector<int64_t> heads;
  std::vector<int64_t> rows;
};

struct WeightOutputs {
  std::vector<float> chosen;
  std::vector<float> means;
  std::vector<float> sums;
};

float Canonical(float x) { return x != x ? std::numeric_limits<float>::quiet_NaN() : x + 0.0f; }

// By definition, from weights [batch, num_heads, n_q, columns].
WeightOutputs FromWeights(const std::vector<float> &weights, const AttentionSizes &sizes, int64_t columns, Chosen chosen) {
  const auto or_all = [](std::vector<int64_t> *list, int64_t count) {
    if (!list->empty()) return;
    list->resize(static_cast<size_t>(count));
    std::iota(list->begin(), list->end(), 0);
  };
  or_all(&chosen.heads, sizes.num_heads);
  or_all(&chosen.rows, sizes.n_q);
  WeightOutputs outputs;
  const float factor = 1.0f / static_cast<float>(sizes.num_heads);
  for (int64_t b = 0; b < sizes.batch; b++) {
    const auto weight = [&](int64_t h, int64_t i, int64_t j) { return weights[((b * sizes.num_heads + h) * sizes.n_q + i) * columns + j]; };
    for (const int64_t h : chosen.heads) {
      for (const int64_t i : chosen.rows) {
        for (int64_t j = 0; j < columns; j++) outputs.chosen.push_back(weight(h, i, j));
      }
    }
    for (int64_t i = 0; i < sizes.n_q; i++) {
      for (int64_t j = 0; j < columns; j++) {
        float sum = 0;
        for (int64_t h = 0; h < sizes.num_heads; h++) sum = sum + weight(h, i, j);
        outputs.means.push_back(Canonical(sum * factor));
      }
    }
    for (int64_t h = 0; h < sizes.num_heads; h++) {
      for (int64_t j = 0; j < columns; j++) {
        float sum = 0;
        for (int64_t i = 0; i < sizes.n_q; i++) sum = sum + weight(h, i, j);
        outputs.sums.push_back(Canonical(sum));
      }
    }
  }
  return outputs;
}

enum Asked : uint32_t { kChosen = 1, kMeans = 2, kSums = 4 };

// Has a call write them too.
template <typename Data>
WeightOutputs Compute(Data *data, const AttentionSizes &sizes, int64_t columns, const Chosen &chosen, uint32_t asked, Outputs *others) {
  const int64_t heads = chosen.heads.empty() ? sizes.num_heads : static_cast<int64_t>(chosen.heads.size());
  const int64_t rows = chosen.rows.empty() ? sizes.n_q : static_cast<int64_t>(chosen.rows.size());
  WeightOutputs outputs;
  if (asked & kChosen) outputs.chosen.assign(static_cast<size_t>(sizes.batch * heads * rows * columns), Unwritten());
  if (asked & kMeans) outputs.means.assign(static_cast<size_t>(sizes.batch * sizes.n_q * columns), Unwritten());
  if (asked & kSums) outputs.sums.assign(static_cast<size_t>(sizes.batch * sizes.num_heads * columns), Unwritten());
  mha_taps &taps = data->taps;
  float nothing = 0;  // where there are no keys
  const auto at = [&](uint32_t bit, std::vector<float> *values) {
    return (asked & bit) == 0 ? nullptr : values->empty() ? &nothing : values->data();
  };
  taps.chosen_weights = at(kChosen, &outputs.chosen);
  taps.mean_weights = at(kMeans, &outputs.means);
  taps.key_sums = at(kSums, &outputs.sums);
  if (asked & kChosen) {
    taps.chosen_heads = chosen.heads.empty() ? nullptr : chosen.heads.data();
    taps.chosen_rows = chosen.rows.empty() ? nullptr : chosen.rows.data();
    taps.num_chosen_heads = static_cast<int64_t>(chosen.heads.size());
    taps.num_chosen_rows = static_cast<int64_t>(chosen.rows.size());
  }
  data->args.taps = &taps;
  *others = data->Compute();
  return outputs;
}

testing::AssertionResult SameWhereAsked(const WeightOutputs &actual, const WeightOutputs &expected, uint32_t asked) {
  if (asked & kChosen) {
    if (const auto same = SameBits("chosen_weights", actual.chosen, expected.chosen); !same) return same;
  }
  if (asked & kMeans) {
    if (const auto same = SameBits("mean_weights", actual.means, expected.means); !same) return same;
  }
  if (asked & kSums) return SameBits("key_sums", actual.sums, expected.sums);
  return testing::AssertionSuccess();
}

std::vector<int64_t> SomeOf(Random *random, int64_t count) {
  std::vector<int64_t> some;
  for (int64_t i = 0; i < count; i++) {
    if (random->Chance(0.4)) some.push_back(i);
  }
  return some;
}

class PairOutputs : public AttentionTest {};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(PairOutputs);

TEST_P(PairOutputs, RandomCasesEqualTheirDefinition) {
  for (int64_t n = 0; n < Rounds(250) && !HasFailure(); n++) {
    Random random(4200 + static_cast<uint64_t>(n));
    AttentionProblem problem;
    problem.num_kv_heads = random.Between(1, 3);
    problem.num_heads = problem.num_kv_heads * random.Pick<int64_t>({1, 2, 3});
    problem.batch = random.Between(1, 2);
    problem.n_q = random.Pick<int64_t>({1, 2, 5, 17, 40, 101});
    problem.n_kv = random.Coin() ? problem.n_q : random.Pick<int64_t>({0, 1, 16, 33, 257, 600});
    problem.head_dim = random.Pick<int64_t>({1, 8, 19});
    problem.head_dim_v = random.Pick<int64_t>({1, 8, 19});
    problem.is_causal = random.Coin() && problem.n_q <= problem.n_kv;
    if (random.Chance(0.4)) {
      for (int64_t b = 0; b < problem.batch; b++) {
        problem.q_lengths.push_back(random.Between(0, problem.n_q));
        problem.kv_lengths.push_back(random.Between(0, problem.n_kv));
        problem.q_start.push_back(random.Between(0, problem.n_kv));
      }
      problem.padding_left = random.Coin();
    } else if (problem.is_causal) {
      problem.q_start.assign(static_cast<size_t>(problem.batch), problem.n_kv - problem.n_q);
    }
    FillNormal(&random, &problem);
    if (random.Chance(0.2)) problem.q[0] = FromBits(0xffd23456u);
    if (random.Chance(0.3)) {
      if (!problem.score) problem.score = ScoreArrays();
      for (int64_t h = 0; h < problem.num_heads; h++) problem.score->head_scales.push_back(random.Coin() ? 0.0f : random.Normal());
    }
    Chosen chosen;
    if (random.Coin()) chosen.heads = SomeOf(&random, problem.num_heads);
    if (random.Coin()) chosen.rows = SomeOf(&random, problem.n_q);
    const uint32_t asked = static_cast<uint32_t>(random.Between(1, 7));
    AttentionCall call = PlainCall();
    call.asked = random.Coin() ? kAskAllOfAttention : kAskLse;
    const Scheduler scheduler(static_cast<uint32_t>(random.Between(1, 4)), RunBackwards);
    if (random.Coin()) call.scheduler = scheduler.get();
    SCOPED_TRACE("case " + std::to_string(n) + " asked " + std::to_string(asked));
    const Outputs specified = Specify(problem);
    Outputs others;
    AttentionData data(problem, call);
    const WeightOutputs actual = Compute(&data, problem, problem.n_kv, chosen, asked, &others);
    EXPECT_TRUE(SameBits(others, specified)) << Describe(problem);
    EXPECT_TRUE(SameWhereAsked(actual, FromWeights(specified.attention_weights, problem, problem.n_kv, chosen), asked))
        << Describe(problem);
  }
}

// Of a call over a cache, columns are positions, as those of attention_weights.
TEST_P(PairOutputs, OfTokensOverACacheAreThoseOfTheirRows) {
  AttentionProblem problem;
  problem.num_heads = 4;
  problem.num_kv_heads = 2;
  problem.n_q = problem.n_kv = 300;
  problem.head_dim = problem.head_dim_v = 8;
  problem.is_causal = true;
  Random random(9);
  FillNormal(&random, &problem);
  const Outputs whole = Specify(problem);
  Cache cache(CacheConfigOf(problem, {MHA_CACHE_PAGED, 64}, 1, problem.n_q));
  SpreadBlocks(&random, &cache);
  const Chosen chosen = {{1, 3}, {0}};
  for (int64_t done = 0, count; done < problem.n_q; done += count) {
    count = std::min<int64_t>(done == 0 ? 280 : 7, problem.n_q - done);
    AttentionProblem part = Slice(problem, 0, done, count, 0);
    part.n_kv = count;
    part.k = SliceRows(problem.k, 0, problem.n_kv, problem.num_kv_heads * problem.head_dim, done, count);
    part.v = SliceRows(problem.v, 0, problem.n_kv, problem.num_kv_heads * problem.head_dim_v, done, count);
    AttentionCall call = PlainCall();
    call.asked = kAskNothing;
    call.cache.cache = cache.get();
    AttentionData data(part, call);
    Outputs others;
    const WeightOutputs actual = Compute(&data, part, done + count, chosen, kChosen | kMeans | kSums, &others);
    const Outputs slice = Slice(whole, problem, problem.num_heads * problem.head_dim_v, 0, done, count, done + count);
    const WeightOutputs expected = FromWeights(slice.attention_weights, part, done + count, chosen);
    EXPECT_TRUE(SameWhereAsked(actual, expected, kChosen | kMeans | kSums)) << count << " rows from " << done;
  }
}

// The sums of a layer's call have one order on any number of threads.
TEST_P(PairOutputs, OfALayerAreTheSameOnAnyNumberOfThreads) {
  Random random(11);
  LayerProblem problem;
  problem.batch = 2;
  problem.n_q = problem.n_kv = 130;
  problem.query_dim = problem.key_dim = problem.value_dim = problem.output_dim = 20;
  problem.num_heads = problem.num_kv_heads = 3;
  problem.head_dim = problem.head_dim_v = 8;
  FillNormal(&random, kAllBiases, true, &problem);
  const Layer layer = Make(problem);
  const Chosen chosen = {{0}, {1, 129}};
  const WeightOutputs expected = FromWeights(Specify(problem).attention_weights, problem, problem.n_kv, chosen);
  for (const uint32_t threads : {1u, 3u}) {
    const Scheduler scheduler(threads, RunBackwards);
    LayerCall call;
    call.scheduler = scheduler.get();
    ForwardData data(layer.get(), problem, call);
    Outputs others;
    EXPECT_TRUE(SameWhereAsked(Compute(&data, problem, problem.n_kv, chosen, kChosen | kMeans | kSums, &others), expected,
                               kChosen | kMeans | kSums));
  }
}

}  // namespace
