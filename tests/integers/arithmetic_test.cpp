// Projections in integers: the bits of the specification for every shape, type of weights, number
// of rows and thread; the greatest codes that there can be; numbers that are not finite; the packed
// format; and how far the results are from exact ones.
#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "oracle/oracle.h"
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

struct Kind {
  Stored stored;
  Arithmetic arithmetic;
  const char *name;
};

constexpr Kind kKinds[] = {{Stored::kInt8, Arithmetic::kInt8, "int8 weights, int8"},
                           {Stored::kInt8, Arithmetic::kInt16, "int8 weights, int16"},
                           {Stored::kInt4, Arithmetic::kInt8, "int4 weights, int8"},
                           {Stored::kInt4, Arithmetic::kInt16, "int4 weights, int16"}};

// For comparison.
constexpr Kind kInFloats[] = {{Stored::kInt8, Arithmetic::kF32, "int8 weights, f32"},
                              {Stored::kInt4, Arithmetic::kF32, "int4 weights, f32"}};

LayerProblem ProblemOf(uint64_t seed, int64_t n, int64_t dim, int64_t heads, int64_t head_dim,
                       int64_t output_dim) {
  LayerProblem problem;
  problem.batch = 1;
  problem.n_q = problem.n_kv = n;
  problem.num_heads = heads;
  problem.num_kv_heads = 1;
  problem.head_dim = problem.head_dim_v = head_dim;
  problem.query_dim = problem.key_dim = problem.value_dim = dim;
  problem.output_dim = output_dim;
  problem.is_causal = true;
  return NormalLayer(problem, seed);
}

LayerForm FormOf(const Kind &kind, uint32_t instruction_set = MHA_INSTRUCTION_SET_AUTO) {
  LayerForm form;
  form.instruction_set = instruction_set;
  form.weight_type = kind.stored;
  return form;
}

class IntegerArithmetic : public InstructionSetTest {
 protected:
  void ExpectTheSpecification(LayerProblem problem) const {
    for (const Kind &kind : kKinds) {
      problem.arithmetic = kind.arithmetic;
      const Layer layer = MakeLayer(problem, FormOf(kind, instruction_set()));
      ASSERT_TRUE(
          SameBits(Forward(layer.get(), problem, {}), Specify(Converted(problem, kind.stored))))
          << kind.name << " " << Describe(problem);
    }
  }
};

// Depths around the groups of 32 and 64 and the blocks of 256; columns that fill panels of 48 and
// ones that do not.
TEST_P(IntegerArithmetic, GivesTheBitsOfTheSpecificationForEveryNumberOfRows) {
  const struct {
    int64_t dim, heads, head_dim, output_dim;
  } shapes[] = {
      {1, 1, 1, 1}, {63, 2, 12, 49}, {64, 3, 16, 48}, {257, 2, 100, 200}, {321, 2, 26, 289}};
  uint64_t seed = 1;
  Sample sample;
  for (const auto &shape : shapes) {
    for (int64_t n = 1; n <= 40; n += n < 14 ? 1 : 5) {
      if (sample.Takes())
        ExpectTheSpecification(
            ProblemOf(seed++, n, shape.dim, shape.heads, shape.head_dim, shape.output_dim));
      if (HasFailure()) return;
    }
  }
}

// Four panels of weights in step, and one that is left, where the depth is no multiple of a group.
TEST_P(IntegerArithmetic, OfOneAndTwoRowsGivesTheBitsOfTheSpecificationForEveryPanel) {
  for (const int64_t n : {1, 2})
    ExpectTheSpecification(ProblemOf(static_cast<uint64_t>(n), n, 257, 2, 100, 200));
}

// What is left of a group of 32 or 64, and of the terms that lie side by side, may be any number of
// them.
TEST_P(IntegerArithmetic, OfAnyDepthGivesTheBitsOfTheSpecification) {
  constexpr int64_t rows[] = {1, 2, 3, 6, 8};
  for (int64_t dim = 1; dim <= 132; dim++) {
    if (RoundsFactor() < 1 && dim % 6 != 1) continue;  // which leaves each number of rows
    ExpectTheSpecification(ProblemOf(static_cast<uint64_t>(dim), rows[dim % 5], dim, 1, 10, 50));
    if (HasFailure()) return;
  }
}

// Sums as large as they can be: all weights -128, which only a quantiser makes, or 127, and all
// inputs the largest of their group, of one sign, or with the other one in those of four terms that
// a part of a column's sums has. Nothing saturates.
TEST_P(IntegerArithmetic, OfTheGreatestCodesGivesTheBitsOfTheSpecification) {
  LayerProblem problem = ProblemOf(7, 9, 256, 2, 24, 64);
  for (const float sign : {1.0f, -1.0f}) {
    for (const size_t others : {0b0000u, 0b1010u, 0b1100u, 0b1110u}) {
      for (size_t i = 0; i < problem.query.size(); i++)
        problem.query[i] = (others >> i % 4 & 1 ? -3.0f : 3.0f) * sign;
      for (const Kind &kind : kKinds) {
        problem.arithmetic = kind.arithmetic;
        LayerProblem converted = Converted(problem, kind.stored);
        const float lowest = kind.stored == Stored::kInt8 ? -128.0f : -8.0f,
                    greatest = -1.0f - lowest;
        std::fill(converted.w_q.begin(), converted.w_q.end(), lowest);
        std::fill(converted.w_k.begin(), converted.w_k.end(), greatest);
        for (size_t i = 0; i < converted.w_v.size(); i++)
          converted.w_v[i] = i % 3 ? lowest : greatest;
        const Layer layer =
            MakeLayer(GivenAs(converted, MHA_LAYOUT_OUT_IN, false, 0), instruction_set());
        ASSERT_TRUE(SameBits(Forward(layer.get(), problem, {}), Specify(converted)))
            << kind.name << ", terms " << others << " of the other sign, times " << sign;
      }
    }
  }
}

