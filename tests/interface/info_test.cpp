// What the library says about itself and about a call: statuses, versions, instruction sets, and
// the descriptions that mha_forward_info and mha_attention_info give. (fuzz.interface compares the
// workspace in them with the query's.)

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__riscv) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include <map>

#include "interface/calls.h"
#include "support/amx.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

// ---- Names and versions

#define NAMED(number) \
  { number, #number }

TEST(Status, HasTheNameOfItsMacro) {
  const std::pair<uint32_t, const char *> statuses[] = {
      NAMED(MHA_OK),
      NAMED(MHA_ERROR_NULL_POINTER),
      NAMED(MHA_ERROR_STRUCT_SIZE),
      NAMED(MHA_ERROR_INVALID_VALUE),
      NAMED(MHA_ERROR_SHAPE),
      NAMED(MHA_ERROR_TOO_LARGE),
      NAMED(MHA_ERROR_BUFFER_TOO_SMALL),
      NAMED(MHA_ERROR_OUT_OF_MEMORY),
      NAMED(MHA_ERROR_INSTRUCTION_SET),
      NAMED(MHA_ERROR_PACKED_FORMAT),
      NAMED(MHA_ERROR_PACKED_CHECKSUM),
      NAMED(MHA_ERROR_OUT_OF_RANGE),
      NAMED(MHA_ERROR_CACHE_FULL),
      NAMED(MHA_ERROR_CACHE_SHARED),
      NAMED(MHA_ERROR_CACHE_FORMAT),
  };
  EXPECT_EQ(std::size(statuses), MHA_ERROR_CACHE_FORMAT + 1);
  for (const auto &[number, name] : statuses) EXPECT_STREQ(mha_status_string(number), name);
  for (uint32_t number = MHA_ERROR_CACHE_FORMAT + 1; number < 5000; ++number)
    ASSERT_STREQ(mha_status_string(number), "unknown mha_status") << number;
  for (uint32_t number : {0x7FFFFFFFu, 0x80000000u, 0x80000001u, 0xFFFFFFFEu, 0xFFFFFFFFu})
    EXPECT_STREQ(mha_status_string(number), "unknown mha_status") << number;
}

TEST(Version, MatchesTheHeader) {
  EXPECT_EQ(mha_version(),
            10000u * MHA_VERSION_MAJOR + 100u * MHA_VERSION_MINOR + MHA_VERSION_PATCH);
  EXPECT_EQ(mha_contract(), static_cast<uint32_t>(MHA_CONTRACT));
}

TEST(InstructionSets, HaveNames) {
  std::map<uint32_t, const char *> names = {{MHA_INSTRUCTION_SET_AUTO, "auto"}};
#define MHA_SET(name, NAME, ...) names[MHA_INSTRUCTION_SET_##NAME] = #name;
#include "../../src/kernels/sets.def"
  for (uint32_t number = 0; number < 5000; ++number) {
    const auto named = names.find(number);
    ASSERT_STREQ(mha_instruction_set_name(number),
                 named == names.end() ? "unknown" : named->second);
  }
  for (uint32_t number : {0x80000000u, 0x80000001u, 0xFFFFFFFFu})
    EXPECT_STREQ(mha_instruction_set_name(number), "unknown") << number;
}

TEST(InstructionSets, AreOnlyThoseThatThisMachineRuns) {
  const auto bit = [](uint32_t set) { return 1u << set; };
  const uint32_t sets = mha_instruction_sets();
  EXPECT_EQ(sets, mha_instruction_sets());
  EXPECT_NE(sets & bit(MHA_INSTRUCTION_SET_SCALAR), 0u) << "any machine runs the scalar kernels";
  EXPECT_EQ(sets & bit(MHA_INSTRUCTION_SET_AUTO), 0u) << "auto is a choice, not a set";
  uint32_t possible = bit(MHA_INSTRUCTION_SET_SCALAR);
#if defined(__x86_64__)
  // The compiler's own detection, which includes the operating system's state as well.
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    possible |= bit(MHA_INSTRUCTION_SET_AVX2);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
      possible |= bit(MHA_INSTRUCTION_SET_AVX512);
      if (__builtin_cpu_supports("avx512vnni")) possible |= bit(MHA_INSTRUCTION_SET_AVX512_VNNI);
#if defined(MHA_EMULATES_BF16)
      if (__builtin_cpu_supports("avx512vnni")) possible |= bit(MHA_INSTRUCTION_SET_AVX512_BF16);
#endif
    }
    // Processors with AMX are slow at products of pairs of bf16.
    uint32_t eax = 0, ebx, ecx, edx;
    const bool has_amx = __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx >> 22 & 1) != 0;
    if (has_amx && support::has_amx) possible |= bit(MHA_INSTRUCTION_SET_AVX512_AMX);
    if (!has_amx && __builtin_cpu_supports("avx512bf16"))
      possible |= bit(MHA_INSTRUCTION_SET_AVX512_BF16);
    if (__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 4 & 1) != 0)
      possible |= bit(MHA_INSTRUCTION_SET_AVX2_VNNI);
  }
