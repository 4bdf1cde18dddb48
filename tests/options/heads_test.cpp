// Head scales, of which 0 leaves a head out of a call, and kept_heads, which leaves heads out of a packed layer for good: the bits of the
// specification and of a layer that never had the heads, and that nothing of a head that is left out is read.
#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "support/interface_support.h"
#include "oracle/oracle.h"
#include "support/accuracy.h"
#include "support/attention_test.h"
#include "support/fixtures.h"
#include "support/instruction_sets.h"
#include "support/pruned.h"
#include "support/rounds.h"
#include "support/same_bits.h"
#include "support/schedulers.h"
#include "support/specify.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

const float kNaN = FromBits(0xffd23456u);

// Some are 0, also all of a kv head and all that there are.
std::vector<float> RandomScales(Random *random, int64_t heads) {
  std::vector<float> scales = random->Normals(heads);
  const double zeros = random->Pick({0.0, 0.3, 0.7, 1.0});
  for (float &scale : scales) {
    if (random->Chance(zeros)) scale = random->Coin() ? 0.0f : -0.0f;
  }
  return scales;
}

class HeadScalesTest : public AttentionTest {};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(HeadScalesTest);

TEST_P(HeadScalesTest, RandomCasesEqualTheSpecification) {
  for (int64_t n = 0; n < Rounds(300) && !HasFailure(); n++) {
    Random random(11000 + static_cast<uint64_t>(n));
    AttentionProblem problem;
    problem.num_kv_heads = random.Between(1, 3);
    problem.num_heads = problem.num_kv_heads * random.Pick<int64_t>({1, 2, 3, 5});
    problem.batch = random.Between(1, 3);
    problem.n_q = random.Pick<int64_t>({1, 1, 2, 7, 17, 90});
    problem.n_kv = random.Coin() ? problem.n_q : random.Pick<int64_t>({0, 1, 16, 33, 257, 1100, 2500});
    problem.head_dim = random.Pick<int64_t>({1, 8, 19});
    problem.head_dim_v = random.Pick<int64_t>({1, 8, 19});
    problem.is_causal = random.Coin() && problem.n_q <= problem.n_kv;
    if (random.Chance(0.3)) problem.window_left = random.Pick<int64_t>({0, 5, 300});
    if (random.Chance(0.3)) {
      for (int64_t b = 0; b < problem.batch; b++) {
        problem.q_lengths.push_back(random.Between(0, problem.n_q));
        problem.kv_lengths.push_back(random.Between(0, problem.n_kv));
        problem.q_start.push_back(random.Between(0, problem.n_kv));
      }
      problem.padding_left = random.Coin();
    } else {
      problem.q_start.assign(static_cast<size_t>(problem.batch), std::max<int64_t>(0, problem.n_kv - problem.n_q));
    }
    problem.score = ScoreArrays();
    problem.score->head_scales = RandomScales(&random, problem.num_heads);
    if (random.Coin()) problem.score->alibi_slopes = random.Normals(problem.num_heads, 0.1f);
    if (random.Coin()) problem.score->sinks = random.Normals(problem.num_heads);
    if (random.Chance(0.3)) {
      problem.score->mask.by_head = true;
      problem.score->mask.values.resize(static_cast<size_t>(problem.num_heads * problem.n_q * problem.n_kv));
      for (uint8_t &attends : problem.score->mask.values) attends = random.Coin();
    }
    if (random.Chance(0.3)) {
      problem.gate = GateKind::kSigmoid;
      problem.gate_dim = problem.head_dim_v;
    }
    FillNormal(&random, &problem);
    if (random.Chance(0.2)) problem.v = RandomValues(&random, Values::kSpecial, static_cast<int64_t>(problem.v.size()));
    AttentionCall call = PlainCall();
    call.asked = random.Coin() ? kAskAllOfAttention : kAskNothing;
    const Scheduler scheduler(static_cast<uint32_t>(random.Between(1, 4)), RunBackwards);
    if (random.Chance(0.5)) call.scheduler = scheduler.get();
    SCOPED_TRACE("case " + std::to_string(n));
    EXPECT_TRUE(SameBits(Attend(problem, call), Specify(problem))) << Describe(problem);
  }
}

