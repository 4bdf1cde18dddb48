// The two ways in which the gate ends without a verdict. what() is one sentence.
#pragma once

#include <stdexcept>

namespace gate {

struct WrongUsage : std::runtime_error {  // exit status 2
  using std::runtime_error::runtime_error;
};

struct CannotMeasure : std::runtime_error {  // exit status 4
  using std::runtime_error::runtime_error;
};

}  // namespace gate
