// Bad input is a sentence, not a crash: every function is called with every kind of wrong argument. Each row of a table takes a valid call
// and breaks one thing in it; then the status, the parameter that is named and the sentence must fit, and nothing but the error struct
// may have been written.

#include "interface_support.h"

namespace {

using namespace interface_support;  // NOLINT: this file is about nothing else

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Names the tests of a table.
template <typename Case>
std::string CaseName(const testing::TestParamInfo<Case> &info) {
  return info.param.name;
}

void *AllocateNothing(void *, size_t) { return nullptr; }
void ReleaseNothing(void *, void *) {}

// ---- Layers: mha_layer_pack_size, mha_layer_pack, mha_layer_create -----------------------------------------------------------------

// Which functions a row is about. The size query looks at config, at which pointers of weights are NULL, and at whether sgemm is.
enum : unsigned { kPackSize = 1, kPack = 2, kCreate = 4, kThatPack = kPack | kCreate, kAllThree = 7 };

// A valid call: widths that differ, grouped heads, an output projection and all biases.
struct LayerCall {
  LayerCall() : data(LayerShape{}), config(data.config), weights(data.weights), options(Options()) {
    for (int64_t h = 0; h < 4; ++h) q_heads[h] = data.w_q.floats() + h * 3;
    for (int64_t h = 0; h < 2; ++h) k_heads[h] = data.w_k.floats() + h * 3;
    for (int64_t h = 0; h < 2; ++h) v_heads[h] = data.w_v.floats() + h * 5;
    allocator.context = nullptr;
    allocator.allocate = AllocateNothing;
    allocator.release = ReleaseNothing;
  }

  // The same weights as one matrix per head; the heads are columns of the three matrices.
  void UseHeads() {
    weights.w_q = weights.w_k = weights.w_v = nullptr;
    weights.w_q_heads = q_heads;
    weights.w_k_heads = k_heads;
    weights.w_v_heads = v_heads;
    weights.w_q_stride = 12;
    weights.w_k_stride = 6;
    weights.w_v_stride = 10;
  }
  // A fused matrix, [10, 12 + 6 + 10].
  void UseFused() {
    Random random(7);
    fused = RandomFloats(10 * 28, random);
    config.key_dim = config.value_dim = 10;
    weights.w_q = weights.w_k = weights.w_v = nullptr;
    weights.w_qkv = fused.floats();
  }
  void RemoveOutputProjection() {
    config.output_dim = 0;
    weights.w_o = weights.b_o = nullptr;
  }

