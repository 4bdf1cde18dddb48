// mha_choose_keys: index scores and chosen keys are the specification's, bit for bit, from plain
// arrays and caches, in any pieces.
#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "support/attention_test.h"
#include "support/choice.h"
#include "support/interface_support.h"
#include "support/norm.h"
#include "support/rope.h"
#include "support/rounds.h"
#include "support/schedulers.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

const float kNegativeInfinity = -std::numeric_limits<float>::infinity();
const float kNaN = FromBits(0xffd23456u);

ChoiceProblem Problem(int64_t batch, int64_t n_q, int64_t n_kv, int64_t num_heads, int64_t head_dim,
                      int64_t num_chosen, uint64_t seed = 1) {
  Random random(seed);
  ChoiceProblem problem;
  problem.batch = batch;
  problem.n_q = n_q;
  problem.n_kv = n_kv;
  problem.num_heads = num_heads;
  problem.head_dim = head_dim;
  problem.num_chosen = num_chosen;
  FillNormal(&random, &problem);
  problem.weights = random.Normals(batch * n_q * num_heads);
  return problem;
}

std::string Describe(const ChoiceProblem &problem) {
  return support::Describe(problem) + " num_chosen " + std::to_string(problem.num_chosen);
}

class ChooseKeys : public InstructionSetTest {
 protected:
  AttentionCall Call(const mha_scheduler *scheduler = nullptr) const {
    AttentionCall call;
    call.instruction_set = instruction_set();
    call.scheduler = scheduler;
    call.place = Place::kBeforeGuard;
    return call;
  }

  void ExpectTheSpecification(const ChoiceProblem &problem, const AttentionCall &call) const {
    EXPECT_TRUE(SameBits(Choose(problem, call), Specify(problem))) << Describe(problem);
  }

  // The first row of a batch of one.
  std::vector<int32_t> ChosenBy(const ChoiceProblem &problem) const {
    return ChosenOf(Choose(problem, Call()));
  }

  // A cache that holds the keys of the problem, and whatever values; with it, the problem without
  // keys.
  AttentionCall Stored(const ChoiceProblem &problem, const CacheForm &form, Cache *cache,
                       AttentionCall call) const {
    Random random(7);
    *cache = Cache(CacheConfigOf(problem, form, problem.batch, problem.n_kv));
    SpreadBlocks(&random, cache);
    for (int64_t b = 0; b < problem.batch; b++) {
      const ValidRows valid = ValidRowsOf(problem, b);
      const std::vector<float> k =
          SliceRows(problem.k, b, problem.n_kv, problem.head_dim, valid.kv_first, valid.n_kv);
      cache->Append(
          b, {k, std::vector<float>(static_cast<size_t>(valid.n_kv * problem.head_dim_v), kNaN)});
    }
    call.cache.cache = cache->get();
    call.cache.columns = problem.n_kv;
    call.cache.read = true;
    return call;
  }
};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(ChooseKeys);

// ---- Bits

