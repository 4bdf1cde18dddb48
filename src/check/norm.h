// Checks of mha_norm.
#pragma once

#include "request.h"

namespace mha {

struct Norms {
  Norm q, k, v, context;
  bool gates_late;  // the gate follows the context's norm
};

// given: null for none. shape: has the heads and their widths.
mha_status check_norm(Report report, const mha_norm *given, const SequenceArguments &sequences,
                      const AttentionRequest &shape, bool has_output_weights, Norms *norms);

}  // namespace mha
