// Problems computed by the specification.
#ifndef MHA_TESTS_SUPPORT_SPECIFY_H
#define MHA_TESTS_SUPPORT_SPECIFY_H

#include <vector>

#include "spec/spec.h"
#include "support/attention.h"
#include "support/layer.h"
#include "support/outputs.h"

namespace support {

Outputs Specify(const AttentionProblem &problem,
                const spec::Functions &functions = spec::Fastest());

// The problem with its matrices as a layer keeps them that converts them to `stored`.
LayerProblem Converted(const LayerProblem &problem, Stored stored,
                       const spec::Functions &functions = spec::Fastest());

Outputs Specify(const LayerProblem &problem, const spec::Functions &functions = spec::Fastest());

// Numbers rounded to the nearest of a type of 16 bits; of other types, as they are.
std::vector<float> Rounded(Storage type, const std::vector<float> &x);

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_SPECIFY_H
