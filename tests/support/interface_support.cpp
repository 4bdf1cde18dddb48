#include "support/interface_support.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <set>
#include <string>
#include <vector>

namespace support {

LayerProblem SmallSizes() {
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

LayerProblem SquareSizes(int64_t dim, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim) {
  LayerProblem sizes = SmallSizes();
  sizes.query_dim = sizes.key_dim = sizes.value_dim = sizes.output_dim = dim;
  sizes.num_heads = num_heads;
  sizes.num_kv_heads = num_kv_heads;
  sizes.head_dim = sizes.head_dim_v = head_dim;
  return sizes;
}

LayerProblem OfItself(LayerProblem problem, int64_t n) {
  problem.n_q = problem.n_kv = n;
  problem.has_key = problem.has_value = false;
  return problem;
}

LayerProblem SmallLayer() { return NormalLayer(SmallSizes()); }

LayerProblem SquareLayer(int64_t dim, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim) {
  return NormalLayer(SquareSizes(dim, num_heads, num_kv_heads, head_dim));
}

std::vector<int64_t> Starts(int64_t batch) {
  std::vector<int64_t> starts;
  for (int64_t b = 0; b < batch; ++b) starts.push_back(b % 3 == 2 ? 0 : b % 3 + 1);
  return starts;
}

std::string Name(mha_status status) {
  return std::string(mha_status_string(status)) + " (" + std::to_string(status) + ")";
}

bool IsOfAWord(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

bool HasWord(const std::string &sentence, const std::string &word) {
  const size_t bar = word.find('|');
  if (bar != std::string::npos)
    return HasWord(sentence, word.substr(0, bar)) || HasWord(sentence, word.substr(bar + 1));
  for (size_t at = sentence.find(word); at != std::string::npos; at = sentence.find(word, at + 1)) {
    const size_t end = at + word.size();
    if ((at == 0 || !IsOfAWord(sentence[at - 1])) &&
        (end == sentence.size() || !IsOfAWord(sentence[end])))
      return true;
  }
  return false;
}

bool CountsOneAsMany(const std::string &sentence) {
  for (const char *noun : {"block", "byte", "column", "element", "head", "key", "number",
                           "position", "querie", "row", "sequence", "table", "thread", "value"}) {
    const std::string many = "1 " + std::string(noun) + "s";
    for (size_t at = sentence.find(many); at != std::string::npos;
         at = sentence.find(many, at + 1)) {
      const size_t end = at + many.size();
      const bool is_whole_number =
          at == 0 || std::strchr("0123456789.-", sentence[at - 1]) == nullptr;
      const bool is_whole_word = end == sentence.size() || !IsOfAWord(sentence[end]);
      if (is_whole_number && is_whole_word) return true;
    }
  }
  return false;
}

template <typename T>
Few<T>::Few(std::initializer_list<T> values) noexcept : count_(values.size()) {
  if (count_ > std::size(values_)) std::abort();
  std::copy(values.begin(), values.end(), values_);
}
template class Few<uint32_t>;
template class Few<const char *>;

const char *Kept(const std::string &word) {
  static auto *const words = new std::set<std::string>;
  return words->insert(word).first->c_str();
}

Words::Words(std::initializer_list<std::string> words) : Few() {
  for (const std::string &word : words) {
    if (count_ == std::size(values_)) std::abort();
    values_[count_++] = Kept(word);
  }
}

void ExpectError(mha_status returned, const mha_error &error, const Expected &expected) {
  ASSERT_NE(std::memchr(error.message, 0, sizeof error.message), nullptr)
      << "the message is not 0-terminated";
  const std::string message = error.message;
  EXPECT_EQ(Name(returned), Name(expected.status)) << message;
  EXPECT_EQ(error.status, returned);
  EXPECT_TRUE(std::count(expected.arguments.begin(), expected.arguments.end(), error.argument) > 0)
      << "parameter " << error.argument << " is said to be at fault: " << message;
  EXPECT_FALSE(message.empty());
  EXPECT_FALSE(CountsOneAsMany(message)) << message;
  for (char c : message)
    EXPECT_TRUE(c >= ' ' && c <= '~') << "code " << int{c} << " in: " << message;
  for (const char *word : expected.words)
    EXPECT_TRUE(HasWord(message, word)) << "no \"" << word << "\" in: " << message;
}

void ExpectNoError(mha_status returned, const mha_error &error) {
  ASSERT_NE(std::memchr(error.message, 0, sizeof error.message), nullptr)
      << "the message is not 0-terminated";
  EXPECT_EQ(Name(returned), Name(MHA_OK)) << error.message;
  EXPECT_EQ(error.status, MHA_OK);
  EXPECT_EQ(error.argument, 0u);
  EXPECT_STREQ(error.message, "");
}

std::vector<uint32_t> InstructionSets() {
  std::vector<uint32_t> sets;
  for (uint32_t set = MHA_INSTRUCTION_SET_SCALAR; set < 32; ++set) {
    if ((mha_instruction_sets() >> set & 1u) != 0) sets.push_back(set);
  }
  return sets;
}

}  // namespace support
