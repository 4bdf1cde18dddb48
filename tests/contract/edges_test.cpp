// What generated calls do not reach, because it is too large or too rare: every kernel matches the
// specification there, too, and does not read what takes no part.
#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "support/attention_test.h"
#include "support/packed_sequences.h"
#include "support/rounds.h"
#include "support/schedulers.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

const float kInfinity = std::numeric_limits<float>::infinity();
const float kNaN = FromBits(0xffd23456u);  // not the canonical one, which alone may come out
constexpr int64_t kLargest = std::numeric_limits<int64_t>::max(), kFirst = -(int64_t{1} << 62);

class Edges : public AttentionTest {
 protected:
  static AttentionProblem Problem(int64_t n_q, int64_t n_kv, int64_t num_heads = 2,
                                  int64_t num_kv_heads = 1) {
    AttentionSizes sizes;
    sizes.n_q = n_q;
    sizes.n_kv = n_kv;
    sizes.num_heads = num_heads;
    sizes.num_kv_heads = num_kv_heads;
    sizes.head_dim = 6;
    sizes.head_dim_v = 5;
    return NormalAttention(sizes, static_cast<uint64_t>(1000 * n_q + n_kv));
  }
};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(Edges);

// ---- Keys that take no part

// Sets keys first .. end of a problem with one kv head.
void SetKeys(AttentionProblem *problem, int64_t first, int64_t end, float key, float value) {
  std::fill(problem->k.begin() + first * 6, problem->k.begin() + end * 6, key);
  std::fill(problem->v.begin() + first * 5, problem->v.begin() + end * 5, value);
}

// Everything after the border is made useless: the rows that see no further do not change a bit. Of
// small squares, around a chunk, and of a few rows anywhere.
TEST_P(Edges, KeysAfterEveryCausalBorderAreUnread) {
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
    AttentionProblem problem = Problem(borders.n_q, borders.n_kv);
    problem.is_causal = true;
    problem.q_start = {borders.q_start};
    const Outputs clean = Run(problem);
    for (int64_t border = borders.first; border < borders.end && !HasFailure(); border++) {
      const int64_t rows = std::min(border - borders.q_start + 1, problem.n_q);
      for (const float poison : {kNaN, kInfinity}) {
        AttentionProblem poisoned = problem;
        SetKeys(&poisoned, border + 1, problem.n_kv, poison, poison);
        for (const uint32_t asked : {kAskAllOfAttention, kAskWeights | kAskLse}) {
          const auto first_rows = [&](const Outputs &outputs) {
            Outputs first = Slice(outputs, problem, 10, 0, 0, rows, problem.n_kv);
            first.scores.clear(), first.scaled_scores.clear(), first.softcapped_scores.clear();
            return first;
          };
          EXPECT_TRUE(SameBits(first_rows(Run(poisoned, asked)), first_rows(clean)))
              << Describe(problem) << ", keys after " << border << " are " << poison;
        }
      }
    }
  }
}

// Scores of an infinity, with values that must not be read where it is negative.
TEST_P(Edges, ScoresOfInfinityEqualTheSpecification) {
  const struct {
    int64_t n_kv, first, end;
  } spoiled[] = {{23, 0, 1},      {23, 22, 23},    {300, 15, 16},   {300, 255, 256},
                 {300, 256, 257}, {600, 512, 513}, {600, 599, 600}, {900, 0, 256},
                 {900, 256, 512}, {900, 512, 768}, {23, 0, 23},     {600, 0, 600},
                 {300, 256, 300}, {257, 0, 5}};
  for (const auto &[n_kv, first, end] : spoiled) {
    for (const float key : {-kInfinity, -std::numeric_limits<float>::max(), kInfinity}) {
      for (const int64_t n_q : {2, 11}) {
        AttentionProblem problem = Problem(n_q, n_kv);
        for (float &value : problem.q) value = std::fabs(value) + 2;
        SetKeys(&problem, first, end, key, kNaN);
        ExpectTheSpecification(problem);
        EXPECT_TRUE(SameBits(Run(problem, kAskLse), Specify(problem))) << Describe(problem);
      }
    }
  }
}

