// The results of this contract number (results.h) are those of the table checksums.txt, which is
// written by
//
//     build/bin/mha_test_checksums --write-checksums
//
// That adds what is new, but refuses to change a checksum within a contract number. Then build
// again, with the table as it is now.
#include <gtest/gtest.h>
#include <mha.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

#include "contract/results.h"
#include "support/instruction_sets.h"
#include "support/schedulers.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

int WriteFile() {
  const results::Checksums checksums = results::Compute(MHA_INSTRUCTION_SET_AUTO, nullptr);
  for (const auto &[name, sum] : checksums) {
    const auto known = results::Published().find(name);
    if (results::PublishedContract() != MHA_CONTRACT || known == results::Published().end() ||
        known->second == sum)
      continue;
    std::fprintf(stderr,
                 "\"%s\" has other bits than contract %d says; they need a new number, see "
                 "CONTRIBUTING.md\n",
                 name.c_str(), MHA_CONTRACT);
    return 1;
  }
  std::FILE *const out = std::fopen(MHA_CHECKSUMS, "w");
  if (out == nullptr) return 1;
  std::fprintf(out,
               "# Checksums of results, written by mha_test_checksums --write-checksums. Within a "
               "contract number, none of them ever changes.\ncontract %d\n",
               MHA_CONTRACT);
  for (const auto &[name, sum] : checksums)
    std::fprintf(out, "%016llx %s\n", static_cast<unsigned long long>(sum), name.c_str());
  const bool is_written = std::ferror(out) == 0;
  return std::fclose(out) == 0 && is_written ? 0 : 1;
}

// ---- The tests

TEST(ChecksumsFile, IsOfThisContract) { EXPECT_EQ(results::PublishedContract(), MHA_CONTRACT); }

class ChecksumsOfResults : public InstructionSetTest {
 protected:
  void ExpectThoseOfTheFile(const mha_scheduler *scheduler) const {
    const results::Checksums expected = results::Published(),
                             actual = results::Compute(instruction_set(), scheduler);
    for (const auto &[name, sum] : expected) {
      const auto found = actual.find(name);
      if (found == actual.end())
        ADD_FAILURE() << "\"" << name << "\" is in the file, but there is no such case";
      else
        EXPECT_EQ(found->second, sum) << name;
    }
    for (const auto &[name, sum] : actual)
      EXPECT_EQ(expected.count(name), 1u) << "\"" << name << "\" is not in the file";
  }
};
MHA_INSTANTIATE_FOR_ALL_INSTRUCTION_SETS(ChecksumsOfResults);

TEST_P(ChecksumsOfResults, AreThoseOfTheFile) { ExpectThoseOfTheFile(nullptr); }

TEST_P(ChecksumsOfResults, AreThoseOfTheFileOnSeveralThreads) {
  const Scheduler scheduler(3, RunOnThreads);
  ExpectThoseOfTheFile(scheduler.get());
}

}  // namespace

int main(int argc, char **argv) {
  if (argc == 2 && std::strcmp(argv[1], "--write-checksums") == 0) return WriteFile();
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
