// The memory of a call: it uses exactly the bytes that the queries return, makes no allocation and
// no system call, and any number of threads may use a layer.

#include <errno.h>
#include <limits.h>

#include <atomic>
#include <deque>
#include <thread>

#include "interface/calls.h"
#include "support/choice.h"
#include "support/instruction_sets.h"
#include "support/packed_sequences.h"
#include "support/recording_allocator.h"
#include "support/rounds.h"
#include "support/schedulers.h"
#include "support/stack.h"
#include "support/traps.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

// ---- Problems

// Widths around the kernels' vectors and panels (16, 48) and the blocks of the sums (256).
const std::vector<int64_t> kWidths = {1,  2,  3,  5,  7,  8,  9,  15, 16,
                                      17, 31, 33, 47, 48, 49, 64, 65, 97};
const std::vector<int64_t> kLengths = {1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 24, 25, 31, 33, 48, 65};

LayerProblem RandomSizes(Random &random) {
  LayerProblem sizes;
  sizes.batch = random.Between(1, 3);
  sizes.n_q = random.Pick(kLengths);
  sizes.n_kv = random.Below(8) == 0 ? random.Between(255, 258) : random.Pick(kLengths);
  sizes.query_dim = random.Below(8) == 0 ? random.Between(255, 258) : random.Pick(kWidths);
  sizes.key_dim = random.Pick(kWidths);
  sizes.value_dim = random.Pick(kWidths);
  sizes.output_dim = random.Pick(kWidths);
  sizes.num_kv_heads = random.Between(1, 3);
  sizes.num_heads = sizes.num_kv_heads * random.Between(1, 3);
  sizes.head_dim = random.Pick(kWidths);
  sizes.head_dim_v = random.Pick(kWidths);
  sizes.has_key = sizes.has_value = true;
  sizes.is_causal = random.Coin();
  if (random.Coin() || (sizes.is_causal && sizes.n_q > sizes.n_kv))
    sizes.q_start = Starts(sizes.batch);
  return sizes;
}

// A causal call of n_q queries and n_kv keys.
LayerProblem Causal(LayerProblem sizes, int64_t n_q, int64_t n_kv) {
  sizes.n_q = n_q;
  sizes.n_kv = n_kv;
  sizes.is_causal = true;
  return NormalLayer(sizes);
}

// ---- Nothing is read or written beside what was given

class GuardPages : public InstructionSetTest {
 protected:
  // Weights, packed weights, inputs, outputs and workspace all lie next to inaccessible pages, and
  // what the call may only read is in read-only memory. The bits are those of the scalar kernels.
  void ExpectNotTouched(const LayerProblem &problem, const LayerForm &form, uint32_t asked,
                        const Layout &layout) {
    SCOPED_TRACE(Describe(problem) + " " + Describe(form) + " " + Describe(layout) + " asked " +
                 std::to_string(asked));
    Outputs expected;
    for (const Place place : {Place::kBeforeGuard, Place::kAfterGuard}) {
      LayerData layer_data(problem, place, form);
      layer_data.Freeze();
      Memory packed = layer_data.Pack(nullptr, 0xCC, place);
      packed.Freeze();
      const mha_layer_options scalar_options = Options(MHA_INSTRUCTION_SET_SCALAR),
                              options = Options(instruction_set());
      const View scalar(packed, &scalar_options), view(packed, &options);
      ASSERT_EQ(scalar.status, MHA_OK) << scalar.error.message;
      ASSERT_EQ(view.status, MHA_OK) << view.error.message;
      ForwardData data(scalar.layer, problem,
                       {Guarded(asked, place), layout, layout, layout, layout});
      data.FreezeInputs();
      if (place == Place::kBeforeGuard) expected = data.Compute();
      data.layer = view.layer;
      EXPECT_TRUE(SameBits(data.Compute(0xFF, place), expected))
          << (place == Place::kBeforeGuard ? "before" : "after") << " a guard page";
    }
  }
};

// (mha_attention runs next to guard pages in a quarter of the generated calls.)
TEST_P(GuardPages, AreNotTouchedByForward) {
  Random random(21);
  for (int i = 0; i < Rounds(60) && !HasFailure(); ++i) {
    const LayerProblem sizes = RandomSizes(random);
    const uint32_t biases = random.Coin() ? kAllBiases : kNoBiases;
    const uint32_t asked =
        random.Coin() ? kAskNothing : static_cast<uint32_t>(random.Below(kAskAll + 1));
    ExpectNotTouched(NormalLayer(sizes, random.Next(), biases, random.Below(4) != 0), {}, asked,
                     random.Pick({kDense, kHeadsOutside, kRowsOutside, kGaps}));
  }
}

// A separate function computes few rows of a narrow layer.
TEST_P(GuardPages, AreNotTouchedBySmallCalls) {
  // Queries fill two panels, keys and values one; the weights and biases end with these.
  ExpectNotTouched(NormalLayer(OfItself(SquareSizes(24, 4, 1, 24), 2), 1, kAllBiases, false), {},
                   kAskNothing, kDense);
  Random random(24);
  for (int i = 0; i < Rounds(100) && !HasFailure(); ++i) {
    LayerProblem sizes =
        SquareSizes(random.Between(1, 96), random.Between(1, 4), 1, random.Between(1, 24));
    sizes.head_dim_v = random.Between(1, 24);
    sizes.output_dim = random.Between(1, 96);
    sizes.batch = random.Between(1, 3);
    sizes.is_causal = random.Coin();
    sizes = OfItself(sizes, random.Between(1, 16));
    const uint32_t biases = random.Coin() ? kAllBiases : kNoBiases;
    ExpectNotTouched(NormalLayer(sizes, random.Next(), biases, random.Below(4) != 0), {},
                     kAskNothing, kDense);
  }
}