// Keys of equal scores, whose weights are 1 before the division by their sum.
TEST_P(Edges, ValuesOverflowWhereTheirSumDoesAndNotBelow) {
  AttentionProblem problem = Problem(2, 4);
  std::fill(problem.q.begin(), problem.q.end(), 0.0f);
  for (const float value : {0x1p125f, 0x1p126f}) {
    std::fill(problem.v.begin(), problem.v.end(), value);
    ExpectTheSpecification(problem);
    EXPECT_EQ(Run(problem).y.front(), value == 0x1p125f ? value : kInfinity);
  }
}

// With NaN of a payload that would be another number in exp if it were not replaced.
TEST_P(Edges, NaNInEachOfAFewKeysEqualsTheSpecification) {
  for (const int64_t n : {3, 21}) {
    for (int64_t key = 0; key < n && !HasFailure(); key++) {
      AttentionProblem problem = Problem(n, n, 4, 2);
      problem.is_causal = true;
      problem.k[(key * 2 + 1) * 6 + 5] = kNaN;
      ExpectTheSpecification(problem);
    }
  }
}

// ---- Windows and positions

TEST_P(Edges, WindowsOverSeveralChunksEqualTheSpecification) {
  Sample sample;
  for (const int64_t left : {0, 1, 16, 100, 256, 400}) {
    if (!sample.Takes()) continue;
    AttentionProblem problem = Problem(1100, 1100);
    problem.is_causal = left % 2 == 0;
    problem.window_left = left;
    if (left == 400) problem.window_right = 3;
    EXPECT_TRUE(SameBits(Run(problem, kAskLse), Specify(problem))) << Describe(problem);
  }
}

// Positions may be anywhere in the range of their type, and are compared as if it had no ends.
TEST_P(Edges, BordersOfWindowsDoNotOverflow) {
  AttentionProblem problem = Problem(9, 300);
  for (const int64_t start :
       {kFirst, kFirst + 1, int64_t{-300}, int64_t{-9}, int64_t{-5}, int64_t{-1}, int64_t{0},
        int64_t{150}, int64_t{299}, int64_t{400}, kLargest - 300, kLargest - 8, kLargest}) {
    for (const int64_t left : {int64_t{0}, int64_t{200}, kLargest - 1, kLargest}) {
      for (const int64_t right :
           {int64_t{0}, int64_t{10}, kLargest / 2, kLargest / 2 + 150, kLargest}) {
        problem.q_start = {start};
        problem.window_left = left;
        problem.window_right = right;
        problem.is_causal = right == 10;
        ExpectTheSpecification(problem);
        if (HasFailure()) return;
      }
    }
  }
}

// The distance of a block's first key is rounded, and the others are counted from there.
TEST_P(Edges, AlibiOfDistancesThatAreNoFloatsEqualsTheSpecification) {
  AttentionProblem problem = Problem(3, 600, 4, 2);
  problem.is_causal = true;
  problem.q_start = {(int64_t{1} << 25) + 5};
  problem.score.emplace().alibi_slopes = {0x1p-24f, 0x1p-20f, 0x1p-22f, -0x1p-24f};
  ExpectTheSpecification(problem);
}

// ---- Columns of the new keys alone, for groups and for a mask that is shorter than they are

