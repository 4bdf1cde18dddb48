// Position groups (q_groups and kv_groups of mha_score_options) and num_columns: who attends to whom is what the specification says in
// every kind of call, and what is left out reaches nothing. The number of random cases is multiplied by the environment variable
// MHA_TEST_ROUNDS.
#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
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

// Runs of numbers: counted up as documents are, or any, extreme ones among them.
std::vector<int64_t> RandomGroups(Random *random, int64_t count) {
  const int64_t longest = random->Pick<int64_t>({1, 3, 40, 300, 600});
  const bool ascend = random->Coin();
  std::vector<int64_t> groups;
  for (int64_t left = 0, group = random->Between(-2, 2); count > 0; count--) {
    if (left-- <= 0) {
      left = random->Between(0, longest);
      group = ascend ? group + 1 : random->Pick<int64_t>({-1, 0, 1, 2, 3, INT32_MAX, INT32_MIN, -1});
    }
    groups.push_back(group);
  }
  return groups;
}

std::vector<int64_t> NumbersOfLength(int64_t count, int64_t length) {
  std::vector<int64_t> groups;
  for (int64_t i = 0; i < count; i++) groups.push_back(i / length);
  return groups;
}

class GroupsTest : public AttentionTest {
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
    FillNormal(&random, &problem);
    problem.score = ScoreArrays();
    return problem;
  }

  // With 1 for each pair that groups and flags leave, of the rows [first, first + n_q): what a mask has to be for the same.
  static Pairs<uint8_t> MaskOf(const AttentionProblem &problem) {
    const Groups &groups = problem.score->groups;
    const std::vector<int64_t> &of_keys = groups.of_keys.empty() ? groups.of_queries : groups.of_keys;
    Pairs<uint8_t> mask;
    for (int64_t i = 0; i < problem.n_q; i++) {
      for (int64_t j = 0; j < problem.n_kv; j++) {
        const bool is_left = !problem.is_causal || j <= i + problem.n_kv - problem.n_q, is_same = groups.of_queries[i] == of_keys[j];
        mask.values.push_back(groups.add_keys ? is_left || (is_same && of_keys[j] >= 0) : is_left && is_same);
      }
    }
    return mask;
  }
};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(GroupsTest);

// ---- Bits

