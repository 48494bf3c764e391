#define INFER_TABLE infer_matmul_scalar
#include "matmul_isa.inc"