  LayerData data;
  Memory fused;
  const float *q_heads[4], *k_heads[2], *v_heads[2];
  mha_allocator allocator;
  mha_layer_config config;
  mha_layer_weights weights;
  mha_layer_options options;
};

struct LayerCase {
  const char *name;
  void (*change)(LayerCall &);
  Expected expected;
  unsigned functions = kAllThree;
};
void PrintTo(const LayerCase &row, std::ostream *stream) { *stream << row.name; }

class LayerErrors : public testing::TestWithParam<LayerCase> {};

TEST_P(LayerErrors, AreSentencesAndNothingIsWritten) {
  const LayerCase &row = GetParam();
  LayerCall call;
  row.change(call);
  if ((row.functions & kPackSize) != 0) {
    SCOPED_TRACE("mha_layer_pack_size");
    size_t bytes = 4711;
    ExpectFails([&](mha_error *error) { return mha_layer_pack_size(&call.config, &call.weights, &call.options, &bytes, error); },
                row.expected);
    EXPECT_EQ(bytes, 4711u);
  }
  if ((row.functions & kPack) != 0) {
    SCOPED_TRACE("mha_layer_pack");
    Memory buffer(1 << 16, Side::kAfterGuard);
    buffer.Fill(0x5A);
    ExpectFails(
        [&](mha_error *error) { return mha_layer_pack(&call.config, &call.weights, &call.options, buffer.data(), buffer.size(), error); },
        row.expected);
    EXPECT_TRUE(buffer.Holds(0x5A));
  }
  if ((row.functions & kCreate) != 0) {
    SCOPED_TRACE("mha_layer_create");
    ExpectFails(
        [&](mha_error *error) {
          mha_layer *layer = reinterpret_cast<mha_layer *>(&call);
          const mha_status status = mha_layer_create(&call.config, &call.weights, &call.options, &layer, error);
          EXPECT_EQ(layer, nullptr);
          return status;
        },
        row.expected);
  }
}

const LayerCase kConfigCases[] = {
    {"QueryDimIsZero", [](LayerCall &c) { c.config.query_dim = 0; }, {MHA_ERROR_INVALID_VALUE, {1}, {"query_dim"}}},
    {"QueryDimIsNegative", [](LayerCall &c) { c.config.query_dim = -1; }, {MHA_ERROR_INVALID_VALUE, {1}, {"query_dim"}}},
    {"QueryDimIsTheLeastInteger", [](LayerCall &c) { c.config.query_dim = kMin; }, {MHA_ERROR_INVALID_VALUE, {1}, {"query_dim"}}},
    {"KeyDimIsNegative", [](LayerCall &c) { c.config.key_dim = -1; }, {MHA_ERROR_INVALID_VALUE, {1}, {"key_dim"}}},
    {"ValueDimIsNegative", [](LayerCall &c) { c.config.value_dim = -3; }, {MHA_ERROR_INVALID_VALUE, {1}, {"value_dim"}}},
    {"OutputDimIsNegative", [](LayerCall &c) { c.config.output_dim = -1; }, {MHA_ERROR_INVALID_VALUE, {1}, {"output_dim"}}},
    {"NumHeadsIsZero", [](LayerCall &c) { c.config.num_heads = 0; }, {MHA_ERROR_INVALID_VALUE, {1}, {"num_heads"}}},
    {"NumHeadsIsNegative", [](LayerCall &c) { c.config.num_heads = -4; }, {MHA_ERROR_INVALID_VALUE, {1}, {"num_heads"}}},
    {"NumKvHeadsIsNegative", [](LayerCall &c) { c.config.num_kv_heads = -2; }, {MHA_ERROR_INVALID_VALUE, {1}, {"num_kv_heads"}}},
    {"HeadDimIsNegative", [](LayerCall &c) { c.config.head_dim = -1; }, {MHA_ERROR_INVALID_VALUE, {1}, {"head_dim"}}},
    {"HeadDimVIsNegative", [](LayerCall &c) { c.config.head_dim_v = -1; }, {MHA_ERROR_INVALID_VALUE, {1}, {"head_dim_v"}}},
    {"DOutIsNegative",
     [](LayerCall &c) {
       c.config.head_dim = 0;
       c.config.d_out = -12;
     },
     {MHA_ERROR_INVALID_VALUE, {1}, {"d_out"}}},
    {"SixHeadsDoNotFitQueryDim16",
     [](LayerCall &c) {
       c.config.query_dim = 16;
       c.config.num_heads = 6;
       c.config.head_dim = 0;
     },
     {MHA_ERROR_SHAPE, {1}, {"16", "6", "head_dim"}}},
    {"FiveHeadsDoNotFitDOut12",
     [](LayerCall &c) {
       c.config.num_heads = 5;
       c.config.num_kv_heads = 5;
       c.config.head_dim = 0;
       c.config.d_out = 12;
     },
     {MHA_ERROR_SHAPE, {1}, {"12", "5", "head_dim"}}},
    {"MoreHeadsThanDOut",
     [](LayerCall &c) {
       c.config.num_heads = 4;
       c.config.head_dim = 0;
       c.config.d_out = 3;
     },
     {MHA_ERROR_SHAPE, {1}, {"4", "3", "head_dim"}}},
    {"NumKvHeadsDoesNotDivide", [](LayerCall &c) { c.config.num_kv_heads = 3; }, {MHA_ERROR_SHAPE, {1}, {"num_kv_heads", "3", "4"}}},
    {"MoreKvHeadsThanHeads", [](LayerCall &c) { c.config.num_kv_heads = 8; }, {MHA_ERROR_SHAPE, {1}, {"num_kv_heads", "8", "4"}}},
    {"ScaleIsNan", [](LayerCall &c) { c.config.scale = kNan; }, {MHA_ERROR_INVALID_VALUE, {1}, {"scale"}}},
    {"ScaleIsInfinite", [](LayerCall &c) { c.config.scale = kInfinity; }, {MHA_ERROR_INVALID_VALUE, {1}, {"scale"}}},
    {"ScaleIsMinusInfinity", [](LayerCall &c) { c.config.scale = -kInfinity; }, {MHA_ERROR_INVALID_VALUE, {1}, {"scale"}}},
    {"WeightTypeIsFive", [](LayerCall &c) { c.config.weight_type = 5; }, {MHA_ERROR_INVALID_VALUE, {1}, {"weight_type", "5"}}},
    {"OutputDimWithoutOutputProjection",
     [](LayerCall &c) { c.weights.w_o = c.weights.b_o = nullptr; },
     {MHA_ERROR_INVALID_VALUE, {1, 2}, {"output_dim", "w_o"}}},
    {"QueryDimIsTooLarge", [](LayerCall &c) { c.config.query_dim = kMax; }, {MHA_ERROR_TOO_LARGE, {1}, {}}},
    {"KeyDimIsTooLarge", [](LayerCall &c) { c.config.key_dim = kMax; }, {MHA_ERROR_TOO_LARGE, {1}, {}}},
    {"ValueDimIsTooLarge", [](LayerCall &c) { c.config.value_dim = kMax; }, {MHA_ERROR_TOO_LARGE, {1}, {}}},
    {"OutputDimIsTooLarge", [](LayerCall &c) { c.config.output_dim = kMax; }, {MHA_ERROR_TOO_LARGE, {1}, {}}},
    {"NumHeadsIsTooLarge", [](LayerCall &c) { c.config.num_heads = c.config.num_kv_heads = kMax; }, {MHA_ERROR_TOO_LARGE, {1}, {}}},
    {"HeadDimIsTooLarge", [](LayerCall &c) { c.config.head_dim = kMax; }, {MHA_ERROR_TOO_LARGE, {1}, {}}},
    {"HeadDimVIsTooLarge", [](LayerCall &c) { c.config.head_dim_v = kMax; }, {MHA_ERROR_TOO_LARGE, {1}, {}}},
    {"AllWidthsAreTooLarge",
     [](LayerCall &c) {
       c.config.query_dim = c.config.key_dim = c.config.value_dim = c.config.output_dim = kMax;
       c.config.num_heads = c.config.num_kv_heads = c.config.head_dim = c.config.head_dim_v = kMax;
     },
     {MHA_ERROR_TOO_LARGE, {1}, {}}},
    {"TheProductIsTwoToThe62",  // 2^62 elements would be 2^64 bytes: 0 in 64 bits
     [](LayerCall &c) {
       c.config.query_dim = int64_t{1} << 31;
       c.config.num_heads = c.config.num_kv_heads = int64_t{1} << 20;
       c.config.head_dim = int64_t{1} << 11;
     },
     {MHA_ERROR_TOO_LARGE, {1}, {}}},
};
INSTANTIATE_TEST_SUITE_P(Config, LayerErrors, testing::ValuesIn(kConfigCases), CaseName<LayerCase>);

const LayerCase kWeightsCases[] = {
    {"NoWeights", [](LayerCall &c) { c.weights.w_q = c.weights.w_k = c.weights.w_v = nullptr; }, {MHA_ERROR_NULL_POINTER, {2}, {"w_q"}}},
    {"MissingWQ", [](LayerCall &c) { c.weights.w_q = nullptr; }, {MHA_ERROR_NULL_POINTER, {2}, {"w_q"}}},
    {"MissingWK", [](LayerCall &c) { c.weights.w_k = nullptr; }, {MHA_ERROR_NULL_POINTER, {2}, {"w_k"}}},
    {"MissingWV", [](LayerCall &c) { c.weights.w_v = nullptr; }, {MHA_ERROR_NULL_POINTER, {2}, {"w_v"}}},
    {"MissingWQHeads",
     [](LayerCall &c) {
       c.UseHeads();
       c.weights.w_q_heads = nullptr;
     },
     {MHA_ERROR_NULL_POINTER, {2}, {"w_q_heads"}}},
    {"MissingWKHeads",
     [](LayerCall &c) {
       c.UseHeads();
       c.weights.w_k_heads = nullptr;
     },
     {MHA_ERROR_NULL_POINTER, {2}, {"w_k_heads"}}},
    {"MissingWVHeads",
     [](LayerCall &c) {
       c.UseHeads();
       c.weights.w_v_heads = nullptr;
     },
     {MHA_ERROR_NULL_POINTER, {2}, {"w_v_heads"}}},
    {"MissingFirstHeadOfWQ",
     [](LayerCall &c) {
       c.UseHeads();
       c.q_heads[0] = nullptr;
     },
     {MHA_ERROR_NULL_POINTER, {2}, {"w_q_heads"}},
     kThatPack},
    {"MissingLastHeadOfWQ",
     [](LayerCall &c) {
       c.UseHeads();
       c.q_heads[3] = nullptr;
     },
     {MHA_ERROR_NULL_POINTER, {2}, {"w_q_heads"}},
     kThatPack},
    {"MissingLastHeadOfWK",
     [](LayerCall &c) {
       c.UseHeads();
       c.k_heads[1] = nullptr;
     },
     {MHA_ERROR_NULL_POINTER, {2}, {"w_k_heads"}},
     kThatPack},
    {"MissingLastHeadOfWV",
     [](LayerCall &c) {
       c.UseHeads();
       c.v_heads[1] = nullptr;
     },
     {MHA_ERROR_NULL_POINTER, {2}, {"w_v_heads"}},
     kThatPack},
    {"WQAndWQkv",
     [](LayerCall &c) {
       const mha_layer_weights three = c.weights;
       c.UseFused();
       c.weights.w_q = three.w_q;
       c.weights.w_k = three.w_k;
       c.weights.w_v = three.w_v;
     },
     {MHA_ERROR_INVALID_VALUE, {2}, {"w_q", "w_qkv"}}},
    {"WVAloneBesideWQkv",
     [](LayerCall &c) {
       const void *w_v = c.weights.w_v;
       c.UseFused();
       c.weights.w_v = w_v;
     },
     {MHA_ERROR_INVALID_VALUE, {2}, {"w_qkv"}}},
    {"WQkvAndHeads",
     [](LayerCall &c) {
       c.UseHeads();
       const mha_layer_weights heads = c.weights;
       c.UseFused();
       c.weights.w_q_heads = heads.w_q_heads;
     },
     {MHA_ERROR_INVALID_VALUE, {2}, {"w_qkv", "w_q_heads"}}},
    {"WQAndWQHeads", [](LayerCall &c) { c.weights.w_q_heads = c.q_heads; }, {MHA_ERROR_INVALID_VALUE, {2}, {"w_q", "w_q_heads"}}},
    {"WKHeadsAmongThreeMatrices",
     [](LayerCall &c) {
       c.weights.w_k = nullptr;
       c.weights.w_k_heads = c.k_heads;
     },
     {MHA_ERROR_INVALID_VALUE, {2}, {}}},
    {"AllThreeForms",
     [](LayerCall &c) {
       const mha_layer_weights three = c.weights;
       c.UseFused();
       c.weights.w_q = three.w_q;
       c.weights.w_k = three.w_k;
       c.weights.w_v = three.w_v;
       c.weights.w_q_heads = c.q_heads;
       c.weights.w_k_heads = c.k_heads;
       c.weights.w_v_heads = c.v_heads;
     },
     {MHA_ERROR_INVALID_VALUE, {2}, {}}},
    {"FusedWeightsWithAnotherKeyDim",
     [](LayerCall &c) {
       c.UseFused();
       c.config.key_dim = c.config.value_dim = 7;
     },
     {MHA_ERROR_SHAPE, {1, 2}, {"w_qkv", "key_dim", "7", "10"}}},
    {"FusedWeightsWithAnotherValueDim",
     [](LayerCall &c) {
       c.UseFused();
       c.config.value_dim = 9;
     },
     {MHA_ERROR_SHAPE, {1, 2}, {"w_qkv", "value_dim", "9", "10"}}},
    {"BQkvAndBQ",
     [](LayerCall &c) {
       c.weights.b_qkv = c.weights.b_q;
       c.weights.b_k = c.weights.b_v = nullptr;
     },
     {MHA_ERROR_INVALID_VALUE, {2}, {"b_qkv", "b_q"}}},
    {"BQkvAndBK",
     [](LayerCall &c) {
       c.weights.b_qkv = c.weights.b_q;
       c.weights.b_q = c.weights.b_v = nullptr;
     },
     {MHA_ERROR_INVALID_VALUE, {2}, {"b_qkv"}}},
    {"BQkvAndBV",
     [](LayerCall &c) {
       c.weights.b_qkv = c.weights.b_q;
       c.weights.b_q = c.weights.b_k = nullptr;
     },
     {MHA_ERROR_INVALID_VALUE, {2}, {"b_qkv"}}},
    {"BOWithoutWO",
     [](LayerCall &c) {
       c.config.output_dim = 0;
       c.weights.w_o = nullptr;
     },
     {MHA_ERROR_INVALID_VALUE, {2}, {"b_o", "w_o"}}},
    {"LayoutIsTwo", [](LayerCall &c) { c.weights.layout = 2; }, {MHA_ERROR_INVALID_VALUE, {2}, {"layout"}}, kThatPack},
    {"LayoutHasHighBits", [](LayerCall &c) { c.weights.layout = 0x80000000u; }, {MHA_ERROR_INVALID_VALUE, {2}, {"layout"}}, kThatPack},
    {"TypeOfWeightsIsFive", [](LayerCall &c) { c.weights.type = 5; }, {MHA_ERROR_INVALID_VALUE, {2}, {"type", "5"}}, kThatPack},
    {"WQStrideIsNegative", [](LayerCall &c) { c.weights.w_q_stride = -1; }, {MHA_ERROR_INVALID_VALUE, {2}, {"w_q_stride"}}, kThatPack},
    {"WKStrideIsNegative", [](LayerCall &c) { c.weights.w_k_stride = -6; }, {MHA_ERROR_INVALID_VALUE, {2}, {"w_k_stride"}}, kThatPack},
    {"WVStrideIsNegative", [](LayerCall &c) { c.weights.w_v_stride = kMin; }, {MHA_ERROR_INVALID_VALUE, {2}, {"w_v_stride"}}, kThatPack},
    {"WOStrideIsNegative", [](LayerCall &c) { c.weights.w_o_stride = -1; }, {MHA_ERROR_INVALID_VALUE, {2}, {"w_o_stride"}}, kThatPack},
    {"WQkvStrideIsNegative",
     [](LayerCall &c) {
       c.UseFused();
       c.weights.w_qkv_stride = -28;
     },
     {MHA_ERROR_INVALID_VALUE, {2}, {"w_qkv_stride"}},
     kThatPack},
    {"WQStrideIsShorterThanARow",
     [](LayerCall &c) { c.weights.w_q_stride = 11; },
     {MHA_ERROR_INVALID_VALUE, {2}, {"w_q_stride", "11", "12"}},
     kThatPack},
    {"WKStrideIsShorterThanARow",
     [](LayerCall &c) { c.weights.w_k_stride = 5; },
     {MHA_ERROR_INVALID_VALUE, {2}, {"w_k_stride", "5", "6"}},
     kThatPack},
    {"WVStrideIsShorterThanARow",
     [](LayerCall &c) { c.weights.w_v_stride = 9; },
     {MHA_ERROR_INVALID_VALUE, {2}, {"w_v_stride", "9", "10"}},
     kThatPack},
    {"WOStrideIsShorterThanARow",
     [](LayerCall &c) { c.weights.w_o_stride = 10; },
     {MHA_ERROR_INVALID_VALUE, {2}, {"w_o_stride", "10", "11"}},
     kThatPack},
    {"WQkvStrideIsShorterThanARow",
     [](LayerCall &c) {
       c.UseFused();
       c.weights.w_qkv_stride = 27;
     },
     {MHA_ERROR_INVALID_VALUE, {2}, {"w_qkv_stride", "27", "28"}},
     kThatPack},
    {"WQStrideIsShorterThanATransposedRow",
     [](LayerCall &c) {
       c.weights.layout = MHA_LAYOUT_OUT_IN;
       c.weights.w_q_stride = 9;
     },
     {MHA_ERROR_INVALID_VALUE, {2}, {"w_q_stride", "9", "10"}},
     kThatPack},
    {"WQStrideIsShorterThanARowOfAHead",
     [](LayerCall &c) {
       c.UseHeads();
       c.weights.w_q_stride = 2;
     },
     {MHA_ERROR_INVALID_VALUE, {2}, {"w_q_stride", "2", "3"}},
     kThatPack},
    {"WQStrideIsTooLarge", [](LayerCall &c) { c.weights.w_q_stride = kMax; }, {MHA_ERROR_TOO_LARGE, {2}, {}}, kThatPack},
    {"WOStrideIsTooLarge", [](LayerCall &c) { c.weights.w_o_stride = kMax; }, {MHA_ERROR_TOO_LARGE, {2}, {}}, kThatPack},
    {"WQStrideOverflowsInBytes",  // 9 rows of 2^59 elements fit into int64_t, but not their bytes
     [](LayerCall &c) { c.weights.w_q_stride = int64_t{1} << 59; },
     {MHA_ERROR_TOO_LARGE, {2}, {}},
     kThatPack},
};
INSTANTIATE_TEST_SUITE_P(Weights, LayerErrors, testing::ValuesIn(kWeightsCases), CaseName<LayerCase>);

const LayerCase kOptionsCases[] = {
    {"OptionsReservedIsSet", [](LayerCall &c) { c.options.reserved = 1; }, {MHA_ERROR_INVALID_VALUE, {3}, {"reserved"}}, kThatPack},
    {"UnknownInstructionSet",
     [](LayerCall &c) { c.options.instruction_set = 5; },
     {MHA_ERROR_INVALID_VALUE, {3}, {"instruction_set", "5"}},
     kCreate},
    {"InstructionSet32",  // must not end up in a shift by 32
     [](LayerCall &c) { c.options.instruction_set = 32; },
     {MHA_ERROR_INVALID_VALUE, {3}, {"instruction_set", "32"}},
     kCreate},
    {"InstructionSetWithAllBits",
     [](LayerCall &c) { c.options.instruction_set = 0xFFFFFFFFu; },
     {MHA_ERROR_INVALID_VALUE, {3}, {"instruction_set"}},
     kCreate},
    {"AbsentInstructionSet",
     [](LayerCall &c) { c.options.instruction_set = AbsentInstructionSet(); },
     {MHA_ERROR_INSTRUCTION_SET, {3}, {mha_instruction_set_name(AbsentInstructionSet())}},
     kCreate},
    {"AllocatorWithoutAllocate",
     [](LayerCall &c) {
       c.allocator.allocate = nullptr;
       c.options.allocator = &c.allocator;
     },
     {MHA_ERROR_NULL_POINTER, {3}, {"allocate"}},
     kCreate},
    {"AllocatorWithoutRelease",
     [](LayerCall &c) {
       c.allocator.release = nullptr;
       c.options.allocator = &c.allocator;
     },
     {MHA_ERROR_NULL_POINTER, {3}, {"release"}},
     kCreate},
    {"AllocatorReturnsNull", [](LayerCall &c) { c.options.allocator = &c.allocator; }, {MHA_ERROR_OUT_OF_MEMORY, {0}, {}}, kCreate},
};
INSTANTIATE_TEST_SUITE_P(Options, LayerErrors, testing::ValuesIn(kOptionsCases), CaseName<LayerCase>);

TEST(LayerCalls, SucceedBeforeTheyAreBroken) {
  const std::vector<void (*)(LayerCall &)> changes = {
      [](LayerCall &) {},
      [](LayerCall &c) { c.UseHeads(); },
      [](LayerCall &c) { c.UseFused(); },
      [](LayerCall &c) { c.RemoveOutputProjection(); },
  };
  for (const auto &change : changes) {
    LayerCall call;
    change(call);
    size_t bytes = 0;
    ExpectSucceeds([&](mha_error *error) { return mha_layer_pack_size(&call.config, &call.weights, &call.options, &bytes, error); });
    ExpectSucceeds([&](mha_error *error) { return mha_layer_pack_size(&call.config, &call.weights, nullptr, &bytes, error); });
    Memory buffer(bytes, Side::kBeforeGuard, 64);
    ExpectSucceeds(
        [&](mha_error *error) { return mha_layer_pack(&call.config, &call.weights, &call.options, buffer.data(), buffer.size(), error); });
    ExpectSucceeds([&](mha_error *error) {
      mha_layer *layer = nullptr;
      const mha_status status = mha_layer_create(&call.config, &call.weights, &call.options, &layer, error);
      EXPECT_NE(layer, nullptr);
      mha_layer_destroy(layer);
      return status;
    });
  }
}

TEST(LayerCalls, NameThePointerThatIsNull) {
  LayerCall call;
  size_t bytes = 4711;
  Memory buffer(1 << 16, Side::kAfterGuard);
  buffer.Fill(0x5A);
  mha_layer *layer = nullptr;
  const auto size = [&](const mha_layer_config *config, const mha_layer_weights *weights, size_t *where) {
    return [=](mha_error *error) { return mha_layer_pack_size(config, weights, nullptr, where, error); };
  };
  const auto pack = [&](const mha_layer_config *config, const mha_layer_weights *weights, void *where) {
    return [=](mha_error *error) { return mha_layer_pack(config, weights, nullptr, where, 1 << 16, error); };
  };
  const auto create = [&](const mha_layer_config *config, const mha_layer_weights *weights, mha_layer **where) {
    return [=](mha_error *error) { return mha_layer_create(config, weights, nullptr, where, error); };
  };
  ExpectFails(size(nullptr, &call.weights, &bytes), {MHA_ERROR_NULL_POINTER, {1}, {"config|mha_layer_config"}});
  ExpectFails(size(&call.config, nullptr, &bytes), {MHA_ERROR_NULL_POINTER, {2}, {"weights|mha_layer_weights"}});
  ExpectFails(size(&call.config, &call.weights, nullptr), {MHA_ERROR_NULL_POINTER, {4}, {"bytes"}});
  EXPECT_EQ(bytes, 4711u);
  ExpectFails(pack(nullptr, &call.weights, buffer.data()), {MHA_ERROR_NULL_POINTER, {1}, {"config|mha_layer_config"}});
  ExpectFails(pack(&call.config, nullptr, buffer.data()), {MHA_ERROR_NULL_POINTER, {2}, {"weights|mha_layer_weights"}});
  ExpectFails(pack(&call.config, &call.weights, nullptr), {MHA_ERROR_NULL_POINTER, {4}, {"buffer"}});
  EXPECT_TRUE(buffer.Holds(0x5A));
  layer = reinterpret_cast<mha_layer *>(&call);
  ExpectFails(create(nullptr, &call.weights, &layer), {MHA_ERROR_NULL_POINTER, {1}, {"config|mha_layer_config"}});
  EXPECT_EQ(layer, nullptr);
  layer = reinterpret_cast<mha_layer *>(&call);
  ExpectFails(create(&call.config, nullptr, &layer), {MHA_ERROR_NULL_POINTER, {2}, {"weights|mha_layer_weights"}});
  EXPECT_EQ(layer, nullptr);
  ExpectFails(create(&call.config, &call.weights, nullptr), {MHA_ERROR_NULL_POINTER, {4}, {"layer"}});
}

TEST(LayerCalls, EverythingNullIsAnErrorToo) {
  mha_error error = UnwrittenError();
  EXPECT_EQ(mha_layer_pack_size(nullptr, nullptr, nullptr, nullptr, &error), MHA_ERROR_NULL_POINTER);
  EXPECT_EQ(error.status, MHA_ERROR_NULL_POINTER);
  EXPECT_EQ(mha_layer_pack(nullptr, nullptr, nullptr, nullptr, 0, &error), MHA_ERROR_NULL_POINTER);
  EXPECT_EQ(mha_layer_create(nullptr, nullptr, nullptr, nullptr, &error), MHA_ERROR_NULL_POINTER);
  EXPECT_EQ(mha_layer_view(nullptr, 0, nullptr, nullptr, 0, nullptr, &error), MHA_ERROR_NULL_POINTER);
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
  const LayerData data{LayerShape{}};
  const size_t bytes = data.PackSize();
  Memory memory(bytes + 64, Side::kAfterGuard);
  memory.Fill(0x5A);
  for (size_t offset = 1; offset < 64; ++offset) {
    ExpectFails(
        [&](mha_error *error) { return mha_layer_pack(&data.config, &data.weights, nullptr, memory.data() + offset, bytes, error); },
        {MHA_ERROR_PACKED_FORMAT, {4}, {"buffer", "64"}});
  }
  EXPECT_TRUE(memory.Holds(0x5A));
}

TEST(Pack, RejectsEverySmallerBufferAndLeavesItUntouched) {
  const LayerData data{LayerShape::SelfAttention(4, 2, 1, 2)};
  const size_t bytes = data.PackSize();
  for (size_t smaller = 0; smaller < bytes; smaller += smaller + 130 < bytes ? 61 : 1) {
    Memory buffer(smaller, Side::kBeforeGuard, 64);
    buffer.Fill(0x5A);
    ExpectFails([&](mha_error *error) { return mha_layer_pack(&data.config, &data.weights, nullptr, buffer.data(), buffer.size(), error); },
                {MHA_ERROR_BUFFER_TOO_SMALL, {4, 5}, {std::to_string(bytes)}});
    EXPECT_TRUE(buffer.Holds(0x5A)) << smaller;
  }
}

// ---- Views -------------------------------------------------------------------------------------------------------------------------

TEST(LayerViews, NameThePointerThatIsNull) {
  const LayerData data{LayerShape{}};
  const Memory buffer = data.Pack();
  Memory storage(mha_layer_view_size(), Side::kBeforeGuard, 16);
  const mha_layer *layer = nullptr;
  const auto view = [&](const void *packed, void *where, const mha_layer **result) {
    return [=, &buffer](mha_error *error) {
      return mha_layer_view(packed, buffer.size(), nullptr, where, mha_layer_view_size(), result, error);
    };
  };
  ExpectSucceeds(view(buffer.data(), storage.data(), &layer));
  storage.Fill(0x5A);
  ExpectFails(view(nullptr, storage.data(), &layer), {MHA_ERROR_NULL_POINTER, {1}, {"buffer"}});
  ExpectFails(view(buffer.data(), nullptr, &layer), {MHA_ERROR_NULL_POINTER, {4}, {"storage"}});
  ExpectFails(view(buffer.data(), storage.data(), nullptr), {MHA_ERROR_NULL_POINTER, {6}, {"layer"}});
  EXPECT_TRUE(storage.Holds(0x5A));
  ExpectFails([&](mha_error *error) { return mha_layer_verify(nullptr, buffer.size(), error); }, {MHA_ERROR_NULL_POINTER, {1}, {"buffer"}});
}

TEST(LayerViews, RejectEveryMisalignedBuffer) {
  const LayerData data{LayerShape{}};
  const Memory buffer = data.Pack();
  Memory storage(mha_layer_view_size(), Side::kBeforeGuard, 16);
  for (size_t offset = 1; offset < 64; ++offset) {
    Memory moved(buffer.size() + offset, Side::kAfterGuard);
    std::memcpy(moved.data() + offset, buffer.data(), buffer.size());
    const mha_layer *layer = nullptr;
    ExpectFails(
        [&](mha_error *error) {
          return mha_layer_view(moved.data() + offset, buffer.size(), nullptr, storage.data(), storage.size(), &layer, error);
        },
        {MHA_ERROR_PACKED_FORMAT, {1}, {"64"}});
    ExpectFails([&](mha_error *error) { return mha_layer_verify(moved.data() + offset, buffer.size(), error); },
                {MHA_ERROR_PACKED_FORMAT, {1}, {"64"}});
  }
}

TEST(LayerViews, RejectEverySmallerStorageAndLeaveItUntouched) {
  const LayerData data{LayerShape{}};
  const Memory buffer = data.Pack();
  const mha_layer *layer = nullptr;
  for (size_t smaller = 0; smaller < mha_layer_view_size(); ++smaller) {
    Memory storage(smaller, Side::kBeforeGuard, 16);
    storage.Fill(0x5A);
    ExpectFails(
        [&](mha_error *error) {
          return mha_layer_view(buffer.data(), buffer.size(), nullptr, storage.data(), storage.size(), &layer, error);
        },
        {MHA_ERROR_BUFFER_TOO_SMALL, {4, 5}, {std::to_string(mha_layer_view_size())}});
    EXPECT_TRUE(storage.Holds(0x5A)) << smaller;
  }
}

TEST(LayerViews, RejectOptionsThatAreWrong) {
  const LayerData data{LayerShape{}};
  const Memory buffer = data.Pack();
  Memory storage(mha_layer_view_size(), Side::kBeforeGuard, 16);
  const mha_layer *layer = nullptr;
  const auto view = [&](const mha_layer_options &options) {
    return [&buffer, &storage, &layer, options](mha_error *error) {
      return mha_layer_view(buffer.data(), buffer.size(), &options, storage.data(), storage.size(), &layer, error);
    };
  };
  ExpectSucceeds(view(Options()));
  mha_layer_options options = Options();
  options.reserved = 1;
  ExpectFails(view(options), {MHA_ERROR_INVALID_VALUE, {3}, {"reserved"}});
  for (uint32_t unknown : {5u, 31u, 32u, 33u, 0x80000001u, 0xFFFFFFFFu}) {
    ExpectFails(view(Options(unknown)), {MHA_ERROR_INVALID_VALUE, {3}, {"instruction_set"}});
  }
  ExpectFails(view(Options(AbsentInstructionSet())), {MHA_ERROR_INSTRUCTION_SET, {3}, {mha_instruction_set_name(AbsentInstructionSet())}});
}

TEST(LayerShapes, NameThePointerThatIsNull) {
  const LayerData data{LayerShape{}};
  const LayerPointer layer = Create(data);
  mha_layer_config config = {};
  config.struct_size = sizeof config;
  ExpectSucceeds([&](mha_error *error) { return mha_layer_shape(layer.get(), &config, error); });
  ExpectFails([&](mha_error *error) { return mha_layer_shape(nullptr, &config, error); }, {MHA_ERROR_NULL_POINTER, {1}, {"layer"}});
  ExpectFails([&](mha_error *error) { return mha_layer_shape(layer.get(), nullptr, error); },
              {MHA_ERROR_NULL_POINTER, {2}, {"config|mha_layer_config"}});
}

// ---- Calls: mha_forward, its workspace query and mha_info --------------------------------------------------------------------------

// Which functions a row is about. The queries look at no data, mha_info alone at q_start.
enum : unsigned { kWorkspace = 1, kCall = 2, kInfo = 4, kReadsStarts = kCall | kInfo, kAllOfTheCall = 7 };

// Everything that can be given is given: different key and value, q_start, a scheduler, all optional outputs.
struct ForwardCall {
  ForwardCall()
      : layer_data(LayerShape{}), layer(Create(layer_data)), data(LayerShape{}, Shape(), layer.get()), args(data.args), scheduler(3) {
    args.scheduler = &scheduler.scheduler;
  }
  static CallShape Shape() {
    CallShape shape;
    shape.q_start = true;
    shape.outputs = kForwardOutputs;
    return shape;
  }
  LayerData layer_data;
  LayerPointer layer;
  ForwardData data;
  mha_forward_args args;
  SerialScheduler scheduler;
};

struct AttentionCall {
  AttentionCall() : data(HeadsShape{}, Shape()), args(data.args), scheduler(3) { args.scheduler = &scheduler.scheduler; }
  static CallShape Shape() {
    CallShape shape;
    shape.q_start = true;
    shape.outputs = kAttentionOutputs;
    return shape;
  }

