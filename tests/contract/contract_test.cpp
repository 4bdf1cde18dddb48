// One answer: what the library computes are the bits of the specification (tests/spec), on each
// instruction set, for every way of calling it, at the sizes where kernels change;
// generated_test.cpp has all options together. The number of random cases is multiplied by the
// environment variable MHA_TEST_ROUNDS (1 if not set; may be a fraction).
#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "spec/spec.h"
#include "support/attention_test.h"
#include "support/fixtures.h"
#include "support/instruction_sets.h"
#include "support/interface_support.h"
#include "support/rounds.h"
#include "support/same_bits.h"
#include "support/schedulers.h"
#include "support/specify.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

// Multiplications of a case; larger ones are drawn again, so that the scalar kernels and emulators
// get through.
constexpr int64_t kLargestCase = 500'000;

// Around the lanes of each instruction set, the panels of 48 columns, the tiles, and primes.
int64_t RandomCount(Random *random) {
  return random->Pick<int64_t>({1,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11,  12,  13,  14,
                                15, 16, 17, 18, 19, 23, 24, 25, 29, 31, 32, 33,  37,  41,  47,
                                48, 49, 53, 61, 63, 64, 65, 71, 95, 96, 97, 101, 127, 128, 129});
}

int64_t RandomKeys(Random *random) {
  if (random->Chance(0.5)) return RandomCount(random);
  return random->Pick<int64_t>({0,   191, 192, 193, 239,  240,  241,  254,  255,  256,
                                257, 258, 271, 272, 273,  383,  511,  512,  513,  514,
                                600, 767, 768, 769, 1023, 1024, 1025, 1279, 1281, 2049});
}

int64_t RandomWidth(Random *random) {
  if (random->Chance(0.9)) return RandomCount(random);
  return random->Pick<int64_t>({160, 192, 255, 256, 257, 258, 272, 300});
}

void RandomSizes(Random *random, AttentionSizes *sizes) {
  const int64_t group = random->Pick<int64_t>({1, 1, 1, 2, 3, 4, 5, 8});
  sizes->num_kv_heads = random->Pick<int64_t>({1, 1, 2, 3, 4, 7});
  sizes->num_heads = sizes->num_kv_heads * group;
  sizes->batch = random->Pick<int64_t>({1, 1, 1, 2, 3, 5});
  sizes->n_q = RandomCount(random);
  sizes->n_kv = random->Chance(0.4) ? sizes->n_q : RandomKeys(random);
  sizes->head_dim = RandomWidth(random);
  sizes->head_dim_v = random->Chance(0.6) ? sizes->head_dim : RandomWidth(random);
  if (random->Chance(0.3))
    sizes->scale = random->Pick<float>({1.0f, 0.37f, -0.5f, 3.0f, 1e-3f, 0x1p-140f, 1e30f});
}

// To be drawn when n_q and n_kv are final.
void RandomMask(Random *random, AttentionSizes *sizes) {
  sizes->is_causal = random->Chance(0.6);
  sizes->q_start.clear();
  if (random->Chance(0.5) || (sizes->is_causal && sizes->n_q > sizes->n_kv)) {
    for (int64_t b = 0; b < sizes->batch; b++) {
      const int64_t border = random->Pick<int64_t>(
          {0, 1, sizes->n_kv / 2, 250, 255, 256, sizes->n_kv, sizes->n_kv + 100});
      sizes->q_start.push_back(std::max<int64_t>(0, border + random->Between(-2, 2)));
    }
  }
}

int64_t AttentionCost(const AttentionSizes &sizes) {
  return sizes.batch * sizes.num_heads * sizes.n_q * sizes.n_kv *
         (sizes.head_dim + sizes.head_dim_v);
}

AttentionProblem RandomAttention(Random *random, std::string *kinds) {
  AttentionProblem problem;
  do {
    RandomSizes(random, &problem);
  } while (AttentionCost(problem) > kLargestCase);
  RandomMask(random, &problem);
  const Values q_kind = RandomKind(random), k_kind = RandomKind(random),
               v_kind = RandomKind(random);
  problem.q = RandomValues(random, q_kind,
                           problem.batch * problem.n_q * problem.num_heads * problem.head_dim);
  problem.k = RandomValues(random, k_kind,
                           problem.batch * problem.n_kv * problem.num_kv_heads * problem.head_dim);
  problem.v = RandomValues(
      random, v_kind, problem.batch * problem.n_kv * problem.num_kv_heads * problem.head_dim_v);
  *kinds = std::string(" values ") + NameOf(q_kind) + "," + NameOf(k_kind) + "," + NameOf(v_kind);
  return problem;
}

