/* The target mha::pthreadpool: a layer's tasks on the threads of a pthreadpool. The result is the
 * same bits as without. */
#include <mha.h>
#include <mha_pthreadpool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { tokens = 200, width = 96, heads = 6 };
static float x[tokens * width], alone[tokens * width], together[tokens * width],
    w_qkv[width * 3 * width], w_o[width * width];

static void fill(float *values, int count) {
  for (int i = 0; i < count; i++) values[i] = (float)(i * 7 % 11 - 5) / 32;
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

  mha_layer_config config = {.struct_size = sizeof config, .query_dim = width, .num_heads = heads};
  mha_layer_weights weights = {.struct_size = sizeof weights, .w_qkv.data = w_qkv, .w_o.data = w_o};
  mha_layer *layer;
  mha_error error;
  check(mha_layer_create(&config, &weights, NULL, &layer, &error), &error);

  pthreadpool_t pool = pthreadpool_create(0); /* as many threads as processors; NULL where there is
                                                 none, and then this thread does all */
  mha_scheduler scheduler;
  mha_pthreadpool_scheduler(pool, &scheduler);

  mha_forward_args args = {.struct_size = sizeof args, .call.n_q = tokens, .query.data = x};
  args.call.flags = MHA_CAUSAL;
  args.call.scheduler = &scheduler;
  size_t bytes;
  check(mha_forward_workspace(layer, &args, &bytes, &error), &error);
  void *workspace = malloc(bytes);
  args.output.data = together;
  check(mha_forward(layer, &args, workspace, bytes, &error), &error);
  args.output.data = alone;
  args.call.scheduler = NULL; /* a workspace for more threads serves fewer, too */
  check(mha_forward(layer, &args, workspace, bytes, &error), &error);

  int equal = memcmp(alone, together, sizeof together) == 0;
  printf("one thread, and a pool of %u: %s\n", (unsigned)scheduler.num_threads,
         equal ? "the same bits" : "different bits");
  pthreadpool_destroy(pool);
  free(workspace);
  mha_layer_destroy(layer);
  return equal ? 0 : 1;
}
