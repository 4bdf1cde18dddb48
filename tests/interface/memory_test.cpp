// The memory of a call, with and without a cache: it uses exactly the bytes that the queries
// return, nothing beside them and nothing of padding, makes no allocation and no system call. What
// only reads a cache leaves it alone, and any number of threads may use a layer or read a cache.

#include <errno.h>
#include <limits.h>
#include <pthread.h>

#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <sstream>

#include "interface/calls.h"
#include "support/choice.h"
#include "support/given_weights.h"
#include "support/instruction_sets.h"
#include "support/packed_sequences.h"
#include "support/recording_allocator.h"
#include "support/rope.h"
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

// ---- Calls with lengths, rotations and caches

// What a case consists of.
struct Shape {
  int64_t batch = 3;
  int64_t n = 19;  // rows of query, and of key and value without a cache or to append to it
  bool lengths = false;
  bool padding_left = false;
  bool window = false;
  bool rope = false;
  bool positions = false;
  bool with_cache = false;
  CacheForm form = {MHA_CACHE_KIND_CONTIGUOUS, 0};
  uint32_t k_type = MHA_TYPE_F32;
  uint32_t v_type = MHA_TYPE_F32;
  // Positions that the cache holds before, and one less of every second sequence.
  int64_t held = 11;
  int64_t head_dim = 6;
  int64_t head_dim_v = 5;
  uint32_t num_threads = 0;
  bool by_forward = false;
  bool values_in_keys = false;
  int64_t chosen_block = 0;  // 0: no chosen keys
  bool in_integers = false;
};

std::string Describe(const Shape &s) {
  std::ostringstream text;
  text << "batch " << s.batch << " n " << s.n << (s.lengths ? " lengths" : "")
       << (s.padding_left ? " padding left" : "") << (s.window ? " window" : "")
       << (s.rope ? " rope" : "") << (s.positions ? " positions" : "")
       << (s.with_cache ? " " + support::Describe(s.form) : "") << " types " << s.k_type << "/"
       << s.v_type << " held " << s.held << " head_dim " << s.head_dim << "/" << s.head_dim_v
       << " threads " << s.num_threads << (s.by_forward ? " mha_forward" : " mha_attention")
       << (s.values_in_keys ? " values in keys" : "") << " chosen block " << s.chosen_block
       << (s.in_integers ? " in integers" : "");
  return text.str();
}

// A call whose cache, if it has one, is as it was before each time.
template <typename Data>
class WithCache : public Data {
 public:
  template <typename... Given>
  explicit WithCache(Cache *cache, Given &&...given)
      : Data(std::forward<Given>(given)...),
        cache_(cache),
        before_(cache ? cache->buffer().Bytes() : std::string()) {}

  void PoisonOutputs() override {
    Data::PoisonOutputs();
    if (cache_) std::memcpy(cache_->buffer().data(), before_.data(), before_.size());
  }
  bool OutputsAreUntouched() const override {
    return Data::OutputsAreUntouched() && (!cache_ || cache_->buffer().Bytes() == before_);
  }

 private:
  Cache *const cache_;
  const std::string before_;
};

