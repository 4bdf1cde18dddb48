// Gates: the context times a sigmoid or softplus of a fourth matrix of the layer is as exact as
// float allows, reaches nothing that it should not, and is the same in every way of giving it. Its
// bits in every kind of call are those of the generated cases.
#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "oracle/oracle.h"
#include "support/accuracy.h"
#include "support/attention_test.h"
#include "support/interface_support.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

const float kNaN = FromBits(0xffd23456u);

class GateTest : public AttentionTest {
 protected:
  static LayerProblem Sizes(int64_t n, int64_t dim, int64_t heads, int64_t kv_heads,
                            int64_t head_dim, int64_t head_dim_v, GateKind gate, int64_t gate_dim) {
    LayerProblem problem;
    problem.n_q = problem.n_kv = n;
    problem.query_dim = problem.key_dim = problem.value_dim = dim;
    problem.output_dim = dim + 3;
    problem.num_heads = heads;
    problem.num_kv_heads = kv_heads;
    problem.head_dim = head_dim;
    problem.head_dim_v = head_dim_v;
    problem.gate = gate;
    problem.gate_dim = gate_dim;
    problem.is_causal = true;
    return problem;
  }

  // Both functions, one number for a head and one for each element.
  static std::vector<LayerProblem> Layers(int64_t n) {
    std::vector<LayerProblem> layers;
    for (const GateKind kind : {GateKind::kSigmoid, GateKind::kSoftplus}) {
      layers.push_back(NormalLayer(Sizes(n, 70, 6, 3, 20, 17, kind, 17), 1));
      layers.push_back(NormalLayer(Sizes(n, 70, 6, 6, 9, 24, kind, 1), 2));
      layers.push_back(NormalLayer(Sizes(n, 33, 2, 1, 48, 16, kind, 16), 3, kNoBiases, false));
      layers.push_back(
          NormalLayer(Sizes(n, 16, 2, 2, 8, 8, kind, 8), 4));  // a small layer, but for the gate
    }
    return layers;
  }
};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(GateTest);

// ---- Bits

// Far beyond where exp vanishes, next to it, and around 0.
TEST_P(GateTest, OfEverySizeOfNumberGivesTheBitsOfTheSpecification) {
  const float infinity = std::numeric_limits<float>::infinity();
  std::vector<float> numbers = {0.0f,     -0.0f,     kNaN,     FromBits(0x7f812345u),
                                infinity, -infinity, 88.0f,    -88.0f,
                                3e38f,    -3e38f,    0x1p-149f};
  for (float x = 0x1p-30f; x < 200; x *= 1.03f) numbers.insert(numbers.end(), {x, -x});
  for (const GateKind kind : {GateKind::kSigmoid, GateKind::kSoftplus}) {
    const int64_t width = static_cast<int64_t>(numbers.size());
    LayerProblem problem =
        NormalLayer(Sizes(3, 1, 1, 1, 4, width, kind, width), 1, kNoBiases, false);
    std::fill(problem.query.begin(), problem.query.end(), 1.0f);
    problem.w_g = numbers;
    ExpectTheSpecification(problem);
  }
}

// ---- Ways of giving it

TEST(GateWeights, GiveTheSameBytesForEveryForm) {
  for (const mha_sgemm sgemm : {mha_sgemm{nullptr}, mha_sgemm{PlainSgemm}}) {
    const mha_layer_options options = Options(MHA_INSTRUCTION_SET_AUTO, sgemm);
    for (const Stored stored :
         {Stored::kF32, Stored::kF16, Stored::kBf16, Stored::kInt8, Stored::kInt4}) {
      if (sgemm && stored != Stored::kF32) continue;
      for (const int64_t gate_dim : {1, 7, 16}) {
        LayerProblem problem;
        problem.query_dim = problem.key_dim = problem.value_dim = 61;
        problem.output_dim = 50;
        problem.num_heads = 6;
        problem.num_kv_heads = 3;
        problem.head_dim = 11;
        problem.head_dim_v = gate_dim == 1 ? 5 : gate_dim;
        problem.gate = GateKind::kSigmoid;
        problem.gate_dim = gate_dim;
        problem = NormalLayer(problem);
        LayerForm form;
        form.weight_type = stored;
        const std::string expected =
            LayerData(problem, Place::kBeforeGuard, form).Pack(&options).Bytes();
        for (int which = 0; which < 32; which++) {
          form.form = which & 1 ? WeightForm::kFused : WeightForm::kThreeMatrices;
          form.layout = which & 2 ? MHA_LAYOUT_OUT_IN : MHA_LAYOUT_IN_OUT;
          form.row_gap = which & 4 ? 3 : 0;
          form.gate_in_q = (which & 8) != 0;
          form.fused_biases = (which & 16) != 0;
          const LayerData data(problem, Place::kBeforeGuard, form);
          ASSERT_EQ(data.Pack(&options).Bytes(), expected)
              << Describe(form) << (sgemm ? " for sgemm" : "");
        }
      }
    }
  }
}

