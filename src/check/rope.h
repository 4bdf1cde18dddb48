// Checks of mha_rope_config.
#pragma once

#include "report.h"

namespace mha {

// Checks every field and resolves the defaults.
mha_status check_rope_config(Report report, mha_rope_config &config);

}  // namespace mha