// The last matrix of a packed layer ends near the guard page, and so do the scales and biases after
// it: those of the output or, without it, those of the values. The matrices are so deep that one
// panel too many reaches beyond the end. Their columns fill panels of 48 or do not.
TEST_P(GuardPages, AreNotTouchedBehindWeightsOfAnyType) {
  const struct { int64_t depth, columns; } matrices[] = {{300, 40}, {300, 96}, {320, 97}};
  for (const Stored type :
       {Stored::kF32, Stored::kF16, Stored::kBf16, Stored::kInt8, Stored::kInt4}) {
    LayerForm form;
    form.weight_type = type;
    for (const auto &matrix : matrices) {
      for (const bool has_output : {true, false}) {
        LayerProblem sizes = SquareSizes(has_output ? 5 : matrix.depth, 1, 1, 4);
        sizes.batch = 1;
        sizes.head_dim_v = has_output ? matrix.depth : matrix.columns;
        sizes.output_dim = matrix.columns;
        for (const int64_t rows : {1, 2, 3, 5, 6, 8, 13, 25}) {
          ExpectNotTouched(NormalLayer(OfItself(sizes, rows), 1, kAllBiases, has_output), form,
                           kAskNothing, kDense);
          if (HasFailure()) return;
        }
      }
    }
  }
}

// Tasks have slices of the workspace, which is exactly as large as the query says for any number of
// threads.
TEST_P(GuardPages, AreNotTouchedByManyTasks) {
  const LayerProblem problem = Causal(SmallSizes(), 37, 41);
  const Layer layer = Create(LayerData(problem), instruction_set());
  ForwardData forward(layer.get(), problem, {Guarded(kAskAll)});
  const Outputs expected_forward = forward.Compute();
  AttentionData attention(NormalAttention(problem), {Guarded(kAskAll), instruction_set()});
  const Outputs expected_attention = attention.Compute();
  for (uint32_t num_threads : {1u, 2u, 3u, 7u, 64u, 1000u}) {
    SCOPED_TRACE(num_threads);
    SerialScheduler scheduler(num_threads);
    for (Place place : {Place::kBeforeGuard, Place::kAfterGuard}) {
      forward.SetScheduler(&scheduler.scheduler);
      EXPECT_TRUE(SameBits(forward.Compute(0xFF, place), expected_forward));
      attention.SetScheduler(&scheduler.scheduler);
      EXPECT_TRUE(SameBits(attention.Compute(0xFF, place), expected_attention));
    }
    EXPECT_LE(scheduler.most_tasks, num_threads);
  }
}

MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(GuardPages);

// Runs the call with its arguments, inputs and all structs they point at in read-only memory.
template <typename Args, typename Run>
void ExpectArgumentsAreOnlyRead(CallData *data, Args *args, const Run &run) {
  std::deque<Memory> kept;
  const auto freeze = [&](auto *given) {
    const Memory &memory = kept.emplace_back(sizeof *given);
    std::memcpy(memory.data(), given, sizeof *given);
    kept.back().Freeze();
    return reinterpret_cast<decltype(given)>(memory.data());
  };
  data->FreezeInputs();
  SerialScheduler scheduler(2);
  args->scheduler = freeze(&scheduler.scheduler);
  args->outputs = freeze(&data->outputs);
  args->sequences = freeze(&data->sequences);
  const Memory workspace(data->WorkspaceBytes());
  mha_error error;
  EXPECT_EQ(run(freeze(args), workspace, &error), MHA_OK) << error.message;
}

TEST(Arguments, AreOnlyRead) {
  const LayerProblem problem = SmallLayer();
  const Layer layer = Create(LayerData(problem));
  ForwardData forward(layer.get(), problem, {Guarded(kAskAll)});
  ExpectArgumentsAreOnlyRead(
      &forward, &forward.args,
      [&](const mha_forward_args *args, const Memory &workspace, mha_error *error) {
        return mha_forward(layer.get(), args, workspace.data(), workspace.size(), error);
      });
  AttentionData attention(NormalAttention(problem), {Guarded(kAskAll)});
  ExpectArgumentsAreOnlyRead(
      &attention, &attention.args,
      [](const mha_attention_args *args, const Memory &workspace, mha_error *error) {
        return mha_attention(args, workspace.data(), workspace.size(), error);
      });
}

TEST(Arguments, AreReusableForAnyNumberOfCalls) {
  FullForward call;
  const mha_forward_args before = call.args;
  const Outputs first = call.data.Compute();
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(SameBits(call.data.Compute(), first));
  EXPECT_EQ(std::memcmp(&before, &call.args, sizeof before), 0);
}

// ---- The workspace

