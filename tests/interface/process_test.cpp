// The library as a part of a process: every public function leaves the floating-point environment,
// errno and the locale as they are, makes no system call and needs little stack; calls work in a
// forked child, after dlclose, and beside another copy of the library. They also work in other
// rounding modes, and refuse memory that is not a layer or cache.

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <locale.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <sstream>

#include "interface/calls.h"
#include "support/choice.h"
#include "support/instruction_sets.h"
#include "support/recording_allocator.h"
#include "support/recurrent.h"
#include "support/schedulers.h"
#include "support/stack.h"
#include "support/traps.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

// ---- Every public function, called with what succeeds

struct Function {
  const char *name;
  std::function<mha_status()> run;
};

class Everything {
 public:
  explicit Everything(uint32_t set, uint32_t num_threads = 1) : set_(set), scheduler_(num_threads) {
    linear_weights_.input_dim = linear_weights_.output_dim = kDim;
    linear_weights_.w.data = data_.weights.w_q.data;
    linear_weights_.format.type = MHA_TYPE_INT4;
    linear_weights_.format.arithmetic = MHA_ARITHMETIC_INT8;
    Random random(3);
    for (const Memory *memory : {&keys_, &merged_}) {
      for (size_t i = 0; i < memory->size() / sizeof(float); i++)
        memory->floats()[i] = 1.0f + random.Normals(1)[0] / 8;
    }
    forward_.SetScheduler(&scheduler_.scheduler);
    attention_.SetScheduler(&scheduler_.scheduler);
    choice_.SetScheduler(&scheduler_.scheduler);
    recurrent_.args.scheduler = convolution_.args.scheduler = &scheduler_.scheduler;
    linear_.rows = problem_.batch * kRows;
    linear_.x.data = forward_.args.query.data;
    linear_.output.data = product_.data();
    linear_.scheduler = &scheduler_.scheduler;
    rope_.dims = rope_.num_positions = 16;
    states_.batch = 1;
    states_.num_heads = kHeads;
    states_.n_q = kRows;
    states_.head_dim_v = kWidth;
    states_.partials = merged_.floats();
    states_.output.data = finished_.data();
    states_.instruction_set = set_;
    for (Function &function : functions_)
      EXPECT_EQ(function.run(), MHA_OK) << function.name << ": " << error.message;
  }
  Everything(const Everything &) = delete;
  ~Everything() { mha_layer_destroy(created_); }

  void UseLayer(const mha_layer *layer) {
    forward_.layer = layer;
    linear_layer_ = layer;
  }
  void UseCache(mha_kv_cache *cache) {
    forward_.args.call.cache = attention_.args.call.cache = choice_.args.call.cache = cache_ =
        cache;
  }

  const std::vector<Function> &functions() const { return functions_; }
  // What the calls have written: rows of three kinds of calls, and of the cache.
  std::vector<float> Results() const {
    std::vector<float> all;
    for (const CallData *call : std::initializer_list<const CallData *>{&forward_, &attention_}) {
      const Outputs outputs = call->Results();
      all.insert(all.end(), outputs.y.begin(), outputs.y.end());
    }
    for (const Memory *memory : {&product_, &finished_, &read_k_}) {
      all.insert(all.end(), memory->floats(), memory->floats() + memory->size() / sizeof(float));
    }
    return all;
  }
  // Results of float arithmetic come first.
  size_t NumFloatResults() const { return 2 * static_cast<size_t>(problem_.batch * kRows * kDim); }
  mha_error error;
  mha_call_info info = Zeroed<mha_call_info>();

 private:
  static constexpr int64_t kRows = 30, kHeads = 3, kWidth = 16, kDim = kHeads * kWidth;

