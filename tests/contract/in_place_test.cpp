// A call whose output is its query has the bits of one whose output lies elsewhere, on every way through the library.
#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "support/interface_support.h"
#include "support/fixtures.h"
#include "support/instruction_sets.h"
#include "support/rope.h"
#include "support/rounds.h"
#include "support/schedulers.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

using Bytes = std::vector<unsigned char>;

void Run(const CallData &data) {
  const size_t bytes = data.WorkspaceBytes();
  Memory workspace(bytes, Place::kBeforeGuard);
  workspace.Fill(0xff);
  mha_error error;
  Check(data.Run(workspace.data(), bytes, &error), error);
}

// The arrays of a call: as many elements as the larger of query and output has, of 2 or 4 bytes. Numbers of 16 bits may be any.
Bytes RandomArray(Random *random, uint32_t type, size_t elements) {
  Bytes bytes(elements * (type == MHA_TYPE_F32 ? 4 : 2));
  for (size_t n = 0; n < elements; n++) {
    const float x = random->Normals(1)[0];
    if (type == MHA_TYPE_F32) {
      std::memcpy(&bytes[4 * n], &x, 4);
    } else {
      uint32_t bits;
      std::memcpy(&bits, &x, 4);
      const uint16_t upper = static_cast<uint16_t>(type == MHA_TYPE_BF16 ? bits >> 16 : 0x3000u | (bits >> 13 & 0x87ffu));
      std::memcpy(&bytes[2 * n], &upper, 2);
    }
  }
  return bytes;
}

// In place and not, from the same caches.
template <typename Data>
void ExpectTheSameInPlace(Data *data, const void *&input, void *&output, const Bytes &array, const mha_kv_cache_config *room,
                          const std::string &what) {
  Bytes results[2] = {array, array};  // in place; elsewhere: what is between the rows of the output is the same too
  for (int elsewhere = 0; elsewhere < 2; elsewhere++) {
    std::unique_ptr<Cache> cache = room ? std::make_unique<Cache>(*room) : nullptr;
    if (cache) data->args.cache = cache->get();
    input = elsewhere ? array.data() : results[0].data();
    output = results[elsewhere].data();
    Run(*data);
  }
  EXPECT_EQ(std::memcmp(results[0].data(), results[1].data(), array.size()), 0) << what;
}

class InPlace : public InstructionSetTest {};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(InPlace);

TEST_P(InPlace, LayersHaveTheBitsOfAnOutputElsewhere) {
  int passes = 0;
  for (int64_t n = 0; n < Rounds(150) && !HasFailure(); n++) {
    Random random(100 + static_cast<uint64_t>(n));
    LayerProblem problem;
    const bool is_small = random.Chance(0.2), is_ring = !is_small && random.Chance(0.3);
    const bool is_cached = !is_small && !is_ring && random.Chance(0.3);
    problem.batch = random.Between(1, 3);
    problem.n_q = problem.n_kv = is_small ? random.Between(1, 5) : random.Pick<int64_t>({1, 7, 60, 150});
    problem.has_key = !is_small && !is_ring && random.Chance(0.3);
    if (problem.has_key) problem.n_kv = random.Pick<int64_t>({3, 70, 300});
    problem.num_heads = problem.num_kv_heads = 2;
    problem.head_dim = problem.head_dim_v = is_small ? 4 : random.Pick<int64_t>({8, 20});
    problem.query_dim = problem.key_dim = problem.value_dim = is_small ? 8 : random.Pick<int64_t>({16, 40, 70});
    problem.output_dim = problem.query_dim;
    problem.is_causal = is_ring || (problem.n_q <= problem.n_kv && random.Chance(0.5));
    if (is_ring) problem.window_left = 15;
    problem.padding_left = random.Chance(0.5);
    if (!is_small && random.Chance(0.4)) {
      for (int64_t b = 0; b < problem.batch; b++) problem.q_lengths.push_back(random.Between(0, problem.n_q));
      if (!problem.has_key) problem.kv_lengths = problem.q_lengths;
      if (!is_cached && !is_ring) problem.q_start.assign(static_cast<size_t>(problem.batch), 0);
      if (problem.has_key && (is_cached || is_ring)) problem.q_lengths.clear(), problem.is_causal = false;
    }
    if (problem.has_key && is_cached) problem.is_causal = false;
    FillNormal(&random, kAllBiases, random.Chance(0.6), &problem);
    const bool has_sgemm = !is_small && random.Chance(0.2);
    const mha_layer_options options = Options(instruction_set(), has_sgemm ? PlainSgemm : nullptr);
    const Layer layer = Create(LayerData(problem, Place::kAnywhere), &options);
    const Scheduler scheduler(static_cast<uint32_t>(random.Between(1, 4)), random.Chance(0.5) ? RunBackwards : RunOnThreads);
    LayerCall call;
    if (random.Chance(0.6)) call.scheduler = scheduler.get();
    call.asked = !is_small && !is_ring && !is_cached && random.Chance(0.3) ? kAskAll : kAskNothing;
    ForwardData data(layer.get(), problem, call);
    // Where the widths differ, rows of both at the same distance.
    const int64_t stride = std::max(problem.query_dim, problem.y_width()) + (random.Chance(0.5) ? 0 : random.Between(1, 9));
    data.args.query_row_stride = data.args.output_row_stride = stride;
    const uint32_t type = is_small ? MHA_TYPE_F32 : random.Pick<uint32_t>({MHA_TYPE_F32, MHA_TYPE_F16, MHA_TYPE_BF16});
    data.args.output_type = data.args.input_type = type;
    const Bytes key = RandomArray(&random, type, problem.key.size());
    if (problem.has_key) data.args.key = key.data();
    const Bytes array = RandomArray(&random, type, static_cast<size_t>(problem.batch * problem.n_q * stride));
    const mha_kv_cache_config room = CacheConfigOf(problem, is_ring ? CacheForm{MHA_CACHE_RING, 32} : CacheForm{MHA_CACHE_CONTIGUOUS, 0},
                                                   problem.batch, problem.n_kv);
    passes += is_ring && problem.n_q > 32 ? 1 : 0;
    ExpectTheSameInPlace(&data, data.args.query, data.args.output, array, is_ring || is_cached ? &room : nullptr,
                         "case " + std::to_string(n) + " type " + std::to_string(type) +
                             (is_ring     ? " ring "
                              : is_cached ? " cache "
                                          : " ") +
                             Describe(problem) + " threads " + std::to_string(call.scheduler ? call.scheduler->num_threads : 0));
  }
  EXPECT_GT(passes, 0) << "no call went over a ring in several passes";
}

