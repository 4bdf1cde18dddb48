// Scores and contexts in integers (arithmetic and context_arithmetic of mha_score_options): the bits of the specification for any shape,
// options, threads and layer; a prompt at once, without a cache, and any pieces over a cache of int8 give the same bits; the greatest
// codes; numbers that are not finite.
#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "support/attention_test.h"
#include "support/fixtures.h"
#include "support/packed_sequences.h"
#include "support/replay.h"
#include "support/rounds.h"
#include "support/same_bits.h"
#include "support/schedulers.h"
#include "support/specify.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

// What the scores are computed in, and the context.
struct Arithmetics {
  Arithmetic scores, context;
};

constexpr Arithmetics kIntegers[] = {{Arithmetic::kInt8, Arithmetic::kF32},
                                     {Arithmetic::kInt16, Arithmetic::kF32},
                                     {Arithmetic::kF32, Arithmetic::kInt8},
                                     {Arithmetic::kF32, Arithmetic::kInt16},
                                     {Arithmetic::kInt8, Arithmetic::kInt8},
                                     {Arithmetic::kInt16, Arithmetic::kInt16}};

void Set(const Arithmetics &integers, ScoreArrays *score) {
  score->arithmetic = integers.scores;
  score->context_arithmetic = integers.context;
}

constexpr CacheForm kContiguous = {MHA_CACHE_CONTIGUOUS, 0};

class IntegerAttention : public AttentionTest {
 protected:
  static AttentionProblem History(const Arithmetics &integers, int64_t batch, int64_t n, int64_t head_dim = 6, int64_t head_dim_v = 5,
                                  int64_t group = 2) {
    AttentionSizes sizes;
    sizes.batch = batch;
    sizes.n_q = sizes.n_kv = n;
    sizes.num_kv_heads = 2;
    sizes.num_heads = 2 * group;
    sizes.head_dim = head_dim;
    sizes.head_dim_v = head_dim_v;
    sizes.is_causal = true;
    Set(integers, &sizes.score.emplace());
    return NormalAttention(sizes, static_cast<uint64_t>(batch + 10 * n + 100 * head_dim));
  }

  static Outputs Collected(Outputs outputs) {
    Outputs collected;
    collected.y = std::move(outputs.y);
    collected.lse = std::move(outputs.lse);
    return collected;
  }

  // Over a cache that gets the history in pieces of at most so many rows.
  Outputs InPieces(const AttentionProblem &history, const CacheForm &form, int64_t most, Random *random) const {
    Cache cache(CacheConfigOf(history, form, history.batch, history.n_q), Place::kAnywhere, 0xff);  // scales not stored are NaN
    SpreadBlocks(random, &cache);
    Replay replay(history, history.num_heads * history.head_dim_v, &cache);
    while (!replay.Finished()) {
      const Scheduler scheduler(static_cast<uint32_t>(random->Between(1, 3)), RunBackwards);
      AttentionCall call = PlainCall();
      if (random->Coin()) call.scheduler = scheduler.get();
      replay.Step(history, most == 1 ? replay.EachBy(1) : replay.RandomParts(random, most), call);
    }
    return replay.outputs();
  }
};
MHA_INSTANTIATE_FOR_ALL_INSTRUCTION_SETS(IntegerAttention);

// ---- Bits

// Tiles of rows, blocks of 16 keys, chunks of 256, pairs of terms: what is left of each may be any number.
TEST_P(IntegerAttention, GiveTheBitsOfTheSpecificationForAnyNumberOfRowsAndKeys) {
  Sample sample;
  for (const Arithmetics &integers : kIntegers) {
    for (const int64_t n_q : {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 40, 97}) {
      for (const int64_t n_kv : {1, 15, 16, 33, 300, 530}) {
        if (!sample.Takes()) continue;
        AttentionProblem problem = History(integers, 1, n_kv, 1 + (7 * n_q + n_kv) % 41, 5, 1 + n_q % 3);
        problem.n_q = n_q;
        problem.is_causal = n_q <= n_kv;
        problem.q = Random(static_cast<uint64_t>(n_q)).Normals(n_q * problem.num_heads * problem.head_dim);
        ExpectTheSpecification(problem);
        if (HasFailure()) return;
      }
    }
  }
}

