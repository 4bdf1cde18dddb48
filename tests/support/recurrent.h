// Calls of mha_recurrent_attention and mha_causal_conv: sequences, arrays of any type and strides,
// and states.
#ifndef MHA_TESTS_SUPPORT_RECURRENT_H
#define MHA_TESTS_SUPPORT_RECURRENT_H

#include <mha.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "spec/spec.h"
#include "support/fixtures.h"
#include "support/given_weights.h"
#include "support/specify.h"

namespace support {

// An array [batch, rows, heads, width] and how a call is given it. Rows that must not be read hold
// Unwritten(), and memory ends with the last one that may be.
struct Tensor {
  int64_t extents[3] = {1, 1, 1}, width = 1;
  std::vector<float> x;  // dense; empty = not given
  Storage type = Storage::kF32;
  int64_t gap = 0;                             // behind each vector, head and row
  bool heads_outside = false, shares[3] = {};  // MHA_BROADCAST

  Tensor() = default;
  Tensor(int64_t batch, int64_t rows, int64_t heads, int64_t vector_width)
      : extents{batch, rows, heads}, width(vector_width) {}

  size_t size() const { return static_cast<size_t>(extents[0] * extents[1] * extents[2] * width); }
  mha_strides Strides() const {
    if (gap == 0 && !heads_outside && !shares[0] && !shares[1] && !shares[2]) return {};
    int64_t steps[3], step = width + gap;
    for (const int d : {heads_outside ? 1 : 2, heads_outside ? 2 : 1, 0}) {
      steps[d] = shares[d] ? MHA_BROADCAST : step;
      if (!shares[d]) step = step * extents[d] + gap;
    }
    return {steps[0], steps[1], steps[2]};
  }
  // function(dense, offset) says where each vector lies.
  template <typename Function>
  void ForEach(const Function &function) const {
    mha_strides s = Strides();
    if (s.row == 0) s = {extents[1] * extents[2] * width, extents[2] * width, width};
    const auto at = [](int64_t n, int64_t step) { return step == MHA_BROADCAST ? 0 : n * step; };
    int64_t dense = 0;
    for (int64_t b = 0; b < extents[0]; b++) {
      for (int64_t r = 0; r < extents[1]; r++) {
        for (int64_t h = 0; h < extents[2]; h++, dense += width)
          function(dense, at(b, s.batch) + at(r, s.row) + at(h, s.head));
      }
    }
  }
  Memory InMemory() const {
    const float nothing = Unwritten();
    std::vector<float> all;
    ForEach([&](int64_t dense, int64_t offset) {
      if (std::memcmp(&x[dense], &nothing, sizeof nothing) == 0) return;
      all.resize(std::max(all.size(), static_cast<size_t>(offset + width)), nothing);
      std::copy_n(x.begin() + dense, width, all.begin() + offset);
    });
    return InType(static_cast<uint32_t>(type), all.data(), all.size());
  }
  void Read(const Memory &memory) {
    ForEach([&](int64_t dense, int64_t offset) {
      for (int64_t d = 0; d < width; d++) {
        const auto *halves = reinterpret_cast<const uint16_t *>(memory.data()) + offset + d;
        x[dense + d] = type == Storage::kF32 ? memory.floats()[offset + d] : FloatOf(type, *halves);
      }
    });
    if (InMemory().Bytes() != memory.Bytes())
      throw std::runtime_error("a call wrote between the rows of its output, or not to its end");
  }
  // Makes equal what is shared. The numbers are of the type.
  void Share() { Read(InMemory()); }
};

// The sequences of a call, and which rows of the arrays each one has.
struct SequenceRows {
  int64_t batch = 1, rows = 1;
  std::vector<int64_t> cu_seqlens, lengths, first_rows;  // empty = NULL