// Calls function(data) for all entries and kinds of calls, with all optional outputs and with none.
template <typename Function>
void ForEachCall(uint32_t instruction_set, const Function &function) {
  const LayerProblem problem = Causal(SmallSizes(), 19, 270),  // two chunks
      of_itself = Causal(OfItself(SquareSizes(24, 3, 3, 8), 19), 19, 19),
                     of_few_rows = Causal(OfItself(SquareSizes(24, 3, 3, 8), 5), 5, 5);
  LayerProblem sizes = SmallSizes();
  sizes.batch = 1;
  const LayerProblem together = Causal(sizes, 19, 270);
  sizes.num_kv_heads = 1;
  const LayerProblem indexed = Causal(sizes, 19, 270);
  const PackedSequences sequences = {{0, 3, 3, 4, 19}, {0, 3, 7, 8, 270}, {}};
  const Layer layer = Create(LayerData(problem), instruction_set),
              plain = Create(LayerData(of_itself), instruction_set);
  SerialScheduler scheduler(3);
  for (bool everything : {false, true}) {
    for (bool threads : {false, true}) {
      SCOPED_TRACE(std::string(everything ? "all outputs" : "one output") +
                   (threads ? ", 3 tasks" : ""));
      CallForm form = Guarded(everything ? kAskAll : kAskNothing);
      ForwardData small(plain.get(), of_few_rows, {form});
      function(small);
      if (threads) form.scheduler = &scheduler.scheduler;
      ForwardData forward(layer.get(), problem, {form}), self(plain.get(), of_itself, {form});
      function(forward);
      function(self);
      AttentionData attention(NormalAttention(problem), {form, instruction_set});
      function(attention);
      for (const int64_t block : {1, 16}) {
        AttentionProblem choosy = NormalAttention(problem);
        choosy.score = ScoreArrays();
        choosy.score->chosen_block = block;
        choosy.score->chosen.columns = 16;
        for (int64_t i = 0; i < problem.n_q * 16; i++)
          choosy.score->chosen.values.push_back(static_cast<int32_t>(i * 7 % 271 / block) - 1);
        AttentionCall call = {form, instruction_set};
        call.asked = everything ? kAskLse : kAskNothing;  // the others have a column for each key
        AttentionData chosen(choosy, call);
        function(chosen);
      }
      PackedData<ForwardData> packed_forward(sequences, layer.get(), together, LayerCall{form});
      function(packed_forward);
      PackedData<AttentionData> packed_attention(sequences, NormalAttention(together),
                                                 AttentionCall{form, instruction_set});
      function(packed_attention);
      ChoiceProblem choice;
      static_cast<AttentionProblem &>(choice) = NormalAttention(indexed);
      choice.weights = Random(5).Normals(indexed.batch * indexed.n_q * indexed.num_heads);
      choice.num_chosen = 50;
      ChoiceData choosing(choice, {form, instruction_set}, 1);
      function(choosing);
    }
  }
}

class Workspace : public InstructionSetTest {};

TEST_P(Workspace, ContentsAndSizeDoNotChangeResults) {
  ForEachCall(instruction_set(), [](CallData &data) {
    const Outputs poisoned = data.Compute(0xFF);
    for (int fill : {0x00, 0x7F, 0x3F}) EXPECT_TRUE(SameBits(data.Compute(fill), poisoned)) << fill;
    const Memory larger(data.WorkspaceBytes() + 12345);
    data.PoisonOutputs();
    EXPECT_EQ(data.Run(larger.data(), larger.size(), nullptr), MHA_OK);
    EXPECT_TRUE(SameBits(data.Results(), poisoned));
  });
}

TEST_P(Workspace, MayHaveAnyAlignment) {
  Sample sample;
  ForEachCall(instruction_set(), [&](CallData &data) {
    const Outputs expected = data.Compute();
    const size_t bytes = data.WorkspaceBytes();
    for (size_t offset = 0; offset <= 64; ++offset) {
      if (!sample.Takes()) continue;
      // Canaries on both sides: for most offsets neither end is next to a page.
      Memory memory(bytes + 128, Place::kAfterGuard);
      memory.Fill(0xA7);
      std::memset(memory.data() + offset, 0xFF, bytes);
      data.PoisonOutputs();
      mha_error error;
      ASSERT_EQ(data.Run(memory.data() + offset, bytes, &error), MHA_OK) << error.message;
      EXPECT_TRUE(SameBits(data.Results(), expected)) << offset;
      std::memset(memory.data() + offset, 0xA7, bytes);
      ASSERT_TRUE(memory.Holds(0xA7))
          << "something was written beside the workspace, at alignment " << offset;
    }
  });
}

MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(Workspace);

// ---- The workspace queries

// Points every data pointer at memory that must not be touched.
struct ForbiddenData {
  ForbiddenData() : page(64) { page.Forbid(); }
  float *floats() const { return page.floats(); }
  const int64_t *positions() const { return reinterpret_cast<const int64_t *>(page.data()); }
  Memory page;
};

// The sizes that a query's answer must not shrink with.
struct QuerySizes {
  int64_t batch, n_q, n_kv;
  uint32_t num_threads;
  uint32_t asked;
};

std::ostream &operator<<(std::ostream &stream, const QuerySizes &s) {
  return stream << "batch " << s.batch << " n_q " << s.n_q << " n_kv " << s.n_kv << " num_threads "
                << s.num_threads << " asked " << s.asked;
}

// How a query is asked, the same for both calls that are compared.
struct QueryKind {
  bool key, value, is_causal;
};

mha_outputs Asked(uint32_t asked, float *data) {
  mha_outputs outputs = Zeroed<mha_outputs>();
  const std::pair<uint32_t, float **> all[] = {{kAskLse, &outputs.lse},
                                               {kAskWeights, &outputs.attention_weights},
                                               {kAskQ, &outputs.q},
                                               {kAskK, &outputs.k},
                                               {kAskV, &outputs.v},
                                               {kAskScores, &outputs.scores},
                                               {kAskScaledScores, &outputs.scaled_scores},
                                               {kAskMaskedScores, &outputs.masked_scores},
                                               {kAskContext, &outputs.context}};
  for (const auto &[bit, output] : all) *output = (asked & bit) != 0 ? data : nullptr;
  return outputs;
}

// Gives the arguments of a query what it asks for, with pointers to forbidden memory.
template <typename Args, typename Query>
size_t QueryWith(Args args, const QuerySizes &sizes, const QueryKind &kind,
                 const ForbiddenData &data, const Query &query) {
  SerialScheduler scheduler(sizes.num_threads);
  const mha_outputs outputs = Asked(sizes.asked, data.floats());
  mha_sequences sequences = Zeroed<mha_sequences>();
  sequences.q_first_positions = data.positions();
  args.batch = ExtentOf(sizes.batch);
  args.n_q = ExtentOf(sizes.n_q);
  args.n_kv = ExtentOf(!kind.key && kind.value ? sizes.n_q : sizes.n_kv);  // of queries as keys
  args.output.data = data.floats();
  args.flags = kind.is_causal ? MHA_CAUSAL : 0;
  args.sequences = &sequences;
  if (sizes.asked != kAskNothing) args.outputs = &outputs;
  if (sizes.num_threads > 0) args.scheduler = &scheduler.scheduler;
  size_t bytes = 0;
  mha_error error;
  EXPECT_EQ(query(&args, &bytes, &error), MHA_OK) << error.message;
  return bytes;
}

