// Weights kept in fewer bits, and projections in integers: every kernel matches the specification
// bit for bit, for every type, way of giving weights and number of rows; what is refused; the
// packed format; and how far the results are from those of the weights as given.
#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "oracle/oracle.h"
#include "spec/spec.h"
#include "support/fixtures.h"
#include "support/given_weights.h"
#include "support/instruction_sets.h"
#include "support/interface_support.h"
#include "support/rounds.h"
#include "support/same_bits.h"
#include "support/schedulers.h"
#include "support/specify.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

constexpr float kInfinity = std::numeric_limits<float>::infinity();
const float kNaN = std::numeric_limits<float>::quiet_NaN();

LayerProblem RandomProblem(Random *random, int64_t n, int64_t dim, int64_t heads, int64_t kv_heads,
                           int64_t head_dim, int64_t head_dim_v, int64_t output_dim) {
  LayerProblem problem;
  problem.n_q = problem.n_kv = n;
  problem.num_heads = heads;
  problem.num_kv_heads = kv_heads;
  problem.head_dim = head_dim;
  problem.head_dim_v = head_dim_v;
  problem.query_dim = problem.key_dim = problem.value_dim = dim;
  problem.output_dim = output_dim;
  problem.is_causal = random->Chance(0.5);
  FillNormal(random, static_cast<uint32_t>(random->Between(0, 15)), true, &problem);
  return problem;
}

LayerForm FormOf(Stored stored, uint32_t instruction_set = MHA_INSTRUCTION_SET_AUTO) {
  LayerForm form;
  form.instruction_set = instruction_set;
  form.weight_type = stored;
  return form;
}

// The problem given as floats, to be kept as `stored`.
LayerData GivenAsFloats(const LayerProblem &problem, Stored stored) {
  return LayerData(problem, Place::kAnywhere, FormOf(stored));
}

// ---- The bits

class StoredWeights : public InstructionSetTest {
 protected:
  Layer Make(const LayerProblem &problem, Stored stored) const {
    return MakeLayer(problem, FormOf(stored, instruction_set()));
  }

  void ExpectTheSpecificationForEveryKind(LayerProblem problem) const {
    for (const WeightFormat &kind : kWeightFormats) {
      problem.arithmetic = kind.arithmetic;
      const Layer layer = Make(problem, kind.stored);
      ASSERT_TRUE(SameBits(Forward(layer.get(), problem), Specify(Converted(problem, kind.stored))))
          << kind.name << " " << Describe(problem);
    }
  }

  // Of a problem whose weights are numbers or codes already.
  void ExpectTheSpecificationAsGiven(const LayerProblem &stored, uint32_t layout, bool is_fused,
                                     int64_t gap) const {
    const Layer layer = MakeLayer(GivenAs(stored, layout, is_fused, gap), instruction_set());
    ASSERT_TRUE(SameBits(Forward(layer.get(), stored), Specify(stored)))
        << "type " << static_cast<uint32_t>(stored.stored) << " layout " << layout << " fused "
        << is_fused << " gap " << gap << " " << Describe(stored);
  }
};
MHA_INSTANTIATE_FOR_ALL_INSTRUCTION_SETS(StoredWeights);

// Depths around the groups of 32 and 64 and the blocks of 256, odd and even; columns that fill
// panels of 48 and ones that do not.
TEST_P(StoredWeights, ForEveryNumberOfRowsEqualTheSpecification) {
  Random random(1);
  Sample sample;
  const struct {
    int64_t dim, heads, kv_heads, head_dim, head_dim_v, output_dim;
  } shapes[] = {{1, 1, 1, 1, 1, 1},      {31, 2, 1, 12, 7, 49},     {63, 2, 1, 12, 12, 49},
                {64, 3, 3, 16, 16, 48},  {257, 2, 1, 100, 31, 200}, {289, 2, 1, 26, 17, 289},
                {321, 2, 2, 24, 26, 100}};
  for (const auto &s : shapes) {
    for (int64_t n = 1; n <= 40; n += n < 14 ? 1 : 5) {
      if (!sample.Takes()) continue;
      ExpectTheSpecificationForEveryKind(RandomProblem(&random, n, s.dim, s.heads, s.kv_heads,
                                                       s.head_dim, s.head_dim_v, s.output_dim));
      if (HasFailure()) return;
    }
  }
}

// Some terms are widened at once; what is left of a group, and of a matrix, may be any number of
// them.
TEST_P(StoredWeights, OfAnyDepthEqualTheSpecification) {
  constexpr int64_t rows[] = {1, 2, 3, 6, 8};
  Random random(5);
  for (int64_t dim = 1; dim <= 132; dim++) {
    for (const int64_t n : rows) {
      // One number of rows to a depth beyond two groups, and of an emulated build.
      if ((dim > 70 || RoundsFactor() < 1) && n != rows[dim % 5]) continue;
      ExpectTheSpecificationForEveryKind(RandomProblem(&random, n, dim, 1, 1, 10, dim, 50));
      if (HasFailure()) return;
    }
  }
}

// Matrices above 3 MiB, as these are in 8 bits too, may be read in other ways. The last block has
// one term, the last panel 9 columns.
TEST_P(StoredWeights, OfLargeMatricesEqualTheSpecification) {
  Random random(3);
  LayerProblem problem = RandomProblem(&random, 4, 2049, 15, 1, 103, 5, 7);
  problem.is_causal = true;
  for (const WeightFormat &kind : kWeightFormats) {
    problem.arithmetic = kind.arithmetic;
    const Layer layer = Make(problem, kind.stored);
    const Outputs expected = Specify(Converted(problem, kind.stored));
    for (const int64_t n : {1, 2, 3, 4}) {
      EXPECT_TRUE(SameBits(Forward(layer.get(), Slice(problem, 0, 0, n, n)),
                           Slice(expected, problem, problem.y_width(), 0, 0, n, n)))
          << kind.name << ", " << n << " rows";
    }
  }
}

// Without taps, results go straight to their rows.
TEST_P(StoredWeights, ForManyRowsAndThreadsEqualTheSpecification) {
  Random random(2);
  for (const int64_t n : {143, 144, 145, 300}) {
    LayerProblem problem = RandomProblem(&random, n, 70, 2, 1, 40, 33, 60);
    problem.batch = n == 300 ? 1 : 2;
    problem.query = random.Normals(problem.batch * n * problem.query_dim);
    for (const WeightFormat &kind : kWeightFormats) {
      problem.arithmetic = kind.arithmetic;
      const Layer layer = Make(problem, kind.stored);
      const std::vector<float> expected = Specify(Converted(problem, kind.stored)).y;
      for (const uint32_t threads : {1u, 3u}) {
        const Scheduler scheduler(threads, RunBackwards);
        LayerCall call;
        call.scheduler = scheduler.get();
        call.asked = threads == 1 ? kAskNothing : kAskAll;
        ASSERT_TRUE(SameBits("y", Forward(layer.get(), problem, call).y, expected))
            << kind.name << " " << threads << " threads " << Describe(problem);
      }
    }
  }
}

