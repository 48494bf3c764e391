/* Packs weights into strips of 16 rows; the layout is drawn in infer_cpu.h. A job packs one strip. */
#include <string.h>

#include "formats_grid.h"
#include "formats_table.h"
#include "kernels.h"

namespace {

const int ROWS = INFER_STRIP;

struct pack_job {
  const infer_weight *w;
  int32_t row0, rows;
  const uint8_t *raw; /* rows as the file stores them, or codes */
  const void *scales, *mins;
  const uint16_t *super_scales, *super_mins;
  const uint8_t *grid;
};

/* The planes of block `block` of a strip, from 32 codes of each row. */
template <int BITS> void store_codes(const infer_weight *w, int64_t strip, int64_t block, const uint8_t (*codes)[32]) {
  int64_t at = strip * (w->k / INFER_BLOCK) + block;
  uint32_t words[8][ROWS]; /* byte 4r+i of vector j: code[r][4j+i] */
  for (int r = 0; r < ROWS; r++) {
    uint32_t row[8];
    memcpy(row, codes[r], 32);
    for (int j = 0; j < 8; j++) words[j][r] = row[j];
  }
  uint8_t v[8][64];
  memcpy(v, words, sizeof v);
  if (BITS == 8) {
    memcpy((uint8_t *)w->codes + at * 512, v, 512);
    return;
  }
  uint8_t *low = (uint8_t *)w->codes + at * 256;
  for (int j = 0; j < 4; j++)
    for (int i = 0; i < 64; i++) low[64 * j + i] = (uint8_t)((v[2 * j][i] & 15) | v[2 * j + 1][i] << 4);
  if (BITS == 5) {
    uint8_t *high = (uint8_t *)w->high + at * 64;
    for (int i = 0; i < 64; i++) {
      int bits = 0;
      for (int t = 0; t < 8; t++) bits |= (v[t][i] >> 4 & 1) << t;
      high[i] = (uint8_t)bits;
    }
  }
  if (BITS == 6) {
    for (int half = 0; half < 2; half++) {
      uint8_t *high = (uint8_t *)w->high + at * 128 + 64 * half;
      for (int i = 0; i < 64; i++) {
        int bits = 0;
        for (int t = 0; t < 4; t++) bits |= (v[4 * half + t][i] >> 4 & 3) << 2 * t;
        high[i] = (uint8_t)bits;
      }
    }
  }
}

int rows_in(const pack_job *job, int32_t strip) {
  int32_t left = job->rows - strip * ROWS;
  return left < ROWS ? left : ROWS;
}

template <class Format> void pack_strip(void *context, int32_t index, int32_t) {
  const pack_job *job = (const pack_job *)context;
  const infer_weight *w = job->w;
  constexpr int PIECES = Format::BLOCK / 32, GROUPS = Format::BLOCK / Format::GROUP;
  int64_t strip = job->row0 / ROWS + index, count = w->k / Format::BLOCK;
  int rows = rows_in(job, index);
  const uint8_t *raw = job->raw + (int64_t)index * ROWS * count * Format::BYTES;
  uint8_t codes[PIECES][ROWS][32] = {};
  for (int64_t block = 0; block < count; block++) {
    int64_t at = (strip * count + block) * ROWS; /* of the values there is one of per block and row */
    for (int r = 0; r < ROWS; r++) {
      decoded_block one;
      if (r < rows)
        Format::decode(raw + ((int64_t)r * count + block) * Format::BYTES, job->grid, &one);
      else
        memset(&one, 0, sizeof one);
      for (int p = 0; p < PIECES; p++) memcpy(codes[p][r], one.codes + 32 * p, 32);
      if (Format::SCALE == SCALE_SUPER) {
        w->super_scales[at + r] = one.halves[0];
        if (Format::MIN) w->super_mins[at + r] = one.minimum;
      } else if (Format::MIN) {
        ((uint16_t *)w->mins)[at + r] = one.minimum;
      }
      for (int g = 0; g < GROUPS; g++) {
        int64_t group = at * GROUPS + g * ROWS + r;
        if (Format::SCALE == SCALE_F16) ((uint16_t *)w->scales)[group] = one.halves[g];
        if (Format::SCALE == SCALE_F32) ((float *)w->scales)[group] = one.floats[g];
        if (Format::SCALE == SCALE_SUPER) ((uint8_t *)w->scales)[group] = one.scales[g];
        if (Format::SCALE == SCALE_SUPER && Format::MIN) ((uint8_t *)w->mins)[group] = one.mins[g];
      }
    }
    for (int p = 0; p < PIECES; p++) store_codes<Format::BITS>(w, strip, block * PIECES + p, codes[p]);
  }
}

/* [rows][count] elements to [strip][count][16 rows], rows beyond the last as zeros. */
template <class T> void transpose(const void *from, int64_t count, int rows, void *to) {
  const int64_t RUN = 64 / sizeof(T);
  for (int64_t i0 = 0; i0 < count; i0 += RUN) {
    int64_t i1 = i0 + RUN < count ? i0 + RUN : count;
    for (int r = 0; r < ROWS; r++)
      for (int64_t i = i0; i < i1; i++) {
        T value = 0;
        if (r < rows) memcpy(&value, (const char *)from + (r * count + i) * (int64_t)sizeof(T), sizeof(T));
        ((T *)to)[i * ROWS + r] = value;
      }
  }
}

/* A plane of one strip, `count` values a row, from [rows][count]. */
template <class T> void transpose_plane(const pack_job *job, int32_t index, int64_t count, const void *from, void *plane) {
  if (!from) return;
  int64_t strip = job->row0 / ROWS + index;
  transpose<T>((const T *)from + (int64_t)index * ROWS * count, count, rows_in(job, index), (T *)plane + strip * count * ROWS);
}

template <class T> void pack_floats(void *context, int32_t index, int32_t) {
  const pack_job *job = (const pack_job *)context;
  int64_t k = job->w->k, strip = job->row0 / ROWS + index;
  transpose<T>(job->raw + (int64_t)index * ROWS * k * (int64_t)sizeof(T), k, rows_in(job, index),
               (T *)job->w->codes + strip * k * ROWS);
}

template <int BITS> void pack_codes(void *context, int32_t index, int32_t) {
  const pack_job *job = (const pack_job *)context;
  const infer_weight *w = job->w;
  int64_t k = w->k, strip = job->row0 / ROWS + index;
  int rows = rows_in(job, index);
  for (int64_t block = 0; block < k / INFER_BLOCK; block++) {
    uint8_t codes[ROWS][32] = {};
    for (int r = 0; r < rows; r++) memcpy(codes[r], job->raw + ((int64_t)index * ROWS + r) * k + block * 32, 32);
    store_codes<BITS>(w, strip, block, codes);
  }
  int64_t groups = k / w->group;
  if (w->scale == SCALE_SUPER) {
    transpose_plane<uint8_t>(job, index, groups, job->scales, w->scales);
    transpose_plane<uint8_t>(job, index, groups, job->mins, w->mins);
    transpose_plane<uint16_t>(job, index, k / 256, job->super_scales, w->super_scales);
    transpose_plane<uint16_t>(job, index, k / 256, job->super_mins, w->super_mins);
  } else if (w->scale == SCALE_F16) {
    transpose_plane<uint16_t>(job, index, groups, job->scales, w->scales);
    transpose_plane<uint16_t>(job, index, groups, job->mins, w->mins);
  } else {
    transpose_plane<uint32_t>(job, index, groups, job->scales, w->scales);
    transpose_plane<uint32_t>(job, index, groups, job->mins, w->mins);
  }
}

struct packer {
  const char *type;
  int elem, block, bits, group, zero, scale;
  bool is_signed, min, grid;
  infer_job job;
};

template <class F> constexpr packer packer_of(const char *type) {
  return {type, ELEM_CODES, F::BLOCK, F::BITS, F::GROUP, F::ZERO, F::SCALE, F::SIGNED, F::MIN, F::GRID > 0, pack_strip<F>};
}

const packer PACKERS[] = {
    packer_of<Legacy<4, false>>("Q4_0"),
    packer_of<Legacy<4, true>>("Q4_1"),
    packer_of<Legacy<5, false>>("Q5_0"),
    packer_of<Legacy<5, true>>("Q5_1"),
    packer_of<Legacy<8, false>>("Q8_0"),
    packer_of<MinK<4>>("Q4_K"),
    packer_of<MinK<5>>("Q5_K"),
    packer_of<Q6K>("Q6_K"),
    packer_of<Q2K>("Q2_K"),
    packer_of<Q3K>("Q3_K"),
    packer_of<IQ4NL>("IQ4_NL"),
    packer_of<IQ4XS>("IQ4_XS"),
    packer_of<MXFP4>("MXFP4"),
    packer_of<NVFP4>("NVFP4"),
    packer_of<TQ10>("TQ1_0"),
    packer_of<TQ20>("TQ2_0"),
    packer_of<Q10>("Q1_0"),
    packer_of<IQ1S>("IQ1_S"),
    packer_of<IQ1M>("IQ1_M"),
    packer_of<IQ2XXS>("IQ2_XXS"),
    packer_of<IQ2XS>("IQ2_XS"),
    packer_of<IQ2S>("IQ2_S"),
    packer_of<IQ3XXS>("IQ3_XXS"),
    packer_of<IQ3S>("IQ3_S"),
    {"F32", ELEM_F32, 1, 0, 0, 0, 0, false, false, false, pack_floats<uint32_t>},
    {"F16", ELEM_F16, 1, 0, 0, 0, 0, false, false, false, pack_floats<uint16_t>},
    {"BF16", ELEM_BF16, 1, 0, 0, 0, 0, false, false, false, pack_floats<uint16_t>},
};

bool range_valid(const infer_weight *w, int32_t row0, int32_t rows) {
  return w->codes && w->n > 0 && w->k > 0 && rows >= 0 && row0 >= 0 && row0 % ROWS == 0 && row0 <= w->n - rows &&
         (rows % ROWS == 0 || row0 + rows == w->n);
}

bool planes_valid(const infer_weight *w) {
  bool has_high = w->bits == 5 || w->bits == 6, super = w->scale == SCALE_SUPER;
  bool table = w->elem == ELEM_TABLE, simple = w->bits == 4 && w->scale == SCALE_F32 && !w->mins;
  if (table ? !w->table || !simple : w->elem != ELEM_CODES || w->table) return false;
  if (w->k % INFER_BLOCK || (w->bits != 4 && w->bits != 8 && !has_high)) return false;
  if (w->group != 16 && w->group != 32 && w->group != 64 && w->group != 128) return false;
  if (w->k % w->group || w->zero < 0 || w->zero > 255 || w->scale < SCALE_F16 || w->scale > SCALE_SUPER) return false;
  if (!w->scales || (has_high && !w->high)) return false;
  return !super || (w->k % 256 == 0 && w->super_scales && (!w->mins || w->super_mins));
}

int32_t strips(int32_t rows) { return (rows + ROWS - 1) / ROWS; }

}  // namespace