  AttentionData data;
  mha_attention_args args;
  SerialScheduler scheduler;
};

// Both entries check in the same way; the parameters' numbers differ.
mha_status CallWorkspace(const ForwardCall &c, size_t *bytes, mha_error *e) {
  return mha_forward_workspace(c.layer.get(), &c.args, bytes, e);
}
mha_status CallWorkspace(const AttentionCall &c, size_t *bytes, mha_error *e) { return mha_attention_workspace(&c.args, bytes, e); }
mha_status CallInfo(const ForwardCall &c, mha_call_info *info, mha_error *e) { return mha_info(c.layer.get(), &c.args, info, e); }
mha_status CallInfo(const AttentionCall &c, mha_call_info *info, mha_error *e) { return mha_attention_info(&c.args, info, e); }
mha_status CallRun(const ForwardCall &c, void *workspace, size_t bytes, mha_error *e) {
  return mha_forward(c.layer.get(), &c.args, workspace, bytes, e);
}
mha_status CallRun(const AttentionCall &c, void *workspace, size_t bytes, mha_error *e) {
  return mha_attention(&c.args, workspace, bytes, e);
}

template <typename Call>
struct CallCase {
  const char *name;
  void (*change)(Call &);
  Expected expected;
  unsigned functions = kAllOfTheCall;
};
template <typename Call>
void PrintTo(const CallCase<Call> &row, std::ostream *stream) {
  *stream << row.name;
}

template <typename Call>
void ExpectCallFails(const CallCase<Call> &row) {
  Call call;
  row.change(call);
  if ((row.functions & kWorkspace) != 0) {
    SCOPED_TRACE("the workspace query");
    size_t bytes = 4711;
    ExpectFails([&](mha_error *error) { return CallWorkspace(call, &bytes, error); }, row.expected);
    EXPECT_EQ(bytes, 4711u);
  }
  if ((row.functions & kInfo) != 0) {
    SCOPED_TRACE("the description");
    mha_call_info info;
    std::memset(&info, 0x5A, sizeof info);
    info.struct_size = sizeof info;
    const mha_call_info before = info;
    ExpectFails([&](mha_error *error) { return CallInfo(call, &info, error); }, row.expected);
    EXPECT_EQ(std::memcmp(&info, &before, sizeof info), 0) << "info was written";
  }
  if ((row.functions & kCall) != 0) {
    SCOPED_TRACE("the call");
    Memory workspace(1 << 20);  // far more than the valid call needs
    workspace.Fill(0x5A);
    ExpectFails([&](mha_error *error) { return CallRun(call, workspace.data(), workspace.size(), error); }, row.expected);
    EXPECT_TRUE(call.data.OutputsUntouched());
    EXPECT_EQ(call.scheduler.calls, 0u) << "work was started";
  }
}

template <typename Call>
void ExpectCallSucceeds(void (*change)(Call &)) {
  Call call;
  change(call);
  size_t bytes = 0;
  ExpectSucceeds([&](mha_error *error) { return CallWorkspace(call, &bytes, error); });
  mha_call_info info = {};
  info.struct_size = sizeof info;
  ExpectSucceeds([&](mha_error *error) { return CallInfo(call, &info, error); });
  Memory workspace(bytes);
  ExpectSucceeds([&](mha_error *error) { return CallRun(call, workspace.data(), workspace.size(), error); });
}

class ForwardErrors : public testing::TestWithParam<CallCase<ForwardCall>> {};
TEST_P(ForwardErrors, AreSentencesAndNothingIsWritten) { ExpectCallFails(GetParam()); }

const CallCase<ForwardCall> kForwardCases[] = {
    {"BatchIsNegative", [](ForwardCall &c) { c.args.batch = -1; }, {MHA_ERROR_INVALID_VALUE, {2}, {"batch"}}},
    {"BatchIsTheLeastInteger", [](ForwardCall &c) { c.args.batch = kMin; }, {MHA_ERROR_INVALID_VALUE, {2}, {"batch"}}},
    {"NQIsNegative", [](ForwardCall &c) { c.args.n_q = -1; }, {MHA_ERROR_INVALID_VALUE, {2}, {"n_q"}}},
    {"NKvIsNegative", [](ForwardCall &c) { c.args.n_kv = -1; }, {MHA_ERROR_INVALID_VALUE, {2}, {"n_kv"}}},
    {"QueryIsNull", [](ForwardCall &c) { c.args.query = nullptr; }, {MHA_ERROR_NULL_POINTER, {2}, {"query"}}, kCall},
    {"OutputIsNull", [](ForwardCall &c) { c.args.output = nullptr; }, {MHA_ERROR_NULL_POINTER, {2}, {"output"}}, kCall},
    {"KeyIsNullButHasAnotherWidth",
     [](ForwardCall &c) {
       c.args.key = nullptr;
       c.args.n_kv = c.args.n_q;
     },
     {MHA_ERROR_SHAPE, {2}, {"key", "7", "10"}}},
    {"ValueIsNullButHasAnotherWidth", [](ForwardCall &c) { c.args.value = nullptr; }, {MHA_ERROR_SHAPE, {2}, {"value", "9", "7"}}},
    {"QueryBatchStrideIsNegative",
     [](ForwardCall &c) { c.args.query_batch_stride = -30; },
     {MHA_ERROR_INVALID_VALUE, {2}, {"query_batch_stride|query"}}},
    {"QueryRowStrideIsNegative",
     [](ForwardCall &c) { c.args.query_row_stride = -10; },
     {MHA_ERROR_INVALID_VALUE, {2}, {"query_row_stride|query"}}},
    {"KeyBatchStrideIsNegative",
     [](ForwardCall &c) { c.args.key_batch_stride = -1; },
     {MHA_ERROR_INVALID_VALUE, {2}, {"key_batch_stride|key"}}},
    {"KeyRowStrideIsNegative", [](ForwardCall &c) { c.args.key_row_stride = -1; }, {MHA_ERROR_INVALID_VALUE, {2}, {"key_row_stride|key"}}},
    {"ValueBatchStrideIsNegative",
     [](ForwardCall &c) { c.args.value_batch_stride = kMin; },
     {MHA_ERROR_INVALID_VALUE, {2}, {"value_batch_stride|value"}}},
    {"ValueRowStrideIsNegative",
     [](ForwardCall &c) { c.args.value_row_stride = -1; },
     {MHA_ERROR_INVALID_VALUE, {2}, {"value_row_stride|value"}}},
    {"OutputBatchStrideIsNegative",
     [](ForwardCall &c) { c.args.output_batch_stride = -1; },
     {MHA_ERROR_INVALID_VALUE, {2}, {"output_batch_stride|output"}}},
    {"OutputRowStrideIsNegative",
     [](ForwardCall &c) { c.args.output_row_stride = kMin; },
     {MHA_ERROR_INVALID_VALUE, {2}, {"output_row_stride|output"}}},
    {"QueryRowStrideIsShorterThanARow",
     [](ForwardCall &c) { c.args.query_row_stride = 9; },
     {MHA_ERROR_INVALID_VALUE, {2}, {"query_row_stride|query", "9", "10"}}},
    {"KeyRowStrideIsShorterThanARow",
     [](ForwardCall &c) { c.args.key_row_stride = 6; },
     {MHA_ERROR_INVALID_VALUE, {2}, {"key_row_stride|key", "6", "7"}}},
    {"ValueRowStrideIsShorterThanARow",
     [](ForwardCall &c) { c.args.value_row_stride = 1; },
     {MHA_ERROR_INVALID_VALUE, {2}, {"value_row_stride|value", "1", "9"}}},
    {"OutputRowStrideIsShorterThanARow",
     [](ForwardCall &c) { c.args.output_row_stride = 10; },
     {MHA_ERROR_INVALID_VALUE, {2}, {"output_row_stride|output", "10", "11"}}},
    {"OutputSequencesOverlap",
     [](ForwardCall &c) { c.args.output_batch_stride = 11; },
     {MHA_ERROR_INVALID_VALUE, {2}, {"output_batch_stride|output"}}},
    {"OutputSequencesOverlapByOneElement",
     [](ForwardCall &c) {
       c.args.output_row_stride = 20;
       c.args.output_batch_stride = 2 * 20 + 11 - 1;
     },
     {MHA_ERROR_INVALID_VALUE, {2}, {"output_batch_stride|output"}}},
    {"IsCausalIsTwo", [](ForwardCall &c) { c.args.is_causal = 2; }, {MHA_ERROR_INVALID_VALUE, {2}, {"is_causal", "2"}}},
    {"IsCausalHasHighBits", [](ForwardCall &c) { c.args.is_causal = 0x80000001u; }, {MHA_ERROR_INVALID_VALUE, {2}, {"is_causal"}}},
    {"UnknownFlagIsSet", [](ForwardCall &c) { c.args.flags = 0x100; }, {MHA_ERROR_INVALID_VALUE, {2}, {"flags", "0x100"}}},
    {"CausalWithMoreQueriesThanKeysNeedsStarts",
     [](ForwardCall &c) {
       c.args.is_causal = 1;
       c.args.q_start = nullptr;
       c.args.n_kv = 2;
     },
     {MHA_ERROR_SHAPE, {2}, {"n_q", "n_kv", "3", "2", "q_start"}}},
    {"CausalWithoutKeysNeedsStarts",
     [](ForwardCall &c) {
       c.args.is_causal = 1;
       c.args.q_start = nullptr;
       c.args.n_kv = 0;
     },
     {MHA_ERROR_SHAPE, {2}, {"n_q", "n_kv", "q_start"}}},
    {"FirstStartIsNegative",
     [](ForwardCall &c) {
       c.args.is_causal = 1;
       c.data.q_start()[0] = -1;
     },
     {MHA_ERROR_INVALID_VALUE, {2}, {"q_start"}},
     kReadsStarts},
    {"LastStartIsNegative",
     [](ForwardCall &c) {
       c.args.is_causal = 1;
       c.data.q_start()[1] = kMin;
     },
     {MHA_ERROR_INVALID_VALUE, {2}, {"q_start"}},
     kReadsStarts},
    {"SchedulerWithoutThreads",
     [](ForwardCall &c) { c.scheduler.scheduler.num_threads = 0; },
     {MHA_ERROR_INVALID_VALUE, {2}, {"num_threads"}}},
    {"SchedulerWithoutParallelFor",
     [](ForwardCall &c) { c.scheduler.scheduler.parallel_for = nullptr; },
     {MHA_ERROR_NULL_POINTER, {2}, {"parallel_for"}}},
    {"SchedulerReservedIsSet", [](ForwardCall &c) { c.scheduler.scheduler.reserved = 1; }, {MHA_ERROR_INVALID_VALUE, {2}, {"reserved"}}},
    {"TapsOfAnUnknownSize",
     [](ForwardCall &c) { c.data.optional.taps.struct_size = sizeof(mha_taps) - 1; },
     {MHA_ERROR_STRUCT_SIZE, {2}, {"struct_size"}}},
    {"BatchIsTooLarge", [](ForwardCall &c) { c.args.batch = kMax; }, {MHA_ERROR_TOO_LARGE, {2}, {}}},
    {"NQIsTooLarge", [](ForwardCall &c) { c.args.n_q = kMax; }, {MHA_ERROR_TOO_LARGE, {2}, {}}},
    {"NKvIsTooLarge", [](ForwardCall &c) { c.args.n_kv = kMax; }, {MHA_ERROR_TOO_LARGE, {2}, {}}},
    {"EverythingIsTooLarge", [](ForwardCall &c) { c.args.batch = c.args.n_q = c.args.n_kv = kMax; }, {MHA_ERROR_TOO_LARGE, {2}, {}}},
    {"TheInputIsTwoToThe64Bytes",  // 2^61 rows of 10 floats
     [](ForwardCall &c) { c.args.n_q = int64_t{1} << 61; },
     {MHA_ERROR_TOO_LARGE, {2}, {}}},
    {"AttentionWeightsAreTooLarge",  // 2 * 4 heads * 2^30 * 2^30 floats
     [](ForwardCall &c) { c.args.n_q = c.args.n_kv = int64_t{1} << 30; },
     {MHA_ERROR_TOO_LARGE, {2}, {}}},
    {"QueryRowStrideIsTooLarge", [](ForwardCall &c) { c.args.query_row_stride = kMax; }, {MHA_ERROR_TOO_LARGE, {2}, {}}},
    {"QueryBatchStrideIsTooLarge", [](ForwardCall &c) { c.args.query_batch_stride = kMax; }, {MHA_ERROR_TOO_LARGE, {2}, {}}},
    {"KeyRowStrideIsTooLarge", [](ForwardCall &c) { c.args.key_row_stride = kMax / 2; }, {MHA_ERROR_TOO_LARGE, {2}, {}}},
    {"KeyBatchStrideIsTooLarge", [](ForwardCall &c) { c.args.key_batch_stride = kMax - 1; }, {MHA_ERROR_TOO_LARGE, {2}, {}}},
    {"ValueRowStrideIsTooLarge", [](ForwardCall &c) { c.args.value_row_stride = kMax; }, {MHA_ERROR_TOO_LARGE, {2}, {}}},
    {"ValueBatchStrideIsTooLarge", [](ForwardCall &c) { c.args.value_batch_stride = kMax; }, {MHA_ERROR_TOO_LARGE, {2}, {}}},
    {"OutputRowStrideIsTooLarge", [](ForwardCall &c) { c.args.output_row_stride = kMax; }, {MHA_ERROR_TOO_LARGE, {2}, {}}},
    {"OutputBatchStrideIsTooLarge", [](ForwardCall &c) { c.args.output_batch_stride = kMax; }, {MHA_ERROR_TOO_LARGE, {2}, {}}},
};
INSTANTIATE_TEST_SUITE_P(Args, ForwardErrors, testing::ValuesIn(kForwardCases), CaseName<CallCase<ForwardCall>>);

TEST(ForwardCalls, SucceedBeforeTheyAreBroken) {
  ExpectCallSucceeds<ForwardCall>([](ForwardCall &) {});
  ExpectCallSucceeds<ForwardCall>([](ForwardCall &c) { c.args.is_causal = 1; });
  ExpectCallSucceeds<ForwardCall>([](ForwardCall &c) { c.args.scheduler = nullptr; });
  ExpectCallSucceeds<ForwardCall>([](ForwardCall &c) { c.args.q_start = nullptr; });
  ExpectCallSucceeds<ForwardCall>([](ForwardCall &c) { c.args.n_kv = 0; });
  ExpectCallSucceeds<ForwardCall>([](ForwardCall &c) { c.args.batch = 0; });
  ExpectCallSucceeds<ForwardCall>([](ForwardCall &c) { c.args.n_q = 0; });
  // All strides spelled out, as they would be if they were 0.
  ExpectCallSucceeds<ForwardCall>([](ForwardCall &c) {
    c.args.query_row_stride = 10;
    c.args.query_batch_stride = 3 * 10;
    c.args.key_row_stride = 7;
    c.args.key_batch_stride = 4 * 7;
    c.args.value_row_stride = 9;
    c.args.value_batch_stride = 4 * 9;
    c.args.output_row_stride = 11;
    c.args.output_batch_stride = 3 * 11;
  });
  // Sequences of the input may overlap each other.
  ExpectCallSucceeds<ForwardCall>([](ForwardCall &c) {
    c.args.query_row_stride = 10;
    c.args.query_batch_stride = 10;
  });
}

TEST(ForwardCalls, AcceptOutputSequencesThatInterleaveWithoutOverlap) {
  const LayerData layer_data{LayerShape{}};
  const LayerPointer layer = Create(layer_data);
  for (Order order : {Order::kGaps, Order::kSequenceFirst}) {
    CallShape shape;
    shape.order = order;
    ForwardData data(layer_data.shape, shape, layer.get());
    data.Compute();
  }
  // The second sequence's rows between the rows of the first one; nothing between them is shared.
  CallShape shape;
  ForwardData data(layer_data.shape, shape, layer.get());
  data.output = Rows(shape.batch, shape.n_q, 1, 11, 11, 22, 11, Side::kBeforeGuard);
  data.args.output = data.output.memory.floats();
  data.args.output_batch_stride = 11;
  data.args.output_row_stride = 22;
  data.Compute();
}

// The query's rows serve as keys then: there are n_q of them, and a value for each.
TEST(ForwardCalls, WithValuesButNoKeysHaveOneValueForEachQuery) {
  const LayerData layer_data(LayerShape::SelfAttention(10, 4, 2, 3));
  const LayerPointer layer = Create(layer_data);
  for (int64_t n_kv : {0, 2, 3, 4}) {
    CallShape shape;
    shape.key = false;
    shape.n_kv = n_kv;
    ForwardData data(layer_data.shape, shape, layer.get());
    if (n_kv == shape.n_q) {
      data.Compute();
      continue;
    }
    const Expected expected = {MHA_ERROR_SHAPE, {2}, {"n_q", "n_kv", "3", std::to_string(n_kv)}};
    Memory workspace(1 << 20);
    size_t bytes = 4711;
    ExpectFails([&](mha_error *error) { return data.Workspace(&bytes, error); }, expected);
    EXPECT_EQ(bytes, 4711u);
    ExpectFails([&](mha_error *error) { return data.Run(workspace.data(), workspace.size(), error); }, expected);
    EXPECT_TRUE(data.OutputsUntouched());
  }
}

TEST(ForwardCalls, WriteNothingWhereThereIsNothingToDo) {
  const LayerData layer_data{LayerShape{}};
  const LayerPointer layer = Create(layer_data);
  for (bool empty_batch : {true, false}) {
    CallShape shape;
    shape.outputs = kForwardOutputs & ~(kTapK | kTapV);  // these two depend on the keys, of which there are some
    ForwardData data(layer_data.shape, shape, layer.get());
    (empty_batch ? data.args.batch : data.args.n_q) = 0;
    Memory workspace(data.WorkspaceBytes());
    mha_error error = UnwrittenError();
    ExpectNoError(data.Run(workspace.data(), workspace.size(), &error), error);
    EXPECT_TRUE(data.OutputsUntouched());
  }
}

TEST(ForwardCalls, NameThePointerThatIsNull) {
  ForwardCall call;
  size_t needed = 0;
  ASSERT_EQ(CallWorkspace(call, &needed, nullptr), MHA_OK);
  ASSERT_GT(needed, 0u);
  Memory workspace(needed);
  size_t bytes = 4711;
  mha_call_info info = {};
  info.struct_size = sizeof info;
  const mha_layer *layer = call.layer.get();
  ExpectFails([&](mha_error *error) { return mha_forward_workspace(nullptr, &call.args, &bytes, error); },
              {MHA_ERROR_NULL_POINTER, {1}, {"layer"}});
  ExpectFails([&](mha_error *error) { return mha_forward_workspace(layer, nullptr, &bytes, error); },
              {MHA_ERROR_NULL_POINTER, {2}, {"args|mha_forward_args"}});
  ExpectFails([&](mha_error *error) { return mha_forward_workspace(layer, &call.args, nullptr, error); },
              {MHA_ERROR_NULL_POINTER, {3}, {"bytes"}});
  EXPECT_EQ(bytes, 4711u);
  ExpectFails([&](mha_error *error) { return mha_info(nullptr, &call.args, &info, error); }, {MHA_ERROR_NULL_POINTER, {1}, {"layer"}});
  ExpectFails([&](mha_error *error) { return mha_info(layer, nullptr, &info, error); },
              {MHA_ERROR_NULL_POINTER, {2}, {"args|mha_forward_args"}});
  ExpectFails([&](mha_error *error) { return mha_info(layer, &call.args, nullptr, error); },
              {MHA_ERROR_NULL_POINTER, {3}, {"info|mha_call_info"}});
  ExpectFails([&](mha_error *error) { return mha_forward(nullptr, &call.args, workspace.data(), needed, error); },
              {MHA_ERROR_NULL_POINTER, {1}, {"layer"}});
  ExpectFails([&](mha_error *error) { return mha_forward(layer, nullptr, workspace.data(), needed, error); },
              {MHA_ERROR_NULL_POINTER, {2}, {"args|mha_forward_args"}});
  ExpectFails([&](mha_error *error) { return mha_forward(layer, &call.args, nullptr, needed + 64, error); },
              {MHA_ERROR_NULL_POINTER, {3}, {"workspace"}});
  EXPECT_TRUE(call.data.OutputsUntouched());
}

class AttentionErrors : public testing::TestWithParam<CallCase<AttentionCall>> {};
TEST_P(AttentionErrors, AreSentencesAndNothingIsWritten) { ExpectCallFails(GetParam()); }

const CallCase<AttentionCall> kAttentionCases[] = {
    {"BatchIsNegative", [](AttentionCall &c) { c.args.batch = -1; }, {MHA_ERROR_INVALID_VALUE, {1}, {"batch"}}},
    {"NQIsNegative", [](AttentionCall &c) { c.args.n_q = kMin; }, {MHA_ERROR_INVALID_VALUE, {1}, {"n_q"}}},
    {"NKvIsNegative", [](AttentionCall &c) { c.args.n_kv = -1; }, {MHA_ERROR_INVALID_VALUE, {1}, {"n_kv"}}},
    {"NumHeadsIsZero", [](AttentionCall &c) { c.args.num_heads = 0; }, {MHA_ERROR_INVALID_VALUE, {1}, {"num_heads"}}},
    {"NumHeadsIsNegative", [](AttentionCall &c) { c.args.num_heads = -4; }, {MHA_ERROR_INVALID_VALUE, {1}, {"num_heads"}}},
    {"NumKvHeadsIsNegative", [](AttentionCall &c) { c.args.num_kv_heads = -1; }, {MHA_ERROR_INVALID_VALUE, {1}, {"num_kv_heads"}}},
    {"HeadDimIsZero", [](AttentionCall &c) { c.args.head_dim = 0; }, {MHA_ERROR_INVALID_VALUE, {1}, {"head_dim"}}},
    {"HeadDimIsNegative", [](AttentionCall &c) { c.args.head_dim = -3; }, {MHA_ERROR_INVALID_VALUE, {1}, {"head_dim"}}},
    {"HeadDimVIsNegative", [](AttentionCall &c) { c.args.head_dim_v = -5; }, {MHA_ERROR_INVALID_VALUE, {1}, {"head_dim_v"}}},
    {"NumKvHeadsDoesNotDivide", [](AttentionCall &c) { c.args.num_kv_heads = 3; }, {MHA_ERROR_SHAPE, {1}, {"num_kv_heads", "3", "4"}}},
    {"MoreKvHeadsThanHeads", [](AttentionCall &c) { c.args.num_kv_heads = 8; }, {MHA_ERROR_SHAPE, {1}, {"num_kv_heads", "8", "4"}}},
    {"QIsNull", [](AttentionCall &c) { c.args.q = nullptr; }, {MHA_ERROR_NULL_POINTER, {1}, {"q"}}, kCall},
    {"KIsNull", [](AttentionCall &c) { c.args.k = nullptr; }, {MHA_ERROR_NULL_POINTER, {1}, {"k"}}, kCall},
    {"VIsNull", [](AttentionCall &c) { c.args.v = nullptr; }, {MHA_ERROR_NULL_POINTER, {1}, {"v"}}, kCall},
    {"OutputIsNull", [](AttentionCall &c) { c.args.output = nullptr; }, {MHA_ERROR_NULL_POINTER, {1}, {"output"}}, kCall},
    {"QTypeIsUnknown", [](AttentionCall &c) { c.args.q_type = 1; }, {MHA_ERROR_INVALID_VALUE, {1}, {"q_type"}}},
    {"KTypeIsUnknown", [](AttentionCall &c) { c.args.k_type = 3; }, {MHA_ERROR_INVALID_VALUE, {1}, {"k_type"}}},
    {"VTypeIsUnknown", [](AttentionCall &c) { c.args.v_type = 0x80000000u; }, {MHA_ERROR_INVALID_VALUE, {1}, {"v_type"}}},
    {"OutputTypeIsUnknown", [](AttentionCall &c) { c.args.output_type = 0xFFFFFFFFu; }, {MHA_ERROR_INVALID_VALUE, {1}, {"output_type"}}},
    {"QBatchStrideIsNegative", [](AttentionCall &c) { c.args.q_batch_stride = -1; }, {MHA_ERROR_INVALID_VALUE, {1}, {"q_batch_stride|q"}}},
    {"QRowStrideIsNegative", [](AttentionCall &c) { c.args.q_row_stride = -1; }, {MHA_ERROR_INVALID_VALUE, {1}, {"q_row_stride|q"}}},
    {"QHeadStrideIsNegative", [](AttentionCall &c) { c.args.q_head_stride = -1; }, {MHA_ERROR_INVALID_VALUE, {1}, {"q_head_stride|q"}}},
    {"KBatchStrideIsNegative",
     [](AttentionCall &c) { c.args.k_batch_stride = kMin; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"k_batch_stride|k"}}},
    {"KRowStrideIsNegative", [](AttentionCall &c) { c.args.k_row_stride = -6; }, {MHA_ERROR_INVALID_VALUE, {1}, {"k_row_stride|k"}}},
    {"KHeadStrideIsNegative", [](AttentionCall &c) { c.args.k_head_stride = -3; }, {MHA_ERROR_INVALID_VALUE, {1}, {"k_head_stride|k"}}},
    {"VBatchStrideIsNegative", [](AttentionCall &c) { c.args.v_batch_stride = -1; }, {MHA_ERROR_INVALID_VALUE, {1}, {"v_batch_stride|v"}}},
    {"VRowStrideIsNegative", [](AttentionCall &c) { c.args.v_row_stride = kMin; }, {MHA_ERROR_INVALID_VALUE, {1}, {"v_row_stride|v"}}},
    {"VHeadStrideIsNegative", [](AttentionCall &c) { c.args.v_head_stride = -1; }, {MHA_ERROR_INVALID_VALUE, {1}, {"v_head_stride|v"}}},
    {"OutputBatchStrideIsNegative",
     [](AttentionCall &c) { c.args.output_batch_stride = -60; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"output_batch_stride|output"}}},
    {"OutputRowStrideIsNegative",
     [](AttentionCall &c) { c.args.output_row_stride = -20; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"output_row_stride|output"}}},
    {"OutputHeadStrideIsNegative",
     [](AttentionCall &c) { c.args.output_head_stride = -5; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"output_head_stride|output"}}},
    {"QRowStrideIsShorterThanARow",
     [](AttentionCall &c) { c.args.q_row_stride = 2; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"q_row_stride|q", "2", "3"}}},
    {"KRowStrideIsShorterThanARow",
     [](AttentionCall &c) { c.args.k_row_stride = 1; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"k_row_stride|k", "1", "3"}}},
    {"VRowStrideIsShorterThanARow",
     [](AttentionCall &c) { c.args.v_row_stride = 4; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"v_row_stride|v", "4", "5"}}},
    {"OutputRowStrideIsShorterThanARow",
     [](AttentionCall &c) {
       c.args.output_row_stride = 4;
       c.args.output_head_stride = 15;
     },
     {MHA_ERROR_INVALID_VALUE, {1}, {"output_row_stride|output"}}},
    {"OutputHeadStrideIsShorterThanARow",
     [](AttentionCall &c) { c.args.output_head_stride = 4; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"output_head_stride|output"}}},
    {"OutputHeadsOverlapRows",  // row 1 of head 0 is row 0 of head 1
     [](AttentionCall &c) { c.args.output_row_stride = 5; },
     {MHA_ERROR_INVALID_VALUE, {1}, {}}},
    {"OutputHeadsOverlapRowsByOneElement",  // [batch, heads, n, width] with heads that are one element too close
     [](AttentionCall &c) {
       c.args.output_row_stride = 5;
       c.args.output_head_stride = 14;
       c.args.output_batch_stride = 60;
     },
     {MHA_ERROR_INVALID_VALUE, {1}, {}}},
    {"OutputSequencesOverlap", [](AttentionCall &c) { c.args.output_batch_stride = 59; }, {MHA_ERROR_INVALID_VALUE, {1}, {}}},
    {"ScaleIsNan", [](AttentionCall &c) { c.args.scale = kNan; }, {MHA_ERROR_INVALID_VALUE, {1}, {"scale"}}},
    {"ScaleIsInfinite", [](AttentionCall &c) { c.args.scale = kInfinity; }, {MHA_ERROR_INVALID_VALUE, {1}, {"scale"}}},
    {"ScaleIsMinusInfinity", [](AttentionCall &c) { c.args.scale = -kInfinity; }, {MHA_ERROR_INVALID_VALUE, {1}, {"scale"}}},
    {"IsCausalIsTwo", [](AttentionCall &c) { c.args.is_causal = 2; }, {MHA_ERROR_INVALID_VALUE, {1}, {"is_causal", "2"}}},
    {"CausalWithMoreQueriesThanKeysNeedsStarts",
     [](AttentionCall &c) {
       c.args.is_causal = 1;
       c.args.q_start = nullptr;
       c.args.n_kv = 2;
     },
     {MHA_ERROR_SHAPE, {1}, {"n_q", "n_kv", "3", "2", "q_start"}}},
    {"FirstStartIsNegative",
     [](AttentionCall &c) {
       c.args.is_causal = 1;
       c.data.q_start()[0] = -1;
     },
     {MHA_ERROR_INVALID_VALUE, {1}, {"q_start"}},
     kReadsStarts},
    {"LastStartIsNegative",
     [](AttentionCall &c) {
       c.args.is_causal = 1;
       c.data.q_start()[1] = kMin;
     },
     {MHA_ERROR_INVALID_VALUE, {1}, {"q_start"}},
     kReadsStarts},
    {"SchedulerWithoutThreads",
     [](AttentionCall &c) { c.scheduler.scheduler.num_threads = 0; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"num_threads"}}},
    {"SchedulerWithoutParallelFor",
     [](AttentionCall &c) { c.scheduler.scheduler.parallel_for = nullptr; },
     {MHA_ERROR_NULL_POINTER, {1}, {"parallel_for"}}},
    {"SchedulerReservedIsSet", [](AttentionCall &c) { c.scheduler.scheduler.reserved = 1; }, {MHA_ERROR_INVALID_VALUE, {1}, {"reserved"}}},
    {"TapQ",
     [](AttentionCall &c) { c.data.optional.taps.q = c.data.optional.taps.context; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"taps", "q"}}},
    {"TapK",
     [](AttentionCall &c) { c.data.optional.taps.k = c.data.optional.taps.context; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"taps", "k"}}},
    {"TapV",
     [](AttentionCall &c) { c.data.optional.taps.v = c.data.optional.taps.context; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"taps", "v"}}},
    {"TapsOfAnUnknownSize", [](AttentionCall &c) { c.data.optional.taps.struct_size = 0; }, {MHA_ERROR_STRUCT_SIZE, {1}, {"struct_size"}}},
    {"UnknownInstructionSet",
     [](AttentionCall &c) { c.args.instruction_set = 5; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"instruction_set", "5"}}},
    {"InstructionSet32", [](AttentionCall &c) { c.args.instruction_set = 32; }, {MHA_ERROR_INVALID_VALUE, {1}, {"instruction_set", "32"}}},
    {"InstructionSetWithAllBits",
     [](AttentionCall &c) { c.args.instruction_set = 0xFFFFFFFFu; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"instruction_set"}}},
    {"AbsentInstructionSet",
     [](AttentionCall &c) { c.args.instruction_set = AbsentInstructionSet(); },
     {MHA_ERROR_INSTRUCTION_SET, {1}, {mha_instruction_set_name(AbsentInstructionSet())}}},
    {"UnknownFlagIsSet", [](AttentionCall &c) { c.args.flags = 0x100; }, {MHA_ERROR_INVALID_VALUE, {1}, {"flags", "0x100"}}},
    {"BatchIsTooLarge", [](AttentionCall &c) { c.args.batch = kMax; }, {MHA_ERROR_TOO_LARGE, {1}, {}}},
    {"NQIsTooLarge", [](AttentionCall &c) { c.args.n_q = kMax; }, {MHA_ERROR_TOO_LARGE, {1}, {}}},
    {"NKvIsTooLarge", [](AttentionCall &c) { c.args.n_kv = kMax; }, {MHA_ERROR_TOO_LARGE, {1}, {}}},
    {"NumHeadsIsTooLarge", [](AttentionCall &c) { c.args.num_heads = c.args.num_kv_heads = kMax; }, {MHA_ERROR_TOO_LARGE, {1}, {}}},
    {"HeadDimIsTooLarge", [](AttentionCall &c) { c.args.head_dim = kMax; }, {MHA_ERROR_TOO_LARGE, {1}, {}}},
    {"HeadDimVIsTooLarge", [](AttentionCall &c) { c.args.head_dim_v = kMax; }, {MHA_ERROR_TOO_LARGE, {1}, {}}},
    {"EverythingIsTooLarge",
     [](AttentionCall &c) {
       c.args.batch = c.args.n_q = c.args.n_kv = c.args.num_heads = c.args.num_kv_heads = c.args.head_dim = c.args.head_dim_v = kMax;
     },
     {MHA_ERROR_TOO_LARGE, {1}, {}}},
    {"AttentionWeightsAreTooLarge", [](AttentionCall &c) { c.args.n_q = c.args.n_kv = int64_t{1} << 30; }, {MHA_ERROR_TOO_LARGE, {1}, {}}},
    {"QRowStrideIsTooLarge", [](AttentionCall &c) { c.args.q_row_stride = kMax; }, {MHA_ERROR_TOO_LARGE, {1}, {}}},
    {"QBatchStrideIsTooLarge", [](AttentionCall &c) { c.args.q_batch_stride = kMax; }, {MHA_ERROR_TOO_LARGE, {1}, {}}},
    {"QHeadStrideIsTooLarge",
     [](AttentionCall &c) { c.args.q_batch_stride = c.args.q_row_stride = c.args.q_head_stride = kMax; },
     {MHA_ERROR_TOO_LARGE, {1}, {}}},
    {"KRowStrideIsTooLarge", [](AttentionCall &c) { c.args.k_row_stride = kMax / 3; }, {MHA_ERROR_TOO_LARGE, {1}, {}}},
    {"KHeadStrideIsTooLarge",
     [](AttentionCall &c) { c.args.k_batch_stride = c.args.k_row_stride = c.args.k_head_stride = kMax; },
     {MHA_ERROR_TOO_LARGE, {1}, {}}},
    {"VBatchStrideIsTooLarge", [](AttentionCall &c) { c.args.v_batch_stride = kMax; }, {MHA_ERROR_TOO_LARGE, {1}, {}}},
    {"OutputRowStrideIsTooLarge", [](AttentionCall &c) { c.args.output_row_stride = kMax; }, {MHA_ERROR_TOO_LARGE, {1}, {}}},
    {"OutputBatchStrideIsTooLarge", [](AttentionCall &c) { c.args.output_batch_stride = kMax; }, {MHA_ERROR_TOO_LARGE, {1}, {}}},
    {"OutputHeadStrideIsTooLarge",
     [](AttentionCall &c) { c.args.output_batch_stride = c.args.output_row_stride = c.args.output_head_stride = kMax; },
     {MHA_ERROR_TOO_LARGE, {1}, {}}},
};
INSTANTIATE_TEST_SUITE_P(Args, AttentionErrors, testing::ValuesIn(kAttentionCases), CaseName<CallCase<AttentionCall>>);

