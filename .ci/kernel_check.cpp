/* Products of every form, and a router with its experts and a matrix per head, on every instruction set this processor
 * offers against the portable path, bit by bit, without Python: what an emulator can run. Prints a hash of all results, which is the same on every processor. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../quant/kernels/cpu/infer_cpu.h"

static uint64_t state = 1;

static uint32_t random_bits() {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(state >> 33);
}

static void *random_plane(size_t bytes, bool half_floats) {
  uint8_t *plane = (uint8_t *)aligned_alloc(64, (bytes + 63) / 64 * 64);
  for (size_t i = 0; i < bytes; i++) plane[i] = (uint8_t)random_bits();
  if (half_floats) /* exponents around 2^-3 */
    for (size_t i = 1; i < bytes; i += 2) plane[i] = (uint8_t)((plane[i] & 0x83) | 0x30);
  return plane;
}

static void *empty_plane(size_t bytes) { return aligned_alloc(64, (bytes + 63) / 64 * 64); }

static infer_weight make_weight(infer_pool *pool, int n, int k, int bits, int group, bool super, bool mins) {
  size_t rows = (size_t)(n + 15) / 16 * 16, groups = (size_t)k / group, item = super ? 1 : 2;
  infer_weight w = {};
  w.n = n, w.k = k, w.bits = bits, w.group = group, w.zero = mins ? 0 : 1 << (bits - 1);
  w.scale = super ? SCALE_SUPER : SCALE_F16, w.signed_scales = super && !mins;
  w.codes = empty_plane(rows * k), w.high = empty_plane(rows * k);
  w.scales = empty_plane(rows * groups * item), w.mins = mins ? empty_plane(rows * groups * item) : NULL;
  w.super_scales = (uint16_t *)empty_plane(rows * k), w.super_mins = (uint16_t *)empty_plane(rows * k);
  uint8_t *codes = (uint8_t *)random_plane((size_t)n * k, false);
  for (size_t i = 0; i < (size_t)n * k; i++) codes[i] &= (uint8_t)((1 << bits) - 1);
  void *scales = random_plane(n * groups * item, !super), *lows = random_plane(n * groups * item, !super);
  uint16_t *supers = (uint16_t *)random_plane((size_t)n * k, true);
  if (infer_pack_codes(pool, codes, scales, lows, supers, supers, &w, 0, n)) exit(2);
  free(codes), free(scales), free(lows), free(supers);
  return w;
}

static void multiply(infer_pool *pool, const infer_weight *w, const float *x, int rows, float *out) {
  infer_acts acts = {rows, w->k, (int8_t *)empty_plane((size_t)rows * w->k), (float *)empty_plane((size_t)rows * w->k),
                     (int32_t *)empty_plane((size_t)rows * w->k)};
  struct {
    op_quantize quantize;
    op_matmul matmul;
  } program = {};
  program.quantize = {{OP_QUANTIZE, sizeof(op_quantize), 0, 0}, x, &acts, w->k};
  program.matmul.head = {OP_MATMUL, sizeof(op_matmul), 0, 0};
  program.matmul.acts = &acts, program.matmul.count = 1, program.matmul.w[0] = w, program.matmul.out[0] = out;
  program.matmul.softcap = rows & 1 ? 30.0f : 0.0f;
  infer_batch batch = {};
  batch.tokens = rows;
  if (infer_run(pool, &program, sizeof program, &batch)) exit(3);
  free(acts.codes), free(acts.scales), free(acts.sums);
}

static const char *const isas[] = {"scalar", "neon", "avx2", "avxvnni", "avx512vnni", "avx512vnni+amx"};

static void fill(float *x, int count) {
  for (int i = 0; i < count; i++) x[i] = ((int32_t)random_bits() - (1 << 30)) * 0x1p-28f;
}

