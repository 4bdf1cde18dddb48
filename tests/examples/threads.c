/*
 * The caller's threads. The library starts none: it calls parallel_for, and the caller runs the tasks as it likes. This one starts a thread
 * for each task and joins it; a program that has a pool of threads hands the tasks to that. The result is the same bits as without.
 */
#include <mha.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { max_threads = 4, tokens = 200, width = 96, heads = 6 };

struct job {
  void (*task)(void *task_context, uint32_t index);
  void *task_context;
  uint32_t index;
};

static void *run_job(void *argument) {
  struct job *job = argument;
  job->task(job->task_context, job->index);
  return NULL;
}

static void parallel_for(void *context, uint32_t count, void (*task)(void *task_context, uint32_t index), void *task_context) {
  (void)context;
  pthread_t threads[max_threads];
  struct job jobs[max_threads];
  uint32_t started = 0;
  for (uint32_t i = 0; i < count; i++) {
    jobs[i] = (struct job){task, task_context, i};
    /* The last one runs here, and so does whatever no thread could be had for: any order will do. */
    if (i + 1 < count && pthread_create(&threads[started], NULL, run_job, &jobs[i]) == 0)
      started++;
    else
      run_job(&jobs[i]);
  }
  for (uint32_t i = 0; i < started; i++) pthread_join(threads[i], NULL);
}

static float *random_floats(size_t count) {
  float *values = malloc(count * sizeof *values);
  for (size_t i = 0; i < count; i++) values[i] = (float)rand() / (float)RAND_MAX - 0.5f;
  return values;
}

static void check(mha_status status, const mha_error *error) {
  if (status != MHA_OK) fprintf(stderr, "%s\n", error->message), exit(1);
}

int main(void) {
  float *x = random_floats(tokens * width), *w_qkv = random_floats(width * 3 * width), *w_o = random_floats(width * width);
  float *alone = malloc(sizeof *alone * tokens * width), *together = malloc(sizeof *together * tokens * width);

  mha_layer_config config = {.struct_size = sizeof config, .query_dim = width, .num_heads = heads};
  mha_layer_weights weights = {.struct_size = sizeof weights, .w_qkv = w_qkv, .w_o = w_o};
  mha_layer *layer;
  mha_error error;
  check(mha_layer_create(&config, &weights, NULL, &layer, &error), &error);

  mha_scheduler scheduler = {.num_threads = max_threads, .parallel_for = parallel_for};
  mha_forward_args args = {.struct_size = sizeof args, .batch = 1, .n_q = tokens, .query = x, .is_causal = 1, .scheduler = &scheduler};
  args.output = together;
  size_t bytes;
  check(mha_forward_workspace(layer, &args, &bytes, &error), &error);
  void *workspace = malloc(bytes);
  check(mha_forward(layer, &args, workspace, bytes, &error), &error);

  args.output = alone;
  args.scheduler = NULL; /* a workspace for more threads serves fewer, too */
  check(mha_forward(layer, &args, workspace, bytes, &error), &error);

  int equal = memcmp(alone, together, sizeof *alone * tokens * width) == 0;
  printf("one thread and %d: %s\n", max_threads, equal ? "the same bits" : "different bits");
  free(workspace);
  mha_layer_destroy(layer);
  free(x), free(w_qkv), free(w_o), free(alone), free(together);
  return equal ? 0 : 1;
}
