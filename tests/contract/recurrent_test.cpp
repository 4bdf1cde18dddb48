// mha_recurrent_attention and mha_causal_conv: random calls match the specification bit for bit, in
// one call and in parts; errors stay within a bound, NaN within its heads or channel; the arguments
// compute the layers that the header names.
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

// Rows first .. first + count of a tensor of one sequence.
void Cut(int64_t rows, int64_t first, int64_t count, const std::vector<Tensor *> &tensors) {
  for (Tensor *tensor : tensors) {
    const int64_t width = tensor->extents[2] * tensor->width;
    if (!tensor->x.empty()) tensor->x = SliceRows(tensor->x, 0, rows, width, first, count);
    tensor->extents[1] = count;
  }
}
RecurrentProblem Part(RecurrentProblem p, int64_t first, int64_t count) {
  Cut(p.rows, first, count, {&p.q, &p.k, &p.v, &p.decay, &p.beta, &p.output});
  return p;
}
ConvolutionProblem Part(ConvolutionProblem p, int64_t first, int64_t count) {
  Cut(p.rows, first, count, {&p.x, &p.output});
  return p;
}

class Recurrent : public InstructionSetTest {
 protected:
  StatefulCall Call(const mha_scheduler *scheduler = nullptr) const {
    return {instruction_set(), scheduler};
  }
  template <typename Problem>
  void ExpectSpecified(uint64_t seed, Problem (*make)(Random *)) const {
    for (int64_t n = 0; n < Rounds(300) && !HasFailure(); n++) {
      Random random(seed + static_cast<uint64_t>(n));
      const Problem p = make(&random);
      const Scheduler scheduler(static_cast<uint32_t>(random.Between(1, 4)),
                                random.Chance(0.8) ? RunBackwards : RunOnThreads);
      StatefulCall call = Call(random.Chance(0.7) ? scheduler.get() : nullptr);
      call.workspace_fill = random.Coin() ? 0 : 0xff;
      ExpectSame(Compute(p, call), Specify(p), "case " + std::to_string(n) + ": " + Describe(p));
    }
  }
  template <typename Problem>
  void ExpectSameInParts(Random *random, const Problem &whole) const {
    const StatefulResults expected = Compute(whole, Call());
    for (const int64_t most : {1, 7, 39}) {  // rows of a part
      StatefulResults actual;
      for (int64_t row = 0; row < whole.rows;) {
        const int64_t count = std::min(random->Between(0, most), whole.rows - row);
        Problem part = Part(whole, row, count);
        part.rows = count;
        part.state = actual.state;
        part.in_place = random->Coin();
        const Scheduler scheduler(static_cast<uint32_t>(random->Between(1, 4)), RunBackwards);
        StatefulResults results = Compute(part, Call(scheduler.get()));
        actual.y.insert(actual.y.end(), results.y.begin(), results.y.end());
        actual.state = std::move(results.state);
        row += count;
      }
      ExpectSame(actual, expected, "parts of at most " + std::to_string(most) + " rows");
    }
  }
};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(Recurrent);

TEST_P(Recurrent, RandomCallsEqualTheSpecification) { ExpectSpecified(7000, RandomRecurrent); }
TEST_P(Recurrent, RandomCallsOfConvolutionEqualTheSpecification) {
  ExpectSpecified(9000, RandomConvolution);
}

TEST_P(Recurrent, WideHeadsAndSequencesEqualTheSpecification) {
  for (const auto &[head_dim, head_dim_v] : std::vector<std::pair<int64_t, int64_t>>{
           {1024, 1024}, {1023, 5}, {3, 1021}, {512, 128}, {256, 257}, {16, 40}, {17, 40}}) {
    for (const int64_t decay_dim : {int64_t{1}, head_dim}) {
      Random random(static_cast<uint64_t>(head_dim + decay_dim));
      RecurrentProblem p = MakeRecurrent(&random, head_dim == 17 ? 3 : 1, 9, 4, 1, 2, head_dim,
                                         head_dim_v, decay_dim, true);
      if (head_dim == 16) p.cu_seqlens = {0, 4, 4, 9};
      if (head_dim == 17) p.lengths = {4, 0, 9};
      p.norm_epsilon = 1e-6f;
      p.num_snapshots = 2;
      p.state = random.Normals(p.count() * p.state_size());
      ExpectSame(Compute(p, Call()), Specify(p), Describe(p));
    }
  }
}

