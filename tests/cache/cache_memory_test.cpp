// The memory of calls with lengths, rotations and caches: exactly the bytes that the queries say,
// nothing beside them, nothing of padding, no allocation, no system call; what only reads a cache
// leaves it alone, and any number of threads may read one.
#include <gtest/gtest.h>
#include <mha.h>
#include <pthread.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/instruction_sets.h"
#include "support/interface_support.h"
#include "support/rope.h"
#include "support/schedulers.h"
#include "support/specify.h"
#include "support/traps.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

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
};

std::string Describe(const Shape &s) {
  std::ostringstream text;
  text << "batch " << s.batch << " n " << s.n << (s.lengths ? " lengths" : "")
       << (s.padding_left ? " padding left" : "") << (s.window ? " window" : "")
       << (s.rope ? " rope" : "") << (s.positions ? " positions" : "")
       << (s.with_cache ? " " + support::Describe(s.form) : "") << " types " << s.k_type << "/"
       << s.v_type << " held " << s.held << " head_dim " << s.head_dim << "/" << s.head_dim_v
       << " threads " << s.num_threads << (s.by_forward ? " mha_forward" : " mha_attention")
       << (s.values_in_keys ? " values in keys" : "") << " chosen block " << s.chosen_block;
  return text.str();
}

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
      before_ = cache_->buffer().Bytes();
    }
    FillNormal(&random, kAllBiases, true, &problem);
    if (shape.by_forward) {
      layer_ = Create(LayerData(problem), instruction_set);
      forward = std::make_unique<ForwardData>(layer_.get(), problem, LayerCall{form});
    } else {
      attention = std::make_unique<AttentionData>(NormalAttention(problem),
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

  // The outputs and then the cache, as bytes. The cache is as it was before each time.
  std::string Compute(int workspace_fill, Place place) {
    Restore();
    const Outputs outputs = data().Compute(workspace_fill, place);
    std::string bytes;
    for (const std::vector<float> *x : {&outputs.y, &outputs.lse}) {
      bytes.append(reinterpret_cast<const char *>(x->data()), x->size() * sizeof(float));
    }
    return bytes + CacheBytes();
  }

  void Restore() {
    data().PoisonOutputs();
    if (cache_) std::memcpy(cache_->buffer().data(), before_.data(), before_.size());
  }
  bool IsUntouched() { return data().OutputsAreUntouched() && CacheBytes() == before_; }

  std::unique_ptr<AttentionData> attention;  // one of the two
  std::unique_ptr<ForwardData> forward;

 private:
  std::string CacheBytes() const { return cache_ ? cache_->buffer().Bytes() : std::string(); }

  SerialScheduler scheduler_;
  std::optional<Cache> cache_;
  Layer layer_;
  std::string before_;
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
  return shapes;
}

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
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(CacheMemory);

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

TEST_P(CacheMemory, OneByteLessOfWorkspaceIsAnErrorThatWritesNothing) {
  for (const Shape &shape : Shapes()) {
    SCOPED_TRACE(Describe(shape));
    GuardedCall call(shape, instruction_set(), Place::kBeforeGuard);
    const size_t bytes = call.data().WorkspaceBytes();
    if (bytes == 0) continue;
    Memory workspace(bytes - 1);
    call.Restore();
    EXPECT_EQ(call.data().Run(workspace.data(), workspace.size(), nullptr),
              MHA_ERROR_BUFFER_TOO_SMALL);
    EXPECT_TRUE(call.IsUntouched());
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
    args.batch = args.n_q = args.n_kv = args.num_heads = 1;
    args.head_dim = 16;
    args.k.data = args.v.data = args.q.data = row.data();
    args.output.data = output.data();
    args.flags = MHA_CAUSAL | MHA_WINDOW_LEFT;
    args.window_left = window_left;
    args.cache = cache.get();
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
      args.n_q = args.n_kv = n;
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

TEST_P(CacheMemory, TheQueryReadsNoArrayAndNothingOfTheSequences) {
  Memory page(64);
  page.Forbid();
  for (const Shape &shape : Shapes()) {
    SCOPED_TRACE(Describe(shape));
    GuardedCall call(shape, instruction_set(), Place::kBeforeGuard);
    const size_t expected = call.data().WorkspaceBytes();
    const auto *forbidden = reinterpret_cast<const int64_t *>(page.data());
    mha_sequences &sequences = call.data().sequences;
    for (const int64_t **array :
         {&sequences.q_lengths, &sequences.kv_lengths, &sequences.q_first_rows,
          &sequences.kv_first_rows, &sequences.cache_sequences}) {
      if (*array) *array = forbidden;
    }
    if (shape.form.kind != MHA_CACHE_KIND_RING) sequences.q_first_positions = forbidden;
    mha_rope &rope = call.data().rope;
    rope.cos = rope.sin = page.floats();
    sequences.rope_q_positions = sequences.rope_k_positions = forbidden;
    if (call.attention)
      call.attention->args.k.data = call.attention->args.v.data = call.attention->args.q.data =
          page.floats();
    if (call.forward) call.forward->args.query.data = page.floats();
    EXPECT_EQ(call.data().WorkspaceBytes(), expected);
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
    args.batch = args.n_q = args.n_kv = 1;
    args.num_heads = 4;
    args.num_kv_heads = 2;
    args.head_dim = 8;
    args.flags = MHA_CAUSAL | MHA_WINDOW_LEFT;
    args.cache = cache.get();
    args.window_left = 100;
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

TEST_P(CacheMemory, TheQueryNeverShrinks) {
  Random random(4);
  LayerProblem sizes = SquareSizes(7, 4, 2, 6);
  sizes.head_dim_v = 5;
  const Cache contiguous(CacheConfigOf(sizes, {MHA_CACHE_KIND_CONTIGUOUS, 0}, 40, 600));
  const Cache ring(CacheConfigOf(sizes, {MHA_CACHE_KIND_RING, 64}, 40, 0));
  const Layer layer = Create(LayerData(NormalLayer(sizes)), instruction_set());
  const std::vector<float> table(4096, 0.0f);
  mha_rope rope = Zeroed<mha_rope>();
  rope.num_positions = 1000;
  rope.cos = rope.sin = table.data();
  const std::vector<int64_t> zeros(40, 0);
  for (int n = 0; n < 3000; n++) {
    mha_kv_cache *const cache =
        random.Pick<mha_kv_cache *>({nullptr, contiguous.get(), ring.get()});
    const bool has_lengths = random.Coin(), has_rope = random.Coin(),
               has_window = cache == ring.get() || random.Coin(), by_forward = random.Coin();
    struct Sizes {
      int64_t batch, n;
      uint32_t num_threads;
    };
    const auto draw = [&] {
      return Sizes{random.Between(1, 40),
                   random.Pick<int64_t>({1, 2, 3, 8, 15, 16, 17, 48, 100, 255, 256, 257, 600}),
                   random.Pick<uint32_t>({1, 2, 3, 4, 7, 16, 64})};
    };
    const auto query = [&](const Sizes &s) {
      const SerialScheduler scheduler(s.num_threads);
      mha_sequences sequences = Zeroed<mha_sequences>();
      if (has_lengths) sequences.q_lengths = zeros.data();
      if (has_lengths && !by_forward) sequences.kv_lengths = zeros.data();
      size_t bytes = 0;
      mha_error error = {};
      const auto set = [&](auto args) {
        args.batch = s.batch;
        args.n_q = args.n_kv = s.n;
        args.flags = MHA_CAUSAL | (has_window ? MHA_WINDOW_LEFT : 0u);
        args.window_left = has_window ? 20 : 0;
        args.scheduler = &scheduler.scheduler;
        args.sequences = &sequences;
        args.rope = has_rope ? &rope : nullptr;
        args.cache = cache;
        return args;
      };
      if (by_forward) {
        const auto args = set(Zeroed<mha_forward_args>());
        Check(mha_forward_workspace(layer.get(), &args, &bytes, &error), error);
        return bytes;
      }
      auto args = set(Zeroed<mha_attention_args>());
      args.num_heads = 4;
      args.num_kv_heads = 2;
      args.head_dim = 6;
      args.head_dim_v = 5;
      args.instruction_set = instruction_set();
      Check(mha_attention_workspace(&args, &bytes, &error), error);
      return bytes;
    };
    const Sizes small = draw(), other = draw();
    const Sizes large = {std::max(small.batch, other.batch), std::max(small.n, other.n),
                         std::max(small.num_threads, other.num_threads)};
    ASSERT_LE(query(small), query(large))
        << "batch " << small.batch << " n " << small.n << " threads " << small.num_threads
        << " and " << large.batch << " " << large.n << " " << large.num_threads;
  }
}

// ---- What only reads leaves the cache alone

TEST_P(CacheMemory, AttendingWithoutAppendingOnlyReadsTheCache) {
  for (Shape shape : Shapes()) {
    if (!shape.with_cache) continue;
    SCOPED_TRACE(Describe(shape));
    shape.lengths = false;
    shape.n = 3;
    GuardedCall call(shape, instruction_set(), Place::kBeforeGuard);
    call.ChangeArgs([](auto &args) {
      args.cache_read = args.cache;
      args.cache = nullptr;
    });
    call.data().sequences.kv_first_rows = nullptr;
    if (call.attention) call.attention->args.k.data = call.attention->args.v.data = nullptr;
    Memory workspace(call.data().WorkspaceBytes());
    call.Restore();
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

// ---- No allocation, no system call

TEST_P(CacheMemory, ACallAllocatesNothing) {
  SKIP_WITHOUT_ALLOCATION_TRAP();
  for (const Shape &shape : Shapes()) {
    GuardedCall call(shape, instruction_set(), Place::kBeforeGuard);
    Memory workspace(call.data().WorkspaceBytes());
    call.Restore();
    mha_error error = {};
    AllocationWatch watch;
    const mha_status error_status = call.data().Run(workspace.data(), 0, &error);
    const mha_status status = call.data().Run(workspace.data(), workspace.size(), &error);
    watch.Stop();
    EXPECT_EQ(watch.allocations(), 0);
    EXPECT_EQ(watch.releases(), 0);
    EXPECT_EQ(status, MHA_OK) << error.message;
    EXPECT_EQ(error_status, workspace.size() == 0 ? MHA_OK : MHA_ERROR_BUFFER_TOO_SMALL);
  }
}

TEST_P(CacheMemory, ACallMakesNoSystemCall) {
  SKIP_WITHOUT_SYSTEM_CALL_TRAP();
  for (const Shape &shape : Shapes()) {
    GuardedCall call(shape, instruction_set(), Place::kBeforeGuard);
    Memory workspace(call.data().WorkspaceBytes());
    call.Restore();
    const CallData &data = call.data();
    const SystemCalls calls = WatchSystemCalls(
        [&] { return static_cast<int>(data.Run(workspace.data(), workspace.size(), nullptr)); });
    EXPECT_EQ(calls.first, -1) << "system call number";
    EXPECT_EQ(calls.exit_code, static_cast<int>(MHA_OK));
  }
}

// The functions of a cache one after the other; the number of the first one that fails, or 0.
int UseCache(const mha_kv_cache_config &config, const Memory &buffer,
             const std::vector<float> &rows, std::vector<float> *read) {
  mha_kv_cache *cache = nullptr;
  size_t bytes = 0;
  int64_t length = 0;
  const int32_t blocks[] = {3, 1, 0}, others[] = {3, 4, 5};
  mha_kv_cache_config shape = Zeroed<mha_kv_cache_config>();
  mha_error error;
  if (mha_kv_cache_size(&config, &bytes, &error) != MHA_OK) return 1;
  if (mha_kv_cache_init(&config, buffer.data(), buffer.size(), &cache, &error) != MHA_OK) return 2;
  if (config.kind == MHA_CACHE_KIND_PAGED) {
    if (mha_kv_cache_set_blocks(cache, 0, blocks, 3, &error) != MHA_OK) return 3;
  }
  if (mha_kv_cache_append(cache, 0, 40, rows.data(), rows.data(), &error) != MHA_OK) return 4;
  if (config.kind == MHA_CACHE_KIND_PAGED) {
    if (mha_kv_cache_set_blocks(cache, 1, others, 3, &error) != MHA_OK) return 5;
  }
  if (config.kind != MHA_CACHE_KIND_RING &&
      mha_kv_cache_copy_prefix(cache, 0, 1, 30, &error) != MHA_OK)
    return 6;
  if (mha_kv_cache_truncate(cache, 0, 20, &error) != MHA_OK) return 7;
  if (mha_kv_cache_length(cache, 0, &length, &error) != MHA_OK || length != 20) return 8;
  if (mha_kv_cache_read(cache, 0, 0, 20, read->data(), read->data(), &error) != MHA_OK) return 9;
  if (mha_kv_cache_view(buffer.data(), buffer.size(), &cache, &error) != MHA_OK) return 10;
  if (mha_kv_cache_shape(cache, &shape, &error) != MHA_OK) return 11;
  if (mha_kv_cache_append(cache, 0, -1, rows.data(), rows.data(), &error) == MHA_OK)
    return 12;  // neither does an error
  return 0;
}

TEST(CacheFunctions, AllocateNothingMakeNoSystemCallAndStayInTheBuffer) {
  for (const uint32_t kind :
       {MHA_CACHE_KIND_CONTIGUOUS, MHA_CACHE_KIND_RING, MHA_CACHE_KIND_PAGED}) {
    for (const Storage type : kValueTypes) {
      for (const Place place : {Place::kBeforeGuard, Place::kAfterGuard}) {
        AttentionProblem sizes;
        sizes.num_kv_heads = 2;
        sizes.head_dim = 7;
        sizes.head_dim_v = 19;
        sizes.k_type = KeysBeside(sizes.v_type = type);
        const mha_kv_cache_config config =
            CacheConfigOf(sizes, {kind, kind == MHA_CACHE_KIND_RING ? 48 : 16}, 2, 48);
        size_t bytes = 0;
        ASSERT_EQ(mha_kv_cache_size(&config, &bytes, nullptr), MHA_OK);
        const Memory buffer(bytes, place, 64);
        Random random(5);
        const std::vector<float> rows = random.Normals(40 * 2 * 19);
        std::vector<float> read(40 * 2 * 19);
        if (MHA_TEST_HAS_ALLOCATION_TRAP) {
          AllocationWatch watch;
          const int failed = UseCache(config, buffer, rows, &read);
          watch.Stop();
          EXPECT_EQ(failed, 0);
          EXPECT_EQ(watch.allocations(), 0);
        }
        const SystemCalls calls =
            WatchSystemCalls([&] { return UseCache(config, buffer, rows, &read); });
        if (!calls.supported) continue;
        EXPECT_EQ(calls.first, -1) << "system call number";
        EXPECT_EQ(calls.exit_code, 0);
      }
    }
  }
}

// ---- Threads of the caller

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
    std::vector<std::thread> threads;
    for (int n = 0; n < kThreads; n++) {
      threads.emplace_back([&, n] {
        AttentionCall call;
        call.instruction_set = instruction_set();
        call.cache.cache = cache.get();
        call.cache.columns = 50;
        for (int round = 0; round < 10; round++) outputs[n] = Attend(queries, call);
      });
    }
    for (std::thread &thread : threads) thread.join();
    for (const Outputs &output : outputs)
      EXPECT_TRUE(SameBits(output, Specify(problem))) << Describe(form);
  }
}

}  // namespace
