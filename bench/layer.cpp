// layer_prefill: the whole layer, from x to y. threads: on one core and on all. instruction_set: a
// few shapes with each that the machine has.

#include "groups.h"
#include "layer_case.h"
#include "pool.h"

namespace bench {
namespace {

constexpr LayerShape shapes[] = {
    // decoders
    {1, 128, 256, 4, true},
    {1, 128, 768, 12, true},
    {1, 512, 768, 12, true},
    {1, 1024, 768, 12, true},
    {1, 2048, 1024, 16, true},
    {8, 128, 768, 12, true},
    {1, 1024, 2048, 16, true},
    {1, 512, 4096, 32, true},
    // what runs at the edge: ViT-B/16, CLIP's text, Whisper base's encoder, a window of Swin-T
    {1, 197, 768, 12, false},
    {1, 77, 768, 12, false},
    {1, 1500, 512, 8, false},
    {1, 49, 96, 3, false},
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

void register_layer_benchmarks(const Setting &setting) {
  for (const LayerShape &shape : shapes)
    add_layer("layer_prefill", shape, {setting.instruction_set});
  for (const LayerShape &shape : shapes) {
    if (!is_long(shape)) continue;
    for (const uint32_t threads : {uint32_t{1}, num_cores()}) {
      const LayerOptions options = {setting.instruction_set, threads};
      add(
          "threads/" + shape.name() + "/T:" + std::to_string(threads),
          [=] { return make_layer_case(shape, options); }, Clock::wall);
      if (num_cores() == 1) break;
    }
  }

  for (uint32_t set = MHA_INSTRUCTION_SET_SCALAR; set <= MHA_INSTRUCTION_SET_NEON_I8MM; ++set) {
    if (!(mha_instruction_sets() >> set & 1) ||
        (set != setting.instruction_set && !setting.all_instruction_sets))
      continue;
    const std::string group = std::string("instruction_set/") + mha_instruction_set_name(set);
    for (const LayerShape &shape :
         {LayerShape{1, 16, 64, 4, true}, shapes[0], shapes[1], shapes[3]}) {
      // Seconds, and nobody's choice.
      if (set == MHA_INSTRUCTION_SET_SCALAR && is_long(shape)) continue;
      add_layer(group, shape, {set});
    }
  }
}

}  // namespace bench
