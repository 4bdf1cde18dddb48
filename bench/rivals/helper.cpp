// mha as libraries.py calls it, through ctypes: a layer, or attention alone, that runs many times
// in one call, so that no Python lies between, on a pool of threads of its own; and the limits that
// figures are a share of. Everything is for one process with one number of threads, and never
// freed.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <future>
#include <vector>

#include "../../tests/support/amx.h"
#include "clock.h"
#include "memory.h"
#include "mha.h"
#include "probes.h"
#include "slots.h"
#include "workers.h"

namespace {

struct Layer {
  mha_layer *layer = nullptr;  // null: attention alone
  mha_forward_args args = {};
  mha_attention_args attention = {};
  std::vector<float> y;
  std::vector<unsigned char> workspace;
  bench::Array<unsigned char> cache;
  int64_t past = 0;
  mha_kv_cache *kv = nullptr;

  // Fills the cache with `past` rows, and leaves room for one more.
  mha_status fill_cache(int64_t kv_heads, int64_t head_dim, const float *k, const float *v,
                        mha_error *error) {
    mha_kv_cache_config config = {};
    config.struct_size = sizeof config;
    config.num_sequences = 1;
    config.capacity = past + 1;
    config.num_kv_heads = kv_heads;
    config.head_dim = head_dim;
    size_t bytes = 0;
    mha_status status = mha_kv_cache_size(&config, &bytes, error);
    if (!status) {
      cache = bench::make_array<unsigned char>(static_cast<int64_t>(bytes));
      status = mha_kv_cache_init(&config, cache.get(), bytes, &kv, error);
    }
    return status ? status : mha_kv_cache_append(kv, 0, past, k, v, error);
  }
};

// The threads of all calls; null: the calling thread alone.
const mha_scheduler *scheduler_of(uint32_t num_threads) {
  static const bench::Workers *const workers =
      num_threads > 1 ? new bench::Workers(num_threads) : nullptr;
  return workers ? &workers->scheduler() : nullptr;
}

double now() { return bench::seconds_now(bench::Clock::wall); }

// GFLOP/s of one thread that does nothing but multiply-adds on registers: the best of a few tries.
double fma_peak() {
  constexpr int64_t kSteps = 20000;
  double best = 0;
  for (const bench::FmaProbe &probe : bench::probes_of(bench::best_instruction_set()).fma) {
    for (int i = 0; i < 12; ++i) {
      const double start = now();
      probe.run(kSteps);
      best = std::max(best,
                      1e-9 * probe.flops_per_step * static_cast<double>(kSteps) / (now() - start));
    }
  }
  return best;
}

// GB/s of one thread that does nothing but read: the best of a few tries, slice after slice of a
// part that no cache holds.
double read_rate(const char *part, int64_t bytes) {
  const int64_t slices = std::max<int64_t>(1, bytes >> 25), slice = bytes / slices;
  int64_t next = 0;
  double best = 0;
  for (int i = 0; i < 4; ++i) {
    for (const bench::ReadProbe &probe : bench::probes_of(bench::best_instruction_set()).read) {
      // An odd number of steps: streams at a distance of a power of two get into each other's way.
      const int64_t steps = (slice / probe.streams / bench::read_step - 1) | 1,
                    stream_bytes = steps * bench::read_step;
      if (steps < 1) continue;
      const double start = now();
      probe.run(part + next++ % slices * slice, stream_bytes);
      best = std::max(best,
                      1e-9 * static_cast<double>(probe.streams * stream_bytes) / (now() - start));
    }
  }
  return best;
}

// What num_threads threads reach together; rate(thread) is that of one.
template <class Rate>
double rate_of_all(uint32_t num_threads, const Rate &rate) {
  std::vector<std::future<double>> rates;
  for (uint32_t i = 0; i < num_threads; ++i)
    rates.push_back(std::async(std::launch::async, rate, i));
  double sum = 0;
  for (std::future<double> &each : rates) sum += each.get();
  return sum;
}

}  // namespace

