/* Runs a program: checks every operation first, then executes them in order, each one parallel region at most. */
#include "ops.h"

#include <stdlib.h>
#include <string.h>

namespace {

const int64_t SMALL_FLOATS = 1 << 15; /* elementwise work that takes no longer than waking a thread */
const int64_t JOB_FLOATS = 1 << 14;

/* ---- checks ---- */

int32_t size_of(int32_t kind) {
  switch (kind) {
    case OP_EMBED: return sizeof(op_embed);
    case OP_NORM: return sizeof(op_norm);
    case OP_QUANTIZE: return sizeof(op_quantize);
    case OP_MATMUL: return sizeof(op_matmul);
    case OP_ROPE_STORE: return sizeof(op_rope_store);
    case OP_ATTENTION: return sizeof(op_attention);
    case OP_GLU: return sizeof(op_glu);
    case OP_ADD: return sizeof(op_add);
    case OP_GATHER: return sizeof(op_gather);
    case OP_ROUTE: return sizeof(op_route);
    case OP_EXPERTS: return sizeof(op_experts);
    case OP_HEADS: return sizeof(op_heads);
    default: return -1;
  }
}

int32_t rows_of(const op_head *head, const infer_batch *batch) {
  return head->rows == 1 ? batch->outputs : batch->tokens;
}

bool fits(const infer_acts *acts, int32_t rows, int64_t width) {
  return !acts || (rows <= acts->capacity && acts->k == width && width % INFER_BLOCK == 0);
}

bool kv_valid(const infer_kv *kv, int32_t heads) {
  return kv && kv->kv_heads > 0 && kv->head_dim > 0 && kv->head_dim % 2 == 0 && heads > 0 &&
         heads % kv->kv_heads == 0 && kv->value_dim > 0 && (kv->v || kv->value_dim <= kv->head_dim) && kv->type >= KV_F16 && kv->type <= KV_INT8 &&
         (kv->type != KV_INT8 || (kv->k_scale && (kv->v_scale || !kv->v)));
}

bool within(const int32_t *values, int32_t count, int32_t limit) {
  for (int32_t i = 0; i < count; i++)
    if (values[i] < 0 || values[i] >= limit) return false;
  return true;
}

bool tables_valid(const infer_batch *batch, int32_t blocks) {
  if (batch->sequences < 1 || batch->query_start[0] != 0 || batch->query_start[batch->sequences] != batch->tokens)
    return false;
  for (int32_t s = 0; s < batch->sequences; s++) {
    if (batch->query_start[s + 1] < batch->query_start[s]) return false;
    int32_t used = (batch->context_len[s] + INFER_KV_BLOCK - 1) / INFER_KV_BLOCK;
    if (batch->context_len[s] <= 0 || used > batch->max_blocks) return false;
    if (!within(batch->block_tables + (int64_t)s * batch->max_blocks, used, blocks)) return false;
  }
  return true;
}

bool slots_valid(const infer_batch *batch, int32_t blocks) {
  for (int32_t t = 0; t < batch->tokens; t++)
    if (batch->slots[t] < 0 || batch->slots[t] >= (int64_t)blocks * INFER_KV_BLOCK) return false;
  return true;
}

bool weights_valid(const op_matmul *op, int32_t rows) {
  if (op->count < 1 || op->count > 4) return false;
  for (int32_t i = 0; i < op->count; i++) {
    const infer_weight *w = op->w[i];
    if (!w || !op->out[i]) return false;
    if (w->elem == ELEM_CODES ? !op->acts || !fits(op->acts, rows, w->k) : !op->x) return false;
  }
  return true;
}

bool inputs_fit(const infer_weight *w, const infer_acts *acts, const float *x, int32_t rows) {
  return w && w->n > 0 && w->k > 0 && (w->elem == ELEM_CODES ? acts && fits(acts, rows, w->k) : x != NULL);
}

bool route_valid(const op_route *op) {
  if (op->experts < 1 || op->groups < 1 || op->experts % op->groups) return false;
  if (op->groups_used < 1 || op->groups_used > op->groups) return false;
  return op->used >= 1 && op->used <= op->experts / op->groups * op->groups_used && op->gate >= GATE_SOFTMAX &&
         op->gate <= GATE_CHOSEN_SOFTMAX;
}

bool experts_valid(const op_experts *op, int32_t rows) {
  if (op->experts < 1 || op->used < 1 || op->used > op->experts || op->act < ACT_SILU || op->act > ACT_SWIGLU_OAI) return false;
  return inputs_fit(op->gate, op->acts, op->x, rows) && inputs_fit(op->up, op->acts, op->x, rows) && op->down &&
         op->up->k == op->gate->k && op->up->n == op->gate->n && op->down->k == op->gate->n && op->down->n > 0 &&
         (op->down->elem != ELEM_CODES || op->down->k % INFER_BLOCK == 0);
}

/* Whether an operation, whose size is right, can run on this batch without leaving the buffers it describes. */
bool valid(const op_head *head, const infer_batch *batch) {
  int32_t rows = rows_of(head, batch);
  if (head->rows < 0 || head->rows > 1) return false;
  switch (head->kind) {
    case OP_EMBED: {
      const op_embed *op = (const op_embed *)head;
      return head->rows == 0 && op->table && within(batch->ids, batch->tokens, op->table->n);
    }
    case OP_NORM: {
      const op_norm *op = (const op_norm *)head;
      return op->width > 0 && fits(op->acts, rows, op->width);
    }
    case OP_QUANTIZE: {
      const op_quantize *op = (const op_quantize *)head;
      return op->acts && fits(op->acts, rows, op->width);
    }
    case OP_MATMUL: return weights_valid((const op_matmul *)head, rows);
    case OP_ROPE_STORE: {
      const op_rope_store *op = (const op_rope_store *)head;
      return head->rows == 0 && kv_valid(op->kv, op->heads) && op->rope_dim >= 0 && op->rope_dim % 2 == 0 &&
             op->rope_at >= 0 && op->rope_dim <= op->kv->head_dim - op->rope_at && op->norm_dim >= 0 &&
             op->norm_dim <= op->kv->head_dim && (op->v || !op->kv->v) && within(batch->positions, batch->tokens, INT32_MAX) &&
             slots_valid(batch, op->kv->blocks);
    }
    case OP_ATTENTION: {
      const op_attention *op = (const op_attention *)head;
      return head->rows == 0 && kv_valid(op->kv, op->heads) && tables_valid(batch, op->kv->blocks) &&
             fits(op->acts, rows, (int64_t)op->heads * op->kv->value_dim);
    }
    case OP_GLU: {
      const op_glu *op = (const op_glu *)head;
      return op->width > 0 && fits(op->acts, rows, op->width) && op->act >= ACT_SILU && op->act <= ACT_SWIGLU_OAI;
    }
    case OP_GATHER: return within(batch->output_rows, batch->outputs, batch->tokens);
    case OP_ROUTE: return route_valid((const op_route *)head);
    case OP_EXPERTS: return experts_valid((const op_experts *)head, rows);
    case OP_HEADS: {
      const op_heads *op = (const op_heads *)head;
      return op->heads > 0 && op->w && op->w->n > 0 && op->w->k > 0 && op->width >= op->w->k &&
             (op->w->elem != ELEM_CODES || op->w->k % INFER_BLOCK == 0);
    }
    default: return true;
  }
}

/* ---- row operations ---- */

struct row_job {
  const op_head *head;
  const infer_batch *batch;
  const infer_kernels *kernels;
  int32_t rows, grain;
  float *scratch; /* per worker */
  int64_t scratch_floats;
};

/* The output row of an operation whose f32 result may be wanted only as activations. */
float *target(float *out, int64_t row, int32_t width, float *scratch) { return out ? out + row * width : scratch; }

void run_row(const row_job *job, int64_t row, float *scratch) {
  const infer_kernels *kernels = job->kernels;
  const infer_acts *acts = NULL;
  const float *result = NULL;
  switch (job->head->kind) {
    case OP_EMBED: {
      const op_embed *op = (const op_embed *)job->head;
      infer_embed_row(op->table, job->batch->ids[row], op->scale, op->out + row * op->table->k);
      break;
    }
    case OP_NORM: {
      const op_norm *op = (const op_norm *)job->head;
      float *out = target(op->out, row, op->width, scratch);
      kernels->ops->norm(op->x + row * op->width, op->weight, out, op->width, op->eps);
      acts = op->acts, result = out;
      break;
    }
    case OP_GLU: {
      const op_glu *op = (const op_glu *)job->head;
      float *out = target(op->out, row, op->width, scratch);
      kernels->ops->glu(op->gate + row * op->width, op->up + row * op->width, out, op->width, op->act);
      acts = op->acts, result = out;
      break;
    }
    case OP_QUANTIZE: {
      const op_quantize *op = (const op_quantize *)job->head;
      acts = op->acts, result = op->x + row * op->width;
      break;
    }
    case OP_ROUTE: kernels->ops->route((const op_route *)job->head, row, scratch); break;
    case OP_ADD: {
      const op_add *op = (const op_add *)job->head;
      kernels->ops->add(op->x + row * op->width, op->y + row * op->width, op->width);
      break;
    }
    default: {
      const op_gather *op = (const op_gather *)job->head;
      memcpy(op->out + row * op->width, op->x + (int64_t)job->batch->output_rows[row] * op->width,
             (size_t)op->width * sizeof(float));
    }
  }
  if (acts) kernels->matmul->quantize_row(result, acts, row);
}

void run_rows(void *context, int32_t index, int32_t worker) {
  const row_job *job = (const row_job *)context;
  int32_t row0 = index * job->grain, row1 = row0 + job->grain < job->rows ? row0 + job->grain : job->rows;
  float *scratch = job->scratch + worker * job->scratch_floats;
  if (job->head->kind == OP_ROPE_STORE) {
    job->kernels->ops->rope_store((const op_rope_store *)job->head, job->batch, row0, row1, scratch);
    return;
  }
  for (int32_t row = row0; row < row1; row++) run_row(job, row, scratch);
}

/* Floats that one row reads, and those it needs as scratch. */
void row_cost(const op_head *head, int64_t *width, int64_t *scratch) {
  *scratch = 0;
  switch (head->kind) {
    case OP_EMBED: *width = ((const op_embed *)head)->table->k; return;
    case OP_NORM: *width = *scratch = ((const op_norm *)head)->width; return;
    case OP_GLU: *width = *scratch = ((const op_glu *)head)->width; return;
    case OP_QUANTIZE: *width = ((const op_quantize *)head)->width; return;
    case OP_ADD: *width = ((const op_add *)head)->width; return;
    case OP_ROUTE: {
      const op_route *op = (const op_route *)head;
      *width = (int64_t)op->experts * op->used, *scratch = infer_route_scratch(op);
      return;
    }
    case OP_GATHER: *width = ((const op_gather *)head)->width; return;
    default: {
      const op_rope_store *op = (const op_rope_store *)head;
      *width = (int64_t)(op->heads + 2 * op->kv->kv_heads) * op->kv->head_dim;
      *scratch = infer_rope_scratch(op);
    }
  }
}

int32_t run_row_op(infer_pool *pool, const op_head *head, const infer_batch *batch, infer_workspace *space) {
  row_job job = {head, batch, infer_active(), rows_of(head, batch), 1, NULL, 0};
  if (head->kind == OP_GATHER) job.rows = batch->outputs;
  int64_t width;
  row_cost(head, &width, &job.scratch_floats);
  job.scratch_floats = (job.scratch_floats + 15) / 16 * 16;
  if (job.rows * width <= SMALL_FLOATS) pool = NULL;
  if (job.scratch_floats) {
    int64_t bytes = infer_pool_threads(pool) * job.scratch_floats * (int64_t)sizeof(float);
    job.scratch = (float *)infer_workspace_get(space, bytes);
    if (!job.scratch) return -1;
  }
  if (width < JOB_FLOATS) job.grain = (int32_t)(JOB_FLOATS / (width > 0 ? width : 1));
  infer_parallel(pool, (int32_t)(((int64_t)job.rows + job.grain - 1) / job.grain), run_rows, &job);
  return 0;
}

}  // namespace

