/* Integer vectors beside simd.h's floats, on every instruction set:
 *
 *   u8x64    64 unsigned bytes: four neighbouring inputs for each of the 16 rows of a strip
 *   i32x16   16 int32, one per row
 *
 *   merge_bits<LEFT>(low, plane, mask)  low | (plane shifted left by LEFT, or right by -LEFT) & mask
 *   dot<EIGHT>(acc, w, x)               acc + the sum of the four products w * x of each row, exact; x: four bytes.
 *                                       EIGHT: codes of 8 bits, handed over with the top bit flipped if SIGNED_BYTES
 *   MAX_ROWS                            rows of x that share a pass over weights: as many as registers hold sums for
 */
#ifndef INFER_LANES_H
#define INFER_LANES_H
#include "simd.h"

namespace {

#if defined(INFER_SIMD_AVX512)

typedef __m512i u8x64;
typedef __m512i i32x16;
constexpr bool SIGNED_BYTES = false;
constexpr int MAX_ROWS = 8;

INFER_INLINE u8x64 load_bytes(const uint8_t *p) { return _mm512_loadu_si512(p); }
INFER_INLINE void store_bytes(uint8_t *p, u8x64 v) { _mm512_storeu_si512(p, v); }
INFER_INLINE u8x64 low_nibbles(u8x64 v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
INFER_INLINE u8x64 high_nibbles(u8x64 v) { return low_nibbles(_mm512_srli_epi16(v, 4)); }
INFER_INLINE u8x64 subtract_bytes(u8x64 v, int zero) { return _mm512_sub_epi8(v, _mm512_set1_epi8((char)zero)); }
template <int LEFT> INFER_INLINE u8x64 merge_bits(u8x64 low, u8x64 plane, int mask) {
  u8x64 moved = LEFT >= 0 ? _mm512_slli_epi16(plane, LEFT & 7) : _mm512_srli_epi16(plane, -LEFT & 7);
  return _mm512_ternarylogic_epi32(low, moved, _mm512_set1_epi8((char)mask), 0xF8);
}
template <bool EIGHT> INFER_INLINE i32x16 dot(i32x16 acc, u8x64 w, const int8_t *x) {
  int32_t four;
  memcpy(&four, x, 4);
  return _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(four));
}
INFER_INLINE i32x16 set1_int(int32_t v) { return _mm512_set1_epi32(v); }
INFER_INLINE f32x16 to_floats(i32x16 v) { return _mm512_cvtepi32_ps(v); }
INFER_INLINE f32x16 load_u8(const uint8_t *p) {
  return to_floats(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
}

#elif defined(INFER_SIMD_AVX2)

struct u8x64 { __m256i a, b; };
struct i32x16 { __m256i a, b; };
constexpr int MAX_ROWS = 4;

INFER_INLINE u8x64 load_bytes(const uint8_t *p) {
  return {_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 32))};
}
INFER_INLINE void store_bytes(uint8_t *p, u8x64 v) {
  _mm256_storeu_si256((__m256i *)p, v.a), _mm256_storeu_si256((__m256i *)(p + 32), v.b);
}
INFER_INLINE u8x64 low_nibbles(u8x64 v) {
  __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(v.a, mask), _mm256_and_si256(v.b, mask)};
}
INFER_INLINE u8x64 high_nibbles(u8x64 v) {
  return low_nibbles({_mm256_srli_epi16(v.a, 4), _mm256_srli_epi16(v.b, 4)});
}
INFER_INLINE u8x64 subtract_bytes(u8x64 v, int zero) {
  __m256i z = _mm256_set1_epi8((char)zero);
  return {_mm256_sub_epi8(v.a, z), _mm256_sub_epi8(v.b, z)};
}
template <int LEFT> INFER_INLINE __m256i merge_half(__m256i low, __m256i plane, __m256i mask) {
  __m256i moved = LEFT >= 0 ? _mm256_slli_epi16(plane, LEFT & 7) : _mm256_srli_epi16(plane, -LEFT & 7);
  return _mm256_or_si256(low, _mm256_and_si256(moved, mask));
}
template <int LEFT> INFER_INLINE u8x64 merge_bits(u8x64 low, u8x64 plane, int mask) {
  __m256i m = _mm256_set1_epi8((char)mask);
  return {merge_half<LEFT>(low.a, plane.a, m), merge_half<LEFT>(low.b, plane.b, m)};
}

#if defined(INFER_SIMD_AVXVNNI)
constexpr bool SIGNED_BYTES = false;
template <bool EIGHT> INFER_INLINE __m256i dot_half(__m256i acc, __m256i w, __m256i x) {
  return _mm256_dpbusd_avx_epi32(acc, w, x);
}
#else
/* Pairs of products are summed in 16 bits: codes of 6 bits and less fit (2 * 63 * 127), and of 8-bit codes, taken as
 * signed, the sign moves to x (2 * 128 * 127 < 2^15). */
constexpr bool SIGNED_BYTES = true;
template <bool EIGHT> INFER_INLINE __m256i dot_half(__m256i acc, __m256i w, __m256i x) {
  __m256i pairs = EIGHT ? _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)) : _mm256_maddubs_epi16(w, x);
  return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#endif
template <bool EIGHT> INFER_INLINE i32x16 dot(i32x16 acc, u8x64 w, const int8_t *x) {
  int32_t four;
  memcpy(&four, x, 4);
  __m256i xs = _mm256_set1_epi32(four);
  return {dot_half<EIGHT>(acc.a, w.a, xs), dot_half<EIGHT>(acc.b, w.b, xs)};
}
INFER_INLINE i32x16 set1_int(int32_t v) { return {_mm256_set1_epi32(v), _mm256_set1_epi32(v)}; }
INFER_INLINE f32x16 to_floats(i32x16 v) { return {_mm256_cvtepi32_ps(v.a), _mm256_cvtepi32_ps(v.b)}; }
INFER_INLINE f32x16 load_u8(const uint8_t *p) {
  return to_floats({_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)),
                    _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8)))});
}

