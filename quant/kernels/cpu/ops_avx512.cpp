#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#define INFER_SIMD_AVX512
#define MICRO_ROWS 6
#define MICRO_VECTORS 4
#include "ops.inc"
#include "attention.inc"

extern const infer_op_kernels infer_ops_avx512 = {norm, glu, add_to, add_scaled, route, rope_store, attend, merge, normalize};
#endif