  static LayerProblem Problem() {
    LayerProblem sizes = SquareSizes(kDim, kHeads, kHeads, kWidth);
    sizes.is_causal = true;
    return NormalLayer(OfItself(sizes, kRows));
  }
  static ChoiceProblem Choice() {
    LayerProblem sizes = OfItself(SquareSizes(kDim, kHeads, 1, kWidth), kRows);
    sizes.is_causal = true;
    ChoiceProblem choice;
    static_cast<AttentionProblem &>(choice) = NormalAttention(sizes);
    choice.weights = Random(5).Normals(kRows * kHeads * sizes.batch);
    choice.num_chosen = 5;
    return choice;
  }
  static mha_kv_cache_config CacheConfig() {
    mha_kv_cache_config config = Zeroed<mha_kv_cache_config>();
    config.num_sequences = 2;
    config.capacity = 64;
    config.num_kv_heads = kHeads;
    config.head_dim = kWidth;
    config.k_type = config.v_type = MHA_TYPE_INT8;
    config.kind = MHA_CACHE_KIND_PAGED;
    config.block_positions = 16;
    config.num_blocks = 8;
    return config;
  }
  static Memory Floats(int64_t count) {
    return Memory(static_cast<size_t>(count) * sizeof(float), Place::kBeforeGuard, 64);
  }

  const uint32_t set_;
  SerialScheduler scheduler_;
  const LayerProblem problem_ = Problem();
  LayerData data_{problem_};
  const mha_layer_options options_ = Options(set_);
  const Layer layer_ = Create(data_, set_);
  mha_layer *created_ = nullptr;
  const mha_layer *linear_layer_ = nullptr;
  ForwardData forward_{layer_.get(), problem_, {Guarded()}};
  AttentionData attention_{NormalAttention(problem_), {Guarded(), set_}};
  ChoiceData choice_{Choice(), {Guarded(), set_}};
  Random random_{4};
  RecurrentData recurrent_{MakeRecurrent(&random_, 2, kRows, 2, 2, 4, 40, 70, 40, true), {set_}};
  ConvolutionData convolution_{MakeConvolution(&random_, 2, kRows, 200, 4), {set_}};
  mha_layer_config shape_ = Zeroed<mha_layer_config>();
  mha_linear_weights linear_weights_ = Zeroed<mha_linear_weights>();
  Memory product_ = Floats(problem_.batch * kRows * kDim), finished_ = Floats(kRows * kDim),
         merged_ = Floats(kRows * kHeads * (kWidth + 2));
  mha_linear_args linear_ = Zeroed<mha_linear_args>();
  mha_partials_args states_ = Zeroed<mha_partials_args>();
  mha_kv_cache_config cache_config_ = CacheConfig();
  const int32_t blocks_[2][2] = {{3, 5}, {0, 1}};
  Memory keys_ = Floats(20 * kDim), read_k_ = Floats(20 * kDim), slopes_ = Floats(kHeads),
         bias_ = Floats(kHeads * 41), cosines_ = Floats(16 * 8), sines_ = Floats(16 * 8);
  mha_rope_config rope_ = Zeroed<mha_rope_config>();
  Memory packed_{1 << 20, Place::kBeforeGuard, 64}, storage_{mha_layer_view_size()},
      cache_buffer_{1 << 17, Place::kBeforeGuard, 64}, workspace_{1 << 20};
  const mha_layer *viewed_ = nullptr;
  mha_kv_cache *cache_ = nullptr;
  size_t bytes_ = 0;
  int64_t length_ = 0;

