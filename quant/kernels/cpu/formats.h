/* How GGUF types store a block of one row; the layouts are drawn in quant/legacy.py and quant/kquant.py.
 *
 * A format has BLOCK inputs in BYTES bytes, the description of the weight it becomes (BITS, GROUP, ZERO, SCALE, SIGNED,
 * MIN), and `decode`, which gives one block's codes, a byte each, and its scales. grid: the vectors that the codes of a
 * type with GRID are made of, of as many bytes each. */
#ifndef INFER_FORMATS_H
#define INFER_FORMATS_H
#include <string.h>

#include "infer_cpu.h"

namespace {

/* halves, floats: the scale of each group, of SCALE_F16 and SCALE_F32; minimum: of a block that is one group. scales and
 * mins: the integers of SCALE_SUPER, whose super values are halves[0] and minimum. */
struct decoded_block {
  uint8_t codes[256], scales[16], mins[16];
  uint16_t halves[4], minimum;
  float floats[16];
};

inline uint16_t read_half(const uint8_t *from) {
  uint16_t value;
  memcpy(&value, from, 2);
  return value;
}

/* Of nibbles two a byte, the low one first. */
inline int nibble(const uint8_t *from, int index) { return from[index / 2] >> 4 * (index % 2) & 15; }

/* Bits 0 … 7 of a byte as bytes of value 16. */
inline void spread_bits(uint8_t bits, uint8_t *to) {
  uint64_t one_each = (bits * 0x0101010101010101u) & 0x8040201008040201u;
  uint64_t sixteens = ((one_each + 0x7F7F7F7F7F7F7F7Fu) & 0x8080808080808080u) >> 3;
  memcpy(to, &sixteens, 8);
}

/* Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 */
template <int CODE_BITS, bool HAS_MIN> struct Legacy {
  static constexpr int BLOCK = 32, BITS = CODE_BITS, GROUP = 32, SCALE = SCALE_F16, GRID = 0;
  static constexpr int ZERO = HAS_MIN ? 0 : 1 << (CODE_BITS - 1);
  static constexpr bool MIN = HAS_MIN, SIGNED = false;
  static constexpr int HIGH_AT = HAS_MIN ? 4 : 2, CODES_AT = HIGH_AT + (CODE_BITS == 5 ? 4 : 0);
  static constexpr int BYTES = CODES_AT + (CODE_BITS == 8 ? 32 : 16);

  static void decode(const uint8_t *raw, const uint8_t *, decoded_block *out) {
    out->halves[0] = read_half(raw);
    if (MIN) out->minimum = read_half(raw + 2);
    const uint8_t *from = raw + CODES_AT;
    uint8_t codes[32], high[32] = {};
    if (BITS == 8) {
      for (int i = 0; i < 32; i++) codes[i] = from[i] ^ 0x80;
    } else {
      for (int i = 0; i < 16; i++) codes[i] = from[i] & 15, codes[i + 16] = from[i] >> 4;
    }
    if (BITS == 5) {
      for (int i = 0; i < 4; i++) spread_bits(raw[HIGH_AT + i], high + 8 * i);
      for (int i = 0; i < 32; i++) codes[i] |= high[i];
    }
    memcpy(out->codes, codes, 32);
  }
};

/* Q4_K and Q5_K */
template <int CODE_BITS> struct MinK {
  static constexpr int BLOCK = 256, BITS = CODE_BITS, GROUP = 32, SCALE = SCALE_SUPER, ZERO = 0, GRID = 0;
  static constexpr bool MIN = true, SIGNED = false;
  static constexpr int CODES_AT = CODE_BITS == 5 ? 48 : 16, BYTES = CODES_AT + 128;

  static void decode(const uint8_t *raw, const uint8_t *, decoded_block *out) {
    out->halves[0] = read_half(raw);
    out->minimum = read_half(raw + 2);
    const uint8_t *s = raw + 4;
    for (int j = 0; j < 4; j++) {
      out->scales[j] = s[j] & 63;
      out->mins[j] = s[j + 4] & 63;
      out->scales[j + 4] = (s[j + 8] & 15) | (s[j] >> 6) << 4;
      out->mins[j + 4] = s[j + 8] >> 4 | (s[j + 4] >> 6) << 4;
    }
    for (int run = 0; run < 4; run++) {
      const uint8_t *from = raw + CODES_AT + 32 * run;
      uint8_t *low = out->codes + 64 * run, *high = low + 32;
      if (BITS == 4) {
        for (int i = 0; i < 32; i++) low[i] = from[i] & 15, high[i] = from[i] >> 4;
      } else {
        const uint8_t *fifth = raw + 16;
        for (int i = 0; i < 32; i++) {
          low[i] = (from[i] & 15) | (fifth[i] >> 2 * run & 1) << 4;
          high[i] = from[i] >> 4 | (fifth[i] >> (2 * run + 1) & 1) << 4;
        }
      }
    }
  }
};

struct Q6K {
  static constexpr int BLOCK = 256, BITS = 6, GROUP = 16, SCALE = SCALE_SUPER, ZERO = 32, BYTES = 210, GRID = 0;
  static constexpr bool MIN = false, SIGNED = true;