// A cache takes the keys of all heads, whatever the scales of the call that appends them.
TEST_P(HeadScalesTest, OverACacheAreThoseOfTheWholePrompt) {
  const int64_t n = 300;
  for (const Storage type : {Storage::kF32, Storage::kF16, Storage::kInt8}) {
    Random random(3);
    AttentionSizes sizes;
    sizes.n_q = sizes.n_kv = n;
    sizes.num_heads = 6;
    sizes.num_kv_heads = 3;
    sizes.head_dim = 8;
    sizes.head_dim_v = 12;
    sizes.is_causal = true;
    sizes.k_type = sizes.v_type = type;
    AttentionProblem whole = NormalAttention(sizes);
    whole.score = ScoreArrays();
    whole.score->head_scales = {0.0f, 0.0f, 1.5f, 0.0f, -1.0f, 1.0f};
    const Outputs some = Specify(whole);
    AttentionProblem unscaled = whole;
    unscaled.score.reset();
    const Outputs all = Specify(unscaled);
    Cache cache(CacheConfigOf(whole, {MHA_CACHE_CONTIGUOUS, n}, 1, n));
    for (int64_t done = 0; done < n && !HasFailure();) {
      const int64_t count = std::min<int64_t>(n - done, done == 0 ? 280 : 3);
      AttentionProblem part = Slice(done % 2 == 0 ? whole : unscaled, 0, done, count, 0);
      part.n_kv = count;
      part.k = SliceRows(whole.k, 0, n, whole.num_kv_heads * whole.head_dim, done, count);
      part.v = SliceRows(whole.v, 0, n, whole.num_kv_heads * whole.head_dim_v, done, count);
      AttentionCall call = PlainCall();
      call.asked = kAskNothing;
      call.cache.cache = cache.get();
      EXPECT_TRUE(SameBits(Attend(part, call).y, SliceRows(done % 2 == 0 ? some.y : all.y, 0, n, 6 * 12, done, count))) << done;
      done += count;
    }
  }
}

TEST_P(HeadScalesTest, AreAsExactAsFloatAllows) {
  for (uint64_t seed = 0; seed < 20 && !HasFailure(); seed++) {
    Random random(seed);
    AttentionSizes sizes;
    sizes.n_q = 9;
    sizes.n_kv = random.Pick<int64_t>({9, 300});
    sizes.num_heads = 6;
    sizes.num_kv_heads = 2;
    sizes.head_dim = sizes.head_dim_v = 11;
    AttentionProblem problem = NormalAttention(sizes, seed);
    problem.score = ScoreArrays();
    problem.score->head_scales = RandomScales(&random, 6);
    const Outputs actual = Run(problem);
    WithScoreOptions(problem, 0, [&](const ScoreOptions *options) {
      AttentionShape shape = ShapeOf(problem, 0);
      shape.score = options;
      const auto exact = oracle::AttentionForward<double>(shape, Widen(problem.q), Widen(problem.k), Widen(problem.v));
      const auto bound = oracle::BoundAttention(shape, Widen(problem.q), Widen(problem.k), Widen(problem.v), {}, {}, {}, exact);
      const auto worst = [](const std::vector<float> &x, const std::vector<double> &of, const std::vector<double> &limits) {
        double ratio = 0;
        for (size_t n = 0; n < of.size(); n++) ratio = std::max(ratio, BoundRatio(x[n], of[n], limits[n]));
        return ratio;
      };
      EXPECT_LE(worst(actual.y, exact.context, bound.context), 1.0);
      EXPECT_LE(worst(actual.lse, exact.lse, bound.lse), 1.0);
      EXPECT_LE(worst(actual.attention_weights, exact.weights, bound.weights), 1.0);
    });
  }
}

// The arrays end where the rows of the last heads would begin, next to memory that nobody may touch.
TEST_P(HeadScalesTest, OfZeroLeaveQueriesKeysAndValuesUnread) {
  for (Arithmetic arithmetic : {Arithmetic::kF32, Arithmetic::kInt8, Arithmetic::kInt16}) {
    AttentionSizes sizes;
    sizes.n_q = 5;
    sizes.n_kv = 270;
    sizes.num_heads = 4;
    sizes.num_kv_heads = 2;
    sizes.head_dim = sizes.head_dim_v = 8;
    const AttentionProblem problem = NormalAttention(sizes);
    AttentionCall call = PlainCall();
    call.asked = kAskAllOfAttention;
    call.q = call.k = call.v = kHeadsOutside;
    AttentionData data(problem, call);
    const float scales[] = {0.5f, 2.0f, 0.0f, 0.0f};
    data.score.head_scales = scales;
    data.score.arithmetic = data.score.context_arithmetic = static_cast<uint32_t>(arithmetic);
    data.args.score = &data.score;
    const Outputs expected = data.Compute();
    const auto first_half = [](const void *x, int64_t rows, int64_t heads) {
      Memory half(static_cast<size_t>(rows * heads * 8) * sizeof(float), Place::kBeforeGuard);
      std::memcpy(half.data(), x, half.size());
      return half;
    };
    const Memory q = first_half(data.args.q, 5, 2), k = first_half(data.args.k, 270, 1), v = first_half(data.args.v, 270, 1);
    data.args.q = q.floats();
    data.args.k = k.floats();
    data.args.v = v.floats();
    EXPECT_TRUE(SameBits(data.Compute(), expected));
  }
}

