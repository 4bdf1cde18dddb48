// What the library says about itself and about a call: statuses, versions, instruction sets, and the descriptions that mha_info and
// mha_attention_info give.

#include <set>

#include "interface_support.h"

namespace {

using namespace interface_support;  // NOLINT: this file is about nothing else

// ---- Names and versions ------------------------------------------------------------------------------------------------------------

TEST(Status, HasTheNameOfItsMacro) {
  EXPECT_STREQ(mha_status_string(MHA_OK), "MHA_OK");
  EXPECT_STREQ(mha_status_string(MHA_ERROR_NULL_POINTER), "MHA_ERROR_NULL_POINTER");
  EXPECT_STREQ(mha_status_string(MHA_ERROR_STRUCT_SIZE), "MHA_ERROR_STRUCT_SIZE");
  EXPECT_STREQ(mha_status_string(MHA_ERROR_INVALID_VALUE), "MHA_ERROR_INVALID_VALUE");
  EXPECT_STREQ(mha_status_string(MHA_ERROR_SHAPE), "MHA_ERROR_SHAPE");
  EXPECT_STREQ(mha_status_string(MHA_ERROR_TOO_LARGE), "MHA_ERROR_TOO_LARGE");
  EXPECT_STREQ(mha_status_string(MHA_ERROR_BUFFER_TOO_SMALL), "MHA_ERROR_BUFFER_TOO_SMALL");
  EXPECT_STREQ(mha_status_string(MHA_ERROR_OUT_OF_MEMORY), "MHA_ERROR_OUT_OF_MEMORY");
  EXPECT_STREQ(mha_status_string(MHA_ERROR_INSTRUCTION_SET), "MHA_ERROR_INSTRUCTION_SET");
  EXPECT_STREQ(mha_status_string(MHA_ERROR_PACKED_FORMAT), "MHA_ERROR_PACKED_FORMAT");
  EXPECT_STREQ(mha_status_string(MHA_ERROR_PACKED_CHECKSUM), "MHA_ERROR_PACKED_CHECKSUM");
  EXPECT_STREQ(mha_status_string(MHA_ERROR_OUT_OF_RANGE), "MHA_ERROR_OUT_OF_RANGE");
  EXPECT_STREQ(mha_status_string(MHA_ERROR_CACHE_FULL), "MHA_ERROR_CACHE_FULL");
  EXPECT_STREQ(mha_status_string(MHA_ERROR_CACHE_FORMAT), "MHA_ERROR_CACHE_FORMAT");
}

TEST(Status, HasANameForEveryNumber) {
  for (uint32_t number = MHA_ERROR_CACHE_FORMAT + 1; number < 5000; ++number) {
    ASSERT_STREQ(mha_status_string(number), "unknown mha_status") << number;
  }
  for (uint32_t number : {0x7FFFFFFFu, 0x80000000u, 0x80000001u, 0xFFFFFFFEu, 0xFFFFFFFFu}) {
    EXPECT_STREQ(mha_status_string(number), "unknown mha_status") << number;
  }
}

TEST(Version, IsThatOfTheHeader) {
  EXPECT_EQ(mha_version(), 10000u * MHA_VERSION_MAJOR + 100u * MHA_VERSION_MINOR + MHA_VERSION_PATCH);
  EXPECT_EQ(mha_contract(), static_cast<uint32_t>(MHA_CONTRACT));
}

TEST(InstructionSets, HaveNames) {
  EXPECT_STREQ(mha_instruction_set_name(MHA_INSTRUCTION_SET_AUTO), "auto");
  EXPECT_STREQ(mha_instruction_set_name(MHA_INSTRUCTION_SET_SCALAR), "scalar");
  EXPECT_STREQ(mha_instruction_set_name(MHA_INSTRUCTION_SET_AVX2), "avx2");
  EXPECT_STREQ(mha_instruction_set_name(MHA_INSTRUCTION_SET_AVX512), "avx512");
  EXPECT_STREQ(mha_instruction_set_name(MHA_INSTRUCTION_SET_NEON), "neon");
  for (uint32_t number = MHA_INSTRUCTION_SET_NEON + 1; number < 5000; ++number) {
    ASSERT_STREQ(mha_instruction_set_name(number), "unknown") << number;
  }
  for (uint32_t number : {0x80000000u, 0x80000001u, 0xFFFFFFFFu}) EXPECT_STREQ(mha_instruction_set_name(number), "unknown") << number;
}

TEST(InstructionSets, AreThoseOfThisMachine) {
  const auto bit = [](uint32_t set) { return 1u << set; };
  const uint32_t sets = mha_instruction_sets();
  EXPECT_EQ(sets, mha_instruction_sets());
  EXPECT_NE(sets & bit(MHA_INSTRUCTION_SET_SCALAR), 0u) << "any machine runs the scalar kernels";
  EXPECT_EQ(sets & bit(MHA_INSTRUCTION_SET_AUTO), 0u) << "auto is a choice, not a set";
  EXPECT_EQ(sets >> (MHA_INSTRUCTION_SET_NEON + 1), 0u) << "a set without a name";
  uint32_t possible = bit(MHA_INSTRUCTION_SET_SCALAR);
#if defined(__x86_64__)
  // The compiler's own detection, which includes the operating system's state as well.
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    possible |= bit(MHA_INSTRUCTION_SET_AVX2);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq")) {
      possible |= bit(MHA_INSTRUCTION_SET_AVX512);
    }
  }
