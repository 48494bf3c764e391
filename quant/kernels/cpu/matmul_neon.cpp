#if defined(__aarch64__)
#pragma GCC target("arch=armv8.2-a+dotprod")
#define INFER_SIMD_NEON
#define INFER_TABLE infer_matmul_neon
#include "matmul_isa.inc"
#endif