// Sums are exact up to 512 terms; those of more are added as floats.
TEST_P(IntegerAttention, OfAnyWidthGiveTheBitsOfTheSpecification) {
  Sample sample;
  for (const Arithmetics &integers : kIntegers) {
    for (const int64_t head_dim : {1, 2, 3, 5, 8, 31, 64, 511, 512, 513, 576, 1030}) {
      if (!sample.Takes()) continue;
      AttentionProblem problem = History(integers, 1, 37, head_dim, 1 + head_dim % 90, 1);
      ExpectTheSpecification(problem);
      problem.k_type = integers.scores == Arithmetic::kF32 ? Storage::kF16 : Storage::kInt8;
      problem.v_type = integers.context == Arithmetic::kF32 ? Storage::kF16 : Storage::kInt8;
      Random random(5);
      EXPECT_TRUE(SameBits(InPieces(problem, kContiguous, 37, &random), Collected(Specify(problem)))) << Describe(problem);
      if (HasFailure()) return;
    }
  }
}

TEST_P(IntegerAttention, OfRandomCasesEqualTheSpecification) {
  for (int64_t n = 0; n < Rounds(150) && !HasFailure(); n++) {
    Random random(9000 + static_cast<uint64_t>(n));
    AttentionProblem problem;
    problem.num_kv_heads = random.Between(1, 2);
    problem.num_heads = problem.num_kv_heads * random.Pick<int64_t>({1, 1, 2, 3});
    problem.batch = random.Between(1, 2);
    problem.n_q = random.Pick<int64_t>({1, 1, 2, 5, 6, 7, 17, 40});
    problem.n_kv = random.Coin() ? problem.n_q : random.Pick<int64_t>({0, 1, 15, 16, 33, 257, 300, 600, 1100});
    problem.head_dim = random.Pick<int64_t>({1, 8, 19, 33});
    problem.head_dim_v = random.Pick<int64_t>({1, 8, 19, 48});
    problem.is_causal = random.Coin() && problem.n_q <= problem.n_kv;
    if (random.Chance(0.3)) problem.scale = random.Pick<float>({1.0f, -0.5f, 20.0f, 1e30f});
    if (random.Chance(0.3)) problem.window_left = random.Pick<int64_t>({0, 5, 256, 300});
    for (int64_t b = 0; b < problem.batch; b++) problem.q_start.push_back(random.Between(0, problem.n_kv + 20));
    const Values kind = RandomKind(&random);
    problem.q = RandomValues(&random, kind, problem.batch * problem.n_q * problem.num_heads * problem.head_dim);
    problem.k = RandomValues(&random, kind, problem.batch * problem.n_kv * problem.num_kv_heads * problem.head_dim);
    problem.v = RandomValues(&random, kind, problem.batch * problem.n_kv * problem.num_kv_heads * problem.head_dim_v);
    ScoreArrays &score = problem.score.emplace();
    Set(random.Pick<Arithmetics>({kIntegers[0], kIntegers[1], kIntegers[2], kIntegers[3], kIntegers[4], kIntegers[5]}), &score);
    if (random.Coin()) score.softcap = 3;
    if (random.Coin()) score.sinks = random.Normals(problem.num_heads, 2.0f);
    if (random.Coin()) score.q_scales = random.Normals(problem.n_q);
    if (random.Coin()) {
      score.mask.values.resize(static_cast<size_t>(problem.n_q * problem.n_kv));
      for (uint8_t &x : score.mask.values) x = random.Coin() ? 1 : 0;
    }
    AttentionCall call = PlainCall();
    call.asked = random.Coin() ? kAskAllOfAttention : kAskLse;
    const Scheduler scheduler(static_cast<uint32_t>(random.Between(1, 4)), RunBackwards);
    if (random.Chance(0.4)) call.scheduler = scheduler.get();
    EXPECT_TRUE(SameBits(Attend(problem, call), Specify(problem))) << "case " << n << " " << NameOf(kind) << " " << Describe(problem);
  }
}