TEST_P(Edges, GroupsAndShortMasksOfNewKeysEqualTheSpecification) {
  enum What { kWithin, kAlso, kShortMask };
  constexpr int64_t n = 40, mask_columns = 17;
  for (const What what : {kWithin, kAlso, kShortMask}) {
    for (const int64_t past : {0, 5, 250, 700}) {
      Random random(static_cast<uint64_t>(past));
      AttentionProblem whole = Problem(n, past + n, 4, 2), part = whole;
      part.n_kv = n;
      part.k = SliceRows(whole.k, 0, past + n, 2 * 6, past, n);
      part.v = SliceRows(whole.v, 0, past + n, 2 * 5, past, n);
      ScoreArrays &of_whole = whole.score.emplace(), &of_part = part.score.emplace();
      if (what == kShortMask) {
        of_whole.mask.by_row = of_part.mask.by_row = false;
        of_whole.mask.values.assign(past + mask_columns, 1);
        of_whole.mask.values.resize(past + n);
        of_part.mask.values.assign(mask_columns, 1);
        of_part.num_columns = mask_columns;
      } else {  // all rows attend to the earlier keys within groups; else flags say which do
        whole.is_causal = part.is_causal = true;
        whole.window_left = part.window_left = 300;
        of_whole.segments.add_keys = of_part.segments.add_keys = what == kAlso;
        for (int64_t i = 0; i < n; i++)
          of_whole.segments.of_queries.push_back(i % 9 == 0 ? -1 : random.Between(0, 2));
        of_part.segments.of_queries = of_whole.segments.of_queries;
        of_whole.segments.of_keys.assign(past, kNoSegment);
        of_whole.segments.of_keys.insert(of_whole.segments.of_keys.end(),
                                         of_whole.segments.of_queries.begin(),
                                         of_whole.segments.of_queries.end());
      }
      Cache cache(CacheConfigOf(whole, {MHA_CACHE_KIND_CONTIGUOUS, 0}, 1, past + n));
      cache.Append(0, {SliceRows(whole.k, 0, past + n, 2 * 6, 0, past),
                       SliceRows(whole.v, 0, past + n, 2 * 5, 0, past)});
      AttentionCall call = PlainCall();
      call.asked = kAskNothing;
      call.cache.cache = cache.get();
      AttentionData data(part, call);
      data.score_arrays.column_keys = MHA_COLUMNS_NEW_KEYS;
      EXPECT_TRUE(SameBits(data.Compute().y, Specify(whole).y)) << Describe(whole);
    }
  }
}

// ---- Heads of which threads share out the keys

// Of the short sequence only the first part has keys: one thread is busy with it for as long as
// with a part of the long one, and the states of the others lie where another thread has left one
// of the long sequence.
TEST_P(Edges, KeysThatThreadsShareOutReachNoOtherSequence) {
  for (const auto &[num_threads, part] : {std::pair<uint32_t, int64_t>{2, 4096}, {3, 2048}}) {
    AttentionSizes sizes;
    sizes.batch = sizes.num_heads = 2;
    sizes.n_kv = 16384;
    sizes.head_dim = sizes.head_dim_v = 128;
    sizes.kv_lengths = {16384, part};
    AttentionProblem problem = NormalAttention(sizes, 4);
    AttentionCall call = PlainCall();
    call.asked = kAskLse;
    const Outputs expected = Attend(problem, call);
    std::fill_n(problem.v.begin(), problem.n_kv * 128, kNaN);
    const Scheduler scheduler(num_threads, RunTogether);
    call.scheduler = scheduler.get();
    for (int64_t round = 0; round < Rounds(10); round++) {
      const Outputs outputs = Attend(problem, call);
      ASSERT_TRUE(SameBits("y", SliceRows(outputs.y, 1, 1, 256, 0, 1),
                           SliceRows(expected.y, 1, 1, 256, 0, 1)));
      ASSERT_TRUE(SameBits("lse", outputs.lse, expected.lse));
    }
  }
}

// 64 tasks at once merge subtrees of parts in whatever order they finish: of few rows and of many,
// under a causal mask, and with windows that begin within a part or leave rows without a key.
TEST_P(Edges, KeysThatSixtyFourThreadsShareOutEqualTheSpecification) {
  const Scheduler scheduler(64, RunTogether);
  for (const int64_t n_q : {1, 150}) {
    for (const bool is_causal : {false, true}) {
      for (const std::optional<int64_t> window : {std::optional<int64_t>(), {900}}) {
        AttentionSizes sizes;
        sizes.batch = sizes.num_heads = 2;
        sizes.n_q = n_q;
        sizes.n_kv = 2900;
        sizes.kv_lengths = {2900, 1500};
        sizes.head_dim = sizes.head_dim_v = 8;
        sizes.is_causal = is_causal;
        sizes.window_left = window;
        sizes.q_start = {sizes.n_kv - n_q, 2300};
        const AttentionProblem problem = NormalAttention(sizes);
        AttentionCall call = PlainCall();
        call.asked = kAskLse;
        call.scheduler = scheduler.get();
        EXPECT_TRUE(SameBits(Attend(problem, call), Specify(problem)))
            << n_q << " queries, " << (is_causal ? "causal, " : "") << window.value_or(-1);
      }
    }
  }
}

