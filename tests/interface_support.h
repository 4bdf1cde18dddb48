// What the interface tests share: calls whose every array lies next to inaccessible memory, and the checks of what every error must look
// like.

#ifndef MHA_TESTS_INTERFACE_SUPPORT_H
#define MHA_TESTS_INTERFACE_SUPPORT_H

#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "support/fixtures.h"
#include "support/same_bits.h"

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

namespace support {

inline constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
inline constexpr int64_t kMin = std::numeric_limits<int64_t>::min();

// ---- Layers and calls ------------------------------------------------------------------------------------------------------------

// A layer whose widths all differ, with grouped heads, and a call of it.
inline LayerProblem SmallSizes() {
  LayerProblem sizes;
  sizes.batch = 2;
  sizes.n_q = 3;
  sizes.n_kv = 4;
  sizes.query_dim = 10;
  sizes.key_dim = 7;
  sizes.value_dim = 9;
  sizes.output_dim = 11;
  sizes.num_heads = 4;
  sizes.num_kv_heads = 2;
  sizes.head_dim = 3;
  sizes.head_dim_v = 5;
  sizes.has_key = sizes.has_value = true;
  return sizes;
}

// The same with one width for all.
inline LayerProblem SquareSizes(int64_t dim, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim) {
  LayerProblem sizes = SmallSizes();
  sizes.query_dim = sizes.key_dim = sizes.value_dim = sizes.output_dim = dim;
  sizes.num_heads = num_heads;
  sizes.num_kv_heads = num_kv_heads;
  sizes.head_dim = sizes.head_dim_v = head_dim;
  return sizes;
}

// The same layer in a self-attention of n rows.
inline LayerProblem OfItself(LayerProblem problem, int64_t n) {
  problem.n_q = problem.n_kv = n;
  problem.has_key = problem.has_value = false;
  return problem;
}

inline LayerProblem SmallLayer() { return NormalLayer(SmallSizes()); }

inline LayerProblem SquareLayer(int64_t dim, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim) {
  return NormalLayer(SquareSizes(dim, num_heads, num_kv_heads, head_dim));
}

// Positions for the first query of each sequence.
inline std::vector<int64_t> Starts(int64_t batch) {
  std::vector<int64_t> starts;
  for (int64_t b = 0; b < batch; ++b) starts.push_back(b % 3 == 2 ? 0 : b % 3 + 1);
  return starts;
}

// Asks for no optional outputs but these.
inline CallForm Guarded(uint32_t asked = kAskNothing, Place place = Place::kBeforeGuard) {
  CallForm form;
  form.asked = asked;
  form.place = place;
  return form;
}

// ---- Errors ----------------------------------------------------------------------------------------------------------------------

inline std::string Name(mha_status status) { return std::string(mha_status_string(status)) + " (" + std::to_string(status) + ")"; }

struct Expected {
  mha_status status;
  std::vector<uint32_t> arguments;  // several where two parameters contradict each other: either may be named as the one at fault
  std::vector<std::string> words;   // that the sentence must contain, as whole words; "a|b" = one of both
};

inline bool IsOfAWord(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

// "6" is no word of "16", and "w_q" is none of "w_qkv".
inline bool HasWord(const std::string &sentence, const std::string &word) {
  const size_t bar = word.find('|');
  if (bar != std::string::npos) return HasWord(sentence, word.substr(0, bar)) || HasWord(sentence, word.substr(bar + 1));
  for (size_t at = sentence.find(word); at != std::string::npos; at = sentence.find(word, at + 1)) {
    const size_t end = at + word.size();
    if ((at == 0 || !IsOfAWord(sentence[at - 1])) && (end == sentence.size() || !IsOfAWord(sentence[end]))) return true;
  }
  return false;
}

// "1 row" and "2 rows", but not "1 rows". (By std::regex, each file that includes this would take 3 s more to compile.)
inline bool CountsOneAsMany(const std::string &sentence) {
  for (const char *noun : {"block", "byte", "column", "element", "head", "key", "number", "position", "querie", "row", "sequence", "table",
                           "thread", "value"}) {
    const std::string many = "1 " + std::string(noun) + "s";
    for (size_t at = sentence.find(many); at != std::string::npos; at = sentence.find(many, at + 1)) {
      const size_t end = at + many.size();
      const bool is_whole_number = at == 0 || std::strchr("0123456789.-", sentence[at - 1]) == nullptr;
      const bool is_whole_word = end == sentence.size() || !IsOfAWord(sentence[end]);
      if (is_whole_number && is_whole_word) return true;
    }
  }
  return false;
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

}  // namespace support

#endif  // MHA_TESTS_INTERFACE_SUPPORT_H
