// What the interface tests share: memory between inaccessible pages, small layers and calls whose data lies in such memory, and the
// checks of what every error must look like. Of the library only mha.h is used.

#ifndef MHA_TESTS_INTERFACE_SUPPORT_H
#define MHA_TESTS_INTERFACE_SUPPORT_H

#include <gtest/gtest.h>
#include <mha.h>
#if defined(_WIN32)
#include <windows.h>
#else
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <regex>
#include <string>
#include <utility>
#include <vector>

#include "support/outputs.h"
#include "support/random.h"

// Sanitizers bring their own malloc and make system calls of their own, so the tests that count these can't run under them.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define MHA_TEST_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define MHA_TEST_SANITIZED 1
#endif
#endif
#ifndef MHA_TEST_SANITIZED
#define MHA_TEST_SANITIZED 0
#endif

namespace interface_support {

// ---- Memory ----------------------------------------------------------------------------------------------------------------------

// Whole pages, as the system has them. Addresses alone at first: bytes that nobody may touch until they are allowed.
enum class Access { kNone, kRead, kReadAndWrite };

#if defined(_WIN32)
inline size_t PageBytes() {
  SYSTEM_INFO info;
  GetSystemInfo(&info);
  return info.dwPageSize;
}
inline void *MapPages(size_t bytes) { return VirtualAlloc(nullptr, bytes, MEM_RESERVE, PAGE_NOACCESS); }
inline void UnmapPages(void *pages, size_t) { VirtualFree(pages, 0, MEM_RELEASE); }
inline void AllowPages(void *pages, size_t bytes, Access access) {
  DWORD before;
  if (access == Access::kReadAndWrite) VirtualAlloc(pages, bytes, MEM_COMMIT, PAGE_READWRITE);  // again is no change
  VirtualProtect(pages, bytes, access == Access::kNone ? PAGE_NOACCESS : access == Access::kRead ? PAGE_READONLY : PAGE_READWRITE, &before);
}
#else
inline size_t PageBytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }
inline void *MapPages(size_t bytes) {
  void *pages = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return pages == MAP_FAILED ? nullptr : pages;
}
inline void UnmapPages(void *pages, size_t bytes) { munmap(pages, bytes); }
inline void AllowPages(void *pages, size_t bytes, Access access) {
  mprotect(pages, bytes, access == Access::kNone ? PROT_NONE : access == Access::kRead ? PROT_READ : PROT_READ | PROT_WRITE);
}
#endif

// Where the bytes lie: a read or write past the end, or before the start, faults at once.
enum class Side { kBeforeGuard, kAfterGuard };

// Exactly this many bytes, with an inaccessible page right behind them (or right before them). With an alignment, up to
// alignment - 1 accessible bytes may lie between the end and the guard. No bytes give a pointer that must not be touched at all.
class Memory {
 public:
  Memory() = default;
  explicit Memory(size_t bytes, Side side = Side::kBeforeGuard, size_t alignment = 1) : bytes_(bytes) {
    const size_t page = PageBytes();
    inner_bytes_ = (bytes + page - 1) / page * page;
    void *mapped = MapPages(inner_bytes_ + 2 * page);
    if (mapped == nullptr) {
      std::fprintf(stderr, "the test could not map %zu bytes\n", bytes);
      std::abort();
    }
    base_ = static_cast<unsigned char *>(mapped);
    inner_ = base_ + page;
    Allow(Access::kReadAndWrite);
    data_ = inner_;
    if (side == Side::kBeforeGuard) data_ = inner_ + ((inner_bytes_ - bytes) & ~(alignment - 1));
  }
  Memory(Memory &&other) noexcept { Swap(other); }
  Memory &operator=(Memory &&other) noexcept {
    Swap(other);
    return *this;
  }
  ~Memory() {
    if (base_ != nullptr) UnmapPages(base_, inner_bytes_ + 2 * PageBytes());
  }

  unsigned char *data() const { return data_; }
  float *floats() const { return reinterpret_cast<float *>(data_); }
  size_t size() const { return bytes_; }
  size_t count() const { return bytes_ / sizeof(float); }