size_t QueryForward(const mha_layer *layer, const QuerySizes &sizes, const QueryKind &kind,
                    const ForbiddenData &data) {
  mha_forward_args args = Zeroed<mha_forward_args>();
  args.query.data = data.floats();
  if (kind.key) args.key.data = data.floats();
  if (kind.value) args.value.data = data.floats();
  return QueryWith(args, sizes, kind, data, [=](auto *given, size_t *bytes, mha_error *error) {
    return mha_forward_workspace(layer, given, bytes, error);
  });
}

size_t QueryAttention(const AttentionSizes &heads, const QuerySizes &sizes, const QueryKind &kind,
                      const ForbiddenData &data) {
  mha_attention_args args = Zeroed<mha_attention_args>();
  args.num_heads = heads.num_heads;
  args.num_kv_heads = heads.num_kv_heads;
  args.head_dim = heads.head_dim;
  args.head_dim_v = heads.head_dim_v;
  args.k.data = args.v.data = args.q.data = data.floats();
  return QueryWith(args, sizes, kind, data, mha_attention_workspace);
}

const std::vector<int64_t> kQueryLengths = {0,   1,   2,   3,    8,    15,   16,    17,
                                            24,  25,  48,  63,   64,   100,  255,   256,
                                            257, 511, 513, 1000, 4096, 4097, 100000};
const std::vector<uint32_t> kQueryThreads = {0, 1, 2, 3, 4, 7, 16, 64, 1000};

QuerySizes RandomQuery(Random &random, uint32_t all) {
  return {random.Below(4) == 0 ? random.Between(0, 1) : random.Between(1, 40),
          random.Pick(kQueryLengths), random.Pick(kQueryLengths), random.Pick(kQueryThreads),
          static_cast<uint32_t>(random.Next()) & static_cast<uint32_t>(random.Next()) & all};
}

// At least as large in every size, and often equal in some.
QuerySizes RandomLarger(Random &random, const QuerySizes &than, uint32_t all) {
  QuerySizes larger = RandomQuery(random, all);
  larger.batch = random.Coin() ? than.batch : std::max(than.batch, larger.batch);
  larger.n_q = random.Coin() ? than.n_q : std::max(than.n_q, larger.n_q);
  larger.n_kv = random.Coin() ? than.n_kv : std::max(than.n_kv, larger.n_kv);
  larger.num_threads =
      random.Coin() ? than.num_threads : std::max(than.num_threads, larger.num_threads);
  larger.asked = random.Coin() ? than.asked : than.asked | larger.asked;
  return larger;
}

AttentionSizes Heads(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                     int64_t head_dim_v) {
  AttentionSizes sizes;
  sizes.num_heads = num_heads;
  sizes.num_kv_heads = num_kv_heads;
  sizes.head_dim = head_dim;
  sizes.head_dim_v = head_dim_v;
  return sizes;
}

// The pointers of these queries lead to forbidden memory, so the tests below also show that queries
// dereference none of them.
TEST(WorkspaceQuery, NeverShrinksForForward) {
  Random random(31);
  const ForbiddenData data;
  for (const LayerProblem &problem :
       {SquareLayer(10, 4, 2, 3), SquareLayer(64, 4, 4, 16), SquareLayer(300, 1, 1, 300),
        SquareLayer(1, 6, 1, 1), SquareLayer(48, 4, 4, 12), SquareLayer(24, 2, 1, 24)}) {
    const LayerData layer_data(problem);
    for (uint32_t set : InstructionSets()) {
      const Layer layer = Create(layer_data, set);
      for (int i = 0; i < 4000; ++i) {
        const QuerySizes small = RandomQuery(random, kAskAll);
        const QuerySizes large = RandomLarger(random, small, kAskAll);
        QueryKind kind = {random.Coin(), random.Coin(), random.Coin()};
        ASSERT_LE(QueryForward(layer.get(), small, kind, data),
                  QueryForward(layer.get(), large, kind, data))
            << small << " needs more than " << large << " key " << kind.key << " value "
            << kind.value << " causal " << kind.is_causal << " " << mha_instruction_set_name(set)
            << " " << Describe(problem);
      }
    }
  }
}

TEST(WorkspaceQuery, NeverShrinksForAttention) {
  Random random(32);
  const ForbiddenData data;
  for (const AttentionSizes &heads :
       {Heads(4, 2, 3, 5), Heads(8, 8, 64, 64), Heads(1, 1, 300, 1), Heads(12, 1, 1, 129)}) {
    for (int i = 0; i < 8000; ++i) {
      const QuerySizes small = RandomQuery(random, kAskAllOfAttention);
      const QuerySizes large = RandomLarger(random, small, kAskAllOfAttention);
      const QueryKind kind = {true, true, random.Coin()};
      ASSERT_LE(QueryAttention(heads, small, kind, data), QueryAttention(heads, large, kind, data))
          << small << " needs more than " << large << " causal " << kind.is_causal << " num_heads "
          << heads.num_heads << " head_dim " << heads.head_dim << " head_dim_v "
          << heads.head_dim_v;
    }
  }
}

