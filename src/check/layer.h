// Checks of what a layer is made of: its configuration, its weights and its options.
//
// mha_layer_pack_size, mha_layer_pack and mha_layer_create take the same three structs, and the
// functions of a linear layer take two. prepare turns either into a PackJob, so that everything
// after it is the same for both.
#pragma once

#include "../base/report.h"
#include "../objects/layer.h"

namespace mha {

// The numbers of a function's parameters, which errors name. The first one is the configuration; a
// linear layer has it in the struct of its weights.
struct PackArguments {
  uint32_t weights, options;
};

constexpr PackArguments layer_arguments = {2, 3}, linear_arguments = {1, 2};

// What a layer is made from, after all checks that need not read the weights themselves.
struct PackJob {
  PackArguments arguments;
  mha_layer_weights weights;
  mha_layer_options options;
  PackedForm form;
};

// Check everything but the values of weights, and resolve all defaults.
mha_status prepare(Report report, const mha_layer_config *config, const mha_layer_weights *weights,
                   const mha_layer_options *options, PackJob *job);
mha_status prepare(Report report, const mha_linear_weights *weights,
                   const mha_layer_options *options, PackJob *job);

// Copies the options, which may be null, and checks them.
mha_status read_options(Report report, const mha_layer_options *options, mha_layer_options *read);

// Each call begins with this check, which is inlined for small layers; the message is not.
mha_status fail_no_layer(Report report, const mha_layer *layer) MHA_COLD;
inline mha_status check_layer(Report report, const mha_layer *layer) {
  return layer && is_layer(layer) ? MHA_OK : fail_no_layer(report, layer);
}

// The kernels' name for an MHA_ARITHMETIC_*, and back.
Arithmetic arithmetic_of(uint32_t number);
uint32_t number_of(Arithmetic arithmetic);

}  // namespace mha
