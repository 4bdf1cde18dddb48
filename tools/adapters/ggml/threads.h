// The threads of a backend: those of ggml's OpenMP where ggml uses it, otherwise a small pool.
#ifndef MHA_GGML_THREADS_H
#define MHA_GGML_THREADS_H

#include <memory>

#include "mha.h"

namespace mha_ggml {

class Pool;

class Threads {
 public:
  Threads();
  ~Threads();

  // The threads of the calls to come, with the caller's. Fewer if no more can be started.
  void set_count(int count);
  const mha_scheduler *scheduler() const { return &scheduler_; }

 private:
  mha_scheduler scheduler_;
  std::unique_ptr<Pool> pool_;
};

}  // namespace mha_ggml

#endif  // MHA_GGML_THREADS_H