TEST_P(Recurrent, AnyCuttingGivesTheSameBits) {
  for (int64_t n = 0; n < Rounds(12); n++) {
    Random random(8000 + static_cast<uint64_t>(n));
    const int64_t head_dim = random.Pick<int64_t>({16, 40, 64, 128});
    RecurrentProblem whole =
        MakeRecurrent(&random, 1, 40, 2, 2, 4, head_dim, random.Pick<int64_t>({33, 64, 128}),
                      n % 3 == 2 ? head_dim : n % 3, n % 4 != 0);
    whole.norm_epsilon = n % 2 == 0 ? 1e-6f : 0;
    ExpectSameInParts(&random, whole);
    if (n < 7) ExpectSameInParts(&random, MakeConvolution(&random, 1, 40, 45, 2 + n));
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
        const size_t row = 2, heads = static_cast<size_t>(tensor->extents[2]), head = heads - 1;
        float &changed = tensor->x[((5 + row) * heads + head) * tensor->width];  // of sequence 1
        const float before = std::exchange(changed, value);
        const StatefulResults dirty = Compute(p, Call());
        changed = before;
        const auto is_used = [&](size_t b, size_t h, size_t j) {  // by a head and column
          return b == 1 && h / (4 / heads) == head && (tensor != &p.v || j == 0);
        };
        for (size_t n = 0; n < clean.y.size(); n++) {
          const size_t t = n / 160 % 5;
          const bool is_reached =
              is_used(n / 800, n / 40 % 4, n % 40) && (tensor == &p.q ? t == row : t >= row);
          EXPECT_TRUE(is_reached ? std::isinf(value) || std::isnan(dirty.y[n])
                                 : dirty.y[n] == clean.y[n])
              << n;
        }
        for (size_t n = 0; n < clean.state.size(); n++) {
          EXPECT_TRUE((tensor != &p.q && is_used(n / 1440, n / 360 % 4, n % 40)) ||
                      dirty.state[n] == clean.state[n])
              << n;
        }
      }
    }
  }
}

TEST_P(Recurrent, AKeyOrQueryWhoseSquaresOverflowCountsAsZero) {
  Random random(8);
  RecurrentProblem p = MakeRecurrent(&random, 1, 5, 2, 2, 2, 9, 20, 1, true);
  p.norm_epsilon = 1e-6f;
  for (Tensor *tensor : {&p.q, &p.k}) {
    const Tensor before = *tensor;
    std::fill_n(tensor->x.begin() + 2 * 18, 18, 0.0f);  // row 2
    const StatefulResults of_zeros = Compute(p, Call());
    tensor->x[2 * 18 + 3] = tensor->x[2 * 18 + 9] = 3e19f;  // one in each head
    ExpectSame(Compute(p, Call()), of_zeros, tensor == &p.q ? "q" : "k");
    *tensor = before;
  }
}