TEST_P(IntegerAttention, OfALayerGiveTheBitsOfTheSpecification) {
  Sample sample;
  for (const Arithmetics &integers : kIntegers) {
    for (const int64_t n : {1, 3, 70, 300}) {
      for (const bool is_small : {true, false}) {
        if (!sample.Takes()) continue;
        LayerProblem problem;
        problem.batch = 2;
        problem.n_q = problem.n_kv = n;
        problem.query_dim = problem.key_dim = problem.value_dim = problem.output_dim = is_small ? 16 : 72;
        problem.num_heads = is_small ? 2 : 6;
        problem.num_kv_heads = problem.num_heads / 2;
        problem.head_dim = problem.head_dim_v = is_small ? 8 : 13;
        problem.is_causal = true;
        Random random(static_cast<uint64_t>(n));
        FillNormal(&random, kAllBiases, true, &problem);
        Set(integers, &problem.score.emplace());
        ExpectTheSpecification(problem);
      }
    }
  }
}

TEST_P(IntegerAttention, OfPackedSequencesGiveTheBitsOfTheSpecification) {
  for (const Arithmetics &integers : kIntegers) {
    PackedSequences packed;
    packed.q = packed.kv = StartsOf({3, 0, 40, 17, 1, 90}, 2);
    AttentionProblem problem = History(integers, 1, packed.q.back() + 3);
    FillOutside(std::numeric_limits<float>::quiet_NaN(), packed, &problem);
    const Scheduler scheduler(3, RunBackwards);
    AttentionCall call = PlainCall();
    call.scheduler = scheduler.get();
    EXPECT_TRUE(SameBits(Attend(problem, packed, call), Specify(problem, packed)));

    LayerProblem layer_problem;
    layer_problem.n_q = layer_problem.n_kv = problem.n_q;
    layer_problem.query_dim = layer_problem.key_dim = layer_problem.value_dim = layer_problem.output_dim = 24;
    layer_problem.num_heads = 4;
    layer_problem.num_kv_heads = 2;
    layer_problem.head_dim = layer_problem.head_dim_v = 7;
    layer_problem.is_causal = true;
    Random random(3);
    FillNormal(&random, kAllBiases, true, &layer_problem);
    Set(integers, &layer_problem.score.emplace());
    const Layer layer = Make(layer_problem);
    LayerCall layer_call;
    layer_call.scheduler = scheduler.get();
    EXPECT_TRUE(SameBits(Forward(layer.get(), layer_problem, packed, layer_call), Specify(layer_problem, packed)));
  }
}

// ---- Any pieces

TEST_P(IntegerAttention, OfAPromptEqualThoseOfAnyPiecesOverACacheOfInt8) {
  for (const Arithmetics &integers : kIntegers) {
    AttentionProblem history = History(integers, 2, 330);
    const Outputs expected = Collected(Attend(history, PlainCall()));
    history.k_type = history.v_type = Storage::kInt8;
    EXPECT_TRUE(SameBits(expected, Collected(Specify(history)))) << "without a cache";
    for (const CacheForm &form : {kContiguous, CacheForm{MHA_CACHE_PAGED, 64}}) {
      for (const int64_t most : {1, 60, 330}) {
        Random random(static_cast<uint64_t>(most));
        EXPECT_TRUE(SameBits(InPieces(history, form, most, &random), expected)) << Describe(form) << " by " << most;
      }
    }
  }
}

