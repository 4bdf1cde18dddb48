// mha_recurrent_attention and mha_causal_conv: invalid calls return a message and write nothing;
// empty calls do nothing; the workspace does not depend on rows.

#include "interface/calls.h"
#include "support/recurrent.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

// Everything that can be given is given.
struct FullRecurrent : Changes<FullRecurrent> {
  static RecurrentProblem Problem() {
    Random random(1);
    RecurrentProblem p = MakeRecurrent(&random, 2, 3, 8, 2, 4, 5, 6, 5, true);
    p.lengths = {3, 2};
    p.norm_epsilon = 1e-6f;
    p.a_log = random.Normals(4);
    p.dt_bias = random.Normals(4 * 5);
    p.beta_is_raw = true;
    p.state = random.Normals(2 * p.state_size());
    p.num_snapshots = 2;
    return p;
  }
  SerialScheduler scheduler{3};
  RecurrentData data{Problem(), {0, &scheduler.scheduler}};
  mha_recurrent_args &args = data.args;
  mha_sequences &rows = data.sequences;
  void LeaveOutStates() {
    args.state_out = args.snapshots = nullptr;
    args.num_snapshots = 0;
  }
  mha_input &Input() { return args.q; }
  // Many sequences that share all inputs, with one row each: 2^17 bytes of states to 2^7 of output.
  void Spread(int64_t batch) {
    args.batch = batch;
    args.rows = 1;
    args.num_q_heads = args.num_k_heads;
    args.head_dim = 1024;
    args.head_dim_v = 8;
    args.decay_dim = 1;
    args.q.strides = args.k.strides = args.v.strides = args.decay.strides =
        args.beta.strides = {MHA_BROADCAST, MHA_BROADCAST, MHA_BROADCAST};
  }
};

struct FullConvolution : Changes<FullConvolution> {
  static ConvolutionProblem Problem() {
    Random random(2);
    ConvolutionProblem p = MakeConvolution(&random, 2, 3, 20, 4);
    p.lengths = {3, 2};
    p.bias = random.Normals(20);
    p.is_silu = true;
    p.state = random.Normals(2 * p.state_size());
    return p;
  }
  SerialScheduler scheduler{3};
  ConvolutionData data{Problem(), {0, &scheduler.scheduler}};
  mha_causal_conv_args &args = data.args;
  mha_sequences &rows = data.sequences;
  void LeaveOutStates() { args.state_out = nullptr; }
  mha_input &Input() { return args.x; }
};

template <typename Call>
class RecurrentCalls : public testing::Test {};
using BothCalls = testing::Types<FullRecurrent, FullConvolution>;
TYPED_TEST_SUITE(RecurrentCalls, BothCalls);

TYPED_TEST(RecurrentCalls, NameWhatBothCallsHave) {
  ExpectAllRefused<TypeParam>({
      WRONG(c.args.batch = kMax, kTooLarge, {}),
      WRONG(c.args.rows = kMax, kTooLarge, {}),
      WRONG(c.args.batch = c.args.rows = kMax, kTooLarge, {}),
      WRONG(c.args.instruction_set = AbsentInstructionSet(), MHA_ERROR_INSTRUCTION_SET,
            {mha_instruction_set_name(AbsentInstructionSet())}),
      WRONG(c.Input().data = nullptr, kNull, {"q.data|x.data"}, kCall),
      WRONG(c.Input().strides.row = 3, kInvalid, {"strides.row is 3"}),
      WRONG(c.Input().strides.batch = kMax, kTooLarge, {}),
      WRONG(c.args.output.strides.row = MHA_BROADCAST, kInvalid, {"output.strides.row"}),
      WRONG(c.args.output.strides.row = 5, kInvalid, {"output.strides.row is 5"}),
      WRONG(c.scheduler.scheduler.parallel_for = nullptr, kNull, {"parallel_for"}),
      WRONG(c.rows.count = 3, kShape, {"sequences.count is 3", "batch is 2"}),
      WRONG(c.rows.q_lengths = c.Rows({3, 4}), kInvalid, {"sequences.q_lengths[1] is 4", "rows"},
            kCall),
      WRONG(c.rows.q_lengths = c.Rows({-1, 3}), kInvalid, {"sequences.q_lengths[0] is -1"}, kCall),
      WRONG(c.rows.q_first_rows = c.Rows({0, 4}), kInvalid,
            {"sequences.q_first_rows[1] is 4", "0 to rows, 3"}, kCall),
      WRONG(c.rows.q_first_rows = c.Rows({0, 2}), kShape,
            {"sequences.q_first_rows[1] is 2", "rows = 3"}, kCall),
      WRONG((c.Pack({0, 1, 3}, {}).q_lengths = nullptr, c.args.batch = 2), kShape,
            {"batch is 2", "set it to 1"}),
      WRONG(c.Pack({0, 1, 3}, {}), kInvalid, {"sequences.q_lengths", "cu_seqlens_q"}),
      WRONG(c.Pack({0, 2, 1}, {}).q_lengths = nullptr, kInvalid,
            {"sequences.cu_seqlens_q[2] is 1", "less than 2"}, kCall),
      WRONG(c.Pack({0, 1, 2}, {}).q_lengths = nullptr, kShape,
            {"sequences.cu_seqlens_q[2] is 2", "rows, 3"}, kCall),
      WRONG(c.rows.cu_seqlens_kv = c.Rows({0}), kInvalid, {"sequences.cu_seqlens_kv"}),
      WRONG(c.rows.kv_lengths = c.Rows({0}), kInvalid, {"sequences.kv_lengths"}),
      WRONG(c.rows.kv_first_rows = c.Rows({0}), kInvalid, {"sequences.kv_first_rows"}),
      WRONG(c.rows.q_first_positions = c.Rows({0}), kInvalid, {"sequences.q_first_positions"}),
      WRONG(c.rows.cache_sequences = c.Rows({0}), kInvalid, {"sequences.cache_sequences"}),
      WRONG(c.rows.rope_q_positions = c.Rows({0}), kInvalid, {"sequences.rope_q_positions"}),
      WRONG(c.rows.rope_k_positions = c.Rows({0}), kInvalid, {"sequences.rope_k_positions"}),
  });
}

