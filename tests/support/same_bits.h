// The comparison of outputs bit by bit.
#ifndef MHA_TESTS_SUPPORT_SAME_BITS_H
#define MHA_TESTS_SUPPORT_SAME_BITS_H

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "support/outputs.h"

namespace support {

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
    {"softcapped_scores", &Outputs::softcapped_scores},
    {"masked_scores", &Outputs::masked_scores},
    {"lse", &Outputs::lse},
    {"attention_weights", &Outputs::attention_weights},
    {"context", &Outputs::context},
    {"y", &Outputs::y},
};

std::string HexFloat(float x);

testing::AssertionResult SameBits(const char *name, const std::vector<float> &actual,
                                  const std::vector<float> &expected);

testing::AssertionResult SameBits(const std::vector<float> &actual,
                                  const std::vector<float> &expected);

// Compares what both have.
testing::AssertionResult SameBits(const Outputs &actual, const Outputs &expected);

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_SAME_BITS_H
