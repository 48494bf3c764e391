/* The CPU kernels' plain C interface: what the Python binding calls, and the contract of every operation.
 *
 * Exactness. A row of an output depends on that row's input, the weights and absolute positions only: never on how
 * many rows share the call, on the number of threads, or on the instruction set. Integer products are exact; every
 * float reduction has one fixed order, written beside its operation; multiply-add is always fused (fma), on every
 * path, so that all paths give the same bits (of numbers: the sign and payload of a NaN are the processor's own).
 *
 * Weights lie in strips of 16 output rows (the last strip padded with zero scales), so that one 32-bit lane of a
 * vector is one output row and holds four neighbouring inputs. Per strip and block of 32 inputs:
 *
 *   4 low bits   4 x 64 bytes; in vector j, byte 4r+i holds  code[r][8j+i] | code[r][8j+4+i] << 4   (j 0..3, i 0..3)
 *   1 high bit   64 bytes (bits = 5); byte 4r+i holds, at bit t, bit 4 of code[r][4t+i]              (t 0..7)
 *   2 high bits  2 x 64 bytes (bits = 6); in vector v, byte 4r+i holds, at bits 2t..2t+1, bits 4..5 of
 *                code[r][16v+4t+i]                                                                   (v 0..1, t 0..3)
 *   8 bits       8 x 64 bytes; in vector j, byte 4r+i holds code[r][4j+i]                            (bits = 8)
 *
 * Each plane is one array ordered [strip][block][bytes above]. Scales are ordered [strip][group][16 rows]; super
 * scales [strip][k / 256][16 rows].
 *
 *   w[n][k] = scale * (code - zero) + minimum
 *     SCALE_F16, SCALE_F32:  scale and minimum as stored, one per group of 16 to 128 inputs
 *     SCALE_SUPER:           scale = super_scale * scales (u8 or i8), minimum = -super_min * mins (u8), groups of 16 or 32
 *
 * where scale and minimum are taken in float32 (a super value times its integer is exact there: 11 + 8 bits).
 *
 * Matmul of a row x quantized per block b of 32 inputs (x ~ sx[b] * xq, xq int8), in order of b, and within a block in
 * order of its groups (two when group is 16, else one):
 *     D = sum of (code - zero) * xq,  S = sum of xq         over the group's inputs in the block, exact integers
 *     acc = fma((float)D, sx[b] * scale, acc)               the product sx * scale is rounded to float32 first
 *     acc = fma(minimum, sx[b] * (float)S, acc)             formats with minimums; the product sx * S is rounded first
 *   acc begins at 0; then bias, softcap and accumulation, each rounded to float32.
 * Float weights (bits 16 or 32): [strip][k][16 rows] of f16, bf16 or f32; acc = fma(x[k], w[k], acc) in order of k with
 *   four accumulators by k % 4, summed as (a0 + a1) + (a2 + a3).
 */
#ifndef INFER_CPU_H
#define INFER_CPU_H
#include <stdint.h>