TEST_P(StoredWeights, OfEveryKindOfNumberEqualTheSpecification) {
  Random random(4);
  for (int round = 0; round < 12; round++) {
    LayerProblem problem = RandomProblem(&random, 1 + round % 7, 90, 2, 2, 30, 30, 70);
    const std::vector<float> tiny = {0x1p-101f, 0x1.fffffep-101f, 0x1p-100f, 3e-8f, -0x1p-14f,
                                     -0.0f,     0x1p-25f},
                             odd = {0x1p-149f, -0x1p-120f, 65504.0f, -65519.9f, 0x1p-101f,
                                    3e-8f,     -0x1p-14f,  -0.0f,    0x1p-25f};
    for (std::vector<float> *w : {&problem.w_q, &problem.w_k, &problem.w_v, &problem.w_o}) {
      for (float &x : *w) {
        if (round % 3 == 0 && random.Chance(0.02)) x = random.Pick({kNaN, kInfinity, -kInfinity});
        if (round % 3 == 1) x = random.Pick(tiny) * (random.Coin() ? 1.0f : -1.0f);  // all of them
        if (round % 3 == 2 && random.Chance(0.3)) x = random.Pick(odd);
      }
    }
    ExpectTheSpecificationForEveryKind(problem);
    if (HasFailure()) return;
  }
}

// Tiny inputs become 0 as integers, the largest finite ones do not overflow.
TEST_P(StoredWeights, WithInputsOfEverySizeEqualTheSpecification) {
  Random random(12);
  LayerProblem problem = RandomProblem(&random, 12, 200, 2, 1, 10, 10, 40);
  const float sizes[] = {0.0f,     0x1p-149f, 0x1.fffffep-101f, 0x1p-100f,
                         0x1p-60f, 1.0f,      0x1p60f,          0x1p127f};
  for (size_t i = 0; i < 10 * 200; i++) problem.query[i] *= sizes[i / 64 % 8];
  problem.query[5] = std::numeric_limits<float>::max();
  problem.query[10 * 200 + 149] = kNaN;
  problem.query[11 * 200 + 199] = -kInfinity;
  ExpectTheSpecificationForEveryKind(problem);
}

// A number that is not finite makes its row NaN, and no other.
TEST(NotANumber, InAnInputOfIntegersReachesItsOwnRow) {
  for (const float odd : {kInfinity, -kInfinity, kNaN}) {
    Random random(11);
    LayerProblem problem = RandomProblem(&random, 7, 150, 2, 1, 10, 10, 40);
    problem.query[4 * 150 + 149] = odd;
    for (const WeightFormat &kind : kWeightFormats) {
      if (!IsOfIntegers(kind)) continue;
      problem.arithmetic = kind.arithmetic;
      const std::vector<float> q = Specify(Converted(problem, kind.stored)).q;
      for (size_t i = 0; i < q.size(); i++)
        ASSERT_EQ(std::isnan(q[i]), i / 20 == 4) << kind.name << " row " << i / 20;
    }
  }
}

// Sums as large as they can be: all weights -128, which only a quantiser makes, or 127, and all
// inputs the largest of their group, of one sign, or with the other one in those of four terms that
// a part of a column's sums has. Nothing saturates.
TEST_P(StoredWeights, OfTheGreatestCodesEqualTheSpecification) {
  Random random(7);
  LayerProblem problem = RandomProblem(&random, 9, 256, 2, 1, 24, 24, 64);
  for (const float sign : {1.0f, -1.0f}) {
    for (const size_t others : {0b0000u, 0b1010u, 0b1100u, 0b1110u}) {
      for (size_t i = 0; i < problem.query.size(); i++)
        problem.query[i] = (others >> i % 4 & 1 ? -3.0f : 3.0f) * sign;
      for (const WeightFormat &kind : kWeightFormats) {
        if (!IsOfIntegers(kind)) continue;
        problem.arithmetic = kind.arithmetic;
        LayerProblem converted = Converted(problem, kind.stored);
        const float lowest = kind.stored == Stored::kInt8 ? -128.0f : -8.0f,
                    greatest = -1.0f - lowest;
        std::fill(converted.w_q.begin(), converted.w_q.end(), lowest);
        std::fill(converted.w_k.begin(), converted.w_k.end(), greatest);
        for (size_t i = 0; i < converted.w_v.size(); i++)
          converted.w_v[i] = i % 3 ? lowest : greatest;
        ExpectTheSpecificationAsGiven(converted, MHA_LAYOUT_OUT_IN, false, 0);
        if (HasFailure()) return;
      }
    }
  }
}

// Sums of 16,384 such terms, which a float no longer holds exactly; and scales at their borders,
// which make them infinite, subnormal or 0.
TEST_P(StoredWeights, OfManyTermsAndTheGreatestScalesEqualTheSpecification) {
  constexpr float kMost = std::numeric_limits<float>::max();
  constexpr float kScales[] = {1.0f,      kMost,      -kMost, 0x1p-126f,
                               0x1p-149f, -0x1p-149f, 0.0f,   kInfinity};
  for (const int64_t dim : {64, 16384}) {
    Random random(8);
    LayerProblem problem = RandomProblem(&random, 3, dim, 1, 1, 24, 24, 24);
    for (int64_t i = 0; i < 3 * dim; i++)
      problem.query[i] = i / dim == 0   ? 3.0f
                         : i / dim == 1 ? -kMost
                         : i % 3        ? 0x1p-100f
                                        : -0x1p-100f;
    for (const WeightFormat &kind : kWeightFormats) {
      if (!IsOfIntegers(kind)) continue;
      problem.arithmetic = kind.arithmetic;
      LayerProblem converted = Converted(problem, kind.stored);
      for (std::vector<float> *w : {&converted.w_q, &converted.w_k}) {
        std::fill(w->begin(), w->end(),
                  w == &converted.w_k            ? 7.0f
                  : kind.stored == Stored::kInt8 ? -128.0f
                                                 : -8.0f);
      }
      for (std::vector<float> *scales : {&converted.s_q, &converted.s_k}) {
        for (size_t i = 0; i < scales->size(); i++) (*scales)[i] = kScales[i % 24 % 8];
      }
      ExpectTheSpecificationAsGiven(converted, MHA_LAYOUT_OUT_IN, false, 0);
      if (HasFailure()) return;
    }
  }
}

// ---- Groups

constexpr int64_t kGroups[] = {16, 32, 64, 128};

