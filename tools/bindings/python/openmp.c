/*
 * mha's tasks on the threads of an OpenMP runtime that the process has already, such as PyTorch's:
 * a mha_scheduler's parallel_for. The functions of the runtime are the context, so that this links
 * to none; mha/_openmp.py finds them.
 */
#include <stdint.h>

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

/* By the names that GCC's libgomp has them under; LLVM's runtime has them too. */
typedef struct Runtime {
  void (*GOMP_parallel)(void (*run)(void *), void *data, unsigned num_threads, unsigned flags);
  int (*omp_get_thread_num)(void);
  int (*omp_get_num_threads)(void);
} Runtime;

typedef struct Call {
  const Runtime *runtime;
  uint32_t count;
  void (*task)(void *context, uint32_t index);
  void *context;
} Call;

/* Inside of another parallel region there may be fewer threads than asked for: each takes as many.
 */
static void run(void *data) {
  const Call *call = data;
  uint32_t first = (uint32_t)call->runtime->omp_get_thread_num(),
           step = (uint32_t)call->runtime->omp_get_num_threads();
  for (uint32_t index = first; index < call->count; index += step) call->task(call->context, index);
}

EXPORT void mha_openmp_parallel_for(void *context, uint32_t count, void (*task)(void *, uint32_t),
                                    void *task_context) {
  Call call = {context, count, task, task_context};
  call.runtime->GOMP_parallel(run, &call, count, 0);
}