std::unique_ptr<Scheduler> RandomScheduler(Random *random) {
  if (random->Chance(0.5)) return nullptr;
  const uint32_t num_threads = static_cast<uint32_t>(random->Between(1, 4));
  return std::make_unique<Scheduler>(num_threads,
                                     random->Chance(0.2) ? RunOnThreads : RunBackwards);
}

uint32_t RandomAsked(Random *random) {
  return random->Chance(0.6) ? kAskAll : static_cast<uint32_t>(random->Next()) & kAskAll;
}

AttentionCall RandomCall(Random *random, const Scheduler *scheduler) {
  AttentionCall call;
  call.q = RandomLayout(random, true);
  call.k = RandomLayout(random, true);
  call.v = RandomLayout(random, true);
  call.output = RandomLayout(random, true);
  call.scheduler = scheduler ? scheduler->get() : nullptr;
  call.asked = RandomAsked(random) & ~(kAskQ | kAskK | kAskV);
  call.workspace_fill = random->Pick<unsigned char>({0xff, 0x00, 0x7f});
  call.workspace_misalignment = static_cast<size_t>(random->Between(0, 63));
  return call;
}

std::string Describe(const AttentionCall &call) {
  return "\nq " + Describe(call.q) + "; k " + Describe(call.k) + "; v " + Describe(call.v) +
         "; output " + Describe(call.output) + "; threads " +
         std::to_string(call.scheduler ? call.scheduler->num_threads : 0) + "; asked " +
         std::to_string(call.asked);
}

// ---- The middle stage

class AttentionContract : public AttentionTest {
 protected:
  void ExpectTheSpecification(const AttentionProblem &problem, const AttentionCall &call) {
    EXPECT_TRUE(SameBits(Attend(problem, call), Specify(problem)))
        << Describe(problem) << Describe(call);
  }
};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(AttentionContract);

TEST_P(AttentionContract, RunsOnTheInstructionSetAskedFor) {
  mha_attention_args args = Zeroed<mha_attention_args>();
  args.batch = args.n_q = args.n_kv = args.num_heads = args.head_dim = 1;
  args.instruction_set = instruction_set();
  mha_call_info info = Zeroed<mha_call_info>();
  mha_error error;
  ASSERT_EQ(mha_attention_info(&args, &info, &error), MHA_OK) << error.message;
  EXPECT_EQ(info.instruction_set, instruction_set());
  EXPECT_EQ(info.contract, static_cast<uint32_t>(MHA_CONTRACT));
}

TEST_P(AttentionContract, RandomCasesEqualTheSpecification) {
  for (int64_t n = 0; n < Rounds(400) && !HasFailure(); n++) {
    Random random(1000 + static_cast<uint64_t>(n));
    std::string kinds;
    const AttentionProblem problem = RandomAttention(&random, &kinds);
    const std::unique_ptr<Scheduler> scheduler = RandomScheduler(&random);
    AttentionCall call = RandomCall(&random, scheduler.get());
    call.instruction_set = instruction_set();
    SCOPED_TRACE("case " + std::to_string(n) + kinds);
    ExpectTheSpecification(problem, call);
  }
}

TEST_P(AttentionContract, BordersOfChunksEqualTheSpecification) {
  Random random(2000);
  for (const int64_t n_kv : {255, 256, 257, 511, 512, 513, 767, 768, 769, 1023, 1024, 1025, 1281}) {
    for (const int64_t n_q : {1, 3, 8}) {
      AttentionProblem problem;
      problem.n_q = n_q;
      problem.n_kv = n_kv;
      problem.num_heads = 2;
      problem.num_kv_heads = 1;
      problem.head_dim = 5;
      problem.head_dim_v = 3;
      FillNormal(&random, &problem);
      ExpectTheSpecification(problem, PlainCall());
      problem.is_causal = true;
      ExpectTheSpecification(problem, PlainCall());
      for (const int64_t q_start : {253, 255, 256, 510, 512, 767, 1023}) {
        problem.q_start = {q_start};
        ExpectTheSpecification(problem, PlainCall());
      }
      if (HasFailure()) return;
    }
  }
}