int64_t infer_rope_scratch(const op_rope_store *op) { return 2 * (int64_t)op->rope_dim + op->kv->head_dim; }

int64_t infer_route_scratch(const op_route *op) { return 3 * (((int64_t)op->experts + 15) / 16 * 16) + 2 * (int64_t)op->groups; }

void *infer_workspace_get(infer_workspace *space, int64_t bytes) {
  if (bytes > space->bytes) {
    free(space->base);
    space->bytes = 0;
    space->base = NULL;
    if (posix_memalign(&space->base, 64, (size_t)bytes)) return space->base = NULL;
    space->bytes = bytes;
  }
  return space->base;
}

int32_t infer_run(infer_pool *pool, const void *program, int64_t bytes, const infer_batch *batch) {
  int32_t index = 1;
  for (int64_t at = 0; at < bytes; index++) {
    const op_head *head = (const op_head *)((const char *)program + at);
    if (bytes - at < (int64_t)sizeof(op_head) || head->bytes != size_of(head->kind) || head->bytes > bytes - at ||
        !valid(head, batch))
      return -index;
    at += head->bytes;
  }
  infer_workspace space = {NULL, 0};
  int32_t failed = 0;
  index = 1;
  for (int64_t at = 0; at < bytes && !failed; index++) {
    const op_head *head = (const op_head *)((const char *)program + at);
    switch (head->kind) {
      case OP_MATMUL: infer_matmul(pool, (const op_matmul *)head, rows_of(head, batch)); break;
      case OP_EXPERTS: failed = infer_experts(pool, (const op_experts *)head, rows_of(head, batch), &space); break;
      case OP_HEADS: failed = infer_heads(pool, (const op_heads *)head, rows_of(head, batch), &space); break;
      case OP_ATTENTION: failed = infer_attention(pool, (const op_attention *)head, batch, &space); break;
      default: failed = run_row_op(pool, head, batch, &space);
    }
    if (failed) failed = -index;
    at += head->bytes;
  }
  free(space.base);
  return failed;
}