TEST(GateWeights, OfAPackedLayerAreALayerWithoutACopyAndWithItsShape) {
  LayerProblem problem = NormalLayer([] {
    LayerProblem sizes = SmallSizes();
    sizes.gate = GateKind::kSoftplus;
    sizes.gate_dim = sizes.head_dim_v;
    return sizes;
  }());
  const LayerData data(problem);
  const Layer created = Create(data);
  Memory buffer = data.Pack();
  buffer.Freeze();
  const View view(buffer);
  ASSERT_EQ(view.status, MHA_OK) << view.error.message;
  EXPECT_EQ(mha_layer_verify(buffer.data(), buffer.size(), nullptr), MHA_OK);
  EXPECT_TRUE(SameBits(Forward(view.layer, problem), Forward(created.get(), problem)));
  mha_layer_config config = Zeroed<mha_layer_config>();
  ASSERT_EQ(mha_layer_shape(view.layer, &config, nullptr), MHA_OK);
  EXPECT_EQ(config.gate, MHA_GATE_SOFTPLUS);
  EXPECT_EQ(config.gate_dim, problem.head_dim_v);

  // The header's gate is guarded, and one that nobody knows is no packed layer.
  for (const size_t offset : {112, 120}) {
    Memory copy(buffer.size(), Place::kBeforeGuard, 64);
    std::memcpy(copy.data(), buffer.data(), buffer.size());
    copy.data()[offset] ^= 3;
    EXPECT_EQ(mha_layer_verify(copy.data(), copy.size(), nullptr), MHA_ERROR_PACKED_FORMAT)
        << offset;
  }
}

// ---- Accuracy

TEST_P(GateTest, IsAsExactAsFloatAllows) {
  for (const int64_t n : {3, 40}) {
    for (const LayerProblem &problem : Layers(n)) {
      const Outputs actual = Forward(Make(problem).get(), problem);
      const float *const x = problem.query.data();
      const auto exact =
          oracle::LayerForward<double>(LayerShapeOf(problem, 0), WeightsOf(problem), x, x, x);
      const auto bound =
          oracle::BoundLayer(LayerShapeOf(problem, 0), WeightsOf(problem), x, x, x, exact);
      double worst = 0, gated = 0;
      for (size_t i = 0; i < exact.y.size(); i++) {
        worst = std::max(worst, BoundRatio(actual.y[i], exact.y[i], bound.y[i]));
        gated = std::max(gated, std::fabs(exact.y[i] - double(actual.y[i])));
      }
      EXPECT_LE(worst, 1.0) << Describe(problem);
      EXPECT_LE(gated, 1e-5) << Describe(problem);
      for (size_t i = 0; i < exact.attention.context.size(); i++) {
        ASSERT_LE(
            BoundRatio(actual.context[i], exact.attention.context[i], bound.attention.context[i]),
            1.0)
            << "the tap is not gated";
      }
    }
  }
}

// ---- What it reaches

TEST_P(GateTest, NaNInAnInputRowReachesItsOwnRowAlone) {
  LayerProblem problem = Layers(12)[0];
  problem.has_key = problem.has_value = true;
  problem.key = problem.value = problem.query;
  const Layer layer = Make(problem);
  const std::vector<float> clean = Forward(layer.get(), problem).y;
  problem.query[static_cast<size_t>(5 * problem.query_dim)] = kNaN;
  const std::vector<float> y = Forward(layer.get(), problem).y;
  for (size_t i = 0; i < y.size(); i++) {
    const bool is_hit = static_cast<int64_t>(i) / problem.y_width() == 5;
    EXPECT_EQ(std::isnan(y[i]), is_hit) << i;
    if (!is_hit) {
      EXPECT_EQ(y[i], clean[i]) << i;
    }
  }
}

TEST_P(GateTest, OfARowWithoutKeysLeavesZeros) {
  LayerProblem problem = Layers(3)[2];
  std::fill(problem.query.begin(), problem.query.end(), kNaN);
  problem.q_start = {-20};
  const std::vector<float> y = Forward(Make(problem).get(), problem).y;
  EXPECT_TRUE(SameBits("y", y, std::vector<float>(y.size(), 0.0f)));
}

// ---- What it costs

TEST(GateCost, IsThatOfAnotherMatrix) {
  LayerProblem plain = SquareSizes(64, 4, 4, 16);
  plain.n_q = plain.n_kv = 10;
  LayerProblem gated = plain;
  gated.gate = GateKind::kSigmoid;
  gated.gate_dim = 16;
  const auto info_of = [](const CallData &data) {
    mha_call_info info = Zeroed<mha_call_info>();
    mha_error error;
    Check(data.Info(&info, &error), error);
    return info;
  };
  const LayerProblem without = NormalLayer(plain), with = NormalLayer(gated);
  const Layer layer = MakeLayer(without), gated_layer = MakeLayer(with);
  LayerCall call;
  call.asked = kAskNothing;
  const mha_call_info before = info_of(ForwardData(layer.get(), without, call));
  const mha_call_info after = info_of(ForwardData(gated_layer.get(), with, call));
  EXPECT_EQ(after.operations - before.operations,
            2u * static_cast<uint64_t>(plain.batch) * 10 * 64 * 64);
  EXPECT_EQ(after.bytes - before.bytes, after.packed_bytes - before.packed_bytes);
  EXPECT_GE(after.packed_bytes - before.packed_bytes, 4u * 64 * 64);
}

}  // namespace