TEST(HeadScales, OfZeroCostNothing) {
  AttentionSizes sizes;
  sizes.n_q = sizes.n_kv = 20;
  sizes.num_heads = sizes.num_kv_heads = 4;
  sizes.head_dim = sizes.head_dim_v = 8;
  AttentionData data(NormalAttention(sizes));
  const auto operations = [&] {
    mha_call_info info = Zeroed<mha_call_info>();
    mha_error error;
    Check(data.Info(&info, &error), error);
    return info.operations;
  };
  const uint64_t all = operations();
  const float scales[] = {1.0f, 0.0f, 0.0f, 2.0f};
  data.score.head_scales = scales;
  data.args.score = &data.score;
  EXPECT_EQ(operations(), all / 2);
}

// ---- Heads that are left out for good

LayerProblem Sizes(int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t head_dim_v, int64_t gate_dim) {
  LayerProblem problem;
  problem.n_q = problem.n_kv = 9;
  problem.query_dim = problem.key_dim = problem.value_dim = 70;
  problem.output_dim = 53;
  problem.num_heads = heads;
  problem.num_kv_heads = kv_heads;
  problem.head_dim = head_dim;
  problem.head_dim_v = head_dim_v;
  problem.gate = gate_dim != 0 ? GateKind::kSigmoid : GateKind::kNone;
  problem.gate_dim = gate_dim;
  return problem;
}

const struct {
  LayerProblem sizes;
  std::vector<uint8_t> kept;
} kPrunings[] = {
    {Sizes(4, 4, 17, 17, 0), {1, 0, 0, 1}},
    {Sizes(4, 4, 16, 16, 16), {0, 7, 1, 0}},
    {Sizes(6, 3, 11, 13, 13), {1, 0, 0, 0, 0, 2}},   // one of each of two kv heads
    {Sizes(6, 2, 24, 20, 1), {1, 0, 1, 0, 255, 1}},  // two of three
    {Sizes(8, 2, 40, 64, 0), {0, 0, 0, 0, 1, 1, 1, 1}},
    {Sizes(3, 1, 5, 90, 0), {0, 1, 0}},
    {Sizes(8, 2, 5, 90, 0), {1, 1, 1, 0, 1, 1, 1, 0}},  // a block of 256 rows of W_O ends within a head before one that is left out
};

TEST(KeptHeads, GiveTheBytesOfALayerThatNeverHadTheOthers) {
  for (const mha_sgemm sgemm : {mha_sgemm{nullptr}, mha_sgemm{PlainSgemm}}) {
    const mha_layer_options options = Options(MHA_INSTRUCTION_SET_AUTO, sgemm);
    for (const auto &[sizes, kept] : kPrunings) {
      for (const Stored stored : {Stored::kF32, Stored::kF16, Stored::kBf16, Stored::kInt8, Stored::kInt4}) {
        for (const bool has_w_o : {true, false}) {
          if (sgemm && stored != Stored::kF32) continue;
          const LayerProblem problem = NormalLayer(sizes, 1, kAllBiases, has_w_o);
          LayerForm form;
          form.weight_type = stored;
          const std::string expected = LayerData(Pruned(problem, kept), Place::kBeforeGuard, form).Pack(&options).Bytes();
          for (const WeightForm weight_form : {WeightForm::kThreeMatrices, WeightForm::kFused, WeightForm::kPerHead}) {
            for (const uint32_t layout : {MHA_LAYOUT_IN_OUT, MHA_LAYOUT_OUT_IN}) {
              for (const bool gate_in_q : {false, true}) {
                form.form = weight_form, form.layout = layout, form.gate_in_q = gate_in_q;
                form.fused_biases = gate_in_q, form.row_gap = gate_in_q ? 3 : 0;
                LayerData data(problem, Place::kBeforeGuard, form);
                data.weights.kept_heads = kept.data();
                ASSERT_EQ(data.Pack(&options).Bytes(), expected)
                    << Describe(problem) << " " << Describe(form) << (sgemm ? " for sgemm" : "");
              }
            }
          }
        }
      }
    }
  }
}

