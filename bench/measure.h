// One benchmark: a call, what it has to do at the least, and its speed as a share of the machine's
// limit.
#pragma once

#include <stdint.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "clock.h"

namespace bench {

// Limits take turns: a stage takes as long as the slower of its arithmetic and its memory.
struct Stage {
  double flops;
  double bytes;  // weights, inputs and outputs of the stage, each once
};

// A call together with the arrays that it works on.
struct Case {
  std::vector<Stage> stages;
  double bytes;              // of the whole call: weights, inputs and outputs, each once
  double working_set_bytes;  // these, and what lies between the stages
  uint32_t instruction_set;  // that the machine's limits are taken from, not AUTO
  uint32_t threads = 1;
  bool in_integers = false;     // or bf16, and so may pass the limits of floats
  std::string label;            // shown after the figures
  std::unique_ptr<Case> rival;  // called in turns with this one, if there is one
  std::string rival_counter;    // the name of the counter: time of the rival / time of this

  virtual ~Case() = default;
  virtual void call() = 0;  // throws std::runtime_error with a sentence

  // Throws one unless the stages have as many operations as mha_forward_info counts.
  void expect_operations(uint64_t counted) const;
};

// Registers a benchmark. `make` is called before the first run and throws std::runtime_error with a
// sentence if it cannot.
void add(const std::string &name, std::function<std::unique_ptr<Case>()> make,
         Clock clock = Clock::processor);

// What makes a run worthless.
struct Tolerance {
  double of_limit = 1.03;  // above: void, since a probe saw less than the machine can do
  // Above: the machine is too noisy; share by which the limit changed during the run.
  double drift = 1;
};
void set_tolerance(const Tolerance &tolerance);

// A benchmark of which a run was void or could not be measured. It has no figures.
struct Failure {
  enum class Kind { is_void, not_measured };
  Kind kind;
  std::string name;
  std::string sentence;
};
const std::vector<Failure> &failed_benchmarks();

}  // namespace bench
