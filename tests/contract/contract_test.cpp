// Every kernel matches the specification bit for bit at the sizes where kernels change: remainders
// of tiles, borders of chunks, blocks and units. generated_test.cpp has all options and ways of
// calling, edges_test.cpp what is too large or too rare for it.
#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "support/attention_test.h"
#include "support/interface_support.h"
#include "support/rounds.h"
#include "support/schedulers.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

// Sizes of one sequence.
AttentionProblem Sizes(int64_t n_q, int64_t n_kv, int64_t num_heads, int64_t num_kv_heads,
                       int64_t head_dim, int64_t head_dim_v) {
  AttentionProblem problem;
  problem.n_q = n_q;
  problem.n_kv = n_kv;
  problem.num_heads = num_heads;
  problem.num_kv_heads = num_kv_heads;
  problem.head_dim = head_dim;
  problem.head_dim_v = head_dim_v;
  return problem;
}

// Those of a layer in self-attention.
LayerProblem LayerSizes(int64_t n, int64_t dim, int64_t num_heads, int64_t num_kv_heads,
                        int64_t head_dim, int64_t head_dim_v, int64_t output_dim) {
  LayerProblem problem;
  static_cast<AttentionSizes &>(problem) =
      Sizes(n, n, num_heads, num_kv_heads, head_dim, head_dim_v);
  problem.query_dim = problem.key_dim = problem.value_dim = dim;
  problem.output_dim = output_dim;
  return problem;
}

// ---- The middle stage

class AttentionContract : public AttentionTest {};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(AttentionContract);

TEST_P(AttentionContract, RunsOnTheInstructionSetAskedFor) {
  mha_attention_args args = Zeroed<mha_attention_args>();
  args.call.batch = args.call.n_q = args.call.n_kv = args.num_heads = args.head_dim = 1;
  args.instruction_set = instruction_set();
  mha_call_info info = Zeroed<mha_call_info>();
  mha_error error;
  ASSERT_EQ(mha_attention_info(&args, &info, &error), MHA_OK) << error.message;
  EXPECT_EQ(info.instruction_set, instruction_set());
  EXPECT_EQ(info.contract, static_cast<uint32_t>(MHA_CONTRACT));
}

TEST_P(AttentionContract, BordersOfChunksEqualTheSpecification) {
  Random random(2000);
  for (const int64_t n_kv : {255, 256, 257, 511, 512, 513, 767, 768, 769, 1023, 1024, 1025, 1281}) {
    for (const int64_t n_q : {1, 3, 8}) {
      AttentionProblem problem = Sizes(n_q, n_kv, 2, 1, 5, 3);
      FillNormal(&random, &problem);
      ExpectTheSpecification(problem);
      problem.is_causal = true;
      ExpectTheSpecification(problem);
      for (const int64_t q_start : {253, 255, 256, 510, 512, 767, 1023}) {
        problem.q_start = {q_start};
        ExpectTheSpecification(problem);
      }
      if (HasFailure()) return;
    }
  }
}

TEST_P(AttentionContract, BordersOfDotBlocksEqualTheSpecification) {
  Random random(2001);
  for (const int64_t head_dim : {255, 256, 257, 300, 511, 512, 513}) {
    for (const int64_t n : {1, 2, 7, 17, 33}) {
      AttentionProblem problem = Sizes(n, n, 1, 1, head_dim, head_dim + 1);
      problem.is_causal = true;
      FillNormal(&random, &problem);
      ExpectTheSpecification(problem);
      if (HasFailure()) return;
    }
  }
}

// Every remainder of every tile, in rows, keys and both widths.
TEST_P(AttentionContract, EverySmallSizeEqualsTheSpecification) {
  Random random(2002);
  for (int64_t n = 1; n <= 70 && !HasFailure(); n++) {
    for (AttentionProblem problem :
         {Sizes(n, 71, 1, 1, 19, 19), Sizes(13, n, 1, 1, 19, 19), Sizes(13, 21, 1, 1, n, 71 - n)}) {
      problem.is_causal = n % 2 == 0;
      if (problem.n_q == 13) problem.q_start = {n / 2};
      FillNormal(&random, &problem);
      ExpectTheSpecification(problem);
    }
  }
}