TEST(WorkspaceQuery, AcceptsNullInPlaceOfEveryDataPointer) {
  const LayerProblem problem = OfItself(SquareLayer(10, 4, 2, 3), 3);
  const Layer layer = Create(LayerData(problem));
  ForwardData forward(layer.get(), problem, {Guarded()});
  const size_t forward_bytes = forward.WorkspaceBytes();
  forward.args.query.data = nullptr;
  forward.args.output.data = nullptr;
  EXPECT_EQ(forward.WorkspaceBytes(), forward_bytes);
  AttentionData attention(NormalAttention(problem), {Guarded()});
  const size_t attention_bytes = attention.WorkspaceBytes();
  attention.args.k.data = attention.args.v.data = attention.args.q.data = nullptr;
  attention.args.output.data = nullptr;
  EXPECT_EQ(attention.WorkspaceBytes(), attention_bytes);
}

TEST(WorkspaceQuery, AnswerForTheMaximaServesSmallerCalls) {
  LayerProblem problem = SquareLayer(10, 4, 2, 3);
  const Layer layer = Create(LayerData(problem));
  constexpr uint32_t kMostThreads = 4;
  const ForbiddenData forbidden;
  const QuerySizes maxima = {3, 40, 300, kMostThreads, kAskAll};
  Memory workspace(QueryForward(layer.get(), maxima, {true, true, true}, forbidden));
  Random random(33);
  for (int i = 0; i < 100; ++i) {
    problem.batch = random.Between(0, maxima.batch);
    problem.n_q = random.Between(0, maxima.n_q);
    problem.n_kv = random.Between(0, maxima.n_kv);
    problem.is_causal = true;
    problem.q_start = Starts(std::max<int64_t>(problem.batch, 1));  // given, also to an empty batch
    FillInputs(&random, &problem);
    ForwardData data(layer.get(), problem,
                     {Guarded(static_cast<uint32_t>(random.Below(kAskAll + 1)))});
    SerialScheduler scheduler(static_cast<uint32_t>(random.Between(1, kMostThreads)));
    data.SetScheduler(&scheduler.scheduler);
    mha_error error;
    ASSERT_EQ(data.Run(workspace.data(), workspace.size(), &error), MHA_OK)
        << error.message << " " << Describe(problem);
  }
}

// A workspace has tiles, chunk states and rows, but never a matrix of n by n.
TEST(WorkspaceQuery, DoesNotGrowWithTheSquareOfTheLength) {
  const LayerData layer_data(SquareLayer(64, 4, 4, 16));
  const AttentionSizes heads = Heads(4, 4, 16, 16);
  const ForbiddenData data;
  const auto expect_linear = [](const auto &bytes_of) {
    const size_t once = bytes_of(4096), twice = bytes_of(8192);
    EXPECT_LE(static_cast<double>(twice), 2.1 * static_cast<double>(once));
    EXPECT_LT(once, size_t{4096} * 4096) << "a matrix of bytes would fit";
  };
  for (uint32_t set : InstructionSets()) {
    SCOPED_TRACE(mha_instruction_set_name(set));
    const Layer layer = Create(layer_data, set);
    for (uint32_t num_threads : {0u, 8u}) {
      for (bool is_causal : {false, true}) {
        for (bool key : {false, true}) {
          expect_linear([&](int64_t n) {
            return QueryForward(layer.get(), {1, n, n, num_threads, kAskLse},
                                {key, false, is_causal}, data);
          });
        }
        expect_linear([&](int64_t n) {
          return QueryAttention(heads, {1, n, n, num_threads, kAskLse}, {true, true, is_causal},
                                data);
        });
      }
    }
  }
}

TEST(WorkspaceQuery, NeedsLessThanAMebibytePerThreadBesideTheProjections) {
  constexpr int64_t kLength = 16384, kWidth = 768;
  constexpr size_t kProjections = 4 * kLength * kWidth * sizeof(float);  // q, k, v and the context
  const LayerData layer_data(SquareLayer(kWidth, 12, 12, 64));
  const ForbiddenData data;
  for (uint32_t set : InstructionSets()) {
    const Layer layer = Create(layer_data, set);
    for (uint32_t num_threads : {1u, 2u, 64u}) {
      const size_t bytes = QueryForward(layer.get(), {1, kLength, kLength, num_threads, 0},
                                        {false, false, true}, data);
      EXPECT_LT(bytes, kProjections + num_threads * (size_t{1} << 20))
          << mha_instruction_set_name(set);
    }
  }
}

TEST(PackSizeQuery, ReadsNoArray) {
  const ForbiddenData forbidden;
  LayerData data{SmallLayer()};
  const size_t expected = data.PackSize();
  data.weights.w_q.data = data.weights.w_k.data = data.weights.w_v.data = data.weights.w_o.data =
      forbidden.floats();
  data.weights.w_q.bias = data.weights.w_k.bias = data.weights.w_v.bias = data.weights.w_o.bias =
      forbidden.floats();
  EXPECT_EQ(data.PackSize(), expected);
}

// ---- No allocation, no system call

TEST(Traps, CountAllocations) {
  SKIP_WITHOUT_ALLOCATION_TRAP();
#if MHA_TEST_HAS_ALLOCATION_TRAP
  AllocationWatch watch;
  free(Escape(malloc(10)));
  free(Escape(realloc(calloc(2, 5), 30)));
  free(Escape(aligned_alloc(64, 128)));
  delete static_cast<char *>(Escape(new char));
  watch.Stop();
  EXPECT_EQ(watch.allocations(), 5);
  EXPECT_EQ(watch.releases(), 4);
#endif
}

