#include "support/same_bits.h"

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

namespace support {

std::string HexFloat(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  char text[64];
  std::snprintf(text, sizeof text, "%a (0x%08x)", static_cast<double>(x),
                static_cast<unsigned>(bits));
  return text;
}

testing::AssertionResult SameBits(const char *name, const std::vector<float> &actual,
                                  const std::vector<float> &expected) {
  if (actual.size() != expected.size()) {
    return testing::AssertionFailure()
           << name << " has " << actual.size() << " values instead of " << expected.size();
  }
  if (actual.empty() ||
      std::memcmp(actual.data(), expected.data(), actual.size() * sizeof(float)) == 0)
    return testing::AssertionSuccess();
  size_t first = actual.size(), count = 0;
  for (size_t n = actual.size(); n-- > 0;) {
    if (std::memcmp(&actual[n], &expected[n], sizeof(float)) != 0) {
      first = n;
      count++;
    }
  }
  return testing::AssertionFailure()
         << name << "[" << first << "] is " << HexFloat(actual[first]) << " instead of "
         << HexFloat(expected[first]) << ", the first of " << count << " that differ among "
         << actual.size();
}

testing::AssertionResult SameBits(const std::vector<float> &actual,
                                  const std::vector<float> &expected) {
  return SameBits("the array", actual, expected);
}

testing::AssertionResult SameBits(const Outputs &actual, const Outputs &expected) {
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

}  // namespace support
