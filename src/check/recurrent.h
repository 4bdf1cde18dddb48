// Checks of mha_recurrent_attention and mha_causal_conv, whose sequences are rows alone: what
// mha_sequences says of keys, positions and caches is refused.
#pragma once

#include "../base/report.h"
#include "../plan/sequences.h"
#include "arrays.h"

namespace mha {

// Read the arguments into `args`, resolve types, extents and strides there, and read what they say
// of their sequences.
mha_status check_recurrent(Report report, const mha_recurrent_args *given, mha_recurrent_args *args,
                           SequenceArguments *sequences);
mha_status check_causal_conv(Report report, const mha_causal_conv_args *given,
                             mha_causal_conv_args *args, SequenceArguments *sequences);

// Their arrays of rows.
template <class Visit>
mha_status each_array(mha_recurrent_args &a, const Visit &visit) {
  const auto rows = [&a](int64_t heads, int64_t width) {
    return Extents{a.batch, a.rows, heads, width};
  };
  const int64_t heads = a.num_v_heads;
  MHA_TRY(visit({"q", "the queries", rows(a.num_q_heads, a.head_dim)}, a.q));
  MHA_TRY(visit({"k", "the keys", rows(a.num_k_heads, a.head_dim), a.q.type}, a.k));
  MHA_TRY(visit({"v", "the values", rows(heads, a.head_dim_v), a.k.type}, a.v));
  MHA_TRY(visit({"decay", nullptr, rows(heads, a.decay_dim), 0, true}, a.decay));
  MHA_TRY(visit({"beta", nullptr, rows(heads, 1), 0, true}, a.beta));
  return visit({"output", "an array for the result",
                rows(a.num_q_heads > heads ? a.num_q_heads : heads, a.head_dim_v)},
               a.output);
}

template <class Visit>
mha_status each_array(mha_causal_conv_args &a, const Visit &visit) {
  const Extents rows = {a.batch, a.rows, no_extent, a.channels};
  MHA_TRY(visit({"x", "the input rows", rows}, a.x));
  return visit({"output", "an array for the result", rows}, a.output);
}

}  // namespace mha
