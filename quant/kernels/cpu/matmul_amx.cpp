/* Products of many rows on AMX tiles: 16 rows times 16 outputs of a block at once, as exact int32 sums that are then
 * folded into floats in the same order as everywhere. Few rows go to the AVX-512 kernels, and so do groups of 16, whose
 * half-empty tiles gain nothing. */
#if defined(__x86_64__)
#pragma GCC target("amx-tile,amx-int8,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")
#define INFER_SIMD_AVX512
#include "simd_math.h"

#include "act_quant.h"
#include "matmul_codes.inc"

namespace {

const int MIN_ROWS = 12; /* below, too much of a tile would be padding */

/* Tiles 0 and 1 are sums; 2 and 4 rows of x, 3 and 5 weights, of a block each. */
struct alignas(64) tile_config {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
const tile_config CONFIG = {1, 0, {}, {64, 64, 32, 64, 32, 64}, {16, 16, 16, 8, 16, 8}};

void configure() { __asm__ volatile("ldtilecfg %0" : : "m"(CONFIG)); }

template <bool MIN> struct AmxTiles {
  static constexpr bool ZEROS = false, MINIMUMS = MIN;
  static int subtract(const infer_weight *w) { return w->zero; }
  static int32_t zero(const infer_weight *) { return 0; } /* taken from the codes */

  /* The sums of block b, int32 [16 rows][16 outputs]; the intrinsics want tile numbers as literals. */
  INFER_INLINE void product(const tile_inputs &x, const uint8_t *panel, int b, int32_t *sums) {
    const int8_t *from = x.codes + b * TILE_ROWS * 32;
    if (b & 1) {
      _tile_loadd(2, from, 32);
      _tile_loadd(3, panel + 512 * b, 64);
      _tile_zero(0);
      _tile_dpbssd(0, 2, 3);
      _tile_stored(0, sums, 64);
    } else {
      _tile_loadd(4, from, 32);
      _tile_loadd(5, panel + 512 * b, 64);
      _tile_zero(1);
      _tile_dpbssd(1, 4, 5);
      _tile_stored(1, sums, 64);
    }
  }

  /* Rows beyond `rows` hold whatever was there before; their sums are never read. */
  static void tile(float *sums, const uint8_t *panel, const strip_scales &scales, const tile_inputs &x, int, int blocks) {
    alignas(64) int32_t products[2][16][16];
    f32x16 acc[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) acc[r] = load(sums + 16 * r);
    product(x, panel, 0, products[0][0]);
#pragma GCC unroll 2
    for (int b = 0; b < blocks; b++) {
      if (b + 1 < blocks) product(x, panel, b + 1, products[(b + 1) & 1][0]);
      f32x16 scale = load(scales.scale[b][0]);
      f32x16 minimum = MIN ? load(scales.minimum[b][0]) : scale;
      const float *sx = x.scales + b * TILE_ROWS, *scaled_sums = x.scaled_sums + b * TILE_ROWS;
#pragma GCC unroll 16
      for (int r = 0; r < 16; r++) {
        f32x16 d = to_floats(_mm512_load_si512(products[b & 1][r]));
        acc[r] = fma(d, mul(scale, set1(sx[r])), acc[r]);
        if (MIN) acc[r] = fma(minimum, set1(scaled_sums[r]), acc[r]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) store(sums + 16 * r, acc[r]);
  }
};

template <int BITS> void multiply_bits(const infer_tile *t) {
  (t->w->mins ? panels<BITS, 1, AmxTiles<true>> : panels<BITS, 1, AmxTiles<false>>)(t);
}

bool fits_signed(const infer_weight *w) { return w->zero <= 128 && (1 << w->bits) - 1 - w->zero <= 127; }

void multiply_codes(const infer_tile *t) {
  if (t->rows < MIN_ROWS || t->w->group == 16 || !fits_signed(t->w)) return infer_matmul_avx512vnni.codes(t);
  configure();
  switch (t->w->bits) {
    case 4: multiply_bits<4>(t); break;
    case 5: multiply_bits<5>(t); break;
    case 6: multiply_bits<6>(t); break;
    default: multiply_bits<8>(t);
  }
  _tile_release();
}

void multiply_floats(const infer_tile *t) { infer_matmul_avx512vnni.floats(t); }

}  // namespace

const infer_matmul_kernels infer_matmul_amx = {quantize_row, multiply_codes, multiply_floats};
#endif
