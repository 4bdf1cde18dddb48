// latency: small layers, where what surrounds the arithmetic counts.

#include "groups.h"
#include "layer_case.h"

namespace bench {
namespace {

constexpr LayerShape shapes[] = {
    {1, 1, 8, 2, true},   {1, 1, 64, 4, true},  {1, 3, 6, 2, true},
    {1, 16, 64, 4, true}, {1, 8, 128, 4, true},
};

}  // namespace

void register_latency_benchmarks(const Setting &setting) {
  for (const LayerShape &shape : shapes) {
    add("latency/" + shape.name(),
        [=] { return make_layer_case(shape, {setting.instruction_set}); });
  }
}

}  // namespace bench