// Few rows over keys and values of the caller, which lie side by side for all kv heads: units have
// several of these heads, and take 16 positions of all of them at a time.
TEST_P(AttentionContract, GroupsOfKvHeadsEqualTheSpecification) {
  Random random(2006);
  const Scheduler scheduler(3, RunBackwards);
  const struct {
    int64_t n_q, heads_per_kv, kv_heads, head_dim, head_dim_v;
  } sizes[] = {{1, 1, 2, 4, 16},   {1, 3, 3, 64, 64}, {2, 1, 33, 36, 5}, {1, 4, 8, 128, 16},
               {2, 2, 13, 12, 48}, {3, 1, 5, 40, 32}, {5, 1, 4, 8, 16},  {2, 4, 9, 16, 17}};
  for (const auto &size : sizes) {
    for (const int64_t n_kv : {1, 16, 37, 256, 275, 1290}) {
      AttentionProblem problem = Sizes(size.n_q, n_kv, size.heads_per_kv * size.kv_heads,
                                       size.kv_heads, size.head_dim, size.head_dim_v);
      problem.is_causal = n_kv > 16 && n_kv % 2 != 0;
      if (problem.is_causal) problem.q_start = {n_kv - size.n_q};
      FillNormal(&random, &problem);
      AttentionCall call = PlainCall();
      call.k_array = random.Pick({Storage::kF32, Storage::kF16, Storage::kBf16});
      call.v_array = random.Pick({Storage::kF32, Storage::kF16, Storage::kBf16});
      call.k = random.Pick({kDense, kGaps});
      call.v = random.Pick({kDense, kGaps});
      problem.k = Rounded(call.k_array, problem.k);
      problem.v = Rounded(call.v_array, problem.v);
      if (random.Coin()) problem.v.back() = std::numeric_limits<float>::infinity();
      const Outputs expected = Specify(problem);
      for (const mha_scheduler *const threads : {call.scheduler, scheduler.get()}) {
        call.scheduler = threads;
        EXPECT_TRUE(SameBits(Attend(problem, call), expected)) << Describe(problem);
      }
    }
  }
}

// A unit of work has up to 768 rows where keys are brought into form, and fewer with more threads.
TEST_P(AttentionContract, BordersOfUnitsEqualTheSpecification) {
  Random random(2005);
  for (const int64_t n_q : {97, 767, 768, 769}) {
    for (const int64_t num_heads : {1, 3}) {
      AttentionProblem problem = Sizes(n_q, 20, num_heads, 1, 5, 5);
      FillNormal(&random, &problem);
      const Outputs expected = Specify(problem);
      for (const uint32_t num_threads : {1, 2, 5, 64}) {
        const Scheduler scheduler(num_threads, RunBackwards);
        AttentionCall call = PlainCall();
        call.scheduler = scheduler.get();
        EXPECT_TRUE(SameBits(Attend(problem, call), expected)) << Describe(problem);
      }
    }
  }
}

// Large enough for several chunks, blocks of rows and tasks.
TEST_P(AttentionContract, AnySchedulerGivesTheSameBits) {
  Random random(2004);
  for (const int64_t batch : {1, 3}) {
    AttentionProblem problem = Sizes(530, 530, 4, 2, 7, 5);
    problem.batch = batch;
    problem.is_causal = true;
    FillNormal(&random, &problem);
    const Outputs alone = Attend(problem, PlainCall());
    EXPECT_TRUE(SameBits(alone, Specify(problem)));
    for (uint32_t num_threads = 1; num_threads <= 4; num_threads++) {
      for (const auto parallel_for : {RunOnThreads, RunBackwards}) {
        const Scheduler scheduler(num_threads, parallel_for);
        AttentionCall call = PlainCall();
        call.scheduler = scheduler.get();
        EXPECT_TRUE(SameBits(Attend(problem, call), alone))
            << Describe(problem) << " " << num_threads << " threads";
      }
    }
  }
}

// ---- The layer

class LayerContract : public AttentionTest {};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(LayerContract);

