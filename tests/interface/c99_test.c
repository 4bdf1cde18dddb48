/*
 * The public header as a program in C99 and C11 and in C++11 (cxx_test.cpp includes this file): it
 * compiles without a warning, and a tiny layer computes what it must.
 */
#include <mha.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- A tiny layer: its weights are identities, so that everything can be worked out by hand */

static const float identity[2 * 2] = {1, 0, 0, 1};

static int failures = 0;

static void expect(int condition, const char *what) {
  if (condition) return;
  fprintf(stderr, "not so: %s\n", what);
  failures++;
}

static int near(float a, float b) {
  const float difference = a > b ? a - b : b - a;
  return difference <= 1e-6f;
}

int main(void) {
  /* Two rows; the causal first row sees itself only, the second one both, with scores 0 and 1
   * (times a scale of 1). */
  const float x[2 * 2] = {1, 0, 0, 1};
  const float e = 2.718281828f;
  float y[2 * 2] = {-1, -1, -1, -1};
  float lse[2] = {-1, -1};
  mha_layer_config config = MHA_INIT(mha_layer_config);
  mha_layer_weights weights = MHA_INIT(mha_layer_weights);
  mha_forward_args args = MHA_INIT(mha_forward_args);
  mha_outputs outputs = MHA_INIT(mha_outputs);
  mha_layer *layer = NULL;
  mha_error error;
  size_t bytes = 0;
  void *workspace;

  config.query_dim = 2;
  config.num_heads = 1;
  config.scale = 1;
  weights.w_q.data = identity;
  weights.w_k.data = identity;
  weights.w_v.data = identity;
  weights.w_o.data = identity;
  if (mha_layer_create(&config, &weights, NULL, &layer, &error) != MHA_OK) {
    fprintf(stderr, "%s: %s\n", mha_status_string(error.status), error.message);
    return 1;
  }
  args.call.n_q = 2;
  args.query.data = x;
  args.output.data = y;
  args.call.flags = MHA_CAUSAL;
  outputs.lse = lse;
  args.call.outputs = &outputs;
  expect(mha_forward_workspace(layer, &args, &bytes, &error) == MHA_OK, error.message);
  workspace = malloc(bytes + 1);
  if (workspace == NULL) return 1;
  expect(mha_forward(layer, &args, workspace, bytes, &error) == MHA_OK, error.message);
  expect(y[0] == 1 && y[1] == 0, "the first row is its own value");
  expect(near(y[2], 1 / (1 + e)) && near(y[3], e / (1 + e)),
         "the second row is the softmax of 0 and 1");
  expect(near(lse[0], 1), "the first sum is exp(1)");
  expect(near(lse[1], 1.31326169f), "the second sum is 1 + exp(1)");

  args.call.n_q = -1;
  expect(mha_forward(layer, &args, workspace, bytes, &error) == MHA_ERROR_INVALID_VALUE,
         "a negative length is an error");
  expect(error.argument == 2 && error.message[0] != 0, "the error says where");
  free(workspace);
  mha_layer_destroy(layer);

  expect(mha_version() >= 10000 * MHA_VERSION_MAJOR + 100 * MHA_VERSION_MINOR + MHA_VERSION_PATCH,
         "the library is older than its header");
  expect(strcmp(mha_status_string(MHA_ERROR_SHAPE), "MHA_ERROR_SHAPE") == 0,
         "a status has the name of its macro");
  return failures == 0 ? 0 : 1;
}
