// What the module says, by ggml's log.
#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <string>

#include "ggml-parts.h"

namespace mha_ggml {

// Takes a format and values, as printf does. Warnings are not said if MHA_GGML_QUIET is set, to
// anything but 0. They are notices: programs of llama.cpp show warnings, and not what ggml calls
// information.
void log(ggml_log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

// What was taken of the model that was read last, in one line after its first graph. llama.cpp asks
// about each matrix before it reads the model, and about all of them twice if it first measures how
// much memory they take.
class ModelReport {
 public:
  // A model's matrix, which is multiplied by this module or by the CPU.
  void ask(const ggml_tensor *matrix, bool is_taken) noexcept;
  // An operation that is computed, by its name, which has the number of its layer.
  void count(const ggml_tensor *op) noexcept;
  // At the end of a graph.
  void finish() noexcept;

 private:
  std::mutex lock_;
  std::atomic<bool> is_due_{false};
  std::map<std::string, std::string> types_;  // of all matrices; "" of those that are taken
  std::map<ggml_op, std::set<std::string>> computed_;
};

}  // namespace mha_ggml