TEST(RecurrentErrors, NameFieldsOfRecurrentAttention) {
  ExpectAllRefused<FullRecurrent>({
      WRONG(c.args.num_k_heads = 3, kShape, {"num_k_heads is 3", "num_v_heads, 4"}),
      WRONG(c.args.num_k_heads = 8, kShape, {"num_k_heads is 8", "num_v_heads, 4"}),
      WRONG(c.args.num_q_heads = 3, kShape, {"num_q_heads is 3", "num_v_heads, 4"}),
      WRONG(c.args.num_q_heads = 6, kShape, {"num_q_heads is 6", "num_v_heads, 4"}),
      WRONG(c.args.decay_dim = 4, kShape, {"decay_dim is 4", "head_dim, 5"}),
      WRONG(c.args.decay_dim = -1, kShape, {"decay_dim is -1"}),
      WRONG((c.args.decay = {}, c.args.a_log = c.args.dt_bias = nullptr, c.args.decay_dim = 4),
            kShape, {"decay_dim is 4"}),
      WRONG(c.args.num_v_heads = c.args.num_k_heads = c.args.num_q_heads = kMax, kInvalid,
            {"num_q_heads is"}),
      WRONG(c.args.a_log = nullptr, kInvalid, {"dt_bias", "a_log"}),
      WRONG((c.args.decay = {}, c.args.decay_dim = 0), kInvalid, {"a_log", "decay"}),
      WRONG(c.args.decay.data = nullptr, kInvalid, {"decay"}),
      WRONG((c.args.a_log = c.args.dt_bias = nullptr, c.args.decay_dim = 0,
             c.args.decay.data = nullptr, c.args.decay.type = MHA_TYPE_F16),
            kInvalid, {"decay"}),
      WRONG(c.args.beta.data = nullptr, kInvalid, {"beta_function", "beta"}),
      WRONG((c.args.beta_function = 0, c.args.beta.data = nullptr,
             c.args.beta.strides.head = MHA_BROADCAST),
            kInvalid, {"beta"}),
      WRONG((c.args.k.strides = {MHA_BROADCAST, 8, 4}), kInvalid, {"k.strides.head is 4"}),
      WRONG((c.args.v.strides = {0, 0, 6}), kInvalid, {"v.strides"}),
      WRONG((c.args.decay.strides = {kMax, 20, 5}), kTooLarge, {"decay"}),
      WRONG(c.args.beta.strides.row = 3, kInvalid, {"beta.strides.row is 3"}),
      WRONG((c.args.output.strides = {144, 48, MHA_BROADCAST}), kInvalid, {"output.strides.head"}),
      WRONG(c.args.num_snapshots = 0, kInvalid, {"num_snapshots is 0", "snapshots"}),
      WRONG(c.args.snapshots = nullptr, kInvalid, {"num_snapshots is 2", "snapshots"}),
      WRONG(c.rows.q_lengths = c.Rows({3, 4}), kInvalid, {"sequences.q_lengths[1] is 4"},
            kReadsArrays),
      WRONG((c.args.beta_function = 0, c.args.beta = {}, c.args.beta.reserved = 1), kInvalid,
            {"beta.reserved"}),
      WRONG((c.args.beta_function = 0, c.args.beta = {}, c.args.beta.reserved_pointer = &c),
            kInvalid, {"beta.reserved_pointer"}),
      WRONG((c.args.num_v_heads = c.args.num_k_heads = c.args.decay_dim = 1,
             c.args.num_q_heads = INT32_MAX, c.args.head_dim = 1024,
             c.scheduler.scheduler.num_threads = UINT32_MAX),
            kTooLarge, {"the workspace would exceed"}),
      WRONG(c.Spread(int64_t{1} << 46), kTooLarge, {"state would exceed"}),
      WRONG(c.Spread(int64_t{1} << 45), kTooLarge, {"snapshots would exceed"}),
  });
}

