// Everything that a call can hand out, and which of it to ask for.
#ifndef MHA_TESTS_SUPPORT_OUTPUTS_H
#define MHA_TESTS_SUPPORT_OUTPUTS_H

#include <cstdint>
#include <cstring>
#include <vector>

namespace support {

// All dense, in the shapes of mha.h. One that was not asked for is empty. y is what the call's
// output pointer received, of mha_attention too.
struct Outputs {
  std::vector<float> q;
  std::vector<float> k;
  std::vector<float> v;
  std::vector<float> scores;
  std::vector<float> scaled_scores;
  std::vector<float> softcapped_scores;
  std::vector<float> masked_scores;
  std::vector<float> context;
  std::vector<float> attention_weights;
  std::vector<float> lse;
  std::vector<float> y;
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
inline constexpr uint32_t kAskSoftcappedScores = 1u << 9;
inline constexpr uint32_t kAskNothing = 0;
inline constexpr uint32_t kAskAll = (1u << 10) - 1;
// All that mha_attention has.
inline constexpr uint32_t kAskAllOfAttention = kAskAll & ~(kAskQ | kAskK | kAskV);

// What outputs hold before a call, 0xff in every byte: no result has these bits.
inline float Unwritten() {
  float x;
  std::memset(&x, 0xff, sizeof x);
  return x;
}

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_OUTPUTS_H
