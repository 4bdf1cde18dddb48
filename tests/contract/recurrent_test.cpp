// mha_recurrent_attention: random calls match the specification bit for bit, in one call and in
// parts; errors stay within a bound, NaN within its heads; the arguments compute the layers that
// the header names.
#include "support/recurrent.h"

#include <gtest/gtest.h>
#include <mha.h>

#include <cmath>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "support/instruction_sets.h"
#include "support/rounds.h"
#include "support/same_bits.h"
#include "support/schedulers.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

void ExpectSame(const StatefulResults &actual, const StatefulResults &expected,
                const std::string &what) {
  EXPECT_TRUE(SameBits("output", actual.y, expected.y)) << what;
  EXPECT_TRUE(SameBits("state_out", actual.state, expected.state)) << what;
  EXPECT_TRUE(SameBits("snapshots", actual.snapshots, expected.snapshots)) << what;
}

// Rows first .. first + count of a problem of one sequence.
RecurrentProblem Part(RecurrentProblem p, int64_t first, int64_t count) {
  for (Tensor *tensor : {&p.q, &p.k, &p.v, &p.decay, &p.beta, &p.output}) {
    const int64_t width = tensor->extents[2] * tensor->width;
    if (!tensor->x.empty()) tensor->x = SliceRows(tensor->x, 0, p.rows, width, first, count);
    tensor->extents[1] = count;
  }
  p.rows = count;
  return p;
}

class Recurrent : public InstructionSetTest {
 protected:
  StatefulCall Call(const mha_scheduler *scheduler = nullptr) const {
    return {instruction_set(), scheduler};
  }
};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(Recurrent);

TEST_P(Recurrent, RandomCallsEqualTheSpecification) {
  for (int64_t n = 0; n < Rounds(300) && !HasFailure(); n++) {
    Random random(7000 + static_cast<uint64_t>(n));
    const RecurrentProblem p = RandomRecurrent(&random);
    const Scheduler scheduler(static_cast<uint32_t>(random.Between(1, 4)),
                              random.Chance(0.8) ? RunBackwards : RunOnThreads);
    StatefulCall call = Call(random.Chance(0.7) ? scheduler.get() : nullptr);
    call.workspace_fill = random.Coin() ? 0 : 0xff;
    ExpectSame(Compute(p, call), Specify(p), "case " + std::to_string(n) + ": " + Describe(p));
  }
}

TEST_P(Recurrent, WideHeadsEqualTheSpecification) {
  for (const auto &[head_dim, head_dim_v] : std::vector<std::pair<int64_t, int64_t>>{
           {1024, 1024}, {1023, 5}, {3, 1021}, {512, 128}, {256, 257}}) {
    for (const int64_t decay_dim : {int64_t{1}, head_dim}) {
      Random random(static_cast<uint64_t>(head_dim + decay_dim));
      RecurrentProblem p =
          MakeRecurrent(&random, 1, 3, 2, 1, 1, head_dim, head_dim_v, decay_dim, true);
      p.norm_epsilon = 1e-6f;
      p.num_snapshots = 2;
      p.state = random.Normals(p.state_size());
      ExpectSame(Compute(p, Call()), Specify(p), Describe(p));
    }
  }
}

TEST_P(Recurrent, PackedAndPaddedSequencesEqualTheSpecification) {
  for (const bool is_packed : {true, false}) {
    Random random(7900);
    RecurrentProblem p = MakeRecurrent(&random, is_packed ? 1 : 3, 9, 4, 1, 2, 16, 40, 1, true);
    if (is_packed)
      p.cu_seqlens = {0, 4, 4, 9};
    else
      p.lengths = {4, 0, 9};
    ExpectSame(Compute(p, Call()), Specify(p), Describe(p));
  }
}