TEST(AttentionCalls, SucceedBeforeTheyAreBroken) {
  ExpectCallSucceeds<AttentionCall>([](AttentionCall &) {});
  ExpectCallSucceeds<AttentionCall>([](AttentionCall &c) { c.args.is_causal = 1; });
  ExpectCallSucceeds<AttentionCall>([](AttentionCall &c) { c.args.scheduler = nullptr; });
  ExpectCallSucceeds<AttentionCall>([](AttentionCall &c) { c.args.q_start = nullptr; });
  ExpectCallSucceeds<AttentionCall>([](AttentionCall &c) { c.args.n_kv = 0; });
  ExpectCallSucceeds<AttentionCall>([](AttentionCall &c) { c.args.batch = 0; });
  ExpectCallSucceeds<AttentionCall>([](AttentionCall &c) { c.args.n_q = 0; });
  ExpectCallSucceeds<AttentionCall>([](AttentionCall &c) { c.args.scale = -0.5f; });
  // All strides spelled out, as they would be if they were 0.
  ExpectCallSucceeds<AttentionCall>([](AttentionCall &c) {
    c.args.q_head_stride = 3;
    c.args.q_row_stride = 12;
    c.args.q_batch_stride = 36;
    c.args.k_head_stride = 3;
    c.args.k_row_stride = 6;
    c.args.k_batch_stride = 24;
    c.args.v_head_stride = 5;
    c.args.v_row_stride = 10;
    c.args.v_batch_stride = 40;
    c.args.output_head_stride = 5;
    c.args.output_row_stride = 20;
    c.args.output_batch_stride = 60;
  });
}

