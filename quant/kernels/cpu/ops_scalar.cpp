#define MICRO_ROWS 1
#define MICRO_VECTORS 1
#include "ops.inc"
#include "attention.inc"

extern const infer_op_kernels infer_ops_scalar = {norm, glu, add_to, add_scaled, route, rope_store, attend, merge, normalize};
