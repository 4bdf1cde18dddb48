// Bad input is a sentence, not a crash: every function that makes a layer is called with every kind
// of wrong argument. Each row of a table takes a valid call and breaks one thing in it; then the
// status, the parameter that is named and the sentence must fit, and nothing but the error struct
// may have been written.

#include "interface/calls.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

void *AllocateNothing(void *, size_t) { return nullptr; }
void ReleaseNothing(void *, void *) {}

// ---- Layers: mha_layer_pack_size, mha_layer_pack, mha_layer_create
// -----------------------------------------------------------------

// Which functions a row is about. The size query looks at config, at which pointers of weights are
// NULL, and at whether sgemm is.
enum : unsigned {
  kPackSize = 1,
  kPack = 2,
  kCreate = 4,
  kThatPack = kPack | kCreate,
  kAllThree = 7
};

// A valid call: widths that differ, grouped heads, an output projection and all biases.
struct FullLayer {
  // A fused matrix, [10, 12 + 6 + 10].
  void UseFused() {
    fused = CopyOf(Random(7).Normals(10 * 28), Place::kBeforeGuard);
    config.key_dim = config.value_dim = 10;
    weights.w_q.data = weights.w_k.data = weights.w_v.data = nullptr;
    weights.w_qkv.data = fused.floats();
  }
  void RemoveOutputProjection() {
    config.output_dim = 0;
    weights.w_o.data = weights.w_o.bias = nullptr;
  }

  const LayerData data{SmallLayer()};
  Memory fused;
  mha_allocator allocator = {nullptr, AllocateNothing, ReleaseNothing};
  mha_layer_config config = data.config;
  mha_layer_weights weights = data.weights;
  mha_layer_options options = Options();
};

struct LayerCase {
  const char *name;
  void (*change)(FullLayer &);
  Expected expected;
  unsigned functions = kAllThree;
  mha_matrix mha_layer_weights::*matrix =
      nullptr;  // instead of a change: its row_stride with this value
  int64_t value = 0;
};
void PrintTo(const LayerCase &row, std::ostream *stream) { *stream << row.name; }

class LayerErrors : public testing::TestWithParam<LayerCase> {};

TEST_P(LayerErrors, AreSentencesAndNothingIsWritten) {
  const LayerCase &row = GetParam();
  FullLayer call;
  row.matrix != nullptr ? static_cast<void>((call.weights.*row.matrix).row_stride = row.value)
                        : row.change(call);
  if ((row.functions & kPackSize) != 0) {
    SCOPED_TRACE("mha_layer_pack_size");
    size_t bytes = 4711;
    ExpectFails(
        [&](mha_error *error) {
          return mha_layer_pack_size(&call.config, &call.weights, &call.options, &bytes, error);
        },
        row.expected);
    EXPECT_EQ(bytes, 4711u);
  }
  if ((row.functions & kPack) != 0) {
    SCOPED_TRACE("mha_layer_pack");
    Memory buffer(1 << 16, Place::kAfterGuard);
    buffer.Fill(0x5A);
    ExpectFails(
        [&](mha_error *error) {
          return mha_layer_pack(&call.config, &call.weights, &call.options, buffer.data(),
                                buffer.size(), error);
        },
        row.expected);
    EXPECT_TRUE(buffer.Holds(0x5A));
  }
  if ((row.functions & kCreate) != 0) {
    SCOPED_TRACE("mha_layer_create");
    ExpectFails(
        [&](mha_error *error) {
          mha_layer *layer = reinterpret_cast<mha_layer *>(&call);
          const mha_status status =
              mha_layer_create(&call.config, &call.weights, &call.options, &layer, error);
          EXPECT_EQ(layer, nullptr);
          return status;
        },
        row.expected);
  }
}