TEST(AttentionCalls, AcceptEveryNestingOfBatchRowsAndHeads) {
  for (Order order : {Order::kHeadsFirst, Order::kSequenceFirst, Order::kGaps}) {
    CallShape shape;
    shape.order = order;
    AttentionData data(HeadsShape{}, shape);
    data.Compute();
  }
}

TEST(AttentionCalls, NameThePointerThatIsNull) {
  AttentionCall call;
  size_t needed = 0;
  ASSERT_EQ(CallWorkspace(call, &needed, nullptr), MHA_OK);
  ASSERT_GT(needed, 0u);
  Memory workspace(needed);
  size_t bytes = 4711;
  mha_call_info info = {};
  info.struct_size = sizeof info;
  ExpectFails([&](mha_error *error) { return mha_attention_workspace(nullptr, &bytes, error); },
              {MHA_ERROR_NULL_POINTER, {1}, {"args|mha_attention_args"}});
  ExpectFails([&](mha_error *error) { return mha_attention_workspace(&call.args, nullptr, error); },
              {MHA_ERROR_NULL_POINTER, {2}, {"bytes"}});
  EXPECT_EQ(bytes, 4711u);
  ExpectFails([&](mha_error *error) { return mha_attention_info(nullptr, &info, error); },
              {MHA_ERROR_NULL_POINTER, {1}, {"args|mha_attention_args"}});
  ExpectFails([&](mha_error *error) { return mha_attention_info(&call.args, nullptr, error); },
              {MHA_ERROR_NULL_POINTER, {2}, {"info|mha_call_info"}});
  ExpectFails([&](mha_error *error) { return mha_attention(nullptr, workspace.data(), needed, error); },
              {MHA_ERROR_NULL_POINTER, {1}, {"args|mha_attention_args"}});
  ExpectFails([&](mha_error *error) { return mha_attention(&call.args, nullptr, needed + 64, error); },
              {MHA_ERROR_NULL_POINTER, {2}, {"workspace"}});
  EXPECT_TRUE(call.data.OutputsUntouched());
}

