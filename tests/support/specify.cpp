#include "support/specify.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

namespace support {

namespace {

// The outputs of the middle stage as they are before any sequence has put its valid rows and
// columns there: what padding gives.
void ResizeToPadding(const AttentionSizes &sizes, Outputs *outputs) {
  const int64_t pairs = sizes.batch * sizes.num_heads * sizes.n_q * sizes.n_kv;
  outputs->scores.assign(pairs, 0.0f);
  outputs->scaled_scores.assign(pairs, 0.0f);
  outputs->softcapped_scores.assign(pairs, 0.0f);
  outputs->masked_scores.assign(pairs, -std::numeric_limits<float>::infinity());
  outputs->context.assign(sizes.batch * sizes.n_q * sizes.num_heads * sizes.head_dim_v, 0.0f);
  outputs->attention_weights.assign(pairs, 0.0f);
  outputs->lse.assign(sizes.batch * sizes.num_heads * sizes.n_q,
                      -std::numeric_limits<float>::infinity());
}

// The outputs of the middle stage for the valid rows of one sequence, and where in those of the
// whole batch they belong.
class SequenceOutputs {
 public:
  SequenceOutputs(const AttentionSizes &sizes, int64_t b)
      : sizes_(sizes), b_(b), valid_(ValidRowsOf(sizes, b)) {
    AttentionSizes alone = sizes;
    alone.batch = 1;
    alone.n_q = valid_.n_q;
    alone.n_kv = valid_.n_kv;
    ResizeToPadding(alone, &outputs_);
    gated_ = outputs_.context;
  }

  spec::AttentionOutputs Pointers() {
    return {outputs_.context.data(),           outputs_.lse.data(),
            outputs_.attention_weights.data(), outputs_.scores.data(),
            outputs_.scaled_scores.data(),     outputs_.softcapped_scores.data(),
            outputs_.masked_scores.data(),     gated_.data()};
  }

  // gated: null, or where the context behind the gate belongs
  void CopyTo(Outputs *batch, std::vector<float> *gated = nullptr) const {
    const int64_t width = sizes_.num_heads * sizes_.head_dim_v,
                  at = (b_ * sizes_.n_q + valid_.q_first) * width;
    std::copy(outputs_.context.begin(), outputs_.context.end(), batch->context.begin() + at);
    if (gated != nullptr) std::copy(gated_.begin(), gated_.end(), gated->begin() + at);
    for (int64_t h = 0; h < sizes_.num_heads; h++) {
      for (int64_t i = 0; i < valid_.n_q; i++) {
        const int64_t from = h * valid_.n_q + i,
                      to = (b_ * sizes_.num_heads + h) * sizes_.n_q + valid_.q_first + i;
        batch->lse[to] = outputs_.lse[from];
        for (const auto field :
             {&Outputs::scores, &Outputs::scaled_scores, &Outputs::softcapped_scores,
              &Outputs::masked_scores, &Outputs::attention_weights}) {
          const auto row = (outputs_.*field).begin() + from * valid_.n_kv;
          std::copy(row, row + valid_.n_kv,
                    (batch->*field).begin() + to * sizes_.n_kv + valid_.kv_first);
        }
      }
    }
  }