TEST_P(ChooseKeys, OfRandomCallsAreThoseOfTheSpecification) {
  for (int64_t n = 0; n < Rounds(150) && !HasFailure(); n++) {
    Random random(5000 + static_cast<uint64_t>(n));
    const int64_t n_kv = random.Pick<int64_t>({1, 3, 16, 17, 100, 255, 256, 257, 530, 800});
    const int64_t n_q = random.Pick<int64_t>({1, 1, 2, 5, 9, 20});
    ChoiceProblem problem =
        Problem(random.Between(1, 3), n_q, n_kv, random.Pick<int64_t>({1, 2, 3, 5, 8, 13, 64}),
                random.Pick<int64_t>({1, 4, 7, 16, 33, 128}),
                random.Pick<int64_t>({1, 2, 10, 64, 255, 1000}), static_cast<uint64_t>(n));
    const Values kind = RandomKind(&random);
    MakeSpecial(&random, kind, 1, random.Pick({&problem.q, &problem.k, &problem.weights}));
    if (kind == Values::kTies) MakeSpecial(&random, kind, 1, &problem.k);
    problem.scale = random.Pick({0.0f, 0.0f, 0.3f, -2.0f});
    problem.is_causal = random.Coin();
    if (random.Chance(0.3)) problem.window_left = random.Pick<int64_t>({0, 3, 200, 300});
    if (random.Chance(0.2)) problem.window_right = random.Pick<int64_t>({0, 3, 200});
    if (n_q > n_kv || random.Chance(0.3)) {
      for (int64_t b = 0; b < problem.batch; b++)
        problem.q_start.push_back(random.Between(0, n_kv));
    }
    if (!problem.q_start.empty() && random.Coin()) {
      const bool padding_left = random.Coin();
      for (int64_t b = 0; b < problem.batch; b++)
        problem.q_lengths.push_back(random.Between(0, n_q));
      for (int64_t b = 0; b < problem.batch; b++)
        problem.kv_lengths.push_back(random.Between(0, n_kv));
      if (padding_left) PadLeft(n_q % 2 == 0, &problem);
      FillPadding(kNaN, &problem);
    }
    if (random.Chance(0.3)) problem.norm = RandomNorm(&random, problem);
    if (problem.norm) problem.norm->is_of_values = false;
    if (problem.head_dim > 1 && random.Chance(0.3)) {
      problem.rope = MakeRope(random.Coin(), random.Between(1, problem.head_dim / 2) * 2,
                              n_kv + n_q, random.Between(0, 3));
    }
    const Scheduler scheduler(static_cast<uint32_t>(random.Between(1, 5)),
                              random.Coin() ? RunBackwards : RunOnThreads);
    AttentionCall call = Call(random.Coin() ? scheduler.get() : nullptr);
    call.q = RandomLayout(&random, true);
    call.k = RandomLayout(&random, true);
    const bool asks = random.Coin();
    if (!asks) call.asked = kAskNothing;
    ExpectTheSpecification(problem, call);
    // Stored keys are normalised and rotated already.
    if (problem.norm || problem.rope || !problem.kv_lengths.empty() || !problem.kv_start.empty())
      continue;
    problem.k_type = random.Pick({Storage::kF32, Storage::kF16, Storage::kBf16, Storage::kInt8});
    problem.values_in_keys = random.Coin();
    const CacheForm form = kContiguousAndPaged[random.Below(5)];
    const Outputs expected = Specify(problem);
    Cache cache(CacheConfigOf(problem, form, 1, 1));
    const AttentionCall stored = Stored(problem, form, &cache, call);
    ChoiceProblem queries = problem;
    queries.n_kv = 0;
    EXPECT_TRUE(SameBits(Choose(queries, stored), expected))
        << Describe(form) << " " << Describe(problem);
  }
}

TEST_P(ChooseKeys, OfLongSequencesAreThoseOfTheSpecification) {
  ChoiceProblem problem = Problem(1, 17, 2500, 16, 64, 300);
  problem.is_causal = true;
  const Outputs expected = Specify(problem);
  for (const uint32_t threads : {1, 2, 7}) {
    const Scheduler scheduler(threads, RunTogether);
    EXPECT_TRUE(SameBits(Choose(problem, Call(scheduler.get())), expected))
        << threads << " threads";
  }
}

TEST_P(ChooseKeys, AreTheSameQueryByQuery) {
  ChoiceProblem problem = Problem(2, 21, 600, 4, 32, 50);
  problem.is_causal = true;
  const Outputs whole = Choose(problem, Call());
  for (int64_t b = 0; b < problem.batch; b++) {
    for (int64_t i = 0; i < problem.n_q; i++) {
      ChoiceProblem one = problem;
      static_cast<AttentionProblem &>(one) =
          Slice(problem, b, i, 1, problem.n_kv - problem.n_q + i + 1);
      const int64_t row = b * problem.n_q + i;
      one.weights = SliceRows(problem.weights, 0, 1, problem.num_heads, row, 1);
      const Outputs outputs = Choose(one, Call());
      EXPECT_TRUE(
          SameBits("choice", outputs.lse, SliceRows(whole.lse, 0, 1, problem.num_chosen, row, 1)))
          << row;
      std::vector<float> scores = SliceRows(whole.scores, 0, 1, problem.n_kv, row, 1);
      scores.resize(outputs.scores.size());
      EXPECT_TRUE(SameBits("scores", outputs.scores, scores)) << row;
    }
  }
}

