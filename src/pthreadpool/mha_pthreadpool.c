#include "mha_pthreadpool.h"

struct loop {
  void (*task)(void *task_context, uint32_t index);
  void *task_context;
};

static void run_task(void *context, size_t index) {
  const struct loop *loop = context;
  loop->task(loop->task_context, (uint32_t)index);
}

/* Never with PTHREADPOOL_FLAG_DISABLE_DENORMALS, which would change bits of the results. */

static void parallel_for(void *context, uint32_t count,
                         void (*task)(void *task_context, uint32_t index), void *task_context) {
  struct loop loop = {task, task_context};
  pthreadpool_parallelize_1d(context, run_task, &loop, count, 0);
}

static void yielding_parallel_for(void *context, uint32_t count,
                                  void (*task)(void *task_context, uint32_t index),
                                  void *task_context) {
  struct loop loop = {task, task_context};
  pthreadpool_parallelize_1d(context, run_task, &loop, count, PTHREADPOOL_FLAG_YIELD_WORKERS);
}

void mha_pthreadpool_scheduler(pthreadpool_t pool, mha_scheduler *scheduler) {
  scheduler->context = pool;
  scheduler->num_threads = (uint32_t)pthreadpool_get_threads_count(pool);
  scheduler->reserved = 0;
  scheduler->parallel_for = parallel_for;
}

void mha_pthreadpool_yielding_scheduler(pthreadpool_t pool, mha_scheduler *scheduler) {
  mha_pthreadpool_scheduler(pool, scheduler);
  scheduler->parallel_for = yielding_parallel_for;
}
