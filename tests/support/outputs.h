// Everything that a call can hand out, and the comparison of two such sets bit by bit.
#ifndef MHA_TESTS_SUPPORT_OUTPUTS_H
#define MHA_TESTS_SUPPORT_OUTPUTS_H

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

namespace support {

// All dense, in the shapes of mha.h. One that was not asked for is empty. y is what the call's output pointer received, of
// mha_attention too.
struct Outputs {
  std::vector<float> q;
  std::vector<float> k;
  std::vector<float> v;
  std::vector<float> scores;
  std::vector<float> scaled_scores;
  std::vector<float> masked_scores;
  std::vector<float> context;
  std::vector<float> attention_weights;
  std::vector<float> lse;
  std::vector<float> y;
};

struct OutputField {
  const char *name;
  std::vector<float> Outputs::*values;
};

// In the order of computation, so that the first one reported is where it went wrong.
inline constexpr OutputField kOutputFields[] = {
    {"q", &Outputs::q},
    {"k", &Outputs::k},
    {"v", &Outputs::v},
    {"scores", &Outputs::scores},
    {"scaled_scores", &Outputs::scaled_scores},
    {"masked_scores", &Outputs::masked_scores},
    {"lse", &Outputs::lse},
    {"attention_weights", &Outputs::attention_weights},
    {"context", &Outputs::context},
    {"y", &Outputs::y},
};

// Which optional outputs to ask for.
inline constexpr uint32_t kAskQ = 1u << 0;
inline constexpr uint32_t kAskK = 1u << 1;
inline constexpr uint32_t kAskV = 1u << 2;
inline constexpr uint32_t kAskScores = 1u << 3;
inline constexpr uint32_t kAskScaledScores = 1u << 4;
inline constexpr uint32_t kAskMaskedScores = 1u << 5;
inline constexpr uint32_t kAskContext = 1u << 6;
inline constexpr uint32_t kAskWeights = 1u << 7;
inline constexpr uint32_t kAskLse = 1u << 8;
inline constexpr uint32_t kAskNothing = 0;
inline constexpr uint32_t kAskAll = (1u << 9) - 1;

inline std::string HexFloat(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  char text[64];
  std::snprintf(text, sizeof text, "%a (0x%08x)", static_cast<double>(x), static_cast<unsigned>(bits));
  return text;
}

inline testing::AssertionResult SameBits(const char *name, const std::vector<float> &actual, const std::vector<float> &expected) {
  if (actual.size() != expected.size()) {
    return testing::AssertionFailure() << name << " has " << actual.size() << " values instead of " << expected.size();
  }
  if (actual.empty() || std::memcmp(actual.data(), expected.data(), actual.size() * sizeof(float)) == 0) return testing::AssertionSuccess();
  size_t first = actual.size(), count = 0;
  for (size_t n = actual.size(); n-- > 0;) {
    if (std::memcmp(&actual[n], &expected[n], sizeof(float)) != 0) {
      first = n;
      count++;
    }
  }
  return testing::AssertionFailure() << name << "[" << first << "] is " << HexFloat(actual[first]) << " instead of "
                                     << HexFloat(expected[first]) << ", the first of " << count << " that differ among " << actual.size();
}

inline testing::AssertionResult SameBits(const std::vector<float> &actual, const std::vector<float> &expected) {
  return SameBits("the array", actual, expected);
}

// Compares what both have.
inline testing::AssertionResult SameBits(const Outputs &actual, const Outputs &expected) {
  std::string differences;
  for (const OutputField &field : kOutputFields) {
    const std::vector<float> &a = actual.*field.values, &e = expected.*field.values;
    if (a.empty() || e.empty()) continue;
    const testing::AssertionResult same = SameBits(field.name, a, e);
    if (!same) differences += std::string("  ") + same.message() + "\n";
  }
  if (differences.empty()) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "\n" << differences;
}

// In an output that has to be written, this would be seen: no canonical value has these bits.
inline float Unwritten() {
  const uint32_t bits = 0xffedcba9u;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_OUTPUTS_H