// Depths of one group and of many, whose last group is short or not; more than the 64 groups whose
// offsets are one chain.
TEST_P(StoredWeights, InGroupsEqualTheSpecification) {
  Random random(15);
  Sample sample;
  int round = 0;
  for (const int64_t dim : {1, 15, 17, 33, 66, 95, 127, 128, 129, 257, 1100}) {
    for (const WeightFormat &kind : GroupFormats()) {
      for (const int64_t group : kGroups) {
        if (!sample.Takes()) continue;
        const int64_t n = dim > 300 ? 3 : round % 3 == 0 ? 1 + round % 2 : random.Between(1, 40);
        LayerProblem problem = RandomProblem(&random, n, dim, 2, 1, 11, dim > 300 ? 9 : 25, 61);
        problem.arithmetic = kind.arithmetic;
        problem.group = group;
        if (kind.stored <= Stored::kInt4) {
          const Layer layer = Make(problem, kind.stored);
          ASSERT_TRUE(
              SameBits(Forward(layer.get(), problem), Specify(Converted(problem, kind.stored))))
              << kind.name << " group " << group << " " << Describe(problem);
        }
        const bool is_fused = round++ % 4 == 0;
        const auto offsets =
            static_cast<uint32_t>(is_fused ? 7 + random.Between(0, 1) * 8 : random.Between(0, 15));
        LayerProblem given =
            InGroups(&random, problem, kind.stored, group, offsets, AnyScales(&random, kind));
        for (std::vector<float> *numbers : {&given.s_q, &given.o_o}) {
          if (random.Chance(0.2) && given.scale_type != MHA_TYPE_INT8)
            MakeSpecial(&random, Values::kAny, 1, numbers);
          if (given.scale_type == MHA_TYPE_F16) *numbers = Rounded(Storage::kF16, *numbers);
          if (given.scale_type == MHA_TYPE_INT8 && !numbers->empty() && random.Chance(0.2))
            numbers->back() = random.Pick({kNaN, -kInfinity, 0x1p-24f, -0.0f, 65504.0f});
        }
        const uint32_t layout =
            kind.stored != Stored::kInt4 && random.Coin() ? MHA_LAYOUT_IN_OUT : MHA_LAYOUT_OUT_IN;
        ExpectTheSpecificationAsGiven(given, layout, is_fused, 2 * (round % 2));
        if (HasFailure()) return;
      }
    }
  }
}

// Sums as large as they can be, in groups too.
TEST_P(StoredWeights, InGroupsOfTheGreatestCodesEqualTheSpecification) {
  Random random(16);
  for (const int64_t n : {1, 9}) {
    LayerProblem problem = RandomProblem(&random, n, 256, 2, 1, 24, 24, 64);
    for (size_t i = 0; i < problem.query.size(); i++) problem.query[i] = i / 300 % 2 ? 3.0f : -3.0f;
    for (const WeightFormat &kind : GroupFormats()) {
      if (!IsOfIntegers(kind)) continue;
      problem.arithmetic = kind.arithmetic;
      for (const int64_t group : kGroups) {
        LayerProblem given = InGroups(&random, problem, kind.stored, group, 5, MHA_TYPE_F32);
        const float centre = CentreOf(kind.stored), lowest = centre != 0 ? -centre : -128.0f;
        std::fill(given.w_q.begin(), given.w_q.end(), lowest + centre);
        std::fill(given.w_k.begin(), given.w_k.end(), lowest);
        std::fill(given.w_v.begin(), given.w_v.end(), centre != 0 ? 2 * centre - 1 : 127.0f);
        ExpectTheSpecificationAsGiven(given, MHA_LAYOUT_OUT_IN, false, 0);
        if (HasFailure()) return;
      }
    }
  }
}

// One and two rows pass several panels side by side or in step, of an odd depth too.
TEST_P(StoredWeights, InGroupsOfManyRowsOrColumnsAndThreadsEqualTheSpecification) {
  Random random(17);
  const std::tuple<int, int, uint32_t> shapes[] = {
      {150, 60, MHA_TYPE_F16}, {150, 60, MHA_TYPE_INT8}, {1, 250, MHA_TYPE_F16},
      {1, 250, MHA_TYPE_F32},  {1, 250, MHA_TYPE_INT8},  {2, 250, MHA_TYPE_F16},
      {2, 250, MHA_TYPE_F32},  {2, 250, MHA_TYPE_INT8}};
  for (const auto &[n, output_dim, scale_type] : shapes) {
    for (const WeightFormat &kind : GroupFormats()) {
      const bool are_in_blocks = scale_type == MHA_TYPE_INT8;
      if (are_in_blocks && !IsOfIntegers(kind)) continue;
      LayerProblem problem = are_in_blocks
                                 ? RandomProblem(&random, n, 519, 4, 1, 50, 33, output_dim)
                                 : RandomProblem(&random, n, 71, 2, 1, 50, 33, output_dim);
      problem.arithmetic = kind.arithmetic;
      const LayerProblem given = InGroups(&random, problem, kind.stored, 16, 15, scale_type);
      const Layer layer = MakeLayer(GivenAs(given, MHA_LAYOUT_OUT_IN, false, 0), instruction_set());
      const std::vector<float> expected = Specify(given).y;
      for (const uint32_t threads : {1u, 3u}) {
        const Scheduler scheduler(threads, RunBackwards);
        LayerCall call;
        call.scheduler = scheduler.get();
        call.asked = kAskNothing;
        ASSERT_TRUE(SameBits("y", Forward(layer.get(), given, call).y, expected))
            << kind.name << " " << n << " rows, " << threads << " threads";
      }
    }
  }
}

// ---- Weights that are not floats when they are given

// What a quantiser may also give: the code -128, and scales that are negative or of its own choice.
TEST_P(StoredWeights, AreTakenAsTheyAreGiven) {
  Random random(5);
  for (const int64_t dim : {66, 95}) {
    const LayerProblem problem = RandomProblem(&random, 6, dim, 3, 1, 20, 20, 52);
    for (const Stored stored : {Stored::kF16, Stored::kBf16, Stored::kInt8, Stored::kInt4}) {
      LayerProblem converted = Converted(problem, stored);
      if (stored == Stored::kInt8) converted.w_q[3] = -128;
      if (!converted.s_k.empty()) converted.s_k[1] = -3.0f * converted.s_k[1];
      const float scales[] = {kInfinity, FromBits(0xffd23456u), FromBits(0x7f812345u), 0x1p-140f,
                              -0.0f};
      for (size_t i = 0; i < 5 && !converted.s_o.empty(); i++) converted.s_o[9 * i] = scales[i];
      for (const uint32_t layout : {MHA_LAYOUT_IN_OUT, MHA_LAYOUT_OUT_IN}) {
        if (stored == Stored::kInt4 && layout == MHA_LAYOUT_IN_OUT) continue;
        for (const bool is_fused : {false, true}) {
          for (const int64_t gap : {0, 6})
            ExpectTheSpecificationAsGiven(converted, layout, is_fused, gap);
        }
      }
      if (HasFailure()) return;
    }
  }
}

TEST_P(StoredWeights, AreConvertedFrom16BitsToEveryType) {
  Random random(6);
  const LayerProblem problem = RandomProblem(&random, 6, 75, 2, 2, 20, 20, 30);
  for (const Stored from : {Stored::kF16, Stored::kBf16}) {
    const LayerProblem narrow = Converted(problem, from);
    for (const Stored to : kWeightTypes) {
      LayerData given = GivenAs(narrow, MHA_LAYOUT_OUT_IN, false, 0);
      given.config.format.type = static_cast<uint32_t>(to);
      const Layer layer = MakeLayer(std::move(given), instruction_set());
      ASSERT_TRUE(SameBits(Forward(layer.get(), problem), Specify(Converted(narrow, to))))
          << static_cast<uint32_t>(from) << " to " << static_cast<uint32_t>(to);
    }
  }
}