/* Routes rows to experts, runs them, and then heads of the sum through matrices of their own; all of it into `out`. */
static void run_experts(infer_pool *pool, const infer_weight *const *w, const float *x, const float *logits, int rows,
                        int form, float *out) {
  enum { EXPERTS = 12, USED = 3, WIDTH = 64, INNER = 96, HEADS = 2, HEAD = 40 };
  infer_acts acts = {rows, WIDTH, (int8_t *)empty_plane(rows * WIDTH), (float *)empty_plane(rows * WIDTH),
                     (int32_t *)empty_plane(rows * WIDTH)};
  struct {
    op_quantize quantize;
    op_route route;
    op_experts experts;
    op_heads heads;
  } program = {};
  float *sum = out + rows * USED * 2;
  program.quantize = {{OP_QUANTIZE, sizeof(op_quantize), 0, 0}, x, &acts, WIDTH};
  program.route = {{OP_ROUTE, sizeof(op_route), 0, 0}, logits, form ? logits : NULL, (infer_choice *)out, EXPERTS, USED,
                   4, 2 + form % 2, form, form == 1, 2.5f};
  program.experts = {{OP_EXPERTS, sizeof(op_experts), 0, 0}, (infer_choice *)out, &acts, NULL, w[0], w[1], w[2], logits,
                     NULL, NULL, sum, EXPERTS, USED, form};
  program.heads = {{OP_HEADS, sizeof(op_heads), 0, 0}, sum, w[3], sum + rows * 2 * HEAD, HEADS, HEAD};
  infer_batch batch = {};
  batch.tokens = rows;
  if (infer_run(pool, &program, sizeof program, &batch)) exit(4);
  free(acts.codes), free(acts.scales), free(acts.sums);
}

static int check_experts(infer_pool *pool, uint64_t *hash, int *compared) {
  const int sizes[4][2] = {{96, 64}, {96, 64}, {80, 96}, {24, 32}};
  infer_weight arrays[4][12];
  const infer_weight *w[4];
  for (int part = 0; part < 4; part++) {
    w[part] = arrays[part];
    for (int e = 0; e < 12; e++)
      arrays[part][e] = make_weight(pool, sizes[part][0], sizes[part][1], part == 1 ? 8 : 4, 32, false, part == 2);
  }
  int wrong = 0;
  const int row_counts[] = {1, 3, 40};
  for (int rows : row_counts)
    for (int form = 0; form < 3; form++) {
      int floats = rows * (6 + 80 + 2 * 32);
      float *x = (float *)empty_plane(sizeof(float) * rows * 64), *logits = (float *)empty_plane(sizeof(float) * 12 * 96);
      float *expected = (float *)empty_plane(sizeof(float) * floats), *found = (float *)empty_plane(sizeof(float) * floats);
      fill(x, rows * 64), fill(logits, 12 * 96);
      for (const char *isa : isas) {
        if (infer_set_isa(isa)) continue;
        bool first = !strcmp(isa, "scalar");
        run_experts(pool, w, x, logits, rows, form, first ? expected : found);
        if (first)
          for (size_t i = 0; i < sizeof(float) * floats; i++) *hash = (*hash ^ ((uint8_t *)expected)[i]) * 1099511628211u;
        else if (++*compared, memcmp(expected, found, sizeof(float) * floats))
          wrong++, printf("%s differs: experts, form %d, %d rows\n", isa, form, rows);
      }
      free(x), free(logits), free(expected), free(found);
    }
  return wrong;
}

int main() {
  const int row_counts[] = {1, 2, 3, 4, 5, 8, 13, 40}, groups[] = {16, 32, 64}, widths[] = {4, 5, 6, 8};
  infer_pool *pool = infer_pool_new(2);
  uint64_t hash = 14695981039346656037u;
  int wrong = 0, compared = 0;
  for (int bits : widths)
    for (int group : groups)
      for (int form = 0; form < 4; form++) {
        int n = 37, k = 768;
        infer_weight w = make_weight(pool, n, k, bits, group, form & 1, form & 2);
        for (int rows : row_counts) {
          float *x = (float *)empty_plane(sizeof(float) * rows * k);
          fill(x, rows * k);
          size_t bytes = sizeof(float) * rows * n;
          float *expected = (float *)empty_plane(bytes), *found = (float *)empty_plane(bytes);
          for (const char *isa : isas) {
            if (infer_set_isa(isa)) continue;
            bool first = !strcmp(isa, "scalar");
            multiply(pool, &w, x, rows, first ? expected : found);
            if (first)
              for (size_t i = 0; i < bytes; i++) hash = (hash ^ ((uint8_t *)expected)[i]) * 1099511628211u;
            else if (compared++, memcmp(expected, found, bytes))
              wrong++, printf("%s differs: %d bits, groups of %d, form %d, %d rows\n", isa, bits, group, form, rows);
          }
          free(x), free(expected), free(found);
        }
        free(w.codes), free(w.high), free(w.scales), free(w.mins), free(w.super_scales), free(w.super_mins);
      }
  wrong += check_experts(pool, &hash, &compared);
  infer_pool_free(pool);
  printf("%d comparisons, %d differ, hash %016llx\n", compared, wrong, (unsigned long long)hash);
  return wrong || !compared;
}
