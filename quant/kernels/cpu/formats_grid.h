/* IQ1, IQ2 and IQ3, as formats.h has them: codes are vectors of a grid with signs; the layouts are drawn in
 * quant/iquant.py. Every factor of a scale is exact in float32. */
#ifndef INFER_FORMATS_GRID_H
#define INFER_FORMATS_GRID_H
#include "formats.h"

namespace {

inline uint32_t read_word(const uint8_t *from) {
  uint32_t value;
  memcpy(&value, from, 4);
  return value;
}

inline float value_of_half(uint16_t half) {
  uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7FFF;
  uint32_t bits = rest >= 0x7C00 ? rest << 13 | 0x7F800000 : (rest << 13) + (112u << 23);
  float value;
  if (rest < 0x400) {
    value = (float)rest * 0x1p-24f;
    memcpy(&bits, &value, 4);
  }
  bits |= sign;
  memcpy(&value, &bits, 4);
  return value;
}

/* d * (2 s + 1) * unit */
inline float step_scale(float d, int s, float unit) { return d * (float)(2 * s + 1) * unit; }

/* Eight codes: zero plus the bytes of `values`, or less them where a bit of `signs` is set. */
inline void put_signed(const uint8_t *values, int signs, int zero, uint8_t *codes) {
  for (int j = 0; j < 8; j++) {
    int negative = -(signs >> j & 1);
    codes[j] = (uint8_t)(zero + ((values[j] ^ negative) - negative));
  }
}

/* The eighth sign makes the number of negatives even. */
inline int eight_signs(int seven) {
  int parity = seven ^ seven >> 4;
  parity ^= parity >> 2;
  parity ^= parity >> 1;
  return seven | (parity & 1) << 7;
}

/* Two vectors of four. */
inline void join(const uint8_t *grid, int first, int second, uint8_t *eight) {
  memcpy(eight, grid + 4 * first, 4);
  memcpy(eight + 4, grid + 4 * second, 4);
}

struct IQ2XXS {
  static constexpr int BLOCK = 256, BITS = 8, GROUP = 32, SCALE = SCALE_F32, ZERO = 128, BYTES = 66, GRID = 8;
  static constexpr bool MIN = false, SIGNED = false;

  static void decode(const uint8_t *raw, const uint8_t *grid, decoded_block *out) {
    float d = value_of_half(read_half(raw));
    for (int g = 0; g < 8; g++) {
      const uint8_t *index = raw + 2 + 8 * g;
      uint32_t word = read_word(index + 4);
      out->floats[g] = step_scale(d, (int)(word >> 28), 0.125f);
      for (int v = 0; v < 4; v++)
        put_signed(grid + 8 * index[v], eight_signs(word >> 7 * v & 127), ZERO, out->codes + 32 * g + 8 * v);
    }
  }
};

struct IQ2XS {
  static constexpr int BLOCK = 256, BITS = 8, GROUP = 16, SCALE = SCALE_F32, ZERO = 128, BYTES = 74, GRID = 8;
  static constexpr bool MIN = false, SIGNED = false;

  static void decode(const uint8_t *raw, const uint8_t *grid, decoded_block *out) {
    float d = value_of_half(read_half(raw));
    for (int v = 0; v < 32; v++) {
      int half = read_half(raw + 2 + 2 * v);
      put_signed(grid + 8 * (half & 511), eight_signs(half >> 9), ZERO, out->codes + 8 * v);
    }
    for (int g = 0; g < 16; g++) out->floats[g] = step_scale(d, nibble(raw + 66, g), 0.125f);
  }
};

struct IQ2S {
  static constexpr int BLOCK = 256, BITS = 8, GROUP = 16, SCALE = SCALE_F32, ZERO = 128, BYTES = 82, GRID = 8;
  static constexpr bool MIN = false, SIGNED = false;

