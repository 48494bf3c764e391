/* Elementary functions on sixteen floats; the same bits on every instruction set.
 *
 * exp: x = n ln 2 + r with ln 2 in two parts (Cody and Waite), e^r = 1 + r + r^2 P(r) with a minimax P of degree 4 on
 * |r| <= ln 2 / 2 (relative error 2^-28 before rounding); within 1 ulp from -87 to 88.37, 0 below, infinity above.
 * tanh: x + x^3 Q(x^2) with a minimax Q of degree 4 below 0.625, 1 - 2 / (e^2|x| + 1) above; within 2 ulp. */
#ifndef INFER_SIMD_MATH_H
#define INFER_SIMD_MATH_H
#include "simd.h"

namespace {

/* e^x for x <= 0 or NaN; exactly 1 at 0 and 0 below -87 */
INFER_INLINE f32x16 exp_negative(f32x16 x) {
  f32x16 magic_n = fma(x, set1(1.44269504f), set1(MAGIC));
  f32x16 n = sub(magic_n, set1(MAGIC));
  f32x16 r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  f32x16 p = fma(r, set1(0.00138144671f), set1(0.00836878031f));
  p = fma(p, r, set1(0.0416683942f));
  p = fma(p, r, set1(0.166665201f));
  p = fma(p, r, set1(0.499999934f));
  f32x16 y = add(fma(mul(r, r), p, r), set1(1.0f));
  return select(less(x, set1(-87.0f)), set1(0.0f), mul(y, power_of_two(magic_n)));
}

INFER_INLINE f32x16 exp_of(f32x16 x) {
  return select(less(set1(88.37f), x), set1(__builtin_inff()), exp_negative(x));
}

INFER_INLINE f32x16 tanh_of(f32x16 x) {
  f32x16 size = abs_of(x), z = mul(x, x);
  f32x16 q = fma(z, set1(-0.00566124366f), set1(0.0206024781f));
  q = fma(q, z, set1(-0.0537294013f));
  q = fma(q, z, set1(0.133313315f));
  q = fma(q, z, set1(-0.333332784f));
  f32x16 small = fma(mul(x, z), q, x);
  f32x16 large = sub(set1(1.0f), div_of(set1(2.0f), add(exp_of(add(size, size)), set1(1.0f))));
  return select(less(set1(0.625f), size), copy_sign(large, x), small);
}

/* cap * tanh(x / cap) */
INFER_INLINE f32x16 softcap_of(f32x16 x, f32x16 cap) { return mul(cap, tanh_of(div_of(x, cap))); }

/* x / (1 + e^-x) */
INFER_INLINE f32x16 silu_of(f32x16 x) {
  return div_of(x, add(set1(1.0f), exp_of(sub(set1(0.0f), x))));
}

/* 0.5 x (1 + tanh u) with u = sqrt(2 / pi) (x + 0.044715 x^3), written as x / (1 + e^-2u) */
INFER_INLINE f32x16 gelu_tanh_of(f32x16 x) {
  f32x16 inner = fma(mul(mul(x, x), set1(0.044715f)), x, x);
  return div_of(x, add(set1(1.0f), exp_of(mul(inner, set1(-1.59576912f)))));
}

}  // namespace
#endif
