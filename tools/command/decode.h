// A layer run as a model that generates: a prompt at once, then row by row, over a KV cache.
#pragma once

#include <cstdint>
#include <string>

#include "call_options.h"
#include "cli.h"
#include "inputs.h"
#include "layer.h"
#include "mha.h"
#include "options.h"
#include "terminal.h"

namespace command {

// 0 and "" = not given.
struct DecodeOptions {
  bool is_wanted = false;
  int64_t prompt = 0;
  std::string cache_type;
};

void add_decode_options(CLI::App *app, DecodeOptions *options);

// Throws InputError where the options contradict each other.
void check_decode_options(const DecodeOptions &options, const InputOptions &inputs, const AttentionOptions &attention);

// What goes through a layer, and where to.
struct Work {
  const LoadedLayer &layer;
  const CallInputs &inputs;
  const CallOptions &options;
  const mha_scheduler &scheduler;
  char *output;
  uint32_t output_type;  // MHA_TYPE_*

  // Where a row of the output begins, of all sequences together.
  char *output_row(int64_t row) const {
    return output + row * layer.shape().output_dim * (output_type == MHA_TYPE_F32 ? sizeof(float) : sizeof(uint16_t));
  }

  // The arguments for count sequences from the one numbered first, all their rows at once. *score is for them to point to.
  mha_forward_args arguments(int64_t first, int64_t count, mha_score_options *score) const;
};

// Runs all rows, and where is_measured, looks how fast memory is read. Returns what there is to say: "cache of f32, prompt of 4 rows in
// 1.20 ms, 12 tokens in 3.40 ms, ...".
std::string decode(const DecodeOptions &options, const Work &work, bool is_measured, Progress *progress);

}  // namespace command
