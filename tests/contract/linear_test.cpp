// mha_linear: the product with W_O alone matches the specification bit for bit, for every kind of
// weights, rows and threads; its errors and costs.
#include <gtest/gtest.h>
#include <mha.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "spec/spec.h"
#include "support/fixtures.h"
#include "support/given_weights.h"
#include "support/instruction_sets.h"
#include "support/interface_support.h"
#include "support/rounds.h"
#include "support/same_bits.h"
#include "support/schedulers.h"
#include "support/sgemm.h"
#include "support/specify.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

// A layer whose W_O is w [in, out] with bias [out], which may be empty.
LayerProblem ProblemOf(const std::vector<float> &w, const std::vector<float> &bias, int64_t in,
                       int64_t out) {
  LayerProblem problem;
  problem.head_dim_v = in;
  problem.output_dim = out;
  problem.w_q = problem.w_k = {0.0f};
  problem.w_v.assign(in, 0.0f);
  problem.w_o = w;
  problem.b_o = bias;
  return problem;
}

// Its W_O alone.
LayerData LinearOf(LayerData data, const LayerProblem &problem) {
  const mha_layer_weights given = data.weights;
  data.weights = Zeroed<mha_layer_weights>();
  data.weights.layout = given.layout;
  data.weights.type = given.type;
  data.weights.w_o = given.w_o;
  const mha_layer_config config = data.config;
  data.config = Zeroed<mha_layer_config>();
  data.config.query_dim = problem.merged_width();
  data.config.output_dim = problem.output_dim;
  data.config.format.type = config.format.type;
  data.config.format.group_size = config.format.group_size;
  data.config.format.scale_type = config.format.scale_type;
  data.config.format.arithmetic = config.format.arithmetic;
  return data;
}

LayerData LinearData(const std::vector<float> &w, const std::vector<float> &bias, int64_t in,
                     int64_t out, Stored stored = Stored::kF32) {
  const LayerProblem problem = ProblemOf(w, bias, in, out);
  LayerForm form;
  form.weight_type = stored;
  return LinearOf(LayerData(problem, Place::kBeforeGuard, form), problem);
}

// Rows of a call, [rows, width] with a gap behind each but the last.
Memory Rows(uint32_t type, const std::vector<float> &x, int64_t rows, int64_t width,
            int64_t stride) {
  std::vector<float> strided(rows == 0 ? 0 : (rows - 1) * stride + width, Unwritten());
  for (int64_t i = 0; i < rows; i++)
    std::copy(x.begin() + i * width, x.begin() + (i + 1) * width, strided.begin() + i * stride);
  return InType(type, strided.data(), strided.size());
}

// x [rows, in] times W_O [in, out]. The workspace ends at an inaccessible page.
std::vector<float> Product(const Layer &layer, const std::vector<float> &x, int64_t rows,
                           int64_t out, const mha_scheduler *scheduler = nullptr) {
  std::vector<float> y(rows * out, Unwritten());
  mha_linear_args args = Zeroed<mha_linear_args>();
  args.rows = rows;
  args.x.data = x.data();
  args.output.data = y.data();
  args.scheduler = scheduler;
  size_t bytes = 0;
  mha_error error;
  Check(mha_linear_workspace(layer.get(), &args, &bytes, &error), error);
  Memory workspace(bytes, Place::kBeforeGuard);
  Check(mha_linear(layer.get(), &args, workspace.data(), bytes, &error), error);
  return y;
}

std::vector<float> RandomNumbers(Random *random, uint32_t type, int64_t count) {
  std::vector<float> x = random->Normals(count);
  if (random->Chance(0.2)) MakeSpecial(random, Values::kAny, 1, &x);
  return Rounded(static_cast<Storage>(type), x);
}

class Linear : public InstructionSetTest {};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(Linear);