  void Fill(int byte) { std::memset(data_, byte, bytes_); }
  bool Holds(int byte) const {
    return std::all_of(data_, data_ + bytes_, [byte](unsigned char b) { return b == static_cast<unsigned char>(byte); });
  }
  std::string Bytes() const { return std::string(reinterpret_cast<const char *>(data_), bytes_); }

  void Forbid() { Allow(Access::kNone); }
  void Freeze() { Allow(Access::kRead); }
  void Thaw() { Allow(Access::kReadAndWrite); }
  // From the given byte (rounded up to a page) to the end.
  void ForbidFrom(size_t offset) {
    const size_t page = PageBytes();
    const size_t first = (static_cast<size_t>(data_ - inner_) + offset + page - 1) / page * page;
    if (first < inner_bytes_) AllowPages(inner_ + first, inner_bytes_ - first, Access::kNone);
  }

 private:
  void Allow(Access access) {
    if (inner_bytes_ != 0) AllowPages(inner_, inner_bytes_, access);
  }
  void Swap(Memory &other) {
    std::swap(base_, other.base_);
    std::swap(inner_, other.inner_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(inner_bytes_, other.inner_bytes_);
  }

  unsigned char *base_ = nullptr;
  unsigned char *inner_ = nullptr;
  unsigned char *data_ = nullptr;
  size_t bytes_ = 0;
  size_t inner_bytes_ = 0;
};

using support::Random;
using support::SameBits;

inline Memory RandomFloats(int64_t count, Random &random, Side side = Side::kBeforeGuard) {
  Memory memory(static_cast<size_t>(count) * sizeof(float), side);
  for (size_t i = 0; i < memory.count(); ++i) memory.floats()[i] = random.Uniform();
  return memory;
}

// ---- Errors ----------------------------------------------------------------------------------------------------------------------

inline std::string Name(mha_status status) { return std::string(mha_status_string(status)) + " (" + std::to_string(status) + ")"; }

struct Expected {
  mha_status status;
  std::vector<uint32_t> arguments;  // several where two parameters contradict each other: either may be named as the one at fault
  std::vector<std::string> words;   // that the sentence must contain, as whole words; "a|b" = one of both
};

// "6" is no word of "16", and "w_q" is none of "w_qkv".
inline bool HasWord(const std::string &sentence, const std::string &word) {
  const size_t bar = word.find('|');
  if (bar != std::string::npos) return HasWord(sentence, word.substr(0, bar)) || HasWord(sentence, word.substr(bar + 1));
  const auto inside = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; };
  for (size_t at = sentence.find(word); at != std::string::npos; at = sentence.find(word, at + 1)) {
    const size_t end = at + word.size();
    if ((at == 0 || !inside(sentence[at - 1])) && (end == sentence.size() || !inside(sentence[end]))) return true;
  }
  return false;
}

// "1 row" and "2 rows", but not "1 rows".
inline bool CountsOneAsMany(const std::string &sentence) {
  static const std::regex pattern(
      "(^|[^0-9.-])1 (block|byte|column|element|head|key|number|position|querie|row|sequence|table|thread|value)s\\b");
  return std::regex_search(sentence, pattern);
}

inline void ExpectError(mha_status returned, const mha_error &error, const Expected &expected) {
  ASSERT_NE(std::memchr(error.message, 0, sizeof error.message), nullptr) << "the message is not 0-terminated";
  const std::string message = error.message;
  EXPECT_EQ(Name(returned), Name(expected.status)) << message;
  EXPECT_EQ(error.status, returned);
  EXPECT_TRUE(std::count(expected.arguments.begin(), expected.arguments.end(), error.argument) > 0)
      << "parameter " << error.argument << " is said to be at fault: " << message;
  EXPECT_FALSE(message.empty());
  EXPECT_FALSE(CountsOneAsMany(message)) << message;
  for (char c : message) EXPECT_TRUE(c >= ' ' && c <= '~') << "code " << int{c} << " in: " << message;
  for (const std::string &word : expected.words) EXPECT_TRUE(HasWord(message, word)) << "no \"" << word << "\" in: " << message;
}

