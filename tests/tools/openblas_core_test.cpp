// Which kernels the benchmarks have OpenBLAS compute with, by what it chose and what the machine can.

#include "bench/openblas_core.h"

#include <gtest/gtest.h>

#include "mha.h"

namespace {

constexpr uint32_t scalar = 1u << MHA_INSTRUCTION_SET_SCALAR, avx2 = scalar | 1u << MHA_INSTRUCTION_SET_AVX2,
                   avx512 = avx2 | 1u << MHA_INSTRUCTION_SET_AVX512, neon = scalar | 1u << MHA_INSTRUCTION_SET_NEON;

using bench::better_openblas_core;

TEST(OpenblasCore, WithoutAvxGetsTheBestThatTheMachineHas) {
  for (const char *const core : {"Prescott", "Core2", "Nehalem", "Barcelona"}) {
    EXPECT_STREQ(better_openblas_core(core, avx512), "SkylakeX") << core;
    EXPECT_STREQ(better_openblas_core(core, avx2), "Haswell") << core;
    EXPECT_EQ(better_openblas_core(core, scalar), nullptr) << core;
  }
}

TEST(OpenblasCore, WithAvxAloneGetsTheBestThatTheMachineHas) {
  for (const char *const core : {"Sandybridge", "Bulldozer", "Piledriver", "Steamroller"}) {
    EXPECT_STREQ(better_openblas_core(core, avx512), "SkylakeX") << core;
    EXPECT_STREQ(better_openblas_core(core, avx2), "Haswell") << core;
  }
}

TEST(OpenblasCore, WithAvx2IsLesserOnlyWhereThereIsAvx512) {
  for (const char *const core : {"Haswell", "Zen", "Excavator"}) {
    EXPECT_STREQ(better_openblas_core(core, avx512), "SkylakeX") << core;
    EXPECT_EQ(better_openblas_core(core, avx2), nullptr) << core;
  }
}

TEST(OpenblasCore, ThatOpenblasChoseForAvx512OrThatIsNewStays) {
  for (const char *const core : {"SkylakeX", "Cooperlake", "SapphireRapids", "OfNextYear", ""}) {
    EXPECT_EQ(better_openblas_core(core, avx512), nullptr) << core;
    EXPECT_EQ(better_openblas_core(core, avx2), nullptr) << core;
  }
}

TEST(OpenblasCore, OfArmStays) { EXPECT_EQ(better_openblas_core("neoversen1", neon), nullptr); }

}  // namespace
