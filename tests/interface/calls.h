// Valid calls of both entries, small and with everything that can be given, which the tests of
// errors and of sizes change, and tables of such changes.
#ifndef MHA_TESTS_INTERFACE_CALLS_H
#define MHA_TESTS_INTERFACE_CALLS_H

#include <deque>
#include <functional>

#include "support/interface_support.h"

namespace support {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline constexpr mha_status kNull = MHA_ERROR_NULL_POINTER, kStructSize = MHA_ERROR_STRUCT_SIZE,
                            kInvalid = MHA_ERROR_INVALID_VALUE, kShape = MHA_ERROR_SHAPE,
                            kTooLarge = MHA_ERROR_TOO_LARGE;

// ---- Tables of wrong arguments

struct Refusal {
  mha_status status;
  Words words;
  unsigned functions = ~0u;  // that refuse it, as bits of which each test has its own
};

template <typename Call>
struct Wrong {
  const char *text;  // of the change
  void (*change)(Call &);
  Refusal refusal;
};

// WRONG(CHANGE of the valid call c, STATUS, {WORD...}, FUNCTIONS): a row of a table.
#define WRONG(change, ...)                            \
  {                                                   \
#change, [](auto &c) { change; }, { __VA_ARGS__ } \
  }

// ---- Calls to change

inline LayerProblem FullProblem() {
  LayerProblem problem = SmallLayer();
  problem.q_start = {1, 2};
  return problem;
}

// batch is a field of its own where calls have only rows.
template <typename Args>
auto BatchOf(Args &args, int) -> decltype((args.call.batch)) {
  return args.call.batch;
}
template <typename Args>
int64_t &BatchOf(Args &args, ...) {
  return args.batch;
}

// What tests change in a call. Each function gives the call one of the structs or arrays that it
// is without, and returns it.
template <typename Call>
class Changes {
 public:
  mha_norm &Norm() {
    if (call().args.call.norm == nullptr) call().data.norm.epsilon = 1;
    call().args.call.norm = &call().data.norm;
    return call().data.norm;
  }
  mha_norm &ContextNorm() {
    call().args.call.norm = &call().data.norm;
    call().data.norm.context_epsilon = 1;
    return call().data.norm;
  }
  mha_score_options &Score() {
    call().args.call.score = &call().data.score;
    return call().data.score;
  }
  mha_score_arrays &Arrays() {
    call().args.call.score_arrays = &call().data.score_arrays;
    return call().data.score_arrays;
  }
  mha_score_arrays &Bias() {
    Arrays().bias.data = numbers_;
    return Arrays();
  }
  mha_score_arrays &Mask() {
    Arrays().mask = reinterpret_cast<const uint8_t *>(numbers_);
    return Arrays();
  }
  mha_score_arrays &Groups() {
    Arrays().q_segments = Arrays().kv_segments = reinterpret_cast<const int32_t *>(numbers_);
    return Arrays();
  }
  mha_score_arrays &RelativeRows() {
    Score();
    Arrays().relative_rows = numbers_;
    return Arrays();
  }
  mha_score_arrays &ChosenKeys(int64_t count) {
    Arrays().chosen_keys = reinterpret_cast<const int32_t *>(numbers_);
    Arrays().num_chosen = count;
    return Arrays();
  }
  mha_rope &Rope() {
    mha_rope &rope = call().data.rope;
    rope.dims = 2;
    rope.num_positions = 8;
    rope.cos = rope.sin = numbers_;
    call().args.call.rope = &rope;
    return rope;
  }
  // Packs the sequences one after another into one batch of rows.
  mha_sequences &Pack(std::initializer_list<int64_t> q, std::initializer_list<int64_t> kv) {
    BatchOf(call().args, 0) = 1;
    call().data.sequences.count = static_cast<int64_t>(q.size()) - 1;
    call().data.sequences.cu_seqlens_q = Rows(q);
    if (kv.size() != 0) call().data.sequences.cu_seqlens_kv = Rows(kv);
    return call().data.sequences;
  }
  const int64_t *Rows(std::initializer_list<int64_t> rows) {
    kept_rows_.emplace_back(rows);
    return kept_rows_.back().data();
  }
  const float *Zeros() const { return numbers_; }
  // A number for each head, of which one alone is this.
  const float *ZerosBut(size_t head, float number) {
    numbers_[head] = number;
    return numbers_;
  }

