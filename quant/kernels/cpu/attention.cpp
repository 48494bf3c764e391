/* How attention is divided into jobs. A tile holds up to ATTENTION_ROWS rows that share a K and V head of one sequence.
 * With more tiles than threads keep busy, a job runs through all chunks of its tile; with few tiles and long contexts
 * a job is one chunk, and partials are merged afterwards. Both compute the same partials and merge them in the same
 * order, so the bits do not depend on the choice. */
#include "ops.h"

#include <string.h>

namespace {

const int64_t SMALL_WORK = 1 << 18;         /* multiply-adds that take no longer than waking a thread */
const int64_t MAX_PARTIAL_BYTES = 64 << 20; /* of chunks kept for merging */

struct plan {
  const op_attention *op;
  const infer_batch *batch;
  const infer_kernels *kernels;
  attention_tile *tiles;
  int32_t tile_count;
  int32_t *first_part; /* [tiles + 1], index of each tile's first partial */
  char *scratch;       /* per worker */
  int64_t scratch_bytes;
  float *parts;
  int32_t part_rows; /* of the largest tile */
  float *out;
};

int64_t round_line(int64_t bytes) { return (bytes + 63) / 64 * 64; }
int64_t round_lanes(int64_t count) { return (count + ATTENTION_LANES - 1) / ATTENTION_LANES * ATTENTION_LANES; }
int64_t partial_floats(const infer_kv *kv, int32_t rows) { return rows * (round_lanes(kv->value_dim) + 2); }
int32_t first_chunk(const attention_tile *tile) { return tile->first / ATTENTION_CHUNK; }
int32_t chunk_count(const attention_tile *tile) { return tile->last / ATTENTION_CHUNK - first_chunk(tile) + 1; }

attention_partial partial_at(float *base, const infer_kv *kv, int32_t rows) {
  float *m = base + rows * round_lanes(kv->value_dim);
  return {base, m, m + rows};
}

attention_partial part_of(const plan *p, int32_t part) {
  return partial_at(p->parts + part * partial_floats(p->op->kv, p->part_rows), p->op->kv, p->part_rows);
}

void write_rows(const plan *p, const attention_tile *tile, attention_partial sum) {
  const infer_kv *kv = p->op->kv;
  for (int r = 0; r < tile->rows; r++) {
    int row = tile->row0 + r;
    int64_t token = tile->token0 + row / tile->group, head = (int64_t)tile->kv_head * tile->group + row % tile->group;
    float *out = p->out + (token * p->op->heads + head) * kv->value_dim;
    const float *sink = p->op->sinks ? p->op->sinks + head : NULL;
    p->kernels->ops->normalize(sum.o + r * round_lanes(kv->value_dim), sum.m[r], sum.l[r], sink, out, kv->value_dim);
  }
}

void run_tile(void *context, int32_t job, int32_t worker) {
  const plan *p = (const plan *)context;
  const infer_kv *kv = p->op->kv;
  const attention_tile *tile = p->tiles + job;
  float *scratch = (float *)(p->scratch + worker * p->scratch_bytes);
  attention_partial sum = partial_at(scratch, kv, ATTENTION_ROWS);
  attention_partial next = partial_at(scratch + partial_floats(kv, ATTENTION_ROWS), kv, ATTENTION_ROWS);
  float *rest = scratch + 2 * partial_floats(kv, ATTENTION_ROWS);
  int32_t chunk = first_chunk(tile), chunks = chunk_count(tile);
  p->kernels->ops->attend(tile, chunk, sum, rest);
  for (int32_t i = 1; i < chunks; i++) {
    p->kernels->ops->attend(tile, chunk + i, next, rest);
    p->kernels->ops->merge(sum, next, tile->rows, kv->value_dim);
  }
  write_rows(p, tile, sum);
}

void run_chunk(void *context, int32_t job, int32_t worker) {
  const plan *p = (const plan *)context;
  int32_t tile = 0;
  while (p->first_part[tile + 1] <= job) tile++;
  int32_t chunk = first_chunk(p->tiles + tile) + job - p->first_part[tile];
  p->kernels->ops->attend(p->tiles + tile, chunk, part_of(p, job), (float *)(p->scratch + worker * p->scratch_bytes));
}

void merge_tile(void *context, int32_t job, int32_t) {
  const plan *p = (const plan *)context;
  const attention_tile *tile = p->tiles + job;
  attention_partial sum = part_of(p, p->first_part[job]);
  for (int32_t part = p->first_part[job] + 1; part < p->first_part[job + 1]; part++)
    p->kernels->ops->merge(sum, part_of(p, part), tile->rows, p->op->kv->value_dim);
  write_rows(p, tile, sum);
}

void quantize_token(void *context, int32_t job, int32_t) {
  const plan *p = (const plan *)context;
  p->kernels->matmul->quantize_row(p->out + (int64_t)job * p->op->heads * p->op->kv->value_dim, p->op->acts, job);
}

/* Tiles of a sequence's queries for one kv head. */
int32_t tiles_of(const infer_batch *batch, int32_t sequence, int32_t group) {
  int64_t rows = (int64_t)(batch->query_start[sequence + 1] - batch->query_start[sequence]) * group;
  return (int32_t)((rows + ATTENTION_ROWS - 1) / ATTENTION_ROWS);
}

/* Fills the tiles, those with most positions first within a sequence; returns the multiply-adds of all. */
int64_t fill_tiles(plan *p) {
  const infer_batch *batch = p->batch;
  const infer_kv *kv = p->op->kv;
  int32_t group = p->op->heads / kv->kv_heads, window = p->op->window;
  int64_t work = 0;
  attention_tile *tile = p->tiles;
  for (int32_t s = 0; s < batch->sequences; s++) {
    int32_t token0 = batch->query_start[s], context = batch->context_len[s], count = tiles_of(batch, s, group);
    int64_t rows = (int64_t)(batch->query_start[s + 1] - token0) * group;
    const int32_t *positions = batch->positions + token0;
    for (int32_t i = count - 1; i >= 0; i--) {
      int32_t row0 = (int32_t)(rows * i / count), row1 = (int32_t)(rows * (i + 1) / count);
      int32_t first = INT32_MAX, last = 0;
      for (int32_t q = row0 / group; q <= (row1 - 1) / group; q++) {
        int32_t end = positions[q] < context ? positions[q] : context - 1;
        int32_t begin = window > 0 && positions[q] >= window ? positions[q] - window + 1 : 0;
        if (begin < first) first = begin;
        if (end > last) last = end;
      }
      if (first > last) first = last;
      for (int32_t head = 0; head < kv->kv_heads; head++) {
        *tile++ = {p->op, batch->block_tables + (int64_t)s * batch->max_blocks, positions, token0, context, head, group,
                   row0, row1 - row0, first, last};
        work += (int64_t)(row1 - row0) * (last - first + 1) * (kv->head_dim + kv->value_dim);
      }
    }
  }
  return work;
}

}  // namespace