TEST(KeptHeads, ThatAreAllChangeNothing) {
  const LayerProblem problem = NormalLayer(kPrunings[2].sizes);
  LayerData data(problem);
  const std::string expected = data.Pack().Bytes();
  const uint8_t all[] = {1, 1, 3, 1, 1, 1};
  data.weights.kept_heads = all;
  EXPECT_EQ(data.Pack().Bytes(), expected);
}

// Also without pointers to the matrices of heads that are left out.
TEST(KeptHeads, ReadNothingOfTheOthers) {
  const LayerProblem problem = NormalLayer(kPrunings[2].sizes);
  LayerForm form;
  form.form = WeightForm::kPerHead;
  const std::string expected = LayerData(Pruned(problem, kPrunings[2].kept)).Pack().Bytes();
  LayerData data(problem, Place::kBeforeGuard, form);
  data.weights.kept_heads = kPrunings[2].kept.data();
  for (const int64_t head : {1, 2, 3, 4}) data.q_heads[static_cast<size_t>(head)] = nullptr;
  data.k_heads[1] = data.v_heads[1] = nullptr;
  EXPECT_EQ(data.Pack().Bytes(), expected);
  data.q_heads[5] = nullptr;
  mha_error error;
  mha_layer *layer = nullptr;
  EXPECT_EQ(mha_layer_create(&data.config, &data.weights, nullptr, &layer, &error), MHA_ERROR_NULL_POINTER);
  EXPECT_NE(std::string(error.message).find("w_q_heads[5]"), std::string::npos) << error.message;
}

TEST(KeptHeads, AreTheHeadsOfTheShapeWhoseWidthIsThatOfAllHeads) {
  LayerProblem problem = NormalLayer(Sizes(5, 5, 14, 14, 0));
  LayerForm form;
  form.use_defaults = true;  // head_dim is query_dim / 5
  LayerData data(problem, Place::kAnywhere, form);
  ASSERT_EQ(data.config.head_dim, 0);
  const uint8_t kept[] = {0, 1, 1, 0, 1};
  data.weights.kept_heads = kept;
  const Layer layer = Create(data);
  mha_layer_config shape = Zeroed<mha_layer_config>();
  ASSERT_EQ(mha_layer_shape(layer.get(), &shape, nullptr), MHA_OK);
  EXPECT_EQ(shape.num_heads, 3);
  EXPECT_EQ(shape.num_kv_heads, 3);
  EXPECT_EQ(shape.head_dim, 14);
  EXPECT_EQ(shape.d_out, 42);
  EXPECT_EQ(shape.query_dim, 70);
  EXPECT_EQ(shape.scale, 1.0f / std::sqrt(14.0f));
}

class KeptHeadsTest : public AttentionTest {};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(KeptHeadsTest);

TEST_P(KeptHeadsTest, GiveTheBitsOfTheSpecificationAndOfAHeadMask) {
  for (const auto &[sizes, kept] : kPrunings) {
    const LayerProblem problem = NormalLayer(sizes), left = Pruned(problem, kept);
    LayerData data(problem, Place::kAnywhere);
    data.weights.kept_heads = kept.data();
    const Layer layer = Create(data, instruction_set());
    const std::vector<float> y = Forward(layer.get(), left).y;
    EXPECT_TRUE(SameBits(y, Specify(left).y)) << Describe(left);
    // A head that a call leaves out adds zeros to the sums of W_O. These are the same bits as long as the sums have one block of terms.
    LayerProblem masked = problem;
    masked.score = ScoreArrays();
    for (const uint8_t stays : kept) masked.score->head_scales.push_back(stays ? 1.0f : 0.0f);
    ExpectTheSpecification(masked);
    if (problem.merged_width() <= 256) {
      EXPECT_TRUE(SameBits(Forward(Make(problem).get(), masked).y, y)) << Describe(left);
    }
  }
}

}  // namespace