  void *workspace() { return workspace_.data(); }
  size_t room() { return workspace_.size(); }

// The function of this name with these arguments.
#define CALL(function, ...)                             \
  {                                                     \
#function, [this] { return function(__VA_ARGS__); } \
  }
  std::vector<Function> functions_ = {
      {"mha_status_string", [] { return mha_status_string(MHA_ERROR_SHAPE) ? MHA_OK : 1u; }},
      {"mha_version", [] { return mha_version() ? MHA_OK : 1u; }},
      {"mha_contract", [] { return mha_contract() ? MHA_OK : 1u; }},
      {"mha_instruction_sets", [] { return mha_instruction_sets() ? MHA_OK : 1u; }},
      {"mha_instruction_set_name", [] { return mha_instruction_set_name(1) ? MHA_OK : 1u; }},
      CALL(mha_layer_pack_size, &data_.config, &data_.weights, &options_, &bytes_, &error),
      CALL(mha_layer_pack, &data_.config, &data_.weights, &options_, packed_.data(), packed_.size(),
           &error),
      {"mha_layer_view_size", [] { return mha_layer_view_size() ? MHA_OK : 1u; }},
      CALL(mha_layer_view, packed_.data(), packed_.size(), &options_, storage_.data(),
           storage_.size(), &viewed_, &error),
      CALL(mha_layer_verify, packed_.data(), packed_.size(), &error),
      CALL(mha_layer_shape, forward_.layer, &shape_, &error),
      {"mha_layer_create",
       [this] {
         mha_layer_destroy(created_);
         return mha_layer_create(&data_.config, &data_.weights, &options_, &created_, &error);
       }},
      {"mha_layer_destroy",
       [this] {
         mha_layer_destroy(created_);
         created_ = nullptr;
         return MHA_OK;
       }},
      {"mha_forward_workspace", [this] { return forward_.Workspace(&bytes_, &error); }},
      {"mha_forward", [this] { return forward_.Run(workspace(), room(), &error); }},
      {"mha_forward_info", [this] { return forward_.Info(&info, &error); }},
      {"mha_attention_workspace", [this] { return attention_.Workspace(&bytes_, &error); }},
      {"mha_attention", [this] { return attention_.Run(workspace(), room(), &error); }},
      {"mha_attention_info", [this] { return attention_.Info(&info, &error); }},
      {"mha_choose_keys_workspace", [this] { return choice_.Workspace(&bytes_, &error); }},
      {"mha_choose_keys", [this] { return choice_.Run(workspace(), room(), &error); }},
      {"mha_recurrent_attention_workspace",
       [this] { return recurrent_.Workspace(&bytes_, &error); }},
      {"mha_recurrent_attention", [this] { return recurrent_.Run(workspace(), room(), &error); }},
      {"mha_recurrent_attention_info", [this] { return recurrent_.Info(&info, &error); }},
      {"mha_causal_conv_workspace", [this] { return convolution_.Workspace(&bytes_, &error); }},
      {"mha_causal_conv", [this] { return convolution_.Run(workspace(), room(), &error); }},
      CALL(mha_linear_pack_size, &linear_weights_, &options_, &bytes_, &error),
      CALL(mha_linear_pack, &linear_weights_, &options_, packed_.data(), packed_.size(), &error),
      {"mha_linear_create",
       [this] {
         mha_layer_destroy(created_);
         const mha_status status =
             mha_linear_create(&linear_weights_, &options_, &created_, &error);
         linear_layer_ = created_;
         return status;
       }},
      CALL(mha_linear_workspace, linear_layer_, &linear_, &bytes_, &error),
      CALL(mha_linear, linear_layer_, &linear_, workspace(), room(), &error),
      CALL(mha_linear_info, linear_layer_, &linear_, &info, &error),
      CALL(mha_kv_cache_size, &cache_config_, &bytes_, &error),
      {"mha_kv_pool_init",
       [this] {
         mha_kv_cache_config config = cache_config_;
         config.kind = MHA_CACHE_KIND_POOL;
         config.k_type = config.v_type = MHA_TYPE_F32;
         config.value_place = MHA_CACHE_VALUES_IN_KEYS;
         mha_kv_pool pool = Zeroed<mha_kv_pool>();
         pool.k = keys_.data();
         return mha_kv_pool_init(&config, &pool, cache_buffer_.data(), 256, &cache_, &error);
       }},
      CALL(mha_kv_cache_init, &cache_config_, cache_buffer_.data(), cache_buffer_.size(), &cache_,
           &error),
      {"mha_kv_cache_set_blocks",
       [this] {
         const mha_status status = mha_kv_cache_set_blocks(cache_, 0, blocks_[0], 2, &error);
         return status != MHA_OK ? status
                                 : mha_kv_cache_set_blocks(cache_, 1, blocks_[1], 2, &error);
       }},
      CALL(mha_kv_cache_append, cache_, 0, 20, keys_.floats(), keys_.floats(), &error),
      CALL(mha_kv_cache_copy_prefix, cache_, 0, 1, 18, &error),
      {"mha_kv_cache_unshare",
       [this] {  // sequence 1 shares the blocks of sequence 0, the last of which is partly filled
         const int32_t free_block = 6;
         uint32_t used = 0;
         mha_status status = mha_kv_cache_truncate(cache_, 1, 0, &error);
         if (status == MHA_OK) status = mha_kv_cache_set_blocks(cache_, 1, blocks_[0], 2, &error);
         if (status == MHA_OK) status = mha_kv_cache_copy_prefix(cache_, 0, 1, 18, &error);
         if (status == MHA_OK) status = mha_kv_cache_unshare(cache_, 1, free_block, &used, &error);
         return status == MHA_OK && used != 1 ? MHA_ERROR_INVALID_VALUE : status;
       }},
      CALL(mha_kv_cache_length, cache_, 1, &length_, &error),
      CALL(mha_kv_cache_read, cache_, 0, 0, 20, read_k_.floats(), nullptr, &error),
      CALL(mha_kv_cache_shape, cache_, &cache_config_, &error),
      CALL(mha_kv_cache_view, cache_buffer_.data(), cache_buffer_.size(), &cache_, &error),
      CALL(mha_kv_cache_truncate, cache_, 0, 0, &error),
      CALL(mha_rope_tables, &rope_, cosines_.floats(), sines_.floats(), &error),
      CALL(mha_alibi_slopes, kHeads, slopes_.floats(), &error),
      CALL(mha_t5_relative_bias, keys_.floats(), 32, 128, 1, kHeads, 20, 20, bias_.floats(),
           &error),
      CALL(mha_partials_merge, (kRows * kHeads), kWidth, merged_.floats(), merged_.floats(),
           merged_.floats(), set_, &error),
      CALL(mha_partials_finish, &states_, &error),
  };
};

