/* The thread pool: parallel regions of independent jobs, claimed one by one by whoever is free, the caller included.
 *
 * A region never waits for a thread that has not started a job, so a core that is busy elsewhere costs only the job it
 * holds. Regions of one pool are serialized; a job must not start another region. Every job runs with the default
 * floating-point environment (round to nearest, subnormals kept), whatever the calling thread has set. In a child
 * process after fork the threads do not exist: regions then run on the caller alone. */
#ifndef INFER_POOL_H
#define INFER_POOL_H
#include "infer_cpu.h"

/* One job of a region: job in [0, jobs), worker in [0, infer_pool_threads(pool)), unique among running jobs. */
typedef void (*infer_job)(void *context, int32_t job, int32_t worker);

/* Runs jobs 0 … jobs - 1 (at most 2^24 - 1) and returns when all are done. pool may be NULL: the caller runs alone. */
void infer_parallel(infer_pool *pool, int32_t jobs, infer_job run, void *context);

int32_t infer_pool_threads(const infer_pool *pool); /* the caller included; 1 for NULL */

#endif