inline void ExpectNoError(mha_status returned, const mha_error &error) {
  ASSERT_NE(std::memchr(error.message, 0, sizeof error.message), nullptr) << "the message is not 0-terminated";
  EXPECT_EQ(Name(returned), Name(MHA_OK)) << error.message;
  EXPECT_EQ(error.status, MHA_OK);
  EXPECT_EQ(error.argument, 0u);
  EXPECT_STREQ(error.message, "");
}

// An error struct that shows whether it was written.
inline mha_error UnwrittenError() {
  mha_error error;
  std::memset(&error, 0xA5, sizeof error);
  return error;
}

// Every failing call is made twice, because the error struct is optional. call: mha_status(mha_error *).
template <typename Call>
void ExpectFails(const Call &call, const Expected &expected) {
  mha_error error = UnwrittenError();
  const mha_status returned = call(&error);
  ExpectError(returned, error, expected);
  EXPECT_EQ(Name(call(nullptr)), Name(expected.status)) << "without an error struct";
}

template <typename Call>
void ExpectSucceeds(const Call &call) {
  mha_error error = UnwrittenError();
  const mha_status returned = call(&error);
  ExpectNoError(returned, error);
  EXPECT_EQ(Name(call(nullptr)), Name(MHA_OK)) << "without an error struct";
}

// ---- Instruction sets ------------------------------------------------------------------------------------------------------------

inline std::vector<uint32_t> InstructionSets() {
  std::vector<uint32_t> sets;
  for (uint32_t set = MHA_INSTRUCTION_SET_SCALAR; set < 32; ++set) {
    if ((mha_instruction_sets() >> set & 1u) != 0) sets.push_back(set);
  }
  return sets;
}

// One that this machine or build lacks: the other architecture's.
inline uint32_t AbsentInstructionSet() {
  return (mha_instruction_sets() >> MHA_INSTRUCTION_SET_NEON & 1u) != 0 ? MHA_INSTRUCTION_SET_AVX2 : MHA_INSTRUCTION_SET_NEON;
}

inline mha_layer_options Options(uint32_t instruction_set = MHA_INSTRUCTION_SET_AUTO, mha_sgemm sgemm = nullptr,
                                 const mha_allocator *allocator = nullptr) {
  mha_layer_options options = {};
  options.struct_size = sizeof options;
  options.instruction_set = instruction_set;
  options.sgemm = sgemm;
  options.allocator = allocator;
  return options;
}

// The caller's matrix product in its plainest form; checks nothing.
inline void PlainSgemm(int, int, int, int m, int n, int k, float alpha, const float *a, int lda, const float *b, int ldb, float beta,
                       float *c, int ldc) {
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      float sum = 0;
      for (int l = 0; l < k; ++l) sum += a[int64_t{i} * lda + l] * b[int64_t{l} * ldb + j];
      float &target = c[int64_t{i} * ldc + j];
      target = alpha * sum + (beta == 0 ? 0 : beta * target);
    }
  }
}

// ---- Threads ---------------------------------------------------------------------------------------------------------------------

// A scheduler that runs every task on the calling thread, the last one first, and remembers whether the library kept the rules.
struct SerialScheduler {
  explicit SerialScheduler(uint32_t num_threads) {
    scheduler = {};
    scheduler.context = this;
    scheduler.num_threads = num_threads;
    scheduler.parallel_for = [](void *context, uint32_t count, void (*task)(void *, uint32_t), void *task_context) {
      auto *self = static_cast<SerialScheduler *>(context);
      self->most_tasks = std::max(self->most_tasks, count);
      ++self->calls;
      for (uint32_t i = count; i > 0; --i) task(task_context, i - 1);
    };
  }
  SerialScheduler(const SerialScheduler &) = delete;
  mha_scheduler scheduler;
  uint32_t most_tasks = 0;
  uint32_t calls = 0;
};

// ---- Layers ----------------------------------------------------------------------------------------------------------------------

