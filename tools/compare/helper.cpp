// mha as worker.py calls it, through ctypes: a layer that runs many times in one call, so that no Python lies between, and on a pool of
// threads of its own; and the peak that the figures are a share of. Everything is for one process with one number of threads.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "clock.h"
#include "memory.h"
#include "mha.h"
#include "openblas_core.h"
#include "probes.h"
#include "workers.h"

namespace {

struct Layer {
  mha_layer *layer = nullptr;
  mha_forward_args args = {};
  mha_score_options score = {};
  mha_call_info info = {};
  std::vector<float> y;
  std::vector<unsigned char> workspace;
  bench::Array<unsigned char> cache;
  int64_t past = 0;
};

const mha_scheduler *scheduler_of(uint32_t num_threads) {
  static const bench::Workers *const workers = num_threads > 1 ? new bench::Workers(num_threads) : nullptr;
  return workers ? &workers->scheduler() : nullptr;
}

// The last steps of making one, the same with a cache and without. Null: message says why.
Layer *finished(Layer *self, const mha_layer_config &config, const float *w_qkv, const float *w_o, uint32_t num_threads, char *message) {
  mha_layer_weights weights = {};
  weights.struct_size = sizeof weights;
  weights.w_qkv = w_qkv;
  weights.w_o = w_o;
  self->args.output = self->y.data();
  self->args.scheduler = scheduler_of(num_threads);
  self->info.struct_size = sizeof self->info;
  mha_error error;
  if (mha_layer_create(&config, &weights, nullptr, &self->layer, &error) || mha_info(self->layer, &self->args, &self->info, &error)) {
    std::memcpy(message, error.message, sizeof error.message);
    return nullptr;
  }
  self->workspace.resize(self->info.workspace_bytes);
  return self;
}

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

// GB/s of one thread that does nothing but read: the best of a few tries. Slice after slice of a part that no cache holds, if it is large.
static double read_rate(uint32_t instruction_set, const char *part, int64_t bytes) {
  constexpr int64_t kSlice = int64_t{32} << 20;
  const int64_t slices = std::max<int64_t>(1, bytes / kSlice);
  int64_t next = 0;
  double best = 0;
  for (int i = 0; i < 4; ++i) {
    for (const bench::ReadProbe &probe : bench::probes_of(instruction_set).read) {
      // An odd number of steps: streams at a distance of a power of two get into each other's way.
      const int64_t steps = (bytes / slices / probe.streams / bench::read_step - 1) | 1, stream_bytes = steps * bench::read_step;
      if (steps < 1) continue;
      const double start = bench::seconds_now(bench::Clock::wall);
      probe.run(part + next++ % slices * (bytes / slices), stream_bytes);
      const double seconds = bench::seconds_now(bench::Clock::wall) - start;
      best = std::max(best, 1e-9 * static_cast<double>(probe.streams * stream_bytes) / seconds);
    }
  }
  return best;
}

static uint32_t best_instruction_set() {
  uint32_t best = MHA_INSTRUCTION_SET_SCALAR;
  for (uint32_t set = best; set <= MHA_INSTRUCTION_SET_NEON_I8MM; ++set) {
    if (mha_instruction_sets() >> set & 1) best = set;
  }
  return best;
}

// What num_threads threads reach together; rate(thread) is that of one.
template <class Rate>
static double rate_of_all(uint32_t num_threads, const Rate &rate) {
  std::vector<double> rates(num_threads);
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < num_threads; ++i) threads.emplace_back([&rates, &rate, i] { rates[i] = rate(i); });
  double sum = 0;
  for (uint32_t i = 0; i < num_threads; ++i) {
    threads[i].join();
    sum += rates[i];
  }
  return sum;
}