 private:
  const AttentionSizes &sizes_;
  int64_t b_;
  ValidRows valid_;
  Outputs outputs_;
  std::vector<float> gated_;
};

}  // namespace

Outputs Specify(const AttentionProblem &problem, const spec::Functions &functions) {
  Outputs outputs;
  const std::optional<Norm> norm = NormOf(problem);
  ResizeToPadding(problem, &outputs);
  outputs.y = outputs.context;
  for (int64_t b = 0; b < problem.batch; b++) {
    const ValidRows valid = ValidRowsOf(problem, b);
    const int64_t q_row = b * problem.n_q + valid.q_first,
                  kv_row = b * problem.n_kv + valid.kv_first;
    SequenceOutputs sequence(problem, b);
    WithRotation(problem, b, [&](const Rotation *rotation) {
      WithScoreOptions(problem, b, [&](const ScoreOptions *score) {
        AttentionShape shape = ShapeOf(problem, b);
        shape.norm = norm ? &*norm : nullptr;
        shape.rotation = rotation;
        shape.score = score;
        shape.gate.values =
            problem.gate_values.data() + q_row * problem.num_heads * problem.gate_dim;
        functions.attend(shape, problem.q.data() + q_row * problem.num_heads * problem.head_dim,
                         problem.k.data() + kv_row * problem.num_kv_heads * problem.head_dim,
                         problem.v.data() + kv_row * problem.num_kv_heads * problem.head_dim_v,
                         sequence.Pointers());
      });
    });
    sequence.CopyTo(&outputs, &outputs.y);
  }
  return outputs;
}

LayerProblem Converted(const LayerProblem &problem, Stored stored,
                       const spec::Functions &functions) {
  LayerProblem converted = problem;
  converted.stored = stored;
  const auto store = [&](const std::vector<float> &w, int64_t in, int64_t out,
                         std::vector<float> *numbers, std::vector<float> *scales) {
    if (w.empty()) return;
    const Format format(stored, problem.group);
    const int64_t groups = format.group ? (in + format.group - 1) / format.group : 1;
    if (HasCodes(stored)) scales->resize(groups * out);
    functions.store_weights(format, w.data(), in, out, numbers->data(), scales->data());
  };
  store(problem.w_q, problem.query_dim, problem.q_width(), &converted.w_q, &converted.s_q);
  store(problem.w_k, problem.key_dim, problem.k_width(), &converted.w_k, &converted.s_k);
  store(problem.w_v, problem.value_dim, problem.v_width(), &converted.w_v, &converted.s_v);
  store(problem.w_g, problem.query_dim, problem.gate_width(), &converted.w_g, &converted.s_g);
  store(problem.w_o, problem.merged_width(), problem.output_dim, &converted.w_o, &converted.s_o);
  return converted;
}

Outputs Specify(const LayerProblem &problem, const spec::Functions &functions) {
  Outputs outputs;
  const std::optional<Norm> norm = NormOf(problem);
  const std::optional<ContextNorm> context_norm = ContextNormOf(problem);
  ResizeToPadding(problem, &outputs);
  outputs.q.resize(problem.batch * problem.n_q * problem.q_width());
  outputs.k.resize(problem.batch * problem.n_kv * problem.k_width());
  outputs.v.resize(problem.batch * problem.n_kv * problem.v_width());
  outputs.y.resize(problem.batch * problem.n_q * problem.y_width());
  for (int64_t b = 0; b < problem.batch; b++) {
    const ValidRows valid = ValidRowsOf(problem, b);
    const int64_t q_row = b * problem.n_q + valid.q_first,
                  kv_row = b * problem.n_kv + valid.kv_first;
    SequenceOutputs sequence(problem, b);
    WithRotation(problem, b, [&](const Rotation *rotation) {
      WithScoreOptions(problem, b, [&](const ScoreOptions *score) {
        LayerShape shape = LayerShapeOf(problem, b);
        shape.attention.norm = norm ? &*norm : nullptr;
        shape.attention.context_norm = context_norm ? &*context_norm : nullptr;
        shape.attention.rotation = rotation;
        shape.attention.score = score;
        functions.forward(shape, WeightsOf(problem),
                          problem.query.data() + q_row * problem.query_dim,
                          problem.key_input().data() + kv_row * problem.key_dim,
                          problem.value_input().data() + kv_row * problem.value_dim,
                          {outputs.q.data() + q_row * problem.q_width(),
                           outputs.k.data() + kv_row * problem.k_width(),
                           outputs.v.data() + kv_row * problem.v_width(), sequence.Pointers(),
                           outputs.y.data() + q_row * problem.y_width()});
      });
    });
    sequence.CopyTo(&outputs);
  }
  return outputs;
}

std::vector<float> Rounded(Storage type, const std::vector<float> &x) {
  std::vector<float> rounded = x;
  if (type != Storage::kF32 && !HasCodes(type) && !x.empty())  // as weights are
    spec::Fastest().store_weights(static_cast<Stored>(type), x.data(), 1,
                                  static_cast<int64_t>(x.size()), rounded.data(), nullptr);
  return rounded;
}

}  // namespace support
