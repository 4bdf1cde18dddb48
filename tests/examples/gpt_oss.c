/*
 * Attention as gpt-oss has it: biases, a sink for each head, a window of 128 in every second layer,
 * and YaRN whose ramp is not rounded. Words in comments are those of the model's config.json and of
 * its files.
 */
#include "model_layers.h"

/* In the model 2880, 64, 8, 64, 131072 and 24 or 36. */
enum {
  hidden_size = 96,
  num_heads = 8,
  num_kv_heads = 2,
  head_dim = 16,
  positions = 256,
  num_layers = 4
};

int main(void) {
  mha_layer_config config = {
      .struct_size = sizeof config, .query_dim = hidden_size, .num_heads = num_heads};
  config.num_kv_heads = num_kv_heads;
  config.head_dim = head_dim;

  mha_rope_config angles = {
      .struct_size = sizeof angles, .dims = head_dim, .num_positions = positions};
  angles.base = 150000;
  angles.yarn_factor = 32;
  angles.original_positions = 4096; /* rope_theta, rope_scaling */
  angles.yarn_unrounded = 1;        /* "truncate": false */
  mha_rope rope = make_rope(angles);

  struct model_layer layers[num_layers] = {{0}};
  mha_score_options score[num_layers];
  for (int l = 0; l < num_layers; l++) {
    const float *sinks = numbers(num_heads, 2); /* self_attn.sinks */
    score[l] = (mha_score_options){.struct_size = sizeof *score, .sinks = sinks};
    mha_forward_args *args = &layers[l].args;
    args->call.flags = MHA_CAUSAL;
    args->call.rope = &rope;
    args->call.score = &score[l];
    if (l % 2 == 0) {
      args->call.flags |= MHA_WINDOW_LEFT;
      args->call.window_left = 127;
    }
    layers[l].layer = make_layer(&config, 1);
  }
  const int result = run_model(layers, num_layers, positions - 20, positions, hidden_size);
  for (int l = 0; l < num_layers; l++) {
    mha_layer_destroy(layers[l].layer);
    free((void *)score[l].sinks);
  }
  free((void *)rope.cos);
  free((void *)rope.sin);
  return result;
}
