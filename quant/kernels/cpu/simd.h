/* Sixteen floats as one value, on every instruction set: one AVX-512 register, two of AVX2, four of NEON, or an array.
 *
 * A file that includes this defines one of INFER_SIMD_AVX512, INFER_SIMD_AVX2 and INFER_SIMD_NEON, or none for plain
 * C++, after its `#pragma GCC target`. Everything has internal linkage, so that no function compiled for one
 * instruction set can be linked into another file. All four give the same bits, signs of NaN aside:
 *
 *   fma         a * b + c, rounded once
 *   max_of      a > b ? a : b, so b where either is NaN
 *   round_even  to the nearest integer, ties to even; |x| < 2^22
 *   f16, bf16   stores round to nearest even
 *   store_i8    takes integers from -128 to 127
 *   sum_of, maximum_of   lanes combined 8, 4, 2 and 1 apart
 */
#ifndef INFER_SIMD_H
#define INFER_SIMD_H
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(INFER_SIMD_AVX512) || defined(INFER_SIMD_AVX2)
#include <immintrin.h>
#elif defined(INFER_SIMD_NEON)
#include <arm_neon.h>
#endif

#if defined(INFER_SIMD_AVX512) || defined(INFER_SIMD_AVX2) || defined(INFER_SIMD_NEON)
#define INFER_INLINE static inline __attribute__((always_inline, unused))
#else
#define INFER_INLINE static __attribute__((unused)) /* 16 calls of fmaf everywhere would make 300 KB of code */
#endif

