/*
 * Attention as Gemma 2 has it: scores bounded by a softcap, a window in every second layer, and a
 * scale that is not that of a head's width. Words in comments are those of the model's config.json.
 */
#include "model_layers.h"

/* In the model of 9 billion weights 3584, 16, 8, 256, 8192 and 42; */
enum {
  hidden_size = 96,
  num_heads = 8,
  num_kv_heads = 4,
  head_dim = 16,
  positions = 256,
  num_layers = 4
};
/* 4096 and 256; 144 in that of 27 billion, whose heads have 128 columns. */
enum { sliding_window = 128, query_pre_attn_scalar = 12 };

int main(void) {
  mha_layer_config config = {
      .struct_size = sizeof config, .query_dim = hidden_size, .num_heads = num_heads};
  config.num_kv_heads = num_kv_heads;
  config.head_dim = head_dim;
  config.scale = 1 / sqrtf(query_pre_attn_scalar);

  mha_rope rope = make_rope((mha_rope_config){
      .struct_size = sizeof(mha_rope_config), .dims = head_dim, .num_positions = positions});
  mha_score_options score = {.struct_size = sizeof score,
                             .softcap = 50}; /* attn_logit_softcapping */

  struct model_layer layers[num_layers] = {{0}};
  for (int l = 0; l < num_layers; l++) {
    mha_forward_args *args = &layers[l].args;
    args->call.flags = MHA_CAUSAL;
    args->call.rope = &rope;
    args->call.score = &score;
    if (l % 2 == 0) {
      args->call.flags |= MHA_WINDOW_LEFT;
      args->call.window_left = sliding_window - 1; /* and the row itself */
    }
    layers[l].layer = make_layer(&config, 0);
  }
  const int result = run_model(layers, num_layers, positions - 20, positions, hidden_size);
  for (int l = 0; l < num_layers; l++) mha_layer_destroy(layers[l].layer);
  free((void *)rope.cos);
  free((void *)rope.sin);
  return result;
}