#elif defined(__aarch64__)
  possible |= bit(MHA_INSTRUCTION_SET_NEON);
#endif
  EXPECT_EQ(sets & ~possible, 0u) << "a set that this machine can't run";
}

// ---- Descriptions of calls ---------------------------------------------------------------------------------------------------------

mha_call_info Info(const CallData &data) {
  mha_call_info info;
  std::memset(&info, 0xFF, sizeof info);  // every field is to be filled
  info.struct_size = sizeof info;
  mha_error error;
  EXPECT_EQ(data.Info(&info, &error), MHA_OK) << error.message;
  return info;
}

// The pairs of a query and a key that attend, of one head.
int64_t Pairs(const CallShape &shape, const int64_t *q_start) {
  const int64_t n_kv = shape.key || shape.value ? shape.n_kv : shape.n_q;
  int64_t pairs = 0;
  for (int64_t b = 0; b < shape.batch; ++b) {
    const int64_t start = shape.q_start ? q_start[b] : n_kv - shape.n_q;
    for (int64_t i = 0; i < shape.n_q; ++i) pairs += shape.is_causal ? std::min(start + i + 1, n_kv) : n_kv;
  }
  return pairs;
}

const std::vector<CallShape> kCalls = [] {
  std::vector<CallShape> calls;
  for (bool is_causal : {false, true}) {
    for (bool q_start : {false, true}) {
      for (int64_t n_q : {0, 1, 3, 40}) {
        for (int64_t n_kv : {40, 41, 300}) {
          CallShape shape;
          shape.batch = 3;
          shape.n_q = n_q;
          shape.n_kv = n_kv;
          shape.is_causal = is_causal;
          shape.q_start = q_start;
          calls.push_back(shape);
        }
      }
    }
  }
  return calls;
}();

// A product of m by k by n is m * n sums of k products: 2 * m * n * k operations.
TEST(AttentionInfo, CountsTheOperationsOfPairsThatAttendOnly) {
  const HeadsShape heads;
  for (const CallShape &shape : kCalls) {
    const AttentionData data(heads, shape);
    const int64_t pairs = Pairs(shape, data.q_start());
    EXPECT_EQ(Info(data).operations, static_cast<uint64_t>(2 * heads.num_heads * pairs * (heads.head_dim + heads.head_dim_v))) << shape;
  }
}

TEST(ForwardInfo, CountsTheOperationsOfProjectionsAndPairsThatAttend) {
  for (bool output_projection : {true, false}) {
    LayerShape layer_shape;
    layer_shape.biases = false;
    if (!output_projection) layer_shape.output_dim = 0;
    const LayerData layer_data(layer_shape);
    const LayerPointer layer = Create(layer_data);
    for (const CallShape &shape : kCalls) {
      const ForwardData data(layer_shape, shape, layer.get());
      if (shape.n_q == 0) continue;  // nothing to do: whether the keys would be projected is nobody's business
      const int64_t pairs = Pairs(shape, data.q_start());
      const int64_t q_rows = shape.batch * shape.n_q, kv_rows = shape.batch * shape.n_kv;
      const int64_t projected =
          q_rows * layer_shape.query_dim * layer_shape.q_width() + kv_rows * layer_shape.key_dim * layer_shape.k_width() +
          kv_rows * layer_shape.value_dim * layer_shape.v_width() + q_rows * layer_shape.context_width() * layer_shape.output_dim;
      const int64_t attended = layer_shape.num_heads * pairs * (layer_shape.head_dim + layer_shape.head_dim_v);
      EXPECT_EQ(Info(data).operations, static_cast<uint64_t>(2 * (projected + attended))) << shape;
    }
  }
}

