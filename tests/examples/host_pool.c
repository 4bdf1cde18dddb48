/*
 * A program's own pool of threads drives the library, which starts none: it hands its tasks to parallel_for, and the pool's workers and
 * the calling thread run them. The result is the same bits as without.
 */
#include <mha.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- The pool */

enum { max_workers = 63, yields_before_sleep = 1000 };

/* Something that threads wait for. Guarded by the pool's mutex, but for `times`, which is also looked at without. */
struct event {
  uint32_t times;
  pthread_cond_t happened;
};

struct pool {
  pthread_mutex_t turn;  /* held by the thread whose loop is under way: callers that share the pool take turns */
  pthread_mutex_t mutex; /* guards all that follows */
  struct event work_came, all_done;
  void (*task)(void *task_context, uint32_t index);
  void *task_context;
  uint32_t not_taken, not_done; /* tasks of the loop under way */
  int stopping;
  uint32_t num_workers;
  pthread_t workers[max_workers];
};

static void happens(struct event *event) {
  __atomic_store_n(&event->times, event->times + 1, __ATOMIC_RELAXED);
  pthread_cond_broadcast(&event->happened);
}

/* A call's loops follow each other faster than a sleeping thread wakes. So a thread stays awake for a moment, in which it leaves the
 * processor to whoever needs it, and only then sleeps. */
static void wait_for(struct pool *pool, struct event *event) {
  uint32_t seen = event->times;
  pthread_mutex_unlock(&pool->mutex);
  for (int i = 0; i < yields_before_sleep && __atomic_load_n(&event->times, __ATOMIC_RELAXED) == seen; i++) sched_yield();
  pthread_mutex_lock(&pool->mutex);
  while (event->times == seen) pthread_cond_wait(&event->happened, &pool->mutex);
}

/* Runs tasks until all are taken. The mutex is held before and after, but not during a task. */
static void run_tasks(struct pool *pool) {
  while (pool->not_taken > 0) {
    uint32_t index = --pool->not_taken;
    pthread_mutex_unlock(&pool->mutex);
    pool->task(pool->task_context, index);
    pthread_mutex_lock(&pool->mutex);
    if (--pool->not_done == 0) happens(&pool->all_done);
  }
}

static void *work(void *argument) {
  struct pool *pool = argument;
  pthread_mutex_lock(&pool->mutex);
  while (!pool->stopping) {
    run_tasks(pool);
    wait_for(pool, &pool->work_came);
  }
  pthread_mutex_unlock(&pool->mutex);
  return NULL;
}

/* What mha_scheduler asks for. It waits for tasks, not for workers: one that comes late finds nothing left and delays nobody. */
static void parallel_for(void *context, uint32_t count, void (*task)(void *task_context, uint32_t index), void *task_context) {
  struct pool *pool = context;
  pthread_mutex_lock(&pool->turn);
  pthread_mutex_lock(&pool->mutex);
  pool->task = task;
  pool->task_context = task_context;
  pool->not_taken = pool->not_done = count;
  happens(&pool->work_came);
  run_tasks(pool);
  if (pool->not_done > 0) wait_for(pool, &pool->all_done);
  pthread_mutex_unlock(&pool->mutex);
  pthread_mutex_unlock(&pool->turn);
}

static void pool_stop(struct pool *pool) {
  pthread_mutex_lock(&pool->mutex);
  pool->stopping = 1;
  happens(&pool->work_came);
  pthread_mutex_unlock(&pool->mutex);
  for (uint32_t i = 0; i < pool->num_workers; i++) pthread_join(pool->workers[i], NULL);
  pthread_cond_destroy(&pool->all_done.happened);
  pthread_cond_destroy(&pool->work_came.happened);
  pthread_mutex_destroy(&pool->mutex);
  pthread_mutex_destroy(&pool->turn);
}

/* With fewer workers than asked for, if no more are to be had: the calling thread can do everything alone. */
static void pool_start(struct pool *pool, uint32_t num_workers) {
  memset(pool, 0, sizeof *pool);
  pthread_mutex_init(&pool->turn, NULL);
  pthread_mutex_init(&pool->mutex, NULL);
  pthread_cond_init(&pool->work_came.happened, NULL);
  pthread_cond_init(&pool->all_done.happened, NULL);
  while (pool->num_workers < num_workers && pool->num_workers < max_workers &&
         pthread_create(&pool->workers[pool->num_workers], NULL, work, pool) == 0)
    pool->num_workers++;
}

/* ---- A layer that runs on it */

enum { tokens = 200, width = 96, heads = 6, calls = 100 };

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

  struct pool pool;
  pool_start(&pool, 3);
  mha_scheduler scheduler = {.context = &pool, .num_threads = pool.num_workers + 1, .parallel_for = parallel_for};

  mha_forward_args args = {.struct_size = sizeof args, .batch = 1, .n_q = tokens, .query = x, .flags = MHA_CAUSAL, .scheduler = &scheduler};
  size_t bytes;
  check(mha_forward_workspace(layer, &args, &bytes, &error), &error);
  void *workspace = malloc(bytes); /* for a scheduler's threads; it serves fewer, too */
  args.scheduler = NULL;
  args.output = alone;
  check(mha_forward(layer, &args, workspace, bytes, &error), &error);

  args.scheduler = &scheduler;
  args.output = together;
  int equal = 1;
  for (int i = 0; i < calls; i++) {
    memset(together, 0xff, sizeof *together * tokens * width);
    check(mha_forward(layer, &args, workspace, bytes, &error), &error);
    equal = equal && memcmp(alone, together, sizeof *alone * tokens * width) == 0;
  }
  printf("the calling thread alone and %d calls with %u workers: %s\n", calls, (unsigned)pool.num_workers,
         equal ? "the same bits" : "different bits");

  pool_stop(&pool);
  free(workspace);
  mha_layer_destroy(layer);
  free(x), free(w_qkv), free(w_o), free(alone), free(together);
  return equal ? 0 : 1;
}
