// Checks of mha_rope_config, from which mha_rope_tables makes its tables.
#pragma once

#include "../base/report.h"

namespace mha {

// Checks every field, also that fields are set together which need each other, and replaces zeros
// by their defaults.
mha_status check_rope_config(Report report, mha_rope_config &config);

}  // namespace mha