// ---- Workspace ---------------------------------------------------------------------------------------------------------------------

template <typename Call>
void ExpectEverySmallerWorkspaceFails(uint32_t argument) {
  Call call;
  size_t needed = 0;
  ASSERT_EQ(CallWorkspace(call, &needed, nullptr), MHA_OK);
  ASSERT_GT(needed, 0u);
  for (size_t smaller = 0; smaller < needed; smaller += smaller + 400 < needed ? 131 : 1) {
    Memory workspace(smaller);
    ExpectFails([&](mha_error *error) { return CallRun(call, workspace.data(), smaller, error); },
                {MHA_ERROR_BUFFER_TOO_SMALL, {argument, argument + 1}, {std::to_string(needed)}});
    ASSERT_TRUE(call.data.OutputsUntouched()) << smaller << " of " << needed;
  }
  // Too small is too small, also where there is nothing at all.
  mha_error error = UnwrittenError();
  EXPECT_NE(CallRun(call, nullptr, 0, &error), MHA_OK);
  EXPECT_TRUE(call.data.OutputsUntouched());
}

TEST(Workspace, OfForwardIsRejectedIfItIsSmaller) { ExpectEverySmallerWorkspaceFails<ForwardCall>(3); }
TEST(Workspace, OfAttentionIsRejectedIfItIsSmaller) { ExpectEverySmallerWorkspaceFails<AttentionCall>(2); }

// ---- struct_size -------------------------------------------------------------------------------------------------------------------

// Calls with a struct of every size from 0 to 8 bytes more than it has. Only struct_size bytes are accessible, up to the alignment, so
// that a read beyond them faults. This is the first version, so the least size is the struct as it is; a larger one comes from a newer
// program, and must be accepted as long as it uses nothing new. call: mha_status(const Struct *, mha_error *).
template <typename Struct, typename Call>
void ExpectStructSizeRule(const Struct &valid, uint32_t argument, const Call &call) {
  const Expected expected = {MHA_ERROR_STRUCT_SIZE, {argument}, {"struct_size"}};
  const auto place = [&](Memory &memory, size_t size) {
    memory.Fill(0);
    std::memcpy(memory.data(), &valid, std::min(sizeof valid, memory.size()));
    auto *placed = reinterpret_cast<Struct *>(memory.data());
    std::memcpy(memory.data(), &size, sizeof size);
    return placed;
  };
  for (size_t size = 0; size <= sizeof(Struct) + 8; ++size) {
    SCOPED_TRACE("struct_size " + std::to_string(size));
    Memory memory(std::max(size, sizeof size), Side::kBeforeGuard, alignof(Struct));
    const Struct *placed = place(memory, size);
    if (size < sizeof(Struct)) {
      ExpectFails([&](mha_error *error) { return call(placed, error); }, expected);
      continue;
    }
    ExpectSucceeds([&](mha_error *error) { return call(placed, error); });
    for (size_t byte = sizeof(Struct); byte < size; ++byte) {
      for (int bit : {0x01, 0x80}) {
        memory.data()[byte] = static_cast<unsigned char>(bit);
        ExpectFails([&](mha_error *error) { return call(placed, error); }, expected);
        memory.data()[byte] = 0;
      }
    }
  }
  // A tail longer than a few bytes is looked at to its end as well.
  Memory memory(sizeof(Struct) + 4096);
  const Struct *placed = place(memory, memory.size());
  ExpectSucceeds([&](mha_error *error) { return call(placed, error); });
  memory.data()[memory.size() - 1] = 1;
  ExpectFails([&](mha_error *error) { return call(placed, error); }, expected);
}

