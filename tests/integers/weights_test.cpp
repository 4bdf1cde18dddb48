// Weights kept in fewer bits: the bits of the specification for every type, way of giving them and
// number of rows; what is refused; the packed format; and how far the results are from those of the
// weights as given.
#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
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

constexpr Stored kTypes[] = {Stored::kF32, Stored::kF16, Stored::kBf16, Stored::kInt8,
                             Stored::kInt4};
const char *const kNames[] = {"", "f32", "f16", "bf16", "int8", "int4"};

const char *NameOf(Stored stored) { return kNames[static_cast<uint32_t>(stored)]; }

LayerProblem RandomProblem(Random *random, int64_t n, int64_t dim, int64_t heads, int64_t kv_heads,
                           int64_t head_dim, int64_t head_dim_v, int64_t output_dim) {
  LayerProblem problem;
  problem.batch = 1;
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

// ---- The bits

class StoredWeights : public InstructionSetTest {
 protected:
  void ExpectTheSpecificationForEveryType(const LayerProblem &problem) const {
    for (const Stored stored : kTypes) {
      const Layer layer = MakeLayer(problem, FormOf(stored, instruction_set()));
      ASSERT_TRUE(SameBits(Forward(layer.get(), problem, {}), Specify(Converted(problem, stored))))
          << NameOf(stored) << " " << Describe(problem);
    }
  }
};

TEST_P(StoredWeights, GiveTheBitsOfTheSpecificationForEveryNumberOfRows) {
  Random random(1);
  Sample sample;
  // Depths around the groups of 32 and the blocks of 256, odd and even; columns that fill panels of
  // 48 and ones that do not.
  const struct {
    int64_t dim, heads, kv_heads, head_dim, head_dim_v, output_dim;
  } shapes[] = {{1, 1, 1, 1, 1, 1},
                {31, 2, 1, 12, 7, 49},
                {64, 3, 3, 16, 16, 48},
                {257, 2, 2, 24, 31, 100},
                {289, 2, 1, 26, 17, 289}};
  for (const auto &shape : shapes) {
    for (int64_t n = 1; n <= 40; n += n < 26 ? 1 : 5) {
      if (!sample.Takes()) continue;
      const LayerProblem problem =
          RandomProblem(&random, n, shape.dim, shape.heads, shape.kv_heads, shape.head_dim,
                        shape.head_dim_v, shape.output_dim);
      ExpectTheSpecificationForEveryType(problem);
      if (HasFailure()) return;
    }
  }
}

// Some terms are widened at once; what is left of a group, and of a matrix, may be any number of
// them.
TEST_P(StoredWeights, OfAnyDepthGiveTheBitsOfTheSpecification) {
  constexpr int64_t rows[] = {1, 2, 3, 6, 8};
  Random random(5);
  for (int64_t dim = 1; dim <= 70; dim++) {
    for (const int64_t n : rows) {
      if (support::RoundsFactor() < 1 && n != rows[dim % 5])
        continue;  // of an emulated build, one number of rows to a depth
      const LayerProblem problem = RandomProblem(&random, n, dim, 1, 1, 10, dim, 50);
      ExpectTheSpecificationForEveryType(problem);
      if (HasFailure()) return;
    }
  }
}

// Matrices above 3 MiB, as these are in 8 bits too, may be read in other ways. The last block has
// one term, the last panel 9 columns.
TEST_P(StoredWeights, OfLargeMatricesGiveTheBitsOfTheSpecification) {
  Random random(3);
  LayerProblem problem = RandomProblem(&random, 4, 2049, 15, 1, 103, 5, 7);
  problem.is_causal = true;
  for (const Stored stored : kTypes) {
    const Layer layer = MakeLayer(problem, FormOf(stored, instruction_set()));
    const Outputs expected = Specify(Converted(problem, stored));
    for (const int64_t n : {1, 2, 3, 4}) {
      EXPECT_TRUE(SameBits(Forward(layer.get(), Slice(problem, 0, 0, n, n), {}),
                           Slice(expected, problem, problem.y_width(), 0, 0, n, n)))
          << NameOf(stored) << ", " << n << " rows";
    }
  }
}

TEST_P(StoredWeights, GiveTheSameBitsForManyRowsAndThreads) {
  Random random(2);
  for (const int64_t n : {143, 144, 145, 300}) {
    LayerProblem problem = RandomProblem(&random, n, 70, 2, 1, 40, 33, 60);
    problem.batch = n == 300 ? 1 : 2;
    problem.query = random.Normals(problem.batch * n * problem.query_dim);
    for (const Stored stored : kTypes) {
      const Layer layer = MakeLayer(problem, FormOf(stored, instruction_set()));
      const Outputs expected = Specify(Converted(problem, stored));
      for (const uint32_t threads : {1u, 3u}) {
        const Scheduler scheduler(threads, RunBackwards);
        LayerCall call;
        call.scheduler = scheduler.get();
        call.asked =
            threads == 1 ? 0u : kAskAll;  // without taps, results go straight to their rows
        const Outputs outputs = Forward(layer.get(), problem, call);
        ASSERT_EQ(
            std::memcmp(outputs.y.data(), expected.y.data(), expected.y.size() * sizeof(float)), 0)
            << NameOf(stored) << " " << threads << " threads " << Describe(problem);
      }
    }
  }
}

TEST_P(StoredWeights, HoldEveryKindOfNumber) {
  Random random(4);
  const float nan = std::numeric_limits<float>::quiet_NaN(),
              infinity = std::numeric_limits<float>::infinity();
  for (int round = 0; round < 12; round++) {
    LayerProblem problem = RandomProblem(&random, 1 + round % 7, 90, 2, 2, 30, 30, 70);
    const float odd[] = {nan,      infinity,  -infinity, 0x1p-149f,        -0x1p-120f,
                         65504.0f, -65519.9f, 0x1p-101f, 0x1.fffffep-101f, 0x1p-100f,
                         3e-8f,    -0x1p-14f, -0.0f,     0x1p-25f};
    for (std::vector<float> *w : {&problem.w_q, &problem.w_k, &problem.w_v, &problem.w_o}) {
      if (round % 3 == 0) {
        for (int i = 0; i < 40; i++)
          (*w)[random.Between(0, w->size() - 1)] = random.Pick({nan, infinity, -infinity, 0.0f});
      } else if (round % 3 == 1) {  // whole groups of tiny numbers
        for (float &x : *w) x = odd[random.Between(7, 13)] * (random.Chance(0.5) ? 1.0f : -1.0f);
      } else {
        for (float &x : *w) x = random.Chance(0.3) ? odd[random.Between(3, 13)] : x;
      }
    }
    for (const Stored stored : kTypes) {
      const Layer layer = MakeLayer(problem, FormOf(stored, instruction_set()));
      ASSERT_TRUE(SameBits(Forward(layer.get(), problem, {}), Specify(Converted(problem, stored))))
          << NameOf(stored) << " " << round;
    }
  }
}

// ---- Weights that are not floats when they are given

// The problem given as floats, to be kept as `stored`.
LayerData GivenAsFloats(const LayerProblem &problem, Stored stored) {
  return LayerData(problem, Place::kAnywhere, FormOf(stored));
}

TEST_P(StoredWeights, AreTakenAsTheyAreGiven) {
  Random random(5);
  for (const int64_t dim : {66, 95}) {
    LayerProblem problem = RandomProblem(&random, 6, dim, 3, 1, 20, 20, 52);
    for (const Stored stored : {Stored::kF16, Stored::kBf16, Stored::kInt8, Stored::kInt4}) {
      LayerProblem converted = Converted(problem, stored);
      // What a quantiser may also do: the code -128, and scales that are negative or of its own
      // choice.
      if (stored == Stored::kInt8) converted.w_q[3] = -128;
      if (!converted.s_k.empty()) converted.s_k[1] = -3.0f * converted.s_k[1];
      const float scales[] = {std::numeric_limits<float>::infinity(), FromBits(0xffd23456u),
                              FromBits(0x7f812345u), 0x1p-140f, -0.0f};
      for (size_t i = 0; i < 5 && !converted.s_o.empty(); i++) converted.s_o[9 * i] = scales[i];
      const Outputs expected = Specify(converted);
      for (const uint32_t layout : {MHA_LAYOUT_IN_OUT, MHA_LAYOUT_OUT_IN}) {
        if (stored == Stored::kInt4 && layout == MHA_LAYOUT_IN_OUT) continue;
        for (const bool is_fused : {false, true}) {
          for (const int64_t gap : {0, 6}) {
            const Layer layer =
                MakeLayer(GivenAs(converted, layout, is_fused, gap), instruction_set());
            ASSERT_TRUE(SameBits(Forward(layer.get(), problem, {}), expected))
                << NameOf(stored) << " layout " << layout << (is_fused ? " fused" : "") << " gap "
                << gap << " dim " << dim;
          }
        }
      }
    }
  }
}

TEST_P(StoredWeights, AreConvertedFrom16BitsToEveryType) {
  Random random(6);
  LayerProblem problem = RandomProblem(&random, 6, 75, 2, 2, 20, 20, 30);
  for (const Stored from : {Stored::kF16, Stored::kBf16}) {
    const LayerProblem narrow = Converted(problem, from);
    for (const Stored to : kTypes) {
      LayerData given = GivenAs(narrow, MHA_LAYOUT_OUT_IN, false, 0);
      given.config.weight_type = static_cast<uint32_t>(to);
      const Layer layer = MakeLayer(std::move(given), instruction_set());
      ASSERT_TRUE(SameBits(Forward(layer.get(), problem, {}), Specify(Converted(narrow, to))))
          << NameOf(from) << " to " << NameOf(to);
    }
  }
}

MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(StoredWeights);

// ---- The packed format

TEST(PackedWeights, AreALayerWithoutACopyForEveryType) {
  Random random(11);
  LayerProblem problem = RandomProblem(&random, 3, 99, 3, 1, 21, 20, 50);
  for (const Stored stored : kTypes) {
    const LayerData given = GivenAsFloats(problem, stored);
    const Memory packed = given.Pack(nullptr, 0x11), again = given.Pack(nullptr, 0xee);
    EXPECT_EQ(packed.Bytes(), again.Bytes()) << NameOf(stored) << ": bytes that nobody wrote";
    EXPECT_EQ(packed.size() % 64, 0u);
    EXPECT_EQ(mha_layer_verify(packed.data(), packed.size(), nullptr), MHA_OK) << NameOf(stored);
    const View view(packed);
    ASSERT_EQ(view.status, MHA_OK) << view.error.message;
    EXPECT_TRUE(SameBits(Forward(view.layer, problem, {}), Specify(Converted(problem, stored))))
        << NameOf(stored);

    mha_layer_config shape = Zeroed<mha_layer_config>();
    ASSERT_EQ(mha_layer_shape(view.layer, &shape, nullptr), MHA_OK);
    EXPECT_EQ(shape.weight_type, static_cast<uint32_t>(stored));

    mha_forward_args args = Zeroed<mha_forward_args>();
    args.batch = 1;
    args.n_q = 3;
    mha_call_info info = Zeroed<mha_call_info>();
    ASSERT_EQ(mha_info(view.layer, &args, &info, nullptr), MHA_OK);
    EXPECT_EQ(info.packed_bytes, packed.size());
    EXPECT_EQ(info.bytes, packed.size() + sizeof(float) * 3 * (99 + 50))
        << "what is read is what is packed";
  }
}

TEST(PackedWeights, DoNotDependOnTheHalfOfAByteBehindTheLastCode) {
  const float scale = 1;
  std::vector<std::string> packed;
  for (const unsigned char last : {0x03, 0xf3}) {
    const unsigned char codes[] = {0x21, last};
    mha_linear_weights weights = Zeroed<mha_linear_weights>();
    weights.input_dim = 3;
    weights.output_dim = 1;
    weights.w.data = codes;
    weights.w.scales = &scale;
    weights.type = weights.weight_type = MHA_TYPE_INT4;
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
  const int64_t dim = 1024;
  LayerProblem problem = RandomProblem(&random, 1, dim, 16, 16, 64, 64, dim);
  const auto weights = static_cast<double>(4 * dim * dim);
  const double expected[] = {0.0, 4.0, 2.0, 2.0, 1.0 + 4.0 / dim, 0.5 + 4.0 / 32.0};
  for (const Stored stored : kTypes) {
    const size_t bytes = GivenAsFloats(problem, stored).PackSize();
    // 1024 columns are 22 panels of 48, and there are biases and a header.
    const double ideal = expected[static_cast<uint32_t>(stored)] * weights * (22.0 * 48.0 / 1024.0);
    EXPECT_GE(static_cast<double>(bytes), ideal) << NameOf(stored);
    EXPECT_LE(static_cast<double>(bytes), ideal + 32 * 1024) << NameOf(stored);
  }
}

TEST(PackedWeights, ThatAreDamagedAreFoundWhereverItIs) {
  Random random(13);
  LayerProblem problem = RandomProblem(&random, 1, 70, 2, 2, 30, 30, 60);
  for (const Stored stored : kTypes) {
    const Memory packed = GivenAsFloats(problem, stored).Pack();
    for (int64_t at = 256; at < static_cast<int64_t>(packed.size()); at += random.Between(1, 40)) {
      const auto flip = static_cast<unsigned char>(1 << random.Between(0, 7));
      packed.data()[at] ^= flip;
      ASSERT_EQ(mha_layer_verify(packed.data(), packed.size(), nullptr), MHA_ERROR_PACKED_CHECKSUM)
          << NameOf(stored) << " byte " << at;
      packed.data()[at] ^= flip;
    }
    EXPECT_EQ(mha_layer_verify(packed.data(), packed.size(), nullptr), MHA_OK) << NameOf(stored);
  }
}

// ---- What is refused

void ExpectRefused(const LayerData &given, const mha_layer_options *options, mha_status status,
                   uint32_t argument, const std::vector<std::string> &words) {
  mha_error error = {};
  std::vector<unsigned char> buffer(1 << 20, 0x5a);
  auto *const aligned = reinterpret_cast<unsigned char *>(
      (reinterpret_cast<uintptr_t>(buffer.data()) + 63) / 64 * 64);
  EXPECT_EQ(
      mha_layer_pack(&given.config, &given.weights, options, aligned, buffer.size() - 64, &error),
      status)
      << error.message;
  EXPECT_EQ(error.argument, argument) << error.message;
  for (const std::string &word : words) {
    EXPECT_NE(std::string(error.message).find(word), std::string::npos)
        << "no \"" << word << "\" in: " << error.message;
  }
  EXPECT_EQ(std::count(buffer.begin(), buffer.end(), 0x5a), 1 << 20) << "something was written";
  auto *layer = reinterpret_cast<mha_layer *>(&error);
  EXPECT_EQ(mha_layer_create(&given.config, &given.weights, options, &layer, nullptr), status);
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
  ExpectRefused(GivenAsFloats(problem_, Stored::kF16), nullptr, MHA_ERROR_OUT_OF_RANGE, 2,
                {"w_k[5][3]", "-65520", "65504"});
  problem_.w_k[5 * 8 + 3] = 65519.996f;
  GivenAsFloats(problem_, Stored::kF16).Pack();  // the last one that rounds down

  problem_.w_o[7] = 1e9f;  // [in, out], of 12 columns: row 0
  ExpectRefused(GivenAsFloats(problem_, Stored::kF16), nullptr, MHA_ERROR_OUT_OF_RANGE, 2,
                {"w_o[0][7]", "1e+09"});
  for (const Stored stored : {Stored::kF32, Stored::kBf16, Stored::kInt8, Stored::kInt4})
    GivenAsFloats(problem_, stored).Pack();
  problem_.w_o[7] = std::numeric_limits<float>::infinity();  // is not finite to begin with
  GivenAsFloats(problem_, Stored::kF16).Pack();

  // bf16 has the range of float.
  problem_.w_o[7] = problem_.w_k[5 * 8 + 3] = 0.0f;
  LayerProblem narrow = Converted(problem_, Stored::kBf16);
  narrow.w_v[2 * 8 + 1] = 0x1p16f;
  LayerData given = GivenAs(narrow, MHA_LAYOUT_OUT_IN, false, 0);
  given.config.weight_type = MHA_TYPE_F16;
  ExpectRefused(given, nullptr, MHA_ERROR_OUT_OF_RANGE, 2, {"w_v[1][2]", "65536"});
  LayerData fused = GivenAs(narrow, MHA_LAYOUT_IN_OUT, true, 0);
  fused.config.weight_type = MHA_TYPE_F16;
  ExpectRefused(fused, nullptr, MHA_ERROR_OUT_OF_RANGE, 2, {"w_qkv[2][25]"});
}

TEST_F(RefusedWeights, CodesAreNotConverted) {
  for (const Stored stored : {Stored::kInt8, Stored::kInt4}) {
    for (const Stored kept : kTypes) {
      if (kept == stored) continue;
      LayerData given = Coded(stored);
      given.config.weight_type = static_cast<uint32_t>(kept);
      ExpectRefused(given, nullptr, MHA_ERROR_INVALID_VALUE, 2,
                    {"weight_type", stored == Stored::kInt8 ? "MHA_TYPE_INT8" : "MHA_TYPE_INT4"});
    }
  }
}

TEST_F(RefusedWeights, CodesNeedTheirScalesAndOnlyTheyHaveSome) {
  const float scale = 1.0f;
  for (const Stored stored : {Stored::kInt8, Stored::kInt4}) {
    LayerData given = Coded(stored);
    given.weights.w_v.scales = nullptr;
    ExpectRefused(given, nullptr, MHA_ERROR_NULL_POINTER, 2, {"w_v.scales"});
    given = Coded(stored);
    given.weights.w_o.scales = nullptr;
    ExpectRefused(given, nullptr, MHA_ERROR_NULL_POINTER, 2, {"w_o.scales"});
    given = Coded(stored);
    given.weights.w_qkv.scales = &scale;
    ExpectRefused(given, nullptr, MHA_ERROR_INVALID_VALUE, 2, {"w_qkv.scales"});
  }
  LayerData given = GivenAsFloats(problem_, Stored::kInt8);
  given.weights.w_q.scales = &scale;
  ExpectRefused(given, nullptr, MHA_ERROR_INVALID_VALUE, 2, {"w_q.scales"});
}

TEST_F(RefusedWeights, Int4IsGivenByOutputsAndInWholeBytes) {
  LayerData given = Coded(Stored::kInt4);
  given.weights.layout = MHA_LAYOUT_IN_OUT;
  ExpectRefused(given, nullptr, MHA_ERROR_INVALID_VALUE, 2, {"MHA_LAYOUT_OUT_IN"});
  given = Coded(Stored::kInt4);
  given.weights.w_k.row_stride = 21;
  ExpectRefused(given, nullptr, MHA_ERROR_INVALID_VALUE, 2, {"w_k.row_stride", "21", "even"});
}

void NoSgemm(int, int, int, int, int, int, float, const float *, int, const float *, int, float,
             float *, int) {}

TEST_F(RefusedWeights, ABlasMultipliesFloats) {
  const mha_layer_options options = Options(MHA_INSTRUCTION_SET_AUTO, NoSgemm);
  for (const Stored stored : {Stored::kF16, Stored::kBf16, Stored::kInt8, Stored::kInt4}) {
    ExpectRefused(GivenAsFloats(problem_, stored), &options, MHA_ERROR_INVALID_VALUE, 1,
                  {"weight_type", "sgemm"});
  }
}

TEST_F(RefusedWeights, ButABlasTakesThoseGivenIn16Bits) {
  const mha_layer_options options = Options(MHA_INSTRUCTION_SET_AUTO, PlainSgemm);
  const LayerProblem narrow = Converted(problem_, Stored::kF16);
  LayerData given = GivenAs(narrow, MHA_LAYOUT_OUT_IN, false, 0),
            floats = GivenAsFloats(narrow, Stored::kF32);
  given.config.weight_type = MHA_TYPE_F32;
  const Layer narrow_layer = Create(given, &options), float_layer = Create(floats, &options);
  EXPECT_TRUE(SameBits(Forward(narrow_layer.get(), problem_, {}),
                       Forward(float_layer.get(), problem_, {})));
}

// ---- How far the results are from those of the weights as given

// Bounds of what storing changes a weight by, from its definition: half a step, or a whole one
// where an int4 code would have been 8.
std::vector<double> RoundingOf(const LayerProblem &given, const LayerProblem &stored) {
  const int64_t out = given.q_width();
  std::vector<double> bounds(given.w_q.size());
  for (size_t i = 0; i < bounds.size(); i++) {
    const double w = std::fabs(given.w_q[i]);
    const int64_t k = static_cast<int64_t>(i) / out, n = static_cast<int64_t>(i) % out;
    // The quotient that is rounded has an error of its own, of a few units in the last place of a
    // float.
    const double half = 0.5 + 0x1p-14;
    if (stored.stored == Stored::kF32) bounds[i] = 0;
    if (stored.stored == Stored::kF16) bounds[i] = std::max(w * 0x1p-11, 0x1p-25);
    if (stored.stored == Stored::kBf16) bounds[i] = w * 0x1p-8;
    if (stored.stored == Stored::kInt8) bounds[i] = half * stored.s_q[n];
    if (stored.stored == Stored::kInt4) {
      const double scale = stored.s_q[k / 32 * out + n], quotient = given.w_q[i] / scale;
      bounds[i] = std::fabs(scale) * (quotient > 7.499 ? 1.001 : half);
    }
  }
  return bounds;
}

// Prints the figures that src/docs/storage_types.md has.
TEST(Accuracy, OfEachTypeIsWhatItsRoundingAllows) {
  for (const int64_t width : {768, 2048}) {
    for (const bool has_outliers : {false, true}) {
      Random random(21);
      const int64_t rows = 4;
      LayerProblem problem = RandomProblem(&random, rows, width, 3, 1, 64, 64, 32);
      problem.b_q.clear();
      if (has_outliers) {
        for (float &w : problem.w_q) w *= random.Chance(1.0 / 256) ? 20.0f : 1.0f;
      }
      const oracle::Layer<double> exact = oracle::LayerForward<double>(
          LayerShapeOf(problem, 0), WeightsOf(problem), problem.query.data(), problem.query.data(),
          problem.query.data());
      std::printf("weights, width %4d, %-8s", static_cast<int>(width),
                  has_outliers ? "outliers" : "normal");
      for (const Stored stored : kTypes) {
        const Layer layer = MakeLayer(problem, FormOf(stored));
        const LayerProblem converted = Converted(problem, stored);
        const std::vector<float> q = Forward(layer.get(), problem, {}).q;
        const std::vector<double> rounding = RoundingOf(problem, converted);
        const int64_t out = problem.q_width();
        double error = 0, size = 0, variance = 0;
        for (int64_t i = 0; i < rows; i++) {
          for (int64_t n = 0; n < out; n++) {
            double bound = 0, terms = 0;
            for (int64_t k = 0; k < width; k++) {
              const double x = std::fabs(problem.query[i * width + k]),
                           w = std::fabs(problem.w_q[k * out + n]), e = rounding[k * out + n];
              bound += x * e;
              terms += x * (w + e);
              variance += x * x * e * e;
            }
            const double off = std::fabs(q[i * out + n] - exact.q[i * out + n]);
            // Any order of a sum of K products and a few operations more, in float.
            ASSERT_LE(off, bound + static_cast<double>(width + 80) * 0x1p-24 * terms)
                << NameOf(stored) << " width " << width << " row " << i << " column " << n;
            error += off * off;
            size += exact.q[i * out + n] * exact.q[i * out + n];
          }
        }
        // Independent errors of mean 0 within a bound have at most its square as their variance:
        // the sum's is the sum of these.
        const double floats = 0x1p-24 * static_cast<double>(width);
        EXPECT_LE(std::sqrt(error / size), std::sqrt(variance / size) + floats)
            << NameOf(stored) << " width " << width;
        std::printf("  %s %.1e", NameOf(stored), std::sqrt(error / size));
      }
      std::printf("\n");
    }
  }
}

}  // namespace
