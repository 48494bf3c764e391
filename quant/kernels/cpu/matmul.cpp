/* How matrix products are divided into jobs. The division changes nothing in the results. */
#include "kernels.h"

namespace {

const int64_t JOB_BYTES = 48 << 10; /* of weights, with few rows: a few microseconds of reading */
const int32_t JOB_ROWS = 128, JOB_STRIPS = 16, FEW_ROWS = 8;
const int64_t MOST_JOBS = 1 << 24; /* what a pool can count */

struct matmul_plan {
  const infer_group *groups;
  int32_t count, share_shift; /* few rows: a job takes 1 / 2^share_shift of what is left, half a thread's part or less */
  const infer_matmul_kernels *kernels;
  const infer_acts *acts;
  const float *x;
  float softcap;
  int32_t accumulate;
};

int32_t strips_of(const infer_weight *w) { return (w->n + INFER_STRIP - 1) / INFER_STRIP; }

int64_t strip_bytes(const infer_weight *w) {
  int64_t bits = w->elem == ELEM_CODES || w->elem == ELEM_TABLE ? w->bits : w->elem == ELEM_F32 ? 32 : 16;
  return (int64_t)w->k * INFER_STRIP * bits / 8;
}

int32_t divide_up(int64_t a, int64_t b) { return (int32_t)((a + b - 1) / b); }

int32_t row_jobs(int32_t rows) { return divide_up(rows, JOB_ROWS); }

struct strip_range { int32_t job, first, count; };

/* The strips of job `job` of a row range of a group, or of the last job if there are fewer. Many rows: all take as many.
 * Few rows: reading is all there is, and what a thread reads in one run comes 10 to 15 % faster (2 cores), so that jobs
 * begin long, a share of what is left, and end short. */
strip_range strips_of_job(const matmul_plan *plan, const infer_group *group, int32_t job) {
  const int32_t all = strips_of(group->w), least = group->strips_per_job;
  strip_range range = {0, 0, 0};
  if (group->rows > FEW_ROWS) {
    int32_t last = divide_up(all, least) - 1;
    range.job = job < last ? job : last;
    range.first = range.job * least;
  }
  for (;; range.job++) {
    int32_t left = all - range.first, share = group->rows > FEW_ROWS ? 0 : left >> plan->share_shift;
    range.count = share > least ? share : least < left ? least : left;
    if (range.job == job || range.count == left) return range;
    range.first += range.count;
  }
}

int32_t jobs_of_range(const matmul_plan *plan, const infer_group *group) {
  return strips_of_job(plan, group, INT32_MAX).job + 1;
}

/* A group's jobs are its strips, range by range of its rows. */
void run_job(void *context, int32_t job, int32_t) {
  const matmul_plan *plan = (const matmul_plan *)context;
  int32_t low = 0, high = plan->count;
  while (high - low > 1) {
    int32_t middle = low + (high - low) / 2;
    (plan->groups[middle].first_job <= job ? low : high) = middle;
  }
  const infer_group *group = plan->groups + low;
  int32_t within = job - group->first_job, range = 0;
  if (group->rows > JOB_ROWS) {
    int32_t per_range = jobs_of_range(plan, group);
    range = within / per_range, within %= per_range;
  }
  strip_range strips = strips_of_job(plan, group, within);
  int32_t row0 = range * JOB_ROWS, rows = group->rows - row0;
  infer_tile tile = {};
  tile.w = group->w;
  tile.acts = plan->acts;
  tile.x = plan->x;
  tile.bias = group->bias;
  tile.out = group->out;
  tile.softcap = plan->softcap;
  tile.accumulate = plan->accumulate;
  tile.row0 = group->row0 + row0;
  tile.rows = rows < JOB_ROWS ? rows : JOB_ROWS;
  tile.strip0 = strips.first;
  tile.strips = strips.count;
  (tile.w->elem == ELEM_CODES ? plan->kernels->codes : plan->kernels->floats)(&tile);
}

/* Strips that one job takes when there are few rows: a few microseconds of reading. */
int64_t enough_strips(int32_t rows, int64_t bytes_per_strip) {
  int64_t enough = rows > FEW_ROWS ? JOB_STRIPS : JOB_BYTES / (bytes_per_strip + 1) + 1;
  return enough < JOB_STRIPS ? enough : JOB_STRIPS;
}

void run_plan(infer_pool *pool, matmul_plan *plan, infer_group *groups) {
  int64_t tiles = 0, jobs = MOST_JOBS;
  plan->groups = groups;
  int32_t threads = infer_pool_threads(pool);
  for (plan->share_shift = 1; 1 << plan->share_shift < 2 * threads;) plan->share_shift++;
  plan->kernels = infer_active()->matmul;
  for (int32_t i = 0; i < plan->count; i++) tiles += (int64_t)strips_of(groups[i].w) * row_jobs(groups[i].rows);
  /* at least four jobs a thread, so that a slow core holds nobody up for long, as far as strips and bytes allow */
  int64_t most = tiles / (4 * threads);
  for (int64_t factor = 1; jobs >= MOST_JOBS; factor *= 2) {
    jobs = 0;
    for (int32_t i = 0; i < plan->count; i++) {
      int64_t strips = enough_strips(groups[i].rows, strip_bytes(groups[i].w));
      strips = factor * (most < 1 ? 1 : most < strips ? most : strips);
      groups[i].strips_per_job = (int32_t)strips;
      groups[i].first_job = (int32_t)jobs;
      jobs += (int64_t)jobs_of_range(plan, groups + i) * row_jobs(groups[i].rows);
    }
  }
  infer_parallel(pool, (int32_t)jobs, run_job, plan);
}

}  // namespace

void infer_matmul_groups(infer_pool *pool, infer_group *groups, int32_t count, const infer_acts *acts, const float *x) {
  matmul_plan plan = {};
  plan.count = count, plan.acts = acts, plan.x = x;
  run_plan(pool, &plan, groups);
}

void infer_matmul(infer_pool *pool, const op_matmul *op, int32_t rows) {
  infer_group groups[4];
  for (int32_t i = 0; i < op->count; i++) groups[i] = {op->w[i], op->bias[i], op->out[i], 0, rows, 0, 0};
  matmul_plan plan = {};
  plan.count = op->count, plan.acts = op->acts, plan.x = op->x, plan.softcap = op->softcap, plan.accumulate = op->accumulate;
  run_plan(pool, &plan, groups);
}
