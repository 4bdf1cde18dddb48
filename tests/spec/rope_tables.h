// The specification of mha_rope_tables: src/kernels/CONTRACT.md, "Tables of sines and cosines". A
// transcription of that page alone, which includes nothing of the library.
#ifndef MHA_TESTS_SPEC_ROPE_TABLES_H
#define MHA_TESTS_SPEC_ROPE_TABLES_H

#include <cstdint>

namespace spec {

// The fields of mha_rope_config, defaults resolved but for the attention factor.
struct RopeConfig {
  int64_t dims;
  int64_t first_position;
  int64_t num_positions;
  double base;
  double linear_factor;
  double yarn_factor;  // 0 = no YaRN
  int64_t original_positions;
  double yarn_beta_fast;
  double yarn_beta_slow;
  double attention_factor;  // 0 = the default
  bool yarn_unrounded;
  double llama3_factor;  // 0 = not as Llama 3
  double llama3_low_freq_factor;
  double llama3_high_freq_factor;
  const double *pair_factors;  // [dims / 2]; null = 1
  double ntk_factor;           // 0 = no dynamic NTK
  int64_t ntk_positions;
  const int64_t *mrope_section;    // [3]; null: no M-RoPE
  const int64_t *mrope_positions;  // [3, num_positions]
  bool mrope_interleaved;
};

// cos and sin [num_positions, dims / 2]
void RopeTables(const RopeConfig &config, float *cos, float *sin);

}  // namespace spec

#endif  // MHA_TESTS_SPEC_ROPE_TABLES_H