TEST(InstructionSetsForIntegers, ThatTheMachineLacksAreRefusedByName) {
  Random random(13);
  LayerProblem problem = RandomProblem(&random, 1, 8, 1, 1, 8, 8, 8);
  problem.arithmetic = Arithmetic::kInt8;
  const LayerData given = GivenAsFloats(problem, Stored::kInt8);
  for (uint32_t set = 1; mha_instruction_set_name(set) != std::string("unknown"); set++) {
    const mha_layer_options options = Options(set);
    mha_layer *layer = nullptr;
    mha_error error;
    const mha_status status =
        mha_layer_create(&given.config, &given.weights, &options, &layer, &error);
    if (mha_instruction_sets() >> set & 1) {
      EXPECT_EQ(status, MHA_OK) << error.message;
    } else {
      EXPECT_EQ(status, MHA_ERROR_INSTRUCTION_SET);
      EXPECT_NE(std::string(error.message).find(mha_instruction_set_name(set)), std::string::npos)
          << error.message;
    }
    mha_layer_destroy(layer);
  }
}

// ---- The packed format

TEST(PackedWeights, AreALayerWithoutACopyForEveryKind) {
  Random random(11);
  LayerProblem problem = RandomProblem(&random, 3, 99, 3, 1, 21, 20, 50);
  for (const WeightFormat &kind : kWeightFormats) {
    SCOPED_TRACE(kind.name);
    problem.arithmetic = kind.arithmetic;
    const LayerData given = GivenAsFloats(problem, kind.stored);
    const Memory packed = given.Pack(nullptr, 0x11), again = given.Pack(nullptr, 0xee);
    EXPECT_EQ(packed.Bytes(), again.Bytes()) << "bytes that nobody wrote";
    if (HasCodes(kind.stored)) {
      const LayerProblem codes = Converted(problem, kind.stored);
      EXPECT_EQ(GivenAs(codes, MHA_LAYOUT_OUT_IN, false, 0).Pack().Bytes(), packed.Bytes())
          << "codes that are given have the bytes of those that packing makes";
    }
    EXPECT_EQ(packed.size() % 64, 0u);
    EXPECT_EQ(mha_layer_verify(packed.data(), packed.size(), nullptr), MHA_OK);
    const View view(packed);
    ASSERT_EQ(view.status, MHA_OK) << view.error.message;
    EXPECT_TRUE(SameBits(Forward(view.layer, problem), Specify(Converted(problem, kind.stored))));
    mha_layer_config shape = Zeroed<mha_layer_config>();
    ASSERT_EQ(mha_layer_shape(view.layer, &shape, nullptr), MHA_OK);
    EXPECT_EQ(shape.format.type, static_cast<uint32_t>(kind.stored));
    EXPECT_EQ(shape.format.arithmetic, static_cast<uint32_t>(kind.arithmetic));
    LayerCall call;
    call.asked = kAskNothing;
    mha_call_info info = Zeroed<mha_call_info>();
    ASSERT_EQ(ForwardData(view.layer, problem, call).Info(&info, nullptr), MHA_OK);
    EXPECT_EQ(info.packed_bytes, packed.size());
    EXPECT_EQ(info.bytes, packed.size() + sizeof(float) * 3 * (99 + 50))
        << "what is read is what is packed";
  }
}

TEST(PackedWeights, InGroupsAreALayerWithoutACopy) {
  Random random(18);
  LayerProblem problem = RandomProblem(&random, 3, 99, 3, 1, 21, 20, 50);
  for (const WeightFormat &kind : GroupFormats()) {
    problem.arithmetic = kind.arithmetic;
    for (const int64_t group : kGroups) {
      for (const uint32_t scale_type : {MHA_TYPE_F32, MHA_TYPE_F16, MHA_TYPE_INT8}) {
        if (scale_type == MHA_TYPE_INT8 && !IsOfIntegers(kind)) continue;
        SCOPED_TRACE(kind.name + std::string(" group ") + std::to_string(group));
        const LayerProblem stored = InGroups(&random, problem, kind.stored, group, 9, scale_type);
        const LayerData given = GivenAs(stored, MHA_LAYOUT_OUT_IN, false, 0);
        const Memory packed = given.Pack(nullptr, 0x11), again = given.Pack(nullptr, 0xee);
        EXPECT_EQ(packed.Bytes(), again.Bytes()) << "bytes that nobody wrote";
        EXPECT_EQ(mha_layer_verify(packed.data(), packed.size(), nullptr), MHA_OK);
        const View view(packed);
        ASSERT_EQ(view.status, MHA_OK) << view.error.message;
        EXPECT_TRUE(SameBits(Forward(view.layer, stored), Specify(stored)));
        mha_layer_config shape = Zeroed<mha_layer_config>();
        ASSERT_EQ(mha_layer_shape(view.layer, &shape, nullptr), MHA_OK);
        EXPECT_EQ(shape.format.group_size, group);
        EXPECT_EQ(shape.format.scale_type, scale_type);
        LayerCall call;
        call.asked = kAskNothing;
        mha_call_info info = Zeroed<mha_call_info>();
        ASSERT_EQ(ForwardData(view.layer, stored, call).Info(&info, nullptr), MHA_OK);
        EXPECT_EQ(info.bytes, packed.size() + sizeof(float) * 3 * (99 + 50));
      }
    }
  }
}

TEST(PackedWeights, DoNotDependOnTheHalfOfAByteAfterTheLastCode) {
  const float scale = 1;
  std::vector<std::string> packed;
  for (const unsigned char last : {0x03, 0xf3}) {
    const unsigned char codes[] = {0x21, last};
    mha_linear_weights weights = Zeroed<mha_linear_weights>();
    weights.input_dim = 3;
    weights.output_dim = 1;
    weights.w.data = codes;
    weights.w.scales = &scale;
    weights.type = weights.format.type = MHA_TYPE_INT4;
    weights.layout = MHA_LAYOUT_OUT_IN;
    size_t bytes = 0;
    ASSERT_EQ(mha_linear_pack_size(&weights, nullptr, &bytes, nullptr), MHA_OK);
    const Memory buffer(bytes, Place::kBeforeGuard, 64);
    ASSERT_EQ(mha_linear_pack(&weights, nullptr, buffer.data(), bytes, nullptr), MHA_OK);
    packed.push_back(buffer.Bytes());
  }
  EXPECT_EQ(packed[0], packed[1]);
}