TEST_P(ChooseKeys, AreTheSameInAnyPiecesOverACache) {
  for (const Storage type : kStorageTypes) {
    ChoiceProblem problem = Problem(2, 330, 330, 4, 24, 40);
    problem.is_causal = true;
    problem.k_type = type;
    problem.values_in_keys = true;
    problem.rope = MakeRope(true, 8, 330);
    const Outputs whole = Specify(problem);
    Random random(3);
    for (const CacheForm &form : kContiguousAndPaged) {
      Cache cache(CacheConfigOf(problem, form, 2, 330));
      SpreadBlocks(&random, &cache);
      for (int64_t first = 0, count; first < 330 && !HasFailure(); first += count) {
        count = std::min<int64_t>(random.Pick<int64_t>({1, 2, 15, 100, 200}), 330 - first);
        ChoiceProblem piece = problem;
        piece.n_q = piece.n_kv = count;
        piece.q.clear();
        piece.k.clear();
        piece.weights.clear();
        for (int64_t b = 0; b < 2; b++) {
          const auto add = [&](std::vector<float> ChoiceProblem::*field, int64_t width) {
            const std::vector<float> rows = SliceRows(problem.*field, b, 330, width, first, count);
            (piece.*field).insert((piece.*field).end(), rows.begin(), rows.end());
          };
          add(static_cast<std::vector<float> ChoiceProblem::*>(&ChoiceProblem::q), 4 * 24);
          add(static_cast<std::vector<float> ChoiceProblem::*>(&ChoiceProblem::k), 24);
          add(&ChoiceProblem::weights, 4);
        }
        const Scheduler scheduler(3, RunBackwards);
        AttentionCall call = Call(random.Coin() ? scheduler.get() : nullptr);
        call.cache.cache = cache.get();
        call.cache.columns = first + count;
        const Outputs outputs = Choose(piece, call);
        for (int64_t b = 0; b < 2; b++) {
          EXPECT_TRUE(SameBits("choice", SliceRows(outputs.lse, b, count, 40, 0, count),
                               SliceRows(whole.lse, b, 330, 40, first, count)));
          for (int64_t i = 0; i < count; i++) {
            std::vector<float> expected = SliceRows(whole.scores, b, 330, 330, first + i, 1);
            expected.resize(static_cast<size_t>(first + count));
            EXPECT_TRUE(SameBits("scores", SliceRows(outputs.scores, b, count, first + count, i, 1),
                                 expected));
          }
        }
      }
    }
  }
}

TEST_P(ChooseKeys, OfPackedSequencesAreThoseOfEachAlone) {
  const PackedSequences packed = {{0, 3, 3, 4, 20}, {0, 40, 50, 51, 400}, {}};
  ChoiceProblem problem = Problem(1, 20, 400, 5, 16, 12);
  problem.is_causal = true;
  const Outputs all = PackedData<ChoiceData>(packed, problem, Call()).Compute();
  for (int64_t b = 0; b < packed.count(); b++) {
    const int64_t first = packed.q[b], rows = packed.q[b + 1] - first;
    const Outputs one = Specify(OneOf(problem, packed, b));
    EXPECT_TRUE(SameBits("choice", SliceRows(all.lse, 0, 1, 12, first, rows),
                         SliceRows(one.lse, 0, 1, 12, first, rows)))
        << b;
    EXPECT_TRUE(SameBits("scores", SliceRows(all.scores, 0, 1, 400, first, rows),
                         SliceRows(one.scores, 0, 1, 400, first, rows)))
        << b;
  }
}

// ---- Values

