// How the kernels use the memory of this processor.
#pragma once

#include "kernels/kernels.h"

namespace mha {

// Never null. Asks the processor once per process.
const Tuning *choose_tuning();

}  // namespace mha