// The biases are an addition per output number, if they are counted.
TEST(ForwardInfo, CountsTheOperationsOfSelfAttentionWithBiases) {
  const LayerShape shape = LayerShape::SelfAttention(64, 4, 2, 16);
  const LayerData layer_data(shape);
  const LayerPointer layer = Create(layer_data);
  CallShape call;
  call.batch = 2;
  call.n_q = 100;
  call.key = call.value = false;
  call.is_causal = true;
  const ForwardData data(shape, call, layer.get());
  const int64_t rows = 200, outputs = 64 + 32 + 32 + 64, pairs = 2 * 100 * 101 / 2;
  const int64_t products = 2 * (rows * 64 * outputs + 4 * pairs * 32);
  EXPECT_GE(Info(data).operations, static_cast<uint64_t>(products));
  EXPECT_LE(Info(data).operations, static_cast<uint64_t>(products + rows * outputs));
}

TEST(AttentionInfo, CountsEachByteOnce) {
  const HeadsShape heads;
  for (CallShape shape : kCalls) {
    for (Order order : {Order::kContiguous, Order::kGaps}) {
      shape.order = order;
      if (shape.n_q == 0) continue;  // then nothing is read
      const AttentionData data(heads, shape);
      const int64_t q_rows = shape.batch * shape.n_q, kv_rows = shape.batch * shape.n_kv;
      const int64_t numbers = q_rows * 4 * 3 + kv_rows * 2 * 3 + kv_rows * 2 * 5 + q_rows * 4 * 5;
      const mha_call_info info = Info(data);
      EXPECT_EQ(info.bytes, static_cast<uint64_t>(4 * numbers)) << shape;
      EXPECT_EQ(info.packed_bytes, 0u);
    }
  }
}

TEST(AttentionInfo, CountsTheBytesOfOptionalOutputs) {
  CallShape shape;
  const uint64_t without = Info(AttentionData(HeadsShape{}, shape)).bytes;
  shape.outputs = kLse;
  EXPECT_EQ(Info(AttentionData(HeadsShape{}, shape)).bytes - without, 4u * 2 * 4 * 3);
  shape.outputs = kAttentionWeights;
  EXPECT_EQ(Info(AttentionData(HeadsShape{}, shape)).bytes - without, 4u * 2 * 4 * 3 * 4);
  shape.outputs = kTapScores | kTapMaskedScores;
  EXPECT_EQ(Info(AttentionData(HeadsShape{}, shape)).bytes - without, 2u * 4 * 2 * 4 * 3 * 4);
}

TEST(ForwardInfo, CountsEachByteOnce) {
  for (bool self : {false, true}) {
    const LayerShape shape = self ? LayerShape::SelfAttention(50, 4, 2, 20) : LayerShape{};
    const LayerData layer_data(shape);
    const LayerPointer layer = Create(layer_data);
    CallShape call;
    call.n_q = call.n_kv = 30;
    call.key = call.value = !self;
    const ForwardData data(shape, call, layer.get());
    const mha_call_info info = Info(data);
    const int64_t rows = call.batch * 30;
    const int64_t numbers = rows * (shape.query_dim + (self ? 0 : shape.key_dim + shape.value_dim) + shape.output_dim);
    EXPECT_EQ(info.packed_bytes, layer_data.PackSize());
    // The weights are read as they are packed: between their own size and that of the packed layer.
    EXPECT_GE(info.bytes, static_cast<uint64_t>(4 * (numbers + shape.weight_count())));
    EXPECT_LE(info.bytes, static_cast<uint64_t>(4 * numbers) + layer_data.PackSize());
  }
}

