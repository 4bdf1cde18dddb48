// Results of this contract number, as checksums of which checksums.txt is the published table.
// Every instruction set, compiler and architecture, on one thread or several, must give them, for
// as long as MHA_CONTRACT is what the table says. The inputs come from integers by exact
// operations, so that nothing but the library decides about a bit.
#ifndef MHA_TESTS_CONTRACT_RESULTS_H
#define MHA_TESTS_CONTRACT_RESULTS_H

#include <mha.h>

#include <cstdint>
#include <map>
#include <string>

namespace results {

using Checksums = std::map<std::string, uint64_t>;

// What the table has.
const Checksums &Published();
int PublishedContract();

// All of them, each of its own calls.
Checksums Compute(uint32_t instruction_set, const mha_scheduler *scheduler);

}  // namespace results

#endif  // MHA_TESTS_CONTRACT_RESULTS_H
