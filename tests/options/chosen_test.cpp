// Chosen keys: what generated calls (contract/generated_test.cpp) do not show by comparing with the
// specification.

#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "support/attention_test.h"
#include "support/cache.h"
#include "support/packed_sequences.h"
#include "support/rope.h"
#include "support/schedulers.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

class ChosenKeys : public AttentionTest {
 protected:
  // `rows` queries at the end of n keys, each with a list of its own of `count` entries among those
  // of blocks of `block` keys.
  AttentionProblem Problem(int64_t rows, int64_t n, int64_t count, int64_t block = 1) {
    AttentionProblem problem;
    problem.n_q = rows;
    problem.n_kv = n;
    problem.num_heads = 6;
    problem.num_kv_heads = 2;
    problem.head_dim = 20;
    problem.head_dim_v = 16;
    FillNormal(&random_, &problem);
    problem.score = ScoreArrays();
    Pairs<int32_t> &lists = problem.score->chosen;
    problem.score->chosen_block = block;
    lists.by_head = true;
    lists.heads = 2;
    lists.columns = count;
    for (int64_t list = 0; list < 2 * rows; list++) {
      std::vector<int32_t> entries((n + block - 1) / block);
      for (size_t e = 0; e < entries.size(); e++) entries[e] = static_cast<int32_t>(e);
      for (size_t e = entries.size(); e > 1; e--)
        std::swap(entries[e - 1], entries[random_.Below(static_cast<int64_t>(e))]);
      lists.values.insert(lists.values.end(), entries.begin(), entries.begin() + count);
    }
    return problem;
  }

  Outputs Y(const AttentionProblem &problem, const mha_scheduler *scheduler = nullptr) const {
    AttentionCall call = PlainCall();
    call.asked = kAskLse;
    call.scheduler = scheduler;
    return Attend(problem, call);
  }

  // Query `row` of the problem with the keys of its list alone, in ascending order, and without a
  // list.
  AttentionProblem Gathered(const AttentionProblem &problem, int64_t row, int64_t kv_head) const {
    const Pairs<int32_t> &lists = problem.score->chosen;
    const auto begin = lists.values.begin() + (kv_head * problem.n_q + row) * lists.columns;
    std::vector<int32_t> positions(begin, begin + lists.columns);
    std::sort(positions.begin(), positions.end());
    AttentionProblem gathered = Slice(problem, 0, row, 1, problem.n_kv);
    gathered.score.reset();
    gathered.n_kv = lists.columns;
    gathered.k.clear();
    gathered.v.clear();
    for (const int32_t j : positions) {
      const auto k =
          SliceRows(problem.k, 0, problem.n_kv, problem.num_kv_heads * problem.head_dim, j, 1);
      const auto v =
          SliceRows(problem.v, 0, problem.n_kv, problem.num_kv_heads * problem.head_dim_v, j, 1);
      gathered.k.insert(gathered.k.end(), k.begin(), k.end());
      gathered.v.insert(gathered.v.end(), v.begin(), v.end());
    }
    return gathered;
  }

  Random random_{1};
};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(ChosenKeys);

TEST_P(ChosenKeys, GiveTheBitsOfACallOverTheGatheredKeys) {
  for (const int64_t count : {1, 17, 300, 700}) {
    const AttentionProblem problem = Problem(3, 1100, count);
    const Outputs chosen = Y(problem);
    for (int64_t row = 0; row < 3; row++) {
      for (int64_t kv_head = 0; kv_head < 2; kv_head++) {
        const Outputs gathered = Y(Gathered(problem, row, kv_head));
        const auto of_head = [&](const Outputs &outputs, int64_t at) {
          const auto begin = outputs.y.begin() + (at * 6 + kv_head * 3) * 16;
          return std::vector<float>(begin, begin + 3 * 16);
        };
        EXPECT_TRUE(SameBits("y", of_head(chosen, row), of_head(gathered, 0)))
            << count << " keys, row " << row;
      }
    }
  }
}