TEST_P(GroupsTest, RandomCasesEqualTheSpecification) {
  for (int64_t n = 0; n < Rounds(500) && !HasFailure(); n++) {
    Random random(9000 + static_cast<uint64_t>(n));
    AttentionProblem problem;
    problem.num_kv_heads = random.Between(1, 2);
    problem.num_heads = problem.num_kv_heads * random.Pick<int64_t>({1, 1, 2, 3});
    problem.batch = random.Between(1, 2);
    problem.n_q = random.Pick<int64_t>({1, 1, 2, 5, 7, 17, 40, 130});
    problem.n_kv = random.Coin() ? problem.n_q : random.Pick<int64_t>({0, 1, 15, 33, 255, 257, 300, 600, 1100});
    problem.head_dim = random.Pick<int64_t>({1, 8, 19});
    problem.head_dim_v = random.Pick<int64_t>({1, 8, 19});
    problem.is_causal = random.Chance(0.6) && problem.n_q <= problem.n_kv;
    if (random.Chance(0.3)) problem.scale = random.Pick<float>({-0.5f, 20.0f});
    if (random.Chance(0.3)) problem.window_left = random.Pick<int64_t>({0, 5, 256, 300});
    if (random.Chance(0.2)) problem.window_right = random.Pick<int64_t>({0, 3, 270});
    for (int64_t b = 0; b < problem.batch; b++) problem.q_start.push_back(random.Between(0, problem.n_kv + 20));
    if (random.Chance(0.3)) {
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
    problem.score = ScoreArrays();
    Groups &groups = problem.score->groups;
    groups.add_keys = random.Coin();
    groups.by_sequence = random.Coin();
    const int64_t sequences = groups.by_sequence ? problem.batch : 1;
    groups.of_queries = RandomGroups(&random, sequences * problem.n_q);
    if (problem.n_q != problem.n_kv || random.Coin()) groups.of_keys = RandomGroups(&random, sequences * problem.n_kv);
    if (problem.n_kv > 0 && random.Chance(0.2)) problem.score->num_columns = random.Between(1, problem.n_kv);
    if (problem.n_kv > 0 && random.Chance(0.3)) {
      Pairs<uint8_t> &mask = problem.score->mask;
      mask.by_head = random.Coin();
      mask.values.resize(static_cast<size_t>((mask.by_head ? problem.num_heads : 1) * problem.n_q * problem.n_kv));
      for (uint8_t &value : mask.values) value = random.Chance(0.7);
    }
    if (random.Chance(0.3)) problem.score->alibi_slopes = random.Normals(problem.num_heads, 0.1f);
    if (random.Chance(0.2)) problem.score->sinks = random.Normals(problem.num_heads);
    AttentionCall call = PlainCall();
    call.asked = random.Coin() ? kAskAllOfAttention : kAskLse;
    const Scheduler scheduler(static_cast<uint32_t>(random.Between(1, 4)), RunBackwards);
    if (random.Chance(0.4)) call.scheduler = scheduler.get();
    SCOPED_TRACE("case " + std::to_string(n) + " values " + NameOf(kind));
    EXPECT_TRUE(SameBits(Attend(problem, call), Specify(problem))) << Describe(problem);
  }
}

// So many rows that a unit has several groups, and so many keys that it begins within a subtree of chunks.
TEST_P(GroupsTest, OfManyDocumentsAndChunksEqualTheSpecification) {
  const struct {
    int64_t n, length;
    bool is_causal, add_keys;
  } cases[] = {{900, 37, false, false},
               {900, 40, true, true},
               {1100, 128, false, false},
               {1100, 400, true, true},
               {1100, 512, true, false}};
  for (const auto &a_case : cases) {
    AttentionProblem problem = Problem(1, a_case.n, a_case.n, 1);
    problem.num_heads = problem.num_kv_heads = 1;
    problem.head_dim = problem.head_dim_v = 2;
    Random random(1);
    FillNormal(&random, &problem);
    problem.is_causal = a_case.is_causal;
    problem.score->groups.add_keys = a_case.add_keys;
    problem.score->groups.of_queries = NumbersOfLength(a_case.n, a_case.length);
    EXPECT_TRUE(SameBits(Run(problem, kAskLse), Specify(problem))) << Describe(problem) << " documents of " << a_case.length;
  }
}

// Of a unit that goes from rows with keys in the first chunk to rows whose windows begin chunks later, and that have no keys there.
TEST_P(GroupsTest, WithWindowsBehindTheLastKeyEqualTheSpecification) {
  AttentionProblem problem = Problem(4, 768, 1000, 1);
  problem.num_heads = problem.num_kv_heads = 1;
  Random random(4);
  FillNormal(&random, &problem);
  problem.is_causal = true;
  problem.window_left = 200;
  problem.score->groups.of_queries.assign(768, 2);
  std::fill_n(problem.score->groups.of_queries.begin(), 10, 1);
  problem.score->groups.of_keys.assign(1000, 5);
  std::fill_n(problem.score->groups.of_keys.begin(), 200, 1);
  EXPECT_TRUE(SameBits(Run(problem, kAskLse), Specify(problem)));
}

// One row, which streams its keys, and several threads, which share them.
TEST_P(GroupsTest, OfARowBehindALongCacheEqualTheSpecification) {
  const int64_t n = 5000;
  for (const bool add_keys : {false, true}) {
    for (const uint32_t threads : {1u, 4u}) {
      AttentionProblem problem = Problem(7, 1, n, 1);
      problem.is_causal = true;
      problem.score->groups.add_keys = add_keys;
      problem.score->groups.of_queries = {3};
      problem.score->groups.of_keys = NumbersOfLength(n, 700);
      if (add_keys) problem.window_left = 300;  // the rest is what the group adds
      const Outputs expected = Specify(problem);
      Cache cache(CacheConfigOf(problem, {MHA_CACHE_CONTIGUOUS, 0}, 1, n));
      cache.Append(0, {problem.k, problem.v});
      AttentionProblem row = problem;
      row.n_kv = 0;
      row.score->groups.of_keys.clear();
      AttentionCall call = PlainCall();
      call.asked = kAskNothing;
      call.cache.cache = cache.get();
      call.cache.read = true;
      const Scheduler scheduler(threads, RunBackwards);
      call.scheduler = scheduler.get();
      AttentionData data(row, call), arrays(problem, PlainCall());
      data.score.kv_groups = arrays.score.kv_groups;
      EXPECT_TRUE(SameBits(data.Compute().y, expected.y)) << Describe(problem) << " " << threads << " threads";
    }
  }
}

// Call by call over a cache, and as one prompt. A block that is seen both ways comes in one call.
TEST_P(GroupsTest, OverACacheAreThoseOfTheWholePrompt) {
  for (const Storage type : {Storage::kF32, Storage::kInt8}) {
    for (const bool add_keys : {false, true}) {
      const int64_t n = 700;
      Random random(static_cast<uint64_t>(add_keys));
      AttentionProblem whole = Problem(11, n, n);
      whole.is_causal = true;
      whole.k_type = whole.v_type = type;
      std::vector<int64_t> cuts = {0};
      std::vector<int64_t> &groups = whole.score->groups.of_queries;
      whole.score->groups.add_keys = add_keys;
      while (cuts.back() < n) {
        const int64_t count = std::min(n - cuts.back(), random.Pick<int64_t>({1, 2, 30, 300}));
        const int64_t first = random.Between(0, count);
        for (int64_t i = 0; i < count; i++) groups.push_back(add_keys ? (i < first ? -1 : cuts.back()) : (cuts.back() + i) / 90);
        cuts.push_back(cuts.back() + count);
      }
      const Outputs expected = Specify(whole);
      Cache cache(CacheConfigOf(whole, {MHA_CACHE_PAGED, 64}, 1, n));
      SpreadBlocks(&random, &cache);
      AttentionData arrays(whole, PlainCall());
      for (size_t c = 0; c + 1 < cuts.size() && !HasFailure(); c++) {
        const int64_t done = cuts[c], count = cuts[c + 1] - done;
        AttentionProblem part = Slice(whole, 0, done, count, 0);
        part.n_kv = count;
        part.k = SliceRows(whole.k, 0, n, whole.num_kv_heads * whole.head_dim, done, count);
        part.v = SliceRows(whole.v, 0, n, whole.num_kv_heads * whole.head_dim_v, done, count);
        part.score.reset();
        AttentionCall call = PlainCall();
        call.asked = kAskNothing;
        call.cache.cache = cache.get();
        AttentionData data(part, call);
        mha_score_options score = arrays.score;
        score.q_groups += done;
        score.kv_groups = arrays.score.q_groups;
        data.args.score = &score;
        const int64_t width = whole.num_heads * whole.head_dim_v;
        EXPECT_TRUE(SameBits(data.Compute().y, SliceRows(expected.y, 0, n, width, done, count)))
            << NameOf(type) << " " << add_keys << " rows from " << done;
      }
    }
  }
}

// The keys of earlier calls have no number: all rows attend to them within groups, and what flags leave of them else. The numbers of new
// keys are those of the rows, unless others are given.
TEST_P(GroupsTest, OfNewKeysLeaveEarlierKeysToFlags) {
  for (const bool add_keys : {false, true}) {
    for (const int64_t past : {0, 5, 250, 700}) {
      const int64_t n = 40, all = past + n;
      Random random(static_cast<uint64_t>(past));
      AttentionProblem whole = Problem(static_cast<uint64_t>(past), n, all);
      whole.is_causal = true;
      whole.window_left = 300;
      Groups &groups = whole.score->groups;
      groups.add_keys = add_keys;
      groups.of_queries = RandomGroups(&random, n);
      groups.of_keys.assign(static_cast<size_t>(past), kNoGroup);
      groups.of_keys.insert(groups.of_keys.end(), groups.of_queries.begin(), groups.of_queries.end());
      const Outputs expected = Specify(whole);
      Cache cache(CacheConfigOf(whole, {MHA_CACHE_CONTIGUOUS, 0}, 1, all));
      cache.Append(0, {SliceRows(whole.k, 0, all, 2 * 6, 0, past), SliceRows(whole.v, 0, all, 2 * 5, 0, past)});
      AttentionProblem part = whole;
      part.n_kv = n;
      part.k = SliceRows(whole.k, 0, all, 2 * 6, past, n);
      part.v = SliceRows(whole.v, 0, all, 2 * 5, past, n);
      part.score->groups.of_keys.clear();
      AttentionCall call = PlainCall();
      call.asked = kAskNothing;
      call.cache.cache = cache.get();
      AttentionData data(part, call);
      data.score.columns = MHA_COLUMNS_NEW_KEYS;
      EXPECT_TRUE(SameBits(data.Compute().y, expected.y)) << Describe(whole) << " past " << past;
    }
  }
}

TEST_P(GroupsTest, OfALayerGiveTheBitsOfTheSpecification) {
  for (const int64_t n : {1, 3, 70, 300}) {
    for (const bool add_keys : {false, true}) {
      Random random(static_cast<uint64_t>(n));
      LayerProblem problem;
      problem.batch = 2;
      problem.n_q = problem.n_kv = n;
      problem.query_dim = problem.key_dim = problem.value_dim = problem.output_dim = 72;
      problem.num_heads = 6;
      problem.num_kv_heads = 3;
      problem.head_dim = problem.head_dim_v = 12;
      problem.is_causal = add_keys;
      FillNormal(&random, kAllBiases, true, &problem);
      problem.score = ScoreArrays();
      problem.score->groups.add_keys = add_keys;
      problem.score->groups.by_sequence = true;
      problem.score->groups.of_queries = RandomGroups(&random, 2 * n);
      ExpectTheSpecification(problem);
    }
  }
}

// ---- Accuracy

TEST_P(GroupsTest, AreAsExactAsFloatAllows) {
  for (uint64_t seed = 0; seed < 40 && !HasFailure(); seed++) {
    Random random(seed);
    AttentionProblem problem = Problem(seed, 19, random.Pick<int64_t>({19, 40, 300}));
    problem.is_causal = random.Coin();
    problem.score->groups.add_keys = problem.is_causal && random.Coin();
    problem.score->groups.of_queries = RandomGroups(&random, problem.n_q);
    problem.score->groups.of_keys = RandomGroups(&random, problem.n_kv);
    ExpectTheErrorBound(problem, Run(problem));
  }
}

// ---- What is left out

// A key that no row of the call attends to may hold anything, and a row that excludes a key does not change with it.
TEST_P(GroupsTest, KeysThatTheyExcludeAreUnread) {
  for (const bool add_keys : {false, true}) {
    for (const int64_t n : {7, 40, 300, 600}) {
      AttentionProblem problem = Problem(static_cast<uint64_t>(n), n, n);
      problem.is_causal = add_keys;
      problem.score->groups.add_keys = add_keys;
      problem.score->groups.of_queries = NumbersOfLength(n, n / 3 + 1);
      const Outputs clean = Run(problem);
      const int64_t bad = add_keys ? n - 1 : n / 2;  // a key of the last group, or of the one in the middle
      const int64_t group = problem.score->groups.of_queries[static_cast<size_t>(bad)], width = problem.num_heads * problem.head_dim_v;
      for (const float poison : {kNaN, kInfinity}) {
        AttentionProblem poisoned = problem;
        std::fill_n(poisoned.k.begin() + bad * 12, 12, poison);
        std::fill_n(poisoned.v.begin() + bad * 10, 10, poison);
        const Outputs outputs = Run(poisoned, kAskLse);
        for (int64_t i = 0; i < n; i++) {
          const bool attends = problem.score->groups.of_queries[static_cast<size_t>(i)] == group;
          const bool is_clean = std::equal(clean.y.begin() + i * width, clean.y.begin() + (i + 1) * width, outputs.y.begin() + i * width);
          EXPECT_EQ(is_clean, !attends) << n << " keys, row " << i << ", " << poison << (add_keys ? " also" : " within");
        }
      }
    }
  }
}

TEST_P(GroupsTest, ARowWhoseGroupHasNoKeyIsZero) {
  AttentionProblem problem = Problem(1, 9, 300);
  problem.score->sinks = {0, 1, 100, -100};
  problem.score->alibi_slopes = {1, 2, 3, 4};
  problem.score->groups.of_queries.assign(9, 5);
  problem.score->groups.of_keys.assign(300, 4);
  const Outputs outputs = Run(problem);
  EXPECT_TRUE(SameBits(outputs.y, std::vector<float>(outputs.y.size(), 0.0f)));
  EXPECT_TRUE(SameBits(outputs.attention_weights, std::vector<float>(outputs.attention_weights.size(), 0.0f)));
  EXPECT_TRUE(SameBits(outputs.lse, std::vector<float>(outputs.lse.size(), -kInfinity)));
}

// Nothing beside the arrays is read: each ends at an inaccessible page.
TEST_P(GroupsTest, ArraysAreReadWithinTheirBounds) {
  for (const int64_t n : {1, 5, 16, 17, 250, 300}) {
    for (const Place place : {Place::kBeforeGuard, Place::kAfterGuard}) {
      for (const bool add_keys : {false, true}) {
        Random random(static_cast<uint64_t>(n));
        AttentionProblem problem = Problem(static_cast<uint64_t>(n), n, n, 1);
        problem.is_causal = true;
        problem.score->groups.add_keys = add_keys;
        problem.score->groups.of_queries = RandomGroups(&random, n);
        problem.score->groups.of_keys = RandomGroups(&random, n);
        AttentionCall call = PlainCall();
        call.place = place;
        AttentionData data(problem, call);
        data.FreezeInputs();
        EXPECT_TRUE(SameBits(data.Compute(), Specify(problem))) << Describe(problem);
      }
    }
  }
}

// ---- num_columns

// A short mask, bias or array of numbers excludes the keys behind it, as a longer mask with zeros does. Nothing behind its end is read.
TEST_P(GroupsTest, KeysBeyondTheColumnsAreMasked) {
  for (const int64_t columns : {1, 16, 100, 256, 290}) {
    for (int kind = 0; kind < 3; kind++) {
      const int64_t n = 300;
      Random random(static_cast<uint64_t>(columns));
      AttentionProblem longer = Problem(static_cast<uint64_t>(columns), 20, n);
      AttentionProblem shorter = longer;
      longer.score->mask.by_row = false;
      longer.score->mask.values.assign(static_cast<size_t>(n), 0);
      std::fill_n(longer.score->mask.values.begin(), columns, uint8_t{1});
      const Outputs expected = Specify(longer);
      shorter.score->num_columns = columns;
      shorter.score->mask.by_row = shorter.score->bias.by_row = false;
      const auto count = static_cast<size_t>(columns);
      if (kind == 0) shorter.score->mask.values.assign(count, 1);
      if (kind == 1) shorter.score->bias.values.assign(count, 0.0f);
      if (kind == 2) shorter.score->groups = {false, false, std::vector<int64_t>(20, 1), std::vector<int64_t>(count, 1)};
      AttentionCall call = PlainCall();
      call.place = Place::kBeforeGuard;
      EXPECT_TRUE(SameBits(Attend(shorter, call), expected)) << columns << " columns, kind " << kind;
    }
  }
}

// Behind a cache, where a row stride of 0 does not tell how long the one row is.
TEST_P(GroupsTest, KeysBeyondTheColumnsOfACacheAreMasked) {
  const int64_t n = 300, columns = 270;
  AttentionProblem whole = Problem(3, 1, n);
  AttentionProblem row = whole;
  whole.score->mask.by_row = false;
  whole.score->mask.values.assign(static_cast<size_t>(n), 0);
  std::fill_n(whole.score->mask.values.begin(), columns, uint8_t{1});
  Cache cache(CacheConfigOf(whole, {MHA_CACHE_CONTIGUOUS, 0}, 1, n));
  cache.Append(0, {whole.k, whole.v});
  row.n_kv = 0;
  row.score->mask.by_row = false;
  row.score->mask.values.assign(static_cast<size_t>(columns), 1);
  row.score->num_columns = columns;
  AttentionCall call = PlainCall();
  call.asked = kAskNothing;
  call.place = Place::kBeforeGuard;
  call.cache.cache = cache.get();
  call.cache.read = true;
  EXPECT_TRUE(SameBits(Attend(row, call).y, Specify(whole).y));
}

// ---- Special cases that are known otherwise

TEST_P(GroupsTest, ThatAreOneGroupOrNoneChangeNoBit) {
  AttentionProblem problem = Problem(5, 300, 300);
  problem.is_causal = true;
  const Outputs plain = Run(problem);
  problem.score->groups.of_queries.assign(300, -7);
  EXPECT_TRUE(SameBits(Run(problem), plain)) << "within";
  problem.score->groups.add_keys = true;
  EXPECT_TRUE(SameBits(Run(problem), plain)) << "also: a negative number is no group";
}

TEST_P(GroupsTest, OfAPrefixSeeItBothWays) {
  AttentionProblem problem = Problem(6, 300, 300);
  problem.is_causal = true;
  problem.score->groups.add_keys = true;
  problem.score->groups.of_queries.assign(300, -1);
  std::fill_n(problem.score->groups.of_queries.begin(), 270, 0);
  const Outputs outputs = Run(problem, kAskLse);
  AttentionProblem masked = problem;
  masked.is_causal = false;
  masked.score = ScoreArrays();
  masked.score->mask = MaskOf(problem);
  EXPECT_TRUE(SameBits(outputs, Run(masked, kAskLse)));
  // All of the prefix is one block, where it is alone.
  AttentionProblem prefix = Slice(problem, 0, 0, 270, 270);
  prefix.is_causal = false;
  prefix.score.reset();
  EXPECT_TRUE(SameBits(SliceRows(outputs.y, 0, 300, 20, 0, 270), Run(prefix).y));
}

// Documents that begin with a chunk have the same chunks alone.
TEST_P(GroupsTest, DocumentsAtBordersOfChunksAreThoseAlone) {
  AttentionProblem problem = Problem(8, 768, 768);
  problem.is_causal = true;
  problem.score->groups.of_queries = NumbersOfLength(768, 256);
  const Outputs outputs = Run(problem, kAskNothing);
  for (int64_t d = 0; d < 3; d++) {
    AttentionProblem document = Slice(problem, 0, 256 * d, 256, 0);
    document.n_kv = 256;
    document.k = SliceRows(problem.k, 0, 768, 12, 256 * d, 256);
    document.v = SliceRows(problem.v, 0, 768, 10, 256 * d, 256);
    document.score.reset();
    EXPECT_TRUE(SameBits(SliceRows(outputs.y, 0, 768, 20, 256 * d, 256), Run(document, kAskNothing).y)) << "document " << d;
  }
}

}  // namespace