TEST(Everything, ListsEveryFunctionOfTheHeaders) {
  const Everything everything(MHA_INSTRUCTION_SET_AUTO);
  std::string missing;
  for (const char *header :
       {"/mha.h", "/mha_options.h", "/mha_tables.h", "/mha_extra.h", "/mha_recurrent.h"}) {
    std::ifstream file(std::string(MHA_INCLUDE) + header);
    std::stringstream text;
    text << file.rdbuf();
    const std::string all = text.str();
    ASSERT_FALSE(all.empty());
    for (size_t at = all.find("\nMHA_API "); at != std::string::npos;
         at = all.find("\nMHA_API ", at + 1)) {
      const size_t end = all.find('(', at), name = all.find_last_of(" *", end) + 1;
      const std::string function = all.substr(name, end - name);
      const auto &known = everything.functions();
      if (std::none_of(known.begin(), known.end(),
                       [&](const Function &f) { return f.name == function; }))
        missing += function + " ";
    }
  }
  EXPECT_EQ(missing, "");
}

class EveryFunction : public InstructionSetTest {};

bool MayAllocate(const Function &function) {
  const std::string name = function.name;
  return name == "mha_layer_create" || name == "mha_linear_create" || name == "mha_layer_destroy";
}

TEST_P(EveryFunction, NeedsAtMostTheStackOfTheHeader) {
  if (MHA_TEST_SANITIZED) GTEST_SKIP() << "instrumented code needs more";
  const Everything everything(instruction_set());
  for (const Function &function : everything.functions()) {
    mha_status status = MHA_OK;
    const size_t needed = StackOf([&] { status = function.run(); });
    EXPECT_LE(needed, kMostStack) << function.name;
    EXPECT_EQ(status, MHA_OK) << function.name << ": " << everything.error.message;
    RecordProperty(function.name, static_cast<int>(needed));
  }
}

TEST(Everything, AllocatesNothingButCreate) {
  SKIP_WITHOUT_ALLOCATION_TRAP();
  const Everything everything(MHA_INSTRUCTION_SET_AUTO, 3);
  for (const Function &function : everything.functions()) {
    AllocationWatch watch;
    const mha_status status = function.run();
    watch.Stop();
    EXPECT_EQ(status, MHA_OK) << function.name;
    if (!MayAllocate(function)) {
      EXPECT_EQ(watch.allocations() + watch.releases(), 0) << function.name;
    }
  }
}

