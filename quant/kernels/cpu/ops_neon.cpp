#if defined(__aarch64__)
#define INFER_SIMD_NEON
#define MICRO_ROWS 6
#define MICRO_VECTORS 1
#include "ops.inc"
#include "attention.inc"

extern const infer_op_kernels infer_ops_neon = {norm, glu, add_to, add_scaled, route, rope_store, attend, merge, normalize};
#endif
