/* What each instruction set provides, as tables of functions: one binary holds all of them and picks one at run time.
 *
 * A table is filled in a file of its own, compiled for its instruction set by a `#pragma GCC target` at its top. Such
 * a file defines nothing with external linkage but its table: shared code is included into it inside an unnamed
 * namespace, so that no function compiled for one processor can be linked into another's path. */
#ifndef INFER_KERNELS_H
#define INFER_KERNELS_H
#include "infer_cpu.h"
#include "pool.h"

/* A part of one weight's product: rows [row0, row0 + rows) times strips [strip0, strip0 + strips). */
typedef struct {
  const infer_weight *w;
  const infer_acts *acts; /* for codes */
  const float *x;         /* for float weights, [rows][k] */
  const float *bias;      /* or NULL */
  float *out;
  float softcap;
  int32_t accumulate, row0, rows, strip0, strips;
} infer_tile;

typedef struct {
  /* x[0 … acts->k - 1] into row `row` of acts. */
  void (*quantize_row)(const float *x, const infer_acts *acts, int64_t row);
  void (*codes)(const infer_tile *);
  void (*floats)(const infer_tile *);
} infer_matmul_kernels;

extern const infer_matmul_kernels infer_matmul_scalar, infer_matmul_avx2, infer_matmul_avxvnni, infer_matmul_avx512vnni,
    infer_matmul_amx, infer_matmul_neon;

/* The other operations; the struct is declared in ops.h, the tables are filled in ops_*.cpp. */
typedef struct infer_op_kernels infer_op_kernels;
extern const infer_op_kernels infer_ops_scalar, infer_ops_avx2, infer_ops_avx512, infer_ops_neon;

typedef struct {
  const char *isa;
  const infer_matmul_kernels *matmul;
  const infer_op_kernels *ops;
} infer_kernels;

/* The kernels in use: the best this processor offers, or those infer_set_isa chose. */
const infer_kernels *infer_active(void);

/* out[i] = acts or x times w[i]^T for all weights of the op, `rows` rows. */
void infer_matmul(infer_pool *pool, const op_matmul *op, int32_t rows);

/* The product of one weight with rows [row0, row0 + rows) of inputs that several weights share. */
typedef struct {
  const infer_weight *w;
  const float *bias; /* or NULL */
  float *out;        /* of all rows */
  int32_t row0, rows;
  int32_t first_job, strips_per_job; /* filled in */
} infer_group;

/* The products of `count` groups in one parallel region; codes read acts, float weights x. */
void infer_matmul_groups(infer_pool *pool, infer_group *groups, int32_t count, const infer_acts *acts, const float *x);

#endif
