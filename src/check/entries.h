// Checks of what each entry takes on its own: its counts, its arrays and its scheduler. They read
// the arguments into `args`, and resolve types, extents and strides there.
#pragma once

#include "../base/report.h"
#include "../objects/layer.h"
#include "../plan/sequences.h"
#include "arrays.h"

namespace mha {

constexpr uint32_t layer_argument = 1, args_argument = 2;  // of functions that take a layer

// mha_forward. NULL inputs: key = query, value = key.
mha_status check_forward(Report report, const mha_layer *layer, const mha_forward_args *given,
                         mha_forward_args *args);
mha_status check_forward_request(Report report, const LayerShape &layer, const mha_call &call,
                                 const mha_outputs &outputs, SequenceArguments *sequences,
                                 AttentionRequest *request);
mha_status check_sgemm_inputs(Report report, const mha_layer &layer, const mha_forward_args &args);

// mha_attention and mha_choose_keys, whose arguments were read.
struct AttentionUse {
  bool has_values;       // false: keys are only scored
  int64_t most_queries;  // as in AttentionRequest
};
mha_status check_attention(Report report, const AttentionUse &use, mha_attention_args *args,
                           SequenceArguments *sequences, mha_outputs *outputs,
                           AttentionRequest *request);

// mha_choose_keys: what of mha_attention has no meaning there, and then its own arrays. n_kv: the
// most keys of a sequence.
mha_status check_choice(Report report, const mha_choose_keys_args *given,
                        mha_choose_keys_args *args, mha_attention_args *attention);
mha_status check_choice_arrays(Report report, const mha_attention_args &attention,
                               const AttentionRequest &request, int64_t n_kv,
                               mha_choose_keys_args *args);

mha_status check_linear(Report report, const mha_layer *layer, const mha_linear_args *given,
                        mha_linear_args *args);

// The arrays of mha_forward. With cache_read there are no keys, whatever key and value say.
template <class Visit>
mha_status each_array(const mha_layer &layer, mha_forward_args &a, const Visit &visit) {
  const LayerShape &shape = layer.shape;
  const auto rows = [&a](int64_t n, int64_t width) {
    return Extents{a.call.batch, n, no_extent, width};
  };
  const int64_t n_q = a.call.n_q, n_kv = a.call.n_kv;
  const bool has_keys = !a.call.cache_read;
  MHA_TRY(visit({"query", "the input rows", rows(n_q, shape.query_dim)}, a.query));
  MHA_TRY(visit({"key", nullptr, rows(n_kv, shape.key_dim), a.query.type, has_keys, true}, a.key));
  MHA_TRY(visit({"value", nullptr, rows(n_kv, shape.value_dim), a.query.type, has_keys, true},
                a.value));
  return visit({"output", "an array for the result", rows(n_q, shape.output_dim)}, a.output);
}

// The arrays of mha_attention. check_values (cache.h) says whether v is needed. has_output: whether
// the output is.
template <class Visit>
mha_status each_array(mha_attention_args &a, bool has_output, const Visit &visit) {
  const int64_t batch = a.call.batch, n_q = a.call.n_q, n_kv = a.call.n_kv;
  const Extents q = {batch, n_q, a.num_heads, a.head_dim},
                k = {batch, n_kv, a.num_kv_heads, a.head_dim},
                v = {batch, n_kv, a.num_kv_heads, a.head_dim_v},
                output = {batch, n_q, a.num_heads, a.head_dim_v};
  MHA_TRY(visit({"q", "the queries", q}, a.q));
  MHA_TRY(visit({"k", "the keys", k, a.q.type}, a.k));
  MHA_TRY(visit({"v", nullptr, v, a.k.type}, a.v));
  return visit({"output", has_output ? "an array for the result" : nullptr, output}, a.output);
}

// The arrays of mha_linear. The residual has the shape and the type of the output.
template <class Visit>
mha_status each_array(const mha_layer &layer, mha_linear_args &a, const Visit &visit) {
  const Extents x = {no_extent, a.rows, no_extent, layer.shape.output_depth()},
                y = {no_extent, a.rows, no_extent, layer.shape.output_dim};
  MHA_TRY(visit({"x", "the input rows", x}, a.x));
  MHA_TRY(visit({"output", "an array for the result", y}, a.output));
  return visit({"residual", nullptr, y, a.output.type, true}, a.residual);
}

}  // namespace mha
