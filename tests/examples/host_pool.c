/*
 * A program's own pool of threads drives the library, which starts none: it hands its tasks to
 * parallel_for, and the pool's workers and the calling thread run them. The result is the same bits
 * as without.
 */
#include <mha.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "thread_pool.h"

enum { tokens = 200, width = 96, heads = 6, calls = 100 };

static float *random_floats(size_t count) {
  float *values = malloc(count * sizeof *values);
  for (size_t i = 0; i < count; i++) values[i] = (float)rand() / (float)RAND_MAX - 0.5f;
  return values;
}

static void check(mha_status status, const mha_error *error) {
  if (status == MHA_OK) return;
  fprintf(stderr, "%s\n", error->message);
  exit(1);
}

int main(void) {
  float *x = random_floats(tokens * width), *w_qkv = random_floats(width * 3 * width),
        *w_o = random_floats(width * width);
  float *alone = malloc(sizeof *alone * tokens * width),
        *together = malloc(sizeof *together * tokens * width);

  mha_layer_config config = {.struct_size = sizeof config, .query_dim = width, .num_heads = heads};
  mha_layer_weights weights = {.struct_size = sizeof weights, .w_qkv.data = w_qkv, .w_o.data = w_o};
  mha_layer *layer;
  mha_error error;
  check(mha_layer_create(&config, &weights, NULL, &layer, &error), &error);

  struct pool pool;
  pool_start(&pool, 3);
  mha_scheduler scheduler = {
      .context = &pool, .num_threads = pool.num_workers + 1, .parallel_for = parallel_for};

  mha_forward_args args = {.struct_size = sizeof args, .call.n_q = tokens, .query.data = x};
  args.call.flags = MHA_CAUSAL;
  args.call.scheduler = &scheduler;
  size_t bytes;
  check(mha_forward_workspace(layer, &args, &bytes, &error), &error);
  void *workspace = malloc(bytes); /* for a scheduler's threads; it serves fewer, too */
  args.call.scheduler = NULL;
  args.output.data = alone;
  check(mha_forward(layer, &args, workspace, bytes, &error), &error);

  args.call.scheduler = &scheduler;
  args.output.data = together;
  int equal = 1;
  for (int i = 0; i < calls; i++) {
    memset(together, 0xff, sizeof *together * tokens * width);
    check(mha_forward(layer, &args, workspace, bytes, &error), &error);
    equal = equal && memcmp(alone, together, sizeof *alone * tokens * width) == 0;
  }
  printf("the calling thread alone and %d calls with %u workers: %s\n", calls,
         (unsigned)pool.num_workers, equal ? "the same bits" : "different bits");

  pool_stop(&pool);
  free(workspace);
  mha_layer_destroy(layer);
  free(x);
  free(w_qkv);
  free(w_o);
  free(alone);
  free(together);
  return equal ? 0 : 1;
}