TEST_P(Recurrent, AnyCuttingGivesTheSameBits) {
  for (int64_t n = 0; n < Rounds(12); n++) {
    Random random(8000 + static_cast<uint64_t>(n));
    const int64_t rows = 40, head_dim = random.Pick<int64_t>({16, 40, 64, 128});
    RecurrentProblem whole =
        MakeRecurrent(&random, 1, rows, 2, 2, 4, head_dim, random.Pick<int64_t>({33, 64, 128}),
                      n % 3 == 2 ? head_dim : n % 3, n % 4 != 0);
    whole.norm_epsilon = n % 2 == 0 ? 1e-6f : 0;
    const StatefulResults expected = Compute(whole, Call());
    for (const int64_t most : {1, 7, 39}) {  // rows of a part
      StatefulResults actual;
      for (int64_t row = 0; row < rows;) {
        const int64_t count = std::min(random.Between(0, most), rows - row);
        RecurrentProblem part = Part(whole, row, count);
        part.state = actual.state;
        part.in_place = random.Coin();
        const Scheduler scheduler(static_cast<uint32_t>(random.Between(1, 4)), RunBackwards);
        StatefulResults results = Compute(part, Call(scheduler.get()));
        actual.y.insert(actual.y.end(), results.y.begin(), results.y.end());
        actual.state = std::move(results.state);
        row += count;
      }
      ExpectSame(actual, expected, "parts of at most " + std::to_string(most) + " rows");
    }
  }
}

// ---- Numbers that are not finite

TEST_P(Recurrent, NotANumberReachesOnlyTheHeadsAndRowsThatUseIt) {
  for (const bool wide_decay : {false, true}) {
    Random random(5);
    RecurrentProblem p = MakeRecurrent(&random, 2, 5, 2, 2, 4, 9, 40, wide_decay ? 9 : 1, true);
    const StatefulResults clean = Compute(p, Call());
    for (Tensor *tensor : {&p.q, &p.k, &p.v, &p.decay, &p.beta}) {
      for (const float value : {FromBits(0xffc12345u), INFINITY, -INFINITY}) {
        const int64_t row = 2, heads = tensor->extents[2], head = heads - 1, width = tensor->width;
        std::vector<float> before = tensor->x;
        tensor->x[((p.rows + row) * heads + head) * width] = value;  // of sequence 1
        const StatefulResults dirty = Compute(p, Call());
        tensor->x = std::move(before);
        // Heads of the output and of states are the same ones here.
        const auto is_used = [&](int64_t h, int64_t j) {
          return h / (4 / heads) == head && (tensor != &p.v || j == 0);
        };
        for (size_t n = 0; n < clean.y.size(); n++) {
          const int64_t at = static_cast<int64_t>(n), t = at / 160 % 5;
          if (at / 160 / 5 == 1 && is_used(at / 40 % 4, at % 40) &&
              (tensor == &p.q ? t == row : t >= row)) {
            EXPECT_TRUE(value == value || dirty.y[n] != dirty.y[n]) << n;
          } else {
            EXPECT_EQ(dirty.y[n], clean.y[n]) << n;
          }
        }
        for (size_t n = 0; n < clean.state.size(); n++) {
          const int64_t at = static_cast<int64_t>(n);
          const bool is_reached =
              tensor != &p.q && at / 360 / 4 == 1 && is_used(at / 360 % 4, at % 40);
          EXPECT_TRUE(is_reached || dirty.state[n] == clean.state[n]) << n;
        }
      }
    }
  }
}

// ---- Accuracy

using Row = std::vector<double>;

// The vector of a row and head, of a tensor of one sequence.
Row At(const Tensor &tensor, int64_t t, int64_t h) {
  const auto begin = tensor.x.begin() + (t * tensor.extents[2] + h) * tensor.width;
  return {begin, begin + tensor.width};
}

// A state in double precision.
struct DoubleState {
  int64_t rows, columns;
  Row s = Row(static_cast<size_t>(rows * columns));

  void Scale(const Row &factors) {  // one for each row, or for all
    for (int64_t n = 0; n < rows * columns; n++)
      s[n] *= factors[factors.size() == 1 ? 0 : n / columns];
  }
  void Add(const Row &k, const Row &u) {
    for (int64_t n = 0; n < rows * columns; n++) s[n] += k[n / columns] * u[n % columns];
  }
  Row Times(const Row &x) const {  // x S
    Row y(static_cast<size_t>(columns));
    for (int64_t n = 0; n < rows * columns; n++) y[n % columns] += x[n / columns] * s[n];
    return y;
  }
};

double Dot(const Row &x, const Row &y) {
  return std::inner_product(x.begin(), x.end(), y.begin(), 0.0);
}
Row Times(double factor, Row x) {
  for (double &value : x) value *= factor;
  return x;
}
Row Normalised(const Row &x, double epsilon) {
  return Times(1 / std::sqrt(Dot(x, x) + epsilon), x);
}
double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double Softplus(double x) { return std::log1p(std::exp(x)); }