TEST_P(AttentionContract, BordersOfDotBlocksEqualTheSpecification) {
  Random random(2001);
  for (const int64_t head_dim : {255, 256, 257, 300, 511, 512, 513}) {
    for (const int64_t n : {1, 2, 7, 17, 33}) {
      AttentionProblem problem;
      problem.n_q = problem.n_kv = n;
      problem.head_dim = head_dim;
      problem.head_dim_v = head_dim + 1;
      problem.is_causal = true;
      FillNormal(&random, &problem);
      ExpectTheSpecification(problem, PlainCall());
      if (HasFailure()) return;
    }
  }
}

// Every remainder of every tile, in rows, keys and both widths.
TEST_P(AttentionContract, EverySmallSizeEqualsTheSpecification) {
  Random random(2002);
  for (int64_t n = 1; n <= 70 && !HasFailure(); n++) {
    AttentionProblem problem;
    problem.is_causal = n % 2 == 0;
    problem.n_q = n;
    problem.n_kv = 71;
    problem.head_dim = problem.head_dim_v = 19;
    FillNormal(&random, &problem);
    ExpectTheSpecification(problem, PlainCall());
    problem.n_q = 13;
    problem.n_kv = n;
    problem.q_start = {n / 2};
    FillNormal(&random, &problem);
    ExpectTheSpecification(problem, PlainCall());
    problem.n_kv = 21;
    problem.head_dim = n;
    problem.head_dim_v = 71 - n;
    FillNormal(&random, &problem);
    ExpectTheSpecification(problem, PlainCall());
  }
}

// A unit of work has up to 768 rows where keys are brought into form, and fewer with more threads.
TEST_P(AttentionContract, BordersOfUnitsEqualTheSpecification) {
  Random random(2005);
  for (const int64_t n_q : {97, 767, 768, 769}) {
    for (const int64_t num_heads : {1, 3}) {
      AttentionProblem problem;
      problem.n_q = n_q;
      problem.n_kv = 20;
      problem.num_heads = num_heads;
      problem.head_dim = problem.head_dim_v = 5;
      FillNormal(&random, &problem);
      for (const uint32_t num_threads : {1, 2, 5, 64}) {
        const Scheduler scheduler(num_threads, RunBackwards);
        AttentionCall call = PlainCall();
        call.scheduler = scheduler.get();
        ExpectTheSpecification(problem, call);
      }
    }
  }
}

// Large enough for several chunks, blocks of rows and tasks.
AttentionProblem SeveralChunks(int64_t batch) {
  Random random(2004);
  AttentionProblem problem;
  problem.batch = batch;
  problem.n_q = problem.n_kv = 530;
  problem.num_heads = 4;
  problem.num_kv_heads = 2;
  problem.head_dim = 7;
  problem.head_dim_v = 5;
  problem.is_causal = true;
  FillNormal(&random, &problem);
  return problem;
}

TEST_P(AttentionContract, AnySchedulerGivesTheSameBits) {
  for (const int64_t batch : {1, 3}) {
    const AttentionProblem problem = SeveralChunks(batch);
    const Outputs alone = Attend(problem, PlainCall());
    EXPECT_TRUE(SameBits(alone, Specify(problem)));
    for (uint32_t num_threads = 1; num_threads <= 4; num_threads++) {
      for (const auto parallel_for : {RunOnThreads, RunBackwards}) {
        const Scheduler scheduler(num_threads, parallel_for);
        AttentionCall call = PlainCall();
        call.scheduler = scheduler.get();
        EXPECT_TRUE(SameBits(Attend(problem, call), alone)) << Describe(problem) << Describe(call);
      }
    }
  }
}

// ---- The layer

int64_t LayerCost(const LayerProblem &problem) {
  return AttentionCost(problem) +
         problem.batch * (problem.n_q * (problem.query_dim * problem.q_width() +
                                         problem.merged_width() * problem.output_dim) +
                          problem.n_kv * (problem.key_dim * problem.k_width() +
                                          problem.value_dim * problem.v_width()));
}