const LayerCase kConfigCases[] = {
    {"QueryDimIsZero",
     [](auto &c) { c.config.query_dim = 0; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"query_dim"}}},
    {"QueryDimIsNegative",
     [](auto &c) { c.config.query_dim = -1; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"query_dim"}}},
    {"QueryDimIsTheLeastInteger",
     [](auto &c) { c.config.query_dim = kMin; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"query_dim"}}},
    {"KeyDimIsNegative",
     [](auto &c) { c.config.key_dim = -1; },
     {MHA_ERROR_INVALID_VALUE,
      {1},
      {"key_dim is -1; set it to at least 1, or to 0 for its default"}}},
    {"ValueDimIsNegative",
     [](auto &c) { c.config.value_dim = -3; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"value_dim"}}},
    {"OutputDimIsNegative",
     [](auto &c) { c.config.output_dim = -1; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"output_dim"}}},
    {"NumHeadsIsZero",
     [](auto &c) { c.config.num_heads = 0; },
     {MHA_ERROR_INVALID_VALUE,
      {1},
      {"num_heads is 0; set it to the number of query heads", "mha_linear_create"}}},
    {"NumHeadsDoesNotDivideQueryDim",
     [](auto &c) {
       c.config.query_dim = 64, c.config.num_heads = 5, c.config.num_kv_heads = 0,
       c.config.head_dim = 0;
     },
     {MHA_ERROR_SHAPE,
      {1},
      {"num_heads is 5, which does not divide query_dim, 64; set num_heads to a divisor of it, or "
       "set head_dim"}}},
    {"ArithmeticOfFloatsIsInIntegers",
     [](auto &c) { c.config.arithmetic = MHA_ARITHMETIC_INT8; },
     {MHA_ERROR_INVALID_VALUE,
      {1},
      {"arithmetic is 1281", "set weight_type to MHA_TYPE_INT8 (4) or MHA_TYPE_INT4 (5)"}}},
    {"NumHeadsIsNegative",
     [](auto &c) { c.config.num_heads = -4; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"num_heads"}}},
    {"NumKvHeadsIsNegative",
     [](auto &c) { c.config.num_kv_heads = -2; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"num_kv_heads"}}},
    {"HeadDimIsNegative",
     [](auto &c) { c.config.head_dim = -1; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"head_dim"}}},
    {"HeadDimVIsNegative",
     [](auto &c) { c.config.head_dim_v = -1; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"head_dim_v"}}},
    {"SixHeadsDoNotFitQueryDim16",
     [](auto &c) {
       c.config.query_dim = 16;
       c.config.num_heads = 6;
       c.config.head_dim = 0;
     },
     {MHA_ERROR_SHAPE, {1}, {"16", "6", "head_dim"}}},
    {"NumKvHeadsDoesNotDivide",
     [](auto &c) { c.config.num_kv_heads = 3; },
     {MHA_ERROR_SHAPE, {1}, {"num_kv_heads", "3", "4"}}},
    {"MoreKvHeadsThanHeads",
     [](auto &c) { c.config.num_kv_heads = 8; },
     {MHA_ERROR_SHAPE, {1}, {"num_kv_heads", "8", "4"}}},
    {"ScaleIsNan",
     [](auto &c) { c.config.scale = kNan; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"scale"}}},
    {"ScaleIsInfinite",
     [](auto &c) { c.config.scale = kInfinity; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"scale"}}},
    {"ScaleIsMinusInfinity",
     [](auto &c) { c.config.scale = -kInfinity; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"scale"}}},
    {"WeightTypeIsSix",
     [](auto &c) { c.config.weight_type = 6; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"weight_type is 6"}}},
    {"ArithmeticIsThree",
     [](auto &c) { c.config.arithmetic = 3; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"arithmetic", "3"}}},
    {"ArithmeticIsIntegerOfFloatWeights",
     [](auto &c) { c.config.arithmetic = MHA_ARITHMETIC_INT8; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"arithmetic", "MHA_TYPE_INT8"}}},
    {"GateIsThree",
     [](auto &c) { c.config.gate = 3; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"gate is 3"}}},
    {"GateDimWithoutGate",
     [](auto &c) { c.config.gate_dim = 5; },
     {MHA_ERROR_SHAPE, {1}, {"gate_dim is 5"}}},
    {"GateDimIsNegative",
     [](auto &c) { c.config.gate = MHA_GATE_SIGMOID, c.config.gate_dim = -5; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"gate_dim"}}},
    {"GateDimIsNeitherHeadDimVNorOne",
     [](auto &c) { c.config.gate = MHA_GATE_SIGMOID, c.config.gate_dim = 3; },
     {MHA_ERROR_SHAPE, {1}, {"gate_dim is 3", "head_dim_v (5)"}}},
    {"OutputDimWithoutOutputProjection",
     [](auto &c) { c.weights.w_o.data = c.weights.w_o.bias = nullptr; },
     {MHA_ERROR_INVALID_VALUE, {1, 2}, {"output_dim", "w_o"}}},
    {"QueryDimIsTooLarge",
     [](auto &c) { c.config.query_dim = kMax; },
     {MHA_ERROR_TOO_LARGE, {1}, {}}},
    {"KeyDimIsTooLarge", [](auto &c) { c.config.key_dim = kMax; }, {MHA_ERROR_TOO_LARGE, {1}, {}}},
    {"ValueDimIsTooLarge",
     [](auto &c) { c.config.value_dim = kMax; },
     {MHA_ERROR_TOO_LARGE, {1}, {}}},
    {"OutputDimIsTooLarge",
     [](auto &c) { c.config.output_dim = kMax; },
     {MHA_ERROR_TOO_LARGE, {1}, {}}},
    {"NumHeadsIsTooLarge",
     [](auto &c) { c.config.num_heads = c.config.num_kv_heads = kMax; },
     {MHA_ERROR_TOO_LARGE, {1}, {}}},
    {"HeadDimIsTooLarge",
     [](auto &c) { c.config.head_dim = kMax; },
     {MHA_ERROR_TOO_LARGE, {1}, {}}},
    {"HeadDimVIsTooLarge",
     [](auto &c) { c.config.head_dim_v = kMax; },
     {MHA_ERROR_TOO_LARGE, {1}, {}}},
    {"AllWidthsAreTooLarge",
     [](auto &c) {
       c.config.query_dim = c.config.key_dim = c.config.value_dim = c.config.output_dim = kMax;
       c.config.num_heads = c.config.num_kv_heads = c.config.head_dim = c.config.head_dim_v = kMax;
     },
     {MHA_ERROR_TOO_LARGE, {1}, {}}},
    {"TheProductIsTwoToThe62",  // 2^62 elements would be 2^64 bytes: 0 in 64 bits
     [](auto &c) {
       c.config.query_dim = int64_t{1} << 31;
       c.config.num_heads = c.config.num_kv_heads = int64_t{1} << 20;
       c.config.head_dim = int64_t{1} << 11;
     },
     {MHA_ERROR_TOO_LARGE, {1}, {}}},
};
INSTANTIATE_TEST_SUITE_P(Config, LayerErrors, testing::ValuesIn(kConfigCases), CaseName<LayerCase>);

