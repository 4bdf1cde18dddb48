/*
 * The target mha::pthreadpool: a call's tasks on the threads of a pthreadpool
 * (github.com/Maratyszcza/pthreadpool, the pool of XNNPACK).
 *
 *     pthreadpool_t pool = pthreadpool_create(0);  // as many threads as processors
 *     mha_scheduler scheduler;
 *     mha_pthreadpool_scheduler(pool, &scheduler);
 *     mha_forward_args args = { ..., .scheduler = &scheduler };
 *
 * The pool stays the caller's, to be destroyed when no call uses it any more. Without memory,
 * pthreadpool_create returns NULL, and calls run on their own thread. A child of fork has none of
 * the pool's threads and needs a pool of its own.
 */
#ifndef MHA_PTHREADPOOL_H
#define MHA_PTHREADPOOL_H

#include <mha.h>
#include <pthreadpool.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Fills in a scheduler that runs tasks on the threads of a pool, of which the calling thread is
 * one; NULL = the calling thread alone.
 *
 * Where a processor is free for each of the pool's threads, this is the fastest: after a task they
 * stay awake for tens of milliseconds, so that the next one starts at once. Where not, each loop of
 * a call may last until every thread has had its turn, which takes milliseconds.
 *
 * Calls that share a pool take turns. One made from a task of the same pool would wait for itself
 * for ever.
 */
void mha_pthreadpool_scheduler(pthreadpool_t pool, mha_scheduler *scheduler);

/*
 * The same for processors that are shared with other work: the pool's threads sleep between tasks
 * (PTHREADPOOL_FLAG_YIELD_WORKERS), and to wake them for each loop takes microseconds.
 */
void mha_pthreadpool_yielding_scheduler(pthreadpool_t pool, mha_scheduler *scheduler);

#ifdef __cplusplus
}
#endif

#endif /* MHA_PTHREADPOOL_H */