// By double precision, with the error that a sum of so many products can have.
TEST_P(ChooseKeys, HaveTheGreatestScores) {
  ChoiceProblem problem = Problem(1, 3, 700, 64, 128, 60);
  problem.is_causal = true;
  const Outputs outputs = Choose(problem, Call());
  const std::vector<int32_t> chosen = ChosenOf(outputs);
  for (int64_t i = 0; i < problem.n_q; i++) {
    const int64_t n = problem.n_kv - problem.n_q + i + 1;  // keys that it may choose
    std::vector<double> exact(static_cast<size_t>(n)), bound(exact.size());
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
        exact[j] += problem.weights[head] *
                    std::max(0.0, product / std::sqrt(static_cast<double>(problem.head_dim)));
        bound[j] += std::fabs(problem.weights[head]) * magnitude /
                    std::sqrt(static_cast<double>(problem.head_dim));
      }
      bound[j] *= 0x1p-24 * static_cast<double>(problem.head_dim + problem.num_heads + 4);
      EXPECT_NEAR(outputs.scores[i * problem.n_kv + j], exact[j], bound[j]) << i << " " << j;
    }
    const int32_t *const row = chosen.data() + i * problem.num_chosen;
    EXPECT_TRUE(std::is_sorted(row, row + problem.num_chosen));
    std::vector<bool> is_chosen(static_cast<size_t>(n));
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

// Of keys with scores that are given: one head of one number, the weight and the scale 1.
class ChoiceOfScores : public ChooseKeys {
 protected:
  std::vector<int32_t> Chosen(const std::vector<float> &scores, int64_t num_chosen) const {
    ChoiceProblem problem = Problem(1, 1, static_cast<int64_t>(scores.size()), 1, 1, num_chosen);
    problem.scale = 1;
    problem.q = {1.0f};
    problem.k = scores;
    problem.weights = {1.0f};
    return ChosenBy(problem);
  }
};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(ChoiceOfScores);

TEST_P(ChoiceOfScores, AscendsAndEndsWithMinusOne) {
  EXPECT_EQ(Chosen({5, 1, 9, 3, 7}, 3), (std::vector<int32_t>{0, 2, 4}));
  EXPECT_EQ(Chosen({5, 1, 9}, 5), (std::vector<int32_t>{0, 1, 2, -1, -1}));
  EXPECT_EQ(Chosen({5, 1, 9}, 3), (std::vector<int32_t>{0, 1, 2}));
}

TEST_P(ChoiceOfScores, OfEqualOnesTakesTheFirst) {
  EXPECT_EQ(Chosen({1, 2, 2, 2, 3}, 3), (std::vector<int32_t>{1, 2, 4}));
  EXPECT_EQ(Chosen({0, -1, -0.0f, -5, 0}, 3), (std::vector<int32_t>{0, 1, 2}));  // all are 0
  for (const int64_t n : {300, 1000}) {
    std::vector<int32_t> first(77);
    std::iota(first.begin(), first.end(), 0);
    EXPECT_EQ(Chosen(std::vector<float>(static_cast<size_t>(n), 0.75f), 77), first);
    std::vector<float> scores(static_cast<size_t>(n), 0.75f);
    scores[5] = scores[n - 1] = std::nextafter(0.75f, 1.0f);
    scores[6] = std::nextafter(0.75f, 0.0f);
    first.erase(first.begin() + 6);
    first.back() = static_cast<int32_t>(n - 1);
    first.insert(first.end() - 1, 76);
    EXPECT_EQ(Chosen(scores, 77), first);
  }
}

TEST_P(ChoiceOfScores, TellsNeighboursApartAtEveryMagnitude) {
  for (const float x : {0x1p-149f, 0x1p-126f, 1.0f, 0x1.fffffep+127f}) {
    const float below = std::nextafter(x, 0.0f);
    EXPECT_EQ(Chosen({below, x, below, x}, 2), (std::vector<int32_t>{1, 3})) << x;
    EXPECT_EQ(Chosen({below, x, below, x}, 3), (std::vector<int32_t>{0, 1, 3})) << x;
  }
}