  int64_t count() const {
    return cu_seqlens.empty() ? batch : static_cast<int64_t>(cu_seqlens.size()) - 1;
  }
  struct Valid {
    int64_t first, count;  // in [batch * rows]
  };
  Valid ValidOf(int64_t b) const {
    if (!cu_seqlens.empty()) return {cu_seqlens[b], cu_seqlens[b + 1] - cu_seqlens[b]};
    const int64_t first = first_rows.empty() ? 0 : first_rows[b];
    return {b * rows + first, lengths.empty() ? rows - first : lengths[b]};
  }
  // Makes padding of what no sequence has.
  void Pad(Tensor *tensor) const {
    std::vector<float> all(tensor->x.size(), Unwritten());
    const int64_t row = tensor->extents[2] * tensor->width;
    for (int64_t b = 0; b < count() && !all.empty(); b++) {
      const Valid valid = ValidOf(b);
      std::copy_n(tensor->x.begin() + valid.first * row, valid.count * row,
                  all.begin() + valid.first * row);
    }
    tensor->x = all;
  }
};

struct RecurrentProblem : SequenceRows {
  Tensor q, k, v, decay, beta, output;  // output.x is not used
  float scale = 0, norm_epsilon = 0;
  std::vector<float> a_log, dt_bias;
  bool beta_is_raw = false;
  std::vector<float> state;  // empty = NULL
  bool in_place = false;     // state_out is state
  int64_t num_snapshots = 0;

  int64_t state_size() const { return v.extents[2] * q.width * v.width; }
};

struct ConvolutionProblem : SequenceRows {
  Tensor x, output;
  int64_t kernel_size = 2;
  std::vector<float> weights, bias, state;
  bool is_silu = false, in_place = false;

  int64_t state_size() const { return (kernel_size - 1) * x.width; }
};

// y is dense, of a type of 16 bits what it holds.
struct StatefulResults {
  std::vector<float> y, state, snapshots;
};

struct StatefulCall {
  uint32_t instruction_set = 0;
  const mha_scheduler *scheduler = nullptr;
  int workspace_fill = 0xff;
};

// What both kinds of calls have. Inputs are frozen, and workspace and arrays end at a guard page.
template <typename Args, auto kWorkspace, auto kRun>
class StatefulData {
 public:
  Args args = Zeroed<Args>();
  mha_sequences sequences = Zeroed<mha_sequences>();

  // With these arguments, or others.
  mha_status Workspace(size_t *bytes, mha_error *error, const Args *other = nullptr) const {
    return kWorkspace(other ? other : &args, bytes, error);
  }
  mha_status Run(void *workspace, size_t bytes, mha_error *error,
                 const Args *other = nullptr) const {
    return kRun(other ? other : &args, workspace, bytes, error);
  }
  StatefulResults Compute(int workspace_fill = 0xff) {
    size_t bytes = 0;
    mha_error error;
    Check(Workspace(&bytes, &error), error);
    Memory workspace(bytes);
    workspace.Fill(workspace_fill);
    Check(Run(workspace.data(), bytes, &error), error);
    return Results();
  }
  StatefulResults Results() {
    output_.Read(written_);
    return {output_.x, Floats(state_out_), Floats(snapshots_)};
  }
  void PoisonOutputs() {
    for (Memory *memory : {&written_, &snapshots_}) memory->Fill(0xff);
    if (args.state_out != args.state) state_out_.Fill(0xff);
  }
  bool OutputsAreUntouched() const {
    return written_.Holds(0xff) && snapshots_.Holds(0xff) &&
           (args.state_out == args.state || state_out_.Holds(0xff));
  }