#elif defined(__aarch64__)
  possible |= bit(MHA_INSTRUCTION_SET_NEON);
#if defined(__linux__)
  if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) possible |= bit(MHA_INSTRUCTION_SET_NEON_DOTPROD);
  if (getauxval(AT_HWCAP2) & HWCAP2_I8MM) possible |= bit(MHA_INSTRUCTION_SET_NEON_I8MM);
#elif defined(__APPLE__)  // every processor of Apple's computers has DotProd, and from the second
                          // generation on the other
  possible |= bit(MHA_INSTRUCTION_SET_NEON_DOTPROD) | bit(MHA_INSTRUCTION_SET_NEON_I8MM);
#endif
#endif
#if defined(__wasm__)  // whose engines refuse a module with what they lack
  possible |= 15u << MHA_INSTRUCTION_SET_WASM_SIMD128;
#elif defined(__riscv) && defined(__linux__)
  if (getauxval(AT_HWCAP) >> ('V' - 'A') & 1) possible |= bit(MHA_INSTRUCTION_SET_RVV);
#endif
  EXPECT_EQ(sets & ~possible, 0u) << "a set that this machine can't run";
#if defined(MHA_HAS_AVX512_BF16)
  EXPECT_EQ((sets ^ possible) & bit(MHA_INSTRUCTION_SET_AVX512_BF16), 0u)
      << "this machine multiplies pairs of bf16 in another way";
#endif
#if defined(MHA_HAS_AVX512_AMX)
  EXPECT_EQ((sets ^ possible) & bit(MHA_INSTRUCTION_SET_AVX512_AMX), 0u)
      << "this machine adds the products of tiles in another way";
#endif
}

// ---- Descriptions of calls

mha_call_info Info(const CallData &data) {
  mha_call_info info;
  std::memset(&info, 0xFF, sizeof info);  // every field is to be filled
  info.struct_size = sizeof info;
  mha_error error;
  EXPECT_EQ(data.Info(&info, &error), MHA_OK) << error.message;
  return info;
}

TEST(AttentionInfo, CountsTheBytesOfOptionalOutputs) {
  const AttentionProblem problem = NormalAttention(SmallSizes());
  const auto bytes = [&](uint32_t asked) {
    return Info(AttentionData(problem, {Guarded(asked)})).bytes;
  };
  const uint64_t without = bytes(kAskNothing);
  EXPECT_EQ(bytes(kAskLse) - without, 4u * 2 * 4 * 3);
  EXPECT_EQ(bytes(kAskWeights) - without, 4u * 2 * 4 * 3 * 4);
  EXPECT_EQ(bytes(kAskScores | kAskMaskedScores) - without, 2u * 4 * 2 * 4 * 3 * 4);
}