const LayerCase kWeightsCases[] = {
    {"NoWeights",
     [](auto &c) { c.weights.w_q.data = c.weights.w_k.data = c.weights.w_v.data = nullptr; },
     {MHA_ERROR_NULL_POINTER, {2}, {"w_q"}}},
    {"MissingWQ",
     [](auto &c) { c.weights.w_q.data = nullptr; },
     {MHA_ERROR_NULL_POINTER, {2}, {"w_q"}}},
    {"MissingWK",
     [](auto &c) { c.weights.w_k.data = nullptr; },
     {MHA_ERROR_NULL_POINTER, {2}, {"w_k"}}},
    {"MissingWV",
     [](auto &c) { c.weights.w_v.data = nullptr; },
     {MHA_ERROR_NULL_POINTER, {2}, {"w_v"}}},
    {"BKWithoutWK",
     [](auto &c) {
       c.config.key_dim = c.config.value_dim = 0,
       c.weights.w_k.data = c.weights.w_v.data = c.weights.w_v.bias = nullptr;
     },
     {MHA_ERROR_INVALID_VALUE, {2}, {"w_k.bias", "w_k.data"}}},
    {"BVWithoutWV",
     [](auto &c) {
       c.config.key_dim = c.config.value_dim = 0,
       c.weights.w_k.data = c.weights.w_v.data = c.weights.w_k.bias = nullptr;
     },
     {MHA_ERROR_INVALID_VALUE, {2}, {"w_v.bias", "w_v.data"}}},
    {"BQkvWithoutWK",
     [](auto &c) {
       c.config.key_dim = c.config.value_dim = 0;
       c.weights.w_k.data = c.weights.w_v.data = c.weights.w_q.bias = c.weights.w_k.bias =
           c.weights.w_v.bias = nullptr;
       c.weights.w_qkv.bias = c.weights.w_o.bias;
     },
     {MHA_ERROR_INVALID_VALUE, {2}, {"w_qkv.bias", "w_k.data"}}},
    {"KeyDimWithoutWK",
     [](auto &c) {
       c.config.key_dim = 7, c.config.value_dim = 0,
       c.weights.w_k.data = c.weights.w_v.data = c.weights.w_k.bias = c.weights.w_v.bias = nullptr;
     },
     {MHA_ERROR_INVALID_VALUE, {1, 2}, {"key_dim is 7", "w_k.data"}}},
    {"ValueDimWithoutWV",
     [](auto &c) {
       c.config.key_dim = 0, c.config.value_dim = 9,
       c.weights.w_k.data = c.weights.w_v.data = c.weights.w_k.bias = c.weights.w_v.bias = nullptr;
     },
     {MHA_ERROR_INVALID_VALUE, {1, 2}, {"value_dim is 9", "w_v.data"}}},
    {"WKScalesWithoutWK",
     [](auto &c) {
       c.config.key_dim = c.config.value_dim = 0;
       c.weights.w_k.scales = c.weights.w_q.bias;
       c.weights.w_k.data = c.weights.w_v.data = c.weights.w_k.bias = c.weights.w_v.bias = nullptr;
     },
     {MHA_ERROR_INVALID_VALUE, {2}, {"w_k.scales"}}},
    {"WQAndWQkv",
     [](auto &c) {
       const mha_layer_weights three = c.weights;
       c.UseFused();
       c.weights.w_q.data = three.w_q.data;
       c.weights.w_k.data = three.w_k.data;
       c.weights.w_v.data = three.w_v.data;
     },
     {MHA_ERROR_INVALID_VALUE, {2}, {"w_q", "w_qkv"}}},
    {"WVAloneBesideWQkv",
     [](auto &c) {
       const void *w_v = c.weights.w_v.data;
       c.UseFused();
       c.weights.w_v.data = w_v;
     },
     {MHA_ERROR_INVALID_VALUE, {2}, {"w_qkv"}}},
    {"FusedWeightsWithAnotherKeyDim",
     [](auto &c) {
       c.UseFused();
       c.config.key_dim = c.config.value_dim = 7;
     },
     {MHA_ERROR_SHAPE, {1, 2}, {"w_qkv", "key_dim", "7", "10"}}},
    {"FusedWeightsWithAnotherValueDim",
     [](auto &c) {
       c.UseFused();
       c.config.value_dim = 9;
     },
     {MHA_ERROR_SHAPE, {1, 2}, {"w_qkv", "value_dim", "9", "10"}}},
    {"BQkvAndBQ",
     [](auto &c) {
       c.weights.w_qkv.bias = c.weights.w_q.bias;
       c.weights.w_k.bias = c.weights.w_v.bias = nullptr;
     },
     {MHA_ERROR_INVALID_VALUE, {2}, {"w_qkv.bias", "w_q.bias"}}},
    {"BQkvAndBK",
     [](auto &c) {
       c.weights.w_qkv.bias = c.weights.w_q.bias;
       c.weights.w_q.bias = c.weights.w_v.bias = nullptr;
     },
     {MHA_ERROR_INVALID_VALUE, {2}, {"w_qkv.bias", "w_k.bias"}}},
    {"BQkvAndBV",
     [](auto &c) {
       c.weights.w_qkv.bias = c.weights.w_q.bias;
       c.weights.w_q.bias = c.weights.w_k.bias = nullptr;
     },
     {MHA_ERROR_INVALID_VALUE, {2}, {"w_qkv.bias", "w_v.bias"}}},
    {"BOWithoutWO",
     [](auto &c) {
       c.config.output_dim = 0;
       c.weights.w_o.data = nullptr;
     },
     {MHA_ERROR_INVALID_VALUE, {2}, {"w_o.bias", "w_o.data"}}},
    {"WGWithoutGate",
     [](auto &c) { c.weights.w_g.data = c.weights.w_q.data; },
     {MHA_ERROR_INVALID_VALUE, {2}, {"w_g.data", "gate"}}},
    {"BGWithoutWG",
     [](auto &c) { c.config.gate = MHA_GATE_SIGMOID, c.weights.w_g.bias = c.weights.w_q.bias; },
     {MHA_ERROR_INVALID_VALUE, {2}, {"w_g.bias", "w_g.data", "w_q.bias"}}},
    {"WGScalesWithoutCodes",
     [](auto &c) {
       c.config.gate = MHA_GATE_SIGMOID, c.weights.w_g.data = c.weights.w_q.data,
       c.weights.w_g.scales = c.weights.w_q.bias;
     },
     {MHA_ERROR_INVALID_VALUE, {2}, {"w_g.scales"}}},
    {"WGStrideIsShorterThanARow",
     [](auto &c) {
       c.config.gate = MHA_GATE_SIGMOID, c.weights.w_g.data = c.weights.w_q.data,
       c.weights.w_g.row_stride = 19;
     },
     {MHA_ERROR_INVALID_VALUE, {2}, {"w_g.row_stride", "19", "20"}}},
    {"WQStrideIsShorterThanARowWithTheGate",
     [](auto &c) { c.config.gate = MHA_GATE_SIGMOID, c.weights.w_q.row_stride = 31; },
     {MHA_ERROR_INVALID_VALUE, {2}, {"w_q.row_stride", "31", "32"}}},
    {"LayoutIsTwo",
     [](auto &c) { c.weights.layout = 2; },
     {MHA_ERROR_INVALID_VALUE, {2}, {"layout"}},
     kThatPack},
    {"LayoutHasHighBits",
     [](auto &c) { c.weights.layout = 0x80000000u; },
     {MHA_ERROR_INVALID_VALUE, {2}, {"layout"}},
     kThatPack},
    {"TypeOfWeightsIsSix",
     [](auto &c) { c.weights.type = 6; },
     {MHA_ERROR_INVALID_VALUE, {2}, {"type is 6"}},
     kThatPack},
    {"WQkvStrideIsNegative",
     [](auto &c) {
       c.UseFused();
       c.weights.w_qkv.row_stride = -28;
     },
     {MHA_ERROR_INVALID_VALUE, {2}, {"w_qkv.row_stride"}},
     kThatPack},
    {"WQkvStrideIsShorterThanARow",
     [](auto &c) {
       c.UseFused();
       c.weights.w_qkv.row_stride = 27;
     },
     {MHA_ERROR_INVALID_VALUE, {2}, {"w_qkv.row_stride", "27", "28"}},
     kThatPack},
    {"WQStrideIsShorterThanATransposedRow",
     [](auto &c) {
       c.weights.layout = MHA_LAYOUT_OUT_IN;
       c.weights.w_q.row_stride = 9;
     },
     {MHA_ERROR_INVALID_VALUE, {2}, {"w_q.row_stride", "9", "10"}},
     kThatPack},
    {"WQStrideIsTooLarge",
     [](auto &c) { c.weights.w_q.row_stride = kMax; },
     {MHA_ERROR_TOO_LARGE, {2}, {}},
     kThatPack},
    {"WOStrideIsTooLarge",
     [](auto &c) { c.weights.w_o.row_stride = kMax; },
     {MHA_ERROR_TOO_LARGE, {2}, {}},
     kThatPack},
    {"WQStrideOverflowsInBytes",  // 9 rows of 2^59 elements fit into int64_t, but not their bytes
     [](auto &c) { c.weights.w_q.row_stride = int64_t{1} << 59; },
     {MHA_ERROR_TOO_LARGE, {2}, {}},
     kThatPack},
};
INSTANTIATE_TEST_SUITE_P(Weights, LayerErrors, testing::ValuesIn(kWeightsCases),
                         CaseName<LayerCase>);

