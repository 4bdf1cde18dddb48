#include "layer_case.h"

#include <cmath>

#include "pool.h"

namespace bench {
namespace {

support::LayerProblem problem_of(const LayerShape &shape, const LayerOptions &options) {
  support::LayerProblem problem =
      random_layer(shape.batch, shape.n, shape.width, shape.heads, shape.heads);
  problem.is_causal = shape.is_causal;
  problem.arithmetic = options.arithmetic;
  problem.is_in_integers = options.attends_in_integers;
  return problem;
}

support::LayerForm form_of(const LayerOptions &options) {
  support::LayerForm form;
  form.weight_type = options.weight_type;
  return form;
}

class LayerCase : public Case {
 public:
  LayerCase(const LayerShape &shape, const LayerOptions &chosen)
      : problem_(problem_of(shape, chosen)),
        options_(support::Options(chosen.instruction_set)),
        layer_(Create(support::LayerData(problem_, support::Place::kAnywhere, form_of(chosen)),
                      &options_)),
        scheduler_(pool_scheduler(chosen.threads)),
        data_(layer_.get(), problem_, {call_form(chosen.threads > 1 ? &scheduler_ : nullptr)}) {
    instruction_set = chosen.instruction_set;
    threads = chosen.threads;
    // In matrices of [width, width] and of [rows, width].
    const double rows = static_cast<double>(shape.rows()), width = static_cast<double>(shape.width);
    const double weight_bytes = sizeof(float) * width * width,
                 row_bytes = sizeof(float) * rows * width;
    const double product_flops = 2 * rows * width * width;
    stages = {{3 * product_flops, 3 * weight_bytes + 4 * row_bytes},
              {4 * width * attending_pairs(shape.batch, shape.n, shape.is_causal), 4 * row_bytes},
              {product_flops, weight_bytes + 2 * row_bytes}};
    bytes = 4 * weight_bytes + 2 * row_bytes;
    working_set_bytes = 4 * weight_bytes + 6 * row_bytes;  // x, q, k, v, context, y
    mha_call_info info = support::Zeroed<mha_call_info>();
    support::Check(data_.Info(&info, &error_), error_);
    expect_operations(info.operations);
    workspace_ = support::Memory(info.workspace_bytes, support::Place::kLargePages);
  }

  void call() override {
    support::Check(mha_forward(layer_.get(), &args_, workspace_.data(), workspace_.size(), &error_),
                   error_);
  }

 private:
  const support::LayerProblem problem_;
  const mha_layer_options options_;
  const support::Layer layer_;
  const mha_scheduler scheduler_;
  support::ForwardData data_;
  const mha_forward_args args_ = data_.Given(data_.args);
  support::Memory workspace_;
  mha_error error_ = {};
};

}  // namespace

double attending_pairs(int64_t batch, int64_t n, bool is_causal) {
  const double rows = static_cast<double>(n);
  return static_cast<double>(batch) * (is_causal ? rows * (rows + 1) / 2 : rows * rows);
}

std::string LayerShape::name() const {
  return "B:" + std::to_string(batch) + "/n:" + std::to_string(n) + "/D:" + std::to_string(width) +
         "/H:" + std::to_string(heads) + "/causal:" + std::to_string(is_causal);
}

support::LayerProblem random_layer(int64_t batch, int64_t n, int64_t width, int64_t heads,
                                   int64_t kv_heads) {
  support::LayerProblem problem;
  problem.batch = batch;
  problem.n_q = problem.n_kv = n;
  problem.query_dim = problem.key_dim = problem.value_dim = problem.output_dim = width;
  problem.num_heads = heads;
  problem.num_kv_heads = kv_heads;
  problem.head_dim = problem.head_dim_v = width / heads;
  support::Random random(1);
  const float range = 1.7f / std::sqrt(static_cast<float>(width));
  problem.w_q = random.Uniforms(width * width, range);
  problem.w_k = random.Uniforms(width * problem.k_width(), range);
  problem.w_v = random.Uniforms(width * problem.v_width(), range);
  problem.w_o = random.Uniforms(width * width, range);
  problem.query = random.Uniforms(batch * n * width);
  return problem;
}

support::CallForm call_form(const mha_scheduler *scheduler) {
  support::CallForm form;
  form.asked = support::kAskNothing;
  form.place = support::Place::kLargePages;
  form.scheduler = scheduler;
  return form;
}

std::unique_ptr<Case> make_layer_case(const LayerShape &shape, const LayerOptions &options) {
  return std::make_unique<LayerCase>(shape, options);
}

}  // namespace bench