// An array that is broadcast is read once. The call has batch 2, 4 heads, 3 queries and 4 keys.
TEST(AttentionInfo, CountsTheBytesOfBiasMaskAndGroups) {
  AttentionData data(NormalAttention(SmallSizes()), {Guarded()});
  const uint64_t without = Info(data).bytes;
  const float numbers[256] = {};
  const uint8_t mask[256] = {};
  const int32_t q_segments[8] = {}, kv_segments[8] = {};
  const auto expect_bytes = [&](uint64_t bytes, auto set) {
    mha_score_options score = Zeroed<mha_score_options>();
    mha_score_arrays arrays = Zeroed<mha_score_arrays>();
    set(score, arrays);
    data.args.call.score = &score;
    data.args.call.score_arrays = &arrays;
    EXPECT_EQ(Info(data).bytes - without, bytes);
  };
  expect_bytes(4 * 2 * 4 * 3 * 4, [&](auto &, auto &arrays) { arrays.bias.data = numbers; });
  expect_bytes(2 * 2 * 4 * 3 * 4, [&](auto &, auto &arrays) {
    arrays.bias.data = numbers, arrays.bias.type = MHA_TYPE_F16;
  });
  expect_bytes(4 * 3 * 4, [&](auto &, auto &arrays) {
    arrays.bias.data = numbers;
    arrays.bias.strides.batch = arrays.bias.strides.head = MHA_BROADCAST;
  });
  expect_bytes(2 * 4 * 3 * 4, [&](auto &, auto &arrays) { arrays.mask = mask; });
  expect_bytes(2 * 4 * 3 * 3,
               [&](auto &, auto &arrays) { arrays.mask = mask, arrays.num_columns = 3; });
  expect_bytes(2 * 4, [&](auto &, auto &arrays) {
    arrays.mask = mask;
    arrays.mask_strides.head = arrays.mask_strides.row = MHA_BROADCAST;
  });
  expect_bytes(4 * 2 * 4 * 3 * 5, [&](auto &score, auto &arrays) {
    arrays.relative_rows = numbers;
    score.relative_left = 3, score.relative_right = 1;
  });
  expect_bytes(4 * 4 * 5, [&](auto &score, auto &) {
    score.relative_bias = numbers, score.relative_left = 3, score.relative_right = 1;
  });
  expect_bytes(4 * 2 * (3 + 4), [&](auto &, auto &arrays) {
    arrays.q_segments = q_segments, arrays.kv_segments = kv_segments;
  });
  // The rows of the queries are those of the keys, and so are their groups.
  data.args.call.n_kv = data.args.call.n_q;
  data.args.call.score = nullptr;
  data.args.call.score_arrays = nullptr;
  const uint64_t with_both = Info(data).bytes;
  expect_bytes(with_both - without + 4 * 2 * 3,
               [&](auto &, auto &arrays) { arrays.q_segments = q_segments; });
}

TEST(Info, UsesAllThreadsForALargeCallAndNoMoreThanThereAre) {
  for (const int64_t n : {1, 40, 1024}) {
    const LayerProblem problem = NormalLayer(OfItself(SquareSizes(64, 4, 4, 16), n));
    const Layer layer = Create(LayerData(problem));
    for (const uint32_t num_threads : {1u, 4u}) {
      SerialScheduler scheduler(num_threads);
      CallForm form = Guarded();
      form.scheduler = &scheduler.scheduler;
      for (const uint32_t used :
           {Info(ForwardData(layer.get(), problem, {form})).num_threads,
            Info(AttentionData(NormalAttention(problem), {form})).num_threads}) {
        EXPECT_GE(used, n == 1024 ? num_threads : 1u);
        EXPECT_LE(used, num_threads);
      }
    }
  }
}

TEST(Info, SaysWhichKernelsRun) {
  const LayerProblem problem = SmallLayer();
  const AttentionProblem middle = NormalAttention(problem);
  const LayerData layer_data(problem);
  for (uint32_t set : InstructionSets()) {
    SCOPED_TRACE(mha_instruction_set_name(set));
    const Layer layer = Create(layer_data, set);
    const mha_call_info forward = Info(ForwardData(layer.get(), problem, {Guarded()}));
    EXPECT_EQ(forward.struct_size, sizeof forward);
    EXPECT_EQ(forward.instruction_set, set);
    EXPECT_EQ(forward.back_end, MHA_BACK_END_NATIVE);
    EXPECT_EQ(forward.contract, mha_contract());
    EXPECT_EQ(forward.num_threads, 1u);
    const mha_call_info attention = Info(AttentionData(middle, {Guarded(), set}));
    EXPECT_EQ(attention.instruction_set, set);
    EXPECT_EQ(attention.contract, mha_contract());
    EXPECT_EQ(attention.num_threads, 1u);
  }
}