std::vector<LayerCase> StrideCases() {
  std::vector<LayerCase> cases;
  const auto add = [&](const std::string &name, mha_matrix mha_layer_weights::*matrix,
                       int64_t width) {
    const std::string stride = name + ".row_stride is";
    for (const int64_t wrong : {int64_t{-1}, kMin}) {
      const char *test = Kept(name + "_" + std::to_string(static_cast<uint64_t>(wrong)));
      cases.push_back(
          {test, nullptr, {MHA_ERROR_INVALID_VALUE, {2}, {stride}}, kThatPack, matrix, wrong});
    }
    const Expected expected = {
        MHA_ERROR_INVALID_VALUE, {2}, {stride, std::to_string(width - 1), std::to_string(width)}};
    cases.push_back(
        {Kept(name + "_shorter_than_a_row"), nullptr, expected, kThatPack, matrix, width - 1});
  };
  add("w_q", &mha_layer_weights::w_q, 12);
  add("w_k", &mha_layer_weights::w_k, 6);
  add("w_v", &mha_layer_weights::w_v, 10);
  add("w_o", &mha_layer_weights::w_o, 11);
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Strides, LayerErrors, testing::ValuesIn(StrideCases()),
                         CaseName<LayerCase>);

const LayerCase kOptionsCases[] = {
    {"OptionsReservedIsSet",
     [](auto &c) { c.options.reserved = 1; },
     {MHA_ERROR_INVALID_VALUE, {3}, {"reserved"}},
     kThatPack},
    {"UnknownInstructionSet",
     [](auto &c) { c.options.instruction_set = 9; },
     {MHA_ERROR_INVALID_VALUE, {3}, {"instruction_set", "9"}},
     kCreate},
    {"InstructionSet32",  // must not end up in a shift by 32
     [](auto &c) { c.options.instruction_set = 32; },
     {MHA_ERROR_INVALID_VALUE, {3}, {"instruction_set", "32"}},
     kCreate},
    {"InstructionSetWithAllBits",
     [](auto &c) { c.options.instruction_set = 0xFFFFFFFFu; },
     {MHA_ERROR_INVALID_VALUE, {3}, {"instruction_set"}},
     kCreate},
    {"AbsentInstructionSet",
     [](auto &c) { c.options.instruction_set = AbsentInstructionSet(); },
     {MHA_ERROR_INSTRUCTION_SET, {3}, {mha_instruction_set_name(AbsentInstructionSet())}},
     kCreate},
    {"AllocatorWithoutAllocate",
     [](auto &c) {
       c.allocator.allocate = nullptr;
       c.options.allocator = &c.allocator;
     },
     {MHA_ERROR_NULL_POINTER, {3}, {"allocate"}},
     kCreate},
    {"AllocatorWithoutRelease",
     [](auto &c) {
       c.allocator.release = nullptr;
       c.options.allocator = &c.allocator;
     },
     {MHA_ERROR_NULL_POINTER, {3}, {"release"}},
     kCreate},
    {"ColumnsOfTheInputsAreTooManyForSgemm",
     [](auto &c) {
       c.UseFused();
       c.config.query_dim = c.config.key_dim = c.config.value_dim = 1,
       c.config.num_heads = c.config.num_kv_heads = 1 << 30;
       c.config.head_dim = c.config.head_dim_v = 1;
       c.options.sgemm = PlainSgemm;
     },
     {MHA_ERROR_TOO_LARGE, {1}, {"2147483647 columns", "sgemm"}}},
    {"AllocatorReturnsNull",
     [](auto &c) { c.options.allocator = &c.allocator; },
     {MHA_ERROR_OUT_OF_MEMORY, {0}, {}},
     kCreate},
};
INSTANTIATE_TEST_SUITE_P(Options, LayerErrors, testing::ValuesIn(kOptionsCases),
                         CaseName<LayerCase>);