mha_status CreateAndDestroy(const mha_layer_config *config, const mha_layer_weights *weights, const mha_layer_options *options,
                            mha_error *error) {
  mha_layer *layer = nullptr;
  const mha_status status = mha_layer_create(config, weights, options, &layer, error);
  EXPECT_EQ(layer == nullptr, status != MHA_OK);
  mha_layer_destroy(layer);
  return status;
}

TEST(StructSize, OfTheLayerConfig) {
  const LayerData data{LayerShape{}};
  Memory buffer(data.PackSize(), Side::kBeforeGuard, 64);
  size_t bytes;
  ExpectStructSizeRule(data.config, 1, [&](const mha_layer_config *config, mha_error *error) {
    return mha_layer_pack_size(config, &data.weights, nullptr, &bytes, error);
  });
  ExpectStructSizeRule(data.config, 1, [&](const mha_layer_config *config, mha_error *error) {
    return mha_layer_pack(config, &data.weights, nullptr, buffer.data(), buffer.size(), error);
  });
  ExpectStructSizeRule(data.config, 1, [&](const mha_layer_config *config, mha_error *error) {
    return CreateAndDestroy(config, &data.weights, nullptr, error);
  });
}

TEST(StructSize, OfTheLayerWeights) {
  const LayerData data{LayerShape{}};
  Memory buffer(data.PackSize(), Side::kBeforeGuard, 64);
  size_t bytes;
  ExpectStructSizeRule(data.weights, 2, [&](const mha_layer_weights *weights, mha_error *error) {
    return mha_layer_pack_size(&data.config, weights, nullptr, &bytes, error);
  });
  ExpectStructSizeRule(data.weights, 2, [&](const mha_layer_weights *weights, mha_error *error) {
    return mha_layer_pack(&data.config, weights, nullptr, buffer.data(), buffer.size(), error);
  });
  ExpectStructSizeRule(data.weights, 2, [&](const mha_layer_weights *weights, mha_error *error) {
    return CreateAndDestroy(&data.config, weights, nullptr, error);
  });
}

TEST(StructSize, OfTheLayerOptions) {
  const LayerData data{LayerShape{}};
  Memory buffer(data.PackSize(), Side::kBeforeGuard, 64);
  const Memory packed = data.Pack();
  Memory storage(mha_layer_view_size(), Side::kBeforeGuard, 16);
  size_t bytes;
  ExpectStructSizeRule(Options(), 3, [&](const mha_layer_options *options, mha_error *error) {
    return mha_layer_pack_size(&data.config, &data.weights, options, &bytes, error);
  });
  ExpectStructSizeRule(Options(), 3, [&](const mha_layer_options *options, mha_error *error) {
    return mha_layer_pack(&data.config, &data.weights, options, buffer.data(), buffer.size(), error);
  });
  ExpectStructSizeRule(Options(), 3, [&](const mha_layer_options *options, mha_error *error) {
    return CreateAndDestroy(&data.config, &data.weights, options, error);
  });
  ExpectStructSizeRule(Options(), 3, [&](const mha_layer_options *options, mha_error *error) {
    const mha_layer *layer;
    return mha_layer_view(packed.data(), packed.size(), options, storage.data(), storage.size(), &layer, error);
  });
}

TEST(StructSize, OfTheForwardArguments) {
  ForwardCall call;
  const mha_layer *layer = call.layer.get();
  size_t needed = 0;
  ASSERT_EQ(CallWorkspace(call, &needed, nullptr), MHA_OK);
  Memory workspace(needed);
  size_t bytes;
  ExpectStructSizeRule(call.args, 2,
                       [&](const mha_forward_args *args, mha_error *error) { return mha_forward_workspace(layer, args, &bytes, error); });
  ExpectStructSizeRule(call.args, 2, [&](const mha_forward_args *args, mha_error *error) {
    call.data.PoisonOutputs();
    const mha_status status = mha_forward(layer, args, workspace.data(), workspace.size(), error);
    EXPECT_EQ(call.data.OutputsUntouched(), status != MHA_OK);
    return status;
  });
  ExpectStructSizeRule(call.args, 2, [&](const mha_forward_args *args, mha_error *error) {
    mha_call_info info = {};
    info.struct_size = sizeof info;
    return mha_info(layer, args, &info, error);
  });
}

TEST(StructSize, OfTheAttentionArguments) {
  AttentionCall call;
  size_t needed = 0;
  ASSERT_EQ(CallWorkspace(call, &needed, nullptr), MHA_OK);
  Memory workspace(needed);
  size_t bytes;
  ExpectStructSizeRule(call.args, 1,
                       [&](const mha_attention_args *args, mha_error *error) { return mha_attention_workspace(args, &bytes, error); });
  ExpectStructSizeRule(call.args, 1, [&](const mha_attention_args *args, mha_error *error) {
    call.data.PoisonOutputs();
    const mha_status status = mha_attention(args, workspace.data(), workspace.size(), error);
    EXPECT_EQ(call.data.OutputsUntouched(), status != MHA_OK);
    return status;
  });
  ExpectStructSizeRule(call.args, 1, [&](const mha_attention_args *args, mha_error *error) {
    mha_call_info info = {};
    info.struct_size = sizeof info;
    return mha_attention_info(args, &info, error);
  });
}

TEST(StructSize, OfTheTaps) {
  ForwardCall forward;
  AttentionCall attention;
  size_t needed = 0;
  ASSERT_EQ(CallWorkspace(forward, &needed, nullptr), MHA_OK);
  Memory workspace(needed);
  size_t bytes;
  ExpectStructSizeRule(forward.data.optional.taps, 2, [&](const mha_taps *taps, mha_error *error) {
    forward.args.taps = taps;
    return mha_forward_workspace(forward.layer.get(), &forward.args, &bytes, error);
  });
  ExpectStructSizeRule(forward.data.optional.taps, 2, [&](const mha_taps *taps, mha_error *error) {
    forward.args.taps = taps;
    forward.data.PoisonOutputs();
    const mha_status status = mha_forward(forward.layer.get(), &forward.args, workspace.data(), workspace.size(), error);
    EXPECT_EQ(forward.data.OutputsUntouched(), status != MHA_OK);
    return status;
  });
  ExpectStructSizeRule(attention.data.optional.taps, 1, [&](const mha_taps *taps, mha_error *error) {
    attention.args.taps = taps;
    return mha_attention_workspace(&attention.args, &bytes, error);
  });
}

// A struct that is filled: too small is an error that leaves it alone; of a larger one only what is known is touched.
template <typename Struct, typename Call>
void ExpectFilledStructSizeRule(uint32_t argument, const Call &call) {
  for (size_t size = 0; size <= sizeof(Struct) + 8; ++size) {
    SCOPED_TRACE("struct_size " + std::to_string(size));
    Memory memory(std::max(size, sizeof size), Side::kBeforeGuard, alignof(Struct));
    memory.Fill(0);
    std::memcpy(memory.data(), &size, sizeof size);
    const std::string before = memory.Bytes();
    auto *placed = reinterpret_cast<Struct *>(memory.data());
    if (size < sizeof(Struct)) {
      ExpectFails([&](mha_error *error) { return call(placed, error); }, {MHA_ERROR_STRUCT_SIZE, {argument}, {"struct_size"}});
      EXPECT_EQ(memory.Bytes(), before);
    } else {
      ExpectSucceeds([&](mha_error *error) { return call(placed, error); });
      EXPECT_EQ(placed->struct_size, size);
      EXPECT_EQ(memory.Bytes().substr(sizeof(Struct)), before.substr(sizeof(Struct)));
      EXPECT_NE(memory.Bytes(), before);
    }
  }
}

TEST(StructSize, OfStructsThatAreFilled) {
  ForwardCall forward;
  AttentionCall attention;
  ExpectFilledStructSizeRule<mha_layer_config>(
      2, [&](mha_layer_config *config, mha_error *error) { return mha_layer_shape(forward.layer.get(), config, error); });
  ExpectFilledStructSizeRule<mha_call_info>(
      3, [&](mha_call_info *info, mha_error *error) { return mha_info(forward.layer.get(), &forward.args, info, error); });
  ExpectFilledStructSizeRule<mha_call_info>(
      2, [&](mha_call_info *info, mha_error *error) { return mha_attention_info(&attention.args, info, error); });
}

// ---- Sizes at the edges of 64 bits -------------------------------------------------------------------------------------------------

using Wide = unsigned __int128;
constexpr Wide kSizeMax = std::numeric_limits<size_t>::max();
constexpr Wide kSurelyFine = Wide{1} << 40;  // bytes: far from every limit

const std::vector<int64_t> kMagnitudes = {1,
                                          2,
                                          3,
                                          48,
                                          1000,
                                          (int64_t{1} << 16) + 1,
                                          (int64_t{1} << 31) - 1,
                                          int64_t{1} << 31,
                                          (int64_t{1} << 32) + 1,
                                          int64_t{1} << 40,
                                          int64_t{1} << 52,
                                          (int64_t{1} << 60) - 1,
                                          (int64_t{1} << 61) + 1,
                                          int64_t{1} << 62,
                                          kMax - 64,
                                          kMax - 1,
                                          kMax};

// A product that sticks at a value far beyond every limit instead of overflowing, even in 128 bits.
Wide Times(Wide a, int64_t b) {
  const Wide limit = Wide{1} << 120;
  return b != 0 && a > limit / static_cast<Wide>(b) ? limit : a * static_cast<Wide>(b);
}

// A size query about valid numbers has an answer, or they are too large. It can't have one where the arrays of the call (in bytes) can't
// exist, and must have one where even a generous estimate of what is needed is far from every limit. The answer is at least `least`.
void ExpectExactOrTooLarge(mha_status status, const mha_error &error, size_t bytes, Wide arrays, Wide generous, Wide least) {
  EXPECT_EQ(error.status, status);
  if (status == MHA_OK) {
    EXPECT_LE(arrays, kSizeMax) << "the arrays can't exist";
    EXPECT_GE(Wide{bytes}, least);
  } else {
    EXPECT_EQ(Name(status), Name(MHA_ERROR_TOO_LARGE)) << error.message;
    EXPECT_GT(generous, kSurelyFine) << error.message;
    EXPECT_EQ(bytes, 4711u);
  }
}

// A row of more than 2^31 - 1 numbers may be refused although memory could hold it.
Wide BeyondInt(const std::vector<Wide> &widths) {
  const Wide most = static_cast<Wide>(std::numeric_limits<int32_t>::max());
  return std::any_of(widths.begin(), widths.end(), [=](Wide width) { return width > most; }) ? kSurelyFine : 0;
}

TEST(Sizes, OfPackedLayersAreExactOrTooLargeForEveryMagnitude) {
  Random random(11);
  const float number = 0;
  int succeeded = 0;
  for (int i = 0; i < 20000; ++i) {
    mha_layer_config config = {};
    config.struct_size = sizeof config;
    config.query_dim = random.Pick(kMagnitudes);
    config.key_dim = random.Pick(kMagnitudes);
    config.value_dim = random.Pick(kMagnitudes);
    config.num_kv_heads = random.Coin() ? 1 : random.Pick(kMagnitudes);
    config.num_heads = random.Coin() ? config.num_kv_heads : random.Pick(kMagnitudes);
    if (config.num_heads % config.num_kv_heads != 0) config.num_kv_heads = config.num_heads;
    config.head_dim = random.Coin() ? 1 : random.Pick(kMagnitudes);
    config.head_dim_v = random.Coin() ? 1 : random.Pick(kMagnitudes);
    if (random.Coin()) config.query_dim = config.key_dim = config.value_dim = random.Between(1, 64);
    mha_layer_weights weights = {};
    weights.struct_size = sizeof weights;
    weights.w_q = weights.w_k = weights.w_v = &number;
    if (random.Coin()) {
      weights.w_o = &number;
      config.output_dim = random.Pick(kMagnitudes);
    }
    if (random.Coin()) weights.b_q = weights.b_k = weights.b_v = &number;
    Wide elements = Times(Times(static_cast<Wide>(config.query_dim), config.num_heads), config.head_dim);
    elements += Times(Times(static_cast<Wide>(config.key_dim), config.num_kv_heads), config.head_dim);
    elements += Times(Times(static_cast<Wide>(config.value_dim), config.num_kv_heads), config.head_dim_v);
    elements += Times(Times(static_cast<Wide>(config.output_dim), config.num_heads), config.head_dim_v);
    const std::vector<Wide> widths = {static_cast<Wide>(config.query_dim),
                                      static_cast<Wide>(config.key_dim),
                                      static_cast<Wide>(config.value_dim),
                                      static_cast<Wide>(config.output_dim),
                                      Times(static_cast<Wide>(config.num_heads), config.head_dim),
                                      Times(static_cast<Wide>(config.num_heads), config.head_dim_v)};
    // Whole panels make thin matrices several times as large: "surely fine" counts 64 more columns for each matrix.
    const Wide rows = static_cast<Wide>(config.query_dim) + static_cast<Wide>(config.key_dim) + static_cast<Wide>(config.value_dim) +
                      static_cast<Wide>(config.num_heads) * static_cast<Wide>(config.head_dim_v);
    size_t bytes = 4711;
    mha_error error;
    const mha_status status = mha_layer_pack_size(&config, &weights, nullptr, &bytes, &error);
    ExpectExactOrTooLarge(status, error, bytes, elements * 4, (elements + Times(rows, 64)) * 4 + BeyondInt(widths), elements * 4);
    if (status == MHA_OK) ++succeeded;
    if (HasFailure()) {
      FAIL() << "query_dim " << config.query_dim << " key_dim " << config.key_dim << " value_dim " << config.value_dim << " output_dim "
             << config.output_dim << " num_heads " << config.num_heads << " num_kv_heads " << config.num_kv_heads << " head_dim "
             << config.head_dim << " head_dim_v " << config.head_dim_v;
    }
  }
  EXPECT_GT(succeeded, 100);
}