// The shape of a layer, nothing left to defaults but the scale. output_dim 0 = no output projection.
struct LayerShape {
  int64_t query_dim = 10;
  int64_t key_dim = 7;
  int64_t value_dim = 9;
  int64_t output_dim = 11;
  int64_t num_heads = 4;
  int64_t num_kv_heads = 2;
  int64_t head_dim = 3;
  int64_t head_dim_v = 5;
  bool biases = true;
  float scale = 0;

  static LayerShape SelfAttention(int64_t dim, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim) {
    LayerShape shape;
    shape.query_dim = shape.key_dim = shape.value_dim = shape.output_dim = dim;
    shape.num_heads = num_heads;
    shape.num_kv_heads = num_kv_heads;
    shape.head_dim = shape.head_dim_v = head_dim;
    return shape;
  }

  int64_t q_width() const { return num_heads * head_dim; }
  int64_t k_width() const { return num_kv_heads * head_dim; }
  int64_t v_width() const { return num_kv_heads * head_dim_v; }
  int64_t context_width() const { return num_heads * head_dim_v; }
  int64_t output_width() const { return output_dim == 0 ? context_width() : output_dim; }
  int64_t weight_count() const {
    return query_dim * q_width() + key_dim * k_width() + value_dim * v_width() + context_width() * output_dim +
           (biases ? q_width() + k_width() + v_width() + output_dim : 0);
  }
};

inline std::ostream &operator<<(std::ostream &stream, const LayerShape &s) {
  return stream << "query_dim " << s.query_dim << " key_dim " << s.key_dim << " value_dim " << s.value_dim << " output_dim " << s.output_dim
                << " num_heads " << s.num_heads << " num_kv_heads " << s.num_kv_heads << " head_dim " << s.head_dim << " head_dim_v "
                << s.head_dim_v << (s.biases ? " with biases" : "");
}

// A layer's weights in memory of their own, and the structs that describe them. Weights are about 1 / sqrt(width), so that scores and
// outputs are of the order of 1 for any shape.
struct LayerData {
  explicit LayerData(const LayerShape &layer_shape, Side side = Side::kBeforeGuard, uint64_t seed = 1) : shape(layer_shape) {
    Random random(seed);
    const auto matrix = [&](int64_t in, int64_t out) {
      Memory memory = RandomFloats(in * out, random, side);
      const float factor = 1.0f / std::sqrt(static_cast<float>(in));
      for (size_t i = 0; i < memory.count(); ++i) memory.floats()[i] *= factor;
      return memory;
    };
    w_q = matrix(shape.query_dim, shape.q_width());
    w_k = matrix(shape.key_dim, shape.k_width());
    w_v = matrix(shape.value_dim, shape.v_width());
    config = {};
    config.struct_size = sizeof config;
    config.query_dim = shape.query_dim;
    config.key_dim = shape.key_dim;
    config.value_dim = shape.value_dim;
    config.output_dim = shape.output_dim;
    config.num_heads = shape.num_heads;
    config.num_kv_heads = shape.num_kv_heads;
    config.head_dim = shape.head_dim;
    config.head_dim_v = shape.head_dim_v;
    config.scale = shape.scale;
    weights = {};
    weights.struct_size = sizeof weights;
    weights.layout = MHA_LAYOUT_IN_OUT;
    weights.w_q = w_q.floats();
    weights.w_k = w_k.floats();
    weights.w_v = w_v.floats();
    if (shape.output_dim != 0) {
      w_o = matrix(shape.context_width(), shape.output_dim);
      weights.w_o = w_o.floats();
    }
    if (shape.biases) {
      b_q = RandomFloats(shape.q_width(), random, side);
      b_k = RandomFloats(shape.k_width(), random, side);
      b_v = RandomFloats(shape.v_width(), random, side);
      weights.b_q = b_q.floats();
      weights.b_k = b_k.floats();
      weights.b_v = b_v.floats();
      if (shape.output_dim != 0) {
        b_o = RandomFloats(shape.output_dim, random, side);
        weights.b_o = b_o.floats();
      }
    }
  }
  LayerData(const LayerData &) = delete;

  size_t PackSize(const mha_layer_options *options = nullptr) const {
    size_t bytes = 0;
    mha_error error;
    EXPECT_EQ(mha_layer_pack_size(&config, &weights, options, &bytes, &error), MHA_OK) << error.message;
    return bytes;
  }