// A number in exact arithmetic, and a bound of what floats are apart from it.
struct Near {
  double x = 0, e = 0;
};

// Rounding changes a result of magnitude y by at most u y, or half of the least subnormal number,
// with u = 2^-24; errors of the operands come on top, to first and second order. So each operation
// of sections 16 and 18 of the contract bounds its own error from those before it, whatever the
// numbers are, and the bound of a result is that of its last operation. Functions have the errors
// that the contract says, in units of at most 2 u y.
constexpr double kUnit = 0x1p-24;
Near WithRounding(double x, double e, double units = 1) {
  return {x, e + units * kUnit * (std::fabs(x) + e) + 0x1p-126};
}
Near Fma(Near a, Near b, Near c) {
  const double e = std::fabs(a.x) * b.e + std::fabs(b.x) * a.e + a.e * b.e + c.e;
  return WithRounding(a.x * b.x + c.x, e);
}
Near Times(Near a, Near b) { return Fma(a, b, {}); }
Near Exp(Near a) {  // and 1 / exp(-a): two roundings more
  const double y = std::exp(a.x);
  return WithRounding(y, y * std::expm1(a.e), 4);
}
Near Sigmoid(Near a) { return WithRounding(Sigmoid(a.x), a.e / 4, 5); }
Near Softplus(Near a) { return WithRounding(Softplus(a.x), a.e, 4); }
std::vector<Near> NearOf(const Row &x) {
  std::vector<Near> near;
  for (const double value : x) near.push_back({value, 0});
  return near;
}
// In any order: each term takes part in at most as many additions as there are terms.
Near Dot(const std::vector<Near> &x, const std::vector<Near> &y) {
  Near sum;
  for (size_t i = 0; i < x.size(); i++) {
    const double e = std::fabs(x[i].x) * y[i].e + std::fabs(y[i].x) * x[i].e + x[i].e * y[i].e;
    sum.x += x[i].x * y[i].x;
    sum.e += e + (static_cast<double>(x.size()) + 1) * kUnit * (std::fabs(x[i].x * y[i].x) + e);
  }
  return sum;
}
std::vector<Near> NearUnit(const std::vector<Near> &x, double epsilon) {
  const Near squares = Dot(x, x), sum = WithRounding(squares.x + epsilon, squares.e);
  const double r = 1 / std::sqrt(sum.x);
  const Near factor = WithRounding(r, 1 / std::sqrt(sum.x - sum.e) - r, 3);
  std::vector<Near> unit;
  for (const Near &value : x) unit.push_back(Times(value, factor));
  return unit;
}

