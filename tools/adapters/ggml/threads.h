// The threads of a backend: those of ggml's OpenMP where ggml uses it, otherwise a small pool.
#pragma once

#include <memory>

#include "bench/workers.h"
#include "mha.h"

namespace mha_ggml {

class Threads {
 public:
  // The threads of the calls to come, including the caller's. Throws std::bad_alloc.
  void set_count(int count);
  const mha_scheduler *scheduler() const { return &scheduler_; }

 private:
  mha_scheduler scheduler_ = {nullptr, 1, 0, run_alone};
  std::unique_ptr<bench::Workers> pool_;

  static void run_alone(void *, uint32_t count, bench::Workers::Task task, void *context);
};

}  // namespace mha_ggml
