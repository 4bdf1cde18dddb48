// mha as worker.py calls it, through ctypes: a layer that runs many times in one call, so that no Python lies between, and on a pool of
// threads of its own; and the peak that the figures are a share of. Everything is for one process with one number of threads.

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#include "clock.h"
#include "mha.h"
#include "probes.h"

namespace {

// Threads that look for work for a while before they sleep, as those of the other libraries do. The caller works too, and waits for the
// tasks and not for the threads: what none of them has begun when it could go on, it does itself.
class Pool {
 public:
  explicit Pool(uint32_t num_threads) {
    for (uint32_t i = 1; i < num_threads; ++i) std::thread(&Pool::serve, this).detach();
    scheduler_.context = this;
    scheduler_.num_threads = num_threads;
    scheduler_.parallel_for = [](void *pool, uint32_t count, void (*task)(void *, uint32_t), void *task_context) {
      static_cast<Pool *>(pool)->run(count, task, task_context);
    };
  }

  const mha_scheduler *scheduler() const { return &scheduler_; }

 private:
  // The tasks not begun yet are those from begun to count - 1. One word, so that a thread which is late takes none of another call.
  struct Tasks {
    uint32_t begun, count;
  };

  void run(uint32_t count, void (*task)(void *, uint32_t), void *task_context) {
    if (count == 1) return task(task_context, 0);
    task_ = task, task_context_ = task_context;
    done_ = 0;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      tasks_ = Tasks{0, count};
    }
    wake_.notify_all();
    work();
    for (int spins = 0; done_ < count; ++spins) pause(spins);
  }

  void work() {
    for (Tasks tasks = tasks_; tasks.begun < tasks.count; tasks = tasks_) {
      if (!tasks_.compare_exchange_weak(tasks, Tasks{tasks.begun + 1, tasks.count})) continue;
      task_(task_context_, tasks.begun);
      ++done_;
    }
  }

  bool is_idle() const {
    const Tasks tasks = tasks_;
    return tasks.begun >= tasks.count;
  }

  void serve() {
    while (true) {
      for (int spins = 0; is_idle() && spins < 20000; ++spins) pause(spins);
      if (is_idle()) {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [this] { return !is_idle(); });
      }
      work();
    }
  }

  // Gives way now and then, in case there are more threads than cores free.
  static void pause(int spins) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
    if (spins % 1024 == 1023) std::this_thread::yield();
  }

  mha_scheduler scheduler_ = {};
  void (*task_)(void *, uint32_t) = nullptr;
  void *task_context_ = nullptr;
  std::atomic<Tasks> tasks_{Tasks{0, 0}};
  std::atomic<uint32_t> done_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
};

struct Layer {
  mha_layer *layer = nullptr;
  mha_forward_args args = {};
  mha_call_info info = {};
  std::vector<float> y;
  std::vector<unsigned char> workspace;
};

}  // namespace

// GFLOP/s of one thread that does nothing but multiply-adds on registers: the best of a few tries.
static double fma_peak(uint32_t instruction_set) {
  constexpr int64_t kSteps = 20000;
  double best = 0;
  for (const bench::FmaProbe &probe : bench::probes_of(instruction_set).fma) {
    for (int i = 0; i < 12; ++i) {
      const double start = bench::seconds_now(bench::Clock::wall);
      probe.run(kSteps);
      best = std::max(best, 1e-9 * probe.flops_per_step * static_cast<double>(kSteps) / (bench::seconds_now(bench::Clock::wall) - start));
    }
  }
  return best;
}

extern "C" {

// A layer with the weights w_qkv [width, 3 * width] and w_o [width, width] on the rows x [batch, n, width], which must stay. NULL: message,
// of 248 bytes, says why. Never freed: the process ends first.
Layer *compare_layer(int64_t batch, int64_t n, int64_t width, int64_t heads, uint32_t is_causal, const float *x, const float *w_qkv,
                     const float *w_o, uint32_t num_threads, char *message) {
  static Pool *const pool = num_threads > 1 ? new Pool(num_threads) : nullptr;
  mha_layer_config config = {};
  config.struct_size = sizeof config;
  config.query_dim = width;
  config.num_heads = heads;
  mha_layer_weights weights = {};
  weights.struct_size = sizeof weights;
  weights.w_qkv = w_qkv;
  weights.w_o = w_o;

  Layer *const self = new Layer;
  self->y.resize(static_cast<size_t>(batch * n * width));
  self->args.struct_size = sizeof self->args;
  self->args.batch = batch;
  self->args.n_q = n;
  self->args.query = x;
  self->args.output = self->y.data();
  self->args.is_causal = is_causal;
  self->args.scheduler = pool ? pool->scheduler() : nullptr;
  self->info.struct_size = sizeof self->info;
  mha_error error;
  if (mha_layer_create(&config, &weights, nullptr, &self->layer, &error) || mha_info(self->layer, &self->args, &self->info, &error)) {
    std::memcpy(message, error.message, sizeof error.message);
    return nullptr;
  }
  self->workspace.resize(self->info.workspace_bytes);
  return self;
}

mha_status compare_forward(const Layer *self, uint32_t calls) {
  mha_status status = MHA_OK;
  for (uint32_t i = 0; i < calls && !status; ++i) {
    void *const workspace = const_cast<unsigned char *>(self->workspace.data());
    status = mha_forward(self->layer, &self->args, workspace, self->workspace.size(), nullptr);
  }
  return status;
}

const float *compare_output(const Layer *self) { return self->y.data(); }

// Multiplications and additions of one call, counting only the pairs that attend.
double compare_operations(const Layer *self) { return static_cast<double>(self->info.operations); }

const char *compare_instruction_set() {
  uint32_t best = MHA_INSTRUCTION_SET_SCALAR;
  for (uint32_t set = best; set <= MHA_INSTRUCTION_SET_NEON; ++set) {
    if (mha_instruction_sets() >> set & 1) best = set;
  }
  return mha_instruction_set_name(best);
}

// GFLOP/s of multiply-adds on registers, of num_threads threads at once.
double compare_peak(uint32_t num_threads) {
  uint32_t set = MHA_INSTRUCTION_SET_SCALAR;
  while (std::strcmp(mha_instruction_set_name(set), compare_instruction_set())) ++set;
  std::vector<double> peaks(num_threads);
  std::vector<std::thread> threads;
  for (double &peak : peaks) threads.emplace_back([&peak, set] { peak = fma_peak(set); });
  double sum = 0;
  for (uint32_t i = 0; i < num_threads; ++i) {
    threads[i].join();
    sum += peaks[i];
  }
  return sum;
}

// Random numbers, uniform between -bound and bound.
void compare_fill(float *values, int64_t count, float bound, uint64_t seed) {
  for (int64_t i = 0; i < count; ++i) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    values[i] = bound * (static_cast<float>(seed >> 40) / static_cast<float>(1 << 23) - 1.0f);
  }
}

}  // extern "C"
