/*
 * The target mha::pthreadpool: runs a call's tasks on the threads of a pthreadpool
 * (github.com/Maratyszcza/pthreadpool, the pool of XNNPACK).
 *
 *     pthreadpool_t pool = pthreadpool_create(0);  // as many threads as processors
 *     mha_scheduler scheduler;
 *     mha_pthreadpool_scheduler(pool, &scheduler);
 *     mha_forward_args args = { ..., .scheduler = &scheduler };
 *
 * The caller owns the pool and destroys it when no call uses it any more. If pthreadpool_create
 * fails, it returns NULL, and calls run on the calling thread. A child process of fork does not
 * inherit the pool's threads and must create another pool.
 */
#ifndef MHA_PTHREADPOOL_H
#define MHA_PTHREADPOOL_H

#include <mha.h>
#include <pthreadpool.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Fills in a scheduler that runs tasks on the threads of a pool, including the calling thread;
 * NULL = the calling thread alone.
 *
 * This scheduler is the fastest if each of the pool's threads has a processor to itself: threads
 * stay awake for tens of milliseconds after a task, so the next one starts at once. On a busy
 * machine, a parallel loop may take milliseconds, because it waits until every thread has run.
 *
 * Concurrent calls that share a pool run one after the other. A call made from a task of the same
 * pool deadlocks.
 */
void mha_pthreadpool_scheduler(pthreadpool_t pool, mha_scheduler *scheduler);

/*
 * The same for a machine that runs other work, too: threads sleep between tasks
 * (PTHREADPOOL_FLAG_YIELD_WORKERS), and waking them takes microseconds per loop.
 */
void mha_pthreadpool_yielding_scheduler(pthreadpool_t pool, mha_scheduler *scheduler);

#ifdef __cplusplus
}
#endif

#endif /* MHA_PTHREADPOOL_H */