TEST(RecurrentErrors, NameFieldsOfCausalConvolution) {
  ExpectAllRefused<FullConvolution>({
      WRONG(c.args.weights = nullptr, kNull, {"weights"}, kCall),
      WRONG((c.args.batch = int64_t{1} << 56, c.args.rows = 1, c.args.kernel_size = 8,
             c.args.x.strides.batch = MHA_BROADCAST),
            kTooLarge, {"state would exceed"}),
      WRONG(c.args.x.strides.head = 20, kInvalid, {"x.strides.head"}),
      WRONG(c.args.output.strides.head = 20, kInvalid, {"output.strides.head"}),
  });
}

TYPED_TEST(RecurrentCalls, NameNullArgumentsAndASmallWorkspace) {
  TypeParam call;
  size_t bytes = 0;
  ExpectSucceeds([&](auto *error) { return call.data.Workspace(&bytes, error); });
  if (bytes > 0) {
    Memory workspace(bytes);
    for (const auto &[memory, size] :
         std::vector<std::pair<void *, size_t>>{{workspace.data(), bytes - 1}, {nullptr, bytes}}) {
      ExpectFails([&, memory = memory,
                   size = size](auto *error) { return call.data.Run(memory, size, error); },
                  {size < bytes ? MHA_ERROR_BUFFER_TOO_SMALL : kNull,
                   {2, 3},
                   {"workspace|workspace_bytes"}});
    }
  }
  EXPECT_TRUE(call.data.OutputsAreUntouched());
  ExpectFails({kNull, {2}, {"bytes"}},
              [&](mha_error *error) { return call.data.Workspace(nullptr, error); });
}

TEST(RecurrentErrors, NameNullArguments) {
  size_t bytes = 0;
  mha_call_info info = Zeroed<mha_call_info>();
  const mha_recurrent_args *const recurrent = nullptr;
  const mha_causal_conv_args *const convolution = nullptr;
  void *const workspace = &bytes;
  const Expected expected = {kNull, {1}, {"args|mha_recurrent_args|mha_causal_conv_args"}};
  ExpectFails(expected, mha_recurrent_attention_workspace, recurrent, &bytes);
  ExpectFails(expected, mha_recurrent_attention, recurrent, workspace, sizeof bytes);
  ExpectFails(expected, mha_recurrent_attention_info, recurrent, &info);
  ExpectFails(expected, mha_causal_conv_workspace, convolution, &bytes);
  ExpectFails(expected, mha_causal_conv, convolution, workspace, sizeof bytes);
  FullRecurrent call;
  ExpectFails({kNull, {2}, {"mha_call_info|info"}}, mha_recurrent_attention_info,
              const_cast<const mha_recurrent_args *>(&call.args),
              static_cast<mha_call_info *>(nullptr));
}

// What a batch of 1 writes, a batch of 0 writes too.
TYPED_TEST(RecurrentCalls, TakeABatchOfZeroForOne) {
  std::vector<float> outputs[2];
  for (int64_t batch = 0; batch < 2; ++batch) {
    TypeParam call;
    call.args.batch = batch;
    call.args.sequences = nullptr;
    const Memory workspace(1 << 20);
    ExpectSucceeds(
        [&](auto *error) { return call.data.Run(workspace.data(), workspace.size(), error); });
    const float *const output = static_cast<const float *>(call.args.output.data);
    outputs[batch].assign(output, output + 3 * 20);
    EXPECT_FALSE(call.data.OutputsAreUntouched());
  }
  EXPECT_EQ(outputs[0], outputs[1]);
}