// A call whose every array lies at a guard page, and is read-only where it is an input.
class GuardedCall {
 public:
  GuardedCall(const Shape &shape, uint32_t instruction_set, Place place)
      : scheduler_(std::max(1u, shape.num_threads)) {
    Random random(1);
    LayerProblem problem;
    problem.batch = shape.batch;
    problem.n_q = problem.n_kv = shape.n;
    problem.num_heads = 4;
    problem.num_kv_heads = 2;
    problem.head_dim = shape.head_dim;
    problem.head_dim_v = shape.head_dim_v;
    problem.k_type = static_cast<Storage>(shape.k_type);
    problem.v_type = static_cast<Storage>(shape.v_type);
    problem.query_dim = problem.key_dim = problem.value_dim = 7;
    problem.output_dim = 9;
    problem.is_causal = true;
    problem.values_in_keys = shape.values_in_keys;
    problem.is_in_integers = shape.in_integers;
    if (shape.window) problem.window_left = 6;
    if (shape.chosen_block != 0) {
      problem.score = ScoreArrays();
      problem.score->chosen_block = shape.chosen_block;
      Pairs<int32_t> &lists = problem.score->chosen;
      lists.columns = 9;
      lists.values.resize(shape.n * lists.columns);
      for (int32_t &entry : lists.values)
        entry = static_cast<int32_t>(random.Between(-1, (shape.held - 2) / shape.chosen_block));
    }
    if (shape.lengths) {
      for (int64_t b = 0; b < shape.batch; b++)
        problem.q_lengths.push_back(std::max<int64_t>(0, shape.n - 5 * b));
      problem.kv_lengths = problem.q_lengths;
    }
    if (shape.padding_left) PadLeft(shape.rope, &problem);
    if (shape.rope) {
      problem.rope = MakeRope(shape.padding_left, shape.head_dim / 2 * 2, shape.n + shape.held);
      for (std::vector<int64_t> *positions :
           {&problem.rope->q_positions, &problem.rope->k_positions}) {
        if (shape.positions) positions->resize(static_cast<size_t>(shape.batch * shape.n));
        for (int64_t &position : *positions) position = random.Between(0, shape.n + shape.held - 1);
      }
    }
    CallForm form = Guarded(kAskLse, place);
    if (shape.num_threads > 0) form.scheduler = &scheduler_.scheduler;
    if (shape.with_cache) {
      cache_.emplace(CacheConfigOf(problem, shape.form, shape.batch + 2, shape.n + shape.held),
                     place, 0xff);
      form.cache.cache = cache_->get();
      int32_t block = 0;
      for (int64_t b = 0; b < shape.batch; b++) {
        const int64_t sequence = shape.batch + 1 - b, count = shape.held - sequence % 2;
        form.cache.sequences.push_back(sequence);
        if (shape.form.kind == MHA_CACHE_KIND_PAGED) {
          std::vector<int32_t> blocks(
              static_cast<size_t>(cache_->config().capacity / cache_->config().block_positions));
          for (int32_t &entry : blocks) entry = block++;
          cache_->SetBlocks(sequence, blocks);
        }
        const Memory k = CopyOf(random.Normals(count * 2 * shape.head_dim), place);
        const Memory v = CopyOf(random.Normals(count * 2 * shape.head_dim_v), place);
        mha_error error;
        Check(mha_kv_cache_append(cache_->get(), sequence, count, k.floats(),
                                  shape.values_in_keys ? nullptr : v.floats(), &error),
              error);
      }
    }
    FillNormal(&random, kAllBiases, true, &problem);
    if (shape.by_forward) {
      layer_ = Create(LayerData(problem), instruction_set);
      forward = std::make_unique<WithCache<ForwardData>>(cache_ ? &*cache_ : nullptr, layer_.get(),
                                                         problem, LayerCall{form});
    } else {
      attention = std::make_unique<WithCache<AttentionData>>(cache_ ? &*cache_ : nullptr,
                                                             NormalAttention(problem),
                                                             AttentionCall{form, instruction_set});
    }
    data().FreezeInputs();
  }

  CallData &data() { return forward ? static_cast<CallData &>(*forward) : *attention; }
  Cache &cache() { return *cache_; }

  // Changes the arguments, of whichever entry it is.
  template <typename Change>
  void ChangeArgs(const Change &change) {
    if (forward) change(forward->args);
    if (attention) change(attention->args);
  }

  // The outputs and then the cache, as bytes.
  std::string Compute(int workspace_fill, Place place) {
    const Outputs outputs = data().Compute(workspace_fill, place);
    std::string bytes;
    for (const std::vector<float> *x : {&outputs.y, &outputs.lse}) {
      bytes.append(reinterpret_cast<const char *>(x->data()), x->size() * sizeof(float));
    }
    return bytes + (cache_ ? cache_->buffer().Bytes() : std::string());
  }

  std::unique_ptr<WithCache<AttentionData>> attention;  // one of the two
  std::unique_ptr<WithCache<ForwardData>> forward;

 private:
  SerialScheduler scheduler_;
  std::optional<Cache> cache_;
  Layer layer_;
};

