/* Products of many rows on AMX tiles: 16 rows times 16 outputs of a block at once, as exact int32 sums that are then
 * folded into floats in the same order as everywhere. Few rows go to the AVX-512 kernels. */
#if defined(__x86_64__)
#pragma GCC target("amx-tile,amx-int8,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")
#define INFER_SIMD_AVX512
#include "simd_math.h"

#include "act_quant.h"
#include "matmul_codes.inc"

namespace {

const int MIN_ROWS = 6; /* below, most of a tile would be padding */

/* Tiles 0 and 1 are sums; 2 (rows of x) and 3 (weights) of 32 inputs; 4 and 5 of 16 inputs. */
struct alignas(64) tile_config {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
const tile_config CONFIG = {1, 0, {}, {64, 64, 32, 64, 16, 64}, {16, 16, 16, 8, 16, 4}};

void configure() { __asm__ volatile("ldtilecfg %0" : : "m"(CONFIG)); }

/* The sums of group g of block b, int32 [16 rows][16 outputs]. `accumulator` 0 or 1 is the tile they pass through. */
template <int GROUPS> INFER_INLINE void tile_product(const int8_t *x, const uint8_t *w, int32_t *sums, int accumulator) {
  if (accumulator) {
    _tile_zero(1);
    if (GROUPS == 1) {
      _tile_loadd(2, x, 32);
      _tile_loadd(3, w, 64);
      _tile_dpbssd(1, 2, 3);
    } else {
      _tile_loadd(4, x, 32);
      _tile_loadd(5, w, 64);
      _tile_dpbssd(1, 4, 5);
    }
    _tile_stored(1, sums, 64);
  } else {
    _tile_zero(0);
    if (GROUPS == 1) {
      _tile_loadd(2, x, 32);
      _tile_loadd(3, w, 64);
      _tile_dpbssd(0, 2, 3);
    } else {
      _tile_loadd(4, x, 32);
      _tile_loadd(5, w, 64);
      _tile_dpbssd(0, 4, 5);
    }
    _tile_stored(0, sums, 64);
  }
}

template <int GROUPS, bool MIN> struct AmxTiles {
  static int subtract(const infer_weight *w) { return w->zero; }
  static int32_t zero(const infer_weight *) { return 0; }

  /* Step i is group i % GROUPS of block i / GROUPS. */
  INFER_INLINE void product(const tile_inputs &x, const uint8_t *panel, int i, int32_t *sums) {
    const int8_t *from = x.codes + (i / GROUPS) * TILE_ROWS * 32 + (i % GROUPS) * 16;
    tile_product<GROUPS>(from, panel + (512 / GROUPS) * i, sums, i & 1);
  }

  /* Rows beyond `rows` hold whatever was there before; their sums are never read. */
  static void tile(float *sums, const uint8_t *panel, const strip_scales &scales, const tile_inputs &x, int, int blocks) {
    alignas(64) int32_t products[2][16][16];
    f32x16 acc[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) acc[r] = load(sums + 16 * r);
    product(x, panel, 0, products[0][0]);
    for (int i = 0; i < blocks * GROUPS; i++) {
      if (i + 1 < blocks * GROUPS) product(x, panel, i + 1, products[(i + 1) & 1][0]);
      f32x16 scale = load(scales.scale[i / GROUPS][i % GROUPS]);
      f32x16 minimum = MIN ? load(scales.minimum[i / GROUPS][i % GROUPS]) : scale;
      const float *sx = x.scales + (i / GROUPS) * TILE_ROWS, *scaled_sums = x.scaled_sums + i * TILE_ROWS;
#pragma GCC unroll 16
      for (int r = 0; r < 16; r++) {
        f32x16 d = to_floats(_mm512_load_si512(products[i & 1][r]));
        acc[r] = fma(d, mul(scale, set1(sx[r])), acc[r]);
        if (MIN) acc[r] = fma(minimum, set1(scaled_sums[r]), acc[r]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) store(sums + 16 * r, acc[r]);
  }
};

template <int BITS, int GROUPS> void multiply_groups(const infer_tile *t) {
  (t->w->mins ? panels<BITS, GROUPS, AmxTiles<GROUPS, true>> : panels<BITS, GROUPS, AmxTiles<GROUPS, false>>)(t);
}

template <int BITS> void multiply_bits(const infer_tile *t) {
  (t->w->group == 16 ? multiply_groups<BITS, 2> : multiply_groups<BITS, 1>)(t);
}

bool fits_signed(const infer_weight *w) { return w->zero <= 128 && (1 << w->bits) - 1 - w->zero <= 127; }

void multiply_codes(const infer_tile *t) {
  if (t->rows < MIN_ROWS || !fits_signed(t->w)) return infer_matmul_avx512vnni.codes(t);
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
