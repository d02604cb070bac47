// Quotients and roots, rounded to nearest: what the compiler makes of `/` and sqrtf, without its branches for numbers out of
// range. They are in range here, so that remainders are normal numbers.
//
// A quotient's remainder corrects it (Markstein). Written as q d - x and subtracted, it leaves a quotient of 0 its sign.
#pragma once

#include "../intrinsics.cuh"

namespace jaxlowprec {
namespace cuda {

/// A divisor of many numbers, and the float32 number nearest to its reciprocal.
struct Divisor {
  float divisor, inverse;
};

JLP_DEVICE Divisor divisor_of(float x) { return {x, 1.0f / x}; }

/// x / d: |x| is 0 or from 2^-90 to 2^92, d from 2^-20 to 1.
JLP_DEVICE float quotient(float x, const Divisor& d) {
  const float near = x * d.inverse;
  return __fmaf_rn(-__fmaf_rn(near, d.divisor, -x), d.inverse, near);
}

/// x / d: |x| is 0 or from 2^-90 to 2^61, d from 2^-50 to 2^27.
JLP_DEVICE float quotient(float x, float d) {
  const float first = near_reciprocal(d);
  return quotient(x, Divisor{d, __fmaf_rn(first, __fmaf_rn(-d, first, 1.0f), first)});
}

/// The root of x, from 2^-100 on.
JLP_DEVICE float root(float x) {
  const float inverse = near_inverse_root(x), near = x * inverse;
  return __fmaf_rn(__fmaf_rn(-near, near, x), 0.5f * inverse, near);
}

}  // namespace cuda
}  // namespace jaxlowprec
