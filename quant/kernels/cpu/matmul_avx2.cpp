#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#define INFER_SIMD_AVX2
#define INFER_TABLE infer_matmul_avx2
#include "matmul_isa.inc"
#endif
