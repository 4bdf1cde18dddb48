// Checks of what each entry takes on its own: its counts, its arrays and its scheduler. They read
// the arguments into `args`, and resolve types, extents and strides there.
#pragma once

#include "../base/report.h"
#include "../objects/layer.h"
#include "arrays.h"

namespace mha {

constexpr uint32_t layer_argument = 1, args_argument = 2;  // of functions that take a layer

// mha_forward. NULL inputs: key = query, value = key.
mha_status check_forward(Report report, const mha_layer *layer, const mha_forward_args *given,
                         mha_forward_args *args);
mha_status check_sgemm_inputs(Report report, const mha_layer &layer, const mha_forward_args &args);

// mha_attention. Arguments were read; outputs and the request come later than the shape.
mha_status check_attention_shape(Report report, mha_attention_args *args);
mha_status check_attention_arrays(Report report, const mha_outputs &outputs,
                                  mha_attention_args *args);
mha_status check_attention_outputs(Report report, const mha_attention_args &args,
                                   const mha_outputs &outputs, const AttentionRequest &request);

// mha_choose_keys: what of mha_attention has no meaning there, and then its own arrays. n_kv: the
// most keys of a sequence.
mha_status check_choice(Report report, const mha_choose_keys_args *given,
                        mha_choose_keys_args *args, mha_attention_args *attention);
mha_status check_choice_arrays(Report report, const mha_attention_args &attention,
                               const AttentionRequest &request, int64_t n_kv,
                               mha_choose_keys_args *args);

mha_status check_linear(Report report, const mha_layer *layer, const mha_linear_args *given,
                        mha_linear_args *args);

// The arrays of mha_linear. The residual has the shape and the type of the output.
template <class Visit>
mha_status each_array(const mha_layer &layer, mha_linear_args &a, const Visit &visit) {
  const Extents x = {no_extent, a.rows, no_extent, layer.shape.output_depth()},
                y = {no_extent, a.rows, no_extent, layer.shape.output_dim};
  MHA_TRY(visit({"x", "the input rows", x}, a.x));
  MHA_TRY(visit({"output", "an array for the result", y}, a.output));
  return visit({"residual", "", y, a.output.type, false}, a.residual);
}

}  // namespace mha
