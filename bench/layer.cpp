// layer_prefill: the whole layer, x to y, causal, fp32, one thread; of_peak is its share of the fma peak measured right before and after.
// Only the pairs that attend count as work. Rates are by processor time: the calls run on one thread and never wait.

#include <benchmark/benchmark.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "limits.h"
#include "mha.h"
#if defined(MHA_WITH_OPENBLAS)
#include "mha_openblas.h"
#endif

namespace {

struct Shape {
  int64_t batch, n, width, heads;
};

constexpr Shape shapes[] = {{1, 128, 256, 4},    {1, 128, 768, 12}, {1, 512, 768, 12},  {1, 1024, 768, 12},
                            {1, 2048, 1024, 16}, {8, 128, 768, 12}, {1, 1024, 2048, 16}};

std::vector<float> random_floats(int64_t count, float scale, uint32_t seed) {
  std::minstd_rand generator(seed);
  std::uniform_real_distribution<float> uniform(-scale, scale);
  std::vector<float> values(static_cast<size_t>(count));
  for (float &value : values) value = uniform(generator);
  return values;
}

void layer_prefill(benchmark::State &state, Shape shape, uint32_t instruction_set, mha_sgemm sgemm) {
  const float scale = 1.7f / std::sqrt(static_cast<float>(shape.width));
  const std::vector<float> w_qkv = random_floats(shape.width * 3 * shape.width, scale, 1),
                           w_o = random_floats(shape.width * shape.width, scale, 2);
  const std::vector<float> x = random_floats(shape.batch * shape.n * shape.width, 1.0f, 3);
  std::vector<float> y(x.size());

  mha_layer_config config = {};
  config.struct_size = sizeof config;
  config.query_dim = shape.width;
  config.num_heads = shape.heads;
  mha_layer_weights weights = {};
  weights.struct_size = sizeof weights;
  weights.w_qkv = w_qkv.data();
  weights.w_o = w_o.data();
  mha_layer_options options = {};
  options.struct_size = sizeof options;
  options.instruction_set = instruction_set;
  options.sgemm = sgemm;
  mha_layer *layer = nullptr;
  mha_error error;
  if (mha_layer_create(&config, &weights, &options, &layer, &error)) return state.SkipWithError(error.message);

  mha_forward_args args = {};
  args.struct_size = sizeof args;
  args.batch = shape.batch;
  args.n_q = shape.n;
  args.query = x.data();
  args.output = y.data();
  args.is_causal = 1;
  mha_call_info info = {};
  info.struct_size = sizeof info;
  if (mha_info(layer, &args, &info, &error)) return state.SkipWithError(error.message);
  std::vector<unsigned char> workspace(info.workspace_bytes);
  if (mha_forward(layer, &args, workspace.data(), workspace.size(), &error)) return state.SkipWithError(error.message);

  double peak = bench::fma_peak(info.instruction_set);
  for (auto _ : state) {
    mha_forward(layer, &args, workspace.data(), workspace.size(), &error);
    benchmark::ClobberMemory();
  }
  const double peak_after = bench::fma_peak(info.instruction_set);
  if (peak_after > peak) peak = peak_after;
  const double operations = static_cast<double>(info.operations) * static_cast<double>(state.iterations());
  state.counters["GFLOP/s"] = benchmark::Counter(operations * 1e-9, benchmark::Counter::kIsRate);
  state.counters["peak"] = peak;
  state.counters["of_peak"] = benchmark::Counter(operations * 1e-9 / peak, benchmark::Counter::kIsRate);
  mha_layer_destroy(layer);
}

void add(const std::string &group, const Shape &shape, uint32_t instruction_set, mha_sgemm sgemm) {
  const std::string name = group + "/B:" + std::to_string(shape.batch) + "/n:" + std::to_string(shape.n) +
                           "/D:" + std::to_string(shape.width) + "/H:" + std::to_string(shape.heads);
  benchmark::RegisterBenchmark(name.c_str(), layer_prefill, shape, instruction_set, sgemm)->Unit(benchmark::kMicrosecond);
}

}  // namespace

namespace bench {

void register_layer_benchmarks() {
  for (const Shape &shape : shapes) add("layer_prefill", shape, MHA_INSTRUCTION_SET_AUTO, nullptr);
#if defined(MHA_WITH_OPENBLAS)
  for (const Shape &shape : shapes) add("layer_prefill_openblas", shape, MHA_INSTRUCTION_SET_AUTO, mha_openblas_sgemm);
#endif
  for (uint32_t set = MHA_INSTRUCTION_SET_SCALAR; set <= MHA_INSTRUCTION_SET_NEON; ++set) {
    if (!(mha_instruction_sets() >> set & 1)) continue;
    for (const Shape &shape : {shapes[1], shapes[3]}) {
      if (set == MHA_INSTRUCTION_SET_SCALAR && shape.n > 128) continue;  // seconds, and nobody's choice
      add(std::string("instruction_set/") + mha_instruction_set_name(set), shape, set, nullptr);
    }
  }
}

}  // namespace bench
