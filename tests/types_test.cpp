// Keys and values given to mha_attention in 16 bits are the floats that they widen to.
#include <gtest/gtest.h>
#include <mha.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "support/fixtures.h"
#include "support/instruction_sets.h"
#include "support/norm.h"
#include "support/rope.h"
#include "support/rounds.h"
#include "support/same_bits.h"
#include "support/schedulers.h"
#include "support/specify.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

// What a number of 16 bits means: 5 bits of exponent (f16) or 8 (bf16).
float Widen(uint32_t type, uint16_t bits) {
  const int exponent_bits = type == MHA_TYPE_F16 ? 5 : 8, mantissa_bits = 15 - exponent_bits, bias = (1 << (exponent_bits - 1)) - 1;
  const int mantissa = bits & ((1 << mantissa_bits) - 1), exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1);
  const float sign = bits & 0x8000u ? -1.0f : 1.0f;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa ? std::numeric_limits<float>::quiet_NaN() : sign * std::numeric_limits<float>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), 1 - bias - mantissa_bits);
  return sign * std::ldexp(static_cast<float>(mantissa + (1 << mantissa_bits)), exponent - bias - mantissa_bits);
}

// count numbers, some of which are subnormal, and some not finite if they are to be.
std::vector<uint16_t> RandomBits(Random *random, uint32_t type, int64_t count, bool any) {
  std::vector<uint16_t> bits(static_cast<size_t>(count));
  for (uint16_t &x : bits) {
    x = static_cast<uint16_t>(random->Next());
    if (any && random->Chance(0.02)) continue;
    // The exponents of about 2^-4 to 2^1, or that of subnormal numbers.
    const int mantissa_bits = type == MHA_TYPE_F16 ? 10 : 7, bias = type == MHA_TYPE_F16 ? 15 : 127;
    const int exponent = random->Chance(0.05) ? 0 : bias + static_cast<int>(random->Between(-4, 1));
    x = static_cast<uint16_t>((x & 0x8000u) | (x & ((1u << mantissa_bits) - 1u)) | static_cast<unsigned>(exponent) << mantissa_bits);
  }
  return bits;
}

std::vector<float> Widened(uint32_t type, const std::vector<uint16_t> &bits) {
  std::vector<float> wide;
  for (const uint16_t x : bits) wide.push_back(Widen(type, x));
  return wide;
}

// [batch, n, heads, width] to [batch, heads, n, width]
std::vector<uint16_t> HeadsOutside(const std::vector<uint16_t> &x, int64_t batch, int64_t n, int64_t heads, int64_t width) {
  std::vector<uint16_t> y;
  for (int64_t b = 0; b < batch; b++) {
    for (int64_t h = 0; h < heads; h++) {
      for (int64_t i = 0; i < n; i++) {
        const auto row = x.begin() + ((b * n + i) * heads + h) * width;
        y.insert(y.end(), row, row + width);
      }
    }
  }
  return y;
}

class GivenIn16Bits : public InstructionSetTest {};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(GivenIn16Bits);

TEST_P(GivenIn16Bits, KeysAndValuesAreTheFloatsThatTheyWidenTo) {
  for (int64_t n = 0; n < Rounds(120) && !HasFailure(); n++) {
    Random random(900 + static_cast<uint64_t>(n));
    AttentionProblem problem;
    problem.batch = random.Between(1, 3);
    problem.n_q = random.Pick<int64_t>({1, 2, 7, 17, 33, 50});
    problem.n_kv = random.Pick<int64_t>({1, 5, 16, 31, 64, 255, 257, 300, 520});
    problem.num_kv_heads = random.Between(1, 2);
    problem.num_heads = problem.num_kv_heads * random.Between(1, 4);
    problem.head_dim = random.Pick<int64_t>({2, 7, 8, 16, 20, 33});
    problem.head_dim_v = random.Pick<int64_t>({1, 8, 15, 16, 24, 49});
    problem.is_causal = problem.n_q <= problem.n_kv && random.Chance(0.5);
    problem.padding_left = random.Chance(0.5);
    if (random.Chance(0.4)) {
      for (int64_t b = 0; b < problem.batch; b++) problem.kv_lengths.push_back(random.Between(0, problem.n_kv));
    }
    if (random.Chance(0.3)) problem.rope = MakeRope(random.Chance(0.5), problem.head_dim / 2 * 2, problem.n_kv + problem.n_q);
    if (random.Chance(0.3)) problem.norm = RandomNorm(&random, problem);
    if (problem.rope || !problem.kv_lengths.empty())
      problem.q_start.assign(static_cast<size_t>(problem.batch), random.Between(0, problem.n_kv));
    const uint32_t k_type = random.Pick<uint32_t>({MHA_TYPE_F32, MHA_TYPE_F16, MHA_TYPE_BF16});
    const uint32_t v_type = random.Pick<uint32_t>({MHA_TYPE_F32, MHA_TYPE_F16, MHA_TYPE_BF16});
    const bool any = random.Chance(0.3), heads_outside = random.Chance(0.4);
    FillNormal(&random, &problem);
    const int64_t batch = problem.batch, n_kv = problem.n_kv, heads = problem.num_kv_heads;
    std::vector<uint16_t> k = RandomBits(&random, k_type, static_cast<int64_t>(problem.k.size()), any);
    std::vector<uint16_t> v = RandomBits(&random, v_type, static_cast<int64_t>(problem.v.size()), any);
    if (k_type != MHA_TYPE_F32) problem.k = Widened(k_type, k);
    if (v_type != MHA_TYPE_F32) problem.v = Widened(v_type, v);
    if (heads_outside) {
      k = HeadsOutside(k, batch, n_kv, heads, problem.head_dim);
      v = HeadsOutside(v, batch, n_kv, heads, problem.head_dim_v);
    }

    const Scheduler scheduler(static_cast<uint32_t>(random.Between(1, 3)), RunBackwards);
    AttentionCall call;
    call.instruction_set = instruction_set();
    if (random.Chance(0.5)) call.scheduler = scheduler.get();
    if (heads_outside && k_type != MHA_TYPE_F32) call.k = kHeadsOutside;
    if (heads_outside && v_type != MHA_TYPE_F32) call.v = kHeadsOutside;
    AttentionData data(problem, call);
    data.args.k_type = k_type;
    data.args.v_type = v_type;
    if (k_type != MHA_TYPE_F32) data.args.k = k.data();
    if (v_type != MHA_TYPE_F32) data.args.v = v.data();
    const Outputs outputs = data.Compute(0xff, Place::kAnywhere, 3);
    EXPECT_TRUE(SameBits(outputs, Specify(problem)))
        << "case " << n << " types " << k_type << "/" << v_type << (heads_outside ? " heads outside " : " ") << Describe(problem);
  }
}

}  // namespace