int64_t infer_attention_scratch(const infer_kv *kv) {
  int64_t dim = round_lanes(kv->head_dim), value_dim = round_lanes(kv->value_dim);
  int64_t tile = ATTENTION_ROWS * (INFER_KV_BLOCK + dim) + INFER_KV_BLOCK * (dim + value_dim);
  return round_line((tile + 2 * partial_floats(kv, ATTENTION_ROWS)) * sizeof(float)) / sizeof(float);
}

int32_t infer_attention(infer_pool *pool, const op_attention *op, const infer_batch *batch, infer_workspace *space) {
  if (batch->tokens == 0) return 0;
  const infer_kv *kv = op->kv;
  plan p = {};
  p.op = op, p.batch = batch, p.kernels = infer_active();
  int32_t threads = infer_pool_threads(pool), group = op->heads / kv->kv_heads;
  for (int32_t s = 0; s < batch->sequences; s++) p.tile_count += tiles_of(batch, s, group) * kv->kv_heads;

  p.scratch_bytes = infer_attention_scratch(kv) * sizeof(float);
  int64_t tiles = round_line(p.tile_count * (int64_t)sizeof(attention_tile));
  int64_t first_parts = round_line((p.tile_count + 1) * (int64_t)sizeof(int32_t));
  int64_t out = op->out ? 0 : round_line((int64_t)batch->tokens * op->heads * kv->value_dim * (int64_t)sizeof(float));
  int64_t fixed = threads * p.scratch_bytes + tiles + first_parts + out;
  char *base = (char *)infer_workspace_get(space, fixed);
  if (!base) return -1;
  p.tiles = (attention_tile *)(base + threads * p.scratch_bytes);
  int64_t work = fill_tiles(&p);

  int64_t parts = 0;
  bool many_chunks = false;
  for (int32_t i = 0; i < p.tile_count; i++) {
    parts += chunk_count(p.tiles + i);
    many_chunks |= chunk_count(p.tiles + i) > 1;
    if (p.tiles[i].rows > p.part_rows) p.part_rows = (int32_t)round_lanes(p.tiles[i].rows);
  }
  int64_t part_bytes = partial_floats(kv, p.part_rows) * (int64_t)sizeof(float);
  bool small = work < SMALL_WORK;
  bool split = !small && many_chunks && threads > 1 && p.tile_count < 4 * threads;
  if (parts * part_bytes > MAX_PARTIAL_BYTES) split = false;
  if (split) { /* moves the base, so the tiles are made anew */
    base = (char *)infer_workspace_get(space, fixed + parts * part_bytes);
    if (!base) return -1;
  }
  p.scratch = base;
  p.tiles = (attention_tile *)(base + threads * p.scratch_bytes);
  p.first_part = (int32_t *)((char *)p.tiles + tiles);
  p.out = op->out ? op->out : (float *)((char *)p.first_part + first_parts);
  p.parts = (float *)((char *)p.first_part + first_parts + out);

  if (small) pool = NULL;
  if (split) {
    fill_tiles(&p);
    p.first_part[0] = 0;
    for (int32_t i = 0; i < p.tile_count; i++) p.first_part[i + 1] = p.first_part[i] + chunk_count(p.tiles + i);
    infer_parallel(pool, (int32_t)parts, run_chunk, &p);
    infer_parallel(batch->tokens > 1 ? pool : NULL, p.tile_count, merge_tile, &p);
  } else {
    infer_parallel(pool, p.tile_count, run_tile, &p);
  }
  if (op->acts) infer_parallel(batch->tokens > 16 ? pool : NULL, batch->tokens, quantize_token, &p);
  return 0;
}
