// Sizes at the edges of 64 bits: every query about valid numbers returns a size, or says that they
// are too large.

#include "interface/calls.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

using Wide = unsigned __int128;
constexpr Wide kSizeMax = std::numeric_limits<size_t>::max();
constexpr Wide kSurelyFine = Wide{1} << 40;  // bytes: far from every limit

const std::vector<int64_t> kMagnitudes = [] {
  std::vector<int64_t> all = {1, 2, 3, 48, 1000, kMax - 64, kMax - 1, kMax};
  for (const int exponent : {16, 31, 32, 40, 52, 60, 61, 62}) {
    const int64_t power = int64_t{1} << exponent;
    all.insert(all.end(), {power - 1, power, power + 1});
  }
  return all;
}();

// A product of numbers that are not negative. It stays at a value far beyond every limit instead of
// overflowing, even in 128 bits.
template <typename... Numbers>
Wide Product(Numbers... numbers) {
  Wide product = 1;
  for (const Wide number : {static_cast<Wide>(numbers)...})
    product =
        number != 0 && product > (Wide{1} << 120) / number ? Wide{1} << 120 : product * number;
  return product;
}

// A size query about valid numbers has an answer, or they are too large. It can't have one where
// the arrays of the call (in bytes) can't exist, and must have one where even a generous estimate
// of what is needed is far from every limit. The answer is at least `least`.
void ExpectExactOrTooLarge(mha_status status, const mha_error &error, size_t bytes, Wide arrays,
                           Wide generous, Wide least) {
  EXPECT_EQ(error.status, status);
  if (status == MHA_OK) {
    EXPECT_LE(arrays, kSizeMax) << "the arrays can't exist";
    EXPECT_LE(bytes, size_t{PTRDIFF_MAX}) << "no memory has this size";
    EXPECT_GE(Wide{bytes}, least);
  } else {
    EXPECT_EQ(Name(status), Name(MHA_ERROR_TOO_LARGE)) << error.message;
    EXPECT_GT(generous, kSurelyFine) << error.message;
    EXPECT_EQ(bytes, 4711u);
  }
}

// A row of more than 2^31 - 1 numbers may be refused although memory could hold it.
Wide BeyondInt(std::initializer_list<Wide> widths) {
  return std::max(widths) > INT32_MAX ? kSurelyFine : 0;
}

TEST(Sizes, PackedLayerSizesAreExactOrTooLarge) {
  Random random(11);
  const float number = 0;
  int succeeded = 0;
  for (int i = 0; i < 20000; ++i) {
    mha_layer_config c = Zeroed<mha_layer_config>();
    c.query_dim = random.Pick(kMagnitudes);
    c.key_dim = random.Pick(kMagnitudes);
    c.value_dim = random.Pick(kMagnitudes);
    c.num_kv_heads = random.Coin() ? 1 : random.Pick(kMagnitudes);
    c.num_heads = random.Coin() ? c.num_kv_heads : random.Pick(kMagnitudes);
    if (c.num_heads % c.num_kv_heads != 0) c.num_kv_heads = c.num_heads;
    c.head_dim = random.Coin() ? 1 : random.Pick(kMagnitudes);
    c.head_dim_v = random.Coin() ? 1 : random.Pick(kMagnitudes);
    if (random.Coin()) c.query_dim = c.key_dim = c.value_dim = random.Between(1, 64);
    mha_layer_weights weights = Zeroed<mha_layer_weights>();
    weights.w_q.data = weights.w_k.data = weights.w_v.data = &number;
    if (random.Coin()) {
      weights.w_o.data = &number;
      c.output_dim = random.Pick(kMagnitudes);
    }
    if (random.Coin()) weights.w_q.bias = weights.w_k.bias = weights.w_v.bias = &number;
    const Wide elements = Product(c.query_dim, c.num_heads, c.head_dim) +
                          Product(c.key_dim, c.num_kv_heads, c.head_dim) +
                          Product(c.value_dim, c.num_kv_heads, c.head_dim_v) +
                          Product(c.output_dim, c.num_heads, c.head_dim_v);
    // Whole panels make thin matrices several times as large: "surely fine" counts 64 more columns
    // for each matrix.
    const Wide more = Product(c.query_dim, 64) + Product(c.key_dim, 64) + Product(c.value_dim, 64) +
                      Product(c.num_heads, c.head_dim_v, 64);
    const Wide beyond_int = BeyondInt(
        {Product(c.query_dim), Product(c.key_dim), Product(c.value_dim), Product(c.output_dim),
         Product(c.num_heads, c.head_dim), Product(c.num_heads, c.head_dim_v)});
    size_t bytes = 4711;
    mha_error error;
    const mha_status status = mha_layer_pack_size(&c, &weights, nullptr, &bytes, &error);
    ExpectExactOrTooLarge(status, error, bytes, elements * 4, (elements + more) * 4 + beyond_int,
                          elements * 4);
    succeeded += status == MHA_OK;
    ASSERT_FALSE(HasFailure()) << testing::PrintToString(
        std::vector<int64_t>{c.query_dim, c.key_dim, c.value_dim, c.output_dim, c.num_heads,
                             c.num_kv_heads, c.head_dim, c.head_dim_v});
  }
  EXPECT_GT(succeeded, 100);
}