TEST(PackedWeights, TakeTheBytesOfTheirType) {
  Random random(12);
  constexpr int64_t dim = 1024;
  LayerProblem problem = RandomProblem(&random, 1, dim, 16, 16, 64, 64, dim);
  for (const WeightFormat &kind : kWeightFormats) {
    problem.arithmetic = kind.arithmetic;
    const auto bytes = static_cast<double>(GivenAsFloats(problem, kind.stored).PackSize());
    // 1024 columns are 22 panels of 48, and there are biases and a header.
    const double scales = kind.stored == Stored::kInt8 ? 32.0 / dim : kind.stored == Stored::kInt4;
    const double bits = static_cast<double>(kTypeBits[static_cast<uint32_t>(kind.stored)]) + scales;
    const double ideal = bits / 8 * 4 * dim * dim * (22.0 * 48.0 / 1024.0);
    EXPECT_GE(bytes, ideal) << kind.name;
    EXPECT_LE(bytes, ideal + 32 * 1024) << kind.name;
  }
}

TEST(PackedWeights, WithAnyDamagedByteAreFoundByVerify) {
  Random random(13);
  LayerProblem problem = RandomProblem(&random, 1, 70, 2, 2, 30, 30, 60);
  for (const Stored stored : kWeightTypes) {
    const Memory packed = GivenAsFloats(problem, stored).Pack();
    for (int64_t at = 256; at < static_cast<int64_t>(packed.size()); at += random.Between(1, 40)) {
      const auto flip = static_cast<unsigned char>(1 << random.Between(0, 7));
      packed.data()[at] ^= flip;
      ASSERT_EQ(mha_layer_verify(packed.data(), packed.size(), nullptr), MHA_ERROR_PACKED_CHECKSUM)
          << "type " << static_cast<uint32_t>(stored) << " byte " << at;
      packed.data()[at] ^= flip;
    }
    EXPECT_EQ(mha_layer_verify(packed.data(), packed.size(), nullptr), MHA_OK)
        << "type " << static_cast<uint32_t>(stored);
  }
}

// ---- What is refused

void ExpectRefused(const LayerData &given, const mha_layer_options *options,
                   const Expected &expected) {
  Memory buffer(1 << 20, Place::kAnywhere);
  buffer.Fill(0x5a);
  ExpectFails(
      [&](mha_error *error) {
        return mha_layer_pack(&given.config, &given.weights, options, buffer.data(), buffer.size(),
                              error);
      },
      expected);
  EXPECT_TRUE(buffer.Holds(0x5a)) << "something was written";
  mha_layer *layer = nullptr;
  ExpectFails(
      [&](mha_error *error) {
        layer = reinterpret_cast<mha_layer *>(&buffer);
        return mha_layer_create(&given.config, &given.weights, options, &layer, error);
      },
      expected);
  EXPECT_EQ(layer, nullptr);
}

class RefusedWeights : public testing::Test {
 protected:
  RefusedWeights() {
    Random random(14);
    problem_ = RandomProblem(&random, 1, 20, 2, 1, 8, 8, 12);
  }
  LayerData Coded(Stored stored) {
    return GivenAs(Converted(problem_, stored), MHA_LAYOUT_OUT_IN, false, 0);
  }

  LayerProblem problem_;
};

TEST_F(RefusedWeights, ThatF16CannotHoldAreNamedAndNothingIsWritten) {
  problem_.w_k[5 * 8 + 3] = -65520.0f;
  ExpectRefused(GivenAsFloats(problem_, Stored::kF16), nullptr,
                {MHA_ERROR_OUT_OF_RANGE, {2}, {"w_k[5][3]", "-65520", "65504"}});
  problem_.w_k[5 * 8 + 3] = 65519.996f;
  GivenAsFloats(problem_, Stored::kF16).Pack();  // the last one that rounds down

  problem_.w_o[7] = 1e9f;  // [in, out], of 12 columns: row 0
  ExpectRefused(GivenAsFloats(problem_, Stored::kF16), nullptr,
                {MHA_ERROR_OUT_OF_RANGE, {2}, {"w_o[0][7]", "1e+09"}});
  for (const Stored stored : {Stored::kF32, Stored::kBf16, Stored::kInt8, Stored::kInt4})
    GivenAsFloats(problem_, stored).Pack();
  problem_.w_o[7] = std::numeric_limits<float>::infinity();  // is not finite to begin with
  GivenAsFloats(problem_, Stored::kF16).Pack();

  // bf16 has the range of float.
  problem_.w_o[7] = problem_.w_k[5 * 8 + 3] = 0.0f;
  LayerProblem narrow = Converted(problem_, Stored::kBf16);
  narrow.w_v[2 * 8 + 1] = 0x1p16f;
  LayerData given = GivenAs(narrow, MHA_LAYOUT_OUT_IN, false, 0);
  given.config.format.type = MHA_TYPE_F16;
  ExpectRefused(given, nullptr, {MHA_ERROR_OUT_OF_RANGE, {2}, {"w_v[1][2]", "65536"}});
  LayerData fused = GivenAs(narrow, MHA_LAYOUT_IN_OUT, true, 0);
  fused.config.format.type = MHA_TYPE_F16;
  ExpectRefused(fused, nullptr, {MHA_ERROR_OUT_OF_RANGE, {2}, {"w_qkv[2][25]"}});
}

TEST_F(RefusedWeights, CodesAreNotConverted) {
  for (const Stored stored : {Stored::kInt8, Stored::kInt4}) {
    for (const Stored kept : kWeightTypes) {
      if (kept == stored) continue;
      LayerData given = Coded(stored);
      given.config.format.type = static_cast<uint32_t>(kept);
      ExpectRefused(given, nullptr,
                    {MHA_ERROR_INVALID_VALUE,
                     {2},
                     {"format.type", stored == Stored::kInt8 ? "MHA_TYPE_INT8" : "MHA_TYPE_INT4"}});
    }
  }
}

TEST_F(RefusedWeights, CodesNeedTheirScalesAndOnlyTheyHaveSome) {
  const float scale = 1.0f;
  for (const Stored stored : {Stored::kInt8, Stored::kInt4}) {
    LayerData given = Coded(stored);
    given.weights.w_v.scales = nullptr;
    ExpectRefused(given, nullptr, {MHA_ERROR_NULL_POINTER, {2}, {"w_v.scales"}});
    given = Coded(stored);
    given.weights.w_o.scales = nullptr;
    ExpectRefused(given, nullptr, {MHA_ERROR_NULL_POINTER, {2}, {"w_o.scales"}});
    given = Coded(stored);
    given.weights.w_qkv.scales = &scale;
    ExpectRefused(given, nullptr, {MHA_ERROR_INVALID_VALUE, {2}, {"w_qkv.scales"}});
  }
  LayerData given = GivenAsFloats(problem_, Stored::kInt8);
  given.weights.w_q.scales = &scale;
  ExpectRefused(given, nullptr, {MHA_ERROR_INVALID_VALUE, {2}, {"w_q.scales"}});
}

