/* The operations between matrix products, one instruction set's versions of them, and how they are planned. */
#ifndef INFER_OPS_H
#define INFER_OPS_H
#include "kernels.h"

enum {
  ATTENTION_CHUNK = 256, /* positions of one partial softmax; partials are merged in ascending order */
  ATTENTION_ROWS = 96,   /* most rows of one tile: enough to hide the widening of K and V */
  ATTENTION_LANES = 16   /* value_dim and rows are rounded up to a multiple of this in partials */
};

/* Unnormalized softmax of a row over some positions: o = sum of e^(score - m) v, l = sum of e^(score - m).
 * m is -infinity where no position was seen. Rows and value_dim rounded up to ATTENTION_LANES. */
typedef struct {
  float *o; /* [rows][value_dim] */
  float *m, *l; /* [rows] */
} attention_partial;

/* Rows of one sequence that share a K and V head. Row i is query i / group of the sequence and head i % group of the
 * group; the tile is the rows [row0, row0 + rows). */
typedef struct {
  const op_attention *op;
  const int32_t *table;     /* blocks of the sequence */
  const int32_t *positions; /* of the sequence's queries */
  int64_t token0;           /* row of the batch that the sequence begins at */
  int32_t context, kv_head, group, row0, rows;
  int32_t first, last;      /* positions that some row of the tile attends to */
} attention_tile;

struct infer_op_kernels {
  void (*norm)(const float *x, const float *weight, float *out, int32_t width, float eps);
  void (*glu)(const float *gate, const float *up, float *out, int32_t width, int32_t act);
  void (*add)(const float *x, float *y, int32_t width);
  /* y = fma(factor, x, y) */
  void (*add_scaled)(float factor, const float *x, float *y, int32_t width);
  /* The choices of one row; scratch of infer_route_scratch floats. */
  void (*route)(const op_route *op, int64_t row, float *scratch);
  /* The rows [token0, token1) of the batch; scratch of infer_rope_scratch floats. */
  void (*rope_store)(const op_rope_store *op, const infer_batch *batch, int32_t token0, int32_t token1, float *scratch);
  /* The partial of one chunk of ATTENTION_CHUNK positions; scratch of infer_attention_scratch floats. */
  void (*attend)(const attention_tile *tile, int32_t chunk, attention_partial out, float *scratch);
  /* into = into merged with part, for `rows` rows; parts of higher positions come later. */
  void (*merge)(attention_partial into, attention_partial part, int32_t rows, int32_t value_dim);
  /* out[0 … value_dim - 1] = o / l of one row, with sink (or NULL) o / (l + e^(sink - m)). */
  void (*normalize)(const float *o, float m, float l, const float *sink, float *out, int32_t value_dim);
};

/* Floats of scratch that one job needs. */
int64_t infer_rope_scratch(const op_rope_store *op);
int64_t infer_route_scratch(const op_route *op);
int64_t infer_attention_scratch(const infer_kv *kv);

/* Scratch of one infer_run, grown on demand and 64-byte aligned; NULL when out of memory. */
typedef struct {
  void *base;
  int64_t bytes;
} infer_workspace;
void *infer_workspace_get(infer_workspace *space, int64_t bytes);

/* The whole operation; 0, or -1 when out of memory. `space` is free for it to use. */
int32_t infer_attention(infer_pool *pool, const op_attention *op, const infer_batch *batch, infer_workspace *space);

/* The whole operation over `rows` rows; 0, or -1 when out of memory or when a choice names no expert. */
int32_t infer_experts(infer_pool *pool, const op_experts *op, int32_t rows, infer_workspace *space);
int32_t infer_heads(infer_pool *pool, const op_heads *op, int32_t rows, infer_workspace *space);

/* out[0 … k - 1] = row `row` of the table, times scale. */
void infer_embed_row(const infer_weight *table, int32_t row, float scale, float *out);

#endif