// Units of three threads and more read keys and values that were packed once for all of them: of
// several sequences and kv heads, in whatever order tasks run. Three threads share no keys where
// there are 2,000, since their workspace, which ends at a guard page, has no room for them.
TEST_P(Edges, KeysThatUnitsShareEqualTheSpecification) {
  for (const auto &[kv_heads, n_q, n_kv] :
       {std::array<int64_t, 3>{2, 150, 300}, {10, 50, 250}, {1, 100, 2000}}) {
    for (const auto &[is_causal, window] :
         {std::pair<bool, std::optional<int64_t>>{false, {}}, {true, {}}, {true, 90}}) {
      AttentionSizes sizes;
      sizes.num_kv_heads = kv_heads;
      sizes.num_heads = 2 * kv_heads;
      sizes.n_q = n_q;
      sizes.n_kv = n_kv;
      sizes.head_dim = 12;
      sizes.head_dim_v = 20;
      sizes.is_causal = is_causal;
      sizes.window_left = window;
      const AttentionProblem whole = NormalAttention(sizes);
      const PackedSequences sequences = {{0, n_q - 20, n_q}, {0, 203, n_kv}, {}};
      const Outputs of_packed = Specify(whole, sequences);
      sizes.batch = 2;
      sizes.kv_lengths = {n_kv, 131};
      sizes.q_start = {n_kv - n_q, 0};
      const AttentionProblem ragged = NormalAttention(sizes);
      const Outputs of_ragged = Specify(ragged);
      for (const uint32_t threads : {3u, 7u, 64u}) {
        for (const auto &run : {RunTogether, RunBackwards}) {
          const Scheduler scheduler(threads, run);
          AttentionCall call = PlainCall();
          call.asked = kAskLse;
          call.place = Place::kBeforeGuard;
          call.scheduler = scheduler.get();
          EXPECT_TRUE(SameBits(Attend(ragged, call), of_ragged)) << threads;
          EXPECT_TRUE(SameBits(Attend(whole, sequences, call), of_packed)) << threads;
        }
      }
    }
  }
}

// A unit has several kv heads where they lie side by side, and its keys are split.
TEST_P(Edges, HeadsOfSeveralSequencesWhoseKeysThreadsShareOutEqualTheSpecification) {
  AttentionSizes sizes;
  sizes.batch = 2;
  sizes.n_kv = 1100;
  sizes.num_heads = sizes.num_kv_heads = 20;
  sizes.head_dim = sizes.head_dim_v = 16;
  const AttentionProblem problem = NormalAttention(sizes, 7);
  const Outputs expected = Specify(problem);
  for (const uint32_t threads : {2u, 5u}) {
    const Scheduler scheduler(threads, RunBackwards);
    AttentionCall call = PlainCall();
    call.asked = kAskLse;
    call.scheduler = scheduler.get();
    const Outputs outputs = Attend(problem, call);
    EXPECT_TRUE(SameBits("y", outputs.y, expected.y)) << threads << " threads";
    EXPECT_TRUE(SameBits("lse", outputs.lse, expected.lse)) << threads << " threads";
  }
}

TEST_P(Edges, PackedSequencesWhoseKeysThreadsShareOutEqualTheSpecification) {
  AttentionSizes sizes;
  sizes.n_q = 3;
  sizes.n_kv = 6000;
  sizes.head_dim = sizes.head_dim_v = 8;
  const AttentionProblem problem = NormalAttention(sizes);
  const PackedSequences sequences = {{0, 1, 3}, {0, 1500, 6000}, {}};
  const Outputs expected = Specify(problem, sequences);
  for (uint32_t num_threads = 1; num_threads <= 4; num_threads++) {
    const Scheduler scheduler(num_threads, RunTogether);
    AttentionCall call = PlainCall();
    call.asked = kAskLse;
    call.scheduler = scheduler.get();
    EXPECT_TRUE(SameBits(Attend(problem, sequences, call), expected)) << num_threads << " threads";
  }
}