TEST(Traps, CatchSystemCalls) {
  SKIP_WITHOUT_SYSTEM_CALL_TRAP();
#if defined(__linux__)
  EXPECT_EQ(WatchSystemCalls([] { return static_cast<int>(syscall(SYS_getpid)) & 1; }).first,
            SYS_getpid);
  EXPECT_EQ(WatchSystemCalls([] { return static_cast<int>(write(2, "", 0)); }).first, SYS_write);
  EXPECT_EQ(WatchSystemCalls([] { return 5; }).first, -1);
  EXPECT_EQ(WatchSystemCalls([] { return 5; }).exit_code, 5);
#endif
}

TEST(ACall, AllocatesNothing) {
  SKIP_WITHOUT_ALLOCATION_TRAP();
  ForEachCall(MHA_INSTRUCTION_SET_AUTO, [](CallData &data) {
    Memory workspace(data.WorkspaceBytes());
    mha_error error;
    mha_call_info info = Zeroed<mha_call_info>();
    size_t bytes = 0;
    AllocationWatch watch;
    const mha_status query = data.Workspace(&bytes, &error), described = data.Info(&info, &error),
                     run = data.Run(workspace.data(), workspace.size(), &error),
                     failed = data.Run(workspace.data(), 0, &error);
    watch.Stop();
    EXPECT_EQ(watch.allocations() + watch.releases(), 0);
    EXPECT_EQ(query | described | run, MHA_OK);
    EXPECT_EQ(failed, bytes == 0 ? MHA_OK : MHA_ERROR_BUFFER_TOO_SMALL);
  });
}

TEST(ACall, MakesNoSystemCall) {
  SKIP_WITHOUT_SYSTEM_CALL_TRAP();
  ForEachCall(MHA_INSTRUCTION_SET_AUTO, [](CallData &data) {
    const Memory workspace(data.WorkspaceBytes());
    const auto expect_none = [&](size_t bytes, mha_status status) {
      const SystemCalls calls = WatchSystemCalls([&] {
        mha_error error;
        return static_cast<int>(data.Run(workspace.data(), bytes, &error));
      });
      EXPECT_EQ(calls.first, -1) << "system call number";
      EXPECT_EQ(calls.exit_code, static_cast<int>(status));
    };
    expect_none(workspace.size(), MHA_OK);
    if (workspace.size() > 0) expect_none(workspace.size() - 1, MHA_ERROR_BUFFER_TOO_SMALL);
  });
}

// ---- The stack

class Stack : public InstructionSetTest {};

TEST_P(Stack, CallsAndPackingNeedAtMostWhatTheHeaderStates) {
  if (MHA_TEST_SANITIZED) GTEST_SKIP() << "instrumented code needs more";
  const auto check = [](CallData &data) {
    Memory workspace(data.WorkspaceBytes());
    mha_error error;
    mha_status status = MHA_OK;
    EXPECT_LE(StackOf([&] { status = data.Run(workspace.data(), workspace.size(), &error); }),
              kMostStack);
    EXPECT_EQ(status, MHA_OK) << error.message;
  };
  const struct {
    uint32_t type, arithmetic;
  } weights[] = {{MHA_TYPE_F32, MHA_ARITHMETIC_F32},  {MHA_TYPE_F16, MHA_ARITHMETIC_F32},
                 {MHA_TYPE_BF16, MHA_ARITHMETIC_F32}, {MHA_TYPE_INT8, MHA_ARITHMETIC_F32},
                 {MHA_TYPE_INT4, MHA_ARITHMETIC_F32}, {MHA_TYPE_INT4, MHA_ARITHMETIC_INT8}};
  for (const auto &[type, arithmetic] : weights) {
    SCOPED_TRACE("weights of type " + std::to_string(type) + ", arithmetic " +
                 std::to_string(arithmetic));
    LayerProblem sizes = SquareSizes(300, 3, 3, 100);
    sizes.is_causal = true;
    LayerData layer_data(NormalLayer(sizes));
    layer_data.config.weight_type = type;
    layer_data.config.arithmetic = arithmetic;
    Memory packed(layer_data.PackSize(), Place::kBeforeGuard, 64);
    mha_error error;
    mha_status status = MHA_OK;
    const auto pack = [&] {
      status = mha_layer_pack(&layer_data.config, &layer_data.weights, nullptr, packed.data(),
                              packed.size(), &error);
    };
    EXPECT_LE(StackOf(pack), kMostStack);
    ASSERT_EQ(status, MHA_OK) << error.message;
    const mha_layer_options options = Options(instruction_set());
    const View view(packed, &options);
    for (const int64_t rows : {1, 2, 30}) {
      ForwardData data(view.layer, NormalLayer(OfItself(sizes, rows)), {Guarded()});
      check(data);
    }
  }
  ForEachCall(instruction_set(), check);
}

MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(Stack);

// ---- mha_layer_create and its allocator

TEST(Create, AllocatesOneBlockAndReleasesItOnce) {
  const LayerProblem problem = SmallLayer();
  const LayerData data(problem);
  const Layer reference = Create(data);
  const Outputs expected = ForwardData(reference.get(), problem, {Guarded()}).Compute();
  RecordingAllocator recorder;
  mha_layer *layer = nullptr;
  mha_error error;
  {
    // The allocator and the options are copied into the layer: these are gone when it is destroyed.
    Memory copy(sizeof recorder.allocator);
    std::memcpy(copy.data(), &recorder.allocator, sizeof recorder.allocator);
    const mha_layer_options options = Options(MHA_INSTRUCTION_SET_AUTO, nullptr,
                                              reinterpret_cast<const mha_allocator *>(copy.data()));
    AllocationWatch watch;
    const mha_status status =
        mha_layer_create(&data.config, &data.weights, &options, &layer, &error);
    watch.Stop();
    ASSERT_EQ(status, MHA_OK) << error.message;
    // Memory maps its block and makes it accessible, which is the recorder's own call of mmap.
    if (MHA_TEST_HAS_ALLOCATION_TRAP) {
      EXPECT_EQ(watch.allocations(), 1) << "more than what the allocator itself asked for";
    }
  }
  EXPECT_EQ(recorder.allocations, 1);
  EXPECT_EQ(recorder.releases, 0);
  EXPECT_GE(recorder.bytes, data.PackSize());
  EXPECT_TRUE(SameBits(ForwardData(layer, problem, {Guarded()}).Compute(), expected));
  AllocationWatch watch;
  mha_layer_destroy(layer);
  watch.Stop();
  EXPECT_EQ(watch.releases(), 0);
  EXPECT_EQ(recorder.allocations, 1);
  EXPECT_EQ(recorder.releases, 1);
  EXPECT_EQ(recorder.released, recorder.memory);
}