TEST(LayerCalls, SucceedBeforeTheyAreBroken) {
  const std::vector<void (*)(FullLayer &)> changes = {
      [](auto &) {},
      [](auto &c) { c.UseFused(); },
      [](auto &c) { c.RemoveOutputProjection(); },
  };
  for (const auto &change : changes) {
    FullLayer call;
    change(call);
    size_t bytes = 0;
    ExpectSucceeds([&](mha_error *error) {
      return mha_layer_pack_size(&call.config, &call.weights, &call.options, &bytes, error);
    });
    ExpectSucceeds([&](mha_error *error) {
      return mha_layer_pack_size(&call.config, &call.weights, nullptr, &bytes, error);
    });
    Memory buffer(bytes, Place::kBeforeGuard, 64);
    ExpectSucceeds([&](mha_error *error) {
      return mha_layer_pack(&call.config, &call.weights, &call.options, buffer.data(),
                            buffer.size(), error);
    });
    ExpectSucceeds([&](mha_error *error) {
      mha_layer *layer = nullptr;
      const mha_status status =
          mha_layer_create(&call.config, &call.weights, &call.options, &layer, error);
      EXPECT_NE(layer, nullptr);
      mha_layer_destroy(layer);
      return status;
    });
  }
}

TEST(LayerCalls, NameThePointerThatIsNull) {
  FullLayer call;
  size_t bytes = 4711;
  Memory buffer(1 << 16, Place::kAfterGuard);
  buffer.Fill(0x5A);
  mha_layer *layer = nullptr;
  const auto size = [&](const mha_layer_config *config, const mha_layer_weights *weights,
                        size_t *where) {
    return [=](mha_error *error) {
      return mha_layer_pack_size(config, weights, nullptr, where, error);
    };
  };
  const auto pack = [&](const mha_layer_config *config, const mha_layer_weights *weights,
                        void *where) {
    return [=](mha_error *error) {
      return mha_layer_pack(config, weights, nullptr, where, 1 << 16, error);
    };
  };
  const auto create = [&](const mha_layer_config *config, const mha_layer_weights *weights,
                          mha_layer **where) {
    return
        [=](mha_error *error) { return mha_layer_create(config, weights, nullptr, where, error); };
  };
  ExpectFails(size(nullptr, &call.weights, &bytes),
              {MHA_ERROR_NULL_POINTER, {1}, {"config|mha_layer_config"}});
  ExpectFails(size(&call.config, nullptr, &bytes),
              {MHA_ERROR_NULL_POINTER, {2}, {"weights|mha_layer_weights"}});
  ExpectFails(size(&call.config, &call.weights, nullptr), {MHA_ERROR_NULL_POINTER, {4}, {"bytes"}});
  EXPECT_EQ(bytes, 4711u);
  ExpectFails(pack(nullptr, &call.weights, buffer.data()),
              {MHA_ERROR_NULL_POINTER, {1}, {"config|mha_layer_config"}});
  ExpectFails(pack(&call.config, nullptr, buffer.data()),
              {MHA_ERROR_NULL_POINTER, {2}, {"weights|mha_layer_weights"}});
  ExpectFails(pack(&call.config, &call.weights, nullptr),
              {MHA_ERROR_NULL_POINTER, {4}, {"buffer"}});
  EXPECT_TRUE(buffer.Holds(0x5A));
  layer = reinterpret_cast<mha_layer *>(&call);
  ExpectFails(create(nullptr, &call.weights, &layer),
              {MHA_ERROR_NULL_POINTER, {1}, {"config|mha_layer_config"}});
  EXPECT_EQ(layer, nullptr);
  layer = reinterpret_cast<mha_layer *>(&call);
  ExpectFails(create(&call.config, nullptr, &layer),
              {MHA_ERROR_NULL_POINTER, {2}, {"weights|mha_layer_weights"}});
  EXPECT_EQ(layer, nullptr);
  ExpectFails(create(&call.config, &call.weights, nullptr),
              {MHA_ERROR_NULL_POINTER, {4}, {"layer"}});
}