// Units of several kv heads are larger for sequences of 4 rows than for those of 6, which the array
// has room for.
TEST_P(Edges, PackedSequencesOfManyHeadsEqualTheSpecification) {
  AttentionSizes sizes;
  sizes.n_q = 6;
  sizes.n_kv = 300;
  sizes.num_heads = sizes.num_kv_heads = 16;
  sizes.head_dim = sizes.head_dim_v = 64;
  const AttentionProblem problem = NormalAttention(sizes);
  const PackedSequences sequences = {{0, 4, 6}, {0, 250, 300}, {}};
  AttentionCall call = PlainCall();
  call.asked = kAskLse;
  EXPECT_TRUE(SameBits(Attend(problem, sequences, call), Specify(problem, sequences)));
}

// ---- Arrays that are the same, and arrays that end early

TEST_P(Edges, KeysInTheArrayOfQueriesMayHaveOtherLengths) {
  LayerProblem problem;
  problem.batch = 2;
  problem.n_q = problem.n_kv = 43;
  problem.q_lengths = {5, 33};
  problem.kv_lengths = {40, 2};
  problem.query_dim = problem.key_dim = problem.value_dim = problem.output_dim = 12;
  problem.has_key = true;
  problem = NormalLayer(problem);
  problem.key = problem.query;
  const Layer layer = Make(problem);
  LayerCall call;
  call.asked = kAskNothing;
  ForwardData data(layer.get(), problem, call);
  data.args.key.data = data.args.query.data;
  EXPECT_TRUE(SameBits("y", data.Compute().y, Specify(problem).y));
}

// The arrays end where the rows of the last heads would begin, next to memory that nobody may
// touch.
void ExpectHeadsOfScaleZeroUnread(AttentionCall call, bool is_in_integers, int64_t n_q,
                                  uint32_t num_threads) {
  AttentionSizes sizes;
  sizes.n_q = n_q;
  sizes.n_kv = 120 + n_q;
  sizes.num_heads = 4;
  sizes.num_kv_heads = 2;
  sizes.head_dim = sizes.head_dim_v = 8;
  AttentionProblem problem = NormalAttention(sizes);
  problem.score.emplace().head_scales = {0.5f, 2.0f, 0.0f, 0.0f};
  problem.is_in_integers = is_in_integers;
  if (is_in_integers) problem.k_type = problem.v_type = Storage::kInt8;
  const Scheduler scheduler(num_threads, RunBackwards);
  call.scheduler = scheduler.get();
  call.q = call.k = call.v = kHeadsOutside;
  AttentionData data(problem, call);
  const auto first_half = [](const void *x, int64_t rows, int64_t heads) {
    Memory half(static_cast<size_t>(rows * heads * 8) * sizeof(float), Place::kBeforeGuard);
    std::memcpy(half.data(), x, half.size());
    return half;
  };
  const Memory q = first_half(data.args.q.data, n_q, 2),
               k = first_half(data.args.k.data, sizes.n_kv, 1),
               v = first_half(data.args.v.data, sizes.n_kv, 1);
  data.args.q.data = q.floats();
  data.args.k.data = k.floats();
  data.args.v.data = v.floats();
  EXPECT_TRUE(SameBits(data.Compute(), Specify(problem)))
      << is_in_integers << ", " << n_q << " rows, " << num_threads << " threads";
}

TEST_P(Edges, HeadsOfScaleZeroAreUnread) {
  for (const bool is_in_integers : {false, true}) {
    for (const uint32_t num_threads : {1, 4}) {
      for (const int64_t n_q : {1, 150})
        ExpectHeadsOfScaleZeroUnread(PlainCall(), is_in_integers, n_q, num_threads);
    }
  }
}

}  // namespace