namespace {

#if defined(INFER_SIMD_AVX512)

typedef __m512 f32x16;
typedef __mmask16 mask16;

INFER_INLINE f32x16 set1(float x) { return _mm512_set1_ps(x); }
INFER_INLINE f32x16 load(const float *p) { return _mm512_loadu_ps(p); }
INFER_INLINE void store(float *p, f32x16 v) { _mm512_storeu_ps(p, v); }
INFER_INLINE f32x16 add(f32x16 a, f32x16 b) { return _mm512_add_ps(a, b); }
INFER_INLINE f32x16 sub(f32x16 a, f32x16 b) { return _mm512_sub_ps(a, b); }
INFER_INLINE f32x16 mul(f32x16 a, f32x16 b) { return _mm512_mul_ps(a, b); }
INFER_INLINE f32x16 div_of(f32x16 a, f32x16 b) { return _mm512_div_ps(a, b); }
INFER_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return _mm512_fmadd_ps(a, b, c); }
INFER_INLINE f32x16 max_of(f32x16 a, f32x16 b) { return _mm512_max_ps(a, b); }
INFER_INLINE f32x16 abs_of(f32x16 a) { return _mm512_abs_ps(a); }
INFER_INLINE mask16 less(f32x16 a, f32x16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
INFER_INLINE f32x16 select(mask16 m, f32x16 yes, f32x16 no) { return _mm512_mask_blend_ps(m, no, yes); }
INFER_INLINE f32x16 copy_sign(f32x16 magnitude, f32x16 sign) {
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_set1_epi32(INT32_MIN), _mm512_castps_si512(sign),
                                                       _mm512_castps_si512(magnitude), 0xCA));
}
INFER_INLINE f32x16 swap_pairs(f32x16 a) { return _mm512_permute_ps(a, 0xB1); }
INFER_INLINE f32x16 lane_index() {
  return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
/* 2^n from magic + n, the sum of 1.5 * 2^23 and an integer from -126 to 127 */
INFER_INLINE f32x16 power_of_two(f32x16 magic_n) {
  __m512i n = _mm512_slli_epi32(_mm512_castps_si512(magic_n), 23);
  return _mm512_castsi512_ps(_mm512_add_epi32(n, _mm512_set1_epi32(0x3F800000)));
}
INFER_INLINE f32x16 load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INFER_INLINE f32x16 load_bf16(const uint16_t *p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
INFER_INLINE f32x16 load_i8(const int8_t *p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
INFER_INLINE void store_f16(uint16_t *p, f32x16 v) {
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
INFER_INLINE void store_i8(int8_t *p, f32x16 v) {
  _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
}
/* table[codes[lane] >> SHIFT & 15] */
template <int SHIFT> INFER_INLINE f32x16 look_up(const uint32_t *codes, const float *table) {
  return _mm512_permutexvar_ps(_mm512_srli_epi32(_mm512_loadu_si512(codes), SHIFT), _mm512_loadu_ps(table));
}
INFER_INLINE bool all_of(mask16 m) { return m == 0xFFFF; }
INFER_INLINE float sum_of(f32x16 v) {
  __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
INFER_INLINE float maximum_of(f32x16 v) {
  __m256 a = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}

#elif defined(INFER_SIMD_AVX2)

struct f32x16 { __m256 a, b; };
struct mask16 { __m256 a, b; };

INFER_INLINE f32x16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INFER_INLINE f32x16 load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INFER_INLINE void store(float *p, f32x16 v) { _mm256_storeu_ps(p, v.a), _mm256_storeu_ps(p + 8, v.b); }
INFER_INLINE f32x16 add(f32x16 x, f32x16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
INFER_INLINE f32x16 sub(f32x16 x, f32x16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
INFER_INLINE f32x16 mul(f32x16 x, f32x16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INFER_INLINE f32x16 div_of(f32x16 x, f32x16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
INFER_INLINE f32x16 fma(f32x16 x, f32x16 y, f32x16 z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
INFER_INLINE f32x16 max_of(f32x16 x, f32x16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
INFER_INLINE f32x16 abs_of(f32x16 x) {
  __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
INFER_INLINE mask16 less(f32x16 x, f32x16 y) {
  return {_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)};
}
INFER_INLINE f32x16 select(mask16 m, f32x16 yes, f32x16 no) {
  return {_mm256_blendv_ps(no.a, yes.a, m.a), _mm256_blendv_ps(no.b, yes.b, m.b)};
}
INFER_INLINE f32x16 copy_sign(f32x16 magnitude, f32x16 sign) {
  __m256 bit = _mm256_set1_ps(-0.0f);
  return {_mm256_or_ps(_mm256_andnot_ps(bit, magnitude.a), _mm256_and_ps(bit, sign.a)),
          _mm256_or_ps(_mm256_andnot_ps(bit, magnitude.b), _mm256_and_ps(bit, sign.b))};
}
INFER_INLINE f32x16 swap_pairs(f32x16 x) { return {_mm256_permute_ps(x.a, 0xB1), _mm256_permute_ps(x.b, 0xB1)}; }
INFER_INLINE f32x16 lane_index() {
  return {_mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_ps(8, 9, 10, 11, 12, 13, 14, 15)};
}
INFER_INLINE __m256 power_of_two_half(__m256 magic_n) {
  __m256i n = _mm256_slli_epi32(_mm256_castps_si256(magic_n), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(n, _mm256_set1_epi32(0x3F800000)));
}
INFER_INLINE f32x16 power_of_two(f32x16 magic_n) {
  return {power_of_two_half(magic_n.a), power_of_two_half(magic_n.b)};
}
INFER_INLINE f32x16 load_f16(const uint16_t *p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
INFER_INLINE __m256 load_bf16_half(const uint16_t *p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
INFER_INLINE f32x16 load_bf16(const uint16_t *p) { return {load_bf16_half(p), load_bf16_half(p + 8)}; }
INFER_INLINE f32x16 load_i8(const int8_t *p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p))),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8))))};
}
INFER_INLINE void store_f16(uint16_t *p, f32x16 v) {
  _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(v.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i *)(p + 8), _mm256_cvtps_ph(v.b, _MM_FROUND_TO_NEAREST_INT));
}
INFER_INLINE void store_i8(int8_t *p, f32x16 v) {
  __m256i pairs = _mm256_packs_epi32(_mm256_cvtps_epi32(v.a), _mm256_cvtps_epi32(v.b)); /* a0 b0 a1 b1 by four lanes */
  pairs = _mm256_permute4x64_epi64(pairs, 0xD8);
  _mm_storeu_si128((__m128i *)p, _mm_packs_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1)));
}
INFER_INLINE __m256 look_up_half(__m256i at, const float *table) {
  __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), at);
  __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), at);
  return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(at, 28)));
}
template <int SHIFT> INFER_INLINE f32x16 look_up(const uint32_t *codes, const float *table) {
  const __m256i *from = (const __m256i *)codes;
  return {look_up_half(_mm256_srli_epi32(_mm256_loadu_si256(from), SHIFT), table),
          look_up_half(_mm256_srli_epi32(_mm256_loadu_si256(from + 1), SHIFT), table)};
}
INFER_INLINE bool all_of(mask16 m) { return _mm256_movemask_ps(_mm256_and_ps(m.a, m.b)) == 0xFF; }
INFER_INLINE float sum_of(f32x16 v) {
  __m256 a = _mm256_add_ps(v.a, v.b);
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
INFER_INLINE float maximum_of(f32x16 v) {
  __m256 a = _mm256_max_ps(v.a, v.b);
  __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}

#elif defined(INFER_SIMD_NEON)

struct f32x16 { float32x4_t v[4]; };
struct mask16 { uint32x4_t v[4]; };

#define INFER_EACH(expression)                    \
  f32x16 out;                                     \
  for (int i = 0; i < 4; i++) out.v[i] = expression; \
  return out

INFER_INLINE f32x16 set1(float x) { INFER_EACH(vdupq_n_f32(x)); }
INFER_INLINE f32x16 load(const float *p) { INFER_EACH(vld1q_f32(p + 4 * i)); }
INFER_INLINE void store(float *p, f32x16 x) { for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, x.v[i]); }
INFER_INLINE f32x16 add(f32x16 x, f32x16 y) { INFER_EACH(vaddq_f32(x.v[i], y.v[i])); }
INFER_INLINE f32x16 sub(f32x16 x, f32x16 y) { INFER_EACH(vsubq_f32(x.v[i], y.v[i])); }
INFER_INLINE f32x16 mul(f32x16 x, f32x16 y) { INFER_EACH(vmulq_f32(x.v[i], y.v[i])); }
INFER_INLINE f32x16 div_of(f32x16 x, f32x16 y) { INFER_EACH(vdivq_f32(x.v[i], y.v[i])); }
INFER_INLINE f32x16 fma(f32x16 x, f32x16 y, f32x16 z) { INFER_EACH(vfmaq_f32(z.v[i], x.v[i], y.v[i])); }
INFER_INLINE f32x16 max_of(f32x16 x, f32x16 y) { INFER_EACH(vbslq_f32(vcgtq_f32(x.v[i], y.v[i]), x.v[i], y.v[i])); }
INFER_INLINE f32x16 abs_of(f32x16 x) { INFER_EACH(vabsq_f32(x.v[i])); }
INFER_INLINE mask16 less(f32x16 x, f32x16 y) {
  mask16 out;
  for (int i = 0; i < 4; i++) out.v[i] = vcltq_f32(x.v[i], y.v[i]);
  return out;
}
INFER_INLINE f32x16 select(mask16 m, f32x16 yes, f32x16 no) { INFER_EACH(vbslq_f32(m.v[i], yes.v[i], no.v[i])); }
INFER_INLINE f32x16 copy_sign(f32x16 magnitude, f32x16 sign) {
  INFER_EACH(vbslq_f32(vdupq_n_u32(0x80000000u), sign.v[i], magnitude.v[i]));
}
INFER_INLINE f32x16 swap_pairs(f32x16 x) { INFER_EACH(vrev64q_f32(x.v[i])); }
INFER_INLINE f32x16 lane_index() {
  const float first[4] = {0, 1, 2, 3};
  INFER_EACH(vaddq_f32(vld1q_f32(first), vdupq_n_f32(4.0f * i)));
}
INFER_INLINE f32x16 power_of_two(f32x16 magic_n) {
  int32x4_t one = vdupq_n_s32(0x3F800000);
  INFER_EACH(vreinterpretq_f32_s32(vaddq_s32(vshlq_n_s32(vreinterpretq_s32_f32(magic_n.v[i]), 23), one)));
}
INFER_INLINE f32x16 load_f16(const uint16_t *p) { INFER_EACH(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)))); }
INFER_INLINE f32x16 load_bf16(const uint16_t *p) {
  INFER_EACH(vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)));
}
INFER_INLINE f32x16 load_i8(const int8_t *p) {
  int8x16_t bytes = vld1q_s8(p);
  int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
  return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
           vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))}};
}
INFER_INLINE void store_f16(uint16_t *p, f32x16 x) {
  for (int i = 0; i < 4; i++) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(x.v[i])));
}
INFER_INLINE void store_i8(int8_t *p, f32x16 x) {
  int16x4_t half[4];
  for (int i = 0; i < 4; i++) half[i] = vmovn_s32(vcvtnq_s32_f32(x.v[i]));
  vst1_s8(p, vmovn_s16(vcombine_s16(half[0], half[1])));
  vst1_s8(p + 8, vmovn_s16(vcombine_s16(half[2], half[3])));
}
INFER_INLINE bool all_of(mask16 m) {
  return vminvq_u32(vandq_u32(vandq_u32(m.v[0], m.v[1]), vandq_u32(m.v[2], m.v[3]))) != 0;
}
INFER_INLINE float sum_of(f32x16 x) {
  float32x4_t a = vaddq_f32(vaddq_f32(x.v[0], x.v[2]), vaddq_f32(x.v[1], x.v[3]));
  float32x2_t b = vadd_f32(vget_low_f32(a), vget_high_f32(a));
  return vget_lane_f32(b, 0) + vget_lane_f32(b, 1);
}
INFER_INLINE float32x4_t max_quad(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
INFER_INLINE float maximum_of(f32x16 x) {
  float32x4_t a = max_quad(max_quad(x.v[0], x.v[2]), max_quad(x.v[1], x.v[3]));
  a = max_quad(a, vextq_f32(a, a, 2));
  a = max_quad(a, vextq_f32(a, a, 1));
  return vgetq_lane_f32(a, 0);
}
#undef INFER_EACH

#else /* plain C++ */

struct f32x16 { float v[16]; };
struct mask16 { bool v[16]; };

INFER_INLINE uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
INFER_INLINE float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }
INFER_INLINE float half_to_float(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7FFF;
  if (rest >= 0x7C00) return float_of(sign | 0x7F800000 | (rest & 0x3FF) << 13 | (rest > 0x7C00 ? 0x400000 : 0));
  if (rest >= 0x0400) return float_of(sign | ((rest << 13) + (112u << 23)));
  float magnitude = (float)rest * float_of(103u << 23); /* 2^-24 */
  return sign ? -magnitude : magnitude;
}
INFER_INLINE uint16_t float_to_half(float x) {
  uint32_t u = bits_of(x), sign = u >> 16 & 0x8000, rest = u & 0x7FFFFFFF;
  if (rest > 0x7F800000) return (uint16_t)(sign | 0x7E00 | (rest >> 13 & 0x3FF));
  if (rest >= 0x477FF000) return (uint16_t)(sign | 0x7C00); /* 65520 and more round to infinity */
  if (rest < 0x38800000) { /* below 2^-14: adding 0.5 leaves the subnormal, rounded, in the low bits */
    return (uint16_t)(sign | (bits_of(float_of(rest) + 0.5f) - 0x3F000000));
  }
  return (uint16_t)(sign | ((rest - 0x38000000 + 0xFFF + (rest >> 13 & 1)) >> 13));
}

