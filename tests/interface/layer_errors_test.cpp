// Invalid layers return an error message: every function that makes or views a layer is called
// with every kind of wrong argument. Each row of a table changes one thing in a valid call; then
// the status, the parameter that is named and the message must fit, and nothing but the error
// struct may have been written. Pointers that are NULL are here for all functions.

#include <functional>

#include "interface/calls.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

// ---- mha_layer_pack_size, mha_layer_pack, mha_layer_create

// Which functions refuse the layer. Only a layer that is created needs an instruction set of this
// machine, and memory.
enum : unsigned { kPackSize = 1, kPack = 2, kCreate = 4 };

// A valid layer: widths that differ, grouped heads, an output projection and all biases.
struct FullLayer {
  // A fused matrix, [10, 12 + 6 + 10].
  void UseFused() {
    fused = CopyOf(Random(7).Normals(10 * 28), Place::kBeforeGuard);
    config.key_dim = config.value_dim = 10;
    weights.w_q.data = weights.w_k.data = weights.w_v.data = nullptr;
    weights.w_qkv.data = fused.floats();
  }
  void RemoveKeysAndValues() {
    config.key_dim = config.value_dim = 0;
    weights.w_k.data = weights.w_v.data = weights.w_k.bias = weights.w_v.bias = nullptr;
  }
  void RemoveOutputProjection() {
    config.output_dim = 0;
    weights.w_o.data = weights.w_o.bias = nullptr;
  }
  mha_matrix &Gate() {
    config.gate = MHA_FUNCTION_SIGMOID;
    weights.w_g.data = weights.w_q.data;
    return weights.w_g;
  }
  mha_allocator &Allocator() {
    options.allocator = &allocator;
    return allocator;
  }

  mha_status PackSize(size_t *bytes, mha_error *error) const {
    return mha_layer_pack_size(&config, &weights, &options, bytes, error);
  }
  mha_status Pack(const Memory &buffer, mha_error *error) const {
    return mha_layer_pack(&config, &weights, &options, buffer.data(), buffer.size(), error);
  }
  mha_status Create(mha_error *error) const {
    auto *layer = reinterpret_cast<mha_layer *>(1);
    const mha_status status = mha_layer_create(&config, &weights, &options, &layer, error);
    EXPECT_EQ(layer == nullptr, status != MHA_OK);
    mha_layer_destroy(layer);
    return status;
  }

  const LayerData data{SmallLayer()};
  Memory fused;
  mha_allocator allocator = {nullptr, [](void *, size_t) -> void * { return nullptr; },
                             [](void *, void *) {}};
  mha_layer_config config = data.config;
  mha_layer_weights weights = data.weights;
  mha_layer_options options = Options();
};

void ExpectRefused(const std::function<void(FullLayer &)> &change, const Few<uint32_t> &arguments,
                   const Refusal &refusal) {
  const Expected expected = {refusal.status, arguments, refusal.words};
  FullLayer call;
  change(call);
  if ((refusal.functions & kPackSize) != 0) {
    SCOPED_TRACE("mha_layer_pack_size");
    size_t bytes = 4711;
    ExpectFails([&](auto *error) { return call.PackSize(&bytes, error); }, expected);
    EXPECT_EQ(bytes, 4711u);
  }
  if ((refusal.functions & kPack) != 0) {
    SCOPED_TRACE("mha_layer_pack");
    Memory buffer(1 << 16, Place::kAfterGuard);
    buffer.Fill(0x5A);
    ExpectFails([&](auto *error) { return call.Pack(buffer, error); }, expected);
    EXPECT_TRUE(buffer.Holds(0x5A));
  }
  if ((refusal.functions & kCreate) != 0) {
    SCOPED_TRACE("mha_layer_create");
    ExpectFails([&](auto *error) { return call.Create(error); }, expected);
  }
}

void ExpectAllRefused(const Few<uint32_t> &arguments, const std::vector<Wrong<FullLayer>> &table) {
  for (const Wrong<FullLayer> &row : table) {
    SCOPED_TRACE(row.text);
    ExpectRefused(row.change, arguments, row.refusal);
  }
}