 private:
  Call &call() { return static_cast<Call &>(*this); }

  std::deque<std::vector<int64_t>> kept_rows_;
  float numbers_[512] = {};
};

// Everything that can be given is given: different key and value, first positions, a scheduler, all
// optional outputs. Tests change batch alone, so count follows it.
struct FullForward : Changes<FullForward> {
  FullForward() {
    data.SetScheduler(&scheduler.scheduler);
    data.sequences.count = 0;
  }

  const LayerProblem problem = FullProblem();
  const Layer layer = Create(LayerData(problem));
  SerialScheduler scheduler{3};
  ForwardData data{layer.get(), problem, {Guarded(kAskAll)}};
  mha_forward_args &args = data.args;
};

struct FullAttention : Changes<FullAttention> {
  FullAttention() {
    data.SetScheduler(&scheduler.scheduler);
    data.sequences.count = 0;
  }

  SerialScheduler scheduler{3};
  AttentionData data{NormalAttention(FullProblem()), {Guarded(kAskAll)}};
  mha_attention_args &args = data.args;
};

// ---- Calls with one wrong argument

// Which functions refuse the call. The size query looks at no data, mha_forward_info alone at
// sequences.
enum : unsigned { kWorkspace = 1, kCall = 2, kInfo = 4, kReadsArrays = kCall | kInfo, kAll = 7 };

// Which parameter the arguments are.
template <typename Call>
inline constexpr uint32_t kArgs = std::is_same_v<Call, FullForward> ? 2 : 1;

template <typename Call>
void ExpectRefused(const std::function<void(Call &)> &change, const Refusal &refusal) {
  const Expected expected = {refusal.status, {kArgs<Call>}, refusal.words};
  Call call;
  change(call);
  if ((refusal.functions & kWorkspace) != 0) {
    SCOPED_TRACE("the workspace query");
    size_t bytes = 4711;
    ExpectFails([&](auto *error) { return call.data.Workspace(&bytes, error); }, expected);
    EXPECT_EQ(bytes, 4711u);
  }
  if ((refusal.functions & kInfo) != 0) {
    SCOPED_TRACE("the description");
    mha_call_info info;
    std::memset(&info, 0x5A, sizeof info);
    info.struct_size = sizeof info;
    const mha_call_info before = info;
    ExpectFails([&](auto *error) { return call.data.Info(&info, error); }, expected);
    EXPECT_EQ(std::memcmp(&info, &before, sizeof info), 0) << "info was written";
  }
  if ((refusal.functions & kCall) != 0) {
    SCOPED_TRACE("the call");
    Memory workspace(1 << 20);  // far more than the valid call needs
    workspace.Fill(0x5A);
    call.data.PoisonOutputs();
    ExpectFails([&](auto *error) { return call.data.Run(workspace.data(), 1 << 20, error); },
                expected);
    EXPECT_TRUE(call.data.OutputsAreUntouched());
    EXPECT_EQ(call.scheduler.calls, 0u) << "work was started";
  }
}

template <typename Call>
void ExpectAllRefused(const std::vector<Wrong<Call>> &table) {
  for (const Wrong<Call> &row : table) {
    SCOPED_TRACE(row.text);
    ExpectRefused<Call>(row.change, row.refusal);
  }
}

template <typename Call>
void ExpectAllSucceed(const std::vector<void (*)(Call &)> &changes) {
  for (const auto &change : changes) {
    Call call;
    change(call);
    size_t bytes = 0;
    ExpectSucceeds([&](auto *error) { return call.data.Workspace(&bytes, error); });
    mha_call_info info = Zeroed<mha_call_info>();
    ExpectSucceeds([&](auto *error) { return call.data.Info(&info, error); });
    Memory workspace(bytes);
    ExpectSucceeds([&](auto *error) { return call.data.Run(workspace.data(), bytes, error); });
  }
}

}  // namespace support

#endif  // MHA_TESTS_INTERFACE_CALLS_H