TEST(LayerCalls, EverythingNullIsAnErrorToo) {
  mha_error error = UnwrittenError();
  EXPECT_EQ(mha_layer_pack_size(nullptr, nullptr, nullptr, nullptr, &error),
            MHA_ERROR_NULL_POINTER);
  EXPECT_EQ(error.status, MHA_ERROR_NULL_POINTER);
  EXPECT_EQ(mha_layer_pack(nullptr, nullptr, nullptr, nullptr, 0, &error), MHA_ERROR_NULL_POINTER);
  EXPECT_EQ(mha_layer_create(nullptr, nullptr, nullptr, nullptr, &error), MHA_ERROR_NULL_POINTER);
  EXPECT_EQ(mha_layer_view(nullptr, 0, nullptr, nullptr, 0, nullptr, &error),
            MHA_ERROR_NULL_POINTER);
  EXPECT_EQ(mha_layer_verify(nullptr, 0, &error), MHA_ERROR_NULL_POINTER);
  EXPECT_EQ(mha_layer_shape(nullptr, nullptr, &error), MHA_ERROR_NULL_POINTER);
  EXPECT_EQ(mha_forward_workspace(nullptr, nullptr, nullptr, &error), MHA_ERROR_NULL_POINTER);
  EXPECT_EQ(mha_forward(nullptr, nullptr, nullptr, 0, &error), MHA_ERROR_NULL_POINTER);
  EXPECT_EQ(mha_attention_workspace(nullptr, nullptr, &error), MHA_ERROR_NULL_POINTER);
  EXPECT_EQ(mha_attention(nullptr, nullptr, 0, &error), MHA_ERROR_NULL_POINTER);
  EXPECT_EQ(mha_info(nullptr, nullptr, nullptr, &error), MHA_ERROR_NULL_POINTER);
  EXPECT_EQ(mha_attention_info(nullptr, nullptr, &error), MHA_ERROR_NULL_POINTER);
  mha_layer_destroy(nullptr);
}