// So no call is a cancellation point, and a signal interrupts none.
TEST(Everything, MakesNoSystemCallButCreate) {
  SKIP_WITHOUT_SYSTEM_CALL_TRAP();
  const Everything everything(MHA_INSTRUCTION_SET_AUTO, 3);
  const SystemCalls calls = WatchSystemCalls([&] {
    int failures = 0;
    for (const Function &function : everything.functions()) {
      // A linear layer is there already.
      failures += !MayAllocate(function) && function.run() != MHA_OK;
    }
    return failures;
  });
  EXPECT_EQ(calls.first, -1) << "system call number";
  EXPECT_EQ(calls.exit_code, 0);
}

// ---- The floating-point environment, errno, the locale

// The rounding modes of a thread, without the flags of past exceptions.
struct FloatingPoint {
  uint64_t control = 0, x87 = 0;
  bool operator==(const FloatingPoint &other) const {
    return control == other.control && x87 == other.x87;
  }
};

#if defined(__x86_64__) && defined(__linux__)
constexpr uint64_t kUp = 0x4000, kDown = 0x2000, kToZero = 0x6000, kFlush = 0x8040, kMasks = 0x1f80;
FloatingPoint Get() {
  uint16_t x87;
  asm volatile("fnstcw %0" : "=m"(x87));
  return {__builtin_ia32_stmxcsr() & ~uint64_t{0x3f}, x87};
}
void Set(const FloatingPoint &to) {
  const uint16_t x87 = static_cast<uint16_t>(to.x87);
  asm volatile("fldcw %0" : : "m"(x87));
  __builtin_ia32_ldmxcsr(static_cast<unsigned>(to.control));
}
FloatingPoint With(uint64_t mode) { return {kMasks | mode, 0x027f}; }  // x87: double precision
#elif defined(__aarch64__)
constexpr uint64_t kUp = 1 << 22, kDown = 2 << 22, kToZero = 3 << 22, kFlush = 1 << 24;
FloatingPoint Get() {
  FloatingPoint now;
  asm volatile("mrs %0, fpcr" : "=r"(now.control));
  return now;
}
void Set(const FloatingPoint &to) { asm volatile("msr fpcr, %0" : : "r"(to.control)); }
FloatingPoint With(uint64_t mode) { return {mode, 0}; }
#else
constexpr uint64_t kUp = 0, kDown = 0, kToZero = 0, kFlush = 0;
FloatingPoint Get() { return {}; }
void Set(const FloatingPoint &) {}
FloatingPoint With(uint64_t) { return {}; }
#endif

// Runs a function in another floating-point environment.
template <typename Run>
void In(const FloatingPoint &environment, const Run &run) {
  const FloatingPoint before = Get();
  Set(environment);
  run();
  Set(before);
}

const uint64_t kModes[] = {0, kUp, kDown, kToZero, kFlush};

TEST_P(EveryFunction, LeavesFloatingPointErrnoAndLocaleAlone) {
  const Everything everything(instruction_set(), 3);
  ASSERT_TRUE(setlocale(LC_ALL, "C.UTF-8") || setlocale(LC_ALL, "en_US.UTF-8"));
  const std::string locale = setlocale(LC_ALL, nullptr);
  for (const uint64_t mode : kModes) {
    for (const Function &function : everything.functions()) {
      FloatingPoint after;
      int error = 0;
      In(With(mode), [&] {
        errno = 1234;
        function.run();
        error = errno;
        after = Get();
      });
      EXPECT_TRUE(after == With(mode)) << function.name << " in mode " << mode;
      EXPECT_EQ(error, 1234) << function.name;
      EXPECT_EQ(locale, setlocale(LC_ALL, nullptr)) << function.name;
    }
    // A call that fails, with a number in its message.
    const float large[1] = {1e30f};
    mha_linear_weights weights = Zeroed<mha_linear_weights>();
    weights.input_dim = weights.output_dim = 1;
    weights.w.data = large;
    weights.format.type = MHA_TYPE_F16;
    In(With(mode), [&] {
      errno = 1234;
      mha_layer *layer;
      mha_error sentence;
      EXPECT_EQ(mha_linear_create(&weights, nullptr, &layer, &sentence), MHA_ERROR_OUT_OF_RANGE);
      EXPECT_EQ(errno, 1234);
      EXPECT_TRUE(Get() == With(mode));
    });
  }
  setlocale(LC_ALL, "C");
}