  static void decode(const uint8_t *raw, const uint8_t *, decoded_block *out) {
    out->halves[0] = read_half(raw + 208);
    memcpy(out->scales, raw + 192, 16);
    for (int half = 0; half < 2; half++) {
      const uint8_t *low = raw + 64 * half, *high = raw + 128 + 32 * half;
      uint8_t *codes = out->codes + 128 * half;
      for (int i = 0; i < 32; i++) {
        codes[i] = (low[i] & 15) | (high[i] & 3) << 4;
        codes[32 + i] = (low[32 + i] & 15) | (high[i] >> 2 & 3) << 4;
        codes[64 + i] = low[i] >> 4 | (high[i] >> 4 & 3) << 4;
        codes[96 + i] = low[32 + i] >> 4 | (high[i] >> 6) << 4;
      }
    }
  }
};

/* The low two bits of the codes of Q2_K and Q3_K, from halves of 32 bytes. */
inline void two_bits(const uint8_t *from, uint8_t *codes) {
  for (int half = 0; half < 2; half++)
    for (int t = 0; t < 4; t++)
      for (int i = 0; i < 32; i++) codes[128 * half + 32 * t + i] = from[32 * half + i] >> 2 * t & 3;
}

struct Q2K {
  static constexpr int BLOCK = 256, BITS = 4, GROUP = 16, SCALE = SCALE_SUPER, ZERO = 0, BYTES = 84, GRID = 0;
  static constexpr bool MIN = true, SIGNED = false;

  static void decode(const uint8_t *raw, const uint8_t *, decoded_block *out) {
    out->halves[0] = read_half(raw + 80);
    out->minimum = read_half(raw + 82);
    for (int g = 0; g < 16; g++) out->scales[g] = raw[g] & 15, out->mins[g] = raw[g] >> 4;
    two_bits(raw + 16, out->codes);
  }
};

struct Q3K {
  static constexpr int BLOCK = 256, BITS = 4, GROUP = 16, SCALE = SCALE_SUPER, ZERO = 4, BYTES = 110, GRID = 0;
  static constexpr bool MIN = false, SIGNED = true;

  static void decode(const uint8_t *raw, const uint8_t *, decoded_block *out) {
    out->halves[0] = read_half(raw + 108);
    const uint8_t *s = raw + 96;
    for (int g = 0; g < 16; g++) {
      int low = g < 8 ? s[g] & 15 : s[g - 8] >> 4, high = s[8 + g % 4] >> 2 * (g / 4) & 3;
      out->scales[g] = (uint8_t)((low | high << 4) - 32);
    }
    two_bits(raw + 32, out->codes);
    for (int run = 0; run < 8; run++)
      for (int i = 0; i < 32; i++) out->codes[32 * run + i] |= (raw[i] >> run & 1) << 2;
  }
};

}  // namespace
#endif