#pragma GCC visibility push(default)
#ifdef __cplusplus
extern "C" {
#endif

enum { INFER_ABI = 6, INFER_STRIP = 16, INFER_BLOCK = 32, INFER_KV_BLOCK = 64 };
enum { SCALE_F16 = 0, SCALE_F32 = 1, SCALE_SUPER = 2 };
/* ELEM_TABLE: 4-bit codes laid out as above, w[n][k] = table[code] * scale, rounded once, multiplied as a float weight. */
enum { ELEM_CODES = 0, ELEM_F32 = 1, ELEM_F16 = 2, ELEM_BF16 = 3, ELEM_TABLE = 4 };
enum { KV_F16 = 0, KV_BF16 = 1, KV_F32 = 2, KV_INT8 = 3 };

typedef struct infer_pool infer_pool;

typedef struct {
  int32_t n, k;     /* rows, columns; k a multiple of 32 for codes */
  int32_t elem;     /* ELEM_*; below only for ELEM_CODES and ELEM_TABLE, which has SCALE_F32 and no minimum */
  int32_t bits;     /* 4, 5, 6 or 8 */
  int32_t group;    /* 16, 32, 64 or 128 */
  int32_t zero;     /* subtracted from each code */
  int32_t scale;    /* SCALE_* */
  int32_t signed_scales; /* SCALE_SUPER: scales are int8 (Q6_K) instead of uint8 */
  void *codes;      /* low, 8-bit or float plane */
  void *high;       /* 1- or 2-bit plane, or NULL */
  void *scales;
  void *mins;       /* or NULL */
  uint16_t *super_scales, *super_mins; /* f16, or NULL */
  const float *table;                  /* [16], for ELEM_TABLE */
} infer_weight;

/* Activations quantized per 32: sx = amax / 127, xq = x * (127 / amax) rounded to nearest even; sums per 16 of xq.
 * A block with amax < 2^-119 is all zeros (sx = 0), so that neither quotient is subnormal or infinite. A block with NaN
 * or infinity has sx = NaN and codes 0, so that the result is NaN. Buffers hold `capacity` rows. */
typedef struct {
  int32_t capacity, k;
  int8_t *codes;   /* [rows][k] */
  float *scales;   /* [rows][k / 32] */
  int32_t *sums;   /* [rows][k / 16] */
} infer_acts;

/* The K and V of one layer: `blocks` blocks of 64 positions.
 *   k [block][kv_head][head_dim][64]   transposed, so that 16 neighbouring positions fill a vector
 *   v [block][kv_head][64][value_dim]     or NULL: a value is the first value_dim elements of its key (latent attention)
 * KV_INT8 adds f32 scales per head and position: k_scale, v_scale [block][kv_head][64].
 * stride: bytes from a block to the next in each of the arrays, for blocks that hold all layers; 0 for dense arrays. */
typedef struct {
  void *k, *v;
  float *k_scale, *v_scale;
  int32_t type, kv_heads, head_dim, value_dim, blocks;
  int64_t stride;
} infer_kv;

/* What one step computes: `tokens` rows, `sequences` consecutive runs of them. */
typedef struct {
  int32_t tokens, sequences, max_blocks, outputs;
  const int32_t *ids;          /* [tokens] */
  const int32_t *positions;    /* [tokens] */
  const int64_t *slots;        /* [tokens] block * 64 + offset where K and V of the row go */
  const int32_t *query_start;  /* [sequences + 1] */
  const int32_t *context_len;  /* [sequences] positions in the cache after this step */
  const int32_t *block_tables; /* [sequences][max_blocks] */
  const int32_t *output_rows;  /* [outputs] rows whose logits are wanted */
} infer_batch;

/* A program is a sequence of these, each beginning with an op_head; `bytes` is the whole struct's size.
 * rows: 0 = batch->tokens rows, 1 = batch->outputs rows. */
typedef struct { int32_t kind, bytes, rows, reserved; } op_head;
enum { OP_EMBED = 1, OP_NORM, OP_QUANTIZE, OP_MATMUL, OP_ROPE_STORE, OP_ATTENTION, OP_GLU, OP_ADD, OP_GATHER, OP_ROUTE,
       OP_EXPERTS, OP_HEADS };
enum { ACT_SILU = 0, ACT_GELU_TANH = 1, ACT_SWIGLU_OAI = 2 };
enum { GATE_SOFTMAX = 0, GATE_SIGMOID = 1, GATE_CHOSEN_SOFTMAX = 2 };

/* out[t] = table row ids[t], dequantized in float32, times scale */
typedef struct { op_head head; const infer_weight *table; float *out; float scale; } op_embed;
/* y = x * rsqrt(mean(x^2) + eps) * weight; to out (f32 [rows][width]) and/or acts; the sum of squares in float32 over 16 lanes by
 * column % 16, lanes added pairwise (8, 4, 2, 1 apart) */
typedef struct { op_head head; const float *x, *weight; float *out; infer_acts *acts; float eps; int32_t width; } op_norm;
typedef struct { op_head head; const float *x; infer_acts *acts; int32_t width; } op_quantize;
/* out[i] = in * w[i]^T (+ bias[i]); accumulate: added to what out holds, after the bias. Quantized weights read acts,
 * float weights read x. The weights of one op share their input and run as one parallel region. */
typedef struct {
  op_head head;
  const infer_acts *acts;
  const float *x;
  const infer_weight *w[4];
  const float *bias[4];
  float *out[4];           /* [rows][w[i]->n] */
  int32_t count, accumulate;
  float softcap;           /* 0: off; else out = softcap * tanh(out / softcap) */
} op_matmul;
/* q [tokens][heads][head_dim], k and v [tokens][kv_heads][head_dim, value_dim]: optional RMS norm of the first norm_dim
 * dimensions of each head (q_norm, k_norm of norm_dim, or NULL), rotation of rope_dim dimensions from rope_at on by
 * cos/sin [position][rope_dim / 2] (pairing 0: (x0,x1),…; 1: (x0, x[rope_dim/2]), …), q and k in place, k and v into the
 * cache; v is NULL where the cache has no values. */
typedef struct {
  op_head head;
  float *q, *k, *v;
  const float *q_norm, *k_norm;
  const float *cos, *sin;
  const infer_kv *kv;
  float eps;
  int32_t heads, norm_dim, rope_at, rope_dim, pairing;
} op_rope_store;
/* softmax(scale * q k^T) v per head over positions max(0, p - window + 1) … p (window 0: all), online over blocks of 64
 * positions in ascending order; softcap on the scores if not 0. Heads share K and V: head h reads kv head h * kv_heads / heads.
 * sinks: e^(sinks[h] - largest score) is added to the sum that head h's values are divided by. */
typedef struct {
  op_head head;
  const float *q;
  const float *sinks;      /* [heads] or NULL */
  float *out;              /* f32 [tokens][heads * value_dim], and/or */
  infer_acts *acts;
  const infer_kv *kv;
  float scale, softcap;
  int32_t heads, window;
} op_attention;
/* act(gate) * up → out and/or acts; ACT_SWIGLU_OAI: with g = min(gate, 7), u = up held within ±7, (u + 1) * (g * sigmoid(1.702 g)) */
typedef struct { op_head head; const float *gate, *up; float *out; infer_acts *acts; int32_t width, act; } op_glu;
typedef struct { op_head head; const float *x; float *y; int32_t width; } op_add;          /* y += x */
typedef struct { op_head head; const float *x; float *out; int32_t width; } op_gather;     /* out[i] = x[output_rows[i]] */

/* Mixture of experts: which experts a row goes to, and with what weight. */
typedef struct { int32_t expert; float weight; } infer_choice;
/* score = e^(x - max) / sum of them (the sum as op_norm's, by expert % 16), 1 / (1 + e^-x), or x itself (GATE_CHOSEN_SOFTMAX).
 * Selected are the `used` largest of score + bias, of the groups_used best groups of experts / groups neighbours; a group
 * counts its largest, with GATE_SIGMOID the sum of its two largest. Of equals the lowest number comes first. The weight
 * is the score without bias; GATE_CHOSEN_SOFTMAX: e^(x - max) / sum over the chosen. normalize: weight / (sum + 1e-20).
 * Then times scale. Sums over the chosen are in ascending order of expert, which is also that of `out`. */
typedef struct {
  op_head head;
  const float *logits;     /* [rows][experts] */
  const float *bias;       /* [experts] or NULL */
  infer_choice *out;       /* [rows][used] */
  int32_t experts, used, groups, groups_used, gate, normalize;
  float scale;
} op_route;
/* Per row: out = sum over its choices in order of fma(weight, down(act(gate(x)) * up(x)), sum), from 0; gate, up and down of
 * the chosen expert as op_matmul and op_glu compute them, with biases if not NULL. gate, up and down are arrays of `experts`
 * weights of one shape and form each. */
typedef struct {
  op_head head;
  const infer_choice *choices; /* [rows][used] */
  const infer_acts *acts;
  const float *x;
  const infer_weight *gate, *up, *down;
  const float *gate_bias, *up_bias, *down_bias; /* [experts][n] or NULL */
  float *out;                                   /* [rows][down->n] */
  int32_t experts, used, act;
} op_experts;
/* Each head of a row by a matrix of its own: x [rows][heads][width] → out [rows][heads][w->n + width - w->k]: w[h] times the
 * first w->k elements, then the others as they are. w: an array of `heads` weights of one shape and form. */
typedef struct { op_head head; const float *x; const infer_weight *w; float *out; int32_t heads, width; } op_heads;

int32_t infer_abi(void);
const char *infer_isa(void);                       /* the instruction set in use: "avx512vnni+amx", "avx512vnni", "avxvnni", "avx2", "neon", "scalar" */
int32_t infer_set_isa(const char *name);           /* NULL: the best. 0, or -1 when unknown or not offered by this processor */
int64_t infer_sizeof(const char *type);            /* bytes of a struct above, -1 when unknown: what a binding checks itself by */

infer_pool *infer_pool_new(int32_t threads);       /* threads >= 1, the caller included; NULL when out of memory */
void infer_pool_free(infer_pool *);

/* Packs rows stored as a GGUF type ("Q4_K", …) into the planes of `w`, which the caller has allocated (64-byte aligned)
 * and described; the rows [row0, row0 + rows) of the matrix, row0 a multiple of 16. grid: for IQ1 to IQ3, the vectors of
 * codes that their indices pick from, 8 bytes each, for IQ3 4. 0, or -1 for an unknown type. */
int32_t infer_pack(infer_pool *, const char *type, const void *raw, const infer_weight *w, int32_t row0, int32_t rows,
                   const void *grid);

/* The same from the canonical form of quant/base.py: `codes` one code per byte [rows][k]; `scales`, `mins` (or NULL)
 * [rows][k / group] of the weight's own scale type (f16, f32, or u8/i8 with super values); `super_scales`,
 * `super_mins` f16 [rows][k / 256] or NULL. 0, or -1 when `w` has no such planes. */
int32_t infer_pack_codes(infer_pool *, const uint8_t *codes, const void *scales, const void *mins,
                         const uint16_t *super_scales, const uint16_t *super_mins, const infer_weight *w, int32_t row0,
                         int32_t rows);

/* A matrix that waits in an open file, all rows as infer_pack takes them, row_bytes each, from byte `offset` on. */
typedef struct {
  const char *type;
  const infer_weight *w;
  const void *grid;
  int64_t offset, row_bytes;
  int32_t file, failed;    /* failed: set when it could not be read or packed */
} infer_stored;
/* Matrices on their way from files into memory, in this order. */
typedef struct {
  infer_stored *matrices;
  int32_t count, stop;     /* stop: set from outside, ends all calls within milliseconds */
  int64_t next, done;      /* next: what is claimed first, from 0 on; done: bytes so far */
} infer_packing;
/* Works on it until nothing is left to claim; as many threads as like to may call this at once. All is packed when all
 * calls have returned. */
void infer_pack_files(infer_packing *);

/* Reads `bytes` bytes, at most 2^40, with all threads; the xor of the 64-bit words of
 * all whole 64-byte pieces. To measure memory bandwidth. */
uint64_t infer_read(infer_pool *, const void *data, int64_t bytes);

/* Of each row of `words` 64-bit words w (any alignment), modulo 2^64: sums[2r] = sum of a[i] * w[i], sums[2r + 1] = sum of
 * b[i] * (w[i] >> 32). */
void infer_row_sums(const void *data, int64_t rows, int64_t words, const uint64_t *a, const uint64_t *b, uint64_t *sums);

/* Runs a program over a batch. 0, or the 1-based index of an operation whose kind or size is unknown, as a negative number. */
int32_t infer_run(infer_pool *, const void *program, int64_t bytes, const infer_batch *batch);

#ifdef __cplusplus
}
#endif
#pragma GCC visibility pop
#endif