// In other modes, mha_forward_info reports that the bits are not those of the contract. Calls still
// read and write what they should, and come near.
TEST_P(EveryFunction, SaysThatOtherModesOfTheThreadChangeBits) {
  if (With(kUp) == With(0)) GTEST_SKIP() << "modes are not known here";
  Everything everything(instruction_set(), 3);
  const std::vector<float> expected = everything.Results();
  for (const uint64_t mode : kModes) {
    SCOPED_TRACE(mode);
    for (const Function &function : everything.functions()) {
      everything.info.contract = MHA_CONTRACT;
      mha_status status = MHA_OK;
      In(With(mode), [&] { status = function.run(); });
      EXPECT_EQ(status, MHA_OK) << function.name;
      const bool is_info = std::string(function.name).find("info") != std::string::npos;
      EXPECT_EQ(everything.info.contract, is_info && mode != 0 ? 0u : MHA_CONTRACT)
          << function.name;
    }
    const std::vector<float> results = everything.Results();
    double most = 0;
    for (size_t i = 0; i < everything.NumFloatResults(); i++)
      most = std::max<double>(most, std::fabs(results[i] - expected[i]));
    EXPECT_LT(most, mode == 0 ? 1e-30 : 1e-4);
  }
}

MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(EveryFunction);

// ---- Memory that is no layer or cache

// All functions that take a layer or a cache refuse what is passed in its place, with a message
// that contains this word.
void ExpectRefused(const Everything &everything, const char *what, const char *word,
                   const char *functions) {
  int refused = 0;
  for (const Function &function : everything.functions()) {
    if (!HasWord(functions, function.name)) continue;
    EXPECT_EQ(function.run(), MHA_ERROR_INVALID_VALUE) << function.name << " with " << what;
    EXPECT_TRUE(HasWord(everything.error.message, word))
        << function.name << " with " << what << ": " << everything.error.message;
    ++refused;
  }
  EXPECT_EQ(refused, std::count(functions, functions + std::strlen(functions), ' ') + 1);
}
void ExpectNoLayer(const void *memory, const char *what) {
  Everything everything(MHA_INSTRUCTION_SET_AUTO);
  const auto *layer = static_cast<const mha_layer *>(memory);
  everything.UseLayer(layer);
  ExpectRefused(
      everything, what, "destroyed",
      "mha_forward_workspace mha_forward mha_forward_info mha_linear_workspace mha_linear "
      "mha_linear_info mha_layer_shape");
  mha_layer_destroy(const_cast<mha_layer *>(layer));  // does nothing
}
void ExpectNoCache(void *memory, const char *what, const char *word = "cache") {
  Everything everything(MHA_INSTRUCTION_SET_AUTO);
  everything.UseCache(static_cast<mha_kv_cache *>(memory));
  ExpectRefused(
      everything, what, word,
      "mha_kv_cache_shape mha_kv_cache_length mha_kv_cache_truncate "
      "mha_kv_cache_set_blocks mha_kv_cache_copy_prefix "
      "mha_kv_cache_append mha_kv_cache_read mha_forward_workspace mha_forward mha_forward_info "
      "mha_attention_workspace mha_attention "
      "mha_attention_info mha_choose_keys_workspace mha_choose_keys");
}

mha_kv_cache_config SmallCache() {
  mha_kv_cache_config config = Zeroed<mha_kv_cache_config>();
  config.num_sequences = config.num_kv_heads = 2;
  config.capacity = 48;
  config.head_dim = 16;
  return config;
}

TEST(Handles, MemoryThatIsNoLayerOrCacheIsRefused) {
  const LayerData data(SmallLayer());
  const Layer layer = Create(data);
  Cache cache(SmallCache());
  const Memory zeros(4096, Place::kBeforeGuard, 64), packed = data.Pack();
  ExpectNoLayer(zeros.data(), "zeroed memory");
  ExpectNoLayer(zeros.data() + 3, "memory of any alignment");
  ExpectNoLayer(cache.get(), "a cache");
  ExpectNoLayer(packed.data(), "a packed layer, not viewed");
  ExpectNoCache(zeros.data(), "zeroed memory");
  ExpectNoCache(zeros.data() + 8, "memory of any alignment", "aligned");
  ExpectNoCache(layer.get(), "a layer");
}