extern "C" {

// A layer with the weights w_qkv [width, 3 * width] and w_o [width, width] on the rows x [batch, n, width], which must stay. NULL: message,
// of 248 bytes, says why. Never freed: the process ends first.
Layer *compare_layer(int64_t batch, int64_t n, int64_t width, int64_t heads, uint32_t is_causal, uint32_t weight_type, uint32_t arithmetic,
                     uint32_t attention_arithmetic, const float *x, const float *w_qkv, const float *w_o, uint32_t num_threads,
                     char *message) {
  mha_layer_config config = {};
  config.struct_size = sizeof config;
  config.query_dim = width;
  config.num_heads = heads;
  config.weight_type = weight_type;
  config.arithmetic = arithmetic;

  Layer *const self = new Layer;
  self->y.resize(static_cast<size_t>(batch * n * width));
  self->args.struct_size = sizeof self->args;
  self->args.batch = batch;
  self->args.n_q = n;
  self->args.query = x;
  self->args.flags = is_causal ? MHA_CAUSAL : 0;
  self->score.struct_size = sizeof self->score;
  self->score.arithmetic = self->score.context_arithmetic = attention_arithmetic;
  if (attention_arithmetic) self->args.score = &self->score;
  return finished(self, config, w_qkv, w_o, num_threads, message);
}

// One row x [width] over a cache of its own with the keys and values k, v [past, kv_heads, width / heads]. w_qkv [width, width + 2 *
// those].
Layer *compare_decode(int64_t width, int64_t heads, int64_t kv_heads, int64_t past, const float *x, const float *w_qkv, const float *w_o,
                      const float *k, const float *v, uint32_t num_threads, char *message) {
  mha_layer_config config = {};
  config.struct_size = sizeof config;
  config.query_dim = width;
  config.num_heads = heads;
  config.num_kv_heads = kv_heads;
  mha_kv_cache_config cache_config = {};
  cache_config.struct_size = sizeof cache_config;
  cache_config.num_sequences = 1;
  cache_config.capacity = past + 1;
  cache_config.num_kv_heads = kv_heads;
  cache_config.head_dim = width / heads;

  Layer *const self = new Layer;
  self->past = past;
  self->y.resize(static_cast<size_t>(width));
  self->args.struct_size = sizeof self->args;
  self->args.batch = self->args.n_q = 1;
  self->args.query = x;
  self->args.flags = MHA_CAUSAL;
  mha_error error;
  size_t bytes;
  mha_status status = mha_kv_cache_size(&cache_config, &bytes, &error);
  if (!status) {
    self->cache = bench::make_array<unsigned char>(static_cast<int64_t>(bytes));
    status = mha_kv_cache_init(&cache_config, self->cache.get(), bytes, &self->args.cache, &error);
  }
  if (!status) status = mha_kv_cache_append(self->args.cache, 0, past, k, v, &error);
  if (status) {
    std::memcpy(message, error.message, sizeof error.message);
    return nullptr;
  }
  return finished(self, config, w_qkv, w_o, num_threads, message);
}

mha_status compare_forward(const Layer *self, uint32_t calls) {
  mha_status status = MHA_OK;
  for (uint32_t i = 0; i < calls && !status; ++i) {
    void *const workspace = const_cast<unsigned char *>(self->workspace.data());
    status = mha_forward(self->layer, &self->args, workspace, self->workspace.size(), nullptr);
    if (self->cache && !status) status = mha_kv_cache_truncate(self->args.cache, 0, self->past, nullptr);
  }
  return status;
}

const float *compare_output(const Layer *self) { return self->y.data(); }

// Multiplications and additions of one call, counting only the pairs that attend.
double compare_operations(const Layer *self) { return static_cast<double>(self->info.operations); }

const char *compare_better_openblas_core(const char *core) { return bench::better_openblas_core(core, mha_instruction_sets()); }

const char *compare_instruction_set() { return mha_instruction_set_name(best_instruction_set()); }

// GFLOP/s of multiply-adds on registers, of num_threads threads at once.
double compare_peak(uint32_t num_threads) {
  return rate_of_all(num_threads, [](uint32_t) { return fma_peak(best_instruction_set()); });
}

// GB/s of reading `bytes` bytes again and again, num_threads threads at once, each its part of them.
double compare_bandwidth(uint32_t num_threads, int64_t bytes) {
  static bench::Array<char> buffer;
  static int64_t size = 0;
  if (size < bytes) {
    buffer.reset();
    buffer = bench::make_array<char>(size = bytes);
  }
  const int64_t part = bytes / num_threads;
  return rate_of_all(num_threads,
                     [part](uint32_t thread) { return read_rate(best_instruction_set(), buffer.get() + thread * part, part); });
}

// Random numbers, uniform between -bound and bound.
void compare_fill(float *values, int64_t count, float bound, uint64_t seed) {
  for (int64_t i = 0; i < count; ++i) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    values[i] = bound * (static_cast<float>(seed >> 40) / static_cast<float>(1 << 23) - 1.0f);
  }
}

}  // extern "C"
