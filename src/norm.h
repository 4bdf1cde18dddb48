// Reading and checking mha_norm.
#pragma once

#include "sequences.h"

namespace mha {

// Fills the norms of the attention's preparations, of which `sequences` say how many rows arrays
// have, and that of the context, which there can be if W_O takes it (has_output). Reads no array.
mha_status check_norm(Report report, const mha_norm *given, const SequenceArguments &sequences,
                      bool has_output, Attention *attention);

}  // namespace mha