TEST(Handles, ALayerThatWasDestroyedOrMovedIsRefused) {
  const LayerData data(SmallLayer());
  RecordingAllocator recorder;  // whose memory stays
  const mha_layer_options options = Options(MHA_INSTRUCTION_SET_AUTO, nullptr, &recorder.allocator);
  mha_layer *layer = nullptr;
  ASSERT_EQ(mha_layer_create(&data.config, &data.weights, &options, &layer, nullptr), MHA_OK);
  mha_layer_destroy(layer);
  EXPECT_EQ(recorder.releases, 1);
  ExpectNoLayer(layer, "a layer that was destroyed");
  EXPECT_EQ(recorder.releases, 1) << "not a second time";
  const Memory packed = data.Pack(), elsewhere(mha_layer_view_size(), Place::kBeforeGuard, 64);
  const View view(packed);
  ASSERT_EQ(view.status, MHA_OK);
  std::memcpy(elsewhere.data(), view.layer, mha_layer_view_size() - 63);
  ExpectNoLayer(elsewhere.data(), "a layer that was moved");
}

// A cache contains no address, so its bytes work at any other that is aligned to 64.
TEST(Handles, ACacheThatWasMovedWorksWhereItIsAligned) {
  Cache cache(SmallCache());
  const std::vector<float> rows = Random(1).Normals(3 * 2 * 16);
  ASSERT_EQ(mha_kv_cache_append(cache.get(), 1, 3, rows.data(), rows.data(), nullptr), MHA_OK);
  const Memory elsewhere(cache.buffer().size() + 64, Place::kAfterGuard);
  std::memcpy(elsewhere.data() + 64, cache.buffer().data(), cache.buffer().size());
  std::vector<float> read(rows.size());
  const auto *moved = reinterpret_cast<const mha_kv_cache *>(elsewhere.data() + 64);
  EXPECT_EQ(mha_kv_cache_read(moved, 1, 0, 3, read.data(), nullptr, nullptr), MHA_OK);
  EXPECT_EQ(read, rows);
  std::memmove(elsewhere.data() + 8, cache.buffer().data(), cache.buffer().size());
  ExpectNoCache(elsewhere.data() + 8, "a cache at another alignment", "aligned");
  cache.buffer().Fill(0);
  ExpectNoCache(cache.get(), "a buffer that was used for something else");
}

// ---- A child, and other copies of the library