#define INFER_EACH(expression)                        \
  f32x16 out;                                         \
  for (int i = 0; i < 16; i++) out.v[i] = expression; \
  return out

INFER_INLINE f32x16 set1(float x) { INFER_EACH(x); }
INFER_INLINE f32x16 load(const float *p) { INFER_EACH(p[i]); }
INFER_INLINE void store(float *p, f32x16 x) { for (int i = 0; i < 16; i++) p[i] = x.v[i]; }
INFER_INLINE f32x16 add(f32x16 x, f32x16 y) { INFER_EACH(x.v[i] + y.v[i]); }
INFER_INLINE f32x16 sub(f32x16 x, f32x16 y) { INFER_EACH(x.v[i] - y.v[i]); }
INFER_INLINE f32x16 mul(f32x16 x, f32x16 y) { INFER_EACH(x.v[i] * y.v[i]); }
INFER_INLINE f32x16 div_of(f32x16 x, f32x16 y) { INFER_EACH(x.v[i] / y.v[i]); }
INFER_INLINE f32x16 fma(f32x16 x, f32x16 y, f32x16 z) { INFER_EACH(__builtin_fmaf(x.v[i], y.v[i], z.v[i])); }
INFER_INLINE f32x16 max_of(f32x16 x, f32x16 y) { INFER_EACH(x.v[i] > y.v[i] ? x.v[i] : y.v[i]); }
INFER_INLINE f32x16 abs_of(f32x16 x) { INFER_EACH(__builtin_fabsf(x.v[i])); }
INFER_INLINE mask16 less(f32x16 x, f32x16 y) {
  mask16 out;
  for (int i = 0; i < 16; i++) out.v[i] = x.v[i] < y.v[i];
  return out;
}
INFER_INLINE f32x16 select(mask16 m, f32x16 yes, f32x16 no) { INFER_EACH(m.v[i] ? yes.v[i] : no.v[i]); }
INFER_INLINE f32x16 copy_sign(f32x16 magnitude, f32x16 sign) {
  INFER_EACH(__builtin_copysignf(magnitude.v[i], sign.v[i]));
}
INFER_INLINE f32x16 swap_pairs(f32x16 x) { INFER_EACH(x.v[i ^ 1]); }
INFER_INLINE f32x16 lane_index() { INFER_EACH((float)i); }
INFER_INLINE f32x16 power_of_two(f32x16 magic_n) { INFER_EACH(float_of((bits_of(magic_n.v[i]) << 23) + 0x3F800000)); }
INFER_INLINE f32x16 load_f16(const uint16_t *p) { INFER_EACH(half_to_float(p[i])); }
INFER_INLINE f32x16 load_bf16(const uint16_t *p) { INFER_EACH(float_of((uint32_t)p[i] << 16)); }
INFER_INLINE f32x16 load_i8(const int8_t *p) { INFER_EACH((float)p[i]); }
INFER_INLINE void store_f16(uint16_t *p, f32x16 x) { for (int i = 0; i < 16; i++) p[i] = float_to_half(x.v[i]); }
#undef INFER_EACH
INFER_INLINE void store_i8(int8_t *p, f32x16 x) { for (int i = 0; i < 16; i++) p[i] = (int8_t)x.v[i]; }
INFER_INLINE bool all_of(mask16 m) {
  bool all = true;
  for (int i = 0; i < 16; i++) all = all && m.v[i];
  return all;
}
INFER_INLINE float sum_of(f32x16 x) {
  for (int apart = 8; apart; apart /= 2)
    for (int i = 0; i < apart; i++) x.v[i] += x.v[i + apart];
  return x.v[0];
}
INFER_INLINE float maximum_of(f32x16 x) {
  for (int apart = 8; apart; apart /= 2)
    for (int i = 0; i < apart; i++) x.v[i] = x.v[i] > x.v[i + apart] ? x.v[i] : x.v[i + apart];
  return x.v[0];
}