// mha_layer_create fails and releases what it has allocated.
void ExpectCreateFails(const LayerData &data, RecordingAllocator *recorder,
                       const Expected &expected) {
  const mha_layer_options options =
      Options(MHA_INSTRUCTION_SET_AUTO, nullptr, &recorder->allocator);
  auto *layer = reinterpret_cast<mha_layer *>(recorder);
  mha_error error = UnwrittenError();
  ExpectError(mha_layer_create(&data.config, &data.weights, &options, &layer, &error), error,
              expected);
  EXPECT_EQ(layer, nullptr);
  EXPECT_EQ(recorder->releases, recorder->fails ? 0 : recorder->allocations);
  if (recorder->releases > 0) {
    EXPECT_EQ(recorder->released, recorder->memory);
  }
}

TEST(Create, ReportsAFailingAllocator) {
  RecordingAllocator recorder;
  recorder.fails = true;
  ExpectCreateFails(LayerData{SmallLayer()}, &recorder, {MHA_ERROR_OUT_OF_MEMORY, {0}, {}});
  EXPECT_EQ(recorder.allocations, 1);
}

// The memory is asked for before an array is read, so a layer that is far too large is an error,
// not a crash.
TEST(Create, AsksForMemoryBeforeItReadsTheWeights) {
  const ForbiddenData forbidden;
  LayerData data(SquareLayer(4, 2, 2, 2));
  data.config.query_dim = data.config.key_dim = data.config.value_dim = data.config.output_dim =
      int64_t{1} << 30;
  data.weights.w_q.data = data.weights.w_k.data = data.weights.w_v.data = data.weights.w_o.data =
      forbidden.floats();
  RecordingAllocator recorder;
  recorder.fails = true;
  ExpectCreateFails(data, &recorder, {MHA_ERROR_OUT_OF_MEMORY, {0}, {}});
  EXPECT_GE(recorder.bytes, size_t{16} << 32) << "16 columns of 2^30 floats";
}

// Only when the memory is allocated does it turn out that a weight is out of range.
TEST(Create, ReleasesTheBlockIfAWeightIsOutOfRange) {
  LayerProblem problem = SmallLayer();
  problem.w_q[3] = 1e6f;
  LayerData data(problem);
  data.config.weight_type = MHA_TYPE_F16;
  RecordingAllocator recorder;
  ExpectCreateFails(data, &recorder, {MHA_ERROR_OUT_OF_RANGE, {2}, {}});
}

TEST(Create, AllocatesNothingIfTheArgumentsAreWrong) {
  LayerData data{SmallLayer()};
  data.config.num_kv_heads = 3;
  RecordingAllocator recorder;
  ExpectCreateFails(data, &recorder, {MHA_ERROR_SHAPE, {1}, {}});
  EXPECT_EQ(recorder.allocations, 0);
}

// A layer of more than 4 MiB.
const LayerProblem kLarge = SquareLayer(520, 2, 2, 260);

TEST(Create, AsksForHugePagesForALargeLayer) {
  SKIP_WITHOUT_ALLOCATION_TRAP();
  constexpr uintptr_t kHugePage = 2 << 20;
  const LayerData data{kLarge};
  mha_layer *layer = nullptr;
  mha_error error;
  AllocationWatch watch;
  const mha_status status = mha_layer_create(&data.config, &data.weights, nullptr, &layer, &error);
  watch.Stop();
  // The system refuses the advice, which is not an error.
  ASSERT_EQ(status, MHA_OK) << error.message;
  EXPECT_EQ(watch.allocations(), 1);
  const Advice advice = watch.advice();
  EXPECT_EQ(advice.count, 1);
#if defined(MADV_HUGEPAGE)
  EXPECT_EQ(advice.advice, MADV_HUGEPAGE);
#endif
  EXPECT_EQ(reinterpret_cast<uintptr_t>(advice.memory) % kHugePage, 0u);
  EXPECT_EQ(advice.bytes % kHugePage, 0u);
  EXPECT_GT(advice.bytes, data.PackSize() - kHugePage);
  EXPECT_LE(advice.bytes, data.PackSize() + 4096) << "more than the block";
  const auto *object = reinterpret_cast<const unsigned char *>(layer);
  EXPECT_TRUE(object >= advice.memory && object < advice.memory + advice.bytes);

  AllocationWatch end;
  mha_layer_destroy(layer);
  end.Stop();
  EXPECT_EQ(end.releases(), 1);
}

TEST(Create, UsesMallocOnceAndGivesNoAdviceForSmallLayersNorTheCallersMemory) {
  SKIP_WITHOUT_ALLOCATION_TRAP();
  const LayerData small{SmallLayer()}, large{kLarge};
  RecordingAllocator recorder;
  const mha_layer_options options = Options(MHA_INSTRUCTION_SET_AUTO, nullptr, &recorder.allocator);
  for (const LayerData *data : {&small, &large}) {
    mha_layer *layer = nullptr;
    AllocationWatch watch;
    const mha_status status = mha_layer_create(
        &data->config, &data->weights, data == &small ? nullptr : &options, &layer, nullptr);
    const int allocations = watch.allocations(), early = watch.releases();
    mha_layer_destroy(layer);
    watch.Stop();
    EXPECT_EQ(status, MHA_OK);
    EXPECT_EQ(watch.advice().count, 0);
    if (data != &small) continue;
    EXPECT_EQ(allocations, 1);
    EXPECT_EQ(early, 0);
    EXPECT_EQ(watch.allocations(), 1);
    EXPECT_EQ(watch.releases(), 1);
  }
}

