// Tests with one instance per instruction set:
//
//     class Projection : public support::InstructionSetTest {};
//     TEST_P(Projection, EqualsTheSpecification) { ... instruction_set() ... }
//     MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(Projection);
//
// The name is then InstructionSets/Projection.EqualsTheSpecification/avx2. The sets are those of the architecture; one that this machine
// lacks is skipped, never replaced by another.
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
#define MHA_INSTRUCTION_SETS_OF_THE_ARCHITECTURE MHA_INSTRUCTION_SET_SCALAR, MHA_INSTRUCTION_SET_AVX2, MHA_INSTRUCTION_SET_AVX512
#elif defined(__aarch64__)
#define MHA_INSTRUCTION_SETS_OF_THE_ARCHITECTURE MHA_INSTRUCTION_SET_SCALAR, MHA_INSTRUCTION_SET_NEON
#else
#define MHA_INSTRUCTION_SETS_OF_THE_ARCHITECTURE MHA_INSTRUCTION_SET_SCALAR
#endif

#define MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(suite)                                                           \
  INSTANTIATE_TEST_SUITE_P(InstructionSets, suite, testing::Values(MHA_INSTRUCTION_SETS_OF_THE_ARCHITECTURE), \
                           [](const testing::TestParamInfo<uint32_t> &info) { return mha_instruction_set_name(info.param); })

#endif  // MHA_TESTS_SUPPORT_INSTRUCTION_SETS_H