// Calls of few rows of a narrow layer with nothing but y asked for, which one function computes as
// a whole; and some just too large for it.
TEST_P(LayerContract, RandomSmallCallsEqualTheSpecification) {
  const auto close_to = [](Random *random, int64_t border) {
    return random->Between(border - 1, border + 1);
  };
  for (int64_t n = 0; n < Rounds(600) && !HasFailure(); n++) {
    Random random(5000 + static_cast<uint64_t>(n));
    LayerProblem problem;
    do {
      problem.num_kv_heads = random.Between(1, 5);
      problem.num_heads = problem.num_kv_heads * random.Between(1, 3);
      problem.head_dim = random.Chance(0.2) ? random.Between(18, 97) : random.Between(1, 17);
      problem.head_dim_v = random.Chance(0.5)   ? problem.head_dim
                           : random.Chance(0.2) ? random.Between(18, 97)
                                                : random.Between(1, 17);
    } while (std::max(problem.q_width(), problem.merged_width()) > 97);
    problem.batch = random.Between(1, 3);
    problem.n_q = problem.n_kv = random.Chance(0.4) ? random.Between(1, 3) : random.Between(1, 17);
    problem.query_dim = problem.key_dim = problem.value_dim =
        random.Chance(0.2) ? close_to(&random, 96) : random.Between(1, 96);
    problem.output_dim = random.Chance(0.2) ? close_to(&random, 96) : random.Between(1, 96);
    problem.is_causal = random.Chance(0.5);
    if (random.Chance(0.3)) problem.scale = random.Pick<float>({1.0f, -0.5f, 1e-3f, 1e30f});
    FillNormal(&random, static_cast<uint32_t>(random.Between(0, kAllBiases)), random.Chance(0.8),
               &problem);
    const Values kind = RandomKind(&random), weight_kind = RandomKind(&random);
    problem.query = RandomValues(&random, kind, static_cast<int64_t>(problem.query.size()));
    for (std::vector<float> *w : {&problem.w_q, &problem.w_k, &problem.w_v, &problem.w_o,
                                  &problem.b_k, &problem.b_v, &problem.b_o}) {
      if (random.Chance(0.05))
        *w = RandomValues(&random, weight_kind, static_cast<int64_t>(w->size()), 0.2f);
    }
    const Scheduler scheduler(static_cast<uint32_t>(random.Between(1, 4)),
                              random.Chance(0.2) ? RunOnThreads : RunBackwards);
    LayerCall call;
    call.query = RandomLayout(&random, false);
    call.output = RandomLayout(&random, false);
    call.scheduler = random.Coin() ? scheduler.get() : nullptr;
    call.asked = kAskNothing;
    call.workspace_fill = random.Pick<unsigned char>({0xff, 0x00, 0x7f});
    call.workspace_misalignment = static_cast<size_t>(random.Between(0, 63));
    problem.is_in_integers = random.Chance(0.1);  // which that function leaves to others
    if (problem.is_in_integers) problem.k_type = problem.v_type = Storage::kInt8;
    const Layer layer = Make(problem);
    EXPECT_TRUE(SameBits(Forward(layer.get(), problem, call).y, Specify(problem).y))
        << "case " << n << " values " << NameOf(kind) << "," << NameOf(weight_kind) << " "
        << Describe(problem) << " query " << Describe(call.query) << " output "
        << Describe(call.output);
  }
}

// Heads of more than 32 columns, whose scores add up in blocks of 32 terms, and scores so large
// that their last bits show.
TEST_P(LayerContract, WideHeadsOfSmallCallsEqualTheSpecification) {
  Random random(5600);
  for (int64_t head_dim = 31; head_dim <= 97 && !HasFailure(); head_dim++) {
    LayerProblem problem = LayerSizes(2, head_dim, 1, 1, head_dim, head_dim, head_dim);
    problem.batch = 4;
    problem.scale = 1.0f;
    FillNormal(&random, kNoBiases, true, &problem);
    ExpectTheSpecification(problem);
  }
}

TEST_P(LayerContract, BordersOfDotBlocksAndPanelsEqualTheSpecification) {
  Random random(3001);
  for (const int64_t query_dim : {255, 256, 257, 511, 512, 513, 769}) {
    for (const int64_t width : {1, 15, 16, 17, 47, 48, 49, 95, 96, 97}) {
      LayerProblem problem = LayerSizes(random.Between(1, 10), query_dim, 1, 1, width, width, 5);
      FillNormal(&random, kAllBiases, true, &problem);
      ExpectTheSpecification(problem);
      if (HasFailure()) return;
    }
  }
}

// A few rows are tiles of as many shapes; panels of 48 columns are not all full.
TEST_P(LayerContract, AnyFewRowsEqualTheSpecification) {
  Random random(3005);
  for (int64_t n = 1; n <= 20; n++) {
    for (const int64_t head_dim : {9, 16, 40}) {
      LayerProblem problem = LayerSizes(n, 260 + n, 3, 3, head_dim, head_dim, 64 + 7 * n);
      FillNormal(&random, kAllBiases, true, &problem);
      ExpectTheSpecification(problem);
    }
    if (HasFailure()) return;
  }
}

// Input rows pass under the weights in blocks of up to 144, smaller ones with more threads, in
// tiles that are as full as can be, one block of 256 terms after the other. Heads of 16 and 48 go
// straight to where they are wanted, those of 20 do not.
TEST_P(LayerContract, BordersOfRowBlocksEqualTheSpecification) {
  Random random(3004);
  Sample sample;
  for (const int64_t n : {104, 105, 143, 144, 145, 146, 151, 289}) {
    for (const int64_t head_dim : {16, 20, 48}) {
      if (!sample.Takes()) continue;
      LayerProblem problem = LayerSizes(n, 260, 2, 2, head_dim, head_dim, 33);
      FillNormal(&random, kAllBiases, true, &problem);
      const Layer layer = Make(problem);
      const Outputs expected = Specify(problem);
      for (const uint32_t num_threads : {1, 40}) {
        const Scheduler scheduler(num_threads, RunBackwards);
        LayerCall call;
        call.scheduler = scheduler.get();
        EXPECT_TRUE(SameBits(Forward(layer.get(), problem, call), expected))
            << Describe(problem) << " " << num_threads << " threads";
      }
      if (HasFailure()) return;
    }
  }
}