TEST_P(Linear, RandomProductsEqualTheSpecification) {
  for (int64_t n = 0; n < Rounds(150) && !HasFailure(); n++) {
    Random random(300 + static_cast<uint64_t>(n));
    const int64_t rows = random.Pick<int64_t>({1, 1, 2, 3, 4, 7, 24, 25, 49, 150, 300});
    const int64_t in = random.Pick<int64_t>({1, 2, 31, 48, 64, 255, 257, 520});
    const int64_t out = random.Pick<int64_t>({1, 16, 47, 48, 49, 100, 200, 290});
    LayerForm form;
    form.instruction_set = instruction_set();
    form.layout = random.Chance(0.5) ? MHA_LAYOUT_IN_OUT : MHA_LAYOUT_OUT_IN;
    form.row_gap = random.Chance(0.3) ? random.Between(1, 20) : 0;
    form.use_defaults = random.Chance(0.5);
    form.weight_type = random.Pick(kWeightTypes);
    const Arithmetic arithmetic =
        HasCodes(form.weight_type)
            ? random.Pick({Arithmetic::kF32, Arithmetic::kInt8, Arithmetic::kInt16})
        : form.weight_type == Stored::kBf16 ? random.Pick({Arithmetic::kF32, Arithmetic::kBf16})
                                            : Arithmetic::kF32;
    const auto random_type = [&] {
      return random.Pick<uint32_t>({MHA_TYPE_F32, MHA_TYPE_F16, MHA_TYPE_BF16});
    };
    const uint32_t input_type = random_type(), output_type = random_type();
    const std::vector<float> w = random.Normals(in * out, 1 / std::sqrt(static_cast<float>(in)));
    const std::vector<float> bias = random.Chance(0.5) ? random.Normals(out) : std::vector<float>();
    const std::vector<float> x = RandomNumbers(&random, input_type, rows * in);
    const int64_t residual_kind =
        random.Between(0, 2);  // none, an array of its own, what lies in output
    const std::vector<float> residual = RandomNumbers(&random, output_type, rows * out);

    std::vector<float> numbers = w, scales(static_cast<size_t>((in + 31) / 32 * out)),
                       y(static_cast<size_t>(rows * out));
    spec::Fastest().store_weights(form.weight_type, w.data(), in, out, numbers.data(),
                                  scales.data());
    spec::Fastest().linear(form.weight_type, arithmetic, x.data(), numbers.data(), scales.data(),
                           bias.empty() ? nullptr : bias.data(),
                           residual_kind != 0 ? residual.data() : nullptr, rows, in, out, y.data());

    const bool is_stored =
        form.weight_type != Stored::kF32 && random.Chance(0.3);  // as a quantiser gives it
    const bool has_sgemm = form.weight_type == Stored::kF32 && random.Chance(0.3);
    LayerProblem problem = ProblemOf(w, bias, in, out);
    problem.arithmetic = arithmetic;
    LayerData linear(problem, Place::kBeforeGuard, form);
    if (is_stored) {
      problem.stored = form.weight_type;
      problem.w_o = numbers;
      if (form.weight_type == Stored::kInt8) scales.resize(out);
      if (HasCodes(form.weight_type)) problem.s_o = scales;
      const bool is_int4 = form.weight_type == Stored::kInt4;
      linear = GivenAs(problem, is_int4 ? MHA_LAYOUT_OUT_IN : form.layout, false, 2 * form.row_gap);
    }
    linear = LinearOf(std::move(linear), problem);
    const mha_layer_options options =
        Options(instruction_set(), has_sgemm ? SgemmOfTheSpecification : nullptr);
    const Layer layer = Create(linear, &options);
    const auto stride = [&](int64_t width) {
      return random.Chance(0.5) ? width : width + random.Between(1, 9);
    };
    const int64_t x_stride = stride(in), residual_stride = stride(out),
                  output_stride = residual_kind == 2 ? residual_stride : stride(out);
    const Memory x_rows = Rows(input_type, x, rows, in, x_stride);
    const Memory residual_rows = Rows(output_type, residual, rows, out, residual_stride);
    Memory output = Rows(output_type, residual, rows, out, output_stride);
    if (residual_kind != 2) output.Fill(0xff);
    const Scheduler scheduler(static_cast<uint32_t>(random.Between(1, 4)),
                              random.Chance(0.5) ? RunBackwards : RunOnThreads);
    mha_linear_args args = Zeroed<mha_linear_args>();
    args.rows = ExtentOf(rows);
    const auto type_field = [&](uint32_t type, uint32_t by_default) {
      return type == by_default && random.Coin() ? 0 : type;
    };
    args.x.data = x_rows.data();
    args.x.type = type_field(input_type, MHA_TYPE_F32);
    args.x.strides.row = x_stride == in ? 0 : x_stride;
    if (residual_kind != 0) {
      args.residual.data = residual_kind == 1 ? residual_rows.data() : output.data();
      args.residual.type = type_field(output_type, output_type);
      args.residual.strides.row = residual_stride == out ? 0 : residual_stride;
    }
    args.output.data = output.data();
    args.output.type = type_field(output_type, MHA_TYPE_F32);
    args.output.strides.row = output_stride == out ? 0 : output_stride;
    if (random.Chance(0.6)) args.scheduler = scheduler.get();
    size_t bytes = 1;
    mha_error error;
    ASSERT_EQ(mha_linear_workspace(layer.get(), &args, &bytes, &error), MHA_OK) << error.message;
    Memory workspace(bytes, Place::kBeforeGuard);
    workspace.Fill(0xff);
    ASSERT_EQ(mha_linear(layer.get(), &args, workspace.data(), bytes, &error), MHA_OK)
        << error.message;
    // Gaps too, which are not written.
    const Memory expected =
        Rows(output_type, Rounded(static_cast<Storage>(output_type), y), rows, out, output_stride);
    ASSERT_EQ(expected.size(), output.size());
    EXPECT_EQ(std::memcmp(output.data(), expected.data(), expected.size()), 0)
        << "case " << n << " rows " << rows << " in " << in << " out " << out << " types "
        << input_type << "/" << output_type << (has_sgemm ? " sgemm" : "")
        << (is_stored ? " given as stored" : "") << " weights "
        << static_cast<int>(form.weight_type) << " arithmetic " << static_cast<int>(arithmetic)
        << " residual " << residual_kind << " threads "
        << (args.scheduler ? args.scheduler->num_threads : 0);
  }
}

