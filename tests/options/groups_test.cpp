// Position groups (q_groups and kv_groups of mha_score_options) and num_columns, as far as the
// generated cases do not have them.
#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "support/accuracy.h"
#include "support/attention_test.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

// Runs of numbers: counted up as documents are, or any, extreme ones among them.
std::vector<int64_t> RandomGroups(Random *random, int64_t count) {
  const int64_t longest = random->Pick<int64_t>({1, 3, 40, 300, 600});
  const bool ascend = random->Coin();
  std::vector<int64_t> groups;
  for (int64_t left = 0, group = random->Between(-2, 2); count > 0; count--) {
    if (left-- <= 0) {
      left = random->Between(0, longest);
      group =
          ascend ? group + 1 : random->Pick<int64_t>({-1, 0, 1, 2, 3, INT32_MAX, INT32_MIN, -1});
    }
    groups.push_back(group);
  }
  return groups;
}

class GroupsTest : public AttentionTest {
 protected:
  static AttentionProblem Problem(uint64_t seed, int64_t n_q, int64_t n_kv) {
    Random random(seed);
    AttentionProblem problem;
    problem.n_q = n_q;
    problem.n_kv = n_kv;
    problem.num_heads = 4;
    problem.num_kv_heads = 2;
    problem.head_dim = 6;
    problem.head_dim_v = 5;
    FillNormal(&random, &problem);
    problem.score = ScoreArrays();
    return problem;
  }
};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(GroupsTest);

// The keys of earlier calls have no number: all rows attend to them within groups, and what flags
// leave of them else. The numbers of new keys are those of the rows, unless others are given.
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
      groups.of_keys.insert(groups.of_keys.end(), groups.of_queries.begin(),
                            groups.of_queries.end());
      const Outputs expected = Specify(whole);
      Cache cache(CacheConfigOf(whole, {MHA_CACHE_KIND_CONTIGUOUS, 0}, 1, all));
      cache.Append(0, {SliceRows(whole.k, 0, all, 2 * 6, 0, past),
                       SliceRows(whole.v, 0, all, 2 * 5, 0, past)});
      AttentionProblem part = whole;
      part.n_kv = n;
      part.k = SliceRows(whole.k, 0, all, 2 * 6, past, n);
      part.v = SliceRows(whole.v, 0, all, 2 * 5, past, n);
      part.score->groups.of_keys.clear();
      AttentionCall call = PlainCall();
      call.asked = kAskNothing;
      call.cache.cache = cache.get();
      AttentionData data(part, call);
      data.score_arrays.columns = MHA_COLUMNS_NEW_KEYS;
      EXPECT_TRUE(SameBits(data.Compute().y, expected.y)) << Describe(whole) << " past " << past;
    }
  }
}

// With a mask for the new keys that is shorter than these, the keys behind it are masked, and those
// of earlier calls are not.
TEST_P(GroupsTest, NewKeysBeyondTheColumnsAreMasked) {
  const int64_t n = 40, columns = 17;
  for (const int64_t past : {0, 5, 250, 700}) {
    const int64_t all = past + n;
    AttentionProblem whole = Problem(static_cast<uint64_t>(past), n, all);
    AttentionProblem part = whole;
    whole.score->mask.by_row = part.score->mask.by_row = false;
    whole.score->mask.values.assign(static_cast<size_t>(all), 1);
    std::fill(whole.score->mask.values.begin() + past + columns, whole.score->mask.values.end(),
              uint8_t{0});
    part.n_kv = n;
    part.k = SliceRows(whole.k, 0, all, 2 * 6, past, n);
    part.v = SliceRows(whole.v, 0, all, 2 * 5, past, n);
    part.score->mask.values.assign(static_cast<size_t>(columns), 1);
    part.score->num_columns = columns;
    Cache cache(CacheConfigOf(whole, {MHA_CACHE_KIND_CONTIGUOUS, 0}, 1, all));
    cache.Append(0, {SliceRows(whole.k, 0, all, 2 * 6, 0, past),
                     SliceRows(whole.v, 0, all, 2 * 5, 0, past)});
    AttentionCall call = PlainCall();
    call.asked = kAskNothing;
    call.cache.cache = cache.get();
    AttentionData data(part, call);
    data.score_arrays.columns = MHA_COLUMNS_NEW_KEYS;
    EXPECT_TRUE(SameBits(data.Compute().y, Specify(whole).y)) << past << " keys before";
  }
}

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

// A short mask, bias or array of numbers excludes the keys behind it, as a longer mask with zeros
// does. Nothing behind its end is read.
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
      if (kind == 2)
        shorter.score->groups = {false, std::vector<int64_t>(20, 1),
                                 std::vector<int64_t>(count, 1)};
      AttentionCall call = PlainCall();
      call.place = Place::kBeforeGuard;
      EXPECT_TRUE(SameBits(Attend(shorter, call), expected))
          << columns << " columns, kind " << kind;
    }
  }
}

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
  AttentionProblem prefix = Slice(problem, 0, 0, 270, 270);
  prefix.is_causal = false;
  prefix.score.reset();
  EXPECT_TRUE(SameBits(SliceRows(outputs.y, 0, 300, 20, 0, 270), Run(prefix).y));
}

}  // namespace
