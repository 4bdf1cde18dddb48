// The timing mode: two libraries in one process, measured in turns.
#pragma once

#include "report.h"

namespace gate {

struct TimingSettings {
  double threshold;  // 0.05 = 5%
  int rounds;        // to begin with; shapes that stay undecided get up to four times as many
};

constexpr int least_rounds = 7;

std::vector<Result> measure_times(const std::vector<Shape> &shapes, const std::vector<Library> &base_and_new,
                                  const TimingSettings &settings);

}  // namespace gate