// Many wide rows go by smaller blocks.
TEST_P(Linear, InIntegersOfManyWideRowsEqualsTheSpecification) {
  const int64_t in = 4160, out = 48;
  Random random(17);
  const std::vector<float> w = random.Normals(in * out, 0.02f);
  std::vector<float> codes = w, scales(static_cast<size_t>(out));
  spec::Fastest().store_weights(Stored::kInt8, w.data(), in, out, codes.data(), scales.data());
  LayerData linear = LinearData(w, {}, in, out, Stored::kInt8);
  linear.config.format.arithmetic = MHA_ARITHMETIC_INT16;
  const Layer layer = Create(linear, instruction_set());
  for (const int64_t rows : {73, 150}) {
    const std::vector<float> x = random.Normals(rows * in);
    std::vector<float> expected(rows * out);
    spec::Fastest().linear(Stored::kInt8, Arithmetic::kInt16, x.data(), codes.data(), scales.data(),
                           nullptr, nullptr, rows, in, out, expected.data());
    for (const uint32_t threads : {1u, 3u}) {
      const Scheduler scheduler(threads, RunBackwards);
      EXPECT_TRUE(SameBits(Product(layer, x, rows, out, scheduler.get()), expected))
          << rows << " rows, " << threads << " threads";
    }
  }
}

// A layer of 3 inputs and 2 outputs, y = x [[1, 2], [3, 4], [5, 6]] + (0.5, -0.5), and a call with
// one row.
struct SmallProduct {
  explicit SmallProduct(const mha_layer_options *options = nullptr)
      : layer(Create(LinearData({1, 2, 3, 4, 5, 6}, {0.5f, -0.5f}, 3, 2), options)),
        args(Zeroed<mha_linear_args>()) {
    args.rows = 1;
    args.x.data = x;
    args.output.data = y;
  }

  mha_status Run(mha_error *error) {
    return mha_linear(layer.get(), &args, workspace.data(), workspace.size(), error);
  }
  void ExpectFails(const Expected &expected) {
    support::ExpectFails([&](mha_error *error) { return Run(error); }, expected);
    EXPECT_EQ(y[0], 4711.0f);
  }

  std::vector<unsigned char> workspace = std::vector<unsigned char>(1 << 16);
  float x[3] = {1, 1, 2}, y[2] = {4711, 4711};
  Layer layer;
  mha_linear_args args;
};