int64_t RandomInputWidth(Random *random) {
  if (random->Chance(0.7)) return RandomCount(random);
  return random->Pick<int64_t>({160, 192, 255, 256, 257, 258, 300, 511, 512, 513, 769});
}

LayerProblem RandomLayer(Random *random, std::string *kinds) {
  LayerProblem problem;
  do {
    RandomSizes(random, &problem);
    const int64_t sources =
        random->Between(0, 3);  // self-attention twice as often as each other kind
    problem.has_key = sources == 2 || (sources == 3 && random->Chance(0.5));
    problem.has_value = sources == 3;
    if (!problem.has_key) problem.n_kv = problem.n_q;
    problem.query_dim = RandomInputWidth(random);
    problem.key_dim =
        problem.has_key && random->Chance(0.5) ? RandomInputWidth(random) : problem.query_dim;
    problem.value_dim =
        problem.has_value && random->Chance(0.5) ? RandomInputWidth(random) : problem.key_dim;
    problem.output_dim = random->Chance(0.5) ? problem.query_dim : RandomWidth(random);
  } while (LayerCost(problem) > kLargestCase);
  RandomMask(random, &problem);
  const uint32_t biases =
      random->Chance(0.4) ? kAllBiases : static_cast<uint32_t>(random->Between(0, kAllBiases));
  FillNormal(random, biases, random->Chance(0.7), &problem);

  const Values query_kind = RandomKind(random), key_kind = RandomKind(random),
               weight_kind = RandomKind(random);
  problem.query = RandomValues(random, query_kind, static_cast<int64_t>(problem.query.size()));
  problem.key = RandomValues(random, key_kind, static_cast<int64_t>(problem.key.size()));
  problem.value = RandomValues(random, key_kind, static_cast<int64_t>(problem.value.size()));
  if (random->Chance(0.2)) {
    for (std::vector<float> *w :
         {&problem.w_q, &problem.w_k, &problem.w_v, &problem.w_o, &problem.b_q, &problem.b_o}) {
      if (random->Chance(0.3))
        *w = RandomValues(random, weight_kind, static_cast<int64_t>(w->size()), 0.2f);
    }
  }
  *kinds = std::string(" values ") + NameOf(query_kind) + "," + NameOf(key_kind) + "," +
           NameOf(weight_kind);
  return problem;
}

LayerForm RandomForm(Random *random, const LayerProblem &problem) {
  LayerForm form;
  const bool can_fuse =
      problem.key_dim == problem.query_dim && problem.value_dim == problem.query_dim;
  form.form = can_fuse && random->Coin() ? WeightForm::kFused : WeightForm::kThreeMatrices;
  form.layout = random->Chance(0.5) ? MHA_LAYOUT_IN_OUT : MHA_LAYOUT_OUT_IN;
  if (random->Chance(0.4)) form.row_gap = random->Between(1, 20);
  const bool all_biases = !problem.b_q.empty() && !problem.b_k.empty() && !problem.b_v.empty();
  form.fused_biases = all_biases && random->Chance(0.5);
  form.use_defaults = random->Chance(0.5);
  return form;
}

LayerCall RandomLayerCall(Random *random, const Scheduler *scheduler) {
  LayerCall call;
  call.query = RandomLayout(random, false);
  call.key = RandomLayout(random, false);
  call.value = RandomLayout(random, false);
  call.output = RandomLayout(random, false);
  call.scheduler = scheduler ? scheduler->get() : nullptr;
  call.asked = RandomAsked(random);
  call.workspace_fill = random->Pick<unsigned char>({0xff, 0x00, 0x7f});
  call.workspace_misalignment = static_cast<size_t>(random->Between(0, 63));
  return call;
}

std::string Describe(const LayerCall &call) {
  return "\nquery " + Describe(call.query) + "; key " + Describe(call.key) + "; value " +
         Describe(call.value) + "; output " + Describe(call.output) + "; threads " +
         std::to_string(call.scheduler ? call.scheduler->num_threads : 0) + "; asked " +
         std::to_string(call.asked);
}