TEST_P(ChoiceOfScores, RanksNaNAsNegativeInfinity) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(Chosen({kNaN, 1, infinity, 0, kNaN}, 2), (std::vector<int32_t>{1, 2}));
  EXPECT_EQ(Chosen({kNaN, 1, infinity, 0, kNaN}, 4), (std::vector<int32_t>{0, 1, 2, 3}));
  EXPECT_EQ(Chosen({kNaN, kNaN, kNaN}, 2), (std::vector<int32_t>{0, 1}));
  ChoiceProblem problem = Problem(1, 1, 4, 1, 1, 3);
  problem.q = {1.0f};
  problem.k = {infinity, 1, kNaN, infinity};
  problem.weights = {-1.0f};  // -infinity, -1, NaN, -infinity
  EXPECT_EQ(ChosenBy(problem), (std::vector<int32_t>{0, 1, 2}));
}

// As sparse attention uses them: each query attends to what it has chosen, and to all keys if it
// may choose so many.
TEST_P(ChooseKeys, AreAttendedTo) {
  ChoiceProblem index = Problem(2, 9, 300, 6, 16, 40);
  index.is_causal = true;
  AttentionProblem problem = index;
  problem.head_dim_v = 12;
  Random random(8);
  FillNormal(&random, &problem);
  const Outputs all = Specify(problem);
  for (const int64_t num_chosen : {40, 300, 310}) {
    index.num_chosen = num_chosen;
    problem.score = ScoreArrays();
    problem.score->chosen.by_sequence = true;
    problem.score->chosen.columns = num_chosen;
    problem.score->chosen.values = ChosenOf(Choose(index, Call()));
    AttentionCall call = Call();
    call.asked = kAskLse;
    const Outputs outputs = Attend(problem, call);
    EXPECT_TRUE(SameBits("y", outputs.y, num_chosen < 300 ? Specify(problem).y : all.y))
        << num_chosen;
  }
}

TEST_P(ChooseKeys, ByARowThatIsNotFiniteReachNoOther) {
  ChoiceProblem problem = Problem(1, 9, 300, 3, 16, 20);
  const Outputs clean = Choose(problem, Call());
  problem.weights[4 * 3] = kNaN;
  problem.q[6 * 3 * 16] = std::numeric_limits<float>::infinity();
  const Outputs spoiled = Choose(problem, Call());
  for (const int64_t row : {0, 1, 2, 3, 5, 7, 8}) {
    EXPECT_TRUE(SameBits("choice", SliceRows(spoiled.lse, 0, 1, 20, row, 1),
                         SliceRows(clean.lse, 0, 1, 20, row, 1)))
        << row;
    EXPECT_TRUE(SameBits("scores", SliceRows(spoiled.scores, 0, 1, 300, row, 1),
                         SliceRows(clean.scores, 0, 1, 300, row, 1)))
        << row;
  }
}

TEST_P(ChooseKeys, OfPaddingAndOfNoKeysAreNone) {
  ChoiceProblem problem = Problem(2, 5, 40, 3, 8, 6);
  problem.is_causal = true;
  problem.q_lengths = {2, 5};
  problem.kv_lengths = {40, 0};
  problem.q_start = {38, 0};
  ChoiceData data(problem, Call());
  std::memset(data.choice.chosen_keys, 0x5a, 2 * 5 * 6 * sizeof(int32_t));
  std::vector<unsigned char> workspace(data.WorkspaceBytes());
  mha_error error;
  ASSERT_EQ(data.Run(workspace.data(), workspace.size(), &error), MHA_OK) << error.message;
  const Outputs outputs = data.Results();
  const std::vector<int32_t> chosen = ChosenOf(outputs);
  for (int64_t row = 0; row < 10; row++) {
    for (int64_t c = 0; c < 6; c++) EXPECT_EQ(chosen[row * 6 + c] < 0, row >= 2) << row;
    for (int64_t j = 0; j < 40; j++)
      EXPECT_EQ(outputs.scores[row * 40 + j] == kNegativeInfinity, row >= 2 || j > 38 + row) << row;
  }
}

// ---- Workspace

