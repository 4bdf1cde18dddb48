// Sizes at the edges of 64 bits: every query about valid numbers has an answer, or they are too
// large.

#include "interface/calls.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

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

// A size query about valid numbers has an answer, or they are too large. It can't have one where
// the arrays of the call (in bytes) can't exist, and must have one where even a generous estimate
// of what is needed is far from every limit. The answer is at least `least`.
void ExpectExactOrTooLarge(mha_status status, const mha_error &error, size_t bytes, Wide arrays,
                           Wide generous, Wide least) {
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
  return std::any_of(widths.begin(), widths.end(), [=](Wide width) { return width > most; })
             ? kSurelyFine
             : 0;
}

TEST(Sizes, OfPackedLayersAreExactOrTooLargeForEveryMagnitude) {
  Random random(11);
  const float number = 0;
  int succeeded = 0;
  for (int i = 0; i < 20000; ++i) {
    mha_layer_config config = Zeroed<mha_layer_config>();
    config.query_dim = random.Pick(kMagnitudes);
    config.key_dim = random.Pick(kMagnitudes);
    config.value_dim = random.Pick(kMagnitudes);
    config.num_kv_heads = random.Coin() ? 1 : random.Pick(kMagnitudes);
    config.num_heads = random.Coin() ? config.num_kv_heads : random.Pick(kMagnitudes);
    if (config.num_heads % config.num_kv_heads != 0) config.num_kv_heads = config.num_heads;
    config.head_dim = random.Coin() ? 1 : random.Pick(kMagnitudes);
    config.head_dim_v = random.Coin() ? 1 : random.Pick(kMagnitudes);
    if (random.Coin()) config.query_dim = config.key_dim = config.value_dim = random.Between(1, 64);
    mha_layer_weights weights = Zeroed<mha_layer_weights>();
    weights.w_q.data = weights.w_k.data = weights.w_v.data = &number;
    if (random.Coin()) {
      weights.w_o.data = &number;
      config.output_dim = random.Pick(kMagnitudes);
    }
    if (random.Coin()) weights.w_q.bias = weights.w_k.bias = weights.w_v.bias = &number;
    Wide elements =
        Times(Times(static_cast<Wide>(config.query_dim), config.num_heads), config.head_dim);
    elements +=
        Times(Times(static_cast<Wide>(config.key_dim), config.num_kv_heads), config.head_dim);
    elements +=
        Times(Times(static_cast<Wide>(config.value_dim), config.num_kv_heads), config.head_dim_v);
    elements +=
        Times(Times(static_cast<Wide>(config.output_dim), config.num_heads), config.head_dim_v);
    const std::vector<Wide> widths = {
        static_cast<Wide>(config.query_dim),
        static_cast<Wide>(config.key_dim),
        static_cast<Wide>(config.value_dim),
        static_cast<Wide>(config.output_dim),
        Times(static_cast<Wide>(config.num_heads), config.head_dim),
        Times(static_cast<Wide>(config.num_heads), config.head_dim_v)};
    // Whole panels make thin matrices several times as large: "surely fine" counts 64 more columns
    // for each matrix.
    const Wide rows = static_cast<Wide>(config.query_dim) + static_cast<Wide>(config.key_dim) +
                      static_cast<Wide>(config.value_dim) +
                      static_cast<Wide>(config.num_heads) * static_cast<Wide>(config.head_dim_v);
    size_t bytes = 4711;
    mha_error error;
    const mha_status status = mha_layer_pack_size(&config, &weights, nullptr, &bytes, &error);
    ExpectExactOrTooLarge(status, error, bytes, elements * 4,
                          (elements + Times(rows, 64)) * 4 + BeyondInt(widths), elements * 4);
    if (status == MHA_OK) ++succeeded;
    if (HasFailure()) {
      FAIL() << "query_dim " << config.query_dim << " key_dim " << config.key_dim << " value_dim "
             << config.value_dim << " output_dim " << config.output_dim << " num_heads "
             << config.num_heads << " num_kv_heads " << config.num_kv_heads << " head_dim "
             << config.head_dim << " head_dim_v " << config.head_dim_v;
    }
  }
  EXPECT_GT(succeeded, 100);
}

TEST(Sizes, OfForwardWorkspacesAreAnsweredOrTooLargeForEveryMagnitude) {
  Random random(12);
  const LayerData layer_data{SmallLayer()};
  const Layer layer = Create(layer_data);
  float number = 0;
  int succeeded = 0;
  for (int i = 0; i < 20000; ++i) {
    mha_forward_args args = Zeroed<mha_forward_args>();
    args.batch = random.Coin() ? random.Between(1, 9) : random.Pick(kMagnitudes);
    args.n_q = random.Coin() ? random.Between(1, 99) : random.Pick(kMagnitudes);
    args.n_kv = random.Coin() ? random.Between(1, 99) : random.Pick(kMagnitudes);
    args.key.data = args.value.data = &number;
    SerialScheduler scheduler(
        static_cast<uint32_t>(std::min<int64_t>(random.Pick(kMagnitudes), 0xFFFFFFFF)));
    const bool threads = random.Coin();
    if (threads) args.scheduler = &scheduler.scheduler;
    mha_outputs outputs = Zeroed<mha_outputs>();
    if (random.Coin()) outputs.attention_weights = &number;
    args.outputs = &outputs;
    const Wide batch = static_cast<Wide>(args.batch);
    // The largest arrays of the call: inputs, output and, where asked for, the attention weights.
    Wide arrays = std::max(Times(Times(batch, args.n_q), 44), Times(Times(batch, args.n_kv), 36));
    Wide generous = Times(Times(batch, args.n_q), 1000) + Times(Times(batch, args.n_kv), 1000);
    if (outputs.attention_weights != nullptr) {
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
      FAIL() << "batch " << args.batch << " n_q " << args.n_q << " n_kv " << args.n_kv
             << " attention_weights " << (outputs.attention_weights != nullptr) << " num_threads "
             << (threads ? scheduler.scheduler.num_threads : 0);
    }
  }
  EXPECT_GT(succeeded, 100);
}

