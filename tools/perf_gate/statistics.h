// Figures of a few repeated measurements, without an assumption about how they are distributed.
#pragma once

#include <vector>

namespace gate {

struct Interval {
  double low, high;
};

double median(std::vector<double> values);

// Where the median lies with a probability of at least 95%: between two of the values, by the binomial distribution. At least 6 values.
Interval median_interval(std::vector<double> values);

}  // namespace gate
