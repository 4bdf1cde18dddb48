// The groups of benchmarks. Each function registers those of one file.
#pragma once

#include <stdint.h>

#include <string>

#include "mha.h"

namespace bench {

struct Setting {
  uint32_t instruction_set;   // what the library computes with, not AUTO
  bool all_instruction_sets;  // none was chosen: the group instruction_set has them all
  int64_t
      most_rotated_bytes;  // of the layers and caches that a benchmark of decoding cycles through
};

void register_layer_benchmarks(const Setting &setting);
void register_attention_benchmarks(const Setting &setting);
void register_projection_benchmarks(const Setting &setting);
void register_decode_benchmarks(const Setting &setting);
void register_plain_benchmarks(const Setting &setting);
void register_storage_benchmarks(const Setting &setting);
void register_latent_benchmarks(const Setting &setting);
void register_recurrent_benchmarks(const Setting &setting);

}  // namespace bench
