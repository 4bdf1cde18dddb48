// Inputs given in 16 bits are the floats that they widen to, and outputs in 16 bits are the results, rounded.
#include <gtest/gtest.h>
#include <mha.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "support/interface_support.h"

#include "support/fixtures.h"
#include "support/instruction_sets.h"
#include "support/numbers.h"
#include "support/norm.h"
#include "support/rope.h"
#include "support/rounds.h"
#include "support/same_bits.h"
#include "support/schedulers.h"
#include "support/specify.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

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

// Runs a call with one of its inputs, an array of floats of so many bytes, in a type: where there is none, with none.
template <typename T>
void GiveIn(uint32_t type, size_t bytes, const T **array, std::vector<Memory> *kept) {
  if (*array == nullptr || bytes == 0) return;
  kept->push_back(InType(type, static_cast<const float *>(static_cast<const void *>(*array)), bytes / sizeof(float)));
  *array = kept->back().data();
}

// Runs a call whose output is of a type; `written` is its field. Gaps of the output stay as they are.
Outputs ComputeIn(uint32_t type, CallData *data, void **written) {
  const size_t element = type == MHA_TYPE_F32 ? sizeof(float) : sizeof(uint16_t);
  Memory output(data->output.memory.size() / sizeof(float) * element, Place::kBeforeGuard);
  output.Fill(0xff);
  *written = output.data();
  const size_t bytes = data->WorkspaceBytes();
  Memory workspace(bytes, Place::kBeforeGuard);
  workspace.Fill(0xff);
  data->PoisonOutputs();
  mha_error error;
  Check(data->Run(workspace.data(), bytes, &error), error);
  for (size_t n = 0; n < data->output.memory.size() / sizeof(float); n++) {
    uint32_t bits = 0;
    if (type == MHA_TYPE_F32) {
      std::memcpy(&bits, output.data() + n * sizeof bits, sizeof bits);
    } else {
      uint16_t narrow;
      std::memcpy(&narrow, output.data() + n * sizeof narrow, sizeof narrow);
      const bool is_the_nan = narrow == (type == MHA_TYPE_F16 ? 0x7e00u : 0x7fc0u);
      const float x = Widen(type, narrow);
      std::memcpy(&bits, &x, sizeof bits);
      if (narrow == 0xffffu) bits = 0xffffffffu;  // not written
      if (x != x && narrow != 0xffffu) bits = is_the_nan ? 0x7fc00000u : 0x7fc0dead;
    }
    std::memcpy(data->output.memory.data() + n * sizeof bits, &bits, sizeof bits);
  }
  return data->Results();
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

TEST_P(GivenIn16Bits, QueriesAndOutputsOfAttentionAreConvertedWhereTheyAreReadAndWritten) {
  for (int64_t n = 0; n < Rounds(120) && !HasFailure(); n++) {
    Random random(4900 + static_cast<uint64_t>(n));
    AttentionProblem problem;
    problem.batch = random.Between(1, 3);
    problem.n_q = random.Pick<int64_t>({1, 2, 7, 17, 33, 50});
    problem.n_kv = random.Pick<int64_t>({1, 5, 31, 64, 255, 300, 1100});
    problem.num_kv_heads = random.Between(1, 2);
    problem.num_heads = problem.num_kv_heads * random.Between(1, 4);
    problem.head_dim = random.Pick<int64_t>({2, 7, 8, 16, 20, 33});
    problem.head_dim_v = random.Pick<int64_t>({1, 8, 15, 16, 24, 49});
    problem.is_causal = problem.n_q <= problem.n_kv && random.Chance(0.5);
    problem.padding_left = random.Chance(0.5);
    for (int64_t b = 0; random.Chance(0.4) && b < problem.batch; b++) {
      problem.q_lengths.resize(static_cast<size_t>(problem.batch), problem.n_q);
      problem.q_lengths[static_cast<size_t>(b)] = random.Between(0, problem.n_q);
    }
    if (random.Chance(0.3)) problem.rope = MakeRope(random.Chance(0.5), problem.head_dim / 2 * 2, problem.n_kv + problem.n_q);
    if (problem.rope || !problem.q_lengths.empty())
      problem.q_start.assign(static_cast<size_t>(problem.batch), random.Between(0, problem.n_kv));
    const uint32_t q_type = RandomType(&random), output_type = RandomType(&random);
    const bool any = random.Chance(0.3);
    FillNormal(&random, &problem);
    problem.q = RandomNumbers(&random, q_type, problem.q.size(), any);
    // Values up to beyond what f16 holds.
    for (float &v : problem.v) v *= random.Chance(0.1) ? 0x1p17f : random.Chance(0.1) ? 0x1p-23f : 1.0f;

    const Scheduler scheduler(static_cast<uint32_t>(random.Between(1, 4)), RunBackwards);
    AttentionCall call;
    call.instruction_set = instruction_set();
    if (random.Chance(0.6)) call.scheduler = scheduler.get();
    call.q = RandomLayout(&random, true);
    call.output = RandomLayout(&random, true);
    AttentionData data(problem, call);
    data.args.q_type = q_type;
    data.args.output_type = output_type;
    const Strided shape(call.q, problem.batch, problem.n_q, problem.num_heads, problem.head_dim, Place::kAnywhere);
    std::vector<Memory> kept;
    GiveIn(q_type, shape.memory.size(), &data.args.q, &kept);
    Outputs expected = Specify(problem);
    expected.y = Rounded(output_type, expected.y);
    EXPECT_TRUE(SameBits(ComputeIn(output_type, &data, &data.args.output), expected))
        << "case " << n << " types " << q_type << "/" << output_type << " " << Describe(problem) << " q " << Describe(call.q) << " output "
        << Describe(call.output);
  }
}

TEST_P(GivenIn16Bits, KeysAndValuesAreStoredInACacheAsTheFloatsThatTheyWidenTo) {
  for (int64_t n = 0; n < Rounds(60) && !HasFailure(); n++) {
    Random random(5900 + static_cast<uint64_t>(n));
    AttentionProblem problem;
    problem.batch = random.Between(1, 3);
    problem.n_q = problem.n_kv = random.Pick<int64_t>({1, 4, 7, 17, 70});
    problem.num_heads = problem.num_kv_heads = random.Between(1, 3);
    problem.head_dim = random.Pick<int64_t>({2, 7, 16, 20, 33});
    problem.head_dim_v = random.Pick<int64_t>({1, 8, 15, 24, 80});
    problem.is_causal = true;
    problem.k_type = random.Pick({Storage::kF32, Storage::kF16, Storage::kBf16, Storage::kInt8});
    problem.v_type = random.Pick({Storage::kF32, Storage::kF16, Storage::kBf16, Storage::kInt8});
    if (random.Chance(0.4)) problem.rope = MakeRope(random.Chance(0.5), problem.head_dim / 2 * 2, problem.n_kv);
    const uint32_t k_type = RandomType(&random), v_type = RandomType(&random);
    FillNormal(&random, &problem);
    problem.k = RandomNumbers(&random, k_type, problem.k.size(), false);
    problem.v = RandomNumbers(&random, v_type, problem.v.size(), false);

    const Scheduler scheduler(static_cast<uint32_t>(random.Between(1, 3)), RunBackwards);
    Cache cache(CacheConfigOf(problem, random.Chance(0.5) ? CacheForm{MHA_CACHE_PAGED, 16} : CacheForm{MHA_CACHE_CONTIGUOUS, 0},
                              problem.batch, problem.n_kv));
    SpreadBlocks(&random, &cache);
    AttentionCall call;
    call.instruction_set = instruction_set();
    if (random.Chance(0.5)) call.scheduler = scheduler.get();
    call.cache = {cache.get(), {}, problem.n_kv};
    call.k = RandomLayout(&random, true);
    call.v = RandomLayout(&random, true);
    AttentionData data(problem, call);
    data.args.k_type = k_type;
    data.args.v_type = v_type;
    const auto bytes = [&](const Layout &layout, int64_t width) {
      return Strided(layout, problem.batch, problem.n_kv, problem.num_kv_heads, width, Place::kAnywhere).memory.size();
    };
    std::vector<Memory> kept;
    kept.reserve(2);
    GiveIn(k_type, bytes(call.k, problem.head_dim), &data.args.k, &kept);
    GiveIn(v_type, bytes(call.v, problem.head_dim_v), &data.args.v, &kept);
    EXPECT_TRUE(SameBits(data.Compute(0xff, Place::kBeforeGuard), Specify(problem)))
        << "case " << n << " types " << k_type << "/" << v_type << " " << Describe(problem);
  }
}

// Rows of layers of any kind of weights, with and without W_O, in blocks and panels that threads share.
TEST_P(GivenIn16Bits, RowsOfALayerAreConvertedWhereTheyAreReadAndWritten) {
  for (int64_t n = 0; n < Rounds(100) && !HasFailure(); n++) {
    Random random(6900 + static_cast<uint64_t>(n));
    LayerProblem problem;
    problem.batch = random.Between(1, 3);
    problem.n_q = problem.n_kv = random.Pick<int64_t>({1, 2, 3, 7, 25, 49, 150});
    problem.has_key = random.Chance(0.4);
    problem.has_value = problem.has_key && random.Chance(0.5);
    if (problem.has_key) problem.n_kv = random.Pick<int64_t>({1, 5, 31, 160});
    problem.num_kv_heads = random.Between(1, 2);
    problem.num_heads = problem.num_kv_heads * random.Between(1, 3);
    problem.head_dim = random.Pick<int64_t>({2, 8, 16, 20});
    problem.head_dim_v = random.Pick<int64_t>({1, 8, 15, 24});
    problem.query_dim = random.Pick<int64_t>({3, 17, 48, 64, 257});
    problem.key_dim = problem.has_key && random.Chance(0.5) ? 33 : problem.query_dim;
    problem.value_dim = problem.has_value && random.Chance(0.5) ? 270 : problem.key_dim;
    problem.output_dim = random.Pick<int64_t>({1, 16, 47, 100, 200});
    problem.is_causal = problem.n_q <= problem.n_kv && random.Chance(0.5);
    problem.padding_left = random.Chance(0.5);
    if (random.Chance(0.4)) {
      for (int64_t b = 0; b < problem.batch; b++) problem.q_lengths.push_back(random.Between(0, problem.n_q));
      if (!problem.has_key) problem.kv_lengths = problem.q_lengths;
      problem.q_start.assign(static_cast<size_t>(problem.batch), 0);
    }
    FillNormal(&random, random.Chance(0.5) ? kAllBiases : kNoBiases, random.Chance(0.6), &problem);
    const uint32_t input_type = RandomType(&random), output_type = RandomType(&random);
    const bool any = random.Chance(0.2);
    problem.query = RandomNumbers(&random, input_type, problem.query.size(), any);
    if (problem.has_key) problem.key = RandomNumbers(&random, input_type, problem.key.size(), false);
    if (problem.has_value) problem.value = RandomNumbers(&random, input_type, problem.value.size(), false);

    LayerForm form;
    form.instruction_set = instruction_set();
    form.weight_type = random.Pick({Stored::kF32, Stored::kF32, Stored::kF16, Stored::kBf16, Stored::kInt8, Stored::kInt4});
    const Layer layer = MakeLayer(problem, form);
    const Scheduler scheduler(static_cast<uint32_t>(random.Between(1, 4)), random.Chance(0.5) ? RunBackwards : RunOnThreads);
    LayerCall call;
    if (random.Chance(0.6)) call.scheduler = scheduler.get();
    call.asked = random.Chance(0.5) ? kAskAll : kAskNothing;
    call.query = RandomLayout(&random, false);
    call.key = RandomLayout(&random, false);
    call.value = RandomLayout(&random, false);
    call.output = RandomLayout(&random, false);
    ForwardData data(layer.get(), problem, call);
    data.args.input_type = input_type;
    data.args.output_type = output_type;
    const auto bytes = [&](const Layout &layout, int64_t rows, int64_t width) {
      return Strided(layout, problem.batch, rows, 1, width, Place::kAnywhere).memory.size();
    };
    std::vector<Memory> kept;
    kept.reserve(3);
    GiveIn(input_type, bytes(call.query, problem.n_q, problem.query_dim), &data.args.query, &kept);
    GiveIn(input_type, bytes(call.key, problem.n_kv, problem.key_dim), &data.args.key, &kept);
    GiveIn(input_type, bytes(call.value, problem.n_kv, problem.value_dim), &data.args.value, &kept);
    Outputs expected = Specify(form.weight_type == Stored::kF32 ? problem : Converted(problem, form.weight_type));
    expected.y = Rounded(output_type, expected.y);
    EXPECT_TRUE(SameBits(ComputeIn(output_type, &data, &data.args.output), expected))
        << "case " << n << " types " << input_type << "/" << output_type << " weights " << static_cast<int>(form.weight_type) << " threads "
        << (call.scheduler ? call.scheduler->num_threads : 0) << " " << Describe(problem);
  }
}

// A ring takes a prompt in several passes, each of which has products of its own.
TEST_P(GivenIn16Bits, RowsOfALayerOverARingAreConvertedInEachPass) {
  LayerProblem problem;
  problem.batch = 2;
  problem.n_q = problem.n_kv = 100;
  problem.num_heads = problem.num_kv_heads = 2;
  problem.head_dim = problem.head_dim_v = 8;
  problem.query_dim = problem.key_dim = problem.value_dim = problem.output_dim = 20;
  problem.is_causal = true;
  problem.window_left = 15;
  for (const uint32_t type : {MHA_TYPE_F16, MHA_TYPE_BF16}) {
    Random random(77);
    FillNormal(&random, kAllBiases, true, &problem);
    problem.query = RandomNumbers(&random, type, problem.query.size(), false);
    LayerForm form;
    form.instruction_set = instruction_set();
    const Layer layer = MakeLayer(problem, form);
    for (const uint32_t threads : {1u, 3u}) {
      const Scheduler scheduler(threads, RunBackwards);
      Cache cache(CacheConfigOf(problem, {MHA_CACHE_RING, 32}, problem.batch, problem.n_kv));
      LayerCall call;
      call.asked = kAskNothing;
      call.scheduler = scheduler.get();
      call.cache = {cache.get(), {}, problem.n_kv};
      ForwardData data(layer.get(), problem, call);
      data.args.input_type = data.args.output_type = type;
      std::vector<Memory> kept;
      GiveIn(type, problem.query.size() * sizeof(float), &data.args.query, &kept);
      Outputs expected = Specify(problem);
      expected.y = Rounded(type, expected.y);
      EXPECT_TRUE(SameBits(ComputeIn(type, &data, &data.args.output), expected)) << "type " << type << " threads " << threads;
    }
  }
}

// With a BLAS, which multiplies floats, inputs of 16 bits are the same floats.
TEST(GivenIn16BitsTo, ABlasRowsAreWidened) {
  for (int64_t n = 0; n < 40 && !HasFailure(); n++) {
    Random random(7900 + static_cast<uint64_t>(n));
    LayerProblem problem;
    problem.batch = random.Between(1, 3);
    problem.n_q = problem.n_kv = random.Pick<int64_t>({1, 2, 7, 600});
    problem.has_key = random.Chance(0.5);
    problem.num_heads = problem.num_kv_heads = 2;
    problem.head_dim = problem.head_dim_v = 5;
    problem.query_dim = 9;
    problem.key_dim = problem.value_dim = problem.has_key ? 12 : 9;
    problem.output_dim = 7;
    if (random.Chance(0.4)) {
      for (int64_t b = 0; b < problem.batch; b++) problem.q_lengths.push_back(random.Between(0, problem.n_q));
      if (!problem.has_key) problem.kv_lengths = problem.q_lengths;
    }
    const uint32_t input_type = random.Chance(0.5) ? MHA_TYPE_F16 : MHA_TYPE_BF16, output_type = RandomType(&random);
    FillNormal(&random, kAllBiases, random.Chance(0.5), &problem);
    problem.query = RandomNumbers(&random, input_type, problem.query.size(), false);
    if (problem.has_key) problem.key = RandomNumbers(&random, input_type, problem.key.size(), false);
    const mha_layer_options options = Options(MHA_INSTRUCTION_SET_AUTO, PlainSgemm);
    const Layer layer = Create(LayerData(problem, Place::kAnywhere, LayerForm{}), &options);
    LayerCall call;
    call.query = RandomLayout(&random, false);
    ForwardData data(layer.get(), problem, call);
    Outputs expected = data.Compute();
    EXPECT_TRUE(SameBits(expected, Forward(layer.get(), problem, {})));
    expected.y = Rounded(output_type, expected.y);
    data.args.input_type = input_type;
    data.args.output_type = output_type;
    std::vector<Memory> kept;
    kept.reserve(2);
    const Strided shape(call.query, problem.batch, problem.n_q, 1, problem.query_dim, Place::kAnywhere);
    GiveIn(input_type, shape.memory.size(), &data.args.query, &kept);
    GiveIn(input_type, problem.key.size() * sizeof(float), &data.args.key, &kept);
    EXPECT_TRUE(SameBits(ComputeIn(output_type, &data, &data.args.output), expected)) << "case " << n << " " << Describe(problem);
  }
}

}  // namespace
