#include "threads.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>

namespace mha_ggml {
namespace {

using Task = bench::Workers::Task;

// GCC's and LLVM's OpenMP both export this. The module is not linked with either, so that it uses
// the threads that ggml has already started, and loads where there is no OpenMP.
using OpenMp = void (*)(void (*body)(void *), void *data, unsigned num_threads, unsigned flags);

OpenMp openmp() {
  static const OpenMp found = [] {
    // The CPU's backend may be a module, whose libraries are found by their names alone.
    void *const everywhere = dlsym(RTLD_DEFAULT, "GOMP_parallel"), *const library = dlopen(
                                                                       "libgomp.so.1",
                                                                       RTLD_LAZY | RTLD_NOLOAD);
    return reinterpret_cast<OpenMp>(everywhere || !library ? everywhere
                                                           : dlsym(library, "GOMP_parallel"));
  }();
  return found;
}

// Always asks for all threads: with fewer, GCC's OpenMP would end the others.
void run_in_openmp(void *scheduler, uint32_t count, Task task, void *context) {
  struct Loop {
    Task task;
    void *context;
    uint32_t count;
    std::atomic<uint32_t> next;
  } loop{task, context, count, {0}};
  if (count == 1) return task(context, 0);
  const auto run = [](void *data) {
    Loop &loop = *static_cast<Loop *>(data);
    for (uint32_t i; (i = loop.next++) < loop.count;) loop.task(loop.context, i);
  };
  openmp()(run, &loop, static_cast<mha_scheduler *>(scheduler)->num_threads, 0);
}

}  // namespace

void Threads::run_alone(void *, uint32_t count, Task task, void *context) {
  for (uint32_t i = 0; i < count; i++) task(context, i);
}

void Threads::set_count(int count) {
  const uint32_t wanted = static_cast<uint32_t>(std::max(count, 1));
  if (wanted == scheduler_.num_threads) return;
  pool_.reset();
  scheduler_ = {nullptr, 1, 0, run_alone};
  if (wanted > 1 && openmp()) {
    scheduler_ = {&scheduler_, wanted, 0, run_in_openmp};
  } else if (wanted > 1) {
    pool_ = std::make_unique<bench::Workers>(wanted);
    scheduler_ = pool_->scheduler();
  }
}

}  // namespace mha_ggml
