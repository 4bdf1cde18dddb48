#include "statistics.h"

#include <algorithm>
#include <cmath>

namespace gate {

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return (values[(n - 1) / 2] + values[n / 2]) / 2;
}

Interval median_interval(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  // The k-th smallest value is above the median if fewer than k values lie below it, each of which happens by the toss of a coin.
  double below = std::pow(0.5, static_cast<double>(n)), term = below;
  size_t k = 0;
  while (2 * (k + 1) < n) {
    const double next = term * static_cast<double>(n - k) / static_cast<double>(k + 1);
    if (2 * (below + next) > 0.05) break;
    term = next;
    below += next;
    ++k;
  }
  return {values[k], values[n - 1 - k]};
}

}  // namespace gate
