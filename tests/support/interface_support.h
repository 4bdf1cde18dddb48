// What the interface tests share: calls whose every array lies next to inaccessible memory, and the
// checks of what every error must look like.

#ifndef MHA_TESTS_INTERFACE_SUPPORT_H
#define MHA_TESTS_INTERFACE_SUPPORT_H

#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "support/fixtures.h"
#include "support/same_bits.h"

// Sanitizers bring their own malloc and make system calls of their own, so the tests that count
// these can't run under them.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define MHA_TEST_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || \
    __has_feature(memory_sanitizer)
#define MHA_TEST_SANITIZED 1
#endif
#endif
#ifndef MHA_TEST_SANITIZED
#define MHA_TEST_SANITIZED 0
#endif

namespace support {

inline constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
inline constexpr int64_t kMin = std::numeric_limits<int64_t>::min();

// ---- Layers and calls

// A layer whose widths all differ, with grouped heads, and a call of it.
LayerProblem SmallSizes();

// The same with one width for all.
LayerProblem SquareSizes(int64_t dim, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim);

// The same layer in a self-attention of n rows.
LayerProblem OfItself(LayerProblem problem, int64_t n);

LayerProblem SmallLayer();

LayerProblem SquareLayer(int64_t dim, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim);

// Positions for the first query of each sequence.
std::vector<int64_t> Starts(int64_t batch);

// Asks for no optional outputs but these.
inline CallForm Guarded(uint32_t asked = kAskNothing, Place place = Place::kBeforeGuard) {
  CallForm form;
  form.asked = asked;
  form.place = place;
  return form;
}

// ---- Errors

std::string Name(mha_status status);

// A list of a few values that is not to be destroyed: tables of hundreds of rows that have some
// compile in half the time.
template <typename T>
class Few {
 public:
  Few() = default;
  Few(std::initializer_list<T> values) noexcept;
  const T *begin() const { return values_; }
  const T *end() const { return values_ + count_; }

 protected:
  T values_[8] = {};
  size_t count_ = 0;
};

// Words, of which those that are put together are kept to the end.
class Words : public Few<const char *> {
 public:
  Words() = default;
  Words(std::initializer_list<const char *> words) noexcept : Few(words) {}
  Words(std::initializer_list<std::string> words);
};
const char *Kept(const std::string &word);

struct Expected {
  mha_status status;
  Few<uint32_t> arguments;  // several where two parameters contradict each other: either may be
                            // named as the one at fault
  Words words;              // that the sentence must contain, as whole words; "a|b" = one of both
};

bool IsOfAWord(char c);

// "6" is no word of "16", and "w_q" is none of "w_qkv".
bool HasWord(const std::string &sentence, const std::string &word);

// "1 row" and "2 rows", but not "1 rows". (By std::regex, each file that includes this would take 3
// s more to compile.)
bool CountsOneAsMany(const std::string &sentence);

void ExpectError(mha_status returned, const mha_error &error, const Expected &expected);

void ExpectNoError(mha_status returned, const mha_error &error);

// An error struct that shows whether it was written.
inline mha_error UnwrittenError() {
  mha_error error;
  std::memset(&error, 0xA5, sizeof error);
  return error;
}

// Every failing call is made twice, because the error struct is optional. call:
// mha_status(mha_error *).
template <typename Call>
void ExpectFails(const Call &call, const Expected &expected) {
  mha_error error = UnwrittenError();
  const mha_status returned = call(&error);
  ExpectError(returned, error, expected);
  EXPECT_EQ(Name(call(static_cast<mha_error *>(nullptr))), Name(expected.status))
      << "without an error struct";
}

// function(args..., error) fails.
template <typename Function, typename... Args>
void ExpectFails(const Expected &expected, const Function &function, const Args &...args) {
  ExpectFails([&](mha_error *error) { return function(args..., error); }, expected);
}

template <typename Call>
void ExpectSucceeds(const Call &call) {
  mha_error error = UnwrittenError();
  const mha_status returned = call(&error);
  ExpectNoError(returned, error);
  EXPECT_EQ(Name(call(static_cast<mha_error *>(nullptr))), Name(MHA_OK))
      << "without an error struct";
}
template <typename Function, typename Arg, typename... Args>
void ExpectSucceeds(const Function &function, const Arg &arg, const Args &...args) {
  ExpectSucceeds([&](mha_error *error) { return function(arg, args..., error); });
}

// ---- Instruction sets

std::vector<uint32_t> InstructionSets();

// One that this machine or build lacks: the other architecture's.
inline uint32_t AbsentInstructionSet() {
  return (mha_instruction_sets() >> MHA_INSTRUCTION_SET_NEON & 1u) != 0 ? MHA_INSTRUCTION_SET_AVX2
                                                                        : MHA_INSTRUCTION_SET_NEON;
}

// The caller's matrix product in its plainest form; checks nothing.
inline void PlainSgemm(int, int, int, int m, int n, int k, float alpha, const float *a, int lda,
                       const float *b, int ldb, float beta, float *c, int ldc) {
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      float sum = 0;
      for (int l = 0; l < k; ++l) sum += a[int64_t{i} * lda + l] * b[int64_t{l} * ldb + j];
      float &target = c[int64_t{i} * ldc + j];
      target = alpha * sum + (beta == 0 ? 0 : beta * target);
    }
  }
}

// ---- Threads

// A scheduler that runs every task on the calling thread, the last one first, and remembers whether
// the library kept the rules.
struct SerialScheduler {
  explicit SerialScheduler(uint32_t num_threads) {
    scheduler = {};
    scheduler.context = this;
    scheduler.num_threads = num_threads;
    scheduler.parallel_for = [](void *context, uint32_t count, void (*task)(void *, uint32_t),
                                void *task_context) {
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
