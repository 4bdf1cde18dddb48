// Tests with one instance per instruction set:
//
//     class Projection : public support::InstructionSetTest {};
//     TEST_P(Projection, EqualsTheSpecification) { ... instruction_set() ... }
//     MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(Projection);
//
// The name is then InstructionSets/Projection.EqualsTheSpecification/avx2. The sets are those of
// the architecture; one that this machine lacks is skipped, never replaced by another. Those that
// have products of bytes besides have the other kernels in common with one without, so tests of
// integer arithmetic alone are run for them: MHA_INSTANTIATE_FOR_ALL_INSTRUCTION_SETS.
#ifndef MHA_TESTS_SUPPORT_INSTRUCTION_SETS_H
#define MHA_TESTS_SUPPORT_INSTRUCTION_SETS_H

#include <gtest/gtest.h>
#include <mha.h>

#include <cstdint>

namespace support {

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

#if defined(__x86_64__)
#define MHA_INSTRUCTION_SETS_OF_THE_ARCHITECTURE \
  MHA_INSTRUCTION_SET_SCALAR, MHA_INSTRUCTION_SET_AVX2, MHA_INSTRUCTION_SET_AVX512
#define MHA_ALL_INSTRUCTION_SETS                                           \
  MHA_INSTRUCTION_SETS_OF_THE_ARCHITECTURE, MHA_INSTRUCTION_SET_AVX2_VNNI, \
      MHA_INSTRUCTION_SET_AVX512_VNNI
#elif defined(__aarch64__)
#define MHA_INSTRUCTION_SETS_OF_THE_ARCHITECTURE \
  MHA_INSTRUCTION_SET_SCALAR, MHA_INSTRUCTION_SET_NEON
#define MHA_ALL_INSTRUCTION_SETS                                              \
  MHA_INSTRUCTION_SETS_OF_THE_ARCHITECTURE, MHA_INSTRUCTION_SET_NEON_DOTPROD, \
      MHA_INSTRUCTION_SET_NEON_I8MM
#else
#define MHA_INSTRUCTION_SETS_OF_THE_ARCHITECTURE MHA_INSTRUCTION_SET_SCALAR
#define MHA_ALL_INSTRUCTION_SETS MHA_INSTRUCTION_SETS_OF_THE_ARCHITECTURE
#endif

#define MHA_INSTANTIATE_FOR(suite, ...)                                          \
  INSTANTIATE_TEST_SUITE_P(InstructionSets, suite, testing::Values(__VA_ARGS__), \
                           [](const testing::TestParamInfo<uint32_t> &info) {    \
                             return mha_instruction_set_name(info.param);        \
                           })
#define MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(suite) \
  MHA_INSTANTIATE_FOR(suite, MHA_INSTRUCTION_SETS_OF_THE_ARCHITECTURE)
#define MHA_INSTANTIATE_FOR_ALL_INSTRUCTION_SETS(suite) \
  MHA_INSTANTIATE_FOR(suite, MHA_ALL_INSTRUCTION_SETS)

#endif  // MHA_TESTS_SUPPORT_INSTRUCTION_SETS_H
