// The results, and the three forms in which they are reported.
#pragma once

#include <stdint.h>

#include <string>
#include <vector>

#include "shapes.h"
#include "statistics.h"
#include "workload.h"

namespace gate {

enum class Verdict { ok, regression, too_noisy };

struct Result {
  Shape shape;
  Difference difference;
  Verdict verdict;
  double ratio;  // new / base; of times the median over the rounds
  // Timing: seconds of a call, one value per round and library, and what was computed from them. Empty when instructions were counted.
  std::vector<double> base_seconds, new_seconds;
  Interval base_range, new_range, ratio_interval;
  // Counting: instructions of one call.
  uint64_t base_instructions, new_instructions;
};

struct Report {
  bool is_count;
  std::string base_name, new_name;
  double threshold;  // 0.05 = 5%
  std::vector<Result> results;
};

// Of all shapes: a regression if there is one, else too noisy if one is.
Verdict verdict_of(const Report &report);

// For people, on standard output; the last line is a sentence.
void print(const Report &report);

// For programs.
void write_json(const Report &report, const std::string &path);

// Appended, since CI systems collect a job's summary in one file.
void append_markdown(const Report &report, const std::string &path);

}  // namespace gate