  static void decode(const uint8_t *raw, const uint8_t *grid, decoded_block *out) {
    float d = value_of_half(read_half(raw));
    for (int v = 0; v < 32; v++) {
      int index = raw[2 + v] | (raw[66 + v / 4] >> 2 * (v % 4) & 3) << 8;
      put_signed(grid + 8 * index, raw[34 + v], ZERO, out->codes + 8 * v);
    }
    for (int g = 0; g < 16; g++) out->floats[g] = step_scale(d, nibble(raw + 74, g), 0.125f);
  }
};

struct IQ3XXS {
  static constexpr int BLOCK = 256, BITS = 6, GROUP = 32, SCALE = SCALE_F32, ZERO = 32, BYTES = 98, GRID = 4;
  static constexpr bool MIN = false, SIGNED = false;

  static void decode(const uint8_t *raw, const uint8_t *grid, decoded_block *out) {
    float d = value_of_half(read_half(raw));
    for (int g = 0; g < 8; g++) {
      const uint8_t *index = raw + 2 + 8 * g;
      uint32_t word = read_word(raw + 66 + 4 * g);
      out->floats[g] = step_scale(d, (int)(word >> 28), 0.5f);
      for (int v = 0; v < 4; v++) {
        uint8_t eight[8];
        join(grid, index[2 * v], index[2 * v + 1], eight);
        put_signed(eight, eight_signs(word >> 7 * v & 127), ZERO, out->codes + 32 * g + 8 * v);
      }
    }
  }
};

struct IQ3S {
  static constexpr int BLOCK = 256, BITS = 5, GROUP = 32, SCALE = SCALE_SUPER, ZERO = 16, BYTES = 110, GRID = 4;
  static constexpr bool MIN = false, SIGNED = false;

  static void decode(const uint8_t *raw, const uint8_t *grid, decoded_block *out) {
    out->halves[0] = read_half(raw);
    for (int v = 0; v < 32; v++) {
      const uint8_t *index = raw + 2 + 2 * v;
      int high = raw[66 + v / 4] >> 2 * (v % 4);
      uint8_t eight[8];
      join(grid, index[0] | (high & 1) << 8, index[1] | (high >> 1 & 1) << 8, eight);
      put_signed(eight, raw[74 + v], ZERO, out->codes + 8 * v);
    }
    for (int g = 0; g < 8; g++) out->scales[g] = (uint8_t)(2 * nibble(raw + 106, g) + 1);
  }
};

/* The vector plus or minus an eighth, in eighths. */
inline void put_eighth(const uint8_t *values, bool negative, uint8_t *codes) {
  for (int j = 0; j < 8; j++) codes[j] = (uint8_t)(values[j] + (negative ? -1 : 1));
}

struct IQ1S {
  static constexpr int BLOCK = 256, BITS = 5, GROUP = 32, SCALE = SCALE_F32, ZERO = 16, BYTES = 50, GRID = 8;
  static constexpr bool MIN = false, SIGNED = false;

  static void decode(const uint8_t *raw, const uint8_t *grid, decoded_block *out) {
    float d = value_of_half(read_half(raw));
    for (int g = 0; g < 8; g++) {
      int half = read_half(raw + 34 + 2 * g);
      out->floats[g] = step_scale(d, half >> 12 & 7, 0.125f);
      for (int v = 0; v < 4; v++) {
        int index = raw[2 + 4 * g + v] | (half >> 3 * v & 7) << 8;
        put_eighth(grid + 8 * index, half >> 15, out->codes + 32 * g + 8 * v);
      }
    }
  }
};

struct IQ1M {
  static constexpr int BLOCK = 256, BITS = 5, GROUP = 16, SCALE = SCALE_F32, ZERO = 16, BYTES = 56, GRID = 8;
  static constexpr bool MIN = false, SIGNED = false;

  static void decode(const uint8_t *raw, const uint8_t *grid, decoded_block *out) {
    int quarters = 0;
    for (int w = 0; w < 4; w++) quarters |= (read_half(raw + 48 + 2 * w) >> 12) << 4 * w;
    float d = value_of_half((uint16_t)quarters);
    for (int g = 0; g < 16; g++)
      out->floats[g] = step_scale(d, read_half(raw + 48 + 2 * (g / 4)) >> 3 * (g % 4) & 7, 0.125f);
    for (int v = 0; v < 32; v++) {
      int high = nibble(raw + 32, v);
      put_eighth(grid + 8 * (raw[v] | (high & 7) << 8), high > 7, out->codes + 8 * v);
    }
  }
};

}  // namespace
#endif
