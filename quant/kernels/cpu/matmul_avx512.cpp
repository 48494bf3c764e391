#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")
#define INFER_SIMD_AVX512
#define INFER_TABLE infer_matmul_avx512vnni
#include "matmul_isa.inc"
#endif