TEST(LinearCall, NeedsNoWorkspaceOnOneThread) {
  SmallProduct product;
  size_t bytes = 4711;
  mha_error error;
  ASSERT_EQ(mha_linear_workspace(product.layer.get(), &product.args, &bytes, &error), MHA_OK)
      << error.message;
  EXPECT_EQ(bytes, 0u);
  product.workspace.clear();
  ASSERT_EQ(product.Run(&error), MHA_OK) << error.message;
  EXPECT_EQ(product.y[0], 14.5f);
  EXPECT_EQ(product.y[1], 17.5f);
}

TEST(LinearCall, CostsItsProductAndItsRows) {
  const std::vector<float> w(300 * 70, 0.5f);
  for (const Stored stored : kWeightTypes) {
    LayerForm form;
    form.weight_type = stored;
    const Layer layer = Create(LinearData(w, {}, 300, 70, stored));
    LayerProblem problem;
    problem.num_heads = 3;
    problem.head_dim_v = 100;
    problem.output_dim = 70;
    const Layer with_heads = MakeLayer(NormalLayer(problem), form);
    const auto info_of = [](const Layer &of, int64_t rows, uint32_t input_type,
                            uint32_t output_type, bool has_residual) {
      mha_linear_args args = Zeroed<mha_linear_args>();
      args.rows = ExtentOf(rows);
      args.x.type = input_type;
      args.output.type = output_type;
      args.residual.data = has_residual ? &args : nullptr;  // is not read
      const Scheduler scheduler(3, RunBackwards);
      args.scheduler = scheduler.get();
      mha_call_info info = Zeroed<mha_call_info>();
      mha_error error;
      size_t bytes = 0;
      EXPECT_EQ(mha_linear_info(of.get(), &args, &info, &error), MHA_OK) << error.message;
      EXPECT_EQ(mha_linear_workspace(of.get(), &args, &bytes, &error), MHA_OK) << error.message;
      EXPECT_EQ(info.workspace_bytes, bytes);
      EXPECT_EQ(info.num_threads, 3u);
      EXPECT_EQ(info.contract, MHA_CONTRACT);
      return info;
    };
    const mha_call_info one = info_of(layer, 1, MHA_TYPE_F32, MHA_TYPE_F32, false);
    EXPECT_EQ(one.operations, 2u * 300 * 70);
    // Two panels of 48 columns with their scales, and as many biases.
    const uint64_t weights = one.bytes - 4 * (300 + 70);
    const double elements = stored == Stored::kF32    ? 4
                            : stored == Stored::kInt8 ? 1
                            : stored == Stored::kInt4 ? 0.5
                                                      : 2;
    const int64_t scales = stored == Stored::kInt8 ? 1 : stored == Stored::kInt4 ? 10 : 0;
    EXPECT_EQ(weights, static_cast<uint64_t>(elements * 300 * 96) +
                           static_cast<uint64_t>(96 * 4 * (scales + 1)));
    EXPECT_LT(weights, one.packed_bytes);
    EXPECT_EQ(info_of(layer, 7, MHA_TYPE_F16, MHA_TYPE_BF16, true).bytes,
              weights + 7 * 2 * (300 + 2 * 70));
    EXPECT_EQ(info_of(layer, 7, MHA_TYPE_F16, MHA_TYPE_F32, false).operations, 7 * one.operations);
    EXPECT_EQ(info_of(with_heads, 1, MHA_TYPE_F32, MHA_TYPE_F32, false).bytes, one.bytes)
        << "W_O alone";
    EXPECT_EQ(info_of(layer, 0, MHA_TYPE_F32, MHA_TYPE_F32, false).bytes, 0u);
    EXPECT_EQ(info_of(layer, 0, MHA_TYPE_F32, MHA_TYPE_F32, false).operations, 0u);
  }
}

class LinearInBf16 : public InstructionSetTest {
 protected:
  std::vector<float> ProductOf(const std::vector<float> &x, const std::vector<float> &w,
                               int64_t rows, const mha_scheduler *scheduler = nullptr) const {
    const auto in = static_cast<int64_t>(x.size()) / rows,
               out = static_cast<int64_t>(w.size()) / in;
    LayerData linear = LinearData(w, {}, in, out, Stored::kBf16);
    linear.config.format.arithmetic = MHA_ARITHMETIC_BF16;
    return Product(Create(linear, instruction_set()), x, rows, out, scheduler);
  }
};
MHA_INSTANTIATE_FOR_ALL_INSTRUCTION_SETS(LinearInBf16);

