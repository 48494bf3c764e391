/* One row of a packed weight in float32, with the operations of quant/base.py's `dequantize` in their order: code minus
 * zero or the table's entry, times scale, plus minimum, each rounded. The layout is drawn in infer_cpu.h. */
#include "ops.h"

#include <string.h>

namespace {

float half_value(uint16_t half) {
  uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7FFF, bits;
  if (rest < 0x0400) {
    float magnitude = (float)rest * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  bits = sign | (rest >= 0x7C00 ? 0x7F800000 | (rest & 0x3FF) << 13 : (rest << 13) + (112u << 23));
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

float bfloat_value(uint16_t half) {
  uint32_t bits = (uint32_t)half << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

/* The 32 codes of row `lane` in block `block` of a strip. */
void block_codes(const infer_weight *w, int64_t block, int lane, uint8_t *codes) {
  const uint8_t *low = (const uint8_t *)w->codes + block * (w->bits == 8 ? 512 : 256) + 4 * lane;
  if (w->bits == 8) {
    for (int c = 0; c < 32; c++) codes[c] = low[c / 4 * 64 + c % 4];
    return;
  }
  for (int c = 0; c < 32; c++) codes[c] = low[c / 8 * 64 + c % 4] >> (c & 4) & 15;
  if (w->bits == 5) {
    const uint8_t *high = (const uint8_t *)w->high + block * 64 + 4 * lane;
    for (int c = 0; c < 32; c++) codes[c] |= (high[c % 4] >> c / 4 & 1) << 4;
  } else if (w->bits == 6) {
    const uint8_t *high = (const uint8_t *)w->high + block * 128 + 4 * lane;
    for (int c = 0; c < 32; c++) codes[c] |= (high[c / 16 * 64 + c % 4] >> c % 16 / 4 * 2 & 3) << 4;
  }
}

/* Element `at` of a scale plane. */
float scale_value(const infer_weight *w, const void *plane, int64_t at, bool is_signed) {
  if (w->scale == SCALE_F16) return half_value(((const uint16_t *)plane)[at]);
  if (w->scale == SCALE_F32) return ((const float *)plane)[at];
  return is_signed ? (float)((const int8_t *)plane)[at] : (float)((const uint8_t *)plane)[at];
}

void embed_codes(const infer_weight *w, int32_t row, float factor, float *out) {
  int64_t strip = row / INFER_STRIP, blocks = w->k / INFER_BLOCK, groups = w->k / w->group;
  int lane = row % INFER_STRIP;
  for (int64_t b = 0; b < blocks; b++) {
    uint8_t codes[INFER_BLOCK];
    block_codes(w, strip * blocks + b, lane, codes);
    for (int half = 0; half < INFER_BLOCK; half += 16) { /* no group is smaller */
      int64_t k = b * INFER_BLOCK + half, at = (strip * groups + k / w->group) * INFER_STRIP + lane;
      float scale = scale_value(w, w->scales, at, w->signed_scales);
      float minimum = w->mins ? scale_value(w, w->mins, at, false) : 0.0f;
      if (w->scale == SCALE_SUPER) {
        int64_t super = (strip * (w->k / 256) + k / 256) * INFER_STRIP + lane;
        scale *= half_value(w->super_scales[super]);
        if (w->mins) minimum = -(minimum * half_value(w->super_mins[super]));
      }
      for (int c = 0; c < 16; c++) {
        float value = (w->table ? w->table[codes[half + c]] : (float)codes[half + c] - (float)w->zero) * scale;
        out[k + c] = (w->mins ? value + minimum : value) * factor;
      }
    }
  }
}

}  // namespace

void infer_embed_row(const infer_weight *w, int32_t row, float factor, float *out) {
  if (w->elem == ELEM_CODES || w->elem == ELEM_TABLE) {
    embed_codes(w, row, factor, out);
    return;
  }
  int64_t base = row / INFER_STRIP * (int64_t)w->k * INFER_STRIP + row % INFER_STRIP;
  for (int64_t k = 0; k < w->k; k++) {
    int64_t at = base + k * INFER_STRIP;
    float value = w->elem == ELEM_F32   ? ((const float *)w->codes)[at]
                  : w->elem == ELEM_F16 ? half_value(((const uint16_t *)w->codes)[at])
                                        : bfloat_value(((const uint16_t *)w->codes)[at]);
    out[k] = value * factor;
  }
}
