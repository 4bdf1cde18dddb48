#include "threads.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "ggml-parts.h"

namespace mha_ggml {
namespace {

using Task = void (*)(void *, uint32_t);

// Tasks that threads take one by one.
struct Loop {
  Task task;
  void *context;
  uint32_t count;
  std::atomic<uint32_t> next{0};

  void run() {
    for (uint32_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) task(context, i);
  }
};

// GCC's and LLVM's OpenMP both export this. The module is not linked with either, so that it uses
// the threads that ggml has already started, and loads where there is no OpenMP.
using OpenMp = void (*)(void (*body)(void *), void *data, unsigned num_threads, unsigned flags);

OpenMp openmp_of_ggml() {
  const ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
  const ggml_backend_reg_t reg = cpu ? ggml_backend_dev_backend_reg(cpu) : nullptr;
  void *const features =
      reg ? ggml_backend_reg_get_proc_address(reg, "ggml_backend_get_features") : nullptr;
  if (!features) return nullptr;
  const ggml_backend_feature *feature =
      reinterpret_cast<ggml_backend_get_features_t>(features)(reg);
  while (feature->name && std::strcmp(feature->name, "OPENMP") != 0) feature++;
  if (!feature->name) return nullptr;
  // The CPU's backend may be a module, whose libraries are found by their names alone.
  void *function = dlsym(RTLD_DEFAULT, "GOMP_parallel");
  void *const library = function ? nullptr : dlopen("libgomp.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (library) function = dlsym(library, "GOMP_parallel");
  return reinterpret_cast<OpenMp>(function);
}

OpenMp openmp() {
  static const OpenMp found = openmp_of_ggml();
  return found;
}

void run_alone(void *, uint32_t count, Task task, void *context) {
  for (uint32_t i = 0; i < count; i++) task(context, i);
}

// Always asks for all threads: with fewer, GCC's OpenMP would end the others.
void run_in_openmp(void *threads, uint32_t count, Task task, void *context) {
  if (count == 1) return task(context, 0);
  Loop loop{task, context, count};
  openmp()([](void *data) { static_cast<Loop *>(data)->run(); }, &loop,
           static_cast<mha_scheduler *>(threads)->num_threads, 0);
}

}  // namespace

// Threads that sleep between loops. One loop runs at a time: a backend computes one graph at once.
class Pool {
 public:
  explicit Pool(uint32_t workers) {
    try {
      while (threads_.size() < workers) {
        threads_.emplace_back([this] { work(); });
      }
    } catch (const std::system_error &) {  // as many as the system gives
    }
  }

  ~Pool() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ends_ = true;
    }
    wake_.notify_all();
    for (std::thread &thread : threads_) thread.join();
  }

  uint32_t workers() const { return static_cast<uint32_t>(threads_.size()); }

  static void run(void *self, uint32_t count, Task task, void *context) {
    static_cast<Pool *>(self)->run(count, task, context);
  }

 private:
  void run(uint32_t count, Task task, void *context) {
    if (count == 1) return task(context, 0);
    Loop loop{task, context, count};
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      loop_ = &loop;
      number_++;
    }
    wake_.notify_all();
    loop.run();
    std::unique_lock<std::mutex> lock(mutex_);
    loop_ = nullptr;  // workers that wake only now find nothing to do
    done_.wait(lock, [this] { return running_ == 0; });
  }

  void work() {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return ends_ || (loop_ && number_ != seen); });
      if (ends_) return;
      seen = number_;
      running_++;
      Loop *const loop = loop_;
      lock.unlock();
      loop->run();
      lock.lock();
      if (--running_ == 0) done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Loop *loop_ = nullptr;
  uint64_t number_ = 0;
  uint32_t running_ = 0;
  bool ends_ = false;
  std::vector<std::thread> threads_;
};

Threads::Threads() : scheduler_{nullptr, 1, 0, run_alone} {
  const int processors = static_cast<int>(std::thread::hardware_concurrency());
  set_count(std::clamp(processors, 1, GGML_DEFAULT_N_THREADS));
}

Threads::~Threads() = default;

void Threads::set_count(int count) {
  const uint32_t wanted = static_cast<uint32_t>(std::max(count, 1));
  if (wanted == scheduler_.num_threads) return;
  pool_.reset();
  scheduler_ = {nullptr, 1, 0, run_alone};
  if (wanted > 1 && openmp()) {
    scheduler_ = {&scheduler_, wanted, 0, run_in_openmp};
  } else if (wanted > 1) {
    pool_ = std::make_unique<Pool>(wanted - 1);
    scheduler_ = {pool_.get(), pool_->workers() + 1, 0, Pool::run};
  }
}

}  // namespace mha_ggml