TEST(Sizes, ForwardWorkspacesAreAnsweredOrTooLarge) {
  Random random(12);
  const Layer layer = Create(LayerData{SmallLayer()});
  float number = 0;
  int succeeded = 0;
  for (int i = 0; i < 20000; ++i) {
    mha_forward_args args = Zeroed<mha_forward_args>();
    args.call.batch = random.Coin() ? random.Between(1, 9) : random.Pick(kMagnitudes);
    args.call.n_q = random.Coin() ? random.Between(1, 99) : random.Pick(kMagnitudes);
    args.call.n_kv = random.Coin() ? random.Between(1, 99) : random.Pick(kMagnitudes);
    args.key.data = args.value.data = &number;
    SerialScheduler scheduler(
        static_cast<uint32_t>(std::min<int64_t>(random.Pick(kMagnitudes), 0xFFFFFFFF)));
    const uint32_t threads = random.Coin() ? scheduler.scheduler.num_threads : 0;
    if (threads != 0) args.call.scheduler = &scheduler.scheduler;
    mha_outputs outputs = Zeroed<mha_outputs>();
    if (random.Coin()) outputs.attention_weights = &number;
    args.call.outputs = &outputs;
    // The largest arrays of the call: inputs, output and, where asked for, the attention weights.
    const Wide q_rows = Product(args.call.batch, args.call.n_q),
               kv_rows = Product(args.call.batch, args.call.n_kv),
               weights =
                   outputs.attention_weights != nullptr ? Product(q_rows, args.call.n_kv, 16) : 0;
    const Wide arrays = std::max({Product(q_rows, 44), Product(kv_rows, 36), weights});
    const Wide generous =
        Product(q_rows, 1000) + Product(kv_rows, 1000) + weights + Product(threads, 1 << 16);
    size_t bytes = 4711;
    mha_error error;
    const mha_status status = mha_forward_workspace(layer.get(), &args, &bytes, &error);
    ExpectExactOrTooLarge(status, error, bytes, arrays, generous, 0);
    succeeded += status == MHA_OK;
    ASSERT_FALSE(HasFailure()) << "batch " << args.call.batch << " n_q " << args.call.n_q
                               << " n_kv " << args.call.n_kv << " threads " << threads
                               << " attention_weights " << (outputs.attention_weights != nullptr);
  }
  EXPECT_GT(succeeded, 100);
}

