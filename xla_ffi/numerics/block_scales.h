// Scales that follow from the largest magnitude they are for: float32 of 8-bit floats, powers of two (E8M0) of MX.
#pragma once

#include "float8.h"
#include "lanes.h"

namespace jaxlowprec {

// --- The float32 scale of 8-bit floats, a block or a tensor (numerics.md 5 and 7).

struct Float8ScaleRule {
  float maximum;       // the largest element
  float amax_epsilon;  // the least amax to scale by
  bool power_of_two;   // rounded down, so that nothing saturates
};

/// What elements are multiplied by, from the magnitude bits of their amax; NaN where that is not finite. At most 2^126, so
/// that its inverse is normal.
template <class F>
JLP_RULE F float8_encode_scale(Uint<F> amax, const Float8ScaleRule& rule) {
  using L = Lanes<F>;
  const F a = L::max(L::flush(L::from_bits(amax)), L::splat(Lanes<float>::flush(rule.amax_epsilon)));
  const F exact = L::min(rule.maximum / a, L::splat(8.5070591730234616e37f));
  const F down = L::from_bits(L::bits(exact) & (rule.power_of_two ? 0xFF800000u : 0xFFFFFFFFu));
  const F scale = a == 0.0f ? L::splat(1.0f) : down;
  return amax >= kInfinityBits ? L::from_bits(fill<F>(kNaNBits)) : scale;
}

/// The stored scale.
template <class F>
JLP_RULE F float8_decode_scale(F encode) {
  using L = Lanes<F>;
  const F inverse = L::flush(1.0f / encode);
  return encode != encode ? L::from_bits(fill<F>(kNaNBits)) : inverse;
}

/// The encode scale of a tensor from its amax, or as given; NaN where that is not finite, for a negative amax, and for a
/// given scale that nothing could be decoded with.
JLP_RULE float float8_tensor_encode_scale(float amax_or_scale, bool is_scale, const Float8ScaleRule& rule) {
  using L = Lanes<float>;
  const float scale = L::flush(amax_or_scale);
  if (!is_scale) return scale < 0.0f ? L::from_bits(kNaNBits) : float8_encode_scale<float>(magnitude(scale), rule);
  return scale > 0.0f && magnitude(scale) < kInfinityBits ? scale : L::from_bits(kNaNBits);
}

// --- MX formats: a power of two (E8M0) a block of 32 (numerics.md 6).

/// The properties of an element type that its block scales depend on.
struct MxElement {
  float inverse_maximum;
  uint32_t largest_exponent;  // of the largest element
  uint32_t half_unit;         // of an element's mantissa, in the bits of a float32
};
template <class Element>
constexpr MxElement kMxElement = {1.0f / Element::kMax, Element::kLargestExponent, 1u << (22 - Element::kMantissaBits)};

namespace detail {

/// The exponent of a non-zero finite block, which is at least 1 so that the scale is normal; 0 and NaN for the others.
template <class F>
JLP_RULE Uint<F> mx_scale_of(Uint<F> amax, Uint<F> exponent) {
  const Uint<F> finite = amax < kMinNormalBits ? fill<F>(0u) : exponent;
  return amax >= kInfinityBits ? fill<F>(kE8M0NaN) : finite;
}

}  // namespace detail

/// The least power of two that no element exceeds the largest code by, from the magnitude bits of a block's amax.
template <class F>
JLP_RULE Uint<F> mx_scale_up(Uint<F> amax, const MxElement& element) {
  using L = Lanes<F>;
  const Uint<F> up = e8m0_encode_up(L::flush(L::from_bits(amax) * element.inverse_maximum));
  return detail::mx_scale_of<F>(amax, up < 1u ? fill<F>(1u) : up);
}

/// amax's exponent less the largest element's, after adding `rounding` to amax's bits: nothing for the rule "floor", half a
/// unit of the element's mantissa for "even". Elements may exceed the largest code.
template <class F>
JLP_RULE Uint<F> mx_scale_floor(Uint<F> amax, const MxElement& element, uint32_t rounding) {
  const Uint<F> exponent = (amax + rounding) >> 23;
  return detail::mx_scale_of<F>(amax,
                                exponent > element.largest_exponent ? exponent - element.largest_exponent : fill<F>(1u));
}

/// What a block's elements are multiplied by: 2^(127 - scale), which is normal for every scale above; NaN for NaN.
template <class F>
JLP_RULE F mx_encode(Uint<F> scale) {
  const Uint<F> reciprocal = (254u - scale) << 23;
  return Lanes<F>::from_bits(scale == kE8M0NaN ? fill<F>(kNaNBits) : reciprocal);
}

}  // namespace jaxlowprec