std::vector<Shape> Shapes() {
  std::vector<Shape> shapes;
  for (const bool by_forward : {false, true}) {
    Shape shape;
    shape.by_forward = by_forward;
    for (const bool padding_left : {false, true}) {
      shape.padding_left = padding_left;
      shape.lengths = true;
      shapes.push_back(shape);
      shape.rope = true;
      shape.positions = padding_left;
      shape.num_threads = 3;
      shapes.push_back(shape);
    }
    shape = {};
    shape.by_forward = by_forward;
    shape.with_cache = true;
    shapes.push_back(shape);
    shape.k_type = MHA_TYPE_F16;
    shape.v_type = MHA_TYPE_INT8;
    shape.lengths = shape.rope = true;
    shapes.push_back(shape);
    shape.form = {MHA_CACHE_KIND_PAGED, 16};
    shape.k_type = MHA_TYPE_INT8;
    shape.v_type = MHA_TYPE_BF16;
    shape.padding_left = shape.positions = true;
    shapes.push_back(shape);
    shape.num_threads = 4;
    shape.n = 1;
    shape.head_dim = 33;
    shape.head_dim_v = 48;
    shapes.push_back(shape);
    shape.n = 290;  // two chunks
    shape.head_dim = shape.head_dim_v = 16;
    shape.v_type = MHA_TYPE_INT4;
    shapes.push_back(shape);
    shape.form = {MHA_CACHE_KIND_RING, 32};
    shape.window = true;
    shape.n = 23;
    shapes.push_back(shape);
    shape.n = 90;  // longer than the ring
    shapes.push_back(shape);
    shape = {};
    shape.by_forward = by_forward;
    shape.with_cache = true;
    shape.held = 1030;  // four whole chunks
    shape.n = 1;
    shapes.push_back(shape);
    shape.k_type = shape.v_type = MHA_TYPE_BF16;
    shapes.push_back(shape);
    shape.k_type = shape.v_type = MHA_TYPE_INT8;
    shapes.push_back(shape);
    // The last unit has no next one to prefetch for: behind the last sequence lies other memory,
    // whose tables are nowhere.
    shape.form = {MHA_CACHE_KIND_PAGED, 16};
    shape.batch = 1;
    shape.held = 40;
    shapes.push_back(shape);
    shape.form = {MHA_CACHE_KIND_CONTIGUOUS, 0};
    shape.k_type = shape.v_type = MHA_TYPE_INT8;
    shape.batch = 2;
    shape.chosen_block = 1;
    shapes.push_back(shape);
    shape.v_type = MHA_TYPE_INT4;
    shapes.push_back(shape);
    shape.chosen_block = 16;
    shape.n = 19;
    shapes.push_back(shape);
    if (by_forward) continue;
    shape.values_in_keys = true;
    shape.head_dim = 40;
    shape.head_dim_v = 33;
    shapes.push_back(shape);
    shape.chosen_block = 0;
    shapes.push_back(shape);
  }
  for (Shape shape : std::vector<Shape>(shapes)) {
    shape.in_integers =
        !shape.with_cache || (shape.k_type == MHA_TYPE_INT8 &&
                              (shape.v_type == MHA_TYPE_INT8 || shape.v_type == MHA_TYPE_INT4));
    if (shape.in_integers) shapes.push_back(shape);
  }
  return shapes;
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
  for (const Stored type : kWeightTypes) {
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

// The places for the partials of split keys are as many as the units of the call can have parts:
// where each query has keys of its own, it is a unit. Behind them lies the memory of the first
// task, which does all the work here.
TEST_P(GuardPages, AreNotTouchedByPartsOfKeys) {
  for (const bool are_chosen : {false, true}) {
    AttentionSizes sizes;
    sizes.n_q = 20;
    sizes.n_kv = 1100;
    sizes.head_dim = sizes.head_dim_v = 8;
    if (are_chosen) {
      sizes.score.emplace().chosen.columns = 600;
      for (int32_t i = 0; i < 20 * 600; ++i)
        sizes.score->chosen.values.push_back((i * 7 + i / 600) % 1100);
    }
    AttentionData attention(NormalAttention(sizes), {Guarded(kAskLse), instruction_set()});
    const Outputs expected = attention.Compute();
    for (const uint32_t num_threads : {2u, 7u, 64u}) {
      const Scheduler scheduler(num_threads, [](void *, uint32_t count, Task task, void *context) {
        for (uint32_t i = 0; i < count; ++i) task(context, i);
      });
      attention.SetScheduler(scheduler.get());
      for (const Place place : {Place::kBeforeGuard, Place::kAfterGuard})
        EXPECT_TRUE(SameBits(attention.Compute(0xFF, place), expected)) << num_threads;
    }
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
  args->call.scheduler = freeze(&scheduler.scheduler);
  args->call.outputs = freeze(&data->outputs);
  args->call.sequences = freeze(&data->sequences);
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

// Calls function(data) for all entries and kinds of calls: those of Shapes, and others with all
// optional outputs and with none.
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
  for (const Shape &shape : Shapes()) {
    SCOPED_TRACE(Describe(shape));
    GuardedCall call(shape, instruction_set, Place::kBeforeGuard);
    function(call.data());
  }
}

class Workspace : public InstructionSetTest {};

TEST_P(Workspace, ContentsAndSizeDoNotChangeResults) {
  ForEachCall(instruction_set(), [](CallData &data) {
    const Outputs poisoned = data.Compute(0xFF);
    for (int fill : {0x00, 0x7F, 0x3F}) EXPECT_TRUE(SameBits(data.Compute(fill), poisoned)) << fill;
    const size_t bytes = data.WorkspaceBytes();
    const Memory larger(bytes + 12345);
    data.PoisonOutputs();
    EXPECT_EQ(data.Run(larger.data(), larger.size(), nullptr), MHA_OK);
    EXPECT_TRUE(SameBits(data.Results(), poisoned));
    data.PoisonOutputs();
    if (bytes == 0) return;
    EXPECT_EQ(data.Run(larger.data(), bytes - 1, nullptr), MHA_ERROR_BUFFER_TOO_SMALL);
    EXPECT_TRUE(data.OutputsAreUntouched());
  });
}

TEST_P(Workspace, MayHaveAnyAlignment) {
  ForEachCall(instruction_set(), [&](CallData &data) {
    const Outputs expected = data.Compute();
    const size_t bytes = data.WorkspaceBytes();
    for (size_t offset : {0, 1, 3, 4, 8, 16, 31, 32, 60, 63, 64}) {
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
  bool has_window = false, has_lengths = false, has_rope = false;
  mha_kv_cache *cache = nullptr;
};

std::ostream &operator<<(std::ostream &stream, const QueryKind &k) {
  return stream << "key " << k.key << " value " << k.value << " causal " << k.is_causal
                << " window " << k.has_window << " lengths " << k.has_lengths << " rope "
                << k.has_rope << " cache " << (k.cache != nullptr);
}

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
  mha_rope rope = Zeroed<mha_rope>();
  if (!kind.cache) sequences.q_first_positions = data.positions();
  if (kind.has_lengths) sequences.q_lengths = sequences.q_first_rows = data.positions();
  if (kind.has_lengths && kind.key) sequences.kv_lengths = data.positions();
  if (kind.has_rope) {
    rope.num_positions = 1 << 20;
    rope.cos = rope.sin = data.floats();
    sequences.rope_q_positions = sequences.rope_k_positions = data.positions();
    args.call.rope = &rope;
  }
  args.call.cache = kind.cache;
  args.call.batch = ExtentOf(sizes.batch);
  args.call.n_q = ExtentOf(sizes.n_q);
  args.call.n_kv =
      ExtentOf(!kind.key && kind.value ? sizes.n_q : sizes.n_kv);  // of queries as keys
  args.output.data = data.floats();
  args.call.flags = (kind.is_causal ? MHA_CAUSAL : 0u) | (kind.has_window ? MHA_WINDOW_LEFT : 0u);
  if (kind.has_window) args.call.window_left = 20;
  args.call.sequences = &sequences;
  if (sizes.asked != kAskNothing) args.call.outputs = &outputs;
  if (sizes.num_threads > 0) args.call.scheduler = &scheduler.scheduler;
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

const std::vector<int64_t> kQueryLengths = {0,   1,   2,   3,   4,    5,    6,    8,     15,
                                            16,  17,  24,  25,  48,   63,   64,   100,   255,
                                            256, 257, 511, 513, 1000, 4096, 4097, 100000};
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
template <typename Query>
void ExpectNeverShrinks(Random &random, const std::vector<mha_kv_cache *> &caches, uint32_t asked,
                        bool is_forward, const Query &query) {
  for (int i = 0; i < 4000; ++i) {
    QueryKind kind = {!is_forward || random.Coin(), !is_forward || random.Coin(), random.Coin()};
    kind.has_rope = random.Coin();
    kind.cache = random.Below(3) == 0 ? random.Pick(caches) : nullptr;
    QuerySizes small = RandomQuery(random, kind.cache ? kAskLse : asked);
    QuerySizes large = RandomLarger(random, small, kind.cache ? kAskLse : asked);
    if (kind.cache) {
      kind.has_window = kind.cache == caches.back() || random.Coin();
      kind.is_causal = true;
      kind.key = kind.value = !is_forward;
      for (QuerySizes *sizes : {&small, &large})
        sizes->n_q = sizes->n_kv = std::min<int64_t>(sizes->n_q, 600);
    }
    kind.has_lengths = random.Coin();
    ASSERT_LE(query(small, kind), query(large, kind))
        << small << " needs more than " << large << " " << kind;
  }
}

TEST(WorkspaceQuery, NeverShrinks) {
  Random random(31);
  const ForbiddenData data;
  for (const LayerProblem &problem :
       {SquareLayer(10, 4, 2, 4), SquareLayer(64, 4, 4, 16), SquareLayer(300, 1, 1, 300),
        SquareLayer(2, 6, 1, 2), SquareLayer(48, 4, 4, 12), SquareLayer(24, 2, 1, 24),
        SquareLayer(64, 16, 16, 4)}) {
    SCOPED_TRACE(Describe(problem));
    const LayerData layer_data(problem);
    const Cache contiguous(CacheConfigOf(problem, {MHA_CACHE_KIND_CONTIGUOUS, 0}, 40, 600));
    const Cache ring(CacheConfigOf(problem, {MHA_CACHE_KIND_RING, 64}, 40, 0));
    const std::vector<mha_kv_cache *> caches = {contiguous.get(), ring.get()};
    for (uint32_t set : InstructionSets()) {
      SCOPED_TRACE(mha_instruction_set_name(set));
      const Layer layer = Create(layer_data, set);
      ExpectNeverShrinks(random, caches, kAskAll, true, [&](const auto &sizes, const auto &kind) {
        return QueryForward(layer.get(), sizes, kind, data);
      });
    }
    ExpectNeverShrinks(random, caches, kAskAllOfAttention, false,
                       [&](const auto &sizes, const auto &kind) {
                         return QueryAttention(problem, sizes, kind, data);
                       });
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
    data.PoisonOutputs();
    AllocationWatch watch;
    const mha_status query = data.Workspace(&bytes, &error), described = data.Info(&info, &error),
                     failed = data.Run(workspace.data(), 0, &error);
    if (bytes == 0) data.PoisonOutputs();
    const mha_status run = data.Run(workspace.data(), workspace.size(), &error);
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
    data.PoisonOutputs();
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
    data.PoisonOutputs();
    EXPECT_LE(StackOf([&] { status = data.Run(workspace.data(), workspace.size(), &error); }),
              kMostStack);
    EXPECT_EQ(status, MHA_OK) << error.message;
  };
  Random random(3);
  std::vector<WeightFormat> formats(std::begin(kWeightFormats), std::end(kWeightFormats));
  for (const WeightFormat &format : GroupFormats()) formats.push_back(format);
  for (const WeightFormat &format : formats) {
    SCOPED_TRACE(format.name);
    LayerProblem sizes = SquareSizes(300, 3, 3, 100);
    sizes.is_causal = true;
    sizes.arithmetic = format.arithmetic;
    const bool is_given =
        &format - formats.data() >= static_cast<int64_t>(std::size(kWeightFormats));
    LayerData layer_data(NormalLayer(sizes));
    if (is_given)
      layer_data = GivenAs(InGroups(&random, NormalLayer(sizes), format.stored, 16, 15,
                                    IsOfIntegers(format) ? MHA_TYPE_INT8 : MHA_TYPE_F16),
                           MHA_LAYOUT_OUT_IN, false, 0);
    layer_data.config.format.type = static_cast<uint32_t>(format.stored);
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
  data.config.format.type = MHA_TYPE_F16;
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

// ---- Caches

// Runs a function on a stack whose every byte is 0xff: numbers that were never written are NaN
// there, and pointers lead nowhere.
template <typename Function>
void RunOnSpoiledStack(const Function &function) {
  Memory stack(size_t{1} << 20);
  stack.Fill(0xff);
  pthread_attr_t attributes;
  pthread_t thread;
  pthread_attr_init(&attributes);
  ASSERT_EQ(pthread_attr_setstack(&attributes, stack.data(), stack.size()), 0);
  const auto run = [](void *argument) -> void * {
    (*static_cast<const Function *>(argument))();
    return nullptr;
  };
  ASSERT_EQ(pthread_create(&thread, &attributes, run, const_cast<Function *>(&function)), 0);
  pthread_join(thread, nullptr);
  pthread_attr_destroy(&attributes);
}

class CacheMemory : public InstructionSetTest {};

TEST_P(CacheMemory, NothingIsTouchedBesideWhatWasGiven) {
  for (const Shape &shape : Shapes()) {
    SCOPED_TRACE(Describe(shape));
    std::string expected;
    for (const Place place : {Place::kBeforeGuard, Place::kAfterGuard}) {
      GuardedCall call(shape, instruction_set(), place),
          scalar(shape, MHA_INSTRUCTION_SET_SCALAR, place);
      if (expected.empty()) expected = scalar.Compute(0xff, place);
      EXPECT_TRUE(call.Compute(0xff, place) == expected)
          << (place == Place::kBeforeGuard ? "before" : "after") << " a guard page";
    }
  }
}

// The last row sees all keys of some blocks of 16, or of a chunk, and no more: a row that a tile
// lacks must not go on to the next block, whose place nobody has looked up.
TEST_P(CacheMemory, ContentsOfTheStackDoNotReachTheResult) {
  for (const int64_t keys : {16, 48, 256}) {
    for (int64_t n_q = 1; n_q <= 9; n_q++) {
      Random random(static_cast<uint64_t>(n_q));
      AttentionProblem problem;
      problem.n_q = n_q;
      problem.n_kv = keys + 24;
      problem.num_heads = n_q % 2 == 0 ? 2 : 1;  // of one kv head: a unit of twice as many rows
      problem.head_dim = 6;
      problem.head_dim_v = 5;
      problem.is_causal = true;
      problem.q_start = {keys - n_q};
      FillNormal(&random, &problem);
      AttentionCall call;
      call.instruction_set = instruction_set();
      Outputs outputs;
      RunOnSpoiledStack([&] { outputs = Attend(problem, call); });
      EXPECT_TRUE(SameBits(outputs, Specify(problem))) << Describe(problem);
      for (const Storage type : kValueTypes) {
        problem.k_type = KeysBeside(problem.v_type = type);
        Cache cache(CacheConfigOf(problem, {MHA_CACHE_KIND_CONTIGUOUS, 0}, 1, problem.n_kv));
        cache.Append(0, {problem.k, problem.v});
        call.cache.cache = cache.get();
        call.cache.columns = problem.n_kv;
        AttentionProblem queries = problem;
        queries.n_kv = 0;
        queries.k.clear();
        queries.v.clear();
        RunOnSpoiledStack([&] { outputs = Attend(queries, call); });
        EXPECT_TRUE(SameBits(outputs, Specify(problem))) << Describe(problem);
      }
    }
  }
}

// A window may begin anywhere in the tree of chunks, and then leaves more states waiting than as
// many keys from the first one on. The rows of a call stand at every distance from the borders of
// large subtrees.
TEST_P(CacheMemory, TheWorkspaceHasRoomForTheStatesOfAWindowWhereverItBegins) {
  AttentionProblem sizes;
  sizes.head_dim = sizes.head_dim_v = 16;
  sizes.k_type = sizes.v_type = Storage::kInt8;
  for (const auto &[ring, window_left] :
       {std::pair{1024, 1000}, {512, 300}, {1280, 1100}, {2048, 2047}, {2048, 1800}}) {
    Cache cache(CacheConfigOf(sizes, {MHA_CACHE_KIND_RING, ring}, 1, 0));
    Random random(7);
    const std::vector<float> row = random.Normals(16);
    const KeysAndValues rows = {random.Normals(16 * 128), random.Normals(16 * 128)};
    std::vector<float> output(16);
    mha_attention_args args = Zeroed<mha_attention_args>();
    args.call.batch = args.call.n_q = args.call.n_kv = args.num_heads = 1;
    args.head_dim = 16;
    args.k.data = args.v.data = args.q.data = row.data();
    args.output.data = output.data();
    args.call.flags = MHA_CAUSAL | MHA_WINDOW_LEFT;
    args.call.window_left = window_left;
    args.call.cache = cache.get();
    args.instruction_set = instruction_set();
    size_t bytes = 0;
    mha_error error = {};
    ASSERT_EQ(mha_attention_workspace(&args, &bytes, &error), MHA_OK) << error.message;
    const Memory workspace(bytes);
    while (cache.Length(0) < 4 * ring) {
      cache.Append(0, rows);
      ASSERT_EQ(mha_attention(&args, workspace.data(), bytes, &error), MHA_OK) << error.message;
    }
  }
}

// With arrays that end where the valid rows do, although n says that there are more.
TEST_P(CacheMemory, PaddingRowsAreNotTouchedAtAll) {
  constexpr int64_t n = 40, valid = 13;
  for (const bool with_cache : {false, true}) {
    for (const bool padding_left : {false, true}) {
      const int64_t first = padding_left ? n - valid : 0;
      AttentionSizes sizes;
      sizes.n_q = sizes.n_kv = valid;
      sizes.num_heads = 4;
      sizes.num_kv_heads = 2;
      sizes.head_dim = 6;
      sizes.head_dim_v = 5;
      sizes.k_type = Storage::kInt8;
      sizes.is_causal = true;
      sizes.q_lengths = sizes.kv_lengths = {valid};
      if (padding_left) sizes.q_first = sizes.kv_start = {first};
      const Cache cache(CacheConfigOf(sizes, {MHA_CACHE_KIND_CONTIGUOUS, 0}, 1, valid));
      AttentionCall call = {Guarded(), instruction_set()};
      call.place = padding_left ? Place::kAfterGuard : Place::kBeforeGuard;
      if (with_cache) call.cache.cache = cache.get();
      AttentionData data(NormalAttention(sizes), call);
      data.FreezeInputs();
      mha_attention_args &args = data.args;
      args.call.n_q = args.call.n_kv = n;
      args.q.data = static_cast<const float *>(args.q.data) - first * 4 * 6;
      args.k.data = static_cast<const float *>(args.k.data) - first * 2 * 6;
      args.v.data = static_cast<const float *>(args.v.data) - first * 2 * 5;
      std::vector<float> output(n * 4 * 5), lse(4 * n);
      args.output.data = output.data();
      data.outputs.lse = lse.data();
      std::vector<unsigned char> workspace(data.WorkspaceBytes());
      mha_error error;
      EXPECT_EQ(data.Run(workspace.data(), workspace.size(), &error), MHA_OK) << error.message;
    }
  }
}

// So one query for the largest call serves all of a sequence's life.
TEST_P(CacheMemory, TheQueryDoesNotDependOnWhatTheCacheHolds) {
  for (const CacheForm &form : {CacheForm{MHA_CACHE_KIND_CONTIGUOUS, 0},
                                {MHA_CACHE_KIND_PAGED, 64},
                                {MHA_CACHE_KIND_RING, 512}}) {
    Random random(3);
    AttentionProblem sizes;
    sizes.num_kv_heads = 2;
    sizes.head_dim = 8;
    sizes.head_dim_v = 8;
    Cache cache(CacheConfigOf(sizes, form, 1, 1500));
    SpreadBlocks(&random, &cache);
    mha_attention_args args = Zeroed<mha_attention_args>();
    args.call.batch = args.call.n_q = args.call.n_kv = 1;
    args.num_heads = 4;
    args.num_kv_heads = 2;
    args.head_dim = 8;
    args.call.flags = MHA_CAUSAL | MHA_WINDOW_LEFT;
    args.call.cache = cache.get();
    args.call.window_left = 100;
    args.instruction_set = instruction_set();
    size_t empty = 0, bytes = 0;
    mha_error error = {};
    EXPECT_EQ(mha_attention_workspace(&args, &empty, &error), MHA_OK) << error.message;
    for (int n = 0; n < 4; n++) {
      cache.Append(0, {random.Normals(370 * 16), random.Normals(370 * 16)});
      EXPECT_EQ(mha_attention_workspace(&args, &bytes, &error), MHA_OK) << error.message;
      EXPECT_EQ(bytes, empty) << Describe(form);
    }
  }
}

TEST_P(CacheMemory, AttendingWithoutAppendingOnlyReadsTheCache) {
  for (Shape shape : Shapes()) {
    if (!shape.with_cache) continue;
    SCOPED_TRACE(Describe(shape));
    shape.lengths = false;
    shape.n = 3;
    GuardedCall call(shape, instruction_set(), Place::kBeforeGuard);
    call.ChangeArgs([](auto &args) {
      args.call.cache_read = args.call.cache;
      args.call.cache = nullptr;
    });
    call.data().sequences.kv_first_rows = nullptr;
    if (call.attention) call.attention->args.k.data = call.attention->args.v.data = nullptr;
    Memory workspace(call.data().WorkspaceBytes());
    call.data().PoisonOutputs();
    call.cache().buffer().Freeze();
    mha_error error = {};
    EXPECT_EQ(call.data().Run(workspace.data(), workspace.size(), &error), MHA_OK) << error.message;
    const mha_kv_cache *cache = call.cache().get();
    std::vector<float> k(10 * 2 * shape.head_dim),
        v(static_cast<size_t>(10 * 2 * shape.head_dim_v));
    int64_t length = 0;
    mha_kv_cache_config config = Zeroed<mha_kv_cache_config>();
    EXPECT_EQ(mha_kv_cache_length(cache, 2, &length, &error), MHA_OK) << error.message;
    EXPECT_EQ(mha_kv_cache_read(cache, 2, 0, 10, k.data(), v.data(), &error), MHA_OK)
        << error.message;
    EXPECT_EQ(mha_kv_cache_shape(cache, &config, &error), MHA_OK) << error.message;
    mha_kv_cache *view = nullptr;
    EXPECT_EQ(mha_kv_cache_view(call.cache().buffer().data(), call.cache().buffer().size(), &view,
                                &error),
              MHA_OK)
        << error.message;
    call.cache().buffer().Thaw();
  }
}

// A cache that nobody appends to is only read: any number of calls may do so at the same time.
TEST_P(CacheMemory, AnyNumberOfThreadsAttendToOneCacheAtTheSameTime) {
  constexpr int kThreads = 4;
  for (const CacheForm &form :
       {CacheForm{MHA_CACHE_KIND_CONTIGUOUS, 0}, {MHA_CACHE_KIND_PAGED, 16}}) {
    Random random(6);
    AttentionProblem problem;
    problem.batch = 2;
    problem.n_q = problem.n_kv = 50;
    problem.num_heads = problem.num_kv_heads = 2;
    problem.head_dim = 6;
    problem.head_dim_v = 5;
    problem.is_causal = true;
    problem.k_type = Storage::kF16;
    problem.v_type = Storage::kInt8;
    FillNormal(&random, &problem);
    Cache cache(CacheConfigOf(problem, form, 2, 50));
    SpreadBlocks(&random, &cache);
    for (int64_t b = 0; b < 2; b++) {
      cache.Append(b, {SliceRows(problem.k, b, 50, 2 * 6, 0, 50),
                       SliceRows(problem.v, b, 50, 2 * 5, 0, 50)});
    }
    AttentionProblem queries = problem;
    queries.n_kv = 0;
    queries.k.clear();
    queries.v.clear();
    std::vector<Outputs> outputs(kThreads);
    OnThreads(kThreads, [&](uint32_t n) {
      AttentionCall call;
      call.instruction_set = instruction_set();
      call.cache.cache = cache.get();
      call.cache.columns = 50;
      for (int round = 0; round < 10; round++) outputs[n] = Attend(queries, call);
    });
    for (const Outputs &output : outputs)
      EXPECT_TRUE(SameBits(output, Specify(problem))) << Describe(form);
  }
}

MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(CacheMemory);

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
  std::atomic<int> different{0};
  OnThreadsTogether(4, [&](uint32_t t) {
    ForwardData own(t % 2 == 0 ? layer.get() : view.layer, problem, {Guarded(kAskAll)});
    own.args.query.data = shared.args.query.data;
    own.args.key.data = shared.args.key.data;
    own.args.value.data = shared.args.value.data;
    Memory workspace(own.WorkspaceBytes());
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
  EXPECT_EQ(different, 0);
}

// Several calls at once, the tasks of each on threads.
TEST_P(SharedLayer, GivesTheSameBitsFromTasksOnThreads) {
  const LayerProblem problem = Causal(SquareSizes(32, 4, 2, 8), 40, 300);
  const Layer layer = Create(LayerData(problem), instruction_set());
  const Outputs expected = ForwardData(layer.get(), problem, {Guarded(kAskAll)}).Compute();
  const Scheduler scheduler(3, RunOnThreads);
  std::atomic<int> different{0};
  OnThreads(2, [&](uint32_t) {
    ForwardData own(layer.get(), problem, {Guarded(kAskAll)});
    own.SetScheduler(scheduler.get());
    for (int i = 0; i < 5; ++i) {
      if (!SameBits(own.Compute(), expected)) ++different;
    }
  });
  EXPECT_EQ(different, 0);
}

MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(SharedLayer);

}  // namespace