 protected:
  StatefulData(const SequenceRows &rows, const Tensor &output, const std::vector<float> &state,
               size_t state_size, bool in_place, const StatefulCall &call)
      : output_(output) {
    args.instruction_set = call.instruction_set;
    args.scheduler = call.scheduler;
    args.batch = rows.batch;
    args.rows = rows.rows ? rows.rows : MHA_EMPTY;
    args.state = Keep(state);
    in_place = in_place && !state.empty();
    state_out_ = in_place ? CopyOf(state, Place::kBeforeGuard) : Memory(state_size * sizeof(float));
    args.state_out = state_out_.floats();
    if (in_place) args.state = args.state_out;
    output_.x.assign(output_.size(), 0.0f);
    written_ = output_.InMemory();
    args.output.data = written_.data();
    args.output.type = output_.type == Storage::kF32 ? 0 : static_cast<uint32_t>(output_.type);
    args.output.strides = output_.Strides();
    sequences.cu_seqlens_q = Keep(rows.cu_seqlens);
    sequences.q_lengths = Keep(rows.lengths);
    sequences.q_first_rows = Keep(rows.first_rows);
    sequences.count = rows.cu_seqlens.empty() ? 0 : rows.count();
    if (sequences.cu_seqlens_q || sequences.q_lengths || sequences.q_first_rows)
      args.sequences = &sequences;
    PoisonOutputs();
  }
  StatefulData(const StatefulData &) = delete;

  const void *Keep(Memory memory) {
    kept_.push_back(std::move(memory));
    kept_.back().Freeze();
    return kept_.back().data();
  }
  template <typename T>
  const T *Keep(const std::vector<T> &values) {
    return values.empty() ? nullptr
                          : static_cast<const T *>(Keep(CopyOf(values, Place::kBeforeGuard)));
  }
  void Set(const Tensor &tensor, Storage by_default, mha_input *input) {
    if (tensor.x.empty()) return;
    input->data = Keep(tensor.InMemory());
    input->type = tensor.type == by_default ? 0 : static_cast<uint32_t>(tensor.type);
    input->strides = tensor.Strides();
  }

  Memory snapshots_;

 private:
  static std::vector<float> Floats(const Memory &memory) {
    return {memory.floats(), memory.floats() + memory.size() / sizeof(float)};
  }

