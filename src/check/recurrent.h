// Checks of mha_recurrent_attention and mha_causal_conv, whose sequences are rows alone: what
// mha_sequences says of keys, positions and caches is refused.
#pragma once

#include "../base/report.h"
#include "../plan/sequences.h"

namespace mha {

// Read the arguments into `args`, resolve types, extents and strides there, and read what they say
// of their sequences.
mha_status check_recurrent(Report report, const mha_recurrent_args *given, mha_recurrent_args *args,
                           SequenceArguments *sequences);
mha_status check_causal_conv(Report report, const mha_causal_conv_args *given,
                             mha_causal_conv_args *args, SequenceArguments *sequences);

}  // namespace mha