TEST_P(LinearInBf16, TakesNumbersBelow2ToMinus50AsZero) {
  const std::vector<float> numbers = {0x1p-50f, -0x1.fep-51f, -0x1.02p-50f, 0x1p-60f},
                           kept = {0x1p-50f, 0, -0x1.02p-50f, 0};
  EXPECT_TRUE(SameBits(ProductOf(numbers, {1}, 4), kept));
  EXPECT_TRUE(SameBits(ProductOf({1}, numbers, 1), kept));
}

// Beside 2^24, a one counts only where another is added to it first.
TEST_P(LinearInBf16, SumsStepsOf32AsAChainOfEvenAndOneOfOddTerms) {
  constexpr int64_t kTerms = 67, kColumns = 5;
  const struct {
    int64_t great;
    std::vector<int64_t> ones;
    float more;
  } columns[kColumns] = {{0, {1, 3}, 2},            // two chains
                         {0, {32, 33}, 2},          // which are added to each other first
                         {0, {28, 30, 32, 34}, 2},  // where a step ends
                         {32, {64, 65}, 2},         // the last step is a shorter one
                         {64, {65, 66}, 0}};        // whose last term is even
  std::vector<float> w(kTerms * kColumns);
  for (int64_t n = 0; n < kColumns; n++) {
    w[columns[n].great * kColumns + n] = 0x1p24f;
    for (const int64_t k : columns[n].ones) w[k * kColumns + n] = 1;
  }
  for (const int64_t rows : {1, 2, 5, 17}) {
    const std::vector<float> x(rows * kTerms, 1.0f), y = ProductOf(x, w, rows);
    for (int64_t i = 0; i < rows * kColumns; i++)
      EXPECT_EQ(y[i] - 0x1p24f, columns[i % kColumns].more) << rows << " rows, result " << i;
  }
}

#if defined(__linux__) && defined(__x86_64__)
// ggml sets it once on each thread.
TEST_P(LinearInBf16, LeavesTheShapeOfTilesAsItWas) {
  if (instruction_set() != MHA_INSTRUCTION_SET_AVX512_AMX) GTEST_SKIP() << "has no tiles";
  alignas(64) uint8_t shape[64] = {1}, after[64] = {};
  shape[16] = 48;  // bytes in a row of tile 0
  shape[48] = 3;   // its rows
  __asm__ volatile("ldtilecfg %0" ::"m"(shape));
  ProductOf(std::vector<float>(64, 1), std::vector<float>(64, 1), 1);
  __asm__ volatile("sttilecfg %0\n\ttilerelease" : "=m"(after));
  EXPECT_EQ(std::memcmp(shape, after, sizeof shape), 0);
}
#endif

TEST_P(LinearInBf16, OfAnyShapeAndNumbersEqualsTheSpecification) {
  Random random(31);
  Sample sample;
  const auto numbers = [&](int64_t count) {
    return RandomValues(
        &random, random.Pick({Values::kNormal, Values::kNormal, Values::kHuge, Values::kSpecial}),
        count);
  };
  for (const int64_t rows : {1, 2, 5, 16, 17, 33, 150}) {
    for (const int64_t in : {1, 2, 31, 32, 33, 64, 95, 257, 300}) {
      for (const int64_t out : {1, 16, 47, 48, 49, 100}) {
        if (!sample.Takes()) continue;
        const std::vector<float> x = numbers(rows * in), w = numbers(in * out);
        std::vector<float> expected(rows * out);
        spec::Fastest().linear(Stored::kBf16, Arithmetic::kBf16, x.data(), w.data(), nullptr,
                               nullptr, nullptr, rows, in, out, expected.data());
        const Scheduler scheduler(static_cast<uint32_t>(random.Between(1, 3)), RunOnThreads);
        ASSERT_TRUE(SameBits(ProductOf(x, w, rows, scheduler.get()), expected))
            << rows << " rows, " << in << " inputs, " << out << " outputs";
      }
    }
  }
}

TEST(LinearCall, WithoutRowsDoesNothing) {
  SmallProduct product;
  product.args.rows = MHA_EMPTY;
  product.args.x.data = product.args.output.data = nullptr;
  ExpectSucceeds([&](mha_error *error) { return product.Run(error); });
}