TEST_P(ChooseKeys, OfLargerCallsNeedNoLessWorkspace) {
  for (const int64_t heads : {1, 5, 64}) {
    for (const uint32_t threads : {1, 2, 5}) {
      const Scheduler scheduler(threads, RunBackwards), more(threads + 1, RunBackwards);
      for (int64_t n_q = 1; n_q < 40; n_q++) {
        const auto bytes = [&](int64_t batch, int64_t rows, int64_t n_kv, const mha_scheduler *of) {
          ChoiceProblem problem = Problem(1, 1, 1, heads, 8, 4);
          ChoiceData data(problem, Call(of));
          data.args.batch = batch;
          data.args.n_q = rows;
          data.args.n_kv = n_kv;
          return data.WorkspaceBytes();
        };
        const size_t least = bytes(2, n_q, 700, scheduler.get());
        EXPECT_GE(bytes(2, n_q + 1, 700, scheduler.get()), least) << n_q;
        EXPECT_GE(bytes(3, n_q, 700, scheduler.get()), least) << n_q;
        EXPECT_GE(bytes(2, n_q, 701, scheduler.get()), least) << n_q;
        EXPECT_GE(bytes(2, n_q, 700, more.get()), least) << n_q;
      }
    }
  }
}

// ---- Errors

TEST(ChooseKeysErrors, NameWhatIsWrongAndWriteNothing) {
  const ChoiceProblem problem = Problem(2, 3, 20, 2, 8, 4);
  const auto expect = [&](const auto &change, const Expected &expected) {
    ChoiceData data(problem);
    data.PoisonOutputs();
    change(data);
    std::vector<unsigned char> workspace(1 << 20);
    ExpectFails(
        [&](mha_error *error) { return data.Run(workspace.data(), workspace.size(), error); },
        expected);
    EXPECT_TRUE(data.OutputsAreUntouched());
  };
  float number = 0;
  const mha_outputs outputs = Zeroed<mha_outputs>();
  const mha_score_options score = Zeroed<mha_score_options>();
  const mha_score_arrays score_arrays = Zeroed<mha_score_arrays>();
  mha_norm norm = Zeroed<mha_norm>();
  norm.epsilon = 1;
  norm.flags = MHA_NORM_VALUES;
  const auto invalid = [](std::initializer_list<const char *> words) {
    return Expected{MHA_ERROR_INVALID_VALUE, {1}, words};
  };
  const auto null = [](std::initializer_list<const char *> words) {
    return Expected{MHA_ERROR_NULL_POINTER, {1}, words};
  };
  expect([&](ChoiceData &data) { data.args.v.data = &number; },
         invalid({"attention.v.data", "set it to NULL"}));
  expect([&](ChoiceData &data) { data.args.output.data = &number; },
         invalid({"attention.output.data", "set it to NULL"}));
  expect([&](ChoiceData &data) { data.args.kv_first_position = 256; },
         invalid({"attention.kv_first_position", "256", "set it to 0"}));
  expect([&](ChoiceData &data) { data.args.outputs = &outputs; },
         invalid({"attention.outputs", "set it to NULL"}));
  expect([&](ChoiceData &data) { data.args.score = &score; },
         invalid({"attention.score", "set it to NULL"}));
  expect([&](ChoiceData &data) { data.args.score_arrays = &score_arrays; },
         invalid({"attention.score_arrays", "set it to NULL"}));
  expect([&](ChoiceData &data) { data.args.norm = &norm; },
         invalid({"attention.norm", "MHA_NORM_VALUES"}));
  expect([&](ChoiceData &data) { data.args.num_kv_heads = 2; },
         {MHA_ERROR_SHAPE, {1}, {"attention.num_kv_heads", "2", "1"}});
  expect([&](ChoiceData &data) { data.args.flags = 1u << 20; }, invalid({"flags"}));
  expect([&](ChoiceData &data) { data.choice.num_chosen = 0; }, invalid({"num_chosen", "0", "1"}));
  expect([&](ChoiceData &data) { data.choice.num_chosen = -3; },
         invalid({"num_chosen", "-3", "1"}));
  expect([&](ChoiceData &data) { data.choice.num_chosen = kMax; },
         {MHA_ERROR_TOO_LARGE, {1}, {"chosen_keys"}});
  const auto score_many = [&](ChoiceData &data) {
    data.choice.index_scores = &number, data.choice.num_chosen = 1;
    data.args.n_q = int64_t{1} << 40, data.args.n_kv = 1 << 22;
    data.args.q.strides.row = data.choice.weights.strides.row = MHA_BROADCAST;
  };
  expect(score_many, {MHA_ERROR_TOO_LARGE, {1}, {"index_scores"}});
  const auto lengthen = [](ChoiceData &data) {
    data.args.n_kv = int64_t{1} << 31;
    data.args.k.strides.batch = MHA_BROADCAST;
  };
  expect(lengthen, {MHA_ERROR_TOO_LARGE, {1}, {"2147483648", "2^31 - 1"}});
  expect([&](ChoiceData &data) { data.choice.weights.strides.row = 1; },
         invalid({"weights.strides.row", "1", "2"}));
  expect([&](ChoiceData &data) { data.choice.weights.strides.batch = -1; },
         invalid({"weights.strides.batch", "-1"}));
  expect([&](ChoiceData &data) { data.choice.weights.strides.head = 2; },
         invalid({"weights.strides.head", "2", "0"}));
  expect([&](ChoiceData &data) { data.choice.weights.type = MHA_TYPE_F16; },
         invalid({"weights.type", "2", "MHA_TYPE_F32"}));
  expect([&](ChoiceData &data) { data.choice.weights.data = nullptr; },
         null({"weights.data", "NULL"}));
  expect([&](ChoiceData &data) { data.choice.chosen_keys = nullptr; },
         null({"chosen_keys", "NULL"}));
  expect([&](ChoiceData &data) { data.args.q.data = nullptr; }, null({"attention.q.data", "NULL"}));
  expect([&](ChoiceData &data) { data.args.k.data = nullptr; }, null({"attention.k.data", "NULL"}));
  expect([&](ChoiceData &data) { data.choice.attention = nullptr; },
         null({"mha_attention_args", "NULL"}));
  expect([&](ChoiceData &data) { data.choice.struct_size = 8; },
         {MHA_ERROR_STRUCT_SIZE, {1}, {"mha_choose_keys_args"}});
}