// Calls with threads in the parent leave no state that a child would need.
TEST(Fork, ChildrenUseTheLayersAndCachesOfTheirParent) {
  const Scheduler threads(3, RunTogether);
  const Everything everything(MHA_INSTRUCTION_SET_AUTO, 3);
  LayerProblem sizes = OfItself(SquareSizes(32, 2, 2, 16), 20);
  sizes.batch = 2;
  sizes.is_causal = true;
  const LayerProblem problem = NormalLayer(sizes);
  const Layer layer = Create(LayerData(problem));
  Cache cache(SmallCache()), copy = cache.Copy();
  ForwardData call(layer.get(), problem, {Guarded()});
  call.SetScheduler(threads.get());
  std::vector<Outputs> expected;  // of two calls, the second after the first
  for (Cache *of : {&copy, &copy, &cache}) {
    call.args.call.cache = of->get();
    expected.push_back(call.Compute());
  }
  const std::vector<float> results = everything.Results();
  const pid_t child = fork();
  if (child == 0) {
    bool is_right = SameBits(call.Compute(), expected[1]) && cache.Length(1) == 40;
    for (const Function &function : everything.functions())
      is_right = function.run() == MHA_OK && is_right;
    _exit(is_right && everything.Results() == results ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_EQ(cache.Length(1), 20) << "the child's";
  EXPECT_TRUE(SameBits(call.Compute(), expected[1]));
}

#if defined(MHA_SHARED_LIBRARY)
// What a program does with its own copy of the library.
struct Copy {
  explicit Copy(const std::string &path) : library(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (library == nullptr) throw std::runtime_error(dlerror());
    Find("mha_layer_create", &create);
    Find("mha_layer_destroy", &destroy);
    Find("mha_forward", &forward);
  }
  template <typename Pointer>
  void Find(const char *name, Pointer *pointer) {
    *pointer = reinterpret_cast<Pointer>(dlsym(library, name));
    if (*pointer == nullptr) throw std::runtime_error(name);
  }
  Outputs Run(const LayerData &data, ForwardData &call, const Memory &workspace) const {
    mha_layer *layer = nullptr;
    mha_error error;
    call.PoisonOutputs();
    Check(create(&data.config, &data.weights, nullptr, &layer, &error), error);
    const mha_forward_args args = call.Given(call.args);
    Check(forward(layer, &args, workspace.data(), workspace.size(), &error), error);
    destroy(layer);
    return call.Results();
  }

  void *library;
  decltype(&mha_layer_create) create;
  decltype(&mha_layer_destroy) destroy;
  decltype(&mha_forward) forward;
};

// Mappings, those of the library among them, open files and resident pages of this process.
struct Footprint {
  int64_t mappings = 0, of_library = 0, files = 0, pages = 0;
};
Footprint Measure() {
  Footprint now;
  std::ifstream mappings("/proc/self/maps");
  for (std::string line; std::getline(mappings, line); ++now.mappings)
    now.of_library += line.find("libmha.so") != std::string::npos;
  for (int file = 0; file < 1024; ++file) now.files += fcntl(file, F_GETFD) != -1;
  std::ifstream("/proc/self/statm") >> now.pages >> now.pages;
  return now;
}

// A layer and a call of it, which the tests of copies run.
struct Calls {
  const LayerProblem problem = NormalLayer(OfItself(SquareSizes(48, 3, 3, 16), 5));
  const LayerData data{problem};
  const Layer own = Create(data);
  ForwardData call{own.get(), problem, {Guarded()}};
  const Outputs expected = call.Compute();
  const Memory workspace{call.WorkspaceBytes()};
  bool AreRight(const Copy &copy) { return SameBits(copy.Run(data, call, workspace), expected); }
};

TEST(Copies, ComeAndGoAThousandTimes) {
  const Footprint start = Measure();
  if (MHA_TEST_SANITIZED || start.pages == 0) GTEST_SKIP() << "needs /proc, and malloc as it is";
  Calls calls;
  Footprint warm;
  int different = 0;
  for (int i = 0; i < 1020; ++i) {
    const Copy copy(MHA_SHARED_LIBRARY);
    different += !calls.AreRight(copy);
    ASSERT_EQ(dlclose(copy.library), 0);
    if (i == 19) warm = Measure();
  }
  const Footprint end = Measure();
  EXPECT_EQ(different, 0);
  EXPECT_EQ(end.of_library, start.of_library);
  EXPECT_LE(end.pages, warm.pages + 8);
  EXPECT_EQ(end.mappings, warm.mappings);
  EXPECT_EQ(end.files, warm.files);
}

// Two copies of the shared library, and the one that this program is linked with.
TEST(Copies, WorkSideBySide) {
  const std::string path = testing::TempDir() + "mha_copy_" + std::to_string(getpid()) + ".so";
  std::ofstream(path, std::ios::binary)
      << std::ifstream(MHA_SHARED_LIBRARY, std::ios::binary).rdbuf();
  const Copy one(MHA_SHARED_LIBRARY), other(path);
  unlink(path.c_str());
  ASSERT_NE(one.forward, other.forward);
  ASSERT_NE(&mha_forward, other.forward);
  Calls calls;
  for (int i = 0; i < 3; ++i)
    EXPECT_TRUE(calls.AreRight(one) && calls.AreRight(other) &&
                SameBits(calls.call.Compute(), calls.expected));
  dlclose(one.library);
  EXPECT_TRUE(calls.AreRight(other));
  dlclose(other.library);
  EXPECT_TRUE(SameBits(calls.call.Compute(), calls.expected));
}
#endif

}  // namespace
