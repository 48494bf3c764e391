/* Formats whose codes pick from a few values, as formats.h has them; the layouts are drawn in quant/table4.py and
 * quant/ternary.py. */
#ifndef INFER_FORMATS_TABLE_H
#define INFER_FORMATS_TABLE_H
#include "formats.h"

namespace {

/* The values of quant/table4.py plus ZERO. */
const uint8_t IQ4_CODES[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
const uint8_t FP4_CODES[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};

/* 2 COUNT codes of two nibbles a byte, the low nibbles first. */
template <int COUNT> inline void look_up(const uint8_t *from, const uint8_t *table, uint8_t *codes) {
  for (int i = 0; i < COUNT; i++) codes[i] = table[from[i] & 15], codes[i + COUNT] = table[from[i] >> 4];
}

struct IQ4NL {
  static constexpr int BLOCK = 32, BITS = 8, GROUP = 32, SCALE = SCALE_F16, ZERO = 128, BYTES = 18, GRID = 0;
  static constexpr bool MIN = false, SIGNED = false;

  static void decode(const uint8_t *raw, const uint8_t *, decoded_block *out) {
    out->halves[0] = read_half(raw);
    look_up<16>(raw + 2, IQ4_CODES, out->codes);
  }
};

struct IQ4XS {
  static constexpr int BLOCK = 256, BITS = 8, GROUP = 32, SCALE = SCALE_SUPER, ZERO = 128, BYTES = 136, GRID = 0;
  static constexpr bool MIN = false, SIGNED = true;

  static void decode(const uint8_t *raw, const uint8_t *, decoded_block *out) {
    out->halves[0] = read_half(raw);
    int high = read_half(raw + 2);
    for (int g = 0; g < 8; g++) {
      out->scales[g] = (uint8_t)((nibble(raw + 4, g) | (high >> 2 * g & 3) << 4) - 32);
      look_up<16>(raw + 8 + 16 * g, IQ4_CODES, out->codes + 32 * g);
    }
  }
};

struct MXFP4 {
  static constexpr int BLOCK = 32, BITS = 5, GROUP = 32, SCALE = SCALE_F32, ZERO = 16, BYTES = 17, GRID = 0;
  static constexpr bool MIN = false, SIGNED = false;

  static void decode(const uint8_t *raw, const uint8_t *, decoded_block *out) {
    uint32_t exponent = raw[0], bits = exponent < 2 ? 1u << (21 + exponent) : (exponent - 1) << 23;
    memcpy(out->floats, &bits, 4);
    look_up<16>(raw + 1, FP4_CODES, out->codes);
  }
};

struct NVFP4 {
  static constexpr int BLOCK = 64, BITS = 5, GROUP = 16, SCALE = SCALE_F16, ZERO = 16, BYTES = 36, GRID = 0;
  static constexpr bool MIN = false, SIGNED = false;

  /* Half of the unsigned E4M3 number as f16: its exponent has bias 7, that of f16 15. */
  static uint16_t half_of(uint8_t stored) {
    int exponent = stored >> 3 & 15, mantissa = stored & 7, top = 2;
    if (stored == 0x7F || !(exponent | mantissa)) return 0;
    if (exponent) return (uint16_t)((exponent + 7) << 10 | mantissa << 7);
    while (!(mantissa >> top)) top--; /* mantissa * 2^-10 */
    return (uint16_t)((top + 5) << 10 | (mantissa << (10 - top) & 0x3FF));
  }

  static void decode(const uint8_t *raw, const uint8_t *, decoded_block *out) {
    for (int g = 0; g < 4; g++) {
      out->halves[g] = half_of(raw[g]);
      look_up<8>(raw + 4 + 8 * g, FP4_CODES, out->codes + 16 * g);
    }
  }
};

/* What is -d, 0 or d is code 7, 8 or 9 of groups of 128. */
struct TQ10 {
  static constexpr int BLOCK = 256, BITS = 4, GROUP = 128, SCALE = SCALE_F16, ZERO = 8, BYTES = 54, GRID = 0;
  static constexpr bool MIN = false, SIGNED = false;

  static void decode(const uint8_t *raw, const uint8_t *, decoded_block *out) {
    const int runs[3][3] = {{0, 32, 5}, {32, 16, 5}, {48, 4, 4}}; /* first byte, bytes, digits */
    uint8_t *codes = out->codes;
    for (const int *run : runs)
      for (int digit = 0, power = 1; digit < run[2]; digit++, power *= 3, codes += run[1])
        for (int i = 0; i < run[1]; i++) codes[i] = (uint8_t)(7 + ((uint8_t)(raw[run[0] + i] * power) * 3 >> 8));
    out->halves[0] = out->halves[1] = read_half(raw + 52);
  }
};

struct TQ20 {
  static constexpr int BLOCK = 256, BITS = 4, GROUP = 128, SCALE = SCALE_F16, ZERO = 8, BYTES = 66, GRID = 0;
  static constexpr bool MIN = false, SIGNED = false;

  static void decode(const uint8_t *raw, const uint8_t *, decoded_block *out) {
    two_bits(raw, out->codes);
    for (int i = 0; i < 256; i++) out->codes[i] += 7;
    out->halves[0] = out->halves[1] = read_half(raw + 64);
  }
};

struct Q10 {
  static constexpr int BLOCK = 128, BITS = 4, GROUP = 128, SCALE = SCALE_F16, ZERO = 8, BYTES = 18, GRID = 0;
  static constexpr bool MIN = false, SIGNED = false;

  static void decode(const uint8_t *raw, const uint8_t *, decoded_block *out) {
    out->halves[0] = read_half(raw);
    for (int i = 0; i < 128; i++) out->codes[i] = (uint8_t)(7 + 2 * (raw[2 + i / 8] >> i % 8 & 1));
  }
};

}  // namespace
#endif