TEST(LinearCall, OfALayerWithHeadsIsItsProjectionOfTheContext) {
  LayerProblem problem;
  problem.n_q = problem.n_kv = 5;
  problem.num_heads = problem.num_kv_heads = 3;
  problem.head_dim = 4;
  problem.head_dim_v = 7;
  problem.query_dim = problem.key_dim = problem.value_dim = 20;
  problem.output_dim = 50;
  problem = NormalLayer(problem);
  const Layer layer = MakeLayer(problem);
  const Outputs outputs = Forward(layer.get(), problem);
  EXPECT_TRUE(SameBits(Product(layer, outputs.context, 5, 50), outputs.y));
}

TEST(LinearLayer, ServesEveryFunctionOfLayers) {
  LayerData data = LinearData({1, 2, 3, 4, 5, 6}, {0.5f, -0.5f}, 3, 2);
  data.config.format.scale_type = MHA_TYPE_F32;
  Memory packed = data.Pack();
  mha_error error;
  EXPECT_EQ(mha_layer_verify(packed.data(), packed.size(), &error), MHA_OK) << error.message;
  const View view(packed);
  ASSERT_EQ(view.status, MHA_OK) << view.error.message;
  mha_layer_config shape = Zeroed<mha_layer_config>();
  ASSERT_EQ(mha_layer_shape(view.layer, &shape, &error), MHA_OK) << error.message;
  EXPECT_EQ(std::memcmp(&shape, &data.config, sizeof shape), 0)
      << "the shape makes such a layer once more";
  SmallProduct product;
  ASSERT_EQ(mha_linear(view.layer, &product.args, nullptr, 0, &error), MHA_OK) << error.message;
  EXPECT_EQ(product.y[0], 14.5f);
  packed.data()[packed.size() - 1] ^= 1;
  EXPECT_EQ(mha_layer_verify(packed.data(), packed.size(), &error), MHA_ERROR_PACKED_CHECKSUM);
}

TEST(LinearLayer, IsRefusedByCallsOfWholeLayers) {
  const SmallProduct product;
  mha_forward_args args = Zeroed<mha_forward_args>();
  float y[3] = {4711, 4711, 4711};
  args.call.batch = args.call.n_q = 1;
  args.query.data = product.x;
  args.output.data = y;
  size_t bytes = 4711;
  mha_call_info info = Zeroed<mha_call_info>();
  const Expected expected = {MHA_ERROR_INVALID_VALUE, {1}, {"no heads", "mha_linear"}};
  ExpectFails(
      [&](mha_error *error) {
        return mha_forward_workspace(product.layer.get(), &args, &bytes, error);
      },
      expected);
  ExpectFails(
      [&](mha_error *error) { return mha_forward(product.layer.get(), &args, nullptr, 0, error); },
      expected);
  ExpectFails(
      [&](mha_error *error) { return mha_forward_info(product.layer.get(), &args, &info, error); },
      expected);
  EXPECT_EQ(bytes, 4711u);
  EXPECT_EQ(y[0], 4711.0f);
}