// Sums of 16,384 such terms, which a float no longer holds exactly; and scales at their borders,
// which make them infinite, subnormal or 0.
TEST_P(IntegerArithmetic, OfManyTermsAndTheGreatestScalesGivesTheBitsOfTheSpecification) {
  constexpr float kMost = std::numeric_limits<float>::max();
  constexpr float kScales[] = {
      1.0f,      kMost,      -kMost, 0x1p-126f,
      0x1p-149f, -0x1p-149f, 0.0f,   std::numeric_limits<float>::infinity()};
  for (const int64_t dim : {64, 16384}) {
    LayerProblem problem = ProblemOf(8, 3, dim, 1, 24, 24);
    for (int64_t i = 0; i < 3 * dim; i++)
      problem.query[i] = i / dim == 0   ? 3.0f
                         : i / dim == 1 ? -kMost
                         : i % 3        ? 0x1p-100f
                                        : -0x1p-100f;
    for (const Kind &kind : kKinds) {
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
      const Layer layer =
          MakeLayer(GivenAs(converted, MHA_LAYOUT_OUT_IN, false, 0), instruction_set());
      ASSERT_TRUE(SameBits(Forward(layer.get(), problem, {}), Specify(converted)))
          << kind.name << ", " << dim << " terms";
    }
  }
}

TEST_P(IntegerArithmetic, ANumberThatIsNotFiniteMakesItsRowNanAndNoOther) {
  const float infinity = std::numeric_limits<float>::infinity();
  const int64_t dim = 150, columns = 20;
  for (const float odd : {infinity, -infinity, std::numeric_limits<float>::quiet_NaN()}) {
    LayerProblem problem = ProblemOf(11, 7, dim, 2, columns / 2, 40);
    problem.query[4 * dim + 149] = odd;
    for (const Kind &kind : kKinds) {
      problem.arithmetic = kind.arithmetic;
      const Layer layer = MakeLayer(problem, FormOf(kind, instruction_set()));
      const Outputs outputs = Forward(layer.get(), problem, {});
      ASSERT_TRUE(SameBits(outputs, Specify(Converted(problem, kind.stored)))) << kind.name;
      for (int64_t i = 0; i < 7 * columns; i++) {
        ASSERT_EQ(std::isnan(outputs.q[i]), i / columns == 4)
            << kind.name << " row " << i / columns;
      }
    }
  }
}

// Tiny ones become 0, the largest finite ones do not overflow.
TEST_P(IntegerArithmetic, TakesNumbersOfEverySize) {
  Random random(12);
  LayerProblem problem = ProblemOf(12, 10, 200, 2, 10, 40);
  const float sizes[] = {0.0f,     0x1p-149f, 0x1.fffffep-101f, 0x1p-100f,
                         0x1p-60f, 1.0f,      0x1p60f,          0x1p127f};
  for (size_t i = 0; i < problem.query.size(); i++) problem.query[i] *= sizes[i / 64 % 8];
  problem.query[5] = std::numeric_limits<float>::max();
  ExpectTheSpecification(problem);
}

MHA_INSTANTIATE_FOR_ALL_INSTRUCTION_SETS(IntegerArithmetic);