// One head of each kind with everything raw, over many rows.
TEST_P(Recurrent, ErrorsStayWithinTheBound) {
  for (const int64_t width : {16, 64}) {
    for (const bool wide_decay : {false, true}) {
      const int64_t rows = 200, columns = 20;
      Random random(static_cast<uint64_t>(width));
      RecurrentProblem p =
          MakeRecurrent(&random, 1, rows, 1, 1, 1, width, columns, wide_decay ? width : 1, true);
      p.norm_epsilon = 1e-6f;
      p.a_log = {0.3f};
      p.dt_bias = random.Normals(p.decay.width);
      p.beta_is_raw = true;
      const StatefulResults actual = Compute(p, Call());
      DoubleState exact{width, columns};
      std::vector<Near> s(static_cast<size_t>(width * columns));
      double largest = 0, most = 0;
      for (int64_t t = 0; t < rows; t++) {
        // The page mha_recurrent.h, in double precision.
        const Row raw = At(p.decay, t, 0), k = Normalised(At(p.k, t, 0), 1e-6f),
                  q = Normalised(At(p.q, t, 0), 1e-6f);
        Row a, u = At(p.v, t, 0);
        for (size_t i = 0; i < raw.size(); i++)
          a.push_back(std::exp(-std::exp(double{0.3f}) * Softplus(raw[i] + p.dt_bias[i])));
        exact.Scale(a);
        const Row seen = exact.Times(k);
        for (int64_t j = 0; j < columns; j++)
          u[j] = Sigmoid(At(p.beta, t, 0)[0]) * (u[j] - seen[j]);
        exact.Add(k, u);
        const Row y = Times(1 / std::sqrt(width), exact.Times(q));
        // The operations of section 18.
        const auto near_k = NearUnit(NearOf(At(p.k, t, 0)), 1e-6f),
                   near_q = NearUnit(NearOf(At(p.q, t, 0)), 1e-6f);
        const Near beta = Sigmoid(Near{p.beta.x[t]}), c = Dot(near_q, near_k),
                   scale = WithRounding(1 / std::sqrt(width), 0, 3);
        std::vector<Near> own(static_cast<size_t>(width), Near{1}), old = s;
        Near b{1};
        for (size_t i = 0; i < raw.size(); i++) {
          const Near g = Softplus(WithRounding(raw[i] + p.dt_bias[i], 0)),
                     rate = Exp(Near{p.a_log[0]});
          (wide_decay ? own[i] : b) = Exp(Times({-rate.x, rate.e}, g));
        }
        for (int64_t j = 0; j < columns; j++) {
          Near r, past;
          for (int64_t i = 0; i < width; i++) {
            r = Fma(Times(near_k[i], own[i]), old[i * columns + j], r);
            past = Fma(Times(near_q[i], own[i]), old[i * columns + j], past);
          }
          const Near change = Times(beta, Fma({-b.x, b.e}, r, {At(p.v, t, 0)[j]})),
                     result = Times(scale, Fma(c, change, Times(b, past)));
          for (int64_t i = 0; i < width; i++) {
            Near &element = s[i * columns + j];
            element = Fma(near_k[i], change, Times(Times(b, own[i]), element));
          }
          EXPECT_NEAR(result.x, y[j], 1e-11) << "the page and the contract differ";
          EXPECT_LE(std::fabs(actual.y[t * columns + j] - y[j]), result.e) << t;
          largest = std::max(largest, std::fabs(y[j]));
          most = std::max(most, result.e);
        }
      }
      for (size_t n = 0; n < s.size(); n++)
        EXPECT_LE(std::fabs(actual.state[n] - exact.s[n]), s[n].e);
      EXPECT_LT(most, 1e-3 * largest) << "the bound says little";
    }
  }
}

// ---- The layers that the header names, as their modules compute them, in double precision

// Within some roundings of the largest number.
void ExpectNear(const std::vector<float> &actual, const Row &expected) {
  double largest = 0;
  for (const double value : expected) largest = std::max(largest, std::fabs(value));
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t n = 0; n < actual.size(); n++) ASSERT_NEAR(actual[n], expected[n], 3e-6 * largest);
}

// Mamba2Mixer.torch_forward of transformers: groups of heads share B and C, and dt is raw.
TEST_P(Recurrent, ComputesMamba2) {
  const int64_t rows = 60, heads = 6, groups = 2, state_size = 24, head_dim = 20;
  Random random(21);
  RecurrentProblem p =
      MakeRecurrent(&random, 1, rows, groups, groups, heads, state_size, head_dim, 1, false);
  const Tensor x = p.v, dt = p.decay;
  p.a_log = random.Normals(heads);
  p.dt_bias = random.Normals(heads);
  p.scale = 1;
  Row y;
  std::vector<DoubleState> states(heads, DoubleState{state_size, head_dim});
  for (int64_t t = 0; t < rows; t++) {
    for (int64_t h = 0; h < heads; h++) {
      const double step = Softplus(At(dt, t, h)[0] + p.dt_bias[h]), A = -std::exp(p.a_log[h]);
      const Row B = At(p.k, t, h / (heads / groups)), C = At(p.q, t, h / (heads / groups));
      states[h].Scale({std::exp(step * A)});
      states[h].Add(Times(step, B), At(x, t, h));
      for (const double value : states[h].Times(C)) y.push_back(value);
      for (int64_t d = 0; d < head_dim; d++)
        p.v.x[(t * heads + h) * head_dim + d] = static_cast<float>(step * At(x, t, h)[d]);
    }
  }
  ExpectNear(Compute(p, Call()).y, y);
}

