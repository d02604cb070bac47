// The scale of a line of 8-bit codes: a row, or a column (numerics.md 18).
#pragma once

#include "lanes.h"

namespace jaxlowprec {

constexpr float kLeastLineScale = 1.17549435e-38f;         // 2^-126: a normal number, whose reciprocal is one too
constexpr float kMostLineEncode = 8.5070591730234616e37f;  // its reciprocal

struct LineScaleRule {
  float maximum;      // the amax becomes this many scales
  float least_scale;  // no scale is smaller
  float of_zeros;     // the scale where it would be 0
  bool divides;       // elements are divided by the scale; else multiplied by fl(maximum / amax)
};

/// What the elements of a line are quantised with.
template <class F>
struct LineFactors {
  F scale;    // stored; NaN where the line is poisoned
  F unit;     // a power of two that elements are multiplied by first, which keeps remainders of divisions normal
  F divisor;  // the scale times the unit, where elements are divided
  F encode;   // what elements are multiplied by, or the reciprocal of the divisor
};

/// From the magnitude bits of lines' amaxes. `round`: to the type of stored scales.
template <class F, class Round>
JLP_RULE LineFactors<F> line_factors(Uint<F> amax, const LineScaleRule& rule, Round round) {
  using L = Lanes<F>;
  const F one = L::splat(1.0f), a = L::from_bits(amax < kMinNormalBits || amax >= kInfinityBits ? fill<F>(0) : amax);
  const F quotient = L::max(a / rule.maximum, L::splat(kLeastLineScale));
  const F exact = L::max(a > 0.0f ? quotient : L::splat(0.0f), L::splat(rule.least_scale));
  F scale = round(exact);
  scale = scale == 0.0f ? L::splat(rule.of_zeros) : scale;
  const F infinity = L::from_bits(fill<F>(kInfinityBits));
  LineFactors<F> found;
  found.scale = amax >= kInfinityBits || scale == infinity ? L::from_bits(fill<F>(kNaNBits)) : scale;
  found.unit = rule.divides && scale < 5.421010862427522e-20f ? L::splat(1.8446744073709552e19f) : one;  // 2^-64, 2^64
  found.divisor = scale * found.unit;
  const F multiplies = a > 0.0f ? L::min(rule.maximum / a, L::splat(kMostLineEncode)) : one;
  found.encode = rule.divides ? 1.0f / found.divisor : multiplies;
  return found;
}

/// fl(x / divisor), by its reciprocal: a quotient's remainder is exact and corrects it (Markstein). Where the remainder is
/// below the least normal number, so is the quotient below the half of the least code.
template <class F>
JLP_RULE F line_quotient(F x, F divisor, F reciprocal) {
  using L = Lanes<F>;
  const F q = x * reciprocal;
  return L::fused_multiply_add(L::fused_multiply_add(-q, divisor, x), reciprocal, q);
}

/// 8-bit integers, as a type of codes beside the floats'.
struct Int8 {
  static constexpr bool kPacked = false;
};

constexpr float kInt8Max = 127.0f;

template <class F>
JLP_RULE F int8_decode(Uint<F> byte) {
  return Lanes<F>::to_float(byte ^ 0x80u) - 128.0f;
}

/// The low byte: the integer nearest to y, ties to even, from `least` (-127 or -128) to 127.
template <class F>
JLP_RULE Uint<F> int8_nearest(F y, float least) {
  using L = Lanes<F>;
  return L::bits(L::min(L::max(y, L::splat(least)), L::splat(kInt8Max)) + 12582912.0f);  // 1.5 * 2^23
}

/// The low byte: y rounded stochastically by one random byte, from -127 to 127 (numerics.md 4): a carry out of fixed point.
template <class F>
JLP_RULE Uint<F> int8_stochastic(F y, Uint<F> byte) {
  using L = Lanes<F>;
  const Uint<F> fixed = L::truncate(L::min(absolute(y), L::splat(kInt8Max)) * 512.0f);
  const Uint<F> code = (fixed + 2u * byte + 1u) >> 9, negative = fill<F>(0u) - (L::bits(y) >> 31);
  return (code ^ negative) - negative;
}

}  // namespace jaxlowprec
