// mha_causal_conv: random calls match the specification bit for bit, in one call and in parts;
// errors stay within a bound, and NaN within its channel.
#include <gtest/gtest.h>
#include <mha.h>

#include <cmath>
#include <string>
#include <vector>

#include "support/instruction_sets.h"
#include "support/recurrent.h"
#include "support/rounds.h"
#include "support/same_bits.h"
#include "support/schedulers.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

void ExpectSame(const StatefulResults &actual, const StatefulResults &expected,
                const std::string &what) {
  EXPECT_TRUE(SameBits("output", actual.y, expected.y)) << what;
  EXPECT_TRUE(SameBits("state_out", actual.state, expected.state)) << what;
}

class CausalConv : public InstructionSetTest {
 protected:
  StatefulCall Call(const mha_scheduler *scheduler = nullptr) const {
    return {instruction_set(), scheduler};
  }
};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(CausalConv);

TEST_P(CausalConv, RandomCallsEqualTheSpecification) {
  for (int64_t n = 0; n < Rounds(300) && !HasFailure(); n++) {
    Random random(9000 + static_cast<uint64_t>(n));
    const ConvolutionProblem p = RandomConvolution(&random);
    const Scheduler scheduler(static_cast<uint32_t>(random.Between(1, 4)),
                              random.Chance(0.8) ? RunBackwards : RunOnThreads);
    StatefulCall call = Call(random.Chance(0.7) ? scheduler.get() : nullptr);
    call.workspace_fill = random.Coin() ? 0 : 0xff;
    ExpectSame(Compute(p, call), Specify(p), "case " + std::to_string(n) + ": " + Describe(p));
  }
}

TEST_P(CausalConv, AnyCuttingGivesTheSameBits) {
  for (int64_t kernel_size = 2; kernel_size <= 8; kernel_size++) {
    Random random(9500 + static_cast<uint64_t>(kernel_size));
    const int64_t rows = 40, channels = 45;
    const ConvolutionProblem whole = MakeConvolution(&random, 1, rows, channels, kernel_size);
    const StatefulResults expected = Compute(whole, Call());
    for (const int64_t most : {1, 3, 39}) {  // rows of a part
      StatefulResults actual;
      for (int64_t row = 0; row < rows;) {
        ConvolutionProblem part = whole;
        part.rows = part.x.extents[1] = part.output.extents[1] =
            std::min(random.Between(0, most), rows - row);
        part.x.x = SliceRows(whole.x.x, 0, rows, channels, row, part.rows);
        part.state = actual.state;
        part.in_place = random.Coin();
        StatefulResults results = Compute(part, Call());
        actual.y.insert(actual.y.end(), results.y.begin(), results.y.end());
        actual.state = std::move(results.state);
        row += part.rows;
      }
      ExpectSame(actual, expected, "parts of at most " + std::to_string(most) + " rows");
    }
  }
}

TEST_P(CausalConv, NotANumberReachesOnlyTheRowsOfItsChannelThatDependOnIt) {
  Random random(3);
  ConvolutionProblem p = MakeConvolution(&random, 2, 9, 70, 4);
  const StatefulResults clean = Compute(p, Call());
  const int64_t sequence = 0, row = 2, channel = 33;
  p.x.x[row * 70 + channel] = FromBits(0xffc12345u);
  const StatefulResults dirty = Compute(p, Call());
  for (size_t n = 0; n < clean.y.size(); n++) {
    const int64_t t = static_cast<int64_t>(n) / 70 % 9;
    const bool depends =
        static_cast<int64_t>(n) / 630 == sequence && n % 70 == channel && t >= row && t < row + 4;
    EXPECT_TRUE(depends ? dirty.y[n] != dirty.y[n] : dirty.y[n] == clean.y[n]) << n;
  }
  EXPECT_TRUE(SameBits("state_out", dirty.state, clean.state));
}

// A chain of K + 1 terms, the bias among them, each of which is rounded at most K times: with
// u = 2^-24, the error is at most K u times the sum of their magnitudes, to first order. SiLU has a
// slope of at most 1.1, sigmoid an error of 2.41 ulp, and their product a rounding.
TEST_P(CausalConv, ErrorsStayWithinTheBound) {
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

}  // namespace
