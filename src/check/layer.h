// Checks of what a layer is made of: its configuration, its weights and its options.
#pragma once

#include "../objects/layer.h"
#include "report.h"

namespace mha {

// Which parameters a function has, for its errors; config, or what stands for it, is 1.
struct PackArguments {
  uint32_t weights, options, result;
};

constexpr uint32_t weights_argument = 2;  // of mha_layer_pack_size, _pack and _create
constexpr PackArguments layer_arguments = {weights_argument, 3, 4}, linear_arguments = {1, 2, 3};

// Everything that pack_size, pack and create have in common.
struct PackJob {
  PackArguments arguments;
  Storage storage;
  LayerShape shape;
  mha_layer_weights weights;
  mha_layer_options options;
  PackedKind kind;
  PackedLayout layout;
};

// Check everything but the values of weights, and resolve the shape.
mha_status prepare(Report report, const mha_layer_config *config, const mha_layer_weights *weights,
                   const mha_layer_options *options, PackJob *job);
mha_status prepare_linear(Report report, const mha_linear_weights *weights,
                          const mha_layer_options *options, PackJob *job);

mha_status read_options(Report report, const mha_layer_options *options, mha_layer_options *read);

mha_status fail_no_layer(Report report, const mha_layer *layer) MHA_COLD;
inline mha_status check_layer(Report report, const mha_layer *layer) {
  return layer && is_layer(layer) ? MHA_OK : fail_no_layer(report, layer);
}

// The kernels' name for an MHA_ARITHMETIC_*, and back.
Arithmetic arithmetic_of(uint32_t number);
uint32_t number_of(Arithmetic arithmetic);

}  // namespace mha
