/*
 * A pool of threads as mha_scheduler asks for one, to be copied into a program that has none: host_pool.c and decoder.c run on it.
 */
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>

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