template <typename Make>
void ExpectWorkspaceIsThatOfTheQuery(const Make &make) {
  for (uint32_t num_threads : {0u, 1u, 5u}) {
    SerialScheduler scheduler(num_threads);
    for (unsigned outputs : {0u, unsigned{kAttentionWeights}, unsigned{kAttentionOutputs}}) {
      for (CallShape shape : kCalls) {
        shape.outputs = outputs;
        const std::unique_ptr<CallData> data = make(shape);
        if (num_threads > 0) data->SetScheduler(&scheduler.scheduler);
        const mha_call_info info = Info(*data);
        EXPECT_EQ(info.workspace_bytes, data->WorkspaceBytes()) << shape << " num_threads " << num_threads;
        EXPECT_GE(info.num_threads, 1u);
        EXPECT_LE(info.num_threads, std::max(num_threads, 1u));
      }
    }
  }
}

TEST(ForwardInfo, GivesTheWorkspaceAndThreadsOfTheCall) {
  const LayerData layer_data{LayerShape{}};
  const LayerPointer layer = Create(layer_data);
  ExpectWorkspaceIsThatOfTheQuery(
      [&](const CallShape &shape) { return std::make_unique<ForwardData>(layer_data.shape, shape, layer.get()); });
}

TEST(AttentionInfo, GivesTheWorkspaceAndThreadsOfTheCall) {
  ExpectWorkspaceIsThatOfTheQuery([&](const CallShape &shape) { return std::make_unique<AttentionData>(HeadsShape{}, shape); });
}

// With work enough for all, all threads are used.
TEST(Info, UsesAllThreadsForALargeCall) {
  SerialScheduler scheduler(4);
  const LayerData layer_data(LayerShape::SelfAttention(64, 4, 4, 16));
  const LayerPointer layer = Create(layer_data);
  CallShape shape;
  shape.n_q = shape.n_kv = 1024;
  shape.key = shape.value = false;
  ForwardData forward(layer_data.shape, shape, layer.get());
  forward.SetScheduler(&scheduler.scheduler);
  EXPECT_EQ(Info(forward).num_threads, 4u);
  shape.key = shape.value = true;
  AttentionData attention({4, 4, 16, 16}, shape);
  attention.SetScheduler(&scheduler.scheduler);
  EXPECT_EQ(Info(attention).num_threads, 4u);
}

TEST(Info, SaysWhichKernelsRun) {
  const LayerData layer_data{LayerShape{}};
  const CallShape shape;
  std::set<int64_t> tiles;
  for (uint32_t set : InstructionSets()) {
    SCOPED_TRACE(mha_instruction_set_name(set));
    const LayerPointer layer = Create(layer_data, set);
    const mha_call_info forward = Info(ForwardData(layer_data.shape, shape, layer.get()));
    EXPECT_EQ(forward.struct_size, sizeof forward);
    EXPECT_EQ(forward.instruction_set, set);
    EXPECT_EQ(forward.back_end, MHA_BACK_END_NATIVE);
    EXPECT_EQ(forward.contract, mha_contract());
    EXPECT_EQ(forward.num_threads, 1u);
    EXPECT_GE(forward.project_tile_rows, 1);
    EXPECT_GE(forward.project_tile_columns, 1);
    const mha_call_info attention = Info(AttentionData(HeadsShape{}, shape, set));
    EXPECT_EQ(attention.instruction_set, set);
    EXPECT_EQ(attention.contract, mha_contract());
    EXPECT_EQ(attention.num_threads, 1u);
    EXPECT_EQ(attention.project_tile_rows, 0);
    EXPECT_EQ(attention.project_tile_columns, 0);
    for (const mha_call_info &info : {forward, attention}) {
      EXPECT_GE(info.attend_tile_rows, 1);
      EXPECT_GE(info.attend_block_rows, info.attend_tile_rows);
      EXPECT_EQ(info.attend_chunk_keys, 256) << "the contract's chunks";
    }
    EXPECT_LE(forward.project_tile_rows * forward.project_tile_columns, 4096) << "of registers, not of memory";
  }
}