// Lets each allocation fail in turn, alone and with all that follow. A failure leaks nothing, and
// the next attempt succeeds.
TEST(Create, ReturnsOutOfMemoryForEachAllocationThatFails) {
  SKIP_WITHOUT_ALLOCATION_TRAP();
  for (const LayerProblem &problem : {SmallLayer(), kLarge}) {
    const LayerData data{problem};
    mha_linear_weights linear = Zeroed<mha_linear_weights>();
    linear.input_dim = problem.query_dim;
    linear.output_dim = problem.num_heads * problem.head_dim;
    linear.w.data = data.weights.w_q.data;
    for (const bool is_linear : {false, true}) {
      const auto create = [&](mha_layer **layer, mha_error *error) {
        return is_linear ? mha_linear_create(&linear, nullptr, layer, error)
                         : mha_layer_create(&data.config, &data.weights, nullptr, layer, error);
      };
      for (const bool for_good : {false, true}) {
        mha_status status = MHA_ERROR_OUT_OF_MEMORY;
        for (int number = 1; status == MHA_ERROR_OUT_OF_MEMORY && number < 10; ++number) {
          SCOPED_TRACE("allocation " + std::to_string(number) +
                       (for_good ? " and all behind it" : "") + (is_linear ? ", linear" : ""));
          auto *layer = reinterpret_cast<mha_layer *>(&linear);
          mha_error error = UnwrittenError();
          errno = 0;
          AllocationWatch watch(number, for_good ? INT_MAX : number);
          status = create(&layer, &error);
          const int kept = watch.allocations() - watch.releases();
          watch.Stop();
          EXPECT_EQ(errno, 0);
          if (status != MHA_OK) {
            ExpectError(status, error, {MHA_ERROR_OUT_OF_MEMORY, {0}, {}});
            EXPECT_EQ(layer, nullptr);
            EXPECT_EQ(kept, 1) << "none but the one that failed";
            ExpectNoError(create(&layer, &error), error);
          } else {
            EXPECT_GT(number, 1) << "no allocation failed";
          }
          mha_layer_destroy(layer);
        }
        EXPECT_EQ(status, MHA_OK);
      }
    }
  }
}

TEST(Create, KeepsNoPointerIntoTheWeights) {
  const LayerProblem problem = SmallLayer();
  const LayerData data(problem);
  const Layer layer = Create(data);
  const Layer of_unmapped_weights = Create(LayerData(problem));
  EXPECT_TRUE(SameBits(ForwardData(of_unmapped_weights.get(), problem, {Guarded()}).Compute(),
                       ForwardData(layer.get(), problem, {Guarded()}).Compute()));
}

// ---- Threads

class SharedLayer : public InstructionSetTest {};

// Four threads use one layer and the same inputs at once, each with its own workspace and outputs.
TEST_P(SharedLayer, GivesEveryThreadTheSameBits) {
  const LayerProblem problem = Causal(SquareSizes(32, 4, 2, 8), 21, 30);
  const LayerData layer_data(problem);
  const Layer layer = Create(layer_data, instruction_set());
  const Memory packed = layer_data.Pack();
  const mha_layer_options options = Options(instruction_set());
  const View view(packed, &options);
  ASSERT_EQ(view.status, MHA_OK);
  ForwardData shared(layer.get(), problem, {Guarded(kAskAll)});
  const Outputs expected = shared.Compute();
  constexpr int kThreads = 4;
  std::atomic<int> different{0};
  std::atomic<int> ready{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      ForwardData own(t % 2 == 0 ? layer.get() : view.layer, problem, {Guarded(kAskAll)});
      own.args.query.data = shared.args.query.data;
      own.args.key.data = shared.args.key.data;
      own.args.value.data = shared.args.value.data;
      Memory workspace(own.WorkspaceBytes());
      for (++ready; ready < kThreads;) std::this_thread::yield();
      for (int i = 0; i < 25; ++i) {
        own.PoisonOutputs();
        mha_error error;
        if (own.Run(workspace.data(), workspace.size(), &error) != MHA_OK ||
            !SameBits(own.Results(), expected))
          ++different;
        mha_layer_config config = Zeroed<mha_layer_config>();
        if (mha_layer_shape(own.layer, &config, &error) != MHA_OK || config.num_heads != 4)
          ++different;
      }
    });
  }
  for (std::thread &thread : threads) thread.join();
  EXPECT_EQ(different, 0);
}

// Several calls at once, the tasks of each on threads.
TEST_P(SharedLayer, GivesTheSameBitsFromTasksOnThreads) {
  const LayerProblem problem = Causal(SquareSizes(32, 4, 2, 8), 40, 300);
  const Layer layer = Create(LayerData(problem), instruction_set());
  const Outputs expected = ForwardData(layer.get(), problem, {Guarded(kAskAll)}).Compute();
  const Scheduler scheduler(3, RunOnThreads);
  std::atomic<int> different{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&] {
      ForwardData own(layer.get(), problem, {Guarded(kAskAll)});
      own.SetScheduler(scheduler.get());
      for (int i = 0; i < 5; ++i) {
        if (!SameBits(own.Compute(), expected)) ++different;
      }
    });
  }
  for (std::thread &thread : threads) thread.join();
  EXPECT_EQ(different, 0);
}

MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(SharedLayer);

}  // namespace