  // Packed into memory of exactly the size that it needs, over bytes of a given value.
  Memory Pack(const mha_layer_options *options = nullptr, int fill = 0xCC, Side side = Side::kBeforeGuard) const {
    Memory buffer(PackSize(options), side, 64);
    buffer.Fill(fill);
    mha_error error;
    EXPECT_EQ(mha_layer_pack(&config, &weights, options, buffer.data(), buffer.size(), &error), MHA_OK) << error.message;
    return buffer;
  }

  void Freeze() {
    for (Memory *memory : {&w_q, &w_k, &w_v, &w_o, &b_q, &b_k, &b_v, &b_o}) memory->Freeze();
  }

  LayerShape shape;
  mha_layer_config config;
  mha_layer_weights weights;
  Memory w_q, w_k, w_v, w_o, b_q, b_k, b_v, b_o;
};

using LayerPointer = std::unique_ptr<mha_layer, void (*)(mha_layer *)>;

inline LayerPointer Create(const LayerData &data, const mha_layer_options *options = nullptr) {
  mha_layer *layer = nullptr;
  mha_error error;
  EXPECT_EQ(mha_layer_create(&data.config, &data.weights, options, &layer, &error), MHA_OK) << error.message;
  return LayerPointer(layer, mha_layer_destroy);
}

inline LayerPointer Create(const LayerData &data, uint32_t instruction_set) {
  const mha_layer_options options = Options(instruction_set);
  return Create(data, &options);
}

// A layer viewed in a packed buffer, its storage exactly as large as asked for.
struct View {
  explicit View(const Memory &buffer, const mha_layer_options *options = nullptr) : View(buffer.data(), buffer.size(), options) {}
  View(const void *buffer, size_t bytes, const mha_layer_options *options) : storage(mha_layer_view_size(), Side::kBeforeGuard, 16) {
    status = mha_layer_view(buffer, bytes, options, storage.data(), storage.size(), &layer, &error);
  }
  Memory storage;
  const mha_layer *layer = nullptr;
  mha_error error;
  mha_status status;
};

// ---- Calls -----------------------------------------------------------------------------------------------------------------------

// The optional outputs, as bits.
enum : unsigned {
  kAttentionWeights = 1,
  kLse = 2,
  kTapScores = 4,
  kTapScaledScores = 8,
  kTapMaskedScores = 16,
  kTapContext = 32,
  kAttentionOutputs = 63,  // all that mha_attention can give
  kTapQ = 64,
  kTapK = 128,
  kTapV = 256,
  kForwardOutputs = 511,
};

// Rows of numbers with strides, ending on a guard page right after the last row's last number. What lies between the rows is NaN (bytes
// 0xFF): as an input it must not be read into the result, as an output it must stay.
struct Rows {
  Rows() = default;
  Rows(int64_t batch_, int64_t n_, int64_t heads_, int64_t width_, int64_t batch_stride_, int64_t row_stride_, int64_t head_stride_,
       Side side)
      : batch(batch_),
        n(n_),
        heads(heads_),
        width(width_),
        batch_stride(batch_stride_),
        row_stride(row_stride_),
        head_stride(head_stride_) {
    const bool empty = batch == 0 || n == 0;
    const int64_t extent = empty ? 0 : (batch - 1) * batch_stride + (n - 1) * row_stride + (heads - 1) * head_stride + width;
    memory = Memory(static_cast<size_t>(extent) * sizeof(float), side);
    Poison();
  }
  template <typename Function>
  void Each(const Function &function) const {
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t h = 0; h < heads; ++h) {
          for (int64_t d = 0; d < width; ++d) function(memory.floats()[b * batch_stride + i * row_stride + h * head_stride + d]);
        }
      }
    }
  }
  void Randomize(Random &random) {
    Each([&](float &x) { x = random.Uniform(); });
  }
  void Poison() { memory.Fill(0xFF); }
  void AppendTo(std::vector<float> &values) const {
    Each([&](float &x) { values.push_back(x); });
  }
  // Overwrites the rows with the poison; then nothing but poison may be left.
  bool GapsUntouched() const {
    std::vector<float> kept;
    AppendTo(kept);
    Each([](float &x) { std::memset(&x, 0xFF, sizeof x); });
    const bool untouched = memory.Holds(0xFF);
    size_t i = 0;
    Each([&](float &x) { std::memcpy(&x, &kept[i++], sizeof x); });
    return untouched;
  }

  int64_t batch = 0, n = 0, heads = 0, width = 0, batch_stride = 0, row_stride = 0, head_stride = 0;
  Memory memory;
};