// naive_recurrent_kda of flash-linear-attention, with its gate.
TEST_P(Recurrent, ComputesKimiDeltaAttention) {
  const int64_t rows = 60, heads = 3, width = 32;
  Random random(22);
  RecurrentProblem p =
      MakeRecurrent(&random, 1, rows, heads, heads, heads, width, width, width, true);
  p.norm_epsilon = 1e-6f;
  p.a_log = random.Normals(heads);
  p.dt_bias = random.Normals(heads * width);
  p.beta_is_raw = true;
  Row y;
  std::vector<DoubleState> states(heads, DoubleState{width, width});
  for (int64_t t = 0; t < rows; t++) {
    for (int64_t h = 0; h < heads; h++) {
      Row g = At(p.decay, t, h), v = At(p.v, t, h);
      for (int64_t i = 0; i < width; i++)
        g[i] = std::exp(-std::exp(p.a_log[h]) * Softplus(g[i] + p.dt_bias[h * width + i]));
      const Row k = Normalised(At(p.k, t, h), 1e-6), q = Normalised(At(p.q, t, h), 1e-6);
      states[h].Scale(g);
      const Row seen = states[h].Times(k);
      for (int64_t j = 0; j < width; j++) v[j] -= seen[j];
      states[h].Add(Times(Sigmoid(At(p.beta, t, h)[0]), k), v);
      for (const double value : states[h].Times(Times(1 / std::sqrt(width), q))) y.push_back(value);
    }
  }
  ExpectNear(Compute(p, Call()).y, y);
}

// Qwen3NextGatedDeltaNet of transformers behind its projections: the convolution with SiLU over
// channels of q, k and v, then torch_recurrent_gated_delta_rule with heads of keys repeated.
TEST_P(Recurrent, ComputesQwen3NextBehindItsConvolution) {
  const int64_t rows = 60, k_heads = 2, v_heads = 4, width = 16, channels = 128, kernel = 4;
  Random random(23);
  ConvolutionProblem convolution = MakeConvolution(&random, 1, rows, channels, kernel);
  convolution.is_silu = true;
  const std::vector<float> mixed = Compute(convolution, Call()).y;
  RecurrentProblem p =
      MakeRecurrent(&random, 1, rows, k_heads, k_heads, v_heads, width, width, 1, true);
  int64_t at = 0;  // of the tensor in the channels
  for (Tensor *tensor : {&p.q, &p.k, &p.v}) {
    const int64_t own = tensor->extents[2] * width;
    for (int64_t n = 0; n < rows * own; n++)
      tensor->x[n] = mixed[n / own * channels + at + n % own];
    at += own;
  }
  p.norm_epsilon = 1e-6f;
  p.a_log = random.Normals(v_heads);
  p.dt_bias = random.Normals(v_heads);
  p.beta_is_raw = true;
  // Of channels from `first` on at row t.
  const auto convolved = [&](int64_t t, int64_t first) {
    Row y(static_cast<size_t>(width));
    for (int64_t d = 0; d < width; d++) {
      for (int64_t j = std::max<int64_t>(0, kernel - 1 - t); j < kernel; j++)
        y[d] += double{convolution.weights[(first + d) * kernel + j]} *
                convolution.x.x[(t - (kernel - 1) + j) * channels + first + d];
      y[d] *= Sigmoid(y[d]);
    }
    return y;
  };
  Row y;
  std::vector<DoubleState> states(v_heads, DoubleState{width, width});
  for (int64_t t = 0; t < rows; t++) {
    for (int64_t h = 0; h < v_heads; h++) {
      const int64_t shared = h / (v_heads / k_heads);
      const Row q = Normalised(convolved(t, shared * width), 1e-6),
                k = Normalised(convolved(t, (k_heads + shared) * width), 1e-6);
      Row delta = convolved(t, (2 * k_heads + h) * width);
      const double g = -std::exp(p.a_log[h]) * Softplus(At(p.decay, t, h)[0] + p.dt_bias[h]);
      states[h].Scale({std::exp(g)});
      const Row memory = states[h].Times(k);
      for (int64_t j = 0; j < width; j++)
        delta[j] = (delta[j] - memory[j]) * Sigmoid(At(p.beta, t, h)[0]);
      states[h].Add(k, delta);
      for (const double value : states[h].Times(Times(1 / std::sqrt(width), q))) y.push_back(value);
    }
  }
  ExpectNear(Compute(p, Call()).y, y);
}

}  // namespace