TEST(Info, NeverSaysAuto) {
  uint32_t best = MHA_INSTRUCTION_SET_SCALAR;
  for (uint32_t set : InstructionSets())
    best = std::max(best, set);  // the numbers of an architecture ascend with its sets
  const LayerProblem problem = SmallLayer();
  const LayerData layer_data(problem);
  const Layer layer = Create(layer_data);
  const Memory packed = layer_data.Pack();
  const View view(packed);
  ASSERT_EQ(view.status, MHA_OK);
  EXPECT_EQ(Info(ForwardData(layer.get(), problem, {Guarded()})).instruction_set, best);
  EXPECT_EQ(Info(ForwardData(view.layer, problem, {Guarded()})).instruction_set, best);
  EXPECT_EQ(Info(AttentionData(NormalAttention(problem), {Guarded()})).instruction_set, best);
}

TEST(Info, NamesTheCallersProductAndNoContract) {
  const LayerProblem problem = SmallLayer();
  const LayerData layer_data(problem);
  const mha_layer_options options = Options(MHA_INSTRUCTION_SET_AUTO, PlainSgemm);
  const Layer layer = Create(layer_data, &options);
  const Layer native = Create(layer_data);
  const mha_call_info info = Info(ForwardData(layer.get(), problem, {Guarded()}));
  EXPECT_EQ(info.back_end, MHA_BACK_END_SGEMM);
  EXPECT_EQ(info.contract, 0u);
  EXPECT_EQ(info.packed_bytes, layer_data.PackSize(&options));
  EXPECT_EQ(info.operations, Info(ForwardData(native.get(), problem, {Guarded()})).operations)
      << "the same work, whoever does it";
}

// mha_forward_info reads the positions of first queries and no other array; all other pointers may
// be invalid.
TEST(Info, ReadsNoDataButTheStarts) {
  Memory forbidden(64);
  forbidden.Forbid();
  FullForward forward;
  forward.args.call.flags = MHA_CAUSAL;
  const mha_call_info expected_forward = Info(forward.data);
  forward.args.query.data = forward.args.key.data = forward.args.value.data = forbidden.floats();
  forward.args.output.data = forbidden.floats();
  mha_outputs &outputs = forward.data.outputs;
  for (float **output :
       {&outputs.lse, &outputs.attention_weights, &outputs.q, &outputs.k, &outputs.v,
        &outputs.scores, &outputs.scaled_scores, &outputs.masked_scores, &outputs.context}) {
    *output = forbidden.floats();
  }
  EXPECT_EQ(Info(forward.data).operations, expected_forward.operations);
  forward.args.query.data = nullptr;
  forward.args.output.data = nullptr;
  EXPECT_EQ(Info(forward.data).operations, expected_forward.operations);
  FullAttention attention;
  attention.args.call.flags = MHA_CAUSAL;
  const mha_call_info expected_attention = Info(attention.data);
  attention.args.k.data = attention.args.v.data = attention.args.q.data = forbidden.floats();
  attention.args.output.data = forbidden.floats();
  attention.data.outputs.lse = attention.data.outputs.attention_weights = forbidden.floats();
  EXPECT_EQ(Info(attention.data).operations, expected_attention.operations);
}

// The answer takes the same time for any lengths and, without positions, for any batch; and it does
// not overflow.
TEST(Info, CountsLargeCallsWithoutOverflow) {
  const int64_t n = int64_t{1} << 20;
  mha_attention_args args = Zeroed<mha_attention_args>();
  args.call.batch = 1 << 6;
  args.call.n_q = args.call.n_kv = n;
  args.num_heads = 1 << 4;
  args.head_dim = 1 << 6;
  args.call.flags = MHA_CAUSAL;
  mha_call_info info = Zeroed<mha_call_info>();
  mha_error error;
  ASSERT_EQ(mha_attention_info(&args, &info, &error), MHA_OK) << error.message;
  const uint64_t pairs = static_cast<uint64_t>(n) * (static_cast<uint64_t>(n) + 1) / 2;
  EXPECT_EQ(info.operations, 2 * 64 * 16 * pairs * 128);
  args.call.batch = int64_t{1} << 40;
  args.call.n_q = args.call.n_kv = 1;
  ASSERT_EQ(mha_attention_info(&args, &info, &error), MHA_OK) << error.message;
  EXPECT_EQ(info.operations, uint64_t{2 * 16 * 128} << 40);
}

}  // namespace
