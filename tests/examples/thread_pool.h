/*
 * A pool of threads as mha_scheduler asks for one, to be copied into a program that has none:
 * host_pool.c and decoder.c run on it.
 */
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>

enum {
  max_workers = 63,
  looks_between_yields = 64,
  looks_before_sleep = 10000 /* a fraction of a millisecond */
};

struct pool {
  pthread_mutex_t
      turn; /* held by the thread whose loop is under way: callers that share the pool take turns */
  void (*task)(void *task_context, uint32_t index);
  void *task_context;
  uint32_t not_taken, not_done; /* tasks of the loop under way; atomic, as are the next two */
  uint32_t sleepers, stopping;
  pthread_mutex_t mutex; /* of threads that go to sleep */
  pthread_cond_t work_came;
  uint32_t num_workers;
  pthread_t workers[max_workers];
};

/* A call's loops follow each other faster than a sleeping thread wakes. So a thread that waits
 * looks again and again, and now and then leaves the processor to whoever needs it. */
static void wait_a_moment(int looks) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
  if (looks % looks_between_yields == 0) sched_yield();
}

/* Runs tasks until all are taken. `task` is read behind the taking: it changes only when all tasks
 * are done. */
static void run_tasks(struct pool *pool) {
  uint32_t left = __atomic_load_n(&pool->not_taken, __ATOMIC_SEQ_CST);
  while (left > 0) {
    if (!__atomic_compare_exchange_n(&pool->not_taken, &left, left - 1, 0, __ATOMIC_SEQ_CST,
                                     __ATOMIC_SEQ_CST))
      continue;
    pool->task(pool->task_context, left - 1);
    __atomic_sub_fetch(&pool->not_done, 1, __ATOMIC_SEQ_CST);
    left = __atomic_load_n(&pool->not_taken, __ATOMIC_SEQ_CST);
  }
}

static int has_news(const struct pool *pool) {
  return __atomic_load_n(&pool->not_taken, __ATOMIC_SEQ_CST) > 0 ||
         __atomic_load_n(&pool->stopping, __ATOMIC_SEQ_CST);
}

static void *work(void *argument) {
  struct pool *pool = argument;
  while (!__atomic_load_n(&pool->stopping, __ATOMIC_SEQ_CST)) {
    run_tasks(pool);
    for (int looks = 1; looks < looks_before_sleep && !has_news(pool); looks++)
      wait_a_moment(looks);
    if (has_news(pool)) continue;
    pthread_mutex_lock(&pool->mutex);
    __atomic_add_fetch(&pool->sleepers, 1, __ATOMIC_SEQ_CST);
    while (!has_news(pool)) pthread_cond_wait(&pool->work_came, &pool->mutex);
    __atomic_sub_fetch(&pool->sleepers, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&pool->mutex);
  }
  return NULL;
}

/* A thread counts itself among the sleepers before it looks a last time, so that one of both sees
 * the other. */
static void wake(struct pool *pool) {
  if (__atomic_load_n(&pool->sleepers, __ATOMIC_SEQ_CST) == 0) return;
  pthread_mutex_lock(&pool->mutex);
  pthread_cond_broadcast(&pool->work_came);
  pthread_mutex_unlock(&pool->mutex);
}

/* What mha_scheduler asks for. It waits for tasks, not for workers: one that comes late finds
 * nothing left and delays nobody. */
static void parallel_for(void *context, uint32_t count,
                         void (*task)(void *task_context, uint32_t index), void *task_context) {
  struct pool *pool = context;
  pthread_mutex_lock(&pool->turn);
  pool->task = task;
  pool->task_context = task_context;
  __atomic_store_n(&pool->not_done, count, __ATOMIC_SEQ_CST);
  __atomic_store_n(&pool->not_taken, count, __ATOMIC_SEQ_CST);
  wake(pool);
  run_tasks(pool);
  for (int looks = 1; __atomic_load_n(&pool->not_done, __ATOMIC_SEQ_CST) > 0; looks++)
    wait_a_moment(looks % looks_before_sleep);
  pthread_mutex_unlock(&pool->turn);
}

static void pool_stop(struct pool *pool) {
  __atomic_store_n(&pool->stopping, 1, __ATOMIC_SEQ_CST);
  wake(pool);
  for (uint32_t i = 0; i < pool->num_workers; i++) pthread_join(pool->workers[i], NULL);
  pthread_cond_destroy(&pool->work_came);
  pthread_mutex_destroy(&pool->mutex);
  pthread_mutex_destroy(&pool->turn);
}

/* With fewer workers than asked for, if no more are to be had: the calling thread can do everything
 * alone. */
static void pool_start(struct pool *pool, uint32_t num_workers) {
  memset(pool, 0, sizeof *pool);
  pthread_mutex_init(&pool->turn, NULL);
  pthread_mutex_init(&pool->mutex, NULL);
  pthread_cond_init(&pool->work_came, NULL);
  while (pool->num_workers < num_workers && pool->num_workers < max_workers &&
         pthread_create(&pool->workers[pool->num_workers], NULL, work, pool) == 0)
    pool->num_workers++;
}