extern "C" {

// The layer on x [batch, n, width], which must stay; with `past` rows of k and v, one row over a
// cache of its own. Without w_qkv, attention alone: x are queries, and k and v must stay too. NULL:
// message, of 248 bytes, says why.
Layer *rivals_layer(int64_t batch, int64_t n, int64_t width, int64_t heads, int64_t kv_heads,
                    uint32_t is_causal, uint32_t weight_type, uint32_t arithmetic, const float *x,
                    const float *w_qkv, const float *w_o, int64_t past, const float *k,
                    const float *v, uint32_t num_threads, char *message) {
  Layer *const self = new Layer;
  self->past = past;
  self->y.resize(static_cast<size_t>(batch * n * width));
  mha_call call = {};
  call.batch = batch;
  call.n_q = n;
  call.flags = is_causal ? MHA_CAUSAL : 0;
  call.scheduler = scheduler_of(num_threads);
  mha_error error;
  size_t bytes = 0;
  mha_status status = past ? self->fill_cache(kv_heads, width / heads, k, v, &error) : MHA_OK;
  if (w_qkv) {
    mha_layer_config config = {};
    config.struct_size = sizeof config;
    config.query_dim = width;
    config.num_heads = heads;
    config.num_kv_heads = kv_heads;
    config.format.type = weight_type;
    config.format.arithmetic = arithmetic;
    mha_layer_weights weights = {};
    weights.struct_size = sizeof weights;
    weights.w_qkv.data = w_qkv;
    weights.w_o.data = w_o;
    mha_forward_args &args = self->args;
    args.struct_size = sizeof args;
    args.call = call;
    args.call.cache = self->kv;
    args.query.data = x;
    args.output.data = self->y.data();
    if (!status) status = mha_layer_create(&config, &weights, nullptr, &self->layer, &error);
    if (!status) status = mha_forward_workspace(self->layer, &args, &bytes, &error);
  } else {
    mha_attention_args &args = self->attention;
    args.struct_size = sizeof args;
    args.num_heads = heads;
    args.num_kv_heads = kv_heads;
    args.head_dim = width / heads;
    args.call = call;
    args.call.n_kv = n;
    args.call.cache_read = self->kv;
    args.q.data = x;
    args.k.data = past ? nullptr : k;
    args.v.data = past ? nullptr : v;
    args.output.data = self->y.data();
    if (!status) status = mha_attention_workspace(&args, &bytes, &error);
  }
  self->workspace.resize(bytes);
  if (!status) return self;
  std::memcpy(message, error.message, sizeof error.message);
  return nullptr;
}

mha_status rivals_forward(Layer *self, uint32_t calls) {
  mha_status status = MHA_OK;
  for (uint32_t i = 0; i < calls && !status; ++i) {
    if (!self->layer) {
      status =
          mha_attention(&self->attention, self->workspace.data(), self->workspace.size(), nullptr);
      continue;
    }
    status = mha_forward(self->layer, &self->args, self->workspace.data(), self->workspace.size(),
                         nullptr);
    if (self->cache && !status) status = mha_kv_cache_truncate(self->kv, 0, self->past, nullptr);
  }
  return status;
}

const float *rivals_output(const Layer *self) { return self->y.data(); }

// Of the core that the calling thread is on.
void rivals_slot_rates(bench::SlotRates *rates) { *rates = bench::slot_rates(); }

const char *rivals_instruction_set() {
  return mha_instruction_set_name(bench::best_instruction_set());
}

double rivals_peak(uint32_t num_threads) {
  return rate_of_all(num_threads, [](uint32_t) { return fma_peak(); });
}

// GB/s of reading `bytes` bytes again and again, each thread its part of them.
double rivals_bandwidth(uint32_t num_threads, int64_t bytes) {
  static bench::Array<char> buffer;
  static int64_t size = 0;
  if (size < bytes) {
    buffer.reset();
    buffer = bench::make_array<char>(size = bytes);
  }
  const int64_t part = bytes / num_threads;
  return rate_of_all(num_threads, [part](uint32_t thread) {
    return read_rate(buffer.get() + thread * part, part);
  });
}

}  // extern "C"