TEST_P(ChosenKeys, ThatAreAllKeysGiveTheBitsOfACallWithoutLists) {
  for (const int64_t block : {1, 7, 16, 64}) {
    AttentionProblem problem = Problem(5, 600, (600 + block - 1) / block, block);
    problem.is_causal = true;
    AttentionProblem dense = problem;
    dense.score.reset();
    EXPECT_TRUE(SameBits(Y(problem), Y(dense))) << block;
  }
}

TEST_P(ChosenKeys, DoNotDependOnTheOrderOfAListNorOnWhatComesTwice) {
  for (const int64_t block : {1, 5, 32}) {
    AttentionProblem problem = Problem(4, 700, 12, block), turned = problem;
    Pairs<int32_t> &lists = turned.score->chosen;
    lists.values.clear();
    lists.columns = 30;
    for (size_t list = 0; list < 8; list++) {
      const auto begin = problem.score->chosen.values.begin() + static_cast<int64_t>(list) * 12;
      std::vector<int32_t> entries(begin, begin + 12);
      entries.insert(entries.end(), begin, begin + 12);
      entries.resize(30, -1);
      std::reverse(entries.begin(), entries.end());
      lists.values.insert(lists.values.end(), entries.begin(), entries.end());
    }
    EXPECT_TRUE(SameBits(Y(turned), Y(problem))) << block;
  }
}

TEST_P(ChosenKeys, OfNoListAreUnread) {
  for (const int64_t block : {1, 16}) {
    AttentionProblem problem = Problem(3, 5000, 12, block);
    for (int32_t &entry : problem.score->chosen.values) entry %= static_cast<int32_t>(512 / block);
    AttentionCall call = PlainCall();
    call.asked = kAskLse;
    Memory k = CopyOf(problem.k, Place::kBeforeGuard), v = CopyOf(problem.v, Place::kBeforeGuard);
    k.ForbidFrom(512 * 2 * 20 * sizeof(float));
    v.ForbidFrom(512 * 2 * 16 * sizeof(float));
    AttentionData data(problem, call);
    data.args.k.data = k.data();
    data.args.v.data = v.data();
    EXPECT_TRUE(SameBits(data.Compute(), Y(problem))) << block;
  }
}

TEST_P(ChosenKeys, AreTheSameFromAnyCacheAndOnAnyThreads) {
  using Case = std::pair<Storage, int64_t>;
  for (const auto &[type, block] :
       {Case{Storage::kF32, 1}, {Storage::kInt8, 1}, {Storage::kF16, 16}, {Storage::kInt8, 64}}) {
    for (const bool in_keys : {false, true}) {
      AttentionProblem problem = Problem(2, 5000, 4000 / block, block);
      problem.k_type = problem.v_type = type;
      problem.values_in_keys = in_keys;
      problem.is_causal = true;
      const Outputs expected = Specify(problem);
      for (const CacheForm &form : kContiguousAndPaged) {
        Cache cache(CacheConfigOf(problem, form, 1, 5000));
        SpreadBlocks(&random_, &cache);
        cache.Append(0, {problem.k, problem.v});
        AttentionProblem queries = problem;
        queries.n_kv = 0;
        queries.k.clear();
        queries.v.clear();
        for (const uint32_t threads : {1u, 3u}) {
          const Scheduler scheduler(threads, RunBackwards);
          AttentionCall call = PlainCall();
          call.asked = kAskLse;
          call.scheduler = scheduler.get();
          call.cache.cache = cache.get();
          call.cache.read = true;
          const Outputs outputs = Attend(queries, call);
          EXPECT_TRUE(SameBits("y", outputs.y, expected.y))
              << Describe(form) << " " << Describe(problem) << " on " << threads;
          EXPECT_TRUE(SameBits("lse", outputs.lse, expected.lse))
              << Describe(form) << " " << Describe(problem) << " on " << threads;
        }
      }
    }
  }
}

