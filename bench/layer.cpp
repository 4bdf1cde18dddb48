// layer_prefill: the whole layer, from x to y. latency: small ones, where other things than the
// arithmetic count. threads: on one core and on all. instruction_set: a few shapes with each.

#include "groups.h"
#include "layer_case.h"
#include "pool.h"

namespace bench {
namespace {

constexpr LayerShape small_layers[] = {
    {1, 1, 8, 2, true},   {1, 1, 64, 4, true},  {1, 3, 6, 2, true},
    {1, 16, 64, 4, true}, {1, 8, 128, 4, true},
};

// Lasts over 1 ms on one core of 250 GFLOP/s.
bool is_long(const LayerShape &shape) {
  const double rows = static_cast<double>(shape.rows()), width = static_cast<double>(shape.width);
  return 8 * rows * width * width +
             4 * width * attending_pairs(shape.batch, shape.n, shape.is_causal) >
         250e6;
}

void add_layer(const std::string &group, const LayerShape &shape, const LayerOptions &options) {
  add(group + "/" + shape.name(), [=] { return make_layer_case(shape, options); });
}

}  // namespace

const Group layer_benchmarks([](const Setting &setting) {
  for (const LayerShape &shape : page_layers)
    add_layer("layer_prefill", shape, {setting.instruction_set});
  for (const LayerShape &shape : small_layers)
    add_layer("latency", shape, {setting.instruction_set});
  for (const LayerShape &shape : page_layers) {
    if (!is_long(shape)) continue;
    for (const uint32_t threads : {uint32_t{1}, num_cores()}) {
      const LayerOptions options = {setting.instruction_set, threads};
      add(
          "threads/" + shape.name() + "/T:" + std::to_string(threads),
          [=] { return make_layer_case(shape, options); }, Clock::wall);
      if (num_cores() == 1) break;
    }
  }

  for (uint32_t set = MHA_INSTRUCTION_SET_SCALAR; set < 32; ++set) {
    if (!(mha_instruction_sets() >> set & 1) ||
        (set != setting.instruction_set && !setting.all_instruction_sets))
      continue;
    const std::string group = std::string("instruction_set/") + mha_instruction_set_name(set);
    for (const LayerShape &shape :
         {LayerShape{1, 16, 64, 4, true}, page_layers[0], page_layers[1], page_layers[3]}) {
      // Seconds, and nobody's choice.
      if (set == MHA_INSTRUCTION_SET_SCALAR && is_long(shape)) continue;
      add_layer(group, shape, {set});
    }
  }
});

}  // namespace bench