TEST_F(RefusedWeights, GroupsHaveASizeAndCodes) {
  for (const uint32_t size : {1u, 8u, 24u, 256u, 0xffffffffu}) {
    LayerData given = GivenAsFloats(problem_, Stored::kInt8);
    given.config.format.group_size = size;
    ExpectRefused(
        given, nullptr,
        {MHA_ERROR_INVALID_VALUE, {1}, {"format.group_size is", std::to_string(size), "128"}});
  }
  for (const Stored stored : {Stored::kF32, Stored::kF16, Stored::kBf16}) {
    LayerData given = GivenAsFloats(problem_, stored);
    given.config.format.group_size = 32;
    ExpectRefused(given, nullptr,
                  {MHA_ERROR_INVALID_VALUE, {1}, {"format.group_size is 32", "MHA_TYPE_INT8"}});
  }
  LayerData given = Coded(Stored::kInt8);
  const float offset = 0;
  given.weights.w_k.offsets = &offset;
  ExpectRefused(given, nullptr,
                {MHA_ERROR_INVALID_VALUE, {2}, {"w_k.offsets", "format.group_size 0"}});
  const std::vector<float> offsets(8);
  given = Coded(Stored::kInt4);  // whose groups have 32 inputs by default
  given.weights.w_k.offsets = offsets.data();
  given.Pack();
}

TEST_F(RefusedWeights, ScalesAreF16IfTheyAreOfGroupsAndOfAQuantiserAndExact) {
  LayerData given = GivenAsFloats(problem_, Stored::kInt4);
  given.config.format.scale_type = MHA_TYPE_BF16;
  ExpectRefused(given, nullptr, {MHA_ERROR_INVALID_VALUE, {1}, {"format.scale_type is 3"}});
  given.config.format.scale_type = MHA_TYPE_F16;
  ExpectRefused(given, nullptr, {MHA_ERROR_INVALID_VALUE, {2}, {"format.scale_type is 2"}});
  given = GivenAsFloats(problem_, Stored::kInt8);
  given.config.format.scale_type = MHA_TYPE_F16;
  ExpectRefused(given, nullptr, {MHA_ERROR_INVALID_VALUE, {1}, {"not in groups"}});

  Random random(19);
  LayerProblem stored = InGroups(&random, problem_, Stored::kInt4, 16, 15, MHA_TYPE_F16);
  stored.s_k[1] = 65504, stored.s_k[2] = kNaN, stored.s_k[3] = -kInfinity;
  GivenAs(stored, MHA_LAYOUT_OUT_IN, false, 0).Pack();
  stored.o_v[8 + 5] = 0x1.002p0f;  // of the second group
  ExpectRefused(GivenAs(stored, MHA_LAYOUT_OUT_IN, false, 0), nullptr,
                {MHA_ERROR_OUT_OF_RANGE, {2}, {"w_v.offsets[5][1] is 1.00048828", "MHA_TYPE_F32"}});
  stored.s_q[3] = 65505;
  ExpectRefused(GivenAs(stored, MHA_LAYOUT_OUT_IN, false, 0), nullptr,
                {MHA_ERROR_OUT_OF_RANGE, {2}, {"w_q.scales[3][0] is 65505"}});
  ExpectRefused(GivenAs(stored, MHA_LAYOUT_OUT_IN, true, 0), nullptr,
                {MHA_ERROR_OUT_OF_RANGE, {2}, {"w_qkv.scales[3][0] is 65505"}});
}

TEST_F(RefusedWeights, Int5AndInt6AreCodesOfAQuantiserInGroupsForIntegerArithmetic) {
  Random random(20);
  problem_.arithmetic = Arithmetic::kInt8;
  for (const Stored stored : {Stored::kInt5, Stored::kInt6}) {
    const std::string type = "format.type is " + std::to_string(static_cast<uint32_t>(stored));
    const LayerProblem problem = InGroups(&random, problem_, stored, 16, 1, MHA_TYPE_F32);
    LayerData given = GivenAs(problem, MHA_LAYOUT_OUT_IN, false, 0);
    given.Pack();
    given.config.format.arithmetic = MHA_ARITHMETIC_F32;
    ExpectRefused(given, nullptr,
                  {MHA_ERROR_INVALID_VALUE, {1}, {type, "MHA_ARITHMETIC_INT8 (1281)"}});
    given.config.format.arithmetic = MHA_ARITHMETIC_INT16;
    given.config.format.group_size = 0;
    ExpectRefused(given, nullptr, {MHA_ERROR_INVALID_VALUE, {1}, {"format.group_size is 0", type}});
    given = GivenAs(problem, MHA_LAYOUT_OUT_IN, false, 0);
    given.weights.type = MHA_TYPE_F32;
    ExpectRefused(given, nullptr,
                  {MHA_ERROR_INVALID_VALUE, {2}, {"type is 1", type, "MHA_TYPE_INT8 (4)"}});
    const float centre = CentreOf(stored);
    for (const auto &[least, w, name] :
         {std::tuple(0.0f, &LayerProblem::w_q, "w_q"), {-centre, &LayerProblem::w_k, "w_k"}}) {
      for (const float code : {least - 1, least + 2 * centre}) {
        LayerProblem beyond = problem;
        (beyond.*w)[5 * 8 * (name[2] == 'q' ? 2 : 1) + 3] = code;
        const std::string number = " is " + std::to_string(static_cast<int>(code));
        ExpectRefused(GivenAs(beyond, MHA_LAYOUT_OUT_IN, false, 0), nullptr,
                      {MHA_ERROR_OUT_OF_RANGE, {2}, {name + std::string("[3][5]") + number, type}});
        ExpectRefused(GivenAs(beyond, MHA_LAYOUT_IN_OUT, false, 0), nullptr,
                      {MHA_ERROR_OUT_OF_RANGE, {2}, {name + std::string("[5][3]") + number}});
      }
    }
  }
}