// How rows follow each other.
enum class Order {
  kContiguous,     // [batch, n, heads, width], all strides 0
  kHeadsFirst,     // [batch, heads, n, width]
  kSequenceFirst,  // [n, batch, heads, width]
  kGaps,           // [batch, n, heads, width] with something else between the rows, sequences and heads
};

inline Rows MakeRows(Order order, int64_t batch, int64_t n, int64_t heads, int64_t width, Side side) {
  switch (order) {
    case Order::kHeadsFirst:
      return Rows(batch, n, heads, width, heads * n * width, width, n * width, side);
    case Order::kSequenceFirst:
      return Rows(batch, n, heads, width, heads * width, batch * heads * width, width, side);
    case Order::kGaps:
      return Rows(batch, n, heads, width, n * (heads * (width + 2) + 3) + 5, heads * (width + 2) + 3, width + 2, side);
    default:
      return Rows(batch, n, heads, width, n * heads * width, heads * width, width, side);
  }
}

struct CallShape {
  int64_t batch = 2;
  int64_t n_q = 3;
  int64_t n_kv = 4;  // of a self-attention: n_q
  bool key = true;   // given; otherwise self-attention
  bool value = true;
  bool is_causal = false;
  bool q_start = false;
  unsigned outputs = 0;
  Order order = Order::kContiguous;  // of inputs and the output; a projection's rows have no heads, so there kHeadsFirst = kContiguous
};

inline std::ostream &operator<<(std::ostream &stream, const CallShape &s) {
  return stream << "batch " << s.batch << " n_q " << s.n_q << " n_kv " << s.n_kv << (s.key ? "" : " self") << (s.is_causal ? " causal" : "")
                << (s.q_start ? " q_start" : "") << " outputs " << s.outputs << " order " << static_cast<int>(s.order);
}

// The optional outputs that both entries have.
struct OptionalOutputs {
  OptionalOutputs(const CallShape &shape, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t head_dim_v, Side side) {
    const int64_t n_kv = shape.key || shape.value ? shape.n_kv : shape.n_q;
    const int64_t pairs = shape.batch * num_heads * shape.n_q * n_kv;
    taps = {};
    taps.struct_size = sizeof taps;
    const auto give = [&](unsigned bit, int64_t count, float *&pointer) {
      if ((shape.outputs & bit) == 0) return;
      given.emplace_back(static_cast<size_t>(count) * sizeof(float), side);
      given.back().Fill(0xFF);
      pointer = given.back().floats();
    };
    give(kAttentionWeights, pairs, attention_weights);
    give(kLse, shape.batch * num_heads * shape.n_q, lse);
    give(kTapScores, pairs, taps.scores);
    give(kTapScaledScores, pairs, taps.scaled_scores);
    give(kTapMaskedScores, pairs, taps.masked_scores);
    give(kTapContext, shape.batch * shape.n_q * num_heads * head_dim_v, taps.context);
    give(kTapQ, shape.batch * shape.n_q * num_heads * head_dim, taps.q);
    give(kTapK, shape.batch * n_kv * num_kv_heads * head_dim, taps.k);
    give(kTapV, shape.batch * n_kv * num_kv_heads * head_dim_v, taps.v);
  }
  bool any_tap() const { return (taps.q || taps.k || taps.v || taps.scores || taps.scaled_scores || taps.masked_scores || taps.context); }

  std::vector<Memory> given;
  float *attention_weights = nullptr;
  float *lse = nullptr;
  mha_taps taps;
};