#elif defined(INFER_SIMD_NEON)

struct u8x64 { uint8x16_t v[4]; };
struct i32x16 { int32x4_t v[4]; };
/* The dot product of Armv8.2 is signed; codes of 6 bits and less are positive either way. */
constexpr bool SIGNED_BYTES = true;
constexpr int MAX_ROWS = 4;

#define INFER_EACH(type, expression)                 \
  type out;                                          \
  for (int i = 0; i < 4; i++) out.v[i] = expression; \
  return out

INFER_INLINE u8x64 load_bytes(const uint8_t *p) { INFER_EACH(u8x64, vld1q_u8(p + 16 * i)); }
INFER_INLINE void store_bytes(uint8_t *p, u8x64 x) { for (int i = 0; i < 4; i++) vst1q_u8(p + 16 * i, x.v[i]); }
INFER_INLINE u8x64 low_nibbles(u8x64 x) { INFER_EACH(u8x64, vandq_u8(x.v[i], vdupq_n_u8(15))); }
INFER_INLINE u8x64 high_nibbles(u8x64 x) { INFER_EACH(u8x64, vshrq_n_u8(x.v[i], 4)); }
INFER_INLINE u8x64 subtract_bytes(u8x64 x, int zero) {
  INFER_EACH(u8x64, vsubq_u8(x.v[i], vdupq_n_u8((uint8_t)zero)));
}
template <int LEFT> INFER_INLINE u8x64 merge_bits(u8x64 low, u8x64 plane, int mask) {
  INFER_EACH(u8x64, vorrq_u8(low.v[i], vandq_u8(vshlq_u8(plane.v[i], vdupq_n_s8(LEFT)), vdupq_n_u8((uint8_t)mask))));
}
template <bool EIGHT> INFER_INLINE i32x16 dot(i32x16 acc, u8x64 w, const int8_t *x) {
  int32_t four;
  memcpy(&four, x, 4);
  int8x16_t xs = vreinterpretq_s8_s32(vdupq_n_s32(four));
  INFER_EACH(i32x16, vdotq_s32(acc.v[i], vreinterpretq_s8_u8(w.v[i]), xs));
}
INFER_INLINE i32x16 set1_int(int32_t v) { INFER_EACH(i32x16, vdupq_n_s32(v)); }
INFER_INLINE f32x16 to_floats(i32x16 x) { INFER_EACH(f32x16, vcvtq_f32_s32(x.v[i])); }
INFER_INLINE f32x16 load_u8(const uint8_t *p) {
  uint8x16_t bytes = vld1q_u8(p);
  uint16x8_t half[2] = {vmovl_u8(vget_low_u8(bytes)), vmovl_u8(vget_high_u8(bytes))};
  INFER_EACH(f32x16, vcvtq_f32_u32(vmovl_u16(i & 1 ? vget_high_u16(half[i / 2]) : vget_low_u16(half[i / 2]))));
}
#undef INFER_EACH

#else /* plain C++ */

/* Calls, not inlined: whole kernels of unrolled lanes take a compiler minutes. */
#define INFER_CALL static __attribute__((noinline, unused))
struct u8x64 { uint8_t v[64]; };
struct i32x16 { int32_t v[16]; };
constexpr bool SIGNED_BYTES = false;
constexpr int MAX_ROWS = 1;

#define INFER_EACH(type, count, expression)              \
  type out;                                              \
  for (int i = 0; i < count; i++) out.v[i] = expression; \
  return out

INFER_INLINE u8x64 load_bytes(const uint8_t *p) {
  u8x64 out;
  memcpy(out.v, p, 64);
  return out;
}
INFER_INLINE void store_bytes(uint8_t *p, const u8x64 &x) { memcpy(p, x.v, 64); }
INFER_CALL u8x64 low_nibbles(const u8x64 &x) { INFER_EACH(u8x64, 64, x.v[i] & 15); }
INFER_CALL u8x64 high_nibbles(const u8x64 &x) { INFER_EACH(u8x64, 64, x.v[i] >> 4); }
INFER_CALL u8x64 subtract_bytes(const u8x64 &x, int zero) { INFER_EACH(u8x64, 64, (uint8_t)(x.v[i] - zero)); }
template <int LEFT> INFER_CALL u8x64 merge_bits(const u8x64 &low, const u8x64 &plane, int mask) {
  INFER_EACH(u8x64, 64, (uint8_t)(low.v[i] | ((LEFT >= 0 ? plane.v[i] << (LEFT & 7) : plane.v[i] >> (-LEFT & 7)) & mask)));
}
template <bool EIGHT> INFER_CALL i32x16 dot(const i32x16 &acc, const u8x64 &w, const int8_t *x) {
  INFER_EACH(i32x16, 16, acc.v[i] + w.v[4 * i] * x[0] + w.v[4 * i + 1] * x[1] + w.v[4 * i + 2] * x[2] + w.v[4 * i + 3] * x[3]);
}
INFER_CALL i32x16 set1_int(int32_t v) { INFER_EACH(i32x16, 16, v); }
INFER_CALL f32x16 to_floats(const i32x16 &x) { INFER_EACH(f32x16, 16, (float)x.v[i]); }
INFER_CALL f32x16 load_u8(const uint8_t *p) { INFER_EACH(f32x16, 16, (float)p[i]); }
#undef INFER_EACH

#endif

}  // namespace
#endif
