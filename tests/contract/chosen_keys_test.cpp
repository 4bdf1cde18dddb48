// Chosen keys: mha_choose_keys and attention to its lists match the specification bit for bit, from
// plain arrays and caches; what is in no list is not read.
#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cstdint>
#include <limits>
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
      cache->Append(b, {k, std::vector<float>(valid.n_kv * problem.head_dim_v, kNaN)});
    }
    call.cache.cache = cache->get();
    call.cache.columns = problem.n_kv;
    call.cache.read = true;
    return call;
  }
};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(ChooseKeys);

// ---- mha_choose_keys

TEST_P(ChooseKeys, OfRandomCallsEqualTheSpecification) {
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
    problem.k_type = random.Pick(kKeyTypes);
    problem.values_in_keys = random.Coin();
    problem.is_in_integers = problem.k_type == Storage::kInt8;
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

TEST_P(ChooseKeys, OfLongSequencesEqualTheSpecification) {
  ChoiceProblem problem = Problem(1, 17, 2500, 16, 64, 300);
  problem.is_causal = true;
  const Outputs expected = Specify(problem);
  for (const uint32_t threads : {1, 2, 7}) {
    const Scheduler scheduler(threads, RunTogether);
    EXPECT_TRUE(SameBits(Choose(problem, Call(scheduler.get())), expected))
        << threads << " threads";
  }
}

TEST_P(ChooseKeys, InAnyPiecesOverACacheEqualTheSpecification) {
  constexpr int64_t n = 330, heads = 4, dim = 24, num_chosen = 40;
  for (const Storage type : kKeyTypes) {
    ChoiceProblem problem = Problem(1, n, n, heads, dim, num_chosen);
    problem.is_causal = true;
    problem.k_type = type;
    problem.values_in_keys = true;
    problem.rope = MakeRope(true, 8, n);
    const Outputs whole = Specify(problem);
    Random random(3);
    for (const CacheForm &form : kContiguousAndPaged) {
      Cache cache(CacheConfigOf(problem, form, 1, n));
      SpreadBlocks(&random, &cache);
      for (int64_t first = 0, count; first < n && !HasFailure(); first += count) {
        count = std::min(random.Pick<int64_t>({1, 2, 15, 100, 200}), n - first);
        ChoiceProblem piece = problem;
        piece.n_q = piece.n_kv = count;
        piece.q = SliceRows(problem.q, 0, n, heads * dim, first, count);
        piece.k = SliceRows(problem.k, 0, n, dim, first, count);
        piece.weights = SliceRows(problem.weights, 0, n, heads, first, count);
        const Scheduler scheduler(3, RunBackwards);
        AttentionCall call = Call(random.Coin() ? scheduler.get() : nullptr);
        call.cache.cache = cache.get();
        call.cache.columns = first + count;
        const Outputs outputs = Choose(piece, call);
        EXPECT_TRUE(
            SameBits("choice", outputs.lse, SliceRows(whole.lse, 0, n, num_chosen, first, count)));
        for (int64_t i = 0; i < count; i++) {
          std::vector<float> expected = SliceRows(whole.scores, 0, n, n, first + i, 1);
          expected.resize(first + count);
          EXPECT_TRUE(SameBits("scores", SliceRows(outputs.scores, 0, count, first + count, i, 1),
                               expected));
        }
      }
    }
  }
}

TEST_P(ChooseKeys, OfPackedSequencesEqualTheSpecificationOfEach) {
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

// ---- Attention to chosen keys

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

  Random random_{1};
};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(ChosenKeys);

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

TEST_P(ChosenKeys, FromAnyCacheAndOnAnyThreadsEqualTheSpecification) {
  using Case = std::pair<Storage, int64_t>;
  for (const auto &[type, block] : {Case{Storage::kF32, 1},
                                    {Storage::kInt8, 1},
                                    {Storage::kInt4, 1},
                                    {Storage::kF16, 16},
                                    {Storage::kInt4, 64}}) {
    for (const bool in_keys : {false, true}) {
      AttentionProblem problem = Problem(2, 5000, 4000 / block, block);
      problem.k_type = KeysBeside(problem.v_type = type);
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
TEST_P(ChosenKeys, OfPackedSequencesEqualTheSpecification) {
  for (const int64_t block : {1, 16}) {
    AttentionProblem problem = Problem(8, 80, 2, block);
    problem.rope = MakeRope(false, 20, 80);
    const PackedSequences sequences = {{0, 5, 8}, {0, 48, 80}, {}};
    std::vector<int32_t> &entries = problem.score->chosen.values;
    for (size_t i = 0; i < entries.size(); i++) {
      const bool is_of_first = i / 2 % 8 < 5;
      entries[i] %= static_cast<int32_t>((is_of_first ? 48 : 32) / block);
      if (i == 1) entries[i] = static_cast<int32_t>(48 / block) - 1;  // more than the second has
    }
    AttentionCall call = PlainCall();
    call.asked = kAskLse;
    EXPECT_TRUE(SameBits("y", Attend(problem, sequences, call).y, Specify(problem, sequences).y))
        << block;
    entries.back() = entries[1];
    EXPECT_THROW(Attend(problem, sequences, call), std::runtime_error) << block;
  }
}

// NaNs that would be other numbers in exp if their payload were not replaced.
TEST_P(ChosenKeys, WithNaNOfAnyPayloadEqualTheSpecification) {
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

TEST_P(ChosenKeys, ThatDoNotExistAreNamedBeforeAnythingIsWritten) {
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

// ---- Workspace

TEST(ChooseKeysWorkspace, IsNoLessForLargerCalls) {
  for (const int64_t heads : {1, 5, 64}) {
    for (const uint32_t threads : {1, 2, 5}) {
      const Scheduler scheduler(threads, RunBackwards), more(threads + 1, RunBackwards);
      for (int64_t n_q = 1; n_q < 40; n_q++) {
        const auto bytes = [&](int64_t batch, int64_t rows, int64_t n_kv, const mha_scheduler *of) {
          ChoiceProblem problem = Problem(1, 1, 1, heads, 8, 4);
          AttentionCall call;
          call.scheduler = of;
          ChoiceData data(problem, call);
          data.args.call.batch = batch;
          data.args.call.n_q = rows;
          data.args.call.n_kv = n_kv;
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

TEST(ChooseKeysErrors, NameTheArgumentAndWriteNothing) {
  const ChoiceProblem problem = Problem(2, 3, 20, 2, 8, 4);
  const auto expect = [&](const Words &words, const auto &change,
                          mha_status status = MHA_ERROR_INVALID_VALUE) {
    ChoiceData data(problem);
    data.PoisonOutputs();
    change(data.choice, data.args);
    std::vector<unsigned char> workspace(1 << 20);
    ExpectFails([&](mha_error *e) { return data.Run(workspace.data(), workspace.size(), e); },
                {status, {1}, words});
    EXPECT_TRUE(data.OutputsAreUntouched());
  };
  constexpr mha_status null = MHA_ERROR_NULL_POINTER, large = MHA_ERROR_TOO_LARGE;
  static float number = 0;
  static const mha_outputs outputs = Zeroed<mha_outputs>();
  static const mha_score_options score = Zeroed<mha_score_options>();
  static const mha_score_arrays arrays = Zeroed<mha_score_arrays>();
  static mha_norm norm = Zeroed<mha_norm>();
  norm.epsilon = 1;
  norm.flags = MHA_NORM_VALUES;
  expect({"attention.v.data", "set it to NULL"}, [](auto &, auto &a) { a.v.data = &number; });
  expect({"attention.output.data", "set it to NULL"},
         [](auto &, auto &a) { a.output.data = &number; });
  expect({"attention.call.attention_arithmetic is 1282", "no cache", "MHA_ARITHMETIC_F32"},
         [](auto &, auto &a) { a.call.attention_arithmetic = MHA_ARITHMETIC_INT16; });
  expect({"attention.kv_first_position", "256", "set it to 0"},
         [](auto &, auto &a) { a.kv_first_position = 256; });
  expect({"attention.outputs", "set it to NULL"},
         [](auto &, auto &a) { a.call.outputs = &outputs; });
  expect({"attention.score", "set it to NULL"}, [](auto &, auto &a) { a.call.score = &score; });
  expect({"attention.score_arrays", "set it to NULL"},
         [](auto &, auto &a) { a.call.score_arrays = &arrays; });
  expect({"attention.call.norm", "MHA_NORM_VALUES"}, [](auto &, auto &a) { a.call.norm = &norm; });
  expect(
      {"attention.num_kv_heads", "2", "1"}, [](auto &, auto &a) { a.num_kv_heads = 2; },
      MHA_ERROR_SHAPE);
  expect(
      {"attention.num_kv_heads is -1"}, [](auto &, auto &a) { a.num_kv_heads = -1; },
      MHA_ERROR_SHAPE);
  alignas(64) static const unsigned char no_cache[256] = {};
  const auto read = [](auto &, auto &a) {
    a.call.cache_read = reinterpret_cast<const mha_kv_cache *>(no_cache);
  };
  expect({"does not point to a KV cache"}, read);
  expect({"flags"}, [](auto &, auto &a) { a.call.flags = 1u << 20; });
  expect({"num_chosen", "0", "1"}, [](auto &c, auto &) { c.num_chosen = 0; });
  expect({"num_chosen", "-3", "1"}, [](auto &c, auto &) { c.num_chosen = -3; });
  expect(
      {"chosen_keys"}, [](auto &c, auto &) { c.num_chosen = kMax; }, large);
  const auto score_many = [](auto &c, auto &a) {
    c.index_scores = &number, c.num_chosen = 1;
    a.call.n_q = int64_t{1} << 40, a.call.n_kv = 1 << 22;
    a.q.strides.row = c.weights.strides.row = MHA_BROADCAST;
  };
  expect({"index_scores"}, score_many, large);
  ChoiceData without_scores(problem);
  score_many(without_scores.choice, without_scores.args);
  without_scores.choice.index_scores = nullptr;
  without_scores.WorkspaceBytes();
  static const mha_scheduler threads = {nullptr, UINT32_MAX, 0, RunBackwards};
  const auto score_at_once = [=](auto &c, auto &a) {
    score_many(c, a);
    c.index_scores = nullptr;
    a.call.scheduler = &threads;
    a.call.n_kv = (int64_t{1} << 31) - 1;
  };
  expect({"the workspace would exceed"}, score_at_once, large);
  static const int64_t lengths[] = {3, 4};
  static mha_sequences sequences = Zeroed<mha_sequences>();
  sequences.q_lengths = lengths;
  expect({"sequences.q_lengths[1] is 4"}, [](auto &, auto &a) { a.call.sequences = &sequences; });
  const auto lengthen = [](auto &, auto &a) {
    a.call.n_kv = int64_t{1} << 31;
    a.k.strides.batch = MHA_BROADCAST;
  };
  expect({"2147483648", "2^31 - 1"}, lengthen, large);
  expect({"weights.strides.row", "1", "2"}, [](auto &c, auto &) { c.weights.strides.row = 1; });
  expect({"weights.strides.batch", "-1"}, [](auto &c, auto &) { c.weights.strides.batch = -1; });
  expect({"weights.strides.head", "2", "0"}, [](auto &c, auto &) { c.weights.strides.head = 2; });
  expect({"weights.type", "2", "MHA_TYPE_F32"},
         [](auto &c, auto &) { c.weights.type = MHA_TYPE_F16; });
  expect(
      {"weights.data", "NULL"}, [](auto &c, auto &) { c.weights.data = nullptr; }, null);
  expect(
      {"chosen_keys", "NULL"}, [](auto &c, auto &) { c.chosen_keys = nullptr; }, null);
  expect(
      {"attention.q.data", "NULL"}, [](auto &, auto &a) { a.q.data = nullptr; }, null);
  expect(
      {"attention.k.data", "NULL"}, [](auto &, auto &a) { a.k.data = nullptr; }, null);
  expect(
      {"attention is NULL"}, [](auto &c, auto &) { c.attention = nullptr; }, null);
  expect(
      {"mha_choose_keys_args"}, [](auto &c, auto &) { c.struct_size = 8; }, MHA_ERROR_STRUCT_SIZE);
}

TEST(ChooseKeysErrors, NameACacheThatDoesNotFit) {
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
         {MHA_ERROR_INVALID_VALUE, {1}, {"attention.call.cache", "ring", "contiguous"}});
  expect({MHA_CACHE_KIND_CONTIGUOUS, 0}, false, 1,
         {MHA_ERROR_INVALID_VALUE,
          {1},
          {"attention.call.cache", "values", "MHA_CACHE_VALUES_IN_KEYS", "cache_read"}});
  expect({MHA_CACHE_KIND_CONTIGUOUS, 0}, true, 2,
         {MHA_ERROR_SHAPE, {1}, {"cache", "num_kv_heads", "2", "1"}});
  // No values are missing where there are no keys.
  const Cache cache(CacheConfigOf(problem, {MHA_CACHE_KIND_CONTIGUOUS, 0}, 1, 64));
  AttentionCall call;
  call.cache.cache = cache.get();
  call.cache.columns = 64;
  ChoiceData data(problem, call);
  data.args.call.n_kv = MHA_EMPTY;
  data.WorkspaceBytes();
}

TEST(ChooseKeysWorkspace, IsNoneForACallWithoutQueries) {
  ChoiceProblem problem = Problem(1, 1, 20, 2, 8, 4);
  ChoiceData data(problem);
  data.args.call.n_q = MHA_EMPTY;
  data.args.q.data = nullptr;
  EXPECT_EQ(data.WorkspaceBytes(), 0u);
  ExpectSucceeds([&](mha_error *error) { return data.Run(nullptr, 0, error); });
}

}  // namespace
