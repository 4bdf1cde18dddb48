// Tests with one instance per instruction set:
//
//     class Projection : public support::InstructionSetTest {};
//     TEST_P(Projection, EqualsTheSpecification) { ... instruction_set() ... }
//     MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(Projection);
//
// The name is then InstructionSets/Projection.EqualsTheSpecification/avx2. The sets are those of
// the architecture, by src/kernels/sets.def; one that this machine lacks is skipped, never replaced
// by another. Those that have products of bytes besides have the other kernels in common with one
// without, so tests of integer arithmetic alone are run for them:
// MHA_INSTANTIATE_FOR_ALL_INSTRUCTION_SETS.
#ifndef MHA_TESTS_SUPPORT_INSTRUCTION_SETS_H
#define MHA_TESTS_SUPPORT_INSTRUCTION_SETS_H

#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <vector>

namespace support {

enum class Sets { kAll, kWithKernels };

inline std::vector<uint32_t> SetsOfTheArchitecture(Sets which) {
  std::vector<uint32_t> sets;
  const auto add = [&](uint32_t number, std::string_view architecture, bool has_kernels) {
    if ((architecture == MHA_ARCHITECTURE || architecture == "any") &&
        (has_kernels || which == Sets::kAll))
      sets.push_back(number);
  };
#define MHA_SET(name, NAME, number, architecture, kernels, ...) \
  add(number, #architecture, std::string_view(#name) == #kernels);
#include "../../src/kernels/sets.def"
  std::sort(sets.begin(), sets.end());
  return sets;
}

class InstructionSetTest : public testing::TestWithParam<uint32_t> {
 protected:
  void SetUp() override {
    if ((mha_instruction_sets() & (1u << GetParam())) == 0) {
      GTEST_SKIP() << "this build or machine lacks " << mha_instruction_set_name(GetParam());
    }
  }
  uint32_t instruction_set() const { return GetParam(); }
};

}  // namespace support

#define MHA_INSTANTIATE_FOR(suite, which)                                      \
  INSTANTIATE_TEST_SUITE_P(                                                    \
      InstructionSets, suite,                                                  \
      testing::ValuesIn(support::SetsOfTheArchitecture(support::Sets::which)), \
      [](const testing::TestParamInfo<uint32_t> &info) {                       \
        return mha_instruction_set_name(info.param);                           \
      })
#define MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(suite) MHA_INSTANTIATE_FOR(suite, kWithKernels)
#define MHA_INSTANTIATE_FOR_ALL_INSTRUCTION_SETS(suite) MHA_INSTANTIATE_FOR(suite, kAll)

#endif  // MHA_TESTS_SUPPORT_INSTRUCTION_SETS_H