TEST_P(IntegerAttention, OverACacheWhoseOtherRowsAreOfAnyTypeGiveTheBitsOfTheSpecification) {
  Sample sample;
  for (const Storage type : kStorageTypes) {
    for (const Arithmetics &integers : kIntegers) {
      if (!sample.Takes()) continue;
      AttentionProblem history = History(integers, 1, 300, 9, 20, 3);
      history.k_type = integers.scores == Arithmetic::kF32 ? type : Storage::kInt8;
      history.v_type = integers.context == Arithmetic::kF32 ? type : Storage::kInt8;
      Random random(8);
      EXPECT_TRUE(SameBits(InPieces(history, {MHA_CACHE_PAGED, 32}, 100, &random), Collected(Specify(history)))) << Describe(history);
    }
  }
}

TEST_P(IntegerAttention, OverARingGiveTheBitsOfTheSpecification) {
  for (const Arithmetics &integers : kIntegers) {
    AttentionProblem history = History(integers, 1, 300);
    history.window_left = 90;
    history.k_type = history.v_type = Storage::kInt8;
    for (const int64_t most : {1, 200}) {
      Random random(4);
      EXPECT_TRUE(SameBits(InPieces(history, {MHA_CACHE_RING, 128}, most, &random), Collected(Specify(history)))) << "by " << most;
    }
  }
}

// One row over so many keys that these are shared out to threads, and chunks go in step.
TEST_P(IntegerAttention, OfTokensOverSeveralChunksGiveTheBitsOfTheSpecificationOnAnyThreads) {
  for (const Arithmetics &integers : kIntegers) {
    for (const int64_t group : {1, 5}) {
      AttentionProblem history = History(integers, 1, 1300, 8, 8, group), tokens = history;
      history.k_type = history.v_type = tokens.k_type = tokens.v_type = Storage::kInt8;
      tokens.n_q = 6;  // the last ones, of which alone the specification is wanted
      tokens.q = SliceRows(history.q, 0, 1300, history.num_heads * 8, 1294, 6);
      const Outputs expected = Specify(tokens);
      Cache cache(CacheConfigOf(history, kContiguous, 2, 1300));
      cache.Append(0, {SliceRows(history.k, 0, 1300, 16, 0, 1294), SliceRows(history.v, 0, 1300, 16, 0, 1294)});
      cache.CopyPrefix(0, 1, 1294);
      Replay replay(history, history.num_heads * 8, &cache, {1});
      replay.SetLength(0, 1294);
      for (uint32_t threads = 1; !replay.Finished(); threads = threads % 4 + 1) {
        const Scheduler scheduler(threads, threads % 2 ? RunBackwards : RunOnThreads);
        AttentionCall call = PlainCall();
        call.scheduler = scheduler.get();
        replay.Step(history, {{0, 1}}, call);
      }
      EXPECT_TRUE(SameBits("y", SliceRows(replay.outputs().y, 0, 1300, history.num_heads * 8, 1294, 6), expected.y)) << group;
    }
  }
}

// ---- The edges of numbers

// Sums as large as they can be, of one sign and of both: nothing wraps around.
TEST_P(IntegerAttention, OfTheGreatestCodesGiveTheBitsOfTheSpecification) {
  for (const Arithmetics &integers : kIntegers) {
    for (const int64_t head_dim : {64, 512, 1024}) {
      for (const size_t period : {1, 2, 3}) {
        AttentionProblem problem = History(integers, 1, 20, head_dim, 8, 3);
        for (size_t i = 0; i < problem.q.size(); i++) problem.q[i] = i % period == 0 ? 3.0f : -3.0f;
        for (size_t i = 0; i < problem.k.size(); i++) problem.k[i] = i % period == 0 ? 5.0f : -5.0f;
        ExpectTheSpecification(problem);
      }
    }
  }
}