TEST(LayerErrors, NameTheFieldOfTheConfig) {
  ExpectAllRefused(
      {1},
      {
          WRONG((c.config.query_dim = 64, c.config.num_heads = 5,
                 c.config.num_kv_heads = c.config.head_dim = 0),
                kShape,
                {"num_heads is 5, which does not divide query_dim, 64; set num_heads to a divisor "
                 "of it, or set head_dim"}),
          WRONG((c.config.query_dim = 16, c.config.num_heads = 6, c.config.head_dim = 0), kShape,
                {"16", "6", "head_dim"}),
          WRONG(c.config.num_kv_heads = 3, kShape, {"num_kv_heads", "3", "4"}),
          WRONG(c.config.num_kv_heads = 8, kShape, {"num_kv_heads", "8", "4"}),
          WRONG(c.config.format.arithmetic = MHA_ARITHMETIC_INT8, kInvalid,
                {"format.arithmetic is 1281",
                 "set format.type to MHA_TYPE_INT8 (4) or MHA_TYPE_INT4 "
                 "(5)"}),
          WRONG(c.config.format.arithmetic = MHA_ARITHMETIC_BF16, kInvalid,
                {"format.arithmetic is MHA_ARITHMETIC_BF16 (1283), but format.type is 1; set "
                 "format.type to MHA_TYPE_BF16 (3)"}),
          WRONG(c.config.gate_dim = 5, kShape, {"gate_dim is 5"}),
          WRONG((c.config.gate = MHA_FUNCTION_SIGMOID, c.config.gate_dim = -5), kInvalid,
                {"gate_dim"}),
          WRONG((c.config.gate = MHA_FUNCTION_SIGMOID, c.config.gate_dim = 3), kShape,
                {"gate_dim is 3", "head_dim_v (5)"}),
          WRONG(c.config.num_heads = c.config.num_kv_heads = kMax, kTooLarge, {}),
          WRONG(c.config.head_dim = 1 << 30, kTooLarge, {"num_heads * head_dim is 4294967296"}),
          WRONG(c.config.head_dim_v = 1 << 30, kTooLarge, {"num_heads * head_dim_v is"}),
          WRONG(c.config.query_dim = c.config.key_dim = c.config.value_dim = c.config.output_dim =
                    c.config.num_heads = c.config.num_kv_heads = c.config.head_dim =
                        c.config.head_dim_v = kMax,
                kTooLarge, {}),
          // 2^62 elements would be 2^64 bytes: 0 in 64 bits.
          WRONG((c.config.query_dim = int64_t{1} << 31, c.config.head_dim = int64_t{1} << 11,
                 c.config.num_heads = c.config.num_kv_heads = int64_t{1} << 20),
                kTooLarge, {}),
          WRONG((c.UseFused(), c.config.query_dim = c.config.key_dim = c.config.value_dim = 1,
                 c.config.num_heads = c.config.num_kv_heads = 1 << 30,
                 c.config.head_dim = c.config.head_dim_v = 1, c.options.sgemm = PlainSgemm),
                kTooLarge, {"2147483647 columns", "sgemm"}),
      });
}

TEST(LayerErrors, NameConfigOrWeightsThatContradictEachOther) {
  ExpectAllRefused(
      {1, 2},
      {
          WRONG(c.weights.w_o.data = c.weights.w_o.bias = nullptr, kInvalid, {"output_dim", "w_o"}),
          WRONG((c.RemoveKeysAndValues(), c.config.key_dim = 7), kInvalid,
                {"key_dim is 7", "w_k.data"}),
          WRONG((c.RemoveKeysAndValues(), c.config.value_dim = 9), kInvalid,
                {"value_dim is 9", "w_v.data"}),
          WRONG((c.UseFused(), c.config.key_dim = c.config.value_dim = 7), kShape,
                {"w_qkv", "key_dim", "7", "10"}),
          WRONG((c.UseFused(), c.config.value_dim = 9), kShape, {"w_qkv", "value_dim", "9", "10"}),
      });
}