TEST_F(RefusedWeights, ScalesInBlocksAreIntegersWithFactorsOfF16) {
  Random random(21);
  problem_ = RandomProblem(&random, 1, 300, 2, 1, 8, 8, 12);
  problem_.arithmetic = Arithmetic::kInt8;
  const LayerProblem problem = InGroups(&random, problem_, Stored::kInt4, 32, 15, MHA_TYPE_INT8);
  const auto refused = [&](const LayerProblem &changed, const std::string &what) {
    ExpectRefused(GivenAs(changed, MHA_LAYOUT_OUT_IN, false, 0), nullptr,
                  {MHA_ERROR_OUT_OF_RANGE, {2}, {what, "MHA_TYPE_F32"}});
  };
  for (const float scale : {0.5f, 128.0f, -129.0f, kNaN, 1e30f}) {
    LayerProblem changed = problem;
    changed.s_k[8 + 5] = changed.o_v[2 * 8] = scale;
    refused(changed, "w_k.scales[5][1]");
    changed.s_k[8 + 5] = 1;
    refused(changed, "w_v.offsets[0][2]");
  }
  LayerProblem changed = problem;
  changed.s_q.back() = 0x1.002p0f, changed.o_o.back() = 65505;
  refused(changed, "w_q.block_scales[15][1] is 1.00048828, which is no f16");
  changed.s_q.back() = kNaN;
  refused(changed, "w_o.block_offsets[11][0] is 65505");

  const auto without = [&](const float *mha_matrix::*field, const std::string &what) {
    LayerData given = GivenAs(problem, MHA_LAYOUT_OUT_IN, false, 0);
    given.weights.w_k.*field = nullptr;
    ExpectRefused(given, nullptr, {MHA_ERROR_NULL_POINTER, {2}, {what}});
  };
  without(&mha_matrix::block_scales, "w_k.block_scales");
  without(&mha_matrix::block_offsets, "w_k.block_offsets");
  LayerData given = GivenAs(problem, MHA_LAYOUT_OUT_IN, false, 0);
  given.weights.w_k.offsets = nullptr;
  ExpectRefused(given, nullptr, {MHA_ERROR_INVALID_VALUE, {2}, {"w_k.block_offsets", "offsets"}});
  given = GivenAs(problem, MHA_LAYOUT_OUT_IN, false, 0);
  given.config.format.scale_type = MHA_TYPE_F32;
  ExpectRefused(given, nullptr,
                {MHA_ERROR_INVALID_VALUE, {2}, {"w_q.block_scales", "format.scale_type is 1"}});
  given.weights.w_q.block_scales = nullptr;
  ExpectRefused(given, nullptr,
                {MHA_ERROR_INVALID_VALUE, {2}, {"w_q.block_offsets", "w_q.block_scales"}});
  given.config.format.scale_type = MHA_TYPE_INT8;
  given.config.format.arithmetic = MHA_ARITHMETIC_F32;
  ExpectRefused(given, nullptr,
                {MHA_ERROR_INVALID_VALUE, {1}, {"format.scale_type is 4", "MHA_ARITHMETIC_INT8"}});
}

TEST_F(RefusedWeights, Int4IsGivenByOutputsAndInWholeBytes) {
  LayerData given = Coded(Stored::kInt4);
  given.weights.layout = MHA_LAYOUT_IN_OUT;
  ExpectRefused(given, nullptr, {MHA_ERROR_INVALID_VALUE, {2}, {"MHA_LAYOUT_OUT_IN"}});
  given = Coded(Stored::kInt4);
  given.weights.w_k.row_stride = 21;
  ExpectRefused(given, nullptr, {MHA_ERROR_INVALID_VALUE, {2}, {"w_k.row_stride", "21", "even"}});
}

TEST_F(RefusedWeights, Bf16ArithmeticTakesBf16Alone) {
  problem_.arithmetic = Arithmetic::kBf16;
  for (const Stored stored : {Stored::kF32, Stored::kF16, Stored::kInt8, Stored::kInt4})
    ExpectRefused(GivenAsFloats(problem_, stored), nullptr,
                  {MHA_ERROR_INVALID_VALUE,
                   {1},
                   {"format.arithmetic is MHA_ARITHMETIC_BF16",
                    "format.type is " + std::to_string(static_cast<uint32_t>(stored))}});
  LayerData given = GivenAsFloats(problem_, Stored::kBf16);
  given.config.format.group_size = 32;
  ExpectRefused(given, nullptr, {MHA_ERROR_INVALID_VALUE, {1}, {"format.group_size is 32"}});
}

void NoSgemm(int, int, int, int, int, int, float, const float *, int, const float *, int, float,
             float *, int) {}

TEST_F(RefusedWeights, ABlasMultipliesFloats) {
  const mha_layer_options options = Options(MHA_INSTRUCTION_SET_AUTO, NoSgemm);
  for (const WeightFormat &kind : kWeightFormats) {
    if (kind.stored == Stored::kF32) continue;
    problem_.arithmetic = kind.arithmetic;
    ExpectRefused(GivenAsFloats(problem_, kind.stored), &options,
                  {MHA_ERROR_INVALID_VALUE, {1}, {"format.type", "sgemm"}});
  }
}

TEST_F(RefusedWeights, ButABlasTakesThoseGivenIn16Bits) {
  const mha_layer_options options = Options(MHA_INSTRUCTION_SET_AUTO, PlainSgemm);
  const LayerProblem narrow = Converted(problem_, Stored::kF16);
  LayerProblem wide = narrow;
  wide.stored = Stored::kF32;
  LayerData given = GivenAs(narrow, MHA_LAYOUT_OUT_IN, false, 0);
  const LayerData floats = GivenAsFloats(wide, Stored::kF32);
  given.config.format.type = MHA_TYPE_F32;
  const Layer narrow_layer = Create(given, &options), float_layer = Create(floats, &options);
  EXPECT_TRUE(
      SameBits(Forward(narrow_layer.get(), problem_), Forward(float_layer.get(), problem_)));
}

// ---- How far the results are from those of the weights as given

// Half a step of what each weight and each input is rounded to, or a whole one where an int4 code
// would have been 8. The quotient that is rounded has an error of its own, of a few units in the
// last place of a float.
constexpr double kHalf = 0.5 + 0x1p-14;

double RoundingOfWeight(const LayerProblem &given, const LayerProblem &stored, int64_t k,
                        int64_t n) {
  const int64_t out = given.q_width();
  const double w = given.w_q[k * out + n], magnitude = std::fabs(w);
  switch (stored.stored) {
    case Stored::kF16:
      return std::max(magnitude * 0x1p-11, 0x1p-25);
    case Stored::kBf16:
      return magnitude * 0x1p-8;
    case Stored::kInt8:
      return kHalf * stored.s_q[(stored.group ? k / stored.group : 0) * out + n];
    case Stored::kInt4: {
      const double scale = stored.s_q[k / (stored.group ? stored.group : 32) * out + n];
      return std::fabs(scale) * (w / scale > 7.499 ? 1.001 : kHalf);
    }
    default:
      return 0;
  }
}

// What each input of a row is rounded by: half a code, in groups of 64, or half a unit of bf16.
std::vector<double> RoundingOfInputs(Arithmetic arithmetic, const float *x, int64_t width) {
  std::vector<double> rounding(width);
  for (int64_t k = 0; k < width && arithmetic == Arithmetic::kBf16; k++)
    rounding[k] = std::fabs(x[k]) * 0x1p-8;
  if (arithmetic == Arithmetic::kBf16) return rounding;
  const double largest = arithmetic == Arithmetic::kInt8 ? 127 : 32767;
  for (int64_t k = 0; k < width && arithmetic != Arithmetic::kF32; k++) {
    const float *const group = x + k / 64 * 64;
    double most = 0;
    for (int64_t j = 0; j < 64 && k / 64 * 64 + j < width; j++)
      most = std::max<double>(most, std::fabs(group[j]));
    rounding[k] = kHalf * most / largest;
  }
  return rounding;
}

constexpr WeightFormat kKindsInGroups[] = {
    {Stored::kInt8, Arithmetic::kF32, "int8 by 32", 32},
    {Stored::kInt8, Arithmetic::kInt8, "int8 by 32 with int8", 32},
    {Stored::kInt4, Arithmetic::kF32, "int4 by 16", 16},
    {Stored::kInt4, Arithmetic::kInt16, "int4 by 128 with int16", 128}};

