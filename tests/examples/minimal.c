#include <mha.h>
#include <stdio.h>
#include <stdlib.h>

enum { tokens = 4, width = 8, heads = 2 };
static float x[tokens * width], y[tokens * width], w_qkv[width * 3 * width], w_o[width * width];

static void fill(float *values, int count) {
  for (int i = 0; i < count; i++) values[i] = (float)(i * 7 % 11 - 5) / 8;
}

static void check(mha_status status, const mha_error *error) {
  if (status == MHA_OK) return;
  fprintf(stderr, "%s\n", error->message);
  exit(1);
}

int main(void) {
  fill(x, tokens * width);
  fill(w_qkv, width * 3 * width);
  fill(w_o, width * width);

  mha_layer_config config = MHA_INIT(mha_layer_config);
  config.query_dim = width;
  config.num_heads = heads;
  mha_layer_weights weights = MHA_INIT(mha_layer_weights);
  weights.w_qkv.data = w_qkv;
  weights.w_o.data = w_o;
  mha_layer *layer;
  mha_error error;
  check(mha_layer_create(&config, &weights, NULL, &layer, &error), &error);

  mha_forward_args args = MHA_INIT(mha_forward_args);
  args.call.n_q = tokens;
  args.call.flags = MHA_CAUSAL;
  args.query.data = x;
  args.output.data = y;
  size_t bytes;
  check(mha_forward_workspace(layer, &args, &bytes, &error), &error);
  void *workspace = malloc(bytes);
  check(mha_forward(layer, &args, workspace, bytes, &error), &error);

  for (int i = 0; i < tokens; i++) {
    printf("y[%d] = %7.4f %7.4f ...\n", i, y[i * width], y[i * width + 1]);
  }
  free(workspace);
  mha_layer_destroy(layer);
  return 0;
}
