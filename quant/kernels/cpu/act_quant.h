/* Quantization of activations, per 32 inputs. */
#ifndef INFER_ACT_QUANT_H
#define INFER_ACT_QUANT_H
#include "infer_cpu.h"
#include "simd.h"

namespace {

/* x: 32 floats, of any alignment; sums: two. */
INFER_INLINE void quantize_block(const float *x, int8_t *codes, float *scale, int32_t *sums) {
  f32x16 a = load(x), b = load(x + 16), size_a = abs_of(a), size_b = abs_of(b), infinity = set1(__builtin_inff());
  float amax = maximum_of(max_of(size_a, size_b));
  bool finite = all_of(less(size_a, infinity)) && all_of(less(size_b, infinity));
  if (!finite || amax < 0x1p-119f) {
    *scale = finite ? 0.0f : __builtin_nanf("");
    memset(codes, 0, 32);
    sums[0] = sums[1] = 0;
    return;
  }
  f32x16 inverse = set1(127.0f / amax);
  a = round_even(mul(a, inverse)), b = round_even(mul(b, inverse));
  store_i8(codes, a), store_i8(codes + 16, b);
  *scale = amax / 127.0f;
  sums[0] = (int32_t)sum_of(a), sums[1] = (int32_t)sum_of(b); /* exact: integers below 2^12 */
}

void quantize_row(const float *x, const infer_acts *acts, int64_t row) {
  int64_t k = acts->k;
  int8_t *codes = acts->codes + row * k;
  float *scales = acts->scales + row * (k / INFER_BLOCK);
  int32_t *sums = acts->sums + row * (k / 16);
  for (int64_t block = 0; block < k / INFER_BLOCK; block++)
    quantize_block(x + 32 * block, codes + 32 * block, scales + block, sums + 2 * block);
}

}  // namespace
#endif
