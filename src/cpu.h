// Which kernels this build has and this machine can run.
#pragma once

#include "base/report.h"
#include "kernels/kernels.h"

namespace mha {

// Checks that the number is that of an instruction set, whether this machine has it or not.
mha_status check_instruction_set(Report report, uint32_t instruction_set);

// Finds the kernels of an instruction set, or the best ones for MHA_INSTRUCTION_SET_AUTO.
mha_status choose_kernels(Report report, uint32_t instruction_set, const Kernels **kernels);

// MHA_CONTRACT, or 0 on a thread whose arithmetic differs from the contract: one that does not
// round to nearest, or that takes subnormal numbers for 0.
uint32_t contract_of_thread();

}  // namespace mha
