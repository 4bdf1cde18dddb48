// How the kernels use the memory of this processor.
#pragma once

#include "kernels/kernels.h"

namespace mha {

// Never null: that of the processor, or the one that CMake's MHA_TUNING has fixed. Costs next to nothing: the processor is asked once per
// process.
const Tuning *choose_tuning();

}  // namespace mha