#endif

/* What follows is the same on every instruction set. */

#if !defined(INFER_SIMD_AVX512) && !defined(INFER_SIMD_AVX2)
template <int SHIFT> INFER_INLINE f32x16 look_up(const uint32_t *codes, const float *table) {
  float lanes[16];
  for (int i = 0; i < 16; i++) lanes[i] = table[codes[i] >> SHIFT & 15];
  return load(lanes);
}
#endif

const float MAGIC = 12582912.0f; /* 1.5 * 2^23: added and subtracted, it rounds to an integer */

INFER_INLINE f32x16 round_even(f32x16 x) { return sub(add(x, set1(MAGIC)), set1(MAGIC)); }

INFER_INLINE uint16_t float_to_bf16(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  if ((u & 0x7FFFFFFF) > 0x7F800000) return (uint16_t)(u >> 16 | 0x40); /* NaN stays NaN */
  return (uint16_t)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}
INFER_INLINE void store_bf16(uint16_t *p, f32x16 v) {
  float lanes[16];
  store(lanes, v);
  for (int i = 0; i < 16; i++) p[i] = float_to_bf16(lanes[i]);
}

/* Element types of stored tensors, all widened to f32 by load. */
struct f16 { uint16_t bits; };
struct bf16 { uint16_t bits; };

INFER_INLINE f32x16 load(const f16 *p) { return load_f16(&p->bits); }
INFER_INLINE f32x16 load(const bf16 *p) { return load_bf16(&p->bits); }
INFER_INLINE f32x16 load(const int8_t *p) { return load_i8(p); }

/* The first n lanes from memory, the others 0. */
template <class T> INFER_INLINE f32x16 load_first(const T *p, int n) {
  T lanes[16] = {};
  memcpy(lanes, p, (size_t)n * sizeof(T));
  return load(lanes);
}
INFER_INLINE void store_first(float *p, f32x16 v, int n) {
  float lanes[16];
  store(lanes, v);
  memcpy(p, lanes, (size_t)n * sizeof(float));
}

}  // namespace
#endif