TEST(Info, NeverSaysAuto) {
  uint32_t best = MHA_INSTRUCTION_SET_SCALAR;
  for (uint32_t set : InstructionSets()) best = std::max(best, set);  // the numbers of an architecture ascend with its sets
  const LayerData layer_data{LayerShape{}};
  const LayerPointer layer = Create(layer_data);
  const Memory packed = layer_data.Pack();
  const View view(packed);
  ASSERT_EQ(view.status, MHA_OK);
  const CallShape shape;
  EXPECT_EQ(Info(ForwardData(layer_data.shape, shape, layer.get())).instruction_set, best);
  EXPECT_EQ(Info(ForwardData(layer_data.shape, shape, view.layer)).instruction_set, best);
  EXPECT_EQ(Info(AttentionData(HeadsShape{}, shape)).instruction_set, best);
}

TEST(Info, NamesTheCallersProductAndNoContract) {
  const LayerData layer_data{LayerShape{}};
  const mha_layer_options options = Options(MHA_INSTRUCTION_SET_AUTO, PlainSgemm);
  const LayerPointer layer = Create(layer_data, &options);
  const LayerPointer native = Create(layer_data);
  const CallShape shape;
  const mha_call_info info = Info(ForwardData(layer_data.shape, shape, layer.get()));
  EXPECT_EQ(info.back_end, MHA_BACK_END_SGEMM);
  EXPECT_EQ(info.contract, 0u);
  EXPECT_EQ(info.project_tile_rows, 0);
  EXPECT_EQ(info.project_tile_columns, 0);
  EXPECT_EQ(info.packed_bytes, layer_data.PackSize(&options));
  EXPECT_EQ(info.operations, Info(ForwardData(layer_data.shape, shape, native.get())).operations) << "the same work, whoever does it";
}

// Only q_start is looked at: everything else may be anywhere, even NULL.
TEST(Info, ReadsNoDataButTheStarts) {
  const LayerData layer_data{LayerShape{}};
  const LayerPointer layer = Create(layer_data);
  Memory forbidden(64);
  forbidden.Forbid();
  CallShape shape;
  shape.outputs = kForwardOutputs;
  shape.is_causal = shape.q_start = true;
  ForwardData forward(layer_data.shape, shape, layer.get());
  const mha_call_info expected_forward = Info(forward);
  forward.args.query = forward.args.key = forward.args.value = forbidden.floats();
  forward.args.output = forward.args.lse = forward.args.attention_weights = forbidden.floats();
  mha_taps &taps = forward.optional.taps;
  for (float **tap : {&taps.q, &taps.k, &taps.v, &taps.scores, &taps.scaled_scores, &taps.masked_scores, &taps.context}) {
    *tap = forbidden.floats();
  }
  EXPECT_EQ(Info(forward).operations, expected_forward.operations);
  forward.args.query = nullptr;
  forward.args.output = nullptr;
  EXPECT_EQ(Info(forward).operations, expected_forward.operations);
  shape.outputs = kAttentionOutputs;
  AttentionData attention(HeadsShape{}, shape);
  const mha_call_info expected_attention = Info(attention);
  attention.args.k = attention.args.v = attention.args.q = forbidden.floats();
  attention.args.output = forbidden.floats();
  attention.args.lse = attention.args.attention_weights = forbidden.floats();
  EXPECT_EQ(Info(attention).operations, expected_attention.operations);
}

// The answer takes no time that grows with the lengths or, without starts, with the batch; and it does not wrap around.
TEST(Info, CountsLargeCallsWithoutOverflow) {
  const int64_t n = int64_t{1} << 20;
  mha_attention_args args = {};
  args.struct_size = sizeof args;
  args.batch = 1 << 6;
  args.n_q = args.n_kv = n;
  args.num_heads = 1 << 4;
  args.head_dim = 1 << 6;
  args.flags = MHA_CAUSAL;
  mha_call_info info = {};
  info.struct_size = sizeof info;
  mha_error error;
  ASSERT_EQ(mha_attention_info(&args, &info, &error), MHA_OK) << error.message;
  const uint64_t pairs = static_cast<uint64_t>(n) * (static_cast<uint64_t>(n) + 1) / 2;
  EXPECT_EQ(info.operations, 2 * 64 * 16 * pairs * 128);
  args.batch = int64_t{1} << 40;
  args.n_q = args.n_kv = 1;
  ASSERT_EQ(mha_attention_info(&args, &info, &error), MHA_OK) << error.message;
  EXPECT_EQ(info.operations, uint64_t{2 * 16 * 128} << 40);
}

}  // namespace