class LayerContract : public AttentionTest {
 protected:
  void ExpectTheSpecification(const LayerProblem &problem, const LayerForm &form,
                              const LayerCall &call) {
    const Layer layer = MakeLayer(problem, form);
    EXPECT_TRUE(SameBits(Forward(layer.get(), problem, call), Specify(problem)))
        << Describe(problem) << "\n"
        << Describe(form) << Describe(call);
  }
};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(LayerContract);

TEST_P(LayerContract, RandomCasesEqualTheSpecification) {
  for (int64_t n = 0; n < Rounds(400) && !HasFailure(); n++) {
    Random random(4000 + static_cast<uint64_t>(n));
    std::string kinds;
    const LayerProblem problem = RandomLayer(&random, &kinds);
    LayerForm form = RandomForm(&random, problem);
    form.instruction_set = instruction_set();
    const std::unique_ptr<Scheduler> scheduler = RandomScheduler(&random);
    const LayerCall call = RandomLayerCall(&random, scheduler.get());
    SCOPED_TRACE("case " + std::to_string(n) + kinds);
    ExpectTheSpecification(problem, form, call);
  }
}

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
    LayerForm form;
    form.instruction_set = instruction_set();
    const std::unique_ptr<Scheduler> scheduler = RandomScheduler(&random);
    LayerCall call = RandomLayerCall(&random, scheduler.get());
    call.asked = kAskNothing;
    SCOPED_TRACE("case " + std::to_string(n) + " values " + NameOf(kind) + "," +
                 NameOf(weight_kind));
    ExpectTheSpecification(problem, form, call);
  }
}

// Heads of more than 32 columns, whose scores add up in blocks of 32 terms, and scores so large
// that their last bits show.
TEST_P(LayerContract, WideHeadsOfSmallCallsEqualTheSpecification) {
  Random random(5600);
  for (int64_t head_dim = 31; head_dim <= 97 && !HasFailure(); head_dim++) {
    LayerProblem problem;
    problem.batch = 4;
    problem.n_q = problem.n_kv = 2;
    problem.query_dim = problem.key_dim = problem.value_dim = problem.output_dim =
        problem.head_dim = problem.head_dim_v = head_dim;
    problem.scale = 1.0f;
    FillNormal(&random, kNoBiases, true, &problem);
    LayerCall call;
    call.asked = kAskNothing;
    ExpectTheSpecification(problem, PlainForm(), call);
  }
}

TEST_P(LayerContract, BordersOfDotBlocksAndPanelsEqualTheSpecification) {
  Random random(3001);
  for (const int64_t query_dim : {255, 256, 257, 511, 512, 513, 769}) {
    for (const int64_t width : {1, 15, 16, 17, 47, 48, 49, 95, 96, 97}) {
      LayerProblem problem;
      problem.n_q = problem.n_kv = random.Between(1, 10);
      problem.query_dim = problem.key_dim = problem.value_dim = query_dim;
      problem.head_dim = problem.head_dim_v = width;
      problem.output_dim = 5;
      FillNormal(&random, kAllBiases, true, &problem);
      ExpectTheSpecification(problem, PlainForm(), LayerCall());
      if (HasFailure()) return;
    }
  }
}

// A few rows are tiles of as many shapes; panels of 48 columns are not all full.
TEST_P(LayerContract, AnyFewRowsEqualTheSpecification) {
  Random random(3005);
  for (int64_t n = 1; n <= 20; n++) {
    for (const int64_t head_dim : {9, 16, 40}) {
      LayerProblem problem;
      problem.n_q = problem.n_kv = n;
      problem.query_dim = problem.key_dim = problem.value_dim = 260 + n;
      problem.head_dim = problem.head_dim_v = head_dim;
      problem.num_heads = problem.num_kv_heads = 3;
      problem.output_dim = 64 + 7 * n;
      FillNormal(&random, kAllBiases, true, &problem);
      ExpectTheSpecification(problem, PlainForm(), LayerCall());
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
      LayerProblem problem;
      problem.n_q = problem.n_kv = n;
      problem.query_dim = problem.key_dim = problem.value_dim = 260;
      problem.head_dim = problem.head_dim_v = head_dim;
      problem.num_heads = problem.num_kv_heads = 2;
      problem.output_dim = 33;
      FillNormal(&random, kAllBiases, true, &problem);
      const Layer layer = Make(problem);
      const Outputs expected = Specify(problem);
      for (const uint32_t num_threads : {1, 40}) {
        const Scheduler scheduler(num_threads, RunBackwards);
        LayerCall call;
        call.scheduler = scheduler.get();
        EXPECT_TRUE(SameBits(Forward(layer.get(), problem, call), expected))
            << Describe(problem) << Describe(call);
      }
      if (HasFailure()) return;
    }
  }
}

