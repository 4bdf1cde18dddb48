// Bad input is a sentence, not a crash: both entries, their size queries and their descriptions are called
// with every kind of wrong argument. Each row of a table takes a valid call and breaks one thing in it; then the status, the parameter that
// is named and the sentence must fit, and nothing but the error struct may have been written.

#include "interface_calls.h"

namespace {

using namespace interface_support;  // NOLINT: this file is about nothing else

// ---- Calls: mha_forward, its workspace query and mha_info --------------------------------------------------------------------------

// Which functions a row is about. The queries look at no data, mha_info alone at q_start.
enum : unsigned { kWorkspace = 1, kCall = 2, kInfo = 4, kReadsStarts = kCall | kInfo, kAllOfTheCall = 7 };

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
    {"UnknownFlagIsSet", [](ForwardCall &c) { c.args.flags = 0x100; }, {MHA_ERROR_INVALID_VALUE, {2}, {"flags", "0x100"}}},
    {"ReservedIsSet", [](ForwardCall &c) { c.args.reserved = 1; }, {MHA_ERROR_INVALID_VALUE, {2}, {"reserved"}}},
    {"ScoreIsGiven",
     [](ForwardCall &c) { c.args.score = reinterpret_cast<const mha_score_options *>(&c); },
     {MHA_ERROR_INVALID_VALUE, {2}, {"score"}}},
    {"CausalWithMoreQueriesThanKeysNeedsStarts",
     [](ForwardCall &c) {
       c.args.flags = MHA_CAUSAL;
       c.args.q_start = nullptr;
       c.args.n_kv = 2;
     },
     {MHA_ERROR_SHAPE, {2}, {"n_q", "n_kv", "3", "2", "q_start"}}},
    {"CausalWithoutKeysNeedsStarts",
     [](ForwardCall &c) {
       c.args.flags = MHA_CAUSAL;
       c.args.q_start = nullptr;
       c.args.n_kv = 0;
     },
     {MHA_ERROR_SHAPE, {2}, {"n_q", "n_kv", "q_start"}}},
    {"FirstStartIsNegative",
     [](ForwardCall &c) {
       c.args.flags = MHA_CAUSAL;
       c.data.q_start()[0] = -1;
     },
     {MHA_ERROR_INVALID_VALUE, {2}, {"q_start"}},
     kReadsStarts},
    {"LastStartIsNegative",
     [](ForwardCall &c) {
       c.args.flags = MHA_CAUSAL;
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
  ExpectCallSucceeds<ForwardCall>([](ForwardCall &c) { c.args.flags = MHA_CAUSAL; });
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
    {"KTypeIsUnknown", [](AttentionCall &c) { c.args.k_type = 3; }, {MHA_ERROR_INVALID_VALUE, {1}, {"k_type"}}},
    {"VTypeIsUnknown", [](AttentionCall &c) { c.args.v_type = 0x80000000u; }, {MHA_ERROR_INVALID_VALUE, {1}, {"v_type"}}},
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
    {"CausalWithMoreQueriesThanKeysNeedsStarts",
     [](AttentionCall &c) {
       c.args.flags = MHA_CAUSAL;
       c.args.q_start = nullptr;
       c.args.n_kv = 2;
     },
     {MHA_ERROR_SHAPE, {1}, {"n_q", "n_kv", "3", "2", "q_start"}}},
    {"FirstStartIsNegative",
     [](AttentionCall &c) {
       c.args.flags = MHA_CAUSAL;
       c.data.q_start()[0] = -1;
     },
     {MHA_ERROR_INVALID_VALUE, {1}, {"q_start"}},
     kReadsStarts},
    {"LastStartIsNegative",
     [](AttentionCall &c) {
       c.args.flags = MHA_CAUSAL;
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
    {"ReservedIsSet", [](AttentionCall &c) { c.args.reserved = 1; }, {MHA_ERROR_INVALID_VALUE, {1}, {"reserved"}}},
    {"ScoreIsGiven",
     [](AttentionCall &c) { c.args.score = reinterpret_cast<const mha_score_options *>(&c); },
     {MHA_ERROR_INVALID_VALUE, {1}, {"score"}}},
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
  ExpectCallSucceeds<AttentionCall>([](AttentionCall &c) { c.args.flags = MHA_CAUSAL; });
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

// ---- Time --------------------------------------------------------------------------------------------------------------------------

// However many sequences there are said to be, a call without its workspace ends, and so does a description without arrays to be read.
template <typename Call>
void ExpectAnswersForAnyBatch(uint32_t workspace_argument) {
  const std::vector<float> table(8, 0.5f);
  mha_rope rope = {};
  rope.struct_size = sizeof rope;
  rope.dims = 2;
  rope.num_positions = 8;
  rope.cos = rope.sin = table.data();
  std::vector<int64_t> positions(8);
  for (const int64_t batch : {int64_t{1} << 28, int64_t{1} << 50}) {
    Call call;
    call.args.batch = batch;
    call.args.n_q = 1;
    call.args.n_kv = 1;
    call.args.q_start = nullptr;
    call.args.lse = call.args.attention_weights = nullptr;
    call.args.taps = nullptr;
    call.args.rope = &rope;
    mha_call_info info = {};
    info.struct_size = sizeof info;
    ExpectSucceeds([&](mha_error *error) { return CallInfo(call, &info, error); });
    ExpectFails([&](mha_error *error) { return CallRun(call, nullptr, info.workspace_bytes, error); },
                {MHA_ERROR_NULL_POINTER, {workspace_argument}, {"workspace"}});
    // Nor are arrays read before there is a workspace; these have fewer elements than are said.
    rope.q_positions = call.args.q_start = call.args.q_lengths = positions.data();
    size_t bytes = 0;
    ExpectSucceeds([&](mha_error *error) { return CallWorkspace(call, &bytes, error); });
    ExpectFails([&](mha_error *error) { return CallRun(call, nullptr, bytes, error); },
                {MHA_ERROR_NULL_POINTER, {workspace_argument}, {"workspace"}});
    rope.q_positions = nullptr;
  }
}

TEST(Time, OfForwardErrorsDoesNotGrowWithTheBatch) { ExpectAnswersForAnyBatch<ForwardCall>(3); }
TEST(Time, OfAttentionErrorsDoesNotGrowWithTheBatch) { ExpectAnswersForAnyBatch<AttentionCall>(2); }

}  // namespace