TEST_P(IntegerAttention, ANumberThatIsNotFiniteMakesItsRowNanAndNoOther) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const Arithmetics &integers : kIntegers) {
    for (const float odd : {infinity, -infinity, std::numeric_limits<float>::quiet_NaN()}) {
      AttentionProblem problem = History(integers, 1, 9, 6, 4, 1);
      problem.q[4 * 12 + 3] = odd;  // row 4 of head 0
      const Outputs outputs = Run(problem);
      ASSERT_TRUE(SameBits(outputs, Specify(problem)));
      for (int64_t i = 0; i < 9 * 8; i++) ASSERT_EQ(std::isnan(outputs.y[i]), i / 8 == 4 && i % 8 < 4) << i;
    }
  }
}

TEST_P(IntegerAttention, OfTheGreatestWeightsAndValuesGiveTheBitsOfTheSpecification) {
  for (const Arithmetics &integers : kIntegers) {
    for (const size_t period : {1, 2}) {
      AttentionProblem problem = History(integers, 1, 512, 1, 3, 1);
      problem.n_q = 3;
      problem.is_causal = false;
      problem.q.assign(3 * 2, 0.0f);  // all weights are 1
      for (size_t i = 0; i < problem.v.size(); i++) problem.v[i] = i / 6 % period == 0 ? 5.0f : -5.0f;
      ExpectTheSpecification(problem);
    }
  }
}

// Also the rows in which its weight is 0.
TEST_P(IntegerAttention, AValueThatIsNotFiniteMakesTheRowsNanInWhichItTakesPartAndNoOther) {
  for (const Arithmetics &integers : kIntegers) {
    for (const float odd : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
      AttentionProblem problem = History(integers, 1, 40, 6, 5, 1);
      problem.scale = 1000;
      problem.v[20 * 10 + 7] = odd;  // key 20 of head 1
      const Outputs outputs = Run(problem);
      ASSERT_TRUE(SameBits(outputs, Specify(problem)));
      bool has_weights_of_0 = false;
      for (int64_t i = 20; i < 40; i++) has_weights_of_0 = has_weights_of_0 || outputs.attention_weights[(40 + i) * 40 + 20] == 0.0f;
      EXPECT_TRUE(has_weights_of_0);
      for (int64_t i = 0; i < 40 * 10; i++) ASSERT_EQ(std::isnan(outputs.y[i]), i / 10 >= 20 && i % 10 >= 5) << i;
    }
  }
}

// Rows of a tile that attend to no key of a chunk, beside others that attend to such a value: they are computed once more, one by one.
TEST_P(IntegerAttention, AValueThatIsNotFiniteInOneOfSeveralChunksGivesTheBitsOfTheSpecification) {
  for (const Arithmetics &integers : kIntegers) {
    for (const int64_t window : {-1, 3}) {
      AttentionProblem problem = History(integers, 1, 260, 6, 5, 1);
      if (window >= 0) problem.window_left = window;
      for (const int64_t key : {15, 257}) problem.v[key * 10 + 7] = std::numeric_limits<float>::quiet_NaN();
      ASSERT_TRUE(SameBits(Run(problem), Specify(problem)));
    }
  }
}

TEST_P(IntegerAttention, OfMaskedKeysReachNoRow) {
  for (const Arithmetics &integers : kIntegers) {
    AttentionProblem problem = History(integers, 1, 40);
    const Outputs expected = Run(problem, kAskNothing);
    const int64_t width = problem.num_kv_heads * problem.head_dim, width_v = problem.num_kv_heads * problem.head_dim_v;
    std::fill(problem.k.begin() + 30 * width, problem.k.end(), std::numeric_limits<float>::quiet_NaN());
    std::fill(problem.v.begin() + 30 * width_v, problem.v.end(), std::numeric_limits<float>::quiet_NaN());
    const Outputs outputs = Run(problem, kAskNothing);
    const int64_t y_width = problem.num_heads * problem.head_dim_v;
    EXPECT_TRUE(SameBits("y", SliceRows(outputs.y, 0, 40, y_width, 0, 30), SliceRows(expected.y, 0, 40, y_width, 0, 30)));
  }
}

}  // namespace
