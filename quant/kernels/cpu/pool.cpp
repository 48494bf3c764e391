#include "pool.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>
#include <new>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* One word says which region runs and which job is next, so that claiming a job is one compare-and-swap: a thread that
 * comes late can neither claim a job of a finished region nor see the next region's function with this one's job.
 *
 *   bits 0 … 23 next job · 24 … 47 jobs · 48 … 63 region counter
 *
 * `run` and `context` are written before the word is published and stay until every claimed job is counted in `done`. */
namespace {

const uint64_t JOB_BITS = 24, JOB_MASK = (1u << JOB_BITS) - 1;
const int64_t SPIN_NS = 50000;    /* a thread that has just worked expects the next region within this */
const size_t STACK_BYTES = 2u << 20;

int forks; /* counted in children */
pthread_once_t fork_handler = PTHREAD_ONCE_INIT;

inline void pause_cpu() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* The default floating-point environment for the time of a region. */
struct FloatEnvironment {
#if defined(__x86_64__)
  unsigned saved = _mm_getcsr();
  FloatEnvironment() { _mm_setcsr(0x1F80); }
  ~FloatEnvironment() { _mm_setcsr(saved); }
#elif defined(__aarch64__)
  uint64_t saved;
  FloatEnvironment() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0));
  }
  ~FloatEnvironment() { __asm__ volatile("msr fpcr, %0" : : "r"(saved)); }
#else
  FloatEnvironment() {}
#endif
};

}  // namespace

struct infer_worker {
  infer_pool *pool;
  pthread_t thread;
  int32_t index;
};

struct infer_pool {
  alignas(64) uint64_t word;
  infer_job run;
  void *context;
  alignas(64) int32_t done;
  alignas(64) int32_t sleepers;
  bool stop;
  pthread_mutex_t region, sleep;
  pthread_cond_t wake;
  int32_t threads, forks;
  infer_worker *workers; /* [threads - 1] */
};

static bool has_job(uint64_t word) { return (word & JOB_MASK) < (word >> JOB_BITS & JOB_MASK); }

/* Runs jobs of the current region until none is left to claim. */
static void work(infer_pool *pool, int32_t worker) {
  uint64_t word = __atomic_load_n(&pool->word, __ATOMIC_ACQUIRE);
  while (has_job(word)) {
    if (!__atomic_compare_exchange_n(&pool->word, &word, word + 1, true, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) continue;
    pool->run(pool->context, (int32_t)(word & JOB_MASK), worker);
    __atomic_fetch_add(&pool->done, 1, __ATOMIC_RELEASE);
    word = __atomic_load_n(&pool->word, __ATOMIC_ACQUIRE);
  }
}

static bool wait_for_work(infer_pool *pool) {
  int64_t until = now_ns() + SPIN_NS;
  do {
    for (int i = 0; i < 64; i++) {
      if (has_job(__atomic_load_n(&pool->word, __ATOMIC_RELAXED))) return true;
      pause_cpu();
    }
  } while (now_ns() < until);
  pthread_mutex_lock(&pool->sleep);
  __atomic_fetch_add(&pool->sleepers, 1, __ATOMIC_SEQ_CST);
  while (!pool->stop && !has_job(__atomic_load_n(&pool->word, __ATOMIC_SEQ_CST)))
    pthread_cond_wait(&pool->wake, &pool->sleep);
  __atomic_fetch_sub(&pool->sleepers, 1, __ATOMIC_SEQ_CST);
  bool stop = pool->stop;
  pthread_mutex_unlock(&pool->sleep);
  return !stop;
}

static void *worker_main(void *argument) {
  infer_worker *self = (infer_worker *)argument;
  FloatEnvironment environment;
  while (wait_for_work(self->pool)) work(self->pool, self->index);
  return NULL;
}

static void count_fork() { forks++; }
static void watch_forks() { pthread_atfork(NULL, NULL, count_fork); }

/* Threads that the system refuses are done without. */
static void start_workers(infer_pool *pool, int32_t threads) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before); /* inherited: signals go to threads that expect them */
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, STACK_BYTES);
  while (pool->threads < threads) {
    infer_worker *worker = &pool->workers[pool->threads - 1];
    worker->pool = pool;
    worker->index = pool->threads;
    if (pthread_create(&worker->thread, &attributes, worker_main, worker)) break;
    pool->threads++;
  }
  pthread_attr_destroy(&attributes);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
}

infer_pool *infer_pool_new(int32_t threads) {
  if (threads < 1) threads = 1;
  if (threads > 1024) threads = 1024;
  pthread_once(&fork_handler, watch_forks);
  void *memory;
  if (posix_memalign(&memory, alignof(infer_pool), sizeof(infer_pool))) return NULL;
  infer_pool *pool = new (memory) infer_pool();
  pool->workers = (infer_worker *)calloc((size_t)threads, sizeof(infer_worker));
  if (!pool->workers) {
    free(pool);
    return NULL;
  }
  pthread_mutex_init(&pool->region, NULL);
  pthread_mutex_init(&pool->sleep, NULL);
  pthread_cond_init(&pool->wake, NULL);
  pool->threads = 1;
  pool->forks = forks;
  start_workers(pool, threads);
  return pool;
}

void infer_pool_free(infer_pool *pool) {
  if (!pool) return;
  if (pool->forks == forks) { /* else the threads live in the parent, and the locks are in whatever state they were */
    pthread_mutex_lock(&pool->sleep);
    pool->stop = true;
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->sleep);
    for (int32_t i = 0; i + 1 < pool->threads; i++) pthread_join(pool->workers[i].thread, NULL);
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->sleep);
    pthread_mutex_destroy(&pool->region);
  }
  free(pool->workers);
  free(pool);
}

int32_t infer_pool_threads(const infer_pool *pool) { return pool && pool->forks == forks ? pool->threads : 1; }

void infer_parallel(infer_pool *pool, int32_t jobs, infer_job run, void *context) {
  FloatEnvironment environment;
  if (jobs <= 1 || infer_pool_threads(pool) == 1) {
    for (int32_t job = 0; job < jobs; job++) run(context, job, 0);
    return;
  }
  pthread_mutex_lock(&pool->region);
  pool->run = run;
  pool->context = context;
  __atomic_store_n(&pool->done, 0, __ATOMIC_RELAXED);
  uint64_t region = (__atomic_load_n(&pool->word, __ATOMIC_RELAXED) >> 2 * JOB_BITS) + 1;
  __atomic_store_n(&pool->word, region << 2 * JOB_BITS | (uint64_t)jobs << JOB_BITS, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&pool->sleepers, __ATOMIC_SEQ_CST)) {
    pthread_mutex_lock(&pool->sleep);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->sleep);
  }
  work(pool, 0);
  for (int spins = 0; __atomic_load_n(&pool->done, __ATOMIC_ACQUIRE) != jobs; spins++) {
    if (spins < 4096) {
      pause_cpu();
    } else {
      timespec nap = {0, 50000}; /* a worker lost its core in the middle of a job: leave it this one */
      nanosleep(&nap, NULL);
    }
  }
  pthread_mutex_unlock(&pool->region);
}