TEST(Sizes, AttentionWorkspacesAreAnsweredOrTooLarge) {
  Random random(13);
  float number = 0;
  int succeeded = 0;
  for (int i = 0; i < 20000; ++i) {
    mha_attention_args args = Zeroed<mha_attention_args>();
    args.call.batch = random.Coin() ? 1 : random.Pick(kMagnitudes);
    args.call.n_q = random.Coin() ? random.Between(1, 99) : random.Pick(kMagnitudes);
    args.call.n_kv = random.Coin() ? random.Between(1, 99) : random.Pick(kMagnitudes);
    args.num_heads = random.Coin() ? random.Between(1, 9) : random.Pick(kMagnitudes);
    args.head_dim = random.Coin() ? random.Between(1, 9) : random.Pick(kMagnitudes);
    args.head_dim_v = random.Coin() ? random.Between(1, 9) : random.Pick(kMagnitudes);
    mha_outputs outputs = Zeroed<mha_outputs>();
    if (random.Coin()) outputs.lse = &number;
    args.call.outputs = &outputs;
    const int64_t widest = std::max(args.head_dim, args.head_dim_v),
                  longest = std::max(args.call.n_q, args.call.n_kv);
    const Wide arrays = Product(args.call.batch, args.num_heads, longest, widest, 4);
    // Tiles and chunk states may need a few thousand rows of a head whatever the number of rows is.
    const Wide generous =
        arrays * 16 + Product(widest, 1 << 16) + BeyondInt({Product(args.num_heads, widest)});
    size_t bytes = 4711;
    mha_error error;
    const mha_status status = mha_attention_workspace(&args, &bytes, &error);
    ExpectExactOrTooLarge(status, error, bytes, arrays, generous, 0);
    succeeded += status == MHA_OK;
    ASSERT_FALSE(HasFailure()) << testing::PrintToString(
        std::vector<int64_t>{args.call.batch, args.call.n_q, args.call.n_kv, args.num_heads,
                             args.head_dim, args.head_dim_v});
  }
  EXPECT_GT(succeeded, 100);
}

// With nothing to do no array has a size that could overflow, but the arithmetic must still hold,
// and the query must end.
TEST(Sizes, EmptyCallsAreAnsweredForEveryLength) {
  for (bool empty_batch : {true, false}) {
    for (int64_t length : {kMax, kMax - 1, kMax - 255, int64_t{1} << 62, int64_t{1} << 40}) {
      SCOPED_TRACE(length);
      FullForward forward;
      forward.args.call.batch = empty_batch ? MHA_EMPTY : length;
      forward.args.call.n_q = empty_batch ? length : MHA_EMPTY;
      forward.args.call.n_kv = length;
      forward.data.sequences.q_first_positions = nullptr;
      FullAttention attention;
      attention.args.call.batch = forward.args.call.batch;
      attention.args.call.n_q = forward.args.call.n_q;
      attention.args.call.n_kv = length;
      attention.data.sequences.q_first_positions = nullptr;
      for (uint32_t flags : {0u, MHA_CAUSAL}) {
        forward.args.call.flags = attention.args.call.flags = flags;
        size_t bytes = 4711;
        mha_error error = UnwrittenError();
        ExpectExactOrTooLarge(forward.data.Workspace(&bytes, &error), error, bytes, 0,
                              kSurelyFine + 1, 0);
        bytes = 4711;
        error = UnwrittenError();
        ExpectExactOrTooLarge(attention.data.Workspace(&bytes, &error), error, bytes, 0,
                              kSurelyFine + 1, 0);
        mha_call_info info = Zeroed<mha_call_info>();
        error = UnwrittenError();
        EXPECT_EQ(forward.data.Info(&info, &error), error.status);
        error = UnwrittenError();
        EXPECT_EQ(attention.data.Info(&info, &error), error.status);
      }
    }
  }
}

// A start close to the largest number must not wrap around to a negative position: it sees all
// keys.
TEST(Sizes, QueriesFarAfterTheKeysSeeAllOfThem) {
  LayerProblem problem = SmallLayer();
  problem.q_start = {0, 0};
  const Layer layer = Create(LayerData(problem));
  ForwardData data(layer.get(), problem, {Guarded(kAskWeights | kAskLse)});
  const Outputs all = data.Compute();
  data.args.call.flags = MHA_CAUSAL;
  for (int64_t start : {int64_t{4}, int64_t{1} << 31, int64_t{1} << 32, int64_t{1} << 62}) {
    data.q_start[0] = data.q_start[1] = start;
    EXPECT_TRUE(SameBits(data.Compute(), all)) << start;
  }
  // At the very end, the last query's position itself no longer fits: the call may fail or see all
  // keys.
  data.q_start[0] = data.q_start[1] = kMax;
  data.PoisonOutputs();
  Memory workspace(data.WorkspaceBytes());
  mha_error error = UnwrittenError();
  const mha_status status = data.Run(workspace.data(), workspace.size(), &error);
  if (status == MHA_OK) {
    EXPECT_TRUE(SameBits(data.Results(), all));
  } else {
    EXPECT_TRUE(data.OutputsAreUntouched());
  }
}

}  // namespace
