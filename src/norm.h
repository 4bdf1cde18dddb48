// Reading and checking mha_norm.
#pragma once

#include "sequences.h"

namespace mha {

// Fills the norms of the attention's preparations, of which `sequences` say how many rows arrays have. Reads no array.
mha_status check_norm(Report report, const mha_norm *given, const SequenceArguments &sequences, Attention *attention);

}  // namespace mha