// Prints the figures that src/docs/storage_types.md has.
TEST(Accuracy, OfEachKindIsWhatItsRoundingAllows) {
  for (const int64_t width : {768, 2048}) {
    for (const char *const outliers : {"none", "weights", "inputs"}) {
      Random random(21);
      const int64_t rows = 4;
      LayerProblem problem = RandomProblem(&random, rows, width, 3, 1, 64, 64, 32);
      const int64_t out = problem.q_width();
      problem.b_q.clear();
      const std::string where = outliers;
      for (float &w : problem.w_q) w *= where == "weights" && random.Chance(1.0 / 256) ? 20 : 1;
      for (int64_t k = 0; k < width && where == "inputs"; k++) {  // channels, as models have them
        if (!random.Chance(1.0 / 256)) continue;
        for (int64_t i = 0; i < rows; i++) problem.query[i * width + k] *= 20;
      }
      const float *const query = problem.query.data();
      const std::vector<double> exact =
          oracle::LayerForward<double>(LayerShapeOf(problem, 0), WeightsOf(problem), query, query,
                                       query)
              .q;
      std::printf("width %4d, outliers: %-8s", static_cast<int>(width), outliers);
      std::vector<WeightFormat> kinds(std::begin(kWeightFormats), std::end(kWeightFormats));
      kinds.insert(kinds.end(), std::begin(kKindsInGroups), std::end(kKindsInGroups));
      for (const WeightFormat &kind : kinds) {
        problem.arithmetic = kind.arithmetic;
        problem.group = kind.group;
        const Layer layer = MakeLayer(problem, FormOf(kind.stored));
        const LayerProblem converted = Converted(problem, kind.stored);
        const std::vector<float> q = Forward(layer.get(), problem).q;
        double error = 0, size = 0, variance = 0;
        for (int64_t i = 0; i < rows; i++) {
          const std::vector<double> of_x =
              RoundingOfInputs(kind.arithmetic, query + i * width, width);
          for (int64_t n = 0; n < out; n++) {
            double bound = 0, terms = 0;
            for (int64_t k = 0; k < width; k++) {
              const double x = std::fabs(query[i * width + k]),
                           w = std::fabs(problem.w_q[k * out + n]),
                           of_w = RoundingOfWeight(problem, converted, k, n);
              bound += x * of_w + of_x[k] * (w + of_w);
              terms += x * (w + of_w);
              variance += x * x * of_w * of_w + of_x[k] * of_x[k] * (w + of_w) * (w + of_w);
            }
            const double off = std::fabs(q[i * out + n] - exact[i * out + n]);
            // Any order of a sum of K products and a few operations more, in float.
            ASSERT_LE(off, bound + static_cast<double>(width + 80) * 0x1p-24 * terms)
                << kind.name << " width " << width << " row " << i << " column " << n;
            error += off * off;
            size += exact[i * out + n] * exact[i * out + n];
          }
        }
        // Independent errors of mean 0 within a bound have at most its square as their variance:
        // the sum's is the sum of these.
        const double floats = 0x1p-24 * static_cast<double>(width);
        EXPECT_LE(std::sqrt(error / size), std::sqrt(variance / size) + floats)
            << kind.name << " width " << width;
        std::printf("  %s %.1e", kind.name, std::sqrt(error / size));
      }
      std::printf("\n");
    }
  }
}

// From rows to results; outliers are one channel in 256. The bounds are the errors of OpenVINO,
// which computes attention in bf16 too (bench/rivals/layers.py).
TEST(Accuracy, OfALayerInBf16) {
  for (const bool has_outliers : {false, true}) {
    Random random(23);
    LayerProblem problem = RandomProblem(&random, 48, 768, 12, 12, 64, 64, 768);
    FillNormal(&random, 0, true, &problem);
    problem.is_causal = true;
    for (size_t i = 0; has_outliers && i < problem.query.size(); i++)
      problem.query[i] *= i % 256 == 100 ? 20 : 1;
    const float *const x = problem.query.data();
    const std::vector<double> exact =
        oracle::LayerForward<double>(LayerShapeOf(problem, 0), WeightsOf(problem), x, x, x).y;
    problem.arithmetic = Arithmetic::kBf16;
    const std::vector<float> y =
        Forward(MakeLayer(problem, FormOf(Stored::kBf16)).get(), problem).y;
    double error = 0, size = 0;
    for (size_t i = 0; i < y.size(); i++)
      error += (y[i] - exact[i]) * (y[i] - exact[i]), size += exact[i] * exact[i];
    EXPECT_LE(std::sqrt(error / size), has_outliers ? 6.5e-3 : 5.2e-3);
    EXPECT_GT(std::sqrt(error / size), 2e-3);  // it is bf16
  }
}

// Codes, scales and offsets of a quantiser mean code * scale + offset. What is computed of int4 is
// (code - 8) * scale + (8 * scale + offset).
TEST(Accuracy, OfOffsetsIsThatOfFloatsAndOfTheInputsAsIntegers) {
  constexpr int64_t width = 1100, rows = 3;
  Random random(22);
  for (const WeightFormat &kind : GroupFormats()) {
    for (const int64_t group : kGroups) {
      LayerProblem problem = RandomProblem(&random, rows, width, 2, 1, 20, 20, 8);
      problem.b_q.clear();
      problem.arithmetic = kind.arithmetic;
      const LayerProblem given =
          InGroups(&random, problem, kind.stored, group, 1, AnyScales(&random, kind));
      const int64_t groups = (width + group - 1) / group;
      const int64_t out = given.q_width();
      const Layer layer =
          MakeLayer(GivenAs(given, MHA_LAYOUT_OUT_IN, false, 0), MHA_INSTRUCTION_SET_AUTO);
      const std::vector<float> q = Forward(layer.get(), given).q;
      for (int64_t i = 0; i < rows; i++) {
        const float *const x = given.query.data() + i * width;
        const std::vector<double> of_x = RoundingOfInputs(kind.arithmetic, x, width);
        for (int64_t n = 0; n < out; n++) {
          double exact = 0, bound = 0;
          for (int64_t k = 0; k < width; k++) {
            const auto of_group = [&](const std::vector<float> &numbers) -> double {
              const double factor =
                  given.scale_type == MHA_TYPE_INT8 ? numbers[(groups + k / 256) * out + n] : 1.0;
              return factor * numbers[k / group * out + n];
            };
            const double scale = of_group(given.s_q), offset = of_group(given.o_q),
                         code = given.w_q[k * out + n], centre = CentreOf(kind.stored);
            exact += x[k] * (code * scale + offset);
            bound += of_x[k] * std::fabs(code * scale + offset);
            bound += (std::fabs(x[k]) + of_x[k]) * (width + 80) * 0x1p-24 *
                     (std::fabs((code - centre) * scale) + std::fabs(centre * scale + offset));
          }
          ASSERT_LE(std::fabs(q[i * out + n] - exact), bound)
              << kind.name << " group " << group << " row " << i << " column " << n;
        }
      }
    }
  }
}

}  // namespace
