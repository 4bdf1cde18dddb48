// latency: small layers, where what surrounds the arithmetic counts. latency_scalar_loops: the same in plain loops.

#include <cmath>
#include <stdexcept>

#include "groups.h"
#include "layer_case.h"
#include "memory.h"
#include "scalar_loops.h"

namespace bench {
namespace {

constexpr LayerShape shapes[] = {
    {1, 1, 8, 2, true}, {1, 1, 64, 4, true}, {1, 3, 6, 2, true}, {1, 16, 64, 4, true}, {1, 8, 128, 4, true},
};

class ScalarLoopsCase : public LayerCase {
 public:
  ScalarLoopsCase(const LayerShape &layer_shape, uint32_t set)
      : LayerCase(layer_shape),
        data_(nullptr, problem, {call_form()}),
        layer_{shape.n,
               shape.width,
               shape.heads,
               shape.is_causal,
               static_cast<const float *>(weights_.weights.w_qkv),
               static_cast<const float *>(weights_.weights.w_o),
               qkv_.get(),
               context_.get(),
               scores_.get()} {
    instruction_set = set;
    check_against_mha();
  }

  void call() override {
    run_scalar_loops(layer_, static_cast<const float *>(data_.args.query), static_cast<float *>(data_.args.output));
  }
  const float *y() const override { return static_cast<const float *>(data_.args.output); }

 private:
  // A rival that computed something else would be none.
  void check_against_mha() {
    call();
    const std::unique_ptr<LayerCase> other = make_layer_case(shape, {instruction_set});
    other->call();
    for (int64_t i = 0; i < shape.rows() * shape.width; ++i) {
      if (!(std::fabs(y()[i] - other->y()[i]) < 1e-4f)) throw std::runtime_error("the plain loops and the library give different results");
    }
  }

  static support::LayerForm fused() {
    support::LayerForm form;
    form.form = support::WeightForm::kFused;
    return form;
  }

  const support::LayerData weights_{problem, support::Place::kLargePages, fused()};
  support::ForwardData data_;
  const Array<float> qkv_ = make_array<float>(shape.n * 3 * shape.width), context_ = make_array<float>(shape.n * shape.width),
                     scores_ = make_array<float>(shape.n);
  ScalarLayer layer_;
};

}  // namespace

void register_latency_benchmarks(const Setting &setting) {
  for (const LayerShape &shape : shapes) {
    add("latency/" + shape.name(), [=] { return make_layer_case(shape, {setting.instruction_set}); });
    add("latency_scalar_loops/" + shape.name(), [=] { return std::make_unique<ScalarLoopsCase>(shape, setting.best); });
  }
}

}  // namespace bench