TEST(LayerErrors, NameTheFieldOfTheWeights) {
  ExpectAllRefused(
      {2},
      {
          WRONG(c.weights.w_q.data = c.weights.w_k.data = c.weights.w_v.data = nullptr, kNull,
                {"w_q"}),
          WRONG(c.weights.w_q.data = nullptr, kNull, {"w_q"}),
          WRONG(c.weights.w_q.data = c.weights.w_v.data = nullptr, kNull, {"w_q.data is NULL;"}),
          WRONG(c.weights.w_k.data = nullptr, kNull, {"w_k"}),
          WRONG(c.weights.w_v.data = nullptr, kNull, {"w_v"}),
          WRONG((c.RemoveKeysAndValues(), c.weights.w_k.bias = c.weights.w_q.bias), kInvalid,
                {"w_k.bias", "w_k.data"}),
          WRONG((c.RemoveKeysAndValues(), c.weights.w_v.bias = c.weights.w_q.bias), kInvalid,
                {"w_v.bias", "w_v.data"}),
          WRONG((c.RemoveKeysAndValues(), c.weights.w_q.bias = nullptr,
                 c.weights.w_qkv.bias = c.weights.w_o.bias),
                kInvalid, {"w_qkv.bias", "w_k.data"}),
          WRONG((c.RemoveKeysAndValues(), c.weights.w_k.scales = c.weights.w_q.bias), kInvalid,
                {"w_k.scales"}),
          WRONG((c.UseFused(), c.weights.w_q = c.data.weights.w_q,
                 c.weights.w_k = c.data.weights.w_k, c.weights.w_v = c.data.weights.w_v),
                kInvalid, {"w_q", "w_qkv"}),
          WRONG((c.UseFused(), c.weights.w_v = c.data.weights.w_v), kInvalid, {"w_qkv"}),
          WRONG((c.UseFused(), c.weights.w_q = c.data.weights.w_q), kInvalid,
                {"w_qkv.data is given together with w_q.data"}),
          WRONG((c.UseFused(), c.weights.w_k = c.data.weights.w_k), kInvalid,
                {"w_qkv.data is given together with w_k.data"}),
          WRONG((c.weights.w_qkv.bias = c.weights.w_q.bias,
                 c.weights.w_k.bias = c.weights.w_v.bias = nullptr),
                kInvalid, {"w_qkv.bias", "w_q.bias"}),
          WRONG((c.weights.w_qkv.bias = c.weights.w_q.bias,
                 c.weights.w_q.bias = c.weights.w_v.bias = nullptr),
                kInvalid, {"w_qkv.bias", "w_k.bias"}),
          WRONG((c.weights.w_qkv.bias = c.weights.w_q.bias,
                 c.weights.w_q.bias = c.weights.w_k.bias = nullptr),
                kInvalid, {"w_qkv.bias", "w_v.bias"}),
          WRONG((c.config.output_dim = 0, c.weights.w_o.data = nullptr), kInvalid,
                {"w_o.bias", "w_o.data"}),
          WRONG(c.weights.w_g.data = c.weights.w_q.data, kInvalid, {"w_g.data", "gate"}),
          WRONG(c.config.gate = MHA_FUNCTION_SIGMOID, kNull,
                {"w_g.data is NULL", "gate_place", "MHA_GATE_IN_W_Q"}),
          WRONG(c.weights.gate_place = MHA_GATE_IN_W_Q, kInvalid, {"gate_place", "gate is"}),
          WRONG((c.Gate(), c.weights.gate_place = 1), kInvalid, {"gate_place is 1"}),
          WRONG((c.Gate(), c.weights.gate_place = MHA_GATE_IN_W_Q), kInvalid,
                {"w_g.data is given", "MHA_GATE_IN_W_Q"}),
          WRONG((c.Gate().bias = c.weights.w_q.bias, c.weights.w_g.data = nullptr,
                 c.weights.gate_place = MHA_GATE_IN_W_Q),
                kInvalid, {"w_g.bias", "w_g.data", "w_q.bias"}),
          WRONG(c.Gate().scales = c.weights.w_q.bias, kInvalid, {"w_g.scales"}),
          WRONG(c.Gate().row_stride = 19, kInvalid, {"w_g.row_stride", "19", "20"}),
          WRONG((c.config.gate = MHA_FUNCTION_SIGMOID, c.weights.gate_place = MHA_GATE_IN_W_Q,
                 c.weights.w_q.row_stride = 31),
                kInvalid, {"w_q.row_stride", "31", "32"}),
          WRONG((c.UseFused(), c.weights.w_qkv.row_stride = -28), kInvalid, {"w_qkv.row_stride"}),
          WRONG((c.UseFused(), c.weights.w_qkv.row_stride = 27), kInvalid,
                {"w_qkv.row_stride", "27", "28"}),
          WRONG((c.weights.layout = MHA_LAYOUT_OUT_IN, c.weights.w_q.row_stride = 9), kInvalid,
                {"w_q.row_stride", "9", "10"}),
          WRONG(c.weights.w_q.row_stride = kMax, kTooLarge, {}),
          WRONG(c.weights.w_o.row_stride = kMax, kTooLarge, {}),
          // 9 rows of 2^59 elements fit into int64_t, but not their bytes.
          WRONG(c.weights.w_q.row_stride = int64_t{1} << 59, kTooLarge, {}),
      });
}

