// Invalid calls return an error message: both entries, their size queries and their descriptions
// are called with every kind of wrong argument. Each row of a table changes one thing in a valid
// call; then the status, the parameter that is named and the message must fit, and nothing but the
// error struct may have been written.

#include <vector>

#include "interface/calls.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

// ---- What both entries have

template <typename Call>
class CallErrors : public testing::Test {};
struct Entry {
  template <typename Call>
  static std::string GetName(int) {
    return std::is_same_v<Call, FullForward> ? "Forward" : "Attention";
  }
};
using BothCalls = testing::Types<FullForward, FullAttention>;
TYPED_TEST_SUITE(CallErrors, BothCalls, Entry);

TYPED_TEST(CallErrors, NameExtentsFlagsAndSchedulers) {
  ExpectAllRefused<TypeParam>({
      WRONG(c.args.call.batch = kMax, kTooLarge, {}),
      WRONG(c.args.call.n_q = kMax, kTooLarge, {}),
      WRONG(c.args.call.n_kv = kMax, kTooLarge, {}),
      WRONG(c.args.call.batch = c.args.call.n_q = c.args.call.n_kv = kMax, kTooLarge, {}),
      // The attention weights: 2 * 4 heads * 2^30 * 2^30 floats.
      WRONG(c.args.call.n_q = c.args.call.n_kv = int64_t{1} << 30, kTooLarge, {}),
      WRONG(c.scheduler.scheduler.parallel_for = nullptr, kNull, {"parallel_for"}),
  });
}

TYPED_TEST(CallErrors, NameFieldsOfTheNorm) {
  ExpectAllRefused<TypeParam>({
      WRONG(c.Norm().epsilon = 0, kInvalid, {"norm.epsilon and context_epsilon are both 0"}),
      WRONG(c.Norm().q_bias = c.Zeros(), kInvalid, {"norm.q_bias", "MHA_NORM_LAYER"}),
      WRONG(c.Norm().k_bias = c.Zeros(), kInvalid, {"norm.k_bias", "MHA_NORM_LAYER"}),
      WRONG(c.Norm().head_stride = 1, kInvalid, {"norm.head_stride is 1;", "head_dim"}),
      WRONG((c.Norm().flags = MHA_NORM_ALL_HEADS, c.Norm().head_stride = 4711), kInvalid,
            {"norm.head_stride is 4711", "MHA_NORM_ALL_HEADS"}),
      WRONG(c.Norm().head_stride = kMax, kTooLarge, {"norm"}),
      WRONG(c.Norm().context_weight = c.Zeros(), kInvalid, {"norm.context_epsilon is 0"}),
      WRONG(c.ContextNorm().context_flags = MHA_NORM_AFTER_ROPE, kInvalid,
            {"norm.context_flags", "0x400"}),
      WRONG(c.ContextNorm().context_bias = c.Zeros(), kInvalid,
            {"norm.context_bias", "MHA_NORM_LAYER"}),
      WRONG(c.ContextNorm().context_head_stride = 1, kInvalid,
            {"norm.context_head_stride is 1;", "head_dim_v"}),
      WRONG((c.ContextNorm().context_flags = MHA_NORM_ALL_HEADS,
             c.ContextNorm().context_head_stride = 4711),
            kInvalid, {"norm.context_head_stride is 4711", "MHA_NORM_ALL_HEADS"}),
      WRONG(c.ContextNorm().q_weight = c.Zeros(), kInvalid, {"norm.epsilon is 0"}),
      WRONG(c.ContextNorm().k_weight = c.Zeros(), kInvalid, {"norm.epsilon is 0"}),
      WRONG(c.ContextNorm().q_bias = c.Zeros(), kInvalid, {"norm.epsilon is 0"}),
      WRONG(c.ContextNorm().k_bias = c.Zeros(), kInvalid, {"norm.epsilon is 0"}),
      WRONG(c.ContextNorm().flags = MHA_NORM_LAYER, kInvalid, {"norm.epsilon is 0"}),
      WRONG(c.ContextNorm().head_stride = 3, kInvalid, {"norm.epsilon is 0"}),
      WRONG(c.Norm().context_flags = MHA_NORM_LAYER, kInvalid, {"norm.context_epsilon is 0"}),
      WRONG(c.Norm().context_bias = c.Zeros(), kInvalid, {"norm.context_epsilon is 0"}),
      WRONG(c.Norm().context_head_stride = 5, kInvalid, {"norm.context_epsilon is 0"}),
  });
}