TEST(ChooseKeysErrors, OfCaches) {
  const ChoiceProblem problem = Problem(1, 3, 20, 2, 8, 4);
  const auto expect = [&](const CacheForm &form, bool reads, int64_t num_kv_heads,
                          const Expected &expected) {
    ChoiceProblem sizes = problem;
    sizes.num_kv_heads = num_kv_heads;
    const Cache cache(CacheConfigOf(sizes, form, 1, 64));
    AttentionCall call;
    call.cache.cache = cache.get();
    call.cache.columns = 64;
    call.cache.read = reads;
    ChoiceData data(problem, call);
    std::vector<unsigned char> workspace(1 << 20);
    ExpectFails(
        [&](mha_error *error) { return data.Run(workspace.data(), workspace.size(), error); },
        expected);
    EXPECT_EQ(cache.Length(0), 0);
  };
  expect({MHA_CACHE_KIND_RING, 64}, true, 1,
         {MHA_ERROR_INVALID_VALUE, {1}, {"attention.cache", "ring", "contiguous"}});
  expect({MHA_CACHE_KIND_CONTIGUOUS, 0}, false, 1,
         {MHA_ERROR_INVALID_VALUE,
          {1},
          {"attention.cache", "values", "MHA_CACHE_VALUES_IN_KEYS", "cache_read"}});
  expect({MHA_CACHE_KIND_CONTIGUOUS, 0}, true, 2,
         {MHA_ERROR_SHAPE, {1}, {"cache", "num_kv_heads", "2", "1"}});
}

TEST(ChooseKeysErrors, OfACallOfNothingAreNone) {
  ChoiceProblem problem = Problem(1, 1, 20, 2, 8, 4);
  ChoiceData data(problem);
  data.args.n_q = MHA_EMPTY;
  data.args.q.data = nullptr;
  EXPECT_EQ(data.WorkspaceBytes(), 0u);
  ExpectSucceeds([&](mha_error *error) { return data.Run(nullptr, 0, error); });
}

}  // namespace
