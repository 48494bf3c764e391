/* Quantization of activations, per 32 inputs; plain loops that every compiler turns into vectors. */
#ifndef INFER_ACT_QUANT_H
#define INFER_ACT_QUANT_H
#include "infer_cpu.h"
#include "simd.h"

namespace {

const uint32_t ACT_INFINITY = 0x7F800000;
const uint32_t ACT_SMALLEST = (127 - 119) << 23; /* 2^-119 */

/* x: 32 floats, of any alignment; sums: two. */
INFER_INLINE void quantize_block(const float *x, int8_t *codes, float *scale, int32_t *sums) {
  uint32_t bits[32], largest = 0;
  memcpy(bits, x, sizeof bits);
  for (int i = 0; i < 32; i++) { /* magnitudes compare as integers, NaN above infinity */
    int32_t magnitude = (int32_t)(bits[i] & 0x7FFFFFFF);
    largest = (int32_t)largest > magnitude ? largest : (uint32_t)magnitude;
  }
  if (largest >= ACT_INFINITY || largest < ACT_SMALLEST) {
    *scale = largest >= ACT_INFINITY ? __builtin_nanf("") : 0.0f;
    memset(codes, 0, 32);
    sums[0] = sums[1] = 0;
    return;
  }
  float amax, values[32];
  memcpy(&amax, &largest, 4);
  memcpy(values, x, sizeof values);
  *scale = amax / 127.0f;
  float inverse = 127.0f / amax;
  int32_t rounded[32], total[2] = {0, 0};
  for (int i = 0; i < 32; i++) {
    float shifted = values[i] * inverse + MAGIC; /* its low bits are the product rounded to nearest even */
    memcpy(&rounded[i], &shifted, 4);
    rounded[i] -= 0x4B400000;
  }
  for (int i = 0; i < 32; i++) codes[i] = (int8_t)rounded[i];
  for (int i = 0; i < 16; i++) total[0] += rounded[i], total[1] += rounded[i + 16];
  sums[0] = total[0], sums[1] = total[1];
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
