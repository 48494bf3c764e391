/* Products in which a row meets weights of its own: the experts it was routed to, or a matrix per head. Rows that meet the
 * same weight are laid side by side first; what a row computes does not depend on its neighbours. */
#include "ops.h"

#include <string.h>

namespace {

const int64_t MOST_BYTES = 128 << 20; /* of workspace for the rows in hand */
const int64_t SMALL_FLOATS = 1 << 15; /* copied no slower alone than by waking a thread */

/* Hands out aligned parts of a workspace; counts only while base is NULL. */
struct parts {
  char *base;
  int64_t used;

  template <class T> T *take(int64_t count) {
    T *part = base ? (T *)(base + used) : NULL;
    used += (count * (int64_t)sizeof(T) + 63) / 64 * 64;
    return part;
  }
  infer_acts acts(int64_t rows, int32_t k) {
    infer_acts made = {(int32_t)rows, k, take<int8_t>(rows * k), NULL, NULL};
    made.scales = take<float>(rows * (k / INFER_BLOCK));
    made.sums = take<int32_t>(rows * (k / 16));
    return made;
  }
};

bool quantized(const infer_weight *w) { return w->elem == ELEM_CODES; }

void copy_acts(const infer_acts *from, int64_t row, const infer_acts *to, int64_t at) {
  int64_t k = from->k, blocks = k / INFER_BLOCK;
  memcpy(to->codes + at * k, from->codes + row * k, (size_t)k);
  memcpy(to->scales + at * blocks, from->scales + row * blocks, (size_t)blocks * sizeof(float));
  memcpy(to->sums + at * 2 * blocks, from->sums + row * 2 * blocks, (size_t)blocks * 2 * sizeof(int32_t));
}

/* Choices [first, first + rows) in hand, as pairs of a row and one of its experts, those of one expert side by side. */
struct expert_plan {
  const op_experts *op;
  const infer_kernels *kernels;
  int32_t first, rows;
  int32_t *place;      /* [rows][used] of each choice among the pairs */
  int32_t *begin;      /* [experts + 1] first pair of each expert */
  infer_group *groups; /* [2 experts] */
  infer_acts acts, inner_acts;
  float *x, *gate, *up, *down;
};

int64_t lay_out(expert_plan *p, char *base) {
  const op_experts *op = p->op;
  int64_t pairs = (int64_t)p->rows * op->used;
  parts from = {base, 0};
  p->place = from.take<int32_t>(pairs);
  p->begin = from.take<int32_t>(op->experts + 1);
  p->groups = from.take<infer_group>(2 * (int64_t)op->experts);
  if (quantized(op->gate) || quantized(op->up)) p->acts = from.acts(pairs, op->gate->k);
  p->x = quantized(op->gate) && quantized(op->up) ? NULL : from.take<float>(pairs * op->gate->k);
  p->gate = from.take<float>(pairs * op->gate->n);
  p->up = from.take<float>(pairs * op->up->n);
  if (quantized(op->down)) p->inner_acts = from.acts(pairs, op->down->k);
  p->down = from.take<float>(pairs * op->down->n);
  return from.used;
}

/* Sorts the choices by expert, rows in order. */
bool sort_choices(expert_plan *p) {
  const op_experts *op = p->op;
  const infer_choice *choices = op->choices + (int64_t)p->first * op->used;
  int32_t pairs = p->rows * op->used;
  memset(p->begin, 0, sizeof(int32_t) * (size_t)(op->experts + 1));
  for (int32_t i = 0; i < pairs; i++) {
    if (choices[i].expert < 0 || choices[i].expert >= op->experts) return false;
    p->begin[choices[i].expert + 1]++;
  }
  for (int32_t e = 0; e < op->experts; e++) p->begin[e + 1] += p->begin[e];
  for (int32_t i = 0; i < pairs; i++) p->place[i] = p->begin[choices[i].expert]++;
  for (int32_t e = op->experts; e > 0; e--) p->begin[e] = p->begin[e - 1];
  p->begin[0] = 0;
  return true;
}

int32_t group_of(const expert_plan *p, infer_group *group, int32_t e, const infer_weight *w, const float *bias, float *out) {
  int32_t rows = p->begin[e + 1] - p->begin[e];
  if (!rows) return 0;
  *group = {w + e, bias ? bias + (int64_t)e * w->n : NULL, out, p->begin[e], rows, 0, 0};
  return 1;
}

void gather_row(void *context, int32_t row, int32_t) {
  const expert_plan *p = (const expert_plan *)context;
  const op_experts *op = p->op;
  int64_t k = op->gate->k;
  for (int32_t i = 0; i < op->used; i++) {
    int64_t at = p->place[(int64_t)row * op->used + i];
    if (p->acts.codes) copy_acts(op->acts, p->first + row, &p->acts, at);
    if (p->x) memcpy(p->x + at * k, op->x + (p->first + row) * k, (size_t)k * sizeof(float));
  }
}

void gate_row(void *context, int32_t row, int32_t) {
  const expert_plan *p = (const expert_plan *)context;
  const op_experts *op = p->op;
  int64_t inner = op->gate->n;
  for (int64_t at = (int64_t)row * op->used; at < (int64_t)(row + 1) * op->used; at++) {
    float *gate = p->gate + at * inner;
    p->kernels->ops->glu(gate, p->up + at * inner, gate, (int32_t)inner, op->act);
    if (p->inner_acts.codes) p->kernels->matmul->quantize_row(gate, &p->inner_acts, at);
  }
}

void sum_row(void *context, int32_t row, int32_t) {
  const expert_plan *p = (const expert_plan *)context;
  const op_experts *op = p->op;
  int64_t width = op->down->n;
  float *out = op->out + (p->first + row) * width;
  memset(out, 0, (size_t)width * sizeof(float));
  for (int32_t i = 0; i < op->used; i++) {
    int64_t at = (int64_t)row * op->used + i;
    float weight = op->choices[(int64_t)p->first * op->used + at].weight;
    p->kernels->ops->add_scaled(weight, p->down + p->place[at] * width, out, (int32_t)width);
  }
}

/* One head of the rows in hand, side by side. */
struct head_plan {
  const op_heads *op;
  const infer_kernels *kernels;
  int32_t first, rows;
  infer_group *groups;
  infer_acts acts;
  float *x, *out;
};

int64_t lay_out(head_plan *p, char *base) {
  const op_heads *op = p->op;
  int64_t pairs = (int64_t)p->rows * op->heads;
  parts from = {base, 0};
  p->groups = from.take<infer_group>(op->heads);
  if (quantized(op->w)) p->acts = from.acts(pairs, op->w->k);
  p->x = quantized(op->w) ? NULL : from.take<float>(pairs * op->w->k);
  p->out = from.take<float>(pairs * op->w->n);
  return from.used;
}

void split_heads(void *context, int32_t row, int32_t) {
  const head_plan *p = (const head_plan *)context;
  const op_heads *op = p->op;
  for (int64_t h = 0; h < op->heads; h++) {
    const float *x = op->x + ((int64_t)(p->first + row) * op->heads + h) * op->width;
    int64_t at = h * p->rows + row, k = op->w->k;
    if (p->x)
      memcpy(p->x + at * k, x, (size_t)k * sizeof(float));
    else
      p->kernels->matmul->quantize_row(x, &p->acts, at);
  }
}

void join_heads(void *context, int32_t row, int32_t) {
  const head_plan *p = (const head_plan *)context;
  const op_heads *op = p->op;
  int64_t k = op->w->k, n = op->w->n, rest = op->width - k;
  for (int64_t h = 0; h < op->heads; h++) {
    int64_t head = (int64_t)(p->first + row) * op->heads + h;
    float *out = op->out + head * (n + rest);
    memcpy(out, p->out + (h * p->rows + row) * n, (size_t)n * sizeof(float));
    memcpy(out + n, op->x + head * op->width + k, (size_t)rest * sizeof(float));
  }
}

/* How many of `rows` rows to take at a time, and the memory for them; 0 when there is none. */
template <class Plan> int32_t fit_rows(Plan *p, int32_t rows, infer_workspace *space) {
  p->rows = 1;
  int64_t each = lay_out(p, NULL), most = MOST_BYTES / each;
  p->rows = rows < most ? rows : most < 1 ? 1 : (int32_t)most;
  return infer_workspace_get(space, lay_out(p, NULL)) ? p->rows : 0;
}

/* The operation in parts of the rows that fit the workspace: each laid out, then `run`. */
template <class Plan>
int32_t in_parts(infer_pool *pool, Plan *p, int32_t rows, infer_workspace *space, bool (*run)(infer_pool *, Plan *)) {
  p->kernels = infer_active();
  if (rows < 1) return 0;
  int32_t step = fit_rows(p, rows, space);
  if (!step) return -1;
  for (p->first = 0; p->first < rows; p->first += step) {
    p->rows = rows - p->first < step ? rows - p->first : step;
    lay_out(p, (char *)space->base);
    if (!run(pool, p)) return -1;
  }
  return 0;
}

/* False when a choice names no expert. */
bool run_experts(infer_pool *pool, expert_plan *p) {
  const op_experts *op = p->op;
  if (!sort_choices(p)) return false;
  int64_t floats = (int64_t)p->rows * op->used * (op->gate->n + op->down->n);
  infer_pool *light = floats > SMALL_FLOATS ? pool : NULL;
  infer_parallel(light, p->rows, gather_row, p);
  int32_t count = 0;
  for (int32_t e = 0; e < op->experts; e++) {
    count += group_of(p, p->groups + count, e, op->gate, op->gate_bias, p->gate);
    count += group_of(p, p->groups + count, e, op->up, op->up_bias, p->up);
  }
  infer_matmul_groups(pool, p->groups, count, &p->acts, p->x);
  infer_parallel(light, p->rows, gate_row, p);
  count = 0;
  for (int32_t e = 0; e < op->experts; e++) count += group_of(p, p->groups + count, e, op->down, op->down_bias, p->down);
  infer_matmul_groups(pool, p->groups, count, &p->inner_acts, p->gate);
  infer_parallel(light, p->rows, sum_row, p);
  return true;
}

bool run_heads(infer_pool *pool, head_plan *p) {
  const op_heads *op = p->op;
  infer_pool *light = (int64_t)p->rows * op->heads * (op->w->n + op->width) > SMALL_FLOATS ? pool : NULL;
  infer_parallel(light, p->rows, split_heads, p);
  for (int32_t h = 0; h < op->heads; h++) p->groups[h] = {op->w + h, NULL, p->out, h * p->rows, p->rows, 0, 0};
  infer_matmul_groups(pool, p->groups, op->heads, &p->acts, p->x);
  infer_parallel(light, p->rows, join_heads, p);
  return true;
}

}  // namespace

int32_t infer_experts(infer_pool *pool, const op_experts *op, int32_t rows, infer_workspace *space) {
  expert_plan p = {};
  p.op = op;
  return in_parts(pool, &p, rows, space, run_experts);
}

int32_t infer_heads(infer_pool *pool, const op_heads *op, int32_t rows, infer_workspace *space) {
  head_plan p = {};
  p.op = op;
  return in_parts(pool, &p, rows, space, run_heads);
}