// Every remainder of every tile, in rows, depth and columns of the projections.
TEST_P(LayerContract, EverySmallSizeEqualsTheSpecification) {
  Random random(3002);
  for (int64_t n = 1; n <= 100 && !HasFailure(); n++) {
    for (LayerProblem problem :
         {LayerSizes(n, 11, 1, 1, 3, 2, 13), LayerSizes(7, n, 1, 1, 3, 2, 13),
          LayerSizes(7, 11, 1, 1, n, 101 - n, 13), LayerSizes(7, 11, 1, 1, 3, 2, n)}) {
      problem.is_causal = true;
      FillNormal(&random, n % 2 == 0 ? kAllBiases : kNoBiases, true, &problem);
      ExpectTheSpecification(problem);
    }
  }
}

// Between few and many: more than 131072 weights to a matrix, which the second level of a cache may
// not hold.
TEST_P(LayerContract, AnyFewRowsOfMoreWeightsEqualTheSpecification) {
  Random random(3006);
  for (int64_t n = 1; n <= 9; n++) {
    const int64_t batch = n % 2 == 0 ? 2 : 1;
    LayerProblem problem = LayerSizes(n / batch, 605, 6, 3, 37 + n, 32, 720 + n);
    problem.batch = batch;
    FillNormal(&random, kAllBiases, true, &problem);
    ASSERT_GT(problem.query_dim * problem.q_width(), int64_t{1} << 17);
    ExpectTheSpecification(problem);
  }
}

// Matrices of more than 2 million weights are prefetched in other ways. The last block has one
// term.
TEST_P(LayerContract, AnyFewRowsOfManyWeightsEqualTheSpecification) {
  LayerProblem problem = LayerSizes(24, 2049, 10, 1, 103, 5, 1);
  problem.is_causal = true;
  Random random(3004);
  FillNormal(&random, kAllBiases, true, &problem);
  ASSERT_GT(problem.query_dim * problem.q_width(), int64_t{2} << 20);
  const Layer layer = Make(problem);
  const Outputs whole = Forward(layer.get(), problem);
  EXPECT_TRUE(SameBits(whole, Specify(problem)));
  int cases = 0;
  for (const int64_t n : {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 20}) {
    for (const uint32_t num_threads : {1, 2, 40}) {  // of several threads, each has a few panels
      const bool is_of_few = cases / 3 % 3 == cases % 3;
      cases++;
      if (support::RoundsFactor() < 1 && !is_of_few)
        continue;  // of an emulated build, one number of threads to a number of rows
      const Scheduler scheduler(num_threads, RunBackwards);
      LayerCall call;
      call.scheduler = num_threads > 1 ? scheduler.get() : nullptr;
      EXPECT_TRUE(SameBits(Forward(layer.get(), Slice(problem, 0, 0, n, n), call),
                           Slice(whole, problem, problem.y_width(), 0, 0, n, n)))
          << n << " rows, " << num_threads << " threads";
    }
  }
}

// More rows than one block of them, more columns than one panel, more keys than one chunk.
TEST_P(LayerContract, AnySchedulerGivesTheSameBits) {
  Random random(3003);
  for (const int64_t batch : {1, 2}) {
    LayerProblem problem = LayerSizes(290, 33, 4, 2, 9, 6, 50);
    problem.batch = batch;
    problem.is_causal = true;
    FillNormal(&random, kAllBiases, true, &problem);
    const Layer layer = Make(problem);
    const Outputs alone = Forward(layer.get(), problem);
    for (uint32_t num_threads = 1; num_threads <= 4; num_threads++) {
      for (const auto parallel_for : {RunOnThreads, RunBackwards}) {
        const Scheduler scheduler(num_threads, parallel_for);
        LayerCall call;
        call.scheduler = scheduler.get();
        EXPECT_TRUE(SameBits(Forward(layer.get(), problem, call), alone))
            << Describe(problem) << " " << num_threads << " threads";
      }
    }
  }
}

TEST(InPlace, IsRefusedWithOutputsPerPair) {
  const AttentionProblem problem = NormalAttention(Sizes(2, 2, 1, 1, 1, 1));
  AttentionCall call;
  call.asked = kAskWeights;
  AttentionData data(problem, call);
  data.args.output.data = const_cast<void *>(data.args.q.data);
  Memory workspace(data.WorkspaceBytes());
  ExpectFails([&](mha_error *error) { return data.Run(workspace.data(), workspace.size(), error); },
              {MHA_ERROR_INVALID_VALUE, {1}, {"output.data is q.data", "per pair"}});
  EXPECT_TRUE(data.OutputsAreUntouched());
}

}  // namespace