TEST(LinearLayer, NamesWrongWeightsAndWritesNothing) {
  const float w[6] = {1, 2, 3, 4, 5, 6};
  const auto expect_refused = [&](mha_status status, const std::string &sentence, auto change) {
    SCOPED_TRACE(sentence);
    mha_linear_weights weights = Zeroed<mha_linear_weights>();
    weights.input_dim = 3, weights.output_dim = 2, weights.w.data = w;
    change(weights);
    mha_layer *layer = nullptr;
    size_t bytes = 4711;
    Memory buffer(4096, Place::kBeforeGuard, 64);
    const Expected expected = {status, {1}, {sentence}};
    ExpectFails(
        [&](mha_error *error) { return mha_linear_create(&weights, nullptr, &layer, error); },
        expected);
    ExpectFails(
        [&](mha_error *error) { return mha_linear_pack_size(&weights, nullptr, &bytes, error); },
        expected);
    ExpectFails(
        [&](mha_error *error) {
          return mha_linear_pack(&weights, nullptr, buffer.data(), buffer.size(), error);
        },
        expected);
    EXPECT_EQ(layer, nullptr);
    EXPECT_EQ(bytes, 4711u);
  };
  expect_refused(MHA_ERROR_STRUCT_SIZE, "set it to sizeof(mha_linear_weights)",
                 [](auto &given) { given.struct_size = 8; });
  expect_refused(MHA_ERROR_INVALID_VALUE, "input_dim is 0; set it to at least 1",
                 [](auto &given) { given.input_dim = 0; });
  expect_refused(MHA_ERROR_INVALID_VALUE, "output_dim is -2; set it to at least 1",
                 [](auto &given) { given.output_dim = -2; });
  expect_refused(MHA_ERROR_TOO_LARGE, "input_dim is 2147483648",
                 [](auto &given) { given.input_dim = int64_t{1} << 31; });
  expect_refused(MHA_ERROR_NULL_POINTER, "w.data is NULL; pass the matrix",
                 [](auto &given) { given.w.data = nullptr; });
  expect_refused(MHA_ERROR_INVALID_VALUE, "layout is 2; set it to MHA_LAYOUT_IN_OUT",
                 [](auto &given) { given.layout = 2; });
  expect_refused(MHA_ERROR_INVALID_VALUE, "w.row_stride is 1, less than the width of a row, 2",
                 [](auto &given) { given.w.row_stride = 1; });
  expect_refused(MHA_ERROR_INVALID_VALUE,
                 "w.scales is given, but type is 0; set type to MHA_TYPE_INT8 (4)",
                 [&](auto &given) { given.w.scales = w; });
  expect_refused(MHA_ERROR_INVALID_VALUE, "format.group_size is 5; set it to 16, 32, 64 or 128",
                 [](auto &given) { given.format.group_size = 5; });
  expect_refused(MHA_ERROR_INVALID_VALUE, "set format.type to MHA_TYPE_INT8 (4)",
                 [](auto &given) { given.format.arithmetic = MHA_ARITHMETIC_INT8; });
}

TEST(LinearLayer, NeedsItsPointers) {
  const mha_linear_weights *const none = nullptr;
  mha_layer *layer = nullptr;
  ExpectFails([&](mha_error *error) { return mha_linear_create(none, nullptr, &layer, error); },
              {MHA_ERROR_NULL_POINTER, {1}, {"mha_linear_weights is NULL"}});
  mha_linear_weights weights = Zeroed<mha_linear_weights>();
  ExpectFails(
      [&](mha_error *error) { return mha_linear_create(&weights, nullptr, nullptr, error); },
      {MHA_ERROR_NULL_POINTER, {3}, {"layer is NULL"}});
}