TEST(LayerErrors, NameTheStrideOrOffsetsOfAMatrix) {
  const struct {
    const char *name;
    mha_matrix mha_layer_weights::*matrix;
    int64_t width;
  } matrices[] = {{"w_q", &mha_layer_weights::w_q, 12},    {"w_k", &mha_layer_weights::w_k, 6},
                  {"w_v", &mha_layer_weights::w_v, 10},    {"w_o", &mha_layer_weights::w_o, 11},
                  {"w_qkv", &mha_layer_weights::w_qkv, 0}, {"w_g", &mha_layer_weights::w_g, 0}};
  for (const auto &[name, matrix, width] : matrices) {
    SCOPED_TRACE(name);
    static const float kNumber = 0;
    ExpectRefused([matrix = matrix](FullLayer &c) { (c.weights.*matrix).offsets = &kNumber; }, {2},
                  {kInvalid, {name + std::string(".offsets is given")}});
    if (width == 0) continue;
    for (const int64_t wrong : {int64_t{-1}, kMin, width - 1}) {
      Words words = {name + std::string(".row_stride is"), "width of a row"};
      if (wrong > 0)
        words = {name + std::string(".row_stride is"), std::to_string(wrong),
                 std::to_string(width)};
      ExpectRefused(
          [matrix = matrix, wrong](FullLayer &c) { (c.weights.*matrix).row_stride = wrong; }, {2},
          {kInvalid, words});
    }
  }
  const float number = 0;
  size_t bytes = 4711;
  mha_linear_weights weights = Zeroed<mha_linear_weights>();
  weights.input_dim = weights.output_dim = 1;
  weights.w.data = weights.w.offsets = &number;
  ExpectFails({kInvalid, {1}, {"w.offsets is given", "w.scales is NULL"}}, mha_linear_pack_size,
              &weights, nullptr, &bytes);
  EXPECT_EQ(bytes, 4711u);
}

TEST(LayerErrors, NameTheOption) {
  ExpectAllRefused(
      {3}, {
               // A shift by this would be undefined.
               WRONG(c.options.instruction_set = AbsentInstructionSet(), MHA_ERROR_INSTRUCTION_SET,
                     {mha_instruction_set_name(AbsentInstructionSet())}, kCreate),
               WRONG(c.Allocator().allocate = nullptr, kNull, {"allocate"}, kCreate),
               WRONG(c.Allocator().release = nullptr, kNull, {"release"}, kCreate),
           });
  ExpectAllRefused({0}, {WRONG(c.Allocator(), MHA_ERROR_OUT_OF_MEMORY, {}, kCreate)});
}

TEST(LayerErrors, NameMemoryThatIsNoLayer) {
  const Memory memory(mha_layer_view_size());
  mha_layer_config config = Zeroed<mha_layer_config>();
  ExpectFails({kInvalid, {1}, {"layer does not point to a layer"}}, mha_layer_shape,
              reinterpret_cast<const mha_layer *>(memory.data()), &config);
}

TEST(Pack, RejectsEveryMisalignedBuffer) {
  const FullLayer call;
  Memory memory((1 << 16) + 64, Place::kAfterGuard);
  memory.Fill(0x5A);
  for (size_t offset = 1; offset < 64; ++offset) {
    ExpectFails({kInvalid, {4}, {"buffer", "64"}}, mha_layer_pack, &call.config, &call.weights,
                nullptr, memory.data() + offset, 1 << 16);
  }
  EXPECT_TRUE(memory.Holds(0x5A));
}