// Without pointers to arrays. The query reads none, and an empty call does nothing, but that a call
// with sequences hands their states on.
TYPED_TEST(RecurrentCalls, DoNotComeFromEmptyCalls) {
  for (const bool has_batch : {false, true}) {
    TypeParam call;
    (has_batch ? call.args.rows : call.args.batch) = MHA_EMPTY;
    if (has_batch) call.LeaveOutStates();
    call.args.sequences = nullptr;
    call.Input().data = call.args.output.data = nullptr;
    size_t bytes = 1;
    ExpectSucceeds([&](auto *error) { return call.data.Workspace(&bytes, error); });
    EXPECT_EQ(bytes, 0u);
    ExpectSucceeds([&](auto *error) { return call.data.Run(nullptr, 0, error); });
    EXPECT_TRUE(call.data.OutputsAreUntouched());
    EXPECT_EQ(call.scheduler.calls, 0u);
  }
}

// The snapshots of a call without rows are its states, which no state_out needs to take as well.
TEST(RecurrentErrors, DoNotComeFromSnapshotsWithoutRows) {
  FullRecurrent call;
  call.args.rows = MHA_EMPTY;
  call.args.sequences = nullptr;
  call.args.state_out = nullptr;
  Memory workspace(1 << 20);
  ExpectSucceeds([&](auto *error) { return call.data.Run(workspace.data(), 1 << 20, error); });
  RecurrentProblem without_rows = FullRecurrent::Problem();
  without_rows.lengths = {0, 0};
  const std::vector<float> expected = Specify(without_rows).snapshots;
  EXPECT_TRUE(SameBits("snapshots", {call.args.snapshots, call.args.snapshots + expected.size()},
                       expected));
}

TYPED_TEST(RecurrentCalls, DoNotComeFromWorkspacesOfOtherSizes) {
  size_t expected = 0;
  for (const int64_t factor : {1, 7, 1000}) {
    TypeParam call;
    call.args.sequences = nullptr;
    call.Input().data = call.args.output.data = nullptr;
    call.args.batch *= factor;
    call.args.rows *= factor;
    size_t bytes = 0;
    ExpectSucceeds([&](auto *error) { return call.data.Workspace(&bytes, error); });
    EXPECT_TRUE(factor == 1 || bytes == expected) << bytes << " bytes, not " << expected;
    expected = bytes;
  }
}

TEST(RecurrentInfo, CountsEachArrayOfValidRowsAndEachState) {
  FullRecurrent call;
  mha_call_info info = Zeroed<mha_call_info>();
  ExpectSucceeds([&](auto *error) { return call.data.Info(&info, error); });
  size_t bytes = 0;
  ExpectSucceeds([&](auto *error) { return call.data.Workspace(&bytes, error); });
  EXPECT_EQ(info.workspace_bytes, bytes);
  EXPECT_EQ(info.contract, MHA_CONTRACT);
  EXPECT_EQ(info.num_threads, 3u);
  // 5 valid rows; of 2 sequences, state, state_out and 2 snapshots.
  const uint64_t row = 8 * 5 + 2 * 5 + 4 * 6 + 4 * 5 + 4 + 8 * 6, gates = 4 + 4 * 5;
  EXPECT_EQ(info.bytes, 4 * (5 * row + gates + 2 * 4 * 4 * 5 * 6));
  // Of each number of a state: its decay, k u and the sum; of r and two queries, product and sum.
  EXPECT_EQ(info.operations, 5u * 4 * 5 * 6 * (3 + 2 + 4));
  const uint64_t all = info.bytes;
  call.args.beta.strides.head = MHA_BROADCAST;  // one number of each row instead of 4
  call.args.beta.strides.row = 1;
  call.args.beta.strides.batch = 3;
  ExpectSucceeds([&](auto *error) { return call.data.Info(&info, error); });
  EXPECT_EQ(info.bytes, all - 4 * 5 * 3);
  call.args.rows = MHA_EMPTY;
  call.args.sequences = nullptr;
  ExpectSucceeds([&](auto *error) { return call.data.Info(&info, error); });
  EXPECT_EQ(info.operations, 0u);
  EXPECT_EQ(info.bytes, 4 * (gates + 2 * 4 * 4 * 5 * 6));  // states are handed on
  call.LeaveOutStates();
  ExpectSucceeds([&](auto *error) { return call.data.Info(&info, error); });
  EXPECT_EQ(info.bytes, 0u);
}

}  // namespace