// What the two entries' data have in common, so that the tests can run over both.
struct CallData {
  CallData(const CallShape &call_shape, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t head_dim_v, Side side)
      : shape(call_shape),
        optional(shape, num_heads, num_kv_heads, head_dim, head_dim_v, side),
        starts(static_cast<size_t>(shape.batch) * sizeof(int64_t), side) {
    for (int64_t b = 0; b < shape.batch; ++b) q_start()[b] = b % 3 == 2 ? 0 : b % 3 + 1;
  }
  virtual ~CallData() = default;
  CallData(const CallData &) = delete;

  virtual mha_status Workspace(size_t *bytes, mha_error *error) const = 0;
  virtual mha_status Run(void *workspace, size_t workspace_bytes, mha_error *error) const = 0;
  virtual mha_status Info(mha_call_info *info, mha_error *error) const = 0;
  virtual void SetScheduler(const mha_scheduler *scheduler) = 0;

  int64_t *q_start() const { return reinterpret_cast<int64_t *>(starts.data()); }

  size_t WorkspaceBytes() const {
    size_t bytes = 0;
    mha_error error;
    EXPECT_EQ(Workspace(&bytes, &error), MHA_OK) << error.message;
    return bytes;
  }
  // All outputs one after the other.
  std::vector<float> Outputs() const {
    std::vector<float> values;
    output.AppendTo(values);
    for (const Memory &memory : optional.given) values.insert(values.end(), memory.floats(), memory.floats() + memory.count());
    return values;
  }
  void PoisonOutputs() {
    output.Poison();
    for (Memory &memory : optional.given) memory.Fill(0xFF);
  }
  bool OutputsUntouched() const {
    return output.memory.Holds(0xFF) &&
           std::all_of(optional.given.begin(), optional.given.end(), [](const Memory &memory) { return memory.Holds(0xFF); });
  }
  // Runs with a workspace of exactly the bytes needed that ends on a guard page.
  std::vector<float> Compute(int workspace_fill = 0xFF, Side side = Side::kBeforeGuard) {
    Memory workspace(WorkspaceBytes(), side);
    workspace.Fill(workspace_fill);
    PoisonOutputs();
    mha_error error;
    EXPECT_EQ(Run(workspace.data(), workspace.size(), &error), MHA_OK) << error.message;
    EXPECT_TRUE(output.GapsUntouched());
    return Outputs();
  }

  CallShape shape;
  OptionalOutputs optional;
  Memory starts;
  Rows output;
};

struct ForwardData : CallData {
  ForwardData(const LayerShape &layer_shape, const CallShape &call_shape, const mha_layer *the_layer = nullptr,
              Side side = Side::kBeforeGuard, uint64_t seed = 2)
      : CallData(call_shape, layer_shape.num_heads, layer_shape.num_kv_heads, layer_shape.head_dim, layer_shape.head_dim_v, side),
        layer(the_layer) {
    Random random(seed);
    args = {};
    args.struct_size = sizeof args;
    args.batch = shape.batch;
    args.n_q = shape.n_q;
    const auto input = [&](Rows &rows, int64_t n, int64_t width, const float *&pointer, int64_t &batch_stride, int64_t &row_stride) {
      rows = MakeRows(shape.order, shape.batch, n, 1, width, side);
      rows.Randomize(random);
      pointer = rows.memory.floats();
      if (shape.order == Order::kContiguous) return;
      batch_stride = rows.batch_stride;
      row_stride = rows.row_stride;
    };
    input(query, shape.n_q, layer_shape.query_dim, args.query, args.query_batch_stride, args.query_row_stride);
    if (shape.key || shape.value) args.n_kv = shape.n_kv;
    if (shape.key) input(key, shape.n_kv, layer_shape.key_dim, args.key, args.key_batch_stride, args.key_row_stride);
    if (shape.value) input(value, shape.n_kv, layer_shape.value_dim, args.value, args.value_batch_stride, args.value_row_stride);
    output = MakeRows(shape.order, shape.batch, shape.n_q, 1, layer_shape.output_width(), side);
    args.output = output.memory.floats();
    if (shape.order != Order::kContiguous) {
      args.output_batch_stride = output.batch_stride;
      args.output_row_stride = output.row_stride;
    }
    args.flags = shape.is_causal ? MHA_CAUSAL : 0;
    if (shape.q_start) args.q_start = q_start();
    args.attention_weights = optional.attention_weights;
    args.lse = optional.lse;
    if (optional.any_tap()) args.taps = &optional.taps;
  }