int32_t infer_pack(infer_pool *pool, const char *type, const void *raw, const infer_weight *w, int32_t row0, int32_t rows,
                   const void *grid) {
  for (const packer &p : PACKERS) {
    if (strcmp(p.type, type)) continue;
    if (!range_valid(w, row0, rows) || w->elem != p.elem || w->k % p.block || (p.grid && !grid)) return -1;
    if (p.elem == ELEM_CODES) {
      bool same = w->bits == p.bits && w->group == p.group && w->zero == p.zero && w->scale == p.scale &&
                  (w->signed_scales != 0) == p.is_signed && (w->mins != NULL) == p.min;
      if (!same || !planes_valid(w)) return -1;
    }
    pack_job job = {};
    job.w = w, job.row0 = row0, job.rows = rows, job.raw = (const uint8_t *)raw, job.grid = (const uint8_t *)grid;
    infer_parallel(pool, strips(rows), p.job, &job);
    return 0;
  }
  return -1;
}

int32_t infer_pack_codes(infer_pool *pool, const uint8_t *codes, const void *scales, const void *mins,
                         const uint16_t *super_scales, const uint16_t *super_mins, const infer_weight *w, int32_t row0,
                         int32_t rows) {
  if (!range_valid(w, row0, rows) || !planes_valid(w) || !scales || (w->mins && !mins)) return -1;
  if (w->scale == SCALE_SUPER && (!super_scales || (w->mins && !super_mins))) return -1;
  pack_job job = {w, row0, rows, codes, scales, w->mins ? mins : NULL, super_scales, super_mins, NULL};
  infer_job run = w->bits == 4 ? pack_codes<4> : w->bits == 5 ? pack_codes<5> : w->bits == 6 ? pack_codes<6> : pack_codes<8>;
  infer_parallel(pool, strips(rows), run, &job);
  return 0;
}