TEST(InstructionSetsForIntegers, ThatAreMissingAreRefusedByTheirName) {
  const LayerData given(ProblemOf(13, 1, 8, 1, 8, 8), Place::kAnywhere, FormOf(kKinds[0]));
  for (uint32_t set = MHA_INSTRUCTION_SET_SCALAR; set <= MHA_INSTRUCTION_SET_NEON_I8MM; set++) {
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

TEST(PackedForIntegers, IsALayerWithoutACopy) {
  LayerProblem problem = ProblemOf(21, 3, 99, 3, 20, 50);
  for (const Kind &kind : kKinds) {
    problem.arithmetic = kind.arithmetic;
    const LayerData given(problem, Place::kAnywhere, FormOf(kind));
    const Memory packed = given.Pack(nullptr, 0x11), again = given.Pack(nullptr, 0xee);
    EXPECT_EQ(packed.Bytes(), again.Bytes()) << kind.name << ": bytes that nobody wrote";
    EXPECT_EQ(mha_layer_verify(packed.data(), packed.size(), nullptr), MHA_OK) << kind.name;
    const View view(packed);
    ASSERT_EQ(view.status, MHA_OK) << view.error.message;
    EXPECT_TRUE(
        SameBits(Forward(view.layer, problem, {}), Specify(Converted(problem, kind.stored))))
        << kind.name;
    mha_layer_config shape = Zeroed<mha_layer_config>();
    ASSERT_EQ(mha_layer_shape(view.layer, &shape, nullptr), MHA_OK);
    EXPECT_EQ(shape.weight_type, static_cast<uint32_t>(kind.stored));
    EXPECT_EQ(shape.arithmetic, static_cast<uint32_t>(kind.arithmetic));
  }
}

TEST(PackedForIntegers, TakesNoMoreBytesThanForFloats) {
  LayerProblem problem = ProblemOf(22, 1, 768, 12, 64, 768);
  for (const Kind &kind : kKinds) {
    problem.arithmetic = Arithmetic::kF32;
    const size_t for_floats = LayerData(problem, Place::kAnywhere, FormOf(kind)).PackSize();
    problem.arithmetic = kind.arithmetic;
    EXPECT_EQ(LayerData(problem, Place::kAnywhere, FormOf(kind)).PackSize(), for_floats)
        << kind.name;
  }
}

// ---- How far the results are from exact ones

// Half a step of what each number is rounded to, inputs and weights, and a few units of float;
// prints the figures that src/docs/storage_types.md has.
TEST(IntegerAccuracy, OfAProjectionIsWhatItsRoundingAllows) {
  for (const int64_t width : {768, 2048}) {
    for (const bool has_outliers : {false, true}) {
      Random random(31);
      const int64_t rows = 4;
      LayerProblem problem = ProblemOf(31, rows, width, 3, 64, 32);
      problem.b_q.clear();
      if (has_outliers) {  // channels of the inputs, as models have them
        std::vector<float> factors(static_cast<size_t>(width), 1.0f);
        for (float &factor : factors) factor = random.Chance(1.0 / 256) ? 20.0f : 1.0f;
        for (size_t i = 0; i < problem.query.size(); i++)
          problem.query[i] *= factors[i % static_cast<size_t>(width)];
      }
      const oracle::Layer<double> exact = oracle::LayerForward<double>(
          LayerShapeOf(problem, 0), WeightsOf(problem), problem.query.data(), problem.query.data(),
          problem.query.data());
      std::printf("integers, width %4d, %-8s", static_cast<int>(width),
                  has_outliers ? "outliers" : "normal");
      for (const Kind &kind :
           {kInFloats[0], kKinds[1], kKinds[0], kInFloats[1], kKinds[3], kKinds[2]}) {
        problem.arithmetic = kind.arithmetic;
        const LayerProblem converted = Converted(problem, kind.stored);
        const std::vector<float> q = Forward(MakeLayer(problem, FormOf(kind)).get(), problem, {}).q;
        const int64_t out = problem.q_width();
        const double largest = kind.arithmetic == Arithmetic::kInt8    ? 127
                               : kind.arithmetic == Arithmetic::kInt16 ? 32767
                                                                       : INFINITY;
        double error = 0, size = 0;
        for (int64_t i = 0; i < rows; i++) {
          const float *const x = problem.query.data() + i * width;
          std::vector<double> step(static_cast<size_t>(width));
          for (int64_t k = 0; k < width; k += 64) {
            double most = 0;
            for (int64_t j = k; j < std::min(width, k + 64); j++)
              most = std::max<double>(most, std::fabs(x[j]));
            for (int64_t j = k; j < std::min(width, k + 64); j++) step[j] = most / largest;
          }
          for (int64_t n = 0; n < out; n++) {
            double bound = 0, terms = 0;
            for (int64_t k = 0; k < width; k++) {
              const double w = std::fabs(problem.w_q[k * out + n]), half = 0.5 + 0x1p-14;
              const double scale =
                  std::fabs(kind.stored == Stored::kInt8 ? converted.s_q[n]
                                                         : converted.s_q[k / 32 * out + n]);
              const double of_w =
                  scale * (kind.stored == Stored::kInt8 ? half : 1.001);  // a code of 8 becomes 7
              bound += std::fabs(x[k]) * of_w + half * step[k] * (w + of_w);
              terms += std::fabs(x[k]) * (w + of_w);
            }
            const double off = std::fabs(q[i * out + n] - exact.q[i * out + n]);
            ASSERT_LE(off, bound + static_cast<double>(width + 80) * 0x1p-24 * terms)
                << kind.name << " row " << i << " column " << n;
            error += off * off;
            size += exact.q[i * out + n] * exact.q[i * out + n];
          }
        }
        // Codes of 16 bits add next to nothing to the error of the weights.
        const double allowed = kind.stored == Stored::kInt4           ? 0.12
                               : kind.arithmetic == Arithmetic::kInt8 ? 0.04
                                                                      : 0.009;
        EXPECT_LE(std::sqrt(error / size), allowed) << kind.name << " width " << width;
        std::printf("  %s %.1e", kind.name, std::sqrt(error / size));
      }
      std::printf("\n");
    }
  }
}

}  // namespace