  mha_status Workspace(size_t *bytes, mha_error *error) const override { return mha_forward_workspace(layer, &args, bytes, error); }
  mha_status Run(void *workspace, size_t bytes, mha_error *error) const override {
    return mha_forward(layer, &args, workspace, bytes, error);
  }
  mha_status Info(mha_call_info *info, mha_error *error) const override { return mha_info(layer, &args, info, error); }
  void SetScheduler(const mha_scheduler *scheduler) override { args.scheduler = scheduler; }

  const mha_layer *layer;
  mha_forward_args args;
  Rows query, key, value;
};

struct HeadsShape {
  int64_t num_heads = 4;
  int64_t num_kv_heads = 2;
  int64_t head_dim = 3;
  int64_t head_dim_v = 5;
};

struct AttentionData : CallData {
  AttentionData(const HeadsShape &heads, const CallShape &call_shape, uint32_t instruction_set = MHA_INSTRUCTION_SET_AUTO,
                Side side = Side::kBeforeGuard, uint64_t seed = 3)
      : CallData(call_shape, heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.head_dim_v, side) {
    Random random(seed);
    args = {};
    args.struct_size = sizeof args;
    args.batch = shape.batch;
    args.n_q = shape.n_q;
    args.n_kv = shape.n_kv;
    args.num_heads = heads.num_heads;
    args.num_kv_heads = heads.num_kv_heads;
    args.head_dim = heads.head_dim;
    args.head_dim_v = heads.head_dim_v;
    const auto rows = [&](Rows &array, int64_t n, int64_t num_heads, int64_t width, int64_t &batch_stride, int64_t &row_stride,
                          int64_t &head_stride) {
      array = MakeRows(shape.order, shape.batch, n, num_heads, width, side);
      if (shape.order == Order::kContiguous) return;
      batch_stride = array.batch_stride;
      row_stride = array.row_stride;
      head_stride = array.head_stride;
    };
    rows(q, shape.n_q, heads.num_heads, heads.head_dim, args.q_batch_stride, args.q_row_stride, args.q_head_stride);
    rows(k, shape.n_kv, heads.num_kv_heads, heads.head_dim, args.k_batch_stride, args.k_row_stride, args.k_head_stride);
    rows(v, shape.n_kv, heads.num_kv_heads, heads.head_dim_v, args.v_batch_stride, args.v_row_stride, args.v_head_stride);
    rows(output, shape.n_q, heads.num_heads, heads.head_dim_v, args.output_batch_stride, args.output_row_stride, args.output_head_stride);
    for (Rows *input : {&q, &k, &v}) input->Randomize(random);
    args.q = q.memory.floats();
    args.k = k.memory.data();
    args.v = v.memory.data();
    args.output = output.memory.floats();
    args.flags = shape.is_causal ? MHA_CAUSAL : 0;
    if (shape.q_start) args.q_start = q_start();
    args.attention_weights = optional.attention_weights;
    args.lse = optional.lse;
    if (optional.any_tap()) args.taps = &optional.taps;
    args.instruction_set = instruction_set;
  }

  mha_status Workspace(size_t *bytes, mha_error *error) const override { return mha_attention_workspace(&args, bytes, error); }
  mha_status Run(void *workspace, size_t bytes, mha_error *error) const override { return mha_attention(&args, workspace, bytes, error); }
  mha_status Info(mha_call_info *info, mha_error *error) const override { return mha_attention_info(&args, info, error); }
  void SetScheduler(const mha_scheduler *scheduler) override { args.scheduler = scheduler; }

  mha_attention_args args;
  Rows q, k, v;
};

}  // namespace interface_support

#endif  // MHA_TESTS_INTERFACE_SUPPORT_H
