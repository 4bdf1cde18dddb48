// The rows that go into a call.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "mha.h"
#include "npy.h"
#include "options.h"

namespace command {

struct CallInputs {
  Array query;
  std::optional<Array> key;
  std::optional<Array> value;
  bool is_causal = false;

  int64_t batch() const { return query.batch(); }
  int64_t n_q() const { return query.rows(); }
  int64_t n_kv() const;

  // The arguments for count sequences from the one numbered first, without any output.
  mha_forward_args arguments(int64_t first, int64_t count) const;
};

// Reads --input, --key and --value, and checks them against each other.
CallInputs read_inputs(const InputOptions &options);

// Checks their widths, which a call can't see, against the layer's. layer_name is for the sentence. layout_doubt is
// the sentence where the layer can't take its queries and keys from the same rows, perhaps since its matrices were read the wrong way.
void check_widths(const CallInputs &inputs, const mha_layer_config &layer, const std::string &layer_name, const std::string &layout_doubt);

}  // namespace command
