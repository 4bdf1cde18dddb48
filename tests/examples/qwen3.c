/*
 * Attention as Qwen3 has it: each head of queries and keys is normalised before it is rotated, and
 * query heads share a key and value head. Words in comments are those of the model's config.json
 * and of its files.
 */
#include "model_layers.h"

/* In the model of 8 billion weights 4096, 32, 8, 128, 40960 and 36. */
enum {
  hidden_size = 96,
  num_heads = 8,
  num_kv_heads = 2,
  head_dim = 16,
  positions = 200,
  num_layers = 3
};

int main(void) {
  mha_layer_config config = {
      .struct_size = sizeof config, .query_dim = hidden_size, .num_heads = num_heads};
  config.num_kv_heads = num_kv_heads;
  config.head_dim = head_dim; /* heads together may be wider than a row */

  mha_rope_config angles = {
      .struct_size = sizeof angles, .dims = head_dim, .num_positions = positions, .base = 1000000};
  mha_rope rope = make_rope(angles); /* rope_theta */

  struct model_layer layers[num_layers] = {{0}};
  mha_norm norms[num_layers];
  for (int l = 0; l < num_layers; l++) {
    norms[l] = (mha_norm){.struct_size = sizeof *norms, .epsilon = 1e-6f}; /* rms_norm_eps */
    norms[l].q_weight = numbers(head_dim, 2); /* self_attn.q_norm.weight */
    norms[l].k_weight = numbers(head_dim, 2); /* self_attn.k_norm.weight */
    mha_forward_args *args = &layers[l].args;
    args->call.flags = MHA_CAUSAL;
    args->call.rope = &rope;
    args->call.norm = &norms[l];
    layers[l].layer = make_layer(&config, 0);
  }
  const int result = run_model(layers, num_layers, positions - 20, positions, hidden_size);
  for (int l = 0; l < num_layers; l++) {
    mha_layer_destroy(layers[l].layer);
    free((void *)norms[l].q_weight);
    free((void *)norms[l].k_weight);
  }
  free((void *)rope.cos);
  free((void *)rope.sin);
  return result;
}