TEST(LinearCall, NamesAWrongArgumentAndWritesNothing) {
  const auto expect_refused = [](const Expected &expected, auto change, bool is_of_query = true) {
    SmallProduct product;
    change(product);
    size_t bytes = 4711;
    mha_call_info info = Zeroed<mha_call_info>();
    const auto size = [&](mha_error *error) {
      return mha_linear_workspace(product.layer.get(), &product.args, &bytes, error);
    };
    const auto describe = [&](mha_error *error) {
      return mha_linear_info(product.layer.get(), &product.args, &info, error);
    };
    if (is_of_query) ExpectFails(size, expected);
    if (is_of_query) ExpectFails(describe, expected);
    EXPECT_EQ(bytes, 4711u);
    EXPECT_EQ(info.operations, 0u);
    product.ExpectFails(expected);
  };
  constexpr mha_status wrong = MHA_ERROR_INVALID_VALUE, null = MHA_ERROR_NULL_POINTER;
  expect_refused({null, {1}, {"layer"}}, [](auto &p) { p.layer.reset(); });
  expect_refused({MHA_ERROR_STRUCT_SIZE, {2}, {"mha_linear_args"}},
                 [](auto &p) { p.args.struct_size = 8; });
  expect_refused({wrong, {2}, {"rows is -1"}}, [](auto &p) { p.args.rows = -1; });
  expect_refused({wrong, {2}, {"rows is 0; set it to the rows of x, or to MHA_EMPTY for none"}},
                 [](auto &p) { p.args.rows = 0; });
  expect_refused({wrong, {2}, {"x.type is 4"}}, [](auto &p) { p.args.x.type = 4; });
  expect_refused({wrong, {2}, {"output.type is 5"}}, [](auto &p) { p.args.output.type = 5; });
  expect_refused({wrong, {2}, {"residual.type is 2", "output.type is 3"}}, [](auto &p) {
    p.args.residual.data = p.x, p.args.residual.type = MHA_TYPE_F16;
    p.args.output.type = MHA_TYPE_BF16;
  });
  expect_refused({wrong, {2}, {"x.strides.batch is 3", "0"}},
                 [](auto &p) { p.args.x.strides.batch = 3; });
  expect_refused({wrong, {2}, {"output.strides.head is 2", "0"}},
                 [](auto &p) { p.args.output.strides.head = 2; });
  expect_refused({wrong, {2}, {"x.strides.row is 2", "3"}},
                 [](auto &p) { p.args.x.strides.row = 2; });
  expect_refused({wrong, {2}, {"output.strides.row is -1"}},
                 [](auto &p) { p.args.output.strides.row = -1; });
  expect_refused({wrong, {2}, {"residual.strides.row is 1"}},
                 [](auto &p) { p.args.residual.data = p.x, p.args.residual.strides.row = 1; });
  expect_refused({wrong, {2}, {"residual.data is NULL, but other fields of residual are set"}},
                 [](auto &p) { p.args.residual.strides.row = 2; });
  static const mha_scheduler no_scheduler = {};
  expect_refused({null, {2}, {"scheduler.parallel_for is NULL"}},
                 [](auto &p) { p.args.scheduler = &no_scheduler; });
  expect_refused({MHA_ERROR_TOO_LARGE, {2}, {"x would exceed the address space"}}, [](auto &p) {
    p.args.rows = int64_t{1} << 40, p.args.x.strides.row = int64_t{1} << 40;
  });
  expect_refused(
      {null, {2}, {"x.data is NULL"}}, [](auto &p) { p.args.x.data = nullptr; }, false);
  expect_refused(
      {null, {2}, {"output.data is NULL"}}, [](auto &p) { p.args.output.data = nullptr; }, false);
  expect_refused({wrong, {1}, {"no W_O"}}, [](auto &p) {
    LayerProblem problem;
    problem.query_dim = problem.key_dim = problem.value_dim = 3;
    p.layer = MakeLayer(NormalLayer(problem, 1, kNoBiases, false));
  });
  const mha_layer_options options = Options(MHA_INSTRUCTION_SET_AUTO, SgemmOfTheSpecification);
  SmallProduct with_sgemm(&options);
  with_sgemm.args.x.strides.row = int64_t{1} << 31;
  with_sgemm.ExpectFails({MHA_ERROR_TOO_LARGE, {2}, {"x.strides.row is 2147483648", "2147483647"}});
  SmallProduct product;
  const Scheduler scheduler(2, RunBackwards);
  product.args.scheduler = scheduler.get();
  product.workspace.resize(8);
  product.ExpectFails({MHA_ERROR_BUFFER_TOO_SMALL, {4}, {"mha_linear_workspace"}});
}

// More rows and more threads never need less: a workspace for the largest call serves all.
TEST(LinearCall, NeedsNoLessWorkspaceForMore) {
  const std::vector<float> w(300 * 70, 0.5f);
  LayerData data = LinearData(w, {}, 300, 70, Stored::kInt8);
  for (const auto &[type, arithmetic] :
       {std::pair{MHA_TYPE_F32, MHA_ARITHMETIC_F32}, std::pair{MHA_TYPE_BF16, MHA_ARITHMETIC_F32},
        std::pair{MHA_TYPE_F32, MHA_ARITHMETIC_INT8}}) {
    data.config.format.arithmetic = arithmetic;
    const Layer layer = Create(data);
    size_t before = 0;
    for (int64_t rows = 0; rows < 400; rows++) {
      mha_linear_args args = Zeroed<mha_linear_args>();
      args.rows = ExtentOf(rows);
      args.x.type = type;
      size_t of_one = 0, of_three = 0;
      const Scheduler scheduler(3, RunBackwards);
      ASSERT_EQ(mha_linear_workspace(layer.get(), &args, &of_one, nullptr), MHA_OK);
      args.scheduler = scheduler.get();
      ASSERT_EQ(mha_linear_workspace(layer.get(), &args, &of_three, nullptr), MHA_OK);
      EXPECT_LE(of_one, of_three) << rows;
      EXPECT_LE(before, of_three) << rows;
      before = of_three;
    }
  }
}

}  // namespace