TEST(Pack, RejectsEverySmallerBufferAndLeavesItUntouched) {
  const LayerData data{SquareLayer(4, 2, 1, 2)};
  const size_t bytes = data.PackSize();
  for (size_t smaller = 0; smaller < bytes; smaller += smaller + 130 < bytes ? 61 : 1) {
    Memory buffer(smaller, Place::kBeforeGuard, 64);
    buffer.Fill(0x5A);
    ExpectFails({MHA_ERROR_BUFFER_TOO_SMALL, {4, 5}, {std::to_string(bytes)}}, mha_layer_pack,
                &data.config, &data.weights, nullptr, buffer.data(), smaller);
    EXPECT_TRUE(buffer.Holds(0x5A)) << smaller;
  }
}

// ---- Views

class LayerViews : public testing::Test {
 protected:
  mha_status View(const void *packed, const Memory &storage, mha_error *error,
                  const mha_layer_options &options = Options()) const {
    const mha_layer *layer = nullptr;
    return mha_layer_view(packed, buffer_.size(), &options, storage.data(), storage.size(), &layer,
                          error);
  }
  const LayerData data_{SmallLayer()};
  const Memory buffer_ = data_.Pack();
  const Memory storage_{mha_layer_view_size(), Place::kBeforeGuard, 16};
};

TEST_F(LayerViews, RejectEveryMisalignedBuffer) {
  for (size_t offset = 1; offset < 64; ++offset) {
    const Memory memory(buffer_.size() + offset, Place::kAfterGuard);
    unsigned char *const moved = memory.data() + offset;
    std::memcpy(moved, buffer_.data(), buffer_.size());
    ExpectFails([&](auto *error) { return View(moved, storage_, error); }, {kInvalid, {1}, {"64"}});
    ExpectFails({kInvalid, {1}, {"64"}}, mha_layer_verify, moved, buffer_.size());
  }
}

TEST_F(LayerViews, RejectEverySmallerStorageAndLeaveItUntouched) {
  for (size_t smaller = 0; smaller < mha_layer_view_size(); ++smaller) {
    Memory storage(smaller, Place::kBeforeGuard, 16);
    storage.Fill(0x5A);
    ExpectFails([&](auto *error) { return View(buffer_.data(), storage, error); },
                {MHA_ERROR_BUFFER_TOO_SMALL, {4, 5}, {std::to_string(mha_layer_view_size())}});
    EXPECT_TRUE(storage.Holds(0x5A)) << smaller;
  }
}

TEST_F(LayerViews, RejectOptionsThatAreWrong) {
  const auto view = [&](const mha_layer_options &options) {
    return [this, options](auto *error) { return View(buffer_.data(), storage_, error, options); };
  };
  ExpectSucceeds(view(Options()));
  mha_layer_options options = Options();
  options.reserved = 1;
  ExpectFails(view(options), {kInvalid, {3}, {"reserved"}});
  for (uint32_t unknown : {16u, 31u, 32u, 33u, 0x80000001u, 0xFFFFFFFFu})
    ExpectFails(view(Options(unknown)), {kInvalid, {3}, {"instruction_set"}});
  ExpectFails(view(Options(AbsentInstructionSet())),
              {MHA_ERROR_INSTRUCTION_SET, {3}, {mha_instruction_set_name(AbsentInstructionSet())}});
}

// ---- Pointers