TEST_P(InPlace, AttentionHasTheBitsOfAnOutputElsewhere) {
  for (int64_t n = 0; n < Rounds(150) && !HasFailure(); n++) {
    Random random(700 + static_cast<uint64_t>(n));
    AttentionProblem problem;
    const bool is_ring = random.Chance(0.3), is_long = !is_ring && random.Chance(0.3);  // long: keys are shared out between threads
    problem.batch = random.Between(1, 2);
    problem.n_q = is_long ? random.Between(1, 3) : random.Pick<int64_t>({1, 7, 60, 100});
    problem.n_kv = is_ring ? problem.n_q : is_long ? 2100 : random.Pick<int64_t>({0, 5, 100, 300});
    problem.num_kv_heads = random.Between(1, 2);
    problem.num_heads = problem.num_kv_heads * random.Between(1, 4);
    problem.head_dim = random.Pick<int64_t>({2, 8, 20});
    problem.head_dim_v = random.Pick<int64_t>({1, 8, 20, 24});
    problem.is_causal = is_ring || (problem.n_q <= problem.n_kv && random.Chance(0.5));
    if (is_ring) problem.window_left = 15;
    if (problem.n_kv > 0 && random.Chance(0.3)) {
      problem.rope = MakeRope(random.Chance(0.5), problem.head_dim / 2 * 2, problem.n_kv + problem.n_q);
    }
    if (!is_ring) problem.q_start.assign(static_cast<size_t>(problem.batch), random.Between(0, problem.n_kv));
    if (!is_ring && random.Chance(0.4)) {
      for (int64_t b = 0; b < problem.batch; b++) problem.q_lengths.push_back(random.Between(0, problem.n_q));
    }
    FillNormal(&random, &problem);
    const Scheduler scheduler(static_cast<uint32_t>(random.Between(1, 6)), random.Chance(0.7) ? RunBackwards : RunOnThreads);
    AttentionCall call;
    call.instruction_set = instruction_set();
    call.asked = random.Chance(0.5) ? kAskLse | kAskContext : kAskNothing;
    if (random.Chance(0.8)) call.scheduler = scheduler.get();
    AttentionData data(problem, call);
    const int64_t width = std::max(problem.head_dim, problem.head_dim_v) + (random.Chance(0.5) ? 0 : random.Between(1, 9));
    const bool heads_outside = random.Chance(0.5);
    mha_attention_args &args = data.args;
    args.q_head_stride = args.output_head_stride = heads_outside ? problem.n_q * width : width;
    args.q_row_stride = args.output_row_stride = heads_outside ? width : problem.num_heads * width;
    args.q_batch_stride = args.output_batch_stride = problem.n_q * problem.num_heads * width;
    const uint32_t type = random.Pick<uint32_t>({MHA_TYPE_F32, MHA_TYPE_F16, MHA_TYPE_BF16});
    args.q_type = args.output_type = type;
    const Bytes array = RandomArray(&random, type, static_cast<size_t>(problem.batch * problem.n_q * problem.num_heads * width));
    const mha_kv_cache_config room = CacheConfigOf(problem, {MHA_CACHE_RING, 32}, problem.batch, problem.n_kv);
    ExpectTheSameInPlace(&data, args.q, args.output, array, is_ring ? &room : nullptr,
                         "case " + std::to_string(n) + " type " + std::to_string(type) + (is_ring ? " ring " : " ") + Describe(problem) +
                             " threads " + std::to_string(call.scheduler ? call.scheduler->num_threads : 0));
  }
}

TEST(InPlaceAttention, IsRefusedWithOutputsPerPair) {
  AttentionProblem problem;
  problem.n_q = problem.n_kv = 2;
  Random random(1);
  FillNormal(&random, &problem);
  AttentionCall call;
  call.asked = kAskWeights;
  AttentionData data(problem, call);
  data.args.output = const_cast<void *>(data.args.q);
  Memory workspace(data.WorkspaceBytes());
  ExpectFails([&](mha_error *error) { return data.Run(workspace.data(), workspace.size(), error); },
              {MHA_ERROR_INVALID_VALUE, {1}, {"output is q", "per pair"}});
  EXPECT_TRUE(data.OutputsAreUntouched());
}

}  // namespace
