// bfloat16 and float16: exact widening to float32, rounding to nearest even.
#pragma once

#include "lanes.h"

namespace jaxlowprec {

/// The float32 with the given bfloat16 bits.
template <class F>
JLP_RULE F bf16_decode(Uint<F> half) {
  return Lanes<F>::from_bits(half << 16);
}

/// The bfloat16 bits nearest to x, ties to even; overflow gives infinity, NaN stays a quiet NaN.
template <class F>
JLP_RULE Uint<F> bf16_encode(F x) {
  const Uint<F> u = Lanes<F>::bits(x);
  const Uint<F> rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  const Uint<F> quiet = (u >> 16) | 0x40u;
  return (u & kMagnitudeBits) > kInfinityBits ? quiet : rounded;
}

/// The float32 with the given float16 bits. Half subnormals are ordinary float32 numbers and are kept.
template <class F>
JLP_RULE F f16_decode(Uint<F> half) {
  using L = Lanes<F>;
  const Uint<F> sign = (half & 0x8000u) << 16;
  const Uint<F> m = half & 0x7FFFu;
  const Uint<F> normal = (m << 13) + (112u << 23);
  const Uint<F> special = normal + (112u << 23);                               // exponent 31: infinity and NaN
  const Uint<F> subnormal = L::bits(L::to_float(m) * 5.9604644775390625e-8f);  // m * 2^-24, exact
  const Uint<F> finite = m < 0x0400u ? subnormal : normal;
  return L::from_bits(sign | (m >= 0x7C00u ? special : finite));
}

/// The float16 bits nearest to x, ties to even, subnormal halves included; overflow gives infinity, NaN a quiet NaN.
template <class F>
JLP_RULE Uint<F> f16_encode(F x) {
  using L = Lanes<F>;
  const Uint<F> sign = (L::bits(x) >> 16) & 0x8000u;
  const Uint<F> u = magnitude(x);
  const Uint<F> normal = ((u + 0xFFFu + ((u >> 13) & 1u)) >> 13) - (112u << 10);
  const Uint<F> subnormal = L::bits(L::from_bits(u) + 0.5f) - 0x3F000000u;  // the sum's last place is 2^-24
  const Uint<F> finite = u < 0x38800000u ? subnormal : normal;              // 2^-14
  const Uint<F> large = u > kInfinityBits ? ((u >> 13) & 0x3FFu) | 0x7E00u : fill<F>(0x7C00u);
  return sign | (u >= 0x477FF000u ? large : finite);  // 65520 rounds to infinity
}

}  // namespace jaxlowprec