  Tensor output_;
  Memory written_, state_out_;
  std::vector<Memory> kept_;
};

class RecurrentData : public StatefulData<mha_recurrent_args, mha_recurrent_attention_workspace,
                                          mha_recurrent_attention> {
 public:
  explicit RecurrentData(const RecurrentProblem &p, const StatefulCall &call = {})
      : StatefulData(p, p.output, p.state, static_cast<size_t>(p.count() * p.state_size()),
                     p.in_place, call) {
    const auto unless = [](int64_t value, int64_t by_default) {
      return value == by_default ? 0 : value;
    };
    args.num_q_heads = unless(p.q.extents[2], p.k.extents[2]);
    args.num_k_heads = unless(p.k.extents[2], p.v.extents[2]);
    args.num_v_heads = p.v.extents[2];
    args.head_dim = p.q.width;
    args.head_dim_v = unless(p.v.width, p.q.width);
    args.decay_dim = p.decay.x.empty() ? 0 : unless(p.decay.width, 1);
    args.scale = p.scale;
    args.norm_epsilon = p.norm_epsilon;
    args.a_log = Keep(p.a_log);
    args.dt_bias = Keep(p.dt_bias);
    args.beta_function = p.beta_is_raw ? MHA_FUNCTION_SIGMOID : 0;
    Set(p.q, Storage::kF32, &args.q);
    Set(p.k, p.q.type, &args.k);
    Set(p.v, p.k.type, &args.v);
    Set(p.decay, Storage::kF32, &args.decay);
    Set(p.beta, Storage::kF32, &args.beta);
    args.num_snapshots = p.num_snapshots;
    snapshots_ =
        Memory(static_cast<size_t>(p.count() * p.num_snapshots * p.state_size()) * sizeof(float));
    if (p.num_snapshots > 0) args.snapshots = snapshots_.floats();
    PoisonOutputs();
  }
  mha_status Info(mha_call_info *info, mha_error *error) const {
    return mha_recurrent_attention_info(&args, info, error);
  }
};

class ConvolutionData
    : public StatefulData<mha_causal_conv_args, mha_causal_conv_workspace, mha_causal_conv> {
 public:
  explicit ConvolutionData(const ConvolutionProblem &p, const StatefulCall &call = {})
      : StatefulData(p, p.output, p.state, static_cast<size_t>(p.count() * p.state_size()),
                     p.in_place, call) {
    args.channels = p.x.width;
    args.kernel_size = p.kernel_size;
    args.weights = Keep(p.weights);
    args.bias = Keep(p.bias);
    args.activation = p.is_silu ? MHA_FUNCTION_SILU : MHA_FUNCTION_NONE;
    Set(p.x, Storage::kF32, &args.x);
    args.x.strides.head = args.output.strides.head = 0;  // there are no heads
  }
  mha_status Info(mha_call_info *, mha_error *error) const {  // there is none
    size_t bytes;
    return Workspace(&bytes, error);
  }
};

inline StatefulResults Compute(const RecurrentProblem &problem, const StatefulCall &call = {}) {
  return RecurrentData(problem, call).Compute(call.workspace_fill);
}
inline StatefulResults Compute(const ConvolutionProblem &problem, const StatefulCall &call = {}) {
  return ConvolutionData(problem, call).Compute(call.workspace_fill);
}

// ---- What the specification says

template <typename T>
const T *From(const std::vector<T> &x, int64_t offset) {
  return x.empty() ? nullptr : x.data() + offset;
}

// run(valid rows, state, outputs) computes a sequence.
template <typename Problem, typename Run>
StatefulResults SpecifyEach(const Problem &p, int64_t num_snapshots, const Run &run) {
  const int64_t out = p.output.extents[2] * p.output.width, size = p.state_size();
  StatefulResults results;
  results.y.resize(p.output.size());
  results.state.resize(static_cast<size_t>(p.count() * size));
  results.snapshots.resize(static_cast<size_t>(p.count() * num_snapshots * size));
  for (int64_t b = 0; b < p.count(); b++) {
    const SequenceRows::Valid valid = p.ValidOf(b);
    run(valid, From(p.state, b * size), results.y.data() + valid.first * out,
        results.state.data() + b * size, results.snapshots.data() + b * num_snapshots * size);
  }
  results.y = Rounded(p.output.type, results.y);
  return results;
}

inline StatefulResults Specify(const RecurrentProblem &p) {
  return SpecifyEach(p, p.num_snapshots, [&](auto valid, auto... outputs) {
    const auto rows_of = [&](const Tensor &tensor) {
      return From(tensor.x, valid.first * tensor.extents[2] * tensor.width);
    };
    const spec::Recurrence recurrence = {
        valid.count,      p.q.extents[2],     p.k.extents[2], p.v.extents[2], p.q.width,
        p.v.width,        p.decay.width,      p.scale,        p.norm_epsilon, p.beta_is_raw,
        From(p.a_log, 0), From(p.dt_bias, 0), rows_of(p.q),   rows_of(p.k),   rows_of(p.v),
        rows_of(p.decay), rows_of(p.beta),    p.num_snapshots};
    spec::Fastest().recur(recurrence, outputs...);
  });
}

inline StatefulResults Specify(const ConvolutionProblem &p) {
  return SpecifyEach(p, 0, [&](auto valid, const float *state, float *y, float *out, float *) {
    const spec::Convolution convolution = {valid.count,
                                           p.x.width,
                                           p.kernel_size,
                                           p.is_silu,
                                           p.weights.data(),
                                           From(p.bias, 0),
                                           From(p.x.x, valid.first * p.x.width)};
    spec::Fastest().convolve(convolution, state, y, out);
  });
}

// ---- Problems

// With normal numbers, decays below 0 and betas of 0 to 1. decay_dim 0 = no decay.
inline RecurrentProblem MakeRecurrent(Random *random, int64_t batch, int64_t rows, int64_t q_heads,
                                      int64_t k_heads, int64_t v_heads, int64_t head_dim,
                                      int64_t head_dim_v, int64_t decay_dim, bool has_beta) {
  RecurrentProblem p;
  p.batch = batch;
  p.rows = rows;
  p.q = {batch, rows, q_heads, head_dim};
  p.k = {batch, rows, k_heads, head_dim};
  p.v = {batch, rows, v_heads, head_dim_v};
  p.decay = {batch, rows, v_heads, std::max<int64_t>(decay_dim, 1)};
  p.beta = {batch, rows, v_heads, 1};
  p.output = {batch, rows, std::max(q_heads, v_heads), head_dim_v};
  const float factor = 1 / std::sqrt(static_cast<float>(head_dim));
  for (Tensor *tensor : {&p.q, &p.k, &p.v, &p.decay, &p.beta})
    tensor->x = random->Normals(static_cast<int64_t>(tensor->size()),
                                tensor == &p.q || tensor == &p.k ? factor : 1);
  for (float &x : p.decay.x) x = x > 0 ? -0.3f * x : 0.3f * x;
  for (float &x : p.beta.x) x = 0.5f + 0.15f * x;
  if (decay_dim == 0) p.decay.x.clear();
  if (!has_beta) p.beta.x.clear();
  return p;
}

inline ConvolutionProblem MakeConvolution(Random *random, int64_t batch, int64_t rows,
                                          int64_t channels, int64_t kernel_size) {
  ConvolutionProblem p;
  p.batch = batch;
  p.rows = rows;
  p.kernel_size = kernel_size;
  p.x = p.output = {batch, rows, 1, channels};
  p.x.x = random->Normals(batch * rows * channels);
  p.weights = random->Normals(channels * kernel_size);
  return p;
}

// Packed or padded sequences, or all rows.
inline void ChooseSequences(Random *random, SequenceRows *rows) {
  const int64_t kind = random->Between(0, 5);
  if (kind <= 1 && rows->batch == 1) {
    std::vector<int64_t> &cu = rows->cu_seqlens = {0};
    for (int64_t n = random->Between(1, 4); n-- > 0;)
      cu.push_back(n == 0 ? rows->rows : random->Between(cu.back(), rows->rows));
  } else if (kind <= 2) {
    const bool has_lengths = random->Coin();
    for (int64_t b = 0; b < rows->batch; b++) {
      const int64_t first = random->Between(0, rows->rows);
      rows->first_rows.push_back(first);
      if (has_lengths) rows->lengths.push_back(random->Between(0, rows->rows - first));
    }
    if (has_lengths && random->Coin()) rows->first_rows.clear();
  }
}

// A type and strides, of an input with its numbers.
inline void ChooseForm(Random *random, bool is_input, const SequenceRows &rows, Tensor *tensor) {
  tensor->type = random->Pick({Storage::kF32, Storage::kF32, Storage::kF16, Storage::kBf16});
  if (random->Coin()) {
    tensor->gap = random->Between(0, 9);
    tensor->heads_outside = tensor->extents[2] > 1 && random->Coin();
    for (bool &shares : tensor->shares) shares = is_input && random->Chance(0.15);
  }
  if (tensor->x.empty()) return;
  tensor->x = Rounded(tensor->type, tensor->x);
  tensor->Share();
  if (!tensor->shares[0] && !tensor->shares[1]) rows.Pad(tensor);
}

inline RecurrentProblem RandomRecurrent(Random *random) {
  const int64_t v_heads = random->Pick<int64_t>({1, 1, 2, 3, 4, 6}), group = random->Between(1, 3),
                k_heads = random->Coin() || v_heads % group != 0 ? v_heads : v_heads / group,
                times = random->Pick<int64_t>({1, 1, 2, 3, 5}),
                q_heads = random->Coin()         ? k_heads
                          : v_heads % times == 0 ? v_heads / times
                                                 : v_heads * times;
  const auto width = [&] {
    return random->Pick<int64_t>({1, 2, 7, 16, 31, 32, 33, 48, 64, 65, 100, 128, 130});
  };
  const int64_t head_dim = width(), head_dim_v = random->Coin() ? head_dim : width(),
                decay_dim = random->Pick<int64_t>({0, 1, 1, head_dim, head_dim});
  RecurrentProblem p =
      MakeRecurrent(random, random->Between(1, 3), random->Pick<int64_t>({1, 1, 2, 5, 9, 23}),
                    q_heads, k_heads, v_heads, head_dim, head_dim_v, decay_dim, random->Coin());
  if (random->Chance(0.3)) p.norm_epsilon = random->Pick({1e-6f, 1.0f});
  p.scale = random->Pick({0.0f, 0.0f, 1.0f, -2.5f});
  if (decay_dim != 0 && random->Coin()) {
    p.a_log = random->Normals(v_heads);
    if (random->Coin()) p.dt_bias = random->Normals(v_heads * decay_dim);
  } else if (random->Chance(0.2)) {
    for (float &g : p.decay.x) g = -g * random->Pick({1.0f, 30.0f, 400.0f});  // grows
  }
  p.beta_is_raw = !p.beta.x.empty() && random->Coin();
  for (std::vector<float> *x :
       {&p.q.x, &p.k.x, &p.v.x, &p.decay.x, &p.beta.x, &p.a_log, &p.dt_bias}) {
    if (random->Chance(0.15)) MakeSpecial(random, RandomKind(random), 1, x);
    if (random->Chance(0.03)) MakeSpecial(random, Values::kAny, 1, x);
  }
  ChooseSequences(random, &p);
  for (Tensor *tensor : {&p.q, &p.k, &p.v, &p.decay, &p.beta}) ChooseForm(random, true, p, tensor);
  ChooseForm(random, false, p, &p.output);
  if (random->Chance(0.7)) p.state = random->Normals(p.count() * p.state_size());
  p.in_place = random->Coin();
  if (random->Coin()) p.num_snapshots = random->Between(1, 16);
  if (random->Chance(0.1)) MakeSpecial(random, RandomKind(random), 1, &p.state);
  return p;
}

inline ConvolutionProblem RandomConvolution(Random *random) {
  ConvolutionProblem p = MakeConvolution(
      random, random->Between(1, 3), random->Pick<int64_t>({1, 1, 2, 3, 8, 33}),
      random->Pick<int64_t>({1, 3, 7, 8, 16, 17, 31, 100, 192, 515}), random->Between(2, 8));
  p.is_silu = random->Coin();
  if (random->Coin()) p.bias = random->Normals(p.x.width);
  ChooseSequences(random, &p);
  for (std::vector<float> *x : {&p.x.x, &p.weights, &p.bias}) {
    if (random->Chance(0.2)) MakeSpecial(random, RandomKind(random), 1, x);
    if (random->Chance(0.1)) MakeSpecial(random, Values::kAny, 1, x);
  }
  ChooseForm(random, true, p, &p.x);
  ChooseForm(random, false, p, &p.output);
  if (random->Chance(0.7))
    p.state = RandomValues(random, RandomKind(random), p.count() * p.state_size());
  p.in_place = random->Coin();
  return p;
}

inline std::string Describe(const RecurrentProblem &p) {
  std::string text = std::to_string(p.batch) + " x " + std::to_string(p.rows) + " rows, heads " +
                     std::to_string(p.q.extents[2]) + "/" + std::to_string(p.k.extents[2]) + "/" +
                     std::to_string(p.v.extents[2]) + " of " + std::to_string(p.q.width) + "/" +
                     std::to_string(p.v.width) + ", snapshots " + std::to_string(p.num_snapshots);
  if (!p.decay.x.empty()) text += ", decay of " + std::to_string(p.decay.width);
  if (!p.a_log.empty()) text += " raw";
  if (!p.beta.x.empty()) text += p.beta_is_raw ? ", raw beta" : ", beta";
  return text + (p.norm_epsilon > 0 ? ", norm" : "") + (p.cu_seqlens.empty() ? "" : ", packed");
}

inline std::string Describe(const ConvolutionProblem &p) {
  return std::to_string(p.batch) + " x " + std::to_string(p.rows) + " rows of " +
         std::to_string(p.x.width) + ", kernel " + std::to_string(p.kernel_size);
}

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_RECURRENT_H
