#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#define INFER_SIMD_AVX2
#define MICRO_ROWS 6
#define MICRO_VECTORS 1
#include "ops.inc"
#include "attention.inc"

extern const infer_op_kernels infer_ops_avx2 = {norm, glu, add_to, add_scaled, route, rope_store, attend, merge, normalize};
#endif
