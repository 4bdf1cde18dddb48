// Layers without some of their heads, as packing with kept_heads has to make them.
#ifndef MHA_TESTS_SUPPORT_PRUNED_H
#define MHA_TESTS_SUPPORT_PRUNED_H

#include <algorithm>
#include <cstdint>
#include <vector>

#include "support/layer.h"

namespace support {

// The rows or columns of the heads that stay, of x [outer, heads, width].
inline std::vector<float> KeepHeads(const std::vector<float> &x, int64_t heads, const std::vector<uint8_t> &kept, int64_t outer = 1) {
  std::vector<float> left;
  const int64_t width = x.empty() ? 0 : static_cast<int64_t>(x.size()) / (outer * heads);
  for (int64_t i = 0; i < outer * heads && !x.empty(); i++) {
    if (kept[static_cast<size_t>(i % heads)]) left.insert(left.end(), x.begin() + i * width, x.begin() + (i + 1) * width);
  }
  return left;
}

// A layer that never had the other heads.
inline LayerProblem Pruned(const LayerProblem &problem, const std::vector<uint8_t> &kept) {
  const int64_t heads = problem.num_heads, kv_heads = problem.num_kv_heads, group = heads / kv_heads, dim = problem.query_dim;
  std::vector<uint8_t> kept_kv(static_cast<size_t>(kv_heads));
  for (int64_t h = 0; h < heads; h++) kept_kv[static_cast<size_t>(h / group)] |= kept[static_cast<size_t>(h)] != 0;
  LayerProblem left = problem;
  left.num_heads = std::count_if(kept.begin(), kept.end(), [](uint8_t stays) { return stays != 0; });
  left.num_kv_heads = std::count(kept_kv.begin(), kept_kv.end(), 1);
  left.w_q = KeepHeads(problem.w_q, heads, kept, dim);
  left.w_g = KeepHeads(problem.w_g, heads, kept, dim);
  left.w_k = KeepHeads(problem.w_k, kv_heads, kept_kv, problem.key_dim);
  left.w_v = KeepHeads(problem.w_v, kv_heads, kept_kv, problem.value_dim);
  left.w_o = KeepHeads(problem.w_o, heads, kept);
  left.b_q = KeepHeads(problem.b_q, heads, kept);
  left.b_g = KeepHeads(problem.b_g, heads, kept);
  left.b_k = KeepHeads(problem.b_k, kv_heads, kept_kv);
  left.b_v = KeepHeads(problem.b_v, kv_heads, kept_kv);
  // Scales are those of an output each, or of an output and 32 inputs.
  const auto keep_scales = [](const std::vector<float> &scales, int64_t width, int64_t of, const std::vector<uint8_t> &stays) {
    return scales.empty() ? scales : KeepHeads(scales, of, stays, static_cast<int64_t>(scales.size()) / width);
  };
  left.s_q = keep_scales(problem.s_q, problem.q_width(), heads, kept);
  left.s_g = keep_scales(problem.s_g, problem.gate_width(), heads, kept);
  left.s_k = keep_scales(problem.s_k, problem.k_width(), kv_heads, kept_kv);
  left.s_v = keep_scales(problem.s_v, problem.v_width(), kv_heads, kept_kv);
  if (problem.stored == Stored::kInt4) left.s_o = KeepHeads(problem.s_o, heads, kept);
  return left;
}

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_PRUNED_H