TEST_P(Recurrent, NotANumberReachesOnlyTheRowsOfItsChannelThatDependOnIt) {
  Random random(3);
  ConvolutionProblem p = MakeConvolution(&random, 2, 9, 70, 4);
  const StatefulResults clean = Compute(p, Call());
  p.x.x[2 * 70 + 33] = FromBits(0xffc12345u);  // of row 2 of sequence 0, channel 33
  const StatefulResults dirty = Compute(p, Call());
  for (size_t n = 0; n < clean.y.size(); n++) {
    const bool depends = n % 70 == 33 && n / 70 >= 2 && n / 70 < 6;
    EXPECT_TRUE(depends ? std::isnan(dirty.y[n]) : dirty.y[n] == clean.y[n]) << n;
  }
  EXPECT_TRUE(SameBits("state_out", dirty.state, clean.state));
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

// Two heads with everything raw, over many rows: naive_recurrent_kda of flash-linear-attention with
// its gate or, with one decay for each head, torch_recurrent_gated_delta_rule of Qwen3-Next.
TEST_P(Recurrent, ErrorsStayWithinTheBound) {
  for (const int64_t width : {16, 64}) {
    for (const bool wide_decay : {false, true}) {
      const int64_t rows = 200, columns = 20, heads = 2;
      Random random(static_cast<uint64_t>(width));
      RecurrentProblem p = MakeRecurrent(&random, 1, rows, 1, 1, heads, width, columns,
                                         wide_decay ? width : 1, true);
      p.norm_epsilon = 1e-6f;
      p.a_log = {0.3f, 0.5f};
      p.dt_bias = random.Normals(heads * p.decay.width);
      p.beta_is_raw = true;
      const StatefulResults actual = Compute(p, Call());
      double largest = 0, most = 0;
      for (int64_t h = 0; h < heads; h++) {
        DoubleState exact{width, columns};
        std::vector<Near> s(static_cast<size_t>(width * columns));
        for (int64_t t = 0; t < rows; t++) {
          // The page mha_recurrent.h, in double precision.
          const Row raw = At(p.decay, t, h), k = Normalised(At(p.k, t, 0), 1e-6f),
                    q = Normalised(At(p.q, t, 0), 1e-6f), v = At(p.v, t, h);
          const float *const bias = p.dt_bias.data() + h * p.decay.width;
          Row a, u = v;
          for (size_t i = 0; i < raw.size(); i++)
            a.push_back(std::exp(-std::exp(double{p.a_log[h]}) * Softplus(raw[i] + bias[i])));
          exact.Scale(a);
          const Row seen = exact.Times(k);
          for (int64_t j = 0; j < columns; j++)
            u[j] = Sigmoid(At(p.beta, t, h)[0]) * (u[j] - seen[j]);
          exact.Add(k, u);
          const Row y = Times(1 / std::sqrt(width), exact.Times(q));
          // The operations of section 18.
          const auto near_k = NearUnit(NearOf(At(p.k, t, 0)), 1e-6f),
                     near_q = NearUnit(NearOf(At(p.q, t, 0)), 1e-6f);
          const Near beta = Sigmoid(Near{At(p.beta, t, h)[0]}), c = Dot(near_q, near_k),
                     scale = WithRounding(1 / std::sqrt(width), 0, 3);
          std::vector<Near> own(static_cast<size_t>(width), Near{1}), old = s;
          Near b{1};
          for (size_t i = 0; i < raw.size(); i++) {
            const Near g = Softplus(WithRounding(raw[i] + bias[i], 0)),
                       rate = Exp(Near{p.a_log[h]});
            (wide_decay ? own[i] : b) = Exp(Times({-rate.x, rate.e}, g));
          }
          for (int64_t j = 0; j < columns; j++) {
            Near r, past;
            for (int64_t i = 0; i < width; i++) {
              r = Fma(Times(near_k[i], own[i]), old[i * columns + j], r);
              past = Fma(Times(near_q[i], own[i]), old[i * columns + j], past);
            }
            const Near change = Times(beta, Fma({-b.x, b.e}, r, {v[j]})),
                       result = Times(scale, Fma(c, change, Times(b, past)));
            for (int64_t i = 0; i < width; i++) {
              Near &element = s[i * columns + j];
              element = Fma(near_k[i], change, Times(Times(b, own[i]), element));
            }
            EXPECT_NEAR(result.x, y[j], 1e-11) << "the page and the contract differ";
            EXPECT_LE(std::fabs(actual.y[(t * heads + h) * columns + j] - y[j]), result.e) << t;
            largest = std::max(largest, std::fabs(y[j]));
            most = std::max(most, result.e);
          }
        }
        for (size_t n = 0; n < s.size(); n++)
          EXPECT_LE(std::fabs(actual.state[h * s.size() + n] - exact.s[n]), s[n].e);
      }
      EXPECT_LT(most, 1e-3 * largest) << "the bound says little";
    }
  }
}

// A chain of K + 1 terms, the bias among them, each of which is rounded at most K times: with
// u = 2^-24, the error is at most K u times the sum of their magnitudes, to first order. SiLU has a
// slope of at most 1.1, sigmoid an error of 2.41 ulp, and their product a rounding.
TEST_P(Recurrent, ErrorsStayWithinTheBoundOfAConvolution) {
  for (int64_t kernel_size = 2; kernel_size <= 8; kernel_size++) {
    Random random(9700 + static_cast<uint64_t>(kernel_size));
    const int64_t rows = 30, channels = 50;
    ConvolutionProblem p = MakeConvolution(&random, 1, rows, channels, kernel_size);
    p.bias = random.Normals(channels);
    p.is_silu = kernel_size % 2 == 0;
    const StatefulResults actual = Compute(p, Call());
    for (int64_t n = 0; n < rows * channels; n++) {
      const int64_t c = n % channels, t = n / channels;
      double y = p.bias[c], sum = std::fabs(y);
      for (int64_t j = 0; j < kernel_size; j++) {
        const int64_t from = t - (kernel_size - 1) + j;
        const double term =
            from < 0 ? 0 : double{p.weights[c * kernel_size + j]} * p.x.x[from * channels + c];
        y += term;
        sum += std::fabs(term);
      }
      double bound = 1.01 * static_cast<double>(kernel_size) * 0x1p-24 * sum;
      if (p.is_silu) {
        y /= 1 + std::exp(-y);
        bound = 1.1 * bound + 6 * 0x1p-24 * std::fabs(y) + 0x1p-126 * (1 + sum);
      }
      ASSERT_LE(std::fabs(actual.y[n] - y), bound) << n;
    }
  }
}

// Mamba2Mixer.torch_forward of transformers, in double precision: groups of heads share B and C,
// and dt is raw. tests/examples/hybrid.c compares a layer of Qwen3-Next.
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
  const StatefulResults actual = Compute(p, Call());
  double largest = 0;
  for (const double value : y) largest = std::max(largest, std::fabs(value));
  for (size_t n = 0; n < y.size(); n++) ASSERT_NEAR(actual.y[n], y[n], 3e-6 * largest);
}

}  // namespace