TEST(Pack, RejectsEveryMisalignedBuffer) {
  const LayerData data{SmallLayer()};
  const size_t bytes = data.PackSize();
  Memory memory(bytes + 64, Place::kAfterGuard);
  memory.Fill(0x5A);
  for (size_t offset = 1; offset < 64; ++offset) {
    ExpectFails(
        [&](mha_error *error) {
          return mha_layer_pack(&data.config, &data.weights, nullptr, memory.data() + offset, bytes,
                                error);
        },
        {MHA_ERROR_INVALID_VALUE, {4}, {"buffer", "64"}});
  }
  EXPECT_TRUE(memory.Holds(0x5A));
}

TEST(Pack, RejectsEverySmallerBufferAndLeavesItUntouched) {
  const LayerData data{SquareLayer(4, 2, 1, 2)};
  const size_t bytes = data.PackSize();
  for (size_t smaller = 0; smaller < bytes; smaller += smaller + 130 < bytes ? 61 : 1) {
    Memory buffer(smaller, Place::kBeforeGuard, 64);
    buffer.Fill(0x5A);
    ExpectFails(
        [&](mha_error *error) {
          return mha_layer_pack(&data.config, &data.weights, nullptr, buffer.data(), buffer.size(),
                                error);
        },
        {MHA_ERROR_BUFFER_TOO_SMALL, {4, 5}, {std::to_string(bytes)}});
    EXPECT_TRUE(buffer.Holds(0x5A)) << smaller;
  }
}

// ---- Views
// -------------------------------------------------------------------------------------------------------------------------

