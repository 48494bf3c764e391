#if defined(__x86_64__)
#pragma GCC target("avxvnni,avx2,fma,f16c")
#define INFER_SIMD_AVX2
#define INFER_SIMD_AVXVNNI
#define INFER_TABLE infer_matmul_avxvnni
#include "matmul_isa.inc"
#endif