TYPED_TEST(CallErrors, NameFieldsOfTheScoreOptions) {
  ExpectAllRefused<TypeParam>({
      WRONG((c.Score().relative_bias = c.Zeros(), c.Score().relative_left = -1), kInvalid,
            {"score.relative_left is -1"}),
      WRONG(c.Score().relative_right = 3, kInvalid, {"score.relative_right is 3", "relative_bias"}),
      WRONG((c.Score().relative_bias = c.Zeros(),
             c.Score().relative_left = c.Score().relative_right = kMax),
            kTooLarge, {"score.relative_bias"}),
      // 4 heads of 2^61 floats.
      WRONG((c.Score().relative_bias = c.Zeros(), c.Score().relative_left = kMax / 4), kTooLarge,
            {"score.relative_bias"}),
      WRONG((c.RelativeRows(), c.Score().relative_bias = c.Zeros()), kInvalid,
            {"score.relative_bias", "score_arrays.relative_rows"}),
      WRONG((c.RelativeRows(), c.args.call.score = nullptr), kInvalid,
            {"score_arrays.relative_rows is given", "score", "NULL"}),
      WRONG((c.RelativeRows(), c.Score().relative_left = c.Score().relative_right = kMax),
            kTooLarge, {"score_arrays.relative_rows"}),
  });
#define WRONG_NUMBERS(field, may_be_low, ...)                                      \
  WRONG(c.Score().field = c.ZerosBut(0, may_be_low ? kNan : -kInfinity), kInvalid, \
        {"score." #field "[0] is"}, kReadsArrays),                                 \
      WRONG(c.Score().field = c.ZerosBut(3, kInfinity), kInvalid,                  \
            {"score." #field "[3] is inf; it must be"}, kReadsArrays),
  ExpectAllRefused<TypeParam>({MHA_EACH_HEAD_ARRAY(WRONG_NUMBERS)});
}

TYPED_TEST(CallErrors, NameFieldsOfTheScoreArrays) {
  ExpectAllRefused<TypeParam>({
      WRONG((c.Score(), c.Arrays().relative_rows_strides.head = 4), kInvalid,
            {"score_arrays.relative_rows_strides", "is NULL"}),
      WRONG(c.Arrays().mask_strides.row = 4096, kInvalid, {"score_arrays.mask_strides", "is NULL"}),
      WRONG((c.RelativeRows().relative_rows_strides.row = 4, c.Score().relative_left = 4), kInvalid,
            {"score_arrays.relative_rows_strides.row is 4", "the width of a row, 5"}),
      WRONG(c.RelativeRows().relative_rows_strides.head = kMax, kTooLarge,
            {"score_arrays.relative_rows"}),
      WRONG(c.Arrays().chosen_keys_strides.row = 4, kInvalid,
            {"score_arrays.chosen_keys_strides are set, but the array is NULL"}),
      WRONG(c.ChosenKeys(0), kInvalid, {"score_arrays.num_chosen is 0"}),
      WRONG(c.Arrays().num_chosen = 3, kInvalid,
            {"score_arrays.num_chosen is 3", "chosen_keys is NULL"}),
      WRONG(c.Arrays().chosen_block = 16, kInvalid,
            {"score_arrays.chosen_block is 16", "chosen_keys is NULL"}),
      WRONG(c.ChosenKeys(1), kInvalid,
            {"outputs.scores has a number for each key", "set it to NULL"}),
      WRONG(c.ChosenKeys(1).chosen_block = int64_t{1} << 31, kInvalid,
            {"score_arrays.chosen_block is 2147483648"}),
      WRONG(c.ChosenKeys(int64_t{1} << 31), kInvalid, {"score_arrays.num_chosen is 2147483648"}),
      WRONG(c.ChosenKeys(4).chosen_keys_strides.row = 3, kInvalid,
            {"score_arrays.chosen_keys_strides.row is 3", "the width of a row, 4"}),
      WRONG(c.ChosenKeys(4).chosen_keys_strides.row = kMax, kTooLarge,
            {"score_arrays.chosen_keys"}),
      WRONG((c.Arrays().q_scales = c.Zeros(), c.args.call.n_q = kMax / 128), kTooLarge, {}),
      WRONG(c.Bias().bias.type = MHA_TYPE_BF16, kInvalid,
            {"score_arrays.bias.type is MHA_TYPE_BF16"}),
      WRONG(c.Arrays().bias.type = MHA_TYPE_F16, kInvalid, {"score_arrays.bias.type is 2"}),
      WRONG(c.Arrays().bias.strides.head = 8, kInvalid, {"score_arrays.bias.strides", "is NULL"}),
      WRONG(c.Bias().bias.strides.head = kMax, kTooLarge, {"score_arrays.bias"}),
      WRONG(c.Arrays().bias.reserved = 1, kInvalid, {"score_arrays.bias.reserved is set"}),
      WRONG(c.Arrays().bias.reserved_pointer = &c, kInvalid,
            {"score_arrays.bias.reserved_pointer is set"}),
      WRONG(c.Mask().mask_strides.row = 1, kInvalid, {"score_arrays.mask_strides.row is 1"}),
      WRONG(c.Arrays().column_keys = MHA_COLUMNS_NEW_KEYS, kInvalid, {"score_arrays.column_keys"}),
      WRONG(c.Arrays().num_columns = kMax, kInvalid,
            {"score_arrays.num_columns is 9223372036854775807, but"}),
      WRONG((c.Mask().mask_strides.row = 99, c.Mask().num_columns = 100), kInvalid,
            {"score_arrays.mask_strides.row is 99", "100"}),
      WRONG(((c.Mask().mask_strides = {MHA_BROADCAST, MHA_BROADCAST, MHA_BROADCAST}),
             c.Mask().num_columns = kMax),
            kTooLarge, {"score_arrays.num_columns"}),
      WRONG(c.Arrays().segments = MHA_SEGMENTS_ALSO, kInvalid,
            {"score_arrays.segments", "q_segments"}),
      WRONG(c.Groups().q_segments = nullptr, kInvalid, {"score_arrays.kv_segments", "q_segments"}),
      WRONG((c.Groups().kv_segments = nullptr, c.args.call.n_q -= 1), kInvalid,
            {"score_arrays.kv_segments is NULL"}),
      // 2 sequences of 2^60 groups of 4 bytes.
      WRONG(c.Groups().num_columns = int64_t{1} << 60, kTooLarge, {"score_arrays.kv_segments"}),
  });
}

TYPED_TEST(CallErrors, NameFieldsOfTheSequences) {
  ExpectAllRefused<TypeParam>({
      WRONG((c.args.call.flags = MHA_CAUSAL, c.data.sequences.q_first_positions = nullptr,
             c.args.call.n_kv = 2),
            kShape, {"n_q", "n_kv", "3", "2", "sequences.q_first_positions"}),
      WRONG((c.args.call.flags = MHA_CAUSAL, c.data.sequences.q_first_positions = nullptr,
             c.args.call.n_kv = MHA_EMPTY),
            kShape, {"n_q", "n_kv", "sequences.q_first_positions"}),
      WRONG((c.args.call.flags = MHA_CAUSAL, c.data.q_start[0] = -(int64_t{1} << 62) - 1), kInvalid,
            {"sequences.q_first_positions[0]", "-2^62"}, kReadsArrays),
      WRONG((c.args.call.flags = MHA_CAUSAL, c.data.q_start[1] = kMin), kInvalid,
            {"sequences.q_first_positions[1]", "-2^62"}, kReadsArrays),
      WRONG((c.Rope(), c.data.q_start[0] = -5), kInvalid, {"begin at position -5"}, kReadsArrays),
      WRONG((c.Rope(), c.data.q_start[0] = -5, c.args.call.flags = MHA_CAUSAL,
             c.Groups().segments = MHA_SEGMENTS_ALSO),
            kInvalid, {"begin at position -5", "MHA_CAUSAL without MHA_SEGMENTS_ALSO"},
            kReadsArrays),
      WRONG(c.data.sequences.count = 1, kShape, {"sequences.count is 1", "batch is 2"}),
      WRONG(c.data.sequences.count = 3, kShape, {"sequences.count is 3", "batch is 2"}),
      WRONG(c.data.sequences.q_first_rows = c.Rows({0, -1}), kInvalid,
            {"sequences.q_first_rows[1] is -1", "0 to n_q, 3"}, kReadsArrays),
      WRONG(c.data.sequences.q_first_rows = c.Rows({4, 0}), kInvalid,
            {"sequences.q_first_rows[0] is 4", "0 to n_q, 3"}, kReadsArrays),
      WRONG((c.data.sequences.q_first_rows = c.Rows({1, 2}),
             c.data.sequences.q_lengths = c.Rows({2, 2})),
            kShape, {"sequences.q_first_rows[1] is 2", "n_q = 3 rows"}, kReadsArrays),
      WRONG(c.data.sequences.kv_first_rows = c.Rows({0, -1}), kInvalid,
            {"sequences.kv_first_rows[1] is -1"}, kReadsArrays),
      WRONG(c.data.sequences.kv_first_rows = c.Rows({5, 0}), kInvalid,
            {"sequences.kv_first_rows[0] is 5", "0 to n_kv, 4"}, kReadsArrays),
      WRONG((c.data.sequences.kv_first_rows = c.Rows({1, 2}),
             c.data.sequences.kv_lengths = c.Rows({3, 3})),
            kShape, {"sequences.kv_first_rows[1] is 2", "3", "n_kv = 4 rows"}, kReadsArrays),
  });
}

TYPED_TEST(CallErrors, NameThePackedSequencesThatDoNotCoverTheRows) {
  ExpectAllRefused<TypeParam>({
      WRONG(c.Pack({0, 1, 3}, {0, 2, 4}).count = 0, kInvalid,
            {"sequences.count is 0", "number of sequences"}),
      WRONG(c.Pack({0, 1, 3}, {0, 2, 4}).count = -3, kInvalid, {"sequences.count is -3"}),
      WRONG((c.Pack({0, 1, 3}, {0, 2, 4}).count = 0, c.args.call.batch = 3), kShape,
            {"batch is 3", "set it to 1", "sequences.count"}),
      WRONG((c.Pack({0, 1, 2, 3}, {0, 2, 3, 4}), c.args.call.batch = 3), kShape,
            {"batch is 3", "set it to 1", "sequences.count"}),
      WRONG(c.Pack({0, 1, 3}, {0, 2, 4}).count = 1, kShape,
            {"sequences.cu_seqlens_q[1] is 1", "n_q, 3", "Check count"}, kReadsArrays),
      WRONG(c.data.sequences.cu_seqlens_kv = c.Rows({0, 2, 4}), kInvalid,
            {"sequences.cu_seqlens_kv", "without cu_seqlens_q"}),
      WRONG(c.Pack({0, 1, 3}, {}), kShape, {"sequences.cu_seqlens_kv is NULL", "n_kv 4", "n_q 3"}),
      WRONG(c.Pack({0, 1, 3}, {0, 2, 4}).q_lengths = c.Rows({1, 2}), kInvalid,
            {"sequences.q_lengths", "cu_seqlens_q"}),
      WRONG(c.Pack({0, 1, 3}, {0, 2, 4}).kv_lengths = c.Rows({1, 2}), kInvalid,
            {"sequences.kv_lengths", "cu_seqlens_q"}),
      WRONG(c.Pack({0, 1, 3}, {0, 2, 4}).q_first_rows = c.Rows({1, 2}), kInvalid,
            {"sequences.q_first_rows", "cu_seqlens_q"}),
      WRONG(c.Pack({0, 1, 3}, {0, 2, 4}).kv_first_rows = c.Rows({1, 2}), kInvalid,
            {"sequences.kv_first_rows", "cu_seqlens_q"}),
      WRONG(c.Pack({-1, 1, 3}, {0, 2, 4}), kInvalid, {"sequences.cu_seqlens_q[0] is -1", "0"},
            kReadsArrays),
      WRONG(c.Pack({1, 2, 3}, {0, 2, 4}), kInvalid, {"sequences.cu_seqlens_q[0] is 1", "0"},
            kReadsArrays),
      WRONG(c.Pack({0, 2, 1}, {0, 2, 4}), kInvalid,
            {"sequences.cu_seqlens_q[2] is 1", "less than 2"}, kReadsArrays),
      WRONG(c.Pack({0, 1, 2}, {0, 2, 4}), kShape, {"sequences.cu_seqlens_q[2] is 2", "n_q, 3"},
            kReadsArrays),
      WRONG(c.Pack({0, 2, 4}, {0, 2, 4}), kShape, {"sequences.cu_seqlens_q[2] is 4", "n_q, 3"},
            kReadsArrays),
      WRONG(c.Pack({0, 2, 3}, {0, 2, 3}), kShape, {"sequences.cu_seqlens_kv[2] is 3", "n_kv, 4"},
            kReadsArrays),
      WRONG(c.Pack({0, 2, 3}, {0, 4, 5}), kShape, {"sequences.cu_seqlens_kv[2] is 5", "n_kv, 4"},
            kReadsArrays),
      WRONG(c.Pack({0, 2, 3}, {0, 5, 4}), kInvalid,
            {"sequences.cu_seqlens_kv[2] is 4", "less than 5"}, kReadsArrays),
      WRONG((c.Pack({0, 1, 3}, {0, 3, 4}).q_first_positions = nullptr,
             c.args.call.flags = MHA_CAUSAL),
            kShape, {"sequence 1", "sequences.q_first_positions"}, kReadsArrays),
  });
}

// Sets each stride of an array. A stride of heads is given with those of rows and sequences.
template <typename Call, typename Args, typename Array>
void ExpectFarStridesRefused(const std::string &name, Array Args::*array, bool has_heads) {
  const struct {
    const char *name;
    std::vector<int64_t mha_strides::*> fields;
  } kinds[] = {{"batch", {&mha_strides::batch}},
               {"row", {&mha_strides::row}},
               {"head", {&mha_strides::batch, &mha_strides::row, &mha_strides::head}}};
  for (const auto &[stride, fields] : kinds) {
    if (fields.size() == 3 && !has_heads) continue;
    for (const int64_t wrong : {kMax, kMax - 1, kMax / 2}) {
      SCOPED_TRACE(name + ".strides." + stride + " = " + std::to_string(wrong));
      const auto change = [&, array = array, &fields = fields](Call &c) {
        for (int64_t mha_strides::*field : fields) (c.args.*array).strides.*field = wrong;
      };
      ExpectRefused<Call>(change, {kTooLarge, {name}});
    }
  }
}

// With any number of sequences, a call without its workspace ends at once, and so does a
// description without arrays to read.
TYPED_TEST(CallErrors, TakeNoTimeThatGrowsWithTheBatch) {
  const Expected no_workspace = {kNull, {kArgs<TypeParam> + 1}, {"workspace"}};
  const std::vector<float> table(8, 0.5f);
  mha_rope rope = Zeroed<mha_rope>();
  rope.dims = 2;
  rope.num_positions = 8;
  rope.cos = rope.sin = table.data();
  for (const int64_t batch : {int64_t{1} << 28, int64_t{1} << 50}) {
    TypeParam call;
    call.args.call.batch = batch;
    call.args.call.n_q = call.args.call.n_kv = 1;
    call.data.sequences.q_first_positions = nullptr;
    call.args.call.outputs = nullptr;
    call.args.call.rope = &rope;
    mha_call_info info = Zeroed<mha_call_info>();
    ExpectSucceeds([&](auto *error) { return call.data.Info(&info, error); });
    ExpectFails([&](auto *error) { return call.data.Run(nullptr, info.workspace_bytes, error); },
                no_workspace);
    // No array is read before there is a workspace; these have fewer elements than the call has
    // sequences.
    call.data.sequences.rope_q_positions = call.data.sequences.q_first_positions =
        call.data.sequences.q_lengths = call.Rows({0, 0});
    size_t bytes = 0;
    ExpectSucceeds([&](auto *error) { return call.data.Workspace(&bytes, error); });
    ExpectFails([&](auto *error) { return call.data.Run(nullptr, bytes, error); }, no_workspace);
  }
}

// 2^60 floats of lse, but 2^90 of the outputs per pair that are not given.
TYPED_TEST(CallErrors, DoNotComeFromOutputsThatAreNotGiven) {
  TypeParam call;
  call.args.call.n_q = call.args.call.n_kv = int64_t{1} << 44;
  call.data.sequences.q_first_positions = nullptr;
  call.data.outputs = Zeroed<mha_outputs>();
  call.data.outputs.lse = const_cast<float *>(call.Zeros());
  size_t bytes = 0;
  ExpectSucceeds([&](auto *error) { return call.data.Workspace(&bytes, error); });
}

TYPED_TEST(CallErrors, NameAWorkspaceThatIsTooSmall) {
  TypeParam call;
  size_t needed = 0;
  ASSERT_EQ(call.data.Workspace(&needed, nullptr), MHA_OK);
  ASSERT_GT(needed, 0u);
  for (size_t smaller = 0; smaller < needed; smaller += smaller + 400 < needed ? 131 : 1) {
    Memory workspace(smaller);
    ExpectFails([&](auto *error) { return call.data.Run(workspace.data(), smaller, error); },
                {MHA_ERROR_BUFFER_TOO_SMALL,
                 {kArgs<TypeParam> + 1, kArgs<TypeParam> + 2},
                 {std::to_string(needed)}});
    ASSERT_TRUE(call.data.OutputsAreUntouched()) << smaller << " of " << needed;
  }
  // No workspace at all is too small as well.
  EXPECT_NE(call.data.Run(nullptr, 0, nullptr), MHA_OK);
  EXPECT_TRUE(call.data.OutputsAreUntouched());
}

TYPED_TEST(CallErrors, DoNotOccurInTheValidCall) {
  ExpectAllSucceed<TypeParam>({
      [](auto &) {},
      [](auto &c) { c.args.call.flags = MHA_CAUSAL; },
      [](auto &c) { c.args.call.scheduler = nullptr; },
      [](auto &c) { c.data.sequences.q_first_positions = nullptr; },
      [](auto &c) { c.args.call.n_kv = MHA_EMPTY; },
      [](auto &c) { c.args.call.batch = MHA_EMPTY; },
      [](auto &c) { c.args.call.n_q = MHA_EMPTY; },
      [](auto &c) {
        c.Norm().flags = MHA_NORM_ALL_HEADS, c.Norm().head_stride = 3;
        c.Groups().kv_segments = nullptr, c.args.call.n_kv = MHA_EMPTY;
        c.data.sequences.count = 2;
      },
      // The keys of packed sequences without starts of their own: as many, or none.
      [](auto &c) {
        c.Pack({0, 1, 3}, {}), c.args.call.n_kv = 3;
      },
      [](auto &c) {
        c.Pack({0, 1, 3}, {}), c.args.call.n_kv = MHA_EMPTY;
      },
      [](auto &c) { c.Pack({0}, {0}).count = 0, c.args.call.batch = MHA_EMPTY; },
      [](auto &c) { c.Pack({0}, {0}).count = 0, c.args.call.n_q = c.args.call.n_kv = MHA_EMPTY; },
      // Positions outside the tables that no row has, because others are given, there are no rows,
      // or the rows attend to nothing.
      [](auto &c) {
        c.Rope();
        c.data.q_start[0] = -5, c.data.q_start[1] = 20;
        c.data.sequences.rope_q_positions = c.Rows({0, 1, 2, 3, 4, 5});
      },
      [](auto &c) {
        c.Rope();
        c.data.q_start[0] = -5, c.data.q_start[1] = 20;
        c.data.sequences.q_lengths = c.Rows({0, 0});
      },
      [](auto &c) {
        c.Rope();
        c.data.q_start[0] = -5;
        c.args.call.flags = MHA_CAUSAL;
      },
      [](auto &c) {
        c.Pack({0, 1, 3}, {0, 2, 4});
      },
  });
}

// ---- mha_forward

TEST(ForwardErrors, NameTheArgument) {
  ExpectAllRefused<FullForward>({
      WRONG((c.args.key.data = nullptr, c.args.call.n_kv = c.args.call.n_q), kShape,
            {"key", "7", "10"}),
      WRONG(c.args.value.data = nullptr, kShape, {"value", "9", "7"}),
      WRONG(c.data.outputs.partials = c.data.outputs.context, kInvalid,
            {"outputs.partials is given, but only mha_attention computes it"}),
      WRONG(c.args.output.strides.row = MHA_BROADCAST, kInvalid,
            {"output.strides.row is MHA_BROADCAST, which only inputs can have"}),
      WRONG(c.args.output.strides.batch = MHA_BROADCAST, kInvalid, {"output.strides.batch"}),
      WRONG((c.args.query.strides.batch = kMax / 2, c.args.query.strides.row = MHA_BROADCAST),
            kTooLarge, {"query"}),
      WRONG(c.args.output.strides.batch = 11, kInvalid, {"output.strides.batch"}),
      // The second sequence begins one element before the end of the first one.
      WRONG((c.args.output.strides.row = 20, c.args.output.strides.batch = 2 * 20 + 11 - 1),
            kInvalid, {"output.strides.batch"}),
      // 2^61 rows of 10 floats.
      WRONG(c.args.call.n_q = int64_t{1} << 61, kTooLarge, {}),
  });
}

TEST(ForwardErrors, NameTheStrideOfAnArray) {
  const struct {
    const char *name;
    mha_input mha_forward_args::*input;
  } inputs[] = {{"query", &mha_forward_args::query},
                {"key", &mha_forward_args::key},
                {"value", &mha_forward_args::value}};
  for (const auto &[name, input] : inputs) {
    ExpectFarStridesRefused<FullForward>(name, input, false);
  }
  ExpectFarStridesRefused<FullForward>("output", &mha_forward_args::output, false);
}

TEST(ForwardCalls, AcceptStridesThatAreSpelledOut) {
  ExpectAllSucceed<FullForward>({[](auto &c) {
                                   c.args.query.strides = {3 * 10, 10, 0};
                                   c.args.key.strides = {4 * 7, 7, 0};
                                   c.args.value.strides = {4 * 9, 9, 0};
                                   c.args.output.strides = {3 * 11, 11, 0};
                                 },
                                 // Sequences of the input may overlap each other.
                                 [](auto &c) {
                                   c.args.query.strides = {10, 10, 0};
                                 }});
}

TEST(ForwardCalls, WithSgemmRefuseRowStridesOfMoreThan31Bits) {
  const LayerProblem problem = SmallLayer();
  const mha_layer_options options = Options(MHA_INSTRUCTION_SET_AUTO, PlainSgemm);
  const Layer layer = Create(LayerData(problem), &options);
  ForwardData data(layer.get(), problem, {Guarded()});
  data.args.call.n_q = data.args.call.batch = 1;
  data.sequences.q_first_positions = nullptr;
  Memory workspace(1 << 20);
  for (mha_input mha_forward_args::*input :
       {&mha_forward_args::query, &mha_forward_args::key, &mha_forward_args::value}) {
    (data.args.*input).strides.row = int64_t{1} << 31;
    ExpectFails([&](auto *error) { return data.Run(workspace.data(), 1 << 20, error); },
                {kTooLarge, {2}, {"2147483648", "2147483647"}});
    EXPECT_TRUE(data.OutputsAreUntouched());
    (data.args.*input).strides.row = 0;
  }
}

// Calls of a small layer have no plan, but the same pointers.
TEST(ForwardCalls, OfASmallLayerNameTheirPointers) {
  const LayerProblem problem = OfItself(SquareLayer(8, 2, 1, 4), 3);
  const Layer layer = Create(LayerData(problem));
  ForwardData data(layer.get(), problem, {Guarded(kAskNothing)});
  Memory workspace(data.WorkspaceBytes());
  const auto run = [&](mha_error *e) { return data.Run(workspace.data(), workspace.size(), e); };
  data.args.call.sequences = nullptr;
  ExpectSucceeds(run);
  data.args.query.data = nullptr;
  ExpectFails(run, {kNull, {2}, {"query.data is NULL"}});
}

// With rows outside, the second sequence's rows are between those of the first one.
TEST(ForwardCalls, AcceptOutputSequencesThatInterleaveWithoutOverlap) {
  const LayerProblem problem = SmallLayer();
  const Layer layer = Create(LayerData(problem));
  for (const Layout &layout : {kGaps, kRowsOutside})
    ForwardData(layer.get(), problem, {Guarded(), layout, layout, layout, layout}).Compute();
}

// The query's rows then serve as keys: there are n_q of them, and a value for each.
TEST(ForwardCalls, WithValuesButNoKeysHaveOneValueForEachQuery) {
  LayerProblem problem = SquareLayer(10, 4, 2, 3);
  const Layer layer = Create(LayerData(problem));
  problem.has_key = false;
  for (int64_t n_kv : {0, 2, 3, 4}) {
    problem.n_kv = n_kv;
    ForwardData data(layer.get(), problem, {Guarded()});
    if (n_kv == problem.n_q) {
      data.Compute();
      continue;
    }
    const Expected expected = {kShape, {2}, {"n_q", "n_kv", "3", std::to_string(n_kv)}};
    Memory workspace(1 << 20);
    size_t bytes = 4711;
    ExpectFails([&](auto *error) { return data.Workspace(&bytes, error); }, expected);
    EXPECT_EQ(bytes, 4711u);
    ExpectFails([&](auto *error) { return data.Run(workspace.data(), 1 << 20, error); }, expected);
    EXPECT_TRUE(data.OutputsAreUntouched());
  }
}

// ---- mha_attention

TEST(AttentionErrors, NameTheArgument) {
  ExpectAllRefused<FullAttention>({
      WRONG(c.ContextNorm(), kInvalid, {"norm.context_epsilon is 1", "W_O"}),
      WRONG(c.args.num_kv_heads = 3, kShape, {"num_kv_heads", "3", "4"}),
      WRONG(c.args.num_kv_heads = 8, kShape, {"num_kv_heads", "8", "4"}),
      WRONG(c.args.q.strides.row = 2, kInvalid, {"q.strides.row", "2", "width of a head, 3"}),
      WRONG(c.args.k.strides.row = 1, kInvalid, {"k.strides.row", "1", "3"}),
      WRONG(c.args.v.strides.row = 4, kInvalid, {"v.strides.row", "4", "5"}),
      WRONG((c.args.k.strides = {600, 6, 2}), kInvalid, {"k.strides.head is 2", "3"}),
      WRONG((c.args.output.strides = {0, 4, 15}), kInvalid, {"output.strides.row"}),
      WRONG(c.args.output.strides.head = 4, kInvalid, {"output.strides.head"}),
      WRONG(c.args.output.strides.row = 5, kInvalid, {}),
      // [batch, heads, n, width], with heads that are one element too close.
      WRONG((c.args.output.strides = {60, 5, 14}), kInvalid, {}),
      WRONG(c.args.output.strides.batch = 59, kInvalid, {}),
      WRONG((c.args.call.flags = MHA_EQUAL_SCORES, c.args.scale = 1), kInvalid,
            {"scale is", "MHA_EQUAL_SCORES"}),
      WRONG((c.args.call.flags = MHA_EQUAL_SCORES, c.args.scale = 1e-45f), kInvalid,
            {"scale is", "MHA_EQUAL_SCORES"}),
      WRONG(c.data.outputs.q = c.data.outputs.context, kInvalid,
            {"outputs.q is given, but only mha_forward computes it"}),
      WRONG(c.data.outputs.k = c.data.outputs.context, kInvalid,
            {"outputs.k is given, but only mha_forward computes it"}),
      WRONG(c.data.outputs.v = c.data.outputs.context, kInvalid,
            {"outputs.v is given, but only mha_forward computes it"}),
      WRONG(c.args.instruction_set = AbsentInstructionSet(), MHA_ERROR_INSTRUCTION_SET,
            {mha_instruction_set_name(AbsentInstructionSet())}),
      WRONG(c.args.num_heads = c.args.num_kv_heads = kMax, kTooLarge, {}),
      WRONG((c.args.call.n_kv = MHA_EMPTY, c.args.k.strides.batch = 1), kInvalid,
            {"k.strides.batch"}),
      WRONG((c.args.head_dim = 1 << 28, c.scheduler.scheduler.num_threads = UINT32_MAX), kTooLarge,
            {"the workspace would exceed"}),
      WRONG(c.args.head_dim = int64_t{1} << 29, kTooLarge,
            {"num_heads 4 * head_dim (or * head_dim_v)"}),
      WRONG(c.args.head_dim_v = int64_t{1} << 29, kTooLarge,
            {"num_heads 4 * head_dim (or * head_dim_v)"}),
      WRONG(c.args.call.batch = c.args.call.n_q = c.args.call.n_kv = c.args.num_heads =
                c.args.num_kv_heads = c.args.head_dim = c.args.head_dim_v = kMax,
            kTooLarge, {}),
  });
}

TEST(AttentionErrors, NameTheStrideOfAnArray) {
  const struct {
    const char *name;
    mha_input mha_attention_args::*input;
  } inputs[] = {
      {"q", &mha_attention_args::q}, {"k", &mha_attention_args::k}, {"v", &mha_attention_args::v}};
  for (const auto &[name, input] : inputs) {
    ExpectFarStridesRefused<FullAttention>(name, input, true);
  }
  ExpectFarStridesRefused<FullAttention>("output", &mha_attention_args::output, true);
}

TEST(AttentionCalls, AcceptANegativeScaleAndStridesThatAreSpelledOut) {
  const auto spelled_out = [](auto &c) {
    c.args.q.strides = {36, 12, 3};
    c.args.k.strides = {24, 6, 3};
    c.args.v.strides = {40, 10, 5};
    c.args.output.strides = {60, 20, 5};
  };
  // Strides beside that of heads that lead nowhere.
  const auto of_one_row = [](auto &c) { c.args.call.n_kv = 1, c.args.k.strides = {6, 0, 3}; };
  const auto of_no_row = [](auto &c) {
    c.args.call.n_q = c.args.call.n_kv = MHA_EMPTY;
    c.args.k.strides.head = 3, c.args.output.strides.head = 5;
  };
  const auto of_far_rows = [](auto &c) {
    c.args.call.n_kv = MHA_EMPTY, c.args.k.strides = {kMax / 2, 6, 3};
  };
  const auto of_one_head = [](auto &c) {
    c.args.num_heads = c.args.num_kv_heads = 1;
    c.args.k.strides = {12, 3, 1}, c.args.output.strides.head = 5;
  };
  ExpectAllSucceed<FullAttention>(
      {[](auto &c) { c.args.scale = -0.5f, c.args.k.strides.head = MHA_BROADCAST; }, spelled_out,
       of_one_row, of_no_row, of_far_rows, of_one_head});
}

TEST(AttentionCalls, AcceptEveryNestingOfBatchRowsAndHeads) {
  for (const Layout &layout : {kHeadsOutside, kRowsOutside, kGaps}) {
    AttentionData(NormalAttention(SmallSizes()),
                  {Guarded(), MHA_INSTRUCTION_SET_AUTO, layout, layout, layout, layout})
        .Compute();
  }
  // A batch of one may have any stride of sequences.
  AttentionSizes one = SmallSizes();
  one.batch = 1;
  AttentionData data(NormalAttention(one),
                     {Guarded(), MHA_INSTRUCTION_SET_AUTO, {}, {}, {}, kHeadsOutside});
  data.args.output.strides.batch = 1;
  data.Compute();
}

}  // namespace