TEST(LayerViews, NameThePointerThatIsNull) {
  const LayerData data{SmallLayer()};
  const Memory buffer = data.Pack();
  Memory storage(mha_layer_view_size(), Place::kBeforeGuard, 16);
  const mha_layer *layer = nullptr;
  const auto view = [&](const void *packed, void *where, const mha_layer **result) {
    return [=, &buffer](mha_error *error) {
      return mha_layer_view(packed, buffer.size(), nullptr, where, mha_layer_view_size(), result,
                            error);
    };
  };
  ExpectSucceeds(view(buffer.data(), storage.data(), &layer));
  storage.Fill(0x5A);
  ExpectFails(view(nullptr, storage.data(), &layer), {MHA_ERROR_NULL_POINTER, {1}, {"buffer"}});
  ExpectFails(view(buffer.data(), nullptr, &layer), {MHA_ERROR_NULL_POINTER, {4}, {"storage"}});
  ExpectFails(view(buffer.data(), storage.data(), nullptr),
              {MHA_ERROR_NULL_POINTER, {6}, {"layer"}});
  EXPECT_TRUE(storage.Holds(0x5A));
  ExpectFails([&](mha_error *error) { return mha_layer_verify(nullptr, buffer.size(), error); },
              {MHA_ERROR_NULL_POINTER, {1}, {"buffer"}});
}

TEST(LayerViews, RejectEveryMisalignedBuffer) {
  const LayerData data{SmallLayer()};
  const Memory buffer = data.Pack();
  Memory storage(mha_layer_view_size(), Place::kBeforeGuard, 16);
  for (size_t offset = 1; offset < 64; ++offset) {
    Memory moved(buffer.size() + offset, Place::kAfterGuard);
    std::memcpy(moved.data() + offset, buffer.data(), buffer.size());
    const mha_layer *layer = nullptr;
    ExpectFails(
        [&](mha_error *error) {
          return mha_layer_view(moved.data() + offset, buffer.size(), nullptr, storage.data(),
                                storage.size(), &layer, error);
        },
        {MHA_ERROR_INVALID_VALUE, {1}, {"64"}});
    ExpectFails(
        [&](mha_error *error) {
          return mha_layer_verify(moved.data() + offset, buffer.size(), error);
        },
        {MHA_ERROR_INVALID_VALUE, {1}, {"64"}});
  }
}

TEST(LayerViews, RejectEverySmallerStorageAndLeaveItUntouched) {
  const LayerData data{SmallLayer()};
  const Memory buffer = data.Pack();
  const mha_layer *layer = nullptr;
  for (size_t smaller = 0; smaller < mha_layer_view_size(); ++smaller) {
    Memory storage(smaller, Place::kBeforeGuard, 16);
    storage.Fill(0x5A);
    ExpectFails(
        [&](mha_error *error) {
          return mha_layer_view(buffer.data(), buffer.size(), nullptr, storage.data(),
                                storage.size(), &layer, error);
        },
        {MHA_ERROR_BUFFER_TOO_SMALL, {4, 5}, {std::to_string(mha_layer_view_size())}});
    EXPECT_TRUE(storage.Holds(0x5A)) << smaller;
  }
}

TEST(LayerViews, RejectOptionsThatAreWrong) {
  const LayerData data{SmallLayer()};
  const Memory buffer = data.Pack();
  Memory storage(mha_layer_view_size(), Place::kBeforeGuard, 16);
  const mha_layer *layer = nullptr;
  const auto view = [&](const mha_layer_options &options) {
    return [&buffer, &storage, &layer, options](mha_error *error) {
      return mha_layer_view(buffer.data(), buffer.size(), &options, storage.data(), storage.size(),
                            &layer, error);
    };
  };
  ExpectSucceeds(view(Options()));
  mha_layer_options options = Options();
  options.reserved = 1;
  ExpectFails(view(options), {MHA_ERROR_INVALID_VALUE, {3}, {"reserved"}});
  for (uint32_t unknown : {9u, 31u, 32u, 33u, 0x80000001u, 0xFFFFFFFFu}) {
    ExpectFails(view(Options(unknown)), {MHA_ERROR_INVALID_VALUE, {3}, {"instruction_set"}});
  }
  ExpectFails(view(Options(AbsentInstructionSet())),
              {MHA_ERROR_INSTRUCTION_SET, {3}, {mha_instruction_set_name(AbsentInstructionSet())}});
}

TEST(LayerShapes, NameThePointerThatIsNull) {
  const LayerData data{SmallLayer()};
  const Layer layer = Create(data);
  mha_layer_config config = Zeroed<mha_layer_config>();
  ExpectSucceeds([&](mha_error *error) { return mha_layer_shape(layer.get(), &config, error); });
  ExpectFails([&](mha_error *error) { return mha_layer_shape(nullptr, &config, error); },
              {MHA_ERROR_NULL_POINTER, {1}, {"layer"}});
  ExpectFails([&](mha_error *error) { return mha_layer_shape(layer.get(), nullptr, error); },
              {MHA_ERROR_NULL_POINTER, {2}, {"config|mha_layer_config"}});
}

}  // namespace