TEST(Sizes, OfAttentionWorkspacesAreAnsweredOrTooLargeForEveryMagnitude) {
  Random random(13);
  float number = 0;
  int succeeded = 0;
  for (int i = 0; i < 20000; ++i) {
    mha_attention_args args = Zeroed<mha_attention_args>();
    args.batch = random.Coin() ? 1 : random.Pick(kMagnitudes);
    args.n_q = random.Coin() ? random.Between(1, 99) : random.Pick(kMagnitudes);
    args.n_kv = random.Coin() ? random.Between(1, 99) : random.Pick(kMagnitudes);
    args.num_heads = random.Coin() ? random.Between(1, 9) : random.Pick(kMagnitudes);
    args.head_dim = random.Coin() ? random.Between(1, 9) : random.Pick(kMagnitudes);
    args.head_dim_v = random.Coin() ? random.Between(1, 9) : random.Pick(kMagnitudes);
    mha_outputs outputs = Zeroed<mha_outputs>();
    if (random.Coin()) outputs.lse = &number;
    args.outputs = &outputs;
    const Wide sequences = Times(static_cast<Wide>(args.batch), args.num_heads);
    const Wide widest = static_cast<Wide>(std::max(args.head_dim, args.head_dim_v));
    const Wide longest = static_cast<Wide>(std::max(args.n_q, args.n_kv));
    Wide arrays = Times(Times(Times(sequences, args.n_q), args.head_dim), 4);
    arrays = std::max(arrays, Times(Times(Times(sequences, args.n_kv), args.head_dim), 4));
    arrays = std::max(arrays, Times(Times(Times(sequences, args.n_kv), args.head_dim_v), 4));
    arrays = std::max(arrays, Times(Times(Times(sequences, args.n_q), args.head_dim_v), 4));
    // Tiles and chunk states may need a few thousand rows of a head whatever the number of rows is.
    const Wide generous =
        Times(Times(sequences, static_cast<int64_t>(longest)), static_cast<int64_t>(widest)) * 64 +
        widest * (1 << 16) +
        BeyondInt({Times(static_cast<Wide>(args.num_heads), static_cast<int64_t>(widest))});
    size_t bytes = 4711;
    mha_error error;
    const mha_status status = mha_attention_workspace(&args, &bytes, &error);
    ExpectExactOrTooLarge(status, error, bytes, arrays, generous, 0);
    if (status == MHA_OK) ++succeeded;
    if (HasFailure()) {
      FAIL() << "batch " << args.batch << " n_q " << args.n_q << " n_kv " << args.n_kv
             << " num_heads " << args.num_heads << " head_dim " << args.head_dim << " head_dim_v "
             << args.head_dim_v;
    }
  }
  EXPECT_GT(succeeded, 100);
}

// With nothing to do there is no array whose size could overflow; the arithmetic must hold all the
// same, and the query must end.
TEST(Sizes, OfCallsWithNothingToDoAreAnsweredOrTooLargeForEveryLength) {
  for (bool empty_batch : {true, false}) {
    for (int64_t length : {kMax, kMax - 1, kMax - 255, int64_t{1} << 62, int64_t{1} << 40}) {
      SCOPED_TRACE(length);
      FullForward forward;
      forward.args.batch = empty_batch ? MHA_EMPTY : length;
      forward.args.n_q = empty_batch ? length : MHA_EMPTY;
      forward.args.n_kv = length;
      forward.data.sequences.q_first_positions = nullptr;
      FullAttention attention;
      attention.args.batch = forward.args.batch;
      attention.args.n_q = forward.args.n_q;
      attention.args.n_kv = length;
      attention.data.sequences.q_first_positions = nullptr;
      for (uint32_t flags : {0u, MHA_CAUSAL}) {
        forward.args.flags = attention.args.flags = flags;
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
TEST(Sizes, AStartFarBehindTheKeysSeesAllOfThem) {
  LayerProblem problem = SmallLayer();
  problem.q_start = {0, 0};
  const Layer layer = Create(LayerData(problem));
  ForwardData data(layer.get(), problem, {Guarded(kAskWeights | kAskLse)});
  const Outputs all = data.Compute();
  data.args.flags = MHA_CAUSAL;
  for (int64_t start : {int64_t{4}, int64_t{1} << 31, int64_t{1} << 32, int64_t{1} << 62}) {
    data.q_start[0] = data.q_start[1] = start;
    EXPECT_TRUE(SameBits(data.Compute(), all)) << start;
  }
  // At the very end the last query's position itself does not fit any more: either is right, but
  // nothing in between.
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
