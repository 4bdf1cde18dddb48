// How many random cases a test takes: the environment variable MHA_TEST_ROUNDS multiplies their number (1 if not set; may be a fraction).
#ifndef MHA_TESTS_SUPPORT_ROUNDS_H
#define MHA_TESTS_SUPPORT_ROUNDS_H

#include <algorithm>
#include <cstdint>
#include <cstdlib>

namespace support {

inline int64_t Rounds(int64_t count) {
  const char *text = std::getenv("MHA_TEST_ROUNDS");
  return text ? std::max<int64_t>(1, static_cast<int64_t>(std::atof(text) * static_cast<double>(count))) : count;
}

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_ROUNDS_H