TEST(NullPointers, AreNamedByEveryFunctionThatNeedsThem) {
  constexpr size_t kRoom = 1 << 20;
  FullLayer full;
  const mha_layer_config *config = &full.config;
  const mha_layer_weights *weights = &full.weights;
  FullForward forward;
  FullAttention attention;
  const mha_layer *layer = forward.layer.get(), *viewed = nullptr;
  const mha_forward_args *args = &forward.args;
  const mha_attention_args *middle = &attention.args;
  const Memory packed = full.data.Pack();
  Memory room(kRoom, Place::kAfterGuard), storage(mha_layer_view_size());
  room.Fill(0x5A), storage.Fill(0x5A);
  void *const space = room.data(), *const at = storage.data();
  const void *const from = packed.data();
  const size_t packed_bytes = packed.size(), view_bytes = storage.size();
  size_t bytes = 4711;
  mha_call_info info = Zeroed<mha_call_info>();
  auto *created = reinterpret_cast<mha_layer *>(&full);
  const mha_layer_options *none = nullptr;
  const char *const kConfig = "config|mha_layer_config",
                    *const kWeights = "weights|mha_layer_weights",
                    *const kForward = "args|mha_forward_args",
                    *const kAttention = "args|mha_attention_args";
  using E = mha_error *;
  const struct {
    uint32_t argument;
    const char *name;
    std::function<mha_status(E)> call;
  } calls[] = {
      {1, kConfig, [&](E e) { return mha_layer_pack_size(nullptr, weights, none, &bytes, e); }},
      {2, kWeights, [&](E e) { return mha_layer_pack_size(config, nullptr, none, &bytes, e); }},
      {4, "bytes", [&](E e) { return mha_layer_pack_size(config, weights, none, nullptr, e); }},
      {1, kConfig, [&](E e) { return mha_layer_pack(nullptr, weights, none, space, kRoom, e); }},
      {2, kWeights, [&](E e) { return mha_layer_pack(config, nullptr, none, space, kRoom, e); }},
      {4, "buffer", [&](E e) { return mha_layer_pack(config, weights, none, nullptr, kRoom, e); }},
      {1, kConfig, [&](E e) { return mha_layer_create(nullptr, weights, none, &created, e); }},
      {2, kWeights, [&](E e) { return mha_layer_create(config, nullptr, none, &created, e); }},
      {4, "layer", [&](E e) { return mha_layer_create(config, weights, none, nullptr, e); }},
      {1, "buffer",
       [&](E e) {
         return mha_layer_view(nullptr, packed_bytes, none, at, view_bytes, &viewed, e);
       }},
      {4, "storage",
       [&](E e) {
         return mha_layer_view(from, packed_bytes, none, nullptr, view_bytes, &viewed, e);
       }},
      {6, "layer",
       [&](E e) { return mha_layer_view(from, packed_bytes, none, at, view_bytes, nullptr, e); }},
      {1, "buffer", [&](E e) { return mha_layer_verify(nullptr, packed_bytes, e); }},
      {1, "layer", [&](E e) { return mha_layer_shape(nullptr, &full.config, e); }},
      {2, kConfig, [&](E e) { return mha_layer_shape(layer, nullptr, e); }},
      {1, "layer", [&](E e) { return mha_forward_workspace(nullptr, args, &bytes, e); }},
      {2, kForward, [&](E e) { return mha_forward_workspace(layer, nullptr, &bytes, e); }},
      {3, "bytes", [&](E e) { return mha_forward_workspace(layer, args, nullptr, e); }},
      {1, "layer", [&](E e) { return mha_forward_info(nullptr, args, &info, e); }},
      {2, kForward, [&](E e) { return mha_forward_info(layer, nullptr, &info, e); }},
      {3, "info|mha_call_info", [&](E e) { return mha_forward_info(layer, args, nullptr, e); }},
      {1, "layer", [&](E e) { return mha_forward(nullptr, args, space, kRoom, e); }},
      {2, kForward, [&](E e) { return mha_forward(layer, nullptr, space, kRoom, e); }},
      {3, "workspace", [&](E e) { return mha_forward(layer, args, nullptr, kRoom, e); }},
      {1, kAttention, [&](E e) { return mha_attention_workspace(nullptr, &bytes, e); }},
      {2, "bytes", [&](E e) { return mha_attention_workspace(middle, nullptr, e); }},
      {1, kAttention, [&](E e) { return mha_attention_info(nullptr, &info, e); }},
      {2, "info|mha_call_info", [&](E e) { return mha_attention_info(middle, nullptr, e); }},
      {1, kAttention, [&](E e) { return mha_attention(nullptr, space, kRoom, e); }},
      {2, "workspace", [&](E e) { return mha_attention(middle, nullptr, kRoom, e); }},
  };
  for (const auto &[argument, name, call] : calls) {
    SCOPED_TRACE(name);
    ExpectFails(call, {kNull, {argument}, {name}});
  }
  EXPECT_EQ(bytes, 4711u);
  EXPECT_EQ(created, nullptr);
  EXPECT_TRUE(room.Holds(0x5A) && storage.Holds(0x5A));
  EXPECT_TRUE(forward.data.OutputsAreUntouched() && attention.data.OutputsAreUntouched());
}

}  // namespace
