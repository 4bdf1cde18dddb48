#include "norm.h"

#include "structs.h"

namespace mha {

mha_status check_norm(Report report, const mha_norm *given, const SequenceArguments &s, Attention *attention) {
  Attention &a = *attention;
  a.prepare_q = a.prepare_k = a.prepare_v = {};
  if (!given) return MHA_OK;
  mha_norm norm;
  if (const mha_status status = read_struct(report, "mha_norm", given, &norm)) return status;
  constexpr uint32_t known_flags = MHA_NORM_LAYER | MHA_NORM_ALL_HEADS | MHA_NORM_AFTER_ROPE | MHA_NORM_VALUES;
  if (norm.flags & ~known_flags)
    return report.invalid("norm.flags has the bits 0x%x, which mean nothing; leave them 0", norm.flags & ~known_flags);
  if (!(norm.epsilon > 0.0f) || norm.epsilon - norm.epsilon != 0.0f)
    return report.invalid("norm.epsilon is %g; it must be positive and finite, such as 1e-6", static_cast<double>(norm.epsilon));
  const bool is_layer = (norm.flags & MHA_NORM_LAYER) != 0, has_all_heads = (norm.flags & MHA_NORM_ALL_HEADS) != 0;
  if (!is_layer && (norm.q_bias || norm.k_bias)) {
    return report.invalid("norm.%s is given, but an RMS norm has no bias; set MHA_NORM_LAYER, or leave it NULL",
                          norm.q_bias ? "q_bias" : "k_bias");
  }
  const int64_t stride = norm.head_stride;
  if (has_all_heads && stride != 0 && stride != a.head_dim) {
    return report.invalid("norm.head_stride is %lld; with MHA_NORM_ALL_HEADS, weights are one row: set it to head_dim %lld, or 0",
                          lld(stride), lld(a.head_dim));
  }
  if (stride < 0 || (stride != 0 && stride < a.head_dim)) {
    return report.invalid("norm.head_stride is %lld; set it to at least head_dim %lld, or 0 for the same weights for all heads",
                          lld(stride), lld(a.head_dim));
  }
  if ((Count(a.num_heads) * Count(stride) * Count(sizeof(float))).overflows())
    return report.fail(MHA_ERROR_TOO_LARGE, "norm's weights would be larger than memory can be");

  Norm common = {};
  common.is_given = true;
  common.is_after_rotation = (norm.flags & MHA_NORM_AFTER_ROPE) != 0;
  common.epsilon = norm.epsilon;
  common.rows_per_sequence = s.n_q;
  if ((norm.flags & MHA_NORM_VALUES) && s.cache && s.cache->values != MHA_CACHE_VALUES_OWN)
    return report.invalid("norm.flags has MHA_NORM_VALUES, but the cache has its values in the keys; leave it out");
  if (norm.flags & MHA_NORM_VALUES) {
    a.prepare_v.norm = common;
    a.prepare_v.norm.count = static_cast<float>(a.head_dim_v);
  }
  common.is_layer = is_layer;
  common.is_of_all_heads = has_all_heads;
  common.head_stride = has_all_heads ? a.head_dim : stride;
  a.prepare_q.norm = a.prepare_k.norm = common;
  a.prepare_q.norm.count = static_cast<float>(has_all_heads ? a.num_heads * a.head_dim : a.head_dim);
  a.prepare_q.norm.weight = norm.q_weight;
  a.prepare_q.norm.bias = norm.q_bias;
  a.prepare_k.norm.count = static_cast<float>(has_all_heads ? a.num_kv_heads * a.head_dim : a.head_dim);
  a.prepare_k.norm.weight = norm.k_weight;
  a.prepare_k.norm.bias = norm.k_bias;
  if (!s.is_self) a.prepare_k.norm.rows_per_sequence = s.n_kv;
  return MHA_OK;
}

}  // namespace mha
