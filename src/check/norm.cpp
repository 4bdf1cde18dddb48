// mha_norm: norms of queries, keys and values before the attention, and of the context after it.

#include "norm.h"

#include "../base/structs.h"
#include "rules.h"

namespace mha {
namespace {

// mha_norm describes two norms, of rows and of the context, by fields whose names differ in a
// prefix: norm.epsilon and norm.context_epsilon. Each of them becomes one of these.
struct GivenNorm {
  const char *prefix;
  uint32_t flags;
  float epsilon;
  const char *bias_name;  // of one that is given; null: none
  int64_t head_stride, width;
  const char *width_name;
  bool is_given;  // one of its fields is
};

// Everything about one of the two norms but where it applies.
mha_status check_one(Report report, const GivenNorm &given, int64_t num_heads) {
  if (given.epsilon == 0.0f)
    return report.invalid("norm.%sepsilon is 0; set it to a positive finite number, such as 1e-6",
                          given.prefix);
  if (!(given.flags & MHA_NORM_LAYER) && given.bias_name)
    return report.invalid(
        "norm.%s is given, but an RMS norm has no bias; set MHA_NORM_LAYER, or set it to NULL",
        given.bias_name);
  const int64_t stride = given.head_stride, width = given.width;
  if ((given.flags & MHA_NORM_ALL_HEADS) && stride != 0 && stride != width)
    return report.invalid(
        "norm.%shead_stride is %lld, but with MHA_NORM_ALL_HEADS the weights are contiguous; set "
        "it to %s, %lld, or to 0",
        given.prefix, lld(stride), given.width_name, lld(width));
  if (stride != 0 && stride < width)
    return report.invalid(
        "norm.%shead_stride is %lld; set it to at least %s, %lld, or to 0 if all heads share the "
        "weights",
        given.prefix, lld(stride), given.width_name, lld(width));
  return Rules{report}.fits("the weights of norm",
                            Count(num_heads) * Count(stride) * Count(sizeof(float)));
}

// A norm of all heads covers num_heads rows of weights side by side; others may share one row.
Norm norm_of(const GivenNorm &given, int64_t num_heads, const float *weight, const float *bias) {
  Norm norm = {};
  norm.is_given = true;
  norm.is_layer = (given.flags & MHA_NORM_LAYER) != 0;
  norm.is_after_rotation = (given.flags & MHA_NORM_AFTER_ROPE) != 0;
  norm.is_of_all_heads = (given.flags & MHA_NORM_ALL_HEADS) != 0;
  norm.epsilon = given.epsilon;
  norm.count = static_cast<float>(norm.is_of_all_heads ? num_heads * given.width : given.width);
  norm.weight = weight;
  norm.bias = bias;
  norm.head_stride = norm.is_of_all_heads ? given.width : given.head_stride;
  return norm;
}

}  // namespace

mha_status check_norm(Report report, const mha_norm *given, const SequenceArguments &s,
                      const AttentionRequest &shape, bool has_output_weights, Norms *norms) {
  *norms = {};
  if (!given) return MHA_OK;
  mha_norm norm;
  MHA_TRY(read_struct(report, "mha_norm", given, &norm));
  MHA_TRY(check_fields(Rules{report, "norm."}, norm));
  const char *const bias = norm.q_bias ? "q_bias" : norm.k_bias ? "k_bias" : nullptr;
  const bool has_rows = norm.flags || norm.epsilon != 0.0f || norm.head_stride != 0 || bias ||
                        norm.q_weight || norm.k_weight,
             has_context = norm.context_flags || norm.context_epsilon != 0.0f ||
                           norm.context_weight || norm.context_bias ||
                           norm.context_head_stride != 0;
  const char *const context_bias = norm.context_bias ? "context_bias" : nullptr;
  const GivenNorm rows = {
      "", norm.flags, norm.epsilon, bias, norm.head_stride, shape.head_dim, "head_dim", has_rows};
  const GivenNorm context = {"context_",
                             norm.context_flags,
                             norm.context_epsilon,
                             context_bias,
                             norm.context_head_stride,
                             shape.head_dim_v,
                             "head_dim_v",
                             has_context};
  if (!rows.is_given && !context.is_given)
    return report.invalid(
        "norm.epsilon and context_epsilon are both 0; set at least one of them, or set norm to "
        "NULL");
  if (rows.is_given) {
    MHA_TRY(check_one(report, rows, shape.num_heads));
    norms->q = norm_of(rows, shape.num_heads, norm.q_weight, norm.q_bias);
    norms->k = norm_of(rows, shape.num_kv_heads, norm.k_weight, norm.k_bias);
    norms->q.rows_per_sequence = s.n_q;
    norms->k.rows_per_sequence = s.is_self ? s.n_q : s.n_kv;
  }
  if (context.is_given) {
    MHA_TRY(check_one(report, context, shape.num_heads));
    if (!has_output_weights)
      return report.invalid(
          "norm.context_epsilon is %g, but a norm of the context needs a layer with W_O; set it to "
          "0",
          static_cast<double>(context.epsilon));
    norms->context = norm_of(context, shape.num_heads, norm.context_weight, norm.context_bias);
    norms->gates_late = !(context.flags & MHA_NORM_AFTER_GATE);
  }
  if ((norm.flags & MHA_NORM_VALUES) && s.cache && s.cache->value_place != MHA_CACHE_VALUES_OWN)
    return report.invalid(
        "norm.flags has MHA_NORM_VALUES, but the cache has MHA_CACHE_VALUES_IN_KEYS; leave the "
        "flag out");
  // Values have an RMS norm without weights, of each head.
  if (norm.flags & MHA_NORM_VALUES) {
    Norm &of_values = norms->v;
    of_values.is_given = true;
    of_values.is_after_rotation = norms->q.is_after_rotation;
    of_values.epsilon = norm.epsilon;
    of_values.count = static_cast<float>(shape.head_dim_v);
  }
  return MHA_OK;
}

}  // namespace mha