// Keys are rotated by their positions where they are gathered and, with blocks that are chosen
// twice or more often, packed before.
TEST_P(ChosenKeys, OfPackedSequencesHaveTheBitsOfTheSpecification) {
  for (const int64_t block : {1, 16}) {
    AttentionProblem problem = Problem(8, 80, 2, block);
    problem.rope = MakeRope(false, 20, 80);
    for (int32_t &entry : problem.score->chosen.values)
      entry %= static_cast<int32_t>(32 / block);  // which every sequence has
    const PackedSequences sequences = {{0, 5, 8}, {0, 48, 80}, {}};
    AttentionCall call = PlainCall();
    call.asked = kAskLse;
    EXPECT_TRUE(SameBits("y", Attend(problem, sequences, call).y, Specify(problem, sequences).y))
        << block;
  }
}

// NaNs that would be other numbers in exp if their payload were not replaced.
TEST_P(ChosenKeys, MayBeNaNsOfAnyPayload) {
  for (const int64_t block : {1, 16}) {
    AttentionProblem problem = Problem(3, 96, 4, block);
    for (int64_t kv_head = 0; kv_head < 2; kv_head++) {
      // The first of row 0.
      const int64_t key = problem.score->chosen.values[kv_head * 3 * 4] * block;
      problem.k[(key * 2 + kv_head) * 20 + 7] = FromBits(0xffd23456u);
    }
    const Outputs outputs = Y(problem), expected = Specify(problem);
    EXPECT_TRUE(SameBits("y", outputs.y, expected.y)) << block;
    EXPECT_TRUE(SameBits("lse", outputs.lse, expected.lse)) << block;
  }
}

TEST_P(ChosenKeys, ThatAreNoneLeaveARowEmpty) {
  AttentionProblem problem = Problem(2, 40, 3);
  std::fill_n(problem.score->chosen.values.begin(), 3, -1);  // of the first row and kv head
  const Outputs outputs = Y(problem);
  EXPECT_EQ(outputs.lse[0], -std::numeric_limits<float>::infinity());
  EXPECT_EQ(std::count(outputs.y.begin(), outputs.y.begin() + 3 * 16, 0.0f), 3 * 16);
  EXPECT_TRUE(SameBits("y", outputs.y, Specify(problem).y));
}

TEST_P(ChosenKeys, ThatAreNotThereAreNamedBeforeAnythingIsWritten) {
  for (const auto &[block, entry, kv_head, keys, right] :
       {std::tuple{1, 40, 0, 40, "it must be less than 40, or -1 for unused"},
        {1, -2, 1, 40, "it must be less than 40, or -1 for unused"},
        {16, 3, 1, 40, "it must be less than 3, or -1 for unused"},
        {1, 0, 0, 0, "it must be -1, as the sequence has no keys"}}) {
    AttentionProblem problem = Problem(2, 40, 3, block);
    problem.kv_lengths.assign(problem.batch, keys);
    if (keys == 0)
      std::fill(problem.score->chosen.values.begin(), problem.score->chosen.values.end(), -1);
    problem.score->chosen.values[(kv_head * 2 + 1) * 3 + 1] = entry;  // of row 1
    AttentionCall call = PlainCall();
    call.asked = kAskLse;
    AttentionData data(problem, call);
    std::vector<unsigned char> workspace(data.WorkspaceBytes());
    data.PoisonOutputs();
    mha_error error = {};
    EXPECT_EQ(data.Run(workspace.data(), workspace.size(), &error), MHA_ERROR_INVALID_VALUE);
    EXPECT_EQ(std::string(error.message), "score_arrays.chosen_keys[0, " + std::to_string(kv_head) +
                                              ", 1, 1] (sequence, kv head, row, entry) is " +
                                              std::to_string(entry) + "; " + right);
    EXPECT_TRUE(data.OutputsAreUntouched());
  }
}

}  // namespace