// Every remainder of every tile, in rows, depth and columns of the projections.
TEST_P(LayerContract, EverySmallSizeEqualsTheSpecification) {
  Random random(3002);
  for (int64_t n = 1; n <= 100 && !HasFailure(); n++) {
    for (const int64_t what : {0, 1, 2, 3}) {
      LayerProblem problem;
      problem.n_q = problem.n_kv = what == 0 ? n : 7;
      problem.query_dim = problem.key_dim = problem.value_dim = what == 1 ? n : 11;
      problem.head_dim = what == 2 ? n : 3;
      problem.head_dim_v = what == 2 ? 101 - n : 2;
      problem.output_dim = what == 3 ? n : 13;
      problem.is_causal = true;
      FillNormal(&random, n % 2 == 0 ? kAllBiases : kNoBiases, true, &problem);
      ExpectTheSpecification(problem, PlainForm(), LayerCall());
    }
  }
}

// More rows than one block of them, more columns than one panel, more keys than one chunk.
LayerProblem SeveralBlocks(int64_t batch) {
  Random random(3003);
  LayerProblem problem;
  problem.batch = batch;
  problem.n_q = problem.n_kv = 290;
  problem.query_dim = problem.key_dim = problem.value_dim = 33;
  problem.output_dim = 50;
  problem.num_heads = 4;
  problem.num_kv_heads = 2;
  problem.head_dim = 9;
  problem.head_dim_v = 6;
  problem.is_causal = true;
  FillNormal(&random, kAllBiases, true, &problem);
  return problem;
}

// Between few and many: more than 131072 weights to a matrix, which the second level of a cache may
// not hold.
TEST_P(LayerContract, AnyFewRowsOfMoreWeightsEqualTheSpecification) {
  Random random(3006);
  for (int64_t n = 1; n <= 9; n++) {
    LayerProblem problem;
    problem.batch = n % 2 == 0 ? 2 : 1;
    problem.n_q = problem.n_kv = n / problem.batch;
    problem.query_dim = problem.key_dim = problem.value_dim = 605;
    problem.num_heads = 6;
    problem.num_kv_heads = 3;
    problem.head_dim = 37 + n;
    problem.head_dim_v = 32;
    problem.output_dim = 720 + n;
    FillNormal(&random, kAllBiases, true, &problem);
    ASSERT_GT(problem.query_dim * problem.q_width(), int64_t{1} << 17);
    ExpectTheSpecification(problem, PlainForm(), LayerCall());
  }
}

// So many weights are asked for in other ways: they are more than 2 million to a matrix, with a
// last block of one term.
TEST_P(LayerContract, AnyFewRowsOfManyWeightsEqualTheSpecification) {
  LayerProblem problem;
  problem.n_q = problem.n_kv = 24;
  problem.query_dim = problem.key_dim = problem.value_dim = 2049;
  problem.num_heads = 10;
  problem.head_dim = 103;
  problem.head_dim_v = 5;
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

TEST_P(LayerContract, AnySchedulerGivesTheSameBits) {
  for (const int64_t batch : {1, 2}) {
    const LayerProblem problem = SeveralBlocks(batch);
    const Layer layer = Make(problem);
    const Outputs alone = Forward(layer.get(), problem);
    for (uint32_t num_threads = 1; num_threads <= 4; num_threads++) {
      for (const auto parallel_for : {RunOnThreads, RunBackwards}) {
        const Scheduler scheduler(num_threads, parallel_for);
        LayerCall call;
        call.scheduler = scheduler.get();
        EXPECT_TRUE(SameBits(Forward(layer.get(), problem, call), alone))
            << Describe(problem) << Describe(call);
      }
    }
  }
}

TEST(InPlace, IsRefusedWithOutputsPerPair) {
  AttentionProblem problem;
  problem.n_q = problem.n_kv = 2;
  Random random(1);
  FillNormal(&random, &problem);
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