TEST(Sizes, OfForwardWorkspacesAreAnsweredOrTooLargeForEveryMagnitude) {
  Random random(12);
  const LayerData layer_data{LayerShape{}};
  const LayerPointer layer = Create(layer_data);
  float number = 0;
  int succeeded = 0;
  for (int i = 0; i < 20000; ++i) {
    mha_forward_args args = {};
    args.struct_size = sizeof args;
    args.batch = random.Coin() ? random.Between(1, 9) : random.Pick(kMagnitudes);
    args.n_q = random.Coin() ? random.Between(1, 99) : random.Pick(kMagnitudes);
    args.n_kv = random.Coin() ? random.Between(1, 99) : random.Pick(kMagnitudes);
    args.key = args.value = &number;
    SerialScheduler scheduler(static_cast<uint32_t>(std::min<int64_t>(random.Pick(kMagnitudes), 0xFFFFFFFF)));
    const bool threads = random.Coin();
    if (threads) args.scheduler = &scheduler.scheduler;
    if (random.Coin()) args.attention_weights = &number;
    const Wide batch = static_cast<Wide>(args.batch);
    // The largest arrays of the call: inputs, output and, where asked for, the attention weights.
    Wide arrays = std::max(Times(Times(batch, args.n_q), 44), Times(Times(batch, args.n_kv), 36));
    Wide generous = Times(Times(batch, args.n_q), 1000) + Times(Times(batch, args.n_kv), 1000);
    if (args.attention_weights != nullptr) {
      const Wide weights = Times(Times(Times(batch, args.n_q), args.n_kv), 16);
      arrays = std::max(arrays, weights);
      generous += weights;
    }
    if (threads) generous += Times(scheduler.scheduler.num_threads, 1 << 16);
    size_t bytes = 4711;
    mha_error error;
    const mha_status status = mha_forward_workspace(layer.get(), &args, &bytes, &error);
    ExpectExactOrTooLarge(status, error, bytes, arrays, generous, 0);
    if (status == MHA_OK) ++succeeded;
    if (HasFailure()) {
      FAIL() << "batch " << args.batch << " n_q " << args.n_q << " n_kv " << args.n_kv << " attention_weights "
             << (args.attention_weights != nullptr) << " num_threads " << (threads ? scheduler.scheduler.num_threads : 0);
    }
  }
  EXPECT_GT(succeeded, 100);
}

TEST(Sizes, OfAttentionWorkspacesAreAnsweredOrTooLargeForEveryMagnitude) {
  Random random(13);
  float number = 0;
  int succeeded = 0;
  for (int i = 0; i < 20000; ++i) {
    mha_attention_args args = {};
    args.struct_size = sizeof args;
    args.batch = random.Coin() ? 1 : random.Pick(kMagnitudes);
    args.n_q = random.Coin() ? random.Between(1, 99) : random.Pick(kMagnitudes);
    args.n_kv = random.Coin() ? random.Between(1, 99) : random.Pick(kMagnitudes);
    args.num_heads = random.Coin() ? random.Between(1, 9) : random.Pick(kMagnitudes);
    args.head_dim = random.Coin() ? random.Between(1, 9) : random.Pick(kMagnitudes);
    args.head_dim_v = random.Coin() ? random.Between(1, 9) : random.Pick(kMagnitudes);
    if (random.Coin()) args.lse = &number;
    const Wide sequences = Times(static_cast<Wide>(args.batch), args.num_heads);
    const Wide widest = static_cast<Wide>(std::max(args.head_dim, args.head_dim_v));
    const Wide longest = static_cast<Wide>(std::max(args.n_q, args.n_kv));
    Wide arrays = Times(Times(Times(sequences, args.n_q), args.head_dim), 4);
    arrays = std::max(arrays, Times(Times(Times(sequences, args.n_kv), args.head_dim), 4));
    arrays = std::max(arrays, Times(Times(Times(sequences, args.n_kv), args.head_dim_v), 4));
    arrays = std::max(arrays, Times(Times(Times(sequences, args.n_q), args.head_dim_v), 4));
    // Tiles and chunk states may need a few thousand rows of a head whatever the number of rows is.
    const Wide generous = Times(Times(sequences, static_cast<int64_t>(longest)), static_cast<int64_t>(widest)) * 64 + widest * (1 << 16) +
                          BeyondInt({Times(static_cast<Wide>(args.num_heads), static_cast<int64_t>(widest))});
    size_t bytes = 4711;
    mha_error error;
    const mha_status status = mha_attention_workspace(&args, &bytes, &error);
    ExpectExactOrTooLarge(status, error, bytes, arrays, generous, 0);
    if (status == MHA_OK) ++succeeded;
    if (HasFailure()) {
      FAIL() << "batch " << args.batch << " n_q " << args.n_q << " n_kv " << args.n_kv << " num_heads " << args.num_heads << " head_dim "
             << args.head_dim << " head_dim_v " << args.head_dim_v;
    }
  }
  EXPECT_GT(succeeded, 100);
}

// With nothing to do there is no array whose size could overflow; the arithmetic must hold all the same, and the query must end.
TEST(Sizes, OfCallsWithNothingToDoAreAnsweredOrTooLargeForEveryLength) {
  for (bool empty_batch : {true, false}) {
    for (int64_t length : {kMax, kMax - 1, kMax - 255, int64_t{1} << 62, int64_t{1} << 40}) {
      SCOPED_TRACE(length);
      ForwardCall forward;
      forward.args.batch = empty_batch ? 0 : length;
      forward.args.n_q = empty_batch ? length : 0;
      forward.args.n_kv = length;
      forward.args.q_start = nullptr;
      AttentionCall attention;
      attention.args.batch = forward.args.batch;
      attention.args.n_q = forward.args.n_q;
      attention.args.n_kv = length;
      attention.args.q_start = nullptr;
      for (uint32_t is_causal : {0u, 1u}) {
        forward.args.is_causal = attention.args.is_causal = is_causal;
        size_t bytes = 4711;
        mha_error error = UnwrittenError();
        ExpectExactOrTooLarge(CallWorkspace(forward, &bytes, &error), error, bytes, 0, kSurelyFine + 1, 0);
        bytes = 4711;
        error = UnwrittenError();
        ExpectExactOrTooLarge(CallWorkspace(attention, &bytes, &error), error, bytes, 0, kSurelyFine + 1, 0);
        mha_call_info info = {};
        info.struct_size = sizeof info;
        error = UnwrittenError();
        EXPECT_EQ(CallInfo(forward, &info, &error), error.status);
        error = UnwrittenError();
        EXPECT_EQ(CallInfo(attention, &info, &error), error.status);
      }
    }
  }
}

// Whatever numbers stand in the arguments, a query ends, and says what it says in one voice. (The sanitizers watch the arithmetic.)
TEST(Sizes, QueriesSurviveArbitraryNumbers) {
  Random random(14);
  const LayerData layer_data{LayerShape{}};
  const LayerPointer layer = Create(layer_data);
  float number = 0;
  mha_taps taps = {};
  taps.struct_size = sizeof taps;
  taps.scores = &number;
  SerialScheduler scheduler(2);
  const auto dimension = [&]() -> int64_t {
    const int64_t kind = random.Below(8);
    if (kind == 0) return static_cast<int64_t>(random.Next());
    if (kind == 1) return -random.Pick(kMagnitudes);
    if (kind == 2) return 0;
    return kind < 5 ? random.Pick(kMagnitudes) : random.Between(1, 50);
  };
  const auto stride = [&] { return random.Below(3) == 0 ? dimension() : 0; };
  const auto check = [&](mha_status status, const mha_error &error, size_t bytes) {
    ASSERT_EQ(error.status, status);
    ASSERT_LE(status, MHA_ERROR_TOO_LARGE);
    if (status == MHA_OK) {
      ASSERT_STREQ(error.message, "");
    } else {
      ASSERT_EQ(bytes, 4711u);
      ASSERT_STRNE(error.message, "");
    }
  };
  for (int i = 0; i < 50000 && !HasFailure(); ++i) {
    size_t bytes = 4711;
    mha_error error = UnwrittenError();
    mha_forward_args forward = {};
    forward.struct_size = sizeof forward;
    forward.batch = dimension();
    forward.n_q = dimension();
    forward.n_kv = dimension();
    forward.key = forward.value = &number;
    for (int64_t *field :
         {&forward.query_batch_stride, &forward.query_row_stride, &forward.key_batch_stride, &forward.key_row_stride,
          &forward.value_batch_stride, &forward.value_row_stride, &forward.output_batch_stride, &forward.output_row_stride}) {
      *field = stride();
    }
    forward.is_causal = random.Coin() ? 1 : 0;
    if (random.Coin()) forward.lse = &number;
    if (random.Coin()) forward.taps = &taps;
    if (random.Coin()) forward.scheduler = &scheduler.scheduler;
    check(mha_forward_workspace(layer.get(), &forward, &bytes, &error), error, bytes);

    bytes = 4711;
    error = UnwrittenError();
    mha_attention_args attention = {};
    attention.struct_size = sizeof attention;
    attention.batch = dimension();
    attention.n_q = dimension();
    attention.n_kv = dimension();
    attention.num_heads = dimension();
    attention.num_kv_heads = random.Coin() ? 0 : dimension();
    attention.head_dim = dimension();
    attention.head_dim_v = dimension();
    for (int64_t *field :
         {&attention.q_batch_stride, &attention.q_row_stride, &attention.q_head_stride, &attention.k_batch_stride, &attention.k_row_stride,
          &attention.k_head_stride, &attention.v_batch_stride, &attention.v_row_stride, &attention.v_head_stride,
          &attention.output_batch_stride, &attention.output_row_stride, &attention.output_head_stride}) {
      *field = stride();
    }
    attention.is_causal = random.Coin() ? 1 : 0;
    if (random.Coin()) attention.attention_weights = &number;
    if (random.Coin()) attention.scheduler = &scheduler.scheduler;
    check(mha_attention_workspace(&attention, &bytes, &error), error, bytes);

    mha_call_info info = {};
    info.struct_size = sizeof info;
    error = UnwrittenError();
    const mha_status forward_status = mha_info(layer.get(), &forward, &info, &error);
    ASSERT_EQ(error.status, forward_status);
    error = UnwrittenError();
    const mha_status attention_status = mha_attention_info(&attention, &info, &error);
    ASSERT_EQ(error.status, attention_status);
  }
}

// A start close to the largest number must not wrap around to a negative position: it sees all keys.
TEST(Sizes, AStartFarBehindTheKeysSeesAllOfThem) {
  const LayerData layer_data{LayerShape{}};
  const LayerPointer layer = Create(layer_data);
  CallShape shape;
  shape.outputs = kAttentionWeights | kLse;
  ForwardData data(layer_data.shape, shape, layer.get());
  const std::vector<float> all = data.Compute();
  data.args.is_causal = 1;
  data.args.q_start = data.q_start();
  for (int64_t start : {int64_t{4}, int64_t{1} << 31, int64_t{1} << 32, int64_t{1} << 62}) {
    data.q_start()[0] = data.q_start()[1] = start;
    EXPECT_TRUE(SameBits(data.Compute(), all)) << start;
  }
  // At the very end the last query's position itself does not fit any more: either is right, but nothing in between.
  data.q_start()[0] = data.q_start()[1] = kMax;
  data.PoisonOutputs();
  Memory workspace(data.WorkspaceBytes());
  mha_error error = UnwrittenError();
  const mha_status status = data.Run(workspace.data(), workspace.size(), &error);
  if (status == MHA_OK) {
    EXPECT_TRUE(SameBits(data.Outputs(), all));
  } else {
    EXPECT_TRUE(data.OutputsUntouched());
  }
}

}  // namespace
