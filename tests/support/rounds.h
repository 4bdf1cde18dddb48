// How many random cases a test takes: the environment variable MHA_TEST_ROUNDS multiplies their
// number (1 if not set; may be a fraction). Of many systematic cases, less than 1 leaves that part.
#ifndef MHA_TESTS_SUPPORT_ROUNDS_H
#define MHA_TESTS_SUPPORT_ROUNDS_H

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <utility>

#include "support/random.h"

namespace support {

inline double RoundsFactor() {
  const char *text = std::getenv("MHA_TEST_ROUNDS");
  return text ? std::atof(text) : 1;
}

inline int64_t Rounds(int64_t count) {
  return std::max<int64_t>(1, static_cast<int64_t>(RoundsFactor() * static_cast<double>(count)));
}

// Says of each case whether it is one of those to take: the same ones in every run, from all over,
// and the first.
class Sample {
 public:
  bool Takes() {
    return std::exchange(is_first_, false) || factor_ >= 1 || random_.Chance(factor_);
  }

 private:
  bool is_first_ = true;
  double factor_ = RoundsFactor();
  Random random_{1};
};

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_ROUNDS_H
